"""Check that frames are right in the Loaders that decode on NVDEC, and in features beside it.

    python benchmarks/gpu_features.py [--device cuda] [--size 480x640] [--episodes 8] [--seconds 10] [--parts NAME ...]
                                      [--out FILE]

lockstep         all frames of a Loader for `--seconds`, while some batches are held, others are dropped at once, and the GPU is
                 busy; memory holds few decoded frames, so that their slots are reused. See `tools/selftest/load.py`
gpu cache        the same for frames that are kept in the GPU's memory, which NVDEC decodes
upload           the same for frames that the CPU decodes
two Loaders      two such Loaders at the same time, whose frames are resized
mixture          a mixture of a dataset in H.264 and one in HEVC
frame cache      a Loader fills a cache on disk, and a second Loader reads all frames from it
depth            a colour camera on NVDEC beside a depth camera, which PyAV decodes; its distances must be equal
in place         `Transformed` on the GPU's batches
to the CPU       a camera whose last file NVDEC must not decode, so that the CPU continues with it

Except for the first four, a part compares every frame of two epochs with a Loader on the CPU. The datasets are written to a
temporary folder. A row has the number of frames, of wrong ones, and the decoders. The row of a part that failed has its error
instead. `--device cpu` serves only to test this program: torchcodec decodes on the CPU then. The exit code is 1 if a frame is
wrong or a part failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from argument_types import count, positive
from program import Rows, on_gpu

from dali_stream import Dataset, Loader, Mixture, Transformed
from dali_stream.checks.frame_size import frame_size
from dali_stream.demo import write_demo
from dali_stream.demo.encode import Codec, encode_video
from dali_stream.tools.selftest import load

TOP, SIDE = "observation.images.top", "observation.images.side"
OPEN_GOPS = Codec("libx264", None, "veryfast", {"x264-params": "keyint={gop}:open-gop=1:bframes=1:b-adapt=0"})
EPOCHS, BATCH_SIZE, SMALL = 2, 32, (224, 224)
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", type=frame_size, default=(480, 640), metavar="HxW", help="size of the frames")
    parser.add_argument("--episodes", type=count, default=8, help="number of episodes of a dataset")
    parser.add_argument("--seconds", type=positive, default=10.0, help="duration of the comparison of a Loader")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = on_gpu(parser)
    rows = Rows(arguments)
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(Path(folder), arguments)
        for name in arguments.parts:
            started = time.perf_counter()
            try:
                row = PARTS[name](parts)
            except Exception as error:  # the other parts still run
                row = {"failed": f"{type(error).__name__}: {error}"[:1000]}
            rows.add({"part": name, **row, "seconds": round(time.perf_counter() - started, 2)})
    return 1 if any("failed" in row or row["wrong"] for row in rows.report["rows"]) else 0


class Parts:
    """The parts, and the datasets that they share.

    Args:
        folder: Folder for the datasets.
        arguments: Arguments of the program. If `device` is "cpu", torchcodec decodes on the CPU.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments = folder, arguments
        self._nvdec = "torchcodec" if arguments.gpu is None else "torchcodec-cuda"

    def lockstep(self, image_size: tuple[int, int] | None = None, **options: Any) -> Row:
        root, device = self._written("h264"), self._arguments.device
        return load.lockstep(str(root), device, self._arguments.seconds, image_size, **{"decode": self._nvdec} | options)

    def gpu_cache(self, **options: Any) -> Row:
        room = None if self._arguments.gpu is None else "128MiB"  # slots are reused
        return self.lockstep(SMALL, gpu_cache=room, **options)

    def upload(self) -> Row:
        return self.gpu_cache(decode="torchcodec")

    def two_loaders(self) -> Row:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(self.lockstep, [SMALL] * 2)
        return first | {key: first[key] + second[key] for key in ("frames", "wrong", "route_changes")}

    def mixture(self) -> Row:
        roots = {"first": self._written("h264"), "second": self._written("hevc", gop=12)}
        with self._loader(Mixture(roots)) as ours, on_cpu(Mixture(roots)) as theirs:
            return compared(ours, theirs)

    def frame_cache(self) -> Row:
        root, cache = self._written("h264"), self._folder / "frames"
        with self._loader(root, frame_cache=cache) as ours, on_cpu(root) as theirs:
            row = compared(ours, theirs)
        with self._loader(root, frame_cache=cache) as ours, on_cpu(root) as theirs:
            again = compared(ours, theirs)
            decoded = ours.stats()["decoded_frames"]
        if decoded:
            raise AssertionError(f"the second Loader must decode nothing, got {decoded} frames")
        return row | {key: row[key] + again[key] for key in ("frames", "wrong")}

    def depth(self) -> Row:
        root = with_depth(self._written("h264", name="depth"))
        with self._loader(root) as ours, on_cpu(root) as theirs:
            return compared(ours, theirs, equal=[SIDE])

    def in_place(self) -> Row:
        root = self._written("h264")
        with Transformed(self._loader(root), moved) as ours, Transformed(on_cpu(root), moved) as theirs:
            return compared(ours, theirs)

    def to_the_cpu(self) -> Row:
        root = with_open_gops(self._written("h264", name="open"))
        with self._loader(root, decode="auto") as ours, on_cpu(root) as theirs:
            return {"before": routes(ours), **compared(ours, theirs)}

    def _written(self, codec: str, gop: int = 2, name: str = "") -> Path:
        root, (episodes, size) = self._folder / (name or codec), (self._arguments.episodes, self._arguments.size)
        return root if root.exists() else write_demo(root, episodes=episodes, codec=codec, gop=gop, size=size)

    def _loader(self, data: Path | Mixture, **options: Any) -> Loader:
        """Return the tested Loader. Most frames are decoded for each batch, so few are decoded once only."""
        given = {"device": self._arguments.device, "decode": self._nvdec, "memory_budget": "64MiB"} | options
        return Loader(data, batch_size=BATCH_SIZE, rank=0, world_size=1, **given)


