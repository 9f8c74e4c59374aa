"""The formulas of jaxrl.algorithms once more: float64, from the papers, by plain loops over sequences and tokens.

Nothing here is shared with jaxrl. A batch is a list of rows, a row a list of slots; `sequences` tells which slots of a row
belong together, `mask` which slots count. `x` are the current log-probs that a gradient is taken with respect to; `sg` is the
same numbers as constants, for what the papers put under a stop-gradient. All losses work on complex numbers, so that the
derivative in x is exact: imag(f(x + ih)) / h (comparisons look at the real part).
"""

import cmath
import math

LIMIT = 20.0  # the library's documented bound on exponents: linear beyond


def real(z):
    return z.real if isinstance(z, complex) else float(z)


def exp(x):
    if real(x) <= LIMIT:
        return cmath.exp(x) if isinstance(x, complex) else math.exp(x)
    return math.exp(LIMIT) * (1 + x - LIMIT)


def expm1(x):
    """exp(x) - 1; its derivative is exp, also where x is complex with a tiny imaginary part."""
    if not isinstance(x, complex):
        return math.expm1(x) if x <= LIMIT else exp(x) - 1
    value = math.expm1(x.real) if x.real <= LIMIT else exp(x.real) - 1
    return complex(value, exp(x).imag)


def clip(x, low, high):
    return low if real(x) < low else high if real(x) > high else x


def larger(a, b):
    return a if real(a) >= real(b) else b


def smaller(a, b):
    return a if real(a) <= real(b) else b


def scored(b):
    """(row, slot) of every slot that counts."""
    return [(r, j) for r, row in enumerate(b.mask) for j, m in enumerate(row) if m]


def sequence_of(b, r, j):
    """The loss slots of the sequence that slot j of row r belongs to."""
    return [(r, k) for k in range(len(b.mask[r])) if b.sequences[r][k] == b.sequences[r][j] and b.mask[r][k]]


def mean(values):
    values = list(values)
    return sum(values) / max(len(values), 1)


def token_ratio(b, x, r, j):
    return exp(x[r][j] - b.old[r][j])


def gspo_ratio(b, x, r, j):
    """exp((1/|y|) sum_t (log p_t - log p_old_t))"""
    return exp(mean(x[i][k] - b.old[i][k] for i, k in sequence_of(b, r, j)))


def gspo_token_ratio(b, x, r, j):
    """sg(s) * p / sg(p)"""
    return gspo_ratio(b, b.logp, r, j) * exp(x[r][j] - b.logp[r][j])


RATIOS = {"token": token_ratio, "sequence": gspo_ratio, "sequence_token": gspo_token_ratio}


# -- policy losses: f(b, x) -> {slot: loss} ------------------------------------------------------------------------


def clip_loss(b, x, low, high, ratio="token", dual=0.0, delta=0.0):
    out = {}
    for r, j in scored(b):
        a, s = float(b.advantage[r][j]), RATIOS[ratio](b, x, r, j)
        first = smaller(s, delta) if delta else s
        loss = larger(-a * first, -a * clip(s, 1 - low, 1 + high))
        if dual and a < 0:
            loss = smaller(loss, -dual * a)
        out[r, j] = loss
    return out


def gmpo(b, x, low, high):
    """-A * (prod_t of min or max(rho_t, clip(rho_t)), by the sign of A)^(1/|y|), in logs"""
    out = {}
    for r, j in scored(b):
        logs = []
        for i, k in sequence_of(b, r, j):
            a, d = float(b.advantage[i][k]), x[i][k] - b.old[i][k]
            bounded = clip(d, -low, high)
            logs.append(smaller(d, bounded) if a > 0 else larger(d, bounded) if a < 0 else d)
        out[r, j] = -float(b.advantage[r][j]) * exp(mean(logs))
    return out


def cispo(b, x, highest, lowest, ratio="token"):
    return {
        (r, j): -clip(RATIOS[ratio](b, b.logp, r, j), lowest, highest) * float(b.advantage[r][j]) * x[r][j]
        for r, j in scored(b)
    }


def sigmoid(z):
    return 1 / (1 + (cmath.exp(-z) if isinstance(z, complex) else math.exp(-z))) if real(z) > -700 else 0.0


def sapo(b, x, tau_pos, tau_neg, ratio="token"):
    out = {}
    for r, j in scored(b):
        a = float(b.advantage[r][j])
        tau = tau_pos if a > 0 else tau_neg
        out[r, j] = -a * 4 / tau * sigmoid(tau * (RATIOS[ratio](b, x, r, j) - 1))
    return out


