"""Writes docs/reference/options.md and docs/reference/metrics.md from jaxrl's schema and metric names.

    python docs/generate.py        # tests/test_docs.py compares both pages with what this would write
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl.config.help import by_preset, conditions, joined
from jaxrl.config.registry import RECIPES
from jaxrl.config.schema import SCHEMA, options
from jaxrl.config.sections import GROUPS, headings
from jaxrl.resolve.checks.unread import SELECTORS, owned
from jaxrl.telemetry.names import METRICS

FOLDER = Path(__file__).parent / "reference"
GUIDES = {  # group of the config -> the page about it
    "lora": "guides/lora.md", "mesh": "explanations/sharding.md", "launch": "guides/hosts.md", "data": "guides/data.md",
    "rollout": "guides/vllm.md", "env": "guides/environments.md", "sandbox": "guides/sandbox.md", "reward": "guides/rewards.md",
    "algorithm": "explanations/algorithms.md", "preference": "guides/preferences.md", "reward_model": "guides/reward_models.md",
    "distill": "guides/distillation.md", "eval": "guides/evaluation.md", "checkpoint": "guides/checkpoints.md",
    "record": "guides/replay.md", "certify": "guides/certify.md", "plan": "guides/plan.md",
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
           "```bash", "jaxrl train --config=configs/grpo.py --config.optimizer.lr=1e-4", "```", "",
           "On the command line an option is `--config.group.option=value`, in a config file `c.group.option = value`. `None` lets jaxrl",
           "decide: an algorithm option takes its preset's value, others what their text says. Counts are global over all hosts unless the",
           "text says otherwise. Times are in seconds unless named otherwise. How values are written: [configs and options](../guides/configs.md).",
           "", "*Needs* names what must hold for anything to read an option: `a=b|c` one of these values, a name alone that it is on. A config that",
           "sets an option without it is refused. A recipe of your own may read any option."]
    for group in SCHEMA:
        guide = f" ([{Path(GUIDES[group]).stem}](../{GUIDES[group]}))" if group in GUIDES else ""
        meaning = GROUPS[group][0].upper() + GROUPS[group][1:]
        out += ["", f"## {group}", "", f"{meaning}{guide}."]
        common, further = conditions(group)
        for clause, without in common.items():
            out += ["", f"All{' but ' * bool(without)}{', '.join(map(code, without))} need {code(clause)}."]
        head, titles = ["", "| option | default | values | meaning |", "|---|---|---|---|"], headings()
        out += head if f"{group}.{next(iter(SCHEMA[group]), '')}" not in titles else []
        for name, option in options().items():
            if name == group or name.startswith(group + "."):
                if name in titles:
                    title = titles[name].partition(": ")[2]
                    out += ["", f"### {title[0].upper()}{title[1:]}", *head]
                meaning = cell(option.doc)
                if name == "optimizer.lr":
                    meaning += "; `None`: by recipe, " + ", ".join(f"{r} {row.lr}" for r, row in RECIPES.items()) + "; with adapters ten times that"
                needs = [*further.get(name, ()), *chosen_rows(name)]
                meaning += by_preset(name).replace("None = by preset", "`None` = by preset")
                meaning += f". Needs {joined([code(clause) for clause in needs])}" if needs else ""
                out.append(f"| `{name}` | {code(repr(option.default))} | {values(option)} | {meaning} |")
    return "\n".join(out) + "\n"


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    groups: dict[str, list] = {}
    for metric in METRICS:
        groups.setdefault(metric.name.partition("/")[0].partition("<")[0] or "other", []).append(metric)
    out = ["# Metrics", "",
           f"After reading this page you know every number that a run writes: {len(METRICS)} names. `<...>` stands for further parts.", WRITTEN, "",
           "```bash", "jaxrl report runs/grpo", "```", "",
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
