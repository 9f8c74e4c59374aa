"""What configs of Tunix and of ROLL's agentic pipeline mean, written down from the two systems' code alone, by someone who had read neither
jaxrl/migrate nor its tests: rules of migrate_corpus.py beside migrate_rules.py, of the same kind.

Tunix at v0.1.6, v0.1.7 and c7d8950: cli/{config,base_rl_pipeline,grpo_main,ppo_main}.py, cli/base_config.yaml, cli/base_agentic_config.yaml,
rl/{algo_core,common,rl_learner}.py, rl/grpo/grpo_learner.py, rl/ppo/ppo_learner.py, rl/agentic/agentic_grpo_learner.py, common/configs.py,
models/*/model.py. `0.1.7` stands for c7d8950, as in migrate_corpus.py.
ROLL at v0.1.0 to v0.3.0 and 8eb27cc: configs/*.py, pipeline/agentic/{agentic_config,agentic_pipeline,agentic_actor_worker,
agentic_actor_pg_worker,utils}.py, pipeline/agentic/env_manager/*.py, utils/functionals.py, distributed/strategy/*.py.

tunix_keys and agentic_keys put a job's keys together as its system does: a file named by override_config_file below the command line; files
of hydra's `defaults` below the file itself, with `${...}` filled in.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import yaml


def flat(node, prefix: str = "") -> dict:
    """Keys with dots of a table's leaves; empty tables are leaves."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    return {k: v for name, inner in node.items() for k, v in flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()}


def _value(text):
    """A word of a command line or of YAML as a value."""
    if not isinstance(text, str):
        return text
    if text.lower() in ("true", "false", "null", "none", ""):
        return {"true": True, "false": False}.get(text.lower())
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")


def _numbers(text) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", str(text))]


# -- Tunix --------------------------------------------------------------------------------------------------------------

BASE = {  # cli/base_config.yaml; tables named in REPLACED lose their base values as soon as anything in them is set (config.py)
    "batch_size": 16, "num_train_epochs": 1, "train_fraction": 1.0, "rollout_engine": "vanilla",
    "grpo_config.num_generations": 2, "grpo_config.num_iterations": 1, "grpo_config.beta": 0.08, "grpo_config.epsilon": 0.2,
    "ppo_config.num_iterations": 1, "ppo_config.gae_lambda": 0.95, "ppo_config.gamma": 1.0, "ppo_config.beta": 0.08, "ppo_config.epsilon": 0.2,
    "rollout_config.total_generation_steps": 768, "rollout_config.max_prompt_length": 256, "rollout_config.temperature": 0.9,
    "rollout_config.top_p": 1.0, "rollout_config.top_k": 50, "model_config.model_id": "meta-llama/Llama-3.1-8B",
}
REPLACED = ("rl_training_config.", "training_config.", "optimizer_config.", "lora_config.")
ROLES = ("actor_model_config", "rollout_model_config", "reference_model_config")


def tunix_keys(mine: dict, root: Path) -> dict:
    """The command's keys over those of the file that override_config_file names."""
    file = mine.get("override_config_file")
    below = flat(yaml.safe_load((root / file).read_text("utf-8"))) if file else {}
    whole = {k: v for k, v in below.items() if not any(m.startswith(k + ".") for m in mine)}
    return {k: v for k, v in whole.items() if not any(k.startswith(m + ".") for m in mine)} | mine


