"""The official client against the real server: what it returns, streamed and whole. Oracle: the offline LLM."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nanollm import LLM, SamplingParams
from tests.server.server_process import ServerProcess

PROMPT = "The capital of France is"
MESSAGES: list[Any] = [{"role": "user", "content": "Name three colors."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def asked_and_called(city: str) -> list[Any]:
    call = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]


WEATHER = [
    *asked_and_called("Rome"),
    *asked_and_called("Oslo"),
    {"role": "user", "content": "What is the weather in Paris?"},
]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), num_kv_blocks=128) as llm:
        llm.tokenizer.chat_template = (Path(__file__).parent / "tools.jinja").read_text()  # type: ignore[union-attr]
        yield llm


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


def stream_text(chunks: Any) -> dict[int, str]:
    """The text of each choice, put together."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts


def bytes_of(token: str) -> bytes:
    """Of a token's name in a completion's log probabilities."""
    if not token.startswith("bytes:"):
        return token.encode()
    return token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")


def test_models(client: openai.OpenAI) -> None:
    assert [(model.id, model.max_model_len) for model in client.models.list()] == [("smollm2", 8192)]  # type: ignore[attr-defined]
    assert client.models.retrieve("smollm2") == client.models.list().data[0]


def test_completion_is_the_offline_one(client: openai.OpenAI, llm: LLM) -> None:
    asked: Any = {"model": "smollm2", "prompt": [PROMPT, "Water"], "max_tokens": 6, "temperature": 0}
    (one, two) = llm.generate([PROMPT, "Water"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    found = client.completions.create(**asked)
    assert [choice.text for choice in found.choices] == [one.outputs[0].text, two.outputs[0].text]
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    assert found.usage is not None
    num_prompt_tokens = len(one.prompt_token_ids) + len(two.prompt_token_ids)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (num_prompt_tokens, 12)
    assert stream_text(client.completions.create(**asked, stream=True)) == {
        0: one.outputs[0].text,
        1: two.outputs[0].text,
    }


def test_token_ids_as_prompt_and_seeded_choices(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    params = SamplingParams(n=3, seed=7, max_tokens=5)
    (offline,) = llm.generate([ids], params, use_tqdm=False)
    asked: Any = {"model": "smollm2", "prompt": ids, "max_tokens": 5, "seed": 7, "n": 3}
    expected = {completion.index: completion.text for completion in offline.outputs}
    found = client.completions.create(**asked)
    assert {choice.index: choice.text for choice in found.choices} == expected and len(set(expected.values())) > 1
    assert stream_text(client.completions.create(**asked, stream=True)) == expected


def test_stop_string_is_cut_off_in_streams_too(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop": ["\n\nThe"]}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (" Paris.", "stop")
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert stream_text(chunks) == {0: " Paris."}
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 5 and all(chunk.usage is None for chunk in chunks[:-1])


def test_echo_with_log_probabilities_of_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    import torch

    logits = llm.compute_logits(PROMPT)[0].double()
    ids = llm.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    expected = torch.log_softmax(logits, -1)
    asked: Any = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2}
    for max_tokens in (1, 0):
        answer = client.completions.create(**asked, max_tokens=max_tokens)
        *_, last = client.completions.create(
            **asked, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
        )
        assert answer.usage is not None and last.usage is not None
        assert answer.usage.completion_tokens == last.usage.completion_tokens == max_tokens
        (choice,) = answer.choices
        found = choice.logprobs
        assert found is not None and found.tokens is not None and found.token_logprobs is not None
        assert "".join(found.tokens) == choice.text == (PROMPT + " Paris" if max_tokens else PROMPT)
        assert found.token_logprobs[0] is None
        for position in range(1, 5):
            assert found.token_logprobs[position] == pytest.approx(
                float(expected[position - 1, ids[position]]), abs=1e-3
            )
        assert found.text_offset == [
            choice.text.index(token, at) for token, at in zip(found.tokens, found.text_offset, strict=True)
        ]


def test_every_choice_of_a_stream_echoes_the_prompt_once(client: openai.OpenAI) -> None:
    prompt = "Echoed once, though longer than a block: " + "one, two, three, four, " * 3  # that nobody has cached
    asked: Any = {"model": "smollm2", "prompt": prompt, "seed": 0, "echo": True, "n": 2, "max_tokens": 4}
    streamed = stream_text(client.completions.create(**asked, stream=True))
    assert streamed == {choice.index: choice.text for choice in client.completions.create(**asked).choices}


def test_token_ids_come_with_the_text_and_in_streams_one_by_one(client: openai.OpenAI, llm: LLM) -> None:
    extra = {"return_token_ids": True}
    asked: Any = {"model": "smollm2", "temperature": 0, "max_tokens": 6, "extra_body": extra}
    prompt: list[int] = llm.tokenizer.encode("Once upon a time")  # type: ignore[union-attr]
    params = SamplingParams(temperature=0, max_tokens=6)
    (offline,) = llm.generate([prompt], params, use_tqdm=False)
    whole: Any = client.completions.create(prompt=prompt, n=2, **asked)
    for choice in whole.choices:
        assert (choice.prompt_token_ids, choice.token_ids) == (prompt, offline.outputs[0].token_ids)
    chunks: Any = [chunk.choices[0] for chunk in client.completions.create(prompt=prompt, stream=True, **asked)]
    assert chunks[0].prompt_token_ids == prompt and not any("prompt_token_ids" in c.model_extra for c in chunks[1:])
    assert [c.token_ids for c in chunks] == [[token_id] for token_id in offline.outputs[0].token_ids]

    (offline,) = llm.chat(MESSAGES, params, use_tqdm=False)
    whole = client.chat.completions.create(messages=MESSAGES, **asked)
    assert whole.prompt_token_ids == offline.prompt_token_ids
    assert whole.choices[0].token_ids == offline.outputs[0].token_ids
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **asked))
    assert chunks[0].prompt_token_ids == offline.prompt_token_ids
    ids = [token_id for chunk in chunks[1:] for token_id in chunk.choices[0].token_ids]
    assert ids == offline.outputs[0].token_ids


def test_chat_streamed_and_whole_are_the_offline_one(client: openai.OpenAI, llm: LLM) -> None:
    (offline,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}
    found = client.chat.completions.create(**asked)
    assert found.choices[0].message.content == offline.outputs[0].text != ""
    assert found.choices[0].message.role == "assistant" and found.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert stream_text(chunks) == {0: offline.outputs[0].text}
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens == 8


def test_chat_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
    asked |= {"logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert token.bytes == list(token.token.encode())
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and sum(map(math.exp, values)) < 1 + 1e-6
        assert token.top_logprobs[0].token == token.token  # greedy
    streamed = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        for part in chunk.choices
        if part.logprobs
        for token in part.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]


def test_tokens_that_are_a_part_of_a_character(client: openai.OpenAI) -> None:
    text = "😀é🛸"
    extra = {"guided_choice": [text]}
    chat = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body=extra
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) > 4
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == text
    assert logprobs.content[-1].token == "<|im_end|>" and logprobs.content[-1].bytes is None

    for echo, shown in ((False, text), (True, text + text)):
        asked: Any = {"model": "smollm2", "prompt": text, "temperature": 0, "logprobs": 5, "echo": echo}
        (choice,) = client.completions.create(**asked, extra_body=extra).choices
        found: Any = choice.logprobs
        *spelled, end = [bytes_of(token) for token in found.tokens]
        assert found.tokens[0] == "bytes:\\xf0\\x9f" and end == b"<|im_end|>"
        assert b"".join(spelled).decode() == choice.text == shown
        expected = [len(b"".join(spelled[:i]).decode(errors="ignore")) for i in range(len(spelled) + 1)]
        assert found.text_offset == expected
        for token, top in list(zip(found.tokens, found.top_logprobs, strict=True))[echo:]:
            assert token in top and len(top) in (5, 6)
        chunks: Any = client.completions.create(**asked, extra_body=extra, stream=True)
        assert [at for chunk in chunks for at in chunk.choices[0].logprobs.text_offset] == expected


