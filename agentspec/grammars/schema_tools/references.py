"""Resolve references: write each ``$ref`` as a JSON pointer from the root, also for schemas that move elsewhere."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from agentspec.grammars.schema_tools.positions import Schema, subschemas

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
DYNAMIC = ("$dynamicRef", "$recursiveRef")
_IDENTIFIERS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_PLAIN = "!$&'()*+,;=:@-._~"  # characters of a name that a fragment holds unquoted
_FOREIGN = "agentspec:"  # base of a document without an identifier


def pointer(parts: list[Any] | tuple[Any, ...]) -> str:
    """Return the reference to a place in the same document."""
    names = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "/".join(("#", *(urllib.parse.quote(name, safe=_PLAIN) for name in names)))


def parts_of(reference: str) -> list[str]:
    """Return the names that a reference to a place in the same document goes through."""
    names = reference.split("/")[1:]
    return [urllib.parse.unquote(name).replace("~1", "/").replace("~0", "~") for name in names]


def target(root: Any, reference: Any) -> Any:
    """Return the schema that a reference to a place in the same document means; None where it means none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = _at(root, parts_of(reference))
    return found if isinstance(found, dict | bool) else None


def _at(value: Any, parts: list[str]) -> Any:
    for part in parts:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]*", part) and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def localized(schema: Any) -> Any:
    """Return a schema whose references into itself are JSON pointers from its root, without identifiers.

    References by ``$id``, ``$anchor`` and relative address, and dynamic ones that can mean one place only, become
    pointers. References to other documents stay as they are. A schema without anything to change is returned itself.
    """
    return _Document(schema).rewritten() if isinstance(schema, dict) else schema


def embedded(schema: Any, at: str) -> Any:
    """Return a schema that means the same once it stands in another document.

    Args:
        schema: a whole document, so ``#`` is this schema.
        at: the reference to the place where it will stand, such as ``#/properties/arguments``.
    """
    return _Document(schema, at).rewritten() if isinstance(schema, dict) else schema


class _Document:
    """One document: its schemas, the addresses of its resources and anchors, and the targets of its references.

    A schema is known by its place, for the same object may stand in several.
    """

    def __init__(self, root: Schema, at: str = "#") -> None:
        self._root, self._at = root, at
        self._schemas: dict[tuple[str, ...], str] = {}  # places of schemas, with their base addresses
        self._resources: dict[str, tuple[str, ...]] = {}
        self._anchors: dict[str, tuple[str, ...]] = {}
        self._has_old_ids = bool(re.search("draft-0[34]", str(root.get("$schema"))))
        self._collect((), root, _FOREIGN)

    def _collect(self, place: tuple[str, ...], schema: Any, base: str) -> None:
        """Note the schemas of a subtree, then those that references lead to outside of it."""
        left = [(place, schema, base)]
        while left:
            place, schema, base = left.pop()
            if not isinstance(schema, dict) or place in self._schemas:
                continue
            base = self._identified(place, schema, base)
            self._schemas[place] = base
            left += [((*place, *map(str, path)), part, base) for path, part in subschemas(schema)]
            left += self._led_to(schema)

    def _led_to(self, schema: Schema) -> Iterator[tuple[tuple[str, ...], Any, str]]:
        """Yield places of schemas that only a reference reaches, and no known keyword (``#/components/schemas/A``)."""
        for keyword in REFERENCES:
            reference = schema.get(keyword)
            if isinstance(reference, str) and reference.startswith("#/"):
                parts = parts_of(reference)
                yield tuple(parts), _at(self._root, parts), self._schemas[()]

    def _identified(self, place: tuple[str, ...], schema: Schema, base: str) -> str:
        """Note the names of a schema; return the base of the references in it."""
        named = schema.get("id" if self._has_old_ids else "$id")
        if isinstance(named, str) and named.startswith("#"):  # an anchor, before draft 2019-09
            self._anchors.setdefault(base + named, place)
        elif isinstance(named, str):
            base = urllib.parse.urljoin(base, named).rstrip("#")
        if not place or (isinstance(named, str) and not named.startswith("#")):
            self._resources.setdefault(base, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors.setdefault(f"{base}#{schema[keyword]}", place)
        return base

    def _meant(self, reference: str, base: str) -> tuple[str, ...] | None:
        """Return the place that a reference means; None where it is in another document."""
        address, _, fragment = urllib.parse.urljoin(base, reference).partition("#")
        if reference.startswith("#"):  # addresses without a hierarchy cannot be joined
            address, fragment = base, reference[1:]
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{address}#{urllib.parse.unquote(fragment)}")
        root = self._resources.get(address)
        if root is None:
            return None
        for parts in (parts_of(f"#{fragment}"), fragment.split("/")[1:]):  # names are quoted, or ought to be
            if isinstance(_at(self._root, [*root, *parts]), dict | bool):
                return (*root, *parts)
        return None

    def rewritten(self) -> Schema:
        """Return the document with its references rewritten; itself where all stay, or one depends on the way to it."""
        if any(self._is_dynamic(place) for place in self._schemas):
            return self._root
        changes = {place: made for place in self._schemas if (made := self._change(place)) is not None}
        if not changes:
            return self._root
        known: Schema = _rebuilt(self._root, (), changes)
        return known

    def _change(self, place: tuple[str, ...]) -> Schema | None:
        """Return a schema with its own references and identifiers rewritten; None where they stay."""
        schema, base = _at(self._root, list(place)), self._schemas[place]
        made: Schema = {}
        for keyword, value in schema.items():
            if keyword in REFERENCES and isinstance(value, str):
                meant = self._meant(value, base)
                made |= {keyword: value} if meant is None else {"$ref": self._at + pointer(meant)[1:]}
            elif keyword not in _IDENTIFIERS or self._stays(keyword, value):
                made[keyword] = value
        return None if made == schema else made

    def _is_dynamic(self, place: tuple[str, ...]) -> bool:
        """Whether a schema has a reference that may mean several places, or two references."""
        schema = _at(self._root, list(place))
        named = [keyword for keyword in DYNAMIC if keyword in schema]
        return bool(named) and (len(named) > 1 or "$ref" in schema or not self._is_static(named[0], schema[named[0]]))

    def _is_static(self, keyword: str, reference: str) -> bool:
        """Whether a dynamic reference means the same wherever it is reached from: one place."""
        if keyword == "$recursiveRef":
            return len(self._resources) == 1
        name = reference.partition("#")[2]
        return name.startswith("/") or sum(known.endswith(f"#{name}") for known in self._anchors) == 1

    def _stays(self, keyword: str, value: Any) -> bool:
        if keyword == "id":
            return not self._has_old_ids
        return keyword == "$id" and not isinstance(value, str)


def _rebuilt(value: Any, place: tuple[str, ...], changes: dict[tuple[str, ...], Schema]) -> Any:
    if isinstance(value, list):
        return [_rebuilt(part, (*place, str(index)), changes) for index, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    return {key: _rebuilt(part, (*place, key), changes) for key, part in changes.get(place, value).items()}
