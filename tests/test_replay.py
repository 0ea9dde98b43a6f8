"""`batch_at`: any batch of a Loader or a `Transformed` equals that of the iteration, which it does not change."""

from __future__ import annotations

import functools
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn
from PIL import Image
from support import faults
from support.batches import Batch, as_bytes, equal
from support.datasets import SIDE, TOP
from support.programs import failed, pictures
from support.servers import Server
from support.slow import slow, slow_after

import dali_stream
from dali_stream import Dataset, Loader, Mixture, Transformed, augment
from dali_stream.cli import main
from dali_stream.storage.state_file import write_state

OPTIONS: dict[str, Any] = {"batch_size": 40, "seed": 7, "device": "cpu", "num_threads": 2, "image_size": (48, 64)}
CHUNK = [step / 20 for step in range(6)]


def make(dataset: Any, **arguments: Any) -> Loader:
    return Loader(dataset, **(OPTIONS | arguments))


def delivered(dataset: Any, epochs: int = 2, **arguments: Any) -> list[list[Batch]]:
    """The batches of the epochs of a run that nothing interrupts."""
    with make(dataset, **arguments) as loader:
        return [list(loader) for _ in range(epochs)]


def counted(loader: Loader | Transformed) -> dict[str, Any]:
    """The counters of a run, without times."""
    return {name: value for name, value in loader.stats().items() if not name.endswith("_s")}


def places(batches: list[list[Batch]]) -> list[tuple[int, int]]:
    """Epoch and number of some batches: the last of the last epoch, and the second of the first."""
    last = len(batches) - 1
    return [(last, len(batches[last]) - 1), (0, 1)]


def check(batches: list[list[Batch]], loader: Loader | Transformed) -> None:
    """Compare batches before, during and after an iteration of a new Loader, whose own batches stay the same."""
    with loader:
        for epoch, number in places(batches):
            state = loader.state_dict()
            assert equal(loader.batch_at(epoch, number), batches[epoch][number])
            assert (loader.state_dict(), loader.epoch, loader.batch_index) == (state, 0, 0)
        assert counted(loader)["batches"] == counted(loader)["decoded_frames"] == 0
        found = []
        for batch in loader:
            state = loader.state_dict()
            for epoch, number in places(batches)[len(found) : len(found) + 1]:
                assert equal(loader.batch_at(epoch, number), batches[epoch][number])
            assert (loader.state_dict(), loader.batch_index) == (state, len(found) + 1)
            found.append(batch)
        assert all(map(equal, found, batches[0]))
        assert (len(found), loader.epoch, loader.batch_index) == (len(batches[0]), 1, 0)
        assert counted(loader)["batches"] == len(found)
        epoch, number = places(batches)[0]
        assert equal(loader.batch_at(epoch, number), batches[epoch][number])
        assert loader.epoch == 1
        for expected in batches[1:]:
            assert all(map(equal, list(loader), expected))


def cropped(nodes: dict[str, Any], cameras: list[str], size: list[int]) -> dict[str, Any]:
    """Augment frames at random, and add an output."""
    draw = augment.Draw(nodes["sample"])
    for key in cameras:
        nodes[key] = augment.random_resized_crop(nodes[key], draw, size=size, scale=(0.3, 0.9))
    return nodes | {"dark": fn.flip(nodes[TOP], horizontal=1) * 0.5}


AUGMENTED: dict[str, Any] = {
    "dali_graph": functools.partial(cropped, cameras=[TOP, SIDE], size=[40, 56]),
    "normalize": {"action": "min_max", SIDE: "mean_std"},
    "delta_timestamps": {"action": CHUNK, TOP: [-0.1, 0.0]},
}


# ----------------------------------------------------------------------------------------------------------- a Loader


