"""Checks of the options below `algorithm` against each other: estimator, ratios, KL, mismatch, dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl.algorithms import POLICY_LOSSES, TOKEN_MASKS
from jaxrl.algorithms.presets import IMPLIED
from jaxrl.config.lengths import episodes
from jaxrl.config.load import editable
from jaxrl.config.registry import recipe_of
from jaxrl.config.schema import SCHEMA
from jaxrl.config.user_code import imported
from jaxrl.data.mixture import ALGORITHM
from jaxrl.errors import type_of
from jaxrl.resolve.checks.data import entry
from jaxrl.resolve.checks.unread import unread
from jaxrl.resolve.spec import algorithm_row
from jaxrl.rollout.engines import CUSTOM_ENGINE, ENGINES, engine_row


def resolved_algorithm(cfg) -> dict:
    """Returns the options below `algorithm` that presets set, short name -> value: the user's, else what the kind of
    advantage implies, else the preset's."""
    return {name: value for name, (value, _) in algorithm_row(cfg).items()}


def algorithm(cfg) -> list[str]:
    """Returns the problems of everything below `algorithm`, and of options that do not work with it; [] for jobs that
    do not learn from rewards of samples."""
    if not recipe_of(cfg).samples or not recipe_of(cfg).judged:
        return []
    v, out, bound = resolved_algorithm(cfg), [], cfg.train.max_step_kl
    if bound and cfg.mesh.roles.get("policy", {}).get("rest") == "streamed":
        out.append(f"train.max_step_kl={bound} with mesh.roles.policy.rest=streamed: it holds the parameters before "
                   "and after a step on the devices; leave one of them out")
    return out + [*_batch_division(cfg, v), *_estimators(cfg, v), *_turns(cfg, v), *_pairs(cfg, v),
                   *_ratios(cfg, v), *_kl(v), *_mismatch(cfg, v), *_beside(cfg, v), *_routes(cfg, v),
                  *_of_sources(cfg, v)]


def _of_sources(cfg, v):
    """Returns the problems of the tables `algorithm` of data.sources: entries, and each source's estimator as if it
    were the run's.
    """
    out, tables = [], {name: source["algorithm"] for name, source in cfg.data.sources.items() if "algorithm" in source}
    for name, table in tables.items():
        where = f"data.sources.{name}.algorithm"
        if not hasattr(table, "keys"):
            return [f"{where}={table!r}: must be a table such as {{'advantage_std': 'none'}}"]
        unknown = [key for key in table if key not in ALGORITHM]
        if unknown:
            return [f"{where}.{unknown[0]}: not among what a source may have of its own: {', '.join(ALGORITHM)}"]
        wrong = [m for key in table for m in entry(f"{where}.{key}", SCHEMA["algorithm"][key], table[key])]
        if wrong:
            return wrong
        own = editable(cfg)
        own.algorithm.update(table)
        v_own = resolved_algorithm(own)
        if "gae" in (v["advantage"], v_own["advantage"]) or (v_own["advantage"] == "dpo") != (v["advantage"] == "dpo"):
            return [f"{where} with algorithm.advantage={v['advantage']}: a critic, or pairs, are of all sources or of"
                    " none; choose among outcome, returns, turn, gigpo and functions of your own"]
        if v_own["advantage_mean"] == "greedy" != v["advantage_mean"]:
            return [f"{where}.advantage_mean=greedy: greedy completions are drawn for all sources or for none; set"
                    " algorithm.advantage_mean"]
        if ":" in v_own["advantage"]:
            out += import_path(f"{where}.advantage", v_own["advantage"])
        problems = [_advantage(config, row) for config, row in ((cfg, v), (own, v_own))]
        out += [f"{where}: {m}" for m in problems[1] if m not in problems[0]]
    return out


def of_samples(cfg, v) -> list[str]:
    """Returns the problems of jobs that learn from samples without rewards: minibatches, ratios, mismatch.

    v: options below `algorithm`, short name -> value, with the preset's values where the user set none.
    """
    return [*_batch_division(cfg, v), *_ratios(cfg, v), *_mismatch(cfg, v)]


def _advantage(cfg, v) -> list[str]:
    """Returns the problems of a source's table `algorithm`."""
    return [*_batch_division(cfg, v), *_estimators(cfg, v), *_turns(cfg, v),
            *unread(cfg, tuple(f"algorithm.{name}" for name in ALGORITHM))]


