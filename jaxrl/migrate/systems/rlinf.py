"""RLinf's reasoning pipeline (its robots, images and agents are refused): what its keys mean here.

Read from its code and example configs at the tags v0.1 to v0.3 and from its document of September 2025 (`docs`). Its
configs are whole: few keys have a default in its code.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.jobs import EVAL, Job
from jaxrl.migrate.systems import images_meaning
from jaxrl.migrate.systems import rlinf_meaning as meaning
from jaxrl.migrate.systems.rlinf_meaning import (
    ACTOR,
    ALGO,
    CRITIC,
    DATA,
    FSDP,
    MODEL,
    OPTIM,
    PLACEMENT,
    REWARD,
    ROLLOUT,
    RUNNER,
    SAMPLE,
    SCHED,
)
from jaxrl.migrate.table import Joint, Key, Since, Table

K = Key
GAE, REINPP, FIX = {ALGO + "adv_type": "gae"}, {ALGO + "adv_type": "reinpp"}, {ALGO + "importance_sampling_fix": True}
ON_FSDP, DYNAMIC, LINEAR = {ACTOR + "training_backend": "fsdp"}, {RUNNER + "enable_dynamic_batch_size": True}, {SCHED + "lr_decay_style": "linear"}
CRITIC_SCHED = CRITIC + "lr_sched."
CRITIC_LINEAR = {**GAE, CRITIC_SCHED + "lr_decay_style": "linear"}
COSINE = {**ON_FSDP, OPTIM + "lr_scheduler": "cosine"}
HOST = {ACTOR + "offload_optimizer": True, ACTOR + "offload_weight": True}

AUTOMATIC = (
    ("cluster.auto_scheduler", "GPUs stay with their roles (mesh.roles, rollout.placement): the same steps, without its gain in time", (
        "cluster.use_pre_process_policy", "cluster.use_wait_before_last_iter_policy")),
    ("cluster.**", "no Ray: jax.distributed and rollout.servers", ()),
    (RUNNER + "logger.**", "metrics are below run.dir", (RUNNER + "logger.path",)),
    (ALGO + "rollout_batch_size_per_gpu", "the engine batches requests by itself", (ALGO + "val_rollout_batch_size_per_gpu",)),
    (ALGO + "shuffle_rollout", "mini-batches are of shuffled prompts", ()),
    (ROLLOUT + "group_name", "workers have no names", (ACTOR + "group_name", "inference.group_name", CRITIC + "group_name",
                                                         REWARD + "group_name")),
    (ROLLOUT + "return_logprobs", "log-probs of what was sampled are always kept", ()),
    (ROLLOUT + "model_arch", "the model's config says it", (ROLLOUT + "model.model_type", MODEL + "model_type")),
    (ROLLOUT + "distributed_executor_backend", "vLLM's own choice", (ROLLOUT + "attention_backend", ROLLOUT + "disable_log_stats",
     ROLLOUT + "use_torch_compile", ROLLOUT + "torch_compile_max_bs", ROLLOUT + "cuda_graph_max_bs")),
    (ROLLOUT + "sglang_decode_log_interval", "the engine is vLLM", ()),
    (ROLLOUT + "detokenize", "completions are tokens", (ROLLOUT + "padding", ROLLOUT + "eos")),
    (ROLLOUT + "print_outputs", "log.print_samples", ()),
    (ROLLOUT + "validate_weight", "rollout.verify_weights", (ROLLOUT + "validate_save_dir", ROLLOUT + "validate_weight_first_sync")),
    (ROLLOUT + "weight_reload", "rollout.vllm.transport", ()),
    (ROLLOUT + "sglang.**", "the engine is vLLM", ()),
    (ROLLOUT + "**", "vLLM's own choice", ()),
    (DATA + "num_workers", "data.workers", (DATA + "process_workers", DATA + "process_batch_size")),
    (DATA + "validation_shuffle", "evaluation takes all rows", (DATA + "val_rollout_batch_size",)),
    (DATA + "**", "no counterpart is needed", ()),
    (ACTOR + "megatron.**", "one backend, jit over a mesh; weights are read from the Hugging Face folder", (ACTOR + "mcore_gpt",
      ACTOR + "spec_name")),
    (ACTOR + "offload_grad", "gradients live within an update", ()),
    (ACTOR + "enable_dp_load_balance", "rows are packed evenly", ()),
    (ACTOR + "calculate_flops", "telemetry counts them", ()),
    (ACTOR + "global_batch_size", "n_minibatches overwrites it", (ACTOR + "micro_batch_size",)),
    (MODEL + "sequence_parallel", "between layers tokens are split over mesh.tp", ()),
    (MODEL + "recompute_method", "model.remat is by layers", (MODEL + "recompute_num_layers",)),
    (MODEL + "seq_length", "data.max_prompt_tokens and rollout.max_new_tokens", (MODEL + "encoder_seq_length",)),
    (MODEL + "**", "the model's config says it, and kernels are the platform's", ()),
    (OPTIM + "bf16", "actor.model.precision", (OPTIM + "fp16",)),
    (OPTIM + "loss_scale", "train.loss_scale adapts by itself", ()),
    (OPTIM + "**", "the mesh and XLA decide", ()),
    (SCHED + "max_lr", "actor.optim.lr", ()),
    (SCHED + "**", "no counterpart is needed", ()),
    (ACTOR + "tokenizer.use_fast", "tokenizers are fast where there is one", ()),
    (ACTOR + "tokenizer.padding_side", "rows are packed", ()),
    (FSDP + "**", "the mesh and XLA decide", ()),
    ("inference.**", "log-probs are computed by the trainer", ()),
    (CRITIC + "**", "the critic is sharded and scored as the policy", ()),
)
DTYPES = (  # of the trainer, and whether it recomputes
    K(FSDP + "gradient_checkpointing", "equivalent", default=False, other=True, beside=ON_FSDP),
    K(MODEL + "precision", "equivalent", default="bf16", other="fp16"),
    K(FSDP + "amp_autocast.enabled", "equivalent", other=True, beside={**ON_FSDP, FSDP + "amp_autocast.precision": "fp16"}),
    K(FSDP + "mixed_precision.param_dtype", "equivalent", other="fp16", beside=ON_FSDP),
    K(FSDP + "amp_autocast.precision", "equivalent", default="bf16", other="fp16",
      beside={**ON_FSDP, FSDP + "amp_autocast.enabled": True}, also=(FSDP + "amp.precision",)),
    K(FSDP + "amp.enabled", "equivalent", default=False, other=True, beside={**ON_FSDP, FSDP + "amp.precision": "fp16"}),
)
ROBOTS = "robots are not trained here, and a job with videos is not translated"

JOBS = (
    Job("supervised fine-tuning", keys=("runner.task_type=sft",), unless=(
        "env.**", MODEL + "action_dim", MODEL + "openpi.**"), table="rlinf_sft:SFT"),
    Job("supervised fine-tuning of robots", keys=("runner.task_type=sft",)),
    Job("evaluation alone", EVAL, keys=("runner.task_type=reasoning_eval",)),
)

TABLE = Table(
    name="rlinf", title="RLinf", command=r"main_grpo|rlinf|train_\w+\.py|main_\w+\.py", versions=("docs", "0.1", "0.2", "0.3"),
    required={"data.rollout_batch_size": 64, "algorithm.group_size": 8, "data.max_prompt_length": 512,
              "runner.seq_length": 2048, "actor.optim.lr": 2e-5},
    jobs=JOBS,
    differs=(
        "the gradient does not depend on micro-batches and the number of GPUs",
        "weight decay spares norms, biases and other vectors",
        "the order of the data is drawn from another generator",
    ),
    resolvers={"multiply": lambda a, b: a * b, "int_div": lambda a, b: a // b, "subtract": lambda a, b: a - b, "not": lambda a: not a,
               "torch.dtype": lambda name: name},
    rules=(
        *(K(n, "unsupported", refuse=True, why=ROBOTS, also=also) for n, also in (
            ("env.**", ("vla.**", "diffusion.**", "diffusers.**", FSDP + "vla.**", ALGO + "reward_type", ALGO + "logprob_type",
              ALGO + "entropy_type", ALGO + "num_group_envs")), (DATA + "video_*", ()),
            (MODEL + "num_action_chunks", (MODEL + "action_dim", MODEL + "unnorm_key", MODEL + "openpi.**", MODEL + "policy_setup")))),
        *(K(n, "unsupported", refuse=True, why="agents: write an episode (docs/guides/environments.md)") for n in ("agentloop.**",
          "tools.**", "server.**")),
        Joint("pipeline", (K(RUNNER + "task_type", "automatic", default="reasoning", why="RL of a language model"),), meaning.pipeline),
        Joint("batch", (
            K(DATA + "rollout_batch_size", "equivalent", other=32),
            K(ALGO + "group_size", "equivalent", other=16),
            K(ALGO + "n_minibatches", "equivalent", default=1, other=4)), meaning.batch),
        Joint("lengths", (
            K(DATA + "max_prompt_length", "equivalent", other=700),
            K(RUNNER + "seq_length", "equivalent", other=3000),
            K(SAMPLE + "max_new_tokens", "equivalent", other=500),
            K(DATA + "filter_prompt_by_length", "equivalent", default=False)), meaning.lengths),
        Joint("advantage", (
            K(ALGO + "adv_type", "equivalent", default="grpo", other="reinpp"),
            K(ALGO + "use_reinpp_baseline", "equivalent", default=False, other=True, beside=REINPP),
            K(ALGO + "normalize_advantages", "equivalent", default=True, other=False, beside=GAE),
            K(ALGO + "gamma", "equivalent", default=1.0, other=0.99, beside=GAE),
            K(ALGO + "gae_lambda", "equivalent", default=1.0, other=0.95, beside=GAE),
            K(ALGO + "value_cliprange", "equivalent", default=0.5, other=0.2, beside=GAE),
            K(ALGO + "critic_warmup_steps", "equivalent", default=0, other=5, beside=GAE),
            K(CRITIC + "optim.lr", "equivalent", default=1e-5, other=2e-5, beside=GAE)), meaning.advantage),
        K(CRITIC + "use_critic_model", "automatic", why="adv_type=gae has a critic"),
        Joint("loss", (
            K(ALGO + "loss_type", "equivalent", default="actor"),
            K(ALGO + "ratio_clip_eps", "equivalent", default=0.2, other=0.3),
            K(ALGO + "clip_ratio_low", "equivalent", other=0.1),
            K(ALGO + "clip_ratio_high", "equivalent", other=0.28),
            K(ALGO + "clip_ratio_c", "equivalent", other=2.0, default=Since(("docs", 3.0), ("0.2", None))),
            K(ALGO + "entropy_bonus", "equivalent", default=0.0, other=0.01, beside={ALGO + "calculate_entropy": True}),
            K(ALGO + "calculate_entropy", "equivalent", default=False, other=True, beside={ALGO + "entropy_bonus": 0.01}),
            K(ALGO + "loss_agg_func", "equivalent", default="token-mean", other="seq-mean-token-sum"),
            K(ALGO + "use_valid_token_scale", "equivalent", default=False, other=True)), meaning.loss),
        K(ALGO + "clip_log_ratio_min", "unsupported", why="log-ratios are not clipped", also=(ALGO + "clip_log_ratio_max",)),
        Joint("KL", (
            K(ALGO + "kl_beta", "equivalent", default=0.0, other=0.001),
            K(ALGO + "kl_penalty_type", "equivalent", default="low_var_kl", other="mse", beside={ALGO + "kl_beta": 0.001}),
            K(ALGO + "reinpp_kl_beta", "equivalent", default=0.0, other=0.001, beside=REINPP)), meaning.kl),
        Joint("mismatch", (
            K(ALGO + "importance_sampling_fix", "equivalent", default=False, other=True),
            K(ALGO + "importance_sampling_clip", "equivalent", default=1.0, other=2.0, beside=FIX),
            K(ALGO + "recompute_logprobs", "equivalent", default=True, other=False, also=(ROLLOUT + "recompute_logprobs",)),
            K(ALGO + "early_stop_imp_ratio", "equivalent", default=5.0, other=3.0, beside={ALGO + "n_minibatches": 4})), meaning.mismatch),
        K(ALGO + "max_num_gen_batches", "unsupported", fine=(1,), why="set algorithm.dynamic_sampling=refill by hand"),
        Joint("sampling", (
            K(SAMPLE + "temperature", "equivalent", default=1.0, other=0.7),
            K(SAMPLE + "top_p", "equivalent", default=1.0, other=0.9),
            K(SAMPLE + "top_k", "equivalent", default=1000000, other=50),
            K(SAMPLE + "use_greedy", "equivalent", default=False),
            K(SAMPLE + "do_sample", "equivalent", default=True)), meaning.sampling),
        K(SAMPLE + "stop", "inert", why="read by the router of online RL alone"),
        K(SAMPLE + "repetition_penalty", to="rollout.repetition_penalty", default=1.0, other=1.1),
        K(SAMPLE + "min_new_tokens", "inert", why="RLinf's engines are not given it", also=(SAMPLE + "stop_token_ids",)),
        Joint("optimizer", (
            K(OPTIM + "lr", "equivalent", other=1e-6),
            K(SCHED + "lr_decay_style", "equivalent", default="constant", other="linear"),
            K(SCHED + "lr_decay_iters", "equivalent", other=500, beside=LINEAR),
            K(SCHED + "lr_warmup_fraction", "equivalent", other=0.1, beside={SCHED + "lr_decay_iters": 100}),
            K(SCHED + "lr_warmup_iters", "equivalent", default=0, other=7),
            K(SCHED + "lr_warmup_init", "equivalent", default=0.0, other=1e-6, beside={SCHED + "lr_warmup_iters": 7}),
            K(SCHED + "min_lr", "equivalent", default=0.0, other=1e-7, beside=LINEAR),
            K(OPTIM + "optimizer", "equivalent", default="adam", other="sgd"),
            K(OPTIM + "adam_beta1", "equivalent", default=0.9, other=0.8),
            K(OPTIM + "adam_eps", "equivalent", default=1e-8, other=1e-5),
            K(OPTIM + "clip_grad", "equivalent", default=1.0, other=0.8),
            K(OPTIM + "sgd_momentum", "equivalent", default=0.9, other=0.8, beside={OPTIM + "optimizer": "sgd"}),
            K(OPTIM + "lr_scheduler", "equivalent", default="constant", other="cosine", beside=ON_FSDP, also=(OPTIM + "warmup_style",)),
            K(OPTIM + "lr_warmup_steps", "equivalent", default=-1, other=7, beside=ON_FSDP),
            K(OPTIM + "lr_warmup_steps_ratio", "equivalent", default=0.0, other=0.1, beside={**ON_FSDP, OPTIM + "total_training_steps": 100}),
            K(OPTIM + "total_training_steps", "equivalent", default=0, other=100, beside=COSINE),
            K(OPTIM + "min_lr", "equivalent", default=0.0, other=1e-7, beside=COSINE),
            K(OPTIM + "min_lr_rate", "equivalent", other=0.1, beside=COSINE),
            K(ACTOR + "lr_sched_sync_with_optim", "equivalent", default=True, other=False,
              beside={**ON_FSDP, OPTIM + "lr_warmup_steps": 7, ALGO + "n_minibatches": 4})), meaning.optimizer),
        K(OPTIM + "num_cycles", "unsupported", fine=(0.5,), why="a cosine falls once"),
        K(OPTIM + "adam_beta2", to="optimizer.b2", default=0.999, other=0.95),
        K(OPTIM + "weight_decay", to="optimizer.weight_decay", default=0.01, other=0.05),
        Joint("critic's optimizer", (
            *(K(f"{CRITIC}optim.{n}", "equivalent", default=d, other=o, beside=GAE) for n, d, o in (
                ("optimizer", "adam", "sgd"), ("adam_beta1", 0.9, 0.8), ("adam_beta2", 0.999, 0.9), ("adam_eps", 1e-8, 1e-6),
                ("weight_decay", 0.01, 0.2), ("clip_grad", 1.0, 0.5))),
            K(CRITIC + "optim.sgd_momentum", "equivalent", default=0.9, other=0.8, beside={**GAE, CRITIC + "optim.optimizer": "sgd"}),
            K(CRITIC_SCHED + "lr_decay_style", "equivalent", default="constant", other="linear", beside=GAE),
            K(CRITIC_SCHED + "lr_decay_iters", "equivalent", other=500, beside=CRITIC_LINEAR),
            K(CRITIC_SCHED + "lr_warmup_fraction", "equivalent", other=0.1, beside={**GAE, CRITIC_SCHED + "lr_decay_iters": 100}),
            K(CRITIC_SCHED + "lr_warmup_iters", "equivalent", default=0, other=7, beside=GAE),
            K(CRITIC_SCHED + "lr_warmup_init", "equivalent", default=0.0, other=1e-6, beside={**GAE, CRITIC_SCHED + "lr_warmup_iters": 7}),
            K(CRITIC_SCHED + "min_lr", "equivalent", default=0.0, other=1e-7, beside=CRITIC_LINEAR)), meaning.critics_optimizer),
        K(OPTIM + "loss_scale_window", to="train.loss_scale.window", other=5),
        K(OPTIM + "optimizer_cpu_offload", to="optimizer.offload", default=False, other=True),
        Joint("layout", (
            K("cluster.num_nodes", "equivalent", default=1),
            K("cluster.num_gpus_per_node", "equivalent", default=8, other=4),
            K(PLACEMENT, "equivalent"),
            K(ACTOR + "training_backend", "equivalent", default="megatron"),
            K(MODEL + "tensor_model_parallel_size", "equivalent", default=1, other=2),
            K(MODEL + "pipeline_model_parallel_size", "equivalent", default=1),
            K(MODEL + "expert_model_parallel_size", "equivalent", default=1, other=2),
            K(MODEL + "context_parallel_size", "equivalent", default=1, other=2),
            K(ROLLOUT + "rollout_backend", "equivalent", default="sglang"),
            K(ROLLOUT + "tensor_parallel_size", "equivalent", default=1, other=2),
            K(ACTOR + "offload_optimizer", "equivalent", default=False, other=True, beside={ACTOR + "offload_weight": True}),
            K(ACTOR + "offload_weight", "equivalent", default=False, other=True, beside={ACTOR + "offload_optimizer": True}),
            K(ACTOR + "enable_offload", "equivalent", default=False, other=True),
            K(FSDP + "cpu_offload", "equivalent", default=False, other=True)), meaning.layout),
        K(ROLLOUT + "pipeline_parallel_size", "unsupported", fine=(1,), why="servers split a model by tensor_parallel"),
        Joint("memory", (
            K(RUNNER + "enable_dynamic_batch_size", "equivalent", default=False, other=True, beside={RUNNER + "max_tokens_per_mbs": 9000}),
            K(RUNNER + "max_tokens_per_mbs", "equivalent", default=2048, other=9000, beside=DYNAMIC),
            K(ALGO + "training_batch_size_per_gpu", "equivalent", default=1, other=4),
            K(ALGO + "logprob_forward_micro_batch_size", "equivalent", default=1, other=8)), meaning.memory),
        Joint("model", (
            K(ROLLOUT + "model.model_path", "equivalent", other="another/model"),
            K(ROLLOUT + "model_dir", "equivalent", other="another/model"),
            K(MODEL + "model_path", "equivalent", other="another/model"),
            K(ACTOR + "tokenizer.tokenizer_model", "equivalent", other="a/tokenizer", beside={ROLLOUT + "model_dir": "some/model"}),
            K(MODEL + "recompute_granularity", "equivalent", other="full"),
            *DTYPES,
            K(ROLLOUT + "model.precision", "equivalent", other="fp16")), meaning.model),
        K(ACTOR + "tokenizer.trust_remote_code", to="model.trust_remote_code", default=False, other=True),
        K(MODEL + "is_lora", "unsupported", fine=(False,), why="set lora.rank by hand"),
        K(MODEL + "moe_aux_loss_coeff", to="train.router_balance", default=0.0, other=0.01),
        K(MODEL + "moe_router_bias_update_rate", to="train.router_bias_rate", default=0.0, other=0.001),
        K(MODEL + "megatron_checkpoint", "ask", why="megatron's checkpoints are not read; name a Hugging Face folder in model.path",
          also=(ACTOR + "checkpoint_load_path",)),
        Joint("data", (
            K(DATA + "train_data_paths", "equivalent", other=["a.jsonl", "b.jsonl"]),
            K(DATA + "val_data_paths", "equivalent", other=["c.jsonl"]),
            K(RUNNER + "val_check_interval", "equivalent", default=1),
            K(DATA + "prompt_key", "equivalent", default="prompt", other="question"),
            K(DATA + "answer_key", "equivalent", default="solutions", other="answer"),
            K(DATA + "apply_chat_template", "equivalent", default=False, other=True),
            K(DATA + "shuffle", "equivalent", default=True, other=False),
            K(DATA + "seed", "equivalent", default=1234, other=7),
            K(RUNNER + "max_epochs", "equivalent", default=5, other=3),
            K(RUNNER + "max_steps", "equivalent", default=-1, other=9)), meaning.data),
        Joint("images", (
            K(DATA + "type", "equivalent"),
            K(DATA + "image_keys", "equivalent", other=["pictures"], beside={DATA + "type": "vlm", DATA + "use_chat_template": True}),
            K(DATA + "use_chat_template", "equivalent", default=False),
            K(DATA + "dataset_name", "equivalent", default="base"),
            K(DATA + "choice_key", "equivalent")), images_meaning.rlinf),
        K(DATA + "lazy_loading", "automatic", why="images are read when a step takes their row", also=(DATA + "solution_key",)),
        K(DATA + "system_prompt", to="data.system_prompt", other="Think first."),
        K(DATA + "data_size", "equivalent", "data.max_rows", lambda n: max(n, 0), other=100),
        Joint("reward", (
            K(REWARD + "reward_type", "equivalent", default="math", other="code"),
            K(REWARD + "reward_scale", "equivalent", default=1.0, other=5.0),
            K(REWARD + "reward_min_val", "equivalent", default=-1.0, other=0.0),
            K(REWARD + "reward_max_val", "equivalent", default=1.0, other=2.0),
            K(REWARD + "use_reward_model", "equivalent", default=False)), meaning.reward),
        K(REWARD + "tokenizer.**", "automatic", why="rewards get text"),
        K(REWARD + "**", "ask", why="an option of a reward of its own"),
        K(ACTOR + "seed", to="run.seed", default=1234, other=7),
        Joint("places", (
            K(RUNNER + "output_dir", "equivalent", other="runs"),
            K(RUNNER + "experiment_name", "equivalent", other="mine", beside={RUNNER + "output_dir": "runs"}),
            K(RUNNER + "save_interval", "equivalent", default=50, other=20),
            K(RUNNER + "resume_dir", "equivalent", other="x")), meaning.places),
        Joint("loggers", (
            K(RUNNER + "logger.logger_backends", "equivalent", default=["tensorboard"], other=["wandb"]),
            K(RUNNER + "logger.wandb.enable", "equivalent", default=False, other=True),
            K(RUNNER + "logger.project_name", "equivalent", default="rlinf", other="mine", also=(RUNNER + "logger.wandb.project_name",)),
            K(RUNNER + "logger.experiment_name", "equivalent", other="mine", also=(RUNNER + "logger.wandb.experiment_name",))), meaning.loggers),
        K(ROLLOUT + "gpu_memory_utilization", to="rollout.vllm.memory_fraction", default=0.55, other=0.6),
        K(ROLLOUT + "max_running_requests", to="rollout.vllm.max_running", default=64, other=128),
        K(ROLLOUT + "enforce_eager", "equivalent", "rollout.vllm.engine_kwargs.enforce_eager", default=False, other=True),
        Joint("options of vLLM", (K(ROLLOUT + "vllm.*", "equivalent"),), meaning.engine_options),
        common.REFERENCE_AS_TRAINER,
        Joint("critic's dtype", (K(CRITIC + "model.precision", "equivalent"),),
              lambda m: common.critics_dtype(m, CRITIC + "model.precision", "train.compute_dtype")),
        *(K(n, "automatic", why=why, also=also) for n, why, also in AUTOMATIC),
    ),
)
