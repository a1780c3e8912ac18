"""JSON Schemas of Python types whose instances all parse."""

from __future__ import annotations

import contextlib
import copy
import types
import typing
from typing import Any

import typing_extensions

from agentspec.errors import GrammarError, cut, shown
from agentspec.grammars.schema_tools.positions import subschemas
from agentspec.grammars.schema_tools.tags import members_of, require

INTEGER_NAME = "^-?(0|[1-9][0-9]*)$"


def schema_of(described: Any) -> dict[str, Any]:
    """Return the JSON Schema of a pydantic class (v2 or v1), TypedDict, dataclass or another type that pydantic knows.

    Where pydantic parses less than its schema allows, the schema is narrowed: members of a discriminated union must
    name their tag, and integer keys must be written as integers.

    Raises:
        GrammarError: for a type without a JSON Schema.
    """
    if is_pydantic_v1(described):
        known: dict[str, Any] = _with_tags(described.schema())
        return known
    with contextlib.suppress(Exception):  # the next statement tries another form
        return _with_tags(_of_pydantic(described))
    try:
        return _with_tags(_of_pydantic(_for_pydantic(described)))
    except Exception as error:  # pydantic raises several kinds for types without a schema
        raise GrammarError(f"{shown(described)} cannot be described by a JSON Schema: {cut(str(error))}") from error


def _of_pydantic(described: Any) -> dict[str, Any]:
    from pydantic import TypeAdapter  # here: schemas and patterns need no pydantic
    from pydantic.json_schema import GenerateJsonSchema

    class Parsed(GenerateJsonSchema):
        """Writes schemas of what pydantic parses."""

        def dict_schema(self, schema: Any) -> Any:
            """Return the schema of a mapping, whose integer keys are strings in JSON."""
            made = super().dict_schema(schema)
            if schema.get("keys_schema", {}).get("type") != "int":
                return made
            values = made.pop("additionalProperties", {})
            return {**made, "patternProperties": {INTEGER_NAME: values}, "additionalProperties": False}

    return TypeAdapter(described).json_schema(schema_generator=Parsed)


def _with_tags(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of pydantic in which each member of a discriminated union must name its tag.

    A union whose tag a function computes has no property for it. pydantic tries only the member that the function
    names, so that members need not exclude each other: the union becomes an ``anyOf``.
    """
    made: dict[str, Any] = copy.deepcopy(schema)
    left: list[Any] = [made]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        left += [inner for _, inner in subschemas(part)]
        if "oneOf" in part:
            for tag in _tags(part, made):
                require(tag, part["oneOf"], made)
            if "discriminator" not in part:
                part["anyOf"] = part.pop("oneOf")
    return made


def _tags(union: dict[str, Any], root: Any) -> set[str]:
    """Return the properties that distinguish the members of a union."""
    if "discriminator" in union:
        return {union["discriminator"]["propertyName"]}
    named = [
        {
            name
            for name, schema in member.get("properties", {}).items()
            if "const" in schema or len(schema.get("enum", ())) == 1
        }
        for member in members_of(union["oneOf"], root)
    ]
    return set.intersection(*named) if named else set()


def _for_pydantic(described: Any) -> Any:
    """Return a type with each ``typing.TypedDict`` in it rebuilt: pydantic refuses these before Python 3.12."""
    if typing.is_typeddict(described):
        return _rebuilt(described)
    parts = typing.get_args(described)
    if not any(map(_holds_typed_dict, parts)):
        return described
    rebuilt = tuple(map(_for_pydantic, parts))
    origin = typing.get_origin(described)
    return typing.Union[rebuilt] if origin in (typing.Union, types.UnionType) else origin[rebuilt]  # noqa: UP007


def _holds_typed_dict(described: Any) -> bool:
    return typing.is_typeddict(described) or any(map(_holds_typed_dict, typing.get_args(described)))


def _rebuilt(described: Any) -> Any:
    fields = {}
    for name, hint in typing.get_type_hints(described, include_extras=True).items():
        wrapper = typing.get_origin(hint)
        wraps = wrapper in (typing_extensions.Required, typing_extensions.NotRequired)
        inner = _for_pydantic(typing.get_args(hint)[0] if wraps else hint)
        required = wrapper is typing_extensions.Required if wraps else name in described.__required_keys__
        fields[name] = inner if required else typing_extensions.NotRequired[inner]
    made = typing_extensions.TypedDict(described.__name__, fields)  # type: ignore[misc]
    made.__doc__ = described.__doc__
    return made


def is_pydantic_v1(described: Any) -> bool:
    """Return whether a type is a class of pydantic's first version."""
    if not isinstance(described, type):
        return False
    from pydantic import BaseModel

    return not issubclass(described, BaseModel) and hasattr(described, "__fields__")
