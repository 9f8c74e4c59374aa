"""Our LoRA beside PEFT's in one process: modules, outputs, one step of SGD and of AdamW, every init, files byte by byte.

    python evidence/peft_parity.py

Writes evidence/results/peft_parity.json. A tiny Llama with biases and an output matrix of its own, three layers; both start from
PEFT's numbers (tests/helpers/peft_cases.py). float64: transformers' norms and rotary angles are put into float64, PEFT's layers are its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import jax  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
import common  # noqa: E402
import numpy as np  # noqa: E402
import peft as theirs  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from helpers import peft_cases as cases  # noqa: E402

from jaxrl.models import adapters  # noqa: E402
from jaxrl.models.adapters import initialization, peft  # noqa: E402

transformers.utils.logging.disable_progress_bar()
warnings.simplefilter("ignore")
INITS = ("default", "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora")
# logits and a step of SGD; a step of AdamW, which divides by the root of a second moment that may be all but zero
LIMITS = {True: (1e-12, 1e-9), False: (5e-5, 5e-2)}
PARTS = ("logits", "adapter after the step", "logits after the step")


def numbers(path) -> dict:
    """selection / init -> dtype -> optimizer -> largest differences."""
    runs = [(name, "default") for name in cases.SELECTIONS] + [("list", init) for init in INITS[1:]]
    out = {}
    for selection, init in runs:
        ours, config = cases.SELECTIONS[selection]
        given = cases.options(**ours, init=init)
        config = cases.lora_config(**config, init_lora_weights=True if init == "default" else init)
        row = out[f"{selection} / {init}"] = {}
        for double in (True, False):
            for optimizer in ("sgd", "adamw"):
                found = cases.differences(path, given, config, optimizer, double, scan=True)
                row[f"{'float64' if double else 'fp32'} {optimizer}"] = found
    return out


def files(path, folder: Path) -> dict:
    """Which files come back byte for byte, from PEFT's folders and from ours."""
    out = {}
    for selection, (ours, config) in cases.SELECTIONS.items():
        other = cases.wrapped(cases.torch_model(path), cases.lora_config(**config))
        source = Path(cases.save(other, folder / "theirs"))
        given = cases.options(path=str(source))
        peft.source.cache_clear()
        model, base = cases.our_model(path, given)
        peft.write(folder / "back", model, adapters.joined(base, peft.read(source, model)[1]), given, "")
        same = all((folder / "back" / name).read_bytes() == (source / name).read_bytes() for name in (peft.CONFIG, peft.WEIGHTS))
        given = cases.options(**ours)
        model, base = cases.our_model(path, given)
        rng = np.random.default_rng(0)
        leaves = {name: x if name.endswith("scale") else np.asarray(rng.normal(size=x.shape), np.float32)
                  for name, x in initialization.initial(model, jax.random.key(0), base, "default").items()}
        peft.write(folder / "ours", model, adapters.joined(base, leaves), given, path)
        again = cases.save(theirs.PeftModel.from_pretrained(cases.torch_model(path), folder / "ours"), folder / "again")
        out[selection] = {"theirs through us": same, "ours through PEFT": cases.digests(again) == cases.digests(folder / "ours")}
    return out


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = cases.checkpoint(folder)
        found, whole = numbers(path), files(path, Path(folder))
    rows, failed = [], []
    for name, row in found.items():
        for kind, values in row.items():
            exact, adam = LIMITS[kind.startswith("float64")]
            worst = max(values[part] for part in PARTS)
            if values["logits"] > exact or worst > (adam if "adamw" in kind else exact):
                failed.append(f"{name}, {kind}")
        rows.append([name, *(f"{max(values[part] for part in PARTS):.1e}" for values in row.values())])
    common.table(["selection / init", *next(iter(found.values()))], rows)
    common.table(["files", "theirs through us", "ours through PEFT"], [[n, *map(str, r.values())] for n, r in whole.items()])
    failed += [f"files of {name}" for name, row in whole.items() if not all(row.values())]
    versions = {"peft": theirs.__version__, "torch": torch.__version__}
    common.record("peft_parity", {"versions": versions, "numbers": found, "files": whole, "failed": failed})
    print(json.dumps(failed) if failed else "all within their limits")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
