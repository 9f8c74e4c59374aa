"""Fingerprints of a run's inputs: whether all processes read the same, and whether a resumed run reads what its
checkpoint was trained on. They cover content only, not paths, hosts or times; rows count in order.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import huggingface_hub

from jaxrl import data as jaxrl_data
from jaxrl.checkpoint.resume import config_changes, input_changes
from jaxrl.config.load import redacted
from jaxrl.errors import ConfigError
from jaxrl.models.io import hf
from jaxrl.processes.exchange import check_equal

log = logging.getLogger("jaxrl")
# fields of a model's config that decide nothing
IGNORED_FIELDS = ("_name_or_path", "_commit_hash", "transformers_version", hf.SOURCE)
BLOCK, BLOCKS = 4096, 64  # sampled blocks of a weights file: bytes of each, and their number, evenly spread


def compare_inputs(config, peers, inputs, train_set, eval_sets, chosen, workers=None) -> dict:
    """Compares the run's inputs across processes and, with run.mode=train, with the checkpoint. Collective.

    Returns what the next checkpoint stores: {"prints": fingerprints, "commits": of the hub, "code": of rewards and
    environments, "began": initial weights; "day": the chat template's, if it writes one}. Other code than the
    checkpoint's, and other initial weights, which a resumed run does not read, are warned about.

    Args:
      peers: processes of the run. inputs: run.setup.ModelInputs. train_set, eval_sets: as of `fingerprints`.
      chosen: the checkpoint to resume, or None.
      workers: option -> pool of workers (rewards, episodes), whose key() identifies the user's code; it may change on
        resume.

    Raises:
      ConfigError: the processes read different inputs, or others than the checkpoint's."""
    prints = fingerprints(config, inputs, train_set, eval_sets)
    read = {"prints": prints, "commits": commits(config, train_set, eval_sets)}
    if day := jaxrl_data.template_date(inputs.tokenizer):
        prints["chat template's day"] = read["day"] = day
    read["code"] = {f"the code of {option}": pool.key() for option, pool in (workers or {}).items()}
    read["began"] = began = weights_of_hosts(config, missing=chosen is not None)
    if peers.count > 1:
        check_equal(peers, prints | read["code"] | (began if chosen is None else {}))
    if chosen is None or config.run.mode != "train":
        return read
    before = chosen.host.get("read")
    if before is None:
        log.warning("%s was written by an older jaxrl, which stored no fingerprints: data and tokenizer may differ from"
                    " those it was trained with", chosen.path)
        return read
    _, accepted = config_changes(chosen.host["config"], redacted(config))
    refused, taken = input_changes(before["prints"], read["prints"], config.run.accept_changed, accepted)
    if refused:
        moved = before["commits"] != read["commits"]
        hub = f". Hub commits then {before['commits']}, now {read['commits']}" if moved else ""
        raise ConfigError(f"resuming {chosen.path}: its inputs have changed: {'; '.join(refused)}"
                          f"{hub}. Restore them, or use another run.dir")
    taken += [name for name, print_ in read["code"].items() if before.get("code", {}).get(name, print_) != print_]
    for change in taken:
        log.warning("changed since the checkpoint was written: %s", change)
    read["began"] = before.get("began", began)
    for name, print_ in began.items():
        if read["began"].get(name, print_) != print_:
            log.warning("%s are others than those that this run began with; it goes on from its checkpoint, %s: use "
                        "another run.dir to start from them", name, chosen.path)
    return read


def fingerprints(config, inputs, train_set, eval_sets) -> dict[str, str]:
    """Returns name -> hash of the inputs a checkpoint depends on: data, tokenizer, model config, a reference that is
    read again, a local teacher; and the number of training examples. Raises ConfigError if weights cannot be found.

    inputs: run.setup.ModelInputs. train_set: training Dataset or None. eval_sets: Datasets by name."""
    out = {f"eval set {name}": dataset.fingerprint for name, dataset in eval_sets.items()}
    if train_set is not None:
        out["training data"] = train_set.fingerprint
        out["training examples"] = f"{len(train_set)} within the length limits"  # the place in the data counts them
    described = {key: value for key, value in inputs.hf_config.items() if key not in IGNORED_FIELDS}
    out |= jaxrl_data.fingerprint(inputs.tokenizer)
    if inputs.images is not None:
        out["tokenizer of images"] = _hash(str(inputs.images.rule))
    out["model config"] = _hash(json.dumps(described, sort_keys=True, default=str))
    reference = config.reference
    if config.needs_reference and not (reference.reset_steps or reference.reset_epochs):
        out |= {"weights of the reference": reference_print(config)} if _reference(config)[0] else {}
    if "teacher" in config.recipe.roles and config.teacher.path and not config.teacher.servers:
        out["weights of the teacher"] = weights_print(config.teacher.path, config.teacher.revision, "teacher.path")
    return out


def reference_print(config) -> str:
    """Returns the fingerprint of the reference's initial weights (see weights_print); for a random policy "seed N".
    Raises ConfigError if there are no such weights."""
    path, revision = _reference(config)
    field = "reference.path" if config.reference.path else "model.path"
    return weights_print(path, revision, field) if path else f"seed {config.run.seed}"


def weights_of_hosts(config, missing: bool = False) -> dict[str, str]:
    """Returns name -> hash (weights_print) of the weights that every process reads its part of when a run begins.

    They are those of the policy and of a critic with a path. missing: leave out those that are gone; else they raise
    ConfigError or OSError."""
    critic, out = config.critic, {}
    named = {"weights of the policy": _policy(config),
             "weights of the critic": (critic.path, critic.revision, "critic.path")}
    for name, source in named.items():
        try:
            out |= {name: weights_print(*source)} if source[0] else {}
        except (ConfigError, OSError):
            if not missing:
                raise
    return out


def commits(config, train_set, eval_sets) -> dict[str, list[str]]:
    """Returns the hub commits that were read, name -> [40 hex digits]; checkpoints store them.

    Names are model, tokenizer, reference, critic, teacher, "training data" and "eval set <name>"; local folders are
    left out. train_set, eval_sets: as of `fingerprints`."""
    m = config.model
    named = {"model": (m.path, m.revision), "tokenizer": (m.tokenizer or m.path, jaxrl_data.tokenizer_revision(config)),
             "reference": (config.reference.path, config.reference.revision),
             "critic": (config.critic.path, config.critic.revision),
             "teacher": (config.teacher.path, config.teacher.revision)}
    out = {name: [commit] for name, source in named.items() if (commit := _commit(*source))}
    sets = {} if train_set is None else {"training data": train_set}
    sets |= {f"eval set {name}": dataset for name, dataset in eval_sets.items()}
    return out | {name: dataset.commits for name, dataset in sets.items() if dataset.commits}


def weights_print(path: str, revision: str | None, field: str = "model.path") -> str:
    """Returns a hash (16 hex digits) of the *.safetensors files of a folder or hub snapshot.

    It covers names, sizes, headers and BLOCKS evenly spread blocks per file, so that it is fast: a change elsewhere in
    a file is not seen. field: the option that names it, for messages. Raises ConfigError if there is no such folder or
    snapshot."""
    digest = hashlib.sha256()
    try:
        folder = hf.folder_of(jaxrl_data.resolve(path), revision)
    except ConfigError as e:
        raise hf.error_of(field, path, e) from None
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as f:
            header = int.from_bytes(f.read(8), "little")
            digest.update(f.read(min(header, size)))
            start = f.tell()
            for i in range(BLOCKS):
                f.seek(start + max(0, size - start - BLOCK) * i // (BLOCKS - 1))
                digest.update(f.read(BLOCK))
    return digest.hexdigest()[:16]


def _reference(config):
    reference = config.reference
    return (reference.path, reference.revision) if reference.path else _policy(config)


def _policy(config):
    return (config.model.path, config.model.revision) if config.model.init == "pretrained" else ("", None)


def _commit(path: str, revision: str | None) -> str | None:
    """Returns the commit of a hub id in the local cache; None for folders."""
    if not path or Path(jaxrl_data.resolve(path)).exists() or path.count("/") > 1:
        return None
    for name in ("config.json", "tokenizer_config.json"):
        found = huggingface_hub.try_to_load_from_cache(path, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent.name
    return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