@pytest.mark.parametrize(
    "arguments",
    [
        slow({"image_size": None}),
        {"image_dtype": "uint8", "memory_format": "contiguous", "shuffle": "global", "last_batch": "pad"},
        slow({"shuffle": "sharded", "consumers": 4}),
        {"delta_timestamps": {"action": CHUNK, TOP: [-0.1, 0.0]}, "normalize": "mean_std", "consumers": 5},
        {"shuffle": False, "last_batch": "partial", "decode": "torchcodec", "prefetch": 1, "memory_budget": "2MiB"},
        slow(AUGMENTED),
    ],
    ids=["plain", "resized", "sharded", "windows", "recorded", "augmented"],
)
def test_a_batch_is_that_of_the_iteration(small: Path, arguments: dict[str, Any]) -> None:
    check(delivered(small, **arguments), make(small, **arguments))


def test_augmentation_and_normalization_are_those_of_the_iteration(small: Path) -> None:
    """The run of a DALI graph next to another one."""
    with make(small, **AUGMENTED) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert equal(loader.batch_at(0, 0), first)
        second = loader.batch_at(0, 1)
        assert equal(next(iterator), second)


@pytest.mark.parametrize("last_batch", ["partial", slow("pad"), slow("drop")])
def test_each_rank_has_its_share(small: Path, last_batch: str) -> None:
    for rank in range(2):
        ranks = {"rank": rank, "world_size": 2, "batch_size": 16, "last_batch": last_batch}
        check(delivered(small, **ranks), make(small, **ranks))


def test_a_batch_of_a_mixture(demo: Path, small: Path) -> None:
    parts: dict[str, Any] = {
        "both": Dataset(demo, episodes=[0, 1, 4], drop_n_last_frames=5).without(["observation.object_yaws"]),
        "side": {"uri": small, "cameras": [SIDE]},
    }
    mixture = Mixture(parts, weights={"both": 2, "side": 1.5}, missing="pad", epoch_samples=130)
    arguments: dict[str, Any] = {"normalize": "min_max_per_dataset", "delta_timestamps": {"action": CHUNK}}
    check(delivered(mixture, **arguments), make(mixture, **arguments))


def test_nothing_before_the_batch_is_read(demo_copy: Path) -> None:
    """In recorded order, without the videos of the episodes in the middle. The iteration meets them later, and not before."""
    [batches] = delivered(demo_copy, epochs=1, shuffle=False)
    with make(demo_copy, shuffle=False, prefetch=1) as loader:
        iterator = iter(loader)
        assert equal(next(iterator), batches[0])
    (demo_copy / f"videos/{SIDE}/chunk-000/file-001.mp4").unlink()
    with make(demo_copy, shuffle=False, prefetch=1) as loader:
        iterator = iter(loader)
        assert equal(next(iterator), batches[0])
        assert equal(loader.batch_at(0, len(batches) - 1), batches[-1])
        missing = next(n for n, batch in enumerate(batches) if (batch["episode_index"] == 1).any())
        with pytest.raises(dali_stream.DecodeError, match="file-001"):
            loader.batch_at(0, missing)
        assert loader.batch_index == 1
        for number in range(1, missing):
            assert equal(next(iterator), batches[number])
        with pytest.raises(dali_stream.DecodeError, match="file-001"):
            next(iterator)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_is_resumed_on_other_ranks(small: Path, world: int) -> None:
    """At a position at which the new global batch begins, so its earlier batches are those of any such run."""
    options = {"consumers": 8, "last_batch": "partial"}
    with make(small, **options, rank=0, world_size=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for rank in range(world):
        ranks = {**options, "batch_size": 20, "rank": rank, "world_size": world}
        whole = delivered(small, **ranks)
        with make(small, **ranks) as loader:
            loader.load_state_dict(state)
            begin = loader.batch_index
            assert begin == 2 // world
            for epoch, number in [(0, begin), (0, 0), (1, 1), *places(whole)]:
                assert equal(loader.batch_at(epoch, number), whole[epoch][number])
            assert all(map(equal, list(loader), whole[0][begin:]))


def test_a_run_that_was_resumed_with_another_global_batch(small: Path) -> None:
    """Its batches begin at other positions, until the epoch ends. Batches of an earlier Loader are refused."""
    with make(small, consumers=8) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(small, consumers=8, batch_size=16) as loader:
        loader.load_state_dict(state)
        begin = loader.batch_index
        early = [loader.batch_at(0, begin), loader.batch_at(0, len(loader) - 1), loader.batch_at(1, 3)]
        batches = [list(loader), list(loader)]
        late = [loader.batch_at(0, begin), loader.batch_at(0, len(loader) - 1), loader.batch_at(1, 3)]
        for found in (early, late):
            assert all(map(equal, found, [batches[0][0], batches[0][-1], batches[1][3]]))
        with pytest.raises(ValueError, match=f"batch must be at least {begin}, at which this run was resumed with another"):
            loader.batch_at(0, begin - 1)
        assert equal(loader.batch_at(1, 0), batches[1][0])


def test_frames_of_a_frame_cache_and_of_a_server(small: Path, tmp_path: Path) -> None:
    batches = delivered(small)
    for _ in range(2):  # which fills the frame cache, and then reads it
        check(batches, make(small, frame_cache=tmp_path / "frames"))
    with Server(small) as server:
        check(batches, make(Dataset(server.url)))


def test_its_threads_and_files_end_with_it(small: Path) -> None:
    def own() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("dali_stream"))

    with make(small) as loader:
        before = own()
        loader.batch_at(0, 1)
        assert own() == before
        iterator = iter(loader)
        next(iterator)
        iterating = own()
        loader.batch_at(0, 1)
        assert own() == iterating
        loader.stats()


