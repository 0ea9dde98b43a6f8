"""The order that all peers get, and the frames that each sample must contain, which are read without this package's reader."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchcodec.decoders import VideoDecoder

import dali_stream
from dali_stream.order import default_pools


class Recorded:
    """A dataset, and the first positions of its order, which all peers get.

    Args:
        dataset: Local dataset with video.
        deltas: `delta_timestamps` of all peers.
        batch_size: Number of samples per batch. An epoch ends after its last whole batch, as with the Loader.
        batches: Number of recorded batches. They may extend over several epochs.
        seed: Seed of the order.
        image_size: (height, width) of the frames. None for the recorded size.
    """

    def __init__(
        self,
        dataset: dali_stream.Dataset,
        deltas: dict[str, list[float]],
        batch_size: int,
        batches: int,
        seed: int,
        image_size: Sequence[int] | None,
    ) -> None:
        self.root, self.fps, self.cameras = Path(dataset.uri).resolve(), dataset.fps, dataset.videos
        self.epoch = dataset.num_frames // batch_size * batch_size
        self._image_size = image_size
        info = json.loads((self.root / "meta/info.json").read_text())
        table = _read(sorted((self.root / "meta/episodes").rglob("*.parquet")), self._columns())
        table = {key: values[np.argsort(table["episode_index"])] for key, values in table.items()}
        rows = _read(sorted((self.root / "data").rglob("*.parquet")), ["index", "timestamp"])
        self._times = rows["timestamp"][np.argsort(rows["index"])]
        self._first, self.lengths = table["dataset_from_index"], table["length"]
        self.steps = {camera: np.rint(np.multiply(deltas.get(camera, [0]), self.fps)).astype(int) for camera in self.cameras}
        self._starts = {camera: table[f"videos/{camera}/from_timestamp"] for camera in self.cameras}
        self._paths = {camera: self._video_paths(info["video_path"], table, camera) for camera in self.cameras}
        self.episode, self.frame = self._order(batch_size, batches, seed)
        self._decoder = functools.cache(VideoDecoder)
        # The peers deliver the same samples, so most frames are requested several times.
        self.picture = functools.lru_cache(256)(self._picture)

    def _columns(self) -> list[str]:
        videos = [f"videos/{c}/{name}" for c in self.cameras for name in ("chunk_index", "file_index", "from_timestamp")]
        return ["episode_index", "length", "dataset_from_index", *videos]

    def _video_paths(self, template: str, table: dict[str, np.ndarray], camera: str) -> list[str]:
        places = zip(table[f"videos/{camera}/chunk_index"], table[f"videos/{camera}/file_index"], strict=True)
        return [str(self.root / template.format(video_key=camera, chunk_index=chunk, file_index=n)) for chunk, n in places]

    def _order(self, batch_size: int, batches: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        count, epochs, pools = batches * batch_size, [], default_pools(batch_size, 1)
        for epoch in range(-(-count // self.epoch)):
            epochs.append(dali_stream.Order(self.lengths, True, seed, epoch, *pools).read(0, self.epoch))
        episode, frame = (np.concatenate(part)[:count] for part in zip(*epochs, strict=True))
        return episode, frame

    def write(self, path: Path) -> list[str]:
        """Write the order for the peers to an NPZ file. Return the paths of the video files.

        The file contains `index`, `episode_index` and `frame_index`, each of shape (N,). For the nth camera, it contains
        `files_n`, shape (N,), which are places in the returned list, and `numbers_n`, shape (N, steps), which are numbers of
        frames in these files.
        """
        files: dict[str, int] = {}
        arrays = {"index": self._first[self.episode] + self.frame, "episode_index": self.episode, "frame_index": self.frame}
        for n, camera in enumerate(self.cameras):
            of_episode = np.array([files.setdefault(path, len(files)) for path in self._paths[camera]])
            arrays[f"files_{n}"] = of_episode[self.episode]
            frames = self.window(camera, self.episode, self.frame)
            arrays[f"numbers_{n}"] = np.rint(self.seconds(camera, self.episode[:, None], frames) * self.fps).astype(np.int64)
        np.savez(path, **arrays)
        return list(files)

    def has(self, episode: int, frame: int) -> bool:
        """Return whether a frame exists."""
        return 0 <= episode < len(self.lengths) and 0 <= frame < self.lengths[episode]

    def index(self, episode: int, frame: int) -> int | None:
        """Return the number of a frame's row, or None if the frame does not exist."""
        return int(self._first[episode]) + frame if self.has(episode, frame) else None

    def window(self, camera: str, episode: Any, frame: Any) -> np.ndarray:
        """Return the frames of a camera that samples contain, shape (..., steps), clamped to their episodes."""
        frames = np.asarray(frame)[..., None] + self.steps[camera]
        return np.clip(frames, 0, self.lengths[episode][..., None] - 1)

    def seconds(self, camera: str, episode: Any, frame: Any) -> np.ndarray:
        """Return the times of frames in their files, in seconds."""
        return self._starts[camera][episode] + self._times[self._first[episode] + frame]

    def _picture(self, camera: str, episode: int, frame: int) -> np.ndarray:
        decoder = self._decoder(self._paths[camera][episode])
        # A time in the middle of a frame's duration locates this frame even if its timestamp was rounded.
        decoded = decoder.get_frame_played_at(float(self.seconds(camera, episode, frame)) + 0.5 / self.fps)
        pixels = decoded.data[None]
        if self._image_size:
            pixels = torch.nn.functional.interpolate(pixels, size=list(self._image_size), mode="bilinear", antialias=True)
        return pixels[0].numpy()


def _read(paths: list[Path], columns: list[str]) -> dict[str, np.ndarray]:
    table = pa.concat_tables([pq.read_table(path, columns=columns) for path in paths])
    return {name: table[name].to_numpy() for name in columns}
