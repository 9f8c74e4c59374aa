"""An environment worker: runs up to 64 episodes at once. JSON lines over pipes; standard library only, never jax.

Protocol (one JSON value per line; n numbers an attempt at an episode, seat is its place in the table of `Seats`):
  in   {function, tools, options, ...}                                    once, see EpisodePool
  out  ["ready", {tools, sources}] or ["fatal", message]
  in   ["start", n, seat, task] | ["turn", n, turn] | ["cancel", n]
  out  [n, "send" | "done" | "failed", data], [n, "gone"] after a cancel, [n, "hung", cause] for one that does not end

Asynchronous episodes are tasks of one event loop. Each plain episode has a thread, of which one runs at a time;
plain methods of classes and plain tools run on the loop, also one at a time; the plain code of each episode has its own
random state. With env.threads it runs concurrently in threads. Shared memory holds which code runs since when; the
pool kills what hangs."""
from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import mmap
import os
import queue
import random
import selectors
import sys
import threading
import time
import traceback
from typing import Any

from jaxrl import sandbox
from jaxrl.envs.api import BadEnvironment, MissingColumn, Row, Task
from jaxrl.workers import streams
from jaxrl.workers.loading import LoadError, safe_str

EPISODES_PER_WORKER = 64            # most episodes of a worker at a time
TICK_SECONDS = 0.25     # between two checks of time limits
MAX_TRACEBACK_CHARS = 4000           # last characters of a traceback that are kept
FORKED = False          # whether this process is a fork of a worker, which exits when the user's code returns


def grace_seconds(step_seconds: float) -> float:
    """Returns the seconds after a limit within which running code may still end by itself."""
    return 1.0 + min(0.25 * step_seconds, 10.0)


class EpisodeTimeout(BaseException):
    """The episode ran out of time. Not an Exception, so that user code does not catch it."""


class EpisodeCancelled(BaseException):
    """The episode was cancelled. Not an Exception, so that user code does not catch it."""


class Seats:
    """Shared memory of a worker and the pool. since: per seat the time (time.monotonic) since which its code runs, 0 if
    it does not; last, the loop's heartbeat. rewards: per seat the reward of the last turn so far.

    fd: descriptor of the shared file, Seats.BYTES long."""

    BYTES = 8 * (2 * EPISODES_PER_WORKER + 1)

    def __init__(self, fd: int):
        os.lseek(fd, self.BYTES, os.SEEK_SET)  # code that writes to every open descriptor does not hit the table
        table: Any = memoryview(mmap.mmap(fd, self.BYTES)).cast("d")  # floats
        self.since, self.rewards = table[:EPISODES_PER_WORKER + 1], table[EPISODES_PER_WORKER + 1:]

    def beat(self) -> None:
        """Sets the heartbeat of the worker's event loop to now."""
        self.since[EPISODES_PER_WORKER] = time.monotonic()

    def state(self) -> tuple[dict[int, float], list[float]]:
        """Returns (seat -> seconds since its time, for another host with another clock, without idle seats; rewards).
        Seat EPISODES_PER_WORKER is the heartbeat."""
        now = time.monotonic()
        return {seat: now - since for seat, since in enumerate(self.since) if since}, list(self.rewards)


class RemoteSeats:
    """The Seats of a worker on another host, as its Ray actor last reported them."""

    def __init__(self):
        self.since, self.rewards = [0.0] * (EPISODES_PER_WORKER + 1), [0.0] * EPISODES_PER_WORKER

    def store(self, state: tuple[dict[int, float], list[float]]) -> None:
        """Stores a reported Seats.state: seats without an age are idle."""
        now, (ages, self.rewards) = time.monotonic(), state
        for seat in range(EPISODES_PER_WORKER + 1):
            self.since[seat] = now - ages[seat] if seat in ages else 0.0


class GlobalRandom:
    """The global random state of `random` and numpy as one episode's plain functions see it, independent of draws by
    others. Asynchronous code, and all code with env.threads, shares the process's state instead.

    seed: with which the episode's state begins."""

    def __init__(self, seed: int):
        self._seed, self._python, self._numpy = seed, None, None

    def enter(self) -> None:
        """Restores the episode's random state; seeds it the first time, numpy's once numpy is imported."""
        if self._python is None:
            random.seed(self._seed)
        else:
            random.setstate(self._python)
        if (numpy := _numpy_random()) is not None:
            if self._numpy is None:
                numpy.seed(self._seed % 2**32)
            else:
                numpy.set_state(self._numpy)

    def leave(self) -> None:
        """Saves the episode's random state."""
        self._python = random.getstate()
        if (numpy := _numpy_random()) is not None:
            self._numpy = numpy.get_state()


