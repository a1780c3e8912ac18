"""Along the drafts of a round: what a grammar says of every position, for the drafter and for the target alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from agentspec.errors import GrammarError
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.token_mask import Masks, TokenMask
from agentspec.runtime.tokens import common_prefix

T = TypeVar("T")
Asked = TypeVarTuple("Asked")


class ConstrainedText(Protocol):
    """What a cursor needs of a sequence: ``agentspec.sequence.Sequence`` has it all."""

    @property
    def context(self) -> list[int]:
        """Prompt and emitted tokens."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end the sequence."""
        ...

    @property
    def matcher(self) -> Matcher | None:
        """The grammar state behind the context; None where every token is legal."""
        ...

    def give_up(self, error: BaseException) -> None:
        """Note why the sequence cannot go on."""
        ...


class GrammarCursor:
    """A cursor along a batch's drafts, on which the grammars are asked what is legal at every position.

    It stands, in every row, behind the row's context and what has been drafted so far. The matchers of the batch's
    sequences move with it; ``reset`` puts them back where they stood.

    Args:
        sequences: whose drafts, a row each.
        vocab_size: ids that the target scores.
        device: where masks are needed.
        keeps_masks: whether the mask of every position will be asked for (``masks``). Otherwise one is made where
            somebody asks for it: to tell whether a token is legal, or forced, takes none. (Without it a token may pass
            for one of several that is the only one for another reason than the grammar's: for want of tokens, say.)
    """

    def __init__(
        self,
        sequences: Sequence[ConstrainedText],
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        keeps_masks: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self._rows = [_RowCursor(sequence, keeps_masks) for sequence in sequences]
        self._device = device
        self._forced_reserved = False

    @property
    def seconds(self) -> float:
        """Spent on grammars so far."""
        return sum(row.seconds for row in self._rows)

    def drafted(self, row: int) -> int:
        """How many tokens have been walked in this row."""
        return len(self._rows[row].tokens)

    def tokens(self, row: int) -> list[int]:
        """The tokens that have been walked in this row."""
        return self._rows[row].tokens

    def context(self, row: int) -> list[int]:
        """The row's context with the drafted prefix behind it."""
        return self._rows[row].sequence.context + self._rows[row].tokens

    def is_open(self, row: int) -> bool:
        """Whether a drafter may go on here.

        False behind a token that ends the sequence or cannot be accepted, and at forced tokens once reserved.
        """
        forced = self.forced(row)  # which may find that the grammar is over here
        return self._rows[row].is_open and not (self._forced_reserved and forced is not None)

    def reserve_forced(self) -> None:
        """From now on forced tokens are drafted by the caller; the drafters it asks stop at them."""
        self._forced_reserved = True

    def forced(self, row: int, behind: Sequence[int] | None = None) -> int | None:
        """The only legal token where the cursor stands; None where there is a choice, or nothing to go on with.

        ``behind`` is for another place: behind these tokens, which begin with those walked or are the first of them.
        """
        cursor = self._rows[row]
        if behind is not None and len(behind) > len(cursor.tokens):
            self.seek(row, behind)
        place = cursor.see() if behind is None or len(behind) == len(cursor.tokens) else cursor.places[len(behind)]
        return None if place is None else place.forced

    def token_mask(self, row: int) -> TokenMask | None:
        """The tokens that are legal where the cursor stands; None where all are."""
        return self._rows[row].token_mask()

    def allows(self, row: int, token: int) -> bool:
        """Whether a token is legal where the cursor stands."""
        return self._rows[row].allows(token)

    def consume(self, row: int, token: int) -> None:
        """GrammarCursor on over a drafted token, which may be one that cannot be accepted."""
        self._rows[row].consume(token)

    def try_consume(self, row: int, token: int) -> bool:
        """GrammarCursor on over a token where it is legal; whether it is."""
        return self._rows[row].try_consume(token)

    def consume_drafts(self, spans: Sequence[Sequence[int]]) -> None:
        """GrammarCursor over what was drafted and not yet walked."""
        for row, span in enumerate(spans):
            for token in span[self.drafted(row) :]:
                self.consume(row, token)

    def legal(self, row: int) -> int:
        """How many tokens were walked before the first that is not legal."""
        return self._rows[row].legal

    def seek(self, row: int, tokens: Sequence[int]) -> None:
        """Go back or on, so as to stand behind these tokens."""
        cursor = self._rows[row]
        cursor.rollback(common_prefix(cursor.tokens, tokens))
        for token in tokens[len(cursor.tokens) :]:
            cursor.consume(token)

    def commit(self, row: int, block: Sequence[int]) -> int:
        """Give up a row: its matcher stays behind as much of ``block`` as was walked. How many tokens these are."""
        return self._rows[row].commit(block)

    def stack(self, rows: Sequence[int]) -> Tensor | None:
        """``[len(rows), 1, V]`` bool: the masks where the cursor stands; None where all is legal in all rows."""
        return Masks([[self.token_mask(row)] for row in rows], self._device).tensor

    def masks(self, spans: Sequence[Sequence[int]]) -> Masks:
        """``[B, K+1]``: the mask before each drafted token and behind the last, of a cursor that keeps them.

        Behind a token that cannot be accepted everything is legal: no token is ever drawn there.
        """
        self.consume_drafts(spans)
        for row in range(len(spans)):
            self.token_mask(row)
        rows = [row.masks(len(span) + 1) for row, span in zip(self._rows, spans, strict=True)]
        return Masks(rows, self._device)

    def choices(self, row: int, count: int) -> list[bool]:
        """For each of the first ``count`` walked tokens, whether the grammar left a choice."""
        return [place is None or place.forced is None for place in self._rows[row].places[:count]]

    def constrained(self, row: int, count: int) -> int:
        """How many of a row's first ``count`` positions a grammar had a say in."""
        return sum(place is not None for place in self._rows[row].places[:count])

    def reset(self) -> list[BaseException]:
        """Put every matcher back to where the cursor began, but for those of committed rows; return the errors.

        Each error is the ``fault`` of its row's sequence too.
        """
        errors: list[BaseException] = []
        for row in self._rows:
            try:
                row.reset()
            except BaseException as error:  # an engine in Rust panics with one that is no Exception
                errors.append(error)
        return errors


class _Place:
    """What a grammar says of a position: the only legal token, where there is just one; and its mask, once asked."""

    __slots__ = ("forced", "is_accepting", "mask")

    def __init__(self) -> None:
        self.is_accepting = False
        self.forced: int | None = None
        self.mask: TokenMask | None = None


class _RowCursor:
    """One row's cursor: ``places[k]`` is the one before ``tokens[k]``; None where everything is legal."""

    def __init__(self, sequence: ConstrainedText, keeps_masks: bool) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.places: list[_Place | None] = []
        self._keeps_masks = keeps_masks
        self._closed_at: int | None = None  # tokens behind which nothing is drafted
        self._illegal_at: int | None = None  # place of the first illegal token
        self._matcher = sequence.matcher
        self._taken = 0  # tokens that the matcher was moved by
        self.seconds = 0.0  # that it took

    @property
    def is_open(self) -> bool:
        """Whether a draft may go on where the cursor stands."""
        return self._closed_at is None

    @property
    def legal(self) -> int:
        """Tokens before the first illegal one."""
        return len(self.tokens) if self._illegal_at is None else self._illegal_at

    def see(self) -> _Place | None:
        """The place where the cursor stands."""
        if len(self.places) == len(self.tokens):
            self.places.append(self._place())
        return self.places[-1]

    def token_mask(self) -> TokenMask | None:
        place = self.see()
        if place is None:
            return None
        if place.mask is None:
            self._ask_mask(place)
        return place.mask

    def masks(self, count: int) -> list[TokenMask | None]:
        """Those of the first places, which were kept."""
        return [None if place is None else place.mask for place in self.places[:count]]

    def allows(self, token: int) -> bool:
        is_legal = self._takes(token)
        self._rewind(len(self.tokens))
        return is_legal

    def try_consume(self, token: int) -> bool:
        is_legal = self._takes(token)
        if is_legal:
            self._append(token, ends=token in self.sequence.end_tokens)
        return is_legal

    def consume(self, token: int) -> None:
        if not self.try_consume(token):
            self._illegal_at = len(self.tokens)
            self._append(token, ends=True)

    def rollback(self, count: int) -> None:
        """To behind so many of the tokens, as far as they are legal: what is behind these is of no use."""
        del self.tokens[count:], self.places[count + 1 :]
        self._rewind(count)
        if self._illegal_at is not None and self._illegal_at >= count:
            self._illegal_at = None
        if self._closed_at is not None and self._closed_at > count:
            self._closed_at = None

    def commit(self, block: Sequence[int]) -> int:
        self._rewind(common_prefix(self.tokens, block))
        left, self._taken = self._taken, 0
        return left

    def reset(self) -> None:
        self._rewind(0)

    def _rewind(self, count: int) -> None:
        """Put the matcher back to behind so many tokens."""
        if self._matcher is not None and self._taken > count:
            self._ask(self._matcher.rollback, self._taken - count)
            self._taken = count

    def _ask(self, question: Callable[[*Asked], T], *about: *Asked) -> T:
        """Return what the matcher answers; count the seconds.

        A matcher that raises may stand anywhere: the exception is the fault of this row's sequence, and of no other.
        """
        started = time.perf_counter()
        try:
            return question(*about)
        except BaseException as error:
            self.sequence.give_up(error)
            raise
        finally:
            self.seconds += time.perf_counter() - started

    def _place(self) -> _Place | None:
        if self._matcher is None or not self.is_open:
            return None
        place = _Place()
        place.forced = None if self._keeps_masks else self._ask(self._matcher.forced)
        is_over = place.forced is None and self._ask(self._matcher.is_terminated)
        place.is_accepting = is_over or self._ask(self._matcher.is_accepting)
        if is_over:
            self._closed_at = len(self.tokens)
            return None  # the commit ends the sequence before anything is drawn here
        if place.is_accepting and self.sequence.end_tokens:
            place.forced = None
        if self._keeps_masks or place.forced in self.sequence.end_tokens:
            self._ask_mask(place)
        return place

    def _ask_mask(self, place: _Place) -> None:
        assert self._matcher is not None
        place.mask = self._ask(self._matcher.token_mask).with_tokens(self.sequence.end_tokens, legal=place.is_accepting)
        place.forced = place.mask.single_token
        if place.mask.is_empty:
            self._closed_at = len(self.tokens)  # a dead end: an error, but only for a text that gets here

    def _takes(self, token: int) -> bool:
        """Whether a token is legal where the cursor stands. The matcher moves on by it."""
        place = self.see()
        if place is None:
            return True
        if token in self.sequence.end_tokens:
            return place.is_accepting
        if place.forced not in (None, token) or (place.mask is not None and token not in place.mask):
            return False
        assert self._matcher is not None
        taken = self._ask(self._matcher.accept_token, token)
        if not taken and place.mask is not None:
            raise GrammarError(f"The grammar engine refuses token {token}, which its mask allows.")
        self._taken += taken
        return taken

    def _append(self, token: int, *, ends: bool) -> None:
        self.tokens.append(token)
        if ends and self.is_open:
            self._closed_at = len(self.tokens)
