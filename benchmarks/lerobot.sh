#!/usr/bin/env bash
# Compares LeRobot's training script on a Loader with the same script on its own DataLoader. Each supported version of LeRobot
# has a separate environment, because the requirements of the versions contradict each other. An environment takes 6 to 9 GB.
#
#   benchmarks/lerobot.sh [--data NAME=ROOT ...]   default: the demo dataset
#
#   LEROBOT    versions (default: 0.4.4 0.6.1)
#   PYTHON311, PYTHON312   interpreters for 0.4.4 and 0.6.1 (default: python3.11, python3.12)
#   RESULTS    folder for the reports (default: .demo/lerobot)
set -euo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'lerobot.sh: %s\n' "$*" >&2; }

install() { # VENV PYTHON REQUIREMENT
    [[ -x $1/bin/pip ]] || "$2" -m venv "$1"
    # Both are installed in one request, so that pip finds versions that suit LeRobot and this package.
    "$1/bin/pip" install --quiet --no-input --disable-pip-version-check "$3" -e .
    "$1/bin/pip" check
}

results=${RESULTS:-.demo/lerobot}
data=("$@")
if ((!$#)); then
    [[ -d .demo/dataset ]] || .venv/bin/dali-stream demo --root .demo/dataset
    data=(--data demo=.demo/dataset)
fi
failed=()
for version in ${LEROBOT:-0.4.4 0.6.1}; do
    case $version in
        0.4.*) python=${PYTHON311:-python3.11} requirement="lerobot==$version" ;;
        *) python=${PYTHON312:-python3.12} requirement="lerobot[training,diffusion]==$version" ;;
    esac
    say "LeRobot $version in .venv-lerobot-$version"
    install ".venv-lerobot-$version" "$python" "$requirement"
    ".venv-lerobot-$version/bin/python" benchmarks/lerobot_train.py "${data[@]}" --out "$results/lerobot_train_$version.json" ||
        failed+=("$version")
done
if ((${#failed[@]})); then
    say "checks failed with LeRobot ${failed[*]}"
    exit 1
fi
