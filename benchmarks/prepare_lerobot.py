"""Test that LeRobot itself can open the results of `dali-stream prepare`.

    python benchmarks/prepare_lerobot.py PYTHON [PYTHON ...] [--data URI ...] [--out REPORT.json]

PYTHON is the interpreter of an environment with LeRobot 0.4 or later, which needs no part of this package. Small datasets are
written, and each is prepared with several options, one or a few at a time: a demo, a dataset with wall-clock timestamps, one of
v2.1, and one with images in rows. Each dataset of --data is prepared without options, and with `--for cpu --size 224x224`.

LeRobotDataset opens each result, also with `delta_timestamps` and with a part of the episodes. It reads the first frame, the
last frame and three frames between them of up to 8 episodes. The program checks for each result:

metadata   Numbers of frames and episodes, fps, shapes of the features, cameras and all statistics equal those of a Dataset.
items      Keys, dtypes, shapes and all values except for video equal those of a Loader, bit by bit.
frames     Frames equal those of a Loader with torchcodec, up to a difference of 2 of 255 in a pixel value. `most_different` is
           the largest difference.
source     Copied frames have a PSNR of at least 50 dB against those of the source. For encoded frames, the PSNR against the
           source's frame, resized by a Loader, is only reported.
right      A frame is more similar to the right frame of the source than to the two frames before and the two after it.
           Neighbours that have 45 dB or more against the right frame are not compared, since encoding makes them
           indistinguishable. `told` counts the frames with at least one neighbour that is compared. If frames contain stamps,
           the stamp is the right one.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from argument_types import new_file

import dali_stream
from dali_stream import Dataset, Loader
from dali_stream.demo import read_identities, write_demo
from dali_stream.tools import environment, prepare

Item = dict[str, Any]
TESTS = Path(__file__).parents[1] / "tests"
SIZE = (224, 224)
NEAR = 2  # number of frames before and after the right one that are compared
STILL_DB = 45  # PSNR above which two frames of the source cannot be distinguished after encoding
EPISODES = 8  # maximum number of episodes per dataset whose items are read
TOLERANCE = 2  # tolerated difference of pixel values (0 to 255), since LeRobot may use another version of the decoder
COPIED_DB = 50  # minimum PSNR of a copied frame against the source, for the same reason
SIDE = "observation.images.side"
DEMO: dict[str, dict[str, Any]] = {
    "copied": {},
    "small_files": {"file_mb": 0.05},
    "small_groups": {"rows_per_group": 50},
    "size": {"size": (128, 160)},
    "h264": {"codec": "h264", "gop": 2},
    "hevc": {"codec": "hevc", "gop": 2},
    "vp9": {"codec": "vp9", "gop": 12},
    "cpu": {"for_": "cpu"},
    "nvdec": {"for_": "nvdec"},
    "hub": {"for_": "hub"},
    "cpu_size_small_files": {"for_": "cpu", "size": (128, 160), "file_mb": 0.05},
    "episodes": {"episodes": [1, 3, 4]},
    "episodes_encoded": {"episodes": [4, 2], "codec": "h264"},
    "cameras": {"cameras": [SIDE]},
    "no_cameras": {"cameras": []},
}


class Case(NamedTuple):
    """A prepared dataset.

    Attributes:
        source, out: Folders of the source and of the result.
        options: Options of `prepare`.
        is_stamped: Whether each frame contains its identity.
    """

    source: Path
    out: Path
    options: dict[str, Any]
    is_stamped: bool

    @property
    def located(self) -> dict[str, Any]:
        """Options that `Dataset` also needs to read the source."""
        return {name: value for name, value in self.options.items() if name in ("clock", "episodes", "cameras")}

    @property
    def encodes(self) -> bool:
        """Whether `prepare` encodes frames."""
        return not self.options.keys().isdisjoint(("for_", "size", "codec", "images_to_video"))

    def old_episode(self, episode: int) -> int:
        """Return the index of an episode in the source."""
        return sorted(self.options["episodes"])[episode] if "episodes" in self.options else episode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="interpreter of an environment with LeRobot")
    parser.add_argument("--data", nargs="*", default=[], type=Path, help="more datasets to prepare, such as recordings")
    parser.add_argument("--out", type=new_file)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = prepared(Path(folder), arguments.data)
        lerobot = [opened(python, cases, Path(folder, f"read-{n}")) for n, python in enumerate(arguments.python)]
    report = {
        "command": "prepare_lerobot",
        "date": date.today().isoformat(),
        "machine": environment.machine("cpu"),
        "versions": {**environment.versions(), "dali_stream": dali_stream.__version__},
        "lerobot": lerobot,
    }
    text = environment.report_json(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return int(any(each["failed"] for each in lerobot))


# ---- datasets


def prepared(folder: Path, data: list[Path]) -> dict[str, Case]:
    """Prepare all datasets. Return them by name."""
    os.environ["WRITTEN_BY_TESTS"] = str(folder)  # folder in which `support.videos` writes
    write_demo(folder / "demo", episodes=6)
    sources: list[tuple[str, Path, dict[str, dict[str, Any]], bool]] = [
        ("demo", folder / "demo", DEMO, True),
        ("wall_clock", wall_clock(folder), {"regular": {"clock": "frame_index"}}, True),
        ("v2.1", old_version(folder), {"copied": {}, "cpu": {"for_": "cpu"}, "episodes": {"episodes": [0, 2]}}, True),
        ("images", images(folder), {"copied": {}, "to_video": {"images_to_video": True}}, True),
    ]
    real: dict[str, dict[str, Any]] = {"copied": {}, "cpu_size": {"for_": "cpu", "size": SIZE}}
    sources += [(root.name, root, real, False) for root in data]
    cases = {}
    for name, source, options, is_stamped in sources:
        for option_name, changes in options.items():
            case = cases[f"{name}_{option_name}"] = Case(source, folder / "out" / f"{name}_{option_name}", changes, is_stamped)
            failed = prepare(source, case.out, jobs=1, **changes).failed
            if failed:
                raise SystemExit(f"{name} {changes}: {failed}")
            print(f"prepared {name} {changes}", file=sys.stderr)
    twice = cases["demo_cpu"]
    cases["demo_cpu_twice"] = Case(twice.out, folder / "out/demo_cpu_twice", twice.options, True)
    report = prepare(twice.out, folder / "out/demo_cpu_twice", jobs=1, **twice.options)
    assert not any(camera.encoder for camera in report.cameras.values()), "a prepared camera was encoded again"
    return cases


def wall_clock(folder: Path) -> Path:
    """Return a demo dataset whose timestamps are up to 8 ms late, like those of a wall clock."""
    root = write_demo(folder / "wall_clock", episodes=3, size=(128, 160))
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        times = table["timestamp"].to_numpy() + np.random.default_rng(0).uniform(0, 0.008, len(table))
        place = table.column_names.index("timestamp")
        pq.write_table(table.set_column(place, table.schema.field(place), pa.array(times.astype(np.float32))), path)
    return root


def old_version(folder: Path) -> Path:
    """Return a dataset of v2.1, which has a file per episode."""
    from support.datasets import Column, build
    from support.videos import one_file_each

    lengths = (30, 20, 25)
    columns = {"action": Column("float32", [2], np.random.default_rng(0).random((sum(lengths), 2)))}
    cameras = one_file_each(folder / "videos", ("observation.images.top", SIDE), lengths, fps=10)
    tasks = {"task": ["push the block", "fold the shirt"]}
    return build(folder / "v2", lengths, columns, cameras=cameras, labels=tasks, version="v2.1", stats=True)


def images(folder: Path) -> Path:
    """Return a dataset with images in rows."""
    from PIL import Image
    from support.datasets import Column, build, image_file
    from support.videos import draw

    frames = draw((24, 18))
    rows = [{"bytes": image_file(Image.fromarray(frame)), "path": None} for frame in frames]
    columns = {
        "observation.image": Column("image", frames.shape[1:], rows),
        "action": Column("float32", [2], np.random.default_rng(0).random((len(rows), 2))),
    }
    return build(folder / "images", (24, 18), columns, stats=True)


# ---- LeRobot's side


def windows(dataset: Dataset) -> dict[str, list[float]]:
    """Return windows of each camera and of the rows that extend beyond the ends of episodes."""
    cameras = {key: [-1 / dataset.fps, 0.0, 1 / dataset.fps] for key in dataset.cameras}
    return cameras | {
        key: [n / dataset.fps for n in (-2, 0, 1, 8)] for key in ("action", "observation.state") if key in dataset.features
    }


def opened(python: str, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Read all results with one version of LeRobot, and compare them. Return the report."""
    jobs = list[dict[str, Any]]()
    for name, case in cases.items():
        some = [0, 2] if Dataset(case.out).num_episodes > 2 else [1]
        for suffix, episodes, has_windows in (("", None, False), ("_windows", None, True), ("_selected", some, True)):
            deltas = windows(Dataset(case.out)) if has_windows else None
            job: dict[str, Any] = {
                "name": name + suffix,
                "case": name,
                "root": str(case.out),
                "episodes": episodes,
                "deltas": deltas or None,
            }
            rows = read(sampled(case.out, episodes, cameras=[]))
            jobs.append(job | {"index": [int(row["index"]) for row in rows]})
    folder.with_suffix(".json").write_text(json.dumps(jobs))
    program = Path(__file__).parent / "lerobot_programs/read_items.py"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, program, folder.with_suffix(".json"), folder], check=True, env=env)
    comparisons = {name: Comparison(case) for name, case in cases.items()}
    for job in jobs:
        metadata = json.loads((folder / f"{job['name']}.json").read_text())
        comparison = comparisons[job["case"]]
        if "error" in metadata:
            comparison.failed.append(metadata["error"].replace(job["root"], "OUT")[:500])
        else:
            dataset = sampled(Path(job["root"]), job["episodes"])
            comparison.add(dataset, job["deltas"] or {}, metadata, torch.load(folder / f"{job['name']}.pt"))
    results = {name: comparison.report() for name, comparison in comparisons.items()}
    versions = json.loads((folder / "versions.json").read_text())
    failed = {name: result["failed"] for name, result in results.items() if result["failed"]}
    return {"versions": versions, "failed": failed, "results": results}


