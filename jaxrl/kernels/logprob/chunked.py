"""`logprob_and_entropy` in chunks of tokens with a custom vjp: logits of one chunk exist at a time (all, if few).

The valid tokens of all rows are lined up first, so that every chunk but the last is full and those without a token are
skipped. The forward pass keeps its inputs and three numbers per token (see _Sums); the backward pass computes each
chunk's logits again and writes
    d logits = g_logp * (onehot - p) - g_entropy * p * (log p + H) + scatter(g_ids) - p * sum(g_ids)
(H the entropy, g_ids of the log-probs at given token ids), then applies the chain rule of temperature and soft-cap. The
head's gradient, as large as the head and in fp32, is made only where the head is differentiated. Where logits have a
part of low rank (few @ more) that has gradients, and the head has none.

On CPUs the vocabulary is cut into blocks too, so that a chunk's logits stay in the cache from the product that makes
them to the last use of them; the sums over the vocabulary are then carried from block to block. One CPU device that has
few logits in all (KEPT_CPU) keeps them, after the soft-cap, for the backward pass.

On a mesh (`Split`) every device works on its own rows and its own part of the vocabulary: logits are never gathered, a
device skips its own empty chunks, and the head's gradient is summed over the rows' devices once, after the last chunk.

Legend: R rows, S loss tokens per row, N = R * S, C tokens per chunk, T chunks, D hidden size, V vocabulary, W tokens
of the vocabulary in a block, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.logprob.reference import OUTSIDE, allowed, capped_logits
from jaxrl.kernels.platform import platform
from jaxrl.types import custom_vjp

LOGITS_CPU, NARROWEST = 1 << 20, 128  # logits at once that a CPU's cache holds, in blocks no narrower than this
KEPT_CPU = 1 << 26  # logits of a microbatch, 256 MiB, that a CPU keeps for the backward pass


class Split(NamedTuple):
    """Mesh axes that rows, vocabulary and the slots of a row are split over, under `jax.set_mesh`. None = whole."""

    rows: tuple[str, ...] | None
    vocab: str | None
    slots: str | None = None

    @property
    def spec(self) -> P:
        """PartitionSpec of arrays [R, S, ...]."""
        return P(self.rows, self.slots) if self.slots else P(self.rows)

    @property
    def over(self) -> tuple[str, ...]:
        """Axes whose devices have different slots, over which the head's gradients are summed."""
        return (*(self.rows or ()), *([self.slots] if self.slots else []))


class Line(NamedTuple):
    """The valid ones among N = R * S tokens, in order, cut into T chunks of C places; the last places may be empty."""

    at: jax.Array     # [T, C] int32, where each place's token is among the N; N = none
    place: jax.Array  # [N] int32, each valid token's place among the T * C
    valid: jax.Array  # [N] bool

    def chunks(self, x_RxSx):
        """Returns values by token [R, S, ...] as values by place [T, C, ...]; 0 at places without a token."""
        return jnp.take(x_RxSx.reshape(len(self.valid), *x_RxSx.shape[2:]), self.at, axis=0, mode="fill", fill_value=0)

    def back(self, x_TxCx, shape_RxS, empty=0):
        """Returns results by place [T, C, ...] as results by token [R, S, ...], `empty` where a token is not valid.

        shape_RxS: (R, S)."""
        found = x_TxCx.reshape(self.at.size, *x_TxCx.shape[2:])[self.place]
        found = jnp.where(self.valid.reshape(-1, *[1] * (found.ndim - 1)), found, empty)
        return found.reshape(*shape_RxS, *found.shape[1:])


