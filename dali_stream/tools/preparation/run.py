"""`prepare`: makes a plan, runs its tasks on an executor, records which files are finished, and writes the metadata."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dali_stream.checks.arguments import known_arguments, positive
from dali_stream.dataset import Dataset
from dali_stream.errors import DaliStreamError, counted
from dali_stream.lerobot.info import INFO
from dali_stream.lerobot.selection import EpisodeFilter
from dali_stream.storage import LocalStore
from dali_stream.system.cpu import cores
from dali_stream.tools.diagnosis.run import refusal
from dali_stream.tools.preparation import executors, metadata, plan, task, video
from dali_stream.tools.preparation.executors import MapTasks
from dali_stream.tools.preparation.options import Options
from dali_stream.tools.preparation.place import Json, LocalPlace, Place, occupied, open_place
from dali_stream.tools.preparation.state import PrepareStatus, RunState, read_state

_SILENT_S = 600.0  # time without written progress after which a run counts as stopped


@dataclass(frozen=True)
class PreparedCamera:
    """Camera of a new dataset.

    Attributes:
        files: Number of MP4 files.
        bytes: Size of these files, in bytes.
        encoder: FFmpeg's name of the encoder. Empty if packets were copied.
        psnr_min, psnr_mean: PSNR over RGB of one frame of each episode, in dB, against the frame that a Loader delivers from
            the source. It is measured with the frame that differs most from its neighbours. None if packets were copied.
    """

    files: int
    bytes: int
    encoder: str
    psnr_min: float | None
    psnr_mean: float | None


@dataclass(frozen=True)
class PrepareReport:
    """Description of a new dataset.

    Attributes:
        episodes, frames: Numbers of episodes and frames.
        data_files: Number of Parquet files.
        bytes: Size of all files with rows and video, in bytes.
        written: Number of files that this run has written. 0 if an earlier run was complete.
        cameras: {key: camera} of the cameras with video.
        failed: {path: reason} of the files that could not be written. If any file failed, OUT is not yet a dataset.
        dropped: {episode of the source: reason} of the episodes that `drop_broken` has left out.
    """

    episodes: int
    frames: int
    data_files: int
    bytes: int
    written: int
    cameras: dict[str, PreparedCamera]
    failed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists for JSON."""
        return dataclasses.asdict(self)


