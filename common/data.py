"""Which sample, where, with which noise: the second rule of the project, in plain integers.

The order of an epoch is a function of (seed, epoch). Crop, flip, timestep, noise and dropped caption of a sample are
functions of (seed, epoch, index). Nothing depends on the rank, the worker or the number of either, so every world size
and every resumed run sees the same stream:

    epoch 0, global batch 4, 10 samples          slots of the last step that hold no sample have weight 0,
    step 1   step 2   step 3                     and the step's mean is over the two that do
    7 2 9 0  4 1 8 3  6 5 . .
    | | | |
    slot i goes to rank i mod R; a rank's slots are cut into micro-batches in order
"""

import ctypes
import functools
import hashlib
import math
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from common.config import Batch, Config
from common.errors import Unreadable, UsageError
from common.folder import ImageFolder, fit
from common.shapes import Shapes

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive the fork of the workers

EMPTY = -1  # the index of a slot that holds no sample
SHAPES = 2048  # distinct pictures in an epoch of the embedded data set


class Source(Protocol):
    """Pictures with captions, by index."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def caption(self, index: int) -> str: ...
    def image(self, index: int) -> Image.Image: ...  # upright RGB; raises Unreadable


# ── Order ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Position:
    """Where the data stream stands: `step` optimizer steps are done, `offset` samples of `epoch` are used up."""

    step: int = 0
    epoch: int = 0
    offset: int = 0


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. count-1, [count] int64."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def advance(position: Position, count: int, global_batch: int) -> Position:
    """The position one step on: the last step of an epoch takes what is left, and the next begins a new one."""
    offset = position.offset + global_batch
    if offset >= count:
        return Position(position.step + 1, position.epoch + 1, 0)
    return replace(position, step=position.step + 1, offset=offset)


def position_after(state: dict, count: int, names: str, global_batch: int) -> tuple[Position, list[str]]:
    """Where a resumed run goes on, and what to say of it; `state` is the checkpoint's, `names` a digest of the sample names.

    An epoch of other samples has another order, so the old place in it means nothing: the next epoch begins instead.
    """
    position, notes = Position(**state["position"]), []
    if state["global_batch"] != global_batch:
        notes.append(f"resuming with a global batch of {global_batch} (was {state['global_batch']})")
    if (state["count"], state["names"]) != (count, names):
        notes.append(f"--data is not what it was: {count} samples (were {state['count']}), or other names")
        if position.offset:
            position = replace(position, epoch=position.epoch + 1, offset=0)
            notes.append(f"epoch {position.epoch} begins, the rest of the one before is left out")
    return position, notes


def slots_of(position: Position, count: int, global_batch: int, seed: int) -> np.ndarray:
    """Sample indices of the step that starts at `position`, [global_batch] int64, EMPTY where the epoch has run out."""
    order = epoch_order(count, seed, position.epoch)[position.offset : position.offset + global_batch]
    return np.concatenate([order, np.full(global_batch - len(order), EMPTY, order.dtype)])


def share_of(slots: np.ndarray, batch: Batch, replica: int) -> np.ndarray:
    """The slots of one replica, as [accum, micro_batch]; together the replicas have each slot once."""
    return slots[replica :: batch.replicas].reshape(batch.accum, batch.micro_batch)


class MicroBatches:
    """What one replica reads, micro-batch by micro-batch, as lists of (epoch, index): a DataLoader's batch_sampler.

    It starts at `position`, so a resumed run never opens a file that it skips.
    """

    def __init__(self, count: int, batch: Batch, seed: int, replica: int, position: Position, steps: int):
        self.count, self.batch, self.seed, self.replica, self.position, self.steps = (
            count,
            batch,
            seed,
            replica,
            position,
            steps,
        )

    def __len__(self) -> int:
        return max(0, self.steps - self.position.step) * self.batch.accum

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        position = self.position
        while position.step < self.steps:
            slots = slots_of(position, self.count, self.batch.global_batch, self.seed)
            for micro in share_of(slots, self.batch, self.replica):
                yield [(position.epoch, int(index)) for index in micro]
            position = advance(position, self.count, self.batch.global_batch)


# ── Samples ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _random(seed: int, epoch: int, index: int, purpose: int) -> np.random.Generator:
    """One stream per sample and purpose, so that a flag about crops does not change the noise."""
    return np.random.default_rng([seed, epoch, index, purpose])


PICTURE, CAPTION, NOISE = range(3)


class Samples(Dataset):
    """(epoch, index) -> one sample, a function of (seed, epoch, index) only.

    pixels [3, R, R] uint8 · tokens [encoders, 77] int64 · time_ids [6] float32 (original h, w, crop top, left, target
    h, w) · t int64 · noise and posterior_noise [C, h, w] float32 · weight 1.0, or 0.0 for an empty slot or an
    unreadable picture, whose reason is in `problem`.

    `timesteps`, if given, fixes t by the sample's epoch and index instead of drawing it (held-out loss).
    """

    def __init__(
        self, source: Source, tokenizers: list, config: Config, latent: tuple[int, int, int], num_timesteps: int,
        indices: np.ndarray | None = None, timesteps: np.ndarray | None = None,
    ):  # fmt: skip
        self.source, self.tokenizers, self.config = source, tokenizers, config
        self.latent, self.num_timesteps, self.timesteps = latent, num_timesteps, timesteps
        self.indices = np.arange(len(source)) if indices is None else indices
        self._tokens = functools.lru_cache(4096)(self._tokenize)
        self._image = functools.lru_cache(SHAPES)(source.image) if config.data == "shapes" else source.image

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: tuple[int, int]) -> dict:
        epoch, index = at
        if index == EMPTY:
            return self._blank("", "")
        where = int(self.indices[index])
        name = self.source.name(where)
        try:
            pixels, time_ids = self._picture(where, epoch)
        except Unreadable as problem:
            return self._blank(name, str(problem))
        return {
            "pixels": torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))),
            "time_ids": torch.tensor(time_ids, dtype=torch.float32),
            "tokens": self._tokens(self._caption(where, epoch)),
            **self._noise(where, epoch, index),
            "weight": torch.tensor(1.0), "index": where, "name": name, "problem": "",
        }  # fmt: skip

    def _picture(self, index: int, epoch: int) -> tuple[np.ndarray, tuple]:
        random = _random(self.config.seed, epoch, index, PICTURE)
        flip = bool(random.random() < self.config.flip)
        return fit(self._image(index), self.config.resolution, self.config.crop, flip, random)

    def _caption(self, index: int, epoch: int) -> str:
        dropped = _random(self.config.seed, epoch, index, CAPTION).random() < self.config.caption_dropout
        return "" if dropped else self.source.caption(index)

    def _noise(self, index: int, epoch: int, slot: int) -> dict:
        random = _random(self.config.seed, epoch, index, NOISE)
        t = int(random.integers(self.num_timesteps))
        if self.timesteps is not None:
            t = int(self.timesteps[epoch * len(self) + slot])
        noise, posterior = (random.standard_normal(self.latent, dtype=np.float32) for _ in range(2))
        if self.config.noise_offset:
            noise += self.config.noise_offset * random.standard_normal((self.latent[0], 1, 1), dtype=np.float32)
        return {"t": torch.tensor(t), "noise": torch.from_numpy(noise), "posterior_noise": torch.from_numpy(posterior)}

    def _tokenize(self, caption: str) -> torch.Tensor:
        """[encoders, 77]; what is longer is cut, as in Stable Diffusion."""
        ids = [t(caption, padding="max_length", truncation=True, max_length=77).input_ids for t in self.tokenizers]
        return torch.tensor(ids)

    def _blank(self, name: str, problem: str) -> dict:
        """Takes part in every computation, so that ranks stay in step, with weight 0."""
        side, zeros = self.config.resolution, torch.zeros(self.latent)
        return {
            "pixels": torch.zeros(3, side, side, dtype=torch.uint8),
            "time_ids": torch.tensor([side, side, 0, 0, side, side], dtype=torch.float32),
            "tokens": self._tokens(""), "t": torch.tensor(0), "noise": zeros, "posterior_noise": zeros,
            "weight": torch.tensor(0.0), "index": EMPTY, "name": name, "problem": problem,
        }  # fmt: skip


def collate(samples: list[dict]) -> dict:
    """Stack the tensors, list the rest."""
    return {
        key: torch.stack([s[key] for s in samples]) if torch.is_tensor(samples[0][key]) else [s[key] for s in samples]
        for key in samples[0]
    }


def loader(samples: Samples, batches, workers: int, pin: bool) -> DataLoader:
    return DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_quiet_worker,
        # Workers only read; forking keeps the index of a million names shared with the parent.
        multiprocessing_context=multiprocessing.get_context("fork") if workers else None,
    )


def _quiet_worker(_: int) -> None:
    """One thread each, or ranks x workers x cores threads fight; and a session of its own.

    torchrun and Ctrl-C signal a rank's whole process group, and the rank needs its readers to finish its step. What its
    rank sends it by number still arrives, and it does not outlive it.
    """
    torch.set_num_threads(1)
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def default_workers(data: str, cores: int, local_world_size: int) -> int:
    """The trainer takes one core of its rank's share; `shapes` is drawn faster than a process can send it."""
    return 0 if data == "shapes" else min(8, max(0, cores // local_world_size - 1))


# ── Sources ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def open_source(data: str) -> tuple[Source, list[str]]:
    """(source, things to say once); raises UsageError when there is nothing to train on."""
    if data == "shapes":
        return Shapes(SHAPES), []
    folder = ImageFolder(data)
    folder.first_readable()
    return folder, folder.notes


def held_out(data: str, source: Source) -> tuple[Source, np.ndarray, np.ndarray]:
    """(held-out source, its indices, training indices) for --val-every.

    `shapes` draws 64 pictures that no training run draws. A folder gives up its 5 % (at most 64, at least one) with
    the smallest hashes of their names, so that adding pictures later does not reshuffle who is held out.
    """
    if data == "shapes":
        return Shapes(64, first=SHAPES), np.arange(64), np.arange(len(source))
    count = min(64, max(1, len(source) // 20))
    if len(source) < 2:
        raise UsageError(f"--val-every needs at least 2 images in {data}, one of them to hold out; found {len(source)}")
    hashes = [hashlib.sha256(source.name(i).encode("utf-8", "surrogateescape")).digest() for i in range(len(source))]
    order = np.array(sorted(range(len(source)), key=hashes.__getitem__))
    return source, np.sort(order[:count]), np.sort(order[count:])


HELD_OUT_CARDS = 64  # held-out pairs of picture and timestep, at least


def held_out_samples(
    source: Source,
    indices: np.ndarray,
    tokenizers: list,
    config: Config,
    latent: tuple[int, int, int],
    num_timesteps: int,
) -> Samples:
    """Samples for the held-out loss: (round, index) has a fixed timestep, and the rounds together cover the schedule evenly.

    No crop, flip, dropped caption or seed of the run, so that its values can be compared between runs and strategies.
    """
    cards = -(-HELD_OUT_CARDS // len(indices)) * len(indices)
    timesteps = ((np.random.default_rng(0).permutation(cards) + 0.5) / cards * num_timesteps).astype(int)
    still = replace(config, crop="center", flip=0.0, caption_dropout=0.0, noise_offset=0.0, seed=0)
    return Samples(source, tokenizers, still, latent, num_timesteps, indices, timesteps)


def dealt(samples: Samples, rank: int, world_size: int, size: int) -> list[list[tuple[int, int]]]:
    """This rank's held-out cards in batches of `size`, blanks at the end: every rank gets the same number of batches,
    since a forward pass may be something that all ranks do together."""
    cards = [(k // len(samples), k % len(samples)) for k in range(len(samples.timesteps))]
    mine = cards[rank::world_size]
    batches = math.ceil(math.ceil(len(cards) / world_size) / size)
    mine += [(0, EMPTY)] * (batches * size - len(mine))
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def equal_shares(count: int, rank: int, world_size: int) -> list[int]:
    """This rank's indices of 0 .. count-1; every rank has the same number of them, so the last may have some twice."""
    return [i % count for i in range(rank, math.ceil(count / world_size) * world_size, world_size)]


def prompts_of(config: Config, source: Source, count: int = 24) -> list[str]:
    """Prompts of the sample grid: the file's lines, or captions from the data (every kind that `shapes` has)."""
    if config.prompts is not None:
        try:
            lines = Path(config.prompts).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--prompts {config.prompts}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}"
            ) from None
        if not (prompts := [line.strip() for line in lines if line.strip()]):
            raise UsageError(f"--prompts {config.prompts}: has no prompt; write one per line")
        return prompts
    if config.data == "shapes":
        return Shapes.captions()
    captions = (source.caption(i) for i in range(len(source)))
    return list(dict.fromkeys(c for _, c in zip(range(10 * count), captions, strict=False) if c))[:count] or [""]


# ── What was trained on, for --log-samples ───────────────────────────────────────────────────────────────────────────
def log_rows(step: int, micro: int, batch: dict) -> dict:
    """One row of samples.rank*.jsonl; empty slots and unreadable pictures are not samples."""
    keep = [i for i, weight in enumerate(batch["weight"].tolist()) if weight]

    def digest(tensor: torch.Tensor) -> str:
        return f"{zlib.crc32(tensor.numpy().tobytes()):08x}"

    return {
        "step": step,
        "micro": micro,
        "ids": [batch["name"][i] for i in keep],
        "t": [int(batch["t"][i]) for i in keep],
        "noise": [digest(batch["noise"][i]) for i in keep],
        "pixels": [digest(batch["pixels"][i].permute(1, 2, 0).contiguous()) for i in keep],
        "tokens": [batch["tokens"][i, 0].tolist() for i in keep],
        "time_ids": [[int(v) for v in batch["time_ids"][i]] for i in keep],
    }
