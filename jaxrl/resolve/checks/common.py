"""Cross-field checks and derived numbers. Runs before jax touches a device; all problems are reported at once."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxrl.checkpoint.uploads import place_of
from jaxrl.config.lengths import episodes, longest_completion, longest_sequence, made_of
from jaxrl.config.load import get
from jaxrl.config.option import BOUNDS, is_finite, no_effect, not_chosen
from jaxrl.config.registry import Recipe, recipe_of
from jaxrl.config.schema import CHANGEABLE, element_kind, options
from jaxrl.config.suggest import LOSSES, not_yet
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.algorithm import algorithm, import_path, resolved_algorithm
from jaxrl.resolve.checks.data import conversations, curricula, evaluation, sources
from jaxrl.resolve.checks.distill import distillation
from jaxrl.resolve.checks.env import elsewhere, ray
from jaxrl.resolve.checks.lora import lora
from jaxrl.resolve.checks.preference import preference
from jaxrl.resolve.checks.replay import AGAIN, replays
from jaxrl.resolve.checks.reward_model import PART, reward_models
from jaxrl.resolve.checks.sandbox import sandbox
from jaxrl.resolve.checks.services import missing_logger, services
from jaxrl.resolve.checks.unread import unread, unread_decay
from jaxrl.rollout.engines import ENGINES, engine_row
from jaxrl.rollout.vllm.options import LOOPBACK, server_folder, url_host
from jaxrl.sharding import targets
from jaxrl.sharding.mesh import AXES
from jaxrl.training import optimizer

# Tables whose values are not jaxrl's: of the user, of model files, of other programs.
FREE = ("user", "model.config", "data.chat_template_kwargs", "rollout.vllm.engine_kwargs", "rollout.vllm.env",
        "env.options", "reward.arguments", "reward.judge.extra", "reward.judge.server_args")


def check(cfg) -> None:
    """Checks a config without touching a device. Raises ConfigError that lists the problems: field, value, remedy.

    If single values are wrong (choices, entries of lists, numbers that are not finite, import paths, which are
    executed) it lists these alone, else all others.
    The modes that compute recorded steps again need no engine, rewards or sandbox: they are not checked.
    """
    problems = _types(cfg)
    if not problems:
        for rule in (_ranges, _unread, _mesh, _plan, _model, _data, _batch, _rollout, _ahead, _episodes, _engine,
                     _rewards, ray, sandbox, services, reward_models, algorithm, lora, preference, distillation,
                     _optimizer, _precision, evaluation, _checkpoints, _uploads, _launch, replays, _misc):
            if cfg.run.mode not in AGAIN or rule not in (_engine, _rewards, sandbox, services):  # they stay closed
                problems += rule(cfg)
    if problems:
        raise ConfigError("invalid config:\n" + "\n".join(f"  - {p}" for p in problems))


def _types(cfg):
    out = []
    for name, opt in options().items():
        value = get(cfg, name)
        if isinstance(opt.default, dict):
            out += [] if name in FREE else _numbers(name, value)
        if isinstance(opt.default, dict) or (value is None and opt.default is None):
            continue
        if opt.or_path and ":" in str(value):
            out += import_path(name, value, Recipe if name == "run.recipe" else Callable)
        elif not isinstance(value, tuple) and (wrong := not_chosen(opt, value)):
            missing = f"; {not_yet(str(value))}" if not_yet(str(value)) else ""
            out.append(f"{name}={value!r}: {wrong}{missing}")
        if isinstance(opt.default, tuple):
            out += _elements(name, value)
        elif isinstance(value, bool) and (opt.kind or type(opt.default)) is not bool:
            out.append(f"{name}={value}: must be of type {(opt.kind or type(opt.default)).__name__}")
        elif isinstance(value, int | float) and not is_finite(value):
            out.append(f"{name}={value}: must be a finite number")
    return out


def _numbers(name: str, value) -> list[str]:
    """Returns the problems of numbers in a table, at any depth, that are not finite."""
    if hasattr(value, "items"):
        return [problem for key, own in value.items() for problem in _numbers(f"{name}.{key}", own)]
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(problem for own in value for problem in _numbers(name, own)))
    wrong = isinstance(value, int | float) and not is_finite(value)
    return [f"{name}={value}: must be a finite number"] * wrong


def _elements(name, values):
    kind = element_kind(name)
    fits = {str: str, int: int, float: int | float}[kind]
    if any(not isinstance(v, fits) or isinstance(v, bool) for v in values):
        return [f"{name}={values}: every entry must be "
                f"{'text' if kind is str else 'an integer' if kind is int else 'a number'}"]
    if kind is not str and not all(map(is_finite, values)):
        return [f"{name}={values}: must be finite numbers"]
    opt = options()[name]
    wrong = [v for v in values if not_chosen(opt, (v,))]
    hints = {v: f"{v} is {LOSSES[v]}" if name == "preference.loss" and v in LOSSES else not_yet(v) for v in wrong}
    return [f"{name}={v!r}: {not_chosen(opt, values)}{f'; {hints[v]}' if hints[v] else ''}" for v in wrong]


def _ranges(cfg):
    """Bounds of single options; an algorithm option that nobody set is its preset's."""
    row, out = resolved_algorithm(cfg), []
    for name, opt in options().items():
        value = row.get(name.removeprefix("algorithm."), get(cfg, name)) if name.startswith("algorithm.") \
            else get(cfg, name)
        if opt.bound and value is not None and not BOUNDS[opt.bound][0](value):
            out.append(f"{name}={value}: {BOUNDS[opt.bound][1]}")
    return out


