"""Reading rows: JSONL, JSON, CSV, Parquet, and data sets in the Hugging Face formats.

Every reader gives a sequence of (row as a plain dict, the place it came from): "file:line"; Parquet and HF data sets
have no lines, there it is the 1-based row. A row that cannot be read goes to `BadRows`, which stops or counts as
`data.bad_rows` says.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa

from jaxrl.data.dataset import Tables
from jaxrl.errors import ConfigError, type_of

log = logging.getLogger(__name__)
EMBEDDED = Path(__file__).parent / "embedded"
GIVEN = "given://"  # begins the name of what a caller holds in memory
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
EXPECTED = "expected rows, a list of dicts or a datasets.Dataset"


class DataError(ConfigError):
    """Data that cannot be used. The message names the file and line, or the option, and the remedy."""


def resolve(path: str) -> str:
    """The path a data file or tokenizer folder really has.

    'jaxrl://x' means the file x that ships inside the package. A path that exists as written wins, everything else
    (hub ids, gs:// and s3:// URLs, files that are missing) comes back unchanged.
    """
    if not path.startswith("jaxrl://") or Path(path).exists():
        return path
    found = (EMBEDDED / path[len("jaxrl://"):]).resolve()
    if not found.is_relative_to(EMBEDDED.resolve()) or not found.exists():
        shipped = sorted(str(p.relative_to(EMBEDDED)) for p in EMBEDDED.glob("*/*") if not p.name.startswith("_"))
        raise DataError(f"{path}: no such file in the package; shipped: {', '.join(shipped) or 'nothing'}")
    return str(found)


def offline_if_unreachable() -> bool:
    """Puts the hub's libraries into offline mode if its host cannot even be resolved; True if so.

    They then use their cache, or fail at once, instead of retrying for most of a minute per file. Nothing is changed
    behind a proxy, which resolves names itself.
    """
    import huggingface_hub.constants
    if any(os.environ.get(n) or os.environ.get(n.upper()) for n in ("https_proxy", "http_proxy", "all_proxy")):
        return False
    host = urlparse(huggingface_hub.constants.ENDPOINT)
    try:
        socket.getaddrinfo(host.hostname, host.port or 443)
        return False
    except OSError as e:
        import datasets
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            log.warning("%s cannot be reached (%s): only what is in its local cache can be loaded", host.hostname, e)
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return True


class BadRows:
    """Collects rows that cannot be used. mode 'error': `add` raises DataError; 'skip': it counts.

    `messages` holds the first `KEEP` texts, `count` all of them.
    """

    KEEP = 100

    def __init__(self, mode: str):
        self.mode, self.count, self.messages = mode, 0, []

    def add(self, where: str, problem: str) -> None:
        message = f"{where}: {problem}"
        if self.mode == "error":
            raise DataError(f"{message} (data.bad_rows='skip' leaves such rows out and counts them)")
        self.count += 1
        if len(self.messages) < self.KEEP:
            self.messages.append(message)


class ArrowTable:
    """(row, place) pairs of an Arrow table (Parquet, HF data sets), made of Python values only when they are asked for.

    Values without a JSON form (dates, decimals) become text. Binary columns (images, audio) are left out. Arrow gives
    every struct of a column all keys that any of them has, null where a row never had it: see `_of_arrow`.
    """

    def __init__(self, table: pa.Table, name: str, commits=()):
        self.commits = commits
        _check_columns(table.schema, name)
        binary = [f.name for f in table.schema if _holds_binary(f.type)]
        if binary:
            log.warning("%s: binary columns are left out: %s", name, ", ".join(binary))
        self._table, self._name = table.drop_columns(binary), name

    def __len__(self) -> int:
        return self._table.num_rows

    def digest(self, into) -> None:
        """Adds all that the rows say, and their place, to a hash."""
        into.update(json.dumps([self._name, list(self.commits)]).encode())
        with pa.ipc.new_stream(pa.PythonFile(_Hashed(into), "w"), self._table.schema) as stream:
            stream.write_table(self._table)

    def __getitem__(self, i: int) -> tuple[dict[str, Any], str]:
        row = {f.name: _of_arrow(self._table.column(f.name)[i].as_py(), f.type) for f in self._table.schema}
        return row, f"{self._name}:{i + 1}"


class _Hashed(io.RawIOBase):
    """A file that keeps a hash of what is written to it."""

    def __init__(self, digest):
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self._digest.update(data)
        return len(data)


def _holds_binary(kind: pa.DataType) -> bool:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_binary(kind.field(i).type) for i in range(kind.num_fields))


def _plain(value):
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value)


def _check_columns(schema, name: str) -> None:
    """Raises DataError naming a column, or a key of a nested column, that is there twice."""
    def check(fields, path):
        names = [f.name for f in fields]
        for field in fields:
            if names.count(field.name) > 1:
                raise DataError(f"{name}: the column {path + field.name!r} is there {names.count(field.name)} times: "
                                "rename or drop one")
            kind = _stored_as(field.type)
            check([kind.field(i) for i in range(kind.num_fields)], f"{path}{field.name}.")
    check(list(schema), "")


def _stored_as(kind: pa.DataType) -> pa.DataType:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return _stored_as(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _of_arrow(value, kind: pa.DataType | None = None):
    """A value of an Arrow column as a JSON line would have it.

    Left out of a struct: keys whose value is null, since Arrow keeps no difference between null and a key that the row
    never had. Kept: `content` of a message (a struct with a `role`), and keys of Arrow's type null, which only a null
    that somebody wrote can make. Nulls of lists, of maps and of whole columns stay. kind None: not known.
    """
    kind = None if kind is None else _stored_as(kind)
    if isinstance(value, dict):
        kinds = {f.name: f.type for f in kind} if kind is not None and pa.types.is_struct(kind) else {}
        message = value.get("role") is not None
        return {str(k): _of_arrow(v, kinds.get(k)) for k, v in value.items() if v is not None
                or (message and k == "content") or (k in kinds and pa.types.is_null(kinds[k]))}
    if isinstance(value, list) and (kind is None or not pa.types.is_map(kind)):
        return [_of_arrow(v, getattr(kind, "value_type", None)) for v in value]
    return _plain(value)


def _unique(pairs: list) -> dict:
    """A JSON object's dict, for `object_pairs_hook`. Raises Doubled naming a key that is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise Doubled(f"the key {next(n for n in names if names.count(n) > 1)!r} is there more than once")
    return out


class Doubled(ValueError):
    """A JSON object that has a key twice."""


def read(paths, bad: BadRows, *, field: str, splits=("train",), subset: str = "", revision: str | None = None,
         limit: int = 0) -> Tables:
    """Reads several sources into one table, in order. `limit` > 0 keeps the first rows of the whole.

    `splits`, `subset` and `revision` apply to folders and hub ids. `field` names the option in messages.
    """
    parts, left = [], limit or sys.maxsize
    for path in (paths,) if isinstance(paths, str) else paths:
        if left <= 0:
            break
        part = _read_one(resolve(path), path, bad, field, splits, subset, revision, left)
        parts.append(part)
        left -= len(part)
    if left == (limit or sys.maxsize):
        why = "".join(f"\n  {m}" for m in bad.messages[:3])
        shown = paths if isinstance(paths, str) else ", ".join(paths)
        raise DataError(f"{field}={shown}: no rows that can be read; put at least one into it{why}")
    return Tables(parts)


def from_memory(rows, bad: BadRows, *, field: str, limit: int = 0) -> Tables:
    """Rows that a caller holds: an iterable of dicts, or a `datasets.Dataset`. `limit` > 0 keeps the first.

    Values without a JSON form become text. `field` names the argument; a row's place is "<field>[3]", from 0.
    """
    if hasattr(rows, "keys") or isinstance(rows, str | bytes):
        remedy = f"; give one of its splits: {', '.join(map(str, rows.keys()))}" if hasattr(rows, "keys") else ""
        raise DataError(f"{field} is {type_of(rows)}: {EXPECTED}{remedy}")
    if hasattr(rows, "with_format") and hasattr(rows, "__len__"):  # a datasets.Dataset; its binary columns are left out
        parts = [ArrowTable(rows.with_format("arrow")[:limit or len(rows)], field)]
    else:
        arrow = hasattr(rows, "with_format")  # a datasets.IterableDataset, whose rows come from Arrow
        try:
            values = ((row, f"{field}[{i}]") for i, row in enumerate(rows))
        except TypeError:
            raise DataError(f"{field} is {type_of(rows)}: {EXPECTED}") from None
        values = itertools.islice(values, limit or None)
        kinds = rows.features.arrow_schema if arrow and rows.features else ()
        kinds = {f.name: f.type for f in kinds}
        values = ((_streamed(row, kinds) if arrow else row, where) for row, where in values)
        parts = [_rows(((_held(row), where) for row, where in values), bad, sys.maxsize)]
    if not len(parts[0]):
        raise DataError(f"{field} holds no rows" + "".join(f"\n  {m}" for m in bad.messages[:3]))
    return Tables(parts)


def _streamed(row, kinds: dict):
    return {k: _of_arrow(v, kinds.get(k)) for k, v in row.items()}


def _held(row):
    try:
        return _plain(row) if isinstance(row, dict) else row
    except RecursionError as e:
        return Unreadable(_reason(e))


def check_path(path: str, field: str) -> None:
    """Raises DataError for what is plainly no source: a local file that is missing or of an unknown kind."""
    if path.startswith(GIVEN):
        raise DataError(f"{field}={path}: rows that a call from Python held; give them again,"
                        " jaxrl.train(..., data=, eval=), or name a file, a folder or a hub id")
    found = resolve(path)
    suffix, exists = Path(found).suffix.lower(), Path(found).exists()
    if "://" in found or Path(found).is_dir():
        return
    if exists and suffix not in SUFFIXES:
        raise DataError(f"{field}={path}: unknown kind of file {suffix!r}; known: {', '.join(SUFFIXES)}")
    if not exists and (suffix in SUFFIXES or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", found)):
        raise DataError(f"{field}={path}: no such file or folder (relative to {Path.cwd()}); check the path")


def _read_one(path, shown, bad, field, splits, subset, revision, limit):
    check_path(shown, field)
    suffix, local = Path(path).suffix.lower(), Path(path)
    if "://" in path and suffix not in SUFFIXES:
        raise DataError(f"{field}={shown}: unknown kind of file {suffix!r}; known: {', '.join(SUFFIXES)}")
    if "://" not in path and not (suffix in SUFFIXES and local.is_file()):
        return _read_hf(path, shown, field, splits, subset, revision, limit)
    with _open(path, field) as f:
        if suffix == ".parquet":
            return ArrowTable(_parquet(f, shown).slice(0, limit), shown)
        reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}[suffix]
        return _rows(reader(f, shown), bad, limit)


def _open(path: str, field: str):
    if "://" not in path:
        try:
            return open(path, "rb")
        except OSError as e:
            raise DataError(f"{field}={path}: cannot be opened: {e.strerror}; check its permissions") from None
    import fsspec
    try:
        return fsspec.open(path, "rb").open()
    except ImportError as e:
        raise DataError(f"{field}={path}: {e}") from None
    except (OSError, ValueError) as e:
        raise DataError(f"{field}={path}: cannot be opened: {e}") from None


def _parquet(f, shown: str) -> pa.Table:
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(f)
        _check_columns(file.schema_arrow, shown)
        return file.read()
    except (pa.ArrowException, OSError) as e:
        raise DataError(f"{shown}: cannot be read as Parquet: {e}") from None


# Of a file's kind: generators of (row, place); what cannot be read is Unreadable in the row's place.


def _jsonl(f, shown: str):
    for number, line in enumerate(f, 1):  # bytes: only \n ends a line, whatever else Unicode calls a line break
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_unique)
            except Doubled as e:
                row = Unreadable(str(e))
            except (ValueError, RecursionError) as e:  # bytes that are no UTF-8, no JSON, a number without end
                row = Unreadable(f"not JSON: {_reason(e)}")
            yield row, f"{shown}:{number}"


