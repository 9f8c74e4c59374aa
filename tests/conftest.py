"""Tests run on the CPU; an fp32 claim is tested with fp32 matmuls; arrays of different ranks meet only where the code
says how (jax_numpy_rank_promotion)."""

import compileall
import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread for numpy's and torch's matrix products: two workers of pytest-xdist share the cores, and OpenBLAS's threads wait for
# each other by spinning (a numpy engine took six times the processor time).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")  # of the processes that tests start, too
# They read the bytecode of jaxrl and write none: Python takes a file that a test writes twice within a second for the first. So it
# is written here, once: in a fresh clone every process would compile what it imports.
if "PYTEST_XDIST_WORKER" not in os.environ and "PYTHONDONTWRITEBYTECODE" not in os.environ:
    compileall.compile_dir(Path(__file__).parents[1] / "jaxrl", quiet=2)
os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "tests")
# pytest's own, of assertions that it rewrote, is written while tests are collected, unless the user's environment says no.
sys.dont_write_bytecode = os.environ["PYTHONDONTWRITEBYTECODE"] != "tests"
# Programs that were compiled before, by this run or an earlier one, are not compiled again, the small ones neither: a second
# run of the tests takes a third of the time. Runs look there anyway.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "jaxrl" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Programs compile in a quarter of the time without LLVM's optimisations, in one piece, and (a flag of the jax of Python 3.11)
# by the older of XLA's two ways to write loops. Sections of .ci/run test those that users run.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
         "--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if "optimization_level" not in (given := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *FLAGS])

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxrl.telemetry.compilations import give_back  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_modifyitems(items):
    """Files that take longest first: with `pytest -n` a file is the unit of work."""
    first = ("test_options_algorithm.py", "test_recipes.py", "test_options_runs.py", "test_models_experts.py",
             "test_fork.py", "test_training.py", "test_plan.py")
    items.sort(key=lambda item: first.index(item.path.name) if item.path.name in first else len(first))


@pytest.fixture(scope="module", autouse=True)
def no_mesh():
    """A file begins under no mesh, and the one its tests set ends with it: which file came before is by chance."""
    with jax.set_mesh(None):
        yield


def pytest_collection_finish():
    """What was imported lives as long as the process: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    sys.dont_write_bytecode = True


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


LAST_CLEARED = {"bytes": 1 << 29}


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs end with a file's tests once the process has grown by 512 MiB since the last time: without this it
    grows to 5 GiB, and clearing after every file compiles programs again that several files share."""
    yield
    if resident_bytes() > LAST_CLEARED["bytes"] + (1 << 29):
        jax.clear_caches()
        gc.collect()
        give_back()
        LAST_CLEARED["bytes"] = resident_bytes()


@pytest.fixture(scope="module")
def the_mesh_as_it_was():
    """For files whose jobs set a mesh and a precision for the whole process."""
    mesh, precision = jax.sharding.get_mesh(), jax.config.jax_default_matmul_precision
    yield
    jax.set_mesh(mesh)
    jax.config.update("jax_default_matmul_precision", precision)


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def nodes(cluster):
    """Two nodes of it, which a test may remove; the connection to it ends with the test."""
    import ray
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    yield nodes
    ray.shutdown()
    for node in nodes:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)
