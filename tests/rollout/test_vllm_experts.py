"""Experts through real vLLM: every publish arrives in every expert, is computed with, and its checksums are of the published tensors."""

import jax.numpy as jnp
import numpy as np
import pytest
from rollout_helpers import HF, random_params, requests
from vllm_cases import own_servers

from jaxrl import models
from jaxrl.rollout import generate
from jaxrl.rollout.vllm.publish import WeightMismatch, sequence_logprobs

pytestmark = pytest.mark.vllm
TIMEOUT = 120.0
FEW = {"num_experts": 6, "num_experts_per_tok": 3}
FAMILIES = {
    "qwen3_moe": {**FEW, "head_dim": 32, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen2_moe": {**FEW, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "olmoe": {**FEW, "norm_topk_prob": False, "rms_norm_eps": 1e-5},  # as its checkpoints have; vLLM takes it for granted
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
}


def made(family):
    hf_config = {**HF, **FAMILIES[family], "model_type": family}
    model = models.build(hf_config, compute_dtype=jnp.float32, scan_layers=False)
    return hf_config, model, [random_params(model, seed, 0.15) for seed in (0, 1)]


def agree(engine, model, params, version):
    asked = requests(6, seed=40 + version)
    for a, r in zip(asked, generate(engine, asked, TIMEOUT), strict=True):
        ours = sequence_logprobs(model, params, np.concatenate([a.prompt, r.tokens]).astype(np.int32))
        np.testing.assert_allclose(r.logprobs, np.asarray(ours)[len(a.prompt) - 1:], atol=1e-4)
        assert (r.versions == version).all()


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
def test_tensor_parallel_workers_tell_their_slices_of_experts():
    hf_config, model, (first, second) = made("qwen3_moe")
    with own_servers(of=(model, first), hf_config=hf_config, tensor_parallel=2, rollout_verify_weights="always",
                     env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) as engine:
        engine.publish(second, 5)
        agree(engine, model, second, 5)
