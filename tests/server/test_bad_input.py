"""What broke other servers: each is refused with a clear error or bounded, and others are served meanwhile."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from nanollm.server.errors import error_response
from tests.server.server_process import ServerProcess

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def still_serves(server: ServerProcess) -> Iterator[None]:
    yield
    assert server.get("/health").status_code == 200


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


CHOICE = {"type": "function", "function": {"name": "f"}}


def refused(response: httpx.Response, status: int = 400) -> str:
    """The error's message, which must be in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    return error["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt must be|prompt is empty"),
        ([[]], "prompt is empty"),
        (5, "prompt must be a string"),
        (None, "prompt must be a string"),
        (["a", [1]], "prompt must be a string"),
        ([1.5], "prompt token 0 must be an integer"),
        ([-1], "from 0 to 49151, got -1"),
        ([10**9], "from 0 to 49151"),
        ([1] * 9000, "max_model_len is 8192"),
        ([[1]] * 2000, "at most 1024 prompts"),
        ({"a": 1}, "prompt must be a string"),
    ],
)
def test_bad_prompts(server: ServerProcess, prompt: Any, message: str) -> None:
    assert re.search(message, refused(server.post("/v1/completions", {"prompt": prompt})))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ([{"role": "king", "content": "x"}], "role must be one of"),
        ([{"role": "user", "content": None}], r"messages\[0\]: content is missing"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "reads text only"),
        ([{"role": "user", "content": 5}], "content must be a string"),
        (["x"], "must be a dict"),
        ("x", r"\$.messages"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "arguments as JSON"),
    ],
)
def test_bad_messages(server: ServerProcess, messages: Any, message: str) -> None:
    assert re.search(message, refused(server.post("/v1/chat/completions", {"messages": messages})))


def test_a_list_of_text_parts_is_fine(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"n": 10**9}, "n may be at most 128"),
        ({"best_of": 10**9}, "best_of must equal n"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens|integer|range"),
        ({"max_tokens": -1}, "max_tokens must be an integer from 1"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "hot"}, r"\$.temperature"),
        ({"stop": ["x"] * 10_000}, "stop may be at most 32"),
        ({"stop": [""]}, "non-empty string"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias may be at most 1024"),
        ({"logit_bias": {"x": 1}}, "logit_bias token id"),
        ({"logit_bias": {"60000": 1}}, "logit_bias token ids must be from 0"),
        ({"seed": 2**63}, "seed must be"),
        ({"logprobs": 10_000}, "max_logprobs"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, r"response_format.json_schema.schema must be a JSON schema"),
        ({"response_format": schema_format({"type": "stsring"})}, r"json: the schema.type must be .* got 'stsring'"),
        ({"response_format": schema_format({"$ref": "#"})}, "json: Circular"),
        ({"response_format": schema_format({"items": [{"type": "null"}]})}, "the schema.items must be one schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "give one of response_format"),
        ({"structured_outputs": {"regex": "^(()"}}, "regex: .*parenthesis is not closed"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root'}}, "grammar: accepts nothing"),
        ({"structured_outputs": {"json": {"type": "string"}, "choice": ["a"]}}, "got json and choice"),
        ({"structured_outputs": {"jsn": {}}}, "has no field 'jsn'"),
        ({"guided_choice": []}, "choice must name a string"),
        ({"guided_json": "{" * 60_000}, "json: is not JSON"),
        ({"guided_json": '{"properties": {"\\ud800": {"not": {}}}}'}, r"json: has half a surrogate pair, '\\ud800'"),
        ({"guided_json": {"type": "string"}, "min_tokens": 3}, "leave out ignore_eos and min_tokens"),
        ({"logits_processors": ["f"]}, "logits_processors is not answered over HTTP: they are for LLM alone"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is not answered over HTTP: echo and logprobs in"),
        ({"detokenize": False}, "detokenize must be true over HTTP"),
        ({"request_id": "a\nb"}, "request_id must be"),
        ({"request_id": "x" * 1000}, "request_id must be"),
    ],
)
def test_bad_settings(server: ServerProcess, field: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(server.post("/v1/completions", {"prompt": "a", **field})))
    assert re.search(message, refused(server.post("/v1/completions", {"prompt": "a", **field, "stream": True})))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize can't be passed"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template can't be passed"),
        ({"chat_template_kwargs": {"tools": [1]}}, "fields of their own"),
        ({"chat_template": "{{ ''.__class__ }}"}, "server's to choose"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\] must be"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}]},
            "schema of type object",
        ),
        ({"tools": [5]}, r"tools\[0\] must be"),
        (tool({"properties": {"a": {"type": "stsring"}}}), r"tools\[0\].function.parameters has type 'stsring'"),
        (tool({"properties": {"a": {"items": {"pattern": "^(()"}}}}), r"tools\[0\].function.parameters has pattern"),
        (tool({"description": "a" * 65536}), "function.parameters may have 65536 characters, got 65555"),
        (tool({"properties": {"a": {"not": {}}}}) | {"tool_choice": CHOICE}, "json: the schema.properties.a.not"),
        ({"tool_choice": "required"}, "needs tools"),
        (tool({}) | {"tool_choice": {"type": "function", "function": "f"}}, "tool_choice must be"),
        (tool({}) | {"tool_choice": {"type": "function", "function": None}}, "tool_choice must be"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ],
)
def test_bad_chat_settings(server: ServerProcess, field: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(server.post("/v1/chat/completions", {"messages": HI, **field})))