def _numpy_random():
    found = sys.modules.get("numpy.random")
    return found if hasattr(found, "set_state") else None


class Attempt:
    """One attempt at an episode: the host of its Chat, and its clock.

    Args:
      server: the worker's Server.
      n: number of the attempt, which messages to the trainer carry.
      seat: index in the worker's table of start times.
      task: the trainer's message: row, prompt and seed.

    Attributes:
      late: the time limit that was exceeded, "" within all limits.
      gone: whether the trainer cancelled it.
      stopping: whether it is being ended, for `gone` or `late`.
      cancelled: time at which its task was cancelled; 0 = not yet, -1 = reported as hung.
      phase: what its code is doing, for messages; runners set it. chat: set by the server.
      waiting: future of the model's turn, None while there is none."""

    chat: Any  # the server sets it

    def __init__(self, server: Server, n: int, seat: int, task: dict):
        self.server, self.n, self.seat, self.seed = server, n, seat, task["seed"]
        self.task = Task(Row(task["row"]), task["prompt"], task["seed"], server.user)
        self.random, self.phase = GlobalRandom(task["seed"]), ""
        self.waiting = None   # future of the model's turn
        self.late, self.gone, self.stopping, self.cancelled = "", False, False, 0.0
        self.seconds, self.thread_starts = 0.0, []  # seconds of earlier turns; start times of its threads
        self.show_reward(0.0)
        self._clock()

    # -- time spent in the environment, without the model's and that of other episodes on the loop

    def _clock(self) -> None:
        self.began, self.busy, self.running = time.monotonic(), self.server.busy, 0.0

    def seconds_spent(self) -> float:
        """Returns the seconds of this turn that count towards its limit; time in which other episodes ran does not."""
        if self.server.runner.blocking:
            return self.running
        return max(self.running, time.monotonic() - self.began - (self.server.busy - self.busy) + self.running)

    def check(self) -> None:
        """Sets `late`, the reason, if env.step_seconds or env.episode_seconds is exceeded."""
        seconds_spent, limits = self.seconds_spent(), self.server.limits
        if not self.late and seconds_spent > limits["step_seconds"]:
            self.late = f"a turn took longer than env.step_seconds={limits['step_seconds']:g}"
        elif not self.late and self.seconds + seconds_spent > limits["episode_seconds"]:
            self.late = f"it took longer than env.episode_seconds={limits['episode_seconds']:g}"

    def enter(self) -> None:
        """Marks the start of the episode's code in the shared table."""
        self.entered = self.server.seats.since[self.seat] = time.monotonic()

    def leave(self) -> None:
        """Marks the end of the episode's code and adds its time. In a fork of the worker it ends the process."""
        if FORKED:
            os._exit(1)
        now = self.server.seats.since[EPISODES_PER_WORKER] = time.monotonic()
        took = now - self.entered
        self.running += took
        if not self.server.runner.blocking:
            self.server.busy += took
        self.server.seats.since[self.seat] = min(self.thread_starts, default=0.0)

    # -- the host of a Chat

    def show_reward(self, value: float) -> None:
        """Writes the reward of the last turn so far into the shared table, for the pool if the code hangs."""
        self.server.seats.rewards[self.seat] = value

    def _send_payload(self, payload: dict) -> None:
        self.check()
        if self.late:
            self.chat._reward = payload["reward"]  # `end` reports it
            raise EpisodeTimeout
        seconds_spent = self.seconds_spent()
        self.seconds += seconds_spent
        self.server.send([self.n, "send", payload | {"seconds": seconds_spent}])

    async def exchange(self, payload: dict) -> dict:
        """Sends a payload to the trainer and returns the model's turn, as EpisodePool.reply sends it. Raises
        EpisodeTimeout if the episode is late."""
        self._send_payload(payload)
        self.waiting = self.server.loop.create_future()
        turn = await self.waiting
        self.waiting = None
        self._clock()
        return turn

    async def call(self, fn, phase: str, *args, **kwargs):
        """Calls a user's function according to env.threads and returns its result; a coroutine is awaited.

        phase: what it is, for messages. args, kwargs: of the function."""
        before, self.phase = self.phase, phase
        try:
            if inspect.iscoroutinefunction(fn):
                found = fn(*args, **kwargs)
            elif self.server.threads:
                found = await self._in_thread(fn, args, kwargs)
            else:
                self.random.enter()
                try:
                    found = fn(*args, **kwargs)
                finally:
                    self.random.leave()
            found = await found if hasattr(found, "__await__") else found
        except Exception:
            self.phase = phase  # concurrent calls may have changed it
            raise
        self.phase = before
        return found

    async def _in_thread(self, fn, args, kwargs):
        def run():
            try:
                return fn(*args, **kwargs)
            except StopIteration as e:  # which no future can hold
                raise RuntimeError("StopIteration") from e

        self.thread_starts.append(since := time.monotonic())
        try:
            return await self.server.loop.run_in_executor(self.server.executor, run)
        finally:
            self.thread_starts.remove(since)

    async def gather(self, coroutines) -> list:
        """Returns the results of coroutines once all are done; raises the first exception."""
        if len(coroutines) == 1:
            return [await coroutines[0]]

        async def outcome(coroutine):
            try:
                return await TimedCoroutine(self, coroutine), None
            except BaseException as e:  # (a SystemExit would end the loop)
                return None, e

        outcomes = await asyncio.gather(*map(outcome, coroutines))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [value for value, _ in outcomes]

    # -- result

    def end(self, value=None, error: BaseException | None = None) -> list:
        """Returns the message [number, kind, data] that ends the attempt: "done" with its result, "failed" with a
        cause, or "gone".

        value: what the episode returned. error: what it raised, or None."""
        if self.gone:
            return [self.n, "gone"]
        self.check()
        if self.late:
            return [self.n, "failed", {"cause": self.late, "detail": f"it was at {self.phase}", "fault": "late",
                                       "reward": self.chat._reward, **self.chat._records()}]
        self.seconds += self.seconds_spent()
        try:
            if error is None:
                return [self.n, "done", self.chat._result(value) | {"seconds": self.seconds}]
        except Exception as e:
            error = e
        return [self.n, "failed", failure(error, self.phase)]


