"""The decoder that each camera gets, and why, on a machine with GPUs (`support.gpu_machine`)."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import videos
from support.batches import equal
from support.datasets import TOP, copied
from support.gpu_machine import GpuMachine
from support.slow import slow_after

from dali_stream import DecodeError, Loader

_ADVICE = '. Use decode="auto", which takes torchcodec for such cameras'


def routes(root: Path, decode: str = "auto", device: str = "cuda", num_threads: int = 4) -> list[tuple[str, str]]:
    """The different routes of the cameras: decoder and reason."""
    with Loader(root, batch_size=1, device=device, decode=decode, num_threads=num_threads) as loader:
        return sorted({(route.decoder, route.reason) for route in loader.routes.values()})


def refusal(root: Path, decode: str) -> str:
    """Why a decoder on NVDEC refuses a dataset. The text is empty if it does not."""
    try:
        routes(root, decode)
    except ValueError as error:
        return str(error).partition(f'decode="{decode}": ')[2].removesuffix(_ADVICE)
    return ""


def one_file(folder: Path, arguments: tuple[str, ...], size: tuple[int, int] = videos.SIZE, frames: int = 16) -> Path:
    """A dataset of one episode in this encoding."""
    return around(videos.encode(videos.draw((frames,), size=size), folder / "video.mp4", arguments), size, frames)


def around(path: Path, size: tuple[int, int] = videos.SIZE, frames: int = 16) -> Path:
    """A dataset of one episode, around a file."""
    return videos.write_dataset(path.parent / "set", [path], [[frames]], size=size)


# ----------------------------------------------------------------------- NVDEC or the CPU


@pytest.mark.parametrize(
    ("gpu", "size", "worth"),
    [("h100", (128, 160), 28), ("t4", (128, 160), 8), ("t4", (1080, 1920), 54), ("l4", (480, 640), 16)],
)
def test_auto_takes_nvdec_unless_there_are_many_threads_per_engine(
    gpu: str, size: tuple[int, int], worth: int, tmp_path: Path, gpu_machine: GpuMachine
) -> None:
    """Large frames are slower on the CPU."""
    gpu_machine.has(gpu)
    root = one_file(tmp_path, videos.h264(2, b_frames=0), size, frames=4)
    name = f"h264 420 8 bit of {size[0]}×{size[1]} with {engines_of(gpu)} engines, worth about {worth} threads"
    assert routes(root, num_threads=worth) == [("torchcodec-cuda", f"NVDEC decodes {name}, and num_threads is {worth}")]
    expected = f"NVDEC would decode {name}, and num_threads is {worth + 1}"
    assert routes(root, num_threads=worth + 1) == [("torchcodec", expected)]
    [(decoder, _)] = routes(root, "torchcodec-cuda", num_threads=worth + 1)
    assert decoder == "torchcodec-cuda"


def engines_of(gpu: str) -> int:
    return {"h100": 7, "t4": 2, "l4": 4}[gpu]


def test_all_ranks_and_a_resumed_run_choose_the_same(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    """Whatever the machine does meanwhile: each later decoder is slower than the one before."""
    found, clips = set[str](), itertools.count(1)
    gpu_machine.before_decoding = lambda frames: sum(range(next(clips) * 10_000))
    for rank in (0, 1, 1, 0):
        gpu_machine.has("h100", "h100")
        with Loader(h264_demo, batch_size=8, device=f"cuda:{rank}", rank=rank, world_size=2, num_threads=2) as loader:
            found |= {repr(route) for route in loader.routes.values()}
    assert len(found) == 1


def test_auto_says_what_to_install_where_torchcodec_must_not_use_nvdec(
    h264_demo: Path, demo: Path, vp9_demo: Path, gpu_machine: GpuMachine
) -> None:
    """Only `decode="dali"` decodes on NVDEC then. Files that NVDEC does not decode have their own reason."""
    gpu_machine.installs("0.16.1", "13.0")
    [(decoder, reason)] = routes(h264_demo)
    assert decoder == "torchcodec"
    assert reason.startswith("on NVDEC, torchcodec must be 0.17 or later")
    assert routes(vp9_demo, "dali") == [("dali", "NVDEC decodes vp9 420 8 bit of 128×160")]
    assert routes(demo) == [("torchcodec", "this GPU has no NVDEC decoder for av1 420 8 bit")]
    assert gpu_machine.clips == 0


@pytest.mark.usefixtures("gpu_machine")
def test_a_gpu_without_the_decoder_leaves_it_to_the_cpu(demo: Path) -> None:
    reason = "this GPU has no NVDEC decoder for av1 420 8 bit"
    assert routes(demo) == [("torchcodec", reason)]
    for decode in ("dali", "torchcodec-cuda"):
        assert refusal(demo, decode) == reason


@pytest.mark.usefixtures("gpu_machine")
def test_sizes_that_nvdec_does_not_take(tmp_path: Path) -> None:
    root = one_file(tmp_path, videos.h264(12), (128, 136))
    assert routes(root) == [("torchcodec", "128×136 is outside what NVDEC takes, 80×144 to 4096×4096")]


def test_the_cpu_is_taken_when_asked_for(h264_demo: Path, gpu_machine: GpuMachine) -> None:
    assert routes(h264_demo, "torchcodec") == [("torchcodec", 'decode="torchcodec" asks for it')]
    assert gpu_machine.devices == set()


def test_a_driver_that_does_not_tell_what_nvdec_decodes_is_a_warning_once(
    h264_demo: Path, gpu_machine: GpuMachine, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_machine.has("h100", fails={"cuvidGetDecoderCaps": 100})
    for _ in range(2):
        [(decoder, reason)] = routes(h264_demo)
        assert decoder == "torchcodec"
        assert "--gpus all" in reason
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        "The CPU decodes all videos, although GPU 0 is used: the driver answers CUDA_ERROR_NO_DEVICE (100)"
    )
    assert "--gpus all" in warning


# ----------------------------------------------------------------------- the trial


def test_torchcodec_on_nvdec_is_compared_with_ffmpeg_before_a_camera_gets_it(plain: Path, gpu_machine: GpuMachine) -> None:
    gpu_machine.change_frames = lambda frames: frames.flip(-1)
    [(decoder, reason)] = routes(plain)
    assert decoder == "torchcodec"
    assert reason.startswith("torchcodec's first frames must differ from FFmpeg's by at most 4 of 255 on average, got ")
    assert refusal(plain, "torchcodec-cuda") == reason


def test_a_later_keyframe_is_tried_as_well(plain: Path, gpu_machine: GpuMachine) -> None:
    """In H.264 without IDR frames, NVDEC would deliver no frame of it."""
    gpu_machine.change_frames = lambda frames: frames.flip(-1) if gpu_machine.clips == 2 else frames
    [(decoder, reason)] = routes(plain)
    assert decoder == "torchcodec"
    assert "first frames must differ" in reason


def test_dali_is_compared_with_ffmpeg_before_a_camera_gets_it(vp9_demo: Path, gpu_machine: GpuMachine) -> None:
    for change, said in (
        (lambda frames: frames.flip(-1), "DALI's first frames must differ from FFmpeg's by at most"),
        (lambda frames: frames[:, 2:], r"must have shape \(128, 160, 3\), got \(126, 160, 3\)"),
    ):
        gpu_machine.change_frames = change
        assert re.search(said, refusal(vp9_demo, "dali"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("host")])
def test_auto_takes_the_cpu_if_nvdec_cannot_be_tried(error: Exception, h264_demo: Path, gpu_machine: GpuMachine) -> None:
    def fail(frames: list[int]) -> None:
        raise error

    gpu_machine.before_decoding = fail
    assert routes(h264_demo) == [("torchcodec", f"NVDEC could not be tried: {error}")]
    with pytest.raises(type(error)):
        routes(h264_demo, "torchcodec-cuda")


@pytest.mark.usefixtures("gpu_machine")
def test_colours_that_only_the_frames_name_are_kept_from_nvdec(tmp_path: Path) -> None:
    """The headers in a sample description of VP9 are not read."""
    root = one_file(tmp_path, (*videos.vp9(12), "-bsf:v", "vp9_metadata=color_space=bt709"))
    named = "its frames say that their colours are bt709, and "
    assert refusal(root, "dali") == f"{named}DALI converts all as BT.601 on a GPU"
    assert routes(root) == [("torchcodec", f"{named}NVDEC may not know the colours of vp9")]


@pytest.mark.usefixtures("gpu_machine")
def test_the_trial_finds_hidden_frames_behind_the_first_ones(tmp_path: Path) -> None:
    """In the second GOP, whose packets are not read before."""
    parts = {"first.mp4": videos.vp9(300), "second.mp4": videos.vp9(300, hidden=True)}
    for name, arguments in parts.items():
        videos.encode(videos.draw((140,)), tmp_path / name, arguments)
    (tmp_path / "parts.txt").write_text("".join(f"file '{name}'\n" for name in parts))
    videos.ffmpeg("-f", "concat", "-i", tmp_path / "parts.txt", "-c", "copy", tmp_path / "video.mp4")
    root = around(tmp_path / "video.mp4", frames=140)
    assert "vp9 with hidden frames" in refusal(root, "dali")
    assert refusal(root, "torchcodec-cuda") == ""


def test_only_what_meets_the_conditions_is_tried(demo: Path, h264_demo: Path, gpu_machine: GpuMachine) -> None:
    routes(demo)
    routes(h264_demo, num_threads=29)
    assert gpu_machine.decoded == 0
    routes(h264_demo)
    assert gpu_machine.decoded > 0


# ----------------------------------------------------------------------- what a file must be like

MARKED_AS_709 = ("-bsf:v", "h264_metadata=matrix_coefficients=1")  # no colr box
X265 = (*videos.X265, "-pix_fmt", "yuv420p", "-x265-params")
CLOSED = "keyint=2:open-gop=0:bframes=0:log-level=none:min-cu-size="
PLAIN = videos.h264(12)
FILES: dict[str, tuple[tuple[int, int], tuple[str, ...], str]] = {  # size, encoder, why DALI refuses it
    "h264": ((128, 160), PLAIN, ""),
    "h264 without IDR frames": ((128, 160), videos.h264_without_idr(), "h264 with keyframes that are not IDR frames: they"),
    "h264, interlaced": ((128, 160), (*PLAIN, "-flags", "+ildct+ilme", "-top", "1"), "interlaced h264 right"),
    "h264, BT.709 in the VUI": ((128, 160), (*PLAIN, *MARKED_AS_709), "the colours are those of BT.709"),
    "h264, another matrix": (
        (128, 160), (*PLAIN, "-bsf:v", "h264_metadata=matrix_coefficients=7"), "the colours are those of matrix 7"
    ),
    "h264 of profile 244": ((128, 160), videos.lossless(12), "h264 of profile 244"),
    "h264, 4:2:2": ((128, 160), videos.h264(12, pixels="yuv422p"), "h264 422 8 bit right"),
    "h264, 10 bit": ((128, 160), videos.h264(12, pixels="yuv420p10le"), "h264 420 10 bit right"),
    "h264, open GOPs": ((128, 160), videos.h264(12, open_gop=True), "open GOPs"),
    "h264, 360 lines": ((360, 640), PLAIN, "360×640 is coded as 368×640 in h264"),
    "h264, 368 lines": ((368, 640), PLAIN, ""),
    "h264, 326 columns": ((480, 326), PLAIN, "480×326 is coded as 480×336 in h264"),
    "h264, 1080 lines": ((1080, 1920), PLAIN, "`dali-stream prepare URI OUT --codec hevc` re-encodes the dataset for NVDEC"),
    "mpeg4, 360 lines": ((360, 640), videos.mpeg4(12), "`dali-stream prepare URI OUT --codec hevc`"),
    "hevc, blocks of 8": ((360, 640), (*X265, f"{CLOSED}8"), ""),
    "hevc, blocks of 8, 1080 lines": ((1080, 1920), (*X265, f"{CLOSED}8"), ""),
    "hevc, blocks of 8, 362 lines": ((362, 640), (*X265, f"{CLOSED}8"), "362×640 is coded as 368×640 in hevc"),
    "hevc, blocks of 16": ((360, 640), (*X265, f"{CLOSED}16"), "360×640 is coded as 368×640 in hevc"),
    "hevc, blocks of 32": ((360, 640), (*X265, f"{CLOSED}32"), "360×640 is coded as 384×640 in hevc"),
    "hevc, blocks of 16, 720 lines": ((720, 320), (*X265, f"{CLOSED}16"), ""),
    "hevc, blocks of 32, 720 lines": ((720, 320), (*X265, f"{CLOSED}32"), "720×320 is coded as 736×320 in hevc"),
    "hevc with CRA frames": ((128, 160), (*X265, f"{CLOSED}8:open-gop=1"), "hevc with keyframes that are not IDR frames: they"),
    "hevc of profile 4": ((128, 160), (*X265, f"{CLOSED}8:keyint=1", "-profile:v", "main-intra"), "hevc of profile 4"),
    "av1": ((122, 150), videos.av1(2), ""),
    "av1 of 242×326": ((242, 326), videos.av1(2), ""),
    "av1, hidden frames": ((128, 160), videos.av1(30), "av1 with hidden frames"),
    "av1 of odd size": (
        (121, 151), ("-c:v", "libaom-av1", "-cpu-used", "8", "-g", "1", "-pix_fmt", "yuv420p"), "even sizes, and not of 121×"
    ),
    "vp9": ((122, 150), videos.vp9(12), ""),
    "vp9, hidden frames": ((128, 160), videos.vp9(12, hidden=True), "vp9 with hidden frames"),
    "vp9 of odd size": ((122, 151), videos.vp9(12), "even sizes, and not of 122×151"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(6, FILES))
def test_what_dali_would_get_wrong_on_a_gpu_is_refused(name: str, tmp_path: Path, gpu_machine: GpuMachine) -> None:
    """By the headers of the first file. A B200 decodes all of these files."""
    gpu_machine.has("b200")
    size, arguments, reason = FILES[name]
    refused = refusal(one_file(tmp_path, arguments, size, frames=16 if size[0] < 1080 else 4), "dali")
    assert reason in refused
    assert bool(reason) == bool(refused)


@pytest.mark.usefixtures("gpu_machine")
def test_sizes_of_the_cpus_codecs_are_not_restricted(tmp_path: Path) -> None:
    """362 lines of VP9 are decoded by DALI on a CPU, too."""
    root = one_file(tmp_path, videos.vp9(12), (362, 240))
    for device in ("cpu", "cuda"):
        [(decoder, _)] = routes(root, "dali", device)
        assert decoder == "dali"


def test_a_file_of_two_sample_descriptions_or_turned_frames_is_kept_from_dali(tmp_path: Path, gpu_machine: GpuMachine) -> None:
    gpu_machine.has("b200")
    frames = videos.draw()
    first = videos.encode(frames[:36], tmp_path / "first.mp4", PLAIN)
    second = videos.encode(frames[36:], tmp_path / "second.mp4", (*PLAIN, "-coder", "0"))
    (tmp_path / "both.mp4").write_bytes(videos.joined(first, second))
    both = videos.write_dataset(tmp_path / "set", [tmp_path / "both.mp4"], delay=2 / videos.FPS)
    assert "2 sample descriptions" in refusal(both, "dali")
    (tmp_path / "turned").mkdir()
    turned = videos.turned(first, tmp_path / "turned/video.mp4", 180)
    assert "rotated frames" in refusal(around(turned, frames=31), "dali")


@pytest.mark.usefixtures("gpu_machine")
def test_a_video_of_an_old_encoder_is_kept_from_nvdec(tmp_path: Path) -> None:
    """NVDEC decodes it as if its encoder had no error."""
    new = videos.encode(videos.draw((16,)), tmp_path / "new.mp4", videos.lossless(12))
    (tmp_path / "old").mkdir()
    old = around(videos.of_x264(new, tmp_path / "old/video.mp4", 148))
    reason = "h264 of an encoder whose errors FFmpeg undoes, and NVDEC does not"
    assert routes(old) == [("torchcodec", reason)]
    assert [refusal(old, decode) for decode in ("torchcodec-cuda", "dali")] == [reason] * 2
    assert refusal(around(new), "torchcodec-cuda") == ""


def test_av1_that_declares_other_lines_than_it_codes_is_kept_from_nvdec(tmp_path: Path, gpu_machine: GpuMachine) -> None:
    """As av1_nvenc does for 1080 lines: the sample description has 1088."""
    gpu_machine.has("l4")
    path = videos.encode(videos.draw((2,), size=(1080, 1920)), tmp_path / "video.mp4", videos.av1(2))
    for declared in (1080, 1088):
        content = path.read_bytes()
        at = content.index(struct.pack(">HH", 1920, 1080), content.index(b"av01", content.index(b"stsd")))
        (tmp_path / str(declared)).mkdir()
        changed = tmp_path / str(declared) / "video.mp4"
        changed.write_bytes(content[:at] + struct.pack(">HH", 1920, declared) + content[at + 4 :])
        refused = refusal(around(changed, (declared, 1920), 2), "dali")
        assert bool(refused) == (declared == 1088)
    assert "its bitstream must have frames of 1088×1920, as its sample description says, got 1080×1920" in refused


@pytest.mark.usefixtures("gpu_machine")
@pytest.mark.parametrize("arguments", [videos.h264_without_idr(), videos.h264(12, open_gop=True)])
def test_torchcodec_is_not_used_on_nvdec_for_gops_that_need_others(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """5 of 192 frames of such a video were of another frame on an H100."""
    root = one_file(tmp_path, arguments, frames=60)
    assert re.search("not IDR|open GOPs", refusal(root, "torchcodec-cuda"))


@pytest.mark.parametrize(
    ("options", "boxes", "said"),
    [
        ((), (), ""),
        ((), ("-colorspace", "smpte170m", "-color_range", "tv"), ""),
        ((), ("-colorspace", "bt709"), "the colours are those of BT.709 according to the file"),
        ((), ("-colorspace", "bt470bg", "-color_range", "pc"), "the colours are those of the full range according to the file"),
        (("colormatrix=bt709",), ("-colorspace", "bt709"), ""),
        (("colormatrix=bt709", "fullrange=on"), ("-colorspace", "bt709", "-color_range", "pc"), ""),
        (("colormatrix=smpte240m",), (), "the colours are those of matrix 7, and torchcodec converts them as BT.601"),
    ],
)
@pytest.mark.usefixtures("gpu_machine")
def test_colours_that_nvdec_cannot_know_are_decoded_on_the_cpu(
    options: tuple[str, ...], boxes: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """FFmpeg follows the boxes of a file, and NVDEC only gets the bitstream."""
    params = ":".join(("scenecut=0", *options))
    plain = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-bf", "0", "-g", "2", "-x264-params", params)
    path = videos.encode(videos.draw((16,)), tmp_path / "bitstream.mp4", plain)
    if boxes:
        videos.ffmpeg("-i", path, "-c", "copy", *boxes, "-movflags", "write_colr", path := tmp_path / "boxes.mp4")
    root = around(path)
    found = refusal(root, "torchcodec-cuda")
    assert found.startswith(said) if said else found == ""
    if "file" in said:
        on_dali = refusal(root, "dali")
        assert on_dali == found or "DALI converts all as BT.601" in on_dali


def test_the_boxes_of_a_file_change_the_colours_on_the_cpu(tmp_path: Path) -> None:
    """The reason for the refusals above."""
    plain = ("-c:v", "libx264", "-bf", "0", "-g", "2")
    bitstream = videos.encode(videos.draw((16,)), tmp_path / "0/bitstream.mp4", plain)
    # Without the names of primaries and transfer, no box is written.
    colours = ("-color_primaries", "bt709", "-color_trc", "bt709", "-colorspace", "bt709")
    (tmp_path / "1").mkdir()
    videos.ffmpeg("-i", bitstream, "-c", "copy", "-movflags", "write_colr", *colours, tmp_path / "1/boxes.mp4")
    frames = []
    for path in (bitstream, tmp_path / "1/boxes.mp4"):
        with Loader(around(path), batch_size=16, shuffle=False, device="cpu", image_dtype="uint8") as loader:
            frames.append(next(iter(loader))[videos.CAMERA].numpy().astype(int))
    assert np.abs(frames[0] - frames[1]).mean() > 1


# ----------------------------------------------------------------------- files in the middle of a run


def two_files(folder: Path, *encodings: tuple[str, ...]) -> Path:
    """A dataset of an episode of 40 frames in each encoding."""
    files = [
        videos.encode(videos.draw((40,), first=episode), folder / f"{episode}.mp4", arguments)
        for episode, arguments in enumerate(encodings)
    ]
    return videos.write_dataset(folder / "set", files, [[40], [40]])


def test_a_later_file_without_idr_frames_moves_its_camera_to_the_cpu(
    tmp_path: Path, gpu_machine: GpuMachine, caplog: pytest.LogCaptureFixture
) -> None:
    """Found in the clip itself, since nothing of a later file is looked at before it is needed."""
    root = two_files(tmp_path, videos.h264(12), videos.h264_without_idr())
    arguments = {"batch_size": 8, "shuffle": False, "image_dtype": "uint8"}
    with Loader(root, device="cpu", **arguments) as loader:
        expected = list(loader)
    said = r"1\.mp4: h264 .* not IDR frames: they do not reset the decoder, .* \(the keyframe at byte \d+\)"
    with Loader(root, device="cuda", **arguments) as loader:
        assert [route.decoder for route in loader.routes.values()] == ["torchcodec-cuda"]
        assert all(itertools.starmap(equal, zip(loader, expected, strict=True)))
        [route] = loader.routes.values()
        assert route.decoder == "torchcodec"
        assert re.search(said, route.reason)
        assert loader.stats()["route_changes"] == 1
    assert 0 < gpu_machine.decoded < 80
    assert "Falling back to torchcodec" in caplog.text
    with (
        Loader(root, device="cuda", decode="torchcodec-cuda", **arguments) as loader,
        pytest.raises(DecodeError, match=f'^decode="torchcodec-cuda": .*{said}.*Use decode="auto"'),
    ):
        list(loader)


@pytest.mark.usefixtures("gpu_machine")
def test_a_later_file_with_hidden_frames_ends_a_run_with_dali(tmp_path: Path) -> None:
    """Found in the clip, and an error also if samples may be substituted."""
    root = two_files(tmp_path, videos.vp9(12), videos.vp9(12, hidden=True))
    said = rf"^{videos.CAMERA}: episode 1, frame \d+: .*1\.mp4: vp9 with hidden frames: .*at byte \d+ has hidden frames"
    for device, on_error in itertools.product(("cuda", "cpu"), ("raise", "substitute")):
        arguments = {"batch_size": 8, "shuffle": False, "device": device, "on_error": on_error}
        with Loader(root, decode="dali", **arguments) as loader:
            if device == "cpu":  # DALI's decoder for the CPU has no such error
                assert len(list(loader)) == 10
                continue
            with pytest.raises(DecodeError, match=rf'{said}\)\. Use decode="auto" in place of decode="dali"$'):
                list(loader)


@pytest.fixture
def vp9_copy(written: Callable[..., Path], tmp_path: Path) -> Path:
    """Four episodes of VP9, which DALI decodes on a CPU, in a folder of the test's own."""
    return copied(written(episodes=4, size=(128, 160), codec="vp9", gop=12), tmp_path)


