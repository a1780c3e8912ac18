"""How families of models write tool calls and thoughts: as text, as rules of a grammar, as a pattern to read back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any

from agentspec.errors import GrammarError, shown
from agentspec.grammars.call_openers import Opener, heads_pattern, literal_pattern, opener_rules, openers_for
from agentspec.grammars.schema_tools import arguments_schema, closed, embedded, in_json_form, to_json

ANY_TEXT = "/(.|\\n)*/"


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family of models writes tool calls: ``opener``, calls with ``between`` between them, ``end``.

    A call is ``before_arguments``, the arguments as JSON, and ``closer``. In these two ``{name}`` stands for the tool's
    name as a JSON string, ``{raw_name}`` for the bare name, ``{id}`` for the nine letters or digits of the call's id.

    Args:
        opener: what free text cannot hold, for calls begin there.
        before_arguments: of every call.
        closer: of every call.
        between: what stands between parallel calls; None where an answer holds one call at most.
        end: what stands behind the last call.
        after_text: what stands between free text and the opener.
        object_keys: where an answer that calls is one JSON object and nothing else, its keys for name and arguments.
        special: the parts of the above that are special tokens of the tokenizer, with their ids.
        loose_key: of the arguments where a call is spelled in another way (``grammars.call_openers``); None where such
            text stays text.
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
        """Everything that this form writes around names and arguments."""
        return self.opener + self.before_arguments + self.closer + (self.between or "") + self.end

    def openers(self, tools: int) -> tuple[Opener, ...]:
        """Return the other spellings of calls that are known beside so many tools."""
        return () if self.loose_key is None else openers_for(tools)

    def answers(
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
            final: JSON Schema of an answer that is no call; None for free text.
            thought: that goes before the answer.
            is_budgeted: whether the length of the thought is limited.
        """
        return answers(tools, required=required, parallel=parallel, final=final, form=self, thought=thought)

    def calls(self, calls: Iterable[tuple[str, dict[str, Any], str | None]]) -> str:
        """Calls of ``(name, arguments, id)``, exactly as a model is made to write them."""
        written = [
            "".join(
                template.format(name=to_json(name), raw_name=name, id=call_id) + value
                for template, value in ((self.before_arguments, to_json(arguments)), (self.closer, ""))
            )
            for name, arguments, call_id in calls
        ]
        return self.opener + (self.between or "").join(written) + self.end

    def call(self, name: str, arguments: dict[str, Any], call_id: str | None = None) -> str:
        """One call."""
        return self.calls([(name, arguments, call_id)])

    def check_name(self, name: str) -> None:
        """Make sure that a call of this tool reads back as it was written.

        Raises:
            GrammarError: for a name that this form cannot write.
        """
        illegal = r"[^\w.\-]" if "{raw_name}" in self.before_arguments else r'["\\\x00-\x1f]'
        if not name or re.search(illegal, name):
            expected = "letters, digits, _, . and -" if "{raw_name}" in self.before_arguments else "no quotes, no \\"
            raise GrammarError(
                f"This model's form of calls cannot write the tool name {shown(name)}; expected {expected}."
            )

    def literal(self, text: str) -> str:
        """A text as a sequence of Lark terms, special tokens by their ids."""
        ids = dict(self.special)
        marks = "|".join(re.escape(mark) for mark in sorted(ids, key=len, reverse=True))
        parts = re.split(f"({marks})", text) if marks else [text]
        return " ".join(f"<[{ids[part]}]>" if part in ids else to_json(part) for part in parts if part)

    def rule(self, template: str, name: str) -> str:
        """``before_arguments`` or ``closer`` as Lark terms."""
        return " ".join(self._terms(template, name))

    def _terms(self, template: str, name: str) -> Iterator[str]:
        fields = {"name": to_json(name), "raw_name": name}
        text = ""
        for literal, field, _, _ in Formatter().parse(template):
            text += literal + fields.get(field or "", "")
            if field == "id":
                yield from (self.literal(text), "CALL_ID")
                text = ""
        yield self.literal(text)

    @cached_property
    def head_pattern(self) -> re.Pattern[str]:
        """Matches ``before_arguments``; groups ``name`` (JSON), ``raw_name``, ``id``."""
        return _pattern(self.before_arguments)

    @cached_property
    def closer_pattern(self) -> re.Pattern[str]:
        """Matches ``closer``."""
        return _pattern(self.closer)


_FIELDS = {
    "name": r'(?P<name>"(?:[^"\\]|\\.)*")',
    "raw_name": r"(?P<raw_name>[\w.\-]+)",
    "id": r"(?P<id>[a-zA-Z0-9]{9})",
}


def _pattern(template: str) -> re.Pattern[str]:
    parts = Formatter().parse(template)
    return re.compile("".join(re.escape(literal) + _FIELDS.get(field or "", "") for literal, field, _, _ in parts))


HERMES = ToolCallFormat()


@dataclass(frozen=True)
class ReasoningFormat:
    """How a reasoning model thinks before it answers.

    Args:
        opener: what the model may begin its answer with; "" where the prompt has begun the thought already.
        end: ends the thought.
        gap: stands between the end and the answer.
        closing: is written to end a thought whose budget is used up.
    """

    opener: str = "<think>"
    end: str = "</think>"
    gap: str = "\n\n"
    closing: str = "\n</think>"