def _schedule_of_tunix(get, o: str, steps) -> dict:
    """What optax's schedule of that name does with the keys that its function takes: peak, shape, warm-up, its start, length, floor."""
    name = get(o + "schedule_type")
    init, end, peak, warm = (get(o + n) for n in ("init_value", "end_value", "peak_value", "warmup_steps"))
    length = get(o + "decay_steps") or steps
    if not name:
        return {"learning rate": get(o + "learning_rate"), "schedule": "constant", "warm-up": 0}
    if name == "warmup_cosine_decay_schedule":
        warm = int(warm or 0.1 * (steps or 0))
        return {"learning rate": peak, "schedule": "cosine", "warm-up": warm, "warm-up from": (init or 0.0) / peak,
                "decay": length - warm if length else 0, "floor": (end or 0.0) / peak}
    if name == "cosine_decay_schedule":
        return {"learning rate": init, "schedule": "cosine", "warm-up": 0, "decay": length, "floor": get(o + "alpha") or 0.0}
    if name == "linear_schedule":
        return {"learning rate": init, "schedule": "linear", "warm-up": 0, "decay": get(o + "transition_steps"), "floor": end / init}
    if name == "warmup_constant_schedule":
        return {"learning rate": peak, "schedule": "constant", "warm-up": warm, "warm-up from": (init or 0.0) / peak}
    if name == "constant_schedule":
        return {"learning rate": get(o + "value"), "schedule": "constant", "warm-up": 0}
    return {}


def _optimizer_of_tunix(get, o: str, c, of: str, steps) -> dict:
    """AdamW of optax with the keys that its function takes: of max_grad_norm it knows nothing, and nothing else clips."""
    theirs = _schedule_of_tunix(get, o, steps)
    ours = {"learning rate": c.lr, "schedule": c.schedule, "warm-up": c.warmup_steps,
            "warm-up from": c.warmup_start if c.warmup_steps or c.warmup_fraction else 0.0,
            "decay": c.decay_steps, "floor": c.floor if c.schedule != "constant" else 0.0}
    if c.warmup_fraction:  # of a run whose length is not known
        ours["warm-up"], theirs["warm-up"] = c.warmup_fraction, 0.1
    if not steps:  # what the report asks for
        ours.pop("decay"), theirs.pop("decay", None)
    elif not c.decay_steps:  # all after warm-up
        ours["decay"] = theirs.get("decay", 0) if theirs.get("decay", 0) in (0, (steps or 0) - theirs["warm-up"]) else 0
    rows = {what: (ours[what], value) for what, value in theirs.items()}
    for key, name, default in (("b1", "b1", 0.9), ("b2", "b2", 0.999), ("eps", "eps", 1e-8), ("weight_decay", "weight_decay", 1e-4)):
        rows[name] = (getattr(c, name), default if get(o + key) is None else get(o + key))
    rows["clip"] = (c.max_grad_norm, 0.0)
    return {f"{what} of the {of}": pair for what, pair in rows.items()}


LINEAR = {"q_einsum": ("q_proj",), "kv_einsum": ("k_proj", "v_proj"), "qkv_einsum": ("q_proj", "k_proj", "v_proj"), "attn_vec_einsum": ("o_proj",),
          **{n: (n,) for n in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}}


def _adapters(get) -> tuple:
    """(rank, alpha, names of modules): of actor_model_config, else of model_config, whose keys the roles have where they have none."""
    for table in ("actor_model_config", "model_config"):
        at = table + ".lora_config."
        if get(at + "rank"):
            names = {n for part in str(get(at + "module_path")).split("|") for n in LINEAR.get(part.strip(".*() "), (part,))}
            return get(at + "rank"), get(at + "alpha"), tuple(sorted(names))
    return 0, None, ()


def _dtype_of_tunix(get, model: str, version: str) -> str | None:
    """Qwen2, Qwen3 and Gemma 4 multiply in their config's dtype, fp32 where it is not set (since 0.1.7); the others in the weights' own. Which
    a model is, models/naming.py says: DeepSeek-R1-Distill-Qwen is Qwen2. (That line is of the reader's author: a walk showed the pattern on the
    name, in both, to be wrong.)"""
    named = get("actor_model_config.dtype") or get("model_config.dtype")
    if named:
        return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[named]
    if get("model_config.model_source") == "maxtext":
        return None  # MaxText says
    of_fp32 = ("qwen2.5-", "qwen3-", "qwen3.5-", "deepseek-r1-distill-qwen-", "gemma-4-", "qwen2p5_", "qwen3_", "qwen3p5_",
               "deepseek_r1_distill_qwen_", "gemma4_")
    return "fp32" if version >= "0.1.7" and model.lower().split("/")[-1].startswith(of_fp32) else None


