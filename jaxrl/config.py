"""The config: every option once, with its default, unit and meaning.

`SCHEMA` is the single list of options. `default_config()` turns it into a locked `ConfigDict`; a config file under
`configs/` changes what it needs in `get_config(arg)`; `--config.group.option=value` changes it again on the command
line. `None` means "decide for me": an algorithm option takes its preset's value, others as their text says.

Counts are global over all hosts unless the text says "per data shard". Times are seconds unless named otherwise.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import re
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import config_dict

from jaxrl.errors import ConfigError
from jaxrl.names_elsewhere import ELSEWHERE, not_yet


class Option(NamedTuple):
    """One option. `kind` is needed only where the default is None; `choices` bounds a string."""

    default: Any
    doc: str
    kind: type | None = None
    choices: tuple | None = None


O = Option
# Lists of integers; the entries of all others but reward.weights are text.
INTEGERS = ("rollout.stop_token_ids", "rollout.prompt_lengths", "rollout.cache_lengths", "train.row_lengths", "plan.lengths", "profile.steps",
            "profile.memory", "profile.processes")
TRIGGER = "0 = never"
CHANGEABLE = ("data", "eval", "tokenizer", "model", "reference")  # run.accept_changed
PRESET_NAMES = ("grpo", "grpo_paper", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline",
                "remax", "ppo", "vapo", "decoupled_ppo", "aipo", "sapo", "dppo", "lite_ppo")  # algorithms/presets.py, without jax

SCHEMA: dict[str, dict[str, Any]] = {
    "run": {
        "recipe": O("rl", "the job to run", choices=("rl", "sft")),
        "mode": O("train", "what to do with the job", choices=("train", "eval", "parity", "plan")),
        "dir": O("", "run directory; empty = runs/<name of the config file>, with _<its argument> if it has one"),
        "seed": O(0, "root of every random stream (init, sampling; data order has data.seed)"),
        "resume": O("auto", "auto: newest checkpoint in run.dir if any; must; never; or the path of a run or checkpoint"),
        "accept_changed": O((), "what may hold something else than when the checkpoint was written, though its options are the same:"
                                f" {', '.join(CHANGEABLE)}; else a resume is refused"),
        "stop_seconds": O(30.0, "after a stop was asked for: longest wait for the rewards of an evaluation, which are kept; a training"
                                " step's, which are not, are left at once"),
        "warm_start": O("", "config file of an SFT job that runs first (in <run.dir>/warm_start) and whose export becomes"
                            " model.path; empty = none"),
        "compile_cache": O("auto", "directory of XLA's persistent compilation cache; auto = ~/.cache/jaxrl/xla; empty = off"),
        "compile_cache_gb": O(10.0, "largest size of that directory in GB when a run starts: what was used longest ago is deleted; 0 = no limit"),
        "deterministic": O(False, "ask XLA for deterministic GPU operations (slower there; CPU and TPU already are)"),
        "matmul_precision": O("auto", "auto: highest for fp32 compute, the platform's default otherwise",
                              choices=("auto", "default", "high", "highest")),
    },
    "model": {
        "path": O("", "HF folder or hub id: weights, config and tokenizer"),
        "revision": O(None, "hub revision", str),
        "tokenizer_revision": O(None, "hub revision of the tokenizer; None = model.revision where model.tokenizer is empty", str),
        "init": O("pretrained", "pretrained: load weights; random: initialise from run.seed",
                  choices=("pretrained", "random")),
        "config": O({}, "HF config entries (model_type, hidden_size, ...) for init=random without a folder, or to override it"),
        "tokenizer": O("", "tokenizer folder or hub id; empty = model.path"),
        "chat_template": O("", "Jinja file replacing the tokenizer's chat template"),
        "pad_token": O("", "overrides the tokenizer's pad token"),
        "eos_tokens": O((), "tokens (text) that end an answer; empty = the model's and tokenizer's own"),
        "scan_layers": O("auto", "auto: scan over layers, unroll up to 8 on the CPU", choices=("auto", "true", "false")),
        "remat": O("auto", "what the backward pass recomputes; auto: none under 50 M parameters, else full",
                   choices=("auto", "none", "full", "dots", "offload")),
        "remat_every": O(1, "layers that are recomputed together: more = fewer inputs kept, more of them at once"),
        "attention": O("auto", "attention implementation; auto: the platform's", choices=("auto", "tpu", "gpu", "cudnn", "blockwise", "reference")),
        "trainable": O((".*",), "patterns of parameter names that train"),
        "frozen": O((), "patterns of parameter names that do not (wins over trainable)"),
        "trust_remote_code": O(False, "let transformers run tokenizer code from the model folder"),
    },
    "mesh": {
        "dp": O(1, "replicas of the parameters; -1 = the rest of the devices"),
        "fsdp": O(-1, "shards of parameters and optimizer state; the batch is split over dp x fsdp"),
        "tp": O(1, "shards of heads, MLP width and vocabulary"),
        "roles": O({}, "role (policy, reference, critic, sampler) -> {devices: 'all' or '0-3' of every process, dp, fsdp, tp,"
                       " rest: 'host' between uses (sampler: 'none', dropped during the update)}; default: the policy's mesh"),
    },
    "data": {
        "path": O((), "one or several files (.jsonl .json .csv .parquet), folders or hub ids"),
        "subset": O("", "hub configuration name"),
        "split": O(("train",), "hub split, or several to be concatenated"),
        "revision": O(None, "hub revision", str),
        "prompt_column": O("prompt", "text, or a list of chat messages"),
        "answer_column": O("answer", "reference answer handed to rewards as `answer`; empty = none"),
        "answer_pattern": O("", "regex whose first group is cut out of the answer, e.g. '#### (.*)' for GSM8K"),
        "completion_column": O("completion", "target text for SFT (ignored by rl)"),
        "system_prompt": O("", "system message put before the prompt (unless its messages bring one)"),
        "chat": O("auto", "auto: apply the chat template if the tokenizer has one", choices=("auto", "true", "false")),
        "add_generation_prompt": O(True, "end the rendered prompt with the assistant header"),
        "chat_template_kwargs": O({}, "extra variables for the chat template, e.g. enable_thinking"),
        "response_prefix": O("", "text the answer is made to start with (part of the prompt, seen by rewards)"),
        "prompts_per_step": O(64, "prompts per RL step; sequences per step for SFT"),
        "max_prompt_tokens": O(512, "longest prompt in tokens"),
        "overlong_prompt": O("filter", "a longer prompt is left out, cut on the left, or an error",
                             choices=("filter", "truncate_left", "error")),
        "epochs": O(0, "end after this many passes over the data; 0 = no limit"),
        "shuffle": O(True, "global shuffle, anew in each epoch"),
        "seed": O(None, "seed of the shuffle; None = run.seed", int),
        "max_rows": O(0, "use only the first rows; 0 = all"),
        "eval_fraction": O(0.0, "rows carved out (by seed, equal prompts together) as eval set 'heldout': a share below 1, or a number of rows"),
        "bad_rows": O("error", "a row that cannot be read: stop with file and line, or count and skip",
                      choices=("error", "skip")),
        "workers": O(0, "threads that prepare rows ahead"),
        "prefetch": O(2, "steps of rows prepared ahead when workers > 0"),
        "drop_last": O(True, "with epochs > 0: leave out a last step that is not full"),
    },
    "rollout": {
        "engine": O("auto", "jax: the embedded sampler; vllm; auto: vllm where it is installed and there is a GPU, or where"
                            " rollout.servers names servers; or an import path of your own, module:function or ./file.py:function"),
        "group_size": O(8, "samples per prompt"),
        "max_new_tokens": O(1024, "longest answer in tokens"),
        "min_new_tokens": O(0, "end tokens are forbidden before this many"),
        "temperature": O(1.0, "0 = greedy"),
        "top_p": O(1.0, "keep the smallest set of tokens whose mass reaches this"),
        "top_k": O(-1, "keep this many tokens; -1 = all"),
        "min_p": O(0.0, "keep tokens with at least this share of the best token's probability"),
        "repetition_penalty": O(1.0, "divides (positive) or multiplies (negative) logits of tokens seen in prompt or answer"),
        "frequency_penalty": O(0.0, "subtracted from a token's logit per time it was sampled"),
        "penalties_in_training": O(False, "allow the two penalties in training rollouts (they bend the ratio)"),
        "stop": O((), "strings that end an answer"),
        "keep_stop": O(True, "keep the tokens of the stop string in the answer"),
        "stop_token_ids": O((), "token ids that end an answer besides the end-of-text tokens"),
        "slots": O(0, "sequences decoded at once over all devices; 0 = the batch, at most 256 per process (this and the next four: embedded"
                      " sampler only)"),
        "prompt_lengths": O((), "static prompt lengths, at most 3; empty = quarter, half and all of the longest prompt"),
        "cache_lengths": O((), "static cache lengths, at most 3; empty = prompt + answer, and where XLA decodes long answers also 3/8 of it"),
        "compaction": O(True, "the tail of a batch goes on in fewer slots (1/2, 1/8, 1/32); False: one slot count, so that a"
                              " sample is bitwise independent of its neighbours"),
        "decode_steps": O(16, "most decode steps between two looks of the host"),
        "dtype": O("auto", "dtype of weights and cache in the sampler; auto = train.compute_dtype",
                   choices=("auto", "bf16", "fp16", "fp32")),
        "timeout_seconds": O(3600.0, "longest wait for one batch of answers"),
        "max_staleness": O(0, "generate while training: answers may be drawn from weights published this many publications before"
                              " those of the step that uses them; 0 = every step samples from its own"),
        "sync_every": O(1, "steps from one publication of the weights to the next; the steps between share one version"),
        "partial": O(False, "with answers ahead: those begun go on under newly published weights, with a version per token; False:"
                            " a publication waits until they are finished"),
        "servers": O((), "URLs of running vLLM servers, or one folder (/path or ./path) whose files name them, read again at every"
                         " publish; empty = jaxrl starts its own"),
        "placement": O("auto", "colocated: engine and trainer have the same devices in turns (what the engine holds leaves them during"
                               " the update); disaggregated: the engine has its own, nothing sleeps; auto: as devices are given,"
                               " nothing sleeps", choices=("auto", "colocated", "disaggregated")),
        "seeded": O("auto", "whether vLLM samples each request from its seed; auto: where that costs nothing (on its CPU build)",
                    choices=("auto", "true", "false")),
        "verify_weights": O("first", "compare checksums of the servers' weights with the trainer's: at the first publish (and"
                                     " for every server that joins), always, or never", choices=("first", "always", "never")),
        "vllm": {
            "replicas": O(1, "servers that each process starts"),
            "tensor_parallel": O(1, "GPUs of one server"),
            "devices": O((), "CUDA_VISIBLE_DEVICES of each server, e.g. ('0,1', '2,3'); empty = as jaxrl's"),
            "memory_fraction": O(0.0, "share of a GPU's memory that a server takes; 0 = 0.85 with devices of its own, 0.45 beside"
                                      " the trainer, which keeps what is left of 0.9 (placement=auto) or takes it in turns"),
            "max_model_len": O(0, "longest sequence of a server; 0 = longest prompt + longest answer"),
            "max_running": O(256, "sequences that a server decodes at once"),
            "max_requests": O(512, "requests that are with one server at once, the others wait here"),
            "prefix_caching": O(True, "a group's prompt is computed once"),
            "chunked_prefill": O(True, "long prompts are computed in pieces beside decoding"),
            "engine_kwargs": O({}, "further vLLM options by their names, e.g. {'quantization': 'fp8'}; they win over jaxrl's"),
            "env": O({}, "further environment variables of the servers"),
            "python": O("", "interpreter of the servers' own environment; empty = this one"),
            "host": O("127.0.0.1", "address the servers listen on; another one than loopback needs $VLLM_API_KEY"),
            "port": O(0, "port of the first server, the others follow; 0 = free ones"),
            "api_key": O("", "key that servers ask for; empty = $VLLM_API_KEY, or for servers of ours one made for the run"),
            "transport": O("auto", "how weights travel: shm (one machine), network, nccl (from GPU to GPU), checkpoint (a folder"
                                   " that servers without jaxrl's plugin reload); auto: shm where it can be, else network, else"
                                   " checkpoint", choices=("auto", "shm", "network", "nccl", "checkpoint")),
            "weights_host": O("", "address of this host as the servers see it, for transport=network; empty = the one on the way to"
                                  " the first server"),
            "chunk_mb": O(256, "megabytes of weights that travel at once (at least one layer)"),
            "setup_seconds": O(600.0, "longest start of a server"),
            "request_seconds": O(0.0, "longest answer; after it a request is tried again; 0 = half of rollout.timeout_seconds"),
            "sync_seconds": O(600.0, "longest call of a weight update"),
            "health_seconds": O(10.0, "a server silent for this long, twice, is given up"),
            "retries": O(3, "further tries of a failed request or publish"),
            "restarts": O(3, "how often a server of ours is started again"),
            "probe_bound": O(0.0, "largest mean difference in nats between the probe's log-probs and the trainer's; 0 = by dtype:"
                                  " 1e-3 fp32, 0.1 fp16, 0.2 bf16, three times the first one where quantised"),
            "log_level": O("warning", "level of the servers' logs in <run.dir>/vllm", choices=("debug", "info", "warning", "error")),
        },
    },
    "reward": {
        "functions": O(("math",), "names (math exact boxed choice format), package.module:function or ./file.py:function"),
        "weights": O((), "one weight per function; empty = all 1"),
        "column": O("", "data column that names the function per row; empty = all functions for all rows"),
        "format_pattern": O("", "regex the whole answer must match (reward `format`)"),
        "pass_mark": O(1.0, "a row counts as accurate from this score of its named reward"),
        "workers": O(2, "worker processes"),
        "env": O((), "names of environment variables that the workers get, beside those that Python needs (PATH, HOME, LANG, ...)"),
        "trial": O(True, "call each function on the first two rows before the model is loaded, their answers as completions;"
                         " stop if it fails on both"),
        "timeout_seconds": O(10.0, "wall-clock limit per answer and function (per call of a batched one); the worker is killed"),
        "memory_gb": O(8.0, "memory that a worker and all it started may hold, else they are killed (Linux); 0 = no limit"),
        "recycle": O(20_000, "a worker that has done this many calls is replaced when it has nothing to do; 0 = never"),
        "max_failed_fraction": O(0.2, "stop when more than this share of a step's answers has a failed reward"),
        "zero_without_end": O(False, "0 for answers that were cut by the length limit"),
        "scale": O(1.0, "factor on the weighted sum (after zero_without_end)"),
        "bias": O(0.0, "added after scale"),
        "clip": O(None, "bound on the absolute value after bias", float),
        "norm_mean": O("none", "last of all: subtract the mean of the group or of the batch", choices=("none", "group", "batch")),
        "norm_std": O("none", "after that: divide by the standard deviation (ddof 1) of the group or of the batch",
                      choices=("none", "group", "batch")),
        "overlong_buffer": O(0, "DAPO: penalty grows linearly over the last tokens before max_new_tokens; 0 = off"),
        "overlong_penalty": O(1.0, "largest DAPO length penalty (subtracted after clip)"),
    },
    "algorithm": {
        "preset": O("grpo", "row of algorithms/presets.py that fills the options left at None", choices=PRESET_NAMES),
        "advantage": O(None, "outcome: one advantage per answer; returns: reward to go per token; gae: with a critic; or an"
                             " import path of your own, module:function or ./file.py:function", str),
        "advantage_mean": O(None, "baseline of the score; greedy: the score of a greedy answer", str,
                            ("none", "group", "batch", "leave_one_out", "greedy")),
        "advantage_std": O(None, "scale of the score: standard deviation (ddof 1) of the group or of the batch, or none", str,
                           ("none", "group", "batch")),
        "whiten": O(None, "bring advantages to mean 0 and variance 1 over all scored tokens of the step", bool),
        "advantage_low": O(None, "advantages are clipped below this", float),
        "advantage_high": O(None, "advantages are clipped above this", float),
        "gamma": O(None, "discount per token of returns and gae", float),
        "lam": O(None, "lambda of gae", float),
        "lam_alpha": O(None, "VAPO: lambda of the policy is 1 - 1/(lam_alpha x answer length); 0 = off", float),
        "critic_lam": O(None, "lambda of the critic's returns; None = lam", float),
        "policy_loss": O(None, "clip, cispo, sapo, dppo, pg, or an import path of your own", str),
        "ratio": O(None, "policy ratio by token, by sequence (GSPO), as GSPO-token, or as geometric mean (GMPO)", str,
                   ("token", "sequence", "sequence_token", "geometric")),
        "clip_low": O(None, "ratio is clipped below 1 - clip_low (geometric: log-ratio below -clip_low)", float),
        "clip_high": O(None, "ratio is clipped above 1 + clip_high (geometric: log-ratio above clip_high)", float),
        "dual_clip": O(None, "loss of a negative advantage is at most this times it; 0 = off", float),
        "delta": O(None, "largest ratio of the unclipped branch; 0 = off", float),
        "cispo_max_ratio": O(None, "largest weight of cispo, an absolute ratio", float),
        "cispo_min_ratio": O(None, "smallest weight of cispo", float),
        "sapo_tau_pos": O(None, "temperature of sapo's gate for positive advantages", float),
        "sapo_tau_neg": O(None, "temperature of sapo's gate for the others", float),
        "dppo_low": O(None, "dppo leaves out a token with A <= 0 whose probability fell by more than this", float),
        "dppo_high": O(None, "dppo leaves out a token with A > 0 whose probability rose by more than this", float),
        "aggregation": O(None, "how token losses become one number; constant: by aggregation_constant per answer", str,
                         ("token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean")),
        "aggregation_constant": O(0.0, "what aggregation=constant divides an answer's sum by; 0 = rollout.max_new_tokens"),
        "kl": {
            "coef": O(None, "weight of the KL to the reference; 0 loads no reference", float),
            "estimator": O(None, "KL estimator; k1 in the reward only, k3_unbiased in the loss only", str,
                           ("k1", "k2", "k3", "k3_unbiased", "abs", "low_var")),
            "placement": O(None, "the KL is a term of the loss, or is subtracted from the reward", str, ("loss", "reward")),
        },
        "entropy_coef": O(None, "entropy bonus, token mean", float),
        "entropy_target": O(None, "nats per token: the coefficient grows while the entropy is below; 0 = constant", float),
        "entropy_rate": O(0.005, "change of the adaptive coefficient per update"),
        "entropy_max": O(0.05, "largest adaptive coefficient"),
        "positive_nll_coef": O(None, "VAPO: weight of the NLL of answers that reach reward.pass_mark", float),
        "dynamic_sampling": O(None, "groups without signal are masked, or replaced by others until the step is full", str,
                              ("off", "mask", "refill")),
        "dynamic_sampling_rounds": O(10, "refill: most rounds of a step; what is then missing is filled with the groups left out"),
        "keep_group": O("", "what dynamic sampling asks: empty = scores that differ; the name of a reward whose values must"
                            " differ; or an import path: f(group: dict) -> bool"),
        "shared_prefix_tokens": O(0, "no loss on openings of this many tokens that answers of different score share; 0 = off"),
        "sampled_support": O(False, "log-probs over the tokens that rollout.top_k (at most 128), top_p and min_p left, as the answer"
                                    " was drawn (DeepSeek-V3.2's keep sampling mask); embedded sampler only"),
        "early_stop_ratio": O(0.0, "a step's further updates are left out once an update's mean ratio is above; 0 = off"),
        "early_stop_kl": O(0.0, "the same for policy/approx_kl, in nats per token; 0 = off"),
        "ppo_epochs": O(None, "passes over one batch", int),
        "num_minibatches": O(None, "optimizer steps per pass", int),
        "old_logprobs": O(None, "auto: no scoring pass when a batch gets one optimizer step; recompute: always score;"
                                " rollout: ratios are taken to the sampler's log-probs", str, ("auto", "recompute", "rollout")),
        "mismatch": {
            "correction": O(None, "weight on the policy loss for sampler-trainer differences, truncated (tis) or masked (mis), by"
                                  " token, sequence or geometric mean; auto: token_tis for vLLM and wherever the sampler does not"
                                  " decode in fp32", str, ("auto", "none", *(f"{level}_{action}" for action in ("tis", "mis")
                                                                             for level in ("token", "sequence", "geometric")))),
            "cap": O(None, "largest mismatch weight", float),
            "low": O(None, "mis: weights below this are masked too (IcePop: low 0.5, cap 5)", float),
            "sequence_delta": O(None, "answers with negative advantage whose mean log-prob fell by more than this since they were"
                                      " sampled add no policy loss; 0 = off", float),
            "warn": O(0.1, "mean sampler-trainer difference of log-probs, in nats, above which a step warns; 0 = never"),
            "stop": O(0.0, "the same difference that stops the run; 0 = never"),
        },
        "mask_truncated": O(None, "answers cut by the length limit add no loss (they stay in the denominators)", bool),
        "overlong_buffer_fraction": O(None, "reward.overlong_buffer as a share of max_new_tokens, where that is 0", float),
    },
    "critic": {
        "path": O("", "HF folder or hub id of a language or reward model; empty = the policy as it starts"),
        "revision": O(None, "hub revision of critic.path", str),
        "shared": O(False, "a value head on the policy's own trunk instead of a model of its own"),
        "coef": O(0.5, "shared: weight of the value loss beside the policy's"),
        "lr": O(5e-6, "peak learning rate; the rest is as in optimizer.*"),
        "optimizer": O({}, "entries of optimizer.* that the critic has its own: {'b2': 0.95, 'schedule': 'cosine', 'max_grad_norm': 0.5}"),
        "value_clip": O(0.2, "a value moves by at most this per step before its loss stops counting; 0 = off"),
        "num_minibatches": O(0, "optimizer steps of the critic per pass; 0 = as the policy"),
        "warmup_steps": O(0, "first steps in which only the critic learns"),
        "normalize": O(False, "learn returns less their running mean over their running standard deviation"),
    },
    "reference": {
        "path": O("", "HF folder or hub id; empty = the policy as it starts"),
        "revision": O(None, "hub revision of reference.path", str),
        "dtype": O("bf16", "dtype the reference is held in", choices=("bf16", "fp32")),
        "reset_steps": O(0, "the reference becomes the policy every this many steps; 0 = never"),
        "reset_epochs": O(0.0, "the same in passes over the data; 0 = never"),
        "reset_optimizer": O(False, "a reset starts the optimizer's moments anew, too; the schedule goes on"),
    },
    "optimizer": {
        "name": O("adamw", "adamw, adam, sgd, lion, adafactor, or an import path to an optax factory taking learning_rate"),
        "lr": O(None, "peak learning rate", float),
        "b1": O(0.9, "first-moment decay"),
        "b2": O(0.999, "second-moment decay"),
        "eps": O(1e-8, "added to the root of the second moment"),
        "weight_decay": O(0.01, "decoupled; not applied to norms, biases and other vectors"),
        "max_grad_norm": O(1.0, "global norm the gradient is clipped to; 0 = off"),
        "schedule": O("constant", "after warm-up; counts optimizer updates", choices=("constant", "linear", "cosine", "wsd")),
        "warmup_steps": O(10, "updates of linear warm-up"),
        "warmup_fraction": O(0.0, "the same as a share of all updates; wins over warmup_steps when > 0"),
        "warmup_start": O(0.0, "learning rate at update 0 as a share of lr"),
        "decay_steps": O(0, "updates of decay (wsd: at the end); 0 = all after warm-up (wsd: the last tenth)"),
        "decay_shape": O("linear", "of wsd's decay; sqrt: falls by the root of the share that has passed",
                         choices=("linear", "cosine", "sqrt")),
        "floor": O(0.0, "lowest learning rate as a share of lr"),
        "offload": O(False, "keep the optimizer's state (the critic's too) in host memory while no update is applied"),
        "groups": O({}, "name pattern -> {lr: multiplier, weight_decay: value}"),
        "max_nonfinite": O(5, "a non-finite update is skipped; stop after this many in a row"),
    },
    "train": {
        "steps": O(None, "end after this many steps (RL steps, or SFT updates); None = 100, or no limit where data.epochs or"
                         " train.max_samples is set. A run ends at the first of the three that is set", int),
        "max_samples": O(0, "end after this many samples; 0 = no limit"),
        "tokens_per_microbatch": O(0, "rows x row length held at once, per data shard, one row at least; 0 = 16384, on CPUs 2048"),
        "score_tokens_per_microbatch": O(0, "the same where nothing is learnt: old and reference log-probs, values; 0 = the update's own"
                                            " rows, so that a policy that has not moved has ratios of exactly 1 (on the CPU)"),
        "row_lengths": O((), "static lengths of packed rows, at most 2; empty = one: the longest sequence, or up to 2048 with room"
                              " for more of its group"),
        "row_counts": O(2, "static row counts per row length; 2: whole microbatches and quarters, so that a last one wastes"
                           " little; 1: whole ones only, one program fewer to compile", choices=(1, 2)),
        "max_sequence_tokens": O(0, "bound on prompt + answer; 0 = max_prompt_tokens + max_new_tokens"),
        "share_prompts": O(True, "answers of a group share one copy of their prompt in a packed row"),
        "compute_dtype": O("auto", "auto: bf16 where the chip has it, fp32 on the CPU", choices=("auto", "bf16", "fp16", "fp32")),
        "param_dtype": O("fp32", "master weights", choices=("fp32", "bf16")),
        "logprob_chunk": O(0, "scored tokens that meet the head at once, per data shard; 0 = 1024, on CPUs 512 (and a part of the vocabulary)"),
        "loss_on_prompt": O(False, "SFT: train on prompt tokens too"),
    },
    "eval": {
        "sets": O((), "held-out sets, each 'name=path', or 'name=path@split' for folders and hub ids (default split: test);"
                      " read with data.* columns and templates"),
        "every_steps": O(10, f"evaluate every this many steps; {TRIGGER}"),
        "every_epochs": O(0.0, f"evaluate every this many epochs; {TRIGGER}"),
        "every_seconds": O(0.0, f"evaluate every this many seconds; {TRIGGER}"),
        "before": O(True, "evaluate before the first step"),
        "after": O(True, "evaluate after the last step"),
        "max_rows": O(0, "first rows of each set; 0 = all"),
        "samples": O(1, "answers per row for mean@k and pass@k"),
        "temperature": O(0.0, "0 = greedy"),
        "top_p": O(1.0, "as rollout.top_p"),
        "top_k": O(-1, "as rollout.top_k"),
        "min_p": O(0.0, "as rollout.min_p"),
        "repetition_penalty": O(1.0, "as rollout.repetition_penalty"),
        "frequency_penalty": O(0.0, "as rollout.frequency_penalty"),
        "max_new_tokens": O(0, "0 = rollout.max_new_tokens"),
        "rewards": O((), "reward functions for evaluation; empty = reward.functions"),
        "accuracy_from": O("", "reward whose pass mark is accuracy; empty = the first"),
    },
    "checkpoint": {
        "every_steps": O(20, f"save every this many steps; {TRIGGER}"),
        "every_minutes": O(30.0, f"save every this many minutes; {TRIGGER}"),
        "every_epochs": O(0.0, f"save every this many epochs; {TRIGGER}"),
        "at_end": O(True, "save after the last step"),
        "keep": O(3, "newest checkpoints kept; -1 = all"),
        "timeout_seconds": O(1800.0, "longest time for a checkpoint or an export: a disk that hangs ends the run with status 1; 0 = no limit"),
        "asynchronous": O(True, "write in the background"),
        "export_every_steps": O(0, f"HF export every this many steps; {TRIGGER}"),
        "export_every_epochs": O(0.0, f"HF export every this many epochs; {TRIGGER}"),
        "export_every_minutes": O(0.0, f"HF export every this many minutes; {TRIGGER}"),
        "export_at_end": O(True, "HF export after the last step, in <run.dir>/export"),
        "export_dtype": O("auto", "auto: the source's dtype (fp32 for random init)", choices=("auto", "bf16", "fp16", "fp32")),
        "shard_gb": O(5.0, "largest exported safetensors file in GB"),
    },
    "log": {
        "console": O("auto", "auto: live table on a terminal, plain lines elsewhere", choices=("auto", "table", "plain", "off")),
        "tensorboard": O(True, "write <run.dir>/tensorboard"),
        "wandb": O(False, "log to Weights & Biases (extra `wandb`)"),
        "wandb_project": O("jaxrl", "W&B project"),
        "wandb_group": O("", "W&B group"),
        "wandb_name": O("", "W&B run name; empty = name of the run directory"),
        "wandb_mode": O("online", "W&B mode", choices=("online", "offline")),
        "sinks": O((), "further metric sinks, package.module:Class or ./file.py:Class: called with (run_dir, config dict),"
                       " has write(step, scalars) and close()"),
        "every_steps": O(1, "SFT: steps per line of metrics (RL writes a line every step)"),
        "print_samples": O(1, "sampled conversations, of different prompts, shown at each evaluation; TensorBoard and W&B get as many of"
                              " training every tenth step"),
        "trace_requests": O(False, "vLLM: write a timeline of every request to <run.dir>/requests.jsonl"),
        "rollouts": O(True, "write every step's rollouts to <run.dir>/rollouts as JSONL"),
        "level": O("info", "log level", choices=("debug", "info", "warning", "error")),
    },
    "plan": {
        "target": O("", "run.mode=plan: the devices to plan for: a TPU slice (v5p:4x4x8) or chip and count (h100:64, cpu:8)"),
        "json": O("", "also write the plan to this file"),
        "run": O("", "directory of a synchronous run whose answer lengths and speeds drive the simulation of running ahead; empty = the"
                     " target's roofline"),
        "lengths": O((), "answer lengths in tokens that the simulation takes in turn; empty = plan.run's, or the longest"),
        "effort": O("fast", "of the TPU's compiler: fast, or full as a run has it (four times as long, memory up to 12 % off"
                            " without)", choices=("fast", "full")),
        "timeout_seconds": O(600.0, "longest compilation of a plan"),
    },
    "profile": {
        "steps": O((), "(first, last) step traced with the JAX profiler into <run.dir>/profile"),
        "memory": O((), "steps after which (0: before the first) the arrays that device memory holds then are written into <run.dir>/profile"),
        "python": O(False, "traces also hold every call of Python, with its stack: slower steps, larger files"),
        "processes": O((0,), "numbers of the processes that trace; with one there is only 0"),
    },
    "launch": {
        "hosts": O("auto", "how the processes of a run find each other; auto: what the environment tells (jaxrl.launch, Slurm,"
                           " Kubernetes, a TPU pod), else one process; see docs/hosts.md",
                   choices=("auto", "none", "explicit", "slurm", "kubernetes", "tpu")),
        "coordinator": O("", "host:port of process 0; empty = $JAXRL_COORDINATOR, or the first node of the Slurm step"),
        "processes": O(0, "processes of the run; 0 = $JAXRL_PROCESSES, or Slurm's tasks"),
        "process": O(-1, "number of this process, from 0; -1 = $JAXRL_PROCESS, or Slurm's or Kubernetes' index"),
        "connect_seconds": O(300.0, "longest wait until all processes have come together"),
        "heartbeat_seconds": O(100.0, "a process without a sign of life for this long is given up, and the others end"),
        "wait_seconds": O(0.0, "longest wait for the slowest process where all meet: after sampling, rewards, evaluation; 0 = an"
                               " hour more than rollout.timeout_seconds"),
    },
    "faults": {
        "plan": O((), "faults to inject, for tests: 'component.fault@step=3,phase=commit' (of several processes one: process=1)"),
    },
    "user": {},
}


# Options whose default is another one in every recipe (`by_recipe`). Supervised learning on a pretrained model takes 2e-5, as TRL does;
# reinforcement learning breaks there.
RECIPE_DEFAULTS = {"optimizer.lr": {"rl": 1e-6, "sft": 2e-5}}


def by_recipe(cfg) -> dict[str, Any]:
    """The options of RECIPE_DEFAULTS that nobody set, with their recipe's value."""
    return {name: values[cfg.run.recipe] for name, values in RECIPE_DEFAULTS.items() if get(cfg, name) is None}