def _line(valid_RxS, chunk: int) -> Line:
    valid = valid_RxS.reshape(-1)
    count = len(valid)
    at = jnp.nonzero(valid, size=-(-count // chunk) * chunk, fill_value=count)[0].astype(jnp.int32)
    return Line(at.reshape(-1, chunk), jnp.maximum(jnp.cumsum(valid.astype(jnp.int32)) - 1, 0), valid)


def _over(axis, reduce, x):
    """Returns x reduced over the devices that share the vocabulary."""
    return x if axis is None else reduce(x, axis)


def _first_token(vocab: int, axis):
    """Returns the first token id of this device's part of the vocabulary."""
    return 0 if axis is None else jax.lax.axis_index(axis) * vocab


def held(tokens, vocab: int, axis):
    """Returns (index among this device's tokens, bool: whether it holds the token), both in the shape of `tokens`.

    The index is outside 0..vocab - 1 where this device does not hold the token. Call it within a shard_map if there is
    an axis.

    Args:
      tokens: int ids of the whole vocabulary. vocab: size of this device's part.
      axis: the mesh axis that the vocabulary is split over; None = whole."""
    return _held(tokens, vocab, _first_token(vocab, axis))


def _held(tokens, count: int, first):
    """Returns the same of `count` tokens from `first` on."""
    at = tokens - first
    return at, (at >= 0) & (at < count)


class _Sums(NamedTuple):
    """Of the logits seen so far, [C] each; a log-prob is logit - top - log(total)."""

    top: jax.Array       # the highest
    total: jax.Array     # sum of exp(logit - top)
    mean: jax.Array      # sum of exp(logit - top) * (logit - top)
    target: jax.Array    # the target's, 0 before it was seen
    ids: jax.Array       # [C, k] the most probable tokens, the highest first, of equal ones the lowest id
    logits: jax.Array    # [C, k] theirs
    chosen: jax.Array | None = None  # [C, K] those of given ids, 0 before they were seen; None = nobody asks

    @classmethod
    def none(cls, count: int, most: int, dtype, chosen: int | None = None):
        low, zero = jnp.full(count, OUTSIDE, dtype), jnp.zeros(count, dtype)
        ids, logits = jnp.full((count, most), -1, jnp.int32), jnp.full((count, most), -jnp.inf, dtype)
        return cls(low, zero, zero, zero, ids, logits, None if chosen is None else jnp.zeros((count, chosen), dtype))

    def raised(self, top):
        """Returns the same with respect to a higher top."""
        down = self.top - top
        factor = jnp.exp(down)
        return self._replace(top=top, total=factor * self.total, mean=factor * (self.mean + down * self.total))

    def and_block(self, block, targets_C, ids_CxK=None):
        """Returns these sums with those of a _Block."""
        logits_CxW = block.logits
        sums = self.raised(jnp.maximum(self.top, block.highest))
        shifted = logits_CxW - sums.top[:, None]
        weights = jnp.exp(shifted)
        at, here = block.held(targets_C)
        found = jnp.take_along_axis(logits_CxW, jnp.where(here, at, 0)[:, None], axis=-1)[:, 0]
        ids, logits = sums.ids, sums.logits
        if ids.shape[1]:
            known = logits_CxW if block.seen is None else jnp.where(block.seen, logits_CxW, -jnp.inf)
            more, places = jax.lax.top_k(known, min(ids.shape[1], known.shape[1]))
            places = (block.first + places).astype(jnp.int32)
            ids, logits = _best(jnp.concatenate([ids, places], 1),
                                jnp.concatenate([logits, more], 1), ids.shape[1])
        chosen = sums.chosen
        if ids_CxK is not None:
            ids_at, ids_here = block.held(ids_CxK)
            own = jnp.take_along_axis(logits_CxW, jnp.where(ids_here, ids_at, 0), axis=-1)
            chosen = jnp.where(ids_here, own, chosen)
        return _Sums(sums.top, sums.total + weights.sum(-1), sums.mean + (weights * shifted).sum(-1),
                     jnp.where(here, found, sums.target), ids, logits, chosen)

    def over(self, axis):
        """Returns the sums over all devices of a mesh axis, which have a part of the vocabulary each."""
        if axis is None:
            return self
        every = lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True)  # noqa: E731
        sums = self.raised(jax.lax.pmax(self.top, axis))
        ids, logits = sums.ids, sums.logits
        if ids.shape[1]:
            ids, logits = _best(every(ids), every(logits), ids.shape[1])
        total, mean, target = (jax.lax.psum(x, axis) for x in (sums.total, sums.mean, sums.target))
        chosen = sums.chosen if sums.chosen is None else jax.lax.psum(sums.chosen, axis)
        return _Sums(sums.top, total, mean, target, ids, logits, chosen)


def _best(ids_Cxn, logits_Cxn, count: int):
    """Returns the `count` highest of candidates in the order of their ids."""
    logits, places = jax.lax.top_k(logits_Cxn, count)
    return jnp.take_along_axis(ids_Cxn, places, axis=-1), logits


class _Block(NamedTuple):
    """Logits [C, W] of a part of this device's vocabulary."""

    logits: jax.Array
    highest: jax.Array        # [C]
    capped: jax.Array         # the logits before temperature and support
    first: jax.Array          # the first token's id
    seen: jax.Array | None    # [W] False for what the block before had; None = all are new

    def held(self, targets_C):
        at, here = _held(targets_C, self.logits.shape[1], self.first)
        return at, here if self.seen is None else here & self.seen[jnp.where(here, at, 0)]


class _Head(NamedTuple):
    """This device's part of the output matrix [D, V] (transposed: [V, D]), in blocks of `width`; the last one begins
    where it ends with the vocabulary, so that all are of one shape."""

    weights: jax.Array
    transposed: bool
    vocab: int
    width: int
    first: jax.Array | int  # id of this device's first token
    more: jax.Array | None = None  # [r, V] this device's part of it

    @classmethod
    def of(cls, weights, transposed: bool, tokens: int, axis, more=None):
        vocab = weights.shape[0 if transposed else 1]
        width = min(vocab, max(LOGITS_CPU // tokens, NARROWEST)) if platform() == "cpu" else vocab
        return cls(weights, transposed, vocab, width, _first_token(vocab, axis), more)

    @property
    def count(self) -> int:
        return -(-self.vocab // self.width)

    def scan(self, one, carry):
        """Returns the last carry of one(carry, i) over the blocks."""
        if self.count == 1:
            return one(carry, 0)
        return jax.lax.scan(lambda carry, i: (one(carry, i), None), carry, jnp.arange(self.count))[0]

    def start(self, i):
        return jnp.minimum(i * self.width, self.vocab - self.width)

    def part(self, i):
        """Returns [D, W]; transposed: [W, D]"""
        if self.width == self.vocab:
            return self.weights
        return jax.lax.dynamic_slice_in_dim(self.weights, self.start(i), self.width, axis=0 if self.transposed else 1)

    def part_of_more(self, i):
        """Returns [r, W]; None without."""
        if self.more is None or self.width == self.vocab:
            return self.more
        return jax.lax.dynamic_slice_in_dim(self.more, self.start(i), self.width, axis=1)

    def backward(self, d_CxW, i):
        """Returns [C, D]: a gradient of the i-th block's logits, times its weights."""
        return _times_weights(d_CxW, self.part(i), self.transposed)

    def block(self, i, hidden_CxD, few_Cxr, support_CxK, temperature, softcap, capped=None) -> _Block:
        """Returns one block's part. capped: the block's product where it was kept."""
        if capped is None:
            capped = capped_logits(hidden_CxD, self.part(i), softcap, self.transposed, few_Cxr, self.part_of_more(i))
        start = self.start(i)
        seen = None
        if self.vocab % self.width:
            seen = start + jnp.arange(self.width) >= i * self.width
        inside = seen
        if support_CxK.shape[1]:
            first = self.first + start
            own = allowed(jnp.where(support_CxK < first, -1, support_CxK - first), self.width)
            inside = own if seen is None else own & seen[None]
        logits = capped / temperature
        if inside is None:  # the highest of what the product wrote: one pass over the logits less
            return _Block(logits, capped.max(-1) / temperature, capped, self.first + start, None)
        logits = jnp.where(inside, logits, OUTSIDE)
        return _Block(logits, logits.max(-1), capped, self.first + start, seen)

    def added(self, grad_DxV, more_DxW, i):
        if self.width == self.vocab:
            return grad_DxV + more_DxW
        old = jax.lax.dynamic_slice_in_dim(grad_DxV, self.start(i), self.width, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(grad_DxV, old + more_DxW, self.start(i), axis=1)


def _times_weights(d_CxW, part, transposed: bool):
    acc = jnp.promote_types(d_CxW.dtype, jnp.float32)
    contract = (((1,), (0 if transposed else 1,)), ((), ()))
    return jax.lax.dot_general(d_CxW, part.astype(d_CxW.dtype), contract, preferred_element_type=acc)


@custom_vjp(9, 10, 11, 12, 13)
def logprob_and_entropy(hidden_RxSxD, head, targets_RxS, valid_RxS, support_RxSxK, ids_RxSxK, temperature, few_RxSxr,
                        more_rxV, softcap, top, chunk, split, transposed):
    """Computes log-prob and entropy of softmax(softcap(hidden @ head + few @ more) / temperature) in chunks of tokens,
    in nats; fp32, or float64 for float64 input.

    Args:
      hidden_RxSxD, head: hidden states and output matrix [D, V], or [V, D] where `transposed`.
      targets_RxS: int token ids. valid_RxS: bool; where False results and gradients are 0.
      support_RxSxK: int ids, -1 = unused, to which the distribution is cut; K = 0: the whole vocabulary.
      ids_RxSxK: int ids, -1 = unused, whose log-probs are returned too; None = none.
      temperature: [] in fp32 or better, without gradient. few_RxSxr, more_rxV: their product is added to the logits;
        None = none.
      softcap: cap * tanh(logit / cap), 0 = none. top: how many of the most probable tokens to return, 0 = none.
      chunk: valid tokens of a device whose logits exist at once. split: Split, None = no mesh.

    Returns:
      (logprob_RxS, entropy_RxS), with `top` also (ids_RxSxtop, logprobs_RxSxtop) without gradient, with ids_RxSxK at
      last their log-probs; 0 where not valid or unused (ids: -1).

    Raises ValueError where the head is differentiated beside more_rxV."""
    return _forward(hidden_RxSxD, head, targets_RxS, valid_RxS, support_RxSxK, ids_RxSxK, temperature, few_RxSxr,
                    more_rxV, softcap, top, chunk, split, transposed, keep=False)[0]


def _placed(local, split, transposed: bool, inputs: str, outputs: str):
    """Runs `local` on every device's part. r = split by rows and slots, v = the head, m = rows of it, both by
    vocabulary, w = whole."""
    if split is None:
        return local
    specs = {"r": split.spec, "v": P(split.vocab) if transposed else P(None, split.vocab), "m": P(None, split.vocab),
             "w": P()}
    return jax.shard_map(local, in_specs=tuple(specs[c] for c in inputs), out_specs=tuple(specs[c] for c in outputs),
                         check_vma=False)


def _rule(*arguments):
    """Runs `_forward` for the backward pass; keeps whether the head is differentiated: () or None."""
    inputs = (x.value if hasattr(x, "perturbed") else x for x in arguments)
    out, saved = _forward(*inputs)
    if arguments[1].perturbed and arguments[7] is not None:
        raise ValueError("logprob_and_entropy: a head with a part of low rank has no gradient itself")
    return out, (() if arguments[1].perturbed else None, *saved)


def _forward(hidden, head, targets, valid, support, ids, temperature, few, more, softcap, top, chunk, split,
             transposed, keep=True):
    axis, count = split.vocab if split else None, None if ids is None else ids.shape[-1]

    def local(hidden, head, targets, valid, support, ids, temperature, few, more):
        line = _line(valid, min(chunk, valid.size))
        blocks, kept = _Head.of(head, transposed, line.at.shape[1], axis, more), None
        if keep and split is None and platform() == "cpu" and line.at.size * blocks.count * blocks.width <= KEPT_CPU:
            kept = jnp.zeros((len(line.at), blocks.count, line.at.shape[1], blocks.width), temperature.dtype)

        def one(kept, xs):
            t, at, h_CxD, few_Cxr, t_C, kept_CxK, ids_CxK = xs

            def compute(kept):
                def add(carry, i):
                    sums, kept = carry
                    block = blocks.block(i, h_CxD, few_Cxr, kept_CxK, temperature, softcap)
                    return (sums.and_block(block, t_C, ids_CxK),
                            kept if kept is None else kept.at[t, i].set(block.capped))

                sums, kept = blocks.scan(add, (_Sums.none(len(at), top, temperature.dtype, count), kept))
                sums = sums.over(axis)
                log_sum = jnp.log(sums.total)
                norm = sums.top + log_sum
                out = sums.target - sums.top - log_sum, log_sum - sums.mean / sums.total, sums.top, log_sum
                out += (sums.ids, sums.logits - norm[:, None]) if top else ()
                return kept, out + (() if count is None else (jnp.where(ids_CxK < 0, 0, sums.chosen - norm[:, None]),))

            def skip(kept):
                return kept, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, kept)[1])

            return jax.lax.cond(at[0] < valid.size, compute, skip, kept)

        per_token = (x if x is None else line.chunks(x) for x in (hidden, few, targets, support, ids))
        kept, out = jax.lax.scan(one, kept, (jnp.arange(len(line.at)), line.at, *per_token))
        empty = (0, 0, 0, 0, -1, 0, 0) if top else (0,) * 5
        return (*(line.back(x, valid.shape, none) for x, none in zip(out, empty, strict=False)), kept)

    inputs = hidden, head, targets, valid, support, ids, temperature, few, more
    placed = _placed(local, split, transposed, "rvrrrrwrm", "rrrr" + "rr" * bool(top) + "r" * (count is not None) + "w")
    logp, entropy, highest, log_sum, *most, kept = placed(*inputs)
    return (logp, entropy, *most), (*inputs, highest, log_sum, entropy, kept)


def _of_ids(d_CxW, p_CxW, g_CxK, ids_CxK, block):
    """Returns the logits' gradient with that of the log-probs at given ids."""
    at, here = block.held(ids_CxK)
    places = jnp.arange(len(at))[:, None], jnp.where(here, at, d_CxW.shape[1])
    return (d_CxW - p_CxW * g_CxK.sum(-1, keepdims=True)).at[places].add(g_CxK, mode="drop")


def _of_logits(block, targets_C, numbers, of_ids, temperature, softcap):
    """Returns [C, W]: the gradient of a _Block's logits, before temperature and cap.

    numbers: top, log(total), entropy, and gradients of log-prob and entropy, [C] each. of_ids: (gradients of the
    log-probs at given ids, the ids) [C, K]; None = nobody asks.
    """
    highest, log_sum, entropy, g_logp, g_entropy = (x[:, None] for x in numbers)
    logp = block.logits - highest - log_sum
    p, target = jnp.exp(logp), targets_C[:, None] == block.first + jnp.arange(logp.shape[1])[None]
    d = g_logp * (target - p) - g_entropy * p * (logp + entropy)
    d = (d if of_ids is None else _of_ids(d, p, of_ids[0], of_ids[1], block)) / temperature
    if softcap:
        d = d * (1 - jnp.square(block.capped / softcap))
    return d if block.seen is None else jnp.where(block.seen, d, 0)


def _backward(softcap, top, chunk, split, transposed, saved, grads):
    learns, hidden, head, *_, kept = saved
    has_few, axis = saved[8] is not None, split.vocab if split else None
    grads = [jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in grads]
    acc = jnp.promote_types(hidden.dtype, jnp.float32)

    def local(hidden, head, targets, valid, support, ids, temperature, few, more, *numbers):
        line = _line(valid, min(chunk, valid.size))
        blocks = _Head.of(head, transposed, line.at.shape[1], axis, more)

        def one(grad_head, xs):
            t, at, h_CxD, few_Cxr, t_C, kept_CxK, ids_CxK, *numbers, g_ids = xs
            of_head = h_CxD if few_Cxr is None else few_Cxr
            h_DxC = of_head.T if platform() != "cpu" else jax.lax.optimization_barrier(of_head.T)  # once, not per block

            def add(grads, i):
                grad_head, grad_h, grad_few = grads
                block = blocks.block(i, h_CxD, few_Cxr, kept_CxK, temperature, softcap,
                                     kept if kept is None else kept[t, i])
                of_ids = None if g_ids is None else (g_ids, ids_CxK)
                d = _of_logits(block, t_C, numbers, of_ids, temperature, softcap).astype(h_CxD.dtype)
                if few_Cxr is not None:
                    grad_few = grad_few + _times_weights(d, blocks.part_of_more(i), False)
                elif learns is None:
                    return None, grad_h + blocks.backward(d, i), None
                more_w = jax.lax.dot_general(h_DxC, d, (((1,), (0,)), ((), ())), preferred_element_type=acc)
                return blocks.added(grad_head, more_w, i), grad_h + blocks.backward(d, i), grad_few

            def compute(grad_head):
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, acc), (h_CxD, few_Cxr))
                grad_head, *grads = blocks.scan(add, (grad_head, *zeros))
                return grad_head, [x if x is None else _over(axis, jax.lax.psum, x).astype(h_CxD.dtype) for x in grads]

            def skip(grad_head):
                return grad_head, [x if x is None else jnp.zeros_like(x) for x in (h_CxD, few_Cxr)]

            return jax.lax.cond(at[0] < valid.size, compute, skip, grad_head)

        *numbers, g_ids = numbers
        g_ids = g_ids if g_ids is None else jnp.where(ids < 0, 0, g_ids)
        per_token = (hidden, few, targets, support, ids, *numbers, g_ids)
        shape = head.shape[::-1] if transposed else head.shape
        none = jnp.zeros(more.shape, acc) if more is not None else None if learns is None else jnp.zeros(shape, acc)
        grad_head, (grad_hidden, grad_few) = jax.lax.scan(
            one, none, (jnp.arange(len(line.at)), line.at, *(x if x is None else line.chunks(x) for x in per_token)))
        if none is None:
            return (line.back(grad_hidden, valid.shape),)
        assert grad_head is not None
        grad_head = jax.lax.psum(grad_head, split.over) if split and split.over else grad_head
        if more is not None:
            return (*(line.back(x, valid.shape) for x in (grad_hidden, grad_few)), grad_head.astype(more.dtype))
        grad_head = grad_head.T if transposed else grad_head  # collected as [D, V]: so its products are fastest
        return line.back(grad_hidden, valid.shape), grad_head.astype(head.dtype)

    placed = _placed(local, split, transposed, "rvrrrrwrmrrrrrr", "rrm" if has_few else "r" if learns is None else "rv")
    of_ids = None if saved[6] is None else grads[-1]  # the most probable tokens have no gradient
    grad_hidden, *of_head = placed(*saved[1:-1], *grads[:2], of_ids)
    grad_head, grad_few, grad_more = (None, *of_head) if has_few else (*(of_head or [None]), None, None)
    return grad_hidden, grad_head, None, None, None, None, None, grad_few, grad_more


logprob_and_entropy.defvjp(_rule, _backward, symbolic_zeros=True)
