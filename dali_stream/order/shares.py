"""Shares of the datasets of a mixture: the number of samples that an epoch has of each dataset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.checks.arguments import positive

_TOTAL = 1 << 31  # maximum sum of the integers in `Shares.weights` for the kinds "weights" and "temperature"
_SMALLEST = Fraction(1, 10**6)  # minimum ratio to the largest weight, so that rounded integers are at least about 2100 / M
_POSITIONS = 1 << 31  # maximum number of positions of an epoch, which keeps products in the order within int64


@dataclass(frozen=True, eq=False)
class Shares:
    """Number of samples of each of M datasets in an epoch of their mixture.

    Attributes:
        frames: Number of sampled frames of each dataset, shape (M,).
        kind: "union", "repeats", "weights" or "temperature".
        weights: Integers of at least 1, shape (M,). The share of dataset i is weights[i] / weights.sum(). For "union" and
            "repeats", these are the numbers of samples in an epoch. For the other kinds, the number of samples of a dataset
            differs between epochs, because its share of an epoch is rounded.
        epoch_samples: Number of samples in an epoch.
    """

    frames: npt.NDArray[np.int64]
    kind: str
    weights: npt.NDArray[np.int64]
    epoch_samples: int

    @property
    def targets(self) -> npt.NDArray[np.float64]:
        """Share of each dataset in the samples, shape (M,). The sum is 1."""
        return self.weights / self.weights.sum()

    @property
    def passes(self) -> npt.NDArray[np.float64]:
        """Average number of times that an epoch samples each frame of a dataset, shape (M,)."""
        return self.targets * self.epoch_samples / self.frames

    def pools(self, episode_pool_size: int) -> list[int]:
        """Return the number of segments of each dataset in the pools of a consumer.

        Args:
            episode_pool_size: Number of segments that is divided in the ratio of the shares. Each part is rounded, and at
                least 1.
        """
        total = int(self.weights.sum())
        return [max(1, (2 * int(episode_pool_size) * weight + total) // (2 * total)) for weight in self.weights.tolist()]

    def state(self) -> dict[str, Any]:
        """Return the entries of the shares in the state of a run."""
        return {"kind": self.kind, "weights": self.weights.tolist(), "epoch_samples": self.epoch_samples}


def shares(
    frames: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    weights: Sequence[float] | None = None,
    repeats: Sequence[float] | None = None,
    temperature: float | None = None,
    epoch_samples: int | None = None,
    names: Sequence[str] | None = None,
) -> Shares:
    """Return the shares of M datasets. Without `weights`, `repeats` and `temperature`, an epoch samples every frame once.

    Args:
        frames: Number of sampled frames of each dataset, shape (M,).
        weights: Relative number of samples of each dataset, shape (M,).
        repeats: Number of passes of each dataset per epoch, shape (M,). An epoch has ceil(repeats * frames) samples of a
            dataset, computed exactly from the decimal form of the number.
        temperature: Temperature T, for shares proportional to frames ** (1 / T).
        epoch_samples: Number of samples in an epoch, with `weights` or `temperature` only. Default: the number of frames of all
            datasets together.
        names: Names of the datasets, for error messages. Default: their numbers.

    Raises:
        ValueError: If more than one of `weights`, `repeats` and `temperature` is passed, if a value is out of range, or if a
            dataset has no frames.
    """
    counts = [int(count) for count in frames]
    if not counts:
        raise ValueError("A mixture must have one or more datasets, got none")
    who = [repr(name) for name in names] if names is not None else [f"number {i}" for i in range(len(counts))]
    arguments = {"weights": weights, "repeats": repeats, "temperature": temperature}
    chosen = [name for name, value in arguments.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"At most one of weights, repeats and temperature must be passed, got {' and '.join(chosen)}")
    for dataset, count in zip(who, counts, strict=True):
        if count < 1:
            raise ValueError(f"Dataset {dataset} has no frames to sample. Leave it out of the mixture")
    kind = chosen[0] if chosen else "union"
    if kind in ("union", "repeats") and epoch_samples is not None:
        raise ValueError(
            f"epoch_samples must be None {'with repeats' if repeats is not None else 'without weights'}, which determine the "
            f"length of an epoch, got {epoch_samples}. Leave it out, or pass weights or temperature"
        )
    if repeats is not None:
        passes = _numbers("repeats", repeats, who)
        samples = [math.ceil(each * count) for each, count in zip(passes, counts, strict=True)]
    elif weights is not None:
        samples = _integers(_numbers("weights", weights, who), who, "weight")
    elif temperature is not None:
        samples = _integers(_tempered(counts, temperature), who, f"weight at temperature {temperature}")
    else:
        samples = counts
    if epoch_samples is None:
        epoch_samples = sum(samples) if kind in ("union", "repeats") else sum(counts)
    epoch_samples = positive("epoch_samples", epoch_samples)
    if epoch_samples > _POSITIONS:
        raise ValueError(f"An epoch of the mixture must have at most {_POSITIONS} samples, got {epoch_samples}")
    return Shares(np.array(counts, np.int64), kind, np.array(samples, np.int64), epoch_samples)


def _number(value: float) -> Fraction | None:
    """Return the decimal form of a finite number above 0 as a fraction: 0.1 is 1/10. None for anything else."""
    try:
        is_positive = isinstance(value, (Real, Decimal)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    except OverflowError:  # an integer beyond the largest float
        is_positive = False
    if not is_positive:
        return None
    return Fraction(value) if isinstance(value, (Rational, Decimal)) else Fraction(str(value))


def _numbers(argument: str, values: Sequence[float], who: Sequence[str]) -> list[Fraction]:
    """Check that an argument has one finite number above 0 for each dataset, and return them as fractions."""
    if len(values) != len(who):
        raise ValueError(f"{argument} must have one number for each of {len(who)} datasets, got {len(values)}")
    fractions = []
    for dataset, value in zip(who, values, strict=True):
        number = _number(value)
        if number is None:
            raise ValueError(
                f"{argument} of dataset {dataset} must be a finite number above 0, got {repr(value)[:80]}. To exclude a "
                "dataset, leave it out of the mixture"
            )
        fractions.append(number)
    return fractions


def _tempered(counts: Sequence[int], temperature: float) -> list[Fraction]:
    """Return numbers proportional to frames ** (1 / temperature).

    Decimal arithmetic gives the same powers on every machine, unlike floating point arithmetic.
    """
    number = _number(temperature)
    if number is None:
        raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}")
    if number == 1:
        return [Fraction(count) for count in counts]
    context, most = Context(prec=30, Emin=-60), max(counts)
    exponent = context.divide(Decimal(number.denominator), Decimal(number.numerator))
    ratios = (context.divide(Decimal(count), Decimal(most)) for count in counts)
    return [Fraction(context.power(ratio, exponent)) for ratio in ratios]


def _integers(numbers: Sequence[Fraction], who: Sequence[str], name: str) -> list[int]:
    """Return integers in the ratio of these numbers, rounded only if the sum of the exact integers would exceed `_TOTAL`."""
    common = math.lcm(*(number.denominator for number in numbers))
    whole = [int(number * common) for number in numbers]
    divisor = math.gcd(*whole)
    if sum(whole) <= _TOTAL * divisor and all(whole):  # a power of a small temperature may underflow to 0
        return [number // divisor for number in whole]
    least = min(range(len(numbers)), key=numbers.__getitem__)
    most = max(range(len(numbers)), key=numbers.__getitem__)
    if numbers[least] < _SMALLEST * numbers[most]:
        raise ValueError(
            f"The {name} of dataset {who[least]} must be at least 1e-06 times the largest, that of dataset {who[most]}, got "
            f"{float(numbers[least] / numbers[most]):.3g} times. Leave the dataset out, or choose weights closer together"
        )
    scale = Fraction(_TOTAL - len(numbers), sum(whole))  # the sum is at most _TOTAL even if every number is rounded up
    return [round(number * scale) for number in whole]
