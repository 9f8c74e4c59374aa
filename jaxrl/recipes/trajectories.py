"""Between rooms: prompts -> requests -> trajectories -> reward items and records. Host values only."""

from __future__ import annotations

import numpy as np

from jaxrl.processes.exchange import decode, encode
from jaxrl.rewards import RewardItem
from jaxrl.rollout import Request, Result, SamplingParams, request_seed
from jaxrl.telemetry.run_dir import jsonable
from jaxrl.types import FINISH, Trajectories


def sampling_params(
    group, max_new_tokens: int, stop=(), stop_token_ids=(), keep_stop=True, min_new_tokens=0, greedy=False
) -> SamplingParams:
    """SamplingParams from config.rollout or config.eval (they share option names); `greedy` takes the likeliest token."""
    return SamplingParams(
        temperature=0.0 if greedy else group.temperature,
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
    batch, samples: int, sampling: SamplingParams, root_seed: int, stream: str, step: int
) -> list[Request]:
    """One request per (prompt, sample), ordered; `batch` is [(position, Example)]. Seeds are folded by name, step, prompt, sample."""
    return [
        Request(
            id=f"{stream}/{step}/{position}/{k}",
            prompt=example.prompt_ids,
            sampling=sampling,
            seed=request_seed(root_seed, stream, step, position, k),
            group=position,
        )
        for position, example in batch
        for k in range(samples)
    ]


def collect(requests, results, max_sequence_tokens: int = 0) -> Trajectories:
    """Ragged trajectories from answered requests, in request order.

    With `max_sequence_tokens`, answers are cut so that prompt + answer stay within it (finish becomes "length").
    """
    parts = {k: [] for k in ("tokens", "mask", "logprobs", "kept", "versions")}
    offsets, finish = [0], []
    for request, result in zip(requests, results, strict=True):
        prompt, answer = len(request.prompt), len(result.tokens)
        reason = result.finish
        if max_sequence_tokens and prompt + answer > max_sequence_tokens:
            answer, reason = max_sequence_tokens - prompt, "length"
        zeros = np.zeros(prompt, np.float32)
        parts["tokens"].append(np.concatenate([request.prompt, result.tokens[:answer]]).astype(np.int32))
        parts["mask"].append(np.arange(prompt + answer) >= prompt)
        parts["logprobs"].append(np.concatenate([zeros, result.logprobs[:answer]]).astype(np.float32))
        parts["kept"].append(np.concatenate([zeros, result.kept[:answer]]).astype(np.float32))
        parts["versions"].append(
            np.concatenate([zeros.astype(np.int32) - 1, result.versions[:answer]]).astype(np.int32)
        )
        offsets.append(offsets[-1] + prompt + answer)
        finish.append(FINISH.index(reason))
    groups = np.array([r.group for r in requests], np.int64)
    sample = np.array([int(r.id.rsplit("/", 1)[1]) for r in requests], np.int32)
    flat = {k: np.concatenate(v) for k, v in parts.items()}
    columns = {"kept": flat["kept"]}
    width = max((r.support.shape[1] for r in results if r.support is not None), default=0)
    if width:
        columns["support"] = np.full((offsets[-1], width), -1, np.int32)
        for result, start, prompt, end in zip(results, offsets, map(len, (r.prompt for r in requests)), offsets[1:], strict=False):
            columns["support"][start + prompt:end] = result.support[: end - start - prompt]
    return Trajectories(
        tokens=flat["tokens"],
        offsets=np.array(offsets, np.int64),
        loss_mask=flat["mask"],
        logprobs=flat["logprobs"],
        versions=flat["versions"],
        prompt_lengths=np.array([len(r.prompt) for r in requests], np.int32),
        group=groups,
        sample=sample,
        seed=np.array([r.seed for r in requests], np.uint32),
        finish=np.array(finish, np.int8),
        turns=np.ones(len(requests), np.int32),
        columns=columns,
    )


