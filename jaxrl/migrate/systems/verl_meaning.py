"""What keys of verl mean together: the joint rules of its table. See systems/verl.py."""

from __future__ import annotations

import re

from jaxrl.migrate import common
from jaxrl.migrate.systems import verl_gpg
from jaxrl.migrate.systems.verl_engine import ACTOR, MODEL, ROLLOUT, TRAINER, rank, since
from jaxrl.migrate.table import Migration

CRITIC, ALGO, DATA, RM = "critic.", "algorithm.", "data.", "reward_model."
VAL, CORRECTION = ROLLOUT + "val_kwargs.", ALGO + "rollout_correction."


AHEAD = re.compile(r"fully_async\w*|one_step_off\w*")  # programs that sample while they train


def batch(m: Migration):
    """Sets data.prompts_per_step, rollout.group_size, algorithm.ppo_epochs and num_minibatches, critic.num_minibatches
    for gae; nothing for a program that samples ahead and has no batch size. Refuses mini-batches that do not divide the
    prompts. Notes an unset rollout.n (one completion); another number of passes of the critic is not carried over."""
    prompts, mini = m.integer(DATA + "train_batch_size"), m.integer(ACTOR + "ppo_mini_batch_size")
    epochs, group = m.integer(ACTOR + "ppo_epochs"), m.integer(ROLLOUT + "n")
    if not prompts and (m.all("async_training.**") or AHEAD.search(m.command)):
        return  # a batch of another kind; the recipe is refused
    common.batch(m, prompts, group, (DATA + "train_batch_size",), ROLLOUT + "n")
    m.set("algorithm.ppo_epochs", epochs, ACTOR + "ppo_epochs")
    common.minibatches(
        m,
        "algorithm.num_minibatches",
        prompts,
        mini,
        epochs,
        DATA + "train_batch_size",
        ACTOR + "ppo_mini_batch_size",
    )
    own = m.integer(CRITIC + "ppo_mini_batch_size")
    if m.text(ALGO + "adv_estimator") == "gae" and own and own != mini:
        common.minibatches(m, "critic.num_minibatches", prompts, own, epochs, CRITIC + "ppo_mini_batch_size")
    if m.text(ALGO + "adv_estimator") == "gae" and m.integer(CRITIC + "ppo_epochs") not in (None, epochs):
        m.lacks(CRITIC + "ppo_epochs", f"the critic makes as many passes as the policy, {epochs}")
    if not m.given(ROLLOUT + "n"):
        m.differs("rollout.n is not set, which is one completion per prompt in verl: no group to compare with")


ESTIMATORS = {
    "gae": ("gae", "none", False, True),
    "grpo": ("outcome", "group", True, False),
    "grpo_vectorized": ("outcome", "group", True, False),
    "rloo": ("outcome", "leave_one_out", False, False),
    "rloo_vectorized": ("outcome", "leave_one_out", False, False),
    "remax": ("outcome", "greedy", False, False),
    "reinforce_plus_plus": ("returns", "none", False, True),
    "reinforce_plus_plus_baseline": ("outcome", "group", False, True),
}


