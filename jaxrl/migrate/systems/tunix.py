"""Tunix's command line (grpo_main, ppo_main): what its keys mean here. Its SFT (peft_main) is refused.

Read from its code at the tags v0.1.6 and v0.1.7 and of August 2026. Defaults are those of its base_config.yaml, which
a command names. A batch is counted in prompts; a step of the trainer is a batch.
"""

from __future__ import annotations

from jaxrl.migrate.jobs import DISTILL, PREFERENCE, SFT, Job
from jaxrl.migrate.systems import tunix_meaning as meaning
from jaxrl.migrate.systems import tunix_optimizer, tunix_turns
from jaxrl.migrate.systems.tunix_calls import CALLS
from jaxrl.migrate.systems.tunix_meaning import ACTOR, AGENTIC, CRITIC, GRPO, MODEL, OPT, PPO, ROLLOUT, TRAINING, VALUE
from jaxrl.migrate.table import Joint, Key, Since, Table

K = Key
ON_PPO, TWO = {PPO + "gae_lambda": 0.9}, {"batch_size": 16}
TURNS = {"training_mode": "agentic_grpo", "env_class_path": "game.Lake", AGENTIC + "max_turns": 3}
COSINE, DRAWN = "warmup_cosine_decay_schedule", {ROLLOUT + "return_logprobs": True}
FALL = {OPT + "schedule_type": "cosine_decay_schedule", OPT + "init_value": 2e-5, OPT + "decay_steps": 100}
LINE = {OPT + "schedule_type": "linear_schedule", OPT + "init_value": 2e-5, OPT + "transition_steps": 40}
LORA, FAR = (
    {ACTOR + "lora_config.rank": 16},
    {OPT + "schedule_type": COSINE, OPT + "peak_value": 2e-5, OPT + "decay_steps": 100, OPT + "warmup_steps": 5},
)


def grpo(name: str, default, other, **beside) -> tuple[Key, Key]:
    """Returns the rows of an option of GRPO and of its agentic kind. default, other: as of Key. beside: other options
    of the same table under which this one matters."""
    drawn = DRAWN if name.startswith("sampler") else {}
    turns = {"training_mode": "agentic_grpo", **drawn, **{AGENTIC + k: v for k, v in beside.items()}}
    one = {**drawn, **{GRPO + k: v for k, v in beside.items()}}
    return (
        K(GRPO + name, "equivalent", default=default, other=other, beside=one),
        K(AGENTIC + name, "equivalent", default=default, other=other, beside=turns),
    )


IMAGES = ", with images, too (docs/guides/vision.md),"
JOBS = (
    Job("preference training by DPOTrainer", PREFERENCE + IMAGES, r"\bdpo_trainer\b"),
    Job("distillation by DistillationTrainer", DISTILL, r"\bdistillation_trainer\b"),
    Job("a program in Python", command=r"^tunix program\b", table="tunix_program:PROGRAM"),
    Job(
        "supervised fine-tuning by peft_main",
        SFT + IMAGES,
        r"\bpeft_main\b",
        ("training_config.eval_every_n_steps", "training_config.max_steps", "optimizer_config.opt_type", "optimizer_config.learning_rate"),
        unless=("rl_training_config.**", "rollout_config.**", "grpo_config.**", "ppo_config.**", "agentic_grpo_config.**"),
    ),
)
AUTOMATIC = (
    ("model_config.model_display", "the log names the model's size", ()),
    (
        "model_config.intermediate_ckpt_dir",
        "weights are read from a Hugging Face folder or hub id",
        ("model_config.model_download_path", "model_config.model_path", "model_config.model_name"),
    ),
    (
        "model_config.use_flash_attention",
        "attention is the platform's (model.attention)",
        ("model_config.flash_attention_block_size", "model_config.use_flash_attn", "model_config.use_sliding_window_kv_cache"),
    ),
    ("model_config.mesh.allocation_policy", "devices are taken in their order", ()),
    ("model_config.**", "no counterpart is needed", ()),
    (ACTOR + "**", "no counterpart is needed", ("reference_model_config.**", "rollout_model_config.**")),
    (CRITIC + "**", "the critic is sharded as the policy", ()),
    ("tokenizer_config.**", "the tokenizer's own settings", ()),
    ("chat_parser_config.**", "messages are rendered by the chat template", ()),
    ("tfds_download", "rows are of the Hugging Face hub or a file", ()),
    ("max_target_length", "read by peft_main alone", ("optimizer_config.**", "training_config.**")),
    (
        "actor_model_config",
        "a table that is not set",
        (
            "critic_model_config",
            "reference_model_config",
            "rollout_model_config",
            "data_config",
            "agent_kwargs",
            "env_kwargs",
            "kubernetes_config",
            "vllm_config",
            "sglang_jax_config",
        ),
    ),
    ("kubernetes_config.**", "launch.hosts", ()),
    ("vllm_config.**", "sampled by rollout.engine=jax", ("sglang_jax_config.**",)),
    (
        TRAINING + "profiler_options.**",
        "profile.steps",
        (TRAINING + "perf_metrics_options.**", TRAINING + "profiler_options", TRAINING + "perf_metrics_options"),
    ),
    (TRAINING + "metrics_logging_options.**", "metrics are below run.dir", ()),
    (TRAINING + "checkpointing_options.**", "a checkpoint is whole", ()),
    (TRAINING + "**", "no counterpart is needed", ()),
    (ROLLOUT + "**", "the sampler's own choice", ()),
    (AGENTIC + "**", "no counterpart is needed", ()),
)

