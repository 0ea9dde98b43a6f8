"""The share of a rank in its machine: CPU cores by affinity, cpuset, quota and local ranks, and the default memory budget."""

from __future__ import annotations

import itertools
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.datasets import ODD_CAMERA, Column, build, image_file

from dali_stream import Dataset, Loader, MemoryBudgetError
from dali_stream.system.cgroups import cpu_quota, cpuset_cores
from dali_stream.system.cpu import Cores, available_cores
from dali_stream.system.memory_limit import MemoryLimit, budget, has_room_for_process, memory_limit
from dali_stream.system.ranks import LocalRanks, local_ranks


def written_files(root: Path, files: dict[str, str]) -> Path:
    """A file system with the cgroups of a process."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


EIGHT = LocalRanks(8, "LOCAL_WORLD_SIZE")

# ------------------------------------------------------------------------------------------------------------------ cores


@pytest.mark.parametrize(
    ("facts", "count", "said"),
    [
        (Cores(96, 96), 96, "this process may run on 96 of 96 cores"),
        (Cores(96, 96, None, EIGHT), 12, "8 of 8 local ranks (LOCAL_WORLD_SIZE) share 96 cores"),
        (Cores(12, 96, None, EIGHT), 12, "this process may run on 12 of 96 cores"),  # each rank is pinned to 12 of 96
        (Cores(48, 96, None, EIGHT), 12, "4 of 8 local ranks (LOCAL_WORLD_SIZE) share 48 cores"),  # NUMA halves
        (Cores(48, 48, None, EIGHT), 6, "8 of 8 local ranks (LOCAL_WORLD_SIZE) share 48 cores"),  # a cpuset of 48 of 96
        (Cores(96, 96, 12.0), 12, "the cgroup has a CPU quota of 12 cores"),
        (Cores(96, 96, 12.0, EIGHT), 1, "the cgroup has a CPU quota of 12 cores for 8 local ranks (LOCAL_WORLD_SIZE)"),
        (Cores(12, 96, 24.0, EIGHT), 3, "the cgroup has a CPU quota of 24 cores for 8 local ranks (LOCAL_WORLD_SIZE)"),
        (Cores(12, 96, 96.0, EIGHT), 12, "this process may run on 12 of 96 cores"),  # pinned, with a quota that is no limit
        (Cores(2, 2, None, EIGHT), 1, "8 of 8 local ranks (LOCAL_WORLD_SIZE) share 2 cores"),
        (Cores(4, 4, 0.5), 1, "the cgroup has a CPU quota of 0.5 cores"),
        (Cores(11, 96, None, EIGHT), 11, "this process may run on 11 of 96 cores"),  # one core is kept for the system
    ],
)
def test_cores_of_a_rank(facts: Cores, count: int, said: str) -> None:
    assert facts.count == count
    assert str(facts) == said


@given(
    affinity=st.integers(1, 256), cpuset=st.integers(1, 256), quota=st.none() | st.floats(0.1, 256), ranks=st.integers(1, 16)
)
def test_ranks_together_take_no_more_than_there_is(affinity: int, cpuset: int, quota: float | None, ranks: int) -> None:
    count = Cores(affinity, max(cpuset, affinity), quota, LocalRanks(ranks, "X")).count
    assert 1 <= count <= affinity
    if count > 1:
        assert quota is None or count * ranks <= quota
        assert count * ranks <= 1.5 * max(cpuset, affinity)  # the share is rounded: 1.49 ranks on the same cores count as 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, LocalRanks(1)),
        ({"LOCAL_WORLD_SIZE": "8"}, LocalRanks(8, "LOCAL_WORLD_SIZE")),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8"},
         LocalRanks(2, "LOCAL_WORLD_SIZE")),  # torchrun in a task of SLURM
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, LocalRanks(4, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        ({"MPI_LOCALNRANKS": "3"}, LocalRanks(3, "MPI_LOCALNRANKS")),
        ({"SLURM_NTASKS_PER_NODE": "8"}, LocalRanks(1)),  # the shell of sbatch is a single process
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_PROCID": "0"}, LocalRanks(1)),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, LocalRanks(8, "SLURM_NTASKS_PER_NODE")),
        # `srun -n 7` without --ntasks-per-node, on nodes with 2, 2, 2 and 1 tasks
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "1"},
         LocalRanks(2, "SLURM_STEP_TASKS_PER_NODE")),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"},
         LocalRanks(1, "SLURM_STEP_TASKS_PER_NODE")),
        # `srun --ntasks=1` in a job with eight tasks per node, such as an interactive shell
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0",
          "SLURM_NTASKS_PER_NODE": "8"}, LocalRanks(1, "SLURM_STEP_TASKS_PER_NODE")),
        ({"LOCAL_WORLD_SIZE": "many", "MPI_LOCALNRANKS": "0"}, LocalRanks(1)),
    ],
)  # fmt: skip
def test_local_ranks_of_each_launcher(environment: dict[str, str], expected: LocalRanks) -> None:
    assert local_ranks(environment) == expected


CPU_V1, CPUSET_V1, V2 = "sys/fs/cgroup/cpu", "sys/fs/cgroup/cpuset", "sys/fs/cgroup"


def test_version_2_of_cgroups(tmp_path: Path) -> None:
    root = written_files(tmp_path, {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{V2}/cpuset.cpus.effective": "0-95\n",
        f"{V2}/pod/cpuset.cpus.effective": "0-23,48-71\n", f"{V2}/pod/cpuset.cpus": "\n",
        f"{V2}/pod/cpu.max": "1200000 100000\n", f"{V2}/pod/box/cpu.max": "max 100000\n",
    })  # fmt: skip
    assert (cpu_quota(root), cpuset_cores(root)) == (12.0, 48)
    own = len(os.sched_getaffinity(0))
    found = available_cores(root, {"LOCAL_WORLD_SIZE": "8"})
    assert found == Cores(own, 48, 12.0, EIGHT)


def test_version_1_of_cgroups(tmp_path: Path) -> None:
    root = written_files(tmp_path, {
        "proc/self/cgroup": "4:cpuset:/job/step\n3:cpuacct,cpu:/job\n0::/\n",
        f"{CPUSET_V1}/cpuset.cpus": "0-95\n", f"{CPUSET_V1}/job/cpuset.cpus": "0-47\n",
        f"{CPUSET_V1}/job/step/cpuset.cpus": "4-15\n", f"{CPUSET_V1}/job/step/cpuset.effective_cpus": "4-15\n",
        f"{CPU_V1}/job/cpu.cfs_quota_us": "150000\n", f"{CPU_V1}/job/cpu.cfs_period_us": "100000\n",
        f"{CPU_V1}/cpu.cfs_quota_us": "-1\n", f"{CPU_V1}/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert (cpu_quota(root), cpuset_cores(root)) == (1.5, 12)


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert (cpu_quota(tmp_path), cpuset_cores(tmp_path)) == (None, None)
    assert available_cores(tmp_path, {}) == Cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1)
    broken = written_files(
        tmp_path, {"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "\n", f"{V2}/cpuset.cpus.effective": "all\n"}
    )
    assert (cpu_quota(broken), cpuset_cores(broken)) == (None, None)


def first_line(caplog: pytest.LogCaptureFixture) -> str:
    return next(record.getMessage() for record in caplog.records if record.name == "dali_stream")


def test_the_first_line_of_a_loader_has_the_threads_and_the_memory_with_the_reasons(
    odd: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "dali_stream")
    cores = available_cores()
    Loader(odd, batch_size=2).close()
    assert first_line(caplog).startswith(f"Loader: num_threads={cores.count} ({cores}), memory_budget=")
    for name, ranks in (("LOCAL_WORLD_SIZE", 64), ("OMPI_COMM_WORLD_LOCAL_SIZE", 32)):
        caplog.clear()
        monkeypatch.setenv(name, str(ranks))
        with Loader(odd, batch_size=2, delta_timestamps={"scalar": [100.0]}) as loader:  # which another line warns of
            assert loader._config.num_threads == 1
            size = loader._config.memory_budget
        monkeypatch.delenv(name)
        limit = memory_limit()
        assert limit is not None
        assert size == min(limit.size // 4 // ranks, 4 << 30)
        line = first_line(caplog)
        assert f"of {ranks} local ranks ({name}) share" in line or "CPU quota" in line
        assert re.search(
            rf'memory_budget="\d+MiB" \(the default, a quarter of .* of .*, divided by {ranks} local ranks\)', line
        )
    caplog.clear()
    Loader(odd, batch_size=2, num_threads=3, memory_budget="1GiB").close()
    assert first_line(caplog) == 'Loader: num_threads=3 (given), memory_budget="1.0GiB" (given)'
    caplog.clear()
    Loader(odd, batch_size=2, num_threads=3, memory_budget="1GiB", shuffle="sharded", rank=0, world_size=2).close()
    assert first_line(caplog).endswith('(given), shuffle="sharded" (this rank samples the same 11 frames in all epochs)')


# ----------------------------------------------------------------------------------------------------------------- memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "ranks", "expected"),
    [
        (2048 * GIB, 8, 4 * GIB),
        (128 * GIB, 8, 4 * GIB),
        (64 * GIB, 8, 2 * GIB),
        (12 * GIB, 1, 3 * GIB),  # Colab
        (16 * GIB, 1, 4 * GIB),
        (2 * GIB, 4, GIB // 8),
    ],
)
def test_the_default_budget_is_a_quarter_of_the_share_of_a_rank(memory: int, ranks: int, expected: int) -> None:
    limit = MemoryLimit(memory, "this machine")
    assert budget(None, limit, ranks, process_bytes=0).size == expected
    for process_bytes in (0, 512 << 20):
        assert budget("2GiB", limit, ranks, process_bytes).size == 2 * GIB, "what is given is taken"


def test_the_default_budget_leaves_memory_for_the_process_of_the_loader() -> None:
    found = budget(None, MemoryLimit(64 * GIB, "this machine"), 8, process_bytes=512 << 20)
    assert found.size == (8 * GIB - GIB // 2) // 4
    assert "less 512MiB for its process" in str(found)
    assert [has_room_for_process(MemoryLimit(size * GIB, "this machine"), 2) for size in (3, 4)] == [False, True]


def test_a_given_budget_may_exceed_a_quarter_but_not_the_memory(odd: Path) -> None:
    limit = memory_limit()
    with pytest.raises(MemoryBudgetError, match=rf"memory_budget must be at most {limit.size} bytes, .*got '4000TB'"):
        Loader(odd, batch_size=2, memory_budget="4000TB")
    with pytest.raises(ValueError, match=rf"at most {limit.size} bytes"):
        Loader(odd, batch_size=2, memory_budget=limit.size + 1)
    with Loader(odd, batch_size=2, memory_budget=limit.size) as loader:  # the number of the message
        assert len(list(loader)) == len(loader)
    with pytest.raises(MemoryBudgetError, match="Leave memory_budget out to get the default"):
        Loader(odd, batch_size=2, memory_budget="4000TB")
    Loader(odd, batch_size=2).close()


def test_a_default_that_does_not_hold_one_batch_names_a_number_that_does(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that thousands of ranks share."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    dataset = Dataset(demo, cameras=[])
    arguments: dict[str, Any] = {"batch_size": 16, "shuffle": False, "last_batch": "partial"}
    with pytest.raises(MemoryBudgetError) as refused:
        Loader(dataset, **arguments)
    assert "its default is at most a quarter of the memory of this machine or cgroup" in str(refused.value)
    [number] = re.findall(r"must be at least about (\d+) bytes", str(refused.value))
    [text] = re.findall(r'such as "(\w+)"', str(refused.value))
    for enough in (int(number), text):
        with Loader(dataset, memory_budget=enough, **arguments) as loader:
            found = list(itertools.chain.from_iterable(batch["index"].tolist() for batch in loader))
        assert found == list(range(dataset.num_frames)), "every row, in the recorded order"


def test_rows_that_are_larger_than_expected_name_a_budget_that_holds_them(tmp_path: Path) -> None:
    """Images of noise take more bytes than the estimate, so only the first batch finds out."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (48, 48, 48, 3), np.uint8)
    files = [{"bytes": image_file(Image.fromarray(frame)), "path": ""} for frame in pixels]
    root = build(tmp_path, (12,) * 4, {ODD_CAMERA: Column("image", (48, 48, 3), files)})
    options: dict[str, Any] = {"batch_size": 2, "shuffle": "global", "last_batch": "partial", "image_dtype": "uint8"}
    with (
        pytest.raises(MemoryBudgetError, match="the rows and indices of one batch take") as refused,
        Loader(root, memory_budget=120_000, device="cpu", **options) as loader,
    ):
        next(iter(loader))
    [larger] = re.findall(r'such as "(\w+)"', str(refused.value))
    with Loader(root, memory_budget=larger, device="cpu", **options) as loader:
        rows = 0
        for batch in loader:
            for index, frame in zip(batch["index"].tolist(), batch[ODD_CAMERA], strict=True):
                np.testing.assert_array_equal(frame.movedim(0, -1).numpy(), pixels[index])
                rows += 1
    assert rows == 48
