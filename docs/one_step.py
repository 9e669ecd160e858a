"""Fills the boxes of docs/one_step.md, where one prompt is followed through the engine, with what the engine says.

`python docs/one_step.py` does it in place; a test fails when the page says something else than the code does. The model
is Qwen3-4B in its true shapes on PyTorch's "meta" device, where tensors have a shape and no memory.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass, tree_map_only

from nanollm.cli import default_model
from nanollm.config import NAMED_SHAPES, EngineConfig, ModelConfig
from nanollm.distributed import tp_group
from nanollm.distributed.partition import HeadPartition
from nanollm.distributed.tp_group import TPGroup
from nanollm.engine.scheduler import Scheduler
from nanollm.engine.sequence import Sequence, check_token_ids
from nanollm.kernels.token_rules import RowLogits, SamplerState
from nanollm.layers import attention, hidden, linear, sampler
from nanollm.layers.attention import bind_kv_cache
from nanollm.layers.hidden import Hidden
from nanollm.layers.linear import ColumnParallelLinear
from nanollm.layers.norm import RMSNorm
from nanollm.layers.step_batch import StepBatch
from nanollm.models.qwen3 import Qwen3ForCausalLM
from nanollm.runtime.cuda_graphs import DecodeSteps
from nanollm.runtime.kv_cache import allocate_kv_cache
from nanollm.runtime.mixed_steps import MixedSteps
from nanollm.runtime.rows import RowState
from nanollm.runtime.step_plan import StepPlan, StepResult
from nanollm.sampling_params import SamplingParams
from nanollm.text.output_processor import OutputProcessor
from nanollm.text.tokenizer import encode_prompt, load_tokenizer

PAGE = Path(__file__).with_suffix(".md")
PROMPT = "The largest of all the planets in our own solar system is"
ANSWER = " Jupiter"
MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 4096, 16, 8, 4
META = torch.device("meta")
for tensors in (RowLogits, SamplerState):
    register_dataclass(tensors)
KERNELS = {
    hidden: ["rms_norm"],
    tp_group: ["rms_norm", "add_rms_norm"],
    attention: ["qkv_to_cache", "paged_attention"],
    linear: ["silu_mul"],
    sampler: ["tile_stats", "draw"],
}


@dataclass(frozen=True)
class Line:
    """A layer or kernel that ran: what it took, what it gave."""

    name: str
    taken: str
    given: str
    weight: str = ""

    def __str__(self) -> str:
        return f"{self.name:<20} {self.taken:<14} -> {self.given:<14} {self.weight}".rstrip()


class Rank:
    """What ModelRunner has, on the meta device."""

    def __init__(self, config: ModelConfig) -> None:
        torch.set_default_dtype(torch.bfloat16)
        with META:
            self.model: Any = Qwen3ForCausalLM(config, TPGroup(), MAX_MODEL_LEN)
        torch.set_default_dtype(torch.float32)
        heads = HeadPartition(config.num_heads, config.num_kv_heads, tp=1, rank=0)
        shape = (config.head_dim, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
        attention.use_attention_backend(self.model, attention.attention_backend("torch", heads, *shape))
        bind_kv_cache(self.model, allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, config, heads, torch.bfloat16, META))
        self.steps = Steps(self.model, META)

    def step(self, plan: StepPlan) -> list[Line]:
        """Returns what ran, in the order in which it finished."""
        with traced(self.model) as lines:
            self.steps.launch(plan, token_id=0)
        return lines


class Steps:
    """What ModelRunner.launch does, with the rows' state on any device."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        vocab = range(len(model.lm_head.weight))
        self.rows = RowState(NUM_ROWS, -(-(MAX_MODEL_LEN + 1) // BLOCK_SIZE), BLOCK_SIZE, vocab, device)
        last_token_R = self.rows.state.last_token_R
        sampling = sampler.Sampler(self.rows.sampler, last_token_R, vocab, TPGroup(), "raw_logprobs")
        self.decode = DecodeSteps(model, self.rows, sampling, NUM_ROWS, sizes=[])
        self.mixed = MixedSteps(model, self.rows, sampling, NUM_ROWS, max_padded=0, capture=False)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, token_id: int) -> None:
        """token_id: what row 0 shall have sampled, as weights that aren't there can't say."""
        steps = self.decode if self.decode.takes(plan) else self.mixed
        logits_r, sample = steps.forward(plan)
        sample(logits_r)
        self.rows.state.last_token_R[0] = token_id


class Onlooker:
    """In the model's place: keeps the batch that it is given."""

    class Head:
        weight = torch.zeros(1, 1)

        def __call__(self, hidden: Hidden, out: Tensor | None = None) -> Tensor:
            return torch.zeros(1, 1)

    lm_head = Head()

    def hidden(self, batch: StepBatch) -> Hidden:
        self.batch = batch
        return Hidden(torch.zeros(1, 1), None)


@contextmanager
def traced(model: nn.Module) -> Iterator[list[Line]]:
    """Collect a Line for each layer with a weight and for each kernel, whose name is indented."""
    lines: list[Line] = []
    known: dict[tuple[str, ...], Any] = {}

    def watch(path: str, module: nn.Module) -> Any:
        return module.register_forward_hook(
            lambda module, taken, given: lines.append(Line(path, shapes(taken[0]), shapes(given), weight(module)))
        )

    def on_zeros(kernel: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel looks at values, such as lengths, which meta tensors don't have: it runs on zeros on the CPU."""

        def run(*arguments: Any) -> Any:
            key = (kernel.__name__, *(shapes(value) for value in arguments if isinstance(value, Tensor)))
            if key not in known:  # every layer asks the same
                zeros = tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), arguments)
                known[key] = tree_map_only(Tensor, lambda tensor: tensor.to(META), kernel(*zeros))
            lines.append(Line(f"  {kernel.__name__}", shapes(arguments[0]), shapes(known[key])))
            return known[key]

        return run

    with ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                stack.enter_context(patch.object(module, name, on_zeros(getattr(module, name))))
        # These rows have no rules; without values it can't see that.
        stack.enter_context(
            patch.object(
                RowLogits, "processed", lambda rows: replace(rows, logits_SV=rows.logits_SV.float(), has_rules=False)
            )
        )
        stack.enter_context(patch.object(sampler, "advance_rows", lambda *arguments: None))
        for path, layer in model.named_modules():
            if list(layer.parameters(recurse=False)) and not isinstance(layer, RMSNorm):  # which computes nothing
                stack.callback(watch(path, layer).remove)
        yield lines


