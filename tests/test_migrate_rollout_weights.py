"""jaxrl.migrate: a loss with weights of the sampler alone (SkyRL's rollout_is), against its formula."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_migrate import migrated, values

from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.resolve.checks.common import check

A = "trainer.algorithm."
JOB = {A + "policy_loss_type": "rollout_is", A + "eps_clip_low": 0.5, A + "eps_clip_high": 1.0, "trainer.train_batch_size": 64,
       "trainer.policy_mini_batch_size": 64}


def test_it_is_the_policy_gradient_with_weights_masked_outside_of_bounds():
    m = migrated("skyrl", JOB)
    v = values(m)
    assert m.outcome(False) != "refused", m.lacking
    assert (v["algorithm.policy_loss"], v["algorithm.mismatch.correction"]) == ("pg", "token_mis")
    assert (v["algorithm.mismatch.low"], v["algorithm.mismatch.cap"]) == (0.5, 2.0)


@pytest.mark.parametrize(("more", "correction", "cap"), [
    ({"trainer.policy_mini_batch_size": 32}, "none", None),
    ({"trainer.update_epochs_per_batch": 2}, "none", None),
    ({A + "off_policy_correction.tis_ratio_type": "token", A + "off_policy_correction.token_tis_ratio_clip_high": 1.5}, "token_tis", 1.5),
    ({A + "off_policy_correction.tis_ratio_type": "sequence", "trainer.policy_mini_batch_size": 32}, "sequence_tis", 5.0),
])
def test_several_updates_and_second_weights_have_a_loss_of_their_own(more, correction, cap, tmp_path):
    """Its gradient is stop(r within bounds, else 0) A d log pi, with r of the policy that is updated, not of the one before the step."""
    from jaxrl.algorithms import Tokens
    m = migrated("skyrl", {**JOB, **more})
    v = values(m)
    assert m.outcome(False) != "refused", m.lacking
    assert v["algorithm.policy_loss"] == "./job_loss.py:weighed" and v["algorithm.old_logprobs"] == "recompute"
    assert v["algorithm.mismatch.correction"] == correction and v.get("algorithm.mismatch.cap") == cap
    (tmp_path / "job_loss.py").write_text(m.files["job_loss.py"])
    spec = importlib.util.spec_from_file_location("weighed_by_rollouts", tmp_path / "job_loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = np.random.default_rng(0)
    logp = jnp.asarray(rng.normal(-1, 0.5, (4, 7)))
    rollout, advantage = logp + jnp.asarray(rng.normal(0, 0.8, (4, 7))), jnp.asarray(rng.normal(size=(4, 7)))
    mask = jnp.asarray(rng.random((4, 7)) < 0.7)
    ratio = jnp.exp(logp - rollout)
    inside = (ratio > 0.5) & (ratio < 2.0) & mask
    assert 0 < int(inside.sum()) < int(mask.sum())
    hostile = jnp.where(mask, advantage, jnp.nan)

    def loss(x):
        return module.weighed(Tokens(x, x - 9, rollout, None, hostile, mask, None, None, {}), None)[0].sum()

    np.testing.assert_allclose(jax.grad(loss)(logp), -jnp.where(inside, ratio, 0) * advantage, rtol=1e-6, atol=1e-9)


def test_the_loss_of_its_own_passes_the_checks_beside_its_config(tmp_path, monkeypatch):
    flags = {**JOB, A + "off_policy_correction.tis_ratio_type": "token", "data.train_data": "a.parquet", "trainer.policy.model.path": "a/b"}
    (tmp_path / "run.sh").write_text("python -m skyrl.train.entrypoints.main_base " + " ".join(f"{k}={v}" for k, v in flags.items()))
    monkeypatch.chdir(tmp_path)
    assert command.main(["skyrl", "run.sh", "--out=out", "--gpus=8"]) == 0
    config = load_config("out/run.py")
    check(config)
    assert config.algorithm.policy_loss.endswith("run_loss.py:weighed")


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


@pytest.mark.parametrize("kind", ["geometric", "product"])
def test_a_mask_of_completions_beside_the_weights_is_the_sources(kind):
    """stop(r within bounds, else 0) A d log pi on the tokens of completions whose own ratio is within bounds, over all tokens' number."""
    from jaxrl.algorithms.mismatch import mismatch_weight
    from jaxrl.algorithms.token_masks import sequence_ratio_mask
    off = A + "off_policy_correction."
    m = migrated("skyrl", {**JOB, off + "sequence_mask_metric": kind, off + "geo_mask_low": 0.8, off + "geo_mask_high": 1.2,
                           off + "product_mask_low": 0.4, off + "product_mask_high": 2.5})
    v = values(m)
    assert m.outcome(False) != "refused" and v["algorithm.old_logprobs"] == "recompute" and v["algorithm.mismatch.correction"] == "token_mis"
    rng = np.random.default_rng(1)
    logp, gap = rng.normal(-1, 0.5, (40, 6)), rng.normal(0, 0.4, (40, 6))
    log_ratio = gap.mean(1) if kind == "geometric" else gap.sum(1)
    low, high = (0.8, 1.2) if kind == "geometric" else (0.4, 2.5)
    inside = (np.exp(log_ratio) >= low) & (np.exp(log_ratio) <= high)
    assert 3 < inside.sum() < 37
    keep = sequence_ratio_mask((logp - gap).ravel(), logp.ravel(), np.ones(240, bool), np.arange(41) * 6,
                               v["algorithm.sequence_low"], v["algorithm.sequence_high"], v["algorithm.sequence_ratio"] == "geometric")
    np.testing.assert_array_equal(keep.reshape(40, 6), inside[:, None] & np.ones((40, 6), bool))
    weight = mismatch_weight(logp, logp - gap, np.ones_like(logp), v["algorithm.mismatch.cap"], action="mask", low=v["algorithm.mismatch.low"])
    ratio = np.exp(gap)
    np.testing.assert_allclose(keep.reshape(40, 6) * weight, np.where((ratio >= 0.5) & (ratio <= 2.0) & inside[:, None], ratio, 0), rtol=1e-5)


def test_a_mask_of_completions_alone_weighs_nothing():
    off = A + "off_policy_correction."
    v = values(migrated("skyrl", {off + "sequence_mask_metric": "geometric", off + "tis_ratio_type": "token"}))
    assert (v["algorithm.sequence_high"], v["algorithm.sequence_low"], v["algorithm.mismatch.correction"]) == (1.01, 0.99, "token_tis")
    v = values(migrated("skyrl", {off + "sequence_mask_metric": "product"}))
    assert (v["algorithm.sequence_high"], v["algorithm.mismatch.correction"]) == (2.0, "none")
