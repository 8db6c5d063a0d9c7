"""The second rule, on real processes: one curve, whatever the ranks, the split, the workers, or an interruption."""

import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from diffusers import DiffusionPipeline, UNet2DConditionModel

from common import models
from common.config import Config
from tests.launch import assert_goes_on, assert_same_curve, rows, said, train, trained, weights
from tests.runs import LATER


@pytest.fixture(scope="session")
def straight(many):
    """Six steps of AdamW with EMA on two ranks, with a checkpoint after three."""
    return many("ddp", 2, "straight")


@pytest.mark.parametrize("ranks, name", [(2, "workers"), (2, "recomputed"), (3, "plain"), (4, "accumulated")])
def test_every_split_follows_the_curve_of_one_process(alone, many, ranks, name):
    assert_same_curve(alone, many("ddp", ranks, name))


def test_the_weights_move(alone):
    before = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    after = weights(alone)
    assert all((before[n] - after[n]).abs().max() > 0 for n in after if n.endswith("conv1.weight"))


def test_held_out_loss_does_not_depend_on_the_ranks_and_leaves_the_weights_alone(alone, many):
    run = many("ddp", 2, "held-out")
    (one,), two = [r["val_loss"] for r in rows(alone) if "val_loss" in r], rows(run)[1]["val_loss"]
    assert two == pytest.approx(one, rel=1e-5)
    assert_same_curve(alone, run)  # three validations against one changed nothing


def assert_same_bits(whole, resumed, ranks):
    for folder in ("unet", "unet_raw"):
        one, other = weights(whole, folder), weights(resumed, folder)
        assert all(torch.equal(one[n], other[n]) for n in one)
    for r in range(ranks):
        later = [row for row in rows(whole, f"samples.rank{r}.jsonl") if row["step"] > 3]
        assert later == [row for row in rows(resumed, f"samples.rank{r}.jsonl") if row["step"] > 3]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, straight):
    """Stopped as a crash stops it: three more steps were done, but the last whole checkpoint is of step 3."""
    part = tmp_path / "part"
    shutil.copytree(straight, part, ignore=shutil.ignore_patterns("pipeline"))
    damaged = part / "checkpoint-6" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:100])
    ended = trained(2, *LATER, "latest", "--out", part, cwd=tmp_path)
    assert "checkpoint-6" in ended.out and "__0_0.distcp has 100 bytes" in ended.out  # passed over, and said
    assert_same_bits(straight, part, 2)
    for r in range(2):
        assert rows(straight, f"samples.rank{r}.jsonl") == rows(part, f"samples.rank{r}.jsonl")


def test_a_resumed_run_of_three_ranks_ends_with_the_same_bits(many):
    """With three ranks and more, the order in which gradients are summed tells buckets apart."""
    assert_same_bits(many("ddp", 3, "straight"), many("ddp", 3, "resumed"), 3)


@pytest.mark.parametrize(
    "name, script, ranks", [("after-2", "ddp", 2), ("after-fsdp", "fsdp", 2), ("after-pipeline", "pipeline", 3)]
)
def test_a_resume_on_other_ranks_or_from_another_script_goes_on_along_the_curve(many, name, script, ranks):
    assert_goes_on(many(script, ranks, "straight"), many("ddp", 3, name))


def test_a_resume_on_other_ranks_takes_the_same_samples(straight, many):
    seen = [sorted(i for r in range(n) for row in rows(run, f"samples.rank{r}.jsonl") if row["step"] > 3 for i in row["ids"])
            for run, n in ((straight, 2), (many("ddp", 3, "after-2"), 3))]  # fmt: skip
    assert seen[0] == seen[1]


def test_a_finished_run_says_so_and_exports_if_the_export_is_gone(tmp_path, straight):
    run = tmp_path / "run"
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("pipeline"))
    ended = trained(0, *LATER, "latest", "--micro-batch", "12", "--out", run, cwd=tmp_path)
    assert "already complete" in ended.out
    assert len(rows(run)) == 6
    exported = weights(run)
    assert all(torch.equal(exported[n], t) for n, t in weights(straight).items())


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
    two, three = ([r["lr"] for r in rows(many("ddp", n, "rate"))] for n in (2, 3))
    assert two == three
    assert two[:2] == [0.5e-3, 1e-3] and two[-1] < 0.2e-3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_stays_near_fp32_and_masters_stay_fp32(alone, many, precision):
    run = many("ddp", 2, precision)
    good = [r for r in rows(run) if not r["skipped"]]
    assert good, "every step was skipped"
    assert good[0]["loss"] == pytest.approx(rows(alone)[0]["loss"], rel=0.02)
    assert rows(run)[0]["loss_scale"] == (65536 if precision == "fp16" else 1)
    assert {t.dtype for t in weights(run).values()} == {torch.float32}


# ── A folder of pictures ─────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unreadable_picture_and_a_short_step_have_the_right_means(many):
    one, two = many("ddp", 0, "pictures"), many("ddp", 2, "pictures")
    assert_same_curve(one, two)
    assert said(one).count("7.png") == said(two).count("7.png") == 1
    assert rows(one)[2]["samples"] == 9  # an epoch is three steps and nine readable pictures
    logged = rows(one, "samples.rank0.jsonl")
    assert sorted(i for row in logged[:3] for i in row["ids"]) == [f"{i}.png" for i in range(10) if i != 7]
    assert logged[0]["time_ids"][0] == [64, 96, 0, 16, 64, 64]


def test_one_picture_on_three_ranks_is_the_same_step_as_alone(many):
    """24 slots of which 23 are empty: the mean, and the gradient, are those of the one."""
    one, three = many("ddp", 0, "only"), many("ddp", 3, "only")
    assert [r["samples"] for r in rows(three)] == [1, 2]
    assert_same_curve(one, three)


def test_the_plan_is_printed_and_nothing_is_left(tmp_path):
    ended = train(2, "--dry-run", cwd=tmp_path)
    assert ended.rc == 0, ended.err
    assert "1,306,884 parameters" in ended.out and ended.out.count("model ") == 1
    assert not list(tmp_path.iterdir())
