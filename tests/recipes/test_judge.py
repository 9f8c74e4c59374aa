"""A reward model in rl (reward.model.*): what it reads, what becomes of its score, where it may stand, what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.algorithm_runs import decided, job, watched
from helpers.data_cases import TEMPLATE, make_config, make_tokenizer
from helpers.training_helpers import batch_of_groups, conversation

from jaxrl import models
from jaxrl.config.load import put
from jaxrl.data import load_tokenizer
from jaxrl.data.dataset import Example
from jaxrl.errors import ConfigError, RunStopped
from jaxrl.models.io import hf
from jaxrl.models.value import ValueModel
from jaxrl.resolve.checks import common
from jaxrl.rewards.items import RewardResult
from jaxrl.rl.trajectories import collect
from jaxrl.roles.reward_model import RewardModel, read_reward_model
from jaxrl.run import setup

pytestmark = pytest.mark.usefixtures("the_mesh_as_it_was")


def reward_model(folder, tokenizer, name="score", seed=1, **options):
    """A random sequence classifier with one label in a folder; returns its path and a function (tokens) -> score behind the last."""
    config = {**tiny_job.MODEL, "initializer_range": 0.2, **options}
    model = models.build(config, compute_dtype=jnp.float32, scan_layers=True)
    tree = ValueModel(model, name=name, bias=False)
    params = tree.init(jax.random.key(seed))
    params["value"]["kernel"] = jax.random.normal(jax.random.key(seed + 1), (model.config.hidden_size,))
    hf.export(tree, params, folder, {**config, hf.SOURCE: {}}, tokenizer=tokenizer, eos_ids=(tokenizer.eos_token_id,))

    @jax.jit
    def hidden(tokens):
        ones = jnp.ones_like(tokens)
        return model.forward(params, tokens, jnp.arange(tokens.shape[1])[None], ones, 0 * ones)[0]

    def score(tokens):
        padded = np.zeros((1, 192), np.int32)
        padded[0, :len(tokens)] = tokens
        return float(hidden(padded)[0, len(tokens) - 1] @ params["value"]["kernel"])

    return str(folder), score


@pytest.fixture(scope="module")
def policys(tmp_path_factory):
    """A reward model with the policy's tokenizer."""
    return reward_model(tmp_path_factory.mktemp("rm") / "own", load_tokenizer(tiny_job.get_config()))


RM = {"reward.model.dtype": "fp32"}


def judge_of(path, **changes):
    c = tiny_job.get_config()
    for name, value in {"reward.model.path": path, **RM, **changes}.items():
        put(c, name, value)
    common.check(c)
    opened = setup.open_job(c)
    return RewardModel(opened, read_reward_model(opened.config, opened.tokenizer))


def nothing(n):
    """What reward functions said: half a point for all."""
    return RewardResult(np.full(n, 0.5), {"half": np.full(n, 0.5)}, [{"half": "ok"}] * n, [{}] * n, {})


def results_of(judge, traj, examples=None, texts=None):
    n = traj.num_trajectories
    return judge.add_scores(traj, examples or [None] * n, texts or [""] * n, nothing(n))


# -- in a run


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_its_score_is_one_more_reward(policys, tmp_path, ahead):
    """Two steps, also with completions drawn a step ahead: each completion's part is the score behind its last token, the total is the
    weighted sum, both rewards are logged apart, in training and in evaluation."""
    path, score = policys
    c = job(tmp_path / "run", {"reward.model.path": path, "reward.model.weight": 0.25, "reward.weights": (2.0,), **RM,
                               "eval.sets": ("test=jaxrl://arith/test.jsonl",), "eval.max_rows": 4, "rollout.max_staleness": ahead})
    summary, steps, _ = watched(c)
    assert summary["steps"] == 2
    for step in steps:
        traj, result = step.batch.traj, step.batch.result
        own = np.array([score(traj.tokens[a:b]) for a, b in zip(traj.offsets, traj.offsets[1:], strict=False)])
        np.testing.assert_allclose(result.parts["reward_model"], own, atol=1e-4)
        np.testing.assert_allclose(step.batch.shaped, 2 * result.parts["digits"] + 0.25 * result.parts["reward_model"], atol=1e-12)
        assert own.std() > 0.1 and {o["reward_model"] for o in result.outcomes} == {"ok"}
        assert step.metrics["reward/reward_model"] == pytest.approx(own.mean(), abs=1e-4)
        assert step.metrics["reward/digits"] == pytest.approx(result.parts["digits"].mean())
    at_end = summary["eval_after"]["sets"]["test"]
    assert {"reward/reward_model", "reward/digits"} <= set(at_end)
    assert at_end["reward_mean"] == pytest.approx(2 * at_end["reward/digits"] + 0.25 * at_end["reward/reward_model"])
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step_00000001.jsonl").read_text().splitlines()]
    assert rows[0]["reward"]["parts"].keys() == {"digits", "reward_model"}


