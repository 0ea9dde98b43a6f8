"""Rows of a dataset as a Loader delivers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dali_stream import Dataset, Loader


def delivered(source: Path | str | Dataset, **options: Any) -> dict[str, Any]:
    """One epoch in recorded order: {key: values of all rows}, without frames. Text is a list.

    Args:
        source: Dataset or its address. Its cameras are left out unless it is a Dataset.
        options: Arguments of the Loader.
    """
    dataset = source if isinstance(source, Dataset) else Dataset(source, cameras=[])
    settings = {"batch_size": min(4, len(dataset)), "shuffle": False, "last_batch": "partial", "device": "cpu"} | options
    with Loader(dataset, **settings) as loader:
        batches = list(loader)
    keys = [key for key in batches[0] if key not in dataset.cameras]
    return {
        key: np.concatenate([batch[key].numpy() for batch in batches])
        if not isinstance(batches[0][key], list)
        else [text for batch in batches for text in batch[key]]
        for key in keys
    }
