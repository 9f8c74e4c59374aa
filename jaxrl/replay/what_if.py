"""replay.try: repeats one recorded update under several settings, from one state (docs/guides/replay.md).

Every setting changes one option and nothing is sampled, so the option alone causes the difference between two rows.
replay.replay calls `table`; explain uses the measurements.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import training
from jaxrl.config.load import editable, put
from jaxrl.errors import ConfigError
from jaxrl.processes.exchange import to_host
from jaxrl.resolve.checks.common import check
from jaxrl.resolve.checks.replay import settings
from jaxrl.resolve.spec import resolve
from jaxrl.rl.recording import restore_batch
from jaxrl.rl.roles import Roles
from jaxrl.rl.step import lay_out, learn, prepare
from jaxrl.roles.reference import training_temperature

COLUMNS = ("setting", "step", "angle", "kl", "outside_clip", "predicted", "realised", "others")
REPORTED = ("loss", "optim/grad_norm", "policy/clip_fraction")  # metrics of the update
HEADER = ("setting", "step", "angle", "KL", "outside clip", "predicted", "realised", "others")


# ---- a state to return to


def copied(state):
    """Copies a TrainState into new buffers, with shapes, dtypes and names as they are: updates donate the old ones."""
    return jax.tree.map(jnp.copy, state)


class StepState(NamedTuple):
    """A copy of everything that a step changes.

    Attributes:
      policy, critic: TrainStates; critic None without a trunk of its own.
      running: the critic's statistics of returns (roles.critic.Running), None without a critic.
      reference: the reference's arrays, or None. epochs: passes over the data at its last reset.
    """

    policy: Any
    critic: Any
    running: Any
    reference: Any
    epochs: float

    @classmethod
    def of(cls, roles) -> StepState:
        """Copies the states of the roles (rl.roles.Roles); the reference's arrays are shared, not copied."""
        critic, reference = roles.critic, roles.reference
        own = None if critic is None or critic.shared else critic
        return cls(copied(roles.policy.state), copied(own.state) if own is not None else None,
                   dataclasses.replace(critic.running) if critic is not None else None,
                   getattr(reference, "state", None), getattr(reference, "epochs", 0.0))

    def restore_to(self, roles) -> None:
        """Puts copies of the states into the roles of a step, and the reference's arrays themselves; this StepState can
        be restored again. A reference without a state here is left as it is."""
        critic, reference = roles.critic, roles.reference
        roles.policy.state = copied(self.policy)
        if critic is not None:
            critic.state = None if self.critic is None else copied(self.critic)
            critic.running = dataclasses.replace(self.running)
        if reference is not None and self.reference is not None:
            reference.state, reference.epochs = self.reference, self.epochs


# ---- what is measured


@jax.jit
def difference(after: dict, before: dict) -> dict:
    """Returns after - before of two flat dicts of parameters with the same names, arrays in fp32."""
    return {k: after[k].astype(jnp.float32) - before[k].astype(jnp.float32) for k in before}


@jax.jit
def dot(a: dict, b: dict):
    """Returns the inner product of two flat dicts of parameters with the same names, a [] fp32 array: the sum over all
    parameters and elements, divided by nothing."""
    return sum(jnp.sum(a[k].astype(jnp.float32) * b[k].astype(jnp.float32)) for k in a)


def number(x) -> float:
    """Returns a scalar on the devices as a float."""
    return float(to_host(x))


def logprobs(replay, state, traj, prepared) -> np.ndarray:
    """Returns [T] float64 log-probs (nats) of the loss tokens under a state, by the run's own scorer; 0 on the
    others.

    state: TrainState of the policy. traj: Trajectories of T tokens. prepared: rl.step.Prepared of the batch; its
    columns "support" and "routes", if there, are used in scoring."""
    extra = {n: prepared.columns[n] for n in ("support", "routes") if n in prepared.columns} or None
    found = replay.roles.score(training.merge(state.trainable, state.frozen), traj, prepared.layout.update,
                                   *([] if extra is None else [extra]))
    return (found["logprob"] if isinstance(found, dict) else found).astype(np.float64)