def advantage(m: Migration):
    """Sets algorithm.advantage, advantage_mean, advantage_std, whiten, gamma and lam from adv_estimator, and critic.*
    for gae. gpg is a function in a file. A group of one has no mean and deviation. Refuses other estimators."""
    name = ALGO + "adv_estimator"
    if m.text(name) == "gpg" and since(m, "0.5"):
        verl_gpg.advantage(m, name, ALGO + "norm_adv_by_std_in_grpo")
        return
    if m.text(name) not in ESTIMATORS:
        m.lacks(
            name,
            f"{m.text(name)!r} is none of {', '.join(ESTIMATORS)}, gpg; a function of your own is "
            "algorithm.advantage (docs/guides/extend.md)",
            refuse=True,
        )
        return
    kind, mean, std, whiten = ESTIMATORS[m.text(name)]
    std = "group" if std and m.flag(ALGO + "norm_adv_by_std_in_grpo") else "none"
    if m.integer(ROLLOUT + "n") == 1 and mean in ("group", "leave_one_out"):
        mean = std = "none"  # of a group of one verl takes the mean for 0 and the deviation for 1
    to_go = mean == "greedy" and m.flag(ALGO + "use_kl_in_reward")  # ReMax counts the KL of a token and those behind it
    kind = "returns" if to_go else kind
    m.set("algorithm.advantage", kind, name, *((ALGO + "use_kl_in_reward",) if to_go else ()))
    m.set("algorithm.advantage_mean", mean, name, ROLLOUT + "n")
    m.set("algorithm.advantage_std", std, name, ALGO + "norm_adv_by_std_in_grpo")
    m.set("algorithm.whiten", whiten, name)
    m.facts["advantage"] = m.text(name)
    if to_go:
        m.set("algorithm.gamma", 1.0, name)
    elif kind in ("returns", "gae"):
        m.set("algorithm.gamma", m.number(ALGO + "gamma"), ALGO + "gamma")
    if kind == "gae":
        m.set("algorithm.lam", m.number(ALGO + "lam"), ALGO + "lam")
        _critic(m)


def _critic(m: Migration):
    path, own = CRITIC + "model.path", CRITIC + "optim."
    if m.given(path) and m[path] != m[MODEL + "path"]:
        m.set("critic.path", m.text(path), path)
    m.set("critic.lr", m.number(own + "lr"), own + "lr")
    m.set("critic.value_clip", m.number(CRITIC + "cliprange_value"), CRITIC + "cliprange_value")
    first = m.integer(TRAINER + "critic_warmup") or 0  # the first step, counted from 1, in which the policy learns
    m.set("critic.warmup_steps", max(first - 1, 0), TRAINER + "critic_warmup")
    if m.number(own + "weight_decay") != m.number(ACTOR + "optim.weight_decay"):
        m.set("critic.optimizer.weight_decay", float(m.number(own + "weight_decay")), own + "weight_decay")


LOSSES = {  # loss_mode -> (loss, ratio, aggregation that it has whatever loss_agg_mode says)
    "vanilla": ("clip", "token", ""),
    "gspo": ("clip", "sequence_token", "sequence_mean"),
    "geo_mean": ("clip", "geometric", "sequence_mean"),
    "cispo": ("cispo", "token", ""),
    "sapo": ("sapo", "token", "sequence_mean"),
    "gpg": ("pg", "token", ""),
    "clip_cov": ("clip", "token", ""),
    "dppo_tv": ("dppo", "token", ""),
}


