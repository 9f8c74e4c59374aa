"""Writes docs/reference/options.md and docs/reference/metrics.md from jaxrl's schema and metric names.

    python docs/generate.py        # tests/test_docs.py compares both pages with what this would write
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl.config.help import conditions
from jaxrl.config.registry import RECIPES
from jaxrl.config.schema import SCHEMA, options
from jaxrl.resolve.checks.unread import SELECTORS, owned
from jaxrl.telemetry.names import METRICS

FOLDER = Path(__file__).parent / "reference"
GROUPS = {  # group of the config -> what it configures
    "run": "The job: what it does, where it writes, how it resumes.",
    "model": "The policy's model, its tokenizer and how its layers are computed.",
    "lora": "Adapters: [guide](../guides/lora.md).",
    "mesh": "How devices are used: [sharding](../explanations/sharding.md).",
    "launch": "Several processes: [many hosts](../guides/hosts.md).",
    "data": "Rows, columns, templates and their order: [guide](../guides/data.md).",
    "rollout": "Sampling completions: the embedded sampler and [vLLM](../guides/vllm.md).",
    "env": "Episodes, environments and tools: [guide](../guides/environments.md).",
    "sandbox": "Where programs written by a model run: [guide](../guides/sandbox.md).",
    "reward": "Reward functions, services, judges and reward models: [guide](../guides/rewards.md).",
    "algorithm": "Advantages, losses, KL and corrections: [algorithms](../explanations/algorithms.md).",
    "critic": "The critic of PPO and its relatives.",
    "reference": "The reference policy of KL terms and preferences.",
    "preference": "DPO and its relatives: [guide](../guides/preferences.md).",
    "reward_model": "Training a reward model: [guide](../guides/reward_models.md).",
    "distill": "Distillation: [guide](../guides/distillation.md).",
    "teacher": "The teacher of a distillation.",
    "optimizer": "The optimizer and its schedule.",
    "train": "Steps, microbatches, precision and memory of the update.",
    "eval": "Evaluation on held-out rows: [guide](../guides/evaluation.md).",
    "checkpoint": "Checkpoints, exports and copies: [guide](../guides/checkpoints.md).",
    "log": "Console, files and services that metrics go to.",
    "record": "Recording steps: [guide](../guides/replay.md).",
    "replay": "Computing recorded steps again.",
    "fork": "Forking a recorded run.",
    "certify": "Claims about losses and rewards: [guide](../guides/certify.md).",
    "plan": "Plans for devices that are not here: [guide](../guides/plan.md).",
    "profile": "Traces and memory profiles of steps.",
    "faults": "Faults that are made to happen, for tests.",
    "user": "Options of your own code; jaxrl does not read them.",
}
BOUNDS = {"[0, 1)": "0 to below 1", "(0, 1]": "above 0, at most 1", "(0, 1)": "between 0 and 1", "0..1": "0 to 1"}
WRITTEN = "Written by `python docs/generate.py`; do not edit."


def cell(text) -> str:
    """Text as a cell of a Markdown table, paths of pages as links."""
    text = re.sub(r"([|*])", r"\\\1", " ".join(str(text).split())).replace("<", "&lt;")
    return re.sub(r"docs/(\w+/(\w+)\.md)", r"[\2](../\1)", text)


def code(text) -> str:
    """Text as code in a cell of a Markdown table."""
    return f"`{str(text).replace('|', chr(92) + '|')}`"


def values(option) -> str:
    """The values that an option takes beside its kind."""
    if option.choices:
        return ", ".join(map(code, option.choices)) + (", or an import path" if option.or_path else "")
    return BOUNDS.get(option.bound, cell(option.bound))


def chosen_rows(name) -> list[str]:
    """The rows that read an option, where a table's rows say what they read."""
    selector, rows = owned().get(name, ("", ()))
    others = [row for row in SELECTORS.get(selector, ()) if row not in rows]
    return [f"{selector}={'|'.join(rows)}" if len(rows) <= len(others) else f"{selector}!={'|'.join(others)}"] * bool(others)


def options_page() -> str:
    """docs/reference/options.md."""
    count = len(options())
    out = ["# Options", "",
           f"After reading this page you know every option of a run: {count} of them, in {len(SCHEMA)} groups. {WRITTEN}", "",
           "```bash", "python -m jaxrl.main --config=configs/grpo.py --config.optimizer.lr=1e-4", "```", "",
           "On the command line an option is `--config.group.option=value`, in a config file `c.group.option = value`. `None` lets jaxrl",
           "decide: an algorithm option takes its preset's value, others what their text says. Counts are global over all hosts unless the",
           "text says otherwise. Times are in seconds unless named otherwise. How values are written: [configs and options](../guides/configs.md).",
           "", "*Needs* names what must hold for anything to read an option: `a=b|c` one of these values, a name alone that it is on. A config that",
           "sets an option without it is refused. A recipe of your own may read any option."]
    for group in SCHEMA:
        common, further = conditions(group)
        out += ["", f"## {group}", "", GROUPS[group]]
        for clause, without in common.items():
            out += ["", f"All{' but ' * bool(without)}{', '.join(map(code, without))} need {code(clause)}."]
        out += ["", "| option | default | values | meaning |", "|---|---|---|---|"]
        for name, option in options().items():
            if name == group or name.startswith(group + "."):
                meaning = cell(option.doc)
                if name == "optimizer.lr":
                    meaning += "; `None`: by recipe, " + ", ".join(f"{r} {row.lr}" for r, row in RECIPES.items()) + "; with adapters ten times that"
                needs = [*further.get(name, ()), *chosen_rows(name)]
                meaning += f". Needs {' and '.join(map(code, needs))}" if needs else ""
                out.append(f"| `{name}` | {code(repr(option.default))} | {values(option)} | {meaning} |")
    return "\n".join(out) + "\n"


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    groups: dict[str, list] = {}
    for metric in METRICS:
        groups.setdefault(metric.name.partition("/")[0].partition("<")[0] or "other", []).append(metric)
    out = ["# Metrics", "",
           f"After reading this page you know every number that a run writes: {len(METRICS)} names. `<...>` stands for further parts.", WRITTEN, "",
           "```bash", "python -m jaxrl.report runs/grpo", "```", "",
           "Each step is one line of `metrics.jsonl`; names that begin with `time/`, `perf/` and the like are nested under `time` there.",
           "Averages are over the step's data, or over the optimizer steps of one RL step where the value comes from the update (maxima for",
           "`gap/max`). A line of SFT covers about `log.every_steps` steps and gives their average. *Console* is the column's name on the console."]
    for group, metrics in groups.items():
        out += ["", f"## {group}", "", "| metric | console | meaning |", "|---|---|---|"]
        out += [f"| {code(m.name)} | {code(m.header) if m.header else ''} | {cell(m.meaning)} |" for m in metrics]
    return "\n".join(out) + "\n"


PAGES = {"options.md": options_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), "utf-8")
        print(f"written: docs/reference/{name}")
