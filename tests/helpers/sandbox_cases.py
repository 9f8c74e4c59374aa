"""Programs that try to get out of a sandbox or to use it up, and what they are pointed at.

Each prints ESCAPED where it got what it wanted. What it is told stands in front of it as names: CANARY, a file of the
test's, whose content is SECRET; PORT and SOCKET, of this machine, that listen; VICTIM, a process that sleeps.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

HEAD = """
import ctypes, os, signal, socket, stat, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(yes=True):
    if yes:
        print("ESCAPED", flush=True)
def tries(what, *args):
    try:
        return what(*args)
    except (OSError, ValueError, OverflowError) as e:
        print(type(e).__name__, e)
def reads(path):
    return tries(lambda: open(path, errors="replace").read()) or ""
"""

ESCAPES = {
    "reads a file outside": "escaped(SECRET in reads(CANARY))",
    "lists a folder outside": "escaped(bool(tries(os.listdir, os.path.dirname(CANARY))))",
    "writes outside": "escaped(tries(open, CANARY + '.new', 'w') is not None)",
    "writes into the system": """
        for place in ("/usr", "/usr/lib", "/etc", "/", "/dev", "/opt", os.path.dirname(sys.executable)):
            escaped(os.access(place, os.W_OK))""",
    "follows a symbolic link": "os.symlink(CANARY, 'link'); escaped(SECRET in reads('link'))",
    "races with a symbolic link": """
        if os.fork() == 0:
            for _ in range(3000):
                for target in ("/tmp", CANARY):
                    tries(os.symlink, target, "new"), tries(os.replace, "new", "link")
            os._exit(0)
        for _ in range(3000):
            try:
                escaped(SECRET in open("link").read())
            except OSError:
                pass""",
    "makes a hard link": "escaped(tries(os.link, CANARY, 'link') is None and os.path.exists('link'))",
    "climbs up": "os.chdir('/'); escaped(SECRET in reads('../' * 40 + CANARY[1:]))",
    "goes by the roots of processes": """
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for way in ("root", "cwd", "root/proc/1/root"):
                escaped(SECRET in reads(f"/proc/{pid}/{way}{CANARY}"))""",
    "goes by descriptors": """
        for fd in range(3, 64):
            try:
                os.fstat(fd)
            except OSError:
                continue
            escaped()""",
    "connects to this machine": "escaped(tries(socket.create_connection, ('127.0.0.1', PORT), 2.0) is not None)",
    "connects to a named socket": """
        s = socket.socket(socket.AF_UNIX); escaped(tries(lambda: s.connect("\\0" + SOCKET) or True))""",
    "resolves a name": "escaped(tries(socket.getaddrinfo, 'example.org', 80) is not None)",
    "opens sockets of other kinds": """
        for family in (16, 17, 38, 40):  # netlink, packet, kernel crypto, the hypervisor's
            escaped(tries(socket.socket, family, socket.SOCK_RAW if family < 20 else socket.SOCK_STREAM) is not None)""",
    "sees other processes": "escaped(b'sleep' in open(f'/proc/{VICTIM}/cmdline', 'rb').read() if os.path.exists(f'/proc/{VICTIM}') else False)",
    "kills others": "escaped(tries(lambda: os.kill(VICTIM, 0) or True)); tries(os.kill, -1, signal.SIGUSR1) if not KIND_OF_RLIMITS else None",
    "traces others": "escaped(libc.ptrace(0x4206, VICTIM, None, None) == 0)",
    "reads others' memory": "escaped(tries(open, f'/proc/{VICTIM}/mem', 'rb') is not None)",
    "reads others' environment": """
        for pid in filter(str.isdigit, os.listdir("/proc")):
            escaped(SECRET in reads(f"/proc/{pid}/environ"))""",
    "reads the environment": "escaped(any(SECRET in value for value in os.environ.values()))",
    "reads what the parent reads": "escaped(sys.stdin.read() != '')",
    "becomes root": "tries(os.setuid, 0); escaped(os.getuid() == 0)",
    "gains by setuid programs": "escaped('NoNewPrivs:\\t1' not in reads('/proc/self/status'))",
    "has capabilities": "escaped('CapEff:\\t0000000000000000' not in reads('/proc/self/status'))",
    "changes its root": "os.mkdir('jail'); escaped(tries(lambda: os.chroot('jail') or True))",
    "mounts": "os.mkdir('m'); escaped(libc.mount(b'none', b'm', b'tmpfs', 0, None) == 0)",
    "makes a namespace of users": "escaped(libc.unshare(0x10000000) == 0)",
    "makes a mount namespace": "escaped(libc.unshare(0x20000) == 0)",
    "clones into a namespace": """
        pid = libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        escaped(pid > 0)""",
    "joins another namespace": """
        for name in tries(os.listdir, "/proc/1/ns") or ():
            fd = tries(os.open, "/proc/1/ns/" + name, os.O_RDONLY)
            escaped(fd is not None and libc.setns(fd, 0) == 0)""",
    "starts a sandbox of its own": """
        done = subprocess.run(["sh", "-c", "unshare -Ur true || bwrap --ro-bind / / --unshare-user true"], capture_output=True)
        escaped(done.returncode == 0)""",
    "makes a device": """
        tries(os.mknod, "disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))
        escaped(os.path.exists("disk") and tries(open, "disk", "rb") is not None)""",
    "opens devices": """
        known = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr", "core", "console"}
        escaped(bool(set(os.listdir("/dev")) - known))""",
    "has a terminal": "escaped(tries(os.open, '/dev/tty', os.O_RDWR) is not None)",
    "types into a terminal": """
        import fcntl
        _, terminal = os.openpty()
        os.setsid(); tries(fcntl.ioctl, terminal, 0x540E, 0)
        escaped(tries(fcntl.ioctl, terminal, 0x5412, b"x") is not None)
        escaped(libc.ioctl(terminal, ctypes.c_ulong(0x100005412), b"x") == 0)""",
    "changes the kernel": """
        for name in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/proc/self/oom_score_adj"):
            escaped(os.access(name, os.W_OK))""",
    "reads secrets of the kernel": """
        for name in ("/proc/kcore", "/proc/kmsg", "/sys/kernel/security", "/sys/fs/cgroup", "/dev/mem"):
            escaped(tries(os.open, name, os.O_RDONLY) is not None)""",
    "renames the machine": "escaped(libc.sethostname(b'mine', 4) == 0)",
    "leaves a process": """
        if os.fork() == 0:
            os.setsid()
            for fd in range(3):
                os.close(fd)
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", LONG])
            os._exit(0)
        time.sleep(0.5)""",
}
# Which of them get what they want where limits are all there is, whoever the user is and however fast the machine.
NOT_STOPPED = ("reads a file outside", "lists a folder outside", "writes outside", "follows a symbolic link", "climbs up",
               "goes by the roots of processes", "connects to this machine", "connects to a named socket",
               "sees other processes", "kills others", "reads others' environment", "gains by setuid programs", "leaves a process")

EXHAUSTIONS = {  # name -> (program, whether a limit must be named)
    "computes for ever": ("while True: pass", True),
    "sleeps for ever": ("time.sleep(1000)", True),
    "heeds no signal": ("""
        for n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(n, signal.SIG_IGN)
        while True: time.sleep(0.01)""", True),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", True),
    "closes its streams and goes on": ("for fd in range(3): os.close(fd)\ntime.sleep(1000)", True),
    "prints for ever": ("while True: print('x' * 10000)", True),
    "complains for ever": ("while True: sys.stderr.write('x' * 10000)", True),
    "takes memory": ("x = bytearray(8 << 30)", False),
    "takes memory in many processes": ("""
        for k in range(8):
            if os.fork() == 0:
                x = bytearray(100 << 20)
                for at in range(0, len(x), 4096): x[at] = 1
                time.sleep(1000)
        time.sleep(1000)""", True),
    "takes shared memory": ("""
        import mmap
        for k in range(50):
            m = mmap.mmap(-1, 100 << 20)
            for at in range(0, len(m), 4096): m[at] = 1""", False),
    "forks for ever": ("while True:\n    tries(os.fork)", True),
    "forks into sessions of their own": ("while True:\n    if tries(os.fork) == 0: tries(os.setsid)", True),
    "starts threads for ever": ("import threading\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()", True),
    "fills the disk": ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", False),
    "fills the disk with many files": ("for k in range(10000): open(f'f{k}', 'wb').write(bytes(1 << 20))", False),
    "fills the disk behind its back": ("""
        for k in range(10000):
            f = open("gone", "wb"); os.unlink("gone"); f.write(bytes(1 << 20)); f.flush(); globals()[f"f{k}"] = f""", False),
    "fills memory that is a disk": ("for k in range(10000): open(f'/dev/shm/f{k}', 'wb').write(bytes(1 << 20))", False),
    "opens files for ever": ("files = []\nwhile True: files.append(open(__file__))", False),
    "locks memory": ("x = bytearray(64 << 20)\nescaped(libc.mlockall(3) == 0)\nsys.exit(1)", False),
    "calls itself for ever": ("sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", False),
}


@contextlib.contextmanager
def surroundings(folder: Path):
    """What programs are pointed at; `.program(text, backend)` is the source of one, `.name` a file's name by which
    `.left()` tells whether one lives on."""
    secret, long = secrets.token_hex(12), str(10**6 + secrets.randbelow(10**6))
    canary = folder / "canary"
    canary.write_text(secret)
    os.environ["JAXRL_TEST_SECRET"] = secret
    named, name = socket.socket(socket.AF_UNIX), f"jaxrl-{secrets.token_hex(6)}"
    named.bind("\0" + name)
    named.listen()
    victim = subprocess.Popen(["sleep", "1000"], env={**os.environ, "OF_THE_VICTIM": secret})
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, named:
            told = {"CANARY": str(canary), "SECRET": secret, "PORT": server.getsockname()[1], "SOCKET": name,
                    "VICTIM": victim.pid, "LONG": long}

            def program(text, backend="bwrap"):
                names = [f"{k} = {json.loads(json.dumps(v))!r}" for k, v in (told | {"KIND_OF_RLIMITS": backend == "rlimits"}).items()]
                return "\n".join((HEAD, *names, textwrap.dedent(text).strip("\n")))

            def left():
                """Whether a process that was to stay behind is there to stay; ends it."""
                deadline, found = time.monotonic() + 30.0, [0]
                while time.monotonic() < deadline and found:
                    found = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and long.encode() in _command(p)]
                    time.sleep(0.05)
                for pid in found:
                    os.kill(pid, 9)
                return bool(found)

            yield SimpleNamespace(program=program, left=left, victim=victim, name=f"program{long}.py")
    finally:
        del os.environ["JAXRL_TEST_SECRET"]
        victim.kill()
        victim.wait()


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


assert sys.platform == "linux"
