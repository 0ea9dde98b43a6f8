#!/usr/bin/env bash
# Sets up what dali_stream needs to run and to be worked on: shared libraries and a virtual environment.
# The Makefile, CI and the container image all use this one script, so they cannot drift apart.
#
#   docker/install.sh [VENV]   VENV         folder of the virtual environment (default: .venv in the checkout)
#                              PYTHON       interpreter, 3.10 to 3.13 (default: python3)
#                              DALI_EXTRA   cuda12 or cuda13: the DALI build (default: cuda12)
#                              TORCH_BUILD  a build of torch on PyTorch's own index: cu126, cu130, cpu (default: the one
#                                           that pip finds, which on PyPI is for CUDA 13)
#                              INSTALL      how much; each takes in those before it:
#                                             libraries     FFmpeg and libpython, no environment
#                                             dependencies  what the package needs (Python 3.11 and later)
#                                             package       a copy of the package
#                                             develop       instead of the copy, the checkout itself, and the tools that
#                                                           it is worked on with (default)
set -euo pipefail
exec </dev/null

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${1:-$root/.venv}")
python=${PYTHON:-python3}
extra=${DALI_EXTRA:-cuda12}
build=${TORCH_BUILD:-}
mode=${INSTALL:-develop}
state=$venv/.dali-stream-install # "unfinished" while at work, then the hash of what was installed

say() { printf 'install.sh: %s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# Prints the version and, as PYTHON may be the very environment that is about to be rebuilt, the file behind the links.
describe_python() {
    "$1" -I -S -c 'import os, sys; print("%d.%d.%d" % sys.version_info[:3], os.path.realpath(sys.executable))' 2>/dev/null
}

# libavdevice 58 to 62 are FFmpeg 4 to 8. It needs all of FFmpeg's other libraries; libavcodec alone, as browsers and
# players bring it, is not enough for torchcodec. An `ffmpeg` program proves nothing: it may be linked statically.
ffmpeg_present() {
    [[ $(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null) =~ libavdevice\.so\.(58|59|60|61|62)[[:space:]] ]] && return
    # What ldconfig does not know: conda's libraries, LD_LIBRARY_PATH. Load it the way torchcodec does.
    "$python" - <<'PY'
import ctypes
for version in (62, 61, 60, 59, 58):
    try:
        ctypes.CDLL("libavdevice.so.%d" % version)
    except OSError:
        continue
    raise SystemExit(0)
raise SystemExit(1)
PY
}

# torchcodec is linked against it, and blames FFmpeg where it is missing. Debian's and Ubuntu's Python does without.
libpython_present() {
    "$python" -c "import ctypes; ctypes.CDLL('libpython$minor.so.1.0')" 2>/dev/null
}

install_libraries() {
    local packages=()
    ffmpeg_present || packages+=(ffmpeg)
    libpython_present || packages+=("^libpython${minor/./\\.}(t64)?\$") # its name since Ubuntu 24.04 ends in t64
    ((${#packages[@]})) || return 0
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]} through apt-get"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null || true
    fi
    ffmpeg_present || die_without_ffmpeg
    libpython_present || die "libpython$minor.so.1.0 was not found, the shared library of '$python' (Python $version).
  torchcodec cannot be loaded without it. Install it and run this again:
    Debian, Ubuntu   sudo apt-get install libpython$minor
    pyenv            PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force $version"
}

die_without_ffmpeg() {
    die "FFmpeg's shared libraries, version 4 to 8, were not found (looked for libavdevice.so.58 to .62).
  torchcodec cannot decode video without them. Install them and run this again:
    Debian, Ubuntu   sudo apt-get install ffmpeg
    Fedora           sudo dnf install ffmpeg-free libavdevice-free
    conda            conda install -c conda-forge 'ffmpeg<9'    (then set PYTHON to conda's python)"
}

# An index that stumbles in the middle of a file is not retried by pip itself: hence the second try.
pip_install() {
    local command=("$venv/bin/python" -m pip install --no-input --disable-pip-version-check --retries 10)
    [[ -t 1 ]] || command+=(--quiet)
    "${command[@]}" "$@" && return
    say "pip failed; trying once more"
    "${command[@]}" "$@"
}

# Removes the environment, but never a folder that is something else.
remove_venv() {
    [[ -e $venv/pyvenv.cfg || -e $state ]] ||
        die "$venv is neither empty nor a virtual environment. Name another folder, or remove this one."
    say "rebuilding $venv: $1"
    rm -rf "$venv"
}

create_venv() {
    local other
    [[ $extra == cuda12 ]] && other=cuda130 || other=cuda120
    if [[ -e $state && $(<"$state") == unfinished ]]; then
        remove_venv "an earlier install was cut short" # a package may be there in half, and pip would not see it
    elif [[ -n $(compgen -G "$venv/*") && $(describe_python "$venv/bin/python") != "$version "* ]]; then
        remove_venv "it is not one of Python $version"
    elif compgen -G "$venv/lib/python*/site-packages/nvidia_dali_$other-*" >/dev/null; then
        remove_venv "it has the DALI of the other CUDA"
    fi
    mkdir -p "$venv"
    echo unfinished >"$state"
    [[ -x $venv/bin/pip ]] || "$python" -m venv "$venv"
}

# What pyproject.toml asks for, a line each. Without the package itself it is a layer of the image that outlives a change
# of the source. botocore is in, for S3: a user of the image could not add it.
list_dependencies() {
    "$venv/bin/python" - "$root/pyproject.toml" "$extra" s3 <<'PY'
import sys, tomllib
path, *extras = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra]), sep="\n")
PY
}

