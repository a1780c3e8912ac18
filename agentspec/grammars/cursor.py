"""`GrammarCursor`: the grammar state along the drafts of a round, asked by the drafter and for the target alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

import torch

from agentspec.errors import GrammarError
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.token_mask import PackedMasks, TokenMask
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.runtime.tokens import common_prefix

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


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
        """The grammar state after the context; None where every token is legal."""
        ...

    def give_up(self, error: BaseException) -> None:
        """Note why the sequence cannot go on."""
        ...


class GrammarCursor:
    """A cursor along the drafts of a batch, which knows the legal tokens at every position.

    In each row it stands after the context and the drafted tokens that it consumed. The matchers of the sequences move
    with it; ``reset`` puts them back. A mask is made when it is first asked for, and asking changes no other answer:
    most questions (is this token legal, which one is forced) need none.

    Args:
        sequences: one per row.
        vocab_size: number of the target's logits.
        device: of the logits that masks are applied to.
        timer: counts the seconds of the grammars as the phase "mask"; None for a timer of its own.
    """

    def __init__(
        self,
        sequences: Sequence[ConstrainedText],
        vocab_size: int,
        device: torch.device | str = "cpu",
        timer: PhaseTimer | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        timer = timer or PhaseTimer()
        self._rows = [_RowCursor(sequence, timer) for sequence in sequences]
        self._device = device
        self._forced_reserved = False

    def drafted(self, row: int) -> int:
        """Return how many tokens of a row were consumed."""
        return len(self._rows[row].tokens)

    def tokens(self, row: int) -> list[int]:
        """Return the consumed tokens of a row."""
        return self._rows[row].tokens

    def context(self, row: int) -> list[int]:
        """Return the context of a row, followed by the consumed tokens."""
        return self._rows[row].sequence.context + self._rows[row].tokens

    def is_open(self, row: int) -> bool:
        """Return whether a drafter may go on here.

        False after a token that ends the sequence or is illegal, and at forced tokens once these are reserved.
        """
        forced = self.forced(row)  # may find that the grammar is terminated here
        return self._rows[row].is_open and not (self._forced_reserved and forced is not None)

    def reserve_forced(self) -> None:
        """Leave forced tokens to the caller from now on: the drafters that it asks stop at them."""
        self._forced_reserved = True

    def forced(self, row: int, after: Sequence[int] | None = None) -> int | None:
        """Return the only legal token; None where there are several, or none.

        Args:
            row: of the batch.
            after: the drafted tokens that precede it, a prefix or an extension of those consumed; None for these.
        """
        cursor = self._rows[row]
        if after is not None and len(after) > len(cursor.tokens):
            self.seek(row, after)
        position = cursor.position(len(cursor.tokens if after is None else after))
        return None if position is None else position.forced

    def token_mask(self, row: int) -> TokenMask | None:
        """Return the mask where the cursor stands; None where every token is legal."""
        return self._rows[row].mask(self.drafted(row))

    def token_masks(self, rows: Sequence[int]) -> PackedMasks:
        """Return the masks ``[len(rows), 1]`` where the cursor stands."""
        return PackedMasks([[self.token_mask(row)] for row in rows], self._device)

    def masks(self, spans: Sequence[Sequence[int]]) -> PackedMasks:
        """Return the masks ``[B, K+1]`` before each drafted token and after the last; ``spans`` are consumed.

        After an illegal token every token is legal: none is ever drawn there.
        """
        for row, span in enumerate(spans):
            self.seek(row, span)
        masks = [[self._rows[row].mask(k) for k in range(len(span) + 1)] for row, span in enumerate(spans)]
        return PackedMasks(masks, self._device)

    def allows(self, row: int, token: int) -> bool:
        """Return whether a token is legal where the cursor stands."""
        return self._rows[row].allows(token)

    def consume(self, row: int, token: int) -> None:
        """Move past a drafted token, which may be illegal."""
        self._rows[row].consume(token)

    def try_consume(self, row: int, token: int) -> bool:
        """Move past a token if it is legal; return whether it is."""
        return self._rows[row].try_consume(token)

    def seek(self, row: int, tokens: Sequence[int]) -> None:
        """Move to after these drafted tokens."""
        cursor = self._rows[row]
        cursor.rollback(common_prefix(cursor.tokens, tokens))
        for token in tokens[len(cursor.tokens) :]:
            cursor.consume(token)

    def legal_prefix(self, row: int, span: Sequence[int]) -> int:
        """Return how many tokens of a drafted span precede the first illegal one; the span is consumed."""
        self.seek(row, span)
        return self._rows[row].legal_length

    def forced_positions(self, row: int, span: Sequence[int]) -> list[bool]:
        """Return for each token of a drafted span whether its position is forced; the span is consumed."""
        self.seek(row, span)
        return [self._rows[row].is_forced(k) for k in range(len(span))]

    def count_constrained(self, row: int, count: int) -> int:
        """Return how many of the first ``count`` positions that were asked about a grammar constrained."""
        return self._rows[row].count_constrained(count)

    def commit(self, row: int, block: Sequence[int]) -> int:
        """Detach a row: leave its matcher after consumed tokens that begin ``block``; return how many these are."""
        return self._rows[row].commit(block)

    def reset(self) -> list[BaseException]:
        """Put the matchers of all rows that were not committed back to where they began; return the errors.

        Each error is the ``fault`` of its row's sequence too.
        """
        errors: list[BaseException] = []
        for row in self._rows:
            try:
                row.move(0)
            except BaseException as error:  # an engine in Rust panics with one that is no Exception
                errors.append(error)
        return errors


class _Position:
    """What a grammar says of a position: the only legal token, whether the text may end, the mask once made."""

    __slots__ = ("forced", "is_accepting", "mask")

    def __init__(self, forced: int | None, is_accepting: bool) -> None:
        self.forced = forced
        self.is_accepting = is_accepting
        self.mask: TokenMask | None = None


class _RowCursor:
    """The cursor of one row.

    Invariants: ``_positions[k]`` precedes ``tokens[k]``, and is None where every token is legal. The matcher has
    accepted the first ``_moved`` tokens, which are all legal: masks are made at any position, so that it may stand
    before the cursor.
    """

    def __init__(self, sequence: ConstrainedText, timer: PhaseTimer) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self._positions: list[_Position | None] = []
        self._matcher = sequence.matcher
        self._moved = 0
        self._closed_at: int | None = None  # the number of tokens after which none is drafted
        self._illegal_at: int | None = None  # the index of the first illegal token
        self._timer = timer

    @property
    def is_open(self) -> bool:
        """Whether a draft may go on where the cursor stands."""
        return self._closed_at is None

    @property
    def legal_length(self) -> int:
        """The number of tokens before the first illegal one."""
        return len(self.tokens) if self._illegal_at is None else self._illegal_at

    def position(self, index: int) -> _Position | None:
        """Return the position after ``index`` of the tokens."""
        if index == len(self._positions):
            self._positions.append(self._look())
        return self._positions[index]

    def mask(self, index: int) -> TokenMask | None:
        """Return the mask after ``index`` of the tokens."""
        position = self.position(index)
        if position is not None and position.mask is None:
            position.mask = self._ask(self._make_mask, index, position.is_accepting)
        return None if position is None else position.mask

    def allows(self, token: int) -> bool:
        is_legal = self._accepts(token)
        self.move(min(self._moved, len(self.tokens)))
        return is_legal

    def try_consume(self, token: int) -> bool:
        is_legal = self._accepts(token)
        if is_legal:
            self._append(token, ends=token in self.sequence.end_tokens)
        return is_legal

    def consume(self, token: int) -> None:
        if not self.try_consume(token):
            self._illegal_at = len(self.tokens)
            self._append(token, ends=True)

    def rollback(self, count: int) -> None:
        """Go back to after ``count`` of the tokens."""
        self.move(min(self._moved, count))
        del self.tokens[count:], self._positions[count + 1 :]
        if self._illegal_at is not None and self._illegal_at >= count:
            self._illegal_at = None
        if self._closed_at is not None and self._closed_at > count:
            self._closed_at = None

    def is_forced(self, index: int) -> bool:
        position = self._positions[index]
        return position is not None and position.forced is not None

    def count_constrained(self, count: int) -> int:
        return sum(position is not None for position in self._positions[:count])

    def commit(self, block: Sequence[int]) -> int:
        self.move(min(self._moved, common_prefix(self.tokens, block)))
        moved, self._moved = self._moved, 0
        return moved

    def move(self, count: int) -> None:
        """Put the matcher to after ``count`` of the tokens, which it has accepted before."""
        if count != self._moved:
            self._ask(self._move, count)

    def _ask(self, question: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Return the answer of the matcher; count its seconds.

        A matcher that raises may stand anywhere: the exception is the fault of this row's sequence, and of no other.
        """
        try:
            with self._timer("mask"):
                return question(*arguments)
        except BaseException as error:
            self.sequence.give_up(error)
            raise

    def _accepts(self, token: int) -> bool:
        """Return whether a token is legal where the cursor stands; the matcher moves past it if it is."""
        position = self.position(len(self.tokens))
        if position is None:
            return True
        if token in self.sequence.end_tokens:
            return position.is_accepting
        if position.forced not in (None, token) or (position.mask is not None and token not in position.mask):
            return False
        is_legal = self._ask(self._accept, token)
        if not is_legal and position.mask is not None:
            raise GrammarError(f"The grammar engine refuses token {token}, which its mask allows.")
        return is_legal

    def _append(self, token: int, *, ends: bool) -> None:
        self.tokens.append(token)
        if ends and self.is_open:
            self._closed_at = len(self.tokens)

    def _look(self) -> _Position | None:
        """Ask about the position where the cursor stands."""
        return self._ask(self._describe) if self._matcher is not None and self.is_open else None

    # What follows runs inside ``_ask``.

    def _describe(self) -> _Position | None:
        assert self._matcher is not None
        if self._moved != len(self.tokens):
            self._move(len(self.tokens))
        forced = self._matcher.forced()
        if forced is None and self._matcher.is_terminated():
            self._closed_at = len(self.tokens)
            return None  # the commit ends the sequence before a token is drawn here
        is_accepting, ends = self._matcher.is_accepting(), self.sequence.end_tokens
        has_other = forced in ends or (is_accepting and len(ends) > 0)  # a choice, or a dead end
        return _Position(None if has_other else forced, is_accepting)

    def _make_mask(self, index: int, is_accepting: bool) -> TokenMask:
        assert self._matcher is not None
        self._move(index)
        return self._matcher.token_mask().with_tokens(self.sequence.end_tokens, legal=is_accepting)

    def _accept(self, token: int) -> bool:
        assert self._matcher is not None
        if self._moved != len(self.tokens):
            self._move(len(self.tokens))
        is_legal = self._matcher.accept_token(token)
        self._moved += is_legal
        return is_legal

    def _move(self, count: int) -> None:
        assert self._matcher is not None
        if self._moved > count:
            self._matcher.rollback(self._moved - count)
            self._moved = count
        for token in self.tokens[self._moved : count]:
            if not self._matcher.accept_token(token):
                raise GrammarError(f"The grammar engine refuses token {token}, which it accepted before.")
            self._moved += 1