def _json(f, shown: str):
    """A list of objects, an object that holds one such list, or JSON lines under another name."""
    data = f.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{shown}: not UTF-8: {e}") from None
    start = re.match(r"\s*", text).end()
    if text[start:start + 1] == "[":
        return _json_list(text, start + 1, shown)
    if text[start:start + 1] != "{":
        raise DataError(f"{shown}:1: expected a JSON list of objects")
    try:
        whole = json.loads(text, object_pairs_hook=_unique)
    except Doubled as e:
        try:
            json.loads(text)
        except ValueError:
            return _jsonl(io.BytesIO(data), shown)
        raise DataError(f"{shown}:1: {e}") from None
    except (ValueError, RecursionError) as e:
        further = re.search(r"\n\s*\{", text[text.index("}"):] if "}" in text else "")
        if isinstance(e, json.JSONDecodeError) or further:
            return _jsonl(io.BytesIO(data), shown)
        raise DataError(f"{shown}:1: cannot be read: {_reason(e)}") from None
    lists = [k for k, v in whole.items() if isinstance(v, list) and v and isinstance(v[0], dict)]
    rows, name = (whole[lists[0]], f":{lists[0]}") if len(lists) == 1 else ([whole], "")
    return ((row, f"{shown}{name}[{i}]") for i, row in enumerate(rows))


