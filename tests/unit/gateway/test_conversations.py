"""Chats with tools as each family's template renders them: what transformers makes of the same messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton.errors import ConfigError, InvalidArgumentError
from baton.limits import MAX_TEMPLATE_VALUES
from baton.results.completion import ModelInfo
from baton.text.tokenizer import Tokenizer
from gateway.bodies import ChatBody, Message, TokenizeBody, Tool
from gateway.conversations import ChatRenderer, messages_of
from gateway.parsing.call_formats import FORMATS
from gateway.reading import Reader
from gateway.tools.choice import offered
from tests.support.models.tokenizers import CHAT_TEMPLATE
from tests.support.models.tool_templates import MAY_THINK, SPECIAL, TEMPLATES, THINKING, tool_tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21", "tool_call_id": "call00001"},
    {"role": "user", "content": "And now?"},
]


def sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as OpenAI's API has them: arguments are text, and a call has no content."""
    made = []
    for message in messages:
        if "tool_calls" not in message:
            made.append(message)
            continue
        calls = [
            call | {"function": {"name": call["function"]["name"], "arguments": '{"city": "Paris"}'}}
            for call in message["tool_calls"]
        ]
        made.append(message | {"content": None, "tool_calls": calls})
    return made


def rendered(tokenizer: Tokenizer, body: dict[str, Any], tool_format: str = "auto") -> str:
    chat = ChatBody.model_validate(body)
    renderer = ChatRenderer(tokenizer, tool_format)
    return renderer.render(chat.messages, offered(chat.tools, chat.tool_choice), chat.chat_template_kwargs or {})


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("has_tools", [True, False])
def test_a_chat_is_what_transformers_makes_of_it(family: str, has_tools: bool, tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES[family])
    tools: list[Any] | None = [WEATHER] if has_tools else None
    reference = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        ASKED, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert rendered(tokenizer, {"messages": sent(ASKED), "tools": tools}) == reference
    assert ("properties" in reference) is has_tools
    assert ChatRenderer(tokenizer).format == FORMATS[family]


def test_smollm2_is_told_of_tools_in_the_systems_message(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["smollm2"])
    asked = [{"role": "system", "content": "Be brief."}, *ASKED]
    text = rendered(tokenizer, {"messages": sent(asked), "tools": [WEATHER]})
    turns = [turn.partition("\n")[::2] for turn in text.split("<|im_start|>")[1:]]
    system, question, call, answer, _, last = turns
    assert system[1].startswith("You are an expert in composing functions.") and '"weather"' in system[1]
    assert system[1].endswith("]</tool_call>\n\nBe brief.<|im_end|>\n")
    assert question == ("user", "Weather?<|im_end|>\n") and last == ("assistant", "")
    written = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'
    assert call == ("assistant", f"{written}<|im_end|>\n")
    assert answer == ("user", "<tool_response>\n21\n</tool_response><|im_end|>\n")


def test_a_choice_of_none_keeps_the_tools_from_the_model(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["hermes"])
    body = {"messages": sent(ASKED), "tools": [WEATHER], "tool_choice": "none"}
    assert "properties" not in rendered(tokenizer, body)


def test_ids_become_what_mistrals_templates_take(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["mistral"])
    long = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "tool", "content": "1", "tool_call_id": long["id"]}
    text = rendered(tokenizer, {"messages": [{"role": "assistant", "tool_calls": [long]}, answer]})
    assert text.count(text.partition('"id": "')[2][:9]) == 2


@pytest.mark.parametrize(
    ("template", "options", "is_open"),
    [(THINKING, {}, True), (MAY_THINK, {}, False), (MAY_THINK, {"enable_thinking": False}, False)],
)
def test_where_reasoning_begins_follows_from_the_prompt(
    template: str, options: dict[str, Any], is_open: bool, tmp_path: Path
) -> None:
    renderer = ChatRenderer(tool_tokenizer(tmp_path, template))
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    text = renderer.render(chat.messages, (), options)
    rules = renderer.rules(text, ())
    assert rules.has_reasoning and rules.is_reasoning_open is is_open
    assert text.endswith("</think>\n\n") is bool(options)


def test_tokens_that_mark_calls_and_have_no_text_are_known(tmp_path: Path) -> None:
    renderer = ChatRenderer(tool_tokenizer(tmp_path, TEMPLATES["mistral"]))
    tool = Tool.model_validate(WEATHER)
    assert renderer.rules("", (tool,)).markers == {97 + SPECIAL.index("[TOOL_CALLS]"): "[TOOL_CALLS]"}
    assert renderer.rules("", ()).markers == {}


