"""Options of adapters, reward models, preferences and distillation. See schema.py, of which this is a part."""

from __future__ import annotations

from jaxrl.config.option import Option as O
from jaxrl.config.option import Rows, shared

LORA = shared({
    "rank": O(0, "rank of the low-rank adapters that train instead of the model; 0 = none, unless lora.path is set", bound=">=0",
              needs="not lora.path"),
    "alpha": O(None, "what they add is multiplied with alpha / rank; None = rank, which is 1", float, bound=">0", needs="not lora.path"),
    "dropout": O(0.0, "SFT: share of what an adapter reads that is dropped", bound="[0, 1)"),
    "targets": O(("all-linear",), "modules by the end of their HF name (q_proj, mlp.up_proj), or one pattern for whole names;"
                                  " all-linear: all linear maps of the layers", needs="not lora.path"),
    "exclude": O((), "modules without adapter, named as targets are", needs="not lora.path"),
    "layers": O((), "numbers of the layers that get adapters; empty = all", needs="not lora.path"),
    "rslora": O(False, "alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)", needs="not lora.path"),
    "dora": O(False, "DoRA (arXiv 2402.09353): the length of every output's column trains, too, beside its direction",
              needs="not lora.path"),
    "rank_pattern": O((), "'pattern=number': rank of the modules whose names end with the pattern; the first match counts", needs="not lora.path"),
    "alpha_pattern": O((), "the same for alpha", needs="not lora.path"),
    "modules_to_save": O((), "ends of names of modules that train whole beside the adapters", needs="not lora.path"),
    "init": O("default", "how A and B begin: default (A uniform in +-1/sqrt(inputs), B 0), gaussian (A normal, 1/rank), orthogonal,"
                         " pissa, pissa_niter_<n>, olora or eva (of the inputs of rows without images); the last four are described in"
                         " models/adapters/initialization.py", needs="not lora.path"),
    "path": O("", "PEFT folder or hub id of an adapter to start from; it sets ranks, alphas and modules"),
    "publish": O("auto", "what the engine is given: the base with the adapters merged in, or both apart; auto: apart where the embedded sampler"
                         " computes below fp32, or vLLM servers of jaxrl are on GPUs and serve it", choices=("auto", "adapter", "merged")),
    "export": O("merged", "what is exported: a whole model, or a PEFT folder", choices=("adapter", "merged")),
    "adapters": O({}, "several adapters over one base, each on rows of its own: name -> {sources: names in data.sources; eval: names in"
                      " eval.sets; rank, alpha, and entries of optimizer.* (lr, max_grad_norm ...) of its own}; empty = one adapter"),
    "base_dtype": O("auto", "dtype the frozen base is held in; auto = train.compute_dtype", choices=("auto", "fp32", "bf16")),
    "base": O("none", "QLoRA: the frozen kernels of the layers in few bits. int8: a scale per output; nf4: 4 bits, a scale per 64 inputs of"
                      " an output (arXiv 2305.14314); none: in lora.base_dtype, as the rest of the base always",
              choices=("none", "int8", "nf4")),
}, needs="lora.rank or lora.path", but=("rank", "path"))

REWARD_MODEL = shared({
    "kind": O("pairs", "run.recipe=reward_model: scores of completions from pairs, chosen and rejected (data.chosen_column,"
                       " data.rejected_column, data.margin_column); or of steps from rows that hold a completion's steps and their labels",
              choices=("pairs", "steps")),
    "center": O(0.0, "weight of the mean of (chosen's + rejected's score)^2, which pulls scores to 0 on average", bound=">=0",
                needs="reward_model.kind=pairs"),
    "head": O("score", "name of the head in HF's files, read and written: <head>.weight, one row; transformers' classifiers know score"),
    "steps_column": O("completions", "kind=steps: list of the steps of a completion, texts", needs="reward_model.kind=steps"),
    "labels_column": O("labels", "kind=steps: list of their labels: true or false, or a probability of being right",
                       needs="reward_model.kind=steps"),
    "separator": O("\n", "kind=steps: text after each step; the score of a step is read after it", needs="reward_model.kind=steps"),
}, read_by=("reward_model",))

PREFERENCE = shared({
    "loss": O(("dpo",), "losses (docs/guides/preferences.md), which are added up", choices=Rows("jaxrl.algorithms.preference:LOSSES")),
    "loss_weights": O((), "one weight per loss; empty = all 1"),
    "beta": O(0.1, "scale of the rewards beta (log-prob - the reference's): more = closer to the reference; ipo's tau, orpo's lambda",
              bound=">0"),
    "label_smoothing": O(0.0, "share of the pairs whose order is taken to be wrong: dpo (conservative DPO), robust, aot, simpo, cpo; exo"
                              " needs it", bound="[0, 1)"),
    "ipo_mean": O(True, "ipo: log-ratios are divided by the tokens of their completions; False: sums, as the paper writes them"),
    "simpo_gamma": O(0.5, "simpo: margin that the rewards should differ by", bound=">=0"),
    "discopop_tau": O(0.05, "discopop: temperature of its gate", bound=">0"),
    "desirable_weight": O(1.0, "kto: weight of good completions", bound=">=0"),
    "undesirable_weight": O(1.0, "kto: weight of the others", bound=">=0"),
    "rpo_alpha": O(0.0, "weight of the chosen completions' negative log-prob per token beside the losses (iterative RPO); 0 = off", bound=">=0"),
}, read_by=("preference",))

