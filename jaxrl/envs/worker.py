"""An environment worker: runs up to 64 episodes at once. JSON lines over pipes; standard library only, never jax.

Protocol (one JSON value per line; n is the number of a try at an episode, seat its place in the table of `Seats`):
  in   {function, tools, options, ...}                                    once, see pool._setup
  out  ["ready", {tools, sources}] or ["fatal", message]
  in   ["start", n, seat, task] | ["turn", n, turn] | ["cancel", n]
  out  [n, "send" | "done" | "failed", data], [n, "gone"] after a cancel, [n, "hung", cause] for one that does not end

Asynchronous episodes are tasks of one loop. A plain episode has a thread, of which one runs at a time; a class's plain
methods and plain tools run on the loop, one at a time too; each with random numbers of its own. With env.threads they
run beside each other in threads. What is running since when stands in shared memory: the pool kills what hangs.
"""

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

from jaxrl import sandbox
from jaxrl.envs.api import BadEnvironment, MissingColumn, Row, Task
from jaxrl.workers import streams
from jaxrl.workers.loading import LoadError, shown

AT_ONCE = 64            # episodes of a worker
TICK_SECONDS = 0.25     # between two looks at who is late
DETAIL = 4000           # characters of a traceback that are kept
FORKED = False          # whether this process is a fork of a worker: it ends where it comes back from the user's code


def grace(step_seconds: float) -> float:
    """Seconds beyond a limit in which what runs may still end by itself."""
    return 1.0 + min(0.25 * step_seconds, 10.0)


class Late(BaseException):
    """The episode ran out of time. Not an Exception: user's code must not take it for one of its own."""


class Gone(BaseException):
    """Nobody wants the episode any more."""


class Seats:
    """Shared memory of a worker and the pool: per seat since when (time.monotonic) its code is running, 0 = it is not;
    behind them when the loop was last seen alive."""

    BYTES = 8 * (AT_ONCE + 1)

    def __init__(self, fd: int):
        os.lseek(fd, self.BYTES, os.SEEK_SET)  # who writes to all descriptors there are does not write to the table
        self.since = memoryview(mmap.mmap(fd, self.BYTES)).cast("d")

    def beat(self) -> None:
        self.since[AT_ONCE] = time.monotonic()

    def ages(self) -> dict[int, float]:
        """Seconds since then, for another host, whose clock is another."""
        now = time.monotonic()
        return {seat: now - since for seat, since in enumerate(self.since) if since}


class RemoteSeats:
    """The same of a worker on another host, as its actor told it last."""

    def __init__(self):
        self.since = [0.0] * (AT_ONCE + 1)

    def told(self, ages: dict[int, float]) -> None:
        now = time.monotonic()
        for seat in range(AT_ONCE + 1):
            self.since[seat] = now - ages[seat] if seat in ages else 0.0


class GlobalRandom:
    """The process's random numbers as one episode sees them, whatever others draw in between."""

    def __init__(self, seed: int):
        self._seed, self._python, self._numpy = seed, None, None

    def enter(self) -> None:
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
        self._python = random.getstate()
        if (numpy := _numpy_random()) is not None:
            self._numpy = numpy.get_state()


def _numpy_random():
    found = sys.modules.get("numpy.random")
    return found if hasattr(found, "set_state") else None


