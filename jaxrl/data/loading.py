"""Data sets of a run: read, tokenised, held to the length limits, with a held-out share and named eval sets."""

from __future__ import annotations

import json
import logging
import re
from functools import partial

import numpy as np

from jaxrl.config.registry import from_rows, recipe_of
from jaxrl.data.cache import Cache, unread
from jaxrl.data.dataset import MORE, Dataset, Kept, PromptError, Reader, Row, Tables, prompt_column
from jaxrl.data.demonstrations import Answers, Demonstrations
from jaxrl.data.mixture import Mixture, config_of, rows_where
from jaxrl.data.overlong import Limits, fitted
from jaxrl.data.pairs import PairReader, carved_by
from jaxrl.data.scored import Steps, scored_reader
from jaxrl.data.sources import GIVEN, BadRows, DataError, check_path, from_memory, read
from jaxrl.data.stream import data_seed
from jaxrl.errors import ConfigError

log = logging.getLogger(__name__)
MOST_NESTED = 100  # levels of lists and tables in a row
CHUNK = 1024  # rows tokenised in one call


def load_train(config, tokenizer, eos_id: int | None = None, rows=None, tools=()) -> Dataset:
    """The training set: `rows` (a list of dicts or a datasets.Dataset) where a caller gives some, else that of
    `data.path`; read as `data.*` says. `eos_id` ends SFT targets (run.recipe=sft needs it; rl ignores it). `tools`:
    JSON schemas that the chat template is told.

    With `data.eval_fraction` a share or number of the rows becomes `.heldout` instead; rows with equal prompts stay on
    one side, so no held-out prompt is trained on. With `data.sources` it is a Mixture. Errors: DataError / ConfigError.
    """
    data = config.data
    if data.sources:
        return _load_sources(config, tokenizer, eos_id, rows, tools)
    if not data.path and rows is None:
        raise ConfigError("data.path is empty: name a file, a folder or a hub id")
    bad = BadRows(data.bad_rows)
    tables, numbers, heldout = _train_rows(config, bad, rows)
    train = _load("train", config, tokenizer, eos_id, tables, bad, numbers, targets="required", tools=tools)
    if data.eval_fraction:
        train.heldout = _load_heldout(config, tokenizer, eos_id, tables, heldout, tools)
    return train


def _load_sources(config, tokenizer, eos_id, rows, tools) -> Mixture:
    """The sets of data.sources, each read as its own entries say."""
    parts, rewards, known = {}, {}, {}
    for name in sorted(config.data.sources):
        given, own = config.data.sources[name], config_of(config, name)
        d, bad = own.data, BadRows(own.data.bad_rows)
        key = ("path" in given, d.path, d.split, d.subset, d.revision, d.max_rows, d.bad_rows)
        if key not in known:  # rows told apart by `where` are read once
            known[key], *_ = _train_rows(own, bad, None if "path" in given else rows)
        tables = known[key]
        numbers = rows_where(tables, given["where"], name) if given.get("where") else None
        parts[name] = _load(name, own, tokenizer, eos_id, tables, bad, numbers, targets="required", tools=tools)
        if given.get("rewards"):
            rewards[name] = (given["rewards"],) if isinstance(given["rewards"], str) else tuple(given["rewards"])
    return Mixture(parts, rewards)


def _train_rows(config, bad, rows=None):
    """(tables of data.path or of rows given, numbers of the rows to train on, of the held-out ones)."""
    data = config.data
    if rows is not None:
        tables = from_memory(rows, bad, field="data", limit=data.max_rows)
    else:
        tables = unread(config, data.path, data.max_rows, partial(
            read, data.path, bad, field="data.path", splits=data.split, subset=data.subset, revision=data.revision,
            limit=data.max_rows))
    if not data.eval_fraction:
        return tables, None, []
    prompt = (lambda row: carved_by(row, data)) if recipe_of(config).pairs else (
        lambda row: row.get(prompt_column(row, data.prompt_column)))
    return tables, *_carve(tables, prompt, data.eval_fraction, data_seed(config))


