#!/usr/bin/env bash
# Measures sources × modes × decoders with `dali-stream bench`, each in a job of its own, so that one that runs out of
# memory does not take the others with it; then puts the reports together.
#
#   SOURCES='nfs=/data/droid hub=lerobot/droid_1.0.1' benchmarks/slurm/matrix.sh
#   RUN=here SOURCES=local=/data/droid benchmarks/slurm/matrix.sh      one after another on this machine, without SLURM
#
#   SOURCES      LABEL=URI ..., without blanks in them
#   MODES        default: single sarm action_chunk
#   DECODES      default: auto torchcodec
#   OUT_DIR      folder for reports and logs that the jobs can write to (default: bench in this folder)
#   BATCH_SIZE NUM_BATCHES WARMUP NUM_THREADS IMAGE_SIZE IMAGE_DTYPE DEVICE CACHE_DIR MEMORY_BUDGET DATA_FILES_ROOT
#                as the options of `dali-stream bench`; what is not set is left to it
#   GPUS CPUS MEM TIME PARTITION ACCOUNT
#                of a job (default: 1 GPU, 16 cores, 128G, 30 minutes); GPUS=0 for none
#   RUN          sbatch or here (default: sbatch)
#   VENV         Python environment with dali_stream (default: .venv in this folder)
#
# A measurement that fails leaves LABEL-MODE-DECODE.failed with what became of it, and its log beside it.
set -euo pipefail

die() {
    printf 'matrix.sh: %s\n' "$*" >&2
    exit 2
}

# One measurement, in its job.
measure() {
    local source=$1 uri=$2 mode=$3 decode=$4 name=$1-$3-$4 code=0 option value
    local arguments=(--source "$source" --mode "$mode" --decode "$decode" --out-dir "$OUT_DIR")
    for option in BATCH_SIZE NUM_BATCHES WARMUP NUM_THREADS IMAGE_SIZE IMAGE_DTYPE DEVICE CACHE_DIR MEMORY_BUDGET DATA_FILES_ROOT; do
        value=${!option:-}
        option=${option,,}
        [[ -z $value ]] || arguments+=("--${option//_/-}" "$value")
    done
    pending "$name"
    "$VENV/bin/dali-stream" bench "$uri" "${arguments[@]}" || code=$?
    if ((code == 0)); then
        rm "$OUT_DIR/$name.failed"
    else
        echo "failed with exit code $code" >"$OUT_DIR/$name.failed"
    fi
    return "$code"
}

# A report of before would pass for the one to come, and a job that is killed with its shell says nothing any more.
pending() {
    rm -f "$OUT_DIR/$1".{json,csv}
    echo 'did not end: killed, out of time, or still waiting' >"$OUT_DIR/$1.failed"
}

if [[ ${1:-} == measure ]]; then
    shift
    measure "$@"
    exit
fi
(($# == 0)) || die "'$1' is no argument; everything is set through the environment, see the head of this file"

read -ra sources <<<"${SOURCES:-}"
read -ra modes <<<"${MODES:-single sarm action_chunk}"
read -ra decodes <<<"${DECODES:-auto torchcodec}"
((${#sources[@]})) || die "SOURCES is not set; it is LABEL=URI ..., such as SOURCES='nfs=/data/droid hub=lerobot/droid_1.0.1'"
declare -A labels
for each in "${sources[@]}"; do
    [[ $each =~ ^[A-Za-z0-9_.]+=.+ ]] || die "SOURCES has '$each'; it is LABEL=URI, a label of letters, digits, _ and ."
    [[ -z ${labels[${each%%=*}]:-} ]] || die "SOURCES has the label '${each%%=*}' twice; give each source its own"
    labels[${each%%=*}]=taken
done
run=${RUN:-sbatch}
[[ $run == sbatch || $run == here ]] || die "RUN is '$run'; allowed: sbatch, here"
[[ $run == here ]] || command -v sbatch >/dev/null || die "there is no program sbatch; RUN=here measures on this machine"
export VENV=${VENV:-$PWD/.venv} OUT_DIR=${OUT_DIR:-$PWD/bench}
[[ -x $VENV/bin/dali-stream ]] || die "no program $VENV/bin/dali-stream; set VENV to an environment with dali_stream"
summarize=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../summarize.py")
mkdir -p "$OUT_DIR"

job=(sbatch --parsable --ntasks=1 --cpus-per-task="${CPUS:-16}" --mem="${MEM:-128G}" --time="${TIME:-30}")
[[ ${GPUS:-1} == 0 ]] || job+=(--gpus="${GPUS:-1}")
[[ -z ${PARTITION:-} ]] || job+=(--partition="$PARTITION")
[[ -z ${ACCOUNT:-} ]] || job+=(--account="$ACCOUNT")

jobs='' failed=0
for each in "${sources[@]}"; do
    for mode in "${modes[@]}"; do
        for decode in "${decodes[@]}"; do
            name=${each%%=*}-$mode-$decode
            one=("${BASH_SOURCE[0]}" measure "${each%%=*}" "${each#*=}" "$mode" "$decode")
            if [[ $run == here ]]; then
                printf '== %s\n' "$name"
                code=0
                bash "${one[@]}" || code=$?
                ((code != 130 && code != 143)) || exit "$code" # interrupted, and so is the rest
                ((code == 0)) || failed=1
            else
                pending "$name"
                if id=$("${job[@]}" --job-name="bench-$name" --output="$OUT_DIR/$name.log" --export=ALL "${one[@]}"); then
                    jobs+=:$id
                else
                    echo 'was not taken by sbatch' >"$OUT_DIR/$name.failed"
                    failed=1
                fi
            fi
        done
    done
done

if [[ $run == here ]]; then
    "$VENV/bin/python" "$summarize" "$OUT_DIR"
    exit "$failed"
fi
[[ -n $jobs ]] || die "sbatch took none of the jobs; what it says stands above"
sbatch --parsable --ntasks=1 --time=10 --job-name=bench-summary --output="$OUT_DIR/summary.log" --dependency="afterany$jobs" \
    --wrap="$(printf '%q ' "$VENV/bin/python" "$summarize" "$OUT_DIR")" >/dev/null
printf 'submitted; the table comes to %s\n' "$OUT_DIR/summary.log"
exit "$failed"
