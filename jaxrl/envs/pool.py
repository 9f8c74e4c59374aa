"""The trainer's side of episodes: worker processes that run them, killed and restarted when necessary.

The episode engine (`rollout/episodes.py`) receives events (see `EpisodePool.events`). Faults of a failure:
  env        an exception other than ToolError, a result of a wrong type, a worker killed by its code
  late       env.step_seconds or env.episode_seconds exceeded
  neighbour  its worker was killed because of another of the 64 episodes it runs
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import heapq
import itertools
import json
import logging
import os
import selectors
import tempfile
import threading
import time
from collections import deque
from typing import Any

from jaxrl.envs.specs import as_dict, check_interpreter, specs, without_folders
from jaxrl.envs.worker import EPISODES_PER_WORKER, TICK_SECONDS, RemoteSeats, Seats, grace_seconds
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.workers.handing import FunctionFolder
from jaxrl.workers.process import BadReply, PrintedOutput, WorkerProcess, environment, excerpt

log = logging.getLogger("jaxrl.envs")
START_SECONDS = 300.0   # importing what env.function and env.tools name
PRINT_SECONDS = 10.0     # between two logs of what workers printed
PRINT_LINES = 20         # most lines logged each time
STRIKES = 3             # unexplained deaths of its workers after which an episode is considered their cause
IDLE_DEATHS = 5         # consecutive deaths of workers without an event that stop the run
EVENT_KEYS = {  # keys of each event's data
    "send": {"messages", "rewrite", "tools", "stop", "max_tokens", "reward", "anchor", "train", "notes", "counts",
             "seconds"},
    "done": {"value", "rewards", "reward", "rewarded", "notes", "counts", "seconds"},
    "failed": {"cause", "detail", "fault", "reward", "notes", "counts"},
}


@dataclasses.dataclass
class Event:
    """An event of an episode. See `EpisodePool.events`.

    id: of the episode. kind: send, done or failed. data: a dict by kind."""

    id: str
    kind: str
    data: dict[str, Any]


@dataclasses.dataclass(eq=False)
class Episode:
    """One attempt at an episode. id: the caller's name of it. n: its number, unique in the pool. worker, seat: where it
    runs, and its index in that worker's table; None and -1 while it waits for a free seat."""

    id: str
    n: int
    task: str                # as JSON
    worker: Worker | None = None
    seat: int = -1
    awaits_turn: bool = False       # waits for the model's turn
    cancelled: bool = False


class LocalProcess(WorkerProcess):
    """A worker process on this host. seats: the table of Seats that it shares with the pool."""

    def __init__(self, pool: EpisodePool):
        self._table, env = tempfile.TemporaryFile(), pool.env
        self._table.truncate(Seats.BYTES)
        fd = self._table.fileno()
        self.seats = Seats(fd)
        super().__init__("jaxrl.envs.worker", pool.printed, environment(pool.variables, env.python), pool.memory_gb,
                         group="env", who="an environment", python=pool.python, inherit=(fd,), arguments=(str(fd),))

    def kill(self) -> None:
        """Kills the process and frees the table."""
        super().kill()
        self._table.close()


def remote_process(pool: EpisodePool):
    """Returns a worker process on another host (env.executor=ray), as `LocalProcess` is one on this host."""
    from jaxrl.workers.ray_process import RemoteProcess
    seats, env = RemoteSeats(), pool.env
    named = {name: os.environ[name] for name in pool.variables if name in os.environ}
    process = RemoteProcess("jaxrl.envs.worker", pool.printed, named, pool.memory_gb, group="env", who="an environment",
                            cpus=env.ray_cpus, python=env.python, table=Seats, store_state=seats.store)
    process.seats = seats
    return process


