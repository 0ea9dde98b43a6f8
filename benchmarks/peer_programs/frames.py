"""Comparison of the frames that a peer delivered with the requested frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# Mean absolute differences, of 255. Decoders upsample chroma differently (NVDEC by about 3). In slow scenes, frames differ less
# than that from their neighbours. Therefore a frame must also be as near to the requested frame as to the two frames before and
# after it.
TOLERANCE = 4.0
MARGIN = 0.05
NEIGHBOURS = (-1, 1, -2, 2)
SHOWN = 5  # differences in the report


def check(results: Path, recorded: Any, follows: bool) -> dict[str, Any]:
    """Compare the results of a peer (`serve.Delivered.write`) with the recorded order.

    Args:
        results: File of the peer.
        recorded: A `Recorded`.
        follows: Whether the peer follows the recorded order. A peer that shuffles by itself must deliver existing rows, none
            of them twice in an epoch, and the frames of each row.

    Returns:
        `equal`; the numbers of compared `samples` and `pictures`; `worst_difference`, the largest mean absolute difference of a
        frame, of 255; `differences`, a text for each of the first few.
    """
    with np.load(results) as file:
        found = dict(file)
    wrong = _rows(found, recorded, follows)
    worst, pictures = 0.0, 0
    for n, camera in enumerate(recorded.cameras):
        for at, shown in zip(found["checked"], found[f"pictures_{n}"], strict=True):
            episode, frame = int(found["episode_index"][at]), int(found["frame_index"][at])
            if not recorded.has(episode, frame):
                continue  # `_rows` reports it
            due = recorded.window(camera, episode, frame).tolist()
            if len(due) != len(shown):
                wrong.append(f"sample {at}: {len(shown)} frames of {camera} came, and {len(due)} were to come")
                continue
            for wanted, picture in zip(due, shown, strict=True):
                difference, said = _picture(recorded, camera, episode, wanted, picture)
                worst, pictures = max(worst, difference), pictures + 1
                wrong += [f"sample {at}: {said}"] if said else []
    return {
        "equal": not wrong,
        "samples": len(found["index"]),
        "pictures": pictures,
        "worst_difference": worst,
        "differences": wrong[:SHOWN] + ([f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []),
    }


def merged(checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of all turns of a peer as one result."""
    return {
        "equal": all(found["equal"] for found in checks),
        "samples": sum(found["samples"] for found in checks),
        "pictures": sum(found["pictures"] for found in checks),
        "worst_difference": max(found["worst_difference"] for found in checks),
        "differences": next((found["differences"] for found in checks if not found["equal"]), []),
    }


def _rows(found: dict[str, np.ndarray], recorded: Any, follows: bool) -> list[str]:
    """Return the errors in the numbers of rows."""
    index, episode, frame = (found[key] for key in ("index", "episode_index", "frame_index"))
    if follows:
        due = list(zip(recorded.episode.tolist(), recorded.frame.tolist(), strict=True))
    else:
        due = list(zip(episode.tolist(), frame.tolist(), strict=True))
    said = []
    for at, found_row in enumerate(zip(index.tolist(), episode.tolist(), frame.tolist(), strict=True)):
        row = (recorded.index(*due[at]), *due[at])
        if found_row != row:
            said.append(f"sample {at}: (index, episode, frame) are {found_row}, and {row} were to come")
    for start in range(0, len(index), recorded.epoch):
        rows, times = np.unique(index[start : start + recorded.epoch], return_counts=True)
        said += [f"row {row} came {count} times in an epoch" for row, count in zip(rows, times, strict=True) if count > 1]
    return said


def _picture(recorded: Any, camera: str, episode: int, wanted: int, picture: np.ndarray) -> tuple[float, str | None]:
    """Return the difference of a frame from the requested one, and the error, if any."""
    name = f"{camera} of episode {episode}, frame {wanted}"
    reference = recorded.picture(camera, episode, wanted)
    if reference.shape != picture.shape:
        return 255.0, f"{name} has shape {picture.shape}, and {reference.shape} was to come"
    own = _difference(picture, reference)
    near = [wanted + step for step in NEIGHBOURS if 0 <= wanted + step < recorded.lengths[episode]]
    others = {frame: _difference(picture, recorded.picture(camera, episode, frame)) for frame in near}
    best = min(others, key=lambda frame: others[frame], default=wanted)
    if best in others and others[best] < own - MARGIN:
        return own, f"{name} is {own:.2f} of 255 off; it is nearer to frame {best}, by {own - others[best]:.2f}"
    return own, f"{name} is {own:.2f} of 255 off; {TOLERANCE:g} is allowed" if own > TOLERANCE else None


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.int16) - b.astype(np.int16)).mean())
