"""Deferred weight gradients are the gradients autograd computes, only later."""

import pytest
import torch
from torch import nn

from common.deferred import WeightQueue, defer, undo_defer
from common.units import run_units, unet_carry, unet_units
from tests.pipeline_models import SMALL, small_unet, unet_inputs


def gradients_of_two_micro_batches(unet, name, precision, recompute, queue=None):
    """Two backwards onto the same `.grad`, odd sizes; with a queue, weights come after both."""
    unet.zero_grad(set_to_none=True)
    inputs, work = unet_inputs(SMALL[name], 2, 9, 6), []
    for micro in range(2):
        inputs["sample"] = inputs["sample"] + micro
        with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=precision is not None):
            out = run_units(unet_units(unet), unet_carry(**inputs), recompute).sample
        out.float().square().mean().backward()
        if queue:
            work.append(queue.take())
    missing = sum(p.grad is None for p in unet.parameters())
    for one in work:
        queue.flush(one)
    return {n: p.grad.clone() for n, p in unet.named_parameters()}, missing


@pytest.mark.parametrize(
    "name, precision, recompute",
    [
        ("tiny", None, True),
        ("tiny", torch.bfloat16, False),
        ("tiny", torch.float16, True),
        ("sdxl", None, False),
        ("sdxl", torch.bfloat16, True),
    ],
)
def test_deferred_gradients_are_equal_to_the_last_bit(name, precision, recompute):
    unet, queue = small_unet(name), WeightQueue()
    keys = list(unet.state_dict())
    expected, _ = gradients_of_two_micro_batches(unet, name, precision, recompute)
    deferred = defer(unet, queue)
    found, missing = gradients_of_two_micro_batches(unet, name, precision, recompute, queue)
    # Backward itself has left all Linear and Conv2d weights alone; only norms have their gradient by then.
    assert missing >= len(deferred) > 40
    assert list(unet.state_dict()) == keys
    assert not queue.pending
    for parameter, grad in expected.items():
        assert found[parameter].dtype == grad.dtype and torch.equal(found[parameter], grad), parameter


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(6, 4), (5, 6)),
        (nn.Linear(6, 4), (2, 3, 6)),
        (nn.Linear(6, 4, bias=False), (2, 3, 5, 6)),
        (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 9)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 7, 9)),
        (nn.Conv2d(4, 6, 1, bias=False), (2, 4, 7, 9)),
        (nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2), (1, 4, 9, 9)),
        (nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (1, 4, 9, 9)),
    ],
)
@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_every_form_of_layer(layer, shape, input_needs_gradient):
    torch.manual_seed(0)
    x = torch.randn(shape).requires_grad_(input_needs_gradient)

    def gradients():
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).square().sum().backward()
        queue.flush()
        return [x.grad] + [p.grad for p in layer.parameters()]

    queue = WeightQueue()
    expected = gradients()
    assert defer(layer, queue) == [""]
    found = gradients()
    assert (found[0] is None) == (not input_needs_gradient)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is None or (torch.equal(ours, theirs) and ours.stride() == theirs.stride())
    undo_defer(layer)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_strided_input_in_half_precision(precision, bias):
    """What SD2's proj_in gets: pictures laid out as tokens without a copy."""
    torch.manual_seed(0)
    layer, queue, results = nn.Linear(64, 64, bias=bias), WeightQueue(), []
    pictures = torch.randn(2, 64, 8, 8).requires_grad_()
    for _ in range(2):
        layer.zero_grad(set_to_none=True)
        pictures.grad = None
        with torch.autocast("cpu", dtype=precision):
            y = layer(pictures.permute(0, 2, 3, 1).flatten(1, 2))
        y.float().square().sum().backward()
        queue.flush()
        results.append([y, pictures.grad] + [p.grad for p in layer.parameters()])
        defer(layer, queue)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_layer_used_twice_gets_both_shares():
    layer, queue = nn.Linear(5, 5), WeightQueue()
    x = torch.randn(3, 5)
    layer(layer(x)).sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad(set_to_none=True)
    defer(layer, queue)
    layer(layer(x)).sum().backward()
    queue.flush()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_frozen_weights_and_evaluation_queue_nothing():
    layer, queue = nn.Linear(5, 5), WeightQueue()
    defer(layer, queue)
    layer.requires_grad_(False)
    layer(torch.randn(3, 5).requires_grad_()).sum().backward()
    layer.requires_grad_(True)
    with torch.no_grad():
        layer(torch.randn(3, 5))
    assert queue.pending == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_cast_weight_is_made_once_a_step_and_never_outlives_its_weight(optimizer):
    layer, queue = nn.Linear(3, 3), WeightQueue()
    fused = optimizer(layer.parameters(), lr=0.5, fused=True)  # which does not raise the version of what it changes
    first = queue.cast(layer.weight, torch.bfloat16)
    assert queue.cast(layer.weight, torch.bfloat16) is first
    layer.weight.grad = torch.ones_like(layer.weight)
    fused.step()
    queue.begin_step()
    assert torch.equal(queue.cast(layer.weight, torch.bfloat16), layer.weight.detach().bfloat16())
    assert not torch.equal(first, layer.weight.detach().bfloat16())


def test_the_compiler_takes_deferred_layers_without_a_break():
    torch.manual_seed(0)
    model, queue = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(4 * 4, 2)), WeightQueue()
    x = torch.randn(2, 3, 4, 4).requires_grad_()
    model(x).square().sum().backward()
    expected = [x.grad] + [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    x.grad = None
    defer(model, queue)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    assert len(queue.pending) == 2 and all(p.grad is None for p in model.parameters())
    queue.flush()
    for ours, theirs in zip([x.grad] + [p.grad for p in model.parameters()], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
