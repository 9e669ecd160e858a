"""The table of matmul cuts: what is in it can run, and it is about the shapes that layers have."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nanollm.config import NAMED_SHAPES, ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels import split_matmul
from nanollm.kernels.split_matmul import ROW_BUCKETS, Tiles, default_tiles
from nanollm.layers.linear import MergedColumnParallelLinear
from nanollm.models.qwen3 import Qwen3ForCausalLM
from tests.bench.test_throughput import ROOT

pytest.importorskip("triton")
sys.path.insert(0, str(ROOT / "bench"))  # as for a script there
from tune import split_shapes

TABLES = sorted(Path(split_matmul.__file__).with_name("tuned").glob("*.json"))
SHARED_BYTES = {"NVIDIA_H200": 227 * 1024}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_cut_in_a_table_can_run(path: Path) -> None:
    for shape, found in json.loads(path.read_text()).items():
        size_out, size_in = map(int, shape.split("x"))
        assert [int(rows) for rows in found] == list(ROW_BUCKETS), shape
        for rows, cut in found.items():
            if cut is not None:
                tiles = Tiles(*cut)
                assert tiles.suit(size_out, size_in) and tiles.fit(SHARED_BYTES[path.stem]), (shape, rows)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_what_is_tuned_is_what_layers_multiply(name: str, tp: int) -> None:
    config = ModelConfig.from_hf(NAMED_SHAPES[name] | {"num_hidden_layers": 1})
    with torch.device("meta"):
        layer = Qwen3ForCausalLM(config, TPGroup(0, tp), 16).model.layers[0]
    linears = [m for m in layer.modules() if hasattr(m, "suits_skinny")]
    shapes = [tuple(m.weight.shape) for m in linears if not isinstance(m, MergedColumnParallelLinear)]
    assert shapes == list(split_shapes(name, tp))


@pytest.mark.parametrize("name", NAMED_SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shapes_that_nobody_measured_get_enough_programs(name: str, tp: int) -> None:
    """By the rule: at least half a wave of a large GPU's, wherever one split has less than that."""
    for size_out, size_in in split_shapes(name, tp):
        for num_rows in ROW_BUCKETS:
            tiles = default_tiles(num_rows, size_out, size_in, num_sms=132)
            if tiles is None:
                assert num_rows > 64 or size_out >= 64 * 132 or size_in % 128
                continue
            assert tiles.suit(size_out, size_in) and tiles.rows >= num_rows
            programs, share = size_out // tiles.outs * tiles.splits, size_in // tiles.splits
            assert programs >= 66 or tiles.splits == 8 or share < 1024 or share % 256
