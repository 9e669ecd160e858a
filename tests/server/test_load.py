"""Many clients at once: disconnects, back-pressure, slow readers, the drain, and the death of a process.

NANOLLM_SOAK_SECONDS=60 makes the rounds of disconnects that long.
"""

import asyncio
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from nanollm import LLM, SamplingParams
from tests.conftest import TinyModel
from tests.server.server_process import ServerProcess
from tests.soak import soak_seconds

SOAK_SECONDS = soak_seconds(1)
PROMPTS = [f"The number after {i} is" for i in range(8)]
TINY = ("--skip-tokenizer-init", "--dtype", "float32", "--block-size", 16, "--num-kv-blocks", 64)
LONG = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def answers(smollm2_path: Path) -> dict[str, str]:
    """What the offline engine says to each prompt."""
    with LLM(str(smollm2_path), num_kv_blocks=64) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    return {str(output.prompt): output.outputs[0].text for output in outputs}


async def one_stream(client: openai.AsyncOpenAI, draw: random.Random, answers: dict[str, str]) -> bool:
    """Ask, and hang up halfway or check the answer; whether it was checked."""
    prompt, n = draw.choice(PROMPTS), draw.choice([1, 1, 2])
    patience = draw.choice([0, 1, 2, 99, 99])
    asked: Any = {"model": "smollm2", "prompt": prompt, "max_tokens": 3, "temperature": 0, "n": n}
    stream = await client.completions.create(**asked, stream=True)
    texts = [""] * n
    async for chunk in stream:
        if patience == 0:
            await stream.close()
            return False
        patience -= 1
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [answers[prompt]] * n
    return True


async def soak(server: ServerProcess, answers: dict[str, str], seed: int) -> int:
    """64 clients for SOAK_SECONDS; how many answers were checked."""
    end = time.monotonic() + SOAK_SECONDS

    async def client_loop(number: int) -> int:
        draw, checked = random.Random(1000 * seed + number), 0
        async with server.async_client() as client:
            while time.monotonic() < end:
                checked += await one_stream(client, draw, answers)
        return checked

    return sum(await asyncio.gather(*(client_loop(number) for number in range(64))))


@pytest.mark.timeout(3 * SOAK_SECONDS + 300)
def test_after_rounds_of_disconnects_nothing_is_left(server: ServerProcess, answers: dict[str, str]) -> None:
    memory = []
    for seed in range(3):
        assert asyncio.run(soak(server, answers, seed)) > 0
        assert server.is_idle(30)
        processes = [psutil.Process(server.process.pid), server.engine()]
        memory.append(sum(process.memory_info().rss for process in processes))
    assert memory[2] < memory[1] * 1.02


