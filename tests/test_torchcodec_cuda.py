"""torchcodec's NVDEC decoder in the Loader. Its device is "cpu" here. The rest is the code that runs with a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import check_identities, equal, samples
from support.datasets import CAMERAS, SIDE, TOP, copied, read_lengths
from support.routes import let_auto_take_nvdec, let_nvdec_answer

import dali_stream
from dali_stream import Dataset, DecodeError, Loader
from dali_stream.cache.buffers import Buffers
from dali_stream.cache.indices import IndexCache
from dali_stream.decode import route, torchcodec, torchcodec_cuda, torchcodec_decoder
from dali_stream.decode.capability import Capability
from dali_stream.mp4.index import read_index
from dali_stream.observe.counters import Counters
from dali_stream.pipeline import decode_pool
from dali_stream.pipeline.layout import Layout

FPS = 20
STEPS = {TOP: [-2, -1, 0, -2], SIDE: [0, 1, 30]}
WINDOWS = {key: [step / FPS for step in steps] for key, steps in STEPS.items()}


class FakeStreams:
    """CUDA streams that count.

    `events` are (what, stream, thread) in order. `most` is the largest number in use at a time. `mine.used` is true in a thread
    while it uses a stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.made, self.in_use, self.most, self._lock = 0, 0, 0, threading.Lock()
        self.mine = threading.local()
        streams = self

        class Stream:
            def __init__(self, device: str) -> None:
                with streams._lock:
                    streams.made += 1
                    self.number = streams.made

            def synchronize(self) -> None:
                streams.events.append(("synchronize", self.number, threading.get_ident()))

        @contextlib.contextmanager
        def stream(own: Stream) -> Iterator[None]:
            with streams._lock:
                streams.in_use += 1
                streams.most = max(streams.most, streams.in_use)
            streams.events.append(("enter", own.number, threading.get_ident()))
            streams.mine.used = True
            try:
                yield
            finally:
                streams.mine.used = False
                with streams._lock:
                    streams.in_use -= 1

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Lets GPU 0 have NVDEC with one engine, whose decoder runs on the CPU.

    Yields the streams, and the capacities that torchcodec's cache of decoders gets.
    """
    found = SimpleNamespace(streams=FakeStreams(monkeypatch), capacities=list[int]())
    let_nvdec_answer(monkeypatch)
    monkeypatch.setattr(torchcodec_cuda, "unavailable", lambda _: "")
    for module in (torchcodec_decoder, torchcodec_cuda):
        monkeypatch.setattr(module, "device_name", lambda _: "cpu")
    monkeypatch.setattr(torchcodec_cuda, "engines", lambda _: 1)
    monkeypatch.setattr("torchcodec.decoders.set_nvdec_cache_capacity", found.capacities.append)

    def decoder(*arguments: Any) -> torchcodec_decoder.TorchcodecDecoder:
        return torchcodec_decoder.TorchcodecDecoder(*arguments[:-2], gpu=0, processes=None)

    def of_camera(self: decode_pool.DecodePool, key: str, chosen: route.Route) -> Any:
        with monkeypatch.context() as patched:
            if chosen.decoder == "torchcodec-cuda":
                patched.setattr(decode_pool, "TorchcodecDecoder", decoder)
            return make(self, key, chosen)

    make = decode_pool.DecodePool._decoder
    monkeypatch.setattr(decode_pool.DecodePool, "_decoder", of_camera)
    torchcodec_cuda._streams.cache_clear()
    yield found
    torchcodec_cuda._streams.cache_clear()


def batches_of(root: Path | Dataset, count: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """Return one epoch, or its first batches."""
    arguments = {"batch_size": 16, "last_batch": "partial", "device": "cpu", "decode": "torchcodec-cuda"} | arguments
    with Loader(root, **arguments) as loader:
        found = list(itertools.islice(loader, count))
        decoder = "torchcodec" if arguments["decode"] == "torchcodec" else "torchcodec-cuda"
        assert {each.decoder for each in loader.routes.values()} == {decoder}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("windows", [{}, WINDOWS])
def test_batches_equal_those_of_the_cpu(windows: dict[str, list[float]], h264_demo: Path) -> None:
    """Bit for bit at the recorded size, with B-frames, repeated steps and steps beyond the episode."""
    dataset = Dataset(h264_demo, episodes=[0, 1])
    lengths = {episode: length for episode, length in read_lengths(h264_demo).items() if episode < 2}
    ours = batches_of(dataset, delta_timestamps=windows, image_dtype="uint8")
    expected = batches_of(dataset, delta_timestamps=windows, image_dtype="uint8", decode="torchcodec")
    assert sorted(samples(ours)) == list(range(sum(lengths.values())))
    for batch, other in zip(ours, expected, strict=True):
        for camera in CAMERAS:
            check_identities(batch, camera, STEPS[camera] if windows else None, lengths)
        assert equal(batch, other)


@pytest.mark.usefixtures("gpu")
def test_frames_are_resized_like_those_of_the_cpu(demo: Path) -> None:
    """Values differ by at most 1, since the CPU's kernel rounds its weights."""
    arguments = {"image_size": (96, 112), "delta_timestamps": {TOP: WINDOWS[TOP]}, "image_dtype": "uint8"}
    [batch], [other] = batches_of(demo, 1, **arguments), batches_of(demo, 1, decode="torchcodec", **arguments)
    for camera in CAMERAS:
        assert batch[camera].shape == other[camera].shape
        assert (batch[camera].int() - other[camera].int()).abs().max() == 1


