"""UNet and VAE settings for the pipeline's tests: the true ones (for counting) and scaled down ones (for running)."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from common.config import Config
from common.models import SCHEDULER, TINY, UNETS, VAES, spec_of

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


def small_sdxl_folder(path: Path) -> Path:
    """A diffusers folder with SDXL's structure, thin: two text encoders, pooled text, sizes; VAE and tokenizers of `tiny`."""
    tokenizer = CLIPTokenizer.from_pretrained(TINY / "tokenizer")
    sizes = dict(vocab_size=len(tokenizer), intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                 bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    torch.manual_seed(0)
    StableDiffusionXLPipeline(
        vae=AutoencoderKL.from_pretrained(TINY / "vae"),
        text_encoder=CLIPTextModel(CLIPTextConfig(hidden_size=8, **sizes)),
        text_encoder_2=CLIPTextModelWithProjection(CLIPTextConfig(hidden_size=16, projection_dim=16, **sizes)),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=small_unet("sdxl", sample_size=8),
        scheduler=DDPMScheduler(**SCHEDULER),
    ).save_pretrained(path)
    return path


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
