"""The networks: what each preset is made of, where its weights come from, and what a run leaves behind.

The UNet is trained. The VAE and the text encoders are frozen: they turn pictures into latents and captions into
conditioning. Weights come from a diffusers folder (`--model`), from the shipped `tiny`, or from a seed.
"""

import functools
import hashlib
import inspect
import json
import math
import os
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import diffusers
import safetensors
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from common.config import Config
from common.errors import UsageError

transformers.utils.logging.disable_progress_bar()  # eight ranks that load and save would draw eight bars
diffusers.utils.logging.disable_progress_bar()

TINY = Path(__file__).parent / "tiny"
TOKENS = 77  # of a caption, in all CLIP text encoders

# ── Presets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Facts of the published configurations; everything not named is the default of diffusers and transformers.

_CROSS, _PLAIN, _UP_CROSS, _UP_PLAIN = "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"
_SD_UNET = dict(
    sample_size=64,
    block_out_channels=(320, 640, 1280, 1280),
    down_block_types=(_CROSS, _CROSS, _CROSS, _PLAIN),
    up_block_types=(_UP_PLAIN, _UP_CROSS, _UP_CROSS, _UP_CROSS),
)
_SDXL_UNET = dict(
    sample_size=128,
    block_out_channels=(320, 640, 1280),
    down_block_types=(_PLAIN, _CROSS, _CROSS),
    up_block_types=(_UP_CROSS, _UP_CROSS, _UP_PLAIN),
    transformer_layers_per_block=(1, 2, 10),
    attention_head_dim=(5, 10, 20),  # the number of heads, in spite of the name
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
UNETS = {
    "sd15": _SD_UNET | dict(attention_head_dim=8, cross_attention_dim=768),
    "sd21": _SD_UNET | dict(attention_head_dim=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True),
    "sdxl": _SDXL_UNET,
    "sdxl-10b": _SDXL_UNET | dict(block_out_channels=(640, 1280, 2560), attention_head_dim=(10, 20, 40)),
}
_VAE = dict(
    block_out_channels=(128, 256, 512, 512),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=2,
)
VAES = {
    "sd15": _VAE | dict(scaling_factor=0.18215, sample_size=512),
    "sd21": _VAE | dict(scaling_factor=0.18215, sample_size=768),
    "sdxl": _VAE | dict(scaling_factor=0.13025, sample_size=1024, force_upcast=True),
}
VAES["sdxl-10b"] = VAES["sdxl"]
# The published text encoders say eos_token_id 2, by which transformers takes the position of the highest id, which is EOS.
_CLIP_L = dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12, projection_dim=768,
               bos_token_id=0, eos_token_id=2, pad_token_id=1)  # fmt: skip
_OPEN_CLIP = dict(hidden_act="gelu", bos_token_id=0, eos_token_id=2, pad_token_id=1)
_CLIP_H = _OPEN_CLIP | dict(
    hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=23, projection_dim=512
)
_CLIP_G = _OPEN_CLIP | dict(
    hidden_size=1280, intermediate_size=5120, num_attention_heads=20, num_hidden_layers=32, projection_dim=1280
)
TEXT_ENCODERS = {
    "sd15": [(CLIPTextModel, _CLIP_L)],
    "sd21": [(CLIPTextModel, _CLIP_H)],
    "sdxl": [(CLIPTextModel, _CLIP_L), (CLIPTextModelWithProjection, _CLIP_G)],
}
TEXT_ENCODERS["sdxl-10b"] = TEXT_ENCODERS["sdxl"]
# All four families were trained on the same schedule; SD 2.1 at 768 pixels is the one that predicts v.
SCHEDULER = dict(
    num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
    prediction_type="epsilon", steps_offset=1,
)  # fmt: skip


