"""The DALI route on a CPU: all of it for VP9, and up to the clips for codecs that only NVDEC decodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvidia.dali.pipeline import Pipeline, StreamPolicy
from support.batches import as_bytes, check_identities, equal, samples
from support.datasets import CAMERAS, SIDE, TOP, read_lengths
from support.opened import open_all
from support.servers import Server
from torchcodec.decoders import VideoDecoder

from dali_stream import Dataset, DecodeError, Loader
from dali_stream.decode import dali
from dali_stream.decode.audit import COLOUR_TOLERANCE
from dali_stream.demo import read_identities
from dali_stream.observe.counters import Counters
from dali_stream.system.workers import Workers

FPS = 20
STEPS = {TOP: [-2, -1, 0], SIDE: [0, 1, 30], "action": [0, 1, 2, 3]}
WINDOWS = {key: [step / FPS for step in steps] for key, steps in STEPS.items()}


def batches_of(root: Path, **arguments: Any) -> list[dict[str, Any]]:
    """One epoch."""
    arguments = {"batch_size": 16, "last_batch": "partial", "device": "cpu", "decode": "dali"} | arguments
    with Loader(root, **arguments) as loader:
        return list(loader)


@pytest.mark.slow
def test_dali_delivers_the_frames_that_torchcodec_delivers(vp9_demo: Path) -> None:
    lengths = read_lengths(vp9_demo)
    arguments: dict[str, Any] = {"delta_timestamps": WINDOWS, "image_dtype": "uint8"}
    by_dali = batches_of(vp9_demo, **arguments)
    by_torchcodec = batches_of(vp9_demo, decode="torchcodec", **arguments)
    assert sorted(samples(by_dali)) == list(range(sum(lengths.values())))
    for first, second in zip(by_dali, by_torchcodec, strict=True):
        for camera in CAMERAS:
            check_identities(first, camera, STEPS[camera], lengths)
            check_identities(second, camera, STEPS[camera], lengths)
            difference = as_bytes(first.pop(camera)).astype(int) - as_bytes(second.pop(camera))
            assert 0 < np.abs(difference).mean() < COLOUR_TOLERANCE
        assert equal(first, second)


def test_dali_delivers_single_frames_and_repeated_ones(vp9_demo: Path) -> None:
    """A window off the end of an episode shows its last frame several times; one camera has a window and one has not."""
    lengths = read_lengths(vp9_demo)
    for batch in batches_of(vp9_demo, delta_timestamps={TOP: [5.0, 0.0, -5.0, 5.0, 0.05]}):
        check_identities(batch, TOP, [100, 0, -100, 100, 1], lengths)
        check_identities(batch, SIDE, None, lengths)
        assert batch[SIDE].shape[1:] == (3, 128, 160)


def test_clips_for_nvdec_hold_the_windows_of_b_frames(h264_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator receives the frames in rising order, each once, and the order of a window's steps among them.

    FFmpeg takes the place of NVDEC, since no decoder of DALI takes H.264 on a CPU.
    """
    monkeypatch.setattr(dali, "refusal", lambda *_: "")
    dataset = Dataset(h264_demo)
    episodes, opened = open_all(dataset)
    episode = np.array([0, 1, 1, 0, 1])
    # Neighbours, since samples and frames are in different orders only within a GOP.
    frames = np.array([7, 20, 0, 31, 12])[:, None] + np.random.default_rng(0).permuted(np.tile(np.arange(7), (5, 1)), axis=1)
    for number, key in enumerate(dataset.cameras):
        decoder = dali.DaliDecoder(dataset.source, key, Counters(), None, (128, 160), None, False)
        packets = np.stack([opened[e].cameras[key].packet[f] for e, f in zip(episode.tolist(), frames, strict=True)])
        step = SimpleNamespace(packets={key: packets}, shown_in_episode={key: frames}, samples=SimpleNamespace(episode=episode))
        clips = decoder.start(Workers("", 0), step, episodes, dataset.data_store)
        for row, (clip, places, order, *_) in enumerate(clips.packed):
            assert (np.diff(places) > 0).all()
            ffmpeg = VideoDecoder(clip.tobytes(), dimension_order="NHWC")
            shown = ffmpeg.get_frames_at(places.tolist()).data.numpy()[order]
            expected = [(episode[row], frame, number) for frame in frames[row]]
            np.testing.assert_array_equal(read_identities(shown), expected)


@pytest.mark.slow
def test_remote_batches_of_the_dali_route_equal_local_ones(vp9_demo: Path) -> None:
    """Bytes are fetched by the same schedule, also where memory is short."""
    arguments = {"delta_timestamps": {TOP: [0.0, 0.2]}, "batch_size": 8}
    expected = batches_of(vp9_demo, **arguments)
    with Server(vp9_demo) as server:
        for budget in ("1GiB", "1MB"):
            assert all(
                equal(a, b) for a, b in zip(batches_of(server.url, memory_budget=budget, **arguments), expected, strict=True)
            )


def test_routes_say_what_decodes_and_why(demo: Path, vp9_demo: Path) -> None:
    with Loader(vp9_demo, batch_size=4, decode="dali", device="cpu") as loader:
        assert {key: route.decoder for key, route in loader.routes.items()} == dict.fromkeys(CAMERAS, "dali")
        assert "vp9" in loader.routes[TOP].reason
    for decode in ("auto", "torchcodec"):
        with Loader(demo, batch_size=4, decode=decode, device="cpu") as loader:
            assert set(loader.routes) == set(CAMERAS)
            for route in loader.routes.values():
                assert route.decoder == "torchcodec"
                assert len(route.reason.split()) > 2
    with pytest.raises(ValueError, match=r'decode="dali": .*vp9.*and not av1\. Use decode="auto"'):
        Loader(demo, batch_size=4, decode="dali", device="cpu")


def test_files_of_several_codecs_in_one_camera(vp9_demo: Path, h264_demo: Path, tmp_path: Path) -> None:
    """Each file is looked at on its own: torchcodec takes them all, and DALI's decoder says which one it cannot."""
    root = Path(shutil.copytree(vp9_demo, tmp_path / "mixed"))
    other = f"videos/{SIDE}/chunk-000/file-001.mp4"
    shutil.copy(h264_demo / other, root / other)
    lengths = read_lengths(root)
    batches = batches_of(root, decode="auto", batch_size=32)
    assert sorted(samples(batches)) == list(range(sum(lengths.values())))
    for batch in batches:
        check_identities(batch, SIDE, None, lengths)
    with pytest.raises(DecodeError, match=rf'episode \d+, frame \d+: .*{other}: .*and not h264\. Use decode="auto"'):
        batches_of(root)


def test_all_operators_of_every_pipeline_share_one_stream(vp9_demo: Path) -> None:
    """Until a GPU shows that more are safe: a decoder's buffers must not go to another operator while they are still read."""
    policies = []

    def look(nodes: dict[str, Any]) -> dict[str, Any]:
        policies.append(Pipeline.current().stream_policy)
        return nodes

    batches_of(vp9_demo, dali_graph=look, last_batch="drop", batch_size=64)
    policies.append(dali.pipeline(list, 1, None, 1, 1).stream_policy)
    assert policies == [StreamPolicy.SINGLE] * 2
