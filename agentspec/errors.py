"""What can go wrong, by name. Each error says what was expected, what came, and what to do."""


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


class EngineClosedError(AgentSpecError, RuntimeError):
    """The engine was closed; it takes no more requests."""


class NoAnswerError(AgentSpecError, ValueError):
    """None of several samples has an answer."""


class CacheError(AgentSpecError, RuntimeError):
    """A cache folder that others could have written to."""


class BudgetExceededError(AgentSpecError, TimeoutError):
    """A run took longer than its budget; it was not cut short."""


def expect_option(name: str, value: object, options: tuple[object, ...]) -> None:
    """Raise ``ModelLoadError`` for a value that is none of ``options``."""
    if value not in options:
        raise ModelLoadError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
