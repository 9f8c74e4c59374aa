"""A prompt that slots share is read once: the tiles, both kernels (interpreted), what they read, and the engine that uses them."""

import collections
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import SHARED_CASES, check_shared, shared_inputs
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from rollout_helpers import END, config, prompt, random_params

from jaxrl import models
from jaxrl.kernels.attention import api, decode_gpu, decode_tpu, share, shares_prompts, tuned, tuned_gpu
from jaxrl.kernels.attention.shared import WIDTH
from jaxrl.rollout import Request, SamplingParams, generate, make_engine

os.environ.setdefault("PJRT_NPROC", "8")  # for the interpreter of Mosaic GPU
TIMEOUT = 300.0


# -- tiles


def test_tiles_hold_slots_of_one_prompt():
    names = [*"abacaabaa", None, *"aaaa"]
    made = share(names, [ord(n) if n else 0 for n in names])
    tiles = [[slot for slot in row if slot >= 0] for row in made.tiles.tolist()]
    assert tiles == [[3], [1, 6], [0, 2, 4, 5, 7, 8, 10, 11], [12, 13]] + [[]] * 10
    assert made.length.tolist() == [99, 98, 97, 97] + [0] * 10
    assert made.tiles.shape == (14, WIDTH) and made.tiles.dtype == made.length.dtype == np.int32


def test_tiles_stay_on_their_device():
    made = share(["a", "a", None, "b", "b", "a", "b", "b"], [5, 5, 0, 7, 7, 5, 7, 7], shards=2)
    assert [[slot for slot in row if slot >= 0] for row in made.tiles.tolist()] == [[3], [0, 1], [], [], [0, 2, 3], [1], [], []]
    assert made.length.tolist() == [7, 5, 0, 0, 7, 5, 0, 0]


def test_who_shares():
    assert shares_prompts("tpu") and shares_prompts("gpu") and not any(map(shares_prompts, ("auto", "reference", "blockwise")))


# -- the TPU kernel


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tuned, "CACHE_BYTES", 1)  # 128 positions at a time


def once_on_tpus(length):
    return length // decode_tpu.ALIGNED * decode_tpu.ALIGNED if length >= 128 else 0


TPU_CASES = [*SHARED_CASES[:3], dataclasses.replace(SHARED_CASES[0], size=80, groups=8, heads=8),
             dataclasses.replace(SHARED_CASES[1], dtype="float32")]


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if i < 2 else pytest.mark.slow) for i, c in enumerate(TPU_CASES)], ids=str)
def test_tpu_kernel(case, small_blocks):
    check_shared(decode_tpu.attention, case, once_on_tpus)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED_CASES[:2], ids=str)
def test_tpu_kernel_neither_races_nor_reads_what_was_not_written(case, small_blocks):
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    check_shared(functools.partial(decode_tpu.attention, interpret=mode), case, once_on_tpus)
    assert not interpret_pallas_call.races.races_found


@functools.partial(jax.jit, static_argnums=1)
def tpu_work(positions, shape, tiles=None):
    return decode_tpu.work_of(positions, shape, jnp.bfloat16, window=0, shared=tiles)


def entries(work, call):
    """(slot, whether it is read for a tile, first position) of every block that the TPU kernel reads."""
    words, places = np.asarray(work.words[0]), np.asarray(work.places[0])
    assert (words[int(work.count[0]):] == -1).all()
    return [(int(places[0, call.place(w)]), int(call.piece(w) & 1), int(call.start(w))) for w in words[:int(work.count[0])]]


def test_a_prompt_is_read_once_on_tpus():
    """8 slots with a prompt of 1024 tokens in blocks of 512: twice a block for all, then one of each slot."""
    shape, call = (28, 9, 1536, 256), decode_tpu.Call(512, 1536, WIDTH)
    positions = np.array([[1023 + 60 * i] for i in range(8)] + [[1536]], np.int32)
    tiles = share(["p"] * 8 + [None], [1023] * 9)
    work = tpu_work(positions, shape, tiles)
    assert entries(work, call) == [(0, 1, 0), (0, 1, 512), *((slot, 0, 1008) for slot in range(8)), (8, 0, 0)]
    alone = tpu_work(positions, shape)
    assert int(alone.count[0]) == 8 * 3 + 1 - 1  # the first slot is at the end of its second block
    ended = np.where(np.arange(9) == 5, positions[:, 0], 1536)[:, None]
    assert [e for e in entries(tpu_work(ended, shape, tiles), call) if e[1]] == [
        (0, 1, 0), (0, 1, 512)]
    nobody = tpu_work(np.full((9, 1), 1536), shape, tiles)
    assert entries(nobody, call) == [(slot, 0, 0) for slot in range(9)]


