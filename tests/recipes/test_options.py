"""Options act: each is set to something else than its default, and what it decides is looked at.

Options that a room's own tests already show are listed in options.csv with those tests. Runs from end to end are in
test_options_runs.py.
"""

import json
import logging
import math
import operator
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tiny_job
from helpers.data_cases import make_config, make_tokenizer, questions, write_jsonl
from helpers.training_helpers import batch_of_groups, policy_objective
from jax.experimental.compilation_cache import compilation_cache

from jaxrl import models, training
from jaxrl.algorithms import group_advantages
from jaxrl.config.load import default_config, get, put
from jaxrl.data import load_tokenizer, load_train
from jaxrl.errors import ConfigError
from jaxrl.kernels.logprob import logprob_and_entropy
from jaxrl.models.io import hf
from jaxrl.processes.faults import FaultError
from jaxrl.recipes.sft import demonstrations
from jaxrl.resolve.checks import common
from jaxrl.resolve.spec import resolve
from jaxrl.rewards import RewardItem, RewardPool
from jaxrl.rl.roles import Roles
from jaxrl.rl.trajectories import collect, make_requests, sampling_params
from jaxrl.roles import parameters
from jaxrl.roles.role import NothingFinite, check_finite
from jaxrl.rollout import Engine, EngineContext, Key, Request, Result, make_engine
from jaxrl.rollout.shapes import from_config
from jaxrl.run import setup
from jaxrl.run.session import Progress, Session
from jaxrl.sharding.mesh import AXES
from jaxrl.telemetry import Telemetry
from jaxrl.telemetry.timing import triggers
from jaxrl.training.optimizer import make_schedule
from jaxrl.training.update import loss_and_metrics
from jaxrl.types import Sizes

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tiny(tokenizer):
    """tiny("group.option", value, ...) -> a config of a random model that passes every check."""

    def make(*pairs):
        c = default_config()
        c.model.init, c.model.tokenizer, c.data.path = "random", tokenizer, ("some.jsonl",)
        c.model.config.update(MODEL)
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            put(c, name, value)
        common.check(c)
        return c

    return make


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Programs compiled by one test serve the others."""
    compilation_cache.reset_cache()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def jax_as_it_was():
    """`open_job` and `start_jax` set jax up for the whole process."""
    names = (
        "jax_default_matmul_precision",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before, mesh = {n: getattr(jax.config, n) for n in names}, jax.sharding.get_mesh()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.set_mesh(mesh)


def same(a, b):
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# -- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_seed_decides_parameters_and_samples(tiny):
    first, again, other = (parameters.initial_params(setup.open_job(tiny("run.seed", s))) for s in (0, 0, 1))
    assert same(first, again) and not same(first, other)
    example = SimpleNamespace(prompt_ids=np.arange(3))
    seeds = [[r.seed for r in make_requests([(5, example)], 4, None, s, "train", 1)] for s in (0, 0, 1)]
    assert seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2]) and len(set(seeds[0])) == 4


def test_deterministic_and_compile_cache_reach_jax(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    jax.config.update("jax_compilation_cache_dir", None)
    setup.start_jax(tiny("run.compile_cache", ""))
    assert os.environ["XLA_FLAGS"] == "--xla_a=1" and jax.config.jax_compilation_cache_dir is None
    setup.start_jax(tiny("run.compile_cache", str(tmp_path / "cache"), "run.deterministic", True))
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_deterministic_ops=true"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")
    setup.start_jax(tiny())
    assert jax.config.jax_compilation_cache_dir.endswith(os.path.join(".cache", "jaxrl", "xla"))


def test_the_compile_cache_keeps_to_its_size(tiny, tmp_path):
    """The programs that were used last stay."""
    before = jax.config.jax_compilation_cache_dir
    try:
        for limit, left in ((0.0, "abc"), (2.5e-6, "ac"), (1e-6, "a")):
            for name, used in (("a", 300), ("b", 100), ("c", 200)):
                (tmp_path / f"{name}-cache").write_bytes(bytes(1000))
                os.utime(tmp_path / f"{name}-cache", (used, used))
            setup.start_jax(tiny("run.compile_cache", str(tmp_path), "run.compile_cache_gb", limit))
            assert sorted(p.name[0] for p in tmp_path.glob("*-cache")) == list(left)
    finally:
        setup.start_jax(tiny("run.compile_cache", before or ""))


@pytest.mark.parametrize(
    "precision, dtype, expected",
    [("auto", "fp32", "highest"), ("auto", "bf16", None), ("default", "fp32", None), ("high", "fp32", "high")],
)
def test_matmul_precision(tiny, precision, dtype, expected):
    setup.open_job(tiny("run.matmul_precision", precision, "train.compute_dtype", dtype))
    assert jax.config.jax_default_matmul_precision == expected


def test_faults_reach_the_run(tiny):
    Session(resolve(tiny())).fault("reward")
    with pytest.raises(FaultError):
        Session(resolve(tiny("faults.plan", ("reward.raise@step=1",)))).fault("reward")


# -- model -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_model_config_and_init(tiny, tmp_path):
    """init=random reads a folder's config only, init=pretrained its weights too; model.config wins over the folder."""
    job = setup.open_job(tiny("run.seed", 3))
    params = parameters.initial_params(job)
    assert job.model.config.num_layers == 1
    assert setup.open_job(tiny("model.config.num_hidden_layers", 3)).model.config.num_layers == 3
    hf.export(job.model, params, tmp_path / "m", job.hf_config, "fp32", tokenizer=job.tokenizer)
    path = str(tmp_path / "m")
    for init, equal in (("pretrained", True), ("random", False)):
        c = tiny("model.path", path, "model.init", init)
        c.model.config = {}
        job = setup.open_job(c)
        assert job.model.config.num_layers == 1 and same(parameters.initial_params(job), params) == equal
    c = tiny("model.path", path)
    c.model.config = {"num_hidden_layers": 3}
    assert setup.open_job(c).model.config.num_layers == 3


