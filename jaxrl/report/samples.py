"""Selects completions for the report, token by token if the run's tokenizer is available."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

import jaxrl
from jaxrl.errors import ConfigError
from jaxrl.records import files
from jaxrl.report.runs import Run
from jaxrl.report.thin import short, shorts

STEPS = 8                # of training, evenly spaced, the first and the last among them
CHARACTERS = 900_000     # of all runs' completions together
PICTURE_BYTES = 4_000_000  # of all runs' images together
MAX_TEXT_CHARS = 20_000         # characters of one text, half from its beginning and half from its end
MOST_TOKENS = 4_000      # of one completion
EMBEDDED = Path(jaxrl.__file__).parent / "data" / "embedded"


def samples(runs: list[Run], steps: list[int] | None = None) -> list[dict]:
    """Returns [{run, what: "training" or "held-out <set>", step, of: total number, rows}]: whole prompt groups while
    there is room, groups with different rewards first. A row is a dict of one completion, its text in `pieces`
    (TokenTexts.pieces); `run` is an index.

    All parts share CHARACTERS; a first group that exceeds its part's share is cut to some of its completions, and a
    text is cut in its middle to MAX_TEXT_CHARS. Parts without rows are left out.

    Args:
      runs: whose first and last evaluations are shown, too. steps: requested training steps, of which those without a
        file are left out; None for at most STEPS evenly spaced ones.
    """
    chosen = [(i, *place) for i, run in enumerate(runs) for place in _places(run, steps)]
    speak, out = [TokenTexts(run) for run in runs], []
    for number, (i, what, step, file) in enumerate(chosen):
        room = (CHARACTERS - sum(part["size"] for part in out)) // (len(chosen) - number)
        records = runs[i].rows(file)
        known = token_values(runs[i], step) if what == "training" else {}
        records = [r | {"columns": known.get((r.get("group"), r.get("sample")), {})} for r in records]
        rows, used = _rows(records, room, speak[i])
        out.append({"run": i, "what": what, "step": step, "of": len(records), "rows": rows, "size": used})
    return [{k: v for k, v in part.items() if k != "size"} for part in out if part["rows"]]


def pictures(runs: list[Run], shown: list[dict]) -> list[dict[str, str]]:
    """Returns of each run {file: data URI} of the images of `samples`, while there is room. Their PNG files are read
    from the run's images/ alone."""
    out: list[dict[str, str]] = [{} for _ in runs]
    room = PICTURE_BYTES
    for part in shown:
        run, kept = runs[part["run"]], out[part["run"]]
        for name in dict.fromkeys(name for row in part["rows"] for name in row.get("images", ())):
            path = run.folder / files.THUMBNAILS / Path(name).name
            if name in kept or not path.is_file() or path.stat().st_size * 4 // 3 > room:
                continue
            kept[name] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
            room -= len(kept[name])
    return out


def token_values(run: Run, step: int) -> dict[tuple, dict[str, list]]:
    """Returns (group, sample) -> {advantages, gaps: per sampled token, in order} of a recorded step
    (jaxrl.replay); {} without a complete record. A gap is the proximal policy's log-prob minus the engine's, if
    the trainer scored it.
    """
    try:
        path = files.steps(run.folder / files.FOLDER).get(step)
        arrays = files.read(path).arrays if path else {}
    except (ConfigError, OSError):  # a replay says what is wrong with it
        return {}
    if not arrays:
        return {}
    sequences = np.repeat(np.arange(len(arrays["traj/offsets"]) - 1), np.diff(arrays["traj/offsets"]))
    whose = arrays.get("traj/trajectory")
    whose = sequences if whose is None or whose.ndim == 0 else whose[sequences]
    columns = {"advantages": arrays.get("column/advantage")}
    if "column/old" in arrays:
        columns["gaps"] = arrays["column/old"] - arrays["traj/logprobs"]
    out = {}
    for i, key in enumerate(zip(arrays["traj/group"].tolist(), arrays["traj/sample"].tolist(), strict=True)):
        at = np.flatnonzero((whose == i) & arrays["traj/loss_mask"])
        out[key] = {name: shorts(x[at]) for name, x in columns.items() if x is not None}
    return out


