"""What keys of AReaL mean together: the joint rules of its table. See systems/areal.py."""

from __future__ import annotations

import math
import re

from jaxrl.migrate import common, devices
from jaxrl.migrate.systems import images_meaning
from jaxrl.migrate.table import Migration

ACTOR, OPTIM, REJECT, CRITIC, GCONFIG, EVAL, DATA = (
    "actor.",
    "actor.optimizer.",
    "actor.rejection_sampling.",
    "critic.",
    "gconfig.",
    "eval_gconfig.",
    "train_dataset.",
)


def has(m: Migration, prefix: str) -> bool:
    """Returns whether the source sets a key that begins with `prefix` (a table's name and dot), and not to null."""
    return any(key.startswith(prefix) and s.value is not None for key, s in m.singles.items())


def batch(m: Migration):
    prompts, group = m.integer(DATA + "batch_size"), m.integer(GCONFIG + "n_samples")
    common.batch(m, prompts, group, (DATA + "batch_size",), GCONFIG + "n_samples")
    count = m.integer(ACTOR + "ppo_n_minibatches")
    if count and prompts % count:
        m.lacks(ACTOR + "ppo_n_minibatches", f"{prompts} prompts are no multiple of {count} mini-batches", refuse=True)
        return
    m.set("algorithm.num_minibatches", count, ACTOR + "ppo_n_minibatches")
    m.facts["optimizer steps per step"] = count
    own = m.integer(CRITIC + "ppo_n_minibatches")
    if has(m, CRITIC) and own and own != count and prompts % own == 0:
        m.set("critic.num_minibatches", own, CRITIC + "ppo_n_minibatches")


def reward(m: Migration):
    """Sets reward.scale, bias, clip, overlong_*, norm_*, zero_without_end, algorithm.advantage_mean, _std; notes what
    differs. AReaL clips and norms (r + bias) x scale; jaxrl adds after scaling: reward.bias is bias x scale."""
    scale, bias, bound = (m.number(ACTOR + n) for n in ("reward_scaling", "reward_bias", "reward_clip"))
    m.set("reward.scale", scale, ACTOR + "reward_scaling")
    m.set("reward.bias", bias * scale, ACTOR + "reward_bias", ACTOR + "reward_scaling")
    m.set("reward.clip", bound, ACTOR + "reward_clip")
    m.facts["reward"] = f"(r + {bias:g}) x {scale:g} within {bound:g}"
    m.set("reward.zero_without_end", m.flag(ACTOR + "mask_no_eos_with_zero"), ACTOR + "mask_no_eos_with_zero")
    if m.flag(ACTOR + "mask_no_eos_with_zero"):
        m.differs(
            "a completion that does not end has reward 0 before scale and bias here, after them and the norm in AReaL"
        )
    if m.flag(ACTOR + "overlong_reward_penalty"):
        m.set(
            "reward.overlong_buffer",
            m.integer(ACTOR + "overlong_tokens"),
            ACTOR + "overlong_tokens",
            ACTOR + "overlong_reward_penalty",
        )
        m.set(
            "reward.overlong_penalty",
            m.number(ACTOR + "overlong_penalty_factor") * scale,
            ACTOR + "overlong_penalty_factor",
            ACTOR + "reward_scaling",
        )
    longest, own = m.integer(GCONFIG + "max_new_tokens"), ACTOR + "max_new_tokens"
    counted = longest if m[own] == "${gconfig.max_new_tokens}" else m.integer(own)  # refers to what is not set
    if counted != longest and m.flag(ACTOR + "overlong_reward_penalty"):
        m.lacks(
            ACTOR + "max_new_tokens",
            f"{counted}: AReaL's overlong penalty counts to this length, and here to gconfig.max_new_tokens={longest}",
        )
    elif counted != longest and m.given(ACTOR + "max_new_tokens"):
        m.needs(
            f"{ACTOR}max_new_tokens={counted} does not bound completions; the length of completions belongs at "
            f"gconfig.max_new_tokens (now {longest})"
        )
    _norm(m)


