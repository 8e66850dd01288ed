#!/usr/bin/env bash
# The five validation tiers on an NVIDIA GPU: looks at the driver, then runs `dualtune validate` tier by tier.
set -uo pipefail

readonly ALL=(quick convergence memory extended)

usage() {
    cat <<'TEXT'
usage: scripts/gpu-test.sh COMMAND [OPTIONS]

Commands
  quick        SmolLM2-135M, 10 steps: the pipeline runs
  convergence  SmolLM2-135M, 100 steps: the loss falls by 30 %
  memory       TinyLlama-1.1B, 50 steps: a 4-bit model stays below 2 GB
  extended     TinyLlama-1.1B, 500 steps: no leak, no drift, no slowdown
  full         Llama-2-7B, 1000 steps: below 12 GB, with checkpoints
  all          quick, convergence, memory, extended
  info         the GPU, its driver and memory, and what each tier needs
  fetch        download the models, and write the data that the tiers train on
  help         this text

Options
  --check-vram  before a tier, compare the free memory with what it needs; too little is a failure
  --continue    go on after a failure, and past tiers that lack memory; the exit code is still 1
  --verbose     show everything that a tier prints, not only when it fails
  --dry-run     say what would be run or downloaded, and do nothing

Exit code: 0 all passed, 1 something failed, 2 the command line is wrong. NO_COLOR=1 turns colours off.
MB of memory are those of nvidia-smi, 2^20 bytes. The first GPU of CUDA_VISIBLE_DEVICES is looked at.
TEXT
}

# --- data -------------------------------------------------------------------------------------------------------------

vram_mb() { # what a tier may take, as in dualtune/doctor/validate/tiers.py
    case $1 in
        quick | convergence) echo 256 ;;
        memory | extended) echo 2000 ;;
        full) echo 12000 ;;
    esac
}

title() {
    case $1 in
        quick) echo "GPU quick iteration" ;;
        convergence) echo "Loss convergence test" ;;
        memory) echo "TinyLlama memory validation" ;;
        extended) echo "TinyLlama extended training" ;;
        full) echo "Llama-2-7B full validation" ;;
    esac
}

models() { # hub id, size, remark
    echo "HuggingFaceTB/SmolLM2-135M|about 280 MB|quick, convergence"
    echo "TinyLlama/TinyLlama-1.1B-Chat-v1.0|about 2 GB|memory, extended"
    echo "meta-llama/Llama-2-7b-hf|about 13 GB|full; accept its terms on the hub, then: hf auth login"
}

# --- output -----------------------------------------------------------------------------------------------------------

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
    green=$'\e[32m' red=$'\e[31m' blue=$'\e[34m' plain=$'\e[0m'
else
    green='' red='' blue='' plain=''
fi
good() { echo "${green}✓${plain} $*"; }
bad() { echo "${red}✗${plain} $*" >&2; }
note() { echo "${blue}ℹ${plain} $*"; }

