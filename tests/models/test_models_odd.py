"""Odd config files: read as transformers reads them, or refused by the field's name."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import model_cases, vision_cases
from helpers import model_odd_configs as odd
from helpers.tiers import first_cases
from helpers.tiny_models import zero_centred

from jaxrl.errors import ConfigError
from jaxrl.models import FAMILIES, build
from jaxrl.models.config import model_config
from jaxrl.models.io import fused, hf, parts

pytestmark = pytest.mark.torch  # the models to compare with are transformers'
TOKENS = np.random.default_rng(5).integers(3, odd.SIZES["vocab_size"], 40)  # longer than every window, none the padding
LIMIT = 1e-4  # of logits up to 10 in fp32; a misread field moves them by 1e-3 and more


def theirs(config, folder):
    """transformers' model of a config.json, eager and in fp32, with nothing left at a value that hides a mistake."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(1)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    given, kind = AutoConfig.from_pretrained(folder), AutoModelForCausalLM
    if config["model_type"] in vision_cases.TEXTS:  # which transformers has within the model of images alone
        given, kind = vision_cases.around(given.to_dict()), AutoModelForImageTextToText
    model = kind.from_config(given, attn_implementation="eager", dtype=torch.float32)
    torch.manual_seed(0)  # the fields of initial values draw more or fewer numbers
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(0.0, 0.3 if weight.ndim == 1 else 0.2)
            if "norm" in name and not zero_centred(config["model_type"], name):
                weight.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model.eval()


def logits_of(model):
    import torch
    return model(torch.tensor(TOKENS)[None], use_cache=False).logits[0]


def ours(config, model):
    """Our model of the same config.json, and transformers' weights as its parameters."""
    own = build(hf._override(config, {}), compute_dtype=jnp.float32, scan_layers=False)
    return own, converted(own, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()})


def converted(own, tensors):
    tensors = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    held = {f"block_sparse_moe.{a}": f"block_sparse_moe.{b}" for a, b in (  # Granite 4's in memory and on a disk
        ("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"), ("router.weight", "router.layer.weight"))}
    pairs = (*FAMILIES[own.config.family].spelled, *(held.items() if own.config.family == "granitemoehybrid" else ()))
    for there, here in pairs:
        tensors = {name.replace(there, here): tensor for name, tensor in tensors.items()}

    def array(entry):
        arrays = [entry.from_hf(tensors[name]) for name in entry.hf_names]
        return jnp.asarray(np.stack(arrays).reshape(entry.shape) if entry.stacked else arrays[0])

    for name, of_experts, whole in fused.tensors(own):  # as transformers holds experts
        found, each = tensors[name], len(of_experts[0])
        if fused.interleaved(own):  # in turns
            found = np.stack([np.stack([x[..., j::each].T for j in range(each)]) for x in found])
        elif not whole:
            found = found.reshape(len(of_experts), each, -1, found.shape[-1])
        named = {of_experts[0][0]: found} if whole else {
            n: found[i, j] for i, own_ in enumerate(of_experts) for j, n in enumerate(own_)}
        tensors = {**tensors, **named}
    for name, packed in parts.tensors(own).items():
        grouped, first = tensors[name].reshape(packed.groups, -1, *packed.rest), 0
        for part, shape, outputs in zip(packed.names, packed.shapes, packed.outputs, strict=True):
            size = outputs // packed.groups
            tensors = {**tensors, part: grouped[:, first:first + size].reshape(shape)}
            first += size
    return own.tree(array)


def forward(own, params):
    row = jnp.asarray(TOKENS, jnp.int32)[None]
    positions = jnp.arange(len(TOKENS), dtype=jnp.int32)[None]
    return own.logits(params, own.hidden(params, row, positions, jnp.ones_like(row), jnp.zeros_like(row)))[0]


def compare(family, entries, folder):
    """(largest difference of our logits from transformers', theirs)."""
    config = odd.config(family, entries)
    model = theirs(config, folder)
    want = logits_of(model).detach().numpy()
    own, params = ours(config, model)
    got = jax.jit(forward, static_argnums=0, compiler_options=model_cases.QUICK)(own, params)
    return float(np.abs(np.asarray(got) - want).max()), want


