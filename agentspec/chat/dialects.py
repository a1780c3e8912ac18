"""How families of models write tools, tool calls and tool results, and by what a chat template is recognised."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.answer_parser import AnswerParser
from agentspec.chat.harmony import HarmonyParser, harmony_messages, harmony_thought
from agentspec.chat.parser import Message, Parser
from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars.harmony import HARMONY
from agentspec.grammars.schema_tools import to_json
from agentspec.grammars.tool_calls import HERMES, ReasoningFormat, ToolCallFormat


def as_they_are(messages: Sequence[Message], tools: Sequence[dict[str, Any]], form: ToolCallFormat) -> list[Message]:
    """Return the messages for a template that takes them as they are."""
    return list(messages)


def thought_of(chat_template: str, prompt_end: str) -> ReasoningFormat | None:
    """Return how the answer to a prompt begins: a thought that the prompt has opened, one that may come, or none.

    Args:
        chat_template: which knows thoughts where it has a mark for their end.
        prompt_end: the end of the rendered prompt.
    """
    if "</think>" not in chat_template or prompt_end.rstrip().endswith("</think>"):
        return None
    return ReasoningFormat(opener="") if prompt_end.rstrip().endswith("<think>") else ReasoningFormat()


@dataclass(frozen=True)
class Dialect:
    """A family's way to write calls.

    Args:
        name: of the dialect.
        form: of calls.
        marks: what its chat templates hold, by which it is recognised; none for templates that know no tools, for which
            tools, calls and results are written into plain messages.
        arrange: makes the messages that its chat templates take.
        thought: finds out how an answer begins, of the chat template and the end of a prompt.
        parser: of answers.
        ends: special tokens that end an answer, beside those that tokenizer and checkpoint name.
    """

    name: str
    form: ToolCallFormat
    marks: tuple[str, ...]
    arrange: Callable[[Sequence[Message], Sequence[dict[str, Any]], ToolCallFormat], list[Message]] = as_they_are
    thought: Callable[[str, str], ReasoningFormat | None] = thought_of
    parser: Callable[..., Parser] = AnswerParser
    ends: tuple[str, ...] = ()

    def messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Return the messages as the chat template takes them."""
        return self.arrange(messages, tools, self.form)


def with_short_ids(messages: Sequence[Message], tools: Sequence[dict[str, Any]], form: ToolCallFormat) -> list[Message]:
    """Return the messages for a template that demands ids of nine letters or digits."""
    return [_with_short_ids(message) for message in messages]


SYSTEM = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def plain_messages(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], form: ToolCallFormat = HERMES
) -> list[Message]:
    """Messages for a template that knows only roles and contents; results of parallel calls share a turn."""
    plain: list[Message] = []
    for is_result, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain += [{**message, "content": _written(message, form), "tool_calls": None} for message in group]
    plain = [{key: value for key, value in message.items() if value is not None} for message in plain]
    if not tools:
        return plain
    text = SYSTEM.format(tools="\n".join(map(to_json, tools)))
    if plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _written(message: Message, form: ToolCallFormat) -> str:
    """Return a message's text with its calls, exactly as the model wrote them."""
    content = str(message["content"])
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if not functions:
        return content
    calls = form.calls((f["name"], f["arguments"], None) for f in functions)
    return content + (form.after_text if content else "") + calls


def _with_short_ids(message: Message) -> Message:
    """Give a message's calls ids of nine letters or digits, as some templates demand; the same for the same id."""
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": short_id(call.get("id"))} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    return changed


def short_id(call_id: str | None) -> str:
    """Return an id of nine letters or digits: the given one, if it is of that form."""
    if call_id is not None and re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]


