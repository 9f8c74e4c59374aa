"""What a system's table consists of, and its application to a source. How to write one: jaxrl/migrate/__init__.py."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.config.option import BOUNDS, not_chosen
from jaxrl.config.schema import element_kind, free_tables, options
from jaxrl.errors import ConfigError
from jaxrl.migrate.idle import take_out_idle
from jaxrl.migrate.jobs import Job, job_of, pattern_of
from jaxrl.migrate.source import UNDECIDED, Setting, Source, Unreadable, override_value, scalar, switch

KINDS = ("exact", "equivalent", "automatic", "inert", "unsupported", "ask", "unknown")
ANYBODYS = re.compile(r"kwargs$|(^|_)envs?(_(?!manager)|$)|(^|_)environment|overrides?$|labels$")  # anybody's keys
NEEDED = 'said under "Needs you"'
MISSING = object()  # a key without which the source does not run


@dataclass(frozen=True)
class Since:
    """A default that depends on the version: pairs (first version with the value, value), oldest first."""

    pairs: tuple[tuple[str, Any], ...]

    def __init__(self, *pairs):
        object.__setattr__(self, "pairs", pairs)

    def at(self, versions: tuple[str, ...], version: str) -> Any:
        value = self.pairs[0][1]
        for first, later in self.pairs:
            if versions.index(first) <= versions.index(version):
                value = later
        return value


@dataclass(frozen=True)
class Key:
    """One key of the source, a row of its table. name: dotted; `*` stands for one part, `**` at the end for all further
    ones. also: its names in other versions. kind: one of KINDS but unknown. to: the jaxrl option that a row outside of
    a Joint sets, "" = none. by: value -> value of that option, None = the same. default: the source's, a Since where it
    changed; MISSING: the source does not run without it. why: for the report. fine: of unsupported and ask keys, values
    that ask for nothing, as null, empty text, an ask key's [] and {}, an unsupported key's default do. refuse: whether
    an unsupported key's other values refuse the job. other, beside: for tests, another legal value, its settings."""

    name: str
    kind: str = "exact"
    to: str = ""
    by: Callable[[Any], Any] | None = None
    default: Any = None
    also: tuple[str, ...] = ()
    why: str = ""
    fine: tuple = ()
    refuse: bool = False
    other: Any = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)


@dataclass(frozen=True)
class Joint:
    """Keys that have one meaning together. title: the rule's. by(m) reads them from the Migration m, sets options."""

    title: str
    keys: tuple[Key, ...]
    by: Callable[[Migration], None]


@dataclass(frozen=True)
class Table:
    """How configs of a system, or of one of its further jobs, are translated. job: of such a job, its name behind
    SYSTEM/ (jobs.py). versions: oldest first, the last is assumed. command: pattern of the command, in a script, that
    starts a job. rules: in the order in which they run. jobs: those of another kind. prefixes: tried before a key that
    has no row, as in excerpts of the documentation. differs: known differences whatever the keys say. required:
    settings without which the source does not run, each with a legal value, to look at one key by itself
    (counterparts.py). resolvers: name -> function behind ${name:a,b}."""

    name: str
    title: str
    versions: tuple[str, ...]
    command: str
    rules: tuple[Key | Joint, ...]
    jobs: tuple[Job, ...] = ()
    prefixes: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    resolvers: Mapping[str, Callable] = field(default_factory=dict)
    flags: bool = False  # whether a command's --name value are keys
    groups: tuple[str, ...] = ()  # hydra's groups of configs: `engine=megatron` beside `engine.a=1`
    own_configs: str = ""  # pattern of names of its own files, whose values are the defaults here
    config_words: str = ""  # pattern of a command's words that name files of keys, the file as its first group
    required: Mapping[str, Any] = field(default_factory=dict)
    calls: Any = None  # python_files.Calls: what a program in Python is read for
    job: str = ""

    def keys(self) -> list[Key]:
        return [key for rule in self.rules for key in (rule.keys if isinstance(rule, Joint) else (rule,))]

    @cached_property
    def owners(self) -> tuple[dict[str, str], list[tuple[re.Pattern, str]]]:
        """Returns ({name of a key without `*`: its row's name}, [(pattern of a name with `*`, its row's name)])."""
        names = [(n, key.name) for key in self.keys() for n in key.names()]
        exact = {n: own for n, own in names if "*" not in n}
        return exact, [(re.compile(pattern_of(n)), own) for n, own in names if "*" in n]


