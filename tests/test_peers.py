"""benchmarks/peers: the work is what it says, the same for all, and the harness runs with the systems that need no other library."""

import dataclasses
import filecmp
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import build
from jaxrl.models.io import hf

PEERS = Path(__file__).resolve().parents[1] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import learning  # noqa: E402
import measure  # noqa: E402
import run  # noqa: E402
import same_update  # noqa: E402
import shapes  # noqa: E402
import turns  # noqa: E402


@pytest.mark.parametrize("name,sequences,prompt,answer,trained", [
    ("W1", 128, 16 * 64, 128 * 64, 128 * 128), ("W2", 16, 16 * 256, 16 * 256, 16 * 512), ("W3", 128, 16 * 64, None, None),
    ("0.5B_2k", 4, 4 * 256, 4 * 256, 2048), ("1.5B_16k", 32, 32 * 256, 32 * 256, 16384)])
def test_counts_of_the_shapes(name, sequences, prompt, answer, trained):
    found = shapes.SHAPES[name].counts()
    assert (found["sequences"], found["prompt"]) == (sequences, prompt)
    if answer:
        assert (found["answer"], found["trained"], found["padded"]) == (answer, trained, trained)


def test_long_tailed_lengths():
    """A few long answers among many short ones, one of them the longest: rows of the longest length are mostly padding."""
    shape = shapes.SHAPES["W3"]
    lengths = shape.answer_lengths()
    assert lengths.min() >= 8 and lengths.max() == 512 and len(lengths) == 128
    assert 45 <= np.median(lengths) <= 90 and lengths.mean() > 1.3 * np.median(lengths)
    assert shape.counts()["padded"] > 3 * shape.counts()["trained"]
    np.testing.assert_array_equal(lengths, shape.answer_lengths())


def test_needed_work_counted_by_hand():
    """Two layers, one prompt of 2 tokens, 2 answers of 1: positions 4, pairs (1 + 2) + 2 x 3 = 9, predictions 2."""
    shape = shapes.Shape(hidden=8, layers=2, heads=2, kv_heads=1, intermediate=16, vocab=32, prompts=1, group=2, prompt_tokens=2,
                         new_tokens=1, microbatch=2)
    weights = 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16)
    forward = 2 * weights * 4 + 2 * (2 * 2 * 8) * 9 + 2 * 8 * 32 * 2
    assert shape.flops() == {"generation": forward, "update": 3 * forward}


def test_needed_work_of_experts_counted_by_hand():
    """The router and, of each layer, the chosen experts alone."""
    dense, shape = shapes.SHAPES["W2"], shapes.SHAPES["W5"]
    routers = 2 * 8 * 512 * 16 * 16 * (256 + 256)
    assert shape.flops()["update"] - dense.flops()["update"] == 3 * routers and shape.config()["num_experts_per_tok"] == 4


def test_needed_bytes_counted_by_hand():
    """Two layers, one key head of 16: the tiny shape's weights once for each of 8 tokens, 2 groups of 4."""
    shape = shapes.SHAPES["tiny"]
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 256
    positions = 2 * 8 * 8 + 8 * sum(range(8))  # the prompt of each group, and what each sample has written
    assert shape.traffic() == 4 * (8 * weights + positions * 2 * 2 * 16)
    assert shapes.SHAPES["W2"].traffic() == 0.0


def test_needed_work_of_turns_counted_by_hand():
    """What a tool replies is run through the model, but neither predicted nor decoded: of 2 + 3 + 2 tokens 4 are."""
    shape = shapes.Shape(hidden=8, layers=2, heads=2, kv_heads=1, intermediate=16, vocab=32, prompts=1, group=2, prompt_tokens=2,
                         new_tokens=7, microbatch=2, turns=(2, 2))
    one = dataclasses.replace(shape, turns=())
    assert shape.counts()["answer"] == 2 * 4 and one.counts()["answer"] == 2 * 7 and shape.counts()["trained"] == 2 * (2 + 7)
    assert one.flops()["update"] - shape.flops()["update"] == 3 * 2 * 8 * 32 * 2 * 3
    weights, kept = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16) + 8 * 32, 2 * 4 + 2 * (0 + 1 + 5 + 6)
    assert shape.traffic() == 4 * (4 * weights + 2 * 2 * 4 * kept)


