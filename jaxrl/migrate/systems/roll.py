"""ROLL's RLVR pipeline (roll_jobs.py has its SFT, DPO and distillation): what its keys mean here.

Read from its code and example configs at the tags v0.1.0, v0.1.1, v0.1.3, v0.2.0, v0.2.1, v0.3.0. A batch is counted in
prompts; a mini-batch is sequences per device x accumulation x data-parallel ranks.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.jobs import EPISODES, Job
from jaxrl.migrate.jobs import EVAL as EVAL_MODE
from jaxrl.migrate.systems import images_meaning
from jaxrl.migrate.systems import roll_layout as places_
from jaxrl.migrate.systems import roll_meaning as meaning
from jaxrl.migrate.systems import roll_rewards_meaning as scores
from jaxrl.migrate.systems.roll_layout import (
         ARGS,
         CONFIG,
         CRITIC,
         DATA,
         INFER,
         MEGATRON,
         PACKING,
         PACKS,
         REF,
         SAMPLE,
         STRATEGY,
         TRAIN,
         ULYSSES,
         VALID,
         WORKER,
)
from jaxrl.migrate.table import Joint, Key, Since, Table

K = Key
GAE, KL_REWARD, KL_LOSS = {"adv_estimator": "gae"}, {"add_token_level_kl": True}, {"use_kl_loss": True, "kl_loss_coef": 0.001}
EIGHT = {TRAIN + "device_mapping": "list(range(0,8))", "rollout_batch_size": 128, "num_return_sequences_in_group": 8,
         TRAIN + ARGS + "gradient_accumulation_steps": 16}
MEGA = {**EIGHT, STRATEGY: "megatron_train"}
GROUPS = {"adv_estimator": "reinforce", "num_return_sequences_in_group": 8}
BY_LOAD = {**MEGA, PACKS: True, PACKING + "algorithm": "load_balance", PACKING + "max_packed_sequence_length_train": 30000,
           PACKING + "max_packed_sequence_length_forward": 40000}
EVAL, LORA = {VALID + DATA + "file_name": ["b.jsonl"]}, {TRAIN + "model_args.lora_target": "all-linear"}
PG = {WORKER: "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"}
SEES = {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}
IS = {"train_infer_correction.is_weight.enabled": True}
FILTER = "rewards.*.query_filter_config."
SGLANG = {INFER + "strategy_args.strategy_name": "sglang"}
CRITIC_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps")



def packing(scored: bool) -> tuple[Key, ...]:
    """Returns the rows of the keys that pack sequences in Megatron's micro-batches. scored: whether the job scores old
    log-probs, for which there is max_packed_sequence_length_forward."""
    keys = {PACKS: (False, True), PACKING + "algorithm": ("none", "load_balance"),
            PACKING + "max_packed_sequence_length_train": (None, 50000), PACKING + "max_packed_sequence_length_forward": (None, 50000)}
    return tuple(K(n, "equivalent", default=d, other=o, beside={k: v for k, v in BY_LOAD.items() if k != n}) for n, (d, o) in keys.items()
                 if scored or not n.endswith("forward"))


SHORT = "ROLL leaves out prompts of up to 5 tokens, too"
AUTOMATIC = (
    ("rpc_timeout", "rollout.timeout_seconds and launch.wait_seconds", ()),
    ("system_envs.**", "set variables of the environment where you start it", ()),
    ("checkpoint_config.*", "a checkpoint is whole; checkpoint.upload names another place", ()),
    ("logging_dir", "logs, rollouts and profiles are below run.dir", (
        "base_dir", "rollout_dump_dir", "save_logging_board_dir", "profiler_output_dir", "otlp_output_dir",
                                               "length_profiler_dir")),
    ("logging_steps", "every step is logged, lengths and rewards too", ("report_length_and_rewards",)),
    ("profiler_timeline", "profile.steps", ("profiler_memory",)),
    ("model_download_type", "models are of the Hugging Face hub or a folder", ()),
    ("model_update_buffer_size_mb", "rollout.vllm.chunk_mb", ()),
    ("transfer_backend.**", "rollout.vllm.transport", ()),
    ("is_offload_states", "colocated engines sleep during the update", ("is_offload_optimizer_states_in_train_step", "offload_nccl")),
    ("num_nodes", "counted from the devices", ()),
    ("local_rank", "processes find each other (launch.hosts)", ()),
    ("alive_check_interval", "launch.heartbeat_seconds", ()),
    ("generate_opt_level", "requests are asynchronous", ()),
    ("is_num_return_sequences_expand", "every completion is a request of its own", ()),
    ("router_args.**", "requests go to the server that has fewest", ()),
    ("is_use_additional_prompts", "a step asks for as many prompts as it lacks", ("max_additional_running_prompts",)),
    ("val_batch_size", "all rows are asked at once, within what the engine takes", ()),
    ("enable_reference", "a reference is loaded where a KL asks for it", ()),
    ("lora_rank", "a variable of the file, used where it is named", ("lora_alpha", "lora_target", "pg_variant", "eval_file_name")),
    ("tag_to_template.*", "the tokenizer's own template; model.chat_template takes another", ()),
    (TRAIN + "model_args.attn_implementation", "kernels are the platform's", (TRAIN + "model_args.flash_attn",)),
    (TRAIN + "model_args.**", "no counterpart is needed", ()),
    (PACKING + "*", "micro-batches are packed by the order of lengths", ()),
    (TRAIN + "use_remove_padding", "rows are packed", ()),
    (TRAIN + ARGS + "num_train_epochs", "max_steps ends the run", (TRAIN + ARGS + "max_steps",)),
    (TRAIN + ARGS + "**", "no counterpart is needed", ()),
    (TRAIN + DATA + "**", "rows are read and mixed by data.sources", ()),
    (TRAIN + CONFIG + "virtual_pipeline_model_parallel_size", "there is no schedule of stages to choose", ()),
    (TRAIN + CONFIG + "sequence_parallel", "between layers tokens are split over mesh.tp", ()),
    (TRAIN + CONFIG + "moe_layer_recompute", "an expert's hidden layer is always computed again", ()),
    (TRAIN + CONFIG + "moe_token_dispatcher_type", "one exchange, all-gather and reduce-scatter over mesh.ep", ()),
    (TRAIN + CONFIG + "moe_grouped_gemm", "experts are always computed as sorted blocks", ()),
    (TRAIN + CONFIG + "moe_shared_expert_overlap", "XLA schedules it", (TRAIN + CONFIG + "overlap_grad_reduce",)),
    (TRAIN + CONFIG + "**", "the mesh and XLA decide", ()),
    (TRAIN + "**", "no counterpart is needed", ()),
    (INFER + "infer_batch_size", "the engine batches requests by itself", ()),
    (INFER + CONFIG + "load_format", "servers start with dummy weights", ()),
    (INFER + CONFIG + "sleep_level", "colocated engines sleep during the update", ()),
    (INFER + SAMPLE + "num_return_sequences", "num_return_sequences_in_group overwrites it", ()),
    (INFER + SAMPLE + "**", "no counterpart is needed", ()),
    (INFER + "**", "no counterpart is needed", ()),
    (REF + "**", "the reference is sharded and scored as the policy", ()),
    (CRITIC + "**", "the critic is sharded and scored as the policy", ()),
    (VALID + "**", "evaluation asks the same engine", ()),
    ("deepspeed_zero*.**", "no DeepSpeed: mesh.fsdp shards parameters, gradients and optimizer state", ("deepspeed_zero*",
      "deepspeed_zero", "deepspeed_zero.**")),
    ("reward_system_config.**", "rewards get the text without special tokens", ()),
)
NEVER = ("nothing reads it", ("use_reward_scaling", "use_reward_norm", "add_len_reward", "mask_type", "balance_length", "minibatch_data_iter_num",
                             "use_policy_loss_type", "val_greedy", "val_n_sample", "l2", "use_topr_loss"))
OTHER = (
    ("user_defined_rollout_loop_cls", "a loop of its own in Python: write an episode (docs/guides/environments.md)", ()),
    ("max_actions_per_traj", "of the agentic pipeline: write an episode (docs/guides/environments.md)", ("max_tokens_per_step",)),
    ("distill_**", "of its distillation pipeline", ()),
    (TRAIN + DATA + "video_*", "a job with videos or sound is not translated", (TRAIN + DATA + "audio_*", TRAIN + DATA + "custom_data_kwargs_func")),
    ("beta", "of its DPO pipeline", ("label_smoothing",)),
)

JOBS = (
    Job("rollouts of the agentic pipeline without training", EVAL_MODE, r"\bstart_agentic_rollout\w*"),
    Job("distillation in the agentic pipeline", EPISODES, keys=("pure_opd_pipeline_type=agentic",)),
    Job("the agentic pipeline", command=r"\bstart_agentic\w*", keys=("train_env_manager.**", "val_env_manager.**"),
        table="roll_agentic:AGENTIC"),
    Job("environments without a job, which other files include", EPISODES, keys=(
        "custom_envs.**", "env_manager.**", "env_config.**", "custom_env.**", "env_manager_cls"), file=True),
    Job("on-policy distillation", command=r"\bstart_onpolicy_distill\w*", keys=("student_train.**", "student_infer.**", "use_opd", "is_pure_opd"),
        table="roll_jobs:ON_POLICY"),
    Job("distillation", command=r"\bstart_distill_pipeline\w*", keys=("student.**", "kd_objective", "distill_loss_weight"),
        table="roll_jobs:DISTILL"),
    Job("distillation of a model of images and text", "run.recipe=distill of text", r"\bstart_distill_vl\w*"),
    Job("supervised fine-tuning", command=r"\bstart_sft\w*", keys=("sft_train.**",), table="roll_jobs:SFT"),
    Job("preference training (DPO)", command=r"\bstart_dpo\w*", keys=("chosen_key", "rejected_key", "ipo"), table="roll_jobs:PREFERENCE"),
)

TABLE = Table(
    name="roll", title="ROLL", command=r"start_\w*pipeline|roll[./]", versions=("0.1.0", "0.1.1", "0.1.3", "0.2.0", "0.2.1", "0.3.0"),
    jobs=JOBS,
    differs=(
        "the gradient does not depend on micro-batches and the number of GPUs",
        "weight decay spares norms, biases and other vectors; with FSDP2 and DeepSpeed ROLL's does not",
        "the order of the data is drawn from another generator",
        SHORT,
    ),
    rules=(
        Joint("lengths", (
            K("prompt_length", "equivalent", default=1024, other=700),
            K("response_length", "equivalent", other=700),
            K("sequence_length", "equivalent", other=3000),
            K("val_prompt_length", "equivalent", other=500, beside={"val_sequence_length": 4000}),
            K("val_sequence_length", "equivalent", other=5000, beside={"val_prompt_length": 500}),
            K(INFER + SAMPLE + "max_new_tokens", "equivalent"),
            K(VALID + SAMPLE + "max_new_tokens", "equivalent")), meaning.lengths),
        Joint("batch", (
            K("rollout_batch_size", "equivalent", default=128, other=64),
            K("num_return_sequences_in_group", "equivalent", default=1, other=8),
            K("ppo_epochs", "equivalent", default=1, other=2),
            K(TRAIN + ARGS + "per_device_train_batch_size", "equivalent", default=8, other=4),
            K(TRAIN + ARGS + "gradient_accumulation_steps", "equivalent", default=1, other=8, beside=EIGHT)), meaning.batch),
        Joint("data", (
            K(TRAIN + DATA + "file_name", "equivalent", other=["a.jsonl", "b.jsonl"]),
            K(TRAIN + DATA + "prompt", "equivalent", other="instruction"),
            K(TRAIN + DATA + "messages", "equivalent", other="chat"),
            K(TRAIN + DATA + "template", "equivalent", default="native"),
            K("global_template", "equivalent")), meaning.data),
        Joint("advantage", (
            K("adv_estimator", "equivalent", default="gae", other="grpo", beside={"num_return_sequences_in_group": 8}),
            K("norm_mean_type", "equivalent", other="group", beside=GROUPS),
            K("norm_std_type", "equivalent", other="batch", beside=GROUPS),
            *(K(n, "equivalent", default=d) for n, d in (("reward_norm", None), ("reward_shift", False), ("reward_scale", False))),
            K("reward_clip", "equivalent", other=10, beside=GROUPS),
            K("gamma", "equivalent", default=1, other=0.99),
            K("lambd", "equivalent", default=0.95, other=0.9),
            K("whiten_advantages", "equivalent", default=False, other=True),
            K("advantage_clip", "equivalent", other=2.0),
            K("value_clip", "equivalent", other=0.5),
            K("critic_warmup", "equivalent", default=0, other=5),
            K("reward_pretrain", "equivalent", other="another/critic"),
            K(CRITIC + "model_args.model_name_or_path", "equivalent", other="another/critic"),
            K(CRITIC + ARGS + "learning_rate", "equivalent", default=5e-5, other=1e-5),
            K(CRITIC + ARGS + "weight_decay", "equivalent", default=0.0, other=0.1),
            *(K(CRITIC + ARGS + n, "equivalent", default=d, other=o, beside=EIGHT) for n, d, o in zip(CRITIC_KEYS, (8, 1), (4, 2), strict=True)),
            *(K(CRITIC + CONFIG + n, "equivalent", default=1, other=2, beside={
                **EIGHT, CRITIC + ARGS + "gradient_accumulation_steps": 16}) for n in (
                "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")),
            K(CRITIC + "model_args.ulysses_size", "equivalent", default=1, other=2, beside={
                **EIGHT, CRITIC + ARGS + "gradient_accumulation_steps": 16}),
            K(CRITIC + "device_mapping", "equivalent", other="list(range(0,4))",
              beside={**EIGHT, CRITIC + ARGS + "gradient_accumulation_steps": 16})), meaning.advantage),
        K("whiten_rewards", "unsupported", fine=(False,), why="rewards of tokens are not whitened; reward.norm_mean and norm_std act on completions"),
        Joint("loss", (
            K("loss_agg_mode", "equivalent", default=Since(("0.1.0", "seq-mean-token-sum"), ("0.1.1", "seq-mean-token-mean")), other="token-mean"),
            K("importance_sampling", "equivalent", default="token", other="seq"),
            K("pg_clip", "equivalent", default=0.2, other=0.3),
            K("use_pg_clip_range", "equivalent", default=False, other=True, beside={"pg_clip_high": 0.28}),
            K("pg_clip_low", "equivalent", default=0.2, other=0.1, beside={"use_pg_clip_range": True}),
            K("pg_clip_high", "equivalent", default=0.2, other=0.28, beside={"use_pg_clip_range": True}),
            K("dual_clip_loss", "equivalent", default=False, other=True),
            K("entropy_loss_coef", "equivalent", default=0, other=0.01),
            K(WORKER, "equivalent", other=PG[WORKER]),
            K(TRAIN + "pg_variant", "equivalent", other="cispo", beside=PG)), meaning.loss),
        Joint("KL", (
            K("use_kl_loss", "equivalent", default=False, other=True, beside={"kl_loss_coef": 0.001}),
            K("kl_loss_coef", "equivalent", default=0, other=0.01, beside={"use_kl_loss": True}),
            K("add_token_level_kl", "equivalent", default=False, other=True),
            K("init_kl_coef", "equivalent", default=0.2, other=0.1, beside=KL_REWARD),
            K("kl_penalty", "equivalent", default="kl", other="mse", beside=KL_REWARD),
            K("target_kl", "equivalent"),
            K("rl_loss_coef", "equivalent", default=1.0)), meaning.kl),
        K("kl_horizon", "inert", why="read by the adaptive controller alone", also=("initial_kl_coef",)),
        Joint("masks", (
            K("max_len_mask", "equivalent", default=False, other=True),
            K("difficulty_mask", "equivalent", default=False, other=True),
            K("difficulty_low_threshold", "equivalent", default=0.0, other=0.1, beside={"difficulty_mask": True}),
            K("difficulty_high_threshold", "equivalent", default=1.0, other=0.9, beside={"difficulty_mask": True}),
            K(FILTER + "type", "equivalent"),
            K(FILTER + "filter_args.*", "equivalent")), meaning.masks),
        K("rewards.*.response_filter_config.**", "inert", why="its filter keeps every completion"),
        K("error_max_len_clip", "unsupported", fine=(False,),
          why="wrong completions are not masked by their length; reward.overlong_buffer shapes rewards"),
        K("error_max_len_threshold", "inert", why="read with error_max_len_clip alone"),
        K("difficulty_loss_weight", "unsupported", fine=(False,), why="completions weigh the same whatever the row's difficulty"),
        K("length_loss_weight", "unsupported", fine=(False,), why="completions are not weighed by their length"),
        K("postive_loss_coef", "unsupported", fine=(0, 0.0),
          why="its loss of right completions is weighed by advantages; algorithm.positive_nll_coef is not"),
        K("use_topr_neg_loss_coef", "unsupported", fine=(0, 0.0), refuse=True, why="the loss of TOPR"),
        K("dataset_filter.*", "unsupported", fine=(0,), why="filter the rows into a file of their own"),
        Joint("mismatch", (
            K("train_infer_correction.is_weight.enabled", "equivalent", default=False, other=True),
            K("train_infer_correction.is_weight.weight_type", "equivalent", default="token", other="sequence", beside=IS),
            K("train_infer_correction.is_weight.upper_bound", "equivalent", default=1.2, other=2.0, beside=IS),
            K("train_infer_correction.filters", "equivalent"),
            K("enable_old_logprobs_recompute", "equivalent", default=False, other=True),
            K("force_disable_old_logprobs_recompute", "equivalent", default=False)), meaning.mismatch),
        K("train_infer_correction.**", "inert", why="weights are constants of the loss"),
        Joint("sampling", (
            K(INFER + SAMPLE + "temperature", "equivalent", default=0.95, other=1.0),
            K(INFER + SAMPLE + "top_p", "equivalent", default=0.7, other=1.0),
            K(INFER + SAMPLE + "top_k", "equivalent", default=50, other=100),
            K(INFER + SAMPLE + "repetition_penalty", "equivalent", default=1.0, other=1.1),
            K(INFER + SAMPLE + "do_sample", "equivalent", default=True),
            K(INFER + SAMPLE + "num_beams", "equivalent", default=1),
            K(INFER + SAMPLE + "stop_strings", "equivalent", other=["</answer>"])), meaning.sampling),
        K(INFER + SAMPLE + "include_stop_str_in_output", to="rollout.keep_stop", other=False),
        Joint("optimizer", (
            K(TRAIN + ARGS + "learning_rate", "equivalent", default=5e-5, other=1e-6),
            K(TRAIN + ARGS + "adam_beta1", "equivalent", default=0.9, other=0.8),
            K(TRAIN + ARGS + "adam_beta2", "equivalent", default=0.999, other=0.95),
            K(TRAIN + ARGS + "lr_scheduler_type", "equivalent", default="linear", other="constant"),
            K(TRAIN + ARGS + "warmup_steps", "equivalent", default=0, other=20),
            K(TRAIN + ARGS + "warmup_ratio", "equivalent", default=Since(("0.1.0", 0.03), ("0.1.1", 0.0)), other=0.1)), meaning.optimizer),
        Joint("critic's optimizer", (
            K(CRITIC + ARGS + "adam_beta1", "equivalent", default=0.9, other=0.8),
            K(CRITIC + ARGS + "adam_beta2", "equivalent", default=0.999, other=0.95),
            K(CRITIC + ARGS + "lr_scheduler_type", "equivalent", default="linear", other="constant"),
            K(CRITIC + ARGS + "warmup_steps", "equivalent", default=0, other=20),
            K(CRITIC + ARGS + "warmup_ratio", "equivalent", default=Since(("0.1.0", 0.03), ("0.1.1", 0.0)), other=0.1)),
            meaning.critics_optimizer),
        K(TRAIN + ARGS + "weight_decay", to="optimizer.weight_decay", default=0.0, other=0.1),
        K("max_grad_norm", to="optimizer.max_grad_norm", default=1.0, other=0.5),
        Joint("layout", (
            K(TRAIN + "device_mapping", "equivalent", other="list(range(0,8))", beside={"rollout_batch_size": 64}),
            K(INFER + "device_mapping", "equivalent", other="list(range(0,8))"),
            K("num_gpus_per_node", "equivalent", default=8, other=4,
              beside={TRAIN + "device_mapping": "list(range(0,8))", INFER + "device_mapping": "list(range(0,8))", "rollout_batch_size": 64}),
            K(STRATEGY, "equivalent", default="fsdp2_train"),
            K(MEGATRON[0], "equivalent", default=1, other=2, beside=MEGA),
            K(MEGATRON[1], "equivalent", default=1, other=2, beside=MEGA),
            K(MEGATRON[2], "equivalent", default=1, other=2, beside=MEGA),
            K(MEGATRON[3], "equivalent", default=1, other=2, beside=MEGA),
            K(ULYSSES, "equivalent", default=1, other=2, beside=EIGHT),
            K(INFER + "strategy_args.strategy_name", "equivalent", default="vllm"),
            K(INFER + CONFIG + "tensor_parallel_size", "equivalent", other=2),
            K(INFER + "num_gpus_per_worker", "equivalent", default=1, other=2)), places_.layout),
        K(INFER + CONFIG + "pipeline_parallel_size", "unsupported", fine=(1,), why="servers split a model by tensor_parallel"),
        K(TRAIN + "model_update_frequency", to="rollout.sync_every", default=1, other=4),
        Joint("staleness", (K("async_generation_ratio", "equivalent", default=0, other=2, beside={
            TRAIN + "device_mapping": "list(range(0,4))", INFER + "device_mapping": "[4,5,6,7]", "rollout_batch_size": 64}),), places_.ahead),
        Joint("master weights", (K(TRAIN + CONFIG + "param_dtype", "equivalent", other="bf16"),), places_.master_weights),
        Joint("memory", (
            K(TRAIN + "use_dynamic_batching_in_train", "equivalent", default=False, other=True,
              beside={TRAIN + "max_tokens_per_microbatch_in_train": 30000}),
            K(TRAIN + "max_tokens_per_microbatch_in_train", "equivalent", default=0, other=9000,
              beside={TRAIN + "use_dynamic_batching_in_train": True}),
            K(TRAIN + "infer_batch_size", "equivalent", default=16, other=4),
            K(TRAIN + "use_dynamic_batching_in_infer", "equivalent", default=False, other=True,
              beside={TRAIN + "max_tokens_per_microbatch_in_infer": 30000}),
            K(TRAIN + "max_tokens_per_microbatch_in_infer", "equivalent", other=9000,
              beside={TRAIN + "use_dynamic_batching_in_infer": True}),
            *packing(True),
            K(TRAIN + "strategy_args.strategy_config", "equivalent", other="${deepspeed_zero3_cpuoffload}"),
            K(TRAIN + CONFIG + "offload_policy", "equivalent", default=False, other=True),
            K(TRAIN + CONFIG + "zero_optimization.**", "equivalent")), places_.memory),
        Joint("recomputation", (
            K(TRAIN + "model_args.disable_gradient_checkpointing", "equivalent", default=False, other=True),
            K(TRAIN + CONFIG + "recompute_granularity", "equivalent", other="full", beside={STRATEGY: "megatron_train"})), places_.checkpointing),
        Joint("model", (
            K("pretrain", "equivalent", other="another/model"),
            K(TRAIN + "model_args.model_name_or_path", "equivalent", other="another/model")), meaning.model),
        Joint("dtypes", (
            K(TRAIN + "model_args.dtype", "equivalent", default="bf16", other="fp32", beside=MEGA),
            K(CRITIC + "model_args.dtype", "equivalent", default="bf16"),
            K(CRITIC + "strategy_args.strategy_name", "equivalent", default="deepspeed_train"),
            K(CRITIC + CONFIG + "param_dtype", "equivalent")), places_.compute_dtypes),
        K(INFER + "model_args.dtype", "equivalent", "rollout.dtype", lambda d: common.DTYPES.get(str(d), str(d)), default="bf16", other="fp16"),
        K(TRAIN + "model_args.moe_aux_loss_coef", to="train.router_balance", other=0.01, also=(TRAIN + CONFIG + "moe_aux_loss_coeff",)),
        K(TRAIN + "model_args.model_config_kwargs.**", "ask", why="write it into model.config"),
        Joint("frozen parameters", (K(TRAIN + "model_args.freeze_module_prefix", "equivalent", other="vision_model"),), images_meaning.roll_frozen),
        Joint("images", (
            K(TRAIN + DATA + "image_max_pixels", "equivalent", default=4096 * 4096, other=1000000),
            K(TRAIN + DATA + "image_min_pixels", "equivalent", default=4 * 28 * 28, other=28 * 28, beside=SEES),
            K(TRAIN + DATA + "image_folder", "equivalent", other="/pictures", beside={TRAIN + DATA + "image_max_pixels": 1000000}),
            K(TRAIN + "model_args.max_pixels", "equivalent", default=1024 * 1024),
            K(TRAIN + "model_args.min_pixels", "equivalent", default=56 * 56),
            K(VALID + DATA + "image_max_pixels", "equivalent"),
            K(VALID + DATA + "image_min_pixels", "equivalent")), images_meaning.roll),
        Joint("adapters", (
            K(TRAIN + "model_args.lora_target", "equivalent", other="q_proj,k_proj"),
            K(TRAIN + "model_args.lora_rank", "equivalent", default=8, other=16, beside=LORA),
            K(TRAIN + "model_args.lora_alpha", "equivalent", other=64, beside=LORA),
            K(TRAIN + "model_args.lora_dropout", "equivalent", default=0.0),
            K(TRAIN + "model_args.additional_target", "equivalent", other="lm_head", beside=LORA),
            K(TRAIN + "model_args.adapter_name_or_path", "equivalent", other="a/b")), meaning.adapters),
        Joint("evaluation", (
            K(VALID + DATA + "file_name", "equivalent", other="c.jsonl", also=(VALID + DATA + "eval_file_name",)),
            K("eval_steps", "equivalent", default=10, other=5, beside=EVAL),
            K(VALID + SAMPLE + "temperature", "equivalent", default=0.95, other=0.6, beside=EVAL),
            K(VALID + SAMPLE + "top_p", "equivalent", default=0.7, other=0.6, beside=EVAL),
            K(VALID + SAMPLE + "top_k", "equivalent", default=50, other=20, beside=EVAL),
            K(VALID + SAMPLE + "repetition_penalty", "equivalent", default=1.0, other=1.1, beside=EVAL),
            K(VALID + SAMPLE + "do_sample", "equivalent", default=True, other=False, beside=EVAL),
            K(VALID + SAMPLE + "num_beams", "equivalent", default=1),
            K(VALID + SAMPLE + "num_return_sequences", "equivalent", default=1, other=4, beside=EVAL)), meaning.evaluation),
        K(VALID + "eval_steps", "inert", why="the eval_steps above it counts"),
        Joint("reward", (
            K("rewards.*.worker_cls", "equivalent"),
            K("rewards.*.tag_included", "equivalent"),
            K("rewards.*.reward_type", "equivalent"),
            K("rewards.*.judge_*", "equivalent"),
            K(TRAIN + DATA + "domain_interleave_probs.*", "equivalent")), scores.reward),
        K("rewards.*.response_length_penalty_coef", "unsupported", fine=(0, 0.0), why="write it into the reward's function"),
        K("rewards.*.format_pattern", "ask", why="set reward.format_pattern and add format to reward.functions"),
        K("rewards.*.**", "automatic", why="rewards run in worker processes (reward.workers)"),
        K("reward_model.**", "ask", fine=(False, 1, "bf16"), why="a judge of ours is reward.judge, with GPUs of its own in reward.judge.devices"),
        K("max_steps", to="train.steps", default=500, other=100),
        K("seed", to="run.seed", default=42, other=7),
        Joint("places", (
            K("output_dir", "equivalent", other="runs/x"),
            K("checkpoint_config.output_dir", "equivalent", other="runs/y"),
            K("save_steps", "equivalent", default=50, other=20),
            K("max_ckpt_to_keep", "equivalent", default=0, other=2),
            K("resume_from_checkpoint", "equivalent", default=False, other=True)), meaning.places),
        Joint("loggers", (
            K("track_with", "equivalent", default="tensorboard", other="wandb"),
            K("exp_name", "equivalent", other="mine"),
            K("tracker_kwargs.project", "equivalent", other="mine"),
            K("tracker_kwargs.**", "automatic", why="metrics are below run.dir")), meaning.loggers),
        Joint("context", (K(INFER + CONFIG + "max_model_len", "equivalent", other=2000),), places_.context),
        Joint("the engine's memory", (
            K(INFER + CONFIG + "gpu_memory_utilization", "equivalent", other=0.6),
            K(INFER + CONFIG + "mem_fraction_static", "equivalent", other=0.6, beside=SGLANG)), places_.engine_memory),
        K("max_running_requests", "equivalent", "rollout.vllm.max_requests", default=128, other=64),
        K(INFER + CONFIG + "max_num_seqs", "equivalent", "rollout.vllm.max_running", other=64),
        K(INFER + CONFIG + "enable_prefix_caching", to="rollout.vllm.prefix_caching", other=False),
        K(INFER + CONFIG + "enable_chunked_prefill", to="rollout.vllm.chunked_prefill", other=False),
        K("rollout_mock.enable", "unsupported", fine=(False,), why="run.mode=parity and run.recipe=replay compare with recorded rollouts"),
        K("rollout_mock.*", "inert", why="read with rollout_mock.enable alone"),
        K("use_opd", "unsupported", fine=(False,), refuse=True, why="a teacher's KL in the advantage: run.recipe=distill", also=("is_pure_opd",)),
        K(TRAIN + CONFIG + "fp8", "unsupported", fine=(False,), why="matrix products in fp8: train.matmul, by hand"),
        K(TRAIN + CONFIG + "fp8_*", "inert", why="read with fp8 alone"),
        K(TRAIN + CONFIG + "rotary_scaling*", "ask", why="positions are of the model's config.json: write it into model.config",
          also=(TRAIN + CONFIG + "yarn_*", TRAIN + CONFIG + "rope_parameters")),
        Joint("replayed experts", (K(TRAIN + "router_replay.mode", "equivalent", default="disable", other="R3", beside=MEGA),), places_.routes),
        K(TRAIN + "mtp_training_mode", "unsupported", fine=("disabled",), why="multi-token prediction is not trained"),
        *(K(n, "inert", why=NEVER[0]) for n in NEVER[1]),
        *(K(n, "unsupported", refuse=True, why=why, also=also) for n, why, also in OTHER),
        Joint("dtype of the reference", (
            K(REF + "model_args.dtype", "equivalent", default="bf16", other="fp32", beside=KL_REWARD),
            K(REF + "strategy_args.strategy_name", "equivalent", default="hf_infer"),
            K(REF + CONFIG + "param_dtype", "equivalent")), places_.reference_dtype),
        Joint("further options of vLLM", (
            K(INFER + CONFIG + "limit_mm_per_prompt.*", "equivalent"), K(INFER + CONFIG + "*", "equivalent")), places_.engine_options),
        *(K(n, "automatic", why=why, also=also) for n, why, also in AUTOMATIC),
    ),
)
