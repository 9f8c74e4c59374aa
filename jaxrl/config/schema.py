"""Every option once: its default, kind, choices, bounds, unit and meaning.

`None` means "decide for me": an algorithm option takes its preset's value, others as their text says (spec.resolve decides).
Counts are global over all hosts unless the text says "per data shard". Times are seconds unless named otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl.config import schema_jobs as jobs
from jaxrl.config import schema_rewards, schema_videos
from jaxrl.config.option import Option, Rows, shared
from jaxrl.config.registry import RECIPES
from jaxrl.config.schema_algorithm import ALGORITHM, EPISODES

O = Option
# Lists of numbers and of integers; the entries of all others are text.
NUMBERS = ("reward.weights", "reward.remote.weights", "preference.loss_weights")
INTEGERS = ("lora.layers", "rollout.stop_token_ids", "rollout.prompt_lengths", "rollout.cache_lengths", "train.row_lengths",
            "plan.lengths", "profile.steps", "profile.memory", "profile.processes")
TRIGGER = "0 = never"
EVALUATIONS = "eval.sets or data.eval_fraction and eval.every_steps or eval.every_epochs or eval.every_seconds"
CHANGEABLE = ("data", "eval", "tokenizer", "model", "reference", "teacher")  # run.accept_changed

SCHEMA: dict[str, dict[str, Any]] = {
    "run": {
        "recipe": O("rl", "the job to run; or the import path of a Recipe of your own (docs/guides/extend.md)", choices=RECIPES, or_path=True),
        "mode": O("train", "what to do with the job", choices=("train", "eval", "parity", "plan", "replay", "explain", "certify")),
        "dir": O("", "run directory; empty = runs/<name of the config file>, with _<its argument> if it has one"),
        "seed": O(0, "root of every random stream (init, sampling; data order has data.seed)"),
        "resume": O("auto", "auto: newest checkpoint in run.dir if any; must; never; or the path of a run or checkpoint"),
        "accept_changed": O((), "inputs whose content may differ from the checkpoint's:"
                                f" {', '.join(CHANGEABLE)} (its config; weights are the checkpoint's); else a resume is refused"),
        "stop_seconds": O(30.0, "after a stop: longest wait for the rewards of an evaluation; a training step's are left at once", bound=">=0"),
        "warm_start": O("", "config file of an SFT job that runs first (in <run.dir>/warm_start) and whose export becomes"
                            " model.path; empty = none"),
        "compile_cache": O("auto", "directory of XLA's persistent compilation cache; auto = ~/.cache/jaxrl/xla; empty = off"),
        "compile_cache_gb": O(10.0, "largest size of that directory in GB when a run starts: what was used longest ago is deleted; 0 = no limit",
                              bound=">=0"),
        "deterministic": O(False, "ask XLA for deterministic GPU operations (slower there; CPU and TPU already are)"),
        "matmul_precision": O("auto", "auto: highest for fp32 compute, the platform's default otherwise",
                              choices=("auto", "default", "high", "highest")),
    },
    "model": {
        "path": O("", "HF folder or hub id: weights, config and tokenizer"),
        "revision": O(None, "hub revision", str),
        "trust_remote_code": O(False, "let transformers run tokenizer code from the model folder"),
        "tokenizer_revision": O(None, "hub revision of the tokenizer; None = model.revision where model.tokenizer is empty", str),
        "init": O("pretrained", "pretrained: load weights; random: initialise from run.seed", choices=("pretrained", "random")),
        "config": O({}, "HF config entries (model_type, hidden_size, ...) for init=random without a folder, or to override it"),
        "tokenizer": O("", "tokenizer folder or hub id; empty = model.path"),
        "chat_template": O("", "Jinja file replacing the tokenizer's chat template"),
        "pad_token": O("", "overrides the tokenizer's pad token"),
        "eos_tokens": O((), "tokens (text) that end a completion; empty = the model's and tokenizer's own"),
        "scan_layers": O("auto", "auto: scan over layers, unroll up to 8 on the CPU", choices=("auto", "true", "false")),
        "remat": O("auto", "what the backward pass recomputes; auto: none under 50 M parameters, else full",
                   choices=("auto", "none", "full", "dots", "offload")),
        "remat_every": O(1, "layers that are recomputed together: more = fewer inputs kept, more of them at once", bound=">0",
                         needs="model.remat!=none"),
        "attention": O("auto", "attention implementation; auto: the platform's", choices=("auto", "tpu", "gpu", "cudnn", "blockwise", "reference")),
        "ring_attention": O(False, "over mesh.cp keys and values go from device to device, where they are gathered otherwise"
                                   " (docs/explanations/sharding.md)"),
        "experts": O("auto", "their implementation (docs/explanations/kernels.md); auto: the platform's",
                     choices=("auto", "tpu", "gpu", "blocks", "reference")),
        "recurrence": O("auto", "implementation of recurrent layers (docs/explanations/kernels.md); auto: the platform's",
                        choices=("auto", "tpu", "gpu", "xla", "reference")),
        "trainable": O((".*",), "patterns of parameter names that train"),
        "frozen": O((), "patterns of parameter names that do not (wins over trainable)"),
    },
    "lora": jobs.LORA,
    "mesh": {
        "dp": O(1, "replicas of the parameters; -1 = the rest of the devices"),
        "fsdp": O(-1, "shards of parameters and optimizer state; the batch is split over dp x fsdp x ep"),
        "cp": O(1, "shards of every row along its tokens, which gather its keys and values (long rows); of parameters as fsdp"),
        "ep": O(1, "shards of experts, whole ones, to which the tokens of its devices are sent; of other parameters as fsdp; divides their number"),
        "tp": O(1, "shards of heads, and of the width of MLPs, experts and vocabulary"),
        "roles": O({}, "role (policy, reference, critic, teacher, sampler, reward_model) -> {devices: 'all' or '0-3' of every"
                       " process, processes: 'all' or '2-3' (reference alone: the whole hosts it is on), dp, fsdp, cp, ep, tp,"
                       " rest: 'host' between uses (sampler: 'none', dropped during the update), or 'streamed': parameters, gradients and"
                       " optimizer state stay in host memory and come to the devices a layer at a time (policy, reference, critic)};"
                       " default: the policy's mesh"),
    },
    "data": {
        "path": O((), "one or several files (.jsonl .json .csv .parquet), folders or hub ids"),
        "subset": O("", "hub configuration name"),
        "split": O(("train",), "hub split, or several to be concatenated"),
        "revision": O(None, "hub revision", str),
        "sources": O({}, "several data sets, mixed: name -> {weight: a number, or (step, weight) points with straight lines between them;"
                         " where: {column: values} of the rows it takes; rewards: names of reward.functions that judge it;"
                         " algorithm: {advantage, advantage_mean, ...} over those of `algorithm`; coef: factor on its advantages; and options"
                         " of `data` of its own, such as path, prompt_column, system_prompt}; empty = data.path is the only one"),
        "exhausted": O("repeat", "with data.sources, after data.epochs passes over one source: repeat it, stop the run, or give its weight"
                                 " to the others", choices=("repeat", "stop", "others"), needs="data.sources"),
        "prompt_column": O("prompt", "text, or a list of chat messages; `messages` where rows have no column `prompt`"),
        "answer_column": O("answer", "reference answer handed to rewards as `answer`, a.b: field b of column a; empty = none"),
        "answer_pattern": O("", "regex whose first group is cut out of the answer, e.g. '#### (.*)' for GSM8K"),
        "completion_column": O("completion", "target text for SFT (ignored by rl)"),
        "chosen_column": O("chosen", "preferences: the better completion, text or messages, with the prompt before it or without"),
        "rejected_column": O("rejected", "preferences: the worse completion, likewise"),
        "label_column": O("label", "preferences: whether the completion in data.completion_column is good, true or false"),
        "margin_column": O("margin", "preferences: by how much the chosen completion is better, a number; read where a row has one"),
        "train_turns": O("last", "SFT on rows of messages, which assistant messages are trained: the last one (last), or all of them, with"
                                 " everything between masked (all)", choices=("last", "all")),
        "assistant_mask": O("turns", "with data.train_turns=all, how assistant turns are found. turns: each rendered after what came before,"
                                     " as episodes do; template: what the chat template marks by {% generation %}", choices=("turns", "template"),
                            needs="data.train_turns=all", read_by=("sft",)),
        "image_column": O("images", "images of a row's prompt, one or a list: bytes, {bytes, path}, a path, a data URI, base64; from Python"
                                    " also Pillow images and uint8 arrays; `image` where rows have no column `images`; read where the model"
                                    " has a tower for images; empty = text only"),
        "image_marker": O("<image>", "text of a prompt in whose place the next image of the column stands; without a marker they come first; empty"
                                     " = none", needs="data.image_column"),
        "image_root": O("", "folder that paths of images are relative to, and must lie in; empty = that of the data file",
                        needs="data.image_column"),
        "image_min_pixels": O(None, "an image with fewer pixels is enlarged; None = the checkpoint's preprocessor_config.json", int, bound=">0",
                              needs="data.image_column"),
        "image_max_pixels": O(None, "an image with more pixels is made smaller, which takes fewer tokens; None = the checkpoint's", int,
                              bound=">0", needs="data.image_column"),
        "max_images": O(8, "a prompt with more images is a bad row; also the most that a turn shows", bound="1..256", needs="data.image_column"),
        "image_decode_limit": O(2**26, "pixels of a stored image; one with more is a bad row and is not decoded", bound=">0",
                                needs="data.image_column"),
        **schema_videos.VIDEOS,
        "system_prompt": O("", "system message put before the prompt (unless its messages bring one)"),
        "chat": O("auto", "auto: apply the chat template if the tokenizer has one", choices=("auto", "true", "false")),
        "add_generation_prompt": O(True, "end the rendered prompt with the assistant header"),
        "chat_template_kwargs": O({}, "extra variables for the chat template, e.g. enable_thinking"),
        "response_prefix": O("", "text the completion is made to start with (part of the prompt, seen by rewards)"),
        "prompts_per_step": O(64, "prompts per RL step; the batch size in SFT (sequences) and preferences (rows or pairs)", bound=">0"),
        "max_prompt_tokens": O(512, "longest prompt in tokens", bound=">0"),
        "overlong_prompt": O("filter", "a longer prompt is left out, cut on the left, or an error",
                             choices=("filter", "truncate_left", "error")),
        "overlong_completion": O("filter", "SFT: a row with a completion beyond rollout.max_new_tokens (or beyond train.max_sequence_tokens"
                                           " with its prompt) is left out, loses the end of it (nothing is learnt of its end then), or is"
                                           " split: further rows continue where it ended, after as much of it as a prompt may hold",
                                 choices=("filter", "truncate", "split"), read_by=("sft",)),
        "difficulty": O("", "column with a number that says how difficult a row is: each pass goes from low to high, equal ones shuffled;"
                            " empty = none"),
        "difficulty_window": O((), "instead of that order, only rows of a difficulty from low to high, shuffled, by step: '0:0..3', '200:2..5'"
                                   " (from step 200 on those from 2 to 5)", needs="data.difficulty"),
        "pass_rate_min": O(0.0, "a row whose completions reached reward.pass_mark less often than this when it was last sampled is left out of"
                                " later passes over the data", bound="0..1", read_by=("rl",)),
        "pass_rate_max": O(1.0, "the same for more often than this", bound="0..1", read_by=("rl",)),
        "epochs": O(0, "end after this many passes over the data; 0 = no limit", bound=">=0"),
        "shuffle": O(True, "global shuffle, another order in each epoch"),
        "seed": O(None, "seed of the shuffle; None = run.seed", int),
        "max_rows": O(0, "use only the first rows; 0 = all", bound=">=0"),
        "eval_fraction": O(0.0, "rows carved out (by seed, equal prompts together) as eval set 'heldout': a share below 1, or a number of rows"),
        "bad_rows": O("error", "a row that cannot be read: stop with file and line, or count and skip",
                      choices=("error", "skip")),
        "cache": O("", "folder that keeps tokenised data sets, by their content, for the next start; auto = ~/.cache/jaxrl/data; nothing in it"
                       " is ever deleted; empty = off"),
        "workers": O(0, "threads that prepare rows ahead", bound=">=0"),
        "prefetch": O(2, "steps of rows prepared ahead when workers > 0", bound=">0"),
        "drop_last": O(True, "with epochs > 0: leave out a last step that is not full"),
    },
    "rollout": {
        "engine": O("auto", "jax: the embedded sampler; vllm; auto: vllm where it is installed and there is a GPU, or where"
                            " rollout.servers names servers; or an import path of your own, module:function or ./file.py:function"),
        "group_size": O(8, "samples per prompt", bound=">0"),
        "max_new_tokens": O(1024, "longest completion in tokens, sampled or, in SFT and preferences, read from the data", bound=">0"),
        "min_new_tokens": O(0, "end tokens are forbidden before this many", bound=">=0"),
        "temperature": O(1.0, "0 = greedy", bound=">=0"),
        "top_p": O(1.0, "keep the smallest set of tokens whose mass reaches this", bound="(0, 1]"),
        "top_k": O(-1, "keep this many tokens; -1 = all", bound="-1 or >0"),
        "min_p": O(0.0, "keep tokens with at least this share of the best token's probability", bound="0..1"),
        "repetition_penalty": O(1.0, "divides (positive) or multiplies (negative) logits of tokens seen in prompt or completion", bound=">0"),
        "frequency_penalty": O(0.0, "subtracted from a token's logit per time it was sampled"),
        "penalties_in_training": O(False, "allow the two penalties in training rollouts (they bend the ratio)"),
        "stop": O((), "strings that end a completion"),
        "keep_stop": O(True, "keep the tokens of the stop string in the completion"),
        "stop_token_ids": O((), "token ids that end a completion besides the end-of-text tokens"),
        "slots": O(0, "sequences decoded at once over all devices; 0 = the batch, at most 256 per process (this and the next four: embedded"
                      " sampler only)", bound=">=0"),
        "prompt_lengths": O((), "static prompt lengths, at most 3; empty = quarter, half and all of the longest prompt"),
        "cache_lengths": O((), "static cache lengths, at most 3; empty = prompt + completion, and where XLA decodes long completions also 3/8 of it"),
        "compaction": O(True, "the tail of a batch goes on in fewer slots (1/2, 1/8, 1/32); False: one slot count, so that a"
                              " sample is bitwise independent of its neighbours; later turns of an episode are then prefilled again"),
        "decode_steps": O(16, "decode steps per host sync", bound=">0"),
        "dtype": O("auto", "dtype of weights and cache in the sampler; auto = train.compute_dtype",
                   choices=("auto", "bf16", "fp16", "fp32")),
        "timeout_seconds": O(3600.0, "longest wait for one batch of completions", bound=">0"),
        "max_staleness": O(0, "generate while training: completions may be sampled from weights this many weight syncs older than"
                              " those of the step that uses them; 0 = every step samples from its own", bound=">=0",
                           read_by=("rl", "distill")),
        "sync_every": O(1, "steps from one weight sync to the next; the steps between share one version", bound=">0",
                        read_by=("rl", "distill")),
        "partial": O(False, "with completions ahead: those begun continue under new weights, with a version per token; False: a weight"
                            " sync waits until they are finished", needs="rollout.max_staleness", read_by=("rl", "distill")),
        "servers": O((), "URLs of running vLLM servers, or one folder (/path or ./path) whose files name them, read again at every"
                         " weight sync; empty = jaxrl starts its own"),
        "placement": O("auto", "colocated: engine and trainer have the same devices in turns (what the engine holds leaves them during"
                               " the update); disaggregated: the engine has its own, nothing sleeps; auto: as devices are given,"
                               " nothing sleeps", choices=("auto", "colocated", "disaggregated")),
        "seeded": O("auto", "whether vLLM samples each request from its seed; auto: where that costs nothing (on its CPU build)",
                    choices=("auto", "true", "false")),
        "verify_weights": O("first", "compare checksums of the servers' weights with the trainer's: at the first weight sync (and"
                                     " for every server that joins), always, or never", choices=("first", "always", "never")),
        "vllm": {
            "replicas": O(1, "servers that each process starts", bound=">0"),
            "tensor_parallel": O(1, "GPUs of one server", bound=">0"),
            "devices": O((), "CUDA_VISIBLE_DEVICES of each server, e.g. ('0,1', '2,3'); empty = as jaxrl's"),
            "memory_fraction": O(0.0, "share of a GPU's memory that a server takes; 0 = 0.85 with devices of its own, 0.45 beside"
                                      " the trainer, which keeps what is left of 0.9 (placement=auto) or takes it in turns", bound="0..1"),
            "max_model_len": O(0, "longest sequence of a server; 0 = longest prompt + longest completion", bound=">=0"),
            "max_running": O(256, "sequences that a server decodes at once", bound=">0"),
            "max_requests": O(512, "requests that are with one server at once, the others wait here", bound=">0"),
            "prefix_caching": O(True, "a group's prompt is computed once; models with recurrent layers: off, whatever this says"),
            "chunked_prefill": O(True, "long prompts are computed in pieces beside decoding"),
            "engine_kwargs": O({}, "further vLLM options by their names, e.g. {'quantization': 'fp8'}; they win over jaxrl's"),
            "env": O({}, "further environment variables of the servers"),
            "python": O("", "interpreter of the servers' own environment; empty = this one"),
            "host": O("127.0.0.1", "address the servers listen on; another one than loopback needs $VLLM_API_KEY"),
            "port": O(0, "port of the first server, the others follow; 0 = free ones", bound=">=0"),
            "api_key": O("", "key that servers ask for; empty = $VLLM_API_KEY, or for servers that jaxrl starts one made for the run"),
            "transport": O("auto", "how weights travel: shm (one machine), network, nccl (from GPU to GPU), checkpoint (a folder"
                                   " that servers without jaxrl's plugin reload); auto: shm where it can be, else network, else"
                                   " checkpoint", choices=("auto", "shm", "network", "nccl", "checkpoint")),
            "weights_host": O("", "address of this host as the servers see it, for transport=network; empty = the one on the way to"
                                  " the first server"),
            "chunk_mb": O(256, "megabytes of weights that travel at once (at least one layer)", bound=">0"),
            "setup_seconds": O(600.0, "longest start of a server", bound=">0"),
            "request_seconds": O(0.0, "longest completion; after it a request is tried again; 0 = half of rollout.timeout_seconds", bound=">=0"),
            "sync_seconds": O(600.0, "longest call of a weight update", bound=">0"),
            "health_seconds": O(10.0, "a server that twice sends no reply to /health within this time counts as lost", bound=">0"),
            "retries": O(3, "further tries of a failed request or weight sync", bound=">=0"),
            "restarts": O(3, "restarts of a server that jaxrl started", bound=">=0"),
            "probe_bound": O(0.0, "largest mean difference in nats between the probe's log-probs and the trainer's; 0 = by dtype:"
                                  " 1e-3 fp32, 0.1 fp16, 0.2 bf16, three times the first one and at most 1 where quantised", bound=">=0"),
            "log_level": O("warning", "level of the servers' logs in <run.dir>/vllm", choices=("debug", "info", "warning", "error")),
        },
    },
    "env": shared({
        "function": O("", "what an episode is: module:name or ./file.py:name of an episode function (task, chat) or of a class with"
                          " reset and step; calc, guess, library, lake, repair, lake_pixels, spot; gym:<id>; textarena:<id>; openenv;"
                          " empty = one turn, or env.tools (docs/guides/environments.md)"),
        "tools": O((), "plain typed functions, module:name or ./file.py:name, that the model may call; the turn without calls ends the episode"),
        "program": O("", "command line of a program that speaks to OpenAI's API, trained unchanged: it gets the row as JSON on standard"
                         " input, {column} in its words, and OPENAI_BASE_URL and OPENAI_API_KEY"),
        "score": O("", "module:name or ./file.py:name of score(task, ran), what a program came to; empty = the file reward.json that it"
                       " writes where it runs", needs="env.program"),
        "crash": O("absent", "a program that ends with a status other than 0 has failed by its environment's fault, or is scored like any other",
                   choices=("absent", "scored"), needs="env.program"),
        "train_calls": O("", "module:name or ./file.py:name of trained(request): whether a program's call is a turn to be trained; empty = all"
                             " but those with the header X-Jaxrl-Train: false", needs="env.program"),
        "mcp": O((), "MCP servers whose tools the model may call, beside env.tools: command lines (standard streams) or URLs (streamable HTTP)"),
        "mcp_session": O("episode", "each episode has servers and sessions of its own, or the episodes of a worker share them",
                         choices=("episode", "worker"), needs="env.mcp"),
        "servers": O((), "addresses of services of OpenEnv, replicas of one environment, for env.function=openenv (http://host:8000)",
                     needs="env.function=openenv"),
        "options": O({}, "keyword arguments of an environment's class, or of gymnasium.make and textarena.make, or how env.servers are read"),
        "parser": O("auto", "how calls are written; auto: as the chat template writes them",
                    choices=("auto", "hermes", "qwen", "llama", "mistral", "pythonic")),
        "history": O("append", "the next prompt is what was sampled and then the new messages (append), or the chat template's rendering of"
                               " all messages, a new sequence wherever that is not the same (template)", choices=("append", "template")),
        "observations": O("message", "new messages close the model's turn (message), or go on within it where it did not end it (inline)",
                          choices=("message", "inline")),
        "workers": O(2, "processes that run episodes, 64 each at once", bound=">0"),
        "executor": O("local", "workers are processes of this host, or of the hosts of a Ray cluster", choices=("local", "ray")),
        "ray_address": O("", "address of the Ray cluster; empty = RAY_ADDRESS, and without it a Ray of this host",
                         needs="env.executor=ray"),
        "ray_cpus": O(1.0, "CPUs that a worker takes of those that Ray counts", bound=">0", needs="env.executor=ray"),
        "threads": O(False, "synchronous episodes and environments run in threads of their worker instead of one step at a time"),
        "python": O("", "interpreter of the workers' own environment; empty = this one"),
        "variables": O((), "names of environment variables that the workers get, beside those that Python needs"),
        "memory_gb": O(8.0, "memory that a worker (or a program of env.program) and all it started may hold, else they are killed"
                            " (Linux); 0 = no limit", bound=">=0"),
        "in_flight": O(0, "episodes under way at once, per process; more than the engine samples at once hide slow environments; 0 = all that"
                          " are asked for", bound=">=0"),
        "max_turns": O(8, "turns of an episode; the last one's reply ends it", bound=">0"),
        "max_sampled_tokens": O(0, "tokens that an episode samples in all its turns; 0 = no limit of its own", bound=">=0"),
        "max_input_tokens": O(0, "longest prompt of a turn, the conversation so far; 0 = no limit of its own", bound=">=0"),
        "max_observation_tokens": O(1024, "longest new message in tokens; more is cut in the middle", bound=">0"),
        "image_tokens": O(0, "most image tokens of an episode that shows images, those of its row's prompt included; static shapes have room"
                             " for so many; 0 = its messages are text", bound=">=0", needs="data.image_column"),
        "max_parallel_calls": O(1, "calls of one turn that run; extra calls get an error reply", bound=">0"),
        "step_seconds": O(60.0, "longest time an environment takes for one turn, the engine's not counted", bound=">0"),
        "episode_seconds": O(600.0, "longest time an environment takes for an episode, the engine's not counted", bound=">0"),
        "retries": O(2, "further tries, with the same seeds, of an episode whose environment failed", bound=">=0"),
        "late": O("absent", "an episode whose environment timed out: absent drops it, truncated keeps it as if cut by the length limit",
                  choices=("absent", "truncated")),
        "max_failed_fraction": O(0.2, "stop when a larger share of a process's episodes of a step failed by their environment's fault", bound="0..1"),
        "resume": O("replay", "episodes that a checkpoint cut off go on from their recorded turns, or start again (environments that cannot be"
                              " played twice)", choices=("replay", "restart")),
        "publish": O("episode", "with rollout.partial=False a weight sync waits for the episodes begun, or only for their turns"
                                " that are being sampled", choices=("episode", "turn"),
                     needs="rollout.max_staleness and not rollout.partial"),
        "malformed_penalty": O(0.0, "subtracted from the score for every call that could not be read or does not fit its tool", bound=">=0"),
    }, EPISODES, ("rl", "distill"), but=("function", "tools", "program", "mcp")),
    "sandbox": {
        "backend": O("bwrap", "where programs run that a model wrote (reward code, env.function=repair, jaxrl.sandbox.run): bubblewrap on"
                              " this machine; rlimits: limits against accidents alone; remote: sandbox.url", choices=("bwrap", "rlimits", "remote")),
        "paths": O((), "further folders that programs may read, absolute (bwrap)", needs="sandbox.backend=bwrap"),
        "url": O("", "address of the service (remote)", needs="sandbox.backend=remote"),
        "api": O("jaxrl", "of the service: python -m jaxrl.sandbox.serve, or SandboxFusion", choices=("jaxrl", "fusion"),
                 needs="sandbox.backend=remote"),
        "key_env": O("", "name of the environment variable that has the service's bearer token; workers get it",
                     needs="sandbox.backend=remote"),
        "retries": O(2, "further tries of a call to which the service did not respond", bound=">=0", needs="sandbox.backend=remote"),
        "seconds": O(5.0, "longest a program may take; all unit tests of a completion together", bound=">0"),
        "cpu_seconds": O(5.0, "processor time of each process of a program", bound=">0",
                         needs="sandbox.backend!=remote or sandbox.api!=fusion"),
        "memory_mb": O(1024, "MiB that a program may hold, each process of it and all together", bound=">0"),
        "disk_mb": O(64, "MiB that a program may write (bwrap: into memory; rlimits: of each file)", bound=">0",
                     needs="sandbox.backend!=remote or sandbox.api!=fusion"),
        "output_bytes": O(1 << 20, "bytes that a program may print; one that prints more is ended", bound=">0"),
        "processes": O(64, "processes of a program at once", bound=">0", needs="sandbox.backend!=remote or sandbox.api!=fusion"),
    },
    "reward": {
        "functions": O(("math",), "names (math exact boxed choice format code remote judge; more: docs/guides/rewards.md), package.module:function"
                              " or ./file.py:function"),
        "weights": O((), "one weight per function; empty = all 1"),
        "column": O("", "data column that names the function per row; empty = all functions for all rows"),
        "format_pattern": O("", "regex the whole completion must match (reward `format`)"),
        "arguments": O({}, "arguments of reward functions by their names, beside the row's columns: {'cosine': {'max_length': 4096}}"),
        "code_score": O("all", "reward `code`: 1 where every unit test is passed, or the share that is", choices=("all", "fraction")),
        "pass_mark": O(1.0, "a row counts as accurate from this score of its named reward"),
        "workers": O(2, "worker processes", bound=">0"),
        "executor": O("local", "they are processes of this host, or of the hosts of a Ray cluster", choices=("local", "ray")),
        "ray_address": O("", "address of the Ray cluster; empty = RAY_ADDRESS, and without it a Ray of this host",
                         needs="reward.executor=ray"),
        "ray_cpus": O(1.0, "CPUs that a worker takes of those that Ray counts", bound=">0", needs="reward.executor=ray"),
        "env": O((), "names of environment variables that the workers get, beside those that Python needs (PATH, HOME, LANG, ...)"),
        "trial": O(True, "call each function on the first two rows before the model is loaded, with the reference answers as completions;"
                         " stop if it fails on both"),
        "timeout_seconds": O(10.0, "wall-clock limit per completion and function (per call of a batched one); the worker is killed", bound=">0"),
        "memory_gb": O(8.0, "memory that a worker and all it started may hold, else they are killed (Linux); 0 = no limit", bound=">=0"),
        "recycle": O(20_000, "a worker that has done this many calls is replaced when it has nothing to do; 0 = never", bound=">=0"),
        "max_failed_fraction": O(0.2, "stop when more than this share of a process's completions of a step has a failed reward", bound="0..1"),
        "zero_without_end": O(False, "0 for completions that were cut by the length limit"),
        "scale": O(1.0, "factor on the weighted sum (after zero_without_end)"),
        "bias": O(0.0, "added after scale"),
        "clip": O(None, "bound on the absolute value after bias", float, bound=">0"),
        "norm_mean": O("none", "last of all: subtract the mean of the group or of the batch", choices=("none", "group", "batch")),
        "norm_std": O("none", "after that: divide by the standard deviation (ddof 1) of the group or of the batch",
                      choices=("none", "group", "batch")),
        "overlong_buffer": O(0, "DAPO: penalty grows linearly over the last tokens before max_new_tokens; 0 = off", bound=">=0"),
        "overlong_penalty": O(1.0, "largest DAPO length penalty (subtracted after clip)", bound=">=0"),
        "model": {
            "path": O("", "HF folder or hub id of a sequence classifier with one label, whose score of a completion is one more reward,"
                          " `reward_model` (docs/guides/reward_models.md); empty = none", read_by=("rl", "distill")),
            "revision": O(None, "hub revision of reward.model.path", str, needs="reward.model.path"),
            "head": O("score", "name of its head: <head>.weight, one row", needs="reward.model.path"),
            "weight": O(1.0, "its weight beside reward.weights", needs="reward.model.path"),
            "dtype": O("bf16", "dtype it is held in", choices=("bf16", "fp32"), needs="reward.model.path"),
            "render": O("auto", "what it reads: the sampled tokens; prompt and completion as text in its own tokens; or its chat template's"
                                " rendering of the conversation. auto: tokens where its tokenizer is the policy's, else chat where it has a"
                                " template, else text", choices=("auto", "tokens", "text", "chat"), needs="reward.model.path"),
            "max_sequence_tokens": O(0, "longest sequence that it scores; longer ones have no score, which is a failure; 0 = the policy's longest,"
                               " in other tokens twice that", bound=">=0", needs="reward.model.path"),
        },
        "remote": schema_rewards.REMOTE,
        "remotes": O({}, "further services by the names of their rewards: {'safe': {'urls': ...}} has what it does not say from reward.remote"),
        "judge": schema_rewards.JUDGE,
        "judges": O({}, "further judges likewise, on top of reward.judge"),
    },
    "reward_model": jobs.REWARD_MODEL,
    "algorithm": ALGORITHM,
    "preference": jobs.PREFERENCE,
    "critic": shared({
        "path": O("", "HF folder or hub id of a language or reward model; empty = the policy as it starts", needs="not critic.shared"),
        "revision": O(None, "hub revision of critic.path", str, needs="critic.path"),
        "head": O("score", "name of the value head in the files of critic.path: <head>.weight, one row; zero where there is none",
                  needs="critic.path"),
        "shared": O(False, "a value head on the policy's own trunk instead of a model of its own"),
        "coef": O(0.5, "shared: weight of the value loss beside the policy's", bound=">=0", needs="critic.shared"),
        "lr": O(5e-6, "peak learning rate; the rest is as in optimizer.*", bound=">0"),
        "optimizer": O({}, "entries of optimizer.* that the critic has its own: {'b2': 0.95, 'schedule': 'cosine', 'max_grad_norm': 0.5}",
                       needs="not critic.shared"),
        "value_clip": O(0.2, "a value moves by at most this per step before its loss stops counting; 0 = off", bound=">=0"),
        "num_minibatches": O(0, "optimizer steps of the critic per pass; 0 = as the policy", bound=">=0", needs="not critic.shared"),
        "warmup_steps": O(0, "first steps in which only the critic learns", bound=">=0", needs="not critic.shared"),
        "normalize": O(False, "learn returns less their running mean over their running standard deviation"),
    }, "algorithm.advantage=gae", ("rl",)),
    "reference": shared({
        "path": O("", "HF folder or hub id; empty = the policy as it starts"),
        "revision": O(None, "hub revision of reference.path", str, needs="reference.path"),
        "dtype": O("bf16", "dtype the reference is held in", choices=("bf16", "fp32")),
        "reset_steps": O(0, "the reference becomes the policy every this many steps; 0 = never", bound=">=0"),
        "reset_epochs": O(0.0, "the same in passes over the data; 0 = never", bound=">=0"),
        "reset_optimizer": O(False, "a reset also resets the optimizer's state; the learning-rate schedule continues",
                             needs="reference.reset_steps or reference.reset_epochs"),
    }, "run.recipe=preference or algorithm.kl.coef", ("rl", "preference")),
    "distill": jobs.DISTILL,
    "teacher": jobs.TEACHER,
    "optimizer": {
        "name": O("adamw", "adamw, adam, sgd, lion, adafactor, or an import path to an optax factory, which gets learning_rate alone"),
        "lr": O(None, "peak learning rate", float, bound=">0"),
        "b1": O(0.9, "first-moment decay", bound="[0, 1)", needs="optimizer.name=adamw|adam|sgd|lion"),
        "b2": O(0.999, "second-moment decay", bound="[0, 1)", needs="optimizer.name=adamw|adam|lion"),
        "eps": O(1e-8, "added to the root of the second moment", bound=">=0", needs="optimizer.name=adamw|adam"),
        "weight_decay": O(0.01, "decoupled; not of biases, norms, other vectors", bound=">=0", needs="optimizer.name=adamw|adam|sgd|lion|adafactor"),
        "max_grad_norm": O(1.0, "global norm the gradient is clipped to; 0 = off", bound=">=0"),
        "schedule": O("constant", "after warm-up; counts optimizer updates", choices=("constant", "linear", "cosine", "wsd")),
        "warmup_steps": O(10, "updates of linear warm-up", bound=">=0"),
        "warmup_fraction": O(0.0, "the same as a share of all updates; wins over warmup_steps when > 0", bound="0..1"),
        "warmup_start": O(0.0, "learning rate at update 0 as a share of lr", bound="0..1"),
        "decay_steps": O(0, "updates of decay (wsd: at the end); 0 = all after warm-up (wsd: the last tenth)", bound=">=0",
                         needs="optimizer.schedule!=constant"),
        "decay_shape": O("linear", "of wsd's decay; sqrt: falls by the root of the share that has passed",
                         choices=("linear", "cosine", "sqrt"), needs="optimizer.schedule=wsd"),
        "floor": O(0.0, "lowest learning rate as a share of lr", bound="0..1", needs="optimizer.schedule!=constant"),
        "offload": O(False, "keep the optimizer's state (the critic's too) in host memory; a step is taken a part at a time"),
        "groups": O({}, "name pattern -> {lr: multiplier, weight_decay: value}"),
        "layer_decay": O(1.0, "layer l of L learns at lr x this^(L - l), beside optimizer.groups; the embedding is layer 0, the head and"
                              " the last norm learn at lr", bound="(0, 1]"),
        "max_nonfinite": O(5, "a non-finite update is skipped; stop after this many in a row", bound=">0"),
    },
    "train": {
        "steps": O(None, "end after this many steps (RL steps, or SFT updates); None = 100, or no limit where data.epochs or"
                         " train.max_samples is set. A run ends at the first of the three that is set", int, bound=">0"),
        "max_samples": O(0, "end after this many samples; 0 = no limit", bound=">=0"),
        "image_features": O("auto", "auto: features of images are made once per image and kept where nothing of the tower trains; fresh: every"
                                    " pass makes them anew", choices=("auto", "fresh"), needs="data.image_column"),
        "image_cache_gb": O(4.0, "host memory for kept features, in GB; the least recently used ones leave first", bound=">0",
                            needs="data.image_column"),
        "tokens_per_microbatch": O(0, "rows x row length held at once, per data shard, one row at least; 0 = 16384, on CPUs 2048,"
                                      " or 1024 of dense models from hidden size 512 on", bound=">=0"),
        "score_tokens_per_microbatch": O(0, "the same where nothing is learnt: old and reference log-probs, values; 0 = the update's own"
                                            " rows, so that a policy that has not moved has ratios of exactly 1 (on the CPU)", bound=">=0"),
        "row_lengths": O((), "static lengths of packed rows, at most 2; empty = one: the longest sequence, or up to 2048 with room"
                              " for more of its group"),
        "row_counts": O(2, "sizes of a microbatch that are compiled, per row length: 2 = whole and a quarter, so that the last"
                           " microbatch wastes little; 1 = whole only, one program fewer to compile", choices=(1, 2)),
        "max_sequence_tokens": O(0, "bound on prompt + completion; 0 = max_prompt_tokens + max_new_tokens", bound=">=0"),
        "share_prompts": O(True, "completions of a group share one copy of their prompt in a packed row"),
        "compute_dtype": O("auto", "auto: bf16 where the chip has it, fp32 on the CPU", choices=("auto", "bf16", "fp16", "fp32")),
        "matmul": O("default", "numbers that the layers' matrix products round to first, forward and for the gradient of activations: default: the"
                               " compute dtype's own; int8, fp8: a scale per token and output; the others: docs/explanations/low_precision.md",
                    choices=("default", "int8", "fp8", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4")),
        "matmul_emulated": O(False, "where no product of such numbers is known for the device, multiply them in fp32: the same numbers, slower",
                             needs="train.matmul!=default"),
        "loss_scale": {
            "initial": O(32768.0, "fp16: what the loss is multiplied with at the start", bound=">0", needs="train.compute_dtype=fp16"),
            "min": O(1.0, "least such factor", bound=">0", needs="train.compute_dtype=fp16"),
            "max": O(16777216.0, "largest such factor", bound=">0", needs="train.compute_dtype=fp16"),
            "window": O(200, "finite updates in a row after which it is doubled", bound=">0", needs="train.compute_dtype=fp16"),
            "patience": O(1, "overflows in a row from which on it is halved", bound=">0", needs="train.compute_dtype=fp16"),
        },
        "stop_on_divergence": O(False, "end the run, saved, at a loss that has risen to three times its lowest, or a held-out accuracy below"
                                       " half of its best, which are warned of anyway"),
        "max_step_kl": O(0.0, "RL: most KL of a step in nats per token, from the policy before it to the one after its updates, estimated on"
                              " its batch (k3); a step beyond it is scaled back, or refused; costs two scorings and a copy of the parameters;"
                              " 0 = off", bound=">=0", read_by=("rl",)),
        "param_dtype": O("fp32", "master weights", choices=("fp32", "bf16")),
        "logprob_chunk": O(0, "loss tokens that meet the head at once, per data shard; 0 = 1024, on CPUs 512 (and a part of the vocabulary)",
                           bound=">=0"),
        "loss_on_prompt": O(False, "SFT: train on prompt tokens too (distillation: distill.on_prompt)", read_by=("sft",)),
        "router_balance": O(0.0, "coefficient of the loss that spreads tokens over experts (docs/explanations/experts.md); the gradient that"
                                 " every router gets is that of the mean over tokens", bound=">=0"),
        "router_bias_rate": O(0.0, "per update, up or down, of the bias by which routers choose experts, towards an even load (arXiv 2408.15664);"
                                   " for families whose routers have one (docs/explanations/experts.md)", bound=">=0"),
        "router_z": O(0.0, "coefficient of the loss that keeps the logits of routers small (arXiv 2202.08906)", bound=">=0"),
    },
    "eval": {
        "sets": O((), "held-out sets, each 'name=path', or 'name=path@split' for folders and hub ids (default split: test);"
                      " read with data.* columns and templates"),
        "every_steps": O(10, f"evaluate every this many steps; {TRIGGER}", bound=">=0"),
        "every_epochs": O(0.0, f"evaluate every this many epochs; {TRIGGER}", bound=">=0"),
        "every_seconds": O(0.0, f"evaluate every this many seconds; {TRIGGER}", bound=">=0"),
        "before": O(True, "evaluate before the first step"),
        "after": O(True, "evaluate after the last step"),
        "max_rows": O(0, "first rows of each set; 0 = all", bound=">=0"),
        "samples": O(1, "completions per row for mean@k and pass@k", bound=">0"),
        "temperature": O(0.0, "0 = greedy", bound=">=0"),
        "top_p": O(1.0, "as rollout.top_p", bound="(0, 1]"),
        "top_k": O(-1, "as rollout.top_k", bound="-1 or >0"),
        "min_p": O(0.0, "as rollout.min_p", bound="0..1"),
        "repetition_penalty": O(1.0, "as rollout.repetition_penalty", bound=">0"),
        "frequency_penalty": O(0.0, "as rollout.frequency_penalty"),
        "max_new_tokens": O(0, "0 = rollout.max_new_tokens", bound=">=0"),
        "stop": O((), "strings that end a completion; empty = rollout.stop"),
        "rewards": O((), "reward functions for evaluation; empty = reward.functions"),
        "accuracy_from": O("", "reward whose pass mark is accuracy; empty, and for rows that it does not apply to = the row's first"),
        "metric": O("", "metric of evaluations that eval.patience and checkpoint.keep_best go by, by its name in metrics.jsonl; higher is"
                        " better, of names that end in loss lower; empty = eval/accuracy, of preferences without one eval/preference_accuracy",
                    needs="eval.patience or checkpoint.keep_best"),
        "controls": O((), "rows with images are evaluated again with other pictures, as eval/<set>/<control>/accuracy. blank: grey ones of the"
                          " same sizes; swapped: those of another row of the set. A policy that looks at its images does worse on both",
                      choices=Rows("jaxrl.data.images.controls:CONTROLS"), needs="data.image_column"),
        "patience": O(0, "end the run after so many evaluations in a row that are not better than the best one before; 0 = never", bound=">=0",
                      needs=EVALUATIONS),
    },
    "checkpoint": {
        "dir": O("", "where checkpoints are: a folder, gs://bucket/folder or s3://bucket/folder; empty = <run.dir>/checkpoints"),
        "every_steps": O(20, f"save every this many steps; {TRIGGER}", bound=">=0"),
        "every_minutes": O(30.0, f"save every this many minutes; {TRIGGER}", bound=">=0"),
        "every_epochs": O(0.0, f"save every this many epochs; {TRIGGER}", bound=">=0"),
        "at_end": O(True, "save after the last step"),
        "keep": O(3, "newest checkpoints kept; -1 = all", bound="-1 or >0"),
        "keep_best": O(False, "save a checkpoint at every evaluation that is the best so far (eval.metric), keep that of the best, and export"
                              " its model at the end",
                       needs=EVALUATIONS),
        "timeout_seconds": O(1800.0, "longest time for a checkpoint or an export: a disk that hangs ends the run with status 1; 0 = no limit",
                             bound=">=0"),
        "asynchronous": O(True, "write in the background"),
        "export_every_steps": O(0, f"HF export every this many steps; {TRIGGER}", bound=">=0"),
        "export_every_epochs": O(0.0, f"HF export every this many epochs; {TRIGGER}", bound=">=0"),
        "export_every_minutes": O(0.0, f"HF export every this many minutes; {TRIGGER}", bound=">=0"),
        "export_at_end": O(True, "HF export after the last step, in <run.dir>/export"),
        "export_dtype": O("auto", "auto: the source's dtype (fp32 for random init)", choices=("auto", "bf16", "fp16", "fp32")),
        "shard_gb": O(5.0, "largest exported safetensors file in GB", bound=">0"),
        "upload": {
            "to": O((), "where copies go in the background: hf://owner/name (a repository of the hub), or prefixes that fsspec knows"
                        " (s3://bucket/folder, gs://..., file:///...); see docs/guides/checkpoints.md"),
            "exports": O("final", "of exports, those that are sent", choices=("none", "final", "all"), needs="checkpoint.upload.to"),
            "checkpoints": O("none", "of checkpoints, those that are sent", choices=("none", "final", "all"), needs="checkpoint.upload.to"),
            "private": O(True, "a hub repository that does not exist yet is made private"),
            "attempts": O(6, "attempts to upload a folder, 2, 4, 8 ... seconds apart", bound=">=1"),
            "wait_seconds": O(3600.0, "longest wait for uploads at the end of a run (after a stop: run.stop_seconds)", bound=">=0"),
        },
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
        "every_steps": O(1, "run.recipe=sft and preference: steps per line of metrics; a further one where an evaluation, save or export is due"
                         " and at a stop (others write one every step)", read_by=("sft", "preference")),
        "print_samples": O(1, "sampled conversations, of different prompts, shown at each evaluation; TensorBoard and W&B get as many of"
                              " training every tenth step", bound=">=0"),
        "trace_requests": O(False, "vLLM: write a timeline of every request to <run.dir>/requests.jsonl"),
        "report": O(True, "write <run.dir>/report.html, the run as one page, when the run ends (docs/guides/report.md)"),
        "rollouts": O(True, "write every step's rollouts to <run.dir>/rollouts as JSONL"),
        "thumbnails": O(16, "different images of a step's or an evaluation's completions that are kept as small PNG files in <run.dir>/images"
                        " for the report; 0 = none", bound=">=0"),
        "level": O("info", "log level", choices=("debug", "info", "warning", "error")),
    },
    "plan": {
        "target": O("", "run.mode=plan: the devices to plan for: a TPU slice (v5p:4x4x8) or chip and count (h100:64, cpu:8)"),
        "part": O("job", "of an RL job: job, or training, the trainer as if it had the devices to itself, its engine left out",
                  choices=("job", "training")),
        "image_tokens": O(0, "image tokens in each prompt, of data.max_prompt_tokens: a plan reads no rows. 0 = the job of text", bound=">=0"),
        "json": O("", "also write the plan to this file"),
        "run": O("", "directory of a synchronous run whose completion lengths and speeds drive the simulation of running ahead; empty = the"
                     " target's roofline"),
        "lengths": O((), "completion lengths in tokens that the simulation takes in turn; empty = plan.run's, or the longest"),
        "effort": O("fast", "of the TPU's compiler: fast, or full as a run has it (four times as long, memory up to 12 % off without);"
                            " full also checks plans for GPUs by a TPU's update", choices=("fast", "full")),
        "timeout_seconds": O(600.0, "longest compilation of a plan", bound=">0"),
    },
    "profile": {
        "steps": O((), "(first, last) step traced with the JAX profiler into <run.dir>/profile"),
        "memory": O((), "steps after which (0: before the first) the arrays that device memory holds then are written into <run.dir>/profile"),
        "python": O(False, "traces also hold every call of Python, with its stack: slower steps, larger files"),
        "processes": O((0,), "numbers of the processes that trace; with one there is only 0"),
    },
    "launch": {
        "hosts": O("auto", "how the processes of a run find each other; auto: what the environment tells (jaxrl.launch, Slurm,"
                           " Kubernetes, a TPU pod), else one process; see docs/guides/hosts.md",
                   choices=("auto", "none", "explicit", "slurm", "kubernetes", "tpu")),
        "coordinator": O("", "host:port of process 0; empty = $JAXRL_COORDINATOR, or the first node of the Slurm step",
                         needs="launch.hosts!=none|tpu"),
        "processes": O(0, "processes of the run; 0 = $JAXRL_PROCESSES, or Slurm's tasks", needs="launch.hosts!=none|tpu"),
        "process": O(-1, "number of this process, from 0; -1 = $JAXRL_PROCESS, or Slurm's or Kubernetes' index",
                     needs="launch.hosts!=none|tpu"),
        "connect_seconds": O(300.0, "longest wait until all processes have come together", bound=">0"),
        "heartbeat_seconds": O(100.0, "a process without a sign of life for this long counts as lost, and the others end", bound=">0"),
        "wait_seconds": O(0.0, "longest wait for the slowest process where all meet: after sampling, rewards, evaluation; 0 = an"
                               " hour more than rollout.timeout_seconds", bound=">=0"),
    },
    "record": jobs.RECORD,
    "replay": jobs.REPLAY,
    "fork": jobs.FORK,
    "certify": jobs.CERTIFY,
    "faults": {
        "plan": O((), "faults to inject, for tests: 'component.fault@step=3,phase=commit' (of several processes one: process=1)"),
    },
    "user": {},
}


def _rows(tree: dict, prefix: str = "") -> dict[str, Option]:
    out = {}
    for name, node in tree.items():
        out |= {prefix + name: node} if isinstance(node, Option) else _rows(node, f"{prefix}{name}.")
    return out


@functools.cache
def options() -> Mapping[str, Option]:
    """Returns all options, dotted name -> Option, in the order of the schema. Made once, read-only."""
    return MappingProxyType(_rows(SCHEMA))


def free_tables() -> list[str]:
    """Returns the dotted names of the tables a user may add keys to."""
    return ["user"] + [name for name, opt in options().items() if isinstance(opt.default, dict)]


def element_kind(dotted: str) -> type:
    """Returns the type of the entries of an option that is a list: int, float or str."""
    return float if dotted in NUMBERS else int if dotted in INTEGERS else str