def loss(m: Migration):
    """Sets algorithm.policy_loss, ratio, dual_clip, the loss's bounds, and its aggregation: the loss's own, else that
    of loss_agg_mode. clip_ratio counts for a bound that is null. Refuses a loss_mode that is not in LOSSES."""
    name, low, high = ACTOR + "policy_loss.loss_mode", ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"
    mode = m.text(name)
    if mode not in LOSSES or mode == "dppo_tv" and not since(m, "0.8"):
        m.lacks(
            name,
            f"{mode!r} is none of {', '.join(LOSSES)}; a loss of your own is a function (docs/guides/extend.md)",
            refuse=True,
        )
        return
    kind, ratio, aggregation = LOSSES[mode]
    bounds = []
    for key in (low, high):  # clip_ratio counts only where they are null
        bound, used = m.number(key), key
        if bound is None:
            bound, used = m.number(ACTOR + "clip_ratio"), ACTOR + "clip_ratio"
        bounds.append((bound, used))
    if all(used != ACTOR + "clip_ratio" for _, used in bounds):
        m.mark(ACTOR + "clip_ratio", "inert", "clip_ratio_low and clip_ratio_high are not null, and win")
    m.set("algorithm.policy_loss", kind, name)
    m.set("algorithm.ratio", ratio, name)
    dual = m.number(ACTOR + "clip_ratio_c") if mode == "vanilla" and m.version != "0.3" else 0.0
    m.set("algorithm.dual_clip", dual, ACTOR + "clip_ratio_c", name)
    (a, low), (b, high) = bounds
    if kind == "cispo":
        m.set("algorithm.cispo_min_ratio", max(1 - a, 0.0), low)
        m.set("algorithm.cispo_max_ratio", 1 + b, high)
    elif kind == "sapo":
        m.set("algorithm.sapo_tau_pos", m.number(ACTOR + "tau_pos"), ACTOR + "tau_pos")
        m.set("algorithm.sapo_tau_neg", m.number(ACTOR + "tau_neg"), ACTOR + "tau_neg")
    elif kind == "dppo":
        m.set("algorithm.dppo_low", a, low)
        m.set("algorithm.dppo_high", b, high)
        m.facts["DPPO"] = f"-{a:g} to {b:g}"
        if m.number(ACTOR + "clip_ratio_c") < 20:
            m.lacks(ACTOR + "clip_ratio_c", "DPPO's weight is a ratio of at most 20 here, whatever it is there")
        elif m.number(ACTOR + "clip_ratio_c") > 20:
            m.differs("DPPO's weight is a ratio of at most 20 here; there clip_ratio_c is its bound")
    elif kind == "clip":
        if mode == "clip_cov":
            share, lowest, highest = (ACTOR + "policy_loss.clip_cov_" + n for n in ("ratio", "lb", "ub"))
            common.clip_cov(m, share, lowest, highest, name)
        m.set("algorithm.clip_low", a, low)
        m.set("algorithm.clip_high", b, high)
        m.facts["clip"] = f"{1 - a:g} to {1 + b:g}" + (f", dual {dual:g}" if dual else "")
    _aggregation(m, aggregation)


AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}


def _aggregation(m: Migration, fixed: str):
    name, its = ACTOR + "loss_agg_mode", CRITIC + "loss_agg_mode"
    if m.text(ALGO + "adv_estimator") == "gae":
        if m.text(its) not in ("", "token-mean"):
            m.lacks(its, "the value loss is a mean over tokens")
        elif not m.text(its) and m.text(name) != "token-mean":
            m.differs(f"the value loss is a mean over tokens; there it is averaged as the policy's, {m.text(name)}")
    if fixed:
        m.set("algorithm.aggregation", fixed, ACTOR + "policy_loss.loss_mode")
        m.mark(name, "inert", "this loss has an aggregation of its own")
        return
    if m.text(name) == "token-sum" and since(m, "0.9"):
        sequences = (m.integer(ACTOR + "ppo_mini_batch_size") or 1) * m.integer(ROLLOUT + "n")
        m.set("algorithm.aggregation", "constant", name)
        keys = (name, ACTOR + "ppo_mini_batch_size", ROLLOUT + "n")
        m.set("algorithm.aggregation_constant", 1 / sequences, *keys)
        return
    kind = m.choice(name, AGGREGATIONS)
    if kind is None:
        return
    if kind == "token_mean" and since(m, "0.8"):
        m.set("algorithm.aggregation", kind, name)
    elif kind == "token_mean":
        dynamic, micro = ACTOR + "use_dynamic_bsz", ACTOR + "ppo_micro_batch_size_per_gpu"
        size, engine = 0 if m.flag(dynamic) else m.integer(micro) or 0, "trainer.use_legacy_worker_impl"
        if m.text(engine) == "disable":  # its newer workers count the tokens of all
            m.set("algorithm.aggregation", kind, name, engine)
        else:
            common.token_mean(m, size, name, engine, *((micro,) if size else ()))
    else:
        m.set("algorithm.aggregation", kind, name)
    if kind == "constant":
        factor = ACTOR + "loss_scale_factor"
        total = m.integer(factor) or m.integer(DATA + "max_response_length")
        keys = (factor,) if m[factor] else (factor, DATA + "max_response_length")
        micro = ACTOR + "ppo_micro_batch_size_per_gpu"
        engines = since(m, "0.8") or m.text("trainer.use_legacy_worker_impl") == "disable"
        size = None if engines or m.flag(ACTOR + "use_dynamic_bsz") else m.integer(micro)
        if size:  # the workers add up a micro-batch's completions
            total, keys = total / size, (*keys, micro)
        m.set("algorithm.aggregation_constant", total, name, *keys)
        m.facts["Dr.GRPO's constant"] = total
        if size:
            return
        if since(m, "0.8"):
            if since(m, "0.9") and not m[factor]:
                m.differs(
                    "without loss_scale_factor verl divides by the longest completion of each micro-batch; here by one "
                    "constant, the longest that may be"
                )
            return
        m.differs(
            "verl's seq-mean-token-sum-norm adds up the completions of a micro-batch, not divided by their number; "
            "here it is their mean, as Dr.GRPO has it: its learning rate may have to be that much larger"
        )


