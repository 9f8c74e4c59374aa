"""What keys of RLinf mean together: the joint rules of its table. See systems/rlinf.py."""

from __future__ import annotations

import math
import re

from jaxrl.migrate import common, devices
from jaxrl.migrate.source import switch
from jaxrl.migrate.table import Migration

ALGO, DATA, RUNNER, ACTOR = "algorithm.", "data.", "runner.", "actor."
ROLLOUT, CRITIC, REWARD = "rollout.", "critic.", "reward."
SAMPLE, OPTIM, SCHED, MODEL = ALGO + "sampling_params.", ACTOR + "optim.", ACTOR + "lr_sched.", ACTOR + "model."
PLACEMENT, FSDP = "cluster.component_placement.*", ACTOR + "fsdp_config."
CLUSTER = ("cluster.num_nodes", "cluster.num_gpus_per_node")
PATHS = (ROLLOUT + "model.model_path", ROLLOUT + "model_dir", MODEL + "model_path")


def on_fsdp(m: Migration) -> bool:
    return m.text(ACTOR + "training_backend") in ("fsdp", "fsdp2")


def needed(m: Migration, key: str, otherwise: float):
    """Returns a key's number. RLinf has no default for it: if unset, refuses the config, and returns `otherwise`."""
    value = m.number(key)
    if value is None:
        m.lacks(key, "is not set, and RLinf has no default for it", refuse=True)
    return otherwise if value is None else value


def pipeline(m: Migration):
    if (kind := m.text(RUNNER + "task_type")) not in ("reasoning", "math"):  # math: its first name
        m.lacks(
            RUNNER + "task_type",
            f"{kind!r}: the reasoning pipeline is read, not robots, online RL, evaluation and SFT",
            refuse=True,
        )


def batch(m: Migration):
    prompts, group = (int(needed(m, key, 8)) for key in (DATA + "rollout_batch_size", ALGO + "group_size"))
    common.batch(m, prompts, group, (DATA + "rollout_batch_size",), ALGO + "group_size")
    count = m.integer(ALGO + "n_minibatches")
    m.set("algorithm.ppo_epochs", 1, ALGO + "n_minibatches")
    if not count or prompts % count:
        m.lacks(ALGO + "n_minibatches", f"{prompts} prompts are no {count} mini-batches of whole groups", refuse=True)
        return
    m.set("algorithm.num_minibatches", count, ALGO + "n_minibatches")
    m.facts["optimizer steps per step"] = count


def lengths(m: Migration):
    prompt, whole = int(needed(m, DATA + "max_prompt_length", 512)), int(needed(m, RUNNER + "seq_length", 1024))
    completion, key = m[SAMPLE + "max_new_tokens"], SAMPLE + "max_new_tokens"
    completion = whole - prompt if completion is None else m.integer(key)
    keys = (key,) if m[key] is not None else (RUNNER + "seq_length", DATA + "max_prompt_length")
    m.set("data.max_prompt_tokens", prompt, DATA + "max_prompt_length")
    if completion < 1:
        m.lacks(RUNNER + "seq_length", f"{whole} tokens leave no completion to prompts of {prompt}", refuse=True)
        return
    m.set("rollout.max_new_tokens", completion, *keys)
    if prompt + completion > whole:
        m.set("train.max_sequence_tokens", whole, RUNNER + "seq_length")
    m.set("data.overlong_prompt", "filter", DATA + "filter_prompt_by_length")
    if not m.flag(DATA + "filter_prompt_by_length"):
        m.differs("without filter_prompt_by_length RLinf cuts the end off long prompts; here they are left out")


