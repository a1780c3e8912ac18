"""Harmony: the channels of gpt-oss as a grammar, taken apart, and rendered back."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from scripted import tokenizer

from agentspec import GrammarError
from agentspec.chat import ChatFormat, Piece, ToolCall
from agentspec.chat.dialects import detect_dialect
from agentspec.chat.harmony import HarmonyParser
from agentspec.grammars import begin, compiler
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.tool_calls import ReasoningFormat

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Zürich"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
QUESTION = [{"role": "user", "content": "The weather?"}]
FINAL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}

THINK = "<|channel|>analysis<|message|>One, two.\nThree<|end|><|start|>assistant"
SAY = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
YES = "<|channel|>final<|message|>Yes, it is."
ARGUMENTS = '{"city": "Zürich", "days": 3}'
HEADERS = [
    " to=functions.get_weather<|channel|>commentary json",
    " to=functions.get_weather<|channel|>commentary <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather<|constrain|>json",
    "<|channel|>commentary to=functions.get_weather json",
    "<|channel|>commentary to=functions.get_weather",
    "<|channel|>analysis to=functions.get_weather code",
]
CALL = f"{HEADERS[0]}<|message|>{ARGUMENTS}"
LEADS = {
    "": ("", ""),
    THINK: ("", "One, two.\nThree"),
    SAY: ("Let me see.", ""),
    THINK + SAY: ("Let me see.", "One, two.\nThree"),
}
WEATHER = ("get_weather", {"city": "Zürich", "days": 3})


@cache
def speaking() -> tuple[ChatFormat, Any, Any]:
    known = tokenizer("harmony")
    return ChatFormat(known), known, compiler(known, len(known))


def started(**settings: Any) -> Matcher:
    chat, known, grammars = speaking()
    grammar = chat.answer_grammar(settings.pop("tools", TOOLS), thought=chat.thought([1]), **settings)
    assert grammar is not None
    return begin(grammar, grammars, known)


def feed(made: Matcher, text: str) -> bool:
    return all(made.accept_token(token) for token in speaking()[1].encode(text, add_special_tokens=False))


def accepts(text: str, **settings: Any) -> bool:
    made = started(**settings)
    return feed(made, text) and made.is_accepting()


def read(
    text: str, step: int = 1, thought: ReasoningFormat | None = None, **settings: Any
) -> tuple[Piece, list[ToolCall]]:
    chat, _, _ = speaking()
    parser = chat.parser([1], TOOLS, thought=thought or chat.thought([1]), **settings)
    pieces = [parser.push(text[at : at + step]) for at in range(0, len(text), step)]
    rest, calls = parser.finish()
    pieces.append(rest)
    return Piece("".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)), calls


def found(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in calls if call.is_complete]


def test_the_dialect_is_found_by_its_template() -> None:
    chat, known, _ = speaking()
    assert chat.dialect.name == "harmony"
    assert ChatFormat(known, "harmony").dialect.name == "harmony"
    assert detect_dialect("<|channel|> <|message|> <|call|>").name == "plain"  # which renders no calls
    assert chat.shows_special_tokens
    assert set(known.convert_ids_to_tokens(chat.end_tokens)) == {"<|return|>", "<|call|>"}
    assert ChatFormat(tokenizer("qwen")).end_tokens == ()


def test_tools_are_rendered_as_typescript() -> None:
    chat, known, _ = speaking()
    text = known.decode(chat.render([{"role": "system", "content": "Be brief."}, *QUESTION], TOOLS))
    assert "# Instructions\n\nBe brief." in text
    assert 'type get_weather = (_: {\ncity: "Paris" | "Zürich",\ndays?: number,\n}) => any;' in text
    assert text.endswith("<|start|>user<|message|>The weather?<|end|><|start|>assistant")


@pytest.mark.parametrize("lead", LEADS, ids=["", "thought", "preamble", "both"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_call_is_legal_and_read_in_every_header_that_models_write(header: str, lead: str) -> None:
    text = f"{lead}{header}<|message|>{ARGUMENTS}"
    for required in (False, True):
        assert accepts(text, required=required)
        for wrong in ('{"city": "Rome"}', "{}", "Paris", '{"city": "Paris"}}'):
            assert not accepts(f"{lead}{header}<|message|>{wrong}", required=required)
    for step in (1, 7, len(text)):
        piece, calls = read(text, step)
        assert (piece.text, piece.reasoning) == LEADS[lead]
        assert found(calls) == [WEATHER]


@pytest.mark.parametrize("lead", LEADS, ids=["", "thought", "preamble", "both"])
def test_a_final_answer_is_legal_and_shown(lead: str) -> None:
    assert accepts(lead + YES)
    assert not accepts(lead + YES, required=True)
    for step in (1, 7, 1000):
        piece, calls = read(lead + YES, step)
        assert piece == Piece("\n".join(filter(None, [LEADS[lead][0], "Yes, it is."])), LEADS[lead][1])
        assert calls == []


@pytest.mark.parametrize(
    "text",
    [
        "Yes, it is.",
        "<|channel|>final<|message|>Yes.<|end|>",
        "<|channel|>comment<|message|>Yes.",
        "<|channel|>commentary to=functions.nothing <|constrain|>json<|message|>{}",
        " to=browser.search<|channel|>commentary<|message|>{}",
        THINK,
        SAY,
        "<|channel|>analysis<|message|>One.",
        "<|channel|>analysis<|message|>One.<|end|><|start|>user",
    ],
)
def test_what_is_no_answer_in_channels_is_not_legal(text: str) -> None:
    assert not accepts(text)


def test_several_thoughts_and_preambles_may_follow_each_other() -> None:
    text = THINK + SAY + THINK + SAY
    assert accepts(text + YES)
    assert accepts(text + CALL, required=True)
    for step in (1, 9, 1000):
        piece, calls = read(text + CALL, step)
        assert piece == Piece("Let me see.\nLet me see.", "One, two.\nThree\nOne, two.\nThree")
        assert found(calls) == [WEATHER]


def test_a_final_answer_obeys_its_schema() -> None:
    for header in ("<|channel|>final", "<|channel|>final <|constrain|>json"):
        text = f'{THINK}{header}<|message|>{{"ok": true}}'
        assert accepts(text, final=FINAL)
        assert accepts(text, final=FINAL, tools=[])
        assert read(text, has_final=True)[0].text == '{"ok": true}'
        assert not accepts(f"{header}<|message|>Yes.", final=FINAL)
    assert accepts(CALL, final=FINAL)
    assert not accepts(CALL, final=FINAL, tools=[])
    opener = "<|channel|>final<|message|>"
    assert (
        read(opener + '{"a": "<|end|> to=functions.now"}', has_final=True)[0].text
        == '{"a": "<|end|> to=functions.now"}'
    )


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_ends_the_one_thought_that_there_may_be(budget: int) -> None:
    known = speaking()[1]
    made = started(thinking_budget=budget)
    assert feed(made, "<|channel|>analysis<|message|>")
    words = known.encode("One, two, three, four", add_special_tokens=False)
    assert all(made.accept_token(token) for token in words[:budget])
    assert made.token_mask().single_token == known.convert_tokens_to_ids("<|end|>")
    assert not made.accept_token(words[budget])
    assert feed(made, "<|end|><|start|>assistant")
    assert not feed(made, "<|channel|>analysis<|message|>")
    made = started(thinking_budget=budget)
    assert feed(made, YES)
    assert made.is_accepting()
    chat, _, grammars = speaking()
    opened = chat.thought(known.encode("<|start|>assistant<|channel|>analysis<|message|>"))
    made = begin(chat.answer_grammar(TOOLS, thought=opened, thinking_budget=budget), grammars, known)  # type: ignore[arg-type]
    assert all(made.accept_token(token) for token in words[:budget])
    assert feed(made, "<|end|><|start|>assistant")
    assert not feed(made, "<|channel|>analysis<|message|>")


def test_a_thought_that_the_prompt_has_opened_goes_on() -> None:
    chat, known, grammars = speaking()
    thought = chat.thought(known.encode("<|start|>assistant<|channel|>analysis<|message|>"))
    assert thought is not None
    assert thought.opener == ""
    text = "One.<|end|><|start|>assistant" + CALL
    made = grammars.matcher(chat.answer_grammar(TOOLS, thought=thought))
    assert feed(made, text)
    assert made.is_accepting()
    piece, calls = read(text, 3, thought)
    assert (piece.reasoning, found(calls)) == ("One.", [WEATHER])


def test_marks_that_are_spelled_out_end_a_thought_and_are_text_in_an_answer() -> None:
    _, known, _ = speaking()
    spelled = known.encode("<|", add_special_tokens=False) + known.encode("end|>", add_special_tokens=False)
    made = started()
    assert feed(made, "<|channel|>analysis<|message|>One")
    assert all(map(made.accept_token, spelled))
    assert not feed(made, " and so on")
    made = started()
    assert feed(made, "<|channel|>final<|message|>One")
    assert all(map(made.accept_token, [*spelled, *spelled]))
    assert made.is_accepting()
    assert read("<|channel|>final<|message|>One<|end|>")[0].text == "One<|end|>"


@pytest.mark.parametrize("lead", LEADS, ids=["", "thought", "preamble", "both"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_call_cut_short_is_kept_as_it_is(header: str, lead: str) -> None:
    text = f"{lead}{header}<|message|>{ARGUMENTS}"
    tokens = speaking()[1].encode(text, add_special_tokens=False)
    for count in range(len(tokens)):
        cut = speaking()[1].decode(tokens[:count])
        if "\ufffd" in cut or " to".startswith(cut):  # which may be any text
            continue
        piece, calls = read(cut)
        assert LEADS[lead][0].startswith(piece.text)
        assert LEADS[lead][1].startswith(piece.reasoning)
        said_so = " to=" in cut[len(lead) :]
        assert [call.is_complete for call in calls] == [False] * said_so, cut
        for call in calls:
            assert "get_weather".startswith(call.name)
            assert call.arguments
            assert call.arguments.removeprefix("assistant") == cut[len(lead) :]


@pytest.mark.parametrize("text", ["Hello.", " to the point", "{}", "<b>", "<|", " "])
def test_an_answer_without_channels_is_text(text: str) -> None:
    for step in (1, 1000):
        assert read(text, step) == (Piece(text), [])


def test_what_the_grammar_writes_reads_back() -> None:
    _, known, _ = speaking()
    rng = random.Random(3)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    for _ in range(25):
        made = started(required=True)
        tokens: list[int] = []
        while not made.is_accepting():
            legal = made.token_mask()
            choices = [i for i in range(len(known)) if i in legal]
            special = [i for i in choices if i in known.all_special_ids]
            token = rng.choice(special if special and rng.random() < 0.3 else choices)
            assert made.accept_token(token)
            tokens.append(token)
            assert len(tokens) < 3000
        text = known.decode(tokens)
        if "\ufffd" in text:
            continue
        one, [call] = read(text)
        assert call.is_complete, text
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        assert read(text, 11) == read(text, 1000) == (one, [call])


@pytest.mark.parametrize("reasoning", ["", "One, two.\nThree"])
def test_a_call_is_rendered_back_as_the_template_writes_it(reasoning: str) -> None:
    chat, known, _ = speaking()
    text = (THINK if reasoning else "") + chat.form.call(*WEATHER)
    assert accepts(text)
    prompt = chat.render(QUESTION, TOOLS)
    piece, [call] = read(text)
    told = {"id": "1", "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
    said = {"role": "assistant", "content": piece.text, "reasoning_content": piece.reasoning, "tool_calls": [told]}
    history = [*QUESTION, said, {"role": "tool", "content": "sunny", "tool_call_id": "1"}]
    again = chat.render(history, TOOLS)
    spoken = prompt + known.encode(text, add_special_tokens=False)
    assert again[: len(spoken)] == spoken
    assert known.decode(again[len(spoken) :]) == (
        '<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant"
    )
    history += [{"role": "assistant", "content": "Sunny."}, *QUESTION]
    later = known.decode(chat.render(history, TOOLS))
    assert "<|channel|>analysis" not in later  # thoughts before a final answer are forgotten
    assert "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>" in later


def test_a_preamble_beside_a_call_is_kept_where_the_template_has_one_text() -> None:
    chat, known, _ = speaking()
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]}
    text = known.decode(chat.render([*QUESTION, said, {"role": "tool", "content": "noon", "tool_call_id": "1"}], TOOLS))
    assert "<|channel|>analysis<|message|>Hm.\n\nLet me see.<|end|>" in text


def test_several_calls_of_a_foreign_message_become_one_message_each() -> None:
    chat, known, _ = speaking()
    calls = [
        {"id": str(index), "type": "function", "function": {"name": name, "arguments": {}}}
        for index, name in enumerate(("now", "get_weather", "now"))
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": f"r{index}", "tool_call_id": str(index)} for index in (1, 0, 2)]
    for answers in (results, [{k: v for k, v in r.items() if k != "tool_call_id"} for r in sorted(results, key=str)]):
        text = known.decode(chat.render([*QUESTION, said, *answers], TOOLS))
        parts = text.split("<|start|>")[-7:-1]
        assert [part.split("<|")[0] for part in parts] == [
            *("assistant to=functions.now", "functions.now to=assistant"),
            *("assistant to=functions.get_weather", "functions.get_weather to=assistant"),
            *("assistant to=functions.now", "functions.now to=assistant"),
        ]
        assert [part.split('"')[1] for part in parts[1::2]] == ["r0", "r1", "r2"]


def test_names_that_harmony_cannot_write_are_refused() -> None:
    with pytest.raises(GrammarError, match="letters, digits"):
        started(tools=[{"type": "function", "function": {"name": "a b"}}])


def test_a_final_answer_may_name_its_type_beside_tools() -> None:
    assert accepts('<|channel|>final <|constrain|>json<|message|>{"ok": true}')


def test_thoughts_do_not_go_on_for_ever() -> None:
    empty = "<|channel|>analysis<|message|><|end|><|start|>assistant"
    assert accepts(empty * 3 + YES)
    assert not accepts(empty * 100 + YES)


def test_a_call_of_a_tool_that_was_not_offered_is_text() -> None:
    parser = HarmonyParser(None)
    parser.push(CALL)
    piece, calls = parser.finish()
    assert calls == []
    assert piece.text == ARGUMENTS
