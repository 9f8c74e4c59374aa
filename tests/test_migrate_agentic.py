"""jaxrl.migrate: ROLL's agentic pipeline, its rows, environments and stub."""

import json

import pytest
from helpers.tiny_job import get_config
from test_migrate import migrated, values

import jaxrl
from jaxrl.config.load import load_config
from jaxrl.migrate import __main__ as command
from jaxrl.resolve.checks.common import check

CONFIG = """
defaults:
  - ../config/envs@_here_
exp_name: lake
rollout_batch_size: 64
val_batch_size: 6
sequence_length: 900
adv_estimator: grpo
whiten_advantages: true
pretrain: a/model
steps_of_a_game: 3
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 4}
  device_mapping: list(range(0,8))
  strategy_args: {strategy_name: megatron_train}
actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: "list(range(0,8))"}
reward_normalization: {grouping: traj_group_id, method: mean_std}
train_env_manager:
  num_env_groups: 8
  group_size: 8
  tags: [Lake, Box]
  num_groups_partition: [6, 2]
  generating_args: {max_new_tokens: 128, temperature: 0.9, top_p: 1.0, top_k: -1}
val_env_manager:
  num_env_groups: 3
  group_size: 2
  tags: [Box]
  num_groups_partition: [3]
  generating_args: {max_new_tokens: 128, temperature: 0.0}
custom_envs:
  Lake: {env_type: frozen_lake, max_steps: "${steps_of_a_game}", max_tokens_per_step: 64, agent_system_template: Play.,
         agent_template: "Turn {turn_idx}: {observation}, {actions_left} left", env_config: {grid: {0: W, 1: .}, words: {".": empty}}}
  Box: {env_type: sokoban, max_steps: 5, max_tokens_per_step: 32, agent_system_template: Push., agent_template: "{observation}"}
  Unused: {env_type: webshop, max_steps: 50}
"""
GROUPED = {"sequence_length": 900, "train_env_manager.group_size": 8, "rollout_batch_size": 64, "reward_normalization.grouping": "traj_group_id"}


def written(tmp_path, text):
    (tmp_path / "lake.yaml").write_text(text)
    status = command.main(["roll", str(tmp_path / "lake.yaml"), f"--out={tmp_path / 'out'}"])
    return status, json.loads((tmp_path / "out" / "report.json").read_text()), tmp_path / "out"


def test_the_agentic_pipeline_is_rows_an_environment_and_a_stub(tmp_path, monkeypatch):
    status, report, out = written(tmp_path, CONFIG)
    monkeypatch.chdir(tmp_path)
    c = load_config(str(out / "lake.py"))
    assert status == 0 and report["outcome"] == "partial" and report["job"] == "agentic" and not report["lacks"]
    assert (c.data.prompts_per_step, c.rollout.group_size, c.algorithm.num_minibatches) == (8, 8, 1)
    assert (c.rollout.max_new_tokens, c.train.max_sequence_tokens, c.train.tokens_per_microbatch) == (64, 900, 1800)
    assert (c.env.max_turns, c.env.function, c.reward.functions) == (5, str(out / "lake_env.py:episode"), ())
    assert (c.eval.sets, c.eval.samples, c.eval.temperature) == ((f"val={out}/lake_eval.jsonl",), 1, 0.0)
    assert (c.algorithm.advantage_mean, c.algorithm.advantage_std, c.algorithm.whiten) == ("group", "group", True)
    tags = [json.loads(line)["tag"] for line in (out / "lake_rows.jsonl").read_text().splitlines()]
    assert (tags.count("Lake"), tags.count("Box")) == (6, 2) and (out / "lake_eval.jsonl").read_text().count("Box") == 2 * 3
    space: dict = {}
    exec((out / "lake_env.py").read_text(), space)
    lake = space["ENVS"]["Lake"]
    assert lake["config"] == {"grid": {0: "W", 1: "."}, "words": {".": "empty"}} and (lake["max_steps"], lake["max_tokens"]) == (3, 64)
    kinds = {k["key"]: k["kind"] for k in report["keys"]}
    assert kinds["steps_of_a_game"] == "automatic" and kinds["custom_envs.Unused.max_steps"] == "inert" and "unknown" not in kinds.values()
    c.run.mode, c.plan.target = "plan", "h100:8"
    check(c)


