"""Grammars by outlines-core: regular expressions, choices and JSON Schemas as automata; and outlines' own types.

The state is an integer and rollback is free. A grammar is compiled once on a machine: its automaton reads bytes, so it
serves every vocabulary, and is kept in the disk cache. The mask of a state is computed when a text first reaches it.

Differences from llguidance: no context-free grammars. JSON Schemas as in ``json_regex``: objects hold their named
properties only, and recursive schemas are refused. A token is legal however the tokenizer would have split the text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Literal

import torch

from agentspec.errors import CacheError, GrammarError, TokenizerError, shown
from agentspec.grammars.grammar import Grammar
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.outlines.automaton import Automaton, build
from agentspec.grammars.outlines.json_regex import json_regex
from agentspec.grammars.outlines.pattern import plain_pattern
from agentspec.grammars.outlines.text import literal
from agentspec.grammars.outlines.vocabulary import TokenTrie
from agentspec.grammars.schema_tools import to_json
from agentspec.grammars.schema_tools.leniency import expressible
from agentspec.grammars.token_mask import TokenMask
from agentspec.runtime.cache import DiskCache
from agentspec.runtime.tokens import token_bytes

COMPILED = 64  # grammars kept in memory; 10 KB to 20 MB each
MASKS = 256  # states of each whose masks are kept, packed


class Compiler:
    """A compiler of grammars for one tokenizer, which keeps the compiled ones.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: ids that the model's logits cover.
        cache: keeps automata between processes; None for no such cache.

    Raises:
        GrammarError: for a tokenizer whose tokens have no known bytes.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, cache: DiskCache | Literal["default"] | None = "default"
    ) -> None:
        try:
            self._written = token_bytes(tokenizer, vocab_size)
        except TokenizerError as error:
            raise GrammarError(f"Grammars by outlines cannot read these tokens: {error}") from error
        self._trie = TokenTrie(self._written)
        self._cache = _default_cache() if cache == "default" else cache
        self._compiled = functools.lru_cache(maxsize=COMPILED)(self._compile)

    def matcher(self, grammar: Grammar) -> OutlinesMatcher:
        """Return a matcher at the start of ``grammar``.

        Raises:
            GrammarError: where it cannot be compiled, is too large, or nothing matches it.
        """
        made = self._compiled(grammar)
        if isinstance(made, str):
            raise GrammarError(made)
        return OutlinesMatcher(made)

    def _compile(self, grammar: Grammar) -> Compiled | str:
        """Return the compiled grammar, or the reason why there is none: finding it may have taken seconds."""
        try:
            return self._build(grammar)
        except GrammarError as error:
            return str(error)

    def _build(self, grammar: Grammar) -> Compiled:
        if grammar.kind not in _REGEXES:
            raise GrammarError(
                f"The outlines engine has no grammars of the kind {shown(grammar.kind)}, only {', '.join(_REGEXES)}; "
                "llguidance has."
            )
        source = _lenient(grammar.source) if grammar.lenient and grammar.kind == "json_schema" else grammar.source
        compiled = Compiled(build(_REGEXES[grammar.kind](source), self._cache), self._written, self._trie)
        if not compiled.automaton.finals[_FIRST] and compiled.legal(_FIRST).is_empty:
            raise GrammarError(f"The {grammar.kind} grammar has no first token in this vocabulary; nothing matches it.")
        return compiled


_FIRST = 1  # state of an automaton


def _default_cache() -> DiskCache | None:
    try:
        return DiskCache()
    except CacheError:  # a folder of another user: compiling again is slower, and safe
        return None


def _lenient(source: str) -> str:
    """Return a schema without the parts that are not built."""
    return to_json(expressible(json.loads(source), _why_not_built)[0])


def _why_not_built(schema: Any) -> str | None:
    try:
        json_regex(schema)
    except GrammarError as error:
        return str(error)
    return None


def _regex(source: str) -> str:
    try:
        return plain_pattern(source).regex
    except ValueError as error:
        raise GrammarError(f"The outlines engine does not read {error}.") from error


def _choice(source: str) -> str:
    return "|".join(map(literal, json.loads(source)))


_REGEXES: dict[str, Callable[[str], str]] = {
    "regex": _regex,
    "choice": _choice,
    "json_schema": lambda source: json_regex(json.loads(source)),
}


class Compiled:
    """An automaton with the tokens of one vocabulary.

    Args:
        automaton: of the grammar.
        written: the bytes of each token; None for tokens that are never legal.
        trie: of the same tokens.
    """

    def __init__(self, automaton: Automaton, written: list[bytes | None], trie: TokenTrie) -> None:
        self.automaton = automaton
        self.vocab_size = len(written)
        self._written = written
        self._trie = trie
        self.legal = functools.lru_cache(maxsize=MASKS)(self._legal)
        """The tokens that may come next, by state (``[V]``)."""

    def after(self, state: int, token: int) -> int:
        """Return the state after a token; 0 where it is not legal."""
        written = self._written[token] if 0 <= token < self.vocab_size else None
        return self.automaton.after(state, written) if written else 0

    def _legal(self, state: int) -> TokenMask:
        return TokenMask.of(torch.from_numpy(self._trie.legal(self.automaton, state)))


class OutlinesMatcher(Matcher):
    """A matcher that is a stack of states: one for the beginning, and one after each token."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._states = [_FIRST]

    def token_mask(self) -> TokenMask:
        """Return the tokens that may come next; none once the grammar has ended."""
        return self._compiled.legal(self._states[-1])

    def accept_token(self, token: int) -> bool:
        """Accept one token; return False, and change nothing, where it is not allowed."""
        state = self._compiled.after(self._states[-1], token)
        if state:
            self._states.append(state)
        return state != 0

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        if not 0 <= count < len(self._states):
            raise GrammarError(f"Expected to undo at most {len(self._states) - 1} tokens, got {count}.")
        del self._states[len(self._states) - count :]

    def is_accepting(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""
        return bool(self._compiled.automaton.finals[self._states[-1]])
