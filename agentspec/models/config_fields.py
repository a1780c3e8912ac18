"""Check the fields that are read from a model's config, before a wrong one becomes an error of something else."""

from __future__ import annotations

import logging
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from agentspec.errors import ModelLoadError

SHORTEST_CONTEXT = 8
"""Tokens that a context must be able to hold: the check of a new model reads as many."""

_ROPE_KINDS = {*ROPE_INIT_FUNCTIONS, "default", "mrope"}
_ROPE_NUMBERS = ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_ROPE_LENGTH = "original_max_position_embeddings"

_LAYERS, _QUANTIZATION, _METHOD = "num_hidden_layers", "quantization_config", "quant_method"
_MOST_LAYERS = 10_000  # far beyond every model; building the modules takes seconds still
_MOST_TURNS = 100  # that a model takes through one layer: some compute a layer several times
_LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.([0-9]{1,9})\.")

_log = logging.getLogger("agentspec")
_cut = reprlib.Repr()
_cut.maxstring = _cut.maxother = _cut.maxlong = 80


def is_length(value: object) -> bool:
    """Whether ``value`` is a positive integer."""
    return _is_id(value) and value > 0  # type: ignore[operator]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id_or_null(value: object) -> bool:
    return value is None or _is_id(value)


def _is_length_or_null(value: object) -> bool:
    return value is None or is_length(value)


def _are_ids(value: object) -> bool:
    return _is_id_or_null(value) or (isinstance(value, list) and all(map(_is_id, value)))


def _are_names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


@dataclass(frozen=True)
class Field:
    """A field by its name, what it may be in words, and whether a value is that."""

    name: str
    expected: str
    accepts: Callable[[object], bool]

    def check(self, source: str, named: str, value: object) -> None:
        """Raise ``ModelLoadError`` for a value that is not accepted."""
        if not self.accepts(value):
            raise wrong_value(source, named, value, self.expected)


END_TOKENS = Field("eos_token_id", "a token id, a list of token ids, or null", _are_ids)
LENGTH = Field("max_position_embeddings", "a positive integer", _is_length_or_null)
WINDOW = Field("sliding_window", "an integer or null", _is_id_or_null)
FIELDS = (
    Field("vocab_size", "a positive integer", is_length),
    Field(_LAYERS, "a positive integer", is_length),
    LENGTH,
    END_TOKENS,
    Field("pad_token_id", "a token id or null", _is_id_or_null),
    Field("layer_types", "a list of names, one per layer, or null", _are_names),
)
"""Fields of config.json that are read here, or that transformers reads without naming them in its errors."""


def wrong_value(source: str, name: str, value: object, expected: str) -> ModelLoadError:
    """Return the error for a field: where it is, what it holds, and what was expected."""
    return ModelLoadError(f"{source}: {name} is {_cut.repr(value)}, expected {expected}")


def check_config(source: str, config: Mapping[str, Any]) -> None:
    """Check the fields of a config.json and of the ``text_config`` within it, as far as they are there.

    Raises ``ModelLoadError`` naming the field, its value and what was expected.
    """
    for part in _parts(config):
        _check_part(source, part)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from (part for part in (config, config.get("text_config")) if isinstance(part, Mapping))


def _known_class(config: Mapping[str, Any]) -> Any:
    """Return the config class of a model_type; None for one that transformers does not have."""
    kind = config.get("model_type")
    return CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None


def _aliases(known: Any) -> Mapping[str, str]:
    return getattr(known, "attribute_map", None) or {}


def _check_part(source: str, config: Mapping[str, Any]) -> None:
    kind, known = config.get("model_type"), _known_class(config)
    aliases = _aliases(known)
    windows = [WINDOW] if hasattr(known, WINDOW.name) else []
    for field in [*FIELDS, *windows]:
        for name in {field.name, aliases.get(field.name, field.name)} & config.keys():
            field.check(source, name, config[name])
    _check_padding(source, config)
    check_quantization(source, config.get(_QUANTIZATION))
    old = {"su"} if kind in ("phi3", "phimoe") else set()
    for name in {"rope_scaling", "rope_parameters"} & config.keys():
        check_rope(source, name, config[name], _ROPE_KINDS | old if known is not None else None)


def _check_padding(source: str, config: Mapping[str, Any]) -> None:
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    if pad is not None and size is not None and pad >= size:
        raise wrong_value(source, "pad_token_id", pad, f"an id below vocab_size, which is {size}")


