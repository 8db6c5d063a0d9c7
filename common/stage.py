"""One stage of the folded pipeline: what it computes when the schedule says so, and what it keeps until then.

No messages here: an operation is given what arrived for it, and returns what is to be sent on. `pipeline_train.py` puts
the wire between stages; the tests a dictionary.
"""

import torch
from torch import Tensor, nn

from common import models
from common.deferred import WeightQueue, defer
from common.encode import read_text
from common.folding import Folding, Templates, units_of
from common.models import Frozen
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
    unet_units,
    vae_encoder_units,
    wire,
)

Named = dict[str, Tensor]


def place_frozen(frozen: Frozen, folding: Folding, stage: int, device: torch.device, dtype: torch.dtype) -> None:
    """This stage's encoders go to the device. The outermost stage, which draws, keeps the rest on the host; the others
    forget it."""
    flat = vae_encoder_units(frozen.vae)
    mine = [module for i in folding.vae[stage] for module in flat[i].modules.values()]
    mine += [frozen.text_encoders[i] for i in folding.texts_of(stage)]
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
        self, stage: int, folding: Folding, unet: nn.Module, frozen: Frozen, templates: Templates, device: torch.device
    ):
        self.stage, self.last, self.folding, self.templates = stage, folding.stages - 1, folding, templates
        self.precision, self.device = folding.config.precision, device
        self.recompute = folding.config.activations == "checkpoint"
        self.units = units_of(unet_units(unet), folding, stage)
        flat = vae_encoder_units(frozen.vae)
        self.vae_units = [flat[i] for i in folding.vae[stage]]
        self.text_encoders = {i: frozen.text_encoders[i] for i in folding.texts_of(stage)}
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

    def prediction(self, micro: int) -> Tensor:
        """What the UNet says, on the outermost stage, between F up and B up."""
        return self.outputs["up", micro].sample

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
