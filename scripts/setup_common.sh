# shellcheck shell=bash
# What setup_m4.sh and scripts/setup_cuda.sh share. To be sourced from the root of the repository.
# Plain enough for bash 3.2, which is the bash of macOS.

dry_run=no
# .venv is also what `make` uses. Its two marks say to make that Python and packages are in place.
readonly VENV=.venv

say() { printf '%s\n' "$*"; }

# 4 is what every command of dualtune ends with when the machine lacks something, and 2 for wrong usage.
fail() {
  printf 'Error: %s\n' "$*" >&2
  exit 4
}

# What the machine lacks ends the script, but not a dry run, which is to show all commands.
stop() {
  if [ "$dry_run" = no ]; then fail "$@"; fi
  say "stop  $* (the real run would end here)"
}

wrong_usage() {
  printf 'Error: got %s. Allowed: %s\n' "$1" "$2" >&2
  exit 2
}

# Print a command, and run it unless this is a dry run.
run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  if [ "$dry_run" = no ]; then "$@"; fi
}

# Whether an interpreter is new enough and can make environments; $2 is a further condition, in Python.
python_fits() {
  "$1" -c "import sys, platform, venv, ensurepip; sys.exit(not (sys.version_info >= (3, 11) and $2))" 2>/dev/null
}

# Print the first interpreter that fits: $PYTHON, if it is set, and no other.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.13 python3.11 python3.14 python3}; do
    if command -v "$candidate" >/dev/null && python_fits "$candidate" "$1"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

# Make the environment with interpreter $1, or keep the one that is there if it fulfils $2.
make_environment() {
  if [ ! -x "$VENV/bin/python" ]; then
    run "$1" -m venv "$VENV"
  elif python_fits "$VENV/bin/python" "$2"; then
    say "ok    $VENV is there already and is kept"
  else
    stop "$VENV holds a Python that does not fit. Remove it and start again: rm -rf $VENV && $0"
  fi
}

# pip with the versions that CI tests.
pip_install() {
  run "$VENV/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt "$@"
}

mark_as_made() { run touch "$VENV/.python" "$VENV/.demo"; }
