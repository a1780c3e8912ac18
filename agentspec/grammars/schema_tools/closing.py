"""Close schemas: let their objects hold the properties that they name, and no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from agentspec.grammars.schema_tools.groups import Group, Slot, group_of, slot, tags
from agentspec.grammars.schema_tools.inert import inert_references
from agentspec.grammars.schema_tools.positions import DEFINITIONS, IN_PLACE, Path, Schema, with_subschemas
from agentspec.grammars.schema_tools.references import localized, parts_of, pointer, target
from agentspec.grammars.schema_tools.satisfiable import ASSERTING, Satisfiable, kinds

MAX_WRITTEN = 100_000  # schemas of a closed one, each counted as often as it is written

Raw = frozenset[Slot]
Form = Literal["closed", "raw"] | Raw
"""The form in which a schema is written: closed, unchanged, or as one of several of a value, with these parts raw."""


def closed(schema: Any) -> Any:
    """Return a schema whose objects hold the properties they name and no others, where it leaves that open.

    A model has nothing to put into properties without a name, and a small model does not stop inventing them.

    Every instance of the closed schema is one of the open schema. An instance of the open schema, less the properties
    that no part of it names, is one of the closed schema. One exception: objects of a union hold the properties of one
    of its members. So each named property can still occur, and no schema becomes empty. Objects that define what else
    they may hold stay open. So do undecidable ones: where properties are counted, negated or constant.
    """
    known = localized(schema)
    if not isinstance(known, dict) or '"properties"' not in repr(known).replace("'", '"'):
        return known
    try:
        return _Closing(known).document()
    except _TooManyError:
        return schema


def closed_arguments(schema: Schema) -> Schema:
    """Return the schema of a tool's arguments: closed, and without properties where none is named or left open."""
    known: Schema = closed(schema)
    group = group_of(known, known)
    asserts_nothing = not (group.names or group.bounds_others or group.is_fixed or group.counts)
    return {**known, "additionalProperties": False} if asserts_nothing else known


class _TooManyError(Exception):
    """An error for a closed schema that would be too large."""