@pytest.mark.parametrize("shape, length", [((1, 9, 1536, 256), 511), ((1, 9, 1000, 256), 700), ((1, 9, 512, 256), 511)])
def test_nothing_is_shared_below_a_block_or_out_of_line(shape, length):
    positions = np.full((9, 1), length, np.int32)
    tiles = share(["p"] * 9, [length] * 9)
    work, alone = (tpu_work(positions, shape, t) for t in (tiles, None))
    assert int(work.count[0]) == int(alone.count[0])
    assert not any(tile for _, tile, _ in entries(work, decode_tpu.Call(512, shape[2], work.width)))


def test_layers_with_a_window_read_their_own_copies(small_blocks):
    (q, k, v), positions, names, lengths = shared_inputs(SHARED_CASES[0])
    tiles, run = share(names, lengths), functools.partial(api.cached_attention, implementation="tpu", window=200)
    got, want = (np.asarray(run(q, k, v, positions, 1, shared=t)) for t in (tiles, None))
    assert got.tobytes() == want.tobytes()
    work = api.cached_work_of(positions, k.shape, k.dtype, 4, 64, window=200, implementation="tpu", shared=tiles)["tpu"]
    assert work.width == 1


# -- the GPU kernel


def once_on_gpus(size):
    keys = tuned_gpu.sizes(tuned_gpu.DECODE, size).keys
    return lambda length: length // keys * keys


@pytest.mark.mosaic
@pytest.mark.parametrize("case", [dataclasses.replace(c, dtype="bfloat16") for c in SHARED_CASES], ids=str)
@pytest.mark.parametrize("part", [16, 1])
def test_gpu_kernel(case, part, monkeypatch):
    """Races, uninitialised memory and reads beyond an end looked for; few multiprocessors, or many and tiles in parts."""
    from test_attention_gpu import strict

    from jaxrl.kernels.attention import decode_gpu_kernel

    for module in (tuned_gpu, decode_gpu_kernel):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 2 if part == 16 else 12)
        monkeypatch.setattr(module, "PART", part)
    check_shared(functools.partial(decode_gpu.attention, interpret=strict()), case, once_on_gpus(case.size))


@pytest.mark.mosaic
@pytest.mark.parametrize("heads, size, softcap", [(12, 128, 0.0), (14, 64, 0.0), (48, 192, 30.0), (96, 128, 0.0)])
def test_gpu_kernel_lowers_for_cuda(heads, size, softcap):
    from test_attention_gpu import lowered

    shape = jax.ShapeDtypeStruct
    q, cache = shape((64, 1, heads, size), jnp.bfloat16), shape((24, 64, 2048, 2 * size), jnp.bfloat16)
    tiles = share([None] * 64, [0] * 64)
    tiles = jax.tree.map(lambda x: shape(x.shape, x.dtype), tiles)

    def call(q, k, v, positions, layer, tiles):
        return decode_gpu.attention(q, k, v, positions, layer, shared=tiles, window=0, softcap=softcap, scale=0.1, interpret=False)

    arguments = q, cache, cache, shape((64, 1), jnp.int32), shape((), jnp.int32), tiles
    assert lowered(call, *arguments).count("@mosaic_gpu_v2") == 1


def gpu_work(positions, tiles, heads, length=2048, size=128):
    return decode_gpu.work_of(positions, (28, len(positions), length, 2 * size), jnp.bfloat16, window=0, shared=tiles, heads=heads,
                              size=size)


