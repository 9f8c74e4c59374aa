"""Reads rows: JSONL, JSON, CSV, Parquet, and data sets in the Hugging Face formats.

Every reader returns a sequence of (row as a plain dict, its place): "file:line", or the 1-based row for Parquet and
Hugging Face data sets, which have no lines. Rows that cannot be read go to `BadRows`, which raises or counts
according to `data.bad_rows`.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pyarrow as pa

from jaxrl.data.dataset import Tables
from jaxrl.errors import ConfigError, type_of

log = logging.getLogger(__name__)
EMBEDDED = Path(__file__).parent / "embedded"
IN_MEMORY = "given://"  # prefix of names that stand for objects passed from Python
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
EXPECTED = "expected rows, a list of dicts or a datasets.Dataset"


class DataError(ConfigError):
    """Data that cannot be used. The message names the file and line, or the option, and the remedy."""


def resolve(path: str) -> str:
    """Returns the real path of a data file or tokenizer folder.

    'jaxrl://x' is the file x shipped with the package; raises DataError if there is none. An existing path, a hub id, a
    gs:// or s3:// URL and a missing file are returned unchanged.
    """
    if not path.startswith("jaxrl://") or Path(path).exists():
        return path
    real = (EMBEDDED / path[len("jaxrl://"):]).resolve()
    if not real.is_relative_to(EMBEDDED.resolve()) or not real.exists():
        shipped = sorted(str(p.relative_to(EMBEDDED)) for p in EMBEDDED.glob("*/*") if not p.name.startswith("_"))
        raise DataError(f"{path}: no such file in the package; shipped: {', '.join(shipped) or 'nothing'}")
    return str(real)


def offline_if_unreachable() -> bool:
    """Switches the Hugging Face libraries to offline mode if the hub's host name cannot be resolved;
    returns whether it did.

    Offline, they use their cache or fail at once, instead of retrying for most of a minute per file. With a proxy
    nothing is changed, since the proxy resolves names.
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
            log.warning("%s cannot be reached (%s): only files in the local cache can be loaded", host.hostname, e)
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return True


class BadRows:
    """Collects rows that cannot be used. Mode 'error': `add` raises DataError; mode 'skip': it counts.

    Attributes:
      count: number of bad rows.
      messages: the first `KEEP` messages.
    """

    KEEP = 100

    def __init__(self, mode: str):
        self.mode, self.count, self.messages = mode, 0, []

    def add(self, where: str, problem: str) -> None:
        """Records a bad row at `where` ("file:line") for the reason `problem`. Raises DataError in mode 'error'."""
        message = f"{where}: {problem}"
        if self.mode == "error":
            raise DataError(f"{message} (data.bad_rows='skip' leaves such rows out and counts them)")
        self.count += 1
        if len(self.messages) < self.KEEP:
            self.messages.append(message)


class ArrowTable:
    """(row, place) pairs of an Arrow table (Parquet, Hugging Face data sets), converted to Python values on access.

    Values without a JSON form (dates, decimals) become text. Binary columns (images, audio) are dropped, except those
    of `keep`, whose bytes stay bytes. Arrow gives every struct of a column all keys that any of them has, with null for
    absent ones, so keys of structs whose value is null are dropped (`_from_arrow` names the exceptions).

    Args:
      table: the rows. name: of the file or data set.
      commits: hub commits of the rows. keep: names of columns that may be binary.
      in_memory: whether a row's place is "name[number]", counted from 0, as of rows that a caller passes; else it is
        "name:number", counted from 1.

    Raises DataError for a column, or a key of a nested one, that occurs twice.
    """

    def __init__(self, table: pa.Table, name: str, commits=(), keep=(), in_memory: bool = False):
        self.commits, self._in_memory = commits, in_memory
        _check_columns(table.schema, name)
        binary = [f.name for f in table.schema if _holds_binary(f.type) and f.name not in keep]
        if binary:
            log.warning("%s: binary columns are dropped: %s", name, ", ".join(binary))
        self._table, self._name = table.drop_columns(binary), name

    def __len__(self) -> int:
        return self._table.num_rows

    def digest(self, into) -> None:
        """Adds the rows' content, their file or data set, and their hub commits to a hash. into: a hashlib object."""
        into.update(json.dumps([self._name, list(self.commits)]).encode())
        with pa.ipc.new_stream(pa.PythonFile(_Hashed(into), "w"), self._table.schema) as stream:
            stream.write_table(self._table)

    def __getitem__(self, i: int) -> tuple[dict[str, Any], str]:
        row = {f.name: _from_arrow(self._table.column(f.name)[i].as_py(), f.type) for f in self._table.schema}
        return row, f"{self._name}[{i}]" if self._in_memory else f"{self._name}:{i + 1}"


