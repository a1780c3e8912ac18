"""Getting transformers modules, and telling which of them a cache addressed by position can serve."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentspec.errors import ModelLoadError
from agentspec.models.checkpoint import CONFIG, check_checkpoint, listed, mismatches, one_line, shown
from agentspec.models.config_fields import check_quantization

# These mask inside their attention by the length of the cache, from lengths on that no quick probe reaches.
_LENGTH_BOUND = {"gpt_neo", "doge"}

_INVALID = ("validation error for", "class validation error for")  # by which transformers' checks of a config begin

# Tensors that a module computes by itself; old checkpoints hold them.
_DERIVED = {"inv_freq", "position_ids", "masked_bias", "cos_cached", "sin_cached"}

CACHE_KEYWORDS = ("cache", "past_key_values")
"""Names by which a forward takes its cache: transformers renamed the second to the first in 5.24."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return the device that is meant; None: CUDA where there is one. Raise ``ModelLoadError`` where torch has none."""
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
    """Return the torch dtype that is meant; None is float32 on CPU, bfloat16 elsewhere. Raise ``ModelLoadError``."""
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
    """Load the causal language model at ``name_or_path`` (a directory or a hub name), on CPU, with every weight.

    Raises ``ModelLoadError`` naming what was looked for, when it is missing, incomplete or pickled.
    """
    check_checkpoint(name_or_path, gguf_file, allow_pickle)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # they are in the report, by name
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
        if str(error).lower().startswith(_INVALID):
            raise ModelLoadError(f"{name_or_path}/{CONFIG}: {one_line(error)}") from error
        raise ModelLoadError(
            f"{name_or_path}: expected {what}; transformers could not load it: {one_line(error)}"
        ) from error
    model: PreTrainedModel = loaded[0]
    _check_left_out(name_or_path, model)
    _check_report(name_or_path, model, loaded[1])
    return model


def _check_left_out(name: str, model: PreTrainedModel) -> None:
    """Raise for a quantization that was left out, which in a model from the hub shows only now."""
    for config in (model.config, model.config.get_text_config()):
        value = getattr(config, "quantization_config", None)
        if isinstance(value, Mapping):
            check_quantization(f"{name}/{CONFIG}", value)


def _check_report(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raise for weights that are missing, of another shape, or left over within what the model has; warn of others."""
    if absent := [*sorted(report["missing_keys"]), *mismatches(report)]:
        count, names = len(absent), shown(absent)
        raise ModelLoadError(
            f"{name}: {count} weight{' is' if count == 1 else 's are'} missing or of another shape ({names}) than "
            "config.json says; the checkpoint does not belong to this architecture"
        )
    unused = sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[2] not in _DERIVED)
    if surplus := [key for key in unused if not _is_beside(key, model)]:
        raise ModelLoadError(
            f"{name}: the checkpoint holds {listed(surplus, 'weight')} that config.json leaves without a use; expected "
            "a config with all of its layers, biases and scales. To do without them, load the model with transformers "
            "and hand it to CausalLM"
        )
    if unused:
        warnings.warn(
            f"{name}: {listed(unused, 'weight')} of the checkpoint belong to no part of {type(model).__name__} and "
            "are left out",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_beside(key: str, model: PreTrainedModel) -> bool:
    """Return whether a weight belongs to a part that ``model`` does not have.

    Such are a vision tower, a value head, layers that predict further tokens.
    """
    names = key.split(".")
    known = next(i for i in range(len(names), -1, -1) if _has_module(model, ".".join(names[:i])))
    is_top = ".".join(names[:known]) in ("", model.base_model_prefix)
    return (is_top and len(names) - known > 1) or _predicts_further(names[known:], model)


def _has_module(model: PreTrainedModel, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _predicts_further(names: Sequence[str], model: PreTrainedModel) -> bool:
    """Whether the first of the names is the index of a layer for multi-token prediction, which the config counts."""
    config = model.config.get_text_config()
    layers, further = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    return names[:1] != [] and names[0].isdecimal() and layers <= int(names[0]) < layers + further


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
    """Return the keyword by which ``model`` takes a cache, and whether it can skip logits (``logits_to_keep``).

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