def likelihood(replay):
    """Returns gradient(state, traj, layout, weights) -> gradient of sum_t weights_t log p_t by the trained parameters.

    log p_t is in nats at the training temperature; the sum is over loss tokens and is not divided. weights: [T] float,
    at least one of them nonzero. The result is a flat dict by name, fp32. Compiled once for a replay."""
    if replay.likelihood is None:  # compiled once
        replay.likelihood = _likelihood(replay.job, replay.roles.policy.optimizer)
    return replay.likelihood


def _likelihood(job, optimizer):
    objective = training.NextToken(temperature=training_temperature(job.config), chunk=job.config.train.logprob_chunk)
    update = training.make_update(job.model, optimizer, None, objective)

    def gradient(state, traj, layout, weights):
        weights = {"policy": weights, "token": weights}
        some = [m for mini in layout.minibatches for m in mini.microbatches if holds(traj, m, weights["policy"])]
        found, _ = update.gradients(state, (job.put(training.pack(traj, m, {}, weights)) for m in some))
        return jax.tree.map(jnp.negative, found)

    return gradient


def holds(traj, micro, weights) -> bool:
    """Returns whether a microbatch has a token with a nonzero weight. weights: [T] of the tokens of `traj`."""
    sequences = [i for row in micro.rows for block in row for i in block.sequences]
    return any(weights[traj.offsets[i]:traj.offsets[i + 1]].any() for i in sequences)


def kl(before, after) -> float:
    """Returns the k3 estimate of KL(before || after) in nats: the mean of e^d - 1 - d, d = after - before within +-50.

    before, after: [M] float64 log-probs (nats) of the same M loss tokens, which `before` (or slightly older weights)
    sampled; the sum is divided by M."""
    d = after - before
    return float(np.mean(np.exp(np.clip(d, -50, 50)) - 1 - d))


# ---- the table


class Batch(NamedTuple):
    """The batch and state on which all settings are measured.

    Attributes:
      batch: rl.rollouts.Batch. state: StepState before the step.
      before: [T] float64 log-probs (nats) under it. rewarded: [T] bool, loss tokens of completions whose advantages sum
        to more than 0.
      gradient: flat dict, of the mean log-prob of the rewarded tokens; {} if there are none.
    """

    batch: Any
    state: StepState
    before: np.ndarray    # [T] log-probs
    rewarded: np.ndarray  # [T] bool: tokens of completions with a positive advantage
    gradient: dict        # of their mean log-prob


def table(replay, config) -> dict:
    """Computes the next step under the run's own options and under every setting of replay.try; restores the state.

    Returns {"step", "rows"}. A row has `setting`; of the parameters the length of the step and its angle (degrees) to
    the run's own step; of the batch's tokens the KL of the step and the share outside the clip range; of completions
    with a positive advantage the mean change of log-prob per token that their gradient predicts (`predicted`) and the
    actual one (`realised`), in nats; `others`: the actual one of all other completions; `metrics`: of the update, those
    of REPORTED. Raises ConfigError as `altered`.
    """
    s, own = replay.s, replay.roles
    state, batch = StepState.of(own), restore_batch(replay.record())
    rows, base, shared = [], None, None
    for name, value in [("", None), *settings(config.replay["try"])]:
        roles = own if not name else altered(replay, name, value)
        spec, job = roles.config, roles.job
        state.restore_to(roles)
        prepared = prepare(spec, roles, batch, lay_out(spec, job.row_shapes, batch.traj, s.step, job.score_shapes))
        shared = shared or _shared(replay, state, batch, prepared)
        metrics = learn(spec, roles, batch, prepared, s.step)
        way = difference(roles.policy.state.trainable, state.policy.trainable)
        base = base or way
        rows.append({"setting": f"{name}={value}" if name else "as recorded",
                     **_measured(replay, shared, roles, prepared, way, base),
                     "metrics": {k: metrics[k] for k in REPORTED if k in metrics}})
    state.restore_to(own)
    s.say(text_of(s.step + 1, rows))
    return {"step": s.step + 1, "rows": rows}


