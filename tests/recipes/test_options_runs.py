"""Options that only a run from end to end can show: three short runs of a tiny random model, looked at from outside.

`first`: an SFT warm start of four updates, then two RL steps with most options away from their defaults. `evaluated`:
the same directory under run.mode=eval. `third`: resumed for one more step with every output switched off.
"""

import gzip
import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxrl
from jaxrl.config.load import default_config, get, load_config, put
from jaxrl.errors import ConfigError
from jaxrl.models.io.tensorfile import list_folder
from jaxrl.recipes import sft
from jaxrl.rollout.embedded import EmbeddedEngine
from jaxrl.telemetry.names import HISTOGRAMS

pytestmark = pytest.mark.full
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
WARM_START = f"""
    from jaxrl.config.load import default_config
    def get_config(arg=None):
        c = default_config()
        c.run.recipe, c.model.init, c.model.tokenizer = "sft", "random", "jaxrl://arith/tokenizer"
        c.model.config.update({MODEL})
        c.data.path, c.data.max_rows, c.data.prompts_per_step = ("jaxrl://arith/sft.jsonl",), 32, 4
        c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.data.overlong_prompt = 120, 136, "filter"
        c.train.steps, c.train.tokens_per_microbatch = 4, 256
        c.log.every_steps, c.log.tensorboard, c.log.report, c.log.print_samples = 2, False, False, 0
        c.optimizer.lr, c.optimizer.warmup_steps = 1e-2, 0
        c.train.loss_on_prompt = True
        return c
"""
REWARDS = """
    def variety(prompt, completion, **columns):
        return len(set(completion)) / 10
    def length(prompt, completion, **columns):
        return float(len(completion))
    class Sink:
        def __init__(self, run_dir, config):
            self.file = open(run_dir / "sink.txt", "a")
        def write(self, step, scalars):
            self.file.write(f"{step}\\n")
        def close(self):
            self.file.close()
"""


SAMPLING = {
    "rollout": {"temperature": 0.9, "top_p": 0.98, "top_k": 150, "min_p": 1e-5, "repetition_penalty": 1.05, "frequency_penalty": 0.02,
                "penalties_in_training": True, "min_new_tokens": 2, "stop": ("no such words",), "keep_stop": False,
                "stop_token_ids": (190,)},
    "eval": {"temperature": 1.0, "top_p": 0.97, "top_k": 140, "min_p": 1e-6, "repetition_penalty": 1.1, "frequency_penalty": 0.01,
             "stop": ("nor such ones",)},
}


