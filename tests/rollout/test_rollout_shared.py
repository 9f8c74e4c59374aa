"""The embedded sampler where prompts that slots share are read once: its tiles, and the TPU kernel (interpreted) in it."""

import collections
import os
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import SMALL_BLOCKS
from helpers.rollout_helpers import END, config, prompt, random_params

from jaxrl import models
from jaxrl.kernels.attention.cached.shared import WIDTH
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate, make_engine

TIMEOUT = 300.0


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(*SMALL_BLOCKS)


HF = dict(model_type="qwen2", vocab_size=64, hidden_size=128, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
          num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=256, rms_norm_eps=1e-6,
          rope_theta=10000.0, hidden_act="silu")


def made(attention, mesh=None, head_dim=64, **rollout):
    model = models.build({**HF, "head_dim": head_dim}, compute_dtype=jnp.float32, scan_layers=False, attention=attention)
    cfg = config(**{"slots": 8, "prompt_lengths": (160,), "max_new_tokens": 12, "cache_lengths": (176,), **rollout})
    cfg.data.max_prompt_tokens = 160
    engine = make_engine(EngineContext(cfg, model, None, mesh, (END,)))
    engine.publish(weights_of(model), 0)
    return engine


def weights_of(model, seed=0):
    tree = random_params(model, seed, 0.15)
    tree["head"]["kernel"] = tree["head"]["kernel"] * 3.0
    return tree


def groups(sizes=(5, 4, 3, 2, 1), name="r"):
    """Requests: groups of several sizes, with prompts on both sides of a block of 128, and answers of unequal length."""
    lengths = [150, 20, 129, 128, 140]
    asked = [(prompt(i, lengths[i]), 1 + (5 * i + 3 * j) % 12) for i, size in enumerate(sizes) for j in range(size)]
    return [Request(f"{name}{i}", tokens, SamplingParams(max_new_tokens=n, min_new_tokens=n), seed=i)
            for i, (tokens, n) in enumerate(asked)]


def watched(engine, monkeypatch):
    """Holds the tiles of every chunk to what runs in the engine's slots; a list of [(rows, how many tiles hold how many)]."""
    decode, seen = engine._programs.decode, []

    def spy(*args):
        rows, shared = args[6], args[8]
        running = {column: engine._running[slot] for column, slot in enumerate(rows.tolist()) if slot in engine._running}
        tiles = [[c for c in row if c >= 0] for row in shared.tiles.tolist()]
        assert sorted(c for tile in tiles for c in tile) == sorted(running)
        for tile, length in zip(tiles, shared.length.tolist(), strict=True):
            same = {(running[c].request.prompt.tobytes(), running[c].weights) for c in tile}
            assert len(same) == (1 if tile else 0)
            assert length == (len(running[tile[0]].request.prompt) - 1 if tile else 0)
        by_prompt = collections.Counter((s.key, s.weights) for s in running.values())
        assert sum(map(bool, tiles)) == sum(-(-n // WIDTH) for n in by_prompt.values())
        seen.append((len(rows), sorted(by_prompt.values())))
        return decode(*args)

    monkeypatch.setattr(engine._programs, "decode", spy)
    return seen


@pytest.mark.slow
def test_tiles_of_the_engine(monkeypatch):
    """Groups, refill, compaction, new weights under way; the tiles go to XLA's programs, which have no use for them."""
    engine = made("auto")
    assert engine._programs.shared(["p"] * 8, [100] * 8) is None
    monkeypatch.setattr(engine._programs, "shares", True)
    seen = watched(engine, monkeypatch)
    generate(engine, groups(), TIMEOUT)
    assert {rows for rows, _ in seen} == {4, 8} and max(len(sizes) for _, sizes in seen) > 2 and (8, [3, 5]) in seen
    seen.clear()
    first = groups((3,), "first")
    engine.submit(first)
    engine.poll(0.0)
    engine.publish(weights_of(engine._programs.model, 1), 0)
    engine.submit(groups((3,), "second"))
    while engine.health().running + engine.health().waiting:
        engine.poll(0.0)
    assert any(sizes == [1, 3] for _, sizes in seen)  # the same prompt under other weights is not the same


@pytest.mark.slow
def test_engine_through_the_kernel_as_through_xla(small_blocks, monkeypatch):
    """The TPU kernel, interpreted, with groups, refill and compaction."""
    engine = made("tpu")
    seen = watched(engine, monkeypatch)
    got, want = generate(engine, groups(), TIMEOUT), generate(made("auto", compaction=False), groups(), TIMEOUT)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert {rows for rows, _ in seen} == {4, 8} and (8, [3, 5]) in seen


@pytest.mark.nightly
def test_samples_do_not_depend_on_neighbours(small_blocks):
    engine, asked = made("tpu", compaction=False), groups()
    first = {r.id: r for r in generate(engine, asked, TIMEOUT)}
    others = groups((4, 4, 4, 1, 1), "other")
    for again in (asked[::-1], asked[2:3], [r for pair in zip(others, asked, strict=False) for r in pair]):
        for r in generate(engine, again, TIMEOUT):
            if r.id in first:
                assert r.tokens.tobytes() == first[r.id].tokens.tobytes()
                assert r.logprobs.tobytes() == first[r.id].logprobs.tobytes()


SHARDED = """
    import jax, numpy as np
    jax.config.update("jax_default_matmul_precision", "highest")
    from helpers.attention_cases import SMALL_BLOCKS
    from helpers.rollout_helpers import config
    from test_rollout_shared import groups, made
    from jaxrl.rollout import generate
    from jaxrl.sharding import make_mesh
    setattr(*SMALL_BLOCKS)
    cfg = config()
    cfg.mesh.update({"dp": 2, "fsdp": 1, "tp": 2})
    engines = [made(attention, make_mesh(cfg.mesh), 128, compaction=False) for attention in ("tpu", "auto")]
    decode, most = engines[0]._programs.decode, []
    def spy(*args):
        most.append((args[8].tiles >= 0).sum(axis=1).max())
        return decode(*args)
    engines[0]._programs.decode = spy
    got, want = (generate(engine, groups(), 300) for engine in engines)
    same = all((a.tokens == b.tokens).all() for a, b in zip(got, want, strict=True))
    gap = max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(got, want, strict=True))
    print("RESULT", int(same), gap, max(most))
"""


@pytest.mark.slow
def test_slots_over_data_axes_and_heads_over_tp():
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu",
           "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(SHARDED)], env=env, capture_output=True, text=True, timeout=500)
    assert out.returncode == 0, out.stderr[-3000:]
    same, gap, most = map(float, out.stdout.split("RESULT")[1].split())
    assert same and gap < 1e-4 and most >= 3