def _places(run: Run, asked: list[int] | None) -> list[tuple[str, int, Path]]:
    def of(folder, **more):
        found = []
        for path in sorted((run.folder / folder).glob("step_*.jsonl")):
            number, _, name = path.stem.removeprefix("step_").partition("_")
            found += [(name, int(number), path)] if number.isdigit() else []
        return found

    train, held_out = of("rollouts"), of("eval")
    if asked is not None:
        train = [place for place in train if place[1] in asked]
    elif len(train) > STEPS:
        train = [train[i] for i in np.unique(np.linspace(0, len(train) - 1, STEPS).round().astype(int))]
    ends = {}
    for name, step, path in held_out:  # the first and the last evaluation of each set
        first, _ = ends.get(name, ((name, step, path), None))
        ends[name] = (first, (name, step, path))
    shown = list(dict.fromkeys(place for pair in ends.values() for place in pair))
    return [("training", step, path) for _, step, path in train] + [
        (f"held-out {name}".strip(), step, path) for name, step, path in shown]


def _rows(records: list[dict], room: int, speak: TokenTexts) -> tuple[list[dict], int]:
    grouped: dict[object, list[dict]] = {}
    for record in records:
        grouped.setdefault(record.get("group"), []).append(record)
    same = lambda group: len({str(r.get("score")) for r in group}) <= 1  # noqa: E731
    rows, used = [], 0
    for group in sorted(grouped.values(), key=same):  # stable
        made = [_row(record, speak) for record in group]
        size = sum(len(str(row)) for row in made)
        if rows and used + size > room:
            break
        while len(made) > 1 and used + size > room:  # a group that is too long by itself
            size -= len(str(made.pop()))
        rows, used = rows + made, used + size
    return rows, used


def _row(record: dict, speak: TokenTexts) -> dict:
    given = record.get("reward")
    reward = given if isinstance(given, dict) else {}
    row = {"group": record.get("group"), "sample": record.get("sample"), "prompt": _cut(record.get("prompt", "")),
           "finish": record.get("finish"), "length": len(record.get("tokens") or ()),
           "parts": reward.get("parts") or {},
           "version": [record.get("version"), record.get("last_version")]}
    row |= {name: _number(record.get(name)) for name in ("score", "advantage") if record.get(name) is not None}
    row |= {name: record[name] for name in ("accurate", "source") if name in record}
    row |= {"images": images} if (images := [str(name) for name in record.get("images") or ()]) else {}
    row |= {"answer": _cut(record["answer"])} if record.get("answer") is not None else {}
    if outcomes := {k: v for k, v in (reward.get("outcomes") or {}).items() if v != "ok"}:
        row["outcomes"] = outcomes
    return row | {"pieces": speak.pieces(record)}


def _number(value):
    return short(value) if isinstance(value, int | float) else None


def _cut(text) -> str:
    text = text if isinstance(text, str) else str(text)
    half = MAX_TEXT_CHARS // 2
    return text if len(text) <= MAX_TEXT_CHARS else (
        f"{text[:half]}\n[... {len(text) - MAX_TEXT_CHARS} characters left out ...]\n{text[-half:]}")


