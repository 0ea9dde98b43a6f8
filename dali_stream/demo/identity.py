"""Identity of a frame: a bar code in the frame with its episode, frame index and camera, and a checksum.

It lets a test distinguish a frame from its neighbours, which shapes and timestamps do not. The code is a strip of black and
white cells along the lower edge. Its position and size are fractions of the frame's, so it remains readable after resizing to
any size of at least `MIN_SIZE`, even if the aspect ratio changes. It is not readable after a crop or a flip.

    row 0   | episode, 16 bits              | frame, first 8 bits       |
    row 1   | frame, 4 | camera, 4 | CRC-16 of the 32 bits before it    |
"""

from __future__ import annotations

import binascii

import numpy as np

ROWS, COLUMNS = 2, 24
STRIP = 1 / 15  # fraction of the frame's height, such as 16 of 240 rows
MIN_SIZE = (120, 128)  # (height, width); a cell then has about 4×5 pixels, and smaller ones have not been tested
MAX_EPISODE, MAX_FRAME, MAX_CAMERA = 2**16 - 1, 2**12 - 1, 2**4 - 1
_BLACK, _WHITE = 16, 235


def stamp(image: np.ndarray, episode: int, frame: int, camera: int) -> None:
    """Draw an identity into a frame, in place. It overwrites the lowest fifteenth of the frame.

    Args:
        image: Frame of at least `MIN_SIZE`, uint8, shape (H, W, 3).
        episode: Number of the episode, 0 to 65535.
        frame: Frame index within the episode, 0 to 4095.
        camera: Number of the camera, 0 to 15.

    Raises:
        ValueError: If the frame is too small or has another shape or dtype, or if a number is out of range.
    """
    _check_images(image[None] if image.ndim == 3 else image)
    cells = encode_cells(episode, frame, camera).reshape(ROWS, COLUMNS)
    height, width = image.shape[:2]
    top = (1 - STRIP) * height
    row_edges = np.rint(top + np.arange(ROWS + 1) / ROWS * (height - top)).astype(int)
    column_edges = np.rint(np.arange(COLUMNS + 1) / COLUMNS * width).astype(int)
    strip = np.repeat(np.repeat(cells, np.diff(row_edges), axis=0), np.diff(column_edges), axis=1)
    image[row_edges[0] :] = np.where(strip, _WHITE, _BLACK).astype(np.uint8)[..., None]


def read_identities(batch: np.ndarray) -> np.ndarray:
    """Read the identities of frames.

    Args:
        batch: Frames, uint8, shape (N, H, W, 3).

    Returns:
        Episode, frame index and camera of each frame, int64, shape (N, 3).

    Raises:
        ValueError: If a checksum is wrong, or if the frames are too small or have another shape or dtype. The message contains
            the position of the first frame with a wrong checksum.
    """
    batch = np.asarray(batch)
    _check_images(batch)
    cells = np.packbits(_sample_cells(batch) > (_BLACK + _WHITE) / 2, axis=1)
    payload, checksum = cells[:, :4].view(">u4")[:, 0].astype(np.int64), cells[:, 4:].view(">u2")[:, 0]
    expected = np.array([_checksum(row.tobytes()) for row in cells[:, :4]], np.uint16)
    wrong = np.flatnonzero(checksum != expected)
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"No readable identity in {wrong.size} of {len(batch)} frames, the first at position {first}: checksum "
            f"{int(checksum[first]):#06x}, expected {int(expected[first]):#06x}. The frame must be a whole frame of a "
            "demo dataset (channels last, and not cropped, flipped or normalised)."
        )
    return np.stack([payload >> 16, payload >> 4 & MAX_FRAME, payload & MAX_CAMERA], axis=1)


def encode_cells(episode: int, frame: int, camera: int) -> np.ndarray:
    """Return the 48 cells of an identity, row by row. White cells are True.

    Raises:
        ValueError: If a number is out of range.
    """
    limits = {"episode": (episode, MAX_EPISODE), "frame": (frame, MAX_FRAME), "camera": (camera, MAX_CAMERA)}
    for name, (value, most) in limits.items():
        if not 0 <= value <= most:
            raise ValueError(f"{name} must be from 0 to {most}, which {most.bit_length()} bits hold, got {value}.")
    payload = (episode << 16 | frame << 4 | camera).to_bytes(4, "big")
    return np.unpackbits(np.frombuffer(payload + _checksum(payload).to_bytes(2, "big"), np.uint8)).astype(bool)


def _sample_cells(batch: np.ndarray) -> np.ndarray:
    """Return the mean brightness of each cell, shape (N, 48).

    It is the mean of 3×3 points near the centre of the cell, because encoding blurs the edges of the cell.
    """
    height, width = batch.shape[1:3]
    inside = np.array([0.3, 0.5, 0.7])
    rows = (1 - STRIP + (np.arange(ROWS)[:, None] + inside) / ROWS * STRIP) * height
    columns = (np.arange(COLUMNS)[:, None] + inside) / COLUMNS * width
    points = batch[:, rows.astype(int).ravel()][:, :, columns.astype(int).ravel()]
    return points.reshape(len(batch), ROWS, 3, COLUMNS, 3, 3).mean(axis=(2, 4, 5)).reshape(len(batch), -1)


def _checksum(payload: bytes) -> int:
    """Return the CRC-16/CCITT-FALSE, which detects all errors of up to three bits at this length.

    Its start value makes completely black and completely white strips invalid.
    """
    return binascii.crc_hqx(payload, 0xFFFF)


def _check_images(batch: np.ndarray) -> None:
    if batch.ndim != 4 or batch.shape[-1] != 3 or batch.dtype != np.uint8:
        raise ValueError(
            f"Frames must be uint8 of shape (H, W, 3) or (N, H, W, 3), got dtype {batch.dtype} and shape {batch.shape}."
        )
    if batch.shape[1] < MIN_SIZE[0] or batch.shape[2] < MIN_SIZE[1]:
        raise ValueError(
            f"Frames must have at least {MIN_SIZE[0]}x{MIN_SIZE[1]} pixels (height x width) for the identity strip, got "
            f"{batch.shape[1]}x{batch.shape[2]}."
        )
