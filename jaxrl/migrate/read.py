"""A config file of any kind as settings."""

from __future__ import annotations

import re
from pathlib import Path

from jaxrl.migrate import shell
from jaxrl.migrate.python_files import read_python, rows_changed_by
from jaxrl.migrate.source import Setting, Source, Unreadable, interpolate, leaves, merge, override, scalar
from jaxrl.migrate.table import Table, names_of
from jaxrl.migrate.yaml_files import YamlReader, read_toml

_NAME = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.S)
NOT_FOUND = (  # of a config that a command names
    "names this config, and it was not found: put it beside the script, or migrate in the checkout; until then the "
    "source's defaults stand for its keys"
)
OWN = re.compile(r"hydra(\.|$)|defaults$|_target_$|.*\._target_$")  # hydra's and OmegaConf's own keys


def read(table: Table, path: Path, overrides: list[str], gpus: int = 0) -> Source:
    """Returns the settings of a file and of the overrides after it, interpolated, without hydra's own keys (OWN).

    Args:
      path: YAML or JSON, TOML, a script (its ending .sh, .bash, .slurm, .sbatch or none), or, where the table reads
        programs, Python (.py) or a notebook (.ipynb).
      overrides: `key=value`, which win over the file, and `--key` where the table has flags; NAME=value in capitals
        gives a variable of the script, program or environment a value.
      gpus: devices of the job, for programs that count them; 0 = not known.

    Raises Unreadable for no such file, another ending, a file without keys (a script: without a command that has keys
    of the system), a word that is no override, and what the readers cannot read; OSError for a program that cannot be
    opened."""
    notes: list[str] = []
    environment = {m[1]: m[2] for o in overrides if (m := _NAME.fullmatch(o))}
    settings: dict[str, Setting] = {}
    command, asked, computed = "", [], []
    if not path.is_file():
        raise Unreadable(str(path), "", "no such file")
    if path.suffix in (".yaml", ".yml", ".json"):
        merge(settings, YamlReader(notes).file(path))
    elif path.suffix == ".toml":
        merge(settings, read_toml(path))
    elif path.suffix in (".py", ".ipynb") and table.calls:
        command, found, computed, asked = read_python(path, table.calls, environment, gpus)
        merge(settings, found, table.groups)
    elif path.suffix in (".sh", ".bash", ".slurm", ".sbatch", ""):
        command, found = _script(table, path, environment, notes)
        merge(settings, found, table.groups)
        asked = _program_of(path, command) if table.calls else []
    else:
        page = f"docs/guides/from_{table.name}.md"
        python = f"a program in Python is not read: {page} says what becomes of it, and what to write down as a config"
        expected = "expected a script (.sh), YAML (.yaml) or TOML (.toml)"
        raise Unreadable(path.name, "", python if path.suffix in (".py", ".ipynb") else f"{expected}; see {page}")
    asked = [*(text for text in notes if text.endswith(NOT_FOUND)), *asked]  # nothing weighs more
    notes[:] = (text for text in notes if not text.endswith(NOT_FOUND))
    for text in overrides:
        if _NAME.fullmatch(text):
            continue
        new = override(text, "the command line") or (_flag(text) if table.flags else [])
        if not new:
            raise Unreadable("the command line", text[:80], "expected key=value")
        merge(settings, new, table.groups)
    if not settings and (asked or computed):
        raise Unreadable(path.name, "", asked[0] if asked else computed[0][1])
    if not settings:
        raise Unreadable(path.name, "", f"holds no key of {table.title}")
    referred: set[str] = set()
    try:
        settings = interpolate(settings, dict(table.resolvers), environment, referred)
    except (ValueError, RecursionError) as e:
        raise e if isinstance(e, Unreadable) else Unreadable(path.name, "", str(e)) from None
    flat: dict[str, Setting] = {}
    for s in settings.values():  # a key that named a table
        merge(flat, [x for x in leaves(s.key, s.value, s.where)], table.groups)
    asked = [text for text in asked if text.partition("=")[0] not in flat]
    computed = tuple(pair for pair in computed if pair[0].key not in flat)
    return Source({k: s for k, s in flat.items() if not OWN.match(k)}, notes, command, tuple(asked),
                  frozenset(referred), computed)


def _flag(text: str) -> list[Setting]:
    found = re.fullmatch(r"--([A-Za-z][\w.-]*)", text)
    return [Setting(found[1].replace("-", "_"), True, "the command line")] if found else []