PARTS: dict[str, Callable[[Parts], Row]] = {  # most important first
    "lockstep": Parts.lockstep,
    "gpu cache": Parts.gpu_cache,
    "upload": Parts.upload,
    "two Loaders": Parts.two_loaders,
    "mixture": Parts.mixture,
    "frame cache": Parts.frame_cache,
    "depth": Parts.depth,
    "in place": Parts.in_place,
    "to the CPU": Parts.to_the_cpu,
}


def on_cpu(data: Path | Mixture) -> Loader:
    """Return the Loader to compare with, which keeps its frames."""
    return Loader(data, batch_size=BATCH_SIZE, rank=0, world_size=1, device="cpu", decode="torchcodec")


def moved(sample: dict[str, Any]) -> dict[str, Any]:
    """Function of `Transformed`: shift the frames by random distances, and return the identity of the sample as well."""
    shift = random.randrange(8), int(torch.randint(8, ()))
    frames = {key: torch.roll(sample[key], shift, (-2, -1)) for key in (TOP, SIDE)}
    return {"index": sample["index"], **frames}


def compared(ours: Loader | Transformed, theirs: Loader | Transformed, equal: Iterable[str] = ()) -> Row:
    """Compare the frames of two Loaders over `EPOCHS` epochs. Cameras in `equal` must have the same values.

    Returns:
        A row with the number of frames and of wrong ones, the largest mean absolute difference of a frame in 8-bit values, the
        decoders at the end, and the number of their changes.
    """
    frames = wrong = other_rows = 0
    differences = list[torch.Tensor]()
    for mine, expected in zip(epochs(ours), epochs(theirs), strict=True):
        other_rows += not torch.equal(mine["index"].cpu(), expected["index"])
        for camera in ours.dataset.cameras:
            a, b = mine[camera].unsqueeze(1), expected[camera].unsqueeze(1)
            frames += len(a)
            if camera in equal:
                wrong += int((a.cpu() != b).flatten(1).any(1).sum())
            else:
                differences += load.differences([a], [b], str(a.device))
    found = torch.cat(differences) if differences else torch.zeros(0, 2)
    if other_rows:
        raise AssertionError(f"{other_rows} batches have other rows than those of the CPU")
    return {
        "frames": frames,
        "wrong": wrong + load.count_wrong(found),
        "worst_mean": float(found[:, 0].max()) if len(found) else None,
        "routes": routes(ours),
        "route_changes": ours.stats()["route_changes"],
    }


def epochs(loader: Loader | Transformed) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(itertools.repeat(loader, EPOCHS))


def routes(loader: Loader | Transformed) -> dict[str, str]:
    return {camera: route.decoder for camera, route in loader.routes.items()}


def with_depth(root: Path) -> Path:
    """Replace the second camera of a demo dataset by a depth camera, whose distances are the brightness. Return `root`."""
    for path in (root / "videos" / SIDE).rglob("*.mp4"):
        with av.open(path) as source:
            rate = source.streams.video[0].average_rate
            images = [frame.to_ndarray(format="gray").astype(np.uint16) * 16 for frame in source.decode(video=0)]
        with av.open(path, "w") as target:
            options = {"x265-params": "lossless=1:keyint=2:min-keyint=2:log-level=none"}
            stream = target.add_stream("libx265", rate=rate, options=options)
            stream.height, stream.width = images[0].shape
            stream.pix_fmt = "gray12le"
            for image in images:
                frame = av.VideoFrame.from_ndarray(image, format="gray16le").reformat(format="gray12le")
                target.mux(stream.encode(frame))
            target.mux(stream.encode(None))
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    camera = info["features"][SIDE]
    camera["shape"] = [*camera["shape"][:2], 1]
    camera["info"] = {"is_depth_map": True, "video.pix_fmt": "gray12le"}
    path.write_text(json.dumps(info))
    return root


def with_open_gops(root: Path) -> Path:
    """Encode the last file of the first camera of a demo dataset with open GOPs. Return `root`."""
    path = max((root / "videos" / TOP).rglob("*.mp4"))
    with av.open(path) as source:
        images = np.stack([frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)])
    path.unlink()
    encode_video(images, path, codec=OPEN_GOPS, gop=12, fps=round(Dataset(root).fps))
    return root


if __name__ == "__main__":
    sys.exit(main())
