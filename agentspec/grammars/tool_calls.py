"""How families of models write tool calls and reasoning: as text, as a grammar of answers, as patterns to parse."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any

from agentspec.errors import GrammarError, shown
from agentspec.grammars.call_openers import Opener, heads_pattern, literal_pattern, opener_rules, openers_for
from agentspec.grammars.schema_tools import arguments_schema, closed, embedded, in_json_form, to_json

ANY_TEXT = "/(.|\\n)*/"

Rules = dict[str, str]
"""Rules of a Lark grammar by name."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The text around the reasoning that precedes an answer.

    Args:
        opener: begins the reasoning; "" where the prompt has begun it.
        end: ends the reasoning.
        gap: stands between ``end`` and the answer.
        closing: is forced where the thinking budget is spent; ends the reasoning.
    """

    opener: str = "<think>"
    end: str = "</think>"
    gap: str = "\n\n"
    closing: str = "\n</think>"


@dataclass(frozen=True)
class ToolCallFormat:
    """The text around tool calls: ``opener``, the calls with ``between`` between them, ``end``.

    A call is ``before_arguments``, the arguments as JSON, and ``closer``. In these two templates ``{name}`` is the
    tool's name as a JSON string, ``{raw_name}`` the bare name, and ``{id}`` the call's id of nine letters or digits.

    Args:
        opener: begins the calls; free text cannot hold it.
        before_arguments: template of what precedes the arguments of a call.
        closer: template of what follows them.
        between: separates parallel calls; None where an answer holds one call at most.
        end: follows the last call.
        after_text: separates free text from the opener.
        object_keys: the keys of name and arguments, where an answer with a call is one JSON object and nothing else.
        special: the parts of the above that are special tokens of the tokenizer, with their ids.
        loose_key: the key of the arguments in calls of other spellings (``grammars.call_openers``); None where such
            text is no call.
    """

    opener: str = "<tool_call>"
    before_arguments: str = '\n{{"name": {name}, "arguments": '
    closer: str = "}}\n</tool_call>"
    between: str | None = "\n<tool_call>"
    end: str = ""
    after_text: str = "\n"
    object_keys: tuple[str, str] | None = None
    special: tuple[tuple[str, int], ...] = ()
    loose_key: str | None = "arguments"

    @property
    def opens_anywhere(self) -> bool:
        """Whether calls may follow free text; otherwise a call is the whole answer."""
        return self.object_keys is None

    @property
    def marks(self) -> str:
        """All text that the format writes around names and arguments."""
        return self.opener + self.before_arguments + self.closer + (self.between or "") + self.end

    def openers(self, tools: int) -> tuple[Opener, ...]:
        """Return the other spellings of calls that are known beside a number of tools."""
        return () if self.loose_key is None else openers_for(tools)

    # Text

    def calls(self, calls: Iterable[tuple[str, dict[str, Any], str | None]]) -> str:
        """Write calls of ``(name, arguments, id)``, exactly as the grammar has them."""
        written = [
            "".join(
                template.format(name=to_json(name), raw_name=name, id=call_id) + value
                for template, value in ((self.before_arguments, to_json(arguments)), (self.closer, ""))
            )
            for name, arguments, call_id in calls
        ]
        return self.opener + (self.between or "").join(written) + self.end

    def call(self, name: str, arguments: dict[str, Any], call_id: str | None = None) -> str:
        """Write one call."""
        return self.calls([(name, arguments, call_id)])

    def check_name(self, name: str) -> None:
        """Check that a call of this tool is parsed as it was written.

        Raises:
            GrammarError: for a name that this format cannot write.
        """
        illegal = r"[^\w.\-]" if "{raw_name}" in self.before_arguments else r'["\\\x00-\x1f]'
        if not name or re.search(illegal, name):
            expected = "letters, digits, _, . and -" if "{raw_name}" in self.before_arguments else "no quotes, no \\"
            raise GrammarError(
                f"This model's tool-call format cannot write the tool name {shown(name)}; expected {expected}."
            )

    @cached_property
    def head_pattern(self) -> re.Pattern[str]:
        """A pattern of ``before_arguments``; its groups are ``name`` (JSON), ``raw_name``, ``id``."""
        return _pattern(self.before_arguments)

    @cached_property
    def closer_pattern(self) -> re.Pattern[str]:
        """A pattern of ``closer``."""
        return _pattern(self.closer)

    # Grammar

    def answer_grammar(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool,
        parallel: int,
        final: dict[str, Any] | bool | None,
        thought: ReasoningFormat | None,
        is_budgeted: bool = False,
    ) -> str:
        """Return the Lark grammar of an assistant's answers; see ``Grammar.tools``.

        Args:
            tools: that may be called.
            required: whether one must be.
            parallel: the most calls in one answer.
            final: JSON Schema of an answer without calls; None for free text.
            thought: the format of reasoning before the answer; None for none.
            is_budgeted: whether the reasoning has a thinking budget.

        Raises:
            GrammarError: for a name that this format cannot write.
        """
        rules: Rules = {"TEXT": ANY_TEXT, "start": "answer"}
        count, calls = parallel if self.between is not None else 1, f"calls {self.literal(self.end)}".strip()
        opened = f"{self.literal(self.opener)} {calls}"
        if tools and (required or final is None or self.object_keys is None):
            more = f" ({self.literal(self.between or '')} call){{0,{count - 1}}}" if count > 1 else ""
            rules |= {**self.tool_rules(tools), "CALL_ID": "/[a-zA-Z0-9]{9}/", "calls": f"call{more}"}
        is_free = bool(tools) and not required and final is None
        if tools and required:
            rules["answer"] = opened
        elif final is not None:
            called = [] if not tools else [opened] if self.object_keys is None else _as_objects(tools, self.object_keys)
            rules["answer"] = " | ".join([f"%json {in_json_form(closed(final))}", *called])
        elif not tools:
            rules["answer"] = "TEXT"
        else:
            schemas = [rules[f"args_{index}"].removeprefix("%json ") for index in range(len(tools))]
            rules |= self._free_rules([tool["function"]["name"] for tool in tools], schemas, thought, count, calls)
        if thought is not None:
            rules |= self._reasoning_rules(thought, calls if tools and self.opens_anywhere else None, is_free=is_free)
        return lark(rules)

    def tool_rules(self, tools: Sequence[dict[str, Any]]) -> Rules:
        """Return ``args_<i>`` and ``tool_<i>``, the arguments and the call of each tool, and ``call``, any of them."""
        rules: Rules = {}
        for index, tool in enumerate(tools):
            name = tool["function"]["name"]
            self.check_name(name)
            rules[f"args_{index}"] = f"%json {in_json_form(arguments_schema(tool))}"
            rules[f"tool_{index}"] = self.call_rule(name, f"args_{index}")
        return {**rules, "call": " | ".join(f"tool_{index}" for index in range(len(tools)))} if tools else {}

    def call_rule(self, name: str, arguments: str) -> str:
        """Return a call of a tool as Lark terms; ``arguments`` is the rule of its arguments."""
        return f"{self._terms(self.before_arguments, name)} {arguments} {self._terms(self.closer, name)}".strip()

    def literal(self, text: str) -> str:
        """Return a text as Lark terms, special tokens by their ids."""
        ids = dict(self.special)
        marks = "|".join(re.escape(mark) for mark in sorted(ids, key=len, reverse=True))
        parts = re.split(f"({marks})", text) if marks else [text]
        return " ".join(f"<[{ids[part]}]>" if part in ids else to_json(part) for part in parts if part)

    def up_to(self, name: str, mark: str, text: str = "TEXT") -> Rules:
        """Return the rules of a text that ends with its first ``mark``, be it a special token or spelled out."""
        if self.literal(mark) == to_json(mark):
            return {f"{name}[lazy]": f"{text} {to_json(mark)}"}
        spelled = f"spelled_{name}"
        return {name: f"{text} {self.literal(mark)} | {spelled}", f"{spelled}[lazy]": f"{text} {to_json(mark)}"}

    def _terms(self, template: str, name: str) -> str:
        """Return ``before_arguments`` or ``closer`` as Lark terms."""
        fields = {"name": to_json(name), "raw_name": name, "id": _ID_MARK}
        text = "".join(literal + fields.get(field or "", "") for literal, field, _, _ in Formatter().parse(template))
        return " CALL_ID ".join(map(self.literal, text.split(_ID_MARK)))

    def _free_rules(
        self, names: Sequence[str], schemas: Sequence[str], thought: ReasoningFormat | None, parallel: int, calls: str
    ) -> Rules:
        """Return the rules of an answer that is free text or calls.

        What begins like a call or like reasoning is one, and so is what the opener begins.
        """
        openers = self.openers(len(set(names)))
        spelled, rules = opener_rules(names, schemas, self.loose_key or "", openers, parallel)
        begins = [heads_pattern(names, openers)] if openers else []
        begins += [literal_pattern(self.opener)] if not (self.opens_anywhere or openers) else []
        begins += [rf"\n*{literal_pattern(thought.opener)}"] if thought and thought.opener else []
        rules["PLAIN"] = f"{ANY_TEXT} & ~/({'|'.join(begins)})(.|\\n)*/" if begins else ANY_TEXT
        native = [f"opened {calls}"] if self.opens_anywhere else []
        native += [f"{self.literal(self.opener)} {calls}"] if not (self.opens_anywhere or openers) else []
        rules |= self.up_to("opened", self.opener, text="PLAIN") if self.opens_anywhere else {}
        return {**rules, "answer": " | ".join(["PLAIN", *native, *spelled])}

    def _reasoning_rules(self, thought: ReasoningFormat, calls: str | None, *, is_free: bool) -> Rules:
        """Return the rules of reasoning up to its end, or to a call, which ends it too; then the answer."""
        rules = self.up_to("thought", thought.end)
        # Free text holds its own line breaks.
        thinks = "thought answer" if is_free else f"thought {self.literal(thought.gap)} answer"
        if calls is not None:
            thinks += f" | interrupted {calls}"
            rules |= self.up_to("interrupted", self.opener)
        rules |= {"thinking": thinks, "start": "thinking"}
        if thought.opener:
            rules["start"] = f"answer | {'thinks' if is_free else self.literal(thought.opener)} thinking"
        if thought.opener and is_free:
            spelled = rf"/\n*{literal_pattern(thought.opener)}/"
            mark = self.literal(thought.opener)
            rules["thinks"] = spelled if mark == to_json(thought.opener) else rf"{spelled} | /\n*/ {mark}"
        return rules


HERMES = ToolCallFormat()

_ID_MARK = "\0"  # no name that a format can write holds it

_FIELDS = {
    "name": r'(?P<name>"(?:[^"\\]|\\.)*")',
    "raw_name": r"(?P<raw_name>[\w.\-]+)",
    "id": r"(?P<id>[a-zA-Z0-9]{9})",
}


def _pattern(template: str) -> re.Pattern[str]:
    parts = Formatter().parse(template)
    return re.compile("".join(re.escape(literal) + _FIELDS.get(field or "", "") for literal, field, _, _ in parts))


def lark(rules: Mapping[str, str]) -> str:
    """Write a Lark grammar."""
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _as_objects(tools: Sequence[dict[str, Any]], keys: tuple[str, str]) -> list[str]:
    """Return calls as JSON objects. Of calls written as text, llguidance would see the beginning in other JSON."""
    return [f"%json {in_json_form(_as_object(tool, keys))}" for tool in tools]


def _as_object(tool: dict[str, Any], keys: tuple[str, str]) -> dict[str, Any]:
    """Return the schema of a call as one JSON object."""
    name, place = keys
    arguments = embedded(arguments_schema(tool), f"#/properties/{place}")
    return {
        **{keyword: value for keyword, value in arguments.items() if keyword == "$schema"},
        "type": "object",
        "properties": {
            name: {"const": tool["function"]["name"]},
            place: {keyword: value for keyword, value in arguments.items() if keyword != "$schema"},
        },
        "required": [name, place],
        "additionalProperties": False,
    }
