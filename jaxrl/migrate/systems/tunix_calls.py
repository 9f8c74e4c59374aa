"""What Tunix's programs in Python are read for: calls of its config classes, of optax and of its learners, as keys of
its command line. See systems/tunix_program.py for what they mean there."""

from __future__ import annotations

from jaxrl.migrate.python_files import Calls
from jaxrl.migrate.systems.tunix_meaning import AGENTIC, GRPO, MODEL, OPT, PPO, ROLLOUT, TRAINING

CLIP = "optax.clip_by_global_norm"
SHAPE, AXES = MODEL + "mesh.shape", MODEL + "mesh.axis_names"
READ_ELSEWHERE = ("actor_optimizer", "critic_optimizer", "metrics_logging_options", "checkpointing_options", "profiler_options",
                  "perf_metrics_options")
OF_ENGINES = ("seed", "data_type", "rollout_mapping_config", "tensor_parallel_size", "data_parallel_size", "expert_parallel_size",
              "rollout_vllm_kwargs", "rollout_vllm_additional_config", "rollout_vllm_lora_config")
ROWS = {"batch_size": "batch_size", "split": "train_split"}
LEARNER = {"reward_fns": "reward_functions", "agent_class": "AGENT_CLASS_PATH", "env_class": "ENV_CLASS_PATH", "agent_kwargs": "agent_kwargs",
           "env_kwargs": "env_kwargs"}
ADAPTERS = (
    "adapters: the program makes adapters, and whether it trains with them is computed: if it does, give "
    "actor_model_config.lora_config.rank=N, .alpha=N and .module_path=... after the file"
)


def _optimizer(name: str) -> tuple:
    return "", {"": OPT, 0: OPT + "learning_rate", "mask": None, "mu_dtype": None}, {OPT + "opt_type": name}


CALLS = Calls(
    configs={
        "RolloutConfig": ("", {"": ROLLOUT, "max_tokens_to_generate": ROLLOUT + "total_generation_steps", **dict.fromkeys(OF_ENGINES)}, {}),
        "RLTrainingConfig": ("tunix program", {"": TRAINING, **dict.fromkeys(READ_ELSEWHERE)}, {}),
        "ClusterConfig": ("tunix program", {"rollout_engine": "rollout_engine", "offload_to_cpu": "offload_to_cpu", **dict.fromkeys((
            "role_to_mesh", "role_to_logical_axis_rule", "training_config", "rollout_config"))}, {}),
        "agentic.GRPOConfig": ("tunix program", {"": AGENTIC}, {"training_mode": "agentic_grpo"}),
        "GRPOConfig": ("tunix program", {"": GRPO}, {"training_mode": "grpo"}),
        "PPOConfig": ("tunix program ppo_main", {"": PPO}, {}),
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
        "make_mesh": ((SHAPE, AXES), {"axis_shapes": SHAPE, "axis_names": AXES}),
        "get_train_and_eval_datasets": ((), ROWS), "post_init_dataset": ((), ROWS),
        "batch": (("batch_size",), {}),
    },
    kinds=("agentic",),
    asks={name: ADAPTERS for name in ("LoraProvider", "apply_lora_to_model")},
    derived="what it changes of the learner is not read",
    tuples=(SHAPE, AXES),
)
