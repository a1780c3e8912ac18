"""Tools and schemas in LangChain's forms as OpenAI tool dicts and JSON Schemas, with all of their descriptions."""

from __future__ import annotations

import copy
import inspect
import itertools
import typing
from collections.abc import Mapping
from typing import Any

import typing_extensions
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from agentspec import InvalidRequestError
from agentspec.errors import GrammarError, shown
from agentspec.grammars.grammar import schema_of
from agentspec.grammars.schema_tools import to_json
from agentspec.grammars.schema_tools.checks import EXPECTED, Expected, find_misuses, is_text
from agentspec.grammars.schema_tools.positions import DATA, DEFINITIONS, LISTS, MAPS
from agentspec.runtime.tokens import well_formed

Schema = dict[str, Any]


def described(tool: Any) -> Schema:
    """Return a tool as an OpenAI tool dict: with the given schema, where LangChain's conversion loses parts of it.

    Raises:
        InvalidRequestError: for what is no tool, or holds what is no JSON; for a schema whose keyword has a value of
            another kind, naming tool and keyword.
    """
    tool = _without_nulls(tool) if isinstance(tool, Mapping) else tool
    try:
        formatted = _converted(tool)
        function = dict(formatted["function"])
        if (own := _own_schema(tool)) is not None:
            known = own if isinstance(tool, Mapping) else _with_descriptions(own, function.get("parameters"))
            function["parameters"] = _with_descriptions(known, _annotations(tool, {}))
        function = _clean(_without_nulls(function))
        to_json(function)
    except (TypeError, ValueError, AttributeError, KeyError, GrammarError) as error:
        raise InvalidRequestError(
            f"A tool is a function, a LangChain tool, a pydantic class or an OpenAI tool dict of JSON "
            f"values; got {shown(tool)}: {error!r}"
        ) from error
    if not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"A tool needs a name; got {shown(tool)}.")
    if "parameters" in function:
        check_keywords_of(function["name"], function["parameters"])
    return {**formatted, "function": function}


def _converted(tool: Any) -> Schema:
    """Convert a tool as LangChain does; it cannot convert a TypedDict that refers to itself."""
    try:
        return convert_to_openai_tool(tool)
    except RecursionError:
        return {"type": "function", "function": {"name": tool.__name__, "description": inspect.getdoc(tool) or ""}}


def _own_schema(tool: Any) -> Schema | None:
    """Return the parameters of a tool as they were given; None where LangChain's conversion loses nothing.

    LangChain puts definitions in place of references, and nothing in place of one that refers to itself.
    """
    if isinstance(tool, Mapping):  # a JSON Schema; function dicts are taken as they are
        bare = "title" in tool and not tool.keys() & {"function", "name", "parameters", "input_schema", "toolSpec"}
        return parameters_of(tool) if bare else None
    if callable(tool) and not isinstance(tool, type | BaseTool):
        tool = StructuredTool.from_function(tool, description=tool.__doc__ or tool.__name__)
    given = _arguments_of(tool) if isinstance(tool, BaseTool) else tool
    if isinstance(given, dict):
        return _opened(parameters_of(given))
    if not (isinstance(given, type) and (is_basemodel_subclass(given) or typing_extensions.is_typeddict(given))):
        return None
    schema = schema_of(given)
    return parameters_of(schema) if any(key in schema for key in DEFINITIONS) else None


def _arguments_of(tool: BaseTool) -> Any:
    """Return the schema of a tool's arguments: the class itself where all of its fields are the model's to fill.

    What LangChain makes of it for a call leaves out what tells unions apart.
    """
    for_call = tool.tool_call_schema
    given = tool.args_schema
    are_classes = isinstance(given, type) and isinstance(for_call, type) and is_basemodel_subclass(given)
    return given if are_classes and _field_names(given) == _field_names(for_call) else for_call


def _field_names(described: Any) -> set[str]:
    """Return the fields of a pydantic class, of v2 or v1."""
    return set(described.model_fields if hasattr(described, "model_fields") else described.__fields__)