KL = {
    "low_var_kl": "low_var",
    "k3": "low_var",
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "abs": "abs",
    "k3+": "k2",
    "low_var_kl+": "k2",
    "k1+": "k2",
    "kl+": "k2",
}


def kl(m: Migration):
    """Sets algorithm.kl.coef, estimator and placement, and entropy_coef. Refuses a KL in loss and reward at once, k1 in
    the loss, and unknown estimators. An adaptive coefficient is not carried over: it is fixed."""
    in_loss, in_reward = m.flag(ACTOR + "use_kl_loss"), m.flag(ALGO + "use_kl_in_reward")
    coef, key = m.number(ACTOR + "kl_loss_coef"), ACTOR + "kl_loss_coef"
    kind = ACTOR + "kl_loss_type"
    if in_loss and in_reward and coef and m.number(ALGO + "kl_ctrl.kl_coef"):
        m.lacks(ALGO + "use_kl_in_reward", "the KL is in the loss or in the reward, not in both", refuse=True)
        return
    if in_reward and not (in_loss and coef):
        coef, key, kind = m.number(ALGO + "kl_ctrl.kl_coef"), ALGO + "kl_ctrl.kl_coef", ALGO + "kl_penalty"
        if m.text(ALGO + "kl_ctrl.type") == "adaptive":
            m.lacks(ALGO + "kl_ctrl.type", "the coefficient of the KL is fixed here")
    elif not in_loss:
        coef = 0.0
    estimator = m.choice(kind, KL)
    if estimator is None and coef:
        m.lacks(kind, f"{m.text(kind)!r} is none of {', '.join(KL)}", refuse=True)
        return
    placed = "reward" if kind == ALGO + "kl_penalty" else "loss"
    common.kl(m, coef, estimator or "low_var", placed, ACTOR + "use_kl_loss", ALGO + "use_kl_in_reward", key, kind)
    m.set("algorithm.entropy_coef", m.number(ACTOR + "entropy_coeff"), ACTOR + "entropy_coeff")


def mismatch(m: Migration):
    """Sets algorithm.mismatch.correction, low and cap from rollout_is and its threshold, and with bypass_mode
    old_logprobs=rollout instead. Refuses rollout_rs, unknown levels, and a bypass without the clipped loss."""
    level, reject, c = m[CORRECTION + "rollout_is"], m.text(CORRECTION + "rollout_rs"), CORRECTION
    key, given, icepop = c + "rollout_is", m[c + "rollout_is_threshold"], None
    if since(m, "0.8") and isinstance(given, str) and "_" in given:
        low, _, high = given.partition("_")
        icepop, threshold = float(low), float(high)
    else:
        threshold = m.number(c + "rollout_is_threshold")
    if not level and m.number(ACTOR + "tis_imp_ratio_cap") and m.number(ACTOR + "tis_imp_ratio_cap") > 0:
        level, threshold, key = "token", m.number(ACTOR + "tis_imp_ratio_cap"), ACTOR + "tis_imp_ratio_cap"
    if reject:
        m.lacks(
            c + "rollout_rs",
            f"{reject}: completions and tokens that are rejected leave the mean's denominators there; here a mask is a "
            "weight, too (algorithm.mismatch.correction=..._mis), and they stay in them",
            refuse=True,
        )
    if m.flag(c + "bypass_mode"):
        if m.text(c + "loss_type") != "ppo_clip":
            m.lacks(c + "loss_type", "around the sampler's log-probs there is the clipped loss", refuse=True)
        m.set("algorithm.old_logprobs", "rollout", c + "bypass_mode")
        m.set("algorithm.mismatch.correction", "none", c + "bypass_mode", c + "rollout_is")
        return
    if level in ("token", "sequence"):
        m.set("algorithm.mismatch.correction", f"{level}_{'tis' if icepop is None else 'mis'}", key)
        if icepop is not None:
            m.set("algorithm.mismatch.low", icepop, c + "rollout_is_threshold")
        m.set("algorithm.mismatch.cap", threshold, c + "rollout_is_threshold" if key.endswith("rollout_is") else key)
        if m.flag(c + "rollout_is_batch_normalize"):
            m.lacks(c + "rollout_is_batch_normalize", "weights are not brought to a mean of 1")
    elif level:
        m.lacks(c + "rollout_is", f"{level!r} is none of token and sequence", refuse=True)
    else:
        m.set("algorithm.mismatch.correction", "none", c + "rollout_is")


