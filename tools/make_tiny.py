"""Make the model that ships with the project: everything under `common/tiny/`, from a seed.

    tokenizer/      CLIPTokenizer, byte-level: any text has ids; each word of the captions is one token
    text_encoder/   CLIPTextModel, seeded and never trained: distinct captions get distinct features, no more is needed
    vae/            AutoencoderKL, trained here on `shapes`; latents [B, 4, 8, 8] with mean 0 and variance 1 per channel
    unet/           the configuration only: the scripts train its weights
    scheduler/      noise schedule and sampler

    python tools/make_tiny.py                 about ten minutes on one core
    python tools/make_tiny.py --only unet     rewrite some parts only

The same seed, `--steps` and machine give the same files.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.shapes import CAPTIONS, SIDE, Shapes, matches  # noqa: E402

PARTS = ("tokenizer", "text_encoder", "vae", "unet", "scheduler")
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
CONTEXT = 77  # tokens, as in every CLIP text encoder
WORD_END = "</w>"

VAE = {
    "sample_size": SIDE,
    "block_out_channels": (8, 16, 32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
    # The latents are whitened inside the weights, see `whiten`.
    "scaling_factor": 1.0,
}
UNET = {
    "sample_size": SIDE // 8,
    "in_channels": VAE["latent_channels"],
    "out_channels": VAE["latent_channels"],
    "block_out_channels": (48, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,  # diffusers reads it as the number of heads
    "norm_num_groups": 16,
    # Without these two the model is a third worse after the same training: the time step scales every resnet's
    # features instead of shifting them only, and the whole caption reaches every resnet, not just the attention.
    "resnet_time_scale_shift": "scale_shift",
    "addition_embed_type": "text",
    "addition_embed_type_num_heads": 8,
}
SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
}


def byte_pairs(words):
    """Merges of a byte-level BPE, most frequent pair first, until each word is one token: [("s", "t"), ...]."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix=WORD_END))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    # Large enough never to stop early: training ends when no pair is left.
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=10_000, end_of_word_suffix=WORD_END))
    return [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]


def make_tokenizer(folder):
    """Write CLIP's three tokenizer files; returns the tokenizer.

    Ids in CLIP's order: 256 bytes, the same as ends of words, merges, then BOS and EOS. Text is cut into bytes before
    it is merged, so nothing is unknown.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = byte_pairs(CAPTIONS)
    tokens = [*letters, *(x + WORD_END for x in letters), *("".join(pair) for pair in merges), BOS, EOS]
    vocab = {token: i for i, token in enumerate(tokens)}
    special = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": CONTEXT, "do_lower_case": True, **special}
    # Written by hand: `save_pretrained` of transformers 5 writes one tokenizer.json, which older versions do not read
    # into a CLIPTokenizer; every version reads these.
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return CLIPTokenizer.from_pretrained(folder)


def make_text_encoder(folder, tokenizer, seed):
    """Write the text encoder: 2 layers, width 64, seeded; it must be saved, for every user must have the same one."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        projection_dim=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_as_half(CLIPTextModel(config), folder)


def pixels(source):
    """All pictures of a source as uint8 [N, 3, 64, 64]."""
    stack = np.stack([np.asarray(source.image(i)) for i in range(len(source))])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).contiguous()


def to_signal(picture):
    """uint8 0..255 -> float -1..1."""
    return picture.float() / 127.5 - 1


def crops(pictures, side, generator):
    """One random window of each picture, [B, 3, H, W] -> [B, 3, side, side]; of two, the one that shows more."""
    chosen = []
    for picture in pictures:
        places = torch.randint(picture.shape[-1] - side + 1, (2, 2), generator=generator).tolist()
        windows = [picture[:, y : y + side, x : x + side] for y, x in places]
        chosen.append(max(windows, key=lambda w: w.float().std()))
    return torch.stack(chosen)


def rim_weight(x, gain):
    """Weight of each pixel in the loss, 1 on flat ground up to 1 + gain on a rim, [B, 3, H, W] -> [B, 1, H, W].

    What tells a small star from a small circle is a handful of pixels; on average over the picture they drown.
    """
    smooth = torch.nn.functional.avg_pool2d(x, 5, stride=1, padding=2, count_include_pad=False)
    return 1 + gain * (2 * (x - smooth).abs().amax(dim=1, keepdim=True)).clamp(max=1)


def vae_loss(vae, x, generator):
    """Weighted L1 + 2 MSE + a light KL term: the posterior stays a distribution, narrow beside the latents' spread."""
    posterior = vae.encode(x).latent_dist
    error = vae.decode(posterior.sample(generator)).sample - x
    reconstruction = (rim_weight(x, 4.0) * (error.abs() + 2 * error**2)).mean()
    return reconstruction + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()


