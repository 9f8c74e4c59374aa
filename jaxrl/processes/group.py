"""The processes that train together: finds them, joins jax's coordinator, and detects lost ones.

Usually one process per host. Their places come from explicit options, the local launcher's variables, Slurm, a
Kubernetes JobSet or a TPU pod (`find_place`). `start` connects them within a time limit and names those that are
missing or lost meanwhile (greeting.py); from then on a watch in every process detects one that died or gave up, names
it, and ends the others. Everything else is jax.distributed's: its coordinator lives in process 0, and its key-value
store carries our messages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from typing import Any

import jax

from jaxrl.errors import ConfigError, RunStopped
from jaxrl.processes.deadline import print_last
from jaxrl.processes.greeting import PeerLost, Place, greet_all, listen_address

log = logging.getLogger("jaxrl")
PORT = 8476
GRACE_SECONDS = 10.0  # from the loss of a process to the end of those that cannot exit by themselves


# ---- place of this process


def find_place(options, environ=os.environ) -> Place | None:
    """Reads this process's rank and coordinator from `config.launch` or the environment; None for a single-process run.

    options: config.launch; its `hosts` chooses the source. With auto, launch.coordinator, launch.processes above 1 or
    $JAXRL_COORDINATOR make it explicit (kubernetes, if $JOB_COMPLETION_INDEX is there). With tpu there is a Place even
    if the environment names one host or none: jax may find others, by the machine's metadata or in further slices.

    Raises ConfigError if the source lacks a value, with auto also if nothing but launch.process, $JAXRL_PROCESSES or
    $JAXRL_PROCESS speaks of several processes, for a variable that is no number, and, except for tpu, for a
    coordinator that is not host:port and a rank beyond the number of processes.
    """
    choice = options.hosts
    if choice == "auto":
        explicit = options.coordinator or options.processes > 1 or "JAXRL_COORDINATOR" in environ
        choice = ("kubernetes" if "JOB_COMPLETION_INDEX" in environ and "JAXRL_COORDINATOR" in environ else
                  "explicit" if explicit else
                  "slurm" if "SLURM_STEP_NODELIST" in environ and "SLURM_STEP_NUM_TASKS" in environ
                  and _number(environ, "SLURM_STEP_NUM_TASKS", "auto") > 1 else
                  "tpu" if "," in environ.get("TPU_WORKER_HOSTNAMES", "") else "none")
        if choice == "none":
            _check_single(options, environ)
    if choice == "none":
        return None
    if choice == "tpu":
        names = tuple(n for n in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if n)
        return Place("tpu", "", len(names), _number({"TPU_WORKER_ID": "0", **environ}, "TPU_WORKER_ID", "tpu"), names)
    place = {"explicit": _explicit, "slurm": _slurm, "kubernetes": _kubernetes}[choice](options, environ)
    if not re.fullmatch(r"(\[[^]]+\]|[^/:\[\]]+):[0-9]+", place.coordinator):
        raise ConfigError(f"launch.coordinator={place.coordinator!r} ({choice}): expected host:port of process 0")
    if not 0 <= place.process < place.processes:
        raise ConfigError(f"launch.process={place.process} of launch.processes={place.processes} ({choice}): processes "
                          "are numbered from 0")
    return place if place.processes > 1 else None


def _check_single(options, environ) -> None:
    """Raises ConfigError for a process that is one of several by its number or their count, and has no coordinator."""
    count = options.processes or _number({"JAXRL_PROCESSES": "1", **environ}, "JAXRL_PROCESSES", "auto")
    number = options.process if options.process >= 0 else _number({"JAXRL_PROCESS": "0", **environ}, "JAXRL_PROCESS",
                                                                  "auto")
    if count != 1 or number:
        raise ConfigError(f"this is process {number} of {count} by launch.process and launch.processes, or by"
                          " $JAXRL_PROCESS and $JAXRL_PROCESSES, without a coordinator: set launch.coordinator or"
                          " $JAXRL_COORDINATOR to host:port of process 0, or launch.hosts=none for one process alone")


def _number(environ, name: str, source: str) -> int:
    if name not in environ:
        raise ConfigError(f"launch.hosts={source}: the environment variable {name} is missing;"
                          " see docs/guides/hosts.md")
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"launch.hosts={source}: the environment variable {name}={environ[name]!r} is not a whole "
                          "number; correct it, or set launch.hosts=none for a run of one process") from None


def _explicit(options, environ) -> Place:
    """Returns the place from options, or from the variables JAXRL_COORDINATOR,
    JAXRL_PROCESSES, JAXRL_PROCESS; options win.
    """
    return Place(
        "explicit", options.coordinator or environ.get("JAXRL_COORDINATOR", ""),
        options.processes or _number(environ, "JAXRL_PROCESSES", "explicit"),
        options.process if options.process >= 0 else _number(environ, "JAXRL_PROCESS", "explicit"))


def _slurm(options, environ) -> Place:
    """Returns the place in a job step of srun. The port comes from the job's number, so that two jobs on a
    node do not collide.
    """
    hosts = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "slurm")
    port = 61440 + _number(environ, "SLURM_JOB_ID", "slurm") % 4096
    first = hosts[0] if hosts else ""
    return Place("slurm", options.coordinator or f"{first}:{port}", tasks, _number(environ, "SLURM_PROCID", "slurm"),
                 tuple(hosts) if len(hosts) == tasks else ())


def expand_nodes(text: str) -> list[str]:
    """Expands a Slurm node list: 'gpu[001-003,007],login' -> ['gpu001', 'gpu002', 'gpu003', 'gpu007', 'login']. A name
    may have one pair of brackets. Raises ConfigError for a part between brackets that is neither a number nor a rising
    range."""
    out = []
    for prefix, ranges, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", text):
        for part in ranges.split(",") if ranges else [""]:
            found = re.fullmatch("([0-9]+)(?:-([0-9]+))?", part)
            first, last = (found[1], found[2]) if found else ("", None)
            if ranges and (not found or int(last or first) < int(first)):
                raise ConfigError(f"launch.hosts=slurm: the environment variable SLURM_STEP_NODELIST={text!r} is no "
                                  f"list of nodes such as gpu[01-03]: {part!r} is no number and no rising range; "
                                  "correct it, or set launch.hosts=none for a run of one process")
            numbers = range(int(first), int(last) + 1) if last else [first]
            out += [f"{prefix}{n if isinstance(n, str) else str(n).zfill(len(first))}{suffix}" for n in numbers]
    return out


def _kubernetes(options, environ) -> Place:
    """Returns the place of a pod of an indexed Job whose pods name each other by a headless service
    (launch/jobset.yaml).
    """
    coordinator = options.coordinator or environ.get("JAXRL_COORDINATOR", "")
    if not coordinator:
        raise ConfigError("launch.hosts=kubernetes: the environment variable JAXRL_COORDINATOR is missing; see "
                          "docs/guides/hosts.md")
    processes = options.processes or _number(environ, "JAXRL_PROCESSES", "kubernetes")
    pod = coordinator.split(":")[0].split(".")[0]
    hosts = tuple(f"{pod[:-1]}{i}" for i in range(processes)) if pod.endswith("-0") else ()
    return Place("kubernetes", coordinator, processes, _number(environ, "JOB_COMPLETION_INDEX", "kubernetes"), hosts)


# ---- the group


class Peers:
    """The processes of a run, as one of them sees the others. With one process nothing waits and nothing is sent.

    Attributes:
      index, count: rank of this process, from 0, and the number of processes. (Argument client: jax's key-value store.)
      wait_seconds: how long a collective call waits for late processes.
      names: rank -> host, "" if not known.
      failure: the error of a process that died or gave up; None = no process did.
      stop_requested: whether another process was asked to stop.
    """

    _watch: Watch  # of more than one process

    def __init__(self, index=0, count=1, client: Any = None, wait_seconds=3600.0, names=("",)):
        self.index, self.count, self.wait_seconds, self.names = index, count, wait_seconds, list(names)
        self.failure: PeerLost | ConfigError | None = None  # set by the watch
        self.stop_requested = False  # by another process; set by the watch
        self._client, self._calls, self._stop_posted = client, 0, False

    @property
    def first(self) -> bool:
        """Whether this is process 0, which alone writes logs and decides what depends on time."""
        return self.index == 0

    def who(self, process: int) -> str:
        """Returns "process N", with its host if known."""
        return f"process {process}" + (f" on {self.names[process]}" if self.names[process] else "")

    def all_gather(self, what: str, value=None) -> list:
        """Returns every process's `value` (JSON-able), by process. Collective; uses the coordinator's key-value store.
        With several processes values are as JSON reads them: tuples as lists, keys as text.

        Args:
          what: tag of the call, such as "step 3, weights 2: the completions", the same on every process. Processes
            that are in different calls raise an error instead of hanging.

        Raises:
          PeerLost: names the processes that are in another call, later than launch.wait_seconds, or gone.
          ConfigError: another process gave up for a ConfigError.
        """
        if self.count == 1:
            return [value]
        self._calls += 1
        key = f"jaxrl/all_gather/{self._calls}"
        self._client.key_value_set(f"{key}/at/{self.index}", json.dumps([what, value]))
        if self.first:
            self._client.key_value_set(f"{key}/all", json.dumps(self._collect(key, what)))
            if self._calls > 1:
                self._client.key_value_delete(f"jaxrl/all_gather/{self._calls - 1}/")
        calls = json.loads(self._wait_for(f"{key}/all", what))
        elsewhere = [i for i, (tag, _) in enumerate(calls) if tag != calls[0][0]]
        if elsewhere:
            raise PeerLost(f"the processes are in different collective calls: {self.who(0)} is at {calls[0][0]!r}, "
                           + ", ".join(f"{self.who(i)} at {calls[i][0]!r}" for i in elsewhere))
        return [value for _, value in calls]

    def decide(self, what: str, choose, *arguments):
        """Returns on every process what choose(*arguments) returns on process 0, as `all_gather` does. Collective.

        Only process 0 calls `choose`. what: tag of the call. Raises PeerLost and ConfigError as `all_gather` does.
        """
        return self.all_gather(what, choose(*arguments) if self.first else None)[0]

    def _collect(self, key: str, what: str) -> list:
        """Waits in process 0 for the entries of all processes."""
        end, nap = time.monotonic() + self.wait_seconds, 0.0005
        while True:
            entries = {int(k.rsplit("/", 1)[1]): v for k, v in self._client.key_value_dir_get(f"{key}/at/")}
            if len(entries) == self.count:
                return [json.loads(entries[i]) for i in range(self.count)]
            self.raise_failure()
            if time.monotonic() > end:
                late = ", ".join(self.who(i) for i in range(self.count) if i not in entries)
                raise PeerLost(f"{late} did not reach {what!r} within launch.wait_seconds={self.wait_seconds:g}")
            time.sleep(nap)
            nap = min(nap * 1.5, 0.05)

    def _wait_for(self, key: str, what: str) -> str:
        end = time.monotonic() + self.wait_seconds + 60
        while True:
            self.raise_failure()
            try:
                return self._client.blocking_key_value_get(key, 1000)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise PeerLost(
                        f"{self.who(0)}, the coordinator, does not reply at {what!r}: {_first_line(e)}") from None
            if time.monotonic() > end:
                raise PeerLost(f"{self.who(0)} does not reply at {what!r}")

    def request_stop(self) -> None:
        """Tells the other processes that this one was asked to stop; they see it within one heartbeat."""
        if self.count > 1 and not self._stop_posted:
            self._stop_posted = True
            self._client.key_value_set(f"jaxrl/stop/{self.index}", "", allow_overwrite=True)

    # ---- failures

    def raise_failure(self) -> None:
        """Raises the failure of another process that the watch has detected, a PeerLost or ConfigError, if any."""
        if self.failure is not None:
            raise self.failure

    def report(self, error: BaseException) -> None:
        """Tells the other processes why this one ends, with the text of `error`. Called once, on exit.

        Nothing is sent if `error` is the failure of another process. A ConfigError reaches the others as ConfigError,
        any other error as PeerLost.
        """
        if self.count > 1 and error is not self.failure:
            text = f"{type(error).__name__}: {error}" if not isinstance(error, RunStopped | ConfigError) else str(error)
            self._post(self.index, "config" if isinstance(error, ConfigError) else "stopped", text)

    def explain(self, error: BaseException) -> BaseException:
        """Returns the reason why a collective failed with `error`, or `error` itself if no process is known to be lost.

        A collective fails at once when a process is gone; the watch learns later which one. So this waits: up to the
        watch's patience and 3 heartbeats if the text speaks of connections, else 2 heartbeats. RunStopped and
        ConfigError do not wait; errors that no collective raises, such as TypeError, are returned as they are.
        """
        if self.count == 1 or not isinstance(error, jax.errors.JaxRuntimeError | ValueError | OSError | RuntimeError):
            return error
        if isinstance(error, RunStopped | ConfigError):
            return self.failure or error
        broken = re.search(r"gloo|nccl|connection|socket|peer|coordination|unavailable|aborted", str(error), re.I)
        end = time.monotonic() + (self._watch.patience + 3 * self._watch.beat if broken else 2 * self._watch.beat)
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.1)
        return self.failure or error

    def _post(self, process: int, kind: str, text: str) -> None:
        try:
            record = json.dumps({"kind": kind, "text": text[:4000], "time": time.time()})
            self._client.key_value_set(f"jaxrl/failed/{process}", record, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as e:
            log.debug("the coordinator is gone: %s", _first_line(e))

    def leave(self, status: int) -> None:
        """Leaves the group; does nothing in a run of one process. Status 0 closes jax's coordinator in order and
        returns; another status ends this process with it, after the others could read why."""
        if self.count == 1:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # its reader has gone
                stream.flush()
        if status == 0:
            self._watch.stop()
            jax.distributed.shutdown()
            return
        try:
            self._client.key_value_set(f"jaxrl/left/{self.index}", "", allow_overwrite=True)
            end = time.monotonic() + GRACE_SECONDS + 2 * self._watch.beat + 2
            while self.first and time.monotonic() < end:  # with it goes the coordinator, and then jax aborts the others
                left = {int(k.rsplit("/", 1)[1]) for k, _ in self._client.key_value_dir_get("jaxrl/left/")}
                if len(left.union(self._watch.silent())) >= self.count:
                    break
                time.sleep(0.1)
        except jax.errors.JaxRuntimeError:
            pass
        os._exit(status)


class Watch(threading.Thread):
    """Sends this process's heartbeat, and detects processes that died or gave up.

    Process 0 reads the heartbeats and posts who has been silent for `patience` seconds; all processes read the posts.
    A process whose main thread cannot exit (it waits in a collective) is ended GRACE_SECONDS later.

    peers: the group, whose `failure` and `stop_requested` it sets. beat: seconds between heartbeats, a tenth of the
    patience and at most 5.
    """

    def __init__(self, peers: Peers, patience: float):
        super().__init__(name="watch", daemon=True)
        self.peers, self.patience = peers, patience
        self.beat = min(5.0, patience / 10)
        self._stop_asked = threading.Event()
        self._beats: dict[int, tuple[str, float]] = {}
        self._lost: set[int] = set()

    def stop(self) -> None:
        """Stops the watch."""
        self._stop_asked.set()

    def silent(self) -> list[int]:
        """Returns the processes, other than 0, without a heartbeat for `patience` seconds. Only for process 0, which
        alone reads the heartbeats: elsewhere all others are returned after that time."""
        now = time.monotonic()
        return [i for i, (_, since) in self._beats.items() if now - since > self.patience]

    def run(self) -> None:
        """Writes this process's heartbeat, reads those of others in process 0, and reads posts of failures and stops,
        until `stop` or, GRACE_SECONDS after a failure, the end of the process; the body of the watch's thread."""
        peers, client, number, end = self.peers, self.peers._client, 0, float("inf")
        self._beats = {i: ("", time.monotonic()) for i in range(peers.count) if i}
        while not self._stop_asked.wait(self.beat):
            number += 1
            try:
                client.key_value_set(f"jaxrl/alive/{peers.index}", str(number), allow_overwrite=True)
                if peers.first:
                    self._listen(client.key_value_dir_get("jaxrl/alive/"))
                posts = {int(k.rsplit("/", 1)[1]): json.loads(v) for k, v in client.key_value_dir_get("jaxrl/failed/")}
                peers.stop_requested |= bool(client.key_value_dir_get("jaxrl/stop/"))
            except jax.errors.JaxRuntimeError:
                continue  # jax's own watch ends this process if the coordinator stays away
            posts.pop(peers.index, None)
            if posts and peers.failure is None:
                peers.failure, end = self._news(posts), time.monotonic() + GRACE_SECONDS
            if time.monotonic() > end:
                print_last(f"stopped: {peers.failure}")
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    client.key_value_set(f"jaxrl/left/{peers.index}", "", allow_overwrite=True)
                os._exit(1)

    def _listen(self, entries) -> None:
        now = time.monotonic()
        for key, value in entries:
            i = int(key.rsplit("/", 1)[1])
            if i and self._beats[i][0] != value:
                self._beats[i] = (value, now)
        for i in set(self.silent()) - self._lost:
            self._lost.add(i)
            self.peers._post(i, "lost", f"no sign of life for {self.patience:g} s (launch.heartbeat_seconds); it was "
                                        "killed, its host went down, or the network did")

    def _news(self, posts: dict) -> PeerLost | ConfigError:
        """Returns the error of the process that failed first."""
        process, post = min(posts.items(), key=lambda item: item[1]["time"])
        text = f"{self.peers.who(process)} {'is gone' if post['kind'] == 'lost' else 'gave up'}: {post['text']}"
        return ConfigError(text) if post["kind"] == "config" else PeerLost(text)


_peers = Peers()


def peers() -> Peers:
    """Returns the group this process belongs to; a group of one before `start` or in a single-process run."""
    return _peers


def start(config) -> None:
    """Joins the processes of a run before the first use of devices; does nothing in a single-process run
    or if joined already. If the caller has initialised jax.distributed, takes its processes.

    Raises:
      PeerLost: names who is missing after launch.connect_seconds.
      ConfigError, ValueError: this process's place cannot be determined (`find_place`).
      OSError: process 0 cannot listen at the coordinator's port.
    """
    global _peers
    options = config.launch
    if _peers.count > 1:
        return
    place = None if jax.distributed.is_initialized() else find_place(options)  # a caller may have joined already
    if place is not None:
        _join(place, options)
    from jax._src.distributed import global_state  # the key-value store has no public name

    if not jax.distributed.is_initialized() or global_state.num_processes == 1:
        return
    _peers = Peers(global_state.process_id, global_state.num_processes, global_state.client,
                   options.wait_seconds or config.rollout.timeout_seconds + 3600, [""] * global_state.num_processes)
    _peers._watch = Watch(_peers, options.heartbeat_seconds)
    _peers._watch.start()
    _peers.names = _peers.all_gather("start", socket.gethostname())
    log.info("process %d of %d; %s coordinates", _peers.index, _peers.count, _peers.who(0))


def _join(place: Place, options) -> None:
    begun = time.monotonic()
    jax.config.update("jax_enable_preemption_service", False)  # faults.GracefulStop listens to signals
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    common: dict[str, Any] = dict(heartbeat_timeout_seconds=int(1.5 * options.heartbeat_seconds + 5),
                                  shutdown_timeout_seconds=30)
    if place.coordinator:
        joining = greet_all(place, options.connect_seconds)
        left = max(10, int(options.connect_seconds - (time.monotonic() - begun)))
        host, _, port = place.coordinator.rpartition(":")
        address = "" if place.process else listen_address(host.strip("[]"))
        bind = f"[{address}]:{port}" if ":" in address else f"{address}:{port}" if address else None
        with joining:
            jax.distributed.initialize(place.coordinator, place.processes, place.process, initialization_timeout=left,
                                       cluster_detection_method="deactivate", coordinator_bind_address=bind, **common)
    else:
        try:
            jax.distributed.initialize(initialization_timeout=int(options.connect_seconds), **common)
        except ValueError as e:  # nothing here names a pod
            raise ConfigError(f"launch.hosts={place.source}: jax finds no TPU pod from this host ({e}); start the run "
                              "on every host of one, or set launch.hosts=auto") from None


def _first_line(error) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
