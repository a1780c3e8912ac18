"""Keep foreign text in a prompt text: a control token that a message or a tool spells never becomes that token."""

from __future__ import annotations

import json
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from agentspec.grammars.tool_calls import ReasoningFormat
from agentspec.runtime.threads import lock_of
from agentspec.runtime.tokens import well_formed

THOUGHT_MARKS = frozenset((ReasoningFormat().opener, ReasoningFormat().end))
"""Chat templates look for these in messages of the assistant, so they keep their meaning there."""


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt, or a part of one.

    Args:
        text: of the prompt.
        spelled: places in it where foreign text spells a control token.
        guarded: whether foreign text spells one at all, maybe in another form that the tokenizer normalises.
    """

    text: str
    spelled: tuple[tuple[int, int], ...] = ()
    guarded: bool = False

    def part(self, begin: int, end: int | None = None) -> Rendered:
        """Return the text between two offsets; neither lies within a spelled token."""
        end = len(self.text) if end is None else end
        spelled = tuple((a - begin, b - begin) for a, b in self.spelled if begin <= a and b <= end)
        return Rendered(self.text[begin:end], spelled, self.guarded)

    def spells_in(self, begin: int, end: int) -> bool:
        """Whether a token is spelled between two places, or across one of them."""
        return any(a < end and begin < b for a, b in self.spelled)


class ControlTokens:
    """The tokens that give a tokenizer's prompts their structure.

    These are its special tokens, and other added tokens that the chat template or the dialect writes (``<tool_call>``).

    Args:
        tokenizer: of transformers.
        written: all that template and dialect write.
    """

    def __init__(self, tokenizer: Any, written: str) -> None:
        added = {
            str(token.content): (i, token)
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or _is_structure(str(token.content), written)
        }
        self._tokenizer = weakref.ref(tokenizer)  # which owns this object
        self._ids = {content: i for content, (i, _) in added.items()}
        self.contents = tuple(self._ids)
        self._pattern = _any_of(self.contents)
        self._any_added = _any_of([str(token.content) for token in tokenizer.added_tokens_decoder.values()])
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalize = backend.normalizer.normalize_str if backend is not None and backend.normalizer else None
        normalized = {self._normalize(c) for c, (_, token) in added.items() if token.normalized and self._normalize}
        self._normalized = _any_of(sorted(normalized - {""}))
        # Made once. The lock of a ``cached_property`` (Python 3.11) would stay held in a forked child.
        self._made: list[tuple[Tokenizer, dict[str, str]] | None] = []

    def spelled_in(self, text: str) -> Iterator[re.Match[str]]:
        """Return the offsets where a text spells one."""
        return iter(()) if self._pattern is None else self._pattern.finditer(text)

    def occur_in(self, text: str, *, but: frozenset[str] = frozenset()) -> bool:
        """Whether a text spells one, be it in a form that the tokenizer normalises to it."""
        if any(match[0] not in but for match in self.spelled_in(text)):
            return True
        if self._normalized is None or self._normalize is None:
            return False
        return any(match[0] not in but for match in self._normalized.finditer(self._normalize(text)))

    def encode(self, rendered: Rendered) -> list[int]:
        """Return the ids of a prompt in which what is spelled is text, as if its tokens did not exist."""
        with lock_of(self):  # renewed in a forked child
            if not self._made:
                self._made.append(self._guarded())
            guarded = self._made[0]
        if guarded is None:
            return self._encode_apart(rendered)
        backend, marker_of = guarded
        pieces, at = [], 0
        for begin, end in (*rendered.spelled, (len(rendered.text), len(rendered.text))):
            between = rendered.text[at:begin]
            if self._any_added is not None:
                between = self._any_added.sub(lambda match: marker_of.get(match[0], match[0]), between)
            pieces += [between, rendered.text[begin:end]]
            at = end
        ids: list[int] = backend.encode("".join(pieces), add_special_tokens=False).ids
        return ids

    def _guarded(self) -> tuple[Tokenizer, dict[str, str]] | None:
        """Return the tokenizer with other spellings of its control tokens, and these; None where that cannot be made.

        All else is the same: whatever surrounds a token is encoded as ever. The spellings cannot be guessed.
        """
        nonce = f"Q{secrets.token_hex(12)}Q"
        marker_of = {content: f"{nonce}{i}Q" for content, i in self._ids.items()}
        try:
            written = json.loads(self._tokenizer().backend_tokenizer.to_str())  # type: ignore[union-attr]
            backend = Tokenizer.from_str(json.dumps(_respelled(written, marker_of)))
        except Exception:  # tokenizers raises bare exceptions, and not every tokenizer has a backend
            return None
        known = backend.get_added_tokens_decoder()
        same = {token["id"]: marker_of.get(token["content"], token["content"]) for token in written["added_tokens"]}
        return (backend, marker_of) if {i: token.content for i, token in known.items()} == same else None

    def _encode_apart(self, rendered: Rendered) -> list[int]:
        """Return the ids of a prompt that is cut within every spelled token."""
        tokenizer, ids, at = self._tokenizer(), list[int](), 0
        for place in (*(begin + 1 for begin, _ in rendered.spelled), len(rendered.text)):
            ids += tokenizer.encode(rendered.text[at:place], add_special_tokens=False)  # type: ignore[union-attr]
            at = place
        return ids


def _is_structure(content: str, written: str) -> bool:
    """Whether an added token that is not special is one of the template's: words and blanks are ordinary text."""
    return content in written and not content.isalnum() and not content.isspace()


