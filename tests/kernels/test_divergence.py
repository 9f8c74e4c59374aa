"""The chunked divergence of two heads equals the one of full logits, and its gradient is the student's alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.kernels.logprob import divergence

KINDS = ("forward", "reverse", "jsd")


def _inputs(rows=2, scored=9, d=8, e=12, vocab=40, dtype=np.float64):
    rng = np.random.default_rng(1)
    arrays = (rng.normal(size=shape) for shape in ((rows, scored, d), (d, vocab), (rows, scored, e), (e, vocab)))
    return *(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(rng.random((rows, scored)) < 0.7)


def exact(hidden, head, teacher, teacher_head, kind, beta, cap, teacher_cap, vocab):
    """Full logits with numpy's float64, from the definitions."""
    logits = [c * np.tanh(x @ w / c) / t for x, w, c, t in ((hidden, head, cap, 0.7), (teacher, teacher_head, teacher_cap, 1.3))]
    p, q = (np.exp(z[..., :vocab]) / np.exp(z[..., :vocab]).sum(-1, keepdims=True) for z in logits)
    m = beta * q + (1 - beta) * p
    kl = lambda a, b: (a * np.log(a / b)).sum(-1)  # noqa: E731
    return {"forward": kl(q, p), "reverse": kl(p, q), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[kind]


@first_cases(1, "kind", KINDS)
@first_cases(1, "transposed", [False, True])
def test_values_and_gradients_are_those_of_full_logits(kind, transposed):
    with jax.enable_x64(True):
        hidden, head, teacher, teacher_head, valid = _inputs()
        heads = (head.T, teacher_head.T) if transposed else (head, teacher_head)
        weights = jnp.asarray(np.random.default_rng(2).normal(size=valid.shape))

        def total(h, w, t, u, implementation):
            found = divergence(h, w, t, u, valid, kind=kind, beta=0.3, vocab=37, temperature=0.7, teacher_temperature=1.3,
                               softcap=5.0, teacher_softcap=6.0, chunk=4, transposed=transposed, teacher_transposed=transposed,
                               implementation=implementation)
            return jnp.sum(weights * found), found

        got, want = (jax.jit(jax.value_and_grad(lambda *x, how=how: total(*x, how), (0, 1, 2, 3), has_aux=True))(
            hidden, heads[0], teacher, heads[1]) for how in ("chunked", "reference"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), got, want)
        plain = exact(*map(np.asarray, (hidden, head, teacher, teacher_head)), kind, 0.3, 5.0, 6.0, 37)
        np.testing.assert_allclose(got[0][1], np.where(valid, plain, 0), rtol=1e-11)
        assert not np.any(got[1][2]) and not np.any(got[1][3]) and np.abs(got[1][1]).max() > 1e-3


@pytest.mark.full
@first_cases(1, "kind", KINDS)
def test_a_teacher_that_is_the_student_moves_nothing(kind):
    hidden, head, *_, valid = _inputs(dtype=np.float32)
    value, grads = jax.value_and_grad(
        lambda h, w: jnp.sum(divergence(h, w, hidden, head, valid, kind=kind, chunk=4)), (0, 1))(hidden, head)
    assert abs(value) < 1e-5 and max(np.abs(g).max() for g in grads) < 1e-5


@pytest.mark.full
def test_memory_holds_neither_logits_nor_a_gradient_of_a_head_that_does_not_learn():
    scored, d, vocab = 2048, 32, 8192
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    shapes = shape(1, scored, d), shape(d, vocab), shape(1, scored, d), shape(d, vocab)

    def temporaries(argnums, **options):
        total = lambda *x: jnp.sum(divergence(*x, kind="jsd", chunk=32, **options))  # noqa: E731
        return jax.jit(jax.grad(total, argnums)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * scored * vocab
    assert temporaries((0, 1), implementation="reference") > 2 * logits
    assert temporaries((0, 1)) < logits / 4
    assert temporaries((0,)) <= temporaries((0, 1)) - 4 * d * vocab


def test_what_does_not_fit_is_refused():
    hidden, head, teacher, teacher_head, valid = _inputs(dtype=np.float32)
    with pytest.raises(ValueError, match="the student's head has 40 tokens, the teacher's 39"):
        divergence(hidden, head, teacher, teacher_head[:, 1:], valid, kind="forward")
    for kind, beta in (("jsd", 1.0), ("jsd", 0.0), ("kl", 0.5)):
        with pytest.raises(ValueError, match=f"kind='{kind}', beta={beta}"):
            divergence(hidden, head, teacher, teacher_head, valid, kind=kind, beta=beta)
