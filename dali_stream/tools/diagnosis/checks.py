"""Table of all checks of `doctor`. To add a check, write a function and add a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dali_stream.tools.diagnosis import camera, gpu, machine, rows, software
from dali_stream.tools.diagnosis.report import Area, Check

MACHINE: tuple[Area, ...] = ("gpu", "software", "machine")
"""Areas whose checks get a `Machine`. Checks of "dataset" get `Rows`, and checks of "camera" get a `Camera`."""
CHECKS: Mapping[str, Mapping[str, Check[Any]]] = {
    "gpu": {
        "driver": gpu.check_driver,
        "GPUs": gpu.check_gpus,
    },
    "software": {
        "Python": software.check_python,
        "DALI": software.check_dali,
        "torch": software.check_torch,
        "torchcodec": software.check_torchcodec,
        "FFmpeg": software.check_ffmpeg,
        "ffmpeg program": software.check_ffmpeg_program,
    },
    "machine": {
        "container": machine.check_container,
        "cores": machine.check_cores,
        "memory": machine.check_memory,
        "shared memory": machine.check_shared_memory,
        "disk": machine.check_disk,
    },
    "dataset": {
        "metadata": rows.check_metadata,
        "statistics": rows.check_statistics,
        "files": rows.check_files,
        "rows": rows.check_rows,
        "tasks": rows.check_names,
    },
    "camera": {
        "": camera.check_format,
        "structure": camera.check_structure,
        "routes": camera.check_routes,
        "remarks": camera.check_remarks,
        "timestamps": camera.check_timestamps,
        "to_timestamp": camera.check_ends,
        "GOPs": camera.check_gops,
    },
}
"""Checks by area and name, in the order of the report. A check that returns several results names them itself."""
