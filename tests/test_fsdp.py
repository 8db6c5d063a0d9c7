"""Sharding on real ranks: the curve and the weights of `ddp_train.py`, the collectives of the plan, shared checkpoints."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import models, plan, shards
from common.config import Config, batch_of, parse, with_recipe
from common.errors import UsageError
from tests.launch import assert_goes_on, assert_same_curve, ranks_of, rows, weights
from tests.runs import RUNS, flags_of

CURVES = [
    (r, name) for (script, r), runs in RUNS.items() if script == "fsdp" for name, flags in runs if "--clip" in flags
]


@pytest.fixture(scope="module")
def reference(many):
    """The other script, in one process."""
    return many("ddp", 0, "held")


@pytest.mark.parametrize("ranks, name", CURVES)
def test_every_way_to_shard_follows_the_curve_of_the_whole_network(reference, many, ranks, name):
    run = many("fsdp", ranks, name)
    assert_same_curve(reference, run)
    raw, other = weights(reference, "unet_raw"), weights(run, "unet_raw")
    for n in raw:
        assert (raw[n] - other[n]).abs().max() <= 1e-5 * raw[n].abs().max() + 1e-9, n
    (one,), (two,) = ([r["val_loss"] for r in rows(folder) if "val_loss" in r] for folder in (reference, run))
    assert two == pytest.approx(one, rel=1e-5)
    assert all(rank["same_memory"] for rank in ranks_of(run))


def test_a_rank_holds_its_rows_and_no_more(many):
    total = models.parameter_count(models.spec_of(Config()))
    for ranks, name, copies in ((2, "plain", 1), (3, "uneven", 1), (4, "hybrid", 2)):
        held = [rank["held"] for rank in ranks_of(many("fsdp", ranks, name))]
        assert sum(held) == copies * total
        assert max(held) < 1.1 * copies * total / ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_weights_of_a_seed_are_the_same_bits_on_any_number_of_ranks(many, ranks):
    """A step with rate 0 exports what the run began with."""
    whole = models.build_unet(models.spec_of(Config()), 0, torch.device("cpu")).state_dict()
    for name, tensor in weights(many("fsdp", ranks, "still")).items():
        assert torch.equal(tensor, whole[name]), name


# ── The plan and what is really sent ─────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "ranks, name", [(2, "plain"), (2, "accumulated"), (2, "no-reshard"), (3, "uneven"), (4, "hybrid"), (4, "full")]
)
def test_a_step_issues_the_collectives_of_the_plan(many, ranks, name):
    config = with_recipe(parse("fsdp", flags_of("fsdp", ranks, name)))
    config = type(config)(**{**vars(config), "precision": "fp32"})
    groups = shards.groups_of_spec(models.spec_of(config))
    wanted: dict[str, list[int]] = {}
    for c in plan.fsdp_collectives(groups, config, ranks, batch_of(config, ranks).accum):
        count, message = wanted.get(c.kind, [0, 0])
        wanted[c.kind] = [count + c.count, message + c.message]
    wanted["all-reduce"] = [a + b for a, b in zip(wanted.get("all-reduce", [0, 0]), [1, 8], strict=True)]  # the norm
    for rank in ranks_of(many("fsdp", ranks, name)):
        found: dict[str, list[int]] = {}
        for at, kind, size in rank["issued"]:
            if at == "step 3":  # the held-out loss came after step 2
                count, message = found.get(kind, [0, 0])
                found[kind] = [count + 1, message + size]
        assert found == wanted


def test_saving_gathers_no_tensor(many):
    """Steps that save and steps that do not issue the same collectives; only the export gathers whole tensors."""
    for rank in ranks_of(many("fsdp", 2, "straight")):
        assert {at for at, kind, _ in rank["issued"] if kind == "full-tensor"} == {"export"}
        issued = [[(kind, size) for at, kind, size in rank["issued"] if at == f"step {n}"] for n in range(1, 6)]
        assert issued[1] == issued[2] == issued[3]  # a checkpoint followed step 3


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_resumed_run_ends_with_the_same_bits(many):
    straight, resumed = many("fsdp", 2, "straight"), many("fsdp", 2, "resumed")
    for part in ("unet", "unet_raw"):
        one, other = weights(straight, part), weights(resumed, part)
        assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(
    "name, script, ranks", [("after-2", "fsdp", 2), ("after-ddp", "ddp", 2), ("after-pipeline", "pipeline", 3)]
)
def test_three_ranks_go_on_from_a_checkpoint_of_two_and_of_the_other_scripts(many, name, script, ranks):
    assert_goes_on(many(script, ranks, "straight"), many("fsdp", 3, name))


def test_a_model_folder_is_read_shard_by_shard_and_trains_as_the_whole(many):
    """SDXL's structure, two text encoders, weights from safetensors."""
    assert_same_curve(many("ddp", 0, "thin-sdxl"), many("fsdp", 2, "thin-sdxl"))