@pytest.mark.full
def test_revisions_of_a_hub_model(tiny, tmp_path, monkeypatch):
    """A hub cache with two revisions, read without a network."""
    import huggingface_hub.constants

    repo = tmp_path / "models--somebody--tiny"
    for name, commit, layers in (("main", "a" * 40, 1), ("v2", "b" * 40, 2)):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(commit)
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for revision, layers in ((None, 1), ("v2", 2)):
        c = tiny("model.path", "somebody/tiny", "model.revision", revision)
        c.model.config = {}
        assert setup.open_job(c).model.config.num_layers == layers


@pytest.mark.full
def test_scan_layers_decides_how_parameters_are_stacked(tiny):
    def names(scan):
        model = setup.open_job(tiny("model.scan_layers", scan, "model.config.num_hidden_layers", 2)).model
        return set(jax.eval_shape(model.init, jax.random.key(0)))

    assert "layers" in names("true") and "layer_1" in names("false") and names("auto") == names("false")


def program(c):
    """The gradient's program of a config's model, as text."""
    model = setup.open_job(c).model
    tokens = jnp.ones((1, 8), jnp.int32)

    def loss(params):
        return model.hidden(params, tokens, jnp.arange(8)[None], tokens, 0 * tokens).sum()

    return str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(model.init, jax.random.key(0))))


def layers_recomputed(text: str) -> int:
    """How many parts are recomputed under a policy: groups of layers (an MLP's gates are recomputed without one)."""
    return len(re.findall(r"policy=(?!None)", text))


@pytest.mark.full
def test_remat_and_attention_choose_the_program(tiny):
    remat = {r: program(tiny("model.remat", r)) for r in ("auto", "none", "full", "dots", "offload")}
    assert remat["auto"] == remat["none"] and not layers_recomputed(remat["none"])
    assert layers_recomputed(remat["full"]) and layers_recomputed(remat["dots"]) and remat["full"] != remat["dots"]
    assert "<host>" in remat["offload"] and "<host>" not in remat["full"]
    attention = {a: program(tiny("model.attention", a)) for a in ("auto", "reference", "blockwise")}
    assert attention["reference"] != attention["blockwise"] and attention["auto"] in attention.values()


@pytest.mark.full
def test_recurrence_chooses_the_program(tiny):
    """One of the implementations by name, auto being XLA's here; a model without recurrent layers has no use for it."""
    def of(name):
        config = tiny("model.recurrence", name)
        config.model.config = {**tiny_job.HYBRID, "vocab_size": 288}
        return program(config)

    found = {name: of(name) for name in ("auto", "xla", "tpu", "reference")}
    assert found["auto"] == found["xla"] and len(set(found.values())) == 3
    with pytest.raises(ConfigError, match="model.recurrence=tpu has no effect on a model without recurrent layers"):
        program(tiny("model.recurrence", "tpu"))