def _script(table: Table, path: Path, environment, notes) -> tuple[str, list[Setting]]:
    """Returns (the command that starts the job, its settings): of those that fit the table's pattern, or of all, the
    one with most keys."""
    found = []
    for command in shell.commands(path, environment, notes):
        setting = re.compile(r"(?!--(config|nproc|nnodes))[\w.+~/-]+=")
        line = " ".join(text for text, _ in command.words if not setting.match(text))
        fits = bool(re.search(table.command, line))
        settings = _command(table, command, path, notes, fits)
        if settings:
            found.append((fits, len(settings), line, settings))
    if not found:
        raise Unreadable(path.name, "", f"no command with keys of {table.title} was found")
    best = max(found, key=lambda entry: entry[:2])
    others = sum(1 for entry in found if entry is not best and entry[0])
    if others:
        notes.append(f"{path.name}: {others} further commands that start jobs were left out")
    return best[2], best[3]


def _command(table: Table, command: shell.Command, path: Path, notes, fits: bool) -> list[Setting]:
    """Returns the settings of a command. fits: whether it is one of the system's, whose words without a dot are keys,
    too."""
    out: list[Setting] = []
    words = command.words
    folder, configs = "", []
    known = {name for key in table.keys() for name in key.names()}
    named_keys = known.union(names_of(table.name).keys)
    i = 0
    while i < len(words):
        text, line = words[i]
        where = f"{command.file}:{line}"
        named = re.fullmatch(r"--(config[-_]path|config[-_]name|config_file|config)(?:=(.*))?", text, re.S)
        if named:
            value = named[2]
            if value is None:
                i += 1
                value = words[i][0] if i < len(words) else ""
            if named[1] in ("config-path", "config_path"):
                folder = value
            else:
                configs.append(value)
        elif table.flags and (flag := re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", text, re.S)):
            values = [flag[2]] if flag[2] is not None else []
            while flag[2] is None and i + 1 < len(words) and _value(words[i + 1][0]):
                i += 1
                values.append(words[i][0])
            value = [scalar(v) for v in values]
            name = flag[1].replace("-", "_")
            off = name.removeprefix("no_")
            if not value and name != off and name not in named_keys and off in named_keys:  # of a flag that is on
                out.append(Setting(off, False, where))
            else:
                out.append(Setting(name, True if not value else value[0] if len(value) == 1 else value, where))
        elif table.config_words and (file := re.fullmatch(table.config_words, text)):
            configs.append(file[1])
            out += override(text, where)
        elif not text.startswith("--"):
            mine = fits and not _NAME.fullmatch(text)
            out += [s for s in override(text, where) if "." in s.key or len(out) or mine or s.key in known]
        i += 1
    named = [s for config in configs for s in _named_config(path, folder, config, notes, table.own_configs)]
    return [*named, *out]


def _value(word: str) -> bool:
    """Whether a word behind a flag is its value: not a further flag, not the script that is started."""
    return not re.match(r"-+[A-Za-z]", word) and not word.endswith(".py")


def _named_config(path: Path, folder: str, config: str, notes, own: str) -> list[Setting]:
    """Returns the config that a command names, where it lies beside the script. own: pattern of the system's own."""
    name = config if config.endswith((".yaml", ".yml", ".toml", ".json")) else f"{config}.yaml"
    if place := _beside(path, folder, name):
        return read_toml(place) if place.suffix == ".toml" else YamlReader(notes).file(place)
    defaults = "its values are the defaults here, as those of the version are"
    known = own and re.fullmatch(own, Path(name).stem)
    text = f"{path.name}: {config} is the system's: {defaults}" if known else f"{config}: {path.name} {NOT_FOUND}"
    notes.append(text)
    return []


def _program_of(path: Path, command: str) -> list[str]:
    """Returns what is asked of the program in Python that a command starts, where it lies beside the script."""
    places = (_beside(path, "", word) for word in command.split() if word.endswith(".py"))
    return [text for place in places if place for text in rows_changed_by(place)]


def _beside(path: Path, folder: str, name: str) -> Path | None:
    """Returns the file that a script names, in its folder or one above. folder: that the name is in."""
    above = (place / name for place in path.resolve().parents)
    near = (path.parent / folder / name, path.parent / Path(folder).name / name, path.parent / Path(name).name)
    return next((place for place in (*near, *above) if "$" not in str(place) and place.is_file()), None)
