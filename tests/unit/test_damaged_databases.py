"""The disk cache where its database is damaged: a new one, and what was damaged is set aside."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from langchain_core.outputs import Generation

from agentspec.errors import CacheError
from agentspec.runtime.cache import DiskCache
from langchain_agentspec.cache import AgentSpecCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with some entries."""
    cache = DiskCache(tmp_path / "cache")
    for k in range(10):
        cache.set(str(k), bytes(8000))
    with closing(sqlite3.connect(tmp_path / "cache" / "cache.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return tmp_path / "cache"


def damage(folder: Path, kind: str) -> None:
    database = folder / "cache.db"
    if kind == "garbage":
        database.write_bytes(os.urandom(5000))
    elif kind == "its first bytes":
        with database.open("r+b") as stream:
            stream.write(b"\0" * 100)
    elif kind == "gone":
        database.unlink()
    elif kind == "its middle":
        with database.open("r+b") as stream:
            stream.seek(4096)
            stream.write(b"\xff" * (database.stat().st_size - 4096))
    else:
        os.truncate(database, int(kind))


KINDS = ["garbage", "its first bytes", "its middle", "20000", "5000", "50", "0", "gone"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_damaged_database_is_made_anew(kind: str, is_open: bool, folder: Path) -> None:
    opened = DiskCache(folder)
    damage(folder, kind)
    cache = opened if is_open else DiskCache(folder)
    cache.get("7")  # a miss, or the value where its page is whole; here an open cache finds the damage
    for k in range(5):
        cache.set(f"new {k}", bytes(30_000))
    cache.set("again", b"value")
    assert cache.get("again") == b"value"
    assert DiskCache(folder).get("again") == b"value"
    with closing(sqlite3.connect(folder / "cache.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_what_was_damaged_is_set_aside(folder: Path) -> None:
    damage(folder, "garbage")
    garbage = (folder / "cache.db").read_bytes()
    DiskCache(folder).set("key", b"value")
    assert (folder / "cache.db.damaged").read_bytes() == garbage


def test_a_database_of_something_else_is_left_alone(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "cache.db")) as connection:
        connection.execute("INSERT OR REPLACE INTO Settings VALUES ('disk_evil', 1)")
        connection.commit()
    before = (folder / "cache.db").read_bytes()
    assert DiskCache(folder).get("7") is None
    assert (folder / "cache.db").read_bytes() == before


def test_answers_are_found_out_too(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    cache = AgentSpecCache(folder)
    cache.update("prompt", "model", [Generation(text="answer")])
    with closing(sqlite3.connect(folder / "cache.db")) as connection:
        [(value,)] = connection.execute("SELECT value FROM Cache").fetchall()
        connection.execute("UPDATE Cache SET value = ?", [value.replace(b"answer", b"amswer")])
        connection.commit()
    assert cache.lookup("prompt", "model") is None
    cache.update("prompt", "model", [Generation(text="answer")])
    assert cache.lookup("prompt", "model") == [Generation(text="answer")]
    damage(folder, "garbage")
    assert cache.lookup("prompt", "model") is None
    cache.update("prompt", "model", [Generation(text="answer")])
    assert cache.lookup("prompt", "model") == [Generation(text="answer")]


def test_answers_lie_in_a_folder_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir(mode=0o755)
    with pytest.raises(CacheError, match="closed to others"):
        AgentSpecCache(tmp_path / "answers")
    (tmp_path / "answers").chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match="others may write to"):
        AgentSpecCache(tmp_path / "answers")
    tmp_path.chmod(0o700)
    AgentSpecCache(tmp_path / "answers")
