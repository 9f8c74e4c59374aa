"""What keys of ROLL's pipelines of rows mean together (SFT, DPO, distillation), under the names of the role
`actor_train`. See systems/roll_jobs.py."""

from __future__ import annotations

from jaxrl.migrate import common, images, supervised
from jaxrl.migrate.devices import count_gpus, mesh
from jaxrl.migrate.systems.roll_layout import (
    ACCUMULATION,
    ARGS,
    DATA,
    MEGATRON,
    PER_DEVICE,
    REF,
    STRATEGY,
    TRAIN,
    ULYSSES,
    VALID,
    devices,
    packed_tokens,
    sizes,
)
from jaxrl.migrate.table import Migration


def lengths(m: Migration):
    """Sets data.max_prompt_tokens, rollout.max_new_tokens and train.max_sequence_tokens from sequence_length, else from
    prompt_length + response_length; in distillation on images from prompt_length alone. SFT truncates longer rows.
    Raises Unreadable if no length is set, or one below 2."""
    sft, key = m.options["run.recipe"][0] == "sft", "sequence_length"
    longest, keys = m.integer(key), (key,)
    if _sees(m):  # its pipeline of images pads and bounds rows by this key alone
        longest, keys = m.integer("prompt_length"), ("prompt_length",)
        m.mark("sequence_length", "inert", "ROLL's pipeline of images bounds rows by prompt_length")
    elif longest is None and m.integer("response_length"):
        longest, keys = m.integer("response_length") + m.integer("prompt_length"), ("response_length", "prompt_length")
    if not longest:
        raise m.wrong(key, "a length: ROLL asks for sequence_length or response_length")
    supervised.sequence(m, longest, *keys, cut="truncate" if sft else "")


def layout(m: Migration):
    """Sets the mesh from the trained role's devices, or --gpus, and its parallel sizes."""
    train, (tp, pp, cp, ep) = devices(m, TRAIN), sizes(m)
    count_gpus(m, len(train))
    keys = (TRAIN + "device_mapping", *MEGATRON, ULYSSES)
    mesh(m, (STRATEGY,), keys, tp=tp, pp=pp, cp=cp, ep=ep, gpus=m.gpus)


def batch(m: Migration):
    """Sets data.prompts_per_step, the rows of an optimizer step (per device x accumulation x data-parallel ranks), and
    train.tokens_per_microbatch.

    Without devices and --gpus it counts one GPU, and asks for them. Devices that are no multiple of tp x pp x cp are
    refused. Raises Unreadable for less than one row.
    """
    tp, pp, cp, _ = sizes(m)
    keys = (PER_DEVICE, ACCUMULATION, TRAIN + "device_mapping", *MEGATRON[:3], ULYSSES)
    if not m.gpus:
        m.needs(
            "the role's device_mapping is not set: the rows of a step follow from the number of GPUs; give --gpus=N "
            "(here it "
            "is one)"
        )
    dp = (m.gpus or 1) // (tp * pp * cp)
    if not dp or (m.gpus or 1) % (tp * pp * cp):
        m.lacks(keys[2], f"{m.gpus} devices are no multiple of {tp} x {pp} x {cp} (tp, pp, cp)", refuse=True)
        return
    per, pairs = m.integer(PER_DEVICE), m.options["run.recipe"][0] == "preference"
    supervised.rows(m, per * m.integer(ACCUMULATION) * dp, "pairs" if pairs else "rows", *keys)
    dynamic, most = TRAIN + "use_dynamic_batching_in_train", TRAIN + "max_tokens_per_microbatch_in_train"
    longest = m.options["train.max_sequence_tokens"][0]
    packed, of = (0, ()) if pairs else packed_tokens(m, "train")  # ROLL's DPO refuses it
    if m.flag(dynamic) and m.integer(most):
        m.set("train.tokens_per_microbatch", max(m.integer(most), longest), dynamic, most)
    elif packed:
        m.set("train.tokens_per_microbatch", max(packed, longest), *of)
    else:
        supervised.memory(m, per * (1 + pairs), PER_DEVICE, "sequence_length")


