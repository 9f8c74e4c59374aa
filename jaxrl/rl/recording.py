"""Between a step and its record (jaxrl.replay): what is kept of a batch and of what came of it, and the batch made of
it again. docs/guides/replay.md says what is in a record and what it costs."""

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
COMPUTED = ("old", "ref", "advantage", "return", "old_value")  # columns that a step makes; what is not here is read


class Recording:
    """Records the steps of a run that record.* ask for. Every process calls it; process 0 writes, in the thread that
    writes rollouts, before the step's checkpoint counts."""

    def __init__(self, s, job, roles):
        self.s, self.options, self.folder = s, job.config.record, s.run_dir / files.FOLDER
        self.roles, self.rewards, self._begun = roles, job.rewards, None
        self.header = {"jaxrl": jaxrl.__version__, "jax": jax.__version__, "engine": job.config.rollout.engine,
                       "total_steps": s.total_steps, "read": s.read, "sampling": sampled_by(s.spec)}
        self.bytes = self.tokens = self.steps = 0
        self._newest = (-1, None)  # step and look behind it: what the next one begins with
        if s.peers.first:
            files.delete_after(self.folder, s.step)
            if self.options.every:
                self.header["config"] = files.write_config(self.folder, redacted(s.spec.asked))

    def due(self, step: int) -> bool:
        """Whether a step (from 1) is recorded: the first, and every so many behind it, which follow checkpoints."""
        return bool(self.options.every) and (step - 1) % self.options.every == 0

    def look(self):
        return states.look_at(states_of(self.roles), bool(self.s.spec.train.router_bias_rate))

    def before_update(self, batch, prepared) -> None:
        """Keeps what is known of this step before its update, where the step is recorded."""
        self._begun = None
        if self.due(self.s.step + 1):
            before = self._newest[1] if self._newest[0] == self.s.step else self.look()
            self._begun = {"batch": batch, "columns": prepared.columns, "seed": prepared.layout.seed, "before": before}

    def after_update(self, metrics: dict) -> None:
        """Writes the record of a step that is done and counts."""
        s, begun = self.s, self._begun
        if begun is None:
            return
        after = self.look()
        self._newest = (s.step, after)
        header = {**self.header, "metrics": dict(metrics), "epoch": s.stream.epoch(s.progress.cursor),
                  "layout_seed": begun["seed"], "functions": self.rewards.keys()}
        if s.peers.first:
            step = s.step
            s.telemetry.aside(lambda: self._write(step, header, begun, after))

    def _write(self, step: int, header: dict, begun: dict, after) -> None:
        batch, before, after = begun["batch"], begun["before"].on_host(), after.on_host()
        arrays = arrays_of(batch) | {f"column/{n}": begun["columns"][n] for n in COMPUTED if n in begun["columns"]}
        for when, look in (("before", before), ("after", after)):
            arrays |= {f"state/{when}": look.hashes, f"state/sample_{when}": look.sample}
        header = {**header, **header_of(batch), "states": before.names}
        try:
            self.bytes += files.write(self.folder, files.Record(step, jsonable(header), arrays))
        except OSError as e:
            log.error("step %d is not recorded: %s: %s; it and those behind it cannot be replayed from an earlier "
                      "checkpoint", step, self.folder, e.strerror)
            return
        self.tokens, self.steps = self.tokens + len(batch.traj.tokens), self.steps + 1
        files.keep_newest(self.folder, self.options.last)

    def told(self) -> dict:
        """For summary.json."""
        if not self.steps:
            return {}
        return {"record": {"steps": self.steps, "bytes": self.bytes, "tokens": self.tokens,
                           "bytes_per_token": round(self.bytes / max(self.tokens, 1), 2)}}


def states_of(roles) -> dict:
    """The states that a step changes, by name."""
    critic = roles.critic
    return {"policy": roles.policy.state} | ({} if critic is None or critic.shared else {"critic": critic.state})


def sampled_by(spec) -> dict:
    """The decided options that an answer depends on beside weights, prompt and seed, by name; not those (SCHEDULE) that
    say when and where it is sampled, which move it by rounding."""
    held = flat(redacted(editable(spec)))
    of_vllm = "rollout.vllm."
    names = [n for n in held if n.startswith("rollout.") and n.removeprefix("rollout.").split(".")[0] not in SCHEDULE
             and (not n.startswith(of_vllm) or n.startswith(f"{of_vllm}engine_kwargs"))]
    return {name: held[name] for name in (*names, "train.compute_dtype", "train.max_sequence_tokens", "lora.publish")}


def arrays_of(batch: Batch) -> dict[str, np.ndarray]:
    """What of a batch is arrays."""
    traj = batch.traj
    out = {f"traj/{name}": getattr(traj, name) for name in OF_TOKENS}
    out |= {f"token/{name}": x for name, x in traj.columns.items()}
    out |= {f"batch/{name}": x for name in (*OF_BATCH, "addresses") if (x := getattr(batch, name)) is not None}
    return out | {"reward/": batch.result.total} | {f"reward/{name}": x for name, x in batch.result.parts.items()}


def header_of(batch: Batch) -> dict:
    """What of it is not."""
    return {"asked": batch.asked, "cursor": batch.cursor, "rewards": list(batch.result.parts), "by": batch.result.by,
            "sources": [getattr(g.example, "source", "") for g in batch.groups],
            "outcomes": [{name: said for name, said in own.items() if said != "ok"} for own in batch.result.outcomes],
            "noted": batch.result.item_metrics}


class Source(NamedTuple):
    """Of a recorded prompt, what a step asks its row for."""

    source: str


class Group(NamedTuple):
    """Stands for a queue.PromptGroup."""

    example: Any


def batch_of(record) -> Batch:
    """The batch of a recorded step, as far as its update reads it."""
    traj, tokens, reward = record.part("traj"), record.part("token"), record.part("reward")
    held = {field.name for field in dataclasses.fields(Trajectories)}
    parts = {name: reward[name] for name in record.header["rewards"]}
    none = [{} for _ in reward[""]]
    batch = {name: record.arrays.get(f"batch/{name}") for name in OF_BATCH}
    return Batch(traj=Trajectories(**{name: x for name, x in traj.items() if name in held}, columns=tokens),
                 groups=[Group(Source(name)) for name in record.header["sources"]], texts=[],
                 result=RewardResult(reward[""], parts, none, none, {}, record.header["by"]),
                 asked=record.header["asked"], cursor=record.header["cursor"], metrics={}, pass_rates={}, **batch)
