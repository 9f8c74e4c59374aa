"""XLA's programs for an H100 or H200, compiled on a machine without a GPU: what a loop's body launches and copies, temporaries, memory.

    python evidence/gpu_programs.py --case 0.5B --programs decode              of the sampler, kernels per layer and per token
    python evidence/gpu_programs.py --case 1.5B --programs update,update_apply of the trainer, memory beside what is kept
    python evidence/gpu_programs.py --budget                                   of 2 and 4 layers of 1.5B; fails where one is over gpu_programs.csv
    python evidence/gpu_programs.py --budget --case experts                    the same counts of other layers, without a limit
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
import csv
import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

BUDGET = Path(__file__).with_suffix(".csv")
DUMP, GIB = "*thunk_sequence_after_thunk_passes.txt", 1 << 30
BUDGETED, DEPTHS = ("1.5B", ("decode", "update")), (4, 6)  # case and programs of the budget; layers of its two copies
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


def counted(name: str, program: Program, tree: dict, layers: int, temporaries: float) -> dict:
    """What the budget limits, of one copy: of the decode program's token loop or of the update's two loops over layers."""
    loops = [one for one in tree["inside"] if one["kind"] == "kWhile"]
    body = lambda loop: next(part for part in loop["inside"] if part["name"] == "body")  # noqa: E731
    if name == "decode":
        loop = next(one for one in walk(tree) if one["kind"] == "kWhile")
        count, _, _, _, nested = launches(body(loop), False)
        whole = any(one is loop for graph in walk(tree) if graph["kind"] == "kCommandBuffer" for one in walk(graph))
        waits = 0 if whole else 1 + sum(one["kind"] == "kConditional" and not within for one, within in nested)
        return {"launches": count.total(), "weights copied": count["slice copied"], "host waits in a token": waits, "temporaries, MiB": temporaries}
    found = [launches(body(one), False)[0].total() for one, (_, times) in zip(loops, program.control(program.entry), strict=True) if times == layers]
    return {"launches in a layer, forward": found[0], "launches in a layer, backward": found[-1], "temporaries, MiB": temporaries}


def by_layer(name: str, few: dict, more: dict) -> dict:
    """The counts of two copies of a program, DEPTHS layers deep, as those of a layer and of the rest."""
    each = {what: (more[what] - few[what]) / (DEPTHS[1] - DEPTHS[0]) for what in more}
    if name != "decode":
        return {**more, "temporaries of a layer, MiB": each["temporaries, MiB"]}  # an input; a gradient in fp32 would be 178
    return {"weights copied in a layer": each["weights copied"], "launches in a layer": each["launches"],
            "launches outside of layers": few["launches"] - DEPTHS[0] * each["launches"],
            **{what: more[what] for what in ("host waits in a token", "temporaries, MiB")}}


def over_budget(found: dict) -> bool:
    """Prints {program: counts} beside the budget, and returns whether one is over it."""
    with BUDGET.open() as file:
        limits = {(row["program"], row["what"]): float(row["most"]) for row in csv.DictReader(file)}
    over = False
    for (program, what), limit in limits.items():
        if program not in found:
            continue
        value = found[program][what]
        over |= value > limit
        print(f"budget: {program}: {what}: {value:.4g}, at most {limit:g}" + "  OVER" * (value > limit))
    return over


def walk(node: dict):
    for one in node["inside"]:
        yield one
        yield from walk(one)


def bytes_of(shape: str) -> int:
    kind, sizes = shape.rstrip("]").split("[")
    return WIDTH.get(kind, 1) * math.prod(int(n) for n in sizes.split(",") if n)


def lowered(asked, folder: Path, layers: int = 0):
    """(programs.Lowered of the case, GiB of what is kept by part). layers: of the model; 0 = as many as it has."""
    from gpu import cases

    from jaxrl import sharding
    from jaxrl.config.load import put
    from jaxrl.planning import gpu_devices, programs
    from jaxrl.resolve.spec import Platform, resolve

    config = cases.job(asked.case, str(folder / "run"))
    described = cases.described(cases.CASES[asked.case].model or asked.case)
    if layers:
        described = config.model.config = {**described, "num_hidden_layers": layers}
    config.model.attention = asked.attention
    for option in asked.options:
        key, value = option.split("=", 1)
        put(config, key, json.loads(value) if value[:1] in '[{"' or re.fullmatch(r"-?\d+(\.\d+)?", value) else value)
    spec = resolve(config, Platform("gpu", "bf16"), described)
    mesh = sharding.make_mesh(SimpleNamespace(dp=1, fsdp=1, cp=1, ep=1, tp=1), gpu_devices.devices(asked.chip))
    found = programs.lower(spec, described, mesh, mesh, wanted=set(asked.programs.split(",")))
    return found, {part: programs.device_bytes(tree) / GIB for part, tree in found.live.items()}


def compiled(one, folder: Path, verbose: bool):
    """(compiled program, Program, tree of thunks, processor seconds, seconds) of a lowered program."""
    before, begin, wall = set(folder.glob(DUMP)), time.process_time(), time.monotonic()
    program = one.compile()
    spent = time.process_time() - begin, time.monotonic() - wall
    file, = set(folder.glob(DUMP)) - before
    return program, Program(program.as_text(), verbose), thunks(file.read_text()), *spent


def budget(asked, folder: Path) -> bool:
    """Compiles copies of DEPTHS layers, prints their counts, and returns whether one is over the budget."""
    found = {name: [] for name in asked.programs.split(",")}
    for layers in DEPTHS:
        for name, one in lowered(asked, folder, layers)[0].programs.items():
            program, parsed, tree, *_ = compiled(one, folder, False)
            found[name].append(counted(name, parsed, tree, layers, program.memory_analysis().temp_size_in_bytes / 2**20))
    counts = {name: by_layer(name, *each) for name, each in found.items()}
    for name, each in counts.items():
        print(f"{asked.case}, {name}: " + ", ".join(f"{what} {value:.4g}" for what, value in each.items()))
    return asked.case == BUDGETED[0] and over_budget(counts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", default=str(Path(__file__).parents[1]))
    parser.add_argument("--budget", action="store_true", help="counts of small copies beside gpu_programs.csv, which fail where they are over it")
    parser.add_argument("--case", default="", help="of benchmarks/gpu/cases.py; 0.5B, with --budget 1.5B")
    parser.add_argument("--programs", default="")
    parser.add_argument("--attention", default="gpu", help="model.attention")
    parser.add_argument("--chip", default="h200", choices=("h100", "h200"))
    parser.add_argument("--flags", default="", help="of XLA")
    parser.add_argument("--keep", default="", help="folder for XLA's dumps")
    parser.add_argument("--verbose", action="store_true", help="names of kernels, too")
    parser.add_argument("options", nargs="*", help="option=value of the config")
    asked = parser.parse_args()
    asked.case = asked.case or (BUDGETED[0] if asked.budget else "0.5B")
    asked.programs = asked.programs or ",".join(BUDGETED[1] if asked.budget else ("decode",))
    folder = Path(asked.keep or tempfile.mkdtemp())
    os.environ["JAX_PLATFORMS"] = "cpu"  # or jax looks for a GPU at start
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text {asked.flags}"
    root = Path(asked.checkout).resolve()
    sys.path[:0] = [str(root), str(root / "evidence"), str(root / "benchmarks")]
    if asked.budget:
        return int(budget(asked, folder))
    begin = time.process_time()
    found, kept = lowered(asked, folder)
    print(f"{asked.case} on {asked.chip}, lowered in {time.process_time() - begin:.1f} processor s")
    print("kept, GiB:", {part: round(size, 3) for part, size in kept.items()}, "in all", round(sum(kept.values()), 2))
    for name, one in found.programs.items():
        program, parsed, tree, spent, wall = compiled(one, folder, asked.verbose)
        m = program.memory_analysis()
        print(f"\n{name}: compiled in {spent:.1f} processor s ({wall:.1f} s); GiB: arguments {m.argument_size_in_bytes / GIB:.3f}, "
              f"outputs not in arguments {(m.output_size_in_bytes - m.alias_size_in_bytes) / GIB:.3f}, temporaries {m.temp_size_in_bytes / GIB:.3f}; "
              f"peak if the rest is kept {sum(kept.values()) + (m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes) / GIB:.2f}")
        parsed.show(tree, parsed.entry, "entry")
    if asked.keep:
        print(f"\ndumps: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
