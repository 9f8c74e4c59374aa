"""What keys of TRL's trainers of rows mean together: SFT, DPO and its kin, reward models, GKD.

See systems/trl_jobs.py.
"""

from __future__ import annotations

import re

from jaxrl.migrate import common, images, supervised
from jaxrl.migrate.systems import trl_meaning as trl
from jaxrl.migrate.table import Migration

BOUNDLESS = re.compile(r"\bsft_vlm\w*\.py\b")  # scripts that set max_length=None themselves
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")


def lengths(m: Migration):
    """Sets the bound of a sequence by max_length (`supervised.sequence`); SFT truncates rows that are longer. TRL's
    script for images has no bound. truncation_mode=keep_end is recorded as not carried over."""
    key = "max_length"
    longest = None if BOUNDLESS.search(m.command) else m.integer(key)
    if m.given(key) and longest is None and m[key] is not None:
        m.mark(key, "inert", "TRL's script for images sets it to None")
    supervised.sequence(m, longest, key, cut="truncate" if m.options["run.recipe"][0] == "sft" else "")
    if m.text("truncation_mode") == "keep_end":
        m.lacks("truncation_mode", "a row that is too long loses its end, not its beginning")


def pair_lengths(m: Migration):
    """Sets the bound of a prompt and completion by max_length (`supervised.sequence`). Of preferences it is a known
    difference that pairs beyond it are left out. DPO's max_prompt_length sets data.max_prompt_tokens and
    data.overlong_prompt=truncate_left, its max_completion_length rollout.max_new_tokens; for KTO, CPO and ORPO these
    two are inert."""
    supervised.sequence(m, m.integer("max_length"), "max_length")
    if m.options["run.recipe"][0] != "preference":
        return
    m.differs("a pair with a completion that is too long is left out and counted; TRL cuts it to max_length")
    prompt, completion = m.integer("max_prompt_length"), m.integer("max_completion_length")
    if trainer(m) != "dpo":  # they cut a prompt only where it and the longer completion exceed max_length
        m.mark("max_prompt_length", "inert", "a pair beyond max_length is left out; others keep their prompts whole")
        m.mark("max_completion_length", "inert", "read for encoder-decoders alone")
        return
    if prompt:
        m.options.pop("data.max_prompt_tokens")
        m.set("data.max_prompt_tokens", prompt, "max_prompt_length")
        m.set("data.overlong_prompt", "truncate_left", "max_prompt_length")
    if completion:
        m.options.pop("rollout.max_new_tokens")
        m.set("rollout.max_new_tokens", completion, "max_completion_length")


def batch(m: Migration):
    """Sets data.prompts_per_step, the rows (or pairs) of an optimizer step: those per process x accumulation x
    processes; also data.drop_last, and train.tokens_per_microbatch for the rows per process, a pair of two sequences.

    Without dataloader_drop_last there is a known difference. With packing the user is asked for data.prompts_per_step,
    as TRL then counts packed rows."""
    per, accumulated = m.integer("per_device_train_batch_size"), m.integer("gradient_accumulation_steps")
    count = per * accumulated * trl.processes(m)
    m.set("data.drop_last", m.flag("dataloader_drop_last"), "dataloader_drop_last")
    if not m.flag("dataloader_drop_last"):
        m.differs("batches run on over the end of a pass; TRL's last batch of each pass has the rows that are left")
    pairs = m.options["run.recipe"][0] in ("preference", "reward_model")
    supervised.rows(m, count, "pairs" if pairs else "rows", *BATCH)
    supervised.memory(m, per * (1 + pairs), "per_device_train_batch_size", "max_length")
    if m.flag("packing"):
        m.needs(
            f"data.prompts_per_step={count}: with packing TRL counts rows of max_length={m['max_length']} tokens that "
            "hold several examples each, and jaxrl examples (its packing changes no batch): multiply by the examples "
            "to a row, max_length over the mean length of yours"
        )
        m.mark("packing", "automatic", "rows are always packed; a batch is counted in examples")


