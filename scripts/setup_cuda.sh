#!/usr/bin/env bash
# Set up dualtune on Linux with an NVIDIA GPU: look at the driver, install the torch that it can run, try the GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup_common.sh
. scripts/setup_common.sh

readonly LEAST_DRIVER=530  # CUDA 12.1
readonly CUDA13_DRIVER=580 # torch on PyPI is built for CUDA 13
readonly WHEELS=https://download.pytorch.org/whl
cpu=no
wheels="" # where torch is from, if not from PyPI
python=python3

usage() {
  cat <<'EOF'
Usage: scripts/setup_cuda.sh [--cpu] [--dry-run] [--help]

Sets up dualtune with PyTorch on Linux (WSL too) with an NVIDIA GPU: checks the driver, makes .venv, installs the torch
that driver and GPU can run, then dualtune, multiplies two matrices on the GPU and checks the environment.
It can be run again at any time.

  --cpu       no GPU: install the smaller torch for the CPU
  --dry-run   print the commands and run none of them; works on every machine
  --help      print this

PYTHON=/path/to/python3.12 scripts/setup_cuda.sh   takes that interpreter.
Exit code: 0 ready, 2 wrong usage, 4 the machine lacks something; 0 after a dry run.
EOF
}

# Compare two versions such as 7.5 and 12.0: is $1 below $2?
below() {
  [ "${1%%.*}" -lt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "${1#*.}" -lt "${2#*.}" ]; }
}

check_driver() {
  PATH=$PATH:/usr/lib/wsl/lib # where WSL keeps it
  local answer
  if ! command -v nvidia-smi >/dev/null; then
    stop "nvidia-smi was not found: there is no NVIDIA driver here. Install driver $CUDA13_DRIVER or newer" \
      "(https://www.nvidia.com/drivers; for WSL, on Windows), or take the CPU: $0 --cpu"
  elif ! answer=$(nvidia-smi --query-gpu=driver_version,compute_cap,name --format=csv,noheader 2>&1); then
    stop "nvidia-smi does not work: $answer. After an update of the driver a restart helps. Or take the CPU: $0 --cpu"
  else
    check_gpus "$answer"
  fi
}

check_gpus() {
  local driver version capability name lowest="" highest=""
  while IFS=, read -r version capability name; do
    driver=$version # the same for all GPUs
    capability=${capability# }
    say "ok    ${name# }, compute capability $capability, driver $driver"
    if [ -z "$lowest" ] || below "$capability" "$lowest"; then lowest=$capability; fi
    if [ -z "$highest" ] || below "$highest" "$capability"; then highest=$capability; fi
  done <<<"$1"

  local major=${driver%%.*}
  if [ "$major" -lt "$LEAST_DRIVER" ]; then
    stop "got driver $driver, at least $LEAST_DRIVER (CUDA 12.1) is needed; $CUDA13_DRIVER or newer is good"
  elif below "$highest" 7.0; then
    stop "got compute capability $highest, at least 7.0 is needed. Take the CPU: $0 --cpu"
  elif [ "$major" -lt "$CUDA13_DRIVER" ] && ! below "$highest" 10.0; then
    stop "got driver $driver; a GPU of compute capability $highest needs $CUDA13_DRIVER or newer"
  elif [ "$major" -lt "$CUDA13_DRIVER" ] || below "$lowest" 7.5; then
    wheels=cu126
    say "note  torch for CUDA 13 does not run here (it needs driver $CUDA13_DRIVER and compute capability 7.5);" \
      "the one for CUDA 12.6 is taken"
  fi
}

check_python() {
  if python=$(find_python True); then
    say "ok    $("$python" --version), $python"
  else
    stop "no Python 3.11 or newer with venv was found. Install one: sudo apt install python3 python3-venv"
  fi
}

set_up() {
  make_environment "$python" True
  # torch first and alone, so that nothing that depends on it can choose another build. Of equal versions pip takes the
  # one with a local tag (2.13.0+cu126 before 2.13.0), so the further index wins.
  if [ -n "$wheels" ]; then
    pip_install torch --extra-index-url "$WHEELS/$wheels"
  else
    pip_install torch
  fi
  pip_install --editable '.[torch]'
  mark_as_made
  if [ "$cpu" = yes ]; then
    run "$VENV/bin/dualtune" check-env --for cpu || missing
  else
    # 4 GB: whether the GPU works at all. Which model fits is asked later.
    run "$VENV/bin/dualtune" check-gpu --probe --require-memory 4GB ||
      fail "torch is installed, but the GPU does not work; the fix is printed above"
    run "$VENV/bin/dualtune" check-env --for auto || missing
  fi
}

missing() { fail "something is missing; the fixes are printed above, after each ->"; }

what_next() {
  cat <<EOF

Next:
  source $VENV/bin/activate
  make demo                                        fine-tunes a tiny model that is part of dualtune
EOF
  if [ "$cpu" = yes ]; then
    say "  dualtune train configs/cpu_smoke.yaml            the same, by a config to begin from"
  else
    cat <<EOF
  dualtune check-gpu                               which model fits, and which config to take
  dualtune check-config configs/rtx_16gb.yaml      does it fit this machine?
  dualtune validate --tier quick                   the whole pipeline, on this machine
docs/setup.md says more.
EOF
  fi
}

for option in "$@"; do
  case "$option" in
    --cpu) cpu=yes wheels=cpu ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit 0 ;;
    *) wrong_usage "$option" "--cpu, --dry-run, --help" ;;
  esac
done

if [ "$(uname -s)" = Linux ]; then
  if [ "$cpu" = no ]; then check_driver; fi
  check_python
elif [ "$dry_run" = yes ]; then
  say "This is $(uname -s), not Linux: the checks of the driver are skipped. On Linux these commands would run:"
else
  fail "this is $(uname -s), not Linux. On a Mac: ./setup_m4.sh. To see what this script does: $0 --dry-run"
fi
set_up
if [ "$dry_run" = yes ]; then
  say "Nothing was run or changed."
else
  what_next
fi
