"""run.mode=certify: tests claims about an update on a config's loss, advantages and rewards (docs/guides/certify.md).

    loss, advantages  <- the config's, on the numbers of certify.cases and on a tabular policy
    update            <- the config's, with a tiny model in place of its own: other layouts, meshes, a resume
    rewards           <- the config's, on its first rows
    table, <run.dir>/certify.json, certify.md

Claims are about loss, reward and layout, not about weights: no engine runs, no weights are read, nothing is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxrl
from jaxrl import data as jaxrl_data
from jaxrl.algorithms import kl_value
from jaxrl.certify import claims, estimator, rewards, tabular
from jaxrl.certify import loss as losses
from jaxrl.certify.claims import NotApplicable
from jaxrl.certify.update import Base
from jaxrl.config.load import editable, load_config
from jaxrl.errors import ConfigError
from jaxrl.resolve.spec import resolve
from jaxrl.rewards import RewardItem, RewardPool, services
from jaxrl.rl.advantages import ESTIMATORS, advantages
from jaxrl.run.setup import start_jax
from jaxrl.telemetry import require_free

log = logging.getLogger("jaxrl")
DEVICES = 4      # simulated, where nothing has been computed yet
ROWS = 6         # of the data, for rewards
MOST_ROWS = 256  # that are read to find them


def run(config, inputs=None) -> dict:
    """Tests every claim, writes certify.json and certify.md to run.dir, and returns the content of certify.json (of
    each claim without "says", its text).

    `certified` is False if a claim fails that certify.accept does not name. inputs: PythonInputs of the caller; None =
    there are none. The process has simulated CPU devices afterwards (`simulate`), and jax's mesh is a tiny job's.

    Raises ConfigError if run.dir is not a writable folder."""
    started, folder = time.monotonic(), Path(config.run.dir)
    require_free(folder, lock=False)
    simulate()
    spec, found = resolve(config, engine="jax"), []
    start_jax(spec)
    with contextlib.ExitStack() as stack:
        base = Base(config, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        checks = of_update(base, loss_of(base), spec) | of_rewards(Rewards(config, inputs, stack))
        for name in claims.CLAIMS:
            found.append(claims.found(name, checks[name], config.certify.accept))
            log.info("certify: %s: %s", name, found[-1].shown())
    about = {"jaxrl": jaxrl.__version__, "jax": jax.__version__, "preset": spec.algorithm.preset,
             "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
             "certified": not any(c.broken for c in found), "seconds": round(time.monotonic() - started, 1)}
    claims.write(folder, f"Certificate of {folder}", about, found)
    counts = [f"{sum(c.verdict == verdict for c in found)} {verdict}" for verdict in claims.VERDICTS]
    print(f"certify: {folder}\n{claims.table(found)}\n{'; '.join(counts)} ({folder / 'certify.md'})")
    return about | {"claims": [dataclasses.asdict(c) for c in found]}


def simulate() -> None:
    """Makes jax use simulated CPU devices for the meshes, unless it has initialised its devices already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", DEVICES)
        jax.config.update("jax_platforms", "cpu")
        log.info("certify: this process uses %d simulated CPU devices; train in another process", DEVICES)


# ---- loss, advantages and update


def loss_of(base: Base) -> losses.Loss:
    """Returns the policy's loss as certify tests it (certify.loss.Loss), without the value loss of a shared trunk.

    Its advantages are those of the config's estimator, with a KL penalty in the reward if kl.placement asks for it."""
    tiny, spec = base.tiny, base.tiny.spec

    def advantage(options, case) -> np.ndarray:
        columns, kl = {name: case.columns[name] for name in ("behaviour", "old", "ref")}, None
        if options.kl.coef and options.kl.placement == "reward":
            kl = kl_value(case.columns["old"], case.columns["ref"], options.kl.estimator)
        found = advantages(options, case.traj, case.scores, baseline=case.baseline, kl=kl, values=case.columns["value"],
                           rewards={"score": case.scores}, columns=columns, user=options.user, scale=spec.reward.scale)
        return found.tokens

    objective = dataclasses.replace(tiny.roles.loss, value_coef=0.0)
    turns = tiny.turns or objective.options.advantage in ("turn", "gigpo")
    return losses.Loss(objective, tiny.weights, advantage, objective.columns, turns)


