"""Parent side of rewards that are called over HTTP: `remote`, `judge`, and those of the
tables reward.remotes and reward.judges.

Splits their options into what decides scores and where the services are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import ConfigError
from jaxrl.rewards import judge
from jaxrl.workers.sources import folder_digest

TABLES = {"remote": "remotes", "judge": "judges"}  # kind, also the name of the first service -> table of further ones
# Options that do not decide a score themselves; passed separately from those that do.
PLACE_OPTIONS = ("servers", "key_env", "cache", "prompt_file", "labelled", "min_agreement", "devices", "server_args")


class ServiceTable(NamedTuple):
    """Services by name.

    Attributes:
      options: name -> the options that decide scores, JSON-able; part of RewardPool.key().
      places: name -> {urls, key_env, cache}: location, variable of the key, folder of the judge's cache.
        They decide no score.
      env: environment variables that workers need for them.
    """

    options: dict[str, dict]
    places: dict[str, dict]
    env: dict[str, str]


class Server(NamedTuple):
    """A judge's server that this run started. url: its address. key: its API key, which workers get in an environment
    variable."""

    url: str
    key: str


def service_options(reward) -> dict[str, tuple[str, dict]]:
    """Returns name -> (kind, options) of every service that reward functions may name: "remote", "judge", and the
    entries of reward.remotes and reward.judges, whose options go before those of the first service of their kind.

    Args:
      reward: config.reward.
    """
    out = {}
    for kind, table in (("remote", reward.remotes), ("judge", reward.judges)):
        first = _plain(reward[kind])
        out[kind] = (kind, first)
        for name, own in table.items():
            out[name] = (kind, first | (_plain(own) if hasattr(own, "items") else {}))
    return out


def judges_to_serve(config, functions) -> dict[str, dict]:
    """Returns name -> options of the judges among these functions for which the run starts a server: those with a
    model and without servers. config: of the job. functions: names or specs."""
    return {name: o for name, (kind, o) in service_options(config.reward).items()
            if name in functions and kind == "judge" and o["model"] and not o["servers"]}


def find_services(config, functions, servers: dict[str, Server]) -> ServiceTable:
    """Returns the services among these functions.

    Args:
      config: options `reward.*` and run.dir. functions: names or specs.
      servers: servers this run started, by the name of their judge.

    Raises:
      ConfigError: a key's variable is not set, a prompt cannot be read, or a judge has no server.
    """
    table = ServiceTable({}, {}, {})
    for name, (kind, o) in service_options(config.reward).items():
        if name not in functions:
            continue
        place = {"key_env": o["key_env"], "cache": ""}
        shared = {option: value for option, value in o.items() if option not in PLACE_OPTIONS}
        if kind == "judge":
            shared |= {"prompt": judge_prompt(o), "digest": ""}
            if not o["show_images"]:  # the key of a job of text
                del shared["show_images"]
            place["cache"] = _cache(o["cache"], config.run.dir)
            if not o["servers"]:
                if name not in servers:
                    raise ConfigError(f"reward {name!r}: no server with {o['model']!r} was started; set its servers")
                shared["digest"] = folder_digest(o["model"])
                place |= {"urls": [servers[name].url], "key_env": f"JAXRL_KEY_OF_{name}"}
                table.env[place["key_env"]] = servers[name].key
        if o["servers"]:
            shared["servers"] = place["urls"] = list(o["servers"])
        if o["key_env"]:
            if not os.environ.get(o["key_env"]):
                raise ConfigError(f"reward {name!r}: key_env={o['key_env']!r}: this environment variable is not "
                                  "set; set it to the service's token, or leave key_env empty")
            table.env[o["key_env"]] = os.environ[o["key_env"]]
        table.options[name], table.places[name] = {"kind": kind} | shared, place
    return table


def judge_prompt(o: dict) -> str:
    """Returns the prompt of a judge with these options: the text of prompt_file, or the built-in one.

    Raises ConfigError if the file cannot be read."""
    if not o["prompt_file"]:
        return judge.PROMPT
    try:
        return Path(o["prompt_file"]).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"prompt_file={o['prompt_file']!r}: {e}") from None


def _cache(folder: str, run_dir: str) -> str:
    if folder == "auto":
        return str(Path(run_dir).absolute() / "judge") if run_dir and "://" not in run_dir else ""
    return str(Path(folder).expanduser().absolute()) if folder else ""


def _plain(table) -> dict:
    return {k: _plain(v) if hasattr(v, "items") else list(v) if isinstance(v, tuple) else v for k, v in table.items()}