def _held(get, c, micro: int, group: int) -> tuple:
    """(tokens of a micro-batch on a data shard here, there): train_micro_batch_size prompts and their completions lie over the mesh's fsdp axis
    (data_sharding_axis), a row at least on each (rl/common.py, sft/sharding_utils.py). Of the reader's author, by the same walk."""
    mesh = next((get(t + ".mesh.shape") for t in ("actor_model_config", "model_config") if get(t + ".mesh.shape")), "(2,2)")
    axes = next((get(t + ".mesh.axis_names") for t in ("actor_model_config", "model_config") if get(t + ".mesh.axis_names")), "fsdp,tp")
    sizes = dict(zip(re.findall("[a-z]+", str(axes)), _numbers(mesh), strict=False))
    rows = math.ceil(micro * group / sizes.get("fsdp", 1))
    return c.train.tokens_per_microbatch, rows * (c.data.max_prompt_tokens + c.rollout.max_new_tokens)


AGGREGATION = {"sequence-mean-token-mean": "sequence_mean", "token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum",
               "sequence-mean-token-sum-norm": "sequence_sum", "sequence-mean-token-scale": "constant"}


def tunix(k, c, version: str) -> dict:
    """k: of tunix_keys."""
    def get(name):
        replaced = any(name.startswith(t) and any(m.startswith(t) for m in k.keys) for t in REPLACED)
        return _value(k.raw(name, None if replaced else BASE.get(name)))

    module = str(k.raw("python -m", ""))
    mode = "agentic_grpo" if get("training_mode") == "agentic_grpo" else (
        "ppo" if "ppo" in module or any(m.startswith("ppo_config") for m in k.keys) else "grpo")
    g, t = mode + "_config.", "rl_training_config."
    ppo, first = mode == "ppo", version < "0.1.7"
    prompts, group = get("batch_size"), 1 if ppo else get(g + "num_generations") or 2
    mini = get(t + "mini_batch_size") or prompts
    passes = get(g + "num_iterations") or 1
    most, batches = get(t + "max_steps"), get("num_batches")
    updates = most or batches and int(batches * (get("num_train_epochs") or 1) * (get("train_fraction") or 0.8))
    each = prompts // mini * passes
    # Rollouts of a mini-batch are drawn when it is its turn (rl_learner._run_global_step), with the weights as they are then where actor
    # and rollout share them, as vanilla does on one mesh: such a mini-batch is a step of its own. A run ends with the step in which so
    # many updates are reached; an agentic one after so many steps.
    shared = mode != "agentic_grpo" and get("rollout_engine") == "vanilla" and (
        first or get("rollout_model_config.same_mesh_as") == "actor" or "rollout_model_config.mesh" in k.keys)
    each = passes if shared else each
    a = c.algorithm
    beta = 0.04 if get(g + "beta") is None else get(g + "beta")
    kind = (get(g + "kl_method") or "low_var_kl") if ppo else "low_var_kl" if first else get(g + "kl_loss_mode") or "kl"
    estimator = {"low_var_kl": "k3", "mse_kl": "k2", "kl": "k1"}[kind]
    low = (ppo and get(g + "epsilon_low")) or get(g + "epsilon") or 0.2
    high = get(g + "epsilon_high") or get(g + "epsilon") or 0.2
    model = str(get("actor_model_config.model_id") or get("model_config.model_id"))
    rank, alpha, names = _adapters(get)
    rows = {
        "sequences per optimizer step": (c.data.prompts_per_step * c.rollout.group_size / (a.num_minibatches or 1), mini * group),
        "group": (c.rollout.group_size, group),
        "passes": (a.ppo_epochs, passes),
        "longest prompt": ((c.data.max_prompt_tokens, c.data.overlong_prompt), (get("rollout_config.max_prompt_length"), "filter")),
        "longest completion": (c.rollout.max_new_tokens, get("rollout_config.total_generation_steps")),
        "sampling": ((c.rollout.temperature, c.rollout.top_p, c.rollout.top_k),
                     (get("rollout_config.temperature"), get("rollout_config.top_p") or 1.0, get("rollout_config.top_k") or -1)),
        "temperature of the loss": (a.temperature or c.rollout.temperature,  # beside the sampler's log-probs the report says it
                                    c.rollout.temperature if ppo or not first or a.old_logprobs == "rollout" else 1.0),
        "clip": ((a.policy_loss, a.clip_low, a.clip_high), ("clip", low, high)),
        "dual clip": (a.dual_clip, get(g + "epsilon_c") or 0.0),
        "ratio": (a.ratio, "sequence_token" if get(g + "loss_algo") == "gspo-token" else "token"),
        "entropy": (a.entropy_coef, ppo and get(g + "entropy_coef") or 0.0),
        "evaluation": ((c.eval.every_steps, c.eval.after), (0, False)),  # its command line hands the trainer no held-out rows
        "adapters": (c.lora.rank, rank),
    }
    if get(t + "train_micro_batch_size"):
        rows["micro-batch"] = _held(get, c, int(get(t + "train_micro_batch_size")), group)
    if not updates:  # what the rows decide: passes over them
        rows["length"] = ((c.train.steps or None, c.data.epochs), (None, get("num_train_epochs") or 1))
    else:
        rows["updates"] = (c.train.steps * a.num_minibatches * a.ppo_epochs,
                           updates * each if mode == "agentic_grpo" else math.ceil(updates / each) * each)
        rows["mini-batches"] = (a.num_minibatches, 1 if shared else prompts / mini)
    if ppo:
        rows |= {
            "advantage": ((a.advantage, a.whiten, a.gamma, a.lam), ("gae", True, get(g + "gamma"), get(g + "gae_lambda"))),
            "aggregation": (a.aggregation, "token_mean"),
            "value clip": (c.critic.value_clip, 0.2 if get(g + "clip_range_value") is None else get(g + "clip_range_value")),
        }
    else:
        estimates = {"grpo": ("group", "group"), "rloo": ("leave_one_out", "none"), "drgrpo": ("group", "none")}
        rows |= {
            "advantage": ((a.advantage, a.advantage_mean, a.advantage_std, a.whiten),
                          ("outcome", *estimates[get(g + "advantage_estimator") or "grpo"], False)),
            "aggregation": (a.aggregation, AGGREGATION[get(g + "loss_agg_mode") or "sequence-mean-token-mean"]),
        }
    if beta and not ppo and estimator == "k1":  # without effect on average; the report says so
        rows["KL"] = (a.kl.coef, 0.0)
    elif beta:
        rows["KL"] = ((a.kl.coef, a.kl.placement, a.kl.estimator), (beta, "reward" if ppo else "loss", estimator))
    else:
        rows["KL"] = (a.kl.coef, 0.0)
    if rank:
        rows["alpha"] = (c.lora.alpha, alpha)
        rows["modules"] = (tuple(sorted(c.lora.targets)), names)
    if (dtype := _dtype_of_tunix(get, model, version)) is not None:
        rows["dtype"] = (c.train.compute_dtype, dtype)
    if get(t + "checkpoint_root_directory"):
        interval = get(t + "checkpointing_options.save_interval_steps") or 0  # in updates
        rows["checkpoints"] = (c.checkpoint.every_steps, max(round(interval / (a.num_minibatches * a.ppo_epochs)), 1) if interval else 0)
    if get("dataset_name") == "gsm8k" and get("data_source") != "local":
        rows["rows"] = ((c.data.path, c.data.prompt_column, c.data.answer_pattern), (("openai/gsm8k",), "question", "#### (.*)"))
    rows |= _optimizer_of_tunix(get, t + "actor_optimizer_config.", c.optimizer, "policy", updates)
    if ppo and any(m.startswith(t + "critic_optimizer_config") for m in k.keys):
        own = dict(c.critic.optimizer)
        names = ("schedule", "warmup_steps", "warmup_start", "warmup_fraction", "decay_steps", "floor", "b1", "b2", "eps", "weight_decay",
                 "max_grad_norm")
        critic = type("Critic", (), {"lr": c.critic.lr, **{n: own.get(n, getattr(c.optimizer, n)) for n in names}})
        rows |= _optimizer_of_tunix(get, t + "critic_optimizer_config.", critic, "critic", updates)
    return rows


