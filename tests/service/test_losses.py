"""Losses, gradients and optimizer steps of the training service beside torch and PEFT in float64."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.peft_cases import Imported, checkpoint, in_float64, lora_config, torch_model, wrapped
from helpers.tiny_models import VOCAB
from helpers.trainer_cases import (
    CONFIGS,
    LARGEST,
    LONGEST,
    RANK,
    adopted,
    data,
    learning,
    of_loss,
    their_loss,
    trainer_of,
    under_peft_s_names,
)

from jaxrl.algorithms.api_losses import API_LOSSES, token_losses
from jaxrl.service import bodies
from jaxrl.service.refusals import Refused
from jaxrl.service.trainer import AdamSettings, LoraOptions

torch = Imported("torch")
pytestmark = [pytest.mark.torch, pytest.mark.full]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(a trainer in float64, PEFT's model of the same base)."""
    path = checkpoint(tmp_path_factory.mktemp("base"))
    with jax.enable_x64(True):
        trainer = trainer_of(path, np.float64)
        theirs = in_float64(wrapped(torch_model(path, "sdpa"), lora_config(r=RANK, lora_alpha=32)))
        yield trainer, theirs


@pytest.mark.parametrize("name", API_LOSSES)
def test_a_loss_is_the_documented_sum(models, name):
    """Log-probs, loss and gradient in float64; two requests add up."""
    trainer, theirs = models
    rows, config = data(np.random.default_rng(3)), CONFIGS.get(name, {})
    run = adopted(trainer, theirs)
    theirs.zero_grad()
    logprobs, loss = their_loss(theirs, rows, name, low=0.9)
    loss.backward()
    found, total = [], 0.0
    for part in (rows[:2], rows[2:]):
        batch = bodies.batch(of_loss(part, name), name, config, LONGEST, VOCAB)
        own, value = trainer.forward_backward(run, batch, True)
        found, total = found + own, total + value
    assert trainer.forward_backward(run, batch, False)[1] == pytest.approx(value, rel=1e-12)  # adds nothing
    for ours, other in zip(found, logprobs, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-10)
    assert total == pytest.approx(loss.item(), rel=1e-10)
    grads = under_peft_s_names(trainer, run, run.window | {k: v for k, v in run.state.frozen.items()})
    wanted = learning(theirs)
    assert grads.keys() == wanted.keys() and max(np.abs(g).max() for g in grads.values()) > 1
    for key, gradient in grads.items():
        np.testing.assert_allclose(gradient, wanted[key].grad.numpy(), atol=1e-10 * max(1, np.abs(gradient).max()), err_msg=key)


@pytest.mark.parametrize("name, number", [(name, loss.number) for name, loss in API_LOSSES.items()])
def test_gradients_are_finite_where_the_ratio_overflows(name, number):
    """Of a loss that is finite: a clipped ratio has no gradient, whatever its size."""
    def loss(logp):
        ones = np.ones(2, np.float32)
        return token_losses(logp, np.array([-200, -1], np.float32), ones, ones, np.full(2, number), 0.8 * ones, 1.2 * ones,
                            np.array([199, 0], np.float32)).sum()

    value, grad = jax.value_and_grad(loss)(np.array([-1, -1], np.float32))
    assert bool(np.isfinite(value)) == bool(np.isfinite(grad).all()) == (name != "importance_sampling")


def test_a_sequence_s_ratio_needs_a_token():
    row = of_loss(data(np.random.default_rng(1), (6,)), "gspo")
    row[0].tensors["sequence_ratio_mask"][:] = 0
    with pytest.raises(Refused, match="sequence_ratio_mask marks no token"):
        bodies.batch(row, "gspo", CONFIGS["gspo"], LONGEST, VOCAB)


def test_a_step_is_torch_s_adamw(models):
    """Three steps whose settings differ, clipped and not, with decay; columns beyond the run's rank stay zero."""
    trainer, theirs = models
    run, rows = adopted(trainer, theirs), data(np.random.default_rng(5))
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    rule = torch.optim.AdamW(learning(theirs).values())
    for settings in (AdamSettings(1e-2, 0.9, 0.95, 1e-8), AdamSettings(3e-3, 0.8, 0.99, 1e-8, 0.1, 2.0), AdamSettings(2e-3, eps=1e-8)):
        batch = bodies.batch(of_loss(rows, "cross_entropy"), "cross_entropy", {}, LONGEST, VOCAB)
        trainer.forward_backward(run, batch, True)
        found = trainer.optim_step(run, settings)
        rule.zero_grad()
        their_loss(theirs, rows, "cross_entropy")[1].backward()
        norm = torch.nn.utils.clip_grad_norm_(learning(theirs).values(), settings.grad_clip_norm or 1e30).item()
        rule.param_groups[0].update(lr=settings.learning_rate, betas=settings[1:3], eps=settings.eps,
                                    weight_decay=settings.weight_decay)
        rule.step()
        assert found["optim/grad_norm"] == pytest.approx(norm, rel=1e-9)
    ours = under_peft_s_names(trainer, run, trainer.leaves(run))
    for key, wanted in learning(theirs).items():
        np.testing.assert_allclose(ours[key], wanted.detach().numpy(), atol=1e-8, err_msg=key)  # torch clips by norm + 1e-6
    beyond = [x[..., RANK:] for name, x in trainer.leaves(run).items() if name.endswith("/a")]
    assert beyond and all(part.shape[-1] == LARGEST - RANK and not part.any() for part in beyond)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(before[name])


def test_requests_of_any_size_compile_nothing_further(models):
    """Programs are those of the rows' shapes, whatever number, length, rank, loss and learning rate a request has."""
    trainer, _ = models
    rng, run = np.random.default_rng(7), trainer.start(LoraOptions(LARGEST, 1, mlp=False))
    shapes = sum(len(counts) for counts in trainer.row_shapes.counts)
    for k in range(12):
        rows = data(rng, rng.integers(1, LONGEST, rng.integers(1, 12)))
        name = list(API_LOSSES)[k % len(API_LOSSES)]
        trainer.forward_backward(run, bodies.batch(of_loss(rows, name), name, CONFIGS.get(name, {}), LONGEST, VOCAB), True)
        trainer.optim_step(run, AdamSettings(1e-3 / (k + 1), grad_clip_norm=k))
    state = run.state
    empty, accumulate, _ = trainer.update.compiled(state.replace(frozen={**trainer.base, **state.frozen}))
    assert accumulate._cache_size() == empty._cache_size() == shapes == 1
    assert trainer.update.compiled(state)[2]._cache_size() == 1
    moved = {name for name, x in flatten_dict(trainer.leaves(run)).items() if name[0].endswith("/b") and x.any()}
    assert moved and not any("mlp" in name[0] for name in moved)


def test_what_is_not_finite_is_refused_and_applies_nothing(models):
    trainer, theirs = models
    run = adopted(trainer, theirs)
    row = of_loss(data(np.random.default_rng(1), (6,)), "ppo")
    row[0].tensors["logprobs"][2] = -1e4
    row[0].tensors["advantages"][2] = -1.0
    before = trainer.leaves(run)
    with pytest.raises(Refused, match="the loss is inf: nothing was added"):
        trainer.forward_backward(run, bodies.batch(row, "ppo", {}, LONGEST, VOCAB), True)
    with pytest.raises(Refused, match="there are no gradients"):
        trainer.optim_step(run, AdamSettings())
    assert all(np.array_equal(x, before[name]) for name, x in trainer.leaves(run).items())
