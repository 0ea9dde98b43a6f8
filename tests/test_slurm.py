"""docker/slurm/train.sbatch under stubs of SLURM: the programs that it starts, and the ends of a run that cause a requeue.

The stubs behave as SLURM 22.05 did with two nodes: a signal to the job reaches every process of its step (and not the
batch shell), srun exits with the highest code of its tasks, and kills them where it gets SIGTERM itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster

SCRIPT = Path(__file__).parents[1] / "docker/slurm/train.sbatch"
ARGUMENTS = ("my data", "--out", "a dir", "--note", "$HOME *", "")

# With RELEASE, torchrun waits for SIGTERM or for the end of this pipe, whichever is earlier. Otherwise it starts one rank.
STUB = """
if name == "scontrol" and arguments[0] == "show":
    print("localhost", "node1", sep="\\n")
elif name == "scontrol":
    sys.exit(int(os.environ.get("REFUSED", "0")))
elif name == "squeue":
    print(os.environ.get("STATE", "RUNNING"))
elif name == "srun":
    while arguments[0].startswith("--"):
        arguments.pop(0)
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    tasks = [subprocess.Popen(arguments, env=os.environ | {"SLURM_NODEID": str(node)}) for node in range(nodes)]
    signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
    codes = [task.wait() for task in tasks]
    sys.exit(max(128 - code if code < 0 else code for code in codes))
elif name == "torchrun" and "RELEASE" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with open(os.environ["RELEASE"]) as pipe:
        os.write(1, b"ready\\n")  # at once, for several share the pipe
        pipe.read()
elif name == "torchrun":
    rank = arguments[arguments.index("--no-python") + 1 :]
    sys.exit(subprocess.call(rank, env=os.environ | {"RANK": "0"}) != 0)
elif name == "python":
    sys.exit(int(os.environ.get("CODE", "0")))
"""

# Under the real torchrun. Answers SIGTERM with CODE; where FAILING names it, it fails by itself when all are ready.
PROGRAM = """
import os, signal, sys
rank, code = os.environ["RANK"], int(os.environ["CODE"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(os.environ["RELEASE"]) as pipe:
    os.write(1, b"ready\\n")
    if rank == os.environ.get("FAILING"):
        pipe.read()
        sys.exit(5)
signal.sigwait([signal.SIGTERM])
sys.exit(code)
"""


class TrainingCluster(Cluster):
    """Two nodes with four GPUs each, and an environment and a repository with stubs for torchrun, Python and train.py."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUB, ("srun", "scontrol", "squeue", "torchrun", "python"))
        (self.submitted_from / ".venv").mkdir()
        (self.submitted_from / ".venv/bin").symlink_to(self.programs)
        self.train = self.submitted_from / "pipelines/train.py"
        self.train.parent.mkdir()
        self.train.write_text(PROGRAM)
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)
        self._writer = os.fdopen(os.open(self.pipe, os.O_RDWR), "wb", buffering=0)

    def release(self) -> None:
        """Ends the pipe for all that read it."""
        self._writer.close()

    def requeued(self) -> list[list[str]]:
        return [given for given, _ in self.calls("scontrol") if given[0] == "requeue"]

    def begin(self, ready: int, **env: str) -> subprocess.Popen[str]:
        """A job, of which that many processes have said that they are ready."""
        job = self.start(SCRIPT, *ARGUMENTS, **env)
        assert job.stdout is not None
        said = [job.stdout.readline() for _ in range(ready)]
        if not all(line.startswith("ready") for line in said):
            signal_step(job, signal.SIGKILL)
            pytest.fail(f"{said}\n{job.communicate(timeout=300)}")
        return job


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TrainingCluster]:
    cluster = TrainingCluster(tmp_path)
    yield cluster
    cluster.release()


