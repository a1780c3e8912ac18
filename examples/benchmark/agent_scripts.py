"""Real agent conversations on the embedded model: is every call of every step valid, and what did each step read?

Run ``python examples/benchmark/agent_scripts.py AGENTS.jsonl [--scripts 12] [--temperature 0]``; a line of the file is
``{"id", "tools": [OpenAI tools], "turns": [[messages]], "reference": [[calls]], "results": [[results of the calls]]}``.
An agent of LangChain runs the turns; the tools return the canned results. A model of this size does not choose by
itself, so a middleware demands as many calls as the reference makes, and then an answer; which tool is called, and with
what, is the model's own. A script ends where its conversation no longer fits the model's context.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import BaseTool, StructuredTool

from langchain_agentspec import ChatAgentSpec


def canned(tool: dict[str, Any], results: Iterator[str]) -> BaseTool:
    """A tool that returns the next result, whatever it is called with."""
    function = tool["function"]
    return StructuredTool(
        name=function["name"],
        description=function["description"],
        args_schema=function["parameters"],
        func=lambda **arguments: next(results, "{}"),
    )


def play(script: dict[str, Any], model: ChatAgentSpec, turns: int | None = None) -> list[BaseMessage]:
    """The conversation of a script, up to where it no longer fits the context."""
    results = iter([result for turn in script["results"] for result in turn])
    due = 0

    @wrap_model_call
    def keep_course(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        made = sum(len(m.tool_calls) for m in request.messages if isinstance(m, AIMessage))
        return handler(request.override(tool_choice="any" if made < due else "none"))

    tools = [canned(tool, results) for tool in script["tools"]]
    agent: Any = create_agent(model, tools=tools, middleware=[keep_course])
    messages: list[BaseMessage] = []
    for asked, reference in list(zip(script["turns"], script["reference"], strict=True))[:turns]:
        due += len(reference)
        try:
            messages = agent.invoke({"messages": [*messages, *asked]}, {"recursion_limit": 200})["messages"]
        except ContextOverflowError:
            break
        if any(message.invalid_tool_calls for message in messages if isinstance(message, AIMessage)):
            break  # a call that max_tokens cut short: the agent ends its turn there
    return messages


def count(messages: list[BaseMessage], tools: list[dict[str, Any]]) -> Counter[str]:
    """Steps, calls, calls that are not valid, and tokens read and reused."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    found: Counter[str] = Counter()
    for message in messages:
        if not isinstance(message, AIMessage):
            continue
        step = message.response_metadata["agentspec"]
        found["steps"] += 1
        found["cut short"] += len(message.invalid_tool_calls)
        for name in ("prompt_tokens", "cached_tokens", "new_tokens", "target_calls", "forced_tokens"):
            found[name] += step[name]
        for call in message.tool_calls:
            found["calls"] += 1
            schema = schemas.get(call["name"], False)
            found["invalid calls"] += not jsonschema.Draft202012Validator(schema).is_valid(call["args"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("agents", type=Path)
    parser.add_argument("--scripts", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    scripts = [json.loads(line) for line in options.agents.read_text().splitlines()][: options.scripts]
    model = ChatAgentSpec(temperature=options.temperature, seed=1, max_tokens=options.max_tokens)
    whole: Counter[str] = Counter()
    for script in scripts:
        found = count(play(script, model), script["tools"])
        print(script["id"], dict(found), flush=True)
        whole += found
    print(f"\n{len(scripts)} scripts at temperature {options.temperature}")
    for name in ("steps", "calls", "invalid calls", "cut short", "prompt_tokens", "cached_tokens"):
        print(f"  {name:14s} {whole[name]}")
    print(f"  target calls   {whole['target_calls']} for {whole['new_tokens']} tokens, {whole['forced_tokens']} forced")


if __name__ == "__main__":
    main()
