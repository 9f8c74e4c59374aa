"""What Tunix's programs in Python are read for: calls of its config classes, of optax and of its learners, as keys of
its command line. See systems/tunix_program.py for what they mean there."""

from __future__ import annotations

from jaxrl.migrate.python_files import Calls
from jaxrl.migrate.systems import tunix_objects
from jaxrl.migrate.systems.tunix_meaning import AGENTIC, GRPO, MODEL, OPT, PPO, ROLLOUT, TRAINING
from jaxrl.migrate.systems.tunix_objects import AXES, SAMPLERS, SHAPE

CLIP = "optax.clip_by_global_norm"
READ_ELSEWHERE = ("actor_optimizer", "critic_optimizer", "metrics_logging_options", "checkpointing_options")
ROWS = {"batch_size": "batch_size", "split": "train_split"}
LEARNER = {"reward_fns": "reward_functions", "agent_class": "AGENT_CLASS_PATH", "env_class": "ENV_CLASS_PATH", "agent_kwargs": "agent_kwargs",
           "env_kwargs": "env_kwargs"}


def _optimizer(name: str) -> tuple:
    return "", {"": OPT, 0: OPT + "learning_rate", "mask": None, "mu_dtype": None}, {OPT + "opt_type": name}


CALLS = Calls(
    configs={
        "RolloutConfig": ("", {"": ROLLOUT, "max_tokens_to_generate": ROLLOUT + "total_generation_steps"}, {}),
        "RLTrainingConfig": ("tunix program", {"": TRAINING, **dict.fromkeys(READ_ELSEWHERE)}, {}),
        "ClusterConfig": ("tunix program", {"rollout_engine": "rollout_engine", "offload_to_cpu": "offload_to_cpu", **dict.fromkeys((
            "role_to_mesh", "role_to_logical_axis_rule", "training_config", "rollout_config"))}, {}),
        "agentic.GRPOConfig": ("tunix program", {"": AGENTIC}, {"training_mode": "agentic_grpo"}),
        "GRPOConfig": ("tunix program", {"": GRPO}, {"training_mode": "grpo"}),
        "PPOConfig": ("tunix program ppo_main", {"": PPO}, {}),
        "MetricsLoggerOptions": ("", {"": TRAINING + "metrics_logging_options."}, {}),
        **{f"{name}ChatTemplateParser": ("", {"": "chat_parser_config."}, {"chat_parser_config.type": name.lower()})
           for name in ("Qwen", "Gemma4")},
        "CheckpointManagerOptions": ("", {"": TRAINING + "checkpointing_options."}, {}),
        "CheckpointingOptions": ("", {"": TRAINING + "checkpointing_options."}, {}),
        "warmup_cosine_decay_schedule": ("", {"": OPT, **{i: OPT + n for i, n in enumerate((
            "init_value", "peak_value", "warmup_steps", "decay_steps", "end_value"))}}, {OPT + "schedule_type": "warmup_cosine_decay_schedule"}),
        **{f"optax.{name}": _optimizer(name) for name in ("adamw", "adam", "sgd", "adafactor", "lion")},
        CLIP: ("", {0: CLIP, "max_norm": CLIP}, {}),
        "create_model_from_safe_tensors": ("", {"dtype": "actor_model_config.load_dtype", "config": None, "mesh": None, "file_dir": None}, {}),
    },
    trainers={"GRPOLearner": ("", LEARNER), "PPOLearner": ("", LEARNER), "PPOTrainer": ("", LEARNER),
              "PeftTrainer": ("tunix peft_main", {}), "DPOTrainer": ("tunix dpo_trainer", {}),
              "DistillationTrainer": ("tunix distillation_trainer", {})},
    loads={
        "AutoTokenizer.from_pretrained": (("tokenizer_config.tokenizer_path",), {}),
        "AutoModel.from_pretrained": ((MODEL + "model_id",), {"model_id": MODEL + "model_id"}),
        "snapshot_download": ((MODEL + "model_id",), {"repo_id": MODEL + "model_id"}), "hf_pipeline": ((MODEL + "model_id",), {}),
        "get_train_and_eval_datasets": ((), ROWS), "post_init_dataset": ((), ROWS),
        "batch": (("batch_size",), {}),
    },
    kinds=("agentic",),
    derived="what it changes of the learner is not read",
    tuples=(SHAPE, AXES, SAMPLERS + "shape", SAMPLERS + "axis_names"),
    enums=("RematConfig",),
    more=tunix_objects.read,
)
