"""From rows to examples: columns, templates, token ids, length limits, the held-out share, named eval sets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.sources import GIVEN, BadRows, DataError, Tables, check_path, from_memory, read
from jaxrl.data.tokenizer import PromptError, Template, check_messages
from jaxrl.errors import ConfigError
from jaxrl.registry import recipe_of

log = logging.getLogger(__name__)
RESERVED = ("prompt", "completion", "prompts", "completions", "token_ids", "finish", "group", "sample", "user")
MOST_NESTED = 100  # levels of lists and tables in a row
CHUNK = 1024  # rows tokenised in one call


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One row, ready to use.

    prompt_ids: [P] int32, P <= data.max_prompt_tokens. prompt_text: what they spell. prompt: the row's own text or
    messages. columns: what rewards receive by name: every column of the row but the prompt and the completion, and
    `answer`. target_ids: SFT only, [C] int32, the completion tokenised on its own, ending with the end token.
    """

    prompt_ids: np.ndarray
    prompt_text: str
    prompt: Any
    answer: Any
    columns: dict[str, Any]
    where: str
    target_ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class _Row:
    prompt: Any
    text: str
    answer: Any
    columns: dict[str, Any]
    completion: str | None


class _Reader:
    """Reads one row by `data.*`. targets: 'none', 'optional' or 'required' (a completion to train on)."""

    def __init__(self, config, tokenizer, targets: str):
        data = config.data
        self.template, self.targets = Template(config, tokenizer), targets
        self.prompt, self.answer, self.completion = data.prompt_column, data.answer_column, data.completion_column
        self.pattern = None
        if data.answer_pattern:
            try:
                self.pattern = re.compile(data.answer_pattern)
            except re.error as e:
                raise ConfigError(f"data.answer_pattern={data.answer_pattern!r} is no regex: {e}") from None
            if self.pattern.groups < 1:
                raise ConfigError(f"data.answer_pattern={data.answer_pattern!r} has no group: put what is to be cut "
                                  "out in parentheses, e.g. '#### (.*)'")

    def __call__(self, row: dict[str, Any]) -> _Row:
        """Raises PromptError saying what is wrong with the row."""
        prompt = self._column(row, self.prompt, "data.prompt_column")
        if not isinstance(prompt, str):
            try:
                prompt = check_messages(prompt)
            except PromptError as e:
                raise PromptError(f"column {self.prompt!r} (data.prompt_column): {e}") from None
        context, completion = self._completion(row, prompt)
        if isinstance(context, list) and context[-1]["role"] == "assistant":
            raise PromptError("the messages end with an assistant turn, but a prompt ends before it "
                              "(data.response_prefix starts an answer; run.recipe=sft trains on such rows)")
        answer = self._answer(row)
        columns = {k: v for k, v in row.items() if k not in (self.prompt, self.completion, *RESERVED)}
        if self.answer:
            columns["answer"] = answer
        return _Row(context, self.template.render(context), answer, columns, completion)

    def _column(self, row, name, option):
        if row.get(name) is None:
            state = "is empty in" if name in row else "is missing in"
            raise PromptError(f"column {name!r} {state} this row; columns found: {', '.join(map(str, row))}; "
                              f"{option} names the column to read")
        return row[name]

    def _completion(self, row, prompt):
        """(prompt without the target, target text or None)."""
        if self.targets == "none":
            return prompt, None
        if row.get(self.completion) is None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            if len(prompt) == 1:
                raise PromptError("the messages hold an assistant turn and nothing before it")
            return prompt[:-1], prompt[-1]["content"]
        if self.targets == "optional" and row.get(self.completion) is None:
            return prompt, None
        completion = self._column(row, self.completion, "data.completion_column")
        if isinstance(completion, list):
            completion = check_messages(completion)[-1]["content"]
        if not isinstance(completion, str):
            raise PromptError(f"column {self.completion!r} holds {type(completion).__name__}, expected text")
        return prompt, completion

    def _answer(self, row):
        if not self.answer or (self.targets != "none" and row.get(self.answer) is None):
            return None
        try:
            answer = self._column(row, self.answer, "data.answer_column")
        except PromptError as e:
            raise PromptError(f"{e}, or '' where there are no answers") from None
        if self.pattern is None:
            return answer
        match = self.pattern.search(str(answer))
        if match is None or match.group(1) is None:
            raise PromptError(f"data.answer_pattern={self.pattern.pattern!r} finds nothing in column {self.answer!r}: "
                              f"{str(answer)[-80:]!r}")
        return match.group(1).strip()


