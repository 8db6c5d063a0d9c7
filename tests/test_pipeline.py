"""The pipeline on real ranks: the curve and the weights of `ddp_train.py`, for every cut, schedule and split."""

import json
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
from tests.launch import SGD, assert_same_curve, rows, train, trained, weights
from tests.pipeline_models import small_sdxl_folder

PIPELINE = "pipeline_train.py"
ADAM = ("--lr", "1e-3", "--global-batch", "12", "--steps", "4", "--ema", "0.9", "--save-every", "2")
# ranks -> runs: (stages, micro-batch, other flags). 24 samples: micro-batch 24 / replicas / M.
ZERO, AHEAD, RECOMPUTE = ("--schedule", "zero-bubble"), ("--encode", "ahead"), ("--activations", "checkpoint")
MEASURED = ("--costs", "measured")
RUNS = {
    1: [(1, 24, ()), (1, 6, ZERO)],
    2: [
        (2, 24, ZERO),
        (2, 12, AHEAD),
        (2, 8, MEASURED),
        (2, 6, ZERO + AHEAD),
        (2, 3, RECOMPUTE),
        (2, 3, ZERO + RECOMPUTE),
    ],
    3: [(3, 24, ()), (3, 12, ZERO), (3, 8, ZERO + AHEAD), (3, 3, ())],
    4: [(4, 24, AHEAD), (4, 8, ZERO), (4, 6, ()), (4, 3, ZERO), (2, 6, ZERO), (2, 3, AHEAD), (1, 3, ())],
}
NAMED = [(ranks, run) for ranks, runs in RUNS.items() for run in runs]


def name_of(ranks, run):
    stages, micro, flags = run
    return "-".join([f"{ranks}-ranks-{stages}-stages", f"micro-{micro}", *(f for f in flags if not f.startswith("--"))])


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="session")
def many(runs):
    """All runs of so many ranks, after one start; returns the folder of one of them."""
    started = set()

    def get(ranks, run):
        if ranks not in started:
            started.add(ranks)
            listed = []
            for stages, micro, more in RUNS[ranks]:
                flags = (*SGD, "--stages", stages, "--micro-batch", micro, "--val-every", 2, *more)
                listed.append((name_of(ranks, (stages, micro, more)), [str(f) for f in flags], None))
            if ranks == 2:  # a loss scale at which the first gradients overflow
                flags = (*SGD, "--micro-batch", "6", "--precision", "fp16", "--schedule", "zero-bubble")
                listed.append(("overflow", flags, 2.0**40))
            trained(ranks, json.dumps(listed), runs, script="tests/pipeline_runs.py", cwd=runs, seconds=400)
        return runs / (name_of(ranks, run) if run else "overflow")

    return get


@pytest.mark.long
@pytest.mark.parametrize("ranks, run", NAMED, ids=[name_of(*named) for named in NAMED])
def test_every_cut_follows_the_curve_of_the_uncut_unet(alone, many, ranks, run):
    out = many(ranks, run)
    assert_same_curve(alone, out)
    held_out = [[r["val_loss"] for r in rows(folder) if "val_loss" in r] for folder in (alone, out)]
    np.testing.assert_allclose(*held_out, rtol=1e-5)
    each = json.loads((out / "ranks.json").read_text())
    assert [rank["in_flight"] for rank in each] == [0] * ranks  # nothing is left behind between steps
    replicas = ranks // run[0]
    assert sum(rank["owned"] for rank in each) == replicas * models.parameter_count(models.spec_of(Config()))


def test_the_weights_move(alone, many):
    before = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    after = weights(many(*NAMED[3]))
    assert all((before[n] - after[n]).abs().max() > 0 for n in after if n.endswith("conv1.weight"))


def test_a_gradient_that_overflows_on_one_stage_makes_all_of_them_skip(alone, many):
    """fp16 with a scale of 2^40: halved by each skipped step, on the ranks alike, or the weights would be torn."""
    out = many(2, None)
    found = rows(out)
    assert [r["skipped"] for r in found] == [True] * 3
    assert [r["loss_scale"] for r in found] == [2.0**40, 2.0**39, 2.0**38]
    before = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    assert all(torch.equal(before[n], t) for n, t in weights(out).items())
    assert found[0]["loss"] == pytest.approx(rows(alone)[0]["loss"], rel=0.02)


