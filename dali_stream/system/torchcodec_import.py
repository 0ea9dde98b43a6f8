"""Versions and import of torchcodec: what to install if it cannot be loaded or used on NVDEC, and what is not imported."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from dali_stream.errors import DaliStreamError

# Libraries of CUDA and of torch's CUDA build. From 0.14 on, torchcodec's wheels on PyPI are linked against all of them, and
# cannot be loaded without them, also if there is no GPU. The wheel nvidia-cuda-nvrtc has only the first one.
_CUDA_LIBRARY = re.compile(r"lib(nvrtc|cudart|c10_cuda|torch_cuda)\.so\S*: cannot open")
_FIRST_OF_FFMPEG = re.compile(r"libavutil\.so\S*: cannot open")  # the first of FFmpeg's libraries that is loaded

_NEEDS = (
    "it needs FFmpeg's shared libraries and a version that fits torch: install FFmpeg 4 to 8 (Debian, Ubuntu: apt-get install "
    "ffmpeg)"
)

# 0.14 to 0.16 cache decoders by the coded size, so videos of 360 and 368 lines share a crop, and frames have wrong rows (issue
# 1704 of torchcodec). They also return wrong times for VP9 with hidden frames.
_LEAST_ON_NVDEC = (0, 17)
_LEAST_CUDA = 13  # minimum major version of CUDA for NVDEC
NVDEC_REMEDY = "pip install --upgrade 'torch>=2.11' 'torchcodec>=0.17', both for CUDA 13 as on PyPI, with driver 580 or later"


class TorchcodecError(DaliStreamError):
    """torchcodec, or a library that it needs, is missing or does not fit the others.

    Args:
        message: Message of the error, with the two others.
        cause: Reason, in one line. Default: "".
        remedy: Advice for the user. Default: "".
    """

    def __init__(self, message: str, cause: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.cause, self.remedy = cause, remedy


_compiles = True  # whether functions may be compiled in this process


def compile_nothing() -> None:
    """State that this process is one of the package, which compiles nothing, before torchcodec is imported.

    torchcodec marks its encoders with `torch._dynamo.disallow_in_graph`, which imports 800 modules. Without them, the process
    of a Loader has imported its modules after 1.15 s in place of 2.07 s, and has 302 MB in place of 376 MB (2 cores of an AMD
    EPYC, 2026-11-29, torch 2.13 for CPUs).
    """
    global _compiles
    _compiles = False


@contextlib.contextmanager
def explained_import() -> Iterator[None]:
    """Context manager for the import of torchcodec's decoders or encoders, without torch's compiler after `compile_nothing`.

    Raises:
        TorchcodecError: If they cannot be imported or used.
    """
    try:
        with contextlib.nullcontext() if _compiles else _without_dynamo():
            yield
        _check_libraries()
    except (ImportError, OSError, RuntimeError) as error:
        cause = _cause(error)
        remedy = _remedy(cause)
        message = f"torchcodec cannot be loaded ({cause}). {remedy[0].upper()}{remedy[1:]}"
        raise TorchcodecError(message, cause, remedy) from error


def refusal_on_nvdec(torchcodec: str, torch: str, cuda: str | None) -> str:
    """Return why torchcodec must not decode on NVDEC. The text is empty if it may. `NVDEC_REMEDY` says what to install.

    Args:
        torchcodec: Version of torchcodec.
        torch: Version of torch.
        cuda: Version of CUDA of torch's build. None for a build without CUDA.
    """
    is_new = tuple(map(int, re.findall(r"\d+", torchcodec)[:2])) >= _LEAST_ON_NVDEC and not torchcodec.endswith("+cpu")
    if is_new and cuda and int(cuda.split(".")[0]) >= _LEAST_CUDA:
        return ""
    return f"on NVDEC, torchcodec must be 0.17 or later, with torch for CUDA 13, got torchcodec {torchcodec} and torch {torch}"


def _check_libraries() -> None:
    """Raise torchcodec's error if FFmpeg is missing.

    From 0.16 on, torchcodec can be imported without FFmpeg, for images. It would then fail at each video.
    """
    if sys.modules["torchcodec"].ffmpeg_major_version is None:
        from torchcodec.decoders import VideoDecoder  # type: ignore[attr-defined]  # exported, but not by __all__

        VideoDecoder(b"")  # it loads FFmpeg before it reads the data


def _cause(error: BaseException) -> str:
    """Return the reason in one line.

    torchcodec tries a library of its own for each version of FFmpeg, and its message contains the traceback of each attempt.
    All attempts but the one for the installed version fail because that version's libavutil is missing.
    """
    text = str(error).strip() or type(error).__name__
    first, failed = text.splitlines()[0], "Could not load this library"
    if first.startswith(failed) and error.__cause__ is not None:
        return _cause(error.__cause__)
    attempts = [reason for reason in re.findall(r"^OSError: (.+)$", text, re.MULTILINE) if not reason.startswith(failed)]
    if not attempts:
        return first
    return next((each for each in attempts if not _FIRST_OF_FFMPEG.match(each)), "FFmpeg's libraries were not found")


def _remedy(cause: str) -> str:
    """Return what to install, as a sentence that begins with a small letter."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return f"{_NEEDS}, and a torchcodec that fits torch (constraints.txt has a pair that does)"
    cuda, release = torch.version.cuda, tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if release < (2, 11):  # until torch 2.10, each release of torchcodec fits one of torch
        version = f"0.{release[1]}"
        plain = newest = f"torchcodec=={version}.*"
    else:
        version, plain, newest = "0.13", "torchcodec<0.14", "torchcodec>=0.12"
    if not _CUDA_LIBRARY.match(cause):
        fits = newest if str(cuda).startswith("13") else plain
        return f"{_NEEDS}, and a torchcodec that fits torch {torch.__version__} (`pip install '{fits}'`)"
    build, index = (f"for CUDA {cuda}", f"cu{cuda.replace('.', '')}") if cuda else ("without CUDA", "cpu")
    return (
        f"from version 0.14 on, torchcodec's wheels on PyPI are built for CUDA 13, and torch {torch.__version__} is built "
        f"{build}: install torchcodec {version}, which needs no CUDA (`pip install '{plain}'`), or the build that fits torch "
        f"(`pip install --force-reinstall '{newest}' --index-url https://download.pytorch.org/whl/{index}`)"
    )


class _Dynamo(types.ModuleType):
    """Stand-in for `torch._dynamo`, which is imported only if something else of it is needed than torchcodec needs."""

    @staticmethod
    def disallow_in_graph(function: Any) -> Any:
        """Return the function as it is, since nothing is compiled."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks each module whether it has a `__file__`
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """Import torchcodec inside this context without `torch._dynamo`."""
    stub = _Dynamo("torch._dynamo")
    torch: Any = None
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # the import of torchcodec says what is wrong
        torch = importlib.import_module("torch")
    if torch is None or stub.__name__ in sys.modules:
        yield
        return
    sys.modules[stub.__name__] = stub
    torch._dynamo = stub
    try:
        yield
    finally:
        _remove(stub)


def _remove(stub: _Dynamo) -> None:
    if sys.modules.get(stub.__name__) is stub:
        del sys.modules[stub.__name__]
        delattr(sys.modules["torch"], "_dynamo")