class BlockingAttempt(Attempt):
    """An attempt at a plain function's episode, in a thread of its own; awaiting blocks it. replies: queue of the
    model's turns, None if the trainer cancelled it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.waiting, self.replies, self.awaits_turn = None, queue.SimpleQueue(), False

    def enter(self) -> None:
        """Waits for this episode's turn to run (unless env.threads), then marks the start of its code."""
        if not self.server.threads:
            self.server.baton.acquire()
            self.random.enter()
        self._clock()
        super().enter()

    def leave(self) -> None:
        """Marks the end of this episode's code and lets another one run (unless env.threads)."""
        super().leave()
        if not self.server.threads:
            self.random.leave()
            self.server.baton.release()

    async def exchange(self, payload: dict) -> dict:
        """Sends a payload to the trainer and returns the model's turn; other episodes run meanwhile. Raises
        EpisodeTimeout if the episode is late, EpisodeCancelled if the trainer cancelled it."""
        self.leave()
        try:
            self._send_payload(payload)
            turn = self.replies.get()
        finally:
            self.enter()
        if self.gone:
            raise EpisodeCancelled
        return turn

    async def call(self, fn, phase: str, *args, **kwargs):
        """Calls a user's function in this thread and returns its result; a coroutine is run to its end.

        phase: what it is, for messages. args, kwargs: of the function fn."""
        before, self.phase = self.phase, phase
        found = fn(*args, **kwargs)
        if hasattr(found, "__await__"):
            found = asyncio.run(_awaited(found))
        self.phase = before
        return found

    async def gather(self, coroutines) -> list:
        """Returns the results of coroutines, run one after the other."""
        return [await c for c in coroutines]


async def _awaited(awaitable):
    return await awaitable


