"""SmolLM2 on the CPU: decoding one prompt beside transformers, and 16 prompts at once beside one by one.

Both run the same weights in float32 on the same threads, in turns, and medians count. The exit code is 1 unless nanollm
is no slower than transformers, and 16 prompts at once are at least 4 times as fast as one by one. Give it an idle
machine: a second busy process slows two threads down many times, and not both sides alike.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from command_line import at_least, parser_of, positive
from floor import ModelCost, measure_rates

from nanollm import LLM, SamplingParams
from nanollm.cli import default_model, exit_code

MANY = 16
PROMPT_TOKENS = 16


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=positive, default=7, help="measurements of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=at_least(3), default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="default: PyTorch's, one a core")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rates = measure_rates(torch.device("cpu"), torch.float32)
    path = Path(default_model())
    theirs = load_transformers(path)
    with LLM(str(path), dtype="float32", device="cpu", skip_tokenizer_init=True) as ours:
        cost = ModelCost.of(ours.model_config, value_bytes=4)
        kinds: dict[str, Callable[[list[list[int]]], float]] = {
            "theirs": lambda prompts: decode_with_transformers(theirs, prompts[0], args.tokens),
            "one": lambda prompts: decode(ours, prompts[1:2], args.tokens),
            "many": lambda prompts: decode(ours, prompts[2:], args.tokens),
        }
        seconds = {kind: statistics.median(times) for kind, times in take_turns(kinds, args.rounds).items()}

    context = PROMPT_TOKENS + args.tokens // 2
    floors = {kind: cost.decode_seconds([context] * rows, rates) for kind, rows in (("one", 1), ("many", MANY))}
    faster = seconds["theirs"] / seconds["one"]
    gain = MANY * seconds["one"] / seconds["many"]
    print(f"{path.stem}, float32, {torch.get_num_threads()} threads, medians of {args.rounds} rounds")
    print(f"one prompt, transformers  {1e3 * seconds['theirs']:7.1f} ms a token")
    for name, kind, claim in (
        ("one prompt, nanollm", "one", f"{faster:.2f} times as fast as transformers"),
        (f"{MANY} prompts at once", "many", f"{gain:.1f} times the tokens a second of one"),
    ):
        share = floors[kind] / seconds[kind]
        print(f"{name:<24}  {1e3 * seconds[kind]:7.1f} ms a step, {share:.0%} of the floor; {claim}")
    print(
        f"(floor: {cost.weight_bytes() / 1e6:.0f} MB of weights at {rates.bytes_per_second / 1e9:.1f} GB/s, or their "
        f"operations at {rates.flops_per_second / 1e9:.0f} GFLOP/s; {rates.source})"
    )
    if args.json:
        result = {"seconds": seconds, "floors": floors, "faster": faster, "gain": gain, "rates": vars(rates)}
        args.json.write_text(json.dumps(result | {"threads": torch.get_num_threads()}, indent=2) + "\n")
    return 0 if faster >= 1 and gain >= 4 else 1


def load_transformers(path: Path) -> Any:
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def take_turns(kinds: dict[str, Callable[[list[list[int]]], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each kind once a round, on new prompts and in turning order; the first round warms up."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    draw = random.Random(0)
    for number in range(rounds + 1):
        prompts = [[draw.randint(0, 10_000) for _ in range(PROMPT_TOKENS)] for _ in range(MANY + 2)]
        for kind in sorted(kinds, reverse=number % 2 == 1):
            seconds = kinds[kind](prompts)
            if number:
                times[kind].append(seconds)
        print(f"\rround {number} of {rounds}", end="\n" if number == rounds else "", file=sys.stderr, flush=True)
    return times


def decode(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds a step, from the last first token to the end."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    metrics: list[Any] = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
    return (max(m.finished_time for m in metrics) - max(m.first_token_time for m in metrics)) / (num_tokens - 1)


class TokenTimes:
    """A streamer for transformers that keeps when each token came. It is handed the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, token_ids: torch.Tensor) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        pass


def decode_with_transformers(model: Any, prompt: list[int], num_tokens: int) -> float:
    """Seconds a step, from the first token to the end."""
    token_ids, streamer = torch.tensor([prompt]), TokenTimes()
    model.generation_config.eos_token_id = None
    settings = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0}
    model.generate(token_ids, attention_mask=torch.ones_like(token_ids), streamer=streamer, **settings)
    return (streamer.times[-1] - streamer.times[1]) / (len(streamer.times) - 2)


if __name__ == "__main__":
    sys.exit(exit_code(main))
