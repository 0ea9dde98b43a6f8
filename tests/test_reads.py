"""Network reads of a Loader: the frames are right, the memory budget holds, and few bytes are read twice."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from PIL import Image
from support import faults, videos
from support.collection import no_collection
from support.datasets import V2_ROWS, V2_VIDEO, Camera, Column, build, copied, image_file, v2_path
from support.opened import batch_of, open_episodes
from support.servers import Handler, Server, spans
from support.slow import examples, slow_after

from dali_stream import DaliStreamError, Dataset, DatasetError, DecodeError, Loader, MemoryBudgetError, StorageError
from dali_stream.cache.look_ahead import ReadLimits
from dali_stream.mp4.boxes import HEAD
from dali_stream.mp4.clip import span
from dali_stream.mp4.index import read_index
from dali_stream.mp4.slices import SLICE_HEAD
from dali_stream.storage import LocalStore, open_store

CAMERA = videos.CAMERA
FILM, FILES = 45, 3  # frames of a video file, and number of files
STEPS = [-3, 0]  # of a window
CODECS = {"every frame a keyframe": videos.h264(1), "open GOPs": videos.h264(7, open_gop=True)}
PHASES = [Phase.explicit, Phase.generate]  # shrinking runs thousands of epochs


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Video files of each codec. Frame n of file f carries the identity (f, n)."""
    folder = tmp_path_factory.mktemp("films")
    drawn = [videos.draw([FILM], first=number) for number in range(FILES)]
    return {
        name: [videos.encode(frames, folder / name / f"{number}.mp4", codec) for number, frames in enumerate(drawn)]
        for name, codec in CODECS.items()
    }


def write(root: Path, files: Sequence[Path], cuts: Sequence[Sequence[int]]) -> Path:
    """A dataset whose episodes are parts of video files, end to end. `cuts` has the frames of the episodes of each file."""
    lengths = [length for file in cuts for length in file]
    cameras = {CAMERA: Camera(files[: len(cuts)], cuts, videos.SIZE)}
    return build(root, lengths, {}, cameras=cameras, fps=videos.FPS)


def assert_right_frames(batch: dict[str, Any], cuts: Sequence[Sequence[int]], steps: Sequence[int] = STEPS) -> None:
    """The windows of a batch show the frames that its rows ask for, by what is drawn into them."""
    lengths = [length for file in cuts for length in file]
    identities = [(number, frame) for number, file in enumerate(cuts) for frame in range(sum(file))]
    expected = []
    for index, frame, episode in zip(*(batch[f"{key}index"].tolist() for key in ("", "frame_", "episode_")), strict=True):
        expected += [identities[index - frame + min(max(frame + step, 0), lengths[episode] - 1)] for step in steps]
    assert videos.identities(batch[CAMERA].reshape(-1, *batch[CAMERA].shape[-3:])) == expected


@pytest.mark.slow
@examples(40, phases=PHASES)
@given(
    cuts=st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=3), min_size=2, max_size=FILES),
    codec=st.sampled_from([*CODECS]),
    budget=st.sampled_from([40_000, 60_000, 120_000, 3_000_000, 1 << 30]),
    shuffle=st.sampled_from([True, "global", False]),
    consumers=st.integers(1, 3),
)
def test_all_that_a_batch_shows_is_read_in_time_and_within_the_budget(
    films: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory, cuts: list[list[int]], codec: str, budget: int,
    shuffle: bool | str, consumers: int,
) -> None:  # fmt: skip
    """The episodes begin and end anywhere in the GOPs of their files, so that they share some GOPs."""
    root = write(tmp_path_factory.mktemp("cut") / "set", films[codec], cuts)
    options: dict[str, Any] = {
        "batch_size": 3, "prefetch": 2, "memory_budget": budget, "shuffle": shuffle, "consumers": consumers,
        "delta_timestamps": {CAMERA: [step / videos.FPS for step in STEPS]},
    }  # fmt: skip
    try:
        with Server(root) as server, videos.loader(server.url, **options) as loader:
            for _ in range(2):
                seen = []
                for batch in loader:
                    assert_right_frames(batch, cuts)
                    held = loader.stats()
                    # Rows for the next batches may come shortly before video makes room for them.
                    assert held["encoded_bytes"] + held["decoded_bytes"] <= budget
                    assert held["resident_bytes"] <= budget + held["row_bytes"] + held["index_bytes"]
                    seen += batch["index"].tolist()
                assert sorted(seen) == list(range(sum(map(sum, cuts))))
            again = [loader.stats()[name] for name in ("evicted_early", "indices_read_again", "frames_evicted_before_use")]
    except MemoryBudgetError:
        assert budget < 100_000
        return
    if budget == 1 << 30:
        assert again == [0, 0, 0]


