"""A cache of tokenised data sets (`data.cache`): the second start of a run reads neither rows nor templates anew.

An entry is a folder named by a hash of all that decides what is in it: the rows (the bytes of files; the content of
what has none), the tokenizer with its chat template, the options that reading depends on, this code and the libraries
it calls. Nothing is ever told by names or times, so an entry that fits is the same data. It is written by the process
that holds its lock, under another name, and renamed when it is whole; its arrays are mapped into memory, and rows are
read off it when they are asked for.
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

from jaxrl.data.dataset import Dataset, Tables, day_of
from jaxrl.data.sources import SUFFIXES, ArrowTable, resolve
from jaxrl.records import sealed

try:
    import fcntl
except ImportError:  # not on Windows: every process writes for itself, and the first to be done keeps its own
    fcntl = None

log = logging.getLogger(__name__)
AUTO = "~/.cache/jaxrl/data"
# Options that say how rows are drawn and watched, not what they are.
APART = ("prompts_per_step", "epochs", "shuffle", "seed", "workers", "prefetch", "drop_last", "cache", "sources",
         "exhausted", "path")
SCORED = ("kind", "steps_column", "labels_column", "separator")  # of reward_model: how its rows are read
ARRAYS = ("offsets", "ids", "mask", "masked", "rows", "cut")
LISTS = ("filtered", "filtered_rows", "unknown", "shortened", "split")


class Unread(Tables):
    """Rows of local files that are read when somebody asks for them. read() -> Tables."""

    def __init__(self, paths, limit: int, read):
        self._read, self._whole, self._paths, self._limit = read, None, paths, limit
        self.said = self.look()

    def look(self) -> list:
        """What the files hold now."""
        return [self._limit, *([shown, sealed.file_digest(Path(resolve(shown)))] for shown in self._paths)]

    @property
    def whole(self) -> Tables:
        if self._whole is None:
            self._whole = self._read()
        return self._whole

    @property
    def commits(self) -> list[str]:
        return []

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, i: int):
        return self.whole[i]


def unread(config, paths, limit: int, read) -> Tables:
    """Rows for a cache: Unread where all paths are files here, else read at once."""
    local = all(Path(resolve(p)).suffix.lower() in SUFFIXES and Path(resolve(p)).is_file() for p in paths)
    return Unread(paths, limit, read) if config.data.cache and local else read()


class Cache:
    """The entry of one data set. Args: what it is made of; see `loading._load`. numbers: rows that are taken, or
    None."""

    def __init__(self, config, tokenizer, tables, numbers, **how):
        folder = config.data.cache
        self.root = Path(AUTO if folder == "auto" else folder).expanduser()
        options = {group: json.loads(config[group].to_json_best_effort()) for group in ("data", "env")}
        said = {"data": {k: v for k, v in options["data"].items() if k not in APART}, "env": options["env"],
                "scored": [config.reward_model[name] for name in SCORED],
                "lengths": [config.rollout.max_new_tokens, config.train.max_sequence_tokens],
                "eos": list(config.model.eos_tokens), "recipe": config.run.recipe, "how": how,
                "losses": list(config.preference.loss),  # whether a row may have a label instead of a pair
                "rows": _rows_digest(tables), "numbers": None if numbers is None else list(map(int, numbers)),
                "tokenizer": _tokenizer_digest(tokenizer), "code": _code_digest()}
        self.key = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]
        self.folder, self.tables = self.root / self.key, tables

    def read(self, name: str, reader, bad) -> Dataset | None:
        """The data set, or None where there is no entry that can be read."""
        if not self.folder.is_dir():
            return None
        try:
            meta, arrays = sealed.opened((self.folder / "meta.json").read_text("utf-8")), {}
            for key, digest in meta["digests"].items():
                if sealed.file_digest(self.folder / key) != digest:
                    raise ValueError(f"{key} is not what was written")
            for key in ARRAYS:
                arrays[key] = np.load(self.folder / f"{key}.npy", mmap_mode="r")
            dataset = Dataset(name, Held(self.folder, meta["commits"]), reader, bad)
        except (OSError, ValueError, KeyError) as e:
            log.warning("%s: the cached entry %s cannot be read and is made anew: %s", name, self.folder, e)
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        for key in LISTS:
            setattr(dataset, key, [tuple(v) if isinstance(v, list) else v for v in meta[key]])
        bad.count, bad.messages, dataset.truncated = meta["bad"], meta["messages"], meta["truncated"]
        dataset.content, dataset.asked = Digest(meta["content"]), meta["asked"]
        dataset.take(arrays)
        log.info("%s: %d rows from the cache %s", name, len(dataset), self.folder)
        return dataset

    def write(self, dataset: Dataset) -> None:
        """Keeps a data set; a disk that refuses is only warned of."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _alone(self.root / f"{self.key}.lock") as mine:
                if mine and not self.folder.exists() and unchanged(self.tables):
                    self._write(dataset)
        except OSError as e:
            log.warning("%s: not kept in data.cache=%s: %s", dataset.name, self.root, e)

    def _write(self, dataset: Dataset) -> None:
        draft = self.root / f"{self.key}.{os.getpid()}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            for key in ARRAYS:
                np.save(draft / f"{key}.npy", dataset.arrays[key])
            _write_rows(draft, dataset)
            meta = {key: getattr(dataset, key) for key in LISTS} | {
                "bad": dataset.bad.count, "messages": dataset.bad.messages, "truncated": dataset.truncated,
                "content": dataset.content.hexdigest(), "commits": dataset.commits, "asked": dataset.asked,
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


class Held(Tables):
    """Rows of an entry, by the numbers they had: what a Dataset asks its tables for."""

    def __init__(self, folder: Path, commits: list[str]):
        self._commits, self._size = commits, 0
        self._text = np.load(folder / "text.npy", mmap_mode="r")
        self._ends, self._numbers = np.load(folder / "ends.npy"), np.load(folder / "numbers.npy")

    @property
    def commits(self) -> list[str]:
        return self._commits

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int):
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            raise IndexError(number)
        row, where = json.loads(self._text[self._ends[at]:self._ends[at + 1]].tobytes())
        return row, where


