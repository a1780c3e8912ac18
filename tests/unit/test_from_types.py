"""A type parses every instance of its schema."""

from __future__ import annotations

import dataclasses
import random
from typing import Annotated, Any, Literal, NotRequired

import jsonschema
import pydantic
import pydantic.v1
import pytest
from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter
from random_schemas import instances
from typing_extensions import TypedDict

from agentspec.grammars.from_types import schema_of
from agentspec.grammars.schema_tools import checked, closed


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    bark: str = "loud"


class Black(BaseModel):
    kind: Literal["bear"] = "bear"
    colour: Literal["black"] = "black"


class White(BaseModel):
    kind: Literal["bear", "polar"] = "bear"
    colour: Literal["white"] = "white"


Bear = Annotated[Black | White, Field(discriminator="colour")]


class Pet(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")


class Zoo(BaseModel):
    pets: list[Annotated[Bear | Dog, Field(discriminator="kind")]]
    best: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    named: dict[str, Annotated[Cat | Dog, Field(discriminator="kind")]] = {}


class Aliased(BaseModel):
    sort: Literal["a"] = Field("a", alias="Sort")


class AliasedToo(BaseModel):
    sort: Literal["b"] = Field("b", alias="Sort")


class ByAlias(BaseModel):
    it: Aliased | AliasedToo = Field(discriminator="sort")


class Left(TypedDict):
    side: NotRequired[Literal["left"]]


class Right(TypedDict):
    side: NotRequired[Literal["right"]]
    n: int


class Sides(TypedDict):
    side: Annotated[Left | Right, Field(discriminator="side")]


@dataclasses.dataclass
class One:
    tag: Literal[1] = 1


@dataclasses.dataclass
class Two:
    tag: Literal[2, 3] = 2


@dataclasses.dataclass
class Numbers:
    number: Annotated[One | Two, Field(discriminator="tag")]


class Leaf(BaseModel):
    node: Literal["leaf"] = "leaf"


class Branch(BaseModel):
    node: Literal["branch"] = "branch"
    kids: list[Tree] = []


class Tree(BaseModel):
    root: Leaf | Branch = Field(Leaf(), discriminator="node")


class OldCat(pydantic.v1.BaseModel):
    kind: Literal["cat"] = "cat"


class OldDog(pydantic.v1.BaseModel):
    kind: Literal["dog"] = "dog"
    age: int


class OldPet(pydantic.v1.BaseModel):
    pet: OldCat | OldDog = pydantic.v1.Field(discriminator="kind")


def tag_of(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


class ByFunction(BaseModel):
    pet: Annotated[Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")], Discriminator(tag_of)]


class Counts(BaseModel):
    by_number: dict[int, str]
    by_name: dict[str, int] = {}


class Strict(BaseModel, extra="forbid"):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    lists: dict[int, list[Pet]] = {}


UNION = Annotated[Cat | Dog, Field(discriminator="kind")]
TYPES: list[Any] = [Pet, Zoo, ByAlias, Sides, Numbers, Tree, ByFunction, Counts, Strict, UNION, list[UNION], Cat | Dog]  # type: ignore[valid-type]


@pytest.mark.parametrize("described", TYPES, ids=str)
def test_every_instance_of_the_schema_parses(described: Any) -> None:
    schema = schema_of(described)
    rng = random.Random(0)
    found = [*instances(rng, schema, 600), *instances(rng, closed(schema), 600)]
    assert len(found) > 50
    for value in found:
        TypeAdapter(described).validate_python(value, strict=False)


def test_every_instance_of_an_old_class_parses() -> None:
    found = list(instances(random.Random(0), schema_of(OldPet), 600))
    assert len(found) > 50
    for value in found:
        OldPet.parse_obj(value)


def test_a_tag_is_needed_and_a_tagged_value_is_valid() -> None:
    check = jsonschema.Draft202012Validator(closed(schema_of(Pet)))
    assert not check.is_valid({"pet": {"lives": 9}})
    assert check.is_valid({"pet": {"kind": "cat", "lives": 9}})
    assert check.is_valid({"pet": {"kind": "dog"}})


def test_unions_without_a_discriminator_keep_their_defaults() -> None:
    check = jsonschema.Draft202012Validator(schema_of(Cat | Dog))
    assert check.is_valid({"lives": 9})


def test_keys_that_are_integers_are_written_as_such() -> None:
    check = jsonschema.Draft202012Validator(closed(schema_of(Counts)))
    assert check.is_valid({"by_number": {"-3": "x", "0": "y"}, "by_name": {"a": 1}})
    assert not check.is_valid({"by_number": {"x": "x"}})


def test_the_type_itself_is_not_changed() -> None:
    before = Pet.model_json_schema()
    schema_of(Pet)
    assert Pet.model_json_schema() == before
    old = OldPet.schema()
    schema_of(OldPet)
    assert OldPet.schema() == old


class _Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class _Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    bark: str


class _Args(BaseModel):
    pet: Annotated[_Cat | _Dog, Field(discriminator="kind")]


def test_a_schema_of_another_server_that_names_its_tag_has_it_required() -> None:
    """As pydantic and OpenAPI write it: the tag has a default, and chooses the member."""
    schema = closed(checked(_Args.model_json_schema()))
    assert jsonschema.Draft202012Validator(schema).is_valid({"pet": {"kind": "cat", "lives": 9}})
    assert not jsonschema.Draft202012Validator(schema).is_valid({"pet": {"lives": 9}})
    assert checked(schema) is schema
