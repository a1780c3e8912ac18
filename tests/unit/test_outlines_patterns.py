"""Regular expressions of the outlines engine: read as Python's ``re`` reads them, or refused."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata

import pytest

from agentspec.grammars.outlines.automaton import Automaton, _from_table
from agentspec.grammars.outlines.characters import category, python_shorthand, without_case
from agentspec.grammars.outlines.compile import packed
from agentspec.grammars.outlines.pattern import pattern, plain_pattern

TEXTS = ["".join(letters) for size in range(5) for letters in itertools.product("ab\n", repeat=size)]
ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\n", r"\s", r"\S", r"\d", "[a-b]", r"[^\n]", r"[\s\S]", r"\x61", "ab"]
ANCHORS = ["^", "$", r"\A", r"\Z"]
COUNTS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{1,2}?", "{0}"]
OPENERS = ["(", "(?:", "(?P<n>", "(?i:", "(?s:"]


def automaton(regex: str) -> Automaton:
    return _from_table(packed(regex))


def accepts(made: Automaton, text: str) -> bool:
    return bool(made.finals[made.after(1, text.encode())])


def made_at_random(rng: random.Random, depth: int) -> str:
    """A regular expression with anchors anywhere."""
    branches = []
    for _ in range(rng.choice((1, 1, 2))):
        parts = []
        for _ in range(rng.randrange(4)):
            kind = rng.random()
            if kind < 0.3:
                parts.append(rng.choice(ANCHORS))
            elif kind < 0.6 and depth:
                name = rng.choice(OPENERS).replace("<n>", f"<n{rng.randrange(10**9)}>")
                parts.append(f"{name}{made_at_random(rng, depth - 1)}){rng.choice(['', '', *COUNTS])}")
            else:
                parts.append(rng.choice(ATOMS) + rng.choice(["", "", *COUNTS]))
        branches.append("".join(parts))
    return "|".join(branches)


@pytest.mark.parametrize("seed", range(2))
def test_anchors_groups_and_counts_mean_what_python_says(seed: int) -> None:
    rng, read, refused = random.Random(seed), 0, 0
    while read < 50:
        source = rng.choice(["", "", "(?i)", "(?s)", "(?is)"]) + made_at_random(rng, 2)
        try:
            regex = plain_pattern(source).regex
        except ValueError as error:
            refused += "anchor in a repetition" in str(error) or "before a line end" in str(error)
            continue
        made = automaton(regex)
        for text in TEXTS:
            assert accepts(made, text) == (re.fullmatch(source, text) is not None), (source, text)
        read += 1
    assert 0 < refused < 2 * read


@pytest.mark.parametrize("seed", range(1))
def test_a_pattern_of_a_json_schema_means_what_python_says(seed: int) -> None:
    rng, read = random.Random(100 + seed), 0
    while read < 25:
        source = made_at_random(rng, 2)
        try:
            found = pattern(source)
        except ValueError:
            continue
        made = automaton(f'"{found.regex}"')
        for text in TEXTS:
            if not (text.endswith("\n") and "$" in source):  # Python's `$` also stands before the last line end
                quoted = '"' + text.replace("\n", "\\n") + '"'
                assert accepts(made, quoted) == (re.search(source, text) is not None), (source, text)
        read += 1


@pytest.mark.parametrize(
    ("source", "named"),
    [
        *((r"\bfoo\b", r"\\b"), (r"a\Bb", r"\\B"), ("(?=a)a", r"\(\?="), ("(?!x)a+", r"\(\?!"), ("(?<=a)b", r"\(\?<")),
        *(
            ("(?<!a)b", r"\(\?<"),
            (r"(a)\1", r"\\1"),
            ("(?P<n>a)(?P=n)", r"\(\?P"),
            ("(?x) a b", r"\(\?x"),
            ("a(?i)b", r"\(\?i"),
        ),
        *(
            ("(?m)^a$", r"\(\?m"),
            ("(?>a+)b", r"\(\?>"),
            ("a++b", "repetition"),
            ("a{2}{3}", "repetition"),
            ("(?#c)a", r"\(\?#"),
        ),
        *(("(?(1)a|b)", r"\(\?\("), ("(^a)*", "anchor"), ("(a$)+", "anchor"), ("^*", "anchor"), ("a$\n", "line end")),
        *(
            (r"a$[\s\S]", "line end"),
            (r"\p{Greek}", r"\\p"),
            (r"\N{DIGIT ONE}", r"\\N"),
            (r"\Qa\E", r"\\Q"),
            (r"\ca", r"\\c"),
        ),
        *(
            ("[a&&b]", "&&"),
            ("[a--b]", "range"),
            ("[[:alpha:]]", r"\["),
            ("a{,3}", "{"),
            ("(a", "open group"),
            ("a)", "unbalanced"),
        ),
        *(
            ("[]a]", "empty class"),
            ("[b-a]", "range"),
            ("*a", r"\*"),
            (r"\x{110000}", "character"),
            ("(" * 5000, "too many"),
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(source: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){named}.*in the pattern"):
        plain_pattern(source)


def test_names_of_sets_mean_what_python_says() -> None:
    rng = random.Random(0)
    characters = [chr(c) for c in [*range(0x300), *rng.sample(range(0x300, 0x30000), 3000)] if not 0xD800 <= c < 0xE000]
    for name in "dwsDWS":
        known = python_shorthand(name)
        for c in characters:
            assert any(low <= ord(c) <= high for low, high in known) == (re.fullmatch(f"\\{name}", c) is not None)
    letters = category("L")
    assert letters is not None
    assert category("Latin") is None
    assert category("Zz") is None
    assert all(
        (unicodedata.category(c)[0] == "L") == any(low <= ord(c) <= high for low, high in letters) for c in characters
    )
    made = automaton(plain_pattern(r"\p{Lu}\PL\pN").regex)
    assert accepts(made, "\u00c9-\u0663")
    assert not accepts(made, "\u00e9-3")
    assert not accepts(made, "\u00c9a3")


def test_case_is_left_out_as_python_does() -> None:
    cased = [chr(c) for c in range(0x250) if chr(c).lower() != chr(c).upper()] + list(
        "\u03c3\u03c2\u03a3\u1e9e\u212a\u017f"
    )
    for c in cased:
        same = {chr(code) for low, high in without_case(((ord(c), ord(c)),)) for code in range(low, high + 1)}
        if c not in "iI\u0130\u0131":  # of Turkish, where dialects differ
            assert same == {other for other in {*cased, *same} if re.fullmatch(f"(?i){re.escape(c)}", other)}, c
    made = automaton(plain_pattern("(?i)stra\u00dfe[a-c](?-i:x)").regex)
    assert accepts(made, "STRA\u1e9eEBx")
    assert not accepts(made, "STRA\u1e9eEBX")
    assert not accepts(made, "STRASSEBx")
