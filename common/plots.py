"""Pictures of a run: the loss curve and the grid of samples."""

import math
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

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
