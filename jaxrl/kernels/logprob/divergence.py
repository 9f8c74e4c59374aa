"""Divergence of two distributions over the vocabulary, each straight from its own hidden states and head, in chunks of
tokens: what dense distillation minimises. Logits of one chunk exist at a time; the gradient flows to the student alone.

With p the student, q the teacher, s the student's logits and M = beta q + (1 - beta) p:

    forward  KL(q || p) = sum q (log q - log p)                   d/ds = p - q
    reverse  KL(p || q) = sum p (log p - log q)                   d/ds = p (log p - log q - KL(p || q))
    jsd      beta KL(q || M) + (1 - beta) KL(p || M)              d/ds = (1 - beta) p (log p - log M - KL(p || M))

(the derivative of sum_v f(p_v) with respect to a logit is p_v (f'_v - sum p f'); arXiv 2306.13649, eq. 1, has the
last as "generalized JSD", with forward and reverse KL as the limits of jsd / beta and jsd / (1 - beta)).

Legend: R rows, S loss tokens per row, C tokens per chunk, D and E hidden sizes of student and teacher, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl.kernels.logprob import reference
from jaxrl.kernels.logprob.chunked import LOGITS_CPU, Split, _first_token, _Head, _line, _over
from jaxrl.kernels.logprob.reference import KINDS, OUTSIDE, capped_logits
from jaxrl.kernels.platform import platform
from jaxrl.types import custom_vjp


class How(NamedTuple):
    """The static part of a call of `divergence`.

    kind, beta: of the divergence. chunk: tokens whose logits exist at once. split: mesh axes, or None. transposed:
    whether the heads are [V, D]."""

    kind: str
    beta: float
    vocab: int               # ids from here on are in neither distribution
    softcap: tuple[float, float]  # of student and teacher, as `transposed`
    transposed: tuple[bool, bool]
    chunk: int
    split: Split | None

    @property
    def axis(self):
        """Mesh axis that the vocabulary is split over; None = whole."""
        return self.split.vocab if self.split else None


def divergence(hidden_RxSxD, head, teacher_RxSxE, teacher_head, valid_RxS=None, *, kind, beta=0.5, vocab=0,
               temperature=1.0, teacher_temperature=1.0, softcap=0.0, teacher_softcap=0.0, chunk=1024, split=None,
               transposed=False, teacher_transposed=False, implementation="chunked"):
    """Returns [R, S] divergence in nats of the student p = softmax(softcap(hidden @ head) / temperature) from the
    teacher's q:

        forward  KL(q || p)
        reverse  KL(p || q)
        jsd      beta KL(q || M) + (1 - beta) KL(p || M), M = beta q + (1 - beta) p

    Args:
      hidden_RxSxD: the student's hidden states that predict the targets. head: its output matrix [D, V], or [V, D]
        where `transposed` (static); cast to hidden's dtype.
      teacher_RxSxE, teacher_head, ...: the same of the teacher. Its head has as many tokens as the student's.
      valid_RxS: bool; where False the result and all gradients are 0. None = all valid.
      kind: a row of the table. beta: of jsd, above 0 and below 1.
      vocab: ids from this one on are left out of both distributions, which are renormalised; 0 = none.
      temperature, teacher_temperature: positive numbers; no gradient flows to them with "chunked".
      softcap, teacher_softcap: cap * tanh(logit / cap) on the logits, 0 = none (static).
      chunk: valid tokens of a device whose logits exist at once, at most (static).
      split: chunked.Split, the mesh axes that rows and vocabulary are split over (static). None = no mesh.
      implementation: "chunked", or "reference" (full logits, automatic differentiation).

    Returns:
      fp32 (float64 for float64 input), per token: nothing is summed or averaged over tokens. Gradients flow to hidden
      and head (where they are differentiated), summed in fp32; none to the teacher.

    Raises:
      ValueError: heads of different vocabularies, an unknown kind, jsd with beta outside (0, 1), another
        implementation."""
    reference.check_implementation("divergence", implementation)
    size, other = head.shape[0 if transposed else 1], teacher_head.shape[0 if teacher_transposed else 1]
    if size != other:
        raise ValueError(f"divergence: the student's head has {size} tokens, the teacher's {other}: cut or pad one")
    if kind not in KINDS or (kind == "jsd" and not 0 < beta < 1):
        raise ValueError(f"divergence: kind={kind!r}, beta={beta}: choose from {', '.join(KINDS)}; jsd with "
                         "0 < beta < 1")
    valid_RxS = jnp.ones(hidden_RxSxD.shape[:2], bool) if valid_RxS is None else valid_RxS
    dtype = jnp.promote_types(hidden_RxSxD.dtype, jnp.float32)
    temperatures = jnp.stack([jnp.asarray(t, dtype) for t in (temperature, teacher_temperature)])
    how = How(kind, float(beta), int(vocab) or size, (softcap, teacher_softcap), (transposed, teacher_transposed),
              chunk, split)
    run = _truth if implementation == "reference" else _chunked
    return run(hidden_RxSxD, head, teacher_RxSxE, teacher_head, valid_RxS, temperatures, how)


def _truth(hidden, head, teacher, teacher_head, valid, temperatures, how: How):
    """Computes it from full logits, with automatic differentiation."""
    def log_probs(x, weights, i):
        logits = capped_logits(x, weights, how.softcap[i], how.transposed[i]) / temperatures[i]
        return jax.nn.log_softmax(logits[..., :how.vocab].astype(temperatures.dtype), axis=-1)

    student = log_probs(hidden, head, 0)
    taught = log_probs(jax.lax.stop_gradient(teacher), jax.lax.stop_gradient(teacher_head), 1)
    return jnp.where(valid, reference.divergence(student, taught, how.kind, how.beta), 0)


@custom_vjp(6)
def _chunked(hidden, head, teacher, teacher_head, valid, temperatures, how: How):
    def local(hidden, head, teacher, teacher_head, valid, temperatures):
        line = _line(valid, _tokens(how, valid, head))

        def one(_, xs):
            at, h_CxD, t_CxE = xs

            def compute():
                logp, logq, _ = _log_probs(head, teacher_head, h_CxD, t_CxE, temperatures, how)
                return _terms(logp, logq, how)[0]

            return None, jax.lax.cond(at[0] < valid.size, compute, lambda: jnp.zeros(len(at), temperatures.dtype))

        return line.back(jax.lax.scan(one, None, (line.at, line.chunks(hidden), line.chunks(teacher)))[1], valid.shape)

    return _placed(local, how, "r")(hidden, head, teacher, teacher_head, valid, temperatures)


def _rule(hidden, head, teacher, teacher_head, valid, temperatures, how: How):
    learns = () if head.perturbed else None
    inputs = tuple(x.value for x in (hidden, head, teacher, teacher_head, valid, temperatures))
    return _chunked(*inputs, how), (learns, *inputs)


def _backward(how: How, saved, g_RxS):
    """Returns the gradients of hidden [R, S, D] and head (None if it is not differentiated), then None for the other
    inputs.

    g_RxS: cotangent of the divergence. Computed chunk by chunk from log-probs that are made again."""
    learns, *inputs = saved
    if isinstance(g_RxS, jax.custom_derivatives.SymbolicZero):
        g_RxS = jnp.zeros(g_RxS.shape, g_RxS.dtype)
    acc = jnp.promote_types(inputs[0].dtype, jnp.float32)

    def local(hidden, head, teacher, teacher_head, valid, temperatures, g):
        line = _line(valid, _tokens(how, valid, head))
        whole = _Head(head, how.transposed[0], 0, 0, 0)

        def one(grad_head, xs):
            at, h_CxD, t_CxE, g_C = xs

            def compute(grad_head):
                logp, logq, capped = _log_probs(head, teacher_head, h_CxD, t_CxE, temperatures, how)
                d = g_C[:, None] * _terms(logp, logq, how)[1]() / temperatures[0]
                if how.softcap[0]:
                    d = d * (1 - jnp.square(capped / how.softcap[0]))
                d = d.astype(h_CxD.dtype)
                grad_h = _over(how.axis, jax.lax.psum, whole.backward(d, 0)).astype(h_CxD.dtype)
                if learns is None:
                    return None, grad_h
                more = jax.lax.dot_general(h_CxD.T, d, (((1,), (0,)), ((), ())), preferred_element_type=acc)
                return grad_head + more, grad_h

            return jax.lax.cond(at[0] < valid.size, compute, lambda grad: (grad, jnp.zeros_like(h_CxD)), grad_head)

        none = None if learns is None else jnp.zeros(head.shape[::-1] if how.transposed[0] else head.shape, acc)
        xs = (line.at, *(line.chunks(x) for x in (hidden, teacher, g)))
        grad_head, grad_hidden = jax.lax.scan(one, none, xs)
        grad_hidden = line.back(grad_hidden, valid.shape)
        if learns is None:
            return (grad_hidden,)
        over = how.split.over if how.split else ()
        grad_head = jax.lax.psum(grad_head, over) if over else grad_head
        return grad_hidden, (grad_head.T if how.transposed[0] else grad_head).astype(head.dtype)

    grad_hidden, *grad_head = _placed(local, how, "r" if learns is None else "rv")(*inputs, g_RxS)
    return grad_hidden, *(grad_head or [None]), None, None, None, None


_chunked.defvjp(_rule, _backward, symbolic_zeros=True)


def _tokens(how: How, valid, head) -> int:
    """Returns tokens of a chunk: on CPUs so few that their logits stay in the cache."""
    most = max(16, LOGITS_CPU // head.shape[0 if how.transposed[0] else 1]) if platform() == "cpu" else how.chunk
    return min(how.chunk, most, valid.size)


def _log_probs(head, teacher_head, h_CxD, t_CxE, temperatures, how: How):
    """Returns ([C, V] log-probs of student and teacher, the student's logits before temperature), of this device's
    tokens."""
    out = []
    for i, (x, weights) in enumerate(((h_CxD, head), (t_CxE, teacher_head))):
        capped = capped_logits(x, weights, how.softcap[i], how.transposed[i])
        logits = capped.astype(temperatures.dtype) / temperatures[i]
        ids = _first_token(logits.shape[1], how.axis) + jnp.arange(logits.shape[1])
        logits = jnp.where(ids < how.vocab, logits, OUTSIDE)
        top = _over(how.axis, jax.lax.pmax, logits.max(-1, keepdims=True))
        total = _over(how.axis, jax.lax.psum, jnp.exp(logits - top).sum(-1, keepdims=True))
        out += [logits - top - jnp.log(total), capped]
    return out[0], out[2], out[1]


def _terms(logp, logq, how: How):
    """Returns ([C] divergence, function of its derivative [C, V] with respect to the student's logits)."""
    every = lambda x: _over(how.axis, jax.lax.psum, x.sum(-1, keepdims=True))  # noqa: E731
    p, q = jnp.exp(logp), jnp.exp(logq)
    if how.kind == "forward":
        return every(q * (logq - logp))[:, 0], lambda: p - q
    other = logq if how.kind == "reverse" else reference.mixture(logp, logq, how.beta)
    own = every(p * (logp - other))
    derivative = lambda: p * (logp - other - own)  # noqa: E731
    if how.kind == "reverse":
        return own[:, 0], derivative
    beta = how.beta
    return (beta * every(q * (logq - other)) + (1 - beta) * own)[:, 0], lambda: (1 - beta) * derivative()


def _placed(local, how: How, outputs: str):
    """Runs `local` on every device's slots and part of the vocabulary; outputs: r = split as slots are, v = as the
    head."""
    if how.split is None:
        return local
    rows, vocab = how.split.spec, how.split.vocab
    head, teacher_head = (P(vocab) if turned else P(None, vocab) for turned in how.transposed)
    inputs = rows, head, rows, teacher_head, rows, P()

    def place(*arrays):
        of = tuple({"r": rows, "v": head}[c] for c in outputs)
        one = len(arrays) == len(inputs)  # forward: an array; backward: a tuple
        return jax.shard_map(local, in_specs=(*inputs, *[rows] * (len(arrays) - len(inputs))),
                             out_specs=of[0] if one else of, check_vma=False)(*arrays)

    return place
