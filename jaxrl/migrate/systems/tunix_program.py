"""Tunix's programs in Python: the rules of its command line, with the defaults of its classes. See systems/tunix.py.

Read from its code at c7d8950: common/configs.py, rl/grpo/grpo_learner.py, rl/agentic/agentic_grpo_learner.py, rl/ppo/ppo_learner.py, and optax's
defaults. Rewards and rows are Python there, and asked for.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jaxrl.migrate import common
from jaxrl.migrate.derived import defaults
from jaxrl.migrate.systems import tunix_meaning as meaning
from jaxrl.migrate.systems import tunix_optimizer
from jaxrl.migrate.systems.tunix import TABLE
from jaxrl.migrate.systems.tunix_calls import AXES, CLIP, SHAPE
from jaxrl.migrate.systems.tunix_meaning import ACTOR, AGENTIC, GRPO, MODEL, OPT, PPO, ROLLOUT, TRAINING
from jaxrl.migrate.table import Joint, Key, Migration

CLASSES = {  # defaults of the classes, where they are not base_config.yaml's
    MODEL + "model_id": "", "tokenizer_config.tokenizer_path": "", ROLLOUT + "max_prompt_length": 64, ROLLOUT + "total_generation_steps": 64,
    ROLLOUT + "top_k": None, GRPO + "beta": 0.04, PPO + "beta": 0.04, "batch_size": None, "reward_functions": None, "data_source": "",
    "dataset_name": "", SHAPE: "(1,)", AXES: "('fsdp',)", TRAINING + "max_steps": None, TRAINING + "eval_every_n_steps": None,
    OPT + "schedule_type": "", OPT + "learning_rate": None, OPT + "peak_value": None, OPT + "warmup_steps": None, OPT + "decay_steps": None,
    OPT + "b2": 0.999, OPT + "weight_decay": 1e-4, TRAINING + "checkpoint_root_directory": "",
    TRAINING + "checkpointing_options.save_interval_steps": None, TRAINING + "checkpointing_options.max_to_keep": None,
}


def model(m: Migration):
    """Sets model.path by the program's model, else by that of its sampler or tokenizer, which the user is asked to
    check; where no call names one the user is asked for it. Also run.seed, and model.tokenizer where it is another."""
    tokenizer = "tokenizer_config.tokenizer_path"
    key = ACTOR + "model_id" if m.text(ACTOR + "model_id") else MODEL + "model_id"
    engines = (ROLLOUT + "rollout_vllm_model_version", ROLLOUT + "rollout_sglang_jax_model_version")
    path = next(filter(None, (m.text(k) for k in (key, *engines, tokenizer))), "")
    m.set("run.seed", m.integer(MODEL + "rng_seed") or 0, MODEL + "rng_seed")
    if not path:
        m.needs(f"model.path: give {key}=NAME after the file")
        return
    m.set("model.path", path, key, *engines, tokenizer)
    if not m.given(key):
        m.needs(f"model.path={path}: the program names it for its sampler or tokenizer; name another one if it trains another")
    if m.given(tokenizer) and m.text(tokenizer) != path:
        m.set("model.tokenizer", m.text(tokenizer), tokenizer)


def batch(m: Migration):
    """Sets what the command line's `batch` sets. Without batch_size a step has the prompts of one mini-batch (else 1),
    and the user is asked for data.prompts_per_step."""
    if m["batch_size"] is not None:
        meaning.batch(m)
        return
    own, size = meaning.algorithm(m), TRAINING + "mini_batch_size"
    m.needs("data.prompts_per_step: the prompts of a batch of the program's rows: give batch_size=N after the file")
    group = own + "num_generations" if own != PPO else own + "num_iterations"
    common.batch(m, m.integer(size) or 1, m.integer(group) if own != PPO else 1, (size,), group)
    m.set("algorithm.ppo_epochs", m.integer(own + "num_iterations"), own + "num_iterations")
    m.set("algorithm.num_minibatches", 1, size)
    meaning.unread(m, "num_generations", "num_iterations")


def data(m: Migration):
    """Sets data.path, data.subset, data.split and data.system_prompt where calls name them; the user is asked for the
    rows, which the program makes in Python. Adds a stub of the rewards, which the user is asked to write, unless an
    environment scores."""
    path = m.text("data_directory")
    if path:
        common.data_files(m, [path], "data_directory")
    elif m.text("dataset_name"):
        repo, _, subset = m.text("dataset_name").partition(":")
        m.set("data.path", (repo,), "dataset_name")
        if subset:
            m.set("data.subset", subset, "dataset_name")
    m.needs("data.path, data.prompt_column and data.answer_column: the rows that the program makes in Python: write them into a file; "
            "where it does not shuffle them, data.shuffle=False")
    if m.text(AGENTIC + "system_prompt"):
        m.set("data.system_prompt", m.text(AGENTIC + "system_prompt"), AGENTIC + "system_prompt")
    if m.text("train_split") not in ("", "train"):
        m.set("data.split", m.text("train_split"), "train_split")
    rewards = [str(name) for name in m.list("reward_functions")]
    if rewards or not m.text("env_class_path"):
        file = m.where("reward_functions").partition(":")[0].partition(" cell")[0] if rewards else "the program"
        named = ", ".join(name.removeprefix(file.rpartition(".")[0] + ".") for name in rewards) or "the program's reward"
        common.reward_stub(m, named, f"{file}: {named}", "reward_functions")


def run(m: Migration):
    """Sets train.steps by max_steps (optimizer steps, rounded up to steps; of the agentic learner they are steps).
    Without it train.steps is 1 and the user is asked. There is no evaluation; if the program evaluates, the user is
    asked for eval.sets."""
    key, every = TRAINING + "max_steps", TRAINING + "eval_every_n_steps"
    each = 1 if meaning.algorithm(m) == AGENTIC else common.updates(m)
    m.set("train.steps", -(-(m.integer(key) or 1) // each), key)
    if not m.integer(key):
        m.needs("train.steps: max_steps is not set: the rows' batches times epochs")
    m.set("eval.every_steps", 0, every)
    m.set("eval.after", False, every)
    if often := m.integer(every):  # of updates, asked at the first of a step
        steps = often // math.gcd(often, common.updates(m))
        m.needs(f"eval.sets and eval.every_steps={steps}: name the rows that the program hands its learner for evaluation, if it does")


def optimizer(m: Migration):
    """Sets optimizer.* as the command line's, and optimizer.max_grad_norm by optax.clip_by_global_norm. Without a
    learning rate the user is asked for optimizer.lr, and the schedule is constant."""
    tunix_optimizer.kind_of_optimizer(m)
    if not any(m.given(OPT + name) for name in ("learning_rate", "peak_value", "value", "init_value")):
        m.needs("optimizer.lr: no learning rate of optax is found: give "
                f"{OPT}learning_rate=RATE after the file")
        for name in ("b1", "b2", "eps", "weight_decay"):
            value = m.number(OPT + name)
            m.set(f"optimizer.{name}", float(meaning.OPTAX[name] if value is None else value), OPT + name)
        m.set("optimizer.schedule", "constant", OPT + "schedule_type")
    else:
        tunix_optimizer.optimizer(m)
        m.options.pop("optimizer.max_grad_norm")
    m.set("optimizer.max_grad_norm", float(m.number(CLIP) or 0), CLIP, OPT + "opt_type")


def dtypes(m: Migration):
    """Sets train.param_dtype to the dtype that the actor's weights are read in, else fp32; train.compute_dtype, which a
    model's config may have otherwise; and rollout.dtype, by vLLM's option where that is the engine. What the program
    does not say is asked."""
    key = ACTOR + "load_dtype"
    found, engine = common.DTYPES.get(m.text(key), ""), ROLLOUT + "rollout_vllm_kwargs.dtype"
    m.set("train.param_dtype", found or "fp32", key)
    named = MODEL + "model_name" if m.text(MODEL + "model_name") else MODEL + "model_id"
    kind = meaning.class_of(m.text(named) or m.options.get("model.path", ("",))[0])
    computed = meaning.computed(m, MODEL + "dtype", kind, found or "bf16", named)
    own = common.DTYPES.get(m.text(engine), "auto") if m.text("rollout_engine") == "vllm" else "auto"
    m.set("rollout.dtype", computed if own == "auto" else own, MODEL + "dtype", engine)
    if not found or not kind and not m.given(MODEL + "dtype"):
        m.needs("train.param_dtype, train.compute_dtype: the program's models say in which dtype weights are kept and computed; "
                f"here {found or 'fp32'} and {computed}; give {key}=VALUE and {MODEL}dtype=VALUE after the file")


# other values that change a program's config; None = none does: no call of a program gives the key, or only one value is read
OTHER = {ACTOR + "load_dtype": "bfloat16", ACTOR + "mesh.shape": None, OPT + "opt_type": None, OPT + "schedule_type": None,
         "apply_chat_template_to_dataset": None}
BESIDE = {"rollout_model_config.mesh.shape": {MODEL + "mesh.shape": "(2,2)"}}  # a program has no usual mesh
OWN = {"model": model, "batch": batch, "data": data, "length of the run": run, "optimizer": optimizer, "dtypes": dtypes}


def _rule(rule: Key | Joint) -> Key | Joint:
    if not isinstance(rule, Joint):  # the name of a model's config says its dtype here
        return replace(rule, also=tuple(n for n in rule.also if n != MODEL + "model_name"))
    rate = {OPT + "learning_rate": 1e-6}
    more = {"optimizer": (Key(CLIP, "equivalent", other=1.0, beside=rate),),
            "dtypes": (Key(MODEL + "model_name", "equivalent", other="qwen3_8b"), Key(ROLLOUT + "rollout_vllm_kwargs.dtype", "equivalent")),
            "model": (Key(ROLLOUT + "rollout_vllm_model_version", "equivalent"), Key(ROLLOUT + "rollout_sglang_jax_model_version", "equivalent"))}
    keys = tuple(replace(key, other=OTHER.get(key.name, key.other), beside=BESIDE.get(key.name, key.beside)) for key in rule.keys)
    return replace(rule, keys=keys + more.get(rule.title, ()), by=OWN.get(rule.title, rule.by))


VLLM = ("server_mode", "async_scheduling", "hbm_utilization", "max_num_seqs", "max_num_batched_tokens", "tpu_backend_type",
        "init_with_random_weights", "reshard_chunk_size", "enable_dp_attention", "server_mode_submission_threshold",
        "server_mode_submission_timeout_s", "swap_space_size_gb")
SGLANG = ("mem_fraction_static", "init_with_random_weights", "disable_radix_cache", "enable_deterministic_sampling",
          "chunked_prefill_size", "max_running_requests", "page_size", "use_sort_for_toppk_minp", "context_length", "precompile_token_paddings",
          "precompile_bs_paddings", "enable_static_lora", "enable_single_process")
MORE = (
    Key(ROLLOUT + "kv_cache_size", "automatic", why="the cache holds prompt and completion", also=(
        *(f"{ROLLOUT}rollout_vllm_{name}" for name in VLLM), *(f"{ROLLOUT}rollout_sglang_jax_{name}" for name in SGLANG))),
    Key(ROLLOUT + "tensor_parallel_size", "automatic", why="the sampler is on the policy's mesh, or on mesh.roles.sampler", also=(
        ROLLOUT + "data_parallel_size", ROLLOUT + "expert_parallel_size")),
    Key(MODEL + "param_dtype", "automatic", why="weights are kept in the dtype that create_model_from_safe_tensors is given"),
    Key(MODEL + "shd_config", "automatic", why="weights are sharded by the mesh"),
    Key(ROLLOUT + "seed", "automatic", why="drawn by run.seed"),
    Key(ROLLOUT + "data_type", "automatic", why="the sampler computes as the trainer, or in rollout.dtype"),
    Key(ROLLOUT + "rollout_vllm_kwargs", "automatic", why="the embedded sampler has no options of vLLM", also=(
        ROLLOUT + "rollout_vllm_kwargs.**", ROLLOUT + "rollout_mapping_config", ROLLOUT + "rollout_vllm_additional_config",
        ROLLOUT + "rollout_vllm_additional_config.**", ROLLOUT + "rollout_vllm_lora_config", ROLLOUT + "rollout_vllm_lora_config.**",
        ROLLOUT + "rollout_vllm_logprobs_mode", ROLLOUT + "rollout_vllm_hf_config_path")),
    Key(ROLLOUT + "rollout_vllm_sampling_kwargs.*", "ask", why="options of sampling: rollout.stop, rollout.top_p and their like"),
    Key(AGENTIC + "filter_statuses", "inert", why="read with overlong_filter alone"),
)
PROGRAM = replace(TABLE, job="program", jobs=(), differs=TABLE.differs[1:], required={},
                  rules=(*MORE, *map(_rule, defaults(TABLE.rules, CLASSES))))
