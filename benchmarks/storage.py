"""Measure range reads with each client: requests/s, MB/s, CPU time and interpreter time per request.

    python benchmarks/storage.py [--ranges 16384 65536 4194304] [--threads 1 16] [--clients NAME ...] [--seconds 3] [--json]

nginx (Debian's package) serves a file of 64 MiB on loopback. The clients read it over HTTP, or as an object of an anonymous S3
bucket. They are the stores of dali_stream, with retries, checks and pinned versions, and for comparison obstore, http.client,
urllib3 and s3fs without these features, if they are installed. py-spy measures the time of the interpreter in a separate run,
as in interpreter.py. nginx uses the same cores.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argument_types import count
from interpreter import RATE, watched

import dali_stream
from dali_stream.storage import open_store
from dali_stream.tools import environment

SIZE = 64 << 20
CONFIG = """
daemon off; pid {folder}/pid; error_log {folder}/log; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000000;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d;
  scgi_temp_path {folder}/e;
  server {{
    listen 127.0.0.1:{port}; root {folder}/www;
    location = /robots {{ return 200 "<ListBucketResult></ListBucketResult>"; }}
  }}
}}
"""
Read = Callable[[int, int], bytes]


def find_nginx() -> str | None:
    """Return the path of nginx, if it is installed. On Debian, its folder is not in the PATH of users."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--ranges", type=count, nargs="+", default=[16 << 10, 64 << 10, 4 << 20], help="sizes of the reads, in bytes"
    )
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 16])
    parser.add_argument("--clients", choices=CLIENTS, nargs="+", default=list(CLIENTS))
    parser.add_argument("--seconds", type=count, default=3, help="duration of each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    nginx = find_nginx()
    if nginx is None:
        print("storage: skipped, because nginx is not installed: apt-get install nginx")
        return 0
    spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    rows = []
    with served(nginx, lambda folder: (folder / "data").write_bytes(os.urandom(1 << 20) * (SIZE >> 20))) as url:
        for name, size, threads in itertools.product(arguments.clients, arguments.ranges, arguments.threads):
            try:
                read = CLIENTS[name](url)
            except ImportError as error:
                print(f"{name}: skipped, since {error.name} is not installed")
                break
            rows.append(
                {"client": name, "range": size, "threads": threads} | measure(read, size, threads, arguments.seconds, spy)
            )
            print(
                "{client:16} {range:8} bytes, {threads:3} threads: {text}".format(**rows[-1], text=as_text(rows[-1])),
                flush=True,
            )
    if arguments.json:
        print(environment.report_json({"rows": rows, "seconds": arguments.seconds, **environment.ran_on("cpu")}))
    return 0


def as_text(row: dict[str, Any]) -> str:
    """Return a measurement as text."""
    held = "" if row["interpreter_us"] is None else f", interpreter {row['interpreter_us']:5.0f} us"
    return f"{row['requests_per_s']:7.0f} requests/s, {row['megabytes_per_s']:6.0f} MB/s, CPU {row['cpu_us']:5.0f} us{held}"


def measure(read: Read, size: int, threads: int, seconds: int, spy: str | None) -> dict[str, Any]:
    """Measure reads with all threads for some seconds, and then again while py-spy samples the process."""
    with reading(read, size, threads) as done:
        time.sleep(0.3)
        began, cpu, before = time.perf_counter(), time.process_time(), done()
        time.sleep(seconds)
        requests, cpu, took = done() - before, time.process_time() - cpu, time.perf_counter() - began
        held = None
        if spy is not None:
            stacks, _, rate = watched(map(time.sleep, itertools.repeat(0.02)), done, seconds, spy)
            held = sum(stacks.values()) / RATE / seconds / rate * 1e6
    rate = requests / took
    return {
        "requests_per_s": rate,
        "megabytes_per_s": rate * size / 1e6,
        "cpu_us": cpu / requests * 1e6,
        "interpreter_us": held,
    }


@contextmanager
def reading(read: Read, size: int, threads: int) -> Iterator[Callable[[], int]]:
    """Run threads that read one range after the other. Yield a function that returns the number of ranges read so far."""
    end, counts = threading.Event(), [0] * threads

    def work(number: int) -> None:
        for at in itertools.cycle(range(number * size % SIZE, SIZE - size + 1, size)):
            if end.is_set():
                return
            if len(read(at, at + size)) != size:
                raise AssertionError(f"a short read at {at}")
            counts[number] += 1

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield lambda: sum(counts)
    finally:
        end.set()
        for thread in running:
            thread.join()


@contextmanager
def served(nginx: str, write: Callable[[Path], object]) -> Iterator[str]:
    """Run nginx with a bucket `robots`. Yield its URL.

    Args:
        nginx: Path of nginx.
        write: Function that writes the files of the bucket to a folder. Listings of the bucket are empty.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as name:
        free.bind(("127.0.0.1", 0))
        port, folder = free.getsockname()[1], Path(name)
        free.close()
        folder.chmod(0o755)  # nginx changes to another user, which must be able to read the folder
        (folder / "www/robots").mkdir(parents=True)
        write(folder / "www/robots")
        (folder / "config").write_text(CONFIG.format(folder=folder, port=port))
        with subprocess.Popen([nginx, "-c", str(folder / "config"), "-e", str(folder / "log")]) as program:
            try:
                until = time.monotonic() + 30
                while socket.socket().connect_ex(("127.0.0.1", port)):
                    if program.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(f"nginx does not start: {(folder / 'log').read_text()[-300:]}")
                    time.sleep(0.05)
                yield f"http://127.0.0.1:{port}"
            finally:
                program.terminate()


def _dali_stream_s3(url: str) -> Read:
    store = open_store("s3://robots", {"anon": True, "endpoint_url": url})
    return lambda start, stop: store.read("data", start, stop)


def _dali_stream_http(url: str) -> Read:
    store = open_store(f"{url}/robots")
    return lambda start, stop: store.read("data", start, stop)


def _obstore(url: str) -> Read:
    import obstore
    from obstore.store import S3Store

    store = S3Store("robots", endpoint=url, skip_signature=True, region="us-east-1", client_options={"allow_http": True})
    return lambda start, stop: bytes(obstore.get_range(store, "data", start=start, end=stop))


def _http_client(url: str) -> Read:
    local = threading.local()

    def read(start: int, stop: int) -> bytes:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(url.removeprefix("http://"))
        local.connection.request("GET", "/robots/data", headers={"Range": f"bytes={start}-{stop - 1}"})
        data: bytes = local.connection.getresponse().read()
        return data

    return read


def _urllib3(url: str) -> Read:
    import urllib3

    pool = urllib3.PoolManager(maxsize=64)

    def read(start: int, stop: int) -> bytes:
        data: bytes = pool.request("GET", f"{url}/robots/data", headers={"Range": f"bytes={start}-{stop - 1}"}).data
        return data

    return read


def _s3fs(url: str) -> Read:
    import s3fs

    files = s3fs.S3FileSystem(anon=True, endpoint_url=url, config_kwargs={"max_pool_connections": 64})

    def read(start: int, stop: int) -> bytes:
        data: bytes = files.cat_file("robots/data", start=start, end=stop)
        return data

    return read


CLIENTS: dict[str, Callable[[str], Read]] = {
    "dali_stream s3": _dali_stream_s3,
    "dali_stream http": _dali_stream_http,
    "obstore": _obstore,
    "http.client": _http_client,
    "urllib3": _urllib3,
    "s3fs": _s3fs,
}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except dali_stream.DaliStreamError as error:
        print(f"storage: {error}", file=sys.stderr)
        sys.exit(1)
