"""Messages to prompts, answers to calls: nothing is lost, and a call reads back as it was written."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from scripted import chatml_tokenizer, template_text

from agentspec import Grammar, GrammarError, InvalidRequestError
from agentspec.chat import AnswerParser, ChatFormat, Piece
from agentspec.chat.dialects import detect_dialect
from agentspec.grammars import compiler

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chatml_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(tokenizer)


def rendered(chat: ChatFormat, tokenizer: Any, messages: list[dict[str, Any]], tools: Any = ()) -> str:
    text: str = tokenizer.decode(chat.render(messages, tools))
    return text


def test_tools_reach_the_prompt_of_a_template_that_knows_none(chat: ChatFormat, tokenizer: Any) -> None:
    text = rendered(chat, tokenizer, [{"role": "user", "content": "Hi"}], [WEATHER, NOW])
    assert json.dumps(WEATHER) in text
    assert json.dumps(NOW) in text
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_system_message_keeps_its_words_beside_the_tools(chat: ChatFormat, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = rendered(chat, tokenizer, messages, [WEATHER])
    assert text.count("<|im_start|>system") == 1
    assert text.index("Be brief.") < text.index("<tools>")


def test_calls_and_results_of_a_history_are_rendered(chat: ChatFormat, tokenizer: Any) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "late"},
    ]
    text = rendered(chat, tokenizer, messages, [WEATHER])
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in text
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nlate\n</tool_response><|im_end|>" in text


def test_an_empty_conversation_is_an_error(chat: ChatFormat) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        chat.render([])


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatFormat(object())


def test_templates_that_know_tools_are_told_apart() -> None:
    assert detect_dialect("{% if tools %}<tools>...{% endif %}<tool_call>{{ message.tool_calls }}").name == "hermes"
    assert detect_dialect("{% for message in messages %}{{ message.content }}{% endfor %}").name == "plain"


@pytest.fixture
def qwen(tokenizer: Any) -> ChatFormat:
    """The embedded tokenizer under a template in the form of Qwen 2.5's, which knows tools."""
    told = copy.copy(tokenizer)
    told.chat_template = template_text("qwen")
    return ChatFormat(told)


@pytest.mark.parametrize("count", [1, 2])
def test_a_template_that_knows_tools_renders_a_call_as_the_model_wrote_it(
    qwen: ChatFormat, tokenizer: Any, count: int
) -> None:
    arguments = {"city": "Zürich", "days": [1, 2.5], "quoted": 'a "b"\\n'}
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}] * count
    question = [{"role": "user", "content": "Weather?"}]
    results = [{"role": "tool", "content": "sunny"}] * count
    history = [*question, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    written = qwen.form.calls([("get_weather", arguments, None)] * count)
    said = qwen.render(question, [WEATHER]) + tokenizer.encode(written, add_special_tokens=False)
    again = qwen.render(history, [WEATHER])
    assert again[: len(said)] == said
    assert tokenizer.decode(again).count("<tools>") == 2  # the template's own words, once with the tools in between


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("before", ["", "Let me see. ", "a < b <tool "])
def test_an_answer_is_taken_apart_in_pieces_of_any_size(chat: ChatFormat, before: str, step: int) -> None:
    text = before + CALL
    parser = AnswerParser(chat.form)
    shown = "".join(parser.push(text[at : at + step]).text for at in range(0, len(text), step))
    rest, [call] = parser.finish()
    assert shown + rest.text == before
    assert (call.name, json.loads(call.arguments), call.is_complete) == ("get_weather", {"city": "Zürich"}, True)


def test_text_that_only_begins_like_a_call_is_text(chat: ChatFormat) -> None:
    parser = AnswerParser(chat.form)
    assert parser.push("see <tool_c") == Piece("see ")
    assert parser.finish() == (Piece("<tool_c"), [])


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(CALL)))
def test_a_call_cut_short_is_kept_as_it_is(chat: ChatFormat, length: int) -> None:
    parser = AnswerParser(chat.form)
    parser.push(CALL[:length])
    _, [call] = parser.finish()
    assert not call.is_complete
    assert call.arguments == CALL[:length]


def test_parallel_calls_are_taken_apart(chat: ChatFormat) -> None:
    now = chat.form.call("now", {"in": "a\\n</tool_call>"})
    parser = AnswerParser(chat.form)
    parser.push(f"Both. {CALL}\n{now}\n{CALL[:40]}")
    _, calls = parser.finish()
    assert [(call.name, call.is_complete) for call in calls] == [
        ("get_weather", True),
        ("now", True),
        ("get_weather", False),
    ]
    assert json.loads(calls[1].arguments) == {"in": "a\\n</tool_call>"}


