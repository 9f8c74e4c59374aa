"""Names Mosaic GPU kernels after their content, for jax 0.11.

jax 0.11 numbers the kernels of a process in the order in which it lowers them, and the number is in the program. So
another order, such as that of two threads, makes another key of the compilation cache, and two calls of one kernel are
compiled twice. jax 0.12 leaves the number out.
"""

from __future__ import annotations

import hashlib
import io

import jax

NAME = "mosaic_gpu.dump_basename"  # of the files that MOSAIC_GPU_DUMP_TO asks for


def name_after_content(lower):
    """Returns a lowering rule that names a Mosaic GPU kernel by the hash of its content before calling the rule
    `lower`."""

    def lower_named(ctx, *args, module, **options):
        from jax._src.lib.mlir import ir

        attributes, content = module.operation.attributes, io.BytesIO()
        with module.context:
            attributes[NAME] = ir.StringAttr.get("")
            module.operation.write_bytecode(content)
            attributes[NAME] = ir.StringAttr.get(f"kernel_{hashlib.sha256(content.getvalue()).hexdigest()[:16]}")
        return lower(ctx, *args, module=module, **options)

    return lower_named


if (0, 11) <= jax.__version_info__ < (0, 12):
    from jax.experimental.mosaic.gpu import core

    core._mosaic_gpu_lowering_rule = name_after_content(core._mosaic_gpu_lowering_rule)
