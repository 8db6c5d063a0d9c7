"""Start the scripts as a user does, and read what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent


@dataclass
class Ended:
    rc: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def start(ranks: int, *flags, script: str = "ddp_train.py", cwd: Path, env: dict | None = None) -> subprocess.Popen:
    """torchrun on `ranks` ranks, one thread each; plain Python for one rank (`ranks=0`)."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return subprocess.Popen(
        [sys.executable, *torchrun, str(ROOT / script), *map(str, flags)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen, seconds: float = 120) -> Ended:
    """Wait for it; a run that hangs is killed with all its children and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def train(ranks: int, *flags, cwd: Path, seconds: float = 120, **more) -> Ended:
    return end(start(ranks, *flags, cwd=cwd, **more), seconds)


def trained(ranks: int, *flags, cwd: Path, **more) -> Ended:
    ended = train(ranks, *flags, cwd=cwd, **more)
    assert ended.rc == 0, ended.out + ended.err
    return ended


def wait_for_row(run: Path, step: int, seconds: float = 180) -> None:
    """Until a run that was started has told of `step`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {seconds} s")


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path, part: str = "unet") -> dict:
    return load_file(run / "pipeline" / part / "diffusion_pytorch_model.safetensors")


def assert_same_curve(a: Path, b: Path) -> None:
    """Loss, gradient norm and exported weights of two runs, as close as plain SGD keeps them."""
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in rows(a)], [r[key] for r in rows(b)], rtol=1e-5)
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).abs().max() <= 1e-5 * one[name].abs().max() + 1e-9, name


def assert_near(one: dict, other: dict) -> None:
    """Weights after AdamW, which makes tiny gradients into steps of the rate (1e-3): 0.3 of it is the tolerance."""
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).abs().max() <= 0.3e-3, name


def assert_goes_on(whole: Path, resumed: Path) -> None:
    """A run that began at a checkpoint of `whole` follows its curve to the same weights and averages."""
    after = rows(whole)[-len(rows(resumed)) :]
    assert 0 < len(after) < len(rows(whole))
    for key, rtol in (("loss", 1e-5), ("grad_norm", 1e-4)):
        np.testing.assert_allclose([r[key] for r in rows(resumed)], [r[key] for r in after], rtol=rtol)
    for part in ("unet", "unet_raw"):
        assert_near(weights(whole, part), weights(resumed, part))


def ranks_of(run: Path) -> list[dict]:
    """What each rank of a run of runs.py said, held and sent."""
    return json.loads((run / "ranks.json").read_text())


def said(run: Path) -> str:
    """Everything that its ranks printed."""
    return "".join(rank["out"] + rank["err"] for rank in ranks_of(run))