def logging(m: Migration):
    """Sets log.every_steps, at least 1; a share of the run (between 0 and 1) is recorded as not carried over."""
    every = m.number("logging_steps")
    if 0 < every < 1:
        m.lacks("logging_steps", "a share of the run: log.every_steps counts steps")
    else:
        m.set("log.every_steps", max(int(every), 1), "logging_steps")


def what_is_trained(m: Migration):
    """Sets which tokens of SFT have a loss: train.loss_on_prompt, data.train_turns and data.assistant_mask.

    assistant_only_loss: the assistant's turns, by the template's mask. completion_only_loss: completions alone, or all
    tokens. Without either, all tokens, and the user is asked, as it then depends on the kind of the rows. Another
    loss_type than nll and chunked_nll refuses the job. Images in a loss on prompts leave a known difference; another
    dataset_text_field than messages and prompt asks the user to split the text."""
    completions, assistant = m["completion_only_loss"], m.flag("assistant_only_loss")
    if m.text("loss_type") not in ("", "nll", "chunked_nll"):
        m.lacks("loss_type", f"{m.text('loss_type')!r}: the loss is the negative log-likelihood", refuse=True)
    if assistant:
        m.set("data.train_turns", "all", "assistant_only_loss")
        m.set("data.assistant_mask", "template", "assistant_only_loss")
        m.set("train.loss_on_prompt", False, "assistant_only_loss")
    elif completions is None:
        m.set("train.loss_on_prompt", True, "completion_only_loss")
        m.set("data.train_turns", "all", "completion_only_loss")
        m.needs(
            "train.loss_on_prompt=True: completion_only_loss is not set, and TRL then trains on all tokens of rows "
            "with "
            "`messages` or `text`, and on completions alone of rows with `prompt` and `completion`: set it to False "
            "for "
            "those, or for conversations of which only the assistant's turns should be learnt"
        )
    else:
        m.set("train.loss_on_prompt", not m.flag("completion_only_loss"), "completion_only_loss")
    if images.has_tower(m.text("model_name_or_path")) and m.options["train.loss_on_prompt"][0]:
        m.differs("TRL's loss counts the places of images among the tokens of a row; here they are in no loss")
    if m.given("dataset_text_field") and m.text("dataset_text_field") not in ("messages", "prompt"):
        m.needs(
            f"dataset_text_field={m.text('dataset_text_field')}: a row is a prompt and a completion here, or messages: "
            "split your text into the two (data.prompt_column, data.completion_column)"
        )


def data(m: Migration):
    """Sets data.path, data.split and data.subset of one data set, or data.sources of several: TRL's `datasets`, which
    are concatenated there (open-r1: `dataset_mixture`, with shares of each); the user is asked for their weights.

    test_split_size of several sets data.eval_fraction; `columns` and `fraction` of an entry are recorded as not carried
    over. Without a data set the user is asked for one. Raises Unreadable for an entry without path or id."""
    mixed = m.list("datasets") or m.list("dataset_mixture.datasets")
    if mixed:
        _mixture(m, mixed, "datasets" if m.list("datasets") else "dataset_mixture.datasets")
    elif m.text("dataset_name"):
        common.data_files(m, [m["dataset_name"]], "dataset_name")
        m.set("data.split", (m.text("dataset_train_split"),), "dataset_train_split")
        if m.text("dataset_config"):
            m.set("data.subset", m.text("dataset_config"), "dataset_config")
    else:
        m.needs("data.path: the source names no data set (dataset_name)")


