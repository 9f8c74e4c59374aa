"""Base models beyond the plain decoder: experts and recurrent layers, whose rows decide each other's last bits."""

import numpy as np
import pytest
from helpers.tiers import nightly
from helpers.tinker_cases import next_tokens, numbers, served
from helpers.tiny_models import make_tiny
from helpers.trainer_cases import trainer_of

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.usefixtures("the_mesh_as_it_was")]
ROWS = [next_tokens([3, 10, 11, 12, 13, 14]), next_tokens([3, 20, 21, 22])]


@pytest.mark.parametrize("architecture, together", [("llama", 8), ("qwen3_moe", 1), ("qwen3_5", 1)])
def test_where_rows_decide_each_other_s_bits_requests_share_no_pass(tmp_path, architecture, together):
    path = make_tiny(architecture, tmp_path / "model", tokenizer=False)
    assert trainer_of(path, np.float32, together=8).together == together


@pytest.mark.parametrize("architecture, rank", [nightly("qwen3_5", 3), nightly("qwen3_moe", 3), nightly("qwen3_moe", 0)])
def test_a_loop_learns_and_samples_what_it_learned(tmp_path, architecture, rank):
    """Recurrent layers (Qwen3.5) and experts; the sampler's log-probs are the trainer's, also of adapters on the output matrix.
    Rank 0: all parameters."""
    make_tiny(architecture, tmp_path / "model", num_hidden_layers=3)
    with served(tmp_path, rank=4 * (rank > 0)) as (_, client):
        session = client.session()
        run, losses = client.run(session, rank=rank, train_unembed=True), []
        for step in range(3):
            promise = client.forward_backward(run, 2 * step + 1, ROWS)
            client.result(client.optim_step(run, 2 * step + 2))
            losses.append(client.result(promise).metrics["loss:sum"])
        assert losses[-1] < losses[0]
        path = client.result(client.ok("save_weights_for_sampler", {"model_id": run, "seq_id": 7, "path": "one"}))["path"]
        found = client.result(client.sample(client.sampler(session, 0, path), 0, [3, 10, 11], num_samples=1, prompt_logprobs=True))
        whole = np.array([3, 10, 11, *np.frombuffer(found.sequences[0].tokens, np.int32)])
        scored = numbers(client.result(client.forward_backward(run, 8, [next_tokens(whole)], forward_only=True)))[0]
        parts = np.frombuffer(found.prompt_logprobs, np.float32)[1:], np.frombuffer(found.sequences[0].logprobs, np.float32)
        np.testing.assert_allclose(np.concatenate(parts), scored, atol=1e-5)
