"""The cut: its figures for the true models, and what must hold for any."""

import random

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from common.cut import (
    GIB,
    MIB,
    Memory,
    UnitCost,
    count,
    encoder_cut,
    fold,
    forward_bytes,
    imbalance,
    mirror_pairs,
    most_stages,
    place_encoders,
    plan,
    schedule_costs,
    table,
    timed,
)
from common.errors import UsageError
from common.schedule import build, check, utilisation
from common.units import Carry, fake_mode, fake_model, unet_carry, unet_units, vae_encoder_units
from tests.pipeline_models import TRUE, VAE

_counted = {}


def counted(name, side):
    """Costs of the true model for one sample in bfloat16, 77 tokens; counted once for all tests."""
    if (name, side) not in _counted:
        mode, half = fake_mode(), torch.bfloat16
        unet = fake_model(UNet2DConditionModel, TRUE[name], mode, dtype=half)
        with mode:
            added = {"text_embeds": torch.empty(1, 1280, dtype=half), "time_ids": torch.empty(1, 6, dtype=half)}
            carry = unet_carry(
                torch.empty(1, 4, side, side, dtype=half),
                torch.tensor([1]),
                torch.empty(1, 77, TRUE[name]["cross_attention_dim"], dtype=half),
                added_cond_kwargs=added if name == "sdxl" else None,
            )
            _counted[name, side] = count(unet_units(unet), carry)
    return _counted[name, side]


def counted_vae():
    mode, half = fake_mode(), torch.bfloat16
    vae = fake_model(AutoencoderKL, VAE, mode, dtype=half)
    with mode, torch.no_grad():
        return count(vae_encoder_units(vae), Carry(sample=torch.empty(1, 3, 1024, 1024, dtype=half)), backward=False)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sdxl_counts():
    costs = counted("sdxl", 128)
    assert sum(c.forward for c in costs) == pytest.approx(6.76e12, rel=1e-3)
    assert sum(c.total for c in costs) == pytest.approx(20.23e12, rel=1e-3)
    assert sum(c.parameters for c in costs) == 2_567_463_684


@pytest.mark.parametrize(
    "name, side, stages, worst, mib",
    [
        ("sdxl", 128, 2, 1.006, 3.75),
        ("sdxl", 128, 4, 1.007, 18.75),
        ("sdxl", 128, 8, 1.034, 43.75),
        ("sd21", 64, 2, 1.012, 1.875),
        ("sd21", 64, 4, 1.062, 7.8125),
        ("sd21", 64, 8, 1.099, 25.0),
    ],
)
def test_balance_and_bytes(name, side, stages, worst, mib):
    rows = plan(counted(name, side), fold(counted(name, side), stages))
    everything, activations = forward_bytes(rows)
    assert imbalance(rows) <= worst
    assert activations == mib * MIB
    # Residuals of cut stacks, the embedding and the text come on top.
    assert activations < everything < activations + stages * 2.5 * MIB


def test_good_cuts_of_sdxl():
    costs = counted("sdxl", 128)
    cut = fold(costs, 4)
    assert [costs[d - 1].name for d in cut.down[1:-1]] == [
        "down_blocks.1.attentions.0.tb1",
        "down_blocks.1.downsamplers.0",
        "down_blocks.2.attentions.0.tb9",
    ]
    assert [costs[u].name for u in cut.up[1:-1]] == [
        "up_blocks.1.attentions.0.tb0",
        "up_blocks.0.attentions.1.tb4",
        "up_blocks.0.attentions.0.tb1",
    ]


@pytest.mark.parametrize("name, side, most", [("sdxl", 128, 39), ("sd21", 64, 19), ("tiny", 8, 6)])
def test_too_many_stages_are_refused_with_the_largest_number(name, side, most):
    costs = counted(name, side)
    assert most_stages(costs) == most
    assert fold(costs, most).stages == most
    for stages in (0, most + 1):
        with pytest.raises(UsageError, match=f"--stages {stages}: .* 1 to {most} stages"):
            fold(costs, stages)