class TokenTexts:
    """Texts of a run's tokens, by its tokenizer (`tokenizer_file`); without one that can be read, completions are shown
    as plain text.
    """

    def __init__(self, run: Run):
        self._tokenizer: Any = None  # the run's, where its file can be read
        if file := tokenizer_file(run):
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception:  # written by another version: text will do
                self._tokenizer = None

    def pieces(self, record: dict) -> list[dict]:
        """Returns what follows the prompt: [{text, trained, turn, opens, reward}], those that the record has, and if
        tokens spell exactly this text {tokens: [text], logprobs: [nats]} instead of text, and for recorded steps
        {advantages, gaps}. `trained` is False for text inserted between turns; `opens`: a new sequence begins.

        record: one of rollouts/ or eval/, with `columns` from `token_values` if its step was recorded."""
        told = record.get("episode")
        if not isinstance(told, list) or not told:
            told = [{"text": record.get("completion", ""), "trained": True}]
        else:
            told = told[not told[0].get("trained"):]
        spelt = self._spelt(record, told) if self._tokenizer is not None else None
        out = []
        for piece in told:
            one = {k: piece[k] for k in ("trained", "turn", "opens") if piece.get(k) is not None}
            one |= {"reward": _number(piece["reward"])} if piece.get("reward") else {}
            tokens = spelt.pop(0) if spelt and piece.get("trained") else None
            out.append(one | (tokens or {"text": _cut(piece.get("text", ""))}))
        return out

    def _spelt(self, record: dict, told: list[dict]) -> list[dict] | None:
        """Returns one {tokens, logprobs} per trained piece; None if the tokens do not spell the pieces' text."""
        ids, values = record.get("tokens") or [], record.get("logprobs") or []
        if not ids or len(ids) != len(values) or len(ids) > MOST_TOKENS:
            return None
        if "episode" not in record and self._decode(ids) != record.get("completion"):
            return None
        out, at = [], 0
        for piece in (p for p in told if p.get("trained")):
            texts, whole, stop = [], "", len(ids)
            if "episode" in record:
                whole = piece.get("text", "")
            start, said = at, ""
            while at < stop and ("episode" not in record or said != whole):
                texts.append(self._next(ids, start, at))
                said += texts[-1]
                at += 1
            if "episode" in record and said != whole:
                return None
            more = {k: x[start:at] for k, x in (record.get("columns") or {}).items() if len(x) == len(ids)}
            out.append({"tokens": texts, "logprobs": shorts(values[start:at])} | more)
        return out if at == len(ids) else None

    def _decode(self, ids: list[int]) -> str:
        """Returns the text of a completion's ids, without special tokens at its end."""
        decode = self._tokenizer.decode
        while ids and not decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        return decode(ids, skip_special_tokens=False)

    def _next(self, ids: list[int], start: int, at: int) -> str:
        """Returns the text that token `at` adds to that of the tokens since `start`; "" within a character that
        a later token completes.

        The spelling of a token depends on a few tokens before it (a space in front of a word).
        """
        first = max(start, at - 8)
        before = self._tokenizer.decode(ids[first:at], skip_special_tokens=False)
        now = self._tokenizer.decode(ids[first:at + 1], skip_special_tokens=False)
        open_ = lambda text: len(text) - len(text.rstrip("\ufffd"))  # noqa: E731
        kept = before[:len(before) - open_(before)]
        if open_(now) and at + 1 < len(ids):
            now = now[:len(now) - open_(now)]
        return now[len(kept):] if now.startswith(kept) else now[len(before):]


def tokenizer_file(run: Run) -> Path | None:
    """Returns a tokenizer file of the run's exports, of export* the last by name, else that of model.tokenizer or
    model.path: of a folder, of jaxrl's own, or of the hub's download cache; None if there is none. Nothing is
    downloaded.
    """
    own = [*sorted(run.folder.glob("export*/tokenizer.json"), reverse=True),
           *run.folder.glob("*/export/tokenizer.json")]
    if own:
        return own[0]
    name = str(run.config.get("model.tokenizer") or run.config.get("model.path") or "")
    if name.startswith("jaxrl://"):
        path = EMBEDDED / name.removeprefix("jaxrl://") / "tokenizer.json"
    else:
        path = Path(name) / "tokenizer.json"
    if name and path.is_file():
        return path
    if name.count("/") <= 1 and name:  # of the hub: only what was downloaded before
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(name, "tokenizer.json")
        except ValueError:  # no name of the hub
            return None
        return Path(found) if isinstance(found, str) else None
    return None
