"""Workers on the hosts of a Ray cluster (env.executor=ray, reward.executor=ray). The only file that imports ray.

An actor holds a worker process of the kind that runs here, and passes its lines on: the same protocol, the same
supervisor beside it, the same faults. A host that is lost costs nobody but the time of what it was at: nobody's code
was the cause, so all of it begins again elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import threading

from jaxrl.errors import ConfigError
from jaxrl.workers.process import Channel, Printed, WorkerProcess, environment

WAIT = 0.2  # seconds in which an actor waits for lines before it says that there are none


def join(options, group: str) -> None:
    """Connects this process to the cluster of options.ray_address, once. options: config.env, or config.reward; group:
    its name. Raises ConfigError."""
    try:
        import ray
    except ImportError as e:
        raise ConfigError(f"{group}.executor=ray needs the package ray ({e}): pip install 'jaxrl[ray]' here and on the "
                          f"cluster's hosts, or leave {group}.executor=local") from None
    if not ray.is_initialized():
        try:
            ray.init(address=options.ray_address or None, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as e:
            where = f"{group}.ray_address={options.ray_address!r}"
            raise ConfigError(f"{where}: no Ray cluster answers there: {e}") from None
    there = ray.cluster_resources().get("CPU", 0.0)
    if there < options.workers * options.ray_cpus:
        raise ConfigError(f"{group}.workers={options.workers} with {group}.ray_cpus={options.ray_cpus:g}: the Ray "
                          f"cluster has {there:g} CPUs; lower one of them, or add hosts")


class RemoteProcess(Channel):
    """A worker process of another host, as one of this host is spoken to: descriptors of a socket here, at whose other
    end two threads speak with the actor. lost: it ended with its host.

    Args:
      module, printed, memory_gb, group, who, python: see WorkerProcess. named: variables that the worker gets beside
        what Python needs, which its host knows. cpus: of those that Ray counts.
      table: class of memory that the worker shares with its actor (worker.Seats), whose `ages()` are told here.
      told: called with them.
    """

    def __init__(self, module: str, printed: Printed, named: dict[str, str], memory_gb: float, *, group: str, who: str,
                 cpus: float, python: str = "", table=None, told=lambda ages: None):
        import ray
        super().__init__()
        self._ray, self._why, self._ended = ray, "", threading.Event()
        self._printed, self._told, self.lost = printed, told, False
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.descriptors = os.dup(self._ours.fileno()), self._ours.fileno()  # two, because each is waited for by itself
        host = ray.remote(num_cpus=cpus, max_restarts=0, scheduling_strategy="SPREAD",
                          concurrency_groups={"into": 1, "out_of": 1})(Host)
        self._actor = host.remote(module, named, memory_gb, group, who, python, table)
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
                self._told(ages)
                if printed:
                    self._printed.file.write(printed)
                if data:
                    self._theirs.sendall(data)
                if why:
                    self._why = why
                    return

    @contextlib.contextmanager
    def _noticing(self):
        """At the end, however it comes, whoever speaks with the worker is told by the end of the socket."""
        try:
            yield
        except self._ray.exceptions.RayError as e:
            self.lost = not self._ended.is_set()
            self._why = self._why or f"its host or its actor in the Ray cluster is gone ({type(e).__name__})"
        except OSError:
            pass  # closed from here
        finally:
            with contextlib.suppress(OSError):
                self._theirs.shutdown(socket.SHUT_WR)

    def gone(self) -> bool:
        return bool(self._why)

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


class Host:
    """The actor: a worker process of its host."""

    def __init__(self, module: str, named: dict[str, str], memory_gb: float, group: str, who: str, python: str, table):
        self._state, self._out, self._why, self._at = threading.Condition(), bytearray(), "", 0
        self._printed, self._table, self._process = Printed(), None, None
        how = {"group": group, "who": who, "python": python}
        if table is not None:
            self._file = tempfile.TemporaryFile()
            self._file.truncate(table.BYTES)
            self._table, fd = table(self._file.fileno()), self._file.fileno()
            how |= {"inherit": (fd,), "arguments": (str(fd),)}
        given = (module, self._printed, environment((), python) | named, memory_gb), how
        threading.Thread(target=self._serve, args=given, daemon=True).start()

    def _serve(self, given: tuple, how: dict) -> None:
        """Starts the worker, which lives as long as this thread, and takes what it says."""
        try:
            process = WorkerProcess(*given, **how)
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
        """(lines, the table's ages, what was printed, how it ended or "")."""
        with self._state:
            if not self._out and not self._why:
                self._state.wait(WAIT)
            data, why = bytes(self._out), self._why
            self._out.clear()
        ages = {} if self._table is None else self._table.ages()
        size = os.fstat(self._printed.file.fileno()).st_size
        printed = os.pread(self._printed.file.fileno(), 1 << 20, self._at) if size > self._at else b""
        self._at += len(printed)
        if size == self._at > 1 << 20:
            os.ftruncate(self._printed.file.fileno(), 0)
            self._at = 0
        return data, ages, printed, why