def files(m: Migration):
    """Sets data.path from the role's data_args.file_name; a chat template of ROLL's that the source names is noted as a
    difference."""
    common.data_files(m, m.list(TRAIN + DATA + "file_name"), TRAIN + DATA + "file_name")
    names = {m.text(k) for k in ("global_template", TRAIN + DATA + "template")} - {"", "native"}
    if names:
        m.differs(
            f"rows are rendered by the tokenizer's own chat template; ROLL's ({', '.join(sorted(names))}) may add "
            "another "
            "system message: compare the first batch, or name a file in model.chat_template"
        )


def _sees(m: Migration) -> bool:
    """Whether the job distils on rows with images: by its command, or the name of its student."""
    if m.options["run.recipe"][0] != "distill":
        return False
    return "distill_vl" in m.command or images.has_tower(m.text("pretrain")) or images.has_tower(m.text(TRAIN + NAME))


def _text_alone(m: Migration, key: str):
    """Has a job of a model with a tower read no images, which this pipeline of ROLL's does not read."""
    if images.has_tower(m.text("pretrain")) or images.has_tower(m.text(TRAIN + NAME)):
        m.set("data.image_column", "", key)


def sft_data(m: Migration):
    """Sets data.path, prompt_column, completion_column and shuffle=False; a model with a tower reads no images
    (data.image_column=""). If query_key or system_key is set, the user is asked to write the prompt into one column."""
    files(m)
    _text_alone(m, "response_key")
    parts = {"query_key": "behind the prompt and a line break", "system_key": "a row's system message"}
    _prompt(m, "prompt_key", parts)
    m.set("data.completion_column", m.text("response_key"), "response_key")
    m.set("data.shuffle", False, TRAIN + DATA + "file_name")  # its loader reads the file in order


def _prompt(m: Migration, key: str, more: dict[str, str]):
    """Sets the column of prompts; beside further parts of a prompt it is one that rows do not have yet, so that the run
    stops instead of learning without them. more: key of a part -> where ROLL puts it."""
    given = {k: what for k, what in more.items() if m.text(k)}
    column = "+".join([m.text(key), *(m.text(k) for k in given)])
    m.set("data.prompt_column", column, key, *given)
    if given:
        parts = "; ".join(f"{k}={m.text(k)}: {what}" for k, what in given.items())
        m.needs(
            f"data.prompt_column={column}: ROLL makes a prompt of several columns ({parts}): write it into this "
            "column, as one text or as messages; a run without it stops"
        )


def pair_data(m: Migration):
    """Sets data.path, data.prompt_column=instruction, chosen_column and rejected_column; a model with a tower reads no
    images (data.image_column="")."""
    files(m)
    _text_alone(m, "chosen_key")
    m.set("data.prompt_column", "instruction", "chosen_key")
    m.set("data.chosen_column", m.text("chosen_key"), "chosen_key")
    m.set("data.rejected_column", m.text("rejected_key"), "rejected_key")


def _pictures(m: Migration):
    """Rows of ROLL's pipeline of images: its columns and sizes are of its code."""
    of = TRAIN + DATA + "file_name"
    for name, value in (("prompt", "problem"), ("completion", "solution"), ("image", "image")):
        m.set(f"data.{name}_column", value, of)
    m.set("data.image_min_pixels", 56 * 56, of)
    m.set("data.image_max_pixels", 1024 * 1024, of)
    for key in ("question_key", "answer_key", "prompt_key", "system_key"):
        m.mark(key, "inert", "ROLL's pipeline of images reads the columns problem, solution and image")
    m.needs(
        "data.prompt_column: ROLL's pipeline of images puts its own words behind a problem that is text (two blanks, "
        "Output final answer (number) in <answer> </answer> tags.): write them into the rows"
    )


