"""Inputs written for these tests: prompts, tools with a question and a call that answers it, the script of an agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROMPTS: list[str] = (
    (Path(__file__).parent / "data" / "prompts.txt").read_text(encoding="utf-8").rstrip().split("\n---\n")
)

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}


def tool(name: str, description: str, optional: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI tool dict; what is not ``optional`` is required."""
    required = [key for key in properties if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def listed(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def of(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


WEATHER = tool(
    "get_weather", "The weather of a city.", ("days",), city=STRING, days={**INTEGER, "minimum": 1, "maximum": 7}
)
TRAINS = tool(
    "find_trains",
    "Trains between two stations.",
    ("after", "direct"),
    start=STRING,
    goal=STRING,
    after=STRING,
    direct=FLAG,
)
AREA = tool("rectangle_area", "Area of a rectangle in square metres.", length=NUMBER, width=NUMBER)
BOOK = tool(
    "book_table",
    "Book a table in a restaurant.",
    ("notes",),
    restaurant=STRING,
    people={**INTEGER, "minimum": 1, "maximum": 20},
    when=of(day=STRING, hour={**INTEGER, "minimum": 0, "maximum": 23}),
    notes={"type": ["string", "null"]},
)
CONVERT = tool(
    "convert_money",
    "Convert an amount between currencies.",
    amount=NUMBER,
    source=one_of("EUR", "USD", "GBP"),
    goal=STRING,
)
CART = tool(
    "fill_cart", "Put items into a shopping cart.", items=listed(of(name=STRING, count=INTEGER), minItems=1, maxItems=4)
)
LIGHTS = tool("set_lights", "Switch the lights of a room.", ("brightness",), room=STRING, on=FLAG, brightness=INTEGER)
NOW = tool("now", "The time.")
SEARCH = tool(
    "search_library", "Search a library.", ("year", "language"), words=listed(STRING), year=INTEGER, language=STRING
)
MAIL = tool("send_mail", "Send a message.", to=listed(STRING), subject=STRING, body=STRING)

Row = tuple[str, list[dict[str, Any]], str, dict[str, Any]]
ROWS: list[Row] = [
    ("What is the weather in Zürich?", [WEATHER], "get_weather", {"city": "Zürich"}),
    ("Will it rain in Oslo in the next three days?", [WEATHER, NOW], "get_weather", {"city": "Oslo", "days": 3}),
    (
        "How do I get from Graz to Linz without a change?",
        [TRAINS],
        "find_trains",
        {"start": "Graz", "goal": "Linz", "direct": True},
    ),
    (
        "A train from Ulm to Köln after 9:30, please.",
        [WEATHER, TRAINS],
        "find_trains",
        {"start": "Ulm", "goal": "Köln", "after": "9:30"},
    ),
    ("My room is 4.5 m long and 3 m wide. How large is it?", [AREA], "rectangle_area", {"length": 4.5, "width": 3}),
    (
        "A table for four at the Blue Door, Friday at 19, by the window.",
        [BOOK, NOW],
        "book_table",
        {"restaurant": "Blue Door", "people": 4, "when": {"day": "Friday", "hour": 19}, "notes": "by the window"},
    ),
    (
        "Book the Old Mill for two on Sunday at noon.",
        [BOOK],
        "book_table",
        {"restaurant": "Old Mill", "people": 2, "when": {"day": "Sunday", "hour": 12}, "notes": None},
    ),
    ("How many yen are 20 pounds?", [CONVERT, AREA], "convert_money", {"amount": 20, "source": "GBP", "goal": "JPY"}),
    (
        "I need two lamps and six candles.",
        [CART],
        "fill_cart",
        {"items": [{"name": "lamp", "count": 2}, {"name": "candle", "count": 6}]},
    ),
    ("Turn off the light in the kitchen.", [LIGHTS, NOW], "set_lights", {"room": "kitchen", "on": False}),
    ("Make the bedroom half bright.", [LIGHTS], "set_lights", {"room": "bedroom", "on": True, "brightness": 50}),
    ("What time is it?", [NOW, WEATHER, LIGHTS], "now", {}),
    ("Find French books on bees.", [SEARCH, MAIL], "search_library", {"words": ["bees"], "language": "fr"}),
    (
        'Mail Ana and Bo: "Lunch at one", no more.',
        [MAIL],
        "send_mail",
        {"to": ["Ana", "Bo"], "subject": "Lunch", "body": 'Lunch at "one"\n'},
    ),
]
"""A question, the tools offered, and a call that answers it: its name and its arguments."""


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """A call in the form of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


AGENT_SCRIPT: dict[str, Any] = {
    "id": "errands",
    "tools": [WEATHER, TRAINS, BOOK, CART, LIGHTS, NOW, SEARCH, MAIL],
    "turns": [
        [
            {
                "role": "user",
                "content": "I visit my sister in Linz on Friday. Look for a train from Graz, and at the weather.",
            }
        ],
        [{"role": "user", "content": "Good. Book us a table at the Old Mill at 19, and mail her."}],
    ],
    "reference": [["find_trains", "get_weather"], ["book_table", "send_mail"]],
    "results": [
        [
            '{"trains": [{"leaves": "8:12", "arrives": "11:01"}, {"leaves": "10:12", "arrives": "13:05"}]}',
            '{"sky": "clear", "degrees": 14}',
        ],
        ['{"booked": true, "number": "B-2207"}', '{"sent": true}'],
    ],
}
"""As ``examples/benchmark/agent_scripts.py`` plays them."""
