"""Records steps (record.*) for jaxrl.replay: turns a batch and its update into a record, and a record into a batch.

recipes.rl adds a Recording's `before_update` and `after_update` to rl.step.Loop; replay.* calls `restore_batch`. File
formats are in jaxrl.records. docs/guides/replay.md describes what a record contains and what it costs.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxrl
from jaxrl.config.load import editable, flat, redacted
from jaxrl.records import files, states
from jaxrl.rewards.items import RewardResult
from jaxrl.rl.rollouts import Batch
from jaxrl.telemetry.run_dir import jsonable
from jaxrl.types import Trajectories

log = logging.getLogger("jaxrl")
OF_TOKENS = ("tokens", "offsets", "loss_mask", "logprobs", "versions", "prompt_lengths", "group", "sample", "seed",
             "finish", "trajectory", "prefix")
OF_BATCH = ("shaped", "scores", "baseline", "dropped", "staleness")
SCHEDULE = ("group_size", "slots", "compaction", "decode_steps", "prompt_lengths", "cache_lengths", "timeout_seconds",
            "max_staleness", "sync_every", "partial", "servers", "placement", "verify_weights", "penalties_in_training")
COMPUTED = ("old", "ref", "advantage", "return", "old_value")  # columns that a step computes; others are its inputs


class Recording:
    """Records the steps of a run that record.* selects. Deletes, when it is made, the records of later steps than the
    run's, also without record.every; with it, writes the config there.

    Every process calls it. Process 0 writes in the thread that writes rollouts, before the step's checkpoint commits.

    Args:
      s, job: session and job. roles: rl.roles.Roles, whose states are hashed."""

    def __init__(self, s, job, roles):
        self.s, self.options, self.folder = s, job.config.record, s.run_dir / files.FOLDER
        self.roles, self.rewards, self._begun = roles, job.rewards, None
        self.header = {"jaxrl": jaxrl.__version__, "jax": jax.__version__, "engine": job.config.rollout.engine,
                       "total_steps": s.total_steps, "read": s.fingerprints, "sampling": sampling_options(s.spec)}
        self.bytes = self.tokens = self.steps = 0
        self._newest = (-1, None)  # (step, hashes of the states after it), with which the next step begins
        if s.peers.first:
            files.delete_after(self.folder, s.step)
            if self.options.every:
                self.header["config"] = files.write_config(self.folder, redacted(s.spec.asked))

    def is_due(self, step: int) -> bool:
        """Returns whether step number `step` (from 1) is recorded: the first and every record.every steps after it."""
        return bool(self.options.every) and (step - 1) % self.options.every == 0

    def hash_states(self) -> states.Look:
        """Digests the states that the step trains, on the device; dispatches programs and waits for none.

        Returns records.states.Look, whose hashes and sample are device arrays until its `on_host`.
        """
        return states.look_at(trained_states(self.roles), bool(self.s.spec.train.router_bias_rate))

    def before_update(self, batch, prepared) -> None:
        """Keeps the batch, its columns and the hashes before the update, if the step is recorded.

        batch: rl.rollouts.Batch. prepared: rl.step.Prepared.
        """
        self._begun = None
        if self.is_due(self.s.step + 1):
            before = self._newest[1] if self._newest[0] == self.s.step else self.hash_states()
            self._begun = {"batch": batch, "columns": prepared.columns, "seed": prepared.layout.seed, "before": before}

    def after_update(self, batch, metrics: dict) -> None:
        """Writes the record of a completed step in the thread of telemetry, if the step is recorded. A file that cannot
        be written is logged; the run continues.

        batch: not read; that of `before_update` is written. metrics: of the step, copied into the record.
        """
        s, begun = self.s, self._begun
        if begun is None:
            return
        after = self.hash_states()
        self._newest = (s.step, after)
        header = {**self.header, "metrics": dict(metrics), "epoch": s.stream.epoch(s.progress.cursor),
                  "layout_seed": begun["seed"], "functions": self.rewards.keys()}
        if s.peers.first:
            step = s.step
            s.telemetry.aside(lambda: self._write(step, header, begun, after))

    def _write(self, step: int, header: dict, begun: dict, after) -> None:
        batch, before, after = begun["batch"], begun["before"].on_host(), after.on_host()
        arrays = batch_arrays(batch) | {f"column/{n}": begun["columns"][n] for n in COMPUTED if n in begun["columns"]}
        for when, look in (("before", before), ("after", after)):
            arrays |= {f"state/{when}": look.hashes, f"state/sample_{when}": look.sample}
        header = {**header, **batch_header(batch), "states": before.names}
        try:
            self.bytes += files.write(self.folder, files.Record(step, jsonable(header), arrays))
        except OSError as e:
            log.error("step %d is not recorded: %s: %s; this and later steps cannot be replayed from an earlier "
                      "checkpoint; free the disk or set record.last", step, self.folder, e.strerror)
            return
        self.tokens, self.steps = self.tokens + len(batch.traj.tokens), self.steps + 1
        files.keep_newest(self.folder, self.options.last)

    def summary(self) -> dict:
        """Returns the entry `record` of summary.json: steps, bytes and tokens that this process wrote, bytes per token;
        {} if it wrote none."""
        if not self.steps:
            return {}
        return {"record": {"steps": self.steps, "bytes": self.bytes, "tokens": self.tokens,
                           "bytes_per_token": round(self.bytes / max(self.tokens, 1), 2)}}


def trained_states(roles) -> dict:
    """Returns the TrainStates that a step changes, by name: the policy, and a critic with its own trunk."""
    critic = roles.critic
    return {"policy": roles.policy.state} | ({} if critic is None or critic.shared else {"critic": critic.state})


def sampling_options(spec) -> dict:
    """Returns the resolved options that a completion depends on, beyond weights, prompt and seed, as name -> value.

    Options of when and where it is sampled (SCHEDULE) are left out: they change it by rounding alone.
    """
    options = flat(redacted(editable(spec)))
    of_vllm = "rollout.vllm."
    names = [n for n in options
             if n.startswith("rollout.") and n.removeprefix("rollout.").split(".")[0] not in SCHEDULE
             and (not n.startswith(of_vllm) or n.startswith(f"{of_vllm}engine_kwargs"))]
    names += ["train.compute_dtype", "train.max_sequence_tokens", "lora.publish"]
    return {name: options[name] for name in names}


def batch_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Returns the host arrays of a batch under their names in a record: traj/*, token/*, batch/*, reward/*."""
    traj = batch.traj
    out = {f"traj/{name}": getattr(traj, name) for name in OF_TOKENS}
    out |= {f"token/{name}": x for name, x in traj.columns.items()}
    out |= {f"batch/{name}": x for name in (*OF_BATCH, "addresses") if (x := getattr(batch, name)) is not None}
    return out | {"reward/": batch.result.total} | {f"reward/{name}": x for name, x in batch.result.parts.items()}


