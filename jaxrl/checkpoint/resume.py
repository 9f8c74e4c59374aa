"""Table of the options that may change when a run resumes from a checkpoint.

PAST: the content of the checkpoint (parameters, optimizer state, place in the data) depends on the value with which it
was written. A change is refused. FUTURE: only later steps depend on the value. A change is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from jaxrl.config.load import options

# An entry is an option (a table with all its keys), or a group followed by ".*"; the longest that fits decides. Entries of
# data.sources.<name> are of every source.
FUTURE: tuple[str, ...] = (
    # how and where it runs
    "run.mode", "run.dir", "run.resume", "run.accept_changed", "run.stop_seconds",
    "run.compile_cache", "run.compile_cache_gb", "run.deterministic", "run.matmul_precision",
    "mesh.*", "launch.*", "plan.*", "profile.*", "faults.*", "log.*", "record.*", "replay.*", "fork.*", "certify.*",
    "checkpoint.*", "user.*",
    # how the model is computed, not what it is
    "model.remat", "model.remat_every", "model.attention", "model.ring_attention", "model.experts", "model.recurrence",
    "model.trust_remote_code",
    # how rows are fetched, and how far the run goes through them
    "data.prompts_per_step", "data.epochs", "data.workers", "data.prefetch", "data.cache", "data.bad_rows",
    # what is learnt from a source's rows, which stay the same
    "data.sources.<name>.algorithm", "data.sources.<name>.coef", "data.sources.<name>.rewards",
    # sampling, scoring and learning from here on
    "rollout.*", "env.*", "sandbox.*", "reward.*", "algorithm.*", "preference.*", "eval.*", "reference.*", "critic.*", "distill.*",
    "teacher.*", "lora.dropout", "lora.publish", "lora.export",
    "optimizer.lr", "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.weight_decay",
    "optimizer.max_grad_norm", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.warmup_fraction",
    "optimizer.warmup_start",
    "optimizer.decay_steps", "optimizer.decay_shape", "optimizer.floor", "optimizer.max_nonfinite", "optimizer.offload",
    "optimizer.layer_decay",
    "train.*", "reward_model.center",
)
PAST: dict[str, str] = {
    "run.recipe": "the state of another job does not fit",
    "run.seed": "every random stream starts from it",
    "run.warm_start": "the parameters began there",
    "model.*": "it decides the parameters, their names or how text becomes tokens",
    "lora.*": "it decides which parameters train, their names and their scale",
    "data.*": "it decides which rows there are and in which order, so the place in the data would mean other rows",
    "env.tools": "prompts describe them, and so they decide which prompts are too long",
    "env.mcp": "prompts describe its tools, and so they decide which prompts are too long",
    "reference.path": "the KL term would pull towards another model",
    "reference.revision": "the KL term would pull towards another model",
    "teacher.path": "the student was trained towards another model",
    "teacher.revision": "the student was trained towards another model",
    "critic.path": "the critic's parameters began there",
    "critic.revision": "the critic's parameters began there",
    "critic.shared": "the value head is stored elsewhere",
    "optimizer.name": "its state has another form",
    "optimizer.groups": "its state may have another form",
    "train.param_dtype": "the parameters are stored in it",
    "train.loss_on_prompt": "the loss would mean another thing",
    "reward_model.*": "it decides the rows and what their scores mean",
    "critic.head": "the critic's parameters began there",
}


def refusal_reason(name: str) -> str | None:
    """Returns why a change of this option is refused on resume; None if it is accepted. Raises KeyError for an
    unclassified option."""
    parts = name.split(".")
    if parts[:2] == ["data", "sources"]:
        parts[2:3] = ["<name>"]
    for n in range(len(parts), 0, -1):
        prefix = ".".join(parts[:n])
        for entry in (prefix, prefix + ".*"):
            if entry in PAST:
                return PAST[entry]
            if entry in FUTURE:
                return None
    raise KeyError(name)


def config_changes(old: dict, new: dict) -> tuple[list[str], list[str]]:
    """Compares two configs (plain dicts, as `redacted` returns them).

    Options that one side lacks (another version of jaxrl) are compared with the schema's default; those that this jaxrl
    does not have are accepted. `refusal_reason` says which changes are refused; that of data.prompts_per_step is, too,
    where rows depend on the step (`scheduled`).

    Returns:
      (refused, accepted_changes): one text per option that differs, "optimizer.lr: 1e-06 -> 1e-05", with the reason if
      it is refused."""
    before, after = _flat(old), _flat(new)
    defaults = {name: _plain(opt.default) for name, opt in options().items()}
    refused, accepted_changes = [], []
    for name in sorted(before.keys() | after.keys()):
        a, b = before.get(name, defaults.get(name)), after.get(name, defaults.get(name))
        if a == b:
            continue
        text = f"{name}: {a!r} -> {b!r}"
        try:
            why = refusal_reason(name)
            if name == "data.prompts_per_step" and (which := scheduled(new.get("data", {}))):
                why = f"{which} changes with the step, so the place in the data would mean other rows"
        except KeyError:
            accepted_changes.append(f"{text} (not an option of this jaxrl; ignored)")
            continue
        if why:
            refused.append(f"{text} ({why})")
        else:
            accepted_changes.append(text)
    return refused, accepted_changes


# Entry of run.accept_changed -> beginnings of the names of its fingerprints (jaxrl.checkpoint.fingerprints).
READ = {"data": ("training data", "training examples"), "eval": ("eval set ",), "tokenizer": ("tokenizer", "chat template"),
        "model": ("model config",), "reference": ("weights of the reference",), "teacher": ("weights of the teacher",)}


def input_changes(old: dict, new: dict, accepted=(), changes: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Compares the fingerprints of inputs (name -> hash) with a checkpoint's. Names that only one side has are not
    compared.

    Args:
      old, new: of the checkpoint, and of this run.
      accepted: run.accept_changed.
      changes: accepted option changes (texts of config_changes); if eval.sets or eval.max_rows is among them, changed
        eval sets are accepted.

    Returns:
      (refused, accepted_changes), one text each."""
    refused, accepted_changes = [], []
    other_sets = any(text.startswith(("eval.sets:", "eval.max_rows:")) for text in changes)
    for name in sorted(old.keys() & new.keys()):
        if old[name] == new[name]:
            continue
        entry = next(entry for entry, begins in READ.items() if name.startswith(begins))
        text = f"{name}: {old[name]} -> {new[name]}"
        if entry in accepted or (entry == "eval" and other_sets):
            accepted_changes.append(text)
        else:
            refused.append(f"{text} (run.accept_changed={entry} accepts it)")
    return refused, accepted_changes


def _flat(node: dict) -> dict[str, Any]:
    return {name: _plain(value) for name, value in flatten_dict(node, sep=".").items()}


def _plain(value):
    """Tuples as JSON gives them back."""
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def scheduled(data: dict) -> str:
    """Returns the option of `data` (plain values) that makes rows depend on the step, or ""."""
    if any(not isinstance(source.get("weight", 1.0), int | float) for source in data.get("sources", {}).values()):
        return "data.sources"
    return "data.difficulty_window" if data.get("difficulty_window") else ""
