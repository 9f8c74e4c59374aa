"""The chunked log-prob equals the full-logits truth, forward and gradient, and does not hold the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import first_cases, first_only

from jaxrl.kernels.logprob import chunked, divergence, logprob_and_entropy


@pytest.fixture(params=first_only([0, 20, 25]))
def blocks(request, monkeypatch):
    """The vocabulary of 50 whole, in blocks that overlap at its end, and in even ones."""
    if request.param:
        monkeypatch.setattr(chunked, "LOGITS_CPU", 0)
        monkeypatch.setattr(chunked, "NARROWEST", request.param)


# The reference knows no blocks.
IMPLEMENTATIONS = pytest.mark.parametrize("implementation, blocks", [
    ("chunked", 0), ("chunked", 20), ("chunked", 25), ("reference", 0)], indirect=["blocks"])


def _inputs(rows=3, scored=13, d=16, vocab=50, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (rows, scored, d), dtype) * 2
    head = jax.random.normal(keys[1], (d, vocab), dtype)
    targets = jax.random.randint(keys[2], (rows, scored), 0, vocab)
    valid = jnp.arange(scored)[None] < jnp.array([13, 5, 0])[:rows, None]
    return hidden, head, targets, valid


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("chunk", [1, 6, 1024])
@pytest.mark.slow
def test_chunked_equals_reference_with_gradients(softcap, chunk, blocks):
    hidden, head, targets, valid = _inputs()

    def loss(h, w, implementation):
        logp, ent = logprob_and_entropy(
            h, w, targets, valid, temperature=0.7, softcap=softcap, chunk=chunk, implementation=implementation
        )
        return jnp.sum(jnp.sin(logp) + 0.3 * jnp.square(ent)), (logp, ent)

    outs = {}
    for name in ("chunked", "reference"):
        outs[name] = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head, name)
    for a, b in zip(jax.tree.leaves(outs["chunked"]), jax.tree.leaves(outs["reference"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_kept_logits_are_those_that_would_be_made_again(blocks, monkeypatch):
    hidden, head, targets, valid = _inputs()
    support = jnp.concatenate([targets[..., None], jnp.full((3, 13, 2), -1), jnp.full((3, 13, 1), 7)], axis=-1)

    def grads(kept):
        monkeypatch.setattr(chunked, "KEPT_CPU", kept)

        def loss(h, w):
            logp, ent = logprob_and_entropy(h, w, targets, valid, support, temperature=0.7, softcap=5.0, chunk=6)
            return jnp.sum(jnp.sin(logp) + 0.3 * jnp.square(ent))

        products = str(jax.make_jaxpr(jax.grad(loss))(hidden, head)).count("dot_general")
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head), products

    (kept, products), (again, more) = grads(1 << 26), grads(0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=3e-6), kept, again)
    assert products == more - 1


@pytest.mark.full
@IMPLEMENTATIONS
@first_cases(1, "transposed", [True, False])
def test_a_part_of_low_rank_is_a_head_with_it_added(implementation, transposed, blocks):
    """Value and gradients of (hidden A) B beside the head, in float64; the head has no gradient of its own."""
    with jax.enable_x64(True):
        hidden, head, targets, valid = _inputs(dtype=jnp.float64)
        a, b = (jax.random.normal(jax.random.key(k), shape) for k, shape in ((7, (16, 3)), (8, (3, 50))))
        ids = jnp.concatenate([targets[..., None], jnp.full((3, 13, 1), -1)], -1)

        def loss(parts, apart):
            hidden, a, b = parts
            whole = head if apart else head + a @ b
            few = (hidden @ a, b) if apart else (None, None)
            logp, ent, _, most, own = logprob_and_entropy(
                hidden, whole.T if transposed else whole, targets, valid, None, ids, *few, softcap=5.0, top=2, chunk=6,
                temperature=0.7, transposed=transposed, implementation=implementation)
            return jnp.sum(jnp.sin(logp) + 0.3 * jnp.square(ent)) + own.sum(), (logp, ent, most)

        one, other = (jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)((hidden, a, b), apart) for apart in (True, False))
        assert min(float(jnp.abs(g).max()) for g in one[1]) > 1e-2
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11), one, other)


def test_a_head_beside_a_part_of_low_rank_has_no_gradient():
    hidden, head, targets, _ = _inputs()
    loss = lambda w: logprob_and_entropy(hidden, w, targets, None, None, None, hidden[..., :1], head[:1])[0].sum()  # noqa: E731
    with pytest.raises(ValueError, match="has no gradient itself"):
        jax.grad(loss)(head)


@pytest.mark.full
@IMPLEMENTATIONS
def test_an_embedding_table_serves_as_it_lies(implementation, blocks):
    hidden, head, targets, valid = _inputs()

    def loss(h, w, transposed):
        logp, ent, *_ = logprob_and_entropy(h, w, targets, valid, softcap=5.0, top=2, chunk=6, transposed=transposed,
                                            implementation=implementation)
        return jnp.sum(jnp.sin(logp) + 0.3 * jnp.square(ent)), (logp, ent)

    grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    plain, (grad_h, grad_w) = grads(hidden, head, False)
    turned, (turned_h, turned_w) = grads(hidden, head.T, True)
    for a, b in zip(jax.tree.leaves((plain, grad_h, grad_w)), jax.tree.leaves((turned, turned_h, turned_w.T)),
                    strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.full
@IMPLEMENTATIONS
def test_the_most_probable_tokens_come_along(implementation, blocks):
    hidden, head, targets, valid = _inputs()

    def both(h, top):
        found = logprob_and_entropy(h, head, targets, valid, temperature=0.7, top=top, chunk=6,
                                    implementation=implementation)
        return sum(jnp.sum(x) for x in found), found

    (_, found), grad = jax.value_and_grad(both, has_aux=True)(hidden, 3)
    (_, plain), plain_grad = jax.value_and_grad(both, has_aux=True)(hidden, 0)
    assert len(plain) == 2 and all((a == b).all() for a, b in zip(plain, found[:2], strict=True))
    np.testing.assert_array_equal(grad, plain_grad)
    exact = jax.nn.log_softmax(np.float64(hidden) @ np.float64(head) / 0.7)
    order = np.argsort(-exact, axis=-1)[..., :3]
    np.testing.assert_array_equal(found[2], np.where(valid[..., None], order, -1))
    np.testing.assert_allclose(found[3], np.where(valid[..., None], np.take_along_axis(exact, order, -1), 0), rtol=2e-5,
                               atol=2e-5)


def test_more_tokens_than_there_are_is_refused():
    with pytest.raises(ValueError, match="top=51 of a vocabulary of 50"):
        logprob_and_entropy(*_inputs(), top=51)


@pytest.mark.full
def test_closed_form_uniform():
    hidden, head, targets, _ = _inputs()
    logp, ent = logprob_and_entropy(hidden * 0, head, targets)
    np.testing.assert_allclose(logp, -np.log(50), rtol=1e-6)
    np.testing.assert_allclose(ent, np.log(50), rtol=1e-6)


@pytest.mark.full
def test_invalid_tokens_are_inert_even_when_not_finite():
    hidden, head, targets, valid = _inputs()

    def total(h):
        logp, ent = logprob_and_entropy(h, head, targets, valid, chunk=6)
        return jnp.sum(logp) + jnp.sum(ent)

    value, grad = jax.value_and_grad(total)(hidden)
    dirty = jnp.where(valid[..., None], hidden, 1e30)
    dirty_value, dirty_grad = jax.value_and_grad(total)(dirty)
    assert value == dirty_value
    np.testing.assert_array_equal(jnp.where(valid[..., None], grad, 0), jnp.where(valid[..., None], dirty_grad, 0))


def test_an_unknown_implementation_is_refused():
    x, head, targets = jnp.ones((1, 2, 4)), jnp.ones((4, 8)), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="logprob_and_entropy implementation 'chunkd': choose chunked, reference"):
        logprob_and_entropy(x, head, targets, implementation="chunkd")
    with pytest.raises(ValueError, match="divergence implementation 'auto': choose chunked, reference"):
        divergence(x, head, x, head, kind="forward", implementation="auto")


@pytest.mark.full
def test_memory_does_not_hold_the_logits():
    rows, scored, d, vocab = 1, 4096, 64, 32768
    shapes = (
        jax.ShapeDtypeStruct((rows, scored, d), jnp.float32),
        jax.ShapeDtypeStruct((d, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows, scored), jnp.int32),
    )

    def peak(implementation):
        def loss(h, w, t):
            logp, ent = logprob_and_entropy(h, w, t, chunk=256, implementation=implementation)
            return jnp.sum(logp + ent)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak("reference") > scored * vocab * 4
    assert peak("chunked") < scored * vocab * 4 / 4


def results_of_shape(jaxpr, shape) -> int:
    """How many operations of a program, those of its inner ones too, have a result of this shape."""
    found = 0
    for eqn in jaxpr.eqns:
        found += any(v.aval.shape == shape for v in eqn.outvars)
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            found += results_of_shape(inner, shape) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.full
@pytest.mark.parametrize("transposed", [False, True])
def test_a_head_that_does_not_learn_costs_no_gradient(transposed, monkeypatch):
    """No fp32 array of the head's size is in the program, whatever a compiler would make of one that nobody reads, nor in its
    memory. Values and the hidden states' gradient are bitwise the same with and without the head's, which is there where it is
    asked for."""
    monkeypatch.setattr(chunked, "KEPT_CPU", 0)
    d, vocab = 256, 32768
    hidden = jax.random.normal(jax.random.key(0), (1, 96, d))
    head = jax.random.normal(jax.random.key(1), (vocab, d) if transposed else (d, vocab))
    targets = jax.random.randint(jax.random.key(2), (1, 96), 0, vocab)

    def gradients(argnums):
        def loss(h, w):
            logp, entropy = logprob_and_entropy(h, w, targets, chunk=32, transposed=transposed)
            return jnp.sum(logp + 0.1 * entropy)

        run = jax.jit(jax.value_and_grad(loss, argnums))
        compiled = run.lower(hidden, head).compile()
        made = results_of_shape(jax.make_jaxpr(run)(hidden, head).jaxpr, (d, vocab))
        return compiled(hidden, head), made, compiled.memory_analysis().temp_size_in_bytes

    ((value, (alone,)), made, temporaries), ((known, (both, of_head)), gradients_made, _) = gradients((0,)), gradients((0, 1))
    np.testing.assert_array_equal(value, known)
    np.testing.assert_array_equal(alone, both)
    assert made == 0 < gradients_made and temporaries < 4 * d * vocab / 2 and np.abs(of_head).max() > 0


@IMPLEMENTATIONS
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.slow
def test_log_probs_at_given_ids_and_their_gradient(implementation, softcap, blocks):
    """In float64 against a softmax: log-probs at ids, and scatter(g) - p sum g, beside the gradient of target and entropy."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        hidden, head = jnp.asarray(rng.normal(size=(2, 7, 8))), jnp.asarray(rng.normal(size=(8, 50)))
        ids = np.stack([rng.permutation(50)[:6] for _ in range(14)]).reshape(2, 7, 6)
        ids[0, :, 3:] = -1
        valid, targets = jnp.asarray(rng.random((2, 7)) < 0.8), jnp.asarray(rng.integers(0, 50, (2, 7)))
        weights, (a, b) = jnp.asarray(rng.normal(size=(2, 7, 6))), jnp.asarray(rng.normal(size=(2, 2, 7)))

        def total(h, w):
            logp, entropy, *more, found = logprob_and_entropy(h, w, targets, valid, None, jnp.asarray(ids), temperature=0.7,
                                                              softcap=softcap, top=2, chunk=4, implementation=implementation)
            assert len(more) == 2
            return jnp.sum(weights * found) + jnp.sum(a * logp + b * entropy), found

        def truth(h, w):
            logits = h @ w
            logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
            logp = jax.nn.log_softmax(logits / 0.7)
            found = jnp.where(valid[..., None] & (ids >= 0), jnp.take_along_axis(logp, jnp.maximum(ids, 0), -1), 0)
            target = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
            entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
            return jnp.sum(weights * found) + jnp.sum(jnp.where(valid, a * target + b * entropy, 0)), found

        got, want = (jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, head) for f in (total, truth))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12), got, want)


