"""How a family of models writes tools, tool calls and tool results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A chat message in OpenAI's form, the arguments of its calls being dicts."""

SYSTEM = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Dialect:
    """The Hermes form, which Qwen and many others use: JSON between tags.

    Args:
        name: of the dialect.
        template_knows_tools: whether the chat template renders tools, calls and results itself; otherwise they are
            written into plain messages here.
    """

    name: str
    template_knows_tools: bool
    opener: str = "<tool_call>"
    before_arguments: str = '\n{{"name": {name}, "arguments": '
    closer: str = "}\n</tool_call>"

    def opening(self, tool_name: str) -> str:
        """What stands between the opener and the arguments of a call."""
        return self.before_arguments.format(name=to_json(tool_name))

    def call(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """A whole call, exactly as the model is made to write it."""
        return self.opener + self.opening(tool_name) + to_json(arguments) + self.closer

    def plain_messages(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Messages for a template that knows only roles and contents."""
        plain: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] == "tool":
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if plain and plain[-1].get("is_tool_result"):
                    plain[-1]["content"] += "\n" + result
                else:
                    plain.append({"role": "user", "content": result, "is_tool_result": True})
            else:
                calls = [
                    self.call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())
                ]
                content = "\n".join(filter(None, [message["content"], *calls]))
                plain.append({"role": message["role"], "content": content})
        if tools:
            text = SYSTEM.format(tools="\n".join(map(to_json, tools)))
            if plain and plain[0]["role"] == "system":
                plain[0]["content"] = f"{plain[0]['content']}\n\n{text}"
            else:
                plain.insert(0, {"role": "system", "content": text})
        return plain


def detect(chat_template: str) -> Dialect:
    """The dialect of a chat template."""
    return Dialect("hermes", template_knows_tools="<tool_call>" in chat_template and "tools" in chat_template)


def to_json(value: Any) -> str:
    """JSON as ``json.dumps``, chat templates and our grammars write it: ``", "`` and ``": "``, raw UTF-8."""
    return json.dumps(value, ensure_ascii=False)
