"""verl's optimizers and schedules, the policy's and the critic's: a joint rule of its table. See systems/verl.py."""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.systems.verl_engine import backend, since
from jaxrl.migrate.systems.verl_meaning import ACTOR, ALGO, CRITIC
from jaxrl.migrate.table import OPTIONS, Migration

MEGATRON = ("megatron", "mindspeed")  # engines with Megatron's optimizer
NAMES = {"adamw": "adamw", "adam": "adam", "sgd": "sgd"}  # of torch; Megatron's adam is AdamW


def optimizer(m: Migration):
    """Sets optimizer.lr, max_grad_norm and what `learning` returns; for gae critic.optimizer.* where it differs.

    Notes that verl's learning rate moves once per step if a step has several updates and the rate is not constant.
    """
    o = ACTOR + "optim."
    rate = m.number(o + "lr")
    m.set("optimizer.lr", rate, o + "lr")
    own_clip = clip_key(m, ACTOR)
    m.set("optimizer.max_grad_norm", float(m.number(own_clip)), own_clip)
    mine = learning(m, o, rate)
    for option, (value, keys) in mine.items():
        m.set(f"optimizer.{option}", value, *keys)
    warm, share = mine["warmup_steps"][0], mine.get("warmup_fraction", (0,))[0]
    m.facts["learning rate"] = f"{rate}, {mine['schedule'][0]}, warm-up " + (
        f"{share} of all updates" if share else f"{warm} updates"
    )
    if common.updates(m) > 1 and (warm or share or mine["schedule"][0] != "constant"):
        m.differs(
            "verl's learning rate moves once per step, here with every optimizer step: warm-up and decay end at the "
            "same place"
        )
    if m.text(ALGO + "adv_estimator") != "gae":
        return
    own_clip = clip_key(m, CRITIC)
    if m.number(own_clip) != m.options["optimizer.max_grad_norm"][0]:
        m.set("critic.optimizer.max_grad_norm", float(m.number(own_clip)), own_clip)
    own = learning(m, CRITIC + "optim.", m.number(CRITIC + "optim.lr"))
    for option in mine:  # the policy's alone
        own.setdefault(option, (OPTIONS()[f"optimizer.{option}"].default, (CRITIC + "optim.lr_warmup_steps_ratio",)))
    common.critics_optimizer(m, own)


def clip_key(m: Migration, owner: str) -> str:
    """Returns the key of the gradient clip that verl reads: OWNER.grad_clip before 0.8 but for Megatron's engines, else
    OWNER.optim.clip_grad. Marks the other one as without effect if the source sets it. owner: ACTOR or CRITIC."""
    plain, optim = owner + "grad_clip", owner + "optim.clip_grad"
    read, other = (optim, plain) if since(m, "0.8") or backend(m) in MEGATRON else (plain, optim)
    if m.given(other):
        m.mark(other, "inert", f"verl's {'engines read' if read == optim else 'workers of FSDP read'} {read}")
    return read