class Running:
    """A try at an episode: what it may do (the host of its Chat), and its clock."""

    def __init__(self, server: Server, n: int, seat: int, task: dict):
        self.server, self.n, self.seat, self.seed = server, n, seat, task["seed"]
        self.task = Task(Row(task["row"]), task["prompt"], task["seed"], server.user)
        self.random, self.phase = GlobalRandom(task["seed"]), ""
        self.waiting = None   # for the model's turn: a future, or a queue
        self.late, self.gone, self.stopping, self.cancelled = "", False, False, 0.0
        self.seconds, self.outside = 0.0, []  # of the turns before; since when threads of it run
        self._clock()

    # -- time: the environment's own, neither the model's nor that of other episodes on the loop

    def _clock(self) -> None:
        self.began, self.busy, self.running = time.monotonic(), self.server.busy, 0.0

    def spent(self) -> float:
        """Seconds of this turn."""
        if self.server.play.blocking:
            return self.running
        return max(self.running, time.monotonic() - self.began - (self.server.busy - self.busy) + self.running)

    def check(self) -> None:
        """Notes that it is late."""
        spent, limits = self.spent(), self.server.limits
        if not self.late and spent > limits["step_seconds"]:
            self.late = f"a turn took longer than env.step_seconds={limits['step_seconds']:g}"
        elif not self.late and self.seconds + spent > limits["episode_seconds"]:
            self.late = f"it took longer than env.episode_seconds={limits['episode_seconds']:g}"

    def enter(self) -> None:
        self.entered = self.server.seats.since[self.seat] = time.monotonic()

    def leave(self) -> None:
        if FORKED:
            os._exit(1)
        now = self.server.seats.since[AT_ONCE] = time.monotonic()
        took = now - self.entered
        self.running += took
        if not self.server.play.blocking:
            self.server.busy += took
        self.server.seats.since[self.seat] = min(self.outside, default=0.0)

    # -- the host of a Chat

    def _sent(self, payload: dict) -> None:
        self.check()
        if self.late:
            raise Late
        spent = self.spent()
        self.seconds += spent
        self.server.send([self.n, "send", payload | {"seconds": spent}])

    async def exchange(self, payload: dict) -> dict:
        self._sent(payload)
        self.waiting = self.server.loop.create_future()
        turn = await self.waiting
        self.waiting = None
        self._clock()
        return turn

    async def call(self, fn, phase: str, *args, **kwargs):
        """What a function of the user returns, run as env.threads says; a coroutine is awaited."""
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
            self.phase = phase  # calls that ran beside it may have changed it
            raise
        self.phase = before
        return found

    async def _in_thread(self, fn, args, kwargs):
        def run():
            try:
                return fn(*args, **kwargs)
            except StopIteration as e:  # which no future can hold
                raise RuntimeError("StopIteration") from e

        self.outside.append(since := time.monotonic())
        try:
            return await self.server.loop.run_in_executor(self.server.executor, run)
        finally:
            self.outside.remove(since)

    async def together(self, coroutines) -> list:
        """Their results, when all are there; raises what one raised."""
        if len(coroutines) == 1:
            return [await coroutines[0]]

        async def outcome(coroutine):
            try:
                return await Driven(self, coroutine), None
            except BaseException as e:  # (a SystemExit would end the loop)
                return None, e

        outcomes = await asyncio.gather(*map(outcome, coroutines))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [value for value, _ in outcomes]

    # -- what becomes of it

    def end(self, value=None, error: BaseException | None = None) -> list:
        """The message that ends it."""
        if self.gone:
            return [self.n, "gone"]
        self.check()
        if self.late:
            return [self.n, "failed", {"cause": self.late, "detail": f"it was at {self.phase}", "fault": "late",
                                       "reward": self.chat._reward}]
        self.seconds += self.spent()
        try:
            if error is None:
                return [self.n, "done", self.chat._result(value) | {"seconds": self.seconds}]
        except Exception as e:
            error = e
        return [self.n, "failed", failure(error, self.phase)]


class BlockingRunning(Running):
    """Of a plain function: it has a thread, and what is awaited elsewhere blocks it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.waiting, self.replies, self.asks = None, queue.SimpleQueue(), False

    def enter(self) -> None:
        if not self.server.threads:
            self.server.baton.acquire()
            self.random.enter()
        self._clock()
        super().enter()

    def leave(self) -> None:
        super().leave()
        if not self.server.threads:
            self.random.leave()
            self.server.baton.release()

    async def exchange(self, payload: dict) -> dict:
        self.leave()
        try:
            self._sent(payload)
            turn = self.replies.get()
        finally:
            self.enter()
        if self.gone:
            raise Gone
        return turn

    async def call(self, fn, phase: str, *args, **kwargs):
        before, self.phase = self.phase, phase
        found = fn(*args, **kwargs)
        if hasattr(found, "__await__"):
            found = asyncio.run(_awaited(found))
        self.phase = before
        return found

    async def together(self, coroutines) -> list:
        return [await c for c in coroutines]


async def _awaited(awaitable):
    return await awaitable


class Driven:
    """A coroutine whose every step is noted as its episode's: a table shows the pool whose code is running."""

    def __init__(self, running: Running, coroutine):
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
            except BaseException as e:  # a cancellation, or what the future holds: the coroutine's to deal with
                error = e


