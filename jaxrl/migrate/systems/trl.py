"""TRL's GRPO: what its keys mean here (flat YAML, or flags of `trl grpo` and `accelerate launch`). RLOO is in
trl_rloo.py, trainers of rows are in trl_jobs.py.

Read from its code at the releases 0.17.0 to 1.16.0, and from transformers' TrainingArguments. Batches are completions per
process, so that the number of processes must be known. A step is an optimizer step there, a generation batch here.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.jobs import DISTILL, PREFERENCE, Job
from jaxrl.migrate.python_files import Calls
from jaxrl.migrate.systems import trl_meaning as meaning
from jaxrl.migrate.systems import trl_rewards_meaning as named
from jaxrl.migrate.table import MISSING, Joint, Key, Since, Table

K = Key
COSINE, REPEATED, OVERLONG = ({"reward_funcs": [name]} for name in ("cosine", "repetition_penalty", "soft_overlong_punishment"))
IS = "vllm_importance_sampling_"
VLLM, SERVER, PEFT, EVAL = {"use_vllm": True}, {"use_vllm": True, "vllm_mode": "server"}, {"use_peft": True}, {
    "eval_strategy": "steps", "eval_steps": 10}
GRPO = ("num_generations", "max_completion_length", "epsilon", "epsilon_high", "scale_rewards", "num_iterations", "generation_batch_size",
        "steps_per_generation", "use_vllm", "vllm_mode", "reward_funcs")
TRAINER = {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "tools": "TOOLS", "rollout_func": "ROLLOUT_FUNC",
           "environment_factory": "ENVIRONMENT_FACTORY", "formatting_func": "FORMATTING_FUNC", "data_collator": "DATA_COLLATOR",
           "ref_model": "REF_MODEL", "callbacks": "CALLBACKS", "compute_loss_func": "COMPUTE_LOSS_FUNC", "optimizers": "OPTIMIZERS"}
LORA_CONFIG = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save", "task_type": "lora_task_type"}
LORA_MADE = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # PEFT's own defaults; TRL's flags have others
JOB_OF = {"GRPO": "grpo", "SFT": "sft", "DPO": "dpo", "KTO": "kto", "CPO": "cpo", "ORPO": "orpo", "Reward": "reward", "GKD": "gkd", "RLOO": "rloo",
          "GOLD": "gold", "Distillation": "distillation", "MiniLLM": "minillm", "OnlineDPO": "online_dpo", "NashMD": "nash_md", "XPO": "xpo",
          "BCO": "bco", "PRM": "prm", "PPO": "ppo", "AsyncGRPO": "async_grpo", "SDPO": "sdpo", "SDFT": "sdft", "TPO": "tpo", "SSD": "ssd"}
CALLS = Calls(
    configs={**{f"{name}Config": (f"trl {job}", {}, {}) for name, job in JOB_OF.items()}, "LoraConfig": ("", LORA_CONFIG, LORA_MADE),
             "BitsAndBytesConfig": ("", {"bnb_4bit_use_double_quant": "use_bnb_nested_quant"}, {"bnb_4bit_quant_type": "fp4"})},
    trainers={f"{name}Trainer": (f"trl {job}", TRAINER) for name, job in JOB_OF.items()},
    loaded={"": "model_init_kwargs.", "trust_remote_code": "trust_remote_code", **dict.fromkeys((
        "device_map", "low_cpu_mem_usage", "token", "cache_dir", "local_files_only"))},
    loads={"load_dataset": (("dataset_name", "dataset_config"), {"split": "dataset_train_split", "name": "dataset_config",
                                                                 "path": "dataset_name"})},
    flags=("TrlParser", "HfArgumentParser"))
PAIRS = ("desirable_weight", "undesirable_weight", "label_smoothing", "rpo_alpha", "precompute_ref_log_probs", "cpo_alpha", "simpo_gamma",
         "loss_type=sigmoid", "loss_type=ipo", "loss_type=hinge", "loss_type=apo_zero", "loss_type=robust", "loss_type=simpo")


def started(names: str, files: str = "") -> str:
    """Returns the regex of a command that starts one of these trainers: `trl dpo`, `-m trl.scripts.dpo`, `dpo.py`.
    names: of the trainers, with | between them. files: beginnings of the names of scripts, where they are others; "" =
    `names`."""
    return rf"\b((trl |trl\.scripts\.)({names})\b|({files or names})\w*\.py\b)"


JOBS = (
    Job("a file of accelerate's options, which starts processes,", "the config or script of the trainer", keys=(
        "compute_environment", "distributed_type", "deepspeed_config.**", "fsdp_config.**"), unless=(
        *GRPO, "model_name_or_path", "dataset_name", "learning_rate", "output_dir", "per_device_train_batch_size"), file=True),
    Job("a trainer of TRL that is not read", "its page, docs/guides/from_trl.md, names what is nearest; it",
        started("ppo|async_grpo|sdpo|sdft|tpo|ssd")),
    Job("RLOO", command=started("rloo"), keys=("normalize_advantages", "normalize_advantages=False", "reward_clip_range", "rloo_k"),
        unless=meaning.OF_GRPO, table="trl_rloo:RLOO"),
    Job("generalised knowledge distillation", command=started("gkd"), keys=("lmbda",), table="trl_jobs:GKD"),
    Job("distillation", DISTILL, started("gold|distillation|minillm", "gold|distill"), ("teacher_model_name_or_path",)),
    Job("training of a process reward model", "run.recipe=reward_model with reward_model.kind=steps (docs/guides/reward_models.md)",
        started("prm")),
    Job("training of a reward model", command=r"\b((trl |trl\.scripts\.)reward\b|(reward_modeling|reward)\.py\b)",
        keys=("center_rewards_coefficient",), unless=GRPO, table="trl_jobs:REWARD"),
    Job("online preference training", "run.recipe=rl, or run.recipe=preference on pairs of a file",
        started("online_dpo|nash_md|xpo")),
    Job("preference training with a classifier (BCO)", PREFERENCE, started("bco")),
    Job("preference training", command=started("dpo|kto|cpo|orpo", "dpo|kto|cpo|orpo|mpo"), keys=PAIRS, unless=GRPO,
        table="trl_jobs:PREFERENCE"),
    Job("supervised fine-tuning", command=started("sft"), keys=(
        "packing", "packing=False", "assistant_only_loss", "completion_only_loss", "completion_only_loss=False", "max_seq_length",
        "dataset_text_field"), unless=(*GRPO, "beta"),
        table="trl_jobs:SFT"),
    Job("a job of rows that may be SFT's, DPO's or a reward model's",
        "`jaxrl migrate trl/sft`, trl/preference or trl/reward_model, whichever it is,",
        keys=("max_length",), unless=GRPO),
    Job("a file without reward_funcs or another key of GRPO alone", "`jaxrl migrate trl/sft`, or num_generations in the file if it is GRPO's,",
        keys=("dataset_name", "model_name_or_path", "learning_rate"), unless=(*GRPO, "beta", "loss_type", "temperature"), file=True),
)
SUPERVISED = "of its other trainers, and not of GRPO (here run.recipe=sft or preference)"

AUTOMATIC = (  # key, what jaxrl does, further keys of which the same holds
    ("multi_gpu", "processes find each other (launch.hosts)", "num_machines", "machine_rank", "main_process_*", "rdzv_backend",
     "rdzv_endpoint", "same_network", "nnodes", "node_rank", "master_addr", "master_port", "local_rank", "distributed_type",
     "compute_environment", "main_training_function"),
    ("ddp_timeout", "launch.wait_seconds"),
    ("ignore_bias_buffers", "there are no buffers to exchange: gradients are summed by XLA"),
    ("gpu_ids", "mesh.* lays the job over the GPUs that are visible (CUDA_VISIBLE_DEVICES)"),
    ("use_cpu", "JAX_PLATFORMS=cpu in the environment", "no_cuda"),
    ("tpu_*", "jaxrl runs on the devices that JAX finds"),
    ("enable_cpu_affinity", "left to the operating system"),
    ("bf16_full_eval", "train.compute_dtype", "fp16_full_eval", "downcast_bf16"),
    ("dynamo_*", "every program is compiled", "torch_compile", "torch_compile_*", "jit_mode_eval"),
    ("deepspeed", "mesh.fsdp shards parameters, gradients and optimizer state", "deepspeed_config.**", "fsdp", "fsdp_config.**",
     "fsdp_config", "ddp_*"),
    ("ds3_gather_for_generation", "weights are laid out for the engine at every weight sync"),
    ("parallelism_config.**", "mesh.*"),
    ("log_level", "the log names progress, warnings and errors", "log_level_*"),
    ("logging_*", "every step is a line of metrics", "log_unique_prompts", "log_completions_steps"),
    ("log_completions", "log.print_samples and log.rollouts", "num_completions_to_print", "wandb_log_unique_prompts", "log_*"),
    ("disable_tqdm", "progress is lines of the log"),
    ("include_num_input_tokens_seen", "metrics count tokens"),
    ("wandb_*", "log.wandb_*", "project"),
    ("dataloader_*", "rows are read ahead by data.workers", "dataset_num_proc"),
    ("dataset_streaming", "rows are read from a copy on disk"),
    ("remove_unused_columns", "a reward gets every column of its row"),
    ("group_by_length", "rows are packed", "pad_to_multiple_of"),
    ("auto_find_batch_size", "run.mode=plan says what fits"),
    ("per_device_eval_batch_size", "evaluation asks all rows at once, within what the engine takes", "eval_accumulation_steps"),
    ("batch_eval_metrics", "metrics of evaluation are means over its completions"),
    ("average_tokens_across_devices", "token counts are those of all devices"),
    ("attn_implementation", "attention is the platform's (model.attention)", "use_kernels", "model_init_kwargs.attn_implementation"),
    ("use_liger_kernel", "kernels of losses and layers are the platform's", "use_liger_loss"),
    ("tf32", "XLA's default precision of fp32 products"),
    ("cast_lm_head_to_fp32", "log-probs are computed in fp32"),
    ("gradient_checkpointing_kwargs.**", "model.remat"),
    ("use_cache", "the sampler's KV cache is the engine's, and training has none", "cache_implementation", "model_init_kwargs.use_cache"),
    ("torch_empty_cache_steps", "XLA has its own allocator"),
    ("use_transformers_*", "completions come from rollout.engine"),
    ("overwrite_output_dir", "run.resume says what becomes of a run.dir that is there"),
    ("hub_*", "checkpoint.upload.*", "push_to_hub_*", "overwrite_hub_revision"),
    ("save_*", "a checkpoint is whole; exports are safetensors"),
    ("do_train", "run.mode=train"),
    ("full_determinism", "the same seed gives the same run"),
    ("tags", "a model card's tags; checkpoint.upload takes the files as they are"),
)
INERT = (
    ("debug", "a check of its own launcher"),
    ("do_eval", "eval_strategy says whether there is evaluation"),
    ("do_predict", "its trainer predicts nothing by itself"),
    ("trackio_*", "read with report_to=trackio alone"),
    ("metric_for_best_model", "read with load_best_model_at_end alone", "greater_is_better"),
)
LACKS = (
    ("load_best_model_at_end", "checkpoint.keep_best=True goes by eval.metric, one of jaxrl's own evaluations (accuracy, rewards); a loss on "
     "held-out rows, its default, is none of them"),
    ("benchmarks", "run its benchmarks on the exported model; eval.sets evaluates files"),
    ("callbacks", "a callback is Python: jaxrl.train(callbacks=...) (docs/guides/callbacks.md)"),
    ("model_init_kwargs.**", "write it into model.config"),
)

TABLE = Table(
    name="trl", title="TRL", flags=True,
    command=r"grpo|\btrl(\.scripts\.| )(sft|dpo|kto|cpo|orpo|reward|gkd|rloo)\b|(sft|dpo|kto|cpo|orpo|mpo|reward_modeling|gkd|rloo)\w*\.py",
    versions=("0.17", "0.18", "0.19", "0.22", "0.23", "0.26", "0.27", "1.0", "1.6", "1.9", "1.10", "1.14", "1.16"),
    required={"num_processes": 8, "num_generations": 8},
    jobs=JOBS, calls=CALLS,
    differs=(
        "the standard deviation has 1e-6 added, TRL's 1e-4",
        "no weight decay on norms, biases and other vectors (as transformers)",
        "the order of the data is drawn from another generator",
    ),
    rules=(
        Joint("lengths", (
            K("max_prompt_length", "equivalent", default=Since(("0.17", 512), ("0.26", None)), other=700),
            K("max_completion_length", "equivalent", default=Since(("0.17", 256), ("1.10", 512)), other=700)), meaning.lengths),
        Joint("batch", (
            K("per_device_train_batch_size", "equivalent", default=8, other=16),
            K("gradient_accumulation_steps", "equivalent", default=1, other=4),
            K("num_processes", "equivalent", default=MISSING, other=2, also=("num_gpus", "nproc_per_node")),
            K("num_generations", "equivalent", default=8, other=4),
            K("steps_per_generation", "equivalent", other=4),
            K("generation_batch_size", "equivalent", other=128),
            K("num_iterations", "equivalent", default=1, other=2)), meaning.batch),
        Joint("length of the run", (
            K("max_steps", "equivalent", default=-1, other=100),
            K("num_train_epochs", "equivalent", default=3.0, other=1)), meaning.length_of_run),
        Joint("loss", (
            K("loss_type", "equivalent", default=Since(("0.17", "bnpo"), ("0.22", "dapo")), other="grpo"),
            K("importance_sampling_level", "equivalent", default="token", other="sequence"),
            K("epsilon", "equivalent", default=0.2, other=0.1),
            K("epsilon_high", "equivalent", other=0.28),
            K("delta", "equivalent", other=2.0),
            K("sapo_temperature_pos", "equivalent", default=1.0, other=2.0, beside={"loss_type": "sapo"}),
            K("sapo_temperature_neg", "equivalent", default=1.05, other=2.0, beside={"loss_type": "sapo"}),
            K("scale_rewards", "equivalent", default="group", other=False),
            K("mask_truncated_completions", "equivalent", default=False, other=True),
            K("top_entropy_quantile", "equivalent", default=1.0),
            K("entropy_coef", "equivalent", default=0.0, other=0.01),
            K("use_adaptive_entropy", "equivalent", default=False, other=True),
            K("entropy_target", "equivalent", default=0.2, other=0.3, beside={"use_adaptive_entropy": True}),
            K("entropy_coef_max", "equivalent", default=1.0, other=0.1, beside={"use_adaptive_entropy": True}),
            K("entropy_coef_delta", "equivalent", default=0.005, other=0.01, beside={"use_adaptive_entropy": True})), meaning.loss),
        K("entropy_coef_min", "unsupported", fine=(0, 0.0), why="the adaptive coefficient begins at 0"),
        Joint("KL", (
            K("beta", "equivalent", default=Since(("0.17", 0.04), ("0.19", 0.0)), other=0.01),
            K("use_bias_correction_kl", "equivalent", default=Since(("0.17", False), ("1.10", True)), other=False, beside={"beta": 0.1}),
            K("sync_ref_model", "equivalent", default=False, other=True, beside={"beta": 0.1, "ref_model_mixup_alpha": 1.0}),
            K("ref_model_mixup_alpha", "equivalent", default=0.6),
            K("ref_model_sync_steps", "equivalent", default=512, other=64,
              beside={"beta": 0.1, "ref_model_mixup_alpha": 1.0, "sync_ref_model": True})), meaning.kl),
        Joint("mismatch", (
            K("use_vllm", "equivalent", default=False, other=True),
            K(IS + "correction", "equivalent", default=True, other=False, beside=VLLM),
            K(IS + "mode", "equivalent", default=Since(("0.17", "token_truncate"), ("0.26", "sequence_mask")), other="token_mask",
              beside=VLLM),
            K(IS + "clip_max", "equivalent", default=Since(("0.17", 2.0), ("0.26", 3.0)), other=5.0, beside=VLLM, also=(IS + "cap",)),
            K(IS + "clip_min", "equivalent", other=0.5, beside=VLLM),
            K("off_policy_mask_threshold", "equivalent", other=0.1)), meaning.mismatch),
        Joint("sampling", (
            K("temperature", "equivalent", default=Since(("0.17", 0.9), ("0.18", 1.0)), other=0.7),
            K("top_p", "equivalent", default=1.0, other=0.9),
            K("top_k", "equivalent", default=Since(("0.17", 50), ("0.18", None), ("0.27", 0)), other=20),
            K("min_p", "equivalent", other=0.1),
            K("repetition_penalty", "equivalent", default=1.0, other=1.1)), meaning.sampling),
        Joint("engine", (
            K("vllm_mode", "equivalent", default=Since(("0.17", "server"), ("1.0", "colocate")), other="server", beside=VLLM),
            K("vllm_tensor_parallel_size", "equivalent", default=1, other=2, beside=VLLM),
            K("vllm_gpu_memory_utilization", "equivalent", default=0.3, other=0.5, beside=VLLM),
            K("vllm_server_base_url", "equivalent", other="http://127.0.0.1:9", beside=SERVER),
            K("vllm_server_host", "equivalent", default="0.0.0.0", other="127.0.0.1", beside=SERVER),
            K("vllm_server_port", "equivalent", default=8000, other=8001, beside={**SERVER, "vllm_server_host": "127.0.0.1"})),
              meaning.engine),
        K("vllm_max_model_length", to="rollout.vllm.max_model_len", other=9000, also=("vllm_max_model_len",)),
        K("vllm_enable_sleep_mode", "automatic", why="colocated engines sleep during the update"),
        K("vllm_*", "automatic", why="rollout.vllm.* decide"),
        Joint("optimizer", (
            K("learning_rate", "equivalent", default=1e-6, other=2e-6),
            K("lr_scheduler_type", "equivalent", default="linear", other="cosine"),
            K("lr_scheduler_kwargs.*", "equivalent"),
            K("warmup_steps", "equivalent", default=0, other=7),
            K("warmup_ratio", "equivalent", default=0.0, other=0.1),
            K("optim", "equivalent", default="adamw_torch", other="sgd")), meaning.optimizer),
        K("weight_decay", to="optimizer.weight_decay", default=0.0, other=0.1),
        K("adam_beta1", to="optimizer.b1", default=0.9, other=0.8),
        K("adam_beta2", to="optimizer.b2", default=0.999, other=0.95),
        K("adam_epsilon", to="optimizer.eps", default=1e-8, other=1e-6),
        K("max_grad_norm", to="optimizer.max_grad_norm", default=1.0, other=0.1),
        Joint("evaluation", (
            K("eval_strategy", "equivalent", default="no", other="epoch", also=("evaluation_strategy",)),
            K("eval_steps", "equivalent", other=20, beside={"eval_strategy": "steps"}),
            K("eval_on_start", "equivalent", default=False, other=True, beside=EVAL),
            K("num_generations_eval", "equivalent", other=2, beside=EVAL),
            K("logging_steps", "equivalent", default=10),
            K("dataset_test_split", "equivalent", default="test", other="validation", beside={**EVAL, "dataset_name": "a/b"})),
              meaning.evaluation),
        Joint("saving", (
            K("save_strategy", "equivalent", default="steps", other="epoch"),
            K("save_steps", "equivalent", default=500, other=20),
            K("save_total_limit", "equivalent", other=2),
            K("output_dir", "equivalent", other="runs/x"),
            K("push_to_hub", "equivalent", default=False, other=True, beside={"hub_model_id": "a/b"}),
            K("hub_model_id", "equivalent", other="a/c", beside={"push_to_hub": True}),
            K("resume_from_checkpoint", "equivalent", other=True)), meaning.saving),
        Joint("data", (
            K("dataset_name", "equivalent", other="a/b"),
            K("dataset_config", "equivalent", other="main", also=("dataset_config_name",)),
            K("dataset_train_split", "equivalent", default="train", other="validation", also=("dataset_split",)),
            K("shuffle_dataset", "equivalent", default=True, other=False)), meaning.data),
        K("system_prompt", to="data.system_prompt", other="Be brief."),
        K("dataset_prompt_column", to="data.prompt_column", default="prompt", other="problem"),
        Joint("rewards", (
            K("reward_funcs", "equivalent", other=["accuracy_reward"]),
            K("reward_weights", "equivalent", other=[2.0], beside={"reward_funcs": ["accuracy_reward"]}),
            K("cosine_min_value_wrong", "equivalent", default=0.0, other=-1.0, beside=COSINE),
            K("cosine_max_value_wrong", "equivalent", default=-0.5, other=-0.1, beside=COSINE),
            K("cosine_min_value_correct", "equivalent", default=0.5, other=0.2, beside=COSINE),
            K("cosine_max_value_correct", "equivalent", default=1.0, other=2.0, beside=COSINE),
            K("cosine_max_len", "equivalent", default=1000, other=4096, beside=COSINE),
            K("repetition_n_grams", "equivalent", default=3, other=4, beside=REPEATED),
            K("repetition_max_penalty", "equivalent", default=-1.0, other=-0.5, beside=REPEATED),
            K("max_completion_len", "equivalent", default=16384, other=4096, beside=OVERLONG),
            K("soft_punish_cache", "equivalent", default=4096, other=512, beside=OVERLONG),
            K("code_language", "equivalent", default="python", other="cpp", beside={"reward_funcs": ["code_format"]}),
            K("reward_model_name_or_path", "equivalent", other="a/rm")), named.rewards),
        K("multi_objective_aggregation", "unsupported", fine=("sum_then_normalize",), refuse=True,
          why="rewards are added up, then normalised"),
        K("model_name_or_path", to="model.path", other="a/model"),
        Joint("model", (
            K("model_revision", "equivalent", default="main", other="abc", also=("model_init_kwargs.revision",)),
            K("dtype", "equivalent", other="bfloat16", also=("torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")),
            K("bf16", "equivalent", other=False),
            K("fp16", "equivalent", default=False, other=True),
            K("mixed_precision", "equivalent"),  # of accelerate
            K("chat_template_path", "equivalent", other="t.jinja"),
            K("chat_template", "equivalent", other="{{ messages }}")), meaning.model),
        K("trust_remote_code", to="model.trust_remote_code", default=False, other=True),
        K("gradient_checkpointing", "equivalent", "model.remat", lambda on: "full" if on else "none",
          default=Since(("0.17", False), ("0.22", True)), other=False),
        Joint("adapters", (
            K("use_peft", "equivalent", default=False, other=True),
            K("lora_r", "equivalent", default=16, other=32, beside=PEFT),
            K("lora_alpha", "equivalent", default=32, other=64, beside=PEFT),
            K("lora_target_modules", "equivalent", other=["o_proj"], beside=PEFT),
            K("lora_dropout", "equivalent", default=0.05),
            K("lora_modules_to_save", "equivalent", other=["lm_head"], beside=PEFT),
            K("use_rslora", "equivalent", default=False, other=True, beside=PEFT),
            K("use_dora", "equivalent", default=False, other=True, beside=PEFT),
            K("load_in_4bit", "equivalent", default=False, other=True, beside=PEFT),
            K("load_in_8bit", "equivalent", default=False, other=True, beside=PEFT)), meaning.adapters),
        K("lora_task_type", "automatic", why="a language model"),
        K("bnb_4bit_*", "automatic", why="lora.base=nf4", also=("use_bnb_nested_quant",)),
        K("lora_*", "unsupported", why="an option of adapters"),
        Joint("loggers", (
            K("report_to", "equivalent", default="none", other=["wandb"]),
            K("wandb_project", "equivalent", other="mine"),
            K("run_name", "equivalent", other="mine")), meaning.loggers),
        Joint("memory", (), meaning.memory),
        K("seed", to="run.seed", default=42, other=7),
        K("data_seed", to="data.seed", other=7),
        K("generation_kwargs.*", "unsupported", why="further sampling parameters"),
        Joint("variables of the template", (K("chat_template_kwargs.*", "equivalent"),),
              lambda m: common.template_kwargs(m, "chat_template_kwargs.*")),
        Joint("turns", (
            K("max_tool_calling_iterations", "equivalent", other=4),
            K("tools", "equivalent", other="[search]"),
            K("rollout_func", "equivalent", other="rollout"),
            K("environment_factory", "equivalent", other="Game")), named.turns),
        K("disable_dropout", "automatic", why="the decoder has no dropout"),
        Joint("router_aux_loss_coef", (
            K("router_aux_loss_coef", "equivalent", default=Since(("0.17", None), ("1.6", 0.001), ("1.14", None))),), meaning.routers),
        K("formatting_func", "ask", why="write the rows as it makes them", also=("data_collator",)),
        K("ref_model", "ask", fine=("None",), why="name it in reference.path"),
        K("compute_loss_func", "unsupported", fine=("None",), refuse=True, why="a loss of its own: algorithm.policy_loss (docs/guides/extend.md)"),
        K("optimizers", "ask", why="an optax factory in optimizer.name"),
        *(K(name, "unsupported", refuse=True, why=SUPERVISED) for name in (
            "packing", "max_length", "max_seq_length", "assistant_only_loss", "completion_only_loss", "desirable_weight", "lmbda",
            "label_smoothing", "rpo_alpha", "precompute_ref_log_probs", "missing_eos_penalty")),
        Joint("dtype of the reference", (), meaning.reference_dtype),
        *(K(name, kind, why=why, also=tuple(also), fine=(None, False, [], {}, "no") if kind == "unsupported" else ()) for kind, rows in (
            ("automatic", AUTOMATIC), ("inert", INERT), ("unsupported", LACKS)) for name, why, *also in rows),
    ),
)
