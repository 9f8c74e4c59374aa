"""Time, rate and share of the chip's ceiling of every kernel, beside the libraries that others use:

    python benchmarks/kernel_table.py            (--tiny: small shapes, any machine; --parts attention,experts)

This prints rows; benchmarks/gpu_suite.py runs the same parts in processes of their own and keeps the rows, and holds
every implementation to float64 on this device first (`correctness`, tests/helpers/attention_cases.py). Ceilings are measured in
every part: a matrix product of 8192 x 8192 x 8192 in bf16, a copy of 2 GiB. Attention counts the products of visible
pairs (4 K per pair and query head forward, 10 K backward), decoding the bytes of visible keys and values, of a prompt
that slots share once, experts the three products of a token with each of its own (6 D F), three times that with
gradients, recurrences the products of their chunks, and three times that. Times are medians of device time, calls
queued one behind the other; attention's block lists are made once per step and timed in a row of their own. What cannot
run says why. No new row is begun after --minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other libraries need memory, too

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

MODELS = {  # query heads, key-value heads, head size, hidden size, vocabulary
    "Qwen2.5-0.5B": (14, 2, 64, 896, 151936),
    "Qwen2.5-1.5B": (12, 2, 128, 1536, 151936),
    "Qwen2.5-7B": (28, 4, 128, 3584, 152064),
    "Qwen3-8B": (32, 8, 128, 4096, 151936),
    "Llama-3.1-8B": (32, 8, 128, 4096, 128256),
    "Gemma-3-4B": (8, 4, 256, 2560, 262208),
    "gpt-oss-20b": (64, 8, 64, 2880, 201088),
    "tiny": (4, 2, 64, 64, 512),
}
LAYERS = {  # experts, slots of a token, hidden size, width
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    **{f"{count} experts": (count, 4, 2048, 768) for count in (8, 128, 32, 16, 64)},  # the same products for all
    "tiny": (4, 2, 64, 64),
}
RULES = {  # of recurrent layers: key heads, value heads, key size, value size, delta
    "Qwen3.5-4B": (16, 32, 128, 128, True),
    "Nemotron-3-30B-A3B": (8, 64, 128, 64, False),
    "tiny": (2, 4, 16, 64, True),
}
COMPARED = ("Qwen2.5-1.5B", "Qwen3-8B", "Gemma-3-4B", "tiny")  # models that the other libraries run, too
FULL = dict(models=[m for m in MODELS if m not in ("tiny", "gpt-oss-20b")], causal=8192, packed=16384, documents=16,
            decode=((256, 4096), (8, 32768)),
            shared=(256, 16, 1024, 512), tokens=32768, logprob="Qwen2.5-1.5B",
            masks=(("gpt-oss-20b", 128, True), ("gpt-oss-20b", 0, True), ("Gemma-3-4B", 1024, False)),
            layers=[m for m in LAYERS if m != "tiny"], routed=16384, rules=[m for m in RULES if m != "tiny"], rows=(8192, 32768),
            matmul=8192, copy=1 << 31)
TINY = dict(models=["tiny"], causal=256, packed=512, documents=4, decode=((4, 256),),
            shared=(8, 4, 128, 64), tokens=512, logprob="tiny", layers=["tiny"], routed=256, rules=["tiny"], rows=(256,),
            masks=(("tiny", 64, True), ("tiny", 64, False)),
            matmul=512, copy=1 << 24)
BLOCKWISE_UP_TO = 16384
UNLIMITED = 60.0  # minutes
LATE = "TimeoutError: out of time"


class Table:
    """Rows of results; `measure` adds one, or the reason why there is none."""

    def __init__(self, minutes: float, quick: bool, note=lambda row: print(line(row), flush=True), known=lambda row: False):
        """note: is told of every row at once. known: whether a row needs no measurement; ceilings are measured always."""
        self.rows, self.deadline, self.quick, self.ceilings = [], time.monotonic() + 60 * minutes, quick, {}
        self.note, self.known = note, known

    def measure(self, op, model, shape, implementation, make, flops=0, moved=0):
        """make() -> (function without arguments that queues one call and returns its result, extra entries or {})."""
        row = dict(op=op, model=model, shape=shape, implementation=implementation)
        if op not in ("matmul", "copy") and self.known(row):
            return row
        try:
            if time.monotonic() > self.deadline:
                raise TimeoutError(LATE.partition(": ")[2])
            call, extra = make()
            row |= extra | rates(self.seconds(call), flops, moved, self.ceilings)
        except Exception as e:  # noqa: BLE001 a library that cannot run is a result
            row["not_run"] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
        self.rows.append(row)
        self.note(row)
        return row

    def seconds(self, call) -> float:
        wait(call())
        started = time.perf_counter()
        wait(call())
        once = time.perf_counter() - started
        calls = 1 if self.quick else max(1, min(50, math.ceil(0.05 / once)))
        times = []
        for _ in range(3 if self.quick else 5):
            started = time.perf_counter()
            for _ in range(calls):
                result = call()
            wait(result)
            times.append((time.perf_counter() - started) / calls)
        return statistics.median(times)


def wait(result):
    if "torch" in type(result).__module__:
        sys.modules["torch"].cuda.synchronize()
    else:
        jax.block_until_ready(result)


def rates(seconds, flops, moved, ceilings) -> dict:
    out = {"milliseconds": 1e3 * seconds}
    if flops:
        out["tflops"] = flops / seconds / 1e12
        out["share"] = flops / seconds / ceilings["matmul"] if "matmul" in ceilings else None
    if moved:
        out["gb_per_s"] = moved / seconds / 1e9
        out["share"] = moved / seconds / ceilings["copy"] if "copy" in ceilings else None
    return out


def compiled(function, *arguments):
    """(call, the compiled temporaries) of a jitted function on these arguments. MemoryError where the device has no room."""
    ready = jax.jit(function).lower(*arguments).compile()
    memory, stats = ready.memory_analysis(), jax.devices()[0].memory_stats() or {}
    needed, free = memory.temp_size_in_bytes + memory.output_size_in_bytes, math.inf
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    if needed > free:
        raise MemoryError(f"asks for {needed / 2 ** 30:.1f} GiB beside its arguments; {free / 2 ** 30:.1f} are free")
    return lambda: ready(*arguments), {"temporary_gib": memory.temp_size_in_bytes / 2 ** 30}


def normal(key, shape):
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)


def ceilings(table, sizes, part):
    n = sizes["matmul"]
    a, b = normal(0, (n, n)), normal(1, (n, n))
    row = table.measure("matmul", part, f"{n}^3 bf16", "xla", lambda: compiled(lambda a, b: a @ b, a, b),
                        flops=2 * n ** 3)
    if "tflops" in row:
        table.ceilings["matmul"] = 1e12 * row["tflops"]
    x = jnp.zeros((sizes["copy"] // 4,), jnp.float32)
    row = table.measure("copy", part, f"{sizes['copy'] >> 20} MiB", "xla", lambda: compiled(lambda x: x + 1, x),
                        moved=2 * sizes["copy"])
    if "gb_per_s" in row:
        table.ceilings["copy"] = 1e9 * row["gb_per_s"]


def documents(length, count):
    """(lengths, positions [1, L], segments [1, L]): `count` documents, multiples of 1, of unequal length that fill a
    row."""
    lengths = np.random.default_rng(0).multinomial(length - count,
                                                   np.random.default_rng(1).dirichlet(np.full(count, 4.0))) + 1
    segments = np.repeat(np.arange(1, count + 1), lengths).astype(np.int32)[None]
    return lengths, np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)[None], segments


def attention(table, model, length, count, window=0, sinks=False):
    """Forward and backward of one row: a document, or `count` packed ones; `window` and `sinks` as the kernels take
    them."""
    from jaxrl.kernels.attention.packed import api, cudnn, gpu, reference, tpu
    from jaxrl.kernels.platform import platform

    heads, groups, size, _, _ = MODELS[model]
    q, k, v, d_out = (normal(i, (1, length, h, size)) for i, h in enumerate((heads, groups, groups, heads)))
    lengths, positions, segments = documents(length, count)
    ids = reference.Ids(positions, positions, segments, segments)
    scale, flops = size ** -0.5, 4 * size * heads * sum(visible_pairs(int(n), window) for n in lengths)
    name = ("attention" if count == 1 else "packed attention") + masked(window, sinks)
    shape = f"{length} tokens" if count == 1 else f"{count} documents in {length}"

    def ours(implementation):
        work = {"gpu": gpu.work_of, "tpu": tpu.work_of, "cudnn": cudnn.work_of}.get(implementation)
        options = dict(window=window, softcap=0.0, scale=scale) | given_sinks(sinks, heads)
        if work is not None:
            options["work"] = jax.jit(lambda ids: work(q.shape, k.shape, q.dtype, ids, window=window))(ids)
        return lambda q, k, v: api.IMPLEMENTATIONS[implementation](q, k, v, ids, **options)

    def library(function, **options):
        mask = dict(local_window_size=(window - 1, 0)) if window else {}
        if count > 1:
            mask["mask"] = reference.visible(jax.tree.map(jnp.asarray, ids), 0)[:, None]
        return lambda q, k, v: function(q, k, v, scale=scale, is_causal=count == 1, **mask, **options)

    def tokamax():
        import tokamax

        return library(tokamax.dot_product_attention, implementation="mosaic")

    makers = {"blockwise": lambda: ours("blockwise")} if length <= BLOCKWISE_UP_TO else {}
    if platform() != "cpu":
        makers = {platform(): lambda: ours(platform())} | makers
    if platform() == "gpu" and count == 1 and not sinks:
        makers["jaxrl cudnn"] = lambda: ours("cudnn")
    if model in COMPARED and not sinks:
        suffix = "" if count == 1 else ", mask"
        makers |= {f"jax.nn xla{suffix}": lambda: library(jax.nn.dot_product_attention, implementation="xla")}
        if platform() == "gpu":
            makers |= {f"jax.nn cudnn{suffix}": lambda: library(jax.nn.dot_product_attention, implementation="cudnn"),
                       f"tokamax mosaic{suffix}": tokamax} if not window else {
                           f"jax.nn cudnn{suffix}": lambda: library(jax.nn.dot_product_attention, implementation="cudnn")}
    if "gpu" in makers:
        table.measure("block lists", model, shape, "gpu", lambda: compiled(
            lambda ids: gpu.work_of(q.shape, k.shape, q.dtype, ids, window=window), ids))
    for implementation, make in makers.items():
        table.measure(f"{name} forward", model, shape, implementation, lambda make=make: compiled(make(), q, k, v),
                      flops=flops)

        def backward(make=make):
            pull = jax.jit(lambda q, k, v: jax.vjp(make(), q, k, v)[1])(q, k, v)
            return compiled(lambda pull, d_out: pull(d_out), pull, d_out)

        table.measure(f"{name} backward", model, shape, implementation, backward, flops=2.5 * flops)
    if model in COMPARED and count == 1 and not window and not sinks and platform() == "gpu":
        torch_attention(table, name, model, shape, (length, heads, groups, size), flops)


def visible_pairs(length: int, window: int) -> int:
    """Of a query with itself and earlier keys of its document, at most `window` keys for each (0: all)."""
    near = min(length, window or length)
    return near * (near + 1) // 2 + (length - near) * near


def masked(window: int, sinks: bool) -> str:
    return f", window {window}" * bool(window) + ", sinks" * sinks


def given_sinks(sinks: bool, heads: int) -> dict:
    return dict(sinks=jnp.linspace(-2.0, 3.0, heads)) if sinks else {}


def torch_attention(table, name, model, shape, sizes, flops):
    def inputs():
        import torch

        length, heads, groups, size = sizes
        q, k, v, d_out = (torch.randn(1, h, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                          for h in (heads, groups, groups, heads))
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return attend, (q, k, v), d_out

    def forward():
        attend, qkv, _ = inputs()
        return lambda: attend(*qkv).detach(), {}

    def backward():
        import torch

        attend, qkv, d_out = inputs()
        out = attend(*qkv)
        return lambda: torch.autograd.grad(out, qkv, d_out.detach(), retain_graph=True)[0], {}

    table.measure(f"{name} forward", model, shape, "torch sdpa", forward, flops=flops)
    table.measure(f"{name} backward", model, shape, "torch sdpa", backward, flops=2.5 * flops)


def decoding(table, model, slots, length, window=0, sinks=False):
    """One token of every slot of a cache whose slots are filled evenly from a quarter to the whole."""
    from jaxrl.kernels.attention import cached

    heads, groups, size, _, _ = MODELS[model]
    q = normal(0, (slots, 1, heads, size))
    k, v = (normal(i, (1, slots, length, groups * size)) for i in (1, 2))
    positions = np.linspace(length // 4, length - 1, slots).astype(np.int32)[:, None]
    seen = positions + 1
    moved = 2 * k.dtype.itemsize * groups * size * int((np.minimum(seen, window) if window else seen).sum())
    options = dict(window=window, softcap=0.0, scale=size ** -0.5) | given_sinks(sinks, heads)
    names = [n for n in dict.fromkeys((*cached.api.ORDERS[jax.default_backend()], "xla"))]
    for name in names:
        table.measure("decoding" + masked(window, sinks), model, f"{slots} slots of {length}", name, lambda name=name: compiled(
            functools.partial(cached.api.IMPLEMENTATIONS[name], **options), q, k, v, positions, 0), moved=moved)


def shared_decoding(table, model, slots, group, prompt, answers):
    """One token of every slot, `group` slots to a prompt, at the places of answers from the first token to the last;
    with the prompts read once and with every slot's own copy read."""
    from jaxrl.kernels.attention import cached, share

    heads, groups, size, _, _ = MODELS[model]
    # a slot writes its prompt's last key itself
    q, width, shared = normal(0, (slots, 1, heads, size)), groups * size, prompt - 1
    prompts = (jnp.repeat(normal(i, (1, slots // group, prompt, width)), group, axis=1) for i in (1, 2))
    k, v = (jnp.concatenate([x, normal(i, (1, slots, answers, width))], axis=2)
            for i, x in zip((3, 4), prompts, strict=True))
    produced = np.linspace(0, answers - 1, slots).astype(np.int32)
    positions = shared + np.random.default_rng(0).permutation(produced)[:, None]
    positions = positions.astype(np.int32)
    moved = 2 * k.dtype.itemsize * width * (int((positions + 1 - shared).sum()) + slots // group * shared)
    tiles = share([slot // group for slot in range(slots)], [shared] * slots)
    ours = [(name, tiles) for name in cached.api.ORDERS[jax.default_backend()] if name in cached.api.WORK]
    for name, known in (*ours, *((name, None) for name, _ in ours), ("xla", None)):

        def make(name=name, tiles=known):
            more = {}
            if name in cached.api.WORK:  # once per token, for all layers
                work = functools.partial(cached.api.WORK[name], window=0, heads=heads, size=size, shared=tiles)
                more["work"] = jax.jit(lambda positions: work(positions, k.shape, k.dtype))(positions)
            attend = functools.partial(cached.api.IMPLEMENTATIONS[name], window=0, softcap=0.0, scale=size ** -0.5)
            return compiled(lambda q, k, v, positions, more: attend(q, k, v, positions, 0, **more), q, k, v, positions,
                            more)

        table.measure("decoding, shared prompts", model,
                      f"{slots} slots, {group} per prompt of {prompt}, answers to {answers}",
                      name if known is not None or name == "xla" else f"{name}, copies", make, moved=moved)


def experts(table, model, tokens):
    """A layer of experts, each token to distinct ones at random: forward, and forward with the gradients of tokens and
    weights, of which only the products that are needed are counted."""
    from jaxrl.kernels.experts import api
    from jaxrl.models.feed_forward import GATED

    count, slots, size, width = LAYERS[model]
    ids = jax.lax.top_k(jax.random.uniform(jax.random.key(9), (tokens, count)), slots)[1]
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(8), (tokens, slots)))
    x, weights = normal(0, (tokens, size)), [normal(i, (count, *s)) / s[0] ** 0.5 for i, s in enumerate(
        ((size, width), (size, width), (width, size)), 1)]
    gate, flops = GATED["silu"], 6 * tokens * slots * size * width

    def ours(name):
        return lambda x, *w: api.experts(x, ids, gates, *w, activation=gate, implementation=name)

    def ragged_dot(x, into_gate, into_up, down):
        order = jnp.argsort(ids.reshape(-1), stable=True)
        counts = jnp.bincount(ids.reshape(-1), length=count).astype(jnp.int32)
        a, b = (jax.lax.ragged_dot(x[order // slots], w, counts) for w in (into_gate, into_up))
        out = jnp.zeros((tokens * slots, size), x.dtype).at[order].set(
            jax.lax.ragged_dot(gate(a, b), down, counts), unique_indices=True)
        return jnp.einsum("tkd,tk->td", out.reshape(tokens, slots, size), gates.astype(x.dtype))

    ways = {name: ours(name) for name in api.ORDERS[jax.default_backend()]} | {"jax.lax.ragged_dot": ragged_dot}
    for name, way in ways.items():
        for what, factor, function in (("forward", 1, way), ("forward + backward", 3, jax.grad(
                lambda *a, way=way: jnp.sum(way(*a).astype(jnp.float32)), (0, 1, 2, 3)))):
            table.measure(f"experts {what}", model, f"{tokens} tokens, {slots} of {count}", name,
                          lambda function=function: compiled(function, x, *weights), flops=factor * flops)


def recurrence(table, model, tokens):
    """The recurrence of a layer over one row: a prompt of an eighth of the tokens and seven completions of it; forward, and
    forward with the gradients of all inputs, whose operations are counted three times."""
    from jaxrl.kernels.recurrence import api, chunks_of, flops

    heads, groups, key, value, delta = RULES[model]
    each = tokens // 8
    segments = jnp.repeat(jnp.arange(1, 9, dtype=jnp.int32), each)[None]
    chunks = jax.jit(chunks_of)(segments, jnp.where(segments > 1, 1, 0))
    unit = lambda x: x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)  # noqa: E731
    q, k = (unit(normal(i, (1, 8 * each, heads, key))) for i in (0, 1))
    v, g = normal(2, (1, 8 * each, groups, value)), -jax.nn.softplus(normal(3, (1, 8 * each, groups)).astype(jnp.float32))
    beta, work = jax.nn.sigmoid(normal(4, (1, 8 * each, groups)).astype(jnp.float32)), 8 * each * flops(groups, key, value, delta=delta)
    for name in api.ORDERS[jax.default_backend()]:
        def way(*arrays, name=name):
            return api.IMPLEMENTATIONS[name](*arrays, chunks, delta=delta)[0]  # by its own name: nothing steps in for it

        for what, factor, function in (("forward", 1, way), ("forward + backward", 3, jax.grad(
                lambda *a, way=way: jnp.sum(way(*a).astype(jnp.float32)), tuple(range(5))))):
            table.measure(f"recurrence {what}", model, f"{8 * each} tokens, 8 segments", name,
                          lambda function=function: compiled(function, q, k, v, g, beta), flops=factor * work)


def logprob(table, model, tokens):
    """Log-prob and its gradients from hidden states, in chunks and with all logits at once: time and compiled
    temporaries."""
    from jaxrl.kernels.logprob import api

    *_, hidden, vocab = MODELS[model]
    x, head = normal(0, (1, tokens, hidden)), normal(1, (hidden, vocab))
    targets = jax.random.randint(jax.random.key(2), (1, tokens), 0, vocab)

    def make(implementation):
        def loss(x, head, targets):
            return api.logprob_and_entropy(x, head, targets, implementation=implementation)[0].sum()

        return compiled(jax.grad(loss, (0, 1)), x, head, targets)

    for implementation in ("chunked", "reference"):
        table.measure("log-prob forward + backward", model, f"{tokens} tokens", implementation,
                      lambda i=implementation: make(i), flops=6 * tokens * hidden * vocab)


def correctness(names, note=lambda row: print(row, flush=True), share=(0, 1), threads: int = 1) -> list[dict]:
    """Every implementation against float64 on this device, the shared cases and decoding: rows with "error", "" where
    it held.

    note: is told of every row at once. share: (i, n) takes every n-th case from the i-th on, so that n processes share
    them (a Mosaic kernel is compiled under a lock of its process). threads: cases that compile at once; one that fails
    among others is run again alone.
    """
    from helpers import attention_cases

    cases = numbered(names)
    mine = [case for number, case in enumerate(cases) if number % share[1] == share[0]]
    rows, shared = [], [case for case in mine if case[3]]

    def held(name, case, check, _):
        started, error = time.monotonic(), ""
        try:
            check()
        except NotImplementedError as e:
            error = f"refused: {e}"
        except Exception as e:  # noqa: BLE001 the row says what failed
            error = f"{type(e).__name__}: {e}"[:500]
        return dict(implementation=name, case=str(case), error=error, seconds=round(time.monotonic() - started, 1))

    def keep(row):
        rows.append(row)
        note(row)

    def all_of(some):
        again = []
        with ThreadPoolExecutor(threads) as pool:
            under_way = {pool.submit(held, *case): case for case in some}
            for done in as_completed(under_way):
                row = done.result()
                if row["error"] and not row["error"].startswith("refused") and threads > 1:
                    again.append((under_way[done], row["error"]))
                else:
                    keep(row)
        for case, error in again:
            keep(held(*case) | {"among_others": error})

    all_of([case for case in mine if not case[3]])
    with mock.patch.object(*attention_cases.SMALL_BLOCKS):
        all_of(shared)
    return rows


def numbered(names) -> list[tuple]:
    """(implementation, case, function that raises where it does not hold, whether blocks are made small for it)."""
    from helpers import attention_cases

    from jaxrl.kernels import check
    from jaxrl.kernels.attention import cached
    from jaxrl.kernels.experts import api as expert_api
    from jaxrl.kernels.recurrence import api as recurrent_api
    from jaxrl.models.feed_forward import clamped

    out = [(name, case, functools.partial(attention_cases.check, name, case), False) for name in names
           for case in (attention_cases.HOPPER_CASES if name in ("gpu", "cudnn") else attention_cases.HOPPER_CASES[:2])]

    def decodes(name, slots, length, heads, groups, size, window, softcap):
        q = normal(0, (slots, 1, heads, size))
        k, v = (normal(i, (2, slots, length, groups * size)) for i in (1, 2))
        positions = jax.random.randint(jax.random.key(3), (slots, 1), 0, length)
        options = dict(window=window, softcap=softcap, scale=size ** -0.5)
        decode = jax.jit(functools.partial(cached.api.IMPLEMENTATIONS[name], **options))
        got = decode(q, k, v, positions, 1).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            want = cached.reference.attention(*(x.astype(jnp.float32) for x in (q, k, v)), positions, 1, **options)
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert error < 0.01, f"off by {error:.1e}"

    for name in dict.fromkeys((*cached.api.ORDERS[jax.default_backend()], "xla")):
        out += [(f"decoding {name}", case, functools.partial(decodes, name, *case), False) for case in (
            (3, 208, 4, 2, 64, 0, 0.0), (40, 1104, 14, 2, 128, 600, 0.0), (1, 1072, 2, 1, 128, 0, 0.0), (40, 96, 8, 8, 256, 0, 5.0))]
        out += [(f"decoding {name}", case, functools.partial(attention_cases.check_shared, name, case), True)
                for case in (dataclasses.replace(case, dtype="bfloat16") for case in attention_cases.SHARED_CASES)
                if name in cached.api.WORK]

    def held_rule(name, rule):
        right(check.recurrent_layer(name, jnp.bfloat16, rule))

    def routed(name, layer):
        right(check.expert_layer(name, jnp.bfloat16, layer))

    def right(verdict):
        if verdict.state == "refused":
            raise NotImplementedError(verdict.text)
        assert verdict.state == "right", verdict.text

    limited = dict(activation=clamped(1.702, 7.0), biases=True)
    layers = ((64, 64, {}), (192, 320, {}), (192, 320, limited), (2048, 768, {}), (2880, 1440, limited))
    out += [(f"experts {name}", (size, width, bool(more)), functools.partial(routed, name, check.Experts(size, width, **more)), False)
            for name in expert_api.ORDERS[jax.default_backend()] for size, width, more in layers]
    rules = (check.Recurrence(), check.Recurrence(2, 128, 128), check.Recurrence(8, 128, 64, delta=False))
    return out + [(f"recurrence {name}", tuple(rule), functools.partial(held_rule, name, rule), False)
                  for name in recurrent_api.ORDERS[jax.default_backend()] for rule in rules]


def line(row) -> str:
    """A row of the Markdown table."""
    def number(key, form):
        return "" if row.get(key) is None else format(row[key], form)

    rates = [number(key, ".3g") + unit for key, unit in (("tflops", " TFLOP/s"), ("gb_per_s", " GB/s")) if key in row]
    cells = (row["op"], row["model"], row["shape"], row["implementation"], number("milliseconds", ".3g"),
             *(rates or [""]), number("share", ".0%"), number("temporary_gib", ".2f"), row.get("not_run", ""))
    return "| " + " | ".join(cells) + " |"


# ---- parts: what is measured in one process


def held_here() -> list[str]:
    """Implementations of attention for training that `correctness` is asked about on this device."""
    from jaxrl.kernels.attention.packed import api

    ours = {"gpu": ("gpu", "cudnn"), "tpu": ("tpu",)}.get(jax.default_backend(), ())
    return [*(n for n in ours if n in api.IMPLEMENTATIONS), "blockwise"]


def of_experts(table, sizes):
    for model in sizes["layers"]:
        experts(table, model, sizes["routed"])


def of_recurrences(table, sizes):
    for model in sizes["rules"]:
        for tokens in sizes["rows"]:
            recurrence(table, model, tokens)


def of_attention(table, sizes):
    for model in sorted(sizes["models"], key=lambda m: m not in COMPARED):
        attention(table, model, sizes["causal"], 1)
        if model in COMPARED:
            attention(table, model, sizes["packed"], sizes["documents"])


def of_masks(table, sizes):
    for model, window, sinks in sizes["masks"]:
        attention(table, model, sizes["packed"], sizes["documents"], window, sinks)
        attention(table, model, sizes["causal"], 1, window, sinks)
        decoding(table, model, *sizes["decode"][0], window, sinks)


def of_decoding(table, sizes):
    for model in sorted(sizes["models"], key=lambda m: m not in COMPARED):
        for slots, length in sizes["decode"]:
            decoding(table, model, slots, length)
        if model in COMPARED:
            shared_decoding(table, model, *sizes["shared"])


def of_logprob(table, sizes):
    logprob(table, sizes["logprob"], sizes["tokens"])


PARTS = {"experts": of_experts, "attention": of_attention, "masks": of_masks, "decoding": of_decoding, "logprob": of_logprob,
         "recurrence": of_recurrences}


def run(name: str, table: Table, sizes) -> None:
    ceilings(table, sizes, name)
    PARTS[name](table, sizes)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=UNLIMITED)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    args = parser.parse_args(argv)
    table = Table(args.minutes, quick=args.tiny)
    for name in args.parts.split(","):
        run(name, table, TINY if args.tiny else FULL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
