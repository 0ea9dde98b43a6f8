"""Frame cache on disk: batches stay the same, frames are decoded once, and whatever is wrong with a record is found."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import resource
import shutil
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import videos
from support.datasets import ODD_CAMERA, copied
from support.disks import small_file_system
from support.frame_cache import ARGUMENTS, FRAME, TOP, indices, records, run, same
from support.killing import start
from support.servers import Handler, Server

from dali_stream import DecodeError, Loader, Mixture, StorageError
from dali_stream.cache import claims
from dali_stream.cache.frame_files import FrameFiles, Records, image_records, video_records
from dali_stream.cache.frame_folder import FrameFolder
from dali_stream.cli import main
from dali_stream.storage.local import LocalStore
from dali_stream.system.memory_limit import is_in_memory

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "little memory": {"memory_budget": "2MiB"},
    "little memory, windows": {"memory_budget": "3MiB", "delta_timestamps": {TOP: [-0.1, 0.0, 0.25]}},
    "little memory, contiguous": {"memory_budget": "2MiB", "memory_format": "contiguous"},
    "little memory, float32": {"memory_budget": "2MiB", "image_dtype": "float32"},
    "windows": {"delta_timestamps": {TOP: [-0.1, 0.0, 0.25]}},
    "global": {"shuffle": "global"},
    "second rank of two": {"rank": 1, "world_size": 2},
    "padded": {"last_batch": "pad"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_batches_are_those_without_it_and_nothing_is_decoded_twice(small: Path, tmp_path: Path, setting: str) -> None:
    expected, _ = run(small, None, **SETTINGS[setting])
    found, first = run(small, tmp_path / "frames", **SETTINGS[setting])
    assert same(found, expected)
    assert first["disk_written_bytes"] > 0
    again, later = run(small, tmp_path / "frames", **SETTINGS[setting])
    assert same(again, expected)
    assert later["decoded_frames"] == 0
    assert later["disk_hits"] > 0


def test_each_frame_is_decoded_once_whatever_the_memory(small: Path, tmp_path: Path) -> None:
    _, stats = run(small, tmp_path, epochs=3, memory_budget="2MiB", last_batch="partial", prefetch=1)
    with Loader(small, **ARGUMENTS) as loader:
        frames = loader.dataset.num_frames * 2
    assert frames <= stats["decoded_frames"] < 1.1 * frames
    assert stats["disk_written_bytes"] == frames * FRAME


def test_two_ranks_decode_each_frame_once_together(small: Path, tmp_path: Path) -> None:
    alone, _ = run(small, None, 1, rank=1, world_size=2)
    shares = [run(small, tmp_path, 1, rank=rank, world_size=2) for rank in (0, 1)]
    assert same(shares[1][0], alone)
    with Loader(small, **ARGUMENTS) as loader:
        frames = loader.dataset.num_frames * 2
    assert sum(stats["decoded_frames"] for _, stats in shares) < 1.1 * frames


def test_two_nodes_of_a_sharded_run_store_each_frame_once_together(small: Path, tmp_path: Path) -> None:
    """Each node has a rank and a folder, and needs the same half of the frames in all epochs."""
    with Loader(small, **ARGUMENTS) as loader:
        frames = loader.dataset.num_frames * 2

    def nodes(epochs: int, **options: Any) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
        folders = [tmp_path / f"{options['shuffle']} {rank}" for rank in (0, 1)]
        options = {"world_size": 2, "last_batch": "partial", "memory_budget": "2MiB", "prefetch": 1} | options
        return [run(small, folder, epochs, rank=rank, **options) for rank, folder in enumerate(folders)]

    sharded = nodes(3, shuffle="sharded")
    for rank, (found, stats) in enumerate(sharded):
        expected, _ = run(small, None, 3, rank=rank, world_size=2, last_batch="partial", shuffle="sharded")
        assert same(found, expected)
        assert stats["disk_written_bytes"] == pytest.approx(frames * FRAME / 2, rel=0.02)
    assert sum(stats["decoded_frames"] for _, stats in sharded) < 1.1 * frames, "GOPs at the cuts are decoded twice"
    again = [stats["decoded_frames"] for _, stats in nodes(1, shuffle="sharded")]
    assert again == [0, 0], "a later run with the same seed, as after a restart"


@pytest.mark.parametrize("dataset", ["small", "odd"])  # video, and images in rows
def test_runs_with_the_same_order_divide_the_decoding(
    dataset: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "WAIT_S", 60.0)  # a busy machine may need more than 2 s for a task
    root = request.getfixturevalue(dataset)
    expected, _ = run(root, None, 1)
    loaders = [Loader(root, **ARGUMENTS, frame_cache=tmp_path) for _ in range(2)]
    frames = loaders[0].dataset.num_frames * len(loaders[0].dataset.cameras)  # the next epoch is begun ahead
    with loaders[0], loaders[1], ThreadPoolExecutor(2) as threads:
        for found in threads.map(list, loaders):
            assert same(found, expected)
        assert sum(loader.stats()["decoded_frames"] for loader in loaders) < 1.3 * frames


def test_runs_with_equal_process_ids_both_decode(g1: Path, tmp_path: Path) -> None:  # such as those in two containers
    arguments = ARGUMENTS | {"batch_size": 32, "num_threads": 1}
    with Loader(g1, **arguments, frame_cache=tmp_path) as one, Loader(g1, **arguments, frame_cache=tmp_path) as other:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda loader: list(itertools.islice(loader, 8)), (one, other)))
        assert min(loader.stats()["decoded_frames"] for loader in (one, other)) > 0


def frame_files(folder: Path) -> tuple[FrameFiles, Records, FrameFolder]:
    """Records of 8 images in a new folder."""
    group = FrameFolder(folder, None)
    return FrameFiles(group, {"layout": "2"}, FRAME), image_records(np.array([bytes([n]) for n in range(8)], object)), group


def test_a_record_at_another_place_is_not_that_frame(tmp_path: Path) -> None:
    files, own, _ = frame_files(tmp_path)
    frame = np.arange(FRAME, dtype=np.uint32).astype(np.uint8)
    assert files.write(own, 2, 0, frame)
    [path] = records(tmp_path)
    data = bytearray(path.read_bytes().ljust(own.count * (FRAME + 16), b"\0"))
    for at, size in ((0, FRAME), (own.count * FRAME, 16)):
        data[at + 3 * size : at + 4 * size] = data[at + 2 * size : at + 3 * size]
    path.write_bytes(data)
    read = [np.zeros(FRAME, np.uint8) for _ in range(2)]
    assert files.read(own, [2, 3], read) == [True, False]
    assert (read[0] == frame).all()
    files.close()


def test_an_entry_follows_its_record_and_an_error_closes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, own, folder = frame_files(tmp_path)
    frame, write, sizes = np.ones(FRAME, np.uint8), os.pwrite, list[int]()

    def full(handle: int, data: Any, at: int) -> int:
        sizes.append(memoryview(data).nbytes)
        if len(sizes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert files.write(own, 0, 0, frame)
    assert sizes == [FRAME, 16]
    assert not files.write(own, 1, 0, frame)
    assert sizes == [FRAME, 16, FRAME], "without its record, no entry is written"
    assert files.stored(own, np.arange(8)).tolist() == [True] + 7 * [False]
    assert not folder.is_open
    assert not files.write(own, 2, 0, frame)
    assert len(sizes) == 3, "nothing is written any more"
    assert len([record for record in caplog.records if "No space left on device" in record.getMessage()]) == 1
    files.close()


@pytest.mark.parametrize("memory", ["2MiB", "1GiB"])  # frames are read into the batch, or cached
def test_bytes_that_change_on_disk_are_found(small: Path, tmp_path: Path, memory: str) -> None:
    expected, _ = run(small, tmp_path)
    rng = random.Random(0)
    for path in records(tmp_path):
        data = bytearray(path.read_bytes())
        for _ in range(40):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    found, stats = run(small, tmp_path, memory_budget=memory)
    assert same(found, expected)
    assert stats["decoded_frames"] > 0
    assert run(small, tmp_path)[1]["decoded_frames"] == 0, "what was damaged is written again"


@pytest.mark.parametrize("left", [0, 1000, 0.5])
def test_files_that_become_shorter_are_decoded_again(small: Path, tmp_path: Path, left: float) -> None:
    expected, _ = run(small, tmp_path)
    for path in records(tmp_path):
        os.truncate(path, int(left * path.stat().st_size) if left < 1 else int(left))
    found, _ = run(small, tmp_path)
    assert same(found, expected)


def test_a_limit_is_kept_and_changes_no_batch(small: Path, tmp_path: Path) -> None:
    limit = 200 * FRAME
    expected, _ = run(small, None)
    found, stats = run(small, tmp_path, frame_cache_bytes=limit)
    assert same(found, expected)
    assert 0 < stats["disk_written_bytes"] <= limit
    assert sum(path.stat().st_blocks * 512 for path in records(tmp_path)) <= limit


@pytest.mark.parametrize("records_allowed", [300, 2000])
def test_two_ranks_keep_a_limit_together(small: Path, tmp_path: Path, records_allowed: int) -> None:
    limit = records_allowed * FRAME
    ranks = [
        Loader(small, **(ARGUMENTS | {"rank": rank, "world_size": 2}), frame_cache=tmp_path, frame_cache_bytes=limit)
        for rank in (0, 1)
    ]
    with ranks[0], ranks[1]:
        for _ in range(2):
            for _ in zip(*ranks, strict=True):
                assert sum(path.stat().st_blocks * 512 for path in records(tmp_path)) <= limit
    assert all(rank.stats()["disk_written_bytes"] > 0 for rank in ranks)


@pytest.mark.parametrize(("size", "limit"), [("4m", 2 << 20), ("0", None)])  # 0: the file system has no limit of its own
def test_a_file_system_in_memory_is_filled_by_half(small: Path, tmp_path: Path, size: str, limit: int | None) -> None:
    """/dev/shm of a container has 64 MB, and the batches of torch's worker processes are there as well."""
    expected, _ = run(small, None)
    with small_file_system(tmp_path / "memory", size) as place:
        found, stats = run(small, place / "new/frames")
        on_disk = sum(path.stat().st_blocks * 512 for path in records(place / "new/frames"))
    assert same(found, expected)
    if limit is not None:
        assert limit / 2 < on_disk <= limit
    else:
        assert stats["disk_written_bytes"] > 2 << 20


