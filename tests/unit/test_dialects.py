"""Families of models: what one is made to write reads back as calls, and its template renders it to the same ids."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted import ScriptedModel, tokenizer

from agentspec import (
    Cascade,
    Completion,
    Grammar,
    GrammarError,
    InvalidRequestError,
    LocalEngine,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.chat import DIALECTS, AnswerParser, ChatFormat, TemplateParser, ToolCall
from agentspec.grammars.tool_calls import ReasoningFormat


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [tool("get_weather", city={"type": "string"}, days={"type": "integer"}), tool("now")]
WEATHER = ("get_weather", {"city": 'Zürich "old"\\town', "days": 3}, "a1B2c3D4e")
NOW = ("now", {}, "zzzzzzzz9")
QUESTION = [{"role": "user", "content": "The weather?"}]
END_TOKENS = {"llama3": "<|eot_id|>", "mistral": "<|end|>", "mistral_args": "<|end|>"}


@dataclass(frozen=True)
class Answer:
    """What an answer is made of."""

    calls: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""

    def written(self, chat: ChatFormat, thought: ReasoningFormat | None) -> str:
        between = chat.form.after_text if self.text else ""
        calls = between + chat.form.calls(self.calls) if self.calls else ""
        # As such models write it, and their templates render it back: a line of its own for the mark.
        thinks = (
            f"{thought.opener}\n{self.reasoning}{thought.closing}{thought.gap}" if thought and self.reasoning else ""
        )
        return thinks + self.text + calls

    def message(self, calls: list[ToolCall]) -> dict[str, Any]:
        """As a client keeps it."""
        told = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in calls
        ]
        message = {"role": "assistant", "content": self.text, **({"tool_calls": told} if told else {})}
        return {**message, "reasoning_content": self.reasoning} if self.reasoning else message


def ask(chat: ChatFormat, known: Any, wanted: str, **answers: Any) -> tuple[list[int], Completion]:
    """The prompt, and the answer of a model that wants to say ``wanted``; it always tries to begin with blanks."""
    prompt = chat.render(QUESTION, TOOLS)
    thought = chat.thought(prompt)
    script = known.encode(wanted, add_special_tokens=False)
    end = known.convert_tokens_to_ids(END_TOKENS.get(chat.template_name, "<|im_end|>"))  # type: ignore[attr-defined]
    model = ScriptedModel(len(known), len(prompt), [*script, end])
    engine = LocalEngine(SpeculativeDecoder(model, Cascade([PromptLookupDrafter()]), 3), known, end_tokens=[end])
    params = SamplingParams(temperature=0, max_tokens=150, skip_special_tokens=not chat.shows_special_tokens)
    grammar = chat.answer_grammar(TOOLS, thought=thought, **answers)
    [[completion]] = engine.generate([Request(prompt, params, grammar)])
    engine.close()
    return prompt, completion


def chat_of(template: str, **settings: Any) -> tuple[ChatFormat, Any]:
    known = tokenizer(template, **settings)
    chat = ChatFormat(known)
    chat.template_name = template  # type: ignore[attr-defined]
    return chat, known


TEMPLATES = {
    "qwen": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3",
    "mistral": "mistral",
    "mistral_args": "mistral-args",
}
ONE, TWO = Answer([WEATHER]), Answer([WEATHER, NOW])
SPOKEN = Answer([WEATHER], text="Let me see.")
THOUGHT = Answer([WEATHER], reasoning="One, two.\nThree")
ALL = Answer([WEATHER, NOW], text="Let me see.", reasoning="One, two.")
TURNS = [
    *[(template, ONE, True) for template in TEMPLATES],
    *[(template, ONE, False) for template in TEMPLATES],
    *[(template, TWO, required) for template in TEMPLATES if template != "llama3" for required in (True, False)],
    ("qwen", SPOKEN, False),
    ("qwen3", SPOKEN, False),
    ("mistral_args", SPOKEN, False),
    ("qwen3", THOUGHT, True),
    ("qwen3", THOUGHT, False),
    ("qwen3", ALL, False),
    *[(template, Answer(text="Yes, it is."), False) for template in TEMPLATES],
    ("qwen3", Answer(text="Yes.", reasoning="One, two."), False),
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_dialect_is_told_by_its_template(template: str) -> None:
    assert ChatFormat(tokenizer(template)).dialect.name == TEMPLATES[template]
    assert ChatFormat(tokenizer(template), TEMPLATES[template]).dialect.name == TEMPLATES[template]
    assert ChatFormat(tokenizer(template), "plain").dialect.name == "plain"


def test_dialects_that_cannot_be_spoken_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"hermes.*got 'klingon'"):
        ChatFormat(tokenizer("qwen"), "klingon")
    plain = tokenizer("qwen")
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert ChatFormat(plain).dialect.name == "plain"
    with pytest.raises(InvalidRequestError, match="renders no tool calls"):
        ChatFormat(plain, "mistral")


@pytest.mark.parametrize("tags_are_tokens", [True, False])
@pytest.mark.parametrize(("template", "answer", "required"), TURNS)
def test_an_answer_reads_back_and_its_turn_renders_to_the_same_ids(
    template: str, answer: Answer, required: bool, tags_are_tokens: bool
) -> None:
    chat, known = chat_of(template, tags_are_tokens=tags_are_tokens)
    prompt = chat.render(QUESTION, TOOLS)
    thought = chat.thought(prompt)
    wanted = answer.written(chat, thought)
    _, completion = ask(chat, known, wanted, required=required, parallel=4)
    assert completion.text == wanted
    parser = chat.parser(prompt, TOOLS, thought=thought)
    pieces = [parser.push(letter) for letter in completion.text]
    rest, calls = parser.finish()
    assert "".join(piece.text for piece in pieces) + rest.text == answer.text
    assert "".join(piece.reasoning for piece in pieces) + rest.reasoning == answer.reasoning
    assert [(call.name, json.loads(call.arguments), call.is_complete) for call in calls] == [
        (name, arguments, True) for name, arguments, _ in answer.calls
    ]
    if template == "mistral":
        assert [call.id for call in calls] == [call_id for _, _, call_id in answer.calls]
    results = [{"role": "tool", "content": "sunny", "tool_call_id": call.id} for call in calls]
    history = [*QUESTION, answer.message(calls), *results]
    if not results:
        history.append({"role": "user", "content": "Sure?"})
    said = prompt + [
        token for token in completion.tokens if known.decode([token]) != END_TOKENS.get(template, "<|im_end|>")
    ]
    again = chat.render(history, TOOLS)
    if template == "mistral":  # its template shows the tools beside the last question alone
        at = said.index(known.convert_tokens_to_ids("[TOOL_CALLS]")) if calls else len(prompt)
        assert known.decode(said[at:]).strip() in known.decode(again)
    elif results or not answer.reasoning:  # a template forgets its thoughts at the next question
        assert again[: len(said)] == said


@pytest.mark.parametrize("template", ["qwen", "llama3", "mistral", "mistral_args"])
@pytest.mark.parametrize("required", [True, False])
def test_a_call_that_the_model_gets_wrong_comes_out_valid(template: str, required: bool) -> None:
    chat, known = chat_of(template)
    wrong = chat.form.call("get_weather", {"city": 7, "days": "three"}, "a1B2c3D4e")
    prompt, completion = ask(chat, known, wrong, required=required)
    parser = chat.parser(prompt, TOOLS)
    parser.push(completion.text)
    _, [call] = parser.finish()
    arguments = json.loads(call.arguments) if call.is_complete else {}
    assert completion.finish_reason == ("stop" if call.is_complete else "length")
    assert isinstance(arguments.get("days", 0), int)
    assert isinstance(arguments.get("city", ""), str)


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_cut_short_are_kept_as_they_are(template: str) -> None:
    chat, _ = chat_of(template)
    written = chat.form.calls([WEATHER, NOW] if chat.form.between else [WEATHER])
    for length in range(len(chat.form.opener), len(written)):
        parser = AnswerParser(chat.form)
        assert parser.push(written[:length]).text == ""
        _, calls = parser.finish()
        for call in calls:
            assert not call.is_complete or json.loads(call.arguments) in (WEATHER[1], NOW[1])
        assert len(calls) <= 2
        assert calls
    assert all(call.is_complete for call in calls[:-1])


def test_one_call_at_most_where_the_template_has_one() -> None:
    chat, known = chat_of("llama3")
    one = chat.form.call(*NOW)
    _, completion = ask(chat, known, one + one, required=True, parallel=8)
    assert completion.text == one


def test_what_begins_like_a_llama_call_is_one_and_other_text_is_not() -> None:
    chat, known = chat_of("llama3")
    for text in ('{"nam', '{"name', 'So: {"name": "Bob"}', "{}"):
        _, completion = ask(chat, known, text)
        assert completion.text == text
        parser = chat.parser([1], TOOLS)
        assert parser.push(text).text + parser.finish()[0].text == text


def test_final_json_that_begins_like_a_llama_call_is_no_call() -> None:
    chat, known = chat_of("llama3")
    final = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    wanted = '{"name": "Bob", "age": 3}'
    prompt, completion = ask(chat, known, wanted, final=final)
    assert completion.text == wanted
    parser = chat.parser(prompt, TOOLS, has_final=True)
    assert "".join(parser.push(letter).text for letter in wanted) + parser.finish()[0].text == wanted
    _, completion = ask(chat, known, chat.form.call(*NOW), final=final)
    parser = chat.parser(prompt, TOOLS, has_final=True)
    parser.push(completion.text)
    assert [call.name for call in parser.finish()[1]] == ["now"]


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "new\nline", ""])
def test_names_that_a_dialect_cannot_write_are_refused(name: str) -> None:
    for dialect in DIALECTS.values():
        with pytest.raises(GrammarError, match=r"tool name|letters, digits"):
            Grammar.tools([tool(name)], form=dialect.form)
    with pytest.raises(GrammarError, match="letters, digits"):
        Grammar.tools([tool("a b")], form=DIALECTS["mistral-args"].form)


def test_ids_of_another_form_are_made_to_fit() -> None:
    chat, known = chat_of("mistral")
    call = {"id": "call_7f3", "type": "function", "function": {"name": "now", "arguments": {}}}
    history = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history.append({"role": "tool", "content": "noon", "tool_call_id": "call_7f3"})
    text = known.decode(chat.render(history, TOOLS))
    one, other = text.split('"id": "')[1][:9], text.split('"call_id": "')[1][:9]
    assert one == other
    assert one.isalnum()


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


@pytest.mark.parametrize("answer", [ONE, TWO, SPOKEN, THOUGHT, ALL, Answer(text="Yes.", reasoning="One, two.")])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_response_template_that_the_tokenizer_ships_reads_alike(answer: Answer, step: int) -> None:
    chat, known = chat_of("qwen3")
    prompt = chat.render(QUESTION, TOOLS)
    thought = chat.thought(prompt)
    text = answer.written(chat, thought)
    ours = chat.parser(prompt, TOOLS, thought=thought)
    known.response_template = RESPONSE_TEMPLATE
    theirs = chat.parser(prompt, TOOLS, thought=thought)
    assert isinstance(theirs, TemplateParser)
    assert chat.shows_special_tokens
    found = []
    for parser in (ours, theirs):
        pieces = [parser.push(text[at : at + step]) for at in range(0, len(text), step)]
        rest, calls = parser.finish()
        pieces.append(rest)
        found.append(("".join(p.text for p in pieces), "".join(p.reasoning for p in pieces), calls))
    assert found[0] == found[1] == (answer.text, answer.reasoning, found[0][2])
    assert len(found[0][2]) == len(answer.calls)


def test_a_call_cut_short_is_kept_by_a_response_template_too() -> None:
    chat, known = chat_of("qwen3")
    known.response_template = RESPONSE_TEMPLATE
    text = SPOKEN.written(chat, None)
    parser = chat.parser(chat.render(QUESTION, TOOLS), TOOLS)
    shown = parser.push(text[:-20]).text
    rest, [call] = parser.finish()
    assert shown + rest.text == "Let me see."
    assert not call.is_complete
    assert '"get_weather"' in call.arguments


@pytest.mark.parametrize(
    ("prompt_end", "thinks"), [("", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)]
)
def test_whether_an_answer_begins_with_a_thought_is_told_by_the_prompt(prompt_end: str, thinks: bool) -> None:
    chat, known = chat_of("qwen3")
    thought = chat.thought(chat.render(QUESTION) + known.encode(prompt_end, add_special_tokens=False))
    assert (thought is not None) == thinks
    assert thought is None or bool(thought.opener) == (prompt_end == "")
    assert chat.thought(chat.render(QUESTION, enable_thinking=False)) is None
    assert ChatFormat(tokenizer("qwen")).thought([1]) is None


def test_messages_that_a_strict_template_refuses_are_arranged_for_it() -> None:
    chat, known = chat_of("mistral")  # which takes no system message
    text = known.decode(chat.render([{"role": "system", "content": "Be brief."}, *QUESTION]))
    assert "[INST] Be brief.\n\nThe weather?[/INST]" in text
    known.chat_template = """{%- for m in messages %}{%- if loop.index0 and messages[loop.index0 - 1].role == m.role %}
{{- raise_exception("Roles must alternate.") }}{%- endif %}{{- m.role + ": " + m.content + "\n" }}{%- endfor %}"""
    strict = ChatFormat(known)
    two = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    text = known.decode(strict.render([two[0], *two, {"role": "user", "content": "Two?"}]))
    assert text == "system: Be brief.\n\nBe brief.\nuser: One?\n\nTwo?\n"
    with pytest.raises(InvalidRequestError, match="must alternate"):
        strict.render([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}])