def dppo(b, x, low, high):
    out = {}
    for r, j in scored(b):
        a = float(b.advantage[r][j])
        moved = math.exp(b.logp[r][j]) - math.exp(b.old[r][j])
        inside = moved <= high if a > 0 else moved >= -low
        out[r, j] = -a * min(token_ratio(b, b.logp, r, j), 20.0) * x[r][j] if inside else 0.0
    return out


def topr(b, x, by_token):
    """A product over the completion's tokens, or one token's ratio."""
    out = {}
    for r, j in scored(b):
        a, mine = float(b.advantage[r][j]), [j] if by_token else [k for s, k in scored(b) if s == r and b.sequences[r][k] == b.sequences[r][j]]
        far = sum(float(b.logp[r][k]) - float(b.old[r][k]) for k in mine)
        out[r, j] = -a * x[r][j] * (1.0 if a > 0 else math.exp(min(far, 0.0)))
    return out


def pg(b, x):
    return {(r, j): -float(b.advantage[r][j]) * x[r][j] for r, j in scored(b)}


def nll(b, x):
    return {(r, j): -x[r][j] for r, j in scored(b)}


def value(b, x, bound):
    """0.5 max((v - R)^2, (clip(v, v_old +- bound) - R)^2): x holds the values, old their old ones, ref the returns"""
    out = {}
    for r, j in scored(b):
        v, old, ret = x[r][j], b.old[r][j], b.ref[r][j]
        square = (v - ret) ** 2
        if bound:
            square = larger(square, (clip(v, old - bound, old + bound) - ret) ** 2)
        out[r, j] = 0.5 * square
    return out


def kl(b, x, estimator):
    out = {}
    for r, j in scored(b):
        d = x[r][j] - b.ref[r][j]
        if estimator == "abs":
            out[r, j] = d if real(d) > 0 else -d if real(d) < 0 else 0 * d
        elif estimator == "k2":
            out[r, j] = 0.5 * d * d
        elif estimator == "low_var":
            d = clip(d, -20.0, 20.0)
            out[r, j] = clip(expm1(-d) + d, -10.0, 10.0)
        else:
            k3 = expm1(-d) + d
            out[r, j] = token_ratio(b, x, r, j) * k3 if estimator == "k3_unbiased" else k3
    return out


def kl_terms(b, estimator):
    """{slot: (absolute terms of the value, of its derivative)}: k3 is a difference of numbers that may be far larger"""
    out = {}
    for r, j in scored(b):
        d = b.logp[r][j] - b.ref[r][j]
        ratio = token_ratio(b, b.logp, r, j) if estimator == "k3_unbiased" else 1.0
        inside = estimator != "low_var" or abs(kl(b, b.logp, estimator)[r, j]) < 10
        d = max(d, -20.0) if estimator == "low_var" else d
        terms = abs(expm1(-d)) + abs(d) if inside else 10.0
        slope = (1 + exp(min(-d, LIMIT))) * inside
        out[r, j] = ratio * terms, ratio * (terms + slope) if estimator == "k3_unbiased" else slope
    return out


# -- mismatch: f(b) -> {slot: weight} ------------------------------------------------------------------------------


def mismatch(b, cap, level, action, low):
    out = {}
    for r, j in scored(b):
        mine = [b.old[i][k] - b.behaviour[i][k] for i, k in sequence_of(b, r, j)]
        log = b.old[r][j] - b.behaviour[r][j] if level == "token" else sum(mine) if level == "sequence" else mean(mine)
        rho = exp(float(log))
        out[r, j] = min(rho, cap) if action == "truncate" else rho if low <= rho <= cap else 0.0
    return out


def keep_sequence(b, delta):
    out = {}
    for r, j in scored(b):
        mine = sequence_of(b, r, j)
        negative = mean(float(b.advantage[i][k]) for i, k in mine) < 0
        gap = mean(b.behaviour[i][k] - b.logp[i][k] for i, k in mine)
        out[r, j] = 0.0 if negative and gap > delta else 1.0
    return out


# -- advantages ----------------------------------------------------------------------------------------------------


def std(values):
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1))


