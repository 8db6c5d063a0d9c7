"""Does a trained `tiny` draw what the caption says? Samples an exported pipeline and counts.

    python tools/score.py runs/ddp-001/pipeline
    python tools/score.py runs/ddp-001/pipeline --samples 480 --grid grid.png

Captions are taken evenly, starting noise comes from --seed, sample by sample, so two pipelines are compared on the same
noise. The examiner is `common.shapes.matches`; "all" means colour, shape, size and count of one and the same picture.
A model that ignores its captions gets about 2 %.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.shapes import CAPTIONS, SIDE, matches  # noqa: E402

PARTS = ("colour", "shape", "size", "count", "all")
BATCH = 48


def noise(seed, indices, shape):
    """Starting latents [len(indices), C, h, w]; those of sample i depend on (seed, i) only, not on the batch."""
    each = [np.random.default_rng([seed, i]).standard_normal(shape, dtype=np.float32) for i in indices]
    return torch.from_numpy(np.stack(each))


@torch.no_grad()
def draw(pipe, captions, seed, guidance, steps):
    """One PIL picture for each caption."""
    side = SIDE // pipe.vae_scale_factor
    pictures = []
    for first in range(0, len(captions), BATCH):
        chosen = range(first, min(first + BATCH, len(captions)))
        latents = noise(seed, chosen, (pipe.unet.config.in_channels, side, side))
        pictures += pipe(
            [captions[i] for i in chosen],
            latents=latents.to(pipe.device, pipe.unet.dtype),
            guidance_scale=guidance,
            num_inference_steps=steps,
            height=SIDE,
            width=SIDE,
        ).images
    return pictures


def tally(verdicts, captions):
    """Shares right, {part: share}, and the captions that came out wrong, {caption: times}, most frequent first."""
    shares = {part: sum(v[part] for v in verdicts) / len(verdicts) for part in PARTS}
    wrong = [caption for v, caption in zip(verdicts, captions, strict=True) if not v["all"]]
    return shares, dict(sorted(((c, wrong.count(c)) for c in set(wrong)), key=lambda item: (-item[1], item[0])))


def grid(pictures, captions, verdicts, columns=8):
    """All pictures with their captions; a red caption was not met."""
    cell, band = 2 * SIDE, 14
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (cell + 4) + 4, rows * (cell + band + 4) + 4), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (picture, caption, verdict) in enumerate(zip(pictures, captions, verdicts, strict=True)):
        x, y = 4 + i % columns * (cell + 4), 4 + i // columns * (cell + band + 4)
        sheet.paste(picture.resize((cell, cell), Image.Resampling.LANCZOS), (x, y))
        pen.text((x + 2, y + cell), caption.removeprefix("a "), fill="black" if verdict["all"] else "red")
    return sheet


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path, metavar="PIPELINE_DIR", help="diffusers folder that a script exported")
    parser.add_argument("--samples", type=int, default=144, metavar="N", help="pictures to draw (default 144)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the starting noise (default 0)")
    parser.add_argument("--guidance", type=float, default=2.0, metavar="X", help="classifier-free guidance (default 2)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of the sampler (default 20)")
    parser.add_argument("--grid", type=Path, metavar="FILE", help="write the pictures with their captions")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if not (args.pipeline / "model_index.json").is_file():
        parser.error(f"{args.pipeline} has no model_index.json; give the folder of a run, as runs/ddp-001/pipeline")
    if args.samples < 1:
        parser.error(f"--samples {args.samples}: at least 1, or 48 for each caption once")

    pipe = DiffusionPipeline.from_pretrained(args.pipeline).to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(args.samples)]
    pictures = draw(pipe, captions, args.seed, args.guidance, args.steps)
    verdicts = [matches(picture, caption) for picture, caption in zip(pictures, captions, strict=True)]
    shares, wrong = tally(verdicts, captions)
    if args.json:
        print(json.dumps({"samples": args.samples, "seed": args.seed, **shares, "wrong": wrong}))
    else:
        print("  ".join(f"{part:>7}" for part in PARTS))
        print("  ".join(f"{shares[part]:7.1%}" for part in PARTS) + f"   of {args.samples} samples")
        print("wrong: " + (", ".join(f"{caption} ({times})" for caption, times in wrong.items()) or "none"))
    if args.grid:
        grid(pictures, captions, verdicts).save(args.grid)


if __name__ == "__main__":
    main()