def _shared(replay, state, batch, prepared) -> Batch:
    traj = batch.traj
    good = traj.spread(traj.total(prepared.advantages.tokens) > 0) & traj.loss_mask
    weights = good / max(int(good.sum()), 1)
    gradient = likelihood(replay)(state.policy, traj, prepared.layout.update, weights) if good.any() else {}
    return Batch(batch, state, logprobs(replay, state.policy, traj, prepared), good, gradient)


def _measured(replay, shared: Batch, roles, prepared, way, base) -> dict:
    traj, options = shared.batch.traj, roles.config.algorithm
    after, before = logprobs(replay, roles.policy.state, traj, prepared), shared.before
    length, mask = number(dot(way, way)) ** 0.5, traj.loss_mask
    both = length * number(dot(base, base)) ** 0.5
    cosine = number(dot(way, base)) / both if both else float("nan")
    ratio = np.exp(np.clip(after - prepared.columns.get("old", before), -50, 50))[mask]
    outside = (ratio > 1 + options.clip_high) | (ratio < 1 - options.clip_low)
    mean = lambda where: float((after - before)[where].mean()) if where.any() else float("nan")  # noqa: E731
    return {"step": length, "angle": float(np.degrees(np.arccos(np.clip(cosine, -1, 1)))),
            "kl": kl(before[mask], after[mask]), "outside_clip": float(outside.mean()),
            "predicted": number(dot(shared.gradient, way)) if shared.gradient else None,
            "realised": mean(shared.rewarded), "others": mean(mask & ~shared.rewarded)}


def altered(replay, name: str, value):
    """Makes the roles of a step (rl.roles.Roles) with one option changed.

    name: dotted name of the option. value: what it is set to.

    Raises ConfigError for an invalid config, and if the recorded state does not fit the option: a critic that was or
    was not there, or another structure of the optimizer's state."""
    own, s = replay.roles, replay.s
    asked = editable(s.spec.asked)
    put(asked, name, value)
    check(asked)
    spec = resolve(asked, s.spec.platform, replay.job.hf_config, s.spec.rollout.engine)
    roles = Roles(dataclasses.replace(replay.job, config=spec), s.total_steps)
    here = f"replay.try: {name}={value}"
    if (roles.critic is None) != (own.critic is None):
        raise ConfigError(f"{here}: the run {'has' if own.critic else 'had'} {'a' if own.critic else 'no'} critic, and "
                          f"this setting is of a run {'with' if roles.critic else 'without'} one; leave it out")
    wants = jax.eval_shape(roles.policy.optimizer.init, own.policy.state.trainable)
    if jax.tree.structure(wants) != jax.tree.structure(own.policy.state.opt_state):
        raise ConfigError(f"{here}: the recorded optimizer state has another structure; leave it out")
    if roles.reference is not None and own.reference is None:
        roles.policy.state = own.policy.state
        roles.reference.start(None, None)
    return roles


def text_of(step: int, rows: list[dict]) -> str:
    """Formats the table of a step for the console. rows: those of `table`."""
    number = lambda x: "-" if x is None else f"{x:.4g}"  # noqa: E731
    cells = [list(HEADER), *[[row["setting"], number(row["step"]), f"{row['angle']:.2f}", number(row["kl"]),
                              f"{row['outside_clip']:.2%}", *[number(row[n]) for n in COLUMNS[5:]]] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([f"step {step} under other settings (step: length; angle to the recorded one in degrees; KL in "
                      "nats per token; predicted, realised, others: change of log-prob per token of rewarded "
                      "completions, of the others)",
                      *(f"  {line}" for line in lines)])
