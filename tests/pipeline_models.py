"""UNet and VAE settings for the pipeline's tests: the true ones (for counting) and scaled down ones (for running)."""

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from common.config import Config
from common.models import UNETS, VAES, spec_of

TINY_UNET = spec_of(Config()).unet
TRUE = UNETS | {"tiny": TINY_UNET}
VAE = VAES["sdxl"]

# Thin versions: all channel counts divided by ten, and few transformer layers, with the structure left alone.
_THIN = {"norm_num_groups": 8, "cross_attention_dim": 24}
SMALL = {
    "sd15": UNETS["sd15"] | _THIN | {"block_out_channels": (32, 64, 128, 128), "attention_head_dim": 4},
    "sd21": UNETS["sd21"] | _THIN | {"block_out_channels": (32, 64, 128, 128), "attention_head_dim": (1, 2, 4, 4)},
    "sdxl": UNETS["sdxl"]
    | _THIN
    | {
        "block_out_channels": (32, 64, 128),
        "attention_head_dim": (1, 2, 4),
        "transformer_layers_per_block": (1, 2, 3),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 16 + 6 * 8,
    },
    "tiny": TINY_UNET,
}


def small_unet(name: str, seed: int = 0, **changes: object) -> UNet2DConditionModel:
    torch.manual_seed(seed)
    return UNet2DConditionModel(**(SMALL[name] | changes))


def small_vae(seed: int = 0, **changes: object) -> AutoencoderKL:
    torch.manual_seed(seed)
    return AutoencoderKL(**(VAE | {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4} | changes))


def unet_inputs(config: dict, batch: int, height: int, width: int, text_dim: int = 16) -> dict:
    """Arguments of `unet.forward`, drawn from a fixed seed (fake or meta when such a mode or device is on)."""
    torch.manual_seed(1)
    inputs = {
        "sample": torch.randn(batch, config.get("in_channels", 4), height, width),
        "timestep": torch.arange(batch) * 37 + 5,
        "encoder_hidden_states": torch.randn(batch, 9, config["cross_attention_dim"]),
    }
    if config.get("addition_embed_type") == "text_time":
        sizes = torch.tensor([[64.0, 64, 0, 0, 64, 64]]).repeat(batch, 1)
        inputs["added_cond_kwargs"] = {"text_embeds": torch.randn(batch, text_dim), "time_ids": sizes}
    return inputs
