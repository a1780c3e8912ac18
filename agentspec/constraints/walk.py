"""Along the drafts of a round: what a grammar says of every position, for the drafter and for the target alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor

from agentspec.errors import GrammarError
from agentspec.masks import Masks, TokenMask
from agentspec.sampling import Prefix
from agentspec.sequence import Batch
from agentspec.sequence import Sequence as TokenSequence
from agentspec.tokens import common_prefix

T = TypeVar("T")
Asked = TypeVarTuple("Asked")


class Walk:
    """A walk along a batch's drafts, on which the grammars are asked what is legal at every position.

    It stands, in every row, behind the row's context and what has been drafted so far. The matchers of the batch's
    sequences move with it; ``put_back`` puts them back where they stood.

    Args:
        batch: whose drafts.
        vocab_size: ids that the target scores.
        keeps_masks: whether the mask of every position will be asked for (``masks``). Otherwise one is made where
            somebody asks for it: to tell whether a token is legal, or forced, takes none. (Without it a token may pass
            for one of several that is the only one for another reason than the grammar's: for want of tokens, say.)
    """

    def __init__(self, batch: Batch, vocab_size: int, *, keeps_masks: bool = True) -> None:
        self.vocab_size = vocab_size
        self._rows = [_RowWalk(sequence, keeps_masks) for sequence in batch.sequences]
        self._device: torch.device | str = batch.device
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

    def prefix(self, row: int) -> Prefix:
        """What stands before the position where the walk stands."""
        sequence = self._rows[row].sequence
        return Prefix(self.context(row), sequence.prompt_length, 1, sequence.end_tokens)

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
        """The only legal token where the walk stands; None where there is a choice, or nothing to go on with.

        ``behind`` is for another place: behind these tokens, which begin with those walked or are the first of them.
        """
        walk = self._rows[row]
        if behind is not None and len(behind) > len(walk.tokens):
            self.stand_behind(row, behind)
        place = walk.see() if behind is None or len(behind) == len(walk.tokens) else walk.places[len(behind)]
        return None if place is None else place.forced

    def mask(self, row: int) -> TokenMask | None:
        """The tokens that are legal where the walk stands; None where all are."""
        return self._rows[row].mask()

    def allows(self, row: int, token: int) -> bool:
        """Whether a token is legal where the walk stands."""
        return self._rows[row].allows(token)

    def advance(self, row: int, token: int) -> None:
        """Walk on over a drafted token, which may be one that cannot be accepted."""
        self._rows[row].advance(token)

    def take(self, row: int, token: int) -> bool:
        """Walk on over a token where it is legal; whether it is."""
        return self._rows[row].take(token)

    def follow(self, spans: Sequence[Sequence[int]]) -> None:
        """Walk over what was drafted and not yet walked."""
        for row, span in enumerate(spans):
            for token in span[self.drafted(row) :]:
                self.advance(row, token)

    def legal(self, row: int) -> int:
        """How many tokens were walked before the first that is not legal."""
        return self._rows[row].legal

    def stand_behind(self, row: int, tokens: Sequence[int]) -> None:
        """Go back or on, so as to stand behind these tokens."""
        walk = self._rows[row]
        walk.go_back(common_prefix(walk.tokens, tokens))
        for token in tokens[len(walk.tokens) :]:
            walk.advance(token)

    def leave(self, row: int, block: Sequence[int]) -> int:
        """Give up a row: its matcher stays behind as much of ``block`` as was walked. How many tokens these are."""
        return self._rows[row].leave(block)

    def stack(self, rows: Sequence[int]) -> Tensor | None:
        """``[len(rows), 1, V]`` bool: the masks where the walk stands; None where all tokens are legal in all rows."""
        return Masks([[self.mask(row)] for row in rows], self._device).tensor

    def masks(self, spans: Sequence[Sequence[int]]) -> Masks:
        """``[B, K+1]``: the mask before each drafted token and behind the last, of a walk that keeps them.

        Behind a token that cannot be accepted everything is legal: no token is ever drawn there.
        """
        self.follow(spans)
        for row in range(len(spans)):
            self.mask(row)
        rows = [row.masks(len(span) + 1) for row, span in zip(self._rows, spans, strict=True)]
        return Masks(rows, self._device)

    def choices(self, row: int, count: int) -> list[bool]:
        """For each of the first ``count`` walked tokens, whether the grammar left a choice."""
        return [place is None or place.forced is None for place in self._rows[row].places[:count]]

    def constrained(self, row: int, count: int) -> int:
        """How many of a row's first ``count`` positions a grammar had a say in."""
        return sum(place is not None for place in self._rows[row].places[:count])

    def settle(self) -> None:
        """Put every matcher back to the start of the walk, but for those of rows that were given up.

        Raises:
            GrammarError: where one cannot go back; the others have. Or whatever else its engine raises.
        """
        errors = self.put_back()
        if errors:
            raise errors[0]

    def put_back(self) -> list[BaseException]:
        """Do what ``settle`` does; return the errors. Each is the ``fault`` of its row's sequence too."""
        errors: list[BaseException] = []
        for row in self._rows:
            try:
                row.settle()
            except BaseException as error:  # an engine in Rust panics with one that is no Exception
                errors.append(error)
        return errors


class _Place:
    """What a grammar says of a position: the only legal token, where there is just one; and its mask, once asked."""

    __slots__ = ("forced", "is_complete", "mask")

    def __init__(self) -> None:
        self.is_complete = False
        self.forced: int | None = None
        self.mask: TokenMask | None = None


class _RowWalk:
    """One row's walk: ``places[k]`` is the one before ``tokens[k]``; None where everything is legal."""

    def __init__(self, sequence: TokenSequence, keeps_masks: bool) -> None:
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
        """Whether a draft may go on where the walk stands."""
        return self._closed_at is None

    @property
    def legal(self) -> int:
        """Tokens before the first illegal one."""
        return len(self.tokens) if self._illegal_at is None else self._illegal_at

    def see(self) -> _Place | None:
        """The place where the walk stands."""
        if len(self.places) == len(self.tokens):
            self.places.append(self._place())
        return self.places[-1]

    def mask(self) -> TokenMask | None:
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

    def take(self, token: int) -> bool:
        is_legal = self._takes(token)
        if is_legal:
            self._append(token, ends=token in self.sequence.end_tokens)
        return is_legal

    def advance(self, token: int) -> None:
        if not self.take(token):
            self._illegal_at = len(self.tokens)
            self._append(token, ends=True)

    def go_back(self, count: int) -> None:
        """To behind so many of the tokens, as far as they are legal: what is behind these is of no use."""
        del self.tokens[count:], self.places[count + 1 :]
        self._rewind(count)
        if self._illegal_at is not None and self._illegal_at >= count:
            self._illegal_at = None
        if self._closed_at is not None and self._closed_at > count:
            self._closed_at = None

    def leave(self, block: Sequence[int]) -> int:
        self._rewind(common_prefix(self.tokens, block))
        left, self._taken = self._taken, 0
        return left

    def settle(self) -> None:
        self._rewind(0)

    def _rewind(self, count: int) -> None:
        """Put the matcher back to behind so many tokens."""
        if self._matcher is not None and self._taken > count:
            self._ask(self._matcher.rewind, self._taken - count)
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
        is_over = place.forced is None and self._ask(self._matcher.is_over)
        place.is_complete = is_over or self._ask(self._matcher.is_complete)
        if is_over:
            self._closed_at = len(self.tokens)
            return None  # the commit ends the sequence before anything is drawn here
        if place.is_complete and self.sequence.end_tokens:
            place.forced = None
        if self._keeps_masks or place.forced in self.sequence.end_tokens:
            self._ask_mask(place)
        return place

    def _ask_mask(self, place: _Place) -> None:
        assert self._matcher is not None
        place.mask = self._ask(self._matcher.allowed).but(self.sequence.end_tokens, legal=place.is_complete)
        place.forced = place.mask.only
        if place.mask.is_empty:
            self._closed_at = len(self.tokens)  # a dead end: an error, but only for a text that gets here

    def _takes(self, token: int) -> bool:
        """Whether a token is legal where the walk stands. The matcher moves on by it."""
        place = self.see()
        if place is None:
            return True
        if token in self.sequence.end_tokens:
            return place.is_complete
        if place.forced not in (None, token) or (place.mask is not None and token not in place.mask):
            return False
        assert self._matcher is not None
        taken = self._ask(self._matcher.advance, token)
        if not taken and place.mask is not None:
            raise GrammarError(f"The grammar engine refuses token {token}, which its mask allows.")
        self._taken += taken
        return taken

    def _append(self, token: int, *, ends: bool) -> None:
        self.tokens.append(token)
        if ends and self.is_open:
            self._closed_at = len(self.tokens)