def test_remote_video_is_not_fetched_for_frames_that_are_there(small: Path, tmp_path: Path) -> None:
    with Server(small) as server:
        expected, _ = run(server.url, None, memory_budget="2MiB")
        run(server.url, tmp_path, memory_budget="2MiB")
        asked = len(server.requests)
        found, stats = run(server.url, tmp_path, memory_budget="2MiB")
        video = [path for path in list(server.requests)[asked:] if str(path).endswith(".mp4")]
    assert same(found, expected)
    assert stats["decoded_frames"] == 0
    assert len(video) <= 8, "only the indices of the files"


def test_a_limit_without_a_folder_is_an_error(small: Path) -> None:
    with pytest.raises(ValueError, match=r"frame_cache_bytes='1GB' needs frame_cache"):
        Loader(small, frame_cache_bytes="1GB")


def test_a_file_in_place_of_the_folder_is_an_error(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"frame_cache must be a folder that can be created, got "):
        Loader(small, frame_cache=tmp_path / "file")


def test_images_in_rows_are_decoded_once(odd: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "memory_budget": "2MiB", "last_batch": "partial"}
    for size in ((60, 64), None):
        expected, _ = run(odd, None, **arguments, image_size=size)
        found, first = run(odd, tmp_path, **arguments, image_size=size)
        assert same(found, expected)
        assert 21 <= first["decoded_frames"] < 42
        again, later = run(odd, tmp_path, **arguments, image_size=size)
        assert same(again, expected)
        assert later["decoded_frames"] == 0