def answers(traj: Trajectories, tokenizer) -> list[str]:
    """Decoded answers without special tokens; for rewards and people, never re-encoded."""
    ids = [
        traj.tokens[traj.offsets[i] + traj.prompt_lengths[i] : traj.offsets[i + 1]] for i in range(traj.num_sequences)
    ]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def reward_items(traj: Trajectories, examples, texts, prefix: str = "") -> list[RewardItem]:
    """One item per sequence; `examples` is parallel to the sequences. `prefix` is data.response_prefix, part of the answer for rewards."""
    items = []
    for i, (example, text) in enumerate(zip(examples, texts, strict=True)):
        start = traj.offsets[i] + traj.prompt_lengths[i]
        columns = dict(example.columns)
        columns.setdefault("answer", example.answer)
        items.append(
            RewardItem(
                prompt=example.prompt,
                completion=prefix + text,
                columns=columns,
                finish=FINISH[traj.finish[i]],
                group=int(traj.group[i]),
                sample=int(traj.sample[i]),
                token_ids=traj.tokens[start : traj.offsets[i + 1]].tolist(),
            )
        )
    return items


def trial_items(dataset, tokenizer, prefix: str = "") -> list[RewardItem]:
    """The first two rows as if they had been answered with their reference answers; for trying reward functions."""
    items = []
    for i in range(min(2, len(dataset))):
        example = dataset[i]
        columns = {"answer": example.answer, **example.columns}
        text = prefix + ("" if example.answer is None else str(example.answer))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        items.append(RewardItem(prompt=example.prompt, completion=text, columns=columns, group=i, token_ids=ids))
    return items


def records(traj: Trajectories, examples, texts, result, advantages=None) -> list[dict]:
    """One JSON-able record per sequence: what was asked, answered, and how it was scored; `version` and `last_version` are those
    of its first and last token."""
    out = []
    for i, (example, text, scored) in enumerate(zip(examples, texts, result.records(), strict=True)):
        start, end = int(traj.offsets[i] + traj.prompt_lengths[i]), int(traj.offsets[i + 1])
        record = {
            "group": int(traj.group[i]),
            "sample": int(traj.sample[i]),
            "seed": int(traj.seed[i]),
            "prompt": example.prompt_text,
            "completion": text,
            "answer": example.answer,
            "score": _number(result.total[i]),
            "reward": scored,
            "finish": FINISH[traj.finish[i]],
            "tokens": traj.tokens[start:end].tolist(),
            "logprobs": [round(float(x), 6) for x in traj.logprobs[start:end]],
            "version": int(traj.versions[start]) if end > start else -1,
            "last_version": int(traj.versions[end - 1]) if end > start else -1,
        }
        if advantages is not None:
            record["advantage"] = _number(advantages[i])
        out.append(record)
    return out


COLUMNS = ("tokens", "logprobs", "kept", "versions")


def results_to_bytes(results: list[Result], meta) -> bytes:
    """Results on their way to other processes, with `meta` (JSON-able) beside them."""
    flat = {name: np.concatenate([getattr(r, name) for r in results]) for name in COLUMNS} if results else {}
    if results and results[0].support is not None:
        flat["support"] = np.concatenate([r.support for r in results])
    return encode([meta, [[r.id, r.finish, r.seed, len(r.tokens)] for r in results]], flat)


def results_from_bytes(data: bytes) -> tuple[list[Result], object]:
    """(results, meta) of `results_to_bytes`."""
    (meta, rows), flat = decode(data)
    out, at = [], 0
    for name, finish, seed, size in rows:
        part = slice(at, at + size)
        support = flat["support"][part] if "support" in flat else None
        out.append(Result(name, *(flat[column][part] for column in COLUMNS), finish, seed, support))
        at += size
    return out, meta


def recorded_outcomes(old: list[dict], traj: Trajectories, examples, texts, by: str) -> list[dict | None]:
    """Outcomes of an earlier try at the same step: where prompt, sample, sampled tokens, their text and the reference answer are
    the same, and the same code scored them under the same options (`by`: RewardPool.key()); else None. old: rows of `records`,
    of whatever version of jaxrl."""
    known = {(r.get("group"), r.get("sample")): r for r in old}
    out = []
    for i, (example, text) in enumerate(zip(examples, texts, strict=True)):
        r = known.get((int(traj.group[i]), int(traj.sample[i])), {})
        start = traj.offsets[i] + traj.prompt_lengths[i]
        now = {"prompt": example.prompt_text, "completion": text, "answer": jsonable(example.answer),
               "tokens": traj.tokens[start : traj.offsets[i + 1]].tolist()}
        reward = r.get("reward") or {}
        same = all(name in r and r[name] == value for name, value in now.items()) and reward.get("by") == by
        out.append(reward if same else None)
    return out


def _number(x):
    x = float(x)
    return x if np.isfinite(x) else None