class Digest:
    """A hash that is known already."""

    def __init__(self, text: str):
        self._text = text

    def hexdigest(self) -> str:
        return self._text


def _write_rows(folder: Path, dataset: Dataset) -> None:
    """Rows that the data set may ask its tables for: what is kept, and the first with unknown text."""
    numbers = np.unique(np.append(dataset.arrays["rows"], [i for i, _ in dataset.unknown[:1]]).astype(np.int64))
    texts = [json.dumps(dataset.tables[int(i)]).encode() for i in numbers]
    np.save(folder / "numbers.npy", numbers)
    np.save(folder / "ends.npy", np.cumsum([0, *map(len, texts)]))
    np.save(folder / "text.npy", np.frombuffer(b"".join(texts), np.uint8))


@contextlib.contextmanager
def _alone(path: Path):
    """Whether this process has the lock; it does not wait for it."""
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


def unchanged(tables) -> bool:
    """Whether files are still those that were looked at before they were read."""
    return not isinstance(tables, Unread) or tables.look() == tables.said


def _rows_digest(tables) -> list:
    """What the rows say, in order, and where they say they stand: of files their bytes."""
    if isinstance(tables, Unread):
        return ["files", *tables.said]
    return [_part_digest(part) for part in tables.parts]


def _part_digest(part) -> str:
    digest = hashlib.sha256()
    if isinstance(part, ArrowTable):
        part.digest(digest)
    elif isinstance(part, Tables):
        digest.update(json.dumps(_rows_digest(part)).encode())
    else:
        for pair in part:
            digest.update(json.dumps(pair).encode() + b"\n")
    return digest.hexdigest()


def _tokenizer_digest(tokenizer) -> list:
    """All that turns text into ids: the whole tokenizer where it can be written down, else every entry and the ids of
    a text."""
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
    return [hashlib.sha256(whole.encode()).hexdigest(), special, str(tokenizer.chat_template), type(tokenizer).__name__,
            tokenizer.clean_up_tokenization_spaces, day_of(tokenizer)]


@functools.cache
def _code_digest() -> str:
    """This code that reads, renders and tokenises, and the libraries it calls."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted([*root.glob("data/*.py"), *root.glob("envs/parsers*.py")]):
        digest.update(path.read_bytes())
    for library in ("transformers", "tokenizers", "jinja2", "pyarrow"):
        digest.update(f"{library} {version(library)} ".encode())
    return digest.hexdigest()
