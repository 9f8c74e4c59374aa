"""Families through real vLLM: every publish reaches every tensor, packed and recurrent ones too, and is computed with."""

import json
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_job
from helpers.rollout_helpers import HF, random_params, requests
from helpers.tiny_models import ARCHITECTURES, EXPERTS, HYBRIDS
from helpers.vllm_cases import TIMEOUT, agree, own_servers

import jaxrl
from jaxrl import models
from jaxrl.rollout import generate
from jaxrl.rollout.vllm.publish import WeightMismatch, sequence_logprobs

pytestmark = pytest.mark.vllm
HEADS = {"head_dim": 32}  # vLLM's attention for CPUs serves no smaller ones
LINEAR = {**HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
          "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "full_attention_interval": 2, "rope_parameters": {
              "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}}
MAMBA = {"ssm_state_size": 16, "mamba_head_dim": 32, "mamba_num_heads": 6, "conv_kernel": 4, "time_step_min": 0.0}  # vLLM's steps have no least
OTHERS = {  # what differs from the entries in helpers.tiny_models
    "qwen3_5": {**LINEAR, "tie_word_embeddings": True}, "qwen3_5_moe": LINEAR, "qwen3_next": {**LINEAR, "norm_topk_prob": True},
    "gemma": {**HEADS, "attention_bias": False, "tie_word_embeddings": True},  # vLLM takes them for granted
    "olmo2": {**HEADS, "attention_bias": False},
    "ministral3": {**HEADS, "rope_parameters": {  # vLLM has positions up to factor x original_max_position_embeddings
        "rope_type": "yarn", "factor": 16.0, "rope_theta": 5000.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    "nemotron_h": {**HEADS, **MAMBA, "n_shared_experts": 1}, "nemotron_h_dense": {**HEADS, **MAMBA, "n_groups": 1},
    "granite4_dense": {**HEADS, "mamba_d_state": 16, "mamba_d_conv": 4, "time_step_limit": None, "mamba_proj_bias": False},
    "granite4": {**HEADS, "mamba_d_state": 16, "mamba_d_conv": 4},
    "falcon_h1": {**HEADS, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_conv": 4,
                  "mamba_rms_norm": False},
    "gemma2": {**HEADS, "tie_word_embeddings": True}, "ernie4_5": {**HEADS, "use_bias": False},
}
SERVED = ("mistral", "qwen3", "olmo2", "olmo3", "smollm3", "ministral3", "gemma2", "gemma3", "granite", "ernie4_5", "hunyuan", "minimax_m2",
         "nemotron_h", "nemotron_h_dense", "falcon_h1", "granite4", "granite4_dense")


def made(name, scale=0.15, dtype=jnp.float32, **more):
    kind, entries = (ARCHITECTURES | EXPERTS | HYBRIDS)[name]
    hf_config = {**HF, "pad_token_id": 0, **entries, **OTHERS.get(name, HEADS), **more, "model_type": kind}
    hf_config = {k: v for k, v in hf_config.items() if v is not None and k != "hidden_act"}  # the family's own
    if "rope_parameters" in hf_config:
        del hf_config["rope_theta"]
    model = models.build(hf_config, compute_dtype=dtype, scan_layers=False)
    return hf_config, model, [random_params(model, seed, scale) for seed in (0, 1)]


@pytest.mark.parametrize("name", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "qwen3_5_moe", "qwen3_next", "llama_bias", "seed_oss", "gemma", "glm", "glm4", "phi3"))])
def test_every_publish_reaches_every_tensor(name):
    """Twice, as the first load packs weights on some processors and a later one would not."""
    hf_config, model, (first, second) = made(name)
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always") as engine:
        agree(engine, model, first, 0)
        engine.publish(second, 5)
        assert engine.publisher.last_probe < 1e-5
        agree(engine, model, second, 5)
        assert {name for found in engine.fleet.controls[0].digests() for name in found} == set(engine.publisher._digests)


@pytest.mark.slow
def test_twenty_publishes():
    """Of a hybrid, with completions after each: every one arrives whole and is computed with, the last as the first."""
    hf_config, model, (first, _) = made("qwen3_5")
    probes = []
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always") as engine:
        for version in range(1, 21):
            weights = random_params(model, version, 0.15)
            engine.publish(weights, version)
            probes.append(engine.publisher.last_probe)
            assert all((r.versions == version).all() for r in generate(engine, requests(3, seed=version), TIMEOUT))
        agree(engine, model, weights, 20)
    assert max(probes) < 1e-5, probes


