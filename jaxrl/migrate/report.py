"""What a migration leaves behind: the config file, the report in Markdown and JSON, stubs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl.config.load import redacted_tree
from jaxrl.config.schema import free_tables, options
from jaxrl.migrate.secret_values import take_out
from jaxrl.migrate.source import Literal, Unreadable
from jaxrl.migrate.table import KINDS, MISSING, Migration

MARK = "# made by jaxrl.migrate, unchanged: "
BESIDE = "# made beside it, unchanged: "  # in a config, a line for each file of m.files: digest and name
# Of what a run imports, beside the standard library.
MODULES = (
    *("jaxrl", "jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "scipy", "ml_collections", "ml_dtypes"),
    *("absl", "transformers", "tokenizers", "huggingface_hub", "safetensors", "datasets", "pyarrow", "tensorboardx"),
    *("vllm", "torch", "yaml", "jinja2", "fsspec"),
)
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")


def shown(value: Any, most: int = 100) -> str:
    """Returns a value of the source as one line of ASCII: texts as they are where they can be, true, false, null; cut
    at `most` characters."""
    if isinstance(value, str) and value.isascii() and value.isprintable():
        text = value
    elif isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    else:
        text = ascii(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def hidden(key: str, value: Any) -> Any:
    """Returns a value of the source with "<redacted>" for secrets: for all of it where the key's last part names one
    (null, bools and empty texts stay), else for those in its texts."""
    leaf = key.rsplit(".", 1)[-1]
    return redacted_tree({leaf: value})[leaf]


def config_text(m: Migration, title: str, began: Mapping[str, str] | None = None) -> str:
    """Returns the text of the config file: the written options in the schema's order, the key and value they come from
    beside each. Its first line has the digest by which `write` finds edits, its last ones those of the files of
    m.files.

    Args:
      title: first line of the file's docstring.
      began: file -> digest of the text that a migration wrote there, where that is not the text in m.files; "" = not
        known, without a line."""
    written, order = m.written(), list(options())
    place = {name: i for i, name in enumerate(order)}
    lines, group, used = [], "", set()
    for option in sorted(written, key=lambda o: (place.get(o, place.get(_table(o), len(order))), o)):
        value, keys = written[option]
        if option.split(".")[0] != group:
            group = option.split(".")[0]
            lines.append("")
        text, helpers = literal(option, value, (*m.files, *m.made))
        used |= helpers
        target = "c." + option
        for table in free_tables():
            if option.startswith(table + "."):
                target = f"c.{table}[{option[len(table) + 1 :]!r}]"
        lines.append(f"    {target} = {text}  # {because(m, keys)}")
    helper = [line for name in sorted(used) for line in ("", "", *HELPERS[name])]
    digests = {file: _digest(text) for file, text in sorted(m.files.items())} | dict(began or {})
    beside = [f"{BESIDE}{digest} {file}" for file, digest in digests.items() if digest]
    body = "\n".join(
        [
            f'"""{title}',
            "",
            "report.md says what became of every key of the source.",
            '"""',
            "",
            *(["import os", ""] if used else []),
            "import jaxrl",
            *helper,
            "",
            "",
            "def get_config(arg):",
            "    c = jaxrl.default_config()",
            *lines,
            "",
            "    return c",
            *(["", "", *beside] if beside else []),
            "",
        ]
    )
    return f"{MARK}{_digest(body)}\n{body}"


def _table(option: str) -> str:
    """Returns the free table that an option lies in, or ""."""
    return next((t for t in free_tables() if option.startswith(t + ".")), "")


def _digest(body: str) -> str:
    return _digest_of(body.encode())


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


HELPERS = {  # functions of a config file, where it needs them
    "beside": (
        "def beside(text):",
        '    """A file of this folder."""',
        "    return os.path.join(os.path.dirname(os.path.abspath(__file__)), text)",
    ),
    "here": (
        "def here(text):",
        '    """The text with variables of this machine filled in."""',
        "    return os.path.expandvars(text)",
    ),
}


