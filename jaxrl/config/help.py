"""The pages of `jaxrl train --help`: an overview of the groups of options, one group, one option, or all of them."""

from __future__ import annotations

import difflib
import functools
import re
import runpy
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping

from jaxrl.config.load import shipped_configs
from jaxrl.config.option import ROOT, Option
from jaxrl.config.registry import RECIPES
from jaxrl.config.schema import SCHEMA, options
from jaxrl.config.sections import GROUPS, headings
from jaxrl.config.suggest import ELSEWHERE
from jaxrl.errors import ConfigError

USAGE = """usage: jaxrl {command} --config=FILE[:ARG] [--config.GROUP.OPTION=VALUE ...]

FILE is a Python file with get_config(ARG), or the name of a shipped config:
{shipped}
Lists are written a,b; tables "{{'key': value}}", or one entry as
--config.GROUP.OPTION.key=value. An empty value empties an option; {{}} sets a
GROUP back to its defaults. Relative paths start at the working directory.
"""
OVERVIEW = """
example: jaxrl {command} --config=grpo --config.optimizer.lr=1e-5

  --help=GROUP    options of a group with default and meaning: --help=rollout
  --help=OPTION   one option: --help=optimizer.lr, --help=lr
  --help=WORD     options whose text has the word, or what the key of another
                  system is called here: --help=num_generations
  --help=metrics  every metric
  --help=all      everything

groups:
"""



def requested(argv: list[str]) -> str | None:
    """Returns the topic of `--help` (or `-h`), `--help=TOPIC`, `--help TOPIC`; "" for the overview, "all" for
    `--helpfull`, None without a request for help.
    """
    for i, arg in enumerate(argv):
        name, _, topic = arg.partition("=")
        if name in ("-h", "--help", "--helpfull"):
            following = "" if topic or i + 1 == len(argv) or argv[i + 1].startswith("-") else argv[i + 1]
            return "all" if name == "--helpfull" else topic or following
    return None


def page(topic: str, command: str, metrics: str) -> str:
    """Returns the text of a topic: "" (overview), all, metrics, a group (rollout, rollout.vllm), an option, the last
    part of an option's name, a key of another system, or a word of names and meanings.

    command: jaxrl's command, for the line of usage. metrics: the text of the table of metrics. Raises ConfigError for
    another topic.
    """
    topic = topic.removeprefix("--").removeprefix("config.")
    usage = USAGE.format(command=command, shipped=_wrapped(", ".join(shipped_configs()), "  "))
    if not topic:
        width = max(map(len, GROUPS))
        return usage + OVERVIEW.format(command=command) + "\n".join(
            f"  {name:<{width}}  {meaning}" for name, meaning in GROUPS.items())
    if topic == "all":
        return f"{usage}\n{option_lines(options())}\n\nmetrics:\n{metrics}"
    if topic == "metrics":
        return f"metrics:\n{metrics}"
    known = options()
    shown = {name: opt for name, opt in known.items() if f"{name}.".startswith(f"{topic}.")}
    shown = shown or {name: opt for name, opt in known.items() if name.rpartition(".")[2] == topic}
    if topic == "user":
        return "user: " + GROUPS["user"] + ", e.g. --config.user.name=value"
    if not shown:
        return _found(topic)
    head = f"{topic}: {GROUPS[topic]} ({len(shown)} options)\n" if topic in GROUPS else ""
    for clause, without in conditions(topic)[0].items() if head else ():
        head += _wrapped(f"All{' but ' * bool(without)}{', '.join(without)} need {clause}", "") + "\n"
    head += "\n" * bool(head)
    return head + option_lines(shown)


def _found(word: str) -> str:
    """Returns the options that a word finds which names no group or option: those that a key of this name in another
    system stands for, else those whose name or meaning has the word.

    Raises ConfigError, with the nearest name, where it finds none.
    """
    known = options()
    from jaxrl.migrate.counterparts import counterparts  # the tables of seven systems: only when a name is unknown

    rows = [row for row in counterparts(word) if row.whole]
    theirs = {row.options[0]: f"{row.key} in {row.system}" for row in reversed(rows) if row.options}
    theirs = theirs or {ELSEWHERE[w]: f"{w} in other systems" for w in (word,) if w in ELSEWHERE}
    if theirs:
        shown = dict.fromkeys(reversed(theirs))
        head = f"{word} is no option here; {'; '.join(reversed(theirs.values()))}:"
        return f"{_wrapped(head, '')}\n\n{option_lines({name: known[name] for name in shown if name in known})}"
    groups = dict.fromkeys(name.rpartition(".")[0] for name in known)
    near = difflib.get_close_matches(word, [*SCHEMA, *groups, "all", "metrics", *known], n=1)
    pattern = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    shown = {name: opt for name, opt in known.items() if pattern.search(f"{name.replace('_', ' ')} {opt.doc}")}
    if not shown:
        hint = f"did you mean --help={near[0]}?" if near else "--help lists the groups"
        raise ConfigError(f"--help={word}: no group or option of this name; {hint}")
    return f"{word}: no group or option of this name; {len(shown)} options have the word:\n\n{option_lines(shown)}"


