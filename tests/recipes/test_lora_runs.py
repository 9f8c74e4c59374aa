"""Runs that train adapters: what trains, what a checkpoint holds, what the engine and the reference compute with, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from helpers import tiny_job
from helpers.lora_cases import LINEAR
from helpers.run_tools import fingerprint
from helpers.training_helpers import batch_of_groups

import jaxrl
from jaxrl import training
from jaxrl.config.load import put
from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.io import hf
from jaxrl.models.io.tensorfile import list_folder
from jaxrl.recipes import sft
from jaxrl.resolve.checks import common
from jaxrl.resolve.spec import resolve
from jaxrl.rl.roles import Roles
from jaxrl.roles import parameters
from jaxrl.roles.reference import BaseReference
from jaxrl.roles.role import policy_params
from jaxrl.run import setup


def config(folder, arg=None, **changes):
    c = tiny_job.get_config(arg)
    c.run.dir, c.log.console, c.eval.sets = str(folder), "off", ()
    c.data.prompts_per_step, c.rollout.group_size = 2, 4
    c.train.steps, c.checkpoint.every_steps, c.reward.workers = 3, 1, 1
    c.lora.rank, c.optimizer.lr = 4, 3e-2
    for name, value in changes.items():
        put(c, name.replace("__", "."), value)
    return c


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def arrays(folder, step):
    """Name -> (dtype, shape) of what a checkpoint holds."""
    text = (Path(folder) / "checkpoints" / f"{step:08d}" / "host" / "metadata").read_text()
    return json.loads(text)["arrays"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three steps of GRPO with adapters and a KL to the base."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    jaxrl.train(config(folder, algorithm__kl__coef=0.01))
    return folder


def test_a_checkpoint_holds_adapters_their_moments_and_the_base_s_digest(finished):
    """Nothing of the base: moments are of A and B alone, and what is frozen is 14 scales."""
    held = arrays(finished, 3)
    own = {name.partition("/")[2] for name in held if name.startswith("trainable/")}
    assert {name.rpartition("/")[2] for name in own} == {"a", "b"} and len(own) == 2 * 2 * len(LINEAR)
    assert {name.rpartition("/")[2] for name in held if name.startswith("frozen/")} == {"scale"}
    assert held["base_digest"] == ["uint8", [32]]
    moments = {name.split("/mu/")[1] for name in held if "/mu/" in name}
    assert moments == own


@pytest.mark.slow
def test_killed_and_resumed_runs_are_bitwise_one_run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for later in ("00000002", "00000003"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
    jaxrl.train(config(tmp_path / "run", algorithm__kl__coef=0.01))
    assert fingerprint(tmp_path / "run") == fingerprint(finished)


def test_the_export_is_the_base_with_the_adapters_merged(finished):
    """It has the plain model's tensors; kernels moved, by at most rank 4, and nothing else did."""
    model = setup.open_job(resolve(config(finished))).model.base
    found = jax.tree.map(np.asarray, hf.load_params(model, str(finished / "export")))
    start = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    for entry in model.entries:
        moved = entry.of(found) - entry.of(start)
        if adapters.adaptable(entry):
            matrix = moved.reshape(entry.hf_shape[::-1])
            values = np.linalg.svd(matrix, compute_uv=False)
            assert values[0] > 1e-3 and values[4:].max(initial=0) < 1e-5
        else:
            assert not moved.any()


@pytest.mark.full
def test_scores_follow_the_adapters_and_the_engine_samples_from_them(finished, tmp_path):
    """Merged for the engine or apart, its log-probs are the update's; at the start policy and reference are one."""
    jaxrl.train(config(tmp_path / "run", algorithm__kl__coef=0.01, lora__publish="adapter"))
    for folder in (finished, tmp_path / "run"):
        assert max(line["gap/max"] for line in lines(folder)) < 2e-5
        kl = [line["policy/kl"] for line in lines(folder)]
        assert abs(kl[0]) < 1e-12 and kl[2] > 1e-4  # two programs: instructions decide on the last bit