def test_damaged_images_on_disk_are_decoded_again(odd: Path, tmp_path: Path) -> None:
    expected, _ = run(odd, tmp_path, batch_size=4)
    for path in records(tmp_path):
        os.truncate(path, path.stat().st_size // 2)
    found, stats = run(odd, tmp_path, batch_size=4)
    assert same(found, expected)
    assert stats["decoded_frames"] > 0


def test_a_mixture_of_video_and_images_shares_one_folder(small: Path, odd: Path, tmp_path: Path) -> None:
    def mixture() -> Mixture:
        keys = {"video": {TOP: "camera"}, "images": {ODD_CAMERA: "camera"}}
        return Mixture({"video": small, "images": odd}, keys=keys, missing="pad", nearest=True)

    expected, _ = run(mixture(), None, 1)
    found, first = run(mixture(), tmp_path, 1)
    again, later = run(mixture(), tmp_path, 1)
    assert same(found, expected)
    assert same(again, expected)
    assert first["disk_written_bytes"] > 0
    assert later["decoded_frames"] == 0
    assert later["disk_hits"] > 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_resumed_run_with_other_ranks_reads_the_same_folder(small: Path, tmp_path: Path, world_size: int) -> None:
    with Loader(small, **ARGUMENTS) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = list(batches)
    with Loader(small, **ARGUMENTS, frame_cache=tmp_path) as loader:
        next(iter(loader))
    for rank in range(world_size):
        ranks = {"rank": rank, "world_size": world_size, "batch_size": ARGUMENTS["batch_size"] // world_size}
        with Loader(small, **(ARGUMENTS | ranks), frame_cache=tmp_path) as loader:
            loader.load_state_dict(state)
            found = list(loader)
        assert [batch["index"].tolist() for batch in found] == [batch["index"].tolist()[rank::world_size] for batch in rest]
        for batch, whole in zip(found, rest, strict=True):
            assert (batch[TOP] == whole[TOP][rank::world_size]).all()


def test_frames_that_cannot_be_decoded_are_substituted_alike(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path / "copy")
    path = sorted(root.rglob("*.mp4"))[0]
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = bytes(2000)
    path.write_bytes(data)
    expected, without = run(root, None, on_error="substitute")
    assert without["substituted"] > 0
    for _ in range(2):
        found, stats = run(root, tmp_path / "frames", on_error="substitute")
        assert same(found, expected)
        assert stats["substituted"] == without["substituted"]


def test_a_folder_that_is_removed_meanwhile_changes_no_batch(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = run(small, None, 3)
    run(small, tmp_path / "frames", 1)
    found = []
    with Loader(small, **ARGUMENTS, frame_cache=tmp_path / "frames", memory_budget="2MiB") as loader:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                found.append(batch)
                if (epoch, number) == (0, 1):
                    shutil.rmtree(tmp_path / "frames")
    assert same(found, expected)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # Open files stay usable, so the run may log no warning at all.
    assert len([text for text in warnings if "frame_cache" in text]) <= 1


@pytest.mark.parametrize("memory", ["2MiB", "1GiB"])
def test_frames_that_are_removed_during_a_run_are_left(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    """The disk is free again, no more frames are written to removed files, and one warning says so."""
    expected, _ = run(small, None, 3)
    with Loader(small, **ARGUMENTS, frame_cache=tmp_path, memory_budget=memory, prefetch=1) as loader:
        epoch = iter(loader)
        batches = list(itertools.islice(epoch, 4))
        [name] = [path.name for path in tmp_path.iterdir()]
        assert main(["frames", "remove", str(tmp_path), name]) == 0
        batches += [*epoch, *loader, *loader]
        written = loader.stats()["disk_written_bytes"]
        batches_after = list(loader)
        assert loader.stats()["disk_written_bytes"] == written
        descriptors = [
            os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if number_is_open(number)
        ]
    assert same(batches, expected)
    assert len(batches_after) == len(expected) // 3
    assert not [path for path in descriptors if path.startswith(str(tmp_path)) and path.endswith(" (deleted)")]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "frame_cache" in text and "No more frames are added" in text]) == 1


def number_is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_named(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warnings = []
    for owner, group, mode in ((12345, 12345, 0o755), (12345, os.getegid(), 0o775), (0, 0, 0o755)):
        folder = tmp_path / str(mode) / str(owner)
        folder.mkdir(parents=True)
        os.chown(folder, owner, group)
        folder.chmod(mode)
        caplog.clear()
        run(small, folder, 1)
        warnings.append([record.getMessage() for record in caplog.records if "another user" in record.getMessage()])
    assert list(map(len, warnings)) == [1, 0, 0]
    assert f"{tmp_path / '493/12345'} belongs to another user (uid 12345)" in warnings[0][0]


def test_images_of_a_wrong_size_stay_an_error(odd: Path, tmp_path: Path) -> None:
    """They stay an error although the cache has frames of that size, resized from these images."""
    root = copied(odd, tmp_path)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][ODD_CAMERA]["shape"] = [60, 64, 3]
    (root / "meta/info.json").write_text(json.dumps(info))
    run(root, tmp_path / "frames", batch_size=4, image_size=(60, 64))
    for folder in (None, tmp_path / "frames"):
        with pytest.raises(DecodeError, match="the image must be RGB of 60×64"):
            run(root, folder, batch_size=4, image_size=None)


def test_frames_for_the_disk_only_make_no_batch_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a GOP cannot be read, and only the last batches show it."""
    root = videos.recorded(tmp_path, videos.h264(250))
    [path] = root.rglob("*.mp4")
    read, limit = LocalStore.read, path.stat().st_size * 2 // 3

    def fails(store: LocalStore, name: str, start: int, stop: int) -> bytes:
        if name.endswith(".mp4") and start < limit < stop < path.stat().st_size:
            raise StorageError("a bad sector")
        return read(store, name, start, stop)

    monkeypatch.setattr(LocalStore, "read", fails)
    good = {}
    for folder in (None, tmp_path / "frames"):
        with videos.loader(root, batch_size=4, shuffle=False, prefetch=1, memory_budget="400kB", frame_cache=folder) as loader:
            with pytest.raises(StorageError, match="a bad sector"):
                deque(loader, maxlen=0)
            good[folder] = loader.stats()["batches"]
    assert good[None] > 0
    assert good[tmp_path / "frames"] == good[None]


def test_files_without_a_version_are_not_stored(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def without_a_version(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        rest = {name: value for name, value in fields.items() if name not in ("ETag", "Last-Modified")}
        handler.reply(206 if "Content-Range" in rest else 200, data, rest)

    expected, _ = run(small, None)
    with Server(small, faults=itertools.repeat(without_a_version)) as server:
        found, stats = run(server.url, tmp_path)
    assert same(found, expected)
    assert stats["disk_written_bytes"] == 0
    assert len([record for record in caplog.records if "has no version" in record.getMessage()]) == 1


def test_a_key_that_was_not_written_to_its_end_is_repaired(small: Path, tmp_path: Path) -> None:
    run(small, tmp_path, 1)
    [key] = tmp_path.glob("*/key.json")
    key.write_text("")
    run(small, tmp_path, 1)
    assert "torchcodec" in json.loads(key.read_text())


def test_a_link_into_memory_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert is_in_memory(tmp_path / "link/frames")
    assert is_in_memory("/dev/shm/frames")
    assert not is_in_memory(Path(__file__))


def run_with_a_full_disk(root: Path, folder: Path, limit: int, log: Path, pipe: Connection) -> None:
    """No file may be larger than `limit`, as if the disk were full then."""
    logging.basicConfig(filename=log)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    found, stats = run(root, folder, 3)
    expected, _ = run(root, None, 3)
    pipe.send((same(found, expected), stats["disk_written_bytes"]))


@pytest.mark.slow
def test_a_full_disk_is_one_warning_and_changes_no_batch(small: Path, tmp_path: Path) -> None:
    run(small, tmp_path / "whole")
    limit = max(path.stat().st_size for path in records(tmp_path / "whole")) - 8 * 20
    process, pipe = start(run_with_a_full_disk, small, tmp_path / "frames", limit, tmp_path / "log")
    is_same, written = pipe.recv()
    process.join()
    assert is_same
    assert written > 0
    [warning] = [line for line in (tmp_path / "log").read_text().splitlines() if "frame_cache" in line]
    assert warning.endswith(": File too large. No more frames are added")


def test_a_folder_that_cannot_be_written_is_read(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test may run as root, who may write everywhere."""
    expected, _ = run(small, tmp_path)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    found, stats = run(small, tmp_path)
    assert same(found, expected)
    assert stats["decoded_frames"] == 0


def write_until_killed(root: Path, folder: Path, rank: int, pipe: Connection) -> None:
    with Loader(root, **(ARGUMENTS | {"rank": rank, "world_size": 2}), frame_cache=folder) as loader:
        pipe.send("ready")
        for _ in itertools.repeat(None):
            list(loader)


@pytest.mark.slow
def test_after_kills_of_two_writers_no_frame_is_wrong(small: Path, tmp_path: Path) -> None:
    moments, found = random.Random(3), 0
    expected, _ = run(small, None, 1)
    for _ in range(4):  # of two writers each
        writers = [start(write_until_killed, small, tmp_path / "frames", rank) for rank in (0, 1)]
        for _, pipe in writers:
            assert pipe.recv() == "ready"
        for process, _ in writers:
            process.join(moments.uniform(0.0, 0.3))
            process.kill()
            process.join()
        found = max(found, len(records(tmp_path / "frames")))
        shutil.copytree(tmp_path / "frames", tmp_path / "copy")
        assert same(run(small, tmp_path / "copy", 1)[0], expected)
        shutil.rmtree(tmp_path / "copy")
        if found and moments.random() < 0.5:
            shutil.rmtree(tmp_path / "frames")
    assert found > 0


@pytest.mark.slow
def test_each_of_a_thousand_changed_bits_is_found(small: Path, tmp_path: Path) -> None:
    """A changed bit of a record is found when the record is read, and so is a changed bit of its entry.

    A record with a changed entry counts as that of another frame, or as missing. A changed hash of the packets of a source only
    means that the packets are read again.
    """
    expected, _ = run(small, tmp_path, 1, last_batch="partial")
    counts = {
        own.name: own.count for own in (video_records(store, index, np.arange(1)) for store, index in indices(small)) if own
    }
    files, rng, changed = records(tmp_path), random.Random(1), 0
    while changed < 1000:
        places: set[tuple[int, int]] = set()  # file and record
        for _ in range(250):
            number = rng.randrange(len(files))
            count = counts[files[number].name]
            at = rng.randrange(count * (FRAME + 16)) if rng.random() < 0.9 else rng.randrange(files[number].stat().st_size)
            place = at // FRAME if at < count * FRAME else (at - count * FRAME) // 16
            if (number, place) in places:
                continue
            if place < count:
                places.add((number, place))
            with files[number].open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        found, stats = run(small, tmp_path, 1, last_batch="partial")
        assert same(found, expected)
        assert stats["disk_written_bytes"] >= len(places) * FRAME, "each damaged frame was decoded and written again"
        changed += len(places)


# ---------------------------------------------------------------------------------------------------------- dali-stream frames


def test_the_command_fills_lists_and_removes(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "frames"
    fill = ["frames", "fill", str(small), "--frame-cache", str(folder), "--image-size", "64x80"]
    assert main(fill) == 0
    assert run(small, folder)[1]["decoded_frames"] == 0
    capsys.readouterr()
    assert main(fill) == 0
    assert "0 B added" in capsys.readouterr().out
    (folder / "mine.txt").write_text("of somebody else")
    assert main(["frames", "list", str(folder), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["frames"]
    assert found["key"]["frames"] == "64×80×3 uint8"
    own = [path for path in folder.rglob("*") if path.is_file() and path.name != "mine.txt"]
    assert found["size"] == sum(path.stat().st_blocks * 512 for path in own)
    assert main(["frames", "list", str(folder)]) == 0
    assert found["name"] in capsys.readouterr().out
    assert main(["frames", "remove", str(folder), found["name"]]) == 0
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert main(["frames", "remove", str(folder), found["name"]]) == 2


def test_info_estimates_the_size_of_one_dataset(small: Path, odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(small), "--image-size", "64x80", "--json"]) == 0
    fill = json.loads(capsys.readouterr().out)["frame_cache"]
    with Loader(small, **ARGUMENTS) as loader:
        frames = 2 * loader.dataset.num_frames
    assert fill["size"] == frames * FRAME
    assert fill["seconds"] == pytest.approx(frames / fill["frames_per_s"])
    assert main(["info", str(small), str(odd), "--image-size", "64x80"]) == 2
    assert "must be given for one dataset, got several" in " ".join(capsys.readouterr().err.split())


def test_frames_of_another_size_are_kept_apart(small: Path, tmp_path: Path) -> None:
    expected, _ = run(small, None, image_size=(32, 40))
    run(small, tmp_path)
    found, stats = run(small, tmp_path, image_size=(32, 40))
    assert same(found, expected)
    assert stats["decoded_frames"] > 0
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