class Worker:
    """A worker process and the episodes it runs.

    pool: whose worker it is; starts the process.

    Attributes:
      seats: table of start times. into, out_of: descriptors to and from the worker.
      ready: whether it has said so. deadline: time.monotonic() until which it has to.
      unsent, partial_line: bytes not yet sent; of a line that has not arrived whole.
      free: heap of free seats. episodes: number -> Episode. The pool changes these two and `ready`."""

    def __init__(self, pool: EpisodePool):
        self.process = pool.launch(pool)
        self.seats = self.process.seats
        self.into, self.out_of = self.process.descriptors
        self.deadline = time.monotonic() + START_SECONDS
        self.ready, self.partial_line = False, b""
        self.unsent = bytearray(pool.setup.encode() + b"\n")
        self.free, self.episodes = list(range(EPISODES_PER_WORKER)), {}

    def put(self, order: list) -> None:
        """Queues a message to the worker, which `write` sends."""
        self.unsent += json.dumps(order).encode() + b"\n"

    def write(self) -> bool:
        """Sends as many queued bytes as the pipe takes. Returns False if some are left. If the pipe is broken they are
        dropped, and True is returned."""
        try:
            while self.unsent:
                del self.unsent[:os.write(self.into, self.unsent[:1 << 20])]
        except BlockingIOError:
            return False
        except OSError:
            self.unsent.clear()  # its end is noticed where it is read from
        return True

    def read(self) -> tuple[list[bytes], bool]:
        """Returns (complete lines received, whether the worker is alive)."""
        parts, alive = [], True
        try:
            while data := os.read(self.out_of, 1 << 20):
                parts.append(data)
            alive = False
        except BlockingIOError:
            pass
        except OSError:
            alive = False
        *lines, self.partial_line = (self.partial_line + b"".join(parts)).split(b"\n")
        return lines, alive

    def running(self) -> list[Episode]:
        """Returns the episodes whose code is running now."""
        return [e for e in self.episodes.values() if self.seats.since[e.seat]]

    def end(self) -> None:
        """Kills the worker's process."""
        self.process.kill()