CONTENTS: list[tuple[dict[str, Any], str]] = [
    ({"content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]}, "Be\nbrief."),
    ({"content": [{"type": "text", "text": "Well"}, {"type": "refusal", "refusal": "no"}]}, "Well\nno"),
    ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
    ({"content": None, "refusal": "no"}, "no"),
    ({"content": "yes", "refusal": None}, "yes"),
    ({"content": None}, ""),
]


@pytest.mark.parametrize(("fields", "text"), CONTENTS)
def test_parts_are_lines_and_refusals_are_text(fields: dict[str, Any], text: str) -> None:
    (made,) = messages_of([Message.model_validate({"role": "assistant"} | fields)], None)
    assert made == {"role": "assistant", "content": text}


CONTINUED: dict[str, Any] = {"continue_final_message": True}


def reader_of(folder: Path, template: str) -> Reader:
    tokenizer = tool_tokenizer(folder, template)
    return Reader(tokenizer, ModelInfo("chats", 500, tokenizer.vocab_size, "float32", True, "layout"))


@pytest.mark.parametrize("family", ["hermes", "smollm2"])
@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_start|>assistant\nIt is <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nIt is <|im_end|>\n"),
        (CONTINUED, "<|im_start|>assistant\nIt is "),
        (CONTINUED | {"add_generation_prompt": False}, "<|im_start|>assistant\nIt is "),
    ],
)
def test_a_prompt_ends_as_it_is_asked_to(family: str, fields: dict[str, Any], end: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, TEMPLATES[family])
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    ids = reader.tokenize(TokenizeBody.model_validate({"messages": said} | fields))
    assert reader.tokenizer.decode(ids, with_special=True).endswith(end)
    assert reader.chat(ChatBody.model_validate({"messages": said} | fields)).prompts[0].token_ids == ids


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_chat_is_counted_with_the_tools_that_it_offers(choice: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, TEMPLATES["hermes"])
    tools = [{"type": "function", "function": {"name": "weather"}}]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    ids = reader.tokenize(TokenizeBody.model_validate(asked))
    assert reader.chat(ChatBody.model_validate(asked)).prompts[0].token_ids == ids
    assert ("weather" in reader.tokenizer.decode(ids)) is (choice == "auto")


@pytest.mark.parametrize(
    ("text", "is_open"), [("<think>\nHm", True), ("<think>\nHm</think>\nYes", False), ("Yes", False)]
)
def test_reasoning_that_is_continued_is_open(text: str, is_open: bool, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    asked = reader_of(tmp_path, MAY_THINK).chat(ChatBody.model_validate({"messages": said} | CONTINUED))
    assert asked.output.is_reasoning_open is is_open


@pytest.mark.parametrize(
    ("last", "fields", "message"),
    [
        ({"content": "It is"}, {"add_generation_prompt": True}, "continue_final_message contradicts add_generation"),
        ({"content": " "}, {}, "only a last message of text can be continued"),
        ({"content": "a", "tool_calls": [{"function": {"name": "f"}}]}, {}, "only a last message of text"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    last: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "assistant"} | last]} | CONTINUED | fields)
    with pytest.raises(InvalidArgumentError, match=message):
        reader_of(tmp_path, TEMPLATES["hermes"]).chat(body)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("none", {"tools": [WEATHER]}, "tools: the model's chat template takes none"),
    ("none", {"messages": sent(ASKED)}, r"messages\[1\]: the model's chat template takes no tools"),
    ("hermes", {"tools": [WEATHER, WEATHER]}, "tools holds 'weather' more than once"),
    (
        "hermes",
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice names 'other': use one of the tools",
    ),
    ("hermes", {"messages": [{"role": "tool", "content": "1"}]}, r"messages\[0\].tool_call_id is missing"),
    ("hermes", {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template is not a variable"),
    (
        "hermes",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        r"messages\[0\].tool_calls\[0\].function.arguments is not valid JSON",
    ),
    (
        "hermes",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
        r"messages\[0\].tool_calls\[0\].function.arguments is not an object",
    ),
]


@pytest.mark.parametrize(("tool_format", "body", "message"), WRONG)
def test_what_cannot_be_is_refused_with_its_place(
    tool_format: str, body: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["hermes"])
    with pytest.raises(InvalidArgumentError, match=message):
        rendered(tokenizer, {"messages": [{"role": "user", "content": "Hi"}]} | body, tool_format)


@pytest.mark.parametrize("shape", [lambda number: dict.fromkeys(map(str, range(number))), lambda number: [0] * number])
@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
def test_a_template_gets_so_many_values_and_no_more(field: str, shape: Callable[[int], Any], tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["hermes"])

    def body(number: int) -> dict[str, Any]:
        value = {"x": shape(number)}
        call = CALL | {"function": {"name": "weather", "arguments": json.dumps(value)}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        tool = {"type": "function", "function": {"name": "weather", "parameters": value}}
        filled: dict[str, Any] = {"messages": [message], "tools": [tool], "chat_template_kwargs": value}
        return {"messages": [{"role": "user", "content": "Weather?"}], field: filled[field]}

    assert rendered(tokenizer, body(MAX_TEMPLATE_VALUES - 20))
    with pytest.raises(InvalidArgumentError, match=f"^{field} holds over {MAX_TEMPLATE_VALUES} values"):
        rendered(tokenizer, body(MAX_TEMPLATE_VALUES))


def test_a_template_without_tools_takes_none_unless_a_format_is_named(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer(tmp_path, CHAT_TEMPLATE)
    assert ChatRenderer(tokenizer).format is None
    assert ChatRenderer(tokenizer, "smollm2").format == FORMATS["smollm2"]
    with pytest.raises(ConfigError, match="tool format 'other' is unknown: use one of auto, hermes"):
        ChatRenderer(tokenizer, "other")
