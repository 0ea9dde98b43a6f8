"""The program ffmpeg: what it can do, what it sees in a file, and re-encoding a file.

Files come from anywhere, so the input is read as MP4 whatever it looks like, and nothing but that file is opened.
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
from dali_stream.tools.transcode.encoders import ENCODERS, Encoder, encoder

_LINES = 40  # of what the program says that are kept
_SAID = 400  # characters of it in an error
# On Linux the program ends with this process, however that ends: a killed run leaves no encoder behind. It is a program of
# its own that asks for it, since code between fork and exec is not safe beside threads.
_TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# What DALI and NVDEC are trusted with. Pixels that are like that already pass through unchanged.
_PIXELS = "scale=out_color_matrix=bt601:out_range=tv,format=yuv420p"
# For the usual other matrix: the scaler goes through RGB, whose colours are subsampled a second time (mean error 2.1 of 255
# at edges, and 0.6 so).
_FROM_709 = "colorspace=iall=bt709:space=smpte170m:primaries=bt709:trc=bt709:range=tv:fast=1:format=yuv420p"
_TAGS = "setparams=range=tv:colorspace=smpte170m"
_SHOWN = re.compile(r" fmt:(\S+) .*?(?:color_range:(\S+) color_space:(\S+)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Pixels:
    """What a file's first frame is made of, in FFmpeg's names."""

    format: str
    range: str
    matrix: str

    def refusal(self) -> str:
        """Why DALI would get its colours wrong; empty where it would not."""
        if self.format != "yuv420p":
            return f"its pixels are {self.format}, and not yuv420p"
        if self.range not in ("tv", "unknown", ""):
            return "its colours have the full range"
        known = self.matrix in ("smpte170m", "bt470bg", "unknown", "unspecified", "")
        return "" if known else f"its colours are {self.matrix}, and not BT.601"

    def conversion(self) -> str:
        """The filters that make them right."""
        return f"{_FROM_709 if self.matrix == 'bt709' else _PIXELS},{_TAGS}"


class Program:
    """The ffmpeg on the PATH. Safe to use from several threads; `kill` ends all that runs.

    Raises:
        DaliStreamError: there is none.
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
        new = any(line.startswith("-fps_mode") for line in options)  # from 5.1 on; 8 may do without the old one
        self._times = ("-fps_mode" if new else "-vsync", "passthrough")

    def kill(self) -> None:
        """Ends what runs, and starts nothing any more."""
        with self._lock:
            self._killed = True
            for process in self._running:
                process.kill()

    def failure(self, encoder: Encoder, sizes: Sequence[tuple[int, int]]) -> str:
        """Why an encoder does not work here, in the program's words; empty where it has encoded a few frames of each size.

        Sizes are (height, width): NVENC has a least and a largest one for each GPU.
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
        """Encodes a file's video, one frame for each packet, at its own time.

        Args:
            source, target: MP4 files; `target` is not there yet.
            encoder: what with.
            timescale: ticks per second of both.
            advance: told of every new frame, some at a time, and now and then without one.

        Raises:
            DecodeError: it cannot be decoded from beginning to end, or not be encoded.
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
        """(exit code, the end of what it says on stderr). `line` gets the lines of stdout."""
        tail: deque[str] = deque(maxlen=_LINES)
        with self._started([self._path, "-hide_banner", "-nostdin", *arguments]) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=tail.extend, args=(process.stderr,), name="dali_stream ffmpeg")
            reader.start()
            try:
                for text in process.stdout:
                    line(text)
            except BaseException:
                process.kill()
                raise
            finally:
                reader.join()
        return process.returncode, "".join(tail)

    @contextmanager
    def _started(self, command: list[str]) -> Iterator[subprocess.Popen[str]]:
        # A session of its own: Ctrl-C is for this process to act on.
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


def choose(program: Program, codec: str, gop: int, crf: int | None, which: str, sizes: Sequence[tuple[int, int]]) -> Encoder:
    """The encoder to take for frames of these sizes: `which` is "auto", "nvenc" or "cpu". "auto" takes NVENC where it works.

    Raises:
        ValueError: it cannot do what is asked, or NVENC is asked for and does not work.
        DaliStreamError: this ffmpeg lacks the CPU's encoder.
    """
    one_of("encoder", which, ENCODERS)
    odd = [size for size in sizes if size[0] % 2 or size[1] % 2]
    if odd and codec in ("h264", "hevc"):
        raise ValueError(
            f"codec is {codec!r}, and there are frames of {odd[0][0]}×{odd[0][1]}; its encoders take even sizes; take vp9"
        )
    if which != "cpu":
        try:
            found = encoder(codec, gop, crf, nvenc=True)
            failure = program.failure(found, sizes)
            if not failure:
                return found
            if which == "nvenc":
                raise ValueError(
                    f"encoder is 'nvenc', and {found.name} does not work here: {failure}. It needs a GPU with such an encoder "
                    "(A100 and H100 have none), its driver, and an ffmpeg that is built with NVENC; use --encoder cpu"
                )
        except ValueError:
            if which == "nvenc":
                raise
    found = encoder(codec, gop, crf, nvenc=False)
    if failure := program.failure(found, sizes):
        raise DaliStreamError(
            f"this ffmpeg does not encode with {found.name}: {failure}. Install one that has it (`ffmpeg -encoders` lists "
            "them; those of Debian and Ubuntu have), or choose another codec"
        )
    return found


def _input(path: Path) -> list[str]:
    return ["-protocol_whitelist", "file", "-f", "mov", "-i", f"file:{path}"]


def _short(said: str) -> str:
    """The end of what a program says, in one line."""
    return " ".join(said.split())[-_SAID:]
