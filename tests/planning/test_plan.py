"""run.mode=plan: what it counts against closed forms and against real runs of the compiled programs."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import tiny_job, vision_cases

import jaxrl
from jaxrl import main as command
from jaxrl import models, sharding
from jaxrl.config.load import config_of, load_config
from jaxrl.errors import ConfigError
from jaxrl.kernels import recurrence
from jaxrl.models.families import IMAGES
from jaxrl.planning import case as cases
from jaxrl.planning import collectives, compiling, fit, memory, plan, roofline, workload
from jaxrl.resolve.checks.common import check
from jaxrl.resolve.spec import resolve
from jaxrl.sharding import chips, targets

HERE = Path(__file__).parents[1]
LOOP = """HloModule m
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %all-gather.1 = f32[32,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add.clone_promoted
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %all-reduce.1)
}

%condition (p: (s32[], f32[8,4])) -> pred[] {
  %limit = s32[] constant(28)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%cut (a: f32[8,4], b: s32[]) -> f32[2,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %dynamic-slice.9 = f32[2,4]{1,0} dynamic-slice(%a, %b, %b), dynamic_slice_sizes={2,4}
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %while.1 = (s32[], f32[8,4]{1,0}) while(%start), condition=%condition, body=%body
  %all-reduce.7 = (f32[8,4]{1,0}, f32[]) all-reduce(%p, %s), replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%add
  %part = f32[8,4]{1,0} get-tuple-element(%all-reduce.7), index=0
  %norm = f32[] get-tuple-element(%all-reduce.7), index=1
  %own = f32[2,4]{1,0} fusion(%part, %k), kind=kLoop, calls=%cut
  ROOT %out = f32[8,4]{1,0} add(%own, %norm)
}
"""


def tiny(**overrides):
    c = tiny_job.get_config()
    c.run.mode, c.plan.target, c.run.dir = "plan", "cpu:8", "runs/unused"
    for name, value in overrides.items():
        group, _, leaf = name.partition("__")
        c[group][leaf] = value
    return c


# -- targets and options


@pytest.mark.parametrize("text, name, count, topology", [
    ("v5p:4x4x8", "v5p", 128, (4, 4, 8)), ("v5p:64", "v5p", 64, (4, 4, 4)), ("v5e:4x4", "v5e", 16, (4, 4)),
    ("h100:64", "h100", 64, ()), ("H200", "h200", 1, ()), ("cpu:256", "cpu", 256, ())])
def test_a_target_is_read(text, name, count, topology):
    found = targets.parse(text)
    assert (found.name, found.count, found.topology) == (name, count, topology)


@pytest.mark.parametrize("text, remedy", [
    ("h10:8", "did you mean h100"), ("v5p:4x4", "v5p:2x2x4"), ("h100:2x4", "h100:8"), ("cpu:0", "number of devices"), ("", "empty")])
def test_an_impossible_target_is_refused_with_a_remedy(text, remedy):
    with pytest.raises(ConfigError, match=remedy) as e:
        check(tiny(plan__target=text))
    assert "plan.target" in str(e.value)


def test_a_policy_on_some_devices_is_planned_on_the_target():
    """They are the target's; `rest` stays, and so does the config that was given."""
    c = tiny()
    c.mesh.roles = {"policy": {"devices": "0-3", "rest": "host"}}
    found = cases.open_case(c)
    assert found.config.mesh.roles.to_dict() == {"policy": {"rest": "host"}}
    assert c.mesh.roles.policy.devices == "0-3" and found.mesh == cases.open_case(tiny()).mesh


def test_roles_with_devices_of_their_own_are_refused():
    c = tiny()
    c.mesh.roles = {"critic": {"devices": "0-3"}}
    with pytest.raises(ConfigError, match="mesh.roles"):
        cases.open_case(c)


def test_a_plan_needs_neither_data_nor_tokenizer():
    c = tiny(data__path=(), model__tokenizer="")
    check(c)
    c.run.mode = "train"
    with pytest.raises(ConfigError, match="model.tokenizer"):
        check(c)


def test_a_plan_says_that_a_loggers_package_is_missing_and_a_run_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, found=importlib.util.find_spec: None if name == "wandb" else found(name))
    monkeypatch.setattr(plan, "run", lambda config: {"fits": True})
    c = tiny(log__wandb=True)
    assert jaxrl.train(c) == {"fits": True}
    assert "log.wandb=True: the package wandb is not installed; pip install 'jaxrl[wandb]'" in capsys.readouterr().out
    c.run.mode, c.model.tokenizer = "train", "jaxrl://arith/tokenizer"
    with pytest.raises(ConfigError, match="log.wandb=True: the package wandb is not installed"):
        check(c)


def test_the_effort_of_the_tpu_compiler_reaches_it(monkeypatch):
    seen = {}
    monkeypatch.setattr(compiling, "has_libtpu", lambda: True)
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda *a, env, **k: seen.update(env))
    for effort in ("full", "fast"):
        seen.clear()
        compiling.start(tiny(plan__effort=effort), {}, "tpu", targets.parse("v5p:4"), {}, None, fast=effort == "fast")
        assert ("JAX_EXEC_TIME_OPTIMIZATION_EFFORT" in seen) == (effort == "fast")


