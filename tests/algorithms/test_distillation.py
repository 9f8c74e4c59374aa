"""Distillation: theorems by enumeration over small vocabularies, and TRL's loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases

from jaxrl.algorithms.distillation import DENSE, sampled_advantages, sparse_divergence
from jaxrl.kernels.logprob import divergence


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _logits(*shape, seed=0):
    return jnp.asarray(2 * np.random.default_rng(seed).normal(size=(2, *shape)))


def _full(logits, teacher, kind, beta=0.3, **temperatures):
    """The kernel's divergence [N] of logits [N, V]: heads that are the identity."""
    eye = jnp.eye(logits.shape[-1])
    return divergence(logits[None], eye, teacher[None], eye, kind=kind, beta=beta, **temperatures)[0]


@pytest.mark.full
def test_sampled_terms_have_the_gradient_of_the_reverse_kl_in_expectation():
    """Sum over all tokens y of p(y) A(y) grad log p(y), at discount 0, is minus the gradient of coef KL(p || q)."""
    student, teacher = _logits(7)
    logp, logq = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    one_each = np.arange(8)  # seven trajectories of one token
    advantage = sampled_advantages(logp, logq, np.ones(7, bool), one_each, coef=1.7, gamma=0.0)
    gradients = jax.jacobian(jax.nn.log_softmax)(student)
    expected = jnp.sum((jnp.exp(logp) * advantage)[:, None] * gradients, axis=0)
    exact = jax.grad(lambda s: 1.7 * _full(s[None], teacher[None], "reverse")[0])(student)
    np.testing.assert_allclose(expected, -exact, atol=1e-14)
    assert np.abs(exact).max() > 0.1


@pytest.mark.full
def test_sampled_terms_of_whole_sequences_have_the_gradient_of_their_kl():
    """Two steps of three tokens, the second's distribution depending on the first: with discount 1 the expectation over all
    nine sequences is the gradient of KL(p(y1 y2) || q(y1 y2)); with discount 0 it is that of the KL at visited states alone."""
    (first, q1), (second, q2) = _logits(3, seed=1), _logits(3, 3, seed=2)

    def logp(params):
        return jax.nn.log_softmax(params[0])[:, None], jax.nn.log_softmax(params[1], axis=-1)

    teacher = logp((q1, q2))
    params = (first, second)

    def kl(params):
        joint, other = sum(logp(params)), sum(teacher)
        return jnp.sum(jnp.exp(joint) * (joint - other))

    def visited(params):
        a, b = logp(params)
        seen = jax.lax.stop_gradient(jnp.exp(a[:, 0]))
        at = jnp.sum(jnp.exp(b) * (b - teacher[1]), axis=-1)
        return jnp.sum(jnp.exp(a[:, 0]) * (a[:, 0] - teacher[0][:, 0])) + jnp.sum(seen * at)

    for gamma, truth in ((1.0, kl), (0.0, visited)):
        total = jax.tree.map(jnp.zeros_like, params)
        for y1, y2 in np.ndindex(3, 3):
            steps = lambda p, y1=y1, y2=y2: jnp.stack([logp(p)[0][y1, 0], logp(p)[1][y1, y2]])  # noqa: E731
            q = np.array([teacher[0][y1, 0], teacher[1][y1, y2]])
            advantage = sampled_advantages(steps(params), q, np.ones(2, bool), np.array([0, 2]), coef=1.0, gamma=gamma)
            chance = float(jnp.exp(steps(params).sum()))
            found = jax.grad(lambda p: jnp.sum(advantage * steps(p)))(params)  # noqa: B023
            total = jax.tree.map(lambda a, b: a + chance * b, total, found)  # noqa: B023
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, atol=1e-13), total, jax.grad(truth)(params))


