"""Names in a dataset are plain text that cannot act as markup, control a terminal, or forge a line of a log."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.datasets import TOP, change_episodes, change_info, copied
from support.slow import slow

from dali_stream import DaliStreamError, Dataset, Loader, Mixture
from dali_stream.cli import main

# Sets the title of a terminal, clears its screen, reverses the direction of text, and begins another line.
CONTROL = "\x1b]0;owned\x07\x9b2J\u202e\nfake: ok"
SHOWN = r"\x1b]0;owned\x07\x9b2J\u202e\nfake: ok"
CAMERA, FEATURE = f"observation.images.[/top]{CONTROL}", f"[bold]arm[/drawer]{CONTROL}"
TASKS = ["close [/drawer]", f"[left] pick the cube{CONTROL}"]


def name_tasks(root: Path, name: Callable[[int], str]) -> None:
    """Gives the tasks of a dataset other names, by their number."""
    count = pq.read_metadata(root / "meta/tasks.parquet").num_rows
    names = pa.array([name(number) for number in range(count)])
    pq.write_table(pa.table({"task_index": pa.array(range(count)), "task": names}), root / "meta/tasks.parquet")


@pytest.fixture(scope="module")
def hostile(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose camera, feature, task, robot and dimension have hostile names. Read only."""
    root = copied(small, tmp_path_factory.mktemp("hostile"))
    names = {TOP: CAMERA, "observation.state": FEATURE}
    info = json.loads((root / "meta/info.json").read_text())
    features = {names.get(key, key): feature for key, feature in info["features"].items()}
    features["action"]["names"] = [TASKS[0], TASKS[1]]
    change_info(root, features=features, robot_type=f"[/robot]{CONTROL}")
    stats = json.loads((root / "meta/stats.json").read_text())
    (root / "meta/stats.json").write_text(json.dumps({names.get(key, key): value for key, value in stats.items()}))
    change_episodes(root, lambda t: t.rename_columns([n.replace(f"/{TOP}/", f"/{CAMERA}/") for n in t.column_names]))
    (root / f"videos/{CAMERA}").parent.mkdir()
    shutil.move(root / f"videos/{TOP}", root / f"videos/{CAMERA}")
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.rename_columns([names.get(key, key) for key in table.column_names]), path)
    name_tasks(root, lambda number: TASKS[number % 2] + " " * (number // 2))
    return root


def control_characters(text: str) -> set[str]:
    return {character for character in text if not character.isprintable()} - {"\n"}


COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "info": (
        [],
        [f"[/top]{SHOWN}", f"[bold]arm[/drawer]{SHOWN}", "close [/drawer]", f"[left] pick the cube{SHOWN}", "[/robot]"],
    ),
    "doctor": ([], [f"[/top]{SHOWN}"]),
    "prepare": (["{out}/new", "--jobs", "1"], [f"[/top]{SHOWN}"]),
    "preview": (["--out", "{out}/sheet.png", "--plots", "--batch-size", "2"], [f"[/top]{SHOWN}"]),
    "bench": (["--num-batches", "2", "--warmup", "1", "--batch-size", "2", "--image-size", "recorded"], [SHOWN]),
    "stats": (["--cameras", "", "--out", "{out}/stats.json"], ["features"]),
}


@pytest.mark.parametrize("command", [name if name != "doctor" else slow(name) for name in COMMANDS])
def test_a_command_shows_hostile_names_as_text(
    command: str, hostile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # so that no name is folded
    options, expected = COMMANDS[command]
    assert main([command, str(hostile), *(option.format(out=tmp_path) for option in options)]) == 0
    out, err = capfd.readouterr()
    assert control_characters(out + err) == set()
    assert not any(line.startswith("fake") for line in (out + err).splitlines())
    for name in expected:
        assert name in out


@pytest.mark.parametrize(
    "arguments", [["doctor", "--cameras", "x"], ["preview", "--window", "x=0"], ["bench", "--mode", "x"]], ids=" ".join
)
def test_a_failing_command_shows_hostile_names_as_text(
    arguments: list[str], hostile: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    assert main([command, str(hostile), *options, "--debug"]) == 2
    out, err = capfd.readouterr()
    assert (out, control_characters(err)) == ("", set())
    if command != "bench":
        assert f"[/top]{SHOWN}" in err


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines that handlers of the root logger format."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


def test_a_log_shows_hostile_names_as_text(hostile: Path, tmp_path: Path, lines: list[str]) -> None:
    root = copied(hostile, tmp_path)
    features = json.loads((root / "meta/info.json").read_text())["features"]
    stats = json.loads((root / "meta/stats.json").read_text())
    stats["action"]["min"] = stats["action"]["max"]  # a warning names the dimensions, which never change
    (root / "meta/stats.json").write_text(json.dumps(stats))
    change_info(root, features=features | {f"odd{CONTROL}": {"dtype": f"[/x]{CONTROL}", "shape": [1]}})
    with Loader(Dataset(root, cameras=[]), device="cpu", batch_size=2, normalize={"action": "min_max"}):
        pass
    assert any(f"[left] pick the cube{SHOWN}" in line for line in lines)
    assert all(control_characters(line) == set() and "\n" not in line for line in lines)


def test_an_error_shows_hostile_names_as_text(hostile: Path, tmp_path: Path) -> None:
    root = copied(hostile, tmp_path)
    shutil.rmtree(root / f"videos/{CAMERA}")
    with (
        pytest.raises(DaliStreamError) as caught,
        Loader(Dataset(root, cameras=[CAMERA]), device="cpu", batch_size=2) as loader,
    ):
        next(iter(loader))
    assert f"[/top]{SHOWN}" in str(caught.value)
    assert control_characters(str(caught.value)) == set()
    assert "\n" not in str(caught.value)


def test_a_table_in_a_notebook_shows_hostile_names_as_text(hostile: Path) -> None:
    dataset = Dataset(hostile)
    with Loader(dataset, device="cpu", batch_size=2, in_process=True) as loader:
        mixture = Mixture({f"<script>{CONTROL}": dataset})
        for shown in (dataset._repr_html_(), loader._repr_html_(), mixture._repr_html_()):
            assert (control_characters(shown), shown.count("\n")) == (set(), 0)
            assert f"[/top]{SHOWN}" in shown
            assert "<script>" not in shown
    assert f"&lt;script&gt;{SHOWN}" in mixture._repr_html_()


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "changes",
    [
        {"data_path": f"data/{LONG}/{{chunk_index}}-{{file_index}}.parquet"},
        {"video_path": f"videos/{LONG}/{{video_key}}{{chunk_index}}-{{file_index}}.mp4"},
        {"robot_type": LONG},
        {"fps": LONG},
        {"codebase_version": LONG},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_long_names_are_shortened(
    changes: dict[str, Any], small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = copied(small, tmp_path)
    change_info(root, **changes)
    main(["info", str(root)])
    out, err = capfd.readouterr()
    assert 0 < len(out + err) < 60_000
    try:
        with Loader(root, device="cpu", batch_size=2) as loader:
            next(iter(loader))
    except DaliStreamError as error:
        assert len(str(error)) < 5_000  # noqa: PT017 - some of these datasets can be read


@pytest.mark.slow
def test_the_sheet_of_a_task_of_100_kb_is_drawn(small: Path, tmp_path: Path) -> None:
    root = copied(small, tmp_path)
    name_tasks(root, lambda number: f"{number} {'word ' * 20_000}{LONG}")
    assert main(["preview", str(root), "--out", str(tmp_path / "sheet.png"), "--batch-size", "2"]) == 0
    assert main(["info", str(root)]) == 0
