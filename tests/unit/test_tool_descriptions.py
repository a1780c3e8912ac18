"""A tool is described with all that was given: recursion, descriptions, no nulls, and errors that name the keyword."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pydantic.v1
import pytest
from langchain_core.tools import BaseTool, InjectedToolArg, StructuredTool, tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agentspec import InvalidRequestError
from langchain_agentspec import ChatAgentSpec
from langchain_agentspec.tools import described, json_schema_of, tool_of

LEAF = {"root": {"v": "a", "kids": [{"v": "b", "kids": []}]}}
WRONG = {"root": {"v": "a", "kids": [{"v": "b", "kids": [{"kids": []}]}]}}
NODE: dict[str, Any] = {
    "type": "object",
    "description": "A node.",
    "properties": {"v": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v"],
}
ROOT = {"$ref": "#/$defs/node", "description": "The first."}
TREE = {"type": "object", "properties": {"root": ROOT}, "required": ["root"], "$defs": {"node": NODE}}


class Node(BaseModel):
    """A node."""

    v: str = Field(description="Its value.")
    kids: list[Node] = []


class NodeV1(pydantic.v1.BaseModel):
    """A node."""

    v: str = pydantic.v1.Field(description="Its value.")
    kids: list[NodeV1] = []


NodeV1.update_forward_refs()


class NodeDict(TypedDict):
    """A node."""

    v: Annotated[str, ..., "Its value."]
    kids: list[NodeDict]


@dataclasses.dataclass
class Item:
    """What is bought."""

    v: str
    kids: list[Item] = dataclasses.field(default_factory=list)


def plant(root: Node, deep: Annotated[int, "How deep."] = 1) -> str:
    """Plant.

    Args:
        root: where it begins.
    """
    return ""


async def plant_later(root: NodeDict) -> str:
    """Plant.

    Args:
        root: where it begins.
    """
    return ""


def plant_item(root: Item, state: Annotated[dict[str, Any], InjectedToolArg]) -> str:
    """Plant."""
    return ""


class Planter(BaseTool):
    """A tool as a class."""

    name: str = "plant"
    description: str = "Plant."
    args_schema: Any = TREE

    def _run(self, **_: Any) -> str:
        return ""


FORMS: dict[str, Any] = {
    "MCP": StructuredTool(name="plant", description="Plant.", args_schema=TREE, func=lambda **_: ""),
    "class": Planter(),
    "OpenAI": {"type": "function", "function": {"name": "plant", "description": "Plant.", "parameters": TREE}},
    "function dict": {"name": "plant", "description": "Plant.", "parameters": TREE},
    "Anthropic": {"name": "plant", "description": "Plant.", "input_schema": TREE},
    "JSON Schema": {"title": "plant", "description": "Plant.", **TREE},
    "function": plant,
    "coroutine": plant_later,
    "decorated": tool(plant),
    "docstring": tool(plant, parse_docstring=True),
    "dataclass, injected": plant_item,
}


@pytest.mark.parametrize("form", FORMS)
def test_recursion_is_kept_in_every_form_of_a_tool(form: str) -> None:
    function = described(FORMS[form])["function"]
    assert function["name"].startswith("plant")
    assert function["description"].startswith("Plant.")
    jsonschema.validate(LEAF, function["parameters"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(WRONG, function["parameters"])
    assert "state" not in function["parameters"]["properties"]


def test_properties_of_a_given_schema_are_written_out_one_level() -> None:
    root = described(FORMS["MCP"])["function"]["parameters"]["properties"]["root"]
    assert root == {**NODE, "description": "The first."}


@pytest.mark.parametrize("form", ["function", "docstring", "coroutine"])
def test_docstrings_describe_arguments_beside_references(form: str) -> None:
    properties = described(FORMS[form])["function"]["parameters"]["properties"]
    assert properties["root"]["description"] == "where it begins."
    assert properties.get("deep", {"description": "How deep."})["description"] == "How deep."


@pytest.mark.parametrize("cls", [Node, NodeV1, NodeDict])
def test_a_recursive_class_offers_its_parameters(cls: Any) -> None:
    for made in (described(cls), tool_of(cls)):
        function = made["function"]
        assert function["name"] == cls.__name__
        assert function["description"] == "A node."
        assert list(function["parameters"]["properties"]) == ["v", "kids"]
        assert function["parameters"]["properties"]["v"]["description"] == "Its value."
        jsonschema.validate(LEAF["root"], function["parameters"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**WRONG["root"], "kids": [{"v": 7}]}, function["parameters"])
    bound: Any = ChatAgentSpec().with_structured_output(cls, method="function_calling")
    assert bound.first.kwargs["tools"] == [tool_of(cls)]


class Joke(TypedDict):
    """A joke."""

    setup: Annotated[str, ..., "How it begins"]
    rating: Annotated[Optional[int], None, "1 to 10"]  # noqa: UP045


class Documented(TypedDict):
    """A joke.

    Args:
        setup: How it begins
        rating: 1 to 10
    """

    setup: str
    rating: int | None


class Nested(TypedDict):
    """Jokes."""

    best: Joke
    others: list[Joke]


@pytest.mark.parametrize("cls", [Joke, Documented])
def test_annotations_and_docstrings_describe_properties(cls: Any) -> None:
    for schema in (json_schema_of(cls), tool_of(cls)["function"]["parameters"]):
        properties = schema["properties"]
        assert properties["setup"]["description"] == "How it begins"
        assert properties["rating"]["description"] == "1 to 10"
    assert tool_of(cls)["function"]["description"].startswith("A joke.")


def test_descriptions_of_nested_types_are_kept() -> None:
    schema = json_schema_of(Nested)
    assert schema["$defs"]["Joke"]["properties"]["setup"]["description"] == "How it begins"
    assert schema["properties"]["best"]["$ref"] == "#/$defs/Joke"


def test_any_object_where_no_schema_is_given() -> None:
    bound: Any = ChatAgentSpec().with_structured_output(None, method="json_mode")
    assert bound.first.kwargs["response_format"]["json_schema"]["schema"] == {"title": "Answer", "type": "object"}
    for method in ("json_schema", "function_calling"):
        with pytest.raises(InvalidRequestError, match="needs a schema"):
            ChatAgentSpec().with_structured_output(None, method=method)  # type: ignore[arg-type]


# Nulls and other values


def with_parameters(parameters: Any, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **others}}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "description": None}}, "anyOf": None},
            {"type": "object", "properties": {"a": {"type": "integer"}}},
        ),
        ({"properties": {"a": None}, "additionalProperties": None}, {"properties": {"a": {}}}),
        ({"properties": {"required": {"type": "null"}}}, {"properties": {"required": {"type": "null"}}}),
        (
            {"properties": {"a": {"const": None}, "b": {"enum": [None, 1]}, "c": {"default": None}}},
            {"properties": {"a": {"const": None}, "b": {"enum": [None, 1]}, "c": {"default": None}}},
        ),
        ({"properties": {"a": {"items": {"required": None}}}}, {"properties": {"a": {"items": {}}}}),
        ({"$defs": {"n": None}, "definitions": None}, {"$defs": {"n": {}}}),
    ],
    ids=str,
)
def test_null_is_absent(given: dict[str, Any], kept: dict[str, Any]) -> None:
    assert described(with_parameters(given))["function"]["parameters"] == kept
    mcp = StructuredTool(name="f", description="d", args_schema=given, func=lambda **_: "")
    assert described(mcp)["function"]["parameters"] == kept


def test_null_is_absent_beside_the_parameters() -> None:
    assert described(with_parameters(None, description=None, strict=None))["function"] == {"name": "f"}
    assert described({"name": "f", "description": None, "parameters": None})["function"] == {"name": "f"}


@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        ({"properties": {"a": {"type": "object", "required": False}}}, "'required' in parameters.properties.a"),
        ({"required": "a"}, "'required' in parameters"),
        ({"required": [1]}, "'required' in parameters"),
        ({"properties": []}, "'properties' in parameters"),
        ({"properties": {"a": 7}}, "parameters.properties.a must be a JSON Schema"),
        ({"anyOf": {}}, "'anyOf' in parameters"),
        ({"anyOf": [{"enum": "ab"}]}, "'enum' in parameters.anyOf.0"),
        ({"properties": {"a": {"items": {"type": 7}}}}, "'type' in parameters.properties.a.items"),
        ({"$defs": {"n": {"description": 7}}}, r"'description' in parameters.\$defs.n"),
        ([], "parameters must be a JSON Schema"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_names_tool_and_keyword(parameters: Any, keyword: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"The tool 'f': {keyword}"):
        ChatAgentSpec().bind_tools([with_parameters(parameters)])


@pytest.mark.parametrize(
    "given",
    [
        {"type": "web_search"},
        {"type": "file_search"},
        {"type": "web_search_preview_2025_03_11"},
        {},
        {"type": "function"},
        {"type": "function", "function": None},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": None}},
        {"type": "function", "function": {"name": 7}},
        {"name": "f", "parameters": {"const": {1}}},
        7,
        None,
        "get_weather",
    ],
    ids=str,
)
def test_what_is_no_tool_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="tool"):
        ChatAgentSpec().bind_tools([given], tool_choice="x")
    with pytest.raises(InvalidRequestError, match="tool"):
        described(given)


def test_broken_text_in_a_tool_is_mended_and_long_ones_are_cut() -> None:
    made = described(with_parameters({"properties": {"a": {"enum": ["\udcff"]}}}, description="\ud83d\ude00 \udcff"))
    assert made["function"]["description"] == "😀 \ufffd"
    assert made["function"]["parameters"]["properties"]["a"]["enum"] == ["\ufffd"]
    with pytest.raises(InvalidRequestError) as caught:
        described({"type": "web_search", "long": "x" * 100_000})
    assert len(str(caught.value)) < 2_000


class _Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: float


class _Square(BaseModel):
    kind: Literal["square"] = "square"
    side: float


class _Draw(BaseModel):
    shape: Annotated[_Circle | _Square, Field(discriminator="kind")]


def test_an_argument_that_is_a_discriminated_union_keeps_its_tag() -> None:
    tool = StructuredTool.from_function(lambda shape: "ok", name="draw", description="Draw.", args_schema=_Draw)
    schema = jsonschema.Draft202012Validator(described(tool)["function"]["parameters"])
    assert schema.is_valid({"shape": {"kind": "circle", "radius": 1.5}})
    assert not schema.is_valid({"shape": {"radius": 1.5}})
