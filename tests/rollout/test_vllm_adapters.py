"""Adapters apart from the base through real vLLM: the base once, then a folder per version, proved by files, versions and a probe."""

import dataclasses
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.rollout_helpers import HF, log_softmax, model, params, requests
from helpers.vllm_cases import on_url, own_servers
from safetensors.numpy import load_file
from test_vllm import run_tiny

from jaxrl import models
from jaxrl.errors import ConfigError
from jaxrl.models import adapters
from jaxrl.models.adapters import Adapter, Target, peft, selection
from jaxrl.rollout import EngineContext, generate
from jaxrl.rollout.vllm import adapter as protocol
from jaxrl.rollout.vllm import adapter_folders
from jaxrl.rollout.vllm.engine import VllmEngine
from jaxrl.rollout.vllm.publish import WeightMismatch

TIMEOUT = 120.0
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@functools.cache
def adapted(shifted=False):
    """Uneven ranks and scales, one module without adapter."""
    targets = [Target(f"model.layers.{i}.{name}", 2 + (i + j) % 3, 0.5 + j) for i in range(2) for j, name in enumerate(LINEAR)]
    return dataclasses.replace(model(), adapter=Adapter(tuple(targets[1:]), (), shifted))


@functools.cache
def values(seed, shifted=False):
    """The base of rollout_helpers with adapters that move its log-probs by much more than the bound of the probe."""
    m = adapted(shifted)
    flat = {name: np.array(x) for name, x in adapters.initial(m, jax.random.key(0)).items()}
    rng = np.random.default_rng(seed)
    for t in m.adapter.targets:
        (entry, index), = selection.linears(m)[t.name]
        for path, shape, where in zip(peft.leaf_paths(entry)[:2], peft.lora_shapes(entry, t.rank), ("a", "b"), strict=True):
            at = (*index, ..., slice(t.rank)) if where == "a" else (*index, slice(t.rank))
            for leaf in (path, path + "0") if shifted else (path,):
                flat[leaf][at] = rng.normal(size=shape) * 0.1
    return adapters.joined(params(0), {name: jnp.asarray(x) for name, x in flat.items()})


@functools.partial(jax.jit, static_argnums=0)
def all_logits(m, tree, tokens):
    ones = jnp.ones_like(tokens)
    return m.logits(tree, m.hidden(tree, tokens, jnp.arange(tokens.shape[1])[None], ones, ones * 0))[0]


def largest_gap(engine, tree, version, m=None, count=8):
    """Over sampled answers, in nats; all are of this version."""
    asked, worst = requests(count, seed=60 + version), 0.0
    for a, r in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
        whole = np.zeros((1, 48), np.int32)
        n = len(a.prompt) + len(r.tokens)
        whole[0, :n] = np.concatenate([a.prompt, r.tokens])
        want = log_softmax(np.asarray(all_logits(m or adapted(), tree, whole), np.float64)[len(a.prompt) - 1:n - 1])
        assert (r.versions == version).all() and len(r.tokens)
        worst = max(worst, np.abs(r.logprobs - want[np.arange(len(r.tokens)), r.tokens]).max())
    return worst


@pytest.fixture(scope="module")
def serving():
    """An engine with a server that was started for adapters."""
    with own_servers(of=(adapted(), values(1)), rollout_verify_weights="always") as engine:
        yield engine


@pytest.mark.vllm
def test_the_base_goes_once_and_adapters_follow(serving):
    """Log-probs of every version are ours within 1e-3 nats, and far from those of the version before; a server that was killed gets base and
    adapter again; adapters whose files are not ours are noticed."""
    engine = serving
    whole = engine.publisher.last_publish["bytes"]
    assert largest_gap(engine, values(1), 0) < 1e-3 and engine.publisher.last_probe < 1e-3
    assert largest_gap(engine, values(2), 0) > 0.1 and largest_gap(engine, params(0), 0, model()) > 0.1
    updates = []
    real = protocol.Control.start_update
    protocol.Control.start_update = lambda self: (updates.append(self.url), real(self))
    try:
        engine.publish(values(2), 7)
        alone = engine.publisher.last_publish["bytes"]
        assert not updates and alone < whole / 5 and largest_gap(engine, values(2), 7) < 1e-3
        engine.fleet.processes[0].kill()
        engine.poll(0.0)
        while engine.health().servers[engine.router.replicas[0].url] != "ready":
            engine.poll(0.5)
            time.sleep(0.2)
        assert updates and largest_gap(engine, values(2), 7) < 1e-3
        updates.clear()  # one that came back since the last poll, or that nobody has examined yet, has nothing of ours at the next publish
        engine.router.set_state(engine.router.replicas[0], "dead")
        engine.router.set_state(engine.router.replicas[0], "unsynced")
        engine.fleet.infos.clear()
        engine.publish(values(2), 7)
        assert updates and engine.fleet.infos and largest_gap(engine, values(2), 7) < 1e-3
    finally:
        protocol.Control.start_update = real
    assert [p.name for p in engine.publisher.adapter_folders.folder.iterdir()] == [f"{engine.run_id}-7"]
    real = adapter_folders.AdapterFolders.write

    def other(self, tree, name):
        version = real(self, tree, name)
        peft.write_plain(version.path, self.model, values(1), self.dtype)
        return version

    adapter_folders.AdapterFolders.write = other
    try:
        with pytest.raises(WeightMismatch, match="does not have the adapter of version 8: its .* holds other files"):
            engine.publish(values(2), 8)
    finally:
        adapter_folders.AdapterFolders.write = real


