"""Cache of tokenized data sets (`data.cache`): a restart reads neither rows nor templates again.

`loading` calls it. An entry is a folder named by a hash of everything that decides its content: the rows (bytes of
local files, values of everything else), the tokenizer with its chat template, the options that reading depends on, this
package's reading code, and the versions of the libraries it calls. File names and times play no part, so a matching
entry is the same data. The process that holds the entry's lock writes it under a temporary name and renames it when it
is complete. Arrays are memory-mapped; rows are read on demand.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np

from jaxrl.data.chat_template import template_date
from jaxrl.data.dataset import Dataset, Tables
from jaxrl.data.images.decode import as_text
from jaxrl.data.sources import SUFFIXES, ArrowTable, resolve
from jaxrl.records import sealed

try:
    import fcntl
except ImportError:  # not on Windows: every process writes an entry, and the first to finish keeps it
    fcntl = None

log = logging.getLogger(__name__)
DEFAULT_FOLDER = "~/.cache/jaxrl/data"
# Options that say how rows are drawn and monitored, not what they contain.
IGNORED_OPTIONS = ("prompts_per_step", "epochs", "shuffle", "seed", "workers", "prefetch", "drop_last", "cache",
                   "sources", "exhausted", "path")
REWARD_MODEL_OPTIONS = ("kind", "steps_column", "labels_column", "separator")  # of reward_model: how its rows are read
ARRAYS = ("offsets", "ids", "mask", "masked", "rows", "cut", "image_offsets", "images")
LISTS = ("filtered", "filtered_rows", "unknown_prompts", "empty", "shortened", "split")


class LazyTables(Tables):
    """Rows of local files, read on first access.

    Args:
      paths: files, as `data.path` names them.
      limit: number of rows to keep, 0 for all.
      read: () -> Tables.

    Attributes:
      contents: `digests` at construction, before the files are read.

    Raises OSError for a file that cannot be read.
    """

    def __init__(self, paths, limit: int, read):
        self._read, self._whole, self._paths, self._limit = read, None, paths, limit
        self.contents = self.digests()

    def digests(self) -> list:
        """Returns [row limit, [path, SHA-256] of each file], as they are now."""
        return [self._limit, *([shown, sealed.file_digest(Path(resolve(shown)))] for shown in self._paths)]

    @property
    def whole(self) -> Tables:
        """All rows; the first access reads the files."""
        if self._whole is None:
            self._whole = self._read()
        return self._whole

    @property
    def commits(self) -> list[str]:
        """Hub commits of the rows: none, they are local files."""
        return []

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, i: int):
        return self.whole[i]


def lazy_tables(config, paths, limit: int, read) -> Tables:
    """Returns the Tables of files; they are read on first access if `data.cache` is set and every path is a local file,
    else now.

    Args:
      config: of the job. paths: as `data.path` names them. limit: rows to keep, 0 = all. read: () -> Tables, with this
        limit.
    """
    local = all(Path(resolve(p)).suffix.lower() in SUFFIXES and Path(resolve(p)).is_file() for p in paths)
    return LazyTables(paths, limit, read) if config.data.cache and local else read()


class Cache:
    """Reads and writes the cache entry of one data set.

    Args:
      config, tokenizer: of the job; the options that decide the content are part of the entry's key.
      tables: the rows before tokenization.
      numbers: row numbers in use, None for all.
      how: further JSON-able values that decide the content: end token, targets, tools and the rule of images.

    Attributes:
      key: hash of everything that decides the content, the name of the entry's folder."""

    def __init__(self, config, tokenizer, tables, numbers, **how):
        folder = config.data.cache
        self.root = Path(DEFAULT_FOLDER if folder == "auto" else folder).expanduser()
        options = {group: json.loads(config[group].to_json_best_effort()) for group in ("data", "env")}
        contents = {"data": {k: v for k, v in options["data"].items() if k not in IGNORED_OPTIONS},
                    "env": options["env"], "scored": [config.reward_model[name] for name in REWARD_MODEL_OPTIONS],
                    "lengths": [config.rollout.max_new_tokens, config.train.max_sequence_tokens],
                    "eos": list(config.model.eos_tokens), "recipe": config.run.recipe, "how": how,
                    "losses": list(config.preference.loss),  # whether a row may have a label instead of a pair
                    "rows": _rows_digest(tables), "numbers": None if numbers is None else list(map(int, numbers)),
                    "tokenizer": _tokenizer_digest(tokenizer), "code": _code_digest()}
        self.key = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]
        self.folder, self.tables = self.root / self.key, tables

    def read(self, name: str, reader, bad) -> Dataset | None:
        """Returns the cached data set, or None if there is no readable entry. An unreadable entry is
        deleted with a warning.

        Args:
          name: of the data set.
          reader: the Dataset's Reader.
          bad: the Dataset's BadRows; its count and messages become those of the entry."""
        if not self.folder.is_dir():
            return None
        try:
            meta, arrays = sealed.opened((self.folder / "meta.json").read_text("utf-8")), {}
            for key, digest in meta["digests"].items():
                if sealed.file_digest(self.folder / key) != digest:
                    raise ValueError(f"{key} does not match its digest")
            for key in ARRAYS:
                arrays[key] = np.load(self.folder / f"{key}.npy", mmap_mode="r")
            dataset = Dataset(name, CachedRows(self.folder, meta["commits"]), reader, bad)
        except (OSError, ValueError, KeyError) as e:
            log.warning("%s: the cache entry %s cannot be read and is rebuilt: %s", name, self.folder, e)
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        for key in LISTS:
            setattr(dataset, key, [tuple(v) if isinstance(v, list) else v for v in meta[key]])
        bad.count, bad.messages, dataset.truncated = meta["bad"], meta["messages"], meta["truncated"]
        dataset.content, dataset.rows_read = KnownDigest(meta["content"]), meta["asked"]
        dataset.set_arrays(arrays)
        log.info("%s: %d rows from the cache %s", name, len(dataset), self.folder)
        return dataset

    def write(self, dataset: Dataset) -> None:
        """Writes a data set to the cache. Does nothing if another process writes the entry, if it is there already, or
        if source files have changed since they were read. A failing disk causes a warning only."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _try_lock(self.root / f"{self.key}.lock") as mine:
                if mine and not self.folder.exists() and is_unchanged(self.tables):
                    self._write(dataset)
        except OSError as e:
            log.warning("%s: not written to data.cache=%s: %s", dataset.name, self.root, e)

    def _write(self, dataset: Dataset) -> None:
        draft = self.root / f"{self.key}.{os.getpid()}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            for key in ARRAYS:
                np.save(draft / f"{key}.npy", dataset.arrays[key])
            _write_rows(draft, dataset)
            meta = {key: getattr(dataset, key) for key in LISTS} | {
                "bad": dataset.bad_rows.count, "messages": dataset.bad_rows.messages, "truncated": dataset.truncated,
                "content": dataset.content.hexdigest(), "commits": dataset.commits, "asked": dataset.rows_read,
                "digests": {p.name: sealed.file_digest(p) for p in draft.iterdir()}}
            (draft / "meta.json").write_text(sealed.sealed(meta), "utf-8")
            for path in draft.iterdir():
                with path.open("rb") as f:
                    os.fsync(f.fileno())
            draft.rename(self.folder)
        except FileExistsError:
            pass  # another process was faster, with the same content
        finally:
            shutil.rmtree(draft, ignore_errors=True)


class CachedRows(Tables):
    """The rows of a cache entry, read from disk, indexed by their row number in the source; IndexError for a row that
    no example needs. A Dataset uses it as its tables.

    folder: of the entry. commits: hub commits of the rows."""

    def __init__(self, folder: Path, commits: list[str]):
        self._commits, self._size = commits, 0
        self._text = np.load(folder / "text.npy", mmap_mode="r")
        self._ends, self._numbers = np.load(folder / "ends.npy"), np.load(folder / "numbers.npy")

    @property
    def commits(self) -> list[str]:
        """Hub commits of the rows."""
        return self._commits

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int):
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            raise IndexError(number)
        row, where = json.loads(self._text[self._ends[at]:self._ends[at + 1]].tobytes())
        return row, where


class KnownDigest:
    """A hash whose value was computed earlier; has `hexdigest` only.

    text: the hash in hex."""

    def __init__(self, text: str):
        self._text = text

    def hexdigest(self) -> str:
        """Returns the hash in hex."""
        return self._text


def _write_rows(folder: Path, dataset: Dataset) -> None:
    """Writes the rows that a data set reads later: those of its examples and the first with an unknown token."""
    numbers = np.unique(np.append(dataset.arrays["rows"], [i for i, _ in dataset.unknown_prompts[:1]]).astype(np.int64))
    texts = [json.dumps(dataset.tables[int(i)], default=as_text).encode() for i in numbers]
    np.save(folder / "numbers.npy", numbers)
    np.save(folder / "ends.npy", np.cumsum([0, *map(len, texts)]))
    np.save(folder / "text.npy", np.frombuffer(b"".join(texts), np.uint8))


@contextlib.contextmanager
def _try_lock(path: Path):
    """Yields whether this process acquired the lock; never waits."""
    if fcntl is None:
        yield True
        return
    with path.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def is_unchanged(tables) -> bool:
    """Returns whether the source files still have the content they had before they were read; True for tables that are
    no LazyTables. Raises OSError if a file is gone."""
    return not isinstance(tables, LazyTables) or tables.digests() == tables.contents


def _rows_digest(tables) -> list:
    """Returns digests of the rows in order, with their places; local files are digested as bytes."""
    if isinstance(tables, LazyTables):
        return ["files", *tables.contents]
    return [_part_digest(part) for part in tables.parts]


def _part_digest(part) -> str:
    digest = hashlib.sha256()
    if isinstance(part, ArrowTable):
        part.digest(digest)
    elif isinstance(part, Tables):
        digest.update(json.dumps(_rows_digest(part)).encode())
    else:
        for pair in part:
            digest.update(json.dumps(pair, default=as_text).encode() + b"\n")
    return digest.hexdigest()


def _tokenizer_digest(tokenizer) -> list:
    """Returns everything that turns text into ids: the whole tokenizer if it can be serialized, else its vocabulary."""
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
    return [hashlib.sha256(whole.encode()).hexdigest(), special, str(tokenizer.chat_template), type(tokenizer).__name__,
            tokenizer.clean_up_tokenization_spaces, template_date(tokenizer)]


@functools.cache
def _code_digest() -> str:
    """Returns a hash of the code that reads, renders and tokenizes, and of the versions of the libraries it calls."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted([*root.glob("data/*.py"), *root.glob("data/images/*.py"), *root.glob("envs/parsers*.py")]):
        digest.update(path.read_bytes())
    for library in ("transformers", "tokenizers", "jinja2", "pyarrow"):
        digest.update(f"{library} {version(library)} ".encode())
    return digest.hexdigest()