@pytest.mark.slow
def test_the_gap_in_bf16_is_that_of_a_model_of_attention():
    """In the mean at most twice, of as many layers and as large weights."""
    gaps = {}
    for name in ("qwen3", "qwen3_5"):
        hf_config, model, (first, second) = made(name, 0.1, jnp.bfloat16, num_hidden_layers=4)
        with own_servers(of=(model, first), hf_config=hf_config, rollout_dtype="bf16") as engine:
            engine.publish(second, 5)
            asked = requests(16, seed=40)
            results = generate(engine, asked, TIMEOUT)
        rows = [np.concatenate([a.prompt, r.tokens]).astype(np.int32) for a, r in zip(asked, results, strict=True)]
        ours = [sequence_logprobs(model, second, np.pad(row, (0, 48 - len(row)))) for row in rows]  # of one length: one program
        gaps[name] = np.mean([np.abs(o[len(a.prompt) - 1:len(row) - 1] - r.logprobs).mean()
                              for a, r, row, o in zip(asked, results, rows, ours, strict=True)])
    assert 1e-4 < gaps["qwen3_5"] <= 2 * gaps["qwen3"], gaps


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_a_family_computes_the_trainers_log_probs(name):
    """Of what it sampled within 1e-5, after weights that it was given; not those of other weights."""
    hf_config, model, (first, second) = made(name, 0.1)  # of weights of 0.15 fp32's rounding is up to 1.5e-5
    asked = requests(6, seed=40)
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always") as engine:
        engine.publish(second, 5)
        results = generate(engine, asked, TIMEOUT)
        assert {name for found in engine.fleet.controls[0].digests() for name in found} == set(engine.publisher._digests)

    def gap(params):
        ours = [sequence_logprobs(model, params, np.concatenate([a.prompt, r.tokens]).astype(np.int32))[len(a.prompt) - 1:]
                for a, r in zip(asked, results, strict=True)]
        return max(np.abs(np.asarray(o) - r.logprobs).max() for o, r in zip(ours, results, strict=True))

    assert gap(second) <= 1e-5 and gap(first) > 0.1, (gap(second), gap(first))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "phi3"])
def test_tensor_parallel_workers_tell_their_slices(name):
    """Of packed tensors each worker has several; a place that is shifted by one head is caught."""
    hf_config, model, (first, second) = made(name)
    with own_servers(of=(model, first), hf_config=hf_config, tensor_parallel=2, rollout_verify_weights="always",
                     env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as engine:
        engine.publish(second, 5)
        agree(engine, model, second, 5)
        digests = engine.publisher._digests
        packed = next(n for n in sorted(digests) if n.endswith(("in_proj_qkv.weight", "in_proj_qkvz.weight", "qkv_proj.weight")))
        digests[packed] = np.roll(digests[packed], 16, axis=0)
        with pytest.raises(WeightMismatch, match=packed):
            engine.publisher._compare(engine.router.replicas[0])


def exchanged(fault, entries):
    """Payloads in which slices of a gated-delta layer lie where others of their shape belong. entries: of the model's config."""
    heads, keys = entries["linear_num_value_heads"], entries["linear_num_key_heads"]
    width = entries["linear_value_head_dim"]

    def spoil(tensors):
        out = {name: np.array(a) for name, a in tensors}
        for name, a in list(out.items()):
            if fault == "b and a" and name.endswith("in_proj_b.weight"):
                other = name.replace("in_proj_b", "in_proj_a")
                out[name], out[other] = out[other], a
            elif fault == "b and a" and name.endswith("in_proj_ba.weight"):  # by key head
                out[name] = a.reshape(keys, 2, heads // keys, -1)[:, ::-1].reshape(a.shape)
            elif fault == "z" and name.endswith("in_proj_z.weight"):
                out[name] = np.roll(a, width, axis=0)
            elif fault == "z" and name.endswith("in_proj_qkvz.weight"):
                parts = a.reshape(keys, -1, a.shape[-1]).copy()
                parts[:, -heads // keys * width:] = np.roll(parts[:, -heads // keys * width:], width, axis=1)
                out[name] = parts.reshape(a.shape)
        return list(out.items())

    return spoil


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "qwen3_next")])
def test_exchanged_slices_of_merged_projections_are_noticed(name):
    """b and a, or z by a head, in the place of each other: the checksums name the tensor, and without them the probe sees it."""
    hf_config, model, (first, second) = made(name)
    found = {}
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always") as engine:
        publisher = engine.publisher
        payload = publisher.transport.payload
        for verify in ("always", "never"):
            publisher.config.rollout.verify_weights = verify
            for fault in ("b and a", "z"):
                spoil = exchanged(fault, hf_config)
                with mock.patch.object(publisher.transport, "payload", lambda chunk, verify, spoil=spoil: payload(spoil(chunk), verify)):
                    try:
                        engine.publish(second, 5)
                        found[verify, fault] = f"not noticed; the probe: {publisher.last_probe}"
                    except WeightMismatch as e:
                        found[verify, fault] = str(e)
        engine.publish(second, 9)
        agree(engine, model, second, 9)
    for (verify, fault), text in found.items():
        assert {"never": "a probe's log-probs"}.get(verify, "in_proj_b" if fault == "b and a" else "in_proj_") in text, found


@pytest.mark.slow
def test_two_steps_of_a_job(tmp_path):
    """GRPO of a hybrid: weights go to the server before each step, with checksums, and what it tells of its tokens is what the trainer
    scores."""
    c = tiny_job.get_config()
    c.model.config, c.run.dir, c.train.steps = {**tiny_job.HYBRID, **HEADS}, str(tmp_path), 2
    c.rollout.engine, c.rollout.verify_weights, c.rollout.prompt_lengths = "vllm", "always", ()
    c.eval.sets, c.log.console = (), "plain"
    jaxrl.train(c)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["gap/mean"] for row in rows if "gap/mean" in row]
    assert len(gaps) == 2 and max(gaps) < 1e-5 and rows[0]["optim/grad_norm"] > 0