@pytest.mark.slow
def test_a_clip_that_dali_cannot_decode_is_an_error_of_its_sample(vp9_copy: Path) -> None:
    """One keyframe that looks whole and that DALI's decoder fails at. DALI's error names no camera, and breaks the pipeline."""
    *_, last = sorted((vp9_copy / "videos" / TOP).glob("*/*.mp4"))
    noise = bytes(range(100, 128))

    def damage(packets: list[bytes]) -> list[bytes]:
        return [packet[:12] + noise + packet[40:] if n == 36 else packet for n, packet in enumerate(packets)]

    videos.with_packets(last.rename(last.with_name("whole.mp4")), last, damage)
    arguments = {"batch_size": 8, "shuffle": False, "last_batch": "partial", "image_dtype": "uint8"}
    said = rf"^{TOP}: episode 2, frame 36: .*/{last.name}: DALI's video decoder failed: .* Use decode=\"auto\""
    with Loader(vp9_copy, **arguments, decode="dali") as loader, pytest.raises(DecodeError, match=said):
        list(loader)


@pytest.mark.slow
def test_a_later_file_of_another_codec_ends_a_run_with_dali(h264_demo: Path, vp9_copy: Path) -> None:
    *_, last = sorted((vp9_copy / "videos" / TOP).glob("*/*.mp4"))
    assert not last.name.endswith("-000.mp4")  # the first is still VP9
    last.write_bytes((h264_demo / last.relative_to(vp9_copy)).read_bytes())
    message = r"episode \d, frame \d+: .*file-\d+\.mp4: DALI decodes only vp8, vp9, mjpeg on a CPU, and not h264"
    with (
        Loader(vp9_copy, batch_size=8, shuffle=False, decode="dali") as loader,
        pytest.raises(DecodeError, match=message),
    ):
        list(loader)


@pytest.mark.parametrize(("gpu", "num_threads", "expected"), [("h100", 16, 10), ("h100", 4, 4), ("l4", 16, 6), ("t4", 16, 3)])
def test_dali_gets_a_few_sessions_per_engine(
    gpu: str, num_threads: int, expected: int, vp9_demo: Path, gpu_machine: GpuMachine
) -> None:
    """All cameras together, so that none has to be opened again."""
    gpu_machine.has(gpu)
    with Loader(vp9_demo, batch_size=4, device="cuda", decode="dali", num_threads=num_threads) as loader:
        next(iter(loader))
    assert gpu_machine.pipelines[-1]["num_threads"] == expected
    assert expected * 2 <= 3 * engines_of(gpu) or expected == num_threads
