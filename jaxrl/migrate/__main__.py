"""Command line: jaxrl migrate SYSTEM FILE [key=value ...] [--gpus=N] [--from-version=V] [--strict]
[--out=DIR]

Exit status: 0 the config is written, all of it or in part; 3 refused, the report says what lacks; 2 unreadable.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from jaxrl.__main__ import run
from jaxrl.migrate import each_start
from jaxrl.migrate.models import trained
from jaxrl.migrate.read import read
from jaxrl.migrate.report import name_of, shown, summary, write
from jaxrl.migrate.source import Unreadable
from jaxrl.migrate.systems import SYSTEMS, table_of
from jaxrl.migrate.table import Migration, Table, names_of

MOST_UNKNOWN = 20  # unknown keys that the terminal shows
MOST_STRANGE = 10  # unknown keys below which a file is not taken for another system's
USAGE = """usage: jaxrl migrate SYSTEM FILE [key=value ...] [--gpus=N] [--from-version=V]
           [--strict] [--out=DIR]

SYSTEM is one of: {systems}; with the job
behind it (trl/sft, trl/preference ...) where FILE does not tell it. FILE is a config of it: a script (.sh),
YAML or TOML, or a dump of a resolved config; of TRL and Tunix also a program in Python (.py) or a notebook (.ipynb).
Trailing key=value win over FILE, as on that system's own command line; NAME=value in capitals sets a variable of a
script, a program or the environment. Writes DIR (default: migrated)/<name>.py, report.md and report.json.
  --gpus=N          GPUs of the job, where FILE does not say (and for the plan). TRL: the processes that train, which
                    are what its batches are counted in; vLLM in server mode has further GPUs, which do not count
  --strict          refuse what is not carried over whole
  --from-version=V  version of SYSTEM whose defaults hold; without it, the last of:
{versions}"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 (--help too), 3 for a refused job, 2 for wrong or no arguments,
    for what cannot be read or written, and where the folder has an edited config. argv: the words after `jaxrl
    migrate`; None = those of the process."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or any(a in ("-h", "--help") for a in argv):
        versions = "\n".join(f"{name:>13}  {', '.join(table_of(name).versions)}" for name in SYSTEMS)
        print(USAGE.format(systems=", ".join(SYSTEMS), versions=versions))
        return 0 if argv else 2
    try:
        system, file, flags, overrides = arguments(argv)
        table = table_of(system)
        version = version_of(table, flags.get("from-version", table.versions[-1]))
        given = flags.get("gpus", "1")
        gpus = int(given) if re.fullmatch(r"[1-9][0-9]{0,6}", given) else 0
        if not gpus:
            raise Unreadable("--gpus", "", f"{given} is no number of GPUs")
        given = gpus if "gpus" in flags else 0
        m = Migration(table, read(table, Path(file), overrides, given), version, given, name_of(file)).run()
        m = each_start.settle(trained(m).ask_data())
        refuse_another(m)
        if "from-version" not in flags:
            m.ask_version()
        elif version == table.versions[-1] != flags["from-version"]:
            m.needs(
                f"--from-version={flags['from-version']}: the newest version of {table.title} that jaxrl reads is "
                f"{version}, whose keys and defaults are taken; check what changed since"
            )
        data = write(Path(flags.get("out", "migrated")), m, file, "strict" in flags)
    except Unreadable as e:
        print(f"jaxrl.migrate: {e}", file=sys.stderr)
        return 2
    except RecursionError:
        print(f"jaxrl.migrate: {shown(file)}: quotes, brackets or tables are nested too deeply", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"jaxrl.migrate: {e.filename or ''}: {e.strerror or e}", file=sys.stderr)
        return 2
    return say(data, Path(flags.get("out", "migrated")))