def test_500_requests_that_all_hang_up_at_once(server: ServerProcess) -> None:
    async def run() -> None:
        async with server.async_client() as client:
            asked: Any = {"model": "smollm2", "prompt": "a", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
            tasks = [asyncio.create_task(client.completions.create(**asked)) for _ in range(500)]
            await asyncio.sleep(3.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    before = server.metric("request_success_total", finished_reason="abort")
    asyncio.run(run())
    assert server.is_idle(10)
    assert server.metric("request_success_total", finished_reason="abort") > before


def test_hanging_up_on_two_choices_and_while_waiting(tiny: Any) -> None:
    with ServerProcess(tiny("qwen3").path, *TINY, "--max-num-seqs", 2, "--max-waiting", 2) as server:

        def open_stream(**settings: Any) -> httpx.Response:
            request = client.build_request("POST", "/v1/completions", json={**LONG, "stream": True, **settings})
            return client.send(request, stream=True)

        with httpx.Client(base_url=server.url, timeout=30) as client:
            running = open_stream(n=2)
            socket_that_waits = socket.create_connection(("127.0.0.1", server.port))
            body = b'{"prompt": [9], "n": 2, "max_tokens": 100, "ignore_eos": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            socket_that_waits.sendall(head + body)
            while server.metric("num_requests_waiting") != 2:
                time.sleep(0.01)
            turned_away = server.post("/v1/completions", LONG)  # 2 run, 2 wait
            assert (turned_away.status_code, turned_away.headers["retry-after"]) == (429, "1")
            assert turned_away.json()["error"]["type"] == "rate_limit_error"
            socket_that_waits.close()
            while server.metric("num_requests_waiting"):
                time.sleep(0.01)
            assert server.metric("num_requests_running") == 2
            running.close()
            assert server.is_idle()


def test_slow_readers_hold_nobody_up_and_long_requests_are_ended(tiny: Any) -> None:
    path = tiny("qwen3", max_position_embeddings=4096).path
    with ServerProcess(path, *TINY, "--request-timeout", 2) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        body = b'{"prompt": [5], "n": 16, "max_tokens": 3000, "ignore_eos": true, "logprobs": 20, "stream": true}'
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.5)
        start = time.monotonic()
        assert server.post("/v1/completions", {**LONG, "max_tokens": 5}).status_code == 200
        assert time.monotonic() - start < 2
        late = server.post("/v1/completions", {**LONG, "n": 16, "max_tokens": 3000})
        assert late.status_code == 504 and "not finished after 2 s" in late.json()["error"]["message"]
        assert server.is_idle()


def test_sigterm_loses_no_accepted_request(tiny: Any) -> None:
    with ServerProcess(tiny("qwen3").path, *TINY, "--max-num-seqs", 4) as server:

        async def run() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                tasks = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(12)]
                while server.metric("num_requests_running") + server.metric("num_requests_waiting") < 12:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGTERM)
                answers = [(await task).json() for task in tasks]
            return [answer["usage"]["completion_tokens"] for answer in answers]

        assert asyncio.run(run()) == [200] * 12
        assert server.process.wait(10) == 0


def test_what_is_not_done_by_the_end_of_the_drain_time_is_told_so(tiny: Any) -> None:
    path = tiny("qwen3", max_position_embeddings=4096).path
    asked = {**LONG, "max_tokens": 900, "n": 8}
    with ServerProcess(path, *TINY, "--shutdown-timeout", 0.5) as server, ThreadPoolExecutor(1) as pool:
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        whole = pool.submit(server.post, "/v1/completions", asked)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**asked, "stream": True}, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            assert "the server is shutting down" in [line for line in lines if line][-1]
        assert whole.result().status_code == 503 and "the server is shutting down" in whole.result().text
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 5 and "Traceback" not in server.log
        half.close()


@pytest.mark.parametrize("victim", ["engine", "rank"])
def test_a_dead_process_is_told_to_everybody_and_the_server_ends(tiny: Any, victim: str) -> None:
    model: TinyModel = tiny("qwen3")
    with ServerProcess(model.path, *TINY, "--tensor-parallel-size", 2) as server:
        engine = server.engine()
        (rank,) = [child for child in engine.children() if "spawn_main" in " ".join(child.cmdline())]

        async def run() -> list[Any]:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                whole = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(3)]
                stream = asyncio.create_task(client.post("/v1/completions", json={**LONG, "stream": True}))
                while server.metric("num_requests_running") < 4:
                    await asyncio.sleep(0.01)
                {"engine": engine, "rank": rank}[victim].kill()
                start = time.monotonic()
                answers = await asyncio.gather(*whole, stream)
                assert time.monotonic() - start < 5
                assert server.get("/health").status_code == 503
            return answers

        *whole, stream = asyncio.run(run())
        for answer in whole:
            assert answer.status_code == 503 and "SIGKILL" in answer.json()["error"]["message"]
        assert "SIGKILL" in [line for line in stream.text.splitlines() if line][-1]
        assert server.process.wait(10) == 1
        assert "SIGKILL" in server.log
        assert not psutil.wait_procs([engine, rank], timeout=10)[1]


def test_a_killed_server_leaves_no_process(tiny: Any) -> None:
    with ServerProcess(tiny("qwen3").path, *TINY) as server:
        engine = server.engine()
        server.process.kill()
        assert not psutil.wait_procs([engine], timeout=10)[1]


def test_what_the_user_can_mend_is_one_line_and_exit_code_2() -> None:
    with pytest.raises(AssertionError, match=r"error: model './nothing': no such file"):
        ServerProcess("./nothing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(AssertionError, match=r"error: .*Address already in use"):
            ServerProcess("./nothing", "--port", taken.getsockname()[1])
