"""Our adapters beside PEFT's own on one model in one process: which modules, outputs, steps of an optimizer, files.

transformers computes norms and rotary angles in fp32 whatever the model's dtype; `in_float64` puts float64 in their place, so that PEFT's
layers, which are its own, can be compared to the last bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from helpers.tiny_models import VOCAB, make_tiny
from jaxrl.config.load import default_config
from jaxrl.models import adapters, build
from jaxrl.models.adapters import peft, selection
from jaxrl.models.io import hf
from jaxrl.training.optimizer import make_optimizer


class Imported:
    """A package that is imported at its first use: collecting the tests needs none that takes seconds, or may not be there."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith(("_", "pytest")):  # pytest's own questions when it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


theirs, torch, transformers = Imported("peft"), Imported("torch"), Imported("transformers")

LAYERS, LR = 3, 0.05
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# name -> (options of config.lora, the same for LoraConfig)
SELECTIONS = {
    "all-linear": ({}, {}),
    "list": ({"targets": ("q_proj", "self_attn.v_proj")}, {"target_modules": ["q_proj", "self_attn.v_proj"]}),
    "pattern": ({"targets": (r".*\.[12]\..*(gate|down)_proj",)}, {"target_modules": r".*\.[12]\..*(gate|down)_proj"}),
    "excluded": ({"exclude": ("k_proj", "model.layers.0.mlp.up_proj")},
                 {"exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]}),
    "excluded by a pattern": ({"exclude": (r".*\.0\..*",)}, {"exclude_modules": r".*\.0\..*"}),
    "layers": ({"targets": ATTENTION, "layers": (0, 2)}, {"target_modules": list(ATTENTION), "layers_to_transform": [0, 2]}),
    "rank and alpha patterns": ({"targets": ATTENTION, "rank_pattern": ("k_proj=2", r"layers\.1\.self_attn\.[qk]_proj=3", "q_proj=5"),
                                 "alpha_pattern": (r"^model\.layers\.0\..*=7", "o_proj=5.5")},
                                {"target_modules": list(ATTENTION), "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.[qk]_proj": 3,
                                                                                      "q_proj": 5},
                                 "alpha_pattern": {r"^model\.layers\.0\..*": 7, "o_proj": 5.5}}),
    "rslora": ({"targets": ("down_proj",), "rslora": True, "alpha": 3.0, "rank_pattern": (r"layers\.2\.mlp\.down_proj=6",)},
               {"target_modules": ["down_proj"], "use_rslora": True, "lora_alpha": 3.0, "rank_pattern": {r"layers\.2\.mlp\.down_proj": 6}}),
    "modules_to_save": ({"modules_to_save": ("lm_head", "input_layernorm")}, {"modules_to_save": ["lm_head", "input_layernorm"]}),
    "dora": ({"targets": (r".*\.[12]\..*(q|k|down)_proj",), "dora": True}, {"target_modules": r".*\.[12]\..*(q|k|down)_proj",
                                                                          "use_dora": True}),
    "a whole block saved": ({"modules_to_save": ("mlp",)}, {"modules_to_save": ["mlp"]}),
}


def options(**given):
    """What config.lora says, with rank 4 and alpha 8."""
    usual = dict(rank=4, alpha=8.0, dropout=0.0, targets=("all-linear",), exclude=(), layers=(), rslora=False, dora=False,
                 rank_pattern=(), alpha_pattern=(), modules_to_save=(), init="default", path="")
    assert not set(given) - set(usual)
    return types.SimpleNamespace(**usual | given)


def lora_config(**given):
    return theirs.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **given})


def checkpoint(folder, architecture="llama_bias", **entries):
    """A tiny model with biases and an output matrix of its own."""
    return make_tiny(architecture, Path(folder) / architecture, tokenizer=False, num_hidden_layers=LAYERS, **entries)


def torch_model(path, attention="eager"):
    """sdpa: computes in the dtype it is given; eager has a softmax in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32).eval()


def in_float64(model):
    """Llama's norms and rotary angles in float64."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        exponents = np.arange(0, model.config.head_dim, 2, dtype=np.float32) / np.float32(model.config.head_dim)
        inverse = 1.0 / np.float32(model.config.rope_parameters["rope_theta"]) ** exponents  # fp32, as both have them
        angles = position_ids[..., None].double() * torch.tensor(inverse).double()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(norm, module)
        if type(module).__name__ == "LlamaRotaryEmbedding":
            module.forward = types.MethodType(rotary, module)
    return model.double()


