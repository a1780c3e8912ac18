"""Calls in other spellings than a dialect's own: what the grammar lets a model write, the parser reads, and back."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from scripted import tokenizer

from agentspec import Grammar
from agentspec.chat import AnswerParser, ChatFormat, ToolCall
from agentspec.grammars import compiler
from agentspec.grammars.call_openers import MOST_HEADS, OPENERS, openers_for
from agentspec.grammars.matcher import Matcher

DIALECTS = [
    ("qwen", None),
    ("qwen", "plain"),
    ("qwen3", None),
    ("llama3", None),
    ("mistral", None),
    ("mistral_args", None),
]
WRAPPERS = {
    "bare": "{}",
    "blank lines": "\n\n {}",
    "fence": "```json\n{}\n```",
    "plain fence": "```\n{}\n```",
    "tools": "<tools>\n{}\n</tools>",
    "tools inline": "<tools>{}</tools>",
    "list": "[{}]",
    "indented list": "[\n  {}\n]",
    "list in a fence": "```json\n[{}]\n```",
    "list in tools": "<tools>[{}]</tools>",
}
STYLES: dict[str, dict[str, Any]] = {
    "ours": {},
    "compact": {"separators": (",", ":")},
    "indented": {"indent": 2},
    "deeply indented": {"indent": 4},
    "tabs": {"indent": "\t"},
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
        "brief": {"type": "boolean"},
    },
    "required": ["city", "brief"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_weather.v2/x", "description": "", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": ""}},
]
RAW_NAMES = [TOOLS[0], TOOLS[2]]  # of a dialect that writes names without quotes
WEATHER: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Zürich", "days": [1, 2], "brief": True})
NOW: tuple[str, dict[str, Any]] = ("now", {})

TEXTS = [
    "",
    "Hello.",
    '{"name": "Bob", "age": 3}',
    '{"name": "nowhere"}',
    '{"name": "no',
    '{"name": 3}',
    '{"name"',
    '{"names": "now"}',
    '{"answer": 1}',
    '{"arguments": {}, "name": "now"}',
    '{"function": {"name": "now", "arguments": {}}}',
    "{}",
    "[1, 2]",
    '[{"name": "Bob"}]',
    '["now"]',
    "```python\nprint('now')\n```",
    '```json\n{"answer": 1}\n```',
    '```yaml\nname: "now"\n```',
    '```js\n{"name": "now", "arguments": {}}\n```',
    "```",
    "<tools> are listed above",
    "<tools>\n</tools>",
    "<to",
    " \n\n ",
    'For example: {"name": "now", "arguments": {}}',
    '"name": "now"',
    "1. Wait.\n2. See.",
]


@cache
def chat_of(template: str, dialect: str | None) -> tuple[ChatFormat, Any, Any]:
    known = tokenizer(template)
    return ChatFormat(known, dialect), known, compiler(known, len(known))


@cache
def grammar_of(template: str, dialect: str | None, parallel: int = 1) -> Grammar:
    chat, _, _ = chat_of(template, dialect)
    grammar = chat.answer_grammar(tools_of(chat), parallel=parallel, thought=chat.thought([1]))
    assert grammar is not None
    return grammar


def tools_of(chat: ChatFormat) -> list[dict[str, Any]]:
    return RAW_NAMES if "{raw_name}" in chat.form.before_arguments else TOOLS


def matcher(template: str, dialect: str | None, parallel: int = 1) -> Matcher:
    made: Matcher = chat_of(template, dialect)[2].matcher(grammar_of(template, dialect, parallel))
    return made


def feed(made: Matcher, known: Any, text: str, step: int) -> bool:
    """Whether a matcher takes a text that is cut into tokens so many characters at a time; 0 for all of it at once."""
    pieces = [text[at : at + step] for at in range(0, len(text), step)] if step else [text]
    return all(made.accept_token(token) for piece in pieces for token in encoded(known, piece))


@cache
def encoded(known: Any, text: str) -> list[int]:
    ids: list[int] = known.encode(text, add_special_tokens=False)
    return ids


def accepts(template: str, dialect: str | None, text: str, *, parallel: int = 1, step: int = 1) -> bool:
    made = matcher(template, dialect, parallel)
    return feed(made, chat_of(template, dialect)[1], text, step) and made.is_accepting()


def read(chat: ChatFormat, text: str, step: int = 1) -> tuple[list[str], list[ToolCall]]:
    """What was shown, piece by piece, and the calls."""
    parser = chat.parser([1], tools_of(chat), thought=chat.thought([1]))
    shown = [parser.push(text[at : at + step]).text for at in range(0, len(text), step or 1)]
    rest, calls = parser.finish()
    return [*shown, rest.text], calls


def written(chat: ChatFormat, call: tuple[str, dict[str, Any]], style: str) -> str:
    return json.dumps({"name": call[0], chat.form.loose_key: call[1]}, ensure_ascii=False, **STYLES[style])


def found(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in calls if call.is_complete]


@pytest.mark.parametrize(
    ("wrapper", "style"),
    [
        (wrapper, style)
        for wrapper in WRAPPERS
        for style in STYLES
        if wrapper == "bare" or style in ("ours", "indented")
    ],
)
@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_a_call_in_another_spelling_is_legal_and_read(
    template: str, dialect: str | None, wrapper: str, style: str
) -> None:
    chat, _, _ = chat_of(template, dialect)
    for call in (WEATHER, NOW):
        text = WRAPPERS[wrapper].format(written(chat, call, style))
        assert all(accepts(template, dialect, text, step=step) for step in (0, 1, 3))
        for step in (1, 3, len(text)):
            shown, calls = read(chat, text, step)
            assert "".join(shown) == ""
            assert found(calls) == [call]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_what_names_no_tool_stays_text(template: str, dialect: str | None, text: str) -> None:
    chat, _, _ = chat_of(template, dialect)
    for step in (0, 1, 5):
        assert accepts(template, dialect, text, step=step)
        assert accepts(template, dialect, text + " And so on, to the end.", step=step)
        shown, calls = read(chat, text, step or 100)
        assert ("".join(shown), calls) == (text, [])


@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_text_is_shown_as_soon_as_it_can_be_no_call(template: str, dialect: str | None) -> None:
    chat, _, _ = chat_of(template, dialect)
    parser = chat.parser([1], tools_of(chat))
    pieces = [parser.push(letter).text for letter in '{"name": "nobody"}, {"x']
    assert pieces.index('{"name": "nob') == len('{"name": "nob') - 1
    assert pieces[-1] == "x"


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_from_the_name_of_a_tool_on_only_a_valid_call_is_legal(
    template: str, dialect: str | None, wrapper: str
) -> None:
    chat, known, _ = chat_of(template, dialect)
    for style in ("ours", "indented"):
        text = WRAPPERS[wrapper].format(written(chat, WEATHER, style))
        armed = text.index('"get_weather"') + len('"get_weather"')
        closed = len(text) if text.endswith(("]", "`", ">")) else text.rindex("}") + 1
        made = matcher(template, dialect)
        assert feed(made, known, text[: armed - 1], 1)
        assert made.is_accepting()  # still text
        assert feed(made, known, text[armed - 1], 1)
        for at in range(armed, closed):
            assert not made.is_accepting(), text[:at]
            assert not any(feed(made, known, wrong, 1) for wrong in "~\\H")
            assert feed(made, known, text[at], 1)
        assert made.is_accepting()


@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_a_call_whose_arguments_are_wrong_is_not_legal(template: str, dialect: str | None) -> None:
    chat, _, _ = chat_of(template, dialect)
    key = chat.form.loose_key
    for wrong in (
        f'{{"name": "get_weather", "{key}": {{"city": "Rome", "brief": true}}}}',
        f'{{"name": "get_weather", "{key}": {{"city": "Paris"}}}}',
        f'{{"name": "get_weather", "{key}": {{"city": "Paris", "brief": true}}, "more": 1}}',
        f'{{"name": "get_weather", "{key}": {{"city": "Paris", "brief": true}}',
        '{"name": "get_weather"}',
        f'{{"name": "now", "{key}": {{}}}} Done.',
        f'{{"name": "now",\n\n\n"{key}": {{}}}}',
        f'```json\n{{"name": "now", "{key}": {{}}}}\n',
        f'<tools>{{"name": "now", "{key}": {{}}}}\n```',
        f'[{{"name": "now", "{key}": {{}}}}',
    ):
        assert not accepts(template, dialect, wrong), wrong


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_a_call_cut_short_is_kept_as_it_is(template: str, dialect: str | None, wrapper: str) -> None:
    chat, _, _ = chat_of(template, dialect)
    text = WRAPPERS[wrapper].format(written(chat, WEATHER, "indented"))
    armed = text.index('"get_weather"') + len('"get_weather"')
    for length in range(len(text)):
        shown, calls = read(chat, text[:length])
        if length < armed:
            assert ("".join(shown), calls) == (text[:length], [])
        elif "".join(text[length:].split()):
            [call] = calls
            assert ("".join(shown), call.is_complete) == ("", False)
            assert call.arguments == text[text.index("{") : length]


@pytest.mark.parametrize(("parallel", "style"), [(2, "ours"), (3, "indented")])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_several_calls_are_read_as_far_as_they_are_allowed(
    template: str, dialect: str | None, wrapper: str, style: str, parallel: int
) -> None:
    chat, _, _ = chat_of(template, dialect)
    calls = [(WEATHER, NOW)[index % 2] for index in range(parallel)]
    between = ",\n" if "list" in wrapper else "\n"
    text = WRAPPERS[wrapper].format(between.join(written(chat, call, style) for call in calls))
    one_at_most = chat.form.between is None
    assert accepts(template, dialect, text, parallel=parallel) == (not one_at_most)
    assert not accepts(template, dialect, text, parallel=parallel - 1)
    for step in (1, 4, len(text)):
        shown, read_calls = read(chat, text, step)
        assert "".join(shown) == ""
        assert found(read_calls) == calls
    if not one_at_most:  # a line break after the calls asks for no other
        alone = WRAPPERS[wrapper].format(written(chat, NOW, style)) + "\n"
        assert accepts(template, dialect, alone, parallel=parallel)
        assert found(read(chat, alone)[1]) == [NOW]


def test_several_calls_cut_short_lose_the_last_alone() -> None:
    chat, _, _ = chat_of("qwen", None)
    one = written(chat, NOW, "ours")
    for text, cut in ((f"{one}\n{one}", 12), (f"[{one}, {one}]", 12), (f"```\n{one}\n{one}\n```", 20)):
        _, calls = read(chat, text[:-cut])
        assert [call.is_complete for call in calls] == [True, False]
        assert calls[1].arguments.startswith('{"name"')


@pytest.mark.parametrize("tags_are_tokens", [True, False])
def test_the_tag_opens_anywhere_still(tags_are_tokens: bool) -> None:
    known = tokenizer("qwen", tags_are_tokens=tags_are_tokens)
    chat = ChatFormat(known)
    grammar = chat.answer_grammar(TOOLS)
    call = chat.form.call(*NOW)
    for before in ("", "Let me see.\n", '{"name": "Bob"}\n', "```python\n```\n", "<tools> or\n", '{"name": "'):
        made = compiler(known, len(known)).matcher(grammar)
        assert feed(made, known, before + call, 0)
        assert made.is_accepting()
        for step in (1, 7, 1000):
            shown, calls = read(chat, before + call, step)
            assert "".join(shown) == before.removesuffix("\n")
            assert found(calls) == [NOW]
    made = compiler(known, len(known)).matcher(grammar)
    assert not feed(made, known, '{"name": "now" <tool_call>', 0)


THOUGHTS = ["<think>\nOne.\n</think>\n\n", "<think></think>", "\n<think>\nOne.\n</think>\n", "<think>{}</think>\n\n\n"]


@pytest.mark.parametrize("tags_are_tokens", [True, False])
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("prompt_thinks", [False, True])
def test_calls_are_parsed_after_reasoning(thought: str, prompt_thinks: bool, tags_are_tokens: bool) -> None:
    known = tokenizer("qwen3", tags_are_tokens=tags_are_tokens)
    chat = ChatFormat(known)
    prompt = known.encode("<think>\n") if prompt_thinks else [1]
    thinks = chat.thought(prompt)
    grammar = chat.answer_grammar(TOOLS, thought=thinks)
    thought = thought.lstrip("\n").removeprefix("<think>") if prompt_thinks else thought
    call = written(chat, WEATHER, "indented")
    reasoning = "One." if "One." in thought else "{}" if "{}" in thought else ""
    for answer, text, calls in (
        (call, "", [WEATHER]),
        (f"```json\n{call}\n```", "", [WEATHER]),
        ('{"name": "Bob"}', '{"name": "Bob"}', []),
        ("Yes.", "Yes.", []),
    ):
        made = compiler(known, len(known)).matcher(grammar)
        assert feed(made, known, thought + answer, 1)
        assert made.is_accepting()
        if calls:
            made = compiler(known, len(known)).matcher(grammar)
            assert not feed(made, known, thought + answer.replace("Zürich", "Rome"), 1)
        parser = chat.parser(prompt, TOOLS, thought=thinks)
        pieces = [parser.push(letter) for letter in thought + answer]
        rest, read_calls = parser.finish()
        pieces.append(rest)
        assert "".join(piece.text for piece in pieces) == text
        assert "".join(piece.reasoning for piece in pieces) == reasoning
        assert found(read_calls) == calls


def test_a_thought_that_is_special_tokens_is_one_too() -> None:
    known = tokenizer("qwen3", tags_are_tokens=False)
    known.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>"]})
    chat = ChatFormat(known)
    assert {mark for mark, _ in chat.form.special} == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    grammar = chat.answer_grammar(TOOLS, thought=chat.thought([1]))
    call = written(chat, NOW, "ours")
    for before in ("", "<think>One.</think>", "\n<think>\n</think>\n\n"):
        for answer in (call, f"Hm.\n{chat.form.call(*NOW)}", "Hm.", f"<tools>{call}</tools>"):
            made = compiler(known, len(known)).matcher(grammar)
            assert feed(made, known, before + answer, 0), before + answer
            assert made.is_accepting()
        made = compiler(known, len(known)).matcher(grammar)
        assert not feed(made, known, before + call[:-2] + "7", 0)


RESPONSE_TEMPLATE = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("thought", ["", "<think>\nOne.\n</think>\n\n"])
def test_a_response_template_that_the_tokenizer_ships_reads_the_rest(thought: str, step: int) -> None:
    known = tokenizer("qwen3")
    known.response_template = RESPONSE_TEMPLATE
    chat = ChatFormat(known)
    call = written(chat, WEATHER, "indented")
    native = chat.form.call(*WEATHER)
    for answer, text, calls in (
        (call, "", [WEATHER]),
        (f"```json\n{call}\n```", "", [WEATHER]),
        (native, "", [WEATHER]),
        (f"Hm.\n{native}", "Hm.", [WEATHER]),
        ('{"name": "Bob"}', '{"name": "Bob"}', []),
        ("", "", []),
    ):
        parser = chat.parser(chat.render([{"role": "user", "content": "Hi"}], TOOLS), TOOLS, thought=chat.thought([1]))
        said = thought + answer
        pieces = [parser.push(said[at : at + step]) for at in range(0, len(said), step)]
        rest, read_calls = parser.finish()
        pieces.append(rest)
        assert "".join(piece.text for piece in pieces) == text
        assert "".join(piece.reasoning for piece in pieces) == ("One." if thought else "")
        assert found(read_calls) == calls


@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_a_demanded_call_and_a_final_schema_know_the_dialects_own_form_alone(
    template: str, dialect: str | None
) -> None:
    chat, known, grammars = chat_of(template, dialect)
    final = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    for settings in ({"required": True}, {"final": final}):
        for opener in ("```json\n", "<tools>", "[", "\n{"):
            made = grammars.matcher(chat.answer_grammar(tools_of(chat), **settings))
            assert not feed(made, known, opener, 1)


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize(("template", "dialect"), DIALECTS)
def test_what_the_grammar_writes_reads_back_as_calls(template: str, dialect: str | None, parallel: int) -> None:
    chat, known, _ = chat_of(template, dialect)
    rng = random.Random(7)
    offered = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools_of(chat)}
    for round_ in range(6):
        opener = OPENERS[round_ % len(OPENERS)]
        head = f'{rng.choice(opener.leads)}\n{"[" if opener.is_list else ""}{{"name":\n"{rng.choice(list(offered))}"'
        made = matcher(template, dialect, parallel)
        assert feed(made, known, head, 1)
        tokens: list[int] = []
        while not made.is_accepting() or (rng.random() < 0.7 and not made.is_terminated()):
            legal = made.token_mask()
            token = rng.choice([i for i in range(len(known)) if i in legal])
            assert made.accept_token(token)
            tokens.append(token)
            assert len(tokens) < 2000
        text = head + known.decode(tokens)
        for step in (1, 5, len(text)):
            shown, calls = read(chat, text, step)
            assert "".join(shown) == ""
            assert 1 <= len(calls) <= (parallel if chat.form.between is not None else 1)
            for call in calls:
                assert call.is_complete, text
                jsonschema.validate(json.loads(call.arguments), offered[call.name])


def test_of_very_many_tools_the_usual_spellings_are_known() -> None:
    assert openers_for(3) == OPENERS
    assert [len(openers_for(MOST_HEADS // n)) for n in (6, 3, 1)] == [6, 3, 1]
    assert openers_for(MOST_HEADS + 1) == ()
    chat, known, grammars = chat_of("qwen", None)
    for count in (300, 600):
        tools = [{"type": "function", "function": {"name": f"tool_{index}"}} for index in range(count)]
        grammar = chat.answer_grammar(tools)
        for text in ('{"name": "tool_77", "arguments": {}}', '[{"name": "tool_77", "arguments": {}}]'):
            made = grammars.matcher(grammar)
            assert feed(made, known, text, 0)
            parser = chat.parser([1], tools)
            shown = parser.push(text).text + parser.finish()[0].text
            assert (shown == "") == text.startswith("{")


def test_another_form_may_leave_other_spellings_as_text() -> None:
    chat, _, _ = chat_of("qwen", None)
    parser = AnswerParser(chat.form)  # without the names of tools, bare objects are text
    text = written(chat, NOW, "ours")
    assert parser.push(text).text + parser.finish()[0].text == text