def _json_list(text: str, at: int, shown: str):
    """Yields (element, "file:line") of the list that opens before `at`."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    skip, line, counted = re.compile(r"[\s,]*"), 1, 0
    while True:
        at = skip.match(text, at).end()
        line, counted = line + text.count("\n", counted, at), at
        if text[at:at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as e:
            raise DataError(f"{shown}:{e.lineno}: not JSON: {e.msg}; nothing after it can be read") from None
        except RecursionError as e:
            raise DataError(f"{shown}:{line}: not JSON: {_reason(e)}; nothing after it can be read") from None
        except ValueError as e:  # a number without end: read over it, so that the rows after it can be had
            # or over an object that has a key twice
            _, at = json.JSONDecoder(parse_int=str).raw_decode(text, at)
            value = Unreadable(_reason(e))
        yield value, f"{shown}:{line}"


class Unreadable(str):
    """In a row's place: what is wrong with it."""


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    endless = "integer string conversion" in str(error)
    return f"an integer of more than {sys.get_int_max_str_digits()} digits" if endless else str(error)


def _rows(values, bad: BadRows, limit: int) -> list:
    rows = []
    for value, where in values:
        if isinstance(value, dict):
            rows.append((value, where))
        else:
            what = f"a row must be a JSON object, not {type(value).__name__}"
            bad.add(where, str(value) if isinstance(value, Unreadable) else what)
        if len(rows) >= limit:
            break
    return rows