def _mixture(m: Migration, mixed: list, key: str):
    found = [entry for entry in mixed if isinstance(entry, dict) and (entry.get("path") or entry.get("id"))]
    if len(found) < len(mixed):
        raise m.wrong(key, "a list of data sets with path (or id), name, split")
    sets = []
    for entry in found:
        table = {
            "path": str(entry.get("path") or entry.get("id")),
            "weight": 1.0,
            "split": (str(entry.get("split") or "train"),),
        }
        subset = entry.get("name") or entry.get("config")
        sets.append({**table, "subset": str(subset)} if subset else table)
    supervised.mixture(m, sets, key)
    shares = [e["weight"] for e in found if e.get("weight") is not None]
    if len(found) > 1:
        m.needs(
            f"data.sources: the {len(found)} data sets of {key} are joined there, each as long as it is"
            + (f" (shares of their rows: {shares})" if shares else "")
            + "; here they are drawn by weight: give each its number of rows as weight"
        )
    for n in ("columns", "fraction"):
        if any(e.get(n) for e in found):
            m.lacks(key, f"`{n}` of an entry: choose rows and columns in a file of your own (`where` of data.sources)")
    size = m["dataset_mixture.test_split_size"] or m["test_split_size"]
    if size:
        m.set("data.eval_fraction", float(size), "dataset_mixture.test_split_size", "test_split_size")


def evaluation(m: Migration):
    """Sets eval.every_steps or eval.every_epochs, eval.before, eval.after and eval.sets, by which held-out pairs are
    evaluated as those of training. SFT and GKD, where jaxrl measures no loss on held-out rows, record that and set no
    evaluation.

    eval_strategy=no sets none. eval.after is on for epochs and in scripts of TRL that evaluate at the end."""
    kind, keys = m.text("eval_strategy") or "no", ("eval_strategy", "eval_steps")
    if kind != "steps":
        m.set("eval.every_steps", 0, *keys)
    if kind == "no":
        m.set("eval.before", False, "eval_strategy")
        m.set("eval.after", False, "eval_strategy")
        m.facts["evaluation"] = "none"
        return
    if m.options["run.recipe"][0] in ("sft", "distill"):
        supervised.no_loss_of_held_out_rows(m, "eval_strategy")
        return
    every = m.number("eval_steps") or m.number("logging_steps")
    said = "every epoch"
    if kind == "steps":
        said = f"every {trl._every(m, 'eval_steps', every, 'eval.every_steps', *keys)}"
    else:
        m.set("eval.every_epochs", 1.0, "eval_strategy")
    m.set("eval.before", m.flag("eval_on_start"), "eval_on_start")
    # scripts that evaluate at the end, too
    scripts = r"\breward_modeling\.py" + r"|\bdpo\.py|trl\.scripts\.dpo\b" * trl.before(m, "1.6")
    m.set("eval.after", kind == "epoch" or bool(re.search(scripts, m.command)), "eval_strategy")
    m.facts["evaluation"] = said
    if m.text("dataset_name"):
        m.set(
            "eval.sets",
            (f"test={m['dataset_name']}@{m.text('dataset_test_split')}",),
            "dataset_name",
            "dataset_test_split",
        )


LOSSES = {  # DPOTrainer's
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "robust": "robust",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    "aot": "aot",
    "aot_pair": "aot",
    "aot_unpaired": "aot_unpaired",
    "discopop": "discopop",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "sft": "nll",
    "sigmoid_norm": "dpo_norm",
}
KIN = {  # trainer -> loss_type there -> ours
    "kto": {"": "kto", "kto": "kto", "apo_zero_unpaired": "apo_zero_unpaired"},
    "orpo": {"": "orpo"},
    "cpo": {"": "cpo", "sigmoid": "cpo", "simpo": "simpo"},
}
SMOOTHED = ("robust", "exo", "aot", "aot_unpaired", "cpo", "simpo")


def order(m: Migration):
    """Sets data.shuffle by train_sampling_strategy: False for sequential. Without it only KTO's rows keep their order,
    of which its KL's pairs are made."""
    key = "train_sampling_strategy"
    by = m.text(key) if m.given(key) else "sequential" if trainer(m) == "kto" else "random"
    m.set("data.shuffle", by != "sequential", key)


