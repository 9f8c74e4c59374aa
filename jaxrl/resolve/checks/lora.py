"""Checks of the options below `lora`, among each other and with the rest of the config."""

from __future__ import annotations

from jaxrl.algorithms.preference import needs_reference
from jaxrl.config.load import get
from jaxrl.config.registry import recipe_of
from jaxrl.config.schema import SCHEMA
from jaxrl.errors import ConfigError
from jaxrl.models.adapters import peft
from jaxrl.models.adapters.initialization import NAMES as INITS
from jaxrl.models.adapters.initialization import is_init, is_shifted
from jaxrl.models.adapters.selection import table
from jaxrl.resolve.checks.adapters import several_adapters
from jaxrl.resolve.spec import adapters_option, lora_on
from jaxrl.rollout.engines import engine_row
from jaxrl.rollout.vllm.adapter_folders import configured_rank
from jaxrl.rollout.vllm.options import LORA_RANKS

SERVED = ("rl", "sft", "preference", "distill")
DROPS = ("sft",)  # recipes that neither sample nor compare with an earlier score


def lora(cfg) -> list[str]:
    """Returns the problems of everything below `lora`, and of options that do not work with it; [] without adapters."""
    if not lora_on(cfg):
        return []
    out = []
    if not is_init(cfg.lora.init):
        out.append(f"lora.init={cfg.lora.init!r}: choose {', '.join(INITS)}")
    if cfg.lora.dora and is_shifted(cfg.lora.init):
        out.append(f"lora.dora=True with lora.init={cfg.lora.init}: the lengths are those of the base, of which the "
                   "adapter would be a part; choose another init")
    if cfg.lora.dora and cfg.lora.dropout:
        out.append(f"lora.dora=True with lora.dropout={cfg.lora.dropout}: what is dropped would change the lengths; "
                   "leave one of them out")
    for name in ("trainable", "frozen"):
        if tuple(cfg.model[name]) != SCHEMA["model"][name].default:
            out.append(f"model.{name}={cfg.model[name]} with {adapters_option(cfg)}: adapters train and nothing "
                       "else; choose their modules with lora.targets, and whole ones with lora.modules_to_save")
    if cfg.lora.dropout and cfg.run.recipe not in DROPS:
        out.append(f"lora.dropout={cfg.lora.dropout} with run.recipe={cfg.run.recipe}: what is scored or sampled would "
                   "be another policy than the one that is updated; set 0")
    out += _start(cfg.lora) + (_apart(cfg) if cfg.lora.publish == "adapter" and recipe_of(cfg).samples else [])
    if "reference" in cfg.mesh.roles and not cfg.reference.path:
        out.append("mesh.roles.reference with adapters: the reference is the policy's own base and lies with it; leave "
                   "it out, or name another one with reference.path")
    if cfg.reference.path and (cfg.reference.reset_steps or cfg.reference.reset_epochs):
        out.append(f"reference.path={cfg.reference.path!r} with reference.reset_steps or reset_epochs and adapters: "
                   "what it is reset to lies on the policy's base; leave one of them out")
    begins = [name for name in ("path", "modules_to_save") if get(cfg.lora, name)]
    if cfg.run.recipe == "preference" and needs_reference(cfg.preference) and begins and not cfg.reference.path:
        out.append(f"lora.{begins[0]}={get(cfg.lora, begins[0])!r} with run.recipe=preference: the reference would be "
                   "the base, from which the policy then differs; name one with reference.path, or leave it out")
    if cfg.run.recipe not in SERVED and ":" not in cfg.run.recipe:
        out.append(f"{adapters_option(cfg)} with run.recipe={cfg.run.recipe}: adapters train in "
                   f"{', '.join(SERVED)}; leave lora.* out")
    if cfg.lora.adapters:
        out += several_adapters(cfg)
    return out


def _start(o) -> list[str]:
    """Patterns and inits."""
    try:
        ranks = table("rank_pattern", o.rank_pattern, int)
        table("alpha_pattern", o.alpha_pattern, float)
        peft.check_written(o)
    except ConfigError as e:
        return [str(e)]
    own = [options["rank"] for options in o.adapters.values() if hasattr(options, "keys") and "rank" in options]
    if o.init == "orthogonal" and (odd := [r for r in (o.rank, *ranks.values(), *own) if r % 2]):
        return [f"lora.init=orthogonal with the odd rank {odd[0]} (lora.rank, lora.rank_pattern): set an even one"]
    if not o.targets:
        return ["lora.targets is empty: name modules, or all-linear"]
    return []


def _apart(cfg) -> list[str]:
    """Returns the problems of adapters that vLLM cannot serve separately from their base."""
    row, out = engine_row(cfg), []
    if row.on_mesh or not row.servers:
        return out
    if cfg.rollout.partial:
        out.append("lora.publish=adapter with rollout.partial=True: completions under way would go on with the adapter "
                   "that they began with; set lora.publish=merged, or rollout.partial=False")
    if cfg.lora.modules_to_save:
        out.append(f"lora.publish=adapter with lora.modules_to_save={cfg.lora.modules_to_save}: {row.title} serves no "
                   "modules that were trained whole; set lora.publish=merged")
    if cfg.lora.dora:
        out.append(f"lora.publish=adapter with lora.dora=True: {row.title} serves no DoRA; set lora.publish=merged")
    if cfg.lora.base != "none":
        out.append(f"lora.publish=adapter with lora.base={cfg.lora.base}: {row.title} would hold another base than the "
                   "one that the adapter is trained on; set lora.publish=merged")
    try:
        rank = configured_rank(cfg.lora)
    except ConfigError as e:
        return [*out, str(e)]
    if not rank:
        twice = " (twice that of training with this lora.init)" if is_shifted(cfg.lora.init) else ""
        out.append(f"lora.publish=adapter with {adapters_option(cfg)}: {row.title} serves adapters up to rank "
                   f"{LORA_RANKS[-1]}{twice}; set lora.publish=merged, or a lower rank")
    return out
