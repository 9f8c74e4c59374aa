"""Checkpoints: everything that resuming needs in one atomic Orbax commit.

On disk, below `<run_dir>/checkpoints` or `checkpoint.dir`, which may be in a store (files.py):

    00000020/               one checkpoint, visible only when complete (Orbax renames the finished directory)
      arrays/               the array leaves, under their path in the tree ("trainable/layer_0/attn/q")
      host/                 JSON: format, jaxrl version, step, table of the arrays, the caller's dict
      manifest.json         size and CRC-32 of every file above; restoring checks it before anything is read
    00000040.orbax-checkpoint-tmp    leftover of a killed save; removed before the next save
    00000060.set-aside      damaged, or later than the checkpoint a run went back to; never read again, never deleted

Several processes save and restore together. Each writes and reads its own parts of the arrays; process 0 alone chooses
checkpoints, checks the disk, writes host values and manifest, and deletes. All processes must see the folder.

Steps of a save, and the points where `faults.plan` can act:

    before     1. check the disk, copy to host memory; an asynchronous save returns here
               2. write the tensors (in the background)
    tensors    3. call `before_commit`, write the manifest
    commit     4. rename the directory to its final name
    after      5. delete checkpoints beyond `checkpoint.keep`
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

import jaxrl
from jaxrl.checkpoint.files import (
    LEFTOVER,
    MANIFEST,
    DamagedCheckpoint,
    checkpoints_in,
    delete,
    disk_trouble,
    first_line,
    folder_of,
    in_store,
    is_checkpoint,
    manifest_of,
    not_orbax,
    not_tensorstore,
    remove_leftovers,
    set_aside,
    size_text,
    verify,
)
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.deadline import leave_with_main_thread, time_limit
from jaxrl.processes.exchange import put
from jaxrl.processes.faults import Faults
from jaxrl.processes.group import peers

log = logging.getLogger("jaxrl")

FORMAT = 2        # incremented when an older jaxrl could not read a newer one's checkpoints
UNREAD = re.compile(r"(critic/)?(version|rng)")  # leaves of format 1 that nothing read
MAX_FAILURES = 3  # consecutive failed saves that end the run
HOST_FILE = "metadata"  # Orbax's name for what JsonSave writes


class CheckpointError(ConfigError):
    """A checkpoint that is missing or cannot be used. The message names the path and the remedy."""


class SavesFailed(RunStopped):
    """The disk refused MAX_FAILURES saves in a row, or the last save of a run. Existing checkpoints stay valid."""


class SaveTimeout(SavesFailed):
    """A save did not end within checkpoint.timeout_seconds. Its threads still wait for the disk."""


class Chosen(NamedTuple):
    """A complete checkpoint whose arrays have not been read yet.

    step: completed steps. host: the JSON-able values that were saved with it. path: its folder."""

    step: int
    host: dict
    path: Path


class Restored(NamedTuple):
    """A restored checkpoint.

    step: completed steps. host: the JSON-able values that were saved with it. path: its folder."""

    step: int
    arrays: Any   # the requested structure, every leaf bitwise as saved
    host: dict
    path: Path


class Checkpointer:
    """Saves and restores the checkpoints of one run directory.

    Args:
      run_dir: the run directory; nothing is created before the first save.
      config: the whole config; reads the group `checkpoint`.
      faults: planned faults, for tests.
      before_commit: called in the writing thread once the tensors are on disk, before the checkpoint becomes visible;
        flushes files that must not be older than the checkpoint.
      uploads: sends checkpoints elsewhere (uploads.py), or None. Process 0's writing thread passes it each one if it
        wants all. Up to checkpoint.keep checkpoints that are still to be sent are not deleted.

    Attributes:
      committed: newest step of this run with a whole checkpoint on disk, or None. best: None, or the step whose
        checkpoint `prune` keeps, set by the session. completed: steps whose saves ended; the session takes them out.
      unchecked: whether a save was begun whose end `check` has not seen.
    """

    def __init__(self, run_dir, config, faults: Faults | None = None, before_commit: Callable[[], None] = lambda: None,
                 uploads=None):
        self.directory = folder_of(config.checkpoint.dir or Path(run_dir) / "checkpoints")
        self._options = config.checkpoint
        self._faults = faults or Faults()
        self._before_commit, self._uploads = before_commit, uploads
        self._manager: ocp.CheckpointManager | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.committed: int | None = None  # newest step of this run with a whole checkpoint on disk
        self.completed: list[int] = []     # steps whose saves ended; the session removes them
        self.best: int | None = None       # the step whose checkpoint is never deleted
        self.unchecked = False             # whether a save was begun whose end the session has not seen
        self._failures = 0
        self._failures_reported = 0  # failures that failed_since_last_call() has returned
        self._failure_reason = ""  # of the newest save that failed
        self._saving, self._deadline = -1, 0.0
        self._cached_choice: tuple[str, Chosen | None] | None = None  # (resume, result) of choose()
        self._stale: list[Path] | None = None  # decided by restore(); None = everything here is of this run
        self._peers = peers()

    # ---- checkpoints on disk

    def steps(self) -> list[int]:
        """Returns the steps of the visible checkpoints, oldest first. Visible means that the commit has happened."""
        return [int(p.name) for p in checkpoints_in(self.directory)]

    # ---- saving

    def require_space(self, arrays) -> None:
        """Raises OSError(ENOSPC) unless the disk has room for twice the arrays (a tree of arrays or abstract ones). A
        store always has.

        Twice, because the new checkpoint is written before the oldest is deleted and the file system needs slack.
        """
        if in_store(self.directory):
            return
        size = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(arrays))
        folder = next(p for p in (self.directory, *self.directory.parents) if p.exists())
        free = shutil.disk_usage(folder).free
        if free < 2 * size:
            raise OSError(errno.ENOSPC, f"{self.directory}: {size_text(free)} free, {size_text(2 * size)} needed "
                          "(twice the checkpoint); free some space, lower checkpoint.keep, or choose another run.dir")

    def save(self, step: int, arrays, host: dict) -> bool:
        """Saves one checkpoint. Returns False if the disk refused it or `step` is saved already. Collective. The first
        call sets aside the checkpoints later than the one that `restore` took.

        Asynchronous: returns once every array is copied to host memory, so the caller may donate or overwrite them; if
        the disk fails later, that is logged and counted (`failed_since_last_call`), and the next call raises any other
        failure. Synchronous: returns after the commit. One save runs at a time; a second waits for the first.

        Args:
          arrays: pytree of jax or numpy arrays (empty containers and NamedTuples allowed; no None, no typed keys).
          host: JSON-able dict with string keys. Tuples come back as lists.

        Raises:
          SavesFailed: the third failed save in a row; SaveTimeout: the previous save does not end.
          TypeError: a leaf that cannot be saved, by name.
          Any other background failure since the last call."""
        self.wait()
        if self._peers.first:
            self._set_aside_stale()
        if self._peers.decide(f"checkpoint {step}: is it there?", lambda: step in self.steps()):
            self.committed = step
            return False
        leaves = flatten(arrays)
        _check_json(host, "host")
        envelope = {"format": FORMAT, "jaxrl": jaxrl.__version__, "step": int(step), "host": host,
                    "arrays": {k: [str(v.dtype), list(v.shape)] for k, v in leaves.items()}}
        # Orbax refuses arrays without elements; the table holds their shape.
        stored = {k: np.array(v) if isinstance(v, np.ndarray | np.generic) else v for k, v in leaves.items() if v.size}
        items: dict[str, ocp.args.CheckpointArgs] = {"host": ocp.args.JsonSave(envelope)}
        if stored:
            items["arrays"] = ocp.args.PyTreeSave(stored)
        self._saving, self.unchecked, together = step, True, True
        self._deadline = time.monotonic() + (self._options.timeout_seconds or threading.TIMEOUT_MAX / 2)
        try:
            with time_limit(self._options.timeout_seconds, self._hanging(step)):
                self._faults.fire("checkpoint", step, "before")
                manager = self._open()
                self._require_space_everywhere(step, leaves)
                together = False
                manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as e:
            self._failed(step, e, together)
            self.check()
            return False
        self._thread = threading.Thread(target=self._finish, args=(step,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._options.asynchronous:
            self.wait()
            return step in self.steps()
        return True

    def _require_space_everywhere(self, step: int, leaves) -> None:
        """Runs `require_space` in process 0; every process raises its error."""
        def missing() -> str:
            try:
                return self.require_space(leaves) or ""
            except OSError as e:
                return str(e.strerror)

        if self._peers.count == 1:
            self.require_space(leaves)
        elif lacks := self._peers.decide(f"checkpoint {step}: is there room?", missing):
            raise OSError(errno.ENOSPC, lacks)

    def wait(self) -> None:
        """Waits until a running save is committed or has failed. Raises as `save` does."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        self.check()

    def require(self, step: int) -> None:
        """Returns once the checkpoint of `step` is committed. Raises SavesFailed if it is not, or as `save` does."""
        self.wait()
        if not self._peers.decide(f"checkpoint {step}: is it committed?", lambda: self.committed == step):
            reason = self._failure_reason or "it was never started"
            raise SavesFailed(f"checkpoint of step {step} not written ({reason}); {self.newest()}. Free space in "
                              f"{self.directory} and rerun the same command to resume from there")

    def failed_since_last_call(self) -> bool:
        """Returns whether the disk has refused a save since the last call and the last save that succeeded."""
        before, self._failures_reported = self._failures_reported, self._failures
        return self._failures > before

    def close(self) -> None:
        """Waits for a running save and frees Orbax's threads. Raises as `save` does; a hanging save is abandoned."""
        if not self._hangs():
            try:
                self.wait()
            finally:
                self._drop_manager()

    def _hangs(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and time.monotonic() >= self._deadline

    def _hanging(self, step: int) -> str:
        return (f"checkpoint of step {step} not written within checkpoint.timeout_seconds="
                f"{self._options.timeout_seconds:g}: the disk under {self.directory} does not respond; "
                f"{self.newest()}. Once it does, rerun the same command to resume from there")

    def check(self) -> None:
        """Raises a background failure, if there was one, and SaveTimeout if a save hangs. Costs nothing; call it every
        step while `unchecked`."""
        runs = self._thread is not None and self._thread.is_alive()  # asked before its error is read
        self.unchecked = runs or self._failures > self._failures_reported
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._hangs():
            leave_with_main_thread()
            raise SaveTimeout(self._hanging(self._saving))

    def _open(self) -> ocp.CheckpointManager:
        """Removes leftovers of killed saves and returns Orbax's manager."""
        if self._manager is None:
            # Orbax explains every failed save with a traceback; `_failed` logs one line.
            logging.getLogger("absl").addFilter(not_orbax)
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._peers.first:
                remove_leftovers(self.directory)
            mode = ocp.options.AtomicityMode
            mode = mode.COMMIT_FILE if in_store(self.directory) else mode.ATOMIC_RENAME
            # Always asynchronous inside (a synchronous save waits): only then has Orbax a documented hook between
            # the last tensor and the rename.
            self._manager = ocp.CheckpointManager(self.directory, options=ocp.CheckpointManagerOptions(
                step_format_fixed_length=8, save_root_metadata=False, enable_async_checkpointing=True,
                atomicity_options=ocp.options.AtomicityOptions(mode=mode),
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._commit)))
        return self._manager

    def _commit(self) -> None:
        """Writes the manifest. Orbax calls this in process 0's thread once all items are written, just before it
        renames the directory.
        """
        folder = self.path_of(self._saving)
        if not in_store(folder):
            (folder,) = [p for p in self.directory.iterdir() if p.name.startswith(folder.name + LEFTOVER)]
        self._faults.fire("checkpoint", self._saving, "tensors")
        self._before_commit()
        (folder / MANIFEST).write_text(json.dumps(manifest_of(folder), indent=1), encoding="utf-8")
        self._faults.fire("checkpoint", self._saving, "commit")

    def _finish(self, step: int) -> None:
        try:
            self._open().wait_until_finished()
            if self._peers.first and step not in self.steps():
                raise SavesFailed(f"{self.directory}: the checkpoint of step {step} did not become visible")
            self.committed, self._failures, self._failures_reported = step, 0, 0
            self.completed.append(step)
            self._after(step)
        except BaseException as e:  # noqa: B036  (handed to the main thread by wait())
            self._failed(step, e)

    def _after(self, step: int) -> None:
        try:
            self._faults.fire("checkpoint", step, "after")
            if self._peers.first:
                if self._uploads is not None and self._uploads.wants("checkpoints", last=False):
                    self._uploads.add(self.path_of(step), f"checkpoints/{step:08d}", step)
                self.prune()
        except OSError as e:
            log.error("checkpoint of step %d is written, but older ones were not deleted: %s", step, e)

    def _failed(self, step: int, error: BaseException, together: bool = False) -> None:
        """Logs and counts disk errors; `check` raises the MAX_FAILURES-th in a row, and any other error.

        together: all processes know of the error. In a run of several processes an error that only one of them knows
        ends the run: the others cannot finish the collective save.
        """
        logging.getLogger("asyncio").addFilter(not_tensorstore)  # it repeats the failure once per array
        self._drop_manager()
        if self._peers.first:
            remove_leftovers(self.directory)
        reason = disk_trouble(error)
        if not reason or not (together or self._peers.count == 1):
            self._error = error
            return
        self._failures += 1
        self._failure_reason = reason
        text = f"checkpoint of step {step} not written ({reason}); {self.newest()}"
        if self._failures < MAX_FAILURES:
            log.error("%s; training continues, failure %d of %d", text, self._failures, MAX_FAILURES)
        else:
            self._error = SavesFailed(f"{text}; {MAX_FAILURES} saves in a row failed. Free space in "
                                      f"{self.directory} and rerun the same command to resume from there")

    def newest(self) -> str:
        """Returns "latest checkpoint: step N" of this run, for messages, or "no checkpoint yet"."""
        return "no checkpoint yet" if self.committed is None else f"latest checkpoint: step {self.committed}"

    def _drop_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None and not self._hangs():
            try:
                manager.close()
            except Exception as e:
                log.debug("closing the checkpoint manager: %s", e)  # the failure itself was reported already
            logging.getLogger("absl").removeFilter(not_orbax)

    def path_of(self, step: int) -> Path:
        """Returns the path of a step's checkpoint, whether it exists or not."""
        return self.directory / f"{step:08d}"

    def prune(self) -> None:
        """Deletes the oldest checkpoints beyond checkpoint.keep (0 = none), except the best one and the newest
        checkpoint.keep of those still to be uploaded."""
        keep = self._options.keep
        old = checkpoints_in(self.directory)[:-keep] if keep > 0 else []
        old = [path for path in old if int(path.name) != self.best]
        unsent = [path for path in old if self._uploads is not None and self._uploads.holds(path)][-keep:]
        for path in old:
            if path not in unsent:
                delete(path)

    def _set_aside_stale(self) -> None:
        """Renames checkpoints newer than the one this run resumed from to `*.set-aside`, before its first save."""
        for path in self._stale or ():
            if path.exists():
                log.warning("%s is no longer part of this run; it is now %s", path, set_aside(path))
        self._stale = None

    # ---- restoring

    def choose(self, resume: str = "auto") -> Chosen | None:
        """Returns the newest usable checkpoint, or None if there is nothing to resume. Reads no
        arrays, touches no device.

        Args:
          resume: as in `restore`, which then uses this result.

        Raises:
          CheckpointError: nothing to resume under `must` or at the path; all damaged; a damaged checkpoint that was
            named; an unknown format; a process cannot see it.
        """
        chosen = self._choose_together(resume)
        self._cached_choice = (resume, chosen)
        if chosen is not None and chosen.path.parent == self.directory:
            self.committed = chosen.step
        return chosen

    def _choose_together(self, resume: str) -> Chosen | None:
        """Returns process 0's choice on every process. Raises CheckpointError if one of them cannot see it."""
        if self._peers.count == 1:
            return self._choose(resume)
        mine = self._choose(resume) if self._peers.first else None
        path = self._peers.decide("which checkpoint", lambda: mine and str(mine.path))
        if self._peers.first or path is None:
            return mine
        try:
            envelope = _envelope(folder_of(path))
        except OSError as e:
            raise CheckpointError(f"{self._peers.who(self._peers.index)} cannot see the checkpoint {path} that "
                                  f"process 0 found: {first_line(e)}; put run.dir on a file system that all "
                                  "hosts share") from None
        return Chosen(envelope["step"], envelope["host"], folder_of(path))

    def _choose(self, resume: str) -> Chosen | None:
        paths, only = self._candidates(resume)
        for path in paths:
            self._faults.fire("resume", int(path.name), "before")
            try:
                verify(path)
            except DamagedCheckpoint as e:
                if only:
                    raise CheckpointError(f"run.resume={resume!r}: the checkpoint {path} is damaged: {e}; name "
                                          "another one, or the run's folder for its newest whole one") from None
                log.error("CHECKPOINT DAMAGED: %s: %s. Falling back to the previous one.", path, e)
                continue
            envelope = _envelope(path)
            return Chosen(envelope["step"], envelope["host"], path)
        if paths:
            raise CheckpointError(f"all {len(paths)} checkpoints in {paths[0].parent} are damaged; run.resume=never "
                                  "starts over (they stay), run.resume=<path> takes another run's")
        return None

    def restore(self, abstract, resume: str = "auto", *, partial: bool = False) -> Restored | None:
        """Restores the newest usable checkpoint, or returns None if there is nothing to resume.

        Args:
          abstract: tree of `jax.ShapeDtypeStruct` with `sharding` (any mesh), or of arrays. A numpy leaf comes back
            as numpy; a ShapeDtypeStruct without sharding on the first device.
          resume: `auto`: the newest of this run directory, if any; `must`: the same, or an error; `never`: None; else
            the path of a run directory or of one checkpoint.
          partial: leaves that `abstract` lacks are not read (evaluation needs no optimizer state).

        Raises:
          CheckpointError: nothing to resume under `must` or at the path; all damaged; a damaged checkpoint that was
            named; names, shapes or dtypes that differ; an unknown format; a process cannot see it.
        """
        known, self._cached_choice = self._cached_choice, None
        chosen = known[1] if known and known[0] == resume else self._choose_together(resume)
        if chosen is None:
            self._stale = checkpoints_in(self.directory)
            return None
        restored = _read(chosen.path, abstract, partial)
        self._faults.fire("resume", restored.step, "arrays")
        self._stale = self._later_than(chosen.path)
        if chosen.path.parent == self.directory:
            self.committed = restored.step
        return restored

    def read(self, step: int, abstract):
        """Returns the arrays of this run's checkpoint of a step, as `abstract` (see `restore`) describes them; all
        processes call it. Raises CheckpointError if it is missing or damaged, or its arrays differ from `abstract`."""
        path = self.path_of(step)

        def trouble() -> str:
            try:
                verify(path)
            except DamagedCheckpoint as e:
                return first_line(e)
            return ""

        if damage := self._peers.decide(f"checkpoint {step}: is it whole?", trouble):
            raise CheckpointError(f"the checkpoint {path} cannot be read: {damage}")
        return _read(path, abstract, partial=True).arrays

    def _later_than(self, path: Path) -> list[Path]:
        own = checkpoints_in(self.directory)
        return own[own.index(path) + 1:] if path in own else own

    def _candidates(self, resume: str) -> tuple[list[Path], bool]:
        """Returns (checkpoints to try, newest first; whether one checkpoint was named)."""
        if resume == "never":
            return [], False
        if resume in ("auto", "must"):
            own = checkpoints_in(self.directory)[::-1]
            if resume == "must" and not own:
                raise CheckpointError(f"run.resume=must: {self.directory} has no checkpoint; set run.resume=auto to "
                                      "start a new run")
            return own, False
        path = folder_of(resume)
        if not path.is_dir():
            raise CheckpointError(f"run.resume={resume!r} is neither auto, must or never nor an existing directory")
        if is_checkpoint(path):
            return [path], True
        newest_first = (checkpoints_in(path / "checkpoints") or checkpoints_in(path))[::-1]
        if not newest_first:
            raise CheckpointError(f"run.resume={resume!r}: {path} is neither a checkpoint nor a run directory with any")
        return newest_first, False


