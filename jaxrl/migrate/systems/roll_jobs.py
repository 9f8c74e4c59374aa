"""ROLL's pipelines of rows: SFT, DPO, distillation on the rows' completions. See systems/roll.py.

Read from its code at the tags v0.1.1 to v0.3.0. A step is an optimizer step.
"""

from __future__ import annotations

from dataclasses import replace

from jaxrl.migrate.derived import defaults, derived, renamed, selected
from jaxrl.migrate.supervised import recipe
from jaxrl.migrate.systems import roll_jobs_meaning as meaning
from jaxrl.migrate.systems import roll_layout as layout
from jaxrl.migrate.systems.roll import EIGHT, MEGA, TABLE, packing
from jaxrl.migrate.systems.roll_layout import (
    ACCUMULATION,
    ARGS,
    CONFIG,
    DATA,
    INFER,
    MEGATRON,
    PER_DEVICE,
    REF,
    STRATEGY,
    TRAIN,
    ULYSSES,
    VALID,
)
from jaxrl.migrate.table import Joint, Key, Table

K = Key
HELD = {VALID + DATA + "file_name": ["b.json"]}
SHARED = ("optimizer", TRAIN + ARGS + "weight_decay", "max_grad_norm", "master weights", "recomputation", "dtypes",
          TRAIN + "model_args.moe_aux_loss_coef", TRAIN + "model_args.model_config_kwargs.**", "frozen parameters", "adapters",
          "places", "loggers", "seed")
DIFFERS = ("weight decay spares norms, biases and other vectors; with FSDP2 and DeepSpeed ROLL's does not",)
SHUFFLED = ("the order of the data is drawn from another generator",)


def rules(evaluated: bool, *data: Joint, pair: str = "") -> tuple:
    """Returns the rules that SFT, DPO and distillation share, under the role's name in reinforcement learning
    (actor_train.).

    evaluated: whether held-out rows are evaluated here and max_steps counts, as in DPO; if not, the tests try no other
    values of these keys. data: the rules of the job's rows. pair: the other role (reference., teacher.), beside whose
    own model the trained role has one of its own; "" in SFT.
    """
    def some(value):
        return value if evaluated else None

    return (
        Joint("lengths", (
            K("sequence_length", "equivalent", other=700),
            K("prompt_length", "equivalent", default=1024),
            K("response_length", "equivalent")), meaning.lengths),
        Joint("layout", (
            K(TRAIN + "device_mapping", "equivalent", other="list(range(0,8))"),
            K(STRATEGY, "equivalent", default="fsdp2_train"),
            *(K(name, "equivalent", default=1, other=2, beside=MEGA) for name in MEGATRON),
            K(ULYSSES, "equivalent", default=1, other=2, beside=EIGHT)), meaning.layout),
        Joint("batch", (
            K(PER_DEVICE, "equivalent", default=8, other=4),
            K(ACCUMULATION, "equivalent", default=1, other=8),
            K(TRAIN + "use_dynamic_batching_in_train", "equivalent", default=False, other=True,
              beside={TRAIN + "max_tokens_per_microbatch_in_train": 30000}),
            K(TRAIN + "max_tokens_per_microbatch_in_train", "equivalent", default=0, other=9000,
              beside={TRAIN + "use_dynamic_batching_in_train": True}),
            *(() if pair == REF else packing(False))), meaning.batch),
        *data,
        Joint("length of the run", (
            K(TRAIN + ARGS + "num_train_epochs", "equivalent", default=1, other=2),
            K("max_steps", "equivalent", default=500 if evaluated else -1, other=some(100))), meaning.length_of_run),
        Joint("evaluation", (
            K(VALID + DATA + "file_name", "equivalent", other=some(["b.json"])),
            K("eval_steps", "equivalent", default=10, other=some(5), beside=HELD if evaluated else {})), meaning.evaluation),
        Joint("model", (
            K("pretrain", "equivalent", other="a/model", also=("student_pretrain",)),
            K(TRAIN + meaning.NAME, "equivalent", other="another/model" if pair else None,
              beside={pair + meaning.NAME: "a/second"} if pair else {})), meaning.model),
        *selected(TABLE, *SHARED),
        K(TRAIN + "strategy_args.strategy_config.offload_policy", "unsupported", fine=(False,),
          why="mesh.roles.policy={'rest': 'streamed'} keeps parameters and optimizer state on the host"),
        K(TRAIN + "strategy_args.strategy_config", "unsupported", fine=("${deepspeed_zero2}", "${deepspeed_zero3}", "${deepspeed_zero}"),
          why="with offloading: mesh.roles.policy={'rest': 'streamed'}"),
        K(TRAIN + CONFIG + "zero_optimization.**", "automatic", why="no DeepSpeed: mesh.fsdp shards parameters, gradients and optimizer state"),
    )


def keys(*names_and_values: tuple) -> tuple[Key, ...]:
    """Returns equivalent rows of tuples (name, default, another value for the tests, further arguments of Key or
    nothing)."""
    return tuple(K(name, "equivalent", default=default, other=other, **more) for name, default, other, *rest in names_and_values
                 for more in (rest[0] if rest else {},))


def frozen(role: str, beside=None) -> Key | Joint:
    """Returns the rule that sets the dtype of the reference or the teacher. role: reference. or teacher., with the dot.
    beside: the settings under which the tests try another dtype."""
    rows = (K(REF + "model_args.dtype", "equivalent", default="bf16", other="fp32", beside=beside or {}),
            K(REF + "strategy_args.strategy_name", "equivalent", default="hf_infer"), K(REF + CONFIG + "param_dtype", "equivalent"))
    return renamed((Joint(f"dtype of the {role.strip('.')}", rows, layout.reference_dtype),), {REF: role})[0]


