"""What goes wrong is said in one line that names it, on one rank, and nobody is left waiting."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import ddp_train
from common.errors import UsageError
from tests.launch import end, rows, start, train, trained

BRIEF = ("--lr", "1e-3", "--sample-every", "0", "--no-export")


def refused(ended, *words):
    assert ended.rc != 0
    assert len(ended.errors) == 1, ended.err
    for word in words:
        assert word in ended.errors[0]


def test_one_process_exits_with_2_and_says_what_would_work(tmp_path):
    refusals = [
        (("--nonsense",), ["--nonsense"]),
        (("--data", "nowhere"), ["nowhere"]),
        (("--resume", "nowhere/checkpoint-3"), ["nowhere/checkpoint-3"]),
        (("--model", "nowhere"), ["--model nowhere"]),
    ]
    for process, (_, words) in zip([start(0, *flags, cwd=tmp_path) for flags, _ in refusals], refusals, strict=True):
        ended = end(process)
        refused(ended, *words)
        assert ended.rc == 2
    assert not list(tmp_path.iterdir())


def test_two_ranks_say_it_once_and_a_run_that_is_refused_leaves_no_folder(tmp_path):
    (tmp_path / "empty folder").mkdir()
    refused(train(2, "--data", "empty folder", cwd=tmp_path), "empty folder")
    assert [p.name for p in tmp_path.iterdir()] == ["empty folder"]


def test_an_interface_that_does_not_exist_is_named_with_its_variable(tmp_path):
    ended = train(2, *BRIEF, "--steps", "1", cwd=tmp_path, env={"GLOO_SOCKET_IFNAME": "nosuch"})
    refused(ended, "GLOO_SOCKET_IFNAME")


def wait_for_row(run: Path, step: int) -> None:
    for _ in range(600):
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within a minute")


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def rank_of(pid: int) -> str:
    env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((e.decode()[5:] for e in env if e.startswith(b"RANK=")), "")


def test_sigterm_finishes_the_step_and_a_resume_goes_on(tmp_path):
    run = tmp_path / "run"
    process = start(2, *BRIEF, "--steps", "5000", "--save-every", "1000", "--workers", "2", "--out", run, cwd=tmp_path)
    wait_for_row(run, 3)
    ranks = children(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    ended = end(process, 60)
    assert not ended.errors, ended.err
    (saved,) = run.glob("checkpoint-*")
    step = int(saved.name.split("-")[1])
    assert "stopped after step" in ended.out and len(rows(run)) == step
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not (run / "pipeline").exists()
    trained(2, *BRIEF, "--steps", step + 2, "--resume", "latest", "--out", run, cwd=tmp_path)
    assert [r["step"] for r in rows(run)] == list(range(1, step + 3))


def test_a_killed_rank_is_named_and_nobody_waits(tmp_path):
    process = start(2, *BRIEF, "--steps", "5000", "--out", tmp_path / "run", cwd=tmp_path)
    wait_for_row(tmp_path / "run", 2)
    (victim,) = [pid for pid in children(process.pid) if rank_of(pid) == "1"]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    ended = end(process, 60)
    assert time.monotonic() - began < 45
    refused(ended, "rank 1 died")


def test_latents_that_overflow_end_the_run_with_the_pictures_name(tmp_path):
    from common import models
    from common.config import Config

    config = Config(prediction="v_prediction")
    spec = models.spec_of(config)
    unet = models.build_unet(spec, 0, torch.device("cpu"))
    models.export(tmp_path / "model", spec, config, unet.state_dict(), None)
    file = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    save_file(
        {n: t * float("inf") if n.startswith("encoder.conv_out") else t for n, t in load_file(file).items()}, file
    )
    ended = train(2, "--model", tmp_path / "model", "--resolution", "64", *BRIEF, "--steps", "3", cwd=tmp_path)
    refused(ended, "shapes/", "not finite")


def test_a_folder_that_holds_a_run_is_not_overwritten_and_a_broken_checkpoint_is_not_resumed(tmp_path):
    run = tmp_path / "run"
    trained(0, *BRIEF, "--steps", "2", "--save-every", "1", "--keep", "1", "--out", run, cwd=tmp_path)
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-2"]
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "__0_0.distcp").unlink()
    refusals = [
        ((*BRIEF, "--steps", "2", "--out", run), ["already holds a run", "--resume latest"]),
        ((*BRIEF, "--resume", tmp_path / "checkpoint-2"), ["checkpoint-2", "__0_0.distcp is missing"]),
        (("--resume", run / "checkpoint-2", "--prediction", "epsilon"), ["--prediction", "v_prediction"]),
    ]
    for process, (_, words) in zip([start(0, *flags, cwd=tmp_path) for flags, _ in refusals], refusals, strict=True):
        refused(end(process), *words)


# ── Who speaks, step by step, without processes ──────────────────────────────────────────────────────────────────────
class Ended(BaseException):
    """Stands in for os._exit, which no except clause stops."""


@pytest.fixture
def two_worlds(monkeypatch):
    """Two ranks on one store; what would end the process raises its exit code instead."""

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(ddp_train.os, "_exit", leave)
    store = dist.HashStore()
    return [ddp_train.World(r, r, 2, 2, torch.device("cpu"), store) for r in range(2)]


def end_of(world, error) -> int:
    with pytest.raises(Ended) as ended:
        ddp_train.fail(world, error)
    return ended.value.args[0]


def test_the_first_rank_speaks_and_the_second_takes_over_its_exit_code(two_worlds, capsys):
    codes = [
        end_of(world, error)
        for world, error in zip(two_worlds[::-1], (UsageError("first"), OSError("second")), strict=True)
    ]
    assert codes == [2, 2]
    assert capsys.readouterr().err.splitlines() == ["error: first"]


def test_a_rank_that_lost_the_others_leaves_the_word_to_the_one_with_a_cause(two_worlds, capsys):
    assert end_of(two_worlds[1], OSError("the cause")) == 1
    assert end_of(two_worlds[0], RuntimeError("Connection closed by peer")) == 1
    assert capsys.readouterr().err.splitlines() == ["error: rank 1, start: OSError: the cause"]


def test_a_rank_does_not_start_with_other_flags_than_rank_0(two_worlds):
    two_worlds[0].store.set("ready/0", "10 samples")
    with pytest.raises(UsageError, match="rank 1 starts with 9 samples, rank 0 with 10 samples"):
        ddp_train.all_ready(two_worlds[1], "9 samples", seconds=5)
