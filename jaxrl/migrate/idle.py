"""Options of a migration that its schedule, optimizer or adapter does not read, which jaxrl would refuse."""

from __future__ import annotations

import re

from jaxrl.config.schema import options

WITHOUT_DECAY = ("adam", "sgd")
OF_A_DECAY = ("floor", "decay_steps", "decay_shape")


def take_out_idle(m) -> None:
    """Takes out what the schedules and optimizers of policy and critic do not read, and what the folder of an adapter
    says itself. Weight decay beside Adam or SGD, which have it in the source, is recorded as not carried over.

    m: the Migration."""
    if "lora.path" in m.options:
        for option in [name for name in m.options if name in options() and "not lora.path" in options()[name].needs]:
            del m.options[option]
    for prefix in ("", "critic."):
        name, schedule = _chosen(m, prefix, "name"), _chosen(m, prefix, "schedule")
        idle = [option for option in OF_A_DECAY if schedule == "constant"]
        idle += [option for option in ("b1", "b2", "eps", "weight_decay") if name not in _readers(option)]
        decay, keys = m.options.get(f"{prefix}optimizer.weight_decay", (0, ()))
        if name in WITHOUT_DECAY and decay:
            idle.append("weight_decay")
            if not any(key in keys for key, *_ in m.lacking):
                m.lacks(keys[-1], f"{name} has no weight decay here; optimizer.name=adamw has")
        for option in idle:
            taken = m.options.pop(f"{prefix}optimizer.{option}", None)
            if taken and not prefix and "critic.optimizer.name" in m.options:  # whose optimizer may read it
                m.options.setdefault(f"critic.optimizer.{option}", taken)


def _chosen(m, prefix: str, option: str):
    """Returns the value of an option of policy ("") or critic ("critic."), which has the policy's where it has none."""
    default = (options()[f"optimizer.{option}"].default,)
    return m.options.get(f"{prefix}optimizer.{option}", m.options.get(f"optimizer.{option}", default))[0]


def _readers(option: str) -> list[str]:
    """Returns the optimizers that read an option of `optimizer`."""
    found = re.search(r"optimizer\.name=([\w|]+)", options()[f"optimizer.{option}"].needs)
    return found[1].split("|") if found else []
