"""jaxrl.migrate: a loss with weights of the sampler alone (SkyRL's rollout_is), against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_migrate import migrated, values

A = "trainer.algorithm."
JOB = {A + "policy_loss_type": "rollout_is", A + "eps_clip_low": 0.5, A + "eps_clip_high": 1.0, "trainer.train_batch_size": 64,
       "trainer.policy_mini_batch_size": 64}


def test_it_is_the_policy_gradient_with_weights_masked_outside_of_bounds():
    m = migrated("skyrl", JOB)
    v = values(m)
    assert m.outcome(False) != "refused", m.lacking
    assert (v["algorithm.policy_loss"], v["algorithm.mismatch.correction"]) == ("pg", "token_mis")
    assert (v["algorithm.mismatch.low"], v["algorithm.mismatch.cap"]) == (0.5, 2.0)


@pytest.mark.parametrize(("more", "key"), [
    ({"trainer.policy_mini_batch_size": 32}, A + "policy_loss_type"),
    ({"trainer.update_epochs_per_batch": 2}, A + "policy_loss_type"),
    ({A + "off_policy_correction.sequence_mask_metric": "geometric"}, A + "off_policy_correction.sequence_mask_metric"),
    ({A + "off_policy_correction.tis_ratio_type": "token"}, A + "off_policy_correction.tis_ratio_type"),
])
def test_several_updates_and_a_second_correction_are_refused(more, key):
    m = migrated("skyrl", {**JOB, **more})
    assert m.outcome(False) == "refused" and key in [k for k, _, refuse in m.lacking if refuse]


def test_its_gradient_is_the_formulas():
    """At the policy before the step: stop(r within bounds, else 0) A d log pi, over all tokens' number."""
    from jaxrl.algorithms.losses import policy_gradient_loss
    from jaxrl.algorithms.mismatch import mismatch_weight
    v = values(migrated("skyrl", JOB))
    rng = np.random.default_rng(0)
    logp = jnp.asarray(rng.normal(-1, 0.5, (4, 7)))
    rollout = logp + jnp.asarray(rng.normal(0, 0.8, (4, 7)))
    advantage = jnp.asarray(rng.normal(size=(4, 7)))
    ratio = jnp.exp(logp - rollout)
    inside = (ratio > 0.5) & (ratio < 2.0)
    assert 0 < int(inside.sum()) < inside.size
    want = -jnp.where(inside, ratio, 0) * advantage / logp.size
    mask = jnp.ones_like(inside)
    weight = mismatch_weight(logp, rollout, mask, v["algorithm.mismatch.cap"], action="mask", low=v["algorithm.mismatch.low"])
    got = jax.grad(lambda x: (weight * policy_gradient_loss(x, advantage, mask, old=logp)[0]).mean())(logp)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
