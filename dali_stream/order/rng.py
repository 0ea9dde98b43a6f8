"""Random numbers by key. They are the same in every process and NumPy version, and do not depend on earlier draws."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def philox(purpose: str, *key: int) -> np.random.Philox:
    """Return an independent generator for each purpose and key. NumPy guarantees that `random_raw` does not change."""
    digest = hashlib.blake2b(repr((purpose, *map(int, key))).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014), in which each input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
