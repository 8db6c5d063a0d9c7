"""The UNet and the VAE encoder as lists of units: the grain at which the pipeline cuts them.

    conv_in ─ resnet ─ tb0 ─ tb1 ─ resnet ─ … ─ down ─┐                     a unit is one resnet, one transformer block,
       │        │             │                       │                     one sampler, conv_in or conv_out
       skip     skip          skip                   mid
       │        │             │                       │                     SD1.5 and SD2.1: 46 units, SDXL: 93
    conv_out ─ resnet ─ tb1 ─ tb0 ─ resnet ─ … ─  up ─┘

Running the units in order is `unet.forward`, to the last bit. What one unit hands to the next is a `Carry`: every
tensor in it has a name, so a cut may fall anywhere, also inside a transformer stack, and both sides agree on what
crosses:

    field                    filled by           read by                 gradient   crosses a cut of
    sample                   every unit          the next unit           yes        both paths
    residual, hw             a stack's first tb  the stack's last tb     yes        both paths, inside a stack
    emb                      conv_in             every resnet            yes        the down path
    encoder_hidden_states    the caller          every tb                no         the down path
    skips                    the down path       the up path             yes        none: the fold keeps them at home
    skip_sizes               the down path       upsamplers, odd sizes   -          none: known from the input's size

The time embedding, SDXL's size embedding and the additive text embedding belong to the unit `conv_in`: one rank owns
them, and the gradient of `emb` travels back to it. On the way up nobody sends `emb` or the text again, because under
the fold each rank has seen both when the micro-batch came down.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from common.errors import UsageError

# ── the state between two units ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Carry:
    """What one unit hands to the next. Units never change a carry, they return another one."""

    sample: Tensor  # [B, C, h, w]; inside a transformer stack [B, h*w, C]
    residual: Tensor | None = None  # [B, C, h, w], the stack's input from *before* its norm
    emb: Tensor | None = None  # [B, E]
    encoder_hidden_states: Tensor | None = None  # [B, tokens, D]
    encoder_attention_mask: Tensor | None = None  # [B, 1, tokens], a bias added to the scores
    timestep: Tensor | None = None  # [B], used up by conv_in, as are the next two
    text_embeds: Tensor | None = None  # [B, D2], SDXL's pooled text
    time_ids: Tensor | None = None  # [B, 6], SDXL's sizes and crop
    skips: dict[str, Tensor] = field(default_factory=dict)  # by the name of the unit that made them
    hw: tuple[int, int] | None = None  # h, w inside a stack
    skip_sizes: dict[str, tuple[int, int]] | None = None  # None: all sides halve evenly, upsamplers may double

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in a fixed order; skips as `skips.NAME`."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("skips", "hw", "skip_sizes")}
        return {name: t for name, t in own.items() if t is not None} | {f"skips.{n}": t for n, t in self.skips.items()}

    def with_tensors(self, tensors: dict[str, Tensor]) -> "Carry":
        """The same carry with some tensors replaced, by the names that `tensors()` gives."""
        skips = {name.removeprefix("skips."): t for name, t in tensors.items() if name.startswith("skips.")}
        own = {name: t for name, t in tensors.items() if not name.startswith("skips.")}
        return replace(self, **own, skips=self.skips | skips)


# What crosses a cut of each path, and of that, what brings a gradient back. On the down path everything a later rank
# needs for *both* its chunks goes along once.
WIRE = {
    "down": ("sample", "residual", "emb", "encoder_hidden_states", "encoder_attention_mask"),
    "up": ("sample", "residual"),
}
WITH_GRADIENT = ("sample", "residual", "emb")


def wire(carry: Carry, path: str) -> dict[str, Tensor]:
    """The named tensors that cross a cut of this path ("down" or "up") at this carry, in the order they are sent."""
    return {name: t for name in WIRE[path] if (t := getattr(carry, name)) is not None}


def returning(carry: Carry, path: str) -> dict[str, Tensor]:
    """The part of `wire` whose gradients come back over the same cut."""
    return {name: t for name, t in wire(carry, path).items() if name in WITH_GRADIENT}


def arrive(template: Carry, received: dict[str, Tensor], kept: Carry | None = None) -> Carry:
    """The carry on the receiving side of a cut.

    `template` is the carry `probe` saw at this cut; `received` is what came over the wire. On the up path `kept` is the
    end of this rank's own down chunk: its skips, embedding and text are what the up chunk goes on with.
    """
    home = kept or Carry(sample=received["sample"])
    return replace(
        home,
        sample=received["sample"],
        residual=received.get("residual"),
        emb=received.get("emb", home.emb),
        encoder_hidden_states=received.get("encoder_hidden_states", home.encoder_hidden_states),
        encoder_attention_mask=received.get("encoder_attention_mask", home.encoder_attention_mask),
        hw=template.hw,
        skip_sizes=template.skip_sizes,
    )


# ── gradients across chunks of one rank ──────────────────────────────────────────────────────────────────────────────


def carries_gradient(name: str) -> bool:
    """Whether a tensor of a carry brings a gradient back: not text, not masks, not the inputs of conv_in."""
    return name in WITH_GRADIENT or name.startswith("skips.")


def as_leaves(carry: Carry) -> Carry:
    """Cut the autograd graph at a carry: each tensor becomes a leaf, those that bring a gradient back ask for it.

    Without this the backward of an up chunk would run on, through the skips, into the down chunk that made them, and no
    schedule could say when.
    """
    return carry.with_tensors(
        {
            name: t.detach().requires_grad_(carries_gradient(name) and t.is_floating_point())
            for name, t in carry.tensors().items()
        }
    )


def gradients(leaves: Carry) -> dict[str, Tensor]:
    """What backward has left in the leaves, by name. An unused leaf (emb where no resnet is) has none."""
    return {name: t.grad for name, t in leaves.tensors().items() if t.grad is not None}


def gradients_to_send(leaves: Carry, path: str) -> dict[str, Tensor]:
    """The gradients that go back over a cut, zeros where nothing used the input: the other side waits for each name."""
    return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in returning(leaves, path).items()}


def backward(outputs: Carry, grads: dict[str, Tensor]) -> None:
    """Backward of one chunk from the gradients of its outputs, by name."""
    tensors = outputs.tensors()
    roots = [name for name in grads if tensors[name].requires_grad]
    torch.autograd.backward([tensors[name] for name in roots], [grads[name] for name in roots])


def add_gradients(*parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum gradients by name: `emb` gets one share from each chunk of a rank and one from the rank below."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, grad in part.items():
            total[name] = total[name] + grad if name in total else grad
    return total


# ── units ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Unit:
    """One step of the flattened model: `carry = unit(carry)`."""

    name: str
    modules: dict[str, nn.Module]  # by their path in the model: together the units own every parameter, each once
    run: Callable[[Carry], Carry]
    pushes: bool = False  # leaves its output behind as the skip `name`
    pops: str | None = None  # takes the skip of this name

    def __call__(self, carry: Carry) -> Carry:
        carry = self.run(carry)
        return _push(carry, self.name) if self.pushes else carry

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the model's state dict."""
        return {f"{path}.{name}": p for path, m in self.modules.items() for name, p in m.named_parameters()}