def check_quantization(source: str, value: object) -> None:
    """Check a ``quantization_config``: transformers leaves one of an unknown method out, with a log line only.

    Raises ``ModelLoadError`` naming the field, its value and what was expected.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise wrong_value(source, _QUANTIZATION, value, f"an object with a {_METHOD}, or null")
    if value.get("load_in_8bit") or value.get("load_in_4bit"):
        return  # bitsandbytes, whatever method is named
    method = value.get(_METHOD)
    if not isinstance(method, str) or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise wrong_value(source, f"{_QUANTIZATION}.{_METHOD}", method, f"one of {known}")


def check_layers(source: str, config: Mapping[str, Any], weights: Iterable[str]) -> None:
    """Check that a config counts not many more layers than its ``weights`` name: building modules has no end else.

    Raises ``ModelLoadError`` naming the field, its value and what was expected.
    """
    indices = [int(found[1]) for found in map(_LAYER_INDEX.search, weights) if found]
    most = min((max(indices, default=_MOST_LAYERS) + 1) * _MOST_TURNS, _MOST_LAYERS)
    reason = f"{_MOST_TURNS} times the layers that the weights name" if indices else "no model has more layers"
    for part in _parts(config):
        for name in sorted(_layer_fields(part) & part.keys()):
            if is_length(part[name]) and part[name] > most:
                raise wrong_value(source, name, part[name], f"at most {most}: {reason}")


def _layer_fields(config: Mapping[str, Any]) -> set[str]:
    """Return the fields that count a decoder's layers; some families give the name to their encoder's layers."""
    alias = _aliases(_known_class(config)).get(_LAYERS, _LAYERS)
    return {"decoder_layers"} if alias == "encoder_layers" else {alias, _LAYERS}


def check_rope(source: str, name: str, value: object, kinds: set[str] | None = None) -> None:
    """Check the description of a rotary embedding, or of one per kind of layer; ``kinds``: those that are known.

    Raises ``ModelLoadError`` naming the field, its value and what was expected.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise wrong_value(source, name, value, "an object with a rope_type, or null")
    for place, part in _rope_parts(name, value):
        _check_rope_kind(source, place, part, kinds)
        for key in _ROPE_NUMBERS:
            if part.get(key) is not None and not _is_positive(part[key]):
                raise wrong_value(source, f"{place}.{key}", part[key], "a positive number")
        if not _is_length_or_null(part.get(_ROPE_LENGTH)):
            raise wrong_value(source, f"{place}.{_ROPE_LENGTH}", part[_ROPE_LENGTH], "a positive integer")
        for key in ("short_factor", "long_factor"):
            factors = part.get(key)
            if factors is not None and not (isinstance(factors, list) and all(map(_is_positive, factors))):
                raise wrong_value(source, f"{place}.{key}", factors, "a list of positive numbers")


def _rope_parts(name: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield name, value
    yield from ((f"{name}.{key}", part) for key, part in value.items() if isinstance(part, Mapping))


def _check_rope_kind(source: str, place: str, part: Mapping[str, Any], kinds: set[str] | None) -> None:
    key = "rope_type" if "rope_type" in part else "type"
    kind = part.get(key)
    if kind is None and part.get("factor") is not None:
        raise wrong_value(source, place, dict(part), "a rope_type beside the factor")
    if kind is not None and not isinstance(kind, str):
        raise wrong_value(source, f"{place}.{key}", kind, "a name")
    if kind is not None and kinds is not None and kind not in kinds:
        raise wrong_value(source, f"{place}.{key}", kind, f"one of {', '.join(sorted(kinds))}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def longest_context(model: PreTrainedModel) -> int:
    """Longest context over which a position's K and V do not depend on how long the context is.

    That is ``max_position_embeddings``; with longrope only its original part, since frequencies switch for all
    positions once a context grows beyond it. Raises ``ModelLoadError`` where the config names no such length.
    """
    config, source = model.config.get_text_config(), f"config of {type(model).__name__}"
    length: int | None = getattr(config, LENGTH.name, None)
    LENGTH.check(source, LENGTH.name, length)
    if length is None:
        raise ModelLoadError(f"{type(model).__name__}: the config names no {LENGTH.name}")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    check_rope(source, "rope_parameters", rope)
    for _, part in _rope_parts("rope_parameters", rope):
        if part.get("rope_type") == "longrope":
            length = min(length, part.get(_ROPE_LENGTH) or length)
    if length < SHORTEST_CONTEXT:
        raise wrong_value(source, LENGTH.name, length, f"at least {SHORTEST_CONTEXT}")
    return length


def end_token_ids(model: PreTrainedModel) -> list[int]:
    """Return the ids that config and generation config of ``model`` name as ends, those without logits included.

    Raises ``ModelLoadError`` for an ``eos_token_id`` that is neither an id, a list of ids, nor None.
    """
    found: list[int] = []
    for kind, config in (("generation config", model.generation_config), ("config", model.config)):
        named = getattr(config, END_TOKENS.name, None)
        END_TOKENS.check(f"{kind} of {type(model).__name__}", END_TOKENS.name, named)
        found += named if isinstance(named, list) else [] if named is None else [named]
    return found


def log_unscored_ends(model: PreTrainedModel, vocab_size: int) -> None:
    """Log which ends are not below ``vocab_size``: the model never says them. Raises as ``end_token_ids``."""
    if strays := sorted({i for i in end_token_ids(model) if i >= vocab_size}):
        _log.warning(
            "%s: eos_token_id names %s, which the model does not score (ids 0 to %d); left out",
            type(model).__name__,
            _cut.repr(strays),
            vocab_size - 1,
        )
