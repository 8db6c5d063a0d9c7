"""Pictures of a run: the loss curve, the grid of samples, the pipeline's schedule."""

import math
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.schedule import Span

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot as plt  # noqa: E402


def loss_curve(rows: list[dict], path: Path) -> None:
    """loss.png: every step, a running mean over a fiftieth of the run, and the held-out loss where there is one."""
    kept = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None and not r["skipped"]]
    if not kept:
        return
    steps, losses = np.array(kept).T
    window = max(1, len(losses) // 50)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    figure, axes = plt.subplots(figsize=(7, 4), dpi=110)
    axes.plot(steps, losses, color="0.8", linewidth=0.8, label="each step")
    axes.plot(steps[window - 1 :], mean, color="tab:blue", linewidth=1.8, label=f"mean of {window}")
    held_out = [(r["step"], r["val_loss"]) for r in rows if r.get("val_loss") is not None]
    if held_out:
        axes.plot(*np.array(held_out).T, "o-", color="tab:orange", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss", yscale="log" if losses.min() > 0 else "linear")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def grid(pictures: list[np.ndarray], captions: list[str], path: Path, cell: int = 96) -> None:
    """samples-N.png: pictures [H, W, 3] uint8 in rows of about a square, each with its caption below."""
    side = max(cell, min(256, max(p.shape[0] for p in pictures)))
    font = ImageFont.load_default(size=max(9, side // 9))
    columns = max(1, math.ceil(math.sqrt(len(pictures) * 1.3)))
    band = 2 * (font.size + 3)
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * (side + 8) + 8, rows * (side + band + 6) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = 8 + i % columns * (side + 8), 8 + i // columns * (side + band + 6)
        sheet.paste(Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS), (x, y))
        lines = textwrap.wrap(caption, max(4, int(side / font.size * 1.75)))[:2]
        draw.text((x, y + side + 1), "\n".join(lines), fill="black", font=font, spacing=2)
    sheet.save(path)


COLOURS = {"F": "#4c9be8", "B": "#f2a33c", "W": "#8cc474", "E": "#b9a0d8"}
MEANINGS = {"F": "forward", "B": "backward, inputs", "W": "backward, weights", "E": "encoders, next step"}


def schedule(planned: list[Span], real: list[Span], path: Path) -> None:
    """schedule.png: a row for each stage, a bar for each operation with its micro-batch; the way up is paler."""
    figure, axes = plt.subplots(2, 1, figsize=(12, 2 + 0.9 * (1 + max(s.rank for s in planned))), dpi=110)
    for axis, spans, what in zip(axes, (planned, real), ("planned", "as it ran"), strict=True):
        _gantt(axis, spans, what)
    axes[0].set_xticks([])
    axes[1].set_xlabel("milliseconds since the step began")
    kinds = [kind for kind in COLOURS if any(s.op.kind == kind for s in planned)]
    names = MEANINGS if "W" in kinds else MEANINGS | {"B": "backward"}
    bars = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    figure.legend(bars, [names[k] for k in kinds], ncols=len(kinds), loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _gantt(axis, spans: list[Span], what: str) -> None:
    stages, end = 1 + max(s.rank for s in spans), max(s.end for s in spans)
    scale = 1000 if what != "planned" else 1
    for span in spans:
        width = span.end - span.start
        alpha = 0.6 if span.op.chunk == "up" else 1.0
        axis.barh(
            span.rank, width * scale, left=span.start * scale, height=0.85, color=COLOURS[span.op.kind], alpha=alpha,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        if width > end / 90:
            middle = (span.start + width / 2) * scale
            axis.text(middle, span.rank, span.op.micro, ha="center", va="center", fontsize=7)
    busy = [sum(s.end - s.start for s in spans if s.rank == r) / end for r in range(stages)]
    axis.set_title(f"{what}: {sum(busy) / stages:.0%} busy ({', '.join(f'{b:.0%}' for b in busy)})", fontsize=10)
    axis.set(yticks=range(stages), yticklabels=[f"stage {r}" for r in range(stages)], xlim=(0, end * scale))
    axis.invert_yaxis()
