"""The tiny job with one step looked at from inside: states before and after, batches, columns, each update's metrics."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxrl
from helpers import tiny_job
from jaxrl.config.load import put
from jaxrl.recipes import rl
from jaxrl.resolve.spec import Platform, resolve
from jaxrl.rl import step as rl_step
from jaxrl.roles.role import host_scalars
from jaxrl.rollout import embedded


def job(run_dir, options):
    """The tiny job, small and without evaluation, with `options`: dotted name -> value."""
    c = tiny_job.get_config()
    c.run.dir, c.log.console, c.eval.sets = str(run_dir), "off", ()
    c.rollout.group_size, c.train.steps, c.checkpoint.every_steps = 4, 2, 1
    for name, value in options.items():
        put(c, name, value)
    return c


def decided(config):
    """The Spec of a config on a CPU."""
    return resolve(config, Platform("cpu", "fp32"))


def host(tree):
    """A tree on the host, as copies: updates donate what they replace."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def same(a, b):
    """Bitwise equal leaves."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def with_options(job, config):
    """An open job as if it had been opened with another config."""
    return dataclasses.replace(job, config=decided(config))


def photo(loop):
    """Everything a step may change."""
    critic, reference, policy = loop.roles.critic, loop.roles.reference, loop.roles.policy
    return SimpleNamespace(
        policy=host(policy.state.trainable),
        optimizer=host(policy.state.opt_state),
        updates=int(policy.state.step),
        policy_tree=host(policy.weights()),
        critic=None if critic is None or critic.shared else host(vars(critic.state)),
        running=None if critic is None else critic.host(),
        reference=None if reference is None else host(reference.state),
        cursor=loop.s.progress.cursor,
    )


def watched(config):
    """Runs in this process. Returns (summary, steps, version published -> names of its parameters).

    A step has before, after (photos), metrics, batch, columns, updates (metrics of each of the policy's optimizer steps) and
    critic_updates.
    """
    steps, published, now = [], {}, SimpleNamespace()
    one_step, learn, update_policy, publish = rl.one_step, rl_step.learn, rl_step.update_policy, embedded.EmbeddedEngine.publish

    def look_at_step(loop):
        roles = loop.roles
        now.before, now.updates, now.critic_updates = photo(loop), [], []
        if roles.critic is not None:
            critic_learn = type(roles.critic).learn

            def look_at_critic(traj, columns, seed):
                found = critic_learn(roles.critic, traj, columns, seed)
                now.critic_updates = [host_scalars(m) for m in found]
                return found

            roles.critic.learn = look_at_critic
        done = one_step(loop)
        steps.append(SimpleNamespace(**vars(now), after=photo(loop), metrics=done and done[0]))
        return done

    def look_at_update(spec, roles, batch, prepared, step, **how):
        now.batch, now.columns, now.layout, now.scored = batch, prepared.columns, prepared.layout.update, prepared.layout.score
        return learn(spec, roles, batch, prepared, step, **how)

    def look_at_policy(*args):
        found = update_policy(*args)
        now.updates = [host_scalars(m) for m in found]
        return found

    def look_at_publish(engine, params, version):
        published[version] = set(params)
        return publish(engine, params, version)

    mesh = jax.sharding.get_mesh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "one_step", look_at_step)
        patch.setattr(rl_step, "learn", look_at_update)
        patch.setattr(rl_step, "update_policy", look_at_policy)
        patch.setattr(embedded.EmbeddedEngine, "publish", look_at_publish)
        try:
            summary = jaxrl.train(config)
        finally:
            jax.set_mesh(mesh)
    return summary, steps, published