def run_units(units: list[Unit], carry: Carry, recompute: bool = False) -> Carry:
    """Run units in order. `recompute` keeps only the carries between units and repeats each forward in backward."""
    for unit in units:
        carry = checkpoint(unit, carry, use_reentrant=False) if recompute else unit(carry)
    return carry


def _push(carry: Carry, name: str) -> Carry:
    sizes = carry.skip_sizes
    if sizes is not None:
        sizes = sizes | {name: tuple(carry.sample.shape[-2:])}
    return replace(carry, skips=carry.skips | {name: carry.sample}, skip_sizes=sizes)


def _resnet(resnet: nn.Module, pops: str | None) -> Callable[[Carry], Carry]:
    """A resnet; on the up path it first takes its skip and lays it beside the sample, [B, C1 + C2, h, w]."""

    def run(carry: Carry) -> Carry:
        sample, skips = carry.sample, carry.skips
        if pops is not None:
            sample = torch.cat([sample, skips[pops]], dim=1)
            skips = {name: t for name, t in skips.items() if name != pops}
        return replace(carry, sample=resnet(sample, carry.emb), skips=skips)

    return run


def _transformer_block(stack: nn.Module, index: int) -> Callable[[Carry], Carry]:
    """One BasicTransformerBlock; the first of a stack also enters it (norm, proj_in), the last also leaves it."""
    block, last = stack.transformer_blocks[index], index == len(stack.transformer_blocks) - 1

    def run(carry: Carry) -> Carry:
        carry = _enter(stack, carry) if index == 0 else carry
        hidden = block(
            carry.sample,
            encoder_hidden_states=carry.encoder_hidden_states,
            encoder_attention_mask=carry.encoder_attention_mask,
        )
        carry = replace(carry, sample=hidden)
        return _leave(stack, carry) if last else carry

    return run