# -- ROLL's agentic pipeline --------------------------------------------------------------------------------------------


def agentic_keys(file: Path, over: dict | None = None) -> dict:
    """All keys of a job: `defaults` of hydra that end in @_here_ lie below the file, and `${...}` is filled in. over: the command's keys."""
    def merge(below, above):
        if not (isinstance(below, dict) and isinstance(above, dict)):
            return above
        return {**below, **{n: merge(below[n], v) if n in below else v for n, v in above.items()}}

    def load(path):
        own = yaml.safe_load(path.read_text("utf-8")) or {}
        whole: dict = {}
        for entry in own.pop("defaults", None) or []:
            if isinstance(entry, str) and entry != "_self_":
                whole = merge(whole, load((path.parent / entry.partition("@")[0]).with_suffix(".yaml")))
        return merge(whole, own)

    root = load(file)
    for name, value in (over or {}).items():
        node = root
        for part in name.split(".")[:-1]:
            node = node.setdefault(part, {})
        node[name.split(".")[-1]] = value

    def fill(value, deep=0):
        if isinstance(value, dict):
            return {n: fill(v, deep) for n, v in value.items()}
        if isinstance(value, list):
            return [fill(v, deep) for v in value]
        if not isinstance(value, str) or "${" not in value or deep > 9:
            return value

        def look(name):
            found = root
            for part in name.split("."):
                if not isinstance(found, dict) or part not in found:
                    return "${" + name + "}"
                found = found[part]
            return fill(found, deep + 1)

        if whole := re.fullmatch(r"\$\{([\w.]+)\}", value):
            return look(whole[1])
        return re.sub(r"\$\{([\w.]+)\}", lambda m: str(look(m[1])), value)

    return flat(fill(root))


