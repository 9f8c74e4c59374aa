"""What keys of AReaL's trainers of rows mean together (SFT, DPO, reward models). See systems/areal_jobs.py."""

from __future__ import annotations

import re

from jaxrl.migrate import common, devices, supervised
from jaxrl.migrate.systems.areal_meaning import ACTOR, DATA, allocation
from jaxrl.migrate.table import Migration


def lengths(m: Migration):
    """Sets data.max_prompt_tokens, rollout.max_new_tokens and train.max_sequence_tokens from train_dataset.max_length.
    If it is not set or 0, jaxrl asks for it and takes 8192. SFT leaves longer rows out
    (data.overlong_completion=filter). Raises Unreadable for other lengths below 2."""
    sft = m.options["run.recipe"][0] == "sft"
    supervised.sequence(m, m.integer(DATA + "max_length"), DATA + "max_length", cut="filter" if sft else "")


def batch(m: Migration):
    """Sets data.prompts_per_step (rows in SFT, pairs in the other jobs) from batch_size, and
    train.tokens_per_microbatch from actor.mb_spec.max_tokens_per_mb if that is set: at least the longest sequence.
    Raises Unreadable for a batch below 1."""
    what = "rows" if m.options["run.recipe"][0] == "sft" else "pairs"
    supervised.rows(m, m.integer(DATA + "batch_size"), what, DATA + "batch_size")
    tokens, key = m.integer(ACTOR + "mb_spec.max_tokens_per_mb"), ACTOR + "mb_spec.max_tokens_per_mb"
    if tokens:
        m.set("train.tokens_per_microbatch", max(tokens, m.options["train.max_sequence_tokens"][0]), key)


def layout(m: Migration):
    """Sets the mesh from the sizes in actor.backend or, if it has none, in allocation_mode. A difference is noted where
    AReaL trains in bf16 on FSDP, whose weights and moments are bf16 too."""
    named = re.search(r"\d", m.text(ACTOR + "backend"))  # a backend's name alone (to 0.3) has its sizes elsewhere
    key = ACTOR + "backend" if named or not m.text("allocation_mode") else "allocation_mode"
    text = m.text(key)
    a = allocation(text)
    count = a["d"] * a["t"] * a["p"] * a["c"]
    count = devices.count_gpus(m, count if re.search(r"\d", text) else 0, 1)
    m.facts["layout"] = text or "unset"
    devices.mesh(m, (key,), (key,), tp=a["t"], pp=a["p"], cp=a["c"], ep=a["e"], gpus=count)
    others = any(re.match(r"megatron|archon", m.text(k)) for k in (ACTOR + "backend", "allocation_mode"))
    fsdp = a["p"] == 1 and not others
    if fsdp and common.DTYPES.get(m.text(ACTOR + "dtype")) == "bf16":
        m.differs(
            "AReaL's FSDP engine keeps the weights that are trained and Adam's moments in bfloat16 (actor.dtype); here "
            "both are in float32, so that small updates are not rounded away, and take 6 bytes more per parameter. "
            "train.param_dtype=bf16 keeps the weights as AReaL does"
        )


