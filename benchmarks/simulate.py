"""Simulate whether a cluster's network keeps up with training, with the loader's schedule and a queue model, on a laptop.

    python benchmarks/simulate.py --nodes 64 --dataset-tb 100 --bandwidth-gbps 25 [--latency-ms 50] [--step-ms 200] [--json]

The schedule of the Loader decides what is read, decoded, kept and dropped, and when. The network and the decoder are queues.
See queue_model.py. The dataset is invented, with the layout of LeRobot.

The simulation does not include the time of the interpreter; the time of decoding, unless --decode-fps gives its speed; lost
packets, retries, and limits of a server or a connection; and cache_dir. All ranks do the same work, so only `--ranks` of them
are simulated. Each rank has its share of the bandwidth of its node, and the ranks wait for each other in every step. The more
ranks are simulated, the slower the slowest of them is.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from argument_types import count, not_negative, positive
from queue_model import MOST_EPISODES, Outcome, Recording, Training, simulate

import dali_stream
from dali_stream.checks.arguments import byte_count
from dali_stream.checks.frame_size import frame_size, join_sizes
from dali_stream.order import default_pools
from dali_stream.tools import environment
from dali_stream.tools.bench.measure import MODES

KEEPS_UP = 0.01  # maximum share of the time that training may wait
PRECISION = 1.07  # maximum ratio of the result of the search to the smallest sufficient bandwidth
MOST_FRAMES, MOST_TB = 1_000_000, 1_000_000


def main(argv: list[str] | None = None) -> int:
    """Run the program. Return its exit code.

    Args:
        argv: Arguments of the program. Default: the arguments of the command line.
    """
    arguments = _parser().parse_args(join_sizes(argv))
    try:
        report = plan(arguments)
    except (dali_stream.DaliStreamError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    print(text(report))
    if arguments.json:
        print(environment.report_json(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--nodes", type=count, default=1)
    add("--gpus-per-node", type=count, default=8, help="one rank each")
    add("--dataset-tb", type=positive, default=1.0, help="encoded video, in 10^12 bytes")
    add("--episode-seconds", type=positive, default=30.0)
    add("--fps", type=positive, default=30.0)
    add("--cameras", type=count, default=3)
    add("--bitrate-mbps", type=positive, default=4.0, help="bitrate of a camera")
    add("--gop", type=count, default=2, help="distance of keyframes, in frames")
    add("--bandwidth-gbps", type=positive, default=10.0, help="bandwidth of a node, in 10^9 bits per second")
    add("--latency-ms", type=not_negative, default=50.0, help="latency of a request")
    add("--step-ms", type=positive, default=200.0, help="duration of a training step, without waiting for the loader")
    add("--decode-fps", type=positive, help="frames that a rank decodes per second; default: decoding takes no time")
    add("--image-size", type=frame_size, default=(480, 640), metavar="HxW", help="height and width of a decoded frame")
    add("--batch-size", type=count, default=64, help="samples per batch of a rank")
    add("--mode", choices=MODES, default="single")
    add("--memory-budget", default="4GiB", help="memory_budget of a rank")
    add("--consumers", type=count, help="default: that of the Loader")
    add("--pool", type=count, help="episode_pool_size; default: that of the Loader")
    add("--minutes", type=positive, default=1.0, help="maximum simulated time; the second half is judged")
    add("--ranks", type=count, default=1, help="number of ranks that are simulated")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object as the last line")
    return parser


class Cluster:
    """The cluster and the training that the arguments describe. `run` simulates them, also with changes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        a = arguments
        self.world = a.nodes * a.gpus_per_node
        self.ranks, self.gpus = min(a.ranks, self.world), a.gpus_per_node
        if not 1 <= a.episode_seconds * a.fps <= MOST_FRAMES or a.dataset_tb > MOST_TB:
            raise ValueError(
                f"an episode must have at most {MOST_FRAMES} frames, and the dataset {MOST_TB} TB, got "
                f"{a.episode_seconds * a.fps:g} frames and {a.dataset_tb:g} TB"
            )
        self.recording = Recording(
            a.dataset_tb * 1e12, a.episode_seconds, a.fps, a.cameras, a.bitrate_mbps * 1e6, min(a.gop, 1 << 20)
        )
        consumers, pool = default_pools(a.batch_size, self.world, a.consumers, a.pool)
        steps = max(round(a.minutes * 60e3 / a.step_ms), 20)
        whole = self.recording.num_frames // (a.batch_size * self.world)
        self.training = Training(
            batch_size=a.batch_size,
            step_s=a.step_ms / 1e3,
            steps=min(steps, whole) or 1,
            mode=a.mode,
            memory_budget=byte_count(a.memory_budget),
            consumers=consumers,
            pool=pool,
            seed=a.seed,
            decode_frames_per_s=a.decode_fps,
            frame_bytes=math.prod(a.image_size) * 3,
        )
        self.bandwidth, self.latency_s = a.bandwidth_gbps * 1e9 / 8, a.latency_ms / 1e3

    @property
    def demand(self) -> float:
        """Encoded video that training at full speed consumes if each frame is fetched once, in bytes per second and node."""
        samples_per_s = self.training.batch_size / self.training.step_s * self.gpus
        return samples_per_s * self.recording.packet * len(self.recording.cameras)

    @property
    def pool_bytes(self) -> int:
        """Size of the encoded video of the episodes that a rank draws from, in bytes."""
        consumers = max(self.training.consumers // self.world, 1)
        episodes = min(consumers * self.training.pool, -(-self.recording.num_episodes // self.world) + consumers)
        return episodes * self.recording.episode_bytes

    @property
    def share_bytes(self) -> float:
        """Approximate size of the encoded video that a rank delivers in an epoch, in bytes.

        The exact size differs a little, since segments are cut within episodes.
        """
        return self.recording.bytes_in_all / self.world

    @property
    def fits(self) -> bool:
        """Whether all encoded video of a rank fits in its memory, so that it is fetched only once."""
        return self.share_bytes < self.training.memory_budget // 2

    def judged(self, outcome: Outcome, bandwidth: float) -> bool | None:
        """Return whether the network keeps up. None if training waits, but the warm-up did not fill the pools."""
        if bandwidth < self.demand and not self.fits:
            return False
        return keeps_up(outcome) or (False if self.filled(outcome) else None)

    def filled(self, outcome: Outcome) -> bool:
        """Return whether the pools were full at the end of the warm-up."""
        full = min(self.pool_bytes, 0.9 * self.share_bytes, self.training.memory_budget // 2)
        return outcome.fetched[outcome.warmup] >= full * self.ranks

    def run(self, bandwidth: float | None = None, *, whole: bool = True, **changes: Any) -> Outcome:
        """Simulate a run.

        Args:
            bandwidth: Bandwidth of a node. Default: that of the arguments.
            whole: Whether to simulate all steps. Otherwise, the run ends when training has waited too long. Default: True.
            changes: Attributes of the training to change.
        """
        training = dataclasses.replace(self.training, **changes)
        share = (bandwidth or self.bandwidth) / self.gpus
        patience = math.inf if whole else _patience(training)
        return simulate(self.recording, training, share, self.latency_s, self.world, self.ranks, patience)

    def smallest_bandwidth(self, as_it_is: bool) -> float | None:
        """Return the smallest bandwidth of a node that keeps up, or None.

        Args:
            as_it_is: Whether the available bandwidth keeps up.
        """

        def keeps(bandwidth: float) -> bool:
            if (bandwidth >= self.bandwidth) == as_it_is:
                return as_it_is  # more bandwidth is never worse
            return bool(self.judged(self.run(bandwidth, whole=False), bandwidth))

        return smallest(keeps, 1.1 * self.demand)


def _patience(training: Training) -> float:
    """Return the waiting time in seconds after which a run cannot keep up anymore."""
    left = training.steps - int(training.steps * training.warmup)
    return KEEPS_UP * left * training.step_s / (1 - KEEPS_UP)


def keeps_up(outcome: Outcome) -> bool:
    """Return whether training waits for at most 1 % of the time after the warm-up."""
    return outcome.wait_share <= KEEPS_UP


def smallest(keeps: Callable[[float], bool], start: float, most: float = 16.0) -> float | None:
    """Return the smallest bandwidth that keeps up, within `PRECISION`.

    The search begins at `start`, moves away from it until the answer changes, and then bisects. It returns None if `most` times
    `start` does not keep up, and the last tested bandwidth if even `start` divided by `most` does.
    """
    low = high = start
    enough, factor = keeps(start), 1.25
    while low == high or keeps(low if enough else high) == enough:
        if max(high / start, start / low) > most:
            return low if enough else None
        low, high = (low / factor, low) if enough else (high, high * factor)
        factor = min(factor * 1.25, 2.0)
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate the cluster as it is. Find the smallest bandwidth that keeps up, and other remedies. Return the report."""
    began = time.perf_counter()
    cluster = Cluster(arguments)
    outcome = cluster.run()
    verdict = cluster.judged(outcome, cluster.bandwidth)
    least = None if verdict is None else cluster.smallest_bandwidth(verdict)
    half = outcome.warmup
    fetched = outcome.fetched[-1] - outcome.fetched[half]
    seconds = sum(outcome.waits[half + 1 :]) + (len(outcome.waits) - half - 1) * cluster.training.step_s
    each = cluster.gpus / cluster.ranks
    return {
        "keeps_up": verdict,
        "steps": len(outcome.waits),
        "wait_share": outcome.wait_share,
        "waiting_steps_share": outcome.waiting_steps,
        "wait_s": float(sum(outcome.waits[half:])),
        "wait_s_while_the_pools_fill": float(sum(outcome.waits[1:half])),
        "first_batch_s": outcome.waits[0],
        "simulated_s": outcome.seconds,
        "needed_gbps": cluster.demand * 8e-9,
        "fetched_gbps": fetched * each / max(seconds, cluster.training.step_s) * 8e-9,
        "available_gbps": cluster.bandwidth * 8e-9,
        "smallest_gbps": None if least is None else least * 8e-9,
        "requests_per_s_node": outcome.requests * each / outcome.seconds,
        "evicted_early": outcome.evicted,
        "decodes_per_frame": outcome.decodes,
        "peak_resident_bytes": outcome.peak_resident,
        "pool_bytes": cluster.pool_bytes,
        "memory_budget": cluster.training.memory_budget,
        "world_size": cluster.world,
        "consumers": cluster.training.consumers,
        "episode_pool_size": cluster.training.pool,
        "episodes": cluster.recording.episodes,
        "days_an_epoch": cluster.recording.bytes_in_all / cluster.demand / arguments.nodes / 86400,
        "ranks": cluster.ranks,
        "advice": advice(cluster, outcome, verdict, least),
        "arguments": vars(arguments),
        "wall_s": time.perf_counter() - began,
        **environment.ran_on("cpu"),
    }


def advice(cluster: Cluster, outcome: Outcome, verdict: bool | None, least: float | None) -> list[str]:
    """Return texts with advice. All bandwidths, budgets and pool sizes in them were simulated."""
    remedies = []
    if cluster.fits:
        remedies.append("all video of a rank fits into its memory_budget, so nothing is fetched after the first pass")
    if outcome.evicted:
        remedies += _more_room(cluster)
    if not cluster.filled(outcome):
        remedies.append("the pools were not full half way through, when judging begins: give more --minutes")
    if verdict is not False:
        return remedies
    if least is None:
        remedies.append(
            "no bandwidth is enough: requests, above all those for blocks that were evicted, or decoding take too long"
        )
    else:
        remedies.append(f"{least * 8e-9:.2f} Gbit/s a node keep up as it is")
    slower = outcome.step_s / (1 - outcome.wait_share)
    remedies.append(f"as it is, a step takes {slower * 1e3:.0f} ms instead of {outcome.step_s * 1e3:.0f}")
    return remedies


def _more_room(cluster: Cluster) -> list[str]:
    """Return remedies with which no byte is fetched twice: a budget that holds the pools, or pools that fit in the budget."""
    training, remedies = cluster.training, []
    room = int(cluster.pool_bytes * 2.6)  # more than twice the pools, since half of the budget is for decoded frames
    changes: list[tuple[str, dict[str, Any]]] = []
    if room > training.memory_budget:
        changes.append((f"memory_budget {room / 2**30:.1f} GiB", {"memory_budget": room}))
    if smaller := min(training.pool * training.memory_budget // room, training.pool - 1):
        changes.append((f"episode_pool_size {smaller}", {"pool": smaller}))
    for name, change in changes:
        with_it = cluster.run(**change)
        does = "keeps up" if keeps_up(with_it) else f"waits {with_it.wait_share:.0%} of the time"
        remedies.append(f"{name} {does}, and fetches {_less(with_it, cluster)}")
    return remedies


def _less(outcome: Outcome, cluster: Cluster) -> str:
    used = (
        len(outcome.waits)
        * cluster.training.batch_size
        * cluster.ranks
        * cluster.recording.packet
        * len(cluster.recording.cameras)
    )
    return f"{outcome.fetched[-1] / used:.1f} times the video that was delivered, including the pools"


def text(report: dict[str, Any]) -> str:
    """Return the report as text."""
    settings, gib = report["arguments"], 2**30
    episodes = f"{report['episodes']} episodes" + (f", {MOST_EPISODES} laid out" if report["episodes"] > MOST_EPISODES else "")
    verdict = {True: "keeps up", False: "stalls", None: "undecided"}[report["keeps_up"]]
    needs = "no bandwidth is enough" if report["smallest_gbps"] is None else f"{report['smallest_gbps']:.2f} are enough"
    needs = "what is enough is undecided" if report["keeps_up"] is None else needs
    lines = [
        f"{verdict}: {report['world_size']} ranks on {settings['nodes']} nodes, {settings['dataset_tb']:g} TB in {episodes}",
        f"waits        {report['waiting_steps_share']:.1%} of the steps, {report['wait_share']:.1%} of the time, "
        f"{report['wait_s']:.1f} s; {report['wait_s_while_the_pools_fill']:.1f} s before, while the pools fill",
        f"first batch  {report['first_batch_s']:.2f} s",
        f"a node       shows {report['needed_gbps']:.2f} Gbit/s of video, fetches {report['fetched_gbps']:.2f} of "
        f"{report['available_gbps']:.2f}; {needs}; {report['requests_per_s_node']:.0f} requests/s",
        f"a rank       {report['peak_resident_bytes'] / gib:.2f} GiB at most of {report['memory_budget'] / gib:.2f}; its pools "
        f"have {report['pool_bytes'] / gib:.2f}; {report['evicted_early']} blocks evicted early",
        f"an epoch     {report['days_an_epoch']:.1f} days",
    ]
    lines += [f"advice       {line}" for line in report["advice"]]
    return "\n".join(
        [*lines, f"{report['steps']} steps of {report['ranks']} rank(s) simulated, {report['wall_s']:.0f} s in all"]
    )


if __name__ == "__main__":
    logging.getLogger("dali_stream").setLevel(logging.ERROR)  # the report contains its warnings
    sys.exit(main())