class _Closing:
    """The closing of one document, whose references are pointers from its root.

    Definitions are closed in place. A reference to another form of one, or to a schema elsewhere, gets a definition of
    its own.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._sure = Satisfiable(root)
        self._inert = inert_references(root)
        self._names: dict[tuple[str, Form], str] = {}
        self._waiting: list[tuple[str, str, Form]] = []
        self._written = 0

    def document(self) -> Schema:
        """Return the closed document."""
        made = self._closed(self._root)
        added: Schema = {}
        while self._waiting:
            name, reference, form = self._waiting.pop()
            added[name] = _without_definitions(self._in_form(target(self._root, reference), form))
        return {**made, "$defs": {**made.get("$defs", {}), **added}} if added else made

    def _in_form(self, schema: Any, form: Form) -> Any:
        if form == "closed":
            return self._closed(schema)
        return self._as_it_is(schema) if form == "raw" else self._part(schema, form)

    def _closed(self, schema: Any) -> Any:
        """Close a schema that alone describes a value."""
        self._count()
        if not isinstance(schema, dict):
            return schema
        if self._passes_on(schema):
            return _as_any_of(self._rewritten(schema, "closed", lambda path, part: self._closed(part)))
        is_apart = "oneOf" in schema and self._are_apart(schema)
        group = group_of(schema, self._root, is_apart)
        if group.is_fixed:
            return self._as_it_is(schema)
        if is_apart and group.is_closable:
            return self._of_variants(schema, group)
        made = self._part(schema, group.raw)
        if not group.is_closable:
            return made
        others = [name for name in group.names if name not in made.get("properties", {})]
        return self._with_names(made, {name: self._schema_of(name, group) for name in others})

    def _schema_of(self, name: str, group: Group) -> Any:
        """Return the schema of a property that only another schema of the value names: it guides a model."""
        only = group.only_schema(name)
        return only if only is not None and self._sure.is_lively(only) else {}

    def _part(self, schema: Any, raw: Raw) -> Any:
        """Write one of the schemas that together describe a value."""
        self._count()
        if not isinstance(schema, dict):
            return schema
        return self._rewritten(schema, raw, lambda path, part: self._within(path, part, raw))

    def _within(self, path: Path, part: Any, raw: Raw) -> Any:
        if path[0] in ("not", "if", "oneOf"):  # to allow less there may be to allow more
            return self._as_it_is(part)
        if path[0] in IN_PLACE:
            return self._part(part, raw)
        return self._as_it_is(part) if slot(path) in raw else self._closed(part)

    def _as_it_is(self, schema: Any) -> Any:
        """Write a schema with its meaning unchanged, whatever became of the definitions."""
        self._count()
        if not isinstance(schema, dict):
            return schema
        return self._rewritten(schema, "raw", lambda path, part: self._as_it_is(part))

    def _of_variants(self, schema: Schema, group: Group) -> Schema:
        """Close objects with properties of their own and those of one of several variants."""
        base = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        own = group_of(base, self._root).names
        made = self._part(base, group.raw)
        written = []
        for index, part in enumerate(schema["oneOf"]):
            names = {**own, **group_of(part, self._root).names}
            others = _excluded(schema["oneOf"], index)
            written.append(
                self._with_names(self._part(part, group.raw), {name: {} for name in names if name not in others})
            )
        return _as_any_of({**made, "oneOf": written})

    def _with_names(self, schema: Any, named: Schema) -> Schema:
        """Return a schema whose objects hold its own properties and these, and no others."""
        known: Schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
        others = {name: value for name, value in named.items() if name not in known.get("properties", {})}
        return {**known, "properties": {**known.get("properties", {}), **others}, "additionalProperties": False}

    def _rewritten(self, schema: Schema, form: Form, change: Callable[[Path, Any], Any]) -> Schema:
        """Rewrite a schema: its parts changed, its definitions closed and its reference in a form."""

        def changed(path: Path, part: Any) -> Any:
            return self._closed(part) if path[0] in DEFINITIONS else change(path, part)

        made = with_subschemas(schema, changed)
        if "$ref" in made:
            made["$ref"] = self._reference(made["$ref"], form)
        return made

    def _reference(self, reference: str, form: Form) -> str:
        """Return the reference to a form of the schema that a reference means."""
        moved = "/oneOf/" in reference  # may become an anyOf
        if (reference in self._inert and not moved) or target(self._root, reference) is None:
            return reference
        stands = reference == "#" or (len(parts_of(reference)) == 2 and reference.split("/")[1] in DEFINITIONS)
        if stands and form == "closed":
            return reference
        name = self._names.get((reference, form))
        if name is None:
            name = self._new_name(reference, form)
            self._names[reference, form] = name
            self._waiting.append((name, reference, form))
        return pointer(("$defs", name))

    def _new_name(self, reference: str, form: Form) -> str:
        last = re.sub(r"[^\w.-]", "_", (parts_of(reference) or ["root"])[-1])
        stem = f"{last}.{form if isinstance(form, str) else 'open'}"
        taken = {*self._names.values(), *self._root.get("$defs", {})}
        return next(name for k in range(len(taken) + 1) if (name := f"{stem}.{k}" if k else stem) not in taken)

    def _passes_on(self, schema: Schema) -> bool:
        """Whether a schema asserts nothing of objects beside one reference, or the members of one union."""
        stated = schema.keys() & ASSERTING - {"type"}
        if stated == {"$ref"} or (stated == {"allOf"} and len(schema["allOf"]) == 1):
            return True
        if stated == {"anyOf"}:
            return self._sure.is_lively(schema)
        return stated == {"oneOf"} and self._are_apart(schema)

    def _are_apart(self, schema: Schema) -> bool:
        """Whether the members of a ``oneOf`` surely exclude each other once closed, each with instances.

        A closed member excludes another that requires a property which the first does not have. Members also exclude
        each other by different constants for a property that one requires, and by different types.
        """
        base = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        own, (own_required, own_constants) = group_of(base, self._root), tags(base, self._root)
        if own.is_fixed or own.bounds_others or own.counts:
            return False
        known = []
        for index, part in enumerate(schema["oneOf"]):
            group, (required, constants) = group_of(part, self._root), tags(part, self._root)
            if not self._sure.is_lively(part):
                return False
            names = None if group.bounds_others or not (group.declares or own.declares) else {*own.names, *group.names}
            names = names and names - _excluded(schema["oneOf"], index)
            known.append(
                (self._kinds(part) & kinds(base), names, required | own_required, {**own_constants, **constants})
            )
        return all(self._excludes(one, other) for k, one in enumerate(known) for j, other in enumerate(known) if k != j)

    def _excludes(self, one: Any, other: Any) -> bool:
        types, names, required, constants = one
        other_types, _, other_required, other_constants = other
        if types & other_types != {"object"}:
            return not types & other_types
        if names is not None and other_required - names:
            return True
        tagged = (required | other_required) & constants.keys() & other_constants.keys()
        return any(not constants[name] & other_constants[name] for name in tagged)

    def _kinds(self, schema: Any) -> frozenset[str]:
        while isinstance(schema, dict) and schema.keys() & ASSERTING == {"$ref"}:
            schema = target(self._root, schema["$ref"])
        return kinds(schema if isinstance(schema, dict) else {})

    def _count(self) -> None:
        self._written += 1
        if self._written > MAX_WRITTEN:
            raise _TooManyError


def _as_any_of(schema: Schema) -> Schema:
    """Write a ``oneOf``, of members that exclude each other, as an ``anyOf``: engines need not prove it."""
    if "anyOf" in schema:
        return schema
    return {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in schema.items()}


def _excluded(members: list[Any], index: int) -> set[str]:
    """Return the names that other members of a ``oneOf`` require and nothing else: with one, two members hold."""
    others = [part for k, part in enumerate(members) if k != index and isinstance(part, dict)]
    alone = [part["required"] for part in others if part.keys() & ASSERTING == {"required"}]
    return {names[0] for names in alone if len(names) == 1}


def _without_definitions(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword not in DEFINITIONS}