class Dataset:
    """Examples by index: `len(ds)`, `ds[i]`. Ids are made once, at the start; the rest of a row when it is asked for.

    name; bad: BadRows of what could not be read; filtered: places ("file:line") left out for their length;
    filtered_rows: their row numbers; unknown: (row number, share of its tokens) of prompts with text that the tokenizer
    has no token for; truncated: how many prompts were cut on the left; heldout: the carved-out eval
    set or None; fingerprint: hash of what the rows say, in order (prompt, completion, answer and the columns that
    rewards receive), and their count. It depends neither on the file's name, kind and time nor on tokenizer and limits.
    """

    def __init__(self, name: str, tables: Tables, reader: _Reader, bad: BadRows):
        self.name, self.bad, self.heldout = name, bad, None
        self._tables, self._reader, self._content = tables, reader, hashlib.sha256()
        self.filtered: list[str] = []
        self.filtered_rows: list[int] = []
        self.unknown: list[tuple[int, float]] = []
        self.truncated = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Example:
        at = int(self._rows[i])
        row, where = self._reader(self._tables.row(at)), self._tables.where(at)
        ids, text = self._prompts[i], row.text
        if self._cut[i]:
            text = self._reader.template.tokenizer.decode(ids)
        return Example(ids, text, row.prompt, row.answer, row.columns, where, self._targets[i])

    def _fill(self, kept, limit) -> None:
        """kept: list of (row number, prompt ids, target ids or None); `limit` is the longest prompt."""
        self._rows = np.array([row for row, _, _ in kept], np.int64)
        self._cut = np.array([len(p) > limit for _, p, _ in kept], bool)
        self.truncated = int(self._cut.sum())
        self._prompts = _Ragged([p[-limit:] for _, p, _ in kept])
        targets = [t for _, _, t in kept]
        none = np.zeros(0, np.int32)
        self._targets = _Ragged([none if t is None else t for t in targets], [t is None for t in targets])

    @property
    def fingerprint(self) -> str:
        return f"{self._content.hexdigest()[:16]}, {len(self) + len(self.filtered)} rows"

    @property
    def commits(self) -> list[str]:
        """Hub commits that the rows came from; none for files, folders and rows in memory."""
        return self._tables.commits

    @property
    def prompt_lengths(self) -> np.ndarray:
        """[N] tokens of each prompt."""
        return np.diff(self._prompts.offsets)

    def describe(self) -> str:
        """One line: rows, lengths, and what was left out or cut."""
        n = self.prompt_lengths
        text = f"{self.name}: {len(self)} rows, prompts {n.min()} to {n.max()} tokens (mean {n.mean():.1f})"
        for count, what in ((len(self.filtered), "left out for their length"), (self.truncated, "cut on the left"),
                            (self.bad.count, "bad rows skipped")):
            text += f", {count} {what}" if count else ""
        return text


class _Ragged:
    """Rows of ids in one flat array."""

    def __init__(self, rows, absent=None):
        self.offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
        self.ids = np.concatenate(rows)
        self.absent = absent

    def __getitem__(self, i):
        if self.absent is not None and self.absent[i]:
            return None
        return self.ids[self.offsets[i]:self.offsets[i + 1]]


