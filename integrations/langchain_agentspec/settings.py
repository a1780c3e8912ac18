"""The settings of a model of this package: the fields that the chat model and the plain model share."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from agentspec import InvalidRequestError, LocalEngine, SamplingParams
from agentspec.engine.registry import EMBEDDED, PairSpec, shared_engine
from agentspec.errors import shown
from agentspec.models.switches import Switch, replace_compile
from agentspec.runtime.tokens import well_formed

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs", *PENALTIES)
DECODING = ("n", "gamma", "acceptance", "timeout")
SHARED = ("model", *SAMPLING, *DECODING)
"""Settings that a call may override by a keyword of the same name."""


ALIASES = {
    "model_name": "model",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
"""Names by which users of other chat models know a setting."""


STRICT = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
"""A misspelt setting is an error. For every class anew: LangChain's base classes have a configuration of their own."""


class ModelSettings(BaseModel):
    """Fields, their checks, and the engine they name.

    Nothing is loaded before the first call, and models of the same pair share one engine, its models and its KV cache.

    None stands for the default of a setting that cannot be None. Settings are known by the names that other chat models
    have for them too: ``ALIASES``, and ``logprobs=True`` with ``top_logprobs``.

    Args:
        model: ``"embedded"`` (SmolLM2-135M-Instruct, fetched once), a directory, or a hub name.
        draft: a smaller model with the same tokenizer; None drafts by look-up and grammar alone.
        temperature: 0 is greedy.
        top_p, top_k, min_p: as in ``SamplingParams``.
        seed: same seed, same text.
        max_tokens: the most tokens to emit.
        stop: strings that end the text.
        repetition_penalty, presence_penalty, frequency_penalty, logit_bias: as in ``SamplingParams``.
        logprobs: alternatives to report beside each token, with the model's own log-probabilities; None for none.
        n: samples per call.
        gamma: tokens to draft per round; 0 decodes plainly; ``"auto"`` drafts as many as pay by what was measured.
        acceptance: ``"rejection"``, or ``"coupled"`` for text that does not depend on speculation; None for coupled
            where a seed is named and gamma is ``"auto"``, else rejection.
        timeout: seconds after which a call ends with an error, at the next round; None for no limit.
        max_retries, api_key: accepted for compatibility: no network here could fail, no service is paid.
        device: where to compute; None for CUDA where there is one.
        dtype: "float32", "bfloat16" or "float16"; None for float32 on CPU and bfloat16 elsewhere.
        revision: of the model on the hub.
        cuda_graphs: whether passes are captured as CUDA graphs; "auto" where there is CUDA.
        native_kernels: whether kernels are compiled on a CPU; "auto" where that can be done. ``compile`` is the old
            name of both, for one release.
        engine: an engine to use in place of the shared one; it must have a tokenizer.
    """

    model_config = STRICT

    model: str = EMBEDDED
    draft: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 512
    stop: list[str] = Field(default_factory=list)
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    n: int = 1
    gamma: int | Literal["auto"] = "auto"
    acceptance: Literal["rejection", "coupled"] | None = None
    timeout: float | None = None
    max_retries: int = 0
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    cuda_graphs: Switch = "auto"
    native_kernels: Switch = "auto"
    engine: LocalEngine | None = Field(default=None, exclude=True, repr=False)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop or []

    @field_validator("logprobs", mode="before")
    @classmethod
    def _flag(cls, logprobs: Any) -> Any:
        return _alternatives(logprobs)

    @model_validator(mode="before")
    @classmethod
    def _by_their_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = _without_compile(canonical(values))
        fields = cls.model_fields
        _check_known(values, {*fields, *(str(field.alias) for field in fields.values() if field.alias)}, "the model")
        return {
            name: value
            for name, value in values.items()
            if value is not None or name not in fields or fields[name].get_default(call_default_factory=True) is None
        }

    def model_post_init(self, context: Any, /) -> None:
        """Find wrong settings now, and not at the first call."""
        super().model_post_init(context)
        settings = self.settings({})
        sampling(settings, self.stop)
        decoding(settings)

    def settings(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a call: its own, or else the model's.

        Args:
            overrides: by their names here, as ``canonical`` gives them.

        Raises:
            InvalidRequestError: for a value that the constructor would not take either.
        """
        own = {name: getattr(self, name) for name in self.overridable()}
        return own | self.taken(overrides)

    def taken(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings among keywords, as the constructor takes them; None for what cannot be None is left out.

        Raises:
            InvalidRequestError: for a value of another type.
        """
        known = {name: overrides[name] for name in self.overridable() if name in overrides}
        fields = type(self).model_fields
        return {
            name: _as_field(type(self), name, value)
            for name, value in known.items()
            if value is not None or fields[name].get_default(call_default_factory=True) is None
        }

    @classmethod
    def overridable(cls) -> tuple[str, ...]:
        """Names of the settings that a call may override."""
        return SHARED

    def identity(self) -> dict[str, Any]:
        """All that an answer depends on, but for the prompt."""
        names = (*self.overridable(), "draft", "stop", "device", "dtype", "revision", "cuda_graphs", "native_kernels")
        # No cache may take the answers of an engine of the user's own for those of another.
        return {**{name: getattr(self, name) for name in names}, "engine": self.engine and self.engine.identity}

    def engine_of(self, model: str) -> LocalEngine:
        """Return the engine that serves a model: the shared one, loaded at the first call, or the one that was given.

        Raises:
            InvalidRequestError: for another model than that of an engine that was given.
            ModelLoadError: for a model that cannot be loaded.
        """
        if self.engine is None:
            switches = (self.cuda_graphs, self.native_kernels)
            return shared_engine(PairSpec(model, self.draft, self.device, self.dtype, self.revision, *switches))
        if model != self.model:
            raise InvalidRequestError(
                f"model={shown(model)} asks for another model than that of the engine given as engine=...; leave one "
                "out."
            )
        return self.engine

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by the model's own tokenizer."""
        ids: list[int] = self.engine_of(self.model).tokenizer.encode(well_formed(text), add_special_tokens=False)
        return ids


@functools.lru_cache
def _adapter(cls: type[ModelSettings], name: str) -> TypeAdapter[Any]:
    kind: Any = cls.model_fields[name].annotation
    return TypeAdapter(kind)


def _without_compile(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with the old ``compile`` as the two that it is now."""
    if "compile" not in values:
        return values
    rest = {name: value for name, value in values.items() if name != "compile"}
    graphs, kernels = rest.get("cuda_graphs", "auto"), rest.get("native_kernels", "auto")
    graphs, kernels = replace_compile(values["compile"], graphs, kernels, stacklevel=7)
    return rest | {"cuda_graphs": graphs, "native_kernels": kernels}


def _as_field(cls: type[ModelSettings], name: str, value: Any) -> Any:
    """Return a value as the constructor would take it; but no numbers as text, which no caller means."""
    value = _alternatives(value) if name == "logprobs" else value
    try:
        return _adapter(cls, name).validate_python(value, strict=isinstance(value, str))
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise InvalidRequestError(f"{name} cannot be {shown(value)}: {what[:1].lower()}{what[1:]}.") from error


def _alternatives(logprobs: Any) -> Any:
    """How many alternatives to report: True and False are a flag, as in OpenAI's requests."""
    return (0 if logprobs else None) if isinstance(logprobs, bool) else logprobs


def canonical(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords by their names here; ``top_logprobs`` as ``logprobs``.

    Raises:
        InvalidRequestError: for a setting that is given twice, with different values.
    """
    named: dict[str, Any] = {}
    for name, value in keywords.items():
        own = ALIASES.get(name, name)
        if name != "top_logprobs" and own in named and None not in (named[own], value) and named[own] != value:
            raise InvalidRequestError(f"{own} is given twice, as {shown(named[own])} and as {name}={shown(value)}.")
        if value is not None or own not in named:
            named[own] = value
    top = named.pop("top_logprobs", None)
    if top is not None and named.get("logprobs") is not False:
        if named.get("logprobs") not in (None, True, top) or isinstance(top, bool):
            raise InvalidRequestError(
                f"top_logprobs is a number, beside logprobs=True or alone; got top_logprobs={shown(top)} and "
                f"logprobs={shown(named.get('logprobs'))}."
            )
        named["logprobs"] = top
    return named


def check_keywords(keywords: Iterable[str], known: Sequence[str]) -> None:
    """Make sure that a call's keywords are known ones.

    Raises:
        InvalidRequestError: naming those that are not, and all that are.
    """
    _check_known(keywords, {*known, "stop"}, "a call")


def _check_known(names: Iterable[str], known: Collection[str], whose: str) -> None:
    unknown = sorted(set(names) - set(known))
    if not unknown:
        return
    every = sorted({*known, *ALIASES, "top_logprobs"})
    near = {name: difflib.get_close_matches(name, every, 1) for name in unknown}
    meant = ", ".join(f"{shown(close[0])} for {shown(name)}" for name, close in near.items() if close)
    raise InvalidRequestError(
        f"Unknown settings {unknown}{f'; did you mean {meant}?' if meant else '.'} Of {whose} these are known: "
        f"{', '.join(sorted(known))}."
    )


def sampling(settings: Mapping[str, Any], stop: Sequence[str], **others: Any) -> SamplingParams:
    """Return the sampling settings of a call.

    Raises:
        InvalidRequestError: for a value outside its range.
    """
    # The model's own probabilities: those of a greedy distribution would all be 1.
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return SamplingParams(**{name: settings[name] for name in SAMPLING}, stop=stops, raw_logprobs=True, **others)


def decoding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a call is decoded, as a request names it.

    Raises:
        InvalidRequestError: for a value outside its range.
    """
    n, gamma, timeout = settings["n"], settings["gamma"], settings["timeout"]
    if not isinstance(n, int) or n < 1:
        raise InvalidRequestError(f"n is the number of samples, 1 or more; got {shown(n)}.")
    if gamma != "auto" and not (isinstance(gamma, int) and gamma >= 0):
        raise InvalidRequestError(f"gamma is the number of tokens to draft, 0 or more, or 'auto'; got {shown(gamma)}.")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InvalidRequestError(f"timeout is a number of seconds above 0, got {shown(timeout)}.")
    return {
        "n": n,
        "gamma": None if gamma == "auto" else gamma,
        "acceptance": settings["acceptance"],
        "timeout_s": timeout,
    }
