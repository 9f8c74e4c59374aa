"""Samples from versions of the adapter, and scores prompts under them.

A version is a copy of an adapter's leaves in host memory, under a name; BASE is the model without an adapter. The
engine holds one version at a time. Versions with waiting jobs take turns of about `turn` samples; within a version jobs
are served in their order.

Knows values only, as service.trainer. Called by service.worker, from one thread.

Legend: P prompt tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import deque
from typing import Any

import numpy as np

from jaxrl import training
from jaxrl.rollout.protocol import Request, SamplingParams
from jaxrl.service.refusals import Refused
from jaxrl.types import Pictures, Trajectories

log = logging.getLogger("jaxrl")
BASE = ""  # name of the version without an adapter
ENDS = 16  # end tokens that one request may have


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A request of several samples of one prompt.

    Attributes:
      id: unique among unfinished ones. version: name of the weights.
      prompt: [P] int32. count: samples. params: of each; its stop_token_ids are all of the end tokens.
      seed: decides all samples; None = drawn from the id, so that the same request gives the same samples.
      scores: return log-probs of the prompt. last: of its last tokens alone; None = of all.
      pictures: the prompt's images; None = there is none.
      future: gets (samples, prompt log-probs [P] float32 in nats, NaN where there is none, or None), or an exception. A
        sample is (tokens, log-probs, finish reason).
      samples, logprobs, missing: the result so far, and how many samples it lacks.
    """

    id: str
    version: str
    prompt: np.ndarray
    count: int
    params: SamplingParams
    seed: int | None
    scores: bool
    last: int | None
    pictures: Pictures | None
    future: Any
    samples: list = dataclasses.field(default_factory=list)
    logprobs: np.ndarray | None = None
    missing: int = 0


