"""Digests beside files: whatever was changed is found, what was not is not read again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentspec.runtime import digests
from agentspec.runtime.digests import is_intact, seal, sha256


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """That of two files."""
    (tmp_path / "one").write_bytes(b"1" * 100_000)
    (tmp_path / "two").write_bytes(b"")
    made = tmp_path / "digests.json"
    seal(made, [tmp_path / "one", tmp_path / "two"])
    return made


@pytest.fixture
def settled(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, checked when its files were no longer young."""
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))
    assert is_intact(manifest)
    return manifest


def fail(*_: object) -> Any:
    raise AssertionError("must not be called")


def test_what_was_sealed_is_intact(manifest: Path) -> None:
    assert is_intact(manifest)
    assert is_intact(manifest, "one", "two")
    assert not is_intact(manifest, "three")
    assert not is_intact(manifest.with_name("none.json"))
    assert manifest.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in manifest.parent.iterdir()) == ["digests.json", "one", "two"]


def test_a_manifest_without_files_vouches_for_nothing(tmp_path: Path) -> None:
    seal(tmp_path / "digests.json", [])
    assert not is_intact(tmp_path / "digests.json")


def test_a_file_that_is_as_it_was_checked_is_not_read_again(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "sha256", fail)
    assert is_intact(settled)


def test_a_young_file_is_read_again(manifest: Path) -> None:
    """Two changes within one tick of the clock leave the same times."""
    stamp = os.stat(manifest.with_name("one"))
    manifest.with_name("one").write_bytes(b"2" * 100_000)
    kept = json.loads(manifest.read_text())
    found = os.stat(manifest.with_name("one"))
    kept["files"]["one"]["stamp"] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, stamp.st_ino]
    manifest.write_text(json.dumps(kept))
    assert not is_intact(manifest)


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize(
    "change", ["cut", "emptied", "longer", "one bit", "exchanged", "gone", "a link", "a folder", "a pipe", "open"]
)
def test_a_changed_file_is_found(change: str, is_settled: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    manifest: Path = request.getfixturevalue("settled" if is_settled else "manifest")
    file = tmp_path / "one"
    before = file.stat()
    if change == "cut":
        os.truncate(file, 50_000)
    elif change == "emptied":
        os.truncate(file, 0)
    elif change == "longer":
        os.truncate(file, 100_001)
    elif change == "one bit":
        with file.open("r+b") as stream:
            stream.seek(70_000)
            stream.write(b"0")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "exchanged":
        (tmp_path / "three").write_bytes(b"3" * 100_000)
        (tmp_path / "three").replace(file)
    elif change == "open":
        file.chmod(0o666)
    else:
        file.unlink()
        if change == "a link":
            (tmp_path / "three").write_bytes(b"1" * 100_000)
            file.symlink_to("three")
        elif change == "a folder":
            file.mkdir()
        elif change == "a pipe":  # whose reader would wait for ever
            os.mkfifo(file, 0o600)
    assert not is_intact(manifest)
    assert not is_intact(manifest)  # and a check of it does not make it so


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "7", '"text"', "{}", '{"format": "agentspec digests 1"}', "\0" * 100, "[" * 10_000],
    ids=range(10),
)
def test_a_damaged_manifest_is_none(text: str, manifest: Path) -> None:
    manifest.write_text(text)
    assert not is_intact(manifest)


@pytest.mark.parametrize("name", ["../one", "/etc/passwd", "", ".", "..", "a/b"])
def test_a_manifest_names_files_beside_it(name: str, manifest: Path) -> None:
    kept = json.loads(manifest.read_text())
    kept["files"][name] = kept["files"]["one"]
    manifest.write_text(json.dumps(kept))
    assert not is_intact(manifest)


@pytest.mark.parametrize("entry", [None, 7, [], {}, {"sha256": 7, "stamp": None}, {"sha256": "0" * 64, "stamp": []}])
def test_a_damaged_entry_is_none(entry: Any, manifest: Path) -> None:
    kept = json.loads(manifest.read_text())
    kept["files"]["one"] = entry
    manifest.write_text(json.dumps(kept))
    assert not is_intact(manifest)


def test_a_touched_file_is_read_once_more(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(settled.with_name("one"), ns=(0, 0))
    assert is_intact(settled)
    monkeypatch.setattr(digests, "sha256", fail)
    assert is_intact(settled)


def test_where_nothing_can_be_written_files_are_read_each_time(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    read: list[Path] = []
    monkeypatch.setattr(digests, "_write", full)
    monkeypatch.setattr(digests, "sha256", lambda file: read.append(file) or sha256(file))
    assert is_intact(manifest)
    assert is_intact(manifest)
    assert len(read) == 4


def test_a_failed_write_leaves_the_old_manifest(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifest.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(digests, "_sync", full)
    with pytest.raises(OSError, match="No space"):
        digests._write(manifest, {})
    assert manifest.read_text() == before
    assert sorted(path.name for path in manifest.parent.iterdir()) == ["digests.json", "one", "two"]


def test_all_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = digests._sync, Path.replace
    monkeypatch.setattr(digests, "_sync", lambda path: (done.append(f"sync {path.name[:8]}"), sync(path)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (done.append(f"name {to.name}"), replace(path, to))[1])
    (tmp_path / "one").write_bytes(b"1")
    seal(tmp_path / "digests.json", [tmp_path / "one"])
    assert done == ["sync one", "sync .digests"[:13], "name digests.json", f"sync {tmp_path.name[:8]}"]


def test_others_lose_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "one").chmod(0o664)
    seal(tmp_path / "digests.json", [tmp_path / "one"])
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o644
