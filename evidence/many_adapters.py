"""Several adapters in one batch (lora.adapters): what they cost beside one adapter on the same tokens, and that they are separate.

python evidence/many_adapters.py [--rounds N]           (about ten minutes on two cores)

step       The whole update (forward, backward, AdamW) of a model of 4.0 M parameters with rank 8 on every linear map, 16 sequences
           of 128 tokens in fp32: one adapter without lora.adapters, and 1, 2, 4 and 8 of them that share the sequences. Alternating
           rounds; medians, and the median of the ratios of a round.
separate   Three updates of the same in float64: the largest difference, over all numbers, between what an adapter becomes beside others
           and alone. In fp32 too, for the size of rounding: AdamW divides a small gradient by its own size, so that one of nothing
           but rounding moves a number by lr = 1e-3.

Exits with 1 where two adapters take more than 1.1 of one's time, or a difference in float64 is above 1e-11.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import record, table
from flax.traverse_util import flatten_dict

from jaxrl import models, training
from jaxrl.config.load import default_config
from jaxrl.models import adapters
from jaxrl.models.adapters import Adapter, Target, adapter_set
from jaxrl.training.adapter_set import Optimizers, Rule
from jaxrl.types import Trajectories

HF = dict(model_type="qwen2", vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
          num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True)
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SEQUENCES, LENGTH, RANK, COUNTS = 16, 128, 8, (1, 2, 4, 8)
BOUNDS = {"2 adapters beside one": 1.1, "largest difference in float64": 1e-11}


def one() -> Adapter:
    return Adapter(tuple(Target(f"model.layers.{i}.{name}", RANK, 1.0) for i in range(HF["num_hidden_layers"]) for name in LINEAR))


def batch(count: int, only: int = 0) -> Trajectories:
    """Sequences of random tokens, those of `count` adapters (0: without numbers) in turn; `only` those of one of them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, HF["vocab_size"], (SEQUENCES, LENGTH)).astype(np.int32)
    whose = np.arange(SEQUENCES) % max(count, 1) + 1
    tokens, whose = (x[whose == only] if only else x for x in (tokens, whose))
    n, flat = len(tokens), tokens.ravel()
    columns = {"adapter": np.repeat(whose, LENGTH).astype(np.int32)} if count and not only else {}
    return Trajectories(flat, np.arange(n + 1, dtype=np.int64) * LENGTH, np.tile(np.arange(LENGTH) > 0, n), np.zeros(len(flat), np.float32),
                        np.zeros(len(flat), np.int32), np.ones(n, np.int32), np.arange(n), np.zeros(n, np.int32),
                        np.zeros(n, np.uint32), np.zeros(n, np.int8), columns)


class Case:
    """The update of `count` adapters (0: of one, without lora.adapters)."""

    def __init__(self, count: int, only: int = 0, of: int = 0, dtype: str = "float32"):
        self.count, base = count, models.build(HF, compute_dtype=dtype, scan_layers=False)
        adapter = adapter_set.combine_adapters({f"a{k}": one() for k in range(count)}) if count else one()
        self.model = dataclasses.replace(base, adapter=adapter)
        c = default_config().optimizer
        c.lr, c.warmup_steps = 1e-3, 0
        rule = training.make_optimizer(c, 10, {"/".join(e.path): e.axes for e in self.model.entries})
        names = adapter_set.adapter_names(self.model)
        optimizer = Optimizers(self.model, tuple(Rule(name, *rule, 1.0) for name in names)) if names else rule[0]
        drawn = flatten_dict(jax.jit(self.model.init)(jax.random.key(0)), sep="/")
        params = {n: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in drawn.items()}
        own = adapters.trains(self.model)
        start = training.adapter_set.init_state if names else training.init_state
        self.state = start({n: x for n, x in params.items() if n in own}, {n: x for n, x in params.items() if n not in own}, optimizer)
        self.update = training.make_update(self.model, optimizer, rule[1], training.NextToken(chunk=512))
        traj = batch(of if only else count, only)
        layout = training.make_layout(traj.sizes, training.row_shapes((LENGTH,), LENGTH, SEQUENCES * LENGTH, 1), share_prompts=False)
        weights = training.loss_weights(traj, np.arange(traj.num_sequences), "token_mean")
        self.micros = [jax.tree.map(jnp.asarray, training.pack(traj, m, {}, weights, np.dtype(dtype))) for m in layout.minibatches[0].microbatches]

    def step(self) -> float:
        began = time.perf_counter()
        self.state, metrics = self.update(self.state, iter(self.micros))
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - began


def step_times(rounds: int) -> list[dict]:
    cases = {count: Case(count) for count in (0, *COUNTS)}
    for case in cases.values():
        case.step()
    seconds = {count: [] for count in cases}
    for i in range(rounds):
        order = list(cases) if i % 2 else list(reversed(cases))
        for count in order:
            seconds[count].append(cases[count].step())
    found = {count: np.array(s) for count, s in seconds.items()}
    return [{"adapters": count or "one, without lora.adapters", "columns": max(count, 1) * RANK, "median_s": float(np.median(s)),
             "beside_one": float(np.median(s / found[0]))} for count, s in found.items()]


def separate(dtype: str) -> float:
    """Of two adapters after three updates, beside each other and alone on their own sequences."""
    both, worst = Case(2, dtype=dtype), 0.0
    alone = [Case(0, only=k, of=2, dtype=dtype) for k in (1, 2)]
    for case in (both, *alone):
        for _ in range(3):
            case.step()
    for k, case in enumerate(alone):
        own = adapter_set.take_leaves(both.model, k, both.state.trainable)
        worst = max(worst, *(float(jnp.abs(own[name] - x).max()) for name, x in case.state.trainable.items()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    rows, rounded = step_times(given.rounds), separate("float32")
    with jax.enable_x64(True):
        worst = separate("float64")
    table(["adapters", "columns", "seconds of an update", "beside one"],
          [[r["adapters"], r["columns"], f"{r['median_s']:.3f}", f"{r['beside_one']:.3f}"] for r in rows])
    print(f"largest difference between beside others and alone: {worst:.1e} in float64, {rounded:.1e} in fp32")
    two = next(r["beside_one"] for r in rows if r["adapters"] == 2)
    record("many_adapters", {"rounds": given.rounds, "load_before": load, "step": rows,
                             "largest_difference_float64": worst, "largest_difference_fp32": rounded, "bounds": BOUNDS})
    sys.exit(int(two > BOUNDS["2 adapters beside one"] or worst > BOUNDS["largest difference in float64"]))


if __name__ == "__main__":
    main()
