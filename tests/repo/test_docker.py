"""The image and its deployments, tested without Docker: the files agree with each other, and the scripts run."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster import Cluster
from support.slow import slow_after

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
CAPABILITIES = {"video", "compute", "utility"}
SCRIPTS = ("enroot.sbatch", "apptainer.sbatch")
TOKEN = "hf_neverWrittenAnywhere"


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, its arguments), with lines joined."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def instructions(name: str) -> list[str]:
    return [rest for word, rest in dockerfile() if word == name]


def compose_service() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["train"]


def pod() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "k8s/pod.yaml").read_text())["spec"]


def pod_containers() -> list[dict[str, Any]]:
    return pod()["initContainers"] + pod()["containers"]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out of the build: its last pattern that fits the path or a folder above decides."""
    out = False
    parts = path.split("/")
    parents = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        names = parts if pattern.startswith("**/") else [p for p in parents if p.count("/") == pattern.count("/")]
        if any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for name in names):
            out = not line.startswith("!")
    return out


def test_the_image_asks_for_the_video_capability() -> None:
    env = dict(pair.split("=", 1) for line in instructions("ENV") for pair in line.split())
    assert set(env["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == CAPABILITIES
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_compose_asks_for_the_video_capability_and_for_gpus() -> None:
    service = compose_service()
    assert set(service["environment"]["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == CAPABILITIES
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    # Docker makes NVIDIA_DRIVER_CAPABILITIES of these, over what the image says.
    assert set(device["capabilities"]) == CAPABILITIES | {"gpu"}


def test_every_container_of_the_pod_has_the_video_capability_and_a_gpu() -> None:
    for container in pod_containers():
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert set(env["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == CAPABILITIES
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        # Set here it outranks the device plugin's choice, and the pod sees the GPUs of others.
        assert "NVIDIA_VISIBLE_DEVICES" not in env


def test_nothing_runs_as_root() -> None:
    user = re.fullmatch(r"(\d+):(\d+)", instructions("USER")[-1])
    assert user is not None
    assert int(user[1]) > 0
    security = pod()["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user[1]), int(user[2]))
    for container in pod_containers():
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert compose_service()["cap_drop"] == ["ALL"]
    assert "user" not in compose_service()


def test_shared_memory_and_the_cache_are_there() -> None:
    volumes = {volume["target"]: volume for volume in compose_service()["volumes"]}
    assert volumes["/data"]["read_only"] is True
    assert volumes["/cache"]["type"] == "volume"
    assert "shm_size" in compose_service()
    kinds = {volume["name"]: volume for volume in pod()["volumes"]}
    for container in pod_containers():
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert kinds[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
        assert "/cache" in mounts
        assert mounts["/data"]["readOnly"] is True


def test_nothing_is_written_outside_the_volumes() -> None:
    """torch needs /tmp, a cache /cache, and programs with files in the home folder get one in /cache."""
    service = compose_service()
    assert service["read_only"] is True
    assert [tmpfs.partition(":")[0] for tmpfs in service["tmpfs"]] == ["/tmp"]
    homes = [service["environment"]["HOME"]]
    kinds = {volume["name"]: volume for volume in pod()["volumes"]}
    for container in pod_containers():
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert "emptyDir" in kinds[mounts["/tmp"]]
        homes += [each["value"] for each in container["env"] if each["name"] == "HOME"]
    assert homes == ["/cache"] * 3


def test_the_health_check_is_a_command_of_the_program() -> None:
    (check,) = instructions("HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command == json.loads(instructions("CMD")[-1])
    assert command == pod_containers()[0]["args"] == pod()["containers"][0]["readinessProbe"]["exec"]["command"]
    assert 'dali-stream = "dali_stream.cli:main"' in (ROOT / "pyproject.toml").read_text()
    shown = subprocess.run([sys.executable, "-m", "dali_stream", "--help"], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^\s+{command[1]}\s", shown, re.MULTILINE)


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    sources = [source for line in instructions("COPY") for source in line.split()[:-1]]
    sources += re.findall(r"--mount=type=bind,source=([^ ,]+)", " ".join(instructions("RUN")))
    assert "dali_stream" in sources
    for source in sources:
        assert (ROOT / source).exists()
        assert not ignored(source)
    for path in (ROOT / "dali_stream").rglob("*"):
        inside = path.relative_to(ROOT).as_posix()
        assert ignored(inside) == ("__pycache__" in inside), inside


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".demo/dataset/meta/info.json",
        ".env",
        "docker/.env",
        "docker/compose.yaml",
        "tests/x.py",
    ],
)
def test_what_is_no_part_of_the_image_stays_out_of_its_build(path: str) -> None:
    assert ignored(path)


def test_the_image_has_no_install_steps_of_its_own() -> None:
    runs = " ".join(instructions("RUN"))
    assert re.findall(r"INSTALL=(\w+) bash /opt/src/docker/install.sh", runs) == ["libraries", "dependencies", "package"]
    assert not re.search(r"\b(pip3? install|uv pip|conda|curl|wget) ", runs)
    assert "ffmpeg" not in runs
    assert "docker/install.sh" in (ROOT / "Makefile").read_text()
    assert "make --no-print-directory install" in (ROOT / ".ci/run").read_text()


def test_each_cuda_has_a_pinned_base_that_refuses_older_drivers() -> None:
    assert instructions("ARG")[0] == "DALI_EXTRA=cuda13"
    assert instructions("FROM")[-1] == "${DALI_EXTRA}"
    bases = dict(reversed(base.split(" AS ")) for base in instructions("FROM")[:-1])
    assert set(bases) == {"cuda12", "cuda13"}
    for extra, base in bases.items():
        assert re.fullmatch(rf"nvidia/cuda:{extra[4:]}\.\d+\.\d+-base-ubuntu24\.04@sha256:[0-9a-f]{{64}}", base)
    required = re.findall(r'NVIDIA_REQUIRE_CUDA="([^"]+)"', " ".join(instructions("ENV")))
    assert required == ["cuda>=12.0", "cuda>=13.0"]


def test_no_token_is_written_anywhere() -> None:
    assert compose_service()["environment"]["HF_TOKEN"] is None  # handed on from the environment
    for container in pod_containers():
        (token,) = (each for each in container["env"] if each["name"] == "HF_TOKEN")
        assert "value" not in token
        assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert not re.search(
        r"token|secret|password|credential", " ".join(instructions("ENV") + instructions("ARG")), re.IGNORECASE
    )


# Plays srun, scontrol, apptainer, dali-stream and a training program, whichever name it is called by.
STUB = """
if name == "scontrol":
    print("node0", "node1", sep="\\n")
elif name == "apptainer":
    assert arguments.pop(0) == "exec"
    while arguments[0].startswith("--"):
        if arguments.pop(0) in ("--bind", "--pwd"):
            arguments.pop(0)
    sys.exit(subprocess.call(arguments[1:]))
elif name == "srun":
    options = {}
    while arguments[0].startswith("--"):
        key, _, value = arguments.pop(0).partition("=")
        options[key] = value
    tasks = int(options.get("--ntasks", os.environ["SLURM_NTASKS"]))
    on_each = tasks // int(os.environ["SLURM_JOB_NUM_NODES"])
    codes = []
    for task in range(tasks):
        own = dict(SLURM_PROCID=task, SLURM_LOCALID=task % on_each, SLURM_NTASKS=tasks, NODE=task // on_each)
        codes.append(subprocess.call(arguments, env=os.environ | {key: str(own[key]) for key in own}))
    sys.exit(max(codes))
elif name == "dali-stream":
    sys.exit(os.environ["NODE"] == os.environ.get("BAD_NODE"))
"""


class GpuCluster(Cluster):
    """Two nodes with four GPUs each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUB, ("srun", "scontrol", "apptainer", "dali-stream", "train"))
        self.cache = folder / "scratch/cache"
        self.env |= {
            "SLURM_NTASKS": "8",
            "SLURM_NTASKS_PER_NODE": "4",
            "IMAGE": "/images/dali_stream.img",
            "CACHE_DIR": str(self.cache),
            "HF_TOKEN": TOKEN,
            "PYTHONPATH": "/of/the/node",
        }

    def run(self, script: str, *command: str, **env: str | None) -> subprocess.CompletedProcess[str]:
        return super().run(DOCKER / "slurm" / script, *command, **env)


@pytest.fixture
def cluster(tmp_path: Path) -> GpuCluster:
    return GpuCluster(tmp_path)


@pytest.mark.parametrize("script", slow_after(1, SCRIPTS))
def test_slurm_starts_one_task_per_gpu_with_its_rank_and_the_capabilities(script: str, cluster: GpuCluster) -> None:
    arguments = ["two words", "", "$HOME", "--x=*"]
    done = cluster.run(script, "train", *arguments)
    assert done.returncode == 0, done.stderr
    tasks = cluster.calls("train")
    assert [given for given, _ in tasks] == [arguments] * 8
    ranks = [(env["NODE"], env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for _, env in tasks]
    assert ranks == [(str(rank // 4), str(rank), str(rank % 4), "8") for rank in range(8)]
    for _, env in tasks:
        assert set(env["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == CAPABILITIES
        assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert env["MASTER_ADDR"] == "node0"
        assert 1024 < int(env["MASTER_PORT"]) < 65536
        assert env["SRUN_CPUS_PER_TASK"] == "12"
        assert env["LOCAL_WORLD_SIZE"] == "4", "so that four Loaders share the cores and the memory of a node"
        assert "PYTHONPATH" not in env


@pytest.mark.parametrize("script", slow_after(1, SCRIPTS))
def test_slurm_runs_the_doctor_once_on_each_node_and_first(script: str, cluster: GpuCluster) -> None:
    assert cluster.run(script, "train").returncode == 0
    assert [(given, env["NODE"]) for given, env in cluster.calls("dali-stream")] == [(["doctor"], "0"), (["doctor"], "1")]
    called = cluster.called()
    assert called.index("train") > len(called) - 1 - called[::-1].index("dali-stream")


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_does_not_train_where_a_node_is_not_well(script: str, cluster: GpuCluster) -> None:
    assert cluster.run(script, "train", BAD_NODE="1").returncode != 0
    assert len(cluster.calls("dali-stream")) == 2
    assert not cluster.calls("train")


@pytest.mark.parametrize("script", slow_after(1, SCRIPTS))
def test_slurm_mounts_the_cache_of_the_node_and_the_datasets_read_only(script: str, cluster: GpuCluster) -> None:
    assert cluster.run(script, "train", DATASET_DIR="/shared/datasets").returncode == 0
    assert cluster.cache.is_dir()
    mounts = f"{cluster.submitted_from}:/work,{cluster.cache}:/cache,/shared/datasets:/data:ro"
    if script == "enroot.sbatch":
        steps = [given for given, _ in cluster.calls("srun")][1:]
        assert all(f"--container-mounts={mounts}" in given for given in steps)
        assert all("--container-image=/images/dali_stream.img" in given for given in steps)
        # pyxis lets the image's values win over all that is not named.
        named = {
            name for given in steps for each in given if each.startswith("--container-env=") for name in each[16:].split(",")
        }
        assert {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} <= named
    else:
        steps = [given for given, _ in cluster.calls("apptainer")]
        assert len(steps) == 2 + 8
        assert all(given[given.index("--bind") + 1] == mounts for given in steps)
        assert all("--nv" in given and "/images/dali_stream.img" in given for given in steps)


@pytest.mark.parametrize("script", slow_after(1, SCRIPTS))
def test_slurm_hands_the_token_on_without_writing_it(script: str, cluster: GpuCluster) -> None:
    done = cluster.run(script, "train")
    assert all(env["HF_TOKEN"] == TOKEN for _, env in cluster.calls("train"))
    commands = [json.loads(line)[1] for line in cluster.calls_file.read_text().splitlines()]
    assert TOKEN not in json.dumps(commands) + done.stdout + done.stderr + cluster.script.read_text()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("command", "env", "said"),
    [
        (["train"], {"IMAGE": None}, "IMAGE must be the container image, got none"),
        ([], {}, "the script must get the command to train with, got none"),
        (["train"], {"SLURM_GPUS_PER_NODE": "8"}, "--ntasks-per-node must be the number of GPUs in --gpus-per-node=8, got 4"),
    ],
)
def test_slurm_says_what_is_missing(
    script: str, command: list[str], env: dict[str, str | None], said: str, cluster: GpuCluster
) -> None:
    done = cluster.run(script, *command, **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert not cluster.calls("srun")
