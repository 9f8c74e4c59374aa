# ruff: noqa: E402, I001
"""What test_sharding.py asks of eight simulated devices; prints one JSON line per mesh.

Usage: sharded_layouts.py numbers|experts|gpt_oss|hybrid|cut|cut_latent|cut_hybrid|cut_recurrent|mamba|cut_mamba|piled|memory|logprob|steps FOLDER
                          dp,fsdp,tp or dp,fsdp,ep,tp or dp,fsdp,cp,ep,tp ...
  numbers: log-probs and gradients of one batch, into FOLDER/<dp,fsdp,tp>.npz, and the share of the state on one device.
  experts: numbers of a model of experts; and its gradients in float64, into FOLDER/<mesh>.float64.npz.
  gpt_oss: the same of one of its family, whose experts and attention have biases and sinks.
  hybrid:  the same of one with recurrent layers.
  cut:     rows with shared prompts over cp, of a model with windows, sinks and experts; in fp32 and float64, as above.
  cut_latent, cut_hybrid: the same of latent attention, and of one with recurrent layers and experts.
  cut_recurrent: log-probs and gradients alone of one with recurrent layers, without experts.
  mamba, cut_mamba: hybrid of Nemotron's layers; cut_recurrent of Falcon-H1's, with one key head.
  piled:   the kernel of experts where all tokens go to two of them.
  memory:  compiled temporaries of a deep model's gradient.
  logprob: the log-prob kernel against its reference.
  steps:   one whole GRPO step of tiny_job.
"""

import dataclasses
import functools
import json
import math
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from helpers import attention_cases, tiny_job
from helpers.training_helpers import batch_of_groups, policy_objective
from ml_collections import FrozenConfigDict

import jaxrl
from jaxrl import models, sharding, training
from jaxrl.config.load import default_config
from jaxrl.kernels.experts import experts as kernel
from jaxrl.kernels.experts import tuned
from jaxrl.kernels.logprob import divergence, logprob_and_entropy
from jaxrl.models.feed_forward import GATED
from jaxrl.models.placement import routed, split_of
from jaxrl.sharding.mesh import AXES
from jaxrl.training.layout import RowShapes
from jaxrl.training.score import make_value_score
from jaxrl.training.update import loss_and_metrics
from jaxrl.types import PackedBatch

HF = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16,
      "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False}
RINGS = [attention_cases.Case("prompts", length=512, window=50, sinks=True), attention_cases.Case("padding", length=512, dtype="bfloat16"),
         attention_cases.Case("documents", length=512, heads=6, groups=1, softcap=2.0)]
EXPERTS = HF | {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32, "mlp_only_layers": [0], "num_hidden_layers": 3}
LATENT = {name: x for name, x in HF.items() if name != "head_dim"} | {
    "model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"}
GPT_OSS = HF | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "sliding_window": 16,
                "num_hidden_layers": 4}
HYBRID = HF | {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2,
               "shared_expert_intermediate_size": 32, "mlp_only_layers": [0], "full_attention_interval": 2, "linear_num_key_heads": 4,
               "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
RECURRENT = {k: x for k, x in HYBRID.items() if "expert" not in k and k not in ("mlp_only_layers", "moe_intermediate_size")} | {
    "model_type": "qwen3_5_text"}
MAMBA = HF | {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
              "moe_intermediate_size": 32, "moe_latent_size": 32, "moe_shared_expert_intermediate_size": 32, "n_groups": 4, "mamba_num_heads": 8,
              "mamba_head_dim": 16, "ssm_state_size": 8}
MAMBA_CUT = {k: x for k, x in HF.items() if k != "head_dim"} | {
    "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_rms_norm": True}
NAMES = {3: ("dp", "fsdp", "tp"), 4: ("dp", "fsdp", "ep", "tp"), 5: AXES}
LOSS = policy_objective(old="column", kl_coef=0.1, chunk=64)
ROWS, LENGTH = 8, 64


def mesh_of(shape):
    config = default_config()
    config.mesh.update(dict(zip(NAMES[len(shape)], shape, strict=True)))
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:math.prod(shape)])
    jax.set_mesh(mesh)
    return mesh