def trainer(m: Migration) -> str:
    """Returns the preference trainer, "dpo", "kto", "orpo" or "cpo": by the command, else kto or cpo by keys of one
    alone, else dpo."""
    if found := re.search(r"\b(?:trl )?(kto|orpo|cpo|dpo)\w*(?:\.py)?\b", m.command):
        return found[1]
    keys = (("kto", ("desirable_weight", "undesirable_weight")), ("cpo", ("cpo_alpha", "simpo_gamma")))
    return next((name for name, own in keys if any(m.given(key) for key in own)), "dpo")


def preference(m: Migration):
    """Sets preference.loss and the options that this loss reads: beta, loss_weights, label_smoothing, discopop_tau,
    desirable_ and undesirable_weight, simpo_gamma, rpo_alpha.

    A loss_type that the trainer does not have refuses the job and sets nothing; sync_ref_model refuses it, too. KTO
    and ORPO leave known differences. Raises Unreadable for exo_pair without label_smoothing, from TRL 1.0 on."""
    kind = trainer(m)
    m.facts["trainer"] = kind.upper()
    names = (
        [str(n) for n in m.list("loss_type")]
        if kind == "dpo"
        else [m.text("loss_type") if m.given("loss_type") else ""]
    )
    table = LOSSES if kind == "dpo" else KIN[kind]
    if unknown := [n for n in names if n not in table]:
        m.lacks(
            "loss_type", f"{', '.join(unknown)}: losses of {kind} are {', '.join(n for n in table if n)}", refuse=True
        )
        return
    losses = [table[n] for n in names]
    m.set("preference.loss", tuple(losses), "loss_type")
    weights = m.list("loss_weights")
    if weights and kind == "dpo":
        m.set("preference.loss_weights", tuple(float(w) for w in weights), "loss_weights")
    m.set("preference.beta", float(m.number("beta")), "beta")
    smoothing, old = m.number("label_smoothing"), trl.before(m, "1.0")
    if "exo" in losses and not smoothing:
        if not old:
            raise m.wrong("label_smoothing", "a share above 0 beside exo_pair, as TRL asks for")
        smoothing = 1e-3  # it sets so itself
    if smoothing and (set(losses) & set(SMOOTHED) or old and "dpo" in losses):
        m.set("preference.label_smoothing", float(smoothing), "label_smoothing")
    elif smoothing:
        m.mark("label_smoothing", "inert", f"{', '.join(names)} does not read it in TRL {m.version}")
    _of_one_loss(m, kind, losses)
    m.facts["loss"] = f"{' + '.join(losses)}, beta {m['beta']}"


def _of_one_loss(m: Migration, kind: str, losses: list[str]):
    if "discopop" in losses:
        m.set("preference.discopop_tau", m.number("discopop_tau"), "discopop_tau")
    if kind == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            m.set(f"preference.{name}", float(m.number(name)), name)
        m.differs("KTO's z0 is of the whole step; TRL's of a micro-batch")
        m.differs("a row with `chosen` and `rejected` is one of data.prompts_per_step here; TRL makes two of it")
    elif kind == "cpo":
        m.set("preference.rpo_alpha", float(m.number("cpo_alpha")), "cpo_alpha")
        if "simpo" in losses:
            m.set("preference.simpo_gamma", float(m.number("simpo_gamma")), "simpo_gamma")
    elif m.number("rpo_alpha"):
        m.set("preference.rpo_alpha", float(m.number("rpo_alpha")), "rpo_alpha")
    if kind == "orpo":
        m.differs("the likelihood in ORPO is of the chosen completions' tokens; TRL's of their prompts' too")
    if m.flag("sync_ref_model"):
        m.lacks("sync_ref_model", "the reference of preferences stays: its log-probs are computed once", refuse=True)


