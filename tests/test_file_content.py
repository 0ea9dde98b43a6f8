"""States and mixture files of strangers: each is used as it says, or is an error of this package."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets import EPISODE_TABLE, Column, build, change_episodes, copied
from support.slow import examples

import dali_stream
from dali_stream import DaliStreamError, DatasetError, FrameSampler, Loader, Mixture, ResumeError
from dali_stream.cli import main
from dali_stream.storage.state_file import load_state, write_state

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes of rows alone."""
    values = np.arange(36).reshape(-1, 2)
    return build(tmp_path_factory.mktemp("rows") / "data", (5, 6, 7), {"action": Column("float32", [2], values)})


def make(dataset: Any, **options: Any) -> Loader:
    return Loader(dataset, **({"batch_size": 4, "num_threads": 1, "device": "cpu"} | options))


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[str, Any]:
    """A state of a run of some episodes."""
    with make(dali_stream.Dataset(root, episodes=[0, 2])) as loader:
        next(iter(loader))
        return loader.state_dict()


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(dict or list, key) of everything in a tree."""
    own = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    return [(tree, key) for key, _ in own] + [place for _, value in own for place in places(value)]


VALUES: list[Any] = [
    None, True, -1, 0, 1, 2.5, 1e308, 10**12, 3 * 10**8, 1 << 31, 1 << 63, 10**400, "", "x", "../x", [], [[]], [1], [None],
    [[0, 10**12]], [[0, 0]], [[1, 0]], [[0.0, 1.0]], {}, {"": None}, {"x": {}}, {"0": [[0, 10**12]]}, [[0, 1]] * 3,
    float("nan"),
]  # fmt: skip


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[int, Any, bool]]:
    """One to three places of a tree, by any numbers, with a new value, or without one for a key that is left out."""
    one = st.tuples(st.integers(0, 10**6), st.sampled_from(VALUES), st.booleans())
    return draw(st.lists(one, min_size=1, max_size=3))


def changed(content: Any, made: list[tuple[int, Any, bool]]) -> Any:
    content = copy.deepcopy(content)
    for number, value, removed in made:
        if found := places(content):
            tree, key = found[number % len(found)]
            if removed:
                del tree[key]
            else:
                tree[key] = copy.deepcopy(value)
    return content


@pytest.mark.slow
@given(made=changes())
@examples(400)
def test_any_changed_state_is_read_or_refused(made: list[tuple[int, Any, bool]], root: Path, saved: dict[str, Any]) -> None:
    state = changed(saved, made)
    with make(dali_stream.Dataset(root, episodes=[0, 2])) as loader:
        try:
            loader.load_state_dict(json.loads(json.dumps(state)))
        except (ResumeError, dali_stream.MemoryBudgetError):
            return
        for _ in loader:
            pass


@given(made=changes())
@examples(200)
def test_any_changed_state_of_a_sampler_is_read_or_refused(made: list[tuple[int, Any, bool]]) -> None:
    sampler = FrameSampler([5, 6, 7], batch_size=4)
    next(iter(sampler))
    state, other = changed(sampler.state_dict(), made), FrameSampler([5, 6, 7], batch_size=4)
    try:
        other.load_state_dict(state)
    except ResumeError:
        return
    assert len(list(other)) <= 18


@given(made=changes())
@examples(100)
def test_a_preview_of_any_changed_state_is_drawn_or_refused(
    made: list[tuple[int, Any, bool]], root: Path, saved: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("preview")
    (folder / "state.json").write_text(json.dumps(changed(saved, made)))
    line = ["preview", str(root), "--episodes", "0,2", "--batch-size", "4", "--state", str(folder / "state.json")]
    assert main([*line, "--out", str(folder / "sheet.png")]) in (0, 1, 2)


@given(made=changes())
@examples(200)
def test_any_changed_mixture_file_is_read_or_refused(
    made: list[tuple[int, Any, bool]], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = {"uri": str(root), "episodes": [0, 2], "drop_n_last_frames": 1, "frames": {"0": [[0, 3]]}, "tolerance_s": 0.01}
    content = {"datasets": {"a": first, "b": str(root)}, "weights": {"a": 1, "b": 2}, "epoch_samples": 30, "missing": "pad"}
    path = tmp_path_factory.mktemp("mixture") / "mixture.json"
    path.write_text(json.dumps(changed(content, made)))
    try:
        mixture = Mixture.from_file(path)
    except (DaliStreamError, ValueError):
        return
    if mixture.num_frames:
        with make(mixture) as loader:
            next(iter(loader))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n" for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
FILES: dict[str, tuple[str, str, str]] = {
    "alias bomb": ("x.yaml", f"{BOMB}datasets: *j", "its aliases must not expand to more than 1000000 values"),
    "alias of itself": ("x.yaml", "datasets: &a {a: *a}", "at most 50 lists and dicts may be inside each other"),
    "deep YAML": ("x.yaml", f"datasets: {DEEP[:400]}{DEEP[-400:]}", "at most 50 lists"),
    "deep JSON": ("x.json", DEEP, "at most 50 lists and dicts may be inside each other"),
    "many keys": ("x.yaml", "\n".join(f"key{n}: 1" for n in range(5_000)), "the file must have the key 'datasets', got key0"),
    "many datasets": ("x.json", json.dumps({"datasets": {f"d{n}": 1 for n in range(50_000)}}), "dataset 'd0' must be a dict"),
    "duplicate keys": ("x.json", json.dumps({f"d{n}": 1 for n in range(50_000)})[:-1] + ', "d7": 1}', "the key 'd7' is"),
    "not UTF-8": ("x.json", '{"datasets": "\udcff"}', "not UTF-8"),
    "a float episode": (
        "x.yaml",
        "datasets: {a: {uri: ROOT, episodes: [0.5]}}",
        "episodes must be a list of one or more",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_mixture_file_is_refused(name: str, root: Path, tmp_path: Path) -> None:
    file, text, said = FILES[name]
    (tmp_path / file).write_text(text.replace("ROOT", str(root)), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=said):
        Mixture.from_file(tmp_path / file)


def test_a_mixture_file_may_use_an_alias(root: Path, tmp_path: Path) -> None:
    text = f"datasets: {{a: &a {{uri: {root}, drop_n_last_frames: 1}}, b: {{<<: *a, episodes: [0]}}}}"
    (tmp_path / "x.yaml").write_text(text)
    assert [part.num_frames for part in Mixture.from_file(tmp_path / "x.yaml").datasets.values()] == [15, 4]


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a large epoch": (lambda state: state.update(epoch=1 << 63), "at an epoch from 0 to 2147483647"),
    "a float epoch": (lambda state: state.update(epoch=0.0), "at an epoch from 0"),
    "a large pool": (
        lambda state: state["order"].update(episode_pool_size=10**12),
        "episode_pool_size was 10{12} in the run and is",
    ),
    "many consumers": (lambda state: state["order"].update(consumers=10**9), "consumers was 10{9} in the run and is"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_hostile_state_is_refused(name: str, root: Path, saved: dict[str, Any], tmp_path: Path) -> None:
    change, said = STATES[name]
    change(state := copy.deepcopy(saved))
    write_state(tmp_path / "state.json", state)
    with make(dali_stream.Dataset(root, episodes=[0, 2])) as loader:
        with pytest.raises(ResumeError, match=said):
            loader.load_state_dict(state)
        with pytest.raises(ResumeError, match=said):
            load_state(tmp_path / "state.json", loader.load_state_dict)


def test_a_deep_state_is_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state.json").write_text(DEEP)
    with make(root) as loader, pytest.raises(ResumeError, match="at most 50 lists and dicts may be inside each other"):
        load_state(tmp_path / "state.json", loader.load_state_dict)
    assert main(["preview", str(root), "--state", str(tmp_path / "state.json")]) == 2
    assert "at most 50 lists and dicts" in capsys.readouterr().err


def test_a_large_pool_of_a_state_takes_no_memory(root: Path, saved: dict[str, Any]) -> None:
    """It gives the same samples as one that holds all episodes."""
    state = copy.deepcopy(saved)
    samples = []
    tracemalloc.start()
    for pool in (3 * 10**8, 1000):
        with make(dali_stream.Dataset(root, episodes=[0, 2])) as loader:
            loader.load_state_dict(state | {"order": state["order"] | {"episode_pool_size": pool}})
            assert tracemalloc.get_traced_memory()[1] < 256 << 20
            samples.append([index for batch in loader for index in batch["index"].tolist()])
    tracemalloc.stop()
    assert samples[0] == samples[1] != []


def test_an_episode_index_that_is_not_whole_is_refused(root: Path, tmp_path: Path) -> None:
    """It was cut, so that 1.5 was episode 1."""
    copy_of = copied(root, tmp_path)
    change_episodes(copy_of, lambda table: table.set_column(0, "episode_index", pa.array([0.0, 1.5, 2.0])))
    with pytest.raises(DatasetError, match=r"Invalid column episode_index in .*meta/episodes.*: must hold integers, got 1\.5"):
        dali_stream.Dataset(copy_of)


def test_a_number_of_frames_that_is_not_whole_is_refused(root: Path, tmp_path: Path) -> None:
    copy_of = copied(root, tmp_path)
    place = pq.read_schema(copy_of / EPISODE_TABLE).get_field_index("length")
    change_episodes(copy_of, lambda table: table.set_column(place, "length", pa.array([5.5, 6.0, 7.0])))
    with pytest.raises(DatasetError, match=r"Invalid column length in .*: must hold integers, got 5\.5"):
        dali_stream.Dataset(copy_of)