def distill_data(m: Migration):
    """Sets data.path, prompt_column and completion_column. If prompt_key or system_key is set, the user is asked to
    write the prompt into one column. On rows with images the columns and image sizes are those of ROLL's code, and the
    user is asked to write its words into the prompts."""
    files(m)
    if _sees(m):
        _pictures(m)
        return
    before = "before the question"
    _prompt(m, "question_key", {"prompt_key": before, "system_key": before})
    m.set("data.completion_column", m.text("answer_key"), "answer_key")


def length_of_run(m: Migration):
    """Sets data.epochs from num_train_epochs and, in DPO, train.steps from max_steps; otherwise marks max_steps inert.
    Raises Unreadable for less than one epoch, for a part of one, but in DPO, which drops it, and there for a max_steps
    below 1."""
    epochs, steps = m.number(TRAIN + ARGS + "num_train_epochs"), m.integer("max_steps")
    pairs = m.options["run.recipe"][0] == "preference"
    if epochs != int(epochs) and not pairs:
        raise m.wrong(TRAIN + ARGS + "num_train_epochs", "a whole number, as this pipeline of ROLL does")
    m.set("data.epochs", int(epochs), TRAIN + ARGS + "num_train_epochs")
    if pairs:
        if not steps or steps < 1:
            raise m.wrong("max_steps", "at least 1, without which ROLL's DPO does not start")
        m.set("train.steps", steps, "max_steps")
    else:
        why = "this pipeline counts num_train_epochs"
        m.mark("max_steps", "inert", why)
        m.mark(TRAIN + ARGS + "max_steps", "inert", why)


def evaluation(m: Migration):
    """Sets eval.sets, every_steps and before in DPO with held-out rows; otherwise turns evaluation off, and reports
    held-out rows as not carried over."""
    held, every = VALID + DATA + "file_name", m.integer("eval_steps")
    found = [str(f) for f in m.list(held)]
    if m.options["run.recipe"][0] == "preference" and found:
        common.eval_sets(m, found, held)
        common.triggers(m, "eval.every_steps", every, "eval_steps", held)
        m.set("eval.before", every > 0, "eval_steps", held)
        m.set("eval.after", False, "eval_steps", held)
        return
    m.set("eval.every_steps", 0, "eval_steps")
    if found:
        supervised.no_loss_of_held_out_rows(m, held, "eval_steps")
        return
    m.set("eval.before", False, "eval_steps")
    m.set("eval.after", False, "eval_steps")


def preference(m: Migration):
    """Sets preference.loss (dpo, or ipo of sums of log-probs), preference.beta, label_smoothing (marked inert with ipo)
    and reference.path, if the reference has another model than the policy.

    Values of ipo, beta and label_smoothing that ROLL does not hand to its loss, and a learning rate that it schedules
    over fewer steps, are noted as differences.
    """
    ipo = m.flag("ipo")
    m.set("preference.loss", ("ipo" if ipo else "dpo",), "ipo")
    if ipo:
        m.set("preference.ipo_mean", False, "ipo")  # sums of log-probs, as the paper writes it
    m.set("preference.beta", float(m.number("beta")), "beta")
    if m.number("label_smoothing") and ipo:
        m.mark("label_smoothing", "inert", "read without ipo alone")
    else:
        m.set("preference.label_smoothing", float(m.number("label_smoothing")), "label_smoothing")
    if _own_names(m, TRAIN, REF) and m.text(REF + NAME) != m.text(TRAIN + NAME):
        m.set("reference.path", m.text(REF + NAME), REF + NAME)
    if ipo or m.number("beta") != 0.1 or m.number("label_smoothing"):
        m.differs(
            "the loss is what ipo, beta and label_smoothing say; ROLL's pipeline does not hand them to its loss, which "
            "is the sigmoid's with beta 0.1 and no smoothing whatever they are"
        )
    decays = m.text(TRAIN + ARGS + "lr_scheduler_type") not in ("constant", "constant_with_warmup")
    if decays or not m.number(TRAIN + ARGS + "warmup_steps") and m.number(TRAIN + ARGS + "warmup_ratio"):
        m.differs(
            "the learning rate is scheduled over all steps; ROLL's DPO divides max_steps by the data-parallel ranks, "
            "so that it ends that much earlier there (optimizer.decay_steps)"
        )
    m.facts["loss"] = f"{'ipo' if ipo else 'dpo'}, beta {m['beta']}"


