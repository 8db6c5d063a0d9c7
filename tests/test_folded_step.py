"""A whole step, every rank's schedule played in one process: the same gradients as the uncut UNet.

The stages are those of `pipeline_train.py`; in place of its wire they hand messages to each other through a dictionary.
"""

import dataclasses

import pytest
import torch

from common.config import Batch, Config
from common.cut import Memory, count, fold
from common.folding import Encoders, Folding, Templates
from common.loss import NoiseSchedule
from common.models import SCHEDULER, build_frozen, spec_of
from common.optim import LossScale
from common.schedule import needs, simulate
from common.stage import Stage
from common.units import Carry, arrive, run_units, unet_carry, unet_units, vae_encoder_units, wire
from tests.pipeline_models import SMALL, small_unet, small_vae, unet_inputs


def stages_of(unet, name, kind, count, costs, recompute):
    """The real stages of `pipeline_train.py`, all in one process, around parts of one UNet."""
    spec = dataclasses.replace(spec_of(Config(preset=name)), unet=dict(unet.config))
    config = Config(schedule=kind, precision="fp32", activations="checkpoint" if recompute else "keep")
    nothing = Encoders([range(0)] * count, {}, [0.0] * count, [0.0] * count)
    folding = Folding(config, Batch(2, 4, 1), costs, fold(costs, count), Memory(), nothing, [])
    cpu, frozen = torch.device("cpu"), build_frozen(spec_of(Config()), 0)
    templates, noise, scale = Templates(spec, "fp32", cpu), NoiseSchedule(SCHEDULER, "epsilon"), LossScale(False, cpu)
    return [Stage(r, folding, unet, frozen, templates, noise, scale, cpu) for r in range(count)]


def play_step(schedule, stages, carries, targets):
    """Operations in the order of time, messages in a dictionary; returns the loss of all samples."""
    results, samples, total = {}, sum(map(len, targets)), 0.0
    for span in simulate(schedule).spans:
        r, op, stage = span.rank, span.op, stages[span.rank]
        source = needs(r, op, len(stages))
        received = results.pop(source) if source and source[0] != r else None
        if op.kind == "W":
            stage.weight_gradients(op)
        elif op.kind == "F":
            received = carries[op.micro] if r == 0 and op.chunk == "down" else received
            results[r, op] = stage.forward(op, carries[op.micro].sample.shape[:1] + (15, 17), received)
        else:
            if r == 0 and op.chunk == "up":
                out, target = stage.outputs["up", op.micro].sample, targets[op.micro]
                loss = (out - target).square().mean() * len(target) / samples
                total += loss.item()
                received = {"sample": torch.autograd.grad(loss, out)[0]}
            results[r, op] = stage.backward(op, received)
    return total


@pytest.mark.parametrize(
    "name, kind, stages, recompute",
    [
        ("tiny", "1f1b", 1, False),
        ("tiny", "1f1b", 4, True),
        ("tiny", "zero-bubble", 2, False),
        ("tiny", "zero-bubble", 6, True),
        ("sdxl", "zero-bubble", 4, False),
    ],
)
def test_every_schedule_has_the_gradients_of_the_uncut_unet(name, kind, stages, recompute):
    unet, micros = small_unet(name), [2, 1, 1, 2]
    batches = [unet_inputs(SMALL[name], size, 15, 17) for size in micros]
    targets = [torch.randn_like(batch["sample"]) for batch in batches]
    expected = 0.0
    for batch, target in zip(batches, targets, strict=True):
        loss = (unet(**batch).sample - target).square().mean() * len(target) / sum(micros)
        loss.backward()
        expected += loss.item()
    whole = {n: p.grad for n, p in unet.named_parameters()}
    unet.zero_grad(set_to_none=True)

    costs = count(unet_units(unet), unet_carry(**batches[0]))
    unet.zero_grad(set_to_none=True)
    ranks = stages_of(unet, name, kind, stages, costs, recompute)
    schedule = ranks[0].folding.schedule_for(kind, len(micros))
    total = play_step(schedule, ranks, [unet_carry(**batch) for batch in batches], targets)
    assert total == pytest.approx(expected, rel=1e-6)
    for parameter, p in unet.named_parameters():
        # The bias of keys has no effect, since softmax takes it out: its gradient is all rounding.
        scale = max(whole[parameter].abs().max().item(), 1e-4)
        torch.testing.assert_close(p.grad, whole[parameter], rtol=1e-5, atol=1e-5 * scale, msg=parameter)
    assert [rank.in_flight() for rank in ranks] == [0] * stages  # nothing is left behind


def test_the_encoder_in_pieces_from_the_last_rank_to_the_first():
    vae, pixels = small_vae().eval(), torch.randn(2, 3, 32, 40)
    flat, carry = vae_encoder_units(vae), Carry(sample=pixels)
    with torch.no_grad():
        for r in reversed(range(4)):
            carry = arrive(Carry(sample=carry.sample), wire(run_units(flat[(3 - r) * 4 : (4 - r) * 4], carry), "down"))
        assert torch.equal(carry.sample, vae._encode(pixels))