def test_a_conversation_is_what_an_episode_makes_of_it(tmp_path):
    """The same folder every time; jaxrl reads the call of each first turn and puts the reply behind it, to the token."""
    from transformers import AutoTokenizer

    import jaxrl
    from jaxrl.data.turns import TurnRenderer
    from jaxrl.envs.tools import schema

    shape = shapes.SHAPES["tiny_turns"]
    first, second = shapes.make(shape, tmp_path / "a"), shapes.make(shape, tmp_path / "b")
    for file in ("work.npz", "prompts.jsonl", "tokenizer/tokenizer.json"):
        assert filecmp.cmp(first / file, second / file, shallow=False), file
    work, tokenizer = shapes.Work(first), AutoTokenizer.from_pretrained(first / "tokenizer")
    renderer = TurnRenderer(jaxrl.default_config(), tokenizer, [schema(turns.add)])
    questions = [json.loads(line)["prompt"] for line in (first / "prompts.jsonl").read_text().splitlines()]
    assert np.array_equal([renderer.first(q) for q in questions], work.prompts)
    for i in range(shape.sequences):
        call, = renderer.read(work.turn(i, 0))["calls"]
        said = work.before(i, 0).tolist() + work.turn(i, 0).tolist()
        message = {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": str(turns.add(**call["arguments"]))}
        np.testing.assert_array_equal(said + renderer.extend(np.array(said), [message]).tolist(), work.before(i, 1))
        last = renderer.read(work.turn(i, 1))
        assert not last["calls"] and 0 < measure.reward(last["text"]) < 1 and work.turn(i, 1)[-1] == tokenizer.eos_token_id
    work.check([np.concatenate([work.turn(i, t) for t in (0, 1)]) for i in range(shape.sequences)], sampled=True)


def test_a_folder_is_the_same_every_time_and_its_words_are_its_tokens(tmp_path):
    from transformers import AutoTokenizer

    shape = shapes.SHAPES["tiny_tail"]
    first, second = shapes.make(shape, tmp_path / "a"), shapes.make(shape, tmp_path / "b")
    for file in ("model.safetensors", "prompts.jsonl", "tokenizer/tokenizer.json", "shape.json"):
        assert filecmp.cmp(first / file, second / file, shallow=False), file
    work = shapes.Work(first)
    work.check(work.answers)
    with pytest.raises(AssertionError):
        work.check(work.answers[::-1])
    tokenizer = AutoTokenizer.from_pretrained(first / "tokenizer")
    for tokens in (*work.prompts, *work.answers):
        assert tokenizer(shapes.words(tokens)).input_ids == tokens.tolist()
        assert tokenizer.decode(tokens, skip_special_tokens=True) == shapes.words(tokens)
    assert [json.loads(line)["prompt"] for line in (first / "prompts.jsonl").read_text().splitlines()] == [
        shapes.words(p) for p in work.prompts]


@pytest.mark.parametrize("name", ["tiny_tail", *(pytest.param(w, marks=pytest.mark.nightly) for w in ("W1", "W2"))])
@pytest.mark.slow
def test_no_sample_ends_by_itself(tmp_path, name):
    """Over a recorded sequence the end and the padding are never within 12 nats of any other token."""
    work = shapes.Work(shapes.make(shapes.SHAPES[name], tmp_path / "work"))
    model = build(hf.load_config(str(work.folder)), compute_dtype=jnp.float32, scan_layers=False)
    params = hf.load_params(model, str(work.folder))
    tokens = np.concatenate([work.prompt_of(0), work.answers[0]])[None]
    ones, positions = np.ones_like(tokens), np.arange(tokens.shape[1], dtype=np.int32)[None]
    logits = np.asarray(model.logits(params, model.hidden(params, tokens, positions, ones, np.zeros_like(tokens))))[0]
    others = logits[:, shapes.FIRST:]
    assert (others.min(axis=1) - logits[:, [shapes.PAD, shapes.END]].max(axis=1)).min() > 12
    assert others.std() > 0.01  # and what is left is a distribution, not a constant


def test_the_clock_divides_a_step():
    clock = measure.Clock()
    clock.start()
    with clock.part("update"):
        time.sleep(0.02)
        with clock.part("generation"):
            time.sleep(0.03)
    with clock.part("rest"):
        time.sleep(0.01)
    clock.step()
    found = clock.steps[0]
    assert found["generation"] >= 0.03 and 0.02 <= found["update"] < found["step"] - 0.03 and found["rest"] >= 0.01
    assert sum(found[name] for name in (*measure.PARTS, "rest")) == pytest.approx(found["step"])


def test_the_best_parts_are_added():
    rows = {name: {"seconds": {"step": s}} for name, s in
            {"jaxrl": 2.0, "trl": 6.0, "torch_loop": 3.0, "vllm_alone": 1.5}.items()}
    found = run.summary(shapes.SHAPES["W1"], rows)
    assert found["seconds_per_step"]["best_parts"] == 4.5 and found["ratio"]["best_parts"] == 2.25 and found["ratio"]["trl"] == 3.0
    assert "best_parts" not in run.summary(shapes.SHAPES["W2"], rows)["ratio"]


def test_a_window_outside_of_the_spread_is_seen():
    theirs = [[0.5] * 10 + [0.7] * 10, [0.52] * 10 + [0.72] * 10, [0.54] * 10 + [0.74] * 10]
    rows = learning.compare({"trl": theirs, "jaxrl": [[0.55] * 10 + [0.65] * 10] * 3})
    assert [r["within"] for r in rows] == [True, False] and rows[0]["trl_two_deviations"] == pytest.approx(0.04)


@pytest.mark.full
def test_a_process_that_leaves_others_behind_ends_and_so_do_they(tmp_path):
    """As vLLM does: the pipe's other end would stay open for as long as they live."""
    pid = tmp_path / "pid"
    begin = time.monotonic()
    said = run.run_alone(["bash", "-c", f"sleep 3600 & echo $! > '{pid}'; echo done"], dict(os.environ), 1800)
    assert said == "done\n" and time.monotonic() - begin < 1800
    while Path(f"/proc/{pid.read_text().strip()}").exists() and "Z" not in Path(f"/proc/{pid.read_text().strip()}/stat").read_text():
        assert time.monotonic() - begin < 1800
    assert "ended after 1 seconds" in run.run_alone(["sleep", "3600"], dict(os.environ), 1)


@pytest.fixture(scope="module")
def envs(tmp_path_factory):
    """Environments for run.py: torch is in this one."""
    folder = tmp_path_factory.mktemp("envs")
    (folder / "trl").symlink_to(sys.prefix)
    return folder


@pytest.mark.slow
@pytest.mark.torch
def test_the_harness_at_a_tiny_shape(tmp_path, envs):
    """jaxrl and the torch loop through the one command, with answers of different lengths; every script checks its counts."""
    out = tmp_path / "out.json"
    done = subprocess.run([sys.executable, PEERS / "run.py", "--shape", "tiny_tail", "--systems", "jaxrl,torch_loop", "--envs", envs,
                           "--rounds", "1", "--steps", "2", "--json", out, "--", "--config.train.tokens_per_microbatch=256"],
                          capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found["seconds_per_step"]) == {"jaxrl", "torch_loop"} and found["ratio"]["jaxrl"] == 1.0
    for row in found["systems"].values():
        seconds = row["seconds"]
        assert seconds["update"] > 0 and row["peak_rss_mib"] > 100 and row["ceiling_gflops"] > 1
        assert len(row["runs"][0]) == 3 and row["first_step"] == pytest.approx(row["runs"][0][0]["step"], abs=1e-3)
        for step in row["runs"][0]:
            assert sum(step[p] for p in run.PARTS) == pytest.approx(step["step"], abs=1e-3)
    assert found["systems"]["jaxrl"]["seconds"]["generation"] > 0


@pytest.mark.slow
def test_a_step_with_a_calculator(tmp_path, capsys):
    """jaxrl's own episodes and workers, sampling every turn: the script checks lengths, prompts of turns and what was trained."""
    import ours
    from transformers import AutoTokenizer

    folder = shapes.make(shapes.SHAPES["tiny_turns"], tmp_path / "work")
    ours.main(["--work", str(folder), "--steps", "1", "--config.train.tokens_per_microbatch=512"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    work = shapes.Work(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    answers = [tokenizer.decode(work.turn(i, 1), skip_special_tokens=True) for i in range(work.shape.sequences)]
    assert found["rewards"] == pytest.approx([np.mean([measure.reward(a) for a in answers])] * 2)
    assert found["seconds"]["generation"] > 0 and found["tokens"]["answer"] == 8 * (40 + 24)


@pytest.mark.nightly
@pytest.mark.torch
def test_the_torch_loop_makes_the_same_update(envs):
    """From one checkpoint and batch; dividing by the group's spread in one of them alone is seen."""
    work = shapes.Work(shapes.make(shapes.SHAPES["tiny_tail"], envs / "work" / "tiny_tail"))
    torch = run.interpreter("trl", envs)
    update = lambda name, python, case: same_update.update_of(name, python, work, same_update.CASES[case][0])  # noqa: E731
    ours = update("jaxrl", sys.executable, "gradient")
    assert same_update.distance(ours, update("torch_loop", torch, "gradient"))["relative"] < same_update.CASES["gradient"][1]
    assert same_update.distance(ours, update("torch_loop", torch, "own_scale"))["relative"] > 0.01


@pytest.mark.nightly
@pytest.mark.torch
def test_the_torch_loop_makes_the_same_update_of_experts(envs):
    """Which W5 times: Qwen3-MoE, every expert's matrices by their names."""
    work = shapes.Work(shapes.make(shapes.SHAPES["tiny_experts"], envs / "work" / "tiny_experts"))
    options, bound, _ = same_update.CASES["gradient"]
    ours, theirs = (same_update.update_of(name, python, work, options)
                    for name, python in (("jaxrl", sys.executable), ("torch_loop", run.interpreter("trl", envs))))
    assert same_update.distance(ours, theirs)["relative"] < bound


@pytest.mark.full
def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path, monkeypatch):
    """pyenv puts a name on the PATH for every version; for one that is not chosen it runs nothing."""
    shims, versions = tmp_path / "shims", tmp_path / "versions" / "3.99.1" / "bin"
    for folder, text in ((shims, "exit 127"), (versions, "echo 3.99")):
        folder.mkdir(parents=True)
        name = folder / ("python3.99" if folder == shims else "python")
        name.write_text(f"#!/bin/sh\n{text}\n")
        name.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert run.python_of("3.99") == str(versions / "python")
    with pytest.raises(SystemExit, match="no Python 3.98"):
        run.python_of("3.98")
