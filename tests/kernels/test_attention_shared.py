"""A prompt that slots share is read once: the tiles, both kernels (interpreted), and what they read."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_cases import SHARED_CASES, SMALL_BLOCKS, check_shared, shared_inputs
from helpers.tiers import first_cases, nightly
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention import cached, gpu_chip, least_shared, share, shares_prompts
from jaxrl.kernels.attention.cached.shared import WIDTH

os.environ.setdefault("PJRT_NPROC", "8")  # for the interpreter of Mosaic GPU


# -- tiles


def test_tiles_hold_slots_of_one_prompt():
    names = [*"abacaabaa", None, *"aaaa"]
    made = share(names, [ord(n) if n else 0 for n in names])
    tiles = [[slot for slot in row if slot >= 0] for row in made.tiles.tolist()]
    assert tiles == [[3], [1, 6], [0, 2, 4, 5, 7, 8, 10, 11], [12, 13]] + [[]] * 10
    assert made.length.tolist() == [99, 98, 97, 97] + [0] * 10
    assert made.tiles.shape == (14, WIDTH) and all(x.dtype == np.int32 for x in made)
    assert made.row.tolist() == [2, 1, 2, 0, 2, 2, 1, 2, 2, -1, 2, 2, 3, 3]
    assert made.place.tolist() == [0, 0, 1, 0, 2, 3, 1, 4, 5, 0, 6, 7, 0, 1]


def test_tiles_stay_on_their_device():
    made = share(["a", "a", None, "b", "b", "a", "b", "b"], [5, 5, 0, 7, 7, 5, 7, 7], shards=2)
    assert [[slot for slot in row if slot >= 0] for row in made.tiles.tolist()] == [[3], [0, 1], [], [], [0, 2, 3], [1],
                                                                                    [], []]
    assert made.length.tolist() == [7, 5, 0, 0, 7, 5, 0, 0]
    assert made.row.tolist() == [1, 1, -1, 0, 0, 1, 0, 0] and made.place.tolist() == [0, 1, 0, 0, 0, 0, 1, 2]


def test_who_shares():
    assert shares_prompts("tpu") and shares_prompts("gpu") and not any(map(shares_prompts,
                                                                           ("auto", "reference", "blockwise")))
    with pytest.raises(ValueError, match="attention implementation 'blockwize': choose auto, tpu, gpu, cudnn, blockwise, reference, xla"):
        shares_prompts("blockwize")


@pytest.mark.parametrize("name, size, least", [("gpu", 64, 128), ("gpu", 128, 64), ("gpu", 256, 1025), ("tpu", 128, 512)])
def test_from_which_prompt_on_slots_share(name, size, least):
    """A block of the kernel; heads of 256, which Hopper's kernel does not share, ask for more than the cache has."""
    assert least_shared((9, 1024, 2 * size), jnp.bfloat16, 2, name) == least
    if name == "gpu" and size < 256:
        positions, shape = np.full((9, 1), 1000, np.int32), (1, 9, 1024, 2 * size)
        for length, read in ((least - 1, 0), (least, 1)):
            work = cached.gpu.work_of(positions, shape, jnp.bfloat16, window=0, shared=share(["p"] * 9, [length] * 9), heads=4, size=size)
            assert int(work.blocks.max()) == read


# -- the TPU kernel


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(*SMALL_BLOCKS)


TPU_CASES = [*SHARED_CASES[:3], dataclasses.replace(SHARED_CASES[0], size=80, groups=8, heads=8),
             dataclasses.replace(SHARED_CASES[1], dtype="float32")]


@first_cases(1, "case", [
    pytest.param(c, id=str(i), marks=() if i < 2 else pytest.mark.slow if i == 2 else pytest.mark.nightly) for i,
    c in enumerate(TPU_CASES)])
def test_tpu_kernel(case, small_blocks):
    check_shared("tpu", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED_CASES[:2], ids=["fp32", "bf16"])
def test_tpu_kernel_neither_races_nor_reads_what_was_not_written(case, small_blocks):
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    check_shared("tpu", case, interpret=mode)
    assert not interpret_pallas_call.races.races_found


@functools.partial(jax.jit, static_argnums=1)
def tpu_work(positions, shape, tiles=None):
    return cached.tpu.work_of(positions, shape, jnp.bfloat16, window=0, shared=tiles)


def entries(work, call):
    """(slot, whether it is read for a tile, first position) of every block that the TPU kernel reads."""
    words, places = np.asarray(work.words[0]), np.asarray(work.places[0])
    assert (words[int(work.count[0]):] == -1).all()
    return [(int(places[0, call.place(w)]), int(call.piece(w) & 1), int(call.start(w)))
            for w in words[:int(work.count[0])]]


def test_a_prompt_is_read_once_on_tpus():
    """8 slots with a prompt of 1024 tokens in blocks of 512: twice a block for all, then one of each slot."""
    shape, call = (28, 9, 1536, 256), cached.tpu.Call(512, 1536, WIDTH)
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
    assert not any(tile for _, tile, _ in entries(work, cached.tpu.Call(512, shape[2], work.width)))