def of_update(base: Base, loss: losses.Loss, spec) -> dict:
    """Returns the name of a claim -> the function that tests it, for loss, advantages and update.

    base: the tiny job. loss: of `loss_of`. spec: Spec of the config that is certified."""
    both = lambda *checks: lambda: "; ".join([check() for check in checks])  # noqa: E731
    layouts = {name: both(lambda name=name: losses.unchanged(loss, name), lambda name=name: base.unchanged(name))
               for name in ("microbatches", "packing", "padding")}
    o = loss.options
    return layouts | {
        "order": both(lambda: estimator.order(loss), base.order),
        "meshes": base.meshes, "scoring": base.scoring, "resume": base.resume,
        "repeat": both(lambda: estimator.repeat(loss), base.repeat),
        "mask": lambda: losses.masked(loss), "tokens": lambda: losses.alike(loss),
        "objective": lambda: tabular.objective(loss, tabular.is_promised(o)),
        "terms": lambda: tabular.terms(loss, spec.reward.pass_mark),
        "groups": lambda: estimator.groups(loss, o.advantage not in ESTIMATORS)}


# ---- rewards


class Rewards:
    """Reward functions in their workers and completions of the first rows, opened when the first claim needs them.

    config: the whole config. inputs: PythonInputs of the caller, or None. stack: closes the workers."""

    def __init__(self, config, inputs, stack: contextlib.ExitStack):
        self.config, self.inputs, self.stack = config, inputs, stack
        self._ready = self._reason = None

    def ready(self) -> Any:
        """Returns (score: RewardItems -> RewardResult, the items of rewards.items_of, the first of them).

        Raises NotApplicable without reward functions that run in workers, or without readable data."""
        if self._reason is None and self._ready is None:
            try:
                self._ready = self._open()
            except NotApplicable as e:
                self._reason = e
        if self._reason is not None:
            raise self._reason
        return self._ready

    def _open(self):
        c = small_data(self.config)
        spec = resolve(c, engine="jax")
        handed = self.inputs.rewards if self.inputs is not None else None
        named = list(handed if handed is not None else spec.reward.functions)
        asked = [name for name in services.service_options(spec.reward) if name in named]
        named = [name for name in named if name not in asked]
        if not named:
            raise NotApplicable(f"services give them: {', '.join(asked)}" if asked else
                                "they come from episodes" if spec.episodes else "there are no reward functions")
        examples, tokenizer = self._rows(spec)
        prefix, c.reward.weights = spec.data.response_prefix, ()
        pool = self.stack.enter_context(RewardPool(resolve(c, engine="jax"), functions=named))

        def item(example, text: str, i: int) -> RewardItem:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return RewardItem(prompt=example.prompt, completion=prefix + text, token_ids=ids, group=i,
                              context_ids=np.asarray(example.prompt_ids).tolist(), functions=example.rewards,
                              columns={"answer": example.answer, **example.columns})

        items = rewards.items_of(examples, item)
        return lambda some: pool.score(some, part=True), items, items[0]

    def _rows(self, spec):
        try:
            tokenizer = jaxrl_data.load_tokenizer(spec)
            dataset = jaxrl_data.load_train(spec, tokenizer, tokenizer.eos_token_id, self.inputs and self.inputs.data)
        except (ConfigError, OSError) as e:
            raise NotApplicable(f"the data cannot be read here: {str(e)[:200]}") from None
        return [dataset[i] for i in range(min(ROWS, len(dataset)))], tokenizer


def small_data(config):
    """Returns the config limited to its first MOST_ROWS rows, with the tokenizer of its warm start if it names neither
    tokenizer nor model."""
    c = editable(config)
    c.data.max_rows = min(c.data.max_rows or MOST_ROWS, MOST_ROWS)
    if c.run.warm_start and not (c.model.tokenizer or c.model.path):
        first = load_config(c.run.warm_start)
        c.model.tokenizer = first.model.tokenizer or first.model.path
    return c


def of_rewards(opened: Rewards) -> dict:
    """Returns the name of a claim -> the function that tests it, for the opened Rewards."""
    return {"reward_twice": lambda: rewards.twice(*opened.ready()[:2]),
            "reward_columns": lambda: rewards.columns(*opened.ready()[:2]),
            "reward_rows": lambda: rewards.rows(*opened.ready()[:2]),
            "reward_hostile": lambda: rewards.hostile(opened.ready()[0], opened.ready()[2])}