def test_tools_that_take_long_hold_nobody_up(server: ServerProcess) -> None:
    patterns = ["(", "[\u0100-\uffff]" * 700]
    asked = {"messages": HI, **tool({"anyOf": [{"pattern": pattern} for pattern in patterns]})}
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(server.post("/v1/chat/completions", asked)))
    waiting.start()
    time.sleep(0.2)
    assert server.get("/health").status_code == 200 and not answers
    waiting.join()
    assert "parameters has pattern" in refused(answers[0])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
)
def test_bodies_that_are_not_what_json_should_be(server: ServerProcess, body: bytes) -> None:
    refused(server.post("/v1/completions", body))


def test_an_error_that_quotes_half_a_surrogate_pair_has_a_response() -> None:
    assert json.loads(bytes(error_response(ValueError("a\ud800")).body))["error"]["message"] == r"a\ud800"


def test_another_model_is_not_found(server: ServerProcess) -> None:
    body = {"model": "gpt-9", "prompt": "a", "messages": HI, "tokens": [1]}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert "gpt-9" in refused(server.post(path, body), 404)
    assert "gpt-9" in refused(server.get("/v1/models/gpt-9"), 404)
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="gpt-9", prompt="a")


def test_request_id_is_used_once_at_a_time(server: ServerProcess) -> None:
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "request_id": "mine"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["id"] == "cmpl-mine"
        assert "in use" in refused(server.post("/v1/completions", body))


def memory(server: ServerProcess) -> int:
    """Bytes of the server process."""
    return psutil.Process(server.process.pid).memory_info().rss


def raw(server: ServerProcess, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(data)
    return connection


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_body_of_a_gigabyte_is_not_read(server: ServerProcess) -> None:
    before = memory(server)
    with raw(server, POST + b"Content-Length: 1000000000\r\n\r\n" + b"x" * 1000) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    endless = raw(server, POST + b"Transfer-Encoding: chunked\r\n\r\n")
    sent = 0
    try:
        while sent < 200 << 20:
            endless.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
            sent += 1 << 20
    except OSError:
        pass
    assert 32 << 20 <= sent < 100 << 20
    assert memory(server) - before < 150 << 20


def test_a_header_of_a_megabyte_is_cut_short(server: ServerProcess) -> None:
    with raw(server, b"GET /health HTTP/1.1\r\nX: ") as connection, pytest.raises(OSError):
        for _ in range(1000):
            connection.sendall(b"x" * 10_000)
            time.sleep(0.0001)
        raise AssertionError("10 MB of header were taken")


def test_a_thousand_idle_connections_hold_nobody_up(server: ServerProcess) -> None:
    before = memory(server)
    idle = [raw(server, POST[: i % len(POST)]) for i in range(1000)]
    start = time.monotonic()
    assert server.get("/health").status_code == 200
    assert time.monotonic() - start < 2
    assert memory(server) - before < 100 << 20
    for connection in idle:
        connection.close()


def test_health_under_impatient_polls(server: ServerProcess) -> None:
    body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
    busy = threading.Thread(target=server.post, args=("/v1/completions", body))
    busy.start()
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.001)
    assert server.get("/health").status_code == 200
    busy.join()
    assert psutil.Process(server.process.pid).num_fds() < 100


def test_a_template_that_hangs_or_pries_is_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    hangs = "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    hangs += "{% endfor %}{% endfor %}{% elif messages[0].content == 'pry' %}{{ ''.__class__.__mro__ }}"
    (tmp_path / "t.jinja").write_text(hangs + "{{ messages.append.__globals__ }}{% else %}fine{% endif %}")
    flags = ("--chat-template", tmp_path / "t.jinja", "--num-kv-blocks", 64, "--api-key", "sesame", "--max-num-seqs", 4)
    with ServerProcess(smollm2_path, *flags, "--allowed-origins", "http://a.example", name="/a/m") as server:
        key = {"authorization": "Bearer sesame"}

        def ask(text: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            return server.post("/v1/chat/completions", body, headers=key)

        assert "took longer than 5 s" in refused(ask("hang"))
        assert "unsafe" in refused(ask("pry"))
        assert ask("hi").status_code == 200
        check_keys(server, key)


def check_keys(server: ServerProcess, key: dict[str, str]) -> None:
    """Every path but /health needs the key, however it is spelled; browsers of the allowed origin may ask."""
    assert server.get("/health").status_code == 200
    (model,) = server.get("/v1/models", headers=key).json()["data"]
    assert (
        server.get("/v1/models//a/m", headers=key).json()
        == server.get("/v1/models/%2Fa/m", headers=key).json()
        == model
    )
    for wrong in (
        {},
        {"authorization": "Bearer sesam"},
        {"authorization": "sesame"},
    ):
        refused(server.get("/v1/models", headers=wrong), 401)
    for target in (
        b"//v1/models", b"/v1/models/", b"/health/../v1/models", b"/health/%2e%2e/v1/models", b"/%2e%2e/v1/models",
        b"/health//", b"/health?/v1/models", b"/metrics", b"/docs", b"http://h/v1/models", b"/v1/models#/health",
    ):  # fmt: skip
        for host in (b"x", b"a/health?", b"health"):
            with raw(server, b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") as connection:
                status = connection.recv(100).split()[1]
                assert status in (b"401", b"400") or (target, status) == (b"/health?/v1/models", b"200")
    ask = {"origin": "http://a.example", "access-control-request-method": "POST"}
    allowed = httpx.options(f"{server.url}/v1/completions", headers=ask)
    assert allowed.headers["access-control-allow-origin"] == "http://a.example"
    other = httpx.options(f"{server.url}/v1/completions", headers=ask | {"origin": "http://b.example"})
    assert "access-control-allow-origin" not in other.headers
