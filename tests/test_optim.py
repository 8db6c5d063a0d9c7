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
    other.load_state_dict(scale.state_dict())
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


def test_plain_sgd_moves_by_the_rate_times_the_divided_gradient():
    net = nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(
        net.named_parameters(), dataclasses.replace(Config(), lr=9.0, optimizer="sgd", weight_decay=0.0)
    )
    before = net.weight.detach().clone()
    net.weight.grad = torch.tensor([[8.0, -16.0]])
    apply_step(optimizer, 0.5, torch.tensor(4.0), ZERO)  # the rate of the step, not the one it was built with
    assert torch.equal(before - net.weight, torch.tensor([[1.0, -2.0]]))


def test_a_skipped_step_leaves_the_run_as_if_it_had_not_been():
    with_skip, one = network()
    without, other = network()
    for n in range(4):
        if n == 2:
            give_gradient(with_skip, 99)
            apply_step(one, 0.1, ONE, ONE)
        for net, optimizer in ((with_skip, one), (without, other)):
            give_gradient(net, n)
            apply_step(optimizer, 0.1, ONE, ZERO)
    assert all(torch.equal(a, b) for a, b in zip(with_skip.parameters(), without.parameters(), strict=True))


@pytest.mark.parametrize("norm", [0.0, 1e-8, 0.5, 0.999, 1.0, 1.001, 7.0, 1e6])
@pytest.mark.parametrize("largest", [0.1, 1.0, 50.0])
def test_the_clip_factor_is_that_of_torch(norm, largest):
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.tensor([norm, 0, 0, 0])
    nn.utils.clip_grad_norm_([p], largest)
    torch.testing.assert_close(norm * clip_factor(torch.tensor(norm), largest), p.grad[0])


def test_clip_0_leaves_the_gradient_alone():
    assert clip_factor(torch.tensor(1e6), 0.0) == 1


def test_the_thousand_good_steps_are_counted_anew_after_each_skip():
    scale = LossScale(True, torch.device("cpu"))
    for _ in range(999):
        scale.update(ZERO)
    scale.update(ONE)
    scale.update(ONE)
    assert scale.scale == 2**14
    for n in range(1, 2001):
        scale.update(ZERO)
        assert scale.scale == 2 ** (14 + n // 1000)


def test_without_fp16_there_is_no_loss_scale():
    scale = LossScale(False, torch.device("cpu"))
    for found in (ONE, *[ZERO] * 1001):
        scale.update(found)
    scale.load_state_dict({"scale": 2.0**16, "good_steps": 3.0})  # of a run that was fp16
    assert scale.scale == 1


def test_the_decay_warms_up_as_in_diffusers():
    net, _ = network()
    for decay in (0.5, 0.99, 0.9999):
        ours, theirs = EMA(net.named_parameters(), decay), EMAModel(net.parameters(), decay=decay)
        for n in range(1, 200):
            assert ours.next_decay() == pytest.approx(theirs.get_decay(n)), n
            ours.update()


def test_the_average_does_not_follow_the_weights_by_itself_and_restarts_from_them():
    net, _ = network()
    ema = EMA(net.named_parameters(), 0.9)
    before = ema.average["weight"].clone()
    with torch.no_grad():
        net.weight.add_(1)
    assert torch.equal(ema.average["weight"], before)
    ema.restart()
    assert torch.equal(ema.average["weight"], net.weight)


def test_an_error_while_the_average_is_in_still_gives_the_weights_back():
    net, _ = network()
    ema = EMA(net.named_parameters(), 0.9)
    with torch.no_grad():
        net.weight.mul_(1.1)
    before, average = net.weight.clone(), ema.average["weight"].clone()
    with pytest.raises(RuntimeError), ema.swapped_in():
        raise RuntimeError
    assert torch.equal(net.weight, before) and torch.equal(ema.average["weight"], average)


def test_the_state_tensors_of_adamw_are_all_of_its_state_and_live():
    net, optimizer = network()
    tensors = optimizer_tensors(optimizer, net.named_parameters())
    assert set(tensors) == {f"{k}.{n}" for k in ("step", "exp_avg", "exp_avg_sq") for n in ("weight", "bias")}
    give_gradient(net)
    apply_step(optimizer, 0.1, ONE, ZERO)
    assert tensors["step.bias"] == 1
    for name, p in net.named_parameters():
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(tensors[f"{key}.{name}"] is value for key, value in optimizer.state[p].items())


def test_sgd_has_no_state_to_save():
    net, optimizer = network("sgd")
    assert optimizer_tensors(optimizer, net.named_parameters()) == {}


def test_making_the_state_early_does_not_change_the_first_step():
    early, one = network()
    late, other = network()
    optimizer_tensors(one, early.named_parameters())
    for net, optimizer in ((early, one), (late, other)):
        give_gradient(net)
        apply_step(optimizer, 0.1, ONE, ZERO)
    assert torch.equal(early.weight, late.weight)
