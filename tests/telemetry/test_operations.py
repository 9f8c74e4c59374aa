"""Operations needed, counted by hand; speeds and compilations that follow; memory profiles of a run."""

import ctypes
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import vision_cases
from helpers.training_helpers import batch_of_groups

from jaxrl import models
from jaxrl.models.families import IMAGES
from jaxrl.telemetry.compilations import BACKGROUND, EVENT, BackgroundCompiler, Compilations
from jaxrl.telemetry.flops import Operations, Speed
from jaxrl.types import Pictures

# hidden 8, 2 heads of 4, 1 kv head of 4, MLP 12, vocabulary 61; the second layer sees 5 positions
HF = {"model_type": "gemma2", "vocab_size": 61, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
      "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 5, "max_position_embeddings": 64}
LAYER = 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 12)  # q, k, v, out, and gate, up, down: a multiply and an add each
HEAD = 2 * 8 * 61


def by_hand(first, end):
    """(matrix products, attention) of tokens first ... end - 1 of one document, one by one."""
    matrices = attention = 0
    for position in range(first, end):
        matrices += 2 * LAYER
        for window in (5, 64):
            attention += min(position + 1, window) * 2 * (2 * 4 + 2 * 4)  # scores and their sum of values, 2 heads of 4
    return matrices, attention


@pytest.fixture(scope="module")
def model():
    return models.build(HF, compute_dtype=jnp.float32, scan_layers=False)


@pytest.fixture(scope="module")
def names(model):
    return {"/".join(e.path) for e in model.entries}


def test_the_layers_by_hand(model, names):
    count = Operations(model, names)
    assert {layer.window for layer in model.config.layers} == {0, 5} and count.head == HEAD
    for first, end in ((0, 1), (0, 5), (3, 9), (7, 20)):
        assert count.layers(np.array([first]), np.array([end])) == by_hand(first, end)
        each = sum(model.flops_per_token(n) for n in range(first + 1, end + 1))
        assert sum(by_hand(first, end)) + HEAD * (end - first) == each  # the model's own count, token by token


def test_generation_scoring_and_update_by_hand(model, names):
    traj, _ = batch_of_groups(groups=3, size=4)
    count, scored = Operations(model, names), HEAD * traj.loss_mask.sum()
    prompts = [traj.prompt_lengths[i] for i in range(0, 12, 4)]
    answers = [by_hand(p, n) for p, n in zip(traj.prompt_lengths, traj.lengths, strict=True)]
    once = np.sum([by_hand(0, p) for p in prompts] + answers, axis=0)
    alone = np.sum([by_hand(0, n) for n in traj.lengths], axis=0)
    sampled = sum(sum(by_hand(p, n - 1)) for p, n in zip(traj.prompt_lengths, traj.lengths, strict=True))
    assert count.generation(traj) == sum(sum(by_hand(0, p)) for p in prompts) + sampled + scored
    assert count.scoring(traj, shared=True) == once.sum() + scored
    assert count.scoring(traj, shared=False) == alone.sum() + scored
    assert count.scoring(traj, shared=False, head=False) == alone.sum()
    assert count.update(traj, shared=True) == pytest.approx(3 * (once.sum() + scored))
    assert count.update(traj, shared=False, head=False) == 3 * alone.sum()


def test_what_is_frozen_has_no_gradient_of_its_own(model, names):
    traj, _ = batch_of_groups(groups=2, size=2)
    matrices, attention = np.sum([by_hand(0, n) for n in traj.lengths], axis=0)
    scored = HEAD * traj.loss_mask.sum()
    first_layer = Operations(model, {n for n in names if not n.startswith("layer_1")})  # half of the matrices, and the tied head
    assert first_layer.update(traj, shared=False) == pytest.approx(2.5 * matrices + 3 * attention + 3 * scored)
    norms = Operations(model, {n for n in names if "norm" in n})
    assert norms.update(traj, shared=False) == pytest.approx(2 * matrices + 3 * attention + 2 * scored)