def share(tree):
    """Share of the matrices' bytes that the first device holds. (Norms and biases are whole everywhere.)"""
    matrices = [x for x in jax.tree.leaves(tree) if x.ndim > 2 or x.ndim == 2 and min(x.shape) > 4]
    return sum(x.addressable_shards[0].data.nbytes for x in matrices) / sum(x.nbytes for x in matrices)


def numbers(folder, shape, hf=HF):
    mesh = mesh_of(shape)
    model = models.build(hf, compute_dtype=jnp.float32, scan_layers=True, remat="full")
    params = model.init(jax.random.key(0))
    traj, columns = batch_of_groups(groups=16, size=3)
    layout = training.make_layout(traj.sizes,
                                  RowShapes((LENGTH,), ((ROWS,),), recurrent=bool(model.config.num_recurrent)), num_minibatches=1)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    optimizer = optax.adamw(1e-3)
    params = jax.device_put(params, sharding.param_shardings(mesh, model.logical_axes(), params))
    trainable, frozen = training.partition(params, (".*",), ())
    places = jax.tree.map(lambda x: x.sharding, trainable)
    state = training.init_state(trainable, frozen, optimizer)
    moments = jax.jit(lambda t: optimizer.init(t)[0].mu, out_shardings=places)(trainable)
    put = lambda b: jax.device_put(b, sharding.batch_sharding(mesh))  # noqa: E731
    logp = training.make_score(model, temperature=1.0, chunk=64, put=put)(params, traj, layout)
    update = training.make_update(model, optimizer, lambda i: 1e-3, LOSS)
    batches = [put(training.pack(traj, m, columns, weights)) for m in layout.minibatches[0].microbatches]
    grads, metrics = update.gradients(state, batches)
    np.savez(f"{folder}/{','.join(map(str, shape))}.npz", logp=logp, loss=metrics["loss"], **jax.device_get(grads))
    return {"share": share(params), "moments": share(moments), "microbatches": len(batches)}


def experts(folder, shape, hf=EXPERTS):
    """numbers of a model of experts; and its gradients in float64, into FOLDER/<mesh>.float64.npz."""
    found = numbers(folder, shape, hf)
    with jax.enable_x64(True):
        model = models.build(hf, compute_dtype=jnp.float64, scan_layers=True, remat="full")
        params = jax.tree.map(lambda x: x.astype(jnp.float64), model.init(jax.random.key(0)))
        name, grads = ",".join(map(str, shape)), gradients(model, params, model_batch())[1]
        np.savez(f"{folder}/{name}.float64.npz", **flatten_dict(jax.device_get(grads), sep="/"))
    return found


gpt_oss = functools.partial(experts, hf=GPT_OSS)
hybrid = functools.partial(experts, hf=HYBRID)
mamba = functools.partial(experts, hf=MAMBA)


def cut(folder, shape, hf=GPT_OSS, ring=False):
    """One update of long rows with shared prompts: log-probs, routes, values, loss, metrics and gradients by the tokens of
    the batch; a ratio of whole sequences, replayed routes (of other parameters) and the router's terms."""
    mesh = mesh_of(shape)
    traj, columns = batch_of_groups(groups=6, size=4, max_prompt=60, max_answer=120, seed=1)
    for name, dtype, bound in (("", np.float32, False), (".float64", np.float64, True)):
        with jax.enable_x64(bound):
            np.savez(f"{folder}/{','.join(map(str, shape))}{name}.npz", **one_update(mesh, hf, traj, dict(columns), dtype, ring))
    return {}


