"""A tiny model and a synthetic batch of groups, shared by the training tests."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import FrozenConfigDict

from jaxrl import models, training
from jaxrl.config.load import default_config, editable
from jaxrl.resolve.spec import resolve
from jaxrl.rollout import Key, Request, Result, Turn
from jaxrl.training.layout import RowShapes
from jaxrl.types import Trajectories

HF = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


NESTED = {"kl_coef": "kl.coef", "kl_estimator": "kl.estimator", "mismatch": "mismatch.correction", "mismatch_cap": "mismatch.cap",
          "mismatch_low": "mismatch.low", "sequence_delta": "mismatch.sequence_delta", "old": "old_logprobs"}


@functools.cache
def grpo_options():
    return FrozenConfigDict({**editable(resolve(default_config(), engine="jax")).algorithm, "user": {}})


def policy_objective(base=None, **changes):
    """The policy's objective with GRPO's options and no mismatch correction, or `base`, with `changes` of either."""
    if base is None:
        base = training.PolicyGradient(options=grpo_options())
        changes = {"mismatch": "none", "old": "current"} | changes
    own = {name: changes.pop(name) for name in list(changes) if name in {f.name for f in dataclasses.fields(base)}}
    options = base.options.to_dict()
    for name, value in changes.items():
        value = {"column": "recompute"}.get(value, value) if name == "old" else value
        *group, leaf = NESTED.get(name, name).split(".")
        node = options[group[0]] if group else options
        assert leaf in node, name
        node[leaf] = value
    return dataclasses.replace(base, options=FrozenConfigDict(options), **own)


def tiny_model(dtype=jnp.float32, remat="none"):
    return models.build(HF, compute_dtype=dtype, scan_layers=False, remat=remat, attention="auto")


def params_of(model, dtype=jnp.float32, seed=0):
    return jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(seed)))


def batch_of_groups(groups=5, size=4, seed=0, vocab=61, max_prompt=9, max_answer=14):
    """Groups with equal prompts and answers of different lengths, random tokens, log-probs around -log(vocab)."""
    rng = np.random.default_rng(seed)
    tokens, mask, prompts, offsets = [], [], [], [0]
    for _ in range(groups):
        prompt = rng.integers(1, vocab, rng.integers(2, max_prompt + 1))
        for _ in range(size):
            answer = rng.integers(1, vocab, rng.integers(1, max_answer + 1))
            tokens.append(np.concatenate([prompt, answer]))
            mask.append(np.arange(len(tokens[-1])) >= len(prompt))
            prompts.append(len(prompt))
            offsets.append(offsets[-1] + len(tokens[-1]))
    total, n = offsets[-1], groups * size
    flat_mask = np.concatenate(mask)
    noise = lambda: np.where(flat_mask, -np.log(vocab) + 0.3 * rng.normal(size=total), 0)  # noqa: E731
    traj = Trajectories(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.array(offsets, np.int64),
        loss_mask=flat_mask,
        logprobs=noise(),
        versions=np.zeros(total, np.int32),
        prompt_lengths=np.array(prompts, np.int32),
        group=np.repeat(np.arange(groups), size),
        sample=np.tile(np.arange(size), groups).astype(np.int32),
        seed=np.arange(n, dtype=np.uint32),
        finish=np.zeros(n, np.int8),
    )
    columns = {
        "advantage": np.repeat(rng.normal(size=n), traj.lengths),
        "behaviour": traj.logprobs,
        "old": noise(),
        "ref": noise(),
    }
    return traj, columns


def conversation(rewrite: bool):
    """(requests, results) of episodes of 1 to 3 turns, in groups, with observations between them. `rewrite`: the history of a
    turn lost as many tokens, so that it is no longer what was sampled."""
    random, requests, results = np.random.default_rng(0), [], []
    ids = lambda low, high: random.integers(1, 61, random.integers(low, high)).astype(np.int32)  # noqa: E731
    openings = [ids(2, 6) for _ in range(3)]
    for g, k in itertools.product(range(3), range(2)):
        history = added = openings[g]
        key, turns, sampled = Key("train", 0, g, k), [], []
        requests.append(Request(str(key), history, seed=key.seed(0), group=g, key=key))
        for turn in range(1 + (g + 2 * k) % 3):
            opens = rewrite or not turn
            tokens = ids(1, 5)
            turns.append(Turn(history[turn:] if opens else added, opens, len(tokens)))
            logprobs = -random.random(len(tokens)).astype(np.float32)
            sampled.append((tokens, logprobs, 0 * logprobs, np.full(len(tokens), turn, np.int32)))
            added = ids(1, 4)
            history = np.concatenate([history, tokens, added])
        columns = [np.concatenate(c) for c in zip(*sampled, strict=True)]
        results.append(Result(str(key), *columns, "stop", 0, turns=tuple(turns)))
    return requests, results


def cut(traj):
    """The same trajectories with each turn as a sequence of its own, whose prompt is all tokens before it."""
    turn, mask = traj.columns["turn"], traj.loss_mask
    source, offsets, prompts, trajectory = [], [0], [], []
    for i, at in enumerate(traj.sampled()):
        start = traj.spans[i]
        for k in np.unique(turn[at]):
            own = at[turn[at] == k]
            source.append((np.arange(start, own[-1] + 1), own[0] - start))
            offsets.append(offsets[-1] + len(source[-1][0]))
            prompts.append(own[0] - start)
            trajectory.append(i)
    where = np.concatenate([w for w, _ in source])
    fresh = np.concatenate([np.arange(len(w)) >= p for w, p in source]) & mask[where]
    known = {}
    prefix = [known.setdefault(traj.tokens[w[:p]].tobytes(), len(known)) for w, p in source]
    return where, dataclasses.replace(
        traj, tokens=traj.tokens[where], offsets=np.array(offsets), loss_mask=fresh,
        logprobs=np.where(fresh, traj.logprobs[where], 0),
        versions=np.where(fresh, traj.versions[where], -1), prompt_lengths=np.array(prompts, np.int32),
        columns={name: column[where] for name, column in traj.columns.items()}, trajectory=np.array(trajectory),
        prefix=np.array(prefix))


LONGEST = 9 + 14
LAYOUTS = {  # name -> (row length, rows per microbatch, shared prompts)
    "padded": (LONGEST + 1, 20, False),
    "padded_wide": (96, 20, False),
    "packed": (48, 16, False),
    "packed_shared": (48, 16, True),
    "packed_shared_2_microbatches": (48, 4, True),
    "packed_shared_8_microbatches": (48, 1, True),
    "one_row": (512, 1, True),
}
LOSS = policy_objective(
    kl_coef=0.1, entropy_coef=0.01, old="column", mismatch="token_tis", chunk=32, max_grad_norm=0.0
)


def gradient(model, params, traj, columns, weights, layout, dtype, loss=LOSS, dirty=False):
    """The accumulated gradient of one optimizer step, via the functions training uses."""
    update = training.make_update(model, optax.sgd(1.0), lambda i: 1.0, loss)
    trainable, frozen = training.partition(params, (".*",), ())
    state = training.init_state(trainable, frozen, optax.sgd(1.0))

    def batches():
        for micro in layout.minibatches[0].microbatches:
            batch = training.pack(traj, micro, columns, weights, dtype)
            if dirty:
                pad = batch.segments == 0
                batch = batch.replace(
                    tokens=np.where(pad, 7, batch.tokens), positions=np.where(pad, 3, batch.positions)
                )
                unused = batch.weights["token"] == 0
                batch = batch.replace(
                    columns={k: np.where(unused, 1e30, v).astype(dtype) for k, v in batch.columns.items()},
                    targets=np.where(unused, 5, batch.targets),
                )
            yield jax.tree.map(jnp.asarray, batch)

    return update.gradients(state, batches())


def layout_of(traj, name):
    length, rows, share = LAYOUTS[name]
    shapes = RowShapes((length,), ((rows,),))
    return training.make_layout(traj.sizes, shapes, share_prompts=share)


def worst(a, b):
    """Largest relative L2 difference over tensors."""
    return max(float(np.linalg.norm(np.asarray(a[k] - b[k])) / np.linalg.norm(np.asarray(b[k]))) for k in b)


def one_at_a_time(traj):
    """The truth: each sequence in a microbatch of its own, without neighbours or shared prompts."""
    blocks = [training.layout.Block((i,), int(traj.lengths[i])) for i in range(traj.num_sequences)]
    micro = tuple(training.layout.Microbatch(LONGEST, ((b,),)) for b in blocks)
    return training.Layout((training.Minibatch(np.arange(traj.num_sequences), micro),), 0, 1)
