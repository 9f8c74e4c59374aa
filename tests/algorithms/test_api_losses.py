"""The losses of the training service beside torch's autograd, in float64."""

import jax
import numpy as np
import pytest

from jaxrl.algorithms.api_losses import API_LOSSES, token_losses


@pytest.mark.torch
def test_losses_and_gradients_are_those_of_the_documented_formulas():
    """One array holds tokens of every loss, with bounds of their own; ratios lie on both sides of them."""
    import torch

    rng, count = np.random.default_rng(0), 400
    logp, advantage, weight = -3 + rng.normal(size=count), rng.normal(size=count), rng.normal(size=count)
    sampled, low, high = logp + 0.5 * rng.normal(size=count), rng.uniform(0.5, 1, count), rng.uniform(1, 1.5, count)
    names = rng.permutation(np.arange(count) % len(API_LOSSES))
    sequence = np.arange(count) // 3
    gap = (np.bincount(sequence, logp - sampled) / np.bincount(sequence))[sequence]
    with jax.enable_x64(True):
        def total(logp):
            return token_losses(logp, sampled, advantage, weight, names, low, high, gap).sum()

        value, gradient = jax.value_and_grad(total)(logp)
        gradient = np.asarray(gradient)
    x = torch.tensor(logp, requires_grad=True)
    a, w, bounds = torch.tensor(advantage), torch.tensor(weight), (torch.tensor(low), torch.tensor(high))
    ratio = (x - torch.tensor(sampled)).exp()
    of_sequence = torch.tensor(gap).exp() * (x - x.detach()).exp()
    each = {"cross_entropy": -w * x, "importance_sampling": -w * ratio * a,
            "ppo": -w * torch.minimum(ratio * a, torch.clamp(ratio, *bounds) * a),
            "cispo": -w * torch.clamp(ratio, *bounds).detach() * a * x,
            "dro": -w * (a * x - bounds[0] / 2 * (x - torch.tensor(sampled)) ** 2),
            "gspo": -w * torch.minimum(of_sequence * a, torch.clamp(of_sequence, *bounds) * a)}
    assert each.keys() == API_LOSSES.keys()
    wanted = sum(each[name][torch.tensor(names == loss.number)].sum() for name, loss in API_LOSSES.items())
    wanted.backward()
    assert float(value) == pytest.approx(wanted.item(), rel=1e-13)
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-13)
    assert (gradient == 0).mean() > 0.03  # clipped