@pytest.mark.usefixtures("gpu")
def test_each_frame_is_decoded_once_and_kept_on_disk_apart_from_those_of_the_cpu(demo: Path, tmp_path: Path) -> None:
    dataset = Dataset(demo, episodes=[0, 1])
    frames = len(CAMERAS) * int(dataset.lengths.sum())
    arguments: dict[str, Any] = {"batch_size": 16, "device": "cpu", "image_dtype": "uint8", "last_batch": "partial"}

    def stats(decode: str, epochs: int) -> dict[str, Any]:
        with Loader(dataset, decode=decode, frame_cache=tmp_path, **arguments) as loader:
            for _ in range(epochs):
                for batch in loader:
                    check_identities(batch, TOP, None, read_lengths(demo))
            return loader.stats()

    first = stats("torchcodec-cuda", 2)
    assert (first["decoded_frames"], first["disk_hits"]) == (frames, 0)
    assert (stats("torchcodec", 1)["decoded_frames"], len(list(tmp_path.iterdir()))) == (frames, 2)
    again = stats("torchcodec-cuda", 1)
    assert (again["decoded_frames"], again["disk_hits"]) == (0, frames)


@pytest.mark.usefixtures("gpu")
def test_frames_go_through_the_users_graph(demo: Path) -> None:
    def brighter(nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes | {TOP: nodes[TOP] + 1}

    [plain], [changed] = (batches_of(demo, 1, dali_graph=graph) for graph in (lambda nodes: nodes, brighter))
    torch.testing.assert_close(changed[TOP], plain[TOP] + 1)
    assert torch.equal(changed[SIDE], plain[SIDE])


@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
def test_a_damaged_frame_is_an_error_of_its_sample_or_is_substituted(h264_demo: Path, tmp_path: Path) -> None:
    root = copied(h264_demo, tmp_path)
    path = root / "videos" / TOP / "chunk-000" / "file-000.mp4"
    table = read_index(Dataset(root).data_store, str(path.relative_to(root)))
    content, start = bytearray(path.read_bytes()), int(table.offset[table.keyframes[2]])
    content[start : start + 4] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(DecodeError, match=rf"{TOP}: episode 0, frame \d+: .*file-000.mp4: "):
        batches_of(root, shuffle=False)
    found = batches_of(Dataset(root, episodes=[0, 1]), shuffle=False, on_error="substitute", image_dtype="uint8")
    bad = sorted(int(i) for batch in found for i in torch.arange(len(batch["index"]))[batch["is_substitute"]])
    assert len(bad) == 12  # the GOP


@pytest.mark.parametrize(
    ("error", "said", "graph"),
    [
        (DecodeError("NVDEC has no surface"), "NVDEC has no surface", None),
        (torch.OutOfMemoryError(), r"the GPU's memory is not enough for \d+ frames", dict),
    ],
)
def test_a_frame_that_only_the_cpu_decodes_moves_the_camera_to_the_cpu(
    error: Exception,
    said: str,
    graph: Any,
    h264_demo: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpu: SimpleNamespace,
) -> None:
    dataset, in_parts, times = Dataset(h264_demo, episodes=[0]), torchcodec.decode_in_parts, list[int]()

    def fail(store: Any, indices: Any, packets: list[int], *rest: Any, **options: Any) -> Any:
        if 20 in packets and getattr(gpu.streams.mine, "used", False):
            times.append(len(packets))
            raise error
        return in_parts(store, indices, packets, *rest, **options)

    monkeypatch.setattr(torchcodec_decoder, "decode_in_parts", fail)
    arguments: dict[str, Any] = {"batch_size": 16, "shuffle": False, "device": "cpu", "image_dtype": "uint8"}
    arguments["dali_graph"] = graph
    with pytest.raises(DecodeError, match=rf'^decode="torchcodec-cuda": .*: {said}\. Use decode="auto"'):
        list(Loader(dataset, decode="torchcodec-cuda", **arguments))
    assert (times[-1] == 1) == isinstance(error, DecodeError)  # a frame that fails is decoded alone
    expected = list(Loader(dataset, decode="torchcodec", **arguments))
    let_auto_take_nvdec(monkeypatch)
    with Loader(dataset, decode="auto", **arguments) as loader:
        assert {each.decoder for each in loader.routes.values()} == {"torchcodec-cuda"}
        assert all(itertools.starmap(equal, zip(loader, expected, strict=True)))
        assert {each.decoder for each in loader.routes.values()} == {"torchcodec"}
        assert loader.stats()["route_changes"] >= 1
    assert "Falling back to torchcodec" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_a_frame_with_another_time_is_an_error(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the CPU route, by the times that the decoder returns."""

    class Late(torchcodec.VideoDecoder):
        def get_frames_at(self, indices: list[int]) -> Any:
            batch = super().get_frames_at(indices)
            return SimpleNamespace(data=batch.data, pts_seconds=batch.pts_seconds + 1 / 30)

    with Loader(demo, batch_size=8, device="cpu", decode="torchcodec-cuda") as loader:
        monkeypatch.setattr(torchcodec, "VideoDecoder", Late)
        with pytest.raises(DecodeError, match="delivered other frames than the 1 requested"):
            next(iter(loader))


def test_it_is_refused_where_it_cannot_run(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'^decode="torchcodec-cuda": batches are made on the CPU$'):
        Loader(demo, decode="torchcodec-cuda", device="cpu")
    installed = [("0.13.0+cpu", None), ("0.14.0", "13.0"), ("0.16.1", "13.0"), ("0.17.0", None), ("0.17.0+cpu", "13.0")]
    for version, cuda in [*installed, ("0.17.0", "12.8")]:
        monkeypatch.setattr(torchcodec_cuda.torchcodec, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        said = torchcodec_cuda.unavailable(0)
        assert said.startswith("on NVDEC, torchcodec must be 0.17 or later, with torch for CUDA 13, got torchcodec ")
        assert f" {version} and torch {torch.__version__}. Install them: " in said
        assert "pip install --upgrade 'torch>=2.11' 'torchcodec>=0.17'" in said
        dataset = Dataset(demo)
        with pytest.raises(ValueError, match=r'decode="torchcodec-cuda": on NVDEC, torchcodec must be 0\.17 or later'):
            route.choose_routes(dataset.source, IndexCache(dataset.source), "torchcodec-cuda", 0, 8)
    for version, cuda in [("0.17.0", "13.0"), ("0.17.1+cu130", "13.2"), ("1.0.0", "14.0")]:
        monkeypatch.setattr(torchcodec_cuda.torchcodec, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert torchcodec_cuda.unavailable(0) == ""


@pytest.mark.usefixtures("gpu")
def test_what_nvdec_does_not_decode_is_refused(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_nvdec_answer(monkeypatch, Capability(False, "this GPU has no NVDEC decoder for av1 420 8 bit"))
    dataset = Dataset(demo)
    with pytest.raises(ValueError, match=r'decode="torchcodec-cuda": this GPU has no NVDEC decoder .* Use decode="auto"'):
        route.choose_routes(dataset.source, IndexCache(dataset.source), "torchcodec-cuda", 0, 8)


@pytest.mark.usefixtures("gpu")
def test_wrong_frames_in_the_trial_are_refused(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dali_stream.decode import trial

    decode_clip = trial.decode_clip

    def wrong(clip: Any, video: Any, *device: str) -> Any:
        return np.flip(decode_clip(clip, video), -1) if device else decode_clip(clip, video)

    monkeypatch.setattr(trial, "decode_clip", wrong)
    with pytest.raises(
        ValueError, match=r'decode="torchcodec-cuda": torchcodec\'s first frames must differ .* Use decode="auto"'
    ):
        Loader(demo, device="cpu", decode="torchcodec-cuda")


def test_a_decoder_that_falls_back_to_the_cpu_is_an_error(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchcodec does so without an error, for a video that NVDEC does not decode."""

    class Falling(torchcodec.VideoDecoder):
        cpu_fallback = "[CUDA] Fallback status: Falling back due to: Video not supported"

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "device": "cpu"})

    store = Dataset(demo).data_store
    table = read_index(store, f"videos/{TOP}/chunk-000/file-000.mp4")
    clip = dali_stream.mp4.clip.pack(store, [table], [0])
    video = dali_stream.mp4.format.describe(table.configs[0])
    monkeypatch.setattr(torchcodec, "VideoDecoder", Falling)
    assert len(torchcodec.decode_clip(clip, video)) == 1
    with pytest.raises(DecodeError, match=r"NVDEC does not decode it\. torchcodec says: .*Video not supported"):
        torchcodec.decode_clip(clip, video, "cuda:0")