def test_the_tower_by_hand():
    """Each image once per copy of its prompt, by its own size; frozen, it has no backward pass."""
    own = models.build({**vision_cases.TEXT, IMAGES: {**vision_cases.VISION, "depth": 2, "deepstack_visual_indexes": [0]}},
                       compute_dtype=jnp.float32, scan_layers=False)
    layer = 4 * 24 * 24 + 2 * 24 * 20  # width 24, MLP 20; patches of 3 x 4 x 4 numbers; mergers 96 -> 96 -> 32 of four patches each
    patch = lambda n: 2 * (48 * 24 + 2 * layer + 2 * (96 * 96 + 96 * 32) / 4) + 2 * 4 * 24 * n  # noqa: E731
    assert 16 * own.flops_per_patch + own.config.vision.pair_flops((4, 4)) == 16 * patch(16)
    assert models.build(HF, compute_dtype=jnp.float32, scan_layers=False).flops_per_patch == 0
    traj, _ = batch_of_groups(groups=2, size=2)
    firsts = [0, 2, 0, 2, int(traj.prompt_lengths[3])]  # two images in the first prompt, one behind the last
    pictures = Pictures(np.array([0, 0, 1, 1, 3]), np.array(firsts), np.array([(2, 4), (4, 4), (2, 4), (4, 4), (2, 2)]), np.arange(5), 2, 48, list)
    seen, names = dataclasses.replace(traj, pictures=pictures), {"/".join(e.path) for e in own.entries}
    once, alone = 8 * patch(8) + 16 * patch(16) + 4 * patch(4), 2 * (8 * patch(8) + 16 * patch(16)) + 4 * patch(4)
    text, whole = Operations(own, names), lambda of, shared: of(seen, shared) - of(traj, shared)
    assert whole(text.scoring, True) == pytest.approx(once) and whole(text.scoring, False) == pytest.approx(alone)
    assert text.generation(seen) - text.generation(traj) == pytest.approx(once) and whole(text.update, False) == pytest.approx(3 * alone)
    frozen = {n for n in names if not n.startswith("vision")}
    assert whole(Operations(own, frozen).update, True) == pytest.approx(once)
    kept = Operations(own, frozen, keeps_features=True)  # made once per image, by no pass
    assert whole(kept.update, True) == whole(kept.scoring, True) == 0 and whole(Operations(own, names, True).update, True) > once


def job(model, kind, platform, devices=4):
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind, platform=platform)]), size=devices)
    config = SimpleNamespace(train=SimpleNamespace(image_features="auto"))
    return SimpleNamespace(model=model, mesh=mesh, mesh_of=lambda role: mesh, config=config)


def test_speeds_are_per_device_and_shares_of_known_chips(model, names):
    metrics = {"flops/rollout": 8e12, "flops/update": 40e12, "flops/score": 0.0, "rollout/tokens": 600.0, "rollout/prompt_tokens": 200.0}
    phases = {"rollout": 2.0, "score": 0.5, "update": 1.0, "eval": 7.0, "other": 0.5, "step": 11.0}
    found = Speed(job(model, "NVIDIA H100 80GB HBM3", "gpu"), names).rates(metrics, phases)
    assert found == pytest.approx({
        "perf/rollout_tflops": 1.0, "perf/rollout_mfu": 1 / 989, "perf/update_tflops": 10.0, "perf/update_mfu": 10 / 989,
        "perf/tflops": 3.0, "perf/mfu": 3 / 989, "perf/tokens_per_second": 50.0, "perf/update_tokens_per_second": 200.0})
    for kind, platform in (("cpu", "cpu"), ("AMD Instinct", "gpu")):
        other = Speed(job(model, kind, platform), names).rates(metrics, phases)
        assert other == {name: value for name, value in found.items() if not name.endswith("mfu")}
    assert Speed(job(model, "cpu", "cpu"), names).rates({}, phases) == {}  # a line without an update


def test_compilations_count_every_program_once():
    count = Compilations()
    double = jax.jit(lambda x: 2 * x)
    double(np.ones(3, np.float32)), double(np.zeros(3, np.float32))
    assert count.take() == (1, 0) and count.take() == (0, 0)
    double(np.ones(4, np.float32))
    assert count.take() == (1, 0) and count.total == (2, 0)


def test_after_a_long_compilation_the_heap_gives_back_what_nobody_uses():
    """Blocks too small to be mapped on their own stay in glibc's heap when they are freed, while one above them is held."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, count = 100_000, 2000  # 200 MB
    resident = lambda: next(int(x.split()[1]) for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))  # noqa: E731
    Compilations()  # which listens
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)
    held = resident()
    jax.monitoring.record_event_duration_secs(EVENT, 0.1)
    assert resident() > held - 50_000  # KiB: not after a short one
    jax.monitoring.record_event_duration_secs(EVENT, 2.0)
    assert resident() < held - 150_000
    libc.free(blocks[-1])


def test_what_a_thread_compiles_beside_the_work_counts_only_where_it_was_waited_for(monkeypatch):
    """And what has not begun is given back to who asks for it."""
    monkeypatch.setattr(BackgroundCompiler, "_threads", ThreadPoolExecutor(1, BACKGROUND))
    count, beside, gate = Compilations(), BackgroundCompiler(), threading.Event()
    compiled = lambda k: jax.jit(lambda x: k * x)(np.ones(3, np.float32))  # noqa: E731
    beside.begin("done", compiled, 3)
    beside.coming["done"].result()
    assert beside.take("done").tolist() == [3, 3, 3] and count.take() == (0, 1)
    beside.begin("late", lambda: gate.wait(60) and compiled(4))
    beside.begin("next", compiled, 5)
    while not beside.begun("late"):
        time.sleep(0.001)
    assert not beside.begun("next") and beside.take("next") is None and beside.take("unknown") is None
    threading.Timer(0.1, gate.set).start()
    assert beside.take("late").tolist() == [4, 4, 4] and count.take() == (1, 1)
    assert beside.coming == {}
