"""Chat templates: rendered as transformers renders them, and messages refused with what is wrong."""

from pathlib import Path

import pytest

from nanollm.text.chat import render_chat
from nanollm.text.tokenizer import encode_prompt, load_tokenizer

QWEN3_FOLDER = Path(__file__).parents[2] / ".cache/qwen3-tokenizer"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def qwen3():
    found = sorted(QWEN3_FOLDER.glob("**/tokenizer.json"))
    if not found:
        pytest.skip("the Qwen3 tokenizer is not in .cache/qwen3-tokenizer: ./launch.sh test puts it there")
    return load_tokenizer(found[0].parent)


def test_qwen3_conversation_is_rendered_letter_by_letter(qwen3):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHi!"},
        {"role": "user", "content": "Bye"},
    ]
    so_far = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert render_chat(qwen3, messages) == so_far + "<|im_start|>assistant\n"
    assert render_chat(qwen3, messages, add_generation_prompt=False) == so_far
    thought = so_far + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render_chat(qwen3, messages, enable_thinking=False) == thought


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("enable_thinking", [True, False, None])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(
    "more",
    [
        [],
        [{"role": "assistant", "content": "<think>a</think>b"}, {"role": "user", "content": "{{ 1 }} {% if %}"}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
        [{"role": "assistant", "content": "b", "reasoning_content": "a"}],
    ],
)
def test_qwen3_is_rendered_as_transformers_renders_it(qwen3, more, tools, enable_thinking):
    messages = [*HELLO, *more]
    kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    expected = qwen3.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs)
    rendered = render_chat(qwen3, messages, tools=tools, **kwargs)
    assert rendered == expected
    ids = qwen3.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs)
    assert encode_prompt(qwen3, rendered, add_special_tokens=False) == ids


def test_smollm2_template_comes_from_the_gguf_file(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    rendered = render_chat(tokenizer, HELLO)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = encode_prompt(tokenizer, rendered, add_special_tokens=False)
    assert [ids.count(1), ids.count(2)] == [3, 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_content_may_be_text_parts_or_none(qwen3):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render_chat(qwen3, [{"role": "user", "content": parts}]) == render_chat(
        qwen3, [{"role": "user", "content": "Hel\nlo"}]
    )
    call = {"role": "assistant", "tool_calls": [CALL]}
    expected = render_chat(qwen3, [*HELLO, {**call, "content": ""}])
    assert render_chat(qwen3, [*HELLO, {**call, "content": None}]) == render_chat(qwen3, [*HELLO, call]) == expected


def test_developer_messages_are_system_messages(qwen3):
    system, developer = ([{"role": role, "content": "Be brief."}, *HELLO] for role in ("system", "developer"))
    assert render_chat(qwen3, developer) == render_chat(qwen3, system)
    assert developer[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "non-empty list of dicts"),
        (None, "non-empty list of dicts"),
        ("Hello", "non-empty list of dicts"),
        ({"role": "user", "content": "Hello"}, "non-empty list of dicts"),
        (["Hello"], r"messages\[0\] must be a dict with role and content, got 'Hello'"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]: role must be one of system, .*, got None"),
        ([{"role": "robot", "content": "x"}], "got 'robot'"),
        ([{"role": ["user"], "content": "x"}], "got \\['user'\\]"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], "content must be a string, None or a list of text parts, got 5"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] must be .*got 'x'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "reads text only"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "reads text only"),
        ([{"role": "assistant", "content": "", "tool_calls": [5]}], "the chat template can't render these messages"),
    ],
)
def test_bad_messages_are_errors_that_say_what_is_wrong(qwen3, messages, says):
    with pytest.raises(ValueError, match=says):
        render_chat(qwen3, messages)


@pytest.mark.parametrize("tools", [3, "x", ["x"], {"type": "function"}])
def test_tools_that_are_no_list_of_schemas_are_refused(qwen3, tools):
    with pytest.raises(ValueError, match="tools must be a list of JSON schemas, got"):
        render_chat(qwen3, HELLO, tools=tools)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_tensors", "continue_final_message", "messages"])
def test_arguments_of_apply_chat_template_itself_are_refused(qwen3, name):
    with pytest.raises(ValueError, match=f"{name} can't be passed to the chat template"):
        render_chat(qwen3, HELLO, **{name: "x"})


def test_model_without_a_chat_template_offers_generate(qwen3, monkeypatch):
    monkeypatch.setattr(qwen3, "chat_template", None)
    with pytest.raises(ValueError, match=r"no chat template: use generate\(\)"):
        render_chat(qwen3, HELLO)