@pytest.mark.vllm
def test_a_stale_adapter_is_seen_by_the_probe(serving):
    """Without checksums, on a server (that another run has used) that answers with the version before; and what began as a part of the base is
    served as what it is."""
    url = serving.router.replicas[0].url
    with on_url(url, api_key=serving.key, of=(adapted(True), values(1, True)), rollout_verify_weights="never") as engine:
        assert largest_gap(engine, values(1, True), 0, adapted(True)) < 1e-3
        real = engine.publisher.adapter_folders.load

        def skipped(control, written, version):
            engine.router.model = engine.publisher.adapter_folders.loaded[control.url]
            control.update_version(version)

        engine.publisher.adapter_folders.load = skipped
        with pytest.raises(WeightMismatch, match="samples from other weights than version 5"):
            engine.publish(values(2, True), 5)
        engine.publisher.adapter_folders.load = real
        engine.publish(values(2, True), 6)
        assert largest_gap(engine, values(2, True), 6, adapted(True)) < 1e-3


@pytest.mark.vllm
def test_a_server_that_was_not_started_for_adapters_is_refused():
    with pytest.raises(ConfigError, match="serves adapters up to rank 0, this run needs 8: start it with --enable-lora --max-lora-rank 8"):
        with on_url(of=(adapted(), values(1))):
            pass


@pytest.mark.vllm
@pytest.mark.parametrize("placement", [pytest.param("auto", marks=pytest.mark.slow), pytest.param("colocated", marks=pytest.mark.slow)])
def test_a_run_samples_from_the_adapters_that_it_trains(tmp_path, placement):
    """Whole runs: at every step the server's log-probs are the trainer's, which have moved; the base goes once, and again to a server that
    slept; no adapter of the run is left on the disk."""
    run = tmp_path / "run"
    done = run_tiny(run, "rollout.engine=vllm", "lora.rank=4", "lora.publish=adapter", "lora.export=adapter", "train.steps=5",
                    "eval.every_steps=0", "eval.max_rows=4", f"rollout.placement={placement}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row]
    assert len(rows) == 5 and max(r["gap/max"] for r in rows) < 1e-3 and max(r["publish/probe"] for r in rows) < 1e-3
    moved = [np.abs(x).max() for name, x in load_file(run / "export" / peft.WEIGHTS).items() if "lora_B" in name]  # from 0
    assert min(moved) > 0.02 and {r["rollout/absent_fraction"] for r in rows} == {0}
    sizes = [1e9 * r["time"]["publish/gb_per_second"] * r["time"]["publish/seconds"] for r in rows]  # base: 109,000 bytes, adapters: 23,000
    assert max(sizes) < 40_000 if placement == "auto" else min(sizes) > 110_000, sizes
    assert not list((run / "vllm").rglob(peft.WEIGHTS))


def test_adapters_that_vllm_does_not_serve_are_refused_before_a_server_starts():
    for changed, said in [(dict(saved=("lm_head",)), "vLLM serves no modules that were trained whole \\(lm_head, lora.modules_to_save\\)"),
                          (dict(targets=(Target("model.layers.0.mlp.up_proj", 513, 1.0),)), "up to rank 512, not 513; set lora.publish=merged"),
                          (dict(targets=(Target("model.layers.0.mlp.up_proj", 300, 1.0),), shifted=True), "not 600, twice that of training")]:
        found = dataclasses.replace(model(), adapter=dataclasses.replace(adapted().adapter, **changed))
        from helpers.rollout_helpers import config, tokenizer
        with pytest.raises(ConfigError, match=said):
            VllmEngine(EngineContext(config(engine="vllm"), found, tokenizer(), None, (1,), HF))
    assert [adapter_folders.required_rank(a) for a in (None, adapted().adapter, adapted(True).adapter)] == [0, 8, 8]
    assert isinstance(models.build(HF, compute_dtype=jnp.float32, scan_layers=False).adapter, type(None))
