"""A stored frame belongs to the packets from which it was decoded, whatever name, times and tag its video has."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import videos
from support.clouds import Objects
from support.datasets import copied
from support.frame_cache import FRAME, indices, records, run, same
from support.servers import Server, spans

from dali_stream import Dataset
from dali_stream.cache.frame_files import FrameFiles, FrameFolder, video_records
from dali_stream.cli import main
from dali_stream.mp4.index import read_index
from dali_stream.storage.local import LocalStore


class Tagged(Server):
    """A server that chooses the ETags of its files."""

    def version(self, path: str) -> tuple[int, str] | None:
        data = self.content(path)
        return None if data is None else (len(data), '"chosen"')


class TaggedObjects(Tagged, Objects):
    """Buckets whose objects have such ETags."""


RECORDED: dict[str, Any] = {"image_size": None, "shuffle": False, "memory_budget": "2MiB", "last_batch": "partial"}


def two_videos(folder: Path) -> list[Path]:
    """Datasets with videos of equal index, size, times and first half, and another second half.

    Packets of a constant picture have the same sizes, whatever its colour.
    """
    roots, red, blue = [], (255, 0, 0), (0, 0, 255)
    half = sum(videos.EPISODES) // 24 * 12
    for name, colour in (("red", red), ("blue", blue)):
        frames = np.full((sum(videos.EPISODES), *videos.SIZE, 3), red, np.uint8)
        frames[half:] = colour
        roots.append(videos.recorded(folder / name, videos.mpeg4(12), frames=frames))
        for path in roots[-1].rglob("*.mp4"):
            os.utime(path, (1, 1))
    return roots


def damaged(root: Path, target: Path) -> Path:
    """A copy of a dataset with flipped bits in the second half of each video, which do not make it undecodable."""
    shutil.copytree(root, target)
    for store, index in indices(target):
        for keyframe in index.keyframes[len(index.keyframes) // 2 :].tolist():
            with open(target / index.path, "r+b") as file:
                at = int(index.offset[keyframe]) + int(index.size(keyframe)) * 3 // 4
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x10]))
        store.close()
    return target


@pytest.fixture(scope="module")
def stamped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stamped frames in MPEG-4, whose decoder delivers damaged frames without an error."""
    return videos.recorded(tmp_path_factory.mktemp("stamped"), videos.mpeg4(6))


def test_two_videos_with_equal_indices_and_times(tmp_path: Path) -> None:
    roots = two_videos(tmp_path)
    names = {own.name for root in roots for store, index in indices(root) if (own := video_records(store, index, np.arange(1)))}
    assert len(names) == 1, "both videos have the same file of records"
    for _ in range(2):
        for root in roots:
            expected, _ = run(root, None, 1, **RECORDED)
            assert same(run(root, tmp_path / "frames", 2, **RECORDED)[0], expected * 2)