def test_encoded_video_in_memory_is_not_requested_again(tmp_path: Path) -> None:
    """Frames of open GOPs of H.264 are decoded with packets of several blocks, some of which belong to both episodes."""
    cuts = [17, FILM - 17]
    film = videos.encode(videos.draw([FILM]), tmp_path / "film.mp4", CODECS["open GOPs"])
    with Server(write(tmp_path / "set", [film], [cuts])) as server:
        dataset = Dataset(server.url)
        sizes = read_index(dataset.data_store, videos.VIDEO.format(CAMERA, 0)).size()
        shared = sizes[12:26].sum()  # of the two GOPs that both episodes need
        of_index = len(spans(server.requests, ".mp4"))
        server.requests.clear()
        # A batch shows all frames, and this budget divides the video into blocks of a GOP.
        with videos.loader(dataset, batch_size=FILM, consumers=1, memory_budget=3_000_000) as loader:
            for batch in loader:
                assert_right_frames(batch, [cuts], [0])
            needed = loader.stats()["needed_bytes"]
        asked = [stop - start for _, start, stop in spans(server.requests, ".mp4")]
    assert sum(asked[of_index:]) == sizes.sum() + shared <= needed


# Arguments, and whether the first packet is read for the index: decoding High 4:4:4 Predictive and MPEG-4 may depend on the
# encoder, which it names.
FIRST_PACKETS = {
    "av1": (videos.av1(2), False),
    "h264": (videos.h264(12), False),
    "hevc": (videos.hevc(12), False),
    "vp9": (videos.vp9(12), False),
    "h264-444": (videos.h264(12, pixels="yuv444p"), True),
    "mpeg4": (videos.mpeg4(12), True),
}


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("codec", FIRST_PACKETS)
def test_the_first_packet_is_read_only_if_it_may_name_the_encoder(codec: str, in_front: bool, tmp_path: Path) -> None:
    arguments, names_encoder = FIRST_PACKETS[codec]
    frames = np.random.default_rng(0).integers(0, 256, (26, 64, 96, 3), np.uint8)
    layout = ("-movflags", "+faststart", "-metadata", f"comment={'x' * HEAD}") if in_front else ()
    index = read_index(LocalStore(str(tmp_path)), videos.encode(frames, tmp_path / "a.mp4", (*arguments, *layout)).name)
    with Server(tmp_path) as server:
        read_index(open_store(server.url), "a.mp4")
        asked = [span[1:] for span in spans(server.requests, ".mp4")]
    # The first 8 KiB, and the rest of `moov`. They contain the beginning of the first packet if `moov` is behind the packets.
    first, second = index.offset[index.keyframes[:2]].tolist()
    more = asked[2:]
    assert asked[0] == (0, HEAD)
    assert [start for start, _ in more] == [second] * codec.startswith("h264") + [first] * (names_encoder and in_front)
    assert all(stop - start <= SLICE_HEAD for start, stop in more)


def test_packets_that_no_block_of_the_batch_contains_are_requested(tmp_path: Path) -> None:
    """If H.264 has many B-frames, a frame of an open GOP needs packets that are even in the block after its own."""
    film = videos.encode(videos.draw([FILM]), tmp_path / "film.mp4", videos.h264(20, open_gop=True, b_frames=8))
    index = read_index(LocalStore(str(tmp_path)), film.name)
    first = 38
    packet = int(index.display_order[first])
    assert index.gop_start(packet + 8) == index.gop_start(packet) < index.gop_start(span(index, packet)[1])
    root = write(tmp_path / "set", [film], [[first, FILM - first]])
    options = {"batch_size": 1, "consumers": 1, "memory_budget": 100_000}  # a block for each GOP
    with Server(root) as server, videos.loader(Dataset(server.url, episodes=[1]), **options) as loader:
        shown = [videos.identities(batch[CAMERA]) for batch in loader]
    assert sorted(shown) == [[(0, frame)] for frame in range(first, FILM)]


FRAMES, EPISODES = 8, 8  # of the datasets below


