"""What --dry-run prints: the batch product, what a step sends and how often, from how many images on that hides behind
the computation, and the memory of a rank. Nothing here needs a GPU, or the ranks that it plans for."""

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import models, shards
from common.config import Batch, Config
from common.cut import GIB
from common.folding import count_units
from common.job import Job
from common.models import ModelSpec
from common.units import fake_mode, fake_model

BUCKET = 200 * 2**20  # of DDP


# ── What goes over the wire ──────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Collective:
    """One kind of collective of an optimizer step, on one rank."""

    kind: str
    when: str
    count: int
    message: int  # bytes of the whole tensor, all `count` together
    ranks: int  # in its group
    rounds: int  # (N-1)/N of the message are sent once, or twice for an all-reduce
    hidden: str = "all"  # behind "all" of the computation, or only the "backward" pass

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a ring."""
        return self.rounds * (self.ranks - 1) * self.message // self.ranks


def ddp_collectives(parameters: int, config: Config, ranks: int) -> list[Collective]:
    """The last backward pass of a step, in buckets; see the table in ddp_train.py."""
    message = parameters * (2 if config.grad_compress == "bf16" else 4)
    return [Collective("all-reduce", "last backward", -(-4 * parameters // BUCKET), message, ranks, 2, "backward")]


def fsdp_collectives(groups: list[shards.Group], config: Config, ranks: int, accum: int) -> list[Collective]:
    """One optimizer step; see the table in fsdp_train.py. Rows are padded to an even share before they are sent."""
    size = config.shard_size or ranks
    item = models.DTYPES[config.precision].itemsize
    gathered = sum(g.padded(size) for g in groups)
    again = [] if config.no_reshard else [g for g in groups if not g.is_root]
    plan = [
        Collective("all-gather", "forward", accum * len(groups), accum * gathered * item, size, 1),
        Collective(
            "all-gather", "backward", accum * len(again), accum * sum(g.padded(size) for g in again) * item, size, 1
        ),
        Collective("reduce-scatter", "last backward", len(groups), 4 * gathered, size, 1),
    ]
    if size < ranks:
        shard = 4 * gathered // size
        plan.append(Collective("all-reduce", "last backward", len(groups), shard, ranks // size, 2, "backward"))
    return [c for c in plan if c.count]


def critical_micro_batch(plan: list[Collective], flops: float, bandwidth: float, rate: float) -> float:
    """Images per GPU and step from which on communication hides behind computation.

    flops: forward and backward of one image · bandwidth: bytes a rank sends per second · rate: FLOP per second that the
    training achieves. What hides behind the backward pass alone has two thirds of the work to do so.
    """
    behind_all = sum(c.sent for c in plan) / bandwidth / (flops / rate)
    behind_backward = sum(c.sent for c in plan if c.hidden == "backward") / bandwidth / (2 / 3 * flops / rate)
    return max(behind_all, behind_backward)


# ── What a step computes and holds ───────────────────────────────────────────────────────────────────────────────────
class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made under it and are still alive, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {id(storage) for storage in _storages((args, kwargs))}  # of weights, too, by way of their views
        for storage in _storages(result):
            if id(storage) not in given and storage not in self._known:
                self._known[storage] = weakref.finalize(storage, self._drop, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return result

    def _drop(self, size: int) -> None:
        self.now -= size


def _storages(values) -> list[torch.UntypedStorage]:
    return [v.untyped_storage() for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


def activation_bytes(spec: ModelSpec, config: Config, micro_batch: int, half: bool) -> int:
    """Bytes at the worst moment of a forward and backward pass, without weights and gradients: a pass over fake tensors,
    whose shapes and types are the real ones, but which computes and stores nothing.

    half: the weights come in `precision`, as FSDP gathers them, so that autocast makes no copies of its own.
    """
    side, precision, recompute = config.resolution, config.precision, config.activations == "checkpoint"
    mode, device = fake_mode(), torch.device("cpu")
    unet = fake_model(
        UNet2DConditionModel, spec.unet, mode, device, models.DTYPES[precision] if half else torch.float32
    )
    with mode:
        for p in unet.train().parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # counted elsewhere
        latent = side // spec.vae_factor
        inputs = models.empty_inputs(spec, micro_batch, latent, latent, torch.float32, device)

        def forward() -> torch.Tensor:
            with models.autocast(precision, device), _norms_as_on_cuda():
                return unet(**inputs).sample

        with LiveBytes() as live:
            block = _largest_block(unet, live)
            forward().float().square().mean().backward()
        activations = live.peak
        if recompute:  # the inputs of all blocks, and the inside of one
            unet.enable_gradient_checkpointing()
            with LiveBytes() as live:
                out = forward()  # noqa: F841 - holds the graph, which holds the inputs
                activations = max(live.peak, live.now + block[0])
    return activations


@contextlib.contextmanager
def _norms_as_on_cuda() -> Iterator[None]:
    """Autocast computes norms in float32 on a GPU, and keeps what they take and give in float32; on a CPU it does not."""
    group_norm, layer_norm = F.group_norm, F.layer_norm

    def in_fp32(norm):
        def call(x, *args, **kwargs):
            args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
            kwargs = {k: a.float() if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
            with torch.autocast("cpu", enabled=False):
                return norm(x.float(), *args, **kwargs)

        return call

    F.group_norm, F.layer_norm = in_fp32(group_norm), in_fp32(layer_norm)
    try:
        yield
    finally:
        F.group_norm, F.layer_norm = group_norm, layer_norm


def _largest_block(unet: nn.Module, live: LiveBytes) -> list[int]:
    """Filled by a forward pass: [bytes that the most expensive resnet or transformer block keeps for its backward pass]."""
    largest, before = [0], []
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D | BasicTransformerBlock):
            module.register_forward_pre_hook(lambda *_: before.append(live.now))
            module.register_forward_hook(lambda *_: largest.append(max(largest.pop(), live.now - before.pop())))
    return largest


def kept_bytes(parameters: int, config: Config) -> dict[str, int]:
    """What stays from step to step, in bytes; everything is float32. Of `parameters` that a rank holds."""
    kept = {
        "weights": 4,
        "gradients": 4,
        "optimizer": 8 if config.optimizer == "adamw" else 0,
        "ema": 4 if config.ema else 0,
    }
    return {what: size * parameters for what, size in kept.items() if size}


def memory_of(script: str, spec: ModelSpec, config: Config, batch: Batch, ranks: int) -> dict[str, int]:
    """Bytes of a rank at the worst moment of a step, by what they are for."""
    activations = activation_bytes(spec, config, batch.micro_batch, half=script == "fsdp")
    groups = shards.groups_of_spec(spec)
    parameters = sum(g.parameters for g in groups)
    vae, text = models.frozen_parameters(spec)
    half = models.DTYPES[config.precision].itemsize
    frozen = {"frozen": text * half + vae * (4 if config.precision == "fp16" else half)}
    if script == "ddp":
        return kept_bytes(parameters, config) | frozen | {"activations": activations}
    size, item = config.shard_size or ranks, models.DTYPES[config.precision].itemsize
    kept = {} if config.offload else kept_bytes(sum(g.padded(size) for g in groups) // size, config)
    gradients = kept.pop("gradients", 0)  # are made as activations go
    whole = {"whole gradients": 4 * parameters} if batch.accum > 1 else {}
    # Two moments can be the worst. At the end of the forward pass, the root and the last groups are gathered; at the end
    # of the backward pass, the gradients are there, and a group still has its weights, their gradients, and these as
    # float32 on their way into a reduce-scatter.
    gathered = groups if config.no_reshard else [g for g in groups if g.is_root] + groups[-2:]
    forward = {"gathered": item * sum(g.padded(size) for g in gathered), "activations": activations}
    largest = max(g.padded(size) for g in groups)
    backward = {"gradients": gradients, "largest group": (2 * item + 4) * largest}
    return kept | frozen | whole | max(forward, backward, key=lambda moment: sum(moment.values()))


# ── The text ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product here."""
    side, repeats = (8192, 20) if device.type == "cuda" else (512, 5)
    a = torch.randn(side, side, device=device, dtype=dtype)
    for repeat in range(repeats + 1):  # the first one chooses kernels
        if repeat == 1:
            began = time.perf_counter()
        b = a @ a
        if repeat in (0, repeats):
            b[0, 0].item()  # waits for it
    return repeats * 2 * side**3 / (time.perf_counter() - began)


