#!/usr/bin/env bash
# Runs what needs a GPU, in less than ten minutes and without a network: first whether frames are right, then how fast they come.
#
#   benchmarks/gpu_trip.sh OUT      OUT      folder for the reports; each is written as soon as its part has a result
#                                   PYTHON   interpreter with the packages that dali_stream needs (default: python3)
#                                   LIMIT    time limit of the whole script in seconds (default: 540)
#                                   DEVICE   cuda, or cpu to test the script itself (default: cuda)
#                                   DATA     NAME=ROOT of each dataset whose Loaders are measured, which must be local and
#                                            should have an epoch of several seconds; LeRobot trains on the first one
#                                            (default: the datasets that are written)
#                                   CODECS   CODEC:GOP of each dataset that is written without DATA
#                                            (default: h264:2 h264:30 hevc:2 hevc:30)
#                                   SIZE, EPISODES   HxW of the frames that are written, and their episodes (default: 480x640, 12)
#
# The parts run in order of importance, each with a report of its name in OUT, and their output goes to log.txt:
#   doctor     what driver, GPU and decoders there are; in log.txt only
#   features   frames of Loaders on NVDEC, compared with the CPU's: lockstep, gpu_cache, two Loaders, a mixture, ...
#   decoders   torchcodec on NVDEC with 1, 16 and 64 frames per clip, and with one keyframe mark per clip or all of them
#   loaders    first and later epochs with NVDEC, with the CPU and with "auto", for all datasets
#   gpu_cache  the same for Loaders that keep decoded frames in the GPU's memory
#   lerobot    steps per second of ACT with a Loader, with its first batch again and again, and with LeRobot's DataLoader
#   threads    first and later epochs on NVDEC with 7 to 32 decode threads, and with batches of 8
#   memory     epochs on NVDEC and on the CPU that decode again what memory does not hold
#   selftest   DALI's decoder and torchcodec's, in the time that is left, if any
# If a part fails, crashes or hangs, the other parts still run. If the script is ended, it ends its current part. The exit code
# is 1 if a part failed.
#
# Likely faults behind what a report shows, according to the sources of DALI 2.4 and torchcodec 0.17. None was seen so far.
# - `route_changes`, or `Failed to create NVDEC decoder: 2` in the log: the GPU's memory is not enough for another decoder.
# - `it crashed with SIGABRT`: an error of the driver within a callback of DALI ended the process.
# - `after the step had returned, it crashed with SIGSEGV`, or `it did not end within 15 s`: DALI destroyed its decoders after
#   the driver was unloaded.
# - `wrong` in `identity`, first for `one frame` with GOP 12 or 30: a clip ended before DALI got its last frame.
# - `wrong`, or `gpu_growth` of tens of MB, for `padded sizes` in `identity`: DALI took a decoder of another size.
# - `wrong` in decoders.json with `marks` "one" only: the decoder needs the flush between GOPs.
# - `wrong` or `route_changes` for `mixture` in features.json: torchcodec used one decoder for parts of a clip with other
#   parameter sets.
# - `delivered other frames than` in the log; with DALI, `wrong` for `16 anywhere`: the parser gave a time to the wrong frame.
# - `gpu_memory` of `epochs` grows: torch keeps freed memory for each CUDA stream.
# - `auto` in loaders.json is not the faster one: its rule, four threads per NVDEC engine, does not hold for this GPU or codec.
# - a `mean_error` above 2.2 in `identity`, and no `wrong`: compare the matrix and range that `doctor` prints with the file's.
set -uo pipefail

out=${1:?usage: benchmarks/gpu_trip.sh OUT}
python=${PYTHON:-python3}
limit=${LIMIT:-540}
device=${DEVICE:-cuda}
size=${SIZE:-480x640}
read -ra codecs <<<"${CODECS:-h264:2 h264:30 hevc:2 hevc:30}"
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

# part NAME SECONDS COMMAND...: runs a command for at most SECONDS, or for the rest of LIMIT if it is shorter. SECONDS are those of
# the default LIMIT; a longer LIMIT, for a slower machine, gives each part more.
part() {
    local name=$1 seconds=$(($2 * limit / 540)) left=$((limit - SECONDS)) code
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
from concurrent.futures import ProcessPoolExecutor
from dali_stream.demo import write_demo
folder, size, episodes, *kinds = sys.argv[1:]
size = tuple(map(int, size.split("x")))
with ProcessPoolExecutor() as pool:
    written = [
        pool.submit(write_demo, f"{folder}/{codec}_gop{gop}", episodes=int(episodes), codec=codec, gop=int(gop), size=size)
        for codec, gop in (kind.split(":") for kind in kinds)
    ]
for each in written:
    each.result()
'
loaders=("$python" "$root/benchmarks/nvdec_loaders.py" --device "$device" --image-size 224x224 --rounds 1)
act=(--cores 16 --steps 40)
[[ $device != cpu ]] || act=(--cores 2 --steps 8 --batch-size 2)

part doctor 30 "$python" -m dali_stream doctor
part features 120 "$python" "$root/benchmarks/gpu_features.py" --device "$device" --size "$size" --episodes 3 \
    --seconds 6 --out "$out/features.json"
part decoders 60 "$python" "$root/benchmarks/nvdec_decoders.py" --device "$device" --size "$size" --codec h264 hevc \
    --seconds 0.5 --out "$out/decoders.json"
read -ra recordings <<<"${DATA:-}"
if ((!${#recordings[@]})); then
    part datasets 60 "$python" -c "$write_datasets" "$data" "$size" "${EPISODES:-12}" "${codecs[@]}"
    for each in "${codecs[@]}"; do recordings+=("${each/:/_gop}=$data/${each/:/_gop}"); done
fi
part loaders 100 "${loaders[@]}" "${recordings[@]}" --memory-budget 16GiB --out "$out/loaders.json"
[[ $device == cpu ]] || part gpu_cache 50 "${loaders[@]}" "${recordings[@]}" --decode torchcodec-cuda torchcodec \
    --memory-budget 1GiB --gpu-cache 8GiB --out "$out/gpu_cache.json"
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("lerobot") is None)'; then
    part lerobot 100 "$python" "$root/benchmarks/lerobot_gpu.py" "${recordings[0]}" --device "$device" "${act[@]}" \
        --rounds 1 --sides loader repeated stock --out "$out/lerobot.json"
else
    printf '\n== lerobot: it is not installed\n'
fi
part threads 70 "${loaders[@]}" "${recordings[0]}" --decode torchcodec-cuda --memory-budget 16GiB \
    --threads 7 8 14 16 21 32 --batch-size 64 8 --out "$out/threads.json"
part memory 50 "${loaders[@]}" "${recordings[@]}" --decode torchcodec-cuda torchcodec --memory-budget 64MiB \
    --out "$out/memory.json"
left=$((limit - SECONDS))
part selftest "$left" "$python" -m dali_stream selftest --device "$device" --soak 15 --speed 0.5 --limit "$((left > 20 ? left - 20 : 0))" \
    --out "$out/selftest.json"
printf '\n%s\n' "${failed[*]:+not ended well: ${failed[*]}}"
((${#failed[@]} == 0))