def shapes(value: Any) -> str:
    """The shape of a tensor; of a Hidden, its tokens'; of RowLogits, the logits'; of several, the first one's."""
    if isinstance(value, RowLogits):
        return shapes(value.logits_SV)
    if isinstance(value, Hidden):
        return shapes(value.residual_TD if value.pending_TD is None else value.pending_TD)
    return str(list(value.shape)) if isinstance(value, Tensor) else shapes(value[0])


def weight(module: nn.Module) -> str:
    described = f"weight {shapes(module.weight)}"
    if isinstance(module, ColumnParallelLinear):
        described += ": " + " + ".join(f"{name} {len(kept)}" for name, _, kept in module.outputs)
    return described


def split_layers(lines: list[Line], num_layers: int) -> tuple[list[Line], list[list[Line]], list[Line]]:
    """Cut a trace into what precedes the layers, the layers, each with names of its own, and what follows."""
    length = next(i for i, line in enumerate(lines) if line.name == "model.layers.0.mlp.down_proj")
    layers = []
    for i in range(num_layers):
        ours = lines[1 + i * length : 1 + (i + 1) * length]
        layers.append([replace(line, name=line.name.removeprefix(f"model.layers.{i}.")) for line in ours])
    return lines[:1], layers, lines[1 + num_layers * length :]