WORLD = '''
class Walk:
    """Three steps to the right win."""

    def __init__(self, goal):
        self.goal, self.at, self.said = goal, 0, []

    def reset(self, seed=None):
        return "start", {"env_instruction": "Walk."}

    def step(self, action):
        self.at += 1
        return f"at {self.at}", 0.25, self.at >= self.goal, False, {"use_tool": self.at == 2}


def make(env_type, config):
    return Walk(5)
'''


@pytest.mark.parametrize("managers", ["TrajEnvManager", "StepEnvManager"])
def test_the_stub_plays_an_environment_as_roll_does(tmp_path, managers):
    """Messages, turns and rewards of an environment with gem's methods, in the stub that was written."""
    import asyncio

    text = CONFIG.replace("agent_system_template: Play.,", f"agent_system_template: Play., env_manager_cls: roll.{managers},").replace(
        "Box: {", f"Box: {{env_manager_cls: roll.{managers}, ")
    if managers.startswith("Step"):
        text = text.replace("Turn {turn_idx}: {observation}, {actions_left} left", "{env_instruction} {current_step}: {current_observation}")
        assert written(tmp_path, text)[1]["outcome"] == "refused"  # grpo over steps, each scored by its own reward
        text = text.replace("adv_estimator: grpo", "adv_estimator: gigpo")
    _, report, out = written(tmp_path, text)
    space: dict = {}
    exec((out / "lake_env.py").read_text() + WORLD, space)
    chat, task = _Chat(), type("Task", (), {"row": {"tag": "Lake"}, "seed": 2**40 + 7, "prompt": ""})
    assert asyncio.run(space["episode"](task, chat)) is None and chat.rewards == [0.25] * 3 and chat.most == [64] * 3
    if managers.startswith("Traj"):
        assert chat.sent == [
            [("system", "Play."), ("user", "Walk.\nTurn 1: start, 3 left")], [("user", "Turn 2: at 1, 2 left")], [("tool", "at 2")]]
    else:
        assert chat.sent == [[("system", "Play."), ("user", "Walk. 1: start")], [], []] and chat.states == ["start", "at 1", "at 2"]
        assert chat.rewritten == [[("system", "Play."), ("user", f"Walk. {n}: at {n - 1}")] for n in (2, 3)]
        assert any("each step of an episode is a sample there" in e["why"] for e in report["lacks"])


def test_tools_are_in_the_stub_and_every_key_of_an_environment_is_said_once(tmp_path):
    """ROLL wraps an environment in the tools of tool_wrapper, and gives one that has a seed the group's."""
    import asyncio

    wrapper = "tool_wrapper: {wrapper_args: {max_tool_uses: 1}, tool_configs: [{tool_id: python_code, tool_args: {timeout: 5}}]}"
    text = CONFIG.replace("Box: {", f"Box: {{{wrapper}, env_config: {{seed: 42}}, use_thread_lock: true, own_key: 3, ")
    _, report, out = written(tmp_path, text)
    made = []
    space: dict = {}
    exec((out / "lake_env.py").read_text() + WORLD.replace("config):\n    return", "config, tools):\n    made.append((config, tools))\n    return"),
         space)
    space["made"] = made
    for tag in ("Box", "Lake"):
        asyncio.run(space["episode"](type("Task", (), {"row": {"tag": tag}, "seed": 7}), _Chat()))
    tools = {"wrapper_args": {"max_tool_uses": 1}, "tool_configs": [{"tool_id": "python_code", "tool_args": {"timeout": 5}}]}
    assert made == [({"seed": 7}, tools), ({"grid": {0: "W", 1: "."}, "words": {".": "empty"}}, None)]
    assert any("Box plays with tools (python_code)" in text for text in report["needs_you"])
    assert any(text.startswith("custom_envs.Box.own_key: lake_env.py has nothing of it") for text in report["needs_you"])
    rows = {k["key"].removeprefix("custom_envs."): (k["kind"], k["targets"]) for k in report["keys"]}
    assert rows["Box.tool_wrapper.tool_configs"] == rows["Lake.agent_template"] == ("equivalent", ["env.function"])
    assert rows["Box.use_thread_lock"] == ("automatic", []) and rows["Lake.max_tokens_per_step"][1] == ["rollout.max_new_tokens", "env.function"]