# In the order in which they are looked for.
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        # Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}, ...], since 2024 without the blank; models
        # of 2025 write [TOOL_CALLS]name[ARGS]{...} per call, some with [CALL_ID] between.
        Dialect(
            "mistral-call-id",
            ToolCallFormat("[TOOL_CALLS]", "{raw_name}[CALL_ID]{id}[ARGS]", "", between="[TOOL_CALLS]", after_text=""),
            ("[TOOL_CALLS]", "[CALL_ID]"),
            arrange=with_short_ids,
        ),
        Dialect(
            "mistral-args",
            ToolCallFormat("[TOOL_CALLS]", "{raw_name}[ARGS]", "", between="[TOOL_CALLS]", after_text=""),
            ("[TOOL_CALLS]", "[ARGS]"),
        ),
        Dialect(
            "mistral",
            ToolCallFormat(
                "[TOOL_CALLS] [",
                '{{"name": {name}, "arguments": ',
                ', "id": "{id}"}}',
                between=", ",
                end="]",
                after_text="",
            ),
            ("[TOOL_CALLS] [",),
            arrange=with_short_ids,
        ),
        Dialect(
            "mistral-nemo",
            ToolCallFormat(
                "[TOOL_CALLS][",
                '{{"name": {name}, "arguments": ',
                ', "id": "{id}"}}',
                between=", ",
                end="]",
                after_text="",
            ),
            ("[TOOL_CALLS][",),
            arrange=with_short_ids,
        ),
        # Hermes, Qwen 2.5 and 3, and many others: JSON between tags.
        Dialect("hermes", HERMES, ("<tool_call>",)),
        # Llama 3.1 to 3.3: {"name": ..., "parameters": ...}, one call, and nothing else in the answer.
        Dialect(
            "llama3",
            ToolCallFormat(
                '{"name": ',
                '{name}, "parameters": ',
                "}}",
                between=None,
                after_text="",
                object_keys=("name", "parameters"),
                loose_key="parameters",
            ),
            ("<|start_header_id|>", '"parameters": '),
        ),
        # gpt-oss: messages in channels.
        Dialect(
            "harmony",
            HARMONY,
            ("<|channel|>", "<|message|>", "<|call|>"),
            arrange=harmony_messages,
            thought=harmony_thought,
            parser=HarmonyParser,
            ends=("<|return|>", "<|call|>"),
        ),
        Dialect("plain", HERMES, (), arrange=plain_messages),
    )
}


NO_JSON = ("<function=", "<arg_key>")
"""Marks of templates that write calls as XML between the tags of Hermes."""


def detect_dialect(chat_template: str) -> Dialect:
    """Return the dialect of a chat template; ``plain`` where it knows no tools, or writes calls in another way."""
    known = "tool_calls" in chat_template and not any(mark in chat_template for mark in NO_JSON)
    return next(
        d for d in DIALECTS.values() if not d.marks or (known and all(mark in chat_template for mark in d.marks))
    )


def find_dialect(name: str, chat_template: str) -> Dialect:
    """Return the dialect of this name.

    Raises:
        InvalidRequestError: for an unknown name, or a template that does not render calls in it.
    """
    dialect = DIALECTS.get(name)
    if dialect is None:
        raise InvalidRequestError(f"dialect must be one of {sorted(DIALECTS)}, got {shown(name)}.")
    if dialect.marks and "tool_calls" not in chat_template:
        raise InvalidRequestError(
            f"The model's chat template renders no tool calls, so the dialect {shown(name)} cannot be used; "
            "use 'plain', which writes tools and calls into the messages."
        )
    return dialect


def arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield messages as they are; then as stricter templates want them: one per turn, no system message."""
    yield list(messages)
    merged: list[Message] = []
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        neighbours = list(group)
        if role in ("system", "user"):
            merged.append({"role": role, "content": "\n\n".join(str(m["content"]) for m in neighbours)})
        else:
            merged += neighbours
    yield merged
    system = [message["content"] for message in merged if message["role"] == "system"]
    others = [message for message in merged if message["role"] != "system"]
    if system and others and others[0]["role"] == "user":
        yield [{**others[0], "content": "\n\n".join([*system, others[0]["content"]])}, *others[1:]]
