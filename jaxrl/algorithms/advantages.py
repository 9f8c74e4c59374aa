"""Computes advantages and returns from scores and rewards; host numpy, float64.

`group_advantages` gives one number per trajectory, `token_returns` and `gae` one per token. Only loss tokens (`mask_T`:
the policy sampled them) are steps of the decision process. Prompt, observation and tool tokens between them are
skipped: their values are not read, and results are 0 there. So a turn's reward belongs on the turn's last loss token.
`turns.py` has the estimators with one number per turn.

Legend: N trajectories, T tokens of the ragged batch; trajectory i owns tokens offsets[i]:offsets[i+1].
"""

from __future__ import annotations

import numpy as np

BUILT_IN = ("outcome", "returns", "gae", "turn", "gigpo", "dpo")  # jaxrl's own (rl.advantages.ESTIMATORS)
ADVANTAGES = {}  # name -> f(AdvantageInputs) -> [N] or [T]; what users registered
STD_EPS = 1e-6
VARIANCE_EPS = 1e-8
EQUAL = 1e-8  # scores that differ by less are equal: a group of equals carries no signal, its advantage is exactly 0
TURN_REWARD_ROUNDING = 1e-6  # a remainder below this share of sum |rewards of turns| is rounding of fp32 rewards
MEANS = ("none", "group", "batch", "leave_one_out", "greedy")
STDS = ("none", "group", "batch", "group_population", "group_mean")


def register_advantage(name: str):
    """Returns a decorator that registers an advantage as `name` for algorithm.advantage:

        @register_advantage("best_of_group")
        def best_of_group(inputs: AdvantageInputs):
            best = {g: np.nanmax(inputs.scores[inputs.groups == g]) for g in np.unique(inputs.groups)}
            return [float(s == best[g]) for s, g in zip(inputs.scores, inputs.groups)]

    The function returns one number per trajectory [N] or per token [T]. jaxrl sets it to 0 at tokens outside loss_mask
    and in trajectories without a score, then whitens and clips if algorithm.whiten, advantage_low and advantage_high
    say so. Another shape, and a number at a loss token that is not finite, also in a trajectory without a score, end
    the run (ConfigError). The decorator returns the function; it raises ValueError if another function, a built-in one
    too, has the name.
    """

    def register(function):
        if name in BUILT_IN or ADVANTAGES.setdefault(name, function) is not function:
            raise ValueError(f"advantage {name!r} exists already")
        return function

    return register


def group_advantages(scores_N, groups_N, *, mean="group", std="group", baseline_N=None):
    """Computes advantages relative to a group: A_i = (R_i - baseline) / (std + 1e-6), baseline and std by choice.

        mean           baseline                                          mean + std is
        none           0                                                 none: REINFORCE
        group          mean of the group                                 group: GRPO (arXiv 2402.03300, eq. 4); none:
                                                                         Dr.GRPO (2503.20783); batch: Lite PPO
                                                                         (2508.08221)
        batch          mean of all scores of the batch                   batch: REINFORCE++ by sequence
        leave_one_out  mean of the group's other members                 none: RLOO (arXiv 2402.14740)
        greedy         baseline_N, the greedy completion's score         none: ReMax (arXiv 2310.10505)

    std group_mean divides by the group's mean score instead (MaxRL, arXiv 2602.02710: with rewards of 0 and 1 this
    tends to the gradient of the log of the success rate as groups grow); where it is at most 1e-8 nothing is divided.

    The standard deviation is computed from the raw scores of the group, or of the batch (all present scores), with
    ddof 1 (group_population: ddof 0). If those scores are all equal, or fewer than two, the advantage is not divided.

    Groups may be of any size. A missing score (not finite: the reward failed or did not apply; with greedy also
    where the baseline is) is left out of all statistics and gets advantage 0. The advantage is exactly 0, too, with
    mean group and leave_one_out in groups of fewer than two scores or whose scores differ by less than 1e-8, and with
    mean batch and greedy where a score is within 1e-8 of its baseline.

    Args:
      scores_N: [N] one score per trajectory, NaN = absent.
      groups_N: [N] group id per trajectory, in any order.
      mean, std: rows of the table above; std is none, group, batch, group_population or group_mean.
      baseline_N: [N] score of the greedy completion of each one's prompt; read with mean="greedy" only.

    Returns:
      (advantages_N float64, zero_signal_N bool): the second marks the members of groups whose advantages are all 0,
        groups without any score included.

    Raises ValueError for unknown names and where baseline_N is missing.
    """
    if mean not in MEANS or std not in STDS:
        raise ValueError(f"advantage_mean={mean!r}, advantage_std={std!r}: expected one of {MEANS} and one of {STDS}")
    scores = np.asarray(scores_N, np.float64)
    present = np.isfinite(scores)
    baseline = np.zeros_like(scores)
    if mean == "greedy":
        if baseline_N is None:
            raise ValueError("advantage_mean='greedy' needs baseline_N, the greedy completions' scores")
        baseline = np.asarray(baseline_N, np.float64)
        present &= np.isfinite(baseline)
    whole = scores[present]
    advantages, zero_signal = np.zeros_like(scores), np.zeros(len(scores), bool)
    for members in _members(groups_N):
        known = members[present[members]]
        own = scores[known]
        centred = _centred(own, whole, baseline[known], mean)
        if std == "group_mean":
            centred = centred / (own.mean() + STD_EPS) if len(own) and own.mean() > EQUAL else centred
        elif std != "none":
            spread = whole if std == "batch" else own
            ddof = 0 if std == "group_population" else 1
            centred = centred / (1.0 if _flat(spread) else spread.std(ddof=ddof) + STD_EPS)
        advantages[known] = centred
        zero_signal[members] = not centred.any()
    return advantages, zero_signal


