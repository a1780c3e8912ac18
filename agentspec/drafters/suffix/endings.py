"""Where a text's endings occur: in one sequence, in its prompt, in finished outputs.

For some lengths k, every k tokens lead to their latest occurrence, and every occurrence to the one before it. Such
chains grow by a token, and lose their newest one again, in constant time.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from agentspec.sequence import Sequence as TokenSequence

SEPARATOR = -1
"""Separates texts that are kept in one array; equal to no token."""

_RECENT = 32  # prompts that are looked at for one like another

_GENERATIONS = 4  # the memory forgets in pieces of this part of it


class Endings:
    """Where in a text every sequence of some lengths ends, from the latest occurrence back.

    Args:
        lengths: of the sequences.
        start: first position whose continuation counts.
    """

    def __init__(self, lengths: list[int], start: int = 0) -> None:
        self._start = start
        self.end = start  # positions before it are known
        self._longest = max(lengths)
        self._tables: list[tuple[int, dict[bytes, int], array[int]]] = [(n, {}, array("i")) for n in lengths]

    def extend(self, ids: array[int], end: int, first: int = 0) -> None:
        """Index the positions up to ``end``; those before ``first`` are not to be found."""
        base, size = max(0, self.end - self._longest), ids.itemsize
        data = ids[base:end].tobytes()
        tables = [(max(length, first), length * size, latest, earlier) for length, latest, earlier in self._tables]
        for at in range(self.end, end):
            stop = (at - base) * size
            for begin, width, latest, earlier in tables:
                if at >= begin:
                    key = data[stop - width : stop]
                    earlier.append(latest.get(key, -1))
                    latest[key] = at
                else:
                    earlier.append(-1)
        self.end = max(self.end, end)

    def cut(self, ids: array[int], end: int) -> None:
        """Forget the positions from ``end`` on, of the text that all of them were taken from."""
        if end >= self.end:
            return
        for length, latest, earlier in self._tables:
            for at, key in reversed(list(_keys(ids, length, max(end, length), self.end))):
                before = earlier[at - self._start]
                if before < 0:
                    del latest[key]
                else:
                    latest[key] = before
            del earlier[end - self._start :]
        self.end = end

    def places(self, k: int, key: bytes, most: int) -> list[int]:
        """Return where the continuations of a sequence of the k-th length begin, latest first."""
        _, latest, earlier = self._tables[k]
        found: list[int] = []
        at = latest.get(key, -1)
        while at >= 0 and len(found) < most:
            found.append(at)
            at = earlier[at - self._start]
        return found


def _keys(ids: array[int], length: int, begin: int, end: int) -> Iterable[tuple[int, bytes]]:
    """Yield the positions from ``begin`` to ``end``, and for each the ``length`` tokens before it."""
    size = ids.itemsize
    data = ids[begin - length : end].tobytes() if begin < end else b""
    return ((at, data[(at - begin) * size : (at - begin + length) * size]) for at in range(begin, end))


class Text:
    """One sequence's tokens and their endings; those of the prompt are shared with other texts."""

    def __init__(self, sequence: TokenSequence, prompt: Endings, lengths: list[int]) -> None:
        self.owner = weakref.ref(sequence)
        self.context = sequence.context  # not a copy: the last block is committed when the owner may be gone
        self.prompt_length = sequence.prompt_length
        self.ids = array("i", self.context[: self.prompt_length])
        self.prompt = prompt
        self.output = Endings(lengths, self.prompt_length)
        self.is_kept = False  # in the memory
        self.asked = (0, 0, 1.0)  # length of the context, tokens drafted, probability that these are accepted

    def follow(self) -> None:
        """Follow the context: it grows by commits, and a stop string may take some tokens back."""
        kept = min(len(self.ids), len(self.context))
        self.cut(kept)
        if kept < len(self.context):
            self.extend(self.context[kept:])

    def extend(self, tokens: list[int]) -> None:
        """Index more tokens."""
        self.ids.extend(tokens)
        self.output.extend(self.ids, len(self.ids))

    def cut(self, length: int) -> None:
        """Go back to this many tokens."""
        self.output.cut(self.ids, length)
        del self.ids[length:]

    def probability_after(self, drafted: int) -> float:
        """Return the chance that what was proposed earlier in this round is accepted; 1 where nothing was."""
        length, until, probability = self.asked
        return probability if length == len(self.ids) and drafted >= until else 1.0


