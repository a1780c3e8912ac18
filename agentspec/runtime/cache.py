"""The disk cache: bytes under text keys, kept between processes, none of which is ever executed.

It is built on ``diskcache``, which unpickles its rows. Here a row that is not plain bytes is a miss before it is read.
No value lies in a file of its own, whose name a row could choose. A value carries its key and its digest. The folder
must belong to the user alone.

A failing cache costs time, never a result: an unreadable value is a miss, a value that cannot be written is dropped. A
damaged database is set aside (as ``cache.db.damaged``) for a new one.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import diskcache
from diskcache.core import DEFAULT_SETTINGS, METADATA, MODE_RAW

from agentspec.runtime.paths import check_private, own_folder, root

SIZE_LIMIT = 2**30  # bytes; the oldest entries are evicted first
WAIT_SECONDS = 1.0  # for a lock of another process; computing again is cheaper than a longer wait

_FRAME = b"agentspec cache 1\n"
_DIGEST_SIZE = hashlib.sha256().digest_size

T = TypeVar("T")


class DiskCache:
    """Bytes under text keys. Safe to share between threads and processes; a connection lives for one operation.

    Args:
        folder: made with mode 0700 if it is missing; by default ``entries`` below ``root()``.
        size_limit: bytes to keep, about.

    Raises:
        CacheError: for a folder that is not the user's own, or that others may enter. An unusable folder (a full or
            read-only disk, a locked or foreign database) makes a cache that keeps nothing.
    """

    def __init__(self, folder: Path | None = None, size_limit: int = SIZE_LIMIT) -> None:
        self._folder, self._size_limit = folder or root() / "entries", size_limit
        try:
            check_private(own_folder(self._folder))
        except OSError:
            self._cache = None
            return
        self._cache = self._open()

    def _open(self, again: bool = True) -> diskcache.Cache | None:
        """Open the database, made anew if it is missing or damaged; None if it cannot be used."""
        try:
            _check_usable(self._folder)
            cache = diskcache.Cache(
                str(self._folder), timeout=WAIT_SECONDS, disk=_BytesDisk, **_SETTINGS, size_limit=self._size_limit
            )
            cache.close()
        except _FAILURES as error:
            if not again or not _is_damage(error):
                return None
        else:
            return cache
        _set_aside(self._folder)
        return self._open(again=False)

    def get(self, key: str) -> bytes | None:
        """Return the value under a key; None without one that can be trusted."""
        frame = self._try(lambda cache: cache.get(_digest(key)))
        return _unframe(key, frame) if isinstance(frame, bytes) else None

    def set(self, key: str, value: bytes) -> None:
        """Store a value, if that is possible."""
        if not isinstance(value, bytes):
            raise TypeError(f"The cache keeps bytes, got {type(value).__name__}.")
        self._try(lambda cache: cache.set(_digest(key), _frame(key, value)))

    def clear(self) -> None:
        """Remove all entries."""
        self._try(lambda cache: cache.clear())

    def close(self) -> None:
        """Close the files; a later call opens them again."""
        if self._cache is not None:
            self._cache.close()

    def _try(self, act: Callable[[diskcache.Cache], T]) -> T | None:
        if (cache := self._cache) is None:
            return None
        try:
            return act(cache)
        except _FAILURES as error:
            failure = error
        finally:
            # An open connection would outlive the thread that opened it.
            cache.close()
        if _is_damage(failure) or "no such table" in str(failure):  # emptied, or removed
            self._cache = self._open()
        return None


class _ForeignRowError(Exception):
    """A row that ``DiskCache`` did not write."""


# Effects of a full disk, another process, or another writer in the folder.
_FAILURES = (OSError, sqlite3.Error, diskcache.Timeout, _ForeignRowError, ValueError, TypeError, KeyError)


def _is_damage(error: Exception) -> bool:
    """Whether a file is not a database, or no longer one."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(folder: Path) -> None:
    """Rename a damaged database; its log first, which a new one would read."""
    for suffix in ("-wal", "-shm", ""):
        database = folder / f"{diskcache.core.DBNAME}{suffix}"
        with suppress(OSError):
            database.replace(f"{database}.damaged")


# All settings: diskcache takes missing ones from the database.
_SETTINGS: dict[str, Any] = {
    **{name: value for name, value in DEFAULT_SETTINGS.items() if name != "size_limit"},
    "eviction_policy": "least-recently-stored",  # the only one whose reads do not write
    "disk_pickle_protocol": 0,
}


class _BytesDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Keys are text and values bytes, inside the database; any other row is refused unread."""

    def put(self, key: Any) -> tuple[str, bool]:
        if type(key) is not str:
            _refuse("key", type(key))
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if raw != 1 or type(key) is not str:
            _refuse("key", type(key))
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, sqlite3.Binary]:
        if read or type(value) is not bytes:
            _refuse("value", type(value))
        return 0, MODE_RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or read or type(value) is not bytes:
            _refuse("value", type(value))
        return value

    def filename(self, key: Any = None, value: Any = None) -> NoReturn:
        _refuse("file", type(value))

    def remove(self, file_path: Any) -> None:
        """Remove nothing: no row of ``DiskCache`` has a file, and a foreign one may name any file of the user."""


def _refuse(what: str, kind: type) -> NoReturn:
    raise _ForeignRowError(f"Expected a text key and a value of bytes inside the database, got a {what} of {kind}.")


def _check_usable(folder: Path) -> None:
    """Check an existing database before diskcache opens it.

    diskcache would wait a minute for a lock, and writes settings of the database into SQL statements.
    """
    database = folder / diskcache.core.DBNAME
    if not database.exists():
        return
    if database.is_symlink():
        _refuse("file", Path)
    with closing(sqlite3.connect(database, timeout=WAIT_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        exists = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'Settings'").fetchone()
        found = dict(connection.execute("SELECT key, value FROM Settings")) if exists else {}
        connection.execute("ROLLBACK")
    for name, value in found.items():
        expected = {**DEFAULT_SETTINGS, **METADATA, **_SETTINGS}.get(name)
        if type(value) is not type(expected) or (isinstance(value, str) and value != expected):
            _refuse("value", type(value))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _frame(key: str, value: bytes) -> bytes:
    encoded = key.encode()
    body = len(encoded).to_bytes(4, "big") + encoded + value
    return _FRAME + hashlib.sha256(body).digest() + body


def _unframe(key: str, frame: bytes) -> bytes | None:
    """Return the value of a frame that is whole and names the key; else None."""
    encoded = key.encode()
    body = frame[len(_FRAME) + _DIGEST_SIZE :]
    head = len(encoded).to_bytes(4, "big") + encoded
    is_ours = frame == _FRAME + hashlib.sha256(body).digest() + body and body.startswith(head)
    return body[len(head) :] if is_ours else None
