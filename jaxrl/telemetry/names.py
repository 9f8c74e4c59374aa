"""Every metric jaxrl writes: name, meaning, and how the console shows it.

Names are `group/name`. `<...>` stands for one or more further parts of a name. Averages are over the step's data, or
over the optimizer steps of one RL step where the value comes from the update (maxima for `gap/max`). A line of SFT is
about log.every_steps steps and says what one of them came to on average, seconds, tokens and operations included.
"""

from __future__ import annotations

import fnmatch
import re
import textwrap
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric. A `header` makes it a console column, shown by its `format` (console.show). Columns of the highest
    `rank` are dropped first on a narrow terminal. clocked: it depends on time, so that equal runs differ in it.
    """

    name: str
    meaning: str
    header: str = ""
    format: str = ""
    rank: int = 0
    clocked: bool = False


METRICS: tuple[Metric, ...] = (
    # what was learnt from
    Metric("reward/mean", "mean shaped reward of the completions that have one", "reward", "fixed"),
    Metric("reward/std", "standard deviation of the shaped rewards over the whole batch"),
    Metric("reward/<why>_fraction", "share of scores that are missing because of <why>: error, timeout, none, nan; failed: any "
           "of them but none, absent: completions without a reward"),
    Metric("reward/<name>/failed_<cause>", "share of the completions for which a service gave no score because of <cause>: refused, host, tls,"
           " broken, slow, http_<status>, json, count, type, key, long, system, tokenizer, unparsable"),
    Metric("reward/<name>/cached", "of a judge: share of its scores whose replies were on disk"),
    Metric("reward/accuracy", "preferences: share of the pairs whose chosen completion has the larger reward, beta (log-prob - reference); ties half",
           "prefers", "percent"),
    Metric("reward/margin", "preferences: mean reward of the chosen completions less that of the rejected ones", "margin", "fixed"),
    Metric("reward/chosen", "preferences: mean reward of the chosen completions; reward/rejected of the others"),
    Metric("reward/<name>", "mean raw score of one reward function where it gave one, or a metric it returned"),
    Metric("accuracy/train", "share of the completions whose named reward (eval.accuracy_from, else the row's first) reaches "
           "reward.pass_mark", "acc", "percent"),
    Metric("loss", "RL: as policy/loss; SFT: mean negative log-likelihood per target token; preferences, reward models: the loss of the step",
           "loss", "fixed"),
    Metric("length/mean", "mean completion length in tokens, end of text included", "length", "count"),
    Metric("length/max", "longest completion in tokens"),
    Metric("length/min", "shortest completion in tokens"),
    # what the update did
    Metric("loss/<name>", "of preferences with several losses: each one's own, without its weight"),
    Metric("preference/z0", "kto: mean log-ratio of prompts with completions of other prompts, at least 0"),
    Metric("policy/loss", "the minimised sum: policy loss + KL term - entropy bonus"),
    Metric("policy/kl", "KL(policy || reference) per token; absent where no reference is held", "KL", "small", 1),
    Metric("policy/approx_kl", "k3 estimate of the KL between the policy before and after, per token"),
    Metric("policy/entropy", "mean entropy of the policy per sampled token, in nats", "entropy", "fixed", 1),
    Metric("policy/clip_fraction", "share of tokens whose ratio was clipped", "clip", "percent", 1),
    Metric("policy/clip_low_fraction", "share of tokens clipped at the lower bound (negative advantage)"),
    Metric("policy/clip_high_fraction", "share of tokens clipped at the upper bound (positive advantage)"),
    Metric("policy/dual_clip_fraction", "share of tokens with negative advantage above algorithm.dual_clip or delta"),
    Metric("policy/ratio_mean", "mean ratio of current to proximal policy, by token, sequence or geometric mean as algorithm.ratio"),
    Metric("policy/sequence_masked_fraction", "share of tokens in completions that algorithm.mismatch.sequence_delta drops"),
    Metric("policy/<mask>_masked_fraction", "share of tokens that a token mask leaves out: prefix (algorithm.shared_prefix_tokens), m2"
           " (algorithm.m2_threshold), ratio (algorithm.sequence_high), cov (algorithm.cov_share)"),
    Metric("policy/kl_in_reward", "mean KL per token that was subtracted from the rewards (dpo: of which its log-ratios are the sums)"),
    Metric("policy/entropy_coef", "coefficient of the entropy bonus"),
    Metric("policy/positive_nll", "mean negative log-likelihood per token of completions that pass"),
    Metric("policy/step_kl", "with train.max_step_kl: KL that the step made on its batch (k3, per token), after it was scaled back"),
    Metric("policy/step_kl_unscaled", "the same before that"),
    Metric("policy/step_scale", "share of the step that was taken, 0 where it was refused"),
    Metric("policy/early_stopped", "share of the step's updates left out by algorithm.early_stop_*"),
    Metric("policy/reference_reset", "1 in a step after which the reference became the policy"),
    Metric("policy/<name>", "what a policy loss of your own reports"),
    Metric("distill/divergence", "what is distilled, mean per loss token in nats; sampled: log-prob of the student less the teacher's", "apart",
           "small"),
    Metric("distill/teacher_mass", "the teacher's probability mass of the tokens that distill.top_k takes"),
    Metric("distill/teacher_logprob", "sampled: the teacher's mean log-prob of the student's tokens"),
    Metric("distill/nll", "distill.ce: negative log-likelihood per token of the completions that rows bring"),
    Metric("value/loss", "the critic's loss, mean per token", "vloss", "small", 1),
    Metric("value/explained_variance", "1 - var(return - value) / var(return), of the values before the update", "expl", "fixed", 1),
    Metric("value/<name>", "the critic's: mean value and return, share of clipped values, gradient norm, learning rate"),
    Metric("policy/logprob", "mean log-prob of the sampled tokens under the current policy"),
    Metric("score/accuracy", "reward models: share of the step's pairs whose chosen completion scores higher, or of steps on the right side of 0",
           "pairs", "percent"),
    Metric("score/margin", "mean score of the chosen completions less that of the rejected ones (of the right steps less the wrong ones)"),
    Metric("score/<name>", "mean and standard deviation of the scores of a step"),
    Metric("router/load_max_over_mean", "tokens of the fullest expert over the mean of its layer's, in the layer where that is largest; E / K"
           " where all tokens have the same experts", "load", "fixed", 1),
    Metric("router/entropy", "mean entropy of the routers' distributions per loss token, in nats"),
    Metric("router/idle", "share of experts without a loss token in an update"),
    Metric("router/replayed", "algorithm.routes: share of the loss tokens whose experts were replayed, mean over layers"),
    Metric("router/mismatch", "share of replayed experts that the router would not have chosen by itself, mean over layers"),
    Metric("router/<name>", "terms of the loss, mean over layers: balance (1 where tokens spread evenly), z"),
    Metric("optim/grad_norm", "global norm of the gradient before clipping", "grad", "small"),
    Metric("optim/lr", "learning rate of the last update"),
    Metric("adapter/<name>/<what>", "lora.adapters: <what> of the update (loss, optim/grad_norm, policy/entropy ...) over this adapter's own"
           " tokens, in steps that hold some; the plain names are means over the adapters of a step"),
    Metric("optim/skipped", "updates skipped because loss or gradient was not finite"),
    # whether the numbers can be trusted
    Metric("gap/mean", "mean |sampler's log-prob - trainer's log-prob| per sampled token", "gap", "small", 1),
    Metric("gap/max", "the largest such difference"),
    Metric("gap/k3", "k3 estimate of KL(sampler || trainer) per token"),
    Metric("gap/ratio_mean", "mean mismatch ratio before it is truncated or masked"),
    Metric("gap/ratio_max", "the largest such ratio"),
    Metric("gap/corrected_fraction", "share of tokens whose mismatch weight was truncated or masked"),
    Metric("gap/stale_<first>", "gap/mean over the tokens of one bucket of staleness; with 0 it is arithmetic alone, but for completions "
           "that continued across a weight sync"),
    Metric("gap/images", "gap/mean over the tokens behind an image; in jobs with images"),
    Metric("gap/text", "gap/mean over the other tokens of these jobs"),
    Metric("gap/<name>", "further views of the sampler-trainer difference: tokens outside the clip range, mean weight"),
    Metric("old_gap/<name>", "the same between the trainer's scoring pass and its update"),
    Metric("rollout/truncated_fraction", "share of completions cut by the length limit", "trunc", "percent"),
    Metric("rollout/zero_signal_fraction", "share of groups whose rewards are all equal", "zero", "percent"),
    Metric("rollout/absent_fraction", "share of completions without a reward (failed or not applicable)"),
    Metric("staleness/mean", "weight syncs between the version that sampled a token and the step that learns from it, mean over tokens"),
    Metric("staleness/max", "the largest of these; at most rollout.max_staleness"),
    Metric("staleness/<first>", "share of tokens whose staleness is <first> or more, and less than the next <first>"),
    Metric("fork/completions_taken", "of a fork: completions of the step that the record of fork.run held (here and below: of the first process)"),
    Metric("fork/completions_sampled", "the others"),
    Metric("fork/rewards_taken", "calls of reward functions whose outcome the record held"),
    Metric("fork/rewards_computed", "the others"),
    Metric("rollout/ahead_groups", "groups that are asked for and that later steps will use"),
    Metric("rollout/ahead_complete", "groups asked for ahead by the first process that are complete"),
    Metric("rollout/rounds", "rounds of sampling that dynamic sampling took"),
    Metric("rollout/discarded_fraction", "share of the sampled groups that dynamic sampling left out"),
    Metric("rollout/masked_fraction", "share of completions that dynamic sampling masks"),
    Metric("rollout/kept_mass_mean", "mean probability mass the sampler kept under top-p, top-k or min-p"),
    Metric("rollout/tokens", "tokens sampled (SFT: trained on) in the step"),
    Metric("rollout/prompt_tokens", "prompt tokens of the step's sequences"),
    Metric("rollout/image_fraction", "share of the sampled tokens that have an image before them; in jobs with images"),
    Metric("env/turns", "mean turns of an episode", "turns", "fixed", 1),
    Metric("env/turns_max", "most turns of an episode"),
    Metric("env/segments", "mean sequences of an episode: 1, and one more wherever its history was rewritten"),
    Metric("env/observation_tokens", "mean tokens of an episode behind its prompt that it did not sample"),
    Metric("env/calls", "mean calls of tools of an episode"),
    Metric("env/malformed", "mean calls of an episode that could not be read, or did not fit their tool"),
    Metric("env/late", "share of episodes that were ended for their time (env.late=truncated)"),
    Metric("env/absent_fraction", "share of the episodes asked for that failed by their environment's fault and are not learnt from"),
    Metric("env/absent/<cause>", "the same by cause"),
    Metric("advantage/abs_mean", "mean |advantage| over the completions"),
    Metric("advantage/anchored_fraction", "gigpo: share of the sampled tokens with an advantage among turns of the same state"),
    Metric("advantage/pairs_fraction", "dpo: share of the groups whose completions have different scores, a best and a worst"),
    Metric("advantage/pairs_margin", "dpo: mean of beta times the best's log-ratio to the reference less the worst's, in nats"),
    Metric("packing/efficiency", "share of the packed rows that is not padding"),
    Metric("packing/patch_fill", "images: share of the room for patches in rows that holds one, of microbatches with images"),
    Metric("packing/chunk_fill", "recurrent layers: share of the places in their chunks that hold a token; each segment begins a chunk"),
    Metric("data/epoch", "passes over the training data so far"),
    Metric("data/samples", "samples trained on so far"),
    Metric("data/filtered_fraction", "share of the training rows left out because their prompt is too long"),
    Metric("data/pass_rate", "mean pass rate of the rows when they were last asked (data.pass_rate_min, pass_rate_max)"),
    Metric("data/left_out_fraction", "share of the rows that this pass over the data leaves out for their pass rate"),
    Metric("source/<name>/share", "data.sources: share of the last step's rows that came from this source"),
    Metric("source/<name>/epoch", "passes over this source so far"),
    Metric("source/<name>/<what>", "of its completions: mean shaped reward, reward/<function> as reward/<name>, mean length in tokens"),
    Metric("data/bad_rows", "rows that could not be read and were skipped"),
    # evaluation
    Metric("eval/accuracy", "accuracy over the rows of all held-out sets", "eval", "percent"),
    Metric("eval/preference_accuracy", "reward/accuracy over the pairs of all held-out sets", "held-out", "percent"),
    Metric("eval/<set>/reward/<name>", "as reward/<name>, over one held-out set: each reward function's mean raw score, its own metrics"),
    Metric("eval/<set>/<control>/<name>", "accuracy, mean@k and pass@k of the set's rows with other pictures (eval.controls)"),
    Metric("eval/<name>", "mean@k and pass@k over all sets; eval/<set>/<name> for one set, also length, truncation, failures and the "
           "rewards' total"),
    # time, and what belongs to one process; those that are clocked live under the key "time" of a metrics.jsonl line
    Metric("time/step", "seconds of the step (SFT: of a mean one of the line), saving and evaluating included", "s/step", "seconds", clocked=True),
    Metric("time/<phase>", "seconds in one phase; the phases and `other` add up to time/step", clocked=True),
    Metric("time/tokens_per_second", "rollout/tokens per second of the step less its eval, checkpoint and export",
           "tok/s", "count", clocked=True),
    Metric("engine/<name>", "vLLM, summed over servers: running, waiting, kv_cache_use, preemptions, prefix_queries, "
           "prefix_hits as its engines count them, absent while a ready server does not report them; restarts, reissued "
           "requests, servers_lost, given_up requests of this run, unrouted completions, whose experts did not arrive whole"),
    Metric("publish/seconds", "vLLM: seconds until every server confirmed the new weights", clocked=True),
    Metric("publish/gb_per_second", "vLLM: bytes of the weights over those seconds", clocked=True),
    Metric("publish/probe", "vLLM: mean difference in nats between the probe's log-probs and the trainer's"),
    Metric("time/compiled_programs", "programs this process has compiled for the sampler; stops growing after some steps", clocked=True),
    Metric("time/compilations", "programs of any kind that the work waited for, compiled or fetched from the cache, since the last line; "
           "0 after the first steps", clocked=True),
    Metric("time/compilations_background", "sampler's programs that a background thread compiled since the last line", clocked=True),
    Metric("flops/<phase>", "operations that rollout, score and update needed, on all devices: no padding, nothing twice"),
    Metric("perf/mfu", "share of the chip's peak at which the step's operations were done, its eval, checkpoint and export left out; "
           "absent for CPUs and unknown chips", "MFU", "percent", 2, clocked=True),
    Metric("perf/<phase>_mfu", "the same for the seconds of one phase: rollout, score, update", clocked=True),
    Metric("perf/tflops", "the step's operations per second and device, in TFLOP/s", clocked=True),
    Metric("perf/<phase>_tflops", "the same for the seconds of one phase", clocked=True),
    Metric("perf/tokens_per_second", "tokens of prompts and completions per second and device, over the same seconds as perf/mfu", clocked=True),
    Metric("perf/update_tokens_per_second", "the same over the seconds of the update", clocked=True),
    Metric("perf/env_engine_seconds", "mean seconds that an episode waited for the engine", clocked=True),
    Metric("perf/env_environment_seconds", "mean seconds that it took beside that: its environment, and waiting for a worker", clocked=True),
    Metric("upload/<name>", "folders times places of checkpoint.upload so far: done, failed (no attempts left), waiting", clocked=True),
    Metric("time/wall", "Unix time at which the line was written", clocked=True),
)
NAMES: dict[str, str] = {m.name: m.meaning for m in METRICS}
CLOCKED: tuple[str, ...] = tuple({m.name.partition("<")[0]: 0 for m in METRICS if m.clocked})  # beginnings of names
COLUMNS: tuple[Metric, ...] = tuple(m for m in METRICS if m.header)

# Of each RL step, in TensorBoard under histogram/<name>; from what the host holds anyway.
HISTOGRAMS: dict[str, str] = {
    "length": "tokens of each completion",
    "reward": "shaped reward of each completion that has one",
    "advantage": "mean advantage of each completion over its tokens",
    "log_ratio": "log-prob under the proximal policy less the sampler's, of each token; where the trainer scores old log-probs",
    "staleness": "weight syncs between sampling and learning, of each token; where completions are sampled ahead",
}


def describe(name: str) -> str | None:
    """Returns the meaning of a metric, by exact name or by the first matching pattern; None for an unknown name."""
    if name in NAMES:
        return NAMES[name]
    patterns = (n for n in NAMES if "<" in n)
    return next((NAMES[n] for n in patterns if fnmatch.fnmatchcase(name, re.sub(r"<\w+>", "*", n))), None)


def metrics_table(columns: int = 120) -> str:
    """Returns all metrics with their meaning, wrapped to this many columns."""
    width = max(len(m.name) for m in METRICS)
    return "\n".join(textwrap.fill(m.meaning, columns - 1, initial_indent=f"    {m.name:<{width}}  ",
                                   subsequent_indent=" " * (width + 6), break_long_words=False) for m in METRICS)
