"""A Slurm job: write a batch script that a user can also read, keep and submit by hand, and submit it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from dualtune.base.errors import ConfigError, DiskError, EnvironmentFault
from dualtune.base.files import write_file
from dualtune.base.versions import VERSION
from dualtune.engine.card import launch_on
from dualtune.train.launch.supervise import OWN_REASONS, Work

# ----------------------------------------------------------------------------------------------------------------------
# The batch script that `dualtune launch --on slurm` submits; @NAME@ is a placeholder.

BODY = r"""#!/bin/bash
# Written by dualtune @VERSION@: dualtune launch --on slurm. To submit it again: sbatch THIS_FILE
@DIRECTIVES@

set -uo pipefail

python=@PYTHON@
config=@CONFIG@
run_dir=@RUN_DIR@
overrides=(@OVERRIDES@)
resume=@RESUME@
max_restarts=@MAX_RESTARTS@

# A task of an array is named by both numbers: the job's own number may stand for the whole array.
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
    job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
else
    job=$SLURM_JOB_ID
fi
say() { echo "slurm       $*"; }

if [[ ! -x $python ]]; then
    say "$python is not on $(hostname): every node must have the environment that the job was submitted from"
    exit 4
fi

# At the time limit (--signal), preemption or scancel, ask the step to save, once.
step='' asked='' interrupted=''
ask_to_save() {
    asked=yes interrupted=yes
    if [[ -n $step ]]; then kill -USR1 "$step"; fi
}
trap ask_to_save USR1 TERM

# srun does not take the processors of a task from sbatch.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

run_step() {  # one launcher on each node, until all have ended; its exit code in $code
    local from=$resume
    # From a given path only while the run has no checkpoint yet.
    set -- "$run_dir"/checkpoints/step-*
    if [[ -e $1 ]]; then from=auto; fi
    export first_node port=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0} + restarts) % 20000))
    # Do not end the other nodes when one has ended: the first one may still save. Processes that wait in vain end
    # by themselves.
    # shellcheck disable=SC2016  # the variables of the step are those of each node
    srun --kill-on-bad-exit=0 --wait=0 bash -c '
        exec "$0" -m dualtune.cli.main launch "$@" @RENDEZVOUS@' \
        "$python" "$config" --on local --procs @PROCS@ --max-restarts 0 --platform @PLATFORM@ \
        ${overrides[@]+"${overrides[@]}"} --resume "$from" &
    step=$!
    if [[ -n $asked ]]; then kill -USR1 "$step"; fi  # it came before there was a step
    while :; do
        interrupted=''
        wait "$step"
        code=$?
        if [[ -z $interrupted ]]; then break; fi  # a signal ends the wait, not the step
    done
    step=''
}

requeue() {
    # Slurm itself ends a job that is cancelled or preempted, and starts it again.
    local state
    state=$(squeue --noheader --job="$job" --format=%T)
    if [[ $state != RUNNING ]]; then
        say "saved; Slurm ends the job (${state:-gone})"
    elif scontrol requeue "$job"; then
        say "saved; requeued"
    else
        say "saved; it could not be requeued. To continue: sbatch the same script"
    fi
    exit 75
}

restarts=0
say "job $job on $SLURM_JOB_NODELIST, run $run_dir, started ${SLURM_RESTART_COUNT:-0} times before"
while :; do
    run_step
    case $code in
        0) exit 0 ;;
        75) requeue ;;
        138 | 143) if [[ -n $asked ]]; then requeue; fi ;;  # it died of the signal: there was nothing to save yet
        @FINAL@) exit "$code" ;;  # the run itself failed: a restart would end the same
    esac
    if [[ -n $asked ]] || ((restarts >= max_restarts)); then exit "$code"; fi
    restarts=$((restarts + 1))
    say "exit code $code; restart $restarts of $max_restarts"
done
"""

# ----------------------------------------------------------------------------------------------------------------------
# The options of a job, and its submission.

TASK = "%a"  # in --set, with --array: the number of the task
# The sbatch options that the script sets itself, and how to change each, or why it cannot be changed.
_OURS = {
    "nodes": "use --nodes", "N": "use --nodes", "ntasks-per-node": "use --procs", "ntasks": "use --procs",
    "n": "use --procs", "gpus-per-node": "use --gpus-per-node", "time": "use --time", "t": "use --time",
    "partition": "use --partition", "p": "use --partition", "account": "use --account", "A": "use --account",
    "array": "use --array", "a": "use --array", "signal": "use --grace",
    "requeue": "it is always on", "no-requeue": "preemption needs requeue", "open-mode": "it is always append",
    "chdir": "it is the directory you submit in", "D": "it is the directory you submit in",
    "output": "the log is next to run.dir", "o": "the log is next to run.dir",
    "job-name": "the job is named after run.dir", "J": "the job is named after run.dir",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slurm:
    """The request to the cluster."""

    nodes: int
    procs_per_node: int
    gpus_per_node: int | None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    array: str | None = None
    grace_s: int = 120  # between the warning and the time limit
    max_restarts: int = 3
    options: tuple[str, ...] = ()  # KEY=VALUE, or KEY, of sbatch

    def check(self) -> None:
        """Raise ConfigError for options that cannot be in a script, or that the script sets itself."""
        for option in self.options:
            key, _, value = option.partition("=")
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", key):
                raise ConfigError(
                    f"--sbatch-option: got {option!r}, allowed: KEY=VALUE or KEY, such as qos=long or exclusive"
                )
            if key in _OURS:
                raise ConfigError(f"--sbatch-option: got {option!r}, not allowed here: {_OURS[key]}")
            _quoted(value, f"--sbatch-option {key}")
        for name in ("time", "partition", "account", "array"):
            _quoted(getattr(self, name) or "", f"--{name}")

    def adapt(self, work: Work) -> Work:
        """Return the work for the job: on the platform of the nodes, with `--resume never` resolved now."""
        _, launch = launch_on("slurm", work.platform)
        platform = launch.platforms[0] if work.platform == "auto" and self.gpus_per_node else work.platform
        if platform == "cpu" and self.gpus_per_node:
            raise ConfigError(f"--gpus-per-node: got {self.gpus_per_node}, allowed only with --platform cuda, not cpu")
        if self.gpus_per_node and self.procs_per_node > self.gpus_per_node:
            allowed = f"1 to {self.gpus_per_node}, the GPUs of a node"
            raise ConfigError(f"--procs: got {self.procs_per_node}, allowed: {allowed}")
        if work.resume == "never" and self.array:
            raise ConfigError("--resume: got never, which is not allowed with --array: choose a new run.dir instead")
        return replace(work, platform=platform, resume=work.first_resume())


def place_of_script(run_dir: Path) -> Path:
    """Return a path next to the run directory: a run refuses a directory with other files."""
    return run_dir.with_name(f"{_stem(run_dir)}.sbatch")


def log_of(slurm: Slurm, work: Work) -> Path:
    """Return a path next to the run directory, with sbatch's patterns for the job and task numbers."""
    pattern = "%A_%a" if slurm.array else "%j"
    return Path(str(work.run_dir.with_name(_stem(work.run_dir))).replace("%", "%%") + f"-{pattern}.log")