def _load_heldout(config, tokenizer, eos_id, tables, rows, tools) -> Dataset:
    rows = rows[:config.eval.max_rows or None]
    return _load("heldout", config, tokenizer, eos_id, tables, BadRows(config.data.bad_rows), rows, tools=tools)


def load_eval_sets(config, tokenizer, eos_id: int | None = None, train: Dataset | None = None, sets=None, rows=None,
                   tools=()) -> dict[str, Dataset]:
    """The sets of `eval.sets`, then those of `sets` (name -> rows, as for load_train), and 'heldout' if
    `data.eval_fraction` > 0 (`train.heldout`, or carved out again, of `rows` where the training rows were given).

    Rows keep their order and none is left out or repeated, except as `data.overlong_prompt` says (counted and
    reported). In SFT a set's completion column is read where there is one.
    """
    data, limit = config.data, config.eval.max_rows
    out: dict[str, Dataset] = {}
    for name, path, split in _eval_sources(config):
        if path == GIVEN + name and name in (sets or {}):
            continue
        bad = BadRows(data.bad_rows)
        tables = unread(config, (path,), limit, partial(
            read, path, bad, field=f"eval.sets {name}", splits=(split,), subset=data.subset, revision=data.revision,
            limit=limit))
        out[name] = _load(name, config, tokenizer, eos_id, tables, bad, tools=tools)
    for name, given in (sets or {}).items():
        if name in out or (name == "heldout" and data.eval_fraction) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"eval: the set's name {name!r} is taken, or is not made of letters, digits, '_', '.' and"
                              " '-'")
        bad = BadRows(data.bad_rows)
        tables = from_memory(given, bad, field=f"eval {name}", limit=limit)
        out[name] = _load(name, config, tokenizer, eos_id, tables, bad, tools=tools)
    if config.data.eval_fraction and train is not None:
        out["heldout"] = train.heldout
    elif config.data.eval_fraction:
        tables, _, heldout = _train_rows(config, BadRows(config.data.bad_rows), rows)
        out["heldout"] = _load_heldout(config, tokenizer, eos_id, tables, heldout, tools)
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
    """Raises one DataError for all entries of data.path and eval.sets whose local files or rows are not there."""
    wanted = not rows_given and (config.run.mode != "eval" or config.data.eval_fraction)
    named = [(path, "data.path") for path in config.data.path if wanted]
    named += [(path, f"data.sources.{name}.path") for name, given in config.data.sources.items()
              if "path" in given and config.run.mode != "eval" for path in config_of(config, name).data.path]
    named += [(path, f"eval.sets {name}") for name, path, _ in _eval_sources(config) if name not in sets_given]
    problems = []
    for path, field in named:
        try:
            check_path(path, field)
        except DataError as e:
            problems.append(str(e))
    if problems:
        raise DataError("\n".join(problems))


