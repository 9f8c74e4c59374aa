"""Tables of a system's other jobs, made of its first one's rules: some of them, under other names where they stand
elsewhere in the file, and all that needs nothing here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from jaxrl.migrate.table import Joint, Key, Migration, Since, Table


def derived(base: Table, job: str, rules: Iterable[Key | Joint], **changes) -> Table:
    """Returns a table for another job of the base's system: these rules, and the base's automatic and inert keys, under
    the names that these rules do not have. changes: fields of Table; what they leave out is the base's, but `jobs` and
    `required` are empty."""
    rules = tuple(rules)
    return replace(base, job=job, jobs=(), rules=(*rules, *_passed(base, rules)), **{"required": {}, **changes})


def _passed(base: Table, rules) -> tuple[Key, ...]:
    own = {name for key in replace(base, rules=rules).keys() for name in key.names()}
    out = []
    for key in base.keys():
        names = [name for name in key.names() if name not in own]
        if key.kind in ("automatic", "inert") and names:
            out.append(Key(names[0], key.kind, why=key.why, also=tuple(names[1:])))
    return tuple(out)


def selected(base: Table, *names: str, without: Iterable[str] = ()) -> tuple[Key | Joint, ...]:
    """Returns the base's joint rules of these titles and its rows of these names, in the base's order. without: names
    of keys that the joint rules lose. Raises KeyError for a title or name that the base does not have."""
    found = {rule.title if isinstance(rule, Joint) else rule.name: rule for rule in base.rules}
    if unknown := set(names) - set(found):
        raise KeyError(f"{base.name}: {', '.join(sorted(unknown))}")
    out = (rule for name, rule in found.items() if name in names)
    return tuple(_without(rule, set(without)) for rule in out)


def _without(rule: Key | Joint, names: set[str]) -> Key | Joint:
    if not isinstance(rule, Joint) or not names:
        return rule
    return replace(rule, keys=tuple(k for k in rule.keys if k.name not in names))


def defaults(rules: Iterable[Key | Joint], values: Mapping) -> tuple[Key | Joint, ...]:
    """Returns the rules with other defaults of some keys. values: name of the key's row -> its default, a Since too."""

    def one(key: Key) -> Key:
        return replace(key, default=values[key.name]) if key.name in values else key

    return tuple(replace(r, keys=tuple(map(one, r.keys))) if isinstance(r, Joint) else one(r) for r in rules)


def from_version(rules: Iterable[Key | Joint], versions: tuple[str, ...], first: str) -> tuple[Key | Joint, ...]:
    """Returns the rules with the defaults that hold from version `first` on, for a table that begins there. versions:
    those of the table that has the rules."""
    later = versions[versions.index(first) + 1 :]

    def one(key: Key) -> Key:
        if not isinstance(key.default, Since):
            return key
        changes = ((v, value) for v, value in key.default.pairs if v in later)
        return replace(key, default=Since((first, key.default.at(versions, first)), *changes))

    return tuple(replace(r, keys=tuple(map(one, r.keys))) if isinstance(r, Joint) else one(r) for r in rules)


def renamed(rules: Iterable[Key | Joint], prefixes: Mapping[str, str]) -> tuple[Key | Joint, ...]:
    """Returns the rules with keys below other tables, {'actor_train.': 'sft_train.'}; the longest prefix counts. The
    functions of joint rules keep the old names: what they ask m for by a key, and set and say because of it, is that
    of its new name. m.singles, and the keys of the Settings that m.all returns, have the source's names."""

    def name(text: str) -> str:
        for old in sorted(prefixes, key=len, reverse=True):
            if text.startswith(old):
                return prefixes[old] + text.removeprefix(old)
        return text

    def row(key: Key) -> Key:
        return replace(
            key,
            name=name(key.name),
            also=tuple(map(name, key.also)),
            beside={name(k): v for k, v in key.beside.items()},
        )

    def joint(rule: Joint) -> Joint:
        return replace(rule, keys=tuple(map(row, rule.keys)), by=lambda m: rule.by(cast(Any, _Renamed(m, name))))

    return tuple(joint(rule) if isinstance(rule, Joint) else row(rule) for rule in rules)


def also(rules: Iterable[Key | Joint], prefixes: Mapping[str, str]) -> tuple[Key | Joint, ...]:
    """Returns the rules with further names of the keys below a table: {'actor.': 'model.'} of older versions."""

    def row(key: Key) -> Key:
        more = [new + n.removeprefix(old) for old, new in prefixes.items() for n in key.names() if n.startswith(old)]
        return replace(key, also=(*key.also, *more))

    return tuple(replace(r, keys=tuple(map(row, r.keys))) if isinstance(r, Joint) else row(r) for r in rules)


class _Renamed:
    """A Migration whose keys have other names: what a rule says of a key is said of the one of that place."""

    _m: Any
    _name: Any

    def __init__(self, m: Migration, name):
        object.__setattr__(self, "_m", m)
        object.__setattr__(self, "_name", name)

    def __getitem__(self, key: str):
        return self._m[self._name(key)]

    def __setattr__(self, name, value):
        setattr(self._m, name, value)

    def __getattr__(self, attribute: str):
        found = getattr(self._m, attribute)
        if not callable(found):
            return found
        if attribute == "set":
            return lambda option, value, *keys: found(option, value, *map(self._name, keys))
        return lambda first, *rest, **more: found(self._name(first), *rest, **more)
