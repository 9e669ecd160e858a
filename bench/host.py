"""What a decode step costs rank 0's CPU: the time in which a GPU could run dry. Needs no GPU.

    python bench/host.py --batch 1 256 --json host.json

The engine runs as it does for `generate_stream`, with tokens of this project's README in place of a model. Phases:
schedule (which rows, which blocks, the plan), launch (the plan as the words that go to the device; without the launches
themselves), update (append, finish, free): all of that is between two launches. Then text, an output for every row, for
which no launch waits. Medians of --steps steps.
"""

import json
import random
import statistics
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of, positive

from nanollm import SamplingParams, __version__
from nanollm.cli import default_model, exit_code
from nanollm.config import NAMED_SHAPES, EngineConfig, ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.engine.engine_core import EngineCore
from nanollm.layers.sampler import Filters, Sampler
from nanollm.runtime.cuda_graphs import DecodeSteps, _Graphs
from nanollm.runtime.rows import RowState
from nanollm.runtime.step_plan import StepPlan, StepResult
from nanollm.text.output_processor import OutputProcessor
from nanollm.text.tokenizer import load_tokenizer

PHASES = ("schedule", "launch", "update")
README = Path(__file__).parents[1] / "README.md"
PROMPT_LEN, BLOCK_SIZE = 512, 64


class Replayed:
    """A CUDA graph that does nothing."""

    def replay(self) -> None:
        pass


class FakeExecutor:
    """Takes plans as far as a GPU's launch, and gives random ones of these tokens."""

    def __init__(self, batch: int, max_model_len: int, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self.num_kv_blocks = batch * -(-max_model_len // BLOCK_SIZE) + 16
        self.max_model_len = max_model_len
        self._pending: deque[int] = deque()
        cpu = torch.device("cpu")
        head = torch.nn.Linear(8, 256, bias=False)
        model: Any = torch.nn.Module()
        model.lm_head = head
        self.rows = RowState(batch, -(-(max_model_len + 1) // BLOCK_SIZE), BLOCK_SIZE, range(256), cpu)
        sampler = Sampler(self.rows.sampler, self.rows.state.last_token_R, range(256), TPGroup(), "raw_logprobs")
        self.decode = DecodeSteps(model, self.rows, sampler, batch, [batch])
        sampling = (Replayed(), torch.zeros(batch, dtype=torch.int64))
        self.decode._graphs[batch] = _Graphs(Replayed(), {Filters.NONE: sampling})  # type: ignore[arg-type, dict-item]

    def submit(self, plan: StepPlan) -> None:
        if self.decode.takes(plan):
            logits_r, sample = self.decode.forward(plan)
            sample(logits_r)
        else:
            self.rows.start(plan)
        self._pending.append(len(plan.sampled_rows_S))

    def collect(self) -> StepResult:
        return StepResult(random.choices(self._token_ids, k=self._pending.popleft()))

    def discard(self) -> None:
        self._pending.clear()


def measure(batch: int, steps: int, tokenizer: Any) -> dict[str, float]:
    """Microseconds of each phase in a steady decode step, of all together, and of text."""
    max_model_len = PROMPT_LEN + steps + 64
    model_config = ModelConfig.from_hf(NAMED_SHAPES["qwen3-0.6b"])
    config = EngineConfig("qwen3-0.6b", max_num_seqs=batch, block_size=BLOCK_SIZE, max_model_len=max_model_len)
    executor = FakeExecutor(batch, max_model_len, tokenizer.encode(README.read_text()))
    engine = EngineCore(config, model_config, executor, overlap=True)
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(temperature=0.6, max_tokens=None, ignore_eos=True)
    for _ in range(batch):
        (seq,) = engine.make_sequences([random.randrange(10_000) for _ in range(PROMPT_LEN)], params)
        engine.add(seq)
        processor.add(seq.request_id, str(seq.request_id), None, seq.token_ids.tolist(), params)
    spent: dict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent[phase] += time.perf_counter() - start

        setattr(owner, name, run)

    timed(engine.scheduler, "schedule", "schedule")
    timed(executor, "submit", "launch")
    timed(engine.scheduler, "update", "update")
    timed(processor, "process", "text")
    samples: list[dict[str, float]] = []
    while engine.scheduler.num_tokens_out < batch * 8:  # all prompts in, a few tokens each
        processor.process(engine.step())
    for _ in range(steps // 2):
        spent.clear()
        processor.process(engine.step())
        samples.append(spent | {"all": sum(spent[phase] for phase in PHASES)})
    return {name: statistics.median(sample[name] for sample in samples) * 1e6 for name in (*PHASES, "all", "text")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--tokenizer", metavar="MODEL", help="whose text it is (default: SmolLM2's)")
    args = parser.parse_args()
    random.seed(0)
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.tokenizer or default_model())
    rows = {batch: measure(batch, args.steps, tokenizer) for batch in args.batch}
    print("microseconds a decode step")
    print(f"{'batch':>5} " + " ".join(f"{phase:>9}" for phase in (*PHASES, "all", "text")))
    for batch, row in rows.items():
        print(f"{batch:5} " + " ".join(f"{row[phase]:9.1f}" for phase in (*PHASES, "all", "text")))
    if args.json:
        args.json.write_text(json.dumps({"nanollm": __version__, "microseconds": rows}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
