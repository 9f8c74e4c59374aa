"""Environment workers on the hosts of a Ray cluster (env.executor=ray). The only file that imports ray.

An actor holds a worker process of the kind that runs here, and passes its lines on: the same protocol, the same
supervisor beside it, the same faults. A host that is lost costs nobody but the time of its episodes: nobody's code was
the cause, so all of them begin again elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import threading
import time

from jaxrl.envs.worker import AT_ONCE, Seats
from jaxrl.errors import ConfigError
from jaxrl.workers.process import Printed, WorkerProcess, environment

WAIT = 0.2  # seconds in which an actor waits for lines before it says that there are none


def join(env) -> None:
    """Connects this process to the cluster, once. Raises ConfigError."""
    try:
        import ray
    except ImportError as e:
        raise ConfigError(f"env.executor=ray needs the package ray ({e}): pip install 'jaxrl[ray]' here and on the "
                          "cluster's hosts, or leave env.executor=local") from None
    if not ray.is_initialized():
        try:
            ray.init(address=env.ray_address or None, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise ConfigError(f"env.ray_address={env.ray_address!r}: no Ray cluster answers there: {e}") from None
    there = ray.cluster_resources().get("CPU", 0.0)
    if there < env.workers * env.ray_cpus:
        raise ConfigError(f"env.workers={env.workers} with env.ray_cpus={env.ray_cpus:g}: the Ray cluster has "
                          f"{there:g} CPUs; lower one of them, or add hosts")


class RemoteProcess:
    """A worker process of another host, as the pool speaks to one: descriptors of a socket here, at whose other end two
    threads speak with the actor. seats: like worker.Seats, in this host's time. lost: it ended with its host."""

    def __init__(self, pool):
        import ray
        self._ray, self._why, self._ended = ray, "", threading.Event()
        self._printed, self.seats, self.lost = pool.printed, RemoteSeats(), False
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.descriptors = os.dup(self._ours.fileno()), self._ours.fileno()  # two, because each is waited for by itself
        env = pool.env
        named = {name: os.environ[name] for name in pool.variables if name in os.environ}
        host = ray.remote(num_cpus=env.ray_cpus, max_restarts=0, scheduling_strategy="SPREAD",
                          concurrency_groups={"into": 1, "out_of": 1})(Host)
        self._actor = host.remote(named, env.python, pool.memory_gb)
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._bring, self._fetch)]
        for thread in self._threads:
            thread.start()

    def _bring(self) -> None:
        """Lines to the worker."""
        write = self._actor.write.options(concurrency_group="into")
        with self._noticing():
            while data := self._theirs.recv(1 << 20):
                self._ray.get(write.remote(data))

    def _fetch(self) -> None:
        """Lines of the worker, until it has ended."""
        read = self._actor.read.options(concurrency_group="out_of")
        with self._noticing():
            while not self._ended.is_set():
                data, ages, printed, why = self._ray.get(read.remote())
                self.seats.told(ages)
                if printed:
                    self._printed.file.write(printed)
                if data:
                    self._theirs.sendall(data)
                if why:
                    self._why = why
                    return

    @contextlib.contextmanager
    def _noticing(self):
        """At the end, however it comes, the pool is told by the end of its socket."""
        try:
            yield
        except self._ray.exceptions.RayError as e:
            self.lost = not self._ended.is_set()
            self._why = self._why or f"its host or its actor in the Ray cluster is gone ({type(e).__name__})"
        except OSError:
            pass  # the pool has closed its end
        finally:
            with contextlib.suppress(OSError):
                self._theirs.shutdown(socket.SHUT_WR)

    def how(self) -> str:
        return self._why or "its streams were closed"

    def signal_kill(self) -> None:
        self._ended.set()
        with contextlib.suppress(Exception):  # of a cluster that is gone
            self._ray.kill(self._actor)

    def kill(self) -> None:
        self.signal_kill()
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        os.close(self.descriptors[0])
        self._ours.close()
        self._theirs.close()


class RemoteSeats:
    """Since when which seat's code is running, as the actor told it last."""

    def __init__(self):
        self.since = [0.0] * (AT_ONCE + 1)

    def told(self, ages: dict[int, float]) -> None:
        now = time.monotonic()
        for seat in range(AT_ONCE + 1):
            self.since[seat] = now - ages[seat] if seat in ages else 0.0


class Host:
    """The actor: a worker process of its host."""

    def __init__(self, named: dict[str, str], python: str, memory_gb: float):
        self._state, self._out, self._why, self._at = threading.Condition(), bytearray(), "", 0
        self._printed, self._table = Printed(), tempfile.TemporaryFile()
        self._table.truncate(Seats.BYTES)
        self._seats, self._process = Seats(self._table.fileno()), None
        self._given = environment((), python) | named, python, memory_gb
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Starts the worker, which lives as long as this thread, and takes what it says."""
        env, python, memory_gb = self._given
        fd = self._table.fileno()
        try:
            process = WorkerProcess("jaxrl.envs.worker", self._printed, env, memory_gb, group="env",
                                    who="an environment", python=python, inherit=(fd,), arguments=(str(fd),))
        except OSError as e:
            with self._state:
                self._why = f"it cannot be started: {e}"
            return
        with self._state:
            self._process = process
            self._state.notify_all()
        into, out_of = process.descriptors
        with selectors.DefaultSelector() as selector:
            selector.register(out_of, selectors.EVENT_READ)
            while selector.select():
                try:
                    data = os.read(out_of, 1 << 20)
                except BlockingIOError:
                    continue
                with self._state:
                    self._out += data
                    if not data:
                        self._why = process.how()
                    self._state.notify_all()
                if not data:
                    process.kill()
                    return

    def write(self, data: bytes) -> None:
        with self._state:
            while self._process is None and not self._why:
                self._state.wait(WAIT)
            if self._why:
                return
        into, _ = self._process.descriptors
        with selectors.DefaultSelector() as selector:
            selector.register(into, selectors.EVENT_WRITE)
            while data and not self._why:
                selector.select(WAIT)
                try:
                    data = data[os.write(into, data):]
                except BlockingIOError:
                    continue
                except OSError:  # its end is noticed where it is read from
                    return

    def read(self) -> tuple[bytes, dict[int, float], bytes, str]:
        """(lines, seconds since when seats run, what was printed, how it ended or "")."""
        with self._state:
            if not self._out and not self._why:
                self._state.wait(WAIT)
            data, why = bytes(self._out), self._why
            self._out.clear()
        now = time.monotonic()
        ages = {seat: now - t for seat, t in enumerate(self._seats.since) if t}
        size = os.fstat(self._printed.file.fileno()).st_size
        printed = os.pread(self._printed.file.fileno(), 1 << 20, self._at) if size > self._at else b""
        self._at += len(printed)
        if size == self._at > 1 << 20:
            os.ftruncate(self._printed.file.fileno(), 0)
            self._at = 0
        return data, ages, printed, why