# ---- this package's side


def sampled(root: Path, episodes: list[int] | None, **options: Any) -> Dataset:
    """Return a dataset that is reduced to the first and last frames of some episodes, and three frames between them."""
    whole = Dataset(root, episodes=episodes)
    places = np.unique(np.linspace(0, whole.num_episodes - 1, EPISODES).astype(int)).tolist()
    frames = {
        int(whole.episodes[e]): [(f, f + 1) for f in sorted({0, length // 4, length // 2, 3 * length // 4, length - 1})]
        for e, length in ((e, int(whole.lengths[e])) for e in places)
    }
    return Dataset(root, episodes=episodes, frames=frames, **options)


def read(dataset: Dataset, deltas: dict[str, list[float]] | None = None, **options: Any) -> list[Item]:
    """Return the samples of a dataset in its order."""
    fixed: dict[str, Any] = {"shuffle": False, "last_batch": "partial", "device": "cpu", "decode": "torchcodec"}
    items = list[Item]()
    with Loader(dataset, batch_size=8, delta_timestamps=deltas or None, **fixed, **options) as loader:
        for batch in loader:
            items += [{key: value[n] for key, value in batch.items()} for n in range(len(batch["index"]))]
    return items


def near_source(case: Case, items: list[Item]) -> dict[tuple[int, int], Item]:
    """Return the samples of the source around those of `items`, resized by a Loader, by (new episode, frame)."""
    source = Dataset(case.source, **case.located)
    lengths = dict(zip(source.episodes.tolist(), source.lengths.tolist(), strict=True))
    new = {case.old_episode(int(item["episode_index"])): int(item["episode_index"]) for item in items}
    frames: dict[int, list[tuple[int, int]]] = {}
    for item in items:
        episode, frame = case.old_episode(int(item["episode_index"])), int(item["frame_index"])
        start, stop = max(0, frame - NEAR), min(lengths[episode], frame + NEAR + 1)
        if frames.get(episode) and frames[episode][-1][1] >= start:
            start = frames[episode].pop()[0]
        frames.setdefault(episode, []).append((start, stop))
    around = Dataset(case.source, **case.located, frames=frames)
    near_items = read(around, image_size=case.options.get("size"))
    return {(new[int(item["episode_index"])], int(item["frame_index"])): item for item in near_items}


# ---- comparison


class Comparison:
    """Comparison of the items of one dataset as read by LeRobot and by a Loader.

    Attributes:
        failed: Descriptions of the differences.
        items: Number of items that LeRobot has read.
        frames: Number of frames that were compared with those of the source.
        most_different: Largest difference of a pixel value (0 to 255) from that of the Loader.
        psnr: PSNR of each frame against that of the source, in dB.
        told: Number of frames that can be distinguished from their neighbours in the source.
        right, stamps: Number of frames to which no neighbour is more similar, and number of frames with the right stamp.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self.failed, self.psnr = list[str](), list[float]()
        self.most_different, self.items, self.told, self.right, self.stamps = 0.0, 0, 0, 0, 0

    def add(self, dataset: Dataset, deltas: dict[str, list[float]], meta: dict[str, Any], theirs: list[Item]) -> None:
        """Compare the metadata and items that LeRobot has read with those that a Loader reads."""
        self._dataset, self._deltas = dataset, deltas
        ours = read(dataset, deltas)
        self.failed += metadata_differences(dataset, meta)
        source = near_source(self._case, ours)
        for mine, other in zip(ours, theirs, strict=True):
            self.items += 1
            self.with_loader(mine, other)
            self.with_source(other, source)

    def with_loader(self, mine: Item, other: Item) -> None:
        """Compare an item with that of a Loader of the same dataset."""
        if mine.keys() != other.keys():
            self.failed.append(f"keys differ: {sorted(mine.keys() ^ other.keys())}")
        for key in mine.keys() & other.keys():
            a, b = mine[key], other[key]
            is_video = key in self._dataset.cameras and self._dataset.features[key].is_video
            if is_video and a.dtype == b.dtype and a.shape == b.shape:
                difference = 255 * float((a - b).abs().max())
                self.most_different = max(self.most_different, difference)
                same = difference <= TOLERANCE
            else:
                same = is_equal(a, b)
            if not same:
                self.failed.append(f"{key} of {place(other)} differs: {a!s:.80}, LeRobot {b!s:.80}")

    def with_source(self, other: Item, source: dict[tuple[int, int], Item]) -> None:
        """Compare an item with the same frame of the source, and with the neighbours of this frame."""
        episode, frame = place(other)
        changed = {"episodes": ("index", "episode_index"), "clock": ("timestamp",)}
        new = [key for name, keys in changed.items() if name in self._case.options for key in keys]
        for key, value in source[episode, frame].items():
            if key not in (*self._dataset.cameras, *new) and not is_equal(self._own(other, key), value):
                self.failed.append(f"{key} of {episode, frame} is not the source's")
        for key in self._dataset.cameras:
            delivered = self._own(other, key)
            steps = [step for step in range(-NEAR, NEAR + 1) if (episode, frame + step) in source]
            near = {step: source[episode, frame + step][key] for step in steps}
            others = [image for image in near.values() if decibels(near[0], image) < STILL_DB]
            self.psnr.append(decibels(delivered, near[0]))
            self.told += bool(others)
            self.right += all(decibels(delivered, image) < self.psnr[-1] for image in others)
            if self._case.is_stamped:
                image = (delivered * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
                stamp = read_identities(image[None])[0, :2].tolist()
                self.stamps += stamp == [self._case.old_episode(episode), frame]

    def _own(self, item: Item, key: str) -> Any:
        """Return the value of the current row, which is the second step of a window."""
        return item[key][1] if key in self._deltas else item[key]

    def report(self) -> dict[str, Any]:
        """Return the results as a dict for JSON."""
        frames, lowest = len(self.psnr), min(self.psnr, default=None)
        if self.right < frames:
            self.failed.append(f"{frames - self.right} of {frames} frames are nearer to a neighbour")
        if self._case.is_stamped and self.stamps < frames:
            self.failed.append(f"{frames - self.stamps} of {frames} frames have the stamp of another")
        if lowest is not None and not self._case.encodes and lowest < COPIED_DB:
            self.failed.append(f"copied frames differ from the source's: {lowest:.1f} dB")
        return {
            "options": self._case.options,
            "items": self.items,
            "frames": frames,
            "most_different": round(self.most_different, 3),
            "psnr_min": None if lowest is None else round(lowest, 2),
            "told": self.told,
            "right": self.right,
            "stamps": self.stamps if self._case.is_stamped else None,
            "failed": sorted(set(self.failed)),
        }


def decibels(image: torch.Tensor, other: torch.Tensor) -> float:
    return float(-10 * np.log10(max(float((image - other).square().mean()), 1e-10)))


def place(item: Item) -> tuple[int, int]:
    return int(item["episode_index"]), int(item["frame_index"])


def is_equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def metadata_differences(dataset: Dataset, meta: dict[str, Any]) -> list[str]:
    """Return descriptions of the differences between LeRobot's metadata and those of a Dataset."""
    whole = Dataset(dataset.uri)
    expected = {
        "fps": dataset.fps,
        "frames": int(dataset.lengths.sum()),
        "num_frames": int(dataset.lengths.sum()),
        "num_episodes": dataset.num_episodes,
        "total_frames": whole.num_frames,
        "total_episodes": whole.num_episodes,
        "episode_rows": whole.num_episodes,
        "cameras": list(whole.cameras),
        "videos": [key for key in whole.cameras if whole.features[key].is_video],
        "shapes": {key: list(feature["shape"]) for key, feature in whole.features.items()},
    }
    differences = [f"{name}: {meta[name]}, expected {value}" for name, value in expected.items() if meta[name] != value]
    stats = {key: {name: np.asarray(v).tolist() for name, v in by_name.items()} for key, by_name in whole.stored_stats.items()}
    return differences + ([] if meta["stats"] == stats else [f"stats differ: {differing(meta['stats'], stats)}"])


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    pairs = {(key, name) for side in (actual, expected) for key, by_name in side.items() for name in by_name}
    return sorted(f"{k} {n}" for k, n in pairs if actual.get(k, {}).get(n) != expected.get(k, {}).get(n))


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    sys.exit(main())