@pytest.mark.full
def test_experts_choose_the_program(tiny):
    """One of the implementations by name, auto being XLA's blocks here; a model without experts has no use for it."""
    def of(name):
        config = tiny("model.experts", name)
        config.model.config = {**config.model.config.to_dict(), "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 16, "norm_topk_prob": True}
        return program(config)

    found = {name: of(name) for name in ("auto", "blocks", "reference")}
    assert found["auto"] == found["blocks"] != found["reference"]
    with pytest.raises(ConfigError, match="model.experts=blocks has no effect on a model without experts"):
        program(tiny("model.experts", "blocks"))


@pytest.mark.full
def test_a_ring_gathers_no_keys(tiny):
    """Over two devices of cp that need not exist: keys and values, four numbers to an axis, are sent on and gathered nowhere."""
    mesh = jax.sharding.AbstractMesh((1, 1, 2, 1, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 5)

    def collectives(ring):
        c = tiny("model.ring_attention", ring, "mesh.cp", 2)
        model = models.build(c.model.config.to_dict(), compute_dtype="float32", scan_layers=True, ring=c.model.ring_attention)
        with jax.set_mesh(None):  # not the one another test left; nothing runs under the devices that do not exist
            tokens = jnp.ones((1, 8), jnp.int32)
            of = jax.eval_shape(model.init, jax.random.key(0)), tokens, jnp.arange(8)[None], tokens, 0 * tokens
            with jax.sharding.use_abstract_mesh(mesh):
                text = str(jax.make_jaxpr(model.hidden)(*of))
        return text.count("all_gather["), text.count("ppermute[")

    (gathers, sends), (fewer, more) = collectives(False), collectives(True)
    assert sends == 0 < more and fewer < gathers, (gathers, sends, fewer, more)
    with pytest.raises(ConfigError, match="model.ring_attention=True has no effect with mesh.cp=1"):
        tiny("model.ring_attention", True)


@pytest.mark.full
def test_remat_every_recomputes_layers_together(tiny):
    """Four layers: as many recomputed parts, two, or (a group of three and the rest) two."""
    configs = [tiny("model.remat", "full", "model.remat_every", n) for n in (1, 2, 3)]
    for c in configs:
        c.model.config.num_hidden_layers = 4
    assert [layers_recomputed(program(c)) for c in configs] == [4, 2, 2]
    for remat, every, message in (("none", 2, "remat_every=2 has no effect with model.remat=none"), ("full", 0, "remat_every=0")):
        with pytest.raises(ConfigError, match=message):
            tiny("model.remat", remat, "model.remat_every", every)


def test_trainable_and_frozen_decide_what_has_optimizer_state(tiny):
    def names(*pairs):
        job = setup.open_job(tiny(*pairs))
        optimizer, _ = training.make_optimizer(job.config.optimizer, 10, parameters.flat_axes(job.tree))
        state = parameters.abstract_state(job, optimizer)
        moments = {str(getattr(p[-1], "key", "")) for p, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)}
        assert set(state.trainable) <= moments and not set(state.frozen) & moments
        return set(state.trainable), set(state.frozen)

    everything, none = names()
    assert not none
    only, rest = names("model.trainable", ("layer_0/",))
    assert only == {n for n in everything if "layer_0/" in n} and only | rest == everything
    kept, frozen = names("model.trainable", ("layer_0/",), "model.frozen", ("norm",))
    assert kept == {n for n in only if "norm" not in n} and kept | frozen == everything


def test_eos_tokens_end_an_answer(tiny):
    assert setup.open_job(tiny()).eos_ids == (2,)
    assert setup.open_job(tiny("model.eos_tokens", ("<end>", "<eos>"))).eos_ids == (3, 2)
    with pytest.raises(ConfigError, match="model.eos_tokens"):
        setup.open_job(tiny("model.eos_tokens", ("<nope>",)))


def test_tokenizer_code_runs_when_it_is_trusted(tmp_path, monkeypatch):
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "t"
    make_tokenizer(folder)
    (folder / "code.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    trusted = True\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "code.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(make_config(folder, model__trust_remote_code=True))
    assert tokenizer.trusted and len(tokenizer) == 260


# -- mesh ------------------------------------------------------------------------------------------------------------


MESHES = """
    import jax, json, sys
    from jaxrl.config.load import default_config
    from jaxrl.models import decoder
    from jaxrl.roles import parameters
    from jaxrl.run import setup
    out, residual = [], decoder.residual
    for dp, fsdp, cp, ep, tp in ((1, -1, 1, 1, 1), (1, 2, 1, 1, 2), (2, -1, 1, 1, 1), (1, 1, 1, 1, -1), (1, 1, 1, 2, 2),
                                 (1, -1, 1, 2, 1), (1, -1, 2, 1, 1), (1, 1, 2, 1, 2)):
        c = default_config()
        c.model.init, c.model.tokenizer, c.run.deterministic = "random", sys.argv[2], True
        c.model.config.update(json.loads(sys.argv[1]))
        c.mesh.update({"dp": dp, "fsdp": fsdp, "cp": cp, "ep": ep, "tp": tp})
        if ep > 1:
            c.model.config.update({"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48})
        setup.start_jax(c)
        job = setup.open_job(c)
        mlp = parameters.param_shardings(job)["layer_0"]["mlp"]
        up, shape = (mlp["up"]["kernel"], (32, 48)) if ep == 1 else (mlp["experts"]["up"]["kernel"], (6, 32, 48))
        query = parameters.param_shardings(job)["layer_0"]["attention"]["query"]["kernel"].shard_shape((32, 4, 8))[0]
        tokens = job.put(jax.numpy.zeros((8, 4)))
        ids = jax.numpy.zeros((8, 4), int)
        calls = []
        decoder.residual = lambda x: (calls.append(x.shape), residual(x))[1]
        jax.eval_shape(lambda p: job.model.hidden(p, ids, ids, ids, ids), jax.eval_shape(job.model.init, jax.random.key(0)))
        between = {jax.jit(residual)(jax.numpy.zeros(shape)).sharding.shard_shape(shape) for shape in calls}
        out.append([list(job.mesh.shape.values()), up.shard_shape(shape), query, tokens.sharding.shard_shape(tokens.shape), *between])
    print(json.dumps(out))
"""


@pytest.mark.slow
def test_mesh_splits_batch_parameters_and_width(tokenizer):
    """Four devices. Batch rows go over dp x fsdp x ep, their tokens over cp, parameters over fsdp x cp x ep x tp, experts over ep,
    whole ones, and their matrices over fsdp x tp; between layers rows over dp x fsdp x ep and tokens over cp x tp (sequence parallelism). (Also under
    run.deterministic.)"""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MESHES), json.dumps(MODEL), tokenizer],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert json.loads(out.stdout) == [
        [[1, 4, 1, 1, 1], [8, 48], 8, [2, 4], [2, 4, 32]],
        [[1, 2, 1, 1, 2], [16, 24], 16, [4, 4], [4, 2, 32]],
        [[2, 2, 1, 1, 1], [16, 48], 16, [2, 4], [2, 4, 32]],
        [[1, 1, 1, 1, 4], [32, 12], 32, [8, 4], [8, 1, 32]],
        [[1, 1, 1, 2, 2], [3, 32, 24], 16, [4, 4], [4, 2, 32]],
        [[1, 2, 1, 2, 1], [3, 16, 48], 8, [2, 4], [2, 4, 32]],
        [[1, 2, 2, 1, 1], [8, 48], 8, [4, 2], [4, 2, 32]],
        [[1, 1, 2, 1, 2], [16, 24], 16, [8, 2], [8, 1, 32]],
    ]