@pytest.mark.parametrize("effort", ["full", "fast"])
def test_a_plan_asks_for_its_effort(monkeypatch, effort):
    asked = []

    def start(config, hf_config, platform, *more):
        asked.append((platform, more[-1]))
        if platform == "tpu":
            raise NotImplementedError
        return SimpleNamespace(poll=lambda: 0), None, None

    monkeypatch.setattr(compiling, "start", start)
    with pytest.raises(NotImplementedError):
        plan.make(tiny(plan__effort=effort, plan__target="v5p:2x2x1"))
    assert asked[1] == ("tpu", effort == "fast")


@pytest.mark.parametrize("effort", ["full", "fast"])
def test_a_plan_for_gpus_compiles_for_a_tpu_with_full_effort_alone(monkeypatch, effort):
    begun = []
    monkeypatch.setattr(compiling, "has_libtpu", lambda: True)
    monkeypatch.setattr(plan.gpu_devices, "compiles", lambda name: False)
    monkeypatch.setattr(compiling, "start", lambda c, hf, platform, *more: begun.append(platform) or (SimpleNamespace(poll=lambda: 0), 0, 0))

    def finish(*args):
        raise NotImplementedError

    monkeypatch.setattr(compiling, "finish", finish)
    with pytest.raises(NotImplementedError):
        plan.make(tiny(plan__effort=effort, plan__target="h100:1"))
    assert begun == (["cpu", "tpu"] if effort == "full" else ["cpu"])


def test_without_libtpu_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(compiling, "has_libtpu", lambda: False)
    with pytest.raises(ConfigError, match="pip install libtpu"):
        plan.make(tiny(plan__target="v5p:2x2x1"))


def test_a_compilation_ends_at_timeout_seconds():
    with pytest.raises(ConfigError, match="plan.timeout_seconds=0.5"):
        plan.make(tiny(plan__timeout_seconds=0.5))


# -- collectives


def test_collectives_in_loops_count_once_per_trip():
    found = {(c.kind, c.group): c for c in collectives.read(LOOP, per_host=2)}
    gather, promoted = found["all-gather", 4], found["all-reduce", 2]
    assert (gather.count, gather.bytes, gather.hosts) == (28, 28 * 32 * 4 * 4, 4)
    assert (promoted.count, promoted.bytes, promoted.hosts) == (28, 28 * 8 * 4 * 2, 1)  # bf16, summed in fp32 on the CPU only
    assert gather.sent == 0.75 * gather.bytes and promoted.sent == 2 * 0.5 * promoted.bytes


def test_an_all_reduce_that_is_cut_is_a_reduce_scatter():
    found = {c.kind: c for c in collectives.read(LOOP, per_host=8) if c.group == 4 and c.kind != "all-gather"}
    assert found["reduce-scatter"].bytes == 8 * 4 * 4 and found["all-reduce"].bytes == 4


@pytest.mark.parametrize("text, groups", [
    ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]), ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]), ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 1], [2, 3]])])
def test_every_notation_of_groups_is_read(text, groups):
    assert collectives.replica_groups(text).tolist() == groups


def test_a_notation_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="no groups"):
        collectives.replica_groups("replica_groups=something_new")


@pytest.mark.full
def test_collectives_of_a_known_program():
    """Read from a compilation on two devices: a matrix gathered in each of 5 trips of a scan."""
    code = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl.planning import collectives
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def f(ws, x):
    def layer(x, w):
        return x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P())), None
    return jax.lax.scan(layer, x, ws)[0]
shape = lambda s, *p: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, P(*p)))
text = jax.jit(f).lower(shape((5, 64, 64), None, "x"), shape((8, 64), "x")).compile().as_text()
print([(c.kind, c.count, c.bytes) for c in collectives.read(text, 8)])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert eval(out.stdout) in ([("all-gather", 5, 5 * 64 * 64 * 4)], [("all-gather", 1, 5 * 64 * 64 * 4)]), out.stderr


# -- counting


def case_for(target="cpu:8", **overrides):
    return cases.open_case(tiny(plan__target=target, **overrides))


def test_weights_are_counted_as_the_shardings_lay_them():
    case = case_for()
    mesh = jax.sharding.AbstractMesh((1, 4, 1, 1, 2), ("dp", "fsdp", "cp", "ep", "tp"))
    shapes = jax.eval_shape(case.model.init, jax.random.key(0))
    where = sharding.param_shardings(mesh, case.model.logical_axes(), shapes)
    real = sum(int(np.prod(w.shard_shape(s.shape))) for s, w in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=True))
    assert workload.weight_bytes(case.model, {"dp": 1, "fsdp": 4, "cp": 1, "ep": 1, "tp": 2}, sharding.TRAIN_RULES, 1) == real


def test_useful_operations_of_supervised_training():
    """6 N per token, attention beside it: a closed form, with the head at the loss tokens only."""
    c = tiny(run__recipe="sft", train__loss_on_prompt=True, data__prompts_per_step=3)
    c.data.max_prompt_tokens, c.rollout.max_new_tokens = 1, 15
    case = cases.open_case(c)
    cfg, n = case.model.config, case.model
    matrices = sum(int(np.prod(e.shape)) for e in n.entries if e.inputs)
    head = cfg.hidden_size * cfg.vocab_size
    attention = 4 * cfg.num_heads * cfg.head_dim * cfg.num_layers
    tokens = 3 * 16
    want = 3 * (2 * (matrices + head) * tokens + attention * 3 * (1 * 1 + 15 * 9))  # contexts: 1, then 9 on average
    assert workload.useful_flops(case.config, n) == pytest.approx(want, rel=1e-6)


