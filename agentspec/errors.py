"""Errors. Each message states what was expected, what was found, and what to do."""

from __future__ import annotations

import reprlib

LONGEST_SHOWN = 400
"""Most characters of a value, or of another library's message, in an error message."""


class AgentSpecError(Exception):
    """Root of every error that agentspec raises on purpose."""


class InvalidRequestError(AgentSpecError, ValueError):
    """A request that cannot be served as it stands; nothing was computed."""


class ContextOverflowError(InvalidRequestError):
    """A prompt that leaves no room in the model's context."""


class GrammarError(InvalidRequestError):
    """A grammar that cannot be compiled for this tokenizer."""


class TokenizerError(AgentSpecError, ValueError):
    """A tokenizer whose tokens cannot be expressed as bytes."""


class ModelLoadError(AgentSpecError, ValueError):
    """A model that cannot be loaded, or whose state cannot be addressed by position."""


class IncompatiblePairError(AgentSpecError, ValueError):
    """A target and a draft with too few tokens in common."""


class RequestTimeoutError(AgentSpecError, TimeoutError):
    """A request that took longer than its timeout; what it held is free again."""


class EngineStuckError(RequestTimeoutError):
    """A request that took longer than its timeout, while the engine's worker has not come back to end it.

    The message shows the stack of the worker. What the request held is free when the worker goes on.
    """


class EngineClosedError(AgentSpecError, RuntimeError):
    """A request to a closed engine."""


class EngineBusyError(AgentSpecError, RuntimeError):
    """More waiting sequences than the engine allows; nothing was computed."""


class RequestFailedError(AgentSpecError, RuntimeError):
    """An exception of what a request runs that cannot be raised here: ``SystemExit``, a panic, ``StopIteration``."""


class NoAnswerError(AgentSpecError, ValueError):
    """Several samples without an answer among them."""


class CacheError(AgentSpecError, RuntimeError):
    """A cache folder that other users could have written to."""


class BudgetExceededError(AgentSpecError, TimeoutError):
    """A run took longer than its budget; it was not cut short."""


def check_option(name: str, value: object, options: tuple[object, ...]) -> None:
    """Raise ``ModelLoadError`` for a value that is none of ``options``."""
    if value not in options:
        raise ModelLoadError(f"{name} must be one of {', '.join(map(repr, options))}, got {shown(value)}")


def shown(value: object) -> str:
    """Return ``repr(value)``, cut: a value of a user may have any size, or a ``repr`` that raises."""
    try:
        return cut(_REPR.repr(value))
    except Exception as error:  # an integer of 5,000 digits, say
        return f"<{type(value).__name__}, without a repr: {type(error).__name__}>"


def cut(text: str) -> str:
    """Return the text, without its middle if it is longer than ``LONGEST_SHOWN``."""
    if len(text) <= LONGEST_SHOWN:
        return text
    half = LONGEST_SHOWN // 2
    return f"{text[:half]} ... ({len(text):,} characters) ... {text[-half // 2 :]}"


def _repr() -> reprlib.Repr:
    made = reprlib.Repr()
    made.maxlevel, made.maxstring, made.maxother, made.maxlong = 4, 200, 200, 60
    made.maxlist = made.maxtuple = made.maxset = made.maxfrozenset = made.maxdeque = made.maxarray = 8
    made.maxdict = 8
    return made


_REPR = _repr()