def _norm(m: Migration):
    n = ACTOR + "reward_norm."
    on = has(m, n) or m.flag(ACTOR + "group_reward_norm")
    if m.flag(ACTOR + "group_reward_norm"):  # of earlier versions
        mean = std = "group"
        keys = (ACTOR + "group_reward_norm",)
    else:
        mean, std = (m.text(n + f"{k}_level") or "none" for k in ("mean", "std"))
        keys = (n + "mean_level", n + "std_level")
    if not on:
        mean = std = "none"
    unknown = {mean, std} - {"group", "batch", "none"}
    if unknown:
        key = n + ("mean_level" if mean in unknown else "std_level")
        m.lacks(key, f"levels are group, batch and null, not {', '.join(unknown)}", refuse=True)
        return
    given, group = m[n + "group_size"], m.options["rollout.group_size"][0]
    size = group if "${gconfig.n_samples}" == given else m.integer(n + "group_size") or 1  # refers to what is not set
    if has(m, n) and "group" in (mean, std) and size != group:
        m.lacks(
            n + "group_size",
            f"AReaL's groups of rewards are of {size}, and gconfig.n_samples={group} are of a prompt; here a group is "
            "a prompt's completions",
        )
    alone = on and m.flag(n + "mean_leave1out")
    if alone and mean == "group":
        m.set("algorithm.advantage_mean", "leave_one_out", n + "mean_leave1out", n + "mean_level")
        m.set("algorithm.advantage_std", std, n + "std_level")
        mean = std = "none"
    elif alone:
        m.lacks(n + "mean_leave1out", "each is left out of the mean of its group, not of the batch", refuse=True)
    else:
        m.set("algorithm.advantage_mean", "none", *keys)
        m.set("algorithm.advantage_std", "none", *keys)
    m.set("reward.norm_mean", mean, keys[0])
    m.set("reward.norm_std", std, keys[-1])
    if on and not m.flag(n + "std_unbiased"):
        m.lacks(n + "std_unbiased", "standard deviations divide by n - 1")


def advantage(m: Migration):
    gamma, lam = m.number(ACTOR + "discount"), m.number(ACTOR + "gae_lambda")
    if has(m, CRITIC):
        m.set("algorithm.advantage", "gae", CRITIC + "path")
        m.set("algorithm.gamma", gamma, ACTOR + "discount")
        m.set("algorithm.lam", lam, ACTOR + "gae_lambda")
        m.set("critic.value_clip", m.number(CRITIC + "eps_clip"), CRITIC + "eps_clip")
        m.set("critic.lr", m.number(CRITIC + "optimizer.lr"), CRITIC + "optimizer.lr")
        if m.text(CRITIC + "path") and m.text(CRITIC + "path") != m.text(ACTOR + "path"):
            m.set("critic.path", m.text(CRITIC + "path"), CRITIC + "path")
    else:  # without values the estimator is the discounted reward to go
        m.set("algorithm.advantage", "returns", CRITIC + "path")
        m.set("algorithm.gamma", gamma * lam, ACTOR + "discount", ACTOR + "gae_lambda")
    n = ACTOR + "adv_norm."
    levels = [m.text(n + f"{k}_level") or "none" for k in ("mean", "std")] if has(m, n) else ["none", "none"]
    known = {"batch": "step", "group": "group", "none": "none"}
    if unknown := [level for level in levels if level not in known]:
        key = n + ("mean_level" if levels[0] in unknown else "std_level")
        m.lacks(key, f"levels are batch, group and null, not {unknown[0]!r}", refuse=True)
        return
    m.set("algorithm.whiten", levels != ["none", "none"], n + "mean_level", n + "std_level")
    if levels != ["none", "none"]:
        m.set("algorithm.whiten_mean", known[levels[0]], n + "mean_level")
        m.set("algorithm.whiten_std", known[levels[1]], n + "std_level")
    group = m.options["rollout.group_size"][0]
    size = m.integer(n + "group_size") if str(m[n + "group_size"] or "").isdigit() else group
    if "group" in levels and size != group:
        m.lacks(n + "group_size", f"groups of {size} sequences: a group is the completions of a prompt here")
    m.facts["advantage"] = ("GAE" if has(m, CRITIC) else "reward to go") + (
        f", tokens normed by {levels[0]} and {levels[1]}" if m.options["algorithm.whiten"][0] else ""
    )


