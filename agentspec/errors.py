"""What can go wrong, by name. Each error says what was expected, what came, and what to do."""

from __future__ import annotations

import reprlib

LONGEST_SHOWN = 400
"""Most characters of a value, or of another library's message, in a message of an error."""


class AgentSpecError(Exception):
    """Root of every error that agentspec raises on purpose."""


class InvalidRequestError(AgentSpecError, ValueError):
    """The request cannot be served as it stands; nothing was computed."""


class ContextOverflowError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the model's context."""


class GrammarError(InvalidRequestError):
    """A grammar that cannot be compiled for this tokenizer."""


class TokenizerError(AgentSpecError, ValueError):
    """A tokenizer whose tokens cannot be told as bytes."""


class ModelLoadError(AgentSpecError, ValueError):
    """A model that cannot be loaded, or whose state cannot be addressed by position."""


class IncompatiblePairError(AgentSpecError, ValueError):
    """Target and draft have too few tokens in common."""


class RequestTimeoutError(AgentSpecError, TimeoutError):
    """The request took longer than it was given; what it held is free again."""


class EngineStuckError(RequestTimeoutError):
    """The request took longer than it was given, and the engine's worker has not come back to notice.

    The message says where the worker is. What the request held is free when the worker goes on.
    """


class EngineClosedError(AgentSpecError, RuntimeError):
    """The engine was closed; it takes no more requests."""


class EngineBusyError(AgentSpecError, RuntimeError):
    """More sequences wait than the engine lets wait; nothing was computed."""


class RequestFailedError(AgentSpecError, RuntimeError):
    """What a request runs raised something that cannot be raised here: ``SystemExit``, a panic, ``StopIteration``."""


class NoAnswerError(AgentSpecError, ValueError):
    """None of several samples has an answer."""


class CacheError(AgentSpecError, RuntimeError):
    """A cache folder that others could have written to."""


class BudgetExceededError(AgentSpecError, TimeoutError):
    """A run took longer than its budget; it was not cut short."""


def check_option(name: str, value: object, options: tuple[object, ...]) -> None:
    """Raise ``ModelLoadError`` for a value that is none of ``options``."""
    if value not in options:
        raise ModelLoadError(f"{name} must be one of {', '.join(map(repr, options))}, got {shown(value)}")


def shown(value: object) -> str:
    """Return ``repr(value)``, cut: what a user gave may have any size, or a ``repr`` that raises."""
    try:
        return cut(_REPR.repr(value))
    except Exception as error:  # an integer of 5,000 digits, say
        return f"<{type(value).__name__}, without a repr: {type(error).__name__}>"


def cut(text: str) -> str:
    """Return the text, its middle left out where it is longer than ``LONGEST_SHOWN``."""
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