# ── Weights from a seed ──────────────────────────────────────────────────────────────────────────────────────────────
def seeded_tensor(seed: int, name: str, module: nn.Module, shape: torch.Size) -> torch.Tensor:
    """Initial value of the parameter `name` of `module`, a function of (seed, name) only; float32 on the CPU.

    Linear and convolution: uniform in ±1/sqrt(fan_in), torch's own default (He et al. 2015 with a = sqrt 5). Norms: 1
    and 0. Embeddings: normal with deviation 0.02, as CLIP. A shard is a slice of the whole draw, never a draw of its own.
    """
    leaf = name.rsplit(".", 1)[-1]
    if isinstance(module, (nn.GroupNorm, nn.LayerNorm)):
        return torch.ones(shape) if leaf == "weight" else torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        fan_in = math.prod(module.weight.shape[1:])
        return torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def named_owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(parameter name, the module that holds it, parameter), in the order of `named_parameters`."""
    for path, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            yield (f"{path}.{leaf}" if path else leaf), owner, parameter


@torch.no_grad()
def seed_weights(module: nn.Module, seed: int, prefix: str) -> None:
    """Overwrite every parameter of `module` with its seeded value; `prefix` keeps networks of one run apart."""
    for name, owner, parameter in named_owners(module):
        parameter.copy_(seeded_tensor(seed, f"{prefix}.{name}", owner, parameter.shape))


# ── Weights from a folder ────────────────────────────────────────────────────────────────────────────────────────────
class WeightFile:
    """The tensors of one network in a diffusers folder, read one at a time: `weights[name]` -> float32 on the CPU.

    Knows a single `.safetensors` file, its `.fp16` variant, and the split form with an index. Raises UsageError when
    the folder has none of them, or a file is damaged.
    """

    def __init__(self, folder: Path, stem: str = "diffusion_pytorch_model"):
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, object] = {}
        index = folder / f"{stem}.safetensors.index.json"
        files = [folder / f"{stem}.safetensors", folder / f"{stem}.fp16.safetensors"]
        if index.is_file():
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        elif not (files := [f for f in files if f.is_file()][:1]):
            raise UsageError(
                f"--model: {folder} has no {stem}.safetensors (other formats can be converted with diffusers)"
            )
        for file in files:
            try:
                self._open[file] = safetensors.safe_open(file, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise UsageError(f"--model: {file} cannot be read: {error}") from None
            self._file_of |= dict.fromkeys(self._open[file].keys(), file)

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._open[self._file_of[name]].get_tensor(name).float()


def check_weights(module: nn.Module, weights: WeightFile) -> None:
    """Every parameter of `module` must be there, in its shape. Raises UsageError naming the first that is not."""
    wanted, found = {name for name, _ in module.named_parameters()}, weights.names()
    if wanted != found:
        sample = sorted(wanted ^ found)[0]
        raise UsageError(
            f"--model: {weights.folder} does not fit its config.json: {len(wanted - found)} weights missing, "
            f"{len(found - wanted)} unexpected, first {sample}"
        )
    for name, parameter in module.named_parameters():
        if weights.shape(name) != tuple(parameter.shape):
            raise UsageError(
                f"--model: {weights.folder}: {name} is {list(weights.shape(name))}, "
                f"its config.json asks for {list(parameter.shape)}"
            )


# ── The model of a run ───────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class ModelSpec:
    """Everything about a model but its tensors: enough to plan, to check flags, and to export."""

    name: str
    unet: dict
    scheduler: dict
    folder: Path | None  # the diffusers folder, None for seeded weights
    is_xl: bool
    vae_factor: int  # pixels per latent, along a side

    @property
    def latent_channels(self) -> int:
        return self.unet["in_channels"]

    @functools.cached_property
    def architecture(self) -> str:
        """Digest of the UNet's parameter names and shapes: do weights of one run fit another?"""
        shapes = [(name, tuple(p.shape)) for name, p in empty_unet(self).named_parameters()]
        return hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:16]


def empty_unet(spec: ModelSpec) -> UNet2DConditionModel:
    """On the meta device: no memory, and no random numbers for weights that are overwritten at once."""
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(spec.unet)


