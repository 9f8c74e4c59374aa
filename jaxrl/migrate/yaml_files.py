"""YAML and TOML files as settings: lines, numbers as OmegaConf reads them, hydra's defaults lists and packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from jaxrl.migrate.source import DEEPEST, MOST, Setting, Unreadable, leaves, merge, scalar

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


class YamlReader:
    """Reads one YAML file and what its `defaults` list names, where that lies beside it. notes: this list gets the
    names that do not, and keys that stand twice with the same value."""

    def __init__(self, notes: list[str]):
        self.notes = notes

    def file(self, path: Path, package: str = "", depth: int = 0) -> list[Setting]:
        """Returns the settings of a file and of its `defaults` list, in their order; later ones win. package: table
        above all keys, which `# @package` in the file replaces. Raises Unreadable for text that is no YAML, and files
        that include each other."""
        if depth > DEEPEST:
            raise Unreadable(path.name, "defaults", "files that include each other")
        text = text_of(path)
        found = re.search(r"^#\s*@package\s+(\S+)", text, re.M)
        if found:
            package = "" if found[1] == "_global_" else found[1]
        own = [s._replace(key=f"{package}.{s.key}" if package else s.key) for s in self.text(text, path.name)]
        name = f"{package}.defaults" if package else "defaults"
        defaults = next((s for s in own if s.key == name), None)
        own = [s for s in own if s.key not in (name, *((f"{package}.hydra",) if package else ()))]
        if defaults is None or not isinstance(defaults.value, list):
            return own if defaults is None else [*own, defaults]
        before, after, me = [], [], False
        for entry in defaults.value:
            if entry == "_self_":
                me = True
            else:
                (after if me else before).extend(self.include(path, entry, package, defaults.where, depth))
        return [*before, *own, *after]

    def include(self, path: Path, entry, package: str, where: str, depth: int) -> list[Setting]:
        """Returns the settings of one entry of a defaults list: name, group: name, group@package: name; override and
        optional before it. A file that is not at hand is noted and gives []; hydra's own groups, null and
        what is no single name (a list) give [] without a note. @_global_ is read as @_here_: below `package`."""
        if isinstance(entry, dict) and len(entry) == 1:
            group, name = next(iter(entry.items()))
        else:
            group, name = "", entry
        if name is None or not isinstance(name, str | int):
            return []
        group = re.sub(r"^(override|optional)\s+", "", str(group)).strip()
        group, at, target = group.partition("@")
        if not at and not group:
            name, at, target = str(name).partition("@")
        if str(name).startswith("hydra") or group.startswith("hydra"):
            return []
        target = "" if target in ("_global_", "_here_") else target
        if at:
            inner = ".".join(p for p in (package, target) if p)
        else:
            inner = ".".join(p for p in (package, group.replace("/", ".")) if p)
        file = (
            path.parent / group / f"{name}.yaml"
            if not group.startswith("/")
            else path.parent / group[1:] / f"{name}.yaml"
        )
        if not file.is_file():
            self.notes.append(
                f"{where}: {group + '/' if group else ''}{name}.yaml of the defaults list is not at hand; the "
                "source's own defaults stand for it"
            )
            return []
        return self.file(file, inner, depth + 1)

    def text(self, text: str, name: str) -> list[Setting]:
        """Returns the settings of a YAML text, one per leaf, in its order; [] for an empty text. Those of a `<<` stand
        at its place, so that they win over keys before it. name: the file's, for places. Raises Unreadable for what is
        no YAML, no table, has other tags than YAML's own, or a key twice in a table, unless with one and the same
        scalar; TypeError for a `<<` of a list."""
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
        for key_node, value in node.value:
            where = f"{name}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise Unreadable(where, prefix, "a key that is no text")
            if key_node.value == "<<":
                self._table(value, prefix, name, out, depth + 1)
                continue
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
    except tomllib.TOMLDecodeError as e:
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
