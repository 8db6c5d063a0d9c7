"""Flags: what they mean, what is refused, and that each refusal offers a way out."""

import dataclasses
import itertools

import pytest

from common.config import (
    PRESETS,
    Config,
    batch_of,
    changed_flags,
    flags_of,
    learning_rate,
    parse,
    plan_batch,
    with_recipe,
)
from common.errors import UsageError


@pytest.mark.parametrize("micro, accum, replicas", itertools.product([1, 2, 3, 8], [1, 2, 5], [1, 2, 3, 8]))
def test_any_two_of_the_three_determine_the_third(micro, accum, replicas):
    product = micro * accum * replicas
    for given in ((micro, accum, None), (micro, None, product), (None, accum, product), (micro, accum, product)):
        batch = plan_batch(*given, replicas)
        assert (batch.micro_batch, batch.accum, batch.global_batch) == (micro, accum, product)


@pytest.mark.parametrize("share, replicas", itertools.product(range(1, 40), [1, 2, 7]))
def test_a_global_batch_alone_uses_no_more_memory_than_the_default(share, replicas):
    batch = plan_batch(None, None, share * replicas, replicas)
    assert batch.global_batch == share * replicas and batch.micro_batch <= 8


@pytest.mark.parametrize(
    "given, replicas, words",
    [
        ((4, None, 30), 8, "Use 32"),
        ((4, 2, 10), 2, "Use 16"),
        ((None, None, 31), 2, "30 or 32"),
        ((None, None, 1), 4, "Use 4"),
    ],
)
def test_a_remainder_shows_the_product_and_values_that_work(given, replicas, words):
    with pytest.raises(UsageError, match=f"--global-batch {given[2]} .*{replicas} replicas.*{words}"):
        plan_batch(*given, replicas)


@pytest.mark.parametrize("replicas", range(1, 70))
def test_without_flags_every_world_size_has_about_the_recipes_batch(replicas):
    batch = batch_of(parse("ddp", []), replicas)
    assert abs(batch.global_batch - 64) <= max(replicas / 2, 1) or batch.micro_batch == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--nonsense"], "--nonsense"),
        (["--steps", "many"], "--steps"),
        (["--preset", "sd3"], "sdxl"),
        (["--steps", "0"], "at least 1"),
        (["--lr", "nan"], "finite"),
        (["--lr", "-1"], "at least 0"),
        (["--flip", "1.5"], "from 0 to 1"),
        (["--ema", "1"], "below 1"),
        (["--resolution", "100"], "96"),
        (["--model", "x", "--preset", "sdxl"], "exclude"),
        (["--snr-gamma", "0"], "5"),
        (["--timeout", "0"], "600"),
        (["--preset", "sdxl", "--stages", "4"], "--stages"),  # a flag of another script
    ],
)
def test_a_wrong_flag_is_one_error_that_says_what_would_work(argv, words):
    with pytest.raises(UsageError, match=words) as error:
        parse("ddp", argv)
    assert "\n" not in str(error.value)


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("ddp", ["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all("--" + f.name.replace("_", "-") in text for f in flags_of("ddp"))


def test_help_is_printed_by_one_rank(capsys):
    with pytest.raises(SystemExit):
        parse("ddp", ["--help"], rank=1)
    assert capsys.readouterr().out == ""


def test_a_recipe_is_taken_whole_or_not_at_all():
    tiny = PRESETS["tiny"]
    whole = with_recipe(parse("ddp", []))
    assert (whole.lr, whole.lr_schedule, whole.ema, whole.warmup) == (tiny.lr, "cosine", tiny.ema, tiny.warmup)
    for argv in (["--lr", "1e-3"], ["--optimizer", "sgd"]):
        own = with_recipe(parse("ddp", argv))
        assert (own.lr_schedule, own.ema, own.warmup, own.caption_dropout) == ("constant", 0, 0, 0)
        assert batch_of(parse("ddp", argv), 2).global_batch == 16


@pytest.mark.parametrize(
    "schedule, warmup, steps", itertools.product(["constant", "linear", "cosine"], [0, 1, 4], [5, 20])
)
def test_the_rate_rises_through_the_warm_up_and_ends_with_the_run(schedule, warmup, steps):
    config = dataclasses.replace(Config(), lr=1.0, lr_schedule=schedule, warmup=warmup, steps=steps)
    rates = [learning_rate(k, config, replicas=4) for k in range(steps)]
    assert max(rates) == 1.0 and min(rates) > 0
    assert rates[:warmup] == [(k + 1) / warmup for k in range(warmup)]
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if schedule != "constant":
        assert learning_rate(steps, config, 1) == pytest.approx(0, abs=1e-9)
    assert learning_rate(2, dataclasses.replace(config, scale_lr=True), 4) == 4 * rates[2]


def test_a_resume_lists_what_changes_and_refuses_what_cannot():
    before = dataclasses.asdict(with_recipe(Config()))
    assert changed_flags(before, with_recipe(Config())) == []
    assert changed_flags(before, with_recipe(dataclasses.replace(Config(), workers=3, out="x"))) == []
    assert changed_flags(before, dataclasses.replace(with_recipe(Config()), clip=0.5)) == ["--clip 0.5 (was 1.0)"]
    with pytest.raises(UsageError, match="--prediction epsilon.*v_prediction"):
        changed_flags(
            before | {"prediction": "v_prediction"}, dataclasses.replace(with_recipe(Config()), prediction="epsilon")
        )