@pytest.mark.parametrize(
    ("epoch", "batch", "message"),
    [
        (0, 4, "batch must be at least 0 and less than 4, the number of batches of an epoch, got 4. For a count from"),
        (0, -1, "batch must be at least 0 and less than 4, the number of batches of an epoch, got -1"),
        (0, 1.0, "less than 4, the number of batches of an epoch, got 1.0"),
        (0, True, "less than 4, the number of batches of an epoch, got True"),
        (0, "1", "less than 4, the number of batches of an epoch, got '1'"),
        (-1, 0, "epoch must be a nonnegative integer, got -1"),
        (None, 0, "epoch must be a nonnegative integer, got None"),
        (1 << 31, 0, "epoch must be below 2147483648, got 2147483648"),
    ],
)
def test_a_batch_that_does_not_exist_is_refused(small: Path, epoch: Any, batch: Any, message: str) -> None:
    with make(small) as loader, Transformed(loader, dict) as transformed:
        assert len(loader) == 4
        for made in (loader, transformed):
            with pytest.raises(ValueError, match=message):
                made.batch_at(epoch, batch)
        assert equal(loader.batch_at(np.int64(0), np.int32(3)), loader.batch_at(0, 3))


def test_a_closed_loader_is_refused(small: Path) -> None:
    loader = make(small)
    transformed = Transformed(loader, dict)
    transformed.close()
    for made in (loader, transformed):
        with pytest.raises(dali_stream.DaliStreamError, match=r"This Loader is closed\. Make a new one"):
            made.batch_at(0, 0)


# ------------------------------------------------------------------------------------------------------- a Transformed


def noisy(frames: torch.Tensor) -> torch.Tensor:
    """Noise of all three generators."""
    return frames + torch.rand(frames.shape) + random.random() + float(np.random.random())


def summed(sample: dict[str, Any]) -> dict[str, Any]:
    """A sum whose rounding depends on the number of torch's threads, values that are no tensors, and random numbers."""
    total = torch.linspace(0, 1 + sample["index"] / 100, 1 << 16).square().sum()
    return {"sum": total, "index": sample["index"], "task": sample["task"], "noise": noisy(torch.zeros(9))}


def transformed(small: Path, workers: int, whole: bool, **arguments: Any) -> Transformed:
    transform, keys = (summed, None) if whole else (noisy, [TOP, SIDE])
    return Transformed(make(small, **arguments), transform, keys=keys, num_workers=workers, prefetch=2, device="cpu")


