"""Remote datasets through the whole loader: the same batches as from the disk, for few bytes and within the budget."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from support.batches import Batch, check_identities, equal, samples
from support.datasets import ODD_CAMERA, SIDE, TOP, Camera, build, read_lengths, write_odd
from support.faults import hang
from support.servers import Handler, Server, spans
from support.slow import slow
from support.videos import SIZE, draw, encode, h264

from dali_stream import DaliStreamError, Dataset, Loader, MemoryBudgetError, StorageError
from dali_stream.pipeline import tabular

DELTAS = {TOP: [-0.5, 0.0, 0.05], "action": [0.0, 0.05]}


@pytest.fixture(scope="module")
def server(demo: Path) -> Iterator[Server]:
    with Server(demo) as running:
        yield running


@pytest.fixture(autouse=True)
def _forget(server: Server) -> None:
    server.requests.clear()


def batches_of(uri: Path | str | Dataset, **arguments: Any) -> list[Batch]:
    """One epoch. A batch may live in the loader's memory no longer than the loader, so it is copied."""
    with Loader(uri, **arguments) as loader:
        return list(loader)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"delta_timestamps": DELTAS, "consumers": 3, "episode_pool_size": 1},
        {"shuffle": False, "last_batch": "partial"},
        {"shuffle": "global", "last_batch": "pad"},
        {"consumers": 4, "rank": 1, "world_size": 2},
    ],
    ids=["pools", "windows", "recorded", "global", "second of two ranks"],
)
def test_remote_batches_equal_local_ones(small: Path, arguments: dict[str, Any]) -> None:
    arguments |= {"batch_size": 16, "image_dtype": "uint8"}
    with Server(small) as server, Loader(small, **arguments) as local, Loader(server.url, **arguments) as remote:
        for _ in range(2):  # epochs
            for there, here in zip(remote, local, strict=True):
                assert equal(there, here)


def test_rows_of_every_kind(tmp_path: Path) -> None:
    """Images and text in rows, row groups that cut through episodes: no video at all."""
    root = write_odd(tmp_path / "odd")
    with Server(root) as odd:
        expected = batches_of(root, batch_size=4, image_dtype="uint8")
        assert all(equal(a, b) for a, b in zip(batches_of(odd.url, batch_size=4, image_dtype="uint8"), expected, strict=True))


@pytest.mark.parametrize(("codec", "gop", "episodes"), [("h264", 12, 4), slow("hevc", 30, 2)])
def test_b_frames_and_open_gops(written: Callable[..., Path], codec: str, gop: int, episodes: int) -> None:
    """The packets that a frame needs may begin in the block before its own."""
    root = written(episodes=episodes, size=(128, 160), codec=codec, gop=gop)
    lengths = read_lengths(root)
    with Server(root) as server, Loader(server.url, batch_size=16, memory_budget="2MB", consumers=2) as loader:
        for batch in loader:
            check_identities(batch, TOP, None, lengths)
            check_identities(batch, SIDE, None, lengths)