@pytest.mark.parametrize("engines", [1, 2, 7])
def test_each_clip_is_decoded_on_a_stream_that_no_other_uses(
    engines: int, h264_demo: Path, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace
) -> None:
    monkeypatch.setattr(torchcodec_cuda, "engines", lambda _: engines)
    streams = gpu.streams
    batches_of(h264_demo, 4, batch_size=96, num_threads=8)
    assert streams.made == 3 * engines  # sessions
    assert 2 <= streams.most <= min(3 * engines, 8)
    for stream in range(1, streams.made + 1):
        own = [(what, thread) for what, number, thread in streams.events if number == stream]
        assert [what for what, _ in own] == ["enter", "synchronize"] * (len(own) // 2)
        assert all(first[1] == second[1] for first, second in zip(own[::2], own[1::2], strict=True))
    assert gpu.capacities == [100]


@pytest.mark.usefixtures("gpu")
def test_a_camera_that_a_dataset_of_a_mixture_lacks(h264_demo: Path, demo: Path) -> None:
    one, both = Dataset(h264_demo, cameras=[SIDE], episodes=[0]), Dataset(demo, episodes=[0])
    mixture = dali_stream.Mixture({"both": both, "one": one}, missing="pad")
    arguments: dict[str, Any] = {"batch_size": 8, "device": "cpu", "image_dtype": "uint8", "image_size": (128, 160)}
    with Loader(mixture, decode="torchcodec-cuda", **arguments) as ours, Loader(mixture, **arguments) as expected:
        assert {each.decoder for each in ours.routes.values()} == {"torchcodec-cuda"}
        assert all(itertools.starmap(equal, zip(ours, expected, strict=True)))
    with pytest.raises(ValueError, match='decode="dali": a dataset of the mixture has no video of the camera'):
        Loader(mixture, decode="dali", **arguments)


@pytest.mark.parametrize(("decoder", "gpu_index"), [("torchcodec-cuda", 1), ("torchcodec", None)])
def test_only_the_route_to_nvdec_decodes_on_the_gpu(
    decoder: str, gpu_index: int | None, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Any]()
    monkeypatch.setattr(decode_pool, "TorchcodecDecoder", lambda *arguments: given.append(arguments[-2]))
    with Loader(demo, batch_size=8, device="cpu") as loader:
        config = dataclasses.replace(loader._config, gpu=1)
    routes = dict.fromkeys(CAMERAS, route.Route(decoder, ""))
    decode_pool.DecodePool(Layout(config, routes), dict.fromkeys(CAMERAS, 1), Counters(), Buffers(False))
    assert given == [gpu_index] * len(CAMERAS)


@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_cpu_if_the_cache_on_disk_has_its_frames(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = route.choose
    monkeypatch.setattr(route, "choose", lambda decode, *rest: choose("torchcodec-cuda" if decode == "auto" else decode, *rest))
    dataset = Dataset(demo, episodes=[0])
    arguments: dict[str, Any] = {"batch_size": 8, "device": "cpu", "frame_cache": tmp_path}

    def decoders(decode: str = "auto") -> set[str]:
        with Loader(dataset, decode=decode, **arguments) as loader:
            list(loader)
            return {each.decoder for each in loader.routes.values()}

    assert decoders() == {"torchcodec-cuda"}
    assert decoders("torchcodec") == {"torchcodec"}
    assert decoders() == {"torchcodec"}
    assert decoders("torchcodec-cuda") == {"torchcodec-cuda"}


def test_an_error_in_the_next_batch_leaves_this_batch(demo: Path, tmp_path: Path) -> None:
    """With a graph, whose runs start in another thread. A batch is counted when it is returned."""
    root = copied(demo, tmp_path)
    path = root / "videos" / TOP / "chunk-000" / "file-000.mp4"
    table = read_index(Dataset(root).data_store, str(path.relative_to(root)))
    content, start = bytearray(path.read_bytes()), int(table.offset[16])
    content[start : start + 4] = bytes(4)
    path.write_bytes(content)
    dataset = Dataset(root, episodes=[0])
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": False, "device": "cpu", "dali_graph": lambda nodes: nodes}
    with Loader(dataset, **arguments) as loader:
        batches = iter(loader)
        assert [next(batches)["frame_index"].tolist() for _ in range(2)] == [list(range(8)), list(range(8, 16))]
        with pytest.raises(DecodeError, match="episode 0, frame 16: "):
            next(batches)
        assert loader.stats()["samples"] == 16
    with Loader(dataset, on_error="substitute", **arguments) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        loader._batch_source._stream._batches._iterator._started.exception()  # type: ignore[union-attr]  # the next one is finished
        assert loader.stats()["substituted"] == 0
        next(batches)
        assert loader.stats()["substituted"] >= 1
