"""The integration with LeRobot, tested without LeRobot. `make test-lerobot` runs LeRobot's own script."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from support import lerobot_script
from support.clouds import Hub
from support.datasets import ODD_CAMERA, change_info, image_file
from support.lerobot_script import MapDataset
from support.slow import slow, slow_after

import dali_stream
from dali_stream.cli import main
from dali_stream.errors import DaliStreamError
from dali_stream.integrations import lerobot
from dali_stream.integrations.lerobot import parts
from dali_stream.integrations.lerobot.arguments import split_arguments
from dali_stream.system import cpu

TOP, SIDE, TOUCH = (f"observation.images.{name}" for name in ("top", "side", "touch"))
Train = Callable[..., Any]
PREPARE = Accelerator.prepare


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


# ----------------------------------------------------------------------- command line


def test_arguments_of_the_loader_are_separated() -> None:
    words = [
        "--batch_size=8",
        "--loader.image_size=224x320",
        "--loader.shuffle",
        "global",
        "--loader.num_threads=2",
        "--steps",
        "9",
    ]
    for text, value in (("true", True), ("sharded", "sharded"), ("global", "global")):
        assert split_arguments([f"--loader.shuffle={text}"])[0] == {"shuffle": value}
    given, rest = split_arguments([*words, "--loader.shuffle=false"])
    assert given == {"image_size": (224, 320), "shuffle": False, "num_threads": 2}
    assert rest == ["--batch_size=8", "--steps", "9"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--loader.prefetch=many", "--loader.prefetch must be an integer, got 'many'"),
        ("--loader.image_size=224", "--loader.image_size must be HEIGHTxWIDTH"),
        ("--loader.max_substitutes=x", "--loader.max_substitutes must be a number, got 'x'"),
        ("--loader.decode", "--loader.decode must have a value"),
        ("--loader.batch_size=8", "got 'batch_size'. LeRobot's own arguments set all others"),
    ],
)
def test_a_wrong_argument_of_the_loader_is_an_error(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lerobot-train", word, "--batch_size=8"]) == 2
    assert said in capsys.readouterr().err


def test_without_lerobot_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    assert main(["lerobot-train", "--help"]) == 1
    assert "pip install 'lerobot[training]'" in capsys.readouterr().err


# ----------------------------------------------------------------------- make_loader


def test_a_loader_follows_the_dataset_and_the_policy(demo: Path) -> None:
    policy = SimpleNamespace(drop_n_last_frames=5)
    own = dali_stream.Dataset(demo, episodes=[0, 2], drop_n_last_frames=5, tolerance_s=1e-4)
    with lerobot.make_loader(MapDataset(demo, [0, 2]), policy, batch_size=8, seed=4, device="cpu") as loader:
        windows = {"action": [0.0, 1 / own.fps]}
        with dali_stream.Loader(
            own, batch_size=8, seed=4, delta_timestamps=windows, device="cpu", memory_format="contiguous", last_batch="partial"
        ) as wanted:
            for ours, theirs in zip(loader, wanted, strict=True):
                assert ours["index"].tolist() == theirs["index"].tolist()
                assert torch.equal(ours[TOP], theirs[TOP])
                assert ours[TOP].is_contiguous()
                assert ours["action"].shape[1] == 2


def test_frames_have_the_dtype_of_the_dataset(demo: Path) -> None:
    for uint8, dtype in ((True, torch.uint8), (False, torch.float32)):
        with lerobot.make_loader(MapDataset(demo, _return_uint8=uint8), batch_size=4, device="cpu") as loader:
            assert next(iter(loader))[TOP].dtype == dtype


def with_images(root: Path) -> torch.Tensor:
    """Add a camera of images in rows to a dataset, and return its frames by `index`, as LeRobot 0.6.1 delivers them."""
    frames = []
    for path in sorted(root.glob("data/*/*.parquet")):
        table, files = pq.read_table(path), []
        for episode, frame in zip(table["episode_index"].to_pylist(), table["frame_index"].to_pylist(), strict=True):
            image = np.random.default_rng([episode, frame]).integers(0, 256, (16, 24, 3), np.uint8)
            files.append({"bytes": image_file(Image.fromarray(image)), "path": None})
            frames.append(torch.from_numpy(image).movedim(-1, 0).to(torch.float32).div(255))
        column = pa.array(files, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        pq.write_table(table.append_column(TOUCH, column), path)
    features = json.loads((root / "meta/info.json").read_text())["features"]
    change_info(root, features=features | {TOUCH: {"dtype": "image", "shape": [16, 24, 3], "names": None}})
    return torch.stack(frames)


@pytest.mark.usefixtures("gamma_of_lerobot")
def test_images_in_rows_are_float32_beside_video_of_uint8(demo_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As LeRobot 0.6.1 delivers them whatever `return_uint8` is. Its transforms get what it delivers."""
    images = with_images(demo_copy)

    def batch(transform: Any = None, workers: int = 2, **arguments: Any) -> dict[str, Any]:
        dataset = MapDataset(demo_copy, [1], _return_uint8=True, image_transforms=transform)
        with lerobot.make_loader(dataset, batch_size=8, device="cpu", num_workers=workers, **arguments) as loader:
            return next(iter(loader))

    plain, whole = batch(), batch(image_dtype="uint8")  # without transforms, there is no work for workers
    wanted = images[plain["index"]]
    assert torch.equal(plain[TOUCH], wanted)
    assert plain[TOUCH].dtype == torch.float32
    assert whole[TOUCH].dtype == torch.uint8
    assert plain.keys() == whole.keys()
    for key in plain.keys() - {TOUCH}:
        assert plain[key] == whole[key] if isinstance(plain[key], list) else torch.equal(plain[key], whole[key])
    halved, brighter = batch(Halved(), 0), batch(GammaCorrection(), 0)
    for transformed, factor, exponent in ((halved, 0.5, 1), (brighter, 1, 0.5)):
        assert torch.equal(transformed[TOUCH], wanted**exponent * factor)
        assert (transformed["index"].tolist(), transformed["task"]) == (plain["index"].tolist(), plain["task"])
    assert torch.equal(halved[TOP], plain[TOP] // 2)
    assert torch.equal(brighter[TOP], ((plain[TOP] / 255) ** 0.5 * 255).round().to(torch.uint8))
    assert caplog.text.count("have no effect on uint8 frames: GammaCorrection") == 1


@pytest.mark.slow
def test_workers_transform_cameras_of_both_types(demo_copy: Path) -> None:
    with_images(demo_copy)
    dataset = MapDataset(demo_copy, [1], _return_uint8=True, image_transforms=Halved())
    with (
        lerobot.make_loader(dataset, batch_size=8, device="cpu") as here,
        lerobot.make_loader(dataset, batch_size=8, device="cpu", num_workers=2) as there,
    ):
        for ours, theirs in zip(here, there, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in (TOP, SIDE, TOUCH, "index", "action"))
            assert ours["task"] == theirs["task"]


@pytest.mark.usefixtures("gamma_of_lerobot")
def test_a_dataset_of_images_is_float32(odd: Path, caplog: pytest.LogCaptureFixture) -> None:
    def frames(**arguments: Any) -> Any:
        dataset = MapDataset(odd, delta_timestamps=None, **arguments)
        with lerobot.make_loader(dataset, batch_size=8, device="cpu") as loader:
            return next(iter(loader))[ODD_CAMERA]

    plain = frames(_return_uint8=True)
    assert plain.dtype == torch.float32
    assert torch.equal(plain, frames(_return_uint8=False))
    assert torch.equal(frames(_return_uint8=True, image_transforms=GammaCorrection()), plain**0.5)
    assert "uint8" not in caplog.text  # LeRobot's transform has an effect on these frames


def test_a_feature_that_is_not_delivered_is_an_error(demo: Path) -> None:
    dataset = MapDataset(demo)
    dataset.meta.features["observation.depth"] = {"dtype": "video", "shape": (1,)}
    with pytest.raises(ValueError, match=r"no features but those that a Loader delivers, got observation\.depth"):
        lerobot.make_loader(dataset, batch_size=4)


def test_a_streamed_dataset_is_read_from_the_hub(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and frames are read from the repository, and nothing is written to the folder of the metadata."""
    (tmp_path / "meta").mkdir()
    with Hub({"datasets/owner/robot": demo}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        streamed = MapDataset(demo, streaming_from_local=False)
        streamed.meta.root = tmp_path
        metadata = streamed.meta
        newer = MapDataset(
            demo, streaming_from_local=False, _data_root=f"hf://datasets/owner/robot@{hub.commit('datasets/owner/robot')}"
        )
        newer.meta.root = tmp_path
        for dataset in (streamed, newer, metadata):
            with (
                lerobot.make_loader(dataset, batch_size=4, device="cpu", image_size=(24, 32)) as loader,
                lerobot.make_loader(MapDataset(demo), batch_size=4, device="cpu", image_size=(24, 32)) as local,
            ):
                assert loader.dataset.uri.startswith("hf://datasets/owner/robot@")
                ours, theirs = next(iter(loader)), next(iter(local))
                assert torch.equal(ours[TOP], theirs[TOP])
    assert [path.name for path in tmp_path.rglob("*")] == ["meta"]


# ----------------------------------------------------------------------- image transforms


class Jitter:
    """A transform as torchvision has them: random numbers of torch's."""

    def __init__(self, *parts: Any) -> None:
        self.transforms = list(parts)

    def __call__(self, frame: torch.Tensor) -> torch.Tensor:
        return frame * torch.rand(1)


def transformed(demo: Path, **arguments: Any) -> dali_stream.Loader | dali_stream.Transformed:
    dataset = MapDataset(demo, [0, 1], image_transforms=Jitter())
    return lerobot.make_loader(dataset, batch_size=8, device="cpu", image_size=(24, 32), consumers=8, **arguments)


def by_frame(loader: dali_stream.Loader | dali_stream.Transformed, steps: int) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for _, batch in zip(range(steps), loader, strict=False):  # takes no batch more
        found |= dict(zip(batch["index"].tolist(), batch[TOP], strict=True))
    return found


@pytest.mark.slow
def test_transforms_are_repeated_by_a_resumed_run(demo: Path) -> None:
    """On another number of ranks, and in every epoch with other numbers."""
    with transformed(demo) as loader:
        whole = by_frame(loader, 6)
        again = by_frame(loader, len(loader))
    with transformed(demo) as loader:
        for _ in zip(range(2), loader, strict=False):
            pass
        state = loader.state_dict()
    resumed: dict[int, torch.Tensor] = {}
    for rank in range(2):
        with transformed(demo, rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            resumed |= by_frame(loader, 2)
    assert len(resumed) == 32
    assert all(torch.equal(frame, whole[index]) for index, frame in resumed.items())
    assert not any(torch.equal(frame, again[index]) for index, frame in whole.items())


def test_transforms_leave_the_random_numbers_of_training(demo: Path) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with transformed(demo) as loader:
        by_frame(loader, 2)
    assert torch.equal(torch.rand(3), wanted)


def test_a_transform_is_applied_to_each_sample(demo: Path) -> None:
    """With the same numbers for no two of them, and for cameras one after the other as LeRobot does."""
    with (
        transformed(demo) as loader,
        lerobot.make_loader(MapDataset(demo, [0, 1]), batch_size=8, device="cpu", image_size=(24, 32), consumers=8) as plain,
    ):
        ours, theirs = next(iter(loader)), next(iter(plain))
    factors = [(ours[key] / theirs[key].clamp(min=1e-6)).amax(dim=(1, 2, 3)) for key in (TOP, SIDE)]
    assert len({round(factor, 3) for factor in torch.cat(factors).tolist()}) == 16


@pytest.mark.slow
def test_workers_apply_the_same_transforms(demo: Path) -> None:
    with transformed(demo) as here, transformed(demo, num_workers=2) as there:
        assert there.loader._config.num_threads == max(cpu.cores() - 2, 1)
        for ours, theirs in zip(here, there, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in (TOP, SIDE, "index"))


class GammaCorrection:
    """As in LeRobot 0.6.1: it returns uint8 frames unchanged."""

    def __call__(self, frame: torch.Tensor) -> torch.Tensor:
        return frame**0.5 if frame.is_floating_point() else frame


class Halved:
    """A transform that keeps the type of frames."""

    def __call__(self, frame: torch.Tensor) -> torch.Tensor:
        return frame * 0.5 if frame.is_floating_point() else frame // 2


class ImageTransforms:
    """As in LeRobot: several transforms by name."""

    def __init__(self, *parts: Any) -> None:
        self.transforms = dict(enumerate(parts or (GammaCorrection(),)))

    def __call__(self, frame: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms.values():
            frame = transform(frame)
        return frame


def scaled_to_minus_one(frame: torch.Tensor) -> torch.Tensor:
    return frame * 3 - 1


def to_bytes(frame: torch.Tensor) -> torch.Tensor:
    return (frame * 255).round().to(torch.uint8)


@pytest.fixture
def gamma_of_lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let GammaCorrection be a class of LeRobot."""
    monkeypatch.setattr(GammaCorrection, "__module__", "lerobot.transforms.transforms")


@pytest.mark.usefixtures("gamma_of_lerobot")
def test_transforms_for_floats_have_an_effect_on_uint8_frames(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    def frames(uint8: bool, **arguments: Any) -> torch.Tensor:
        dataset = MapDataset(demo, [0], _return_uint8=uint8, **arguments)
        with lerobot.make_loader(dataset, batch_size=8, device="cpu") as loader:
            return next(iter(loader))[TOP]

    plain, ours = frames(True), frames(True, image_transforms=ImageTransforms())
    assert torch.equal(frames(True, image_transforms=GammaCorrection()), ours)
    assert "these have no effect on uint8 frames: GammaCorrection" in caplog.text
    assert ours.dtype == torch.uint8
    assert torch.equal(ours, ((plain / 255) ** 0.5 * 255).round().to(torch.uint8))
    assert not torch.equal(ours, plain)
    caplog.clear()
    assert torch.equal(frames(False, image_transforms=ImageTransforms()), frames(False) ** 0.5)
    assert not caplog.text
    with pytest.raises(DaliStreamError, match=r"image_transforms must return values from 0 to 1, got torch.float32 from -"):
        frames(True, image_transforms=ImageTransforms(GammaCorrection(), scaled_to_minus_one))
    as_bytes = frames(True, image_transforms=ImageTransforms(GammaCorrection(), to_bytes))
    assert torch.equal(as_bytes, ours)


def test_a_transform_that_cannot_reach_a_worker_is_an_error(demo: Path) -> None:
    dataset = MapDataset(demo, image_transforms=lambda frame: frame)
    with pytest.raises(ValueError, match="transform must be picklable"):
        lerobot.make_loader(dataset, batch_size=4, device="cpu", num_workers=1)


# ----------------------------------------------------------------------- the script


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The replacement for LeRobot's script, imported under its name. Tests of resuming use that of an older version, too."""
    return imported(monkeypatch, getattr(request, "param", True))


both_scripts = pytest.mark.parametrize("script", [False, True], ids=["0.6.1", "newer"], indirect=True)


def imported(monkeypatch: pytest.MonkeyPatch, newer: bool = True) -> Any:
    """A new replacement, as in another process."""
    modules = lerobot_script.modules(newer)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Accelerator, "prepare", PREPARE)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9" if name == "lerobot" else version(name))
    return modules["lerobot.scripts.lerobot_train"]


@pytest.fixture
def train(script: Any, demo: Path, tmp_path: Path) -> Train:
    """Trains, and closes the Loader."""

    def trained(**values: Any) -> Any:
        result = sys.modules["lerobot.scripts.lerobot_train"].train(lerobot_script.config(demo, tmp_path, **values))
        result.loader.close()
        return result

    return trained


@both_scripts
def test_a_run_continues_at_the_next_sample(train: Train, tmp_path: Path) -> None:
    """In mid-epoch, also with another batch size, and at an epoch's end; the policy has the image size, too."""
    lerobot.patch(image_size=(24, 32))
    whole = train(episodes=[0], batch_size=16, steps=9, save_at=(2,))
    length = len(whole.loader)
    assert 2 < length < 9
    train(episodes=[0], batch_size=16, steps=length, save_at=(length,))
    for step in (2, length):
        rest = train(episodes=[0], batch_size=16, steps=9, resume=True, checkpoint_path=tmp_path / str(step))
        assert rest.steps == whole.steps[step:]
        assert rest.shapes == {TOP: (3, 24, 32), SIDE: (3, 24, 32)}
        assert rest.batch[TOP].shape[-2:] == (24, 32)
    other = train(episodes=[0], batch_size=8, steps=5, resume=True, checkpoint_path=tmp_path / "2")  # which steps cannot tell
    assert flat(other.steps) == flat(whole.steps[2:])[:24]


def test_a_resumed_run_keeps_the_image_size(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lerobot.patch(image_size=(24, 32))
    train(steps=2, save_at=(2,))
    imported(monkeypatch)
    lerobot.patch()  # as another process that is not told the size
    result = train(steps=3, resume=True, checkpoint_path=tmp_path / "2")
    assert result.batch[TOP].shape[-2:] == (24, 32)


# ----------------------------------------------------------------------- frames at deployment


def test_the_saved_preprocessor_resizes_as_the_loader(train: Train, demo: Path, tmp_path: Path) -> None:
    """With LeRobot's own class, without this package; up to the rounding of the Loader's frames to uint8."""
    lerobot.patch(image_size=(24, 32))
    result = train(steps=2, save_at=(2,), seed=5)
    assert all(result.processed[key] is result.batch[key] for key in (TOP, SIDE))  # these have the size already
    deployed = lerobot_script.Pipeline.from_pretrained(tmp_path / "2/pretrained_model")
    assert [type(step) for step in deployed.steps] == [
        lerobot_script.RenameProcessorStep,
        lerobot_script.ImageCropResizeProcessorStep,
    ]
    with lerobot.make_loader(MapDataset(demo), batch_size=8, seed=5, device="cpu") as loader:
        recorded = list(itertools.islice(loader, 2))[1]
    assert recorded["index"].tolist() == result.steps[1]
    for key in (TOP, SIDE):
        resized = deployed({key: recorded[key]})[key]
        assert resized.shape == result.batch[key].shape
        assert (resized - result.batch[key]).abs().max() < 1 / 255


def test_windows_and_their_masks_pass_the_preprocessor(train: Train, demo: Path) -> None:
    lerobot.patch(image_size=(24, 32))
    fps = dali_stream.Dataset(demo).fps
    result = train(attributes={"delta_timestamps": {TOP: [-1 / fps, 0.0]}})
    assert result.batch[TOP].shape[1:] == (2, 3, 24, 32)
    assert result.processed[TOP] is result.batch[TOP]
    assert result.processed[f"{TOP}_is_pad"] is result.batch[f"{TOP}_is_pad"]


def test_a_new_run_from_a_checkpoint_keeps_its_image_size(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lerobot.patch(image_size=(24, 32))
    train(steps=2, save_at=(2,))
    imported(monkeypatch)
    lerobot.patch()
    result = train(policy=lerobot_script.policy(tmp_path / "2/pretrained_model"), save_at=(4,))
    assert result.batch[TOP].shape[-2:] == (24, 32)
    assert saved_size(tmp_path / "4") == [24, 32]


def test_a_new_run_from_a_checkpoint_changes_its_image_size_with_a_warning(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lerobot.patch(image_size=(24, 32))
    train(steps=2, save_at=(2,))
    imported(monkeypatch)
    lerobot.patch(image_size=(48, 64))
    result = train(policy=lerobot_script.policy(tmp_path / "2/pretrained_model"), save_at=(4,))
    assert f"input {TOP} from 24x32 to 48x64. Pass --loader.image_size=24x32 to keep" in caplog.text
    assert result.shapes == {TOP: (3, 48, 64), SIDE: (3, 48, 64)}
    assert result.batch[TOP].shape[-2:] == (48, 64)
    assert saved_size(tmp_path / "4") == [48, 64]


def saved_size(checkpoint: Path) -> list[int]:
    """The size of the only resizing step in a checkpoint's preprocessor."""
    steps = json.loads((checkpoint / "pretrained_model/policy_preprocessor.json").read_text())["steps"]
    [size] = [step["config"]["resize_size"] for step in steps if step["registry_name"] == "image_crop_resize_processor"]
    return list(size)


@pytest.mark.parametrize(("key", "dtype"), [("observation.top", "video"), ("observation.image_quality", "float32")])
def test_image_size_needs_names_that_the_resizing_step_recognizes(key: str, dtype: str, train: Train, demo: Path) -> None:
    meta = MapDataset(demo).meta
    meta.features[key] = {"dtype": dtype, "shape": (128, 160, 3)}
    meta.camera_keys += [key] * (dtype == "video")
    lerobot.patch(image_size=(24, 32))
    with pytest.raises(ValueError, match=rf"must contain 'image', got '{key}'.*--rename_map"):
        train(attributes={"meta": meta})


def test_image_size_is_refused_with_depth_cameras(
    train: Train, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LeRobot's step, which a checkpoint would contain, clamps distances to [0, 1]."""

    def with_depth() -> Any:
        meta = MapDataset(demo).meta
        meta.features[SIDE]["info"] = {"is_depth_map": True}
        return {"meta": meta}

    says = rf"image_size must not be given with depth cameras, got \(24, 32\) and {SIDE}"
    lerobot.patch(image_size=(24, 32))
    train(steps=2, save_at=(2,))
    with pytest.raises(ValueError, match=says):
        train(attributes=with_depth())
    imported(monkeypatch)
    lerobot.patch()
    with pytest.raises(ValueError, match=says):  # the size of the checkpoint
        train(policy=lerobot_script.policy(tmp_path / "2/pretrained_model"), attributes=with_depth())


def test_a_preprocessor_that_crops_is_refused() -> None:
    cropping = lerobot_script.Pipeline([lerobot_script.ImageCropResizeProcessorStep({TOP: [0, 0, 9, 9]}, [24, 32])])
    with pytest.MonkeyPatch.context() as patch:
        imported(patch)
        with pytest.raises(ValueError, match="crops the recorded frames"):
            lerobot.add_resizing(cropping, (24, 32))


# ----------------------------------------------------------------------- resume


def test_rank_0_saves_the_state_of_a_run(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lerobot.patch()
    whole = train(steps=4, save_at=(2,))
    folder, names = tmp_path / "2/training_state", ("dali_stream.json", "dali_stream_arguments.json")
    assert sorted(path.name for path in folder.glob(".*") if path.is_file()) == []
    assert sorted(path.name for path in folder.glob("dali_stream*")) == list(names)
    state = json.loads((folder / names[0]).read_text())
    assert (state["epoch"], state["position"]) == (0, 2 * len(whole.steps[0]))
    monkeypatch.setattr("dali_stream.integrations.lerobot.script._is_first", lambda: False)
    train(steps=1, save_at=(1,))
    assert list((tmp_path / "1/training_state").glob("dali_stream*")) == []


HOSTILE_ARGUMENTS: dict[str, Any] = {
    "[1]": "the file must be a dict, got '\\[1\\]'",
    "null": "the file must be a dict, got 'None'",
    '"image_size"': "the file must be a dict, got 'image_size'",
    '{"nonsense": 1}': "Unknown key 'nonsense' in the file",
    '{"batch_size": 4}': "Unknown key 'batch_size' in the file",
    '{"dali_graph": 4}': "Unknown key 'dali_graph' in the file",
    '{"image_size": [24]}': r"image_size of the file must be \[height, width\] or null, got '\[24\]'",
    '{"image_size": {"a": 1}}': r"image_size of the file must be",
    '{"num_threads": 1000000000}': "num_threads of the file must be an integer from 1 to 1048576 or null, got '1000000000'",
    '{"consumers": "4"}': "consumers of the file must be an integer",
    '{"shuffle": "no"}': "shuffle of the file must be true or false or 'global' or 'sharded' or null, got 'no'",
    '{"memory_budget": [1]}': "memory_budget of the file must be",
    '{"frame_cache": 1}': "frame_cache of the file must be a text or null, got '1'",
    '{"max_substitutes": NaN}': "max_substitutes of the file must be a number",
    '{"shuffle": false, "shuffle": true}': "the key 'shuffle' is duplicated",
    "[" * 99: "JSON",
}


@pytest.mark.parametrize("content", slow_after(5, HOSTILE_ARGUMENTS))
def test_arguments_of_a_checkpoint_are_checked(
    content: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lerobot.patch(image_size=(24, 32), shuffle="global")
    whole = train(episodes=[0], steps=3, save_at=(2,))
    resume = {"episodes": [0], "steps": 3, "resume": True, "checkpoint_path": tmp_path / "2"}
    file = tmp_path / "2/training_state/dali_stream_arguments.json"
    file.write_text(content)
    imported(monkeypatch)
    lerobot.patch()
    with pytest.raises(
        dali_stream.ResumeError, match=rf"^{re.escape(str(file))}.*{HOSTILE_ARGUMENTS[content]}.*Remove"
    ) as raised:
        train(**resume)
    file.unlink()  # as the message says
    imported(monkeypatch)
    arguments, rest = split_arguments(["--loader.image_size=24x32", "--loader.shuffle=global"])
    assert not rest
    lerobot.patch(**arguments)
    again = train(**resume)
    assert again.steps == whole.steps[2:]
    assert all(torch.equal(again.frames[0][key], whole.frames[2][key]) for key in (TOP, SIDE))
    assert str(raised.value).count("dali_stream_arguments.json") == 1


def test_a_checkpoint_chooses_no_folder_to_write_to(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger may have written it. The user passes the folder of an own run again."""
    folder, options = tmp_path / "my frames", {"episodes": [0], "resume": True, "checkpoint_path": tmp_path / "2"}
    lerobot.patch(image_size=(24, 32), frame_cache=folder, frame_cache_bytes="1MiB")
    whole = train(episodes=[0], steps=4, save_at=(2,))
    shutil.rmtree(folder)
    imported(monkeypatch)
    lerobot.patch()
    caplog.clear()
    resumed = train(**options, steps=4, save_at=(3,))
    assert not folder.exists()
    [warning] = [record.getMessage() for record in caplog.records if "frame_cache" in record.getMessage()]
    saved = json.loads((tmp_path / "3/training_state/dali_stream_arguments.json").read_text())
    assert saved == {"image_size": [24, 32]}
    [words] = re.findall(r"Pass (.*) to use its folder", warning)
    arguments, rest = split_arguments(shlex.split(words))
    assert (arguments, rest) == ({"frame_cache": str(folder), "frame_cache_bytes": "1MiB"}, [])
    imported(monkeypatch)
    lerobot.patch(**arguments)
    caplog.clear()
    again = train(**options, steps=4)
    assert list(folder.glob("*/*/*"))
    assert "not taken from a checkpoint" not in caplog.text
    for run in (resumed, again):
        assert run.steps == whole.steps[2:]
        assert all(torch.equal(run.frames[n][key], whole.frames[n + 2][key]) for n in range(2) for key in (TOP, SIDE))


def test_a_checkpoint_with_a_description_of_its_run_is_resumed(train: Train, tmp_path: Path) -> None:
    """As earlier versions wrote it. Only the state and the arguments are read."""
    lerobot.patch(image_size=(24, 32), consumers=4)
    whole = train(steps=5, save_at=(3,))
    folder = tmp_path / "3/training_state"
    saved = json.loads((folder / "dali_stream.json").read_text())
    order = {"shuffle": True, "seed": 3, "consumers": 4, "episode_pool_size": 8}
    state = {"version": 2, "epoch": 0, "position": 24, "order": order, "dataset": saved["dataset"]}
    arguments = {"image_size": [24, 32], "consumers": 4}
    run = {
        "version": 2,
        "software": {"dali-stream": "0.1.0", "torch": "2.7.0"},
        "dataset": {"uri": "/nowhere", "clock": "timestamp", "tolerance_s": 0.0125},
        "loader": {"batch_size": 8, "world_size": 1, "image_size": [24, 32], **order, "device": "cpu", "last_batch": "drop"},
        "dali_graph": None,
        "routes": {TOP: "torchcodec", SIDE: "torchcodec"},
        "state": {"version": 2, "dataset": saved["dataset"], "order": order},
        "begin": None,
    }
    for name, content in (("", state), ("_arguments", arguments), ("_run", run)):
        (folder / f"dali_stream{name}.json").write_text(json.dumps(content))
    rest = train(steps=5, resume=True, checkpoint_path=tmp_path / "3", save_at=(5,))
    assert rest.steps == whole.steps[3:]
    assert not (tmp_path / "5/training_state/dali_stream_run.json").exists()


@both_scripts
def test_a_checkpoint_without_a_state_is_resumed_by_its_steps(
    script: Any, train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lerobot.patch()
    whole = train(steps=5, save_at=(3,))
    for path in (tmp_path / "3/training_state").glob("dali_stream*"):
        path.unlink()
    assert train(steps=5, resume=True, checkpoint_path=tmp_path / "3").steps == whole.steps[3:]
    assert f"in which no sample repeats, resume from a checkpoint at step {len(whole.loader)}," in caplog.text
    step_file = tmp_path / "3/training_state/training_step.json"
    saved = json.loads(step_file.read_text())
    assert ("does not contain the number of its processes" in caplog.text) == ("dp_world_size" not in saved)
    with pytest.raises(dali_stream.ResumeError, match=r"8 samples .* now have 4 .* Resume with the same numbers"):
        train(steps=5, batch_size=4, resume=True, checkpoint_path=tmp_path / "3")
    for name in ("num_processes", "dp_world_size"):
        step_file.write_text(json.dumps({"step": 3, name: 2}))
        with pytest.raises(dali_stream.ResumeError, match=r"8 samples on each of 2 processes, and now have 8 on each of 1,"):
            train(steps=5, resume=True, checkpoint_path=tmp_path / "3")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 4}, r"--seed=3 \(now 4\)"),
        slow({"episodes": [0, 1, 2]}, r"--dataset\.episodes=\[0, 1\] \(now \[0, 1, 2\]\)"),
        slow({"policy": {"drop_n_last_frames": 7}}, r"--policy\.drop_n_last_frames=0 \(now 7\)"),
    ],
)
def test_a_resume_with_other_samples_says_what_to_do(
    changed: dict[str, Any], said: str, train: Train, demo: Path, tmp_path: Path
) -> None:
    """And both ways on that it names work."""
    lerobot.patch(image_size=(24, 32))
    train(episodes=[0, 1], steps=3, save_at=(3,))
    values = {"episodes": [0, 1], "steps": 4} | changed
    policy = values.pop("policy", {})
    resume = {**values, "resume": True, "checkpoint_path": tmp_path / "3"}
    with pytest.raises(dali_stream.ResumeError, match=f"was made with {said}, so its position") as caught:
        train(**resume, policy=lerobot_script.policy(**policy))
    [weights] = re.findall(r"--policy\.path=(\S+)", str(caught.value))
    [state] = re.findall(r"remove (\S+)", str(caught.value))
    whole = train(**values, policy=lerobot_script.policy(**policy))
    assert train(**values, policy=lerobot_script.policy(Path(weights.rstrip(".")), **policy)).steps == whole.steps
    Path(state).unlink()
    assert train(**resume, policy=lerobot_script.policy(**policy)).steps == whole.steps[3:]


def test_a_resume_with_another_order_of_the_loader_names_the_argument(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lerobot.patch()
    train(steps=3, save_at=(3,))
    imported(monkeypatch)
    lerobot.patch(shuffle="global")
    with pytest.raises(dali_stream.ResumeError, match=r'--loader\.shuffle=null \(now "global"\)'):
        train(steps=5, resume=True, checkpoint_path=tmp_path / "3")


def test_a_video_backend_without_effect_is_told(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    lerobot.patch()
    train()
    assert "video_backend" not in caplog.text
    train(video_backend="pyav")
    assert "--dataset.video_backend=pyav has no effect" in caplog.text


def test_transforms_of_batches_are_repeated_by_a_resumed_run(train: Train, demo: Path, tmp_path: Path) -> None:
    """In mid-epoch and in the next epoch. They differ between batches, cameras and seeds, and leave global generators alone."""
    lerobot.patch(image_size=(24, 32))
    settings = {"image_transforms": SimpleNamespace(enable=True, backend="gpu"), "episodes": [0], "batch_size": 16}
    torch.manual_seed(1)
    whole = train(**settings, steps=9, save_at=(2,))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    length = len(whole.loader)
    assert 2 < length < 9
    rest = train(**settings, steps=9, resume=True, checkpoint_path=tmp_path / "2")
    assert rest.steps == whole.steps[2:]
    for ours, theirs in zip(rest.frames, whole.frames[2:], strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in (TOP, SIDE))
    plain = train(episodes=[0], batch_size=16, steps=9)
    other = train(**settings, steps=9, seed=4)
    pairs = zip(whole.frames, plain.frames, strict=True)
    added = {float((ours[key] - theirs[key]).mean()) for ours, theirs in pairs for key in (TOP, SIDE)}
    assert len(added) == 2 * 9
    assert not torch.equal(other.frames[0][TOP], whole.frames[0][TOP])


@pytest.mark.parametrize("script", [False], ids=["0.6.1"], indirect=True)
def test_transforms_of_batches_need_a_lerobot_that_has_them(train: Train, script: Any) -> None:
    lerobot.patch()
    train(image_transforms=SimpleNamespace(enable=False, backend="gpu"))
    with pytest.raises(
        dali_stream.DaliStreamError,
        match=r"image_transforms\.backend must be dataloader, got 'gpu'\. LeRobot must have .*_make_image_augmentation",
    ):
        train(image_transforms=SimpleNamespace(enable=True, backend="gpu"))


def test_files_are_read_from_the_streaming_data_root(script: Any, train: Train, demo: Path, tmp_path: Path) -> None:
    """The metadata are read from the dataset's own folder, which has nothing else."""
    metadata, files = tmp_path / "metadata", tmp_path / "files"
    shutil.copytree(demo / "meta", metadata / "meta")
    for name in ("data", "videos"):
        shutil.copytree(demo / name, files / name)
    lerobot.patch()
    whole = train()
    ours = script.train(lerobot_script.config(metadata, tmp_path, streaming_data_root=str(files)))
    ours.loader.close()
    assert ours.steps == whole.steps
    assert all(torch.equal(ours.frames[n][key], whole.frames[n][key]) for n in range(4) for key in (TOP, SIDE))


def test_a_streaming_data_root_that_is_not_known_is_an_error(train: Train, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(self: Any, root: Path, episodes: Any, data_root: str) -> None:
        MapDataset.__init__(self, root, episodes)

    monkeypatch.setattr(lerobot_script.StreamedDataset, "__init__", made)
    lerobot.patch()
    with pytest.raises(
        DaliStreamError, match=r"streaming_data_root must be .* _data_root of StreamedDataset, got 's3://bucket'"
    ):
        train(streaming_data_root="s3://bucket")


WORKERS = ("--num_workers", "--prefetch_factor", "--persistent_workers", "--dataloader_multiprocessing_context")


@pytest.mark.parametrize(
    ("words", "values", "transforms", "told"),
    [
        ([], {}, False, ()),
        (["--prefetch_factor=4", "--num_workers", "4"], {}, False, WORKERS[:2]),  # the defaults, but given
        ([], {"num_workers": 2, "persistent_workers": False}, False, (WORKERS[0], WORKERS[2])),  # as from a file
        (["--num_workers=0", "--dataloader_multiprocessing_context=null"], {"num_workers": 0}, True, WORKERS[3:]),
    ],
)
def test_settings_of_workers_without_effect_are_told(
    words: list[str],
    values: dict[str, Any],
    transforms: bool,
    told: tuple[str, ...],
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one warning. Image transforms are applied by `num_workers` processes."""
    monkeypatch.setattr(sys, "argv", ["lerobot-train", *words])
    lerobot.patch(image_size=(24, 32))
    train(**values, attributes={"image_transforms": Jitter()} if transforms else {}, steps=1)
    warnings = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert [re.findall(r"--\w+", text.split(" ha")[0]) for text in warnings] == ([list(told)] if told else [])


@pytest.mark.parametrize("most", [0, 20])
def test_an_evaluation_has_a_loader_of_its_own(most: int, train: Train, demo: Path) -> None:
    """In the recorded order, without the frames that the policy drops in training."""
    lerobot.patch()
    policy = lerobot_script.policy(drop_n_last_frames=7)
    result = train(episodes=[0], eval_episodes=[2], max_eval_samples=most, policy=policy)
    own = dali_stream.Dataset(demo)
    first = int(own.lengths[:2].sum())
    assert flat(result.evaluated) == list(range(first, first + (most or int(own.lengths[2]))))


def test_each_frame_of_an_epoch_is_seen_once(train: Train, demo: Path) -> None:
    lerobot.patch()
    result = train(episodes=[1], batch_size=8, steps=-(-int(dali_stream.Dataset(demo).lengths[1]) // 8))
    assert len(set(flat(result.steps))) == len(flat(result.steps)) == dali_stream.Dataset(demo).lengths[1]


@both_scripts
@pytest.mark.parametrize("part", parts.REQUIRED, ids=lambda part: part.names[0])
def test_a_missing_part_is_named(part: parts.Part, script: Any) -> None:
    module = sys.modules[part.module]
    for name in part.names:
        vars(module).pop(name, None)
    with pytest.raises(
        dali_stream.DaliStreamError, match=rf"must have {part.module}.{' or '.join(part.names)}, .* got LeRobot 0.9"
    ):
        lerobot.patch()


@pytest.mark.parametrize("part", [part for part in parts.REQUIRED if part.parameters], ids=lambda part: part.names[0])
def test_a_missing_parameter_is_named(part: parts.Part, script: Any) -> None:
    name = parts.find(part)
    setattr(sys.modules[part.module], name, lambda other: None)
    with pytest.raises(
        dali_stream.DaliStreamError, match=rf"the parameter {part.parameters[0]} of {part.module}.{name}, which"
    ):
        lerobot.patch()


def test_a_script_that_prepares_no_dataloader_is_refused(script: Any, demo: Path, tmp_path: Path) -> None:
    lerobot.patch()
    script.make_train_eval_datasets(lerobot_script.config(demo, tmp_path))
    with pytest.raises(dali_stream.DaliStreamError, match=r"must pass a DataLoader of its dataset to Accelerator\.prepare"):
        Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))


def test_a_script_is_patched_once(script: Any) -> None:
    lerobot.patch()
    with pytest.raises(dali_stream.DaliStreamError, match="once per process"):
        lerobot.patch()