def kl(m: Migration):
    coef, estimator = m.number(ACTOR + "kl_ctl"), m.text(ACTOR + "kl_estimator")
    if estimator not in ("k1", "k2", "k3"):
        m.lacks(ACTOR + "kl_estimator", f"{estimator!r} is none of k1, k2, k3", refuse=True)
        return
    common.kl(m, coef, estimator, "reward", ACTOR + "kl_ctl", ACTOR + "kl_estimator")
    if coef and not has(m, "ref."):
        m.lacks(
            ACTOR + "kl_ctl",
            "without a table ref AReaL takes the reference's log-probs for 0, and rewards unlikely tokens; "
            "here the KL is to the policy as it starts. Set actor.kl_ctl=0 if none was meant",
        )
    elif coef and m.text("ref.path") and m.text("ref.path") != m.text(ACTOR + "path"):
        m.set("reference.path", m.text("ref.path"), "ref.path")
    if not m.given(ACTOR + "kl_ctl"):
        m.differs("actor.kl_ctl is not set, which is 0.1 in AReaL: a KL in the reward, and a reference in memory")


NO_ROOM = 1e-9  # eps_clip=0, as in its example of M2PO: in fp32 a ratio is clipped to 1


def loss(m: Migration):
    low, high, dual = m.number(ACTOR + "eps_clip"), m.number(ACTOR + "eps_clip_higher"), m.number(ACTOR + "c_clip")
    low, high = (NO_ROOM if bound == 0 else bound for bound in (low, high))
    sapo = m.flag(ACTOR + "use_sapo_loss")
    cispo = m.flag(ACTOR + "use_cispo_loss")
    m.set("algorithm.policy_loss", "sapo" if sapo else "cispo" if cispo else "clip", ACTOR + "use_sapo_loss",
          ACTOR + "use_cispo_loss")
    level = m.choice(ACTOR + "importance_sampling_level", {"token": "token", "sequence": "sequence"})
    m.set("algorithm.ratio", level or "token", ACTOR + "importance_sampling_level")
    m.set("algorithm.aggregation", "token_mean", ACTOR + "use_sapo_loss")
    if sapo:
        m.set("algorithm.sapo_tau_pos", m.number(ACTOR + "sapo_tau_pos"), ACTOR + "sapo_tau_pos")
        m.set("algorithm.sapo_tau_neg", m.number(ACTOR + "sapo_tau_neg"), ACTOR + "sapo_tau_neg")
    else:
        m.set("algorithm.clip_low", low, ACTOR + "eps_clip")
        m.set(
            "algorithm.clip_high",
            low if high is None else high,
            ACTOR + ("eps_clip" if high is None else "eps_clip_higher"),
        )
        m.set("algorithm.dual_clip", dual or 0.0, ACTOR + "c_clip")
        m.facts["clip"] = f"{1 - low:g} to {1 + (low if high is None else high):g}" + (
            f", dual {dual:g}" if dual else ""
        )
    _ratios(m)
    if m[ACTOR + "m2_threshold"] is not None:
        if m.options["algorithm.old_logprobs"][0] == "recompute":
            m.set("algorithm.m2_threshold", m.number(ACTOR + "m2_threshold"), ACTOR + "m2_threshold")
            m.differs("M2PO's mask is of all tokens of a step; AReaL's of those of a micro-batch")
        else:
            m.lacks(ACTOR + "m2_threshold", "without the trainer's log-probs before the update there is no log-ratio")
    common.temperatures(
        m, m.number(ACTOR + "temperature"), m.options["rollout.temperature"][0], ACTOR + "temperature"
    )


