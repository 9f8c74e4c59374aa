"""TRL's trainers of rows: SFT, DPO and its kin (KTO, CPO, SimPO, ORPO), reward models, GKD. See systems/trl.py.

Read from its code at the tags 0.17.0 to 1.9.0. A step is an optimizer step, there and here.
"""

from __future__ import annotations

from jaxrl.migrate import common
from jaxrl.migrate.derived import defaults, derived, selected
from jaxrl.migrate.supervised import recipe
from jaxrl.migrate.systems import trl_jobs_meaning as meaning
from jaxrl.migrate.systems import trl_meaning as trl
from jaxrl.migrate.systems.trl import TABLE
from jaxrl.migrate.table import MISSING, Joint, Key, Since

K = Key
KTO, CPO = {"desirable_weight": 2.0}, {"cpo_alpha": 0.5, "loss_type": "simpo"}
EVAL = {"eval_strategy": "steps", "eval_steps": 10}
TRAINING = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "saving", "model_name_or_path", "model",
            "trust_remote_code", "gradient_checkpointing", "adapters", "lora_*", "loggers", "seed", "data_seed", "variables of the template",
            "load_best_model_at_end", "benchmarks", "callbacks", "model_init_kwargs.**", "length of the run")
LOG = Joint("log", (K("logging_steps", "equivalent", default=Since(("0.17", 500), ("0.19", 10)), other=5),), meaning.logging)
NO_LOG = K("logging_steps", "automatic", why="every step is a line of metrics")
OTHERS = (
    K("neftune_noise_alpha", "unsupported", fine=(0, 0.0), why="no noise is added to embeddings"),
    K("label_smoothing_factor", "unsupported", fine=(0, 0.0), refuse=True, why="the loss has no label smoothing"),
    Joint("offloaded activations", (K("activation_offloading", "equivalent", default=False, other=True),),
          lambda m: common.offloaded(m, "activation_offloading")),
    *selected(TABLE, "router_aux_loss_coef"),
    K("padding_free", "automatic", why="rows are packed", also=("pad_to_multiple_of", "eval_packing", "packing_strategy", "dataset_batch_size",
                                                              "num_of_sequences", "chars_per_token", "padding_value", "label_pad_token_id")),
    K("disable_dropout", "automatic", why="the decoder has no dropout"),
    K("pad_token", "automatic", why="rows are packed: there is no padding to learn from"),
    K("eos_token", "ask", why="model.eos_tokens names the tokens that end a completion; a chat template writes its own after each turn"),
    K("dataset_kwargs.**", "ask", why="rows are tokenised by jaxrl"),
    K("formatting_func", "ask", why="write the rows as it makes them", also=("data_collator",)),
    K("ref_model", "ask", fine=("None",), why="name it in reference.path"),
    K("compute_loss_func", "unsupported", fine=("None",), refuse=True, why="a loss of its own"),
    K("optimizers", "ask", why="an optax factory in optimizer.name"),
    K("use_liger", "automatic", why="kernels of losses and layers are the platform's"),
)


