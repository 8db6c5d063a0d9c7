"""What a run knows of itself: the tally that each rank makes of a step, and the counters that settled steps have moved.

    device   step 7 ......... step 8 ......... step 9 .........
    host       asks for 7       asks for 8, then settles 7      asks for 9, then settles 8

Whether a step counted, what its loss was and whether somebody wants to stop is read one step late, when the numbers have
long arrived, so the host never waits while the device has nothing to do. Every rank settles the same numbers, and so
comes to the same decisions without asking.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from common import data
from common.data import Position
from common.errors import Elsewhere
from common.job import Job
from common.meters import Rows
from common.optim import EMA
from common.words import printable

TALLY = 7  # numbers that a rank says of a step
LOSS, SAMPLES, OVERFLOWED, STOP, DATA_S, MEMORY, UNREADABLE = range(TALLY)
LARGEST_SKIPPED = 50  # steps in a row


class Tally:
    """One rank's account of one step, filled micro-batch by micro-batch."""

    def __init__(self, device: torch.device, log: Callable[[int, dict], None], named: set[str]):
        self.device, self.log, self.named = device, log, named
        self.micro = 0
        self.numbers = torch.zeros(TALLY, dtype=torch.float64)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)
        self.suspects: list[tuple[list[str], torch.Tensor]] = []  # names, and whether their latents are finite
        self.problems: dict[str, str] = {}  # unreadable pictures that nobody has named yet

    def take(self, batches: Iterator[dict]) -> dict:
        """The next micro-batch, with the time that it was waited for."""
        before = time.perf_counter()
        batch = next(batches)
        self.numbers[DATA_S] += time.perf_counter() - before
        return batch

    def add(self, batch: dict, finite: torch.Tensor, losses: torch.Tensor) -> None:
        """`finite` [B] bool, of the latents; `losses` [B], 0 where there is no sample."""
        self.losses += losses.sum()
        self.numbers[SAMPLES] += float(batch["weight"].sum())
        self.suspects.append((batch["name"], finite))
        named = zip(batch["name"], batch["problem"], strict=True)
        self.problems |= {name: problem for name, problem in named if problem and name not in self.named}
        self.log(self.micro, batch)
        self.micro += 1

    def close(self, stop: bool) -> torch.Tensor:
        """[7] float64 on the device, without waiting for it."""
        self.numbers[STOP], self.numbers[UNREADABLE] = stop, len(self.problems)
        if self.device.type == "cuda":
            self.numbers[MEMORY] = torch.cuda.max_memory_allocated()
        numbers = self.numbers.to(self.device, non_blocking=True)
        numbers[LOSS] = self.losses
        numbers[OVERFLOWED] = sum((~finite).sum() for _, finite in self.suspects)
        return numbers


@dataclass
class Outcome:
    """What became of a step, on its way to the host."""

    step: int
    epoch: int
    lr: float
    numbers: torch.Tensor  # [N x 7 + 2]: the tallies of all ranks, gradient norm, loss scale
    arrived: torch.cuda.Event | None
    tally: Tally
    asked: float  # when the host had asked for all of it


