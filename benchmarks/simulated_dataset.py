"""A dataset of any size that is nowhere: its metadata is made up, its files have indices and sizes, and no contents.

It is laid out as LeRobot writes: many episodes in a video file of up to 200 MB for each camera and in a data file of up to
100 MB, one row group an episode. All episodes are of one length, and all encoded pictures of a camera of one size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_stream import Dataset, Order
from dali_stream.metadata import Episodes, Files
from dali_stream.once import Once
from dali_stream.storage.store import Store
from dali_stream.video.table import SampleTable

VIDEO_FILE, DATA_FILE = 200 << 20, 100 << 20  # bytes
HEAD = 4096  # bytes of a video file that are read to find its index
FOOTER = 140  # bytes of a Parquet footer for a column of a row group; 146 on demo data, with the schema
MOST_EPISODES = 4_000_000
NUMBERS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True)
class Recording:
    """What was recorded: `bitrate` in bits per second and camera, `gop` the distance of key frames."""

    bytes_in_all: float
    episode_s: float
    fps: float
    cameras: int
    bitrate: float
    gop: int = 2

    @property
    def picture(self) -> int:
        """Bytes of one encoded picture."""
        return max(round(self.bitrate / 8 / self.fps), 16)

    @property
    def frames(self) -> int:
        """Frames of an episode."""
        return max(round(self.episode_s * self.fps), 1)

    @property
    def episode_bytes(self) -> int:
        """Bytes of an episode's encoded video, all cameras."""
        return self.picture * self.frames * self.cameras

    @property
    def episodes(self) -> int:
        """Episodes of the dataset."""
        return max(int(self.bytes_in_all // self.episode_bytes), 1)


class Nothing(bytes):
    """Bytes of which only the number is known."""

    length = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: Any) -> Nothing:
        return nothing(len(range(*part.indices(self.length))))


def nothing(length: int) -> Nothing:
    """So many bytes, which take no memory."""
    made = Nothing()
    made.length = length
    return made


class Nowhere(Store):
    """Files without contents; each of any size."""

    remote = True
    address = "nowhere"

    def size(self, path: str) -> int:
        return 1 << 40

    def read(self, path: str, start: int, stop: int) -> bytes:
        return nothing(stop - start)

    def exists(self, path: str) -> bool:
        return True

    def files(self, folder: str) -> list[str]:
        return []

    def close(self) -> None:
        pass


class MadeUp(Dataset):
    """A dataset whose metadata is made up. More than `MOST_EPISODES` are left out, since no simulated run gets to them.

    Attributes:
        orders: that runs have made of it.
    """

    def __init__(self, recording: Recording) -> None:
        self.uri, self.recording, self.fps = "made up", recording, recording.fps
        self.store = self.data_store = Nowhere()
        self.revision, self.skips_images = None, False
        self.cameras = self.videos = tuple(f"observation.images.{i}" for i in range(recording.cameras))
        # Pictures are not decoded, so they may be small.
        self.features: dict[str, dict[str, Any]] = {key: {"dtype": "video", "shape": (2, 2, 3)} for key in self.cameras}
        self.features |= {key: {"dtype": "float32", "shape": (14,)} for key in ("observation.state", "action")}
        self.features |= {key: {"dtype": "int64", "shape": (1,)} for key in NUMBERS}
        self.features["timestamp"]["dtype"] = "float32"
        self.tasks, self.subtasks = {0: "task"}, {}  # type: ignore[misc]  # computed for real ones
        self.num_episodes = min(recording.episodes, MOST_EPISODES)
        self.num_frames = self.num_episodes * recording.frames
        self.rows = self.episodes = np.arange(self.num_episodes)
        self.lengths = np.full(self.num_episodes, recording.frames)
        self.table = self._table()
        self.orders: dict[Any, Order] = {}

    def _table(self) -> Episodes:
        episode, each = self.episodes, self.episodes_in_video
        video = {camera: _files(camera, episode // each) for camera in self.cameras}
        seconds = self.recording.frames / self.fps
        start = dict.fromkeys(self.cameras, (episode % each) * seconds)
        stop = dict.fromkeys(self.cameras, (episode % each + 1) * seconds)
        data = _files("data", episode // self.episodes_in_data)
        return Episodes(episode, self.lengths, episode * self.recording.frames, data, video, start, stop)

    @functools.cached_property
    def episodes_in_video(self) -> int:
        """Episodes of a video file."""
        return max(min(VIDEO_FILE // (self.recording.picture * self.recording.frames), self.num_episodes), 1)

    @functools.cached_property
    def episodes_in_data(self) -> int:
        """Episodes of a data file."""
        return max(min(DATA_FILE // self.group_bytes, self.num_episodes), 1)

    @functools.cached_property
    def group_bytes(self) -> int:
        """Bytes of an episode's rows in their file."""
        return self.recording.frames * (self.row_bytes - 4 * len(self.videos))

    @functools.cached_property
    def footer_bytes(self) -> int:
        """Bytes of a data file's footer."""
        return FOOTER * self.episodes_in_data * (len(self.features) - len(self.videos))

    @functools.cached_property
    def index(self) -> SampleTable:
        """The index of a video file, but for its path: an episode begins with a key frame."""
        one = np.arange(self.recording.frames)
        n = len(one) * self.episodes_in_video
        frame, every = np.tile(one, self.episodes_in_video), np.arange(n)
        begin = frame % self.recording.gop == 0
        # What FFmpeg writes: 4 bytes a picture and a key frame, 16 a chunk of a second.
        moov = 1024 + 4 * n + 4 * int(begin.sum()) + 16 * int(n / self.fps)
        return SampleTable(
            path="",
            configs=(b"",),
            track_header=b"",
            timescale=round(self.fps * 1000),
            offset=HEAD + every * self.recording.picture,
            size=np.full(n, self.recording.picture),
            pts=every * 1000,
            sync=np.flatnonzero(begin),
            head=(every - frame % self.recording.gop).astype(np.int32),
            config=np.zeros(n, np.int8),
            shown=every.astype(np.int32),
            stretch=np.zeros(n, np.int32),
            reordered=False,
            open_gops=False,
            longest_gop=self.recording.gop,
            index_bytes=moov,
        )

    def read_table(self, store: Store, path: str) -> SampleTable:
        """In place of `dali_stream.video.table.read_table`: the same requests, behind the media data."""
        store.read(path, 0, HEAD)
        store.read(path, VIDEO_FILE, VIDEO_FILE + self.index.index_bytes)
        return dataclasses.replace(self.index, path=path)


class Rows:
    """In place of `RowReader`: the same requests, for the footer of a data file and for a row group."""

    FOOTERS = 256

    def __init__(
        self, dataset: MadeUp, store: Store, count: Callable[[object, int], None] | None, at_once: int = 1 << 62
    ) -> None:
        self._dataset, self._store, self._count = dataset, store, count
        self._footers: OrderedDict[str, None] = OrderedDict()
        self._once = Once()

    def read(self, episode: int) -> dict[int, dict[str, npt.NDArray[Any]]]:
        """{episode: {key: (L, ...) array}}."""
        dataset = self._dataset
        path = dataset.table.data.paths[dataset.table.data.index[episode]]
        if path not in self._footers:
            self._once(path, lambda: self._read_footer(path))
        self._footers.move_to_end(path)
        self._once((path, episode), lambda: self._store.read(path, 0, dataset.group_bytes))
        if self._count:
            self._count((path, episode), dataset.group_bytes)
        return {episode: self._columns()}

    def _read_footer(self, path: str) -> None:
        self._store.size(path)
        self._store.read(path, 0, self._dataset.footer_bytes)
        self._footers[path] = None
        while len(self._footers) > self.FOOTERS:
            self._footers.popitem(last=False)

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        frames, features = self._dataset.recording.frames, self._dataset.features
        columns = {
            key: np.zeros((frames, *(shape if (shape := feature["shape"]) != (1,) else ())), feature["dtype"])
            for key, feature in features.items()
            if feature["dtype"] != "video"
        }
        return columns | {"timestamp": (np.arange(frames) / self._dataset.fps).astype(np.float32)}


def _files(name: str, number: npt.NDArray[np.int64]) -> Files:
    return Files([f"{name}/{i}" for i in range(int(number[-1]) + 1)], number)