def test_the_vae_encoder_is_cut_from_the_last_rank_to_the_first():
    costs = counted_vae()
    assert sum(c.forward for c in costs) == pytest.approx(4.88e12, rel=1e-3)
    cut = encoder_cut(costs, 4)
    assert [i for chunk in cut[::-1] for i in chunk] == list(range(16))
    shares = [sum(costs[i].forward for i in chunk) for chunk in cut]
    assert max(shares) <= 1.3 * sum(shares) / 4
    # Never where the feature maps still have the pictures' full size: 256 MiB a sample.
    assert all(costs[chunk[0]].sample <= 64 * MIB for chunk in cut)
    # A rank with a text encoder gets less of it; more ranks than units leave some without.
    loaded = encoder_cut(costs, 4, extra=[0, 0, 0, 1e12])
    assert sum(costs[i].forward for i in loaded[3]) < shares[3]
    assert sum(len(chunk) for chunk in encoder_cut(costs, 20)) == 16


def test_text_encoders_go_where_there_is_time_and_then_where_there_is_room():
    vae = [UnitCost("u", 1.0, 0, 0)] * 8

    def places(text, load, used, slack=0.0):
        return place_encoders(vae, [cost for cost, _ in text], [size for _, size in text], load, used, 0.0, slack)

    units, at = places([(4.0, 1)], [0.0] * 3, [0, 0, 0])
    assert [len(part) for part in units] == [4 * (stage != at[0]) for stage in range(3)]
    assert places([(4.0, 1)], [9.0, 0.0, 9.0], [0, 5, 0])[1] == [1]  # there is time on one rank only
    assert places([(0.0, 1), (0.0, 5)], [0.0] * 4, [10, 20, 7, 8])[1] == [3, 2]  # time everywhere: where it is emptiest
    assert places([(1.0, 9)], [0.0, 0.1, 0.0], [5, 0, 5], slack=0.5)[1] == [1]  # a little time for much memory


def test_encoders_count_when_a_stage_is_balanced_and_filled():
    costs = counted("sdxl", 128)
    whole, memory = sum(c.total for c in costs), Memory(16, micro_batch=2)
    extra = [0.0, 0.1 * whole, 0.0, 0.05 * whole]
    work = [row.cost_share * whole + e for row, e in zip(plan(costs, fold(costs, 4, extra=extra)), extra, strict=True)]
    assert max(work) / (sum(work) / 4) < 1.03
    free = fold(costs, 4, memory)
    limit = max(row.memory for row in plan(costs, free, memory))
    taken = [limit / 5, 0.0, 0.0, limit / 5]
    rows = plan(costs, fold(costs, 4, memory, limit, taken=taken), memory)
    tight = [row.memory + t for row, t in zip(rows, taken, strict=True)]
    assert max(tight) <= limit
    with pytest.raises(UsageError, match="no fold into 4 stages fits"):
        fold(costs, 4, memory, limit, taken=[0.0, limit, 0.0, 0.0])


def test_the_plan_is_printed():
    costs = counted("sdxl", 128)
    rows = plan(costs, fold(costs, 2), Memory(16), [range(6, 16), range(6)], {"text_encoder": 0, "text_encoder_2": 0})
    lines = table(rows).splitlines()
    assert "parameters" in lines[0] and "skips" in lines[0] and "memory" in lines[0]
    assert "conv_in … down_blocks.1.downsamplers.0 | up_blocks.0.attentions.1.tb4 … conv_out" in lines[1]
    assert "10 VAE units, text_encoder, text_encoder_2" in lines[2]
    assert "slowest over mean 1.005" in lines[-1] and "3.75 of it activations" in lines[-1]


def test_memory_is_a_limit():
    costs = counted("sdxl", 128)
    memory = Memory(16, micro_batch=2)
    free = plan(costs, fold(costs, 4, memory), memory)
    tight = max(row.memory for row in free) - GIB
    bound = plan(costs, fold(costs, 4, memory, tight), memory)
    assert max(row.memory for row in bound) <= tight
    assert imbalance(bound) >= imbalance(free)
    with pytest.raises(UsageError, match=r"no fold into 4 stages fits 5.0 GiB a rank: the best needs \d+.\d GiB"):
        fold(costs, 4, memory, 5 * GIB)
    less = plan(costs, fold(costs, 4, memory), Memory(16, micro_batch=2, recompute=True))
    assert all(r.memory < f.memory for r, f in zip(less, free, strict=True))


