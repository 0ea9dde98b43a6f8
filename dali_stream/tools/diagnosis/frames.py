"""Checks that decode in this process: an image of a camera whose frames are images, and all frames of a dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from dali_stream.dataset import Dataset
from dali_stream.decode import images
from dali_stream.errors import DaliStreamError, StorageError, counted
from dali_stream.lerobot.rows import RowReader
from dali_stream.tools.diagnosis.report import OK, PROBLEM, Finding

_BATCH = 32  # number of successive frames that are decoded together


def check_images(key: str, dataset: Dataset) -> Finding:
    """Decode an image of the first episode of a camera whose frames are images in the rows."""
    height, width = dataset.features[key].frame_size
    try:
        encoded = RowReader(dataset, keys={key}).read(0)[key]
        images.decode(encoded[len(encoded) // 2], dataset.features[key])
    except DaliStreamError as error:
        return Finding("dataset", key, PROBLEM, str(error))
    return Finding("dataset", key, OK, f"images of {height}×{width} in Parquet rows; one was decoded")


def check_all_frames(dataset: Dataset, progress: Callable[[int, int], None]) -> Finding:
    """Read all frames of a dataset with a Loader, in recorded order and on the CPU.

    An error ends an epoch. The batches from this one on are then requested one by one, which is slower.

    Args:
        dataset: Dataset, or a selected part of one.
        progress: Function that is called with (batches read, number of batches).
    """
    from dali_stream.loader import Loader  # loads torch

    errors: list[DaliStreamError] = []
    try:
        with Loader(
            dataset, batch_size=_BATCH, shuffle=False, last_batch="partial", image_dtype="uint8", device="cpu", rank=0,
            world_size=1,
        ) as loader:  # fmt: skip
            done, batches = 0, len(loader)
            with contextlib.suppress(DaliStreamError):
                for done, _ in enumerate(loader, 1):
                    progress(done, batches)
            for number in range(done, batches):
                try:
                    loader.batch_at(0, number)
                except StorageError:
                    raise  # the others would fail as well, perhaps after a timeout each
                except DaliStreamError as error:
                    errors.append(error)
                progress(number + 1, batches)
    except DaliStreamError as error:
        errors.append(error)
    if not errors:
        return Finding("dataset", "all frames", OK, f"decoded, in {counted(dataset.num_episodes, 'episode')}")
    more = f". {len(errors)} of {batches} batches of successive frames have such errors" if len(errors) > 1 else ""
    return Finding("dataset", "all frames", PROBLEM, f"{errors[0]}{more}")
