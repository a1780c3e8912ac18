"""`Sequence`: one sample's tokens and grammar state, and the only place where tokens are committed."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import StrEnum

from agentspec.errors import GrammarError, InvalidRequestError
from agentspec.grammars.matcher import Matcher
from agentspec.rng import Acceptance, fresh_seed
from agentspec.runtime.detokenizer import Detokenizer
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.runtime.stop_strings import Ending, StopStrings
from agentspec.sampling import SamplingParams


class FinishReason(StrEnum):
    """The reason why a sequence ended.

    The local engine reports ``stop`` or ``length``; a chat model reports ``tool_calls`` where a call was made.
    ``cancelled`` and ``error`` are for remote engines: locally, cancelled sequences report nothing and errors are
    raised.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token in the distribution it was drawn from, and of the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestGroup:
    """A request group: samples that may copy from each other's text. Every sequence made with it joins it."""

    def __init__(self) -> None:
        self.samples: list[Sequence] = []


class Sequence:
    """One sample of one request: its prompt, tokens, grammar state and finish reason.

    Everything else that is known about it (K and V, draft state) is derived and may be lost.

    Args:
        prompt: ids before the first emitted token.
        params: sampling settings.
        matcher: grammar state, owned by this sequence; None where every token is legal.
        end_tokens: ids that end the sequence.
        detokenizer: gives the text; None where no text is needed.
        seed: of this sample; None draws one.
        limit: most tokens to emit, where the context ends before ``params.max_tokens``.
        gamma: tokens to draft per round, None for the decoder's own choice.
        acceptance: rule by which its drafted tokens are accepted.
        group: the samples that drafters may copy from; None for a sequence by itself.

    Raises:
        InvalidRequestError: for a limit below 1 or a negative gamma.
    """

    def __init__(
        self,
        prompt: SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        matcher: Matcher | None = None,
        end_tokens: Collection[int] = frozenset(),
        detokenizer: Detokenizer | None = None,
        seed: int | None = None,
        limit: int | None = None,
        gamma: int | None = None,
        acceptance: Acceptance = "rejection",
        group: RequestGroup | None = None,
    ) -> None:
        self.params = params or SamplingParams()
        self.matcher = matcher
        self.end_tokens = frozenset(end_tokens) | frozenset(self.params.stop_token_ids)
        self.limit = self.params.max_tokens if limit is None else min(limit, self.params.max_tokens)
        if self.limit < 1 or (gamma or 0) < 0:
            raise InvalidRequestError(f"Expected limit >= 1 and gamma >= 0, got limit={limit} and gamma={gamma}.")
        self.gamma = gamma
        self.acceptance: Acceptance = acceptance
        self.seed = fresh_seed() if seed is None else seed
        self.context = list(prompt)
        self.prompt_length = len(self.context)
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.fault: BaseException | None = None
        """Why it cannot go on: a commit that ended half-way, or a matcher that raised and may stand anywhere."""
        self._detokenizer = detokenizer
        self._stops = None
        if detokenizer is not None and self.params.stop:
            self._stops = StopStrings(self.params.stop, detokenizer, self.params.include_stop)
        self._stopped: Ending | None = None  # by a stop string
        self.group = group
        if group is not None:
            group.samples.append(self)

    @property
    def siblings(self) -> SequenceOf[Sequence]:
        """The samples of its request group, itself among them; none without a group."""
        return self.group.samples if self.group is not None else ()

    @property
    def tokens(self) -> list[int]:
        """The emitted ids, the end token included."""
        return self.context[self.prompt_length :]

    @property
    def length(self) -> int:
        """Number of emitted tokens."""
        return len(self.context) - self.prompt_length

    @property
    def text(self) -> str:
        """The text so far; once finished, the text of the emitted tokens before the end."""
        if self._stopped is not None:
            return self._stopped.text
        return self._detokenizer.text if self._detokenizer else ""

    @property
    def settled_text(self) -> str:
        """The text that no later token can take back: without what may become a stop string."""
        if self.finish_reason is not None or self._stops is None:
            return self.text
        return self.text[: self._stops.settled()[0]]

    @property
    def settled_length(self) -> int:
        """Emitted tokens that no later token can take back, their text being whole and settled."""
        if self._detokenizer is None or self.finish_reason is not None:
            return self.length
        if self._stops is not None:
            return self._stops.settled()[1]
        if self._detokenizer.is_whole:
            return self.length
        ends = self._detokenizer.ends
        return next((n for n in range(self.length, 0, -1) if ends[n - 1] is not None), 0)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.length

    def extend(self, tokens: SequenceOf[int], consumed: int = 0, timer: PhaseTimer | None = None) -> int:
        """Commit tokens up to the first boundary in them; return how many were committed.

        The earliest boundary wins; at one position a stop string goes before an end token, the end of the grammar
        and the limit.

        Args:
            tokens: accepted tokens and the next one.
            consumed: how many of them the matcher has consumed already.
            timer: counts the seconds of decoding text, as ``"detokenize"``.

        Raises:
            GrammarError: for a token that the grammar does not allow.
        """
        timer = timer or PhaseTimer()
        for count, token in enumerate(tokens, 1):
            if count > consumed:
                self._accept(token)
            self.context.append(token)
            if self._detokenizer is not None:
                self._detokenizer.push(token)
            reason = self._boundary(token, timer, matcher_is_here=count >= consumed)
            if reason is not None:
                if self.matcher is not None and count < consumed:
                    self.matcher.rollback(consumed - count)
                with timer("detokenize"):
                    self.finish(reason)
                return count
        return len(tokens)

    def finish(self, reason: FinishReason) -> None:
        """End the sequence here; drop a stop string that was found, and the tokens wholly inside it."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return
        self._detokenizer.flush()
        if self._stopped is not None:
            del self.context[self.prompt_length + self._stopped.tokens :]

    def give_up(self, error: BaseException) -> None:
        """Note why the sequence cannot go on; the first reason counts."""
        if self.fault is None:
            self.fault = error

    def _accept(self, token: int) -> None:
        """Move the matcher over a token; an end token stays outside of it."""
        if self.matcher is None or token in self.end_tokens:
            return
        if not self.matcher.accept_token(token):
            raise GrammarError(f"Token {token} was drawn, which the grammar does not allow here.")

    def _boundary(self, token: int, timer: PhaseTimer, *, matcher_is_here: bool) -> FinishReason | None:
        """Return why the sequence ends after a token. A matcher that stands further on is not asked about its end."""
        ends = token in self.end_tokens or (matcher_is_here and self._grammar_is_over())
        if self._find_stop_string(timer) or ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.limit else None

    def _find_stop_string(self, timer: PhaseTimer) -> bool:
        """Note where a stop string ends the text; return whether one does."""
        if self._stops is not None:
            with timer("detokenize"):
                self._stopped = self._stops.find()
        return self._stopped is not None

    def _grammar_is_over(self) -> bool:
        return self.matcher is not None and self.matcher.is_terminated()
