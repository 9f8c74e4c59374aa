"""Issue 3, showing 3: seconds and bytes per second of a publish, per transport, for a 0.5B shape on this machine.

    python evidence/vllm_publish.py           # about 5 minutes and 12 GB of memory; wants vLLM

Qwen2.5-0.5B's shape with random weights, bf16 on the wire. Beside it the bound of the same run: copying as many bytes in
memory once. `extra_mb` is the trainer's peak memory during a publish above what it holds anyway.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [os.path.dirname(__file__), str(Path(__file__).parent.parent / "tests")]

import conftest  # noqa: E402, F401
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import commit, record, table  # noqa: E402

from jaxrl import models  # noqa: E402
from jaxrl.config.load import default_config  # noqa: E402
from jaxrl.rollout import (  # noqa: E402
    EngineContext,
    make_engine,
    weights,  # noqa: E402
)
from jaxrl.rollout.vllm import transport  # noqa: E402

HF = dict(model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
          num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=4096, rms_norm_eps=1e-6,
          rope_theta=1e6, tie_word_embeddings=True, hidden_act="silu")


def memory(field: str) -> float:
    """MB of VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def copy_bound(size: int) -> float:
    """Seconds to copy as many bytes once, the best of five."""
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    best = np.inf
    for _ in range(5):
        started = time.monotonic()
        np.copyto(target, source)
        best = min(best, time.monotonic() - started)
    return best


def main() -> int:
    at = commit()
    config = default_config()
    config.run.dir = tempfile.mkdtemp(prefix="vllm-publish-")
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 64, 64
    config.rollout.engine, config.rollout.dtype, config.rollout.verify_weights = "vllm", "bf16", "never"
    config.rollout.vllm.chunk_mb = 64
    model = models.build(HF, compute_dtype=jnp.bfloat16, scan_layers=True)
    params = jax.jit(model.init)(jax.random.key(0))
    jax.block_until_ready(params)
    layer = max(sum(np.prod(e.hf_shape) for e, _ in group) * 2 for group in weights._layers(model)) / 1e6
    engine, rows = make_engine(EngineContext(config, model, eos_ids=(0,), hf_config=HF)), []
    try:
        engine.publish(params, 0)
        for make in (transport.SharedMemory, lambda: transport.Network("127.0.0.1"),
                     lambda: transport.Checkpoint(Path(config.run.dir))):
            engine.publisher.transport.close()
            engine.publisher.transport = make()
            seconds, extra = [], []
            for version in range(3):
                held = reset_peak()
                engine.publish(params, version + 1)
                seconds.append(engine.publisher.last_publish["seconds"])
                extra.append(memory("VmHWM") - held)
            size = engine.publisher.last_publish["bytes"]
            rows.append({"transport": engine.publisher.transport.name, "seconds": float(np.median(seconds)), "gb": size / 1e9,
                         "gb_per_s": size / 1e9 / float(np.median(seconds)), "extra_mb": float(max(extra))})
            print(rows[-1], flush=True)
    finally:
        engine.close()
        shutil.rmtree(config.run.dir, ignore_errors=True)
    bound = copy_bound(int(rows[0]["gb"] * 1e9))
    rows.append({"transport": "one copy in memory (bound)", "seconds": bound, "gb": rows[0]["gb"],
                 "gb_per_s": rows[0]["gb"] / bound, "extra_mb": ""})
    table(list(rows[0]), [[f"{v:.3g}" if isinstance(v, float) else v for v in r.values()] for r in rows])
    record("vllm_publish", {"shape": "Qwen2.5-0.5B, bf16", "largest_layer_mb": float(layer), "chunk_mb": 64, "rows": rows}, at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
