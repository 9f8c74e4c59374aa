"""Claims about advantages, tested on batches whose groups and completions are changed. Called by certify.run."""

from __future__ import annotations

import numpy as np

from jaxrl.certify.cases import SMALLEST, Case, batch, orders, select_completions
from jaxrl.certify.claims import Broken, NotApplicable
from jaxrl.certify.loss import Loss

EXACT = 1e-9


def differs(a, b) -> bool:
    """Returns whether two float arrays differ anywhere by more than EXACT + EXACT |b|; NaN differs from NaN."""
    return not np.allclose(a, b, rtol=EXACT, atol=EXACT)


def each(case: Case, tokens) -> list[float]:
    """Returns the advantage of the first sampled token of each completion, rounded to 6 digits. tokens: [T] float."""
    return [round(float(tokens[at[0]]), 6) for at in case.traj.sampled()]


def groups(loss: Loss, own: bool) -> str:
    """Tests the claim `groups`: advantages of a group do not depend on other groups. Returns what was tried.

    own: the estimator is a user's function, which does not use advantage_mean and advantage_std.
    Raises Broken or NotApplicable.
    """
    o = loss.options
    whole = [f"algorithm.{n}={o[n]}" for n in ("advantage_mean", "advantage_std") if o[n] == "batch"]
    if whole and not own:
        raise NotApplicable(f"{', '.join(whole)} takes statistics of the whole batch")
    if o.advantage == "dpo":
        raise NotApplicable("algorithm.advantage=dpo is a mean over the pairs of a step, whose number others decide")
    bare = loss.with_options({"whiten": False})
    for lengths in SMALLEST[3:]:
        case = batch(lengths, vocab=16, turns=loss.turns)
        base, last = bare.advantage(bare.options, case), len(lengths) - 1
        for group, other in ((0, last), (last, 0)):
            mine = case.traj.group == group
            for how, changed, where in elsewhere(case, mine, np.flatnonzero(case.traj.group == other)):
                found, tokens = bare.advantage(bare.options, changed), case.traj.spread(mine)[where]
                if differs(found[tokens], base[where][tokens]):
                    raise Broken(f"with {how}, the advantages of group {group} are other ones",
                                 {**case.summary(), "group": group, "how": how, "scores then": changed.scores.tolist(),
                                  "advantages": each(case, base), "advantages then": each(changed, found)})
    return "with other scores, absent scores and fewer answers elsewhere" + ", before whitening" * o.whiten


def elsewhere(case: Case, mine, others):
    """Yields (how, batch, former indices of its tokens) for changes outside the completions `mine` ([N] bool).

    others: numbers of the completions of another group.
    """
    every, all_tokens = np.arange(len(mine)), np.arange(len(case.traj.tokens))
    scores = np.where(mine, case.scores, 1.0 - 3.0 * case.scores)
    yield "other scores in the other groups", case._replace(scores=scores), all_tokens
    absent = np.where(every == others[0], np.nan, case.scores)
    yield "an answer of another group that has no score", case._replace(scores=absent), all_tokens
    yield "an answer less in another group", *select_completions(case, [i for i in every if i != others[-1]])


def order(loss: Loss) -> str:
    """Tests the claim `order`: the order of completions does not change advantages by more than EXACT. Raises Broken.
    """
    for lengths in SMALLEST[1:]:
        case = batch(lengths, vocab=16, turns=loss.turns)
        base = loss.advantage(loss.options, case)
        for how, ranks in orders(case.traj).items():
            changed, where = select_completions(case, ranks)
            found = loss.advantage(loss.options, changed)
            if differs(found, base[where]):
                raise Broken(f"with {how}, an answer has another advantage",
                             {**case.summary(), "how": how, "advantages": each(case, base),
                              "the same answers' advantages then": each(changed, found)})
    return "advantages"


def repeat(loss: Loss) -> str:
    """Tests the claim `repeat`: the same scores give the same advantages twice, to the bit. Raises Broken."""
    case = batch(SMALLEST[-2], vocab=16, turns=loss.turns)
    first, second = (loss.advantage(loss.options, case) for _ in range(2))
    if not np.array_equal(first, second):
        raise Broken("the same scores have other advantages the second time",
                     {**case.summary(), "advantages": each(case, first), "the second time": each(case, second)})
    return "advantages"