@pytest.mark.parametrize("replace", ["in place", "by a copy with its times"])
def test_a_damaged_video_that_is_replaced_with_its_times(stamped: Path, tmp_path: Path, replace: str) -> None:
    expected, _ = run(stamped, None, 1, **RECORDED)
    root = damaged(stamped, tmp_path / "copy")
    wrong, _ = run(root, tmp_path / "frames", 1, **RECORDED)
    assert not same(wrong, expected)
    for path in root.rglob("*.mp4"):
        times, good = path.stat(), stamped / path.relative_to(root)
        if replace == "in place":
            path.write_bytes(good.read_bytes())
        else:
            shutil.copy(good, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for _ in range(2):
        assert same(run(root, tmp_path / "frames", 1, **RECORDED)[0], expected)


def test_files_with_equal_numbers_and_times_have_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two images of containers."""
    (tmp_path / "one").write_bytes(bytes(1 << 20))
    (tmp_path / "other").write_bytes(bytes(7 << 17) + b"\1" * (1 << 17))
    (tmp_path / "small").write_bytes(bytes(10))
    store, status = LocalStore(str(tmp_path)), (tmp_path / "one").stat()
    assert store.identity("one") == store.identity("one")
    assert store.identity("small")
    monkeypatch.setattr(os, "fstat", lambda _: status)
    assert store.identity("one") != store.identity("other")


@pytest.fixture
def video_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(path, place, size) of each read of a video file from now on."""
    read, reads = os.pread, list[tuple[str, int, int]]()

    def noted(handle: int, size: int, at: int) -> bytes:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if path.endswith(".mp4"):
            reads.append((path, at, size))
        return read(handle, size, at)

    monkeypatch.setattr(os, "pread", noted)
    return reads


def test_the_samples_of_a_video_are_read_once_for_all_of_its_episodes(
    tmp_path: Path, video_reads: list[tuple[str, int, int]]
) -> None:
    """In a run whose frames are all on disk, which reads nothing else of the video but its index."""
    video = videos.encode(videos.draw(), tmp_path / "a.mp4", videos.mpeg4(6))
    root = videos.write_dataset(tmp_path / "set", [video], [[4] * (videos.FRAMES // 4)])
    run(root, tmp_path / "frames", 1, **RECORDED)
    counts = []
    for episodes in ([7], None):
        video_reads.clear()
        with closing(Dataset(root, episodes=episodes)) as dataset:
            _, stats = run(dataset, tmp_path / "frames", 2, **RECORDED)
        assert stats["decoded_frames"] == 0
        counts.append(len(video_reads))
    assert counts[0] == counts[1] > 8


def test_a_video_that_changes_while_it_is_open_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "video"
    path.write_bytes(bytes(1 << 20))
    store, read, counts = LocalStore(str(tmp_path)), os.pread, [0]

    def counted(*arguments: int) -> bytes:
        counts[0] += 1
        return read(*arguments)

    monkeypatch.setattr(os, "pread", counted)
    seen = [store.identity("video")]
    once = counts[0]
    assert store.identity("video") == seen[0]
    assert counts[0] == once > 0

    times = path.stat()
    path.write_bytes(b"\1" * (1 << 20))  # the same size and, afterwards, the same time of its last change
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seen.append(store.identity("video"))

    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert store.read("video", 0, 1) == b"\1"
    assert store.identity("video") != seen[0]  # only its change time may differ from `seen[1]`, since it has lost its name
    store.close()
    seen.append(store.identity("video"))  # the file that has replaced it
    assert len({*seen}) == 3


@pytest.mark.parametrize("kind", ["server", "bucket"])
def test_a_server_with_the_same_tags_and_other_bytes(stamped: Path, tmp_path: Path, kind: str) -> None:
    expected, _ = run(stamped, None, 1, **RECORDED)
    other = damaged(stamped, tmp_path / "other")
    for number, root in enumerate((other, stamped)):
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        server = (
            Tagged(files) if kind == "server" else TaggedObjects({f"bucket{number}/{path}": d for path, d in files.items()})
        )
        with server:
            options = {"endpoint": server.url, "skip_signature": True, "region": "us-east-1"} if kind == "bucket" else None
            address = f"s3://bucket{number}" if kind == "bucket" else server.url
            with closing(Dataset(address, storage_options=options)) as dataset:
                found, stats = run(dataset, tmp_path / "frames", 1, **RECORDED)
        assert stats["disk_written_bytes"] > 0
    assert same(found, expected)


def test_another_source_with_the_same_packets_decodes_nothing(small: Path, tmp_path: Path) -> None:
    expected, first = run(small, tmp_path / "frames", 1, last_batch="partial")
    copy = copied(small, tmp_path / "copy")
    found, stats = run(copy, tmp_path / "frames", 1, last_batch="partial")
    assert same(found, expected)
    assert stats["decoded_frames"] == 0
    assert stats["disk_hits"] == first["frames"]
    assert stats["disk_written_bytes"] == 0


def packet_bytes(root: Path, reads: list[tuple[str, int, int]]) -> tuple[int, int]:
    """Bytes that were read of the packets of a dataset, also as samples of the files, and the bytes of all its packets."""
    places = {str(root / index.path): range(int(index.offset[0]), int(index.end[-1])) for _, index in indices(root)}
    read = sum(size for path, at, size in reads if at in places[path] and at + size <= places[path].stop)
    reads.clear()
    return read, sum(map(len, places.values()))


def test_packets_of_another_source_are_read_once_and_those_of_a_known_one_never(
    small: Path, tmp_path: Path, video_reads: list[tuple[str, int, int]]
) -> None:
    copy, read = copied(small, tmp_path / "copy"), []
    run(small, tmp_path / "frames", 1, last_batch="partial")
    video_reads.clear()
    for root in (small, copy, copy):
        run(root, tmp_path / "frames", 1, last_batch="partial")
        found, packets = packet_bytes(root, video_reads)
        read.append(found)
    samples = read[0]
    assert read == [samples, samples + packets, samples]


def test_packets_that_are_not_those_of_the_stored_frames_are_compared_once(
    stamped: Path, tmp_path: Path, video_reads: list[tuple[str, int, int]]
) -> None:
    """The folder has reached its limit, so that the frames of a damaged copy are not replaced by those of the good one."""
    run(damaged(stamped, tmp_path / "copy"), tmp_path / "frames", 1, **RECORDED)
    expected, _ = run(stamped, None, 1, **RECORDED)
    video_reads.clear()
    read = []
    alone: dict[str, Any] = {"num_threads": 1, "prefetch": 1}  # batches do not share clips, so each run decodes the same ones
    for _ in range(2):
        assert same(run(stamped, tmp_path / "frames", 3, **RECORDED, frame_cache_bytes=1, **alone)[0], expected * 3)
        found, packets = packet_bytes(stamped, video_reads)
        read.append(found)
    assert 0.9 * packets <= read[0] - read[1] <= 1.1 * packets


def test_a_warm_run_of_a_known_server_requests_only_indices(small: Path, tmp_path: Path) -> None:
    with Server(small) as server:
        for arguments in ({}, {"memory_budget": "2MiB"}):
            run(server.url, tmp_path, 1, last_batch="partial", **arguments)
        asked = len(server.requests)
        _, stats = run(server.url, tmp_path, 1, last_batch="partial", memory_budget="2MiB")
        video = spans(server.requests[asked:], ".mp4")
        assert stats["decoded_frames"] == 0
        asked = len(server.requests)
        with closing(Dataset(server.url)) as dataset:
            for _, index in indices(small):
                read_index(dataset.data_store, index.path)
        assert sorted(video) == sorted(spans(server.requests[asked:], ".mp4"))


def test_frames_of_the_former_layout_are_refused_by_name(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = run(small, tmp_path, 1)
    [group] = tmp_path.iterdir()
    key = json.loads((group / "key.json").read_text())
    words = json.dumps({**key, "layout": "1"}, indent=1, sort_keys=True, ensure_ascii=False)
    name = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
    group.rename(tmp_path / name)
    (tmp_path / name / "key.json").write_text(words)
    found, stats = run(small, tmp_path, 1)
    assert same(found, expected)
    assert stats["disk_hits"] == 0
    [warning] = [record.getMessage() for record in caplog.records if "earlier version" in record.getMessage()]
    assert warning.endswith(f"`dali-stream frames remove {tmp_path} {name}`")
    assert main(shlex.split(warning.partition("`dali-stream ")[2].rstrip("`"))) == 0
    assert not (tmp_path / name).exists()


# --------------------------------------------------------------------------------------------------- dali-stream frames verify


def test_verify_finds_frames_that_are_not_those_of_the_dataset(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, stats = run(small, tmp_path, 1, last_batch="partial")
    command = ["frames", "verify", str(small), "--frame-cache", str(tmp_path), "--image-size", "64x80"]
    assert main(command) == 0
    assert f"{stats['frames']} of {stats['frames']} frames were read from it, and none of them differ" in said(capsys)
    path = records(tmp_path)[0]
    [(store, index)] = [each for each in indices(small) if names(each[0], each[1]) == path.name]
    own = video_records(store, index, np.arange(len(index)))
    assert own is not None
    stored = path.read_bytes()
    frame = np.frombuffer(stored[3 * FRAME : 4 * FRAME], np.uint8).copy()
    frame[0] ^= 1
    packets = int.from_bytes(stored[own.count * FRAME + 3 * 16 :][:8], "little")
    [key] = [json.loads(file.read_text()) for file in tmp_path.glob("*/key.json")]
    files = FrameFiles(FrameFolder(tmp_path, None), key, FRAME)
    assert files.write(own, 3, packets, frame)  # with its checksum
    files.close()
    assert main(command) == 1
    text = said(capsys)
    assert "1 frame differ" in text
    assert "and 1 of them differ" in text


def names(store: LocalStore, index: Any) -> str:
    own = video_records(store, index, np.arange(1))
    assert own is not None
    return own.name


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())
