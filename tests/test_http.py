"""Datasets on an HTTP server."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import socket
import socketserver
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from support import faults
from support.datasets import EPISODE_TABLE, change_info, copied
from support.rows import delivered
from support.servers import Handler, Server
from support.stores import CONTENT, SMALL, Clock, failure, quick, said

from dali_stream import Dataset
from dali_stream.errors import DatasetError, StorageError
from dali_stream.lerobot.file_names import guessed_files
from dali_stream.storage import open_store
from dali_stream.storage.cache import CACHE_BLOCK

FILES = {"data/a b#c%.bin": CONTENT, "small.bin": SMALL, "empty": b""}
BIG = "data/a b#c%.bin"


def test_any_range_of_any_file() -> None:
    with Server(FILES) as server:
        store = open_store(f"{server.url}/")
        assert store.remote
        assert store.read(BIG, 5, 70_000) == CONTENT[5:70_000]
        assert store.read(BIG, 0, 2 * len(CONTENT)) == CONTENT
        assert store.read(BIG, len(CONTENT), len(CONTENT) + 9) == b""
        assert store.read("small.bin", 5000, 6000) == b""
        assert store.read("empty", 0, 10) == b""
        assert store.read(BIG, 9, 9) == b""
        assert store.read_all("small.bin") == SMALL


def test_the_size_of_a_file_that_was_read_costs_no_request() -> None:
    with Server(FILES) as server:
        store = open_store(server.url)
        store.read(BIG, 0, 10)
        assert store.size(BIG) == len(CONTENT)
        assert len(server.requests) == 1
        assert store.size("empty") == 0
        assert [request.method for request in server.requests] == ["GET", "GET"]


def test_traffic_counts_what_the_server_sent() -> None:
    with Server(FILES, faults=[faults.short]) as server:
        store = open_store(server.url)
        store.read(BIG, 0, 1000)
        assert store.traffic.fetched_bytes == server.sent == 1000
        assert (store.traffic.requests, store.traffic.retries) == (2, 1)


def test_a_missing_file_is_told_from_a_failing_server(clock: Clock) -> None:
    with Server(FILES) as server:
        store = quick(server.url, {"timeout": 60}, give_up_after_s=5)
        assert store.exists("small.bin")
        assert not store.exists("nothing")
        assert isinstance(failure(store, "nothing"), DatasetError)
        server.set_faults([faults.status(503)] * 100)
        with pytest.raises(StorageError, match="HTTP 503"):
            store.exists(BIG)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "", "a\\b", "data/\ud800"])
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    with Server(FILES) as server:
        store = open_store(server.url)
        for call in (lambda: store.read(path, 0, 1), lambda: store.size(path), lambda: store.files(path)):
            with pytest.raises(DatasetError, match="must be a path within the dataset"):
                call()
        assert not server.requests


def test_files_are_found_by_the_names_that_lerobot_gives() -> None:
    episodes = ["chunk-000/file-000", "chunk-000/file-001", "chunk-001/file-000"]
    names = ["meta/info.json", "meta/tasks.parquet", *(f"meta/episodes/{name}.parquet" for name in episodes)]
    with Server(dict.fromkeys([*names, "meta/episodes/chunk-003/file-000.parquet"], b"x")) as server:
        store = open_store(server.url, guess=guessed_files)
        assert store.files("meta/episodes") == names[2:]
        assert store.files("meta") == sorted(names)
        assert store.files("data") == []


def test_a_small_file_may_come_whole_from_a_server_without_ranges() -> None:
    with Server(FILES, faults=[faults.ignored_range] * 2) as server:
        store = open_store(server.url)
        assert store.read("small.bin", 10, 20) == SMALL[10:20]
        assert store.size("small.bin") == 1000
        assert store.read(BIG, 0, len(CONTENT)) == CONTENT  # a whole file was asked for


def test_a_file_that_changes_on_the_server_is_an_error_and_not_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with Server(tmp_path) as server:
        store = open_store(server.url)
        assert store.read("a", 0, 100) == CONTENT[:100]
        (tmp_path / "new").write_bytes(CONTENT[::-1])
        os.replace(tmp_path / "new", tmp_path / "a")
        assert "changed during the run" in str(failure(store, "a", 100, 200))
        assert len(server.requests) == 2
        (tmp_path / "a").write_bytes(b"short")
        assert "changed during the run" in str(failure(store, "a", 100, 200))


@pytest.mark.slow
def test_no_more_than_32_requests_at_a_time_to_a_host() -> None:
    with Server(FILES, latency_s=0.03) as server, ThreadPoolExecutor(60) as pool:
        stores = [open_store(server.url), open_store(server.url)]
        parts = pool.map(lambda at: stores[at % 2].read(BIG, at * 1000, at * 1000 + 1000), range(200))
        assert b"".join(parts) == CONTENT[:200_000]
        assert 8 <= server.peak <= 32


def test_a_forked_process_reads_over_connections_of_its_own() -> None:
    with Server(FILES) as server:
        store = open_store(server.url)
        store.read(BIG, 0, 10)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        children = [context.Process(target=_read_parts, args=(store, theirs, at)) for at in range(3)]
        for child in children:
            child.start()
        assert all(store.read(BIG, at, at + 999) == CONTENT[at : at + 999] for at in range(0, 50_000, 1000))
        assert sorted(ours.recv() for _ in children) == [(0, True, 0), (1, True, 0), (2, True, 0)]
        for child in children:
            child.join()


def _read_parts(store, pipe, number) -> None:  # type: ignore[no-untyped-def]
    try:
        right = all(store.read(BIG, at, at + 999) == CONTENT[at : at + 999] for at in range(number, 50_000, 1000))
    except StorageError as error:  # so that the parent does not wait for this process
        pipe.send((number, str(error), store.traffic.retries))
    else:
        pipe.send((number, right, store.traffic.retries))


def test_a_redirect_is_followed_and_remembered() -> None:
    with Server(FILES) as there, Server(FILES) as here:
        here.set_faults([faults.redirect(f"{there.url}/{{path}}?sig=1")] * 9)
        store = open_store(here.url)
        for at in range(5):
            assert store.read("small.bin", at, at + 5) == SMALL[at : at + 5]
        assert len(here.requests) == 1
        assert len(there.requests) == 5


@pytest.mark.parametrize("code", [401, 403, 404, 410, 503])
def test_a_redirect_that_holds_no_more_is_asked_for_again(code: int) -> None:
    with Server(FILES) as there, Server(FILES) as here:
        here.set_faults([faults.redirect(f"{there.url}/{{path}}?sig=1")] * 9)
        there.set_faults([None, faults.status(code)])
        store = open_store(here.url)
        assert store.read("small.bin", 0, 5) == SMALL[:5]
        assert store.read("small.bin", 5, 9) == SMALL[5:9]
        assert len(here.requests) == 2


def test_readers_that_find_a_redirect_expired_at_once_ask_again() -> None:
    """A signed URL expires for all of those who read the file."""
    readers = 4
    together = threading.Barrier(readers)

    def expired(*arguments: Any) -> None:
        together.wait(60)
        faults.status(403)(*arguments)

    with Server(FILES) as there, Server(FILES) as here, ThreadPoolExecutor(readers) as pool:
        here.set_faults([faults.redirect(f"{there.url}/{{path}}?sig=1")] * 99)
        store = open_store(here.url)
        assert store.read("small.bin", 0, 5) == SMALL[:5]
        there.set_faults([expired] * readers)
        reads = [pool.submit(store.read, "small.bin", at, at + 5) for at in range(readers)]
        assert [read.result() for read in reads] == [SMALL[at : at + 5] for at in range(readers)]


@pytest.mark.parametrize("location", ["http://[::1", "http://host:port/", "ftp://host/a", "//", "http://a..b/"])
def test_a_redirect_to_nonsense_is_an_error(location: str) -> None:
    with Server(FILES) as server:
        server.set_faults([faults.redirect(location)] * 100)
        assert isinstance(failure(quick(server.url, give_up_after_s=0.2), "small.bin"), StorageError)


@pytest.mark.parametrize("host", ["169.254.169.254", "2852039166", "0xa9.0xfe.43518", "[fe80::1]", "[::ffff:169.254.169.254]"])
def test_a_redirect_to_the_credentials_of_the_machine_is_not_followed(host: str) -> None:
    with Server({"small.bin": SMALL}, faults=[faults.redirect(f"http://{host}/latest/meta-data")]) as server:
        assert "are not allowed, since a machine in the cloud" in str(
            failure(quick(server.url, give_up_after_s=1), "small.bin")
        )


def test_a_redirect_without_end_is_an_error() -> None:
    with Server(FILES) as server:
        server.set_faults([faults.redirect("/{path}")] * 100)
        assert "redirects" in str(failure(open_store(server.url), "small.bin"))
        assert len(server.requests) == 6


def test_one_connection_serves_files_errors_and_redirects() -> None:
    with Server(FILES) as server:
        store = open_store(server.url)
        assert not store.exists("nothing")
        server.set_faults([faults.redirect(f"{server.url}/{{path}}"), faults.status(503), None])
        for at in range(3):
            assert store.read("small.bin", at, at + 9) == SMALL[at : at + 9]
        assert server.connections == 1


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(FILES) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://me:pr0xy@"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert open_store("http://dataset.invalid").read("small.bin", 0, 10) == SMALL[:10]
        assert "proxy-authorization" in proxy.requests[0].headers
        assert open_store(proxy.url).read("small.bin", 0, 10) == SMALL[:10]
        assert "proxy-authorization" not in proxy.requests[1].headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(timezone.utc)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1), [])
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    form = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(form + signed.public_bytes(Encoding.PEM))
    return path


def _tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_is_not_trusted_is_an_error_at_once(certificate: Path) -> None:
    with Server(FILES, tls=_tls(certificate)) as server:
        store = quick(server.url)
        assert "SSL_CERT_FILE" in str(failure(store, "small.bin"))
        assert store.traffic.retries == 0
        assert not server.requests


def test_https_and_its_faults(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Server(FILES, tls=_tls(certificate), faults=[faults.reset, faults.hang_inside, faults.short]) as server:
        assert quick(server.url).read(BIG, 5, 900_000) == CONTENT[5:900_000]
        with Server(FILES) as plain:
            server.set_faults([faults.redirect(f"{plain.url}/{{path}}")])
            assert "from https to http" in str(failure(quick(server.url), BIG))
            assert not plain.requests


class Relay(socketserver.StreamRequestHandler):
    """A proxy that opens tunnels."""

    seen: ClassVar[list[str]] = []

    def handle(self) -> None:
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            self.seen.append(line.decode().strip())
        host, _, port = self.seen[0].split()[1].partition(":")
        with socket.create_connection((host, int(port))) as there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=self._copy, args=(there, self.connection))
            back.start()
            self._copy(self.connection, there)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_https_goes_through_a_tunnel_of_the_proxy(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(FILES, tls=_tls(certificate)) as server, socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as proxy:
        relaying = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        relaying.start()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setenv("https_proxy", f"http://me:pr0xy@127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("no_proxy", "")
        store = open_store(server.url)
        assert [store.read(BIG, at, at + 9) for at in (0, 70_000)] == [CONTENT[at : at + 9] for at in (0, 70_000)]
        store.close()
        proxy.shutdown()
        relaying.join()
        assert Relay.seen[0].startswith("CONNECT 127.0.0.1:")
        assert "proxy-authorization: Basic bWU6cHIweHk=" in [
            f"{n.lower()}:{v}" for n, _, v in (line.partition(":") for line in Relay.seen)
        ]
        assert sum(line.startswith("CONNECT") for line in Relay.seen) == 1
        assert all("proxy-authorization" not in request.headers for request in server.requests)


def test_a_proxy_of_another_scheme_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert "must have the scheme http://, got socks5://" in str(failure(open_store("http://dataset.invalid"), "small.bin"))


SECRETS = ("pa55word", "cGE1NXdvcmQ", "bWU6cGE1NXdvcmQ=", "s1gnature", "h3ader", "c1ient")


def test_a_password_may_have_any_characters() -> None:
    with Server(FILES) as server:
        assert open_store(server.url.replace("http://", "http://me:%E2%82%AC@")).read(BIG, 0, 10) == CONTENT[:10]
        assert server.requests[0].headers["authorization"] == "Basic bWU64oKs"


def test_credentials_reach_their_server_and_nothing_else(everything_logged: pytest.LogCaptureFixture) -> None:
    with Server(FILES) as there, Server(FILES) as here:
        address = here.url.replace("http://", "http://me:pa55word@") + "/?sig=s1gnature"
        options = {"headers": {"X-Key": "h3ader"}, "client_kwargs": {"headers": {"Cookie": "c1ient"}}}
        store = quick(address, options)
        assert store.read(BIG, 0, 10) == CONTENT[:10]
        seen = here.requests[0]
        assert seen.headers["authorization"] == "Basic bWU6cGE1NXdvcmQ="
        assert (seen.headers["x-key"], seen.headers["cookie"], seen.query) == ("h3ader", "c1ient", "sig=s1gnature")
        here.set_faults([faults.redirect(f"{there.url}/{{path}}?other=0ther")])
        assert store.read("small.bin", 0, 10) == SMALL[:10]
        elsewhere = f"{there.requests}"
        errors = []
        refusals = [faults.status(code) for code in (403, 404, 503)]
        for fault in (faults.reset, *refusals, faults.garbage, faults.odd_header, faults.hang):
            here.set_faults([fault] * 1000)
            errors.append(failure(quick(address, options, give_up_after_s=0.4), BIG))
        errors.append(failure(quick("http://me:pa55word@no.invalid/?sig=s1gnature", options, give_up_after_s=0.2), BIG))
        text = f"{elsewhere} {store.address} {store.where(BIG)} {store.traffic} {said(everything_logged, *errors)}"
        assert [secret for secret in (*SECRETS, "0ther=") if secret in text] == []
        assert "other=0ther" not in said(everything_logged, *errors)


def test_the_cache_spares_what_an_earlier_run_has_read(tmp_path: Path) -> None:
    with Server(FILES) as server:
        for _ in range(2):
            store = open_store(server.url, cache_dir=tmp_path)
            assert store.read(BIG, 1000, 5000) == CONTENT[1000:5000]
            store.close()
        assert store.traffic.cached_bytes == 4000
        assert store.traffic.fetched_bytes == 1  # the file is still what it was
        assert open_store(server.url, cache_dir=tmp_path).read(BIG, 500, 20_000) == CONTENT[500:20_000]
        assert server.requests[-1].range == f"bytes={CACHE_BLOCK}-{2 * CACHE_BLOCK - 1}"


def test_a_read_past_the_end_counts_the_bytes_that_are_there(tmp_path: Path) -> None:
    with Server(FILES) as server:
        for cached in (0, len(CONTENT)):
            store = open_store(server.url, cache_dir=tmp_path)
            assert store.read(BIG, 0, 2 * len(CONTENT)) == CONTENT
            assert store.traffic.cached_bytes == cached
            store.close()


@pytest.mark.parametrize(
    ("address", "options", "arguments", "words"),
    [
        ("http://", {}, {}, "address must be the URL of a folder, .*, got"),
        ("http://host/data", {"anon": True}, {}, r"Unknown storage_options for http\(s\)://: anon"),
        ("http://host/data", {"client_kwargs": {"auth": 1}}, {}, r"client_kwargs\['auth'\]"),
        ("http://host/data", {"timeout": -1}, {}, r"storage_options\['timeout'\] must be a positive number of seconds, got -1"),
        ("http://host/data", {}, {"revision": "main"}, "revision must be None except for repositories on the Hub, got"),
        ("http://host/data", {}, {"give_up_after_s": 0}, "give_up_after_s must be .*, got 0"),
        ("http://host/data", {}, {"give_up_after_s": float("inf")}, "give_up_after_s must be .*, got inf"),
        ("http://host/data", {}, {"give_up_after_s": "60"}, "give_up_after_s must be .*, got '60'"),
    ],
)
def test_an_argument_that_does_not_fit(address: str, options: dict, arguments: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words):
        open_store(address, options, **arguments)


class Agreeable(Server):
    """Answers 200 for every file that does not exist, with this body."""

    def __init__(self, files: Path, body: bytes, kind: str) -> None:
        super().__init__(files)
        self.body, self.kind = body, kind

    def handler(self) -> type[Handler]:
        return _AgreeableHandler


class _AgreeableHandler(Handler):
    owner: Agreeable

    def reply(self, status: int, data: bytes, fields: Mapping[str, str] | None = None) -> None:
        if status == 404:
            return super().reply(200, self.owner.body, {"Content-Type": self.owner.kind})
        return super().reply(status, data, fields)


PAGE = b"<!doctype html><title>Robots</title>"


@pytest.mark.parametrize(
    ("body", "kind"),
    [(PAGE, "text/html; charset=utf-8"), (b"not found", "text/plain"), (b"", "text/plain"), (b"{}", "text/json")],
)
def test_a_server_that_answers_for_every_name_is_not_asked_without_end(
    body: bytes, kind: str, small: Path, tmp_path: Path
) -> None:
    with Agreeable(small, body, kind) as server:
        dataset = Dataset(server.url)
        assert dataset.num_episodes == 2
        assert (
            delivered(dataset.without(dataset.cameras))["episode_index"].tolist() == np.repeat([0, 1], dataset.lengths).tolist()
        )
        assert len(server.requests) < 15
        root = copied(small, tmp_path)
        change_info(root, total_episodes=3)
        server.files = root
        with pytest.raises(DatasetError, match=r"total_episodes|Invalid Parquet file .*file-001\.parquet"):
            Dataset(server.url)
        store = open_store(server.url, guess=guessed_files)
        if body == PAGE:
            assert store.files("meta/episodes") == [EPISODE_TABLE]
        else:
            with pytest.raises(StorageError, match=r"answers with success for any name.* Configure it to answer 404"):
                store.files("meta/episodes")
        assert len(server.requests) < 60


def test_a_web_page_in_place_of_a_file_is_a_missing_file(small: Path) -> None:
    with Agreeable(small, PAGE, "text/html") as server:
        dataset = Dataset(server.url)
        assert dataset.subtasks == {}  # the demo has none
        error = failure(dataset.store, "data/chunk-000/file-009.parquet")
        assert isinstance(error, DatasetError)
        assert "no such file" in str(error)
        assert "the server answers with a web page" in str(error)