def _unread(cfg):
    """Returns the problems of options that were set and that nothing reads; for recorded steps
    without rewards and sandbox.
    """
    closed = ("reward.", "sandbox.") if cfg.run.mode in AGAIN else ()
    return [problem for problem in unread(cfg) if not problem.startswith(closed)]


def _mesh(cfg):
    sizes = {a: cfg.mesh[a] for a in AXES}
    bad = [f"mesh.{a}={s}: sizes are positive, or -1 for the rest" for a, s in sizes.items() if s == 0 or s < -1]
    if list(sizes.values()).count(-1) > 1:
        bad.append(", ".join(f"mesh.{a}={s}" for a, s in sizes.items()) + ": only one axis can be -1")
    if sizes["cp"] == -1:
        bad.append("mesh.cp=-1: rows are cut before the devices are known; give a number, and -1 to mesh.fsdp")
    bad += [problem for role, options in cfg.mesh.roles.items() for problem in _role(cfg, role, options)]
    cut = {role for role, options in cfg.mesh.roles.items() if options.get("cp", cfg.mesh.cp) != 1} - {"sampler"}
    idle = no_effect("model.ring_attention", True, "with mesh.cp=1", "set mesh.cp, or leave it out")
    return bad + [idle] * (cfg.mesh.cp == 1 and not bad and not cut and cfg.model.ring_attention)


STREAMED = ("device", "host", "streamed")
ROLE_RESTS = {"policy": STREAMED, "reference": STREAMED, "critic": STREAMED,
              "teacher": ("device", "host"), "sampler": ("device", "none"), "reward_model": ("device", "host")}


def _role(cfg, role, options):
    name = f"mesh.roles.{role}"
    if role not in ROLE_RESTS:
        return [f"{name}: there is no such role; choose from {', '.join(ROLE_RESTS)}"]
    if not hasattr(options, "keys"):
        return [f"{name}={options!r}: must be a table such as {{'devices': '0-3', 'fsdp': 4}}"]
    known = ("devices", "processes", *AXES, "rest")
    out = [f"{name}.{key}: unknown; choose from {', '.join(known)}" for key in options.keys() if key not in known]
    sizes = {a: options[a] for a in AXES if a in options}
    out += [f"{name}.{a}={s!r}: sizes are positive, or -1 for the rest" for a, s in sizes.items()
            if not isinstance(s, int) or isinstance(s, bool) or s == 0 or s < -1 + (a == "cp")]
    out += [f"{name}.{key}={options[key]!r}: must be text, 'all' or ranges such as '0-3,6'"
            for key in ("devices", "processes") if not isinstance(options.get(key, "all"), str)]
    if "processes" in options and role != "reference":
        out.append(f"{name}.processes={options['processes']!r}: what learns, and the sampler, are on all processes; "
                   "leave it out, or name devices of every process")
    elif "processes" in options and (cfg.reference.reset_steps or cfg.reference.reset_epochs):
        out.append(f"{name}.processes={options['processes']!r} with reference.reset_steps or reset_epochs: the policy's"
                   " weights are not sent to other hosts; leave one of them out")
    rest = options.get("rest", "device")
    if rest not in ROLE_RESTS[role]:
        out.append(f"{name}.rest={rest!r}: choose {' or '.join(ROLE_RESTS[role])}")
    if rest == "streamed":
        out += _streamed(cfg, role, f"{name}.rest=streamed")
    return out + _role_without_use(cfg, role, name)


