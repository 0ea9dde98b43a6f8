"""A measurement on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from dali_stream import process
from dali_stream.dataset import Dataset
from dali_stream.mixture import Mixture
from dali_stream.tools.bench.measure import Mode, measure
from dali_stream.tools.bench.report import node_report


def run(
    dataset: Dataset | Mixture,
    mode: Mode,
    num_batches: int,
    warmup: int,
    loader: dict[str, Any],
    device: str,
    head: dict[str, Any],
) -> dict[str, Any] | None:
    """Measures on every rank of this run.

    Args:
        dataset: to stream, epoch after epoch.
        mode, num_batches, warmup, loader: as for `measure.measure`.
        device: of the Loader.
        head: further entries of the report; `source` None becomes the scheme of the dataset's URI, or "mixture".

    Returns:
        The report (see `report.node_report`) on the main rank; None on others.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState(cpu=process.gpu(device) is None)
    own = measure(dataset, mode, num_batches, warmup, loader | {"device": device}, state.wait_for_everyone)
    ranks = gather_object([own])
    # A process that ends with Gloo's threads alive may abort: https://github.com/pytorch/pytorch/pull/179291.
    state.destroy_process_group()
    if not state.is_main_process:
        return None
    source = (
        head["source"]
        or "mixture" * bool(dataset.dataset_names)
        or (dataset.uri.partition("://")[0] if "://" in dataset.uri else "local")
    )
    return node_report(
        ranks,
        {
            "dataset": dataset.uri, **head, "source": source, "mode": mode, "num_batches": num_batches, "warmup": warmup,
            "episodes": dataset.num_episodes, "dataset_frames": dataset.num_frames, "fps": dataset.fps,
            "cameras": {key: dataset.features[key].frame_size for key in dataset.cameras},
            **loader, "threads": loader["threads"] or process.cores(),
            **({"datasets": _delivered(dataset, ranks)} if isinstance(dataset, Mixture) else {}),
        },
    )  # fmt: skip


def _delivered(mixture: Mixture, ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per dataset, its samples in what was measured, their share, and the share that it should have."""
    samples = np.sum([rank["samples_of_datasets"] for rank in ranks], axis=0)
    return {
        name: {"samples": int(count), "delivered": float(count / samples.sum()), "share": float(share)}
        for name, count, share in zip(mixture.datasets, samples, mixture.shares.targets, strict=True)
    }