def batch_script(slurm: Slurm, work: Work, cwd: Path) -> str:
    """Return the text of the batch script."""
    # Slurm reads the directives, bash the rest: each has its own way to quote.
    slurm.check()
    headers = [
        ("job-name", _stem(work.run_dir)), ("nodes", str(slurm.nodes)), ("ntasks-per-node", "1"),
        ("gpus-per-node", str(slurm.gpus_per_node) if slurm.gpus_per_node else None), ("time", slurm.time),
        ("partition", slurm.partition), ("account", slurm.account), ("array", slurm.array),
        ("signal", f"B:USR1@{slurm.grace_s}"), ("requeue", ""), ("open-mode", "append"), ("chdir", str(cwd)),
        ("output", str(log_of(slurm, work))), *(option.partition("=")[::2] for option in slurm.options),
    ]  # fmt: skip
    directives = [
        f"#SBATCH --{key}" + (f"={_quoted(value, key)}" if value else "") for key, value in headers if value is not None
    ]
    values = {
        "VERSION": VERSION,
        "DIRECTIVES": "\n".join(directives),
        "PYTHON": shlex.quote(sys.executable),
        "CONFIG": shlex.quote(str(work.config)),
        "RUN_DIR": _with_task(str(_array_dir(work.run_dir) if slurm.array else work.run_dir), slurm.array),
        "OVERRIDES": " ".join(_overrides(work, slurm.array)),
        "RESUME": shlex.quote(work.resume),
        "PLATFORM": shlex.quote(work.platform),
        "PROCS": str(slurm.procs_per_node),
        "MAX_RESTARTS": str(slurm.max_restarts),
        "FINAL": " | ".join(map(str, sorted(OWN_REASONS))),
        "RENDEZVOUS": _RENDEZVOUS if slurm.nodes > 1 else "",
    }
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], BODY)


def write_script(path: Path, text: str, work: Work) -> None:
    """Write the script and create the directory of the log: Slurm does not; the job would fail without a message."""
    for directory in (path.parent, work.run_dir.parent):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"{directory}: cannot be created: {error.strerror}") from error
    write_file(path, text)


def submit(path: Path) -> str:
    """Submit a script with sbatch. Return the job number."""
    program = shutil.which("sbatch")
    if program is None:
        raise EnvironmentFault(
            "sbatch was not found: submit on a login node of the cluster, or print the script with --print. "
            "On Debian, install it with: apt-get install slurm-client"
        )
    result = subprocess.run([program, "--parsable", str(path)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise EnvironmentFault(f"{path}: sbatch rejected it: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout.strip().partition(";")[0]


def _overrides(work: Work, array: str | None) -> list[str]:
    """Return the --set options as bash words. The run directory of an array task comes last, so it wins."""
    words = [word for override in work.overrides for word in ("--set", _with_task(override, array))]
    return [*words, "--set", '"run.dir=$run_dir"'] if array else words


def _array_dir(run_dir: Path) -> Path:
    """Return a separate run directory for each task. ConfigError if the task number is in a parent directory."""
    if TASK in str(run_dir.parent):
        raise ConfigError(f"run.dir: got {str(run_dir)!r}, allowed with --array: {TASK} only in its last part")
    return run_dir if TASK in run_dir.name else run_dir.with_name(f"{run_dir.name}-{TASK}")


def _with_task(text: str, array: str | None) -> str:
    """Return the text as a bash word, with the task number in it."""
    if not array or TASK not in text:
        return shlex.quote(text)
    parts = [shlex.quote(part) if part else "" for part in text.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts)


def _stem(run_dir: Path) -> str:
    return run_dir.name.replace(TASK, "").strip("-_.") or "dualtune"


def _quoted(value: str, name: str) -> str:
    """Quote a value for sbatch: quotes enclose a value with spaces, and a quote itself cannot be escaped."""
    if any(char in value for char in "\"'\\\n\r"):
        raise ConfigError(f"{name}: got {value!r}, allowed in a batch script: no quote, backslash or line break")
    return f'"{value}"' if re.search(r"[\s#]", value) else value


_RENDEZVOUS = (
    '--nodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" --rendezvous "$first_node:$port"'  # per node, in srun
)