MOST_SUPPORT = 128


def import_path(name, path, kind: Any = Callable):
    """Returns the problem of an import path that cannot be imported or is not a `kind`, as a list; [] without one.

    name, path: the option and its value. The module or file is imported, which executes it.
    """
    try:
        found = imported(path)
    except Exception as e:  # it is the user's code: anything may go wrong in it
        return [f"{name}={path!r} cannot be imported: {type(e).__name__}: {e}"]
    wanted = "a function" if kind is Callable else f"a {kind.__name__}"
    return [] if isinstance(found, kind) else [f"{name}={path!r} is {type_of(found)}, not {wanted}"]


def _batch_division(cfg, v):
    out = []
    if v["advantage_mean"] in ("group", "leave_one_out") and cfg.rollout.group_size < 2 and cfg.run.mode == "train":
        out.append(f"rollout.group_size={cfg.rollout.group_size}: a group baseline needs at least 2 samples per prompt")
    for name, count in (("algorithm", v["num_minibatches"]), ("critic", cfg.critic.num_minibatches)):
        if count and cfg.data.prompts_per_step % count:
            size = cfg.data.prompts_per_step / count
            out.append(
                f"{name}.num_minibatches={count}: data.prompts_per_step={cfg.data.prompts_per_step} would give"
                f" {size:.2f} prompts per optimizer step; choose a divisor of {cfg.data.prompts_per_step}"
            )
    return out


def _estimators(cfg, v):
    """Bounds of the advantage that cross, and baselines that do not go with the reward."""
    out = []
    low, high = v["advantage_low"], v["advantage_high"]
    if low is not None and high is not None and low >= high:
        out.append(f"algorithm.advantage_low={low}: must be below algorithm.advantage_high={high}")
    if v["advantage_mean"] == "greedy" and (cfg.reward.norm_mean, cfg.reward.norm_std) != ("none", "none"):
        out.append(f"reward.norm_mean={cfg.reward.norm_mean}, reward.norm_std={cfg.reward.norm_std} with "
                   "algorithm.advantage_mean=greedy: the greedy completions' scores are not normalised; set both to "
                   "none")
    if v["positive_nll_coef"] and not cfg.reward.functions:
        out.append("algorithm.positive_nll_coef needs a reward that says which completions are right")
    return out


def _turns(cfg, v):
    """Returns the problems of credit by turn, and of turn rewards with options that rescale scores."""
    name, out = v["advantage"], []
    kind, several = f"with algorithm.advantage={name}", episodes(cfg)
    if name == "gigpo" and not cfg.env.function:
        out.append("algorithm.advantage=gigpo compares turns that an episode decided in the same state (chat.state): "
                   "set env.function, or take algorithm.preset=grpo, which is the same without states")
    if name == "gigpo" and v["advantage_mean"] not in ("group", "leave_one_out"):
        out.append(f"algorithm.advantage_mean={v['advantage_mean']} {kind}: both its advantages are relative to a "
                   "group; set group or leave_one_out")
    out += [f"algorithm.{n}={v[n]} {kind}: its baseline is the mean of the group's others, without a scale; set {only}"
            for n, only in IMPLIED.get(name, {}).items() if v[n] != only]
    norms = [f"reward.{n}={cfg.reward[n]}" for n in ("norm_mean", "norm_std") if cfg.reward[n] != "none"]
    if norms and name in ("turn", "gigpo"):
        out.append(f"{', '.join(norms)} {kind}: it compares within the group by itself, and the rewards of turns would "
                   "not be normalised; set none")
    if several and name in ("returns", "gae"):
        scales = {"algorithm.advantage_std": v["advantage_std"], "reward.norm_std": cfg.reward.norm_std}
        out += [f"{n}={value} {kind}: the rewards of turns would not be divided, only their sum; set none"
                for n, value in scales.items() if value != "none"]
    return out


def _pairs(cfg, v):
    """Returns the problems of online DPO: its log-ratios are the KL, and nothing else may rescale its advantages."""
    if v["advantage"] != "dpo":
        return []
    wanted = {"kl.placement": "reward", "kl.estimator": "k1", "policy_loss": "pg", "aggregation": "sequence_sum",
              "advantage_mean": "none", "advantage_std": "none", "whiten": False, "advantage_low": None,
              "advantage_high": None, "positive_nll_coef": 0.0}
    out = [f"algorithm.{n}={v[n]} with algorithm.advantage=dpo: it would be another loss than DPO's; set {value}"
           for n, value in wanted.items() if v[n] != value]
    if not v["kl.coef"]:
        out.append("algorithm.kl.coef=0.0 with algorithm.advantage=dpo: it is DPO's beta; set 0.1")
    if cfg.rollout.group_size < 2 and cfg.run.mode == "train":
        out.append(f"rollout.group_size={cfg.rollout.group_size} with algorithm.advantage=dpo: a pair needs two "
                   "answers to a prompt")
    return out


