"""Random odd config files: read as transformers reads them, or refused; never read as something else.

    python evidence/odd_configs.py [--count 240] [--seed 0]

Writes evidence/results/odd_configs.json. A config is a family's plain one (tests/helpers/model_odd_configs.py) with two to five fields drawn
from pools of likely, unlikely and broken values, until so many were taken that --count could be compared. Both sides get the same
config.json and the same random weights; fp32, highest matmul precision. "agree": logits within the limit; "refused": ConfigError
here; "theirs fails": transformers cannot make or run it and we can; "misread": both take it and differ, of which there must be none.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = map(str, (TESTS, TESTS / "models"))
import jax  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
import common  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from helpers import model_odd_configs as odd  # noqa: E402

from jaxrl.config.load import ConfigError  # noqa: E402
from jaxrl.models import FAMILIES  # noqa: E402
from jaxrl.models.config import model_config  # noqa: E402

LIMIT = 1e-4
ABSENT = object()
ROPE = {
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope", ABSENT], "type": [ABSENT] * 6 + ["linear", "yarn"],
    "rope_theta": [ABSENT, ABSENT, 500.0, 30, 1.5, None], "factor": [4.0, 2, 1.0, 0.5, None, ABSENT],
    "original_max_position_embeddings": [ABSENT, 16, 32, 64, 1000, None], "low_freq_factor": [1.0, 1.0, 2.0, 4.0, 0],
    "high_freq_factor": [4.0, 4.0, 1.0, 8.0], "beta_fast": [ABSENT, ABSENT, 32, 2.0, 0.5, 0, None],
    "beta_slow": [ABSENT, ABSENT, 1, 0.1, 3.0, 0, None], "truncate": [ABSENT, ABSENT, True, False, None],
    "attention_factor": [ABSENT, ABSENT, 1.3, 0.0, None], "mscale": [ABSENT, ABSENT, 0.7, 0], "mscale_all_dim": [ABSENT, ABSENT, 0.4],
    "partial_rotary_factor": [ABSENT] * 8 + [1.0, 0.5],
}
FIELDS = {
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu"], "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh", None],
    "rms_norm_eps": [1e-6, 0.1, 1e-2], "tie_word_embeddings": [True, False], "attention_bias": [True, False], "mlp_bias": [True, False],
    "head_dim": [4, 8, 10, 16, None], "num_key_value_heads": [1, 2, 4, 3, None], "num_attention_heads": [2, 4, 8],
    "num_hidden_layers": [1, 3, 5], "hidden_size": [24, 32, 36], "max_position_embeddings": [48, 64, 256],
    "sliding_window": [1, 3, 7, 64, None, 0], "use_sliding_window": [True, False], "max_window_layers": [0, 1, 3, 9],
    "sliding_window_pattern": [1, 2, 3, 4, None], "attn_logit_softcapping": [None, 2.0, 30.0, 0],
    "final_logit_softcapping": [None, 2.0, 30.0], "query_pre_attn_scalar": [4, 16, 100, 0], "rope_theta": [77.0, 1e6, 200, None],
    "rope_local_base_freq": [30.0, 5e3, None], "partial_rotary_factor": [1.0, 0.5], "original_max_position_embeddings": [16, 32, 500],
    "num_experts": [0, 4], "logit_scale": [1.0, 0.5], "residual_multiplier": [1.0, 0.2], "attention_dropout": [0.0, 0.2],
    "use_bidirectional_attention": [False, True], "is_causal": [True, False], "attention_chunk_size": [None, 8],
}
OWN = {"gemma2": ["sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"],
       "gemma3_text": ["sliding_window_pattern", "rope_local_base_freq", "final_logit_softcapping", "query_pre_attn_scalar"]}


def table(rng) -> dict:
    """A rotary table; mostly one that its type asks for."""
    drawn = {key: rng.choice(values) for key, values in ROPE.items()}
    if drawn["rope_type"] != "llama3" and rng.random() < 0.8:
        drawn["low_freq_factor"] = drawn["high_freq_factor"] = ABSENT
    return {key: value for key, value in drawn.items() if value is not ABSENT}


def entries(rng, family) -> dict:
    """Two to five fields over the family's plain config; a rotary one in three of four."""
    names = rng.sample(sorted(FIELDS), rng.randint(2, 5)) + rng.sample(OWN.get(family, ["use_sliding_window"]), 1)
    out = {name: rng.choice(FIELDS[name]) for name in names}
    count = {**odd.SIZES, **out}["num_hidden_layers"]
    kinds = ["full_attention", "sliding_attention"]
    if rng.random() < 0.3:
        out["layer_types"] = [rng.choice(kinds) for _ in range(count)]
    if rng.random() < 0.75:
        layered = {kind: table(rng) for kind in kinds if rng.random() < 0.7}
        flat = family != "gemma3_text" if rng.random() < 0.9 else family == "gemma3_text"
        key = rng.choice(["rope_scaling", "rope_parameters", "rope_parameters"])
        out[key] = table(rng) if flat or key == "rope_scaling" else layered
        if not flat and key == "rope_parameters" and rng.random() < 0.2:
            out[key]["truncate"] = False
    return out


def outcome(family, changes, folder) -> tuple[str, object]:
    from test_models_odd import compare
    try:
        model_config(odd.config(family, changes))
    except ConfigError as e:
        return "refused", str(e)
    try:
        difference, want = compare(family, changes, folder)
    except ConfigError:
        raise
    except Exception as e:  # transformers raises whatever its code runs into
        if "jaxrl/" in str(e.__traceback__.tb_next and e.__traceback__.tb_next.tb_frame.f_code.co_filename):
            raise
        return "theirs fails", f"{type(e).__name__}: {str(e).splitlines()[0]}"
    if not np.isfinite(want).all():
        return "theirs fails", "logits that are not finite"
    return ("agree" if difference < LIMIT else "misread"), difference


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=240, help="configs that are not refused")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    alone = [name for name, family in FAMILIES.items() if not family.stored_type]  # a text model that two families have is one
    counts, misread, worst, fails = {f: collections.Counter() for f in alone}, [], 0.0, collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        while sum(compared := [n["agree"] + n["misread"] + n["theirs fails"] for n in counts.values()]) < options.count:
            family = alone[int(np.argmin(compared))]
            changes = entries(rng, family)
            kind, found = outcome(family, changes, Path(name))
            counts[family][kind] += 1
            if kind == "misread":
                misread.append({"family": family, "entries": changes, "difference": found})
                print("misread:", json.dumps(misread[-1]), flush=True)
            elif kind == "agree":
                worst = max(worst, found)
            elif kind == "theirs fails":
                fails[found] += 1
    kinds = ("agree", "refused", "theirs fails", "misread")
    rows = [[family, *(counts[family][kind] for kind in kinds)] for family in alone]
    common.table(["family", *kinds], rows)
    print(f"\nlargest difference where they agree: {worst:.1e}; misread: {len(misread)}")
    common.record("odd_configs", {
        "count": options.count, "seed": options.seed, "limit": LIMIT, "torch": torch.__version__, "largest_difference": worst,
        "transformers": transformers.__version__, "families": {f: dict(c) for f, c in counts.items()}, "misread": misread,
        "theirs_fails": dict(fails)})
    return 1 if misread else 0


if __name__ == "__main__":
    sys.exit(main())