def parameters_of(schema: Mapping[str, Any]) -> Schema:
    """Return a JSON Schema as a tool's parameters: without title and description, which are the tool's.

    Properties stand at its root, also where that is a reference.
    """
    rooted, seen = dict(schema), set[str]()
    while (ref := rooted.get("$ref")) and ref not in seen and isinstance(found := resolved(schema, ref), Mapping):
        seen.add(ref)
        rest = {key: value for key, value in rooted.items() if key != "$ref"}
        rooted = {**found, **rest}
    return {key: value for key, value in rooted.items() if key not in ("title", "description")}


def _opened(schema: Schema) -> Schema:
    """Parameters whose properties are written out where they are references, as LangChain shows them."""
    opened = {}
    for name, part in (schema.get("properties") or {}).items():
        target = resolved(schema, part["$ref"]) if isinstance(part, dict) and "$ref" in part else None
        opened[name] = part
        if isinstance(target, dict) and "$ref" not in target:
            opened[name] = {**target, **{key: part[key] for key in part if key != "$ref"}}
    return {**schema, "properties": opened} if opened else schema


def resolved(root: Mapping[str, Any], ref: Any) -> Any:
    """Return what a reference within a schema refers to; None for nothing."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    part: Any = root
    for name in ref[2:].split("/"):
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def _with_descriptions(schema: Schema, other: Any) -> Schema:
    """Add the descriptions that another form of a schema has (LangChain reads docstrings)."""
    described_schema = copy.deepcopy(schema)
    _take_descriptions(described_schema, other, described_schema, ())
    return described_schema


def _take_descriptions(schema: Any, other: Any, root: Schema, above: tuple[Any, ...]) -> None:
    if not isinstance(schema, dict) or not isinstance(other, Mapping) or len(above) > 25:
        return
    target = resolved(root, schema["$ref"]) if "$ref" in schema else None
    about = other.get("description")
    known = (schema.get("description"), target.get("description") if isinstance(target, dict) else None)
    if above and isinstance(about, str) and about and about not in known and not known[0]:
        schema["description"] = about
    if isinstance(target, dict) and not any(target is part for part in above):
        schema = target
    above = (*above, schema)
    for name, part in (schema.get("properties") or {}).items():
        _take_descriptions(part, (other.get("properties") or {}).get(name), root, above)
    for key in ("items", "additionalProperties"):
        _take_descriptions(schema.get(key), other.get(key), root, above)
    choices, others = schema.get("anyOf") or [], other.get("anyOf")
    silent = {key: value for key, value in other.items() if key != "description"}
    for index, part in enumerate(choices):
        _take_descriptions(part, others[index] if others and len(others) == len(choices) else silent, root, above)


# Schemas


def json_schema_of(schema: Any) -> Schema:
    """Return the JSON Schema of a class, TypedDict, OpenAI function or JSON Schema; the latter needs no title here.

    None is any object.
    """
    if schema is None:
        return {"title": "Answer", "type": "object"}
    if not isinstance(schema, Mapping):
        made = {"title": getattr(schema, "__name__", "Answer"), **schema_of(schema)}
        function = _as_langchain_describes(schema)
        target = resolved(made, made.get("$ref")) or {}
        description = function.get("description") or target.get("description")
        about = {"description": description} if description else {}
        return about | _with_descriptions(
            _with_descriptions(made, function.get("parameters")), _annotations(schema, {})
        )
    written: Schema = _without_nulls(schema)
    if written.keys() & {"function", "parameters", "input_schema"}:
        return convert_to_json_schema(written)
    return {"title": "Answer", **written}


def _as_langchain_describes(schema: Any) -> Schema:
    """Return a type as LangChain describes it as a function; {} where it cannot."""
    if not isinstance(schema, type):
        return {}
    try:
        function: Schema = convert_to_openai_tool(schema)["function"]
    except Exception:  # its conversion raises several kinds for types that it does not know
        return {}
    return function


def _annotations(described: Any, known: dict[Any, Schema]) -> Schema:
    """Descriptions in a TypedDict, ``Annotated[type, default, description]``, in the places that they have in a schema.

    A type that refers to itself does so here, too.
    """
    if not typing_extensions.is_typeddict(described):
        parts = [_annotations(part, known) for part in typing.get_args(described)]
        return {"items": parts[0], **parts[0]} if len(parts) == 1 else {"anyOf": parts} if parts else {}
    if described not in known:
        known[described] = {}
        hints = typing.get_type_hints(described, include_extras=True)
        known[described]["properties"] = {name: _annotation(hint, known) for name, hint in hints.items()}
    return known[described]


def _annotation(hint: Any, known: dict[Any, Schema]) -> Schema:
    while typing.get_origin(hint) in (typing_extensions.Required, typing_extensions.NotRequired):
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is not typing.Annotated:
        return _annotations(hint, known)
    kind, *about = typing.get_args(hint)
    description = {"description": about[1]} if len(about) > 1 and isinstance(about[1], str) else {}
    return {**_annotations(kind, known), **description}


def tool_of(schema: Mapping[str, Any] | type) -> Schema:
    """Return a tool whose arguments are an instance of a schema."""
    wanted = json_schema_of(schema)
    about = {"description": wanted["description"]} if wanted.get("description") else {}
    return described(
        {"type": "function", "function": {"name": wanted["title"], **about, "parameters": parameters_of(wanted)}}
    )


def tracer_schema(schema: Any) -> Any:
    """Return the schema for LangChain's tracers, which convert it in their own way: as it is, where they can."""
    try:
        convert_to_json_schema(schema)
    except (TypeError, ValueError):
        return json_schema_of(schema)
    return schema


