"""Copies of datasets with annotations, which LeRobot's own writer adds."""

from __future__ import annotations

import shutil
from pathlib import Path

from lerobot.annotations.steerable_pipeline.executor import Executor
from lerobot.annotations.steerable_pipeline.reader import iter_episodes
from lerobot.annotations.steerable_pipeline.staging import EpisodeStaging
from lerobot.annotations.steerable_pipeline.writer import LanguageColumnsWriter, speech_atom


def annotated(root: Path, folder: Path) -> Path:
    """Return a copy of a dataset whose episodes have annotations: a subtask and a memory every 10 frames, and one utterance."""
    copy = folder / "annotated"
    copy.mkdir()
    (copy / "videos").symlink_to((root / "videos").resolve())
    for part in ("data", "meta"):
        shutil.copytree(root / part, copy / part, copy_function=shutil.copyfile)
    episodes = list(iter_episodes(copy))
    for episode in episodes:
        staging, times = EpisodeStaging(folder / "staging", episode.episode_index), episode.frame_timestamps
        notes = [
            {
                "role": "assistant",
                "content": f"{style} {i} of episode {episode.episode_index}",
                "style": style,
                "timestamp": time,
            }
            for i, time in enumerate(times[::10])
            for style in ("subtask", "memory")
        ]
        staging.write("plan", notes)
        staging.write("interjections", [speech_atom(times[3], "hello")])
    LanguageColumnsWriter().write_all(episodes, folder / "staging", copy)
    Executor._ensure_annotation_metadata_in_info(copy)
    return copy