def _enter(stack: nn.Module, carry: Carry) -> Carry:
    """[B, C, h, w] -> [B, h*w, C]. proj_in is a 1x1 convolution in SD1.5 and a Linear since SD2: the order differs."""
    residual = carry.sample
    hidden = stack.norm(residual)
    if stack.use_linear_projection:
        hidden = stack.proj_in(hidden.permute(0, 2, 3, 1).flatten(1, 2))
    else:
        hidden = stack.proj_in(hidden).permute(0, 2, 3, 1).flatten(1, 2)
    return replace(carry, sample=hidden, residual=residual, hw=tuple(residual.shape[-2:]))


def _leave(stack: nn.Module, carry: Carry) -> Carry:
    """[B, h*w, C] -> [B, C, h, w], plus the residual that came along."""
    hidden = carry.sample
    if stack.use_linear_projection:
        hidden = stack.proj_out(hidden)
    hidden = hidden.unflatten(1, carry.hw).permute(0, 3, 1, 2).contiguous()
    if not stack.use_linear_projection:
        hidden = stack.proj_out(hidden)
    return replace(carry, sample=hidden + carry.residual, residual=None, hw=None)


def _plain(module: nn.Module) -> Callable[[Carry], Carry]:
    """A module that maps the sample and needs nothing else."""
    return lambda carry: replace(carry, sample=module(carry.sample))


def _upsampler(module: nn.Module, next_skip: str | None) -> Callable[[Carry], Carry]:
    """Doubles the sides, or, where halving had rounded up, restores those of the next skip.

    That skip may live on another rank, so only its size is looked at.
    """

    def run(carry: Carry) -> Carry:
        size = carry.skip_sizes[next_skip] if carry.skip_sizes is not None and next_skip else None
        return replace(carry, sample=module(carry.sample, size))

    return run


def _conv_in(unet: UNet2DConditionModel) -> Callable[[Carry], Carry]:
    """Time, size and text embeddings, the mask as a bias, and the first convolution."""

    def run(carry: Carry) -> Carry:
        sample, text, mask = carry.sample, carry.encoder_hidden_states, carry.encoder_attention_mask
        if mask is not None:
            mask = ((1 - mask.to(sample.dtype)) * -10000.0).unsqueeze(1)
        # The upsamplers may simply double if every side survives all halvings; otherwise they need the skips' sizes.
        even = all(side % 2**unet.num_upsamplers == 0 for side in sample.shape[-2:])
        if unet.config.center_input_sample:
            sample = 2 * sample - 1.0
        # The sinusoid is float32 and is cast to the sample's dtype, which is why latents stay float32 under autocast.
        emb = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=carry.timestep))
        extra = unet.get_aug_embed(
            emb=emb,
            encoder_hidden_states=text,
            added_cond_kwargs={"text_embeds": carry.text_embeds, "time_ids": carry.time_ids},
        )
        emb = emb if extra is None else emb + extra
        emb = emb if unet.time_embed_act is None else unet.time_embed_act(emb)
        return Carry(
            sample=unet.conv_in(sample),
            emb=emb,
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            skip_sizes=None if even else {},
        )

    return run


def _conv_out(norm: nn.Module | None, act: nn.Module | None, *convs: nn.Module) -> Callable[[Carry], Carry]:
    """Norm, activation and the closing convolutions; what is left of the carry is the sample alone."""

    def run(carry: Carry) -> Carry:
        sample = carry.sample if norm is None else act(norm(carry.sample))
        for conv in convs:
            sample = conv(sample)
        return Carry(sample=sample)

    return run