@known_arguments
def prepare(
    uri: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    for_: str | None = None,
    size: tuple[int, int] | None = None,
    codec: str | None = None,
    gop: int | None = None,
    crf: int | None = None,
    encoder: str | None = None,
    file_mb: float | None = None,
    rows_per_group: int | None = None,
    images_to_video: bool = False,
    drop_broken: bool = False,
    episodes: Sequence[int] | None = None,
    episode_filter: EpisodeFilter | None = None,
    cameras: Sequence[str] | None = None,
    clock: str = "timestamp",
    tolerance_s: float | None = None,
    revision: str | None = None,
    data_files_root: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    out_storage_options: dict[str, Any] | None = None,
    jobs: int | None = None,
    map_tasks: MapTasks | None = None,
    progress: Callable[[PrepareStatus], None] = lambda status: None,
) -> PrepareReport:
    """Rewrite a dataset as LeRobot v3.0.

    Without options, rows and encoded frames are copied without a change, except for what LeRobot does not read: numbers such
    as `frame_index` that do not count from 0 in steps of 1, columns without a feature, numbers of another type, and times of
    frames that are not those of their rows.

    Each file is written under a temporary name, verified, and then moved into place or uploaded. At the end,
    the metadata, the rows and the places of all frames are read as a Loader reads them, without decoding frames again. The same
    call continues an interrupted run, and does nothing for a finished one. With software encoders of the same version, the
    output is identical byte for byte, whatever the executor, the number of jobs and the interruptions.

    A job needs scratch space for about two files, in OUT or, if OUT is remote, in the folder for temporary files.

    Args:
        uri: Address of a dataset of v2.0, v2.1 or v3.0, local or remote.
        out: New or empty local folder, or an address such as s3://bucket/folder, hf://datasets/owner/name.
        for_: Preset of the encoding: "cpu", "nvdec" or "hub". See `Options`. Default: None.
        size, codec, gop, crf, encoder: Encoding of all cameras. A camera that was recorded with these settings is copied. See
            `Options`.
        file_mb, rows_per_group: Sizes of files and row groups. See `Options`.
        images_to_video: Whether images in rows become videos. If `codec` is None, their codec is "h264". Default: False.
        drop_broken: Whether to check all episodes first, and to leave out those that cannot be read. Default: False.
        episodes, episode_filter, cameras: Selection, as in `Dataset`. Selected episodes are numbered from 0.
        clock, tolerance_s: How rows locate their frames, as in `Dataset`. If the clock is "frame_index", or the tolerance is
            larger than the default, `timestamp` becomes frame_index / fps.
        revision, data_files_root, storage_options: See `Dataset`.
        out_storage_options: Credentials and other storage options of OUT. They are passed to the tasks, but not stored in OUT.
        jobs: Number of processes of this machine that write files. Default: one per core. With 1, files are written in the
            process of the caller.
        map_tasks: Executor, which is used in place of these processes: a function like the built-in `map`, such as the method
            `map` of a `concurrent.futures.Executor`. It is called with a picklable function and its arguments, and yields the
            results in any order.
        progress: Function that is called with each new status.

    Returns:
        Description of the new dataset. If `failed` is not empty, correct the source or use `drop_broken`, and call again.

    Raises:
        ValueError: If an argument is invalid, or OUT contains something else.
        DatasetError, DecodeError, StorageError: If the metadata of the source cannot be read.
        DaliStreamError: If ffmpeg or an encoder is missing.
    """
    options = Options(
        size, codec, gop, crf, encoder, file_mb, rows_per_group, images_to_video, drop_broken
    ).with_preset(for_).checked()  # fmt: skip
    jobs = cores() if jobs is None else positive("jobs", jobs)
    processes = executors.Processes(jobs)
    if map_tasks is None:
        map_tasks = map if jobs == 1 else processes.map
    source: Json = {"revision": revision, "data_files_root": data_files_root, "storage_options": storage_options}
    selection: Json = {"episodes": episodes, "episode_filter": episode_filter, "cameras": cameras}
    selection |= {"clock": clock, "tolerance_s": tolerance_s}

    with contextlib.closing(Dataset(uri, **source, **selection)) as dataset, contextlib.closing(processes):
        place = open_place(os.fspath(out), out_storage_options)
        _check_outside(dataset, place)
        head = plan.header(dataset, options, cameras is None)
        state = read_state(place)
        if state is None or "report" in state:
            if state is not None and place.read(INFO) is not None:
                _check_same(place, state["plan"], head, "a finished dataset")
                cameras_of = {key: PreparedCamera(**camera) for key, camera in state["report"]["cameras"].items()}
                return PrepareReport(**state["report"] | {"cameras": cameras_of})
            if place.sizes().keys() - {".gitattributes"}:  # a new repository has this file
                raise ValueError(
                    f"OUT must be new or empty, got {place.address}, which is not empty, and holds no unfinished run"
                )
        shared = source | {
            "uri": _absolute(dataset.address),
            "revision": dataset.store.revision,
            "data_files_root": None if data_files_root is None else _absolute(os.fspath(data_files_root)),
            "out": place.address,
            "out_options": out_storage_options,
            "images": list(dataset.images),
            "reads": [key for key, feature in dataset.features.items() if not feature.is_camera and key != "timestamp"],
        }
        with place.lock():
            run = _started(dataset, place, head, shared, map_tasks, progress)
            _write_files(run, run.plan.header | shared, map_tasks)
            report = _report(run)
            if not report.failed:
                _finish(dataset, place, run, report, out_storage_options)
            return report


