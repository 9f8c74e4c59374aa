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
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa

from jaxrl.data.dataset import Tables
from jaxrl.errors import ConfigError

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

    Values without a JSON form (dates, decimals) become text. Binary columns (images, audio) are left out. Inside a
    column a field that is null is left out: Arrow's structs have every field that any row has, so that it cannot be
    told from one that the row never had. Errors: DataError where two columns have one name.
    """

    def __init__(self, table: pa.Table, name: str, commits=()):
        self.commits = commits
        check_names(table.column_names, name)
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
        row = {c: _plain(self._table.column(c)[i].as_py(maps_as_pydicts="strict"), filled=True)
               for c in self._table.column_names}
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


def _plain(value, filled: bool = False):
    """The value as JSON has it. filled: of Arrow, whose structs are filled up with nulls."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {str(k): _plain(v, filled) for k, v in value.items() if v is not None or not filled}
    if isinstance(value, (list, tuple)):
        return [_plain(v, filled) for v in value]
    return str(value)


def check_names(names, where: str) -> None:
    """Raises DataError where two columns have one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{where}: {Counter(names)[twice[0]]} columns are called {twice[0]!r}; rename or drop all but "
                        "one")


def _once(pairs) -> dict:
    """An object of JSON. Raises ValueError where a key is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return out


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
        raise DataError(f"{field} is a {type(rows).__name__}: {EXPECTED}{remedy}")
    if hasattr(rows, "with_format") and hasattr(rows, "__len__"):  # a datasets.Dataset; its binary columns are left out
        parts = [ArrowTable(rows.with_format("arrow")[:limit or len(rows)], field)]
    else:
        try:
            values = ((row, f"{field}[{i}]") for i, row in enumerate(rows))
        except TypeError:
            raise DataError(f"{field} is a {type(rows).__name__}: {EXPECTED}") from None
        values = itertools.islice(values, limit or None)
        parts = [_rows(((_held(row), where) for row, where in values), bad, sys.maxsize)]
    if not len(parts[0]):
        raise DataError(f"{field} holds no rows" + "".join(f"\n  {m}" for m in bad.messages[:3]))
    return Tables(parts)


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
        check_names(file.schema_arrow.names, shown)
        return file.read()
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{shown}: not a readable Parquet file: {e}") from None


# Of a file's kind: generators of (row, place); what cannot be read is Unreadable in the row's place.


def _jsonl(f, shown: str):
    for number, line in enumerate(f, 1):  # bytes: only \n ends a line, whatever else Unicode calls a line break
        if line.strip():
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_once)
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
        whole = json.loads(text, object_pairs_hook=_once)
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
    decoder, skip, line, counted = json.JSONDecoder(object_pairs_hook=_once), re.compile(r"[\s,]*"), 1, 0
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
    check_names(header, f"{shown}:1")
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in "".join(header)):
        raise DataError(f"{shown}:1: not UTF-8; is it a text file?")
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
