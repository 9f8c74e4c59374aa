"""Checks of the options below `distill` and `teacher`, among each other and with the rest. All but what a teacher says
of itself is known here, before a device is touched."""

from __future__ import annotations

import re

from jaxrl.config.lengths import episodes
from jaxrl.config.load import get
from jaxrl.config.option import no_effect
from jaxrl.config.registry import recipe_of
from jaxrl.config.schema import options
from jaxrl.resolve.checks.algorithm import of_aggregation, of_samples, resolved_algorithm

# Options below `algorithm` that distillation reads: always, and where the teacher's log-probs are an advantage.
ALWAYS = ("aggregation", "aggregation_constant", "aggregation_sequences", "ppo_epochs", "num_minibatches",
          "mask_truncated")
SAMPLED = (*ALWAYS, "policy_loss", "ratio", "clip_low", "clip_high", "dual_clip", "delta", "cispo_max_ratio",
           "cispo_min_ratio", "sapo_tau_pos", "sapo_tau_neg", "dppo_low", "dppo_high", "entropy_coef", "entropy_target",
           "entropy_rate", "entropy_max", "early_stop_ratio", "early_stop_kl", "old_logprobs", "mismatch.correction",
           "mismatch.cap", "mismatch.low", "mismatch.sequence_delta", "mismatch.warn", "mismatch.stop")


def teacher_kind(config) -> str:
    """Where the teacher is: files, servers or local."""
    return "files" if config.teacher.files else "servers" if config.teacher.servers else "local"


def distillation(cfg) -> list[str]:
    """Everything below `distill` and `teacher`."""
    if "teacher" not in recipe_of(cfg).roles:
        changed = _changed(cfg, ("distill", "teacher"))
        return [f"{', '.join(changed)}: run.recipe={cfg.run.recipe} has no teacher; set run.recipe=distill, or leave "
                "it out"] * bool(changed)
    if cfg.run.mode == "eval":
        return []
    return [*_loss(cfg), *_rows(cfg), *_teacher(cfg), *_algorithm(cfg)]


def _changed(cfg, groups) -> list[str]:
    """Options below these groups that are not at their defaults."""
    return [name for name, opt in options().items() if name.partition(".")[0] in groups
            and get(cfg, name) != opt.default and not (isinstance(opt.default, dict) and not get(cfg, name))]


def _without_use(cfg, names, why: str, remedy: str) -> list[str]:
    defaults = options()
    return [no_effect(name, get(cfg, name), why, remedy) for name in names if get(cfg, name) != defaults[name].default]


def _loss(cfg) -> list[str]:
    d = cfg.distill
    kind = f"with distill.loss={d.loss}"
    if d.loss == "sampled":
        return _without_use(cfg, ("distill.top_k", "distill.tail", "distill.beta", "distill.temperature", "distill.ce",
                                  "distill.on_prompt"), f"{kind}, which reads the sampled tokens' log-probs",
                            "set distill.loss=forward, reverse or jsd, or leave it out")
    out = _without_use(cfg, ("distill.gamma",), kind, "set distill.loss=sampled, or leave it out")
    if d.loss != "jsd":
        out += _without_use(cfg, ("distill.beta",), kind, "set distill.loss=jsd, or leave it out")
    if not d.top_k:
        out += _without_use(cfg, ("distill.tail",), "over the whole vocabulary", "set distill.top_k, or leave it out")
    return out