@pytest.mark.parametrize("ranks, run", [(2, RUNS[2][0]), (2, RUNS[2][3]), (3, RUNS[3][1]), (4, RUNS[4][4])])
def test_bytes_sent_are_those_of_the_plan(many, ranks, run):
    stages, micro, flags = run
    given = parse("pipeline", [*SGD, "--micro-batch", str(micro), *flags])
    spec, batch = models.spec_of(given), batch_of(given, ranks // stages)
    config = prepare(given, spec, batch, False, ranks).config
    folding = plan_fold(spec, config, batch, stages, torch.device("cpu"))
    planned = folding.sent_bytes(Templates(spec, "fp32", torch.device("cpu")), folding.step())
    sent = [rank["sent"] for rank in json.loads((many(ranks, run) / "ranks.json").read_text())]
    assert sent == planned * batch.replicas
    assert f"stage 0 sends {planned[0] / 2**20:.2f} MiB" in folding.describe(spec, 2048)


# ── The script as a user starts it ───────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="session")
def replicated(runs):
    """Four steps of AdamW with EMA in one process of ddp_train.py, with a checkpoint after two, and a sheet of samples."""
    trained(0, *ADAM, "--micro-batch", "12", "--out", runs / "replicated", cwd=runs)
    return runs / "replicated"


@pytest.fixture(scope="session")
def piped(runs):
    """The same over three stages."""
    flags = ("--micro-batch", "3", "--schedule", "zero-bubble", "--log-samples")
    trained(3, *ADAM, *flags, "--out", runs / "piped", script=PIPELINE, cwd=runs)
    return runs / "piped"


def test_checkpoints_go_from_script_to_script_and_from_cut_to_cut(runs, replicated, piped):
    resumed = {
        "cut-to-whole": trained(0, *ADAM, "--micro-batch", "12", "--sample-every", "0", "--resume", piped / "checkpoint-2",
                                "--out", runs / "cut-to-whole", cwd=runs),
        "whole-to-cut": trained(2, *ADAM, "--micro-batch", "6", "--sample-every", "0", "--resume", replicated / "checkpoint-2",
                                "--out", runs / "whole-to-cut", script=PIPELINE, cwd=runs),
        "cut-to-cut": trained(2, *ADAM, "--micro-batch", "3", "--sample-every", "0", "--resume", piped / "checkpoint-2",
                              "--out", runs / "cut-to-cut", script=PIPELINE, cwd=runs),
    }  # fmt: skip
    reference = [r["loss"] for r in rows(replicated)]
    np.testing.assert_allclose([r["loss"] for r in rows(piped)], reference, rtol=1e-5)
    for name in resumed:
        np.testing.assert_allclose([r["loss"] for r in rows(runs / name)], reference[2:], rtol=1e-5)
        for part in ("unet", "unet_raw"):  # AdamW makes tiny gradients into steps of lr: 0.3 lr is the tolerance
            one, other = weights(replicated, part), weights(runs / name, part)
            assert max((one[n] - other[n]).abs().max() for n in one) < 0.3e-3


def test_a_checkpoint_of_the_pipeline_has_every_tensor_of_the_others(replicated, piped):
    names = [
        FileSystemReader(run / "checkpoint-4").read_metadata().state_dict_metadata.keys() for run in (replicated, piped)
    ]
    assert set(names[0]) == set(names[1])


def test_what_is_drawn_through_the_pipe_is_what_the_whole_unet_draws(replicated, piped):
    one, other = (np.asarray(Image.open(run / "samples-4.png"), dtype=float) for run in (replicated, piped))
    assert one.shape == other.shape
    assert np.abs(one - other).mean() < 1  # of 255


def test_the_first_rank_of_a_replica_says_what_was_trained_on(piped):
    logged = rows(piped, "samples.rank0.jsonl")
    assert [len(row["ids"]) for row in logged] == [3] * 16
    assert not (piped / "samples.rank1.jsonl").exists()
    assert Image.open(piped / "schedule.png").size > (800, 200)


def test_sdxl_cut_inside_its_stacks_follows_the_curve_of_the_whole(runs):
    """Two text encoders on two stages, pooled text and sizes to stage 0, residuals of stacks over the cuts."""
    model = small_sdxl_folder(runs / "thin-sdxl")
    flags = (
        "--model",
        model,
        "--optimizer",
        "sgd",
        "--lr",
        "0.05",
        "--global-batch",
        "6",
        "--steps",
        "2",
        "--sample-every",
        "0",
    )
    trained(0, *flags, "--micro-batch", "6", "--out", runs / "sdxl-1", cwd=runs)
    more = ("--micro-batch", "2", "--schedule", "zero-bubble", "--activations", "checkpoint")
    trained(3, *flags, *more, "--out", runs / "sdxl-3", script=PIPELINE, cwd=runs)
    assert_same_curve(runs / "sdxl-1", runs / "sdxl-3")


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
    trained(0, *flags, "--micro-batch", "4", "--out", runs / "pictures-1", cwd=runs)
    two = trained(
        2, *flags, "--micro-batch", "1", "--workers", "1", "--out", runs / "pictures-2", script=PIPELINE, cwd=runs
    )
    assert_same_curve(runs / "pictures-1", runs / "pictures-2")
    assert two.err.count("7.png") == 1


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
    ended = train(2, "--stages", 4, script=PIPELINE, cwd=tmp_path)
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