def rules(rate: float | Since, log: Joint | Key, evaluated: bool) -> tuple:
    """Returns the rules that all trainers of rows have. rate: default of the learning rate. log: the rule of
    logging_steps. evaluated: whether jaxrl evaluates held-out rows of the job, so that the keys of evaluation change
    its config (for the tests)."""
    beside, other = (EVAL, lambda value: value) if evaluated else ({}, lambda value: None)
    named = {"dataset_name": "a/b"}
    return (
        Joint("batch", (
            K("per_device_train_batch_size", "equivalent", default=8, other=16),
            K("gradient_accumulation_steps", "equivalent", default=1, other=4),
            K("num_processes", "equivalent", default=MISSING, other=2, also=("num_gpus", "nproc_per_node")),
            K("packing", "equivalent", default=False),
            K("dataloader_drop_last", "equivalent", default=False, other=True)), meaning.batch),
        Joint("data", (
            K("dataset_name", "equivalent", other="a/b"),
            K("dataset_config", "equivalent", other="main", also=("dataset_config_name",), beside=named),
            K("dataset_train_split", "equivalent", default="train", other="validation", also=("dataset_split",), beside=named),
            K("datasets", "equivalent", other=[{"path": "a/b"}, {"path": "a/c"}]),
            K("dataset_mixture.datasets", "equivalent", other=[{"id": "a/b", "weight": 0.5}]),
            K("dataset_mixture.test_split_size", "equivalent", other=0.1, beside={"dataset_mixture.datasets": [{"id": "a/b"}]}),
            K("test_split_size", "equivalent", other=0.1, beside={"datasets": [{"path": "a/b"}]})), meaning.data),
        K("dataset_mixture.seed", "automatic", why="data.seed"),
        K("streaming", "automatic", why="rows are read from a copy on disk"),
        Joint("order of the rows", (K("train_sampling_strategy", "equivalent", other="sequential"),), meaning.order),
        K("shuffle_dataset", "inert", why="batches are drawn at random anyway"),
        *defaults(selected(TABLE, "optimizer"), {"learning_rate": rate}),
        *selected(TABLE, *TRAINING),
        log,
        Joint("evaluation", (
            K("eval_strategy", "equivalent", default="no", other=other("epoch"), also=("evaluation_strategy",)),
            K("eval_steps", "equivalent", other=other(20), beside=beside),
            K("eval_on_start", "equivalent", default=False, other=other(True), beside=beside),
            K("dataset_test_split", "equivalent", default="test", other=other("validation"), beside={**beside, **named})), meaning.evaluation),
        *OTHERS,
    )


def length(*more: Key) -> tuple[Key, ...]:
    """Returns the rows of max_length and truncation_mode, and `more`."""
    return (K("max_length", "equivalent", default=1024, other=700, also=("max_seq_length",)),
            K("truncation_mode", "equivalent", default="keep_start"), *more)


REQUIRED = {"num_processes": 8}

SFT = derived(TABLE, "sft", (
    recipe("sft"),
    Joint("lengths", length(), meaning.lengths),
    *rules(2e-5, LOG, evaluated=False),
    Joint("what is trained", (
        K("completion_only_loss", "equivalent", other=True),
        K("assistant_only_loss", "equivalent", default=False, other=True),
        K("loss_type", "equivalent", default="nll"),
        K("dataset_text_field", "equivalent", default="text")), meaning.what_is_trained),
    K("system_prompt", to="data.system_prompt", other="Be brief."),
), command=r"sft", required=REQUIRED, differs=(
    "no weight decay on norms, biases and other vectors (as transformers)",
    "the order of the data is drawn from another generator",
))

