#!/usr/bin/env bash
# Compares LeRobot's training script on a Loader with the same script on its own DataLoader. Each supported version of LeRobot
# has a separate environment, because the requirements of the versions contradict each other. An environment takes 6 to 9 GB.
#
#   benchmarks/lerobot.sh [--data NAME=ROOT ...]   default: the demo dataset
#
#   LEROBOT    versions (default: 0.6.1; 0.4.4 needs Python 3.11)
#   LEROBOT_SOURCE   checkout of LeRobot, such as its main, which is compared in addition (default: none)
#   PYTHON311, PYTHON312   interpreters for 0.4.4 and for later versions (default: python3.11, python3.12)
#   RESULTS    folder for the reports (default: .demo/lerobot)
set -euo pipefail
exec </dev/null
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'lerobot.sh: %s\n' "$*" >&2; }

install() { # VENV PYTHON REQUIREMENT
    [[ -x $1/bin/pip ]] || "$2" -m venv "$1"
    # Both are installed in one request, so that pip finds versions that suit LeRobot and this package.
    "$1/bin/pip" install --quiet --no-input --disable-pip-version-check "$3" -e . pytest
    "$1/bin/pip" check
}

results=${RESULTS:-.demo/lerobot}
data=("$@")
if ((!$#)); then
    [[ -d .demo/dataset ]] || .venv/bin/dali-stream demo --root .demo/dataset
    data=(--data demo=.demo/dataset)
fi
failed=()

compare() { # NAME PYTHON REQUIREMENT
    local venv=.venv-lerobot-$1
    say "LeRobot $1 in $venv"
    install "$venv" "$2" "$3"
    # The parts that are wrapped come first: if one has moved, this names it at once.
    "$venv/bin/python" -m pytest -q --noconftest -p no:cacheprovider tests/test_lerobot_installed.py &&
        "$venv/bin/python" benchmarks/lerobot_train.py "${data[@]}" --out "$results/lerobot_train_$1.json" || failed+=("$1")
}

python312=${PYTHON312:-python3.12}
for version in ${LEROBOT:-0.6.1}; do
    case $version in
        0.4.*) compare "$version" "${PYTHON311:-python3.11}" "lerobot==$version" ;;
        *) compare "$version" "$python312" "lerobot[training,diffusion]==$version" ;;
    esac
done
if [[ -n ${LEROBOT_SOURCE:-} ]]; then
    compare source "$python312" "lerobot[training,diffusion] @ file://$(realpath "$LEROBOT_SOURCE")"
else
    say "skipped LeRobot from source, because LEROBOT_SOURCE does not name a checkout"
fi
if ((${#failed[@]})); then
    say "checks failed with LeRobot ${failed[*]}"
    exit 1
fi
