"""Every preset: micro-batches, packing, shared prompts, padding and data shards leave its loss and gradient unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.preset_losses import LOSSES, weights_of
from helpers.training_helpers import (
    batch_of_groups,
    gradient,
    layout_of,
    one_at_a_time,
    params_of,
    policy_objective,
    tiny_model,
    worst,
)

from jaxrl import training
from jaxrl.models.value import ValueModel

LAYOUTS = ("padded_wide", "packed", "packed_shared_8_microbatches")








def sensitivities(traj, columns, weights, layout, loss, logp_T, entropy_T):
    """(sum of the loss over microbatches, its derivatives by each token's log-prob and entropy [T], summed metrics)."""
    total, grads, metrics = 0.0, [np.zeros(len(traj.tokens)) for _ in range(2)], {}

    def terms(logp, entropy, batch):
        token = batch.weights["token"]
        return loss.policy_terms(logp, entropy, batch, token, token > 0, None)

    for micro in layout.minibatches[0].microbatches:
        batch = training.pack(traj, micro, {**columns, "logp": logp_T, "entropy": entropy_T}, weights, np.float64)
        junk = np.where(batch.sequences == 0, 1e30, 0)
        batch = jax.tree.map(jnp.asarray, batch.replace(columns={k: x + junk for k, x in batch.columns.items()}))
        (value, new), found = jax.value_and_grad(terms, argnums=(0, 1), has_aux=True)(
            batch.columns["logp"], batch.columns["entropy"] * (batch.sequences > 0), batch)
        total += float(value)
        for out, g in zip(grads, found, strict=True):
            one = np.zeros(len(traj.tokens))
            training.unpack(traj, micro, np.asarray(g), one)
            out += one
        metrics = {k: metrics.get(k, 0.0) + float(x) for k, x in new.items() if not k.endswith("max")}
    return total, grads, metrics


@pytest.mark.parametrize("preset", LOSSES)
@pytest.mark.slow
def test_the_loss_of_every_preset_does_not_depend_on_the_layout(preset):
    """Derivatives by log-probs and entropies: how those do not depend on the layout is tests/training/test_training.py's."""
    with jax.enable_x64(True):
        traj, columns = batch_of_groups(groups=4, size=4)
        rng = np.random.default_rng(1)
        logp = np.where(traj.loss_mask, columns["old"] + 0.3 * rng.normal(size=len(traj.tokens)), 0)
        entropy = rng.uniform(0.1, 2, len(traj.tokens))
        weights, loss = weights_of(traj, preset), LOSSES[preset]
        truth = sensitivities(traj, columns, weights, one_at_a_time(traj), loss, logp, entropy)
        assert np.abs(truth[1][0]).max() > 1e-4 and np.isfinite(truth[1][0]).all()
        for name in LAYOUTS:
            got = sensitivities(traj, columns, weights, layout_of(traj, name), loss, logp, entropy)
            assert got[0] == pytest.approx(truth[0], rel=1e-12, abs=1e-12), name
            for a, b in zip(got[1], truth[1], strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max(), err_msg=name)
            for key, value in truth[2].items():
                assert got[2][key] == pytest.approx(value, rel=1e-11, abs=1e-12), (name, key)


@pytest.mark.nightly
def test_the_gradient_through_the_model_neither():
    """With PPO's value loss on the policy's own trunk."""
    with jax.enable_x64(True):
        model = tiny_model(jnp.float64)
        params = params_of(model, jnp.float64)
        traj, columns = batch_of_groups(groups=3, size=3)
        loss = policy_objective(LOSSES["vapo"], value_coef=0.5, value_clip=0.2)
        params = ValueModel(model, keep_head=True).with_head(params)
        params["value"]["kernel"] += np.random.default_rng(0).normal(size=32)
        columns |= {"return": columns["advantage"] + 1.0, "old_value": 0.3 * columns["ref"]}
        weights = weights_of(traj, "vapo")
        truth, _ = gradient(model, params, traj, columns, weights, one_at_a_time(traj), np.float64, loss)
        for name in ("packed_shared_2_microbatches", "padded"):
            got, _ = gradient(model, params, traj, columns, weights, layout_of(traj, name), np.float64, loss, dirty=True)
            assert worst(got, truth) < 1e-12, name


@pytest.mark.slow
def test_data_shards_neither():
    """Four shards of the rows, in a process with four devices; sums over sequences stay within a row and so within a shard."""
    here = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, here / "helpers" / "sharded_presets.py"], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == 4 and found["worst"] < 1e-5
