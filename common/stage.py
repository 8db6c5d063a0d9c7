"""One stage of the folded pipeline: what it computes when the schedule says so, and what it keeps until then.

No messages here: an operation is given what arrived for it, and returns what is to be sent on. `pipeline_train.py` puts
the wire between stages; the tests a dictionary.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from common import models
from common.deferred import WeightQueue, defer
from common.encode import Encoded, put_together, read_text
from common.folding import Folding, Templates, units_of
from common.ledger import Tally
from common.loss import NoiseSchedule
from common.models import Frozen
from common.optim import LossScale
from common.schedule import Op
from common.units import (
    Carry,
    add_gradients,
    arrive,
    as_leaves,
    backward,
    gradients,
    gradients_to_send,
    run_units,
    unet_carry,
    unet_units,
    vae_encoder_units,
    wire,
)

Named = dict[str, Tensor]


@dataclass
class Feed:
    """The samples of a step: read by the outermost stage, and what of them the encoders need, everywhere."""

    batches: list[dict]  # outermost stage only
    pixels: Tensor  # [micro-batches, B, 3, H, W] uint8
    tokens: Tensor  # [micro-batches, B, encoders, 77]
    encoded: list[Encoded] = field(default_factory=list)  # outermost stage only, filled by E

    @property
    def pictures(self) -> tuple[int, int, int]:
        """Micro-batch, height, width."""
        _, size, _, height, width = self.pixels.shape
        return size, height, width

    def latents(self, vae_factor: int) -> tuple[int, int, int]:
        """The same of what the encoders make of them."""
        size, height, width = self.pictures
        return size, height // vae_factor, width // vae_factor


@dataclass
class Flight:
    """What the operations of one schedule work on."""

    latents: tuple[int, int, int] | None = None  # micro-batch, height, width of what goes through the UNet
    feed: Feed | None = None  # what that is
    next_feed: Feed | None = None  # what goes through the encoders
    tally: Tally | None = None  # of a training step; without one nothing is kept for a backward
    held_out: list[Tensor] | None = None  # to be filled with losses per sample, unweighted
    carry: Carry | None = None  # instead of a feed, when drawing


def place_frozen(frozen: Frozen, folding: Folding, stage: int, device: torch.device, dtype: torch.dtype) -> None:
    """This stage's encoders go to the device. The outermost stage, which draws, keeps the rest on the host; the others
    forget it."""
    flat = vae_encoder_units(frozen.vae)
    mine = [module for i in folding.encoders.vae[stage] for module in flat[i].modules.values()]
    mine += [frozen.text_encoders[i] for i in folding.encoders.texts_of(stage)]
    held = {id(part) for module in mine for part in module.modules()}
    frozen.to(torch.device("cpu"), dtype)
    for module in mine:
        module.to(device)
    for network in (frozen.vae, *frozen.text_encoders):
        for part in network.modules():
            if stage != 0 and id(part) not in held:
                part._apply(lambda t: t.to("meta"), recurse=False)


class Stage:
    """The units of one rank, with what is in flight between their operations."""

    def __init__(
        self, stage: int, folding: Folding, unet: nn.Module, frozen: Frozen, templates: Templates,
        schedule: NoiseSchedule, loss_scale: LossScale, device: torch.device,
    ):  # fmt: skip
        self.stage, self.last, self.folding, self.templates = stage, folding.stages - 1, folding, templates
        self.schedule, self.loss_scale, self.frozen = schedule, loss_scale, frozen
        self.precision, self.device = folding.config.precision, device
        self.recompute = folding.config.activations == "checkpoint"
        self.units = units_of(unet_units(unet), folding, stage)
        flat = vae_encoder_units(frozen.vae)
        self.vae_units = [flat[i] for i in folding.encoders.vae[stage]]
        self.text_encoders = {i: frozen.text_encoders[i] for i in folding.encoders.texts_of(stage)}
        self.gradients = {
            chunk: torch.zeros(sum(p.numel() for u in units for p in u.parameters().values()), device=device)
            for chunk, units in self.units.items()
        }
        self.queue = WeightQueue()
        if folding.config.schedule == "zero-bubble":
            for unit in self.units["down"] + self.units["up"]:
                for module in unit.modules.values():
                    defer(module, self.queue)
        self.inputs: dict[tuple, Carry] = {}  # of chunks whose backward is to come, by (chunk, micro-batch)
        self.outputs: dict[tuple, Carry] = {}
        self.home: dict[int, Named] = {}  # gradients of skips and emb that the up chunk left for the down chunk
        self.work: dict[tuple, list] = {}  # weight gradients that wait for their W
        self.turned: dict[tuple, Named] = {}  # what the innermost stage hands to itself

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Of this stage's UNet units, by their names in the whole; those of the up chunk, which are final first, last."""
        return [(n, p) for chunk in ("down", "up") for unit in self.units[chunk] for n, p in unit.parameters().items()]

    def begin_step(self) -> None:
        """Zeroed gradients in one buffer for each chunk, so that a chunk's can be reduced by one call and without a copy."""
        self.queue.begin_step()
        for chunk, buffer in self.gradients.items():
            buffer.zero_()
            start = 0
            for unit in self.units[chunk]:
                for p in unit.parameters().values():
                    p.grad = buffer[start : start + p.numel()].view_as(p)
                    start += p.numel()

    def in_flight(self) -> int:
        """How much is kept for operations to come: nothing between steps."""
        kept = (self.inputs, self.outputs, self.home, self.work, self.turned, self.queue.pending)
        return sum(len(one) for one in kept)

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, op: Op, received: Named | None, flight: Flight) -> Named:
        """One operation of the schedule; returns what it sends on.

        The outermost stage holds both ends of the UNet: latents and noise go in, the loss comes out.
        """
        outermost, m = self.stage == 0, op.micro
        if op.kind == "E":
            made = self.encode(received, flight.next_feed.pixels[m], flight.next_feed.tokens[m])
            if outermost:
                flight.next_feed.encoded.append(self._finish_encoding(made, flight.next_feed.batches[m]))
            return {} if outermost else made
        if op.kind == "W":
            self.weight_gradients(op)
            return {}
        if op.kind == "B":
            return self.backward(op, self._loss_gradient(flight, m) if outermost and op.chunk == "up" else received)
        if outermost and op.chunk == "down":
            received = flight.carry or self._noisy(flight.feed, m)
        made = self.forward(op, flight.latents, received, keep=flight.tally is not None)
        if outermost and op.chunk == "up" and flight.held_out is not None:
            flight.held_out.append(self._loss(flight.feed, m, self.outputs.pop(("up", m)).sample, weighted=False))
        return made

    def _finish_encoding(self, made: Named, batch: dict) -> Encoded:
        """What the encoders of all stages made together -> latents and condition."""
        posterior_noise, time_ids = self._on_device(batch, "posterior_noise", "time_ids")
        hidden = [made[f"text.{i}"] for i in range(len(self.frozen.text_encoders))]
        text = [torch.cat(hidden, dim=-1).float(), *([made["pooled"].float()] if "pooled" in made else [])]
        return put_together(made["sample"].float(), posterior_noise, text, time_ids, self.frozen.vae.config)

    def _noisy(self, feed: Feed, m: int) -> Carry:
        """What conv_in is given; noisy, and so the sinusoids of t, stay float32."""
        t, noise = self._on_device(feed.batches[m], "t", "noise")
        return unet_carry(self.schedule.add_noise(feed.encoded[m].latents, noise, t), t, **feed.encoded[m].condition)

    def _loss(self, feed: Feed, m: int, prediction: Tensor, weighted: bool = True) -> Tensor:
        """[B] float32; 0 for slots without a sample."""
        t, noise, weight = self._on_device(feed.batches[m], "t", "noise", "weight")
        target = self.schedule.target(feed.encoded[m].latents, noise, t)
        each = self.schedule.loss(prediction, target, t, weighted)
        return torch.where(weight > 0, each, torch.zeros_like(each))

    def _loss_gradient(self, flight: Flight, m: int) -> Named:
        """Where backward begins: the gradient of the step's loss with respect to what the UNet said."""
        prediction = self.outputs["up", m].sample.detach().requires_grad_()
        each = self._loss(flight.feed, m, prediction)
        flight.tally.add(flight.feed.batches[m], flight.feed.encoded[m].finite, each.detach())
        scaled = each.sum() / self.folding.batch.global_batch * self.loss_scale.scale
        return {"sample": torch.autograd.grad(scaled, prediction)[0]}

    def _on_device(self, batch: dict, *names: str) -> list[Tensor]:
        return [batch[name].to(self.device, non_blocking=True) for name in names]

    def forward(
        self, op: Op, latents: tuple[int, int, int], received: Named | Carry | None, keep: bool = True
    ) -> Named:
        """F: run a chunk. `received` came over the wire; the outermost stage's down chunk is given the carry itself."""
        chunk, m = op.chunk, op.micro
        if isinstance(received, Carry):
            carry = received
        else:
            if chunk == "up" and self.stage == self.last:
                received = self.turned.pop(("F", m))
            place = self.folding.cut.down[self.stage] if chunk == "down" else self.folding.cut.up[self.stage + 1]
            kept = self.outputs["down", m] if chunk == "up" else None
            carry = arrive(self.templates.unet(*latents)[place], received, kept)
        with torch.set_grad_enabled(keep), models.autocast(self.precision, self.device):
            # What conv_in is given is data: the leaves begin after it.
            leaves = as_leaves(carry) if keep and carry.emb is not None else carry
            out = run_units(self.units[chunk], leaves, self.recompute and keep)
        if keep:
            self.inputs[chunk, m] = leaves
        elif chunk == "up":
            del self.outputs["down", m]  # its skips are used up
        if keep or chunk == "down" or self.stage == 0:
            self.outputs[chunk, m] = out
        sent = {name: t.detach().contiguous() for name, t in wire(out, chunk).items()}
        if chunk == "down" and self.stage == self.last:
            self.turned["F", m] = sent
            return {}
        return sent

    def backward(self, op: Op, received: Named | None) -> Named:
        """B: gradients of a chunk's inputs; those of skips and emb wait at home for the down chunk."""
        chunk, m = op.chunk, op.micro
        if chunk == "down" and self.stage == self.last:
            received = self.turned.pop(("B", m))
        grads = add_gradients(received, self.home.pop(m)) if chunk == "down" else received
        backward(self.outputs.pop((chunk, m)), grads)
        leaves = self.inputs.pop((chunk, m))
        if work := self.queue.take():
            self.work[chunk, m] = work
        if chunk == "down" and self.stage == 0:
            return {}
        sent = {name: t.contiguous() for name, t in gradients_to_send(leaves, chunk).items()}
        if chunk == "up":
            self.home[m] = {name: g for name, g in gradients(leaves).items() if name not in sent}
            if self.stage == self.last:
                self.turned["B", m] = sent
                return {}
        return sent

    def weight_gradients(self, op: Op) -> None:
        """W: the other half of an earlier B."""
        self.queue.flush(self.work.pop((op.chunk, op.micro)))

    @torch.no_grad()
    def encode(self, received: Named | None, pixels: Tensor, tokens: Tensor) -> Named:
        """E: this stage's part of the VAE's encoder, and of the text encoders. The last stage begins with the pictures.

        pixels [B, 3, H, W] uint8, tokens [B, encoders, 77] -> sample (on stage 0 the moments), text.I, pooled.
        """
        if received is None:
            received = {"sample": (pixels.float() / 127.5 - 1).to(self.templates.vae_dtype)}
        made = {
            "sample": run_units(self.vae_units, Carry(sample=received.pop("sample"))).sample.contiguous()
        } | received
        for i, encoder in self.text_encoders.items():
            hidden, *pooled = read_text(encoder, tokens[:, i], self.templates.spec.is_xl)
            made[f"text.{i}"] = hidden.contiguous()
            if pooled:
                made["pooled"] = pooled[0]
        return made