def _streamed(cfg, role, name):
    """Returns the problems of options that cannot work with layers streamed one after the other."""
    out = []
    if cfg.model.scan_layers == "false":
        out.append(f"{name} with model.scan_layers=false: layers come one after the other in a scan over them; set "
                   "model.scan_layers=auto or true")
    if role == "reference":
        return out
    if cfg.model.remat == "none":
        out.append(f"{name} with model.remat=none: the backward pass would keep every layer's weights on the devices; "
                   "set model.remat=auto, full or offload")
    used = cfg.critic.optimizer.get("name", cfg.optimizer.name) if role == "critic" else cfg.optimizer.name
    if used not in optimizer.BY_PARAMETER:
        option = "critic.optimizer.name" if "name" in cfg.critic.optimizer and role == "critic" else "optimizer.name"
        out.append(f"{name} with {option}={used}: whether it treats every parameter by itself is not known; choose "
                   f"one of {', '.join(optimizer.BY_PARAMETER)}, or {name.rpartition('=')[0]}=host")
    return out


def _role_without_use(cfg, role, name):
    if role not in recipe_of(cfg).roles:
        return [f"{name}: run.recipe={cfg.run.recipe} has no {role}; leave it out"]
    if role == "sampler" and cfg.rollout.engine != "auto" and not engine_row(cfg).on_mesh:
        return [f"{name}: rollout.engine={cfg.rollout.engine} has devices of its own (rollout.vllm.devices); leave it "
                "out"]
    if role == "critic" and (resolved_algorithm(cfg)["advantage"] != "gae" or cfg.critic.shared):
        return [f"{name}: there is no critic of its own; set algorithm.preset=ppo with critic.shared=False, or leave "
                "it out"]
    if role == PART and not cfg.reward.model.path:
        return [f"{name}: there is no reward model; set reward.model.path, or leave it out"]
    if role == "reference" and not recipe_of(cfg).pairs and not resolved_algorithm(cfg)["kl.coef"]:
        return [f"{name}: there is no reference without a KL term; set algorithm.kl.coef, or leave it out"]
    return []


def _model(cfg):
    out = []
    if cfg.run.warm_start:
        model_options = {"path": cfg.model.path, "init": "random" if cfg.model.init == "random" else ""}
        own = Path(cfg.model.path) == Path(cfg.run.dir) / "warm_start/export"  # recorded once the warm start is done
        if own or cfg.run.mode in AGAIN or cfg.fork.run:
            del model_options["path"]
        out += [f"model.{name}={value!r} with run.warm_start={cfg.run.warm_start!r}: the warm start's model would take "
                "its place; leave one of them out (--config.run.warm_start= trains your model)"
                for name, value in model_options.items() if value]
    if cfg.model.init == "pretrained" and not cfg.model.path and not cfg.run.warm_start:
        out.append("model.path is empty: give an HF folder or hub id, or model.init=random with model.config")
    if cfg.model.init == "random" and not cfg.model.path and "model_type" not in cfg.model.config:
        out.append(
            "model.init=random needs an architecture: set model.path (its config.json) or model.config.model_type"
        )
    if not cfg.model.tokenizer and not cfg.model.path and not cfg.run.warm_start and cfg.run.mode != "plan":
        out.append("model.tokenizer is empty and there is no model.path to take one from")
    if cfg.model.chat_template and not Path(cfg.model.chat_template).is_file():
        out.append(f"model.chat_template={cfg.model.chat_template!r}: no such file")
    for name in ("model.trainable", "model.frozen"):
        out += _regexes(name, get(cfg, name))
    return out


