"""Checks of the options below `distill` and `teacher`, among each other and with the rest. All but what a teacher says
of itself is known here, before a device is touched."""

from __future__ import annotations

import re

from jaxrl.config.lengths import episodes
from jaxrl.config.registry import recipe_of
from jaxrl.resolve.checks.algorithm import of_samples, resolved_algorithm


def teacher_kind(config) -> str:
    """Returns "files" if teacher.files is set, else "servers" if teacher.servers is, else "local"."""
    return "files" if config.teacher.files else "servers" if config.teacher.servers else "local"


def distillation(cfg) -> list[str]:
    """Returns the problems of everything below `distill` and `teacher`; [] without a teacher and for run.mode=eval."""
    if "teacher" not in recipe_of(cfg).roles or cfg.run.mode == "eval":
        return []
    return [*_rows(cfg), *_teacher(cfg), *_algorithm(cfg)]


def _rows(cfg) -> list[str]:
    d, out, size = cfg.distill, [], cfg.data.prompts_per_step
    drawn = d.on_policy * size
    if abs(drawn - round(drawn)) > 1e-6:
        out.append(f"distill.on_policy={d.on_policy} of data.prompts_per_step={size} is {drawn:g} prompts: choose a "
                   f"multiple of 1/{size}")
    if d.loss == "sampled" and d.on_policy < 1:
        out.append(f"distill.on_policy={d.on_policy} with distill.loss=sampled: tokens that the student did not draw "
                   "are no sample of it; set on_policy=1, or another loss")
    if d.on_policy < 1 and cfg.rollout.max_staleness:
        out.append(f"rollout.max_staleness={cfg.rollout.max_staleness} with distill.on_policy={d.on_policy}: only runs "
                   "on samples alone generate ahead; set one of them to its default")
    if d.on_policy < 1 and episodes(cfg):
        out.append(f"env.function, env.tools with distill.on_policy={d.on_policy}: rows bring completions of one turn; "
                   "set on_policy=1")
    if not cfg.reward.functions and not cfg.eval.rewards and (cfg.eval.sets or cfg.data.eval_fraction):
        out.append("reward.functions and eval.rewards are empty: nothing says which answers to eval.sets are right; "
                   "name one, or leave eval.sets out")
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
    if kind != "local" and "teacher" in cfg.mesh.roles:
        out.append(f"mesh.roles.teacher: the teacher is in teacher.{kind}; leave it out")
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
    """Returns the problems of options about rewards, and of losses that do not work together."""
    if cfg.algorithm.preset != "grpo":
        return [f"algorithm.preset={cfg.algorithm.preset}: it says what is made of rewards; set what you want of it by "
                "itself, e.g. algorithm.policy_loss"]
    return of_samples(cfg, resolved_algorithm(cfg) | {"advantage_mean": "none"})