def lengths(m: Migration):
    m.set("data.max_prompt_tokens", m.integer(DATA + "max_prompt_length"), DATA + "max_prompt_length")
    m.set("rollout.max_new_tokens", m.integer(DATA + "max_response_length"), DATA + "max_response_length")
    cut = m.choice(DATA + "truncation", {"error": "error", "left": "truncate_left", "right": None, "middle": None})
    if m.flag(DATA + "filter_overlong_prompts"):
        cut = "filter"
    if cut is None:
        m.lacks(DATA + "truncation", "prompts are cut on the left, left out, or an error; here they are left out")
        cut = "filter"
    m.set("data.overlong_prompt", cut, DATA + "filter_overlong_prompts", DATA + "truncation")


def sampling(m: Migration):
    for name in ("temperature", "top_p", "top_k"):
        value = m.number(ROLLOUT + name)
        m.set(f"rollout.{name}", -1 if name == "top_k" and value == 0 else value, ROLLOUT + name)
    if not m.flag(ROLLOUT + "do_sample"):
        m.lacks(
            ROLLOUT + "do_sample", "greedy completions of a group are all equal: nothing can be learnt", refuse=True
        )
    m.facts["sampling"] = (
        f"temperature {m[ROLLOUT + 'temperature']}, top_p {m[ROLLOUT + 'top_p']}, top_k {m[ROLLOUT + 'top_k']}"
    )


def evaluation(m: Migration):
    interval = 0 if m[TRAINER + "test_freq"] == "after_each_epoch" else m.integer(TRAINER + "test_freq")
    common.triggers(m, "eval.every_steps", interval, TRAINER + "test_freq")
    m.set("eval.before", m.flag(TRAINER + "val_before_train"), TRAINER + "val_before_train")
    m.set("eval.after", interval > 0, TRAINER + "test_freq")
    old = m.table.versions.index(m.version) < m.table.versions.index("0.7")
    greedy = old and not m.flag(VAL + "do_sample")  # later versions look at the temperature alone
    temperature = 0.0 if greedy else m.number(VAL + "temperature")
    keys = (VAL + "temperature", VAL + "do_sample") if old else (VAL + "temperature",)
    m.set("eval.temperature", temperature, *keys)
    m.set("eval.top_p", m.number(VAL + "top_p"), VAL + "top_p")
    m.set("eval.top_k", -1 if m.integer(VAL + "top_k") == 0 else m.integer(VAL + "top_k"), VAL + "top_k")
    samples = m.integer(VAL + "n")
    if samples > 1 and not temperature:
        m.lacks(VAL + "n", "several greedy completions are all the same, and are refused: one is sampled")
        samples = 1
    m.set("eval.samples", samples, VAL + "n")
    rows = m.integer(DATA + "val_max_samples")
    m.set("eval.max_rows", rows if rows and rows > 0 else 0, DATA + "val_max_samples")
    m.facts["evaluation"] = (
        f"every {interval} steps, temperature {temperature:g}, {samples} completions" if interval > 0
        else "none in between"
    )
    if m.flag(TRAINER + "val_only"):
        m.set("run.mode", "eval", TRAINER + "val_only")


