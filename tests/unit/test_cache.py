"""The disk cache: what was put in comes out, and nothing that anybody else put there does, let alone is executed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import diskcache
import pytest

from agentspec.errors import AgentSpecError, CacheError
from agentspec.runtime import cache as module
from agentspec.runtime.cache import DiskCache
from agentspec.runtime.paths import CACHE_VARIABLE, root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def change(folder: Path, statement: str, *values: Any) -> None:
    """Another writer of the database."""
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as connection:
        assert connection.execute(statement, values).rowcount != 0


@pytest.mark.parametrize("value", [b"", b"value", b"\0" * 100, os.urandom(10**6)], ids=len)
def test_what_is_put_in_comes_out(folder: Path, value: bytes) -> None:
    for key in ("key", "é💡\n\0", "k" * 10**5, ""):
        DiskCache(folder).set(key, value)
        assert DiskCache(folder).get(key) == value
    assert DiskCache(folder).get("another") is None


def test_the_last_value_counts(folder: Path) -> None:
    cache = DiskCache(folder)
    cache.set("key", b"one")
    cache.set("key", b"two")
    assert cache.get("key") == b"two"
    with pytest.raises(TypeError, match="keeps bytes, got str"):
        cache.set("key", "text")  # type: ignore[arg-type]


def test_a_pickled_value_is_a_miss_and_is_not_executed(folder: Path, tmp_path: Path) -> None:
    cache = DiskCache(folder)
    cache.set("key", b"value")
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    pickle.loads(bomb)  # it would work
    (tmp_path / "executed").rmdir()
    change(folder, "UPDATE Cache SET mode = 4, value = ?", bomb)
    assert cache.get("key") is None
    assert DiskCache(folder).get("key") is None
    (folder / "ab").mkdir()
    (folder / "ab" / "file.val").write_bytes(bomb)
    change(folder, "UPDATE Cache SET mode = 4, value = NULL, filename = 'ab/file.val'")
    assert cache.get("key") is None
    assert not (tmp_path / "executed").exists()
    cache.set("key", b"again")
    assert cache.get("key") == b"again"
    assert (folder / "ab" / "file.val").exists()  # nor is the file of a foreign row removed


def test_a_pickled_key_is_never_read(folder: Path, tmp_path: Path) -> None:
    cache = DiskCache(folder)
    cache.set("key", b"value")
    change(folder, "UPDATE Cache SET raw = 0, key = ?", pickle.dumps(Bomb(tmp_path / "executed")))
    assert cache.get("key") is None
    opened = diskcache.Cache(str(folder), disk=module._BytesDisk)
    with pytest.raises(module._ForeignRowError):
        list(opened.iterkeys())
    opened.close()
    assert not (tmp_path / "executed").exists()


def test_whole_directories_of_diskcache_itself_are_misses(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    with diskcache.Cache(str(folder)) as foreign:
        foreign[module._digest("key")] = Bomb(tmp_path / "executed")
        foreign[Bomb(tmp_path / "executed")] = 1
    cache = DiskCache(folder)
    assert cache.get("key") is None
    assert not (tmp_path / "executed").exists()


def test_files_that_a_row_names_are_neither_read_nor_removed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(module._frame("key", b"value"))
    DiskCache(folder).set("key", b"value")
    change(folder, "UPDATE Cache SET mode = 2, value = NULL, filename = '../secret'")
    cache = DiskCache(folder, size_limit=1)
    assert cache.get("key") is None
    cache.set("another", b"evicts it")
    with closing(sqlite3.connect(folder / "cache.db")) as connection:
        assert connection.execute("SELECT filename FROM Cache WHERE filename IS NOT NULL").fetchall() == []
    assert secret.exists()


@pytest.mark.parametrize(
    "setting", [("sqlite_cache_size", "1; DROP TABLE Cache"), ("disk_evil", 1), ("size_limit", "x")]
)
def test_foreign_settings_make_no_cache(folder: Path, setting: tuple[str, Any]) -> None:
    DiskCache(folder).set("key", b"value")
    change(folder, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", *setting)
    cache = DiskCache(folder)
    assert cache.get("key") is None
    cache.set("key", b"value")


def test_a_value_of_another_key_is_a_miss(folder: Path) -> None:
    cache = DiskCache(folder)
    cache.set("key", b"value")
    change(folder, "UPDATE Cache SET key = ?", module._digest("another"))
    assert cache.get("another") is None


@pytest.mark.parametrize("cut", ["substr(value, 1, 60)", "substr(value, 1, 3)", "x''", "value || x'00'", "'text'", "7"])
def test_a_broken_value_is_a_miss(folder: Path, cut: str) -> None:
    cache = DiskCache(folder)
    cache.set("key", b"a value of some length")
    change(folder, f"UPDATE Cache SET value = {cut}")
    assert cache.get("key") is None
    change(folder, "UPDATE Cache SET expire_time = 'soon'")
    assert cache.get("key") is None


def test_the_folder_is_private(folder: Path) -> None:
    DiskCache(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_folder_that_others_may_enter_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheError, match="chmod 700") as caught:
        DiskCache(folder)
    assert isinstance(caught.value, AgentSpecError)
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(CacheError, match="belongs to uid"):
        DiskCache(folder)


def test_where_nothing_can_be_written_there_is_no_cache(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("")
    (folder / "cache.db").mkdir(parents=True)
    folder.chmod(0o700)
    for place in (tmp_path / "file" / "cache", folder):
        cache = DiskCache(place)
        cache.set("key", b"value")
        assert cache.get("key") is None
        cache.close()


def test_a_read_only_database_is_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(folder)
    cache.set("key", b"value")
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options)
    )
    cache.set("key", b"another")  # is dropped
    assert cache.get("key") == b"value"
    assert DiskCache(folder).get("key") is None


def test_a_locked_database_is_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.01)
    cache = DiskCache(folder)
    cache.set("key", b"value")
    with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        cache.set("key", b"another")
        assert DiskCache(folder).get("key") is None
    assert cache.get("key") == b"value"


def test_what_was_stored_first_goes_first(folder: Path) -> None:
    cache = DiskCache(folder, size_limit=300_000)
    for k in range(60):
        cache.set(str(k), bytes(20_000))
    assert cache.get("59") is not None
    assert cache.get("0") is None
    assert sum(file.stat().st_size for file in folder.iterdir() if file.name == "cache.db") < 500_000


def fill(folder: Path, name: str) -> None:
    cache = DiskCache(folder)
    for k in range(20):
        cache.set(f"{name} {k}", f"{name} {k}".encode() * 100)
        cache.set("shared", name.encode() * 1000)
        assert cache.get("shared") is not None


def test_processes_share_a_folder(folder: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=fill, args=(folder, name)) for name in ("one", "two")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    cache = DiskCache(folder)
    for name in ("one", "two"):
        assert all(cache.get(f"{name} {k}") == f"{name} {k}".encode() * 100 for k in range(20))


def test_threads_share_a_cache(folder: Path) -> None:
    cache = DiskCache(folder)
    wrong: list[str] = []

    def work(name: str) -> None:
        for k in range(20):
            cache.set(f"{name} {k}", name.encode())
            wrong.extend([name] if cache.get(f"{name} {k}") != name.encode() else [])

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert root() == tmp_path / "agentspec"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "named"))
    assert root() == tmp_path / "named"
    DiskCache().set("key", b"value")
    assert (tmp_path / "named" / "entries" / "cache.db").exists()