def test_several_choices_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "seed": 3, "max_tokens": 5, "n": 3}
    whole = {c.index: c.message.content for c in client.chat.completions.create(**asked).choices}
    assert sorted(whole) == [0, 1, 2] and len(set(whole.values())) > 1
    assert stream_text(client.chat.completions.create(**asked, stream=True)) == whole


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "smollm2", "messages": WEATHER, "tools": TOOLS, "tool_choice": choice}
    asked |= {"temperature": 0, "max_tokens": 36}
    (found,) = client.chat.completions.create(**asked).choices
    assert found.finish_reason == "tool_calls" and found.message.content is None
    (call,) = found.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    if choice != "auto":
        return
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls is not None
    assert [c.function.arguments for c in streamed.message.tool_calls] == ['{"city": "Paris"}']


def test_tool_choice_none_leaves_the_text_alone(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": WEATHER, "tools": TOOLS, "tool_choice": "none"}
    (found,) = client.chat.completions.create(**asked, temperature=0, max_tokens=6).choices
    assert found.message.tool_calls is None and "<tool_call>" in (found.message.content or "")


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_comes_apart(client: openai.OpenAI, opened: bool) -> None:
    examples = [(f"What is {a} + 1?", f"<think>\nIt is {a + 1}.\n</think>\n\n{a + 1}") for a in (2, 5, 7)]
    messages: list[Any] = []
    for question, answer in examples:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": "What is 3 + 1?"})
    extra = {"chat_template_kwargs": {"thinking": opened}}
    asked: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24, "extra_body": extra}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content.startswith("It is ") and message.content.strip().isdecimal()
    deltas: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content


