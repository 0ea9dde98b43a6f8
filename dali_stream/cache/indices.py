"""Cache of the indices of video files. It outlives a `BatchStream`, so that the next one finds the indices in memory."""

from __future__ import annotations

import threading

from dali_stream.errors import DatasetError, DecodeError
from dali_stream.lerobot.source import ABSENT, Source
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.storage import Store
from dali_stream.workers import Once


class IndexCache:
    """Cache of the indices of video files. Safe to use from several threads.

    Args:
        source: Episodes whose files are indexed.

    Attributes:
        read_bytes: Bytes of the `moov` boxes that have been read. Each file is counted once.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files = {camera: source.files(camera) for camera in source.videos}
        self._indices: dict[tuple[str, int], VideoIndex | DecodeError] = {}
        self._seen: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._once = Once()
        self.read_bytes = 0

    def file(self, camera: str, episode: int) -> int:
        """Return the number of the file that contains an episode."""
        return int(self._files[camera][episode])

    def has_file(self, camera: str, episode: int) -> bool:
        """Return whether the frames of an episode are in a video file."""
        return camera in self._files and self._files[camera][episode] != ABSENT

    def of(self, camera: str, episode: int, store: Store) -> VideoIndex:
        """Return the index of the file that contains an episode. It is read from `store` if it is not cached.

        Raises:
            DecodeError: If the file is missing or has no valid index.
        """
        return self.read(camera, self.file(camera, episode), store)

    def read(self, camera: str, file: int, store: Store) -> VideoIndex:
        """Return the index of a file, by its number among the files of the camera.

        Raises:
            DecodeError: If the file is missing or has no valid index.
        """
        found = self._indices.get((camera, file))
        if found is None:
            found = self._once((camera, file), lambda: self._read(camera, file, store))
        if isinstance(found, DecodeError):
            raise found
        return found

    def held(self) -> dict[tuple[str, int], int]:
        """Return {(camera, file): memory of its index in bytes}. The number is 0 for a broken index."""
        with self._lock:
            return {key: 0 if isinstance(index, DecodeError) else index.nbytes for key, index in self._indices.items()}

    def drop(self, camera: str, file: int) -> None:
        """Evict the index of a file."""
        with self._lock:
            self._indices.pop((camera, file), None)

    def _read(self, camera: str, file: int, store: Store) -> VideoIndex | DecodeError:
        key = camera, file
        try:
            index: VideoIndex | DecodeError = read_index(store, self._source.path(camera, file))
        except DatasetError as error:  # the file does not exist
            index = DecodeError(str(error))
        except DecodeError as error:
            index = error
        with self._lock:
            if isinstance(index, VideoIndex) and key not in self._seen:
                self.read_bytes += index.index_bytes
                self._seen.add(key)
            self._indices[key] = index
        return index