def _rows(cfg) -> list[str]:
    d, out, size = cfg.distill, [], cfg.data.prompts_per_step
    drawn = d.on_policy * size
    if abs(drawn - round(drawn)) > 1e-6:
        out.append(f"distill.on_policy={d.on_policy} of data.prompts_per_step={size} is {drawn:g} prompts: choose a "
                   f"multiple of 1/{size}")
    if d.loss == "sampled" and d.on_policy < 1:
        out.append(f"distill.on_policy={d.on_policy} with distill.loss=sampled: tokens that the student did not draw "
                   "are no sample of it; set on_policy=1, or another loss")
    if d.ce and d.on_policy == 1:
        out.append(no_effect("distill.ce", d.ce, "with distill.on_policy=1: no row brings a completion",
                             "lower distill.on_policy, or leave it out"))
    if d.on_policy < 1 and cfg.rollout.max_staleness:
        out.append(f"rollout.max_staleness={cfg.rollout.max_staleness} with distill.on_policy={d.on_policy}: only runs "
                   "on samples alone generate ahead; set one of them to its default")
    if d.on_policy < 1 and episodes(cfg):
        out.append(f"env.function, env.tools with distill.on_policy={d.on_policy}: rows bring completions of one turn; "
                   "set on_policy=1")
    if not cfg.reward.functions and not cfg.eval.rewards and (cfg.eval.sets or cfg.data.eval_fraction):
        out.append("reward.functions and eval.rewards are empty: nothing says which answers to eval.sets are right; "
                   "name one, or leave eval.sets out")
    if (cfg.data.pass_rate_min, cfg.data.pass_rate_max) != (0, 1):
        out.append(f"data.pass_rate_min={cfg.data.pass_rate_min}, data.pass_rate_max={cfg.data.pass_rate_max}: rewards "
                   "choose no rows in distillation; leave them out")
    if cfg.train.loss_on_prompt:
        out.append("train.loss_on_prompt=True: it is distill.on_prompt here; set that")
    return out


def _teacher(cfg) -> list[str]:
    d, t, out, kind = cfg.distill, cfg.teacher, [], teacher_kind(cfg)
    if t.files and (t.servers or t.path):
        out.append(f"teacher.files={t.files!r} beside teacher.path or teacher.servers: name one teacher")
    if kind == "servers" and not t.path:
        out.append("teacher.path is empty: name the folder or hub id of what teacher.servers serve; its tokenizer is "
                   "compared with the student's")
    elif kind == "local" and not t.path:
        out.append("teacher.path is empty: name the teacher's folder or hub id, teacher.servers, or teacher.files")
    out += [f"teacher.servers entry {url!r}: expected http://host:port" for url in t.servers
            if not re.fullmatch(r"https?://(\[[^]]+\]|[^/:]+)(:[0-9]+)?/?", url)]
    if kind != "local":
        out += _without_use(cfg, ("teacher.dtype",), f"with teacher.{kind}", "leave it out")
        if "teacher" in cfg.mesh.roles:
            out.append(f"mesh.roles.teacher: the teacher is in teacher.{kind}; leave it out")
    if kind != "servers":
        out += _without_use(cfg, ("teacher.timeout_seconds",), "without teacher.servers", "leave it out")
    if kind == "files" and t.revision:
        out.append(no_effect("teacher.revision", t.revision, "with teacher.files", "leave it out"))
    if kind == "servers" and d.loss != "sampled" and not (d.loss == "forward" and d.top_k):
        out.append(f"distill.loss={d.loss}, distill.top_k={d.top_k} with teacher.servers: they say the log-probs of a "
                   "row's tokens and of their own most probable ones; set loss=sampled, or forward with top_k")
    if kind == "servers" and d.teacher_temperature != 1:
        out.append(f"distill.teacher_temperature={d.teacher_temperature} with teacher.servers: theirs are of "
                   "temperature 1; leave it out")
    for name in ("files", "save"):
        if t[name] and not (d.loss == "forward" and d.top_k and d.on_policy == 0):
            out.append(f"teacher.{name}={t[name]!r}: files hold the teacher's most probable tokens of the data's rows; "
                       "set distill.loss=forward, distill.top_k and distill.on_policy=0")
    if t.files and t.save:
        out.append(f"teacher.save={t.save!r} with teacher.files={t.files!r}: that is written already; leave it out")
    return out


def _algorithm(cfg) -> list[str]:
    """Rewards decide nothing here, so that their estimators, critics and references do nothing."""
    if cfg.algorithm.preset != "grpo":
        return [f"algorithm.preset={cfg.algorithm.preset}: it says what is made of rewards; set what you want of it by "
                "itself, e.g. algorithm.policy_loss"]
    read = SAMPLED if cfg.distill.loss == "sampled" else ALWAYS
    names = [n for n in _changed(cfg, ("algorithm", "critic", "reference")) if n.removeprefix("algorithm.") not in read]
    out = _without_use(cfg, names, f"in distillation with distill.loss={cfg.distill.loss}", "leave it out")
    v = resolved_algorithm(cfg) | {"advantage_mean": "none"}
    out += of_aggregation(cfg.algorithm, v)
    return out or of_samples(cfg, v)