# -- data ------------------------------------------------------------------------------------------------------------


def test_subsets_of_a_folder(tokenizer, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    for k, name in enumerate(("easy", "hard")):
        write_jsonl(folder / f"{name}.jsonl", questions(k + 2))
    entries = "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("easy", "hard"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    for subset, rows in (("easy", 2), ("hard", 3)):
        config = make_config(tokenizer, folder, data__subset=subset)
        assert len(load_train(config, load_tokenizer(config))) == rows


def test_a_hub_data_set_is_asked_for_by_name_subset_split_and_revision(tokenizer, monkeypatch):
    """What is asked of the hub's client; the hub itself is out of reach of tests."""
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(questions(2))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = make_config(
        tokenizer, "somebody/rows", data__revision="v2", data__subset="easy", data__split=("train", "more")
    )
    assert len(load_train(config, load_tokenizer(config))) == 4
    assert asked == [(("somebody/rows", "easy"), {"split": s, "revision": "v2"}) for s in ("train", "more")]


def test_the_completion_column(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "p", "completion": "no", "solution": "yes"}])
    config = make_config(tokenizer, path, run__recipe="sft", data__completion_column="solution")
    loaded = load_tokenizer(config)
    assert loaded.decode(load_train(config, loaded, 2)[0].target_ids) == "yes<eos>"


# -- rollout and eval sampling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["rollout", "eval"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.2),
    ],
)
def test_sampling_options_reach_the_sampler(tiny, group, name, value):
    c = tiny(f"{group}.{name}", value, "rollout.penalties_in_training", True)
    other = "eval" if group == "rollout" else "rollout"
    assert getattr(sampling_params(c[group], 8), name) == value
    assert getattr(sampling_params(c[other], 8), name) != value


def test_penalties_in_training_need_consent(tiny):
    for name, value in (("rollout.repetition_penalty", 1.1), ("rollout.frequency_penalty", 0.2)):
        with pytest.raises(ConfigError, match="rollout.penalties_in_training=true"):
            tiny(name, value)
        tiny(name, value, "rollout.penalties_in_training", True)


def test_engine_names(tiny):
    for name in ("auto", "jax"):
        job = setup.open_job(tiny("rollout.engine", name))
        engine = make_engine(EngineContext(job.config, job.model, job.tokenizer, job.mesh, job.eos_ids))
        assert isinstance(engine, Engine)
        engine.close()
    with pytest.raises(ConfigError, match="rollout.engine='vlm': auto, jax, vllm, or an import path"):
        tiny("rollout.engine", "vlm")


def test_static_shapes_of_the_sampler(tiny):
    def shapes(*pairs):
        return from_config(tiny(*pairs), 1, 1)

    usual = shapes()
    assert (usual.slot_counts, usual.prompt_lengths, usual.cache_lengths) == ((8, 32, 128, 256), (128, 256, 512), (1536,))
    assert shapes("rollout.slots", 40).slot_counts == (5, 20, 40)
    assert shapes("rollout.slots", 40, "rollout.compaction", False).slot_counts == (40,)
    assert shapes("rollout.prompt_lengths", (64, 512)).prompt_lengths == (64, 512)
    assert shapes("rollout.cache_lengths", (512, 1536)).cache_lengths == (512, 1536)
    assert (usual.decode_steps, shapes("rollout.decode_steps", 3).decode_steps) == (16, 3)


