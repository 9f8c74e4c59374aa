"""ROLL's agentic pipeline: environments of several turns, as jobs of episodes. See systems/roll.py.

Read from its code at the tags v0.1.0 to v0.3.0. A batch is counted in trajectories; rewards are normalised by
`reward_normalization` alone, whatever the estimator.
"""

from __future__ import annotations

from dataclasses import replace

from jaxrl.migrate.systems import roll_agentic_meaning as meaning
from jaxrl.migrate.systems.roll import SHORT, TABLE
from jaxrl.migrate.systems.roll_layout import DATA, INFER, SAMPLE, TRAIN
from jaxrl.migrate.table import Joint, Key, Since

K = Key
ENV, EVAL, NORM = meaning.ENV, meaning.VAL, "reward_normalization."
GROUP = {ENV + "group_size": 8}
GROUPED = {**GROUP, NORM + "grouping": "traj_group_id"}
HEAT = {ENV + SAMPLE + "temperature": 0.9}
SAMPLED = (("temperature", 0.95, 1.0), ("top_p", 0.7, 1.0), ("top_k", 50, 100), ("repetition_penalty", 1.0, 1.1),
           ("do_sample", True, None), ("num_beams", 1, None))
GONE = ("lengths", "batch", "data", "advantage", "masks", "sampling", "evaluation", "reward", "images", "loss")
PASSED = ("rewards.*.response_filter_config.**", "rewards.*.response_length_penalty_coef", "rewards.*.format_pattern",
          "rewards.*.**", "reward_model.**", "dataset_filter.*", INFER + SAMPLE + "include_stop_str_in_output")
NEVER = ("max_len_mask", "difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold", "importance_sampling",
         "norm_mean_type", "norm_std_type", "reward_norm", "reward_shift", "reward_scale", "num_return_sequences_in_group",
         "error_max_len_clip", "difficulty_loss_weight", "length_loss_weight", "postive_loss_coef", "use_topr_neg_loss_coef")
VARIABLES = ("max_tokens_per_step", "max_actions_per_traj", "env_manager_cls", "agent_runner_cls", "*_template", "*_pattern", "*_penalty",
             "custom_env.**", "gem_*.**", "env_config.**", "custom_env",
             "default_history_length", "model_name", "world_size")


def left(name: str) -> bool:
    """Returns whether a rule of the RLVR pipeline is left out of the agentic one. name: a joint rule's title, or a
    row's name."""
    return name in (*GONE, *PASSED, *NEVER)


def sampled(role: str, tried: bool, beside: dict) -> tuple[Key, ...]:
    """Returns rows of a role's generating_args (temperature, top_p ...). tried: whether the tests try another value of
    each. beside: the settings under which it matters."""
    return tuple(K(role + SAMPLE + n, "equivalent", default=d, other=o if tried else None, beside=beside) for n, d, o in SAMPLED)