def train_vae(seed, steps, pictures):
    """AutoencoderKL trained on uint8 pictures [N, 3, 64, 64]; AdamW, cosine to zero.

    Most steps see windows a quarter of the picture's area: four times as many objects a second. Group norm and the
    convolutions' borders then differ from whole pictures, so the last steps, at a low rate, see those.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    vae = AutoencoderKL(**VAE)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    warmup = 30
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / warmup) * (1 + math.cos(math.pi * k / steps)) / 2
    )
    start = time.monotonic()
    for step in range(steps):
        windows = step < 0.7 * steps
        batch = pictures[torch.randint(len(pictures), (32 if windows else 16,), generator=generator)]
        loss = vae_loss(vae, to_signal(crops(batch, SIDE // 2, generator) if windows else batch), generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"vae step {step + 1}/{steps}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)
    return vae.eval()


@torch.no_grad()
def whiten(vae, pictures):
    """Give the latents of `pictures` mean 0 and variance 1 per channel, without changing what the model draws.

    quant_conv's output is (mean, log variance), post_quant_conv takes the sample; both are 1x1 convolutions, so the
    scaling z' = (z - m) / s is folded into the former and its inverse into the latter.
    """
    latents = torch.cat([vae.encode(to_signal(x)).latent_dist.mean for x in pictures.split(64)])
    m, s = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    channels, into, out = len(m), vae.quant_conv, vae.post_quant_conv
    into.weight[:channels] /= s[:, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - m) / s
    into.bias[channels:] -= 2 * s.log()
    out.bias += out.weight[:, :, 0, 0] @ m
    out.weight *= s[None, :, None, None]


def save_as_half(model, folder):
    """`save_pretrained`, but with float16 weights; the configuration still says float32, the type to load them in."""
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for the owner alone


@torch.no_grad()
def round_trip(vae, source):
    """A source's pictures through encoder and decoder: (share all right, PSNR in dB, latents [N, C, h, w])."""
    x = pixels(source)
    latents = torch.cat([vae.encode(to_signal(part)).latent_dist.mean for part in x.split(32)])
    y = torch.cat([vae.decode(part).sample for part in latents.split(32)])
    y = ((y.clamp(-1, 1) + 1) * 127.5).round()
    right = [
        matches(Image.fromarray(picture), source.caption(i))["all"]
        for i, picture in enumerate(y.byte().permute(0, 2, 3, 1).numpy())
    ]
    decibel = 10 * torch.log10(255**2 / ((y - x.float()) ** 2).mean())
    return float(np.mean(right)), decibel.item(), latents


def make_vae(folder, seed, steps):
    """Train, whiten and write the VAE, then examine what was written on pictures it has not seen."""
    pictures = pixels(Shapes(8192))
    vae = train_vae(seed, steps, pictures)
    whiten(vae, pictures[:2048])
    save_as_half(vae, folder)
    share, decibel, latents = round_trip(AutoencoderKL.from_pretrained(folder).eval(), Shapes(1920, first=1_000_000))
    spread = latents.std(dim=(0, 2, 3))
    print(f"vae: {share:.2%} of 1920 unseen pictures all right after a round trip, {decibel:.1f} dB")
    print("latents: deviation per channel", " ".join(f"{x:.3f}" for x in spread))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the text encoder's and the VAE's weights (default 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "common/tiny", metavar="DIR", help="default: common/tiny")
    parser.add_argument("--steps", type=int, default=2200, metavar="N", help="training steps of the VAE (default 2200)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    # One thread: sums are then added in one order, and the files come out the same.
    torch.set_num_threads(1)

    if "tokenizer" in args.only:
        make_tokenizer(args.out / "tokenizer")
    if "text_encoder" in args.only:
        make_text_encoder(args.out / "text_encoder", CLIPTokenizer.from_pretrained(args.out / "tokenizer"), args.seed)
    if "unet" in args.only:
        UNet2DConditionModel(**UNET).save_config(args.out / "unet")
    if "scheduler" in args.only:
        DPMSolverMultistepScheduler(**SCHEDULER).save_pretrained(args.out / "scheduler")
    if "vae" in args.only:
        make_vae(args.out / "vae", args.seed, args.steps)
    print(f"{sum(f.stat().st_size for f in args.out.rglob('*') if f.is_file()):,} bytes in {args.out}")


if __name__ == "__main__":
    main()
