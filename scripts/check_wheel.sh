#!/usr/bin/env bash
# Build the wheel, install it into an environment of its own, and train one step with it, away from the source tree.
# Usage: BACKEND=torch scripts/check_wheel.sh PYTHON [WHEEL]   (without a wheel, it is built)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
if [ $# -gt 1 ]; then
    wheel=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
else
    "$work/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/dist" "$root"
    wheel=$(ls "$work"/dist/*.whl)
fi
pip=("$work/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --constraint "$root/constraints.txt")
if [ "$BACKEND" = torch ]; then "${pip[@]}" torch; fi
"${pip[@]}" "${wheel}[$BACKEND]"

cd "$work" # so that nothing is imported from the source tree
export PATH="$work/venv/bin:$PATH"
dualtune --help >/dev/null
dualtune train --demo --set train.steps=1 --set train.warmup=0 --set run.dir=run
dualtune adapter inspect run/adapter >/dev/null
dualtune config training_config_h100 >config.yaml # the configs travel with the wheel
for package in dualtune dualtune_torch dualtune_mlx; do # and so does the word that they have types
    python -m zipfile --list "$wheel" | grep "^$package/py.typed " >/dev/null
done
echo "wheel ok: $(basename "$wheel"), one step trained from a clean environment"