class TimedCoroutine:
    """A coroutine whose every step is recorded as its episode's in the shared table.

    running: the episode's Attempt. coroutine: awaitable that is run."""

    def __init__(self, running: Attempt, coroutine):
        self._running, self._coroutine = running, coroutine

    def __await__(self):
        running, coroutine, error = self._running, self._coroutine, None
        while True:
            running.enter()
            try:
                future = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as e:
                return e.value
            finally:
                running.leave()
            try:
                error = None
                yield future
            except BaseException as e:  # a cancellation or the future's exception, handled by the coroutine
                error = e


class Server:
    """The event loop of a worker, which runs its episodes.

    Args:
      runner: of adapters.load_runner. setup: the pool's first message. streams: descriptors to read from and write
        to. seats: shared table.

    Attributes, for its Attempts: loop, executor (threads), baton (lock of the plain episode that runs), busy (seconds
    that episodes' code has run on the loop), and what `setup` has: limits, user, threads, parallel."""

    def __init__(self, runner, setup: dict, streams: tuple[int, int], seats: Seats):
        self.runner, self.limits, self.user, self.threads = runner, setup["limits"], setup["user"], setup["threads"]
        self.parallel, self.seats, self.busy = setup["max_parallel_calls"], seats, 0.0
        self.baton = threading.Lock()  # held by the plain episode that runs
        self.executor = concurrent.futures.ThreadPoolExecutor(EPISODES_PER_WORKER * max(1, self.parallel))
        self._in, self._out = streams
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._running: dict[int, Attempt] = {}
        self._tasks: dict[int, asyncio.Task] = {}
        self._buffer, self._unsent, self._lock = b"", [], threading.Lock()
        self._encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
        self._thread = threading.get_ident()

    def serve(self) -> None:
        """Runs episodes until the pool's process is gone, then ends this process."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)
        asyncio.set_event_loop(self.loop)
        self.loop.add_reader(self._in, self._read)
        self._tick()
        self.loop.run_forever()

    def _in_child(self) -> None:
        """Detaches a forked child from the protocol, the table and this process's selector."""
        global FORKED
        FORKED = True
        self.seats.since, self.seats.rewards = [0.0] * (EPISODES_PER_WORKER + 1), [0.0] * EPISODES_PER_WORKER
        self._selector.close()

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, message: list) -> None:
        """Queues a message, from any thread. Messages that come together are written together. Raises ValueError,
        TypeError or RecursionError for a message that JSON cannot hold, such as NaN."""
        line = self._encode(message).encode("utf-8", "replace")
        with self._lock:
            first = not self._unsent
            self._unsent.append(line)
        if first and threading.get_ident() == self._thread:
            self.loop.call_soon(self._flush)
        elif first:
            self.loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            data, self._unsent = memoryview(b"\n".join((*self._unsent, b""))), []
        try:
            while data:
                data = data[os.write(self._out, data):]
        except BrokenPipeError:
            os._exit(0)
        except OSError:
            os._exit(streams.CHANNEL_LOST)

    # -- in ----------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1 << 20)
        except OSError:
            os._exit(streams.CHANNEL_LOST)
        if not data:
            os._exit(0)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            order, n, *rest = json.loads(line)
            {"start": self._start, "turn": self._turn, "cancel": self._cancel}[order](n, *rest)

    def _start(self, n: int, seat: int, task: dict) -> None:
        running = self._running[n] = (BlockingAttempt if self.runner.blocking else Attempt)(self, n, seat, task)
        running.phase, running.chat = self.runner.name, self.runner.chat(running, self.parallel)
        if self.runner.blocking:
            threading.Thread(target=self._run_thread, args=(running,), daemon=True).start()
        else:
            self._tasks[n] = self.loop.create_task(self._run(running))

    def _turn(self, n: int, turn: dict) -> None:
        running = self._running.get(n)
        if running is None:
            return
        if isinstance(running, BlockingAttempt):
            running.replies.put(turn)
        elif running.waiting is not None and not running.waiting.done():
            running.waiting.set_result(turn)

    def _cancel(self, n: int) -> None:
        running = self._running.get(n)
        if running is None:  # it has already ended
            return
        running.gone = running.stopping = True
        if isinstance(running, BlockingAttempt):
            running.replies.put(None)
        else:
            self._stop(running)

    async def _run(self, running: Attempt) -> None:
        value, error = None, None
        try:
            value = await TimedCoroutine(running, self.runner.run(running.task, running.chat, running))
        except BaseException as e:
            error = e
        self._finish(running, value, error)

    def _run_thread(self, running: BlockingAttempt) -> None:
        value, error = None, None
        try:
            running.enter()
            try:
                value = self.runner.run(running.task, running.chat, running)
            finally:
                running.leave()
        except BaseException as e:
            error = e
        self.loop.call_soon_threadsafe(self._finish, running, value, error)

    def _finish(self, running: Attempt, value, error) -> None:
        self._running.pop(running.n, None)
        self._tasks.pop(running.n, None)
        message = running.end(value, error)
        try:
            self.send(message)
        except (ValueError, TypeError, RecursionError) as e:
            self.send([running.n, "failed", failure(e, running.phase)])

    def _tick(self) -> None:
        """Cancels attempts that are late, and reports those that do not end after cancelling. (The pool handles blocked
        loops.)"""
        self.seats.beat()
        for n in list(self._tasks):
            running = self._running[n]
            if not running.stopping and running.waiting is None:
                running.check()
                running.stopping = bool(running.late)
            if running.stopping:
                self._stop(running)
        self.loop.call_later(min(TICK_SECONDS, 0.25 * self.limits["step_seconds"]), self._tick)

    def _stop(self, running: Attempt) -> None:
        """Cancels an attempt once none of its threads runs, since those would continue."""
        now = time.monotonic()
        if running.thread_starts or running.cancelled < 0:
            return
        if not running.cancelled:
            running.cancelled = now
            self._tasks[running.n].cancel()
        elif now - running.cancelled > grace_seconds(self.limits["step_seconds"]):
            running.cancelled = -1.0
            self.send([running.n, "hung", running.late])


