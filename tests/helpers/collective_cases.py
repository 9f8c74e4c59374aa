"""What test_collectives.py compiles, and how its budget is written.

    PYTHONPATH=. python tests/helpers/collective_cases.py [case ...]

Writes tests/collectives.csv anew, or these cases of it, after a change that is meant.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from jaxrl.config.load import load_config, put
from jaxrl.planning import compiling
from jaxrl.planning.case import open_case
from jaxrl.sharding.mesh import AXES

BUDGET = Path(__file__).parents[1] / "collectives.csv"
ROOT = Path(__file__).resolve().parents[2]
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768}
QWEN8B = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
          "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
NAMES = {3: ("dp", "fsdp", "tp"), 4: ("dp", "fsdp", "ep", "tp"), 5: AXES}
BIG = {"model.path": "", "model.init": "random", "model.remat": "full", "model.scan_layers": "true", "train.compute_dtype": "bf16",
       "train.logprob_chunk": 1024, "rollout.cache_lengths": (), "rollout.prompt_lengths": (), "train.row_lengths": (), "data.prompts_per_step": 256,
       "data.max_prompt_tokens": 1024, "rollout.max_new_tokens": 3072}
HYBRID = load_config(str(ROOT / "configs" / "sft_hybrid.py")).model.config.to_dict() | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
# name: (config, options, target, mesh)
CASES = {
    "grpo dp": ("grpo.py", {}, "cpu:8", (8, 1, 1)),
    "grpo fsdp": ("grpo.py", {}, "cpu:8", (1, 8, 1)),
    "ppo mixed": ("ppo.py", {"algorithm.kl.coef": 0.1}, "cpu:8", (2, 2, 2)),
    "experts": ("grpo_moe.py", {"model.remat": "full", "model.scan_layers": "true"}, "cpu:8", (1, 2, 4, 1)),
    "experts mixed": ("grpo_moe.py", {"algorithm.old_logprobs": "recompute"}, "cpu:8", (1, 2, 2, 2)),
    "long rows": ("grpo.py", {"model.remat": "full", "model.scan_layers": "true", "train.row_lengths": (512,)}, "cpu:8", (1, 2, 4, 1, 1)),
    "long rows, recurrent": ("grpo_hybrid.py", {
        "model.remat": "full", "model.scan_layers": "true", "train.row_lengths": (512,), "run.warm_start": "", "model.init": "random",
        "model.tokenizer": "jaxrl://arith/tokenizer", "model.config": HYBRID}, "cpu:8", (1, 2, 4, 1, 1)),
    "five axes": ("grpo_moe.py", {"model.remat": "full", "model.scan_layers": "true", "train.row_lengths": (512,)}, "cpu:32", (2, 2, 2, 2, 2)),
    "1.5B on 64": ("grpo_gsm8k.py", BIG | {"model.config": QWEN}, "cpu:64", (4, 8, 2)),
    "8B on 256": ("grpo_gsm8k.py", BIG | {"model.config": QWEN8B}, "cpu:256", (4, 16, 4)),
}


def found(name: str) -> tuple[dict[tuple, tuple[int, int]], int]:
    """({(program, kind, group): (count, bytes)}, warnings of involuntary rematerialisation) of one case."""
    file, changes, target, sizes = CASES[name]
    config = load_config(str(ROOT / "configs" / file))
    for option, value in ({"run.mode": "plan", "plan.target": target} | changes).items():
        put(config, option, value)
    config.mesh.update(dict(zip(NAMES[len(sizes)], sizes, strict=True)))
    case = open_case(config)
    big = case.target.count > 8
    wanted = {"update", "update_apply", "score_reference"} if big else None
    started = compiling.start(case.config, case.hf_config, "cpu", case.target, case.mesh, None if big else case.rollout_mesh, wanted)
    result = compiling.finish(started, name, 500)
    rows = {}
    for program, numbers in result["programs"].items():
        for c in numbers["collectives"]:
            key = (program, c["kind"], c["group"])
            count, size = rows.get(key, (0, 0))
            rows[key] = (count + c["count"], size + c["bytes"])
    return rows, result["rematerialised"]


def budget(name: str) -> dict[tuple, tuple[int, int]]:
    with BUDGET.open() as file:
        return {(r["program"], r["kind"], int(r["group"])): (int(r["count"]), int(r["bytes"]))
                for r in csv.DictReader(file) if r["case"] == name}


def over(rows, allowed) -> list[str]:
    """What is not in the budget, or more than in it."""
    out = []
    for (program, kind, group), (count, size) in sorted(rows.items()):
        most = allowed.get((program, kind, group), (0, 0))
        if count > most[0] or size > most[1]:
            out.append(f"{program}: {count} {kind} of {group} devices, {size} bytes; allowed are {most[0]}, {most[1]} bytes")
    return out


if __name__ == "__main__":
    kept = {case: budget(case) for case in CASES}
    for case in sys.argv[1:] or CASES:
        kept[case], warned = found(case)
        print(case, len(kept[case]), "rows,", warned, "rematerialisations", flush=True)
    with BUDGET.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["case", "program", "kind", "group", "count", "bytes"])
        for case, rows in kept.items():
            out.writerows([case, *key, *value] for key, value in sorted(rows.items()))