@pytest.mark.full
def test_reward_workers(tiny, tmp_path):
    """A call returns when so many workers are at work as are asked for."""
    for workers in (1, 2):
        there = tmp_path / str(workers)
        there.mkdir()
        (tmp_path / "who.py").write_text(
            f"import os, pathlib, time\ndef who(prompt, completion):\n    there = pathlib.Path({str(there)!r})\n"
            f"    (there / str(os.getpid())).touch()\n    while len(os.listdir(there)) < {workers}: time.sleep(0.01)\n"
            "    return 1.0, {'pid': os.getpid()}\n")
        c = tiny("reward.timeout_seconds", 300.0, "reward.workers", workers, "reward.functions", (f"{tmp_path}/who.py:who",))
        with RewardPool(c) as pool:
            result = pool.score([RewardItem("q", "c")] * 8)
        assert len({m["who"]["pid"] for m in result.item_metrics}) == workers


# -- algorithm -------------------------------------------------------------------------------------------------------


def algorithm(c):
    job = setup.open_job(c)
    return Roles(job, 5)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, value, field",
    [
        ("rollout.temperature", 0.7, "temperature"),
        ("algorithm.clip_low", 0.1, "options.clip_low"),
        ("algorithm.clip_high", 0.28, "options.clip_high"),
        ("algorithm.kl.coef", 0.05, "kl_coef"),
        ("algorithm.entropy_coef", 0.01, "options.entropy_coef"),
        ("algorithm.mismatch.correction", "token_tis", "options.mismatch.correction"),
        ("algorithm.mismatch.cap", 3.0, "options.mismatch.cap"),
        ("train.logprob_chunk", 77, "chunk"),
        ("optimizer.max_grad_norm", 0.3, "max_grad_norm"),
    ],
)
def test_algorithm_options_reach_the_loss(tiny, name, value, field):
    read = operator.attrgetter(field)
    assert read(algorithm(tiny(name, value)).loss) == value and read(algorithm(tiny()).loss) != value


def test_the_trainer_may_have_a_temperature_of_its_own(tiny):
    """The loss and the scoring of old log-probs."""
    drawn, own = tiny(), tiny("algorithm.temperature", 0.7, "algorithm.mismatch.correction", "none")
    assert (algorithm(drawn).loss.temperature, algorithm(own).loss.temperature) == (drawn.rollout.temperature, 0.7)
    assert drawn.rollout.temperature != 0.7


def test_kl_estimator_reaches_the_loss(tiny):
    for estimator in ("k2", "k3"):
        c = tiny("algorithm.kl.coef", 0.1, "algorithm.kl.estimator", estimator)
        assert algorithm(c).loss.options.kl.estimator == estimator


def test_old_logprobs_and_the_number_of_updates(tiny):
    """auto scores once more only where a batch gets several updates."""

    def source(*pairs):
        a = algorithm(tiny(*pairs))
        return a.old_source, a.loss.scores_old, a.updates_per_step

    assert source() == ("current", False, 1)
    assert source("algorithm.ppo_epochs", 3) == ("recompute", True, 3)
    assert source("algorithm.ppo_epochs", 2, "algorithm.num_minibatches", 4) == ("recompute", True, 8)
    assert source("algorithm.old_logprobs", "recompute") == ("recompute", True, 1)
    assert source("algorithm.old_logprobs", "rollout") == ("rollout", True, 1)


def test_mismatch_correction_by_default_where_the_sampler_is_not_exact(tiny):
    assert algorithm(tiny()).loss.options.mismatch.correction == "none"
    assert algorithm(tiny("rollout.dtype", "bf16")).loss.options.mismatch.correction == "token_tis"
    assert algorithm(tiny("rollout.dtype", "bf16", "algorithm.mismatch.correction", "none")).loss.options.mismatch.correction == "none"
    assert algorithm(tiny("rollout.dtype", "bf16", "algorithm.old_logprobs", "rollout")).loss.options.mismatch.correction == "none"


def test_advantage_options(tiny):
    scores, groups = [3.0, 1.0, 1.0, 2.0], [0, 0, 1, 1]

    def advantages(*pairs):
        v = common.resolved_algorithm(tiny(*pairs))
        return group_advantages(scores, groups, mean=v["advantage_mean"], std=v["advantage_std"])[0]

    np.testing.assert_allclose(advantages(), [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5], rtol=1e-5)
    np.testing.assert_allclose(advantages("algorithm.advantage_std", "group_population"), [1, -1, -1, 1], rtol=1e-5)
    np.testing.assert_allclose(advantages("algorithm.advantage_std", "none"), [1, -1, -0.5, 0.5])
    plain = advantages("algorithm.advantage_std", "none", "algorithm.advantage_mean", "none")
    np.testing.assert_allclose(plain, scores)


