"""The program ffmpeg: its abilities, the pixels of a file, and encoding a file.

Files are untrusted, so the input is always read as MP4, and no other file is opened.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dali_stream.arguments import one_of
from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.tools.transcoding.encoders import ENCODERS, Codec, Encoder, EncoderChoice, encoder

_LINES = 40  # of its stderr that are kept
_SAID = 400  # of these in an error
# On Linux, ffmpeg ends with this process, even if that is killed. A small program requests this before it becomes ffmpeg,
# since code between fork and exec is unsafe with threads.
_TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# The format that DALI and NVDEC convert correctly. Pixels in this format pass unchanged.
_PIXELS = "scale=out_color_matrix=bt601:out_range=tv,format=yuv420p"
# For BT.709: the scaler goes through RGB and subsamples colours a second time (mean error 2.1 of 255 at edges; 0.6 with this).
_FROM_709 = "colorspace=iall=bt709:space=smpte170m:primaries=bt709:trc=bt709:range=tv:fast=1:format=yuv420p"
_NVENC_BLOCK = 32  # pixels, in HEVC
_TAGS = "setparams=range=tv:colorspace=smpte170m"
_SHOWN = re.compile(r" fmt:(\S+) .*?(?:color_range:(\S+) color_space:(\S+)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Pixels:
    """Format of a file's first frame, in FFmpeg's names."""

    format: str
    range: str
    matrix: str

    def refusal(self) -> str:
        """Why DALI would convert its colours wrongly; empty if it would not."""
        if self.format != "yuv420p":
            return f"its pixels are {self.format}, and not yuv420p"
        if self.range not in ("tv", "unknown", ""):
            return "its colours have the full range"
        known = self.matrix in ("smpte170m", "bt470bg", "unknown", "unspecified", "")
        return "" if known else f"its colours are {self.matrix}, and not BT.601"

    def conversion(self) -> str:
        """The filters that convert it."""
        return f"{_FROM_709 if self.matrix == 'bt709' else _PIXELS},{_TAGS}"


class Program:
    """The ffmpeg on the PATH. Thread-safe; `kill` ends all running processes.

    Raises:
        DaliStreamError: it is not installed.
    """

    def __init__(self) -> None:
        found = shutil.which("ffmpeg")
        if found is None:
            raise DaliStreamError(
                "transcoding needs the program ffmpeg, version 4 to 8 (Debian, Ubuntu: apt-get install ffmpeg)"
            )
        self._path = os.path.abspath(found)
        self._lock, self._killed = threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()
        options: list[str] = []
        self._run(["-h", "long"], options.append)
        new = any(line.startswith("-fps_mode") for line in options)  # since 5.1; 8 may lack the old one
        self._times = ("-fps_mode" if new else "-vsync", "passthrough")

    def kill(self) -> None:
        """Ends all processes, and prevents new ones."""
        with self._lock:
            self._killed = True
            for process in self._running:
                process.kill()

    def failure(self, encoder: Encoder, sizes: Sequence[tuple[int, int]]) -> str:
        """Why an encoder does not work here, from its stderr; empty if it encodes a few frames of each size.

        Sizes are (height, width); NVENC's limits depend on the GPU.
        """
        for height, width in sizes or [(240, 320)]:
            raw = ("-f", "rawvideo", "-pix_fmt", "yuv420p", "-s", f"{width}x{height}", "-r", "30", "-i", "/dev/zero")
            code, said = self._run(["-loglevel", "error", *raw, "-frames:v", "8", *encoder.arguments, "-f", "null", "-"])
            if code:
                return f"{_short(said) or f'exit code {code}'} (frames of {height}×{width})"
        return ""

    def look(self, path: Path) -> Pixels:
        """Decodes a file's first frame. Raises DecodeError."""
        code, said = self._run([*_input(path), "-map", "0:v:0", "-frames:v", "1", "-vf", "showinfo", "-f", "null", "-"])
        found = _SHOWN.search(said)
        if code or not found:
            raise DecodeError(f"ffmpeg cannot decode its first frame: {_short(said)}")
        return Pixels(found[1], found[2] or "", found[3] or "")

    def encode(
        self, source: Path, target: Path, encoder: Encoder, timescale: int, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        """Encodes a file's video, each frame once, at its own time.

        Args:
            source, target: MP4 files; `target` must not exist.
            encoder: to use.
            timescale: ticks per second of both.
            advance: called regularly with the number of new frames, which may be 0.

        Raises:
            DecodeError: it cannot be decoded completely, or cannot be encoded.
        """
        done = 0

        def line(text: str) -> None:
            nonlocal done
            name, _, value = text.partition("=")
            if name == "frame" and value.strip().isdigit():
                advance(max(int(value) - done, 0))
                done = max(done, int(value))

        quiet = ("-loglevel", "error", "-nostats", "-progress", "pipe:1", "-xerror", "-err_detect", "explode")
        video = ("-map", "0:v:0", "-map_metadata", "-1", "-map_chapters", "-1", "-copyts", *self._times)
        times = ("-enc_time_base", f"1:{timescale}", "-video_track_timescale", str(timescale))
        written = ("-movflags", "+faststart", "-f", "mp4", f"file:{target}")
        command = [*quiet, *_input(source), *video, "-vf", self.look(source).conversion(), *encoder.arguments, *times, *written]
        code, said = self._run(command, line)
        if code:
            raise DecodeError(f"ffmpeg cannot encode it with {encoder.name} (exit code {code}): {_short(said)}")

    def _run(self, arguments: list[str], line: Callable[[str], None] = lambda _: None) -> tuple[int, str]:
        """(exit code, end of its stderr). `line` gets the lines of stdout."""
        tail: deque[str] = deque(maxlen=_LINES)
        with self._started([self._path, "-hide_banner", "-nostdin", *arguments]) as process:
            reader = threading.Thread(target=tail.extend, args=(process.stderr,), name="dali_stream ffmpeg")
            reader.start()
            try:
                for text in process.stdout or ():
                    line(text)
            except BaseException:
                process.kill()
                raise
            finally:
                reader.join()
        return process.returncode, "".join(tail)

    @contextmanager
    def _started(self, command: list[str]) -> Iterator[subprocess.Popen[str]]:
        # In its own session, so that Ctrl-C reaches only this process.
        tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
        quiet = os.environ | {"SVT_LOG": "1", "AV_LOG_FORCE_NOCOLOR": "1"}
        with self._lock:
            if self._killed:
                raise DaliStreamError("stopped")
            process = subprocess.Popen(
                tied, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=quiet,
                start_new_session=True, text=True, errors="replace",
            )  # fmt: skip
            self._running.add(process)
        try:
            with process:
                yield process
        finally:
            with self._lock:
                self._running.discard(process)


def choose(
    program: Program, codec: Codec, gop: int, crf: int | None, which: EncoderChoice, sizes: Sequence[tuple[int, int]]
) -> Encoder:
    """The encoder for frames of these sizes. `which` "auto" takes NVENC where it works.

    Raises:
        ValueError: an argument is not supported, or NVENC is requested and does not work.
        DaliStreamError: this ffmpeg lacks the CPU's encoder.
    """
    one_of("encoder", which, ENCODERS)
    odd = [size for size in sizes if size[0] % 2 or size[1] % 2]
    if odd and codec in ("h264", "hevc"):
        raise ValueError(
            f"codec is {codec!r}, and frames of {odd[0][0]}×{odd[0][1]} have an odd side; its encoders need even sizes; use vp9"
        )
    if which != "cpu":
        try:
            found = encoder(codec, gop, crf, nvenc=True)
            failure = program.failure(found, sizes) or _nvenc_padding(codec, sizes)
            if not failure:
                return found
            if which == "nvenc":
                raise ValueError(
                    f"encoder is 'nvenc', and {found.name} does not work here: {failure}. It needs a GPU with an encoder (A100 "
                    "and H100 have none), its driver, and an ffmpeg built with NVENC; use --encoder cpu"
                )
        except ValueError:
            if which == "nvenc":
                raise
    found = encoder(codec, gop, crf, nvenc=False, sizes=sizes)
    if failure := program.failure(found, sizes):
        raise DaliStreamError(
            f"this ffmpeg cannot encode with {found.name}: {failure}. Install one that can (`ffmpeg -encoders` lists them; "
            "those of Debian and Ubuntu can), or choose another codec"
        )
    return found


def _nvenc_padding(codec: Codec, sizes: Sequence[tuple[int, int]]) -> str:
    """Return why NVENC's output would not go to NVDEC. Empty if it would. Not run on a GPU."""
    padded = [size for size in sizes if codec == "hevc" and any(side % _NVENC_BLOCK for side in size)]
    if not padded:
        return ""
    return (
        f"it pads frames of {padded[0][0]}×{padded[0][1]} to multiples of {_NVENC_BLOCK}, and DALI needs frames without padding"
    )


def _input(path: Path) -> list[str]:
    return ["-protocol_whitelist", "file", "-f", "mov", "-i", f"file:{path}"]


def _short(said: str) -> str:
    """The end of a program's output, in one line."""
    return " ".join(said.split())[-_SAID:]
