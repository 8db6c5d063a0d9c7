"""The flattened UNet and VAE encoder are the models they came from, wherever they are cut."""

import ast
from pathlib import Path

import pytest
import torch

from common import units
from common.errors import UsageError
from common.units import (
    Carry,
    add_gradients,
    arrive,
    as_leaves,
    backward,
    fake_mode,
    fake_model,
    gradients,
    probe,
    returning,
    run_units,
    signature,
    unet_carry,
    unet_units,
    vae_encoder_units,
    wire,
)
from tests.pipeline_models import SMALL, TRUE, small_unet, small_vae, unet_inputs

SIZES = {"even": (16, 16), "oblong": (16, 24), "odd": (15, 17), "half odd": (20, 12)}


def grads_of(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] is None) == (value is None), name
        assert value is None or torch.equal(ours[name], value), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SMALL)
def test_units_in_order_are_the_unet_to_the_last_bit(name, size):
    unet, inputs = small_unet(name), unet_inputs(SMALL[name], 2, *SIZES[size])
    expected = unet(**inputs).sample
    expected.square().mean().backward()
    theirs = grads_of(unet)
    found = run_units(unet_units(unet), unet_carry(**inputs)).sample
    found.square().mean().backward()
    assert torch.equal(found, expected)
    assert_same(grads_of(unet), theirs)


@pytest.mark.parametrize("name", ["sdxl", "tiny"])
def test_masked_tokens_are_masked_in_units_too(name):
    unet, inputs = small_unet(name), unet_inputs(SMALL[name], 2, 16, 16)
    inputs["encoder_attention_mask"] = (torch.arange(9) < 5).long().expand(2, 9)
    assert torch.equal(run_units(unet_units(unet), unet_carry(**inputs)).sample, unet(**inputs).sample)


def test_recomputing_units_changes_no_gradient():
    unet, inputs = small_unet("sdxl", dropout=0.1), unet_inputs(SMALL["sdxl"], 1, 15, 17)
    losses, grads = [], []
    for recompute in (False, True):
        torch.manual_seed(3)
        loss = run_units(unet_units(unet), unet_carry(**inputs), recompute).sample.square().mean()
        loss.backward()
        losses.append(loss.item())
        grads.append(grads_of(unet))
    assert losses[0] == losses[1]
    assert_same(*grads)


@pytest.mark.parametrize("changes", [{}, {"mid_block_add_attention": False}, {"use_quant_conv": False}])
def test_vae_units_in_order_are_the_encoder(changes):
    vae = small_vae(**changes).eval()
    for height, width in ((32, 32), (40, 24), (31, 45)):
        pixels = torch.randn(2, 3, height, width)
        with torch.no_grad():
            assert torch.equal(run_units(vae_encoder_units(vae), Carry(sample=pixels)).sample, vae._encode(pixels))


@pytest.mark.parametrize("name, count", [("sd15", 46), ("sd21", 46), ("sdxl", 93), ("tiny", 16)])
def test_units_own_every_parameter_once(name, count):
    with torch.device("meta"):
        unet = units.UNet2DConditionModel(**TRUE[name])
    flat = unet_units(unet)
    owned = [parameter for unit in flat for parameter in unit.parameters()]
    assert len(flat) == count
    assert sorted(owned) == sorted(unet.state_dict())
    vae = small_vae()
    owned = [parameter for unit in vae_encoder_units(vae) for parameter in unit.parameters()]
    assert sorted(owned) == sorted(k for k in vae.state_dict() if k.startswith(("encoder.", "quant_conv.")))


def test_every_skip_is_pushed_once_and_popped_once_in_reverse_order():
    flat = unet_units(small_unet("sdxl"))
    pushed = [unit.name for unit in flat if unit.pushes]
    popped = [unit.pops for unit in flat if unit.pops]
    assert popped == pushed[::-1]
    assert len(pushed) == 9


# ── the fold, in one process ─────────────────────────────────────────────────────────────────────────────────────────


def run_folded(flat, carry, down_cuts, up_cuts, target):
    """Forward and backward of one micro-batch over P stages, with only the wire between them; returns the loss.

    Stage r runs down units [d[r], d[r+1]) and up units [u[r+1], u[r]); the last stage turns at d[P].
    """
    templates, stages = probe(flat, carry), len(down_cuts) + 1
    turn = (([0] + down_cuts)[-1] + ([len(flat)] + up_cuts)[-1]) // 2
    d, u = [0, *down_cuts, turn], [len(flat), *up_cuts, turn]
    down_in, down_out, up_in, up_out = [{} for _ in range(4)]
    message = None
    for r in range(stages):
        down_in[r] = as_leaves(carry if r == 0 else arrive(templates[d[r]], message))
        down_out[r] = run_units(flat[d[r] : d[r + 1]], down_in[r])
        message = wire(down_out[r], "down")
    for r in reversed(range(stages)):
        up_in[r] = as_leaves(arrive(templates[u[r + 1]], message, kept=down_out[r]))
        up_out[r] = run_units(flat[u[r + 1] : u[r]], up_in[r])
        message = wire(up_out[r], "up")
    up_out[0].sample.retain_grad()
    loss = (up_out[0].sample - target).square().mean()
    loss.backward()
    home = {}
    grads = None
    for r in range(stages):
        if r > 0:
            backward(up_out[r], grads)
        home[r] = gradients(up_in[r])
        grads = {n: g for n, g in home[r].items() if n in ("sample", "residual")}
    for r in reversed(range(stages)):
        kept = {n: g for n, g in home[r].items() if n not in ("sample", "residual")}
        backward(down_out[r], add_gradients(grads, kept))
        grads = gradients(down_in[r])
        assert set(grads) <= set(returning(down_in[r], "down"))
    return loss.detach()