def signal_step(job: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    """As slurmstepd does it: each process of the step, whichever sessions it has made, and not the srun that waits for it."""
    # On a loaded machine a program that the script has called beside srun may not have ended yet.
    srun = max(psutil.Process(job.pid).children(), key=lambda child: len(child.children(recursive=True)))
    for process in srun.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was signalled before has ended others
            process.send_signal(number)


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and errors of a job that is about to end."""
    _, errors = job.communicate(timeout=300)
    return job.returncode, errors


@pytest.mark.parametrize(("restarts", "run_id"), [(None, "4711_0"), ("2", "4711_2")])
def test_each_node_gets_one_torchrun_for_its_gpus(restarts: str | None, run_id: str, cluster: TrainingCluster) -> None:
    done = cluster.run(SCRIPT, *ARGUMENTS, SLURM_RESTART_COUNT=restarts)
    assert done.returncode == 0, done.stderr
    launched = cluster.calls("torchrun")
    assert sorted(env["SLURM_NODEID"] for _, env in launched) == ["0", "1"]
    for given, env in launched:
        assert given[: given.index("--no-python")] == [
            "--nnodes=2",
            "--nproc-per-node=4",
            "--max-restarts=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:24711",
            f"--rdzv-id={run_id}",
        ]
        assert env["SRUN_CPUS_PER_TASK"] == "12"
        assert 30 < int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300  # what --signal leaves
    ((step, _),) = cluster.calls("srun")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(step)


def test_train_py_gets_the_arguments_as_they_are_and_resumes(cluster: TrainingCluster) -> None:
    assert cluster.run(SCRIPT, *ARGUMENTS).returncode == 0
    ranks = cluster.calls("python")
    assert [given for given, _ in ranks] == [["-u", str(cluster.train), *ARGUMENTS, "--resume"]] * 2


def test_environment_and_repository_can_lie_elsewhere(cluster: TrainingCluster, tmp_path: Path) -> None:
    venv, repo = (tmp_path / name for name in ("an environment", "a repository"))
    (cluster.submitted_from / ".venv").rename(venv)
    cluster.submitted_from.rename(repo)
    cluster.submitted_from.mkdir()
    assert cluster.run(SCRIPT, *ARGUMENTS, VENV=str(venv), REPO=str(repo)).returncode == 0
    assert [given[1] for given, _ in cluster.calls("python")] == [str(repo / "pipelines/train.py")] * 2


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (ARGUMENTS, {"SLURM_JOB_ID": None}, "this script must run as a SLURM job. Submit it: sbatch"),
        ((), {}, "the first argument must be a dataset, got ''"),
        (("--out", "dir", "data"), {}, "the first argument must be a dataset, got '--out'"),
        (("data", "--max-steps", "5"), {}, "--out must be the folder of the run"),
        (("data", "--out"), {}, "--out must be the folder of the run"),
        (("data", "--out="), {}, "--out must be the folder of the run"),
        (("data", "--out", "--from-scratch"), {}, "--out must be the folder of the run"),
        (ARGUMENTS, {"VENV": "/nowhere"}, "VENV must be an environment with dali_stream, got /nowhere without"),
        (ARGUMENTS, {"REPO": "/nowhere"}, "REPO must be the folder that contains pipelines/train.py, but /nowhere"),
        (ARGUMENTS, {"SLURM_GPUS_PER_NODE": None}, "--gpus-per-node must be one number, the same for all nodes, got 'none'"),
        (ARGUMENTS, {"SLURM_GPUS_PER_NODE": "0"}, "--gpus-per-node must be one number, the same for all nodes, got '0'"),
        (
            ARGUMENTS,
            {"SLURM_GPUS_PER_NODE": "h100:2,a100:2"},
            "must be one number, the same for all nodes, got 'h100:2,a100:2'",
        ),
        (ARGUMENTS, {"SLURM_GPUS_ON_NODE": "3"}, "must be the number of GPUs of each node, here 3, got h100:4. Omit"),
    ],
)
def test_it_says_what_is_missing(
    arguments: tuple[str, ...], env: dict[str, str | None], said: str, cluster: TrainingCluster
) -> None:
    done = cluster.run(SCRIPT, *arguments, **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert not cluster.called()


@pytest.mark.parametrize("form", [("--out=dir",), ("--from-scratch", "--out", "dir")])
def test_out_is_found_in_either_form(form: tuple[str, ...], cluster: TrainingCluster) -> None:
    assert cluster.run(SCRIPT, "data", *form).returncode == 0


def test_a_program_that_ends_by_itself_is_not_requeued(cluster: TrainingCluster) -> None:
    assert cluster.run(SCRIPT, *ARGUMENTS, CODE="0").returncode == 0
    assert cluster.run(SCRIPT, *ARGUMENTS, CODE="5").returncode == 1  # torchrun's code for any failure
    assert cluster.run(SCRIPT, *ARGUMENTS, CODE="143").returncode == 1  # nobody has asked it to end
    assert not cluster.requeued()


def test_a_job_that_slurm_signals_is_requeued_once(cluster: TrainingCluster) -> None:
    job = cluster.begin(ready=2, RELEASE=str(cluster.pipe))
    signal_step(job)
    assert end(job)[0] == 143
    assert cluster.requeued() == [["requeue", "4711"]]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", ""])
def test_a_job_that_slurm_ends_is_left_to_slurm(state: str, cluster: TrainingCluster) -> None:
    """scontrol would put one that its user has cancelled back into the queue."""
    job = cluster.begin(ready=2, RELEASE=str(cluster.pipe), STATE=state)
    signal_step(job)
    code, errors = end(job)
    assert (code, cluster.requeued()) == (143, [])
    assert f"the job is {state}, so it is not requeued here" in errors


def test_a_requeue_that_is_refused_is_told(cluster: TrainingCluster) -> None:
    job = cluster.begin(ready=2, RELEASE=str(cluster.pipe), REFUSED="1")
    signal_step(job)
    code, errors = end(job)
    assert (code, len(cluster.requeued())) == (143, 1)
    assert "could not be requeued; submit it again" in errors


def test_sigterm_to_the_batch_shell_alone_does_not_end_the_run(cluster: TrainingCluster) -> None:
    """srun would kill the tasks, and what they have not saved would be lost."""
    job = cluster.begin(ready=2, RELEASE=str(cluster.pipe))
    os.kill(job.pid, signal.SIGTERM)
    cluster.release()
    assert end(job)[0] == 0
    assert not cluster.requeued()


def real(cluster: TrainingCluster, nodes: int) -> dict[str, str]:
    """Variables that make a job use torchrun and Python of this environment, two ranks in total, and a free port."""
    for port in range(20_000 + os.getpid() % 10_000, 40_000):
        with socket.socket() as free:
            if free.connect_ex(("localhost", port)):
                break
    gpus = str(2 // nodes)
    job = {"SLURM_JOB_ID": str(port - 20_000), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_PER_NODE": gpus}
    return job | {"VENV": sys.prefix, "OMP_NUM_THREADS": "1", "RELEASE": str(cluster.pipe)}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "code", "ended", "requeues"), [(1, "143", 143, 1), (1, "0", 0, 0)])
def test_under_torchrun_what_is_cut_short_is_requeued_and_what_has_finished_is_not(
    nodes: int, code: str, ended: int, requeues: int, cluster: TrainingCluster
) -> None:
    job = cluster.begin(ready=2, CODE=code, **real(cluster, nodes))
    signal_step(job)
    found, errors = end(job)
    assert (found, len(cluster.requeued())) == (ended, requeues), errors


@pytest.mark.slow
def test_under_torchrun_a_rank_that_fails_ends_the_job_without_a_requeue(cluster: TrainingCluster) -> None:
    """Though torchrun sends SIGTERM to the other rank, which saves and exits with 143."""
    job = cluster.begin(ready=2, CODE="143", FAILING="0", **real(cluster, 1))
    cluster.release()
    code, errors = end(job)
    assert (code, cluster.requeued()) == (1, []), errors
