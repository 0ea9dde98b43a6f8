#!/usr/bin/env bash
# Runs all tests and measurements that need a GPU, in less than ten minutes and without a network. Its parts ran on an H100, but
# the script as a whole did not.
#
#   benchmarks/gpu_trip.sh OUT      OUT      folder for the reports; each is written as soon as its part is done
#                                   PYTHON   interpreter with the packages that dali_stream needs (default: python3)
#                                   LIMIT    time limit of the whole script in seconds (default: 560)
#                                   DEVICE   cuda, or cpu to test the script itself (default: cuda)
#                                   CODECS   CODEC:GOP of each dataset that is measured (default: h264:2 hevc:12)
#
# The parts run in order of importance: doctor; self-test; settings of DALI's executor; decode floor; peers. The self-test first
# checks that frames are correct, then that they stay correct under load, for which it also streams epochs, and then compares
# the speed of NVDEC on a busy GPU with that of the CPU. The output of each part goes to a separate file, and the self-test
# writes its report after each step. If a part fails, crashes or hangs, the other parts still run. The exit code is 1 if a part
# failed.
set -uo pipefail
exec </dev/null

out=${1:?usage: benchmarks/gpu_trip.sh OUT}
python=${PYTHON:-python3}
limit=${LIMIT:-560}
device=${DEVICE:-cuda}
read -ra codecs <<<"${CODECS:-h264:2 hevc:12}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
failed=()

# part NAME SECONDS COMMAND...: runs a command for at most SECONDS, or for the rest of LIMIT if it is shorter.
part() {
    local name=$1 seconds=$2 left=$((limit - SECONDS))
    shift 2
    ((seconds < left)) || seconds=$left
    if ((seconds < 5)); then
        printf '\n== %s: no time was left\n' "$name"
        failed+=("$name")
        return
    fi
    printf '\n== %s, after %d s\n' "$name" "$SECONDS"
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$out/${name// /-}.txt"
    local code=${PIPESTATUS[0]}
    ((code == 0)) || {
        printf '== %s ended with %d\n' "$name" "$code" # 124: it took too long; above 128: a signal
        failed+=("$name")
    }
}

write_datasets='
import sys
from dali_stream.demo import write_demo
for codec, gop in (each.split(":") for each in sys.argv[2:]):
    write_demo(f"{sys.argv[1]}/{codec}", episodes=4, codec=codec, gop=int(gop), size=(480, 640))
'

all_parts() {
    local selftest first each codec
    selftest=$((limit * 55 / 100))
    part doctor 40 "$python" -m dali_stream doctor
    part selftest "$selftest" "$python" -m dali_stream selftest --device "$device" --soak 15 --speed 0.5 \
        --limit "$((selftest - 20))" --out "$out/selftest.json"
    part datasets 60 "$python" -c "$write_datasets" "$data" "${codecs[@]}"
    first=$data/${codecs[0]%%:*}
    part settings 130 "$python" "$root/benchmarks/gpu_settings.py" "$first" --device "$device" --seconds 2 \
        --out "$out/settings.json"
    for each in "${codecs[@]}"; do
        codec=${each%%:*}
        part "floor of $codec" 40 "$python" "$root/benchmarks/decode_floor.py" "$data/$codec" --decode dali --device "$device" \
            --rounds 3 --json
        part "peers of $codec" 80 "$python" "$root/benchmarks/peers.py" "$data/$codec" --device "$device" --rounds 2 --answer-s 30 \
            --only torchcodec pynvvideocodec --out "$out/peers-$codec.json"
    done
    printf '\n%s\n' "${failed[*]:+not ended well: ${failed[*]}}"
    ((${#failed[@]} == 0))
}

all_parts 2>&1 | tee "$out/log.txt"
exit "${PIPESTATUS[0]}"
