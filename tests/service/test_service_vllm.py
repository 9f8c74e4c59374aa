"""Runs of the service sampled by real vLLM on the CPU: `jaxrl serve tinker --sampler=vllm`."""

import numpy as np
import pytest
from helpers.tinker_cases import QUICK, next_tokens, numbers, served
from helpers.tiny_models import make_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.usefixtures("the_mesh_as_it_was")]
ROWS = [next_tokens([3, 10, 11, 12, 13, 14]), next_tokens([3, 20, 21, 22])]
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # that vLLM's CPU attention has
CONFIG = {k: v for k, v in QUICK.items() if not k.startswith("rollout.")} | {
    "rollout.vllm.setup_seconds": 400.0, "rollout.vllm.retries": 0, "rollout.vllm.restarts": 0}


def test_vllm_samples_each_run_s_newest_weights(tmp_path):
    """Log-probs are the trainer's after a step, of two runs by turns, adapters on the output matrix included; those of the base are not."""
    make_tiny("qwen3", tmp_path / "model", **SHAPE)
    with served(tmp_path, sampler="vllm", config=CONFIG) as (_, client):
        session, gaps, numbers_of = client.session(), {}, {}
        runs = [client.run(session, k, train_unembed=not k) for k in range(2)]
        for turn in range(2):
            for k, run in enumerate(runs):
                seq = numbers_of.get(run, 1)
                client.forward_backward(run, seq, ROWS)
                client.result(client.optim_step(run, seq + 1, learning_rate=0.05))
                path = client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": seq + 2, "path": f"w{turn}"}))["path"]
                for weights in (path, None) if turn else (path,):
                    sampler = client.sampler(session, 10 * turn + 2 * k + (weights is None), weights)
                    found = client.result(client.sample(sampler, 0, [3, 10, 11], num_samples=2, prompt_logprobs=True, params={"seed": 4}))
                    own = found.sequences[1]
                    whole = np.array([3, 10, 11, *np.frombuffer(own.tokens, np.int32)])
                    scored = client.forward_backward(run, seq + 3 + (weights is None), [next_tokens(whole)], forward_only=True)
                    parts = np.frombuffer(found.prompt_logprobs, np.float32)[1:], np.frombuffer(own.logprobs, np.float32)
                    gaps[turn, k, weights is None] = np.abs(np.concatenate(parts) - numbers(client.result(scored))[0])[2:].max()
                numbers_of[run] = seq + 4
    assert max(gap for (_, _, of_base), gap in gaps.items() if not of_base) < 1e-5, gaps
    assert min(gap for (_, _, of_base), gap in gaps.items() if of_base) > 0.1, gaps
