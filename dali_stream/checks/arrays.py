"""Types of NumPy arrays, and the sentinel in arrays of integers."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NONE = -1  # no packet, no file, no row, no slot, no block