def advantage(m: Migration):
    name = m.text(ALGO + "adv_type")
    if name not in ("grpo", "math_grpo", "gae", "reinpp"):
        m.lacks(
            ALGO + "adv_type",
            f"{name!r} is of robots or agents, or not known; there are grpo, gae, reinpp",
            refuse=True,
        )
        return
    group, base = m.facts["completions per prompt"], m.flag(ALGO + "use_reinpp_baseline")
    kind = {"gae": "gae", "reinpp": "returns"}.get(name, "outcome")
    mean = "group" if kind == "outcome" or name == "reinpp" and base else "none"
    if group < 2 and mean == "group":
        mean = "none"
        m.differs("a group of one completion has no mean and deviation: advantages are not normalised")
    m.set("algorithm.advantage", kind, ALGO + "adv_type")
    m.set("algorithm.advantage_mean", mean, ALGO + "adv_type", ALGO + "use_reinpp_baseline")
    m.set("algorithm.advantage_std", mean if kind == "outcome" else "none", ALGO + "adv_type")
    whiten = name == "reinpp" or m.flag(ALGO + "normalize_advantages")  # by the workers, whatever adv_type
    m.set("algorithm.whiten", whiten, ALGO + "adv_type", ALGO + "normalize_advantages")
    if kind == "returns":
        m.set("algorithm.gamma", 1.0, ALGO + "adv_type")
    if kind == "gae":
        m.set("algorithm.gamma", m.number(ALGO + "gamma"), ALGO + "gamma")
        m.set("algorithm.lam", m.number(ALGO + "gae_lambda"), ALGO + "gae_lambda")
        m.set("critic.lr", m.number(CRITIC + "optim.lr"), CRITIC + "optim.lr")
        m.set("critic.value_clip", float(m.number(ALGO + "value_cliprange") or 0), ALGO + "value_cliprange")
        m.set("critic.warmup_steps", m.integer(ALGO + "critic_warmup_steps"), ALGO + "critic_warmup_steps")
    m.facts["advantage"] = f"{name}, mean {mean}" + (", whitened" if whiten else "")


AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
}


def loss(m: Migration):
    kinds = {"ppo": "clip", "actor": "clip", "actor_critic": "clip", "math_ppo_actor": "clip"}
    kind = m.text(ALGO + "loss_type")
    if kind not in kinds:
        m.lacks(ALGO + "loss_type", f"{kind!r} is none of {', '.join(kinds)}", refuse=True)
        return
    low, high = (
        (ALGO + n if m[ALGO + n] is not None else ALGO + "ratio_clip_eps")
        for n in ("clip_ratio_low", "clip_ratio_high")
    )
    m.set("algorithm.policy_loss", "clip", ALGO + "loss_type")
    m.set("algorithm.ratio", "token", ALGO + "loss_type")
    m.set("algorithm.clip_low", m.number(low), low)
    m.set("algorithm.clip_high", m.number(high), high)
    dual, whose = float(m.number(ALGO + "clip_ratio_c") or 0), ALGO + "clip_ratio_c"
    if on_fsdp(m) and not m.given(whose):
        dual, whose = 3.0, ACTOR + "training_backend"  # what its worker takes where the key is not set
    m.set("algorithm.dual_clip", dual, whose)
    m.facts["clip"] = f"{1 - m.number(low):g} to {1 + m.number(high):g}" + (f", dual {dual:g}" if dual else "")
    entropy = m.flag(ALGO + "calculate_entropy")
    m.set(
        "algorithm.entropy_coef",
        m.number(ALGO + "entropy_bonus") if entropy else 0.0,
        ALGO + "entropy_bonus",
        ALGO + "calculate_entropy",
    )
    _aggregation(m)


def _aggregation(m: Migration):
    """A token mean is one per micro-batch, and those weigh the same: with one sequence, a sequence mean. FSDP's workers
    do not read use_valid_token_scale; Megatron's divide by the step's tokens (see gradients_share), and where they
    train while others sample by the longest completion's, for each sequence of one of their ranks."""
    name, micro = ALGO + "loss_agg_func", ALGO + "training_batch_size_per_gpu"
    dynamic = RUNNER + "enable_dynamic_batch_size"
    kind, scaled = m.choice(name, AGGREGATIONS), m.flag(ALGO + "use_valid_token_scale")
    if kind is None:
        return
    keys = (name, ALGO + "use_valid_token_scale", micro, dynamic)
    if on_fsdp(m):
        scaled, keys = False, (name, ACTOR + "training_backend", micro, dynamic)
        m.mark(ALGO + "use_valid_token_scale", "inert", "of megatron: FSDP's workers do not read it")
    if kind == "token_mean" and not scaled:  # those of a number of tokens have about the same number of them
        common.token_mean(m, 0 if m.flag(dynamic) else m.integer(micro), *keys)
    elif kind == "token_mean" and (ranks := ranks_beside_sampling(m)):
        whole = (m.integer(RUNNER + "seq_length") or 0) - (m.integer(DATA + "max_prompt_length") or 0)
        kind, keys = "constant", (*keys, PLACEMENT, RUNNER + "seq_length", DATA + "max_prompt_length")
        m.set("algorithm.aggregation_constant", max(whole, 1) / ranks, *keys)
        if m.flag("cluster.auto_scheduler"):
            m.differs("auto_scheduler adds GPUs to the policy, and use_valid_token_scale weight to its loss; here not")
    elif kind != "token_mean" and scaled:
        m.lacks(ALGO + "use_valid_token_scale", "micro-batches of a sequence mean are not weighed by their tokens")
    if "algorithm.aggregation" not in m.options:
        m.set("algorithm.aggregation", kind, *keys)
    m.facts["aggregation"] = m.options["algorithm.aggregation"][0]


