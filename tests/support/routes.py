"""Routes on a machine without a GPU."""

from __future__ import annotations

import pytest

from dali_stream.decode import refusal, route
from dali_stream.decode.capability import Capability

DECODES = Capability(True, "", 1, (48, 48), (4096, 4096), 65536)


def let_auto_take_nvdec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode="auto" take "torchcodec-cuda" on a CPU, and fall back to torchcodec, as it does on a GPU."""
    choose = route.choose
    monkeypatch.setattr(route, "choose", lambda _, *rest: choose("torchcodec-cuda", *rest))


def let_nvdec_answer(monkeypatch: pytest.MonkeyPatch, answer: Capability = DECODES) -> None:
    """Let the driver give an answer for every format. By default, NVDEC decodes it."""
    for module in (refusal, route):
        monkeypatch.setattr(module, "capability", lambda *_: answer)