def test_an_opener_inside_final_json_is_text(chat: ChatFormat) -> None:
    text = '{"a": "say <tool_call> now"}'
    parser = AnswerParser(chat.form, begins_with_call=True)
    assert "".join(parser.push(letter).text for letter in text) == text
    assert parser.finish() == (Piece(), [])
    parser = AnswerParser(chat.form, begins_with_call=True)
    assert "".join(parser.push(letter).text for letter in CALL) == ""
    assert parser.finish()[1][0].is_complete


def accepts(tokenizer: Any, grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    matcher = compiler(tokenizer, len(tokenizer)).matcher(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.accept_token(token):
            return False
    return matcher.is_accepting()


def test_the_grammar_of_a_demanded_call(chat: ChatFormat, tokenizer: Any) -> None:
    grammar = chat.answer_grammar([WEATHER, NOW], required=True)
    assert accepts(tokenizer, grammar, CALL)
    assert accepts(tokenizer, grammar, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not accepts(tokenizer, grammar, "Hello")
    assert not accepts(tokenizer, grammar, CALL.replace("city", "town"))
    assert not accepts(tokenizer, grammar, CALL.replace("get_weather", "get_whether"))
    assert not accepts(tokenizer, grammar, CALL.replace('"Zürich"', "7"))


def test_free_text_turns_into_a_call_where_the_opener_is_written(chat: ChatFormat, tokenizer: Any) -> None:
    grammar = chat.answer_grammar([WEATHER])
    assert accepts(tokenizer, grammar, "Hello <tool> there")
    assert accepts(tokenizer, grammar, "Let me look.\n" + CALL)
    assert not accepts(tokenizer, grammar, "Let me look. <tool_call> or not")


def test_a_final_answer_beside_tools_obeys_its_schema(chat: ChatFormat, tokenizer: Any) -> None:
    final = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    grammar = chat.answer_grammar([WEATHER], final=final)
    assert accepts(tokenizer, grammar, '{"ok": true}')
    assert accepts(tokenizer, grammar, CALL)
    assert not accepts(tokenizer, grammar, "Hello")
    assert accepts(tokenizer, chat.answer_grammar([], final=final), '{"ok": false}')
    assert chat.answer_grammar([]) is None


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"type": "object", "not": {"type": "string"}}), "not"),
        (Grammar.json_schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (Grammar.lark("start: nonsense"), "nonsense"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_says_why(tokenizer: Any, grammar: Grammar, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler(tokenizer, len(tokenizer)).matcher(grammar)


def test_a_schema_that_is_no_json_is_refused() -> None:
    with pytest.raises(GrammarError, match="JSON"):
        Grammar.json_schema({"enum": [object()]})
    with pytest.raises(GrammarError, match="dict or a bool"):
        Grammar.json_schema("object")  # type: ignore[arg-type]


def test_equal_descriptions_are_equal_grammars() -> None:
    one, other = Grammar.json_schema({"type": "string"}), Grammar.json_schema({"type": "string"})
    assert one == other
    assert hash(one) == hash(other)


def test_json_is_written_with_fixed_separators(tokenizer: Any) -> None:
    grammar = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts(tokenizer, grammar, '{"a": 1}')
    assert not accepts(tokenizer, grammar, '{"a":1}')
    assert not accepts(tokenizer, grammar, '{\n"a": 1}')


def test_advance_then_rewind_is_the_identity(tokenizer: Any) -> None:
    matcher = compiler(tokenizer, len(tokenizer)).matcher(Grammar.json_schema({"type": "array"}))
    tokens = tokenizer.encode('[1, "two", {"three": [4]}]', add_special_tokens=False)
    masks = []
    for token in tokens:
        masks.append(matcher.token_mask())
        assert matcher.accept_token(token)
    assert matcher.is_accepting()
    assert matcher.token_mask().is_empty
    for mask in reversed(masks):
        matcher.rollback(1)
        assert matcher.token_mask() == mask


def test_an_illegal_token_leaves_the_matcher_as_it_was(tokenizer: Any) -> None:
    matcher = compiler(tokenizer, len(tokenizer)).matcher(Grammar.json_schema({"type": "array"}))
    before = matcher.token_mask()
    assert not matcher.accept_token(tokenizer.encode("hello", add_special_tokens=False)[0])
    assert matcher.token_mask() == before
