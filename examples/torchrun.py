"""For torchrun, which starts every rank itself: `torchrun --nproc_per_node=2 examples/torchrun.py`."""

import os

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model


def main() -> None:
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    # Every rank makes the same calls and gets the same outputs.
    with LLM(default_model(), tensor_parallel_size=num_ranks) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        outputs = llm.generate(["The capital of France is"], params, use_tqdm=rank == 0)
    for output in outputs:
        print(f"rank {rank} of {num_ranks}: {output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