def test_half_precision_stays_near_and_the_masters_stay_float32(reference, many):
    run = many("fsdp", 2, "bf16")
    assert rows(run)[0]["loss"] == pytest.approx(rows(reference)[0]["loss"], rel=0.02)
    assert {t.dtype for t in weights(run).values()} == {torch.float32}


# ── Timesteps and sizes ──────────────────────────────────────────────────────────────────────────────────────────────
def test_timesteps_and_sizes_reach_their_sinusoids_unrounded():
    """In bf16, 998.39 would be 1000 and 1367 would be 1368; FSDP rounds float inputs unless it is told not to."""
    import fsdp_train

    seen: dict[str, torch.Tensor] = {}
    unet = models.empty_unet(models.spec_of(Config(preset="sdxl")))
    small = dict(block_out_channels=(32, 64), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                 up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=1,
                 attention_head_dim=(2, 4), cross_attention_dim=32, layers_per_block=1, norm_num_groups=8)  # fmt: skip
    unet = type(unet).from_config({**unet.config, **small})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        how = dict(mesh=mesh, mp_policy=fsdp_train.mixed_precision(torch.bfloat16))
        for module in shards.groups_of(unet):
            fully_shard(module, **how)
        fully_shard(unet, **how)
        for name in ("time_proj", "add_time_proj"):
            getattr(unet, name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        sizes = torch.tensor([[1367.0, 1025.0, 0.0, 0.0, 1024.0, 1024.0]])
        condition = {"text_embeds": torch.zeros(1, 1280), "time_ids": sizes}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            try:
                unet(
                    torch.zeros(1, 4, 8, 8), torch.tensor([998.39]), torch.zeros(1, 77, 32), added_cond_kwargs=condition
                )
            except RuntimeError as error:  # norms on a CPU do not mix types; the sinusoids come before
                assert "mixed dtype" in str(error)
        assert torch.equal(seen["time_proj"], torch.tensor([998.39]))
        assert torch.equal(seen["add_time_proj"], sizes.flatten())
        default = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        assert default.cast_forward_inputs and not fsdp_train.mixed_precision(torch.bfloat16).cast_forward_inputs
    finally:
        dist.destroy_process_group()


# ── Arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rows_are_cut_as_torch_cuts_them():
    for count in range(1, 40):
        whole = torch.arange(count)
        for size in range(1, 12):
            parts = [shards.shard_of(whole, rank, size) for rank in range(size)]
            assert torch.equal(torch.cat(parts), whole)
            chunks = torch.chunk(whole, size)
            assert [p.tolist() for p in parts if len(p)] == [c.tolist() for c in chunks]


@pytest.mark.parametrize("preset", ["tiny", "sd15", "sd21", "sdxl"])
def test_groups_hold_every_parameter_once_and_none_is_small(preset):
    spec = models.spec_of(Config(preset=preset))
    groups = shards.groups_of_spec(spec)
    assert sum(g.parameters for g in groups) == models.parameter_count(spec)
    assert [g.is_root for g in groups] == [True] + [False] * (len(groups) - 1)
    if preset == "sdxl":
        assert len(groups) == 1 + 17 + 11
        assert sum(g.parameters for g in groups if ".attentions." in g.name) > 0.8 * 2_567_463_684


def test_a_shard_size_that_does_not_divide_the_world_is_refused_with_those_that_do():
    for world in range(1, 33):
        for size in range(1, world + 2):
            if world % size == 0:
                shards.check_size(size, world)
            else:
                with pytest.raises(UsageError, match=f"does not divide {world} ranks: use 1"):
                    shards.check_size(size, world)


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_the_plan_is_the_table_of_the_docstring_but_for_padding(ranks):
    config = with_recipe(Config(preset="sdxl", precision="bf16"))
    groups, p = shards.groups_of_spec(models.spec_of(config)), 2_567_463_684
    forward, backward, reduce = plan.fsdp_collectives(groups, config, ranks, accum=1)
    root = groups[0].parameters
    for collective, table in ((forward, 2 * p), (backward, 2 * (p - root)), (reduce, 4 * p)):
        assert collective.sent == pytest.approx((ranks - 1) / ranks * table, rel=1e-3)
        assert collective.sent >= (ranks - 1) / ranks * table - 1
    ring = plan.ddp_collectives(p, config, ranks)[0]
    assert ring.sent == 2 * (ranks - 1) * 4 * p // ranks


def test_the_critical_micro_batch_is_the_one_of_the_book():
    """SDXL on many H200: 1.9 images for DDP at 319 GB/s, 1.6 for FSDP at 250 GB/s, with 400 TFLOP/s reached."""
    config = with_recipe(Config(preset="sdxl", precision="bf16"))
    groups = shards.groups_of_spec(models.spec_of(config))
    ddp = plan.ddp_collectives(2_567_463_684, config, 64)
    fsdp = plan.fsdp_collectives(groups, config, 64, accum=1)
    assert plan.critical_micro_batch(ddp, 20.23e12, 319e9, 400e12) == pytest.approx(1.9, abs=0.05)
    assert plan.critical_micro_batch(fsdp, 20.23e12, 250e9, 400e12) == pytest.approx(1.6, abs=0.1)
