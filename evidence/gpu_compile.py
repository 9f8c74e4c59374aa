"""Every GPU kernel down to Hopper machine code, on a machine without a GPU: registers, spills and serialised matrix
products.

python evidence/gpu_compile.py        in an environment of Python 3.12 with jax 0.11 or 0.12, and of the same version
                                      jax-cuda13-plugin and jax-cuda13-pjrt, with nvidia-cuda-nvcc, nvidia-nvvm and
                                      nvidia-cuda-nvdisasm beside it (all from PyPI, pip install --no-deps); a C
                                      compiler
python evidence/gpu_compile.py recurrence   that part: attention, experts or recurrence; into a file of its own

Mosaic's own compiler (in the CUDA plugin) and NVIDIA's assembler run; the driver, which they ask only for the chip, is
cuda_stand_in.c. What launching shows, this cannot.
"""

import ctypes
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(__file__))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from common import commit, record, table  # noqa: E402
from jax import export  # noqa: E402

from jaxrl.kernels.attention import cached, share  # noqa: E402
from jaxrl.kernels.attention.packed import gpu  # noqa: E402
from jaxrl.kernels.attention.packed.reference import Ids  # noqa: E402
from jaxrl.kernels.experts import api, experts  # noqa: E402
from jaxrl.kernels.experts import gpu as of_experts  # noqa: E402
from jaxrl.kernels.recurrence import chunks_of  # noqa: E402
from jaxrl.kernels.recurrence import gpu as of_recurrences  # noqa: E402
from jaxrl.models.feed_forward import GATED, clamped  # noqa: E402

LENGTH, HEADS, GROUPS, ROWS = 4096, 8, 2, 2
CASES = [(size, 0, 0.0) for size in (64, 80, 96, 128, 192, 256)] + [(128, 1024, 0.0), (128, 0, 30.0), (256, 1024, 50.0)]

LAYERS = [(128, 2048, 768, GATED["silu"], False), (8, 7168, 2048, GATED["silu"], False), (4, 2880, 2880, clamped(1.702, 7.0), True)]

# key heads, value heads, key size, value size, delta, tokens: Qwen3.5's, in a row and in a short one; Nemotron 3's, Granite 4's and Falcon-H1's
RULES = [(16, 32, 128, 128, True, 8192), (16, 32, 128, 128, True, 512), (8, 64, 128, 64, False, 8192), (1, 48, 128, 64, False, 8192)]


def modules(function, *shapes) -> list[bytes]:
    """The serialised Mosaic kernels of a function, lowered for CUDA."""
    import jax.experimental.mosaic.gpu  # noqa: F401 registers the dialects
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    text = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*shapes).mlir_module()
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mosaic_gpu_v2" in str(op.attributes["call_target_name"]):
            found.append(op.attributes["mhlo.backend_config"]["module"].value_bytes)
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        ir.Module.parse(text).operation.walk(visit)
    return found


def kernels():
    """(name, head size, window, soft-cap, serialised kernel)."""
    at = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    for size, window, softcap in CASES:
        q, k, v = (jax.ShapeDtypeStruct((ROWS, LENGTH, h, size), jnp.bfloat16) for h in (HEADS, GROUPS, GROUPS))
        options = dict(window=window, softcap=softcap, scale=size ** -0.5, interpret=False)

        def loss(q, k, v, positions, segments, options=options):
            ids = Ids(positions, positions, segments, segments, segments)
            return gpu.attention(q, k, v, ids, **options).astype(jnp.float32).sum()

        for name, module in zip(("forward", "dq", "dk, dv"), modules(jax.grad(loss, (0, 1, 2)), q, k, v, at, at),
                                strict=True):
            yield name, size, window, softcap, module
        query = jax.ShapeDtypeStruct((256, 1, HEADS, size), jnp.bfloat16)
        cache = jax.ShapeDtypeStruct((2, 256, LENGTH, GROUPS * size), jnp.bfloat16)
        where = jax.ShapeDtypeStruct((256, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        for module in modules(functools.partial(cached.gpu.attention, **options), query, cache, cache, *where):
            yield "decoding", size, window, softcap, module
        if window or size > cached.gpu.WIDEST:
            continue
        tiles = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), share([None] * 256, [0] * 256))

        def shared(q, k, v, positions, layer, tiles, options=options):
            return cached.gpu.attention(q, k, v, positions, layer, shared=tiles, **options)

        for module in modules(shared, query, cache, cache, *where, tiles):
            yield "decoding, shared prompts", size, window, softcap, module


def expert_kernels():
    """(name, hidden size x width, serialised kernel) of layers of experts: Qwen3-30B-A3B's, a part of DeepSeek-V3's and of
    gpt-oss's. Of the gradients' kernels one of each kind."""
    for count, size, width, activation, biased in LAYERS:
        low = jnp.bfloat16
        shapes = [((ROWS * LENGTH, 4), jnp.int32), ((ROWS * LENGTH, 4), jnp.float32), ((ROWS * LENGTH, size), low)]
        shapes += [((count, *s), low) for s in ((size, width), (size, width), (width, size))]
        shapes += [((count, n), low) for n in (width, width, size) if biased]

        def both(ids, gates, x, *w, activation=activation):
            call = lambda gates, x, *w: experts(x, ids, gates, *w[:3], biases=w[3:], activation=activation,  # noqa: E731
                                                implementation="gpu")
            y, back = jax.vjp(call, gates, x, *w)
            return y, back(y)

        with mock.patch.dict(api.IMPLEMENTATIONS, gpu=functools.partial(of_experts.serving, interpret=False)):
            found = modules(both, *(jax.ShapeDtypeStruct(*s) for s in shapes))
        for name, module in zip(("hidden", "out", "inner", "dx", "sums"), found, strict=False):
            yield f"experts: {name}", f"{size} x {width}", module