def settled(cfg) -> config_dict.ConfigDict:
    """A copy in which the options of `by_recipe` are set."""
    out = cfg.copy_and_resolve_references()
    for name, value in by_recipe(cfg).items():
        put(out, name, value)
    return out


def _build(tree: dict) -> config_dict.ConfigDict:
    out = config_dict.ConfigDict()
    for name, node in tree.items():
        if isinstance(node, Option):
            if node.default is None:
                out[name] = config_dict.placeholder(node.kind)
            elif isinstance(node.default, dict):
                out[name] = config_dict.ConfigDict(node.default)
            else:
                out[name] = node.default
        else:
            out[name] = _build(node)
    return out


def default_config() -> config_dict.ConfigDict:
    """The whole schema at its defaults, locked except `user` and the free-form tables (`model.config`, ...)."""
    cfg = _build(SCHEMA)
    cfg.lock()
    for path in free_tables():
        get(cfg, path).unlock()
    return cfg


def options(tree: dict | None = None, prefix: str = "") -> dict[str, Option]:
    """Flat view of the schema: dotted name -> Option."""
    out = {}
    for name, node in (SCHEMA if tree is None else tree).items():
        if isinstance(node, Option):
            out[prefix + name] = node
        else:
            out.update(options(node, f"{prefix}{name}."))
    return out