@pytest.mark.slow
def test_shaping_holds_for_it(policys, tmp_path):
    """zero_without_end, scale and clip act on the sum with its score; it may be the only reward."""
    path, _ = policys
    c = job(tmp_path, {"reward.model.path": path, "reward.model.weight": 3.0, "reward.functions": (), "reward.zero_without_end": True,
                       "reward.scale": 2.0, "reward.clip": 4.0, "train.steps": 1, "rollout.stop_token_ids": tuple(range(10, 30)), **RM})
    _, (step,), _ = watched(c)
    traj, part = step.batch.traj, step.batch.result.parts["reward_model"]
    cut = traj.finish == 1
    expected = np.clip(np.where(cut, 0, 6 * part), -4, 4)
    np.testing.assert_allclose(step.batch.shaped, expected)
    assert cut.any() and (np.abs(6 * part[~cut]) > 4).any()


# -- what it reads


def test_an_episode_is_scored_by_its_last_sequence(policys):
    judge, (_, score) = judge_of(policys[0]), policys
    for rewrite in (False, True):
        requests, results = conversation(rewrite)
        traj = collect(requests, results)
        last = [np.flatnonzero(traj.trajectory == i)[-1] for i in range(traj.num_trajectories)]
        own = [score(traj.tokens[traj.offsets[q]:traj.offsets[q + 1]]) for q in last]
        np.testing.assert_allclose(results_of(judge, traj).parts["reward_model"], own, atol=1e-4)


def example(prompt):
    return Example(np.zeros(1, np.int32), "", prompt, None, {}, "")