@pytest.mark.full
@first_cases(1, "kind", DENSE)
def test_with_a_tail_it_is_a_divergence_and_a_lower_bound(kind):
    """Over the teacher's and the student's top 4 of 20: never negative, at most the full divergence, and equal to it when the
    set is all but one token; without the tail the two KLs are negative for some."""
    student, teacher = _logits(400, 20, seed=3)
    logp, logq = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    full = _full(student, teacher, kind)
    below = []
    for of in (logq, logp):
        for count in (4, 19):
            ids = jnp.argsort(-of, axis=-1)[:, :count]
            p, q = (jnp.take_along_axis(x, ids, -1) for x in (logp, logq))
            used = jnp.ones(ids.shape, bool)
            found = sparse_divergence(p, q, used, kind=kind, beta=0.3)
            assert found.min() >= 0 and (found <= full + 1e-9).all()
            if count == 19:
                np.testing.assert_allclose(found, full, atol=1e-9)
            below.append(sparse_divergence(p, q, used, kind=kind, beta=0.3, tail=False).min())
    assert (min(below) < -0.05) == (kind != "jsd")  # jsd's terms are an f-divergence's with f'(1) = 0: none is negative


@pytest.mark.full
@first_cases(1, "kind", DENSE)
@first_cases(1, "tail", [True, False])
def test_a_teacher_that_is_the_student_has_no_gradient(kind, tail):
    """With the tail; and jsd without it, whose integrand has its minimum there. Forward and reverse have not: without the tail
    they would move a student that has arrived."""
    student, _ = _logits(6, 12)
    logq = jax.nn.log_softmax(student)
    ids = jnp.argsort(-logq, axis=-1)[:, :5]

    def loss(s):
        logp = jnp.take_along_axis(jax.nn.log_softmax(s), ids, -1)
        return jnp.sum(sparse_divergence(logp, jnp.take_along_axis(logq, ids, -1), jnp.ones(ids.shape, bool), kind=kind, tail=tail))

    value, grad = jax.value_and_grad(loss)(student)
    assert abs(value) < 1e-13
    assert (np.abs(grad).max() < 1e-13) == (tail or kind == "jsd")


@pytest.mark.slow
def test_unused_places_change_nothing():
    """Nor do they make a gradient that is not finite, in a token without any place at all too."""
    student, teacher = _logits(2, 3)
    logp, logq = (jax.nn.log_softmax(x)[:, :2] for x in (student, teacher))
    padded = lambda x: jnp.concatenate([x, jnp.zeros((2, 3))], -1)  # noqa: E731
    used = jnp.asarray([[True, True, False, False, False], [False] * 5])
    for kind in DENSE:
        plain = sparse_divergence(logp[0], logq[0], used[0, :2], kind=kind)
        found, grad = jax.value_and_grad(lambda p: jnp.sum(sparse_divergence(p, padded(logq), used, kind=kind)))(padded(logp))  # noqa: B023
        np.testing.assert_allclose(found, plain, rtol=1e-14)
        assert np.isfinite(grad).all() and not np.any(jnp.where(used, 0, grad))


@pytest.mark.compat  # trl is in no extra
@pytest.mark.torch
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_the_loss_is_trl_s(beta):
    """GKDTrainer.generalized_jsd_loss and its gradient in float64. TRL's ends of beta are ours by name: 0 forward, 1 reverse."""
    torch = pytest.importorskip("torch")
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = _logits(5, 11, seed=4)
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    mean = lambda s: jnp.mean(_full(s, teacher, kind, beta or 0.5, temperature=0.8, teacher_temperature=0.8))  # noqa: E731
    ours, our_grad = jax.value_and_grad(mean)(student)
    s, t = (torch.tensor(np.asarray(x))[None].requires_grad_(i == 0) for i, x in enumerate((student, teacher)))
    theirs = gkd.GKDTrainer.generalized_jsd_loss(s, t, labels=torch.zeros(1, 5, dtype=torch.long), beta=beta, temperature=0.8)
    theirs.backward()
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-10)
    np.testing.assert_allclose(our_grad, s.grad[0].numpy(), atol=1e-10)
