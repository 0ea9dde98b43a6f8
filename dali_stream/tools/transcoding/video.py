"""One video file: fetched if it is remote, encoded or copied, and compared with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream.errors import DaliStreamError, DecodeError
from dali_stream.mp4.format import describe
from dali_stream.mp4.index import Int64, VideoIndex, read_index
from dali_stream.mp4.timing import Interval
from dali_stream.storage import LocalStore, Store
from dali_stream.tools.output.checks import refuse_sound, shown
from dali_stream.tools.output.copy import copy
from dali_stream.tools.output.folder import Folder
from dali_stream.tools.transcoding.check import Video, check_times, compare, refusal, scan
from dali_stream.tools.transcoding.encoders import Encoder
from dali_stream.tools.transcoding.ffmpeg import Program


@dataclass(frozen=True)
class VideoFile:
    """A file to write.

    Attributes:
        path: in the source and in the new dataset.
        camera: its camera.
        episodes: per episode index, its interval in the file and the timestamps of its rows.
        depth: whether it is a depth map, which is copied.
    """

    path: str
    camera: str
    episodes: Mapping[int, tuple[Interval, npt.NDArray[np.float32]]]
    depth: bool


class Copies(LocalStore):
    """Local copies of a store's files; errors name the originals."""

    def __init__(self, folder: str, source: Store) -> None:
        super().__init__(folder)
        self._source = source

    def where(self, path: str) -> str:
        return self._source.where(path)


class Share:
    """A file's share of the progress: exactly `weight` of what `advance` counts."""

    def __init__(self, advance: Callable[[int], None], weight: int) -> None:
        self._advance, self._left = advance, float(weight)

    def __call__(self, by: float) -> None:
        by = min(by, self._left)
        before, self._left = int(self._left), self._left - by
        self._advance(before - int(self._left))

    def frames(self, count: int) -> Callable[[int], None]:
        """A callback that counts frames, `count` of which make up the rest."""
        each = self._left / count
        return lambda number: self(number * each)

    def finish(self) -> None:
        """Counts the rest."""
        self(self._left)


class Writer:
    """Writes files of `store` into a folder, with GOPs of up to `gop` frames."""

    def __init__(self, program: Program, encoder: Encoder, gop: int, fps: float, store: Store, folder: Folder) -> None:
        self._program, self._encoder, self._gop, self._fps = program, encoder, gop, fps
        self._store, self._folder = store, folder

    def write(self, file: VideoFile, share: Share) -> dict[str, Any]:
        """Writes a file, and returns its note.

        Raises:
            DecodeError: the source is broken, or cannot be encoded. The message names file and camera.
            DaliStreamError: the new file differs from its source.
        """
        with _naming(self._store.where(file.path), file.camera), self._fetched(file.path, share) as store:
            source = Video(store, read_index(store, file.path))
            episodes = self._shown(source, file)
            place = Path(store.address) / file.path
            size, codec = store.size(file.path), describe(source.table.configs[0]).codec
            note: dict[str, Any] = {"frames": len(source.table), "bytes_before": size, "codec_before": codec}
            note |= {"bytes_after": size, "codec_after": codec, "encoder": "", "psnr": {}}
            if file.depth or not self._refusal(source, place):
                copy(store, file.path, self._folder, file.path, note, share)
            else:
                refuse_sound(store, file.path)
                self._encode(file, source, episodes, note, share)
        return note

    def _refusal(self, video: Video, place: Path) -> str:
        """Why a file at `place` does not meet the request; empty if it does. Reads all of it."""
        if hidden := scan(video):
            return f"{hidden} of its encoded frames are never displayed"
        return refusal(video, self._encoder.codec, self._gop) or self._program.look(place).refusal()

    def _shown(self, video: Video, file: VideoFile) -> dict[int, Int64]:
        """Per episode, the packets of its rows."""
        where = self._store.where(file.path)
        return {
            episode: shown(f"{where}: {file.camera}, episode {episode}", video.table, *times, self._fps)
            for episode, times in file.episodes.items()
        }

    def _encode(self, file: VideoFile, source: Video, episodes: dict[int, Int64], note: dict[str, Any], share: Share) -> None:
        incoming = self._folder.incoming(file.path)
        try:
            place = Path(source.store.address) / file.path
            count = share.frames(len(source.table))
            self._program.encode(place, incoming, self._encoder, source.table.timescale, count)
            note["psnr"] = self._check(file, source, incoming, episodes)
            note |= {"bytes_after": incoming.stat().st_size, "codec_after": self._encoder.codec, "encoder": self._encoder.name}
            self._folder.adopt(file.path, note)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise

    def _check(
        self, file: VideoFile, source: Video, incoming: Path, episodes: dict[int, Int64]
    ) -> dict[str, tuple[float, float]]:
        """(min, mean) PSNR per episode index, as a string for JSON."""
        with closing(LocalStore(str(self._folder.stage / "incoming"))) as store:
            out = Video(store, read_index(store, file.path))
            if why := self._refusal(out, incoming):
                raise DecodeError(f"{self._encoder.name} did not meet the request: {why}")
            check_times(source.table, out.table, self._fps)
            found = {}
            for episode, samples in self._shown(out, file).items():
                what = f"{self._folder.root / file.path}: {file.camera}, episode {episode}"
                if (_rank(out.table)[samples] != _rank(source.table)[episodes[episode]]).any():
                    raise DaliStreamError(f"{what}: a timestamp has another frame than in the source")
                psnr = compare(source, out, episodes[episode], samples, what)
                found[str(episode)] = min(psnr), sum(psnr) / len(psnr)
        return found

    @contextmanager
    def _fetched(self, path: str, share: Share) -> Iterator[LocalStore]:
        """A local store with the file."""
        if isinstance(self._store, LocalStore):
            yield self._store
            return
        target = f"{self._folder.stage.name}/fetched/{path}"
        copy(self._store, path, self._folder, target, None, share)
        try:
            with closing(Copies(str(self._folder.stage / "fetched"), self._store)) as store:
                yield store
        finally:
            self._folder.discard(target)


def _rank(table: VideoIndex) -> Int64:
    """(n,) each packet's position in display order."""
    rank = np.empty(len(table), np.int64)
    rank[table.display_order] = np.arange(len(table))
    return rank


@contextmanager
def _naming(where: str, camera: str) -> Iterator[None]:
    """Adds the file's name to decode errors that lack it."""
    try:
        yield
    except DecodeError as error:
        raise DecodeError(str(error) if where in str(error) else f"{where}: {camera}: {error}") from error
