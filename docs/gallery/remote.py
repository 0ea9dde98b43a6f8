"""A remote dataset: one epoch from a web server, and one from the cache on disk."""

import http.server
import threading
from pathlib import Path

import matplotlib.pyplot as plt

import dali_stream


class Files(http.server.BaseHTTPRequestHandler):
    """Handler that sends ranges of the files in a folder, as other web servers do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        file = Path("demo", self.path.lstrip("/"))
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
threading.Thread(target=server.serve_forever, daemon=True).start()

size = sum(path.stat().st_size for path in Path("demo").rglob("*") if path.is_file())
epochs = {}
for run in ("first run", "second run"):
    dataset = dali_stream.Dataset(f"http://127.0.0.1:{server.server_port}", cache_dir="cache")
    with dali_stream.Loader(dataset, batch_size=16, last_batch="partial") as loader:
        frames = sum(len(batch["index"]) for batch in loader)
        epochs[run] = stats = loader.stats()
    print(f"{run}: {frames} frames, {stats['fetched_bytes']:,} bytes from the network in {stats['requests']} requests, "
          f"{stats['cached_bytes']:,} bytes from the cache")  # fmt: skip
server.shutdown()

network, cache = ([stats[name] / 1e3 for stats in epochs.values()] for name in ("fetched_bytes", "cached_bytes"))
figure, axis = plt.subplots(figsize=(8, 2.2), layout="constrained")
axis.barh(list(epochs), network, color="C1", label="network")
axis.barh(list(epochs), cache, left=network, color="C0", label="cache")
axis.axvline(size / 1e3, color="0.4", linestyle="--", label="size of the dataset")
axis.set(xlabel="kB")
axis.invert_yaxis()
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
figure.savefig("remote.png")
