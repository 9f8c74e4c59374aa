"""AReaL (AReaL-lite, GRPO and PPO): what its keys mean here.

Read from its code at the tags v0.3.3, v0.4.1 and v1.0.4; rewards, data loaders and workflows are Python there, and not
read. Its reward is (r + bias) x scale within +-20, its KL 0.1 in the reward where nothing is set.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.jobs import DISTILL, SFT, Job
from jaxrl.migrate.systems import areal_meaning as meaning
from jaxrl.migrate.systems import areal_turns
from jaxrl.migrate.systems.areal_meaning import ACTOR, CRITIC, DATA, EVAL, GCONFIG, OPTIM, REJECT
from jaxrl.migrate.table import Joint, Key, Migration, Since, Table

K = Key
NORM, ADV = ACTOR + "reward_norm.", ACTOR + "adv_norm."
GROUP = {NORM + "mean_level": "group", NORM + "std_level": "group"}
VALUES, DECOUPLED = {CRITIC + "path": "a/critic"}, {ACTOR + "use_decoupled_loss": True}
OWN_EVAL, LORA, SAPO = {EVAL + "temperature": 0.7}, {ACTOR + "use_lora": True}, {ACTOR + "use_sapo_loss": True}
LONG = {ACTOR + "overlong_reward_penalty": True, ACTOR + "overlong_tokens": 100, ACTOR + "overlong_penalty_factor": 1.0}
RECOVER, WANDB = {"recover.mode": "auto"}, {"stats_logger.wandb.mode": "online"}

def dtypes(m: Migration):
    """Sets reference.dtype from ref.dtype if the job has a frozen reference. A reference that computes in another dtype
    than train.compute_dtype is a known difference; such a critic is reported as not carried over."""
    common.frozen_dtype(m, "reference.dtype", m.text("ref.dtype"), "ref.dtype")
    common.critics_dtype(m, CRITIC + "dtype", "train.compute_dtype")


JOBS = (
    Job("a config of AReaL before AReaL-lite", "run.recipe=rl (configs/grpo.py)", keys=("ppo.**", "exp_ctrl.**", "actor_train.**")),
    Job("training of a reward model", keys=("train_dataset.type=rw",), table="areal_jobs:REWARD"),
    Job("preference training", keys=("train_dataset.type=dpo",), table="areal_jobs:PREFERENCE"),
    Job("supervised fine-tuning", command=r"\bsft\w*\.py\b|_sft\.py\b", keys=("train_dataset.type=sft",), table="areal_jobs:SFT"),
    Job("supervised fine-tuning or a reward model (train_dataset.type=sft or rw says which)", SFT, keys=("model.**",), unless=("actor.**",)),
    Job("distillation from a teacher beside the reward", DISTILL, keys=("teacher.**",)),
)

SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")  # of vLLM; 1.0 has them as no_enable_...


def switches(m):
    """Sets rollout.vllm.prefix_caching and chunked_prefill from the vllm.enable_... switches that are set, or negated
    from 1.0's vllm.no_enable_... Marks a switch inert if it is null or if vLLM is not the source's engine."""
    own = "vllm.gpu_memory_utilization" in m.options.get("rollout.vllm.memory_fraction", (0, ()))[1]
    for no, name in ((no, name) for no in ("", "no_") for name in SWITCHES if m.given(f"vllm.{no}{name}")):
        key = f"vllm.{no}{name}"
        if own and m[key] is not None:
            m.set(f"rollout.vllm.{name.removeprefix('enable_')}", m.flag(key) != bool(no), key)
        else:
            m.mark(key, "inert", "empty, or an option of another engine")


TABLE = Table(
    name="areal", title="AReaL", command=r"areal|train", versions=("0.3", "0.4", "0.5", "1.0"),
    required={"train_dataset.batch_size": 64, "gconfig.n_samples": 4},
    jobs=JOBS,
    differs=(
        "mini-batches are of whole prompts, AReaL's of sequences of about as many tokens",
        "weight decay spares norms, biases and other vectors",
        "the norm of rewards adds 1e-6 to the deviation, AReaL's 1e-5 or 1e-9",
        "the order of the data is drawn from another generator",
    ),
    rules=(
        Joint("sampling and lengths", (
            K(GCONFIG + "max_new_tokens", "equivalent", default=16384, other=700),
            K(DATA + "max_length", "equivalent", other=700),
            K(GCONFIG + "max_tokens", "equivalent", default=Since(("0.3", None), ("0.4", 65536), ("1.0", 32768)), other=9000),
            K(GCONFIG + "temperature", "equivalent", default=1.0, other=0.7),
            K(GCONFIG + "top_p", "equivalent", default=1.0, other=0.9),
            K(GCONFIG + "top_k", "equivalent", default=100000000, other=50),
            K(GCONFIG + "stop", "equivalent", other=["</a>"]),
            K(GCONFIG + "stop_token_ids", "equivalent", default=[], other=[5]),
            K(GCONFIG + "frequency_penalty", "equivalent", default=0.0, other=0.1),
            K(GCONFIG + "greedy", "equivalent", default=False),
            K(ACTOR + "temperature", "equivalent", default=1.0)), meaning.sampling),
        K(GCONFIG + "min_new_tokens", "inert", why="AReaL's requests do not have it"),
        Joint("batch", (
            K(DATA + "batch_size", "equivalent", default=1, other=128),
            K(GCONFIG + "n_samples", "equivalent", default=1, other=8),
            K(ACTOR + "ppo_n_minibatches", "equivalent", default=4, other=2),
            K(CRITIC + "ppo_n_minibatches", "equivalent", default=4, other=2, beside=VALUES)), meaning.batch),
        K(ACTOR + "group_size", "automatic", why="gconfig.n_samples is the group", also=(NORM + "group_size",)),
        Joint("reward", (
            K(ACTOR + "reward_scaling", "equivalent", default=1.0, other=10.0, beside={ACTOR + "reward_bias": -0.5}),
            K(ACTOR + "reward_bias", "equivalent", default=0.0, other=-0.5),
            K(ACTOR + "reward_clip", "equivalent", default=20.0, other=5.0),
            K(ACTOR + "mask_no_eos_with_zero", "equivalent", default=False, other=True),
            K(ACTOR + "overlong_reward_penalty", "equivalent", default=False, other=True, beside={k: v for k, v in LONG.items() if v is not True}),
            K(ACTOR + "overlong_tokens", "equivalent", other=50, beside=LONG),
            K(ACTOR + "overlong_penalty_factor", "equivalent", other=0.5, beside=LONG),
            K(ACTOR + "max_new_tokens", "inert", default=1024, why="read by the overlong penalty alone; gconfig.max_new_tokens bounds completions"),
            K(ACTOR + "group_reward_norm", "equivalent", default=False, other=True),
            K(NORM + "mean_level", "equivalent", default="batch", other="group", beside={NORM + "std_level": "batch"}),
            K(NORM + "std_level", "equivalent", default="batch", other="group", beside={NORM + "mean_level": "group"}),
            K(NORM + "mean_leave1out", "equivalent", default=False, other=True, beside=GROUP),
            K(NORM + "std_unbiased", "equivalent", default=True)), meaning.reward),
        K(NORM + "eps", "automatic", why="1e-6 is added", also=(ADV + "eps",)),
        K(ADV + "std_unbiased", "unsupported", fine=(True,), why="the deviation of advantages is the unbiased one"),
        K(ADV + "mean_leave1out", "unsupported", fine=(False,), why="an advantage is centred by the mean of all; reward_norm.mean_leave1out is"
          " algorithm.advantage=rloo"),
        Joint("advantage", (
            K(ACTOR + "discount", "equivalent", default=1.0, other=0.99),
            K(ACTOR + "gae_lambda", "equivalent", default=1.0, other=0.95),
            K(CRITIC + "path", "equivalent", other="a/critic"),
            K(CRITIC + "eps_clip", "equivalent", default=0.5, other=0.2, beside=VALUES),
            K(CRITIC + "optimizer.lr", "equivalent", default=Since(("0.3", 2e-5), ("0.4", 1e-3)), other=1e-5, beside=VALUES),
            K(ADV + "mean_level", "equivalent", default="batch", other="group", beside={ADV + "std_level": "group"}),
            K(ADV + "std_level", "equivalent", default="batch", other="group", beside={ADV + "mean_level": "group"}),
            K(ADV + "group_size", "equivalent", default=1)), meaning.advantage),
        Joint("KL", (
            K(ACTOR + "kl_ctl", "equivalent", default=0.1, other=0.0),
            K(ACTOR + "kl_estimator", "equivalent", default="k1", other="k2"),
            K("ref.path", "equivalent", other="a/reference")), meaning.kl),
        Joint("loss", (
            K(ACTOR + "eps_clip", "equivalent", default=0.2, other=0.4),
            K(ACTOR + "eps_clip_higher", "equivalent", other=0.3),
            K(ACTOR + "c_clip", "equivalent", other=3.0),
            K(ACTOR + "use_sapo_loss", "equivalent", default=False, other=True),
            K(ACTOR + "use_cispo_loss", "equivalent", default=False, other=True),
            K(ACTOR + "sapo_tau_pos", "equivalent", default=1.0, other=2.0, beside=SAPO),
            K(ACTOR + "sapo_tau_neg", "equivalent", default=1.05, other=2.0, beside=SAPO),
            K(ACTOR + "importance_sampling_level", "equivalent", default="token", other="sequence"),
            K(ACTOR + "m2_threshold", "equivalent", other=0.04, beside=DECOUPLED),
            K(ACTOR + "recompute_logprob", "equivalent", default=False, other=True, beside={ACTOR + "kl_ctl": 0.0}),
            K(ACTOR + "use_decoupled_loss", "equivalent", default=False, other=True, beside={ACTOR + "kl_ctl": 0.0}),
            K(ACTOR + "prox_logp_method", "equivalent", default="recompute"),
            K(ACTOR + "behav_imp_weight_cap", "equivalent", other=5.0, beside=DECOUPLED),
            K(ACTOR + "behave_imp_weight_cap", "equivalent", other=4.0, beside=DECOUPLED),
            K(ACTOR + "behave_imp_weight_mode", "equivalent", other="token_truncate", beside=DECOUPLED),
            K(REJECT + "level", "equivalent", default="token", other="token", beside=DECOUPLED),
            K(REJECT + "action", "equivalent", default="mask", other="clamp", beside=DECOUPLED),
            K(REJECT + "metric", "equivalent", default="ratio"),
            K(REJECT + "upper", "equivalent", default=5.0, other=3.0, beside=DECOUPLED),
            K(REJECT + "lower", "equivalent", other=0.5, beside=DECOUPLED)), meaning.loss),
        K(REJECT + "agg", "inert", why="read with level=sequence alone"),
        Joint("filtering", (
            K(ACTOR + "dynamic_sampling", "equivalent", default=False, other=True),
            K("dynamic_bs", "equivalent", default=False)), meaning.filtering),
        Joint("staleness", (
            K("rollout.max_head_offpolicyness", "equivalent", default=0, other=2),
            K("rollout.consumer_batch_size", "equivalent", other=128),
            K("async_training", "equivalent", default=True, other=False, beside={"rollout.max_head_offpolicyness": 2})), meaning.staleness),
        Joint("evaluation", (
            K("evaluator.freq_steps", "equivalent", other=5),
            K("evaluator.freq_epochs", "equivalent", other=1),
            K("evaluator.freq_secs", "equivalent", other=600),
            K("evaluator.eval_before_train", "equivalent", default=False, other=True),
            K(EVAL + "temperature", "equivalent", default=1.0, other=0.9),
            K(EVAL + "greedy", "equivalent", default=False, other=True, beside=OWN_EVAL),
            K(EVAL + "n_samples", "equivalent", default=1, other=4, beside=OWN_EVAL),
            K(EVAL + "top_p", "equivalent", default=1.0, other=0.9, beside=OWN_EVAL),
            K(EVAL + "top_k", "equivalent", default=100000000, other=50, beside=OWN_EVAL),
            K(EVAL + "stop", "equivalent", other=["</b>"], beside=OWN_EVAL),
            K(EVAL + "max_new_tokens", "equivalent", default=16384, other=900, beside=OWN_EVAL)), meaning.evaluation),
        K(EVAL + "*", "unsupported", fine=(None, 0, False, [], 0.0), why="evaluation has the shortest completions and the stop tokens of rollouts"),
        Joint("optimizer", (
            K(OPTIM + "lr", "equivalent", default=Since(("0.3", 2e-5), ("0.4", 1e-3)), other=2e-6),
            K(OPTIM + "lr_scheduler_type", "equivalent", default="constant", other="cosine"),
            K(OPTIM + "warmup_steps_proportion", "equivalent", default=0.001, other=0.1),
            K(OPTIM + "warmup_steps", "equivalent", other=20),
            K(OPTIM + "min_lr_ratio", "equivalent", default=0.0, other=0.1, beside={OPTIM + "lr_scheduler_type": "cosine"}),
            K(OPTIM + "type", "equivalent", default="adam", other="sgd")), meaning.optimizer),
        K(OPTIM + "weight_decay", to="optimizer.weight_decay", default=Since(("0.3", 0.05), ("0.4", 0.01)), other=0.1),
        K(OPTIM + "beta1", to="optimizer.b1", default=0.9, other=0.8),
        K(OPTIM + "beta2", to="optimizer.b2", default=Since(("0.3", 0.95), ("0.4", 0.999)), other=0.98),
        K(OPTIM + "eps", to="optimizer.eps", default=Since(("0.3", 1e-5), ("0.4", 1e-8)), other=1e-6),
        K(OPTIM + "gradient_clipping", to="optimizer.max_grad_norm", default=1.0, other=0.5),
        Joint("critic's optimizer", (
            K(CRITIC + "optimizer.weight_decay", "equivalent", default=Since(("0.3", 0.05), ("0.4", 0.01)), other=0.1, beside=VALUES),
            K(CRITIC + "optimizer.beta1", "equivalent", default=0.9, other=0.8, beside=VALUES),
            K(CRITIC + "optimizer.beta2", "equivalent", default=Since(("0.3", 0.95), ("0.4", 0.999)), other=0.98, beside=VALUES),
            K(CRITIC + "optimizer.eps", "equivalent", default=Since(("0.3", 1e-5), ("0.4", 1e-8)), other=1e-6, beside=VALUES),
            K(CRITIC + "optimizer.min_lr_ratio", "equivalent", default=0.0, other=0.1,
              beside={**VALUES, CRITIC + "optimizer.lr_scheduler_type": "cosine"}),
            K(CRITIC + "optimizer.gradient_clipping", "equivalent", default=1.0, other=0.5, beside=VALUES),
            K(CRITIC + "optimizer.lr_scheduler_type", "equivalent", default="constant", other="cosine", beside=VALUES),
            K(CRITIC + "optimizer.warmup_steps_proportion", "equivalent", default=0.001, other=0.1, beside=VALUES)),
            meaning.critics_optimizer),
        K(OPTIM + "offload", to="optimizer.offload", default=False, other=True),
        K(OPTIM + "initial_loss_scale", "automatic", why="fp16's loss scale is train.loss_scale", also=(
            OPTIM + "min_loss_scale", OPTIM + "loss_scale_window", OPTIM + "hysteresis")),
        Joint("layout", (
            K("allocation_mode", "equivalent", default="", other="sglang.d2p1t2+d4p1t2"),
            K("rollout.backend", "equivalent", default="", other="vllm:d4p1t2", beside={ACTOR + "backend": "fsdp:d4p1t1"}),
            K(ACTOR + "backend", "equivalent", default="", other="fsdp:d4p1t2", beside={"rollout.backend": "vllm:d2p1t1"}),
            K("cluster.n_nodes", "equivalent", default=32),
            K("cluster.n_gpus_per_node", "equivalent", default=8),
            K("rollout.scheduling_strategy.type", "equivalent", default="separation"),
            K("sglang.mem_fraction_static", "equivalent", default=0.9, other=0.7),
            K("sglang.dtype", "equivalent", default="bfloat16", other="float32"),
            K("vllm.dtype", "equivalent", default="bfloat16", other="float32", beside={"rollout.backend": "vllm:d2p1t1"}),
            K("sglang.context_length", "equivalent", default=32768, other=40000),
            K("sglang.max_running_requests", "equivalent", other=64),
            K("vllm.gpu_memory_utilization", "equivalent", default=0.9, other=0.7, beside={"rollout.backend": "vllm:d2p1t1"}),
            K("vllm.max_model_len", "equivalent", default=32768, other=40000, beside={"rollout.backend": "vllm:d2p1t1"}),
            K("vllm.max_num_seqs", "equivalent", default=256, other=64, beside={"rollout.backend": "vllm:d2p1t1"})), meaning.layout),
        Joint("switches of vLLM", tuple(
            K(f"vllm.{no}{name}", "equivalent", other=bool(no), beside={"rollout.backend": "vllm:d2p1t1"})
            for no in ("", "no_") for name in SWITCHES), switches),
        Joint("memory", (
            K(ACTOR + "mb_spec.max_tokens_per_mb", "equivalent", other=30000),
            K("ref.mb_spec.max_tokens_per_mb", "equivalent", other=20000, beside={ACTOR + "mb_spec.max_tokens_per_mb": 30000})),
              meaning.memory),
        Joint("data", (
            K(DATA + "path", "equivalent", default="", other="openai/gsm8k"),
            K(DATA + "type", "equivalent", default="rl"),
            K(DATA + "shuffle", "equivalent", default=True, other=False),
            K(DATA + "drop_last", "equivalent", default=True, other=False),
            K(DATA + "num_workers", "equivalent", default=0, other=4),
            K("valid_dataset.path", "equivalent", other="openai/gsm8k"),
            K("valid_dataset.split", "equivalent", default="test", other="validation", beside={"valid_dataset.path": "openai/gsm8k"})),
              meaning.data),
        Joint("saving", (
            K("saver.freq_steps", "equivalent", other=5),
            K("saver.freq_epochs", "equivalent", other=1),
            K("saver.freq_secs", "equivalent", other=600),
            K("recover.mode", "equivalent", default="disabled", other="auto"),
            K("recover.freq_steps", "equivalent", other=5, beside=RECOVER),
            K("recover.freq_epochs", "equivalent", other=1, beside=RECOVER),
            K("recover.freq_secs", "equivalent", other=600, beside=RECOVER),
            K("cluster.fileroot", "equivalent", default="", other="runs", beside={"experiment_name": "a"}),
            K("experiment_name", "equivalent", default="", other="mine"),
            K("trial_name", "equivalent", default="", other="t", beside={"experiment_name": "a"})), meaning.saving),
        Joint("adapters", (
            K(ACTOR + "use_lora", "equivalent", default=False, other=True),
            K(ACTOR + "lora_rank", "equivalent", default=32, other=16, beside=LORA),
            K(ACTOR + "lora_alpha", "equivalent", default=16, other=32, beside=LORA),
            K(ACTOR + "target_modules", "equivalent", default=[], other=["q_proj"], beside=LORA)), meaning.adapters),
        K(ACTOR + "peft_type", "unsupported", fine=("lora",), why="of adapters there is LoRA"),
        Joint("loggers", (
            K("stats_logger.wandb.mode", "equivalent", default="disabled", other="online"),
            K("stats_logger.wandb.project", "equivalent", other="mine", beside=WANDB),
            K("stats_logger.wandb.name", "equivalent", other="mine", beside=WANDB),
            K("stats_logger.wandb.group", "equivalent", other="mine", beside=WANDB),
            K("stats_logger.swanlab.mode", "equivalent", default="disabled")), meaning.loggers),
        Joint("limits", (
            K("total_train_epochs", "equivalent", default=1, other=3),
            K("total_train_steps", "equivalent", other=9),
            K("total_train_n_seqs", "equivalent", other=900)), meaning.limits),
        K("seed", to="run.seed", default=1, other=7),
        K(ACTOR + "path", to="model.path", default="", other="a/model"),
        K("tokenizer_path", to="model.tokenizer", default="", other="a/tokenizer"),
        K(ACTOR + "init_from_scratch", "equivalent", "model.init", lambda on: "random" if on else "pretrained", default=False, other=True),
        K(ACTOR + "gradient_checkpointing", "equivalent", "model.remat", lambda on: "full" if on else "none",
          default=Since(("0.3", True), ("0.4", False)), other=True),
        K(ACTOR + "dtype", "equivalent", "train.compute_dtype", lambda d: common.DTYPES.get(str(d), str(d)), default="bfloat16",
          other="float32"),
        Joint("dtypes", (
            K("ref.dtype", "equivalent", default="bfloat16", other="float32", beside={"ref.path": "a/reference"}),
            K(CRITIC + "dtype", "equivalent", default="bfloat16")), dtypes),
        K("rollout.setup_timeout", to="rollout.vllm.setup_seconds", default=Since(("0.3", 120), ("1.0", 300)), other=900),
        K("rollout.request_timeout", to="rollout.timeout_seconds", default=3600, other=900),
        K("rollout.request_retries", to="rollout.vllm.retries", default=3, other=5),
        K(ACTOR + "enable_tree_training", "automatic", why="completions of a group share one copy of their prompt (train.share_prompts)"),
        Joint("turns", (
            *(K(name, "equivalent", other=4) for name in areal_turns.BOUNDS),
            *(K(name, "equivalent") for name in areal_turns.SAID)), areal_turns.turns),
        K("server_only", "unsupported", fine=(False,), refuse=True, why="servers without training: `vllm serve`"),
        K("rollout.return_routed_experts", "unsupported", fine=(False,), why="set algorithm.routes=sampled by hand"),
        K("model", "inert", why="read by its supervised and reward-model trainers alone"),
        K("teacher", "inert", why="without a value there is no teacher"),
        K("rollout.agent.agent_cls_path", "ask", why="agents and their proxies: env.program or env.function (docs/guides/environments.md)",
          also=("rollout.openai.mode",)),
        K("rollout.agent.**", "inert", why="read by agents alone", also=("rollout.openai.**",)),
        K("rollout.api_url", "ask", why="name servers of `vllm serve` in rollout.servers"),
        K(GCONFIG + "ignore_eos", "unsupported", fine=(False,), refuse=True, why="an end token ends a completion"),
        K(GCONFIG + "use_beam_search", "unsupported", fine=(False,), refuse=True, why="completions are sampled"),
        K(GCONFIG + "drop_incomplete_group", "unsupported", fine=(False,), why="a group goes on with the completions that it has"),
        K(GCONFIG + "*", "automatic", why="no counterpart is needed"),
        K(ACTOR + "fp8_config.**", "unsupported", why="set train.matmul by hand", also=(
            ACTOR + "megatron.fp8_config.**", ACTOR + "archon.fp8_config.**", ACTOR + "archon.fp8.**")),
        *(K(name, "automatic", why=why, also=also) for name, why, also in (
            (ACTOR + "fsdp.**", "the mesh and XLA decide", (ACTOR + "archon.**", ACTOR + "megatron.**", ACTOR + "ds_auto_tp.**")),
            (ACTOR + "scheduling_spec", "processes are started by jaxrl.launch or Slurm", (
                ACTOR + "scheduling_spec.**", ACTOR + "scheduling_strategy.**", "rollout.scheduling_spec", "rollout.scheduling_spec.**",
                "rollout.scheduling_strategy.**", "scheduler.**", "launcher.**", "cluster.**", DATA + "scheduling_spec.**",
                "valid_dataset.scheduling_spec.**")),
            ("enable_offload", "engine and trainer take turns where they share devices", ()),
            ("weight_update_mode", "rollout.vllm.transport", (ACTOR + "weight_update_mode",)),
            ("rollout.dump_to_file", "log.rollouts writes every step's", ("rollout.fileroot",)),
            ("rollout.experiment_name", "the run's directory", ("rollout.trial_name", ACTOR + "experiment_name", ACTOR + "trial_name")),
            ("rollout.tokenizer_path", "model.tokenizer", ()),
            (ACTOR + "mb_spec.*", "packed rows (train.tokens_per_microbatch)", ("mb_spec.**", CRITIC + "mb_spec.**")),
            (ACTOR + "disable_dropout", "the decoder has no dropout", ()),
            (ACTOR + "pad_to_maximum", "rows are packed to static lengths", ()),
            (ACTOR + "attn_impl", "kernels are the platform's", (ACTOR + "use_kernels",)),
            (ACTOR + "grad_reduce_dtype", "gradients are summed in fp32", ()),
            (ACTOR + "log_agent_stats", "metrics of episodes are logged", (ACTOR + "log_agent_stats_keys",)),
            (ACTOR + "**", "no counterpart is needed", ()),
            ("ref.**", "the reference is sharded as the policy", ()),
            (CRITIC + "**", "the critic is sharded as the policy", ()),
            ("sglang.**", "vLLM's own choice", ("vllm.**", "sglang")),
            ("rollout.**", "as many requests are under way as staleness allows", ()),
            (DATA + "*", "rows are read ahead by data.workers", (DATA + "dataset_kwargs.**",)),
            ("valid_dataset.*", "all rows are evaluated", ("valid_dataset.dataset_kwargs.**", "valid_dataset")),
            ("saver.*", "checkpoints are below run.dir", ("recover.*", "checkpointer.**")),
            ("evaluator.*", "evaluations are below run.dir", ()),
            ("stats_logger.*", "metrics are below run.dir", ("stats_logger.**",)),
            ("perf_tracer.**", "profile.steps", ("perf_tracer",)),
            ("memory_profiler.**", "profile.memory", ()),
            ("session_tracer.**", "log.rollouts has prompts and completions", ()))),
    ),
)
