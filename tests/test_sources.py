"""Sources of datasets, read through Dataset, Loader and the program: the Hub, its buckets, S3, LeRobot's cache, HTTP."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.batches import Batch, equal, samples
from support.clouds import S3, Hub
from support.datasets import SIDE, tree
from support.servers import Handler, Server
from support.stores import Clock

from dali_stream import Dataset, DatasetError, Loader, StorageError
from dali_stream.cli import main
from dali_stream.tools import prepare

REPOSITORY = "someone/demo"
TOKEN = "hf_aVerySecretToken"


def batches_of(dataset: Dataset | Path) -> list[Batch]:
    with Loader(dataset, batch_size=32, image_dtype="uint8", seed=2) as loader:
        return list(loader)


@pytest.fixture(scope="module")
def local(small: Path) -> list[Batch]:
    return batches_of(small)


@pytest.fixture
def hub(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The demo as a repository and as a bucket, which needs a token."""
    with Hub({f"datasets/{REPOSITORY}": small, "buckets/someone/bulk": small}, token=TOKEN) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "lerobot"))
        yield running


def same(found: list[Batch], expected: list[Batch]) -> bool:
    return len(found) == len(expected) and all(equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("uri", [REPOSITORY, f"hf://datasets/{REPOSITORY}", f"hf://datasets/{REPOSITORY}@main"])
def test_hub(hub: Hub, local: list[Batch], uri: str) -> None:
    dataset = Dataset(uri)
    assert dataset.revision == hub.commit(f"datasets/{REPOSITORY}")
    assert same(batches_of(dataset), local)


def test_the_revision_is_pinned_and_no_part_of_the_fingerprint(hub: Hub, small: Path) -> None:
    dataset = Dataset(REPOSITORY, revision="main")
    before, fingerprint = dataset.revision, dataset.fingerprint
    hub.put(f"datasets/{REPOSITORY}", {"README.md": b"changed"})  # main moves on during the run
    later = Dataset(REPOSITORY)
    assert later.revision != before == dataset.revision
    assert fingerprint == later.fingerprint == Dataset(small).fingerprint
    assert all(f"/resolve/{later.revision}/" not in r.path for r in hub.requests if r.path.endswith(".mp4"))


@pytest.mark.slow
def test_a_run_goes_on_at_another_commit_and_on_a_local_copy(
    hub: Hub, small: Path, tmp_path: Path, local: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    def resumed(dataset: Dataset | Path, state: dict[str, Any]) -> bool:
        caplog.clear()
        with Loader(dataset, batch_size=32, image_dtype="uint8", seed=2) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            return same(list(loader), local[1:])

    dataset = Dataset(f"hf://datasets/{REPOSITORY}")
    with Loader(dataset, batch_size=32, image_dtype="uint8", seed=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert resumed(small, state)
    assert "commit" not in caplog.text, "nothing says of which commit the copy is"
    hub.put(f"datasets/{REPOSITORY}", {"README.md": b"changed"})
    later = Dataset(f"hf://datasets/{REPOSITORY}")
    assert resumed(later, state)
    assert f"saved at commit {dataset.revision} of hf://" in caplog.text
    assert f"is at commit {later.revision}" in caplog.text
    own = shutil.copytree(small, tmp_path / "own")
    note = own / ".cache/huggingface/download/meta/info.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{later.revision}\netag\n0.0\n")  # as huggingface_hub writes it
    assert resumed(own, state)
    assert f"is at commit {later.revision}" in caplog.text


def test_a_state_says_which_versions_of_metadata_files_it_had(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = tree(small)
    with Server(files) as server:
        with Loader(server.url, batch_size=8, device="cpu") as loader:
            state = loader.state_dict()
            before = state["source"]["versions"]["meta/info.json"]
        files["meta/info.json"] += b"\n"
        with Loader(server.url, batch_size=8, device="cpu") as loader:
            loader.load_state_dict(state)
            after = loader.state_dict()["source"]["versions"]["meta/info.json"]
    assert f"/meta/info.json had version {before} when the state was saved, and has {after} now" in caplog.text
    caplog.clear()
    own = shutil.copytree(small, tmp_path / "own")
    with Loader(own, batch_size=8, device="cpu") as loader:
        state = loader.state_dict()
    for path in (own / "meta").glob("*.json"):
        path.touch()
    with Loader(own, batch_size=8, device="cpu") as loader:
        loader.load_state_dict(state)
    assert "version" not in caplog.text, "the content is the same"


def test_metadata_from_the_repository_and_bulk_from_a_bucket(hub: Hub, local: list[Batch]) -> None:
    dataset = Dataset(REPOSITORY, data_files_root="hf://buckets/someone/bulk")
    hub.requests.clear()
    hub.cdn.requests.clear()
    assert same(batches_of(dataset), local)
    bulk = {
        request.path.split("/")[1] for request in hub.cdn.requests if "/videos/" in request.path or "/data/" in request.path
    }
    assert bulk == {"buckets"}


def test_what_lerobot_has_downloaded_is_read_from_there(hub: Hub, small: Path, tmp_path: Path, local: list[Batch]) -> None:
    shutil.copytree(small, tmp_path / "lerobot" / REPOSITORY)
    dataset = Dataset(REPOSITORY)
    assert same(batches_of(dataset), local)
    assert hub.requests == []
    assert dataset.revision is None
    assert Dataset(REPOSITORY, revision="main").revision is not None  # the copy may be of another revision


def test_the_local_copy_of_lerobot_is_named_with_its_commit(
    hub: Hub, small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(small, tmp_path / "lerobot" / REPOSITORY)
    Dataset(REPOSITORY).close()
    words = f"{REPOSITORY} is read from LeRobot's local copy in {folder}, "
    assert f"{words}of unknown revision. Write this folder or hf://datasets/{REPOSITORY}" in caplog.text
    note = folder / ".cache/huggingface/download/meta/info.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'0123456789' * 4}\netag\n0.0\n")  # as huggingface_hub writes it
    Dataset(REPOSITORY).close()
    assert f"{words}commit {'0123456789' * 4}. " in caplog.text
    caplog.clear()
    for remedy in (folder, f"hf://datasets/{REPOSITORY}"):
        Dataset(remedy).close()
    assert not caplog.records


@pytest.mark.parametrize("lost", ["video", "rows", "episodes", "tasks"])
def test_a_local_copy_without_files_of_the_selected_episodes_is_not_read(
    hub: Hub, small: Path, tmp_path: Path, local: list[Batch], caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    folder = shutil.copytree(small, tmp_path / "lerobot" / REPOSITORY)
    whole = Dataset(small)
    videos = whole.source.videos
    [split] = [key for key in videos if len(set(videos[key].file.tolist())) == 2]  # a file for each of the two episodes
    path = {
        "video": videos[split].paths[videos[split].file[1]],
        "rows": "data/chunk-000/file-000.parquet",
        "episodes": "meta/episodes/chunk-000/file-000.parquet",
        "tasks": whole.tasks_place,
    }[lost]
    (folder / path).unlink()
    dataset = Dataset(REPOSITORY)
    assert dataset.store.address.startswith(f"hf://datasets/{REPOSITORY}@")
    assert same(batches_of(dataset), local)
    state = "cannot be used" if lost == "episodes" else "is incomplete"
    assert f"LeRobot's local copy in {folder} {state} (" in caplog.text
    assert (path if lost in ("video", "rows", "tasks") else "meta/episodes") in caplog.text
    if lost == "video":
        hub.requests.clear()
        for selection in ({"episodes": [0]}, {"cameras": [key for key in whole.cameras if key != split]}):
            assert Dataset(REPOSITORY, **selection).store.address == str(folder), "which has all files of this selection"
        assert not hub.requests
        hub.token = "another"
        with pytest.raises(DatasetError, match=f"^LeRobot's local copy in {folder} is incomplete .it lacks {path}.*not found"):
            Dataset(REPOSITORY)


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(DatasetError, match=r"^someone/else does not exist in .* hf://datasets/someone/else: not found"):
        Dataset("someone/else")


def test_a_folder_that_is_not_there_is_said_before_the_hub_is_asked(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    said = []

    def note(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        said.append(caplog.text)
        handler.reply(200, data, fields)

    hub.set_faults([note])
    Dataset(REPOSITORY).close()
    words = f"{REPOSITORY} does not exist in {Path.cwd()}, so it is read as the id of a Hub dataset"
    assert f"{words}, hf://datasets/{REPOSITORY}. " in said[0]
    caplog.clear()
    Dataset(f"hf://datasets/{REPOSITORY}").close()
    assert not caplog.records


def test_a_folder_that_is_not_there_where_there_is_no_network(
    clock: Clock, refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", refusing)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "lerobot"))
    words = f"data/g1 does not exist in {tmp_path}, so it is read as the id of a Hub dataset, hf://datasets/data/g1"
    with pytest.raises(StorageError, match=f"^{words}.*refused"):
        Dataset("data/g1")
    assert clock.now <= 5
    assert words in caplog.text
    with pytest.raises(StorageError, match="where 40 s are allowed"):
        Dataset("data/g1", give_up_after_s=40)
    assert clock.now > 30


def test_s3(small: Path, local: list[Batch]) -> None:
    with S3(small) as s3:
        dataset = Dataset(f"s3://{s3.bucket}", storage_options=s3.options)
        assert same(batches_of(dataset), local)
        assert dataset.store.traffic.requests > 0


def test_a_copy_of_a_remote_dataset_reads_the_same(hub: Hub, small: Path, tmp_path: Path) -> None:
    """The same revision, with connections and counters of its own, and nothing is asked for before it is read."""
    file = f"videos/{SIDE}/chunk-000/file-000.mp4"
    expected = (small / file).read_bytes()
    with Server(small) as web, S3(small) as s3:
        for dataset, asked in (
            (Dataset(REPOSITORY), hub.requests),
            (Dataset(REPOSITORY, data_files_root="hf://buckets/someone/bulk"), hub.requests),
            (Dataset(web.url, cache_dir=tmp_path / "cache"), web.requests),
            (Dataset(f"s3://{s3.bucket}", storage_options=s3.options), []),
        ):
            assert dataset.data_store.read_all(file) == expected
            hub.put(f"datasets/{REPOSITORY}", {"meta/info.json": b"{}"})  # main moves on, to the next round's revision
            hub.put(f"datasets/{REPOSITORY}", {"meta/info.json": (small / "meta/info.json").read_bytes()})
            for how in (copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
                before, requests = len(asked), dataset.data_store.traffic.requests
                twin = how(dataset)
                assert (len(asked), twin.revision) == (before, dataset.revision)
                dataset.close()  # which ends nothing of the copy
                assert twin.data_store.read_all(file) == expected
                assert dataset.data_store.traffic.requests == requests
                traffic = twin.data_store.traffic
                assert traffic.fetched_bytes + traffic.cached_bytes == len(expected)


def test_cache_dir_serves_a_second_run(small: Path, tmp_path: Path, local: list[Batch]) -> None:
    with Server(small) as server:
        for _ in range(2):
            server.requests.clear()
            dataset = Dataset(server.url, cache_dir=tmp_path / "cache")
            assert same(batches_of(dataset), local)
        probes = [request for request in server.requests if request.sent > 9]  # one byte for the version; "not found"
        assert probes == []
        assert dataset.store.traffic.cached_bytes > 0


def test_cache_of_the_hub_needs_the_commit_only(hub: Hub, tmp_path: Path, local: list[Batch]) -> None:
    for _ in range(2):
        hub.requests.clear()
        hub.cdn.requests.clear()
        assert same(batches_of(Dataset(REPOSITORY, cache_dir=tmp_path / "cache")), local)
    assert hub.cdn.requests == []
    asked = [request.path for request in hub.requests if "/resolve/" in request.path]
    assert all(path.endswith("meta/subtasks.parquet") for path in asked)  # a missing file


def test_info_and_preview_of_remote_datasets(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", REPOSITORY, "--revision", "main", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["frames"] == Dataset(REPOSITORY).num_frames
    assert report["cameras"][SIDE]["codec"] == "av1"
    out = tmp_path / "sheet.png"
    assert main(["preview", f"hf://datasets/{REPOSITORY}", "--out", str(out), "--cache-dir", str(tmp_path / "cache")]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "cache").rglob("*"))


def test_no_credentials_in_what_a_user_sees(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with Server(small) as server:
        uri = server.url.replace("http://", "http://user:pa55word@") + "?signature=s1gned"
        dataset = Dataset(uri, cache_dir=tmp_path / "cache")
        with Loader(dataset, batch_size=8) as loader:
            next(iter(loader))
            seen = [repr(dataset), dataset.uri, json.dumps(loader.stats()), json.dumps(loader.state_dict()), str(loader.routes)]
        assert main(["info", uri, "--json"]) == 0
        assert main(["info", uri.replace("?", "/missing?")]) == 1
        assert {request.query for request in server.requests} == {"signature=s1gned"}
    output = capsys.readouterr()
    seen += [output.out, output.err, caplog.text, *(str(path) for path in (tmp_path / "cache").rglob("*"))]
    assert not [text for text in seen if "pa55word" in text or "s1gned" in text]


def test_a_run_goes_on_over_the_same_dataset_in_other_files(small: Path, tmp_path: Path) -> None:
    prepare(small, tmp_path / "out", jobs=1)
    arguments: dict[str, Any] = {"batch_size": 16, "consumers": 4}
    with Loader(small, **arguments) as loader:
        epoch = iter(loader)
        found = samples(next(epoch) for _ in range(4))
        state, expected = loader.state_dict(), samples(epoch)
    with Server(tmp_path / "out") as server, Loader(server.url, **arguments) as loader:
        loader.load_state_dict(state)
        assert samples(loader) == expected
    assert len(found) == 64