def _csv(f, shown: str):
    csv.field_size_limit(2**31 - 1)
    # What is not UTF-8 becomes surrogates, so that reading can go on behind it.
    reader = csv.DictReader(io.TextIOWrapper(f, "utf-8-sig", "surrogateescape", newline=""), strict=True)
    try:
        header = reader.fieldnames or []  # reads the first line
    except csv.Error as e:
        raise DataError(f"{shown}:1: not CSV: {e}") from None
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in "".join(header)):
        raise DataError(f"{shown}:1: not UTF-8; is it a text file?")
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise DataError(f"{shown}:1: the column {doubled!r} is there {header.count(doubled)} times: rename or drop one")
    while True:
        where = f"{shown}:{reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as e:
            yield Unreadable(f"not CSV: {e}"), where
            continue
        if row is None:
            return
        if None in row or None in row.values():
            found = len(header) + len(row.get(None, ())) - list(row.values()).count(None)
            yield Unreadable(f"{found} fields, but the header has {len(header)}"), where
            continue
        text = "".join(row.values())
        wrong = any("\ud800" <= c <= "\udfff" for c in text)
        yield Unreadable("not UTF-8") if wrong else row, where if "\n" in text else f"{shown}:{reader.line_num}"


def _read_hf(path, shown, field, splits, subset, revision, limit) -> Tables:
    """A `save_to_disk` folder, a folder of data files, or a hub id, through `datasets`."""
    import datasets
    local = Path(path)
    if not local.is_dir():
        offline_if_unreachable()
    parts = []
    for split in (splits,) if isinstance(splits, str) else splits:
        try:
            if local.is_dir() and any((local / n).is_file() for n in ("state.json", "dataset_dict.json")):
                loaded = datasets.load_from_disk(path)
            else:
                loaded = datasets.load_dataset(path, subset or None, split=split, revision=revision)
        except Exception as e:  # the library raises many kinds; each one means "this source cannot be read"
            remedy = "check the path, data.subset and the split" if local.is_dir() else (
                "no such file or folder here, and as a hub id it cannot be loaded: check the name, data.subset, "
                "the split, data.revision and the network")
            raise DataError(f"{field}={shown} (split {split}): {remedy}: {type(e).__name__}: {e}") from None
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise DataError(f"{field}={shown}: no split {split!r}; it has {', '.join(loaded)}")
            loaded = loaded[split]
        name = f"{shown}[{split}]" if len(splits) > 1 or split != "train" else shown
        table = loaded.with_format("arrow")[:]
        sources = " ".join(map(str, loaded.info.download_checksums or ()))  # hf://datasets/NAME@COMMIT/FILE
        parts.append(ArrowTable(table.slice(0, limit), name, re.findall(r"@([0-9a-f]{40})/", sources)))
        limit -= len(parts[-1])
    return Tables(parts)