DISTILL = shared({
    "loss": O("sampled", "what brings the student to its teacher, docs/guides/distillation.md. sampled: the difference of log-probs of the tokens"
                         " that the student drew, as their advantage; forward KL(teacher || student), reverse KL(student || teacher),"
                         " jsd: at every token", choices=("sampled", "forward", "reverse", "jsd")),
    "beta": O(0.5, "jsd: beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student", bound="(0, 1)",
              needs="distill.loss=jsd"),
    "top_k": O(0, "over so many tokens, the teacher's most probable (forward) or the student's (reverse, jsd); 0 = all of the vocabulary",
               bound=">=0", needs="distill.loss!=sampled"),
    "tail": O(True, "top_k: all other tokens are one category more, so that it stays a divergence; False: the sum over the top_k alone",
              needs="distill.loss!=sampled and distill.top_k"),
    "on_policy": O(1.0, "share of a step's prompts that the student completes (GKD's lambda); the other rows bring a completion", bound="0..1"),
    "coef": O(1.0, "factor of the divergence, or of the sampled advantage", bound=">0"),
    "gamma": O(0.0, "sampled: discount of the terms after a token; 0 = each token has its own alone", bound="0..1",
               needs="distill.loss=sampled"),
    "on_prompt": O(False, "the divergence is taken at prompt tokens too", needs="distill.loss!=sampled"),
    "ce": O(0.0, "share of the loss that is the negative log-likelihood of the rows' completions (per token of those)", bound="[0, 1)",
            needs="distill.loss!=sampled and distill.on_policy<1"),
    "temperature": O(1.0, "of the student in the divergence (sampled: rollout.temperature)", bound=">0", needs="distill.loss!=sampled"),
    "teacher_temperature": O(1.0, "of the teacher", bound=">0"),
}, read_by=("distill",))

TEACHER = shared({
    "path": O("", "HF folder or hub id; with teacher.servers of what they serve, for its tokenizer"),
    "revision": O(None, "hub revision of teacher.path", str, needs="not teacher.files"),
    "dtype": O("bf16", "dtype the teacher is held in", choices=("bf16", "fp32"), needs="not teacher.servers and not teacher.files"),
    "servers": O((), "URLs of vLLM servers (vllm serve) that have the teacher, instead of loading it here; key: $VLLM_API_KEY"),
    "timeout_seconds": O(600.0, "longest wait for a response of such a server", bound=">0", needs="teacher.servers and not teacher.files"),
    "files": O("", "folder that teacher.save wrote: the teacher's log-probs, instead of the teacher"),
    "save": O("", "folder to write the teacher's log-probs of the data's rows to (distill.top_k of the forward loss); empty = nowhere"),
}, read_by=("distill",))

RECORD = {
    "every": O(0, "write what a step needs to be computed again (docs/guides/replay.md) into run.dir/record: of the steps 1, 1 + every, 1 + 2 every"
                  " ..., which follow checkpoints of checkpoint.every_steps=every; 1 = every step, 0 = none", bound=">=0", read_by=("rl",)),
    "last": O(0, "keep only so many, the newest; 0 = all", bound=">=0", needs="record.every", read_by=("rl",)),
}

REPLAY = {
    "run": O("", "run.mode=replay, explain: directory of the recorded run; empty = run.dir", needs="run.mode=replay|explain"),
    "steps": O("", "steps to compute again, as 812 or 10:20,30 (20 included); empty = all that are recorded and can be, in explain those"
                   " whose metrics stand out", needs="run.mode=replay|explain"),
    "try": O("", "run.mode=replay: settings to try on the batch of each of those steps, one at a time: 'algorithm.clip_high=0.28,0.4;"
                 "optimizer.lr=1e-6,3e-6' are four", needs="run.mode=replay"),
}

FORK = {
    "run": O("", "directory of a recorded run (record.every) that this one leaves at fork.step; what the changed options do not touch is taken"
                 " from its record (docs/guides/replay.md)", read_by=("rl",)),
    "step": O(0, "the first step that is computed under this config; the steps before it are the recorded run's", bound=">=0",
              needs="fork.run", read_by=("rl",)),
}

CERTIFY = {
    "accept": O((), "run.mode=certify: claims that need not hold, as packing,groups; they are checked and do not fail the job"),
}