def our_model(path, given, double=False, scan=True):
    """(model with the adapter of config.lora, base parameters)."""
    dtype = jnp.float64 if double else jnp.float32
    base = build(hf.load_config(path), compute_dtype=dtype, scan_layers=scan, attention="reference")
    params = hf.load_params(base, path, dtype=dtype)
    return dataclasses.replace(base, adapter=peft.resolve(given, base)), params


def wrapped(model, config, seed=0, spread=True):
    """PEFT's model; with `spread` its B are not zero (decomposed inits have their own)."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = theirs.get_peft_model(model, config)
    if spread:
        with torch.no_grad():
            for name, weight in made.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0.0, 0.3)
                if "lora_magnitude" in name:
                    weight.mul_(1 + 0.2 * torch.randn_like(weight))
                if "modules_to_save" in name:
                    weight.add_(0.1 * torch.randn_like(weight))
    return made


def chosen(model) -> dict:
    """HF name -> (rank, scale) of PEFT's adapters."""
    return {name.removeprefix("base_model.model."): (m.r["default"], m.scaling["default"])
            for name, m in model.named_modules() if isinstance(m, theirs.tuners.lora.LoraLayer)}


def saved(model) -> set:
    """HF names of the modules with tensors that PEFT trains whole."""
    marked = [name for name, _ in model.named_parameters() if ".modules_to_save.default." in name]
    return {name.replace(".modules_to_save.default", "").removeprefix("base_model.model.").rpartition(".")[0] for name in marked}


def save(model, folder) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return str(folder)


def digests(folder) -> dict:
    """File -> SHA-256 of its bytes; of adapter_config.json with target_modules in order, which PEFT draws from the hash seed."""
    out = {}
    for name in (peft.CONFIG, peft.WEIGHTS):
        data = (Path(folder) / name).read_bytes()
        if name == peft.CONFIG:
            table = json.loads(data)
            for key, value in table.items():
                if isinstance(value, list):
                    table[key] = sorted(value)
            data = json.dumps(table, indent=2).encode()
        out[name] = hashlib.sha256(data).hexdigest()
    return out


# ---- the same numbers ------------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(5).integers(3, VOCAB, (3, 17)).astype(np.int32)


def logits(model, params):
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
    ones = np.ones_like(TOKENS)
    return model.logits(params, model.hidden(params, TOKENS, positions, ones, np.zeros_like(ones)))


def loss(model, trainable, frozen):
    """Mean negative log-prob of every next token."""
    params = adapters.joined({}, {**frozen, **trainable})
    logp = jax.nn.log_softmax(logits(model, params)[:, :-1])
    return -jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1).mean()


def our_step(model, params, optimizer: str):
    """(logits before, parameters after one step)."""
    flat = flatten_dict(params, sep="/")
    learns = adapters.trains(model)
    trainable, frozen = ({k: v for k, v in flat.items() if (k in learns) == own} for own in (True, False))
    o = default_config().optimizer
    o.name, o.lr, o.weight_decay, o.b1, o.schedule = optimizer, LR, 0.01, 0.9 if optimizer == "adamw" else 0.0, "constant"
    o.warmup_steps, o.warmup_fraction = 0, 0.0
    rule, _ = make_optimizer(o, 10, {"/".join(e.path): e.axes for e in model.entries})

    @jax.jit
    def step(trainable):
        gradient = jax.grad(loss, argnums=1)(model, trainable, frozen)
        updates, _ = rule.update(gradient, rule.init(trainable), trainable)
        return optax.apply_updates(trainable, updates)

    return np.asarray(jax.jit(logits, static_argnums=0)(model, params)), adapters.joined(params, step(trainable))


def their_step(model, optimizer: str):
    """PEFT's logits before the same step; the model is changed."""
    ids = torch.tensor(TOKENS).long()
    out = model(ids).logits
    chosen = torch.log_softmax(out[:, :-1], -1).gather(-1, ids[:, 1:, None])
    (-chosen.mean()).backward()
    learning = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in learning if p.ndim > 1]  # as ours: vectors are spared
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0}]
    rule = torch.optim.AdamW(groups, lr=LR, betas=(0.9, default_config().optimizer.b2), eps=default_config().optimizer.eps) \
        if optimizer == "adamw" else torch.optim.SGD(learning, lr=LR)
    rule.step()
    return out.detach().numpy()