def test_preset_fills_what_is_not_set(tiny):
    paper = common.resolved_algorithm(tiny("algorithm.preset", "grpo_paper", "algorithm.kl.coef", 0.5))
    assert (paper["aggregation"], paper["kl.estimator"], paper["kl.coef"]) == ("sequence_mean", "k3", 0.5)
    own = common.resolved_algorithm(tiny("algorithm.aggregation", "sequence_mean"))
    assert (own["aggregation"], own["kl.coef"]) == ("sequence_mean", 0.0)


@pytest.fixture(scope="module")
def loss_of():
    """loss_of(change of the columns, **options of policy_objective) -> (loss, metrics) of one packed batch of groups.

    The model is a table of hidden states by token: what is looked at comes after it.
    """
    traj, columns = batch_of_groups(groups=3, size=3)
    model = SimpleNamespace(
        forward=lambda params, tokens, *where: (params["table"][tokens], {}),
        head=lambda params: params["table"].T,
        config=SimpleNamespace(final_softcap=0.0, tied=False),
    )
    params = {"table": jnp.asarray(0.5 * np.random.default_rng(0).normal(size=(61, 8)), jnp.float32)}
    shapes = training.row_shapes((), 24, 24 * 9, 1)
    layout = training.make_layout(traj.sizes, shapes, share_prompts=False)

    def compute(change, **options):
        weights = training.loss_weights(traj, np.arange(9), options.pop("aggregation", "token_mean"))
        batch = training.pack(traj, layout.minibatches[0].microbatches[0], columns | change(columns), weights)
        cfg = policy_objective(**options)
        loss, metrics = loss_and_metrics(params, {}, jax.tree.map(jnp.asarray, batch), model, cfg)
        return float(loss), {k: float(v) for k, v in metrics.items()}

    return compute


def quiet(columns):
    """No reward: only the terms that need none are left."""
    return {"advantage": 0 * columns["advantage"]}


@pytest.mark.slow
def test_each_coefficient_weighs_its_term(loss_of):
    assert loss_of(quiet)[0] == 0.0
    loss, m = loss_of(quiet, entropy_coef=0.5)
    assert loss == pytest.approx(-0.5 * m["policy/entropy"], rel=1e-6) and m["policy/entropy"] > 1
    loss, m = loss_of(quiet, kl_coef=0.5, kl_estimator="k3")
    assert loss == pytest.approx(0.5 * m["policy/kl"], rel=1e-6) and m["policy/kl"] > 0.01


@pytest.mark.slow
def test_clip_bounds_temperature_aggregation_and_cap_act(loss_of):
    keep = lambda columns: {}  # noqa: E731
    both = [loss_of(keep, old="column", clip_low=c, clip_high=c)[1] for c in (0.01, 0.2, 0.9)]
    assert both[0]["policy/clip_fraction"] > both[1]["policy/clip_fraction"] > both[2]["policy/clip_fraction"]
    one = loss_of(keep, old="column", clip_low=0.2, clip_high=0.2)
    other = loss_of(keep, old="column", clip_low=0.2, clip_high=0.6)
    assert one[0] != other[0] and one[1]["policy/clip_fraction"] > other[1]["policy/clip_fraction"]
    assert loss_of(keep, temperature=0.5)[1]["policy/entropy"] < loss_of(keep)[1]["policy/entropy"]
    assert loss_of(keep)[0] != loss_of(keep, aggregation="sequence_mean")[0]
    low, high = (loss_of(keep, old="column", mismatch="token_tis", mismatch_cap=c)[1] for c in (0.1, 9))
    assert low["gap/weight_mean"] == pytest.approx(0.1) and high["gap/weight_mean"] > 0.5


def test_truncated_answers_can_be_masked():
    traj, _ = batch_of_groups(groups=2, size=2)
    traj.finish[:] = [0, 1, 0, 1]
    cut = np.repeat(traj.finish == 1, traj.lengths) & traj.loss_mask
    kept, masked = (
        training.loss_weights(traj, np.arange(4), "token_mean", dropped=(traj.finish == 1) & m)["policy"] for m in (False, True)
    )
    assert (kept[cut] > 0).all() and (masked[cut] == 0).all()
    np.testing.assert_array_equal(kept[~cut], masked[~cut])  # denominators stay


@pytest.mark.full
def test_reference_path_and_dtype(tiny, tmp_path):
    job = setup.open_job(tiny("run.seed", 9))
    given = parameters.initial_params(job)
    hf.export(job.model, given, tmp_path / "ref", job.hf_config, "fp32", tokenizer=job.tokenizer)

    def reference(*pairs):
        c = tiny("run.seed", 1, *pairs)
        job = setup.open_job(c)
        part = Roles(job, 5).reference
        if part is not None:
            part.start(None, None)
        return part and part.state, parameters.initial_params(job)

    assert reference()[0] is None  # no KL term, nothing is loaded
    own, start = reference("algorithm.kl.coef", 0.1, "reference.dtype", "fp32")
    assert same(own, start)
    other, _ = reference("algorithm.kl.coef", 0.1, "reference.dtype", "fp32", "reference.path", str(tmp_path / "ref"))
    assert same(other, given) and not same(other, start)
    half, _ = reference("algorithm.kl.coef", 0.1)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


