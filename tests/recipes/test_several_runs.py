"""Runs that train several adapters side by side, and what cannot go with them."""

import dataclasses
import json
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import tiny_job
from helpers.run_tools import fingerprint

import jaxrl
from jaxrl.config.load import put
from jaxrl.errors import ConfigError
from jaxrl.models.io.tensorfile import read_header
from jaxrl.resolve import spec
from jaxrl.resolve.checks import common
from jaxrl.rl import rollouts
from jaxrl.run import setup

KINDS = ("chain", "skip")
OWN = {"chain": {"sources": ("chain",), "rank": 2, "lr": 2e-2, "max_grad_norm": 0.3}, "skip": {"sources": "skip", "alpha": 8.0}}


def config(folder, arg=None, kinds=KINDS, **changes):
    """Rows of two kinds, an adapter for each."""
    c = tiny_job.get_config(arg)
    c.run.dir, c.log.console, c.eval.sets = str(folder), "off", ()
    c.data.sources = {kind: {"where": {"kind": kind}} for kind in kinds}
    c.data.shuffle, c.data.prompts_per_step, c.data.max_rows = False, 2 * len(kinds), 0
    c.rollout.group_size, c.train.steps, c.checkpoint.every_steps = 4, 3, 1
    c.log.every_steps, c.lora.rank, c.optimizer.lr, c.lora.export = 1, 4, 3e-2, "adapter"
    if len(kinds) > 1:
        c.lora.adapters = {kind: dict(OWN[kind]) for kind in kinds}
    else:
        own = OWN[kinds[0]]
        for name in ("rank", "alpha"):
            c.lora[name] = own.get(name, c.lora[name])
        for name in ("lr", "max_grad_norm"):
            c.optimizer[name] = own.get(name, c.optimizer[name])
    for name, value in changes.items():
        put(c, name.replace("__", "."), value)
    return c


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def exported(folder):
    return {name: tensor.read() for name, tensor in read_header(Path(folder) / "adapter_model.safetensors").items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three steps of GRPO with two adapters and a KL to the base that they share."""
    folder = tmp_path_factory.mktemp("several") / "run"
    jaxrl.train(config(folder, algorithm__kl__coef=0.01))
    return folder


@pytest.mark.slow
def test_the_sampler_answers_by_the_adapter_that_is_trained_on_the_answer(finished):
    """Its log-probs are those of the update, of each adapter; the adapters move, and each has metrics, a place in the checkpoint and a
    folder in the export of its own."""
    said = lines(finished)
    for kind in KINDS:
        assert max(line[f"adapter/{kind}/gap/max"] for line in said) < 2e-5
        assert abs(said[0][f"adapter/{kind}/policy/kl"]) < 1e-12 and said[2][f"adapter/{kind}/policy/kl"] > 1e-6
    for name, over in (("optim/grad_norm", np.mean), ("gap/max", np.max)):
        assert said[2][name] == pytest.approx(over([said[2][f"adapter/{kind}/{name}"] for kind in KINDS]))
    assert said[2]["adapter/chain/optim/lr"] == pytest.approx(2e-2) and said[2]["adapter/skip/optim/lr"] == pytest.approx(3e-2)
    held = json.loads((finished / "checkpoints" / "00000003" / "host" / "metadata").read_text())["arrays"]
    for kind, rank in zip(KINDS, (2, 4), strict=True):
        assert held[f"step/{kind}"] == ["int32", []]
        moments = {tuple(shape) for name, (_, shape) in held.items()
                   if name.startswith(f"opt_state/{kind}/") and name.endswith("/mu/layer_0/mlp/up/lora/a")}
        assert moments == {(32, rank)}
        found = json.loads((finished / "export" / kind / "adapter_config.json").read_text())
        assert (found["r"], found["lora_alpha"]) == (rank, {"chain": 2, "skip": 8}[kind])
        assert max(np.abs(x).max() for name, x in exported(finished / "export" / kind).items() if "lora_B" in name) > 1e-3
    assert {p.name for p in (finished / "export").iterdir()} == set(KINDS)


@pytest.mark.slow
def test_killed_and_resumed_runs_are_bitwise_one_run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for later in ("00000002", "00000003"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / later)
    jaxrl.train(config(tmp_path / "run", algorithm__kl__coef=0.01))
    assert fingerprint(tmp_path / "run") == fingerprint(finished)
    for kind in KINDS:
        file = f"export/{kind}/adapter_model.safetensors"
        assert (tmp_path / "run" / file).read_bytes() == (finished / file).read_bytes()
    with pytest.raises(ConfigError, match="lora.adapters.*decides what trains"):
        jaxrl.train(config(tmp_path / "run", algorithm__kl__coef=0.01, lora__adapters__skip__rank=3, train__steps=4))


def same_runs(folder, arg, **more):
    """One run with two adapters, and a run of each kind's rows with a plain one: what they export and say is the same."""
    jaxrl.train(config(folder / "both", arg, **more))
    for kind in KINDS:
        jaxrl.train(config(folder / kind, arg, kinds=(kind,), **more))
        found, want = exported(folder / "both" / "export" / kind), exported(folder / kind / "export")
        assert found.keys() == want.keys()
        for name, x in want.items():
            np.testing.assert_allclose(found[name], x, rtol=0, atol=2e-4, err_msg=name)
        for both, one in zip(lines(folder / "both"), lines(folder / kind), strict=True):
            for name in ("loss", "optim/grad_norm", "optim/lr", "policy/entropy"):
                assert both[f"adapter/{kind}/{name}"] == pytest.approx(one[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_two_adapters_in_one_supervised_run_are_two_runs(tmp_path):
    same_runs(tmp_path, "sft")


@pytest.mark.slow
def test_two_adapters_in_one_run_of_reinforcement_learning_are_two_runs(tmp_path, monkeypatch):
    """Seeds follow from prompts here, since the same prompt has another place in the data of either run."""
    make = rollouts.make_requests

    def by_prompt(*given):
        return [dataclasses.replace(r, seed=zlib.crc32(r.prompt.tobytes() + bytes([r.key.sample, r.key.step]))) for r in make(*given)]

    monkeypatch.setattr(rollouts, "make_requests", by_prompt)
    same_runs(tmp_path, None, algorithm__kl__coef=0.01)


@pytest.mark.parametrize("options, said", [
    ({"lora__rank": 0}, "lora.adapters=['chain', 'skip'] has no effect with lora.rank=0"),
    ({"lora__adapters__skip__sources": ("chain",)}, "chain is chain's already; a source is of one adapter"),
    ({"lora__adapters__skip__sources": ("other",)}, "lora.adapters.skip.sources: other is not in data.sources (chain, skip)"),
    ({"data__sources__more": {"path": "jaxrl://arith/sft.jsonl"}}, "data.sources has more, which no adapter names in its `sources`"),
    ({"eval__sets": ("test=jaxrl://arith/test.jsonl",)}, "eval.sets has test, which no adapter names in its `eval`"),
    ({"lora__adapters__skip__ranks": 3}, "lora.adapters.skip.ranks: unknown; did you mean rank?"),
    ({"lora__adapters__skip__rank": 0}, "lora.adapters.skip.rank=0: at least 1"),
    ({"lora__adapters__skip__lr": -1.0}, "lora.adapters.skip.lr=-1.0: must"),
    ({"lora__adapters__skip__schedule": "step"}, "lora.adapters.skip.schedule='step': choose one of"),
    ({"lora__adapters__skip__b1": "x"}, "lora.adapters.skip.b1='x': must be of type float"),
    ({"lora__dora": True}, "lora.dora=True with lora.adapters: several adapters are plain ones"),
    ({"lora__init": "pissa"}, "lora.init='pissa' with lora.adapters"),
    ({"lora__publish": "merged"}, "lora.publish='merged' with lora.adapters: one set of weights cannot hold several"),
    ({"rollout__engine": "vllm"}, "rollout.engine='vllm' with lora.adapters: the embedded sampler alone serves several"),
    ({"algorithm__preset": "ppo"}, "algorithm.advantage='gae' with lora.adapters"),
    ({"algorithm__whiten": True}, "algorithm.whiten=True with lora.adapters: the mean would be over the tokens of all"),
    ({"reward__norm_std": "batch"}, "reward.norm_std='batch' with lora.adapters"),
    ({"optimizer__offload": True}, "optimizer.offload=True with lora.adapters"),
    ({"mesh__roles": {"policy": {"rest": "streamed"}}}, "mesh.roles.policy.rest='streamed' with lora.adapters"),
    ({"run__mode": "parity"}, "run.mode='parity' with lora.adapters"),
])
def test_what_cannot_go_with_several_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError) as e:
        common.check(config(tmp_path, **options))
    assert said in str(e.value)


@pytest.mark.slow
def test_held_out_rows_are_answered_by_the_adapter_that_names_them(tmp_path, monkeypatch):
    """And the engine is the embedded one, given both apart, whatever is installed."""
    from jaxrl.rl import evaluation
    c = config(tmp_path / "run", lora__adapters__chain__eval=("a",), lora__adapters__skip__eval="b", train__steps=1,
               eval__sets=("a=jaxrl://arith/test.jsonl", "b=jaxrl://arith/test.jsonl"), eval__max_rows=2)
    common.check(c)
    decided = spec.resolve(c, spec.Platform("cpu", "fp32"))
    assert (decided.rollout.engine, decided.lora.publish) == ("jax", "adapter")
    seen, make = {}, evaluation.make_requests
    monkeypatch.setattr(evaluation, "make_requests", lambda *given: [seen.setdefault(r.key.stream, r.adapter) and r for r in make(*given)])
    out = jaxrl.train(c)
    assert seen == {"eval/a": 1, "eval/b": 2} and set(out["eval_after"]["sets"]) == {"a", "b"}
    with pytest.raises(ConfigError, match="lora.adapters with experts"):
        experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
        setup.check_inputs(config(tmp_path, model__config=tiny_job.MODEL | experts))
    assert jax.process_count() == 1