def learning(m: Migration, o: str, rate: float) -> dict[str, tuple]:
    """Returns what the keys of an optimizer's table `o` mean: option of `optimizer` -> (value, keys of the source).

    They are betas, schedule, warm-up, decay, floor, eps and name. rate: the learning rate; warmup_start and floor are
    fractions of it. verl's schedules count steps, jaxrl's optimizer steps: numbers are multiplied by those of a step.
    An unknown schedule or optimizer is recorded as not carried over, and becomes constant or AdamW. Raises Unreadable
    for a first or last learning rate above `rate`.
    """
    per, engine = common.updates(m), backend(m)
    mega = engine in MEGATRON
    betas = m.list(o + "betas")
    out: dict[str, tuple] = {"b1": (float(betas[0]), (o + "betas",)), "b2": (float(betas[1]), (o + "betas",))}
    shape = o + ("lr_decay_style" if mega else "warmup_style" if m[o + "warmup_style"] else "lr_scheduler_type")
    shape = o + "decay_type" if engine == "torchtitan" else shape
    kind = m.text(shape) or "constant"
    if engine == "veomni" and not m.given(shape):
        kind = "cosine"
    if kind not in common.SCHEDULES:
        m.lacks(shape, f"of schedules there are constant, linear, cosine and wsd, not {kind!r}")
        kind = "constant"
    out["schedule"] = (common.SCHEDULES[kind], (shape, *(("model_engine",) if engine == "veomni" else ())))
    steps, share = m.number(o + "lr_warmup_steps"), m.number(o + "lr_warmup_steps_ratio") or 0.0
    decay = m.integer(o + "lr_decay_steps") if mega else None
    keys = (o + "lr_warmup_steps",)
    if engine == "veomni":
        m.mark(o + "lr_warmup_steps", "inert", "VeOmni's schedule reads lr_warmup_steps_ratio")
        steps = None
    if steps is None or steps < 0 or (mega or since(m, "0.8")) and not steps:
        steps, keys = 0, (o + "lr_warmup_steps_ratio",)
        if share and decay:
            steps, keys = int(share * decay), (*keys, o + "lr_decay_steps")
        elif share:
            out["warmup_fraction"] = (share, keys)
    out["warmup_steps"] = (int(steps) * per, keys)
    rates = {"veomni": ("lr_start", "lr_min")}.get(engine, ("lr_warmup_init", "min_lr") if mega else ())
    for option, key in zip(("warmup_start", "floor"), rates, strict=False):
        value = m.number(o + key) or 0.0
        if value > rate:
            raise m.wrong(o + key, f"at most the learning rate, {rate:g}")
        out[option] = (value / rate if rate else 0.0, (o + key,))
    if decay:
        out["decay_steps"] = (max(decay - int(steps), 1) * per, (o + "lr_decay_steps",))
    if engine == "veomni" and m.number(o + "lr_decay_ratio") != 1:
        m.lacks(o + "lr_decay_ratio", "a schedule falls until the end; optimizer.decay_steps counts updates")
    if not rates:
        floor = o + ("min_lr_factor" if engine == "torchtitan" else "min_lr_ratio")
        out["floor"] = (m.number(floor) or 0.0, (floor,))
    if engine == "torchtitan":
        out["eps"] = (m.number(o + "eps"), (o + "eps",))
    return {**out, **_named(m, o, mega, out)}


def _named(m: Migration, o: str, mega: bool, out: dict) -> dict[str, tuple]:
    """Which optimizer it is; Megatron's SGD has a momentum of 0.9, torch's none."""
    key = o + ("name" if backend(m) == "torchtitan" else "optimizer")
    small = ("adamw8bit", "_adamw", "adamw4bit", "adamwfp8", "pagedadamw8bit")
    text = m.text(key).lower() or "adamw"
    name = "adamw" if mega and text == "adam" or text in small else NAMES.get(text)
    if text in small:
        m.lacks(key, "AdamW's moments are in fp32; optimizer.name takes an optax factory of your own")
    elif name is None:
        m.lacks(key, f"{m.text(key)!r} is none of AdamW, Adam and SGD; optimizer.name takes an optax factory")
    found: dict[str, tuple] = {"name": (name or "adamw", (key,))}
    if name in ("adam", "sgd") and m.number(o + "weight_decay"):
        m.lacks(o + "weight_decay", f"{name} has no weight decay here; optimizer.name=adamw has")
    if name == "sgd":
        found["b1"] = (0.9 if mega else 0.0, (key,))
        m.mark(o + "betas", "inert", "of another optimizer")
    return found


def offloaded_state(m: Migration, override: str):
    """Sets optimizer.offload=True if Megatron's optimizer is on the host, be it a part of it; here it is all of it.

    override: the table of its options, with a dot. An offload fraction of 0 sets nothing.
    """
    on, share = override + "optimizer_cpu_offload", override + "optimizer_offload_fraction"
    if m.flag(on) and m.number(share):
        m.set("optimizer.offload", True, on, share)
