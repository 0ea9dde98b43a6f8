"""Comparison of the frames that a peer delivered with the requested frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# Mean absolute differences of pixel values (0 to 255). Decoders upsample chroma differently, and NVDEC's frames differ from
# FFmpeg's by about 3. In slow scenes, neighbouring frames differ by less than that. Therefore a delivered frame must also be at
# least as near to the requested frame as to the two frames before and the two after it, up to MARGIN.
TOLERANCE = 4.0
MARGIN = 0.05
NEIGHBOURS = (-1, 1, -2, 2)
SHOWN = 5  # maximum number of differences in the report


def check(results: Path, recorded: Any, follows: bool) -> dict[str, Any]:
    """Compare the results of a peer (`serve.Delivered.write`) with the recorded order.

    Args:
        results: File of the peer.
        recorded: A `Recorded`.
        follows: Whether the peer follows the recorded order. A peer that shuffles by itself must deliver rows that exist, no
            row twice in an epoch, and the frames that belong to each row.

    Returns:
        A dict with `equal`, which is whether all are correct; the numbers of compared `samples` and `pictures` (frames);
        `worst_difference`, the largest mean absolute difference of a frame's pixel values (0 to 255); and `differences`, texts
        that describe the first few errors.
    """
    with np.load(results) as file:
        delivered = dict(file)
    wrong = _rows(delivered, recorded, follows)
    worst, pictures = 0.0, 0
    for n, camera in enumerate(recorded.cameras):
        for at, shown in zip(delivered["checked"], delivered[f"pictures_{n}"], strict=True):
            episode, frame = int(delivered["episode_index"][at]), int(delivered["frame_index"][at])
            if not recorded.has(episode, frame):
                continue  # `_rows` reports it
            expected = recorded.window(camera, episode, frame).tolist()
            if len(expected) != len(shown):
                wrong.append(f"sample {at}: expected {len(expected)} frames of {camera}, got {len(shown)}")
                continue
            for wanted, picture in zip(expected, shown, strict=True):
                difference, error = _picture(recorded, camera, episode, wanted, picture)
                worst, pictures = max(worst, difference), pictures + 1
                wrong += [f"sample {at}: {error}"] if error else []
    return {
        "equal": not wrong,
        "samples": len(delivered["index"]),
        "pictures": pictures,
        "worst_difference": worst,
        "differences": wrong[:SHOWN] + ([f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []),
    }


def merged(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all turns of a peer as one result."""
    return {
        "equal": all(result["equal"] for result in checks),
        "samples": sum(result["samples"] for result in checks),
        "pictures": sum(result["pictures"] for result in checks),
        "worst_difference": max(result["worst_difference"] for result in checks),
        "differences": next((result["differences"] for result in checks if not result["equal"]), []),
    }


def _rows(delivered: dict[str, np.ndarray], recorded: Any, follows: bool) -> list[str]:
    """Return texts that describe wrong or repeated rows."""
    index, episode, frame = (delivered[key] for key in ("index", "episode_index", "frame_index"))
    if follows:
        expected = list(zip(recorded.episode.tolist(), recorded.frame.tolist(), strict=True))
    else:
        expected = list(zip(episode.tolist(), frame.tolist(), strict=True))
    errors = []
    for at, delivered_row in enumerate(zip(index.tolist(), episode.tolist(), frame.tolist(), strict=True)):
        row = (recorded.index(*expected[at]), *expected[at])
        if delivered_row != row:
            errors.append(f"sample {at}: expected (index, episode, frame) {row}, got {delivered_row}")
    for start in range(0, len(index), recorded.epoch):
        rows, times = np.unique(index[start : start + recorded.epoch], return_counts=True)
        errors += [
            f"row {row} was delivered {count} times in an epoch" for row, count in zip(rows, times, strict=True) if count > 1
        ]
    return errors


def _picture(recorded: Any, camera: str, episode: int, wanted: int, picture: np.ndarray) -> tuple[float, str | None]:
    """Return the difference of a frame from the requested one, and a text that describes the error, or None if it is right."""
    name = f"{camera} of episode {episode}, frame {wanted}"
    reference = recorded.picture(camera, episode, wanted)
    if reference.shape != picture.shape:
        return 255.0, f"{name}: expected shape {reference.shape}, got {picture.shape}"
    difference = _difference(picture, reference)
    near = [wanted + step for step in NEIGHBOURS if 0 <= wanted + step < recorded.lengths[episode]]
    others = {frame: _difference(picture, recorded.picture(camera, episode, frame)) for frame in near}
    best = min(others, key=lambda frame: others[frame], default=wanted)
    if best in others and others[best] < difference - MARGIN:
        return (
            difference,
            f"{name} is {difference:.2f} of 255 off; it is nearer to frame {best}, by {difference - others[best]:.2f}",
        )
    return difference, f"{name} is {difference:.2f} of 255 off; {TOLERANCE:g} is allowed" if difference > TOLERANCE else None


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.int16) - b.astype(np.int16)).mean())