def started(c):
    """(job, roles, policy at its start)."""
    job = setup.open_job(resolve(c))
    roles = Roles(job, 3)
    policy = roles.policy
    policy.abstract()
    policy.start(None)
    if roles.reference is not None:
        roles.reference.start(None, None)
    return job, roles, policy


def moved(policy):
    """The policy after some update: all that trains is another number."""
    state = policy.state
    policy.state = state.replace(trainable={name: x + 0.05 * (1 + np.arange(x.size).reshape(x.shape) % 3) for name, x in state.trainable.items()})


@pytest.mark.full
def test_the_reference_is_the_base_bitwise_and_has_no_copy_of_it(tmp_path):
    """Scored after the adapters have moved, it is to the bit what a fresh model without adapters says."""
    c = config(tmp_path, algorithm__kl__coef=0.01)
    job, algorithm, policy = started(c)
    assert isinstance(algorithm.reference, BaseReference) and algorithm.reference.state is None
    traj, _ = batch_of_groups(vocab=190)
    layout = training.make_layout(traj.sizes, job.row_shapes)
    before = policy.score(traj, layout)
    moved(policy)
    plain = config(tmp_path, algorithm__kl__coef=0.01, reference__dtype="fp32", lora__rank=0)
    fresh, _, start = started(plain)
    want = start.score(traj, layout)
    np.testing.assert_array_equal(algorithm.reference.score(traj, layout), want)
    np.testing.assert_array_equal(before, want)
    assert np.abs(policy.score(traj, layout) - want).max() > 1e-3
    held = algorithm.reference.params()["embed"]["embedding"]
    assert held is policy.state.frozen["embed/embedding"]


@pytest.mark.full
def test_a_reference_that_moves_or_does_not_begin_at_the_base_keeps_what_trains(tmp_path):
    c = config(tmp_path, algorithm__kl__coef=0.01, reference__reset_steps=2)
    job, algorithm, policy = started(c)
    traj, _ = batch_of_groups(vocab=190)
    layout = training.make_layout(traj.sizes, job.row_shapes)
    start = policy.score(traj, layout)
    moved(policy)
    np.testing.assert_array_equal(algorithm.reference.score(traj, layout), start)
    algorithm.reference.take(policy)
    np.testing.assert_array_equal(algorithm.reference.score(traj, layout), policy.score(traj, layout))
    assert set(algorithm.reference.arrays()) == set(policy.state.trainable)


@pytest.mark.full
def test_publishes_leave_the_base_as_it_is_and_copy_what_has_adapters_only(tmp_path):
    job, _, policy = started(config(tmp_path))
    for _ in range(5):
        moved(policy)
        given = policy.weights()
    flat = policy.state.frozen
    assert given["embed"]["embedding"] is flat["embed/embedding"]
    assert "lora" not in given["layer_0"]["mlp"]["up"] and given["layer_0"]["mlp"]["up"]["kernel"] is not flat["layer_0/mlp/up/kernel"]
    np.testing.assert_array_equal(parameters.base_digest(flat), policy.base_digest)
    want = adapters.merged(job.model, policy_params(policy.state.trainable, flat))
    jax.tree.map(np.testing.assert_array_equal, given, want)


@pytest.mark.slow
def test_another_base_is_refused_at_resume(tmp_path):
    """One bit of one weight of the folder that the run began from."""
    jaxrl.train(config(tmp_path / "first", lora__rank=0, train__steps=1))
    source = tmp_path / "first" / "export"
    options = dict(model__init="pretrained", model__path=str(source), train__steps=1)
    jaxrl.train(config(tmp_path / "run", **options))
    (file,) = source.glob("*.safetensors")
    stored = list_folder(source)["model.norm.weight"]
    data = bytearray(file.read_bytes())
    value = stored.read().tobytes()
    at = data.index(value)
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="the base model is not, bit for bit, the one"):
        jaxrl.train(config(tmp_path / "run", **options | {"train__steps": 2}))


