"""Flags: what they mean, what is refused, and that each refusal offers a way out."""

import dataclasses
import itertools
import re

import pytest

from common.config import (
    BOUND,
    NEUTRAL,
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


@pytest.mark.parametrize("micro, accum, replicas", [*itertools.product([1, 2, 3, 8], [1, 2, 5], [1, 2, 3, 8])])
def test_any_two_of_the_three_determine_the_third(micro, accum, replicas):
    product = micro * accum * replicas
    for given in ((micro, accum, None), (micro, None, product), (None, accum, product), (micro, accum, product)):
        batch = plan_batch(*given, replicas)
        assert (batch.micro_batch, batch.accum, batch.global_batch) == (micro, accum, product)


@pytest.mark.parametrize("share, replicas", [*itertools.product(range(1, 40), [1, 2, 7])])
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
    "schedule, warmup, steps", [*itertools.product(["constant", "linear", "cosine"], [0, 1, 4], [5, 20])]
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


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_a_global_batch_either_fits_exactly_or_is_refused_with_values_that_fit(replicas):
    for micro, accum, wanted in itertools.product([None, 1, 3, 4], [None, 1, 2, 5], range(1, 50)):
        try:
            batch = plan_batch(micro, accum, wanted, replicas)
        except UsageError as error:
            unit = (micro or 1) * (accum or 1) * replicas
            assert wanted != unit and (wanted % unit or (micro and accum))
            offered = re.search(r"Use (.+)\.$", str(error))[1].split(" or ")
            assert [plan_batch(micro, accum, int(value), replicas).global_batch for value in offered] == [
                int(value) for value in offered
            ]
        else:
            assert batch.micro_batch * batch.accum * replicas == wanted == batch.global_batch
            assert micro in (None, batch.micro_batch) and accum in (None, batch.accum)


NUMBERS = [f for f in dataclasses.fields(Config) if re.search(r"int|float", str(f.type))]


@pytest.mark.parametrize("flag", ["--" + f.name.replace("_", "-") for f in NUMBERS])
def test_no_number_may_be_negative_a_word_or_missing(flag):
    for argv in ([flag, "-1"], [flag, "many"], [flag, "nan"], [flag]):
        with pytest.raises(UsageError, match=flag):
            parse("ddp", argv)


@pytest.mark.parametrize(
    "flag, wrong, offered",
    [
        *(
            (flag, "0", "1")
            for flag in ("--micro-batch", "--accum", "--global-batch", "--steps", "--keep", "--log-every")
        ),
        *((flag, "-1", "0") for flag in ("--warmup", "--workers", "--save-every", "--val-every", "--sample-every")),
        *((flag, "-1", "0") for flag in ("--seed", "--lr", "--weight-decay", "--clip", "--noise-offset", "--flip")),
        *((flag, "nan", "0.5") for flag in ("--lr", "--ema", "--flip", "--noise-offset", "--snr-gamma")),
        ("--seed", str(2**63), "0"),
        ("--clip", "inf", "1.0"),
        ("--caption-dropout", "1.1", "1"),
        ("--ema", "1", "0.9999"),
        ("--adam-beta2", "1", "0.999"),
        ("--snr-gamma", "0", "5"),
        ("--timeout", "0", "600"),
        ("--timeout", "inf", "600.0"),
        ("--time-limit", "0", "60"),
        ("--resolution", "100", "96"),
        ("--resolution", "0", "8"),
        ("--preset", "sd3", "sdxl"),
        ("--precision", "fp8", "bf16"),
        ("--lr-schedule", "step", "cosine"),
        ("--resume", " ", "latest"),
        ("--out", "", "runs/mine"),
    ],
)
def test_the_value_that_a_refusal_offers_is_accepted(flag, wrong, offered):
    with pytest.raises(UsageError) as error:
        parse("ddp", [flag, wrong])
    assert flag in str(error.value) and re.search(rf"(?<![\w.]){re.escape(offered)}(?![\w])", str(error.value))
    parse("ddp", [flag, offered])


@pytest.mark.parametrize("argv", [["--step", "5"], ["pictures"], ["--no-such"], ["--flip=0.5", "--compile=yes"]])
def test_what_is_not_a_flag_is_one_error_that_points_to_help(argv, capsys):
    with pytest.raises(UsageError, match="--help"):
        parse("ddp", argv)
    assert capsys.readouterr() == ("", "")  # printed by the script, once


def test_the_rate_is_the_same_for_every_world_size_and_accumulation():
    config = dataclasses.replace(Config(), lr=1.0, lr_schedule="cosine", warmup=4, steps=20)
    alone = [learning_rate(k, config, 1) for k in range(21)]
    assert alone[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert alone[12] == pytest.approx(0.5) and 0 < alone[19] < 0.01 and alone[20] == pytest.approx(0)
    for replicas, accum in itertools.product([2, 4, 8], [1, 3]):
        split = dataclasses.replace(config, accum=accum)
        assert [learning_rate(k, split, replicas) for k in range(21)] == alone


def test_a_trial_of_a_few_steps_is_not_all_warm_up():
    assert [with_recipe(parse("ddp", ["--steps", n])).warmup for n in ("5", "50", "600")] == [0, 5, 50]
    assert with_recipe(parse("ddp", ["--steps", "5", "--warmup", "5"])).warmup == 5


def other_value(name):
    """Some other value for a flag, legal or not: `changed_flags` looks only at whether it changed."""
    value = getattr(with_recipe(Config()), name)
    return not value if isinstance(value, bool) else "other" if value is None or isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Config)])
def test_a_changed_flag_is_neutral_named_or_refused(name):
    before, config = with_recipe(Config()), dataclasses.replace(with_recipe(Config()), **{name: other_value(name)})
    flag = "--" + name.replace("_", "-")
    if name in BOUND:
        with pytest.raises(UsageError, match=f"{flag} .*another --out"):
            changed_flags(dataclasses.asdict(before), config)
        return
    changed = changed_flags(dataclasses.asdict(before), config)
    assert changed == ([] if name in NEUTRAL else [f"{flag} {getattr(config, name)} (was {getattr(before, name)})"])


def test_a_switch_that_cannot_change_is_answered_with_what_to_type():
    plain = with_recipe(Config())
    zero = dataclasses.replace(plain, zero_snr=True)
    with pytest.raises(UsageError, match="leave out --zero-snr"):
        changed_flags(dataclasses.asdict(plain), zero)
    with pytest.raises(UsageError, match="add --zero-snr"):
        changed_flags(dataclasses.asdict(zero), plain)


def test_a_flag_that_an_older_checkpoint_did_not_know_is_no_change():
    before = dataclasses.asdict(with_recipe(Config()))
    del before["flip"]
    assert changed_flags(before, dataclasses.replace(with_recipe(Config()), flip=0.5)) == []