class _Hashed(io.RawIOBase):
    """A file object that feeds what is written into a hash."""

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


def _plain(value, images: bool = False):
    """Returns a value as JSON has it; what it has no form of as text, except, with `images`, bytes, arrays and Pillow
    images."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v, images) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, images) for v in value]
    return value if images and (isinstance(value, bytes | np.ndarray) or hasattr(value, "getexif")) else str(value)


def _check_columns(schema, name: str) -> None:
    """Raises DataError naming a column, or a key of a nested column, that occurs twice."""
    def check(fields, path):
        names = [f.name for f in fields]
        for field in fields:
            if names.count(field.name) > 1:
                raise DataError(f"{name}: the column {path + field.name!r} occurs {names.count(field.name)} times: "
                                "rename or drop one")
            kind = _stored_as(field.type)
            check([kind.field(i) for i in range(kind.num_fields)], f"{path}{field.name}.")
    check(list(schema), "")


def _stored_as(kind: pa.DataType) -> pa.DataType:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return _stored_as(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _from_arrow(value, kind: pa.DataType | None = None):
    """Returns a value of an Arrow column as a JSON line would have it.

    Dropped from a struct: keys whose value is null, since Arrow does not distinguish null from an absent key. Kept:
    `content` of a message (a struct with a `role`), and keys of Arrow's type null, which only an explicit null
    creates. Nulls in lists, in maps and in whole columns stay. kind: the column's type, None if unknown.
    """
    kind = None if kind is None else _stored_as(kind)
    if isinstance(value, dict):
        kinds = {f.name: f.type for f in kind} if kind is not None and pa.types.is_struct(kind) else {}
        message = value.get("role") is not None
        return {str(k): _from_arrow(v, kinds.get(k)) for k, v in value.items() if v is not None
                or (message and k == "content") or (k in kinds and pa.types.is_null(kinds[k]))}
    if isinstance(value, list) and (kind is None or not pa.types.is_map(kind)):
        return [_from_arrow(v, getattr(kind, "value_type", None)) for v in value]
    return _plain(value, images=True)  # binary columns that are not images' were dropped


def _unique(pairs: list) -> dict:
    """Returns the dict of a JSON object (an `object_pairs_hook`). Raises DuplicateKey naming a key that occurs twice.
    """
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs more than once")
    return out


class DuplicateKey(ValueError):
    """Raised for a JSON object that has a key twice."""


def read(paths, bad: BadRows, *, field: str, splits=("train",), subset: str = "", revision: str | None = None,
         limit: int = 0, keep=()) -> Tables:
    """Reads several sources into one table, in order.

    Args:
      paths: one path or several, as data.path names them. bad: counts or raises for rows that cannot be read.
      field: option name for messages.
      splits, subset, revision: for folders and hub ids; "" and None = the default subset and revision.
      limit: keeps the first rows of the whole that can be read; 0 for all. Sources after these are not opened.
      keep: columns whose binary values are kept.

    Raises:
      DataError: a source cannot be read, none has a usable row, or a row cannot be read and `bad` has the mode
        'error'."""
    parts, left = [], limit or sys.maxsize
    for path in (paths,) if isinstance(paths, str) else paths:
        if left <= 0:
            break
        part = _read_one(resolve(path), path, bad, field, splits, subset, revision, left, keep)
        parts.append(part)
        left -= len(part)
    if left == (limit or sys.maxsize):
        why = "".join(f"\n  {m}" for m in bad.messages[:3])
        shown = paths if isinstance(paths, str) else ", ".join(paths)
        raise DataError(f"{field}={shown}: no readable rows; add at least one{why}")
    return Tables(parts)


def from_memory(rows, bad: BadRows, *, field: str, limit: int = 0, keep=()) -> Tables:
    """Returns the Tables of rows that a caller passes.

    Values without a JSON form become text.

    Args:
      rows: an iterable of dicts, a datasets.Dataset or a datasets.IterableDataset.
      bad: counts or raises for rows that cannot be read.
      field: argument name for messages; a row's place is "<field>[3]", counted from 0.
      limit: keeps the first rows that can be read; 0 for all.
      keep: columns that may hold images, as bytes, uint8 arrays or Pillow images. Binary columns of a datasets.Dataset
        that are not among them are dropped with a warning.

    Raises DataError for anything else, a dict of splits or text included, and if there are no usable rows."""
    if hasattr(rows, "keys") or isinstance(rows, str | bytes):
        splits = getattr(rows, "keys", tuple)()
        remedy = f"; give one of its splits: {', '.join(map(str, splits))}" if splits else ""
        raise DataError(f"{field} is {type_of(rows)}: {EXPECTED}{remedy}")
    if hasattr(rows, "with_format") and hasattr(rows, "__len__"):  # a datasets.Dataset; binary columns go
        parts = [ArrowTable(rows.with_format("arrow")[:limit or len(rows)], field, keep=keep, in_memory=True)]
    else:
        arrow = hasattr(rows, "with_format")  # a datasets.IterableDataset, whose rows come from Arrow
        try:
            values = ((row, f"{field}[{i}]") for i, row in enumerate(rows))
        except TypeError:
            raise DataError(f"{field} is {type_of(rows)}: {EXPECTED}") from None
        kinds = rows.features.arrow_schema if arrow and rows.features else ()
        kinds = {f.name: f.type for f in kinds}
        values = ((_plain_arrow_row(row, kinds) if arrow else row, where) for row, where in values)
        parts = [_rows(((_plain_row(row, keep), where) for row, where in values), bad, limit or sys.maxsize)]
    if not len(parts[0]):
        raise DataError(f"{field} holds no rows" + "".join(f"\n  {m}" for m in bad.messages[:3]))
    return Tables(parts)


def _plain_arrow_row(row, kinds: dict):
    return {k: _from_arrow(v, kinds.get(k)) for k, v in row.items()}


def _plain_row(row, keep):
    try:
        return {str(k): _plain(v, k in keep) for k, v in row.items()} if isinstance(row, dict) else row
    except RecursionError as e:
        return Unreadable(_reason(e))


def check_path(path: str, field: str) -> None:
    """Raises DataError if a path is clearly no source: a missing local file, one of an unknown kind, a jaxrl:// name of
    no shipped file, or the name of rows that were passed from Python. URLs, folders and hub ids are not examined.

    field: the option that names it, for the message."""
    if path.startswith(IN_MEMORY):
        raise DataError(f"{field}={path}: rows that were passed from Python; pass them again,"
                        " jaxrl.train(..., data=, eval=), or name a file, a folder or a hub id")
    real = resolve(path)
    suffix, exists = Path(real).suffix.lower(), Path(real).exists()
    if "://" in real or Path(real).is_dir():
        return
    if exists and suffix not in SUFFIXES:
        raise DataError(f"{field}={path}: unknown kind of file {suffix!r}; known: {', '.join(SUFFIXES)}")
    if not exists and (suffix in SUFFIXES or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", real)):
        raise DataError(f"{field}={path}: no such file or folder (relative to {Path.cwd()}); check the path")


def _read_one(path, shown, bad, field, splits, subset, revision, limit, keep):
    check_path(shown, field)
    suffix, local = Path(path).suffix.lower(), Path(path)
    if "://" in path and suffix not in SUFFIXES:
        raise DataError(f"{field}={shown}: unknown kind of file {suffix!r}; known: {', '.join(SUFFIXES)}")
    if "://" not in path and not (suffix in SUFFIXES and local.is_file()):
        return _read_hf(path, shown, field, splits, subset, revision, limit, keep)
    with _open(path, field) as f:
        if suffix == ".parquet":
            return ArrowTable(_parquet(f, shown).slice(0, limit), shown, keep=keep)
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
        file: Any = fsspec.open(path, "rb")
        return file.open()
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


# One generator of (row, place) per file format; an Unreadable takes the place of a row that cannot be read.


def _jsonl(f, shown: str):
    for number, line in enumerate(f, 1):  # bytes: only \n ends a line, not the other line breaks of Unicode
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_unique)
            except DuplicateKey as e:
                row = Unreadable(str(e))
            except (ValueError, RecursionError) as e:  # not UTF-8, not JSON, or an endless number
                row = Unreadable(f"not JSON: {_reason(e)}")
            yield row, f"{shown}:{number}"


def _json(f, shown: str):
    """Reads a list of objects, an object that holds one such list, or JSON lines under another suffix."""
    data = f.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{shown}: not UTF-8: {e}") from None
    start = len(text) - len(text.lstrip())
    if text[start:start + 1] == "[":
        return _json_list(text, start + 1, shown)
    if text[start:start + 1] != "{":
        raise DataError(f"{shown}:1: expected a JSON list of objects")
    try:
        whole = json.loads(text, object_pairs_hook=_unique)
    except DuplicateKey as e:
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
        at = found.end() if (found := skip.match(text, at)) else at
        line, counted = line + text.count("\n", counted, at), at
        if text[at:at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as e:
            raise DataError(f"{shown}:{e.lineno}: not JSON: {e.msg}; the rest of the file cannot be read") from None
        except RecursionError as e:
            raise DataError(f"{shown}:{line}: not JSON: {_reason(e)}; the rest of the file cannot be read") from None
        except ValueError as e:  # an endless number or a duplicate key: skipped, so that the rows after it are read
            _, at = json.JSONDecoder(parse_int=str).raw_decode(text, at)
            value = Unreadable(_reason(e))
        yield value, f"{shown}:{line}"


class Unreadable(str):
    """Takes the place of a row that cannot be read; the text is the reason."""


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
    # Bytes that are not UTF-8 become surrogates, so that reading can continue after them.
    reader = csv.DictReader(io.TextIOWrapper(f, "utf-8-sig", "surrogateescape", newline=""), strict=True)
    try:
        header = reader.fieldnames or []  # reads the first line
    except csv.Error as e:
        raise DataError(f"{shown}:1: not CSV: {e}") from None
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in "".join(header)):
        raise DataError(f"{shown}:1: not UTF-8; is it a text file?")
    doubled = next((name for name in header if header.count(name) > 1), None)
    if doubled is not None:
        raise DataError(f"{shown}:1: the column {doubled!r} occurs {header.count(doubled)} times: rename or drop one")
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


def _read_hf(path, shown, field, splits, subset, revision, limit, keep) -> Tables:
    """Reads a `save_to_disk` folder, a folder of data files, or a hub id, through `datasets`."""
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
                "neither a local file or folder nor a loadable hub id: check the name, data.subset, "
                "the split, data.revision and the network")
            raise DataError(f"{field}={shown} (split {split}): {remedy}: {type(e).__name__}: {e}") from None
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise DataError(f"{field}={shown}: no split {split!r}; it has {', '.join(map(str, loaded))}")
            loaded = loaded[split]
        name = f"{shown}[{split}]" if len(splits) > 1 or split != "train" else shown
        table: Any = loaded.with_format("arrow")[:]
        sources = " ".join(map(str, loaded.info.download_checksums or ()))  # hf://datasets/NAME@COMMIT/FILE
        parts.append(ArrowTable(table.slice(0, limit), name, re.findall(r"@([0-9a-f]{40})/", sources), keep))
        limit -= len(parts[-1])
    return Tables(parts)