def test_steps_that_are_joined_show_the_suffix_of_an_observation(tmp_path):
    """ROLL's StepConcatEnvManager: the observation and info's suffix, which name the state, too."""
    import asyncio

    manager = "env_manager_cls: roll.StepConcatEnvManager, "
    text = CONFIG.replace("Lake: {", f"Lake: {{{manager}history_length: 4, ").replace("Box: {", f"Box: {{{manager}").replace(
        "Turn {turn_idx}: {observation}, {actions_left} left", "{history}{current_observation}").replace("estimator: grpo", "estimator: gigpo")
    _, report, out = written(tmp_path, text)
    space: dict = {}
    exec((out / "lake_env.py").read_text() + WORLD.replace('{"use_tool": self.at == 2}', '{"suffix": "go on"}'), space)
    chat = _Chat()
    asyncio.run(space["episode"](type("Task", (), {"row": {"tag": "Lake"}, "seed": 7}), chat))
    assert chat.states == ["start\n", "at 1\ngo on", "at 2\ngo on"] and chat.rewritten[0][1] == ("user", "at 1\ngo on")
    assert any("last history_length steps" in text for text in report["needs_you"])


def test_a_score_that_is_returned_token_by_token_stands_on_the_last_token(tmp_path):
    """ROLL puts an episode's whole score on its last token; rewards of turns would come off what remains from later turns on."""
    import asyncio

    text = CONFIG.replace("adv_estimator: grpo", "adv_estimator: grpo\nadd_token_level_kl: true\ninit_kl_coef: 0.1")
    _, report, out = written(tmp_path, text)
    assert load_config(str(out / "lake.py")).algorithm.advantage == "returns"
    space: dict = {}
    exec((out / "lake_env.py").read_text() + WORLD, space)
    chat, task = _Chat(), type("Task", (), {"row": {"tag": "Lake"}, "seed": 7, "prompt": ""})
    assert asyncio.run(space["episode"](task, chat)) == 0.75 and chat.rewards == []


def test_the_first_versions_have_a_kl_and_a_penalty_of_their_own():
    """0.1.0 and 0.1.1 subtract init_kl_coef times the KL from rewards, whatever add_token_level_kl says; 0.1.0 reads the turns of an
    environment's own options, and adds a penalty."""
    early = {**GROUPED, "adv_estimator": "grpo", "custom_envs.SimpleSokoban.env_config.max_steps": 6, "train_env_manager.format_penalty": -0.1}
    m = migrated("roll/agentic", early, "0.1.0")
    v = values(m)
    assert (v["algorithm.kl.coef"], v["algorithm.kl.placement"], v["algorithm.kl.estimator"], v["algorithm.advantage"]) == (
        0.2, "reward", "k1", "returns")
    assert v["env.max_turns"] == 6 and "'max_steps': 6" in m.files["job_env.py"] and any("format_penalty" in text for text in m.needs_you)
    later = migrated("roll/agentic", early, "0.1.3")
    assert values(later)["algorithm.kl.coef"] == 0.0 and not any("format_penalty" in text for text in later.needs_you)
    assert any("trains nothing" in text for text in later.needs_you)  # without actor_train


def test_a_sum_over_completions_is_divided_by_tokens_alone():
    """seq-mean-token-sum-norm: sums over sequence_length - 1; of a micro-batch before 0.2, of all completions of an update since."""
    sums = {**GROUPED, "adv_estimator": "grpo", "loss_agg_mode": "seq-mean-token-sum-norm", "actor_train.device_mapping": "list(range(0,8))",
            "actor_train.training_args.per_device_train_batch_size": 2, "actor_train.training_args.gradient_accumulation_steps": 2}
    for version, divisor in (("0.1.3", 899 / 2), ("0.3.0", 899 / 32)):
        assert values(migrated("roll/agentic", sums, version))["algorithm.aggregation_constant"] == divisor


@pytest.mark.parametrize("key", ["train_env_manager.token_budget", "val_env_manager.whiten_advantages", "actor_train.data_args.num_env_groups",
                                 "actor_infer.grouping", "checkpoint_config.num_env_groups", "actor_infer.strategy_args.group_size"])
def test_a_table_of_an_environment_manager_is_not_anybodys(key):
    m = migrated("roll/agentic", {**GROUPED, key: 3})
    assert [s.key for s, _ in m.unknown] == [key]