@pytest.mark.full
def test_the_base_rests_in_its_own_dtype_and_costs_no_optimizer_state(tmp_path):
    """lora.base_dtype; A, B and what trains whole are fp32. rank and init decide the adapters; alpha and rslora the scale."""
    state = lambda **more: started(config(tmp_path, **more))[2].state  # noqa: E731
    plain, half = state(), state(lora__base_dtype="bf16", lora__modules_to_save=("norm",), lora__alpha=16.0)
    assert {str(x.dtype) for x in plain.frozen.values()} == {"float32"}
    assert {str(x.dtype) for n, x in half.frozen.items() if not adapters.is_adapter(n)} == {"bfloat16"}
    assert {str(x.dtype) for x in half.trainable.values()} == {"float32"} and "final_norm/scale" in half.trainable
    sizes = [sum(x.size for x in jax.tree.leaves(s.opt_state) if x.ndim) for s in (plain, half)]
    assert sizes[0] == 2 * sum(x.size for x in plain.trainable.values())
    scale = lambda s: float(s.frozen["layer_0/mlp/up/lora/scale"])  # noqa: E731
    assert (scale(plain), scale(half), scale(state(lora__rslora=True, lora__alpha=16.0))) == (1.0, 4.0, 8.0)
    drawn = [state(lora__init=init).trainable["layer_0/mlp/up/lora/a"] for init in ("default", "gaussian")]
    assert drawn[0].shape == (32, 4) and not np.array_equal(*drawn)


@pytest.mark.slow
def test_a_value_head_on_the_policy_s_trunk_trains_beside_adapters(tmp_path):
    c = config(tmp_path / "run", algorithm__preset="ppo", critic__shared=True, train__steps=1)
    jaxrl.train(c)
    held = arrays(tmp_path / "run", 1)
    assert "trainable/value/kernel" in held and "trainable/layer_0/mlp/up/lora/a" in held
    assert not [name for name in held if name.startswith("frozen/") and not name.endswith("/scale")]


@pytest.mark.slow
def test_supervised_runs_train_adapters_with_dropout_and_resume_bitwise(tmp_path):
    options = dict(lora__dropout=0.25, log__every_steps=1, checkpoint__keep=-1)
    jaxrl.train(config(tmp_path / "whole", "sft", **options))
    jaxrl.train(config(tmp_path / "parts", "sft", **options | {"train__steps": 2}))
    jaxrl.train(config(tmp_path / "parts", "sft", **options))
    jaxrl.train(config(tmp_path / "plain", "sft", **options | {"lora__dropout": 0.0}))
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("whole", "parts", "plain")]
    assert losses[0] == losses[1] and losses[0][0] == losses[2][0]  # B is zero in the first update
    assert losses[0][1] != losses[2][1]
    assert fingerprint(tmp_path / "whole") == fingerprint(tmp_path / "parts")


@pytest.mark.full
def test_a_run_is_evaluated_from_its_checkpoint(finished, tmp_path):
    """With the adapters: as the export, a whole model, is."""
    shutil.copytree(finished, tmp_path / "run")
    more = dict(eval__sets=("test=jaxrl://arith/test.jsonl",), run__mode="eval")
    out = jaxrl.train(config(tmp_path / "run", **more))
    whole = jaxrl.train(config(tmp_path / "other", **more | {"lora__rank": 0, "model__init": "pretrained", "model__path": str(finished / "export")}))
    assert out["eval"]["sets"] == whole["eval"]["sets"]