# ── the UNet ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def unet_units(unet: UNet2DConditionModel) -> list[Unit]:
    """The UNet as units whose run in order equals `unet.forward` (dropout included: the same calls in the same order).

    Skips are pushed after conv_in, after each resnet (with its attention) and after each downsampler, and popped by the
    resnets of the up path, last in, first out. All of that is known here, so each unit carries the name of its skip.
    """
    _refuse(unet)
    embeddings = {n: m for n in ("time_proj", "time_embedding", "add_embedding") if (m := getattr(unet, n, None))}
    units = [Unit("conv_in", embeddings | {"conv_in": unet.conv_in}, _conv_in(unet), pushes=True)]
    for i, block in enumerate(unet.down_blocks):
        units += _layers(f"down_blocks.{i}", block, pushes=True)
        for j, sampler in enumerate(block.downsamplers or []):
            name = f"down_blocks.{i}.downsamplers.{j}"
            units.append(Unit(name, {name: sampler}, _plain(sampler), pushes=True))
    stack = [unit.name for unit in units if unit.pushes]
    if unet.mid_block is not None:
        units += _mid("mid_block", unet.mid_block)
    for i, block in enumerate(unet.up_blocks):
        units += _layers(f"up_blocks.{i}", block, pops=stack)
        for j, sampler in enumerate(block.upsamplers or []):
            name = f"up_blocks.{i}.upsamplers.{j}"
            units.append(Unit(name, {name: sampler}, _upsampler(sampler, stack[-1] if stack else None)))
    head = {n: m for n in ("conv_norm_out", "conv_out") if (m := getattr(unet, n, None)) is not None}
    units.append(Unit("conv_out", head, _conv_out(unet.conv_norm_out, unet.conv_act, unet.conv_out)))
    return units


def _layers(path: str, block: nn.Module, pushes: bool = False, pops: list[str] | None = None) -> list[Unit]:
    """The resnets of a block, each followed by its transformer stack; the last unit of each pair pushes."""
    units = []
    attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
    for j, (resnet, attention) in enumerate(zip(block.resnets, attentions, strict=True)):
        name, skip = f"{path}.resnets.{j}", pops.pop() if pops is not None else None
        pair = [Unit(name, {name: resnet}, _resnet(resnet, skip), pops=skip)]
        if attention is not None:
            pair += _transformer(f"{path}.attentions.{j}", attention)
        # The skip is named after the unit that made it, which is the last of the pair.
        pair[-1] = replace(pair[-1], pushes=pushes)
        units += pair
    return units


def _transformer(path: str, stack: nn.Module) -> list[Unit]:
    """A transformer stack as one unit per block; entry and exit projections go to the first and the last."""
    count, units = len(stack.transformer_blocks), []
    for k, block in enumerate(stack.transformer_blocks):
        modules = {f"{path}.norm": stack.norm, f"{path}.proj_in": stack.proj_in} if k == 0 else {}
        modules[f"{path}.transformer_blocks.{k}"] = block
        if k == count - 1:
            modules[f"{path}.proj_out"] = stack.proj_out
        units.append(Unit(f"{path}.tb{k}", modules, _transformer_block(stack, k)))
    return units


def _mid(path: str, block: nn.Module) -> list[Unit]:
    """resnet, then attention and resnet in turn: transformer stacks in most UNets, plain attention in a VAE."""

    def resnet(j: int) -> Unit:
        name = f"{path}.resnets.{j}"
        return Unit(name, {name: block.resnets[j]}, _resnet(block.resnets[j], None))

    units = [resnet(0)]
    for j, attention in enumerate(block.attentions):
        name = f"{path}.attentions.{j}"
        if hasattr(attention, "transformer_blocks"):
            units += _transformer(name, attention)
        elif attention is not None:
            units.append(Unit(name, {name: attention}, _plain(attention)))
        units.append(resnet(j + 1))
    return units


