"""Secrets of the source (api_key: sk-...), which no file of a migration holds: variables of the environment instead."""

from __future__ import annotations

import re
from typing import Any

from jaxrl.config.load import is_secret, redacted_text
from jaxrl.migrate.table import Migration


class Variable(str):
    """The name of a variable of the environment, whose repr is the Python expression of its value."""

    def __repr__(self) -> str:
        return f"os.environ[{str(self)!r}]"


def without_secrets(m: Migration, key: str, value: Any, file: str) -> Any:
    """Returns a value of the source, for a file beside the config, with a Variable for each text under the name of a
    secret, and "<redacted>" for secrets within other texts. The workers of env.function get the variables
    (env.variables); the user is asked to set them. key: the value's, dotted. file: name of the file."""
    name = re.split(r"[.:\s]+", key)[-1]
    if isinstance(value, dict):
        return {k: without_secrets(m, f"{key}.{k}", v, file) for k, v in value.items()}
    if isinstance(value, list) and not is_secret(name):
        return [without_secrets(m, key, v, file) for v in value]
    if value in (None, "") or isinstance(value, bool):
        return value
    if is_secret(name):
        variable = variable_of(str(value), name)
        known, keys = m.options.get("env.variables", ((), ()))
        m.options["env.variables"] = tuple(dict.fromkeys((*known, variable))), tuple(dict.fromkeys((*keys, key)))
        m.needs(f"{file}: {key} is a secret and not written down: set the variable {variable}, which the file reads")
        return Variable(variable)
    text = redacted_text(value, prose=True) if isinstance(value, str) else value
    if text != value:
        m.needs(f"{file}: {key} has a secret, which is left out of it: read it from a variable of the environment")
    return text


def variable_of(value: str, name: str) -> str:
    """Returns the variable that a value names as $NAME or ${NAME}, else one after its key's last part."""
    named = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", value)
    return named[1] if named else re.sub(r"\W", "_", name, flags=re.ASCII).upper()


def take_out(m: Migration) -> None:
    """Replaces options under names of secrets, in free tables (rollout.vllm.env.HF_TOKEN, user.api_key), by $NAME,
    which the config fills in when it is loaded, and asks the user to set NAME."""
    for option, (value, keys) in list(m.options.items()):
        def hide(node, name, option=option):
            if isinstance(node, dict):
                return {k: hide(v, str(k)) for k, v in node.items()}
            if not is_secret(name) or not isinstance(node, str) or not node or "$" in node:
                return node
            variable = variable_of(node, name)
            m.needs(f"{option}: a secret is not written into the config: set the variable {variable}")
            return f"${variable}"

        m.options[option] = (hide(value, option.rpartition(".")[2]), keys)
