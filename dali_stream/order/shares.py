"""Which dataset of a mixture gives how many samples."""

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

from dali_stream.arguments import positive

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
_TOTAL = 1 << 31  # the largest sum of `weights` of a mixture without an end of its own
_SMALLEST = Fraction(1, 10**6)  # of the largest weight: what rounding to that sum keeps within 0.1 %
_POSITIONS = 1 << 31  # of an epoch: keeps the order's products within int64


@dataclass(frozen=True, eq=False)
class Shares:
    """Number of samples of each of M datasets in an epoch of their mixture.

    Attributes:
        frames: Number of sampled frames of each dataset, shape (M,).
        kind: "union", "repeats", "weights" or "temperature".
        weights: Integers of at least 1, shape (M,). The share of dataset i is weights[i] / weights.sum(). For "union" and
            "repeats", these are the samples of an epoch. For the others, the samples of an epoch are rounded up or down.
        epoch_samples: Number of samples in an epoch.
    """

    frames: npt.NDArray[np.int64]
    kind: str
    weights: npt.NDArray[np.int64]
    epoch_samples: int

    @property
    def targets(self) -> npt.NDArray[np.float64]:
        """Return the share of the samples of each dataset, shape (M,). The sum is 1."""
        return self.weights / self.weights.sum()

    @property
    def passes(self) -> npt.NDArray[np.float64]:
        """(M,) how often an epoch shows each frame of a dataset, on average."""
        return self.targets * self.epoch_samples / self.frames

    def pools(self, episode_pool_size: int) -> list[int]:
        """Segments of each dataset in the pool of a consumer: in the ratio of the shares, each one or more."""
        total = int(self.weights.sum())
        return [max(1, (2 * int(episode_pool_size) * weight + total) // (2 * total)) for weight in self.weights.tolist()]

    def state(self) -> dict[str, Any]:
        """What the state of a run notes of them."""
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
    """The shares of M datasets. Without `weights`, `repeats` and `temperature`, an epoch shows every frame once.

    Args:
        frames: sampled frames of each dataset.
        weights: samples of each dataset, relative to each other.
        repeats: passes of each dataset per epoch. An epoch has ceil(repeats * frames) of its samples, exact in decimal.
        temperature: T, for shares proportional to frames ** (1 / T).
        epoch_samples: positions of an epoch, with `weights` or `temperature`. None, as many as all datasets have frames.
        names: of the datasets, for errors.

    Raises:
        ValueError: more than one of the three, a value out of range, or a dataset without frames.
    """
    counts = [int(count) for count in frames]
    if not counts:
        raise ValueError("A mixture has no datasets; give one or more")
    who = [repr(name) for name in names] if names is not None else [f"number {i}" for i in range(len(counts))]
    given = {"weights": weights, "repeats": repeats, "temperature": temperature}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are given; give one of weights, repeats and temperature, or none")
    for dataset, count in zip(who, counts, strict=True):
        if count < 1:
            raise ValueError(f"Dataset {dataset} has no frames to sample; leave it out of the mixture")
    kind = chosen[0] if chosen else "union"
    if kind in ("union", "repeats") and epoch_samples is not None:
        raise ValueError(
            f"epoch_samples is {epoch_samples}, and an epoch {'of repeats' if repeats is not None else 'without weights'} has "
            "an end of its own; leave epoch_samples out, or give weights or temperature"
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
        raise ValueError(f"An epoch of the mixture has {epoch_samples} samples; at most {_POSITIONS} are possible")
    return Shares(np.array(counts, np.int64), kind, np.array(samples, np.int64), epoch_samples)


def _number(value: float) -> Fraction | None:
    """A finite number above 0, exact in decimal: 0.1 is 1/10. None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)) or not math.isfinite(value) or value <= 0:
        return None
    return Fraction(value) if isinstance(value, (Rational, Decimal)) else Fraction(str(value))


def _numbers(argument: str, values: Sequence[float], who: Sequence[str]) -> list[Fraction]:
    """One number above 0 for each dataset."""
    if len(values) != len(who):
        raise ValueError(f"{argument} has {len(values)} numbers for {len(who)} datasets; give one for each")
    found = []
    for dataset, value in zip(who, values, strict=True):
        number = _number(value)
        if number is None:
            raise ValueError(
                f"{argument} of dataset {dataset} is {value!r}; it is a finite number above 0. To show nothing of a dataset, "
                "leave the dataset out instead"
            )
        found.append(number)
    return found


def _tempered(counts: Sequence[int], temperature: float) -> list[Fraction]:
    """frames ** (1 / temperature). In decimal, whose powers are the same on every machine."""
    number = _number(temperature)
    if number is None:
        raise ValueError(f"temperature is {temperature!r}; it is a finite number above 0")
    if number == 1:
        return [Fraction(count) for count in counts]
    context, most = Context(prec=30, Emin=-60), max(counts)
    exponent = context.divide(Decimal(number.denominator), Decimal(number.numerator))
    ratios = (context.divide(Decimal(count), Decimal(most)) for count in counts)
    return [Fraction(context.power(ratio, exponent)) for ratio in ratios]


def _integers(numbers: Sequence[Fraction], who: Sequence[str], what: str) -> list[int]:
    """Integers in the ratio of these numbers: exactly where their sum stays small, and rounded otherwise."""
    common = math.lcm(*(number.denominator for number in numbers))
    whole = [int(number * common) for number in numbers]
    divisor = math.gcd(*whole)
    if sum(whole) <= _TOTAL * divisor:
        return [number // divisor for number in whole]
    least = min(range(len(numbers)), key=numbers.__getitem__)
    most = max(range(len(numbers)), key=numbers.__getitem__)
    if numbers[least] < _SMALLEST * numbers[most]:
        raise ValueError(
            f"The {what} of dataset {who[least]} is {float(numbers[least] / numbers[most]):.3g} times that of dataset "
            f"{who[most]}; it is at least 1e-06 times the largest. Leave the dataset out, or choose weights closer together"
        )
    scale = Fraction(_TOTAL - len(numbers), sum(whole))
    return [round(number * scale) for number in whole]