@pytest.fixture(scope="module")
def one_file_each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with a file of rows and a video file for each episode. Read only."""
    folder = tmp_path_factory.mktemp("apart")
    films = [
        videos.encode(videos.draw([FRAMES], first=number), folder / f"{number}.mp4", videos.h264(1))
        for number in range(EPISODES)
    ]
    cameras = {CAMERA: Camera(films, [[FRAMES]] * EPISODES, videos.SIZE)}
    return build(folder / "set", [FRAMES] * EPISODES, {}, cameras=cameras, fps=videos.FPS, version="v2.1")


@pytest.mark.parametrize(
    ("template", "earlier", "requests"),
    slow_after(1, [(V2_VIDEO, 3, 4), (V2_ROWS, 0, 1), (V2_VIDEO, 0, 4)]),
    ids=["video", "rows", "index"],
)
def test_a_read_ahead_that_fails_is_repeated_once_for_its_batch(
    one_file_each: Path, template: str, earlier: int, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server refuses a request for a file of episode 5, long before the batch that needs it. Then it refuses two."""
    path = v2_path(template, 5, CAMERA)

    def stream(refused: int) -> list[int]:
        script = [None] * earlier + [faults.status(403)] * refused
        with (
            Server(one_file_each, faults={path: script}) as server,
            videos.loader(server.url, batch_size=FRAMES, shuffle=False, prefetch=2) as loader,
        ):
            for batch in loader:
                assert_right_frames(batch, [[FRAMES]] * EPISODES, [0])
                seen.extend(batch["index"].tolist())
            assert sum(request.path == f"/{path}" for request in server.requests) == requests + refused
            return [loader.stats()[name] for name in ("indices_read_again", "evicted_early", "retries")]

    for refused in range(3):
        seen: list[int] = []
        if refused < 2:
            assert stream(refused) == [0, 0, 0], "it says nothing about the memory"
            assert seen == list(range(FRAMES * EPISODES))
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        else:
            with pytest.raises(StorageError, match=rf"{path}.*403"):
                stream(refused)
            assert seen == list(range(5 * FRAMES)), "the batches before it are delivered"