OBJECTIVES = {"forward_kl": "forward", "reverse_kl": "reverse", "js_divergence": "jsd"}


def distillation(m: Migration):
    """Sets teacher.path and distill.* for the divergence on the rows' completions: distill.loss by kd_objective, top_k,
    the two temperatures (the teacher's is kd_temperature x teacher_temperature), on_prompt, and ce = 1 -
    distill_loss_weight.

    Another kd_objective is refused. What is noted as a difference: tokens outside top_k, prompts and image tokens in
    the loss. Asks for a teacher that is not set, and for a max_grad_norm of 0 on FSDP. Raises Unreadable for a
    distill_loss_weight that is not above 0 and at most 1.
    """
    kind = m.text("kd_objective")
    if kind not in OBJECTIVES:
        m.lacks("kd_objective", f"{kind!r}: there are {', '.join(OBJECTIVES)} (distill.loss)", refuse=True)
        return
    share, top_k = float(m.number("distill_loss_weight")), m.integer("logits_topk")
    if not 0 < share <= 1:
        raise m.wrong("distill_loss_weight", "a share above 0; without it the job is run.recipe=sft")
    m.set("distill.loss", OBJECTIVES[kind], "kd_objective")
    m.set("distill.on_policy", 0.0, "answer_key")
    m.set("distill.ce", round(1 - share, 12), "distill_loss_weight")
    m.set("distill.top_k", top_k, "logits_topk")
    m.set("distill.temperature", float(m.number("kd_temperature")), "kd_temperature")
    both = float(m.number("kd_temperature") * m.number("teacher_temperature"))  # the teacher's logits are divided by
    m.set("distill.teacher_temperature", both, "teacher_temperature", "kd_temperature")
    sees = "data.image_column" in m.options
    on_prompt = m.flag("distill_on_prompt") or sees  # whose labels are all tokens of a row
    m.set("distill.on_prompt", on_prompt, "distill_on_prompt")
    if sees:
        m.differs("the loss is not of image tokens here; there it is")
    if on_prompt and share < 1:
        m.differs("the likelihood is of completions here; there of prompts, too")
    m.set("reward.functions", (), "kd_objective")
    if top_k:
        m.differs(
            f"over the {top_k} tokens of logits_topk both distributions are normalised anew there; here what is left "
            "is a "
            "further category (distill.tail)"
            + ("" if kind == "forward_kl" else ", and the tokens are the student's most probable")
        )
    if not m.number("max_grad_norm") and "fsdp" in m.text("student.strategy_args.strategy_name"):
        m.needs("max_grad_norm is 0, at which ROLL's FSDP clips every gradient to 0; here it is off: give a norm")
    key = _name_of("teacher.", "teacher_pretrain", _own_names(m, "student.", "teacher."))
    path = m.text(key)
    m.set("teacher.path", path, key)
    if not path:
        m.needs("teacher.path: teacher_pretrain is not set")
    m.facts["distillation"] = f"{kind}, {share:g} of the loss, {top_k or 'all'} tokens"


SAMPLED = (
    "aggregation",
    "aggregation_constant",
    "aggregation_sequences",
    "ppo_epochs",
    "num_minibatches",
    "policy_loss",
    "ratio",
    "clip_low",
    "clip_high",
    "dual_clip",
    "cispo_min_ratio",
    "cispo_max_ratio",
    "old_logprobs",
    "mismatch",
    "advantage_low",
    "advantage_high",
)


