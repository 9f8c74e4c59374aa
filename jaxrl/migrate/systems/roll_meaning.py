"""What keys of ROLL mean together: the joint rules of its table. See systems/roll.py."""

from __future__ import annotations

import math

from jaxrl.migrate import common
from jaxrl.migrate.systems.roll_layout import (
    ACCUMULATION,
    ARGS,
    CRITIC,
    DATA,
    INFER,
    LENGTHS,
    MEGATRON,
    PER_DEVICE,
    SAMPLE,
    TRAIN,
    ULYSSES,
    VALID,
    WORKER,
    devices,
    sizes,
)
from jaxrl.migrate.table import Migration


def batch(m: Migration):
    group_key = "num_return_sequences_in_group"
    prompts_of_step(m, m.integer("rollout_batch_size"), m.integer(group_key), group_key)


def prompts_of_step(m: Migration, prompts: int, group: int, group_key: str, filled: bool = False):
    """Sets data.prompts_per_step, rollout.group_size (group, by group_key), algorithm.ppo_epochs and num_minibatches,
    of per-device sequences x accumulation x data-parallel ranks. Refuses those that are not whole groups; without
    devices asks for --gpus. filled: whether the source copies sequences until they make one; noted where it does."""
    common.batch(m, prompts, group, ("rollout_batch_size",), group_key)
    epochs = m.integer("ppo_epochs")
    m.set("algorithm.ppo_epochs", epochs, "ppo_epochs")
    tp, pp, cp, _ = sizes(m)
    count = len(devices(m, TRAIN)) or m.gpus
    keys = (PER_DEVICE, ACCUMULATION, TRAIN + "device_mapping", "rollout_batch_size", group_key)
    if not count:
        m.set("algorithm.num_minibatches", 1, *keys)
        m.needs(
            "actor_train.device_mapping is not set: the optimizer steps of a batch follow from the number of GPUs; "
            "give --gpus=N (here there is one step)"
        )
        return
    if count % (tp * pp * cp):
        m.lacks(
            TRAIN + "device_mapping", f"{count} devices are no multiple of {tp} x {pp} x {cp} (tp, pp, cp)", refuse=True
        )
        return
    dp = count // (tp * pp * cp)
    size, total = m.integer(PER_DEVICE) * m.integer(ACCUMULATION) * dp, prompts * group
    m.facts["sequences per optimizer step"] = size
    if filled and size > total:
        m.differs(f"ROLL copies sequences until {total} are the {size} of an optimizer step; here it has each once")
        size = total
    if not size or total % size or prompts % max(total // size, 1):
        m.lacks(
            ACCUMULATION,
            f"{m.integer(PER_DEVICE)} x {m.integer(ACCUMULATION)} x {dp} ranks are {size} sequences per update, "
            f"of {total}: they must be so many whole mini-batches of whole groups",
            refuse=True,
        )
        return
    m.set("algorithm.num_minibatches", total // size, *keys, *MEGATRON[:3], ULYSSES)
    m.facts["optimizer steps per step"] = total // size * epochs
    if total > size:
        m.differs("ROLL draws mini-batches of single completions, here they are of prompts with all their completions")


def lengths(m: Migration):
    prompt = m.integer("prompt_length")
    longest = m.integer("sequence_length")
    key = "sequence_length" if longest else "response_length"
    completion = longest - prompt if longest else m.integer(key)
    if not longest and not completion:
        m.needs("neither response_length nor sequence_length is set: rollout.max_new_tokens is jaxrl's default")
        completion = 1024
    if completion < 1:
        m.lacks(key, f"{longest or completion} tokens leave no completion to prompts of {prompt}", refuse=True)
        completion = 1
    if longest and m.given("response_length"):
        m.mark("response_length", "inert", "sequence_length is set, and wins")
    m.set("data.max_prompt_tokens", prompt, "prompt_length")
    m.set("rollout.max_new_tokens", completion, key, "prompt_length")
    m.set("data.overlong_prompt", "filter", "prompt_length")
    for key in (INFER + SAMPLE + "max_new_tokens", VALID + SAMPLE + "max_new_tokens"):
        m.mark(key, "inert", "ROLL overwrites it by the lengths of the sequence and the prompt")
    asked, whole = m.integer("val_prompt_length"), m.integer("val_sequence_length")
    if asked and whole and whole <= asked:
        m.lacks("val_sequence_length", f"{whole} tokens leave no completion to prompts of {asked}", refuse=True)
    elif asked and whole and whole - asked != completion:
        m.set("eval.max_new_tokens", whole - asked, "val_sequence_length", "val_prompt_length")


def data(m: Migration):
    common.data_files(m, m.list(TRAIN + DATA + "file_name"), TRAIN + DATA + "file_name")
    prompt, messages = m.text(TRAIN + DATA + "prompt"), m.text(TRAIN + DATA + "messages")
    if prompt and messages:
        m.lacks(TRAIN + DATA + "messages", "data_args.prompt and messages are not set together", refuse=True)
        return
    column = prompt or messages or "messages"
    m.set("data.prompt_column", column, TRAIN + DATA + ("prompt" if prompt else "messages"))
    if prompt:
        m.set("data.chat", "false", TRAIN + DATA + "prompt")
        m.differs(
            "data_args.prompt names text that ROLL tokenises as it is, without a chat template; so does data.chat=false"
        )
    names = {m.text(k) for k in ("global_template", TRAIN + DATA + "template")} - {"", "native"}
    if names and not prompt:
        m.differs(
            f"prompts are rendered by the tokenizer's own chat template; ROLL's ({', '.join(sorted(names))}) may "
            "add another system message: compare log.print_samples, or name a file in model.chat_template"
        )


OLD_NORM = ("reward_norm", "reward_shift", "reward_scale")


def advantage(m: Migration):
    """Sets algorithm.advantage, reward norms and what `normalised` sets, for gae, grpo, reinforce; refuses other
    estimators and norms. Notes group norms of groups of one, left out, and norms that ROLL takes within a domain."""
    name, group = m.text("adv_estimator"), m.integer("num_return_sequences_in_group")
    if name not in ("gae", "grpo", "reinforce"):
        m.lacks(
            "adv_estimator",
            f"{name!r} is of the agentic pipeline, or not known; there are gae, grpo and reinforce",
            refuse=True,
        )
        return
    mean, std = _norms(m, name)
    if group < 2 and "group" in (mean, std):
        mean = std = "none"  # a group of one: its deviation is not defined there
        m.differs("a group of one completion has no mean and deviation: advantages are not normalised")
    keys = {option: (f"norm_{option}_type", *OLD_NORM) for option in ("mean", "std")}
    normalised(m, name, {"mean": mean, "std": std}, keys, group)
    domains = {s.key.split(".")[1] for s in m.all("rewards.*.tag_included") + m.all("rewards.*.worker_cls")}
    if len(domains) > 1 and (m.flag("whiten_advantages") or "batch" in (mean, std)):
        m.differs("ROLL whitens and normalises within each domain of `rewards`, here it is over the whole batch")


def normalised(m: Migration, name: str, norms: dict[str, str], keys: dict[str, tuple[str, ...]], group: int):
    """Sets the advantage (gae; returns with a KL in the reward or gamma not 1, else outcome), its gamma and lam, the
    norms, bounds and gae's critic. norms: {mean, std: none, group or batch}, in gae of rewards; keys: the source's of
    each. group: completions of a prompt."""
    kind = "gae" if name == "gae" else "returns" if kl_in_reward(m) or m.number("gamma") != 1 else "outcome"
    m.set("algorithm.advantage", kind, "adv_estimator", "add_token_level_kl", "gamma")
    for option, value in norms.items():
        if name == "gae":
            m.set(f"algorithm.advantage_{option}", "none", "adv_estimator")
            m.set(f"reward.norm_{option}", value, *keys[option])
        else:
            m.set(f"algorithm.advantage_{option}", value, "adv_estimator", *keys[option])
    if kind != "outcome":
        m.set("algorithm.gamma", m.number("gamma"), "gamma")
    bounded(m, norms, group)
    if kind == "gae":
        m.set("algorithm.lam", m.number("lambd"), "lambd")
        _critic(m)
    m.facts["advantage"] = f"{name}, mean {norms['mean']}, deviation {norms['std']}" + (
        ", whitened" if m.flag("whiten_advantages") else ""
    )


def bounded(m: Migration, norms: dict[str, str], group: int):
    """Sets algorithm.whiten, advantage_low, _high and reward.clip (inert or reported beside norms; see normalised)."""
    m.set("algorithm.whiten", m.flag("whiten_advantages"), "whiten_advantages")
    clip = m.number("advantage_clip")
    if clip:
        m.set("algorithm.advantage_low", -float(clip), "advantage_clip")
        m.set("algorithm.advantage_high", float(clip), "advantage_clip")
    _reward_clip(m, norms["mean"], norms["std"], group)


def _norms(m: Migration, name: str) -> tuple[str, str]:
    """(mean, deviation) that rewards are brought to: none, group or batch. 0.1.0 has keys of its own for it."""
    new, first = ("norm_mean_type", "norm_std_type"), m.version == "0.1.0"
    for key in new if first else OLD_NORM:
        m.mark(key, "inert", f"ROLL {m.version} does not read it")
    if first:
        at = ("reward_norm", "reward_norm")
        mean = "group" if name == "grpo" else m.text("reward_norm")
        std = "" if m.flag("reward_shift") else mean
        if mean != "running":
            m.mark("reward_scale", "inert", "read with reward_norm=running alone")
    elif name == "grpo":
        for key in new:
            m.mark(key, "inert", "adv_estimator=grpo takes the group's mean and deviation")
        return "group", "group"
    else:
        at, mean, std = new, m.text(new[0]), m.text(new[1])
    for key, value in zip(at, (mean, std), strict=True):
        if value not in ("", "batch", "group"):
            m.lacks(
                key, f"{value!r}: rewards are normalised by group or batch here, not by running statistics", refuse=True
            )
    if std == "group" and mean != "group":
        m.lacks("norm_std_type", "the group's deviation without its mean", refuse=True)
    return (mean if mean in ("batch", "group") else "none"), (std if std in ("batch", "group") else "none")


def _reward_clip(m: Migration, mean: str, std: str, group: int):
    clip = m.number("reward_clip")
    if not clip:
        return
    if mean == std == "none":
        m.set("reward.clip", float(clip), "reward_clip")
    elif mean == std == "group" and clip >= (group - 1) / math.sqrt(group):
        m.mark(
            "reward_clip",
            "inert",
            f"{group} normalised rewards of a group are at most {(group - 1) / math.sqrt(group):.3g}",
        )
    else:
        m.lacks("reward_clip", "ROLL clips rewards after they are normalised, here (reward.clip) it is before")


def _critic(m: Migration):
    own = CRITIC + ARGS
    path = m.text(CRITIC + "model_args.model_name_or_path") or m.text("reward_pretrain")
    if path and path != m.text("pretrain"):
        key = (
            CRITIC + "model_args.model_name_or_path"
            if m[CRITIC + "model_args.model_name_or_path"]
            else "reward_pretrain"
        )
        m.set("critic.path", path, key)
    m.set("critic.lr", m.number(own + "learning_rate"), own + "learning_rate")
    m.set("critic.value_clip", float(m.number("value_clip") or 0), "value_clip")
    m.set("critic.warmup_steps", m.integer("critic_warmup"), "critic_warmup")
    if m.number(own + "weight_decay") != m.number(TRAIN + ARGS + "weight_decay"):
        m.set("critic.optimizer.weight_decay", float(m.number(own + "weight_decay")), own + "weight_decay")
    count = len(devices(m, CRITIC)) or len(devices(m, TRAIN)) or m.gpus
    each = m.integer(own + "per_device_train_batch_size") * m.integer(own + "gradient_accumulation_steps")
    split = [CRITIC + name.removeprefix(TRAIN) for name in (*MEGATRON[:3], ULYSSES)]
    shards = math.prod(m.integer(name) or 1 for name in split)
    total = m.facts["sequences per step"]
    size = each * max(count // shards, 1)
    keys = (own + "per_device_train_batch_size", own + "gradient_accumulation_steps", CRITIC + "device_mapping", *split)
    if count and not total % size and not m.integer("rollout_batch_size") % (total // size):
        if total // size != m.options.get("algorithm.num_minibatches", (0, ()))[0]:
            m.set("critic.num_minibatches", total // size, *keys)
    elif count:
        m.lacks(keys[1], f"{size} sequences per optimizer step of the critic do not divide {total} into whole groups")


AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}


def loss(m: Migration, ratio_key: str = "importance_sampling"):
    """Sets algorithm.policy_loss by ActorPGWorker's pg_variant (else ppo), bounds, ratio (by ratio_key), entropy_coef,
    and aggregation by loss_agg_mode. Refuses another variant; reports other modes, ratios and topr's weights."""
    kind = m.choice("loss_agg_mode", AGGREGATIONS)
    versions, dynamic = m.table.versions, TRAIN + "use_dynamic_batching_in_train"
    if kind == "token_mean" and versions.index(m.version) < versions.index("0.2.0"):
        size = 0 if m.flag(dynamic) else m.integer(PER_DEVICE)
        common.token_mean(m, size, "loss_agg_mode", PER_DEVICE if size else dynamic)
    elif kind:
        m.set("algorithm.aggregation", kind, "loss_agg_mode")
    if kind == "constant":
        total = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0] - 1
        m.set("algorithm.aggregation_constant", divisor(m, total), "loss_agg_mode", *LENGTHS)
        m.facts["Dr.GRPO's constant"] = m.options["algorithm.aggregation_constant"][0]
    ratio = m.choice(ratio_key, {"token": "token", "seq": "sequence"})
    clip, wide = m.number("pg_clip"), m.flag("use_pg_clip_range")
    low = m.number("pg_clip_low") if wide else clip
    high = m.number("pg_clip_high") if wide else clip
    if not wide:
        for key in ("pg_clip_low", "pg_clip_high"):
            m.mark(key, "inert", "read with use_pg_clip_range alone")
    own = "ActorPGWorker" in m.text(WORKER) or "actor_pg_worker" in m.text(WORKER)
    variant = m.text(TRAIN + "pg_variant") if own else "ppo"
    variant = variant or "vanilla"
    if variant == "ppo":
        m.set("algorithm.policy_loss", "clip", WORKER, TRAIN + "pg_variant")
        m.set("algorithm.ratio", ratio or "token", ratio_key)
        m.set("algorithm.clip_low", low, "use_pg_clip_range", "pg_clip_low" if wide else "pg_clip")
        m.set("algorithm.clip_high", high, "use_pg_clip_range", "pg_clip_high" if wide else "pg_clip")
        dual = round(1 + 2 * clip, 12) if m.flag("dual_clip_loss") else 0.0
        m.set("algorithm.dual_clip", dual, "dual_clip_loss", "pg_clip")
        m.facts["clip"] = f"{1 - low:g} to {1 + high:g}" + (f", dual {dual:g}" if dual else "")
    elif variant in ("cispo", "tis"):
        edges = (0.9, 1.1) if variant == "cispo" else (0.0, 1.0)
        m.set("algorithm.policy_loss", "cispo", TRAIN + "pg_variant", WORKER)
        m.set("algorithm.ratio", "token", TRAIN + "pg_variant")
        m.set("algorithm.cispo_min_ratio", edges[0], TRAIN + "pg_variant")
        m.set("algorithm.cispo_max_ratio", edges[1], TRAIN + "pg_variant")
        m.facts["clip"] = f"weights of {edges[0]} to {edges[1]}"
    elif variant == "topr":
        m.set("algorithm.policy_loss", "topr", TRAIN + "pg_variant", WORKER)
        m.set("algorithm.ratio", "token", TRAIN + "pg_variant")
        weights = [TRAIN + n for n in ("topr_positive_weight", "topr_negative_weight")]
        if any(m.number(w) != 1 for w in weights):
            m.lacks(weights[0], "both kinds of examples have weight 1")
        m.differs("what is a positive example says its advantage; in ROLL its reward, above 0")
    elif variant == "vanilla":
        m.set("algorithm.policy_loss", "pg", TRAIN + "pg_variant", WORKER)
        m.set("algorithm.ratio", "token", TRAIN + "pg_variant")
    else:
        m.lacks(TRAIN + "pg_variant", f"{variant!r} is none of ppo, vanilla, tis, topr, cispo", refuse=True)
    m.set("algorithm.entropy_coef", m.number("entropy_loss_coef"), "entropy_loss_coef")


def divisor(m: Migration, tokens: int) -> float:
    """Returns what a completion's sum is divided by so that the loss is ROLL's: its seq-mean-token-sum-norm divides the
    sum over all completions by `tokens` alone, not by their number. Before 0.2.0 that is the loss of a micro-batch, of
    which the mean is taken; since then it is the sum over those of an optimizer step."""
    versions, batch = m.table.versions, m.facts.get("sequences per step", 1)
    if versions.index(m.version) < versions.index("0.2.0"):
        return tokens / max(m.integer(PER_DEVICE), 1)
    return tokens / max(batch // m.options.get("algorithm.num_minibatches", (1,))[0], 1)


def kl_in_reward(m: Migration) -> bool:
    """Returns whether a KL is subtracted from every token's reward: add_token_level_kl; in the agentic pipeline of
    0.1.0 and 0.1.1 whenever init_kl_coef is not 0."""
    always = m.table.job == "agentic" and m.version in ("0.1.0", "0.1.1")
    return bool(m.number("init_kl_coef")) if always else m.flag("add_token_level_kl")


def kl(m: Migration):
    """Sets algorithm.kl.*: low_var in the loss by use_kl_loss and kl_loss_coef (0 unless set), or kl_penalty in the
    reward; both are refused. Reports a target_kl of the latter, and an rl_loss_coef but 1 (0 is refused)."""
    if (scale := m.number("rl_loss_coef")) != 1:
        m.lacks("rl_loss_coef", "the policy loss has no factor of its own: scale optimizer.lr", refuse=not scale)
    in_loss, in_reward = m.flag("use_kl_loss"), kl_in_reward(m)
    coef, reward = (m.number("kl_loss_coef") if in_loss else 0.0), (m.number("init_kl_coef") if in_reward else 0.0)
    if coef and reward:
        m.lacks("add_token_level_kl", "the KL is in the loss or in the reward, not in both", refuse=True)
        return
    if reward:
        estimator = m.choice("kl_penalty", {"kl": "k1", "abs": "abs", "mse": "k2"})
        common.kl(m, reward, estimator or "k1", "reward", "add_token_level_kl", "init_kl_coef", "kl_penalty")
        if m["target_kl"] is not None:
            m.lacks("target_kl", "the coefficient of the KL is fixed here")
        return
    common.kl(m, float(coef), "low_var", "loss", "use_kl_loss", "kl_loss_coef", "add_token_level_kl")


def masks(m: Migration):
    """Sets algorithm.mask_truncated, dynamic_sampling and keep_group (a file) from query_filter_config, else
    difficulty_mask. Refuses other filters than mean_filter and std_filter; reports those that differ by domain."""
    m.set("algorithm.mask_truncated", m.flag("max_len_mask"), "max_len_mask")
    if m.flag("max_len_mask"):
        m.differs("completions that are cut add no loss, but stay in the denominators; ROLL takes them out there, too")
    means = [s for s in m.all("rewards.*.query_filter_config.type") if s.value not in (None, "no_filter")]
    if means:
        _filters(m, means)
        if m.flag("difficulty_mask"):
            m.lacks("difficulty_mask", "groups are filtered by query_filter_config; both at once there are not")
    elif m.flag("difficulty_mask"):
        low, high = m.number("difficulty_low_threshold"), m.number("difficulty_high_threshold")
        _keep(m, "mask", low, high, "difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold")
    else:
        m.set("algorithm.dynamic_sampling", "off", "difficulty_mask")


KEEP = '''"""Which groups of completions teach: those whose mean score is between {low:g} and {high:g}."""


def keep(group):
    scores = group["scores"]
    return bool({low!r} < scores.mean() < {high!r})
'''


def _keep(m: Migration, how: str, low: float, high: float, *keys: str):
    m.set("algorithm.dynamic_sampling", how, *keys)
    m.files[f"{m.name}_keep.py"] = KEEP.format(low=float(low), high=float(high))
    m.set("algorithm.keep_group", f"./{m.name}_keep.py:keep", *keys)


def _filters(m: Migration, means):
    """query_filter_config of the domains, which must agree."""
    found = {}
    for s in means:
        args = {
            x.key.rsplit(".", 1)[1]: x.value
            for x in m.all("rewards.*.query_filter_config.filter_args.*")
            if x.key.startswith(s.key[: -len("type")])
        }
        found[s.key] = (s.value, tuple(sorted(args.items())))
    keys, (kind, args) = list(found), next(iter(found.values()))
    if len(set(found.values())) > 1:
        m.lacks(keys[-1], "domains with filters of their own; the first one's is taken for all")
    without = {s.key.split(".")[1] for s in m.all("rewards.*.worker_cls")} - {key.split(".")[1] for key in keys}
    if without:
        m.lacks(keys[0], f"there, of its domain alone; here it chooses groups of {', '.join(sorted(without))}, too")
    args = dict(args)
    m.set("algorithm.dynamic_sampling_rounds", 1000, *keys)
    if kind == "mean_filter":
        _keep(
            m,
            "refill",
            args.get("threshold_down", -1),
            args.get("threshold_up", 1e30),
            *keys,
            "rewards.*.query_filter_config.filter_args.*",
        )
    elif kind == "std_filter":
        if args.get("std_threshold", -1) not in (0, 0.0):
            m.lacks(keys[0], "groups are kept where their scores differ at all (std_threshold 0)")
        m.set("algorithm.dynamic_sampling", "refill", *keys, "rewards.*.query_filter_config.filter_args.*")
    else:
        m.lacks(keys[0], f"{kind!r} is none of mean_filter and std_filter", refuse=True)


def mismatch(m: Migration):
    """Sets algorithm.old_logprobs (recompute or auto), and mismatch.correction and cap from is_weight. Reports filters,
    weights without upper_bound, and force_disable_old_logprobs_recompute beside several updates."""
    c = "train_infer_correction.is_weight."
    if m.flag(c + "enabled"):
        kind = m.choice(
            c + "weight_type", {"token": "token_tis", "sequence": "sequence_tis", "geometric": "geometric_tis"}
        )
        m.set("algorithm.mismatch.correction", kind or "none", c + "enabled", c + "weight_type")
        if kind and m.number(c + "upper_bound"):
            m.set("algorithm.mismatch.cap", float(m.number(c + "upper_bound")), c + "upper_bound")
        elif kind:
            m.lacks(c + "upper_bound", "weights have a largest value here")
    else:
        m.set("algorithm.mismatch.correction", "none", c + "enabled")
    rules = [f for f in m.list("train_infer_correction.filters") if isinstance(f, dict) and f.get("enabled")]
    if rules:
        m.lacks(
            "train_infer_correction.filters",
            "what is left out is also weighed here (algorithm.mismatch.correction=..._mis)",
        )
    force = "force_disable_old_logprobs_recompute"
    again = m.flag("enable_old_logprobs_recompute") and not m.flag(force)
    if m.flag(force) and common.updates(m) > 1:
        m.lacks(force, "a mini-batch's old log-probs are those of its first pass there, here those before the step")
    m.set("algorithm.old_logprobs", "recompute" if again else "auto", "enable_old_logprobs_recompute")


def sampling(m: Migration):
    drawn_by(m, INFER + SAMPLE)


def drawn_by(m: Migration, at: str):
    """Sets rollout.temperature, top_p, top_k, repetition_penalty and stop from a role's generating_args (prefix `at`),
    and the trainer's temperature 1 as common.temperatures; refuses greedy sampling."""
    values = drawn(m, at)
    for option, (value, *keys) in values.items():
        m.set(f"rollout.{option}", value, *keys)
    if not m.flag(at + "do_sample"):
        m.lacks(
            at + "do_sample",
            "greedy completions of a group are all equal: nothing can be learnt",
            refuse=True,
        )
    stop = m.list(at + "stop_strings")
    if stop:
        m.set("rollout.stop", tuple(str(s) for s in stop), at + "stop_strings")
    m.facts["sampling"] = ", ".join(f"{o} {v[0]}" for o, v in values.items() if o != "repetition_penalty")
    if heat := values["temperature"][0]:  # logits of the update are not divided by it
        common.temperatures(m, 1.0, heat, at + "temperature")


def drawn(m: Migration, at: str) -> dict:
    """Returns {option: (value, *keys)} of a role's generating_args (prefix `at`): temperature (0: greedy), top_p, top_k
    (-1: all) and repetition_penalty. Refuses num_beams above 1."""
    greedy = not m.flag(at + "do_sample")
    top_k = m.integer(at + "top_k")
    if (m.integer(at + "num_beams") or 1) > 1:
        m.lacks(at + "num_beams", "completions are sampled, not searched for", refuse=True)
    return {
        "temperature": (0.0 if greedy else m.number(at + "temperature"), at + "temperature", at + "do_sample"),
        "top_p": (m.number(at + "top_p"), at + "top_p"),
        "top_k": (top_k if top_k and top_k > 0 else -1, at + "top_k"),
        "repetition_penalty": (m.number(at + "repetition_penalty"), at + "repetition_penalty"),
    }


def evaluation(m: Migration):
    files = VALID + DATA + "file_name"
    common.eval_sets(m, m.list(files), files)
    interval = m.integer("eval_steps") if m.list(files) else 0
    common.triggers(m, "eval.every_steps", interval, "eval_steps", files)
    m.set("eval.before", interval > 0, "eval_steps", files)
    m.set("eval.after", False, "eval_steps", files)
    if not interval:
        m.facts["evaluation"] = "none"
        return
    for option, (value, *keys) in drawn(m, VALID + SAMPLE).items():
        m.set(f"eval.{option}", value, *keys)
    count = VALID + SAMPLE + "num_return_sequences"
    m.set("eval.samples", m.integer(count), count)
    m.facts["evaluation"] = (
        f"every {interval} steps and before, temperature {m.options['eval.temperature'][0]}, {m[count]} completions"
    )


def optimizer(m: Migration):
    a = TRAIN + ARGS
    m.set("optimizer.lr", m.number(a + "learning_rate"), a + "learning_rate")
    m.set("optimizer.b1", m.number(a + "adam_beta1"), a + "adam_beta1")
    m.set("optimizer.b2", m.number(a + "adam_beta2"), a + "adam_beta2")
    warm, share = m.integer(a + "warmup_steps"), m.number(a + "warmup_ratio")
    keys = (a + "warmup_steps",) if warm else (a + "warmup_steps", a + "warmup_ratio")
    common.schedule(
        m,
        a + "lr_scheduler_type",
        m.text(a + "lr_scheduler_type"),
        warm,
        None if warm else share,
        a + "lr_scheduler_type",
        *keys,
    )


def critics_optimizer(m: Migration):
    a = CRITIC + ARGS
    if m.options.get("algorithm.advantage", ("",))[0] != "gae":
        return
    warm, share, shape = m.integer(a + "warmup_steps"), m.number(a + "warmup_ratio"), a + "lr_scheduler_type"
    own: dict[str, tuple] = {
        n: (float(m.number(a + key)), (a + key,)) for n, key in (("b1", "adam_beta1"), ("b2", "adam_beta2"))
    }
    own["schedule"] = (m.choice(shape, common.SCHEDULES) or "constant", (shape,))
    own["warmup_steps"] = (warm or 0, (a + "warmup_steps",))
    own["warmup_fraction"] = (0.0 if warm else float(share or 0), (a + "warmup_ratio",))
    common.critics_optimizer(m, own)


def model(m: Migration):
    path = m.text(TRAIN + "model_args.model_name_or_path") or m.text("pretrain")
    if path:
        key = TRAIN + "model_args.model_name_or_path" if m[TRAIN + "model_args.model_name_or_path"] else "pretrain"
        m.set("model.path", path, key)
    else:
        m.needs("pretrain is not set: name the model in model.path")


def adapters(m: Migration):
    a = TRAIN + "model_args."
    target = m[a + "lora_target"]
    if target:
        names = [t.strip() for t in target.split(",")] if isinstance(target, str) else list(target)
        names = ["all-linear" if n in ("all", "all-linear") else n for n in names]
        rank = m.integer(a + "lora_rank")
        keys = (a + "lora_target", a + "lora_rank", a + "lora_alpha", a + "lora_dropout")
        common.lora(
            m,
            rank,
            float(m.number(a + "lora_alpha") or 2 * rank),
            names,
            None,
            "",
            m.number(a + "lora_dropout") or 0.0,
            keys,
        )
        more = m.text(a + "additional_target")
        if more:
            m.set("lora.modules_to_save", tuple(t.strip() for t in more.split(",")), a + "additional_target")
    if m.text(a + "adapter_name_or_path"):
        m.set("lora.path", m.text(a + "adapter_name_or_path"), a + "adapter_name_or_path")


def places(m: Migration):
    folder = "output_dir" if not m.given("checkpoint_config.output_dir") else "checkpoint_config.output_dir"
    if m.given(folder):
        m.set("run.dir", m.text(folder).rstrip("/"), folder)
    if folder != "output_dir":
        m.mark("output_dir", "automatic", "run.dir is checkpoint_config.output_dir, where ROLL keeps checkpoints")
    common.checkpoints(m, "save_steps", "max_ckpt_to_keep")
    resume = m["resume_from_checkpoint"]
    if resume and isinstance(resume, str):
        m.needs(
            f"resume_from_checkpoint={resume}: ROLL's checkpoints are not read; export it as a Hugging Face folder and "
            "name that in model.path"
        )
        m.set("run.resume", "never", "resume_from_checkpoint")
    else:
        m.set("run.resume", "auto" if m.flag("resume_from_checkpoint") else "never", "resume_from_checkpoint")


def loggers(m: Migration):
    names = {"stdout": "console"}.get(m.text("track_with"), m.text("track_with"))
    common.loggers(
        m,
        "track_with",
        [names],
        m.text("tracker_kwargs.project"),
        m.text("exp_name"),
        "tracker_kwargs.project",
        "exp_name",
    )
    folder = [s.key for s in m.all("tracker_kwargs.**")]
    for key in folder:
        m.mark(key, "automatic", "metrics are below run.dir; WANDB_API_KEY holds the key")