def literal(option: str, value: Any, files: Iterable[str] = ()) -> tuple[str, set[str]]:
    """Returns (a value as Python text, the names of the HELPERS that it calls). files: those that are written into the
    config's folder, now or by a file there; `./FILE` of these, ~/ at the start and variables such as $HOME are filled
    in when the config is loaded, but none in a Literal."""
    if isinstance(value, Literal):
        return repr(value), set()
    if isinstance(value, str):
        if value.startswith("./") and value[2:].partition(":")[0] in files:
            return f"beside({value[2:]!r})", {"beside"}
        name, _, file = value.partition("=")
        if option == "eval.sets" and file.startswith("./") and file[2:] in files:
            return f"{name + '='!r} + beside({file[2:]!r})", {"beside"}
        path = value.replace("=~/", "=$HOME/", 1) if option == "eval.sets" else value
        path = "$HOME/" + path[2:] if path.startswith("~/") else path
        return (f"here({path!r})", {"here"}) if _VARIABLE.search(path) else (repr(value), set())
    if isinstance(value, list | tuple):
        parts = [literal(option, v, files) for v in value]
        inner = ", ".join(p for p, _ in parts)
        opening, closing = ("(", ",)" if len(parts) == 1 else ")") if isinstance(value, tuple) else "[]"
        return f"{opening}{inner}{closing}", set().union(*(used for _, used in parts))
    if isinstance(value, dict):
        parts = [(repr(k), *literal(option, v, files)) for k, v in value.items()]
        return "{" + ", ".join(f"{k}: {v}" for k, v, _ in parts) + "}", set().union(*(used for *_, used in parts))
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})", set()
    return repr(value), set()


def because(m: Migration, keys: tuple[str, ...]) -> str:
    """Returns the reason of an option as text, at most 160 characters: the first three of `keys` that the source sets,
    with their values, secrets hidden. Where it sets none: that their values are the source's defaults, that their table
    is replaced whole, or --gpus. Without keys, what says the job, or the default."""
    parts = []
    for key in keys:
        if m.given(key):
            parts += [f"{s.key}={shown(hidden(s.key, s.value), 60)}" for s in m.all(key)[:3]]
        elif "*" in key or any(m.given(k) for k in keys):
            continue
        elif key in m.replaced:
            parts.append(f"{key} is not set, and its table is replaced whole")
        elif m.default(key) is MISSING:
            parts.append(f"{key} by --gpus={m.gpus}")
        else:
            parts.append(f"{key}={shown(m.default(key), 60)} is {m.table.title}'s default")
    text = ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else "")
    of_job = f"{m.told}: {m.job.what}" if m.job and not keys else ""
    return text[:157] + "..." if len(text) > 160 else text or of_job or f"{m.table.title}'s default"


def report(m: Migration, name: str, file: str, outcome: str, out: Path) -> dict:
    """Returns the report as a JSON-able dict, secrets hidden: the outcome, every key of the source with what became of
    it, and commands.

    Args:
      name: of the config, without .py. file: the source. out: folder of the config; the commands name it as given.
      outcome: a word; "refused" = no config is written, and there are no commands."""
    target = f"h100:{m.trained_on or m.gpus or 8}"  # a plan is of the policy's devices
    run = f"python -m jaxrl.main --config={shlex.quote(str(out / name) + '.py')}{without(m)}"
    written = m.written()
    refused = outcome == "refused"
    data = {
        "system": m.table.name,
        "job": m.table.job,
        "version": m.version,
        "file": file,
        "outcome": outcome,
        "config": "" if refused else f"{name}.py",
        "gpus": m.gpus,
        "facts": m.facts,
        "keys": [
            {
                "key": r.key,
                "value": hidden(r.key, r.value),
                "where": r.where,
                "kind": r.kind,
                "targets": list(r.targets),
                "values": list(r.targets.values()),
                "note": r.note,
            }
            for r in m.records()
        ],
        "defaults_written": {
            o: {"value": v, "from": because(m, keys)}
            for o, (v, keys) in written.items()
            if not any(m.given(k) for k in keys)
        },
        "lacks": [{"key": key, "why": why, "refused": refuse} for key, why, refuse in m.lacking],
        "differs": m.different,
        "needs_you": m.needs_you,
        "notes": m.notes,
        "packages": packages(m),
        "files": sorted(m.files),
        "commands": {}
        if refused
        else {"run": run}
        if m.options.get("run.recipe", ("rl", ()))[0] not in ("rl", "sft")
        else {  # plans do not count distillation
            "run": run,
            "plan": f"{run} --config.run.mode=plan --config.plan.target={target}{left_out(m)}",
        },
    }
    return redacted_tree(data, prose=True)