@pytest.mark.full
def test_options_choose_modules_ranks_and_scales(tmp_path):
    def chosen(**more):
        adapter = setup.open_job(resolve(config(tmp_path, **more))).model.adapter
        return {t.name.removeprefix("model.layers."): (t.rank, t.scale) for t in adapter.targets}

    every = chosen()
    assert len(every) == 2 * len(LINEAR) and set(every.values()) == {(4, 1.0)}
    assert set(chosen(lora__targets=("q_proj", "mlp.up_proj"))) == {f"{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert set(chosen(lora__targets=(r".*1\.mlp\..*",))) == {f"1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert set(every) - set(chosen(lora__exclude=("o_proj",))) == {"0.self_attn.o_proj", "1.self_attn.o_proj"}
    assert {name[0] for name in chosen(lora__layers=(1,))} == {"1"}
    assert setup.open_job(resolve(config(tmp_path, lora__dora=True))).model.adapter.decomposed
    found = chosen(lora__rank_pattern=("k_proj=2",), lora__alpha_pattern=(r"1\..*\.v_proj=12",))
    assert (found["0.self_attn.k_proj"], found["0.self_attn.v_proj"], found["1.self_attn.v_proj"]) == ((2, 2.0), (4, 1.0), (4, 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_a_run_starts_from_an_adapter_that_another_one_exported(tmp_path, dora):
    """As a PEFT folder (lora.export); its first scores are the other's last, and the reference is the policy as it starts."""
    jaxrl.train(config(tmp_path / "first", lora__export="adapter", train__steps=2, lora__targets=("q_proj", "down_proj"), lora__dora=dora))
    folder = tmp_path / "first" / "export"
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    job, algorithm, policy = started(config(tmp_path, lora__rank=0, lora__path=str(folder), algorithm__kl__coef=0.01))
    assert job.model.adapter.decomposed == dora == any(name.endswith("/lora/m") for name in policy.state.trainable)
    assert {t.rank for t in job.model.adapter.targets} == {4} and np.abs(policy.state.trainable["layer_0/mlp/down/lora/b"]).max() > 1e-3
    traj, _ = batch_of_groups(vocab=190)
    layout = training.make_layout(traj.sizes, job.row_shapes)
    start = policy.score(traj, layout)
    base = started(config(tmp_path, lora__rank=0))[2].score(traj, layout)
    assert np.abs(start - base).max() > 1e-4
    np.testing.assert_array_equal(algorithm.reference.score(traj, layout), start)


@pytest.mark.parametrize("options, said", [
    ({"lora__rank": 0, "lora__alpha": 8.0}, "lora.alpha=8.0 has no effect with lora.rank=0"),
    ({"model__frozen": ("embed",)}, "adapters train and nothing else"),
    ({"lora__dropout": 0.1}, "would be another policy than the one that is updated"),
    ({"lora__path": "x"}, "lora.rank=4 has no effect with lora.path"),
    ({"lora__publish": "adapter", "rollout__engine": "vllm", "lora__modules_to_save": ("norm",)}, "serves no modules that were trained whole"),
    ({"mesh__roles": {"reference": {"devices": "0"}}, "algorithm__kl__coef": 0.1}, "the reference is the policy's own base"),
    ({"lora__rank": 0, "lora__base": "nf4"}, "lora.base='nf4' has no effect with lora.rank=0"),
    ({"lora__publish": "adapter", "rollout__engine": "vllm", "lora__base": "nf4"}, "would hold another base"),
])
def test_what_cannot_go_with_adapters_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError) as e:
        common.check(config(tmp_path, **options))
    assert said in str(e.value)


def test_unknown_modules_are_refused_before_any_device_work(tmp_path):
    with pytest.raises(ConfigError, match="lora.targets"):
        setup.check_inputs(config(tmp_path, lora__targets=("no_such_proj",)))


WIDE = tiny_job.MODEL | {"hidden_size": 64, "intermediate_size": 64}


@pytest.mark.full
def test_blocks_that_do_not_divide_are_refused_before_any_device_work(tmp_path):
    with pytest.raises(ConfigError, match="lora.base=nf4: model.layers.0.self_attn.[a-z]_proj has 32 inputs"):
        setup.check_inputs(config(tmp_path, lora__base="nf4"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, publish", [("nf4", "merged"), ("int8", "adapter")])
def test_a_run_on_a_quantised_base_moves_resumes_bitwise_and_exports_what_it_trained(tmp_path, kind, publish):
    """From a folder, whose arrays become codes: the base is the codes' model (reference, digest), engine and export compute what the
    update does, transformers with the exported weights says the trainer's log-probs."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    jaxrl.train(config(tmp_path / "base", lora__rank=0, model__config=WIDE, optimizer__lr=1e-3, train__steps=1))
    own = dict(lora__base=kind, lora__publish=publish, model__init="pretrained", model__path=str(tmp_path / "base" / "export"), model__config={},
               algorithm__kl__coef=0.01)
    jaxrl.train(config(tmp_path / "run", **own))
    said = lines(tmp_path / "run")
    assert max(line["gap/max"] for line in said) < 2e-5 and abs(said[0]["policy/kl"]) < 1e-12 and said[2]["policy/kl"] > 1e-4
    held = arrays(tmp_path / "run", 3)
    assert {name.rpartition("/")[2] for name in held if name.startswith("frozen/")} == {"scale"} and not any("/codes" in name for name in held)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "00000003")
    jaxrl.train(config(tmp_path / "again", **own))
    assert fingerprint(tmp_path / "again") == fingerprint(tmp_path / "run")
    job, algorithm, policy = started(config(tmp_path / "new", **own))
    kernel = policy.state.frozen["layer_0/mlp/up/kernel/codes"]
    assert kernel.dtype == (np.uint8 if kind == "nf4" else np.int8) and "layer_0/mlp/up/kernel" not in policy.state.frozen
    assert any(f"frozen in {kind}, the rest of it in fp32" in line for line in setup.adapter_lines(job))
    moved(policy)
    policy.export(tmp_path / "whole")
    traj, _ = batch_of_groups(vocab=190)
    scores = policy.score(traj, training.make_layout(traj.sizes, job.row_shapes))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32, attn_implementation="eager")
    checked = 0
    for i in range(len(traj.sizes)):
        at = slice(traj.offsets[i], traj.offsets[i + 1])
        ids, mask = traj.tokens[at], np.asarray(traj.loss_mask[at], bool)
        with torch.no_grad():
            logp = torch.log_softmax(other(torch.tensor(ids[None].astype(np.int64))).logits[0], -1).numpy()
        want = logp[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(scores[at][1:][mask[1:]], want[mask[1:]], rtol=0, atol=1e-4)
        checked += mask[1:].sum()
    assert checked > 20
    plain = started(config(tmp_path / "plain", **own | {"lora__base": "none"}))[2]
    assert np.abs(plain.score(traj, training.make_layout(traj.sizes, job.row_shapes)) - algorithm.reference.score(
        traj, training.make_layout(traj.sizes, job.row_shapes))).max() > 1e-5


@pytest.mark.full
def test_frozen_arrays_cost_no_memory_in_the_update(tmp_path):
    """Compiled: the update's arguments and results shrink by the gradients and moments of the base."""
    def compiled(**more):
        job = setup.open_job(resolve(config(tmp_path, "sft", **more)))
        optimizer = optax.adam(1e-3)
        state = parameters.abstract_state(job, optimizer)
        grads = {name: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding) for name, x in state.trainable.items()}
        update = training.make_update(job.model, optimizer, lambda i: 1e-3, training.NextToken(**sft.precision(job)))
        metrics = {name: jax.ShapeDtypeStruct((), np.float32) for name in ("loss",)}
        return update.compiled(state)[2].lower(state, grads, metrics).compile().memory_analysis(), state

    (full, whole), (lora, own) = compiled(lora__rank=0), compiled()
    size = lambda tree: sum(x.size * 4 for x in jax.tree.leaves(tree))  # noqa: E731
    base = size(own.frozen)
    assert full.argument_size_in_bytes >= 4 * size(whole.trainable)
    assert lora.argument_size_in_bytes <= base + 4 * size(own.trainable) + 4096
