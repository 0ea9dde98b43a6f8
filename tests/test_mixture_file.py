"""Mixture files: their content becomes the arguments of a Mixture, and errors in them name the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.datasets import TOP, Column, build

from dali_stream import DatasetError, Mixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets without video, `data/pick` and `data/old`, of which the second has another key for its state."""
    root = tmp_path_factory.mktemp("mixtures")
    for name, key, lengths in (("pick", "state", [6, 8, 4]), ("old", "arm", [9, 5])):
        values = [[float(n), 1.0] for n in range(sum(lengths))]
        build(root / "data" / name, lengths, {key: Column("float32", [2], values)})
    return root


@pytest.fixture
def written(folder: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (path := folder / name).parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


YAML = """
# as in the documentation
datasets:
  pick: ../data/pick
  old: {uri: ../data/old, episodes: [1], drop_n_last_frames: 1}
weights: {pick: 2, old: 1e0}
epoch_samples: 30
keys: {old: {arm: state}}
nearest: true
"""


def described(mixture: Mixture) -> tuple[Any, ...]:
    parts = [(d.uri, d.lengths.tolist(), d.num_frames, d.fingerprint) for d in mixture.datasets.values()]
    return list(mixture.datasets), parts, mixture.shares.state(), list(mixture.features), mixture.fingerprint, mixture.nearest


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_file_is_the_mixture_of_its_arguments(
    folder: Path, written: Callable[[str, str], Path], suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever the program runs: paths are relative to the file."""
    import yaml

    text = YAML if suffix != ".json" else json.dumps(yaml.safe_load(YAML.replace("1e0", "1")), indent="\t")
    path = written(f"sets/mixture{suffix}", text)
    pick = folder / "sets/../data/pick"
    old = {"uri": folder / "sets/../data/old", "episodes": [1], "drop_n_last_frames": 1}
    options: dict[str, Any] = {"weights": {"pick": 2, "old": 1}, "epoch_samples": 30, "nearest": True}
    expected = Mixture({"pick": pick, "old": old}, keys={"old": {"arm": "state"}}, **options)
    assert expected.num_frames == 18 + 4
    monkeypatch.chdir(tmp_path)
    assert described(Mixture.from_file(path)) == described(expected)
    monkeypatch.chdir(path.parent)
    assert described(Mixture.from_file(path.name)) == described(expected)


def test_names_that_are_no_folder_beside_the_file_are_of_the_hub(
    folder: Path, written: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the program runs in a folder that has such a path: the file means one dataset everywhere."""
    text = "datasets: {a: data/pick, b: data/other, c: s3://bucket/fold, d: ./data/other, e: {uri: /data/x, cache_dir: c}}"
    here, there = written("here.yaml", text), written("sets/there.yaml", text)

    def uris(path: Path) -> list[str]:
        return [given["uri"] for given in Mixture.file_arguments(path)["datasets"].values()]

    elsewhere = ["s3://bucket/fold", str(folder / "data/other"), "/data/x"]
    assert uris(here) == [str(folder / "data/pick"), "data/other", *elsewhere]
    assert Mixture.file_arguments(here)["datasets"]["e"]["cache_dir"] == str(folder / "c")
    monkeypatch.chdir(folder)
    assert uris(there)[:2] == ["hf://datasets/data/pick", "data/other"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("datasets: [data/pick", "invalid YAML: .* line 1"),
        ("? [a, b]\n: 1", "invalid YAML: .*unhashable key"),
        ("[1, 2]", r"the file must be a dict with the key datasets, got '\[1, 2\]'"),
        ("", "the file must be a dict with the key datasets, got 'None'"),
        ("weights: {pick: 1}", "the file must have the key 'datasets', got weights"),
        ("datasets: data/pick", "datasets of the file must be a dict, got 'data/pick'"),
        ("datasets: {}", "datasets must be a dict of one or more datasets by name, got {}"),
        ("datasets: {1: data/pick}", "the name of a dataset must be text, got 1. Put it in quotes"),
        (
            "datasets: {a: data/pick}\nwieghts: {a: 1}",
            r"Unknown key 'wieghts' in the file\. Did you mean 'weights'\? Allowed: datasets, weights, repeats, .*nearest",
        ),
        ("datasets: {a: data/pick}\nnearest: 1", "nearest of the file must be true or false, got '1'"),
        ("datasets: {a: data/pick}\nepoch_samples: yes", "epoch_samples of the file must be an integer, got 'True'"),
        ("datasets: {a: data/pick}\nweights: [1]", r"weights of the file must be a dict, got '\[1\]'"),
        ("datasets: {a: data/pick}\nweights: {b: 1}", "Unknown dataset 'b' in weights. Available: a"),
        ("datasets: {a: data/pick}\nweights: {a: much}", "weights of dataset 'a' must be a finite number above 0, got 'much'"),
        ("datasets: {a: data/pick}\nkeys: {a: state}", r"keys\['a'\] must be a dict {.*}, got 'state'"),
        (
            "datasets: {a: data/pick}\nkeys: {a: {state: 5}}",
            r"keys\['a'\] must be a dict {key in the dataset: common key}, got",
        ),
        ("datasets: {a: data/pick}\nmissing: skip", "missing must be one of 'error', 'pad', got 'skip'"),
        ("datasets: {a: data/pick, b: data/old, a: data/old}", "the key 'a' is duplicated in one dict"),
        ("datasets: {a: {episodes: [0]}}", "dataset 'a' must have the key 'uri', got episodes"),
        (
            "datasets: {a: {uri: data/pick, shuffle: true}}",
            r"Unknown key 'shuffle' in dataset 'a'\. Pass it to Loader\(.*\) or FrameSampler\(.*\)\. Allowed: uri, revision",
        ),
        (
            "datasets: {a: data/pick}\nepisodes: [0]",
            r"Unknown key 'episodes' in the file\. Pass it to Dataset\(\.\.\., episodes=",
        ),
        ("datasets: {a: {uri: data/pick, cameras: top}}", "cameras of dataset 'a' must be a list.*, got 'top'"),
        (
            "datasets: {a: {uri: data/pick, drop_n_last_frames: 1.5}}",
            "drop_n_last_frames of dataset 'a' must be an integer.*, got '1.5'",
        ),
        (
            "datasets: {a: {uri: data/pick, drop_first: 1}}",
            r"Unknown key 'drop_first' in dataset 'a'\. Use drop_n_first_frames= of a Dataset .*\. Allowed: uri, ",
        ),
        (
            "datasets: {a: {uri: data/pick, drop_last: 1}}",
            r"Unknown key 'drop_last' in dataset 'a'\. Use drop_n_last_frames= of a Dataset or a FrameSampler for frames",
        ),
        ("datasets: {a: {uri: data/pick, episode: [1]}}", r"Unknown key 'episode' in dataset 'a'\. Did you mean 'episodes'\?"),
        ("datasets: {a: {uri: data/pick, episodes: [7]}}", "dataset 'a': .*episode"),
        ("datasets: {a: data/pick, b: data/old}", "Datasets must have the same features, got:"),
        ("datasets: {a: !!python/object/apply:os.system ['exit 1']}", "invalid YAML: could not determine a constructor"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_name(written: Callable[[str, str], Path], text: str, said: str) -> None:
    path = written("wrong.yaml", text)
    with pytest.raises(ValueError, match=f"(?s)^(Cannot read )?mixture file {re.escape(str(path))}: .*{said}"):
        Mixture.from_file(path)


def test_files_that_cannot_be_read_are_named(written: Callable[[str, str], Path], folder: Path) -> None:
    for name, text, said in (
        ("x.json", '{"datasets": {"a": "b", "a": "c"}}', "the key 'a' is duplicated"),
        ("x.json", '{"datasets"}', "invalid JSON: Expecting ':' delimiter: line 1 column 12"),
        ("x.txt", "datasets: {}", "its name must end in .yaml or .yml or .json, got '.txt'"),
    ):
        with pytest.raises(ValueError, match=said):
            Mixture.from_file(written(name, text))
    with pytest.raises(ValueError, match=r"missing\.yaml: No such file"):
        Mixture.from_file(folder / "missing.yaml")


def test_a_dataset_that_is_not_there_is_named_with_the_file(written: Callable[[str, str], Path], folder: Path) -> None:
    path = written("gone.yaml", "datasets: {a: data/pick, b: ./data/gone}")
    with pytest.raises(DatasetError, match=f"gone.yaml: dataset 'b': .*{folder}/data/gone"):
        Mixture.from_file(path)
    with pytest.raises(ValueError, match=f"dataset 'b': Unknown camera '{TOP}'"):
        Mixture({"a": folder / "data/pick", "b": {"uri": folder / "data/old", "cameras": [TOP]}})
