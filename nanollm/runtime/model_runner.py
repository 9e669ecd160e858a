"""ModelRunner: one rank's model, KV cache and rows, and the step that uses them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanollm.config import EngineConfig, ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.precompile import compiling_in_parallel, launching_nothing, start_compiler
from nanollm.layers.attention import attention_backend, bind_kv_cache, use_attention_backend
from nanollm.layers.sampler import Sampler
from nanollm.models.loader import load_weights
from nanollm.models.registry import import_model
from nanollm.models.source import ModelSource
from nanollm.outputs import TokenLogprobs
from nanollm.runtime.cuda_graphs import DecodeSteps, capture_sizes
from nanollm.runtime.host_memory import host_memory
from nanollm.runtime.kv_cache import (
    allocate_kv_cache,
    available_cpu_bytes,
    available_gpu_bytes,
    block_bytes,
    num_kv_blocks,
)
from nanollm.runtime.mixed_steps import MAX_GRAPHS, MixedSteps, longest_padded
from nanollm.runtime.rows import RowState
from nanollm.runtime.step_plan import SamplePlan, StepPlan, StepResult

_POLL_SECONDS = 20e-6
_CHECK_SECONDS = 0.05
_BYTES_PER_GRAPH = 8 * 2**20


@dataclass
class PendingResult:
    """A launched step's results on their way to the host, which has them once `done`: ids [S], log probabilities as of
    Sampler.token_logprobs, num_top of the likeliest for each token that has any, and logits."""

    ids_S: Tensor
    logprobs: Tensor | None
    num_top: list[int]
    logits: Tensor | None
    done: torch.cuda.Event | None

    def wait(self, timeout: float, check: Callable[[], None] = lambda: None) -> StepResult:
        """The result; polls, since blocking inside CUDA would hold off signals and other ranks' errors.

        check is called now and then, and may raise. TimeoutError after `timeout` seconds.
        """
        _wait(self.done, timeout, check)
        logprobs = [] if self.logprobs is None else self.logprobs.tolist()
        return StepResult(self.ids_S.tolist(), self.logits, list(map(_token_logprobs, logprobs, self.num_top)))


@dataclass
class WaitingStep:
    """A step whose sampling waits for a SamplePlan. logits_r: of its sampled rows. sample: queues it, given logits.

    gathered: whole logits of plan.processed, float32, on their way to the host, which has them once `done`; for rank 0.
    """

    plan: StepPlan
    logits_r: Tensor
    sample: Callable[[Tensor], tuple[Any, ...]]
    gathered: Tensor | None
    done: torch.cuda.Event | None

    def wait(self, timeout: float, check: Callable[[], None] = lambda: None) -> Tensor:
        """The gathered logits; as PendingResult.wait."""
        assert self.gathered is not None
        _wait(self.done, timeout, check)
        return self.gathered


class ModelRunner:
    """Runs one rank's share of every step.

    Loads the weights and finds out how many KV blocks fit here: max_kv_blocks. After allocate_kv_cache, with what fits
    on every rank, it executes plans in order: launch() returns when the work is queued on the device. A step that waits
    for a SamplePlan is sampled by sample(), before the next is launched.
    check is called between tensors and while waiting for the device during start-up, and may raise.
    """

    num_kv_blocks: int

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        tp: TPGroup,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self.model_config = config, source.config
        model_config = source.config
        self.tp = tp
        self.device = device
        self.dtype = resolve_dtype(config.dtype, model_config, device)
        self.max_model_len = resolve_max_model_len(config, model_config)
        self.heads = HeadPartition(model_config.num_heads, model_config.num_kv_heads, tp.size, tp.rank)
        compiler = start_compiler(device)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(device):
                self.model = import_model(source.model_class)(model_config, tp, self.max_model_len)
        finally:
            torch.set_default_dtype(default_dtype)
        num_rows = config.num_rows
        head = self.model.lm_head
        vocab = range(head.start, head.start + len(head.weight))
        max_blocks = -(-(self.max_model_len + 1) // self.block_size)
        self.rows = RowState(num_rows, max_blocks, self.block_size, vocab, device)
        last_token_R = self.rows.state.last_token_R
        real = vocab[: head.num_rows]
        sampler = Sampler(self.rows.sampler, last_token_R, real, tp, config.logprobs_mode)
        sizes = capture_sizes(num_rows) if device.type == "cuda" else []
        self.decode = DecodeSteps(self.model, self.rows, sampler, num_rows, sizes)
        self.attention_backend = attention_backend(
            config.attention_backend, self.heads, model_config.head_dim, self.block_size, self.dtype, device
        )
        use_attention_backend(self.model, self.attention_backend)
        on_gpu = self.attention_backend.name != "torch"
        capture = on_gpu and tp.capturable and not config.enforce_eager
        self.captured = sizes if capture else []
        max_padded = longest_padded(self.model.weights_per_token(), config.max_num_batched_tokens) if on_gpu else 0
        self.mixed = MixedSteps(self.model, self.rows, sampler, num_rows, max_padded, capture=capture)
        if device.type == "cuda":
            largest, small_cache = self._largest_step()
            bind_kv_cache(self.model, small_cache)
        with compiling_in_parallel(device, tp.size):
            if on_gpu:
                compiler.join()
                self._compile(largest)
            self._load_weights(source, check)
        sharing = tp.size if tp.is_gloo else 1  # over gloo ranks share the CPU; or a GPU, in tests
        available = available_cpu_bytes(config, sharing)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.launch(largest).wait(config.step_timeout, check)  # so that memory statistics know its peak
            # The real cache takes the place of the small one.
            available = available_gpu_bytes(config, device, sharing) + small_cache.nbytes - self._graph_bytes()
        per_block = block_bytes(model_config, self.heads, self.block_size, self.dtype)
        self.max_kv_blocks = num_kv_blocks(config, per_block, self.max_model_len, available)

    @property
    def block_size(self) -> int:
        assert self._config.block_size is not None
        return self._config.block_size

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make the KV cache of `num_blocks` blocks and give it to the attention layers."""
        self.num_kv_blocks = num_blocks
        bind_kv_cache(self.model, torch.empty(self.model_config.num_layers, 2, 0))  # the profile's is given back
        cache = allocate_kv_cache(num_blocks, self.block_size, self.model_config, self.heads, self.dtype, self.device)
        bind_kv_cache(self.model, cache)
        if self.captured:
            with torch.inference_mode():
                self.capture_seconds = self.decode.capture(self.captured)

    def _load_weights(self, source: ModelSource, check: Callable[[], None]) -> None:
        """ValueError on a CPU without room for them; the system would end the process."""
        if self.device.type == "cpu":
            needed, free = sum(parameter.nbytes for parameter in self.model.parameters()), host_memory().available
            if needed > free:
                raise ValueError(
                    f"a rank's {self.dtype} weights take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of "
                    "memory are free: take a smaller model, or dtype='bfloat16'"
                )
        shapes = {part.name: part.shape for part in self.model.tensor_parts()}
        checkpoint = source.open_checkpoint(shapes, seed=self._config.seed, dtype=self.dtype, device=self.device)
        self.model.untie_if_heads_differ(checkpoint)
        load_weights(self.model, checkpoint, show_progress=self.tp.rank == 0, check=check)
        checkpoint.close()
        if self.device.type == "cpu" and self.dtype == torch.float32:
            store_by_columns(self.model)

    @torch.inference_mode()
    def _compile(self, largest: StepPlan) -> None:
        """Go through every kind of step without computing it, so that its kernels compile while the weights load."""
        with self.model.few_layers(), launching_nothing():
            self.mixed.launch_all(largest)
            self.decode.launch_all()

    def _largest_step(self) -> tuple[StepPlan, Tensor]:
        """The largest step there can be, and a cache that holds just that, for as long as there is no other."""
        config = self._config
        length = min(config.max_num_batched_tokens, self.max_model_len)
        whole, rest = divmod(config.max_num_batched_tokens, length)
        counts = np.array([length] * whole + [rest] * (rest > 0), np.int32)[: config.num_rows]
        num_blocks = -(-counts // self.block_size)
        cache = allocate_kv_cache(
            int(num_blocks[0]), self.block_size, self.model_config, self.heads, self.dtype, self.device
        )
        rows, zeros = np.arange(len(counts), dtype=np.int32), np.zeros_like(counts)
        logit_rows = np.arange(min(config.max_num_seqs, counts.sum()), dtype=np.int32)
        plan = replace(
            StepPlan.empty(0),
            row_ids_B=rows,
            num_new_B=counts,
            num_computed_B=zeros,
            on_device_B=zeros,
            host_tokens=np.zeros(counts.sum(), np.int32),
            append_rows=rows,
            append_starts=zeros,
            append_counts=num_blocks,
            append_blocks=np.concatenate([np.arange(n, dtype=np.int32) for n in num_blocks]),
            logit_rows_L=logit_rows,
            sampled_rows_S=np.resize(rows, len(logit_rows)),
        )
        return plan, cache

    def describe(self) -> str:
        """One line for the log: what runs, how, and how much fits."""
        graphs = "no CUDA graphs"
        if self.captured:
            graphs = f"CUDA graphs of {len(self.captured)} batch sizes, captured in {self.capture_seconds:.1f} s"
        tokens = self.num_kv_blocks * self.block_size
        attention = self.attention_backend
        return (
            f"{self.model_config.architecture}, {str(self.dtype).removeprefix('torch.')} on {self.device.type}, "
            f"{self.tp.describe()}; {attention.name} attention ({attention.why}); {graphs}; KV cache "
            f"{tokens} tokens, {tokens / self.max_model_len:.1f} sequences of max_model_len {self.max_model_len}"
        )

    @torch.inference_mode()
    def _graph_bytes(self) -> int:
        """Memory that the CUDA graphs will take: the largest, whose pools the others share, and a little for each."""
        if not self.captured:
            return 0
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(self.device)[0]
        self.decode.capture(self.captured[-1:])
        self.mixed.capture_largest()
        used = before - torch.cuda.mem_get_info(self.device)[0]
        self.decode.forget()
        self.mixed.forget()
        torch.cuda.empty_cache()
        return used + (len(self.captured) + MAX_GRAPHS) * _BYTES_PER_GRAPH

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingResult | WaitingStep:
        """Queue one step on the device: forward, then, unless it has to wait, what sample() does."""
        steps: DecodeSteps | MixedSteps = self.decode if self.decode.takes(plan) else self.mixed
        logits_r, sample = steps.forward(plan)
        if not plan.waits:
            return self._bring(plan, *sample(logits_r))
        gathered = done = None
        if len(plan.processed):
            gathered = self.model.lm_head.gather(logits_r[self.rows.to_device(plan.processed.astype(np.int64))])
            if self.device.type == "cuda":
                gathered, done = _to_host(gathered), torch.cuda.Event()
                done.record()
        return WaitingStep(plan, logits_r, sample, gathered, done)

    @torch.inference_mode()
    def sample(self, step: WaitingStep, plan: SamplePlan) -> PendingResult:
        """Queue the sampling, then the copy of its tokens to the host. plan: this rank's share of it."""
        if len(plan.masks):
            self.rows.set_masks(step.plan, plan.masks)
        logits_r = step.logits_r
        if len(plan.logits):
            index = self.rows.to_device(step.plan.processed.astype(np.int64))
            given = self.rows.to_device(plan.logits.view(np.float32).reshape(len(index), -1))
            logits_r = logits_r.to(torch.float32, copy=True)  # log probabilities are of those that were
            num_real = self.model.lm_head.num_rows
            logits_r[index, :num_real] = given[:, :num_real]
        return self._bring(step.plan, *step.sample(logits_r))

    def share(self, plan: SamplePlan, step: StepPlan, rank: int) -> SamplePlan:
        """What of a SamplePlan concerns this rank."""
        num_words = len(self.model.lm_head.weight) // 32
        words = slice(rank * num_words, (rank + 1) * num_words)
        return plan.share(words, len(step.masked), len(step.processed))

    def _bring(
        self, plan: StepPlan, ids_S: Tensor, logprobs: Tensor | None, logits: Tensor | None = None
    ) -> PendingResult:
        num_top = plan.num_logprobs_L[plan.num_logprobs_L >= 0].tolist()
        if self.device.type == "cpu":
            return PendingResult(ids_S, logprobs, num_top, logits, None)
        host_ids_S = _to_host(ids_S)
        host_logprobs, host_logits = (None if x is None else _to_host(x) for x in (logprobs, logits))
        done = torch.cuda.Event()
        done.record()
        return PendingResult(host_ids_S, host_logprobs, num_top, host_logits, done)


def _token_logprobs(numbers: list[float], num_top: int) -> TokenLogprobs:
    logprob, rank, *top = numbers
    ids = [int(token_id) for token_id in top[len(top) // 2 :][:num_top]]
    return TokenLogprobs(logprob, int(rank), ids, top[:num_top])


def store_by_columns(model: torch.nn.Module) -> None:
    """Lay every matrix out column by column: so MKL multiplies 4 to 64 rows 10 to 30 % faster, in float32 only."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.t().contiguous().t()


def _wait(done: torch.cuda.Event | None, timeout: float, check: Callable[[], None]) -> None:
    start = checked = time.monotonic()
    while done is not None and not done.query():
        time.sleep(_POLL_SECONDS)
        if (now := time.monotonic()) - checked > _CHECK_SECONDS:
            check()
            checked = now
            if now - start > timeout:
                raise TimeoutError(f"a step took more than step_timeout = {timeout:g} s")


def _to_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def resolve_dtype(dtype: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that "auto" means here; ValueError if this GPU can't do what was asked for."""
    bf16_works = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if bf16_works and model_config.dtype != "float16" else torch.float16
    if dtype == "bfloat16" and not bf16_works:
        raise ValueError("dtype 'bfloat16' is not supported by this GPU: use dtype='float16'")
    return getattr(torch, dtype)


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The user's max_model_len, or the model's. Longer than the model's is an error that names both."""
    rope = model_config.rope
    longest = model_config.max_position
    if rope.rope_type in ("yarn", "linear"):  # stretched contexts may or may not be in max_position_embeddings already
        longest = max(longest, int(rope.original_max_position * rope.factor))
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ValueError(
            f"max_model_len {config.max_model_len} is longer than the model's {longest} positions: lower it, or set "
            "rope scaling through hf_overrides"
        )
    return config.max_model_len