def _any_of(contents: tuple[str, ...] | list[str]) -> re.Pattern[str] | None:
    """Return a pattern of the longest of several texts, grouped by first characters: there may be thousands."""
    groups: dict[str, list[str]] = {}
    for content in sorted(contents, key=len, reverse=True):
        groups.setdefault(content[:2], []).append(content[2:])
    heads = sorted(groups, key=len, reverse=True)
    parts = [f"{re.escape(head)}(?:{'|'.join(map(re.escape, groups[head]))})" for head in heads]
    return re.compile("|".join(parts)) if parts else None


def _respelled(written: dict[str, Any], spelling: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's JSON with other spellings of some tokens."""
    model = dict(written["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {spelling.get(token, token): i for token, i in vocabulary.items()}
    elif vocabulary is not None:
        model["vocab"] = [[spelling.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in spelling:
        model["unk_token"] = spelling[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _makes_any(pair, spelling)]
    added = [
        {**token, "content": spelling.get(token["content"], token["content"])} for token in written["added_tokens"]
    ]
    changed = {"model": model, "added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
    return {**written, **changed}


def _makes_any(pair: Any, contents: Mapping[str, str]) -> bool:
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left in contents or right in contents or left + right in contents


_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], ControlTokens]] = weakref.WeakKeyDictionary()


def control_tokens(tokenizer: Any, written: str) -> ControlTokens:
    """Return a tokenizer's control tokens; the same object for the same tokenizer, until it gets new tokens."""
    known = _known.setdefault(tokenizer, {})
    key = (len(tokenizer), written)
    if key not in known:
        known[key] = ControlTokens(tokenizer, written)
    return known[key]


class Foreign:
    """The foreign text of one prompt, its control tokens hidden from the template under words that cannot be guessed.

    The words are of letters and digits, so they survive what templates do to texts: trimming, JSON, escapes.

    Args:
        control: tokens that foreign text may only spell; None where it may be them.
        texts: messages and tools.
    """

    def __init__(self, control: ControlTokens | None, texts: Any) -> None:
        self._control = control
        self._guarded = control is not None and any(map(control.occur_in, _leaves(texts)))
        self._word = f"Q{secrets.token_hex(12)}Q"

    def hidden(self, value: Any, *, but: frozenset[str] = frozenset()) -> Any:
        """Return a message, a tool or a part of one as the template gets it; lone surrogates become U+FFFD."""
        if isinstance(value, str):
            return self._hide(well_formed(value), but)
        if isinstance(value, Mapping):
            spares = THOUGHT_MARKS if value.get("role") == "assistant" else frozenset[str]()
            return {
                self.hidden(key): self.hidden(part, but=spares if key == "content" else but)
                for key, part in value.items()
            }
        return [self.hidden(part, but=but) for part in value] if isinstance(value, list | tuple) else value

    def _hide(self, text: str, but: frozenset[str]) -> str:
        if not self._guarded or self._control is None:
            return text
        contents, pieces, at = self._control.contents, list[str](), 0
        for match in self._control.spelled_in(text):
            if match[0] not in but:
                pieces += [text[at : match.start()], f"{self._word}{contents.index(match[0])}Q"]
                at = match.end()
        return "".join([*pieces, text[at:]])

    def shown(self, text: str) -> Rendered:
        """Return a text that the template made, with the tokens spelled again."""
        if not self._guarded or self._control is None:
            return Rendered(text)
        pieces = re.split(f"(?i:{self._word}([0-9]+)Q)", text)
        whole, spelled = pieces[0], []
        for index, after in zip(pieces[1::2], pieces[2::2], strict=True):
            content = self._control.contents[int(index)]
            spelled.append((len(whole), len(whole) + len(content)))
            whole += content + after
        return Rendered(whole, tuple(spelled), guarded=True)


def _leaves(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(key)
            yield from _leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
