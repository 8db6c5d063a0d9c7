"""Sample grids by the diffusers pipeline itself, so that a grid shows what the export will draw."""

from collections.abc import Iterator

import numpy as np
import torch
from diffusers import DiffusionPipeline

STEPS = 20


def starting_noise(seed: int, index: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """[C, h, w]; a function of the prompt's place in the grid, so that grids of one run, or of two, can be compared."""
    return torch.from_numpy(np.random.default_rng([seed, 0x5A, index]).standard_normal(shape, dtype=np.float32))


@torch.no_grad()
def draw(
    pipe: DiffusionPipeline,
    prompts: list[str],
    indices: list[int],
    seed: int,
    guidance: float,
    resolution: int,
    batch: int = 24,
) -> Iterator[np.ndarray]:
    """One picture [R, R, 3] uint8 for each of `indices` into `prompts`."""
    factor = pipe.vae_scale_factor
    shape = (pipe.unet.config.in_channels, resolution // factor, resolution // factor)
    for start in range(0, len(indices), batch):
        chosen = indices[start : start + batch]
        noise = torch.stack([starting_noise(seed, i, shape) for i in chosen]).to(pipe.device)
        pictures = pipe(
            [prompts[i] for i in chosen], latents=noise, num_inference_steps=STEPS,
            guidance_scale=guidance, height=resolution, width=resolution, output_type="np",
        ).images  # fmt: skip
        yield from (np.nan_to_num(pictures) * 255).round().astype(np.uint8)
