"""Scores read behind tokens, and losses of them as weighted updates: the gradient of the whole loss, however it is packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training_helpers import params_of, tiny_model

from jaxrl import training
from jaxrl.algorithms.scores import bradley_terry, step_labels
from jaxrl.models.value import ValueModel
from jaxrl.training.score import make_value_score
from jaxrl.training.update import loss_and_metrics

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, 61, n) for n in (3, 1, 7, 0, 4)]
ANSWERS = [RNG.integers(1, 61, n) for n in (5, 2, 1, 9, 6, 6, 3, 12, 1, 4)]
READS = [np.array(r) for r in ([0, 4], [1], [0], [2, 3, 8], [5], [1, 5], [2], [0, 1, 11], [0], [3])]
MARGIN, LABELS = RNG.normal(size=5), RNG.random(sum(map(len, READS)))
PACKINGS = {  # row lengths, tokens of a microbatch, whether the answers of a pair share their prompt
    "one row each": ((24,), 24, False), "packed": ((64,), 64, False), "shared": ((64,), 128, True), "two lengths": ((24, 48), 96, True)}


def batch(kind):
    """(trajectories, loss) of five prompts with two answers each."""
    prompts = [p for p in PROMPTS for _ in range(2)]
    if kind == "steps":
        return (training.scored_behind(prompts, ANSWERS, np.repeat(np.arange(5), 2), READS), lambda s: step_labels(s, LABELS))
    pairs = np.arange(5)
    return (training.scored_behind(prompts, ANSWERS, np.repeat(pairs, 2)),
            lambda s: bradley_terry(s, 2 * pairs, 2 * pairs + 1, MARGIN, 0.2))


def in_graph(model, params, kind):
    """The loss as one would write it: every answer alone, no slot behind it, the derivative by jax."""
    scores = []
    for prompt, answer, reads in zip([p for p in PROMPTS for _ in range(2)], ANSWERS, READS, strict=True):
        tokens = np.concatenate([prompt, answer])[None]
        at, ones = np.arange(tokens.shape[1])[None], np.ones_like(tokens)
        hidden = model.forward(params, tokens, at, ones, 0 * ones)[0][0]
        where = len(prompt) + reads if kind == "steps" else np.array([tokens.shape[1] - 1])
        scores.append(hidden[where] @ params["value"]["kernel"])
    s = jnp.concatenate(scores)
    if kind == "steps":
        return jnp.mean(jnp.logaddexp(0.0, s) - LABELS * s)
    chosen, rejected = s[::2], s[1::2]
    return jnp.mean(jnp.logaddexp(0.0, -(chosen - rejected - MARGIN))) + 0.2 * jnp.mean((chosen + rejected) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "steps"])
def test_a_loss_of_scores_is_a_weighted_update(kind):
    """Every packing gives the loss and the gradient of the plain loss, in float64 (scores reach the host in float32)."""
    with jax.enable_x64(True):
        model = tiny_model(jnp.float64)
        params = params_of(model, jnp.float64)
        params = {name: node for name, node in params.items() if name != "head"} | {
            "value": {"kernel": jnp.asarray(np.random.default_rng(1).normal(size=32))}}
        assert set(params) == set(ValueModel(model, bias=False).tree(lambda entry: 0))
        want, slopes = jax.jit(jax.value_and_grad(lambda p: in_graph(model, p, kind)))(params)
        slopes = training.partition(slopes, (".*",), ())[0]
        trainable, frozen = training.partition(params, (".*",), ())
        score = make_value_score(model, put=lambda packed: packed)
        gradient = jax.jit(jax.grad(lambda t, packed: loss_and_metrics(t, frozen, packed, model, training.Score(max_grad_norm=0.0))[0]))
        (traj, loss), counts = batch(kind), []
        for name, (lengths, tokens, share) in PACKINGS.items():
            layout = training.make_layout(traj.sizes, training.row_shapes(lengths, lengths[-1], tokens, 1), share_prompts=share)
            counts.append(len(layout.minibatches[0].microbatches))
            scores = score(params, traj, layout)[traj.loss_mask]
            assert scores.dtype == np.float32  # what the host sees; the derivative below is at those numbers
            found, derivative, _ = loss(scores)
            assert found == pytest.approx(float(want), rel=1e-6), name
            weights = training.score_weights(traj, derivative)
            packed = [training.pack(traj, m, {}, weights, np.float64) for m in layout.minibatches[0].microbatches]
            total = jax.tree.map(lambda *parts: sum(parts), *(gradient(trainable, one) for one in packed))
            for leaf, slope in slopes.items():
                np.testing.assert_allclose(total[leaf], slope, rtol=1e-5, atol=1e-6 * np.abs(slope).max(), err_msg=f"{name} {leaf}")
        assert counts[0] > counts[1] > counts[2] == 1


@pytest.mark.full
def test_the_slot_behind_a_sequence_is_seen_by_nobody():
    """Scores are the same whatever the neighbours in the row."""
    model = tiny_model()
    params = params_of(model) | {"value": {"kernel": jnp.asarray(RNG.normal(size=32), jnp.float32)}}
    score, traj = make_value_score(model, put=lambda packed: packed), batch("pairs")[0]
    layout = training.make_layout(traj.sizes, training.row_shapes((64,), 64, 128, 1), share_prompts=False)
    together = score(params, traj, layout)
    for i in range(10):
        alone = training.scored_behind([PROMPTS[i // 2]], [ANSWERS[i]], [0])
        rows = training.make_layout(alone.sizes, training.row_shapes((64,), 64, 128, 1))
        assert score(params, alone, rows)[-1] == pytest.approx(together[traj.offsets[i + 1] - 1], abs=1e-4)
    with pytest.raises(ValueError, match="without tokens"):
        training.scored_behind([[]], [[]], [0])