def without(m: Migration) -> str:
    """Returns the flags of a command that switch off what this installation has no package for: wandb, where the config
    logs to it; "" = none."""
    logs = m.options.get("log.wandb", (False,))[0] and importlib.util.find_spec("wandb") is None
    return " --config.log.wandb=false" if logs else ""


def packages(m: Migration) -> list[str]:
    """Returns packages beyond a plain install that a run of the config imports, and how to do without, a text each:
    wandb, or []."""
    if m.options.get("log.wandb", (False,))[0]:
        return ["wandb, by log.wandb=True: pip install 'jaxrl[wandb]', or --config.log.wandb=false; a plan needs none"]
    return []


def left_out(m: Migration) -> str:
    """Returns the flags that a plan needs beside the run's, "" for none: those that leave out what it does not count
    (an engine on hosts or devices of its own, a reward model, roles that rest on the host), and plan.image_tokens. Of a
    job with adapters it plans the full training."""
    roles = {o.removeprefix("mesh.roles."): v for o, (v, _) in m.options.items() if o.startswith("mesh.roles.")}
    kept = {r: v for r, v in roles.items()
            if r == "policy" or r == "sampler" and set(v) <= {"rest"} or v == {"rest": "streamed"}}
    apart = "devices" in roles.get("sampler", ())  # the plan's devices are the policy's, and the sampler has others
    flags = ["plan.part=training"] if m.elsewhere or apart else []
    flags += [f"plan.image_tokens={m.image_tokens}"] if m.image_tokens else []
    if m.options.get("reward.model.path", ("",))[0]:
        flags += ["reward.model.path=", "reward.functions=math"]
    if kept != roles:
        flags.append(f'mesh.roles="{kept}"')
    return "".join(f" --config.{flag}" for flag in flags)


HEADINGS = {
    "exact": "Exact",
    "equivalent": "Equivalent",
    "automatic": "Automatic",
    "inert": "Inert",
    "unsupported": "Not supported",
    "ask": "Asked of you",
    "unknown": "Unknown",
}


def summary(data: dict) -> str:
    """Returns the outcome of a migration in one line: whether a config is written and, if so, the numbers of questions
    to the user, of what is not carried over, of unknown keys and of known differences.

    data: of `report`."""
    if data["outcome"] == "refused":
        return "No config is written: without what lacks it would be another job."
    unknown = sum(key["kind"] == "unknown" for key in data["keys"])
    counts = (
        (len(data["needs_you"]), "to be done by you"),
        (len(data["lacks"]), "not carried over"),
        (unknown, "unknown"),
    )
    parts = [f"{n} {what}" for n, what in counts if n]
    whole = "every key is carried over" if not parts else ", ".join(parts)
    return f"The config is written: {whole}; {len(data['differs'])} known differences."


def markdown(data: dict) -> str:
    """Returns the report as a Markdown page. data: of `report`."""
    out = [
        f"# {data['file']}: from {data['system']} {data['version']}",
        "",
        f"Outcome: **{data['outcome']}**. {summary(data)}",
        "",
    ]
    if data["facts"]:
        out += [
            "| what comes of the keys | |",
            "|---|---|",
            *(f"| {k} | {_cell(v)} |" for k, v in data["facts"].items()),
            "",
        ]
    if data["commands"]:
        out += ["```bash", *sorted(data["commands"].values(), key=len, reverse=True), "```", ""]
    for title, items in (
        ("Needs you", data["needs_you"]),
        ("Lacks", [f"`{e['key']}`: {e['why']}" for e in data["lacks"]]),
        ("Known differences", data["differs"]),
        ("Packages", data["packages"] if data["config"] else []),
        ("Not followed", data["notes"]),
    ):
        if items:
            out += [f"## {title}", "", *(f"- {_cell(i)}" for i in items), ""]
    for kind in KINDS:
        rows = [k for k in data["keys"] if k["kind"] == kind]
        if rows:
            out += [f"## {HEADINGS[kind]}", "", "| key | value | here | |", "|---|---|---|---|"]
            out += [
                f"| `{_cell(k['key'])}` | {_cell(shown(k['value'], 60))} | "
                + _cell(", ".join(f"{t}={shown(v, 60)}" for t, v in zip(k["targets"], k["values"], strict=True)))
                + f" | {_cell(k['note'])} |"
                for k in rows
            ]
            out.append("")
    if data["defaults_written"]:
        out += [
            "## Defaults written",
            "",
            "Keys that are not set, where the source's default is not jaxrl's.",
            "",
            "| here | from |",
            "|---|---|",
        ]
        out += [
            f"| {o}={_cell(shown(e['value'], 60))} | {_cell(e['from'])} |" for o, e in data["defaults_written"].items()
        ]
        out.append("")
    return "\n".join(out)


