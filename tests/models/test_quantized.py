"""The quantised base of adapters: codes against an independent numpy implementation, the product and its gradient against a dense one.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers.lora_cases import HF, QUICK, all_linear, batch, build, gradient, hidden, init, merged
from helpers.tiers import first_cases
from scipy.stats import norm

from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.adapters import initialization, quantized
from jaxrl.models.adapters.quantized import NF4

WIDE = {**HF, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SKIPPED = ((1, "mlp.up_proj"), (2, "self_attn.o_proj"))


def of(kind, hf=WIDE, scan=False, dtype=jnp.float32, **more):
    return build(dataclasses.replace(all_linear(skip=SKIPPED), quantized=kind, **more), hf, scan, dtype)


def moved(model, dtype=jnp.float32):
    """Parameters of a model with B away from zero, floats in `dtype` but for scales of codes."""
    flat = flatten_dict(init(model, jax.random.key(0)), sep="/")
    for name, x in flat.items():
        if name.endswith("lora/b"):
            flat[name] = 0.1 * jax.random.normal(jax.random.key(len(name)), x.shape)
    return quantized.cast(adapters.joined({}, flat), dtype)


def dense(model, params):
    """The model with the kernels that codes stand for, beside the same adapter."""
    own = dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, quantized=""))
    flat = flatten_dict(params, sep="/")
    for entry in adapters.in_few_bits(model.adapter, model.base.entries):
        name = "/".join(entry.path)
        node = {leaf: flat.pop(f"{name}/{leaf}") for leaf in quantized.LEAVES}
        flat[name] = quantized.whole(node, entry).astype(flat["embed/embedding"].dtype)
    return own, adapters.joined({}, flat)


def test_the_table_is_that_of_the_paper():
    """Quantiles of a normal distribution, 8 on the negative and 9 on the positive side with zero in both, over the largest
    (arXiv 2305.14314, section 3 and the function of its code)."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above, below = norm.ppf(np.linspace(offset, 0.5, 9)[:-1]), norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    found = np.sort(np.concatenate([above, [0], -below]))
    np.testing.assert_allclose(NF4, found / found.max(), rtol=0, atol=2e-7)
    assert len(NF4) == 16 and NF4.dtype == np.float32


def reference_nf4(w_OxI):
    """(bytes, scales, values) of a matrix as Hugging Face stores it, in the order of its numbers: blocks of 64, two codes a byte."""
    blocks = w_OxI.reshape(-1, 64).astype(np.float64)
    scales = np.abs(blocks).max(1, keepdims=True)
    codes = np.abs(blocks[..., None] / np.where(scales, scales, 1)[..., None] - NF4.astype(np.float64)).argmin(-1)
    packed = codes.reshape(-1, 2)
    return packed[:, 0] * 16 + packed[:, 1], scales[:, 0], (NF4[codes] * scales).reshape(w_OxI.shape)


@pytest.mark.full
@first_cases(1, "shape, inputs", [((128, 6), 1), ((192, 2, 3), 1), ((4, 32, 10), 2)])
def test_codes_are_those_of_an_independent_implementation(shape, inputs):
    """Bytes in the order in which bitsandbytes lays out [outputs, inputs]; errors within half of a gap; zero stays zero."""
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    kernel.reshape(math.prod(shape[:inputs]), -1)[64:128, 1] = 0
    matrix = kernel.reshape(math.prod(shape[:inputs]), -1).T
    node = jax.jit(functools.partial(quantized.quantized, kind="nf4", inputs=inputs))(kernel)
    packed, scales, values = reference_nf4(matrix)
    outputs = matrix.shape[0]
    np.testing.assert_array_equal(np.asarray(node["codes"]).reshape(-1, outputs).T.reshape(-1), packed)
    np.testing.assert_allclose(np.asarray(node["scale"]).reshape(-1, outputs).T.reshape(-1), scales, rtol=1e-6)
    back = np.asarray(quantized.dequantized(node, shape[:inputs]))
    assert back.shape == shape
    np.testing.assert_allclose(back.reshape(-1, outputs).T, values, rtol=1e-6, atol=1e-9)
    bound = np.repeat(scales, 64).reshape(matrix.shape) * np.diff(NF4).max() / 2
    assert (np.abs(back.reshape(-1, outputs).T - matrix) <= bound * (1 + 1e-5)).all()
    again = quantized.quantized(back, "nf4", inputs)
    jax.tree.map(np.testing.assert_array_equal, again, dict(node))
    node = quantized.quantized(kernel, "int8", inputs)
    scales = np.abs(matrix).max(1) / 127
    codes = np.rint(matrix / np.where(scales, scales, 1)[:, None])
    differ = np.asarray(node["codes"]).reshape(-1, outputs).T - codes
    assert np.abs(differ).max() <= 1 and (differ != 0).mean() < 0.01  # a tie may fall otherwise
    back = np.asarray(quantized.dequantized(node, shape[:inputs])).reshape(-1, outputs).T
    assert (np.abs(back - matrix) <= scales[:, None] * 0.5001).all() and np.abs(back - matrix).max() > 0


