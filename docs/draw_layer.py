"""Draws docs/layer_tp2.png: one layer of Qwen3-0.6B on two ranks, what each holds and when they talk.

The sizes come from the code that decides them; `python docs/draw_layer.py` draws them anew.
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from nanollm.config import NAMED_SHAPES, ModelConfig
from nanollm.distributed.partition import HeadPartition, mlp_split

TP = 2
CONFIG = ModelConfig.from_hf(NAMED_SHAPES["qwen3-0.6b"])
COLORS = ["#3b77b5", "#d9822b"]  # of what a rank holds
ROW_Y = [3.75, 1.25]  # centre of each rank's row
GREY, INK = "#e4e4e4", "#222222"


def side(features: int) -> float:
    """Drawn length of a matrix's side; a square root, so that small ones stay visible."""
    return 0.0245 * features**0.5


def draw_weight(
    axes: Axes, x: float, y: float, rank: int, blocks: list[tuple[str, int, range]], size_in: int, kept: range | None
) -> None:
    """A weight [out, in], the rank's share in colour. blocks: (name, outputs, this rank's outputs), top to bottom.

    kept: this rank's range of the inputs, if the weight is split that way.
    """
    size_out = sum(size for _, size, _ in blocks)
    width, height = side(size_in), side(size_out)
    left, top = x - width / 2, y + height / 2
    for name, size, outputs in blocks:
        axes.add_patch(Rectangle((left, top - height * size / size_out), width, height * size / size_out, color=GREY))
        first, count = outputs.start / size_out, len(outputs) / size_out
        start, share = (0.0, 1.0) if kept is None else (kept.start / size_in, len(kept) / size_in)
        corner = (left + width * start, top - height * (first + count))
        axes.add_patch(Rectangle(corner, width * share, height * count, color=COLORS[rank]))
        axes.text(left - 0.06, top - height * size / size_out / 2, name, ha="right", va="center", fontsize=9)
        axes.add_patch(
            Rectangle((left, top - height * size / size_out), width, height * size / size_out, fill=False, lw=0.8)
        )
        top -= height * size / size_out
    held_out = sum(len(outputs) for _, _, outputs in blocks)
    held_in = size_in if kept is None else len(kept)
    axes.text(x, y - height / 2 - 0.1, f"holds [{held_out}, {held_in}]", ha="center", va="top", fontsize=10)


def draw_box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    style = "round,pad=0.02,rounding_size=0.08"
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, fc=color, ec=INK, lw=0.8))
    axes.text(x, y, text, ha="center", va="center", fontsize=10, linespacing=1.4)


def draw_arrow(axes: Axes, start: float, end: float, y: float, shape: str) -> None:
    axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1})
    axes.text((start + end) / 2 - 0.03, y + 0.08, shape, ha="center", va="bottom", fontsize=9)


def draw_attention(axes: Axes, rank: int) -> None:
    heads = HeadPartition(CONFIG.num_heads, CONFIG.num_kv_heads, TP, rank)
    size, head_dim, y = CONFIG.hidden_size, CONFIG.head_dim, ROW_Y[rank]
    q, kv = rows(heads.heads, head_dim), rows(heads.kv_heads, head_dim)
    q_size, kv_size = CONFIG.num_heads * head_dim, CONFIG.num_kv_heads * head_dim
    draw_weight(axes, 2.75, y, rank, [("q", q_size, q), ("k", kv_size, kv), ("v", kv_size, kv)], size, None)
    draw_arrow(axes, 3.2, 4.1, y, f"[T, {len(q) + 2 * len(kv)}]")
    about = f"attention\nquery heads {span(heads.heads)}\nKV heads {span(heads.kv_heads)}\nand their KV cache"
    draw_box(axes, 4.95, y, 1.6, 1.15, about, "white")
    draw_arrow(axes, 5.78, 6.5, y, f"[T, {len(q)}]")
    draw_weight(axes, 7.35, y, rank, [("o", size, range(size))], q_size, q)


def draw_feed_forward(axes: Axes, rank: int) -> None:
    inner, size, y = mlp_split(CONFIG.intermediate_size, TP)[rank], CONFIG.hidden_size, ROW_Y[rank]
    gate_up = [("gate", CONFIG.intermediate_size, inner), ("up", CONFIG.intermediate_size, inner)]
    draw_weight(axes, 2.85, y, rank, gate_up, size, None)
    draw_arrow(axes, 3.3, 4.1, y, f"[T, {2 * len(inner)}]")
    draw_box(axes, 4.65, y, 1.0, 0.65, "SiLU(gate)\n× up", "white")
    draw_arrow(axes, 5.18, 5.95, y, f"[T, {len(inner)}]")
    draw_weight(axes, 7.22, y, rank, [("down", size, range(size))], CONFIG.intermediate_size, inner)


def rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def span(heads: range) -> str:
    return f"{heads.start}–{heads.stop - 1}"


def draw() -> plt.Figure:
    figure, panels = plt.subplots(2, figsize=(9.6, 9.8), layout="constrained")
    parts = (("Attention", draw_attention, "RMSNorm"), ("Feed-forward", draw_feed_forward, "the next layer's RMSNorm"))
    size = f"[T, {CONFIG.hidden_size}]"
    for axes, (title, draw_part, norm) in zip(panels, parts, strict=True):
        axes.text(0.05, 5.0, title, fontsize=14, weight="bold", va="top")
        for rank, y in enumerate(ROW_Y):
            axes.text(0.05, y + 0.75, f"rank {rank}", fontsize=12, weight="bold", color=COLORS[rank])
            draw_box(axes, 0.62, y, 1.05, 0.95, f"normed\nresidual\n{size}", "white")
            draw_arrow(axes, 1.18, 2.0, y, size)
            draw_part(axes, rank)
            draw_arrow(axes, 8.0, 8.82, y, f"{size}\npartial sum")
        middle = sum(ROW_Y) / TP
        draw_box(axes, 9.3, middle, 0.85, 4.4, "", "#f6e7b4")
        label = f"all-reduce: sum over ranks\n+ residual, {norm}"
        axes.text(9.3, middle, label, rotation=90, ha="center", va="center", fontsize=11, linespacing=1.5)
        axes.set(xlim=(0, 9.8), ylim=(-0.05, 5.05), aspect="equal")
        axes.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_name(f"layer_tp{TP}.png"), dpi=90)