def empty_inputs(
    spec: ModelSpec, size: int, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    """Arguments of the UNet for latents [size, C, height, width], of the right shapes and with nothing in them: for
    fake tensors, which find out what a pass needs."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, *shape, dtype=dtype, device=device)

    unet, added = spec.unet, None
    if spec.is_xl:
        pooled = unet["projection_class_embeddings_input_dim"] - 6 * unet["addition_time_embed_dim"]
        added = {"text_embeds": empty(pooled), "time_ids": empty(6)}
    return {
        "sample": empty(spec.latent_channels, height, width),
        "timestep": empty(dtype=torch.int64),
        "encoder_hidden_states": empty(TOKENS, unet["cross_attention_dim"]),
        "added_cond_kwargs": added,
    }


def parameter_count(spec: ModelSpec) -> int:
    return sum(p.numel() for p in empty_unet(spec).parameters())


@dataclass
class Frozen:
    """The parts that are not trained."""

    vae: AutoencoderKL
    text_encoders: list[nn.Module]
    tokenizers: list[CLIPTokenizer]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Frozen":
        """The VAE never goes to fp16: SDXL's overflows there, and its latents become NaN (it is the caller's dtype otherwise)."""
        # nn.Module's own `to`: diffusers' one warns of layers to be kept in float32, of which these networks have none.
        nn.Module.to(self.vae, device, torch.float32 if dtype == torch.float16 else dtype)
        for encoder in self.text_encoders:
            nn.Module.to(encoder, device, dtype)
        return self


def spec_of(config: Config) -> ModelSpec:
    """Read the configuration of --model or --preset. Raises UsageError for a folder that is not a Stable Diffusion pipeline."""
    if config.model is None and config.preset != "tiny":
        return ModelSpec(
            config.preset,
            _full_config(UNETS[config.preset]),
            dict(SCHEDULER),
            None,
            config.preset.startswith("sdxl"),
            8,
        )
    folder = TINY if config.model is None else Path(config.model)
    if config.model is not None:
        _check_folder(folder)
    unet = _read_json(folder / "unet" / "config.json")
    scheduler = _read_json(folder / "scheduler" / "scheduler_config.json")
    if unet.get("in_channels", 4) != unet.get("out_channels", 4):
        raise UsageError(
            f"--model {folder}: its UNet takes {unet['in_channels']} channels and gives {unet['out_channels']} (inpainting, "
            "editing); only text-to-image is trained here"
        )
    factor = 2 ** (len(_read_json(folder / "vae" / "config.json").get("block_out_channels", (64,))) - 1)
    name = "tiny" if config.model is None else str(folder)
    is_xl = unet.get("addition_embed_type") == "text_time"
    return ModelSpec(name, _full_config(unet), scheduler, folder, is_xl, factor)


def _full_config(unet: dict) -> dict:
    """With diffusers' defaults filled in."""
    with torch.device("meta"):
        return dict(UNet2DConditionModel.from_config(unet).config)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(
            f"--model {folder}: no such folder; give a diffusers pipeline folder, with model_index.json in it"
        )
    needed = (
        "unet/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "tokenizer",
        "scheduler/scheduler_config.json",
    )
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        raise UsageError(f"--model {folder}: not a Stable Diffusion pipeline folder, {', '.join(missing)} not found")
    kind = _read_json(folder / "unet" / "config.json").get("_class_name", "UNet2DConditionModel")
    if kind != "UNet2DConditionModel":
        raise UsageError(f"--model {folder}: its unet is a {kind}; SD 1.5, SD 2.1 and SDXL have a UNet2DConditionModel")


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model: {path} cannot be read: {error}") from None


def build_unet(spec: ModelSpec, seed: int, device: torch.device) -> UNet2DConditionModel:
    """The UNet in float32 on `device`, whatever the type of the stored weights: master weights are float32."""
    unet = empty_unet(spec)
    unet.to_empty(device=device).requires_grad_(True).train()
    with torch.no_grad():
        for name, value in weights_of(unet, spec, seed):
            unet.get_parameter(name).copy_(value)
    return unet