def _ratios(cfg, v):
    out, loss, ratio = [], v["policy_loss"], v["ratio"]
    ratios = POLICY_LOSSES[loss].ratios if loss in POLICY_LOSSES else ()
    if ratios and ratio not in ratios:
        out.append(f"algorithm.ratio={ratio} with algorithm.policy_loss={loss}: set algorithm.ratio="
                   f"{' or '.join(ratios)}, or another loss")
    if ratio == "geometric" and (v["dual_clip"] or v["delta"]):
        out.append("algorithm.ratio=geometric clips tokens before their mean: algorithm.dual_clip and delta must be 0")
    if ratio != "geometric" and not 0 < v["clip_low"] <= 1:
        out.append(f"algorithm.clip_low={v['clip_low']}: must lie above 0 and at most at 1 (1 = no lower bound)")
    if v["delta"] and v["delta"] < 1 + v["clip_high"]:
        out.append(f"algorithm.delta={v['delta']}: must be at least 1 + clip_high = {1 + v['clip_high']:g}, or 0 for "
                   "off")
    if v["cispo_min_ratio"] >= v["cispo_max_ratio"]:
        out.append(f"algorithm.cispo_min_ratio={v['cispo_min_ratio']}: must be below "
                   f"cispo_max_ratio={v['cispo_max_ratio']}")
    for name, mask in TOKEN_MASKS.items():
        value = v.get(name, cfg.algorithm[name])
        if value and "old" in mask.columns and v["old_logprobs"] != "recompute":
            out.append(f"algorithm.{name}={value} with algorithm.old_logprobs={v['old_logprobs']}: it reads "
                       "the trainer's log-probs before the update; set algorithm.old_logprobs=recompute")
    if v["sequence_high"] and v["sequence_low"] >= v["sequence_high"]:
        high = f"algorithm.sequence_high={v['sequence_high']}"
        out.append(f"algorithm.sequence_low={v['sequence_low']}: must be below {high}")
    if v["cov_low"] >= v["cov_high"]:
        out.append(f"algorithm.cov_low={v['cov_low']}: must be below algorithm.cov_high={v['cov_high']}")
    return out


def _kl(v):
    out = []
    if v["kl.coef"]:
        if v["kl.placement"] == "loss" and v["kl.estimator"] == "k1":
            out.append("algorithm.kl.estimator=k1 in the loss: its expected gradient is zero, it would do nothing; "
                       "take k3_unbiased or k2, or algorithm.kl.placement=reward")
        if v["kl.placement"] == "reward" and v["kl.estimator"] == "k3_unbiased":
            out.append("algorithm.kl.estimator=k3_unbiased in the reward: no gradient flows through its ratio there; "
                       "take k1")
        if v["kl.placement"] == "reward" and v["old_logprobs"] == "rollout":
            out.append("algorithm.old_logprobs=rollout with a KL in the reward: it is the trainer's policy that is "
                       "compared with the reference; set auto or recompute")
    return out


def _mismatch(cfg, v):
    out, choice, rollout = [], v["mismatch.correction"], v["old_logprobs"] == "rollout"
    if v["mismatch.low"] >= v["mismatch.cap"]:
        out.append(f"algorithm.mismatch.low={v['mismatch.low']}: must be below "
                   f"algorithm.mismatch.cap={v['mismatch.cap']}")
    if choice not in ("auto", "none") and rollout:
        out.append(
            f"algorithm.mismatch.correction={choice} with algorithm.old_logprobs=rollout: the ratio is already taken "
            "to the sampler's log-probs; use one of them"
        )
    return out + _temperature(cfg, v)


