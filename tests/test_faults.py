"""Faults in mid-run, the same for every script: what breaks is said once, all ranks end, and the run can be resumed.

A fault is a few lines of Python that a rank runs before its script. They break something of `common/` or of torch in that
process, so the scripts themselves are as they are.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image

from common import checkpoint
from common.config import Config, batch_of
from common.job import prepare
from common.ledger import Ledger
from common.models import spec_of
from tests.launch import ROOT, Ended, end, rows, start, wait_for_row
from tests.test_failures import children, rank_of, refused

SCRIPTS = sorted(path.name for path in ROOT.glob("*_train.py"))
SMALL = ("--lr", "1e-3", "--micro-batch", "2")
BRIEF = (*SMALL, "--global-batch", "4", "--sample-every", "0", "--no-export")


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request):
    return request.param


ONE = "ddp_train.py"  # for what the scripts hold word for word: one of them stands for all


def broken(script: str, folder: Path, fault: str) -> Path:
    """A program that is `script` after `fault`, which knows RANK, and `happened()` to leave a mark that it came to pass."""
    program = folder / f"broken_{script}"
    before = f"""
        import os, pathlib, runpy, signal, sys, time
        sys.path[0] = {str(ROOT)!r}
        RANK = int(os.environ["RANK"])

        def happened():
            pathlib.Path({str(folder / "happened")!r}).touch()
    """
    run = f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
    program.write_text(dedent(before) + dedent(fault) + run)
    (folder / "happened").unlink(missing_ok=True)
    return program


BEFORE_STEP = """
    from common import optim

    apply_step, steps = optim.apply_step, 0

    def counted(*arguments):
        global steps
        steps += 1
        before_step(steps)
        apply_step(*arguments)

    optim.apply_step = counted