RULES = (
    Joint("lengths", (
        K("prompt_length", "equivalent", default=1024, other=700),
        K("response_length", "equivalent"),
        K("sequence_length", "equivalent", other=3000),
        K("val_prompt_length", "equivalent"), K("val_sequence_length", "equivalent"),
        K(ENV + "tags", "equivalent", default=["SimpleSokoban"]),
        K(ENV + SAMPLE + "max_new_tokens", "equivalent", default=8192, other=200),
        K(INFER + SAMPLE + "max_new_tokens", "equivalent", default=8192, other=300),
        K(EVAL + SAMPLE + "max_new_tokens", "equivalent", default=8192)), meaning.lengths),
    Joint("batch", (
        K("rollout_batch_size", "equivalent", default=128, other=64),
        K(ENV + "group_size", "equivalent", default=1, other=8),
        K("ppo_epochs", "equivalent", default=1, other=2),
        *(k for r in TABLE.rules if isinstance(r, Joint) and r.title == "batch" for k in r.keys if k.name.startswith("actor_train"))),
        meaning.batch),
    Joint("advantage", (
        *(replace(k, beside={**GROUP, **k.beside}) for r in TABLE.rules if isinstance(r, Joint) and r.title == "advantage" for k in r.keys
          if k.name not in ("norm_mean_type", "norm_std_type", "reward_norm", "reward_shift", "reward_scale")),
        K(NORM + "grouping", "equivalent", default=Since(("0.1.0", "state"), ("0.2.0", "batch")), other="traj_group_id",
          beside={**GROUP, NORM + "method": "mean", "adv_estimator": "grpo"}),
        K(NORM + "method", "equivalent", default="identity", other="mean_std", beside={**GROUPED, "adv_estimator": "grpo"}),
        K(NORM + "norm_mean_type", "equivalent", other="batch", beside={**GROUPED, "adv_estimator": "grpo"}),
        K(NORM + "norm_std_type", "equivalent", other="batch", beside={**GROUPED, "adv_estimator": "grpo"}),
        K("episode_reward_weight", "equivalent", default=1.0),
        K("step_reward_weight", "equivalent", default=1.0, other=0.5, beside={
            **GROUPED, "adv_estimator": "gigpo", NORM + "method": "mean"}),
        K("step_reward_gamma", "equivalent", default=0.95, other=0.9, beside={
            **GROUPED, "adv_estimator": "gigpo", NORM + "method": "mean"})), meaning.advantage),
    K(NORM + "global_*", "unsupported", why="rewards are not scaled or shifted after their norm: do it in the environment"),
    Joint("loss", tuple(
        K("ratio_type", "equivalent", default="token") if k.name == "importance_sampling" else k
        for r in TABLE.rules if isinstance(r, Joint) and r.title == "loss" for k in r.keys), meaning.loss),
    Joint("sampling", (*sampled(ENV, True, {}), *sampled(INFER, True, {}), K(INFER + SAMPLE + "stop_strings", "equivalent", other=["</a>"]),
                       K(ENV + SAMPLE + "stop_strings", "equivalent", other=["</a>"])), meaning.sampling),
    *(K(role + SAMPLE + "include_stop_str_in_output", to="rollout.keep_stop" if role == INFER else "", kind="exact" if role == INFER else "inert",
        why="" if role == INFER else "the engine's own table says it", other=False if role == INFER else None) for role in (INFER, ENV, EVAL)),
    Joint("evaluation", (
        K("eval_steps", "equivalent", default=10, other=5),
        K("val_batch_size", "equivalent", default=128, other=64),
        K(EVAL + "group_size", "equivalent", default=1, other=4),
        K(EVAL + "num_env_groups", "equivalent", default=128),
        K(EVAL + "tags", "equivalent", default=["SimpleSokoban"]),
        K(EVAL + "num_groups_partition", "equivalent", default=[128]),
        *sampled(EVAL, True, {})), meaning.evaluation),
    Joint("environments", (
        K("custom_envs.**", "equivalent"),
        K(ENV + "num_env_groups", "equivalent", default=128),
        K(ENV + "num_groups_partition", "equivalent", default=[128])), meaning.environments),
    K("custom_envs", "inert", why="empty"),
    K(TRAIN + "model_args.max_pixels", "inert", why="read in distillation alone: here the checkpoint says the sizes of images",
      also=(TRAIN + "model_args.min_pixels",)),
    K(ENV + "group_size_redundancy", "unsupported", fine=(0,), why="no episode is played to be left out", also=(EVAL + "group_size_redundancy",)),
    K(ENV + "group_filter_cls", "unsupported", fine=("roll.pipeline.agentic.agentic_pipeline.GroupFilter",),
      why="write it as a function of a group: algorithm.keep_group", also=(EVAL + "group_filter_cls",)),
    K(ENV + "format_penalty", "inert", why="nothing reads it: env_config.format_penalty is the environment's", also=(EVAL + "format_penalty",)),
    K(ENV + "llm_proxy.proxy_type", "unsupported", fine=("policy",), refuse=True, why="episodes are played by the policy",
      also=(EVAL + "llm_proxy.proxy_type",)),
    K("reward.**", "ask", fine=(False, [], "[]"), why="a judge of ours is reward.judge, with GPUs of its own in reward.judge.devices"),
    K("use_token_reward", "unsupported", fine=(False,), refuse=True, why="rewards of tokens: those of turns are chat.reward"),
    K("exp_mode", "unsupported", fine=("train",), refuse=True, why="validation alone: run.mode=eval"),
    *(K(n, "inert", why="the agentic pipeline does not read it") for n in NEVER),
    K("dirty_data_mask", "unsupported", fine=(False,), why="what an environment's fault spoils is tried again, then left out",
      also=("open_feedback_turn",)),
    *(K(TRAIN + DATA + n, "inert", why="environments make the rows") for n in (
        "file_name", "prompt", "messages", "domain_interleave_probs.*", "image_max_pixels", "image_min_pixels", "image_folder")),
    K("global_template", "automatic", why="the tokenizer's own chat template", also=(TRAIN + DATA + "template",)),
    K("batch_adjust_mode", "automatic", why="a batch need not divide by the devices"),
    K("skip_mock_system_prompt", "automatic", why="messages are rendered by the chat template, new ones after recorded tokens", also=(
        "parse_tool_call_parameter_to_dict",)),
    K("partial_gpu_mode", "automatic", why="mesh.roles and rollout.vllm.devices part the devices"),
    K("render_save_dir", "automatic", why="log.rollouts keeps every episode", also=("env_monitor.**",)),
    *(K(role + name, "automatic", why=why) for role in (ENV, EVAL) for name, why in (
        ("max_env_num_per_worker", "env.workers and env.in_flight"), ("max_traj_per_env", "a step asks for as many episodes as it lacks"),
        ("**", "no counterpart is needed"))),
    *(K(n, "automatic", why="a variable of the file, used where it is named") for n in VARIABLES),
)

OWN = {n for r in RULES for k in (r.keys if isinstance(r, Joint) else (r,)) for n in k.names()}


def without(rule: Key | Joint) -> list[Key | Joint]:
    """Returns a list of a row of the RLVR pipeline without the names that have a row of their own here; [] if none is
    left. A joint rule is returned as it is."""
    if isinstance(rule, Joint):
        return [rule]
    names = [n for n in rule.names() if n not in OWN]
    return [replace(rule, name=names[0], also=tuple(names[1:]))] if names else []


def in_groups(rule: Key | Joint) -> Key | Joint:
    """Returns a rule whose keys that the tests try beside a rollout_batch_size are tried beside groups of 8 and batches
    of 1024 trajectories."""
    if isinstance(rule, Joint):
        return replace(rule, keys=tuple(in_groups(k) for k in rule.keys))
    many = {**GROUP, "rollout_batch_size": 1024} if "rollout_batch_size" in rule.beside else {}
    return replace(rule, beside={**rule.beside, **many})


AGENTIC = replace(
    TABLE, job="agentic", jobs=(), differs=tuple(text for text in TABLE.differs if text != SHORT),
    required={"sequence_length": 4096, ENV + SAMPLE + "max_new_tokens": 256}, rules=tuple(map(in_groups, (
        *RULES[:3],
        *(one for r in TABLE.rules if not left(r.title if isinstance(r, Joint) else r.name) for one in without(r)),
        *RULES[3:]))))
