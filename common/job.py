"""Everything about a run that can be known, and can be wrong, before a rank has spoken to another."""

import dataclasses
import functools
import os
import zlib
from dataclasses import dataclass

import numpy as np

from common import data, models
from common.config import PRESETS, Batch, Config, changed_flags, with_recipe
from common.data import Samples, Source
from common.errors import UsageError
from common.loss import NoiseSchedule
from common.models import ModelSpec


@dataclass(frozen=True)
class Job:
    """What all ranks agree on."""

    config: Config  # every flag has its final value
    batch: Batch
    spec: ModelSpec
    schedule: NoiseSchedule
    source: Source
    indices: np.ndarray | None  # of the samples to train on, None for all
    held_source: Source | None
    held_indices: np.ndarray | None
    prompts: list[str]
    notes: list[str]  # to be said once

    @functools.cached_property
    def names(self) -> str:
        """Digest of the names of all samples: do two ranks, or a run and its checkpoint, see the same data?"""
        digest = 0
        for i in range(len(self.source)):
            digest = zlib.crc32(self.source.name(i).encode("utf-8", "surrogateescape") + b"\n", digest)
        return f"{digest:08x}"

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        return len(self.source) if self.indices is None else len(self.indices)

    @property
    def latent(self) -> tuple[int, int, int]:
        side = self.config.resolution // self.spec.vae_factor
        return self.spec.latent_channels, side, side

    @property
    def fingerprint(self) -> str:
        """What must be the same on all ranks before they may make a group."""
        return f"{len(self.source)} samples (names {self.names}), {self.batch}"

    def due(self, step: int, ending: bool) -> set[str]:
        """What comes after `step` steps: "save", "draw", "validate", or at least "settle" at the end of the run."""
        config, last = self.config, step == self.config.steps

        def every(n: int | None) -> bool:
            return bool(n) and step % n == 0

        due = {"settle"} if last or ending else set()
        if every(config.save_every) or (config.save_every and due):
            due |= {"save"}
        if config.sample_every != 0 and not ending and (last or every(config.sample_every)):
            due |= {"draw"}
        if every(config.val_every):
            due |= {"validate"}
        return due

    def changes_since(self, state: dict) -> list[str]:
        """What a resumed run does differently from the one that saved `state`; raises UsageError for what cannot be."""
        if state["architecture"] != self.spec.architecture:
            raise UsageError(
                f"--resume: the checkpoint's UNet is another one than that of {self.spec.name}: "
                f"use {self.flag_of(state['config'])}, or another --out"
            )
        changed = changed_flags(state["config"], self.config)
        return [f"resuming with {', '.join(changed)}"] if changed else []

    @staticmethod
    def flag_of(config: dict) -> str:
        return f"--model {config['model']}" if config["model"] else f"--preset {config['preset']}"

    def samples(self, tokenizers: list) -> Samples:
        return Samples(self.source, tokenizers, self.config, self.latent, len(self.schedule), self.indices)

    def held_out(self, tokenizers: list) -> Samples | None:
        """For --val-every."""
        if self.held_source is None:
            return None
        return data.held_out_samples(
            self.held_source, self.held_indices, tokenizers, self.config, self.latent, len(self.schedule)
        )

    @property
    def guidance(self) -> float:
        """Of the sample grids."""
        return PRESETS[self.config.preset].guidance if self.config.model is None else 7.5

    def introduction(self, step: int) -> str:
        """What is trained, in one line."""
        parameters = models.parameter_count(self.spec) / 1e6
        return (
            f"{self.spec.name}: {parameters:.1f} M parameters, {self.config.precision}, {self.count} samples, "
            f"{self.batch}, step {step} of {self.config.steps}"
        )


def prepare(given: Config, spec: ModelSpec, batch: Batch, on_gpu: bool, local_world_size: int) -> Job:
    """Raises UsageError for flags that do not go together, for data that cannot be used, for a machine that lacks something."""
    config, cores = _resolve(given, spec, on_gpu, local_world_size), len(os.sched_getaffinity(0))
    schedule = NoiseSchedule(spec.scheduler, config.prediction, config.zero_snr, config.snr_gamma)
    source, notes = data.open_source(config.data)
    held_source, held, indices = data.held_out(config.data, source) if config.val_every else (None, None, None)
    prompts = data.prompts_of(config, source)
    if config.workers * local_world_size > cores:
        use = f"--workers {config.workers} x {local_world_size} ranks > {cores} cores"
        notes = [*notes, f"warning: {use}: they will wait for each other"]
    return Job(config, batch, spec, schedule, source, indices, held_source, held, prompts, notes)


def _resolve(config: Config, spec: ModelSpec, on_gpu: bool, local_world_size: int) -> Config:
    """Every flag gets its final value."""
    config = with_recipe(config)
    own_side = PRESETS[config.preset].resolution if config.model is None else spec.unet["sample_size"] * spec.vae_factor
    if config.attention in ("cudnn", "flash") and not on_gpu:
        raise UsageError(f"--attention {config.attention} needs a GPU: use auto or math")
    workers = config.workers
    if workers is None:
        workers = data.default_workers(config.data, len(os.sched_getaffinity(0)), local_world_size)
    return dataclasses.replace(
        config,
        resolution=config.resolution or own_side,
        prediction=config.prediction or spec.scheduler.get("prediction_type", "epsilon"),
        zero_snr=config.zero_snr or bool(spec.scheduler.get("rescale_betas_zero_snr")),
        precision=config.precision or ("bf16" if on_gpu else "fp32"),
        workers=workers,
    )
