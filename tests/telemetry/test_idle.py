"""A mechanism that was switched on and does nothing for long is said so, once."""

import pytest

from jaxrl.config.load import default_config
from jaxrl.resolve.spec import resolve
from jaxrl.telemetry.health import IDLE_STEPS, IdleMechanisms, mechanisms
from jaxrl.telemetry.names import describe


def config(**algorithm):
    c = default_config()
    for name, value in algorithm.items():
        group, _, leaf = name.rpartition("__")
        (c.algorithm[group] if group else c.algorithm)[leaf] = value
    return c


def warnings(watch: IdleMechanisms, metric: str, values) -> list[tuple[int, str]]:
    return [(step, text) for step, value in enumerate(values, 1)
            for text in watch.check(step, {"optim/grad_norm": 1.0, metric: value})]


@pytest.mark.parametrize("options,metric,name", [
    (dict(clip_high=0.3), "policy/clip_high_fraction", "clip_high=0.3"),
    (dict(dual_clip=3.0), "policy/dual_clip_fraction", "dual_clip=3.0"),
    (dict(preset="dapo"), "rollout/discarded_fraction", "dynamic_sampling=refill"),
    (dict(preset="decoupled_ppo"), "gap/corrected_fraction", "mismatch.correction=token_mis"),
    (dict(mismatch__sequence_delta=0.5), "policy/sequence_masked_fraction", "mismatch.sequence_delta=0.5"),
    (dict(early_stop_kl=0.1), "policy/early_stopped", "early_stop_kl=0.1"),
    (dict(entropy_target=0.2), "policy/entropy_coef", "entropy_target=0.2"),
    (dict(shared_prefix_tokens=4), "policy/prefix_masked_fraction", "shared_prefix_tokens=4"),
    (dict(preset="m2po"), "policy/m2_masked_fraction", "m2_threshold=0.04"),
    (dict(old_logprobs="recompute", sequence_high=1.2), "policy/ratio_masked_fraction", "sequence_high=1.2"),
    (dict(preset="clip_cov"), "policy/cov_masked_fraction", "cov_share=0.0002"),
    (dict(kl__coef=0.1), "policy/kl", "kl.coef=0.1"),
    (dict(preset="gigpo"), "advantage/anchored_fraction", "advantage=gigpo"),
])
def test_what_does_nothing_is_said_once(options, metric, name):
    said = warnings(IdleMechanisms(resolve(config(**options)).chosen()), metric, [0.0] * (2 * IDLE_STEPS))
    assert len(said) == 1 and said[0][0] == IDLE_STEPS
    assert f"algorithm.{name} has done nothing for {IDLE_STEPS} steps ({metric} is 0)" in said[0][1]


def test_what_acts_now_and_then_is_not():
    acts = [float(step % (IDLE_STEPS - 1) == 0) for step in range(4 * IDLE_STEPS)]
    assert not warnings(IdleMechanisms(resolve(config(clip_high=0.3)).chosen()), "policy/clip_high_fraction", acts)


def test_nobody_is_told_of_what_nobody_chose():
    """The clip of the default row cannot act with one optimizer step per batch."""
    assert not warnings(IdleMechanisms(resolve(config()).chosen()), "policy/clip_high_fraction", [0.0] * (2 * IDLE_STEPS))


def test_every_watched_metric_is_documented():
    assert all(describe(m.metric) for m in mechanisms())