def _absolute(address: str) -> str:
    return address if "://" in address else str(Path(address).expanduser().absolute())


def _check_same(place: Place, stored: Json, head: Json, content: str) -> None:
    differs = [name for name in head if stored.get(name) != json.loads(json.dumps(head[name]))]
    if differs:
        raise ValueError(
            f"{place.address} holds {content} of another command, which differs in {', '.join(differs)}. Repeat the earlier "
            "command to continue it, remove it, or give another folder"
        )


def _check_outside(dataset: Dataset, place: Place) -> None:
    """Raise ValueError if OUT is inside the source, or if the source is inside OUT."""
    for store in dataset.stores:
        if isinstance(store, LocalStore) and isinstance(place, LocalPlace):
            source, root = Path(os.path.realpath(store.address)), Path(os.path.realpath(place.root))
            if source.is_relative_to(root) or root.is_relative_to(source):
                raise ValueError(f"one of {root} and the dataset's {source} is inside the other. Give another folder")


def _results(
    map_tasks: MapTasks, function: Callable[[Json, Json], Json], job: Json, tasks: list[Json]
) -> Iterator[Json | None]:
    """Yield the results of `function(job, task)` for each task. See `executors`."""
    results = iter(map_tasks(functools.partial(function, job), tasks))
    try:
        yield from results
    finally:
        if isinstance(results, Generator):  # ends processes and jobs if the run is interrupted
            results.close()


def _started(
    dataset: Dataset, place: Place, head: Json, shared: Json, map_tasks: MapTasks, show: Callable[[PrepareStatus], None]
) -> RunState:
    """Return the state of an unfinished run in OUT. Without one, make a plan, and store it in OUT."""
    state = read_state(place)
    if state is None:
        run = RunState(place, _planned(dataset, head, shared, map_tasks), {}, show)
        if read_state(place) is not None:  # a remote place has no lock, and planning may take hours
            raise occupied(place.address)
    else:
        _check_same(place, state["plan"], head, "an unfinished run")
        if "report" in state:
            raise ValueError(f"{place.address} has been finished by another process. Run the command again to see the report")
        sizes = place.sizes()
        notes = {path: note for path, note in state["done"].items() if note["bytes"] == sizes.get(path)}
        run = RunState(place, plan.Plan(state["plan"], state["tasks"]), notes, show)
    run.update()
    return run


def _planned(dataset: Dataset, head: Json, shared: Json, map_tasks: MapTasks) -> plan.Plan:
    """Make a plan. This encodes a few frames of each camera that is encoded, and with `drop_broken`, reads all episodes."""
    planner = plan.FilePlanner(dataset, head)

    def run_all(function: Callable[[Json, Json], Json], tasks: list[Json]) -> Iterator[Json]:
        for result in _results(map_tasks, function, head | shared, tasks):
            if result is not None:
                if "error" in result:
                    raise DaliStreamError(result["error"])
                yield result

    frame_bytes = {result["camera"]: result["frame_bytes"] for result in run_all(video.trial, planner.trials())}
    dropped: dict[int, str] = {}
    if head["options"].get("drop_broken"):
        for result in run_all(task.check_episodes, planner.tasks(frame_bytes, {})):
            dropped |= {int(episode): why for episode, why in result["broken"].items()}
    tasks = planner.tasks(frame_bytes, dropped)
    if not tasks:
        raise DaliStreamError(f"all {counted(len(dropped), 'episode')} cannot be read: {next(iter(dropped.values()))}")
    renumber = any(episode["new"] != episode["old"] for each in tasks for episode in each["episodes"])
    renumber |= dataset.num_episodes - len(dropped) < len(dataset.table.index)
    head = head | {
        "renumber": renumber,
        "row_stats": renumber and not metadata.has_episode_stats(dataset),
        "dropped": {str(episode): why for episode, why in sorted(dropped.items())},
    }
    return plan.Plan(head, tasks)


