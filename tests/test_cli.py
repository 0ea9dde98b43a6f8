"""The program `dali-stream`: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.datasets import SIDE, TOP, change_info, copied
from support.doctor import looked_at
from support.programs import driver, failed, pictures, program
from support.slow import slow, slow_after
from support.videos import b_frames

import dali_stream
from dali_stream.cli import main
from dali_stream.demo import read_identities
from dali_stream.tools.description import describe

SIZE, EPISODES = (128, 160), 4  # of `made`


@pytest.fixture
def made(h264_demo: Path) -> Path:
    """A demo dataset, for its B-frames that of H.264: of each camera in two files. Read only."""
    return h264_demo


# ---- demo


@pytest.mark.slow
def test_demo_writes_a_dataset_and_delivers_every_frame_exactly_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "made"
    options = ["--episodes", 2, "--size", "120x128", "--codec", "h264", "--batch-size", 16]
    assert main(["demo", "--root", str(root), *map(str, options), "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    report = json.loads(out)  # nothing else is on stdout
    info = json.loads((root / "meta/info.json").read_text())
    assert sorted(report["indices"]) == list(range(info["total_frames"]))
    assert report["indices"] != sorted(report["indices"])
    assert report["frames"] == report["unique_frames"] == info["total_frames"]
    assert report["exactly_once"] is True
    assert report["episodes"] == info["total_episodes"] == 2
    assert report["batches"] == -(-report["frames"] // 16)
    assert report["frames_checked"] == 2 * 16
    assert set(report["routes"]) == {TOP, SIDE}
    assert all(route["decoder"] and route["reason"] for route in report["routes"].values())
    assert report["frames_per_s"] == pytest.approx(2 * report["samples_per_s"])
    assert 0 < report["wait_ms"]["p50"] <= report["wait_ms"]["p95"] <= report["wait_ms"]["p99"]
    assert report["first_batch_s"] > 0
    assert report["bottleneck"]["stage"] != "training", "there is no model"
    assert " %" in report["bottleneck"]["text"]
    assert 50e6 < report["peak_rss_bytes"] < 4e9
    assert report["versions"]["dali_stream"] == dali_stream.__version__
    assert report["sheet"] == f"{root}-sheet.png"
    assert len(pictures(Path(report["sheet"]))) == 2 * 16


@pytest.mark.slow
def test_demo_takes_the_dataset_that_is_there_and_prints_a_table(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    assert main(["demo", "--root", str(made), "--size", "128x160", "--out", str(tmp_path / "a.png")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before
    frames = json.loads((made / "meta/info.json").read_text())["total_frames"]
    words = ["samples/s", "frames/s", "first batch", "p50", "p95", "p99", "top", "side", "peak memory", "torchcodec"]
    for said in [*words, f"yes: {frames} delivered, {frames} different", str(tmp_path / "a.png")]:
        assert said in out
    assert len(pictures(tmp_path / "a.png")) == 2 * 32


@pytest.mark.slow
def test_demo_on_the_dali_route(vp9_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--decode", "dali", "--device", "cpu", "--json", "--out", str(tmp_path / "a.png")]
    assert main(["demo", "--root", str(vp9_demo), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exactly_once"]
    assert {route["decoder"] for route in report["routes"].values()} == {"dali"}


@pytest.mark.parametrize(
    ("option", "value", "there"),
    [slow("codec", "av1", "h264"), ("size", "240x320", "128x160"), slow("episodes", "3", str(EPISODES))],
)
def test_demo_does_not_ignore_options_that_the_dataset_there_differs_in(
    made: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, there: str
) -> None:
    line = failed(capsys, ["demo", "--root", made, f"--{option}", value], 2)
    assert f"{option} {there}" in line
    assert f"{option} {value}" in line
    assert "another folder" in line


def test_demo_leaves_alone_what_is_not_its_own(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    change_info(other := copied(made, tmp_path), robot_type="so100")
    for root, why in ((tmp_path / "notes", "info.json"), (other, "so100"), (tmp_path / "notes/a.txt", "is a file")):
        line = failed(capsys, ["demo", "--root", root], 1)
        assert str(root) in line
        assert why in line
        assert "--root" in line
    assert (tmp_path / "notes/a.txt").read_text() == "mine"


def test_demo_fails_where_a_frame_is_of_another_frame(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dali_stream.tools.epoch.read_identities", lambda batch: np.add(read_identities(batch), (0, 1, 0)))
    assert "was requested" in failed(capsys, ["demo", "--root", made, "--out", tmp_path / "a.png"], 1)


def test_demo_fails_where_a_frame_comes_twice(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Repeating(dali_stream.Loader):
        def __iter__(self) -> Any:
            batches = super().__iter__()
            first = next(batches)
            yield first
            next(batches)
            yield first
            yield from batches

    monkeypatch.setattr("dali_stream.tools.epoch.Loader", Repeating)
    assert main(["demo", "--root", str(made), "--out", str(tmp_path / "a.png"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["exactly_once"] is False
    assert err.count("\n") == 1


# ---- info


def test_info_as_json_tells_the_facts_of_the_demo(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(made), "--json"]) == 0
    found, info = json.loads(capsys.readouterr().out), json.loads((made / "meta/info.json").read_text())
    assert (found["episodes"], found["frames"], found["fps"]) == (EPISODES, info["total_frames"], 20)
    assert found["duration_s"] == info["total_frames"] / 20
    assert found["robot_type"] == "simulated_pusher"
    assert {key: (f["dtype"], f["shape"]) for key, f in found["features"].items()} == {
        key: (f["dtype"], f["shape"]) for key, f in info["features"].items()
    }
    assert len(found["tasks"]) == info["total_tasks"]
    for key in (TOP, SIDE):
        files = list((made / "videos" / key).rglob("*.mp4"))
        camera = found["cameras"][key]
        assert (camera["codec"], camera["profile"], camera["pixel_format"]) == ("h264", "High", "yuv420p")
        assert (camera["height"], camera["width"]) == SIZE
        assert (camera["gop_min"], camera["gop_max"]) == (12, 12)
        assert camera["files"] == camera["files_looked_at"] == len(files)
        assert camera["bytes"] == sum(path.stat().st_size for path in files)
        assert (camera["b_frames"], camera["open_gops"], camera["other_formats"]) == (b_frames(files), False, [])
    for part in ("data", "videos", "meta"):
        assert found["bytes"][part] == sum(path.stat().st_size for path in (made / part).rglob("*") if path.is_file())


def test_info_names_the_route_that_a_loader_takes(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dali_stream.Loader(made, batch_size=1) as loader:
        routes = loader.routes
    assert main(["info", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {key: dali_stream.types.Route(**camera["route"]) for key, camera in found["cameras"].items()} == routes


def test_info_as_text(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(made)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for said in (str(made), f"{EPISODES}, of", "20 fps", "observation.object_positions", "3 × 2", "yaw_rate"):
        assert said in out
    assert re.search(rf"{TOP} +h264 High +yuv420p +128 × 160 +12 ", out)
    assert re.search(rf"{TOP} +torchcodec +\w+", out)
    assert re.search(r"0 +Push the \w+ block", out)


def test_info_says_how_many_of_many_files_it_looked_at(made: Path) -> None:
    report = describe(dali_stream.Dataset(made), look_at=1)
    assert report.cameras[TOP].files > report.cameras[TOP].files_looked_at == 1
    only = describe(dali_stream.Dataset(made, episodes=[3], cameras=[SIDE]))
    assert list(only.cameras) == [SIDE]
    assert (only.episodes, only.data_files, only.cameras[SIDE].files) == (1, 1, 1)
    assert only.bytes["videos"] < report.bytes["videos"]


@pytest.mark.slow
def test_info_of_files_that_differ(made: Path, demo: Path, tmp_path: Path) -> None:
    root = copied(made, tmp_path)
    name = f"videos/{TOP}/chunk-000/file-001.mp4"
    shutil.copy(demo / name, root / name)
    camera = describe(dali_stream.Dataset(root)).cameras[TOP]
    assert camera.codec == "h264"
    assert camera.other_formats == ("av1 Main yuv420p 128x160",)
    assert (camera.gop_min, camera.gop_max) == (2, 12)


@pytest.mark.parametrize("arguments", slow_after(1, [["info", "URI"], ["info", "URI", "--json"], ["demo", "--help"]]))
def test_info_and_help_load_neither_torch_nor_dali(made: Path, arguments: list[str]) -> None:
    code = "import sys; from dali_stream.cli import main; main(sys.argv[1:]); sys.stderr.write(' '.join(sys.modules))"
    command = [sys.executable, "-c", code, *(str(made) if argument == "URI" else argument for argument in arguments)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()
    assert "dali_stream.cli.info" in loaded
    assert not {"nvidia.dali", "torchcodec"} & set(loaded)
    assert "torch" not in loaded or driver()  # with a GPU, torch says which one a Loader would use


def test_images_in_parquet(odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(odd), "--json"]) == 0
    [(key, camera)] = json.loads(capsys.readouterr().out)["cameras"].items()
    assert (camera["kind"], camera["codec"], camera["files"]) == ("image", None, 0)
    assert main(["info", str(odd)]) == 0
    assert "images in Parquet" in capsys.readouterr().out
    assert main(["preview", str(odd), "--out", str(tmp_path / "s.png"), "--window", f"{key}=0", "--batch-size", "2"]) == 0
    assert [picture.shape for _, picture in pictures(tmp_path / "s.png")] == [(camera["height"], camera["width"], 3)] * 2


def test_info_of_a_part(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(made), "--episodes", "0,2-3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["episodes"], found["frames"]) == (3, int(dali_stream.Dataset(made).lengths[[0, 2, 3]].sum()))


def test_info_of_missing_files_lists_them_and_says_the_rest(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(made, tmp_path)
    gone = [*root.glob(f"videos/{SIDE}/**/*.mp4"), *root.glob("data/**/*.parquet")]
    gone.append(min(root.glob(f"videos/{TOP}/**/*.mp4")))
    for path in gone:
        path.unlink()
    (root / "meta/tasks.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert main(["info", str(root), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found["missing"]) == {str(path.relative_to(root)) for path in gone}
    assert (found["cameras"][TOP]["codec"], found["cameras"][SIDE]["codec"]) == ("h264", None)
    assert "no such file" in found["cameras"][TOP]["broken"][0]
    assert "git lfs pull" in found["broken"][0]
    assert main(["info", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"{len(gone)} files missing:" in out
    assert all(str(path.relative_to(root)) in out for path in gone)
    assert re.search(rf"{SIDE} +unknown", out)


def test_what_info_json_says_and_the_file_contradicts(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # so that no line is folded
    root = copied(made, tmp_path)
    features = json.loads((root / "meta/info.json").read_text())["features"]
    features[TOP]["info"] |= {"video.codec": "libsvtav1", "video.fps": 25, "video.width": 640}
    features[SIDE]["info"]["video.codec"] = "avc1"
    change_info(root, features=features)
    said = [
        "meta/info.json has video.codec libsvtav1, and the file has h264",
        "meta/info.json has video.height and video.width 128×640, and the file has 128×160",
        "meta/info.json has video.fps 25, and the file has 20",
    ]
    report = describe(dali_stream.Dataset(root))
    assert [remark.partition(".mp4: ")[2] for remark in report.cameras[TOP].remarks] == said
    assert report.cameras[SIDE].remarks == describe(dali_stream.Dataset(made)).cameras[TOP].remarks == ()
    assert main(["info", str(root)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(text in shown for text in said)
    assert {finding.status for finding in looked_at(root).values()} == {
        "ok"
    }  # a Loader delivers the frames as the file has them


# ---- preview


def test_preview_shows_the_frames_that_it_names(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, window = tmp_path / "sheet.png", "=-0.1,0,0.1"
    assert main(["preview", str(made), "--out", str(out), "--window", TOP + window, "--batch-size", "12"]) == 0
    said = capsys.readouterr()
    assert (str(out) in said.out, said.err) == (True, "")
    lengths = dali_stream.Dataset(made).lengths
    found = pictures(out)
    assert len(found) == 12 * 4
    for said, picture in found:
        assert picture.shape == (*SIZE, 3)
        offset = (-2, 0, 2)[said["step"]] if said["camera"] == TOP else 0
        frame = int(np.clip(said["frame"] + offset, 0, lengths[said["episode"]] - 1))
        camera = [TOP, SIDE].index(said["camera"])
        assert read_identities(picture[None]).tolist() == [[said["episode"], frame, camera]]
        assert said["index"] == lengths[: said["episode"]].sum() + said["frame"]


@pytest.mark.parametrize("size", [slow("480x640"), "96x128"])
def test_preview_of_one_camera_is_a_grid(size: str, made: Path, tmp_path: Path) -> None:
    """As near to 4:3 as cells allow, not one column of eight; frames do not overlap."""
    assert main(["preview", str(made), "--out", str(tmp_path / "s.png"), "--cameras", TOP, "--image-size", size]) == 0
    with Image.open(tmp_path / "s.png") as sheet:
        assert 0.7 < sheet.width / sheet.height < 2.5
    boxes = [said["box"] for said, _ in pictures(tmp_path / "s.png")]
    assert len(boxes) == 8
    apart = [a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1] for a, b in combinations(boxes, 2)]
    assert all(apart)


def test_preview_without_cameras_plots_state_and_action(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plots.png"
    assert main(["preview", str(made), "--cameras", "", "--out", str(out), "--episodes", "0,2,3"]) == 0
    assert "observation.state" in capsys.readouterr().out
    with Image.open(out) as image:
        plots, pixels = json.loads(image.text["dali_stream"])["plots"], np.asarray(image.convert("RGB"))
    assert {plot["episode"] for plot in plots} == {0, 2, 3}
    assert {"observation.state", "action"} <= {plot["key"] for plot in plots}
    for left, top, right, bottom in (plot["box"] for plot in plots):
        inside = pixels[top + 1 : bottom, left + 1 : right].reshape(-1, 3)
        assert len(np.unique(inside, axis=0)) > 2  # lines of several colours


def test_preview_lays_out_samples_below_and_windows_beside_each_other(made: Path, tmp_path: Path) -> None:
    window = f"{TOP}=-0.3,-0.2,-0.1,0"
    assert main(["preview", str(made), "--out", str(tmp_path / "s.png"), "--window", window, "--batch-size", "3"]) == 0
    found = [said for said, _ in pictures(tmp_path / "s.png")]
    for sample in range(3):
        row = [said for said in found if said["sample"] == sample]
        assert [(said["camera"], said["step"]) for said in row] == [(TOP, 0), (TOP, 1), (TOP, 2), (TOP, 3), (SIDE, 0)]
        assert len({said["box"][1] for said in row}) == 1
        assert all(a["box"][2] < b["box"][0] for a, b in pairwise(row))
    tops = [said["box"] for said in found if (said["camera"], said["step"]) == (TOP, 0)]
    assert len({box[0] for box in tops}) == 1
    assert all(a[3] + 30 < b[1] for a, b in pairwise(tops))  # room for two lines of text


@pytest.mark.slow
def test_preview_of_a_part_resized(made: Path, tmp_path: Path) -> None:
    options = ["--cameras", SIDE, "--episodes", "1,2-3", "--image-size", "240x320", "--batch-size", "40", "--seed", "3"]
    assert main(["preview", str(made), "--out", str(tmp_path / "s.png"), *options]) == 0
    found = pictures(tmp_path / "s.png")
    assert {said["camera"] for said, _ in found} == {SIDE}
    assert {picture.shape for _, picture in found} == {(240, 320, 3)}
    assert {said["episode"] for said, _ in found} == {1, 2, 3}
    identities = read_identities(np.stack([picture for _, picture in found])).tolist()
    assert identities == [[said["episode"], said["frame"], 1] for said, _ in found]


# ---- arguments and failures


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing command"),
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["demo", "--nonsense"], "--nonsense"),
        (["demo", "more"], "more"),
        (["info"], "URI"),
        (["stats", "URI", "more"], "more"),
        (["preview"], "URI"),
        (["demo", "--episodes"], "--episodes"),
        (["demo", "--episodes", "many"], "'many'"),
        (["demo", "--episodes", "0"], "'0'"),
        (["demo", "--root", "NEW", "--episodes", "65537"], "65537"),
        (["demo", "--size", "240"], "240x320"),
        (["demo", "--root", "NEW", "--size", "20x20"], "(20, 20)"),
        (["demo", "--root", "NEW", "--codec", "mjpeg"], "av1, h264, hevc, vp9"),
        (["demo", "--root", "URI", "--batch-size", "-1"], "'-1'"),
        (["demo", "--root", "URI", "--device", "tpu"], "'tpu'"),
        (["demo", "--root", "URI", "--decode", "magic"], "torchcodec"),
        (["demo", "--root", "URI", "--decode", "dali", "--device", "cpu"], "h264"),
        (["demo", "--out", "a.jpg"], ".png"),
        (["preview", "URI", "--out", "/nowhere/a.png"], "/nowhere"),
        (["preview", "URI", "--batch-size", "0"], "'0'"),
        (["preview", "URI", "--seed", "-1"], "'-1'"),
        (["preview", "URI", "--window", TOP], "-0.1,0"),
        (["preview", "URI", "--window", f"{TOP}=a,b"], "-0.1,0"),
        (["preview", "URI", "--window", "action=0"], SIDE),
        (["preview", "URI", "--window", f"{TOP}=0", "--window", f"{TOP}=1"], "twice"),
        (["preview", "URI", "--window", f"{TOP}=0.01"], "1/fps"),
        (["preview", "URI", "--image-size", "0x10"], "height"),
        (["preview", "URI", "--episodes", "5-3"], "'5-3'"),
        (["preview", "URI", "--episodes", "99"], "99"),
        (["preview", "URI", "--cameras", "front"], SIDE),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"URI": made, "NEW": tmp_path / "new"}
    assert said in failed(capsys, [places.get(argument, argument) for argument in arguments], 2)
    assert not list(tmp_path.iterdir())


def test_a_failed_run_is_one_line_and_exit_code_1(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_info(old := copied(made, tmp_path), codebase_version="v1.6")
    assert "must be v2.0, v2.1 or v3.0, got" in failed(capsys, ["info", old], 1)
    assert "/nowhere" in failed(capsys, ["info", "/nowhere"], 1)
    assert "s3://" in failed(capsys, ["preview", "s3://bucket/data"], 1)
    shutil.rmtree(old)
    short = copied(made, tmp_path)
    video = next(iter(sorted((short / "videos" / TOP).rglob("*.mp4"))))
    video.write_bytes(video.read_bytes()[:1000])
    assert str(video) in failed(capsys, ["preview", short, "--out", tmp_path / "s.png"], 1)
    assert main(["info", str(short), "--json"]) == 1
    assert str(video) in json.loads(capsys.readouterr().out)["cameras"][TOP]["broken"][0]


def without(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program where a module is not installed."""
    code = f"import sys; sys.modules['{module}'] = None; from dali_stream.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_is_not_installed_is_said_before_anything_is_written(tmp_path: Path) -> None:
    run = without("torchcodec.decoders", "demo", "--root", tmp_path / "new")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert "FFmpeg" in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_needs_no_dali_on_a_cpu(tmp_path: Path) -> None:
    options = ["--episodes", "2", "--size", "120x128", "--codec", "h264", "--device", "cpu", "--json"]
    run = without("nvidia.dali", "demo", "--root", tmp_path / "new", *options)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["versions"]["dali"] is None