def failure(error: BaseException, phase: str) -> dict:
    """Returns the data of a "failed" message: {"cause": short text, "detail": end of the traceback, "fault": "env",
    "reward": 0, "notes": {}, "counts": {}}."""
    text = "".join(traceback.format_exception(error))
    return {"cause": cause(error, phase), "detail": text[-MAX_TRACEBACK_CHARS:], "fault": "env", "reward": 0.0,
            "notes": {}, "counts": {}}


def cause(error: BaseException, phase: str) -> str:
    """Returns a short cause such as 'ConnectionError in reset', with the HTTP status if there is one; equal ones are
    counted together.

    phase: what the episode was doing."""
    if isinstance(error, (BadEnvironment, MissingColumn)):
        return f"{safe_str(error)} (in {phase})"
    kind, status = type(error).__name__, getattr(error, "code", None)
    if not isinstance(status, int) or isinstance(error, SystemExit):
        status = getattr(getattr(error, "response", None), "status_code", None)
    return f"{kind} {status} in {phase}" if isinstance(status, int) else f"{kind} in {phase}"


def main() -> None:
    """Serves episodes from standard input until it ends, which it does when the parent exits in any way."""
    from jaxrl.envs import adapters
    from jaxrl.workers.sources import digest
    streams.begin("environment")
    seats, owner = Seats(int(sys.argv[4])), os.getpid()
    seats.beat()
    to_read, to_write = streams.private_descriptors()
    setup = json.loads(_first_line(to_read))
    before = set(sys.modules)
    sandbox.configure(setup["sandbox"])
    try:
        runner = adapters.load_runner(setup)
        first = ["ready", {"tools": runner.tools, "sources": digest(runner.functions, before, runner.files)}]
    except LoadError as e:
        first = ["fatal", f"{e}"]
    if os.getpid() != owner:
        os._exit(1)
    os.write(to_write, json.dumps(first).encode() + b"\n")
    if first[0] == "fatal":
        return
    code = 1
    try:
        Server(runner, setup, (to_read, to_write), seats).serve()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        if os.getpid() == owner:
            traceback.print_exc()
            code = streams.CHANNEL_LOST if _closed(to_write) else 1
    sys.stderr.flush()
    os._exit(code)


def _closed(fd: int) -> bool:
    try:
        os.fstat(fd)
        return False
    except OSError:
        return True


def _first_line(fd: int) -> bytes:
    """Reads the first line of a stream, and no more."""
    out = bytearray()
    while not out.endswith(b"\n"):
        data = os.read(fd, 1 << 16)
        if not data:
            os._exit(0)
        out += data
    return bytes(out)