class Server:
    """The loop of a worker. play: what an episode is, of adapters.find."""

    def __init__(self, play, setup: dict, streams: tuple[int, int], seats: Seats):
        self.play, self.limits, self.user, self.threads = play, setup["limits"], setup["user"], setup["threads"]
        self.parallel, self.seats, self.busy = setup["max_parallel_calls"], seats, 0.0
        self.baton = threading.Lock()  # of plain episodes: who has it runs
        self.executor = concurrent.futures.ThreadPoolExecutor(AT_ONCE * max(1, self.parallel))
        self._in, self._out = streams
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._running: dict[int, Running] = {}
        self._tasks: dict[int, asyncio.Task] = {}
        self._buffer, self._unsent, self._lock = b"", [], threading.Lock()
        self._encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
        self._thread = threading.get_ident()

    def serve(self) -> None:
        """Until the parent is gone."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)
        asyncio.set_event_loop(self.loop)
        self.loop.add_reader(self._in, self._read)
        self._tick()
        self.loop.run_forever()

    def _in_child(self) -> None:
        """A fork has no part in the protocol, the table and this process's selector."""
        global FORKED
        FORKED = True
        self.seats.since = [0.0] * (AT_ONCE + 1)
        self._selector.close()

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, message: list) -> None:
        """Any thread's. Lines that come together are written together."""
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
        running = self._running[n] = (BlockingRunning if self.play.blocking else Running)(self, n, seat, task)
        running.phase, running.chat = self.play.name, self.play.chat(running, self.parallel)
        if self.play.blocking:
            threading.Thread(target=self._run_thread, args=(running,), daemon=True).start()
        else:
            self._tasks[n] = self.loop.create_task(self._run(running))

    def _turn(self, n: int, turn: dict) -> None:
        running = self._running.get(n)
        if running is None:
            return
        if self.play.blocking:
            running.replies.put(turn)
        elif running.waiting is not None and not running.waiting.done():
            running.waiting.set_result(turn)

    def _cancel(self, n: int) -> None:
        running = self._running.get(n)
        if running is None:  # its end is on the way
            return
        running.gone = running.stopping = True
        if self.play.blocking:
            running.replies.put(None)
        else:
            self._stop(running)

    async def _run(self, running: Running) -> None:
        value, error = None, None
        try:
            value = await Driven(running, self.play.run(running.task, running.chat, running))
        except BaseException as e:
            error = e
        self._over(running, value, error)

    def _run_thread(self, running: BlockingRunning) -> None:
        value, error = None, None
        try:
            running.enter()
            try:
                value = self.play.run(running.task, running.chat, running)
            finally:
                running.leave()
        except BaseException as e:
            error = e
        self.loop.call_soon_threadsafe(self._over, running, value, error)

    def _over(self, running: Running, value, error) -> None:
        self._running.pop(running.n, None)
        self._tasks.pop(running.n, None)
        message = running.end(value, error)
        try:
            self.send(message)
        except (ValueError, TypeError, RecursionError) as e:
            self.send([running.n, "failed", failure(e, running.phase)])

    def _tick(self) -> None:
        """Cancels what is late, and says what does not end though it was cancelled. (What blocks is the pool's.)"""
        self.seats.beat()
        for n in list(self._tasks):
            running = self._running[n]
            if not running.stopping and running.waiting is None:
                running.check()
                running.stopping = bool(running.late)
            if running.stopping:
                self._stop(running)
        self.loop.call_later(min(TICK_SECONDS, 0.25 * self.limits["step_seconds"]), self._tick)

    def _stop(self, running: Running) -> None:
        """Cancels it, once none of its threads runs: those would run on."""
        now = time.monotonic()
        if running.outside or running.cancelled < 0:
            return
        if not running.cancelled:
            running.cancelled = now
            self._tasks[running.n].cancel()
        elif now - running.cancelled > grace(self.limits["step_seconds"]):
            running.cancelled = -1.0
            self.send([running.n, "hung", running.late])


def failure(error: BaseException, phase: str) -> dict:
    """Data of a "failed": `cause` short, so that equal ones can be counted, `detail` the traceback's end."""
    text = "".join(traceback.format_exception(error))
    return {"cause": cause(error, phase), "detail": text[-DETAIL:], "fault": "env", "reward": 0.0}


def cause(error: BaseException, phase: str) -> str:
    """'ConnectionError in reset', with an HTTP status where it has one."""
    if isinstance(error, (BadEnvironment, MissingColumn)):
        return f"{shown(error)} (in {phase})"
    kind, status = type(error).__name__, getattr(error, "code", None)
    if not isinstance(status, int) or isinstance(error, SystemExit):
        status = getattr(getattr(error, "response", None), "status_code", None)
    return f"{kind} {status} in {phase}" if isinstance(status, int) else f"{kind} in {phase}"


def main() -> None:
    """Serves until standard input ends, which it does when the parent goes, however it goes."""
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
        play = adapters.find(setup)
        first = ["ready", {"tools": play.tools, "sources": digest(play.functions, before, play.files)}]
    except LoadError as e:
        first = ["fatal", f"{e}"]
    if os.getpid() != owner:
        os._exit(1)
    os.write(to_write, json.dumps(first).encode() + b"\n")
    if first[0] == "fatal":
        return
    code = 1
    try:
        Server(play, setup, (to_read, to_write), seats).serve()
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
    """No more than that is taken of the stream."""
    out = bytearray()
    while not out.endswith(b"\n"):
        data = os.read(fd, 1 << 16)
        if not data:
            os._exit(0)
        out += data
    return bytes(out)
