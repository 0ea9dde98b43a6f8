"""Description of a mixture: the share of each dataset, and the features in which the datasets differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dali_stream.dataset import Dataset
from dali_stream.lerobot.combine import own_keys
from dali_stream.lerobot.common import common, described
from dali_stream.lerobot.dataset_files import NEEDED
from dali_stream.mixture import Mixture, check_names

MOST = 10  # ratio of the passes of two datasets above which the report contains a warning
_NAMED = 5  # maximum number of datasets that the warning names


@dataclass(frozen=True)
class PartReport:
    """One dataset of a mixture.

    Attributes:
        frames: Number of frames that can be sampled.
        hours: Duration of these frames, in hours.
        share: Fraction of the samples of an epoch that come from this dataset.
        passes: Mean number of times that an epoch samples each frame.
    """

    uri: str
    episodes: int
    frames: int
    fps: float
    hours: float
    share: float
    passes: float


@dataclass(frozen=True)
class MixtureReport:
    """The datasets of a mixture.

    Attributes:
        kind: Rule that determines the shares: "union", "repeats", "weights" or "temperature".
        epoch_samples: Number of samples per epoch.
        differences: {key: {dataset: feature as text}} of the keys in which datasets differ. None if a dataset lacks the key.
        conflicts: Keys of `differences` whose features cannot be combined.
        sizes: Keys of `differences` that are cameras with frames of several sizes.
        warning: Warning about datasets whose frames an epoch repeats more than 10 times as often as those of another dataset.
            Empty if the ratio is at most 10 for all of them.
    """

    kind: str
    epoch_samples: int
    datasets: dict[str, PartReport]
    differences: dict[str, dict[str, str | None]]
    conflicts: tuple[str, ...]
    sizes: tuple[str, ...]
    warning: str


def describe_mixture(datasets: Mapping[str, Dataset], keys: Mapping[str, Mapping[str, str]], **shares: Any) -> MixtureReport:
    """Describe the mixture of some datasets, even if their features cannot be combined.

    Args:
        datasets: Datasets by name.
        keys: See `Mixture`.
        shares: Arguments of `Mixture` that determine the shares.

    Returns:
        The share of each dataset, and the differences between their features.

    Raises:
        ValueError: If an argument is invalid.
    """
    check_names("keys", keys, datasets, every=False)
    have = {
        name: {key: dataset.features[own] for key, own in own_keys(name, dataset, keys.get(name, {})).items()}
        for name, dataset in datasets.items()
    }
    # `Mixture` refuses features that cannot be combined, so the shares are computed without any optional feature.
    bare = {name: dataset.without([key for key in dataset.features if key not in NEEDED]) for name, dataset in datasets.items()}
    shared = Mixture(bare, **shares).shares
    parts = {
        name: PartReport(
            uri=dataset.uri,
            episodes=dataset.num_episodes,
            frames=dataset.num_frames,
            fps=dataset.fps,
            hours=dataset.num_frames / dataset.fps / 3600,
            share=float(share),
            passes=float(passes),
        )
        for (name, dataset), share, passes in zip(datasets.items(), shared.targets, shared.passes, strict=True)
    }
    all_keys = common(list(have.values()))
    sizes = [
        key
        for key, feature in all_keys.features.items()
        if feature.is_camera and len({features[key].frame_size for features in have.values() if key in features}) > 1
    ]
    differing = dict.fromkeys([*all_keys.conflicts, *all_keys.differences, *sizes])
    return MixtureReport(
        kind=shared.kind,
        epoch_samples=shared.epoch_samples,
        datasets=parts,
        differences={
            key: {name: described(features[key]) if key in features else None for name, features in have.items()}
            for key in differing
        },
        conflicts=tuple(all_keys.conflicts),
        sizes=tuple(sizes),
        warning=repeated_often({name: part.passes for name, part in parts.items()}),
    )


def repeated_often(passes: Mapping[str, float]) -> str:
    """Return a warning about datasets that an epoch repeats much more often than others, or an empty string.

    Args:
        passes: {name of a dataset: mean number of times that an epoch samples each frame}.
    """
    least = min(passes, key=lambda name: passes[name])
    times = {name: count / passes[least] for name, count in passes.items()}
    often = sorted((name for name in passes if times[name] > MOST), key=lambda name: -times[name])
    if not often:
        return ""
    names = ", ".join(f"{name} {times[name]:.0f} times" for name in often[:_NAMED])
    names += f", and {len(often) - _NAMED} others," if len(often) > _NAMED else ""
    return (
        f"An epoch shows each frame of {names} as often as those of {least}. Weights are shares of samples, whatever the sizes "
        "of the datasets. Weights nearer to the ratio of the frames, a smaller temperature, or repeats show small datasets "
        "less often."
    )