def preferred_advantages(scores_N, groups_N, ratios_N, beta: float):
    """Computes the advantages with which REINFORCE has the gradient of DPO on the best and the worst completion of each
    group (OAIF, arXiv 2402.04792; DPO: 2305.18290, eq. 7):

        A_best = beta * sigmoid(-beta * (x_best - x_worst)) * N / P        A_worst = -A_best        else 0

    so that (1/N) sum_i A_i * grad log pi(y_i) is minus the gradient of the mean over P pairs of -log sigmoid(beta z),
    z = x_best - x_worst.

    Args:
      scores_N: [N] one score per trajectory, NaN = absent: it is in no pair. Of equal ones the first counts; groups
        whose scores are all equal (to 1e-8) have no pair.
      groups_N: [N] group id per trajectory, in any order.
      ratios_N: [N] x = log pi(y) - log pi_ref(y), sums over the sampled tokens, in nats; NaN = one that sampled
        nothing: it is in no pair and not counted in N.
      beta: DPO's factor on the log-ratios.

    Returns:
      (advantages [N] float64, [P, 2] int64 indices of best and worst).
    """
    scores, ratios = np.asarray(scores_N, np.float64), np.asarray(ratios_N, np.float64)
    pairs = []
    for members in _members(groups_N):
        known = members[np.isfinite(scores[members] + ratios[members])]
        if not _flat(scores[known]):
            pairs.append((known[np.argmax(scores[known])], known[np.argmin(scores[known])]))
    pairs, out = np.asarray(pairs, np.int64).reshape(-1, 2), np.zeros(len(scores))
    best, worst = pairs.T
    size = beta * np.exp(-np.logaddexp(0.0, beta * (ratios[best] - ratios[worst])))
    size *= np.count_nonzero(np.isfinite(ratios)) / max(len(pairs), 1)
    out[best], out[worst] = size, -size
    return out, pairs


def _members(groups_N):
    """Returns the indices of each group's members."""
    groups = np.asarray(groups_N)
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else []


def _flat(values):
    return len(values) < 2 or values.max() - values.min() < EQUAL


def _centred(own, whole, baseline, mean):
    """Returns the scores of one group minus their baseline; exactly 0 where they are equal to it up to rounding."""
    if mean in ("group", "leave_one_out") and _flat(own):
        return np.zeros_like(own)
    if mean in ("group", "leave_one_out"):
        return (own - own.mean()) * (len(own) / (len(own) - 1) if mean == "leave_one_out" else 1.0)
    if mean == "none" or not len(own):
        return own
    centred = own - (whole.mean() if mean == "batch" else baseline)
    return np.where(np.abs(centred) < EQUAL, 0.0, centred)


