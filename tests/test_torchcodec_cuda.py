"""torchcodec's NVDEC decoder in the Loader, on a machine with GPUs (`support.gpu_machine`)."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali.pipeline import Pipeline
from support.batches import check_identities, equal, samples
from support.broken import damage
from support.datasets import CAMERAS, SIDE, TOP, VIDEO, copied, read_lengths
from support.gpu_machine import GpuMachine

import dali_stream
from dali_stream import Dataset, DecodeError, Loader

FPS = 20
STEPS = {TOP: [-2, -1, 0, -2], SIDE: [0, 1, 30]}
WINDOWS = {key: [step / FPS for step in steps] for key, steps in STEPS.items()}


def batches_of(root: Path | Dataset, count: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """Return one epoch, or its first batches."""
    arguments = {"batch_size": 16, "last_batch": "partial", "device": "cuda", "decode": "torchcodec-cuda"} | arguments
    with Loader(root, **arguments) as loader:
        found = list(itertools.islice(loader, count))
        decoder = "torchcodec" if arguments["decode"] == "torchcodec" else "torchcodec-cuda"
        assert {each.decoder for each in loader.routes.values()} == {decoder}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_machine")
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


@pytest.mark.usefixtures("gpu_machine")
def test_frames_are_resized_like_those_of_the_cpu(h264_demo: Path) -> None:
    """Values differ by at most 1, since the CPU's kernel rounds its weights."""
    arguments = {"image_size": (96, 112), "delta_timestamps": {TOP: WINDOWS[TOP]}, "image_dtype": "uint8"}
    [batch], [other] = batches_of(h264_demo, 1, **arguments), batches_of(h264_demo, 1, decode="torchcodec", **arguments)
    for camera in CAMERAS:
        assert batch[camera].shape == other[camera].shape
        assert (batch[camera].int() - other[camera].int()).abs().max() == 1


def test_each_frame_is_decoded_once_and_kept_on_disk_apart_from_those_of_the_cpu(
    demo: Path, tmp_path: Path, gpu_machine: GpuMachine
) -> None:
    """AV1 with GOP 2, whose GOPs are needed as a whole."""
    gpu_machine.has("l4")
    dataset = Dataset(demo, episodes=[0, 1])
    frames = len(CAMERAS) * int(dataset.lengths.sum())
    arguments: dict[str, Any] = {"batch_size": 16, "device": "cuda", "image_dtype": "uint8", "last_batch": "partial"}

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


