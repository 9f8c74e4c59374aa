"""Loads a run's data sets: read, tokenized, within the length limits, with a held-out share and named eval sets."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config.registry import from_rows, recipe_of
from jaxrl.data.cache import Cache, lazy_tables
from jaxrl.data.chat_template import EXTRA_FIELDS, PromptError
from jaxrl.data.dataset import Dataset, Reader, Row, Tables, TokenizedRow, prompt_column
from jaxrl.data.demonstrations import CompletionRenderer, Demonstrations
from jaxrl.data.images.decode import as_text
from jaxrl.data.mixture import Mixture, select_rows, source_config
from jaxrl.data.overlong import Limits, fit_completion
from jaxrl.data.pairs import PairReader, holdout_prompt
from jaxrl.data.scored import Steps, scored_reader
from jaxrl.data.sources import IN_MEMORY, BadRows, DataError, check_path, from_memory, read
from jaxrl.data.stream import data_seed
from jaxrl.errors import ConfigError

log = logging.getLogger(__name__)
MAX_NESTING = 100  # levels of lists and tables in a row
CHUNK = 1024  # rows tokenised in one call


def load_train(config, tokenizer, eos_id: int | None = None, rows=None, tools=(), images=None) -> Dataset | Mixture:
    """Loads the training set, `rows` or `data.path`, according to `data.*`.

    With `data.eval_fraction`, about a share (below 1) or number of the rows becomes `.heldout`; rows with equal prompts
    stay on one side, so no held-out prompt is trained on. Of the held-out rows the first eval.max_rows are kept (0 =
    all); the others are not used.

    Args:
      config, tokenizer: of the job.
      eos_id: token that ends supervised completions; recipes that train on the data's completions need it (ValueError
        without it), rl ignores it.
      rows: a list of dicts or a datasets.Dataset; None reads `data.path`.
      tools: JSON schemas passed to the chat template.
      images: ImageSource; None reads no images.

    Returns:
      A Dataset, or a Mixture with `data.sources`.

    Raises:
      DataError, ConfigError: no usable rows, or options that do not fit the data.
    """
    data = config.data
    if data.sources:
        return _load_sources(config, tokenizer, eos_id, rows, tools, images)
    if not data.path and rows is None:
        raise ConfigError("data.path is empty: name a file, a folder or a hub id")
    bad = BadRows(data.bad_rows)
    tables, numbers, heldout = _train_rows(config, bad, rows, images)
    train = _load("train", config, tokenizer, eos_id, tables, bad, numbers, targets="required", tools=tools,
                  images=images)
    if data.eval_fraction:
        train.heldout = _load_heldout(config, tokenizer, eos_id, tables, heldout, tools, images)
    return train


def _load_sources(config, tokenizer, eos_id, rows, tools, images) -> Mixture:
    """Loads the sets of data.sources, each with its options."""
    parts, rewards, known = {}, {}, {}
    for name in sorted(config.data.sources):
        options, own = config.data.sources[name], source_config(config, name)
        d, bad = own.data, BadRows(own.data.bad_rows)
        key = ("path" in options, d.path, d.split, d.subset, d.revision, d.max_rows, d.bad_rows, _kept(own, images))
        if key not in known:  # sources that differ in `where`, or in columns of text, share one read
            known[key], *_ = _train_rows(own, bad, None if "path" in options else rows, images)
        tables = known[key]
        numbers = select_rows(tables, options["where"], name) if options.get("where") else None
        parts[name] = _load(name, own, tokenizer, eos_id, tables, bad, numbers, targets="required", tools=tools,
                            images=images)
        if options.get("rewards"):
            rewards[name] = (options["rewards"],) if isinstance(options["rewards"], str) else tuple(options["rewards"])
    return Mixture(parts, rewards)


def _train_rows(config, bad, rows=None, images=None):
    """Returns (tables of data.path or of the rows in memory, numbers of the rows to train on, numbers
    of the held-out rows).
    """
    data = config.data
    if rows is not None:
        tables = from_memory(rows, bad, field="data", limit=data.max_rows, keep=_kept(config, images))
    else:
        tables = lazy_tables(config, data.path, data.max_rows, partial(
            read, data.path, bad, field="data.path", splits=data.split, subset=data.subset, revision=data.revision,
            limit=data.max_rows, keep=_kept(config, images)))
    if not data.eval_fraction:
        return tables, None, []
    pairs = recipe_of(config).pairs

    def prompt(row):
        own = row.get(prompt_column(row, data.prompt_column))
        own = holdout_prompt(row, data, images is not None) if pairs else own
        if not images:
            return [own]
        videos = [row[name] for name in images.video_columns if row.get(name) is not None]
        return [own, row.get(images.column_of(row)), *videos]

    return tables, *_carve(tables, prompt, data.eval_fraction, data_seed(config))


def _kept(config, images) -> tuple[str, ...]:
    """Returns the columns whose binary values are kept: those of images, and of prompts with image parts."""
    data, pairs = config.data, recipe_of(config).pairs
    if not images:
        return ()
    shown = (*images.columns, *images.video_columns)
    return (*shown, data.prompt_column, "messages", *(data.chosen_column, data.rejected_column) * pairs)


def _load_heldout(config, tokenizer, eos_id, tables, rows, tools, images) -> Dataset:
    rows = rows[:config.eval.max_rows or None]
    return _load("heldout", config, tokenizer, eos_id, tables, BadRows(config.data.bad_rows), rows, tools=tools,
                 images=images)


def load_eval_sets(config, tokenizer, eos_id: int | None = None, train: Dataset | None = None, sets=None, rows=None,
                   tools=(), images=None) -> dict[str, Dataset]:
    """Loads the sets of `eval.sets`, then those of `sets`, and 'heldout' if `data.eval_fraction` > 0.

    Rows keep their order. None is repeated, and none of the first eval.max_rows is dropped, except as
    `data.overlong_prompt` and `data.bad_rows` say (counted and reported). Supervised jobs read a set's completion
    column where it has one; `data.overlong_prompt` decides there of completions that are too long, too.

    Args:
      config, tokenizer: of the job.
      eos_id: token that ends supervised completions; recipes that train on the data's completions need it (ValueError
        without it), rl ignores it.
      tools: JSON schemas passed to the chat template.
      train: the training set whose `.heldout` is used; None splits it again, from `rows` if the training
        rows are in memory.
      sets: name -> rows, a list of dicts or a datasets.Dataset.
      images: ImageSource; None reads no images.

    Returns:
      name -> Dataset, each of at most eval.max_rows rows (0 = all).

    Raises:
      DataError, ConfigError: a set without usable rows, an entry of eval.sets that is not name=path, or a name that is
      used twice or has other characters than letters, digits, "_", "." and "-"."""
    data, limit = config.data, config.eval.max_rows
    out: dict[str, Dataset] = {}
    for name, path, split in _eval_sources(config):
        if path == IN_MEMORY + name and name in (sets or {}):
            continue
        bad = BadRows(data.bad_rows)
        tables = lazy_tables(config, (path,), limit, partial(
            read, path, bad, field=f"eval.sets {name}", splits=(split,), subset=data.subset, revision=data.revision,
            limit=limit, keep=_kept(config, images)))
        out[name] = _load(name, config, tokenizer, eos_id, tables, bad, tools=tools, images=images)
    for name, rows_of_set in (sets or {}).items():
        if name in out or (name == "heldout" and data.eval_fraction) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"eval: the set's name {name!r} is used twice, or has characters other than letters, "
                              "digits, '_', '.' and '-'; rename the set")
        bad = BadRows(data.bad_rows)
        tables = from_memory(rows_of_set, bad, field=f"eval {name}", limit=limit, keep=_kept(config, images))
        out[name] = _load(name, config, tokenizer, eos_id, tables, bad, tools=tools, images=images)
    if config.data.eval_fraction and train is not None and train.heldout is not None:
        out["heldout"] = train.heldout
    elif config.data.eval_fraction:
        tables, _, heldout = _train_rows(config, BadRows(config.data.bad_rows), rows, images)
        out["heldout"] = _load_heldout(config, tokenizer, eos_id, tables, heldout, tools, images)
    return out


def _eval_sources(config) -> list[tuple[str, str, str]]:
    """Returns (name, path, split) of each entry of eval.sets."""
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
    """Checks that local files of data.path, data.sources and eval.sets exist and are of a known kind, and that rows
    in memory that they name are passed. Raises one DataError for all problems, ConfigError for an entry of eval.sets
    that is not name=path or whose name is used twice. In run.mode=eval the training rows are checked only with
    data.eval_fraction, and sources not at all.

    rows_given, sets_given: whether training rows, and which eval sets, are passed from Python."""
    wanted = not rows_given and (config.run.mode != "eval" or config.data.eval_fraction)
    named = [(path, "data.path") for path in config.data.path if wanted]
    named += [(path, f"data.sources.{name}.path") for name, options in config.data.sources.items()
              if "path" in options and config.run.mode != "eval" for path in source_config(config, name).data.path]
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
    """Returns (train rows, held-out rows) in file order: whole groups of equal prompts, drawn until the share
    or number is reached.

    Args:
      prompt: row -> its prompt.
    """
    groups: dict[str, list[int]] = {}
    for i in range(len(tables)):
        try:
            key = json.dumps(prompt(tables[i][0]), sort_keys=True, default=as_text)
        except (RecursionError, ValueError):  # a bad row, which is reported when it is read
            key = f"row {i}"
        groups.setdefault(key, []).append(i)
    keys, wanted, taken = list(groups), round(fraction * len(tables) if fraction < 1 else fraction), set()
    if not 0 < wanted < len(tables) or len(keys) < 2:
        raise ConfigError(f"data.eval_fraction={fraction} of {len(tables)} rows ({len(keys)} different prompts) leaves "
                          "one side empty; choose another fraction or number")
    for k in np.random.default_rng([seed, 0x68656C64]).permutation(len(keys))[:-1]:
        if len(taken) >= wanted:
            break
        taken.update(groups[keys[k]])
    return [i for i in range(len(tables)) if i not in taken], sorted(taken)


def _load(name, config, tokenizer, eos_id, tables, bad, rows=None, targets="optional",
          tools=(), images=None) -> Dataset:
    """Loads the data set of some rows.

    Args:
      rows: row numbers, None for all.
      targets: as for Reader, in jobs that train on completions.
    """
    targets = targets if from_rows(config) else "none"
    if targets != "none" and eos_id is None:
        raise ValueError("eos_id is needed to end SFT targets")
    recipe = recipe_of(config)
    kind = scored_reader(config) if recipe.scores else PairReader if recipe.pairs else Reader
    reader = kind(config, tokenizer, targets, tools)
    reader.images = images
    cache = None
    if config.data.cache:
        rule = images and dataclasses.asdict(images.rule)
        cache = Cache(config, tokenizer, tables, rows, eos=eos_id, targets=targets, tools=list(tools), rule=rule)
    ds = None if cache is None else cache.read(name, reader, bad)
    if ds is None:
        ds = Dataset(name, tables, reader, bad)
        _tokenise(ds, config, tokenizer, eos_id, rows, tools)
        if cache is not None and not ds.image_files:  # a key does not tell of files that change
            cache.write(ds)
    _report(ds, config.data.max_prompt_tokens)
    return ds


def _tokenise(ds: Dataset, config, tokenizer, eos_id, rows, tools) -> None:
    """Fills a data set with the ids of its rows (numbers; None for all)."""
    targets, r = ds.reader.targets, config.rollout
    images = ds.reader.images and ds.reader.images.tokens
    turns: Any = Steps(ds.reader.template)
    if ds.reader.all_turns:
        turns = Demonstrations(config, tokenizer, tools, images)
    completions = None if targets == "none" else CompletionRenderer(config, tokenizer, ds.reader.template, eos_id)
    limits = Limits(config.data.max_prompt_tokens, r.max_new_tokens, config.train.max_sequence_tokens,
                    config.data.overlong_prompt, config.data.overlong_completion if targets == "required" else "filter")
    tokenized, rows = [], list(range(len(ds.tables)) if rows is None else rows)
    for start in range(0, len(rows), CHUNK):
        tokenized += _chunk(ds, limits, rows[start:start + CHUNK], completions, turns)
    if not tokenized:
        why = (ds.bad_rows.messages + [f"{reason}; raise the limit" for reason in ds.filtered_why])[:3]
        raise DataError(f"{ds.name}: no usable row among {len(rows)}" + "".join(f"\n  {w}" for w in why))
    ds.rows_read = len(rows)
    ds.fill(tokenized, limits.prompt)


def _content(row: Row) -> bytes:
    """Returns a row's content for the fingerprint. Raises PromptError if it can be neither tokenized nor serialized."""
    try:
        values = [row.prompt, row.completion, row.answer, row.columns, *([row.messages] if row.messages else [])]
        values += [row.rejected] if row.rejected is not None else []
        values += [[image.content for image in row.images.images]] if row.images else []
        if _depth(values) > MAX_NESTING:
            raise RecursionError
        return json.dumps(values, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise PromptError(f"half a surrogate pair, {e.object[e.start]!r}, which is not valid text, after "
                          f"{e.object[max(0, e.start - 20):e.start]!r}") from None
    except RecursionError:
        raise PromptError(f"nested deeper than {MAX_NESTING} levels") from None
    except ValueError as e:
        raise PromptError(f"a value that cannot be serialized as JSON: {e}") from None


def _depth(value) -> int:
    """Returns the nesting depth of lists and dicts in a value."""
    level, deep = [value], 0
    while level := [part for v in level if isinstance(v, dict | list)
                    for part in (v.values() if isinstance(v, dict) else v)]:
        deep += 1
    return deep


class ReadRow(NamedTuple):
    """A row before it is tokenized. number: of the row. where: "file:line".

    row: what Reader returned. completions: (name, its number among the chunk's texts, result of CompletionRenderer).
    grids: of its images, see ImageSource.grids; () without images."""

    number: int
    where: str
    row: Row
    completions: list
    grids: Any


def _read(ds: Dataset, numbers: list[int], render) -> tuple[list[ReadRow], list]:
    """Reads rows, counting bad ones. Returns (the good ones, the texts of all their completions)."""
    rows, texts, images = [], [], ds.reader.images
    for i in numbers:
        where = f"row {i}"
        try:
            raw, where = ds.tables[i]
            row = ds.reader(raw, where)
            grids = images.grids(row.images) if images and row.images else ()
            ds.image_files |= row.images is not None and any(image.path for image in row.images.images)
            ds.content.update(_content(row))
            if (row.answer if ds.reader.targets == "none" else row.completion) == "":  # such as a CSV's empty cell
                ds.empty.append(where)
            completions = [(name, render(row, completion)) for name, completion in (("completion", row.completion),
                    ("rejected completion", row.rejected)) if completion is not None]
            named = [(name, len(texts) + k, text) for k, (name, text) in enumerate(completions)]
            rows.append(ReadRow(i, where, row, named, grids))
            texts += [text for _, text in completions]
        except (PromptError, RecursionError) as e:
            ds.bad_rows.add(where, str(e) if isinstance(e, PromptError) else "nested too deeply")
    return rows, texts


def _chunk(ds: Dataset, limits: Limits, numbers: list[int], render, turns) -> list:
    """Reads and tokenizes some rows and applies the length limits.

    Args:
      render: CompletionRenderer, if rows have completions.
      turns: (row with messages, prompt ids) -> (prompt ids, ids after the prompt, which of these are trained on).

    Returns:
      TokenizedRows for `Dataset.fill`.
    """
    template, (rows, texts) = ds.reader.template, _read(ds, numbers, render)
    prompts = template.encode_prompts([one.row.text for one in rows])
    known = {one.row.text: ids for one, ids in zip(rows, prompts, strict=True)} if template.chat else {}
    ids = render.ids(texts, known) if texts else []
    out, no_token = [], template.no_token
    for (i, where, row, completions, grids), prompt in zip(rows, prompts, strict=True):
        own = {name: ids[k] for name, k, _ in completions}
        target, trained, rejected, images = own.get("completion"), None, own.get("rejected completion"), ()
        if no_token is not None and no_token in prompt:
            ds.unknown_prompts.append((i, prompt.count(no_token) / len(prompt)))
        if not prompt:
            ds.bad_rows.add(where, "the prompt has no tokens")
            continue
        try:
            if ds.reader.images and row.images:
                prompt, firsts = ds.reader.images.expand(prompt, row.images, grids)
                images = np.column_stack([firsts, grids[:len(firsts)]])
            rendered, in_prompt = prompt, len(images)
            if row.messages:
                prompt, target, trained, images = _turns(ds, turns, row, prompt, images, grids)
                _check_turns(template, row, target, trained)
            for name, k, (before, body, _) in completions:
                _check_known(template, ids[k], name, body[len(before):])
        except PromptError as e:
            ds.bad_rows.add(where, str(e))
            continue
        target = None if target is None else np.asarray(target, np.int32)
        problem = limits.overlong(prompt, target) or limits.overlong(prompt, rejected, "rejected completion")
        remedy = "raise the limit, or set data.overlong_prompt to 'filter' or 'truncate_left'"
        if problem and len(images) and ds.reader.images:
            problem += f"; {sum(ds.reader.images.rule.tokens(tuple(grid)) for grid in grids)} tokens are images'"
            smaller = "data.video_max_frames" if (np.asarray(images)[:, 3] != -1).any() else "data.image_max_pixels"
            remedy = f"raise the limit, lower {smaller}, or set data.overlong_prompt=filter"
        if problem is None:
            out.append(TokenizedRow(i, prompt, target, trained, rejected, prompt != rendered, images))
        elif len(images) == in_prompt and (pieces := fit_completion(limits, prompt, target, trained)):
            (ds.shortened if limits.completion == "truncate" else ds.split).append(where)
            out += [TokenizedRow(i, *piece, prompt_cut=k > 0 or prompt != rendered, images=images)
                    for k, piece in enumerate(pieces)]
        elif limits.policy == "error":
            raise DataError(f"{where}: {problem}; {remedy}")
        else:
            ds.filtered.append(where)
            ds.filtered_why += [f"{where}: {problem}"] * (len(ds.filtered_why) < 3)
            ds.filtered_rows.append(i)
    return out


def _turns(ds: Dataset, turns, row: Row, prompt, images, grids) -> tuple:
    """Returns (ids of the prompt, ids after it, which of these are trained on, images of both) of a conversation.

    images: of the prompt, as TokenizedRow.images. grids: of all images of the row.
    """
    if not (ds.reader.images and row.images):
        return *turns(row, prompt), images
    later = grids[len(images):]
    counts = [ds.reader.images.rule.tokens(tuple(grid)) for grid in later]
    prompt, target, trained, firsts = turns.with_images(row, prompt, counts)
    behind = np.column_stack([np.array(firsts, np.int64), later[:len(firsts)]])
    return prompt, target, trained, np.concatenate([np.reshape(images, (-1, 4)), behind]).astype(np.int64)


def _check_known(template, ids, name: str, text: str) -> None:
    """Raises PromptError if the model would be trained to write the token for unknown text."""
    if template.no_token is not None and template.no_token in ids:
        raise PromptError(f"the tokenizer has no token for {template.unknown_in(text)!r} in the {name}: the model"
                          f" would learn to write {template.tokenizer.unk_token!r}")


def _check_turns(template, row: Row, target, trained) -> None:
    """Raises PromptError as `_check_known` does, for the assistant messages of a conversation."""
    if template.no_token is None or template.no_token not in np.asarray(target)[np.asarray(trained, bool)]:
        return
    for i, message in enumerate(row.messages or ()):
        for field in ("content", *EXTRA_FIELDS) if message["role"] == "assistant" else ():
            value = message.get(field) or ""
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            _check_known(template, template.encode([text])[0], f"{field} of message {i}", text)
    _check_known(template, target, "conversation, as the chat template writes it", row.text)


def _report(ds: Dataset, limit: int) -> None:
    rows = ds.rows_read
    if ds.bad_rows.count:
        log.warning("%s: %d of %d rows are bad and skipped; the first ones: %s", ds.name, ds.bad_rows.count, rows,
                    "; ".join(ds.bad_rows.messages[:3]))
    if ds.unknown_prompts:
        template, (raw, where) = ds.reader.template, ds.tables[ds.unknown_prompts[0][0]]
        log.warning("%s: %d of %d prompts hold text that the tokenizer has no token for, e.g. %r in %s; the model sees"
                    " %r instead, on average for %.0f %% of these prompts' tokens. Use a tokenizer that covers this"
                    " text, or other data", ds.name, len(ds.unknown_prompts), rows,
                    template.unknown_in(ds.reader(raw).text), where, template.tokenizer.unk_token,
                    100 * np.mean([share for _, share in ds.unknown_prompts]))
    if 0 < len(ds.empty) < len(ds):  # all: data without reference answers
        what, means = ("completion", "the model learns to end at once")
        if ds.reader.targets == "none":
            what, means = ("reference answer", "rewards compare its completions with ''")
        log.warning("%s: %d of %d rows have an empty %s, so %s: %s; take them out of the data unless that is meant",
                    ds.name, len(ds.empty), rows, what, means, ", ".join(ds.empty[:3]))
    shown = ", ".join(ds.filtered[:5]) + (", ..." if len(ds.filtered) > 5 else "")
    shown += f" ({ds.filtered_why[0].removeprefix(f'{ds.filtered[0]}: ')})" if ds.filtered_why else ""
    if len(ds.filtered) > 0.05 * rows:
        log.warning("%s: %d of %d rows (%.0f %%) are too long and dropped (data.max_prompt_tokens=%d): %s; a higher "
                    "limit keeps them", ds.name, len(ds.filtered), rows, 100 * len(ds.filtered) / rows, limit, shown)
    elif ds.filtered:
        log.info("%s: %d of %d rows are too long and dropped: %s", ds.name, len(ds.filtered), rows, shown)
    for places, what in ((ds.shortened, "cut"), (ds.split, "split into several rows")):
        if places:
            log.log(logging.WARNING if len(places) > 0.05 * rows else logging.INFO, "%s: %d of %d completions are too "
                    "long and %s (data.overlong_completion): %s", ds.name, len(places), rows, what,
                    ", ".join(places[:5]) + (", ..." if len(places) > 5 else ""))
    if ds.truncated > 0.05 * rows:
        log.warning("%s: %d of %d prompts are cut on the left to data.max_prompt_tokens=%d; the model sees "
                    "incomplete prompts", ds.name, ds.truncated, rows, limit)
