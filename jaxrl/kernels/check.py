"""Whether what a device computes is what the reference computes: every implementation of every op, on small cases.

The cases are those in which kernels go wrong: several sequences in a row, a shared prompt, padding with large keys and
values, windows, idle slots. An implementation is asked by its own name, so that nothing steps in for it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxrl.kernels import attention as attention_op
from jaxrl.kernels import experts as experts_op
from jaxrl.kernels import recurrence as recurrence_op
from jaxrl.kernels.attention.cached import api as cached
from jaxrl.kernels.attention.packed import api as packed
from jaxrl.kernels.experts import api as experts
from jaxrl.kernels.logprob.api import logprob_and_entropy
from jaxrl.kernels.platform import platform
from jaxrl.kernels.recurrence import api as recurrences
from jaxrl.kernels.recurrence import chunks_of
from jaxrl.records import sealed

log = logging.getLogger("jaxrl")
# Largest difference from the reference in fp32, as a share of the reference's largest value. Rounding stays a tenth of
# these or less; a wrong mask, a lost block or a stale sum is of the order of 1.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
POISON = 8.0  # of what nobody may see
ROW, WINDOW = 256, 40


class Verdict(NamedTuple):
    """The result of checking one implementation of an op against the reference.

    op, name: the op, as a text, and the implementation. state: right, wrong (another result), failed (an error),
    refused (does not serve the case). error: largest difference as a share of the reference's largest value. text: why,
    if it is not right."""

    op: str
    name: str
    state: str
    error: float = 0.0
    text: str = ""


class Heads(NamedTuple):
    """The sizes of attention: query heads, key-value heads, head size."""

    queries: int = 4
    groups: int = 2
    size: int = 64


def judged(op: str, name: str, dtype, compute, expected) -> Verdict:
    """Compares the arrays of compute() with those of expected(); returns a Verdict, with the text of an error or a
    refusal.

    The error is the largest over all arrays of max |difference| / max |expected|, each within its array; NaN is wrong.

    op, name: for the Verdict. dtype: whose TOLERANCE bounds the error. compute, expected: functions that return pytrees
    of equal structure; what expected() raises is not caught."""
    try:
        found = jax.device_get(compute())
    except NotImplementedError as e:
        return Verdict(op, name, "refused", text=str(e))
    except Exception as e:  # compilers and devices raise of all kinds
        return Verdict(op, name, "failed", text=f"{type(e).__name__}: {e}"[:500])
    tree = list(zip(jax.tree.leaves(found), jax.tree.leaves(jax.device_get(expected())), strict=True))
    shares = [np.abs(np.asarray(a, np.float64) - b).max() / max(np.abs(b).max(), 1e-30)
              for a, b in ((a, np.asarray(b, np.float64)) for a, b in tree)]
    error, bound = float(np.max(shares)), TOLERANCE[jnp.dtype(dtype).name]
    right = error <= bound  # not so for nan
    return Verdict(op, name, "right" if right else "wrong", error, "" if right else
                   f"off by {error:.2g} of the largest value, {bound:g} are allowed in {jnp.dtype(dtype).name}")


def _normal(seed: int, *shape, dtype) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def packed_ids() -> packed.Ids:
    """Returns the packed.Ids, int32 [2, ROW], of two rows: a prompt that two completions share; two sequences of their
    own. Both end with padding."""
    segments, prefixes, positions = (np.zeros((2, ROW), np.int32) for _ in range(3))
    for row, (start, stop, segment, prefix, first) in [
            (0, (0, 60, 1, 0, 0)), (0, (60, 130, 2, 1, 60)), (0, (130, 230, 3, 1, 60)),
            (1, (0, 127, 1, 0, 0)), (1, (127, 200, 2, 0, 0))]:
        segments[row, start:stop], prefixes[row, start:stop] = segment, prefix
        positions[row, start:stop] = np.arange(first, first + stop - start)
    ids = [jnp.asarray(x) for x in (positions, segments, prefixes)]
    return packed.Ids(ids[0], ids[0], ids[1], ids[1], ids[2])


def packed_attention(name: str, dtype, heads: Heads = Heads(), softcap: float = 0.0, sinks: bool = False,
                     reach: bool = False) -> Verdict:
    """Checks one implementation of attention, forward and gradients, without a window and with one; returns a Verdict.

    Rows are those of `packed_ids`; padding is poisoned.

    Args:
      name: a key of packed.IMPLEMENTATIONS. dtype: of queries, keys and values, a key of TOLERANCE.
      heads: sizes. softcap: cap on the scores, 0 = none. sinks: whether heads have sinks.
      reach: every other 20 positions see each other."""
    ids, real = packed_ids(), packed_ids().q_segments > 0
    if reach:
        at = ids.q_positions
        ids = ids._replace(q_reach=jnp.where(at // 20 % 2 == 1, at // 20 * 20 + 19, at))
    poison = jnp.where(real, 1.0, POISON)[..., None, None]
    q = _normal(0, 2, ROW, heads.queries, heads.size, dtype=dtype)
    k, v = ((_normal(i, 2, ROW, heads.groups, heads.size, dtype=dtype) * poison).astype(dtype) for i in (1, 2))
    ct = jnp.where(real[..., None, None], _normal(3, *q.shape, dtype=dtype), 0)
    own = _normal(4, heads.queries, dtype=jnp.float32) if sinks else None

    def run(implementation, window, *qkv):
        out, back = jax.vjp(lambda *x: packed.IMPLEMENTATIONS[implementation](
            *x, ids, window=window, softcap=softcap, scale=heads.size ** -0.5, chosen=True, sinks=own), *qkv)
        return jnp.where(real[..., None, None], out, 0), back(ct.astype(out.dtype))

    def all_windows(implementation, to):
        args = [x.astype(to) for x in (q, k, v)]
        return [jax.jit(functools.partial(run, implementation, window))(*args) for window in (0, WINDOW)]

    def expected():
        with jax.default_matmul_precision("highest"):
            return all_windows("reference", jnp.float32)

    with jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else "default"):
        return judged("attention in rows", name, dtype, lambda: all_windows(name, dtype), expected)


def cached_attention(name: str, dtype, heads: Heads = Heads(), softcap: float = 0.0, sinks: bool = False) -> Verdict:
    """Checks one implementation of decoding attention, without a window and with one; returns a Verdict.

    One query per slot over a cache. What lies after a slot's position is poisoned, one slot is idle.

    name: a key of cached.IMPLEMENTATIONS. dtype: of queries and cache, a key of TOLERANCE. heads: sizes. softcap: cap
    on the scores, 0 = none. sinks: whether heads have sinks."""
    positions = jnp.asarray([0, 1, 63, 64, 130, ROW - 1, 200, ROW], jnp.int32)[:, None]
    live, slots = positions[:, 0] < ROW, len(positions)
    behind = jnp.where(jnp.arange(ROW)[None] > positions, POISON, 1.0)[None, ..., None]
    q = _normal(0, slots, 1, heads.queries, heads.size, dtype=dtype)
    k, v = ((_normal(i, 1, slots, ROW, heads.groups * heads.size, dtype=dtype) * behind).astype(dtype) for i in (1, 2))
    own = _normal(4, heads.queries, dtype=jnp.float32) if sinks else None

    def run(implementation, window, *qkv):
        shared = {"shared": None} if implementation in cached.WORK else {}
        out = cached.IMPLEMENTATIONS[implementation](*qkv, positions, 0, window=window, softcap=softcap,
                                                     scale=heads.size ** -0.5, sinks=own, **shared)
        return jnp.where(live[:, None, None, None], out, 0)

    def both(implementation, to):
        args = [x.astype(to) for x in (q, k, v)]
        return [jax.jit(functools.partial(run, implementation, window))(*args) for window in (0, WINDOW)]

    def expected():
        with jax.default_matmul_precision("highest"):
            return both("reference", jnp.float32)

    with jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else "default"):
        return judged("attention over a cache", name, dtype, lambda: both(name, dtype), expected)


def logprobs(dtype) -> Verdict:
    """Checks chunked log-prob and entropy from hidden states, and their gradients; returns a Verdict.

    dtype: of hidden states and head, a key of TOLERANCE."""
    hidden, head = _normal(0, 2, 96, 64, dtype=dtype), _normal(1, 64, 1000, dtype=dtype) / 8
    targets = jnp.asarray(np.random.default_rng(2).integers(0, 1000, (2, 96)), jnp.int32)
    valid = jnp.arange(96)[None] < jnp.asarray([[96], [50]])

    def run(implementation, *x):
        out, back = jax.vjp(lambda h, w: logprob_and_entropy(h, w, targets, valid, chunk=64,
                                                             implementation=implementation), *x)
        return out, back(jax.tree.map(jnp.ones_like, out))

    def expected():
        with jax.default_matmul_precision("highest"):
            return jax.jit(functools.partial(run, "reference"))(hidden.astype(jnp.float32), head.astype(jnp.float32))

    return judged("log-probs", "chunked", dtype,
                  lambda: jax.jit(functools.partial(run, "chunked"))(hidden, head), expected)


def gated(gate, up):
    """Returns silu(gate) * up, elementwise: the default activation of a checked layer."""
    return jax.nn.silu(gate) * up


class Experts(NamedTuple):
    """The sizes of a layer of experts: hidden size, an expert's width, its activation and the name of that, whether
    products have biases, whether experts have a gate."""

    size: int = 64
    width: int = 64
    activation: Callable = gated
    called: str = "silu"
    biases: bool = False
    gate: bool = True


def expert_layer(name: str, dtype, layer: Experts = Experts()) -> Verdict:
    """Checks output and gradients of one implementation of a layer of experts; returns a Verdict.

    Four experts, at most two for a token, of which one has several blocks of rows and one has none.

    name: reference or a key of experts.IMPLEMENTATIONS. dtype: of tokens and weights, a key of TOLERANCE."""
    tokens, count, (size, width, activation, _, biases, gate) = 200, 4, layer
    x, draw = _normal(0, tokens, size, dtype=dtype), np.random.default_rng(5)
    other = np.where(np.arange(tokens) < 20, 1, np.where(np.arange(tokens) < 150, 3, -1))
    ids = jnp.asarray(np.stack([np.zeros(tokens), other], axis=1), jnp.int32)
    gates = jnp.asarray(draw.uniform(size=(tokens, 2)), jnp.float32)
    shapes = ((count, size, width),) * (1 + gate) + ((count, width, size),)
    weights = [(_normal(i, *shape, dtype=jnp.float32) / shape[1] ** 0.5).astype(dtype)
               for i, shape in enumerate(shapes, 1)]
    weights += [_normal(i, count, shape[2], dtype=dtype) for i, shape in enumerate(shapes, 4) if biases]
    ct = _normal(7, tokens, size, dtype=dtype)

    def run(implementation, x, gates, *weights):
        def call(x, gates, *w):
            w = w if gate else (None, *w)
            return experts.experts(x, ids, gates, *w[:3], activation=activation, biases=w[3:],
                                   implementation=implementation)

        if implementation not in ("reference", "blocks"):  # nothing steps in for it
            experts.IMPLEMENTATIONS[implementation](x, weights, activation=activation)
        out, back = jax.vjp(call, x, gates, *weights)
        return out, back(ct.astype(out.dtype))

    def expected():
        with jax.default_matmul_precision("highest"):
            return jax.jit(functools.partial(run, "reference"))(*(a.astype(jnp.float32) for a in (x, gates, *weights)))

    return judged("experts", name, dtype, lambda: jax.jit(functools.partial(run, name))(x, gates, *weights), expected)


class Recurrence(NamedTuple):
    """The sizes of a recurrent layer: value heads of a key head, key size, value size, whether it has a delta."""

    repeats: int = 2
    key: int = 64
    value: int = 64
    delta: bool = True


def recurrent_layer(name: str, dtype, layer: Recurrence = Recurrence()) -> Verdict:
    """Checks output, last state and gradients of one implementation of a recurrent layer; returns a Verdict.

    Two key heads, two rows of 18 and 17 chunks: a prompt that three completions share, then padding; two sequences of
    their own. Padding is poisoned.

    name: a key of recurrences.IMPLEMENTATIONS. dtype: of the values, a key of TOLERANCE; the rest is fp32."""
    segments, prefixes = np.zeros((2, 2, 1024), np.int32)
    for row, start, stop, segment, prefix in [
            (0, 0, 200, 1, 0), (0, 200, 500, 2, 1), (0, 500, 1000, 3, 1), (0, 1000, 1010, 4, 1),
            (1, 0, 127, 1, 0), (1, 127, 1024, 2, 0)]:
        segments[row, start:stop], prefixes[row, start:stop] = segment, prefix
    real, (repeats, key, value, delta) = jnp.asarray(segments > 0), layer
    spread = lambda x: jnp.where(real.reshape(2, 1024, *(1,) * (x.ndim - 2)), x, POISON)  # noqa: E731
    q, k = (_normal(i, 2, 1024, 2, key, dtype=jnp.float32) for i in (0, 1))
    q, k = (spread(x / jnp.linalg.norm(x, axis=-1, keepdims=True)) for x in (q, k))
    v, ct = (_normal(i, 2, 1024, 2 * repeats, value, dtype=dtype) for i in (2, 3))
    g = spread(-jnp.exp(_normal(4, 2, 1024, 2 * repeats, dtype=jnp.float32) * 2 - 3))
    beta = spread(jax.nn.sigmoid(_normal(5, 2, 1024, 2 * repeats, dtype=jnp.float32)))

    def run(implementation, *arrays):
        def call(*arrays):
            return recurrences.IMPLEMENTATIONS[implementation](*arrays, chunks_of(segments, prefixes), delta=delta)

        (out, state), back = jax.vjp(call, *arrays)
        return out, state, back((ct.astype(out.dtype), jnp.ones_like(state)))

    def expected():
        return jax.jit(functools.partial(run, "reference"))(q, k, v.astype(jnp.float32), g, beta)

    return judged("recurrence", name, dtype, lambda: jax.jit(functools.partial(run, name))(q, k, spread(v), g, beta),
                  expected)


def everything(dtype) -> list[Verdict]:
    """Checks every implementation of every op that this platform may run, the first choice first; returns the Verdicts.

    dtype: of the inputs, a key of TOLERANCE."""
    out = [packed_attention(name, dtype) for name in packed.ORDERS[platform()]]
    out += [cached_attention(name, dtype) for name in cached.ORDERS[platform()]]
    out += [logprobs(dtype), *(expert_layer(name, dtype) for name in experts.ORDERS[platform()])]
    return out + [recurrent_layer(name, dtype) for name in recurrences.ORDERS[platform()]]


# ---- before a run trains on a kernel


def first_use(dtype, heads: Heads, softcap: float = 0.0, sinks: bool = False, memory: Path | None = None,
              reach: bool = False) -> dict[str, str]:
    """Returns attention's kernels of this device that do not agree with the reference -> why; {} where all do, and
    where there are none, as on CPUs.

    A kernel that fails with an error is among them, one that refuses the case is not. Verdicts are kept in a file by
    device kind, jax, kernel source and case, so that a kernel is looked at once. A kernel that failed has no verdict,
    as memory may have been short: it is not used now, and looked at again the next time.

    Args:
      dtype: of the inputs, a key of TOLERANCE. heads: sizes of the model's attention.
      softcap: cap on the scores, 0 = none. sinks: whether heads have sinks.
      memory: the file; None: nothing is kept.
      reach: also where queries see later keys, as the tokens of images do."""
    def looked(name):
        found = [packed_attention(name, dtype, heads, softcap, sinks)]
        if reach:
            found.append(packed_attention(name, dtype, heads, softcap, sinks, reach))
        if name in cached.ORDERS[platform()]:
            found.append(cached_attention(name, dtype, heads, softcap, sinks))
        return found

    names = [name for name in packed.ORDERS[platform()] if name not in packed.XLA]
    case = dtype, *heads, softcap, sinks, *(["reach"] if reach else [])
    return _first_use("attention", names, looked, (attention_op,), case, memory)


WIDEST = 2048  # of the experts that are looked at


def first_use_of_experts(dtype, layer: Experts, memory: Path | None = None) -> dict[str, str]:
    """Returns the kernels of experts that do not agree with the reference for this layer's sizes -> why; {} where all
    do, and where there are none, as on CPUs.

    A kernel that fails with an error is among them, one that refuses the sizes is not. Experts wider than WIDEST are
    looked at with that width. dtype: of tokens and weights, a key of TOLERANCE. memory: the file of verdicts, by device
    kind, jax, kernel source and case; None: nothing is kept."""
    layer = layer._replace(width=min(layer.width, WIDEST))
    case = dtype, layer.size, layer.width, layer.called, layer.biases, layer.gate
    names = experts.ORDERS[platform()][:-1]
    return _first_use("experts", names, lambda name: [expert_layer(name, dtype, layer)], (attention_op, experts_op),
                      case, memory)


def first_use_of_recurrence(dtype, layer: Recurrence, memory: Path | None = None) -> dict[str, str]:
    """Returns the kernels of recurrent layers that do not agree with the reference for these sizes -> why; {} where all
    do, and where there are none, as on CPUs.

    A kernel that fails with an error is among them, one that refuses the sizes is not. dtype: of the values, a key of
    TOLERANCE. memory: the file of verdicts, by device kind, jax, kernel source and case; None: nothing is kept."""
    names = recurrences.ORDERS[platform()][:-1]
    return _first_use("recurrence", names, lambda name: [recurrent_layer(name, dtype, layer)],
                      (attention_op, recurrence_op), (dtype, *layer), memory)


def _first_use(op: str, names, looked, packages, case, memory) -> dict[str, str]:
    """Calls looked(name) -> verdicts for implementations that are not known yet by this op, device, source and case."""
    # Without failures, which earlier versions kept.
    known = {key: text for key, text in _read(memory).items() if not text or " wrong: " in text}
    wrong = {}
    for name in names:
        key = _key(op, name, packages, case)
        if key not in known:
            with jax.set_mesh(jax.make_mesh((1,), ("check",), devices=jax.local_devices()[:1],
                                            axis_types=(jax.sharding.AxisType.Auto,))):
                found = looked(name)
            bad = [f"{v.op} {v.state}: {v.text}" for v in found if v.state in ("wrong", "failed")]
            states = {v.state for v in found}
            if bad:
                wrong[name] = "; ".join(bad)
            said = "; ".join(f"{v.op} {v.state}" + f" to {v.error:.1e}" * (v.state == "right") for v in found)
            log.info("%s: %s meets this device and jax for the first time, beside the reference: %s", op, name, said)
            if "wrong" in states or "failed" not in states:
                known[key] = "; ".join(bad)
                _write(memory, known)
        elif known[key]:
            wrong[name] = known[key]
    return wrong


def _key(op: str, name: str, packages, case) -> str:
    source = hashlib.sha256()
    for package in packages:
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            source.update(path.read_bytes())
    dtype, *rest = case
    device = jax.local_devices()[0].device_kind
    return " ".join(map(str, (op, name, device, f"jax {jax.__version__}", f"jaxlib {jaxlib.__version__}",
                              source.hexdigest()[:16], jnp.dtype(dtype).name, *rest)))


def _read(memory: Path | None) -> dict[str, str]:
    try:
        held = sealed.opened(memory.read_text("utf-8")) if memory is not None else {}
        return held if isinstance(held, dict) else {}
    except (OSError, ValueError):
        return {}


def _write(memory: Path | None, known: dict[str, str]) -> None:
    if memory is None:
        return
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        tmp = memory.with_suffix(".tmp")
        tmp.write_text(sealed.sealed({**_read(memory), **known}, indent=1) + "\n", "utf-8")
        tmp.replace(memory)
    except OSError as e:
        log.debug("verdicts on kernels are not kept: %s", e)