def files(*more: Key) -> tuple[Key, ...]:
    """Returns the rows of the files of training rows and of their template, and `more`."""
    return (K(TRAIN + DATA + "file_name", "equivalent", other=["a.json"]), K(TRAIN + DATA + "template", "equivalent", default="native"),
            K("global_template", "equivalent"), *more)


def of_role(role: str) -> Table:
    """Returns ROLL's table with another name of the trained role, which ends with a dot (student.)."""
    return replace(TABLE, rules=renamed(TABLE.rules, {TRAIN: role}))


LONG = {"sequence_length": 1024}
GPUS = K("num_gpus_per_node", "automatic", why="counted from the devices")

SFT = derived(of_role("sft_train."), "sft", (
    recipe("sft"),
    *renamed(rules(False, Joint("data", files(*keys(
        ("prompt_key", "instruction", "q"), ("response_key", "output", "a"), ("query_key", None, None), ("system_key", None, None))),
        meaning.sft_data)), {TRAIN: "sft_train."}),
    K("sft_train.infer_batch_size", "automatic", why="there is no loss on held-out rows"), GPUS,
), required=LONG, differs=DIFFERS)

PREFERENCE = derived(TABLE, "preference", (
    recipe("preference"),
    *rules(True, Joint("data", files(*keys(("chosen_key", "chosen", "c"), ("rejected_key", "rejected", "r"))), meaning.pair_data), pair=REF),
    Joint("loss", keys(
        ("ipo", False, True), ("beta", 0.1, 0.2), ("label_smoothing", 0.0, 0.1),
        (REF + meaning.NAME, None, "a/reference", {"beside": {TRAIN + meaning.NAME: "a/b"}})),
        meaning.preference),
    frozen(REF),
    K(REF + "model_args.adapter_name_or_path", "unsupported", refuse=True, why="a reference is a whole model: merge its adapter"),
    K(TRAIN + "infer_batch_size", "automatic", why="train.score_tokens_per_microbatch; the update's own rows by default"), GPUS,
), required=LONG, differs=(*DIFFERS, *SHUFFLED))

DISTILL = derived(of_role("student."), "distill", (
    recipe("distill"),
    *renamed(defaults(rules(False, Joint("data", files(*keys(
        ("question_key", "question", "q"), ("answer_key", "answer", "a"), ("prompt_key", None, None), ("system_key", None, None))),
        meaning.distill_data), pair="teacher."), {"max_grad_norm": 0.0}),
        {TRAIN: "student.", "pretrain": "student_pretrain", "student_pretrain": "pretrain"}),
    Joint("distillation", keys(
        ("teacher_pretrain", None, "a/teacher"), ("teacher." + meaning.NAME, None, "another/teacher", {"beside": {"student." + meaning.NAME: "a/b"}}),
        ("kd_objective", "forward_kl", "reverse_kl"), ("logits_topk", 64, 0), ("distill_loss_weight", 0.5, 0.85),
        ("kd_temperature", 1, 2), ("teacher_temperature", 1, 2), ("distill_on_prompt", False, True)), meaning.distillation),
    frozen("teacher."),
    K("adaptive_kl_alpha", "inert", why="read with kd_objective=adaptive_kl alone", also=("skew_lambda",)),
    K("logits_transfer_backend", "automatic", why="teacher and student share devices, in turns"),
    K("student.infer_batch_size", "automatic", why="there is no loss on held-out rows"), GPUS,
    K("teacher.model_args.adapter_name_or_path", "unsupported", refuse=True, why="a teacher is a whole model: merge its adapter"),
    K("teacher.**", "automatic", why="the teacher is sharded as the student (mesh.roles.teacher)"),
), required=LONG, differs=(*DIFFERS, *SHUFFLED))

OF_REWARDS = ("advantage", "KL", "masks", "critic's optimizer")  # what is made of them has no part in it


def _left_out(rule: Key | Joint) -> Key | Joint:
    """A rule of what is made of rewards, of which nothing follows here."""
    if not isinstance(rule, Joint):
        return rule
    left = rule.title in OF_REWARDS

    def one(key: Key) -> Key:
        if key.name == "enable_old_logprobs_recompute":  # so does init_kl_coef, by its default
            return replace(key, beside={"init_kl_coef": 0.0})
        return replace(key, other=None) if left or key.name == "entropy_loss_coef" else key

    return replace(rule, keys=tuple(map(one, rule.keys)))


ROLES = {TRAIN: "student_train.", INFER: "student_infer.", REF: "teacher."}
ON_POLICY = replace(TABLE, job="on_policy_distill", jobs=(), rules=renamed((
    *(_left_out(rule) for rule in TABLE.rules if getattr(rule, "name", "") not in (REF + "**", "is_pure_opd", "use_opd")
      and getattr(rule, "title", "") not in ("dtype of the reference", "replayed experts")),
    K(TRAIN + "router_replay.mode", "unsupported", fine=("disable", ""), why="distillation takes the experts that the trainer chooses"),
    Joint("distillation", keys(
        (REF + "model_args.model_name_or_path", None, "a/teacher"), (REF + "*.model_args.model_name_or_path", None, None),
        (REF + "opd_kl_coef", 1.0, 0.5), ("is_pure_opd", True, None), ("use_opd", False, None), ("pure_opd_pipeline_type", "rlvr", None)),
        meaning.on_policy),
    frozen(REF, {REF + "model_args.model_name_or_path": "a/teacher"}),
    K(REF + "**", "automatic", why="the teacher is sharded as the student (mesh.roles.teacher)"),
), ROLES))
