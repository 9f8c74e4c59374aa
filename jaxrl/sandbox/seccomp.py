"""System-call filter of the bwrap sandbox: a classic BPF program, as seccomp(2) takes it.

Refuses what programs under test do not need and what has enabled escapes: new namespaces and mounts, other processes'
memory, kernel keys, BPF, io_uring, modules, typing into terminals, sockets other than unix and internet ones (vsock
ignores network namespaces), and memory that no limit counts (memfd, System V shared memory, message queues).
"""

from __future__ import annotations

import platform
import struct

# name -> its number on (x86_64, aarch64); None where it does not exist
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "acct": (163, 89),
    "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "uselib": (134, None), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92),
    "fanotify_init": (300, 262), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "msgget": (68, 186), "mq_open": (240, 180),
}
# further inspected calls: (x86_64, aarch64)
CLONE, CLONE3, IOCTL, SOCKET = (56, 220), (435, 435), (16, 29), (41, 198)
NAMESPACES = 0x7E020080      # CLONE_NEW*: time, mount, cgroup, uts, ipc, user, pid, net
TYPING = (0x5412, 0x541C)    # TIOCSTI, TIOCLINUX
FAMILIES = (1, 2, 10)        # AF_UNIX, AF_INET, AF_INET6
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32 = 0x40000000

KILL, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06   # BPF_LD|W|ABS, JMP|JEQ|K, JGE, JSET, RET|K
NUMBER, ARCH, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; of the low half of an argument (little endian)


def program(machine: str = "") -> bytes | None:
    """Returns struct sock_filter[] for a machine; None if its call numbers are not known.

    machine: "x86_64" or "aarch64" as platform.machine() has it; "" = this one. Refused calls fail with EPERM, clone3
    and x32 calls with ENOSYS, sockets of other families with EAFNOSUPPORT; a call of another architecture kills."""
    if (machine or platform.machine()) not in ARCHITECTURES:
        return None
    column, arch = ARCHITECTURES[machine or platform.machine()]
    code = [_load(ARCH), _jump(EQUAL, arch, 1, 0), _return(KILL), _load(NUMBER)]
    if column == 0:
        code += [_jump(ABOVE, X32, 0, 1), _return(ERRNO | ENOSYS)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            code += [_jump(EQUAL, numbers[column], 0, 1), _return(ERRNO | EPERM)]
    # glibc falls back to clone, whose flags can be read
    code += [_jump(EQUAL, CLONE3[column], 0, 1), _return(ERRNO | ENOSYS)]
    code += _looked_at(CLONE[column], 0, [_jump(ANY_BIT, NAMESPACES, 0, 1), _return(ERRNO | EPERM), _return(ALLOW)])
    code += _looked_at(IOCTL[column], 1, [step for number in TYPING for step in (
        _jump(EQUAL, number, 0, 1), _return(ERRNO | EPERM))] + [_return(ALLOW)])
    code += _looked_at(SOCKET[column], 0, [step for family in FAMILIES for step in (
        _jump(EQUAL, family, 0, 1), _return(ALLOW))] + [_return(ERRNO | EAFNOSUPPORT)])
    return b"".join([*code, _return(ALLOW)])


def _looked_at(number: int, argument: int, steps: list[bytes]) -> list[bytes]:
    """Returns the steps for one system call, with an argument loaded. They end with a return."""
    return [_jump(EQUAL, number, 0, len(steps) + 1), _load(ARGUMENT + 8 * argument), *steps]


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", LOAD, 0, 0, offset)


def _jump(kind: int, value: int, yes: int, no: int) -> bytes:
    return struct.pack("=HBBI", kind, yes, no, value)


def _return(value: int) -> bytes:
    return struct.pack("=HBBI", RETURN, 0, 0, value)
