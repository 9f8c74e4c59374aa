"""Within an optimizer step nothing crosses between host and device by itself: microbatches are put on the device, and all
that the step makes stays there.

jax's guard against transfers to the host has no effect on CPUs, where reading an array copies nothing. What reads one there
(float, bool, numpy, item ...) refuses here instead.
"""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from jax._src.array import ArrayImpl

import jaxrl
from jaxrl import training
from jaxrl.config.load import put


def refuse(array):
    raise RuntimeError("Disallowed device-to-host transfer")


def refusing(function):
    """A function of numpy that does not take arrays of jax."""
    return lambda x, *args, **options: refuse(x) if isinstance(x, ArrayImpl) else function(x, *args, **options)


@contextlib.contextmanager
def guarded():
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard_host_to_device("disallow"))
        stack.enter_context(jax.transfer_guard_device_to_host("disallow_explicit"))
        for owner, name, instead in ((ArrayImpl, "_value", property(refuse)), (ArrayImpl, "item", refuse),
                                     (np, "asarray", refusing(np.asarray)), (np, "array", refusing(np.array))):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


@pytest.mark.parametrize("transfer", [
    lambda x: x + np.ones(3, np.float32), lambda x: jnp.asarray([1.0, 2.0]), lambda x: jax.jit(jnp.add)(x, 2.0),
    lambda x: float(x[0]), lambda x: bool((x > 0).all()), lambda x: np.asarray(x),
    lambda x: np.array(x), jax.device_get, lambda x: x.sum().item(), str])
def test_the_guard_sees_transfers(transfer):
    x = jnp.zeros(3)
    transfer(x)
    with guarded(), pytest.raises(Exception, match="Disallowed (host-to-device|device-to-host) transfer"):
        transfer(x)


@pytest.mark.full
def test_the_guard_lets_programs_and_puts_pass():
    x, double = jnp.zeros(3), jax.jit(lambda x: 2 * x)
    double(x)
    with guarded():
        y = double(double(x)) if x.shape else x
        z = jax.device_put(np.ones(3, np.float32))
    np.testing.assert_array_equal(y + z, np.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("arg, options", [
    (None, {"algorithm.kl.coef": 0.1, "algorithm.num_minibatches": 2, "train.tokens_per_microbatch": 256}),
    (None, {"algorithm.preset": "ppo", "algorithm.num_minibatches": 2, "algorithm.ppo_epochs": 2}),
    ("sft", {})], ids=["grpo", "ppo", "sft"])
def test_an_optimizer_step_transfers_nothing(tmp_path, monkeypatch, arg, options):
    """From the second step on (the first one compiles): policy and critic, microbatches packed and put meanwhile."""
    taken, make = [], training.make_update

    def watched(*parts):
        update = make(*parts)

        @functools.wraps(update)
        def step(state, batches):
            with guarded() if update in taken else contextlib.nullcontext():
                taken.append(update)
                return update(state, batches)

        return step

    monkeypatch.setattr(training, "make_update", watched)
    c = tiny_job.get_config(arg)
    c.run.dir, c.log.console, c.eval.sets, c.train.steps, c.checkpoint.every_steps = str(tmp_path), "off", (), 3, 10
    for name, value in options.items():
        put(c, name, value)
    jaxrl.train(c)
    assert len(taken) >= 3 and len(set(taken)) == (2 if "ppo" in options.values() else 1)