def test_measured_times_replace_counts():
    costs = counted("tiny", 8)
    slow_end = timed(costs, [(1.0, 1.0, 1.0)] * 15 + [(9.0, 9.0, 9.0)])
    cut, even = fold(slow_end, 2), fold(timed(costs, [(1.0, 1.0, 1.0)] * 16), 2)
    assert len(cut.chunks(0)[0]) + len(cut.chunks(0)[1]) < len(even.chunks(0)[0]) + len(even.chunks(0)[1])


def test_schedules_of_true_costs_are_sound():
    costs = counted("sdxl", 128)
    for kind, least in (("1f1b", 0.74), ("zero-bubble", 0.85)):
        made = build(kind, 4, 8, schedule_costs(costs, fold(costs, 4)), room=1.0)
        check(made)
        assert utilisation(made) > least
    # More memory, fewer holes: the chunks of a rank are not alike.
    assert utilisation(build("zero-bubble", 4, 8, schedule_costs(costs, fold(costs, 4)), room=1.5)) > 0.92


# ── any model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_model(seed):
    """Levels of units with a skip each, mirrored, of random lengths and costs."""
    rng = random.Random(seed)

    def unit(name, **flags):
        f, b, w = (rng.uniform(0.1, 3) for _ in range(3))
        sizes = {key: rng.randrange(1, 1000) for key in ("saved", "down_wire", "up_wire", "sample")}
        return UnitCost(name, f, b, w, rng.randrange(10**6), output=10, **sizes, **flags)

    levels = rng.randrange(2, 6)
    down = [unit("d", pushes=i == 0) for _ in range(levels) for i in range(rng.randrange(1, 4))]
    # Within a level the unit that makes the skip comes last, the one that takes it first.
    down = [unit("conv_in", pushes=True)] + down
    up = [unit("u", pops=i == 0) for _ in range(levels + 1) for i in range(rng.randrange(1, 4))]
    return down + [unit("mid") for _ in range(rng.randrange(1, 5))] + up


@pytest.mark.parametrize("seed", range(12))
def test_any_model_folds_into_any_possible_number_of_stages(seed):
    costs = random_model(seed)
    for stages in range(1, most_stages(costs) + 1):
        cut = fold(costs, stages)
        rows = plan(costs, cut)
        order = [i for r in range(stages) for i in cut.chunks(r)[0]]
        order += [i for r in reversed(range(stages)) for i in cut.chunks(r)[1]]
        assert order == list(range(len(costs)))
        for r in range(stages):
            down, up = cut.chunks(r)
            assert len(down) and len(up)
            if r < stages - 1:
                # Skips never travel: what a rank's down chunk makes, its up chunk takes.
                assert sum(costs[i].pushes for i in down) == sum(costs[i].pops for i in up) == rows[r].skips
        assert sum(row.parameters for row in rows) == sum(c.parameters for c in costs)
        assert sum(row.cost_share for row in rows) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_fold_into_two_or_three_is_better(seed):
    costs = random_model(seed)
    pairs = mirror_pairs(costs)
    whole = sum(c.total for c in costs)

    def slowest(cuts):
        edges = [(0, len(costs)), *cuts]
        inner = sum(c.total for c in costs[edges[-1][0] : edges[-1][1]])
        outer = [
            sum(c.total for c in costs[d:d2]) + sum(c.total for c in costs[u2:u])
            for (d, u), (d2, u2) in zip(edges, edges[1:], strict=False)
        ]
        return max([inner, *outer])

    ways = {2: [[p] for p in pairs], 3: [[p, q] for p in pairs for q in pairs if p[0] < q[0] and p[1] > q[1]]}
    for stages, cuts in ways.items():
        found = imbalance(plan(costs, fold(costs, stages, slack=0)))
        assert found == pytest.approx(min(slowest(c) for c in cuts) * stages / whole)