class Record(NamedTuple):
    """What became of a key of the source. kind: one of KINDS. targets: option -> value set by it. note: the reason."""

    key: str
    value: Any
    where: str
    kind: str
    targets: dict[str, Any]
    note: str


class Migration:
    """The application of a table to a source; of a job of another kind, that job's table. Rules read keys (m["a.b"],
    given, all, integer, number, flag, text, choice, list), say what follows (set, mark, lacks, needs, differs), and may
    change options ({option: (value, keys)}), facts (of the report), files (name -> text, beside the config), made,
    replaced, image_tokens, trained_on, elsewhere (see below). gpus: 0 = unknown. Raises Unreadable for a version before
    that table's, and for two names of a key with two values."""

    def __init__(self, table: Table, source: Source, version: str, gpus: int = 0, name: str = "job"):
        self.told, self.job = job_of(table.jobs, source) or ("", None)  # another job than the table's: what says so
        base, table = table, self.job.reader() if self.job and self.job.table else table
        if version in base.versions and base.versions.index(version) < base.versions.index(table.versions[0]):
            what = f"{version}: of {table.title} {table.job} is read from {table.versions[0]} on"
            raise Unreadable("--from-version", "", what)
        self.version = version if version in table.versions else table.versions[-1]
        self.name, self.table, self.gpus = name, table, gpus
        self.notes, self.command = list(source.notes), source.command
        self.image_tokens = 0  # of a prompt, that a plan is made for
        self.trained_on = 0  # GPUs of the policy, where a rule says it
        self.refused = bool(self.job and not self.job.table)  # whole, as a job of another kind
        self.elsewhere = False  # whether the engine has hosts of its own, whose servers you name
        self.unknown: list[tuple[Setting, str]] = []  # with what the report says of it
        self.owned: dict[str, list[Setting]] = {}  # name in the table -> what the source sets
        self.options: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self.marks: dict[str, tuple[str, str]] = {}
        self.lacking: list[tuple[str, str, bool]] = []
        self.needs_you: list[str] = list(source.asked)
        self.different: list[str] = list(table.differs)
        self.files: dict[str, str] = {}
        self.made: list[str] = []  # files that one of these writes, when it is run
        self.facts: dict[str, Any] = {}
        self.replaced: set[str] = set()  # keys whose default is gone, as the source replaces their table whole
        self._known = {key.name: key for key in table.keys()}
        self.singles = source.settings  # keys of the source, which patterns took together
        self.variables: list[Setting] = []  # no keys of the system: other values of the source refer to them
        self.computed: list[Record] = []  # of keys whose values the source computes
        self._assign(source.settings, source.referred)
        self._ask_computed(source.computed)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _assign(self, settings, referred):
        table = self.table
        exact, wild = self.table.owners
        carried = [n for n, own in exact.items() if self._known[own].kind in ("exact", "equivalent")]
        names = names_of(self.table.name)
        tables = names.tables | {n.split(".")[0] for n in exact}
        tops = {n for n in carried if "." not in n}  # in a table they are misplaced, if no version has them there
        for s in settings.values():
            owner, name = "", s.key
            for name in (s.key, *(p + s.key for p in self.table.prefixes)):
                owner = exact.get(name) or next((own for pattern, own in wild if pattern.fullmatch(name)), "")
                if owner:
                    break
            above, _, leaf = s.key.rpartition(".")
            if owner and (name in exact or names.has(name, loose=not (above and leaf in tops))):
                self.owned.setdefault(owner, []).append(s)
                continue
            homes = [n for n in (*carried, *exact, *names.keys) if n.rpartition(".")[2] == leaf and "*" not in n]
            row = self._known[owner] if owner else None
            passes = row and row.kind in ("automatic", "inert")
            if not row and "." in s.key and s.key.split(".")[0] not in tables:  # of a table that it knows nothing of
                homes = [n for n in homes if "." not in n]
            if row and not passes and not (homes and row.kind == "unsupported" and not row.refuse):
                self.owned.setdefault(owner, []).append(s)
            elif self._is_variable(s.key, referred) and not (homes and "." in s.key and s.key.split(".")[0] in tables):
                self.variables.append(s)
            elif not row and s.key in names.keys:
                self.unknown.append((s, f"of {table.title}, but not read for this job"))
            elif homes:
                home = max(homes, key=lambda n: (_shared(n, s.key), not n.startswith("critic.")))
                home = home if "." in home else "the top level"
                self.unknown.append((s, f"unknown here; {leaf} belongs at {home}"))
            else:
                near = difflib.get_close_matches(s.key, list(exact), n=1, cutoff=0.5)
                if row:
                    near = difflib.get_close_matches(leaf, names.leaves, n=1, cutoff=0.6)
                    near = [s.key.removesuffix(leaf) + n for n in near]
                self.unknown.append((s, f"no such key; the nearest is {near[0]}" if near else "no such key"))
        for name, found in self.owned.items():
            if any(type(value) is bool for value in (self.default(name), *self._known[name].fine)):
                found[:] = [s._replace(value=s.value != "" and switch(s.value)) for s in found]
            carried = self._known[name].kind in ("exact", "equivalent") and "*" not in name
            if carried:
                found.sort(key=lambda s: s.value is not None)  # null under a name of another version says nothing
            if carried and any(s.value != found[-1].value for s in found if s.value is not None):
                raise Unreadable(
                    found[-1].where,
                    found[-1].key,
                    f"is {found[0].key} of another version, which is set at {found[0].where}: set one of them",
                )

    def _ask_computed(self, computed):
        """Asks for values that a program computes, unless none would change anything here."""
        exact, wild = self.table.owners
        texts = []
        for s, text in computed:
            owner = exact.get(s.key) or next((own for pattern, own in wild if pattern.fullmatch(s.key)), "")
            row = self._known[owner] if owner and not s.key.endswith("**") else None
            kind, note = (row.kind, row.why) if row and row.kind in ("automatic", "inert", "ask") else ("ask", "")
            if kind == "ask":
                texts.append(f"{text.rpartition(': give')[0]}: {note}" if note else text)
            self.computed.append(Record(s.key, s.value, s.where, kind, {}, f"computed; {note or NEEDED}"))
        self.needs_you[:0] = texts

    @staticmethod
    def _is_variable(key: str, referred) -> bool:
        """Whether another value refers to a key, or to a table that it is in."""
        return key in referred or any(key.startswith(name + ".") for name in referred)

    def given(self, name: str) -> bool:
        """Whether the source sets the key, be it to null. name: of a row (a pattern too), or as the source has it."""
        return name in self.owned or name in self.singles

    def default(self, name: str):
        value = self._known[name].default if name in self._known else None
        return value.at(self.table.versions, self.version) if isinstance(value, Since) else value

    def __getitem__(self, name: str):
        """Returns the source's value (null too), or its default, None without a row. Raises Unreadable for MISSING."""
        if found := self.all(name):
            return found[-1].value
        value = self.default(name)
        if value is MISSING:
            raise Unreadable(self.table.name, name, "is not set, and the source has no default for it")
        return value

    def all(self, name: str) -> list[Setting]:
        """Returns the source's settings of a row, by its name or pattern, else of the key of this name; [] for none."""
        return self.owned.get(name) or ([self.singles[name]] if name in self.singles else [])

    def where(self, name: str) -> str:
        found = self.all(name)
        return found[-1].where if found else f"{self.table.title}'s default"

    def wrong(self, name: str, expected: str) -> Unreadable:
        """Returns (does not raise) the error for a key whose value is not what is `expected`."""
        value = self[name]
        return Unreadable(self.where(name), name, f"{_short(value)}: expected {expected}{self._unset(value)}")

    def _unset(self, value) -> str:
        """Returns what to give where a value is a variable that has none: itself, or what decides the branch that sets
        it."""
        unset = re.search(r"\$\{?(\w+)", value) if isinstance(value, str) else None
        if not unset:
            return ""
        if unset[1].isupper():
            return f"; the variable {unset[1]} is not set here: give {unset[1]}=VALUE"
        if not self.command:
            return f"; no key {unset[1]} is set: give {unset[1]}=VALUE"
        decides = next((note.rpartition(UNDECIDED)[2] for note in self.notes if UNDECIDED in note), "NAME=VALUE")
        return f"; the script sets {unset[1]} where it was not followed: give what decides there, {decides}"

    def integer(self, name: str) -> int | Any:
        """Returns a key as a whole number, of 2.0 and "2" too. None for null, at which a rule that needs one fails and
        `run` raises Unreadable; raises Unreadable for anything else."""
        value = self.number(name)
        if value is not None and value != int(value):
            raise self.wrong(name, "a whole number")
        return None if value is None else int(value)

    def number(self, name: str) -> float | Any:
        """Returns a key as a finite number, "1e-6" too; None for null, as `integer`. Raises Unreadable for others."""
        value = self[name]
        if value is None:
            return None
        value = scalar(value) if isinstance(value, str) else value  # "1e-6" in quotes
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.wrong(name, "a number")
        return value

    def flag(self, name: str) -> bool:
        """Returns a key as a bool, of "true", 0, 1 too; False for null and empty text. Raises Unreadable for anything
        else."""
        value = switch(self[name])
        if value in (None, ""):
            return False
        if not isinstance(value, bool) and value not in (0, 1):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """Returns a key as text, "2" of 2; "" for null. Raises Unreadable for a bool, list or table."""
        value = self[name]
        if isinstance(value, dict | list | bool):
            raise self.wrong(name, "text")
        return "" if value is None else str(value)

    def choice(self, name: str, table: Mapping[str, Any]):
        """Returns table[text of the key]. Other text is recorded as not carried over, and gives None."""
        value = self.text(name)
        if value in table:
            return table[value]
        self.lacks(name, f"{value!r} is none of {', '.join(k for k in table if k)}")
        return None

    def list(self, name: str) -> list:
        value = self[name]
        if isinstance(value, str) and value[:1] == "[" and value[-1:] == "]":  # a list in quotes
            value = override_value(value)
        return value if isinstance(value, list) else [] if value in (None, "") else [value]

    # -- saying --------------------------------------------------------------------------------------------------------

    def set(self, option: str, value, *keys: str) -> None:
        """Sets an option because of the source's `keys`, which add to earlier ones. Raises Unreadable for a value that
        contradicts another rule's, and for None where the option may not be None."""
        if value is None and option in OPTIONS() and OPTIONS()[option].default is not None:
            key = next((k for k in keys if self.given(k)), keys[0] if keys else "")
            raise Unreadable(self.where(key), key, "null: jaxrl needs a value here")
        if option in self.options and self.options[option][0] != value:
            before = self.options[option]
            raise Unreadable(
                self.where(keys[0]) if keys else self.table.name,
                keys[0] if keys else "",
                f"{option}={value!r}, and {before[0]!r} by {', '.join(before[1])}: they contradict each other",
            )
        self.options[option] = (value, tuple(dict.fromkeys((*self.options.get(option, (0, ()))[1], *keys))))

    def set_again(self, option: str, value) -> None:
        """Replaces the value of an option that a rule has set; it keeps its keys (none if it was unset)."""
        self.options[option] = (value, self.options.get(option, (None, ()))[1])

    def mark(self, key: str, kind: str, why: str) -> None:
        """Records a kind and reason for a key, in place of those of its row. kind: one of KINDS."""
        self.marks[key] = (kind, why)

    def lacks(self, key: str, why: str, refuse: bool = False) -> None:
        """Records a key whose value is not carried over. refuse: whether that refuses the job as being another one."""
        self.marks[key] = ("unsupported", why)
        self.lacking.append((key, why, refuse))

    def needs(self, text: str) -> None:
        if text not in self.needs_you:
            self.needs_you.append(text)

    def differs(self, text: str) -> None:
        if text not in self.different:
            self.different.append(text)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> Migration:
        """Runs the rules (none if m.refused), checks the options, returns self. Raises Unreadable if either fails."""
        if self.job:
            self.facts["job"] = self.job.what
        if self.refused and self.job:
            what = f"{self.job.what} is not carried over" + f"; {self.job.ours} does it" * bool(self.job.ours)
            self.lacking.append((self.told, what, True))
            self.different, self.unknown = [], []
            return self
        for rule in self.table.rules:
            keys = rule.keys if isinstance(rule, Joint) else (rule,)
            try:
                rule.by(self) if isinstance(rule, Joint) else self._single(rule)
            except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as e:
                if isinstance(e, Unreadable):
                    raise
                keys = keys or self.table.keys()  # of a rule about what others have set
                name = next((k.name for k in keys if self.given(k.name)), keys[0].name)
                given = self.all(name)
                value = self[name] if "*" not in name else given[-1].value if given else None
                why = f"{_short(value)} cannot be what it should be ({e})"
                raise Unreadable(self.where(name), name, why + self._unset(value)) from None
        self._check()
        return self

    def _single(self, key: Key) -> None:
        settings = self.all(key.name)
        said = False  # of a whole table the first key speaks for all
        if key.kind == "unsupported":
            for s in settings:
                empty = None if self.default(key.name) or True in key.fine else ""  # a switch that is off, or no text
                if s.value not in (*key.fine, None, empty) and s.value != self.default(key.name):
                    said or self.lacking.append((s.key, f"{_short(s.value)}: {key.why}", key.refuse))
                    self.marks[s.key] = ("unsupported", key.why)
                    said = key.name.endswith("**")
                else:
                    self.marks[s.key] = ("inert", "asks for nothing: " + key.why)
        elif key.kind == "ask" and settings:
            for s in settings:
                if s.value in (*key.fine, None, "", [], {}):
                    self.marks.setdefault(s.key, ("inert", "asks for nothing: " + key.why))
                elif not said:
                    self.needs(f"{s.key}={_short(s.value)}: {key.why}")
                    said = key.name.endswith("**")
        elif key.to:
            value = self[key.name] if key.default is not MISSING or settings else None
            if value is not None:
                self.set(key.to, key.by(value) if key.by else value, key.name)

    def _check(self):
        """Gives every option its kind, and looks at choices and bounds."""
        if self.options.get("algorithm.policy_loss", ("clip",))[0] not in ("clip", None):  # which alone has one
            if self.options.get("algorithm.dual_clip", (1,))[0] == 0:
                del self.options["algorithm.dual_clip"]
        take_out_idle(self)
        remat, of = self.options.get("model.remat", ("auto", ()))
        if self.options.get("mesh.roles.policy", ({},))[0].get("rest") == "streamed" and remat == "none":
            self.options["model.remat"] = ("full", of)
            why = "as their weights are on the host between uses"
            self.differs(f"layers are computed again in the backward pass (model.remat=full), {why}")
        for option, (value, keys) in self.options.items():
            name = next((k for k in keys if self.given(k)), keys[0] if keys else "")
            try:
                self.options[option] = (fitting(option, value), keys)
            except (ConfigError, TypeError, ValueError) as e:
                given = f"{_short(self[name])}: " if name and "*" not in name else ""
                unset = self._unset(self[name]) if given else ""
                raise Unreadable(self.where(name), name, f"{given}{e}{unset}") from None

    def ask_data(self) -> Migration:
        """Asks to name the rows (data.path) if no rule has set or asked for them; not if m.refused. Returns self."""
        named = any(o == "data.path" or o.startswith("data.sources.") for o in self.options)
        if not named and not self.refused and not any("data.path" in text for text in self.needs_you):
            self.needs("data.path: the file names no data set: name your rows")
        return self

    def ask_version(self) -> Migration:
        """Asks for --from-version if the source has keys that the assumed version does not have. Returns self."""
        versions, names = self.table.versions, names_of(self.table.name)
        strangers: dict[tuple[str, str], list[str]] = {}
        place = lambda v: versions.index(v) if v in versions else len(versions) - 1  # noqa: E731
        for s in (s for found in self.owned.values() for s in found):
            span = names.keys.get(s.key)
            if span and not place(span[0]) <= place(self.version) <= place(span[1]):
                strangers.setdefault(span, []).append(s.key)
        if strangers:
            first, last = max(strangers, key=lambda span: len(strangers[span]))
            keys = strangers[first, last]
            what = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            of = first if first == last else f"{first} to {last}"
            self.needs(
                f"version: {what}: of {self.table.title} {of}, and the defaults here are those of {self.version}; if "
                f"the file is older, give --from-version={last}"
            )
        return self

    # -- results -------------------------------------------------------------------------------------------------------

    def written(self) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """Returns {option: (value, keys)} of the config: what the source sets, and defaults that are not jaxrl's."""
        known = OPTIONS()
        return {
            option: (value, keys)
            for option, (value, keys) in self.options.items()
            if any(self.given(k) for k in keys) or option not in known or known[option].default != value
        }

    def records(self) -> list[Record]:
        """Returns a record per key of the source, computed ones too, by key; if m.refused all are unsupported."""
        if self.refused:
            note = {key: why for key, why, _ in self.lacking}
            rows = sorted(self.singles.values(), key=lambda s: s.key)
            return [Record(s.key, s.value, s.where, "unsupported", {}, note.get(s.key, "of that job")) for s in rows]
        written, out = self.written(), []
        for name, settings in self.owned.items():
            key = self._known[name]
            for s in settings:
                targets = {o: v for o, (v, keys) in written.items() if name in keys or s.key in keys}
                kind, note = self.marks.get(s.key) or self.marks.get(name) or (key.kind, key.why)
                if kind in ("exact", "equivalent") and not targets:
                    asked = any(re.search(rf"(?<![\w.]){re.escape(s.key)}(?![\w.])", text) for text in self.needs_you)
                    changes = ("inert", "no effect in this config")
                    kind, note = ("ask", NEEDED) if asked else changes
                out.append(Record(s.key, s.value, s.where, kind, targets, note))
        out += [Record(s.key, s.value, s.where, "unknown", {}, note) for s, note in self.unknown]
        named = "a variable of the file, used where it is named"
        out += [Record(s.key, s.value, s.where, "automatic", {}, named) for s in self.variables]
        return sorted([*out, *self.computed], key=lambda r: r.key)

    def outcome(self, strict: bool) -> str:
        """Returns "refused", "partial" (keys are not carried over, unknown or asked for) or "full". strict: "refused"
        in place of "partial"."""
        if any(refuse for _, _, refuse in self.lacking):
            return "refused"
        partial = bool(self.lacking or self.unknown or self.needs_you)
        return ("refused" if strict else "partial") if partial else "full"