def _ratios(m: Migration):
    decoupled, again = m.flag(ACTOR + "use_decoupled_loss"), m.flag(ACTOR + "recompute_logprob")
    keys = (ACTOR + "use_decoupled_loss", ACTOR + "recompute_logprob")
    in_reward = bool(m.number(ACTOR + "kl_ctl")) and not (decoupled or again)
    if in_reward:
        m.lacks(
            ACTOR + "recompute_logprob",
            "with a KL in the reward ratios are taken to the trainer's log-probs, not to the sampler's"
        )
    scored = decoupled or again or in_reward
    m.set("algorithm.old_logprobs", "recompute" if scored else "rollout", *keys, ACTOR + "kl_ctl")
    if not decoupled:
        m.set("algorithm.mismatch.correction", "none", *keys)
        return
    if m.text(ACTOR + "prox_logp_method") not in ("recompute", "metrics"):
        m.differs("proximal log-probs are computed, not estimated from versions (prox_logp_method)")
    cap, old = (
        m.number(ACTOR + "behav_imp_weight_cap"),
        m.table.versions.index(m.version) < m.table.versions.index("1.0"),
    )
    if m.given(ACTOR + "behave_imp_weight_cap") or m.given(ACTOR + "behave_imp_weight_mode"):
        _masked(m)
    elif m.given(ACTOR + "behav_imp_weight_cap") or old and not has(m, REJECT):
        m.set(
            "algorithm.mismatch.correction",
            "token_mis" if cap else "token_tis",
            ACTOR + "behav_imp_weight_cap",
            keys[0],
        )
        m.set("algorithm.mismatch.cap", cap or 1e6, ACTOR + "behav_imp_weight_cap")
    elif has(m, REJECT):
        _rejection(m)
    else:
        m.set("algorithm.mismatch.correction", "none", keys[0], REJECT + "upper")
        m.differs(
            "AReaL 1.0.0.post1 to 1.0.3 leave out tokens whose weight is above 5 unless told otherwise; where the job"
            " ran under one of these, set algorithm.mismatch.correction=token_mis and algorithm.mismatch.cap=5"
        )


def _masked(m: Migration):
    """behave_imp_weight_cap and _mode of AReaL 1.0.0.post1 to 1.0.3, whose defaults are 5 and token_mask."""
    keys = (ACTOR + "behave_imp_weight_mode", ACTOR + "behave_imp_weight_cap")
    mode = m.text(keys[0]) if m.given(keys[0]) else "token_mask"
    if mode == "disabled":
        m.set("algorithm.mismatch.correction", "none", *keys)
        return
    if mode not in ("token_mask", "token_truncate"):
        m.lacks(keys[0], f"{mode!r}: what is masked or bounded is the ratio of a token", refuse=True)
        return
    m.set("algorithm.mismatch.correction", "token_mis" if mode == "token_mask" else "token_tis", *keys)
    m.set("algorithm.mismatch.cap", (m.number(keys[1]) if m.given(keys[1]) else 5.0) or 1e6, *keys)


def _rejection(m: Migration):
    level, action, metric = (m.text(REJECT + n) for n in ("level", "action", "metric"))
    if level != "token" or metric != "ratio":
        m.lacks(
            REJECT + ("level" if level != "token" else "metric"),
            "what is masked or bounded is the ratio of a token",
            refuse=True,
        )
        return
    m.set(
        "algorithm.mismatch.correction",
        "token_mis" if action == "mask" else "token_tis",
        REJECT + "action",
        REJECT + "level",
    )
    upper, lower = m.number(REJECT + "upper"), m.number(REJECT + "lower")
    m.set("algorithm.mismatch.cap", upper or 1e6, REJECT + "upper")
    if lower and action == "mask":
        m.set("algorithm.mismatch.low", lower, REJECT + "lower")
    elif lower:
        m.lacks(REJECT + "lower", "weights that are truncated have a bound above alone")


def filtering(m: Migration):
    on = m.flag(ACTOR + "dynamic_sampling")
    m.set("algorithm.dynamic_sampling", "mask" if on else "off", ACTOR + "dynamic_sampling")
    if m.flag("dynamic_bs"):
        m.lacks(
            "dynamic_bs",
            "a step has so many prompts as data.prompts_per_step says; algorithm.dynamic_sampling=refill fills it",
        )


