"""Experts through real vLLM: every publish arrives in every expert, is computed with, and its checksums are of the published tensors."""

import jax.numpy as jnp
import pytest
from helpers.rollout_helpers import HF, random_params
from helpers.vllm_cases import agree, own_servers

from jaxrl import models
from jaxrl.rollout.vllm.publish import WeightMismatch

pytestmark = pytest.mark.vllm
FEW = {"num_experts": 6, "num_experts_per_tok": 3}
SIGMOID = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "norm_topk_prob": True,
           "routed_scaling_factor": 1.5, "num_hidden_layers": 3}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}  # latents of vLLM's sizes
FAMILIES = {
    "qwen3_moe": {**FEW, "head_dim": 32, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen2_moe": {**FEW, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "olmoe": {**FEW, "norm_topk_prob": False, "rms_norm_eps": 1e-5},  # as its checkpoints have; vLLM takes it for granted
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "glm4_moe": {**SIGMOID, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "head_dim": 32, "use_qk_norm": True,
                 "attention_bias": True, "partial_rotary_factor": 0.5},
    "deepseek_v3": {**SIGMOID, **LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                    "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 48},
    "glm4_moe_lite": {**SIGMOID, **LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": 48, "first_k_dense_replace": 1,
                      "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "intermediate_size": 24, "sliding_window": 8, "rms_norm_eps": 1e-5,
                "num_hidden_layers": 3, "tie_word_embeddings": False, "rope_parameters": {
                    "rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                    "original_max_position_embeddings": 32}},
}


def made(family):
    hf_config = {**HF, **FAMILIES[family], "model_type": family}
    model = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=False)
    return hf_config, model, [random_params(model, seed, 0.15) for seed in (0, 1)]


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "qwen3_moe")])
def test_every_publish_reaches_every_expert(family):
    """Twice, as the first load packs weights on some processors and a later one would not."""
    hf_config, model, (first, second) = made(family)
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always") as engine:
        agree(engine, model, first, 0)
        engine.publish(second, 5)
        assert engine.publisher.last_probe < 1e-5
        agree(engine, model, second, 5)
        told = {name for found in engine.fleet.controls[0].digests() for name in found}
        assert told == set(engine.publisher._digests)
        engine.publisher._digests[next(name for name in sorted(told) if ".experts.3." in name)] = "0" * 64
        with pytest.raises(WeightMismatch, match=r"experts\.3\."):
            engine.publisher._compare(engine.router.replicas[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "gpt_oss"])
def test_what_an_engine_holds_in_fp32_is_told_by_what_it_was_given(family):
    """bf16: corrections are published in fp32, GLM's routers in bf16, and held in fp32."""
    hf_config, model, (first, second) = made(family)
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always", rollout_dtype="bf16") as engine:
        engine.publish(second, 5)
        held = {kind for found in engine.fleet.controls[0].digests() for name, (_, kind, *_) in found.items() if "mlp.gate." in name}
        assert held == (set() if family == "gpt_oss" else {"float32"} if family == "glm4_moe" else {"float32", "bfloat16"})
        assert engine.publisher.last_probe < 0.2


@pytest.mark.slow
def test_a_publish_that_breaks_in_a_layer_is_made_again(monkeypatch):
    """Between the tensors of one layer of vLLM's: the next try is whole, and loads that layer anew."""
    hf_config, model, (first, second) = made("qwen3_moe")
    with own_servers(of=(model, first), hf_config=hf_config, rollout_verify_weights="always") as engine:
        whole, broken = engine.publisher.transport.payload, []

        def payload(chunk, verify):
            out = whole(chunk, verify)
            if not broken:
                tensors = out["tensors"]
                broken.append(next(t for t in tensors if t[0].endswith("layers.1.self_attn.v_proj.weight")))
                tensors[tensors.index(broken[0])] = [*broken[0][:-1], "0" * 64]
            return out

        monkeypatch.setattr(engine.publisher.transport, "payload", payload)
        engine.publish(second, 5)
        assert broken and engine.publisher.last_probe < 1e-5
        agree(engine, model, second, 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_tensor_parallel_workers_tell_their_slices_of_experts(family):
    hf_config, model, (first, second) = made(family)
    with own_servers(of=(model, first), hf_config=hf_config, tensor_parallel=2, rollout_verify_weights="always",
                     env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as engine:
        engine.publish(second, 5)
        agree(engine, model, second, 5)