@pytest.mark.usefixtures("gpu_machine")
def test_frames_go_through_the_users_graph(h264_demo: Path) -> None:
    def brighter(nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes | {TOP: nodes[TOP] + 1}

    [plain], [changed] = (batches_of(h264_demo, 1, dali_graph=graph) for graph in (lambda nodes: nodes, brighter))
    torch.testing.assert_close(changed[TOP], plain[TOP] + 1)
    assert torch.equal(changed[SIDE], plain[SIDE])


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_machine")
def test_a_damaged_frame_is_an_error_of_its_sample_or_is_substituted(h264_demo: Path, tmp_path: Path) -> None:
    root = copied(h264_demo, tmp_path)
    damage(root, VIDEO.format(TOP, 0), 24, without_its_size)  # the third keyframe
    with pytest.raises(DecodeError, match=rf"{TOP}: episode 0, frame \d+: .*file-000.mp4: "):
        batches_of(root, shuffle=False)
    found = batches_of(Dataset(root, episodes=[0, 1]), shuffle=False, on_error="substitute", image_dtype="uint8")
    bad = sorted(int(i) for batch in found for i in torch.arange(len(batch["index"]))[batch["is_substitute"]])
    assert len(bad) == 12  # the GOP


@pytest.mark.parametrize(
    ("error", "said", "graph"),
    [
        (RuntimeError("NVDEC has no surface"), "the h264 decoder failed: NVDEC has no surface", None),
        (torch.OutOfMemoryError(), r"the GPU's memory is not enough for \d+ frames", dict),
    ],
)
def test_a_frame_that_only_the_cpu_decodes_moves_the_camera_to_the_cpu(
    error: Exception, said: str, graph: Any, plain: Path, caplog: pytest.LogCaptureFixture, gpu_machine: GpuMachine
) -> None:
    sizes = list[int]()
    arguments: dict[str, Any] = {"batch_size": 16, "shuffle": False, "image_dtype": "uint8", "dali_graph": graph, "prefetch": 2}

    def fail(frames: list[int]) -> None:
        """Fail after 16 frames, when a batch has been decoded, or nearly."""
        if gpu_machine.decoded > before + 16:
            sizes.append(len(frames))
            raise error

    def loader(decode: str) -> Loader:
        nonlocal before
        gpu_machine.before_decoding = lambda frames: None
        made = Loader(plain, decode=decode, device="cuda", **arguments)
        before, gpu_machine.before_decoding = gpu_machine.decoded, fail
        return made

    before = 0
    with loader("torchcodec-cuda") as failing:
        message = rf'^decode="torchcodec-cuda": .*: {said}\. Use decode="auto"'
        with pytest.raises(DecodeError, match=message):
            list(failing)
    assert (min(sizes) <= 2) == (type(error) is RuntimeError)  # a frame that fails is decoded alone, with its keyframe
    with Loader(plain, decode="torchcodec", device="cpu", **arguments) as on_cpu:
        expected = list(on_cpu)
    with loader("auto") as found:
        assert {each.decoder for each in found.routes.values()} == {"torchcodec-cuda"}
        assert all(itertools.starmap(equal, zip(found, expected, strict=True)))
        assert {each.decoder for each in found.routes.values()} == {"torchcodec"}
        assert found.stats()["route_changes"] == 1
    assert "Falling back to torchcodec" in caplog.text


def test_a_frame_with_another_time_is_an_error(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    """The check of the CPU route, by the times that the decoder returns. The CPU decodes the frame right."""
    with Loader(h264_demo, batch_size=8, device="cuda", decode="torchcodec-cuda") as loader:
        gpu_machine.late = 1 / 30
        with pytest.raises(DecodeError, match=r'^decode="torchcodec-cuda": .* delivered other frames than the 1 requested'):
            next(iter(loader))


def test_it_is_refused_where_it_cannot_run(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    with pytest.raises(ValueError, match=r'^decode="torchcodec-cuda": batches are made on the CPU$'):
        Loader(h264_demo, decode="torchcodec-cuda", device="cpu")
    installed = [("0.13.0+cpu", None), ("0.14.0", "13.0"), ("0.16.1", "13.0"), ("0.17.0", None), ("0.17.0+cpu", "13.0")]
    for version, cuda in [*installed, ("0.17.0", "12.8")]:
        gpu_machine.installs(version, cuda)
        with pytest.raises(ValueError, match=r'^decode="torchcodec-cuda": ') as refused:
            Loader(h264_demo, decode="torchcodec-cuda", device="cuda")
        said = str(refused.value)
        assert "on NVDEC, torchcodec must be 0.17 or later, with torch for CUDA 13, got torchcodec " in said
        assert f" {version} and torch {torch.__version__}. Install them: " in said
        assert "pip install --upgrade 'torch>=2.11' 'torchcodec>=0.17'" in said
    for version, cuda in [("0.17.0", "13.0"), ("0.17.1+cu130", "13.2"), ("1.0.0", "14.0")]:
        gpu_machine.installs(version, cuda)
        assert len(batches_of(h264_demo, 1)) == 1


def test_a_decoder_that_falls_back_to_the_cpu_is_refused(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    """torchcodec does so without an error, for a video that NVDEC does not decode."""
    gpu_machine.cpu_fallback = "[CUDA] Fallback status: Falling back due to: Video not supported"
    said = r"NVDEC does not decode it\. torchcodec says: .*Video not supported, tried on its first frames"
    with pytest.raises(ValueError, match=said):
        Loader(h264_demo, device="cuda", decode="torchcodec-cuda")
    assert len(batches_of(h264_demo, 1, decode="torchcodec")) == 1


@pytest.mark.parametrize(("gpu", "engines"), [("t4", 2), ("h100", 7)])
def test_each_clip_is_decoded_on_a_stream_that_no_other_uses(
    gpu: str, engines: int, h264_demo: Path, gpu_machine: GpuMachine
) -> None:
    gpu_machine.has(gpu)
    batches_of(h264_demo, 4, batch_size=96, num_threads=8)
    assert gpu_machine.streams == 3 * engines  # sessions
    assert 2 <= gpu_machine.most_streams <= min(3 * engines, 8)
    for stream in range(1, gpu_machine.streams + 1):
        own = [(what, thread) for what, number, thread in gpu_machine.stream_events if number == stream]
        assert [what for what, _ in own] == ["enter", "synchronize"] * (len(own) // 2)
        assert all(first[1] == second[1] for first, second in zip(own[::2], own[1::2], strict=True))
    assert gpu_machine.capacities == [100]


@pytest.mark.usefixtures("gpu_machine")
def test_a_camera_that_a_dataset_of_a_mixture_lacks(h264_demo: Path) -> None:
    one, both = Dataset(h264_demo, cameras=[SIDE], episodes=[0]), Dataset(h264_demo, episodes=[1])
    mixture = dali_stream.Mixture({"both": both, "one": one}, missing="pad")
    arguments: dict[str, Any] = {"batch_size": 8, "device": "cuda", "image_dtype": "uint8", "image_size": (128, 160)}
    on_cpu = arguments | {"device": "cpu"}
    with Loader(mixture, decode="torchcodec-cuda", **arguments) as ours, Loader(mixture, **on_cpu) as expected:
        assert {each.decoder for each in ours.routes.values()} == {"torchcodec-cuda"}
        assert all(itertools.starmap(equal, zip(ours, expected, strict=True)))
    with pytest.raises(ValueError, match='decode="dali": a dataset of the mixture has no video of the camera'):
        Loader(mixture, decode="dali", **arguments)


@pytest.mark.parametrize(("decode", "devices"), [("torchcodec-cuda", {"cuda:1"}), ("auto", {"cuda:1"}), ("torchcodec", set())])
def test_only_the_route_to_nvdec_decodes_on_the_gpu_of_the_batches(
    decode: str, devices: set[str], plain: Path, gpu_machine: GpuMachine
) -> None:
    gpu_machine.has("h100", "h100")
    with Loader(plain, batch_size=8, device="cuda:1", decode=decode) as loader:
        list(loader)
    assert gpu_machine.devices == devices
    assert (gpu_machine.decoded >= 72) == bool(devices)


@pytest.mark.usefixtures("gpu_machine")
def test_auto_takes_the_cpu_if_the_cache_on_disk_has_its_frames(h264_demo: Path, tmp_path: Path) -> None:
    dataset = Dataset(h264_demo, episodes=[0])
    arguments: dict[str, Any] = {"batch_size": 8, "device": "cuda", "frame_cache": tmp_path}

    def decoders(decode: str = "auto") -> set[str]:
        with Loader(dataset, decode=decode, **arguments) as loader:
            list(loader)
            return {each.decoder for each in loader.routes.values()}

    assert decoders() == {"torchcodec-cuda"}
    assert decoders("torchcodec") == {"torchcodec"}
    assert decoders() == {"torchcodec"}
    assert decoders("torchcodec-cuda") == {"torchcodec-cuda"}


def without_its_size(packet: bytes) -> bytes:
    return bytes(4) + packet[4:]


def test_an_error_in_the_next_batch_leaves_this_batch(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph, whose runs start in another thread. A batch is counted when it is returned."""
    root = copied(demo, tmp_path)
    damage(root, VIDEO.format(TOP, 0), 16, without_its_size)
    dataset = Dataset(root, episodes=[0])
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": False, "device": "cpu", "dali_graph": lambda nodes: nodes}
    with Loader(dataset, **arguments) as loader:
        batches = iter(loader)
        assert [next(batches)["frame_index"].tolist() for _ in range(2)] == [list(range(8)), list(range(8, 16))]
        with pytest.raises(DecodeError, match="episode 0, frame 16: "):
            next(batches)
        assert loader.stats()["samples"] == 16
    started, schedule = threading.Semaphore(0), Pipeline.schedule_run
    monkeypatch.setattr(Pipeline, "schedule_run", lambda pipeline: (schedule(pipeline), started.release()))
    with Loader(dataset, on_error="substitute", **arguments) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        for _ in range(3):
            started.acquire()  # so the next batch is finished
        assert loader.stats()["substituted"] == 0
        next(batches)
        assert loader.stats()["substituted"] >= 1
