"""Several adapters in one batch: one update of all is, for each of them, the update that it would have had alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.lora_cases import all_linear, build, started
from helpers.tiers import first_cases
from helpers.training_helpers import batch_of_groups, policy_objective

from jaxrl import training
from jaxrl.config.load import default_config
from jaxrl.models import adapters
from jaxrl.models.adapters import adapter_set
from jaxrl.training.adapter_set import Optimizers, Rule
from jaxrl.training.layout import RowShapes
from jaxrl.types import Trajectories

HF = dict(model_type="qwen2", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
          num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True)
# of adapter and number: ranks, modules, learning rate, norm to clip by (the second's is never reached)
PARTS = {"first": all_linear(1, rank=3), "second": all_linear(1, rank=2, scale=0.5, skip=((0, "mlp.up_proj"),))}
RULES = {"first": (1e-2, 0.01), "second": (3e-3, 1e3)}
LOSS = policy_objective(kl_coef=0.1, entropy_coef=0.01, old="column", mismatch="token_tis", chunk=32, aggregation="sequence_mean")
GROUPS = np.array([1, 2, 2, 1, 2])  # whose each group of the batch is
LAYOUTS = {"one row each": (24, 4, False), "packed": (64, 2, True)}


@pytest.fixture(autouse=True)
def exact():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def rule(model, name):
    c = default_config().optimizer
    c.lr, c.warmup_steps, c.weight_decay = RULES[name][0], 2, 0.1
    return Rule(name, *training.make_optimizer(c, 10, {"/".join(e.path): e.axes for e in model.entries}), RULES[name][1])


def flat(model, seed=0):
    exact = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(exact, flatten_dict(started(model, seed, None), sep="/"))


@functools.cache
def update_of(scan, bits):
    """(cases, optimizers, update) of both."""
    found = cases(scan, bits=bits)
    optimizer = of_all(found[0])
    return found, optimizer, training.make_update(found[0], optimizer, None, LOSS)


def cases(scan=False, parts=PARTS, bits=""):
    """(model with all, [models alone], parameters of all, [parameters alone])."""
    model = build(adapter_set.combine_adapters({n: dataclasses.replace(a, quantized=bits) for n, a in parts.items()}), HF, scan, jnp.float64)
    alone = [adapter_set.select_model(model, k) for k in range(len(parts))]
    own = [flat(one, k) for k, one in enumerate(alone)]
    base = {name: x for name, x in own[0].items() if not adapters.is_adapter(name)}
    own = [{**one, **base} for one in own]  # one base
    return model, alone, adapter_set.join_leaves(model, own), own


def batch(which=(1, 2)):
    """(trajectories, columns) of the groups of some adapters, with its column."""
    traj, columns = batch_of_groups()
    kept = np.isin(GROUPS[traj.group], which)
    tokens = traj.spread(kept)
    cut = lambda x: x[tokens]  # noqa: E731
    sub = Trajectories(cut(traj.tokens), np.concatenate([[0], np.cumsum(traj.lengths[kept])]), cut(traj.loss_mask), cut(traj.logprobs),
                       cut(traj.versions), traj.prompt_lengths[kept], traj.group[kept], traj.sample[kept], traj.seed[kept],
                       traj.finish[kept], {"adapter": np.repeat(GROUPS[traj.group[kept]], traj.lengths[kept]).astype(np.int32)})
    return sub, {name: cut(x) for name, x in columns.items()}


def packed(traj, columns, layout):
    length, rows, share = LAYOUTS[layout]
    found = training.make_layout(traj.sizes, RowShapes((length,), ((rows,),)), share_prompts=share)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "sequence_mean")
    for micro in found.minibatches[0].microbatches:
        yield jax.tree.map(jnp.asarray, training.pack(traj, micro, columns, weights, np.float64))


def of_all(model):
    return Optimizers(model, tuple(rule(one, name) for name, one in zip(
        adapter_set.adapter_names(model), (adapter_set.select_model(model, k) for k in range(9)), strict=False)))


def state_of(model, params, optimizer):
    start = training.adapter_set.init_state if isinstance(optimizer, Optimizers) else training.init_state
    own = adapters.trains(model)
    trainable = {name: jnp.copy(x) for name, x in params.items() if name in own}
    return start(trainable, {name: jnp.copy(x) for name, x in params.items() if name not in own}, optimizer)


def alone(model, params, k, layout, steps=2):
    traj, columns = batch((k + 1,))
    del traj.columns["adapter"]
    one = rule(model, list(RULES)[k])
    loss = dataclasses.replace(LOSS, max_grad_norm=one.max_grad_norm)
    update, state = training.make_update(model, one.rule, one.schedule, loss), state_of(model, params, one.rule)
    for _ in range(steps):
        state, metrics = update(state, packed(traj, columns, layout))
    return state, jax.device_get(metrics)


def close(found, want, atol=1e-12):
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=atol), found, want)


@first_cases(1, "scan, layout, bits, which", [
    pytest.param(False, "packed", "", ("second",), marks=pytest.mark.slow),
    pytest.param(True, "one row each", "", tuple(PARTS), marks=pytest.mark.slow),
    pytest.param(False, "packed", "int8", tuple(PARTS), marks=pytest.mark.nightly)])
def test_one_update_of_two_adapters_is_the_two_updates_of_one(scan, layout, bits, which):
    """Two steps of AdamW with clipping, warm-up and decay in float64, whatever the packing (the single runs have another): parameters,
    moments, counters and metrics to 1e-12; ranks, modules, scales, learning rates and norms of the two differ."""
    (model, models, params, own), optimizer, update = update_of(scan, bits)
    state = state_of(model, params, optimizer)
    for _ in range(2):
        state, metrics = update(state, packed(*batch(), layout))
    for k, name in enumerate(PARTS):
        if name not in which:
            continue
        want, told = alone(models[k], own[k], k, "one row each" if layout == "packed" else "packed")
        close(adapter_set.take_leaves(model, k, state.trainable), want.trainable)
        close((state.opt_state[name], state.step[name], state.stats[name]), (want.opt_state, want.step, want.stats))
        mine = training.adapter_set.metrics_of_adapter(metrics, name)
        assert mine.pop("held") == 1 and mine.keys() == told.keys()
        close(mine, told)
    norms = [metrics[f"adapter/{name}/optim/grad_norm"] for name in PARTS]
    assert norms[0] > 0.01 and norms[1] < 1e3 and int(state.step["first"]) == 2


@pytest.mark.slow
def test_tokens_of_one_adapter_leave_the_other_as_it_is():
    """Its gradient is exactly zero, and a step without rows of its own moves neither it nor its optimizer, whose next step is then
    the one that it would have made."""
    (model, _, params, _), optimizer, update = update_of(False, "")
    state = state_of(model, params, optimizer)
    gradient, _ = update.gradients(state, packed(*batch((1,)), "packed"))
    first, second = (adapter_set.take_leaves(model, k, gradient) for k in range(2))
    assert all(np.any(np.asarray(x)) for x in first.values())
    assert not any(np.any(np.asarray(x)) for x in second.values())
    before, _ = update(state_of(model, params, optimizer), packed(*batch(), "packed"))
    kept = jax.tree.map(np.asarray, before)
    after, metrics = update(before, packed(*batch((1,)), "packed"))
    for pick in (lambda s: adapter_set.take_leaves(model, 1, s.trainable), lambda s: [s.opt_state["second"], s.step["second"], s.stats["second"]]):
        jax.tree.map(np.testing.assert_array_equal, pick(kept), jax.tree.map(np.asarray, pick(after)))
    assert int(after.step["first"]) == 2 and int(after.step["second"]) == 1
    told = training.adapter_set.mean_over_adapters({name: float(x) for name, x in metrics.items()})
    assert told["loss"] == told["adapter/first/loss"] and not any(name.startswith("adapter/second/") for name in told)


@pytest.mark.slow
def test_one_of_several_is_the_plain_adapter():
    """lora.adapters with one entry computes what is computed without it."""
    model, models, params, own = cases(parts={"first": PARTS["first"]})
    optimizer = of_all(model)
    traj, columns = batch((1,))
    state, metrics = training.make_update(model, optimizer, None, LOSS)(state_of(model, params, optimizer), packed(traj, columns, "packed"))
    want, told = alone(models[0], own[0], 0, "packed", steps=1)
    close(adapter_set.take_leaves(model, 0, state.trainable), want.trainable)
    close(training.adapter_set.metrics_of_adapter(metrics, "first") | {"held": 0}, told | {"held": 0})


@pytest.mark.full
def test_leaves_taken_apart_and_joined_are_the_same():
    for scan in (False, True):
        model, _, params, own = cases(scan)
        for k in range(2):
            jax.tree.map(np.testing.assert_array_equal, adapter_set.take_leaves(model, k, params), own[k])
        assert set(params) == {"/".join(e.path) for e in model.entries}
        assert all(params["/".join(e.path)].shape == e.shape for e in model.entries)
    with pytest.raises(ValueError, match="adapter number"):
        jax.eval_shape(lambda p, x: model.hidden(training.merge(p, {}), x, x, x, x), params, np.ones((1, 4), np.int32))
