"""Connects the processes of a run before jax joins them.

jax ends the process when another one is missing or dies, without naming it. So every process first greets process 0
on the port that jax's coordinator uses afterwards, and these connections stay open until jax is up: a process that
ends meanwhile closes its connection, and the others stop and name it. `group` calls it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import selectors
import socket
import threading
import time
from typing import NamedTuple

from jaxrl.errors import RunStopped
from jaxrl.processes.deadline import print_last

GREETING_WORD = "jaxrl"
RETURN_SECONDS = 10.0  # within which a process whose connection broke may reconnect
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that went down is detected after 20 s


class PeerLost(RunStopped):
    """Another process of the run is gone, late, or gave up. The message names it."""


class Place(NamedTuple):
    """This process's rank and coordinator.

    Attributes:
      source: what named it: explicit, slurm, kubernetes or tpu.
      coordinator: host:port of process 0, empty if jax finds it itself.
      processes: their number; of a TPU pod the hosts that the environment names. process: rank of this one, from 0.
      hosts: by process, if the environment has them, else ().
    """

    source: str
    coordinator: str
    processes: int
    process: int
    hosts: tuple[str, ...] = ()  # by process, if the environment has them


def greet_all(place: Place, seconds: float) -> JoinWatch:
    """Waits until every process has greeted process 0.

    Returns:
      A context that watches them until jax has joined them.

    Raises:
      PeerLost: names who did not connect within `seconds`, or was lost.
      OSError: process 0 cannot listen at the coordinator's port.
    """
    if place.process:
        return _greet(place, seconds)
    host, _, port = place.coordinator.rpartition(":")
    address = listen_address(host.strip("[]"))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, int(port)), family=family, backlog=max(128, place.processes)) as server:
        return _Gathering(place, seconds).all(server)


def listen_address(host: str) -> str:
    """Returns the address on which process 0 is reached by the coordinator's name, so that its ports, which need no
    key, are open in that network only.

    Empty = all addresses, if the name has no address or leads elsewhere: to something in front of this host or, as in
    some /etc/hosts, from this host to loopback.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, *_, (address, *_) in sorted(found, key=lambda row: row[0] != socket.AF_INET):
        if host not in (address, "localhost") and ipaddress.ip_address(address).is_loopback:
            continue
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.bind((address, 0))
        except OSError:
            continue
        return str(address)
    return ""


# ---- process 0


class _Gathering:
    """Process 0 while the others come. Whoever says nothing, or something else, holds one of a limited number of
    connections; the oldest silent one gives way."""

    def __init__(self, place: Place, seconds: float):
        self._place, self._seconds, self._end = place, seconds, time.monotonic() + seconds
        self._here: dict[int, socket.socket] = {}
        self._silent: list[socket.socket] = []  # the oldest first
        self._lost: dict[int, float] = {}       # process -> when its connection broke
        self._names = dict(enumerate(place.hosts))
        self._ready = selectors.DefaultSelector()

    def all(self, server: socket.socket) -> JoinWatch:
        place = self._place
        try:
            with self._ready:
                self._ready.register(server, selectors.EVENT_READ)
                while len(self._here) < place.processes - 1 and time.monotonic() < self._end:
                    for key, _ in self._ready.select(min(0.5, max(0.0, self._end - time.monotonic()))):
                        if isinstance(key.fileobj, socket.socket):
                            self._look(server, key.fileobj)
                    self._stop_for_lost(RETURN_SECONDS)
            server.close()  # before anybody goes on: the port is the coordinator's from here
            self._stop_for_lost(0.0)
            missing = sorted(set(range(1, place.processes)) - self._here.keys())
            if missing:
                self._stop(_absent_text([self._name(i) for i in missing], place.processes, self._seconds))
            self._tell("go")
            return JoinWatch(self._here, self._name)
        except BaseException:
            self._close(*self._here.values())
            raise
        finally:
            self._close(*self._silent)

    def _look(self, server: socket.socket, connection: socket.socket) -> None:
        if connection is server:
            with contextlib.suppress(OSError):
                self._accept(server)
        elif connection in self._silent:
            self._silent.remove(connection)
            if not self._greeted(connection):
                self._forget(connection)
        elif connection.fileno() >= 0:  # a process that has greeted says nothing more: it has ended
            process = next(i for i, one in self._here.items() if one is connection)
            del self._here[process]
            self._lost[process] = time.monotonic()
            self._forget(connection)

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.setblocking(False)
        self._ready.register(connection, selectors.EVENT_READ)
        self._silent.append(connection)
        if len(self._silent) > max(128, 4 * self._place.processes):
            self._forget(self._silent.pop(0))

    def _greeted(self, connection: socket.socket) -> bool:
        """Reads a greeting: `jaxrl PROCESS PROCESSES HOST`."""
        try:
            words = connection.recv(256).decode(errors="replace").split()
        except OSError:
            return False
        process = int(words[1]) if len(words) == 4 and re.fullmatch("[0-9]{1,9}", words[1]) else 0
        if not 0 < process < self._place.processes or [words[0], words[2]] != [GREETING_WORD,
                                                                               str(self._place.processes)]:
            return False
        if process in self._here:  # it comes again: its last connection is none any more
            self._forget(self._here.pop(process))
        self._lost.pop(process, None)
        self._names.setdefault(process, re.sub(r"[^\w.-]", "", words[3])[:64])
        connection.settimeout(10.0)
        _keep_alive(connection)
        self._here[process] = connection
        return True

    def _stop_for_lost(self, patience: float) -> None:
        gone = [i for i, since in self._lost.items() if time.monotonic() - since >= patience]
        if gone:
            self._stop(_lost([self._name(i) for i in sorted(gone)]))

    def _stop(self, text: str) -> None:
        self._tell(f"stop {text}")
        raise PeerLost(text)

    def _tell(self, line: str) -> None:
        for connection in self._here.values():
            _say(connection, line)

    def _name(self, process: int) -> str:
        name = self._names.get(process)
        return f"{process} ({name})" if name else str(process)

    def _forget(self, connection: socket.socket) -> None:
        self._ready.unregister(connection)
        connection.close()

    @staticmethod
    def _close(*connections: socket.socket) -> None:
        for connection in connections:
            connection.close()