@first_cases(1, "kind", quantized.KINDS)
def test_the_product_and_its_gradient_are_those_of_the_dense_kernel(kind):
    """In float64 to 1e-12, with two input axes; what is kept for the backward pass is the codes, no kernel."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        kernel, x, g = rng.normal(size=(4, 32, 24)), rng.normal(size=(3, 5, 4, 32)), rng.normal(size=(3, 5, 24))
        node = quantized.quantized(kernel, kind, 2)
        w = quantized.dequantized(node, (4, 32)).astype(jnp.float64)
        y, back = jax.vjp(lambda x: quantized.product(x, node, ("heads", "head_dim", "embed"), 2), x)
        np.testing.assert_allclose(y, np.einsum("blhk,hko->blo", x, w), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(back(jnp.asarray(g))[0], np.einsum("blo,hko->blhk", g, w), rtol=1e-12, atol=1e-12)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(back)) <= sum(leaf.nbytes for leaf in jax.tree.leaves(node))


@pytest.mark.full
@pytest.mark.parametrize("kind", quantized.KINDS)
def test_no_dequantised_kernel_is_kept_between_forward_and_backward(kind):
    """Compiled, twelve more maps of a scanned chain need the memory of their inputs, not of a kernel."""
    def needed(maps):
        node = jax.eval_shape(functools.partial(quantized.quantized, kind=kind, inputs=1, stacked=1), jnp.ones((maps, 256, 256)))

        def chain(x, nodes):
            return jax.lax.scan(lambda x, node: (jnp.tanh(quantized.product(x, node, ("embed", "mlp"), 1)), None), x, nodes)[0].sum()

        return jax.jit(jax.grad(chain)).lower(jnp.ones((4, 256)), node).compile().memory_analysis().temp_size_in_bytes

    assert needed(16) - needed(4) < 12 * 256 * 256 / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind, scan, more", [("nf4", True, {}), ("int8", False, {}), ("nf4", False, {"decomposed": True})])
def test_a_model_with_codes_is_the_one_with_the_kernels_they_stand_for(kind, scan, more):
    """In float64: hidden states, merged weights and gradients of the adapters; only the layers' linear maps have codes."""
    with jax.enable_x64(True):
        model = of(kind, scan=scan, dtype=jnp.float64, **more)
        params, rows = moved(model, jnp.float64), batch()
        own, whole = dense(model, params)
        np.testing.assert_allclose(hidden(model, params, *rows), hidden(own, whole, *rows), rtol=0, atol=1e-12)
        np.testing.assert_allclose(hidden(model, params, *rows), hidden(model.base, merged(model, params), *rows), rtol=0, atol=1e-12)
        trainable, rest = split(model, params)
        ours = jax.jit(jax.grad(lambda t: loss(model, {**rest, **t}, rows)), compiler_options=QUICK)(trainable)
        theirs = flatten_dict(gradient(own, whole, *rows), sep="/")
        for name, found in ours.items():
            np.testing.assert_allclose(found, theirs[name], rtol=0, atol=1e-12)
        assert max(np.abs(x).max() for x in ours.values()) > 1e-4
        kept = {e.path[-1] for e in model.entries if e.row.init == quantized.INIT}
        assert kept == {"codes", "scale"} and not [e for e in model.entries if e.path[-1] == "kernel"]