def weights_of(
    unet: nn.Module, spec: ModelSpec, seed: int, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole initial value on the CPU) of every parameter, or of those in `names`, one at a time; shapes are those
    of `unet`, sharded or not.

    Raises UsageError for a folder whose weights do not fit.
    """
    seeded = spec.folder is None or spec.folder == TINY  # tiny ships its frozen parts; its UNet is what a run trains
    wanted = [(n, owner, p) for n, owner, p in named_owners(unet) if names is None or n in names]
    if seeded:
        return ((n, seeded_tensor(seed, f"unet.{n}", owner, p.shape)) for n, owner, p in wanted)
    file = WeightFile(spec.folder / "unet")
    check_weights(unet, file)
    return ((name, file[name]) for name, _, _ in wanted)


def build_part(spec: ModelSpec, seed: int, device: torch.device, names: Container[str]) -> UNet2DConditionModel:
    """The UNet with only these parameters in memory, float32 on `device`; the others stay on the meta device."""
    unet = empty_unet(spec).train()
    for name, value in weights_of(unet, spec, seed, names):
        path, _, leaf = name.rpartition(".")
        unet.get_submodule(path).register_parameter(leaf, nn.Parameter(value.to(device)))
    return unet


def frozen_on_meta(spec: ModelSpec) -> tuple[AutoencoderKL, dict[str, nn.Module]]:
    """VAE and text encoders without any memory: their configurations, shapes and sizes."""
    with torch.device("meta"):
        if spec.folder is None:
            clips = [kind(CLIPTextConfig(**clip)) for kind, clip in TEXT_ENCODERS[spec.name]]
            names = ["text_encoder", "text_encoder_2"][: len(clips)]
            return AutoencoderKL(**VAES[spec.name]), dict(zip(names, clips, strict=True))
        encoders = {}
        for name in ["text_encoder", "text_encoder_2"] if spec.is_xl else ["text_encoder"]:
            kind = CLIPTextModelWithProjection if name.endswith("_2") else CLIPTextModel
            encoders[name] = kind(CLIPTextConfig(**_read_json(spec.folder / name / "config.json")))
        return AutoencoderKL.from_config(_read_json(spec.folder / "vae" / "config.json")), encoders


def frozen_parameters(spec: ModelSpec) -> tuple[int, int]:
    """(of the VAE, of the text encoders), from configurations alone."""
    vae, texts = frozen_on_meta(spec)
    of_vae, *of_text = (sum(p.numel() for p in part.parameters()) for part in (vae, *texts.values()))
    return of_vae, sum(of_text)


def build_frozen(spec: ModelSpec, seed: int) -> Frozen:
    """VAE, text encoders and tokenizers in float32 on the CPU; raises UsageError for a folder that cannot be loaded."""
    if spec.folder is None:
        with torch.device("meta"):
            parts = {"vae": AutoencoderKL(**VAES[spec.name])}
            for i, (kind, clip) in enumerate(TEXT_ENCODERS[spec.name]):
                parts[f"text_encoder_{i + 1}"] = kind(CLIPTextConfig(**clip))
        for name, part in parts.items():
            _materialise(part)
            seed_weights(part, seed, name)
        vae, *encoders = parts.values()
        tokenizers = [
            CLIPTokenizer.from_pretrained(TINY / "tokenizer") for _ in encoders
        ]  # its ids fit any CLIP vocabulary
    else:
        folder, names = spec.folder, ["", "_2"] if spec.is_xl else [""]
        try:
            vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32, low_cpu_mem_usage=False)
            encoders = [
                (CLIPTextModelWithProjection if n else CLIPTextModel).from_pretrained(
                    folder / f"text_encoder{n}", dtype=torch.float32
                )
                for n in names
            ]
            tokenizers = [CLIPTokenizer.from_pretrained(folder / f"tokenizer{n}") for n in names]
        except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
            raise UsageError(f"--model {folder}: {' '.join(str(error).split())[:300]}") from None
    for part in (vae, *encoders):
        part.requires_grad_(False).eval()
    return Frozen(vae, encoders, tokenizers)


def _materialise(module: nn.Module) -> None:
    """meta -> CPU; CLIP's position ids are a buffer that no weight file holds."""
    module.to_empty(device="cpu")
    for name, buffer in module.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))