"""


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, those that read pictures too."""
    found, waiting = set(), [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                below = [int(child) for child in task.read_text().split()]
            except OSError:  # it has ended meanwhile
                continue
            found |= set(below)
            waiting += below
    return found


def alive(pids: set[int]) -> set[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    return {pid for pid in pids if state(pid) not in ("gone", "Z")}


def end_of_all(process: subprocess.Popen, seconds: float = 240) -> Ended:
    """Wait for a run, and see that none of its processes is left."""
    below, until = set(), time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        below |= descendants(process.pid)
        time.sleep(0.1)
    ended = end(process, 10)
    until = time.monotonic() + 10
    while alive(below) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(below)
    return ended


def run_broken(script: str, fault: str, *flags, cwd: Path, ranks: int = 2) -> Ended:
    """The run ends within a minute of what `fault` does to it."""
    ended = end_of_all(start(ranks, *flags, script=broken(script, cwd, fault), cwd=cwd))
    assert (cwd / "happened").exists(), ended.out + ended.err
    assert time.time() - (cwd / "happened").stat().st_mtime < 60
    return ended


def pictures(folder: Path, captions: list[str]) -> Path:
    folder.mkdir()
    for i, caption in enumerate(captions):
        Image.new("RGB", (64, 64), (20 * i, 90, 200)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(caption)
    return folder


def tensors_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    """What a whole checkpoint holds, by name."""
    folder = run / f"checkpoint-{step}"
    assert checkpoint.is_whole(folder)
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in stored.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def same(one: dict, other: dict) -> list[str]:
    return [name for name, tensor in one.items() if torch.equal(tensor, other[name])]


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """One step, after which rank 0 takes longer than --timeout to save, to draw and to export: more by the 3 s that
    a rank which has lost another waits for its word. Begun before the other runs, because it sleeps most of the time.
    """
    folder = tmp_path_factory.mktemp("late")
    slow = """
        from common import checkpoint, models, sample

        def slowly(work):
            def slow(*arguments, **more):
                if RANK == 0:
                    happened()
                    time.sleep(15)
                return work(*arguments, **more)

            return slow

        checkpoint.seal, sample.draw, models.export = map(slowly, (checkpoint.seal, sample.draw, models.export))
    """
    (folder / "prompts.txt").write_text("a red star\na blue star\n")
    process = start(
        2, *SMALL, "--steps", "1", "--save-every", "1", "--prompts", "prompts.txt", "--timeout", "10", "--out", folder / "a run",
        script=broken(ONE, folder, slow), cwd=folder,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# ── What is not finite ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def skipping(script, late, tmp_path_factory):
    """Seven steps of fp16 in epochs of three, with a checkpoint after each; then rank 1 raises.

    The loss scale begins so high that the first gradients overflow, and one caption of twelve is NaN.
    """
    folder = tmp_path_factory.mktemp("skipping")
    data = pictures(folder / "my pictures", ["a purple star" if i == 3 else "a red star" for i in range(12)])
    fault = """
        from common import models

        init, build_frozen = optim.LossScale.__init__, models.build_frozen

        def higher(self, enabled, device):
            init(self, enabled, device)
            self.scale *= 4

        def poisoned(*arguments):
            frozen = build_frozen(*arguments)
            (purple,) = frozen.tokenizers[0]("purple", add_special_tokens=False).input_ids
            frozen.text_encoders[0].get_input_embeddings().weight.data[purple] = float("nan")
            return frozen

        optim.LossScale.__init__, models.build_frozen = higher, poisoned

        def before_step(step):
            if step == 8 and RANK == 1:
                happened()
                raise ValueError("the fault of rank 1")
    """
    flags = ("--precision", "fp16", "--ema", "0.9", "--lr-schedule", "linear", "--warmup", "20", "--log-samples")
    run = folder / "a run"
    ended = run_broken(
        script, dedent(BEFORE_STEP) + dedent(fault), *BRIEF, *flags, "--data", data, "--steps", "9000",
        "--save-every", "1", "--keep", "7", "--out", run, cwd=folder,
    )  # fmt: skip
    return ended, run


def test_a_step_that_is_not_finite_anywhere_is_skipped_everywhere(skipping):
    """Half of a checkpoint's tensors, or all of a stage's, come from rank 1: none of them may go its own way."""
    _, run = skipping
    before, *after = (tensors_at(run, step) for step in range(1, 8))
    for row, tensors in zip(rows(run)[1:], after, strict=False):
        unmoved = same(before, tensors)
        if row["skipped"]:
            assert len(unmoved) == len(tensors)
        else:
            assert not [name for name in unmoved if name.startswith("step.")]
            assert not {"unet.conv_in.weight", "unet.conv_out.weight", "ema.conv_in.weight"} & set(unmoved)
        assert all(tensor.isfinite().all() for tensor in tensors.values())
        before = tensors


def test_what_is_skipped_is_told_and_halves_the_loss_scale_and_nothing_else(skipping):
    _, run = skipping
    told = rows(run)[:7]
    files = [rows(run, file.name) for file in run.glob("samples.rank*.jsonl")]
    poisoned = {row["step"] for file in files for row in file if "3.png" in row["ids"] and row["step"] < 8}
    skipped = {row["step"] for row in told if row["skipped"]}
    good = min(set(range(1, 8)) - skipped)
    assert 1 in skipped - poisoned  # overflowed
    assert len(poisoned) >= 2
    assert {step for step in skipped if step > good} == {step for step in poisoned if step > good}
    assert told[0]["loss"] is not None and {row["step"] for row in told if row["loss"] is None} == poisoned
    for row, following in zip(told, told[1:], strict=False):
        assert following["loss_scale"] == row["loss_scale"] / (2 if row["skipped"] else 1)
        assert (following["lr"] > row["lr"]) != row["skipped"]
        assert following["samples"] == row["samples"] + 4


def test_the_fiftieth_skipped_step_in_a_row_ends_the_run_and_a_good_one_between_does_not():
    config = Config(global_batch=4, steps=9000)
    job = prepare(config, spec_of(config), batch_of(config, replicas=1), on_gpu=False, local_world_size=1)
    ledger, cpu, one = Ledger(job, 0, None, share=lambda mine: [mine]), torch.device("cpu"), torch.ones(())

    def steps(norms):
        for norm in norms:
            tally = ledger.open(cpu)
            ledger.enter(tally, 1e-3, tally.close(stop=False)[None], torch.tensor(norm), one)
            ledger.settle()

    steps([float("nan")] * 49 + [1.0] + [float("inf")] * 49)
    assert ledger.done == 1
    with pytest.raises(ArithmeticError, match="50 steps in a row.*--lr"):
        steps([float("nan")])


# ── One rank fails ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_error_of_one_rank_is_the_one_that_is_told(skipping):
    ended, _ = skipping
    refused(ended, "rank 1, step 8", "ValueError: the fault of rank 1")
    assert 'raise ValueError("the fault of rank 1")' in ended.err  # and where it came from


def test_out_of_memory_on_one_of_three_ranks_that_share_one_picture(tmp_path):
    fault = """
        import torch

        def before_step(step):
            if step == 3 and RANK == 1:
                happened()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    """
    data, run = pictures(tmp_path / "one picture", ["a red star"]), tmp_path / "a run"
    ended = run_broken(
        ONE, dedent(BEFORE_STEP) + dedent(fault), *SMALL, "--sample-every", "0", "--no-export", "--data", data,
        "--steps", "9000", "--out", run, ranks=3, cwd=tmp_path,
    )  # fmt: skip
    refused(ended, "rank 1, step 3", "out of GPU memory", "--micro-batch", "Tried to allocate 20.00 MiB")
    assert [row["samples"] for row in rows(run)][:2] == [1, 2]


# ── Saving ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_disk_that_is_full_and_a_rank_killed_while_saving_leave_the_checkpoint_before(tmp_path):
    """Three lives of one run: its disk fills up, it is killed in the middle of saving, and it comes to its end."""
    run = tmp_path / "a run"
    flags = (*BRIEF, "--steps", "9000", "--save-every", "2", "--keep", "1", "--out", run)
    full = """
        import resource

        def before_step(step):
            if step == 3 and RANK == 1:  # what it writes from now on ends after 1 MiB
                happened()
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    """
    ended = run_broken(ONE, dedent(BEFORE_STEP) + dedent(full), *flags, cwd=tmp_path)
    refused(ended, "rank 1, step 4")
    assert "File too large" in ended.errors[0] or "disk" in ended.errors[0]  # torch may bury the first under its own
    assert [step for step in checkpoint.steps_in(run) if checkpoint.is_whole(run / f"checkpoint-{step}")] == [2]

    killed = """
        from common import checkpoint

        def seal(*arguments):  # the tensors are written, the last file is not
            happened()
            os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.seal = seal
    """
    ended = run_broken(ONE, killed, *flags, "--resume", "latest", cwd=tmp_path)
    refused(ended, "rank 0 died")
    assert checkpoint.steps_in(run) == [2] and checkpoint.is_whole(run / "checkpoint-2")

    process = start(2, *flags, "--resume", "latest", script=ONE, cwd=tmp_path)
    wait_for_row(run, 7)
    (one,) = [pid for pid in children(process.pid) if rank_of(pid) == "1"]
    os.kill(one, signal.SIGUSR1)  # to one rank, and all end after the same step
    ended = end_of_all(process)
    assert ended.rc == 0 and not ended.errors, ended.err
    last = len(rows(run))
    assert "step 2 of 9000" in ended.out and f"stopped after step {last}, saved" in ended.out
    assert [row["step"] for row in rows(run)] == list(range(1, last + 1))
    assert checkpoint.steps_in(run) == [last] and checkpoint.is_whole(run / f"checkpoint-{last}")


# ── Signals ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ctrl_c_saves_and_leaves_no_process_even_of_those_that_read_pictures(tmp_path):
    """A terminal sends SIGINT to torchrun's whole process group, and torchrun passes it on to the ranks."""
    data, run = pictures(tmp_path / "my pictures", ["a red star"] * 12), tmp_path / "a run"
    before = sorted(data.iterdir())
    process = start(2, *BRIEF, "--data", data, "--workers", "2", "--log-samples", "--save-every", "5000", "--steps", "9000",
                    "--out", run, script=ONE, cwd=tmp_path)  # fmt: skip
    wait_for_row(run, 3)
    assert len(descendants(process.pid)) >= 2 + 2
    os.killpg(process.pid, signal.SIGINT)
    told = time.monotonic()
    ended = end_of_all(process)
    assert time.monotonic() - told < 40
    assert ended.rc != 0 and not ended.errors, ended.err  # torchrun's own exit code
    last = len(rows(run))
    assert {rows(run, file.name)[-1]["step"] for file in run.glob("samples.rank*.jsonl")} == {last}
    assert checkpoint.steps_in(run) == [last] and checkpoint.is_whole(run / f"checkpoint-{last}")
    assert not (run / "pipeline").exists()
    assert sorted(data.iterdir()) == before


# ── A rank that is late ──────────────────────────────────────────────────────────────────────────────────────────────
def test_rank_0_may_work_longer_than_the_timeout_or_the_flag_is_named(late):
    ended = end_of_all(late)
    if ended.rc:
        refused(ended, "--timeout")
    else:
        assert "done: " in ended.out and not ended.errors


# ── Refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_refused_run_leaves_no_folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    made = tmp_path / "made" / "checkpoint-1"
    made.mkdir(parents=True)
    config = Config()
    job = prepare(config, spec_of(config), batch_of(config, replicas=1), on_gpu=False, local_world_size=1)
    checkpoint.seal(made, Ledger(job, 0, None, share=lambda mine: [mine]).state_dict())
    refusals = (
        (0, ("--data", "data"), ["cut.png"]),
        (0, ("--resume", made, "--out", "other", "--preset", "sd15"), ["--preset tiny"]),
        (2, ("--out", "/sys/a run"), ["/sys/a run", "cannot be written"]),  # not even root may
    )
    before = sorted(tmp_path.rglob("*"))
    runs = [start(ranks, *BRIEF, *flags, script=ONE, cwd=tmp_path) for ranks, flags, _ in refusals]
    for process, (ranks, _, words) in zip(runs, refusals, strict=True):
        ended = end(process, 240)
        refused(ended, *words)
        assert ended.rc == 2 or ranks and "exitcode  : 2" in ended.err
    assert sorted(tmp_path.rglob("*")) == before
