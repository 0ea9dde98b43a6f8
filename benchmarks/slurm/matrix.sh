#!/usr/bin/env bash
# Measures all combinations of sources, modes and decoders with `dali-stream bench`. Each measurement runs in a separate job, so
# that the others continue if it runs out of memory. A last job summarizes the reports.
#
#   SOURCES='nfs=/data/droid hub=lerobot/droid_1.0.1' benchmarks/slurm/matrix.sh
#   RUN=here SOURCES=local=/data/droid benchmarks/slurm/matrix.sh      one after another on this machine, without SLURM
#
#   SOURCES      LABEL=URI ...; labels and URIs must not contain spaces
#   MODES        default: single sarm action_chunk
#   DECODES      default: auto torchcodec
#   OUT_DIR      folder for reports and logs, to which the jobs can write (default: bench in the current folder)
#   BATCH_SIZE NUM_BATCHES WARMUP NUM_THREADS IMAGE_SIZE IMAGE_DTYPE DEVICE CACHE_DIR MEMORY_BUDGET DATA_FILES_ROOT
#                options of `dali-stream bench`, which uses its defaults for those that are not set
#   GPUS CPUS MEM TIME PARTITION ACCOUNT
#                resources of a job (default: 1 GPU, 16 cores, 128G, 30 minutes); GPUS=0 for a job without a GPU
#   RUN          sbatch or here (default: sbatch)
#   VENV         Python environment with dali_stream (default: .venv in the current folder)
#
# If a measurement fails, OUT_DIR contains LABEL-MODE-DECODE.failed, which says how it ended, and with sbatch also its log.
set -euo pipefail

die() {
    printf 'matrix.sh: %s\n' "$*" >&2
    exit 2
}

# measure LABEL URI MODE DECODE: runs one measurement in its job.
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

# pending NAME: marks a measurement as failed until it has ended, since a job whose shell is killed cannot do so itself. An
# earlier report is removed, because it would be taken for the new one.
pending() {
    rm -f "$OUT_DIR/$1".{json,csv}
    echo 'did not end: killed, out of time, or still waiting' >"$OUT_DIR/$1.failed"
}

if [[ ${1:-} == measure ]]; then
    shift
    measure "$@"
    exit
fi
(($# == 0)) || die "this script must be run without arguments, got '$1'. Set the environment variables in its first lines"

read -ra sources <<<"${SOURCES:-}"
read -ra modes <<<"${MODES:-single sarm action_chunk}"
read -ra decodes <<<"${DECODES:-auto torchcodec}"
((${#sources[@]})) || die "SOURCES must be LABEL=URI ..., got none. Example: SOURCES='nfs=/data/droid hub=lerobot/droid_1.0.1'"
declare -A labels
for each in "${sources[@]}"; do
    [[ $each =~ ^[A-Za-z0-9_.]+=.+ ]] || die "SOURCES must be LABEL=URI ..., with labels of letters, digits, _ and ., got '$each'"
    [[ -z ${labels[${each%%=*}]:-} ]] || die "labels in SOURCES must be different, got '${each%%=*}' twice"
    labels[${each%%=*}]=taken
done
run=${RUN:-sbatch}
[[ $run == sbatch || $run == here ]] || die "RUN must be sbatch or here, got '$run'"
[[ $run == here ]] || command -v sbatch >/dev/null || die "sbatch was not found. Set RUN=here to measure on this machine"
export VENV=${VENV:-$PWD/.venv} OUT_DIR=${OUT_DIR:-$PWD/bench}
[[ -x $VENV/bin/dali-stream ]] || die "VENV must be an environment with dali_stream, got $VENV without bin/dali-stream"
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
                ((code != 130 && code != 143)) || exit "$code" # after a signal, the other measurements are not run
                ((code == 0)) || failed=1
            else
                pending "$name"
                if id=$("${job[@]}" --job-name="bench-$name" --output="$OUT_DIR/$name.log" --export=ALL "${one[@]}"); then
                    jobs+=:$id
                else
                    echo 'was not accepted by sbatch' >"$OUT_DIR/$name.failed"
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
[[ -n $jobs ]] || die "sbatch accepted none of the jobs. Its messages are above"
sbatch --parsable --ntasks=1 --time=10 --job-name=bench-summary --output="$OUT_DIR/summary.log" --dependency="afterany$jobs" \
    --wrap="$(printf '%q ' "$VENV/bin/python" "$summarize" "$OUT_DIR")" >/dev/null
printf 'submitted. The table will be written to %s\n' "$OUT_DIR/summary.log"
exit "$failed"