class Last:
    """Wait for the last batch of an epoch: all others are delivered, and decode tasks need its encoded video.

    Args:
        tasks: Number of these tasks.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks, self._is_next = tasks, threading.Event()

    def iterate(self, loader: Loader, cuts: Sequence[Sequence[int]]) -> None:
        for number, batch in enumerate(loader):
            assert_right_frames(batch, cuts, [0])
            if number == len(cuts) - 2:
                self._is_next.set()

    def wait(self) -> None:
        assert self._is_next.wait(30)
        until = time.monotonic() + 30
        while self._waiting() < self._tasks:
            assert time.monotonic() < until
            os.sched_yield()

    def fault(self, answer: faults.Fault) -> faults.Fault:
        """The fault `answer`, then."""

        def late(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
            self.wait()
            answer(handler, data, fields)

        return late

    def _waiting(self) -> int:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            traceback.extract_stack(frame)
            for thread, frame in sys._current_frames().items()
            if names.get(thread, "").startswith("dali_stream decode")
        ]
        return sum(any(each.filename.endswith("cache/video.py") for each in stack) for stack in stacks)


def test_a_read_ahead_that_fails_while_tasks_wait_for_it_is_repeated_by_one_of_them(tmp_path: Path) -> None:
    """The server answers the read-ahead of the last video, with an error, only when all decode tasks wait for it."""
    frames, episodes = 80, 4  # a batch of 80 frames has two tasks
    films = [
        videos.encode(videos.draw([frames], first=number), tmp_path / f"{number}.mp4", videos.h264(1))
        for number in range(episodes)
    ]
    cameras = {CAMERA: Camera(films, [[frames]] * episodes, videos.SIZE)}
    root = build(tmp_path / "set", [frames] * episodes, {}, cameras=cameras, fps=videos.FPS, version="v2.1")
    path, last = v2_path(V2_VIDEO, episodes - 1, CAMERA), Last(2)
    with (
        Server(root, faults={path: [None] * 3 + [last.fault(faults.status(403))]}) as server,
        videos.loader(server.url, batch_size=frames, shuffle=False, prefetch=2, num_threads=4) as loader,
    ):
        last.iterate(loader, [[frames]] * episodes)
        asked = [request.range for request in server.requests if request.path == f"/{path}"]
    assert len(set(asked)) == len(asked) > 4


def test_close_ends_reads_that_decode_tasks_would_repeat(one_file_each: Path) -> None:
    """The server never answers the read-ahead of the last video, and a decode task waits for it."""
    script, last = itertools.chain([None] * 3, itertools.repeat(faults.hang)), Last(1)
    with Server(one_file_each, faults={v2_path(V2_VIDEO, EPISODES - 1, CAMERA): script}) as server:
        loader = videos.loader(Dataset(server.url, give_up_after_s=86_400), batch_size=FRAMES, shuffle=False, prefetch=2)
        with ThreadPoolExecutor(1) as threads:
            rest = threads.submit(last.iterate, loader, [[FRAMES]] * EPISODES)
            last.wait()
            loader.close()
            with pytest.raises(DaliStreamError, match="closed"):
                rest.result()


def test_video_is_fetched_ahead_and_evicted_within_the_budget(one_file_each: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The memory holds the video of four batches. The server sends the video of batch 4 after a request for that of batch 7.

    Until then, no batch after batch 5 is planned, and the memory was full before.
    """
    requested, budget = threading.Event(), 50_000

    def note(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        requested.set()
        handler.reply(206, data, fields)

    def delay(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        if not requested.wait(30):
            return handler.reply(403, b"")
        return handler.reply(206, data, fields)

    of_index: list[Any] = [None] * 3
    script = {v2_path(V2_VIDEO, 4, CAMERA): [*of_index, *[delay] * 99], v2_path(V2_VIDEO, 7, CAMERA): [*of_index, note]}
    with (
        Server(one_file_each, faults=script) as server,
        videos.loader(server.url, batch_size=FRAMES, shuffle=False, prefetch=2, memory_budget=budget) as loader,
    ):
        for batch in loader:
            assert_right_frames(batch, [[FRAMES]] * EPISODES, [0])
            held = loader.stats()
            assert held["encoded_bytes"] + held["decoded_bytes"] <= budget
            assert held["resident_bytes"] <= budget + held["row_bytes"] + held["index_bytes"]
        assert loader.stats()["evicted_early"] > 0
    assert sum("bytes are fetched more than once" in record.getMessage() for record in caplog.records) == 1


def test_video_leaves_the_memory_when_all_of_its_frames_are_decoded(one_file_each: Path) -> None:
    """Until then, it stays, so that no byte is requested again after the three requests for the index of each file."""
    with Server(one_file_each) as server, videos.loader(server.url, batch_size=2) as loader:
        assert all(len(list(loader)) == FRAMES * EPISODES // 2 for _ in range(2))
        assert loader.stats()["encoded_bytes"] == 0
        for path in (v2_path(V2_VIDEO, episode, CAMERA) for episode in range(EPISODES)):
            asked = [stop - start for _, start, stop in spans(server.requests, path)]
            assert sum(asked[3:]) == read_index(LocalStore(str(one_file_each)), path).size().sum()


@pytest.mark.parametrize(("template", "earlier"), [(V2_ROWS, 0), (V2_VIDEO, 0), (V2_VIDEO, 3)], ids=["rows", "index", "video"])
def test_an_episode_that_cannot_be_read_is_substituted_until_it_can(
    one_file_each: Path, template: str, earlier: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server refuses a file of episode 5 during the first epoch. The second one may have been read by then."""
    path = v2_path(template, 5, CAMERA)
    options: dict[str, Any] = {"batch_size": FRAMES, "consumers": 4, "episode_pool_size": 1, "on_error": "substitute"}
    options["prefetch"] = 2  # so that no batch of the third epoch is planned while requests for the second one fail
    with videos.loader(Dataset(one_file_each, cameras=[]), **options | {"on_error": "raise"}) as rows:
        epochs = [[batch["index"].tolist() for batch in rows] for _ in range(3)]
    faulty = {path: [None] * earlier + [faults.status(403)] * 1000}
    with Server(one_file_each, faults=faulty) as server, videos.loader(server.url, **options) as loader:
        for refuses, epoch in zip((True, None, False), epochs, strict=True):
            if refuses is None:
                server.set_faults({})
                assert len(list(loader)) == len(epoch)
                caplog.clear()
                continue
            seen, marked = [], 0
            for planned, batch in zip(epoch, loader, strict=True):
                assert_right_frames(batch, [[FRAMES]] * EPISODES, [0])
                mask = batch["is_substitute"].tolist()
                assert mask == [refuses and index // FRAMES == 5 for index in planned]
                seen += [i for i, is_substitute in zip(batch["index"].tolist(), mask, strict=True) if not is_substitute]
                marked += sum(mask)
            assert marked == (FRAMES if refuses else 0)
            assert sorted(seen) == [i for i in range(FRAMES * EPISODES) if not refuses or i // FRAMES != 5]
            assert ("could not be read or decoded" in caplog.text) == refuses
        with videos.loader(server.url, **options | {"on_error": "raise"}) as strict:
            server.set_faults(faulty)
            with pytest.raises(StorageError, match=rf"{path}.*403"):
                list(strict)


def test_an_episode_whose_rows_are_broken_on_the_disk_is_substituted(one_file_each: Path, tmp_path: Path) -> None:
    root = copied(one_file_each, tmp_path)
    (root / v2_path(V2_ROWS, 5, CAMERA)).write_bytes(b"PAR1")
    options: dict[str, Any] = {"batch_size": FRAMES, "consumers": 4, "episode_pool_size": 1, "on_error": "substitute"}
    with videos.loader(root, **options) as loader:
        for batch in loader:
            assert_right_frames(batch, [[FRAMES]] * EPISODES, [0])
        assert loader.stats()["substituted"] == FRAMES
    with (
        videos.loader(root, **options, max_substitutes=0.1) as loader,
        pytest.raises(DecodeError, match=r"max_substitutes=0\.1 allows only 0"),
    ):
        list(loader)
    with videos.loader(root, **options | {"shuffle": False}) as loader, pytest.raises(DatasetError, match="episode_000005"):
        list(loader)  # a batch of this episode only


@pytest.mark.slow
def test_the_bytes_of_an_index_count_once_among_those_that_batches_need(one_file_each: Path) -> None:
    """The budget holds all decoded frames, and few rows and indices, which are read again in the second epoch."""
    options: dict[str, Any] = {"batch_size": 1, "consumers": 1, "episode_pool_size": 1, "image_size": (8, 8)}
    budget = FRAMES * EPISODES * 8 * 8 * 3 + 14_000
    with Server(one_file_each) as server, videos.loader(server.url, memory_budget=budget, **options) as loader:
        list(loader)
        first, before = loader.stats(), len(server.requests)
        assert 0 < first["needed_bytes"] <= server.sent
        list(loader)
        later = loader.stats()
        rows = [request.sent for request in server.requests[before:] if request.path.endswith(".parquet")]
    assert later["decoded_frames"] == first["decoded_frames"]
    assert later["indices_read_again"] > first["indices_read_again"]
    in_progress = 2 * max(rows)  # rows that were sent before the first epoch ended, and counted afterwards
    assert later["needed_bytes"] - first["needed_bytes"] <= sum(rows) + in_progress


def kept_objects() -> int:
    """Number of objects of the package that hold rows and video."""
    return sum(type(each).__name__ in ("EpisodeTable", "OpenEpisodes", "BlockCache") for each in gc.get_objects())


def test_rows_and_video_are_freed_without_a_garbage_collection(one_file_each: Path) -> None:
    """They have no reference cycles, so a closed Loader frees its gigabytes at once, without a garbage collection."""
    with no_collection():
        before = kept_objects()
        with Server(one_file_each) as server, videos.loader(server.url) as loader:
            for _ in loader:
                assert kept_objects() == before + 3
        assert kept_objects() == before


def test_an_estimate_that_is_larger_than_the_budget_is_no_error(tmp_path: Path) -> None:
    """Images are estimated at half a byte per value until they have been read, and these are far smaller."""
    shape, black = (300, 400, 3), {"bytes": image_file(Image.new("RGB", (400, 300))), "path": "black.png"}
    root = build(tmp_path / "set", [10] * 4, {"image": Column("image", shape, [black] * 40)})
    with Loader(root, batch_size=8, consumers=4, memory_budget=200_000, device="cpu", prefetch=2) as loader:
        assert sorted(index for batch in loader for index in batch["index"].tolist()) == list(range(40))
        assert 0 < loader.stats()["row_bytes"] < 200_000


def test_rows_of_later_batches_that_one_read_returns_are_kept_and_counted(tmp_path: Path) -> None:
    """Each of four row groups has ten episodes, and each batch is an episode."""
    values = np.random.default_rng(0).random((200, 256))
    root = build(tmp_path / "set", [5] * 40, {"wide": Column("float32", [256], values)}, rows_per_group=50)
    numbers = 5 * (256 * 4 + 4 + 4 * 8)  # bytes of an episode's numbers
    with Loader(root, batch_size=5, shuffle=False, prefetch=2, device="cpu") as loader:
        epoch = iter(loader)
        for _ in range(11):  # the last one is the first batch of the second row group
            next(epoch)
        assert loader.stats()["row_bytes"] > 20 * numbers
        assert len(list(epoch)) == 29
        # The table of open episodes may have a quarter more rows than are in use.
        assert 1.25 * 40 * numbers < loader.stats()["row_bytes"] < 1.3 * 40 * numbers


def test_reading_ahead_continues_after_the_memory_was_full(tmp_path: Path) -> None:
    """The memory holds the rows of three batches, so the next two batches are open when a batch is planned."""
    count, most = 12, int(3.5 * FRAMES * 512 * 4 * 5 / 4)
    wide = Column("float32", [512], np.zeros((FRAMES * count, 512)))
    dataset = Dataset(build(tmp_path / "set", [FRAMES] * count, {"wide": wide}))
    episodes = open_episodes(dataset, ReadLimits(most, look_ahead=count))
    batches = [batch_of(dataset, number, [number]) for number in range(count)]
    for now in range(1, count):
        ahead = batches[now : now + 1 + episodes.horizon(now)]
        episodes.read_ahead(ahead)
        episodes.open(ahead)
        assert episodes.table.is_open(np.arange(now, min(now + 3, count))).all()
        assert sum(episodes.bytes_by_kind) <= most


def test_rows_that_are_larger_than_estimated_leave_the_memory_to_the_next_batch(tmp_path: Path) -> None:
    """The memory would hold the estimated rows of both batches, but holds those of one batch."""
    texts = Column("string", [1], ["x" * 10_000] * 2 * FRAMES)
    dataset = Dataset(build(tmp_path / "set", [FRAMES] * 2, {"text": texts}))
    episodes = open_episodes(dataset, ReadLimits(15_000 * FRAMES, look_ahead=2))
    ahead = [batch_of(dataset, number, [number - 1]) for number in (1, 2)]
    episodes.read_ahead(ahead)
    episodes.open(ahead)
    assert episodes.table.is_open(np.arange(2)).tolist() == [True, False]
    assert sum(episodes.bytes_by_kind) <= 15_000 * FRAMES


@examples(40, phases=PHASES)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12),
    group=st.sampled_from([None, 7, 100]),
    share=st.sampled_from([0.5, 2.0]),
    seed=st.integers(0, 9),
)
def test_rows_are_those_of_the_file_while_episodes_come_and_go(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], group: int | None, share: float, seed: int
) -> None:
    """Numbers and texts, with a budget for all rows or for a part of them."""
    count = sum(lengths)
    texts = ["x" * (row % 50) + f" row {row}" for row in range(count)]
    columns = {
        "value": Column("float32", [2], np.arange(2 * count).reshape(-1, 2)),
        "text": Column("string", [1], texts),
    }
    root = build(tmp_path_factory.mktemp("rows") / "set", lengths, columns, rows_per_group=group)
    budget = int(share * count * (2 * 4 + 4 + 4 * 8 + 8 + 70) * 5 / 4) + 2500
    options: dict[str, Any] = {"consumers": 2, "episode_pool_size": 1, "last_batch": "partial", "seed": seed, "prefetch": 2}
    deadline = time.monotonic() + 120  # a hang guard
    with Loader(root, batch_size=4, memory_budget=budget, delta_timestamps={"value": [-0.1, 0.0]}, **options) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                index, frame = batch["index"], batch["frame_index"]
                assert batch["value"][:, 1, 0].tolist() == (2 * index).tolist()
                assert batch["value"][:, 0, 1].tolist() == (2 * (index - (frame > 0).long()) + 1).tolist()
                assert batch["text"] == [texts[row] for row in index.tolist()]
                while loader.stats()["resident_bytes"] > budget:  # a read is being counted
                    time.sleep(0.001)
                    assert time.monotonic() < deadline
                seen += index.tolist()
            assert sorted(seen) == list(range(count))