def staleness(m: Migration):
    """Sets rollout.max_staleness, and rollout.partial (true above 0). AReaL begins at most 1 + max_head_offpolicyness
    consumer batches ahead of the version; without async_training, staleness is 0."""
    head, consumed, ahead = "rollout.max_head_offpolicyness", "rollout.consumer_batch_size", "async_training"
    stale, batch, keys = m.integer(head), m.integer(consumed), (head, consumed, ahead)
    if batch:
        stale = max(math.ceil((stale + 1) * batch / m.options["data.prompts_per_step"][0]) - 1, 0)
    stale = stale if m.flag(ahead) else 0
    m.set("rollout.max_staleness", stale, *keys)
    m.set("rollout.partial", stale > 0, *keys)
    m.facts["staleness"] = stale


def _top_k(value) -> int:
    return -1 if value is None or value >= 10**6 or value <= 0 else int(value)


def sampling(m: Migration):
    g = GCONFIG
    m.set("rollout.max_new_tokens", m.integer(g + "max_new_tokens"), g + "max_new_tokens")
    longest = m.integer(DATA + "max_length")
    if longest:
        m.set("data.max_prompt_tokens", longest, DATA + "max_length")
        m.set("data.overlong_prompt", "filter", DATA + "max_length")
    else:
        m.set("data.max_prompt_tokens", 2048, DATA + "max_length")
        m.set("data.overlong_prompt", "error", DATA + "max_length")
        m.differs(
            "prompts have no bound without train_dataset.max_length: here one of more than 2048 tokens is an error"
        )
    m.set("rollout.temperature", m.number(g + "temperature"), g + "temperature")
    m.set("rollout.top_p", m.number(g + "top_p"), g + "top_p")
    m.set("rollout.top_k", _top_k(m.number(g + "top_k")), g + "top_k")
    if m.list(g + "stop"):
        m.set("rollout.stop", tuple(str(x) for x in m.list(g + "stop")), g + "stop")
    if m.list(g + "stop_token_ids"):
        m.set("rollout.stop_token_ids", tuple(m.list(g + "stop_token_ids")), g + "stop_token_ids")
    penalty = m.number(g + "frequency_penalty")
    if penalty:
        m.set("rollout.frequency_penalty", penalty, g + "frequency_penalty")
        m.set("rollout.penalties_in_training", True, g + "frequency_penalty")
    if m.flag(g + "greedy"):
        m.lacks(g + "greedy", "greedy completions of a group are all equal: nothing can be learnt", refuse=True)
    total = m.integer(g + "max_tokens")
    bound = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    if m.given(g + "max_tokens") and total and total < bound:
        m.set("train.max_sequence_tokens", total, g + "max_tokens")
    m.facts["sampling"] = f"temperature {m[g + 'temperature']}, top_p {m[g + 'top_p']}"


def evaluation(m: Migration):
    e = "evaluator."
    common.triggers(m, "eval.every_steps", m.integer(e + "freq_steps"), e + "freq_steps")
    m.set("eval.every_epochs", float(m.number(e + "freq_epochs") or 0), e + "freq_epochs")
    m.set("eval.every_seconds", float(m.number(e + "freq_secs") or 0), e + "freq_secs")
    m.set("eval.before", m.flag(e + "eval_before_train"), e + "eval_before_train")
    m.set("eval.after", False, e + "freq_epochs")
    own = has(m, EVAL)
    source = EVAL if own else GCONFIG
    temperature = m.number(EVAL + "temperature") if own else 0.6
    m.set(
        "eval.temperature",
        0.0 if own and m.flag(EVAL + "greedy") else temperature,
        EVAL + "temperature",
        EVAL + "greedy",
    )
    if not own:
        m.differs(
            "evaluation has temperature 0.6, as AReaL's example scripts set it; yours may differ"
        )
    samples = m.integer(source + "n_samples")
    if samples > 1 and not m.options["eval.temperature"][0]:
        m.lacks(EVAL + "n_samples", "several greedy completions are all the same, and are refused: one is sampled")
        samples = 1
    m.set("eval.samples", samples, EVAL + "n_samples", GCONFIG + "n_samples")
    m.set("eval.top_p", m.number(source + "top_p"), source + "top_p")
    m.set("eval.top_k", _top_k(m.number(source + "top_k")), source + "top_k")
    if own:
        m.set("eval.max_new_tokens", m.integer(EVAL + "max_new_tokens"), EVAL + "max_new_tokens")
        if m.list(EVAL + "stop"):
            m.set("eval.stop", tuple(str(x) for x in m.list(EVAL + "stop")), EVAL + "stop")
    units = {n: m[f"{e}freq_{key}"] for n, key in (("epochs", "epochs"), ("steps", "steps"), ("seconds", "secs"))}
    m.facts["evaluation"] = ", ".join(f"every {count} {unit}" for unit, count in units.items() if count) or "none"


