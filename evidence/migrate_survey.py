"""Outcomes of all example configs of other systems' clones, with the reasons of those that are refused or unreadable, most frequent first.

    python evidence/migrate_survey.py --clones=DIR [--systems=roll,verl] [--keep=FILE.json] [--most=20] [--since=COMMIT]     # some five minutes

DIR is that of migrate_corpus.py. Read are scripts, YAML, TOML and Python files below FOLDERS of each clone's newest commit, with --gpus=8
where the file does not say, as `jaxrl migrate` reads them; Python of systems of which programs are read. A file that no job starts
(a helper, accelerate's or DeepSpeed's options, a data script) counts as unreadable. A written config has to load and to pass jaxrl's checks
for its job. Several clones of a system, of different versions, count each. --keep writes the outcome of every file.
--since also counts the files whose model is refused for its family, as the table of such models was at a commit of this repository and as
it is. Exits with 1 where a
file ends in a trace or a written config does not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

from common import record, table  # noqa: E402
from migrate_corpus import clone  # noqa: E402

from jaxrl.config.load import load_config  # noqa: E402
from jaxrl.errors import ConfigError  # noqa: E402
from jaxrl.migrate import __main__ as command  # noqa: E402
from jaxrl.migrate import models  # noqa: E402
from jaxrl.migrate.systems import table_of  # noqa: E402
from jaxrl.resolve.checks.common import check  # noqa: E402

CLONES = (  # repository, its system, version of its newest commit
    ("NovaSky-AI/SkyRL", "skyrl", "0.3"), ("RLinf/RLinf", "rlinf", "0.3"), ("alibaba/ROLL", "roll", "0.3.0"), ("google/tunix", "tunix", "0.1.7"),
    ("huggingface/open-r1", "trl", "0.18"), ("huggingface/trl", "trl", "1.16"), ("inclusionAI/AReaL", "areal", "1.0"),
    ("nvidia-cosmos/cosmos-rl", "cosmos_rl", "0.4.4"), ("verl-project/verl", "verl", "0.9"), ("volcengine/verl", "verl", "0.7"))
FOLDERS = re.compile(r"(.*/)?(examples|recipes|configs)/")
NUMBERS = re.compile(r"'[^']*'|\"[^\"]*\"|\b\d[\d.e-]*\b|[\w.+-]*/[\w./{}$-]+")


def files_of(git: Path, system: str, out: Path) -> list[str]:
    """Takes a clone's example files into a folder; returns those that may be configs."""
    names = subprocess.run(["git", "-C", str(git), "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True, check=True).stdout
    suffixes = (".sh", ".yaml", ".yml", ".toml", *([".py"] if table_of(system).calls else []))
    texts = [n for n in names.splitlines() if FOLDERS.match(n) and n.endswith((".sh", ".yaml", ".yml", ".toml", ".py"))]
    archive = subprocess.run(["git", "-C", str(git), "archive", "HEAD", *texts], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(out)], input=archive, check=True)
    return [n for n in texts if n.endswith(suffixes) and not n.startswith(("tests/", "test/"))]


def outcome_of(system: str, version: str, file: Path, out: Path) -> tuple[str, list[str]]:
    """Returns (outcome, its reasons): full, partial, refused, unreadable, trace or wrong."""
    said = io.StringIO()
    argv = [system, str(file), "--gpus=8", f"--out={out}", *([f"--from-version={version}"] if version else [])]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = command.main(argv)
        except Exception:
            return "trace", [traceback.format_exc().strip().splitlines()[-1]]
    if status == 2:
        return "unreadable", [re.sub(rf"^jaxrl.migrate: ({re.escape(str(file))}|{re.escape(file.name)})[:\d]*:? ?", "", said.getvalue().strip())]
    report = json.loads((out / "report.json").read_text())
    reasons = [f"{e['key']}: {e['why']}" for e in report["lacks"] if e["refused"] or report["outcome"] != "refused"]
    if report["outcome"] == "refused":
        return "refused", reasons
    reasons += report["needs_you"] + [f"unknown {k['key']}: {k['note']}" for k in report["keys"] if k["kind"] == "unknown"]
    here = os.getcwd()
    os.chdir(out)
    try:
        config = load_config(report["config"])
        config.model.path, config.log.wandb = config.model.path or "a/model", False
        if any(text.startswith("model.chat_template") for text in report["needs_you"]):
            config.model.chat_template = ""
        check(config)
    except ConfigError as e:
        asked = any("data.path" in text for text in report["needs_you"]) and "data.path is empty" in str(e)
        return (report["outcome"], reasons) if asked else ("wrong", [str(e)])
    finally:
        os.chdir(here)
    return report["outcome"], reasons


def families(paths: Counter, since: str) -> dict:
    """Counts files whose model is refused for its family, by the table as it was at a commit and as it is, and names the models between.
    Models with towers, which another part reads, do not count. paths: name of a model, in lower case -> files."""
    source = subprocess.run(["git", "show", f"{since}:jaxrl/migrate/models.py"], capture_output=True, text=True, check=True,
                            cwd=Path(__file__).parent)
    old: dict = {}
    exec(source.stdout, old)

    def refused(path, module):
        what = next((what for pattern, what in module["NOT_TRAINED"] if re.fullmatch(pattern, path)), "")
        return what not in ("", module["_VISION"])

    before, now = ({path: n for path, n in paths.most_common() if refused(path, module)} for module in (old, vars(models)))
    return {"since": since, "before": sum(before.values()), "now": sum(now.values()), "refused": now,
            "read": {path: n for path, n in before.items() if path not in now}}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True)
    parser.add_argument("--systems", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--since", default="")
    args = parser.parse_args()
    results, every, paths = {}, {}, Counter()

    def noted(m):
        paths[str(m.options.get("model.path", ("",))[0]).rstrip("/").rsplit("/", 1)[-1].lower()] += 1
        return models.trained(m)

    command.trained = noted
    for repository, system, version in CLONES:
        if args.systems and system not in args.systems.split(","):
            continue
        outcomes, reasons = Counter(), Counter()
        with tempfile.TemporaryDirectory() as tmp:
            root = Path(tmp) / "tree"
            root.mkdir()
            for i, name in enumerate(files_of(clone(args.clones, repository), system, root)):
                outcome, why = outcome_of(system, version, root / name, Path(tmp) / f"out{i}")
                outcomes[outcome] += 1
                every[f"{repository}:{name}"] = {"outcome": outcome, "why": why}
                if outcome not in ("full", "partial"):
                    reasons[outcome, NUMBERS.sub("_", why[0] if why else "")[:150]] += 1
        results[repository] = {"files": sum(outcomes.values()), **outcomes, "reasons": [[*k, n] for k, n in reasons.most_common(args.most)]}
    names = ("files", "full", "partial", "refused", "unreadable", "wrong", "trace")
    for repository, row in results.items():
        print(repository, *(f"{n:4} {outcome}: {why}" for outcome, why, n in row["reasons"]), sep="\n    ")
    table(["clone", *names], [[r, *(row.get(n, 0) for n in names)] for r, row in results.items()])
    print({n: sum(row.get(n, 0) for row in results.values()) for n in names})
    if args.since:
        results["families"] = families(paths, args.since)
        print(results["families"])
    if args.keep:
        args.keep.write_text(json.dumps(every, indent=1))
    if not args.systems:
        record("migrate_survey", results)
    return int(any(row.get("trace") or row.get("wrong") for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
