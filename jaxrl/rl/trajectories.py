"""Converts between data, engines, rewards and training: prompts -> requests -> trajectories -> reward items, records.

Called by rl.rollouts, rl.evaluation and recipes. Host values only; nothing here samples or runs rewards. Text is
decoded for rewards and people, never re-encoded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.data.images.read import Image
from jaxrl.data.images.source import BLANK
from jaxrl.data.images.thumbnails import file_names
from jaxrl.processes.exchange import decode, encode, gather
from jaxrl.rewards import RewardItem
from jaxrl.rollout import Key, Outcome, Request, Result, SamplingParams, Turn, TurnImage
from jaxrl.telemetry.run_dir import jsonable
from jaxrl.types import FINISH, Pictures, Places, Trajectories


def sampling_params(
    group, max_new_tokens: int, stop=(), stop_token_ids=(), keep_stop=True, min_new_tokens=0
) -> SamplingParams:
    """Returns the SamplingParams of `group`, which is config.rollout or config.eval (they share option names).

    Args:
      max_new_tokens, min_new_tokens: bounds of a completion. stop: stop strings, kept in the text if keep_stop.
      stop_token_ids: tokens that end a completion beyond the model's end-of-text tokens.
    """
    return SamplingParams(
        temperature=group.temperature,
        top_p=group.top_p,
        top_k=group.top_k,
        min_p=group.min_p,
        repetition_penalty=group.repetition_penalty,
        frequency_penalty=group.frequency_penalty,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop=tuple(stop),
        keep_stop=keep_stop,
        stop_token_ids=tuple(stop_token_ids),
    )


def make_requests(
    batch, samples: int, sampling: SamplingParams, root_seed: int, stream: str, step: int, adapter=None, images=None
) -> list[Request]:
    """Returns one Request per (prompt, sample), ordered by prompt.

    Args:
      batch: iterable of (position, Example). samples: completions per prompt. root_seed: run.seed, from which each
        key's seed follows. stream, step: part of the key. adapter: Example -> number of its adapter; None = rows have
        none, or the only one. images: the job's ImageSource, None without images.
    """
    keys = [(Key(stream, step, position, k), example) for position, example in batch for k in range(samples)]
    return [Request(str(key), e.prompt_ids, sampling, key.seed(root_seed), key.prompt, key, e,
                    adapter=0 if adapter is None else adapter(e),
                    pictures=images and Pictures.of([e.images], images)) for key, e in keys]


def collect(requests, results, max_sequence_tokens: int = 0, images=None) -> Trajectories:
    """Builds Trajectories from N Request and their N Result, at least one, in request order.

    A completion is one sequence. An episode continues in one sequence, with the tokens between its turns masked, until
    a turn opens another. The columns are those of types.Trajectories.

    max_sequence_tokens: completions are cut so that each sequence stays within it (finish becomes "length"); 0 = no
    cut. Episodes respect it already. images: the job's ImageSource, None without images.
    """
    with_turns, finish, turns, sizes = any(r.turns for r in results), [], [], []
    for i, (request, result) in enumerate(zip(requests, results, strict=True)):
        size, reason, own = len(result.tokens), result.finish, result.turns
        if not own:
            if max_sequence_tokens and len(request.prompt) + size > max_sequence_tokens:
                size, reason = max_sequence_tokens - len(request.prompt), "length"
            own = (Turn(request.prompt, True, size),)
        finish.append(FINISH.index(reason))
        sizes.append(size)
        turns += [(i, k, turn) for k, turn in enumerate(own)]
    pieces = np.array([(len(turn.added), turn.size) for *_, turn in turns])
    mask = np.repeat(np.tile([False, True], len(turns)), pieces.ravel())

    def column(values, blank, dtype: DTypeLike = np.float32):
        out = np.full((len(mask), *values[0].shape[1:]), blank, dtype)
        out[mask] = np.concatenate([v[:size] for v, size in zip(values, sizes, strict=True)])
        return out

    tokens = column([r.tokens for r in results], 0, np.int32)
    tokens[~mask] = np.concatenate([turn.added for *_, turn in turns])
    columns = {"kept": column([r.log_kept_mass for r in results], 0)}
    width = max((r.support.shape[1] for r in results if r.support is not None), default=0)
    if width:
        none = np.zeros((0, width), np.int32)  # an aborted result may have no token
        columns["support"] = column([none if r.support is None else r.support for r in results], -1, np.int32)
    if routes := [r.routes for r in results if r.routes is not None]:
        columns["routes"] = _routes(results, sizes, turns, routes[0].shape[1])
    adapters = np.repeat(np.array([requests[i].adapter for i, *_ in turns], np.int32), pieces.sum(1))
    columns |= {"adapter": adapters} if adapters.any() else {}
    if with_turns:
        columns |= _turn_columns(turns, pieces, mask)
    opens = [(i, turn) for i, _, turn in turns if turn.opens]
    starts = np.cumsum(pieces.sum(1)) - pieces.sum(1)
    shown = _shown(turns, images) if with_turns else [q.pictures for q in requests]
    return Trajectories(
        tokens=tokens,
        offsets=np.append(starts[[turn.opens for *_, turn in turns]], len(mask)),
        loss_mask=mask,
        logprobs=column([r.logprobs for r in results], 0),
        versions=column([r.versions for r in results], -1, np.int32),
        prompt_lengths=np.array([len(turn.added) for _, turn in opens], np.int32),
        group=np.array([q.group for q in requests], np.int64),
        sample=np.array([q.key.sample for q in requests], np.int32),
        seed=np.array([q.seed for q in requests], np.uint32),
        finish=np.array(finish, np.int8),
        columns=columns,
        trajectory=np.array([i for i, _ in opens]) if with_turns else None,
        prefix=_prefixes(requests, opens) if with_turns else None,
        pictures=Pictures.of(shown, images or next(filter(None, shown))) if any(shown) else None,
    )


def _prefixes(requests, opens) -> np.ndarray:
    """Returns [Q] int, equal for sequences of a group whose prompts have the same tokens and pictures."""
    known: dict[tuple, int] = {}
    keys = ((requests[i].group, turn.added.tobytes(), *(image.number for image in turn.images)) for i, turn in opens)
    return np.array([known.setdefault(key, len(known)) for key in keys])


def _shown(turns, images) -> list[Places | None]:
    """Returns the images of each sequence of episodes. images: the job's ImageSource, which makes the pictures that
    came with results of another process or a checkpoint, too.
    """
    rows, at = [], 0
    for *_, turn in turns:
        if turn.opens:
            rows.append([])
            at = 0
        rows[-1] += [image._replace(first=at + image.first) for image in turn.images]
        at += len(turn.added) + turn.size
    return [images.places_of(row) if row else None for row in rows]


def _routes(results, sizes, turns, width: int) -> np.ndarray:
    """Returns [T, W] int16, the experts of every token; -1 where an engine did not report them."""
    added, out = np.zeros(len(results), int), []
    np.add.at(added, [i for i, *_ in turns], [len(turn.added) for *_, turn in turns])
    for result, rest, size in zip(results, added, sizes, strict=True):
        known = result.routes if result.routes is not None else np.full((rest + size, width), -1, np.int16)
        out.append(known[:rest + size])
    return np.concatenate(out)


def _turn_columns(turns, pieces, mask) -> dict[str, np.ndarray]:
    """Returns the columns turn, reward and anchor: of the turn that sampled each token."""
    out = {"turn": np.full(len(mask), -1, np.int32), "reward": np.zeros(len(mask)),
           "anchor": np.zeros(len(mask), np.int64)}
    sizes = pieces[:, 1]
    out["turn"][mask] = np.repeat([k for _, k, _ in turns], sizes)
    out["anchor"][mask] = np.repeat(np.array([turn.anchor for *_, turn in turns], np.int64), sizes)
    last = np.cumsum(pieces.sum(1))[sizes > 0] - 1
    out["reward"][last] = np.array([turn.reward for *_, turn in turns])[sizes > 0]
    return out


def reward_items(traj: Trajectories, examples, decode, prefix: str = "", texts=None, images=None):
    """Returns ([completion text], [RewardItem]), one of each per trajectory.

    A completion's text is its last turn, for rewards and people; it is never encoded again.

    Args:
      traj: N trajectories. examples: Example of each trajectory.
      decode: [ids of each completion] -> [text], as returned by data.completion_texts.
      prefix: data.response_prefix, which rewards see before the text. texts: the texts, if they are known already.
      images: the job's ImageSource, None in a job of text.
    """
    turn, ids, contexts = traj.columns.get("turn"), [], []
    for last, at in zip([*(traj.first[1:] - 1), traj.num_sequences - 1], traj.sampled(), strict=True):
        own = at if turn is None else at[turn[at] == turn[at].max(initial=0)]
        start, stop = traj.offsets[last], traj.offsets[last + 1]  # of its last sequence
        ids.append(traj.tokens[own])
        contexts.append(traj.tokens[start:own[0] if len(own) else stop])
    texts = decode(ids) if texts is None else texts
    rows = zip(examples, texts, traj.finish, traj.group, traj.sample, ids, contexts, strict=True)
    return texts, [
        RewardItem(prompt=example.prompt, completion=prefix + text, finish=FINISH[finish], group=int(group),
                   sample=int(sample), token_ids=tokens.tolist(), context_ids=before,
                   columns={"answer": example.answer, **example.columns}, functions=getattr(example, "rewards", None),
                   images=images and images.row_files(getattr(example, "own_images", None) or example.images))
        for example, text, finish, group, sample, tokens, before in rows]


def records(traj: Trajectories, examples, texts, result, advantages=None, episodes=None, kept=None) -> list[dict]:
    """Returns one JSON-able record per trajectory: prompt, completion, reference answer, rewards, sampled tokens.

    `prompt` is the text that the model saw, `asked` the row's prompt where it differs; `tokens` are all sampled tokens,
    `logprobs` their log-probs by the engine (nats, 6 digits), `version` and `last_version` the weights of the first and
    the last (-1 without tokens), `score` the raw total and `advantage` (None where they are not finite), `reward` a
    record of RewardResult.records, `finish` stop, length or abort, `images` the files of its images, "" for those
    without one; `group`, `sample`, `seed` and `source` say whose it is.

    Args:
      examples, texts: Example and completion text of each. result: RewardResult. advantages: [N] float or None.
      episodes: of `episodes.conversations`, or None. kept: of data.images.thumbnails.save.

    Raises ValueError for lists of other lengths.
    """
    out, rows = [], zip(examples, texts, result.records(), traj.sampled(), _finite(result.total), strict=True)
    for i, (example, text, scored, at, score) in enumerate(rows):
        out.append({
            "group": int(traj.group[i]),
            "sample": int(traj.sample[i]),
            "seed": int(traj.seed[i]),
            "prompt": example.prompt_text,
            **({} if example.prompt == example.prompt_text else {"asked": example.prompt}),
            "completion": text,
            "answer": example.answer,
            "score": score,
            "reward": scored,
            "finish": FINISH[traj.finish[i]],
            "tokens": traj.tokens[at].tolist(),
            "logprobs": [round(float(x), 6) for x in traj.logprobs[at]],
            "version": int(traj.versions[at[0]]) if len(at) else -1,
            "last_version": int(traj.versions[at[-1]]) if len(at) else -1,
            **({"source": source} if (source := getattr(example, "source", "")) else {}),
        })
    if traj.pictures is not None:
        out = [record | {"images": names} for record, names in zip(out, file_names(traj, kept or {}), strict=True)]
    if advantages is not None:
        out = [record | {"advantage": advantage} for record, advantage in zip(out, _finite(advantages), strict=True)]
    if episodes is not None:
        out = [record | {"episode": pieces} for record, pieces in zip(out, episodes, strict=True)]
    return out


def _finite(numbers) -> list:
    """Returns the numbers as a list, with None for those that are not finite: JSON cannot express them."""
    return [number if np.isfinite(number) else None for number in np.asarray(numbers).tolist()]


# name in the bytes -> field of Result
COLUMNS = {"tokens": "tokens", "logprobs": "logprobs", "kept": "log_kept_mass", "versions": "versions"}


def results_to_bytes(results: list[Result], meta) -> bytes:
    """Encodes engine results and a JSON-able `meta` as bytes, for other processes and checkpoints. Where some results
    have a support, one without must have no tokens."""
    columns = COLUMNS if results else {}
    flat = {name: np.concatenate([getattr(r, own) for r in results]) for name, own in columns.items()}
    if support := [r.support for r in results if r.support is not None]:  # an aborted result may have none
        flat["support"] = np.concatenate(support)
    if routes := [r.routes for r in results if r.routes is not None]:
        flat["routes"] = np.concatenate(routes)
        flat["routes_of"] = np.array([-1 if r.routes is None else len(r.routes) for r in results], np.int64)
    rows = [[r.id, r.finish, r.seed, len(r.tokens)] for r in results]
    if any(r.turns or r.outcome for r in results):
        flat["added"] = np.concatenate([np.zeros(0, np.int32), *(t.added for r in results for t in r.turns)])
        rows = [[*row, [[len(t.added), *t[1:-1], [image[:3] for image in t.images]] for t in r.turns],
                 r.outcome and dataclasses.asdict(r.outcome)] for row, r in zip(rows, results, strict=True)]
        shown = (image for r in results for t in r.turns for image in t.images if image.held is not None)
        if held := {image.number % BLANK: image.held.encoded for image in shown}:
            flat |= {"shown": np.frombuffer(b"".join(held.values()), np.uint8),
                     "shown_of": np.array(list(held), np.int64),
                     "shown_sizes": np.array([len(one) for one in held.values()], np.int64)}
    return encode([meta, rows], flat)


def results_from_bytes(data: bytes) -> tuple[list[Result], Any]:
    """Decodes the bytes of `results_to_bytes`. Returns (list of Result, meta), equal to what was encoded, except that
    images have their encoded files alone, and that an aborted result without a support gets an empty one where others
    have one."""
    (meta, rows), flat = decode(data)
    out, at, added, routed, held, begin = [], 0, 0, 0, {}, 0
    for number, size in zip(flat.get("shown_of", ()), flat.get("shown_sizes", ()), strict=True):
        held[int(number)] = Image(encoded=flat["shown"][begin:begin + int(size)].tobytes())
        begin += int(size)
    routes_of = flat["routes_of"].tolist() if "routes_of" in flat else [-1] * len(rows)
    for (id_, finish, seed, size, *episode), count in zip(rows, routes_of, strict=True):
        part = slice(at, at + size)
        support = flat["support"][part] if "support" in flat else None
        routes = None if count < 0 else flat["routes"][routed:routed + count]
        routed, turns = routed + max(count, 0), []
        for more, *rest in episode[0] if episode else ():
            images = tuple(TurnImage(first, tuple(grid), number, held.get(number % BLANK))
                           for first, grid, number in (rest[6] if len(rest) > 6 else ()))
            turns.append(Turn._make((flat["added"][added:added + more], *rest[:6], images)))
            added += more
        outcome = Outcome(**episode[1]) if episode and episode[1] else None
        columns = {own: flat[name][part] for name, own in COLUMNS.items()}
        out.append(Result(id_, **columns, finish=finish, seed=seed, support=support, routes=routes,
                          turns=tuple(turns), outcome=outcome))
        at += size
    return out, meta


def exchange_results(session, what: str, results: list[Result], rows, meta=None) -> tuple[dict, list]:
    """Gathers every process's results. Collective.

    Args:
      session: run.session.Session. what: tag of the call, the same on all processes.
      results: of this process. rows: a JSON-able list per result. meta: JSON-able.

    Returns:
      ({request id: (result, *its row)} over all processes, [meta of each process]).
    """
    sent = gather(session.peers, f"{session.collective_tag}: {what}", results_to_bytes(results, [list(rows), meta]))
    parts = [results_from_bytes(data) for data in sent]
    known = {r.id: (r, *row) for results, (rows, _) in parts for r, row in zip(results, rows, strict=True)}
    return known, [meta for _, (_, meta) in parts]


def recorded_outcomes(old: list[dict], traj: Trajectories, examples, texts, by: str) -> list[dict | None]:
    """Finds the rewards that an interrupted attempt at the same step already computed, as [N] records or None.

    A record is reused if prompt, sample, sampled tokens, their text and the reference answer are equal, and the same
    code scored it under the same options.

    Args:
      old: rows of `records`, written by any version of jaxrl. examples, texts: of each trajectory.
      by: RewardPool.key() of this run.
    """
    known = {(r.get("group"), r.get("sample")): r for r in old}
    out = []
    for i, (example, text, at) in enumerate(zip(examples, texts, traj.sampled(), strict=True)):
        r = known.get((int(traj.group[i]), int(traj.sample[i])), {})
        now = {"prompt": example.prompt_text, "completion": text, "answer": jsonable(example.answer),
               "tokens": traj.tokens[at].tolist()}
        reward = r.get("reward") or {}
        same = all(name in r and r[name] == value for name, value in now.items()) and reward.get("by") == by
        out.append(reward if same else None)
    return out
