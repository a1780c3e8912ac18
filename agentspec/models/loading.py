"""Getting transformers modules, and telling which of them a cache addressed by position can serve."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentspec.errors import ModelLoadError

# These mask inside their attention by the length of the cache, from lengths on that no quick probe reaches.
_LENGTH_BOUND = {"gpt_neo", "doge"}

CACHE_KEYWORDS = ("cache", "past_key_values")
"""Names by which a forward takes its cache: transformers renamed the second to the first in 5.24."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device that is meant; None: CUDA where there is one. Raises ``ModelLoadError`` where torch has none such."""
    try:
        meant = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=meant)
    except Exception as error:  # of many kinds, by device
        raise ModelLoadError(
            f"device {device!r} cannot be used: {error}. Expected 'cpu', or a device that this torch is built for "
            "(`agentspec doctor` tells which)"
        ) from error
    return meant


def parse_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The torch dtype that is meant; None is float32 on CPU and bfloat16 elsewhere. Raises ``ModelLoadError``."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    parsed = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed is None or parsed not in _DTYPES.values():
        raise ModelLoadError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return parsed


def load_module(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    gguf_file: str | None,
    allow_pickle: bool,
) -> PreTrainedModel:
    """The causal language model at ``name_or_path`` (a directory or a hub name), on CPU, with every weight loaded.

    Raises ``ModelLoadError`` naming what was looked for, when it is missing, incomplete or pickled.
    """
    _expect_files(name_or_path, gguf_file, allow_pickle)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    if revision is not None:
        options["revision"] = revision
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    elif not allow_pickle:
        options["use_safetensors"] = True
    try:
        with _quiet():
            # With output_loading_info, which transformers' signature does not tell, a pair comes back.
            loaded: Any = AutoModelForCausalLM.from_pretrained(name_or_path, **options)
    except Exception as error:  # transformers and what it calls raise nearly every type here
        what = "a GGUF file" if gguf_file else "a causal language model with safetensors weights"
        raise ModelLoadError(f"{name_or_path}: expected {what}; transformers could not load it: {error}") from error
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    if absent := sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}):
        raise ModelLoadError(
            f"{name_or_path}: {len(absent)} weights are missing or of another shape ({', '.join(absent[:3])}, ...); "
            "the checkpoint does not belong to this architecture"
        )
    return model


def _expect_files(name_or_path: str, gguf_file: str | None, allow_pickle: bool) -> None:
    """Refuse a local path that cannot be loaded before transformers takes it for the name of a hub repository."""
    folder = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith((".", "~", os.sep)) or name_or_path.count("/") > 1
    if not folder.exists():
        if looks_local:
            raise ModelLoadError(
                f"{name_or_path}: no such directory; expected one with config.json and *.safetensors, or a hub name "
                "such as 'owner/model'"
            )
        return
    if not folder.is_dir():
        raise ModelLoadError(
            f"{name_or_path}: expected a directory, found a file; name its directory (and gguf_file, for a GGUF)"
        )
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise ModelLoadError(f"{name_or_path}: expected the GGUF file {gguf_file} in it, found none")
    elif not (folder / "config.json").is_file():
        raise ModelLoadError(f"{name_or_path}: expected config.json in it, found none")
    elif not allow_pickle and not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        found = f"only pickled weights ({', '.join(pickled)}), which can run code when read" if pickled else "none"
        raise ModelLoadError(
            f"{name_or_path}: expected *.safetensors weights, found {found}; "
            "convert them, or pass allow_pickle=True if you trust their source"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and notes; what matters in them is raised as an error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def forward_keywords(model: PreTrainedModel) -> tuple[str, bool]:
    """The keyword by which ``model`` takes a cache, and whether it can skip logits (``logits_to_keep``).

    Raises ``ModelLoadError`` for a model that takes no cache, no explicit positions, or keeps state of another kind.
    """
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{kind} is an encoder-decoder; expected a decoder-only causal language model")
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(
            f"{kind} keeps a recurrent state, which cannot be addressed by position (a rejected draft could not be "
            "taken back); choose a model with plain attention layers"
        )
    if model.config.model_type in _LENGTH_BOUND:
        raise ModelLoadError(f"{kind} masks by the length of the cache, so rows of different lengths cannot share it")
    accepted = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    if "position_ids" not in accepted:
        raise ModelLoadError(f"{kind} takes no position_ids, so rows of different lengths cannot share a forward")
    keyword = next((name for name in CACHE_KEYWORDS if name in accepted), None)
    if keyword is None:
        raise ModelLoadError(f"{kind} takes no key-value cache; expected a forward with cache= or past_key_values=")
    return keyword, "logits_to_keep" in accepted


def longest_context(model: PreTrainedModel) -> int:
    """Longest context over which a position's K and V do not depend on how long the context is.

    That is ``max_position_embeddings``; with longrope only its original part, since frequencies switch for all
    positions once a context grows beyond it. Raises ``ModelLoadError`` where the config names no length.
    """
    config = model.config.get_text_config()
    length: int | None = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ModelLoadError(f"{type(model).__name__}: the config names no max_position_embeddings")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            length = min(length, parameters.get("original_max_position_embeddings") or length)
    return length