def check_claims(first: list[Line], second: list[Line], layers: list[list[Line]]) -> None:
    """What the page says in words only."""
    norms = [layer[0].name.strip() for layer in layers]
    if norms[0] != "rms_norm" or set(norms[1:]) != {"add_rms_norm"} or any(x[1:] != layers[0][1:] for x in layers):
        raise AssertionError("layers differ in more than their first norm: rewrite the page")
    shorter = [replace(x, taken=x.taken.replace("[12", "[1"), given=x.given.replace("[12", "[1")) for x in first]
    if shorter != second:
        raise AssertionError("the second step differs from the first in more than its number of tokens")


def plan_lines(plan: StepPlan) -> list[object]:
    return [f"{field.name:<15} {np.asarray(getattr(plan, field.name)).tolist()}" for field in fields(plan)]


def batch_lines(batch: StepBatch) -> list[object]:
    lines: list[object] = []
    for field in fields(batch):
        value, what = getattr(batch, field.name), ""
        if isinstance(value, Tensor):
            what, value = f"{str(value.dtype).removeprefix('torch.')} {shapes(value)}", value.tolist()
        numbers = str(value) if len(str(value)) < 72 else f"{str(value)[:24]} …"
        lines.append(f"{field.name:<16} {what:<15} {numbers}")
    return lines


def make_boxes() -> dict[str, list[object]]:
    """Run the prompt's first two steps; returns the lines of each box."""
    config = ModelConfig.from_hf(NAMED_SHAPES["qwen3-4b"])
    engine_config = EngineConfig("qwen3-4b", block_size=BLOCK_SIZE, max_num_seqs=NUM_ROWS)
    tokenizer = load_tokenizer(default_model())
    token_ids = encode_prompt(tokenizer, PROMPT)
    (answer_id,) = encode_prompt(tokenizer, ANSWER)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=16)

    scheduler, processor = Scheduler(engine_config, NUM_BLOCKS, MAX_MODEL_LEN), OutputProcessor(tokenizer)
    prompt = check_token_ids(token_ids, config.vocab_size)
    scheduler.add(Sequence(0, prompt, params, seed=1, max_model_len=MAX_MODEL_LEN))
    processor.add(0, "0", PROMPT, token_ids, params)
    rank, onlooker = Rank(config), Onlooker()
    seen = Steps(onlooker, torch.device("cpu"))  # where batches have values, not only shapes

    first = scheduler.schedule()
    assert first is not None
    seen.launch(first.plan, answer_id)
    first_batch = batch_lines(onlooker.batch)
    first_lines = rank.step(first.plan)
    before, layers, after = split_layers(first_lines, config.num_layers)

    second = scheduler.schedule()  # before the first step's token is read
    assert second is not None
    seen.launch(second.plan, answer_id)
    second_batch = batch_lines(onlooker.batch)
    check_claims(first_lines, rank.step(second.plan), layers)

    (engine_output,) = scheduler.update(first, StepResult([answer_id]), now=0.0)
    (request_output,), _ = processor.process([engine_output])
    return {
        "tokens": [f"{token_id:<6} {tokenizer.decode([token_id])!r}" for token_id in token_ids],
        "first plan": plan_lines(first.plan),
        "first batch": first_batch,
        "first layer": [*before, *layers[0]],
        "head": after[:-2],
        "sampling": after[-2:],
        "second plan": plan_lines(second.plan),
        "second batch": second_batch,
        "output": [
            f"EngineOutput   new_token_ids={engine_output.new_token_ids}, finish_reason={engine_output.finish_reason}",
            f"RequestOutput  text={request_output.outputs[0].text!r}, finished={request_output.finished}",
        ],
    }


def fill(page: str, boxes: dict[str, list[object]]) -> str:
    """Put each box where a comment with its name stands; KeyError or ValueError if the two don't match."""
    names = re.findall(r"<!-- (.+) -->", page)
    if sorted(names) != sorted(boxes):
        raise ValueError(f"the page has the boxes {names}, and there are {list(boxes)}")

    def box(match: re.Match[str]) -> str:
        return "\n".join([f"<!-- {match[1]} -->", "```", *map(str, boxes[match[1]]), "```"])

    return re.sub(r"<!-- (.+) -->\n```\n(?:.*\n)*?```", box, page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(), make_boxes()))
