"""The second rule, on real processes: one curve, whatever the ranks, the split, the workers, or an interruption."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import DiffusionPipeline, UNet2DConditionModel
from PIL import Image

from common import models
from common.config import Config
from tests.launch import SGD, assert_same_curve, rows, train, trained, weights

ADAM = ("--lr", "1e-3", "--global-batch", "12", "--steps", "6", "--ema", "0.9", "--sample-every", "0", "--log-samples")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs with a space")


RATE = (
    "--lr",
    "1e-3",
    "--lr-schedule",
    "cosine",
    "--warmup",
    "2",
    "--steps",
    "6",
    "--sample-every",
    "0",
    "--no-export",
)
# ranks -> runs: (name, flags)
RUNS = {
    2: [
        ("workers", (*SGD, "--micro-batch", "12", "--workers", "2")),
        ("recomputed", (*SGD, "--micro-batch", "3", "--activations", "checkpoint")),
        ("held-out", (*SGD, "--micro-batch", "12", "--val-every", "1")),
        ("fp16", (*SGD, "--micro-batch", "12", "--precision", "fp16")),
        ("bf16", (*SGD, "--micro-batch", "12", "--precision", "bf16", "--grad-compress", "bf16")),
        ("rate", (*RATE, "--micro-batch", "1", "--accum", "3")),
        ("straight", (*ADAM, "--save-every", "3")),
        ("part", (*ADAM, "--save-every", "3", "--no-export")),
    ],
    3: [
        ("plain", (*SGD, "--micro-batch", "8")),
        ("rate", (*RATE, "--micro-batch", "2")),
        ("straight", ADAM),
        ("part", (*ADAM, "--save-every", "3", "--no-export")),
    ],
    4: [("accumulated", (*SGD, "--micro-batch", "2"))],
}


@pytest.fixture(scope="session")
def many(runs):
    """The folder of a run; all runs of so many ranks share one start."""
    started = set()

    def get(ranks: int, name: str):
        if ranks not in started:
            started.add(ranks)
            listed = [(f"{ranks}-{n}", flags) for n, flags in RUNS[ranks]]
            trained(ranks, "ddp_train", json.dumps(listed), runs, script="tests/many_runs.py", cwd=runs, seconds=400)
        return runs / f"{ranks}-{name}"

    return get


@pytest.fixture(scope="session")
def straight(many):
    """Six steps of AdamW with EMA on two ranks, with a checkpoint after three."""
    return many(2, "straight")


@pytest.mark.parametrize("ranks, name", [(2, "workers"), (2, "recomputed"), (3, "plain"), (4, "accumulated")])
def test_every_split_follows_the_curve_of_one_process(alone, many, ranks, name):
    assert_same_curve(alone, many(ranks, name))


def test_the_weights_move(alone):
    before = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    after = weights(alone)
    assert all((before[n] - after[n]).abs().max() > 0 for n in after if n.endswith("conv1.weight"))


def test_held_out_loss_does_not_depend_on_the_ranks_and_leaves_the_weights_alone(alone, many):
    run = many(2, "held-out")
    (one,), two = [r["val_loss"] for r in rows(alone) if "val_loss" in r], rows(run)[1]["val_loss"]
    assert two == pytest.approx(one, rel=1e-5)
    assert_same_curve(alone, run)  # three validations against one changed nothing


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resumed_run_ends_with_the_same_bits(runs, many, ranks):
    """Stopped as a crash stops it: three more steps were done, but the last whole checkpoint is of step 3."""
    whole, part = many(ranks, "straight"), many(ranks, "part")
    damaged = part / "checkpoint-6" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:100])
    ended = trained(ranks, *ADAM, "--resume", "latest", "--out", part, cwd=runs)
    assert "checkpoint-6" in ended.out and "__0_0.distcp has 100 bytes" in ended.out  # passed over, and said
    for folder in ("unet", "unet_raw"):
        one, other = weights(whole, folder), weights(part, folder)
        assert all(torch.equal(one[n], other[n]) for n in one)
    for r in range(ranks):
        assert rows(whole, f"samples.rank{r}.jsonl") == rows(part, f"samples.rank{r}.jsonl")


def test_a_resume_on_another_number_of_ranks_goes_on_along_the_curve(runs, straight):
    out = runs / "three-after-two"
    trained(3, *ADAM, "--resume", straight / "checkpoint-3", "--out", out, cwd=runs)
    after = [r for r in rows(straight) if r["step"] > 3]
    np.testing.assert_allclose([r["loss"] for r in rows(out)], [r["loss"] for r in after], rtol=1e-5)
    seen = [sorted(i for r in range(n) for row in rows(run, f"samples.rank{r}.jsonl") if row["step"] > 3 for i in row["ids"])
            for run, n in ((straight, 2), (out, 3))]  # fmt: skip
    assert seen[0] == seen[1]


def test_a_finished_run_says_so_and_exports_if_the_export_is_gone(runs, straight):
    before = weights(straight)
    shutil.rmtree(straight / "pipeline")
    ended = trained(2, *ADAM, "--resume", "latest", "--out", straight, cwd=runs)
    assert "already complete" in ended.out
    assert len(rows(straight)) == 6
    assert all(torch.equal(before[n], t) for n, t in weights(straight).items())


def test_ranks_draw_different_noise_and_a_step_holds_each_sample_once(straight):
    first = [rows(straight, f"samples.rank{r}.jsonl")[0] for r in range(2)]
    assert not set(first[0]["noise"]) & set(first[1]["noise"])
    assert not set(first[0]["ids"]) & set(first[1]["ids"])
    assert all(len(ids) == 77 for ids in first[0]["tokens"])


def test_the_export_has_the_average_and_the_weights_of_the_last_checkpoint(straight):
    average, raw = weights(straight), weights(straight, "unet_raw")
    saved = {f"{part}.{n}": torch.empty_like(t) for part in ("ema", "unet") for n, t in raw.items()}
    dcp.load(saved, checkpoint_id=straight / "checkpoint-6")
    assert all(torch.equal(average[n], saved[f"ema.{n}"]) and torch.equal(raw[n], saved[f"unet.{n}"]) for n in raw)
    assert any(not torch.equal(average[n], raw[n]) for n in raw)


def test_the_export_is_a_pipeline_that_draws(straight):
    pipe = DiffusionPipeline.from_pretrained(straight / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    picture = pipe("a large red star", num_inference_steps=2, output_type="np").images[0]
    assert picture.shape == (64, 64, 3) and np.isfinite(picture).all() and picture.std() > 0
    base = UNet2DConditionModel.from_config(models.spec_of(Config()).unet).state_dict()
    assert {n: t.shape for n, t in base.items()} == {n: t.shape for n, t in weights(straight).items()}
    assert {t.dtype for t in weights(straight).values()} == {torch.float32}


def test_the_rate_is_the_same_for_every_split_and_ends_with_the_run(many):
    two, three = ([r["lr"] for r in rows(many(n, "rate"))] for n in (2, 3))
    assert two == three
    assert two[:2] == [0.5e-3, 1e-3] and two[-1] < 0.2e-3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_stays_near_fp32_and_masters_stay_fp32(alone, many, precision):
    run = many(2, precision)
    good = [r for r in rows(run) if not r["skipped"]]
    assert good, "every step was skipped"
    assert good[0]["loss"] == pytest.approx(rows(alone)[0]["loss"], rel=0.02)
    assert rows(run)[0]["loss_scale"] == (65536 if precision == "fp16" else 1)
    assert {t.dtype for t in weights(run).values()} == {torch.float32}


# ── A folder of pictures ─────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unreadable_picture_and_a_short_step_have_the_right_means(runs, folder):
    flags = (
        "--data",
        folder,
        "--optimizer",
        "sgd",
        "--lr",
        "0.05",
        "--global-batch",
        "4",
        "--steps",
        "6",
        "--sample-every",
        "0",
    )
    one = trained(1, *flags, "--micro-batch", "4", "--log-samples", "--out", runs / "folder-1", cwd=runs)
    two = trained(2, *flags, "--micro-batch", "1", "--workers", "2", "--out", runs / "folder-2", cwd=runs)
    assert_same_curve(runs / "folder-1", runs / "folder-2")
    assert one.err.count("7.png") == two.err.count("7.png") == 1
    assert rows(runs / "folder-1")[2]["samples"] == 9  # an epoch is three steps and nine readable pictures
    logged = rows(runs / "folder-1", "samples.rank0.jsonl")
    assert sorted(i for row in logged[:3] for i in row["ids"]) == [f"{i}.png" for i in range(10) if i != 7]
    assert logged[0]["time_ids"][0] == [64, 96, 0, 16, 64, 64]


def test_one_picture_on_three_ranks_is_the_same_step_as_alone(runs, tmp_path):
    """24 slots of which 23 are empty: the mean, and the gradient, are those of the one."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "only.png")
    flags = ("--data", tmp_path, "--steps", "2", "--optimizer", "sgd", "--lr", "0.05", "--sample-every", "0")
    trained(3, *flags, "--out", runs / "only-3", cwd=runs)
    trained(0, *flags, "--global-batch", "1", "--out", runs / "only-1", cwd=runs)
    assert [r["samples"] for r in rows(runs / "only-3")] == [1, 2]
    assert_same_curve(runs / "only-1", runs / "only-3")


def test_the_plan_is_printed_and_nothing_is_left(tmp_path):
    ended = train(2, "--dry-run", cwd=tmp_path)
    assert ended.rc == 0, ended.err
    assert "1,306,884 parameters" in ended.out and ended.out.count("model ") == 1
    assert not list(tmp_path.iterdir())
