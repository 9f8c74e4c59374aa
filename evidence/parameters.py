"""docs/reference/parameters.md: what becomes of each of the 854 parameters that five other systems document.

    python evidence/parameters.py        # writes docs/reference/parameters.md; tests/test_parameters.py says whether it is current

From tests/coverage.csv (what works, with a test), tests/coverage_excluded.csv (what does not, with the reason) and the tables of
jaxrl.migrate (what a config of that system is migrated to).
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

from jaxrl.migrate.source import Setting, Source
from jaxrl.migrate.systems import table_of
from jaxrl.migrate.table import Migration

ROOT = Path(__file__).parent.parent
SYSTEMS = {"AReaL": "areal", "RLinf": "rlinf", "SkyRL": "skyrl", "Cosmos-RL": "cosmos_rl", "ROLL": "roll"}
T, P, D, R, PAR = "train.", "train.train_policy.", "distillation.", "rollout.", "policy.parallelism."
# System -> section of its document -> where its parameters lie in a config; "" stands for all other sections.
SECTIONS = {
    "AReaL": {"Base Experiment Configuration": "", "GRPO Configuration": "", "SFT Configuration": "", "Reward Model Configuration": "",
              "Launcher Configuration": "launcher.", "Scheduler Configuration": "scheduler.", "Cluster Specification": "cluster.",
              "Dataset Configuration": "train_dataset.", "Generation Hyperparameters": "gconfig.", "SGLang Configuration": "sglang.",
              "Inference Engine Configuration": "rollout.", "Checkpoint Saver Configuration": "saver.",
              "Evaluator Configuration": "evaluator.", "Recovery Configuration": "recover.", "Micro-batch Specification": "actor.mb_spec.",
              "Normalization Configuration": "actor.adv_norm.", "Optimizer Configuration": "actor.optimizer.",
              "Statistics Logger Configuration": "stats_logger.", "": "actor."},
    "SkyRL": {"Data Configuration": "data.", "Generator Configuration": "", "text": "", "Model Placement Configuration": "trainer.",
              "FSDP Configuration": "trainer.", "": "trainer."},
    "Cosmos-RL": {"Config": "", "CheckpointConfig": T + "ckpt.", "DatasetConfig": P + "dataset.", "DiffusersConfig": "policy.diffusers.",
                  "DistillationConfig": D, "FP4Config": T + "fp4.", "FP8Config": T + "fp8.", "GrpoConfig": P, "LoggingConfig": "logging.",
                  "LoraConfig": "policy.lora.", "MultiTurnRolloutConfig": R + "multi_turn_config.",
                  "OverlongRewardConfig": P + "overlong_reward.", "ParallelismConfig": PAR, "PolicyConfig": "policy.",
                  "ProfilerConfig": "profiler.", "RemoteRewardConfig": P + "remote_reward.", "RolloutAsyncConfig": R + "async_config.",
                  "RolloutConfig": R, "RolloutParallelismConfig": R + "parallelism.", "SFTDataConfig": P,
                  "SampleConfig": "policy.diffusers.sample.", "SamplingConfig": R + "sampling_config.",
                  "SubProfilerConfig": "profiler.sub_profiler_config.", "TokenizerConfig": "policy.diffusers.tokenizer.",
                  "TrainingConfig": T, "VLAConfig": "vla.", "ValidationConfig": "validation."},
    "ROLL": {"pipeline": "", "roles": "", "generating_args": "actor_infer.generating_args.",
             "strategy_config": "actor_train.strategy_args.strategy_config."},
    "RLinf": {},
}
INTRODUCTION = """After reading this page you know what became of the {count} parameters that AReaL, RLinf, SkyRL, Cosmos-RL and ROLL document.
Written by `python evidence/parameters.py` from the tables of `jaxrl.migrate` and from `tests/coverage.csv`, where every parameter that
works has a test that fails without it; do not edit. How a config is migrated: [migrate](../guides/migrate.md).

**works**: as the option or behaviour named. **automatic**: nothing has to be set. **not carried**: for the reason given. The last
column is what `jaxrl.migrate` does with the key (*ask*: it is said under "Needs you"; *table*: its keys are looked at one by one)."""
KINDS = {"works": "works", "automatic": "automatic", "out of scope": "not carried", "not done": "not carried"}


def rows(name: str) -> list[dict]:
    with open(ROOT / "tests" / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


def key_of(system: str, section: str, parameter: str) -> str:
    """The dotted key of a parameter in a config of its system."""
    if system == "RLinf":
        one = parameter == "component_placement"
        return f"{section}.{parameter}" + (".actor,inference,rollout" if one else "")
    if system == "ROLL" and section == "strategy_name":  # its parameters are values of this key
        return "actor_train.strategy_args.strategy_name"
    if system == "ROLL" and parameter.startswith("deepspeed"):
        return parameter
    sections = SECTIONS[system]
    prefix = sections.get(section, sections.get("", f"actor_train.{section}."))
    return (f"actor_train.{section}." if system == "ROLL" and section not in sections else prefix) + parameter


def ledger() -> list[dict]:
    """One entry per parameter: system, section, parameter, key, kind (of KINDS), what, test; in the documents' order."""
    found = {}
    for r in rows("coverage"):
        found[r["system"], r["section"], r["parameter"]] = ("works", r["option"].removeprefix("equivalent: "), r["test"])
    for r in rows("coverage_excluded"):
        kind, _, why = r["reason"].partition(": ")
        found[r["system"], r["section"], r["parameter"]] = (kind, why, "")
    out = []
    for r in rows("seed_parameters"):
        kind, what, test = found[r["system"], r["section"], r["parameter"]]
        out.append({"system": r["system"], "section": r["section"], "parameter": r["parameter"], "kind": KINDS[kind], "what": what,
                    "test": test, "key": key_of(r["system"], r["section"], r["parameter"])})
    return out


def migrated(system: str, keys: list[str]) -> dict[str, str]:
    """Key -> kind of the importer's row that owns it; "table" for one that is a table with keys of its own."""
    table = table_of(SYSTEMS[system])
    m = Migration(table, Source({k: Setting(k, None, "ledger:1") for k in keys}, []), table.versions[-1])
    kind = {key.name: key.kind for key in table.keys()}
    found = {s.key: kind[owner] for owner, settings in m.owned.items() for s in settings}
    names = [n for key in table.keys() for n in key.names()]
    for key in keys:
        if key not in found and any(n.startswith(key + ".") for n in names):
            found[key] = "table"
    return found


def page() -> str:
    """docs/reference/parameters.md."""
    entries = ledger()
    count = Counter((e["system"], e["kind"]) for e in entries)
    out = ["# Parameters of other systems", "", *INTRODUCTION.format(count=len(entries)).splitlines(), "",
           "| | works | automatic | not carried |", "|---|---|---|---|"]
    out += [f"| {s} | {count[s, 'works']} | {count[s, 'automatic']} | {count[s, 'not carried']} |" for s in SYSTEMS]
    for system in SYSTEMS:
        mine = [e for e in entries if e["system"] == system]
        kinds = migrated(system, [e["key"] for e in mine])
        out += ["", f"## {system}", "", "| parameter | | here | migrated |", "|---|---|---|---|"]
        for e in mine:
            what = " ".join(e["what"].split()).replace("|", "\\|").replace("<", "&lt;")
            out.append(f"| `{e['key']}` | {e['kind']} | {what} | {kinds.get(e['key'], 'unknown')} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "reference" / "parameters.md").write_text(page(), "utf-8")
    print("written: docs/reference/parameters.md")