def name_of(case):
    return case if isinstance(case, str) else json.dumps(case)


TABLE = [(family, kind, entries) for family, row in FAMILIES.items() if not row.stored_type
         for kind, cases in (("moves", odd.MOVES), ("ignored", odd.IGNORED)) for entries in cases[family]]
FOUND = [  # read in silence as something else once: logits were off by 0.1 to 6
    ("qwen2", odd.new({"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=16)),
    ("llama", odd.new({**odd.LLAMA3, "original_max_position_embeddings": 48}, original_max_position_embeddings=16)),
    ("llama", odd.new({**odd.LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 16})),
    ("gemma3_text", odd.layered({**odd.YARN, **odd.THETA, "truncate": False})),
    ("qwen3", odd.new({**odd.YARN, "beta_fast": 0, "truncate": None})),
]


@first_cases(1, "family, entries", FOUND, ids=name_of)
def test_once_misread(family, entries, tmp_path):
    assert compare(family, entries, tmp_path)[0] < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_read_as_transformers_reads_it(family, tmp_path):
    """Logits in fp32, for the whole table: what should move them does, what should not does not."""
    _, plain = compare(family, {}, tmp_path)
    wrong = []
    for _, kind, entries in (case for case in TABLE if case[0] == family):
        difference, want = compare(family, entries, tmp_path)
        moved = np.abs(want - plain).max() > 1e-3
        if not difference < LIMIT or moved != (kind == "moves"):
            wrong.append((kind, entries, difference, moved))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("family, entries", [
    ("llama", {**odd.new(odd.LLAMA3, original_max_position_embeddings=16), "attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    ("mistral", {**odd.new(odd.YARN, original_max_position_embeddings=32), "tie_word_embeddings": True, "rms_norm_eps": 0.5}),
    ("qwen2", {**odd.new({**odd.YARN, "truncate": None}), "layer_types": [odd.SLIDING, odd.FULL, odd.FULL, odd.SLIDING]}),
    ("qwen3", {**odd.old(odd.LINEAR), "attention_bias": True, "hidden_act": "gelu", "num_key_value_heads": 1}),
    ("gemma2", {"layer_types": [odd.FULL, odd.SLIDING, odd.SLIDING, odd.FULL], "attn_logit_softcapping": 1.0, "head_dim": 12}),
    ("gemma3_text", {**odd.layered({**odd.YARN, **odd.THETA}, odd.LINEAR, truncate=False), "final_logit_softcapping": 2.0}),
], ids=name_of)
def test_gradients(family, entries, tmp_path):
    """Of the log-probability of the next tokens, by every parameter."""
    import torch
    config = odd.config(family, entries)
    model = theirs(config, tmp_path)
    own, params = ours(config, model)
    targets = np.roll(TOKENS, -1)
    torch.log_softmax(logits_of(model), -1)[range(len(targets)), targets].sum().backward()
    want = converted(own, {name: weight.grad.numpy() for name, weight in model.named_parameters()})
    loss = lambda p: jnp.sum(jax.nn.log_softmax(forward(own, p))[np.arange(len(targets)), targets])  # noqa: E731
    got = jax.jit(jax.grad(loss), compiler_options=model_cases.QUICK)(params)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale), got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_refused_by_name(family):
    for _, entries, name in (case for case in odd.refused() if case[0] == family):
        with pytest.raises(ConfigError, match=re.escape(name)):
            model_config(odd.config(family, entries))
            pytest.fail(f"{family} takes {entries}")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma3_vision_text"])  # tests/models/test_vision_gemma.py has its fields
def test_the_table_has_every_field_of_the_configuration(family):
    """Each field of transformers' configuration class is in the table, or is none of the function's."""
    from transformers import AutoConfig
    cases = [*odd.MOVES[family], *odd.IGNORED[family], *odd.REFUSED[family]]
    tested = {key for entries in cases for key in entries}
    plain = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
             "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"}  # in every config of the table
    fields = set(type(AutoConfig.for_model(family)).__annotations__)
    assert len(fields) > 15 and fields - tested - plain == set()
