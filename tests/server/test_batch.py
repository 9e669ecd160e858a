"""`nanollm generate --input`: processes that read one file and write another, some of them killed on the way.

The engine is batch_program's except where the answers themselves are looked at.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanollm import LLM, SamplingParams
from nanollm.server.batch import Line, _answer
from tests.server.batch_program import DEADLY
from tests.server.server_process import ROOT

PROGRAM = ["-m", "tests.server.batch_program"]


def request(custom_id: str, token_id: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [token_id], "max_tokens": 1}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **fields}


class Batch:
    def __init__(self, folder: Path, lines: list[Any]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))

    def start(self, *flags: object, program: list[str] = PROGRAM, **environment: str) -> "subprocess.Popen[str]":
        command = [sys.executable, *program, "generate", "--input", self.input, "--output", self.output, *flags]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
        if program is PROGRAM:
            command += ["--model", "m", "--max-num-seqs", "4"]
        return subprocess.Popen(
            [*map(str, command)], stderr=subprocess.PIPE, text=True, env=env | environment, cwd=ROOT
        )

    def run(self, *flags: object, **settings: Any) -> tuple[int, str]:
        """Exit code and stderr."""
        process = self.start(*flags, **settings)
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        """Fails if a line is answered twice."""
        answers = self.answers()
        found = {answer["custom_id"]: answer for answer in answers}
        assert len(found) == len(answers)
        return found


def test_killed_twenty_times_every_line_is_answered_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    batch = Batch(tmp_path, [request(f"line {i}", i + 100) for i in range(3000)])
    num_lines, num_torn = [0], 0

    def size() -> int:
        return batch.output.stat().st_size if batch.output.exists() else 0

    for _ in range(20):
        enough = size() + rng.randrange(20000) if rng.random() < 0.9 else 0  # some are killed before they do anything
        process = batch.start()
        while process.poll() is None and size() < enough:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        if batch.output.exists():
            content = batch.output.read_bytes()
            num_lines.append(content.count(b"\n"))
            if content and rng.random() < 0.5:  # as if power had failed
                batch.output.write_bytes(content[: -rng.randrange(1, 300)])
                num_torn += 1
    assert 0 < num_lines[-1] < 3000 and num_torn > 3
    code, stderr = batch.run()
    assert code == 0 and "3000 of 3000 lines are answered" in stderr
    texts = {line: answer["response"]["body"]["choices"][0]["text"] for line, answer in batch.by_id().items()}
    assert texts == {f"line {i}": str(i + 100) for i in range(3000)}


def test_answers_are_those_of_the_offline_engine(tmp_path: Path, smollm2_path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    settings = {"temperature": 0, "max_tokens": 8}
    chat = {"url": "/v1/chat/completions", "body": {"model": "smollm2", "messages": messages, **settings}}
    text = {"body": {"model": "smollm2", "prompt": "Water boils at", **settings}}
    batch = Batch(tmp_path, [request("a chat", 0, **chat), request("a text", 0, **text)])
    flags = ("--model", smollm2_path, "--served-model-name", "smollm2", "--num-kv-blocks", 64)
    process = batch.start(*flags, program=["-m", "nanollm.cli"])
    assert process.communicate(timeout=120)[1].rstrip().endswith("2 of 2 lines are answered")
    with LLM(str(smollm2_path), num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (said,) = llm.chat(messages, params, use_tqdm=False)
        (written,) = llm.generate("Water boils at", params, use_tqdm=False)
    found = batch.by_id()
    assert found["a chat"]["error"] is None and found["a chat"]["response"]["status_code"] == 200
    assert found["a chat"]["response"]["body"]["choices"][0]["message"]["content"] == said.outputs[0].text != ""
    assert found["a text"]["response"]["body"]["choices"][0]["text"] == written.outputs[0].text != ""


def test_a_bad_line_fails_alone(tmp_path: Path) -> None:
    bad = {
        "url": request("url", 1, url="/v1/embeddings"),
        "method": request("method", 1, method="GET"),
        "stream": request("stream", 1, body={"prompt": [1], "stream": True}),
        "stream and usage": request("stream and usage", 1, body={"prompt": [1], "stream": True, "usage": None}),
        "body": request("body", 1, body="text"),
        "field": request("field", 1, body={"prompt": [1], "temperature": -1}),
        "model": request("model", 1, body={"prompt": [1], "model": "gpt"}),
        "chat": request("chat", 1, url="/v1/chat/completions", body={"messages": [{"role": "user", "content": "hi"}]}),
    }
    said = {
        "url": "url must be /v1/chat/completions or /v1/completions, got '/v1/embeddings'",
        "method": "method must be POST, got 'GET'",
        "stream": "stream must be false: a line of a batch has one answer",
        "stream and usage": "stream must be false: a line of a batch has one answer",
        "body": "the body is not what this path takes: Expected `object`, got `str`",
        "field": "temperature must be a finite number from 0 to 100, got -1.0",
        "model": "there is no model 'gpt' here, only 'm'",
        "chat": "chat needs a tokenizer: give token ids, or pass tokenizer= and no skip_tokenizer_init",
    }
    batch = Batch(tmp_path, [request("first", 5), *bad.values(), request("last", 6)])
    code, stderr = batch.run()
    assert code == 0 and f"errors: {len(bad)}" in stderr
    found = batch.by_id()
    assert [found[name]["response"]["body"]["choices"][0]["text"] for name in ("first", "last")] == ["5", "6"]
    errors = {}
    for name in bad:
        answer = found[name]
        if answer["response"] is None:
            errors[name] = answer["error"]["message"]
        else:
            assert answer["response"]["status_code"] == (404 if name == "model" else 400) and answer["error"] is None
            errors[name] = answer["response"]["body"]["error"]["message"]
    assert errors == said


def test_an_answer_that_is_not_json_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b'data: {"choices": []}\n\n'})

    line = msgspec.json.decode(json.dumps(request("a", 1)), type=Line)
    answer, _ = asyncio.run(_answer(app, line))
    assert answer.response is None and answer.error is not None and answer.error.code == "server_error"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [request("a", 1), '{"custom_id": "b"'],
            "in.jsonl: line 2 is no request with a custom_id: Input data was trunc",
        ),
        ([{"method": "POST"}], "line 1 is no request with a custom_id: Object missing required field `custom_id`"),
        ([request("a", 1), "", request("a", 2)], "lines 1 and 3 have the same custom_id 'a': give each one of its own"),
        ([""], "in.jsonl has no requests"),
    ],
)
def test_a_file_with_a_line_that_can_not_be_told_apart_is_refused(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    batch = Batch(tmp_path, lines)
    code, stderr = batch.run()
    assert code == 2 and message in stderr and len(stderr.splitlines()) == 1
    assert not batch.output.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("precious text", "line 1 is no answer"),
        ("precious text\n", "line 1 is no answer"),
        (
            '{"id":"1","custom_id":"x","response":null,"error":null}\n',
            "line 1 answers 'x', which .*in.jsonl doesn't ask",
        ),
    ],
)
def test_a_file_that_is_no_output_of_this_input_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    batch = Batch(tmp_path, [request("a", 1)])
    batch.output.write_text(content)
    code, stderr = batch.run()
    assert code == 2 and re.search(message, stderr)
    assert batch.output.read_text() == content


def test_a_pipe_can_not_be_read_twice(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [])
    batch.input.unlink()
    os.mkfifo(batch.input)
    code, stderr = batch.run()
    assert code == 2 and "must be a regular file" in stderr
    batch.input.unlink()
    code, stderr = batch.run()
    assert code == 2 and f"{batch.input} does not exist" in stderr


def test_the_input_is_not_its_own_output(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [request("a", 1)])
    before = batch.input.read_text()
    batch.output.symlink_to(batch.input)
    code, stderr = batch.run()
    assert code == 2 and "name a file of its own" in stderr
    assert batch.input.read_text() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [request(str(i), i + 100) for i in range(3000)])
    first = batch.start()
    while not (batch.output.exists() and batch.output.stat().st_size):
        time.sleep(0.01)
    code, stderr = batch.run()
    assert code == 2 and "is being written by another run" in stderr
    first.kill()
    first.communicate()


def test_ctrl_c_keeps_what_is_answered_and_a_second_run_does_the_rest(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [request(str(i), i + 100) for i in range(1000)])
    process = batch.start()
    while not (batch.output.exists() and batch.output.stat().st_size > 1000):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    num_answered = len(batch.by_id())
    assert process.returncode == 130 and 0 < num_answered < 1000
    assert stderr.rstrip().endswith(f"{num_answered} of 1000 lines are answered")
    code, stderr = batch.run()
    assert code == 0 and f" {num_answered}/1000 " in stderr and len(batch.by_id()) == 1000
    content = batch.output.read_bytes()
    assert batch.run()[0] == 0 and batch.output.read_bytes() == content


def test_a_full_disk_is_told_with_what_is_answered_and_the_way_on(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [request(str(i), i + 100) for i in range(100)])
    code = (
        "import resource, sys; from tests.server import batch_program as p; p.batch.AsyncLLMEngine = p.QuickEngine;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); sys.exit(p.cli.main())"
    )
    exit_code, stderr = batch.run("--model", "m", "--max-num-seqs", 4, program=["-c", code])
    num_answered = batch.output.read_bytes().count(b"\n")
    assert exit_code == 2 and 0 < num_answered < 100 and batch.output.stat().st_size == 5000
    *_, count, error = stderr.splitlines()
    assert count.endswith(f"{batch.output}: {num_answered} of 100 lines are answered")
    assert error == (
        f"error: {batch.output} can't be written (File too large): mend that, and the same command goes on from there"
    )
    assert batch.run()[0] == 0 and len(batch.by_id()) == 100


def test_lines_that_died_with_the_engine_are_not_answered(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [*(request(str(i), i + 100) for i in range(50)), request("deadly", DEADLY)])
    code, stderr = batch.run()
    assert code == 2 and stderr.splitlines()[-1] == "error: rank 1 fell over"
    assert "deadly" not in batch.by_id()


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--temperature", 0], {}, "temperature can't be given with --input"),
        (["Why?"], {}, "prompts can't be given with --input"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "give it --tp, without torchrun"),
    ],
)
def test_what_does_not_go_with_a_file(
    tmp_path: Path, flags: list[object], environment: dict[str, str], message: str
) -> None:
    code, stderr = Batch(tmp_path, [request("a", 1)]).run(*flags, **environment)
    assert code == 2 and message in stderr


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """100,000 lines of 1 KB, all answered but one: reading them takes less memory than a fifth of them."""
    lines = [request(f"line {i}", 5, pad="x" * 900) for i in range(100_000)]
    batch = Batch(tmp_path, lines)
    answers = (f'{{"id":"batch_req_1","custom_id":"line {i}","response":null,"error":null}}\n' for i in range(99_999))
    batch.output.write_text("".join(answers))
    code = (
        "import resource, sys; from tests.server import batch_program as p; p.batch.AsyncLLMEngine = p.QuickEngine;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; assert p.cli.main() == 0;"
        "print('grown', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)"
    )
    _, stderr = batch.run("--model", "m", program=["-c", code])
    assert "100000 of 100000 lines" in stderr
    assert int(stderr.split("grown ")[1]) < 20_000  # KiB