def gradients_share(m: Migration) -> int:
    """Returns by what factor RLinf's gradient is smaller than the mini-batch's mean; 1 if it is not. Megatron's token
    mean with use_valid_token_scale divides by the tokens of all mini-batches of the step, if training and sampling take
    turns. In AdamW a clip and an epsilon as many times as large do the same."""
    scaled = m.flag(ALGO + "use_valid_token_scale") and not on_fsdp(m)
    whole = AGGREGATIONS.get(m.text(ALGO + "loss_agg_func")) == "token_mean"
    return common.updates(m) if scaled and whole and not ranks_beside_sampling(m) else 1


KL = {"low_var_kl": "low_var", "k3": "low_var", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}


def kl(m: Migration):
    beta, reward = m.number(ALGO + "kl_beta"), m.number(ALGO + "reinpp_kl_beta")
    reward = reward if m.text(ALGO + "adv_type") == "reinpp" else 0
    if beta and reward:
        m.lacks(ALGO + "reinpp_kl_beta", "the KL is in the loss or in the reward, not in both", refuse=True)
        return
    estimator = m.choice(ALGO + "kl_penalty_type", KL) or "low_var"
    placed, key = ("reward", ALGO + "reinpp_kl_beta") if reward else ("loss", ALGO + "kl_beta")
    common.kl(m, float(reward or beta), estimator, placed, key, ALGO + "kl_penalty_type")


def mismatch(m: Migration):
    fix, cap = ALGO + "importance_sampling_fix", ALGO + "importance_sampling_clip"
    m.set("algorithm.mismatch.correction", "token_tis" if m.flag(fix) else "none", fix)
    if m.flag(fix):
        m.set("algorithm.mismatch.cap", float(m.number(cap)), cap)
    again = m.flag(ALGO + "recompute_logprobs")
    if not again and m.flag(fix):
        m.lacks(fix, "needs recompute_logprobs, in RLinf too", refuse=True)
        return
    m.set("algorithm.old_logprobs", "auto" if again else "rollout", ALGO + "recompute_logprobs")
    stop = m.number(ALGO + "early_stop_imp_ratio")
    if on_fsdp(m):
        m.mark(ALGO + "early_stop_imp_ratio", "inert", "of megatron: FSDP's workers do not read it")
    elif stop and m.options.get("algorithm.num_minibatches", (1, ()))[0] > 1:
        m.set("algorithm.early_stop_ratio", float(stop), ALGO + "early_stop_imp_ratio")
        m.differs("beyond early_stop_imp_ratio RLinf leaves out one micro-batch, here the rest of the step's updates")


def sampling(m: Migration):
    for key, greedy in ((SAMPLE + "use_greedy", True), (SAMPLE + "do_sample", False)):
        if m.flag(key) is greedy:
            m.lacks(key, "greedy completions of a group are all equal: nothing can be learnt", refuse=True)
    top_k = m.integer(SAMPLE + "top_k")
    m.set("rollout.temperature", m.number(SAMPLE + "temperature"), SAMPLE + "temperature")
    m.set("rollout.top_p", m.number(SAMPLE + "top_p"), SAMPLE + "top_p")
    m.set("rollout.top_k", top_k if top_k and 0 < top_k < 100_000 else -1, SAMPLE + "top_k")
    m.facts["sampling"] = (
        f"temperature {m[SAMPLE + 'temperature']}, top_p {m[SAMPLE + 'top_p']}, top_k {m[SAMPLE + 'top_k']}"
    )


