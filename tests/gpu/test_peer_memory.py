"""All-reduce through peers' memory on GPUs: ranks that are streams of one process, processes on one GPU, and real ones.

Several GPUs are used where there are any, with NCCL beside; the rest needs one.
"""

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from nanollm import LLM, EngineDeadError, SamplingParams
from nanollm.distributed.all_reduce import Limits, PeerCollectives
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.all_reduce import BUFFERS, PeerMemory, empty_buffers
from nanollm.kernels.precompile import compiling_in_parallel, launching_nothing
from tests.conftest import random_prompt
from tests.distributed import lockstep
from tests.kernels import peers
from tests.test_structured_outputs import all_tokens, byte_settings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
NUM_GPUS = torch.cuda.device_count()
BUFFER_BYTES = 32 * 2**20
BF16 = [torch.bfloat16]


class Streams:
    """Ranks as streams of this process, on one GPU. An abort ends what would hang, after `seconds`."""

    def __init__(self, num_ranks: int, seconds: float = 300.0) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        nbytes = BUFFERS * BUFFER_BYTES
        self.memory = torch.empty(num_ranks, nbytes, dtype=torch.uint8, device=device)
        self.unsent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        empty_buffers(self.memory)
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        addresses = [m.data_ptr() for m in self.memory]
        self.ranks = [
            PeerMemory.of(rank, addresses, self.abort, nbytes, device, share=2 * num_ranks) for rank in range(num_ranks)
        ]
        # Memory where nothing is ever missing, so kernels can be loaded by running them there, one rank at a time.
        self.idle = [
            PeerMemory.of(rank, [self.unsent.data_ptr()] * num_ranks, self.abort, nbytes, device, share=2 * num_ranks)
            for rank in range(num_ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        for stream in self.streams:  # so that no call has to ask the driver for memory while another rank polls
            with torch.cuda.stream(stream):
                kept = [torch.empty(n, device=device) for n in (2**16,) * 6 + (2**21,) * 8]
                del kept
        self._watchdog = threading.Timer(seconds, lambda: self.abort.fill_(1))
        self._watchdog.daemon = True
        self._watchdog.start()

    def load(self, call: peers.Call, inputs: peers.Inputs) -> None:
        """A kernel that loads while another polls would wait for it forever; a stream's memory comes from here too."""
        self.unsent.zero_()
        torch.cuda.synchronize()
        for idle, stream in zip(self.idle, self.streams, strict=True):
            with torch.cuda.stream(stream):
                inputs.run(call, idle)
            stream.synchronize()
            self.unsent.zero_()
            torch.cuda.synchronize()

    def run(self, call: peers.Call, inputs: peers.Inputs, before: Callable[[int], None] = lambda rank: None) -> Any:
        """All ranks at once; returns each one's outputs."""
        outputs = []
        for peer_memory, stream in zip(self.ranks, self.streams, strict=True):
            with torch.cuda.stream(stream):
                before(peer_memory.rank)
                outputs.append(inputs.run(call, peer_memory))
        torch.cuda.synchronize()
        assert not self.abort.item(), f"{call} hung"
        return outputs

    def close(self) -> None:
        self._watchdog.cancel()


@pytest.fixture
def streams() -> Iterator[Callable[[int], Streams]]:
    made = []

    def make(num_ranks: int) -> Streams:
        made.append(Streams(num_ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_same_bits(outputs: list[list[Tensor]], call: peers.Call) -> None:
    for rank in range(1, len(outputs)):
        for ours, theirs in zip(outputs[0], outputs[rank], strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"ranks 0 and {rank}: {call}"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_streams_as_ranks_at_the_edges(streams: Callable[[int], Streams], num_ranks: int) -> None:
    """Every dtype, widths that don't divide, more rows than programs, and more than a buffer holds."""
    group = streams(num_ranks)
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    calls = peers.edge_calls([1024, 1023, 5120, 33, 8192], dtypes, 600)
    large = [peers.Call(kind, 2000, 8192, torch.bfloat16, True, True) for kind in ("one_shot", "two_shot")]
    # At most three pieces: idle memory has nothing missing only in the first turn of each buffer.
    for call in [*calls, *large, *calls[:6]]:
        inputs = peers.Inputs.of(call, num_ranks, "cuda")
        group.load(call, inputs)
        outputs = group.run(call, inputs)
        inputs.check(call, outputs[0])
        assert_same_bits(outputs, call)
    assert all(peers.is_empty(m) for m in group.memory)


@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 10_000), (4, 3_000), (8, 1_000)])
def test_many_random_calls_with_ranks_that_are_late(
    streams: Callable[[int], Streams], num_ranks: int, num_calls: int
) -> None:
    group, draw, loaded = streams(num_ranks), random.Random(0), set()

    def be_late(rank: int) -> None:
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randint(1, 40_000))  # up to 20 us

    def variant(call: peers.Call) -> tuple[object, ...]:
        """All that kernels are compiled for: also which ranks have parts, how many warps, parts 16 values apart."""
        few, aligned = call.num_rows <= 8, call.num_rows * call.size % 16 == 0
        if call.kind == "choice":
            return (call.kind,)
        return call.kind, call.size, call.add, call.norm, call.add and call.seed % 3, few, aligned

    torch.cuda._sleep(1)
    calls = [peers.Call.draw(seed, [1024, 1023, 8192], BF16, 512) for seed in range(num_calls)]
    if num_ranks == 8:  # takes long to compile
        calls = [call for call in calls if call.kind != "two_shot" or call.size != 8192]
    with compiling_in_parallel(group.memory.device, 1), launching_nothing():
        for call in {variant(call): call for call in calls}.values():
            inputs = peers.Inputs.of(call, num_ranks, "cuda")
            for idle in group.idle:
                inputs.run(call, idle)
    for call in calls:
        inputs = peers.Inputs.of(call, num_ranks, "cuda")
        if variant(call) not in loaded:
            group.load(call, inputs)
            loaded.add(variant(call))
        torch.cuda.synchronize()
        outputs = group.run(call, inputs, be_late)
        if call.seed % 10 == 0 or call.seed < 200:  # what is wrong stays wrong: the buffers would not be empty
            inputs.check(call, outputs[0])
        assert_same_bits(outputs, call)
    assert all(peers.is_empty(m) for m in group.memory)


def test_graphs_between_eager_calls(streams: Callable[[int], Streams]) -> None:
    """Replays count turns on as eager calls do, and a large one leaves nothing behind for a small one."""
    group = streams(2)
    captured = [
        peers.Call("one_shot", 256, 4096, torch.bfloat16, True, True, seed=1),
        peers.Call("choice", 256, 0, torch.bfloat16, seed=2),
        peers.Call("two_shot", 100, 4096, torch.bfloat16, True, True, seed=3),
        peers.Call("one_shot", 1, 4096, torch.bfloat16, True, True, seed=4),
    ]
    eager = peers.Call("one_shot", 7, 4096, torch.bfloat16, True, True, seed=5)
    inputs = {call: peers.Inputs.of(call, 2, "cuda") for call in [*captured, eager]}
    for call, given in inputs.items():
        group.load(call, given)
    graphs, outputs = [], []
    for peer_memory, stream in zip(group.ranks, group.streams, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            outputs.append([inputs[call].run(call, peer_memory) for call in captured])
    for _ in range(50):
        for graph, stream in zip(graphs, group.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for i, call in enumerate(captured):
            inputs[call].check(call, outputs[0][i])
            assert_same_bits([outputs[0][i], outputs[1][i]], call)
            for out in [*outputs[0][i], *outputs[1][i]]:
                out.zero_()
        found = group.run(eager, inputs[eager])
        inputs[eager].check(eager, found[0])
    assert not group.abort.item() and all(peers.is_empty(m) for m in group.memory)


def test_an_abort_ends_a_wait_of_many_kernels_soon(streams: Callable[[int], Streams]) -> None:
    group = streams(2)
    call = peers.Call("one_shot", 64, 4096, torch.bfloat16, True, True)
    inputs = peers.Inputs.of(call, 2, "cuda")
    group.load(call, inputs)
    with torch.cuda.stream(group.streams[0]):
        for _ in range(100):
            inputs.run(call, group.ranks[0])
    time.sleep(0.2)
    assert not group.streams[0].query()
    start = time.monotonic()
    group.abort.fill_(1)
    group.streams[0].synchronize()
    assert time.monotonic() - start < 1.0


def on_gpus(size: int, check: Callable[..., None], *args: Any) -> None:
    """check(tp, *args) on `size` processes: each on a GPU of its own over NCCL if there are enough, else on one."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_on_gpu, (size, str(Path(directory) / "store"), check, args), nprocs=size)


def _on_gpu(rank: int, size: int, store: str, check: Callable[..., None], args: tuple[Any, ...]) -> None:
    apart = torch.cuda.device_count() >= size
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not apart:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank if apart else 0)
    torch.cuda.set_device(device)
    tp = TPGroup.join(rank, size, device, "nccl" if apart else "gloo", 120.0, store)
    assert isinstance(tp.peers, PeerCollectives), tp.peers
    check(tp, *args)
    tp.leave()


def check_random_calls(tp: TPGroup, num_calls: int, num_replays: int) -> None:
    assert isinstance(tp.peers, PeerCollectives)
    late = random.Random(tp.rank)
    inner = TPGroup.join(tp.rank, tp.size, torch.device("cuda", torch.cuda.current_device()), "gloo", 60.0)
    assert isinstance(inner.peers, PeerCollectives), inner.peers  # a second engine, with memory of its own
    calls = [peers.Call.draw(seed, [1024, 1023, 4096], BF16, 300) for seed in range(num_calls)]
    for seed, call in enumerate(calls):
        inputs = peers.Inputs.of(call, tp.size, "cuda")
        if late.random() < 0.3:
            torch.cuda._sleep(late.randint(1, 100_000))
        group = inner.peers if seed % 7 == 3 else tp.peers
        outputs = inputs.run(call, group._peers)
        inputs.check(call, outputs)
        if seed % 10 == 0:
            for out in outputs:
                copies = tp.all_gather(out.view(torch.uint8))
                assert all(torch.equal(copies[0], copy) for copy in copies), call
    captured = peers.Call("one_shot", 32, 4096, torch.bfloat16, True, True)
    inputs = peers.Inputs.of(captured, tp.size, "cuda")
    inputs.run(captured, tp.peers._peers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = [inputs.run(captured, tp.peers._peers) for _ in range(5)]
    for count in range(num_replays):
        if late.random() < 0.02:
            torch.cuda._sleep(late.randint(1, 100_000))
        graph.replay()
        if (num_replays - 1 - count) % 10_000 == 0:
            for found in replayed:
                inputs.check(captured, found)
                found[0].zero_()
    torch.cuda.synchronize()
    tp.all_gather(torch.zeros(1, device="cuda"))  # all have ended
    assert all(peers.is_empty(group._kept[0]) for group in (tp.peers, inner.peers))
    inner.leave()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_that_share_a_gpu_or_have_one_each(size: int) -> None:
    apart = size <= NUM_GPUS
    on_gpus(size, check_random_calls, 2_000 if apart else 60, 200_000 if apart else 3)  # 5 calls a replay


def check_against_nccl(tp: TPGroup) -> None:
    """10,000 sums of small whole numbers, which every order of summation gives exactly, through both ways."""
    assert isinstance(tp.peers, PeerCollectives)
    through_peers, late = tp.peers, random.Random(tp.rank)
    for seed in range(10_000):
        draw = random.Random(seed)
        through_peers.limits = Limits(2**62, 2**62) if seed % 3 else Limits(0, 2**62)
        generator = torch.Generator("cuda").manual_seed(100 * seed + tp.rank)
        shape = (draw.choice([1, 2, 16, 32, 256]), draw.choice([1024, 4096]))
        x = torch.randint(-8, 8, shape, generator=generator, device="cuda").bfloat16()
        if late.random() < 0.1:
            torch.cuda._sleep(late.randint(1, 100_000))
        ours = tp.all_reduce(x)
        tp.peers = "NCCL's turn"
        theirs = tp.all_reduce(x.clone())
        tp.peers = through_peers
        assert torch.equal(ours, theirs), seed


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs")
def test_sums_are_those_of_nccl() -> None:
    on_gpus(min(NUM_GPUS, 8), check_against_nccl)


def check_every_way(tp: TPGroup, path: str, expected: list[list[list[int]]]) -> None:
    assert isinstance(tp.peers, PeerCollectives)
    device = str(torch.device("cuda", torch.cuda.current_device()))
    for limits in (Limits(2**62, 2**62), Limits(0, 2**62)):  # all in one shot, all in two
        tp.peers.limits = limits
        engine = lockstep.Engine(path, tp, device=device, enforce_eager=True)
        with lockstep.hidden_states_compared(tp) as count:
            assert engine.run(lockstep.GREEDY)[0] == expected[0]
        assert count[0] > 0
        engine = lockstep.Engine(path, tp, device=device)
        assert engine.runner.captured
        assert [engine.run(lockstep.GREEDY)[0], engine.run(lockstep.SEEDED)[0]] == expected


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_models_give_one_ranks_tokens_in_one_shot_and_two_eager_and_in_graphs(tiny: Any, size: int) -> None:
    path = tiny("qwen3", num_attention_heads=8, num_key_value_heads=4).path
    alone = lockstep.Engine(path, TPGroup(), device=f"cuda:{torch.cuda.current_device()}")
    expected = [alone.run(lockstep.GREEDY)[0], alone.run(lockstep.SEEDED)[0]]
    del alone
    on_gpus(size, check_every_way, path, expected)


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=6) for length in (1, 16, 17, 40)]


@pytest.fixture
def ranks_share_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Where there are fewer GPUs than ranks, over gloo: about 2 ms for each all-reduce."""

    def share(size: int) -> None:
        if size > NUM_GPUS:
            monkeypatch.setenv("NANOLLM_RANKS_SHARE_GPUS", "1")
            monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

    return share


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(("kind", "size"), [("qwen3", 2), ("qwen3", 3), ("qwen3", 4), ("qwen3_moe", 2)])
def test_engines_give_one_ranks_tokens_with_and_without_graphs(
    tiny: Any, ranks_share_gpus: Callable[[int], None], kind: str, size: int
) -> None:
    """One engine after the other, in one process whose workers are new ones each time."""
    ranks_share_gpus(size)
    model = tiny(kind, num_attention_heads=8, num_key_value_heads=4, num_experts=16)
    settings = {"device": "cuda", "max_num_seqs": 4}
    with model.llm(**settings) as llm:
        expected = [tokens(llm, GREEDY), tokens(llm, SEEDED)]
    for enforce_eager in (True, False):
        with model.llm(tensor_parallel_size=size, enforce_eager=enforce_eager, **settings) as llm:
            runner = llm._executor.runner
            assert "through the peers' memory" in runner.describe()
            assert bool(runner.captured) is not enforce_eager
            assert [tokens(llm, GREEDY), tokens(llm, SEEDED)] == expected
    with model.llm(tensor_parallel_size=size, disable_custom_all_reduce=True, **settings) as llm:
        assert "disable_custom_all_reduce is set" in llm._executor.runner.describe()
        assert [tokens(llm, GREEDY), tokens(llm, SEEDED)] == expected
    # NCCL's, which keep a process from ending as long as they run.
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "nccl" in name.lower()]


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_grammars_and_filters_give_one_ranks_tokens(
    tiny: Any, tmp_path: Path, ranks_share_gpus: Callable[[int], None], size: int, logprobs_mode: str
) -> None:
    ranks_share_gpus(size)
    model = tiny("qwen3", num_attention_heads=8, num_key_value_heads=4)
    settings = {"device": "cuda", "logprobs_mode": logprobs_mode} | byte_settings(tmp_path)
    filtered = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "top_p": 0.8, "logprobs": 2}
    rows = [
        SamplingParams(**filtered | some)
        for some in (
            {"structured_outputs": {"regex": "[a-f ]{30}"}},
            {"structured_outputs": {"regex": "[a-f ]{30}"}, "top_p": 1.0, "top_k": 5},
            {"structured_outputs": {"regex": "[a-f ]{30}"}, "presence_penalty": 1.5},
            {"repetition_penalty": 1.3},
        )
    ]

    def drawn(llm: LLM) -> tuple[Any, list[float]]:
        found = [output.outputs[0] for output in llm.generate(PROMPTS, rows, use_tqdm=False)]
        return (all_tokens(llm), [one.token_ids for one in found]), [one.cumulative_logprob or 0.0 for one in found]

    with model.llm(**settings) as llm:
        expected, logprobs = drawn(llm)
    with model.llm(tensor_parallel_size=size, **settings) as llm:
        found, its_logprobs = drawn(llm)
    assert found == expected and its_logprobs == pytest.approx(logprobs, abs=1e-2)


def test_a_rank_killed_in_a_graph_replay_ends_the_engine_and_frees_the_gpu(
    tiny: Any, ranks_share_gpus: Callable[[int], None]
) -> None:
    ranks_share_gpus(2)
    llm = tiny("qwen3").llm(device="cuda", max_num_seqs=2, tensor_parallel_size=2)
    worker = llm._executor.ranks.processes[0].pid
    threading.Timer(1.0, os.kill, (worker, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
        while time.monotonic() - start < 60:
            tokens(llm, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    assert time.monotonic() - start < 20
    torch.cuda.synchronize()  # no kernel polls any more
    with contextlib.closing(tiny("qwen3").llm(device="cuda", max_num_seqs=2, tensor_parallel_size=2)) as again:
        assert len(tokens(again, GREEDY)) == len(PROMPTS)