# ---- trees

def flatten(tree) -> dict[str, Any]:
    """Returns the array leaves by path, e.g. {"opt_state/0/mu/layer_0/attn/q": ...}. Empty containers have no leaves.

    Raises:
      TypeError: a leaf is not a plain array, by name (None counts as empty; Python numbers, typed PRNG keys and
        strings are refused).
      ValueError: two paths have the same text.
    """
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(f"checkpoint: {name} is {type(leaf).__name__}, not an array; numbers and text belong in "
                            "`host`")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"checkpoint: {name} is a typed PRNG key; save jax.random.key_data(key)")
        if name in out:
            raise ValueError(f"checkpoint: two leaves have the path {name!r}")
        out[name] = leaf
    return out


def _check_json(node, where: str) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if not isinstance(key, str):
                raise TypeError(f"checkpoint: {where} has the key {key!r}; JSON keeps string keys only")
            _check_json(value, f"{where}.{key}")
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            _check_json(value, f"{where}[{i}]")
    elif not (node is None or type(node) in (bool, int, float, str)):
        raise TypeError(f"checkpoint: {where} is {type(node).__name__}; use plain Python values, arrays go in `arrays`")


# ---- reading

def _envelope(path: Path) -> dict:
    # Orbax's own reader needs the devices; a checkpoint is chosen before they are touched.
    envelope = json.loads((path / "host" / HOST_FILE).read_text(encoding="utf-8"))
    if envelope["format"] > FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {envelope['format']} of jaxrl {envelope['jaxrl']}; this "
                              f"is jaxrl {jaxrl.__version__}, which reads up to format {FORMAT}: upgrade jaxrl")
    return envelope