def optimizer(m: Migration):
    m.set("optimizer.lr", needed(m, OPTIM + "lr", 1e-6), OPTIM + "lr")
    fsdp = on_fsdp(m)
    own = SCHED + "lr_decay_style" if not fsdp else OPTIM + "lr_scheduler"
    decay = m.number(SCHED + "lr_decay_iters")
    warm, keys = _megatrons_warmup(m, SCHED)
    if fsdp:
        warm, keys = _fsdps_warmup(m)
        names = ("decay_style", "decay_iters", "warmup_fraction", "warmup_iters", "warmup_init")
        for key in ("min_lr", *(f"lr_{n}" for n in names)):
            m.mark(
                SCHED + key, "inert", "of megatron; with FSDP there are actor.optim.lr_scheduler and lr_warmup_steps"
            )
    kind = m.text(own)
    common.schedule(m, own, kind, warm, None, own, *keys)
    _optimizer(m, fsdp)
    if not fsdp:
        _start_of_warmup(m, warm)
    if kind in ("linear", "cosine") and not fsdp:
        if decay:
            m.set("optimizer.decay_steps", max(int(decay) - int(warm), 1), SCHED + "lr_decay_iters")
        m.set("optimizer.floor", m.number(SCHED + "min_lr") / m.options["optimizer.lr"][0], SCHED + "min_lr")
    if fsdp:
        _fsdps_decay(m, kind, warm)
        return
    for name in FSDPS:
        m.mark(OPTIM + name, "inert", "of FSDP; megatron has actor.lr_sched")


FSDPS = ("lr_scheduler", "lr_warmup_steps", "lr_warmup_steps_ratio", "total_training_steps", "min_lr", "min_lr_rate")


def _per(m: Migration) -> int:
    """Optimizer steps between two of FSDP's learning rates."""
    return 1 if m.flag(ACTOR + "lr_sched_sync_with_optim") else common.updates(m)


def _megatrons_warmup(m: Migration, sched: str) -> tuple[int, tuple[str, ...]]:
    """Updates of its warm-up, and their keys: a share of lr_decay_iters, 0 too, wins over a number of them."""
    share, keys = m.number(sched + "lr_warmup_fraction"), (sched + "lr_warmup_iters",)
    if share is None:
        return m.integer(*keys) or 0, keys
    decay = m.number(sched + "lr_decay_iters") or 100_000
    return int(share * decay), (sched + "lr_warmup_fraction", sched + "lr_decay_iters", *keys)


def _fsdps_warmup(m: Migration) -> tuple[int, tuple[str, ...]]:
    """Updates of its warm-up, and their keys: steps, or where they are negative a share of total_training_steps."""
    steps, key = m.integer(OPTIM + "lr_warmup_steps"), OPTIM + "lr_warmup_steps"
    keys = (key, ACTOR + "training_backend", ACTOR + "lr_sched_sync_with_optim")
    if steps is None or steps < 0:
        share, total = m.number(OPTIM + "lr_warmup_steps_ratio") or 0, m.integer(OPTIM + "total_training_steps") or 0
        steps, keys = int(share * total), (*keys, OPTIM + "lr_warmup_steps_ratio", OPTIM + "total_training_steps")
    return steps * _per(m), keys


def _fsdps_decay(m: Migration, kind: str, warm: int):
    """Where its cosine ends, and at what rate."""
    if kind != "cosine":
        return
    total, peak = (m.integer(OPTIM + "total_training_steps") or 0) * _per(m), m.options["optimizer.lr"][0]
    if total:
        m.set("optimizer.decay_steps", max(total - warm, 1), OPTIM + "total_training_steps")
    else:
        m.lacks(
            OPTIM + "total_training_steps", "RLinf's cosine of no steps falls at once; here it lasts to the run's end"
        )
    rate, low = m.number(OPTIM + "min_lr_rate"), m.number(OPTIM + "min_lr") or 0.0
    key = OPTIM + ("min_lr" if rate is None else "min_lr_rate")
    m.set("optimizer.floor", (min(low / peak, 1.0) if peak else 0.0) if rate is None else rate, key)


