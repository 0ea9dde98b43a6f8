"""Cache of the indices of video files. It outlives a `BatchStream`, so that the next one finds the indices in memory."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np

from dali_stream.checks.arrays import NONE
from dali_stream.errors import DatasetError, DecodeError, counted
from dali_stream.lerobot.source import Source
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import Store

_LOOK_FOR = 8  # maximum number of files of a camera to look for, if one is missing


class IndexCache:
    """Cache of the indices of video files. Only one thread at a time may use it, except for `load`.

    Args:
        source: Source whose video files are indexed.

    Attributes:
        cached: {(camera, file): index, or the error if the file has no valid index}.
        bytes_read: Number of bytes of the `moov` boxes that were read so far. Each file is counted once.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files = {camera: videos.file for camera, videos in source.videos.items()}
        self.cached: dict[tuple[str, int], VideoIndex | DecodeError] = {}
        self.bytes_read = 0
        # Files counted in `bytes_read`, with their numbers of bytes, for another process. None if no process takes them.
        self.new: list[tuple[str, int, int]] | None = None
        # {camera: whether each file is counted in `bytes_read`}, which takes one byte per file, however often files are read
        self._counted = {camera: np.zeros(max(int(files.max()), 0) + 1, np.bool_) for camera, files in self._files.items()}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_lock"} | {"cached": dict(self.cached)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def file(self, camera: str, episode: int) -> int:
        """Return the number of the file that contains an episode. `NONE` if its frames are not in a video file."""
        return int(self._files[camera][episode]) if camera in self._files else NONE

    def of(self, camera: str, episode: int, store: Store) -> VideoIndex:
        """Return the index of the file that contains an episode. Read it from `store` if it is not cached.

        Raises:
            DecodeError: If the file is missing or has no valid index.
        """
        key = camera, self.file(camera, episode)
        if key not in self.cached:
            self.cached[key] = self.load(*key, store)
        if isinstance(index := self.cached[key], DecodeError):
            raise DecodeError(str(index))  # a new one, since raising adds a traceback to the error, which refers to the caller
        return index

    def load(self, camera: str, file: int, store: Store) -> VideoIndex | DecodeError:
        """Read the index of a file, without caching it. Return the error if the file is missing or has no valid index."""
        try:
            index = read_index(store, self._source.path(camera, file))
        except DatasetError as error:  # the file does not exist
            return DecodeError(self._no_file(camera, file, store) or str(error))
        except DecodeError as error:  # the file is broken
            return DecodeError(str(error))
        self.count(camera, file, index.index_bytes)
        return index

    def count(self, camera: str, file: int, index_bytes: int) -> None:
        """Count the bytes of the index of a file, if this is the first time."""
        with self._lock:
            if not self._counted[camera][file]:
                self._counted[camera][file] = True
                self.bytes_read += index_bytes
                if self.new is not None:
                    self.new.append((camera, file, index_bytes))

    def _no_file(self, camera: str, file: int, store: Store) -> str:
        """Return the message for a camera of a dataset without any file, or "" if one of up to `_LOOK_FOR` files exists."""
        source, files = self._source, self._files[camera]
        own = np.unique(files[source.dataset_of == source.dataset_of[np.argmax(files == file)]])
        tried = [source.path(camera, number) for number in own[:: -(-len(own) // _LOOK_FOR)].tolist()]
        with suppress(DatasetError):  # a path out of the dataset
            if not any(map(store.exists, tried)):
                where = store.where(source.path(camera, file))
                checked = f"none of {counted(len(tried), 'checked file')} of camera {camera!r} exists"
                missing = "no such file, but the dataset's metadata refers to it"
                return f"{where}: {missing}, and {checked}. Copy or fetch its files, or leave the camera out with cameras="
        return ""


def size_of(index: VideoIndex | DecodeError) -> int:
    """Return the memory of an index in bytes, or 0 for a broken one."""
    return index.nbytes if isinstance(index, VideoIndex) else 0