def memory(m: Migration):
    longest = m.options["data.max_prompt_tokens"][0] + m.options["rollout.max_new_tokens"][0]
    micro, dynamic = ACTOR + "ppo_micro_batch_size_per_gpu", ACTOR + "use_dynamic_bsz"
    total = ACTOR + "ppo_max_token_len_per_gpu"
    if m.flag(dynamic):
        m.set("train.tokens_per_microbatch", max(m.integer(total), longest), dynamic, total)
    elif m.integer(micro):
        m.set("train.tokens_per_microbatch", m.integer(micro) * longest, micro)
    score = ROLLOUT + "log_prob_micro_batch_size_per_gpu"
    train = m.options.get("train.tokens_per_microbatch", (0, ()))[0]
    scored = ROLLOUT + "log_prob_max_token_len_per_gpu"
    if m.flag(dynamic) and m.integer(scored) and max(m.integer(scored), longest) != train:
        m.set("train.score_tokens_per_microbatch", max(m.integer(scored), longest), scored)
    elif not m.flag(dynamic) and m.integer(score) and m.integer(score) * longest != train:
        m.set("train.score_tokens_per_microbatch", m.integer(score) * longest, score)


FUSED = {  # of Megatron's layers, the parts by their names in the model's files
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def adapters(m: Migration):
    table = rank(m).removesuffix("lora_rank").removesuffix("rank")
    if table.endswith("lora."):
        _megatrons_adapters(m, table)
        return
    keys = tuple(MODEL + n for n in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"))
    common.lora(m, m.integer(keys[0]) or 0, m.number(keys[1]), m[keys[2]], m[keys[3]], "", 0.0, keys)
    if m.text(MODEL + "lora_adapter_path"):
        m.set("lora.path", m.text(MODEL + "lora_adapter_path"), MODEL + "lora_adapter_path")


def _megatrons_adapters(m: Migration, t: str):
    keys = tuple(t + n for n in ("rank", "alpha", "target_modules", "exclude_modules", "dropout"))
    if not m.integer(keys[0]):
        return
    parts = [p for name in m.list(keys[2]) for p in FUSED.get(str(name), (str(name),))]
    left = [p for name in m.list(keys[3]) for p in FUSED.get(str(name), (str(name),))]
    common.lora(m, m.integer(keys[0]), m.number(keys[1]), parts, left, "", m.number(keys[4]) or 0.0, keys)
    kind = m.text(t + "type")
    if kind == "dora":
        m.set("lora.dora", True, t + "type")
    elif kind not in ("lora", "vlm_lora", "canonical_lora"):
        m.lacks(t + "type", f"{kind!r} is none of lora, canonical_lora and dora")
    if kind != "canonical_lora" and any(name in ("linear_qkv", "linear_fc1") for name in m.list(keys[2])):
        m.differs(
            "q, k, v and gate, up have adapters of their own here; Megatron's fused layers share the first matrix"
        )
    if m.text(t + "lora_A_init_method") != "kaiming":
        m.differs(f"adapters begin by lora.init=default, not by {m.text(t + 'lora_A_init_method')}; the second is 0")
    if m.text(t + "adapter_path"):
        m.set("lora.path", m.text(t + "adapter_path"), t + "adapter_path")


def template(m: Migration):
    text = m.text(MODEL + "custom_chat_template")
    if text:
        m.files[f"{m.name}_template.jinja"] = text
        m.set("model.chat_template", f"{m.name}_template.jinja", MODEL + "custom_chat_template")


RULES = '''"""verl's rewards by data_source, for the sources that have a rule here; another one stops the run.

GSM8K: the last "#### number" of the end of a completion, without commas, is the answer's text. MATH: the last box.
AIME and DAPO: the last "Answer: ..." of the end; 1 where it is right, else -1. verl normalises texts of MATH more.
Geometry3K: 0.9 for the box, 0.1 for the form with <think>.
"""

import re

from jaxrl.rewards.builtin import boxed_reward


def plain(text):
    return re.sub(r"\\\\boxed|[\\s,${}\\\\]", "", str(text)).rstrip(".").lower()


def score(prompt, completion, answer, data_source=None, **columns):
    source = str(data_source)
    if source == "openai/gsm8k":
        found = re.findall(r"#### (-?[0-9.,]+)", completion[-300:])
        return float(bool(found) and found[-1].replace(",", "").replace("$", "") == str(answer))
    if source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"):
        return boxed_reward(prompt, completion, answer)
    if source == "hiyouga/geometry3k":
        formatted = bool(re.fullmatch(r"(?s)<think>.*</think>.*\\\\boxed\\{.*\\}.*", completion))
        return 0.9 * boxed_reward(prompt, completion, answer) + 0.1 * formatted
    if source in ("math_dapo", "math", "math_dapo_reasoning") or source.startswith("aime"):
        found = re.findall(r"(?i)answer\\s*:\\s*([^\\n]+)", completion[-300:])
        return 1.0 if found and plain(found[-1]) == plain(answer) else -1.0
    raise RuntimeError(f"data_source {source!r}: write its reward into this file")
'''
OWN = '''"""The reward function of the source, called as verl calls it."""

import importlib.util
import os

PLACE = os.path.expandvars({path!r})
spec = importlib.util.spec_from_file_location("custom_reward_function", PLACE)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def score(prompt, completion, answer=None, data_source=None, extra_info=None, **columns):
    found = getattr(module, {name!r})(data_source=data_source, solution_str=completion, ground_truth=answer,
                                      extra_info=extra_info{more})
    return float(found["score"] if isinstance(found, dict) else found)
'''


OWN_KEYS = tuple(f"custom_reward_function.{name}" for name in ("path", "name", "reward_kwargs.*"))


def reward(m: Migration):
    path, name = m.text("custom_reward_function.path"), m.text("custom_reward_function.name")
    m.set("data.answer_column", "reward_model.ground_truth", "custom_reward_function.path", RM + "enable")
    if m.flag(RM + "enable") and path and m.flag(RM + "use_reward_loop"):
        m.lacks(
            "custom_reward_function.path",
            "a function that asks the reward model over the network: a model that is asked in words is reward.judge "
            "(docs/guides/rewards.md)",
            refuse=True,
        )
    elif m.flag(RM + "enable"):
        if not m.text(RM + "model.path"):
            m.needs("reward.model.path: the reward model is on, and no path is set")
        m.set("reward.model.path", m.text(RM + "model.path"), RM + "model.path", RM + "enable")
        m.set("reward.functions", (), RM + "enable")
        if path:
            m.mark("custom_reward_function.path", "inert", "scores of a reward model win over the function")
        return
    if path:
        more = "".join(
            f", {s.key.rsplit('.', 1)[1]}={s.value!r}" for s in m.all("custom_reward_function.reward_kwargs.*")
        )
        path = "$HOME/" + path[2:] if path.startswith("~/") else path
        file = common.reward_file(m, OWN.format(path=path, name=name, more=more), *OWN_KEYS)
        m.needs(
            f"{file} calls {name} of {path} once per completion, in a process without jax: what it imports must be "
            "installed there"
        )
    else:
        file = common.reward_file(m, RULES, "custom_reward_function.path")
        m.differs(
            f"{file} has verl's rules for GSM8K, MATH (whose texts verl normalises more), AIME and Geometry3K by the "
            "column data_source; a row of another source stops the run until its rule is written there"
        )


def length_penalty(m: Migration):
    k = RM + "reward_kwargs.overlong_buffer_cfg."
    if m.flag(k + "enable") and m.integer(k + "len"):
        m.set("reward.overlong_buffer", m.integer(k + "len"), k + "enable", k + "len")
        m.set("reward.overlong_penalty", m.number(k + "penalty_factor"), k + "penalty_factor")


def filtering(m: Migration):
    f = ALGO + "filter_groups."
    on = m.flag(f + "enable")
    if on and since(m, "0.9") and not m.flag(TRAINER + "use_v1"):
        m.mark(f + "enable", "inert", "the trainer of use_v1=False does not filter")
        on = False
    m.set("algorithm.dynamic_sampling", "refill" if on else "off", f + "enable")
    if on:
        rounds = m.integer(f + "max_num_gen_batches") or 0
        if since(m, "0.9"):
            m.mark(f + "max_num_gen_batches", "inert", "the trainer asks until a batch is full, whatever it says")
            rounds = 0
        m.set("algorithm.dynamic_sampling_rounds", rounds if rounds > 0 else 1000, f + "max_num_gen_batches")
        if m.text(f + "metric") not in ("acc", "score", "seq_reward", ""):
            m.lacks(f + "metric", "groups are judged by their scores (algorithm.keep_group takes a reward's name)")


def places(m: Migration):
    if m.given(TRAINER + "default_local_dir"):
        m.set("run.dir", m.text(TRAINER + "default_local_dir").rstrip("/"), TRAINER + "default_local_dir")
    common.checkpoints(m, TRAINER + "save_freq", TRAINER + "max_actor_ckpt_to_keep")
    mode = m.choice(TRAINER + "resume_mode", {"auto": "auto", "disable": "never", "resume_path": "auto", "": "auto"})
    m.set("run.resume", mode or "auto", TRAINER + "resume_mode")
    if m.text(TRAINER + "resume_mode") == "resume_path":
        m.needs(
            f"trainer.resume_from_path={m[TRAINER + 'resume_from_path']}: verl's checkpoints are not read; merge it to "
            "a Hugging Face folder and name that in model.path"
        )


def engine_options(m: Migration):
    for s in m.all(ROLLOUT + "engine_kwargs.**"):
        parts = s.key.split("engine_kwargs.", 1)[1].split(".")
        if parts[0] != "vllm" or s.value in (None, {}):
            m.mark(s.key, "inert", "of another engine, or empty")
        else:
            common.engine_kwarg(m, s.key, ".".join(parts[1:]), s.value)


def context(m: Migration):
    longest = m.integer(ROLLOUT + "max_model_len")
    if longest:
        common.context(m, longest, "rollout.vllm.max_model_len", ROLLOUT + "max_model_len")


def loggers(m: Migration):
    common.loggers(
        m,
        TRAINER + "logger",
        m.list(TRAINER + "logger"),
        m.text(TRAINER + "project_name"),
        m.text(TRAINER + "experiment_name"),
        TRAINER + "project_name",
        TRAINER + "experiment_name",
    )


def column(m: Migration):
    m.set("data.prompt_column", m.text(DATA + "prompt_key"), DATA + "prompt_key")
    rows = m.integer(DATA + "train_max_samples")
    m.set("data.max_rows", rows if rows and rows > 0 else 0, DATA + "train_max_samples")
    m.set("data.shuffle", m.flag(DATA + "shuffle"), DATA + "shuffle")
    if m[DATA + "seed"] is not None:
        m.set("data.seed", m.integer(DATA + "seed"), DATA + "seed")


def later(m: Migration):
    """Refuses programs that sample while they train (AHEAD) and, from 0.9 on with trainer.use_v1, a
    trainer.v1.trainer_mode other than sync."""
    if other := AHEAD.search(m.command):
        m.lacks(MODEL + "path", f"{other[0]} samples while it trains: rollout.max_staleness is ours", refuse=True)
    mode = TRAINER + "v1.trainer_mode"
    if since(m, "0.9") and m.flag(TRAINER + "use_v1") and m.text(mode) != "sync":
        m.lacks(
            mode,
            f"{m.text(mode)}: completions are drawn ahead, by batches of its own; rollout.max_staleness and "
            "rollout.sync_every are ours, from a job in step",
            refuse=True,
        )