def split(model, params):
    flat = flatten_dict(params, sep="/")
    own = adapters.trains(model)
    return {n: x for n, x in flat.items() if n in own}, {n: x for n, x in flat.items() if n not in own}


def loss(model, flat, rows):
    from helpers.lora_cases import loss as whole

    return whole(model, adapters.joined({}, flat), *rows)


@pytest.mark.parametrize("kind, share", [("int8", 1 / 4 + 1 / 64), ("nf4", 1 / 8 + 1 / 64)])
def test_the_base_takes_a_quarter_or_an_eighth_of_fp32_and_its_scales(kind, share):
    """Bytes of codes and scales over those of the kernels in fp32; modules that train whole stay as they are."""
    model = of(kind, hf={**WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}, scan=True)
    params = jax.eval_shape(model.init, jax.random.key(0))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    few = {"/".join(e.path): e for e in adapters.in_few_bits(model.adapter, model.base.entries)}
    codes = {n: x for n, x in flatten_dict(params, sep="/").items() if n.rpartition("/")[0] in few}
    assert len(few) == 7 and len(codes) == 14
    assert size(codes) == share * sum(4 * math.prod(e.shape) for e in few.values())
    assert model.flops_per_token(8) == dense_flops(model)
    halved = flatten_dict(jax.eval_shape(lambda p: quantized.cast(p, jnp.bfloat16), params), sep="/")
    assert all(halved[n].dtype == x.dtype for n, x in codes.items()) and halved["layers/sub_0/mlp/up/lora/a"].dtype == jnp.bfloat16
    saved = dataclasses.replace(model.adapter, targets=model.adapter.targets[:1], saved=tuple(f"model.layers.{i}.mlp.up_proj" for i in range(3)))
    flat = flatten_dict(jax.eval_shape(dataclasses.replace(model, adapter=saved).init, jax.random.key(0)), sep="/")
    assert flat["layers/sub_0/mlp/up/kernel"].dtype == np.float32 and "layers/sub_0/mlp/gate/kernel/codes" in flat


def dense_flops(model):
    return dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, quantized="")).flops_per_token(8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pissa", "olora", "eva"])
def test_starts_that_read_the_base_read_what_its_codes_stand_for(name):
    """pissa and olora begin at the codes' model to the bit (the base is not changed), with W of the codes decomposed."""
    model = of("nf4", shifted=initialization.is_shifted(name))
    base, rows = adapters.base_in_few_bits(model, init(model.base, jax.random.key(0))), batch()
    _, plain = dense(model, base)
    found = initialization.principal_inputs(model, base, *rows[:3]) if name == "eva" else None
    begin = jax.jit(initialization.initial, static_argnums=(0, 3), compiler_options=QUICK)
    start = begin(model, jax.random.key(0), base, name, found)
    own = dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, quantized=""))
    theirs = begin(own, jax.random.key(0), plain, name, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), start, theirs)
    params = adapters.joined(base, start)
    np.testing.assert_array_equal(hidden(model, params, *rows), hidden(model.base, base, *rows))


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ConfigError, match="lora.base=nf4: model.layers.0.mlp.down_proj has 48 inputs.*set lora.base=int8"):
        of("nf4", hf={**WIDE, "intermediate_size": 48}).entries  # noqa: B018
    moe = dict(WIDE, model_type="qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1,
               norm_topk_prob=True, mlp_only_layers=[])
    adapter = adapters.Adapter((adapters.Target("model.layers.0.self_attn.q_proj", 2, 1.0),), quantized="int8")
    with pytest.raises(ConfigError, match="lora.base=int8: the experts of this model"):
        build(adapter, moe).entries  # noqa: B018