def _devices(text) -> set:
    """GPUs of a device_mapping; list(range(a, b)) or numbers."""
    if isinstance(text, list):
        return set(text)
    parts = re.findall(r"range\(([^)]*)\)|(\d+)", str(text))
    return {n for span, one in parts for n in (range(*_numbers(span)) if span else [int(one)])}


def _norm(get, n: str, version: str) -> tuple:
    """(mean, deviation) over which rewards are normalised, from reward_normalization; a group is what `grouping` names. The two types of
    norm came with 0.1.3."""
    grouping = get(n + "grouping") or ("batch" if version >= "0.2" else "state")
    method = get(n + "method") or "identity"
    over = "batch" if grouping == "batch" else "group"
    named = version >= "0.1.3"
    mean = named and get(n + "norm_mean_type") or (over if method in ("mean", "mean_std", "asym_clip") else None)
    std = named and get(n + "norm_std_type") or (over if method in ("mean_std", "asym_clip") else None)
    return mean or "none", std or "none"


def _rows_of(path) -> dict:
    """Rows of a written file by their tag."""
    count: dict = {}
    for line in Path(path).read_text("utf-8").splitlines():
        tag = json.loads(line)["tag"]
        count[tag] = count.get(tag, 0) + 1
    return count


def _optimizer_of_roll(get, role: str, o, of: str, version: str) -> dict:
    t, strategy = role + "training_args.", str(get(role + "strategy_args.strategy_name") or "")
    kind = get(t + "lr_scheduler_type") or "linear"
    warm, share = get(t + "warmup_steps") or 0, get(t + "warmup_ratio")
    share = (0.03 if version < "0.1.1" else 0.0) if share is None else share
    shape = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(kind, kind)
    if kind == "constant" and "megatron" not in strategy:
        warm, share = 0, 0.0  # transformers' get_scheduler("constant") has none; Megatron's scheduler does
    return {f"{what} of the {of}": pair for what, pair in {
        "learning rate": (o.lr, get(t + "learning_rate") or 5e-5),
        "schedule": (o.schedule, shape),
        "warm-up": ((0 if o.warmup_fraction else o.warmup_steps, o.warmup_fraction), (warm, 0.0 if warm else share)),
        "betas": ((o.b1, o.b2), (get(t + "adam_beta1") or 0.9, get(t + "adam_beta2") or 0.999)),
        "weight decay": (o.weight_decay, get(t + "weight_decay") or 0.0),
        "clip": (o.max_grad_norm, 1.0 if get("max_grad_norm") is None else get("max_grad_norm")),
    }.items()}


