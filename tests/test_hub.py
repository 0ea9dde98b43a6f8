"""Dataset repositories and buckets, through the Hub's API on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import faults
from support.clouds import SIGNATURE, Hub
from support.servers import Handler, Server
from support.stores import CONTENT, Clock, failure, quick, said

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage import connection, open_store

TOKEN = "hf_s3cretT0ken"
FILES = {
    "meta/info.json": b'{"a": 1}',
    "meta/episodes/chunk-000/file-000.parquet": CONTENT[:5000],
    "meta/episodes/chunk-000/file-001.parquet": CONTENT[:6000],
    "meta/episodes-old/file.parquet": b"x",
    "data/file.parquet": CONTENT,
}
REPO, BUCKET = "hf://datasets/owner/robot", "hf://buckets/owner/robot"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    repos = {"datasets/owner/robot": FILES, "buckets/owner/robot": FILES, "datasets/owner/gated": FILES}
    with Hub(repos, token=TOKEN, gated=("datasets/owner/gated",), page=2) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
        yield server


@pytest.mark.parametrize("address", [REPO, f"{REPO}@main", f"{REPO}@refs/pr/1", f"{REPO}@refs%2Fpr%2F1", BUCKET])
def test_a_repository_and_a_bucket_are_read_by_ranges(hub: Hub, address: str) -> None:
    store = open_store(address)
    assert store.remote
    assert store.revision == (None if address == BUCKET else hub.commit("datasets/owner/robot"))
    assert store.read("data/file.parquet", 10, 5000) == CONTENT[10:5000]
    assert store.read_all("meta/info.json") == b'{"a": 1}'
    assert not store.exists("meta/nothing")
    assert isinstance(failure(store, "meta/nothing"), DatasetError)


@pytest.mark.parametrize("address", [REPO, BUCKET])
def test_a_listing_is_whole_and_its_sizes_spare_requests(hub: Hub, address: str) -> None:
    store = open_store(address)
    assert store.files("meta/episodes") == [f"meta/episodes/chunk-000/file-00{i}.parquet" for i in range(2)]
    assert store.files("nothing") == []
    before = len(hub.requests)
    assert store.size("meta/episodes/chunk-000/file-001.parquet") == 6000
    assert store.exists("meta/episodes/chunk-000/file-001.parquet")
    assert len(hub.requests) == before


@pytest.mark.parametrize("address", [REPO, BUCKET])
def test_a_listing_whose_link_names_another_host_continues_at_the_endpoint(hub: Hub, address: str) -> None:
    with Server({}) as original:  # a mirror passes on the links of the host that it mirrors
        for link in (f"{original.url}/api/{address.removeprefix('hf://')}/tree/main", "http://huggingface.invalid/api/x"):
            hub.link = link
            assert open_store(address).files("meta") == sorted(name for name in FILES if name.startswith("meta/"))
        assert not original.requests, "neither requests nor credentials go to another host"


def test_a_listing_that_names_its_own_page_as_the_next_one_ends(hub: Hub) -> None:
    hub.page, hub.link = 1, "/api?cursor=1&"  # a server takes the first cursor, so each page is the second one
    with pytest.raises(StorageError, match="names the same page as the next one"):
        open_store(REPO).files("meta")


@pytest.mark.parametrize("address", [REPO, BUCKET])
def test_a_folder_of_it_is_a_root_of_its_own(hub: Hub, address: str) -> None:
    store = open_store(f"{address}/meta")
    assert store.files("episodes") == [f"episodes/chunk-000/file-00{i}.parquet" for i in range(2)]
    assert store.read("info.json", 0, 4) == b'{"a"'


def test_the_revision_is_found_out_once_and_stays(hub: Hub) -> None:
    store = open_store(REPO, revision="main")
    commit = store.revision
    assert commit
    for at in range(3):
        store.read("data/file.parquet", at, at + 5)
    assert sum("/api/" in request.path for request in hub.requests) == 1
    assert all(f"/resolve/{commit}/" in request.path for request in hub.requests if "/resolve/" in request.path)
    assert commit in store.where("data/file.parquet")
    hub.put("datasets/owner/robot", {"new": b"1"})
    assert open_store(REPO).revision != commit


def test_only_the_first_range_of_a_file_asks_the_hub_where_it_lies(hub: Hub) -> None:
    store = open_store(REPO)
    for at in range(4):
        assert store.read("data/file.parquet", at, at + 5) == CONTENT[at : at + 5]
    assert sum("/resolve/" in request.path for request in hub.requests) == 1
    hub.cdn.set_faults([faults.status(403)])  # the signature has expired
    assert store.read("data/file.parquet", 7, 70) == CONTENT[7:70]
    assert sum("/resolve/" in request.path for request in hub.requests) == 2


def test_the_cache_of_a_commit_needs_no_file_to_be_asked_for(hub: Hub, tmp_path: Path) -> None:
    for _ in range(2):
        before = len(hub.requests)
        store = open_store(REPO, cache_dir=tmp_path)
        assert store.read("data/file.parquet", 10, 5000) == CONTENT[10:5000]
    assert [request.path for request in hub.requests[before:]] == ["/api/datasets/owner/robot"]
    assert store.traffic.cached_bytes == 4990


def test_the_token_goes_to_the_hub_alone(hub: Hub, clock: Clock, everything_logged: pytest.LogCaptureFixture) -> None:
    store = quick(REPO, give_up_after_s=5)
    store.files("meta")
    store.read("data/file.parquet", 0, 10)
    assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in hub.requests)
    assert all("authorization" not in request.headers for request in hub.cdn.requests)
    errors = []
    for fault in (faults.reset, faults.status(500), faults.status(418), faults.garbage):
        hub.cdn.set_faults([fault] * 1000)
        errors.append(failure(store, "data/file.parquet"))
    hub.set_faults([faults.reset] * 1000)
    with pytest.raises(StorageError) as caught:
        quick(REPO, give_up_after_s=5)
    text = said(everything_logged, *errors, caught.value) + f"{store.address} {store.revision} {store.traffic}"
    assert TOKEN not in text
    assert SIGNATURE not in text


def test_the_token_of_storage_options_counts(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HF_ENDPOINT")
    store = open_store(REPO, {"token": TOKEN, "endpoint": hub.url})
    assert store.read("data/file.parquet", 0, 5) == CONTENT[:5]
    with pytest.raises(DatasetError, match="hf auth login"):
        open_store(REPO, {"token": False, "endpoint": hub.url})


@pytest.mark.parametrize("fault", [faults.status(429, "0"), faults.status(503), faults.reset, faults.hang, faults.garbage])
def test_the_api_is_retried_too(hub: Hub, fault: faults.Fault) -> None:
    hub.set_faults([fault, None, fault])
    store = quick(REPO)
    assert len(store.files("meta")) == 4


def test_a_listing_that_does_not_end_is_not_read(hub: Hub, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        handler.close_connection = True
        handler.head(200, None, fields)
        handler.body(b"[" + b" " * 500_000)

    monkeypatch.setattr(connection, "_LARGEST", 10_000)
    store = quick(REPO)
    hub.set_faults([endless] * 10_000)
    with pytest.raises(StorageError, match="must have at most 10000 bytes"):
        store.files("meta")


def test_an_api_that_hangs_ends_in_the_stated_time(hub: Hub) -> None:
    hub.set_faults([faults.hang] * 1000)
    with pytest.raises(StorageError, match=r"0\.5 s are allowed"):
        quick(REPO, give_up_after_s=0.5)


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("hf://datasets/owner/nothing", DatasetError, "not found on .*hf auth login"),
        ("hf://buckets/owner/nothing", DatasetError, "not found on .*hf auth login"),
        ("hf://datasets/owner/gated", StorageError, "accept the terms of a gated repository on http"),
        (f"{REPO}@v9", DatasetError, "unknown revision 'v9'"),
        ("hf://owner/robot", DatasetError, "hf://datasets/<owner>/<name>"),
        ("hf://datasets/robot", DatasetError, "hf://datasets/<owner>/<name>"),
        (f"{REPO}/../other", DatasetError, "hf://datasets/<owner>/<name>"),
    ],
)
def test_what_cannot_be_opened_says_what_to_do(hub: Hub, address: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_store(address)


@pytest.mark.parametrize(
    ("address", "options", "revision", "words"),
    [
        (f"{REPO}@main", {}, "v1", "revision must be 'main', as in .*, got 'v1'"),
        (BUCKET, {}, "main", "revision must be None for a bucket, got 'main'"),
        (REPO, {"headers": {}}, None, "token, endpoint and timeout"),
    ],
)
def test_an_argument_that_does_not_fit(hub: Hub, address: str, options: dict, revision: str | None, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words):
        open_store(address, options, revision=revision)


def test_the_same_revision_twice_is_one(hub: Hub) -> None:
    assert open_store(f"{REPO}@main", revision="main").revision


def test_offline_mode_is_kept(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE is set"):
        open_store(REPO)
    assert not hub.requests