def test_pictures_of_an_environment_stand_between_its_texts(tmp_path):
    """ROLL's VLTrajEnvManager: an array between two templates; the config has room for a picture in every turn."""
    import asyncio

    manager = "Lake: {env_manager_cls: roll.VLTrajEnvManager, pre_step_template: 'Turn {turn_idx}: ', next_step_template: ', {actions_left} left',"
    text = CONFIG.replace("Lake: {", manager).replace("Box: {", "Box: {env_manager_cls: roll.VLTrajEnvManager, ").replace(
        "pretrain: a/model", "pretrain: Qwen/Qwen2.5-VL-3B-Instruct")
    status, report, out = written(tmp_path, text)
    c = load_config(str(out / "lake.py"))
    assert status == 0 and (c.env.image_tokens, c.data.image_max_pixels, c.rollout.engine) == (675, None, "vllm")  # sizes are the checkpoint's
    assert any(text.startswith("env.image_tokens=675") for text in report["needs_you"])
    c.run.mode, c.plan.target = "plan", "h100:8"
    check(c)
    space: dict = {}
    exec((out / "lake_env.py").read_text() + WORLD.replace('f"at {self.at}"', '{"image": self.at, "prompt": "!"}'), space)
    chat = _Chat()
    asyncio.run(space["episode"](type("Task", (), {"row": {"tag": "Lake"}, "seed": 3}), chat))
    assert [role for role, _ in chat.sent[0]] == ["system", "user"] and chat.sent[0][1][1] == [
        {"type": "text", "text": "Walk.Turn 1: "}, {"type": "text", "text": "start, 3 left"}]
    assert chat.sent[1] == [("user", [
        {"type": "text", "text": "Turn 2: "}, {"type": "image", "image": 1}, {"type": "text", "text": "!, 2 left"}])]


class _Chat:
    def __init__(self):
        self.sent, self.rewards, self.most, self.states, self.rewritten = [], [], [], [], []

    async def send(self, messages, max_tokens=0):
        self.sent.append([(m["role"], m["content"]) for m in messages])
        self.most.append(max_tokens)
        return type("Turn", (), {"text": "right"})

    def reward(self, x):
        self.rewards.append(x)

    def state(self, key):
        self.states.append(key)

    def rewrite(self, messages):
        self.rewritten.append([(m["role"], m["content"]) for m in messages])


def test_rewards_are_normalised_as_their_own_table_says():
    def norms(**changes):
        v = values(migrated("roll/agentic", {**GROUPED, "adv_estimator": "grpo", **{f"reward_normalization.{k}": x for k, x in changes.items()}}))
        return v["algorithm.advantage_mean"], v["algorithm.advantage_std"]

    assert norms() == ("none", "none")  # whatever the estimator is called
    assert norms(method="mean") == ("group", "none") and norms(method="asym_clip") == ("group", "group")
    assert norms(method="mean_std", grouping="batch") == norms(method="mean_std", grouping="tags") == ("batch", "batch")
    assert norms(method="mean_std", norm_std_type="batch") == ("group", "batch")
    one = {**GROUPED, "adv_estimator": "grpo", "reward_normalization.method": "mean", "train_env_manager.group_size": 1}
    assert migrated("roll/agentic", one).outcome(False) == "refused"


def test_gigpo_and_returns_of_steps():
    v = values(migrated("roll/agentic", {**GROUPED, "adv_estimator": "gigpo", "reward_normalization.method": "mean", "step_reward_gamma": 0.9}))
    assert (v["algorithm.advantage"], v["algorithm.turn_gamma"], v["algorithm.advantage_std"]) == ("gigpo", 0.9, "none")
    steps = {**GROUPED, "adv_estimator": "step_reinforce", "step_reward_gamma": 1.0}
    v = values(migrated("roll/agentic", steps))
    assert (v["algorithm.advantage"], v["algorithm.gamma"], v["algorithm.advantage_mean"]) == ("returns", 1.0, "none")
    assert migrated("roll/agentic", {**steps, "step_reward_gamma": 0.9}).outcome(False) == "refused"


@pytest.mark.full
def test_the_stub_trains_as_it_stands(tmp_path):
    _, _, out = written(tmp_path, CONFIG)
    config = get_config()
    config.data.path, config.data.prompt_column, config.data.answer_column = (str(out / "lake_rows.jsonl"),), "prompt", ""
    config.eval.sets = ()
    config.env.function, config.env.max_turns, config.reward.functions = str(out / "lake_env.py:episode"), 3, ()
    chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    (tmp_path / "chat.jinja").write_text(chat)
    config.model.chat_template, config.env.max_observation_tokens = str(tmp_path / "chat.jinja"), 32
    config.run.dir, config.train.steps = str(tmp_path / "run"), 2
    jaxrl.train(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/mean"] for line in lines if "reward/mean" in line] == [0.0, 0.0]