def test_ids_within_a_support_are_refused():
    hidden, head, targets, valid = _inputs()
    with pytest.raises(ValueError, match="ids together with a support"):
        logprob_and_entropy(hidden, head, targets, valid, targets[..., None], targets[..., None])


@pytest.mark.slow
def test_a_support_cuts_and_renormalises(blocks):
    """Against a softmax over the listed tokens alone; gradients of both implementations in float64."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        hidden, head = jnp.asarray(rng.normal(size=(2, 5, 8))), jnp.asarray(rng.normal(size=(8, 30)))
        support = np.stack([rng.permutation(30)[:6] for _ in range(10)]).reshape(2, 5, 6)
        targets = jnp.asarray(support[..., 2])
        support[0, :, 4:] = -1  # smaller supports
        weights = jnp.asarray(rng.normal(size=(2, 2, 5)))

        def total(hidden, head, implementation):
            both = logprob_and_entropy(hidden, head, targets, None, jnp.asarray(support), temperature=0.7, softcap=3.0,
                                       chunk=4,
                                       implementation=implementation)
            return sum(jnp.sum(w * x) for w, x in zip(weights, both, strict=True)), both

        (_, (logp, entropy)), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head, "chunked")
        logits = 3 * np.tanh(np.asarray(hidden @ head) / 3) / 0.7
        for r, s in np.ndindex(2, 5):
            listed = support[r, s][support[r, s] >= 0]
            own = logits[r, s, listed] - np.log(np.exp(logits[r, s, listed]).sum())
            np.testing.assert_allclose(logp[r, s], own[2], rtol=1e-12)
            np.testing.assert_allclose(entropy[r, s], -(np.exp(own) * own).sum(), rtol=1e-12)
        truth = jax.grad(lambda h, w: total(h, w, "reference")[0], (0, 1))(hidden, head)
        for got, want in zip(grads, truth, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)