def _optimizer(m: Migration, fsdp: bool):
    """Megatron's adam is AdamW, its SGD has momentum; FSDP's workers take AdamW whatever the key says."""
    key, first, momentum = OPTIM + "optimizer", OPTIM + "adam_beta1", OPTIM + "sgd_momentum"
    if fsdp:
        m.mark(key, "inert", "with FSDP the optimizer is AdamW")
    name = "adamw" if fsdp else m.choice(key, {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}) or "adamw"
    m.set("optimizer.name", name, *(() if fsdp else (key,)))
    used, other = (momentum, first) if name == "sgd" else (first, momentum)
    m.set("optimizer.b1", m.number(used), used)
    m.mark(other, "inert", "of another optimizer")
    share, scale = gradients_share(m), (ALGO + "use_valid_token_scale", ALGO + "n_minibatches")
    for option, key in (("eps", "adam_eps"), ("max_grad_norm", "clip_grad")):
        value = m.number(OPTIM + key)
        m.set(f"optimizer.{option}", value and value * share, OPTIM + key, *(scale if share > 1 else ()))
    if name == "sgd" and share > 1:
        m.lacks(scale[0], f"of the tokens of {share} mini-batches, which SGD's steps are as much smaller by: divide lr")


def _start_of_warmup(m: Migration, warm: float):
    key = SCHED + "lr_warmup_init"
    start, peak = m.number(key), m.options["optimizer.lr"][0]
    if start > peak:
        raise m.wrong(key, f"at most the learning rate, {peak:g}")
    if warm:
        m.set("optimizer.warmup_start", start / peak, key)
    else:
        m.mark(key, "inert", "there is no warm-up")


def critics_optimizer(m: Migration):
    """Sets critic.optimizer.* where it differs from the policy's, if adv_type=gae. Megatron trains it; another schedule
    is reported. Raises Unreadable for a start of the warm-up or a floor above lr."""
    if m.text(ALGO + "adv_type") != "gae":
        return
    o, s, rate = CRITIC + "optim.", CRITIC + "lr_sched.", m.number(CRITIC + "optim.lr")
    key = o + "optimizer"
    name = m.choice(key, {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}) or "adamw"
    first = o + ("sgd_momentum" if name == "sgd" else "adam_beta1")
    own = {"name": (name, (key,)), "b1": (float(m.number(first)), (first,))}
    names = {"b2": "adam_beta2", "eps": "adam_eps", "weight_decay": "weight_decay", "max_grad_norm": "clip_grad"}
    for option, given in names.items():
        own[option] = (float(m.number(o + given) or 0), (o + given,))
    kind = m.text(s + "lr_decay_style")
    if kind not in common.SCHEDULES:
        m.lacks(s + "lr_decay_style", f"of schedules there are constant, linear, cosine and wsd, not {kind!r}")
        kind = "constant"
    own["schedule"] = (common.SCHEDULES[kind], (s + "lr_decay_style",))
    decay = m.number(s + "lr_decay_iters")
    warm, keys = _megatrons_warmup(m, s)
    own["warmup_steps"] = (warm, keys)
    if "optimizer.warmup_fraction" in m.options:
        own["warmup_fraction"] = (0.0, keys)
    rates = (("warmup_start", "lr_warmup_init", warm), ("floor", "min_lr", kind in ("linear", "cosine")))
    for option, given, used in rates:
        value = m.number(s + given) or 0.0
        if used and value > rate:
            raise m.wrong(s + given, f"at most the learning rate, {rate:g}")
        if used:
            own[option] = (value / rate if rate else 0.0, (s + given,))
    if kind in ("linear", "cosine"):
        own["decay_steps"] = (max(int(decay) - warm, 1) if decay else 0, (s + "lr_decay_iters",))
    common.critics_optimizer(m, own)


PLACE = re.compile(r"(\d+)(?:-(\d+))?")