def describe(script: str, job: Job, ranks: int, bandwidth: float | None, rate: float | None) -> str:
    """The plan. bandwidth in GB/s and rate in TFLOP/s, None for unknown."""
    config, batch, spec, samples = job.config, job.batch, job.spec, job.count
    groups = shards.groups_of_spec(spec)
    parameters = sum(g.parameters for g in groups)
    units, _ = count_units(spec, config)
    flops = sum(unit.total for unit in units)
    plan = (
        ddp_collectives(parameters, config, ranks)
        if script == "ddp"
        else fsdp_collectives(groups, config, ranks, batch.accum)
    )
    memory = memory_of(script, spec, config, batch, ranks)
    steps = -(-samples // batch.global_batch)
    lines = [
        f"model      {spec.name}, UNet of {parameters:,} parameters, predicts {config.prediction}; "
        f"{flops / 1e12:.4g} TFLOP per image, forward and backward",
        f"data       {config.data}: {samples} samples at {config.resolution} x {config.resolution}, {steps} steps per epoch",
        f"replicas   {batch.replicas}",
        f"batch      {batch}",
        f"steps      {config.steps}, {config.optimizer}, lr {config.lr:g} {config.lr_schedule}, warm-up {config.warmup}, {config.precision}",
        f"memory     {sum(memory.values()) / GIB:.2f} GiB per rank: "
        + ", ".join(f"{what} {size / GIB:.2f}" for what, size in memory.items())
        + ("; --compile needs less for activations" if config.compile else ""),
    ]
    for c in plan:
        lines.append(
            f"wire       {c.kind:14} {c.when:13} {c.count:4} x {c.message / c.count / 2**20:8.2f} MiB over {c.ranks} ranks: "
            f"{c.sent / GIB:.3f} GiB sent per rank and step"
        )
    lines.append(f"wire       {sum(c.sent for c in plan) / GIB:.3f} GiB sent per rank and step in all")
    if ranks == 1:
        return "\n".join(lines)
    if bandwidth and rate:
        images = critical_micro_batch(plan, flops, 1e9 * bandwidth, 1e12 * rate)
        here = batch.micro_batch * batch.accum
        verdict = "hides" if here >= images else "does not hide"
        lines.append(
            f"critical   {images:.2f} images per GPU and step at {bandwidth:.3g} GB/s and {rate:.3g} TFLOP/s: with {here}, "
            f"communication {verdict} behind computation"
        )
    else:
        lines.append("critical   give --bandwidth GB/S and --tflops T to see how many images hide the communication")
    return "\n".join(lines)
