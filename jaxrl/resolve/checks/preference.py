"""Checks of the options below `preference` against each other and against what stands beside them."""

from __future__ import annotations

from jaxrl.algorithms.preference import LOSSES, needs_reference
from jaxrl.config.option import no_effect
from jaxrl.config.registry import recipe_of


def learns(cfg) -> bool:
    """Returns whether the recipe has pairs and a reference, as `preference`, and unlike `reward_model`."""
    return recipe_of(cfg).pairs and "reference" in recipe_of(cfg).roles


def preference(cfg) -> list[str]:
    """Returns the problems of everything below `preference`, and of other groups with it. [] for jobs that do not learn
    from preferences."""
    p = cfg.preference
    if not learns(cfg):
        return []
    if not p.loss:
        return ["preference.loss is empty: name a loss, for example dpo"]
    return [*_losses(p), *_beside(cfg, p)]


def _losses(p):
    out = []
    if len(set(p.loss)) < len(p.loss):
        out.append(f"preference.loss={', '.join(p.loss)}: a loss is named twice; give it a weight in "
                   "preference.loss_weights")
    if p.loss_weights and len(p.loss_weights) != len(p.loss):
        out.append(f"preference.loss_weights={p.loss_weights}: {len(p.loss_weights)} weights for {len(p.loss)} losses")
    if p.label_smoothing >= 0.5:
        out.append(f"preference.label_smoothing={p.label_smoothing}: must be below 0.5, where labels say nothing")
    for name in p.loss:
        if (needs := LOSSES[name].needs) and not p[needs]:
            out.append(f"preference.loss={name} compares with labels that are right with probability 1 - {needs}: set "
                       f"preference.{needs}, for example 0.001")
    if p.rpo_alpha and "nll" in p.loss:
        out.append(f"preference.rpo_alpha={p.rpo_alpha} is a weight of nll, which preference.loss names, too; give it "
                   "one weight")
    return out


def _beside(cfg, p):
    out, r = [], cfg.reference
    moving = [f"reference.{name}" for name in ("reset_steps", "reset_epochs", "reset_optimizer") if r[name]]
    if moving:
        out.append(f"{', '.join(moving)}: the sums of a reference are computed once; leave it out")
    if not needs_reference(p):
        named = f"with preference.loss={', '.join(p.loss)}, which needs no reference"
        out += [no_effect(f"reference.{name}", r[name], named, "leave it out") for name in ("path", "revision")
                if r[name]]
        if "reference" in cfg.mesh.roles:
            out.append(f"mesh.roles.reference: there is none {named}; leave it out")
    if "kto" in p.loss and cfg.data.prompts_per_step < 2:
        out.append(f"data.prompts_per_step={cfg.data.prompts_per_step}: kto compares with answers to other prompts of "
                   "the step; set 2 or more")
    if cfg.data.train_turns != "last":
        out.append(f"data.train_turns={cfg.data.train_turns}: a pair is one answer against another; set last")
    return out
