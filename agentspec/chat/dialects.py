"""How a family of models writes tools, tool calls and tool results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.grammar import HERMES, CallForm, to_json

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
        form: of calls.
        template_knows_tools: whether the chat template renders tools, calls and results itself; otherwise they are
            written into plain messages here.
    """

    name: str
    template_knows_tools: bool
    form: CallForm = HERMES

    def plain_messages(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """Messages for a template that knows only roles and contents; results of parallel calls share a turn."""
        plain: list[Message] = []
        for is_result, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
            if is_result:
                results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
                plain.append({"role": "user", "content": "\n".join(results)})
            else:
                plain += [{"role": message["role"], "content": self._written(message)} for message in group]
        if not tools:
            return plain
        text = SYSTEM.format(tools="\n".join(map(to_json, tools)))
        if plain[0]["role"] == "system":
            return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
        return [{"role": "system", "content": text}, *plain]

    def _written(self, message: Message) -> str:
        """A message's text with its calls, exactly as the model wrote them."""
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = self.form.between.join(self.form.call(f["name"], f["arguments"]) for f in functions)
        return str(message["content"]) + calls


def detect(chat_template: str) -> Dialect:
    """The dialect of a chat template."""
    return Dialect("hermes", template_knows_tools="<tool_call>" in chat_template and "tools" in chat_template)