def _write_files(run: RunState, job: Json, map_tasks: MapTasks) -> None:
    """Write the files of the plan that are not finished."""
    todo = [each for each in run.plan.tasks if each["path"] not in run.notes]
    state = "stopped"
    try:
        for result in _results(map_tasks, task.write_file, job, todo):
            if result is not None:
                run.add(result)
            run.update()
        if lost := [each["path"] for each in todo if each["path"] not in run.notes and each["path"] not in run.failed]:
            raise DaliStreamError(
                f"map_tasks has returned no result for {counted(len(lost), 'file')}, such as {lost[0]}. It must yield one for "
                "each task"
            )
        state = "failed" if run.failed else "finishing"
    finally:
        run.update(state)


def _finish(dataset: Dataset, place: Place, run: RunState, report: PrepareReport, options: Json | None) -> None:
    """Write the metadata, verify the new dataset, and store the report."""
    stored = report.as_dict() | {"written": 0}
    place.commit(metadata.files(dataset, run.plan, run.notes, stored))
    run.update("finishing")  # `status` assumes that a run that writes nothing was killed
    _verify(place, report, options)
    run.finish(stored)


def _report(run: RunState) -> PrepareReport:
    header, tasks, cameras = run.plan.header, run.plan.tasks, {}
    for key, spec in header["cameras"].items():
        own = [run.notes[each["path"]] for each in tasks if each.get("camera") == key and each["path"] in run.notes]
        psnr = [value for note in own for value in note.get("psnr", {}).values()]
        cameras[key] = PreparedCamera(
            files=len(own),
            bytes=sum(note["bytes"] for note in own),
            encoder="" if spec["mode"] == "copy" else spec["encoder"]["name"],
            psnr_min=min(psnr, default=None),
            psnr_mean=statistics.fmean(psnr) if psnr else None,
        )
    rows = [each for each in tasks if "camera" not in each]
    lengths = [episode["length"] for each in rows for episode in each["episodes"]]
    nbytes = sum(note["bytes"] for note in run.notes.values())
    return PrepareReport(
        len(lengths), sum(lengths), len(rows), nbytes, run.written, cameras, run.failed, header["dropped"]
    )  # fmt: skip


def _verify(place: Place, report: PrepareReport, options: Json | None) -> None:
    """Open the new dataset, and read it in the same way as a Loader, without decoding frames.

    Raises:
        DaliStreamError: If its numbers of episodes or frames differ from the report, or if a Loader would refuse it.
    """
    with contextlib.closing(Dataset(place.address, storage_options=options)) as new:
        if (new.num_episodes, new.num_frames) != (report.episodes, report.frames):
            raise DaliStreamError(f"{place.address}: holds {new!r}, not {report.episodes} episodes of {report.frames} frames")
        if problem := refusal(new):
            raise DaliStreamError(f"{place.address}: a Loader does not read the new dataset: {problem}. Correct the source")


def status(out: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> PrepareStatus:
    """Return the state of a run that writes, or has written, OUT.

    Args:
        out: OUT of the run.
        storage_options: Credentials and other storage options of OUT. Default: none.

    Raises:
        ValueError: If OUT contains no run.
    """
    place = open_place(os.fspath(out), storage_options)
    if (state := read_state(place)) is None:
        raise ValueError(f"out must be the OUT of a run of prepare, got {place.address}, which holds no run")
    if "report" in state:
        report = state["report"]
        files = report["data_files"] + sum(camera["files"] for camera in report["cameras"].values())
        return PrepareStatus("finished", files, 0, files, report["bytes"], 0.0, None, time.time())
    last = PrepareStatus(**state["status"])
    silent = last.state in ("running", "finishing") and time.time() - last.at > _SILENT_S
    return dataclasses.replace(last, state="stopped") if silent else last
