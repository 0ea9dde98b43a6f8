"""The public dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dali_stream.lerobot.dataset import DatasetFiles
from dali_stream.lerobot.metadata import Stats


class Dataset(DatasetFiles):
    """A dataset, or a part of it. `len` is its number of frames.

    A copy (`copy`, `pickle`) is the same part of the same revision, with its own file handles and connections. A pickle
    holds `storage_options`, credentials included.

    Args:
        uri: a local folder, the id of a Hub repository ("lerobot/droid_1.0.1"), or an address: `hf://datasets/...`,
            `hf://buckets/...`, `s3://`, `gs://`, `http(s)://`, `file://`, `memory://` or another that fsspec knows. A
            repository that LeRobot has downloaded (`HF_LEROBOT_HOME`) is read from there, unless a revision is asked for.
        revision: branch, tag or commit of a Hub repository. It is resolved to a commit once, which is then read to the end.
        cameras: video and image keys to use; the others are never read. None: all.
        episodes: episode indices to use. None: all.
        data_files_root: where `data/` and `videos/` lie, if not beside `meta/`.
        storage_options: passed to fsspec: credentials, endpoints. For HTTP and the Hub: headers, a token.
        cache_dir: a folder for fetched bytes, shared by the ranks of a host and by later runs; None: memory only. Local
            files are read in place and never copied there.
        cache_bytes: that the cache may take on disk, as an int or such as "200GiB"; what was used longest ago goes first.
            None: no bound.
        give_up_after_s: seconds for which a read that fails is tried again, all attempts together. None: 60, and 5 as long as
            no connection has been made at all (refused, or no DNS).
        stats: statistics for `normalize`, as `compute_stats` gives them, instead of those in `meta/stats.json`, which are of
            all episodes. They are no part of the fingerprint, since no order depends on them.

    Attributes:
        uri: as given, but for credentials in it.
        num_frames, num_episodes: of the selected part.
        fps: frames per second.
        features: the features of `info.json`, without the cameras that are not selected.
        cameras: the selected camera keys.
        episodes: (E,) int64, the selected episode indices, rising.
        lengths: (E,) int64, their frames.
        fingerprint: a hash of what is read, equal wherever, in whatever files and however encoded the same dataset lies; of
            a Hub repository also of its commit.
        skips_images: whether the rows have images that are not selected.
        revision: the commit that is read, of a Hub repository; else None.
        cache_dir: as given.

    Raises:
        DatasetError: it does not exist, has another format, or its metadata is broken.
        StorageError: it cannot be reached.
        ValueError: an unknown camera or episode, or a revision of what has none.
    """

    def compute_stats(
        self, keys: Iterable[str] | None = None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Stats:
        """Statistics of the selected episodes, by LeRobot's definitions: for `Dataset(stats=...)`, where validation episodes
        must have no part in them.

        Args:
            keys: the features to compute; None: the selected cameras, and all that is not text.
            progress: called as (episodes done, episodes in all), in the caller's thread. Rows and each camera count on
                their own.

        Returns:
            {key: {"min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99": array, "count": (1,) int}}. Of rows they
            are exact, in the shape of a row, (1,) for scalars; quantiles of a feature of more than 4 million numbers are
            those of evenly spread rows of that many. Of a camera they are (3, 1, 1), of values in [0, 1], from about 100
            frames an episode and at most 10 000 in all, evenly spread and made smaller as LeRobot does. `count` is of rows,
            or of these frames. Rows are read an episode at a time, so memory does not grow with the dataset.

        Raises:
            DatasetError, StorageError, DecodeError: rows or frames cannot be read.
            ValueError: an unknown key.
        """
        from dali_stream.decode.statistics import compute_stats  # loads torch, which datasets alone do without

        return compute_stats(self, keys, progress)
