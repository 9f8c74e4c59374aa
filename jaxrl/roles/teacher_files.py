"""Files of a teacher's outputs for given rows: its most probable tokens and their log-probs at every loss token.
recipes.distill writes them (teacher.save); roles.teachers.FileTeacher reads them (teacher.files).

A folder of safetensors files, each of which holds n sequences with t loss tokens in all:

    keys      uint8 [n, 16]    blake2b of the sequence's token ids (int32, little-endian), of its loss mask as bits and,
                               of one with images, what types.Pictures.digests returns
    offsets   int64 [n + 1]    where the loss tokens of each begin
    ids       int32 [t, K]     the highest first; -1 = none
    logprobs  float32 or float16 [t, K]

and, as text in its metadata: vocabulary (teachers.vocabulary), temperature, teacher (a name, for people), sha256 (of
the bytes of the four arrays, one after the other; checked when the file is opened). The key is a hash of token ids, so
another template, tokenizer, system prompt or picture gives another key; a missing key is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.errors import ConfigError

WIDTH = 16  # bytes of a key
ARRAYS = ("keys", "offsets", "ids", "logprobs")


def keys_of(traj) -> list[bytes]:
    """Returns the key of each sequence of a batch (Trajectories): 16 bytes of token ids, loss mask and images."""
    shown = traj.pictures.digests(traj.num_sequences) if traj.pictures is not None else [b""] * traj.num_sequences
    pieces = zip(traj.offsets, traj.offsets[1:], shown, strict=False)
    return [key(traj.tokens[a:b], traj.loss_mask[a:b], images) for a, b, images in pieces]


def key(tokens, mask, images: bytes = b"") -> bytes:
    """Returns the key of one sequence of n tokens, 16 bytes.

    tokens: [n] int ids. mask: [n] bool, its loss tokens. images: digest of its images (types.Pictures.digests)."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=WIDTH)
    digest.update(np.packbits(np.asarray(mask, bool)).tobytes() + images)
    return digest.digest()


def write(folder, name: str, traj, ids, logprobs, *, vocabulary: str, temperature: float, teacher: str) -> None:
    """Writes <folder>/<name>.safetensors, the file of one batch, atomically; creates the folder.

    Args:
      traj: Trajectories of T tokens.
      ids, logprobs: [T, K], most probable tokens (the highest first, -1 = none) and their log-probs in nats; the rows
        of loss tokens are stored, as int32 and float32.
      vocabulary: fingerprint of the tokenizer (teachers.vocabulary). temperature: of the log-probs. teacher: a name,
        for people. The three go into the metadata.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = list(zip(traj.offsets, traj.offsets[1:], strict=False))
    scored = [int(traj.loss_mask[a:b].sum()) for a, b in pieces]
    keys = b"".join(keys_of(traj))
    arrays = {"keys": np.frombuffer(keys, np.uint8).reshape(-1, WIDTH).copy(),
              "offsets": np.concatenate([[0], np.cumsum(scored)]).astype(np.int64),
              "ids": np.ascontiguousarray(ids[traj.loss_mask], np.int32),
              "logprobs": np.ascontiguousarray(logprobs[traj.loss_mask], np.float32)}
    about = {"vocabulary": vocabulary, "temperature": repr(float(temperature)), "teacher": teacher,
             "sha256": _digest(arrays[name] for name in ARRAYS)}
    path = folder / f"{name}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, about)
    os.replace(partial, path)


def _digest(arrays) -> str:
    out = hashlib.sha256()
    for array in arrays:
        out.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return out.hexdigest()


class TeacherFiles:
    """A folder of teacher files, all read and checked when it is made, and open until `close`.

    Args:
      folder: teacher.files.
      vocabulary: fingerprint of the student's tokenizer (teachers.vocabulary), which the files must have.
      options: config.distill, whose top_k and teacher_temperature the files must have.

    Raises:
      ConfigError: no file or an unreadable or damaged one, another vocabulary or temperature, fewer than top_k tokens.
    """

    def __init__(self, folder: str, vocabulary: str, options):
        self.folder, self.top = folder, options.top_k
        self._open, self._found = contextlib.ExitStack(), {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            try:
                file = self._open.enter_context(safe_open(path, "numpy"))
                about, keys, offsets = file.metadata() or {}, file.get_tensor("keys"), file.get_tensor("offsets")
                width, digest = file.get_slice("ids").get_shape()[1], _digest(map(file.get_tensor, ARRAYS))
            except (SafetensorError, OSError) as e:
                raise ConfigError(f"teacher.files={folder!r}: {path.name} is not what teacher.save writes ({e}); "
                                  "write it again") from None
            if about.get("sha256") != digest:
                raise ConfigError(f"teacher.files={folder!r}: {path.name} is damaged (its sha256 differs); restore it, "
                                  "or write it again with teacher.save")
            if about.get("vocabulary") != vocabulary:
                raise ConfigError(f"teacher.files={folder!r}: {path.name} is of a teacher with another vocabulary; its "
                                  "ids mean other tokens. Write it again with teacher.save for this tokenizer")
            if float(about.get("temperature", "nan")) != options.teacher_temperature:
                raise ConfigError(f"teacher.files={folder!r}: {path.name} was written at temperature "
                                  f"{about.get('temperature')}, not distill.teacher_temperature="
                                  f"{options.teacher_temperature}; set that, or write it again")
            if width < self.top:
                raise ConfigError(f"distill.top_k={self.top}: {path.name} in teacher.files={folder!r} holds {width} "
                                  "tokens; lower it, or write it again")
            for i, one in enumerate(keys):
                self._found[one.tobytes()] = file, int(offsets[i]), int(offsets[i + 1])
        if not self._found:
            raise ConfigError(f"teacher.files={folder!r}: no files there; write them with teacher.save")

    def columns(self, traj) -> dict[str, np.ndarray]:
        """Returns {"teacher_ids": [T, top_k] int32, "teacher_logprobs": [T, top_k] float32 in nats} of a batch.

        Except at loss tokens ids are -1 and log-probs 0.

        Raises ConfigError if the files lack one of its sequences."""
        ids = np.full((len(traj.tokens), self.top), -1, np.int32)
        logprobs, missing = np.zeros(ids.shape, np.float32), []
        for i, (a, b, own) in enumerate(zip(traj.offsets, traj.offsets[1:], keys_of(traj), strict=False)):
            mask = traj.loss_mask[a:b]
            found = self._found.get(own)
            if found is None:
                missing.append(i)
                continue
            file, start, end = found
            at = np.arange(a, b)[mask]
            ids[at] = file.get_slice("ids")[start:end][:, :self.top]
            logprobs[at] = file.get_slice("logprobs")[start:end][:, :self.top]
        if missing:
            raise ConfigError(f"teacher.files={self.folder!r}: {len(missing)} of this step's {len(traj.lengths)} rows "
                              "are missing: the files were written for other rows or images, another template or "
                              "another distill.on_prompt; write them again with teacher.save")
        return {"teacher_ids": ids, "teacher_logprobs": logprobs}

    def close(self) -> None:
        """Closes all files."""
        self._open.close()
