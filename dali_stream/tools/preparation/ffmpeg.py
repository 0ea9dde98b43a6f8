"""Encoding with the program ffmpeg, which gets decoded and resized frames through a pipe."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DaliStreamError
from dali_stream.tools.preparation.encoders import Encoder

_SAID = 400  # maximum number of characters of ffmpeg's stderr in an error
# On Linux, ffmpeg ends with this process, even if this process is killed. A small program requests this from the kernel, and
# then replaces itself by ffmpeg. Code between fork and exec, the usual solution, is unsafe in a process with threads.
_TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# DALI and NVDEC convert this pixel format and colour matrix to RGB correctly.
_PIXELS = "scale=out_color_matrix=bt601:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_int,format=yuv420p"
_TAGS = "setparams=range=tv:colorspace=smpte170m"


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
