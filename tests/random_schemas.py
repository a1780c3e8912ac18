"""JSON Schemas made at random in every combination of their keywords, and instances that are found by trying."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentspec.grammars.schema_tools.positions import IN_PLACE, subschemas, with_subschemas
from agentspec.grammars.schema_tools.references import target

NAMES = ("a", "b", "ab", "c")
SCALARS: list[Any] = [
    *({"type": kind} for kind in ("integer", "string", "boolean", "null")),
    *({"const": 1}, {"const": "x"}, {"enum": ["x", "y"]}, {"enum": [1, None]}, {"type": ["integer", "null"]}),
    *({"type": "integer", "minimum": 3}, {"type": "string", "minLength": 2}, {}, True),
]
VALUES: list[Any] = [1, 5, "x", "long", True, None, {}, [], {"z": 1}]
APPLICATORS = ("allOf", "anyOf", "oneOf")


RARE = ("not", "if", "then", "dependentSchemas", "dependentRequired", "minProperties", "maxProperties", "const")
"""Keywords that llguidance does not build for objects, or not always."""


def random_schema(rng: random.Random, *, is_plain: bool = False) -> dict[str, Any]:
    """A document, with definitions that it refers to; a plain one has no rare keywords."""
    where = rng.choice(["$defs", "$defs", "definitions"])
    references = [f"#/{where}/{name}" for name in "XYZ"[: rng.randint(0, 3)]]
    while True:
        root = _object(rng, 3, references)
        if references:
            root[where] = {name[-1]: _schema(rng, 2, references) for name in references}
        if len(json.dumps(root)) < 1_500 and not _comes_back(root, references):
            return _without_rare(root) if is_plain else root


def _without_rare(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: said for keyword, said in schema.items() if keyword not in RARE or schema in SCALARS}
    return with_subschemas(kept, lambda path, part: _without_rare(part))


def _comes_back(root: dict[str, Any], references: list[str]) -> bool:
    """Whether a schema needs itself of the same value, which means nothing (and takes jsonschema's stack)."""
    needs = {name: {p["$ref"] for p in parts(target(root, name), None) if "$ref" in p} for name in ["#", *references]}
    for _ in needs:
        needs = {name: inner.union(*(needs[other] for other in inner)) for name, inner in needs.items()}
    return any(name in inner for name, inner in needs.items())


def _schema(rng: random.Random, depth: int, references: list[str]) -> Any:
    chosen = rng.random()
    if references and chosen < 0.25:
        return {"$ref": rng.choice([*references, "#"])}
    if depth == 0 or chosen < 0.4:
        return rng.choice(SCALARS) if rng.random() < 0.98 else False
    if chosen < 0.5:
        return {"type": "array", "items": _schema(rng, depth - 1, references)}
    return _object(rng, depth, references)


def _object(rng: random.Random, depth: int, references: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"} if rng.random() < 0.8 else {}
    if rng.random() < 0.8:
        names = rng.sample(NAMES, rng.randint(1, 3))
        made["properties"] = {name: _schema(rng, depth - 1, references) for name in names}
    if rng.random() < 0.3:
        made["required"] = rng.sample([*made.get("properties", {}), *rng.sample(NAMES, 1)], 1)
    for keyword in APPLICATORS:
        if depth > 1 and rng.random() < 0.3:
            made[keyword] = [_part(rng, depth - 1, references) for _ in range(rng.choice([1, 2, 2, 3]))]
    if references and depth > 1 and rng.random() < 0.15:
        made["$ref"] = rng.choice(references)
    rare: dict[str, Any] = {
        "additionalProperties": lambda: rng.choice([True, False, _schema(rng, depth - 1, references)]),
        "patternProperties": lambda: {rng.choice(["^a", "b$"]): _schema(rng, depth - 1, references)},
        "minProperties": lambda: rng.randint(1, 2),
        "maxProperties": lambda: rng.randint(1, 2),
        "not": lambda: {"required": rng.sample(NAMES, 1)},
        "if": lambda: {"properties": {"a": rng.choice(SCALARS)}},
        "then": lambda: {"properties": {"c": rng.choice(SCALARS)}, "required": ["c"]},
        "dependentSchemas": lambda: {"a": {"properties": {"b": rng.choice(SCALARS)}}},
        "dependentRequired": lambda: {"a": ["c"]},
        "const": lambda: {"a": 1},
        "title": lambda: "properties",
        "default": lambda: {"$ref": "#/nowhere", "properties": {"a": {}}},
    }
    for keyword, make in rare.items():
        if rng.random() < (0.1 if depth and keyword in ("additionalProperties", "patternProperties") else 0.03):
            made[keyword] = make() if depth else made.get(keyword, True if keyword == "default" else make())
    return made


def _part(rng: random.Random, depth: int, references: list[str]) -> Any:
    return _schema(rng, depth, references) if rng.random() < 0.4 else _object(rng, depth, references)


def parts(schema: Any, root: Any, rng: random.Random | None = None) -> list[dict[str, Any]]:
    """All schemas that speak of the same value as a schema does; without a root, those that stand in it.

    With a source of chance, one member of each union.
    """
    found: list[dict[str, Any]] = []
    left, seen = [schema], set()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        found.append(part)
        chosen = {k: rng.randrange(len(part[k])) for k in ("anyOf", "oneOf") if rng and part.get(k)}
        inner = [(path, said) for path, said in subschemas(part) if path[0] in IN_PLACE]
        left += [said for path, said in inner if path[-1] == chosen.get(str(path[0]), path[-1])]
        if root is not None and "$ref" in part and part["$ref"] not in seen:
            seen.add(part["$ref"])
            left.append(target(root, part["$ref"]))
    return found


def random_value(rng: random.Random, schema: Any, root: Any, depth: int = 4) -> Any:
    """A value that may be an instance of a schema."""
    together = parts(schema, root, rng if rng.random() < 0.6 else None)
    fixed = [v for part in together for v in (*part.get("enum", ()), *([part["const"]] if "const" in part else ()))]
    if fixed and rng.random() < 0.7:
        return rng.choice(fixed)
    inner = _inner(together)
    items = [part["items"] for part in together if isinstance(part.get("items"), dict | bool)]
    if depth and items and rng.random() < 0.8:
        return [random_value(rng, rng.choice(items), root, depth - 1) for _ in range(rng.randint(0, 2))]
    is_object = inner or any(part.get("type") == "object" for part in together)
    if depth and is_object and rng.random() < 0.9:
        names = [
            name for name in (*inner, *required_names(together), "z") if rng.random() < (0.25 if name == "z" else 0.6)
        ]
        return {n: random_value(rng, rng.choice(inner.get(n, [{}])), root, depth - 1) for n in dict.fromkeys(names)}
    return rng.choice(VALUES)


def _inner(together: list[dict[str, Any]]) -> dict[str, list[Any]]:
    inner: dict[str, list[Any]] = {}
    for part in together:
        for name, said in part.get("properties", {}).items():
            inner.setdefault(name, []).append(said)
    return inner


def required_names(together: list[dict[str, Any]]) -> list[str]:
    """The names that any of several schemas requires."""
    return [name for part in together for name in part.get("required", ())]


def instances(rng: random.Random, schema: Any, tries: int) -> Iterator[Any]:
    """Instances of a schema that trying finds."""
    check = jsonschema.Draft202012Validator(schema)
    for _ in range(tries):
        value = random_value(rng, schema, schema)
        if check.is_valid(value):
            yield value


def named_paths(value: Any, schema: Any, root: Any) -> Iterator[tuple[str, ...]]:
    """The places in a value at which a property stands that its schema names."""
    yield from _named_paths(value, [schema], root)


def _named_paths(value: Any, schemas: Iterable[Any], root: Any) -> Iterator[tuple[str, ...]]:
    together = [part for schema in schemas for part in parts(schema, root)]
    if isinstance(value, list):
        items = [part["items"] for part in together if "items" in part]
        for item in value:
            yield from (("[]", *path) for path in _named_paths(item, items, root))
    if isinstance(value, dict):
        for name, said in _inner(together).items():
            if name in value:
                yield (name,)
                yield from ((name, *path) for path in _named_paths(value[name], said, root))


def less_unnamed(value: Any, schemas: Iterable[Any], root: Any, rng: random.Random | None = None) -> Any:
    """A value without the properties that its schema does not name, or without some of them."""
    together = [part for schema in schemas for part in parts(schema, root)]
    if isinstance(value, list):
        items = [part["items"] for part in together if "items" in part]
        return [less_unnamed(item, items, root, rng) for item in value]
    if not isinstance(value, dict):
        return value
    inner, needed = _inner(together), required_names(together)
    names = [name for name in value if name in inner or name in needed or (rng and rng.random() < 0.5)]
    return {name: less_unnamed(value[name], inner.get(name, [{}]), root, rng) for name in names}


def written_orders(value: Any) -> Iterator[Any]:
    """A value with the properties of its objects in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(written_orders(item)) for item in value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for said in itertools.product(*(list(written_orders(value[name])) for name in names)):
                yield dict(zip(names, said, strict=True))
    else:
        yield value


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and an end token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
