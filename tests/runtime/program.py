"""A program as a user writes one, for the tests to interrupt, kill, or let end: program.py PHASE MODEL."""

import sys
import time
from typing import Any

import torch

import nanollm.llm
from nanollm import LLM, SamplingParams
from tests.runtime import sabotage

torch.set_num_threads(1)


def load_very_slowly() -> None:
    print("loading", flush=True)
    time.sleep(60)


def hang_in_step() -> None:
    sabotage.at_call(9, lambda: print("hanging", flush=True) or time.sleep(60))


HARMS = {"load": {0: sabotage.load_slowly, 1: load_very_slowly}, "step": {1: hang_in_step}}


def main(phase: str, model: str) -> None:
    resolve = nanollm.llm.resolve_model

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        return sabotage.SabotagedSource.of(resolve(*args, **kwargs), HARMS.get(phase, {}))

    nanollm.llm.resolve_model = sabotaged
    print("starting", flush=True)
    llm = LLM(model, tensor_parallel_size=2, device="cpu", num_kv_blocks=64, skip_tokenizer_init=True)
    print("idle", flush=True)
    if phase == "idle":
        time.sleep(60)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    print("done", flush=True)  # and ends without closing


if __name__ == "__main__" or "unguarded" in sys.argv:
    main(*sys.argv[1:])
