"""The loss against diffusers' own schedulers and the published values."""

import pytest
import torch
from diffusers import DDPMScheduler

from common.errors import UsageError
from common.loss import NoiseSchedule, betas_of, min_snr_weight, zero_terminal_snr

STABLE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000)
T = torch.tensor([0, 1, 250, 500, 750, 998, 999])


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("zero", [False, True])
def test_tables_are_those_of_diffusers(kind, zero):
    scheduler = STABLE | {"beta_schedule": kind}
    theirs = DDPMScheduler(**scheduler, rescale_betas_zero_snr=zero).alphas_cumprod
    ours = NoiseSchedule(scheduler, "v_prediction", zero_snr=zero)
    torch.testing.assert_close(ours.signal**2, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noise_target_and_loss_are_those_of_diffusers(prediction):
    theirs = DDPMScheduler(**STABLE, prediction_type=prediction)
    ours = NoiseSchedule(STABLE, prediction)
    latents, noise, said = torch.randn(3, 7, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours.add_noise(latents, noise, T), theirs.add_noise(latents, noise, T))
    target = noise if prediction == "epsilon" else theirs.get_velocity(latents, noise, T)
    torch.testing.assert_close(ours.target(latents, noise, T), target)
    each = ours.loss(said, ours.target(latents, noise, T), T)
    torch.testing.assert_close(each, ((said - target) ** 2).mean((1, 2, 3)))


def test_zero_terminal_snr_ends_in_pure_noise_and_begins_where_it_did():
    betas = betas_of(STABLE)
    bar, before = (1 - zero_terminal_snr(betas)).cumprod(0), (1 - betas).cumprod(0)
    assert bar[-1] == 0
    assert bar[0] == pytest.approx(before[0].item(), rel=1e-6)


@pytest.mark.parametrize(
    "prediction, zero, weights",
    [
        ("v_prediction", False, [0.00425011, 0.673792, 0.276332, 0.0561698, 0.00466009]),
        ("v_prediction", True, [0.00425011, 0.652457, 0.241019, 0.0327991, 0.0]),
        ("epsilon", False, [0.00425372, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_min_snr_weights_have_the_published_values(prediction, zero, weights):
    schedule = NoiseSchedule(STABLE, prediction, zero_snr=zero)
    got = min_snr_weight(schedule.snr[torch.tensor([0, 250, 500, 750, 999])], 5.0, prediction)
    torch.testing.assert_close(got, torch.tensor(weights), rtol=2e-4, atol=1e-8)
    assert got.isfinite().all()


def test_epsilon_with_zero_terminal_snr_is_refused_with_the_reason():
    with pytest.raises(UsageError, match="--prediction v_prediction.*pure noise"):
        NoiseSchedule(STABLE, "epsilon", zero_snr=True)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("steps", [10, 1000])
def test_betas_are_those_of_diffusers(kind, steps):
    scheduler = STABLE | {"beta_schedule": kind, "num_train_timesteps": steps}
    torch.testing.assert_close(betas_of(scheduler), DDPMScheduler(**scheduler).betas, rtol=1e-6, atol=1e-9)
    assert len(NoiseSchedule(scheduler, "epsilon")) == steps


def test_defaults_and_listed_betas_are_those_of_diffusers():
    torch.testing.assert_close(betas_of({}), DDPMScheduler().betas)
    listed = {"trained_betas": [0.1, 0.2, 0.4]}
    torch.testing.assert_close(betas_of(listed), DDPMScheduler(**listed).betas)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_with_zero_terminal_snr_noise_and_velocity_are_those_of_diffusers(kind):
    scheduler = STABLE | {"beta_schedule": kind}
    theirs = DDPMScheduler(**scheduler, prediction_type="v_prediction", rescale_betas_zero_snr=True)
    ours = NoiseSchedule(scheduler, "v_prediction", zero_snr=True)
    latents, noise = torch.randn(2, 7, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        ours.add_noise(latents, noise, T), theirs.add_noise(latents, noise, T), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        ours.target(latents, noise, T), theirs.get_velocity(latents, noise, T), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(ours.add_noise(latents, noise, T)[-1], noise[-1])  # the last step is pure noise


def test_the_min_snr_weight_multiplies_each_samples_loss_and_stays_finite_in_pure_noise():
    schedule = NoiseSchedule(STABLE, "v_prediction", zero_snr=True, snr_gamma=5.0)
    plain = NoiseSchedule(STABLE, "v_prediction", zero_snr=True)
    t = torch.tensor([0, 250, 500, 750, 999])
    said, target = torch.randn(2, 5, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    ratio = schedule.loss(said, target, t) / plain.loss(said, target, t)
    torch.testing.assert_close(ratio, torch.tensor([0.00425011, 0.652457, 0.241019, 0.0327991, 0.0]), rtol=2e-4, atol=0)


def test_a_half_precision_prediction_is_compared_in_float32():
    schedule, t = NoiseSchedule(STABLE, "epsilon"), torch.tensor([5])
    said = torch.full((1, 4, 8, 8), 300.0, dtype=torch.float16)  # its square overflows float16
    loss = schedule.loss(said, torch.zeros_like(said), t)
    assert loss.dtype == torch.float32 and loss.item() == 90000


def test_what_is_not_trained_here_is_refused_with_what_is():
    with pytest.raises(UsageError, match="sigmoid.*scaled_linear"):
        betas_of({"beta_schedule": "sigmoid"})
    with pytest.raises(UsageError, match="sample.*epsilon or v_prediction"):
        NoiseSchedule(STABLE, "sample")


def test_the_held_out_loss_is_unweighted_so_that_runs_with_other_weights_compare():
    plain, weighted = NoiseSchedule(STABLE, "v_prediction"), NoiseSchedule(STABLE, "v_prediction", snr_gamma=5.0)
    said, target = torch.randn(2, 7, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weighted.loss(said, target, T, weighted=False), plain.loss(said, target, T))
    assert not torch.equal(weighted.loss(said, target, T), plain.loss(said, target, T))