# torch by itself first: that is the one request which also finds a local build (find-links, a CPU index). A build that is
# named stands in the request, lest an index that does not answer gets another build installed in silence.
install_torch() {
    local torch
    torch=$(grep -m1 -o '^torch==[^ ;]*' "$constraints")
    if [[ -n $build ]]; then
        pip_install "$torch+$build" -c "$constraints" --extra-index-url "https://download.pytorch.org/whl/$build"
    else
        pip_install "$torch" -c "$constraints"
    fi
}

install_packages() {
    local constraints=$root/constraints.txt listed dependencies
    install_torch || return
    case $mode in
        dependencies)
            listed=$(list_dependencies) || return
            mapfile -t dependencies <<<"$listed"
            pip_install "${dependencies[@]}" -c "$constraints" || return
            ;;
        package) pip_install "${root}[$extra,s3]" -c "$constraints" || return ;;
        develop) pip_install -e "${root}[$extra,dev]" -c "$constraints" || return ;;
    esac
    "$venv/bin/python" -c 'import nvidia.dali, torchcodec.decoders'
}

case $extra in cuda12 | cuda13) ;; *) die "DALI_EXTRA is '$extra'; allowed: cuda12, cuda13." ;; esac
case $mode in
    libraries | dependencies | package | develop) ;;
    *) die "INSTALL is '$mode'; allowed: libraries, dependencies, package, develop." ;;
esac
described=$(describe_python "$python") ||
    die "'$python' does not run as a Python 3. Set PYTHON to an interpreter of 3.10 to 3.13, e.g. PYTHON=python3.12."
read -r version python <<<"$described"
case $version in
    3.10.* | 3.11.* | 3.12.* | 3.13.*) ;;
    *) die "'$python' is Python $version; allowed: 3.10 to 3.13. Set PYTHON to one of those, e.g. PYTHON=python3.12." ;;
esac
minor=${version%.*}

install_libraries
[[ $mode != libraries ]] || exit 0

wanted=$({
    echo "$root $version $extra $build $mode"
    cat "$root/pyproject.toml" "$root/constraints.txt" "$root/docker/install.sh"
} | sha256sum)
# Only an editable install follows the checkout by itself; a copy is made anew.
if [[ $mode == develop && -x $venv/bin/python && -e $state && $(<"$state") == "$wanted" ]]; then
    exit 0
fi

trap 'exit 130' INT
trap 'exit 143' TERM
create_venv
say "installing into $venv (Python $version, $extra)"
if ! install_packages; then
    rm -f "$state" # pip undoes what it fails at, so the next run may build on this environment
    die "the install into $venv failed; the reason stands above."
fi
echo "$wanted" >"$state.new"
mv "$state.new" "$state"
say "done"
