"""lm-evaluation-harness's adapters against the server, on a task kept here. Oracle: the offline LLM's own answers.

lm-eval is large, so `./launch.sh test` adds it only where all tests are run. By hand:
`pip install -e '.[eval]'`, then `pip install --no-deps lm_eval`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanollm import LLM, SamplingParams
from tests.server.server_process import ROOT, ServerProcess

pytest.importorskip("lm_eval")
TASKS = Path(__file__).parent / "tasks"
DOCS = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text().splitlines()]
PROMPTS = [f"The capital of {doc['country']} is" for doc in DOCS]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), num_kv_blocks=128) as llm:
        llm.tokenizer.chat_template = (Path(__file__).parent / "tools.jinja").read_text()  # type: ignore[union-attr]
        yield llm


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def evaluate(server: ServerProcess, adapter: str, path: str, task: str, **model_args: Any) -> dict[str, Any]:
    import lm_eval

    arguments = {"model": server.name, "base_url": server.url + path, "num_concurrent": 4, **model_args}
    found = lm_eval.simple_evaluate(
        model=adapter,
        model_args=arguments,
        tasks=[task],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(TASKS)),
        apply_chat_template=adapter == "local-chat-completions",
        bootstrap_iters=0,
    )
    return found["results"][task]


def first_word(text: str) -> str:
    found = re.search(r"\w+", text)
    return found[0] if found else ""


def test_log_likelihoods_of_choices(server: ServerProcess, llm: LLM, tmp_path: Path) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.save_pretrained(tmp_path)
    right = 0
    for doc, prompt in zip(DOCS, PROMPTS, strict=True):
        likelihoods = []
        for answer in (doc["capital"], doc["other"]):
            ids = llm.tokenizer.encode(f"{prompt} {answer}")
            start = len(llm.tokenizer.encode(prompt))
            logprobs = torch.log_softmax(llm.compute_logits([ids])[0].double(), -1)
            likelihoods.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))))
        right += likelihoods[0] > likelihoods[1]
    found = evaluate(server, "local-completions", "/v1/completions", "capitals_choice", tokenizer=str(tmp_path))
    assert found["acc,none"] == pytest.approx(right / len(DOCS)) and right > len(DOCS) / 2


def test_generated_answers(server: ServerProcess, llm: LLM, tmp_path: Path) -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=3, stop=[".", "\n"])
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    right = sum(first_word(out.outputs[0].text) == doc["capital"] for out, doc in zip(outputs, DOCS, strict=True))
    found = evaluate(server, "local-completions", "/v1/completions", "capitals_text", tokenizer=str(tmp_path))
    assert found["exact_match,stripped"] == pytest.approx(right / len(DOCS)) and right > 0


def test_generated_answers_of_a_chat(server: ServerProcess, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, stop=[".", "\n"])
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params, use_tqdm=False)
    right = sum(first_word(out.outputs[0].text) == doc["capital"] for out, doc in zip(outputs, DOCS, strict=True))
    found = evaluate(server, "local-chat-completions", "/v1/chat/completions", "capitals_text")
    assert found["exact_match,stripped"] == pytest.approx(right / len(DOCS))
