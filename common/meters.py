"""What a run writes while it runs: metrics.jsonl, samples.rank*.jsonl, and a line or a bar for the person who watches."""

import json
import math
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm


class Rows:
    """A file of JSON rows, appended and flushed one by one so that a killed run leaves whole lines.

    On opening, rows after `step` are dropped: a resumed run writes them again.
    """

    def __init__(self, path: Path, step: int):
        kept = [line for line in _lines(path) if _step_of(line) <= step]
        path.write_text("".join(kept), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def write(self, row: dict) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _step_of(line: str) -> float:
    """Infinity for the half line of a run that was killed, even where only the end of the line is lacking."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in _lines(path)]


class Progress:
    """A bar on a terminal, else a line every `log_every` steps and at the last; nothing on ranks other than 0."""

    def __init__(self, shown: bool, total: int, done: int, log_every: int):
        self.shown, self.total, self.log_every = shown, total, log_every
        self.bar = tqdm(total=total, initial=done, unit="step") if shown and sys.stderr.isatty() else None

    def step(self, row: dict) -> None:
        if not self.shown:
            return
        text = f"loss {row['loss']:.4f}  grad {row['grad_norm']:.3g}  lr {row['lr']:.2e}  {row['samples_per_s']:.1f} samples/s"
        empty = math.isnan(row["loss"]) and math.isnan(row["grad_norm"]) and row["samples_per_s"] == 0
        text += f"  SKIPPED ({'no readable sample' if empty else 'non-finite gradient'})" if row["skipped"] else ""
        text += f"  val {row['val_loss']:.4f}" if "val_loss" in row else ""
        if self.bar is not None:
            self.bar.set_postfix_str(text)
            self.bar.update()
        elif row["step"] % self.log_every == 0 or row["step"] == self.total or row["skipped"] or "val_loss" in row:
            print(f"step {row['step']}/{self.total}  {text}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def moment(device: torch.device) -> float | torch.cuda.Event:
    """Now: by the host's clock on a CPU, and on a GPU when all that has been asked for so far is done; waits for nothing."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Between two moments."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