# ── How it is computed ───────────────────────────────────────────────────────────────────────────────────────────────
def compile_blocks(unet: UNet2DConditionModel) -> None:
    """torch.compile every resnet and transformer block by itself: minutes less than the whole UNet, nearly all of the gain.

    In place, so parameter names stay as they are. Blocks of one kind share code, hence the raised limit on versions of it.
    """
    torch._dynamo.config.recompile_limit = 256
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D | BasicTransformerBlock):
            module.forward = torch.compile(module.forward, dynamic=False)  # hooks, which FSDP lives on, stay outside


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Products and convolutions in --precision, weights and sums in float32."""
    kind = DTYPES[precision]
    return torch.autocast(device.type, dtype=kind, enabled=kind != torch.float32)


def use_kernels(config: Config, device: torch.device) -> None:
    """Which kernels torch may choose; --attention leaves math as the way out for shapes that a kernel refuses."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True)
    elif device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # shapes repeat, so trying kernels once pays
    kind = config.attention
    if kind == "auto":
        return
    torch.backends.cuda.enable_flash_sdp(kind == "flash")
    torch.backends.cuda.enable_cudnn_sdp(kind == "cudnn")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)


# ── What a run leaves behind ─────────────────────────────────────────────────────────────────────────────────────────
def pipeline_of(
    spec: ModelSpec, frozen: Frozen, unet: UNet2DConditionModel, prediction: str, zero_snr: bool
) -> DiffusionPipeline:
    """The diffusers pipeline around `unet`; its scheduler samples the way the UNet was trained."""
    parts = dict(
        vae=frozen.vae, text_encoder=frozen.text_encoders[0], tokenizer=frozen.tokenizers[0], unet=unet,
        scheduler=_sampler(spec, prediction, zero_snr),
    )  # fmt: skip
    if spec.is_xl:
        pipe = StableDiffusionXLPipeline(
            **parts, text_encoder_2=frozen.text_encoders[1], tokenizer_2=frozen.tokenizers[1]
        )
    else:
        pipe = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _sampler(spec: ModelSpec, prediction: str, zero_snr: bool):
    """The folder's own scheduler, told what the UNet now predicts; DPM-Solver++ where there is none or it cannot be told."""
    changes = {"prediction_type": prediction}
    if zero_snr:  # sampling must then start at the last timestep (Lin et al. 2023, section 3.3)
        changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    kind = getattr(diffusers, spec.scheduler.get("_class_name", ""), DPMSolverMultistepScheduler)
    if zero_snr and "rescale_betas_zero_snr" not in inspect.signature(kind.__init__).parameters:
        kind = DPMSolverMultistepScheduler
    known = inspect.signature(kind.__init__).parameters
    return kind.from_config({k: v for k, v in (spec.scheduler | changes).items() if k in known or k.startswith("_")})


def export(
    folder: Path, spec: ModelSpec, config: Config, weights: dict[str, torch.Tensor], raw: dict[str, torch.Tensor] | None
) -> None:
    """Write a whole diffusers pipeline folder, aside first and renamed last.

    `weights` (name -> float32 tensor on the CPU) becomes `unet/`; `raw`, the weights beside their average, `unet_raw/`.
    The frozen parts are read again rather than written from the device, where they may have been rounded to bf16.
    """
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    frozen, unet = build_frozen(spec, config.seed), _unet_around(spec, weights)
    pipeline_of(spec, frozen, unet, config.prediction, config.zero_snr).save_pretrained(aside)
    if raw is not None:
        _unet_around(spec, raw).save_pretrained(aside / "unet_raw")
    if folder.exists():
        shutil.rmtree(folder)
    aside.rename(folder)


def _unet_around(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> UNet2DConditionModel:
    """A UNet whose parameters are the given tensors, without a copy."""
    unet = empty_unet(spec)
    unet.load_state_dict(weights, strict=True, assign=True)
    return unet