class EpisodePool:
    """Worker processes that run episodes, at most 64 each at a time; further ones wait.

    Workers start in the background when the pool is created; `ready()` returns when they are ready.

    Args:
      env: config.env. env.function may also be a function or class and env.tools may hold functions; those defined in
        a notebook are written to a file as reward functions are.
      user: config.user, `task.user` of episodes.
      run_dir: where those files go; "" or a URL for a temporary folder.
      sandbox: config.sandbox.

    Attributes:
      tools: JSON schemas of env.tools, [] before `ready()`.
      env, python, memory_gb, variables, setup (JSON), printed: what a worker is started with. launch: pool -> process.

    Raises:
      ConfigError: what can be detected without a worker.
    """

    def __init__(self, env, user=None, run_dir: str = "", sandbox=None):
        self.env, self.tools, self.launch = env, [], LocalProcess
        self.python = env.python if env.executor == "ray" else check_interpreter(env.python)
        self.memory_gb = 0.0 if env.program else env.memory_gb  # a program has its own limit
        self._folder = FunctionFolder(run_dir, "env_functions")
        what = specs(env, self._folder)
        setup = what | {
            "options": as_dict(env.options), "threads": bool(env.threads), "user": as_dict(user or {}),
            "max_turns": env.max_turns, "max_parallel_calls": env.max_parallel_calls, "crash": env.crash,
            "mcp_session": env.mcp_session, "sandbox": as_dict(sandbox or {}),
            "memory_gb": env.memory_gb, "must_score": not getattr(env, "judged", False),
            "limits": {"step_seconds": env.step_seconds, "episode_seconds": env.episode_seconds}}
        setup |= {"images": True} if env.image_tokens else {}
        self.variables = (*env.variables, setup["sandbox"].get("key_env", ""))
        try:
            self.setup = json.dumps(setup)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"env.options={setup['options']}: cannot be passed to workers as JSON: {e}; "
                              "use plain values") from None
        self._decides, self._sources = setup | without_folders(what), ""
        for name in ("memory_gb", "servers"):  # the place of a service does not decide results
            del self._decides[name]
        self._description = what["function"] or " ".join(what["program"]) or ", ".join([*what["tools"], *what["mcp"]])
        missing = [name for name in env.variables if name not in os.environ]
        if missing:
            log.warning("env.variables names variables that are not set on this host: %s", ", ".join(missing))
        if env.executor == "ray":
            from jaxrl.workers import ray_process
            ray_process.join(env, "env")
            self.launch = remote_process
        self.printed, self._last_print = PrintedOutput(), time.monotonic()
        self._state = threading.Condition()
        self._numbers = itertools.count(1)
        self._ids: dict[str, Episode] = {}
        self._waiting: deque[Episode] = deque()
        self._events: deque[Event] = deque()
        self._strikes: dict[str, int] = {}
        self._deaths, self._fatal, self._closing, self._started = 0, None, False, False
        self._workers: list[Worker] = []
        self._wake_out, self._wake_in = os.pipe()
        self._woken = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        os.set_blocking(self._wake_out, False)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="episodes")
        self._thread.start()
        atexit.register(self.close)

    # -- the caller's side ---------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Waits until every worker is ready. Raises ConfigError if what env names cannot be loaded, RunStopped if a
        process cannot be started or workers that were ready before cannot restart, RuntimeError if it was closed."""
        with self._state:
            while not (self._started and all(w.ready for w in self._workers)) and not (self._fatal or self._closing):
                self._state.wait(0.5)
            self._raise()

    def key(self) -> str:
        """Returns a digest of everything except the model that decides episodes: the environment's code and
        the options that reach it, 16 hexadecimal digits. Equal on all hosts where these are equal. Waits for the
        workers, which compute the code digest, and raises as `ready`.
        """
        self.ready()
        decides = json.dumps(self._decides | {"sources": self._sources}, sort_keys=True)
        return hashlib.sha256(decides.encode()).hexdigest()[:16]

    def start(self, id: str, task: dict) -> None:
        """Starts an episode.

        Args:
          id: names the episode in events; must not be running.
          task: {"row": columns, "prompt": text or messages, "seed": int}. Arrays become lists.

        Raises:
          ConfigError: a value has no JSON form.
          ValueError: an episode of this id is running."""
        try:
            episode = Episode(id, next(self._numbers), json.dumps(task, default=_as_list))
        except (TypeError, ValueError, RecursionError) as e:
            raise ConfigError(f"data: a value of a row has no JSON form and cannot be passed to environments: {e}; its "
                              f"columns: {', '.join(map(str, task['row']))}") from None
        with self._state:
            if id in self._ids:
                raise ValueError(f"episode {id!r} is already running")
            self._ids[id] = episode
            self._waiting.append(episode)
            self._assign()
            self._wake()

    def reply(self, id: str, turn: dict) -> None:
        """Replies to a "send" event with the model's turn: {"text", "thinking", "calls": [{"id", "name", "arguments",
        "error"}], "finish"}; env.program also reads "tokens", [prompt, sampled], "written", the text of a turn with a
        malformed call, and "over". Ignored if the episode is over, for example after its worker was lost.

        Raises ValueError if the episode does not wait for a turn.
        """
        with self._state:
            episode = self._ids.get(id)
            if episode is None:
                return
            if not episode.awaits_turn or episode.worker is None:
                raise ValueError(f"episode {id!r} is not waiting for a turn")
            episode.awaits_turn = False
            episode.worker.put(["turn", episode.n, turn])
            self._wake()

    def cancel(self, ids: list[str]) -> None:
        """Ends these episodes; they produce no further events, and those not fetched yet are dropped. Ids of episodes
        that are over are ignored."""
        with self._state:
            gone = set(ids)
            self._events = deque(e for e in self._events if e.id not in gone)
            for id in gone:
                self._strikes.pop(id, None)
                episode = self._ids.pop(id, None)
                if episode is None:
                    continue
                episode.cancelled = True
                if episode.worker is None:
                    self._waiting.remove(episode)
                else:
                    episode.worker.put(["cancel", episode.n])
            self._wake()

    def events(self, timeout_s: float) -> list[Event]:
        """Returns the events since the last call; waits up to `timeout_s` seconds for the first one. By Event.kind,
        data holds:

        send: {"messages": new ones, "rewrite": whether they are the whole history, "tools": schemas or None, "stop":
        texts, "max_tokens": int, 0 = no limit, "reward": float, of the turn before, "anchor": name of the state in
        which the coming turn is decided, "train": whether the turn is trained, "notes" and "counts": of the episode so
        far, as of done, "seconds": spent in the environment}.

        done: {"value": float or None, "rewards": {name: float}, "reward": float, of the last turn, "rewarded": whether
        chat.reward was called, "notes": {name: float}, "counts": {"calls", "malformed"}, "seconds"}.

        failed: {"cause": short text, "detail": traceback, "fault": "env", "late" or "neighbour", "reward": float, of
        the last turn so far if the episode was late, else 0; if it was late and its code ended also "notes" and
        "counts", else these are absent or empty}.

        Every started episode ends with done or failed, unless it was cancelled.

        Raises:
          RunStopped: workers cannot work (ConfigError before the first worker was ready).
          RuntimeError: the pool was closed. Both only once no event is left."""
        deadline = time.monotonic() + timeout_s
        with self._state:
            while not self._events and not (self._fatal or self._closing):
                left = deadline - time.monotonic()
                if left <= 0 or not self._state.wait(left):
                    break
            if not self._events:
                self._raise()
            out, self._events = list(self._events), deque()
            return out

    def close(self) -> None:
        """Stops the workers. Safe to call twice."""
        atexit.unregister(self.close)
        with self._state:
            if self._closing:
                return
            self._closing = True
            self._state.notify_all()
            self._wake()
        self._thread.join()
        for fd in (self._wake_out, self._wake_in):
            os.close(fd)
        self._selector.close()
        self._log_printed()
        self.printed.file.close()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def _raise(self) -> None:
        if self._closing:
            raise RuntimeError("the episode pool is closed")
        if self._fatal is not None:
            raise self._fatal

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            os.write(self._wake_in, b"x")

    # -- the thread that talks to the workers ------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with self._state:
                for _ in range(self.env.workers):
                    self._start_worker()
                self._started = True
            look, tick = time.monotonic(), min(TICK_SECONDS, 0.25 * self.env.step_seconds)
            while not self._closing and self._fatal is None:
                for key, _ in self._selector.select(tick):
                    if key.data is None:
                        os.read(self._wake_out, 64)
                with self._state:
                    self._woken = False
                    self._exchange()
                    if time.monotonic() - look >= tick:
                        look = time.monotonic()
                        self._check_workers()
        except Exception as e:  # this thread must not end silently: the caller would wait forever
            with self._state:
                self._fatal = self._fatal or e
                self._state.notify_all()
        finally:
            for worker in self._workers:
                worker.process.signal_kill()
            for worker in self._workers:
                worker.end()

    def _start_worker(self) -> None:
        try:
            worker = Worker(self)
        except OSError as e:
            raise RunStopped(f"an environment worker cannot be started: {e}") from None
        self._workers.append(worker)
        self._selector.register(worker.out_of, selectors.EVENT_READ, worker)

    def _exchange(self) -> None:
        """Reads and writes everything possible without blocking."""
        before = len(self._events)
        for worker in list(self._workers):
            lines, alive = worker.read()
            try:
                for line in lines:
                    self._handle(worker, _decode(line))
            except BadReply as e:
                self._replace_worker(worker, f"received {e} instead of a reply: an environment must not write to file"
                                     " descriptors that it did not open")
                continue
            if not alive:
                why = worker.process.how()
                self._replace_worker(worker, f"its worker ended: {why}", [] if worker.process.lost else None)
        self._assign()
        for worker in self._workers:
            if worker.unsent:
                registered = worker.into in self._selector.get_map()
                if worker.write():
                    if registered:
                        self._selector.unregister(worker.into)
                elif not registered:
                    self._selector.register(worker.into, selectors.EVENT_WRITE, worker)
        if len(self._events) > before:
            self._state.notify_all()

    def _handle(self, worker: Worker, message: list) -> None:
        if not worker.ready:
            self._handle_first_message(worker, message)
            return
        n, kind, *data = message
        episode = worker.episodes.get(n) if isinstance(n, int) else None
        if episode is None or not _is_reply(kind, data) or kind == "send" and episode.awaits_turn:
            raise BadReply(excerpt(json.dumps(message).encode()))
        self._deaths = 0
        if kind == "hung":
            cause = data[0] or "it did not end when it was cancelled"
            self._replace_worker(worker, cause, [episode], "late" if data[0] else "env")
            return
        if kind != "send":
            del worker.episodes[n]
            heapq.heappush(worker.free, episode.seat)
        if episode.cancelled or kind == "gone":
            return
        episode.awaits_turn = kind == "send"
        if kind != "send":
            del self._ids[episode.id]
        if kind == "done":
            self._strikes.pop(episode.id, None)
        self._events.append(Event(episode.id, kind, data[0]))

    def _handle_first_message(self, worker: Worker, message: list) -> None:
        kind, data = message
        if kind == "fatal":
            raise self._unstartable(data)
        if kind != "ready":
            raise BadReply(excerpt(json.dumps(message).encode()))
        if self._sources not in ("", data["sources"]):
            log.warning("a restarted environment worker loaded other code than the run started with (%s): from now on "
                        "episodes run with the new code", self._description)
        worker.ready, self.tools, self._sources = True, data["tools"], data["sources"]
        self._state.notify_all()

    def _unstartable(self, why: str) -> Exception:
        """Returns a ConfigError, or RunStopped if workers of this run could start before."""
        field = f"env.function={self._decides['function']!r}" if self.env.function else (
            f"env.program={self.env.program!r}" if self.env.program else
            "env.tools" if len(self.env.tools) else f"env.mcp={tuple(self.env.mcp)}")
        text = f"{field}: {why}{self.printed.last()}"
        return RunStopped(f"{text}\nWorkers of this run started before") if self._sources else ConfigError(text)

    def _assign(self) -> None:
        """Assigns waiting episodes to the workers with the fewest."""
        while self._waiting:
            worker = min((w for w in self._workers if w.ready and w.free), key=lambda w: len(w.episodes), default=None)
            if worker is None:
                return
            episode = self._waiting.popleft()
            episode.worker, episode.seat = worker, heapq.heappop(worker.free)
            worker.episodes[episode.n] = episode
            worker.seats.since[episode.seat] = 0.0
            worker.unsent += f'["start",{episode.n},{episode.seat},{episode.task}]\n'.encode()

    def _check_workers(self) -> None:
        """Replaces workers that hang and logs what was printed."""
        now, limit = time.monotonic(), self.env.step_seconds + grace_seconds(self.env.step_seconds)
        for worker in list(self._workers):
            if not worker.ready:
                if now > worker.deadline:
                    raise self._unstartable(f"a worker is not ready after {START_SECONDS:g} s: importing the module"
                                            " takes too long or blocks")
                continue
            since = {e: worker.seats.since[e.seat] for e in worker.episodes.values()}
            hung = [e for e, t in since.items() if t and now - t > limit]
            beat = worker.seats.since[EPISODES_PER_WORKER]
            if hung:
                cause = f"it blocked its worker for longer than env.step_seconds={self.env.step_seconds:g}"
                self._replace_worker(worker, cause, hung, "late")
            elif worker.episodes and beat and now - beat > limit:
                self._replace_worker(worker, "its worker's event loop was blocked")
        self.printed.bound()
        if now - self._last_print >= PRINT_SECONDS:
            self._log_printed()

    def _replace_worker(self, worker: Worker, why: str, guilty: list[Episode] | None = None,
                        fault: str = "env") -> None:
        """Kills a worker and starts another. guilty: the episodes that caused it; None for the one
        whose code was running.
        """
        if not worker.ready and not worker.process.lost:
            raise self._unstartable(f"{why} while importing {self._description}")
        if guilty is None:
            guilty = worker.running()
            if len(guilty) != 1:  # several or none: the one that is there repeatedly
                guilty = [e for e in guilty or worker.episodes.values() if self._add_strike(e)]
        self._selector.unregister(worker.out_of)
        if worker.into in self._selector.get_map():
            self._selector.unregister(worker.into)
        worker.end()
        self._workers.remove(worker)
        lost = {e.id for e in worker.episodes.values() if not e.cancelled}
        self._events = deque(e for e in self._events if e.id not in lost)  # pending requests of lost episodes
        for episode in sorted(worker.episodes.values(), key=lambda e: e.n):
            if episode.cancelled:
                continue
            del self._ids[episode.id]
            data = {"cause": "the worker was killed because of another episode", "detail": why, "fault": "neighbour",
                    "reward": 0.0}
            if episode in guilty:
                reward = worker.seats.rewards[episode.seat] if fault == "late" else 0.0
                data = {"cause": why, "detail": "", "fault": fault, "reward": reward}
            self._events.append(Event(episode.id, "failed", data))
        self._state.notify_all()
        self._deaths += 1
        if self._deaths > IDLE_DEATHS * self.env.workers:
            raise RunStopped(f"environment workers ({self._description}) die repeatedly before any episode makes "
                             f"progress: {why}{self.printed.last()}")
        self._start_worker()

    def _add_strike(self, episode: Episode) -> bool:
        if episode.cancelled:
            return False
        self._strikes[episode.id] = self._strikes.get(episode.id, 0) + 1
        return self._strikes[episode.id] >= STRIKES

    def _log_printed(self) -> None:
        self._last_print = time.monotonic()
        lines = self.printed.lines()
        for line in lines[:PRINT_LINES]:
            log.info("printed by an environment: %s", line[:500])
        if len(lines) > PRINT_LINES:
            log.info("... and %d more lines", len(lines) - PRINT_LINES)


def _is_reply(kind, data: list) -> bool:
    """Returns whether a message has the form of a worker's."""
    if kind in EVENT_KEYS:
        return len(data) == 1 and isinstance(data[0], dict) and data[0].keys() == EVENT_KEYS[kind]
    return (kind, len(data)) in (("gone", 0), ("hung", 1))


def _decode(line: bytes) -> list:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise BadReply(excerpt(line)) from None
    if not isinstance(message, list) or len(message) < 2:
        raise BadReply(excerpt(line))
    return message


def _as_list(value):
    """Returns an array or array scalar as a list or number, without importing numpy."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r}")
