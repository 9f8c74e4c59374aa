"""Parts that decode and nothing else: the embedded sampler's rollouts of a case, under flags of XLA that a part's environment sets."""

from __future__ import annotations

import os
import statistics
import time

from gpu.cases import CASES, PROMPT
from gpu.training import peak, read_of, report_decoding, resolved

ROLLOUTS = 4  # the first one compiles
SECONDS = 600.0


def run(report, name: str) -> None:
    """Completions of the case's length, all at once, with random weights; no token ends one."""
    import jax

    from jaxrl.rollout import EngineContext, generate, make_engine
    from jaxrl.sharding import make_mesh

    with report.stage("decoding"):
        spec, model = resolved(name)
        engine = make_engine(EngineContext(spec, model, None, make_mesh(spec.mesh)))
        engine.publish(jax.jit(lambda: model.init(jax.random.key(0)))(), 0)
        read, seconds = read_of(name), []
        for number in range(ROLLOUTS):
            started = time.monotonic()
            done = generate(engine, requests(name, number), SECONDS)
            seconds.append(time.monotonic() - started)
            assert all(len(result.tokens) == CASES[name].answer for result in done)
            if number == 0:
                report("first rollout", seconds=seconds[0], xla_flags=os.environ.get("XLA_FLAGS", ""), **peak())
            else:
                report_decoding(report, name, statistics.median(seconds[1:]), *read)


def requests(name: str, number: int) -> list:
    """The requests of one rollout: prompts of PROMPT tokens, each as often as the group is large."""
    import numpy as np

    from jaxrl.rollout import Request, SamplingParams

    case = CASES[name]
    prompts = np.random.default_rng(number).integers(3, 200, (case.prompts, PROMPT)).astype(np.int32)
    sampling = SamplingParams(max_new_tokens=case.answer)
    return [Request(f"{number}-{p}-{g}", prompts[p], sampling, seed=p * case.group + g)
            for p in range(case.prompts) for g in range(case.group)]