# -- optimizer -------------------------------------------------------------------------------------------------------


def test_adamw_is_the_formula_with_every_option():
    c = default_config().optimizer
    c.lr, c.b1, c.b2, c.eps, c.weight_decay, c.warmup_steps = 0.1, 0.7, 0.9, 0.3, 0.05, 0
    optimizer, _ = training.make_optimizer(c, 10, {"w": ("embed", "mlp")})
    w, state = {"w": jnp.array([[1.0, -2.0]])}, None
    m = v = np.zeros((1, 2))
    want = np.array(w["w"], np.float64)
    state = optimizer.init(w)
    for t, g in enumerate((np.array([[0.5, 0.1]]), np.array([[-0.2, 0.4]])), 1):
        updates, state = optimizer.update({"w": jnp.asarray(g, jnp.float32)}, state, w)
        w = {"w": w["w"] + updates["w"]}
        m, v = 0.7 * m + 0.3 * g, 0.9 * v + 0.1 * g * g
        want = want - 0.1 * (m / (1 - 0.7**t) / (np.sqrt(v / (1 - 0.9**t)) + 0.3) + 0.05 * want)
    np.testing.assert_allclose(w["w"], want, rtol=1e-5)


def test_warm_up_as_a_fraction_and_from_a_start():
    c = default_config().optimizer
    c.lr, c.warmup_fraction, c.warmup_start, c.warmup_steps = 2.0, 0.25, 0.5, 1000
    assert [float(make_schedule(c, 16)(i)) for i in range(6)] == pytest.approx([1.25, 1.5, 1.75, 2.0, 2.0, 2.0])


@pytest.mark.full
def test_a_run_ends_after_max_nonfinite_updates_in_a_row(tiny):
    def check(streak, limit):
        state = SimpleNamespace(step=np.int32(9), stats={"nonfinite_streak": np.int32(streak)})
        check_finite(state, tiny("optimizer.max_nonfinite", limit, *more))

    more = ()
    check(2, 3)
    check(3, 4)
    with pytest.raises(NothingFinite, match="optimizer.max_nonfinite=3.*lower optimizer.lr .*, or look at the rewards"):
        check(3, 3)
    more = ("algorithm.policy_loss", "math:fsum")
    with pytest.raises(NothingFinite, match="look for 0 x inf, .* in algorithm.policy_loss=math:fsum, or lower"):
        check(3, 3)
    more = ("run.recipe", "sft")
    with pytest.raises(NothingFinite) as told:
        check(3, 3)
    assert "reward" not in str(told.value) and "lower optimizer.lr" in str(told.value)


# -- train -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_row_shapes_follow_tokens_per_microbatch_and_row_lengths(tiny):
    short = ("data.max_prompt_tokens", 40, "rollout.max_new_tokens", 60)
    shapes = [
        setup.open_job(tiny(*short, *more)).row_shapes
        for more in (
            (),
            ("train.tokens_per_microbatch", 416),
            ("train.row_lengths", (64, 128)),
            ("train.max_sequence_tokens", 56),
            ("train.row_counts", 1),
            ("train.share_prompts", False),
        )
    ]
    assert [(s.lengths, s.counts[-1]) for s in shapes] == [
        ((520,), (3, 1)),  # a prompt and its eight answers, 2048 tokens on a CPU
        ((416,), (1,)),
        ((64, 128), (16, 4)),
        ((168,), (12, 3)),
        ((520,), (3,)),
        ((104,), (19, 4)),
    ]


def test_answers_are_cut_to_max_sequence_tokens():
    ids = np.arange(10, dtype=np.int32)
    requests = [Request(f"t/0/0/{k}", ids[:3], seed=k, key=Key("t", 0, 0, k)) for k in range(2)]
    zeros = np.zeros(5, np.float32)
    results = [Result(r.id, ids[:5], zeros, zeros, ids[:5] * 0, "stop", r.seed) for r in requests]
    assert collect(requests, results, 8).completion_lengths.tolist() == [5, 5]
    cut = collect(requests, results, 6)
    assert cut.completion_lengths.tolist() == [3, 3] and (cut.finish == 1).all()


def test_share_prompts_packs_one_copy_per_group():
    shapes = training.row_shapes((64,), 20, 640, 1)
    layouts = [training.make_layout(Sizes([10] * 4, [5] * 4, [0] * 4, [0] * 4), shapes, share_prompts=s) for s in (True, False)]
    assert [layout.used_tokens for layout in layouts] == [10 + 4 * 5, 4 * 15]


@pytest.mark.full
@pytest.mark.parametrize("name, dtype", [("fp32", jnp.float32), ("bf16", jnp.bfloat16), ("fp16", jnp.float16)])
def test_compute_dtype(tiny, name, dtype):
    job = setup.open_job(tiny("train.compute_dtype", name))
    tokens = jnp.ones((1, 4), jnp.int32)
    params = jax.eval_shape(job.model.init, jax.random.key(0))
    hidden = jax.eval_shape(job.model.hidden, params, tokens, tokens, tokens, tokens)
    assert job.compute_dtype == hidden.dtype == dtype
    assert setup.open_job(tiny()).compute_dtype == jnp.float32  # auto, here on the CPU