def _loss_of_roll(get, c, version: str, rows_per_micro: float, rows_per_update: float) -> dict:
    a = c.algorithm
    clip = 0.2 if get("pg_clip") is None else get("pg_clip")
    low = high = clip
    if get("use_pg_clip_range") and version >= "0.1.1":
        low, high = (0.2 if get(n) is None else get(n) for n in ("pg_clip_low", "pg_clip_high"))
    pg = "agentic_actor_pg_worker" in str(get("actor_train.worker_cls")) and (get("actor_train.pg_variant") or "vanilla")
    kind = {False: "clip", "ppo": "clip", "vanilla": "pg", "topr": "topr"}.get(pg)
    mode = get("loss_agg_mode") or ("seq-mean-token-sum" if version < "0.1.1" else "seq-mean-token-mean")
    how = {"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean": "sequence_mean",
           "seq-mean-token-sum-norm": "constant"}[mode]
    rows = {"loss": (a.policy_loss, kind or a.policy_loss), "aggregation": (a.aggregation, how),
            "entropy": (a.entropy_coef, get("entropy_loss_coef") or 0.0),
            "trained temperature": (a.temperature or c.rollout.temperature,  # beside weights from the sampler's log-probs the report says so
                                    1.0 if a.mismatch.correction in (None, "none") and a.old_logprobs != "rollout" else c.rollout.temperature)}
    if kind == "clip":
        rows |= {"clip": ((a.clip_low, a.clip_high), (low, high)), "dual clip": (a.dual_clip, 1 + 2 * clip if get("dual_clip_loss") else 0.0),
                 "ratio": (a.ratio, "token")}
    if how == "token_mean":  # of each micro-batch before 0.2, of the optimizer step since
        rows["a token mean's sequences"] = (a.aggregation_sequences, rows_per_micro if version < "0.2" else 0)
    if how == "constant":  # sums over sequence_length - 1, of a micro-batch before 0.2, of all since
        tokens = get("sequence_length") - 1
        rows["divisor"] = (round(a.aggregation_constant * 1000), round(tokens * 1000 / (rows_per_micro if version < "0.2" else rows_per_update)))
    return rows


def _kl_of_roll(get, c, version: str) -> dict:
    kl, early = c.algorithm.kl, version < "0.1.3"  # subtracted from every token's reward whatever add_token_level_kl says
    coef = 0.2 if get("init_kl_coef") is None else get("init_kl_coef")
    inside = coef if early or get("add_token_level_kl") else 0.0
    loss = get("kl_loss_coef") or 0.0 if get("use_kl_loss") else 0.0
    if inside and loss:
        return {}  # two at once, which no option has
    if inside:
        estimator = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "low_var"}[get("kl_penalty") or "kl"]
        return {"KL": ((kl.coef, kl.placement, kl.estimator), (inside, "reward", estimator))}
    return {"KL": ((kl.coef, kl.placement, kl.estimator), (loss, "loss", "low_var")) if loss else (kl.coef, 0.0)}