def _temperature(cfg, v):
    """Returns the problems of a temperature of the trainer's own: nothing may then compare its
    log-probs with the sampler's.
    """
    own = cfg.algorithm.temperature
    if not own or own == cfg.rollout.temperature:
        return []
    reads = {"mismatch.correction": "none", "mismatch.sequence_delta": 0, "m2_threshold": 0, "sequence_high": 0,
             "sampled_support": False}
    v = {**v, "sampled_support": cfg.algorithm.sampled_support}
    found = [name for name, off in reads.items() if v[name] != off]
    found += ["old_logprobs"] * (v["old_logprobs"] == "rollout")
    return [f"algorithm.temperature={own:g} with rollout.temperature={cfg.rollout.temperature:g} and "
            f"algorithm.{name}={v[name]}: it would compare log-probs of two temperatures; set it to "
            f"{'auto or recompute' if name == 'old_logprobs' else reads[name]}, or leave algorithm.temperature out"
            for name in found]


def _routes(cfg, v):
    """Returns the problems of replayed experts and their source."""
    routes, name = cfg.algorithm.routes, f"algorithm.routes={cfg.algorithm.routes}"
    if routes == "own" or cfg.run.mode == "eval":
        return []
    out, several = [], v["ppo_epochs"] * v["num_minibatches"] > 1
    in_reward = v["kl.coef"] and v["kl.placement"] == "reward"
    scores = v["old_logprobs"] == "recompute" or v["old_logprobs"] == "auto" and (several or in_reward)
    if routes == "scored" and not scores:
        out.append(f"{name} with algorithm.old_logprobs={v['old_logprobs']}: no pass scores old log-probs, whose "
                   "experts would be replayed; set algorithm.old_logprobs=recompute")
    if cfg.critic.shared and v["advantage"] == "gae":
        out.append(f"{name} with critic.shared: values are scored on experts of their own, and the shared trunk would "
                   "be updated on others; set critic.shared=False")
    engine = engine_row(cfg, here=False)
    if routes == "sampled" and engine is not CUSTOM_ENGINE and not engine.info.routes:
        other = next(n for n, row in ENGINES.items() if row.info.routes)
        out.append(f"{name} with rollout.engine={cfg.rollout.engine}: {engine.title} does not tell the experts of its "
                   f"tokens; set {other}")
    if routes == "sampled" and engine.starts_servers:
        if cfg.rollout.stop:
            out.append(f"{name} with rollout.stop={tuple(cfg.rollout.stop)}: {engine.title} tells experts when a "
                       "completion has ended, and a stop string ends it from here; set rollout.stop_token_ids")
        if not cfg.rollout.vllm.prefix_caching:
            out.append(f"{name} with rollout.vllm.prefix_caching=False: vLLM keeps the experts of its tokens with the "
                       "prefix cache; set it to True")
    return out


def _beside(cfg, v):
    """Returns the problems of dynamic sampling, entropy and early stops."""
    a, out = cfg.algorithm, []
    if ":" in a.keep_group:
        out += import_path("algorithm.keep_group", a.keep_group)
    elif a.keep_group and a.keep_group not in {f.rpartition(":")[2] for f in cfg.reward.functions}:
        out.append(f"algorithm.keep_group={a.keep_group!r}: neither a reward of this run nor an import path")
    if a.sampled_support:
        r = cfg.rollout
        if not 0 < r.top_k <= MOST_SUPPORT:
            out.append(f"algorithm.sampled_support with rollout.top_k={r.top_k}: a support is kept as a list of "
                       f"tokens; set top_k to 1..{MOST_SUPPORT}")
        if r.repetition_penalty != 1 or r.frequency_penalty != 0:
            out.append("algorithm.sampled_support with penalties: they bend the distribution within the support, too; "
                       "set rollout.repetition_penalty=1 and frequency_penalty=0")
        engine = engine_row(cfg, here=False)
        if engine is not CUSTOM_ENGINE and not engine.info.support:
            other = next(n for n, row in ENGINES.items() if row.info.support)
            out.append(f"algorithm.sampled_support with rollout.engine={r.engine}: {engine.title} does not tell its "
                       f"support; set {other}")
    if v["entropy_target"] and v["entropy_coef"]:
        out.append(f"algorithm.entropy_coef={v['entropy_coef']} with entropy_target={v['entropy_target']}: the "
                   "coefficient adapts by itself, up to entropy_max; set entropy_coef=0")
    if 0 < a.early_stop_ratio <= 1:
        out.append(f"algorithm.early_stop_ratio={a.early_stop_ratio}: must be above 1, the ratio of an unchanged "
                   "policy; 0 = off")
    return out
