"""Workers on the hosts of a Ray cluster (env.executor=ray, reward.executor=ray). The only file that imports ray.

An actor runs the same kind of worker process as a local one and forwards its lines: same protocol, same supervisor,
same failures. If a host is lost, its unfinished work is repeated elsewhere, and no code is blamed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import tempfile
import threading
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.workers.process import Channel, PrintedOutput, WorkerProcess, environment

POLL_SECONDS = 0.2  # seconds for which an actor waits for lines before it returns none


def join(options, group: str) -> None:
    """Connects this process to the Ray cluster of options.ray_address, once.

    Args:
      options: config.env or config.reward.
      group: its name.

    Raises ConfigError if ray is not installed, no cluster responds, or it has fewer CPUs than workers * ray_cpus.
    """
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
            raise ConfigError(f"{where}: no Ray cluster responds there: {e}") from None
    there = ray.cluster_resources().get("CPU", 0.0)
    if there < options.workers * options.ray_cpus:
        raise ConfigError(f"{group}.workers={options.workers} with {group}.ray_cpus={options.ray_cpus:g}: the Ray "
                          f"cluster has {there:g} CPUs; lower one of them, or add hosts")


class RemoteProcess(Channel):
    """A worker process on another host, with the interface of a local one: descriptors of a local socket, whose other
    end two threads connect to the actor.

    Args:
      module: its `main()` runs in the worker. printed: receives its standard error.
      memory_gb: limit of the worker with its child processes; 0 = none.
      group, who: option group and kind of worker ("reward", "a reward"), for messages.
      python: another interpreter on its host, "" = the actor's.
      named: environment variables in addition to what Python needs, which its host provides.
      cpus: CPUs that Ray reserves.
      table: class of the memory that the worker shares with its actor (worker.Seats).
      store_state: called with the table's `state()`.
    """

    seats: Any  # what `store_state` writes, for the pool that launched it

    def __init__(self, module: str, printed: PrintedOutput, named: dict[str, str], memory_gb: float, *, group: str,
                 who: str,
                 cpus: float, python: str = "", table=None, store_state=lambda state: None):
        import ray
        super().__init__()
        self._ray, self._why, self._ended = ray, "", threading.Event()
        self._printed, self._store_state, self.lost = printed, store_state, False
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
        """Forwards lines to the worker."""
        write = self._actor.write.options(concurrency_group="into")
        with self._close_at_end():
            while data := self._theirs.recv(1 << 20):
                self._ray.get(write.remote(data))

    def _fetch(self) -> None:
        """Forwards lines of the worker, until it has ended."""
        read = self._actor.read.options(concurrency_group="out_of")
        with self._close_at_end():
            while not self._ended.is_set():
                data, state, printed, why = self._ray.get(read.remote())
                self._store_state(state)
                if printed:
                    self._printed.file.write(printed)
                if data:
                    self._theirs.sendall(data)
                if why:
                    self._why = why
                    return

    @contextlib.contextmanager
    def _close_at_end(self):
        """Context that closes the socket at its end, for any reason, so that the reader sees the end."""
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
        """Returns whether the process, or its host, has ended."""
        return bool(self._why)

    def how(self) -> str:
        """Returns how the process ended, as text for messages."""
        return self._why or "its streams were closed"

    def signal_kill(self) -> None:
        """Kills the Ray actor, and so the process; does not wait."""
        self._ended.set()
        with contextlib.suppress(Exception):  # of a cluster that is gone
            self._ray.kill(self._actor)

    def kill(self) -> None:
        """Kills the process through its Ray actor and closes its streams."""
        self.signal_kill()
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        os.close(self.descriptors[0])
        self._ours.close()
        self._theirs.close()


class Host:
    """The actor: runs a worker process on its host.

    Args:
      module: its `main()` runs in the worker. memory_gb: limit of it with its child processes; 0 = none.
      group, who: option group and kind of worker, for messages. python: another interpreter, "" = this one.
      named: environment variables in addition to what Python needs.
      table: class of the memory that the worker shares with this actor (worker.Seats), or None.
    """

    def __init__(self, module: str, named: dict[str, str], memory_gb: float, group: str, who: str, python: str, table):
        self._state, self._out, self._why, self._at = threading.Condition(), bytearray(), "", 0
        self._printed, self._table, self._process = PrintedOutput(), None, None
        how = {"group": group, "who": who, "python": python}
        if table is not None:
            self._file = tempfile.TemporaryFile()
            self._file.truncate(table.BYTES)
            self._table, fd = table(self._file.fileno()), self._file.fileno()
            how |= {"inherit": (fd,), "arguments": (str(fd),)}
        arguments = (module, self._printed, environment((), python) | named, memory_gb), how
        threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, arguments: tuple, how: dict) -> None:
        """Starts the worker, which lives as long as this thread, and takes what it says."""
        try:
            process = WorkerProcess(*arguments, **how)
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
        """Sends bytes to the worker, waiting until it has started and reads them. Bytes for one that has ended are
        dropped."""
        with self._state:
            while self._process is None and not self._why:
                self._state.wait(POLL_SECONDS)
            if self._why or self._process is None:
                return
        into, _ = self._process.descriptors
        with selectors.DefaultSelector() as selector:
            selector.register(into, selectors.EVENT_WRITE)
            while data and not self._why:
                selector.select(POLL_SECONDS)
                try:
                    data = data[os.write(into, data):]
                except BlockingIOError:
                    continue
                except OSError:  # its end is noticed where it is read from
                    return

    def read(self) -> tuple[bytes, Any, bytes, str]:
        """Returns (bytes of the worker's lines, the table's state, printed text, how it ended or ""); waits up to
        POLL_SECONDS for lines. Each call returns what is new; without a table its state is None."""
        with self._state:
            if not self._out and not self._why:
                self._state.wait(POLL_SECONDS)
            data, why = bytes(self._out), self._why
            self._out.clear()
        state = None if self._table is None else self._table.state()
        size = os.fstat(self._printed.file.fileno()).st_size
        printed = os.pread(self._printed.file.fileno(), 1 << 20, self._at) if size > self._at else b""
        self._at += len(printed)
        if size == self._at > 1 << 20:
            os.ftruncate(self._printed.file.fileno(), 0)
            self._at = 0
        return data, state, printed, why