# Nulls, as some servers write what is absent, and values of another kind

VALUES = (*DATA, "example")
"""Keywords in which null is a value."""
CHECKED: dict[str, Expected] = {
    **{keyword: EXPECTED[keyword] for keyword in (*MAPS, *LISTS, "enum", "required", "items", "not", "$ref")},
    "type": ("a name or an array of names", lambda value: isinstance(value, str | list)),
    "description": ("text", is_text),
    "additionalProperties": ("a schema", lambda value: True),  # no more than its inside is checked here
}
"""Keywords that are checked for all tools, also for those that no grammar constrains."""


def _without_nulls(value: Any) -> Any:
    """Return a tool or a schema without keywords that are null; a property without a schema may be anything."""
    if isinstance(value, list | tuple):
        return [_without_nulls(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: part for key, part in value.items() if part is not None or key in VALUES}
    return {
        key: part
        if key in VALUES
        else {name: {} if inner is None else _without_nulls(inner) for name, inner in part.items()}
        if key in MAPS and isinstance(part, Mapping)
        else _without_nulls(part)
        for key, part in kept.items()
    }


def check_keywords_of(tool: str, schema: Any) -> None:
    """Check that the keywords of a tool's schema have values of their kind.

    Raises:
        InvalidRequestError: naming the tool and the keyword.
    """
    for misuse in find_misuses(schema, CHECKED):
        if any(keyword == "items" and isinstance(index, int) for keyword, index in itertools.pairwise(misuse.path)):
            continue  # a list of items is left to the grammar: drafts differ in its meaning
        place = ".".join(("parameters", *map(str, misuse.path)))
        if misuse.keyword is None:
            raise InvalidRequestError(f"The tool {tool!r}: {place} must be a JSON Schema, got {shown(misuse.value)}.")
        raise InvalidRequestError(
            f"The tool {tool!r}: {misuse.keyword!r} in {place} must be {misuse.expected}, "
            f"got {shown(misuse.value)}; leave it out or mend it."
        )


def _clean(value: Any) -> Any:
    """JSON in which no text has lone surrogates."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(part) for key, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list | tuple) else value
