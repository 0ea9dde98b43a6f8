#!/usr/bin/env bash
# Installs what is needed to run and to develop dali_stream: shared libraries and a virtual environment.
# The Makefile, CI and the container image all use this script, so that their environments are the same.
#
#   docker/install.sh [VENV]   VENV         folder of the virtual environment (default: .venv in the checkout)
#                              PYTHON       interpreter, 3.10 to 3.13 (default: python3)
#                              DALI_EXTRA   cuda12 or cuda13: the DALI build (default: cuda12)
#                              TORCH_BUILD  build of torch on PyTorch's own index: cu126, cu130 or cpu (default: the build
#                                           that pip finds, which is for CUDA 13 on PyPI)
#                              INSTALL      how much to install; each value includes the previous ones:
#                                             libraries     FFmpeg and libpython, without an environment
#                                             dependencies  the dependencies of the package, with the hashes in locks/; if
#                                                           TORCH_BUILD is set, without hashes, since the index of that build
#                                                           has another torch than PyPI (Python 3.11 and later)
#                                             package       a copy of the package
#                                             develop       instead of the copy, an editable install of the checkout, and
#                                                           what `make check test` needs (default)
#                                             develop-all   what all tests, benchmarks and linters need
set -euo pipefail
exec </dev/null

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${1:-$root/.venv}")
python=${PYTHON:-python3}
extra=${DALI_EXTRA:-cuda12}
build=${TORCH_BUILD:-}
mode=${INSTALL:-develop}
state=$venv/.dali-stream-install # contains "unfinished" during an install, and then the hash of what was installed