@pytest.mark.parametrize(("workers", "whole"), [(0, False), (2, True), slow(0, True)])
def test_a_batch_of_a_transformed_is_that_of_the_iteration(small: Path, workers: int, whole: bool) -> None:
    """Also in another process. The random numbers and the threads of training stay."""
    arguments: dict[str, Any] = {"batch_size": 24, "last_batch": "partial", "normalize": "mean_std"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with transformed(small, 0, whole, **arguments) as made:
        expected = [list(made) for _ in range(2)]
    torch.set_num_threads(own := 2 if workers else 1)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = torch.rand(1), random.random(), np.random.random()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with transformed(small, workers, whole, **arguments) as made:
        chosen, found, batches = [*places(expected), (0, 0)], [], list[list[Batch]]()
        found.append([made.batch_at(*place) for place in chosen])
        assert (made.epoch, made.batch_index) == (0, 0)
        for _ in range(2):
            batches.append([])
            for batch in made:
                batches[-1].append(batch)
                if len(batches[-1]) == 2:
                    state = made.state_dict()
                    found.append([made.batch_at(*place) for place in chosen])
                    assert (made.state_dict(), made.batch_index) == (state, 2)
        found.append([made.batch_at(*place) for place in chosen])
        assert (made.epoch, made.batch_index) == (2, 0)
    assert (torch.rand(1), random.random(), np.random.random(), torch.get_num_threads()) == (*drawn, own)
    torch.set_num_threads(threads)
    for each in found:
        assert all(equal(batch, batches[epoch][number]) for batch, (epoch, number) in zip(each, chosen, strict=True))
    for ours, theirs in zip(itertools.chain(*batches), itertools.chain(*expected), strict=True):
        same = ours.keys() - {"sum"}
        assert equal({key: ours[key] for key in same}, {key: theirs[key] for key in same})


def test_a_batch_of_a_transformed_that_is_resumed_on_two_ranks(small: Path) -> None:
    options: dict[str, Any] = {"consumers": 8, "last_batch": "pad"}
    with transformed(small, 0, False, batch_size=16, **options) as made:
        next(iter(made))
        state = made.state_dict()
    for rank in range(2):
        with transformed(small, 0, False, batch_size=12, rank=rank, world_size=2, **options) as made:
            made.load_state_dict(state)  # in the middle of a global batch of 24
            begin = made.batch_index
            before = made.batch_at(0, begin), made.batch_at(0, len(made) - 1)
            batches = list(made)
            assert equal(before[0], batches[0])
            assert equal(before[1], batches[-1])
            assert len(batches) == len(made) - begin


def test_an_error_of_the_function_leaves_the_iteration(small: Path) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if failing:
            raise KeyError("no such thing")
        return sample

    failing = False
    with Transformed(make(small), fails) as made:
        iterator = iter(made)
        next(iterator)
        failing = True
        with pytest.raises(dali_stream.DaliStreamError, match=r"transform failed for the sample .*no such thing"):
            made.batch_at(0, 0)
        failing = False
        assert made.batch_index == 1
        expected = made.batch_at(0, 1)
        assert equal(next(iterator), expected)


# ---------------------------------------------------------------------------------------------------------- the preview


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """A program with a function for `dali_graph`."""
    (path := tmp_path / "augmentation.py").write_text("from test_replay import AUGMENTED\nchanged = AUGMENTED['dali_graph']\n")
    return path


@pytest.mark.slow
def test_preview_shows_any_batch(graph_file: Path, small: Path, tmp_path: Path) -> None:
    """Augmented frames as the model sees them; actions and states as normalized numbers."""
    windows: list[Any] = ["--window", f"action={','.join(map(str, CHUNK))}", "--window", f"{TOP}=-0.1,0"]
    line: list[Any] = ["preview", small, "--epoch", 1, "--batch", 2, "--dali-graph", f"{graph_file}:changed", *windows]
    line += ["--batch-size", 6, "--seed", 7, "--consumers", 4, "--image-size", "48x64", "--normalize", "min_max", "--plots"]
    assert main([*map(str, line), "--out", str(tmp_path / "a.png")]) == 0
    _, batches = delivered(small, batch_size=6, consumers=4, **(AUGMENTED | {"normalize": "min_max"}))
    expected, found = batches[2], pictures(tmp_path / "a.png")
    assert [(said["sample"], said["camera"], said["step"]) for said, _ in found] == [
        (sample, camera, step)
        for sample in range(6)
        for camera, steps in ((TOP, 2), (SIDE, 1), ("dark", 2))
        for step in range(steps)
    ]
    padded = expected[f"{TOP}_is_pad"].tolist()
    for said, picture in found:
        frames = expected[said["camera"]][said["sample"]]
        [frame] = as_bytes(frames[said["step"]][None] if frames.ndim == 4 else frames[None])
        height = 20 if padded[said["sample"]][said["step"]] and said["camera"] == TOP else 0  # of the mark
        assert (picture == frame)[height:].all()
        assert said["index"] == expected["index"][said["sample"]]
    with Image.open(tmp_path / "a.png") as sheet:
        said, pixels = json.loads(sheet.text["dali_stream"]), np.asarray(sheet.convert("RGB"))
    assert said["title"].endswith("epoch 1, batch 2, seed 7")
    plots = [(plot["sample"], plot["key"]) for plot in said["plots"]]
    assert {(5, "action"), (0, "observation.state")} <= set(plots)
    for left, top, right, bottom in (plot["box"] for plot in said["plots"]):
        assert len(np.unique(pixels[top + 1 : bottom, left + 1 : right].reshape(-1, 3), axis=0)) > 2  # something is drawn


def shown(path: Path) -> list[int]:
    """The indices of the samples of a sheet."""
    return [said["index"] for said, _ in pictures(path) if said["camera"] == TOP]


@pytest.mark.parametrize("kind", slow_after(1, ["checkpoint", "state", "JSON"]))
def test_preview_of_a_state_shows_the_last_batch(kind: str, small: Path, tmp_path: Path) -> None:
    """The state is in a checkpoint with a model, alone in a file of torch.save, or in a JSON file. It has the order."""
    file, out = tmp_path / "saved", tmp_path / "a.png"
    options = ["--batch-size", "40", "--image-size", "48x64", "--device", "cpu"]
    line = ["preview", str(small), "--state", str(file), "--out", str(out), *options]

    def save(loader: Loader) -> None:
        if kind == "JSON":
            write_state(file, loader.state_dict())
        else:
            model = torch.nn.Linear(3, 4).state_dict()
            torch.save({"model": model, "loader": loader.state_dict()} if kind == "checkpoint" else loader.state_dict(), file)

    with make(small, shuffle="global" if kind == "JSON" else True, consumers=8, episode_pool_size=3) as loader:
        save(loader)
        assert main(line) == 2  # nothing was delivered yet
        first = list(loader)
        save(loader)
        assert main(line) == 0
        assert shown(out) == first[-1]["index"].tolist()  # of the epoch that has ended
        for batch in itertools.islice(loader, 2):  # noqa: B007
            save(loader)
    assert main(line) == 0
    assert shown(out) == batch["index"].tolist()
    for said, picture in pictures(out):
        assert (picture == as_bytes(batch[said["camera"]][said["sample"]][None])[0]).all()
    assert main([*line, "--epoch", "0", "--batch", "2"]) == 0
    assert shown(out) == first[2]["index"].tolist()
    assert main([*line, "--epoch", "0", "--batch", "2", "--batch-size", "20", "--rank", "1", "--world-size", "2"]) == 0
    assert shown(out) == first[2]["index"].tolist()[1::2]


def test_preview_normalizes_and_augments_a_dataset(small: Path, graph_file: Path, tmp_path: Path) -> None:
    graph_file.write_text("def black(nodes):\n    return nodes | {key: nodes[key] * 0 for key in nodes if 'images' in key}\n")
    line = [
        "preview",
        small,
        "--plots",
        "--normalize",
        "min_max",
        "--dali-graph",
        f"{graph_file}:black",
        "--window",
        "action=0,1",
    ]
    assert main([*map(str, line), "--out", str(tmp_path / "a.png")]) == 0
    assert not any(picture.any() for _, picture in pictures(tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def graph(nodes):\n    return nodes['top']\n", "line 2, in graph"),
        (
            "def graph(nodes):\n    return inner(nodes)\n\ndef inner(nodes):\n    return nodes + 1\n",
            "line 5, in inner: TypeError",
        ),
        ("import nothing_of_this_name\n", "line 1, in <module>: ModuleNotFoundError"),
        ("x = 1\ndef graph(nodes)\n", "line 2: SyntaxError"),
    ],
)
def test_an_error_of_a_graph_has_its_place(
    code: str, place: str, small: Path, graph_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    graph_file.write_text(code)
    line = ["preview", str(small), "--dali-graph", f"{graph_file}:graph", "--out", str(tmp_path / "a.png")]
    assert main(line) == 2
    assert f"{graph_file}, {place}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--epoch", "1"], 2, "--epoch and --batch must be given together, got 1 and None"),
        (["--epoch", "0", "--batch", "20"], 2, "batch must be at least 0 and less than 20"),
        (["--dali-graph", "x.py"], 2, "--dali-graph must be FILE.py:"),
        (["--state", "STATE", "--seed", "1"], 1, "seed was 7 in the run and is 1 here"),
        (["--state", "STATE"], 2, "--batch-size times --world-size must divide the position of --state, 40, got 9"),
        (["--state", "MODEL"], 2, "--state must be Loader.state_dict() or a checkpoint that has it"),
        (["--state", "TENSOR"], 2, "--state must be a checkpoint with a dict, got a Tensor"),
        (["--state", "CLASS"], 2, "must be a checkpoint that torch.load(weights_only=True) reads"),
        (["--state", "nothing.pt"], 2, "--state must be a file that can be read, got 'nothing.pt'"),
        (["--state", "LIST"], 2, "--state must be a JSON object, got a list"),
    ],
)
def test_what_does_not_fit_is_said(
    small: Path, arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / name) for name in ("STATE", "MODEL", "TENSOR", "CLASS", "LIST")}
    for name, content in (("MODEL", {"model": {}}), ("TENSOR", torch.zeros(2)), ("CLASS", {"loader": tmp_path})):
        torch.save(content, files[name])
    Path(files["LIST"]).write_text("[1]")
    with make(small, consumers=8) as loader:
        next(iter(loader))
        write_state(files["STATE"], loader.state_dict())
    line = ["preview", small, "--batch-size", 9, "--out", tmp_path / "a.png", *[files.get(word, word) for word in arguments]]
    assert message in failed(capsys, line, code)


def test_a_batch_after_resume_is_not_that_of_a_state_loaded_before(small: Path) -> None:
    with make(small, batch_size=40) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(small, batch_size=16) as loader:
        loader.load_state_dict(state)  # its position, 40, is not a multiple of 16
        loader.resume(epoch=0, batch=4)
        expected = loader.batch_at(0, 4)
        assert equal(next(iter(loader)), expected)
        assert loader.batch_at(0, 0)["index"].shape == (16,)


def test_close_ends_a_batch_at_in_another_thread(small: Path) -> None:
    (hang, hanging), errors = faults.hanging(), list[BaseException]()

    def take() -> None:
        try:
            loader.batch_at(0, 1)
        except Exception as error:
            errors.append(error)

    with Server(small) as server:
        dataset = Dataset(server.url, give_up_after_s=180, storage_options={"timeout": 180})
        loader = make(dataset)
        server.set_faults({path.relative_to(small).as_posix(): [hang] * 1000 for path in small.rglob("data/*/*.parquet")})
        taking = threading.Thread(target=take)
        taking.start()
        assert hanging.wait(60)
        loader.close()
        taking.join(60)
        assert not taking.is_alive()
    assert "closed" in str(errors[0])