def data(m: Migration):
    """Sets data.path, split, shuffle, drop_last and workers. For data sets that AReaL's loaders know by name (GSM8K,
    geometry3k and clevr_count_70k in SFT, hh-rlhf in the other jobs) it also sets their columns, data.chat and the
    like, and notes what the loader changes. Asks for the columns of other rows, and for a path that is not set."""
    path, split = m.text(DATA + "path"), m.text(DATA + "split")
    common.data_files(m, [path], DATA + "path")
    if not path:
        m.needs("data.path: train_dataset.path is not set")
    m.set("data.split", (split,), DATA + "split")
    sft = m.options["run.recipe"][0] == "sft"
    if sft and "gsm8k" in path:
        m.set("data.subset", "main", DATA + "path")
        m.set("data.prompt_column", "question", DATA + "path")
        m.set("data.completion_column", "answer", DATA + "path")
        m.set("data.chat", "false", DATA + "path")  # its loader joins the two texts
    elif sft and path.rstrip("/").endswith(("geometry3k", "clevr_count_70k")):
        m.set("data.prompt_column", "problem", DATA + "path")
        m.set("data.completion_column", "answer", DATA + "path")
        m.set("data.image_column", "images", DATA + "path")
        m.set("data.chat", "false", DATA + "path")
        m.differs('AReaL\'s loader takes the word "different" out of these questions; here the rows stay as they are')
        if path.rstrip("/").endswith("70k"):
            m.set("data.image_max_pixels", 336 * 336, DATA + "path")
        else:
            m.differs("AReaL's loader of geometry3k cuts the middle of 512 x 512 pixels out; here images are whole")
    elif not sft and "hh-rlhf" in path:
        m.set("data.chat", "false", DATA + "path")
        m.differs("a pair's prompt is what its texts share, up to the last word here, to the last token there")
    else:
        m.needs(
            "data.prompt_column and the columns of completions: those of your rows, which AReaL's loader in Python "
            "knows; "
            "data.chat=false if it takes no chat template"
        )
    m.set("data.shuffle", m.flag(DATA + "shuffle"), DATA + "shuffle")
    m.set("data.drop_last", m.flag(DATA + "drop_last"), DATA + "drop_last")
    m.set("data.workers", m.integer(DATA + "num_workers"), DATA + "num_workers")


def evaluation(m: Migration):
    """Sets eval.sets, every_steps, every_epochs, every_seconds, before and after from valid_dataset and evaluator. SFT
    is not evaluated: a valid_dataset with a period is reported as not carried over."""
    e, path = "evaluator.", m.text("valid_dataset.path")
    units = {
        "steps": m.integer(e + "freq_steps"),
        "epochs": m.number(e + "freq_epochs"),
        "secs": m.number(e + "freq_secs"),
    }
    if not units["steps"] or m.options["run.recipe"][0] == "sft":
        m.set("eval.every_steps", 0, e + "freq_steps")
    if m.options["run.recipe"][0] == "sft":
        if path and any(units.values()):
            supervised.no_loss_of_held_out_rows(m, "valid_dataset.path", *(f"{e}freq_{u}" for u in units))
        else:
            m.set("eval.before", False, e + "freq_epochs")
            m.set("eval.after", False, e + "freq_epochs")
        return
    if path:
        m.set(
            "eval.sets", (f"valid={path}@{m.text('valid_dataset.split')}",), "valid_dataset.path", "valid_dataset.split"
        )
    if units["steps"]:
        m.set("eval.every_steps", units["steps"], e + "freq_steps")
    m.set("eval.every_epochs", float(units["epochs"] or 0), e + "freq_epochs")
    m.set("eval.every_seconds", float(units["secs"] or 0), e + "freq_secs")
    m.set("eval.before", m.flag(e + "eval_before_train"), e + "eval_before_train")
    m.set("eval.after", False, e + "freq_epochs")


def preference(m: Migration):
    """Sets preference.loss (dpo or ipo) and preference.beta, reference.path if ref.path is not the policy's,
    reference.dtype, and train.score_tokens_per_microbatch if ref.mb_spec.max_tokens_per_mb is set. Another loss_type is
    reported as not carried over, and dpo set."""
    kind = m.choice(ACTOR + "loss_type", {"sigmoid": "dpo", "ipo": "ipo"})
    m.set("preference.loss", (kind or "dpo",), ACTOR + "loss_type")
    m.set("preference.beta", float(m.number(ACTOR + "beta")), ACTOR + "beta")
    if m.text("ref.path") and m.text("ref.path") != m.text(ACTOR + "path"):
        m.set("reference.path", m.text("ref.path"), "ref.path")
    common.frozen_dtype(m, "reference.dtype", m.text("ref.dtype"), "ref.dtype")
    scored = m.integer("ref.mb_spec.max_tokens_per_mb")
    if scored:
        longest = m.options["train.max_sequence_tokens"][0]
        m.set("train.score_tokens_per_microbatch", max(scored, longest), "ref.mb_spec.max_tokens_per_mb")
