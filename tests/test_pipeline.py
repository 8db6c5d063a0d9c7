"""The pipeline on real ranks: the curve and the weights of `ddp_train.py`, for every cut, schedule and split."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.checkpoint import FileSystemReader

from common import models
from common.config import Config, batch_of, parse
from common.errors import UsageError
from common.folding import Templates, plan_fold, stages_of
from common.job import prepare
from tests.launch import assert_goes_on, assert_near, assert_same_curve, ranks_of, rows, said, train, trained, weights
from tests.runs import PIPED

NAMED = [(ranks, name) for ranks, runs in PIPED.items() for name, _ in runs]


@pytest.mark.long
@pytest.mark.parametrize("ranks, name", NAMED)
def test_every_cut_follows_the_curve_of_the_uncut_unet(alone, many, ranks, name):
    out = many("pipeline", ranks, name)
    assert_same_curve(alone, out)
    held_out = [[r["val_loss"] for r in rows(folder) if "val_loss" in r] for folder in (alone, out)]
    np.testing.assert_allclose(*held_out, rtol=1e-5)
    each = ranks_of(out)
    assert [rank["in_flight"] for rank in each] == [0] * ranks  # nothing is left behind between steps
    replicas = ranks // int(name.split("-")[0])
    assert sum(rank["held"] for rank in each) == replicas * models.parameter_count(models.spec_of(Config()))


def test_the_weights_move(alone, many):
    before = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    after = weights(many("pipeline", *NAMED[3]))
    assert all((before[n] - after[n]).abs().max() > 0 for n in after if n.endswith("conv1.weight"))


def test_a_gradient_that_overflows_on_one_stage_makes_all_of_them_skip(alone, many):
    """fp16 with a scale of 2^40: halved by each skipped step, on the ranks alike, or the weights would be torn."""
    out = many("pipeline", 2, "overflow")
    found = rows(out)
    assert [r["skipped"] for r in found] == [True] * 3
    assert [r["loss_scale"] for r in found] == [2.0**40, 2.0**39, 2.0**38]
    before = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    assert all(torch.equal(before[n], t) for n, t in weights(out).items())
    assert found[0]["loss"] == pytest.approx(rows(alone)[0]["loss"], rel=0.02)


def test_steps_may_differ_in_the_size_of_their_pictures(tmp_path):
    trained(2, tmp_path, script="tests/changing_shapes.py", cwd=tmp_path)
    one, other = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("stages", "replicas"))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[key] for r in one["rows"]], [r[key] for r in other["rows"]], rtol=1e-5)
    for name, tensor in other["weights"].items():
        torch.testing.assert_close(one["weights"][name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("ranks, at", [(2, 0), (2, 3), (3, 1), (4, 4)])
def test_bytes_sent_are_those_of_the_plan(many, ranks, at):
    name, flags = PIPED[ranks][at]
    given = parse("pipeline", flags)
    stages = given.stages
    spec, batch = models.spec_of(given), batch_of(given, ranks // stages)
    config = prepare(given, spec, batch, False, ranks).config
    folding = plan_fold(spec, config, batch, stages, torch.device("cpu"))
    planned = folding.sent_bytes(Templates(spec, "fp32", torch.device("cpu")), folding.step())
    sent = [rank["sent"] for rank in ranks_of(many("pipeline", ranks, name))]
    assert sent == planned * batch.replicas
    assert f"stage 0 sends {planned[0] / 2**20:.2f} MiB" in folding.describe(spec, 2048)


@pytest.mark.parametrize(
    "name, script, ranks", [("after-ddp", "ddp", 2), ("after-fsdp", "fsdp", 2), ("after-3", "pipeline", 3)]
)
def test_two_stages_go_on_from_a_checkpoint_of_three_and_of_the_other_scripts(many, name, script, ranks):
    assert_goes_on(many(script, ranks, "straight"), many("pipeline", 2, name))


@pytest.fixture
def both(many):
    """The same run, replicated and over three stages, with checkpoints and a sheet of samples."""
    return many("ddp", 2, "straight"), many("pipeline", 3, "straight")


def test_adamw_and_its_average_follow_the_curve_of_the_uncut_unet(both):
    np.testing.assert_allclose(*([r["loss"] for r in rows(run)] for run in both), rtol=1e-5)
    for part in ("unet", "unet_raw"):
        assert_near(*(weights(run, part) for run in both))


def test_a_checkpoint_of_the_pipeline_has_every_tensor_of_the_others(both):
    names = [FileSystemReader(run / "checkpoint-6").read_metadata().state_dict_metadata.keys() for run in both]
    assert set(names[0]) == set(names[1])


def test_what_is_drawn_through_the_pipe_is_what_the_whole_unet_draws(both):
    one, other = (np.asarray(Image.open(run / "samples-6.png"), dtype=float) for run in both)
    assert one.shape == other.shape
    assert np.abs(one - other).mean() < 1  # of 255


def test_the_first_rank_of_a_replica_says_what_was_trained_on(both):
    _, cut = both
    logged = rows(cut, "samples.rank0.jsonl")
    assert [len(row["ids"]) for row in logged] == [3] * 24
    assert not (cut / "samples.rank1.jsonl").exists()
    assert Image.open(cut / "schedule.png").size > (800, 200)


def test_sdxl_cut_inside_its_stacks_follows_the_curve_of_the_whole(many):
    """Two text encoders on two stages, pooled text and sizes to stage 0, residuals of stacks over the cuts."""
    assert_same_curve(many("ddp", 0, "thin-sdxl"), many("pipeline", 3, "thin-sdxl"))


def test_an_unreadable_picture_and_a_short_step_have_the_right_means(many):
    two = many("pipeline", 2, "pictures")
    assert_same_curve(many("ddp", 0, "pictures"), two)
    assert said(two).count("7.png") == 1


# ── The script as a user starts it ───────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "ranks, stages, says",
    [
        (4, 7, "folded into 1 to 6 stages, of which 4 ranks can fill 1, 2, 4; use 4"),
        (4, 3, "4 ranks are not a multiple of it; use 1 or 2 or 4, or 6 ranks"),
        (8, 0, "of which 8 ranks can fill 1, 2, 4; use 4"),
    ],
)
def test_stages_that_cannot_be_are_refused_with_those_that_can(ranks, stages, says):
    with pytest.raises(UsageError, match=f"--stages {stages}: .*{says}"):
        stages_of(Config(stages=stages), models.spec_of(Config()), ranks)


@pytest.mark.parametrize("ranks, stages", [(1, 1), (4, 4), (6, 6), (7, 1), (8, 4), (9, 3), (12, 6)])
def test_without_flags_the_pipe_is_as_long_as_model_and_ranks_allow(ranks, stages):
    assert stages_of(Config(), models.spec_of(Config()), ranks) == stages


def test_a_refused_run_says_so_once_and_leaves_nothing(tmp_path):
    ended = train(2, "--stages", 4, script="pipeline_train.py", cwd=tmp_path)
    assert ended.rc == 1
    (line,) = ended.errors
    assert "use 1 or 2, or 4 ranks" in line
    assert not list(tmp_path.iterdir())


def test_the_plan_says_who_holds_what():
    given = parse("pipeline", ["--preset", "sdxl", "--schedule", "zero-bubble", "--accum", "8", "--precision", "bf16"])
    spec, batch = models.spec_of(given), batch_of(given, 1, default=(2, 4))
    folding = plan_fold(spec, prepare(given, spec, batch, False, 4).config, batch, 4, torch.device("cpu"))
    said = folding.describe(spec, 2048)
    assert "2,567,463,684" in said and "text_encoder_2" in said and "micro-batch 2 x accum 8" in said
    busy, slower = (
        float(re.search(r"([\d.]+)% busy", text)[1]) for text in (said, folding.describe(spec, 2048, 5, 350))
    )
    assert busy > 95 and slower < busy - 1  # 5 GB/s is a slow network, and the plan says so