def rl(folder, **options):
    """Config of the RL job in `folder`; options are 'group__name=value'."""
    c = default_config()
    mine = f"{folder}/mine.py"
    base = {
        "run.dir": f"{folder}/run",
        "run.warm_start": f"{folder}/sft.py",
        "run.compile_cache": f"{folder}/compiled",
        "data.path": ("jaxrl://arith/train.jsonl",),
        "data.max_rows": 40,
        "data.prompts_per_step": 4,
        "data.max_prompt_tokens": 120,
        "data.response_prefix": "So",
        "train.steps": 2,
        "train.tokens_per_microbatch": 128,
        "rollout.group_size": 3,
        "rollout.max_new_tokens": 8,
        "rollout.prompt_lengths": (120,),
        "rollout.compaction": False,
        **{f"{group}.{name}": value for group, options in SAMPLING.items() for name, value in options.items()},
        "rollout.slots": 12,
        "reward.functions": (f"{mine}:variety", f"{mine}:length"),
        "reward.weights": (1.0, 0.25),
        "reward.scale": 2.0,
        "reward.pass_mark": 0.5,
        "reward.workers": 1,
        "algorithm.advantage_std": "none",
        "algorithm.ppo_epochs": 2,
        "algorithm.num_minibatches": 2,
        "algorithm.kl.coef": 0.05,
        "algorithm.kl.estimator": "k3",
        "reference.dtype": "fp32",
        "optimizer.lr": 1e-2,
        "optimizer.warmup_steps": 0,
        "eval.sets": ("one=jaxrl://arith/test.jsonl", "two=jaxrl://arith/test.jsonl"),
        "eval.max_rows": 2,
        "eval.samples": 3,
        "eval.max_new_tokens": 5,
        "eval.every_steps": 1,
        "eval.rewards": (f"{mine}:variety",),
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 1,
        "checkpoint.export_every_steps": 1,
        "checkpoint.export_dtype": "bf16",
        "checkpoint.shard_gb": 1e-5,
        "log.console": "off",
        "log.sinks": (f"{mine}:Sink",),
    }
    for name, value in (base | {k.replace("__", "."): v for k, v in options.items()}).items():
        put(c, name, value)
    return c


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def listing(run):
    return {str(p.relative_to(run)) for p in run.rglob("*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    (out / "sft.py").write_text(textwrap.dedent(WARM_START))
    (out / "mine.py").write_text(textwrap.dedent(REWARDS))
    before, mesh = jax.config.jax_compilation_cache_dir, jax.sharding.get_mesh()
    compilation_cache.reset_cache()
    yield out
    jax.set_mesh(mesh)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def first(folder):
    """What the first run left behind, read before others write into its directory; and the requests that its engine got."""
    asked, submit = [], EmbeddedEngine.submit

    def look(engine, requests):
        asked.extend(requests)
        return submit(engine, requests)

    shown, demonstrations = [], sft.demonstrations
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedEngine, "submit", look)
        patch.setattr(sft, "demonstrations", lambda *args: shown.append(demonstrations(*args)) or shown[-1])
        summary = jaxrl.train(rl(folder))
    run = folder / "run"
    return SimpleNamespace(
        summary=summary,
        asked=asked,
        shown=shown,
        run=run,
        files=listing(run),
        metrics=lines(run / "metrics.jsonl"),
        rollouts=[lines(run / "rollouts" / f"step_0000000{k}.jsonl") for k in (1, 2)],
        evals={(k, s): lines(run / "eval" / f"step_0000000{k}_{s}.jsonl") for k in (0, 1, 2) for s in ("one", "two")},
        host=json.loads((run / "summary.json").read_text()),
    )


@pytest.fixture(scope="module")
def evaluated(folder, first):
    """run.mode=eval, of the checkpoint and of the bare model."""
    before = (folder / "run" / "metrics.jsonl").read_text()
    c = rl(
        folder,
        run__mode="eval",
        eval__sets=("one=jaxrl://arith/test.jsonl",),
        eval__accuracy_from="length",
        eval__rewards=(f"{folder}/mine.py:variety", f"{folder}/mine.py:length"),
        reward__pass_mark=3.0,
    )
    return SimpleNamespace(summary=jaxrl.train(c), before=before, after=(folder / "run" / "metrics.jsonl").read_text())


@pytest.fixture(scope="module")
def third(folder, first, evaluated):
    """One more step of the first run, with all outputs off."""
    before = listing(folder / "run")
    c = rl(
        folder,
        run__resume="must",
        train__steps=9,
        train__max_samples=36,
        eval__before=False,
        eval__after=False,
        eval__every_steps=0,
        checkpoint__at_end=False,
        checkpoint__every_steps=0,
        checkpoint__export_every_steps=0,
        checkpoint__export_at_end=False,
        log__rollouts=False,
        log__sinks=(),
        algorithm__advantage_mean="none",
        checkpoint__every_minutes=0.0,
        log__tensorboard=False,
        profile__steps=(3, 3),
        profile__memory=(3,),
        profile__python=True,
    )
    run, written = folder / "run", lambda: (folder / "run" / "export" / "config.json").stat().st_mtime_ns
    exported = written()
    summary = jaxrl.train(c)
    return SimpleNamespace(summary=summary, new=listing(run) - before, exported=written() != exported, metrics=lines(run / "metrics.jsonl"))


@pytest.mark.slow
def test_recipe_and_warm_start(first):
    """The SFT job ran first, into its own folder, and its export is the policy at the start."""
    sft = lines(first.run / "warm_start" / "metrics.jsonl")
    assert [line["step"] for line in sft] == [2, 4]  # log.every_steps=2 of train.steps=4
    assert [line["data/samples"] for line in sft] == [8, 16] and all(0 < line["rollout/tokens"] <= 4 * 136 for line in sft)
    assert sft[-1]["loss"] < sft[0]["loss"] and "policy/ratio_mean" not in sft[0]
    assert all("policy/ratio_mean" in line for line in first.metrics[1:])
    scored = [t.loss_mask.sum() for t in first.shown]  # all but the first token of each: train.loss_on_prompt
    assert scored == [len(t.tokens) - t.num_sequences for t in first.shown] and len(scored) == 4
    config = json.loads((first.run / "config.json").read_text())["config"]
    assert config["model"]["path"] == str(first.run / "warm_start" / "export")


@pytest.mark.slow
def test_dir_steps_and_compile_cache(first, folder):
    assert first.summary["steps"] == 2 and first.summary["run_dir"] == str(first.run)
    assert [line["step"] for line in first.metrics] == [0, 1, 2]
    assert any((folder / "compiled").iterdir())


def test_prompts_per_step_and_group_size(first):
    for step in first.rollouts:
        groups = [r["group"] for r in step]
        assert len(step) == 12 and sorted(groups.count(g) for g in set(groups)) == [3, 3, 3, 3]
        assert all(len(r["tokens"]) <= 8 for r in step) and all(r["prompt"].endswith("So") for r in step)
    assert max(len(r["tokens"]) for r in first.rollouts[0]) == 8  # rollout.max_new_tokens
    assert first.summary["samples"] == 24


def test_training_and_evaluation_sample_each_as_its_own_options_say(first):
    """What reaches the engine of a run; no value is the other group's, nor a default."""
    for name, value in SAMPLING["eval"].items():
        assert len({value, SAMPLING["rollout"][name], get(default_config(), f"rollout.{name}")}) == 3 or name == "temperature"
    for stream, group in (("train/", "rollout"), ("eval/", "eval")):
        found = {r.sampling for r in first.asked if r.id.startswith(stream)}
        want = {name: value for name, value in SAMPLING[group].items() if name != "penalties_in_training"}
        shared = {name: SAMPLING["rollout"][name] for name in ("stop", "keep_stop", "stop_token_ids") if name not in want}
        (one,) = found
        assert {name: getattr(one, name) for name in want} == want and {name: getattr(one, name) for name in shared} == shared
    assert {r.sampling.max_new_tokens for r in first.asked} == {8, 5}
    assert {r.sampling.min_new_tokens for r in first.asked if r.id.startswith("eval/")} == {0}


def test_rewards_weights_scale_and_advantages(first):
    """score = variety + length / 4, doubled by reward.scale before the advantages, which are not divided."""
    for step in first.rollouts:
        for r in step:
            whole = "So" + r["completion"]
            assert r["score"] == pytest.approx(len(set(whole)) / 10 + 0.25 * len(whole))
        for group in {r["group"] for r in step}:
            scores = np.array([r["score"] for r in step if r["group"] == group])
            advantages = [r["advantage"] for r in step if r["group"] == group]
            np.testing.assert_allclose(advantages, 2 * (scores - scores.mean()), atol=1e-12)


def test_epochs_minibatches_and_reference(first, folder):
    """2 passes x 2 minibatches x 2 steps = 8 updates; there is a KL to the reference once the policy has moved."""
    from jaxrl.checkpoint.checkpointer import Checkpointer
    from jaxrl.processes.faults import Faults

    restored = Checkpointer(first.run, rl(folder), Faults(())).restore(
        {"step": jax.ShapeDtypeStruct((), np.int32)}, "must", partial=True
    )
    assert int(restored.arrays["step"]) == 8
    assert min(first.metrics[i]["policy/kl"] for i in (1, 2)) > 1e-3 and first.metrics[2]["old_gap/max"] > 1e-3


def test_every_step_samples_from_the_weights_of_the_step_before(first):
    assert [{r["version"] for r in step} for step in first.rollouts] == [{0}, {1}]
    assert [{r["version"] for r in first.evals[k, "one"]} for k in (0, 1, 2)] == [{0}, {1}, {2}]


def test_eval_triggers_samples_rows_and_tokens(first):
    """Before, after each step, after the last; three samples of two rows of both sets, at most five tokens."""
    assert [line["step"] for line in first.metrics if "eval/accuracy" in line] == [0, 1, 2]
    for rows in first.evals.values():
        assert len(rows) == 2 * 3 and all(len(r["tokens"]) <= 5 for r in rows)
        assert max(len(r["tokens"]) for r in rows) == 5
    assert len({tuple(r["tokens"]) for r in first.evals[0, "one"]}) > 2  # eval.temperature=1
    assert {"accuracy", "mean@3", "pass@2", "pass@3"} <= set(first.host["eval_before"]["sets"]["two"])
    assert set(first.host["eval_after"]["sets"]) == {"one", "two"}


def test_accuracy_is_the_share_that_reaches_the_pass_mark(first, evaluated, folder):
    """Of eval.rewards' first function, or of eval.accuracy_from; unweighted and unscaled."""
    rows = first.evals[2, "one"]
    hits = [len(set("So" + r["completion"])) / 10 >= 0.5 for r in rows]
    assert [r["accurate"] for r in rows] == hits
    assert first.host["eval_after"]["sets"]["one"]["accuracy"] == pytest.approx(np.mean(hits))
    assert all("length" not in str(r.get("reward", "")) for r in rows)  # eval.rewards, not reward.functions
    rows = lines(folder / "run" / "eval" / "step_00000002_one_2.jsonl")  # the run wrote the first
    hits = [len("So" + r["completion"]) >= 3 for r in rows]
    assert [r["accurate"] for r in rows] == hits
    assert evaluated.summary["eval"]["accuracy"] == pytest.approx(np.mean(hits))


def test_an_evaluation_tells_the_scores_of_each_reward(evaluated, folder):
    """Of both of eval.rewards: each row by name, and their means beside the accuracy."""
    rows = lines(folder / "run" / "eval" / "step_00000002_one_2.jsonl")  # the run wrote the first
    scores = {name: [r["reward"]["parts"][name] for r in rows] for name in ("variety", "length")}
    assert scores["length"] == [len("So" + r["completion"]) for r in rows]
    means = evaluated.summary["eval"]["sets"]["one"]
    for name, own in scores.items():
        assert means[f"reward/{name}"] == pytest.approx(np.mean(own))
    assert means["reward/error_fraction"] == 0.0 and "accuracy" in means


def test_mode_eval_trains_nothing(first, evaluated):
    assert evaluated.before == evaluated.after
    assert "checkpoints" in evaluated.summary["evaluated"] and "steps" not in evaluated.summary


def test_checkpoints_and_exports(first):
    """Every step, of which one is kept; an export after each step and at the end, in bf16 and small shards."""
    assert {f.split("/")[1] for f in first.files if f.startswith("checkpoints/0")} == {"00000002"}
    assert {"export", "export_00000001", "export_00000002"} <= first.files
    tensors = list_folder(first.run / "export")
    assert {t.dtype for t in tensors.values()} == {"BF16"}
    assert len([f for f in first.files if f.startswith("export/") and f.endswith(".safetensors")]) > 1


def test_outputs(first):
    """The user's sink, TensorBoard and the rollouts, a line or file per step; the page of the whole."""
    assert (first.run / "sink.txt").read_text().split() == ["0", "1", "2"]
    assert any(f.startswith("tensorboard/") for f in first.files)
    assert not any(f.startswith("warm_start/tensorboard") for f in first.files)  # log.tensorboard=False there
    assert {"rollouts/step_00000001.jsonl", "rollouts/step_00000002.jsonl", "report.html"} <= first.files
    assert "warm_start/report.html" not in first.files  # log.report=False there


def test_tensorboard_has_histograms_of_what_the_host_holds(first):
    shown = EventAccumulator(str(first.run / "tensorboard"), {"histograms": 0})
    shown.Reload()
    tokens = [sum(len(r["tokens"]) for r in step) for step in first.rollouts]
    expected = {"length": [12, 12], "reward": [12, 12], "advantage": [12, 12], "log_ratio": tokens}  # no staleness: none is ahead
    assert {name.removeprefix("histogram/"): [e.histogram_value.num for e in shown.Histograms(name)]
            for name in shown.Tags()["histograms"]} == expected and set(expected) < set(HISTOGRAMS)
    assert [e.histogram_value.sum for e in shown.Histograms("histogram/length")] == tokens


@pytest.mark.slow
def test_a_trace_names_the_step_the_parts_of_the_model_and_pythons_calls(third, folder):
    profile = folder / "run" / "profile"
    trace, = profile.rglob("*.trace.json.gz")
    events = json.loads(gzip.open(trace).read())["traceEvents"]
    assert [e["args"]["step_num"] for e in events if e.get("name") == "step"] == ["3"]
    assert any(re.fullmatch(r"\$step.py:\d+ one_step", e.get("name", "")) for e in events)  # profile.python
    operations, = profile.rglob("*.xplane.pb")  # its operations' names are plain in it
    for part in (b"jvp(head)", b"jvp(loss)", b"jit(apply)/optimizer/", b"/layer_0/attention/", b"/layer_0/mlp/"):
        assert part in operations.read_bytes(), part


@pytest.mark.slow
def test_what_is_switched_off_is_not_there(third):
    """Resumed at step 2; max_samples ends it after one of seven more steps; nothing is evaluated, saved or exported.

    Only the trace and the memory profile that profile.* ask for are new.
    """
    assert third.summary["steps"] == 3 and third.summary["samples"] == 36
    assert [line["step"] for line in third.metrics] == [0, 1, 2, 3] and "eval/accuracy" not in third.metrics[3]
    assert {n.split("/")[0] for n in third.new} == {"profile"}
    assert any(n.endswith(".xplane.pb") for n in third.new) and not third.exported
    assert {n for n in third.new if n.endswith(".prof")} == {"profile/memory_00000003_0.prof"}


def test_answers_that_take_too_long_end_the_run(folder, first):
    with pytest.raises(TimeoutError, match="rollout.timeout_seconds"):
        jaxrl.train(rl(folder, run__mode="eval", rollout__timeout_seconds=1e-9))


def test_a_warm_start_must_be_an_sft_job(folder, tmp_path):
    text = "from jaxrl.config.load import default_config\ndef get_config(arg):\n    return default_config()\n"
    (tmp_path / "rl.py").write_text(text)
    assert load_config(str(tmp_path / "rl.py")).run.recipe == "rl"
    with pytest.raises(ConfigError, match="run.warm_start=.*must be an SFT config"):
        jaxrl.train(rl(folder, run__warm_start=str(tmp_path / "rl.py"), run__dir=str(tmp_path / "run")))
