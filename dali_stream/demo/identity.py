"""A bar code in each frame that says which frame it is: episode, frame and camera, with a checksum.

Shapes and timestamps cannot tell a frame from its neighbour; this can. The code is a strip of black and white cells
along the lower edge, placed in fractions of the frame's size, so that a resize to any size of at least `MIN_SIZE`
(also with another aspect ratio) keeps it readable. A crop or a flip does not.

    row 0   | episode, 16 bits              | frame, first 8 bits       |
    row 1   | frame, 4 | camera, 4 | CRC-16 of the 32 bits before it    |
"""

from __future__ import annotations

import binascii

import numpy as np

ROWS, COLUMNS = 2, 24
STRIP = 1 / 15  # the strip's share of the frame's height: 16 of 240 rows
MIN_SIZE = (120, 128)  # (height, width): a cell is then 4 rows by 5 columns; smaller ones were not tried
MAX_EPISODE, MAX_FRAME, MAX_CAMERA = 2**16 - 1, 2**12 - 1, 2**4 - 1
_BLACK, _WHITE = 16, 235


def stamp(image: np.ndarray, episode: int, frame: int, camera: int) -> None:
    """Draw the identity into `image` (H, W, 3) uint8, in place.

    Args:
        image: the frame; at least `MIN_SIZE`; its lowest fifteenth is overwritten.
        episode: 0 to 65535.
        frame: 0 to 4095, counted within the episode.
        camera: 0 to 15.

    Raises:
        ValueError: a frame that is too small or of another kind, or a number out of range.
    """
    _check_images(image[None] if image.ndim == 3 else image)
    cells = encode_cells(episode, frame, camera).reshape(ROWS, COLUMNS)
    height, width = image.shape[:2]
    top = (1 - STRIP) * height
    row_edges = np.rint(top + np.arange(ROWS + 1) / ROWS * (height - top)).astype(int)
    column_edges = np.rint(np.arange(COLUMNS + 1) / COLUMNS * width).astype(int)
    strip = np.repeat(np.repeat(cells, np.diff(row_edges), axis=0), np.diff(column_edges), axis=1)
    image[row_edges[0] :] = np.where(strip, _WHITE, _BLACK).astype(np.uint8)[..., None]


def read_identity(image: np.ndarray) -> tuple[int, int, int]:
    """Read (episode, frame, camera) from one frame (H, W, 3) uint8.

    Raises:
        ValueError: the checksum does not fit, or the frame is too small or of another kind.
    """
    image = np.asarray(image)
    if image.ndim != 3:
        raise ValueError(f"Invalid frame of shape {image.shape}. Give one frame (H, W, 3), or use read_identities.")
    episode, frame, camera = read_identities(image[None])[0].tolist()
    return episode, frame, camera


def read_identities(batch: np.ndarray) -> np.ndarray:
    """Read the identities of frames (N, H, W, 3) uint8, as int64 (N, 3): episode, frame, camera.

    Raises:
        ValueError: a checksum does not fit (the message names the frames), or the frames are too small or of
            another kind.
    """
    batch = np.asarray(batch)
    _check_images(batch)
    cells = np.packbits(_sample_cells(batch) > (_BLACK + _WHITE) / 2, axis=1)
    payload, found = cells[:, :4].view(">u4")[:, 0].astype(np.int64), cells[:, 4:].view(">u2")[:, 0]
    expected = np.array([_checksum(row.tobytes()) for row in cells[:, :4]], np.uint16)
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"No readable identity in {wrong.size} of {len(batch)} frames, the first at position {first}: checksum "
            f"{int(found[first]):#06x}, expected {int(expected[first]):#06x}. The frame must be a whole frame of a "
            "demo dataset (channels last; not cropped, flipped or normalised)."
        )
    return np.stack([payload >> 16, payload >> 4 & MAX_FRAME, payload & MAX_CAMERA], axis=1)


def encode_cells(episode: int, frame: int, camera: int) -> np.ndarray:
    """The 48 cells of an identity as bool (48,), row by row, True for white; ValueError where a number is too large."""
    limits = {"episode": (episode, MAX_EPISODE), "frame": (frame, MAX_FRAME), "camera": (camera, MAX_CAMERA)}
    for name, (value, most) in limits.items():
        if not 0 <= value <= most:
            raise ValueError(f"Invalid {name} ({value}). The stamp holds 0 to {most} in {most.bit_length()} bits.")
    payload = (episode << 16 | frame << 4 | camera).to_bytes(4, "big")
    return np.unpackbits(np.frombuffer(payload + _checksum(payload).to_bytes(2, "big"), np.uint8)).astype(bool)


def _sample_cells(batch: np.ndarray) -> np.ndarray:
    """Mean brightness (N, 48) of the middle of each cell: 3 by 3 points, away from edges that coding smears."""
    height, width = batch.shape[1:3]
    inside = np.array([0.3, 0.5, 0.7])
    rows = (1 - STRIP + (np.arange(ROWS)[:, None] + inside) / ROWS * STRIP) * height
    columns = (np.arange(COLUMNS)[:, None] + inside) / COLUMNS * width
    points = batch[:, rows.astype(int).ravel()][:, :, columns.astype(int).ravel()]
    return points.reshape(len(batch), ROWS, 3, COLUMNS, 3, 3).mean(axis=(2, 4, 5)).reshape(len(batch), -1)


def _checksum(payload: bytes) -> int:
    """CRC-16/CCITT-FALSE, which finds every error of up to three bits at this length.

    Its start value makes plain black and plain white strips invalid.
    """
    return binascii.crc_hqx(payload, 0xFFFF)


def _check_images(batch: np.ndarray) -> None:
    if batch.ndim != 4 or batch.shape[-1] != 3 or batch.dtype != np.uint8:
        raise ValueError(
            f"Invalid frames: shape {batch.shape}, dtype {batch.dtype}. Give uint8 with channels last, (H, W, 3) for "
            "one frame and (N, H, W, 3) for several."
        )
    if batch.shape[1] < MIN_SIZE[0] or batch.shape[2] < MIN_SIZE[1]:
        raise ValueError(
            f"Invalid frame size {batch.shape[1]}x{batch.shape[2]} (height x width). The identity strip needs at "
            f"least {MIN_SIZE[0]}x{MIN_SIZE[1]}."
        )
