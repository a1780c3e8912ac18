"""Collect what several schemas of one value assert together: the names of its properties, and what they leave open."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentspec.grammars.schema_tools.positions import DEFINITIONS, IN_PLACE, Path, Schema, subschemas
from agentspec.grammars.schema_tools.references import DYNAMIC, target
from agentspec.grammars.schema_tools.satisfiable import Satisfiable, kind_of
from agentspec.grammars.schema_tools.written import to_json

MAX_GROUP = 200  # schemas of one value; beyond, it is left as it is

WHAT_ELSE = {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"}
"""Keywords that define what an object may hold besides the properties that it names."""

_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")
_OUTSIDE = {
    *("type", "enum", "const", "title", "description", "default", "examples", "deprecated", "$comment"),
    *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "minItems", "maxItems"),
}
"""Keywords whose assertion does not depend on what objects hold."""

_NEGATIVE = ("not", "if", "oneOf")
"""Keywords under which to allow less may be to allow more."""

Slot = str
"""A part of a value that schemas describe: ``.name``, ``*`` (other properties) or ``[]`` (items)."""


def slot(path: Path) -> Slot:
    """Return the part of a value that a subschema describes."""
    if path[0] == "properties":
        return f".{path[1]}"
    return "[]" if path[0] in _ITEMS else "*"


@dataclass
class Group:
    """The schemas of one value: a schema, what it refers to, its ``allOf``, ``anyOf`` and so on.

    Args:
        names: of properties that any of them mentions, in their order.
        declares: whether one has ``properties`` with names.
        bounds_others: whether one has a keyword for properties without a name.
        is_fixed: whether its objects have to stay as they are: constants, and keywords that are not understood.
        counts: whether the number of properties is bounded.
        schemas: how many there are.
        is_positive: whether to allow less in any of them allows less of the value.
        patterns: of ``patternProperties``.
        parts: the schemas of each part of the value, as JSON.
        looked_into: those that depend on what objects hold.
        fixed: the parts whose schemas have to stay as they are.
    """

    names: dict[str, None] = field(default_factory=dict)
    declares: bool = False
    bounds_others: bool = False
    is_fixed: bool = False
    counts: bool = False
    schemas: int = 0
    is_positive: bool = True
    patterns: set[str] = field(default_factory=set)
    parts: defaultdict[Slot, set[str]] = field(default_factory=lambda: defaultdict(set))
    looked_into: defaultdict[Slot, set[str]] = field(default_factory=lambda: defaultdict(set))
    fixed: set[Slot] = field(default_factory=set)

    @property
    def is_closable(self) -> bool:
        """Whether the named properties may be all there are."""
        return self.declares and not (self.bounds_others or self.is_fixed or self.counts)

    def only_schema(self, name: str) -> Any:
        """Return the schema of a property, where it is one that looks into no object; else None."""
        known = f".{name}"
        texts = self.parts.get(known, set())
        if len(texts) != 1 or not self.is_positive or known in self.raw:
            return None
        [only] = json.loads(next(iter(texts)))
        items = only.get("items", {})
        is_simple = _looks_outside({**only, "items": None}) and isinstance(items, dict) and _looks_outside(items)
        return only if is_simple else None

    @property
    def raw(self) -> frozenset[Slot]:
        """The parts of the value whose schemas have to stay as they are, for several describe them."""
        found = {known for known, texts in self.looked_into.items() if len(texts) > 1} | self.fixed
        if self.schemas > 1 and self.looked_into["*"]:
            return frozenset(found | {"*"} | {known for known in self.parts if known.startswith(".")})
        matched = {f".{name}" for name in self.names if any(_matches(pattern, name) for pattern in self.patterns)}
        return frozenset(found | matched | ({"*"} if matched or len(self.patterns) > 1 else set()))


def group_of(schema: Any, root: Any, is_apart: bool = False) -> Group:
    """Collect what the schemas of one value assert.

    Args:
        schema: of the value.
        root: the document, whose references are pointers from its root.
        is_apart: whether the ``oneOf`` of this very schema cannot hold twice, whatever is left out of the value.
    """
    group = Group()
    left: list[tuple[Any, bool]] = [(schema, False)]
    seen: set[tuple[str, bool]] = set()
    while left and not group.is_fixed:
        part, is_negated = left.pop()
        if not isinstance(part, dict):
            continue
        group.schemas += 1
        _note(group, part, is_negated, root)
        left += [
            (inner, is_negated or (path[0] in _NEGATIVE and not (path[0] == "oneOf" and is_apart and part is schema)))
            for path, inner in _in_place(part)
        ][::-1]
        reference = part.get("$ref")
        if reference is not None and (reference, is_negated) not in seen:
            seen.add((reference, is_negated))
            found = target(root, reference)
            group.is_fixed |= found is None
            left.append((found, is_negated))
    return group


def _in_place(schema: Schema) -> Iterator[tuple[Path, Any]]:
    return ((path, part) for path, part in subschemas(schema) if path[0] in IN_PLACE)


def _note(group: Group, schema: Schema, is_negated: bool, root: Any) -> None:
    named = schema.get("properties", {})
    group.names |= dict.fromkeys((*named, *_mentioned(schema)))
    group.declares |= bool(named) and not is_negated
    group.is_positive &= not is_negated
    group.bounds_others |= bool(schema.keys() & WHAT_ELSE)
    group.is_fixed |= group.schemas > MAX_GROUP or bool(schema.keys() & {*DYNAMIC, "extends"}) or _holds_objects(schema)
    group.patterns |= schema.get("patternProperties", {}).keys()
    group.counts |= bool(schema.get("minProperties")) and not _has_enough(schema, group, root)
    group.counts |= is_negated and bool(schema.keys() & {"minProperties", "maxProperties"})
    if "contains" in schema or (schema.get("uniqueItems") is True and schema.get("minItems", 0) > 1):
        group.fixed.add("[]")
    _note_parts(group, schema, is_negated)


def _note_parts(group: Group, schema: Schema, is_negated: bool) -> None:
    """Note which parts of the value a schema describes, and how."""
    described: defaultdict[Slot, list[Any]] = defaultdict(list)
    for path, part in subschemas(schema):
        if path[0] not in (*IN_PLACE, *DEFINITIONS) and isinstance(part, dict):
            described[slot(path)] += [part] if path[0] == "properties" else [path, part]
    for known, parts in described.items():
        looks_inside = not all(_looks_outside(part) for part in parts if isinstance(part, dict))
        group.parts[known].add(to_json(parts))
        group.looked_into[known] |= {to_json(parts)} if looks_inside else set()
        group.fixed |= {known} if is_negated and looks_inside else set()


def _looks_outside(schema: Schema) -> bool:
    """Whether a schema allows a value if and only if it allows the value with properties left out."""
    stated = {keyword for keyword, value in schema.items() if value is not None}
    return stated <= _OUTSIDE and not _holds_objects(schema)


def _mentioned(schema: Schema) -> Iterator[str]:
    """Yield the names on whose presence something depends."""
    yield from schema.get("required", ())
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in schema.get(keyword, {}).items():
            yield name
            yield from needs if isinstance(needs, list) else [needs] if isinstance(needs, str) else []


def _holds_objects(schema: Schema) -> bool:
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return any(isinstance(value, dict | list) for value in values)


def _has_enough(schema: Schema, group: Group, root: Any) -> bool:
    """Whether the properties of an object that stands alone surely suffice for its ``minProperties``."""
    plain = {"type", "properties", "required", "minProperties", "title", "description", "$defs", "definitions"}
    if schema.keys() - plain or group.schemas > 1:
        return False
    known = Satisfiable(root)
    enough: int = schema["minProperties"]
    return sum(map(known.has_instance, schema.get("properties", {}).values())) >= enough


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def tags(schema: Any, root: Any) -> tuple[set[str], dict[str, set[str]]]:
    """Return the names that every instance of a schema has, and the constants of its properties, as JSON."""
    required: set[str] = set()
    constants: dict[str, set[str]] = {}
    left, seen = [schema], set[str]()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        required |= set(part.get("required", ()))
        for name, value in part.get("properties", {}).items():
            if isinstance(value, dict) and ("const" in value or "enum" in value):
                named = {to_json(_plain(v)) for v in ([value["const"]] if "const" in value else value["enum"])}
                constants[name] = constants.get(name, named) & named
        left += part.get("allOf", ())
        reference = part.get("$ref")
        if reference is not None and reference not in seen and len(seen) < MAX_GROUP:
            seen.add(reference)
            left.append(target(root, reference))
    return required, constants


def _plain(value: Any) -> Any:
    """Bring equal numbers into one form."""
    return int(value) if kind_of(value) >= {"integer"} else value