def load_train(config, tokenizer, eos_id: int | None = None, rows=None) -> Dataset:
    """The training set: `rows` (a list of dicts or a datasets.Dataset) where a caller gives some, else that of
    `data.path`; read as `data.*` says. `eos_id` ends SFT targets (run.recipe=sft needs it; rl ignores it).

    With `data.eval_fraction` a share or number of the rows becomes `.heldout` instead; rows with equal prompts stay on
    one side, so no held-out prompt is trained on. Errors: DataError / ConfigError.
    """
    data = config.data
    if not data.path and rows is None:
        raise ConfigError("data.path is empty: name a file, a folder or a hub id")
    bad = BadRows(data.bad_rows)
    tables, numbers, heldout = _train_rows(config, bad, rows)
    targets = "none" if recipe_of(config).samples else "required"
    train = _load("train", config, tokenizer, eos_id, tables, numbers, targets, bad)
    if data.eval_fraction:
        train.heldout = _load_heldout(config, tokenizer, eos_id, tables, heldout)
    return train


def _train_rows(config, bad, rows=None):
    """(tables of data.path or of rows given, numbers of the rows to train on, of the held-out ones)."""
    data = config.data
    if rows is not None:
        tables = from_memory(rows, bad, field="data", limit=data.max_rows)
    else:
        tables = read(data.path, bad, field="data.path", splits=data.split, subset=data.subset, revision=data.revision,
                      limit=data.max_rows)
    if not data.eval_fraction:
        return tables, range(len(tables)), []
    return tables, *_carve(tables, data.prompt_column, data.eval_fraction, data_seed(config))


def _load_heldout(config, tokenizer, eos_id, tables, rows) -> Dataset:
    rows = rows[:config.eval.max_rows or None]
    targets = "none" if recipe_of(config).samples else "optional"
    return _load("heldout", config, tokenizer, eos_id, tables, rows, targets, BadRows(config.data.bad_rows))


def load_eval_sets(config, tokenizer, eos_id: int | None = None, train: Dataset | None = None, sets=None, rows=None
                   ) -> dict[str, Dataset]:
    """The sets of `eval.sets`, then those of `sets` (name -> rows, as for load_train), and 'heldout' if
    `data.eval_fraction` > 0 (`train.heldout`, or carved out again, of `rows` where the training rows were given).

    Rows keep their order and none is left out or repeated, except as `data.overlong_prompt` says (counted and
    reported). In SFT a set's completion column is read where there is one.
    """
    out: dict[str, Dataset] = {}
    targets = "none" if recipe_of(config).samples else "optional"

    def load(name, bad, tables):
        out[name] = _load(name, config, tokenizer, eos_id, tables, range(len(tables)), targets, bad)

    for name, path, split in _eval_sources(config):
        if path == GIVEN + name and name in (sets or {}):
            continue
        bad = BadRows(config.data.bad_rows)
        load(name, bad, read(path, bad, field=f"eval.sets {name}", splits=(split,), subset=config.data.subset,
                             revision=config.data.revision, limit=config.eval.max_rows))
    for name, given in (sets or {}).items():
        if name in out or (name == "heldout" and config.data.eval_fraction) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"eval: the set's name {name!r} is taken, or is not made of letters, digits, '_', '.' and '-'")
        bad = BadRows(config.data.bad_rows)
        load(name, bad, from_memory(given, bad, field=f"eval {name}", limit=config.eval.max_rows))
    if config.data.eval_fraction and train is not None:
        out["heldout"] = train.heldout
    elif config.data.eval_fraction:
        tables, _, heldout = _train_rows(config, BadRows(config.data.bad_rows), rows)
        out["heldout"] = _load_heldout(config, tokenizer, eos_id, tables, heldout)
    return out


def _eval_sources(config) -> list[tuple[str, str, str]]:
    """(name, path, split) of each entry of eval.sets."""
    out: list[tuple[str, str, str]] = []
    for entry in config.eval.sets:
        name, eq, path = entry.partition("=")
        if not eq or not path or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"eval.sets: {entry!r} is not 'name=path' (name: letters, digits, '_', '.', '-')")
        if name in [n for n, _, _ in out] or (name == "heldout" and config.data.eval_fraction):
            raise ConfigError(f"eval.sets: the name {name!r} is used twice; give one of them another name"
                              + (" (data.eval_fraction makes a set of that name)" if name == "heldout" else ""))
        path, _, split = path.rpartition("@") if re.search(r"@[\w\[\]:%+-]+$", path) else (path, "", "test")
        out.append((name, path, split))
    return out