def arguments(argv: list[str]) -> tuple[str, str, dict[str, str], list[str]]:
    """Returns (system, file, flags, overrides). flags: names without -- -> values ("" of strict). Overrides are all
    other words after the file, and key=value between system and file where no such file exists. Of a flag that is
    given twice the last counts. Raises Unreadable for an unknown flag before the file, and where system or file is
    missing."""
    flags: dict[str, str] = {}
    places, overrides = [], []
    for arg in argv:
        name, eq, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and name in ("gpus", "from-version", "out") and eq:
            flags[name] = value
        elif arg == "--strict":
            flags["strict"] = ""
        elif arg.startswith("--") and len(places) < 2:
            raise Unreadable(arg, "", "unknown; there are --gpus=N, --from-version=V, --strict and --out=DIR")
        elif len(places) < 2 and not (places and eq and not Path(arg).exists()):
            places.append(arg)
        else:
            overrides.append(arg)
    if len(places) < 2:
        raise Unreadable("jaxrl.migrate", "", "expected SYSTEM and FILE; --help says more")
    return places[0], places[1], flags, overrides


def version_of(table: Table, asked: str) -> str:
    """Returns the version of a table whose defaults hold for the one that is asked for: itself, or the last before it.
    Raises Unreadable where there is none."""
    if asked in table.versions:
        return asked

    def numbers(text):
        return [int(n) for n in text.split(".")] if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})*", text) else []

    before = [v for v in table.versions if numbers(v) and numbers(asked) and numbers(v) <= numbers(asked)]
    if not before:
        raise Unreadable("--from-version", "", f"{asked} is none of {', '.join(table.versions)}")
    return before[-1]


def _known(m: Migration, system: str) -> int:
    """Returns how many of the source's keys a system's table has, or its names by their whole."""
    (exact, wild), names = table_of(system).owners, names_of(system)
    return sum(k in exact or k in names.keys or any(p.fullmatch(k) for p, _ in wild) for k in m.singles)


def refuse_another(m: Migration) -> None:
    """Refuses a file as another system's, or another job's of this one, if more than half of its keys, and at least
    MOST_STRANGE, are unknown to the table (m.unknown). This replaces all that lacks, other reasons to refuse too, and
    what was asked so far. A job that no table reads (m.refused) is left alone."""
    total, title = len(m.singles), m.table.title
    if m.refused or len(m.unknown) < MOST_STRANGE or 2 * len(m.unknown) <= total:
        return
    systems = [name for name in SYSTEMS if name != m.table.name or m.table.job]
    known, _, name = max((_known(m, name), name == m.table.name, name) for name in systems)
    unknown = f"{len(m.unknown)} of {total} keys are in no version of {title}"
    other = f"a config of another system; {name} has {known} of them: jaxrl migrate {name} FILE"
    if 2 * known <= total:
        other = "a file of another program"
    elif name == m.table.name:
        unknown = f"{len(m.unknown)} of {total} keys are not of {title}'s job {m.table.job}"
        other = f"a config of another job; jaxrl migrate {name} FILE finds out which"
    m.lacking, m.needs_you = [(m.unknown[0][0].key, f"{unknown}: it is {other}", True)], []


def say(data: dict, out: Path) -> int:
    """Prints the outcome, the counts of keys, what the user is asked, what lacks, the first MOST_UNKNOWN unknown keys,
    packages that are not installed, and the commands; returns 3 for a refused job, else 0. data: of report.report. out:
    folder of the reports."""
    counts: dict[str, int] = {}
    for key in data["keys"]:
        counts[key["kind"]] = counts.get(key["kind"], 0) + 1
    kinds = ", ".join(f"{n} {k}" for k, n in counts.items())
    print(f"{data['outcome']}: {summary(data)}")
    written = len(data["defaults_written"])
    print(f"  {len(data['keys'])} keys ({kinds}), {written} defaults written; see {out / 'report.md'}")
    for text in data["needs_you"]:
        print(f"  needs you: {text}")
    for entry in data["lacks"]:
        print(f"  lacks {entry['key']}: {entry['why']}")
    unknown = [key for key in data["keys"] if key["kind"] == "unknown"]
    for key in unknown[:MOST_UNKNOWN]:
        print(f"  unknown {shown(key['key'])}: {key['note']}")
    if len(unknown) > MOST_UNKNOWN:
        print(f"  {len(unknown) - MOST_UNKNOWN} further unknown keys; is {data['file']} a config of {data['system']}?")
    for text in data["packages"] if data["config"] else ():
        if importlib.util.find_spec(text.partition(",")[0]) is None:
            print(f"  not installed: {text}")
    for command in data["commands"].values():
        print(f"  {command}")
    return 3 if data["outcome"] == "refused" else 0


if __name__ == "__main__":
    sys.exit(run(main))
