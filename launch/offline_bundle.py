"""Packs what jaxrl and vLLM need on a GPU machine that reaches no package index, into a few small archives.

    python launch/offline_bundle.py base FOLDER             base.tar.xz (8 MiB): jaxrl's needs beyond an image with jax[cuda13] 0.11, flax,
                                                            optax, orbax, transformers 5, torch 2.11 (cu130), pyarrow, rich and httpx
    python launch/offline_bundle.py vllm FOLDER             vllm_0.tar.xz, vllm_1.tar.xz (94 MiB): vLLM for Hopper and dense models, and
                                                            vllm_moe.tar.xz (36 MiB) for models with experts; five to ten minutes
    python launch/offline_bundle.py unpack FOLDER TARGET    on that machine: unpacks every archive of FOLDER

There, in the checkout:

    export PYTHONPATH=$PWD:TARGET HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1

For Python 3.12 on x86-64 Linux; an index is needed only for packing. vLLM's wheel is built for a newer torch with its
stable ABI, and loads on 2.11 (H200, 2026-11-26). Left out of it: flashinfer, FlashAttention 2 and 4, flashmla,
deep_gemm, qutlass, and what only other models or endpoints need. Versions are pinned: for a newer vLLM make the list
anew from its METADATA and from `ldd -r` of its libraries beside the torch of that machine.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

BASE = """grain==0.2.18 array-record==0.8.6 ml-collections==1.1.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 tensorboardX==2.6.5
math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2 portpicker==1.6.0 pydantic==2.14.4 pydantic-core==2.50.5
annotated-types==0.8.0 typing-inspection==0.4.5 tzdata==2026.6""".split()
IMAGE = "jax absl-py numpy packaging transformers safetensors jinja2 pyarrow rich httpx msgpack torch".split()  # there, with what they need
LEAST = {"flax": "0.12.12", "optax": "0.2.8", "orbax-checkpoint": "0.12.8"}  # packed, and unpacked where the machine's are older
VLLM = """vllm==0.32.0 lm-format-enforcer==0.11.3 outlines-core==0.2.14 lark==1.2.2 compressed-tensors==0.17.0 depyf==0.20.0
fastapi==0.136.3 model-hosting-container-standards==0.1.16 mcp==2.3.0 mcp-types==2.3.0 cachetools==8.0.2 blake3==1.0.11
starlette==1.10.0 openai==3.57.0 httpx2==2.16.2 httpcore2==2.16.2 jiter==0.19.0 prometheus-fastapi-instrumentator==8.1.0
partial-json-parser==0.2.1.1.post7 jsonschema==4.26.0 pyzmq==27.3.0 msgspec==0.22.0 mistral-common==1.13.1 watchfiles==1.3.0
python-json-logger==4.2.0 pybase64==1.5.1 cbor2==6.3.0 ijson==3.6.0 setproctitle==1.3.8 oss-harmony==0.0.11 anthropic==2.14.0
opentelemetry-api==1.45.2 docstring-parser==0.18.0 sniffio==1.3.1 opentelemetry-sdk==1.45.2
opentelemetry-semantic-conventions==0.66b2 opentelemetry-exporter-otlp==1.45.2 opentelemetry-exporter-otlp-proto-grpc==1.45.2
opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
opentelemetry-exporter-http-transport==0.66b2 opentelemetry-proto==1.45.2 googleapis-common-protos==1.76.0
opentelemetry-semantic-conventions-ai==0.5.1 email-validator==2.4.0 dnspython==2.9.2 interegular==0.3.3
jsonschema-specifications==2025.9.1 pydantic-extra-types==2.11.1 pycountry==26.2.16 pydantic-settings==2.16.3 pyjwt==2.15.1
cryptography==50.0.2 cffi==2.1.1 python-dotenv==1.2.4 python-multipart==0.0.34 referencing==0.37.0 rpds-py==2026.9.1
sse-starlette==3.7.0 truststore==0.10.5 uvicorn==0.54.0 httptools==0.9.0 websockets==17.4 astor==0.8.1 jmespath==1.1.0
loguru==0.7.3 pycparser==3.12 xgrammar==0.2.8 llguidance==1.7.6 apache-tvm-ffi==0.1.11 py-cpuinfo""".split()
LIBRARIES = {  # of vLLM's compiled ones, those that are kept -> their archive
    "_C_stable_libtorch.abi3.so": "vllm_0", "_moe_C_stable_libtorch.abi3.so": "vllm_moe", "_vllm_fa3_C.abi3.so": "vllm_1",
    "cumem_allocator.abi3.so": "vllm_1", "fs_io_C.abi3.so": "vllm_1", "spinloop.abi3.so": "vllm_1"}
DROPPED = ("vllm/third_party/deep_gemm", "vllm/third_party/flashmla", "vllm/vllm-rs", "vllm/third_party/fmha_sm100")
PLATFORMS = [*(f"manylinux_2_{n}_x86_64" for n in range(5, 40)), "manylinux2014_x86_64", "manylinux1_x86_64", "any"]
# vLLM finds jaxrl's plugin by this entry point where jaxrl is not installed but on PYTHONPATH.
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: jaxrl\nVersion: 0.1.0\n",
          "entry_points.txt": "[vllm.general_plugins]\njaxrl = jaxrl.vllm_plugin:register\n"}


def download(names, folder: Path) -> list[Path]:
    flags = [word for name in PLATFORMS for word in ("--platform", name)]
    flags += [word for name in ("cp312", "abi3", "none") for word in ("--abi", name)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12",
                    "--implementation", "cp", *flags, "-d", str(folder), *names], check=True)
    return sorted(folder.glob("*.whl"))


def unzip(wheel: Path, site: Path) -> None:
    """Unpacks a wheel as pip does: what stands under *.data/{purelib,platlib} beside the rest, scripts and headers not."""
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            parts = PurePosixPath(name).parts
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                parts = parts[2:]
            if not name.endswith("/"):
                path = site.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(opened.read(name))


def pack(folder: Path, out: Path, wanted=lambda name: True) -> None:
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if wanted(name := path.relative_to(folder).as_posix()):
                archive.add(path, name)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


def base(out: Path, work: Path) -> None:
    for wheel in download(BASE, work / "wheels"):
        unzip(wheel, work / "all" / "site")
    plugin = work / "all" / "site" / "jaxrl-0.1.0.dist-info"
    plugin.mkdir()
    for name, text in PLUGIN.items():
        (plugin / name).write_text(text)
    download([f"{name}=={version}" for name, version in LEAST.items()], work / "all" / "newer")
    pack(work / "all", out / "base.tar.xz")


def vllm(out: Path, work: Path) -> None:
    for wheel in download(VLLM, work / "wheels"):
        unzip(wheel, work / "all" / "site")
    for archive in ("vllm_0", "vllm_1", "vllm_moe"):
        pack(work / "all", out / f"{archive}.tar.xz", lambda name, archive=archive: archive_of(name) == archive)


def archive_of(name: str) -> str | None:
    """The archive of a file of vLLM's bundle; None: it is left out."""
    name = name.removeprefix("site/")
    if name.startswith(DROPPED):
        return None
    return LIBRARIES.get(PurePosixPath(name).name) if name.startswith("vllm/") and name.endswith(".so") else "vllm_1"


