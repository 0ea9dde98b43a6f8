"""A batch of a run is made again from the run's description, bit for bit."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn
from PIL import Image
from support.batches import Batch, as_bytes, equal
from support.datasets import SIDE, TOP
from support.programs import failed, pictures
from support.servers import Server
from support.slow import slow, slow_after

import dali_stream
from dali_stream import Dataset, Loader, Mixture, ResumeError, augment, batch_at
from dali_stream.cli import main
from dali_stream.order.state import STATE_VERSION

OPTIONS: dict[str, Any] = {"batch_size": 40, "seed": 7, "device": "cpu", "num_threads": 2, "image_size": (48, 64)}
CHUNK = [step / 20 for step in range(6)]


def through_a_file(value: Any) -> Any:
    """Return a value as JSON brings it back."""
    return json.loads(json.dumps(value))


def delivered(dataset: Any, epochs: int = 2, **arguments: Any) -> tuple[dict[str, Any], list[list[Batch]]]:
    """The description of a run, and the batches of its epochs."""
    with Loader(dataset, **(OPTIONS | arguments)) as loader:
        batches = [list(loader) for _ in range(epochs)]
        return through_a_file(loader.describe()), batches


def check(config: dict[str, Any], batches: list[list[Batch]], **arguments: Any) -> None:
    """The second batch of the first epoch, and the first and the last batch of the last one."""
    for epoch, batch in {(0, 1), (len(batches) - 1, 0), (len(batches) - 1, len(batches[-1]) - 1)}:
        assert equal(batch_at(config, epoch, batch, **arguments), batches[epoch][batch])


def cropped(nodes: dict[str, Any], cameras: list[str], size: list[int]) -> dict[str, Any]:
    """Augment frames at random, and add an output."""
    draw = augment.Draw(nodes["sample"])
    for key in cameras:
        nodes[key] = augment.random_resized_crop(nodes[key], draw, size=size, scale=(0.3, 0.9))
    return nodes | {"dark": fn.flip(nodes[TOP], horizontal=1) * 0.5}


@pytest.fixture(scope="module")
def augmented(small: Path) -> tuple[dict[str, Any], list[list[Batch]]]:
    """A run with augmentation, normalization and windows."""
    return delivered(small, **AUGMENTED)


AUGMENTED: dict[str, Any] = {
    "dali_graph": functools.partial(cropped, cameras=[TOP, SIDE], size=[40, 56]),
    "normalize": {"action": "min_max", SIDE: "mean_std"},
    "delta_timestamps": {"action": CHUNK, TOP: [-0.1, 0.0]},
}


# ------------------------------------------------------------------------------------------------------------ any batch


@pytest.mark.parametrize(
    "arguments",
    [
        slow({"image_size": None}),
        {"image_dtype": "uint8", "memory_format": "contiguous", "shuffle": "global", "last_batch": "pad"},
        {"shuffle": "sharded", "consumers": 4},
        {"delta_timestamps": {"action": CHUNK, TOP: [-0.1, 0.0]}, "normalize": "mean_std", "consumers": 5},
        {"shuffle": False, "last_batch": "partial", "decode": "torchcodec"},
    ],
    ids=["plain", "resized", "sharded", "windows", "recorded"],
)
def test_a_batch_is_made_again_bit_for_bit(small: Path, arguments: dict[str, Any]) -> None:
    check(*delivered(small, **arguments))


@pytest.mark.slow
def test_augmentation_and_normalization_are_made_again(augmented: tuple[dict[str, Any], list[list[Batch]]]) -> None:
    check(*augmented, dali_graph=AUGMENTED["dali_graph"])


def test_each_rank_has_its_share(small: Path) -> None:
    ranks = [delivered(small, rank=rank, world_size=2, batch_size=16, last_batch="partial") for rank in range(2)]
    assert ranks[0][0] == ranks[1][0]  # the description is that of the run
    for rank, (config, batches) in enumerate(ranks):
        check(config, batches, rank=rank)


@pytest.mark.slow
def test_a_batch_of_a_mixture_is_made_again(demo: Path, small: Path) -> None:
    parts: dict[str, Any] = {
        "both": Dataset(demo, episodes=[0, 1, 4], drop_n_last_frames=5).without(["observation.object_yaws"]),
        "side": {"uri": small, "cameras": [SIDE]},
    }
    mixture = Mixture(parts, weights={"both": 2, "side": 1.5}, missing="pad", epoch_samples=130)
    check(*delivered(mixture, normalize="min_max_per_dataset", delta_timestamps={"action": CHUNK}))


def test_the_selection_of_a_dataset_is_part_of_the_description(demo: Path) -> None:
    part = Dataset(demo, episodes=[2, 3, 5], cameras=[SIDE], drop_n_first_frames=3)
    part = Dataset(demo, episodes=[2, 3, 5], cameras=[SIDE], drop_n_first_frames=3, stats=part.compute_stats(["action"]))
    config, batches = delivered(part, epochs=1, normalize={"action": "mean_std"})
    assert config["dataset"]["episodes"] == [[2, 4], [5, 6]]
    check(config, batches)
    frames = {0: [(3, 9), (20, 50)], 2: [(0, 40)], 5: [(7, 50)]}
    check(*delivered(Dataset(demo, frames=frames).split({"train": 0.9})["train"], epochs=1, batch_size=20))


def test_nothing_before_the_batch_is_read(demo_copy: Path) -> None:
    """A run in recorded order, whose videos of the episodes in the middle were deleted since."""
    config, batches = delivered(demo_copy, epochs=1, shuffle=False)
    (demo_copy / f"videos/{SIDE}/chunk-000/file-001.mp4").unlink()
    with pytest.raises(dali_stream.DecodeError, match="file-001"):
        delivered(demo_copy, epochs=1, shuffle=False)
    assert equal(batch_at(config, 0, len(batches[0]) - 1), batches[0][-1])


def test_a_run_that_was_resumed_with_another_global_batch(small: Path) -> None:
    """Its batches begin at other positions, until the epoch ends. Batches of an earlier Loader are refused."""
    options = OPTIONS | {"consumers": 8}
    with Loader(small, **options, rank=0, world_size=1) as loader:
        first = next(iter(loader))
        state, config = through_a_file(loader.state_dict()), through_a_file(loader.describe())
    assert equal(batch_at(config, 0, 0), first)
    options |= {"batch_size": 16}
    with Loader(small, **options) as loader:
        loader.load_state_dict(state)
        begin = loader.batch_index
        batches = [list(loader), list(loader)]
        config = through_a_file(loader.describe())
    for number in (0, len(batches[0]) - 1):
        assert equal(batch_at(config, 0, begin + number), batches[0][number])
    assert equal(batch_at(config, 1, 3), batches[1][3])
    with pytest.raises(ValueError, match=f"batch must be at least {begin}, where the run was resumed"):
        batch_at(config, 0, begin - 1)


def test_the_dataset_may_have_moved(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "old")
    config, batches = delivered(tmp_path / "old", epochs=1)
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(dali_stream.DatasetError, match="old"):
        batch_at(config, 0, 1)
    dataset = Dataset(tmp_path / "new")
    assert equal(batch_at(config, 0, 1, dataset=dataset), batches[0][1])
    with pytest.raises(ResumeError, match="another dataset or of other episodes"):
        batch_at(config, 0, 1, dataset=Dataset(small, episodes=[1]))


def test_what_does_not_fit_is_refused(augmented: tuple[dict[str, Any], list[list[Batch]]], small: Path) -> None:
    config, graph = augmented[0], AUGMENTED["dali_graph"]
    plain = config | {"dali_graph": None}
    with pytest.raises(ValueError, match=r"dali_graph must be the function of the run, .*:cropped with .*40, 56.*, got None"):
        batch_at(config, 0, 0)
    with pytest.raises(ValueError, match=r"got the arguments .*32, 32"):
        batch_at(config, 0, 0, functools.partial(cropped, cameras=[TOP, SIDE], size=[32, 32]))
    with pytest.raises(ValueError, match=r"dali_graph must be None, since the run had none, got .*:cropped"):
        batch_at(plain, 0, 0, graph)
    with pytest.raises(ValueError, match="batch must be below 4"):
        batch_at(config, 0, 4, graph)
    with pytest.raises(ValueError, match=r"epoch must be .*, got -1"):
        batch_at(config, -1, 0, graph)
    with pytest.raises(ValueError, match=r"config must be the result of Loader.describe\(\)"):
        batch_at({"seed": 1}, 0, 0)
    other = config | {"loader": config["loader"] | {"decode": "fastest"}}
    with pytest.raises(ValueError, match=r"decode .*must be 'auto' or 'dali' or .*, got 'fastest'"):
        batch_at(other, 0, 0, graph)
    for version in (1, 9):
        with pytest.raises(ResumeError, match=f"version of the config must be 2, got {version}"):
            batch_at(config | {"version": version}, 0, 0, graph)
    state = config["state"] | {"version": STATE_VERSION + 1}
    with pytest.raises(ResumeError, match=f"version of the state must be {STATE_VERSION}, got {STATE_VERSION + 1}"):
        batch_at(config | {"state": state}, 0, 0, graph)


def test_other_software_and_decoders_are_named(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, batches = delivered(small, epochs=1)
    check(config, batches)
    assert "Pixels" not in caplog.text
    other = config | {"software": config["software"] | {"torch": "1.0"}, "routes": config["routes"] | {TOP: "dali"}}
    assert equal(batch_at(other, 0, 0), batches[0][0])
    assert "Pixels may differ from those of the run: torch was 1.0 and is" in caplog.text
    assert f"the decoder of {TOP} was dali and is torchcodec" in caplog.text


def test_arguments_that_json_cannot_hold_are_none(small: Path) -> None:
    for graph in (functools.partial(cropped, [TOP]), functools.partial(cropped, size=object()), lambda nodes: nodes):
        with Loader(small, **OPTIONS, dali_graph=graph) as loader:
            found = loader.describe()["dali_graph"]
        assert found["arguments"] == ({} if "lambda" in found["function"] else None)


def test_a_description_holds_no_credentials(small: Path) -> None:
    with Server(small) as server:
        dataset = Dataset(server.url, storage_options={"headers": {"Authorization": "Bearer secret"}})
        with Loader(dataset, **OPTIONS) as loader:
            assert "secret" not in json.dumps(loader.describe())
            assert loader.describe()["dataset"]["uri"] == server.url


# ---------------------------------------------------------------------------------------------------------- the preview


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """A program with a function for `dali_graph`."""
    (path := tmp_path / "augmentation.py").write_text("from test_replay import cropped as changed\n")
    return path


@pytest.mark.slow
def test_preview_shows_the_batch_of_a_run(
    augmented: tuple[dict[str, Any], list[list[Batch]]], graph_file: Path, small: Path, tmp_path: Path
) -> None:
    """Augmented frames as they were, without their normalization; actions and states as numbers of the run."""
    config, batches = augmented
    (tmp_path / "run.json").write_text(json.dumps(config))
    line = ["preview", "--config", tmp_path / "run.json", "--epoch", 1, "--batch", 2, "--dali-graph", f"{graph_file}:changed"]
    assert main([*map(str, line), "--plots", "--batch-size", "6", "--out", str(tmp_path / "a.png")]) == 0
    plain, _ = delivered(small, epochs=0, **(AUGMENTED | {"normalize": None}))
    expected = batch_at(plain, 1, 2, AUGMENTED["dali_graph"])
    assert expected["index"].tolist() == batches[1][2]["index"].tolist()
    found = pictures(tmp_path / "a.png")
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
        assert np.abs(picture.astype(int) - frame)[height:].max() <= (said["camera"] == SIDE)  # normalized and back
        assert said["index"] == expected["index"][said["sample"]]
    with Image.open(tmp_path / "a.png") as sheet:
        said, pixels = json.loads(sheet.text["dali_stream"]), np.asarray(sheet.convert("RGB"))
    assert said["title"].endswith("epoch 1, batch 2, rank 0 of 1")
    plots = [(plot["sample"], plot["key"]) for plot in said["plots"]]
    assert {(5, "action"), (0, "observation.state")} <= set(plots)
    for left, top, right, bottom in (plot["box"] for plot in said["plots"]):
        assert len(np.unique(pixels[top + 1 : bottom, left + 1 : right].reshape(-1, 3), axis=0)) > 2  # something is drawn


@pytest.mark.parametrize("kind", slow_after(1, ["checkpoint", "state", "JSON"]))
def test_preview_of_a_state_shows_the_last_batch(kind: str, small: Path, tmp_path: Path) -> None:
    """The state is in a checkpoint with a model, alone in a file of torch.save, or in a JSON file."""
    file, out = tmp_path / "saved", str(tmp_path / "a.png")
    run = ["--config", str(tmp_path / "run.json"), "--state", str(file), "--out", out]

    def save(loader: Loader) -> None:
        if kind == "JSON":
            file.write_text(json.dumps(loader.state_dict()))
        else:
            model = torch.nn.Linear(3, 4).state_dict()
            torch.save({"model": model, "loader": loader.state_dict()} if kind == "checkpoint" else loader.state_dict(), file)

    with Loader(small, **OPTIONS) as loader:
        (tmp_path / "run.json").write_text(json.dumps(loader.describe()))
        save(loader)
        assert main(["preview", *run]) == 2  # nothing was delivered yet
        for batch in itertools.chain(loader, itertools.islice(loader, 1)):  # noqa: B007
            save(loader)
    assert main(["preview", str(small), *run]) == 0
    found = pictures(tmp_path / "a.png")
    assert [said["index"] for said, _ in found if said["camera"] == TOP] == batch["index"].tolist()
    for said, picture in found:
        assert (picture == as_bytes(batch[said["camera"]][said["sample"]][None])[0]).all()


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
    ("arguments", "message"),
    [
        (["preview"], "URI must be given, or --config"),
        (["preview", "URI", "--epoch", "1"], "--epoch must be given with --config"),
        (["preview", "--config", "RUN"], "--epoch and --batch must be given together"),
        (["preview", "--config", "RUN", "--epoch", "0", "--batch", "4"], "batch must be below 4"),
        (["preview", "--config", "RUN", "--epoch", "0", "--batch", "0", "--seed", "0"], "--seed must not be given"),
        (
            ["preview", "--config", "RUN", "--epoch", "0", "--batch", "0", "--image-size", "recorded"],
            "--image-size must not be given",
        ),
        (
            ["preview", "--config", "RUN", "--epoch", "0", "--batch", "0", "--dali-graph", "x.py"],
            "--dali-graph must be FILE.py:",
        ),
        (["preview", "--config", "nothing.json"], "--config must be a file that can be read, got 'nothing.json'"),
        (["preview", "--config", "STATE"], "config must be the result of Loader.describe()"),
        (["preview", "--state", "STATE"], "--config must be given"),
        (["preview", "--config", "RUN", "--state", "RUN"], "--state must be Loader.state_dict() or a checkpoint that has it"),
        (["preview", "--config", "RUN", "--state", "MODEL"], "--state must be Loader.state_dict() or a checkpoint that has it"),
        (["preview", "--config", "RUN", "--state", "TENSOR"], "--state must be a checkpoint with a dict, got a Tensor"),
        (["preview", "--config", "RUN", "--state", "CLASS"], "must be a checkpoint that torch.load(weights_only=True) reads"),
        (["preview", "--config", "RUN", "--state", "nothing.pt"], "--state must be a file that can be read, got 'nothing.pt'"),
    ],
)
def test_what_is_missing_is_said(
    run: tuple[Path, Path], arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"RUN": str(run[0]), "STATE": str(run[1])}
    for name, content in (("MODEL", {"model": {}}), ("TENSOR", torch.zeros(2)), ("CLASS", {"loader": run[0]})):
        torch.save(content, path := tmp_path / f"{name}.pt")
        files[name] = str(path)
    assert message in failed(capsys, [files.get(argument, argument) for argument in arguments], 2)


@pytest.fixture(scope="module")
def run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The description of a run, and a state without one."""
    folder = tmp_path_factory.mktemp("run")
    with Loader(small, **OPTIONS) as loader:
        (folder / "run.json").write_text(json.dumps(loader.describe()))
        (folder / "state.json").write_text(json.dumps(loader.state_dict() | {"epoch": 1}))
    return folder / "run.json", folder / "state.json"
