"""What torchrun starts on every rank: torchrun_program.py CASE MODEL FOLDER writes FOLDER/rank.json."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nanollm.llm
from nanollm import LLM, SamplingParams
from nanollm.layers.activation import GatedMLP
from tests.runtime import sabotage

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
PROMPTS: list[Any] = ["w1 w2 w3", "w7 w8 w9 w10 w11 w12 w13 w14 w15", {"prompt_token_ids": [5] * 20}]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=38, max_tokens=12, stop=["w1"]),
    SamplingParams(
        temperature=0.9,
        seed=6,
        max_tokens=12,
        stop_token_ids=list(range(0, 300, 9)),
        n=2,
        logprobs=2,
        prompt_logprobs=1,
    ),
]
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "w20 w21"}]


def tell(output: Any) -> list[Any]:
    one, *others = output.outputs
    # Log probabilities are not bitwise the same on one rank and two: which tokens are the likeliest is.
    likeliest = [
        [list(entry) for entry in found if entry] for found in (one.logprobs or [], output.prompt_logprobs or [])
    ]
    more = [other.token_ids for other in others] + likeliest
    return [output.request_id, output.prompt, one.text, one.token_ids, more, one.finish_reason, one.stop_reason]


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def outputs(llm: LLM) -> dict[str, Any]:
    """What is to be the same on every rank, and at one rank."""
    return {
        "generate": [tell(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)],
        "stream": [tell(output) for output in llm.generate_stream(PROMPTS, PARAMS)],
        "chat": [tell(output) for output in llm.chat(MESSAGES, PARAMS[0], use_tqdm=False)],
        "unseeded": [tell(output) for output in llm.generate(PROMPTS, UNSEEDED, use_tqdm=False)],
    }


def start(model: str, **kwargs: Any) -> LLM:
    return LLM(model, device="cpu", num_kv_blocks=64, **({"tensor_parallel_size": 2} | kwargs))


def collective_calls(model: str) -> dict[str, Any]:
    result: dict[str, Any] = {"wrong size": error_of(start, model, tensor_parallel_size=3)}
    result["other arguments"] = error_of(start, model, max_num_seqs=8 + RANK)
    with start(model) as llm:
        result |= outputs(llm)
        result["iterator"] = error_of(llm.generate, iter([[1]]), UNSEEDED)
        result["invalid"] = error_of(llm.generate, [[1], [300]], UNSEEDED)
        result["different"] = error_of(llm.generate, [[1], [2]][: 1 + RANK], UNSEEDED)
        result["invalid on one"] = error_of(llm.generate, [300 - RANK], UNSEEDED)
        result["logits"] = error_of(llm.compute_logits, [[1, 2, 3]])
        result["stats"] = error_of(llm.get_stats)
        stream = llm.generate_stream(PROMPTS, PARAMS)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        result["again"] = outputs(llm)
        if RANK == 1:
            time.sleep(0.5)
    result["closed"] = error_of(llm.generate, [1], UNSEEDED)
    # The program's own process group is used and left as it was.
    dist.init_process_group("gloo")
    for _ in range(2):
        with start(model) as llm:
            result["in own group"] = outputs(llm)
        total = torch.ones(1)
        dist.all_reduce(total)
        result["own group"] = [dist.is_initialized(), total.item()]
    dist.destroy_process_group()
    return result


def failures(model: str) -> dict[str, Any]:
    """Every rank catches the error; then another engine is made."""
    resolve, forward, result = nanollm.llm.resolve_model, GatedMLP.forward, {}
    for harm in (sabotage.raise_now, sabotage.raise_in_layer):
        for rank in (1, 0):

            def sabotaged(*args: Any, rank: int = rank, harm: Callable[[], None] = harm, **kwargs: Any) -> Any:
                return sabotage.SabotagedSource.of(resolve(*args, **kwargs), {rank: harm})

            nanollm.llm.resolve_model = sabotaged
            began = time.monotonic()
            error = error_of(lambda: start(model).generate(PROMPTS, PARAMS, use_tqdm=False))
            result[f"{harm.__name__} on rank {rank}"] = [error, time.monotonic() - began]
            assert not dist.is_initialized()
    nanollm.llm.resolve_model, GatedMLP.forward = resolve, forward
    result["after"] = outputs(start(model))
    return result


def death(model: str) -> None:
    """Rank 1 dies during a step."""
    llm = start(model)
    if RANK == 1:
        sabotage.at_call(9, sabotage.die_now)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)


if __name__ == "__main__":
    case, model, folder = sys.argv[1:]
    found = {"calls": collective_calls, "failures": failures, "death": death}[case](model)
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))