say() { printf 'install.sh: %s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# Prints the version, and the path of the interpreter with all links resolved, since PYTHON may be in the environment that will
# be rebuilt.
describe_python() {
    "$1" -I -S -c 'import os, sys; print("%d.%d.%d" % sys.version_info[:3], os.path.realpath(sys.executable))' 2>/dev/null
}

# libavdevice 58 to 62 belong to FFmpeg 4 to 8. The script looks for this library because it needs all other libraries of
# FFmpeg, as torchcodec does. Browsers and players install only libavcodec. A program `ffmpeg` does not show that the libraries
# exist, because it may be linked statically.
ffmpeg_present() {
    [[ $(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null) =~ libavdevice\.so\.(58|59|60|61|62)[[:space:]] ]] && return
    # ldconfig does not list conda's libraries and those in LD_LIBRARY_PATH. Load the library as torchcodec does.
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

# torchcodec is linked against libpython, and reports a problem with FFmpeg if it is missing. The Python of Debian and Ubuntu
# does not need it.
libpython_present() {
    "$python" -c "import ctypes; ctypes.CDLL('libpython$minor.so.1.0')" 2>/dev/null
}

install_libraries() {
    local packages=()
    ffmpeg_present || packages+=(ffmpeg)
    libpython_present || packages+=("^libpython${minor/./\\.}(t64)?\$") # since Ubuntu 24.04, the name ends in t64
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

# pip does not retry if a connection breaks in the middle of a file, so this function does. In an environment for development,
# modules are compiled when they are imported first, unless Python must not write the result: most are never imported.
pip_install() {
    local command=("$venv/bin/python" -m pip install --no-input --disable-pip-version-check --retries 10)
    [[ -t 1 ]] || command+=(--quiet)
    [[ $mode != develop* || -n ${PYTHONDONTWRITEBYTECODE:-} ]] || command+=(--no-compile)
    "${command[@]}" "$@" && return
    say "pip failed; trying once more"
    "${command[@]}" "$@"
}

# Prints pip's settings as options of uv, which does not read those settings. Those of `pip install` override the global ones,
# and those in the environment override both.
uv_options() {
    PIP_VERBOSE=0 "$venv/bin/python" - <<'PY'
import ast, subprocess, sys
options = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links", "constraint": "-c"}
listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
settings = {}
for line in listed.splitlines():
    key, _, value = line.partition("=")
    settings[key] = ast.literal_eval(value)
for name in (*options, "no-index"):
    found = [settings[key] for kind in (":env:", "install", "global") if (key := f"{kind}.{name}") in settings]
    words = found[0].split() if found else []
    if name == "no-index" and words and words[0].lower() in ("1", "true", "yes", "on"):
        print("--no-index")
    for word in words if name in options else ():
        print(options[name], word, sep="\n")
PY
}

uv_install() {
    local command=("$venv/bin/uv" pip install --python "$venv/bin/python" --system-certs --index-strategy unsafe-best-match)
    [[ -t 1 ]] || command+=(--quiet)
    [[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || command+=(--compile-bytecode) # see `pip_install`
    "${command[@]}" ${uv_settings[@]+"${uv_settings[@]}"} "$@"
}

# Installs what is needed for development, with an extra of the package. uv takes a tenth of the time that pip takes. If it
# fails, pip installs.
develop_install() {
    local uv_settings=() found package="${root}[$extra,$1]"
    if { [[ -x $venv/bin/uv ]] || pip_install uv -c "$constraints"; } && found=$(uv_options); then
        [[ -z $found ]] || mapfile -t uv_settings <<<"$found"
        install_torch uv_install && uv_install -e "$package" -c "$constraints" && return
        # A package may be incomplete, which pip would not notice.
        "$python" -m venv --clear "$venv" && echo unfinished >"$state"
    fi
    say "uv failed; installing with pip"
    install_torch pip_install && pip_install -e "$package" -c "$constraints"
}

# Removes the environment. Fails if the folder is not an environment.
remove_venv() {
    [[ -e $venv/pyvenv.cfg || -e $state ]] ||
        die "VENV must be an empty folder or a virtual environment, got $venv. Name another folder, or remove this one"
    say "rebuilding $venv: $1"
    rm -rf "$venv"
}

create_venv() {
    local other
    [[ $extra == cuda12 ]] && other=cuda130 || other=cuda120
    if [[ -e $state && $(<"$state") == unfinished ]]; then
        remove_venv "an earlier install was cut short" # a package may be incomplete, which pip would not notice
    elif [[ -n $(compgen -G "$venv/*") && $(describe_python "$venv/bin/python") != "$version "* ]]; then
        remove_venv "it is not an environment of Python $version"
    elif compgen -G "$venv/lib/python*/site-packages/nvidia_dali_$other-*" >/dev/null; then
        remove_venv "it has the DALI of the other CUDA"
    fi
    mkdir -p "$venv"
    echo unfinished >"$state"
    [[ -x $venv/bin/pip ]] || "$python" -m venv "$venv"
}

# Prints the dependencies in pyproject.toml, one per line. botocore, for S3, is included, because a user of the image could not
# install it.
list_dependencies() {
    "$venv/bin/python" - "$root/pyproject.toml" "$extra" s3 <<'PY'
import sys, tomllib
path, *extras = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra]), sep="\n")
PY
}

# torch is installed first, in a separate request, because from pip only such a request also finds a local build (find-links, a
# CPU index). If TORCH_BUILD is set, the request names the build. Otherwise, another build would be installed if the index did
# not answer. The argument is the function that installs.
install_torch() {
    local torch
    torch=$(grep -m1 -o '^torch==[^ ;]*' "$constraints")
    if [[ -n $build ]]; then
        "$1" "$torch+$build" -c "$constraints" --extra-index-url "https://download.pytorch.org/whl/$build"
    else
        "$1" "$torch" -c "$constraints"
    fi
}

# In the image, the dependencies are a separate layer, which is not built again when the source changes.
install_dependencies() {
    local listed dependencies
    if [[ -z $build ]]; then
        pip_install --require-hashes -r "$root/locks/$extra.txt" -r "$root/locks/s3.txt"
    else
        install_torch pip_install || return
        listed=$(list_dependencies) || return
        mapfile -t dependencies <<<"$listed"
        pip_install "${dependencies[@]}" -c "$constraints"
    fi
}

# The build backend is pinned, too, and installed into an environment of its own.
build_wheel() {
    "$python" -m venv "$1" &&
        "$1/bin/python" -m pip install --quiet --require-hashes -r "$root/locks/build.txt" &&
        "$1/bin/python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$1" "$root"
}

install_package() {
    local folder failed=0
    folder=$(mktemp -d)
    build_wheel "$folder" && pip_install --no-deps "$folder"/*.whl || failed=1
    rm -rf "$folder"
    return $failed
}

install_packages() {
    local constraints=$root/constraints.txt
    case $mode in
        dependencies) install_dependencies || return ;;
        package) install_dependencies && install_package || return ;;
        develop) develop_install dev || return ;;
        develop-all) develop_install dev-all || return ;;
    esac
    "$venv/bin/python" -c 'import nvidia.dali, torchcodec.decoders'
}

case $extra in cuda12 | cuda13) ;; *) die "DALI_EXTRA must be cuda12 or cuda13, got '$extra'" ;; esac
case $mode in
    libraries | dependencies | package | develop | develop-all) ;;
    *) die "INSTALL must be libraries, dependencies, package, develop or develop-all, got '$mode'" ;;
esac
described=$(describe_python "$python") ||
    die "PYTHON must be an interpreter of Python 3.10 to 3.13, got '$python', which is no Python 3. Example: PYTHON=python3.12"
read -r version python <<<"$described"
case $version in
    3.10.* | 3.11.* | 3.12.* | 3.13.*) ;;
    *) die "PYTHON must be an interpreter of Python 3.10 to 3.13, got '$python' with $version. Example: PYTHON=python3.12" ;;
esac
minor=${version%.*}

install_libraries
[[ $mode != libraries ]] || exit 0

# The mode comes first, and then a hash of everything else that determines what is installed.
wanted="$mode $({
    echo "$root $version $extra $build"
    cat "$root/pyproject.toml" "$root/constraints.txt" "$root/docker/install.sh"
} | sha256sum)"
# Only an editable install changes with the checkout. A copy must be installed again. develop-all includes develop.
if [[ $mode == develop* && -x $venv/bin/python && -e $state ]]; then
    installed=$(<"$state")
    [[ $installed != "$wanted" && $installed != "develop-all ${wanted#* }" ]] || exit 0
fi

trap 'exit 130' INT
trap 'exit 143' TERM
create_venv
say "installing into $venv (Python $version, $extra)"
if ! install_packages; then
    rm -f "$state" # pip undoes an install that fails, so the next run can continue with this environment
    die "the install into $venv failed. The output above says why"
fi
echo "$wanted" >"$state.new"
mv "$state.new" "$state"
say "done"