@pytest.mark.slow
def test_another_tokenizer_reads_text(tmp_path):
    """With another vocabulary the prompt and the completion are rendered anew: by its chat template, or as text with the token that
    ends its turns where the completion came to its end."""
    traj, _ = batch_of_groups(groups=2, size=2)
    traj.finish[:] = (0, 1, 0, 0)
    prompts, texts = ["1+1", "1+1", "two", "two"], ["is 2", "is", "", "is 3?"]
    rows = [example(p) for p in prompts]
    for render, template in (("chat", TEMPLATE), ("text", None), ("text", TEMPLATE)):
        tokenizer = load_tokenizer(make_config(make_tokenizer(tmp_path / f"{render}{bool(template)}", begin=True, template=template)))
        path, score = reward_model(tmp_path / "rm", tokenizer, vocab_size=264)
        auto = render == ("chat" if template else "text")
        judge = judge_of(path, **{"reward.model.render": "auto" if auto else render, "data.system_prompt": "s", "data.response_prefix": "It "})
        said = []
        for prompt, text, finish in zip(prompts, texts, traj.finish, strict=True):
            if render == "chat":
                said.append(f"<system>s<end><user>{prompt}<end><assistant>It {text}<end>")
            elif template:
                said.append(f"<system>s<end><user>{prompt}<end><assistant>It {text}" + "<end>" * int(finish == 0))
            else:
                said.append(f"<bos>s\n\n{prompt}It {text}" + "<eos>" * int(finish == 0))
        own = [score(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in said]
        np.testing.assert_allclose(results_of(judge, traj, rows, texts).parts["reward_model"], own, atol=1e-4)
    with pytest.raises(ConfigError, match="reward.model.render=tokens: its tokenizer is not the policy's; set text or chat"):
        judge_of(path, **{"reward.model.render": "tokens"})
    c = decided(tiny_job.get_config()).asked
    put(c, "reward.model.path", path)
    put(c, "env.function", "guess")
    with pytest.raises(ConfigError, match="episodes can only be scored by their sampled tokens"):
        read_reward_model(c, load_tokenizer(c))
    with pytest.raises(ConfigError, match="reward.model.render=chat: its tokenizer has no chat template; set text"):
        read_reward_model(put_all(tiny_job.get_config(), {"reward.model.path": policys_path(tmp_path), "reward.model.render": "chat"}),
                  load_tokenizer(tiny_job.get_config()))


@pytest.mark.full
def test_a_rotary_scaling_that_depends_on_the_length_is_refused(tmp_path):
    """Of a reward model as of a policy: beyond the original window its scores would be others than transformers'."""
    path = policys_path(tmp_path)
    written = json.loads((Path(path) / "config.json").read_text())
    written["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (Path(path) / "config.json").write_text(json.dumps({**written, "max_position_embeddings": 8}))
    with pytest.raises(ConfigError, match="reward.model.path=.*: rope_type=dynamic serves sequences up to its original window of 8 tokens"):
        read_reward_model(put_all(tiny_job.get_config(), {"reward.model.path": path}), load_tokenizer(tiny_job.get_config()))


def policys_path(folder):
    return reward_model(folder / "plain", load_tokenizer(tiny_job.get_config()))[0]


def put_all(c, changes):
    for name, value in changes.items():
        put(c, name, value)
    return c


@pytest.mark.full
def test_what_is_too_long_has_no_score(policys):
    """reward.model.max_sequence_tokens: absent, not 0, and counted as a failure, which ends the run where they are too many."""
    traj, _ = batch_of_groups(groups=6, size=4)
    longest = int(np.unique(traj.lengths)[-2])
    judge = judge_of(policys[0], **{"reward.model.max_sequence_tokens": longest})
    found = results_of(judge, traj)
    long = traj.lengths > longest
    assert 0 < long.mean() <= 0.2 and (np.isnan(found.parts["reward_model"]) == long).all()
    np.testing.assert_array_equal(found.total[long], 0.5)  # what functions said
    assert {o["reward_model"] for o, cut in zip(found.outcomes, long, strict=True) if cut} == {"error: too long"}
    assert found.metrics["reward/failed_fraction"] == pytest.approx(long.mean())
    with pytest.raises(RunStopped, match=f"have no score.*the longest sequence has {traj.lengths.max()} tokens, reward.model.max_sequence_tokens=9"):
        results_of(judge_of(policys[0], **{"reward.model.max_sequence_tokens": 9}), traj)


@pytest.mark.full
def test_head_weight_and_dtype(policys, tmp_path):
    traj, _ = batch_of_groups(groups=2, size=2)
    path, _ = policys
    tokenizer = load_tokenizer(tiny_job.get_config())
    plain = results_of(judge_of(path), traj)
    heavy = results_of(judge_of(path, **{"reward.model.weight": -2.0}), traj)
    np.testing.assert_allclose(heavy.total - 0.5, -2 * (plain.total - 0.5))
    half = judge_of(path, **{"reward.model.dtype": "bf16"})
    assert {x.dtype for x in jax.tree.leaves(half.state)} == {jnp.dtype(jnp.bfloat16)}
    rounded = results_of(half, traj).parts["reward_model"] - plain.parts["reward_model"]
    assert 1e-5 < np.abs(rounded).max() < 1
    named = reward_model(tmp_path / "named", tokenizer, name="value_head")[0]
    np.testing.assert_allclose(results_of(judge_of(named, **{"reward.model.head": "value_head"}), traj).total, plain.total, atol=1e-4)
    with pytest.raises(ConfigError, match="there is no score.weight, the head that scores"):
        judge_of(named)


@pytest.mark.full
def test_its_revision(tmp_path, monkeypatch):
    """A hub cache with two revisions, read without a network."""
    import huggingface_hub.constants

    traj, tokenizer = batch_of_groups(groups=1, size=2)[0], load_tokenizer(tiny_job.get_config())
    repo, own = tmp_path / "models--somebody--rm", {}
    for seed, (name, commit) in enumerate((("main", "a" * 40), ("v2", "b" * 40))):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(commit)
        (repo / "snapshots").mkdir(exist_ok=True)
        own[name] = reward_model(repo / "snapshots" / commit, tokenizer, seed=seed)[1](traj.tokens[:traj.offsets[1]])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "v2"):
        found = results_of(judge_of("somebody/rm", **{"reward.model.revision": revision}), traj)
        assert found.parts["reward_model"][0] == pytest.approx(own[revision or "main"], abs=1e-4)


# -- devices of its own


PLACES = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import test_judge
from helpers.training_helpers import batch_of_groups
traj = batch_of_groups(groups=3, size=4)[0]
for roles in ({}, {"policy": {"devices": "0-1"}, "reward_model": {"devices": "2-3", "fsdp": 2, "rest": "host"}}):
    judge = test_judge.judge_of(sys.argv[1], **{"mesh.roles": roles})
    resting = sorted({x.sharding.memory_kind for x in jax.tree.leaves(judge.state)})
    found = test_judge.results_of(judge, traj).parts["reward_model"]
    with judge.on():
        held = jax.tree.leaves(judge.params())
    print(json.dumps([sorted({d.id for x in held for d in x.sharding.device_set}), resting, found.tolist()]))
"""


@pytest.mark.slow
def test_it_may_have_devices_of_its_own_and_rest_in_the_host(policys):
    """mesh.roles.reward_model: where its parameters lie, and the same scores."""
    here = Path(__file__).resolve().parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])}
    done = subprocess.run([sys.executable, "-c", PLACES, policys[0]], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    shared, apart = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert shared[0] == [0, 1, 2, 3] and shared[1] == ["device"]
    assert apart[0] == [2, 3] and apart[1] == ["pinned_host"]
    np.testing.assert_allclose(apart[2], shared[2], atol=1e-4)


# -- what is refused


PATH = {"reward.model.path": "some/rm"}


@pytest.mark.parametrize("changes, said", [
    (PATH | {"algorithm.dynamic_sampling": "mask"}, "reward model scores a batch; name a function of reward.functions in algorithm.keep_group"),
    (PATH | {"algorithm.preset": "dapo", "algorithm.keep_group": "reward_model"}, "name a function of reward.functions in algorithm.keep_group"),
    (PATH | {"algorithm.preset": "remax"}, "greedy answers are scored by functions alone"),
    (PATH | {"run.mode": "plan", "plan.target": "cpu:1"}, "the plan does not count a reward model"),
    (PATH | {"run.recipe": "sft"}, "reward.model.path='some/rm' has no effect with run.recipe=sft"),
    (PATH | {"reward.functions": ("./x.py:reward_model",)}, "reward_model is the name of reward.model's score"),
    (PATH | {"reward.model.head": "score.weight!"}, "reward.model.head='score.weight!': a module's name"),
    (PATH | {"reward.model.max_sequence_tokens": -1}, "reward.model.max_sequence_tokens=-1: must not be negative"),
    ({"reward.model.weight": 2.0}, "reward.model.weight=2.0 has no effect without reward.model.path"),
    ({"reward.model.dtype": "fp32"}, "reward.model.dtype='fp32' has no effect without reward.model.path"),
    ({"mesh.roles": {"reward_model": {"rest": "host"}}}, "mesh.roles.reward_model: there is no reward model; set reward.model.path"),
    ({"algorithm.preset": "ppo", "critic.head": "v_head"}, "critic.head='v_head' has no effect without critic.path"),
])
def test_what_cannot_work_is_refused(changes, said):
    with pytest.raises(ConfigError) as e:
        common.check(put_all(tiny_job.get_config(), changes))
    assert said in str(e.value)


def test_a_group_filter_by_a_function_and_an_accuracy_by_it_are_allowed():
    common.check(put_all(tiny_job.get_config(), PATH | {"algorithm.dynamic_sampling": "mask", "algorithm.keep_group": "digits"}))
    common.check(put_all(tiny_job.get_config(), PATH | {"reward.functions": (), "eval.accuracy_from": "reward_model"}))


@pytest.mark.full
def test_a_language_model_is_no_reward_model(tmp_path):
    c = tiny_job.get_config()
    model = models.build(dict(c.model.config), compute_dtype=jnp.float32, scan_layers=True)
    hf.export(model, model.init(jax.random.key(0)), tmp_path, {**tiny_job.MODEL, hf.SOURCE: {}}, tokenizer=load_tokenizer(c))
    with pytest.raises(ConfigError, match="there is no score.weight, the head that scores; name it if it is called otherwise, or train"):
        judge_of(str(tmp_path))