def token_rewards(scores_N, mask_T, offsets, kl_T=None, kl_coef=0.0, turn_rewards_T=None):
    """Returns token rewards, float64 [T]: the trajectory's score at its last loss token, minus kl_coef * KL at each
    loss token; 0 on other tokens.

    InstructGPT's and REINFORCE++'s placement (arXiv 2203.02155, 2501.03262). With turn rewards, which are part of
    the score, each stays at its token and the last loss token gets the remainder (score - their sum), so that the
    token rewards add up to the score (to 1e-6 of their magnitudes: they may come in fp32). A trajectory whose score
    is missing (NaN) gets 0 everywhere, without its KL; one without loss tokens gets nothing.

    Args:
      scores_N: [N], NaN = missing. mask_T: [T] bool, loss tokens. offsets: [N+1]; trajectory i owns tokens
        offsets[i]:offsets[i+1].
      kl_T: [T] estimates of the KL to the reference in nats, `kl.kl_value` of the policy that sampled, read at loss
        tokens; None = none.
      kl_coef: factor on the KL.
      turn_rewards_T: [T], read at loss tokens; None = none.
    """
    mask = np.asarray(mask_T, bool)
    scores = np.asarray(scores_N, np.float64)
    counts, ends = _scored(mask, offsets)
    at = np.flatnonzero(mask)
    known = np.isfinite(scores)
    rewards = np.zeros(len(mask))
    if kl_T is not None and kl_coef:
        rewards[at] = np.where(np.repeat(known, counts), -kl_coef * np.asarray(kl_T, np.float64)[at], 0.0)
    last = known & (counts > 0)
    if turn_rewards_T is not None:
        own = np.where(np.repeat(known, counts), np.asarray(turn_rewards_T, np.float64)[at], 0.0)
        rewards[at] += own
        trajectory = np.repeat(np.arange(len(counts)), counts)
        turn_sum, most = (np.bincount(trajectory, x, len(counts)) for x in (own, abs(own)))
        scores = np.where(np.abs(scores - turn_sum) <= TURN_REWARD_ROUNDING * most, 0.0, scores - turn_sum)
    rewards[at[ends[last] - 1]] += scores[last]
    return rewards


def token_returns(rewards_T, mask_T, offsets, gamma):
    """Returns the discounted sum of rewards from each loss token to the end of its trajectory, float64 [T].

    R_t = r_t + gamma * R_next, where next is the trajectory's next loss token; 0 outside mask_T.

    Args:
      rewards_T: [T], read at loss tokens only.
      mask_T: [T] bool, the loss tokens.
      offsets: [N+1]; trajectory i owns tokens offsets[i]:offsets[i+1].
      gamma: discount per loss token."""
    return gae(rewards_T, np.zeros(len(mask_T)), mask_T, offsets, gamma, 1.0)[0]


def gae(rewards_T, values_T, mask_T, offsets, gamma, lam):
    """Computes generalised advantage estimation (arXiv 1506.02438, eq. 16) over loss tokens:

        delta_t = r_t + gamma * V_next - V_t        A_t = delta_t + gamma * lam * A_next

    where next is the trajectory's next loss token: V_next and A_next skip observation tokens. Both are 0 after the
    last loss token.

    Args:
      rewards_T, values_T: [T], read at loss tokens.
      mask_T: [T] bool, loss tokens.
      offsets: [N+1]; trajectory i owns tokens offsets[i]:offsets[i+1].
      gamma: discount per loss token.
      lam: scalar, or one per trajectory [N] (see `adaptive_lambda`).

    Returns:
      (advantages_T, returns_T), float64, 0 outside mask_T; returns = advantages + values.
    """
    mask = np.asarray(mask_T, bool)
    counts, ends = _scored(mask, offsets)
    rewards, values = (np.asarray(x, np.float64)[mask] for x in (rewards_T, values_T))
    n = len(counts)
    order = np.argsort(-counts, kind="stable")  # longest first: those still running are a leading slice
    decay = gamma * np.broadcast_to(np.asarray(lam, np.float64), (n,))[order]
    value, running, advantages = np.zeros(n), np.zeros(n), np.zeros(len(rewards))
    ends = ends[order]
    longest = int(counts.max(initial=0))
    live = np.searchsorted(-counts[order], -np.arange(longest), side="left")  # those with more than k loss tokens
    for k in range(longest):
        now = slice(0, live[k])
        at = ends[now] - 1 - k
        delta = rewards[at] + gamma * value[now] - values[at]
        running[now] = delta + decay[now] * running[now]
        value[now] = values[at]
        advantages[at] = running[now]
    out, returns = np.zeros(len(mask)), np.zeros(len(mask))
    out[mask], returns[mask] = advantages, advantages + values
    return out, returns


def adaptive_lambda(lengths_N, alpha: float):
    """Returns VAPO's length-adaptive lambda (arXiv 2504.05118), max(0, 1 - 1 / (alpha * |y|)), float64 [N]; the
    paper's alpha is 0.05.

    The sum of its weights is then alpha * |y|. Below |y| = 1 / alpha the formula is negative; clamping at 0 is jaxrl's
    choice. Raises ValueError if alpha is not positive.

    Args:
      lengths_N: [N] |y|, tokens of each completion; 0 gives 0.
      alpha: inverse of the length up to which lambda is 0.
    """
    if alpha <= 0:
        raise ValueError(f"lam_alpha={alpha}: must be positive")
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(np.asarray(lengths_N, np.float64), 1e-300)))