def batch_header(batch: Batch) -> dict:
    """Returns the parts of a batch that are not arrays, as a JSON-able dict.

    "asked" and "cursor"; "rewards", names of the parts; "by", the result's; per completion "sources", "outcomes" other
    than "ok", and "noted", its metrics by function.
    """
    return {"asked": batch.asked, "cursor": batch.cursor, "rewards": list(batch.result.parts), "by": batch.result.by,
            "sources": [getattr(g.example, "source", "") for g in batch.groups],
            "outcomes": [{name: text for name, text in own.items() if text != "ok"} for own in batch.result.outcomes],
            "noted": batch.result.item_metrics}


class Source(NamedTuple):
    """Stands for the Example of a recorded prompt; an update reads only its data source."""

    source: str


class Group(NamedTuple):
    """Stands for the queue.PromptGroup of a recorded completion; an update reads only its example."""

    example: Any


def restore_batch(record) -> Batch:
    """Rebuilds the Batch of a recorded step, with the fields that its update reads: without texts, images and metrics.
    record: records.files.Record."""
    traj, tokens, reward = record.part("traj"), record.part("token"), record.part("reward")
    fields = {field.name for field in dataclasses.fields(Trajectories)}
    parts = {name: reward[name] for name in record.header["rewards"]}
    recorded = list(enumerate(record.header["outcomes"]))  # without those that are "ok"
    outcomes = [{n: own.get(n, "ok") for n, x in parts.items() if n in own or np.isfinite(x[i])} for i, own in recorded]
    batch = {name: record.arrays.get(f"batch/{name}") for name in OF_BATCH}
    return Batch(traj=Trajectories(**{name: x for name, x in traj.items() if name in fields}, columns=tokens),
                 groups=[Group(Source(name)) for name in record.header["sources"]], texts=[],
                 result=RewardResult(reward[""], parts, outcomes, record.header["noted"], {}, record.header["by"]),
                 asked=record.header["asked"], cursor=record.header["cursor"], metrics={}, pass_rates={}, **batch)
