"""The DALI route on a CPU: all of it for VP9, and up to the clips for codecs that only NVDEC decodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali.pipeline import StreamPolicy
from support.batches import as_bytes, check_identities, equal, samples
from support.datasets import CAMERAS, SIDE, TOP, read_lengths
from support.gpu_machine import GpuMachine
from support.servers import Server

from dali_stream import Dataset, DecodeError, Loader

FPS = 20
STEPS = {TOP: [-2, -1, 0], SIDE: [0, 1, 30], "action": [0, 1, 2, 3]}
WINDOWS = {key: [step / FPS for step in steps] for key, steps in STEPS.items()}


def batches_of(root: Path | Dataset, **arguments: Any) -> list[dict[str, Any]]:
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
            assert 0 < np.abs(difference).mean() < 4  # they convert colours differently
        assert equal(first, second)


def test_dali_delivers_single_frames_and_repeated_ones(vp9_demo: Path) -> None:
    """A window off the end of an episode shows its last frame several times; one camera has a window and one has not."""
    lengths = read_lengths(vp9_demo)
    for batch in batches_of(vp9_demo, delta_timestamps={TOP: [5.0, 0.0, -5.0, 5.0, 0.05]}):
        check_identities(batch, TOP, [100, 0, -100, 100, 1], lengths)
        check_identities(batch, SIDE, None, lengths)
        assert batch[SIDE].shape[1:] == (3, 128, 160)


@pytest.mark.usefixtures("gpu_machine")
def test_clips_for_nvdec_hold_the_windows_of_b_frames(h264_demo: Path) -> None:
    """The operator receives the frames in rising order, each once, and the order of a window's steps among them.

    FFmpeg takes the place of NVDEC, since no decoder of DALI takes H.264 on a CPU.
    """
    lengths = read_lengths(h264_demo)
    steps = {TOP: [3, -2, 0, 1, -3, 2, -1, 0], SIDE: [0, 30, 1]}  # most are neighbours, which B-frames reorder
    windows = {camera: [step / FPS for step in own] for camera, own in steps.items()}
    for batch in batches_of(Dataset(h264_demo, episodes=[1]), device="cuda", delta_timestamps=windows):
        for camera in CAMERAS:
            check_identities(batch, camera, steps[camera], lengths)


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


def test_all_operators_of_every_pipeline_share_one_stream(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    """Until a GPU shows that more are safe: a decoder's buffers must not go to another operator while they are still read."""
    batches_of(h264_demo, device="cuda", last_batch="drop", batch_size=64)
    assert len(gpu_machine.pipelines) == 3  # those of the trials of two cameras, and that of the Loader
    assert {options["stream_policy"] for options in gpu_machine.pipelines} == {StreamPolicy.SINGLE}