def advantages(scores, groups, mean_of, std_of, baseline=None):
    known = [math.isfinite(s) and (mean_of != "greedy" or math.isfinite(baseline[i])) for i, s in enumerate(scores)]
    every = [s for s, k in zip(scores, known, strict=True) if k]
    out = []
    for i, score in enumerate(scores):
        if not known[i]:
            out.append(0.0)
            continue
        group = [s for j, s in enumerate(scores) if known[j] and groups[j] == groups[i]]
        if mean_of in ("group", "leave_one_out") and (len(group) < 2 or max(group) - min(group) < 1e-8):
            out.append(0.0)
            continue
        others = [s for j, s in enumerate(scores) if known[j] and groups[j] == groups[i] and j != i]
        centre = {
            "none": lambda: 0.0,
            "group": lambda group=group: mean(group),
            "batch": lambda: mean(every),
            "leave_one_out": lambda others=others: sum(others) / len(others),
            "greedy": lambda i=i: baseline[i],
        }[mean_of]()
        a = score - centre
        if mean_of in ("batch", "greedy") and abs(a) < 1e-8:
            a = 0.0
        spread = group if std_of == "group" else every
        if std_of != "none" and len(spread) > 1 and max(spread) - min(spread) >= 1e-8:
            a /= std(spread) + 1e-6
        out.append(a)
    return out


def gae(rewards, values, mask, offsets, gamma, lams):
    """Every loss token's sum over l of (gamma lam)^l delta_{t+l}, by its definition."""
    adv, ret = [0.0] * len(mask), [0.0] * len(mask)
    for i in range(len(offsets) - 1):
        steps = [t for t in range(offsets[i], offsets[i + 1]) if mask[t]]
        nexts = [values[t] for t in steps[1:]] + [0.0]
        deltas = [rewards[t] + gamma * v - values[t] for t, v in zip(steps, nexts, strict=True)] if steps else []
        for k, t in enumerate(steps):
            adv[t] = sum((gamma * lams[i]) ** n * d for n, d in enumerate(deltas[k:]))
            ret[t] = adv[t] + values[t]
    return adv, ret


def reward_to_go(rewards, mask, offsets, gamma):
    out = [0.0] * len(mask)
    for i in range(len(offsets) - 1):
        steps = [t for t in range(offsets[i], offsets[i + 1]) if mask[t]]
        for k, t in enumerate(steps):
            out[t] = sum(gamma**n * rewards[u] for n, u in enumerate(steps[k:]))
    return out


def token_rewards(scores, mask, offsets, kl_of, coef):
    out = [0.0] * len(mask)
    for i, score in enumerate(scores):
        steps = [t for t in range(offsets[i], offsets[i + 1]) if mask[t]]
        if math.isnan(score):
            continue
        for t in steps:
            out[t] = -coef * kl_of[t] + (score if t == steps[-1] else 0.0)
    return out


def whiten(a, mask):
    scored_values = [v for v, m in zip(a, mask, strict=True) if m]
    if len(scored_values) < 2:
        return [0.0] * len(a)
    centre, variance = mean(scored_values), std(scored_values) ** 2
    return [(v - centre) / math.sqrt(variance + 1e-8) if m else 0.0 for v, m in zip(a, mask, strict=True)]


def allowed(tokens, offsets, prompts, groups, scores, minimum):
    """Where the loss may count: pair by pair, by comparing openings."""
    answers = [list(tokens[offsets[i] + prompts[i] : offsets[i + 1]]) for i in range(len(scores))]
    out = [True] * len(tokens)
    for i, a in enumerate(answers):
        longest = 0
        for j, other in enumerate(answers):
            if groups[i] == groups[j] and abs(scores[i] - scores[j]) >= 1e-8:  # NaN compares false
                shared = 0
                while shared < min(len(a), len(other)) and a[shared] == other[shared]:
                    shared += 1
                longest = max(longest, shared)
        if longest >= minimum:
            for t in range(offsets[i] + prompts[i], offsets[i] + prompts[i] + longest):
                out[t] = False
    return out


def weights(counts, aggregation, groups, max_tokens, together=0):
    if together and aggregation == "token_mean":
        them, out = [i for i, c in enumerate(counts) if c], [0.0] * len(counts)
        for part in (them[k:k + together] for k in range(0, len(them), together)):
            for i in part:
                out[i] = len(part) / (len(them) * sum(counts[j] for j in part))
        return out
    n = len([c for c in counts if c])
    prompts = {g for c, g in zip(counts, groups, strict=True) if c}
    out = []
    for c, g in zip(counts, groups, strict=True):
        if not c:
            out.append(0.0)
            continue
        out.append(
            {
                "token_mean": 1 / sum(counts),
                "sequence_mean": 1 / (n * c),
                "sequence_sum": 1 / n,
                "constant": 1 / (n * max_tokens),
                "prompt_mean": 1 / (len(prompts) * sum(d for d, h in zip(counts, groups, strict=True) if h == g)),
            }[aggregation]
        )
    return out