PREFERENCE = derived(TABLE, "preference", (
    recipe("preference"),
    Joint("lengths", length(
        K("max_prompt_length", "equivalent", default=Since(("0.17", 512), ("1.0", None)), other=300),
        K("max_completion_length", "equivalent", other=400)), meaning.pair_lengths),
    *rules(1e-6, LOG, evaluated=True),
    Joint("loss", (
        K("loss_type", "equivalent", default=["sigmoid"], other="ipo"),
        K("loss_weights", "equivalent", other=[1.0, 0.5], beside={"loss_type": ["sigmoid", "sft"]}),
        K("beta", "equivalent", default=0.1, other=0.2),
        K("label_smoothing", "equivalent", default=0.0, other=0.1, beside={"loss_type": "robust"}),
        K("discopop_tau", "equivalent", default=0.05, other=0.1, beside={"loss_type": "discopop"}),
        K("desirable_weight", "equivalent", default=1.0, other=2.0, beside={"undesirable_weight": 0.5}),
        K("undesirable_weight", "equivalent", default=1.0, other=2.0, beside=KTO),
        K("cpo_alpha", "equivalent", default=1.0, other=0.3, beside=CPO),
        K("simpo_gamma", "equivalent", default=0.5, other=0.3, beside=CPO),
        K("rpo_alpha", "equivalent", other=0.5),
        K("sync_ref_model", "equivalent", default=False)), meaning.preference),
    Joint("dtype of the reference", (), trl.reference_dtype),
    K("ref_model_*", "inert", why="read with sync_ref_model, or where the reference is another model", also=(
        "ref_model_mixup_alpha", "ref_model_sync_steps")),
    K("f_divergence_type", "unsupported", fine=("reverse_kl", "FDivergenceType.REVERSE_KL"), refuse=True, why="the divergence is the reverse KL"),
    K("f_alpha_divergence_coef", "inert", why="read with another f_divergence_type alone"),
    K("use_weighting", "unsupported", fine=(False,), refuse=True, why="pairs are not weighed (WPO)"),
    K("ld_alpha", "unsupported", fine=(1, 1.0), refuse=True, why="tokens of the longer completion are not weighed (LD-DPO)"),
    K("alpha", "unsupported", fine=(0, 0.0), refuse=True, why="AlphaPO's rewards"),
    K("reference_free", "unsupported", fine=(False,), refuse=True, why="a reference of uniform log-probs: simpo and cpo have none"),
    K("precompute_ref_log_probs", "automatic", why="log-probs of the reference are computed once and kept", also=(
        "precompute_ref_batch_size", "force_use_ref_model", "use_logits_to_keep", "base_model_attribute_name", "is_encoder_decoder")),
    K("model_adapter_name", "ask", why="name the adapter's folder in lora.path", also=("ref_adapter_name",)),
    K("generate_during_eval", "unsupported", fine=(False,), why="a set of prompts in eval.sets is completed and scored"),
    K("tools", "ask", why="tools are a column `tools` of the rows"),
), command=r"dpo|kto|cpo|orpo", required=REQUIRED, differs=(
    "no weight decay on norms, biases and other vectors (as transformers)",
    "the order of the data is drawn from another generator",
))

REWARD = derived(TABLE, "reward_model", (
    recipe("reward_model"),
    Joint("lengths", length(), meaning.pair_lengths),
    *rules(Since(("0.17", 5e-5), ("0.26", 1e-4)), NO_LOG, evaluated=True),
    Joint("loss", (K("center_rewards_coefficient", "equivalent", other=0.01),), meaning.reward_model),
), command=r"reward", required=REQUIRED, differs=(
    "no weight decay on norms, biases and other vectors (as transformers)",
    "the order of the data is drawn from another generator",
))

GKD = derived(TABLE, "distill", (
    recipe("distill"),
    Joint("lengths", length(), meaning.lengths),
    *rules(2e-5, NO_LOG, evaluated=False),
    Joint("distillation", (
        K("teacher_model_name_or_path", "equivalent", other="a/teacher"),
        K("lmbda", "equivalent", default=0.5, other=1.0),
        K("beta", "equivalent", default=0.5, other=0.0),
        K("temperature", "equivalent", default=0.9, other=0.7),
        K("max_new_tokens", "equivalent", default=128, other=64, beside={"lmbda": 1.0})), meaning.distillation),
    K("seq_kd", "unsupported", fine=(False,), refuse=True, why="the teacher writes no completions: write a file of them, and run.recipe=sft"),
    Joint("teacher", (
        K("teacher_model_init_kwargs.dtype", "equivalent", other="bfloat16", beside={"bf16": False}, also=("teacher_model_init_kwargs.torch_dtype",)),
        K("teacher_model_init_kwargs.revision", "equivalent", other="abc")), meaning.teacher),
    K("teacher_model_init_kwargs.**", "ask", why="options of the teacher's loading"),
    K("completion_only_loss", "inert", why="the divergence is taken at completions", also=("assistant_only_loss", "dataset_text_field", "loss_type")),
), command=r"gkd", required=REQUIRED, differs=(
    "no weight decay on norms, biases and other vectors (as transformers)",
    "the order of the data is drawn from another generator",
))