def recurrence_kernels():
    """(name, key x value size, serialised kernel) of recurrences: forward, forward that keeps the states, backward."""
    for heads, groups, key, value, delta, length in RULES:
        like = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((ROWS, length, *shape), dtype)  # noqa: E731, B023
        arrays = [like(heads, key), like(heads, key), like(groups, value)]
        arrays += [like(groups, dtype=jnp.float32)] * 2

        def loss(*arrays, segments, delta=delta):
            out, state = of_recurrences.recurrence(*arrays, chunks_of(segments), delta=delta, interpret=False)
            return out.astype(jnp.float32).sum() + state.sum()

        both = jax.value_and_grad(lambda *x: loss(*x[:-1], segments=x[-1]), tuple(range(5)))
        found = modules(both, *arrays, like(dtype=jnp.int32))
        for name, module in zip(("forward", "states", "backward"), found, strict=True):
            yield f"recurrence: {name}{'' if delta else ', no delta'}, {length} tokens", f"{key} x {value}", module


def compile_here(path: str) -> None:
    """In a process with the stand-in driver: hands the kernel to Mosaic's compiler, which writes its dumps, and
    ends."""
    import jax.experimental.mosaic.gpu.core  # noqa: F401 tells the compiler where its libraries are
    import jax_plugins.xla_cuda13 as plugin

    module = Path(path).read_bytes()
    library = ctypes.CDLL(plugin._get_library_path())
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.c_void_p
    library.MosaicGpuCompile(module, len(module))


def assembled(module: bytes, driver: Path) -> dict:
    """What the assembler says of one kernel, and its instructions of matrix products and of spills inside loops."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "module").write_bytes(module)
        import nvidia

        tools = next(p for root in nvidia.__path__ for p in Path(root).glob("*/bin") if (p / "ptxas").exists())
        env = os.environ | {"LD_LIBRARY_PATH": str(driver), "PATH": f"{tools}:{os.environ['PATH']}",
                            "MOSAIC_GPU_DUMP_TO": folder,
                            "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
        subprocess.run([sys.executable, __file__, f"{folder}/module"], env=env, capture_output=True)
        said = next(Path(folder).glob("*.ptxas")).read_text()
        code = next(Path(folder).glob("*.sass*")).read_text().splitlines()
    number = lambda pattern: int(re.search(pattern, said).group(1))  # noqa: E731
    return {"registers": number(r"Used (\d+) registers"), "spilled_bytes": number(r"(\d+) bytes spill stores"),
            "serialised": "serialized" in said, "loops": loops(code)}


def loops(code: list[str]) -> list[dict]:
    """The loops with matrix products (without a mask, then with one): instructions, products, loads and stores of
    spills."""
    start, lines, found = {}, [], []
    for text in code:
        if label := re.match(r"^(\.L_x_\d+):", text):
            start[label.group(1)] = len(lines)
        elif "/*" in text:
            lines.append(text)
            if (jump := re.search(r"BRA `\((\.L_x_\d+)\)", text)) and jump.group(1) in start:
                body = lines[start[jump.group(1)]:]
                count = lambda *names, body=body: sum(any(n in x for n in names) for x in body)  # noqa: E731
                if count("HGMMA") and not count("EXIT"):  # behind the exit stand waits that jump back into the code
                    found.append({"instructions": len(body), "products": count("HGMMA"), "spills": count("STL", "LDL")})
    return found


def all_of(part: str):
    """(labels of a row, serialised kernel)."""
    if part in ("", "attention"):
        for name, size, window, softcap, module in kernels():
            yield {"kernel": name, "head_size": size, "window": window, "softcap": softcap}, module
    if part in ("", "experts"):
        for name, size, module in expert_kernels():
            yield {"kernel": name, "expert": size}, module
    if part in ("", "recurrence"):
        for name, size, module in recurrence_kernels():
            yield {"kernel": name, "recurrence": size}, module


def main(part: str):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(__file__).with_name("cuda_stand_in.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", str(source)], check=True)
        results, at = [], commit()
        for labels, module in all_of(part):
            results.append({**labels, **assembled(module, Path(folder))})
            print(results[-1], flush=True)
    sizes = [r.get("head_size", r.get("expert", r.get("recurrence"))) for r in results]
    each = lambda r, what: " / ".join(str(loop[what]) for loop in r["loops"])  # noqa: E731
    rows = [[r["kernel"], size, r.get("window", ""), r.get("softcap", ""), r["registers"], r["spilled_bytes"],
             "yes" if r["serialised"] else "no", each(r, "instructions"), each(r, "spills")]
            for r, size in zip(results, sizes, strict=True)]
    table(["kernel", "head, expert, or keys and values", "window", "soft-cap", "registers", "spilled B", "serialised",
           "instructions per loop", "spills in it"], rows)
    record("gpu_compile" + f"_{part}" * bool(part), results, at)


if __name__ == "__main__":
    if sys.argv[1:] and Path(sys.argv[1]).is_file():
        compile_here(sys.argv[1])
    else:
        main(*sys.argv[1:] or [""])