def their_adapter(model) -> dict:
    """PEFT's tensors under the names of its files, as numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = theirs.get_peft_model_state_dict(model)
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}  # its tensors are views


def adopted(model, base_params, theirs_: dict, dtype):
    """Our parameters with PEFT's numbers in the adapter (and in what it was started from, where that is subtracted)."""
    flat, places = adapters.initial(model, jax.random.key(0)) | adapters.magnitudes(model, base_params), selection.linears(model)
    flat = {name: np.array(x, dtype) for name, x in flat.items()}
    for t in model.adapter.targets:
        (entry, index), = places[t.name]
        a, b, scale = peft.leaf_paths(entry)
        shapes = peft.lora_shapes(entry, t.rank)
        flat[scale][index] = t.scale
        flat[a][(*index, ..., slice(t.rank))] = theirs_[f"{peft.PREFIX}{t.name}.lora_A.weight"].T.reshape(shapes[0])
        flat[b][(*index, slice(t.rank))] = theirs_[f"{peft.PREFIX}{t.name}.lora_B.weight"].T.reshape(shapes[1])
        if model.adapter.decomposed:
            flat[f"{a[:-1]}m"][index] = theirs_[f"{peft.PREFIX}{t.name}.{peft.MAGNITUDE}"].reshape(shapes[1][1:])
    if model.adapter.shifted:
        flat |= {name + "0": flat[name].copy() for name in flat if name.endswith(("/a", "/b"))}
    for name, (entry, index) in selection.tensors(model).items():
        if adapters.module_of(name) in model.adapter.saved:
            path = "/".join(entry.path)
            flat.setdefault(path, np.array(entry.of(base_params), dtype))[index] = entry.from_hf(theirs_[peft.PREFIX + name])
    return adapters.joined(base_params, {name: jnp.asarray(x) for name, x in flat.items()})


def differences(path, given, config, optimizer, double, scan=True) -> dict:
    """Largest absolute differences: logits, and after one step logits and adapters; both start from PEFT's numbers."""
    with jax.enable_x64(double):
        dtype = np.float64 if double else np.float32
        model, base = our_model(path, given, double, scan)
        other = wrapped(torch_model(path, "sdpa"), config, spread=not model.adapter.shifted)
        if double:
            in_float64(other)
            if model.adapter.shifted:
                exact_base(other, torch_model(path).double())
        start = their_adapter(other)
        params = adopted(model, base, {name: x.astype(dtype) for name, x in start.items()}, dtype)
        ours, after = our_step(model, params, optimizer)
        want = their_step(other, optimizer)
        out = {"logits": float(np.abs(ours - want).max())}
        moved = peft.hf_tensors(dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, shifted=False)), after,
                                 np.dtype(dtype), {})
        now = their_adapter(other)
        assert set(moved) == set(now) == set(start)
        out["moved"] = float(max(np.abs(now[name] - start[name]).max() for name in now))
        out["adapter after the step"] = float(max(np.abs(moved[name] - now[name]).max() for name in now))
        with torch.no_grad():
            want = other(torch.tensor(TOKENS).long()).logits.numpy()
        got = np.asarray(jax.jit(logits, static_argnums=0)(model, after))
        return out | {"logits after the step": float(np.abs(got - want).max())}


def exact_base(model, untouched):
    """What PEFT takes from the base of pissa and olora in fp32, anew in float64."""
    weights = dict(untouched.named_parameters())
    for name, layer in model.named_modules():
        if isinstance(layer, theirs.tuners.lora.LoraLayer):
            product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            own = weights[name.removeprefix("base_model.model.") + ".weight"]
            layer.get_base_layer().weight.data = own.data - layer.scaling["default"] * product.data


def hf_tensors(model, params) -> dict:
    """Our adapter under the names of PEFT's files, fp32."""
    return peft.hf_tensors(model, params, np.dtype(np.float32), {})


def without_start(model):
    """The model as one whose adapter is not subtracted from its base."""
    return dataclasses.replace(model, adapter=dataclasses.replace(model.adapter, shifted=False))