def _advantage_of_roll(get, c, version: str) -> dict:
    a, kind = c.algorithm, get("adv_estimator") or "gae"
    gamma = 1.0 if get("gamma") is None else get("gamma")
    mean, std = _norm(get, "reward_normalization.", version)
    tags = [n for n in _tags(get, "train")]
    if get("reward_normalization.grouping") == "tags" and len(tags) == 1:
        mean, std = (x if x == "none" else "batch" for x in (mean, std))
    rows = {"whitened": (a.whiten, bool(get("whiten_advantages")))}
    clip = get("advantage_clip")
    rows["advantages' clip"] = ((a.advantage_low, a.advantage_high), (-clip, clip) if clip is not None else (None, None))
    inside = (get("add_token_level_kl") or version < "0.1.3") and get("init_kl_coef") != 0
    if kind == "gae":
        rows["estimator"] = ((a.advantage, a.gamma, a.lam), ("gae", gamma, 0.95 if get("lambd") is None else get("lambd")))
    elif kind == "gigpo":
        gamma = 0.95 if get("step_reward_gamma") is None else get("step_reward_gamma")
        shares = [1.0 if get(n) is None else get(n) for n in ("step_reward_weight", "episode_reward_weight")]
        rows["estimator"] = ((a.advantage, a.turn_gamma, a.anchor_coef), ("gigpo", gamma, shares[0] / shares[1]))
    elif kind in ("grpo", "reinforce") and gamma == 1 and not inside:
        rows["estimator"] = (a.advantage in ("outcome", "returns"), True)  # the same without a KL
    elif kind in ("grpo", "reinforce"):  # what remains from a token on
        rows["estimator"] = ((a.advantage, a.gamma), ("returns", gamma))
    elif kind == "agentic_reinforce" and gamma == 1:
        rows["estimator"] = (a.advantage, "outcome")
    ours = (a.advantage_mean, a.advantage_std) if kind != "gae" else tuple(  # scores are normalised before the KL and returns, as here
        x if x != "none" else y for x, y in zip((c.reward.norm_mean, c.reward.norm_std), (a.advantage_mean, a.advantage_std), strict=True))
    if kind in ("gae", "grpo", "reinforce", "gigpo", "agentic_reinforce"):
        rows["normalised over"] = (ours, (mean, std))
    return rows


def _tags(get, mode: str) -> list:
    tags = get(mode + "_env_manager.tags") or ["SimpleSokoban"]
    return tags if isinstance(tags, list) else re.findall(r"\w+", str(tags))