def optimizer(m: Migration):
    m.set("optimizer.lr", m.number(OPTIM + "lr"), OPTIM + "lr")
    common.schedule(
        m,
        OPTIM + "lr_scheduler_type",
        m.text(OPTIM + "lr_scheduler_type"),
        m.number(OPTIM + "warmup_steps"),
        None if m.given(OPTIM + "warmup_steps") else m.number(OPTIM + "warmup_steps_proportion"),
        OPTIM + "lr_scheduler_type",
        OPTIM + "warmup_steps_proportion",
        OPTIM + "warmup_steps",
    )
    m.set("optimizer.floor", _floor(m, ACTOR), OPTIM + "min_lr_ratio")
    name = m.choice(OPTIM + "type", {"adam": "adamw", "adam_bf16": "adamw", "sgd": "sgd"})
    m.set("optimizer.name", name or "adamw", OPTIM + "type")


def _floor(m: Migration, of: str) -> float:
    kind, key = m.text(of + "optimizer.lr_scheduler_type"), of + "optimizer.min_lr_ratio"
    megatron = "megatron" in m.text(of + "backend") + m.text("allocation_mode")
    if kind == "cosine" or kind == "linear" and megatron:
        return float(m.number(key) or 0)
    m.mark(key, "inert", "read with a cosine alone, and by Megatron's engine with linear")
    return 0.0


def critics_optimizer(m: Migration):
    o, numbers = CRITIC + "optimizer.", {
        "weight_decay": "weight_decay",
        "b1": "beta1",
        "b2": "beta2",
        "eps": "eps",
        "max_grad_norm": "gradient_clipping",
        "warmup_fraction": "warmup_steps_proportion",
    }
    if not has(m, CRITIC):
        return
    own = {option: (float(m.number(o + key) or 0), (o + key,)) for option, key in numbers.items()}
    own["floor"] = (_floor(m, CRITIC), (o + "min_lr_ratio",))
    shape = m.choice(o + "lr_scheduler_type", common.SCHEDULES)
    common.critics_optimizer(m, {**own, "schedule": (shape or "constant", (o + "lr_scheduler_type",))})


def allocation(text: str) -> dict[str, int]:
    """Returns {d, t, p, c, e: size, else 1} of 'fsdp:d4p1t2' or '(attn:d4p1t2c2|ffn:d2p1t2e2)': attn's win."""
    out = dict.fromkeys("dtpce", 1)
    for part in reversed(re.split(r"[|()]", text)):  # the attention's sizes win
        for letter, number in re.findall(r"([dtpce])(\d{1,5})", re.sub(r"^[A-Za-z_]+[:.]", "", part)):
            out[letter] = int(number)
    return out


