"""XLA's programs for an H100 or H200, compiled on a machine without a GPU: what a loop's body launches and copies, temporaries, memory.

    python evidence/gpu_programs.py --case 0.5B --programs decode              of the sampler, kernels per layer and per token
    python evidence/gpu_programs.py --case 1.5B --programs update,update_apply of the trainer, memory beside what is kept
    python evidence/gpu_programs.py --case 1.5B --programs decode --budget     and fails where decoding is over BUDGET
    ... --flags "--xla_gpu_enable_triton_gemm=false"                          with flags of XLA; --keep FOLDER keeps HLO, thunks, buffers, PTX
    ... model.scan_layers=false rollout.slots=64                              with options of the config

Needs Python 3.12, jax and of the same version jax-cuda13-plugin and jax-cuda13-pjrt (0.11 or 0.12), and the project's own packages. No
driver, cuBLAS or cuDNN. Programs: decode, prefill, insert, publish, extend,
update, update_apply, score, ... (jaxrl.planning.programs), of a case of benchmarks/gpu/cases.py.

What differs from a card: products are not tuned (a card chooses per product between Triton and cuBLAS; --flags
"--xla_gpu_load_autotune_results_from=FILE" takes a card's choices, written there by --xla_gpu_dump_autotune_results_to=FILE), and the Mosaic kernels
are one custom call each, compiled only where the program is loaded (evidence/gpu_compile.py compiles those).
"""

import argparse
import collections
import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

OUTSIDE = 32  # launches of a token that are of no layer and in no branch: embedding, final norm, head, sums over logits
BUDGET = {"weights copied in a layer": 0, "launches in a layer": 14, "host waits in a token": 1}
WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


# ---- thunks: what the host launches, from XLA's own dump