def check_paths(config, rows_given: bool = False, sets_given=()) -> None:
    """Raises DataError, for all of them together, where data.path or eval.sets name local files that are not there, or
    rows that are not given."""
    wanted = not rows_given and (config.run.mode != "eval" or config.data.eval_fraction)
    named = [(path, "data.path") for path in config.data.path if wanted]
    named += [(path, f"eval.sets {name}") for name, path, _ in _eval_sources(config) if name not in sets_given]
    problems = []
    for path, field in named:
        try:
            check_path(path, field)
        except DataError as e:
            problems.append(str(e))
    if problems:
        raise DataError("\n".join(problems))


def data_seed(config) -> int:
    """Seed of the shuffle and of the carve-out."""
    return config.run.seed if config.data.seed is None else config.data.seed


def _carve(tables: Tables, prompt_column: str, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(train rows, held-out rows), both in file order: whole groups of equal prompts, drawn until the share (or number)
    is met."""
    groups: dict[str, list[int]] = {}
    for i in range(len(tables)):
        try:
            key = json.dumps(tables.row(i).get(prompt_column), sort_keys=True)
        except (RecursionError, ValueError):  # a bad row, as will be said when it is read
            key = f"row {i}"
        groups.setdefault(key, []).append(i)
    keys, wanted, taken = list(groups), round(fraction * len(tables) if fraction < 1 else fraction), set()
    if not 0 < wanted < len(tables) or len(keys) < 2:
        raise ConfigError(f"data.eval_fraction={fraction} of {len(tables)} rows ({len(keys)} different prompts) leaves "
                          "nothing on one side")
    for k in np.random.default_rng([seed, 0x68656C64]).permutation(len(keys))[:-1]:
        if len(taken) >= wanted:
            break
        taken.update(groups[keys[k]])
    return [i for i in range(len(tables)) if i not in taken], sorted(taken)


def _load(name, config, tokenizer, eos_id, tables, rows, targets, bad) -> Dataset:
    if targets != "none" and eos_id is None:
        raise ValueError("eos_id is needed to end SFT targets")
    ds = Dataset(name, tables, _Reader(config, tokenizer, targets), bad)
    limits = _Limits(config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.train.max_sequence_tokens,
                     config.data.overlong_prompt)
    kept, rows = [], list(rows)
    for start in range(0, len(rows), CHUNK):
        kept += _chunk(ds, limits, rows[start:start + CHUNK], eos_id)
    if not kept:
        long = f"too long for data.max_prompt_tokens={limits.prompt}"
        long += f", rollout.max_new_tokens={limits.target}" if targets != "none" else ""
        why = (bad.messages + [f"{w}: {long}; raise it" for w in ds.filtered])[:3]
        raise DataError(f"{name}: no usable row among {len(rows)}" + "".join(f"\n  {w}" for w in why))
    ds._fill(kept, config.data.max_prompt_tokens)
    _report(ds, config, len(rows))
    return ds


def _content(row: _Row) -> bytes:
    """What a row says, for the fingerprint. Raises PromptError for what can be neither tokenised nor written down
    later."""
    try:
        said = [row.prompt, row.completion, row.answer, row.columns]
        if _depth(said) > MOST_NESTED:
            raise RecursionError
        return json.dumps(said, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise PromptError(f"half a surrogate pair, {e.object[e.start]!r}, which no text may hold, behind "
                          f"{e.object[max(0, e.start - 20):e.start]!r}") from None
    except RecursionError:
        raise PromptError(f"nested deeper than {MOST_NESTED} levels") from None
    except ValueError as e:
        raise PromptError(f"a value that cannot be written down: {e}") from None


def _depth(value) -> int:
    """Levels of lists and tables in a value."""
    level, deep = [value], 0
    while level := [part for v in level for part in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())]:
        deep += 1
    return deep


class _Limits(NamedTuple):
    prompt: int
    target: int
    total: int   # 0 = prompt + target
    policy: str  # data.overlong_prompt


def _chunk(ds: Dataset, limits: _Limits, numbers: list[int], eos_id) -> list:
    """Reads and tokenises some rows; applies the length limits. Returns (row number, prompt ids, target ids)."""
    read_rows = []
    for i in numbers:
        try:
            row = ds._reader(ds._tables.row(i))
            ds._content.update(_content(row))
            read_rows.append((i, row))
        except (PromptError, RecursionError) as e:
            ds.bad.add(ds._tables.where(i), str(e) if isinstance(e, PromptError) else "nested too deeply")
    template = ds._reader.template
    no_token = template.no_token
    prompts = template.encode_prompts([row.text for _, row in read_rows])
    with_target = [row.completion for _, row in read_rows if row.completion is not None]
    encoded = iter(template.encode(with_target))
    kept = []
    for (i, row), prompt in zip(read_rows, prompts, strict=True):
        target, unknown = None, False
        if row.completion is not None:
            target = next(encoded)
            unknown = no_token is not None and no_token in target
            target = np.array(target if target[-1:] == [eos_id] else [*target, eos_id], np.int32)
        if no_token is not None and no_token in prompt:
            ds.unknown.append((i, prompt.count(no_token) / len(prompt)))
        if not prompt:
            ds.bad.add(ds._tables.where(i), "the prompt has no tokens")
        elif unknown:
            ds.bad.add(ds._tables.where(i), f"the tokenizer has no token for {template.unknown_in(row.completion)!r} in the completion: the "
                                            f"model would learn to write {template.tokenizer.unk_token!r}")
        elif (problem := _overlong(limits, prompt, target)) is None:
            kept.append((i, np.array(prompt, np.int32), target))
        elif limits.policy == "error":
            raise DataError(f"{ds._tables.where(i)}: {problem}; raise the limit, or set data.overlong_prompt to "
                            "'filter' or 'truncate_left'")
        else:
            ds.filtered.append(ds._tables.where(i))
            ds.filtered_rows.append(i)
    return kept


def _overlong(limits: _Limits, prompt, target) -> str | None:
    """Why the row is too long, or None. A target is never cut: an answer without its end would be learnt."""
    if len(prompt) > limits.prompt and limits.policy != "truncate_left":
        return f"the prompt has {len(prompt)} tokens, data.max_prompt_tokens={limits.prompt}"
    if target is None:
        return None
    if len(target) > limits.target:
        return f"the completion has {len(target)} tokens, rollout.max_new_tokens={limits.target}"
    total = min(len(prompt), limits.prompt) + len(target)
    if 0 < limits.total < total:
        return f"prompt and completion have {total} tokens, train.max_sequence_tokens={limits.total}"
    return None


def _report(ds: Dataset, config, rows: int) -> None:
    if ds.bad.count:
        log.warning("%s: %d of %d rows are bad and skipped; the first: %s", ds.name, ds.bad.count, rows,
                    "; ".join(ds.bad.messages[:3]))
    if ds.unknown:
        at, template = ds.unknown[0][0], ds._reader.template
        log.warning("%s: %d of %d prompts hold text that the tokenizer has no token for, e.g. %r in %s; the model sees %r instead, on average for "
                    "%.0f %% of these prompts' tokens. Take data or a model that know each other", ds.name, len(ds.unknown), rows,
                    template.unknown_in(ds._reader(ds._tables.row(at)).text), ds._tables.where(at), template.tokenizer.unk_token,
                    100 * np.mean([share for _, share in ds.unknown]))
    shown = ", ".join(ds.filtered[:5]) + (", ..." if len(ds.filtered) > 5 else "")
    limit = config.data.max_prompt_tokens
    if len(ds.filtered) > 0.05 * rows:
        log.warning("%s: %d of %d rows (%.0f %%) are too long and left out (data.max_prompt_tokens=%d): %s; a higher "
                    "limit keeps them", ds.name, len(ds.filtered), rows, 100 * len(ds.filtered) / rows, limit, shown)
    elif ds.filtered:
        log.info("%s: %d of %d rows are too long and left out: %s", ds.name, len(ds.filtered), rows, shown)
    if ds.truncated > 0.05 * rows:
        log.warning("%s: %d of %d prompts are cut on the left to data.max_prompt_tokens=%d; a cut question is another "
                    "question", ds.name, ds.truncated, rows, limit)