def test_rows_follow_the_layout():
    c = tiny(train__tokens_per_microbatch=512)
    found = workload.rows(resolve(c), shards=8)
    assert found.shape == (8 * (512 // 112), 112)  # 96 + 12 tokens, in whole 8s
    assert found.microbatches == 1


def test_the_peak_adds_what_a_program_does_not_see():
    live = {"update_params": 10, "update_optimizer": 20, "update_gradients": 10, "rollout_weights": 5, "rollout_cache": 7}
    program = {"arguments": 0, "outputs": 3, "alias": 3, "temporaries": 100}
    peaks = memory.peaks(live, {"update": program, "decode": program, "publish": {**program, "outputs": 8, "alias": 0}})
    assert peaks == {"update": 152, "decode": 142, "publish": 10 + 20 + 7 + 8 + 100}
    parts = memory.parts(live, "decode", 100, peaks["decode"])
    away = memory.peaks(live | {"update_optimizer": 0}, {"update": program, "update_apply": program})
    assert away == {"update": 132, "update_apply": 132}
    assert parts["kv_cache"] == 7 and "gradients" not in parts and sum(parts.values()) == 142


def test_what_rests_and_what_is_lent_count_by_phase():
    live = {"update_params": 10, "update_optimizer": 20, "update_gradients": 10, "rollout_weights": 5, "rollout_cache": 7}
    program = {"arguments": 0, "outputs": 0, "alias": 0, "temporaries": 100}
    turns = memory.peaks(live, dict.fromkeys(("update", "decode", "publish"), program), resting={"sampler"})
    assert turns == {"update": 140, "decode": 142, "publish": 10 + 20 + 7 + 100}
    assert memory.peaks(live, {"decode": program}, resting={"policy"}) == {"decode": 112}
    live = {name: size for name, size in live.items() if name.startswith("update")}
    vllm = memory.peaks(live, {"update": program}, lent=(50, 2, 4))
    assert vllm == {"update": 142, "generate": 80, "give": 84}
    assert memory.by_phase(vllm) == {"rollout": 80, "update": 142, "publish": 84}
    assert memory.peaks(live | {"update_optimizer": 0}, {}, lent=(50, 2, 4)) == {"generate": 60, "give": 64}
    parts = memory.parts(live, "give", 0.0, 84, vllm=50)
    assert parts == {"vllm": 50, "parameters": 10, "optimizer": 20, "activations": 0.0, "other": 4}


QWEN_1B = dict(model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
               num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768,
               rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu")


def test_a_colocated_server_is_planned_for_and_the_nearest_that_fits_is_named():
    """1.5B with Adam on one H100 beside vLLM in turns: 0.45 of it and 18 GiB of fp32 state fit; 0.85 do not, and less does."""
    def case(fraction, target="h100:1"):
        c = tiny(plan__target=target, rollout__engine="vllm", rollout__placement="colocated")
        c.rollout.vllm.memory_fraction = fraction
        return cases.case_of(c, QWEN_1B)

    good = case(0.0)
    assert good.lent == pytest.approx(0.45 * good.memory) and good.usable == good.memory - cases.CONTEXT and good.resting == {"sampler"}
    peaks = memory.by_phase(memory.peaks(memory.standing(good.config, good.model, good.mesh), {}, lent=plan.lent_memory(good)))
    state = 12 * good.model.num_parameters
    assert peaks["rollout"] == good.lent + state and peaks["publish"] == pytest.approx(peaks["rollout"] + 2 * 256e6)
    assert plan.counted_peak(good, {}) <= good.usable
    bad = case(0.85)
    assert plan.counted_peak(bad, {}) > bad.usable
    assert "--config.rollout.vllm.memory_fraction=0.4" in plan._nearest(bad, lambda c: plan.counted_peak(cases.case_of(c, QWEN_1B), {}))
    small = case(0.04)
    assert "raise rollout.vllm.memory_fraction or tensor_parallel" in plan.too_small(small) and plan.counted_peak(small, {}) == float("inf")


@pytest.mark.parametrize("lora", [dict(lora__rank=4, lora__alpha=8.0, lora__dropout=0.1), dict(lora__path="an/adapter")])
def test_of_a_job_with_adapters_the_full_training_is_planned(lora):
    c = tiny(plan__target="h100:1", **lora)
    case = cases.open_case(c)
    assert case.adapters and not case.config.lora.rank and not case.config.lora.path and (c.lora.rank == 4 or c.lora.path)
    full = cases.open_case(tiny(plan__target="h100:1"))
    assert not full.adapters and plan.counted_peak(case, {}) == plan.counted_peak(full, {})
    loaded = cases.open_case(tiny(plan__target="h100:1", lora__path="an/adapter"))
    assert loaded.adapters and not loaded.config.lora.path


def test_products_of_the_target_are_not_asked_of_the_compiler_here(monkeypatch):
    """fp8 on an H100: its program is partitioned for CPUs, which have no such product."""
    given = []
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda command, cwd, **_: given.append(json.loads((Path(cwd) / "job.json").read_text())))
    for matmul in ("default", "fp8_tensor"):
        case = cases.open_case(tiny(plan__target="h100:1", train__matmul=matmul))
        _, folder, _ = compiling.start(case.config, case.hf_config, "cpu", case.target, case.mesh, None)
        folder.cleanup()
    assert [job["config"]["train"]["matmul_emulated"] for job in given] == [False, True] and not case.config.train.matmul_emulated


def test_the_trainer_is_planned_without_its_engine(monkeypatch):
    """`plan.part=training`: nothing is lent or kept for sampling, and what would refuse the job is said instead."""
    def case(part, **options):
        c = tiny(plan__target="h100:16", plan__part=part, rollout__placement="colocated", **options)
        c.model.config.update(**{**GPT_OSS, "swiglu_limit": 5.0} if options["rollout__engine"] == "vllm" else {})
        c.mesh.ep, c.mesh.tp = (1, 1) if options["rollout__engine"] == "vllm" else (1, 16)
        return cases.open_case(c)

    with pytest.raises(ConfigError, match="swiglu_limit=5.0: vLLM computes models of model_type=gpt_oss with 7.0; set rollout.engine=jax"):
        case("job", rollout__engine="vllm")
    with pytest.raises(ConfigError, match="mesh.tp=16: the embedded sampler stays within one process"):
        case("job", rollout__engine="jax")
    for engine, why in (("vllm", "plan.part=training. A run of this config is refused: rollout.engine=vllm with"), ("jax", "plan.part=training")):
        alone = case("training", rollout__engine=engine)
        assert alone.left_out.startswith(why) and not alone.lent and plan.lent_memory(alone) is None
        assert alone.usable == cases.GPU_SHARE * alone.memory and alone.programs == ["update", "update_apply"]
        assert fit.largest(alone.config, lambda c: 0, 1, alone.mesh, 256)["slots"] is None


GPT_OSS = dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8, num_key_value_heads=4, head_dim=8,
               rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


@pytest.mark.slow
def test_a_plan_of_training_says_what_it_leaves_out(capsys, monkeypatch, tmp_path):
    """In the table and in the file; and a check that could not be made refuses nothing."""
    c, path = tiny(plan__target="h100:1", plan__part="training", rollout__engine="vllm", plan__effort="full"), tmp_path / "plan.json"
    c.plan.json, finish = str(path), compiling.finish
    monkeypatch.setattr(compiling, "has_libtpu", lambda: True)

    def too_long(begun, what, limit):
        return finish(begun, what, limit if "CPU" in what else 0.0)

    monkeypatch.setattr(compiling, "finish", too_long)
    plan.run(c)
    said, found = capsys.readouterr().out, json.loads(path.read_text())
    assert found["fits"] and found["not_planned"] == {"rollout": "plan.part=training"} and set(found["phases"]) == {"update"}
    assert re.search("rollout +not planned: plan.part=training", said) and "running ahead" not in said
    assert re.search(r"^\d+ steps take [\d.e-]+ minutes, without evaluations", said, re.M)
    assert re.search("was not checked: plan: compiling for a TPU.*took longer", said)


@pytest.mark.parametrize("engine", ["vllm", "jax"])
def test_a_step_has_its_completions_and_a_run_its_hours(engine):
    """Whoever makes the completions; twice the answers of as many slots take twice as long."""
    def found(**options):
        config = tiny(plan__target="h100:1", rollout__engine=engine, train__steps=7200, **options)
        config.rollout.vllm.max_running = 8
        case = cases.open_case(config)
        return plan.times(case, {})["phases"], plan.times(case, {}) | {"asynchrony": {}}, case

    phases, whole, case = found()
    assert phases["rollout"]["seconds"] > 0 and not case.left_out
    run = plan._run(case.config, whole)
    assert run == {"steps": 7200, "hours": pytest.approx(2 * whole["step_seconds"])}
    if engine == "vllm":
        twice, _, _ = found(data__prompts_per_step=2 * case.config.data.prompts_per_step)
        assert twice["rollout"]["seconds"] == pytest.approx(2 * phases["rollout"]["seconds"], rel=0.01)


def test_what_is_counted_is_what_the_programs_hold():
    """The parameter table's bytes against the shapes and shardings of the run's own state, caches and copies."""
    case = case_for(mesh__tp=2)
    counted = memory.standing(case.config, case.model, case.mesh, case.rollout)
    real = compiling.finish(compiling.start(case.config, case.hf_config, "cpu", case.target, case.mesh, case.rollout_mesh, set()),
                            "test", 300)["live"]
    for name in ("update_params", "update_gradients", "rollout_weights", "rollout_cache", "rollout_stash"):
        assert counted[name] == real[name], name
    assert counted["update_optimizer"] == pytest.approx(real["update_optimizer"], abs=16)  # and its counters


def test_a_kernel_has_no_temporaries_of_the_reference():
    case = case_for()
    by_name = {}
    for name in ("reference", "blockwise", "a_kernel"):
        model = type(case.model)(**{**vars_of(case.model), "attention": name})
        by_name[name] = memory.workspace(model, 4096, 4096, 1, backward=True)
    assert by_name["a_kernel"] == 4096 * 4 * 4 < by_name["blockwise"] / 100 and by_name["blockwise"] < by_name["reference"]


def vars_of(model):
    return {f: getattr(model, f) for f in ("config", "compute_dtype", "scan_layers", "remat", "attention", "remat_every")}


def test_a_group_over_hosts_shares_their_network():
    chip = chips.CHIPS["h100"]
    one = {"sent": 1e9, "count": 0, "group": 8, "hosts": 1}
    assert roofline.collective_seconds(chip, (), one) == pytest.approx(1e9 / 450e9)
    assert roofline.collective_seconds(chip, (), {**one, "group": 64, "hosts": 8}) == pytest.approx(1e9 / 400e9)
    assert roofline.collective_seconds(chip, (), {**one, "group": 8, "hosts": 8}) == pytest.approx(1e9 / 50e9)
    small = {"sent": 0.0, "count": 10, "group": 64, "hosts": 8}
    assert roofline.collective_seconds(chip, (), small) == pytest.approx(10 * (10e-6 + 56 * 1e-6 + 7 * 5e-6))
    torus = {**one, "group": 16}  # two of the axes of 4x4x8: the longest, then another; half way around each
    assert roofline.collective_seconds(chips.CHIPS["v5p"], (4, 4, 8), torus) == pytest.approx(1e9 / 400e9)


def test_the_largest_is_found_and_the_next_does_not_fit():
    assert fit.largest_n(lambda n: n <= 37, 8, 64) == 37
    assert fit.largest_n(lambda n: True, 8, 64) == 64 and fit.largest_n(lambda n: False, 8, 64) == 0


# -- whole plans


@pytest.fixture(scope="module")
def of_tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    flags = ["--config=" + str(HERE / "helpers" / "tiny_job.py"), "--config.run.mode=plan", "--config.plan.target=cpu:8", "--config.mesh.tp=2",
             f"--config.plan.json={path}"]
    return command.main(flags), json.loads(path.read_text())


@pytest.mark.slow
def test_a_plan_that_fits_ends_with_0_and_is_written_as_json(of_tiny):
    status, found = of_tiny
    assert status == 0 and found["fits"]
    assert {"peak_bytes", "parameters", "optimizer", "gradients", "kv_cache", "publish", "activations"} <= set(found["per_device"])
    assert set(found["phases"]) == {"rollout", "update", "publish"} and found["mesh"] == {"dp": 1, "fsdp": 4, "cp": 1, "ep": 1, "tp": 2}
    assert all(p["ideal"] <= p["seconds"] <= p["serial"] for p in found["phases"].values())


@pytest.mark.slow
def test_the_plan_names_the_collectives_of_the_mesh(of_tiny):
    """tp = 2: two all-reduces per layer and pass; fsdp = 4: each of the 7 matrices of 2 layers is gathered."""
    update = of_tiny[1]["collectives"]["update"]
    gathers = [c for c in update if c["kind"] == "all-gather" and c["group"] == 4]
    assert sum(c["count"] for c in gathers) >= 14
    assert any(c["kind"] == "reduce-scatter" and c["group"] == 4 for c in update)
    assert any(c["group"] == 2 for c in update)


def test_a_kernel_computes_what_is_seen_and_xla_the_whole_row():
    """On targets that have kernels; pairs of two answers that share a prompt, by enumeration."""
    c = tiny(data__max_prompt_tokens=8, rollout__max_new_tokens=4, rollout__group_size=2)
    plain = cases.open_case(tiny(plan__target="cpu:1")).model
    on = {name: cases.with_kernels(plain, targets.parse(name)).attention for name in ("cpu:1", "v5p:1", "h100:1", "a100:1")}
    assert on == {"cpu:1": "auto", "v5p:1": "tpu", "h100:1": "auto", "a100:1": "auto"}  # fp32, which Hopper's kernel does not take
    half = dataclasses.replace(plain, compute_dtype=np.dtype("float16"), config=dataclasses.replace(plain.config, head_dim=64))
    assert cases.with_kernels(half, targets.parse("h200:1")).attention == "gpu"
    kernel = cases.with_kernels(plain, targets.parse("v5p:1"))
    pairs = sum(range(1, 9)) + 2 * sum(range(9, 13))
    assert workload.seen(resolve(c), kernel, 64) == pytest.approx(workload.TILES * pairs / 16)
    assert workload.seen(resolve(c), plain, 64) == 64

@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_the_nearest_that_does(capsys, monkeypatch):
    """What the refusal advises is planned in turn, and fits."""
    monkeypatch.setattr(cases, "device_memory", lambda config, target: (9e6, 9e6))
    flags = ["--config=" + str(HERE / "helpers" / "tiny_job.py"), "--config.run.mode=plan", "--config.plan.target=cpu:2"]
    assert command.main([*flags, "--config.train.tokens_per_microbatch=4096"]) == 2
    said = capsys.readouterr().err
    assert "does not fit" in said and "nearest that fits" in said
    assert command.main([*flags, *re.findall(r"--config\.\S+", said)]) == 0


@pytest.mark.full
def test_predict_is_cheap_and_agrees_with_the_plan():
    import time

    c = tiny_job.get_config()
    case = cases.open_case(tiny(plan__target="cpu:1"))
    mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
    plan.predict(c, mesh, case.model)
    start = time.process_time()
    found = plan.predict(c, mesh, case.model)
    assert time.process_time() - start < 0.5  # 0.02 s on a quiet core
    assert found["peak_bytes"] > 3 * 4 * case.model.num_parameters and found["update_seconds"] > 0


def test_a_config_survives_the_way_to_the_compiler():
    c = load_config("grpo", {"user.mine": 3, "optimizer.groups": {"bias": {"lr": 0.1}}})
    back = config_of(json.loads(c.to_json_best_effort()))
    assert json.loads(back.to_json_best_effort()) == json.loads(c.to_json_best_effort())


# -- experts over devices

QWEN3_30B = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
             "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
             "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 40960}


def qwen3_30b(**changes):
    c = load_config("grpo_qwen3_30b", {"run.mode": "plan"} | {name.replace("__", "."): value for name, value in changes.items()})
    check(c)
    return cases.case_of(c, QWEN3_30B)


def test_the_config_of_qwen3_30b_fits_and_counts_what_ep_splits():
    case = qwen3_30b()
    assert case.mesh == {"dp": 1, "fsdp": 2, "cp": 1, "ep": 8, "tp": 1} and plan.counted_peak(case, {}) < case.usable
    whole, experts = case.model.num_parameters, 48 * 128 * 3 * 2048 * 768
    for rules, split in ((sharding.TRAIN_RULES, 16), (sharding.ROLLOUT_RULES, 8)):
        held = workload.weight_bytes(case.model, case.mesh, rules, 1, experts=True)
        assert held == experts / split
        rest = workload.weight_bytes(case.model, case.mesh, rules, 1) - held
        dense = whole - experts
        assert rest == pytest.approx(dense / 16 if rules is sharding.TRAIN_RULES else dense, rel=0.01)
    alike = qwen3_30b(mesh__ep=1)
    tokens = workload.rows(case.config, 16)
    one, eight = (workload.train_work(c.config, c.model, c.mesh, tokens) for c in (alike, case))
    assert one.flops == eight.flops  # ep is a data axis: a device computes as much
    assert memory.dispatch(case.model, 16384, case.mesh, True) < memory.dispatch(alike.model, 16384, alike.mesh, True)


def test_cp_lets_rows_in_that_are_too_long_for_a_device():
    """Qwen3-30B-A3B and answers of 130,000 tokens on 16 H100: without cp a row's activations do not fit. A device of cp computes its
    share of a row and has the keys and values of all of it, a layer's at a time: 4 x tokens x key-value heads x head size bytes."""
    long = {"data__max_prompt_tokens": 1024, "rollout__max_new_tokens": 130048, "train__row_lengths": (), "train__tokens_per_microbatch": 131072,
            "model__config": {"max_position_embeddings": 262144}, "rollout__group_size": 8}
    whole, cut = qwen3_30b(mesh__fsdp=2, **long), qwen3_30b(mesh__fsdp=1, mesh__cp=2, **long)
    assert whole.config.train.row_lengths == cut.config.train.row_lengths == (131072,)
    assert plan.counted_peak(cut, {}) < 0.9 * cut.usable < whole.usable < plan.counted_peak(whole, {})
    assert (cut.mesh["fsdp"], cut.mesh["cp"], workload.token_shards(cut.mesh), workload.data_shards(cut.mesh)) == (1, 2, 16, 8)
    others = functools.partial(memory.rows_of_others, t=65536, mesh=cut.mesh)
    assert others(cut.model, learns=False) == 4 * 131072 * 4 * 128 and not memory.rows_of_others(whole.model, 131072, whole.mesh, False)
    ring = dataclasses.replace(cut.model, ring=True)  # here and coming; in the backward pass gradients in fp32 beside them; sums of 32 heads
    sums = 4 * 65536 * 32 * 128
    assert (others(ring, learns=False), others(ring, learns=True)) == (4 * 2 * 65536 * 4 * 128 + sums, 12 * 2 * 65536 * 4 * 128 + sums)
    flops = [workload.train_work(c.config, c.model, c.mesh, workload.rows(c.config, workload.data_shards(c.mesh))).flops for c in (whole, cut)]
    assert flops[0] == pytest.approx(2 * flops[1])  # of one row, whole or half of it


@pytest.mark.slow
def test_the_search_tries_ep():
    """The sampler's copy of all experts does not fit beside the trainer on one GPU; split over a host's it does."""
    case = qwen3_30b(mesh__ep=1, rollout__engine="jax", rollout__placement="auto")
    assert plan.counted_peak(case, {}) > case.usable
    advice = plan._nearest(case, lambda c: plan.counted_peak(cases.case_of(c, QWEN3_30B), {}))
    assert re.search(r"nearest that fits .*mesh\.ep=\d", advice), advice
    assert fit.expert_splits(case.mesh, 8, 128) == [2, 4, 8] and fit.expert_splits(case.mesh, 8, 0) == []
    with pytest.raises(ConfigError, match="mesh.ep=16: the embedded sampler stays within one process.*lower mesh.ep"):
        qwen3_30b(mesh__ep=16, rollout__engine="jax", rollout__placement="auto")
    with pytest.raises(ConfigError, match="mesh.ep=3: does not|mesh.ep=3 does not divide|cannot be divided"):
        qwen3_30b(mesh__ep=3)


QWEN3_5 = {"vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
           "linear_value_head_dim": 128, "num_attention_heads": 16, "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1}
QWEN3_5_4B = QWEN3_5 | {"model_type": "qwen3_5_text", "hidden_size": 2560, "num_hidden_layers": 32, "num_key_value_heads": 4,
                        "intermediate_size": 9216, "tie_word_embeddings": True}
QWEN3_5_35B = QWEN3_5 | {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
                         "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


NEMOTRON = Path(__file__).parents[1] / "models" / "published" / "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json"
GATED_DELTA = 32 * (2 * 64 * 5 * 128 + 6 * 128 * 128 + 2 * 64 * 64 // 3) + 2 * 4 * 8192
MAMBA2 = 64 * (2 * 64 * (128 + 64) + 4 * 128 * 64) + 2 * 4 * 6144


@pytest.mark.parametrize("hf, target, changes, size, state, tokens, rule", [
    (QWEN3_5_4B, "h200:1", {}, 4.2e9, 24 * (2**21 + 3 * 8192 * 2), 1572, GATED_DELTA),
    (QWEN3_5_35B, "h100:16", {"mesh.ep": 8}, 34.7e9, 30 * (2**21 + 3 * 8192 * 2), 3144, GATED_DELTA),
    (json.loads(NEMOTRON.read_text()), "h100:16", {"mesh.ep": 8}, 31.6e9, 23 * (2**21 + 3 * 6144 * 2), 7989, MAMBA2),
])
def test_states_and_rule_of_real_hybrids(hf, target, changes, size, state, tokens, rule):
    """Published sizes: a slot's states in fp32 beside the convolution's inputs in bf16, how many tokens of keys and values they are,
    and both in what the sampler and the update hold."""
    c = load_config("grpo_gsm8k", {"run.mode": "plan", "plan.target": target, "rollout.engine": "jax", "algorithm.kl.coef": 0.0} | changes)
    case = cases.case_of(c, hf)
    assert case.model.num_parameters == pytest.approx(size, rel=0.01)
    found = plan._recurrences(case)
    assert (found["state_bytes"], found["equals_tokens"]) == (state, tokens)
    _, shapes, width = case.rollout
    slots = shapes.slots * (found["state_bytes"] + sum(case.model.config.cache_widths.values()) * len(case.model.config.windows)
                            * width * shapes.cache_lengths[-1])
    assert memory.cache_bytes(case.model, case.rollout[0], shapes.slots, shapes.cache_lengths[-1], width) * workload.data_shards(
        case.rollout[0]) == slots
    assert found["rule_flops_per_token"] == found["layers"] * rule
    assert 0.01 < found["rule_share"] < 0.04 and found["workspace_bytes"] > 2**30
    assert plan.counted_peak(case, {}) > memory.standing(case.config, case.model, case.mesh)["update_params"] + found["workspace_bytes"]


# MiB of compiled temporaries of one row of Qwen3.5-4B's layer in bf16: XLA's for CPUs, and forward for a v5e, and the TPU kernel
# (evidence/hybrid.py temporaries, docs/explanations/kernels.md), the Hopper kernel for an H100 (jax 0.12.0.1, abd5ee2d).
COMPILED = [("xla", 1024, True, 709), ("xla", 8192, True, 1453), ("xla", 8192, False, 925), ("tpu", 8192, False, 674),
            ("tpu", 8192, True, 1264), ("gpu", 2048, False, 464), ("gpu", 2048, True, 1112), ("gpu", 8192, True, 1569), ("gpu", 16384, True, 2285)]


@pytest.mark.parametrize("name, length, backward, mib", COMPILED)
def test_workspace_of_a_recurrence_is_what_compilers_take(name, length, backward, mib):
    rule = recurrence.Rule(16, 32, 128, 128, True)
    assert recurrence.workspace(name, rule, length, 2, backward) / 2**20 == pytest.approx(mib, rel=0.2)


def test_a_plan_counts_the_recurrence_that_runs():
    """The kernel where the target has one that serves the model, in place of what XLA keeps of a stretch."""
    c = load_config("grpo_gsm8k", {"run.mode": "plan", "plan.target": "h200:1", "rollout.engine": "jax", "algorithm.kl.coef": 0.0})
    model, falcon = (cases.case_of(c, hf).model for hf in (QWEN3_5_4B, json.loads((NEMOTRON.parent / "Falcon-H1-0.5B-Instruct.json").read_text())))
    plain, keys_of_256 = (dataclasses.replace(m, recurrence="auto") for m in (model, falcon))
    keys_of_256 = dataclasses.replace(keys_of_256, config=dataclasses.replace(keys_of_256.config, linear_key_size=256))
    names = "cpu:1", "v5p:1", "h100:1", "a100:1"
    on = [[cases.with_kernels(m, targets.parse(name)).recurrence for name in names] for m in (plain, keys_of_256)]
    assert on == [["auto", "tpu", "gpu", "auto"], ["auto", "tpu", "auto", "auto"]]
    assert cases.with_kernels(dataclasses.replace(plain, recurrence="xla"), targets.parse("h100:1")).recurrence == "xla"
    counted = {name: memory.recurrence_workspace(cases.with_kernels(plain, targets.parse(name)), 1, 8192, 1, True) for name in names}
    assert counted["v5p:1"] < counted["cpu:1"] == counted["a100:1"] and counted["h100:1"] != counted["cpu:1"]


def test_a_tower_is_named_as_not_planned_or_planned(tmp_path):
    """Which of a job's rows hold images is not known to a plan: what they need more is said, or plan.image_tokens says it."""
    (tmp_path / "config.json").write_text(json.dumps(vision_cases.config()))
    text, whole = (models.build({**vision_cases.TEXT, **more}, compute_dtype=np.float32, scan_layers=False).num_parameters
                   for more in ({}, {IMAGES: vision_cases.VISION}))
    options = {"model__path": str(tmp_path), "model__init": "random", "model__config": {}}
    case = cases.open_case(tiny(plan__target="cpu", **options))
    assert case.tower == whole - text and case.model.num_parameters == text
    assert cases.open_case(tiny(plan__target="cpu", data__image_column="", **options)).tower == 0
    seen = cases.open_case(tiny(plan__target="cpu", plan__image_tokens=6, **options))
    assert seen.tower == 0 and seen.model.num_parameters == whole and "prefill_images" in seen.programs
    with pytest.raises(ConfigError, match="plan.image_tokens=500: a prompt has data.max_prompt_tokens="):
        cases.open_case(tiny(plan__target="cpu", plan__image_tokens=500, **options))
    with pytest.raises(ConfigError, match="plan.image_tokens=6: a qwen2 model has no tower"):
        cases.open_case(tiny(plan__target="cpu", plan__image_tokens=6))


@pytest.mark.parametrize("name, target, parameters, tower_flops", [
    ("Qwen2.5-VL-7B-Instruct", "h100:8", 8.29e9, 4 * 768 * 1.354e9), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("Qwen3-VL-30B-A3B-Instruct", "h100:16", 31.07e9, 4 * 768 * 1.267e9),
        ("gemma-3-4b-it", "h100:8", 4.30e9, 16 * 768 * 1.334e9), ("gemma-3-27b-it", "h100:16", 27.43e9, 16 * 768 * 1.334e9)))])
def test_published_models_with_images(tmp_path, name, target, parameters, tower_flops):
    """Parameters, the tower's work and what images add to an update, of a published config.json."""
    (tmp_path / "config.json").write_text((HERE / "models/published" / f"{name}.json").read_text())
    options = {"run.warm_start": "", "run.mode": "plan", "plan.target": target, "model.path": str(tmp_path), "rollout.engine": "jax",
               "data.max_prompt_tokens": 1024}
    text, seen = (cases.open_case(load_config("grpo_gsm8k", options | {"plan.image_tokens": n})) for n in (0, 768))
    assert seen.model.num_parameters == pytest.approx(parameters, rel=0.002) and seen.tower == 0 < text.tower
    assert workload.tower_flops(seen.config, seen.model) == pytest.approx(tower_flops, rel=0.02)
    rows = workload.rows(seen.config, workload.data_shards(seen.mesh), model=seen.model)
    assert rows.patches >= 4 * 768 and workload.rows(text.config, workload.data_shards(text.mesh), model=text.model).patches == 0
    for more, less in ((f(seen), f(text)) for f in (
            lambda c: plan.counted_peak(c, {}), lambda c: workload.useful_flops(c.config, c.model),
            lambda c: plan.times(c, {})["phases"]["update"]["ideal"], lambda c: plan.times(c, {})["phases"]["rollout"]["ideal"])):
        assert less < more < (4 if name == "gemma-3-4b-it" else 2) * less  # whose tower works more than a small decoder
    still = cases.open_case(load_config("grpo_gsm8k", options | {"plan.image_tokens": 768, "model.frozen": ("vision/.*",)}))
    fresh = cases.open_case(load_config("grpo_gsm8k", options | {"plan.image_tokens": 768, "model.frozen": ("vision/.*",),
                                                                 "train.image_features": "fresh"}))
    for fewer, more in ((f(still), f(fresh)) for f in (  # kept features: no pass over the tower, and its work once per picture
            lambda c: workload.useful_flops(c.config, c.model), lambda c: plan.times(c, {})["phases"]["update"]["ideal"],
            lambda c: memory.counted_programs(c.config, c.model, c.mesh, c.rollout, ("update",))["update"]["temporaries"])):
        assert fewer < more
    once = workload.useful_flops(fresh.config, fresh.model) - workload.useful_flops(still.config, still.model)
    assert once == pytest.approx(2 * still.config.data.prompts_per_step * workload.tower_flops(still.config, still.model))
    if name.startswith("gemma"):
        with pytest.raises(ConfigError, match="plan.image_tokens=700: every image has 256 tokens"):
            cases.open_case(load_config("grpo_gsm8k", options | {"plan.image_tokens": 700}))


@pytest.mark.slow
def test_programs_with_images_are_compiled(tmp_path):
    """What the update needs beside its arguments, compiled for this CPU, is more by about what is counted."""
    (tmp_path / "config.json").write_text(json.dumps(vision_cases.config(kind="qwen2_5_vl")))
    options = {"model__path": str(tmp_path), "model__init": "random", "model__config": {}, "plan__target": "cpu:1"}
    text, seen = (plan.make(tiny(plan__image_tokens=n, **options), search=False) for n in (0, 6))
    assert "not_planned" in text and "not_planned" not in seen and seen["per_device"]["temporaries"]["prefill_images"] > 0
    assert seen["parameters"] > text["parameters"] and seen["per_device"]["peak_bytes"] > text["per_device"]["peak_bytes"]