@pytest.mark.parametrize("name, down_cuts", [("sdxl", [4, 12, 17]), ("sdxl", [6]), ("tiny", [2, 4, 6])])
def test_a_folded_unet_has_the_gradients_of_the_whole(name, down_cuts):
    unet = small_unet(name, **({"transformer_layers_per_block": (1, 2, 5)} if name == "sdxl" else {}))
    # Odd sizes: upsamplers need the size of skips that live on other stages.
    flat, inputs, target = unet_units(unet), unet_inputs(SMALL[name], 2, 15, 17), torch.randn(2, 4, 15, 17)
    loss = (unet(**inputs).sample - target).square().mean()
    loss.backward()
    whole = grads_of(unet)
    folded = run_folded(flat, unet_carry(**inputs), down_cuts, mirrored(flat, down_cuts), target)
    assert torch.equal(folded, loss.detach())
    for parameter, grad in grads_of(unet).items():
        torch.testing.assert_close(grad, whole[parameter], rtol=1e-5, atol=1e-7, msg=parameter)


def mirrored(flat, down_cuts):
    """Up cuts for down cuts: as many skips still to pop above each cut as were pushed below it."""
    cuts = [len(flat)]
    for cut in down_cuts:
        below = sum(unit.pushes for unit in flat[:cut])
        fitting = [q for q in range(cuts[-1]) if sum(unit.pops is not None for unit in flat[q:]) == below]
        cuts.append(fitting[-1])
    return cuts[1:]


# ── the wire ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cut_inside_a_stack_carries_its_residual_and_the_way_up_carries_no_text():
    unet = small_unet("sdxl")
    templates = probe(unet_units(unet), unet_carry(**unet_inputs(SMALL["sdxl"], 2, 16, 24)))
    names = [unit.name for unit in unet_units(unet)]
    inside = templates[names.index("up_blocks.0.attentions.1.tb1")]
    assert signature(inside, "up") == {
        "sample": ((2, 4 * 6, 128), torch.float32),
        "residual": ((2, 128, 4, 6), torch.float32),
    }
    assert set(signature(inside, "down")) == {"sample", "residual", "emb", "encoder_hidden_states"}
    between = templates[names.index("up_blocks.0.resnets.1")]
    assert list(signature(between, "up")) == ["sample"]


def test_the_probe_tells_the_dtypes_that_autocast_will_send():
    config = SMALL["tiny"]
    unet = small_unet("tiny")
    mode = fake_mode()
    fake = fake_model(units.UNet2DConditionModel, config, mode)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with mode:
            told = probe(unet_units(fake), unet_carry(**unet_inputs(config, 1, 16, 16)))
        carry, seen = unet_carry(**unet_inputs(config, 1, 16, 16)), []
        for unit in unet_units(unet):
            carry = unit(carry)
            seen.append(carry)
    for template, true in zip(told[1:], seen, strict=True):
        assert {n: (t.shape, t.dtype) for n, t in template.tensors().items()} == {
            n: (t.shape, t.dtype) for n, t in true.tensors().items()
        }


# ── what cannot be cut ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_class_embeds": 4}, "class embeddings"),
        ({"attention_type": "gated"}, "GLIGEN"),
        ({"dual_cross_attention": True}, "dual attention"),
        ({"encoder_hid_dim": 8}, "encoder_hid_proj"),
        ({"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, "UNetMidBlock2DSimpleCrossAttn"),
        ({"down_block_types": ("AttnDownBlock2D",) * 3 + ("DownBlock2D",)}, "AttnDownBlock2D"),
    ],
)
def test_what_cannot_be_flattened_is_refused_by_name(changes, named):
    with pytest.raises(UsageError, match=named):
        unet_units(small_unet("sd15", **changes))


def test_freeu_block_checkpointing_and_controlnet_are_refused_by_name():
    unet = small_unet("sd15")
    unet.enable_freeu(0.9, 0.2, 1.2, 1.4)
    with pytest.raises(UsageError, match="FreeU"):
        unet_units(unet)
    unet = small_unet("sd15")
    unet.enable_gradient_checkpointing()
    with pytest.raises(UsageError, match="gradient checkpointing"):
        unet_units(unet)
    inputs = unet_inputs(SMALL["sd15"], 1, 16, 16)
    with pytest.raises(UsageError, match="down_block_additional_residuals"):
        unet_carry(**inputs, down_block_additional_residuals=(torch.zeros(1),))
    vae = small_vae()
    vae.enable_tiling()
    with pytest.raises(UsageError, match="tiling"):
        vae_encoder_units(vae)


def test_common_never_names_torch_distributed():
    for path in Path(units.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "distributed" not in ast.unparse(node), path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("distributed", "dist"), path