def _places(text: str, total: int) -> list[int] | None:
    """Devices of 'all', '0-3', '0,2'; None: it is none of these, or a range ends before it begins."""
    if text == "all":
        return list(range(total))
    found: list[int] = []
    for part in text.split(","):
        place = PLACE.fullmatch(part.strip())
        if not place or not int(place[1]) <= int(place[2] or place[1]) <= 100_000:
            return None
        found += range(int(place[1]), int(place[2] or place[1]) + 1)
    return found


def cluster(m: Migration) -> int:
    """Returns the GPUs of the cluster, which are `all` of a placement: nodes x GPUs per node; where the source does not
    say the latter, which RLinf asks the nodes, --gpus, if they are as many on each node."""
    nodes, per = map(m.integer, CLUSTER)
    return nodes * per if m.given(CLUSTER[1]) or not m.gpus or m.gpus % nodes else m.gpus


def placed(m: Migration, total: int) -> tuple[dict[str, list[int]], str]:
    """Returns ({component: its devices} of texts such as 'actor,rollout: all', ""), or ({}, key) for the first key
    whose value is not all, 0-3 or 0,2. total: how many devices `all` is."""
    out: dict[str, list[int]] = {}
    for s in m.all(PLACEMENT):
        found = _places(str(s.value).strip(), total)
        if found is None:
            return {}, s.key
        for role in s.key.removeprefix("cluster.component_placement.").split(","):
            out[role.strip()] = found
    return out, ""


def ranks_beside_sampling(m: Migration) -> float:
    """Returns the data-parallel ranks of a policy that trains while other GPUs sample (RLinf's pipeline); 0 if it
    shares devices with sampling and auto_scheduler is off, or if no devices of the policy can be read."""
    roles, _ = placed(m, cluster(m))
    train, infer = roles.get("actor", []), roles.get("rollout", [])
    if not train or set(train) & set(infer) and not m.flag("cluster.auto_scheduler"):
        return 0
    split = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return len(train) / math.prod(m.integer(MODEL + n) or 1 for n in split)


