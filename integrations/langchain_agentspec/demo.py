"""A small agent with three local tools on the embedded model, and where its time went: ``agentspec demo``.

Every step is decoded speculatively and exactly; the same loop then runs with speculation off, interleaved, for the
ratio. It needs the package ``langchain``.

A model of 135M parameters cannot be trusted to choose tools by itself, so a small middleware sets ``tool_choice``:
first the shop's price, then the conversion, then the answer. What the calls say is the model's own, as is the text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import tool

from agentspec.report import AgentRun
from agentspec.runtime.visible import visible
from langchain_agentspec.callbacks import track_latency
from langchain_agentspec.chat_model import ChatAgentSpec

PRICES = {"lamp": 40.0, "desk": 120.0, "chair": 75.0}
RATES = {"euro": 0.9, "yen": 150.0, "pound": 0.8}
QUESTION = "What does the desk cost in yen?"
COURSE = ("get_price", "convert_dollars")


@tool
def get_price(item: Literal["lamp", "desk", "chair"]) -> str:
    """Look up the price of an item in the shop, in dollars."""
    return f"The {item} costs {PRICES[item]} dollars."


@tool
def convert_dollars(dollars: float, currency: Literal["euro", "yen", "pound"]) -> str:
    """Convert an amount in dollars into another currency."""
    return f"{dollars} dollars are {dollars * RATES[currency]:.2f} {currency}."


@tool
def list_items() -> str:
    """List everything that the shop sells."""
    return ", ".join(PRICES)


@wrap_model_call
def keep_course(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Demand the tools of the course, one after the other, and then an answer."""
    done = sum(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice=COURSE[done] if done < len(COURSE) else "none"))


def run(gamma: int | Literal["auto"], name: str, **settings: Any) -> tuple[list[BaseMessage], AgentRun]:
    """One agent run: the conversation, and its account."""
    agent: Any = create_agent(
        ChatAgentSpec(gamma=gamma, max_tokens=96, **settings),
        tools=[get_price, convert_dollars, list_items],
        middleware=[keep_course],
    )
    with track_latency(name) as account:
        messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    return messages, account


def show(messages: list[BaseMessage]) -> None:
    """Print a conversation."""
    for message in messages:
        calls = message.tool_calls if isinstance(message, AIMessage) else []
        for call in calls:
            arguments = ", ".join(f"{key}={value!r}" for key, value in call["args"].items())
            print(f"{message.type:>6}  calls {visible(call['name'])}({visible(arguments)})")
        if message.text:
            print(f"{message.type:>6}  {visible(message.text, lines=True)}")


def play(repeats: int) -> bool:
    """Run the agent with and without speculation and print both; whether their texts are the same.

    Args:
        repeats: further runs of both, for the ratio of their model time.
    """
    ChatAgentSpec().load()
    messages, account = run("auto", "speculative")
    show(messages)
    print()
    account.print()

    plain_messages, plain = run(0, "plain")
    print()
    plain.print()
    same = [m.text for m in messages] == [m.text for m in plain_messages]
    print(f"\nSame conversation with and without speculation: {'yes' if same else 'NO'}")

    pairs = [(run("auto", "speculative")[1].model_s, run(0, "plain")[1].model_s) for _ in range(repeats)]
    if pairs:
        speculative, plain_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(plain / fast for fast, plain in pairs)
        print(
            f"Model time of the loop, median of {repeats} interleaved runs with a warm prompt cache: "
            f"plain {plain_s:.2f} s, speculative {speculative:.2f} s, ratio {ratio:.2f}"
        )
    return same
