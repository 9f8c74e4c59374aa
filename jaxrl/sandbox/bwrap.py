"""Sandbox backend of this host: bubblewrap, which needs user namespaces and no privileges."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import PurePosixPath

from jaxrl.sandbox import seccomp
from jaxrl.sandbox.refusals import not_installed, refusal
from jaxrl.sandbox.types import Limits, RunResult, Settings
from jaxrl.sandbox.watch import watch
from jaxrl.workers.supervisor import children

WORK = "/tmp/work"     # working folder of a program, with its files
OWN_PROCESSES = 2                # bubblewrap's processes, outside and inside
DESCRIPTORS = 256      # open files of a process
CAP_SYS_ADMIN = 21
FEWEST_USERS = 4096    # smallest user namespace that has unused user ids
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8",
               "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def run(argv: list[str], stdin: bytes, files: dict[str, bytes], limits: Limits, settings: Settings) -> RunResult:
    """Runs one program in bubblewrap until it ends or hits a limit.

    Args:
      argv: the program and its arguments; "python" is this interpreter.
      stdin: its standard input. files: relative path -> content, in its folder WORK.
      limits: of the run. settings: of which `paths` are shown to the program, read-only.

    Raises SandboxError if bubblewrap is missing or runs nothing; OSError if it cannot be started. A program that does
    not exist exits with a status above 0 and the reason on standard error.
    """
    deadline = time.monotonic() + limits.seconds
    with contextlib.ExitStack() as stack:
        def memory(data: bytes) -> int:
            fd = os.memfd_create("sandbox")
            stack.callback(os.close, fd)
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(fd, 0, os.SEEK_SET)
            return fd

        placed = [(memory(data), name) for name, data in files.items()]
        status, status_in = os.pipe()
        stack.callback(os.close, status)
        writer = stack.enter_context(os.fdopen(status_in, "wb"))
        fds = [status_in, *(fd for fd, _ in placed)]
        options = [*_mounts(limits.disk_mb, tuple(settings.paths)), *_files(placed), "--remount-ro", "/",
                   "--json-status-fd", str(status_in)]
        if (filtered := seccomp.program()) is not None:
            fds.append(memory(filtered))
            options += ["--seccomp", str(fds[-1])]
        way = _user_isolation()
        user = 0 if way == "namespace" else _fresh_user()
        program = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
        process = subprocess.Popen(
            [_program("bwrap"), *options, "--", *_user_command(user, way), *_limit_command(limits), *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, pass_fds=fds, env={},
            start_new_session=True,
            **({"user": user, "group": user, "extra_groups": ()} if way == "other user" else {}))
        try:
            out, err, limit = watch(process, stdin, limits, deadline, lambda: _kill(process), OWN_PROCESSES)
        except BaseException:
            _kill(process)
            process.wait()
            raise
        writer.close()
        exit = next((one["exit-code"] for one in _status_messages(status) if "exit-code" in one), None)
    return _result(process.returncode, exit, out, err, limit)


def _status_messages(fd: int) -> list[dict]:
    """Returns bubblewrap's status messages, a few short lines of JSON."""
    os.set_blocking(fd, False)
    try:
        return list(map(json.loads, os.read(fd, 1 << 16).splitlines()))
    except BlockingIOError:  # nothing, while something that is being killed holds the other end
        return []


def _result(code: int, exit: int | None, out: bytes, err: bytes, limit: str) -> RunResult:
    text, errors = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
    if limit:
        return RunResult(None, text, errors, limit)
    if exit is None:
        raise refusal(f"bubblewrap ended with {code} and ran nothing", errors)
    return RunResult(exit, text, errors, "cpu_seconds" if exit == 128 + signal.SIGXCPU else "")


@functools.cache
def _user_isolation() -> str:
    """Returns how a program gets a user id of its own.

    An ordinary user creates a user namespace, in which processes are counted separately. Root, whom no process limit
    stops and who owns much, switches to an unused user: inside the sandbox, or before it if root may not mount. Root
    of a namespace without spare user ids creates a further namespace like an ordinary user.
    """
    if os.geteuid() or _spare_users() is None:
        return "namespace"
    with open("/proc/self/status") as file:
        capable = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return "root" if capable >> CAP_SYS_ADMIN & 1 else "other user"


