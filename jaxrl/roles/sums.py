"""Sums of answers' log-probs, and those of a frozen reference, each computed once in a run."""

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
KEY = 16  # bytes of an answer's key
RECORD = np.dtype([("key", f"V{KEY}"), ("sum", "<f8"), ("check", "V8")])  # check: of the two before it


def sums_of(role, traj, layout) -> np.ndarray:
    """[N] sums of the answers' log-probs under a role's parameters, in nats, float64."""
    return traj.total(role.score(traj, layout).astype(np.float64))


def keys_of(traj) -> list[bytes]:
    """Of each answer (a trajectory of one sequence) a hash of its prompt's and its own token ids: what text, template
    and tokenizer come to."""
    out = []
    for i, prompt in enumerate(traj.prompt_lengths):
        ids = traj.tokens[traj.offsets[i]:traj.offsets[i + 1]].astype("<i4")
        out.append(hashlib.blake2b(int(prompt).to_bytes(8, "little") + ids.tobytes(), digest_size=KEY).digest())
    return out


class OwnBase(Reference):
    """The reference of a policy that begins as its frozen base and trains adapters: that base, with no second copy."""

    policy = None  # a Role; ReferenceSums sets it

    def __init__(self, job, score):
        super().__init__(job, score)
        self.place = "policy"

    def start(self, arrays, host) -> None:
        """There is nothing to load."""

    def rest(self) -> None:
        """Nor to move."""

    def params(self):
        return adapters.without(self.policy.params())


class ReferenceSums:
    """Sums under the frozen reference: `sums(traj, layout, policy)` is [N] in nats, float64, at temperature 1.

    Every sum is kept in <run.dir>/reference/<digest>.bin, records of an answer's key, its sum and a digest of both. The
    file's digest is of the reference: its weights, model config and dtypes; sums of another one lie in another file.
    The model is loaded when a sum is missing, and let go once a call found none missing.
    """

    def __init__(self, s, job, score):
        c = job.config
        self.own = job.model.adapter is not None and not c.reference.path
        self.s, self.role = s, (OwnBase if self.own else Reference)(job, score)
        said = [reference_print(c), job.hf_config, c.reference.dtype, c.train.compute_dtype]
        said += [c.lora.base, c.lora.base_dtype] if self.own else []
        said += ["checked"]  # files of before have no check
        digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.path = s.run_dir / "reference" / f"{digest}.bin"
        self.known = None

    def __call__(self, traj, layout, policy) -> np.ndarray:
        """policy: the role that trains, of which the reference may be the base."""
        self.role.policy = policy
        if self.known is None:
            self.known = self._read()
        keys = keys_of(traj)
        missing = [i for i, key in enumerate(keys) if key not in self.known]
        if missing:
            self._score(traj, layout, keys, missing)
        else:
            self.role.state = None
        return np.array([self.known[key] for key in keys])

    def _score(self, traj, layout, keys, missing) -> None:
        """All answers are scored where one is missing, in the layout that they have anyway: as the policy is, so that a
        policy that is the reference has the same sums. What is known stays."""
        if self.role.state is None and self.role.job.here("reference"):
            self.role.start(None, None)
        found = sums_of(self.role, traj, layout)
        self.role.rest()
        new = {keys[i]: float(found[i]) for i in missing}
        self.known |= new
        if self.s.peers.first and self.s.spec.run.mode == "train":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as f:
                f.write(np.array([(key, x, _check(key, x)) for key, x in new.items()], RECORD).tobytes())

    def _read(self) -> dict[bytes, float]:
        """What process 0 finds on its disk; a record that was cut off by the end of its process is dropped, and so is
        one that is not what was written: its answer is scored anew."""
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
            log.warning("%s: %d of %d sums are not what was written and are computed anew", self.path,
                        len(found) - len(known), len(found))
        return dict(known)


def _check(key: bytes, value: float) -> bytes:
    return hashlib.blake2b(bytes(key) + np.float64(value).astype("<f8").tobytes(), digest_size=8).digest()