@pytest.mark.parametrize(("arguments", "code"), [(["info", "/nowhere"], 1), (["demo", "--nonsense"], 2)])
def test_a_failure_shows_the_traceback_when_asked(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    for with_debug in (["--debug", *arguments], [*arguments, "--debug"]):
        assert main(with_debug) == code
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_real_program_fails_in_one_line() -> None:
    run = program("info", "/nowhere")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)


def test_ctrl_c_is_one_line_and_exit_code_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dali_stream.demo.write_demo", interrupted)
    assert "interrupted" in failed(capsys, ["demo", "--root", tmp_path / "new"], 130)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_reason_to_complain(made: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "dali_stream", "info", str(made), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout
        assert run.stderr
        run.stdout.close()
        assert run.stderr.read() == ""


READING = ("bench", "doctor", "frames fill", "info", "prepare", "preview", "stats")


@pytest.mark.parametrize("command", READING)
def test_commands_that_read_a_dataset_have_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    options = set(re.findall(r"^ +(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    names = "--episodes --cameras --revision --data-files-root --storage-options --clock --tolerance-s"
    assert options >= {*names.split()}
    assert ("--cache-dir" in options) == (command != "prepare")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("info URI --episodes 3-1", "--episodes must be numbers and ranges, such as 0,3,5-8, got '3-1'\n"),
        ("bench URI --batch-size 0", "--batch-size must be a whole number of 1 or more, got '0'\n"),
        ("preview URI --out a.jpg", "--out must end in .png, got 'a.jpg'\n"),
        (
            "preview URI --window top",
            "--window must be CAMERA=SECONDS,SECONDS,..., such as observation.images.top=-0.1,0, got 'top'\n",
        ),
        ("preview URI --window top=0 --window top=1", "--window must have each camera once, got top twice"),
        ("frames fill URI --frame-cache DIR", "Missing option '--image-size'. See dali-stream frames fill"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_named(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in failed(capsys, arguments.split(), 2)


def test_json_that_is_none_is_not_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    """It may contain credentials."""
    line = failed(capsys, ["info", "URI", "--storage-options", "{key: secret}"], 2)
    assert line.startswith("dali-stream: --storage-options must be a JSON object")
    assert "secret" not in line


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("prepare", ["URI", "[OUT]"]),  # --status takes OUT alone
        ("doctor", ["[URI]"]),
        ("info", ["URI..."]),
        ("preview", ["URI..."]),
        ("bench", ["URI..."]),
        ("stats", ["URI"]),
        ("demo", []),
        ("frames fill", ["URI..."]),
        ("frames list", ["DIR"]),
        ("frames remove", ["DIR", "NAME..."]),
    ],
)
def test_help_begins_with_the_arguments(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    usage = re.sub(r"\{(\w+)\}", r"\1", first)  # typer puts an argument that must be given into braces
    assert usage.split() == ["Usage:", "dali-stream", *command.split(), "[OPTIONS]", *arguments]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dali-stream {dali_stream.__version__}\n"
    options = {"demo": "--root --episodes --size --codec --json", "info": "--json", "preview": "--out --window --image-size"}
    for command, names in options.items():
        assert main([command, "--help"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert all(name in out for name in names.split())