# What the flattening bypasses or does not know, as (what to call it, how to see it). A wrong gradient would be silent,
# so each is refused by name.
_BLOCKS = {
    "down_blocks": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "mid_block": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D", "NoneType"),
    "up_blocks": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_REFUSED = {
    "FreeU": lambda u: any(getattr(b, s, None) for b in u.up_blocks for s in ("s1", "s2", "b1", "b2")),
    "GLIGEN": lambda u: hasattr(u, "position_net") or u.config.attention_type != "default",
    "class embeddings": lambda u: u.class_embedding is not None,
    "dual attention": lambda u: u.config.dual_cross_attention,
    "a projection of the text (encoder_hid_proj)": lambda u: u.encoder_hid_proj is not None,
    "gradient checkpointing inside blocks (recompute units instead)": lambda u: u.is_gradient_checkpointing,
    "ADA norms": lambda u: {m.norm_type for m in u.modules() if isinstance(m, BasicTransformerBlock)} - {"layer_norm"},
    "an additional embedding other than text or text_time": lambda u: (
        u.config.addition_embed_type not in (None, "text", "text_time")
    ),
}


def _refuse(unet: UNet2DConditionModel) -> None:
    for what, present in _REFUSED.items():
        if present(unet):
            raise UsageError(f"this UNet uses {what}, which the pipeline cannot cut; use ddp_train.py or fsdp_train.py")
    for place, known in _BLOCKS.items():
        blocks = getattr(unet, place)
        for block in blocks if isinstance(blocks, nn.ModuleList) else [blocks]:
            if type(block).__name__ not in known:
                raise UsageError(
                    f"this UNet's {place} holds a {type(block).__name__}, which the pipeline cannot cut (it knows "
                    f"{', '.join(known)}); use ddp_train.py or fsdp_train.py"
                )


def unet_carry(
    sample: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor | None = None,
    added_cond_kwargs: dict[str, Tensor] | None = None,
    **refused: object,
) -> Carry:
    """The carry before conv_in, from `unet.forward`'s own arguments. The mask is 1 = keep, [B, tokens]."""
    given = [name for name, value in refused.items() if value is not None]
    if given:
        raise UsageError(f"the pipeline cannot pass {', '.join(given)} to the UNet; use ddp_train.py or fsdp_train.py")
    return Carry(
        sample=sample,
        timestep=timestep,
        encoder_hidden_states=encoder_hidden_states,
        encoder_attention_mask=encoder_attention_mask,
        **(added_cond_kwargs or {}),
    )


# ── the VAE encoder ──────────────────────────────────────────────────────────────────────────────────────────────────


def vae_encoder_units(vae: AutoencoderKL) -> list[Unit]:
    """The VAE's encoder as units, from pixels [B, 3, H, W] to moments [B, 2 * latent channels, h, w].

    Nothing branches off, so the carry is the sample alone. `quant_conv` goes with conv_out: the moments are what
    `vae._encode` returns, before the draw.
    """
    if vae.use_tiling or vae.use_slicing:
        raise UsageError("the pipeline cannot cut a VAE with tiling or slicing on; call vae.disable_tiling() first")
    encoder = vae.encoder
    units = [Unit("encoder.conv_in", {"encoder.conv_in": encoder.conv_in}, _plain(encoder.conv_in))]
    for i, block in enumerate(encoder.down_blocks):
        if type(block).__name__ != "DownEncoderBlock2D":
            raise UsageError(f"the VAE's encoder holds a {type(block).__name__}, which the pipeline cannot cut")
        units += _layers(f"encoder.down_blocks.{i}", block)
        for j, sampler in enumerate(block.downsamplers or []):
            name = f"encoder.down_blocks.{i}.downsamplers.{j}"
            units.append(Unit(name, {name: sampler}, _plain(sampler)))
    units += _mid("encoder.mid_block", encoder.mid_block)
    head = {"encoder.conv_norm_out": encoder.conv_norm_out, "encoder.conv_out": encoder.conv_out}
    convs = [encoder.conv_out]
    if vae.quant_conv is not None:
        head["quant_conv"] = vae.quant_conv
        convs.append(vae.quant_conv)
    units.append(Unit("encoder.conv_out", head, _conv_out(encoder.conv_norm_out, encoder.conv_act, *convs)))
    return units


# ── what crosses, before anything runs ───────────────────────────────────────────────────────────────────────────────


def fake_model(cls: type, config: dict, mode: FakeTensorMode, device: str = "cpu", dtype=torch.float32) -> nn.Module:
    """A model whose weights take no memory: shapes, dtypes and devices are those of the real one.

    Made on `meta` first, since drawing weights costs time even where there is nowhere to put them.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = cls.from_config(json.loads(json.dumps(config)))
    finally:
        torch.set_default_dtype(default)
    with mode:
        return model.to_empty(device=device)


def fake_mode() -> FakeTensorMode:
    """Tensors of true shape, dtype and device that compute nothing."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def probe(units: list[Unit], carry: Carry) -> list[Carry]:
    """The carry before each unit and after the last (N + 1 carries for N units), with `meta` tensors.

    Receivers allocate from these: neither NCCL nor gloo checks shapes, and under autocast the dtype at a cut is not
    something to guess. Run it with the fake UNet of `fake_model`, under the same autocast as training, once for each
    micro-batch shape.
    """
    seen = [carry]
    for unit in units:
        carry = unit(carry)
        seen.append(carry)
    return [_as_meta(c) for c in seen]


def _as_meta(carry: Carry) -> Carry:
    return carry.with_tensors(
        {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in carry.tensors().items()}
    )


def signature(carry: Carry, path: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of each message at a cut of this path."""
    return {name: (tuple(t.shape), t.dtype) for name, t in wire(carry, path).items()}
