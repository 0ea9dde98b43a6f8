#!/usr/bin/env bash
# Runs all tests and measurements that need a GPU, in less than ten minutes and without a network. Its parts ran on an H100 or
# an H200, but the script as a whole did not.
#
#   benchmarks/gpu_trip.sh OUT      OUT      folder for the reports; each is written as soon as its part has a result
#                                   PYTHON   interpreter with the packages that dali_stream needs (default: python3)
#                                   LIMIT    time limit of the whole script in seconds (default: 560)
#                                   DEVICE   cuda, or cpu to test the script itself (default: cuda)
#                                   CODECS   CODEC:GOP of each dataset that is written (default: h264:2 hevc:12)
#                                   DATA     NAME=ROOT of each recording for the part loaders, which must be local; the part
#                                            lerobot gets the first one (default: the datasets that are written)
#                                   SIZE     HxW of the frames that are written (default: 480x640)
#
# The parts run in order of importance: doctor; features, which compares frames of depth cameras, mixtures, the frame cache and
# Transformed with the CPU's; self-test; loaders, which compares NVDEC with the CPU; lerobot, which trains ACT; settings of
# DALI's executor; decode floor; peers. The output of all parts goes to log.txt. The reports are features.json, selftest.json,
# loaders.json, lerobot.json, settings.json and peers.json, and are written after each step. If a part fails, crashes or hangs,
# the other parts still run. If the script is ended, it ends its current part. The exit code is 1 if a part failed.
#
# Likely faults behind what a report shows, according to the sources of DALI 2.4 and torchcodec 0.17. None was seen so far.
# - `route_changes`, or `Failed to create NVDEC decoder: 2` in the log: the GPU's memory is not enough for another decoder.
# - `it crashed with SIGABRT`: an error of the driver within a callback of DALI ended the process.
# - `after the step had returned, it crashed with SIGSEGV`, or `it did not end within 15 s`: DALI destroyed its decoders after
#   the driver was unloaded.
# - `wrong` in `identity`, first for `one frame` with GOP 12 or 30: a clip ended before DALI got its last frame.
# - `wrong` in `load` only: DALI freed a decoder's buffers before they were copied. In settings.json, only `PER_BACKEND` and
#   `PER_OPERATOR` should have it.
# - `wrong`, or `gpu_growth` of tens of MB, for `padded sizes` in `identity`: DALI took a decoder of another size.
# - `wrong` or `route_changes` for `mixture` in features.json: torchcodec used one decoder for parts of a clip with other
#   parameter sets.
# - `delivered other frames than` in the log; with DALI, `wrong` for `16 anywhere`: the parser gave a time to the wrong frame.
# - `gpu_memory` of `epochs` grows: torch keeps freed memory for each CUDA stream.
# - `auto` in loaders.json is the slowest, or its `open_s` is above 1: it measures 0.4 s on an idle GPU, and chose wrongly.
# - a `mean_error` above 2.2 in `identity`, and no `wrong`: compare the matrix and range that `doctor` prints with the file's.
set -uo pipefail

out=${1:?usage: benchmarks/gpu_trip.sh OUT}
python=${PYTHON:-python3}
limit=${LIMIT:-560}
device=${DEVICE:-cuda}
size=${SIZE:-480x640}
read -ra codecs <<<"${CODECS:-h264:2 hevc:12}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
data=$(mktemp -d)
failed=()
running=
exec </dev/null > >(exec tee "$out/log.txt") 2>&1
trap 'rm -rf "$data"' EXIT
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM

# stop CODE: ends the current part, and this script.
stop() {
    printf '\n== ended by a signal, after %d s\n' "$SECONDS"
    # The whole process group, since `timeout` may not know its command yet.
    [[ -z $running ]] || { kill -- "-$running" "$running"; wait "$running"; } 2>/dev/null
    exit "$1"
}

# part NAME SECONDS COMMAND...: runs a command for at most SECONDS, or for the rest of LIMIT if it is shorter.
part() {
    local name=$1 seconds=$2 left=$((limit - SECONDS)) code
    shift 2
    ((seconds < left)) || seconds=$left
    if ((seconds < 5)); then
        printf '\n== %s: no time was left\n' "$name"
        failed+=("$name")
        return
    fi
    printf '\n== %s, after %d s\n' "$name" "$SECONDS"
    # In the background, so that a signal is handled at once. `timeout` passes it on to all processes of the part.
    timeout --kill-after=5 "$seconds" "$@" &
    running=$!
    wait "$running"
    code=$?
    running=
    ((code == 0)) || {
        printf '== %s ended with %d\n' "$name" "$code" # 124: it took too long; above 128: a signal
        failed+=("$name")
    }
}

write_datasets='
import sys
from dali_stream.demo import write_demo
size = tuple(map(int, sys.argv[2].split("x")))
for codec, gop in (each.split(":") for each in sys.argv[3:]):
    write_demo(f"{sys.argv[1]}/{codec}", episodes=4, codec=codec, gop=int(gop), size=size)
'

selftest=$((limit * 40 / 100))
steps=(--cores 16 4 --steps 40)
[[ $device != cpu ]] || steps=(--cores 2 --steps 8 --batch-size 2)
first=$data/${codecs[0]%%:*}
read -ra recordings <<<"${DATA:-$(for each in "${codecs[@]}"; do printf '%s ' "${each%%:*}=$data/${each%%:*}"; done)}"

part doctor 40 "$python" -m dali_stream doctor
part features 80 "$python" "$root/benchmarks/gpu_features.py" --device "$device" --size "$size" --out "$out/features.json"
part selftest "$selftest" "$python" -m dali_stream selftest --device "$device" --soak 15 --speed 0.5 \
    --limit "$((selftest - 20))" --out "$out/selftest.json"
part datasets 60 "$python" -c "$write_datasets" "$data" "$size" "${codecs[@]}"
part loaders 60 "$python" "$root/benchmarks/nvdec_loaders.py" "${recordings[@]}" --device "$device" --image-size 224x224 \
    --rounds 1 --out "$out/loaders.json"
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("lerobot") is None)'; then
    part lerobot 100 "$python" "$root/benchmarks/lerobot_gpu.py" "${recordings[0]}" --device "$device" "${steps[@]}" \
        --rounds 1 --sides loader stock --out "$out/lerobot.json"
else
    printf '\n== lerobot: it is not installed\n'
fi
part settings 80 "$python" "$root/benchmarks/gpu_settings.py" "$first" --device "$device" --seconds 2 --out "$out/settings.json"
part floor 40 "$python" "$root/benchmarks/decode_floor.py" "$first" --decode dali --device "$device" --rounds 3 --json
part peers 80 "$python" "$root/benchmarks/peers.py" "$first" --device "$device" --rounds 2 --answer-s 30 \
    --only torchcodec pynvvideocodec --out "$out/peers.json"
printf '\n%s\n' "${failed[*]:+not ended well: ${failed[*]}}"
((${#failed[@]} == 0))
