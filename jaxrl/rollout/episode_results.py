"""Results of episodes: the results of all turns as one, and the turns of one again.

rollout.episodes calls it, at the end of an episode and where a checkpoint keeps or restores an unfinished one. Needs
only numpy.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxrl.rollout.protocol import Outcome, Request, Result


def join_results(request: Request, parts: list[Result], turns, finish: str, outcome: Outcome | None = None) -> Result:
    """Returns the Result of an episode: the arrays of its turns one after the other, with the request's id and seed.

    Args:
      request: of the episode.
      parts: Result of each turn; [] gives empty arrays. turns: Turn of each.
      finish, outcome: of the episode.

    `support` is None if no turn has one, `routes` if one lacks them; they cover what each turn added and
    sampled."""
    blank = {"tokens": np.int32, "logprobs": np.float32, "log_kept_mass": np.float32, "versions": np.int32}
    columns = {name: np.concatenate([np.zeros(0, dtype), *(getattr(p, name) for p in parts)]).astype(dtype)
               for name, dtype in blank.items()}
    support = [p.support for p in parts if p.support is not None]
    return Result(request.id, **columns, finish=finish, seed=request.seed,
                  support=np.concatenate(support) if support else None, routes=_joined_routes(parts, turns),
                  turns=tuple(turns), outcome=outcome)


def _joined_routes(parts: list[Result], turns) -> np.ndarray | None:
    """Joins the turns' experts; those of a turn's last token come from the next turn, whose prompt contains it."""
    routes = [p.routes for p in parts if p.routes is not None]
    if not parts or len(routes) < len(parts):
        return None
    out = []
    for turn, of_part in zip(turns, routes, strict=True):
        own = len(turn.added) + turn.size
        out.append(of_part[len(of_part) - own:].copy())
        if len(out) > 1 and not turn.opens and len(of_part) > own and (out[-2][-1] < 0).all():
            out[-2][-1] = of_part[-own - 1]
    return np.concatenate(out)


def recorded_turns(result: Result | None) -> deque:
    """Returns [(Turn, its part of the result)] of an episode's Result, finished or not, to replay it: the inverse of
    `join_results`, without what a turn's routes have of earlier turns. None: []."""
    record, at, routed = deque(), 0, 0
    if result is None:
        return record
    for turn in result.turns:
        part = slice(at, at + turn.size)
        support = None if result.support is None else result.support[part]
        own = len(turn.added) + turn.size
        routes = None if result.routes is None else result.routes[routed:routed + own]
        record.append((turn, Result(result.id, result.tokens[part], result.logprobs[part], result.log_kept_mass[part],
                                    result.versions[part], turn.finish, result.seed, support, routes)))
        at, routed = at + turn.size, routed + own
    return record