def free_tables() -> list[str]:
    """Dotted names of the tables a user may add keys to."""
    return ["user"] + [name for name, opt in options().items() if isinstance(opt.default, dict)]


def get(cfg, dotted: str):
    for part in dotted.split("."):
        cfg = cfg[part]
    return cfg


def put(cfg, dotted: str, value) -> None:
    """Sets a dotted option. Unknown names raise ConfigError naming the nearest known one."""
    *groups, leaf = dotted.split(".")
    known = options()
    table = next((t for t in free_tables() if dotted.startswith(t + ".")), None)
    if table is None and dotted not in known:
        raise ConfigError(unknown_option(dotted))
    node = cfg
    for part in groups:
        if table is not None and part not in node:
            node[part] = config_dict.ConfigDict()
        node = node[part]
    if table is not None:
        node[leaf] = value
        return
    try:
        node[leaf] = _coerce(dotted, value, known[dotted])
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{dotted}={value!r}: {e}") from None


def _coerce(name: str, value, opt: Option):
    kind = opt.kind or type(opt.default)
    if isinstance(opt.default, tuple):
        if isinstance(value, str):
            value = tuple(v for v in value.split(",") if v)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is not None and not isinstance(value, kind):
        remedy = f"; write {{'key': value}}, or --config.{name}.key=value for one entry" if kind is dict else ""
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}{remedy}")
    return value