def sample_seed(seed: int | None, job: str, index: int) -> int:
    """Returns the seed (uint32) of one sample, a hash of the given seed, or else of the job's id, and the index.

    The first one of a given seed has that seed itself (modulo 2^32).

    seed: of the request, or None. job: its id. index: of the sample, from 0."""
    if seed is not None and index == 0:
        return seed % 2**32
    text = f"{job if seed is None else seed}\0{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Sampler:
    """Jobs in their order, the versions they need, and the engine.

    Args:
      engine: rollout.protocol.Engine made without end tokens of its own.
      read: training.make_reader's function: (params, traj, layout) -> {"logprob": [T] float32, nats}.
      row_shapes: RowShapes of the rows that score prompts.
      params: leaves of a version -> parameter tree.
      base: leaves of BASE.
      turn: samples that are begun at a time, and of a version while jobs of another one wait.

    Attributes:
      versions: name -> leaves of each version that is kept; `keep` and `forget` change it.
    """

    def __init__(self, engine, read, row_shapes, params, base, turn: int = 64):
        self.engine, self.read, self.row_shapes, self.params = engine, read, row_shapes, params
        self.versions: dict[str, dict] = {BASE: base}
        self._waiting: deque[SampleJob] = deque()
        self._running: dict[str, SampleJob] = {}  # by the id of the engine's request
        self._published: str | None = None
        self._count = self._begun = 0  # begun: samples in the turn of the published version
        self.turn = turn
        self._turns: dict[str, int] = {}  # version -> number of its latest turn
        self._tree: Any = None

    @property
    def busy(self) -> bool:
        """Whether there are unfinished jobs."""
        return bool(self._waiting or self._running)

    def keep(self, name: str, leaves: dict) -> None:
        """Adds a version, or replaces one that no job samples from at present.

        name: of the version. leaves: flat name -> array of the largest rank, in host memory."""
        self.versions[name] = leaves
        if self._published == name:
            self._published = None

    def needed(self) -> set[str]:
        """Returns the versions that unfinished jobs sample from."""
        return {job.version for job in (*self._waiting, *self._running.values())}

    def forget(self, name: str) -> None:
        """Drops a version; jobs that wait for it are refused (410) when their turn comes."""
        self.versions.pop(name, None)
        self._turns.pop(name, None)

    def submit(self, job: SampleJob) -> None:
        """Queues a job; `work` begins it."""
        self._waiting.append(job)

    def work(self, seconds: float) -> None:
        """Begins waiting jobs of one version, then takes samples from the engine for up to about `seconds`.

        A version is published, and its prompts are scored, once no job of another one runs. Raises what engine or
        scorer raise; `fail` has to be called then."""
        self._admit()
        for result in self.engine.poll(seconds) if self._running else ():
            self._finish(result)

    def cancel(self, job_id: str) -> None:
        """Ends a job that nobody waits for any more: its future gets a Refused (422). An unknown id changes nothing."""
        if mine := [key for key, job in self._running.items() if job.id == job_id]:
            self.engine.abort(mine)
        for job in {job for job in (*self._waiting, *self._running.values()) if job.id == job_id}:
            if not job.future.done():
                job.future.set_exception(Refused(422, "asample: the client cancelled it"))
        self._waiting = deque(job for job in self._waiting if job.id != job_id)
        self._running = {key: job for key, job in self._running.items() if job.id != job_id}

    def fail(self, error: Exception) -> None:
        """Ends all jobs with an error, after `work` has raised one."""
        jobs = {*self._waiting, *self._running.values()}
        self._waiting.clear()
        self._running.clear()
        self._published = None
        try:
            self.engine.abort()
            self.engine.poll(0.0)
        except Exception as e:  # such as servers that are lost: later jobs are told so
            log.warning("service: the sampler cannot be emptied: %s", e)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def _admit(self) -> None:
        """Takes waiting jobs of one version: scores their prompts, and submits their samples.

        While jobs run these are of their version; else of the one whose turn was longest ago. A turn ends once it has
        `turn` samples and another version waits.
        """
        waiting = dict.fromkeys(job.version for job in self._waiting)
        if not waiting:
            return
        if not self._running:
            version, self._begun = min(waiting, key=lambda name: self._turns.get(name, -1)), 0
        elif self._published in waiting:
            version = self._published
        else:
            return
        jobs: list[SampleJob] = []
        running = len(self._running)
        for job in [job for job in self._waiting if job.version == version]:
            if running >= self.turn or self._begun >= self.turn and len(waiting) > 1:
                break
            jobs.append(job)
            self._begun, running = self._begun + job.count, running + job.count
        if not jobs:
            return
        taken = set(jobs)
        self._waiting = deque(job for job in self._waiting if job not in taken)
        try:
            self._publish(version)
            self._score([job for job in jobs if job.scores])
        except Refused as e:
            for job in jobs:
                job.future.set_exception(e)
            return
        except Exception:
            self._waiting.extendleft(reversed(jobs))  # `fail` ends them
            raise
        for k, job in enumerate(jobs):
            requests = [Request(f"{job.id}/{i}", job.prompt, job.params, sample_seed(job.seed, job.id, i),
                                pictures=job.pictures)
                        for i in range(job.count)]
            try:
                self.engine.submit(requests)
            except ValueError as e:
                job.future.set_exception(Refused(422, f"asample: {e}"))
                continue
            except Exception:
                self._waiting.extendleft(reversed(jobs[k:]))  # `fail` ends them
                raise
            job.samples, job.missing = [None] * job.count, job.count
            self._running |= {request.id: job for request in requests}

    def _publish(self, version: str) -> None:
        if version not in self.versions:
            raise Refused(410, f"the weights {version!r} are no longer kept: save them again with a name "
                          "(save_weights_for_sampler), or sample from a newer version")
        if self._published != version:
            self._count += 1
            self._tree = self.params(self.versions[version])
            self.engine.publish(self._tree, self._count)
            self._published = version
            self._turns[version] = self._count

    def _score(self, jobs: list[SampleJob]) -> None:
        """Computes the log-probs of the prompts of jobs, packed into rows together."""
        long = [job for job in jobs if len(job.prompt) > 1]
        for job in jobs:
            job.logprobs = np.full(len(job.prompt), np.nan, np.float32)
        if not long:
            return
        traj = prompts([job.prompt for job in long], [job.pictures for job in long])
        layout = training.make_layout(traj.sizes, self.row_shapes, share_prompts=False)
        found = self.read(self._tree, traj, layout)["logprob"]
        for job, start in zip(long, traj.offsets, strict=False):
            first = 1 if job.last is None else len(job.prompt) - job.last
            job.logprobs = np.concatenate([np.full(first, np.nan, np.float32), found[start:][first:len(job.prompt)]])

    def _finish(self, result) -> None:
        job = self._running.get(result.id)  # until the result is in it, or `fail` would miss the job
        if job is None:
            return
        if (result.versions != self._count).any():
            versions = sorted(set(result.versions.tolist()))
            if not job.future.done():
                job.future.set_exception(Refused(
                    500, f"asample: the engine sampled from the weights {versions}, not from {self._count}, which were "
                    "asked for: nothing of it is answered"))
            del self._running[result.id]
            return
        index = int(result.id.rpartition("/")[2])
        job.samples[index] = (result.tokens, result.logprobs, result.finish)
        job.missing -= 1
        del self._running[result.id]
        if not job.missing and not job.future.done():
            job.future.set_result((job.samples, job.logprobs))


def prompts(tokens: list[np.ndarray], pictures) -> Trajectories:
    """Returns sequences as a ragged batch in which every token but the first is scored.

    tokens: [P] int ids of each sequence. pictures: the Pictures of each; None = it has none."""
    offsets = np.cumsum([0, *map(len, tokens)])
    mask, count = np.ones(offsets[-1], bool), len(tokens)
    mask[offsets[:-1]] = False
    zeros = np.zeros(offsets[-1], np.float32)
    return Trajectories(
        tokens=np.concatenate(tokens).astype(np.int32), offsets=offsets, loss_mask=mask, logprobs=zeros,
        versions=zeros.astype(np.int32) - 1, prompt_lengths=np.zeros(count, np.int32), group=np.arange(count),
        sample=np.zeros(count, np.int32), seed=np.zeros(count, np.uint32), finish=np.zeros(count, np.int8),
        pictures=Pictures.of(pictures, next(filter(None, pictures), None)))
