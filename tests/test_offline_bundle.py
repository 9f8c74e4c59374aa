"""launch/offline_bundle.py, without an index: what it packs is what jaxrl needs, and unpacks to packages that load."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "launch"))

import offline_bundle as bundle  # noqa: E402


def test_every_dependency_is_on_the_image_or_in_the_archive():
    """At a version that pyproject.toml allows."""
    packed = dict(pin.lower().split("==") for pin in bundle.BASE) | {name: version for name, version in bundle.LEAST.items()}
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for need in needs:
        name, least = re.match(r"([\w.-]+)>=([\d.]+)", need).groups()
        assert name.lower() in packed or name in bundle.IMAGE, name
        if name.lower() in packed:
            assert bundle.numbers(packed[name.lower()]) >= bundle.numbers(least), need
    assert not {name.lower() for name in bundle.IMAGE} & {pin.partition("==")[0].lower() for pin in bundle.BASE}


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return path


@pytest.mark.full
def test_archives_unpack_beside_each_other(tmp_path, monkeypatch):
    """Packages in two archives, one of them a package's data folder; a newer package only where the machine's is older."""
    site = tmp_path / "all/site"
    bundle.unzip(wheel(tmp_path / "one.whl", **{"one_b/__init__.py": "number = 1\n", "one-1.0.data/purelib/one_c/__init__.py": "number = 2\n",
                                                "one-1.0.data/scripts/one": "#!python\n"}), site)
    assert not list(tmp_path.rglob("scripts"))
    out = tmp_path / "out"
    out.mkdir()
    newer = tmp_path / "all/newer"
    newer.mkdir()
    for name in bundle.LEAST:
        wheel(newer / f"{name.replace('-', '_')}-9-py3-none-any.whl", **{f"{name.replace('-', '_')}_new.py": ""})
    bundle.pack(tmp_path / "all", out / "base.tar.xz", lambda name: "one_c" not in name)
    bundle.pack(tmp_path / "all", out / "more.tar.xz", lambda name: "one_c" in name)
    monkeypatch.setattr(bundle.concurrent.futures, "ProcessPoolExecutor", bundle.concurrent.futures.ThreadPoolExecutor)  # jax has threads here
    monkeypatch.setattr(bundle, "version", lambda name: "0.1" if name == "flax" else "99")
    for _ in range(2):  # into a folder that is there, too
        bundle.unpack(out, tmp_path / "target")
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["flax_new.py", "one_b", "one_c"]
    code = "import one_b, one_c; print(one_b.number + one_c.number)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path / "target")})
    assert done.stdout == "3\n"
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no archives there"):
        bundle.unpack(tmp_path / "empty", tmp_path / "target")


@pytest.mark.parametrize("name, archive", [
    ("site/vllm/_C_stable_libtorch.abi3.so", "vllm_0"), ("site/vllm/_moe_C_stable_libtorch.abi3.so", "vllm_moe"), ("site/vllm/config.py", "vllm_1"),
    ("site/vllm/third_party/deep_gemm/x.py", None), ("site/vllm/_flashmla_C.abi3.so", None), ("site/xgrammar/bindings.so", "vllm_1")])
def test_where_a_file_of_vllm_goes(name, archive):
    assert bundle.archive_of(name) == archive