class Ledger:
    """Counters and position of a run; the same on every rank.

    `share` gathers a dictionary from every rank into a list of them, on all ranks: it is how unreadable pictures get
    their names said, by rank 0, once.
    """

    def __init__(self, job: Job, rank: int, ema: EMA | None, share: Callable[[dict], list[dict]]):
        self.job, self.rank, self.ema, self.share = job, rank, ema, share
        self.position = Position()
        self.done = 0  # steps that were not skipped: what the learning rate counts
        self.samples = 0
        self.stopping = False  # some rank was told to stop
        self.clock = 0.0  # when the last settled step ended
        self.log_rows: Rows | None = None
        self._pending: Outcome | None = None
        self._skipped_in_a_row = 0
        self._named: set[str] = set()

    @property
    def complete(self) -> bool:
        return self.position.step >= self.job.config.steps

    def open(self, device: torch.device) -> Tally:
        return Tally(device, self._log, self._named)

    def _log(self, micro: int, batch: dict) -> None:
        if self.log_rows is not None:
            self.log_rows.write(data.log_rows(self.position.step + 1, micro, batch))

    def enter(self, tally: Tally, lr: float, everyone: torch.Tensor, norm: torch.Tensor, scale: torch.Tensor) -> None:
        """A step has been asked for: start the copy of its numbers to the host, and move on in the data.

        everyone [N, 7] float64, norm and scale 0-dim, all on the device.
        """
        assert self._pending is None
        numbers, arrived = torch.cat([everyone.flatten(), torch.stack([norm, scale]).double()]), None
        if numbers.device.type == "cuda":
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        step, epoch = self.position.step + 1, self.position.epoch
        self._pending = Outcome(step, epoch, lr, numbers, arrived, tally, time.perf_counter())
        self.position = data.advance(self.position, self.job.count, self.job.batch.global_batch)

    def settle(self) -> dict | None:
        """Read what became of the pending step and act on it; returns its row of metrics.jsonl.

        Its weights are still those after that step, so the EMA comes out as if it had been updated at once.
        """
        outcome, self._pending = self._pending, None
        if outcome is None:
            return None
        if outcome.arrived is not None:
            outcome.arrived.synchronize()
        *tallies, norm, scale = outcome.numbers.tolist()
        ranks = torch.tensor(tallies, dtype=torch.float64).view(-1, TALLY)
        total, worst = ranks.sum(0).tolist(), ranks.max(0).values.tolist()
        if total[OVERFLOWED]:
            _stop_for_overflow(outcome.tally, mine=bool(ranks[self.rank, OVERFLOWED]))
        if total[UNREADABLE]:
            self._name_unreadable(outcome.tally.problems)
        skipped = not math.isfinite(norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == LARGEST_SKIPPED:
            raise ArithmeticError(
                f"{LARGEST_SKIPPED} steps in a row had a non-finite gradient; a lower --lr or --precision bf16 may help"
            )
        if not skipped:
            self.done += 1
            if self.ema is not None:
                self.ema.update()
        self.stopping |= bool(total[STOP])
        self.samples += int(total[SAMPLES])
        seconds, self.clock = outcome.asked - self.clock, outcome.asked
        return {
            "step": outcome.step,
            "loss": total[LOSS] / total[SAMPLES] if total[SAMPLES] else math.nan,
            "grad_norm": norm,
            "lr": outcome.lr,
            "samples": self.samples,
            "epoch": outcome.epoch,
            "samples_per_s": total[SAMPLES] / seconds,
            "step_s": seconds,
            "data_s": worst[DATA_S],
            "max_mem_gib": worst[MEMORY] / 2**30,
            "skipped": skipped,
            "loss_scale": scale,
        }

    def state_dict(self) -> dict:
        """For state.json of a checkpoint; nothing may be pending."""
        assert self._pending is None
        return {
            "step": self.position.step, "done": self.done, "samples": self.samples,
            "position": dataclasses.asdict(self.position), "ema_updates": self.ema.updates if self.ema else None,
            "count": self.job.count, "names": self.job.names, "global_batch": self.job.batch.global_batch,
            "architecture": self.job.spec.architecture, "config": dataclasses.asdict(self.job.config),
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> list[str]:
        """Go on from a checkpoint; returns what to say of it. The EMA's tensors, if it has them, are loaded already."""
        self.done, self.samples = state["done"], state["samples"]
        if self.ema is not None:
            self.ema.updates = state["ema_updates"] or 0
            if state["ema_updates"] is None:  # --ema is new: the average begins with the weights as they are
                self.ema.restart()
        job = self.job
        self.position, notes = data.position_after(state, job.count, job.names, job.batch.global_batch)
        return notes

    def start_clock(self) -> None:
        """What is done between steps is not the next step's time; a pending step still has to end."""
        if self._pending is None:
            self.clock = time.perf_counter()

    def _name_unreadable(self, problems: dict[str, str]) -> None:
        """All ranks come here in the same step: the tally told them."""
        found = {name: problem for each in self.share(problems) for name, problem in each.items()}
        for name in sorted(found.keys() - self._named):
            self._named.add(name)
            if self.rank == 0:
                line = f"warning: left out {printable(name)}: {found[name]} ({len(self._named)} unreadable so far)"
                print(line, file=sys.stderr, flush=True)


def _stop_for_overflow(tally: Tally, mine: bool) -> None:
    """A picture whose latents are not finite ends the run; the rank that has it says its name."""
    if not mine:
        raise Elsewhere
    names = [n for ns, finite in tally.suspects for n, ok in zip(ns, finite.tolist(), strict=True) if not ok]
    raise ArithmeticError(
        f"the VAE's latents of {', '.join(names)} are not finite: the picture or the VAE's weights are broken"
    )
