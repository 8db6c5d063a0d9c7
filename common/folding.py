"""Who holds what in the pipeline: a plan made from flags and shapes alone, so that every rank makes the same one.

flags ─► unit costs ─► fold ─► encoders ─► schedule          no weight, no picture, no message
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn

from common import cut, models
from common.config import Batch, Config
from common.cut import GIB, Fold, Memory, UnitCost
from common.errors import UsageError
from common.models import TOKENS, ModelSpec
from common.schedule import Op, Schedule, Step, build, check, messages, programs, simulate
from common.units import (
    Carry,
    Unit,
    fake_mode,
    fake_model,
    probe,
    returning,
    unet_carry,
    unet_units,
    vae_encoder_units,
    wire,
)

# How much a rank may hold of the activations of P micro-batches: 1F1B just these, which is its point, zero bubble what
# fits, because more room leaves fewer holes.
ROOMS = {"1f1b": (1.0,), "zero-bubble": (2.0, 1.5, 1.0)}


def stages_of(config: Config, spec: ModelSpec, world_size: int) -> int:
    """--stages, or the largest divisor of the world into which the model can be folded."""
    units = unet_units(models.empty_unet(spec))
    most = cut.most_stages([UnitCost(u.name, 0, 0, 0, pushes=u.pushes, pops=u.pops is not None) for u in units])
    fitting = [p for p in range(1, most + 1) if world_size % p == 0]
    if config.stages is None:
        return fitting[-1]
    if not 1 <= config.stages <= most:
        raise UsageError(
            f"--stages {config.stages}: {spec.name} can be folded into 1 to {most} stages, "
            f"of which {world_size} ranks can fill {', '.join(map(str, fitting))}; use {fitting[-1]}"
        )
    if world_size % config.stages:
        raise UsageError(
            f"--stages {config.stages}: {world_size} ranks are not a multiple of it; "
            f"use {' or '.join(map(str, fitting))}, or {-(-world_size // config.stages) * config.stages} ranks"
        )
    return config.stages


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Templates:
    """Shapes and dtypes of everything that crosses a cut, found with models that weigh nothing; for each shape once."""

    def __init__(self, spec: ModelSpec, precision: str, device: torch.device):
        self.spec, self.precision, self.device = spec, precision, device
        self.vae_dtype = torch.bfloat16 if precision == "bf16" else torch.float32  # the VAE never runs in fp16
        self.mode = fake_mode()
        vae, texts = models.frozen_on_meta(spec)
        self.text_configs = [text.config for text in texts.values()]
        vae = fake_model(AutoencoderKL, vae.config, self.mode, device, self.vae_dtype)
        self.vae_units = vae_encoder_units(vae.requires_grad_(False))
        self._known: dict[tuple, list[Carry]] = {}

    @functools.cached_property
    def unet_units(self) -> list[Unit]:
        """Made at the first use, which is outside `mode`: the plan alone needs the VAE's only."""
        return unet_units(fake_model(UNet2DConditionModel, self.spec.unet, self.mode, self.device))

    def unet(self, size: int, height: int, width: int) -> list[Carry]:
        """The carries before each unit for a micro-batch of latents [size, C, height, width], on `meta`."""
        key = "unet", size, height, width
        if key not in self._known:
            units = self.unet_units
            with self.mode, torch.no_grad(), models.autocast(self.precision, self.device):
                self._known[key] = probe(units, self.inputs(size, height, width))
        return self._known[key]

    def vae(self, size: int, height: int, width: int) -> list[Carry]:
        """The same for the VAE's encoder and pictures [size, 3, height, width]."""
        key = "vae", size, height, width
        if key not in self._known:
            with self.mode, torch.no_grad():
                pixels = torch.empty(size, 3, height, width, dtype=self.vae_dtype, device=self.device)
                self._known[key] = probe(self.vae_units, Carry(sample=pixels))
        return self._known[key]

    def text(self, index: int, size: int) -> dict[str, tuple]:
        """Name -> (shape, dtype) of what a text encoder says; SDXL's second one also says the pooled text."""
        config, dtype = self.text_configs[index], models.DTYPES[self.precision]
        shapes = {f"text.{index}": ((size, TOKENS, config.hidden_size), dtype)}
        if self.spec.is_xl and index == 1:
            shapes["pooled"] = ((size, config.projection_dim), dtype)
        return shapes

    def inputs(self, size: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> Carry:
        """What conv_in is given, as tensors of the right shape; to be called inside `mode`."""
        return unet_carry(**models.empty_inputs(self.spec, size, height, width, dtype, self.device))


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Encoders:
    """Who holds what of the frozen encoders, and what that takes on each stage."""

    vae: list[range]  # units of the VAE's encoder, of each stage
    text: dict[str, int]  # text encoder -> stage, in the order in which they are numbered
    cost: list[float]  # for a sample, in the units of the UNet's costs
    bytes: list[float]  # weights, and what is there at once while a micro-batch is encoded

    def texts_of(self, stage: int) -> list[int]:
        """The text encoders of a stage, by number."""
        return [i for i, place in enumerate(self.text.values()) if place == stage]


@dataclass(frozen=True)
class Folding:
    """The cut of UNet and encoders, and the schedules that go with it."""

    config: Config
    batch: Batch
    costs: list[UnitCost]
    cut: Fold
    memory: Memory
    encoders: Encoders
    shapes: list[dict[str, torch.Size]]  # parameters of each stage, by name
    _made: dict = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return self.cut.stages

    def schedule_for(self, kind: str, micro_batches: int, encode: str | None = None) -> Schedule:
        """The quickest schedule that memory allows; `encode` as in `schedule.build`."""
        key = kind, micro_batches, encode
        if key not in self._made:
            recompute = self.config.activations == "checkpoint"
            costs = cut.schedule_costs(self.costs, self.cut, self.encoders.cost, recompute=recompute)
            rooms = [r for r in ROOMS[self.config.schedule] if r <= self.memory.room]
            made = [build(kind, self.stages, micro_batches, costs, encode, room) for room in rooms]
            self._made[key] = min(made, key=lambda s: simulate(s).makespan)
        return self._made[key]

    def programs_of(self, made: Schedule) -> list[list[Step]]:
        """What each stage posts and computes, in order."""
        if id(made) not in self._made:  # a schedule of this folding, so it lives as long
            self._made[id(made)] = programs(made)
        return self._made[id(made)]

    def step(self, encode: bool = True) -> Schedule:
        """The schedule of a training step, with the next step's pictures in its holes if they are to be encoded there."""
        encode = "next" if encode and self.config.encode == "online" else None
        return self.schedule_for(self.config.schedule, self.batch.accum, encode)

    def expects(
        self, templates: Templates, stage: int, op: Op, latents: tuple[int, int, int], pictures: tuple[int, int, int]
    ) -> dict[str, tuple]:
        """Name -> (shape, dtype) of what a neighbour sends to `stage` for `op`; sizes are (micro-batch, height, width)."""
        if op.kind == "E":
            sample = templates.vae(*pictures)[self.encoders.vae[stage].start].sample
            texts = [i for above in range(self.stages - 1, stage, -1) for i in self.encoders.texts_of(above)]
            shapes = [templates.text(i, pictures[0]) for i in texts]
            return {"sample": (tuple(sample.shape), sample.dtype)} | {n: s for each in shapes for n, s in each.items()}
        place = self.cut.down[stage] if op.chunk == "down" else self.cut.up[stage + 1]
        if op.kind == "B":  # gradients come over the cut at which this chunk ends
            place = self.cut.down[stage + 1] if op.chunk == "down" else self.cut.up[stage]
        chosen = wire if op.kind == "F" else returning
        named = chosen(templates.unet(*latents)[place], op.chunk)
        return {name: (tuple(t.shape), t.dtype) for name, t in named.items()}

    def sent_bytes(self, templates: Templates, schedule: Schedule) -> list[int]:
        """What each stage sends to its neighbours in a step of this schedule."""
        config, factor, sent = self.config, templates.spec.vae_factor, [0] * self.stages
        side, size = config.resolution, self.batch.micro_batch
        for src, dst, op in messages(schedule):
            expected = self.expects(templates, dst, op, (size, side // factor, side // factor), (size, side, side))
            sent[src] += sum(math.prod(shape) * kind.itemsize for shape, kind in expected.values())
        return sent

    def balance(self) -> str:
        """How evenly the work is shared, in words: with --encode online, which balances them together, the encoders' too."""
        rows = cut.plan(self.costs, self.cut, self.memory)
        unet, words = sum(c.total for c in self.costs), "the UNet's work"
        work = [row.cost_share * unet for row in rows]
        if self.config.encode == "online":
            work, words = (
                [w + e for w, e in zip(work, self.encoders.cost, strict=True)],
                "the UNet's and encoders' work",
            )
        shares = ", ".join(f"{w / sum(work):.1%}" for w in work)
        return f"{shares} of {words}, slowest over mean {max(work) / sum(work) * self.stages:.3f}"

    def describe(self, spec: ModelSpec, samples: int, bandwidth: float | None = None, rate: float | None = None) -> str:
        """What --dry-run prints. bandwidth in GB/s and rate in TFLOP/s, None for unknown: then messages cost nothing."""
        config, made = self.config, self.step()
        check(made)
        unet = cut.plan(self.costs, self.cut, self.memory, self.encoders.vae, self.encoders.text)
        rows = [
            dataclasses.replace(row, memory=row.memory + frozen)
            for row, frozen in zip(unet, self.encoders.bytes, strict=True)
        ]
        sent = self.sent_bytes(Templates(spec, config.precision, torch.device("cpu")), made)
        parameters, replicas = sum(row.parameters for row in rows), self.batch.replicas
        reduced = [2 * (replicas - 1) * 4 * row.parameters // replicas for row in rows]
        hop, free = 0.0, "if messages cost nothing; give --bandwidth GB/S and --tflops T to see what they cost"
        if bandwidth and rate:  # how many FLOP could be done while the average message of a sample is on its way
            message = sum(sent) / max(1, len(messages(made))) / self.batch.micro_batch
            hop, free = message / (1e9 * bandwidth) * 1e12 * rate, f"at {bandwidth:.3g} GB/s and {rate:.3g} TFLOP/s"
        busy = simulate(made, dataclasses.replace(made.costs, hop=hop)).busy
        lines = [
            f"model      {spec.name}, UNet of {parameters:,} parameters, predicts {config.prediction}; "
            f"{sum(c.total for c in self.costs) / 1e12:.3f} TFLOP per image, forward and backward, and "
            f"{sum(self.encoders.cost) / 1e12:.3f} to encode it",
            f"data       {config.data}: {samples} samples at {config.resolution} x {config.resolution}, "
            f"{-(-samples // self.batch.global_batch)} steps per epoch",
            f"stages     {self.stages}, {replicas} replicas; rank = replica x {self.stages} + stage",
            f"batch      {self.batch}",
            f"schedule   {config.schedule}, encode {config.encode}: {sum(busy) / len(busy):.1%} busy "
            f"({', '.join(f'{b:.1%}' for b in busy)}), {free}",
            cut.table(rows),
            f"balance    {self.balance()}",
        ]
        for stage, (wired, averaged) in enumerate(zip(sent, reduced, strict=True)):
            lines.append(
                f"wire       stage {stage} sends {wired / cut.MIB:.2f} MiB to its neighbours and {averaged / cut.MIB:.2f} MiB "
                "to average gradients, per step"
            )
        return "\n".join(lines)


def usable_memory(device: torch.device) -> float:
    """Bytes that a rank may plan with: a GPU's less what torch, NCCL and the kernels take; a CPU has no limit."""
    return 0.85 * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def plan_fold(
    spec: ModelSpec, config: Config, batch: Batch, stages: int, device: torch.device, times: dict | None = None
) -> Folding:
    """The best fold for these flags; raises UsageError if nothing fits the device's memory.

    `times`: measured ones (`timing.Times`) to balance by, instead of counted FLOPs.
    """
    dtype = models.DTYPES[config.precision]
    costs, vae_costs = count_units(spec, config)
    _, texts = models.frozen_on_meta(spec)
    # A multiplication and an addition per weight and token.
    text_costs = {name: 2.0 * TOKENS * weights(text) for name, text in texts.items()}
    if times is not None:
        costs = cut.timed(costs, [times["unet", i] for i in range(len(costs))])
        vae_costs = cut.timed(vae_costs, [times["vae", i] for i in range(len(vae_costs))])
        text_costs = {name: times["text", i][0] for i, name in enumerate(texts)}
    sizes = {name: float(weights(text) * dtype.itemsize) for name, text in texts.items()}
    per_parameter = 8.0 + 8.0 * (config.optimizer == "adamw") + 4.0 * bool(config.ema) + 2.0 * (dtype.itemsize == 2)
    fixed, recompute = GIB / 2 * (device.type == "cuda"), config.activations == "checkpoint"
    limit = usable_memory(device)
    for room in ROOMS[config.schedule]:
        memory = Memory(per_parameter, batch.micro_batch, batch.accum, room, fixed, recompute)
        try:
            found = cut.fold(costs, stages, memory, limit)
            encoders = place_encoders(costs, found, memory, vae_costs, text_costs, sizes, config)
            # Again, now that it is known what the encoders take on each stage: memory, and of a step's time if online.
            extra = encoders.cost if config.encode == "online" else None
            found = cut.fold(costs, stages, memory, limit, extra=extra, taken=encoders.bytes)
            break
        except UsageError:
            if room == ROOMS[config.schedule][-1]:
                raise
    flat = unet_units(models.empty_unet(spec))
    shapes = [
        {n: p.shape for i in [*down, *up] for n, p in flat[i].parameters().items()}
        for down, up in map(found.chunks, range(stages))
    ]
    return Folding(config, batch, costs, found, memory, encoders, shapes)


def place_encoders(
    costs: list[UnitCost], fold: Fold, memory: Memory, vae_costs: list[UnitCost],
    text_costs: dict[str, float], text_bytes: dict[str, float], config: Config,
) -> Encoders:  # fmt: skip
    """Encoders go where there is time: beside all of a stage's work if they run online, else beside each other."""
    rows, unet = cut.plan(costs, fold, memory), sum(c.total for c in costs)
    load, slack = [0.0] * fold.stages, 0.1
    if config.encode == "online":
        load, slack = [row.cost_share * unet for row in rows], 0.02
    used = [row.memory for row in rows]
    vae, at = cut.place_encoders(vae_costs, [*text_costs.values()], [*text_bytes.values()], load, used, slack)
    places = dict(zip(text_costs, at, strict=True))
    item = 2 if config.precision == "bf16" else 4  # the VAE never runs in fp16

    def needs(stage: int) -> float:
        units = [vae_costs[i] for i in vae[stage]]
        # A resnet's input, which is its residual, and what its norm and its convolution take and give.
        at_work = memory.micro_batch * max((u.sample + 3 * u.output for u in units), default=0)
        weights = item * sum(u.parameters for u in units) + sum(b for n, b in text_bytes.items() if places[n] == stage)
        return weights + at_work

    def takes(stage: int) -> float:
        text = sum(cost for name, cost in text_costs.items() if places[name] == stage)
        return text + sum(vae_costs[i].forward for i in vae[stage])

    stages = range(fold.stages)
    return Encoders(vae, places, [takes(stage) for stage in stages], [needs(stage) for stage in stages])


def weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def count_units(spec: ModelSpec, config: Config) -> tuple[list[UnitCost], list[UnitCost]]:
    """FLOPs, parameters and bytes of each unit of the UNet and of the VAE's encoder, for one sample."""
    dtype, side = models.DTYPES[config.precision], config.resolution
    counting = Templates(spec, config.precision, torch.device("cpu"))
    unet = fake_model(UNet2DConditionModel, spec.unet, counting.mode, dtype=dtype)
    latent = side // spec.vae_factor
    with counting.mode:
        carry = counting.inputs(1, latent, latent, dtype)
        costs = cut.count(unet_units(unet), dataclasses.replace(carry, timestep=torch.tensor([1])))
        pixels = torch.empty(1, 3, side, side, dtype=counting.vae_dtype)
        with torch.no_grad():
            return costs, cut.count(counting.vae_units, Carry(sample=pixels), backward=False)


def units_of(flat: list[Unit], folding: Folding, stage: int) -> dict[str, list[Unit]]:
    """The units of a stage's two chunks."""
    return {c: [flat[i] for i in chunk] for c, chunk in zip(("down", "up"), folding.cut.chunks(stage), strict=True)}
