"""Check files that are kept between processes against their digests before they are used.

A manifest names files of its own folder with their sha256. Invariant: a file that was changed, truncated or replaced
through the file system is detected before it is used, whatever its size. A file is not read again while its size, inode
and times are those of its last check (no program can set the time of the last change), so a model of 500 MB costs
nothing. A change that a failing disk makes without the file system is not detected then.

Every write is whole after a crash: synced, and renamed into place. ``paths.py`` checks who may write to the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_FORMAT = "agentspec digests 1"
_SETTLED_NS = 2 * 10**9  # a file may change twice within one tick of its clock: younger ones are read again


def seal(manifest: Path, files: Iterable[Path]) -> None:
    """Sync ``files`` (of the manifest's folder), deny others to write to them, and write their manifest."""
    entries: dict[str, Any] = {}
    for file in files:
        file.chmod(stat.S_IMODE(file.stat().st_mode) & ~0o022)
        _sync(file)
        entries[file.name] = {"sha256": sha256(file), "stamp": _stamp(file)}
    _write(manifest, entries)


def is_intact(manifest: Path, *needed: str) -> bool:
    """Whether the manifest exists and names files, the ``needed`` among them, and all are as they were sealed."""
    try:
        _stamp(manifest)
        kept = json.loads(manifest.read_text())
        entries, checked_ns = kept["files"], kept["checked_ns"]
        if kept["format"] != _FORMAT or not entries or not {*needed} <= entries.keys():
            return False
        stamps = {name: _stamp(_within(manifest, name)) for name in entries}
        known = {
            name: entry["stamp"] == stamps[name] and max(stamps[name][1:3]) + _SETTLED_NS < checked_ns
            for name, entry in entries.items()
        }
        if any(not known[name] and sha256(manifest.with_name(name)) != entries[name]["sha256"] for name in entries):
            return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # missing, or not a manifest
        return False
    if not all(known.values()):
        with suppress(OSError):  # in a read-only folder, all files are read again at the next check
            _write(manifest, {name: {**entry, "stamp": stamps[name]} for name, entry in entries.items()})
    return True


def sha256(file: Path) -> str:
    """Return the sha256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def move(source: Path, target: Path) -> None:
    """Rename a synced file or folder into place, and sync the folder that names it."""
    source.replace(target)
    with suppress(OSError):  # some file systems cannot sync a folder
        _sync(target.parent)


def _write(manifest: Path, entries: dict[str, Any]) -> None:
    scratch = manifest.with_name(f".{manifest.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        scratch.write_text(json.dumps({"format": _FORMAT, "checked_ns": time.time_ns(), "files": entries}, indent=1))
        scratch.chmod(0o600)
        _sync(scratch)
        move(scratch, manifest)
    finally:
        scratch.unlink(missing_ok=True)


def _within(manifest: Path, name: str) -> Path:
    """Return the path of a file beside the manifest; raise ``ValueError`` for another place."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"Expected a file beside {manifest}, got {name!r}.")
    return manifest.with_name(name)


def _stamp(file: Path) -> list[int]:
    """Return size, times and inode of a plain file that only the user may write; raise ``ValueError`` for another."""
    found = file.lstat()
    is_own = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    if not stat.S_ISREG(found.st_mode) or not is_own:
        raise ValueError(f"Expected a plain file of the user's own, got {file}.")
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