def on_policy(m: Migration):
    """Sets run.recipe=distill, distill.loss=sampled, distill.coef and teacher.path: the advantage of a token is minus
    the teacher's KL of it, the difference of log-probs. Takes out what rules made of rewards, and sets
    algorithm.old_logprobs=recompute with an init_kl_coef, unless force_disable_old_logprobs_recompute is set.

    Several teachers, use_opd, the agentic pipeline and a kl_penalty other than kl are refused; whitening, entropy, a KL
    and masks beside the teacher are reported as not carried over. Asks for a teacher that is not set.
    """
    many = m.all(REF + "*.model_args.model_name_or_path")
    if many:
        tables = tuple(s.key.partition(".model_args.")[0] + "." for s in many)
        for s in [s for s, _ in m.unknown if s.key.startswith(tables)]:
            m.owned.setdefault("teacher.**", []).append(s)
            m.mark(s.key, "unsupported", "of several teachers")
        m.unknown = [(s, why) for s, why in m.unknown if not s.key.startswith(tables)]
        m.lacks(many[-1].key, "several teachers, by the row: there is one (teacher.path)", refuse=True)
        return
    if m.flag("use_opd"):
        m.lacks("use_opd", "a teacher beside rewards: run.recipe=distill has none", refuse=True)
        return
    if m.text("pure_opd_pipeline_type") not in ("", "rlvr"):
        m.lacks(
            "pure_opd_pipeline_type",
            "its agentic pipeline: write an episode (docs/guides/environments.md)",
            refuse=True,
        )
        return
    kinds = {"kl": "k1", "abs": "abs", "mse": "k2"}
    if m.text("kl_penalty") != "kl":
        m.lacks(
            "kl_penalty",
            f"{kinds.get(m.text('kl_penalty'), '?')} as an advantage: it is the difference of log-probs",
            refuse=True,
        )
    if m.flag("whiten_advantages"):
        m.lacks("whiten_advantages", "the differences of log-probs are not whitened")
    for key, on in (
        ("entropy_loss_coef", m.number("entropy_loss_coef")),
        ("max_len_mask", m.flag("max_len_mask")),
        ("use_kl_loss", m.flag("use_kl_loss") and m.number("kl_loss_coef")),
        ("difficulty_mask", m.flag("difficulty_mask")),
    ):
        if on:
            m.lacks(key, "beside a teacher there is the loss of the sampled tokens alone")
    supervised.without_rewards(m, SAMPLED)
    force = "force_disable_old_logprobs_recompute"
    if m.number("init_kl_coef") and not m.flag(force):  # what the advantage is the difference to
        m.options["algorithm.old_logprobs"] = ("recompute", ("enable_old_logprobs_recompute", "init_kl_coef", force))
    m.set("run.recipe", "distill", "is_pure_opd")
    m.set("distill.loss", "sampled", "is_pure_opd")
    m.set("distill.coef", float(m.number(REF + "opd_kl_coef")), REF + "opd_kl_coef")
    key = REF + "model_args.model_name_or_path"
    m.set("teacher.path", m.text(key), key)
    if not m.text(key):
        m.needs(f"teacher.path: {key} is not set")
    m.differs("rewards are metrics; what is made of them, KL and entropy beside the teacher do nothing, as there")


NAME = "model_args.model_name_or_path"


def _own_names(m: Migration, *roles: str) -> bool:
    """Whether ROLL takes the roles' own names of models: where one of them has none, all are of `pretrain`."""
    return all(m.text(role + NAME) for role in roles)


def _name_of(role: str, pretrain: str, own: bool) -> str:
    return role + NAME if own else pretrain


def model(m: Migration):
    """Sets model.path, or asks for it. SFT's model is `pretrain` alone. A pair of roles has names of its own only where
    both have; otherwise `pretrain` counts, and the trained role's other name is marked inert."""
    other = {"preference": REF, "distill": "teacher."}.get(m.options["run.recipe"][0])
    own = bool(other) and _own_names(m, TRAIN, other)
    key = _name_of(TRAIN, "pretrain", own)
    if not own and m.given(TRAIN + NAME) and m.text(TRAIN + NAME) != m.text("pretrain"):
        m.mark(TRAIN + NAME, "inert", "ROLL takes pretrain's here")
    supervised.model_path(m, key)