def unpack(folder: Path, target: Path) -> None:
    archives = sorted(folder.glob("*.tar.xz"))
    if not archives:
        raise SystemExit(f"{folder}: no archives there")
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        with concurrent.futures.ProcessPoolExecutor() as pool:
            list(pool.map(extract, archives, [work] * len(archives)))
        if target.exists():
            shutil.copytree(Path(work) / "site", target, dirs_exist_ok=True)
        else:
            (Path(work) / "site").rename(target)
        for name, least in LEAST.items():
            for wheel in Path(work).glob(f"newer/{name.replace('-', '_')}-*.whl"):
                if numbers(version(name)) < numbers(least):
                    print(f"{name} {version(name)} is older than {least}: unpacked, too")
                    unzip(wheel, target)
    print(f"unpacked {', '.join(path.name for path in archives)} into {target}")


def extract(archive: Path, folder: str) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def main(what: str, *folders: str) -> None:
    paths = [Path(folder).resolve() for folder in folders]
    paths[0].mkdir(parents=True, exist_ok=True)
    if what == "unpack":
        paths[1].parent.mkdir(parents=True, exist_ok=True)
        unpack(*paths)
        return
    with tempfile.TemporaryDirectory() as work:
        {"base": base, "vllm": vllm}[what](paths[0], Path(work))


if __name__ == "__main__":
    if len(sys.argv) != (4 if sys.argv[1:2] == ["unpack"] else 3) or sys.argv[1] not in ("base", "vllm", "unpack"):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
