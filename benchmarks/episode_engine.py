"""The parts of benchmarks/environments.py that have an engine: how long it stands idle behind slow environments, and what many
long episodes hold in memory. Run it through environments.py."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CODE = '''
import asyncio, random

async def lognormal(task, chat):
    """Eight turns, behind each a step of log-normal length: {mean} s in the mean, sigma 1."""
    numbers = random.Random(task.seed)
    await chat.send(task.prompt)
    for _ in range(7):
        await asyncio.sleep(numbers.lognormvariate({mu}, 1.0))
        await chat.send("go on")
    return 1.0

async def long(task, chat):
    await chat.send(task.prompt)
    for _ in range({turns} - 1):
        await chat.send("x" * {size})
    return 1.0
'''
MODEL = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536, "tie_word_embeddings": True}


def opened(folder: str, code: str, function: str, engine, **options):
    """(EpisodeEngine, its requests' maker) of the code's function. engine: (spec, tokenizer) -> the engine within."""
    import numpy as np
    from helpers.turn_cases import FAMILIES, make_tokenizer

    from jaxrl.config.load import default_config
    from jaxrl.data.turns import TurnRenderer
    from jaxrl.envs.pool import EpisodePool
    from jaxrl.resolve.spec import resolve
    from jaxrl.rollout import Key, Request, SamplingParams
    from jaxrl.rollout.episodes import EpisodeEngine

    (Path(folder) / "world.py").write_text(code)
    c, speaks = default_config(), make_tokenizer(*FAMILIES["hermes"][:3])
    c.model.init, c.model.config, c.model.tokenizer, c.rollout.engine = "random", MODEL, "a/tokenizer", "jax"
    c.train.compute_dtype = c.rollout.dtype = "fp32"
    c.data.max_prompt_tokens, c.env.function = 64, f"{folder}/world.py:{function}"
    for name, value in options.items():
        group, _, leaf = name.partition("__")
        c[group][leaf] = value
    c = resolve(c)
    pool = EpisodePool(c.env)
    pool.ready()
    made = EpisodeEngine(engine(c, speaks), pool, TurnRenderer(c, speaks, ()), c.env, longest=c.longest, seed=0)

    def requests(count):
        ids = np.array(speaks("a question\n")["input_ids"], np.int32)
        task = SimpleNamespace(prompt="a question", answer="", columns={})
        keys = [Key("train", 0, k, 0) for k in range(count)]
        how = SamplingParams(max_new_tokens=c.rollout.max_new_tokens, min_new_tokens=c.rollout.max_new_tokens)
        return [Request(str(k), ids, how, k.seed(0), k.prompt, k, task) for k in keys]

    return made, requests


def lognormal(workers: int, in_flight: int, seconds: float, mean: float = 0.5) -> dict:
    """Share of the time in which the embedded sampler had nothing to do, with so many episodes under way."""
    import math

    import jax
    import jax.numpy as jnp

    from jaxrl import models
    from jaxrl.rollout import EngineContext, make_engine

    model = models.build(MODEL, compute_dtype=jnp.float32, scan_layers=False)

    def engine(c, speaks):
        made = make_engine(EngineContext(c, model, speaks, None, (speaks.eos_token_id,), MODEL))
        made.busy, inner = 0.0, made.poll

        def poll(deadline):
            began = time.perf_counter()
            out = inner(deadline)
            made.busy += time.perf_counter() - began
            return out

        made.poll = poll
        return made

    with tempfile.TemporaryDirectory() as folder:
        code = CODE.format(mean=mean, mu=math.log(mean) - 0.5, turns=1, size=1)
        slots = 32
        episodes, requests = opened(folder, code, "lognormal", engine, env__workers=workers, env__in_flight=in_flight,
                                    env__max_turns=8, env__max_observation_tokens=32, rollout__max_new_tokens=48,
                                    rollout__slots=slots, rollout__compaction=True)
        episodes.publish(jax.jit(model.init)(jax.random.key(0)), 0)
        total, done = requests(8 * in_flight), 0
        episodes.submit(total)
        while done < in_flight // 2:  # compiled, and every stage of an episode is there
            done += len(episodes.poll(1.0))
        within = episodes.engine
        busy, began, turns = within.busy, time.perf_counter(), within.counters()["requests"]
        while (passed := time.perf_counter() - began) < seconds and done < len(total) - in_flight:
            done += len(episodes.poll(0.25))
        out = {"env": "lognormal", "step_seconds_mean": mean, "workers": workers, "in_flight": in_flight, "slots": slots,
               "seconds": round(passed, 1), "turns_per_second": round((within.counters()["requests"] - turns) / passed, 1),
               "engine_idle_share": round(1 - (within.busy - busy) / passed, 3)}
        episodes.abort()
        episodes.close()
    return out


def memory(workers: int, count: int = 512, turns: int = 32, size: int = 512) -> dict:
    """Peak memory of the trainer's process with `count` episodes of turns x 2 x size tokens, up to their trajectories."""
    import numpy as np

    from jaxrl.rl.trajectories import collect
    from jaxrl.rollout import Engine, Health, Result

    class Instant(Engine):
        """Answers every turn with as many random tokens as it may have, at once."""

        waiting = []

        def submit(self, requests):
            self.waiting = self.waiting + list(requests)

        def poll(self, deadline_s):
            now, self.waiting = self.waiting, []
            out = []
            for r in now:
                n = r.sampling.max_new_tokens
                ids = np.random.default_rng(r.seed).integers(0, 250, n).astype(np.int32)
                zeros = np.zeros(n, np.float32)
                out.append(Result(r.id, ids, zeros, zeros, np.zeros(n, np.int32), "stop", r.seed))
            return out

        def abort(self, ids=None):
            self.waiting = []

        def publish(self, params, version):
            pass

        def health(self):
            return Health(True, version=0)

        def close(self):
            pass

    with tempfile.TemporaryDirectory() as folder:
        episodes, requests = opened(folder, CODE.format(mean=1, mu=0, turns=turns, size=size), "long", lambda *_: Instant(),
                                    env__workers=workers, env__max_turns=turns, env__max_observation_tokens=size,
                                    rollout__max_new_tokens=size)
        episodes.publish(None, 0)
        asked, began = requests(count), time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        episodes.submit(asked)
        results = []
        while len(results) < count:
            results += episodes.poll(1.0)
        by = {r.id: r for r in results}
        traj = collect(asked, [by[q.id] for q in asked])
        passed = time.perf_counter() - began
        out = {"env": "memory", "episodes": count, "tokens": len(traj.tokens), "tokens_an_episode": len(traj.tokens) // count,
               "trainer_mib_before": round(before),
               "trainer_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
               "trajectories_mib": round(sum(a.nbytes for a in (traj.tokens, traj.loss_mask, traj.logprobs, traj.versions,
                                                                *traj.columns.values())) / 2**20), "seconds": round(passed, 1)}
        episodes.close()
    return out
