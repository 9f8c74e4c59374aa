"""What the tables of Tunix's optimizers mean: optax's schedules and AdamW. See systems/tunix.py."""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.systems.tunix_meaning import OPT, OPTAX, PPO, VALUE, algorithm, rate, whole_updates
from jaxrl.migrate.table import Migration

PEAKS = {  # optax's schedules that are read -> the key of the highest rate
    "": "learning_rate",
    "constant_schedule": "value",
    "warmup_constant_schedule": "peak_value",
    "warmup_cosine_decay_schedule": "peak_value",
    "cosine_decay_schedule": "init_value",
    "linear_schedule": "init_value",
}


def _rate(m: Migration, place: str) -> dict[str, tuple]:
    """Returns option -> (value, its keys) of an optimizer's table."""
    kind = str(rate(m, place, "schedule_type") or "")
    key = place + PEAKS.get(kind, "peak_value")
    peak = rate(m, place, PEAKS.get(kind, "peak_value"))
    if kind not in PEAKS:
        m.lacks(
            place + "schedule_type",
            f"{kind}: of optax's schedules {', '.join(filter(None, PEAKS))} are read",
            refuse=True,
        )
        peak = peak or 3e-5
    elif not isinstance(peak, int | float) or peak <= 0:
        m.lacks(key, f"{peak or 'not set'}: {kind or 'the optimizer'} needs a rate above 0 there", refuse=True)
        peak = 3e-5
    out: dict[str, tuple] = {"lr": (float(peak), key, place + "schedule_type")}
    for name in ("b1", "b2", "eps", "weight_decay"):
        value = rate(m, place, name)
        out[name] = (OPTAX[name] if value is None else float(value), place + name)
    return out | _shape(m, place, kind, float(peak))


def _shape(m: Migration, place: str, kind: str, peak: float) -> dict[str, tuple]:
    """Returns what a schedule of optax does with its rate: option -> (value, its keys)."""
    still = {"schedule": ("constant", place + "schedule_type"), "warmup_steps": (0, place + "warmup_steps")}
    if kind in ("", "constant_schedule") or kind not in PEAKS:
        return still
    updates = whole_updates(m)
    length, warm = int(rate(m, place, "decay_steps") or updates), int(rate(m, place, "warmup_steps") or updates // 10)
    first, last = float(rate(m, place, "init_value") or 0), float(rate(m, place, "end_value") or 0)
    start = {"warmup_start": (first / peak, place + "init_value")} if first or place == VALUE else {}
    if kind == "warmup_constant_schedule":
        return still | {"warmup_steps": (warm, place + "warmup_steps")} | start
    if kind == "linear_schedule":
        length = int(rate(m, place, "transition_steps") or 0)
        if length < 1 or rate(m, place, "transition_begin"):
            m.lacks(place + "transition_steps", "a decay of so many updates, from the first one on", refuse=True)
        linear = ("linear", place + "schedule_type")
        end = {"decay_steps": (max(length, 1), place + "transition_steps"), "floor": (last / peak, place + "end_value")}
        return still | {"schedule": linear} | end
    cosine = {"schedule": ("cosine", place + "schedule_type")}
    if (rate(m, place, "exponent") or 1) != 1:
        m.lacks(place + "exponent", "a cosine to the power of 1")
    if kind == "cosine_decay_schedule":
        floor = float(rate(m, place, "alpha") or 0), place + "alpha"
        return still | cosine | {"decay_steps": (length, place + "decay_steps"), "floor": floor}
    out = cosine | start | {"floor": (last / peak, place + "end_value")}
    out["warmup_steps"] = (warm, place + "warmup_steps")
    if not length:  # over all of a run whose length the rows decide
        return out | {"warmup_steps": (0, place + "warmup_steps"), "warmup_fraction": (0.1, place + "warmup_steps")}
    if length <= warm:
        m.lacks(place + "decay_steps", f"{length}: the warm-up has {warm}, and optax needs more", refuse=True)
    return out | {"decay_steps": (max(length - warm, 1), place + "decay_steps", place + "warmup_steps")}


def kind_of_optimizer(m: Migration):
    """Records opt_type as not carried over if it is another than AdamW."""
    kind = rate(m, OPT, "opt_type")
    if str(kind or "adamw").lower() != "adamw":
        m.lacks(OPT + "opt_type", f"{kind}: the optimizer is AdamW")


def optimizer(m: Migration):
    """Sets optimizer.* by the actor's table: lr, schedule, warm-up, decay, b1, b2, eps, weight_decay; max_grad_norm is
    0. A schedule that is not read, and one without a rate above 0, refuses the job; another optimizer is not carried
    over."""
    kind_of_optimizer(m)
    for option, (value, *keys) in _rate(m, OPT).items():
        m.set(f"optimizer.{option}", value, *keys)
    m.set("optimizer.max_grad_norm", 0.0, OPT + "opt_type")
    o = m.options
    share = o.get("optimizer.warmup_fraction", (0,))[0]
    warm = f"{share} of all" if share else o["optimizer.warmup_steps"][0]
    m.facts["learning rate"] = f"{o['optimizer.lr'][0]}, {o['optimizer.schedule'][0]}, warm-up {warm} updates"


def critics_optimizer(m: Migration):
    """Sets critic.lr and, where they are not the policy's, critic.optimizer.* by PPO's critic_optimizer_config; without
    its keys the user is asked for critic.lr. For the other algorithms its keys are inert."""
    given = [s.key for s in m.singles.values() if s.key.startswith(VALUE)]
    if algorithm(m) != PPO:
        for key in given:
            m.mark(key, "inert", "GRPO has no critic")
        return
    if not given:
        m.needs("critic.lr: critic_optimizer_config is not set, and a critic needs an optimizer there")
        return
    theirs = {option: (value, tuple(keys)) for option, (value, *keys) in _rate(m, VALUE).items()}
    lr, keys = theirs.pop("lr")
    m.set("critic.lr", lr, *keys)
    common.critics_optimizer(m, theirs)
