"""Sample grids by the diffusers pipeline itself, so that a grid shows what the export will draw."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline

from common import plots

STEPS = 20


def starting_noise(seed: int, index: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """[C, h, w]; a function of the prompt's place in the grid, so that grids of one run, or of two, can be compared."""
    return torch.from_numpy(np.random.default_rng([seed, 0x5A, index]).standard_normal(shape, dtype=np.float32))


@torch.no_grad()
def draw(
    pipe: DiffusionPipeline,
    prompts: list[str],
    indices: Sequence[int],
    seed: int,
    guidance: float,
    resolution: int,
    batch: int = 24,
) -> dict[int, np.ndarray]:
    """One picture [R, R, 3] uint8 for each of `indices` into `prompts`."""
    drawn = {}
    factor = pipe.vae_scale_factor
    shape = (pipe.unet.config.in_channels, resolution // factor, resolution // factor)
    for start in range(0, len(indices), batch):
        chosen = indices[start : start + batch]
        noise = torch.stack([starting_noise(seed, i, shape) for i in chosen]).to(pipe.device)
        pictures = pipe(
            [prompts[i] for i in chosen], latents=noise, num_inference_steps=STEPS,
            guidance_scale=guidance, height=resolution, width=resolution, output_type="np",
        ).images  # fmt: skip
        drawn |= zip(chosen, (np.nan_to_num(pictures) * 255).round().astype(np.uint8), strict=True)
    return drawn


def save_sheet(parts: list[dict[int, np.ndarray]], prompts: list[str], path: Path) -> None:
    """Paste what the ranks drew into one sheet."""
    drawn = {i: picture for part in parts for i, picture in part.items()}
    plots.grid([drawn[i] for i in range(len(prompts))], prompts, path)
