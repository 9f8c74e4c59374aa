"""Sums of completions' log-probs for preference losses; those of the frozen reference are computed once and cached.

recipes.preference calls it. Losses of these sums are in algorithms.preference.
"""

from __future__ import annotations

import hashlib
import json
import logging

import numpy as np

from jaxrl.checkpoint.fingerprints import reference_print
from jaxrl.models import adapters
from jaxrl.processes.exchange import gather
from jaxrl.roles.reference import Reference

log = logging.getLogger("jaxrl")
KEY = 16  # bytes of a completion's key
RECORD = np.dtype([("key", f"V{KEY}"), ("sum", "<f8"), ("check", "V8")])  # check: digest of key and sum


def logprob_sums(role, traj, layout) -> np.ndarray:
    """Returns [N] float64: the sum of each completion's log-probs under a role's parameters, in nats.

    The sum is over the loss tokens of a trajectory and is not divided by their number. Collective (Role.score)."""
    return traj.total(role.score(traj, layout).astype(np.float64))


def completion_keys(traj) -> list[bytes]:
    """Returns [N] keys of 16 bytes: a BLAKE2b hash of prompt length, token ids and images of each trajectory.

    Another text, template, tokenizer or picture gives another key. Each trajectory must be one sequence."""
    out, shown = [], traj.pictures and traj.pictures.digests(traj.num_sequences)
    for i, prompt in enumerate(traj.prompt_lengths):
        ids = traj.tokens[traj.offsets[i]:traj.offsets[i + 1]].astype("<i4")
        whole = int(prompt).to_bytes(8, "little") + ids.tobytes() + (shown[i] if shown else b"")
        out.append(hashlib.blake2b(whole, digest_size=KEY).digest())
    return out


class SharedBaseReference(Reference):
    """The reference of a policy that trains adapters from its frozen base: that base, without a second copy.

    `policy` must be set before its parameters are read (ReferenceSums does)."""

    def __init__(self, job, score):
        super().__init__(job, score)
        self.device_role = "policy"

    def start(self, arrays, host) -> None:
        """Does nothing: the policy has the parameters."""

    def rest(self) -> None:
        """Does nothing: the policy moves the parameters."""

    def params(self):
        """Returns the policy's parameters without adapters (nested tree), on its devices."""
        return adapters.without(self.policy.params())


class ReferenceSums:
    """Log-prob sums under the frozen reference: `sums(traj, layout, policy)` is [N] float64 in nats, at temperature 1.

    Every sum is stored in <run.dir>/reference/<digest>.bin as a completion's key, its sum and a digest of both. The
    file's name is a digest of the reference (weights, model config, dtypes), so another reference has another file. The
    model is loaded when a sum is missing, and freed once a call finds none missing. Collective.

    Args:
      s: the Session: its run_dir, processes and run.mode; only run.mode=train writes the file.
      job: run.setup.Job. score: (params, traj, layout) -> [T] float32 log-probs (nats) at temperature 1.
    """

    def __init__(self, s, job, score):
        c = job.config
        self.own = job.model.adapter is not None and not c.reference.path
        self.s = s
        self.role: Reference = (SharedBaseReference if self.own else Reference)(job, score)
        parts = [reference_print(c), job.hf_config, c.reference.dtype, c.train.compute_dtype]
        parts += [c.lora.base, c.lora.base_dtype] if self.own else []
        parts += ["checked"]  # earlier files have no check
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.path = s.run_dir / "reference" / f"{digest}.bin"
        self.known: dict[bytes, float] = {}
        self._is_read = False

    def __call__(self, traj, layout, policy) -> np.ndarray:
        """Returns [N] float64 sums in nats. policy: the role that trains, whose base the reference may be."""
        self.role.policy = policy
        if not self._is_read:
            self.known, self._is_read = self._read(), True
        keys = completion_keys(traj)
        missing = [i for i, key in enumerate(keys) if key not in self.known]
        if missing:
            self._score(traj, layout, keys, missing)
        else:
            self.role.state = None
        return np.array([self.known[key] for key in keys])

    def _score(self, traj, layout, keys, missing) -> None:
        """Scores all completions of the batch if one is missing, in the policy's layout, so that a policy equal to the
        reference has equal sums. Known sums stay."""
        if self.role.state is None and self.role.job.here("reference"):
            self.role.start(None, None)
        found = logprob_sums(self.role, traj, layout)
        self.role.rest()
        new = {keys[i]: float(found[i]) for i in missing}
        self.known |= new
        if self.s.peers.first and self.s.spec.run.mode == "train":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as f:
                f.write(np.array([(key, x, _check(key, x)) for key, x in new.items()], RECORD).tobytes())

    def _read(self) -> dict[bytes, float]:
        """Reads the sums on process 0's disk. Truncated and damaged records are dropped and computed again."""
        data = b""
        if self.s.peers.first and self.path.exists():
            data = self.path.read_bytes()
            if len(data) % RECORD.itemsize:
                data = data[:len(data) - len(data) % RECORD.itemsize]
                with self.path.open("r+b") as f:
                    f.truncate(len(data))
        found = np.frombuffer(gather(self.s.peers, "sums of the reference", data)[0], RECORD)
        known = [(bytes(key), float(x)) for key, x, check in found.tolist() if check == _check(key, x)]
        if len(known) < len(found) and self.s.peers.first:
            log.warning("%s: %d of %d sums are damaged and are computed again", self.path,
                        len(found) - len(known), len(found))
        return dict(known)


def _check(key: bytes, value: float) -> bytes:
    return hashlib.blake2b(bytes(key) + np.float64(value).astype("<f8").tobytes(), digest_size=8).digest()