def layout(m: Migration):
    nodes, total = m.integer(CLUSTER[0]), cluster(m)
    roles, unread = placed(m, total)
    if unread:
        text = f"{str(m[unread]).strip()!r}: expected all, 0-7 or numbers with commas, of devices of one kind"
        m.lacks(unread, text, refuse=True)
    train, infer = roles.get("actor", []), roles.get("rollout", [])
    used = set(train) | set(infer)
    gpus = devices.count_gpus(m, len(used) or total)
    backend = ACTOR + "training_backend"
    sizes = devices.megatron_sizes(m, MODEL, not on_fsdp(m))
    apart = bool(train and infer and not set(train) & set(infer))
    keys = (*CLUSTER, PLACEMENT, *(MODEL + name for name in devices.MEGATRON.values()))
    devices.mesh(m, (backend,), keys, **sizes, gpus=len(train) if apart else gpus)
    m.facts["GPUs"] = gpus
    served = m.integer(ROLLOUT + "tensor_parallel_size")
    engines = max((len(infer) or gpus) // max(served, 1), 1)
    where = (ROLLOUT + "tensor_parallel_size", *keys[:3])
    backend = ROLLOUT + "rollout_backend"
    devices.engine(
        m,
        m.text(backend),
        backend,
        tp=served,
        engines=1 if apart else engines,
        nodes=1 if apart else nodes,
        gpus=0 if apart else gpus,
        colocated=not apart,
        keys=where,
    )
    if not apart:
        devices.shared(m, train, infer, nodes)
    else:
        devices.apart(m, train, infer, served, nodes, *where, policy=PLACEMENT)
    if apart and "inference" in roles:
        m.differs("log-probs are computed by the trainer, not by GPUs of their own (inference)")
    rest(m)


def rest(m: Migration):
    """Sets mesh.roles.policy: rest streamed with FSDP's cpu_offload, else host by enable_offload, or by offload_weight
    and offload_optimizer together."""
    keys = tuple(ACTOR + n for n in ("offload_optimizer", "offload_weight", "enable_offload"))
    whole = m.flag(ACTOR + "enable_offload") or m.flag(ACTOR + "offload_optimizer") and m.flag(ACTOR + "offload_weight")
    if m.flag(FSDP + "cpu_offload"):
        devices.rest(m, "streamed", FSDP + "cpu_offload")
    elif whole:
        devices.rest(m, "host", *keys)


def memory(m: Migration):
    longest = m.options["data.max_prompt_tokens"][0] + m.options.get("rollout.max_new_tokens", (1, ()))[0]
    dynamic, most = RUNNER + "enable_dynamic_batch_size", RUNNER + "max_tokens_per_mbs"
    micro, score = ALGO + "training_batch_size_per_gpu", ALGO + "logprob_forward_micro_batch_size"
    train = max(m.integer(most), longest) if m.flag(dynamic) else m.integer(micro) * longest
    m.set("train.tokens_per_microbatch", train, *((dynamic, most) if m.flag(dynamic) else (micro,)))
    scored = m.integer(score) * longest
    if scored != train and not m.flag(dynamic):
        m.set("train.score_tokens_per_microbatch", scored, score)


def model(m: Migration):
    key = next((k for k in PATHS if m[k]), "")
    if key:
        m.set("model.path", m.text(key).rstrip("/"), key)
    else:
        m.needs("rollout.model.model_path is not set: name the model in model.path")
    tokenizer = m.text(ACTOR + "tokenizer.tokenizer_model").rstrip("/")
    if tokenizer and key and tokenizer != m.text(key).rstrip("/"):
        m.set("model.tokenizer", tokenizer, ACTOR + "tokenizer.tokenizer_model")
    full, kind = MODEL + "recompute_granularity", {"full": "full", "selective": "dots", "": "none"}
    if on_fsdp(m):
        m.set(
            "model.remat",
            "full" if m.flag(FSDP + "gradient_checkpointing") else "none",
            FSDP + "gradient_checkpointing",
        )
    else:
        m.set("model.remat", m.choice(full, kind) or "auto", full)
    key, amp = (
        MODEL + "precision",
        next((FSDP + n for n in ("amp_autocast.", "amp.") if m.flag(FSDP + n + "enabled")), ""),
    )
    if on_fsdp(m) and amp:
        key = FSDP + "amp_autocast.precision"
    elif on_fsdp(m) and m[FSDP + "mixed_precision.param_dtype"]:
        key = FSDP + "mixed_precision.param_dtype"
    switches = (FSDP + "amp_autocast.enabled", FSDP + "amp.enabled", ACTOR + "training_backend")
    m.set("train.compute_dtype", common.DTYPES.get(m.text(key), "auto"), key, *switches)
    key = ROLLOUT + "model.precision" if m[ROLLOUT + "model.precision"] else MODEL + "precision"
    m.set("rollout.dtype", common.DTYPES.get(m.text(key), "auto"), key)


def data(m: Migration):
    common.data_files(m, m.list(DATA + "train_data_paths"), DATA + "train_data_paths")
    common.eval_sets(m, m.list(DATA + "val_data_paths"), DATA + "val_data_paths")
    m.set("eval.every_steps", 0, RUNNER + "val_check_interval")
    m.set("eval.before", False, RUNNER + "val_check_interval")
    m.set("eval.after", False, RUNNER + "val_check_interval")
    m.mark(
        RUNNER + "val_check_interval", "inert", "RLinf's reasoning runner launches no validation; eval.every_steps does"
    )
    if m.list(DATA + "val_data_paths"):
        m.differs("eval.sets are named and not asked, as in RLinf's reasoning runner: set eval.every_steps")
    m.facts["evaluation"] = "none"
    m.set("data.prompt_column", m.text(DATA + "prompt_key"), DATA + "prompt_key")
    m.set("data.answer_column", m.text(DATA + "answer_key"), DATA + "answer_key")
    m.set("data.chat", "auto" if m.flag(DATA + "apply_chat_template") else "false", DATA + "apply_chat_template")
    m.set("data.shuffle", m.flag(DATA + "shuffle"), DATA + "shuffle")
    m.set("data.seed", m.integer(DATA + "seed"), DATA + "seed")
    m.set("data.epochs", m.integer(RUNNER + "max_epochs"), RUNNER + "max_epochs")
    steps = m.integer(RUNNER + "max_steps")
    if steps is not None and steps > 0:
        m.set("train.steps", steps, RUNNER + "max_steps")


MATH = '''"""RLinf's math reward: 1 where a completion agrees with the row's answer, or one of its list."""

from jaxrl.rewards.builtin import math_reward


def score(prompt, completion, answer=None, **columns):
    answers = answer if isinstance(answer, list | tuple) else [answer]
    return float(any(math_reward(prompt, completion, str(one)) for one in answers))
'''


def reward(m: Migration):
    kind, scale = m.text(REWARD + "reward_type"), m.number(REWARD + "reward_scale")
    low, high = m.number(REWARD + "reward_min_val"), m.number(REWARD + "reward_max_val")
    values = (REWARD + "reward_min_val", REWARD + "reward_max_val")
    if kind != "math":  # what it says, times the scale
        low, high = 0.0, 1.0
        for key in values:
            m.mark(key, "inert", "of the math reward")
        values = ()
    if m.flag(REWARD + "use_reward_model"):
        m.lacks(REWARD + "use_reward_model", "a reward model of ours is reward.model.path", refuse=True)
    if kind == "math":
        common.reward_file(m, MATH, REWARD + "reward_type")
        m.differs("math is judged by math-verify; RLinf has a verifier of its own")
    else:
        common.reward_stub(m, "RLinf", f"reward_type={kind}", REWARD + "reward_type")
    m.set("reward.scale", float((high - low) * scale), REWARD + "reward_scale", *values)
    m.set("reward.bias", float(low * scale), REWARD + "reward_scale", *values[:1])
    right = f"{high * scale:g} where right, {low * scale:g} where wrong"
    m.facts["rewards"] = right if values else f"{scale:g} x what {kind} says"


def places(m: Migration):
    folder, name = m.text(RUNNER + "output_dir").rstrip("/"), m.text(RUNNER + "experiment_name")
    if m.given(RUNNER + "output_dir"):
        m.set("run.dir", f"{folder}/{name}" if name else folder, RUNNER + "output_dir", RUNNER + "experiment_name")
    common.triggers(m, "checkpoint.every_steps", m.integer(RUNNER + "save_interval"), RUNNER + "save_interval")
    m.set("checkpoint.every_minutes", 0.0, RUNNER + "save_interval")
    m.set("checkpoint.keep", -1, RUNNER + "save_interval")
    resume = m.text(RUNNER + "resume_dir")
    m.set("run.resume", "never" if not resume else "auto", RUNNER + "resume_dir")
    if resume not in ("", "auto"):
        m.needs(
            f"runner.resume_dir={resume}: RLinf's checkpoints are not read; name a Hugging Face folder in model.path"
        )


def loggers(m: Migration):
    """Sets log.wandb, log.tensorboard (always on), log.wandb_project and log.wandb_name from runner.logger; other
    backends are reported as not carried over."""
    names = m.list(RUNNER + "logger.logger_backends") or ["tensorboard"]
    key = RUNNER + "logger.logger_backends"
    if m.flag(RUNNER + "logger.wandb.enable"):
        names, key = [*names, "wandb"], RUNNER + "logger.wandb.enable"
    project = RUNNER + "logger.project_name"
    common.loggers(
        m,
        key,
        names,
        m.text(project),
        m.text(RUNNER + "logger.experiment_name"),
        project,
        RUNNER + "logger.experiment_name",
    )


def engine_options(m: Migration):
    for s in m.all(ROLLOUT + "vllm.*"):
        name = s.key.rsplit(".", 1)[1]
        if m.text(ROLLOUT + "rollout_backend") != "vllm" or s.value is None:
            m.mark(s.key, "inert", "of another engine, or empty")
        elif name in ("enable_chunked_prefill", "enable_prefix_caching"):
            m.set(f"rollout.vllm.{name.removeprefix('enable_')}", bool(switch(s.value)), s.key)
        elif name == "max_num_batched_tokens":
            m.set("rollout.vllm.engine_kwargs.max_num_batched_tokens", s.value, s.key)
        else:
            m.mark(s.key, "automatic", "vLLM's own choice")
