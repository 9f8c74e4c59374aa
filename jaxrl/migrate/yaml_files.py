"""YAML and TOML files as settings: lines, numbers as OmegaConf reads them, hydra's defaults lists and packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import yaml

from jaxrl.migrate.source import DEEPEST, MOST, Setting, Unreadable, leaves, merge, scalar

MERGE = "tag:yaml.org,2002:merge"  # of the key `<<`
LARGEST = 4_000_000  # bytes of a file that is read


def text_of(path: Path) -> str:
    """Returns the text of a file in UTF-8, without a byte order mark. Raises Unreadable for one that cannot be read, is
    no UTF-8 or has more than LARGEST bytes."""
    try:
        if path.stat().st_size > LARGEST:
            raise Unreadable(path.name, "", f"larger than {LARGEST} bytes")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise Unreadable(path.name, "", f"not text in UTF-8 (byte {e.start})") from None
    except OSError as e:
        raise Unreadable(str(path), "", e.strerror or str(e)) from None


class _Entry(NamedTuple):
    """An entry of a defaults list. folder: that its files are looked for in. group: as it stands there. names: of the
    files, () for null. package: table above their keys, from the top. fixed: whether the entry says the package.
    override: whether it takes the place of another entry of its folder and package."""

    folder: Path
    group: str
    names: tuple[str, ...]
    package: str
    fixed: bool
    override: bool


class YamlReader:
    """Reads one YAML file and what its `defaults` list names, where that lies beside it or in the folder of the file
    that is read first. notes: this list gets the names that do not, and keys that stand twice with the same value."""

    def __init__(self, notes: list[str]):
        self.notes = notes
        self.root: Path | None = None  # folder of the first file, hydra's search path
        self.overridden: dict[tuple[Path, str], tuple[str, ...]] = {}  # (folder, package) -> names of an `override`
        self.replaced: set[tuple[Path, str]] = set()  # those of them that took an entry's place

    def file(self, path: Path, package: str = "", depth: int = 0, fixed: bool = False) -> list[Setting]:
        """Returns the settings of a file and of its `defaults` list, in their order; later ones win.

        Args:
          package: table above all keys, which `# @package` in the file replaces. fixed: unless it is fixed, by the
            entry that includes the file. depth: how many files include this one, at most DEEPEST.

        Raises Unreadable for a file that cannot be read, is too large or no UTF-8, for text that `text` does not read,
        and for files that include each other."""
        if depth > DEEPEST:
            raise Unreadable(path.name, "defaults", "files that include each other")
        self.root = self.root or path.parent
        text = text_of(path)
        found = re.search(r"^#\s*@package\s+(\S+)", text, re.M)
        if found and not fixed:
            package = "" if found[1] == "_global_" else found[1]
        own = [s._replace(key=f"{package}.{s.key}" if package else s.key) for s in self.text(text, path.name)]
        name = f"{package}.defaults" if package else "defaults"
        defaults = next((s for s in own if s.key == name), None)
        own = [s for s in own if s.key not in (name, *((f"{package}.hydra",) if package else ()))]
        if defaults is None or not isinstance(defaults.value, list):
            return own if defaults is None else [*own, defaults]
        before, after, me = [], [], False
        entries = [self._entry(path, entry, package, defaults.where) for entry in defaults.value if entry != "_self_"]
        for entry in entries:
            if entry and entry.override:  # that of the outermost file counts
                self.overridden.setdefault((entry.folder, entry.package), entry.names)
        of = iter(entries)
        for entry in defaults.value:
            if entry == "_self_":
                me = True
            elif found := next(of):
                (after if me else before).extend(self.include(found, defaults.where, depth))
        return [*before, *own, *after]

    def _entry(self, path: Path, entry, package: str, where: str) -> _Entry | None:
        """Returns what an entry of a defaults list names: name, group: name, group: [names], group@package: name, with
        `override` or `optional` before it. `_global_` begins a package at the top, `_here_` is that of the file,
        `_group_` the group's. None for hydra's own groups, and for what is no entry, which is noted."""
        group, names = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
        names = names if isinstance(names, list) else [] if names is None else [names]
        if not all(isinstance(n, str | int) and not isinstance(n, bool) for n in names):
            self.notes.append(f"{where}: {ascii(entry)[:80]} of the defaults list is not read")
            return None
        words, names = str(group).split(), tuple(map(str, names))
        group, at, target = "".join(words[-1:]).partition("@")
        if not words and names:  # a group in the name
            whole, at, target = names[0].partition("@")
            group, slash, name = whole.rpartition("/")
            group, names = group + slash * (not group), (name,)
        if re.match(r"/?hydra(/|$)", group or "".join(names)):
            return None
        own = group.strip("/").replace("/", ".")
        first, _, rest = (target if at else own).partition(".")
        above = {"_global_": "", "_here_": package, "_group_": f"{package}.{own}"}.get(first, f"{package}.{first}")
        inner = ".".join(p for p in f"{above}.{rest}".split(".") if p)
        folder = path.parent / group.strip("/")
        if group.startswith("/") and self.root and (self.root / group.strip("/")).is_dir():
            folder = self.root / group.strip("/")
        return _Entry(folder, group, names, inner, bool(at), "override" in words[:-1])

    def include(self, entry: _Entry, where: str, depth: int) -> list[Setting]:
        """Returns the settings of an entry of a defaults list. An `override` gives its files in the place of the entry
        that it overrides, or in its own where no entry is known that it does. A file that is not at hand is noted and
        gives none."""
        place = entry.folder, entry.package
        if entry.override and place in self.replaced:
            return []
        if place in self.overridden:
            self.replaced.add(place)
        out = []
        for name in self.overridden.get(place, entry.names):
            file = entry.folder / f"{name}.yaml"
            if file.is_file():
                out += self.file(file, entry.package, depth + 1, entry.fixed)
                continue
            shown = "/".join(p for p in (entry.group.rstrip("/"), name) if p)
            self.notes.append(f"{where}: {shown}.yaml of the defaults list is not at hand; the source's own defaults "
                              "stand for it")
        return out

    def text(self, text: str, name: str) -> list[Setting]:
        """Returns the settings of a YAML text, one per leaf, in its order; [] for an empty text. Of a table with
        `<<` its own keys win over those of the tables that this names, of these the first one's, which is noted. name:
        the file's, for places. Raises Unreadable for what is no YAML, no table, a `<<` that names no table, other tags
        than YAML's own, or a key twice in a table, unless with one and the same scalar."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as e:
            if isinstance(e, yaml.reader.ReaderError):
                line = text.count("\n", 0, e.position) + 1
                why = f"the character {chr(e.character)!r} cannot stand in YAML"
                raise Unreadable(f"{name}:{line}", "", why) from None
            mark = getattr(e, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            raise Unreadable(f"{name}{line}", "", f"{getattr(e, 'problem', None) or 'no YAML'}") from None
        except (RecursionError, ValueError) as e:
            raise Unreadable(name, "", f"no YAML: {type(e).__name__}") from None
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise Unreadable(f"{name}:{node.start_mark.line + 1}", "", "a config is a table of keys")
        out: list[Setting] = []
        self._table(node, "", name, out, 0)
        return out

    def _table(self, node, prefix, name, out, depth):
        seen: dict[str, yaml.Node] = {}
        self._merge(node, name)
        for key_node, value in node.value:
            where = f"{name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise Unreadable(where, prefix, "a key that is no text")
            key = f"{prefix}.{key_node.value}" if prefix else key_node.value
            if key in seen and _same(seen[key], value):  # PyYAML lets it pass
                self.notes.append(f"{where}: {key} stands twice in one table, with the same value")
                continue
            if key in seen:
                raise Unreadable(where, key, "stands twice in one table, with two values")
            seen[key] = value
            if depth > DEEPEST or len(out) > MOST:
                raise Unreadable(where, key[:80], "nested too deeply, or too much")
            if isinstance(value, yaml.MappingNode) and value.value:
                self._table(value, key, name, out, depth + 1)
            else:
                out.append(Setting(key, self._value(value, key, where, 0), where))

    def _merge(self, node: yaml.MappingNode, name: str, depth: int = 0) -> None:
        """Replaces `<<` in a table, in place, by the keys that it gives: not those that the table has itself."""
        merges = [(k, v) for k, v in node.value if k.tag == MERGE]
        node.value = [(k, v) for k, v in node.value if k.tag != MERGE]
        found: dict[str, tuple] = {}
        for key, value in merges:  # several: the last one wins, as PyYAML has it
            where = f"{name}:{key.start_mark.line + 1}"
            tables = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if depth > DEEPEST or not all(isinstance(t, yaml.MappingNode) for t in tables):
                raise Unreadable(where, "<<", "names no table, or is nested too deeply")
            new: dict[str, tuple] = {}
            for table in tables:
                self._merge(table, name, depth + 1)
                for pair in table.value:
                    first = new.setdefault(str(pair[0].value), pair)
                    if first[1] is not pair[1] and not _same(first[1], pair[1]):
                        self.notes.append(f"{where}: {pair[0].value} stands in several tables of a `<<`; the first "
                                          "one's counts, as YAML has it (PyYAML 6.0.4 takes the last one's)")
            found |= new
        own = {str(k.value) for k, _ in node.value}
        node.value = [pair for key, pair in found.items() if key not in own] + node.value

    def _value(self, node, key, where, depth):
        if depth > DEEPEST:
            raise Unreadable(where, key, "nested too deeply")
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            raise Unreadable(where, key, f"the tag {node.tag} is not read")
        if isinstance(node, yaml.SequenceNode):
            if len(node.value) > MOST:
                raise Unreadable(where, key, "too long")
            return [self._value(v, key, where, depth + 1) for v in node.value]
        if isinstance(node, yaml.MappingNode):
            self._merge(node, where.partition(":")[0])
            return {str(k.value): self._value(v, key, where, depth + 1) for k, v in node.value}
        if node.style in ("'", '"', "|", ">") or node.tag.endswith(":str") and node.style:
            return node.value
        if node.tag.endswith(":bool"):
            return node.value.lower() in ("true", "yes", "on")
        if node.value == "":
            return None
        return scalar(node.value)


def _same(a: yaml.Node, b: yaml.Node) -> bool:
    return isinstance(a, yaml.ScalarNode) and isinstance(b, yaml.ScalarNode) and (a.tag, a.value) == (b.tag, b.value)


def read_toml(path: Path) -> list[Setting]:
    """Returns the settings of a TOML file, tables as dotted keys. A place has the line where a second look at the text
    finds the key, else the file alone. Raises Unreadable for a file that is no TOML or cannot be read."""
    text = text_of(path)
    try:
        tree = tomllib.loads(text)
    except ValueError as e:  # of its numbers, too
        line = re.search(r"line (\d+)", str(e))
        raise Unreadable(f"{path.name}:{line[1]}" if line else path.name, "", str(e)) from None
    except RecursionError:
        raise Unreadable(path.name, "", "nested too deeply") from None
    lines, table = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            table = re.sub(r"[\s\"']", "", header[1])
        elif key := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault(".".join(p for p in (table, re.sub(r"[\"']", "", key[1])) if p), number)
    out: dict[str, Setting] = {}
    merge(out, list(leaves("", tree, path.name)))
    return [s._replace(where=f"{path.name}:{lines[s.key]}" if s.key in lines else path.name) for s in out.values()]
