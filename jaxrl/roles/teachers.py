"""Teachers of distillation: models that give target log-probs for a batch's loss tokens. Three with one interface:

    targets(traj, layout, student)   token columns [T, ...] for the loss (see training.Distillation), or "teacher" [T],
                                     the log-probs of the tokens themselves. student() -> [T, K], its most probable ids
    head()                           parameters that the loss reads in addition to the student's
    close()

local: a model on devices of the run (mesh.roles.teacher); only it can give the whole distribution, and log-probs of
tokens that the student chose. servers: vLLM's log-probs of prompts. files: outputs saved by teacher.save.
recipes.distill calls them.
"""

from __future__ import annotations

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import data as jaxrl_data
from jaxrl import models, sharding, training
from jaxrl.config.lengths import longest_sequence, made_of
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io import hf
from jaxrl.processes.exchange import decode, encode, gather
from jaxrl.processes.group import peers
from jaxrl.resolve.checks.distill import teacher_kind
from jaxrl.resolve.spec import SHALLOW
from jaxrl.roles import parameters, towers
from jaxrl.roles.role import Role
from jaxrl.roles.teacher_files import TeacherFiles
from jaxrl.rollout.vllm.scoring import PromptScorer
from jaxrl.sharding import memory
from jaxrl.training.distillation import TEACHER


def needed_part(config) -> str:
    """Returns which part of a teacher's distribution the loss needs.

    "hidden" (all of it), "top" (its most probable tokens), "at" (log-probs of the student's most probable tokens) or
    "logprob" (log-probs of the sequence's own tokens).
    """
    d = config.distill
    if d.loss == "sampled":
        return "logprob"
    return "hidden" if not d.top_k else "top" if d.loss == "forward" else "at"


def check(config, tokenizer, images=None) -> None:
    """Raises ConfigError, before the model is loaded, for a teacher that cannot be read, has another vocabulary or
    takes shorter sequences than the run's, and for files that do not fit (TeacherFiles). Servers are not asked.

    tokenizer: the student's. images: the ImageSource of a job whose rows hold images, which the teacher sees, too."""
    t = config.teacher
    if teacher_kind(config) == "files":
        TeacherFiles(t.files, vocabulary(tokenizer), config.distill)
        return
    own = config.asked.copy_and_resolve_references()
    plain = {"path": t.path, "revision": t.revision, "tokenizer": "", "tokenizer_revision": None, "chat_template": "",
             "pad_token": "", "eos_tokens": ()}
    for name, value in plain.items():
        own.model[name] = value
    try:
        check_vocabulary(tokenizer, jaxrl_data.load_tokenizer(own, "teacher.path"), t.path)
        if teacher_kind(config) == "local":
            described = towers.read_tower_config(parameters.source_of(t.path), t.revision, images)
            table = models.build(described, compute_dtype=jnp.float32, scan_layers=True)
            table.check_length(longest_sequence(config))
            hf.check_weights(table, parameters.source_of(t.path), t.revision)
    except ConfigError as e:
        raise hf.error_of("teacher.path", t.path, e) from None


def check_vocabulary(student, teacher, name: str) -> None:
    """Raises ConfigError unless two tokenizers map the same tokens to the same ids.

    Their models may have different numbers of padded ids. name: teacher.path, for the message.
    """
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    if mine == theirs:
        return
    other = sorted(t for t in mine.keys() & theirs.keys() if mine[t] != theirs[t])
    only = sorted(mine.keys() ^ theirs.keys())
    example = f"{other[0]!r} is {mine[other[0]]} here and {theirs[other[0]]} there" if other else \
        f"{only[0]!r} is in one of them alone"
    raise ConfigError(f"its tokenizer is not the student's: {len(other)} tokens have other ids and {len(only)} are in "
                      f"one of them alone ({example}). Distributions over different tokens cannot be compared; have "
                      "the teacher write completions and train on its text (run.recipe=sft), or take a student of its "
                      "family")