class Prompts:
    """The endings of recent prompts: samples share them, and the next turn goes on from those of the last.

    Args:
        lengths: of the endings.
        limit: most tokens of all prompts, but for the newest.
    """

    def __init__(self, lengths: list[int], limit: int) -> None:
        self._lengths = lengths
        self._limit = limit
        self._known: OrderedDict[Prompt, None] = OrderedDict()  # oldest first
        self._tokens = 0  # of all of them

    def endings(self, sequence: TokenSequence) -> Endings:
        """Return the endings of a sequence's prompt."""
        prompt = self._take_in(array("i", sequence.context[: sequence.prompt_length]))
        prompt.users.add(sequence)
        return prompt.endings

    def prepare(self, context: Sequence[int]) -> None:
        """Index the beginning of a prompt that will be asked for soon.

        No sequence reads it yet, so that another prompt may take its place.
        """
        ids = array("i", context)
        if not any(known.ids[: len(ids)] == ids for known in self._recent()):
            self._take_in(ids)

    def _take_in(self, ids: array[int]) -> Prompt:
        prompt = self._nearest(ids) or Prompt(Endings(self._lengths))
        self._known[prompt] = None
        self._known.move_to_end(prompt)
        self._tokens += len(ids) - len(prompt.ids)
        prompt.become(ids)
        while len(self._known) > 1 and self._tokens > self._limit:
            oldest, _ = self._known.popitem(last=False)
            self._tokens -= len(oldest.ids)
        return prompt

    def _nearest(self, ids: array[int]) -> Prompt | None:
        """Return the prompt that is this one, or an unused one that is mostly its beginning."""
        recent = self._recent()
        same = next((known for known in recent if known.ids == ids), None)
        if same is not None:
            return same
        shared = [(_common(known.ids, ids), known) for known in recent if not known.is_used()]
        begun = [(n, known) for n, known in shared if 2 * n > len(known.ids)]
        return max(begun, key=lambda item: item[0], default=(0, None))[1]

    def _recent(self) -> list[Prompt]:
        """Return the prompts that are looked at, the newest first."""
        return list(islice(reversed(self._known), _RECENT))


class Prompt:
    """A prompt, its endings, and the sequences that read them."""

    def __init__(self, endings: Endings) -> None:
        self.ids = array("i")
        self.endings = endings
        self.users: weakref.WeakSet[TokenSequence] = weakref.WeakSet()

    def is_used(self) -> bool:
        """Whether an unfinished sequence reads it."""
        return any(user.finish_reason is None for user in self.users)

    def become(self, ids: array[int]) -> None:
        """Keep what it has in common with these ids, and index the rest."""
        self.endings.cut(self.ids, _common(self.ids, ids))
        self.endings.extend(ids, len(ids))
        self.ids = ids


def _common(a: array[int], b: array[int]) -> int:
    """Return the length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.asarray(a[:n]) != np.asarray(b[:n])
    return int(differs.argmax()) if differs.any() else n


class Memory:
    """Finished outputs, in generations; the oldest of them is forgotten as a whole.

    Args:
        lengths: of the endings.
        limit: most tokens kept.
    """

    def __init__(self, lengths: list[int], limit: int) -> None:
        self._lengths = lengths
        self._share = limit // _GENERATIONS
        self.generations: deque[tuple[array[int], Endings]] = deque(maxlen=_GENERATIONS)

    def keep(self, tokens: list[int], before: int) -> bool:
        """Keep an output; return whether there was anything to keep, and room.

        Args:
            tokens: the output after some tokens of its prompt. Of one too long for a generation its end is kept.
            before: how many of the tokens are the prompt's; endings may begin in them.
        """
        kept = [SEPARATOR, *tokens][-self._share :] if self._share else []
        if len(tokens) <= before or not kept:
            return False
        if not self.generations or len(self.generations[-1][0]) + len(kept) > self._share:
            self.generations.append((array("i"), Endings(self._lengths)))
        ids, endings = self.generations[-1]
        first = len(ids) + max(0, 1 + before - (1 + len(tokens) - len(kept)))
        ids.extend(kept)
        endings.extend(ids, len(ids), first)
        return True