def one_update(mesh, hf, traj, columns, dtype, ring):
    model = models.build(hf, compute_dtype=dtype, scan_layers=True, remat="full", ring=ring)
    windows, ranks = [layer.window for layer in model.config.layers], mesh.shape["cp"]
    layout = training.make_layout(traj.sizes, RowShapes((512,), ((4,),), 1, ranks, tuple(windows), bool(model.config.num_recurrent)))
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
    put = lambda b: jax.device_put(b, sharding.batch_sharding(mesh))  # noqa: E731

    def placed(seed):
        params = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(seed)))
        return jax.device_put(params, sharding.param_shardings(mesh, model.logical_axes(), params))

    policy, out = placed(0), {}
    scored = training.make_score(model, temperature=1.0, chunk=64, put=put, routes=True)
    out["routes"] = columns["routes"] = scored(placed(1), traj, layout)["routes"]
    out["logprob"] = scored(policy, traj, layout)["logprob"]
    head = {"value": {"kernel": jnp.sin(jnp.arange(model.config.hidden_size, dtype=dtype))}}
    out["value"] = make_value_score(model, put=put)(policy | head, traj, layout)
    loss = dataclasses.replace(LOSS, router_balance=0.3, router_z=0.02)
    loss = dataclasses.replace(loss, options=FrozenConfigDict({**loss.options, "ratio": "sequence"}))
    trainable, frozen = training.partition(policy, (".*",), ())
    optimizer = optax.sgd(1.0)
    rng = np.random.default_rng(2)
    load = rng.dirichlet(np.ones(model.config.num_experts), model.config.num_expert_layers)
    state = training.init_state(trainable, frozen, optimizer, router_load=load.astype(dtype))
    batches = [put(training.pack(traj, m, columns, weights, dtype)) for m in layout.minibatches[0].microbatches]
    grads, metrics = training.make_update(model, optimizer, lambda i: 1.0, loss).gradients(state, batches)
    return out | {f"metric:{name}": x for name, x in jax.device_get(metrics).items()} | jax.device_get(grads)


cut_latent = functools.partial(cut, hf=LATENT)
cut_hybrid = functools.partial(cut, hf=HYBRID)


def cut_recurrent(folder, shape, hf=RECURRENT):
    """Log-probs by the tokens of the batch, loss and gradients of long rows with shared prompts, in float64; of one recurrent layer
    and one of attention, without experts."""
    mesh = mesh_of(shape)
    traj, columns = batch_of_groups(groups=4, size=3, max_prompt=40, max_answer=50, seed=1)
    put = lambda b: jax.device_put(b, sharding.batch_sharding(mesh))  # noqa: E731
    with jax.enable_x64(True):
        model = models.build(hf, compute_dtype=np.float64, scan_layers=False)
        params = jax.tree.map(lambda x: x.astype(np.float64), model.init(jax.random.key(0)))
        params = jax.device_put(params, sharding.param_shardings(mesh, model.logical_axes(), params))
        layout = training.make_layout(traj.sizes, RowShapes((256,), ((4,),), 1, mesh.shape["cp"], model.config.windows, True))
        weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
        logp = training.make_score(model, temperature=1.0, chunk=64, put=put)(params, traj, layout)
        state = training.init_state(*training.partition(params, (".*",), ()), optimizer := optax.sgd(1.0))
        batches = [put(training.pack(traj, m, columns, weights, np.float64)) for m in layout.minibatches[0].microbatches]
        grads, metrics = training.make_update(model, optimizer, lambda i: 1.0, LOSS).gradients(state, batches)
        np.savez(f"{folder}/{','.join(map(str, shape))}.npz", logp=logp, loss=metrics["loss"], **jax.device_get(grads))
    return {"segments": int(np.asarray(batches[0].segments).max())}


cut_mamba = functools.partial(cut_recurrent, hf=MAMBA_CUT)
cut_ring = functools.partial(cut, ring=True)


def rings(folder, shape):
    """Every implementation in a ring over cp that runs here, against float64."""
    mesh = mesh_of(shape)
    for name in ("reference", "blockwise", "tpu"):
        for case in RINGS:
            attention_cases.check(name, case, attention_cases.in_a_ring(name, case, mesh.shape["cp"], mesh))
    return {}


def model_batch():
    """Rows with padding at their ends."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    segments = (positions < rng.integers(LENGTH // 2, LENGTH, (ROWS, 1))).astype(np.int32)
    return tokens, positions, segments, np.zeros_like(tokens)


def gradients(model, params, batch):
    """(loss, gradients) of a function of every logit and of the router's own terms; sharded by the mesh in force."""
    def loss(params, *batch):
        hidden, said = model.forward(params, *batch)[:2]
        real = batch[2] > 0
        terms = (jnp.where(real, said[name], 0) for name in ("router_z", "router_entropy"))
        logits = model.logits(params, jnp.where(real[..., None], hidden, 0))
        return jnp.sum(jnp.sin(logits)) + sum(map(jnp.sum, terms))

    mesh = jax.sharding.get_mesh()
    where = sharding.param_shardings(mesh, model.logical_axes(), params)
    run = jax.jit(jax.value_and_grad(loss), out_shardings=(None, where))
    return run(jax.device_put(params, where), *jax.device_put(batch, sharding.batch_sharding(mesh)))