class Names(NamedTuple):
    """The keys of a system's config classes and example files, over the versions that are read. keys: dotted name ->
    (first, last) version that has it, None for all. tables: first parts of these. parents: their tables. patterns: of
    those with `*`. loose: last parts of names whose table is not known."""

    keys: dict[str, tuple[str, str] | None]
    tables: frozenset[str]
    parents: frozenset[str]
    patterns: tuple[re.Pattern, ...]
    loose: frozenset[str]

    @property
    def leaves(self) -> frozenset[str]:
        return self.loose.union(n.rpartition(".")[2] for n in self.keys)

    def has(self, key: str, loose: bool = True) -> bool:
        """Whether some version has the key or a table of its name, or its table takes keys of any name (numbers,
        ANYBODYS, patterns). loose: or has its last part in a table that is not known."""
        *above, leaf = key.split(".")
        return (
            key in self.keys
            or key in self.parents
            or loose
            and leaf in self.loose
            or leaf.isdigit()
            or any(map(ANYBODYS.search, above))
            or any(pattern.fullmatch(key) for pattern in self.patterns)
        )


@cache
def names_of(system: str) -> Names:
    """Returns the names in names/SYSTEM.txt: lines `a.b`, `a.b FIRST..LAST`, or `*.b` where b's table is not known."""
    keys: dict[str, tuple[str, str] | None] = {}
    loose = []
    for line in (Path(__file__).parent / "names" / f"{system}.txt").read_text("utf-8").splitlines():
        name, _, versions = line.partition(" ")
        if name.startswith("*."):
            loose.append(name[2:])
        else:
            first, _, last = versions.partition("..")
            keys[name] = (first, last) if last else None
    parents = {name[:i] for name in keys for i, c in enumerate(name) if c == "."}
    patterns = tuple(re.compile(pattern_of(name)) for name in keys if "*" in name)
    tables = frozenset(name.partition(".")[0] for name in keys)
    return Names(keys, tables, frozenset(parents), patterns, frozenset(loose))