def whiten(advantages_T, mask_T, groups_T=None, mean="step", std="step"):
    """Returns (A - mean) / sqrt(var + 1e-8) over the loss tokens, var about that mean with ddof 1; float64 [T], 0 on
    the others.

    As in REINFORCE++ (arXiv 2501.03262) and in PPO's implementations. Call it with the whole optimizer batch: the
    statistics are global, never of a microbatch or host. Fewer than two loss tokens (with std="group": of a group) have
    no deviation: unless std is "none" the result is 0 there.

    Args:
      advantages_T: [T], read at loss tokens.
      mask_T: [T] bool, loss tokens.
      groups_T: [T] prompt group of each token, needed for the level "group"; None = not read.
      mean, std: of which tokens: "step", "group", or "none" (0 and 1). Other names are not refused: they mean "step".
    """
    mask = np.asarray(mask_T, bool)
    values = np.asarray(advantages_T, np.float64)[mask]
    out = np.zeros(len(mask))
    if len(values) > 1 and mean == std == "step":
        out[mask] = (values - values.mean()) / np.sqrt(values.var(ddof=1) + VARIANCE_EPS)
        return out
    of_group = np.zeros(len(values), np.int64)
    if "group" in (mean, std):
        of_group = np.unique(np.asarray(groups_T)[mask], return_inverse=True)[1].reshape(-1)

    def sums(numbers, level):
        """Returns (sum, count) of the tokens of each token's level."""
        of = of_group if level == "group" else np.zeros(len(numbers), np.int64)
        return np.bincount(of, numbers)[of], np.bincount(of)[of]

    if mean != "none" and len(values):
        total, count = sums(values, mean)
        values = values - total / count
    if std != "none" and len(values):
        total, count = sums(values**2, std)
        scaled = values / np.sqrt(total / np.maximum(count - 1, 1) + VARIANCE_EPS)
        values = np.where(count > 1, scaled, 0.0)
    out[mask] = values
    return out


def _scored(mask, offsets):
    """Returns (counts_N, ends_N): loss tokens per trajectory, and their end among all loss tokens."""
    upto = np.concatenate([[0], np.cumsum(mask)])[np.asarray(offsets)]
    return np.diff(upto), upto[1:]


def clip_advantages(advantages, low, high):
    """Clips advantages of any shape to [low, high], as float64; None = no bound on that side."""
    low, high = -np.inf if low is None else low, np.inf if high is None else high
    return np.clip(np.asarray(advantages, np.float64), low, high)


def shared_prefix_mask(tokens_T, offsets, prompt_lengths_N, groups_N, scores_N, minimum: int):
    """Returns bool [T]: False on the opening that a completion shares with a completion of another score.

    Of two completions to one prompt that begin alike and end with different scores, the common opening is pushed both
    ways: what remains is noise (Cosmos-RL's min_filter_prefix_tokens). A completion loses its longest prefix that it
    shares with any completion of its group whose score differs (by 1e-8 or more), if that has at least `minimum`
    tokens, counted from the end of the prompt. So a completion of at least `minimum` tokens with which another one of
    a different score begins loses all its tokens. True on all other tokens, prompts too. Completions without a score
    (NaN) have advantage 0 and take no part.

    Args:
      tokens_T: [T] int ids, prompt then completion of each sequence.
      offsets: [N+1]; sequence i owns tokens offsets[i]:offsets[i+1].
      prompt_lengths_N: [N] leading tokens that are the prompt.
      groups_N: [N] group id per sequence. scores_N: [N], NaN = absent.
      minimum: shortest shared prefix that is masked, in tokens.
    """
    tokens, scores = np.asarray(tokens_T), np.asarray(scores_N, np.float64)
    starts = np.asarray(offsets)[:-1] + np.asarray(prompt_lengths_N)
    allowed = np.ones(len(tokens), bool)
    for members in _members(groups_N):
        known = [int(i) for i in members if np.isfinite(scores[i])]
        completions = [tokens[starts[i] : offsets[i + 1]].tolist() for i in known]
        for i, length in zip(known, _mixed_prefixes(completions, scores[known]), strict=True):
            if length >= minimum:
                allowed[starts[i] : starts[i] + length] = False
    return allowed


def _mixed_prefixes(completions, scores):
    """Returns the length of the longest prefix that each completion shares with one of another score."""
    lengths = [0] * len(completions)
    mixed, depth = [range(len(completions))], 0
    while mixed:  # classes of completions that are alike up to `depth` and differ in score
        classes = {}
        for c, group in enumerate(mixed):
            for i in group:
                if len(completions[i]) > depth:
                    classes.setdefault((c, completions[i][depth]), []).append(i)
        depth += 1
        mixed = [group for group in classes.values() if not _flat(scores[group])]
        for group in mixed:
            for i in group:
                lengths[i] = depth
    return lengths
