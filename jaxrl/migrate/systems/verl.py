"""verl (PPO, GRPO and their kin; verl_sft.py has its supervised trainers): what its keys mean here.

Read from its code and generated configs at the tags v0.3.0, v0.4.1, v0.5.0, v0.6.1, v0.7.0, v0.8.0, v0.9.0. A batch is counted in
prompts, and so are mini-batches; rollout.n is 1 unless it is set.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.devices import megatron_keys
from jaxrl.migrate.jobs import EVAL, Job
from jaxrl.migrate.systems import images_meaning
from jaxrl.migrate.systems import verl_distill as distill
from jaxrl.migrate.systems import verl_engine as engine
from jaxrl.migrate.systems import verl_meaning as meaning
from jaxrl.migrate.systems import verl_turns as turns
from jaxrl.migrate.systems.verl_engine import ACTOR, MEGATRON, MODEL, REF, ROLLOUT, TRAINER
from jaxrl.migrate.systems.verl_meaning import ALGO, CORRECTION, CRITIC, DATA, RM, VAL
from jaxrl.migrate.systems.verl_optimizer import offloaded_state as offloaded
from jaxrl.migrate.systems.verl_optimizer import optimizer
from jaxrl.migrate.table import Joint, Key, Since, Table

K = Key
GAE, GRPO = {ALGO + "adv_estimator": "gae"}, {ALGO + "adv_estimator": "grpo", ROLLOUT + "n": 8}
MEGA, MICRO, DYNAMIC = {ACTOR + "strategy": "megatron"}, ACTOR + "ppo_micro_batch_size_per_gpu", {ACTOR + "use_dynamic_bsz": True}
LOSS = lambda mode: {ACTOR + "policy_loss.loss_mode": mode}  # noqa: E731
OVERLONG = RM + "reward_kwargs.overlong_buffer_cfg."
TIS, FILTER = {CORRECTION + "rollout_is": "token"}, {ALGO + "filter_groups.enable": True}
LORA, KL = {MODEL + "lora_rank": 16}, {ACTOR + "use_kl_loss": True}
VEOMNI, TITAN = {"model_engine": "veomni"}, {"model_engine": "torchtitan"}
MLORA = {**MEGA, MODEL + "lora.rank": 16}
OTHER_DTYPE = {"megatron.dtype": "float16", "mindspeed.dtype": "float16", "fsdp_config.mixed_precision.param_dtype": "fp32"}
RMODEL, RK, NEW = {RM + "enable": True}, "reward.reward_kwargs.overlong_buffer_cfg.", "reward.reward_model."


def optimizer_keys(o: str, beside: dict, constant: str) -> tuple[Key, ...]:
    """Returns the rows of an optimizer's table.

    Args:
      o: the table's name, with a dot.
      beside: settings without which the table is not read, for the tests.
      constant: first version after 0.3 in which Megatron's lr_decay_style is constant by default; between them it is
        linear.
    """
    mega = {**beside, **MEGA}
    return (
        K(o + "betas", "equivalent", default=[0.9, 0.999], other=[0.9, 0.95], beside=beside),
        K(o + "lr_warmup_steps", "equivalent", default=-1, other=7, beside=beside),
        K(o + "lr_warmup_steps_ratio", "equivalent", default=0.0, other=0.1, beside=beside),
        K(o + "lr_scheduler_type", "equivalent", default="constant", other="cosine", beside=beside),
        K(o + "warmup_style", "equivalent", other="cosine", beside=beside),
        K(o + "min_lr_ratio", "equivalent", default=0.0, other=0.1, beside={**beside, o + "lr_scheduler_type": "cosine"}),
        K(o + "lr_decay_style", "equivalent", other="cosine", beside=mega,
          default=Since(("0.3", "constant"), ("0.4", "linear"), (constant, "constant"))),
        K(o + "lr_decay_steps", "equivalent", other=100, beside={**mega, o + "lr_decay_style": "cosine"}),
        K(o + "lr_warmup_init", "equivalent", default=0.0, other=1e-7, beside=mega),
        K(o + "min_lr", "equivalent", default=0.0, other=1e-7, beside={**mega, o + "lr_decay_style": "cosine"}),
        K(o + "optimizer", "equivalent", other="SGD", beside=beside),
        K(o + "clip_grad", "equivalent", default=1.0, other=0.5, beside=beside),
        K(o + "lr_min", "equivalent", default=0.0, other=1e-7, beside={**beside, **VEOMNI}),
        K(o + "lr_start", "equivalent", default=0.0, other=1e-7, beside={**beside, **VEOMNI}),
        K(o + "lr_decay_ratio", "equivalent", default=1.0),
        K(o + "name", "equivalent", default="AdamW", other="SGD", beside={**beside, **TITAN}),
        K(o + "eps", "equivalent", default=1e-8, other=1e-6, beside={**beside, **TITAN}),
        K(o + "decay_type", "equivalent", default="linear", other="cosine", beside={**beside, **TITAN}),
        K(o + "min_lr_factor", "equivalent", default=0.0, other=0.1, beside={**beside, **TITAN}))


def megatrons_own(engine: str, *others: str) -> tuple[Key | Joint, ...]:
    """Returns the rows of Megatron's model options that change what is learnt: train.router_bias_rate is set, the loss
    coefficients of routers and fp8 are reported as not carried over, RoPE's scaling is asked for.

    engine: name of an engine's table, with a dot. others: tables whose options of these names mean the same.
    """
    o = engine + "override_transformer_config."

    def also(*names):
        return tuple(other + "override_transformer_config." + name for other in others for name in names)

    scale = "by hand: its scale is another"
    return (
        K(o + "moe_aux_loss_coeff", "unsupported", fine=(0, 0.0), why=f"set train.router_balance {scale}", also=also("moe_aux_loss_coeff")),
        K(o + "moe_z_loss_coeff", "unsupported", fine=(0, 0.0), why=f"set train.router_z {scale}", also=also("moe_z_loss_coeff")),
        Joint("routers' bias", (
            K(o + "moe_router_enable_expert_bias", "equivalent", default=False, other=True, also=also("moe_router_enable_expert_bias")),
            K(o + "moe_router_bias_update_rate", "equivalent", default=1e-3, other=1e-2, also=also("moe_router_bias_update_rate"),
              beside={o + "moe_router_enable_expert_bias": True})),
            lambda m: common.router_bias(m, o + "moe_router_enable_expert_bias", o + "moe_router_bias_update_rate")),
        K(o + "fp8", "unsupported", fine=(False,), why="matrix products in fp8: train.matmul, by hand", also=also("fp8")),
        K(o + "fp8_recipe", "inert", why="read with fp8 alone", also=also("fp8_recipe")),
        K(o + "rope_scaling_*", "ask", why="positions are of the model's config.json: write it into model.config",
          also=(o + "yarn_scaling_factor", *also("rope_scaling_*", "yarn_scaling_factor"))))


def overridden(model: str) -> tuple[Key, ...]:
    """Returns the rows of override_config, which replaces entries of config.json: max_position_embeddings is set in
    model.config, attn_implementation has no effect here, the rest is asked for. model: the model's table, with a dot.
    """
    config, positions, attention = model + "override_config.", "max_position_embeddings", "attn_implementation"
    return (
        K(config + positions, to=f"model.config.{positions}", other=32768, also=(config + "model_config." + positions,)),
        K(config + attention, "automatic", why="attention is the platform's (model.attention)", also=(config + "model_config." + attention,)),
        K(config + "**", "ask", why="write it into model.config"))


def offloaded_state(o: str) -> Joint:
    """Returns the rule that sets optimizer.offload=True if Megatron's optimizer_cpu_offload is on with an
    optimizer_offload_fraction above 0.

    o: name of the optimizer's table, with a dot.
    """
    override = o + "override_optimizer_config."
    return Joint("offloaded optimizer state", (
        K(override + "optimizer_cpu_offload", "equivalent", default=False, other=True, beside={override + "optimizer_offload_fraction": 1.0}),
        K(override + "optimizer_offload_fraction", "equivalent", default=0.0)),
        lambda m: offloaded(m, override))


def optimizer_rest(o: str) -> tuple[Key, ...]:
    """Returns the rows of an optimizer's options that set nothing: not carried over, without effect, or automatic here.

    o: name of its table, with a dot.
    """
    return (
        K(o + "zero_indexed_step", "unsupported", fine=(True,), why="a schedule counts from 0"),
        K(o + "use_precision_aware_optimizer", "unsupported", fine=(False,), why="AdamW's moments are in fp32"),
        K(o + "main_grads_dtype", "inert", why="read with use_precision_aware_optimizer alone",
          also=(o + "exp_avg_dtype", o + "exp_avg_sq_dtype")),
        K(o + "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d", "automatic", why="XLA overlaps copies",
          also=(o + "override_optimizer_config.overlap_param_gather", o + "override_optimizer_config.overlap_grad_reduce")),
        K(o + "override_optimizer_config.use_precision_aware_optimizer", "inert",
          why="without dtypes of its own (main_grads_dtype, exp_avg_dtype ...) all stay in fp32"),
        K(o + "lr_wsd_*", "inert", why="read with a decay of WSD alone"),
        K(o + "muon_*", "inert", why="read by Muon alone", also=(o + "use_layer_wise_*",)))


JOBS = (
    Job("generation or evaluation without training", EVAL, r"\bmain_generation\w*|\bmain_eval\b|\bmain_\w*server\b"),
    Job("supervised fine-tuning by its first trainer", command=r"\bfsdp_sft_trainer\b", keys=("model.partial_pretrain",), table="verl_sft:FIRST"),
    Job("supervised fine-tuning", command=r"\b\w*sft_trainer\w*", keys=("optim.**", "model.**", "engine.**", "engine"),
        unless=("actor_rollout_ref.**", "algorithm.**"), table="verl_sft:SFT"),
)

TABLE = Table(
    name="verl", title="verl", command=r"verl[./]|main_ppo|main_dapo", versions=("0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"),
    jobs=JOBS, groups=("engine", "optim", "model"),
    own_configs=r"(_generated_)?(ppo(_\w+)?|sft)_trainer(_engine)?",
    differs=(
        "the gradient does not depend on micro-batches and the number of GPUs",
        "weight decay spares norms, biases and other vectors; verl's does not",
        "the order of the data is drawn from another generator",
    ),
    rules=(
        Joint("lengths", (
            K(DATA + "max_prompt_length", "equivalent", default=512, other=700),
            K(DATA + "max_response_length", "equivalent", default=512, other=700),
            K(DATA + "filter_overlong_prompts", "equivalent", default=False, other=True),
            K(DATA + "truncation", "equivalent", default="error", other="left")), meaning.lengths),
        Joint("batch", (
            K(DATA + "train_batch_size", "equivalent", default=1024, other=512),
            K(ACTOR + "ppo_mini_batch_size", "equivalent", default=256, other=128),
            K(CRITIC + "ppo_mini_batch_size", "equivalent", other=512, beside=GAE),
            K(ACTOR + "ppo_epochs", "equivalent", default=1, other=2),
            K(CRITIC + "ppo_epochs", "equivalent"),
            K(ROLLOUT + "n", "equivalent", default=1, other=8)), meaning.batch),
        Joint("advantage", (
            K(ALGO + "adv_estimator", "equivalent", default="gae", other="grpo"),
            K(ALGO + "norm_adv_by_std_in_grpo", "equivalent", default=True, other=False, beside=GRPO),
            K(ALGO + "gamma", "equivalent", default=1.0, other=0.99, beside=GAE),
            K(ALGO + "lam", "equivalent", default=1.0, other=0.95, beside=GAE),
            K(CRITIC + "model.path", "equivalent", other="another/model", beside=GAE),
            K(CRITIC + "optim.lr", "equivalent", default=1e-5, other=2e-5, beside=GAE),
            K(CRITIC + "optim.weight_decay", "equivalent", default=0.01, other=0.1, beside=GAE),
            K(CRITIC + "cliprange_value", "equivalent", default=0.5, other=0.2, beside=GAE),
            K(TRAINER + "critic_warmup", "equivalent", default=0, other=5, beside=GAE)), meaning.advantage),
        Joint("loss", (
            K(ACTOR + "policy_loss.loss_mode", "equivalent", default="vanilla", other="gspo"),
            K(ACTOR + "clip_ratio", "equivalent", default=0.2, other=0.3,
              beside={ACTOR + "clip_ratio_low": None, ACTOR + "clip_ratio_high": None}),
            K(ACTOR + "clip_ratio_low", "equivalent", default=Since(("0.3", None), ("0.4", 0.2)), other=0.1),
            K(ACTOR + "clip_ratio_high", "equivalent", default=Since(("0.3", None), ("0.4", 0.2)), other=0.28),
            K(ACTOR + "clip_ratio_c", "equivalent", default=3.0, other=10.0),
            K(ACTOR + "tau_pos", "equivalent", default=1.0, other=2.0, beside=LOSS("sapo")),
            K(ACTOR + "tau_neg", "equivalent", default=1.05, other=2.0, beside=LOSS("sapo")),
            *(K(ACTOR + "policy_loss.clip_cov_" + n, "equivalent", default=d, other=o, beside=LOSS("clip_cov")) for n, d, o in (
                ("ratio", 0.0002, 0.001), ("lb", 1.0, 0.5), ("ub", 5.0, 9.0))),
            K(ACTOR + "loss_agg_mode", "equivalent", default="token-mean", other="seq-mean-token-mean"),
            K(CRITIC + "loss_agg_mode", "equivalent"),
            K("trainer.use_legacy_worker_impl", "equivalent", default="auto"),
            K(ACTOR + "loss_scale_factor", "equivalent", other=4096,
              beside={ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"})), meaning.loss),
        K(ACTOR + "policy_loss.*", "inert", why="read by kl_cov or dro alone"),
        Joint("KL", (
            K(ACTOR + "use_kl_loss", "equivalent", default=False, other=True),
            K(ACTOR + "kl_loss_coef", "equivalent", default=0.001, other=0.01, beside=KL),
            K(ACTOR + "kl_loss_type", "equivalent", default="low_var_kl", other="mse", beside=KL),
            K(ALGO + "use_kl_in_reward", "equivalent", default=False, other=True),
            K(ALGO + "kl_penalty", "equivalent", default="kl", other="abs", beside={ALGO + "use_kl_in_reward": True}),
            K(ALGO + "kl_ctrl.kl_coef", "equivalent", default=0.001, other=0.01, beside={ALGO + "use_kl_in_reward": True}),
            K(ALGO + "kl_ctrl.type", "equivalent", default="fixed"),
            K(ACTOR + "entropy_coeff", "equivalent", default=Since(("0.3", 0.001), ("0.4", 0)), other=0.01)), meaning.kl),
        K(ALGO + "kl_ctrl.*", "inert", why="read by the adaptive controller alone"),
        Joint("mismatch", (
            K(CORRECTION + "rollout_is", "equivalent", other="token", also=(ALGO + "rollout_is",)),
            K(CORRECTION + "rollout_is_threshold", "equivalent", default=2.0, other=3.0, beside=TIS,
              also=(ALGO + "rollout_is_threshold",)),
            K(CORRECTION + "rollout_rs", "equivalent"),
            K(CORRECTION + "bypass_mode", "equivalent", default=False, other=True,
              also=(CORRECTION + "bypass_old_logprob_for_rollout",)),
            K(CORRECTION + "loss_type", "equivalent", default="ppo_clip"),
            K(CORRECTION + "rollout_is_batch_normalize", "equivalent", default=False),
            K(ACTOR + "tis_imp_ratio_cap", "equivalent", default=-1, other=2.0)), meaning.mismatch),
        K(CORRECTION + "rollout_rs_threshold*", "inert", why="read with rollout_rs alone"),
        K(CORRECTION + "*", "inert", why="read with other modes of the correction"),
        Joint("filtering", (
            K(ALGO + "filter_groups.enable", "equivalent", default=False, other=True),
            K(ALGO + "filter_groups.metric", "equivalent", default=""),
            K(ALGO + "filter_groups.max_num_gen_batches", "equivalent", default=0)), meaning.filtering),
        K(ALGO + "filter_groups.max_inflight_gen_batches", "automatic", why="a step asks for as many prompts as it lacks"),
        Joint("length penalty", (
            K(OVERLONG + "enable", "equivalent", default=False, other=True, beside={OVERLONG + "len": 100},
              also=("reward_model.overlong_buffer.enable", RK + "enable")),
            K(OVERLONG + "len", "equivalent", default=0, other=100, beside={OVERLONG + "enable": True},
              also=("reward_model.overlong_buffer.len", RK + "len")),
            K(OVERLONG + "penalty_factor", "equivalent", default=1.0, other=0.5,
              also=("reward_model.overlong_buffer.penalty_factor", RK + "penalty_factor"),
              beside={OVERLONG + "enable": True, OVERLONG + "len": 100})), meaning.length_penalty),
        K(OVERLONG + "log", "automatic", why="parts of rewards are metrics", also=("reward_model.overlong_buffer.log", RK + "log")),
        K(RM + "reward_kwargs.max_resp_len", "automatic", why="rollout.max_new_tokens", also=("reward.reward_kwargs.max_resp_len",)),
        Joint("sampling", (
            K(ROLLOUT + "temperature", "equivalent", default=1.0, other=0.7),
            K(ROLLOUT + "top_p", "equivalent", default=1, other=0.9),
            K(ROLLOUT + "top_k", "equivalent", default=-1, other=50),
            K(ROLLOUT + "do_sample", "equivalent", default=True)), meaning.sampling),
        Joint("optimizer", (
            K(ACTOR + "optim.lr", "equivalent", default=1e-6, other=2e-6),
            K(ACTOR + "grad_clip", "equivalent", default=1.0),
            K(CRITIC + "grad_clip", "equivalent", default=1.0),
            *optimizer_keys(ACTOR + "optim.", {}, "0.5"),
            *optimizer_keys(CRITIC + "optim.", GAE, "0.6")), optimizer),
        K(ACTOR + "optim.weight_decay", to="optimizer.weight_decay", default=0.01, other=0.1),
        K(ACTOR + "optim.total_training_steps", "automatic", why="schedules know the run's updates"),
        K(ACTOR + "optim.num_cycles", "unsupported", fine=(0.5,), why="a cosine falls once"),
        K(ACTOR + "optim.optimizer_impl", "unsupported", fine=("torch.optim",), also=(CRITIC + "optim.optimizer_impl",),
          why="AdamW's moments are in fp32, whatever package it is of"),
        K(CRITIC + "optim.total_training_steps", "automatic", why="schedules know the run's updates"),
        offloaded_state(ACTOR + "optim."), *optimizer_rest(ACTOR + "optim."), *optimizer_rest(CRITIC + "optim."),
        K(CRITIC + "optim.**", "unsupported", fine=(None, {}, False, "constant", 0.5), why="an option of its optimizers"),
        K(ACTOR + "optim.**", "unsupported", fine=(None, {}, False, "constant"), why="an option of its optimizers"),
        Joint("layout", (
            K(TRAINER + "nnodes", "equivalent", default=1),
            K(TRAINER + "n_gpus_per_node", "equivalent", default=8, other=4),
            K(ACTOR + "strategy", "equivalent", default="fsdp"),
            K("model_engine", "equivalent", default="dp", other="megatron", beside={MEGATRON + "tensor_model_parallel_size": 2}),
            *megatron_keys(ACTOR + "mindspeed.", {"model_engine": "mindspeed"}),
            *(K(ACTOR + n, "equivalent", default=1, other=2 if n != "torchtitan.pipeline_parallel_size" else None,
                beside=VEOMNI if n.startswith("veomni") else TITAN) for n in (
                "veomni.ulysses_parallel_size", "veomni.expert_parallel_size", "torchtitan.tensor_parallel_size",
                "torchtitan.pipeline_parallel_size", "torchtitan.context_parallel_size", "torchtitan.expert_parallel_size")),
            K(ACTOR + "veomni.fsdp_size", "equivalent", default=-1, other=4, beside=VEOMNI),
            *(K(f"{ACTOR}{n}.{what}_offload", "equivalent", default=False, other=True, beside={"model_engine": n})
              for n in ("veomni", "torchtitan", "mindspeed") for what in ("param", "optimizer")),
            *(K(f"{REF}{n}.param_offload", "equivalent", default=False, other=True, beside={**KL, "model_engine": n})
              for n in ("veomni", "torchtitan", "mindspeed")),
            *megatron_keys(MEGATRON, MEGA),
            K(MEGATRON + "param_offload", "equivalent", default=False, other=True, beside=MEGA),
            K(MEGATRON + "optimizer_offload", "equivalent", default=False, other=True, beside=MEGA),
            K(ACTOR + "fsdp_config.fsdp_size", "equivalent", default=-1, other=4),
            K(ACTOR + "fsdp_config.param_offload", "equivalent", default=False, other=True),
            K(ACTOR + "fsdp_config.optimizer_offload", "equivalent", default=False, other=True),
            K(ACTOR + "fsdp_config.offload_policy", "equivalent", default=False, other=True),
            K(REF + "fsdp_config.param_offload", "equivalent", default=False, other=True, beside=KL),
            K(REF + "megatron.param_offload", "equivalent", default=False, other=True, beside={**KL, **MEGA}),
            K(ACTOR + "ulysses_sequence_parallel_size", "equivalent", default=1,
              also=(ACTOR + "fsdp_config.ulysses_sequence_parallel_size",)),
            K(ROLLOUT + "name", "equivalent", default="vllm"),
            K(ROLLOUT + "tensor_model_parallel_size", "equivalent", default=2, other=4),
            K(ROLLOUT + "data_parallel_size", "equivalent", default=1, other=2),
            K(ROLLOUT + "pipeline_model_parallel_size", "equivalent", default=1, other=2),
            K(ROLLOUT + "expert_parallel_size", "equivalent", default=1, other=2)), engine.layout),
        Joint("memory", (
            K(MICRO, "equivalent", other=4),
            K(ACTOR + "use_dynamic_bsz", "equivalent", default=False, other=True),
            K(ACTOR + "ppo_max_token_len_per_gpu", "equivalent", default=16384, other=9000, beside=DYNAMIC),
            K(ROLLOUT + "log_prob_micro_batch_size_per_gpu", "equivalent", other=8),
            K(ROLLOUT + "log_prob_max_token_len_per_gpu", "equivalent", other=9000, beside=DYNAMIC)), meaning.memory),
        Joint("data", (K(DATA + "train_files", "equivalent", default="~/data/rlhf/gsm8k/train.parquet", other="b.parquet"),),
              lambda m: common.data_files(m, m.list(DATA + "train_files"), DATA + "train_files")),
        Joint("evaluation sets", (K(DATA + "val_files", "equivalent", default="~/data/rlhf/gsm8k/test.parquet", other="b.parquet"),),
              lambda m: common.eval_sets(m, m.list(DATA + "val_files"), DATA + "val_files")),
        Joint("columns", (
            K(DATA + "prompt_key", "equivalent", default="prompt", other="question"),
            K(DATA + "train_max_samples", "equivalent", default=-1, other=100),
            K(DATA + "shuffle", "equivalent", default=True, other=False),
            K(DATA + "seed", "equivalent", other=7)), meaning.column),
        Joint("evaluation", (
            K(TRAINER + "test_freq", "equivalent", default=-1, other=5),
            K(TRAINER + "val_before_train", "equivalent", default=True, other=False),
            K(TRAINER + "val_only", "equivalent", default=False, other=True),
            K(VAL + "temperature", "equivalent", default=0, other=0.6),
            K(VAL + "do_sample", "equivalent", default=False),
            K(VAL + "top_p", "equivalent", default=1.0, other=0.7),
            K(VAL + "top_k", "equivalent", default=-1, other=20),
            K(VAL + "n", "equivalent", default=1, other=4, beside={VAL + "temperature": 1.0}),
            K(DATA + "val_max_samples", "equivalent", default=-1, other=100)), meaning.evaluation),
        Joint("reward", (
            K("custom_reward_function.path", "equivalent", other="mine.py", also=("reward.custom_reward_function.path",)),
            K("custom_reward_function.name", "equivalent", default="compute_score", also=("reward.custom_reward_function.name",)),
            K("custom_reward_function.reward_kwargs.*", "equivalent", also=("reward.custom_reward_function.reward_kwargs.*",)),
            K(RM + "enable", "equivalent", default=False, other=True, also=(NEW + "enable",)),
            K(RM + "use_reward_loop", "automatic", why="a reward model scores whole completions in its own template",
              default=Since(("0.3", False), ("0.7", True))),
            K(RM + "model.path", "equivalent", default=Since(("0.3", "~/models/FsfairX-LLaMA3-RM-v0.1"), ("0.8", None)), other="x/y",
              beside=RMODEL, also=(NEW + "model_path",))), meaning.reward),
        K(RM + "reward_manager", "unsupported", fine=("naive", "dapo", "batch", "prime", "remote"),
          also=("reward_manager.name", "reward.reward_manager.name"),
          why="a reward manager of its own: write the reward as a function"),
        K("reward.reward_manager.source", "unsupported", fine=("register",), refuse=True, why="a reward manager of a file: write a function"),
        K("reward.reward_manager.module.*", "inert", why="read with source=importlib alone"),
        K(RM + "sandbox_fusion.url", "ask", why="set sandbox.backend=remote, sandbox.url and sandbox.api=fusion",
          also=("sandbox_fusion.url", "reward.sandbox_fusion.url")),
        K("sandbox_fusion.*", "automatic", why="sandbox.workers and sandbox.memory_mb", also=("reward.sandbox_fusion.*",)),
        K(NEW + "**", "automatic", why="the reward model is held beside the policy"),
        K("reward.num_workers", "automatic", why="reward.workers"),
        K(RM + "max_length", to="reward.model.max_sequence_tokens", other=4096),
        K(RM + "**", "automatic", why="the reward model is sharded as the policy"),
        K("reward_manager.**", "automatic", why="rewards are functions"),
        K(TRAINER + "total_epochs", to="data.epochs", default=30, other=3),
        K(TRAINER + "total_training_steps", to="train.steps", other=9),
        K(MODEL + "path", to="model.path", default="~/models/deepseek-llm-7b-chat", other="another/model"),
        K(MODEL + "tokenizer_path", to="model.tokenizer", other="another/model", also=(DATA + "tokenizer",)),
        K(MODEL + "trust_remote_code", to="model.trust_remote_code", default=False, other=True),
        K(DATA + "trust_remote_code", "automatic", why="model.trust_remote_code"),
        K(MODEL + "enable_gradient_checkpointing", "equivalent", "model.remat", lambda on: "full" if on else "none", default=True,
          other=False),
        Joint("template", (K(MODEL + "custom_chat_template", "equivalent", other="{{ messages }}"),), meaning.template),
        *overridden(MODEL), *megatrons_own(MEGATRON, ACTOR + "mindspeed."),
        Joint("adapters", (
            K(MODEL + "lora_rank", "equivalent", default=0, other=16),
            K(MODEL + "lora_alpha", "equivalent", default=16, other=32, beside=LORA),
            K(MODEL + "target_modules", "equivalent", default="all-linear", other=["q_proj"], beside=LORA),
            K(MODEL + "exclude_modules", "equivalent", other=["lm_head"], beside=LORA),
            K(MODEL + "lora_adapter_path", "equivalent", other="a/b"),
            K(MODEL + "lora.rank", "equivalent", default=0, other=16, beside=MEGA),
            K(MODEL + "lora.alpha", "equivalent", default=32, other=64, beside=MLORA),
            K(MODEL + "lora.target_modules", "equivalent", default=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
              other=["linear_qkv"], beside=MLORA),
            K(MODEL + "lora.exclude_modules", "equivalent", default=[], other=["linear_fc2"], beside=MLORA),
            K(MODEL + "lora.dropout", "equivalent", default=0.0),
            K(MODEL + "lora.type", "equivalent", default="lora", other="dora", beside=MLORA),
            K(MODEL + "lora.lora_A_init_method", "equivalent", default="xavier"),
            K(MODEL + "lora.adapter_path", "equivalent", other="a/b", beside=MLORA)), meaning.adapters),
        K(MODEL + "lora.**", "automatic", why="adapters are merged as lora.publish says, and are of the language model"),
        Joint("places", (
            K(TRAINER + "default_local_dir", "equivalent", other="runs/x"),
            K(TRAINER + "save_freq", "equivalent", default=-1, other=20),
            K(TRAINER + "max_actor_ckpt_to_keep", "equivalent", other=2),
            K(TRAINER + "resume_mode", "equivalent", default="auto", other="disable"),
            K(TRAINER + "resume_from_path", "equivalent")), meaning.places),
        Joint("loggers", (
            K(TRAINER + "logger", "equivalent", default=["console", "wandb"], other="console"),
            K(TRAINER + "project_name", "equivalent", default="verl_examples", other="mine"),
            K(TRAINER + "experiment_name", "equivalent", default="gsm8k", other="mine")), meaning.loggers),
        Joint("context", (K(ROLLOUT + "max_model_len", "equivalent", other=2000),), meaning.context),
        Joint("further options of vLLM", (K(ROLLOUT + "engine_kwargs.**", "equivalent"),), meaning.engine_options),
        K(ROLLOUT + "dtype", "equivalent", "rollout.dtype", lambda d: common.DTYPES.get(str(d), str(d)), default="bfloat16",
          other="float16"),
        K(ACTOR + "fsdp_config.model_dtype", "equivalent", "train.param_dtype", lambda d: common.DTYPES.get(str(d), str(d)),
          default="fp32", other="bf16"),
        K(ROLLOUT + "gpu_memory_utilization", to="rollout.vllm.memory_fraction", default=0.5, other=0.6),
        K(ROLLOUT + "max_num_seqs", to="rollout.vllm.max_running", default=Since(("0.3", 1024), ("0.9", 256)), other=128),
        K(ROLLOUT + "enable_chunked_prefill", to="rollout.vllm.chunked_prefill", default=True, other=False),
        K(ROLLOUT + "enable_prefix_caching", to="rollout.vllm.prefix_caching", default=True, other=False),
        K(ROLLOUT + "max_num_batched_tokens", "equivalent", "rollout.vllm.engine_kwargs.max_num_batched_tokens", default=8192, other=4096),
        K(ROLLOUT + "enforce_eager", "equivalent", "rollout.vllm.engine_kwargs.enforce_eager",
          default=Since(("0.3", True), ("0.6", False)), other=True),
        Joint("turns", turns.KEYS, turns.turns),
        K(ROLLOUT + "multi_turn.**", "inert", why="read with multi_turn.enable alone"),
        K(ROLLOUT + "agent.default_agent_loop", "unsupported", fine=("single_turn_agent",), refuse=True,
          why="an agent loop of its own: write an episode (docs/guides/environments.md)"),
        K(ROLLOUT + "agent.agent_loop_manager_class", "unsupported", refuse=True,
          why="a loop of its own: write an episode (docs/guides/environments.md)"),
        K(ROLLOUT + "agent.*", "automatic", why="requests are asynchronous", also=(ROLLOUT + "agent.custom_async_server.*",)),
        K(ROLLOUT + "ignore_eos", "unsupported", fine=(False,), refuse=True, why="an end token ends a completion"),
        K(ROLLOUT + "quantization", "unsupported", why="name it in rollout.vllm.engine_kwargs by hand"),
        K(ROLLOUT + "skip_rollout", "unsupported", fine=(False,), refuse=True, why="completions from a dump",
          also=(ROLLOUT + "skip.enable", "skip.rollout.enable", "skip.rollout_tq.enable", "skip.async_rollout.enable")),
        K("skip.**", "inert", why="read with its enable alone", also=(ROLLOUT + "skip.*",)),
        K(ROLLOUT + "full_determinism", "unsupported", fine=(False,), why="vLLM's batch invariance is a variable in rollout.vllm.env"),
        K(ROLLOUT + "over_sample_rate", "unsupported", fine=(0, 0.0), why="no completion is sampled to be left out"),
        K(ROLLOUT + "nnodes", "inert", why="read by the trainer that samples apart", also=(ROLLOUT + "n_gpus_per_node",)),
        K(ROLLOUT + "moe_tensor_parallel_size", "automatic", why="read by TensorRT-LLM alone: how a server's GPUs share experts"),
        K(ROLLOUT + "enable_rollout_routing_replay", "inert", why="read with the actor's router_replay alone"),
        Joint("variables of the template", (K(DATA + "apply_chat_template_kwargs.*", "equivalent"),),
              lambda m: common.template_kwargs(m, DATA + "apply_chat_template_kwargs.*")),
        K(DATA + "custom_cls.path", "unsupported", refuse=True, why="a data set class of its own: write the rows as JSONL or Parquet"),
        K(DATA + "sampler.*", "unsupported", why="a sampler of its own: data.difficulty and data.sources order rows"),
        K(DATA + "datagen.*", "unsupported", refuse=True, why="rows that are made while training"),
        Joint("images", (
            K(DATA + "image_key", "equivalent", default="images", other="pictures"),
            K(DATA + "mm_processor_kwargs.max_pixels", "equivalent", other=1000000, also=(DATA + "mm_processor_kwargs.images_kwargs.max_pixels",)),
            K(DATA + "mm_processor_kwargs.min_pixels", "equivalent", other=3136, also=(DATA + "mm_processor_kwargs.images_kwargs.min_pixels",)),
            K(ROLLOUT + "limit_images", "equivalent", other=3),
            K(ACTOR + "freeze_vision_tower", "equivalent", default=False)), images_meaning.verl),
        K(DATA + "mm_processor_kwargs.*", "ask", why="an option of the processor: data.image_* are those of jaxrl"),
        K(DATA + "image_patch_size", "automatic", why="the checkpoint's", also=(DATA + "return_multi_modal_inputs", DATA + "mm_processor_kwargs")),
        K(DATA + "video_key", "unsupported", fine=("videos",), why="a job with videos is not translated: jaxrl reads them by data.video_column "
          "(docs/guides/vision.md)"),
        K(DATA + "audio_key", "unsupported", fine=("audios",), why="sound is not read"),
        K(DATA + "validation_shuffle", "automatic", why="evaluation takes all rows"),
        K(ACTOR + "loss_mode", "unsupported", fine=("vanilla",), refuse=True, why="of its recipe of entropy: actor.policy_loss.loss_mode is read",
          also=(ACTOR + "clip_cov_ratio", ACTOR + "clip_cov_lb", ACTOR + "clip_cov_ub", ACTOR + "kl_cov_ratio")),
        K(ROLLOUT + "use_fire_sampling", "unsupported", fine=(False,), refuse=True, why="FIRE's first tokens at another temperature"),
        K(ALGO + "use_pf_ppo", "unsupported", fine=(False,), refuse=True, why="PF-PPO's reweighing of samples"),
        K(ALGO + "pf_ppo.*", "inert", why="read with use_pf_ppo alone"),
        K(ALGO + "gdpo_reward_keys", "inert", why="read by the estimator gdpo alone", also=(ALGO + "gdpo_reward_weights",)),
        Joint("replayed experts", (K(ACTOR + "router_replay.mode", "equivalent", default="disabled", other="R3", also=(
            MEGATRON + "router_replay.mode", ACTOR + "veomni.router_replay.mode")),), engine.routes),
        K(ACTOR + "router_replay.*", "inert", why="read with router_replay.mode alone",
          also=(MEGATRON + "router_replay.*", ACTOR + "veomni.router_replay.*")),
        *(K(place + "qat.enable", "unsupported", fine=(False,), refuse=True, why="training for a quantised model") for place in (
            ACTOR, ACTOR + "fsdp_config.", MEGATRON)),
        K(ACTOR + "qat.*", "inert", why="read with qat.enable alone", also=(ACTOR + "fsdp_config.qat.*", MEGATRON + "qat.*")),
        Joint("trainer", (
            K(TRAINER + "use_v1", "equivalent", default=True),
            K(TRAINER + "v1.trainer_mode", "equivalent", default="sync")), meaning.later),
        K(TRAINER + "v1.sampler.custom_sampler.path", "unsupported", refuse=True, why="a replay buffer of its own"),
        K(TRAINER + "v1.sampler.sync_refill_failed_groups", "unsupported", fine=(False,), why="a failed group counts as masked"),
        K(TRAINER + "v1.**", "inert", why="read by the trainers that sample ahead"),
        K(CRITIC + "model.lora_rank", "unsupported", fine=(0,), why="a critic trains whole", also=(CRITIC + "model.lora.rank",)),
        K(CRITIC + "enable", "automatic", why="there is a critic where the advantage is gae"),
        Joint("distillation", distill.KEYS, distill.distillation),
        Joint("dtypes", (
            *(K(ACTOR + n, "equivalent", default="bfloat16" if n.endswith(".dtype") else None, other=OTHER_DTYPE.get(n),
                beside={"model_engine": n.partition(".")[0]} if n.startswith("m") else {}) for n in engine.COMPUTE),
            *(K(REF + n, "equivalent", default="bfloat16" if n.endswith(".dtype") else None) for n in engine.COMPUTE),
            K(REF + "fsdp_config.model_dtype", "equivalent", default=Since(("0.3", None), ("0.6", "fp32")), other="bf16",
              beside={**KL, REF + "fsdp_config.mixed_precision.param_dtype": "fp32"}),
            K(engine.CRITICS_DTYPE, "equivalent", default="fp32", also=(CRITIC + "fsdp.model_dtype", CRITIC + "fsdp_config.model_dtype")),
            K(CRITIC + "megatron.dtype", "equivalent", default="bfloat16",
              also=tuple(CRITIC + n for n in ("mindspeed.dtype", "model.megatron.dtype", "model.mindspeed.dtype"))),
            K(engine.REWARDS_DTYPE, "equivalent", default="bfloat16", other="float32", beside={**RMODEL, RM + "model.path": "x/y"},
              also=(NEW + "rollout.dtype", NEW + "inference.dtype", RM + "inference.dtype"))), engine.dtypes),
        K(CRITIC + "fsdp.dtype", "inert", why="the critic's engine computes in bfloat16, whatever it says", also=tuple(
            CRITIC + n for n in ("fsdp_config.dtype", "model.fsdp_config.dtype", "veomni.dtype", "model.veomni.dtype", "torchtitan.dtype",
                                 "model.torchtitan.dtype"))),
        K(ACTOR + "fsdp_config.mixed_precision.*", "automatic", why="gradients are summed in fp32", also=(REF + "fsdp_config.mixed_precision.*",)),
        K(distill.D + "**", "automatic", why="the teacher reads rows as the reference does"),
        K(MODEL + "mtp.enable", "unsupported", fine=(False,), why="multi-token prediction"),
        K(MODEL + "mtp.*", "inert", why="read with mtp.enable alone"),
        Joint("offloaded activations", (K(MODEL + "enable_activation_offload", "equivalent", default=False, other=True),),
              lambda m: common.offloaded(m, MODEL + "enable_activation_offload")),
        K("async_training.**", "unsupported", refuse=True, also=("rollout.**",), why="its fully asynchronous recipe: rollout.max_staleness"),
        K("actor", "unsupported", also=("ref", "critic"), why="a group of configs of its own: the engine's sizes are not read"),
        K("optim.**", "unsupported", refuse=True, also=("model.**", "engine.**", "engine"),
          why="its supervised trainer is not read; run.recipe=sft is ours"),
        *(K(name, "automatic", why=why, also=also) for name, why, also in (
            (ACTOR + "ppo_micro_batch_size", "packed rows (train.tokens_per_microbatch)", ()),
            (ACTOR + "fsdp_config.**", "the mesh and XLA decide", ()),
            (ACTOR + "megatron.**", "the mesh and XLA decide", (ACTOR + "veomni.**", ACTOR + "torchtitan.**", ACTOR + "mindspeed.**")),
            (ACTOR + "checkpoint.**", "a checkpoint is whole; export is checkpoint.export_*", (CRITIC + "checkpoint.**",)),
            (ACTOR + "profiler.**", "profile.steps", ("global_profiler.**", TRAINER + "profile_steps", REF + "profiler.**",
                                                    CRITIC + "profiler.**", ROLLOUT + "profiler.**", TRAINER + "npu_profile.**",
                                                    "actor_rollout_ref.profiler.**", TRAINER + "*_nsight_options.**")),
            (ACTOR + "shuffle", "mini-batches are of shuffled prompts", (ACTOR + "data_loader_seed",)),
            (ACTOR + "use_torch_compile", "every program is compiled", ()),
            (ACTOR + "entropy_*", "entropy comes with the log-probs", (ACTOR + "calculate_entropy",)),
            (ACTOR + "use_remove_padding", "rows are packed", (MODEL + "use_remove_padding", CRITIC + "model.use_remove_padding")),
            (ACTOR + "**", "no counterpart is needed", ()),
            (REF + "**", "the reference is sharded and scored as the policy", ()),
            (CRITIC + "**", "the critic is sharded as the policy", ()),
            (MODEL + "**", "kernels are the platform's", ()),
            (ROLLOUT + "mode", "requests are asynchronous", ()),
            (ROLLOUT + "prompt_length", "data.max_prompt_tokens", ()),
            (ROLLOUT + "response_length", "rollout.max_new_tokens", ()),
            (ROLLOUT + "load_format", "servers start with dummy weights", ()),
            (ROLLOUT + "free_cache_engine", "colocated engines sleep during the update", ()),
            (ROLLOUT + "calculate_log_probs", "log-probs of what was sampled are always kept", ()),
            (VAL + "**", "no counterpart is needed", ()),
            (ROLLOUT + "**", "vLLM's own choice", ()),
            (DATA + "val_batch_size", "all rows are asked at once, within what the engine takes", ()),
            (DATA + "gen_batch_size", "a step asks for as many prompts as it lacks", ()),
            (DATA + "reward_fn_key", "the column data_source reaches the reward", ()),
            (DATA + "**", "no counterpart is needed", ()),
            (TRAINER + "balance_batch", "rows are packed evenly", ()),
            (TRAINER + "log_val_generations", "every evaluation writes its completions, every step its rollouts (log.rollouts)", (
                TRAINER + "rollout_data_dir", TRAINER + "validation_data_dir")),
            (TRAINER + "max_critic_ckpt_to_keep", "one checkpoint holds both", ()),
            (TRAINER + "**", "no counterpart is needed", ()),
            ("actor_rollout_ref.hybrid_engine", "engine and trainer take turns", ()),
            ("actor_rollout_ref.nccl_timeout", "rollout.timeout_seconds and launch.wait_seconds", ()),
            ("ray_kwargs.**", "no Ray", ("ray_init.**",)),
            ("transfer_queue.**", "a step's rows stay in the process that sampled them", ()))),
    ),
)