TABLE = Table(
    name="tunix",
    title="Tunix",
    command=r"tunix[./]cli",
    versions=("0.1.6", "0.1.7"),
    jobs=JOBS,
    calls=CALLS,
    config_words=r"(?:override_config_file=)?((?!(?:\S*/)?base_(?:agentic_)?config\.)[\w./-]+\.ya?ml)",  # those are the defaults here
    required={MODEL + "model_id": "Qwen/Qwen2.5-0.5B"},
    differs=(
        "keys that neither the file nor the command sets are those of Tunix's own base_config.yaml",
        "the gradient does not depend on micro-batches",
        "weight decay spares norms, biases and other vectors; Tunix's does not",
        "the order of the data is drawn from another generator",
    ),
    rules=(
        Joint(
            "model",
            (
                K(MODEL + "model_id", "equivalent", default="meta-llama/Llama-3.1-8B", other="another/model"),
                K(ACTOR + "model_id", "equivalent", other="another/model"),
                K(MODEL + "model_source", "equivalent", default="huggingface"),
                K(MODEL + "rng_seed", "equivalent", default=0, other=7),
                K("tokenizer_config.tokenizer_path", "equivalent", default="meta-llama/Llama-3.1-8B"),
                K("tokenizer_config.tokenizer_type", "equivalent", default="huggingface"),
            ),
            meaning.model,
        ),
        Joint(
            "lengths",
            (
                K(ROLLOUT + "max_prompt_length", "equivalent", default=256, other=300),
                K(ROLLOUT + "total_generation_steps", "equivalent", default=768, other=500),
                K(AGENTIC + "max_response_length", "equivalent"),
            ),
            meaning.lengths,
        ),
        Joint(
            "batch",
            (
                K("batch_size", "equivalent", default=16, other=8),
                K(TRAINING + "mini_batch_size", "equivalent", other=8, beside=TWO),
                K("training_mode", "equivalent"),
                *grpo("num_generations", 2, 4),
                *grpo("num_iterations", 1, 2),
                K(PPO + "num_iterations", "equivalent", default=1, other=2, beside=ON_PPO),
            ),
            meaning.batch,
        ),
        Joint(
            "advantage",
            (
                *grpo("advantage_estimator", "grpo", "rloo"),
                K(PPO + "gae_lambda", "equivalent", default=0.95, other=0.9),
                K(PPO + "gamma", "equivalent", default=1.0, other=0.99, beside=ON_PPO),
                K(PPO + "clip_range_value", "equivalent", default=0.2, other=0.3, beside=ON_PPO),
            ),
            meaning.advantage,
        ),
        Joint(
            "loss",
            (
                *grpo("loss_algo", "grpo", "gspo-token"),
                *grpo("epsilon", 0.2, 0.3),
                *grpo("epsilon_high", None, 0.28),
                *grpo("epsilon_c", None, 3.0),
                *grpo("loss_agg_mode", "sequence-mean-token-mean", "token-mean"),
                *grpo("policy_loss_fn", "grpo", None),
                *(
                    K(PPO + n, "equivalent", default=d, other=o, beside=ON_PPO)
                    for n, d, o in (
                        ("epsilon", 0.2, 0.3),
                        ("epsilon_low", None, 0.1),
                        ("epsilon_high", None, 0.28),
                        ("epsilon_c", None, 3.0),
                        ("entropy_coef", None, 0.01),
                    )
                ),
            ),
            meaning.loss,
        ),
        Joint(
            "KL",
            (
                K(GRPO + "beta", "equivalent", default=0.08, other=0.01, beside={GRPO + "kl_loss_mode": "low_var_kl"}),
                K(
                    AGENTIC + "beta",
                    "equivalent",
                    default=0.04,
                    other=0.01,
                    beside={"training_mode": "agentic_grpo", AGENTIC + "kl_loss_mode": "low_var_kl"},
                ),
                K(GRPO + "kl_loss_mode", "equivalent", default=Since(("0.1.6", "low_var_kl"), ("0.1.7", "kl")), other="mse_kl"),
                K(
                    AGENTIC + "kl_loss_mode",
                    "equivalent",
                    default=Since(("0.1.6", "low_var_kl"), ("0.1.7", "kl")),
                    other="mse_kl",
                    beside={"training_mode": "agentic_grpo"},
                ),
                K(PPO + "beta", "equivalent", default=0.08, other=0.01, beside=ON_PPO),
                K(PPO + "kl_method", "equivalent", default="low_var_kl", other="mse_kl", beside=ON_PPO),
            ),
            meaning.kl,
        ),
        Joint(
            "chat",
            (
                K("chat_parser_config.enable_thinking", "equivalent", other=False, beside={"chat_parser_config.type": "gemma4"}),
                K("chat_parser_config.type", "equivalent"),
                K("apply_chat_template_to_dataset", "equivalent", default=True, other=False),
            ),
            meaning.chat,
        ),
        Joint("file of keys", (K("override_config_file", "equivalent"),), meaning.file_of_keys),
        K(AGENTIC + "overlong_filter", "unsupported", fine=(False,), why="an episode that is cut keeps its reward"),
        K(AGENTIC + "degenerate_group_masking", "inert", why="groups without advantages add no loss anyway"),
        Joint("ends", (K(ROLLOUT + "eos_tokens", "equivalent", other=["<end_of_turn>"]),), meaning.ends),
        *(K(place + "kl_clamp_value", "unsupported", why="a token's KL is not cut") for place in (GRPO, AGENTIC, PPO)),
        *(
            K(place + name, "unsupported", fine=fine, refuse=True, why="a function of your own: algorithm.policy_loss, algorithm.advantage")
            for place in (GRPO, AGENTIC, PPO)
            for name, fine in (("algo_variant", ("grpo", "ppo", "agentic_grpo", "gspo-token")), ("reward_manager", ("sequence-level",)))
        ),
        *(
            K(PPO + name, "unsupported", fine=(fine,), refuse=True, why="a function of your own")
            for name, fine in (("advantage_estimator", "gae"), ("policy_loss_fn", "ppo"), ("value_loss_fn", "ppo"))
        ),
        Joint(
            "mismatch",
            (
                K(ROLLOUT + "return_logprobs", "equivalent", default=False, other=True),
                *grpo("use_rollout_logps", True, None),
                *grpo("sampler_is", None, "token"),
                *grpo("sampler_is_threshold", 2.0, 3.0, sampler_is="token"),
            ),
            meaning.mismatch,
        ),
        Joint(
            "sampling",
            (
                K(ROLLOUT + "temperature", "equivalent", default=0.9, other=1.0),
                K(ROLLOUT + "top_p", "equivalent", default=1.0, other=0.9),
                K(ROLLOUT + "top_k", "equivalent", default=50, other=20),
            ),
            meaning.sampling,
        ),
        Joint(
            "data",
            (
                K("data_source", "equivalent", default="tfds"),
                K("dataset_name", "equivalent", default="Helsinki-NLP/opus-100", other="openai/gsm8k:main", beside={"data_source": "huggingface"}),
                K("data_directory", "equivalent", default="", other="a/rows.parquet", beside={"data_source": "local"}),
                K("data_module", "equivalent", default=""),
                K("prompt_key", "equivalent", default="prompts"),
                K("train_split", "equivalent", other="validation", also=("split",)),
                K(AGENTIC + "system_prompt", "equivalent", other="Think.", beside={"training_mode": "agentic_grpo"}),
                K("reward_functions", "equivalent", default=["tunix/cli/reward_fn/gsm8k.py"], other=["mine/reward.py"]),
                K("verl_compatible", "equivalent", default=False),
            ),
            meaning.data,
        ),
        K("data_config.*", "ask", why="options of the module that makes the rows: write them as it does into a file, and name it in data.path"),
        Joint(
            "length of the run",
            (
                K(TRAINING + "max_steps", "equivalent", default=10, other=20),
                K("num_batches", "equivalent", default=0),
                K("num_train_epochs", "equivalent", default=1),
                K("train_fraction", "equivalent", default=1.0),
                K("num_test_batches", "equivalent", default=100),
                K(TRAINING + "eval_every_n_steps", "equivalent", default=2),
            ),
            meaning.run,
        ),
        Joint(
            "optimizer",
            tuple(
                K(OPT + n, "equivalent", default=d, other=o, beside=b)
                for n, d, o, b in (
                    ("opt_type", "adamw", "sgd", {}),
                    ("schedule_type", COSINE, "", {}),
                    ("learning_rate", 1e-5, 2e-5, {OPT + "schedule_type": ""}),
                    ("peak_value", 3e-5, 1e-5, FAR),
                    ("init_value", 0.0, 1e-6, FAR),
                    ("end_value", 0.0, 1e-6, FAR),
                    ("b1", 0.9, 0.8, {}),
                    ("b2", 0.99, 0.95, {}),
                    ("weight_decay", 0.1, 0.01, {}),
                    ("warmup_steps", 5, 7, FAR),
                    ("decay_steps", 10, 50, FAR),
                    ("eps", None, 1e-6, {}),
                    ("value", 1e-5, 2e-6, {OPT + "schedule_type": "constant_schedule"}),
                    ("alpha", None, 0.1, FALL),
                    ("transition_steps", None, 50, LINE),
                    ("transition_begin", None, None, {}),
                    ("exponent", None, None, {}),
                )
            ),
            tunix_optimizer.optimizer,
        ),
        Joint(
            "critic's optimizer",
            tuple(
                K(VALUE + n, "equivalent", default=None, other=o, beside={**ON_PPO, **{VALUE + k.rpartition(".")[2]: v for k, v in FAR.items()}})
                for n, o in (
                    ("opt_type", None),
                    ("schedule_type", None),
                    ("learning_rate", None),
                    ("peak_value", 1e-4),
                    ("init_value", None),
                    ("end_value", None),
                    ("b1", 0.8),
                    ("b2", 0.95),
                    ("weight_decay", 0.01),
                    *((n, None) for n in ("warmup_steps", "decay_steps", "eps", "value", "alpha")),
                    *((n, None) for n in ("transition_steps", "transition_begin", "exponent")),
                )
            ),
            tunix_optimizer.critics_optimizer,
        ),
        K(
            OPT + "max_grad_norm",
            "inert",
            why="optax's optimizer takes no such argument, and nothing else clips there: optimizer.max_grad_norm=0",
            also=(VALUE + "max_grad_norm",),
        ),
        K(
            OPT + "warmup_ratio",
            "inert",
            why="Tunix reads warmup_steps alone; without it the warm-up is a tenth of the run",
            also=(VALUE + "warmup_ratio",),
        ),
        K(OPT + "**", "automatic", why="no counterpart is needed"),
        K(VALUE + "**", "automatic", why="no counterpart is needed"),
        Joint(
            "layout",
            (
                K(MODEL + "mesh.shape", "equivalent", default="(2,2)"),
                K(MODEL + "mesh.axis_names", "equivalent", default="('fsdp','tp')"),
                K(ACTOR + "mesh.shape", "equivalent", other="(2,4)"),
                K(ACTOR + "mesh.axis_names", "equivalent"),
                K("rollout_model_config.mesh.shape", "equivalent", other="(4,1)"),
                K("rollout_model_config.mesh.axis_names", "equivalent"),
                K("rollout_model_config.mesh.devices", "equivalent"),
                K("rollout_model_config.mesh", "equivalent"),
                K("reference_model_config.mesh", "equivalent"),
                K(CRITIC + "mesh", "equivalent"),
                K("rollout_model_config.same_mesh_as", "equivalent"),
                K("rollout_engine", "equivalent", default="vanilla"),
                K("offload_to_cpu", "equivalent", default=False, other=True),
            ),
            meaning.layout,
        ),
        Joint(
            "adapters",
            (
                K(ACTOR + "lora_config.rank", "equivalent", other=16),
                K(ACTOR + "lora_config.alpha", "equivalent", default=2.0, other=32.0, beside=LORA),
                K(
                    ACTOR + "lora_config.module_path",
                    "equivalent",
                    default=".*q_einsum|.*kv_einsum|.*gate_proj|.*down_proj|.*up_proj",
                    other=".*q_proj",
                    beside=LORA,
                ),
                K(MODEL + "lora_config.rank", "equivalent"),
                K(MODEL + "lora_config.alpha", "equivalent"),
                K(MODEL + "lora_config.module_path", "equivalent"),
                K(CRITIC + "lora_config.rank", "equivalent"),
            ),
            meaning.adapters,
        ),
        *(
            K(place + "lora_config." + name, "unsupported", why="adapters beside quantised weights")
            for place in (ACTOR, MODEL)
            for name in ("weight_qtype", "tile_size")
        ),
        K(CRITIC + "lora_config.*", "inert", why="read with its rank alone"),
        K(MODEL + "lora_config", "inert", why="empty", also=(ACTOR + "lora_config", CRITIC + "lora_config")),
        Joint("recomputation", (K(MODEL + "remat_config", "equivalent", other=3), K(ACTOR + "remat_config", "equivalent")), meaning.remat),
        Joint(
            "dtypes",
            (
                K(MODEL + "dtype", "equivalent", other="float32"),
                K(ACTOR + "dtype", "equivalent"),
                K(ACTOR + "load_dtype", "equivalent", other="float32"),
            ),
            meaning.dtypes,
        ),
        Joint(
            "memory",
            (
                K(TRAINING + "train_micro_batch_size", "equivalent", other=2),
                K(TRAINING + "compute_logps_micro_batch_size", "equivalent", other=3),
                K(TRAINING + "gradient_accumulation_steps", "equivalent", default=1),
            ),
            meaning.memory,
        ),
        Joint(
            "places",
            (
                K(TRAINING + "checkpoint_root_directory", "equivalent", default="/tmp/ckpts", other="runs/x"),
                K(TRAINING + "checkpointing_options.save_interval_steps", "equivalent", default=180, other=20),
                K(TRAINING + "checkpointing_options.max_to_keep", "equivalent", default=1, other=3),
            ),
            meaning.places,
        ),
        Joint(
            "episodes",
            (
                K("agent_class_path", "equivalent"),
                K("env_class_path", "equivalent"),
                K(AGENTIC + "max_turns", "equivalent"),
                K("agent_kwargs.*", "equivalent"),
                K("env_kwargs.*", "equivalent"),
                K(AGENTIC + "off_policy_steps", "equivalent", default=0),
                K(AGENTIC + "max_concurrency", "equivalent", other=4, beside=TURNS),
                K(AGENTIC + "episode_timeout", "equivalent", other=90.0, beside=TURNS),
                K(AGENTIC + "per_turn_timeout_secs", "equivalent", other=20.0, beside=TURNS),
            ),
            tunix_turns.turns,
        ),
        K("agentic_ppo_config.**", "inert", why="Tunix has no agentic PPO yet", also=("agentic_ppo_config",)),
        *(K(n, "automatic", why=why, also=also) for n, why, also in AUTOMATIC),
    ),
)
