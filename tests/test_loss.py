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