now_ms() { # EPOCHREALTIME is of bash 5; before it there are whole seconds
    local time=${EPOCHREALTIME:-}
    if [[ -n $time ]]; then echo $((${time//[.,]/} / 1000)); else echo $((SECONDS * 1000)); fi
}

seconds_since() {
    local ms=$(($(now_ms) - $1))
    printf '%d.%d' $((ms / 1000)) $((ms % 1000 / 100))
}

# --- the GPU ----------------------------------------------------------------------------------------------------------

gpu() { # gpu FIELD: what nvidia-smi says of the first visible GPU
    local found select=()
    [[ -n ${CUDA_VISIBLE_DEVICES:-} ]] && select=(-i "${CUDA_VISIBLE_DEVICES%%,*}")
    found=$(nvidia-smi ${select[@]+"${select[@]}"} --query-gpu="$1" --format=csv,noheader,nounits) || return 1
    echo "${found%%$'\n'*}"
}

find_gpu() {
    local name
    if ! command -v nvidia-smi >/dev/null; then
        bad "CUDA is not available: nvidia-smi was not found. Install the NVIDIA driver; see: dualtune check-gpu"
        return 1
    fi
    if ! name=$(gpu name) || [[ -z $name ]]; then
        bad "CUDA is not available: nvidia-smi sees no GPU. See: dualtune check-gpu"
        return 1
    fi
    good "CUDA detected via nvidia-smi"
    echo "  $name"
}

check_vram() { # check_vram TIER
    local free needed
    needed=$(vram_mb "$1")
    if ! free=$(gpu memory.free) || ! [[ $free =~ ^[0-9]+$ ]]; then
        bad "nvidia-smi does not say how much memory is free (it says: ${free:-nothing})"
        return 1
    fi
    note "GPU memory: $free MB free, $needed MB needed for $1"
    if ((free < needed)); then
        bad "Too little GPU memory for $1: $free free, $needed needed → short by $((needed - free)) MB"
        return 1
    fi
    good "Sufficient GPU memory: $free free, $needed needed → $((free - needed)) MB buffer"
}

# --- commands ---------------------------------------------------------------------------------------------------------

run_tier() { # run_tier TIER
    local tier=$1 command start status log
    command=("$dualtune" validate --tier "$tier" --device cuda)
    if ((dry_run)); then
        echo "would run: dualtune ${command[*]:1}   (needs $(vram_mb "$tier") MB of GPU memory)"
        return 0
    fi
    if ((check)); then check_vram "$tier" || return 1; fi
    log=$(mktemp) || return 1
    note "Starting: $(title "$tier")"
    start=$(now_ms)
    if ((verbose)); then
        "${command[@]}" 2>&1 | tee "$log"
        status=${PIPESTATUS[0]}
    else
        "${command[@]}" >"$log" 2>&1
        status=$?
    fi
    if ((status)); then
        ((verbose)) || cat "$log" >&2
        bad "$(title "$tier") failed in $(seconds_since "$start")s (exit code $status)"
    else
        good "$(title "$tier") passed in $(seconds_since "$start")s"
        ((verbose)) || grep '^Loss convergence: ' "$log"
    fi
    rm -f "$log"
    return $((status != 0))
}

run_tiers() { # run_tiers TIER...
    local tier failed=()
    if ((!dry_run)); then find_gpu || return 1; fi
    for tier in "$@"; do
        run_tier "$tier" && continue
        failed+=("$tier")
        ((go_on)) || break
    done
    ((${#failed[@]} == 0)) && return 0
    bad "Failed: ${failed[*]}"
    return 1
}

info() {
    local tier status=0
    if find_gpu; then
        note "driver $(gpu driver_version), $(gpu memory.free) of $(gpu memory.total) MB free"
    else
        status=1
    fi
    for tier in "${ALL[@]}" full; do printf '  %-12s %6d MB\n' "$tier" "$(vram_mb "$tier")"; done
    return $status
}

fetch() {
    local model size remark status=0 files=("*.safetensors" "*.safetensors.index.json" "*.json" "tokenizer.model")
    while IFS='|' read -r model size remark; do
        if ((dry_run)); then
            echo "would download: hf download $model   ($size; for $remark)"
        else
            note "$model, $size, for $remark"
            hf download "$model" --include "${files[@]}" </dev/null || { bad "$model was not downloaded"; status=1; }
        fi
    done < <(models)
    if ((dry_run)); then
        echo "would write: data/explain_concepts.jsonl, made-up rows: dualtune validate --write-data"
    else
        "$dualtune" validate --write-data data/explain_concepts.jsonl || status=1
    fi
    return $status
}

check=0 verbose=0 go_on=0 dry_run=0 name=''
for argument in "$@"; do
    case $argument in
        --check-vram) check=1 ;;
        --verbose) verbose=1 ;;
        --continue) go_on=1 ;;
        --dry-run) dry_run=1 ;;
        -h | --help) name=help ;;
        -*)
            bad "unknown option: $argument. See: scripts/gpu-test.sh help"
            exit 2
            ;;
        *)
            if [[ -n $name ]]; then
                bad "one command at a time: $name and $argument"
                exit 2
            fi
            name=$argument
            ;;
    esac
done

dualtune=$(command -v dualtune) || dualtune=$(dirname "$0")/../.venv/bin/dualtune

case $name in
    quick | convergence | memory | extended | full) run_tiers "$name" ;;
    all) run_tiers "${ALL[@]}" ;;
    info) info ;;
    fetch) fetch ;;
    help) usage ;;
    *)
        bad "unknown command: ${name:-none given}. Allowed: quick, convergence, memory, extended, full, all, info, fetch, help"
        exit 2
        ;;
esac
