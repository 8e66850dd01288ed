"""The batch script that `dualtune launch --on slurm` submits; @NAME@ is a placeholder."""

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