@pytest.mark.slow
def test_nothing_is_fetched_twice_and_little_for_nothing(demo: Path, server: Server) -> None:
    with Loader(server.url, batch_size=32, last_batch="partial") as loader:
        for _ in range(3):
            assert sorted(samples(loader)) == list(range(loader.dataset.num_frames))
        stats = loader.stats()
    missing = [request for request in server.requests if request.sent == len(b"not found")]  # probes for a next file
    assert stats["fetched_bytes"] == server.sent - sum(request.sent for request in missing)
    assert stats["requests"] == len(server.requests) - len(missing)
    assert stats["evicted_early"] == stats["retries"] == stats["cached_bytes"] == 0
    assert stats["encoded_bytes"] == 0, "all frames are decoded"
    for path in sorted(demo.rglob("*.mp4")):
        asked = sorted(s for s in spans(server.requests, ".mp4") if s[0] == f"/{path.relative_to(demo)}")
        media = [(start, stop) for _, start, stop in asked if start and stop < path.stat().st_size]
        # The demo's episodes begin in the middle of GOPs of two frames: two episodes need the same GOP.
        twice = sum(max(first[1] - second[0], 0) for first, second in itertools.pairwise(media))
        assert twice <= 0.02 * path.stat().st_size, "bytes came twice"
    rows = sum(path.stat().st_size for path in demo.glob("data/**/*.parquet"))
    videos = sum(path.stat().st_size for path in demo.rglob("*.mp4"))
    used = sum(request.sent for request in server.requests if "/meta/" not in request.path)
    assert used <= 1.1 * (rows + videos)
    assert 0.9 * videos <= stats["needed_bytes"] <= 1.1 * (rows + videos)  # all frames are cached after the first epoch


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve episodes in one file per camera. Noise makes the files large: few frames, and many blocks."""
    folder, lengths = tmp_path_factory.mktemp("twelve"), range(40, 64, 2)
    rng, cameras = np.random.default_rng(0), {}
    for number, key in enumerate((TOP, SIDE)):
        frames = draw(lengths, camera=number)
        frames[:, : SIZE[0] * 3 // 4] ^= rng.integers(0, 64, frames[:, : SIZE[0] * 3 // 4].shape, np.uint8)
        path = encode(frames, folder / f"{number}.mp4", h264(2))
        cameras[key] = Camera([path], [lengths], SIZE)
        assert path.stat().st_size > 12 * 2 * 65536  # enough blocks to reveal a request per block
    return build(folder / "out", lengths, {}, cameras=cameras, fps=30)


@pytest.mark.slow
def test_twelve_episodes_in_a_file(twelve: Path) -> None:
    """Few bytes for nothing, and about a request for an episode and camera."""
    size = sum(path.stat().st_size for path in twelve.rglob("*") if path.is_file())
    with Server(twelve) as server:
        for shuffle in (True, False):
            server.requests.clear()
            with Loader(server.url, batch_size=32, shuffle=shuffle) as loader:
                assert len(samples(loader)) > 0
                stats = loader.stats()
            assert server.sent <= 1.1 * size
            assert stats["fetched_bytes"] <= 1.1 * stats["needed_bytes"]
        assert len([r for r in server.requests if r.path.endswith(f"{TOP}/chunk-000/file-000.mp4")]) < 2 * 12


def test_the_index_of_a_file_takes_three_requests(demo: Path, server: Server) -> None:
    with Loader(server.url, batch_size=4) as loader:
        next(iter(loader))
    for path in demo.rglob("*.mp4"):
        index = path.read_bytes().index(b"moov")
        asked = [s for s in spans(server.requests, ".mp4") if s[0] == f"/{path.relative_to(demo)}"]
        assert sum(start == 0 or stop > index for _, start, stop in asked) <= 3


def test_no_byte_of_a_camera_that_is_not_selected(server: Server) -> None:
    assert samples(Loader(Dataset(server.url, cameras=[SIDE]), batch_size=32))
    assert any(SIDE in request.path for request in server.requests)
    assert not any(TOP in request.path for request in server.requests)


def test_no_byte_of_images_in_rows_that_are_not_selected(tmp_path: Path) -> None:
    """Images lie between the columns that are read, and before the footer."""
    root = write_odd(tmp_path / "odd", lengths=(6, 6), rows_per_group=6)
    [data] = root.glob("data/*/*.parquet")
    parquet = pq.ParquetFile(data)
    images = []
    for group in range(parquet.metadata.num_row_groups):
        for column in map(parquet.metadata.row_group(group).column, range(parquet.metadata.num_columns)):
            if column.path_in_schema == f"{ODD_CAMERA}.bytes":
                start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
                images.append((start, start + column.total_compressed_size))
    with Server(root) as odd:
        expected = batches_of(Dataset(root, cameras=[]), batch_size=4)
        assert all(equal(a, b) for a, b in zip(batches_of(Dataset(odd.url, cameras=[]), batch_size=4), expected, strict=True))
        read = spans(odd.requests, "data/chunk-000/file-000.parquet")
    assert read
    assert not [(r, i) for r in read for i in images if r[1] < i[1] and i[0] < r[2]]


def test_only_the_episodes_that_are_selected(demo: Path, server: Server) -> None:
    """Two of six episodes cost about a third of the bytes."""
    lengths = read_lengths(demo)
    with Loader(Dataset(server.url, episodes=[1, 4]), batch_size=8) as loader:
        assert {int(e) for batch in loader for e in batch["episode_index"]} == {1, 4}
    videos = sum(path.stat().st_size for path in demo.rglob("*.mp4"))
    share = (lengths[1] + lengths[4]) / sum(lengths.values())
    assert sum(r.sent for r in server.requests if r.path.endswith(".mp4")) < (share + 0.15) * videos


@pytest.mark.slow
def test_the_first_batch_needs_only_what_it_shows(twelve: Path) -> None:
    """Four frames per camera need a small part of the bytes. Later requests read all bytes in large ranges."""
    videos = sum(path.stat().st_size for path in twelve.rglob("*.mp4"))
    # On a line this slow, unneeded bytes can only arrive before the first batch if they delay it.
    with Server(twelve, bytes_per_s=350_000) as server, Loader(server.url, batch_size=4, seed=1) as loader:
        epoch = iter(loader)
        next(epoch)
        assert sum(request.sent for request in server.requests if request.path.endswith(".mp4")) < videos / 3
        server.network.bytes_per_s = None
        for _ in epoch:
            pass
        fetched = [stop - start for _, start, stop in spans(server.requests, ".mp4")]
    assert len(fetched) < 12 * 2 * 4  # a few per episode and camera
    assert sum(request.sent for request in server.requests if request.path.endswith(".mp4")) < 1.1 * videos


@pytest.mark.slow
def test_the_budget_holds_and_changes_nothing_but_the_traffic(
    demo: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    budget = 700_000
    arguments: dict[str, Any] = {"batch_size": 16, "image_dtype": "uint8", "delta_timestamps": {TOP: [0.0, 0.5]}}
    expected = batches_of(demo, **arguments)
    resident = []
    with Loader(server.url, memory_budget=budget, **arguments) as loader:
        for batch, other in zip(loader, expected, strict=True):
            resident.append(loader.stats()["resident_bytes"])
            assert equal(batch, other)
        evicted = loader.stats()["evicted_early"]
    assert max(resident) <= budget
    assert evicted > 0
    warnings = [r.getMessage() for r in caplog.records if "memory_budget leaves" in r.getMessage()]
    assert len(warnings) == 1
    assert "Give a larger memory_budget" in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", slow("disk")])
def test_indices_that_the_budget_does_not_keep_are_told(
    demo: Path, server: Server, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    uri, arguments = demo if where == "disk" else server.url, {"batch_size": 2, "consumers": 2, "image_dtype": "uint8"}
    with Loader(demo, **arguments) as loader:
        expected = list(itertools.islice(loader, 60))
    assert "more than once" not in caplog.text
    with Loader(uri, memory_budget=90_000, **arguments) as loader:  # less than all rows and indices take
        assert all(equal(batch, other) for batch, other in zip(loader, expected, strict=False))
        assert loader.stats()["indices_read_again"] > 0
    warnings = [r.getMessage() for r in caplog.records if "indices are read more than once" in r.getMessage()]
    assert len(warnings) == 1
    assert "Give a larger memory_budget" in warnings[0]


@pytest.mark.parametrize("budget", [1000, 40_000])
def test_a_budget_below_one_batch_is_refused_up_front(server: Server, budget: int) -> None:
    with pytest.raises(DaliStreamError, match=rf"must be at least .*got {budget}: a batch of 32 .* larger"):
        Loader(server.url, batch_size=32, memory_budget=budget)


def test_resume_over_the_network(small: Path) -> None:
    arguments: dict[str, Any] = {"batch_size": 8, "consumers": 4}
    expected = samples(batches_of(small, **arguments))
    with Server(small) as server:
        with Loader(server.url, **arguments) as loader:
            epoch = iter(loader)
            found = samples(next(epoch) for _ in range(5))
            state = loader.state_dict()
        with Loader(server.url, **arguments) as loader:
            loader.load_state_dict(state)
            assert found + samples(loader) == expected


def test_close_leaves_no_thread(server: Server) -> None:
    before = {thread.name for thread in threading.enumerate()}
    loader = Loader(server.url, batch_size=8)
    epoch = iter(loader)
    next(epoch)
    assert any("dali_stream fetch" in thread.name for thread in threading.enumerate())
    loader.close()
    assert {t.name for t in threading.enumerate() if t.name.startswith("dali_stream")} <= before
    loader = Loader(server.url, batch_size=8)
    epoch = iter(loader)
    next(epoch)
    del loader, epoch
    gc.collect()
    assert {t.name for t in threading.enumerate() if t.name.startswith("dali_stream")} <= before


def test_close_ends_the_reads_for_a_state(demo: Path) -> None:
    """Statistics, a part of a state, are read in the background. A server that never answers must not delay `close`."""
    with Server(demo, faults={"meta/stats.json": itertools.repeat(hang)}) as server:
        for closed in (True, False):
            loader = Loader(Dataset(server.url, give_up_after_s=86_400), batch_size=8)
            epoch = iter(loader)
            next(epoch)
            if closed:
                loader.close()
            del loader, epoch
            gc.collect()
            assert not any(thread.name == "dali_stream state" for thread in threading.enumerate())


def test_close_ends_the_read_of_the_tasks(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner waits for it before the first batch."""
    asked, waits, columns = threading.Event(), threading.Event(), tabular.columns

    def never(*arguments: Any) -> None:
        asked.set()
        hang(*arguments)

    def noted(*arguments: Any) -> Any:
        waits.set()  # the names of the tasks are needed next
        return columns(*arguments)

    monkeypatch.setattr(tabular, "columns", noted)
    with Server(demo) as server, ThreadPoolExecutor(1) as threads:
        loader = Loader(Dataset(server.url, storage_options={"timeout": 86_400}, give_up_after_s=86_400), batch_size=8)
        server.set_faults({"meta/tasks.parquet": itertools.repeat(never)})
        first = threads.submit(next, iter(loader))
        assert asked.wait(60)
        assert waits.wait(60)
        loader.close()
        with pytest.raises(DaliStreamError, match="closed"):
            first.result()


