"""Writer of the demo dataset in LeRobot's format v3.0: Parquet rows, MP4 videos and metadata."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from dali_stream.demo import identity, render, scene, tables
from dali_stream.demo.encode import CODECS, encode_video, quiet_encoders
from dali_stream.lerobot import stats, v3


def write_demo(
    root: str | Path,
    *,
    episodes: int = 16,
    size: tuple[int, int] = (240, 320),
    codec: str = "av1",
    gop: int = 2,
    fps: int = 20,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a dataset of simulated episodes. In each one, a gripper pushes a block to a goal, and two cameras record it.

    The rows depend only on `episodes`, `fps` and `seed`. Each frame contains its identity, which `read_identities` reads. The
    dataset is written to a temporary folder next to `root`, which is renamed to `root` at the end. If writing fails, `root` is
    not created.

    Args:
        root: Folder to write. It must be empty or must not exist.
        episodes: Number of episodes, 1 to 65536. At 20 frames per second, an episode has about 50 to 140 frames. Default: 16.
        size: Size (height, width) of the frames in pixels, even and at least (120, 128). Default: (240, 320).
        codec: Codec of the videos, "av1", "h264", "hevc", "vp9" or "mpeg4". Default: "av1".
        gop: Distance of keyframes in frames, 1 to 10 000, or for AV1 at least 2. Default: 2.
        fps: Frames per second, 5 to 60. Default: 20.
        seed: Seed of the random generator, not negative. Default: 0.
        progress: Function that is called in the calling thread after each video file, with the number of finished frames and
            the number of all frames. A frame counts once per camera. Default: none.

    Returns:
        `root` as a Path.

    Raises:
        ValueError: If an argument is out of range.
        FileExistsError: If `root` exists and is not an empty folder.
        RuntimeError: If FFmpeg lacks the encoder.
    """
    _check(episodes, size, codec, gop, fps, seed)
    root = Path(root)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise FileExistsError(f"{root} exists and is not an empty folder. Remove it, or choose another folder.")
    root.parent.mkdir(parents=True, exist_ok=True)
    partial = root.parent / f".{root.name}.partial-{uuid.uuid4().hex[:8]}"
    partial.mkdir()
    try:
        recorded = [scene.record_episode(seed, episode, fps) for episode in range(episodes)]
        histograms = _write_videos(partial, recorded, size, codec, gop, fps, progress)
        tables.write_tables(partial, recorded, size, codec, fps, histograms)
        if root.exists():
            root.rmdir()  # `root` is empty, and on some systems a folder cannot be renamed to an existing folder
        os.rename(partial, root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root


def _check(episodes: int, size: tuple[int, int], codec: str, gop: int, fps: int, seed: int) -> None:
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}.")
    limits = {
        "episodes": (episodes, 1, identity.MAX_EPISODE + 1),
        "gop": (gop, CODECS[codec].min_gop, 10_000),
        "fps": (fps, 5, 60),
        "seed": (seed, 0, 2**63 - 1),
    }
    for name, (value, low, high) in limits.items():
        if not _is_whole(value) or not low <= value <= high:
            with_codec = f" with codec {codec}" if name == "gop" else ""
            raise ValueError(f"{name} must be an integer from {low} to {high}{with_codec}, got {value!r}.")
    fits = len(size) == 2 and all(
        _is_whole(length) and length % 2 == 0 and length >= least for length, least in zip(size, identity.MIN_SIZE, strict=True)
    )
    if not fits:
        raise ValueError(
            f"size must be (height, width), both even and at least {identity.MIN_SIZE} so that the identity strip stays "
            f"readable, got {size!r}."
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _write_videos(
    root: Path,
    recorded: list[scene.Episode],
    size: tuple[int, int],
    codec: str,
    gop: int,
    fps: int,
    progress: Callable[[int, int], None] | None,
) -> tables.Histograms:
    """Render and encode all video files, two at a time. Return the histograms of the frames by camera and episode."""
    files: dict[tuple[str, int], list[int]] = {}
    for camera, cuts in tables.VIDEO_CUTS.items():
        for episode, number in enumerate(tables.file_numbers(len(recorded), cuts)):
            files.setdefault((camera, number), []).append(episode)
    histograms: tables.Histograms = {}
    done, total = 0, len(tables.VIDEO_CUTS) * sum(map(len, recorded))

    def write(camera: str, number: int, held: list[int]) -> int:
        images, drawn_histograms = _draw({episode: recorded[episode] for episode in held}, camera, size)
        path = root / v3.VIDEO_PATH.format(video_key=camera, **tables.place(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        encode_video(images, path, codec=codec, gop=gop, fps=fps)
        histograms.update(drawn_histograms)
        return len(images)

    with quiet_encoders(), ThreadPoolExecutor(max_workers=2, thread_name_prefix="demo-video") as pool:
        jobs = [pool.submit(write, camera, number, held) for (camera, number), held in files.items()]
        try:
            for job in as_completed(jobs):
                done += job.result()
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return histograms


def _draw(held: dict[int, scene.Episode], camera: str, size: tuple[int, int]) -> tuple[np.ndarray, tables.Histograms]:
    """Render the frames of one video file, and return them, uint8, shape (N, H, W, 3), and their histograms."""
    images = np.empty((sum(map(len, held.values())), *size, 3), dtype=np.uint8)
    camera_number = list(render.CAMERAS).index(camera)
    histograms: tables.Histograms = {}
    start = 0
    for index, episode in held.items():
        part = images[start : start + len(episode)]
        for frame, image in enumerate(render.render_episode(episode, render.CAMERAS[camera], size)):
            part[frame] = image
            identity.stamp(part[frame], index, frame, camera_number)
        histograms[camera, index] = stats.image_histogram(part)
        start += len(episode)
    return images, histograms
