"""Draws docs/communication.png: what two ranks send each other in a step, and by which way.

The limits come from the code that decides them; `python docs/draw_communication.py` draws them anew.
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from nanollm.distributed.all_reduce import Limits
from nanollm.kernels.all_reduce import BUFFERS

TP = 2
COLORS = ["#3b77b5", "#d9822b"]  # of what a rank sends
LEFT = [0.3, 6.5]  # edge of each rank's GPU
WIDTH, INK, PAPER = 3.2, "#222222", "#f4f4f4"


def draw_box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = "white") -> None:
    """A box with its lower left corner at (x, y)."""
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=INK, lw=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, linespacing=1.4)


def draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2} | style)


def draw_gpu(axes: Axes, rank: int) -> None:
    """One all-reduce kernel, from top to bottom: what it has, what it receives, what it makes of both."""
    x, other = LEFT[rank], 1 - rank
    axes.add_patch(Rectangle((x - 0.15, 0.75), WIDTH + 0.3, 3.0, fc=PAPER, ec="none"))
    axes.text(x - 0.1, 3.55, f"GPU of rank {rank}: one kernel", fontsize=9, weight="bold", color=COLORS[rank])
    draw_box(axes, x, 2.75, WIDTH, 0.6, f"partial sum of rank {rank}, [T, D]", COLORS[rank] + "55")
    draw_box(
        axes, x, 1.85, WIDTH, 0.6, f"buffer, one of {BUFFERS} in turn:\nwhat rank {other} sent", COLORS[other] + "55"
    )
    draw_box(axes, x, 0.85, WIDTH, 0.65, "add in the order of ranks,\nadd the residual, RMSNorm")
    middle = x + WIDTH / 2
    draw_arrow(axes, (middle, 1.85), (middle, 1.5))
    axes.text(middle + 0.08, 1.67, "polled until there", fontsize=8, va="center")


def draw_limits(axes: Axes) -> None:
    """Which way a message of what size goes."""
    limits = Limits.of(TP)
    ways = [
        f"one shot, up to {size(limits.one_shot)}:\nevery rank sends all it has",
        f"two shots, up to {size(limits.two_shot)}:\neach sums a share, sends the sums",
        "NCCL: beyond that,\nor without peer access",
    ]
    for i, way in enumerate(ways):
        draw_box(axes, 0.15 + 3.28 * i, -0.2, 3.14, 0.65, way, "#f6e7b4")


def size(nbytes: int) -> str:
    return f"{nbytes // 2**20} MiB"


def draw() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(9.6, 5.6), layout="constrained")
    texts = [
        "CPU of rank 0: decides what runs,\nlaunches its own part",
        "CPU of rank 1: unpacks the plan,\nlaunches its part",
    ]
    for rank, text in enumerate(texts):
        draw_box(axes, LEFT[rank], 4.5, WIDTH, 0.7, text)
        draw_arrow(axes, (LEFT[rank] + WIDTH / 2, 4.5), (LEFT[rank] + WIDTH / 2, 3.76))
        axes.text(LEFT[rank] + WIDTH / 2 + 0.08, 4.12, "CUDA graph", fontsize=8, va="center")
        draw_gpu(axes, rank)
    right, left = LEFT[0] + WIDTH, LEFT[1]
    draw_arrow(axes, (right, 4.85), (left, 4.85))
    axes.text(5, 4.92, "plan of the step: int32 words,\nthrough a socket", fontsize=8, ha="center", va="bottom")
    draw_arrow(axes, (right, 3.05), (left, 2.2), color=COLORS[0], lw=2.0)
    draw_arrow(axes, (left, 3.05), (right, 2.2), color=COLORS[1], lw=2.0)
    axes.text(5, 3.1, "stores into the other's\nmemory, through NVLink", fontsize=8, ha="center", va="bottom")
    draw_box(axes, 4.1, 0.85, 1.8, 0.65, "abort word, in\nhost memory of each")
    for start, end in (((right, 2.0), (4.3, 1.5)), ((left, 2.0), (5.7, 1.5))):
        draw_arrow(axes, start, end, linestyle="--", lw=0.8)
    draw_limits(axes)
    axes.set(xlim=(0, 10), ylim=(-0.3, 5.5))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_name("communication.png"), dpi=90)