def _read(path: Path, abstract, partial: bool) -> Restored:
    envelope = _envelope(path)
    wanted, table = flatten(abstract), envelope["arrays"].items()
    saved = {name: kind for name, kind in table if envelope["format"] > 1 or not UNREAD.fullmatch(name)}
    _check_table(path, wanted, saved, partial)
    stored = {k: v for k, v in wanted.items() if v.size}
    values = {}
    if stored:
        args = ocp.args.PyTreeRestore(item=stored, restore_args={k: _restore_args(v) for k, v in stored.items()},
                                      partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            values = reader.restore(path / "arrays", args=args)
    leaves = [values[k] if k in stored else _empty(v) for k, v in wanted.items()]
    tree = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return Restored(envelope["step"], tree, envelope["host"], path)


def _check_table(path: Path, wanted: dict, saved: dict, partial: bool) -> None:
    """Raises CheckpointError naming up to five leaves whose presence, shape or dtype differs."""
    problems = [f"{k} is not in it" for k in wanted if k not in saved]
    problems += [f"{k} is not part of this run" for k in saved if k not in wanted and not partial]
    for k, leaf in wanted.items():
        if k in saved and saved[k] != (here := [str(leaf.dtype), list(leaf.shape)]):
            problems.append(f"{k} was saved as {saved[k][0]}{saved[k][1]}, this run needs {here[0]}{here[1]}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{path} does not fit this config: {'; '.join(problems[:5])}{more}. Use the config it "
                              "was written with (<run.dir>/config.json), or another run.dir")


def _restore_args(leaf):
    if isinstance(leaf, np.ndarray | np.generic):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _empty(leaf):
    zeros = np.zeros(leaf.shape, leaf.dtype)
    where = getattr(leaf, "sharding", None)
    return zeros if isinstance(leaf, np.ndarray) else jax.device_put(zeros) if where is None else put(zeros, where)
