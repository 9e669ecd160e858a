"""response_format, structured_outputs and tools whose arguments must fit, through the official client."""

import json
import threading
import time
from typing import Any

import jsonschema
import pytest

from tests.server.server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED: Any = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "How many days shall I stay in Paris?"}],
    "temperature": 0.7,
    "seed": 1,
    "max_tokens": 60,
}


def test_response_format_whole_and_streamed(server: ServerProcess) -> None:
    client = server.client()
    form: Any = {"type": "json_schema", "json_schema": {"name": "stay", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(**ASKED, n=2, response_format=form)
    for choice in found.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(**ASKED, n=2, response_format=form, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content for choice in found.choices]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 2}, "{"),
        ({"structured_outputs": {"regex": "a{3}b"}}, "aaab"),
        ({"structured_outputs": {"json": {"const": [1, "x"]}, "disable_any_whitespace": True}}, '[1,"x"]'),
        ({"guided_choice": ["blue"]}, "blue"),
        ({"guided_grammar": 'root ::= "x" "y"'}, "xy"),
        ({"guided_json": {"const": 5}}, "5"),
        ({"guided_regex": "ab"}, "ab"),
        ({"response_format": {"type": "text"}, "max_tokens": 1}, ""),
    ],
)
def test_completions_take_every_form(server: ServerProcess, field: dict[str, Any], expected: str) -> None:
    found = server.post("/v1/completions", {"prompt": "The answer is", "temperature": 0, **field}).json()["choices"][0]
    assert found["text"].startswith(expected) and (found["text"] == expected or found["finish_reason"] == "length")


def test_a_structure_that_other_settings_rule_out_is_the_requests_fault(server: ServerProcess) -> None:
    asked = {"prompt": "a", "guided_choice": ["blue"], "allowed_token_ids": [5]}
    found = server.post("/v1/completions", asked)
    assert found.status_code == 400 and "other settings leave no token" in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_of_one_named_function_fit_its_parameters(server: ServerProcess, stream: bool) -> None:
    client = server.client()
    tools: Any = [{"type": "function", "function": {"name": "book", "parameters": SCHEMA, "strict": True}}]
    chosen: Any = {"type": "function", "function": {"name": "book"}}
    asked = ASKED | {"tools": tools, "tool_choice": chosen}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "book" and not choice.message.content
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize(("value", "is_call"), [("1e999", True), ("NaN", False), (r'"\ud800"', False)])
def test_calls_that_other_readers_of_json_stumble_over(server: ServerProcess, value: str, is_call: bool) -> None:
    arguments = f'{{"a":{value}}}'
    text = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    asked = ASKED | {"tools": tools, "extra_body": {"guided_choice": [text]}}
    whole = server.client().chat.completions.create(**asked).choices[0].message
    with server.client().chat.completions.stream(**asked) as events:
        streamed = events.get_final_completion().choices[0].message
    for message in (whole, streamed):
        calls = [call.function.arguments for call in message.tool_calls or []]
        assert (message.content or "", calls) == (("", [arguments]) if is_call else (text, []))


def test_a_grammar_that_takes_long_holds_nobody_up(server: ServerProcess) -> None:
    slow = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    answers: list[Any] = []

    def ask() -> None:
        answers.append(server.post("/v1/completions", {"prompt": "a", "guided_json": slow, "max_tokens": 2}))

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.2)
    found = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "guided_choice": ["a", "b"]})
    assert found.status_code == 200 and not answers
    waiting.join()
    assert answers[0].status_code == 200 and answers[0].json()["choices"][0]["text"].startswith("{")
    assert server.is_idle()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_required_call_is_of_one_of_the_tools_and_fits_it(server: ServerProcess, others: int) -> None:
    """The model was asked something else, and hardly knows tools: left alone it would call none of these."""
    functions: list[dict[str, Any]] = [{"name": "book", "parameters": SCHEMA}]
    by_reference = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer"}}}
    functions += [{"name": "any", "strict": False}, {"name": "refers", "parameters": by_reference}][:others]
    tools: Any = [{"type": "function", "function": function} for function in functions]
    for seed in range(3):
        asked = ASKED | {"tools": tools, "tool_choice": "required", "temperature": 1.0, "seed": seed, "max_tokens": 120}
        (choice,) = server.client().chat.completions.create(**asked).choices
        if choice.finish_reason == "length" and others:
            continue  # any arguments may be long
        (call,) = choice.message.tool_calls or []
        assert call.function.name in [function["name"] for function in functions]
        arguments = json.loads(call.function.arguments)
        if call.function.name == "book":
            jsonschema.validate(arguments, SCHEMA)
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
    asked = ASKED | {"tools": tools, "tool_choice": "required", "structured_outputs": {"choice": ["a"]}}
    refused = server.post("/v1/chat/completions", asked)
    assert refused.status_code == 400 and "tool_choice 'required' says what the answer is" in refused.text
