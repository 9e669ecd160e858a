"""Under torchrun every rank makes the same calls and gets the same outputs, those of one rank; and the same errors."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from tests.conftest import TinyModel

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def model(tiny: Any) -> TinyModel:
    """With a tokenizer whose words are w0 … w299, and a chat template."""
    model = tiny("qwen3", vocab_size=300, rms_norm_eps=1e-6)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(300)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "{% for message in messages %}w30 {{ message.content }} {% endfor %}w31"
    tokenizer.save_pretrained(model.path)
    return model


def torchrun(case: str, model: TinyModel, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.runtime.torchrun_program", case, model.path, str(folder)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)


def test_every_rank_gets_the_outputs_of_one(model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # which the program reads when it is imported
    from tests.runtime import torchrun_program

    finished = torchrun("calls", model, tmp_path)
    assert finished.returncode == 0, finished.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    with torchrun_program.start(model.path, tensor_parallel_size=1) as llm:
        expected = json.loads(json.dumps(torchrun_program.outputs(llm)))
    assert any(text and reason == "w1" for _, _, text, *_, reason in expected["generate"])
    for found in ranks:
        for name, outputs in expected.items():
            assert found[name] == outputs
        seeded = ("generate", "stream", "chat")
        assert [found["again"][name] for name in seeded] == [expected[name] for name in seeded]
        assert found["again"]["unseeded"] == ranks[0]["again"]["unseeded"] != expected["unseeded"]
        assert found["in own group"] == expected
        assert found["own group"] == [True, 2.0]
        assert "torchrun started 2 ranks, but tensor_parallel_size is 3" in found["wrong size"]
        assert (
            "rank 1 has other engine arguments, another model or another dtype than rank 0" in found["other arguments"]
        )
        assert "prompt 1: prompt token 0 must be from 0 to 299, got 300" in found["invalid"]
        assert "ranks were called with different prompts" in found["different"]
        assert "prompts can't be an iterator under torchrun" in found["iterator"]
        assert found["closed"] != "none"
    assert "prompt token 0 must be from 0 to 299, got 300" in ranks[0]["invalid on one"]
    assert "ranks were called with different prompts" in ranks[1]["invalid on one"]
    assert (ranks[0]["logits"], ranks[0]["stats"]) == ("none", "none")
    assert ranks[1]["logits"] == "RuntimeError: compute_logits works on rank 0 only"
    assert ranks[1]["stats"] == "RuntimeError: get_stats works on rank 0 only"


def test_every_rank_learns_which_one_failed(model: TinyModel, tmp_path: Path) -> None:
    finished = torchrun("failures", model, tmp_path)
    assert finished.returncode == 0, finished.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0].pop("after") == ranks[1].pop("after")
    for here, found in enumerate(ranks):
        for name, (error, seconds) in found.items():
            harm, _, failed = name.partition(" on rank ")
            assert seconds < 15, name  # two programs and torchrun itself on a busy machine
            if harm == "raise_now" and here == int(failed) == 1:
                assert error == "RuntimeError: rank 1 can't load"
            else:
                assert error.startswith(f"EngineDeadError: rank {failed} failed:\nTraceback"), name
                last = (
                    "RuntimeError: rank {} can't load" if harm == "raise_now" else "ArithmeticError: a layer of rank {}"
                )
                assert error.rstrip().endswith(last.format(failed)), name


def test_death_of_a_rank_ends_the_job(model: TinyModel, tmp_path: Path) -> None:
    started = time.monotonic()
    finished = torchrun("death", model, tmp_path)
    assert finished.returncode != 0
    assert time.monotonic() - started < 40
    assert list(tmp_path.iterdir()) == []