def layout(m: Migration):
    text = m.text("allocation_mode")
    if text:
        parts = text.split("+")
        sampler, trainer = (parts[0], parts[-1]) if len(parts) > 1 else (text, text)
        keys = ("allocation_mode",)
    else:
        keys = ("rollout.backend", ACTOR + "backend")
        sampler, trainer = map(m.text, keys)
    a, r = allocation(trainer), allocation(sampler)
    nodes = m.integer("cluster.n_nodes")
    count = a["d"] * a["t"] * a["p"] * a["c"]
    engines = r["d"]
    named = count if re.search(r"\d", trainer) else 0
    count = devices.count_gpus(m, named, 1, count + engines * r["t"] * r["p"])
    m.facts["layout"] = f"training {trainer or 'unset'}, rollouts {sampler or 'unset'}"
    devices.mesh(m, keys, keys, tp=a["t"], pp=a["p"], cp=a["c"], ep=a["e"], gpus=count)
    fsdp = a["p"] == 1 and not re.match(r"megatron|archon", trainer)  # its engine for what does not name another
    if fsdp and common.DTYPES.get(m.text(ACTOR + "dtype")) == "bf16":
        m.differs(
            "AReaL's FSDP engine keeps the weights that are trained and Adam's moments in bfloat16 (actor.dtype); here "
            "both are in float32, so that small updates are not rounded away, and take 6 bytes more per parameter. "
            "train.param_dtype=bf16 keeps the weights as AReaL does"
        )
    backend = re.match(r"[A-Za-z]+", sampler)
    name = backend[0].lower() if backend else "sglang"
    name = name if name in ("vllm", "sglang") else "sglang"
    together = text and "+" not in text or m.text("rollout.scheduling_strategy.type") == "colocation"
    spread = max(1, -(-count * 1 // max(m.integer("cluster.n_gpus_per_node"), 1)))
    devices.engine(
        m,
        name,
        keys[0],
        tp=r["t"] * r["p"],
        engines=engines,
        nodes=min(nodes, spread),
        gpus=count,
        colocated=bool(together),
        keys=keys,
        host=m.integer("cluster.n_gpus_per_node"),
    )
    m.set("rollout.dtype", common.DTYPES.get(m.text(f"{name}.dtype"), "auto"), f"{name}.dtype")
    share = "sglang.mem_fraction_static" if name == "sglang" else "vllm.gpu_memory_utilization"
    m.set("rollout.vllm.memory_fraction", m.number(share), share)
    longest = m.integer("sglang.context_length" if name == "sglang" else "vllm.max_model_len")
    key = "sglang.context_length" if name == "sglang" else "vllm.max_model_len"
    if longest and m.given(key):
        common.context(m, longest, "rollout.vllm.max_model_len", key)
    running = "sglang.max_running_requests" if name == "sglang" else "vllm.max_num_seqs"
    if m.integer(running):
        m.set("rollout.vllm.max_running", m.integer(running), running)


def memory(m: Migration):
    longest = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    tokens, ref = m.integer(ACTOR + "mb_spec.max_tokens_per_mb"), m.integer("ref.mb_spec.max_tokens_per_mb")
    if tokens:
        m.set("train.tokens_per_microbatch", max(tokens, longest), ACTOR + "mb_spec.max_tokens_per_mb")
        if ref and max(ref, longest) != max(tokens, longest):
            m.set("train.score_tokens_per_microbatch", max(ref, longest), "ref.mb_spec.max_tokens_per_mb")


ANY_SOLUTION = '''"""AReaL's reward of boba's rows: 1 if a completion is one of the solutions."""

from jaxrl.rewards.builtin import load_math_verify, math_reward


def score(prompt, completion, answer=(), **columns):
    solutions = [answer] if isinstance(answer, str) else answer
    return max((math_reward(prompt, completion, str(solution)) for solution in solutions), default=0.0)


score.prepare = load_math_verify
'''
BOXED = "Please put your final answer within \\boxed{}."


def data(m: Migration):
    path = m.text(DATA + "path")
    common.data_files(m, [path], DATA + "path")
    if path == "openai/gsm8k":
        m.set("data.subset", "main", DATA + "path")
        m.set("data.prompt_column", "question", DATA + "path")
        m.set("data.answer_pattern", "#### (.*)", DATA + "path")
        m.set("data.system_prompt", BOXED, DATA + "path")
        m.set("reward.functions", ("math",), DATA + "path")
        m.differs(
            'AReaL\'s loader of GSM8K puts "Please put your final answer within \\boxed{}." behind questions; here it'
            " is the system prompt"
        )
    elif "boba" in path.lower():  # the rows of its example boba_grpo
        m.set("data.prompt_column", "prompt", DATA + "path")
        m.set("data.answer_column", "solutions", DATA + "path")
        common.reward_file(m, ANY_SOLUTION, DATA + "path")
        m.differs(
            "prompts of boba's rows keep the marks of their template (<｜User｜>, <think>), which AReaL's example takes "
            "out: write them without, or set data.chat=false"
        )
    elif not images_meaning.areal(m, path):
        common.reward_stub(m, "the run", f"the training script of {path}", DATA + "path")
        m.needs(
            "data.prompt_column, data.answer_column: the columns of your rows, which AReaL's loader in Python knows; "
            "data.chat=false where your workflow takes no chat template"
        )
    m.set("data.shuffle", m.flag(DATA + "shuffle"), DATA + "shuffle")
    m.set("data.drop_last", m.flag(DATA + "drop_last"), DATA + "drop_last")
    m.set("data.workers", m.integer(DATA + "num_workers"), DATA + "num_workers")
    if m.text("valid_dataset.path"):
        split = m.text("valid_dataset.split")
        at = "" if m.text("valid_dataset.path").endswith((".jsonl", ".json", ".parquet", ".csv")) else f"@{split}"
        m.set("eval.sets", (f"valid={m.text('valid_dataset.path')}{at}",), "valid_dataset.path", "valid_dataset.split")


def saving(m: Migration):
    s, r = "saver.", "recover."
    common.triggers(m, "checkpoint.export_every_steps", m.integer(s + "freq_steps"), s + "freq_steps")
    m.set("checkpoint.export_every_epochs", float(m.number(s + "freq_epochs") or 0), s + "freq_epochs")
    m.set("checkpoint.export_every_minutes", float(m.number(s + "freq_secs") or 0) / 60, s + "freq_secs")
    on = m.text(r + "mode") not in ("disabled", "off", "")
    m.set("run.resume", {"resume": "must"}.get(m.text(r + "mode"), "auto") if on else "never", r + "mode")
    common.triggers(m, "checkpoint.every_steps", m.integer(r + "freq_steps") if on else 0, r + "freq_steps", r + "mode")
    m.set(
        "checkpoint.every_epochs", float(m.number(r + "freq_epochs") or 0) if on else 0.0, r + "freq_epochs", r + "mode"
    )
    m.set(
        "checkpoint.every_minutes",
        float(m.number(r + "freq_secs") or 0) / 60 if on else 0.0,
        r + "freq_secs",
        r + "mode",
    )
    names = [m.text(n) for n in ("cluster.fileroot", "experiment_name", "trial_name")]
    if names[1]:
        m.set(
            "run.dir", "/".join(n.rstrip("/") for n in names if n), "cluster.fileroot", "experiment_name", "trial_name"
        )


def adapters(m: Migration):
    if not m.flag(ACTOR + "use_lora"):
        return
    keys = tuple(ACTOR + n for n in ("use_lora", "lora_rank", "lora_alpha", "target_modules"))
    targets = ["all-linear"] if m[keys[3]] in ([], None, ["all-linear"]) else m.list(keys[3])
    common.lora(m, m.integer(keys[1]), m.number(keys[2]), targets, None, "", 0.0, keys)


def loggers(m: Migration):
    w = "stats_logger.wandb."
    mode = m.text(w + "mode")
    m.set("log.wandb", mode in ("online", "offline"), w + "mode")
    if mode == "offline":
        m.set("log.wandb_mode", "offline", w + "mode")
    for option, key in (("wandb_project", "project"), ("wandb_name", "name"), ("wandb_group", "group")):
        if m.text(w + key):
            m.set(f"log.{option}", m.text(w + key), w + key)
    if m.text("stats_logger.swanlab.mode") not in ("disabled", ""):
        m.lacks("stats_logger.swanlab.mode", "of sinks there are console, TensorBoard, JSONL and wandb")


def limits(m: Migration):
    m.set("data.epochs", m.integer("total_train_epochs"), "total_train_epochs")
    if m["total_train_steps"] is not None:
        m.set("train.steps", m.integer("total_train_steps"), "total_train_steps")
    if m["total_train_n_seqs"] is not None:
        m.set("train.max_samples", m.integer("total_train_n_seqs"), "total_train_n_seqs")
