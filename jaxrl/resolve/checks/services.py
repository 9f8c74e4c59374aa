"""Checks of what a config needs beside itself: rewards over HTTP (reward.remote, reward.judge), a logger's package."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path
from urllib.parse import urlsplit

from jaxrl.config.option import BOUNDS, not_chosen
from jaxrl.config.schema import options
from jaxrl.errors import ConfigError
from jaxrl.resolve.checks.unread import is_set, unread
from jaxrl.rewards.builtin import registered_rewards
from jaxrl.rewards.judge import unknown_names
from jaxrl.rewards.services import TABLES, judge_prompt, service_options


def services(cfg) -> list[str]:
    """Returns the problems of reward services: field, value, remedy.

    They are those of entries of reward.remotes and reward.judges alone, if there are any; else those of each service,
    or that no reward function names it.
    """
    out = [problem for kind, table in TABLES.items() for name, own in cfg.reward[table].items()
           for problem in _entry(kind, f"reward.{table}.{name}", name, own, cfg)]
    if out:
        return out
    named = {*cfg.reward.functions, *cfg.eval.rewards}
    for name, (kind, o) in service_options(cfg.reward).items():
        where = f"reward.{kind}" if name == kind else f"reward.{TABLES[kind]}.{name}"
        if name in named:
            value_of = lambda option, o=o: o[option.rpartition(".")[2]]  # noqa: E731
            problems = unread(cfg, (f"reward.{kind}.",), value_of)
            out += [p.replace(f"reward.{kind}.", f"{where}.") for p in problems]
            out += (_remote if kind == "remote" else _judge)(where, o) + _common(where, o)
            if cfg.reward.executor == "ray" and kind == "judge" and not o["servers"]:
                out.append(f"{where}.servers is empty with reward.executor=ray: a server of the run's own answers on "
                           "this host alone; start one that the cluster's hosts reach and name it there, or set "
                           "reward.executor=local")
        else:
            out += _unused(cfg, kind, where, name)
    return out


def _entry(kind, where, name, own, cfg) -> list[str]:
    """Returns the problems of one entry of reward.remotes or reward.judges."""
    taken = (*registered_rewards(), *TABLES)
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in taken:
        return [f"{where}: {name!r} cannot be its name; take letters, digits and '_', and none of "
                f"{', '.join(taken)}"]
    if name in cfg.reward.remotes and name in cfg.reward.judges:
        return [f"{where}: reward.remotes and reward.judges both have {name!r}; give one of them another name"]
    if not hasattr(own, "items"):
        return [f"{where}={own!r}: must be a table of options of reward.{kind}"]
    out = []
    for key, value in own.items():
        option = options().get(f"reward.{kind}.{key}")
        if option is None:
            known = [n.rpartition(".")[2] for n in options() if n.startswith(f"reward.{kind}.")]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            out.append(f"{where}.{key}: unknown; {hint}it has {', '.join(known)}")
        elif wrong := _wrong(option, value):
            out.append(f"{where}.{key}={value!r}: {wrong}")
    return out


def _wrong(option, value) -> str:
    """Returns the problem of a value in a table, which is not typed as an option is."""
    kind = option.kind or type(option.default)
    if value is None and option.default is None:
        return ""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    kinds = (list, tuple) if kind is tuple else kind
    if kind is not dict and not isinstance(value, kinds) or isinstance(value, bool) and kind is not bool:
        return f"must be {'a list' if kind is tuple else kind.__name__}"
    if wrong := not_chosen(option, value):
        return wrong
    if option.bound and not BOUNDS[option.bound][0](value):
        return BOUNDS[option.bound][1]
    return ""


def _unused(cfg, kind, where, name) -> list[str]:
    """Returns the options of a reward that no function names. (Options of reward.remote may
    be meant for reward.remotes.)
    """
    remedy = f"add {name} to reward.functions, or leave it out"
    if name != kind:
        return [f"{where}: no reward of that name is asked for; {remedy}"]
    if cfg.reward[TABLES[kind]]:
        return []
    used = [key for key, value in cfg.reward[kind].items() if is_set(options()[f"{where}.{key}"], value)]
    values = cfg.reward[kind].to_dict()
    shown = ", ".join(f"{where}.{key}={values[key]!r}" for key in used)
    have = "has" if len(used) == 1 else "have"
    whole = f"all at once: --config.{where}={{}}"
    return [f"{shown} {have} no effect without the reward {name}; {remedy} ({whole})"] * bool(used)


def _common(where, o) -> list[str]:
    out = []
    if o["key_env"] and not re.fullmatch(r"[A-Za-z_]\w*", o["key_env"]):
        out.append(f"{where}.key_env: it is no name of a variable; give the name only, the token comes from this "
                   "process's environment")
    urls = [("servers", url) for url in o["servers"]] + [("fetch_url", url) for url in (o.get("fetch_url"),) if url]
    return out + [f"{where}.{f}: {why}" for f, url in urls if (why := _bad_url(url))]


def _bad_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises for what is none)
    except ValueError as e:
        return f"{url!r} is no URL: {e}"
    if parts.username is not None:
        return "a URL holds a user or password; put the secret into an environment variable and name that in key_env"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment or " " in url:
        return f"{url!r} is no http:// or https:// URL"
    return ""


def _remote(where, o) -> list[str]:
    out, kind = [], o["format"]
    if not o["servers"]:
        out.append(f"{where}.servers is empty: name the service, --config.{where}.servers=http://host:8000")
    keys = [key for key in o["score_key"].split("+") if key.strip()]
    count = len(o["functions"]) if kind == "cosmos" else max(1, len(keys))
    if kind == "cosmos" and not o["functions"]:
        out.append(f"{where}.functions is empty: name the functions of the service, e.g. dance_grpo")
    if kind == "cosmos" and not o["fetch_url"] and any(not urlsplit(u).path.strip("/").endswith("enqueue")
                                                       for u in o["servers"] if urlsplit(u).path.strip("/")):
        out.append(f"{where}.servers={tuple(o['servers'])}: not all of them end in enqueue; say in fetch_url where "
                   "scores are polled")
    if kind in ("classify", "pooling") and (len(keys) > 1 or keys and not keys[0].strip().isdigit()):
        out.append(f"{where}.score_key={o['score_key']!r}: with format={kind} it is the number of one label, or empty")
    if kind == "areal" and len(keys) > 1:
        out.append(f"{where}.score_key={o['score_key']!r}: with format=areal it is one key")
    if o["weights"] and len(o["weights"]) != count:
        what = "functions" if kind == "cosmos" else "keys of score_key"
        out.append(f"{where}.weights={tuple(o['weights'])}: {len(o['weights'])} weights for {count} {what}")
    for low, high in (("part_min", "part_max"), ("clip_min", "clip_max")):
        if o[low] is not None and o[high] is not None and o[low] >= o[high]:
            out.append(f"{where}.{low}={o[low]:g} is not below {high}={o[high]:g}")
    return out


def _judge(where, o) -> list[str]:
    out = []
    if not o["model"]:
        out.append(f"{where}.model is empty: name the model at {where}.servers, or the folder of one that a server of "
                   "the run's own loads")
    try:
        if re.compile(o["pattern"]).groups < 1:
            out.append(f"{where}.pattern={o['pattern']!r} has no group: put the score into parentheses")
    except re.error as e:
        out.append(f"{where}.pattern={o['pattern']!r} is no regex: {e}")
    if o["lowest"] >= o["highest"]:
        out.append(f"{where}.lowest={o['lowest']:g} is not below highest={o['highest']:g}")
    if taken := [key for key in o["extra"] if key in ("messages", "model", "stream", "n")]:
        out.append(f"{where}.extra.{taken[0]}: jaxrl says it; leave it out")
    if o["labelled"] and not Path(o["labelled"]).expanduser().is_file():
        out.append(f"{where}.labelled={o['labelled']!r}: no such file")
    if o["labelled"] and o["show_images"]:
        out.append(f"{where}.labelled={o['labelled']!r} with {where}.show_images: labelled rows are judged by their "
                   "text; leave one of them out")
    return out + _prompt(where, o)


def _prompt(where, o) -> list[str]:
    try:
        text = judge_prompt(o)
    except ConfigError as e:
        return [f"{where}.{e}"]
    if unknown := unknown_names(text):
        return [f"{where}.prompt_file={o['prompt_file']!r}: {{{unknown[0]}}} is no placeholder; a brace is written "
                "twice"]
    if "{completion}" not in text:
        return [f"{where}.prompt_file={o['prompt_file']!r} has no {{completion}}: the judge would not see what it "
                "judges"]
    if "{rubric}" not in text and (o["rubric"] or o["rubric_column"]):
        return [f"{where}.rubric={o['rubric']!r}, rubric_column={o['rubric_column']!r}: the prompt has no "
                "{rubric}"]
    return []


def missing_logger(cfg) -> str:
    """Returns the problem that a run of this config has and a plan does not: a logger whose package is
    not installed; or "".
    """
    if not cfg.log.wandb or importlib.util.find_spec("wandb") is not None:
        return ""
    return ("log.wandb=True: the package wandb is not installed; pip install 'jaxrl[wandb]', or set "
            "log.wandb=false")
