"""AReaL's trainers of rows: SFT, DPO, reward models. See systems/areal.py.

Read from its code at the tags v0.3.4, v0.4.1, v1.0.4 and at 4aef98d. A step is an optimizer step. Until 0.5 the model's
table is `model`, then `actor`.
"""

from __future__ import annotations

from dataclasses import replace

from jaxrl.migrate.derived import also, derived, selected
from jaxrl.migrate.supervised import recipe
from jaxrl.migrate.systems import areal_jobs_meaning as meaning
from jaxrl.migrate.systems.areal import TABLE
from jaxrl.migrate.systems.areal_meaning import ACTOR, DATA, OPTIM
from jaxrl.migrate.table import Joint, Key

K = Key
HELD = {"valid_dataset.path": "a/b"}
TRAINING = ("optimizer", OPTIM + "weight_decay", OPTIM + "beta1", OPTIM + "beta2", OPTIM + "eps", OPTIM + "gradient_clipping", OPTIM + "offload",
            "saving", "adapters", ACTOR + "peft_type", "loggers", "limits", "seed", ACTOR + "path", "tokenizer_path", ACTOR + "init_from_scratch",
            ACTOR + "gradient_checkpointing", ACTOR + "dtype", ACTOR + "fp8_config.**")
DIFFERS = ("weight decay spares norms, biases and other vectors", "the order of the data is drawn from another generator")


def rules(evaluated: bool) -> tuple:
    """Returns the rules that the tables of SFT, reward models and DPO share. evaluated: whether jaxrl evaluates the
    job's held-out rows; if not, the tests try no other values of the evaluation's keys."""
    def some(value):
        return value if evaluated else None

    return (
        Joint("lengths", (K(DATA + "max_length", "equivalent", other=700),), meaning.lengths),
        Joint("batch", (
            K(DATA + "batch_size", "equivalent", default=1, other=128),
            K(ACTOR + "mb_spec.max_tokens_per_mb", "equivalent", other=30000)), meaning.batch),
        Joint("layout", (
            K(ACTOR + "backend", "equivalent", default="", other="fsdp:d4p1t2"),
            K("allocation_mode", "equivalent", default="", other="d4p1t2")), meaning.layout),
        Joint("data", (
            K(DATA + "path", "equivalent", default="", other="a/b"),
            K(DATA + "split", "equivalent", default="train", other="validation"),
            K(DATA + "shuffle", "equivalent", default=True, other=False),
            K(DATA + "drop_last", "equivalent", default=True, other=False),
            K(DATA + "num_workers", "equivalent", default=0, other=4)), meaning.data),
        K(DATA + "type", "inert", why="it says which job it is"),
        Joint("evaluation", (
            K("valid_dataset.path", "equivalent", other=some("a/b")),
            K("valid_dataset.split", "equivalent", default="test", other=some("validation"), beside=HELD if evaluated else {}),
            K("evaluator.freq_steps", "equivalent", other=some(5), beside=HELD if evaluated else {}),
            K("evaluator.freq_epochs", "equivalent", other=some(1)),
            K("evaluator.freq_secs", "equivalent", other=some(600)),
            K("evaluator.eval_before_train", "equivalent", default=False, other=some(True))), meaning.evaluation),
        *selected(TABLE, *TRAINING),
        K(ACTOR + "is_critic", "automatic", why="the recipe says what the head is"),
        K("cluster.n_nodes", "automatic", why="counted from the devices", also=("cluster.n_gpus_per_node",)),
    )


def table(job: str, *more: Key | Joint, differs=()):
    """Returns the table of a job: the shared rules and `more`. Keys of `actor.` may also stand below `model.`, as until
    0.5. job: its recipe (sft, reward_model, preference). differs: further known differences."""
    made = derived(TABLE, job, (recipe(job), *rules(job != "sft"), *more), required={DATA + "batch_size": 64}, differs=(*DIFFERS, *differs))
    return replace(made, rules=also(made.rules, {ACTOR: "model."}))


SFT = table("sft")
REWARD = table("reward_model", differs=("the head starts at 0",))
PREFERENCE = table(
    "preference",
    Joint("loss", (
        K(ACTOR + "beta", "equivalent", default=0.1, other=0.2),
        K(ACTOR + "loss_type", "equivalent", default="sigmoid", other="ipo"),
        K("ref.path", "equivalent", other="a/reference"),
        K("ref.mb_spec.max_tokens_per_mb", "equivalent", other=30000),
        K("ref.dtype", "equivalent", default="bfloat16", other="float32")), meaning.preference),
)