def answers(
    tools: Sequence[dict[str, Any]],
    *,
    required: bool,
    parallel: int,
    final: dict[str, Any] | bool | None,
    form: ToolCallFormat,
    thought: ReasoningFormat | None,
) -> str:
    """The Lark grammar of an assistant's answers; see ``Grammar.tools``."""
    are_objects = form.object_keys is not None and final is not None and not required
    rules = {} if are_objects else dict(_tool_rules(tools, form))
    calls = f"calls {form.literal(form.end)}".strip()
    count = parallel if form.between is not None else 1
    if rules:
        rules["CALL_ID"] = "/[a-zA-Z0-9]{9}/"
        more = f" ({form.literal(form.between or '')} call){{0,{count - 1}}}" if count > 1 else ""
        rules |= {"call": " | ".join(name for name in rules if name.startswith("tool_")), "calls": f"call{more}"}
    rules["TEXT"] = ANY_TEXT
    opened = f"{form.literal(form.opener)} {calls}"
    is_free = bool(tools) and not required and final is None
    if tools and required:
        rules["answer"] = opened
    elif final is not None:
        called = [] if not tools else [opened] if form.object_keys is None else _as_objects(tools, form.object_keys)
        rules["answer"] = " | ".join([f"%json {in_json_form(closed(final))}", *called])
    elif not tools:
        rules["answer"] = "TEXT"
    else:
        schemas = [rules[f"args_{index}"].removeprefix("%json ") for index in range(len(tools))]
        rules |= _free(tools, schemas, form, thought, count, calls)
    rules["start"] = "answer"
    if thought is not None:
        rules |= _thinking(thought, form, calls if tools and form.opens_anywhere else None, is_free=is_free)
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _free(
    tools: Sequence[dict[str, Any]],
    schemas: Sequence[str],
    form: ToolCallFormat,
    thought: ReasoningFormat | None,
    parallel: int,
    calls: str,
) -> dict[str, str]:
    """Rules of an answer that is plain text or calls: what begins like a call is one, as is what the tag opens."""
    names = [tool["function"]["name"] for tool in tools]
    openers = form.openers(len(set(names)))
    spelled, rules = opener_rules(names, schemas, form.loose_key or "", openers, parallel)
    begins = [heads_pattern(names, openers)] if openers else []
    begins += [literal_pattern(form.opener)] if not (form.opens_anywhere or openers) else []
    begins += [rf"\n*{literal_pattern(thought.opener)}"] if thought and thought.opener else []
    # What begins like a call or a thought is one.
    rules["PLAIN"] = f"{ANY_TEXT} & ~/({'|'.join(begins)})(.|\\n)*/" if begins else ANY_TEXT
    native = [f"opened {calls}"] if form.opens_anywhere else []
    native += [f"{form.literal(form.opener)} {calls}"] if not (form.opens_anywhere or openers) else []
    rules |= up_to("opened", form.opener, form, text="PLAIN") if form.opens_anywhere else {}
    return {**rules, "answer": " | ".join(["PLAIN", *native, *spelled])}


def _thinking(thought: ReasoningFormat, form: ToolCallFormat, calls: str | None, *, is_free: bool) -> dict[str, str]:
    """Free text up to the end marker, or to a call, which ends a thought too; then the answer."""
    rules = up_to("thought", thought.end, form)
    # Plain text holds its own line breaks.
    thinks = "thought answer" if is_free else f"thought {form.literal(thought.gap)} answer"
    if calls is not None:
        thinks += f" | interrupted {calls}"
        rules |= up_to("interrupted", form.opener, form)
    rules |= {"thinking": thinks, "start": "thinking"}
    if thought.opener:
        rules["start"] = f"answer | {'thinks' if is_free else form.literal(thought.opener)} thinking"
    if thought.opener and is_free:
        spelled = rf"/\n*{literal_pattern(thought.opener)}/"
        mark = form.literal(thought.opener)
        rules["thinks"] = spelled if mark == to_json(thought.opener) else rf"{spelled} | /\n*/ {mark}"
    return rules


def up_to(name: str, mark: str, form: ToolCallFormat, text: str = "TEXT") -> dict[str, str]:
    """Rules for a text up to and with the first of a mark, be it a special token or spelled out."""
    if form.literal(mark) == to_json(mark):
        return {f"{name}[lazy]": f"{text} {to_json(mark)}"}
    spelled = f"spelled_{name}"
    return {name: f"{text} {form.literal(mark)} | {spelled}", f"{spelled}[lazy]": f"{text} {to_json(mark)}"}


def _tool_rules(tools: Sequence[dict[str, Any]], form: ToolCallFormat) -> Iterator[tuple[str, str]]:
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        form.check_name(name)
        head, closer = form.rule(form.before_arguments, name), form.rule(form.closer, name)
        yield f"args_{index}", f"%json {in_json_form(arguments_schema(tool))}"
        yield f"tool_{index}", f"{head} args_{index} {closer}".strip()


def _as_objects(tools: Sequence[dict[str, Any]], keys: tuple[str, str]) -> list[str]:
    """Calls as JSON objects: beside other JSON, for llguidance would take its beginning for that of a call."""
    return [f"%json {in_json_form(_as_object(tool, keys))}" for tool in tools]


def _as_object(tool: dict[str, Any], keys: tuple[str, str]) -> dict[str, Any]:
    """The schema of a call as one JSON object."""
    name, place = keys
    arguments = embedded(arguments_schema(tool), f"#/properties/{place}")
    return {
        **{keyword: said for keyword, said in arguments.items() if keyword == "$schema"},
        "type": "object",
        "properties": {
            name: {"const": tool["function"]["name"]},
            place: {keyword: said for keyword, said in arguments.items() if keyword != "$schema"},
        },
        "required": [name, place],
        "additionalProperties": False,
    }
