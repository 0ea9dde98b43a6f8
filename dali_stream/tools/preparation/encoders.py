"""FFmpeg's encoders: their settings, and encoding with the program ffmpeg.

Every codec is encoded with constant quality, with a keyframe every `gop` frames and nowhere else, with closed GOPs, and without
B-frames and hidden frames. Each frame of the source becomes one packet, in the same order.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DaliStreamError

CODECS = ("hevc", "h264", "av1", "vp9")  # allowed codecs of new videos
ENCODERS = ("cpu", "nvenc")  # processors that encode
_LONGEST_GOP = 10_000
_X265_BLOCK = 16  # with the preset ultrafast, x265 pads the sides of frames to multiples of this number of pixels
_SAID = 400  # maximum number of characters of ffmpeg's stderr in an error
# ffmpeg ends with this process, even if this process is killed. A small program requests this from the kernel, and
# then replaces itself by ffmpeg. Code between fork and exec, the usual solution, is unsafe in a process with threads.
_TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# DALI and NVDEC convert this pixel format and colour matrix to RGB correctly.
_PIXELS = "scale=out_color_matrix=bt601:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_int,format=yuv420p"
_TAGS = "setparams=range=tv:colorspace=smpte170m"


@dataclass(frozen=True)
class Encoder:
    """An encoder with its settings.

    Attributes:
        codec: Codec of the output.
        name: FFmpeg's name of the encoder.
        quality: Constant quality on the encoder's scale. Lower is better.
        preset: FFmpeg's name of the preset. Empty if the encoder has no presets.
        arguments: Arguments of the program ffmpeg, which follow those of its input.
    """

    codec: str
    name: str
    quality: int
    preset: str
    arguments: Sequence[str]


# (default, maximum) of the quality. The defaults were measured with FFmpeg 5.1 on 400 frames of a robot's camera. This source
# was 640x480, in AV1 with crf 30 and GOP 2. The PSNR against the source was 47 dB for H.264 and HEVC, 49 dB for VP9 and 52 dB
# for AV1. The sizes were 1.1 (H.264), 0.95 (HEVC), 1.7 (VP9) and 1.6 (AV1) times that of the source.
_QUALITY = {"libx264": (20, 51), "libx265": (20, 51), "libsvtav1": (24, 63), "libvpx-vp9": (30, 63)}
_QUALITY |= {"h264_nvenc": (20, 51), "hevc_nvenc": (22, 51), "av1_nvenc": (26, 51)}  # not measured
_CPU = {"h264": "libx264", "hevc": "libx265", "av1": "libsvtav1", "vp9": "libvpx-vp9"}


def encoder(codec: str, gop: int, crf: int | None, *, nvenc: bool, size: tuple[int, int]) -> Encoder:
    """Return the encoder for a codec.

    Args:
        codec: Codec to encode, one of `CODECS`.
        gop: GOP length in frames, 1 or more.
        crf: Quality on the encoder's scale. None for the default of the encoder.
        nvenc: Whether to encode on the GPU.
        size: (height, width) of the frames.

    Raises:
        ValueError: If NVENC does not support the codec, or the encoder does not support the frame size, GOP or quality.
    """
    if codec in ("h264", "hevc") and (size[0] % 2 or size[1] % 2):
        raise ValueError(f"size must have even sides for {codec}, got {size[0]}×{size[1]}. Give --size, or --codec vp9")
    if gop > _LONGEST_GOP:
        raise ValueError(f"gop must be 1 to {_LONGEST_GOP} frames, got {gop}")
    if nvenc and codec == "vp9":
        raise ValueError("NVENC has no VP9 encoder. Use the CPU's (--encoder cpu), or another codec")
    name = f"{codec}_nvenc" if nvenc else _CPU[codec]
    if name == "libsvtav1" and gop < 2:
        raise ValueError(f"gop must be 2 or more for SVT-AV1, got {gop}. With 1, only the first frame becomes a keyframe")
    default, highest = _QUALITY[name]
    quality = default if crf is None else crf
    if isinstance(quality, bool) or not 1 <= quality <= highest:
        raise ValueError(f"crf must be 1 (best) to {highest} for {name}, got {crf!r}. Default: {default}")
    preset, arguments = _nvenc(gop, quality) if nvenc else _SETTINGS[name](gop, quality)
    if name == "libx265" and any(side % _X265_BLOCK for side in size):
        arguments += ":min-cu-size=8"  # smaller blocks avoid padding, which would prevent decoding with NVDEC
    tag = ("-tag:v", "hvc1") if codec == "hevc" else ()
    # The output of x264 depends on the number of threads. Encoders use one, since the tasks already run in parallel.
    threads = () if nvenc else ("-threads", "1")
    return Encoder(codec, name, quality, preset, ("-c:v", name, *threads, "-bf", "0", *tag, *arguments.split()))


def _nvenc(gop: int, quality: int) -> tuple[str, str]:
    # NVENC does not accept a GOP of 1, so keyframes are forced.
    keys = "-g 250 -force_key_frames expr:1" if gop == 1 else f"-g {gop}"
    return "p5", f"{keys} -preset p5 -rc vbr -cq {quality} -b:v 0 -no-scenecut 1 -forced-idr 1"


def _x264(gop: int, quality: int) -> tuple[str, str]:
    return "veryfast", f"-g {gop} -keyint_min {gop} -preset veryfast -profile:v high -crf {quality} -sc_threshold 0"


def _x265(gop: int, quality: int) -> tuple[str, str]:
    params, keys = "open-gop=0:scenecut=0:bframes=0:log-level=error:pools=none:frame-threads=1", f"-g {gop}"
    if gop > 1:
        params = f"keyint={gop}:min-keyint={gop}:{params}"
    else:  # with keyint=1, x265 writes the profile Main Intra of the range extensions, which many decoders lack
        keys = "-force_key_frames expr:1 -forced-idr 1"
    return "ultrafast", f"-preset ultrafast -profile:v main -crf {quality} {keys} -x265-params {params}"


def _svt(gop: int, quality: int) -> tuple[str, str]:
    # pred-struct=1 means low delay. Without it, GOPs of more than 2 frames have hidden frames. Temporal filtering mixes
    # neighbouring frames, and the screen content mode has lost single cells of a bar code.
    return "10", f"-g {gop} -preset 10 -crf {quality} -svtav1-params pred-struct=1:enable-tf=0:scm=0:lp=1"


def _vpx(gop: int, quality: int) -> tuple[str, str]:
    arguments = f"-g {gop} -keyint_min {gop} -deadline realtime -cpu-used 8 -crf {quality} -b:v 0"
    return "", f"{arguments} -auto-alt-ref 0 -lag-in-frames 0"


_SETTINGS = {"libx264": _x264, "libx265": _x265, "libsvtav1": _svt, "libvpx-vp9": _vpx}


def encode(frames: Iterable[npt.NDArray[np.uint8]], size: tuple[int, int], encoder: Encoder, target: Path) -> None:
    """Encode RGB frames to an MP4 file, each frame once and in order.

    Args:
        frames: Frames as uint8 arrays of shape (n, height, width, 3).
        size: (height, width) of the frames.
        encoder: Encoder to use.
        target: Path of the new file.

    Raises:
        DaliStreamError: If ffmpeg is not installed, lacks the encoder, or fails.
    """
    program = shutil.which("ffmpeg")
    if program is None:
        raise DaliStreamError("encoding needs the program ffmpeg, version 4 to 8 (Debian, Ubuntu: apt-get install ffmpeg)")
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[1]}x{size[0]}", "-r", "30", "-i", "pipe:0")
    written = ("-vf", f"{_PIXELS},{_TAGS}", *encoder.arguments, "-map_metadata", "-1", "-f", "mp4", f"file:{target}")
    command = [os.path.abspath(program), "-hide_banner", "-loglevel", "error", "-xerror", *raw, *written]
    tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
    quiet = os.environ | {"SVT_LOG": "1", "AV_LOG_FORCE_NOCOLOR": "1"}
    with tempfile.TemporaryFile() as output:
        # In a separate session, ffmpeg does not receive Ctrl-C. This process receives it, and ends ffmpeg.
        process = subprocess.Popen(tied, stdin=subprocess.PIPE, stdout=output, stderr=output, env=quiet, start_new_session=True)
        assert process.stdin is not None
        try:
            try:
                for part in frames:
                    process.stdin.write(np.ascontiguousarray(part).data)
                process.stdin.close()
            except BrokenPipeError:
                pass  # ffmpeg has failed; its exit code and stderr are read below
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code:
            output.seek(0)
            text = " ".join(output.read().decode(errors="replace").split())[-_SAID:]
            raise DaliStreamError(
                f"ffmpeg cannot encode with {encoder.name} (exit code {code}): {text}. `ffmpeg -encoders` lists what it can "
                "do. NVENC needs a GPU with an encoder (A100 and H100 have none) and its driver"
            )