@pytest.mark.full
def test_log_probs_are_fp32_under_bf16():
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 6, 16), (16, 50)))
    targets = rng.integers(0, 50, (2, 6))
    logp, _ = logprob_and_entropy(hidden, head, jnp.asarray(targets))
    exact = jax.nn.log_softmax(np.asarray(hidden, np.float64) @ np.asarray(head, np.float64))
    assert logp.dtype == jnp.float32
    np.testing.assert_allclose(logp, np.take_along_axis(np.asarray(exact), targets[..., None], -1)[..., 0], atol=1e-4)


@pytest.mark.full
def test_param_dtype(tiny):
    for name, dtype in (("fp32", jnp.float32), ("bf16", jnp.bfloat16)):
        job = setup.open_job(tiny("train.param_dtype", name))
        params = jax.eval_shape(lambda job=job: parameters.initial_params(job))
        state = parameters.abstract_state(job, optax.sgd(1.0))
        assert {x.dtype for x in jax.tree.leaves((params, state.trainable))} == {jnp.dtype(dtype)}


def test_loss_on_prompt():
    example = SimpleNamespace(prompt_ids=np.array([5, 6, 7]), target_ids=np.array([8, 9]), trained=None)
    masks = [demonstrations([example], [0], on).loss_mask.tolist() for on in (False, True)]
    assert masks == [[False, False, False, True, True], [False, True, True, True, True]]


@pytest.mark.full
def test_a_run_ends_at_max_samples_or_steps(tiny):
    def finished(limit, samples, step=3):
        s = Session(resolve(tiny("train.max_samples", limit, "train.steps", 9)))
        s.progress, s.stream = Progress(step, 0, samples), SimpleNamespace(exhausted=lambda cursor: False)
        return not s.should_continue()

    assert not finished(0, 10**9) and not finished(64, 63)
    assert finished(64, 64) and finished(0, 0, step=9)


@pytest.mark.parametrize("before, calls", [(True, 1), (False, 0)])
def test_a_new_run_is_evaluated_before_its_first_step_where_asked(tiny, before, calls):
    seen = []
    s = Session(resolve(tiny("eval.before", before)))
    s.stream, s.due = SimpleNamespace(exhausted=lambda cursor: False), {"eval": SimpleNamespace(missed=False)}
    s.before_first_step(lambda: seen.append("asked") or ({}, {}, {}))
    assert seen == ["asked"] * calls


# -- triggers --------------------------------------------------------------------------------------------------------


OFF = {"eval.every_steps": 0, "checkpoint.every_steps": 0, "checkpoint.every_minutes": 0.0}
STEPS = [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.25), (6, 1.5)]


@pytest.mark.parametrize(
    "option, value, what, due",
    [
        ("eval.every_steps", 3, "eval", [3, 6]),
        ("eval.every_epochs", 0.5, "eval", [2, 4, 6]),
        ("eval.every_seconds", 1e-9, "eval", [1, 2, 3, 4, 5, 6]),
        ("checkpoint.every_steps", 4, "save", [4]),
        ("checkpoint.every_epochs", 1.0, "save", [4]),
        ("checkpoint.every_minutes", 1e-9, "save", [1, 2, 3, 4, 5, 6]),
        ("checkpoint.every_minutes", 1e9, "save", []),
        ("checkpoint.export_every_steps", 5, "export", [5]),
        ("checkpoint.export_every_epochs", 0.75, "export", [3, 6]),
        ("checkpoint.export_every_minutes", 1e-9, "export", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_triggers(tiny, option, value, what, due):
    spec = resolve(tiny(*[x for pair in {**OFF, option: value}.items() for x in pair]))
    said = {name: [step for step, epoch in STEPS if every(step, epoch)] for name, every in triggers(spec, {}).items()}
    assert said == {"eval": [], "save": [], "export": []} | {what: due}


# -- log -------------------------------------------------------------------------------------------------------------


def test_the_log_level_is_the_configs(tiny, tmp_path):
    log = logging.getLogger("jaxrl")
    before = log.level, list(log.handlers)
    try:
        for name in ("debug", "info", "warning", "error"):
            c = tiny("log.level", name, "log.console", "off", "log.tensorboard", False)
            Telemetry(tmp_path / name, c, 1).close()
            assert log.getEffectiveLevel() == getattr(logging, name.upper())
    finally:
        log.setLevel(before[0])
        log.handlers[:] = before[1]


# -- free tables -----------------------------------------------------------------------------------------------------


def test_free_tables_keep_what_is_put_in(tiny):
    c = tiny("user.bonus", 0.5, "model.config.rope_theta", 5.0)
    assert get(c, "user.bonus") == 0.5 and math.isclose(setup.open_job(c).hf_config["rope_theta"], 5.0)
