"""Logits beside transformers' for every architecture and layout, and import -> export byte by byte.

    python evidence/models.py

Writes evidence/results/models.json. Checkpoints are tiny, random and made on the spot (tests/helpers/tiny_models.py); fp32,
highest matmul precision; a case is the worst token over scanned and unrolled layers (tests/helpers/model_cases.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import jax  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
import common  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from helpers import model_cases  # noqa: E402
from helpers.tiny_models import ARCHITECTURES, make_tiny  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from jaxrl.models.io import hf  # noqa: E402

LIMIT = 1e-4
transformers.utils.logging.disable_progress_bar()


def logits(architecture: str, folder: Path) -> dict:
    """Worst absolute difference per case, and the scale of the logits."""
    path = make_tiny(architecture, folder / architecture, tokenizer=False)
    want = model_cases.reference(path)
    runs = [model_cases.differences(path, scan_layers, want) for scan_layers in (False, True)]
    out = {case: max(run[case] for run in runs) for case in model_cases.CASES}
    # the exported folder, opened by transformers, on weights changed here
    model, params = model_cases.ours(path, scan_layers=True)
    params = jax.tree.map(lambda x: x * 1.03 + 0.01, params)
    hf.export(model, params, folder / "changed", hf.load_config(path))
    arrays, _ = model_cases.batch()
    ours = np.asarray(model_cases.forward(model, params, *arrays))[0]
    out["exported"] = float(np.abs(ours - model_cases.reference(folder / "changed")(arrays[0][0])).max())
    out["largest logit"] = float(np.abs(want(arrays[0][0])).max())
    return out


def exact(architecture: str, folder: Path, dtype: str) -> bool:
    """Every tensor of the source comes back with the same name, dtype and bits, and no other."""
    path = make_tiny(architecture, folder / f"{architecture}-{dtype}", dtype=dtype, tokenizer=False)
    model, params = model_cases.ours(path, scan_layers=True)
    hf.export(model, params, folder / "copy", hf.load_config(path))
    source, copy = (load_file(Path(p) / "model.safetensors") for p in (path, folder / "copy"))
    same = all(copy[name].dtype == tensor.dtype and torch.equal(copy[name].view(torch.uint8), tensor.view(torch.uint8))
               for name, tensor in source.items() if name in copy)
    return same and set(source) == set(copy)


def main() -> int:
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for architecture in ARCHITECTURES:
            found = logits(architecture, folder)
            bits = {dtype: exact(architecture, folder, dtype) for dtype in ("float32", "bfloat16", "float16")}
            results[architecture] = {"max_abs_difference": found, "bit_exact": bits}
            rows.append([architecture, *(f"{value:.1e}" for value in found.values()),
                         " ".join(dtype for dtype, same in bits.items() if same) or "none"])
    common.table(["architecture", *found, "bit-exact copies"], rows)
    passed = all(value < LIMIT for r in results.values() for case, value in r["max_abs_difference"].items()
                 if case != "largest logit") and all(all(r["bit_exact"].values()) for r in results.values())
    print(f"\nall differences below {LIMIT} and all copies bit-exact: {passed}")
    common.record("models", {"limit": LIMIT, "passed": passed, "torch": torch.__version__, "architectures": results})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