MOST_WITHOUT = 8  # options of a group that a condition of all the others is written without


def conditions(group: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns the conditions without which the options of a group are read by nothing.

    They are (conditions of most options of the group -> the options that are without, option -> its further
    conditions), each a clause of Option.needs or `run.recipe=a|b` of Option.read_by. Most: more than half of the
    options, and all but at most MOST_WITHOUT.
    """
    clauses = {}
    for name, option in options().items():
        if name.startswith(f"{group}."):
            read_by = [f"run.recipe={'|'.join(option.read_by)}"] * bool(option.read_by)
            needs = [*filter(None, option.needs.split(" and "))]
            named = any("run.recipe=" in clause for clause in needs)  # a condition that names recipes says more
            clauses[name] = needs if named else [*read_by, *needs]
    counts = Counter(clause for own in clauses.values() for clause in own)
    common = {clause: [name for name, own in clauses.items() if clause not in own]
              for clause, count in counts.items() if count > len(clauses) / 2 and count >= len(clauses) - MOST_WITHOUT}
    return common, {name: [c for c in own if c not in common] for name, own in clauses.items()}


MOST_WITHOUT_TITLES = 15  # options in a list that needs no headings


def option_lines(shown: Mapping[str, Option]) -> str:
    """Returns the text of options, a paragraph each: default, choices, meaning, and the conditions that are not those
    of most options of its group (`conditions`). Headings stand between more than MOST_WITHOUT_TITLES options.

    shown: dotted name -> Option.
    """
    lines: list[str] = []
    titles = headings() if len(shown) > MOST_WITHOUT_TITLES else {}
    further = {name: clauses for group in SCHEMA for name, clauses in conditions(group)[1].items()}
    for name, opt in shown.items():
        if name in titles:
            lines += [*[""] * bool(lines), titles[name]]
        recipes = ", ".join(f"{recipe} {row.lr}" for recipe, row in RECIPES.items()) if name == "optimizer.lr" else ""
        by_recipe = f"; None = by recipe: {recipes}; with lora.rank ten times that" if recipes else ""
        needs = f". Needs {joined(further[name])}" if further.get(name) else ""
        first = f"  --config.{name}={opt.default!r}"
        choices = f"({' | '.join(map(str, opt.choices))})" if opt.choices else ""
        beside = len(first) + len(choices) < columns()
        lines.append(f"{first} {choices}".rstrip() if beside else first)
        lines += [] if beside else [_wrapped(choices, " " * 6)]
        lines.append(_wrapped(opt.doc + by_recipe + by_preset(name) + needs, " " * 6))
    return "\n".join(lines)


def joined(clauses: list[str]) -> str:
    """Returns clauses of a condition joined by `and`; if there are several, alternatives (`or`) stand in brackets."""
    alone = len(clauses) == 1
    return " and ".join(c if alone or " or " not in c else f"({c})" for c in clauses)


def by_preset(name: str) -> str:
    """Returns what an option of `algorithm` is where it is None: most presets' value and those that differ; "" for
    other options.
    """
    leaf = name.removeprefix("algorithm.")
    values = {preset: row[leaf] for preset, row in _presets().items() if leaf in row and name != leaf}
    if not values:
        return ""
    most = Counter(map(repr, values.values())).most_common(1)[0][0]
    others: dict[str, list[str]] = {}
    for preset, value in values.items():
        if repr(value) != most:
            others.setdefault(str(value), []).append(preset)
    apart = "".join(f"; {value} with {', '.join(presets)}" for value, presets in others.items())
    if most == "None":
        return f". By preset: {apart.removeprefix('; ')}" * bool(apart)
    return f". None = by preset: {most.strip(chr(39))}{apart}"


@functools.cache
def _presets() -> dict[str, dict]:
    """The table of presets, run as a file: the import of its package takes seconds (jax)."""
    return dict(runpy.run_path(str(ROOT / "algorithms" / "presets.py"))["PRESETS"])


def columns() -> int:
    """Returns the columns of the terminal, within 60 and 140; 120 without one."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, 60), 140)


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, columns() - 1, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False,
                         break_long_words=False)
