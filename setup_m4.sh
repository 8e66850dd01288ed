#!/usr/bin/env bash
# Set up dualtune on a Mac with Apple silicon: check the machine, install into .venv, test Metal, print the next steps.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=scripts/setup_common.sh
. scripts/setup_common.sh

readonly LEAST_MACOS=14 # of MLX
readonly LEAST_GIB=16 GOOD_GIB=32
native='platform.machine() == "arm64"' # the condition for a Python
python=python3

usage() {
  cat <<'EOF'
Usage: ./setup_m4.sh [--dry-run] [--help]

Sets up dualtune with MLX on a Mac with Apple silicon (M1 or later), macOS 14 or newer, 16 GiB of memory or more:
creates .venv, installs dualtune there, multiplies two matrices on the GPU and checks the environment.
It can be run again at any time.

  --dry-run   print the commands without running them; works on every machine
  --help      print this help

PYTHON=/path/to/python3.12 ./setup_m4.sh   uses that interpreter.
Exit code: 0 ready, 2 wrong usage, 4 the machine lacks something; 0 after a dry run.
EOF
}

check_mac() {
  if [ "$(uname -m)" = arm64 ]; then
    say "ok    Apple silicon: $(sysctl -n machdep.cpu.brand_string)"
  elif [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" = 1 ]; then
    stop "this terminal runs under Rosetta, as if the Mac had an Intel chip. Start again with:" \
      "arch -arm64 /bin/bash $0 (or switch off 'Open using Rosetta' in the terminal's Get Info)"
  else
    stop "this Mac has an Intel chip ($(uname -m)); MLX needs Apple silicon"
  fi

  local macos gib
  macos=$(sw_vers -productVersion)
  if [ "${macos%%.*}" -lt "$LEAST_MACOS" ]; then
    stop "got macOS $macos, MLX needs $LEAST_MACOS or newer. Update in System Settings > General > Software Update"
  else
    say "ok    macOS $macos"
  fi

  gib=$(($(sysctl -n hw.memsize) / 1024 / 1024 / 1024))
  if [ "$gib" -lt "$LEAST_GIB" ]; then
    stop "got $gib GiB of unified memory, at least $LEAST_GIB is needed, $GOOD_GIB is good"
  elif [ "$gib" -lt "$GOOD_GIB" ]; then
    say "note  $gib GiB of unified memory, $GOOD_GIB is good: set data.max_length and train.micro_batch_tokens to 1024"
  else
    say "ok    $gib GiB of unified memory"
  fi

  if python=$(find_python "$native"); then
    say "ok    $("$python" --version), $python"
  else
    stop "no Python 3.11 or newer for arm64 was found. Install one: brew install python@3.12"
  fi
}

set_up() {
  make_environment "$python" "$native"
  pip_install --editable '.[mlx]'
  mark_as_made
  run "$VENV/bin/dualtune" check-gpu --probe ||
    fail "MLX is installed, but the GPU does not work; the fix is printed above"
  run "$VENV/bin/dualtune" check-env --for m4 ||
    fail "something is missing; the fixes are printed above, after each ->"
}

what_next() {
  cat <<EOF

Next:
  source $VENV/bin/activate
  make demo                                                     fine-tune the tiny model that is part of dualtune
  dualtune config training_config_m4 > config.yaml              then set data.train in it
  dualtune check-config config.yaml                             does it fit this Mac?
  dualtune train config.yaml
docs/setup.md has the details, and what to do if memory is short.
EOF
}

for option in "$@"; do
  case "$option" in
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit 0 ;;
    *) wrong_usage "$option" "--dry-run, --help" ;;
  esac
done

if [ "$(uname -s)" = Darwin ]; then
  check_mac
elif [ "$dry_run" = yes ]; then
  say "This is $(uname -s), not a Mac: the checks of chip, macOS and memory are skipped. On a Mac these commands would run:"
  native=True
else
  fail "this is $(uname -s), not a Mac. On Linux: scripts/setup_cuda.sh. To see what this script does: $0 --dry-run"
fi
set_up
if [ "$dry_run" = yes ]; then
  say "Nothing was run or changed."
else
  what_next
fi