@functools.cache
def _spare_users() -> range | None:
    """Returns ids unused by any user and group: the last quarter of the longest range in this namespace, or None."""
    rows = []
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            lines = [tuple(map(int, line.split())) for line in file]
        rows.append(max(lines, key=lambda row: row[2], default=(0, 0, 0)))
    return _spare(rows)


def _spare(rows: list[tuple[int, int, int]]) -> range | None:
    """Returns the unused ids within the longest row of each map: (first id inside, first id outside, count)."""
    first = max(row[0] for row in rows)
    end = min(2**31, *(row[0] + row[2] for row in rows)) - 2  # 65534 is often somebody
    return range(end - min(2**20, (end - first) // 4), end) if end - first >= FEWEST_USERS else None


def _fresh_user() -> int:
    """Returns an unused user id, so that its process limit counts this program alone."""
    users = _spare_users()
    assert users is not None  # the backend is used only where there are some
    return secrets.choice(users)


def _user_command(user: int, way: str) -> list[str]:
    return [_program("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"
            ] if way == "root" else []


def _limit_command(limits: Limits) -> list[str]:
    """Returns the command that sets the kernel's limits."""
    cpu, disk = limits.whole_cpu_seconds, limits.disk_mb << 20
    wanted = {"cpu": (cpu, cpu + 1), "as": limits.memory_mb << 20, "fsize": disk, "core": 0, "memlock": 0,
              "nofile": DESCRIPTORS}
    if _user_isolation() != "namespace" or _counted_apart():
        # the first one of a namespace is bubblewrap's
        wanted["nproc"] = limits.processes + (_user_isolation() != "root")
    return [_program("prlimit"), *(f"--{name}={_at_most(name, value)}" for name, value in wanted.items())]


def _at_most(name: str, value) -> str:
    """Returns soft:hard limits, within what this process may set."""
    top = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    pair = value if isinstance(value, tuple) else (value, value)
    return ":".join(str(v if top == resource.RLIM_INFINITY else min(v, top)) for v in pair)


@functools.cache
def _counted_apart() -> bool:
    """Returns whether the kernel counts a user's processes per user namespace (Linux 5.14)."""
    numbers = [int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2]]
    return numbers >= [5, 14]


def _kill(process) -> None:
    """Kills the program: its process namespace ends with bubblewrap's child, and then bubblewrap."""
    if process.poll() is None:
        for pid in children(process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()


@functools.cache
def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise not_installed(name)
    return found


@functools.cache
def _help() -> str:
    return subprocess.run([_program("bwrap"), "--help"], capture_output=True, text=True).stdout


def _files(placed: list[tuple[int, str]]) -> list[str]:
    """Returns the options that create files from descriptors, and their folders."""
    folders = {f"{WORK}/{parent}" for _, name in placed for parent in PurePosixPath(name).parents if parent.name}
    return [*(x for folder in sorted(folders) for x in ("--perms", "0777", "--dir", folder)),
            *(x for fd, name in placed for x in ("--perms", "0666", "--file", str(fd), f"{WORK}/{name}"))]


@functools.cache
def _mounts(disk_mb: int, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the options of a program's file system: a read-only system, its files in memory, nothing else."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--hostname",
               "sandbox", "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv"]
    if _user_isolation() == "root":
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        options += ["--disable-userns"] * ("--disable-userns" in _help())
    options += ["--perms", "1777", "--size", str(disk_mb << 20), "--tmpfs", "/tmp"]  # first: the others may lie in it
    for path in SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind-try", path, path]
    shown = (*SETTINGS, *_interpreter(), *paths)
    for folder in sorted({str(folder) for path in shown for folder in PurePosixPath(path).parents if folder.name}):
        options += ["--perms", "0755", "--dir", folder] if folder != "/tmp" else []
    for path in shown:
        options += ["--ro-bind-try", path, path]
    options += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--perms", "1777", "--size",
                str(16 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--perms", "0777", "--dir", WORK,
                "--chdir", WORK]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    return tuple(options)


def _interpreter() -> list[str]:
    """Returns the folders of this Python and its packages that are not part of the system."""
    program = os.path.realpath(sys.executable)
    places = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(program))}
    hidden = {"/", "/usr", os.path.expanduser("~")}
    return sorted(place for place in places if place not in hidden and not place.startswith("/usr/"))
