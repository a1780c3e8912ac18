"""The llguidance engine: JSON Schema, patterns and context-free grammars, a mask in tens of microseconds."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import llguidance
from llguidance import TokenizerWrapper

from agentspec.errors import GrammarError, TokenizerError, cut
from agentspec.grammars.grammar import Grammar, Kind
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.schema_tools import JSON_FORM, checked, in_json_form, to_json, without_unknown_formats
from agentspec.grammars.schema_tools.leniency import expressible
from agentspec.grammars.schema_tools.tightening import tightened
from agentspec.grammars.token_mask import TokenMask
from agentspec.runtime.spelling import Spelling
from agentspec.runtime.tokens import named_bytes, token_bytes

_TEXTS = 4096  # forced texts whose tokens are cached


class Compiler:
    """A compiler of grammars for one tokenizer; compiled grammars are cached.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of the target's logits.

    Raises:
        GrammarError: for a tokenizer that llguidance cannot read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = _tokenizer(tokenizer, vocab_size)
        self._compiled = functools.lru_cache(maxsize=256)(self._compile)

    def matcher(self, grammar: Grammar) -> LLGuidanceMatcher:
        """Return a matcher at the start of ``grammar``.

        Raises:
            GrammarError: where it cannot be compiled, has no first token, or cannot roll back.
        """
        return LLGuidanceMatcher(self._compiled(grammar).deep_copy(), self._tokenizer)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        try:
            source = _json_schema(grammar) if grammar.kind == "json_schema" else _SOURCES[grammar.kind](grammar.source)
        except ValueError as error:
            raise GrammarError(f"The {grammar.kind} grammar cannot be read: {cut(str(error))}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"The {grammar.kind} grammar cannot be compiled: {_reason(matcher)}")
        # One step is tried, so that a language without a text is an error here and not in a round.
        first = LLGuidanceMatcher(matcher.deep_copy(), self._tokenizer)
        token = _first_token(first)
        if token is None and not matcher.is_accepting():
            raise GrammarError(f"The {grammar.kind} grammar has no first token in this vocabulary; nothing matches it.")
        if token is not None:
            _check_rollback(first, token)
        return matcher


def why_inexpressible(schema: str) -> str | None:
    """Return why llguidance cannot express a schema in our JSON form (``in_json_form``); None where it can."""
    message = llguidance.LLMatcher.validate_grammar(f"start: %json {schema}")
    return message.split("\n<state>")[0].strip() or None


def _choice(source: str) -> str:
    return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(map(to_json, json.loads(source)))}")


def _json_schema(grammar: Grammar) -> str:
    schema = checked(json.loads(grammar.source))
    if schema is False:
        raise ValueError("no value satisfies the schema `false`")
    if grammar.lenient:
        schema, _ = expressible(schema, lambda tried: why_inexpressible(in_json_form(tried)))
    options: Any = JSON_FORM  # llguidance's own type for them is private
    known = to_json({} if schema is True else tightened(without_unknown_formats(schema)))
    return llguidance.LLMatcher.grammar_from_json_schema(known, overrides=options)


_SOURCES: dict[Kind, Callable[[str], str]] = {
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "choice": _choice,
    "lark": llguidance.LLMatcher.grammar_from_lark,
}


def _tokenizer(tokenizer: Any, vocab_size: int) -> llguidance.LLTokenizer:
    """Return a tokenizer for llguidance in which added tokens that are not special (``<tool_call>``, say) are text.

    llguidance's own reader of transformers tokenizers (1.9.1) treats all added tokens as special: no text can hold
    them, and a forced one is in the mask but refused by the matcher. It also encodes forced text as the tokenizer
    does, which may prepend a space.
    """
    try:
        vocabulary = _Vocabulary(tokenizer, vocab_size)
        return llguidance.LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=tokenizer.eos_token_id
        )
    except (TokenizerError, ValueError) as error:
        raise GrammarError(
            f"Grammars need a fast tokenizer whose tokens have bytes, got {type(tokenizer).__name__}: {error}"
        ) from error