def reward_model(m: Migration):
    """Sets reward_model.center, 0 for null, and leaves a known difference about the start of the head."""
    m.set("reward_model.center", float(m.number("center_rewards_coefficient") or 0), "center_rewards_coefficient")
    m.differs("the head's bias is none and it starts at 0; TRL's starts at random numbers")


def teacher(m: Migration):
    """Sets teacher.dtype by the dtype that the teacher is loaded in (float32 unless named) and computes in (the
    trainer's), and teacher.revision."""
    t = "teacher_model_init_kwargs."
    held = m.text(t + "dtype") or "float32"
    common.frozen_dtype(m, "teacher.dtype", *common.of(m, "train.compute_dtype"), t + "dtype", held=held)
    if m.text(t + "revision"):
        m.set("teacher.revision", m.text(t + "revision"), t + "revision")


def distillation(m: Migration):
    """Sets a distillation by GKD: the teacher, the divergence, the share of prompts that the student completes, and its
    sampling.

    teacher.path is teacher_model_name_or_path, asked for where it is not set. distill.on_policy is lmbda, rounded to
    whole prompts of a step with a known difference; in TRL lmbda is a probability for all of a micro-batch, another
    difference. distill.loss is forward (beta 0), reverse (beta 1) or jsd with distill.beta. distill.temperature and
    distill.teacher_temperature are 1, as TRL calls its loss without one, except with Liger's loss from 0.22 to 1.3,
    where they are `temperature`; rollout.temperature always is. rollout.group_size is 1 and reward.functions is empty.

    rollout.max_new_tokens is max_new_tokens if lmbda is 1; otherwise max_length less 1, and another max_new_tokens is
    recorded as not carried over. The reduction of the divergence is a known difference."""
    temperature, beta, share = m.number("temperature"), m.number("beta"), m.number("lmbda")
    m.set("teacher.path", m.text("teacher_model_name_or_path"), "teacher_model_name_or_path")
    if not m.text("teacher_model_name_or_path"):
        m.needs("teacher.path: teacher_model_name_or_path is not set")
    size = m.options["data.prompts_per_step"][0]
    mine = round(share * size) / size
    if mine != share:
        m.differs(
            f"lmbda={share:g} of {size} prompts is no whole number: {mine:g} of them are completed by the student"
        )
    if 0 < share < 1:
        m.differs(
            "in each step a share lmbda of the prompts is the student's; in TRL all of a micro-batch's, with this "
            "probability"
        )
    m.set("distill.on_policy", mine, "lmbda", *BATCH)
    m.set("distill.loss", "forward" if beta == 0 else "reverse" if beta == 1 else "jsd", "beta")
    if 0 < beta < 1:
        m.set("distill.beta", beta, "beta")
    # generalized_jsd_loss is called without one; Liger's loss had it from 0.22 to 1.3
    liger = m.flag("use_liger_kernel") and not trl.before(m, "0.22") and trl.before(m, "1.4")
    for option in ("distill.temperature", "distill.teacher_temperature"):
        m.set(option, temperature if liger else 1.0, *(("temperature", "use_liger_kernel") if liger else ()))
    m.set("rollout.temperature", temperature, "temperature")
    m.set("rollout.group_size", 1, "lmbda")
    m.set("reward.functions", (), "lmbda")
    completion = m.integer("max_new_tokens")
    longest = m.options["train.max_sequence_tokens"][0]
    if share == 1:
        m.options.pop("rollout.max_new_tokens")
        m.set("rollout.max_new_tokens", completion, "max_new_tokens")
    elif completion != longest - 1:
        m.lacks(
            "max_new_tokens",
            f"{completion}: rollout.max_new_tokens bounds sampled completions and those of the data alike; here it is "
            f"{longest - 1}, by max_length",
        )
    m.differs(
        "a divergence is a mean over the completion tokens of the step; with GKD's reduction batchmean of a "
        "micro-batch too"
    )
