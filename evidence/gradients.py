"""Showing 4: the gradient of one optimizer step, laid out in eight ways; largest relative L2 difference over tensors.

    python evidence/gradients.py

The truth is one sequence at a time. The loss has every term: clip, mismatch weight, KL, entropy. "dirty" fills padding
tokens, positions, targets and columns with junk.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [os.path.dirname(__file__), str(TESTS)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import record, table  # noqa: E402
from helpers.training_helpers import (  # noqa: E402
    LAYOUTS,
    batch_of_groups,
    gradient,
    layout_of,
    one_at_a_time,
    params_of,
    tiny_model,
    worst,
)

from jaxrl import training  # noqa: E402

BOUNDS = {"float64": 1e-12, "float32": 1e-5}


def differences(dtype, aggregation):
    model, (traj, columns) = tiny_model(dtype), batch_of_groups()
    params = params_of(model, dtype)
    weights = training.loss_weights(traj, np.arange(traj.num_sequences), aggregation)
    truth, _ = gradient(model, params, traj, columns, weights, one_at_a_time(traj), np.dtype(dtype))
    for name in LAYOUTS:
        for dirty in (False, True):
            got, _ = gradient(
                model, params, traj, columns, weights, layout_of(traj, name), np.dtype(dtype), dirty=dirty
            )
            yield name + (", dirty" if dirty else ""), worst(got, truth)


def main():
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_x64", True)
    rows, good = [], True
    for dtype in (jnp.float64, jnp.float32):
        for aggregation in ("token_mean", "sequence_mean"):
            for name, value in differences(dtype, aggregation):
                bound = BOUNDS[np.dtype(dtype).name]
                good &= value < bound
                rows.append(
                    [
                        np.dtype(dtype).name,
                        aggregation,
                        name,
                        f"{value:.1e}",
                        f"< {bound:g}" if value < bound else "TOO LARGE",
                    ]
                )
    table(["dtype", "aggregation", "layout", "relative L2", "bound"], rows)
    record("gradients", rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
