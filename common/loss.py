"""The diffusion loss: noise schedule, targets and weights.

Forward process (Ho et al. 2020, eq. 4): x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise, where a_t is the product of
(1 - beta) up to t and SNR(t) = a_t / (1 - a_t). Tables are built once, in float32, and gathered by integer timestep.
"""

import math

import torch
import torch.nn.functional as F

from common.errors import UsageError


def betas_of(scheduler: dict) -> torch.Tensor:
    """[T] float32, as diffusers' schedulers define `beta_schedule`; raises UsageError for a schedule unknown here."""
    steps = scheduler.get("num_train_timesteps", 1000)
    start, end = scheduler.get("beta_start", 0.0001), scheduler.get("beta_end", 0.02)
    kind = scheduler.get("beta_schedule", "linear")
    if scheduler.get("trained_betas") is not None:
        return torch.tensor(scheduler["trained_betas"], dtype=torch.float32)
    if kind == "linear":
        return torch.linspace(start, end, steps, dtype=torch.float32)
    if kind == "scaled_linear":  # latent diffusion: linear in the square root
        return torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float32) ** 2
    if kind == "squaredcos_cap_v2":  # Nichol & Dhariwal 2021, eq. 17
        bar = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
        return torch.tensor([min(1 - bar[i + 1] / bar[i], 0.999) for i in range(steps)], dtype=torch.float32)
    raise UsageError(
        f"beta_schedule {kind} of the model's scheduler is not known: use linear, scaled_linear or squaredcos_cap_v2"
    )


def zero_terminal_snr(betas: torch.Tensor) -> torch.Tensor:
    """Betas whose last step is pure noise: shift and scale sqrt(a_t) so that it ends at 0 and starts where it did
    (Lin et al. 2023, algorithm 1). Must come before any table is made of them."""
    root = (1 - betas).cumprod(0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    bar = ((root - last) * first / (first - last)) ** 2
    return 1 - torch.cat([bar[:1], bar[1:] / bar[:-1]])


def min_snr_weight(snr: torch.Tensor, gamma: float, prediction: str) -> torch.Tensor:
    """Loss weight per sample, [B] -> [B] (Hang et al. 2023, eq. 4-6).

    epsilon:       min(SNR, gamma) / SNR
    v_prediction:  min(SNR, gamma) / (SNR + 1)      finite at SNR = 0, unlike the form above
    """
    return snr.clamp(max=gamma) / (snr + 1 if prediction == "v_prediction" else snr)


class NoiseSchedule:
    """Tables over the T timesteps, on the device of the latents.

    Raises UsageError for zero terminal SNR with epsilon: at the last step x_t is the noise itself, so predicting it
    teaches nothing, and min-SNR would divide by zero.
    """

    def __init__(self, scheduler: dict, prediction: str, zero_snr: bool = False, snr_gamma: float | None = None):
        if zero_snr and prediction == "epsilon":
            raise UsageError(
                "--zero-snr needs --prediction v_prediction: at the last timestep the input is pure noise, so predicting "
                "the noise (epsilon) teaches nothing there"
            )
        if prediction not in ("epsilon", "v_prediction"):
            raise UsageError(
                f"prediction_type {prediction} of the model's scheduler is not trained here: use --prediction epsilon or v_prediction"
            )
        betas = betas_of(scheduler)
        if zero_snr:
            betas = zero_terminal_snr(betas)
        bar = (1 - betas).cumprod(0)
        self.prediction, self.snr_gamma = prediction, snr_gamma
        self.signal, self.noise = bar.sqrt(), (1 - bar).sqrt()  # of x_0 and of the noise in x_t, [T] each
        self.snr = bar / (1 - bar)

    def __len__(self) -> int:
        return len(self.signal)

    def to(self, device: torch.device) -> "NoiseSchedule":
        self.signal, self.noise, self.snr = (table.to(device) for table in (self.signal, self.noise, self.snr))
        return self

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """[B, C, h, w] x_0, noise, [B] t -> x_t."""
        return _per_sample(self.signal, t) * latents + _per_sample(self.noise, t) * noise

    def target(self, latents: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """What the UNet should say: the noise, or v = sqrt(a_t) noise - sqrt(1 - a_t) x_0 (Salimans & Ho 2022, appendix D)."""
        if self.prediction == "epsilon":
            return noise
        return _per_sample(self.signal, t) * noise - _per_sample(self.noise, t) * latents

    def loss(
        self, prediction: torch.Tensor, target: torch.Tensor, t: torch.Tensor, weighted: bool = True
    ) -> torch.Tensor:
        """Mean square per sample, min-SNR weighted if asked for, [B, C, h, w] -> [B], float32 whatever comes in."""
        each = F.mse_loss(prediction.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))
        if self.snr_gamma is None or not weighted:
            return each
        return each * min_snr_weight(self.snr[t], self.snr_gamma, self.prediction)


def _per_sample(table: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return table[t].view(-1, 1, 1, 1)
