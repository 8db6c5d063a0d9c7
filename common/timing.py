"""How long each unit takes on this machine, for --costs measured: FLOPs do not know of memory, caches and small layers.

Units are dealt to the ranks; each makes a unit with weights of no meaning, runs it on inputs of no meaning, and drops it.
"""

import itertools
import statistics

import torch
from torch import nn

from common import models
from common.config import Batch, Config
from common.deferred import WeightQueue, defer, undo_defer
from common.encode import read_text
from common.folding import Templates
from common.meters import moment, seconds
from common.models import TOKENS, Frozen, ModelSpec
from common.units import Carry, Unit, as_leaves, returning, unet_units, vae_encoder_units

ROUNDS = 6  # the first chooses kernels, the median of the others counts: all ranks measure at once, as they will train
Times = dict[tuple[str, int], tuple[float, float, float]]  # ("unet" | "vae" | "text", i) -> forward, backward, weights


def time_units(
    spec: ModelSpec, config: Config, batch: Batch, frozen: Frozen, device: torch.device, rank: int, world_size: int
) -> Times:
    """Seconds of this rank's share of all units and text encoders, for one micro-batch.

    In rounds through all of them, so that what disturbs the machine for a moment spoils one round of some and not all
    of one.
    """
    templates = Templates(spec, config.precision, device)
    size, side = batch.micro_batch, config.resolution
    frozen.to(torch.device("cpu"), models.DTYPES[config.precision])
    unet, vae = unet_units(models.empty_unet(spec).train()), vae_encoder_units(frozen.vae)
    latents, pictures = templates.unet(size, *[side // spec.vae_factor] * 2), templates.vae(size, side, side)
    jobs = [("unet", i) for i in range(len(unet))] + [("vae", i) for i in range(len(vae))]
    jobs += [("text", i) for i in range(len(frozen.text_encoders))]
    taken: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _, (kind, i) in itertools.product(range(ROUNDS), jobs[rank::world_size]):
        if kind == "unet":
            time = _time_unit(unet[i], _filled(latents[i], device), config.precision, device)
        elif kind == "vae":
            carry = _filled(pictures[i], device)
            time = _time_frozen(list(vae[i].modules.values()), lambda u=vae[i], c=carry: u(c), device)
        else:
            text, tokens = frozen.text_encoders[i], torch.zeros(size, TOKENS, dtype=torch.int64, device=device)
            time = _time_frozen([text], lambda t=text, k=tokens: read_text(t, k, spec.is_xl), device)
        taken.setdefault((kind, i), []).append(time)
    middle = {unit: zip(*rounds[1:], strict=True) for unit, rounds in taken.items()}
    return {unit: tuple(statistics.median(each) for each in parts) for unit, parts in middle.items()}


def _filled(template: Carry, device: torch.device) -> Carry:
    """Tensors of the template's shapes with something in them."""
    return template.with_tensors(
        {name: torch.ones(t.shape, dtype=t.dtype, device=device) for name, t in template.tensors().items()}
    )


def _time_unit(unit: Unit, carry: Carry, precision: str, device: torch.device) -> tuple[float, float, float]:
    """Forward, gradients of inputs, gradients of weights."""
    queue = WeightQueue()
    for module in unit.modules.values():
        module.to_empty(device=device)
        for p in module.parameters():
            nn.init.constant_(p, 0.01)
        defer(module, queue)
    leaves = as_leaves(carry) if carry.emb is not None else carry
    start = moment(device)
    with models.autocast(precision, device):
        out = unit(leaves)
    forward = moment(device)
    roots = [t for t in returning(out, "down").values() if t.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    backward = moment(device)
    queue.flush()
    times = seconds(start, forward), seconds(forward, backward), seconds(backward, moment(device))
    for module in unit.modules.values():
        undo_defer(module)
        module.to_empty(device="meta")
    return times


@torch.no_grad()
def _time_frozen(modules: list[nn.Module], run, device: torch.device) -> tuple[float, float, float]:
    for module in modules:
        module.to(device)
    start = moment(device)
    run()
    end = moment(device)
    for module in modules:
        module.to("cpu")
    return seconds(start, end), 0.0, 0.0