class _Vocabulary:
    """The bytes of all tokens, the special ones among them, and the encoding of a text by the others."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        written = token_bytes(tokenizer, vocab_size)
        names = named_bytes(tokenizer, vocab_size)
        self.tokens = [
            name if text is None and name else text or f"<[{i}]>".encode()
            for i, (text, name) in enumerate(zip(written, names, strict=True))
        ]
        # A token without bytes is no text either, nor is an id beyond the tokenizer's own.
        self.special_token_ids = [i for i, text in enumerate(written) if text is None]
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self._spelling = Spelling(tokenizer, written)
        self._encode = functools.lru_cache(maxsize=_TEXTS)(self._spelling)  # masks encode the same texts repeatedly

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class LLGuidanceMatcher(Matcher):
    """A matcher over an ``LLMatcher``, whose sticky error states are raised here as exceptions.

    Where the grammar allows one continuation only, the only legal tokens are those that the tokenizer encodes it with
    from where it begins; other tokens that it begins with are illegal.
    """

    def __init__(self, matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> None:
        self._matcher = matcher
        self._vocab_size: int = tokenizer.vocab_size
        self._ends: list[int] = tokenizer.eos_tokens
        self._length = 0  # accepted tokens
        self._runs: list[tuple[int, list[int]]] = []  # forced texts: the length at which each begins, its tokens

    def token_mask(self) -> TokenMask:
        """Return the mask of the tokens that may come next; empty once the grammar is terminated."""
        if self._matcher.is_stopped():
            self._check()
            return TokenMask.empty(self._vocab_size)
        token = self.forced()
        if token is not None:
            return TokenMask.empty(self._vocab_size).with_tokens([token], legal=True)
        bits = self._matcher.compute_bitmask()
        self._check()
        return TokenMask(bits, self._vocab_size).with_tokens(self._ends, legal=False)

    def forced(self) -> int | None:
        """Return the only legal token; None where there are several or none."""
        token = self._known_forced()
        if token is None and not self._matcher.is_stopped():
            run = self._matcher.compute_ff_tokens()
            self._check()
            if run:
                self._runs.append((self._length, run))
                token = run[0]
        return token if token not in self._ends else None

    def _known_forced(self) -> int | None:
        """Return the forced token if it is part of a forced text that is known."""
        begin, run = self._runs[-1] if self._runs else (0, [])
        return run[self._length - begin] if begin <= self._length < begin + len(run) else None

    def accept_token(self, token: int) -> bool:
        """Move past a token if it is legal, else change nothing; return whether it is."""
        if token in self._ends or not 0 <= token < self._vocab_size:
            return False  # llguidance accepts end tokens but does not count them in a rollback; other ids are errors
        if self._known_forced() not in (None, token):
            return False
        is_legal = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        self._length += is_legal
        return is_legal

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        self._matcher.rollback(count)
        self._check()
        self._length -= count
        while self._runs and self._runs[-1][0] > self._length:
            self._runs.pop()

    def is_accepting(self) -> bool:
        """Return whether the text so far is a sentence of the grammar."""
        return self._matcher.is_accepting()

    def is_terminated(self) -> bool:
        """Return whether the text so far is a sentence of the grammar that no token can continue."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"The grammar engine failed: {_reason(self._matcher)}")


def _first_token(matcher: LLGuidanceMatcher) -> int | None:
    try:
        return matcher.token_mask().first
    except GrammarError:  # llguidance may find a dead end only while it computes the mask
        return None


def _check_rollback(matcher: LLGuidanceMatcher, token: int) -> None:
    """Check that a drafted token can be rolled back; after lexemes with ``max_tokens`` or ``stop`` none can."""
    try:
        matcher.accept_token(token)
    except GrammarError as error:
        raise GrammarError(f"No text has an end in this grammar, or it is too large: {cut(str(error))}") from error
    try:
        matcher.rollback(1)
    except GrammarError as error:
        raise GrammarError(f"The grammar cannot roll back, which speculative decoding needs: {error}") from error


def _reason(matcher: llguidance.LLMatcher) -> str:
    return cut(matcher.get_error().split("\n<state>")[0].strip())