def roll_agentic(k, c, version: str) -> dict:
    """k: of agentic_keys."""
    def get(name):
        return _value(k.raw(name))

    a, t, s = c.algorithm, "actor_train.training_args.", "actor_train.strategy_args."
    n, group = get("rollout_batch_size") or 128, get("train_env_manager.group_size") or 1
    tags, strategy = _tags(get, "train"), str(get(s + "strategy_name"))
    world = len(_devices(get("actor_train.device_mapping")))
    if "megatron" in strategy:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            world //= int(get(s + "strategy_config." + name) or 1)
    else:
        world //= int(get("actor_train.model_args.ulysses_size") or 1)
    micro = get(t + "per_device_train_batch_size") or 8
    update = micro * (get(t + "gradient_accumulation_steps") or 1) * world or n  # without GPUs the report asks
    manager = [str(get(f"custom_envs.{tag}.env_manager_cls")) for tag in tags]
    by_step = any(re.search(r"\bStep\w*EnvManager|AgentNativeStep", m) for m in manager)
    early = version < "0.2"  # the engine's arguments for all three roles
    own = any(m.startswith("actor_infer.generating_args.") for m in k.keys)
    sampled = "actor_infer.generating_args." if own or early else "train_env_manager.generating_args."
    held = "actor_infer.generating_args." if own or early else "val_env_manager.generating_args."

    def drawn(at):
        found = tuple(default if get(at + name) is None else get(at + name)
                      for name, default in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50)))
        return (found[0], found[1], -1 if found[2] in (0, -1) else found[2])

    longest = get("sequence_length") or get("response_length") + (get("prompt_length") or 1024)
    turn = [min(get(f"custom_envs.{tag}.max_tokens_per_step") or math.inf, get(sampled + "max_new_tokens") or 8192, longest - 1) for tag in tags]
    every = 10 if get("eval_steps") is None else get("eval_steps")
    rows = {
        "prompts": (c.data.prompts_per_step, n / group),
        "group": (c.rollout.group_size, group),
        "steps": (c.train.steps, get("max_steps") or 500),
        "passes": (a.ppo_epochs, get("ppo_epochs") or 1),
        "turns": (c.env.max_turns, max(get(f"custom_envs.{tag}.max_steps") or get(f"custom_envs.{tag}.env_config.max_steps") or 0 for tag in tags)),
        "tokens of a turn": (c.rollout.max_new_tokens, max(turn)),
        "tokens of an episode": (c.train.max_sequence_tokens, longest),
        "sampling": ((c.rollout.temperature, c.rollout.top_p, c.rollout.top_k), drawn(sampled)),
        "model": (c.model.path, os.path.expandvars(str(get("pretrain")))),
        "seed": (c.run.seed, 42 if get("seed") is None else get("seed")),
        "checkpoints": (c.checkpoint.every_steps, get("save_steps") or 50),
        "dtype": (c.train.compute_dtype, get("actor_train.model_args.dtype") or "bf16") if "fsdp2" not in strategy else (0, 0),  # its own there
        "pixels": ((c.data.image_min_pixels, c.data.image_max_pixels), (None, None)),  # the checkpoint's processor says
        "rows by tag": (tuple(sorted(_rows_of(c.data.path[0]))), tuple(sorted(tags))),
    }
    if not by_step and (get("batch_adjust_mode") or "copy") == "copy":  # too few sequences are filled up with copies
        rows["optimizer steps"] = (a.num_minibatches, max(1, math.ceil(n / update)))
    ratio, train, infer = (get(name) for name in ("async_generation_ratio", "actor_train.device_mapping", "actor_infer.device_mapping"))
    if not ratio or train and infer and not _devices(train) & _devices(infer):  # on shared GPUs the report says what becomes of it
        rows["staleness"] = (c.rollout.max_staleness, math.ceil(ratio or 0))
    parts = _numbers(get("train_env_manager.num_groups_partition") or [128])
    count = _rows_of(c.data.path[0])
    rows["shares of tags"] = (
        tuple(round(count.get(tag, 0) / sum(count.values()), 3) for tag in tags), tuple(round(p / sum(parts), 3) for p in parts))
    if c.eval.sets or every > 0 and any(m.startswith("val_env_manager.") for m in k.keys):
        rows["evaluation"] = ((c.eval.every_steps, c.eval.before), (max(every, 0), every > 0))
    if c.eval.sets and c.eval.every_steps:
        rows["evaluation's sampling"] = ((c.eval.temperature, c.eval.top_p, c.eval.top_k), drawn(held))
        rows["evaluation's samples"] = (c.eval.samples, get("val_env_manager.group_size") or 1)
        size = 128 if get("val_batch_size") is None else get("val_batch_size")
        if size > 0:
            file = str(c.eval.sets[0]).partition("=")[2].partition("@")[0]
            rows["evaluation's rows"] = (sum(_rows_of(file).values()), size / (get("val_env_manager.group_size") or 1))
    if get("actor_train.model_args.lora_target") is not None:
        rank = get("actor_train.model_args.lora_rank") or 8
        rows["adapters"] = ((c.lora.rank, c.lora.alpha), (rank, get("actor_train.model_args.lora_alpha") or 2 * rank))
    else:
        rows["adapters"] = (c.lora.rank, 0)
    rows |= _optimizer_of_roll(get, "actor_train.", c.optimizer, "policy", version)
    rows |= _loss_of_roll(get, c, version, micro, update if n >= update else n)
    rows |= _kl_of_roll(get, c, version)
    return rows | _advantage_of_roll(get, c, version)


AGENTIC = {("roll", "agentic"): roll_agentic}