def _shared(a: str, b: str) -> int:
    """Tables that two dotted names have in common, from the first on."""
    return len(os.path.commonprefix([a.split(".")[:-1], b.split(".")[:-1]]))


def _short(value) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


OPTIONS = cache(options)
FREE = cache(free_tables)


def fitting(option: str, value):
    """Returns a value as the option's kind has it: 1e3 as 1000, 1 as 1.0, "true" as a bool, a number as text, one entry
    as a tuple. None and values of free tables stay. Raises ConfigError for an unknown option, another kind, choice or
    bound (an infinite number is no whole one), ValueError for an entry that is no number."""
    opt = OPTIONS().get(option)
    if opt is None and not any(option.startswith(t + ".") for t in FREE()):
        raise ConfigError(f"there is no option {option}")
    if opt is None or value is None:
        return value
    kind = opt.kind or type(opt.default)
    if isinstance(opt.default, tuple):
        entry = element_kind(option)
        values = value if isinstance(value, list | tuple) else (value,)
        value = tuple(entry(v) if type(v) in (int, float, str) and entry is not int else v for v in values)
        if any(not isinstance(v, entry) for v in value):
            raise ConfigError(f"{option}={value!r}: every entry must be of kind {entry.__name__}")
    elif kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    elif kind is float and type(value) is int:
        value = float(value)
    elif kind is bool:
        value = switch(value)
    elif kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        raise ConfigError(f"{option}: expected {'a number' if kind in (int, float) else kind.__name__}")
    if option == "data.epochs" and isinstance(value, int) and value < 1:
        raise ConfigError(f"{option}={value}: expected at least 1; in the source no row is trained, 0 is no limit here")
    if wrong := not_chosen(opt, value):
        raise ConfigError(f"{option}={value!r}: {wrong}")
    if opt.bound and not BOUNDS[opt.bound][0](value):
        raise ConfigError(f"{option}={value!r} {BOUNDS[opt.bound][1]}")
    return value
