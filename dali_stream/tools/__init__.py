"""Functions that the commands of `dali-stream` call. The rest of the library does not import them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_stream.tools.description import CameraReport, DatasetReport, FeatureReport, describe
    from dali_stream.tools.diagnosis import DoctorReport, Finding, doctor
    from dali_stream.tools.diagnosis.report import Area, Status
    from dali_stream.tools.indexing import IndexReport, index
    from dali_stream.tools.picture import preview
    from dali_stream.tools.preparation import MapTasks, PreparedCamera, PrepareReport, PrepareStatus, prepare

__all__ = [
    "Area",
    "CameraReport",
    "DatasetReport",
    "DoctorReport",
    "FeatureReport",
    "Finding",
    "IndexReport",
    "MapTasks",
    "PrepareReport",
    "PrepareStatus",
    "PreparedCamera",
    "Status",
    "describe",
    "doctor",
    "index",
    "prepare",
    "preview",
]

_MODULES = {
    "description": ("CameraReport", "DatasetReport", "FeatureReport", "describe"),
    "diagnosis": ("DoctorReport", "Finding", "doctor"),
    "diagnosis.report": ("Area", "Status"),
    "indexing": ("IndexReport", "index"),
    "picture": ("preview",),
    "preparation": ("MapTasks", "PreparedCamera", "PrepareReport", "PrepareStatus", "prepare"),
}


def __getattr__(name: str) -> Any:
    # Import a module on first use. A command needs only one of them, and most of them import torch.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Available: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [name for name in globals() if name.startswith("__")] + __all__
