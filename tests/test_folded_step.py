"""A whole step, every rank's schedule played in one process: the same gradients as the uncut UNet.

This is `pipeline_train.py` without its wire: stages hand messages to each other through a dictionary.
"""

import pytest
import torch

from common.cut import count, fold, schedule_costs
from common.deferred import WeightQueue, defer
from common.schedule import build, simulate
from common.units import (
    Carry,
    add_gradients,
    arrive,
    as_leaves,
    backward,
    gradients,
    gradients_to_send,
    probe,
    run_units,
    unet_carry,
    unet_units,
    vae_encoder_units,
    wire,
)
from tests.pipeline_models import SMALL, small_unet, small_vae, unet_inputs


class Stage:
    """One rank: its two chunks, what it keeps of each micro-batch, what it must still do for the weights."""

    def __init__(self, flat, templates, cut, rank, queue, recompute):
        self.rank, self.last, self.recompute, self.queue = rank, cut.stages - 1, recompute, queue
        self.units = {c: [flat[i] for i in chunk] for c, chunk in zip(("down", "up"), cut.chunks(rank), strict=True)}
        self.templates = {"down": templates[cut.down[rank]], "up": templates[cut.up[rank + 1]]}
        self.inputs, self.outputs, self.home, self.work = {}, {}, {}, {}

    def forward(self, chunk, m, received):
        """Run a chunk from what the wire brought (None: this rank has it); returns what goes on the wire."""
        kept = self.outputs.get(("down", m)) if chunk == "up" else None
        if isinstance(received, Carry):
            carry = received
        else:
            carry = arrive(self.templates[chunk], received, kept)
        # conv_in's inputs are data: they stay as they are, and the leaves begin after it.
        self.inputs[chunk, m] = as_leaves(carry) if carry.emb is not None else carry
        self.outputs[chunk, m] = run_units(self.units[chunk], self.inputs[chunk, m], self.recompute)
        return {name: t.detach() for name, t in wire(self.outputs[chunk, m], chunk).items()}

    def backward(self, chunk, m, grads):
        """Gradients of a chunk's inputs; those of skips and embedding wait at home for the down chunk."""
        grads = add_gradients(grads, self.home.pop(m)) if chunk == "down" else grads
        backward(self.outputs.pop((chunk, m)), grads)
        leaves = self.inputs.pop((chunk, m))
        if work := self.queue.take():
            self.work[chunk, m] = work
        found, sent = gradients(leaves), gradients_to_send(leaves, chunk)
        if chunk == "up":
            self.home[m] = {name: g for name, g in found.items() if name not in sent}
        return sent


def play_step(schedule, stages, carries, targets, samples):
    """Operations in the order of time, messages in a dictionary; returns the loss of all samples."""
    results, total = {}, 0.0
    for span in simulate(schedule).spans:
        r, op = span.rank, span.op
        stage, c, m = stages[r], op.chunk, op.micro
        if op.kind == "W":
            stage.queue.flush(stage.work.pop((c, m)))
        elif op.kind == "F":
            before = r - 1 if c == "down" else r + 1
            if c == "down":
                received = carries[m] if r == 0 else results.pop((before, op))
            else:
                received = results.pop((before, op) if r < stage.last else (r, op._replace(chunk="down")))
            results[r, op] = stage.forward(c, m, received)
        elif c == "up" and r == 0:
            out = stage.outputs[c, m].sample
            loss = (out - targets[m]).square().mean() * len(targets[m]) / samples
            total += loss.item()
            (grad,) = torch.autograd.grad(loss, out, retain_graph=False)
            results[r, op] = stage.backward(c, m, {"sample": grad})
        else:
            before = (r - 1 if c == "up" else r + 1, op)
            turned = c == "down" and r == stage.last
            results[r, op] = stage.backward(c, m, results.pop((r, op._replace(chunk="up")) if turned else before))
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
    for batch, target in zip(batches, targets, strict=True):
        loss = (unet(**batch).sample - target).square().mean() * len(target) / sum(micros)
        loss.backward()
    whole = {n: p.grad for n, p in unet.named_parameters()}
    unet.zero_grad(set_to_none=True)

    flat = unet_units(unet)
    costs = count(flat, unet_carry(**batches[0]))
    unet.zero_grad(set_to_none=True)
    cut = fold(costs, stages)
    schedule = build(kind, stages, len(micros), schedule_costs(costs, cut))
    queues = [WeightQueue() for _ in range(stages)]
    if kind == "zero-bubble":
        for r in range(stages):
            for i in [*cut.chunks(r)[0], *cut.chunks(r)[1]]:
                for module in flat[i].modules.values():
                    defer(module, queues[r])
    templates = probe(flat, unet_carry(**batches[0]))
    ranks = [Stage(flat, templates, cut, r, queues[r], recompute) for r in range(stages)]
    play_step(schedule, ranks, [unet_carry(**batch) for batch in batches], targets, sum(micros))
    for parameter, p in unet.named_parameters():
        # The bias of keys has no effect, since softmax takes it out: its gradient is all rounding.
        scale = max(whole[parameter].abs().max().item(), 1e-4)
        torch.testing.assert_close(p.grad, whole[parameter], rtol=1e-5, atol=1e-5 * scale, msg=parameter)
    # Nothing is left behind.
    for rank in ranks:
        assert not (rank.inputs or rank.outputs or rank.home or rank.work or rank.queue.pending)


def test_the_encoder_in_pieces_from_the_last_rank_to_the_first():
    vae, pixels = small_vae().eval(), torch.randn(2, 3, 32, 40)
    flat, carry = vae_encoder_units(vae), Carry(sample=pixels)
    with torch.no_grad():
        for r in reversed(range(4)):
            carry = arrive(Carry(sample=carry.sample), wire(run_units(flat[(3 - r) * 4 : (4 - r) * 4], carry), "down"))
        assert torch.equal(carry.sample, vae._encode(pixels))