def _regexes(name, patterns):
    out = []
    for p in patterns:
        try:
            re.compile(p)
        except re.error as e:
            out.append(f"{name}: {p!r} is not a regular expression ({e})")
    return out


def _plan(cfg):
    """Returns the problems of a plan's target and lengths; a plan needs neither tokenizer nor data."""
    if cfg.run.mode != "plan":
        return []
    if not all(0 < n <= cfg.rollout.max_new_tokens for n in cfg.plan.lengths):
        return [f"plan.lengths={cfg.plan.lengths}: completions have 1 to "
                f"rollout.max_new_tokens={cfg.rollout.max_new_tokens} tokens"]
    if cfg.plan.run and cfg.plan.lengths:
        return [f"plan.lengths={cfg.plan.lengths} with plan.run={cfg.plan.run!r}: the run has lengths of its own; name "
                "one of them"]
    try:
        targets.parse(cfg.plan.target)
    except ConfigError as e:
        return [str(e)] if cfg.plan.target else ["plan.target is empty: name the devices, for example v5p:4x4x8, "
                                                 "h100:64 or cpu:8"]
    return []


def _data(cfg):
    out = []
    if cfg.run.mode not in recipe_of(cfg).modes:
        out.append(f"run.mode={cfg.run.mode} with run.recipe={cfg.run.recipe}: it has "
                   f"{', '.join(recipe_of(cfg).modes)}; set run.recipe=rl")
    if cfg.run.mode not in ("eval", "plan", *AGAIN) and not cfg.data.path and not cfg.data.sources:
        out.append("data.path is empty: name at least one file, folder or hub id")
    share = cfg.data.eval_fraction
    if share < 0 or (share > 1 and share != int(share)):
        out.append(f"data.eval_fraction={share}: must be a share in 0..1, or a whole number of rows")
    if cfg.run.mode == "eval" and not cfg.eval.sets and not cfg.data.eval_fraction:
        out.append("run.mode=eval needs eval.sets ('name=path') or data.eval_fraction")
    if cfg.data.answer_pattern:
        out += _regexes("data.answer_pattern", (cfg.data.answer_pattern,))
        if not out and re.compile(cfg.data.answer_pattern).groups < 1:
            out.append(
                f"data.answer_pattern={cfg.data.answer_pattern!r}: needs a group (...) around what is the answer"
            )
    return out + sources(cfg) + conversations(cfg) + curricula(cfg)


def _batch(cfg):
    limit = cfg.data.max_prompt_tokens + longest_completion(cfg)
    out = []
    if cfg.train.max_sequence_tokens and recipe_of(cfg).samples and cfg.train.max_sequence_tokens > limit:
        out.append(f"train.max_sequence_tokens={cfg.train.max_sequence_tokens}: above data.max_prompt_tokens + "
                   f"rollout.max_new_tokens = {limit}; lower it or set 0")
    longest = (cfg.train.max_sequence_tokens or limit) + int(recipe_of(cfg).scores)
    lengths = cfg.train.row_lengths
    if len(lengths) > 2:
        out.append(f"train.row_lengths={lengths}: at most 2 (each is compiled)")
    if lengths and max(lengths) < longest:
        out.append(f"train.row_lengths={lengths}: the longest sequence may have {longest} tokens; raise the last "
                   "length")
    return out


