"""A GRPO step written over the service's operations is the step of a run with adapters."""

import jax
import numpy as np
import pytest
from helpers.tiny_job import get_config

from jaxrl import sharding
from jaxrl.api import Roles, Rollouts, Session, check, lay_out, learn, open_run, prepare, resolve, start_jax
from jaxrl.models.adapters import is_adapter
from jaxrl.models.parameters import flattened
from jaxrl.rl.step import make_loss_weigher
from jaxrl.roles import parameters
from jaxrl.service import bodies
from jaxrl.service.trainer import AdamSettings, LoraOptions, Trainer
from jaxrl.service.wire import Datum

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("the_mesh_as_it_was")]
RANK, SEED = 4, 7


def of_run(folder):
    """The config of configs/lora.py's step on the tiny job: one update per batch, the ratio to the sampler's log-probs."""
    c = get_config()
    c.run.dir, c.run.seed, c.run.warm_start = str(folder), SEED, ""
    c.lora.rank = RANK
    c.algorithm.old_logprobs = "rollout"
    c.train.share_prompts = False
    c.optimizer.lr, c.optimizer.warmup_steps, c.optimizer.schedule = 2e-3, 0, "constant"
    c.eval.before = c.eval.after = False
    return c


def data_of(batch, prepared, weights):
    """A batch of a run as data of the protocol: the client shifts the targets, and weights are 1/denominator."""
    traj, out = batch.traj, []
    for a, b in zip(traj.offsets[:-1], traj.offsets[1:], strict=True):
        inside = slice(a + 1, b)
        out.append(Datum(traj.tokens[a:b - 1], {
            "target_tokens": traj.tokens[inside].astype(np.int64), "logprobs": traj.logprobs[inside],
            "advantages": prepared.columns["advantage"][inside], "weights": weights[inside].astype(np.float32)}))
    return out


def test_grpo_over_the_api_is_the_step_of_a_run(tmp_path):
    config = of_run(tmp_path)
    check(config)
    spec = resolve(config)
    start_jax(spec)
    with Session(spec) as s:
        job = open_run(s)
        spec, roles, rollouts = job.config, Roles(job, total_steps=4), Rollouts.open(s, job)
        s.restore(roles.policy, [*roles.parts, rollouts])
        s.open_telemetry()
        base = {k: x.copy() for k, x in roles.policy.state.frozen.items() if not is_adapter(k)}
        trainer = Trainer(job.model, base, flattened(parameters.param_shardings(job)), sharding.replicated(job.mesh),
                          job.row_shapes, job.put, alpha=RANK, chunk=spec.train.logprob_chunk)
        run = trainer.start(LoraOptions(RANK, SEED))
        first = {k: np.asarray(x) for k, x in roles.policy.state.trainable.items()}
        assert all(np.array_equal(x, np.asarray(run.state.trainable[k])) for k, x in first.items())
        for _ in range(2):
            rollouts.publish(roles.policy.weights(), s.step)
            batch = rollouts.next(s.progress)
            prepared = prepare(spec, roles, batch, lay_out(spec, job.row_shapes, batch.traj, s.step))
            (minibatch,) = prepared.layout.update.minibatches
            weights = make_loss_weigher(spec, batch, prepared.columns)[0](minibatch.sequences)["policy"]
            metrics = learn(spec, roles, batch, prepared, s.step)
            o, a = spec.optimizer, spec.algorithm
            rows = data_of(batch, prepared, weights)
            sent = bodies.batch(rows, "ppo", {"clip_low_threshold": 1 - a.clip_low, "clip_high_threshold": 1 + a.clip_high},
                                trainer.longest, job.model.config.vocab_size)
            _, loss = trainer.forward_backward(run, sent, True)
            found = trainer.optim_step(run, AdamSettings(o.lr, o.b1, o.b2, o.eps, o.weight_decay, o.max_grad_norm))
            assert loss == pytest.approx(metrics["policy/loss"], abs=1e-6)
            assert found["optim/grad_norm"] == pytest.approx(metrics["optim/grad_norm"], rel=1e-4)
            s.advance(batch.cursor, samples=batch.traj.num_trajectories)
            rollouts.release(batch.cursor)
        assert metrics["optim/grad_norm"] > 0
    theirs = jax.device_get(roles.policy.state.trainable)
    moved = max(np.abs(theirs[k] - x).max() for k, x in first.items())
    apart = max(np.abs(np.asarray(run.state.trainable[k]) - x).max() for k, x in theirs.items())
    assert moved > 2e-3 and apart < 1e-5, (moved, apart)  # of entries whose gradient is nearly 0; Adam divides by it
