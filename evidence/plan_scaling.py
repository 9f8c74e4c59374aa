"""The plan, showing 6: scaling on paper. Step time and share of communication at fixed work per chip, from compiled figures.

python evidence/plan_scaling.py [--priced]      (--priced: the collectives of the last run, priced anew)

An 8B model's GRPO update (4 groups of 8 answers a chip: prompts of 512, answers of 1,536 tokens), compiled for 8, 64, 256 and 1024
CPU devices, sharded over all of them (fsdp) or inside 64 with replicas outside (dp x fsdp). The collectives found are priced at
the links of v5p slices and of H100 hosts. Rollouts are left out: each process serves its own prompts, whatever their number.
Writes docs/guides/plan_scaling.svg.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import RESULTS, record, table  # noqa: E402
from plan_shapes import grpo, job  # noqa: E402

from jaxrl.planning import (
    compiling,  # noqa: E402
    plan,  # noqa: E402
)
from jaxrl.planning.case import open_case  # noqa: E402

CHIPS = (8, 64, 256, 1024)
INSIDE = 64
SERIES = (("v5p", "fsdp"), ("v5p", "dp x fsdp"), ("h100", "fsdp"), ("h100", "dp x fsdp"))


def case(chip: str, count: int, layout: str):
    inside = count if layout == "fsdp" else min(INSIDE, count)
    return open_case(job("8B", f"{chip}:{count}", **grpo(
        4 * count, 8, 512, 1536, 16384, mesh__fsdp=inside, mesh__dp=count // inside, rollout__engine="vllm")))


def collectives(count: int, layout: str) -> dict:
    """Of the update and its optimizer step, with hosts of eight."""
    one = case("h100", count, layout)
    found = compiling.finish(compiling.start(one.config, one.hf_config, "cpu", one.target, one.mesh, None, {"update", "update_apply"}),
                             f"{count} devices", 900)
    return {name: program["collectives"] for name, program in found["programs"].items()}


def plot(rows, path: Path) -> None:
    """Seconds per step over chips (left) and the share that communication would take unhidden (right)."""
    width, height, pad = 360, 240, 48
    colours = dict(zip(SERIES, ("#1f77b4", "#7fb3d9", "#d62728", "#f0a0a0"), strict=True))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width + 40}" height="{height + 60}" font-family="sans-serif" '
           'font-size="11"><rect width="100%" height="100%" fill="white"/>']
    for panel, (title, column, top) in enumerate((("seconds per step, no communication hidden", 5, max(r[5] for r in rows) * 1.15),
                                                  ("share of communication in them", 4, 0.6))):
        left = pad + panel * (width + 20)
        at = lambda i, v, left=left, top=top: (left + i * (width - pad - 20) / 3, height - 20 - v / top * (height - 70))  # noqa: E731
        out.append(f'<text x="{left}" y="20" font-weight="bold">{title}</text>')
        for tick in range(5):
            x, y = at(0, top * tick / 4)
            out.append(f'<line x1="{x}" y1="{y}" x2="{at(3, 0)[0]}" y2="{y}" stroke="#ddd"/>'
                       f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{top * tick / 4:.2f}</text>')
        for i, count in enumerate(CHIPS):
            out.append(f'<text x="{at(i, 0)[0]}" y="{height}" text-anchor="middle">{count}</text>')
        for series in SERIES:
            points = [at(CHIPS.index(r[2]), r[column]) for r in rows if (r[0], r[1]) == series]
            out.append(f'<polyline fill="none" stroke-width="2" stroke="{colours[series]}" points="'
                       + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')
    for k, series in enumerate(SERIES):
        out.append(f'<rect x="{pad + 170 * k}" y="{height + 25}" width="14" height="4" fill="{colours[series]}"/>'
                   f'<text x="{pad + 20 + 170 * k}" y="{height + 31}">{series[0]}, {series[1]}</text>')
    path.write_text("\n".join(out) + "\n</svg>\n")


def main():
    rows, known = [], {}
    if "--priced" in sys.argv:
        entries = json.loads((RESULTS / "plan_scaling.json").read_text())["results"]["collectives"]
        known = {(e["devices"], e["layout"]): e["programs"] for e in entries}
    for chip, layout in SERIES:
        for count in CHIPS:
            key = (count, layout if count > INSIDE else "fsdp")
            if key not in known:
                print("compiling for", *key, flush=True)
                known[key] = collectives(*key)
            found = plan.times(case(chip, count, layout), known[key])
            update = found["phases"]["update"]
            rows.append([chip, layout, count, round(update["seconds"], 2), round(update["network"] / update["serial"], 3),
                         round(update["serial"], 2), update["bound"], round(found["mfu"], 3)])
    print("\nan 8B GRPO update at fixed work per chip")
    header = ["chip", "layout", "chips", "seconds", "communication", "seconds, none hidden", "bound", "MFU"]
    table(header, rows)
    plot(rows, Path(__file__).parent.parent / "docs" / "guides" / "plan_scaling.svg")
    record("plan_scaling", {"columns": header, "rows": rows,
                            "collectives": [{"devices": count, "layout": layout, "programs": {n: c[:5] for n, c in found.items()}}
                                            for (count, layout), found in known.items()]})


if __name__ == "__main__":
    main()