def _rollout(cfg):
    r, out = cfg.rollout, []
    if r.min_new_tokens > r.max_new_tokens:
        out.append(f"rollout.min_new_tokens={r.min_new_tokens}: above rollout.max_new_tokens={r.max_new_tokens}")
    if recipe_of(cfg).samples and cfg.run.mode == "train" and r.temperature == 0:
        out.append("rollout.temperature=0: greedy samples of a group are all equal, nothing can be learnt; use 1.0")
    bent = r.repetition_penalty != 1 or r.frequency_penalty != 0
    if bent and not r.penalties_in_training and recipe_of(cfg).samples:
        out.append(f"rollout.repetition_penalty={r.repetition_penalty}, "
                   f"rollout.frequency_penalty={r.frequency_penalty}: penalties bend the policy ratio; use eval.* "
                   "penalties, or allow them with rollout.penalties_in_training=true")
    for name, most in (("prompt_lengths", cfg.data.max_prompt_tokens), ("cache_lengths", None)):
        lengths = r[name]
        if len(lengths) > 3:
            out.append(f"rollout.{name}={lengths}: at most 3 (each is compiled)")
        if any(not isinstance(x, int) or x <= 0 for x in lengths):
            out.append(f"rollout.{name}={lengths}: lengths are positive integers")
        elif most and lengths and max(lengths) < most:
            out.append(f"rollout.{name}={lengths}: the longest must reach data.max_prompt_tokens={most}")
    return out


def _ahead(cfg):
    """Returns the problems of sampling ahead of training, or of rarer weight syncs."""
    r, out = cfg.rollout, []
    enabled = [f"rollout.{name}={r[name]}" for name, off in (("max_staleness", 0), ("sync_every", 1)) if r[name] != off]
    if (r.max_staleness or r.sync_every > 1) and cfg.mesh.roles.get("sampler", {}).get("rest", "device") != "device":
        out.append(f"mesh.roles.sampler.rest=none with {', '.join(enabled)}: the sampler has unfinished completions or "
                   "the weights of several steps; leave one of them out")
    return out