@pytest.mark.full
def test_layers_with_a_window_read_their_own_copies(small_blocks):
    (q, k, v), positions, names, lengths = shared_inputs(SHARED_CASES[0])
    tiles = share(names, lengths)
    run = jax.jit(lambda tiles: cached.api.cached_attention(q, k, v, positions, 1, implementation="tpu", window=200,
                                                            shared=tiles))
    got, want = (np.asarray(run(t)) for t in (tiles, None))
    assert got.tobytes() == want.tobytes()
    work = cached.api.cached_work_of(positions, k.shape, k.dtype, 4, 64, window=200, implementation="tpu",
                                     shared=tiles)["tpu"]
    assert work.width == 1


# -- the GPU kernel


@pytest.mark.mosaic
@pytest.mark.parametrize("number,part", [(0, 16), (1, 1), (2, 16), (3, 1), nightly(0, 1), nightly(1, 16), nightly(2, 1), nightly(3, 16)])
def test_gpu_kernel(number, part, monkeypatch):
    """Races, uninitialised memory and reads beyond an end looked for; few multiprocessors, or many and tiles in
    parts."""
    from test_attention_gpu import strict

    monkeypatch.setattr(gpu_chip, "MULTIPROCESSORS", 2 if part == 16 else 12)
    monkeypatch.setattr(cached.tuned, "PART", part)
    case = dataclasses.replace(SHARED_CASES[number], dtype="bfloat16")
    check_shared("gpu", case, interpret=strict())


@pytest.mark.mosaic
def test_short_prompts_are_decoded_the_same_without_tiles():
    """So the engine leaves tiles out where no prompt has a block."""
    from test_attention_gpu import strict

    case = dataclasses.replace(SHARED_CASES[0], prompts=((40, 3), (63, 2)), length=144, heads=6, groups=1, size=128, dtype="bfloat16")
    (q, k, v), positions, names, lengths = shared_inputs(case)
    run = jax.jit(lambda tiles: cached.gpu.attention(q, k, v, positions, 1, shared=tiles, interpret=strict(), **case.options))
    busy = positions[:, 0] < case.length
    got, want = (np.asarray(run(tiles))[busy] for tiles in (share(names, lengths), None))
    assert got.tobytes() == want.tobytes() and np.abs(want.astype(np.float32)).max() > 0.1


@pytest.mark.mosaic
@pytest.mark.parametrize("heads, size, softcap", [(12, 128, 0.0), (14, 64, 0.0), (48, 192, 30.0), (96, 128, 0.0)])
def test_gpu_kernel_lowers_for_cuda(heads, size, softcap):
    from test_attention_gpu import lowered

    shape = jax.ShapeDtypeStruct
    q, cache = shape((64, 1, heads, size), jnp.bfloat16), shape((24, 64, 2048, 2 * size), jnp.bfloat16)
    tiles = share([None] * 64, [0] * 64)
    tiles = jax.tree.map(lambda x: shape(x.shape, x.dtype), tiles)

    def call(q, k, v, positions, layer, tiles):
        return cached.gpu.attention(q, k, v, positions, layer, shared=tiles, window=0, softcap=softcap, scale=0.1,
                                    interpret=False)

    arguments = q, cache, cache, shape((64, 1), jnp.int32), shape((), jnp.int32), tiles
    assert lowered(call, *arguments).count("@mosaic_gpu_v2") == 1


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def gpu_work(positions, tiles, heads, length=2048, size=128):
    shape = (28, len(positions), length, 2 * size)
    return cached.gpu.work_of(positions, shape, jnp.bfloat16, window=0, shared=tiles, heads=heads, size=size)


def test_a_prompt_is_read_once_on_gpus():
    """8 slots with a prompt of 1024 tokens, in blocks of 64 keys, up to 8 query heads per group: 15 of its 16 blocks
    once."""
    positions = np.array([[1023 + 60 * i] for i in range(8)] + [[2048]], np.int32)
    tiles = share(["p"] * 8 + [None], [1023] * 9)
    work = gpu_work(positions, tiles, 12)
    assert work.slots[0].tolist() == list(range(8)) and int(work.count[0]) == 1
    assert work.blocks.tolist() == [15] + [0] * 8
    assert work.before.tolist() == [15] * 8 + [0] and work.place[:8].tolist() == list(range(8))
    seen = positions[:8, 0] // 64 + 1
    assert int(work.blocks.sum()) + sum(seen - work.before[:8]) == sum(seen) - 7 * 15
    wide = gpu_work(positions, tiles, 24)  # 12 query heads of a group, padded to 16: 4 slots fill a product
    assert wide.slots[:2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and wide.blocks.tolist()[:3] == [15, 15, 0]
    assert wide.sources[:2].tolist() == [0, 0] and int(wide.count[0]) == 2
    ended = np.where(np.arange(9) > 5, positions[:, 0], 2048)[:, None]
    wide = gpu_work(ended, tiles, 24)
    assert wide.blocks.tolist()[:3] == [0, 15, 0] and wide.sources[1] == 0 and wide.before.tolist() == [0] * 6 + [15,
                                                                                                                  15, 0]


def test_what_gpus_do_not_share():
    positions, tiles = np.full((9, 1), 1100, np.int32), share(["p"] * 9, [1023] * 9)
    assert gpu_work(positions, None, 12) is None and gpu_work(positions, tiles, 8, 2048, 256) is None
    short = gpu_work(positions, share(["p"] * 9, [63] * 9), 12)
    assert int(short.count[0]) == 0 and not short.before.any()