@pytest.mark.parametrize("without_none", [False, True])
def test_an_answer_that_was_cut_off_in_its_reasoning_is_taken_back(client: openai.OpenAI, without_none: bool) -> None:
    extra = {"chat_template_kwargs": {"thinking": True}}
    asked: Any = {"model": "smollm2", "max_tokens": 3, "temperature": 0, "extra_body": extra}
    message: Any = client.chat.completions.create(**asked, messages=MESSAGES).choices[0].message
    assert message.content is None and message.reasoning_content
    history = [*MESSAGES, message.model_dump(exclude_none=without_none), {"role": "user", "content": "Go on."}]
    assert client.chat.completions.create(**asked, messages=history).choices


TEXTS = [
    "Γειά σου Κόσμε", "Привет, мир", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "হ্যালো বিশ্ব", "வணக்கம்", "హలో",
    "ಹಲೋ", "ഹലോ", "สวัสดี", "ພາສາລາວ", "မြန်မာ", "ქართული", "Հայերեն", "አማርኛ", "ខ្មែរ", "한국어", "日本語のテキスト",
    "中文文本", "👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈", "e\u0301 \u202eright to left\u202c",
]  # fmt: skip


def test_tokenize_and_back(server: ServerProcess) -> None:
    for text in TEXTS:
        tokens = server.post("/tokenize", {"prompt": text}).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nName three colors.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("text", TEXTS[18:])
def test_streamed_pieces_of_any_script_make_up_the_whole(client: openai.OpenAI, text: str) -> None:
    asked: Any = {"model": "smollm2", "prompt": f"{text} {text}", "max_tokens": 6, "temperature": 0}
    (whole,) = client.completions.create(**asked).choices
    assert stream_text(client.completions.create(**asked, stream=True)) == {0: whole.text}


def test_special_tokens_in_a_text_count_as_such(server: ServerProcess) -> None:
    plain = server.post("/tokenize", {"prompt": "<|im_end|>"}).json()
    assert plain["count"] == 1


def test_version_health_and_metrics(server: ServerProcess, client: openai.OpenAI) -> None:
    import nanollm

    before = server.metric("generation_tokens_total")
    successes = server.metric("request_success_total", finished_reason="length")
    client.completions.create(model="smollm2", prompt="Water", max_tokens=3)
    assert server.metric("generation_tokens_total") == before + 3
    assert server.metric("request_success_total", finished_reason="length") == successes + 1
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.get("/version").json() == {"version": nanollm.__version__}
    assert server.get("/health").status_code == 200