@pytest.mark.parametrize("use", ["made", "left early", "closed"])
def test_a_loader_does_not_end_the_reads_of_another(demo: Path, use: str) -> None:
    """One waits for the tasks of its first batch while another one, with the same dataset, is made, left or closed."""
    asked, answer = threading.Event(), threading.Event()

    def late(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        asked.set()
        assert answer.wait(60)
        handler.reply(206, data, fields)

    with Server(demo) as server, ThreadPoolExecutor(1) as threads:
        parts = Dataset(server.url).split({"train": 0.5, "val": 0.5}, seed=0)  # which share connections
        with Loader(parts["train"], batch_size=8) as loader, Loader(parts["val"], batch_size=8) as other:
            epoch = iter(other)
            next(epoch)
            server.set_faults({"meta/tasks.parquet": [late]})
            first = threads.submit(next, iter(loader))
            assert asked.wait(60)
            if use == "made":
                Loader(parts["train"], batch_size=4).close()
            elif use == "left early":
                del epoch
            else:
                other.close()
            assert not wait([first], timeout=0.5).done  # a read that was ended raises an error within this time
            answer.set()
            assert len(first.result()["index"]) == 8


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("meta/stats.json", lambda dataset: dataset.identity),
        ("meta/stats.json", lambda dataset: dataset.stats),
        ("meta/tasks.parquet", lambda dataset: dataset.tasks),
    ],
    ids=["identity", "stats", "tasks"],
)
def test_a_server_that_hangs_does_not_block_other_datasets(demo: Path, file: str, read: Callable[[Dataset], Any]) -> None:
    asked, ended = threading.Event(), threading.Event()

    def hang_and_tell(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        asked.set()
        hang(handler, data, fields)

    def wait_for_the_server() -> None:
        with pytest.raises(StorageError):
            read(remote)
        ended.set()

    with Server(demo, faults={file: itertools.repeat(hang_and_tell)}) as server:
        remote = Dataset(server.url, give_up_after_s=86_400)
        thread = threading.Thread(target=wait_for_the_server)
        thread.start()
        try:
            asked.wait()
            read(Dataset(demo))
            assert not ended.is_set()
        finally:
            remote.close()
            thread.join()
    assert ended.is_set()


def test_several_loaders_share_a_dataset(server: Server) -> None:
    dataset = Dataset(server.url, cameras=[TOP])
    with Loader(dataset, batch_size=16, seed=1) as one, Loader(dataset, batch_size=16, seed=2) as other:
        found = [(samples([a]), samples([b])) for a, b in zip(one, other, strict=True)]
    assert all(len(np.unique(np.concatenate(part))) for part in zip(*found, strict=True))
    assert len({i for a, _ in found for i in a}) == sum(len(a) for a, _ in found)


def test_a_lack_of_memory_for_decoded_frames_leaves_no_threads(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty

    def fail(shape: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(shape, int) and shape > 1 << 20:
            raise MemoryError
        return empty(shape, *arguments, **options)

    with Server(demo) as server, Loader(server.url, batch_size=4, device="cpu") as loader:
        with monkeypatch.context() as patched:
            patched.setattr(np, "empty", fail)
            with pytest.raises(MemoryBudgetError, match=r"\d+ batches in progress with batch_size=4 need more memory"):
                next(iter(loader))
        assert not [thread.name for thread in threading.enumerate() if "dali_stream fetch" in thread.name]
        assert len(next(iter(loader))["index"]) == 4


def test_a_file_that_becomes_shorter_is_an_error(small: Path) -> None:
    """In storage that tells no version. Until the error, all frames are right."""
    memory, lengths = fsspec.filesystem("memory"), read_lengths(small)
    memory.put(str(small), "/shorter", recursive=True)
    try:
        with Loader("memory://shorter", batch_size=8, memory_budget=150_000) as loader:
            epoch = iter(loader)

            def rest() -> None:
                for batch in epoch:
                    check_identities(batch, TOP, None, lengths)
                    check_identities(batch, SIDE, None, lengths)

            next(epoch)
            for path in memory.glob("/shorter/videos/**/*.mp4"):
                whole = memory.cat_file(path)
                memory.pipe_file(path, whole[: len(whole) // 2])
            with pytest.raises(DaliStreamError, match=r"\.mp4"):
                rest()
    finally:
        memory.rm("/shorter", recursive=True)