def unknown_option(dotted: str) -> str:
    """The message for an option that does not exist: nearest names by whole path and by leaf."""
    names = list(options())
    leaf = dotted.rsplit(".", 1)[-1]
    if missing := not_yet(dotted):
        return f"config has no option {dotted!r}: {missing}"
    near = sorted((n for n in names if n.rsplit(".", 1)[-1] == leaf),
                  key=lambda n: -difflib.SequenceMatcher(None, n, dotted).ratio())
    near = [ELSEWHERE[n] for n in (leaf,) if n in ELSEWHERE] + near + difflib.get_close_matches(dotted, names, n=3, cutoff=0.6)
    leaves = difflib.get_close_matches(leaf, [n.rsplit(".", 1)[-1] for n in names], n=2, cutoff=0.75)
    near += [n for n in names if n.rsplit(".", 1)[-1] in leaves or sorted(n.rsplit(".", 1)[-1]) == sorted(leaf)]
    near = list(dict.fromkeys(near))[:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "`--help` lists every option."
    return f"config has no option {dotted!r}; {hint}"


def find_config(spec: str) -> tuple[Path, str | None]:
    """'configs/grpo.py:tiny' or 'grpo:tiny' -> (path, 'tiny'). Bare names are looked up among the shipped configs."""
    name, _, arg = spec.partition(":")
    here = Path(__file__).parent
    stem = name if name.endswith(".py") else name + ".py"
    for path in (Path(name), here / "configs" / Path(stem).name, here.parent / "configs" / Path(stem).name):
        if path.is_file():
            return path, arg or None
    shipped = sorted(p.stem for d in (here / "configs", here.parent / "configs") if d.is_dir() for p in d.glob("*.py"))
    hint = f"; {name} is a preset: algorithm.preset={name}" if name in PRESET_NAMES else f"; {not_yet(name)}" if not_yet(name) else ""
    raise ConfigError(f"--config={spec}: no such file; shipped configs: {', '.join(shipped)}{hint}")


def load_config(spec: str, overrides: dict[str, Any] | None = None) -> config_dict.ConfigDict:
    """Loads `get_config(arg)` from a config file and applies dotted overrides, e.g. {"optimizer.lr": 1e-5}.

    `spec` is a path or the bare name of a shipped config, optionally with ':arg'. An empty `run.dir` becomes
    `runs/<file name>`, with _<arg> if there is one.
    """
    path, arg = find_config(spec)
    module_spec = importlib.util.spec_from_file_location(f"jaxrl_config_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as e:  # it is the user's code: anything may go wrong in it
        raise ConfigError(f"--config={spec}: {path} cannot be loaded: {_failure(e, path)}") from e
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={spec}: {path} defines no get_config(arg); see configs/grpo.py for one")
    try:
        cfg = module.get_config(arg)
    except Exception as e:
        raise ConfigError(f"--config={spec}: get_config({arg!r}) failed: {_failure(e, path)}") from e
    if not isinstance(cfg, config_dict.ConfigDict) or set(cfg) != set(SCHEMA):
        raise ConfigError(
            f"--config={spec}: get_config({arg!r}) must return jaxrl.default_config() with changes, not"
            f" {type(cfg).__name__}"
        )
    for name, value in (overrides or {}).items():
        put(cfg, name, value)
    if not cfg.run.dir:
        cfg.run.dir = f"runs/{path.stem}" + (f"_{arg}" if arg else "")
    return cfg


def config_of(given) -> config_dict.ConfigDict:
    """A config of one's own to work on: from a ConfigDict, the name of a config, options by name on top of the defaults, or None."""
    if isinstance(given, str | Path):
        return load_config(str(given))
    if isinstance(given, config_dict.ConfigDict):
        return given.copy_and_resolve_references()
    if not isinstance(given, dict | None):
        raise ConfigError(f"config is a {type(given).__name__}: expected the name of a config, options by name, or a ConfigDict")
    cfg = default_config()
    for name, value in _by_name(given or {}):
        put(cfg, name, value)
    return cfg


def _by_name(table: dict, prefix: str = ""):
    """{"optimizer.lr": 1} and {"optimizer": {"lr": 1}} as (dotted name, value)."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (name == "user" or any(option.startswith(f"{name}.") for option in options())):
            yield from _by_name(value, name + ".")
        else:
            yield name, value


def _failure(error: Exception, path: Path) -> str:
    """What went wrong in a config file, and in which line of it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    where = f" (line {lines[-1]})" if lines else ""
    # A locked ConfigDict says what it lacks, or what it cannot cast, beside a dump of all it holds.
    lacks = re.search(r'Key "(\w+)" does not exist|^"\'(\w+)\'"$', str(error))
    if lacks and isinstance(error, AttributeError):
        return unknown_option(lacks[1] or lacks[2]) + where
    cast = re.search(r"field '(\w+)'.*?\. (.*) is of original type <class '(\w+)'>.* type <class '([\w.]+)'>", str(error), re.S)
    if cast and isinstance(error, TypeError):
        leaf, value, got, kind = cast[1], cast[2], cast[3], cast[4].rpartition(".")[2]
        names = [n for n, o in options().items() if n.endswith(f".{leaf}") and (o.kind or type(o.default)).__name__ == kind]
        remedy = f"; write ({value!r},)" if (kind, got) == ("tuple", "str") else ""
        return f"{' or '.join(names) or leaf}={value}: expected {kind}, got {got}{remedy}{where}"
    return f"{type(error).__name__}: {error}{where}"


def parse_flags(argv: list[str]) -> tuple[str | None, dict[str, Any]]:
    """['--config=FILE', '--config.optimizer.lr=1e-5', ...] -> (FILE, {'optimizer.lr': 1e-5}).

    Values are read by the option's type. Raises ConfigError on anything else, with the right flag in the message.
    """
    spec, overrides, args = None, {}, list(argv)
    while args:
        arg = args.pop(0)
        name, eq, text = arg.partition("=")
        if name != "--config" and not name.startswith("--config."):
            guess = name.lstrip("-")
            if guess in options() or guess.split(".")[0] in SCHEMA:
                raise ConfigError(f"{arg}: options are given as --config.{guess}{eq}{text}")
            if arg.partition(":")[0].endswith(".py"):
                raise ConfigError(f"{arg}: a config is given as --config={arg}")
            raise ConfigError(f"{arg}: unknown argument; use --config=FILE and --config.group.option=value")
        if not eq:
            if not args:
                raise ConfigError(f"{name}: a value is missing")
            text = args.pop(0)
        if name == "--config":
            spec = text
        else:
            dotted = name[len("--config."):]
            overrides[dotted] = parse_value(dotted, text)
    return spec, overrides


def parse_value(dotted: str, text: str):
    """Reads the text of a flag as the type the option has; free tables take Python literals, else text."""
    opt = options().get(dotted)
    if opt is None:
        if not any(dotted.startswith(t + ".") for t in free_tables()):
            raise ConfigError(unknown_option(dotted))
        return _literal(text)
    kind = opt.kind or type(opt.default)
    try:
        if isinstance(opt.default, tuple):
            kind = element_kind(dotted)
            return _parse_list(text, kind)
        if text in ("None", "none", "null") and opt.default is None:
            return None
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text) if kind in (int, float, str) else _literal(text)
    except (ValueError, KeyError):
        wanted = f"a list of {kind.__name__}" if isinstance(opt.default, tuple) else kind.__name__
        raise ConfigError(f"--config.{dotted}={text}: expected {wanted}; {opt.doc}") from None


def element_kind(dotted: str) -> type:
    """What the entries of an option that is a list are: int, float or str."""
    return {"reward.weights": float}.get(dotted, int if dotted in INTEGERS else str)


def _parse_list(text: str, kind: type) -> tuple:
    """'a,b', "('a', 'b')", "'a,b'" (one entry) or '3' as a tuple. ValueError for numbers that are none."""
    value = _literal(text)
    if text[:1] in ("(", "[") or (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    if isinstance(value, str) and value != text:  # it was quoted
        return (value,)
    return tuple(kind(v) for v in text.split(",") if v)


def _literal(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# Names whose value is a secret, in words joined by "_" (so that hyphens, dots and capitals count as joints); and among them names
# of harmless things: special tokens, columns and options of data, parts of a mapping.
_SECRET = re.compile(r"(^|_)(token|pass(word|wd|phrase)?|pwd|secrets?|credentials?|authorization|bearer|cookies?|api_?key|apikeys?|"
                     r"keys?_?id|key_material|connection_string|sas|dsn)$|(^|_)(password|secret|credential|api_?key|apikey)s?(_|$)|._key$")
_HARMLESS = re.compile(r"(pad|bos|eos|unk|sep|cls|mask|stop|start|end|begin|think|image|audio|video|vision|boi|eoi|boa|eoa|fim|tool|"
                       r"prefix|suffix|middle|special|decoder_start|per|max|min|num|last|first|next|new)_token"
                       r"|(sort|group|primary|foreign|answer|prompt|label|column|row|cache|dict|index|image|text|data|dataset|metric|"
                       r"reward|public|message|messages|completion|sample|task|id|lookup|map|partition)_key")
_IN_TEXT = (  # what may stand in any text: URLs with a password or token, headers, name=value, and keys of well-known shapes
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/?#@]*:[^\s/?#]*@", re.I), r"\1<redacted>@"),
    (re.compile(r"(https?://)[^\s/?#@]+@", re.I), r"\1<redacted>@"),
    (re.compile(r"\b(authorization[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"']+", re.I), r"\1<redacted>"),
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{16,}", re.I), r"\1<redacted>"),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA)[\w-]{16,}"), "<redacted>"),
)
_NAMED = re.compile(r"([\w-]+)(=)([^\s&;,\"']+)")


def is_secret(name: str) -> bool:
    """Whether the value under this name is one to keep to oneself."""
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")
    return bool(_SECRET.search(words)) and not _HARMLESS.fullmatch(words)


def redacted(cfg) -> dict:
    """The config as plain dicts without secrets: values under secret-looking names, and what looks like one in any text."""

    def hidden(node):
        if isinstance(node, dict):
            return {k: hidden(v) for k, v in node.items()}
        if isinstance(node, list):
            return [hidden(v) for v in node]
        return node if node is None or node == "" or isinstance(node, bool) else "<redacted>"

    def clean(text: str) -> str:
        for pattern, instead in _IN_TEXT:
            text = pattern.sub(instead, text)
        return _NAMED.sub(lambda m: f"{m[1]}=<redacted>" if is_secret(m[1]) else m[0], text)

    def walk(node):
        if isinstance(node, dict):
            return {k: hidden(v) if is_secret(str(k)) else walk(v) for k, v in node.items()}
        if isinstance(node, list):  # of a command line: --api-key, its value
            flags = [None, *node[:-1]]
            after = [isinstance(f, str) and f.startswith("-") and "=" not in f and is_secret(f) for f in flags]
            return [hidden(v) if secret else walk(v) for v, secret in zip(node, after, strict=False)]
        return clean(node) if isinstance(node, str) else node

    return walk(json.loads(cfg.to_json_best_effort()))


def help_text() -> str:
    """Every option with default and meaning, for `--help`."""
    lines = []
    for name, opt in options().items():
        choices = f" ({' | '.join(map(str, opt.choices))})" if opt.choices else ""
        recipes = ", ".join(f"{recipe} {value}" for recipe, value in RECIPE_DEFAULTS.get(name, {}).items())
        lines.append(f"  --config.{name}={opt.default!r}{choices}\n      {opt.doc}" + f"; None = by recipe: {recipes}" * bool(recipes))
    return "\n".join(lines)