def _episodes(cfg):
    """Returns the problems of options below `env`, among each other and with other groups."""
    e, out = cfg.env, []
    if not episodes(cfg) or not recipe_of(cfg).samples:
        return []
    out += elsewhere(cfg)
    for name, value in (("data.response_prefix", cfg.data.response_prefix), ("env.options", e.options and e.tools)):
        if value:
            out.append(f"{name}={value!r}: no use in episodes{' of env.tools' * bool(e.tools)}; leave it out")
    if cfg.data.chat == "false":
        out.append("data.chat=false: the turns of an episode are written by a chat template; leave it out, and give "
                   "model.chat_template=FILE where the tokenizer has none")
    if not cfg.data.add_generation_prompt:
        out.append("data.add_generation_prompt=False: a turn of the model begins behind it; leave it out")
    if e.history == "template" and e.observations == "inline":
        out.append("env.observations=inline with env.history=template: a template writes whole messages; leave one out")
    if e.episode_seconds < e.step_seconds:
        out.append(f"env.step_seconds={e.step_seconds:g}: above env.episode_seconds={e.episode_seconds:g}")
    longest = cfg.train.max_sequence_tokens
    if longest and e.max_input_tokens >= longest:
        out.append(f"env.max_input_tokens={e.max_input_tokens}: a sequence has at most train.max_sequence_tokens="
                   f"{longest}; lower it, or leave it out")
    if (longest := longest_sequence(cfg)) <= e.image_tokens:
        out.append(f"env.image_tokens={e.image_tokens}: a sequence has at most {longest} tokens ({made_of(cfg)}); "
                   "raise train.max_sequence_tokens, or lower it")
    if e.python and e.executor == "local" and shutil.which(e.python) is None and not Path(e.python).is_file():
        out.append(f"env.python={e.python!r}: no such program; name an interpreter")
    if wrong := [name for name in e.variables if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
        out.append(f"env.variables={e.variables}: {wrong[0]!r} is no name; give names only, their values come from "
                   "this process")
    return out


def _engine(cfg):
    r, v, out, known = cfg.rollout, cfg.rollout.vllm, [], options()
    engine = engine_row(cfg)
    for name, instead in engine.ignores.items() if recipe_of(cfg).samples else ():
        if r[name] != known[f"rollout.{name}"].default:
            other = next(n for n, row in ENGINES.items() if name not in row.ignores)
            out.append(no_effect(f"rollout.{name}", r[name], f"with {engine.title} (rollout.engine={r.engine})",
                                  f"{instead}, or rollout.engine={other}"))
    if v.retries and v.request_seconds >= r.timeout_seconds:
        out.append(f"rollout.vllm.request_seconds={v.request_seconds:g}: not below "
                   f"rollout.timeout_seconds={r.timeout_seconds:g}, so that none of rollout.vllm.retries={v.retries} "
                   "further tries can happen; lower it (0: half of that), or set retries=0")
    if r.engine not in ("auto", *ENGINES) and ":" not in r.engine:
        out.append(f"rollout.engine={r.engine!r}: auto, {', '.join(ENGINES)}, or an import path (module:function, "
                   "./file.py:function)")
    if r.servers and not engine.servers:
        other = next(n for n, row in ENGINES.items() if row.servers)
        out.append(f"rollout.servers={r.servers} with rollout.engine={r.engine}: {engine.title} has no servers; "
                   f"set {other}")
    key = v.api_key or os.environ.get("VLLM_API_KEY")
    for url in () if server_folder(r.servers) else r.servers:
        host = url_host(url)
        if not host:
            out.append(f"rollout.servers entry {url!r}: expected http://host:port (or one folder, /path or ./path)")
        elif not LOOPBACK.fullmatch(host) and not key:
            out.append(f"rollout.servers entry {url!r} is not on this machine: set rollout.vllm.api_key to the key it "
                       "asks for")
    if len({url.rstrip("/") for url in r.servers}) < len(r.servers):
        out.append(f"rollout.servers={r.servers}: a server is named twice")
    if not LOOPBACK.fullmatch(v.host) and not key:
        out.append(f"rollout.vllm.host={v.host!r}: servers that listen beyond this machine need a key: set "
                   "VLLM_API_KEY in the environment")
    if {"api_key", "api-key"} & set(v.engine_kwargs) or "VLLM_API_KEY" in v.env:
        out.append("rollout.vllm.engine_kwargs.api_key, rollout.vllm.env.VLLM_API_KEY: the trainer would not know it, "
                   "and a command line is read by every user of the machine; set VLLM_API_KEY in the environment of "
                   "jaxrl")
    if v.devices and len(v.devices) != v.replicas:
        out.append(f"rollout.vllm.devices={v.devices}: {len(v.devices)} entries for rollout.vllm.replicas={v.replicas}")
    longest = longest_sequence(cfg, max(r.max_new_tokens, cfg.eval.max_new_tokens))
    if 0 < v.max_model_len < longest:
        out.append(f"rollout.vllm.max_model_len={v.max_model_len}: a prompt and its completion may have {longest} "
                   "tokens")
    if v.transport == "network" and r.servers and LOOPBACK.fullmatch(v.weights_host):
        far = [u for u in r.servers if not LOOPBACK.fullmatch(url_host(u))]
        if far:
            out.append(f"rollout.vllm.weights_host={v.weights_host!r}: {far[0]} cannot reach this host there; give its "
                       "address")
    out += _placement(cfg)
    a = cfg.algorithm.mismatch
    if a.stop and a.warn > a.stop:
        out.append(f"algorithm.mismatch.warn={a.warn}: above algorithm.mismatch.stop={a.stop}; warn earlier than you "
                   "stop")
    return out


def _placement(cfg):
    r, sampler = cfg.rollout, cfg.mesh.roles.get("sampler", {})
    own = hasattr(sampler, "keys") and sampler.get("devices", "all") != "all"
    if r.placement == "disaggregated" and not (r.servers or r.vllm.devices or own):
        return ["rollout.placement=disaggregated: nothing says which devices the engine has; name rollout.servers, "
                "rollout.vllm.devices or, for the embedded sampler, mesh.roles.sampler.devices"]
    if r.placement != "colocated":
        return []
    out = []
    if own:
        out.append(f"rollout.placement=colocated with mesh.roles.sampler.devices={cfg.mesh.roles.sampler.devices!r}: "
                   "colocated means the policy's devices; leave one of them out")
    far = [u for u in r.servers if not LOOPBACK.fullmatch(url_host(u))]
    if far:
        out.append(f"rollout.placement=colocated with rollout.servers entry {far[0]!r}: it runs elsewhere and shares "
                   "no GPU with the trainer; set disaggregated")
    if r.max_staleness:
        out.append(f"rollout.placement=colocated with rollout.max_staleness={r.max_staleness}: the engine sleeps while "
                   "the trainer updates, so nothing can be sampled ahead; set rollout.max_staleness=0, or give the "
                   "engine devices of its own (disaggregated)")
    if r.sync_every > 1:
        out.append(f"rollout.placement=colocated with rollout.sync_every={r.sync_every}: what the engine holds is "
                   "dropped at every update; set rollout.sync_every=1")
    return out


def _rewards(cfg):
    r, out = cfg.reward, []
    if not recipe_of(cfg).samples:
        return out
    if r.weights and len(r.weights) != len(r.functions):
        out.append(
            f"reward.weights={r.weights}: {len(r.weights)} weights for {len(r.functions)} functions {r.functions}"
        )
    if "format" in r.functions and not r.format_pattern:
        out.append(
            f"reward.functions={r.functions}: reward.format_pattern is empty; `format` needs a regular expression"
        )
    out += _regexes("reward.format_pattern", (r.format_pattern,))
    if wrong := [name for name in r.env if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
        out.append(f"reward.env={r.env}: {wrong[0]!r} is no name; give names only, their values come from this process")
    if r.overlong_buffer > cfg.rollout.max_new_tokens and not episodes(cfg):
        out.append(
            f"reward.overlong_buffer={r.overlong_buffer}: above rollout.max_new_tokens={cfg.rollout.max_new_tokens}"
        )
    if not r.functions and not (cfg.env.function or cfg.env.program) and not r.model.path and recipe_of(cfg).judged:
        out.append("reward.functions is empty: reinforcement learning needs at least one reward, a reward model "
                   "(reward.model.path), or an environment that gives one (env.function, env.program)")
    named = {f.rpartition(":")[2] for f in (*r.functions, *cfg.eval.rewards)} | (
        {"env"} if cfg.env.function or cfg.env.program else set())
    named |= {PART} if r.model.path else set()
    if cfg.eval.accuracy_from and cfg.eval.accuracy_from not in named:
        out.append(f"eval.accuracy_from={cfg.eval.accuracy_from!r}: not among the rewards {sorted(named)}")
    return out


def _precision(cfg):
    """Formats of numbers that do not go together."""
    t, out = cfg.train, []
    if t.matmul != "default" and cfg.lora.base != "none":
        out.append(f"train.matmul={t.matmul} with lora.base={cfg.lora.base}: its products are of the numbers that the "
                   "codes of the base stand for; leave one of them out")
    scale = t.loss_scale
    if not scale.min <= scale.initial <= scale.max:
        out.append(f"train.loss_scale.initial={scale.initial:g}: must be between train.loss_scale.min={scale.min:g} "
                   f"and max={scale.max:g}")
    if scale.patience > cfg.optimizer.max_nonfinite:
        out.append(f"train.loss_scale.patience={scale.patience}: the run ends after "
                   f"optimizer.max_nonfinite={cfg.optimizer.max_nonfinite} overflows in a row; raise that")
    return out


def _optimizer(cfg):
    o, out = cfg.optimizer, []
    out += _critics_optimizer(cfg)
    out += _regexes("optimizer.groups", tuple(o.groups.keys()))
    out += unread_decay(o)
    for pattern, group in o.groups.items():
        if not hasattr(group, "items"):
            out.append(f"optimizer.groups[{pattern!r}]={group!r}: must be a table such as {{'lr': 0.1}}")
    try:
        optimizer.check_name(o.name)
    except ConfigError as e:
        out.append(str(e))
    return out


def _critics_optimizer(cfg):
    """Returns the problems of critic.optimizer, named as the user wrote it."""
    own = cfg.critic.optimizer
    known = optimizer.CRITICS_OWN
    out = [f"critic.optimizer.{name}: the critic has of its own {', '.join(known)}"
           for name in own if name not in known]
    if out or not own:
        return out
    plain = cfg.copy_and_resolve_references()
    plain.critic.optimizer = {}
    try:
        plain.optimizer = optimizer.critics_optimizer(cfg)
    except ConfigError as e:
        return [str(e).replace("optimizer.", "critic.optimizer.", 1)]
    mine = tuple(f"optimizer.{name}=" for name in own)  # what the critic does not read of the policy's is no mistake
    idle = [p for p in _unread(plain) if p.startswith(mine)]
    found = [p for rule in (_types, _ranges, _optimizer) for p in rule(plain) if p.startswith("optimizer.")]
    found = [p for p in found if " has no effect " not in p or p.startswith(mine)]
    known = [q for rule in (_types, _ranges, _unread) for q in rule(cfg)]
    return ["critic." + p for p in (*idle, *found) if p not in known]


def _checkpoints(cfg):
    u, where = cfg.checkpoint.upload, cfg.checkpoint.dir
    protocol, there, _ = where.partition("://")
    if not there:
        return []
    out = []
    if protocol not in ("gs", "s3", "file"):
        out.append(f"checkpoint.dir={where!r}: checkpoints go to a folder, gs://bucket/folder or s3://bucket/folder")
    else:
        import fsspec  # not at every start

        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as e:
            out.append(f"checkpoint.dir={where!r}: {e}")
    if u.to and u.checkpoints != "none":
        out.append(f"checkpoint.upload.checkpoints={u.checkpoints} with checkpoint.dir={where!r}: they lie elsewhere "
                   "already; leave one of them out")
    return out


def _uploads(cfg):
    u, out = cfg.checkpoint.upload, []
    for url in u.to:
        try:
            place_of(url)
        except ConfigError as e:
            out.append(str(e))
    c = cfg.checkpoint
    if u.to and u.checkpoints == "final" and not c.at_end:
        out.append("checkpoint.upload.checkpoints=final with checkpoint.at_end=False: the last checkpoint is not "
                   "written; set checkpoint.at_end=True, or checkpoint.upload.checkpoints=all")
    exports = u.exports == "all" or (u.exports == "final" and c.export_at_end)
    if u.to and not exports and u.checkpoints == "none":
        out.append(f"checkpoint.upload.to={u.to}: nothing is sent there; set checkpoint.upload.exports (with "
                   "checkpoint.export_at_end) or checkpoint.upload.checkpoints")
    return out


def _launch(cfg):
    """Returns the problems of an incomplete description of the processes, and of limits that contradict each other."""
    c, out = cfg.launch, []
    if c.processes < 0 or c.process < -1:
        out.append(f"launch.processes={c.processes}, launch.process={c.process}: a count from 1 (0 = from the "
                   "environment) and a number from 0 (-1 = from the environment)")
    if 0 < c.wait_seconds < cfg.rollout.timeout_seconds:
        out.append(f"launch.wait_seconds={c.wait_seconds:g}: below "
                   f"rollout.timeout_seconds={cfg.rollout.timeout_seconds:g}, so that a slow rollout would be taken "
                   "for a lost process; raise it")
    return out


def _misc(cfg):
    out = []
    steps = cfg.profile.steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        out.append(f"profile.steps={steps}: expected (first, last)")
    if any(step < 0 for step in cfg.profile.memory):
        out.append(f"profile.memory={cfg.profile.memory}: numbers of steps, from 0")
    if any(p < 0 for p in cfg.profile.processes):
        out.append(f"profile.processes={cfg.profile.processes}: numbers of processes, from 0")
    if cfg.run.mode != "plan" and (missing := missing_logger(cfg)):
        out.append(missing)
    if unknown := set(cfg.run.accept_changed) - set(CHANGEABLE):
        out.append(f"run.accept_changed={cfg.run.accept_changed}: {', '.join(sorted(unknown))} unknown; choose from "
                   f"{', '.join(CHANGEABLE)}")
    there = "://" in cfg.run.resume or Path(cfg.run.resume).exists()
    if cfg.run.resume not in ("auto", "must", "never") and not there:
        out.append(f"run.resume={cfg.run.resume!r}: auto, must, never, or the path of a run or checkpoint that exists")
    return out
