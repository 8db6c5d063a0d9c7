"""Optimizer, clipping, loss scale and weight average: what happens to a gradient once every rank has the same one.

Nothing here waits for the device. Whether a step counts is known to the device at once (`found_inf` below) and to the
host one step later, while the device is busy.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from common.config import Config


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: Config) -> torch.optim.Optimizer:
    """AdamW or SGD over float32 master weights, in torch's fused form: one kernel, which can also skip a step by itself."""
    parameters = [p for _, p in named]
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    betas = (0.9, 0.999 if config.adam_beta2 is None else config.adam_beta2)
    return torch.optim.AdamW(parameters, lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True)


def apply_step(
    optimizer: torch.optim.Optimizer, lr: float, gradient_scale: torch.Tensor, found_inf: torch.Tensor
) -> None:
    """One step with gradients divided by `gradient_scale`, or none at all where `found_inf` is 1; both are 0-dim on the device.

    The two attributes are how torch.amp.GradScaler speaks to a fused optimizer; the division costs no pass of its own.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale, optimizer.found_inf = gradient_scale, found_inf
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """What a gradient of this norm is multiplied by so that its norm is at most `largest` (0: left alone), 0-dim."""
    if largest == 0:
        return torch.ones_like(norm)
    return (largest / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_ has the same 1e-6


class LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2): halved by a skipped step, doubled after 1000
    good ones. It lives on the device and is the same on every rank, because it is fed the gradient that all ranks share;
    a GradScaler per rank would look at the rank's own part of it. Other precisions have the constant 1.
    """

    def __init__(self, enabled: bool, device: torch.device):
        self.enabled = enabled
        self.scale = torch.tensor(2.0**16 if enabled else 1.0, device=device)
        self.good_steps = torch.tensor(0.0, device=device)

    def update(self, found_inf: torch.Tensor) -> None:
        if not self.enabled:
            return
        self.good_steps = (self.good_steps + 1) * (1 - found_inf)
        grow = self.good_steps >= 1000
        self.scale = torch.where(found_inf > 0, self.scale / 2, torch.where(grow, self.scale * 2, self.scale))
        self.good_steps = torch.where(grow, 0.0, self.good_steps)

    def state_dict(self) -> dict[str, float]:
        """For state.json of a checkpoint."""
        return {"loss_scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def load_state_dict(self, state: dict) -> None:
        if self.enabled:
            self.scale.fill_(state["loss_scale"])
            self.good_steps.fill_(state["good_steps"])


class EMA:
    """Exponential moving average of the weights, with the warm-up of diffusers' EMAModel.

    ema <- d ema + (1 - d) weights with d = min(decay, (1 + n) / (10 + n)), n = updates before this one, d = 0 at n = 0.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float):
        self.decay, self.updates = decay, 0
        self._weights = dict(named)
        self.average = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are."""
        for name, p in self._weights.items():
            self.average[name].copy_(p)

    def next_decay(self) -> float:
        return min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.updates else 0.0

    @torch.no_grad()
    def update(self) -> None:
        weights = [p.detach() for p in self._weights.values()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - self.next_decay())
        self.updates += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The average stands in the network inside the block; the weights come back after it, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self._weights.items():
            kept = p.detach().clone()
            p.copy_(self.average[name])
            self.average[name].copy_(kept)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """The optimizer's state as 'exp_avg.NAME' -> tensor, live: loading into these tensors restores it.

    A fresh optimizer has no state until its first step, so it is made here; asking torch for the state dict of a fresh
    optimizer gives nothing and says nothing. SGD without momentum has none.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return {}
    tensors = {}
    for name, p in named:
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        tensors |= {f"{key}.{name}": state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
    return tensors
