"""Pictures to latents and captions to conditioning, by the frozen parts of the model."""

from dataclasses import dataclass

import torch
from torch import nn

from common.models import Frozen


@dataclass
class Encoded:
    """What the UNet is called with, and what must not be trained on.

    latents [B, C, h, w] float32 · condition: keyword arguments of `unet(x_t, t, **condition)` · finite [B] bool, False
    for a picture whose latents overflowed.
    """

    latents: torch.Tensor
    condition: dict
    finite: torch.Tensor


class Encoder:
    """Runs the VAE and the text encoders on a batch of `common.data.Samples`, without gradient.

    With `remember`, for data that is small and always the same, each picture and caption is encoded once, alone, so that
    its latents do not depend on its neighbours in the batch: at 1 to 4 ranks, before and after a resume, bit for bit.
    """

    def __init__(self, frozen: Frozen, is_xl: bool, device: torch.device, remember: bool):
        self.frozen, self.is_xl, self.device = frozen, is_xl, device
        self._known: dict | None = {} if remember else None

    @torch.no_grad()
    def __call__(self, batch: dict) -> Encoded:
        posterior_noise = batch["posterior_noise"].to(self.device, non_blocking=True)
        (moments,) = self._each(self._moments, batch["pixels"])
        text = self._each(self._text, batch["tokens"])
        time_ids = batch["time_ids"].to(self.device, non_blocking=True)
        return put_together(moments, posterior_noise, text, time_ids, self.frozen.vae.config)

    def _each(self, encode, values: torch.Tensor) -> list[torch.Tensor]:
        """`encode` the batch at once, or those of its samples that are not known yet, one by one."""
        if self._known is None:
            return encode(values.to(self.device, non_blocking=True))
        keys = [(encode.__name__, value.numpy().tobytes()) for value in values]
        for key, value in zip(keys, values, strict=True):
            if key not in self._known:
                self._known[key] = encode(value[None].to(self.device))
        return [torch.cat(parts) for parts in zip(*(self._known[key] for key in keys), strict=True)]

    def _moments(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """[B, 3, R, R] uint8 -> mean and log variance of the posterior, [B, 2 C, h, w] float32."""
        vae = self.frozen.vae
        hidden = vae.encoder((pixels.float() / 127.5 - 1).to(vae.dtype))
        return [(hidden if vae.quant_conv is None else vae.quant_conv(hidden)).float()]

    def _text(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """[B, encoders, 77] -> hidden states [B, 77, width]; for SDXL, whose two encoders give their last layer but one,
        side by side, also the pooled embedding of the second, [B, 1280]."""
        read = [read_text(encoder, tokens[:, i], self.is_xl) for i, encoder in enumerate(self.frozen.text_encoders)]
        hidden = torch.cat([one[0] for one in read], dim=-1).float()
        return [hidden, *(pooled.float() for one in read for pooled in one[1:])]


def read_text(encoder: nn.Module, tokens: torch.Tensor, is_xl: bool) -> list[torch.Tensor]:
    """[B, 77] -> hidden states [B, 77, width], and the pooled embedding [B, width] where the encoder has one.

    SD's encoder gives its last layer, normed; SDXL's two give their last layer but one, and the second the pooled text.
    """
    if not is_xl:
        return [encoder(tokens).last_hidden_state]
    said = encoder(tokens, output_hidden_states=True)
    pooled = getattr(said, "text_embeds", None)
    return [said.hidden_states[-2]] if pooled is None else [said.hidden_states[-2], pooled]


def put_together(
    moments: torch.Tensor, posterior_noise: torch.Tensor, text: list[torch.Tensor], time_ids: torch.Tensor, config
) -> Encoded:
    """What the encoders said -> what the UNet is called with. moments [B, 2 C, h, w] float32, text [hidden] or
    [hidden, pooled], time_ids [B, 6] (read only where there is a pooled text, in SDXL), `config` the VAE's."""
    mean, log_variance = moments.chunk(2, dim=1)
    latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * posterior_noise
    latents = (latents - (config.shift_factor or 0.0)) * config.scaling_factor
    condition = {"encoder_hidden_states": text[0]}
    if len(text) > 1:  # sizes stay float32: 1367 must not become 1368
        condition["added_cond_kwargs"] = {"text_embeds": text[1], "time_ids": time_ids}
    return Encoded(latents, condition, latents.isfinite().all(dim=(1, 2, 3)))