# ---- the others


def _greet(place: Place, seconds: float) -> JoinWatch:
    host, _, port = place.coordinator.rpartition(":")
    end, name = time.monotonic() + seconds, re.sub(r"\s", "", socket.gethostname()) or "-"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, 5.0))
            try:
                connection.sendall(f"{GREETING_WORD} {place.process} {place.processes} {name}".encode())
                connection.settimeout(left + 5.0)
                _keep_alive(connection)
                answer = _line(connection)
            except BaseException:
                connection.close()
                raise
        except OSError:
            time.sleep(0.2)
            continue
        if answer.startswith("stop "):
            connection.close()
            raise PeerLost(answer[5:])
        return JoinWatch({0: connection}, lambda process: f"0 ({place.coordinator})")
    raise PeerLost(f"process 0 does not answer at {place.coordinator} within launch.connect_seconds={seconds:g}: it is "
                   "not running, or this host cannot reach it (check name, firewall, launch.coordinator)")


# ---- until jax is up


class JoinWatch:
    """Watches the connections of the greeted processes while jax joins them.

    A connection that ends before its process reports that jax is up ends this process with status 1 and the other's
    name on standard error, since the main thread waits inside jax.

    Args:
      connections: process -> its connection; process 0 has all, the others that of process 0.
      name: process -> its name.
    """

    def __init__(self, connections: dict[int, socket.socket], name):
        self._connections, self._name = connections, name
        self._closing, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="joining")

    def __enter__(self) -> JoinWatch:
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Closes the connections once jax is up or has failed, which tells the others."""
        if error is None:
            for connection in self._connections.values():
                _say(connection, "up")
        self.close()

    def close(self) -> None:
        """Stops watching and closes all connections."""
        self._closing.close()
        if self._thread.is_alive():
            self._thread.join()
        self._wakes.close()
        for connection in self._connections.values():
            connection.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._wakes, selectors.EVENT_READ, None)
            for process, connection in self._connections.items():
                ready.register(connection, selectors.EVENT_READ, process)
            while True:
                for key, _ in ready.select():
                    if not isinstance(key.fileobj, socket.socket) or key.fileobj is self._wakes:
                        return
                    try:
                        line = _line(key.fileobj)
                    except OSError:
                        line = f"stop {_lost([self._name(key.data)])}"
                    if line.startswith("stop "):
                        self._stop(key.data, line)
                    ready.unregister(key.fileobj)

    def _stop(self, process: int, line: str) -> None:
        """Tells the others, gives them a moment (with process 0 goes the coordinator, and then jax aborts them), and
        ends this process."""
        print_last(f"stopped: {line[5:]}")
        others = [connection for i, connection in self._connections.items() if i != process]
        for connection in others:
            _say(connection, line)
        for connection in others:
            with contextlib.suppress(OSError):
                while True:
                    _line(connection)
        os._exit(1)


# ---- words


def _lost(names: list[str]) -> str:
    return (f"process {', '.join(names)} was lost while the processes connected: it was killed, it failed (see "
            "its log), or its host went down")


def _absent_text(names: list[str], processes: int, seconds: float) -> str:
    return (f"{len(names)} of {processes} processes did not come within launch.connect_seconds={seconds:g}: "
            f"{', '.join(names)}. Start them (they may have failed: see their logs), or raise launch.connect_seconds")


def _say(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _line(connection: socket.socket) -> str:
    """Returns the next line. Raises OSError at the end of the connection, and for a line that is longer
    than any of ours.
    """
    out = b""
    while not out.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(out) > 1 << 16:
            raise ConnectionError("the connection has ended")
        out += part
    return out.decode(errors="replace")[:-1]


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