def piled(folder, shape):
    """The largest relative difference of output and gradients where an even routing and one that sends all tokens to the
    same two experts run through one program of the kernel, from the reference on one device; temporaries of that
    program, of 2 chunks, and of one of 4, for what they depend on."""
    mesh_of(shape)
    mesh, chunk, count, slots, size, width = jax.sharding.get_mesh(), 128, 8, 3, 32, 64
    rng, shards, tuned.chunk = np.random.default_rng(0), sharding.data_shards(jax.sharding.get_mesh()), lambda *_: chunk
    weights = [rng.normal(size=s).astype(np.float32) / 10 for s in ((count, size, width),) * 2 + ((count, width, size),)]

    def inputs(chunks):
        each = chunks * chunk // mesh.shape["ep"]
        x = rng.normal(size=(shards, each, size)).astype(np.float32)
        gates = rng.random((shards, each, slots)).astype(np.float32)
        even = (np.arange(shards * each)[:, None] * slots + np.arange(slots)) % count
        one = np.broadcast_to(np.array([1, 0, -1]), even.shape)
        return x, gates, *(ids.reshape(gates.shape).astype(np.int32) for ids in (even, one))

    def outcome(call, x, gates, ids, *weights):
        def loss(x, gates, *weights):
            y = call(x, ids, gates, *weights)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True)(x, gates, *weights)

    def plain(x, ids, gates, *weights):
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, gates))
        return kernel(*flat, *weights, activation=GATED["silu"], implementation="reference").reshape(x.shape)

    def compiled(x, gates, ids):
        rows, own = sharding.batch_sharding(mesh), jax.NamedSharding(mesh, jax.P("ep"))
        run = jax.jit(functools.partial(outcome, functools.partial(routed, activation=GATED["silu"])), in_shardings=(rows,) * 3 + (own,) * 3)
        return run.lower(x, gates, ids, *weights).compile()

    x, gates, *routings = inputs(2)
    program, worst = compiled(x, gates, routings[0]), 0.0
    for ids in routings:
        placed = jax.device_put((x, gates, ids, *weights), program.input_shardings[0])
        got, want = program(*placed), jax.jit(functools.partial(outcome, plain))(x, gates, ids, *weights)
        pairs = zip(*(jax.tree.leaves(jax.device_get(x)) for x in (got, want)), strict=True)
        worst = max(worst, *(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs))
    more = inputs(4)
    sizes = [p.memory_analysis().temp_size_in_bytes for p in (program, compiled(*more[:3]))]
    return {"piled": worst, "temporaries": sizes, "tokens": x[0].nbytes}


def memory(folder, shape):
    """Bytes per device: temporaries, one layer's weights, and what a device holds of the gradients of all layers."""
    mesh, layers = mesh_of(shape), 12
    hf = {**HF, "hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "num_hidden_layers": layers, "vocab_size": 512}
    model = models.build(hf, compute_dtype=jnp.float32, scan_layers=True, remat="full")
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    where = sharding.param_shardings(mesh, model.logical_axes(), shapes)
    placed = jax.tree.map(lambda s, w: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w), shapes, where)
    trainable, frozen = training.partition(placed, (".*",), ())
    ints = jax.ShapeDtypeStruct((ROWS, 128), jnp.int32, sharding=sharding.batch_sharding(mesh))
    floats = jax.ShapeDtypeStruct((ROWS, 128), jnp.float32, sharding=ints.sharding)
    names = ("tokens", "positions", "segments", "prefixes", "sources", "targets", "sequences")
    batch = PackedBatch(**dict.fromkeys(names, ints), columns={"advantage": floats, "old": floats, "ref": floats},
                        weights={"policy": floats, "token": floats})
    gradient = jax.value_and_grad(loss_and_metrics, has_aux=True)
    places = jax.tree.map(lambda s: s.sharding, trainable)
    run = jax.jit(lambda t, f, b: gradient(t, f, b, model, LOSS), out_shardings=(None, places))
    found = run.lower(trainable, frozen, batch).compile().memory_analysis()
    layer = sum(np.prod(s.shape[1:]) * 4 for s in jax.tree.leaves(shapes["layers"]))
    return {"temporaries": found.temp_size_in_bytes, "layer": int(layer), "layers": layers}