def _carve(tables: Tables, prompt, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(train rows, held-out rows), in file order: whole groups of equal prompts, drawn until share or number is met.
    prompt: row -> its prompt."""
    groups: dict[str, list[int]] = {}
    for i in range(len(tables)):
        try:
            key = json.dumps(prompt(tables[i][0]), sort_keys=True)
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


def _load(name, config, tokenizer, eos_id, tables, bad, rows=None, targets="optional",
          tools=()) -> Dataset:
    """The data set of some rows (numbers; None = all). targets: as for a Reader, where a run trains on completions."""
    targets = targets if from_rows(config) else "none"
    if targets != "none" and eos_id is None:
        raise ValueError("eos_id is needed to end SFT targets")
    recipe = recipe_of(config)
    kind = scored_reader(config) if recipe.scores else PairReader if recipe.pairs else Reader
    reader = kind(config, tokenizer, targets, tools)
    cache = None
    if config.data.cache:
        cache = Cache(config, tokenizer, tables, rows, eos=eos_id, targets=targets, tools=list(tools))
    ds = None if cache is None else cache.read(name, reader, bad)
    if ds is None:
        ds = Dataset(name, tables, reader, bad)
        _tokenise(ds, config, tokenizer, eos_id, rows, tools)
        if cache is not None:
            cache.write(ds)
    _report(ds, config.data.max_prompt_tokens)
    return ds


def _tokenise(ds: Dataset, config, tokenizer, eos_id, rows, tools) -> None:
    """Fills a data set with the ids of its rows (numbers; None = all)."""
    targets, r = ds.reader.targets, config.rollout
    turns = Demonstrations(config, tokenizer, tools) if ds.reader.all_turns else Steps(ds.reader.template)
    answers = None if targets == "none" else Answers(config, tokenizer, ds.reader.template, eos_id)
    limits = Limits(config.data.max_prompt_tokens, r.max_new_tokens, config.train.max_sequence_tokens,
                    config.data.overlong_prompt, config.data.overlong_completion if targets == "required" else "filter")
    kept, rows = [], list(range(len(ds.tables)) if rows is None else rows)
    for start in range(0, len(rows), CHUNK):
        kept += _chunk(ds, limits, rows[start:start + CHUNK], answers, turns)
    if not kept:
        long = f"too long for data.max_prompt_tokens={limits.prompt}"
        long += f", rollout.max_new_tokens={limits.target}" if targets != "none" else ""
        why = (ds.bad.messages + [f"{w}: {long}; raise it" for w in ds.filtered])[:3]
        raise DataError(f"{ds.name}: no usable row among {len(rows)}" + "".join(f"\n  {w}" for w in why))
    ds.asked = len(rows)
    ds.fill(kept, limits.prompt)


def _content(row: Row) -> bytes:
    """What a row says, for the fingerprint. Raises PromptError for what can be neither tokenised nor written down."""
    try:
        said = [row.prompt, row.completion, row.answer, row.columns, *([row.messages] if row.messages else [])]
        said += [row.rejected] if row.rejected is not None else []
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
    while level := [part for v in level if isinstance(v, dict | list)
                    for part in (v.values() if isinstance(v, dict) else v)]:
        deep += 1
    return deep


def _chunk(ds: Dataset, limits: Limits, numbers: list[int], answers, turns) -> list:
    """Reads and tokenises some rows; applies the length limits. Returns what Dataset.fill takes. answers: Answers,
    where rows have completions. turns: (row with messages, prompt ids) -> (prompt ids, ids behind them, which of these
    count)."""
    rows, template, texts = [], ds.reader.template, []
    for i in numbers:
        where = f"row {i}"
        try:
            raw, where = ds.tables[i]
            row = ds.reader(raw)
            ds.content.update(_content(row))
            said = [(name, answers(row, answer)) for name, answer in (("completion", row.completion),
                    ("rejected completion", row.rejected)) if answer is not None]
            rows.append((i, where, row, [(name, len(texts) + k, text) for k, (name, text) in enumerate(said)]))
            texts += [text for _, text in said]
        except (PromptError, RecursionError) as e:
            ds.bad.add(where, str(e) if isinstance(e, PromptError) else "nested too deeply")
    prompts = template.encode_prompts([row.text for _, _, row, _ in rows])
    known = {row.text: ids for (_, _, row, _), ids in zip(rows, prompts, strict=True)} if template.chat else {}
    ids = answers.ids(texts, known) if texts else []
    kept, no_token = [], template.no_token
    for (i, where, row, said), prompt in zip(rows, prompts, strict=True):
        own = {name: ids[k] for name, k, _ in said}
        target, trained, rejected = own.get("completion"), None, own.get("rejected completion")
        if no_token is not None and no_token in prompt:
            ds.unknown.append((i, prompt.count(no_token) / len(prompt)))
        if not prompt:
            ds.bad.add(where, "the prompt has no tokens")
            continue
        try:
            rendered = prompt
            if row.messages:
                prompt, target, trained = turns(row, prompt)
                _check_turns(template, row, target, trained)
            for name, k, (before, body, _) in said:
                _check_known(template, ids[k], name, body[len(before):])
        except PromptError as e:
            ds.bad.add(where, str(e))
            continue
        target = None if target is None else np.asarray(target, np.int32)
        problem = limits.overlong(prompt, target) or limits.overlong(prompt, rejected, "rejected completion")
        if problem is None:
            kept.append(Kept(i, prompt, target, trained, rejected, piece=prompt != rendered))
        elif pieces := fitted(limits, prompt, target, trained):
            (ds.shortened if limits.completion == "truncate" else ds.split).append(where)
            kept += [Kept(i, *piece, piece=k > 0 or prompt != rendered) for k, piece in enumerate(pieces)]
        elif limits.policy == "error":
            raise DataError(f"{where}: {problem}; raise the limit, or set data.overlong_prompt to 'filter' or "
                            "'truncate_left'")
        else:
            ds.filtered.append(where)
            ds.filtered_rows.append(i)
    return kept


def _check_known(template, ids, name: str, text: str) -> None:
    """Raises PromptError where the model would learn to write the token for unknown text."""
    if template.no_token is not None and template.no_token in ids:
        raise PromptError(f"the tokenizer has no token for {template.unknown_in(text)!r} in the {name}: the model"
                          f" would learn to write {template.tokenizer.unk_token!r}")


def _check_turns(template, row: Row, target, trained) -> None:
    """The same of the answers of a conversation."""
    if template.no_token is None or template.no_token not in np.asarray(target)[np.asarray(trained, bool)]:
        return
    for i, message in enumerate(row.messages):
        for field in ("content", *MORE) if message["role"] == "assistant" else ():
            value = message.get(field) or ""
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            _check_known(template, template.encode([text])[0], f"{field} of message {i}", text)
    _check_known(template, target, "conversation, as the chat template writes it", row.text)


def _report(ds: Dataset, limit: int) -> None:
    rows = ds.asked
    if ds.bad.count:
        log.warning("%s: %d of %d rows are bad and skipped; the first: %s", ds.name, ds.bad.count, rows,
                    "; ".join(ds.bad.messages[:3]))
    if ds.unknown:
        template, (raw, where) = ds.reader.template, ds.tables[ds.unknown[0][0]]
        log.warning("%s: %d of %d prompts hold text that the tokenizer has no token for, e.g. %r in %s; the model sees"
                    " %r instead, on average for %.0f %% of these prompts' tokens. Take data or a model that know each"
                    " other", ds.name, len(ds.unknown), rows, template.unknown_in(ds.reader(raw).text), where,
                    template.tokenizer.unk_token, 100 * np.mean([share for _, share in ds.unknown]))
    shown = ", ".join(ds.filtered[:5]) + (", ..." if len(ds.filtered) > 5 else "")
    if len(ds.filtered) > 0.05 * rows:
        log.warning("%s: %d of %d rows (%.0f %%) are too long and left out (data.max_prompt_tokens=%d): %s; a higher "
                    "limit keeps them", ds.name, len(ds.filtered), rows, 100 * len(ds.filtered) / rows, limit, shown)
    elif ds.filtered:
        log.info("%s: %d of %d rows are too long and left out: %s", ds.name, len(ds.filtered), rows, shown)
    for places, what in ((ds.shortened, "cut"), (ds.split, "split into several rows")):
        if places:
            log.log(logging.WARNING if len(places) > 0.05 * rows else logging.INFO, "%s: %d of %d completions are too "
                    "long and %s (data.overlong_completion): %s", ds.name, len(places), rows, what,
                    ", ".join(places[:5]) + (", ..." if len(places) > 5 else ""))
    if ds.truncated > 0.05 * rows:
        log.warning("%s: %d of %d prompts are cut on the left to data.max_prompt_tokens=%d; a cut question is another "
                    "question", ds.name, ds.truncated, rows, limit)
