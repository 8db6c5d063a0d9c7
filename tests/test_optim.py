"""Clipping, skipping, loss scale and average, against torch's, NumPy's and diffusers' own."""

import dataclasses

import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import nn

from common.config import Config
from common.optim import EMA, LossScale, apply_step, build_optimizer, clip_factor, optimizer_tensors

ZERO, ONE = torch.tensor(0.0), torch.tensor(1.0)


def network(optimizer="adamw"):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    config = dataclasses.replace(Config(), lr=0.1, optimizer=optimizer)
    return net, build_optimizer(net.named_parameters(), config)


def give_gradient(net, seed=1):
    for i, p in enumerate(net.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + i))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_step_that_found_inf_changes_nothing(kind):
    net, optimizer = network(kind)
    give_gradient(net)
    apply_step(optimizer, 0.1, ONE, ZERO)
    before = [p.clone() for p in net.parameters()] + [
        t.clone() for t in optimizer_tensors(optimizer, net.named_parameters()).values()
    ]
    give_gradient(net)
    net.weight.grad[0, 0] = float("nan")
    apply_step(optimizer, 0.1, ONE, ONE)
    after = [*net.parameters(), *optimizer_tensors(optimizer, net.named_parameters()).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert net.weight.grad is None


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("largest", [0.1, 100.0])
def test_the_gradient_is_divided_and_clipped_as_torch_does(kind, largest):
    ours, optimizer = network(kind)
    theirs, plain = network(kind)
    give_gradient(ours)
    give_gradient(theirs)
    scale = torch.tensor(8.0)
    for p in ours.parameters():
        p.grad *= scale
    norm = nn.utils.get_total_norm([p.grad for p in ours.parameters()]) / scale
    apply_step(optimizer, 0.1, scale / clip_factor(norm, largest), ZERO)
    assert nn.utils.clip_grad_norm_(theirs.parameters(), largest).item() == pytest.approx(norm.item())
    plain.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_the_loss_scale_halves_at_once_and_doubles_after_1000_good_steps():
    scale = LossScale(True, torch.device("cpu"))
    scale.update(ONE)
    assert scale.scale == 2**15
    for _ in range(999):
        scale.update(ZERO)
    assert scale.scale == 2**15
    scale.update(ZERO)
    assert scale.scale == 2**16
    other = LossScale(True, torch.device("cpu"))
    other.load_state_dict({k: v.item() for k, v in scale.state_dict().items()})
    assert other.scale == scale.scale and other.good_steps == scale.good_steps


def test_the_average_is_numpys_and_diffusers():
    net, _ = network()
    ours, theirs = EMA(net.named_parameters(), 0.9), EMAModel(net.parameters(), decay=0.9)
    expected = None
    for n in range(30):
        with torch.no_grad():
            net.weight.add_(torch.randn(3, 5, generator=torch.Generator().manual_seed(n)))
        ours.update()
        theirs.step(net.parameters())
        d = 0.0 if n == 0 else min(0.9, (1 + n) / (10 + n))
        w = net.weight.detach().numpy().astype(np.float64)
        expected = w if expected is None else d * expected + (1 - d) * w
    np.testing.assert_allclose(ours.average["weight"].numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(theirs.shadow_params[0].numpy(), expected, atol=1e-6)


def test_swapping_the_average_in_gives_the_weights_back_bit_for_bit():
    net, _ = network()
    ema = EMA(net.named_parameters(), 0.9)
    with torch.no_grad():
        net.weight.mul_(1.1)
    before, average = net.weight.clone(), ema.average["weight"].clone()
    with ema.swapped_in():
        assert torch.equal(net.weight, average)
    assert torch.equal(net.weight, before) and torch.equal(ema.average["weight"], average)


def test_the_state_of_a_fresh_optimizer_is_really_restored():
    net, optimizer = network()
    for seed in range(3):
        give_gradient(net, seed)
        apply_step(optimizer, 0.1, ONE, ZERO)
    saved = {n: t.clone() for n, t in optimizer_tensors(optimizer, net.named_parameters()).items()}
    fresh, other = network()
    fresh.load_state_dict(net.state_dict())
    for name, tensor in optimizer_tensors(other, fresh.named_parameters()).items():
        tensor.copy_(saved[name])
    give_gradient(net, 9)
    give_gradient(fresh, 9)
    apply_step(optimizer, 0.1, ONE, ZERO)
    apply_step(other, 0.1, ONE, ZERO)
    assert torch.equal(net.weight, fresh.weight) and saved["step.weight"] == 3