def logprob(folder, shape):
    """The largest difference from the reference, of values and of gradients, relative to the largest entry."""
    mesh_of(shape)
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(8, 24, 16)).astype(np.float32), rng.normal(size=(16, 64)).astype(np.float32)
    targets, valid = rng.integers(0, 64, (8, 24)).astype(np.int32), rng.random((8, 24)) < 0.7
    valid[2] = False  # a row with nothing in it
    support = np.concatenate([targets[..., None], rng.integers(-1, 64, (8, 24, 5))], axis=-1).astype(np.int32)
    worst = {}
    for name, kept in (("whole", None), ("support", support)):
        def total(hidden, head, kept=kept, **options):
            found = logprob_and_entropy(hidden, head, targets, valid, kept, temperature=0.7, softcap=5.0, top=5, **options)
            return jnp.sum(jnp.sin(found[0]) + 0.3 * found[1]**2), found

        both = [jax.jit(jax.grad(lambda h, w, o=o: total(h, w, **o), argnums=(0, 1), has_aux=True))(hidden, head)
                for o in ({"implementation": "reference"}, {"chunk": 16, "split": split_of((8, 24), 64)})]
        split = {"chunk": 16, "split": split_of((8, 24), 64), "transposed": True}
        (turned_h, turned_w), found = jax.jit(jax.grad(lambda h, w: total(h, w, **split), argnums=(0, 1), has_aux=True))(hidden, head.T)  # noqa: B023
        for a, b in zip(jax.tree.leaves(((turned_h, turned_w.T), found)), jax.tree.leaves(both[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        want, got = (jax.tree.leaves(jax.device_get(x)) for x in both)
        worst[name] = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(want, got, strict=True))
        if kept is None:  # of a support there may be fewer than five, and the rest are all alike
            assert (want[4] == got[4]).all() and (want[4].max(), want[4].min()) == (63, -1), "the most probable tokens"
    # log-probs at given ids, and the divergence from a teacher, both with the vocabulary over tp
    ids, teacher = support[..., 1:], jnp.asarray(hidden[..., ::-1] * 0.7)

    def at_ids(hidden, head, **options):
        *_, found = logprob_and_entropy(hidden, head, targets, valid, None, ids, temperature=0.7, softcap=5.0, **options)
        return jnp.sum(jnp.sin(found)), found

    def apart(hidden, head, **options):
        found = divergence(hidden, head, teacher, head[::-1], valid, kind="jsd", beta=0.3, vocab=61, temperature=0.7, softcap=5.0,
                           teacher_softcap=5.0, **options)
        return jnp.sum(jnp.sin(found)), found

    for name, total in (("ids", at_ids), ("divergence", apart)):
        want, got = (jax.device_get(jax.jit(jax.value_and_grad(lambda h, w, o=o: total(h, w, **o), (0, 1), has_aux=True))(hidden, head))  # noqa: B023
                     for o in ({"implementation": "reference"}, {"chunk": 16, "split": split_of((8, 24), 64)}))
        worst[name] = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True))
    return {"worst": worst}


def steps(folder, shape):
    config = tiny_job.get_config()
    config.run.dir, config.run.compile_cache = f"{folder}/{','.join(map(str, shape))}", ""
    config.mesh.dp, config.mesh.fsdp, config.mesh.tp = shape
    config.train.steps, config.eval.sets, config.log.console, config.checkpoint.export_at_end = 1, (), "off", False
    config.train.tokens_per_microbatch, config.algorithm.kl.coef = 256, 0.1
    summary = jaxrl.train(config)
    (row,) = [json.loads(line) for line in open(f"{config.run.dir}/metrics.jsonl")]
    return {"steps": summary["steps"], "loss": row["loss"], "reward": row["reward/mean"], "gap": row["gap/max"]}


if __name__ == "__main__":
    for mesh in sys.argv[3:]:
        sizes = tuple(map(int, mesh.split(",")))
        print(json.dumps({"mesh": sizes, **globals()[sys.argv[1]](sys.argv[2], sizes)}), flush=True)
