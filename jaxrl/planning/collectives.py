"""Collectives of a partitioned program, read from the text of its compilation for CPU devices.

What stands in the body of a loop counts once per trip. Of the branches of a conditional the one that moves most counts.
The CPU's compiler differs from the others in three places that are undone here: it sums bf16 in fp32 (the reducer's
name then ends in `_promoted`; bytes are halved), it gathers bf16 as fp32 (what is gathered was bf16 just before;
likewise), and it leaves an all-reduce whose result is cut to each device's part as it is, where TPU and GPU make a
reduce-scatter of it.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over one group: `count` runs that together handle `bytes` of whole (gathered, unreduced)
    arrays.

    A collective-permute counts what one device sends; its `group` is 2, and its `hosts` at most that.
    """

    kind: str
    group: int       # devices that take part
    hosts: int       # hosts they lie on
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends, in a ring."""
        share = (self.group - 1) / self.group
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1, "all-to-all": share / self.group,
                             "collective-broadcast": 1}.get(self.kind, share)


def read(text: str, per_host: int) -> list[Collective]:
    """Returns the collectives of a compiled program, of its HLO text, those that send most first.

    per_host: devices with neighbouring numbers that share a host. Raises ValueError for a notation of device groups
    that is not known.
    """
    entry, bodies = _computations(text)
    found = _walk(entry, bodies, per_host, {})
    rows = [Collective(kind, group, hosts, count, size) for (kind, group, hosts), (count, size) in found.items()]
    return sorted(rows, key=lambda c: -c.sent)


def _computations(text: str):
    """Returns (name of the entry, {computation: {instruction: text after the '='}})."""
    entry, bodies, current = "", {}, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = bodies.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None:
            found = _LINE.match(line)
            if found:
                current[found[1]] = found[2]
    return entry, bodies


def _walk(name, bodies, per_host, known) -> dict[tuple, tuple[int, int]]:
    """Returns (kind, group, hosts) -> (runs, bytes) of one computation and all that it calls."""
    if name in known:
        return known[name]
    total: dict[tuple, tuple[int, int]] = {}

    def add(more, times=1):
        for key, (count, size) in more.items():
            old = total.get(key, (0, 0))
            total[key] = (old[0] + times * count, old[1] + times * size)

    for instruction, rest in bodies.get(name, {}).items():
        code = _opcode(rest)
        kind = code.removesuffix("-start")
        if kind in KINDS:
            add(_collective(kind, instruction, rest, bodies, bodies[name], per_host))
        elif code == "while":
            body, condition = _called(rest, "body"), _called(rest, "condition")
            add(_walk(body, bodies, per_host, known), trips(rest, bodies.get(condition, {})))
        elif code == "conditional":
            branches = [_walk(b, bodies, per_host, known) for b in _branches(rest)]
            add(max(branches, key=lambda b: sum(size for _, size in b.values()), default={}))
        elif code in ("call", "fusion", "async-start"):
            inner = _called(rest, "to_apply") or _called(rest, "calls") or _called(rest, "called_computation")
            add(_walk(inner, bodies, per_host, known))
    known[name] = total
    return total


def _opcode(rest: str) -> str:
    found = _OPCODE.search(rest)
    return found[1] if found else ""


def _called(rest: str, attribute: str) -> str:
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", rest)
    return found[1] if found else ""


def _branches(rest: str) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", rest)
    if found:
        return [b.strip().lstrip("%") for b in found[1].split(",")]
    return [b for b in (_called(rest, "true_computation"), _called(rest, "false_computation")) if b]


def trips(rest: str, condition: dict[str, str]) -> int:
    """Returns how often a loop runs: the compiler's figure, else the largest integer its condition compares with, else
    1.

    rest: text of the `while` instruction. condition: instruction -> text of the computation that is its condition.
    """
    known = re.search(r'known_trip_count[^\d]*(\d+)', rest)
    if known:
        return int(known[1])
    constants = [int(c) for line in condition.values() for c in re.findall(r"s32\[\] constant\((\d+)\)", line)]
    return max(constants, default=1)


def array_bytes(text: str) -> int:
    """Returns the bytes of all arrays named in a type: 'f32[4,8]' or '(bf16[2], s32[])'."""
    total = 0
    for kind, dims in _ARRAY.findall(text):
        bits = BITS.get(kind) or int(re.sub(r"\D.*", "", kind[1:]) or 8)
        total += math.prod(int(d) for d in dims.split(",") if d) * bits // 8
    return total


def _collective(kind, instruction, rest, bodies, body, per_host):
    """Returns (kind, group, hosts) -> (runs, bytes) of one instruction's arrays. Compilers combine
    several into a tuple.
    """
    groups = replica_groups(rest)
    size = groups.shape[1]
    if size == 1:
        return {}
    hosts = max(len({int(d) // per_host for d in group}) for group in groups)  # of a ring, pairs of neighbours
    opcode = _opcode(rest)
    arrays = [f"{kind}[{dims}]" for kind, dims in _ARRAY.findall(rest[:rest.index(f" {opcode}(") + 1])]
    if opcode.endswith("-start"):  # its result is (operands, results)
        arrays = arrays[len(arrays) // 2:]
    if kind == "all-to-all":  # one array, or a tuple of the parts that go to each device
        return {(kind, size, hosts): (1, size * sum(map(array_bytes, arrays)))}
    out: dict[tuple, tuple[int, int]] = {}
    for index, array in enumerate(arrays):
        moved, name = array_bytes(array), kind
        if kind in ("all-reduce", "reduce-scatter") and re.search(r"to_apply=%?[\w.\-]*_promoted", rest):
            moved //= 2
        if kind == "reduce-scatter":
            moved *= size
        elif kind == "all-gather" and array.startswith("f32") and _was_bf16(_names(rest, opcode)[index], bodies, body):
            moved //= 2
        elif kind == "all-reduce":
            if _is_cut(instruction, array, bodies, body, index if len(arrays) > 1 else None):
                name = "reduce-scatter"
        old = out.get((name, size, hosts), (0, 0))
        out[name, size, hosts] = (old[0] + 1, old[1] + moved)
    return out


def _names(rest: str, opcode: str) -> list[str]:
    """Returns the operands of an instruction."""
    inside = rest[rest.index(f" {opcode}(") + len(opcode) + 2:]
    return re.findall(r"%([\w.\-]+)", inside[:inside.index(")")])


def _was_bf16(name: str, bodies, body: dict[str, str]) -> bool:
    """Whether an fp32 value comes from bf16 by nothing but a conversion, copies and changes of shape."""
    rest = body.get(name, "")
    code = _opcode(rest) if rest else ""
    if code == "fusion":
        inside = bodies.get(_called(rest, "calls"), {})
        return any(r.startswith("bf16[") for r in inside.values())
    if code in ("convert", "bitcast", "copy", "transpose", "reshape"):
        source = body.get((_names(rest, code) or [""])[0], "")
        return source.startswith("bf16[") if code == "convert" else _was_bf16(_names(rest, code)[0], bodies, body)
    return False


def replica_groups(rest: str) -> np.ndarray:
    """Returns the device numbers of the groups of a collective, [groups, devices of a group] int, from any of the
    notations of XLA's text.

    A collective-permute has its pairs (from, to), [[0]] if all are to themselves. rest: text of the instruction. Raises
    ValueError if it has no groups in a known notation.
    """
    found = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest)
    if found:
        return np.array([[int(d) for d in g.split(",")] for g in re.findall(r"\{([\d, ]+)\}", found[1])])
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    if found:
        shape, dims = numbers(found[1]), numbers(found[2])
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices.transpose(numbers(found[3])) if found[3] else devices).reshape(shape)
    found = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
                      r"*\{([^}]*)\}", rest)
    if found:
        axes = [(name, int(n)) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])]
        devices = np.arange(math.prod(n for _, n in axes))
        if found[2]:
            devices = devices.reshape(numbers(found[2]))
            devices = devices.transpose(numbers(found[3])) if found[3] else devices
        devices = devices.reshape([n for _, n in axes])
        chosen = re.findall(r"'([^']+)'", found[4])
        names = [name for name, _ in axes]
        order = [i for i, name in enumerate(names) if name not in chosen] + [names.index(name) for name in chosen]
        return devices.transpose(order).reshape(-1, math.prod(dict(axes)[name] for name in chosen))
    found = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    if found:
        pairs = re.findall(r"\{(\d+),(\d+)", found[1] + "}")
        return np.array([[int(a), int(b)] for a, b in pairs if a != b] or [[0]])
    raise ValueError(f"no groups of devices are understood in: {rest[:400]}")


def _is_cut(instruction: str, array: str, bodies, body: dict[str, str], index=None) -> bool:
    """Whether every device goes on with a part of this array only: all its users, behind conversions, slice it."""
    cut = False
    for name, rest in body.items():
        if not re.search(rf"%{re.escape(instruction)}[,)]", rest):
            continue
        code = _opcode(rest)
        result = rest[:rest.index(f" {code}(")]
        if code == "get-tuple-element" and f"index={index}" not in re.findall(r"index=\d+", rest):
            continue
        same = _elements(result) == _elements(array)
        if code in ("get-tuple-element", "bitcast", "copy", "convert") or (
                code == "fusion" and same and _operands(rest) == 1):
            if not _is_cut(name, result, bodies, body):
                return False
        elif not (code == "dynamic-slice" or code == "fusion"
                  and _slices(bodies.get(_called(rest, "calls"), {}), array)):
            return False
        cut = True
    return cut


def _elements(array: str) -> int:
    found = _ARRAY.search(array)
    return math.prod(int(d) for d in found[2].split(",") if d) if found else 0


def _operands(rest: str) -> int:
    return rest[rest.index("("):].split(")")[0].count("%")


def _slices(fused: dict[str, str], array: str) -> bool:
    """Whether a fusion slices something of this array's size."""
    for rest in fused.values():
        if _opcode(rest) == "dynamic-slice":
            operand = re.search(r"dynamic-slice\(%([\w.\-]+)", rest)
            if operand and _elements(fused.get(operand[1], "")) == _elements(array):
                return True
    return False