def thunks(text: str) -> dict:
    """The tree of a *.thunk_sequence_after_thunk_passes.txt: nodes with `kind`, `name`, `inside`; loops and conditionals hold parts."""
    root = {"kind": "entry", "name": "", "inside": []}
    stack = [(-1.0, root)]
    for line in filter(str.strip, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        if found := re.match(r"\s*\d+: (k\w+)\s*(?:\[.*?\])?\s*(.*)$", line):
            while stack[-1][0] >= indent:
                stack.pop()
            node = {"kind": found[1], "name": found[2].split(" grid")[0].strip(), "inside": []}
            stack[-1][1]["inside"].append(node)
            stack.append((indent, node))
            continue
        part = line.strip().rstrip(":")  # condition, body, true_branch, ...: of the innermost one that has none yet
        while stack[-1][1]["kind"] not in ("kWhile", "kConditional") or any(p["name"] == part for p in stack[-1][1]["inside"]):
            stack.pop()
        node = {"kind": "part", "name": part, "inside": []}
        stack[-1][1]["inside"].append(node)
        stack.append((stack[-1][0] + 0.5, node))
    return root


def launches(part: dict, in_graph: bool):
    """(counter of what one run of a part launches by itself, CUDA graphs that begin in it, names of kernels, loops and
    conditionals in it)."""
    count, names, nested, graphs = collections.Counter(), collections.Counter(), [], 0

    def walk(node, in_graph):
        nonlocal graphs
        for one in node["inside"]:
            kind, inside = one["kind"], one["inside"]
            if kind in ("kWhile", "kConditional"):
                nested.append((one, in_graph))
            elif kind in ("kCommandBuffer", "kAsyncStart", "kSequential"):
                graphs += kind == "kCommandBuffer"
                walk(one, in_graph or kind == "kCommandBuffer")
            elif kind != "kAsyncDone":
                if kind == "kDynamicSliceFusion":
                    hero = inside[0]["kind"] if inside else "k?"
                    count["slice copied" if hero == "kCopy" else f"{hero[1:]} on a slice in place"] += 1
                else:
                    kernel = kind in ("kCustomKernel", "kKernel")
                    count["kernel" if kernel else {"kCopy": "copy", "kCustomCall": "custom call"}.get(kind, kind[1:])] += 1
                    names[re.sub(r"[_.]\d+$", "", one["name"])] += kernel
                if not in_graph:
                    alone.append(1)

    alone = []
    walk(part, in_graph)
    names = collections.Counter({name: n for name, n in names.items() if n})
    return count, graphs, len(alone), names, nested


# ---- HLO: how often loops run, how much their slices copy


def computations(text: str) -> dict:
    found, name = {}, None
    for line in text.splitlines():
        if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            name = head[1]
            found[name] = []
        elif line.startswith("}"):
            name = None
        elif name:
            found[name].append(line)
    return found


class Program:
    """Optimized HLO beside the thunks made from it: both have loops and conditionals in the same order."""

    def __init__(self, text: str, verbose: bool):
        self.computations, self.verbose = computations(text), verbose
        self.entry = next(m[1] for line in text.splitlines() if (m := re.match(r"^ENTRY %?([\w.\-]+) \(", line)))
        self.slices = {name: shapes for name, lines in self.computations.items() if (shapes := slices_of(lines))}

    def control(self, name: str) -> list:
        """[(computations: condition and body, or branches; how often a loop runs or None)] of a computation's loops and conditionals."""
        found = []
        for line in self.computations.get(name, ()):
            if loop := re.search(r" while\(.*?condition=%?(?P<c>[\w.\-]+), body=%?(?P<b>[\w.\-]+)", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                found.append(([loop["c"], loop["b"]], int(known[1]) if known else None))
            elif " conditional(" in line:  # by place: the dump of thunks calls the first branch false_branch, which is HLO's true one
                one = re.search(r"branch_computations=\{([^}]*)\}|true_computation=(\S+?), false_computation=([\w.\-%]+)", line)
                found.append(([c.strip(" %") for c in (one[1].split(",") if one[1] else one.groups()[1:])], None))
        return found

    def copied(self, name: str) -> list:
        """(bytes, shape) of the slices that a computation copies out of what it is given whole."""
        calls = (re.search(r" fusion(?:-start)?\(.*calls=%?([\w.\-]+)", line) for line in self.computations.get(name, ()))
        return sorted((bytes_of(shape), shape) for call in calls if call for shape in self.slices.get(call[1], ()))[::-1]

    def show(self, part: dict, name: str, title: str, depth: int = 0, in_graph: bool = False) -> int:
        """Prints a part and what is nested in it. Returns the launches of one run of it, with loops of known length, and of
        each conditional the smallest branch."""
        count, graphs, alone, names, nested = launches(part, in_graph)
        pad = "  " * depth
        where = "within a graph" if in_graph else f"{graphs} graphs, {alone} alone"
        print(f"{pad}{title}: {count.total()} launches ({', '.join(f'{n} {what}' for what, n in count.items())}); {where}")
        if self.verbose:
            print(f"{pad}  kernels: {dict(names.most_common())}")
        if copied := self.copied(name):
            print(f"{pad}  copied: {sum(size for size, _ in copied) / 1e6:.3f} MB: "
                  + ", ".join(f"{shape} {size / 1e6:.3f}" for size, shape in copied[:10]))
        control, whole = self.control(name), count.total()
        if len(control) != len(nested):
            print(f"{pad}  ({len(control)} loops and conditionals in HLO, {len(nested)} in thunks: not matched)")
            control = [([""] * len(one["inside"]), None) for one, _ in nested]
        for (one, inner), (parts, times) in zip(nested, control, strict=True):
            loop = one["kind"] == "kWhile"
            said = [self.show(p, parts[i], f"loop, {times or 'unknown number of'} times, {p['name']}" if loop else f"branch {i} of {len(parts)}",
                              depth + 1, inner) for i, p in enumerate(one["inside"]) if not (loop and times and i == 0)]
            whole += (times or 0) * said[-1] if loop else min(said or [0])
        if nested:
            print(f"{pad}  in all, loops of known length included, the smallest branch of each conditional: {whole} launches")
        return whole


def slices_of(lines) -> tuple[str, ...]:
    """The shapes that a computation slices out of arrays, if it does nothing else."""
    ops = {op[1] for line in lines if (op := re.search(r" = .*?\s([a-z][a-z\-]*)\(", line))}
    if not ops & {"dynamic-slice", "slice"} or not ops <= {"parameter", "constant", "dynamic-slice", "slice", "bitcast", "reshape", "tuple"}:
        return ()
    result = re.search(r"ROOT \S+ = (.*?) [a-z][a-z\-]*\(", next(line for line in lines if "ROOT" in line))
    return tuple(re.findall(r"\w+\[[\d,]*\]", result[1])) if result else ()


def over_budget(tree: dict, layers: int) -> bool:
    """Prints what one token of the decode program takes beside BUDGET, and says whether it is over it."""
    token = next(n for n in walk(tree) if n["kind"] == "kWhile")
    body = next(part for part in token["inside"] if part["name"] == "body")
    count, graphs, _, _, nested = launches(body, False)
    inner = [p for one, _ in nested if one["kind"] == "kWhile" for p in one["inside"] if p["name"] == "body"]
    by_layer = sum((launches(p, False)[0] for p in inner), collections.Counter())
    conditionals = sum(one["kind"] == "kConditional" and not in_graph for one, in_graph in nested)
    copied = by_layer["slice copied"] or count["slice copied"] / layers
    found = {"weights copied in a layer": copied, "launches in a layer": by_layer.total() or (count.total() - OUTSIDE) / layers,
             "host waits in a token": 1 + conditionals}  # the loop's own condition
    for what, limit in BUDGET.items():
        print(f"budget: {what}: {found[what]:.3g}, at most {limit}" + ("" if found[what] <= limit else "  OVER"))
    return any(found[what] > limit for what, limit in BUDGET.items())


def walk(node: dict):
    for one in node["inside"]:
        yield one
        yield from walk(one)


def bytes_of(shape: str) -> int:
    kind, sizes = shape.rstrip("]").split("[")
    return WIDTH.get(kind, 1) * math.prod(int(n) for n in sizes.split(",") if n)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", default=str(Path(__file__).parents[1]))
    parser.add_argument("--budget", action="store_true", help="fail where the decode program is over BUDGET")
    parser.add_argument("--case", default="0.5B", help="of benchmarks/gpu/cases.py")
    parser.add_argument("--programs", default="decode")
    parser.add_argument("--attention", default="gpu", help="model.attention")
    parser.add_argument("--chip", default="h200", choices=("h100", "h200"))
    parser.add_argument("--flags", default="", help="of XLA")
    parser.add_argument("--keep", default="", help="folder for XLA's dumps")
    parser.add_argument("--verbose", action="store_true", help="names of kernels, too")
    parser.add_argument("options", nargs="*", help="option=value of the config")
    asked = parser.parse_args()
    folder = Path(asked.keep or tempfile.mkdtemp())
    os.environ["JAX_PLATFORMS"] = "cpu"  # or jax looks for a GPU at start
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text {asked.flags}"
    root = Path(asked.checkout).resolve()
    sys.path[:0] = [str(root), str(root / "evidence"), str(root / "benchmarks")]

    from gpu import cases

    from jaxrl import sharding
    from jaxrl.config.load import put
    from jaxrl.planning import gpu_devices, programs
    from jaxrl.resolve.spec import Platform, resolve

    config = cases.job(asked.case, str(folder / "run"))
    config.model.attention = asked.attention
    for option in asked.options:
        key, value = option.split("=", 1)
        put(config, key, json.loads(value) if value[:1] in '[{"' or re.fullmatch(r"-?\d+(\.\d+)?", value) else value)
    described = cases.described(cases.CASES[asked.case].model or asked.case)
    spec = resolve(config, Platform("gpu", "bf16"), described)
    mesh = sharding.make_mesh(SimpleNamespace(dp=1, fsdp=1, cp=1, ep=1, tp=1), gpu_devices.devices(asked.chip))
    begin = time.process_time()
    found = programs.lower(spec, described, mesh, mesh, wanted=set(asked.programs.split(",")))
    gib = 1 << 30
    kept = {part: programs.device_bytes(tree) / gib for part, tree in found.live.items()}
    print(f"{asked.case} on {asked.chip}, lowered in {time.process_time() - begin:.1f} processor s")
    print("kept, GiB:", {part: round(size, 3) for part, size in kept.items()}, "in all", round(sum(kept.values()), 2))
    over = False
    for name_, lowered in found.programs.items():
        before, begin, wall = set(folder.glob("*thunk_sequence_after_thunk_passes.txt")), time.process_time(), time.monotonic()
        compiled = lowered.compile()
        spent = time.process_time() - begin, time.monotonic() - wall
        m = compiled.memory_analysis()
        print(f"\n{name_}: compiled in {spent[0]:.1f} processor s ({spent[1]:.1f} s); GiB: arguments {m.argument_size_in_bytes / gib:.3f}, "
              f"outputs not in arguments {(m.output_size_in_bytes - m.alias_size_in_bytes) / gib:.3f}, temporaries {m.temp_size_in_bytes / gib:.3f}; "
              f"peak if the rest is kept {sum(kept.values()) + (m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes) / gib:.2f}")
        for file in set(folder.glob("*thunk_sequence_after_thunk_passes.txt")) - before:
            program = Program(compiled.as_text(), asked.verbose)
            tree = thunks(file.read_text())
            program.show(tree, program.entry, "entry")
            if asked.budget and name_ == "decode":
                over |= over_budget(tree, described["num_hidden_layers"])
    if asked.keep:
        print(f"\ndumps: {folder}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