def _cell(value) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def name_of(file: str) -> str:
    """Returns a file's stem in lower case, with one `_` for each run of characters other than ASCII letters, digits and
    `_`, and none at the ends. `job_` stands before a name that begins with a digit or is a module's, as `python -m`
    finds what lies in the folder first; an empty one is `job`."""
    stem = re.sub(r"\W+", "_", Path(file).stem, flags=re.ASCII).strip("_").lower()
    free = stem and not stem[0].isdigit() and stem not in sys.stdlib_module_names and stem not in MODULES
    return stem if free else f"job_{stem}".rstrip("_")


def write(out: Path, m: Migration, file: str, strict: bool) -> dict:
    """Writes the config, the files of m.files, report.md and report.json into a folder, which is made, and returns the
    report. A refused job has the reports alone; an earlier config stays.

    A file of m.files that was edited since a migration wrote it, or that none wrote as far as the config says, stays as
    it is; the user is asked to look at it if that migration had another text for it, or an unknown one. Raises
    Unreadable, before it writes, for a config there that was edited since; OSError for a folder that cannot be written.
    strict: refuse in place of partial."""
    name = name_of(file)
    take_out(m)
    config = out / f"{name}.py"
    edited = _edited(out, config, m)
    if m.outcome(strict) != "refused":
        for path, began in edited.items():
            if began != _digest(m.files[path]):
                m.needs(
                    f"{path}: {out / path} was edited, or is of another job, and stays as it is; this job has another "
                    "text for it: delete it to get that, or name another folder with --out=DIR and compare"
                )
    outcome = m.outcome(strict)
    data = report(m, name, Path(file).name, outcome, out)
    title = f"{shown(Path(file).name)} of {m.table.title} {m.version}".replace("\\", "/").replace('"', "'")
    if outcome != "refused" and config.exists() and not _untouched(config):
        raise Unreadable(str(config), "", "exists and was edited; name another folder with --out=DIR")
    out.mkdir(parents=True, exist_ok=True)
    if outcome != "refused":
        config.write_text(config_text(m, title, edited), "utf-8")
        for path in m.files.keys() - edited.keys():
            (out / path).write_bytes(m.files[path].encode())
    plain = (
        json.dumps(data, indent=1, default=str, allow_nan=False)
        if _finite(data)
        else json.dumps(data, indent=1, default=str)
    )
    (out / "report.json").write_text(plain + "\n", "utf-8")
    (out / "report.md").write_text(markdown(data) + "\n", "utf-8")
    return data


def _edited(out: Path, config: Path, m: Migration) -> dict[str, str]:
    """Returns the files of m.files that are in the folder with a text that no migration wrote, as far as the config
    there says, nor this one would, each with the digest of the text that was written there, "" = not known."""
    text = config.read_text("utf-8", errors="replace") if config.is_file() else ""
    began = {name: digest for digest, name in re.findall(rf"^{re.escape(BESIDE)}(\w+) (.+)$", text, re.M)}
    found = {path: _digest_of((out / path).read_bytes()) for path in m.files if (out / path).exists()}
    return {path: began.get(path, "") for path, digest in found.items()
            if digest not in (_digest(m.files[path]), began.get(path))}


def _untouched(path: Path) -> bool:
    first, _, body = path.read_text("utf-8", errors="replace").partition("\n")
    return first == MARK + _digest(body)


def _finite(node) -> bool:
    if isinstance(node, dict):
        return all(map(_finite, node.values()))
    if isinstance(node, list | tuple):
        return all(map(_finite, node))
    return not isinstance(node, float) or abs(node) != float("inf") and node == node
