"""SkyRL (skyrl-train and skyrl): what its keys mean here.

Read from its code at the tags skyrl_train-v0.1.0 to skyrl-v0.3.0; `docs` are the defaults of its first documentation
(June 2025). A batch is counted in prompts, and so are mini-batches.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.devices import megatron_keys
from jaxrl.migrate.jobs import EVAL, Job
from jaxrl.migrate.systems import images_meaning
from jaxrl.migrate.systems import skyrl_meaning as meaning
from jaxrl.migrate.systems.skyrl_meaning import ALGO, ENGINE, GEN, MEGATRON, POLICY
from jaxrl.migrate.systems.verl_optimizer import offloaded_state
from jaxrl.migrate.table import Joint, Key, Since, Table

K = Key


def _at(old, new):
    return Since(("docs", old), ("train-0.4", new))


_OFF = ALGO + "off_policy_correction."
_PLACE = "trainer.placement."
_EVAL, _SAMPLE = GEN + "eval_sampling_params.", GEN + "sampling_params."
NO_CHOICE = "one backend, jit over a mesh"

JOBS = (
    Job("supervised fine-tuning", command=r"\bmain_sft\w*|\bsft_trainer\b", keys=("train_datasets", "num_steps"), table="skyrl_sft:SFT"),
    Job("main_generate, which samples and scores without training,", EVAL, r"\bmain_generate\b"),
)


BIAS, RATE = MEGATRON + "moe_router_enable_expert_bias", MEGATRON + "transformer_config_kwargs.moe_router_bias_update_rate"
REPLAYED = MEGATRON + "moe_enable_routing_replay", ENGINE + "enable_return_routed_experts"  # one without the other does nothing
WITH_MEGATRON = {"trainer.strategy": "megatron"}


def state_on_host(mega: str, strategy: str) -> Joint:
    """Returns the rule that sets optimizer.offload=True if Megatron's optimizer_cpu_offload is on with an
    optimizer_offload_fraction above 0.

    mega: Megatron's table, with a dot. strategy: key of the backend; another one than megatron sets nothing.
    """
    on, share = (f"{mega}optimizer_config_kwargs.optimizer_{n}" for n in ("cpu_offload", "offload_fraction"))
    return Joint("offloaded optimizer state", (
        K(on, "equivalent", default=False, other=True, beside={strategy: "megatron", share: 1.0}), K(share, "equivalent", default=0.0)),
        lambda m: offloaded_state(m, mega + "optimizer_config_kwargs.") if m.text(strategy) == "megatron" else None)


def changes_training(policy: str) -> tuple[Key, ...]:
    """Returns the rows of Megatron's and FSDP's options that change what is learnt and that no option is set for.

    They are reported as not carried over, or asked for (RoPE). policy: the policy's table, with a dot; "" in SFT. Only
    below "trainer.policy." is the param_dtype of the reference and of the critic such a row, too.
    """
    mega, router = policy + "megatron_config.", "set train.router_balance by hand: its scale is another"
    return (
        K(mega + "moe_aux_loss_coeff", "unsupported", fine=(0, 0.0), why=router, also=(mega + "transformer_config_kwargs.moe_aux_loss_coeff",)),
        K(mega + "transformer_config_kwargs.moe_z_loss_coeff", "unsupported", fine=(0, 0.0), why=router.replace("balance", "z")),
        K(mega + "transformer_config_kwargs.fp8", "unsupported", fine=(False,), why="matrix products in fp8: train.matmul, by hand"),
        K(mega + "freeze_moe_router", "unsupported", fine=(False,), why="name the routers in model.frozen"),
        K(mega + "mtp_num_layers", "unsupported", fine=(0,), why="multi-token prediction is not trained"),
        K(mega + "model_config_kwargs.**", "unsupported", fine=(None, {}), why="write it into model.config", also=(mega + "model_config_kwargs",)),
        K(mega + "transformer_config_kwargs.rope_**", "ask", why="write it into model.config"),
        K(policy + "fsdp_config.mixed_precision.param_dtype", "unsupported", fine=("bf16", "bfloat16"), why="set train.compute_dtype by hand",
          also=("trainer.ref.fsdp_config.mixed_precision.param_dtype", "trainer.critic.fsdp_config.mixed_precision.param_dtype")
          if policy == "trainer.policy." else ()),
    )


TABLE = Table(
    name="skyrl", title="SkyRL", command=r"skyrl|main_base|main_fully_async|main_dapo|-m examples\.",
    versions=("docs", "train-0.1", "train-0.2", "train-0.3", "train-0.4", "0.1", "0.2", "0.3"),
    jobs=JOBS,
    prefixes=("trainer.", "generator.", "trainer.policy.", "data."),
    differs=(
        "the gradient does not depend on micro-batches, packing or the number of GPUs",
        "weight decay spares norms, biases and other vectors",
        "of two prompts of the same epoch other ones meet in a step: the order of the data is drawn from another generator",
    ),
    rules=(
        Joint("lengths", (K("trainer.max_prompt_length", "equivalent", default=512, other=700),
                          K(_SAMPLE + "max_generate_length", "equivalent", default=1024, other=700)), meaning.lengths),
        Joint("batch", (
            K("trainer.train_batch_size", "equivalent", default=1024, other=512),
            K("trainer.policy_mini_batch_size", "equivalent", default=256, other=128),
            K("trainer.critic_mini_batch_size", "equivalent", default=256, other=128, beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.update_epochs_per_batch", "equivalent", default=1, other=2),
            K(GEN + "n_samples_per_prompt", "equivalent", default=5, other=8)), meaning.batch),
        Joint("staleness", (
            K("trainer.fully_async.enabled", "equivalent", default=False, other=True),
            K("trainer.fully_async.max_staleness_steps", "equivalent", default=4, other=2,
              beside={"trainer.fully_async.enabled": True})), meaning.staleness),
        K("trainer.fully_async.num_parallel_generation_workers", "automatic", why="as many as the staleness allows"),
        K("trainer.fully_async.*", "unsupported", fine=(False,), why="asynchrony has max_staleness, sync_every and partial"),
        Joint("advantage", (
            K(ALGO + "advantage_estimator", "equivalent", default="grpo", other="rloo"),
            K(ALGO + "grpo_norm_by_std", "equivalent", default=True, other=False),
            K(ALGO + "advantage_batch_normalize", "equivalent", default=False, other=True),
            K(ALGO + "gamma", "equivalent", default=1.0, other=0.99, beside={ALGO + "advantage_estimator": "gae"}),
            K(ALGO + "lambd", "equivalent", default=1.0, other=0.95, beside={ALGO + "advantage_estimator": "gae"}),
            K(ALGO + "value_clip", "equivalent", default=0.2, other=0.4, beside={ALGO + "advantage_estimator": "gae"}),
            K(ALGO + "normalize_reward", "equivalent", default=Since(("docs", True), ("train-0.1", False)), other=True,
              beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.critic.model.path", "equivalent", other="another/model", beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.critic.optimizer_config.lr", "equivalent", default=5e-6, other=1e-5,
              beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.critic.optimizer_config.adam_betas", "equivalent", default=[0.9, 0.999], other=[0.9, 0.95],
              beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.critic.optimizer_config.weight_decay", "equivalent", default=0.01, other=0.1,
              beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.critic.optimizer_config.max_grad_norm", "equivalent", default=1.0, other=0.5,
              beside={ALGO + "advantage_estimator": "gae"}),
            K("trainer.critic.optimizer_config.num_warmup_steps", "equivalent", default=0, other=5,
              beside={ALGO + "advantage_estimator": "gae"})), meaning.advantage),
        Joint("loss", (
            K(ALGO + "policy_loss_type", "equivalent", default="regular", other="dual_clip", also=(ALGO + "ppo_loss_type",)),
            K(ALGO + "eps_clip_low", "equivalent", default=0.2, other=0.1),
            K(ALGO + "eps_clip_high", "equivalent", default=0.2, other=0.28),
            K(ALGO + "clip_ratio_c", "equivalent", default=3.0, other=10.0, beside={ALGO + "policy_loss_type": "dual_clip"}),
            K(ALGO + "cispo.cispo_eps_clip_low", "equivalent", default=Since(("docs", 0), ("0.3", 0)), other=0.5,
              beside={ALGO + "policy_loss_type": "cispo"}),
            K(ALGO + "cispo.cispo_eps_clip_high", "equivalent", default=5, other=3, beside={ALGO + "policy_loss_type": "cispo"}),
            K(ALGO + "cispo.cispo_anchor", "equivalent", default="old", other="rollout",
              beside={ALGO + "policy_loss_type": "cispo"}),
            K(ALGO + "sapo.tau_pos", "equivalent", default=1.0, other=2.0, beside={ALGO + "policy_loss_type": "sapo"}),
            K(ALGO + "sapo.tau_neg", "equivalent", default=1.05, other=2.0, beside={ALGO + "policy_loss_type": "sapo"}),
            K(ALGO + "dppo.dppo_type", "equivalent", default="binary_tv"),
            K(ALGO + "dppo.delta_low", "equivalent", default=0.2, other=0.1, beside={ALGO + "policy_loss_type": "dppo"}),
            K(ALGO + "dppo.delta_high", "equivalent", default=0.2, other=0.1, beside={ALGO + "policy_loss_type": "dppo"}),
            *(K(ALGO + "clip_cov." + n, "equivalent", default=d, other=o, beside={ALGO + "policy_loss_type": "clip_cov"}) for n, d, o in (
                ("clip_ratio", 0.0002, 0.001), ("clip_cov_lb", 1.0, 0.5), ("clip_cov_ub", 5.0, 9.0))),
            K(ALGO + "loss_reduction", "equivalent", default=Since(("docs", "sequence_mean"), ("train-0.1", "token_mean")),
              other="seq_mean_token_sum_norm"),
            K(ALGO + "max_seq_len", "equivalent", other=4096, beside={ALGO + "loss_reduction": "seq_mean_token_sum_norm"}),
            K(GEN + "max_input_length", "equivalent", other=900, beside={ALGO + "loss_reduction": "seq_mean_token_sum_norm"})),
              meaning.loss),
        K(ALGO + "kl_cov.*", "inert", why="read by the loss kl_cov alone"),
        Joint("KL", (
            K(ALGO + "use_kl_loss", "equivalent", default=True, other=False),
            K(ALGO + "use_kl_in_reward", "equivalent", default=False, other=True, beside={ALGO + "use_kl_loss": False}),
            K(ALGO + "kl_loss_coef", "equivalent", default=0.001, other=0.01),
            K(ALGO + "kl_estimator_type", "equivalent", default="k3", other="k2"),
            K(ALGO + "use_kl_estimator_k3", "equivalent", default=True),
            K(ALGO + "use_abs_kl", "equivalent", default=False),
            K(ALGO + "kl_ctrl.type", "equivalent", default="fixed"),
            K(ALGO + "use_entropy_loss", "equivalent", default=False, other=True),
            K(ALGO + "entropy_loss_coef", "equivalent", default=0.01, other=0.02, beside={ALGO + "use_entropy_loss": True}),
            K("trainer.ref.model.path", "equivalent", other="another/model"),
            K("trainer.update_ref_every_epoch", "equivalent", default=False, other=True)), meaning.kl),
        K(ALGO + "kl_ctrl.*", "inert", why="read by the adaptive controller alone"),
        Joint("mismatch", (
            K(_OFF + "tis_ratio_type", "equivalent", other="token"),
            K(_OFF + "token_tis_ratio_clip_high", "equivalent", default=2.0, other=3.0, beside={_OFF + "tis_ratio_type": "token"}),
            K(_OFF + "sequence_tis_ratio_clip_high", "equivalent", default=5.0, other=3.0,
              beside={_OFF + "tis_ratio_type": "sequence"}),
            K(_OFF + "sequence_mask_metric", "equivalent", other="geometric"),
            K(_OFF + "geo_mask_low", "equivalent", default=0.99, other=0.9, beside={_OFF + "sequence_mask_metric": "geometric"}),
            K(_OFF + "geo_mask_high", "equivalent", default=1.01, other=1.1, beside={_OFF + "sequence_mask_metric": "geometric"}),
            *(K(_OFF + "product_mask_" + n, "equivalent", default=d, other=o, beside={_OFF + "sequence_mask_metric": "product"}) for n, d, o in (
                ("low", 0.5, 0.4), ("high", 2.0, 3.0))),
            *(K(_OFF + n, "equivalent") for n in ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
                                                  "token_mask_is_threshold_low", "token_mask_is_threshold_high")),
            K(ALGO + "use_tis", "equivalent", default=False, other=True, beside={ALGO + "tis_imp_ratio_cap": 2.0}),
            K(ALGO + "tis_imp_ratio_cap", "equivalent", default=-1.0, other=3.0, beside={ALGO + "use_tis": True})), meaning.mismatch),
        Joint("filtering", (
            K(ALGO + "dynamic_sampling.type", "equivalent", other="filter"),
            K(ALGO + "dynamic_sampling.max_sample_batches", "equivalent", default=30, other=10,
              beside={ALGO + "dynamic_sampling.type": "filter"}),
            K(ALGO + "zero_variance_filter", "equivalent", default=False, other=True),
            K(GEN + "apply_overlong_filtering", "equivalent", default=False, other=True)), meaning.filtering),
        K(ALGO + "dynamic_sampling.min_replace_ratio", "inert", why="read by the strategy replace alone"),
        K(ALGO + "zero_variance_filter_tol", "automatic", why="equal rewards are equal to rounding"),
        Joint("length penalty of its DAPO example", (
            K(ALGO + "overlong_buffer_len", "equivalent", default=0, other=512, also=(ALGO + "overlong_buffer.len",)),
            K(ALGO + "overlong_buffer_penalty_factor", "equivalent", default=1.0, other=0.5,
              also=(ALGO + "overlong_buffer.penalty_factor",), beside={ALGO + "overlong_buffer_len": 512})), meaning.length_penalty),
        K(ALGO + "value_head_prefix", "automatic", why="the head of a critic's files is named by critic.head"),
        Joint("sampling", (
            K(_SAMPLE + "temperature", "equivalent", default=1.0, other=0.7),
            K(_SAMPLE + "top_p", "equivalent", default=1.0, other=0.9),
            K(_SAMPLE + "top_k", "equivalent", default=-1, other=50),
            K(_SAMPLE + "min_p", "equivalent", default=0.0, other=0.1),
            K(_SAMPLE + "repetition_penalty", "equivalent", default=1.0, other=1.1),
            K(_SAMPLE + "stop", "equivalent", other=["</answer>"]),
            K(ALGO + "temperature", "equivalent")), meaning.sampling),
        K(_SAMPLE + "logprobs", "automatic", why="log-probs of what was sampled are always kept"),
        K(_SAMPLE + "additional_kwargs.**", "unsupported", why="further sampling parameters"),
        Joint("optimizer", (
            K(POLICY + "optimizer_config.lr", "equivalent", default=1e-6, other=2e-6),
            K(POLICY + "optimizer_config.adam_betas", "equivalent", default=[0.9, 0.999], other=[0.9, 0.95]),
            K(POLICY + "optimizer_config.num_warmup_steps", "equivalent", default=0, other=5, also=("trainer.num_warmup_steps",)),
            K(POLICY + "optimizer_config.scheduler", "equivalent", default="constant_with_warmup", other="cosine")), meaning.optimizer),
        K(POLICY + "optimizer_config.weight_decay", to="optimizer.weight_decay", default=0.01, other=0.1),
        K(POLICY + "optimizer_config.max_grad_norm", to="optimizer.max_grad_norm", default=1.0, other=0.5),
        K(POLICY + "optimizer_config.offload_after_step", "automatic", why="colocated engines and trainers take turns"),
        Joint("critic's schedule", (
            K("trainer.critic.optimizer_config.scheduler", "equivalent", default="constant_with_warmup", other="cosine",
              beside={ALGO + "advantage_estimator": "gae"}),), meaning.critics_schedule),
        K("trainer.critic.optimizer_config.offload_after_step", "automatic", why="colocated engines and trainers take turns"),
        Joint("layout", (
            K(_PLACE + "policy_num_nodes", "equivalent", default=1, other=2, beside={ENGINE + "num_engines": 2}),
            K(_PLACE + "policy_num_gpus_per_node", "equivalent", default=_at(4, 1), other=8,
              beside={_PLACE + "colocate_all": False}),
            K(_PLACE + "colocate_all", "equivalent", default=True, other=False),
            K("trainer.strategy", "equivalent", default=Since(("docs", "deepspeed"), ("train-0.1", "fsdp2"), ("0.1", "fsdp"))),
            *megatron_keys(MEGATRON, {"trainer.strategy": "megatron"}),
            K(POLICY + "fsdp_config.fsdp_size", "equivalent", default=-1, other=4, beside={_PLACE + "policy_num_gpus_per_node": 8}),
            K(POLICY + "sequence_parallel_size", "equivalent", default=1),
            K(POLICY + "fsdp_config.cpu_offload", "equivalent", default=False, other=True),
            K(ENGINE + "backend", "equivalent", default="vllm", also=(GEN + "backend",)),
            K(ENGINE + "num_engines", "equivalent", default=1, other=2, also=(GEN + "num_inference_engines",)),
            K(ENGINE + "tensor_parallel_size", "equivalent", default=_at(4, 1), other=2,
              also=(GEN + "inference_engine_tensor_parallel_size",)),
            K(ENGINE + "data_parallel_size", "equivalent", default=1, other=2,
              also=(GEN + "inference_engine_data_parallel_size",)),
            K(ENGINE + "run_engines_locally", "equivalent", default=True, other=False, also=(GEN + "run_engines_locally",)),
            K(ENGINE + "external_server_urls", "equivalent", default=["127.0.0.1:8001"], other=["127.0.0.1:8002"],
              also=(GEN + "remote_inference_engine_urls", GEN + "external_server_urls", ENGINE + "remote_urls"),
              beside={ENGINE + "run_engines_locally": False})), meaning.layout),
        K(ENGINE + "pipeline_parallel_size", "unsupported", fine=(1,), also=(GEN + "inference_engine_pipeline_parallel_size",),
          why="servers split a model by tensor_parallel"),
        K(ENGINE + "expert_parallel_size", "equivalent", "rollout.vllm.engine_kwargs.enable_expert_parallel", lambda n: int(n) > 1, other=2,
          also=(GEN + "inference_engine_expert_parallel_size",)),
        Joint("routers' bias", (
            K(BIAS, "equivalent", default=False, other=True, beside={"trainer.strategy": "megatron"}),
            K(RATE, "equivalent", default=1e-3, other=1e-2, beside={"trainer.strategy": "megatron", BIAS: True})),
            lambda m: common.router_bias(m, BIAS, RATE) if m.text("trainer.strategy") == "megatron" else None),
        state_on_host(MEGATRON, "trainer.strategy"),
        Joint("replayed experts", (
            K(REPLAYED[0], "equivalent", default=False, other=True, beside=WITH_MEGATRON | {REPLAYED[1]: True}),
            K(REPLAYED[1], "equivalent", default=False, other=True, beside=WITH_MEGATRON | {REPLAYED[0]: True})), meaning.routes),
        Joint("memory", (
            K("trainer.micro_train_batch_size_per_gpu", "equivalent", default=1, other=4),
            K("trainer.micro_forward_batch_size_per_gpu", "equivalent", default=1, other=8),
            K("trainer.max_tokens_per_microbatch", "equivalent", default=-1, other=9000)), meaning.memory),
        Joint("environment", (
            K("environment.env_class", "equivalent", default="gsm8k", other="aime"),
            K(GEN + "max_turns", "equivalent", default=1)), meaning.environment),
        K("environment.skyrl_gym.**", "inert", also=("environment.**",), why="options of its environments"),
        K(GEN + "zero_reward_on_non_stop", to="reward.zero_without_end", default=False, other=True),
        Joint("evaluation", (
            K("trainer.eval_interval", "equivalent", default=5, other=7),
            K("trainer.eval_before_train", "equivalent", default=True, other=False),
            K(GEN + "eval_n_samples_per_prompt", "equivalent", default=1, other=4, beside={_EVAL + "temperature": 1.0}),
            K(_EVAL + "temperature", "equivalent", default=Since(("docs", 1.0), ("train-0.1", 0.0)), other=0.6),
            K(_EVAL + "top_p", "equivalent", default=1.0, other=0.7),
            K(_EVAL + "top_k", "equivalent", default=-1, other=20),
            K(_EVAL + "min_p", "equivalent", default=0.0, other=0.1),
            K(_EVAL + "repetition_penalty", "equivalent", default=1.0, other=1.1),
            K(_EVAL + "max_generate_length", "equivalent", other=300),
            K(_EVAL + "logprobs", "inert", why="log-probs of evaluation are not used"),
            K(_EVAL + "stop", "equivalent", other=["</b>"])), meaning.evaluation),
        K(_EVAL + "**", "unsupported", why="further sampling parameters of evaluation"),
        K("data", "inert", why="a heading, in excerpts of its documentation"),
        Joint("data", (K("data.train_data", "equivalent", default=["$HOME/data/gsm8k/train.parquet"], other=["b.parquet"]),),
              lambda m: common.data_files(m, m.list("data.train_data"), "data.train_data")),
        Joint("evaluation sets", (
            K("data.val_data", "equivalent", default=["$HOME/data/gsm8k/validation.parquet"], other=["b.parquet"]),),
              lambda m: common.eval_sets(m, m.list("data.val_data"), "data.val_data")),
        K("data.dataloader.**", "automatic", why="rows are read ahead by data.workers"),
        K("trainer.epochs", to="data.epochs", default=1, other=3),
        K("trainer.max_training_steps", to="train.steps", other=9),
        K("trainer.seed", to="run.seed", default=42, other=7),
        K(POLICY + "model.path", to="model.path", default="Qwen/Qwen2.5-1.5B-Instruct", other="another/model"),
        Joint("adapters", (
            K(POLICY + "model.lora.rank", "equivalent", default=0, other=16),
            K(POLICY + "model.lora.alpha", "equivalent", default=16, other=32, beside={POLICY + "model.lora.rank": 16}),
            K(POLICY + "model.lora.target_modules", "equivalent", default="all-linear", other=["q_proj"],
              beside={POLICY + "model.lora.rank": 16}),
            K(POLICY + "model.lora.exclude_modules", "equivalent", other=["lm_head"], beside={POLICY + "model.lora.rank": 16}),
            K(POLICY + "model.lora.init_method", "equivalent", default="kaiming", other="pissa",
              beside={POLICY + "model.lora.rank": 16}),
            K(POLICY + "model.lora.dropout", "equivalent", default=0.0)), meaning.adapters),
        K(POLICY + "model.lora.*", "automatic", why="adapters reach the engine by lora.publish"),
        Joint("resume", (K("trainer.resume_mode", "equivalent", default="latest", other=None),
                         K("trainer.resume_path", "equivalent", default="")), meaning.resume),
        Joint("places", (
            K("trainer.ckpt_path", "equivalent", other="runs/x"),
            K("trainer.ckpt_interval", "equivalent", default=10, other=7),
            K("trainer.max_ckpts_to_keep", "equivalent", default=-1, other=2),
            K("trainer.hf_save_interval", "equivalent", default=-1, other=5)), meaning.places),
        K("trainer.export_path", "automatic", why="exports lie in the run's directory (run.dir)"),
        K("trainer.log_path", "automatic", why="the run's directory has its logs"),
        Joint("loggers", (
            K("trainer.logger", "equivalent", default="wandb", other="console"),
            K("trainer.project_name", "equivalent", default="skyrl", other="mine"),
            K("trainer.run_name", "equivalent", default="test_run", other="mine")), meaning.loggers),
        K("trainer.dump_data_batch", "automatic", why="rollouts of every step are written (log.rollouts)"),
        K("trainer.dump_eval_results", "automatic", why="every evaluation writes its completions and scores"),
        K("trainer.eval_batch_size", "automatic", why="all rows are asked at once, within what the engine takes"),
        K("trainer.print_example_interval", "automatic", why="samples are shown at every evaluation (log.print_samples)"),
        K("trainer.gradient_checkpointing", "equivalent", "model.remat", lambda on: "full" if on else "none", default=True,
          other=False),
        K(ENGINE + "model_dtype", "equivalent", "rollout.dtype", lambda d: common.DTYPES.get(str(d), str(d)),
          default="bfloat16", other="float16", also=(GEN + "model_dtype",)),
        K("trainer.bf16", "equivalent", "train.compute_dtype", lambda on: "bf16" if on else "fp32", default=True, other=False),
        K(ENGINE + "gpu_memory_utilization", to="rollout.vllm.memory_fraction", default=0.8, other=0.6,
          also=(GEN + "gpu_memory_utilization",)),
        K(ENGINE + "max_num_seqs", to="rollout.vllm.max_running", default=1024, other=128, also=(GEN + "max_num_seqs",)),
        K(ENGINE + "enable_prefix_caching", to="rollout.vllm.prefix_caching", default=True, other=False,
          also=(GEN + "enable_prefix_caching",)),
        K(ENGINE + "enable_chunked_prefill", to="rollout.vllm.chunked_prefill", default=True, other=False,
          also=(GEN + "enable_chunked_prefill",)),
        K(ENGINE + "max_num_batched_tokens", "equivalent", "rollout.vllm.engine_kwargs.max_num_batched_tokens", default=8192,
          other=4096, also=(GEN + "max_num_batched_tokens",)),
        K(ENGINE + "enforce_eager", "equivalent", "rollout.vllm.engine_kwargs.enforce_eager", other=True,
          default=Since(("docs", False), ("train-0.3", True), ("0.1", False)), also=(GEN + "enforce_eager",)),
        Joint("further options of vLLM", (K(ENGINE + "engine_init_kwargs.**", "equivalent",
                                            also=(GEN + "engine_init_kwargs.**",)),), meaning.engine_options),
        Joint("variables of the template", (K(GEN + "chat_template_kwargs.*", "equivalent"),),
              lambda m: common.template_kwargs(m, GEN + "chat_template_kwargs.*")),
        K(GEN + "chat_template.*", "ask", fine=("name", None), why="name a Jinja file in model.chat_template"),
        K(GEN + "chat_template_kwargs", "automatic", why="empty"),
        K(ENGINE + "speculative_config.**", "unsupported", why="speculative decoding"),
        K("trainer.mtp.**", "unsupported", fine=(None, {}, False, 0), why="multi-token prediction is not trained"),
        *changes_training(POLICY),
        K(ENGINE + "speculative_config", "unsupported", why="speculative decoding"),
        Joint("images", (
            K(GEN + "vision_language_generator", "equivalent", default=False, other=True),
            K("trainer.policy.language_model_only", "equivalent", default=False, other=True)), images_meaning.skyrl),
        K("trainer.ref.language_model_only", "automatic", why="the reference reads what the policy does"),
        K(GEN + "step_wise_trajectories", "unsupported", fine=(False,), why="turns are one sequence as long as they can be"),
        *(K(name, "automatic", why=why, also=also) for name, why, also in (
            (_PLACE + "*", "roles without devices of their own share the policy's (mesh.roles)", ()),
            ("trainer.micro_*", "packed rows (train.tokens_per_microbatch)", ()),
            ("trainer.use_sample_packing", "rows are always packed", ("trainer.remove_microbatch_padding",)),
            ("trainer.recompute_old_logprobs_per_minibatch", "old log-probs come from the update's own rows", ()),
            ("trainer.sequence_parallel_backend", NO_CHOICE, ()),
            ("trainer.flash_attn", "attention is the platform's (model.attention)", ()),
            ("trainer.disable_fast_tokenizer", "tokenizers are transformers'", ()),
            ("trainer.gradient_checkpointing_use_reentrant", NO_CHOICE, ()),
            ("trainer.use_expandable_segments", "XLA has its own allocator", ()),
            ("trainer.policy.fsdp_config.**", NO_CHOICE, ("trainer.critic.fsdp_config.**", "trainer.ref.fsdp_config.**",
                                                          "trainer.fsdp_config.**")),
            ("trainer.policy.deepspeed_config.**", "no DeepSpeed", (
                "trainer.critic.deepspeed_config.**", "trainer.ref.deepspeed_config.**", "trainer.deepspeed_config.**",
                "deepspeed_config.**", "trainer.policy.deepspeed_config", "trainer.critic.deepspeed_config",
                "trainer.ref.deepspeed_config")),
            ("trainer.policy.use_torch_compile", "every program is compiled", ()),
            ("trainer.policy.record_memory", "profile.memory writes what device memory holds", ()),
            ("trainer.policy.torch_profiler_config.**", "profile.steps traces", ("trainer.policy.megatron_config.torch_profiler_config.**",)),
            (MEGATRON + "**", "the mesh and XLA decide", ("trainer.ref.megatron_config.**", "trainer.critic.megatron_config.**")),
            ("trainer.ref.sequence_parallel_size", "the reference is sharded as the policy", ()),
            ("trainer.critic.sequence_parallel_size", "the critic is sharded as the policy", ()),
            ("trainer.ref.**", "the reference is sharded as the policy", ()),
            ("trainer.critic.**", "the critic is sharded as the policy", ()),
            ("trainer.optimizer_config.**", "see trainer.policy.optimizer_config", ()),
            ("trainer.logprobs_chunk_size", "train.logprob_chunk", ("trainer.vocab_entropy_chunk_size", "trainer.vocab_entropy_chunk_memory_mb",
                                                                  "trainer.fused_lm_head_logprob", "trainer.fused_lm_head_logprob_backend")),
            ("trainer.tags", "WANDB_TAGS in the environment", ()),
            ("trainer.num_logger_*", "log.print_samples", ("trainer.log_example_interval",)),
            ("trainer.enable_ray_gpu_monitor", "no Ray", ()),
            (ENGINE + "weight_sync_backend", "rollout.vllm.transport chooses by the machine", (GEN + "weight_sync_backend",)),
            (ENGINE + "async_engine", "requests are asynchronous", (GEN + "async_engine",)),
            (ENGINE + "vllm_v1_disable_multiproc", "sampling is seeded by request (rollout.seeded)", (GEN + "vllm_v1_disable_multiproc",)),
            (ENGINE + "override_existing_update_group", "no process groups", (GEN + "override_existing_update_group",)),
            (ENGINE + "weight_transfer_threshold_cuda_ipc_GB", "rollout.vllm.chunk_mb", (GEN + "weight_transfer_threshold_cuda_ipc_GB",)),
            (ENGINE + "enable_http_endpoint", "requests go over HTTP", (GEN + "enable_http_endpoint", GEN + "http_endpoint_*")),
            (ENGINE + "**", "vLLM's own choice", ()),
            (GEN + "batched", "requests are sent together in any case", ()),
            (GEN + "use_conversation_multi_turn", "one turn; of several env.observations decides", ()),
            (GEN + "append_eos_token_after_stop_str_in_multi_turn", "one turn", ()),
            (GEN + "use_cache_salt", "the prefix cache is emptied at every weight sync", ()),
            (GEN + "merge_stepwise_output", "turns are one sequence as long as they can be", ()),
            (GEN + "model_name", "the policy", ()),
            (GEN + "served_model_name", "the policy", ()),
            (GEN + "enable_ray_prometheus_stats", "no Ray", ()),
            ("generator.fully_sharded_loras", "vLLM's own choice", ()))),
        common.REFERENCE_AS_TRAINER,
        *(K(name, "unsupported", fine=(None, {}), refuse=False, why=why) for name, why in (
            ("trainer.policy.model_config_kwargs.**", "write it into model.config"),
            ("trainer.rope_scaling.**", "write it into model.config"),
            ("generator.rope_scaling.**", "write it into model.config"),
            ("trainer.rope_scaling", "write it into model.config"), ("trainer.rope_theta", "write it into model.config"),
            ("generator.rope_scaling", "write it into model.config"), ("generator.rope_theta", "write it into model.config"),
            ("trainer.policy.model_config_kwargs", "write it into model.config"),
            ("trainer.policy.model.fake_int4_qat.*", "training against int4 experts"))),
    ),
)
