"""The table of matmul cuts: what is in it can run and is obeyed, and it is about the shapes that layers have."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanollm.config import NAMED_SHAPES, ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels import backend, one_row_matmul, split_matmul
from nanollm.kernels.one_row_matmul import OneRow, default_one_row_cut, one_row_cut
from nanollm.kernels.split_matmul import ROW_BUCKETS, Tiles, default_tiles
from nanollm.layers.linear import LinearBase
from nanollm.models.qwen3 import Qwen3ForCausalLM
from tests.bench.test_throughput import ROOT

pytest.importorskip("triton")
sys.path.insert(0, str(ROOT / "bench"))  # as for a script there
from tune import different, linears, one_row_cuts

TABLES = sorted(backend.table_path("").parent.glob("*.json"))
SHARED_BYTES = {"NVIDIA_H200": 227 * 1024}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_cut_in_a_table_can_run(path: Path) -> None:
    for shape, found in json.loads(path.read_text()).items():
        gated = shape.endswith(" gated")
        size_out, size_in = map(int, shape.removesuffix(" gated").split("x"))
        assert {int(rows) for rows in found} <= {1, *ROW_BUCKETS}, shape
        for rows, cut in found.items():
            if rows == "1":
                assert OneRow(*cut).suit(size_out, gated=gated), shape
            elif cut is not None:
                tiles = Tiles(*cut)
                assert tiles.suit(size_out, size_in, gated=gated), (shape, rows)
                assert tiles.fit(SHARED_BYTES[path.stem]), (shape, rows)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_what_is_tuned_is_what_layers_multiply(name: str, tp: int) -> None:
    config = ModelConfig.from_hf(NAMED_SHAPES[name] | {"num_hidden_layers": 1})
    with torch.device("meta"):
        layer = Qwen3ForCausalLM(config, TPGroup(0, tp), 16).model.layers[0]
    shapes = [tuple(m.weight.shape) for m in layer.modules() if isinstance(m, LinearBase)]
    assert shapes == [(tuned.size_out, tuned.size_in) for tuned in linears(name, tp)]


@pytest.mark.parametrize("name", NAMED_SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_cuts_of_one_row_that_are_tried(name: str, tp: int) -> None:
    """A handful, the rule's first; each can run, and the others have a program for every multiprocessor."""
    for layer in linears(name, tp):
        cuts = one_row_cuts(layer, num_sms=132)
        assert cuts[0] == default_one_row_cut(layer.size_out, layer.size_in, layer.gated, 132)
        assert 3 <= len(cuts) == len(set(cuts)) <= 15
        assert all(cut.suit(layer.size_out, gated=layer.gated) for cut in cuts)
        assert all(layer.size_out // cut.outs >= 132 for cut in cuts[1:])


def test_layers_of_one_shape_with_and_without_a_gate_have_cuts_of_their_own(table: Path) -> None:
    """Qwen3-8B's QKV on one GPU has as many weights as a quarter of its gate and up."""
    layers = [*linears("qwen3-8b", 1), *linears("qwen3-8b", 4), *linears("qwen3-8b", 1)]
    same = [layer for layer in different(layers) if (layer.size_out, layer.size_in) == (6144, 4096)]
    assert [layer.gated for layer in same] == [False, True]
    table.write_text('{"6144x4096": {"1": [2, 512, 1]}, "6144x4096 gated": {"1": [8, 512, 1]}}')
    assert one_row_cut(6144, 4096, False, CPU) == OneRow(2, 512, 1)
    assert one_row_cut(6144, 4096, True, CPU) == OneRow(8, 512, 1)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Of a GPU with 132 multiprocessors that nobody has."""

    def forget() -> None:
        for cached in (backend._table, one_row_cut, split_matmul._tiles_for):
            cached.cache_clear()

    found = backend.Gpu("Some GPU", (9, 0), 227 * 1024, 132)
    for module in (backend, one_row_matmul, split_matmul):
        monkeypatch.setattr(module, "gpu", lambda device: found)
    monkeypatch.setattr(backend, "__file__", str(tmp_path / "backend.py"))
    path = tmp_path / "tuned" / "Some_GPU.json"
    path.parent.mkdir()
    forget()
    yield path
    forget()


CPU = torch.device("cpu")


def test_a_measured_shape_is_cut_as_the_table_says(table: Path) -> None:
    gated = '"8": [16, 128, 128, 4, 8, 1], "16": [16, 64, 256, 3, 4, 2]'  # only one of which can be gate's and up's
    found = '"1": [2, 512, 1], "8": [16, 64, 256, 3, 4, 2], "16": null'
    table.write_text(f'{{"4096x1024": {{{found}}}, "4096x1024 gated": {{{gated}}}}}')
    assert one_row_cut(4096, 1024, False, CPU) == OneRow(2, 512, 1)
    assert split_matmul._tiles_for(7, 4096, 1024, False, CPU) == Tiles(16, 64, 256, 3, 4, 2)
    assert split_matmul._tiles_for(9, 4096, 1024, False, CPU) is None
    assert split_matmul._tiles_for(7, 4096, 1024, True, CPU) == Tiles(16, 128, 128, 4, 8, 1)
    assert split_matmul._tiles_for(9, 4096, 1024, True, CPU) is None
    assert split_matmul._tiles_for(32, 4096, 1024, True, CPU) is None


def test_rows_that_were_not_measured_follow_the_rule(table: Path) -> None:
    assert one_row_cut(6144, 4096, False, CPU) == OneRow(2, 1024, 2)
    table.write_text('{"4096x1024": {"1": [2, 512, 1]}, "6144x4096": {"8": null}}')
    backend._table.cache_clear()
    one_row_cut.cache_clear()
    assert one_row_cut(6144, 4096, False, CPU) == OneRow(2, 1024, 2)
    assert split_matmul._tiles_for(8, 4096, 1024, False, CPU) == default_tiles(8, 4096, 1024, 132) is not None


@pytest.mark.parametrize(
    ("cut", "gated"),
    [([48, 512, 2], False), ([4, 1000, 2], False), ([256, 64, 8], False), ([16, 4096, 1], False), ([1, 512, 1], True)],
)
def test_a_cut_that_the_kernel_cannot_launch_is_passed_over(table: Path, cut: list[int], gated: bool) -> None:
    """No powers of two, not a divisor of the outputs, more values than registers, one row of two halves."""
    table.write_text(json.dumps({f"5760x1024{' gated' * gated}": {"1": cut}}))
    assert one_row_cut(5760, 1024, gated, CPU) == default_one_row_cut(5760, 1024, gated, 132)


def test_one_row_is_launched_as_the_table_says(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated program of 8 rows of the weight has 4 outputs."""
    launches = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *_, **options: launches.append((grid, *(options[o] for o in ("OUTS", "CHUNK", "num_warps"))))

    monkeypatch.setattr(one_row_matmul, "_one_row_kernel", Kernel())
    table.write_text('{"96x64": {"1": [8, 64, 1]}, "96x64 gated": {"1": [8, 64, 1]}}')
    for gated in (False, True):
        one_row_matmul._one_row_triton(torch.zeros(1, 64), torch.zeros(96, 64), gated=gated)
    assert launches == [((12,), 8, 64, 1), ((12,), 4, 64, 1)]


@pytest.mark.parametrize("name", NAMED_SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shapes_that_nobody_measured_get_enough_programs(name: str, tp: int) -> None:
    """By the rule: at least half a wave of a large GPU's, wherever one split has less than that."""
    shapes = [(layer.size_out, layer.size_in) for layer in linears(name, tp) if not layer.gated]
    for size_out, size_in in shapes:
        for num_rows in ROW_BUCKETS:
            tiles = default_tiles(num_rows, size_out, size_in, num_sms=132)
            if tiles is None:
                assert num_rows > 64 or size_out >= 64 * 132 or size_in % 128
                continue
            assert tiles.suit(size_out, size_in) and tiles.rows >= num_rows
            programs, share = size_out // tiles.outs * tiles.splits, size_in // tiles.splits
            assert programs >= 66 or tiles.splits == 8 or share < 1024 or share % 256
