"""The options of ours that a key of another system stands for, derived from the tables of the migration.

`config.unknown_option` asks here when a name is not an option. No hand-written list of names: a key is migrated by
itself, beside what it needs, and the options that follow from it are the counterpart.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

from jaxrl.migrate.source import Setting, Source, Unreadable
from jaxrl.migrate.systems import SYSTEMS, table_of
from jaxrl.migrate.table import MISSING, Key, Migration, Since, Table

MOST = 12  # keys that are migrated to look up one name


class Counterpart(NamedTuple):
    """A key of another system that resembles a name. system: its title. whole: the name is the key, or one of the two
    is the last parts of the other, two or more. options: the jaxrl options that follow from the key, the nearest first.
    kind, why: of the key's row (table.Key)."""

    system: str
    key: str
    whole: bool
    options: tuple[str, ...]
    kind: str
    why: str


@cache
def counterparts(name: str) -> tuple[Counterpart, ...]:
    """Returns keys of other systems that are called `name`, or whose last parts are its last ones: at most MOST, the
    nearest first, () for none.

    Case, hyphens and underscores do not count; patterns and the tables of further jobs (`trl/sft`) are not searched.
    Imports the tables of all systems (half a second, no jax)."""
    asked = _parts(name)
    ranks = ((_rank(asked, parts), i) for i, (_, _, _, parts) in enumerate(_keys()))
    rows = []
    for (of_other, _), i in sorted((rank, i) for rank, i in ranks if rank)[:MOST]:
        table, key, own, _ = _keys()[i]
        rows.append(Counterpart(table.title, own, not of_other, options_of(table.name, key.name), key.kind, key.why))
    votes = Counter(option for row in rows for option in row.options[:1])

    def distance(row: Counterpart):
        votes_of = votes[row.options[0]] if row.options else 0
        return not row.whole, not row.options, "critic" in row.key, -votes_of

    return tuple(sorted(rows, key=distance))


@cache
def _keys() -> list[tuple[Table, Key, str, list[str]]]:
    """Returns (table, key, name of it, parts of the name) of every key of all systems that is no pattern."""
    return [(table, key, own, _parts(own)) for table in map(table_of, SYSTEMS) for key in table.keys()
            for own in key.names() if "*" not in own]


@cache
def options_of(system: str, name: str) -> tuple[str, ...]:
    """Returns the jaxrl options that follow from a key of a system's main table, the nearest first: those that take its
    value as it is; else those that change with it, of a name or a switch also those that are set because of it.

    A row that sets an option by itself has that one. A key of a joint rule is migrated with and without its `sample`,
    at the last version and, if nothing follows there, at the first. () for other kinds than exact and equivalent,
    without a sample, and where the system refuses it. name: of a row of the table; StopIteration for another."""
    table = table_of(system)
    key = next(key for key in table.keys() if key.name == name)
    if key.kind not in ("exact", "equivalent") or key.to:
        return (key.to,) if key.to else ()
    value = sample(table, key)
    newest = _nearest(table, key, value, table.versions[-1])
    return newest or _nearest(table, key, value, table.versions[0])


def _nearest(table: Table, key: Key, value, version: str) -> tuple[str, ...]:
    if value is None:
        return ()
    before = _migrated(table, key.beside, version)
    after = _migrated(table, {**key.beside, key.name: value}, version)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    found = {}
    for option, (new, keys) in after.items():
        changed = option not in before or before[option][0] != new
        if key.name in keys:
            found[option] = (not _same(new, value), not changed, keys.index(key.name), len(keys))
        elif changed and key.other is None:  # a rule that names another key for it
            found[option] = (not _same(new, value), False, len(keys), len(keys))
    nearest = sorted(found, key=found.__getitem__)
    alike = slice(0, 2 if number else 1)  # of a number, what did not change with it is left out, too
    return tuple(option for option in nearest if found[option][alike] == found[nearest[0]][alike])


def _same(new, value) -> bool:
    """Whether an option has a key's value: itself, as the only entry, in other letters."""
    if isinstance(new, str) and isinstance(value, str):
        return new.lower() == value.lower()
    return type(new) is not bool and new in (value, (value,), tuple(value) if isinstance(value, list) else value)


def sample(table: Table, key: Key) -> Any:
    """Returns a legal value of a key: the row's `other`, else the other bool, twice a whole number above 0, half a
    float above 0, else the default itself. None where there is none."""
    if key.other is not None:
        return key.other
    default = key.default.at(table.versions, table.versions[-1]) if isinstance(key.default, Since) else key.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float) and default > 0:
        return default / 2 if isinstance(default, float) else default * 2
    return None if default is MISSING else default


def _migrated(table: Table, settings, version: str) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Returns option -> (value, keys that it follows from)."""
    rows = {name: Setting(name, value, "") for name, value in {**table.required, **settings}.items()}
    try:
        return Migration(table, Source(rows, [], ""), version).run().options
    except Unreadable:  # of a default that the source refuses, too
        return {}


def _parts(name: str) -> list[str]:
    return name.lower().replace("-", "").replace("_", "").split(".")


def _rank(asked: list[str], own: list[str]) -> tuple[int, int] | None:
    """Returns (0, parts apart) of the key itself and of a common end of two parts or more that is all of one of them;
    (1, parts apart) of a common last part; None without."""
    shared = 0
    while shared < min(len(asked), len(own)) and asked[-1 - shared] == own[-1 - shared]:
        shared += 1
    whole = asked == own or shared > 1 and shared in (len(asked), len(own))
    return (int(not whole), len(asked) + len(own) - 2 * shared) if shared else None