def test_a_prompt_is_read_once_on_gpus():
    """8 slots with a prompt of 1024 tokens, in blocks of 64 keys, up to 8 query heads per group: 15 of its 16 blocks once."""
    positions = np.array([[1023 + 60 * i] for i in range(8)] + [[2048]], np.int32)
    tiles = share(["p"] * 8 + [None], [1023] * 9)
    work = gpu_work(positions, tiles, heads=12)
    assert work.slots[0].tolist() == list(range(8)) and work.blocks.tolist() == [15] + [0] * 8 and int(work.count[0]) == 1
    assert work.before.tolist() == [15] * 8 + [0] and work.place[:8].tolist() == list(range(8))
    seen = positions[:8, 0] // 64 + 1
    assert int(work.blocks.sum()) + sum(seen - work.before[:8]) == sum(seen) - 7 * 15
    wide = gpu_work(positions, tiles, heads=24)  # 12 query heads of a group, padded to 16: 4 slots fill a product
    assert wide.slots[:2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and wide.blocks.tolist()[:3] == [15, 15, 0]
    assert wide.sources[:2].tolist() == [0, 0] and int(wide.count[0]) == 2
    ended = np.where(np.arange(9) > 5, positions[:, 0], 2048)[:, None]
    wide = gpu_work(ended, tiles, heads=24)
    assert wide.blocks.tolist()[:3] == [0, 15, 0] and wide.sources[1] == 0 and wide.before.tolist() == [0] * 6 + [15, 15, 0]


def test_what_gpus_do_not_share():
    positions, tiles = np.full((9, 1), 1100, np.int32), share(["p"] * 9, [1023] * 9)
    assert gpu_work(positions, None, 12) is None and gpu_work(positions, tiles, 8, size=256) is None
    short = gpu_work(positions, share(["p"] * 9, [63] * 9), 12)
    assert int(short.count[0]) == 0 and not short.before.any()


# -- the engine


HF = dict(model_type="qwen2", vocab_size=64, hidden_size=128, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
          num_key_value_heads=2, head_dim=64, tie_word_embeddings=False, max_position_embeddings=256, rms_norm_eps=1e-6,
          rope_theta=10000.0, hidden_act="silu")


def made(attention, weights=True, **rollout):
    model = models.build(HF, compute_dtype=jnp.float32, scan_layers=False, attention=attention)
    cfg = config(**{"slots": 8, "prompt_lengths": (160,), "max_new_tokens": 12, "cache_lengths": (176,), **rollout})
    cfg.data.max_prompt_tokens = 160
    engine = make_engine(cfg, model, None, None, (END,))
    if weights:
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


def test_engine_with_groups_refill_and_compaction(small_blocks, monkeypatch):
    """Through the interpreted kernel as through XLA; tiles hold what runs."""
    engine = made("tpu")
    seen = watched(engine, monkeypatch)
    got = generate(engine, groups(), TIMEOUT)
    want = generate(made("auto", compaction=False), groups(), TIMEOUT)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert {rows for rows, _ in seen} == {4, 8} and max(len(sizes) for _, sizes in seen) > 2 and (8, [3, 5]) in seen
    seen.clear()
    first = groups((3,), "first")
    engine.submit(first)
    engine.poll(0.0)
    engine.publish(weights_of(engine._programs.model, 1), 0)
    engine.submit(groups((3,), "second"))
    while engine.health()["running"] + engine.health()["waiting"]:
        engine.poll(0.0)
    assert any(sizes == [1, 3] for _, sizes in seen)  # the same prompt under other weights is not the same


@pytest.mark.slow
def test_samples_do_not_depend_on_neighbours(small_blocks):
    engine, asked = made("tpu", compaction=False), groups()
    first = {r.id: r for r in generate(engine, asked, TIMEOUT)}
    others = groups((4, 4, 4, 1, 1), "other")
    for again in (asked[::-1], asked[2:3], [r for pair in zip(others, asked, strict=False) for r in pair]):
        for r in generate(engine, again, TIMEOUT):
            if r.id in first:
                assert r.tokens.tobytes() == first[r.id].tokens.tobytes()
                assert r.logprobs.tobytes() == first[r.id].logprobs.tobytes()