def vocabulary(tokenizer) -> str:
    """Returns a fingerprint of a tokenizer's map from tokens to ids, 16 hex digits."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def open_teacher(job):
    """Opens the teacher of the config: LocalTeacher, ServerTeacher or FileTeacher.

    Raises ConfigError if its files do not fit the student (TeacherFiles), if a local one is too short for the run's
    sequences or has fewer tokens than distill.top_k, or if a server does not reply, is too short, or serves another
    model than the others (PromptScorer)."""
    return {"local": LocalTeacher, "servers": ServerTeacher, "files": FileTeacher}[teacher_kind(job.config)](job)


class LocalTeacher(Role):
    """A frozen teacher on devices of the run (mesh.roles.teacher), in teacher.dtype; its weights are loaded when it is
    made.

    Raises ConfigError if its positions do not reach the run's longest sequence, or if distill.top_k exceeds the ids
    that teacher and student share.

    Attributes:
      wants: part of its distribution that the loss needs (`needed_part`).
      vocab: number of ids that both models have.
    """

    def __init__(self, job):
        super().__init__("teacher", job)
        c = job.config
        self.options, self.wants = c.teacher, needed_part(c)
        source = parameters.source_of(self.options.path)
        described = towers.read_tower_config(source, self.options.revision, job.images)
        unrolled = c.platform.kind == "cpu" and described.get("num_hidden_layers", 0) <= SHALLOW
        self.model = models.build(described, compute_dtype=job.compute_dtype, scan_layers=not unrolled,
                                  attention=c.model.attention, experts=c.model.experts,
                                  recurrence=c.model.recurrence, ring=c.model.ring_attention)
        if beyond := self.model.config.beyond(c.longest, made_of(c)):
            raise ConfigError(f"teacher.path={self.options.path!r}: {beyond}")
        self.vocab = min(self.model.config.vocab_size, job.model.config.vocab_size)
        with self.on():
            where = parameters.param_shardings(job, tree=self.model, role=self.device_role)
            dtype = parameters.DTYPES[self.options.dtype]
            self.state = hf.load_params(self.model, source, self.options.revision, where, dtype)
        top = c.distill.top_k if self.wants == "top" else 0
        if top > self.vocab:
            raise ConfigError(f"distill.top_k={top}: the teacher has {self.vocab} tokens; lower it, or set 0 for all")
        self._read = training.make_reader(
            self.model, temperature=c.distill.teacher_temperature, chunk=c.train.logprob_chunk, put=self.put, top=top,
            hidden=self.wants == "hidden")
        self.rest()

    def targets(self, traj, layout, student) -> dict[str, np.ndarray]:
        """Returns the token columns of the loss, each at loss tokens; log-probs are in nats at
        distill.teacher_temperature.

        Args:
          traj: Trajectories of T tokens. layout: how they are packed.
          student: () -> [T, K] int32 ids of the student's most probable tokens; called only if `wants` is "at".

        Returns:
          By `wants`:
            "hidden"       {"teacher_hidden": [T, D] the states that predict the tokens, in the compute dtype}
            "logprob"      {"teacher": [T] float32, of the tokens themselves}
            "top", "at"    {"teacher_ids": [T, K] int32, -1 for ids that one model lacks,
                            "teacher_logprobs": [T, K] float32}

        Raises RunStopped for a token that the teacher has no id for."""
        if (beyond := int(traj.tokens.max())) >= (size := self.model.config.vocab_size):
            raise RunStopped(f"the student wrote the token {beyond}, one of its padded ids that no text has; the "
                             f"teacher's model ends at {size - 1}. Train the student on text first (run.recipe=sft), "
                             "or take a teacher with as many ids")
        at = student() if self.wants == "at" else None
        with self.on():
            found = self._read(self.params(), traj, layout, None if at is None else {"at": self._known(at)})
        if self.wants == "hidden":
            return {"teacher_hidden": found["hidden"]}
        if self.wants == "logprob":
            return {"teacher": found["logprob"]}
        if self.wants == "at":
            return {"teacher_ids": self._known(at), "teacher_logprobs": found["chosen"]}
        return {"teacher_ids": self._known(found["ids"]), "teacher_logprobs": found["logprobs"]}

    def _known(self, ids):
        """Returns ids that both models have; -1 for the others, whose probability then counts to the tail."""
        return np.where(ids < self.vocab, ids, -1).astype(np.int32)

    def head(self) -> dict[str, jax.Array]:
        """Returns {parameter name: output matrix} for a divergence over the whole vocabulary; {} for other losses.

        The matrix is as wide as the student's: cut, or padded with zeros. It is on the policy's devices, where the
        divergence is computed."""
        if self.wants != "hidden":
            return {}
        tied, job = self.model.config.tied, self.job
        outer, inner = ("embed", "embedding") if tied else ("head", "kernel")
        axes = next(entry.axes for entry in self.model.entries if entry.path == (outer, inner))
        axis, size = 0 if tied else 1, job.model.config.vocab_size

        def fitted(weight):
            weight = jax.lax.slice_in_dim(weight, 0, min(size, weight.shape[axis]), axis=axis)
            pad = [(0, size - weight.shape[axis] if i == axis else 0) for i in range(2)]
            return jnp.pad(weight, pad)

        with self.on():
            weight = jax.jit(fitted)(self.params()[outer][inner])
        shape = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        where = sharding.param_shardings(job.mesh, {"head": axes}, {"head": shape}, sharding.TRAIN_RULES)["head"]
        return {f"{TEACHER}/{outer}/{inner}": memory.moved(weight, where)}

    def close(self) -> None:
        """Drops the parameters."""
        self.state = None


class ServerTeacher:
    """A teacher on vLLM servers, which return log-probs of a prompt's tokens and of the most probable tokens.

    `targets`, `head` and `close` are those of a LocalTeacher; it has no part "hidden" or "at".

    Raises ConfigError for a server that does not reply, has another model than the others, or takes shorter sequences
    only (PromptScorer)."""

    def __init__(self, job):
        c = job.config
        self.wants, self.top, self.vocab = needed_part(c), c.distill.top_k, job.model.config.vocab_size
        self._scorer = PromptScorer(c.teacher.servers, c.teacher.timeout_seconds, c.longest)

    def head(self) -> dict:
        """Returns {}: servers have their own head."""
        return {}

    def targets(self, traj, layout, student) -> dict[str, np.ndarray]:
        """Returns the token columns of the loss; process 0 requests them and sends them to the others. Collective.

        For the loss "sampled" it is {"teacher": [T] float32 log-probs of the tokens themselves, 0 except at loss
        tokens}; else, at all tokens, {"teacher_ids": [T, K] int32, -1 = none or unknown to the student;
        "teacher_logprobs": [T, K] float32, 0 = none}. Log-probs are in nats at temperature 1. layout and student are
        not read.

        Raises RunStopped if a server fails repeatedly or refuses a request (PromptScorer.score)."""
        sent = b""
        if peers().first:
            sent = encode(None, self._request(traj))
        return decode(gather(peers(), "what the teacher's servers say", sent)[0])[1]

    def _request(self, traj) -> dict[str, np.ndarray]:
        count = len(traj.tokens)
        sequences = np.split(traj.tokens, traj.offsets[1:-1])
        scored = self._scorer.score(sequences, self.top if self.wants == "top" else 0)
        if self.wants == "logprob":
            own = np.concatenate([s.own for s in scored])
            return {"teacher": np.where(traj.loss_mask, own, 0).astype(np.float32)}
        ids, logprobs = np.full((count, self.top), -1, np.int32), np.zeros((count, self.top), np.float32)
        for start, one in zip(traj.offsets, scored, strict=False):
            ids[start:start + len(one.ids)], logprobs[start:start + len(one.ids)] = one.ids, one.logprobs
        return {"teacher_ids": np.where(ids < self.vocab, ids, -1).astype(np.int32), "teacher_logprobs": logprobs}

    def close(self) -> None:
        """Closes the clients of the servers."""
        self._scorer.close()


class FileTeacher:
    """A teacher whose outputs for the same rows were saved with teacher.save. Raises ConfigError for files that do not
    fit (TeacherFiles)."""

    def __init__(self, job):
        c = job.config
        self._files, self.vocab = TeacherFiles(c.teacher.files, vocabulary(job.tokenizer), c.distill), 0

    def head(self) -> dict:
        """Returns {}: saved outputs need no head."""
        return {}

    def targets(self, traj, layout, student) -> dict[str, np.ndarray]:
        """Returns the token columns of the loss from the files: teacher_ids [T, K] int32 (-1 = none) and
        teacher_logprobs [T, K] float32 (nats), K = distill.top_k. layout and student are not read.

        Raises ConfigError if the files lack a sequence of the batch."""
        return self._files.columns(traj)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()
