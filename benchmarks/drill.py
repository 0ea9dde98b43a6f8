"""Train on two nodes while ranks, nodes, the server, disks and clocks fail, and check that nothing is lost or repeated.

    python benchmarks/drill.py [--faults 105] [--kinds kill_rank kill_node ...] [--seed 0] [--time-limit-s 3600] [--loopback]
                               [--report FILE]

The nodes are two network namespaces, and an S3 server is in a third one. Each node has two ranks of drill_rank.py under
torchrun on gloo, and a small disk for `cache_dir` and `frame_cache`. The checkpoints are on another small disk. The faults come
one after the other, in an order that the seed chooses. torchrun is started again after each end of the ranks, as by a job that
is requeued.

At the end, the same steps are made on one node without faults, from the dataset in a folder. The drill compares the samples and
losses of all steps. A step counts unless the run was resumed later from a checkpoint before it. The drill fails if a sample of
an epoch is missing or comes twice, if a loss differs in any bit, if an end of the ranks leaves a process or a file, if a fault
ends a run that should survive it, or if the run hangs.

A fault loses the time from its beginning to the end of the steps that follow it, less the median time of this number of steps.

If the kernel refuses namespaces, the nodes are folders, all addresses are on loopback, and no disk is full. When the drill ends
or is killed, nothing remains: the kernel removes the namespaces, or a process that waits for the drill's end removes the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from argument_types import count, new_file, positive

KINDS = {  # {method of Drill: (number in 105 faults, starts that follow, seconds that it waits, name)}
    "kill_loader": (18, 0, 0, "Loader's process killed"),
    "reset": (15, 0, 0, "connections reset"),
    "fill_caches": (12, 0, 0, "disk of the caches full"),
    "change_clock": (12, 0, 0, "clock jumps"),
    "leave_5_s": (10, 0, 5, "server away for 5 s"),
    "slow_down": (8, 0, 10, "server slow for 10 s"),
    "kill_rank": (9, 1, 0, "rank killed"),
    "kill_node": (6, 1, 0, "node killed, resumed on the other one"),
    "return_node": (6, 1, 0, "node back, resumed on two"),
    "fill_checkpoints": (4, 1, 0, "disk of the checkpoints full, then a rank killed"),
    "damage": (3, 2, 20, "damaged file on the server, repaired later"),
    "leave_90_s": (2, 3, 90, "server away for 90 s"),
}
NEED_DISKS = ("fill_caches", "fill_checkpoints")
START_S, STEP_S = 30.0, 0.15  # on 2 busy cores, for the estimate
FOLLOWING = 20  # steps after a fault that belong to it
HANG_S = 240.0  # time without a step after which a run hangs
END_S = 20.0  # time that processes have for their end
LOADER = {"global_batch": 12, "cache_bytes": "150KiB", "frame_cache_bytes": "6MiB", "memory_budget": "400KiB"}
SAVE_EVERY = 5  # steps
SETTINGS = {**LOADER, "save_every": SAVE_EVERY, "steps": 0}
DISKS = {"node0/disk": "8m", "node1/disk": "8m", "checkpoint": "64k"}
BUCKET, ROOT = "robots", Path(__file__).parents[1]
RANK = ROOT / "benchmarks/drill_rank.py"
INSIDE = "DRILL_INSIDE"  # environment variable of the drill in its namespaces
CLOCK = """\
import os, time
def jumped(read, unit):
    def now():
        with open(os.environ["DRILL_CLOCK"]) as file:
            return read() + int(file.read()) * unit
    return now
time.time, time.time_ns = jumped(time.time, 1), jumped(time.time_ns, 10**9)
"""  # sitecustomize.py, which every Python process of the nodes imports


def main() -> int:
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        return guard(Path(sys.argv[1]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--faults", type=count, default=105, help="about how many faults, at least one of each kind")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", type=count, default=2, help="ranks of each node")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit-s", type=positive, default=3600, help="time after which no other fault follows")
    parser.add_argument("--loopback", action="store_true", help="use folders and loopback in place of namespaces")
    parser.add_argument("--report", type=new_file, help="file for the report as JSON")
    arguments = parser.parse_args()
    if INSIDE not in os.environ and not arguments.loopback:
        namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        namespaces[1:1] = ["--user", "--map-root-user"] if os.geteuid() else []
        attempt = [*namespaces, "sh", "-c", "mount -t tmpfs tmpfs /run && ip netns add a && ip link add name drill type veth"]
        if shutil.which("unshare") and not subprocess.run(attempt, capture_output=True, check=False).returncode:
            # With this process, the kernel kills unshare, then the drill, and then all that is in its namespaces.
            inside = ["setpriv", "--pdeathsig", "KILL", *namespaces, sys.executable, *sys.argv]
            return subprocess.run(inside, env=os.environ | {INSIDE: "1"}, check=False).returncode
        print("This kernel refuses namespaces, so the nodes are folders, and no disk is full.")
    with contextlib.ExitStack() as stack:
        report = Drill(arguments, Nodes(stack, INSIDE in os.environ), stack).run()
    for row in report["kinds"]:
        print("{name:50} {count:3} times, {median_s:5.1f} s lost, at most {max_s:.1f} s".format(**row))
    print("{steps} steps, {starts} starts, {seconds:.0f} s".format(**report))
    print("\n".join(report["failures"]) or "no failures")
    if arguments.report:
        from dali_stream.tools import environment

        settings = {name: getattr(arguments, name) for name in ("faults", "kinds", "ranks", "seed")}
        environment.write_report(arguments.report, {"arguments": settings, **environment.ran_on("cpu"), **report})
    return bool(report["failures"])


def guard(folder: Path) -> int:
    """Wait for the end of the drill. Then kill what it has started, and remove its folder."""
    sys.stdin.read()
    kill(marked(folder))
    shutil.rmtree(folder)
    return 0


class Nodes:
    """Two nodes, the server's machine and the small disks.

    Args:
        stack: Stack that removes what the kernel does not.
        namespaces: Whether this process is in namespaces of its own.
    """

    def __init__(self, stack: contextlib.ExitStack, namespaces: bool) -> None:
        self.namespaces = namespaces
        if namespaces:
            run("mount", "-t", "tmpfs", "tmpfs", "/run")
            run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="drill-", dir="/run" if namespaces else None))
        self.addresses = ["10.77.0.1", "10.77.0.2", "10.77.0.3"] if namespaces else ["127.0.0.1"] * 3  # server, nodes
        self._shared_memory = set(os.listdir("/dev/shm"))
        if not namespaces:
            waiting = subprocess.Popen([sys.executable, __file__, self.folder], stdin=subprocess.PIPE, start_new_session=True)
            stack.enter_context(waiting)  # closes its standard input, and waits for it
        for name in ("node0/tmp", "node1/tmp", "site", *DISKS):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "site/sitecustomize.py").write_text(CLOCK)
        self.set_clock(0)
        if namespaces:
            for name, size in DISKS.items():
                run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.folder / name)
            run("ip", "link", "add", "name", "bridge0", "type", "bridge")
            run("ip", "link", "set", "bridge0", "up")
            for name, address in zip(("server", "node0", "node1"), self.addresses, strict=True):
                run("ip", "netns", "add", name)
                run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                run("ip", "link", "set", name, "master", "bridge0", "up")
                run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")

    def link(self, name: str, state: str) -> None:
        """Connect a machine with the others ("up"), or let its packets be lost ("down")."""
        if self.namespaces:
            run("ip", "link", "set", name, state)

    @contextlib.contextmanager
    def at_the_server(self) -> Iterator[None]:
        """Make the sockets of this thread in the server's namespace."""
        if not self.namespaces:
            yield
            return
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
        with open("/proc/thread-self/ns/net") as own, open("/run/netns/server") as other:
            assert not libc.setns(other.fileno(), 0)
            yield
            assert not libc.setns(own.fileno(), 0)

    def set_clock(self, seconds: int) -> None:
        """Set how far the clocks of the nodes are ahead."""
        (self.folder / "clock.new").write_text(str(seconds))
        (self.folder / "clock.new").replace(self.folder / "clock")

    @contextlib.contextmanager
    def full(self, disk: str) -> Iterator[None]:
        """Fill a disk up."""
        file = self.folder / disk / "filler"
        with contextlib.suppress(OSError), open(file, "wb", buffering=0) as stream:
            while stream.write(bytes(512)):
                pass
        yield
        file.unlink()

    def kill(self, node: int) -> None:
        """Kill all processes of a node, without a packet to the other one. Another machine replaces it."""
        self.link(f"node{node}", "down")
        kill(marked(self.folder / f"node{node}"))

    def replace(self, node: int) -> None:
        """Put a machine with empty disks in the place of a node."""
        for path in [*(self.folder / f"node{node}/disk").iterdir(), *(self.folder / f"node{node}/tmp").iterdir()]:
            shutil.rmtree(path)
        self.link(f"node{node}", "up")

    def left(self) -> list[str]:
        """Return the processes, temporary files and shared memory that the ranks have left, and remove them."""
        until = time.monotonic() + END_S
        while (processes := marked(self.folder)) and time.monotonic() < until:
            time.sleep(0.05)
        found = [f"process {' '.join(each.cmdline())[-300:]}" for each in processes]
        kill(processes)
        files = [Path("/dev/shm") / name for name in set(os.listdir("/dev/shm")) - self._shared_memory]
        for node in ("node0", "node1"):
            files += (self.folder / node / "tmp").iterdir()
            files += [path for path in (self.folder / node / "disk").rglob(".*") if path.is_file()]  # before they are renamed
        for path in files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found + [f"file {path.relative_to(self.folder)}" for path in files]


class Start:
    """One start of the ranks, with a torchrun on each node.

    Args:
        nodes: See `Nodes`.
        name: Name of its files.
        on: Numbers of the nodes.
        settings: Settings of drill_rank.py.
    """

    def __init__(self, nodes: Nodes, name: str, on: list[int], settings: dict[str, Any]) -> None:
        self.nodes, self.on, self.log = nodes, on, nodes.folder / f"{name}.log"
        self._read, self._lines = 0, list[dict[str, Any]]()
        self.torchruns, self.outputs = [], [nodes.folder / f"{name}-{node}.txt" for node in on]
        meet = ["--master-addr", nodes.addresses[1 + on[0]], "--master-port", 29500 if nodes.namespaces else free_port()]
        for place, node in enumerate(on):
            own = nodes.folder / f"node{node}"
            variables = os.environ | {
                "DRILL": f"{own}/", "DRILL_DISK": f"{own}/disk", "DRILL_LOG": str(self.log), "TMPDIR": f"{own}/tmp",
                "DRILL_SETTINGS": json.dumps(settings), "DRILL_CLOCK": f"{nodes.folder}/clock", "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0" if nodes.namespaces else "lo", "PYTHONPATH": f"{nodes.folder}/site:{ROOT}",
            }  # fmt: skip
            variables.pop("DALI_STREAM_IN_PROCESS", None)
            words = ["ip", "netns", "exec", f"node{node}"] if nodes.namespaces else []
            words += [sys.executable, "-m", "torch.distributed.run", "--nnodes", len(on), "--nproc-per-node", settings["ranks"]]
            words += ["--log-dir", f"{nodes.folder}/torchrun", "--node-rank", place, *meet, RANK]
            with open(self.outputs[place], "w") as output:
                streams: dict[str, Any] = {"stdout": output, "stderr": output}
                self.torchruns.append(subprocess.Popen(list(map(str, words)), env=variables, **streams))

    def lines(self) -> list[dict[str, Any]]:
        """Return what rank 0 has logged."""
        if self.log.exists():
            with open(self.log, "rb") as file:
                file.seek(self._read)
                complete, end, _ = file.read().rpartition(b"\n")
            self._read += len(complete + end)
            self._lines += map(json.loads, complete.splitlines())
        return self._lines

    def step(self) -> int:
        """Return the last step that was made since this start, or 0."""
        return next((line["step"] for line in reversed(self.lines()) if "step" in line), 0)

    def has_ended(self) -> bool:
        """Return whether torchrun has ended on a node."""
        return any(torchrun.poll() is not None for torchrun in self.torchruns)

    def terminate(self) -> None:
        """Send SIGTERM to torchrun on all nodes."""
        for torchrun in self.torchruns:
            torchrun.terminate()

    def end(self) -> None:
        """Wait for the end on one node. A few seconds later, end the other one, as a cluster's scheduler does."""
        if not wait(self.has_ended, HANG_S) or not wait(self._all_ended, 5):
            self.terminate()
        if not wait(self._all_ended, END_S):
            kill(marked(self.nodes.folder))
            wait(self._all_ended, END_S)

    def _all_ended(self) -> bool:
        return all(torchrun.poll() is not None for torchrun in self.torchruns)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks."""
        return [each for each in marked(self.nodes.folder) if each.cmdline()[1:] == ["-u", str(RANK)]]

    def output(self) -> str:
        """Return what was printed on all nodes."""
        return "\n".join(path.read_text(errors="replace") for path in self.outputs)


class Drill:
    """The faults, one after the other, and what came of them.

    Args:
        arguments: Arguments of the program.
        nodes: See `Nodes`.
        stack: Stack that stops the server.
    """

    def __init__(self, arguments: argparse.Namespace, nodes: Nodes, stack: contextlib.ExitStack) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from support import faults
        from support.clouds import Objects
        from support.servers import Network

        import dali_stream
        from dali_stream.demo import write_demo

        self.arguments, self.nodes, self.support, self.network = arguments, nodes, faults, Network
        self.random = random.Random(arguments.seed)
        self.dataset = write_demo(nodes.folder / "dataset", episodes=5, size=(120, 128))
        paths = [path for path in self.dataset.rglob("*") if path.is_file()]
        self.files = {f"{BUCKET}/{path.relative_to(self.dataset)}": path.read_bytes() for path in paths}
        port = 9000 if nodes.namespaces else free_port()
        self.new_server = lambda: Objects(self.files, host=nodes.addresses[0], port=port)
        lengths = dali_stream.Dataset(self.dataset).lengths.tolist()
        self.frames = Counter((episode, frame) for episode, length in enumerate(lengths) for frame in range(length))
        assert sum(lengths) % LOADER["global_batch"] >= 4  # otherwise the last batch of an epoch depends on the number of ranks
        self.open_server()
        stack.callback(lambda: self.server.__exit__())
        storage = {"uri": f"s3://{BUCKET}", "storage_options": {"anon": True, "endpoint_url": self.server.url}}
        self.settings = {**SETTINGS, **storage, "folder": str(nodes.folder), "ranks": arguments.ranks}
        self.starts: list[Start] = []
        self.events: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.served = 0  # requests that earlier servers have received

    def open_server(self) -> None:
        """Start a server with the files."""
        self.server = self.new_server()
        with self.nodes.at_the_server():
            self.server.__enter__()

    def run(self) -> dict[str, Any]:
        """Let all faults happen, and return the report."""
        schedule, limit, began = self.schedule(), self.arguments.time_limit_s, time.monotonic()
        estimate = 3 * START_S
        for _, starts, waits_s, _ in (KINDS[kind] for kind in schedule):
            estimate += starts * START_S + waits_s + 2 * FOLLOWING * STEP_S
        text = f"{len(schedule)} faults, about {estimate / 60:.0f} min. No fault follows after {limit / 60:.0f} min."
        print(text, flush=True)
        self.start([0, 1])
        for number, kind in enumerate(schedule, 1):
            if time.monotonic() > began + limit:
                self.failures.append(f"The time limit left {len(schedule) - number + 1} faults out")
                break
            self.meet(kind)
            print(f"{time.monotonic() - began:6.0f} s, {number}: {self.events[-1]}", flush=True)
        (self.nodes.folder / "stop").touch()
        self.finish()
        if any(torchrun.returncode for torchrun in self.ranks.torchruns):
            self.fail("the run failed at its end")
        steps = self.compare()
        report = {"namespaces": self.nodes.namespaces, "steps": steps, "starts": len(self.starts)}
        report |= {"seconds": time.monotonic() - began, "kinds": self.kinds()}
        return report | {"failures": self.failures, "events": self.events}

    def schedule(self) -> list[str]:
        """Return the kinds of the faults in their order. After a node was killed, it comes back before one is killed again."""
        kinds = [kind for kind in self.arguments.kinds if self.nodes.namespaces or kind not in NEED_DISKS]
        found = [kind for kind in kinds for _ in range(max(1, round(KINDS[kind][0] * self.arguments.faults / 105)))]
        self.random.shuffle(found)
        places = [place for place, kind in enumerate(found) if kind in ("kill_node", "return_node")]
        for number, place in enumerate(places):
            found[place] = ("kill_node", "return_node")[number % 2]
        return found

    def meet(self, kind: str) -> None:
        """Let a fault happen while the run trains, and wait for the steps that follow it."""
        self.follow(kind, self.ranks.step() + SAVE_EVERY + self.random.randrange(SAVE_EVERY))  # after a checkpoint
        event = {"kind": kind, "step": self.ranks.step(), "began": time.monotonic(), "starts": -len(self.starts)}
        self.events.append(event)
        before = self.served + len(self.server.requests)
        getattr(self, kind)()
        self.follow(kind, max(event["step"], self.ranks.step()) + FOLLOWING)
        last = next(line for line in reversed(self.ranks.lines()) if "step" in line)
        event["requests"] = self.served + len(self.server.requests) - before
        event |= {"ended": last["time"], "last_step": last["step"], "starts": len(self.starts) + event["starts"]}
        event["nodes"] = len(self.ranks.on)

    def follow(self, kind: str, step: int) -> None:
        """Wait until the run has made a step. Start it again if it ends, which is a failure unless an outage ends it."""
        while not self.advance(step):
            if kind != "leave_90_s" or "StorageError" not in self.ranks.output():
                self.fail("the run ended")
            self.finish()
            self.start(self.ranks.on)

    def advance(self, step: int) -> bool:
        """Wait until the run has made a step. Return False if it ends before, or hangs."""
        made, since = 0, time.monotonic()
        while made < step and not self.ranks.has_ended():
            time.sleep(0.02)
            if (now := self.ranks.step()) > made:
                made, since = now, time.monotonic()
            elif time.monotonic() > since + HANG_S:
                self.fail(f"no step in {HANG_S:.0f} s")
                self.ranks.terminate()
                return False
        return made >= step

    def start(self, on: list[int]) -> None:
        """Start the ranks on some nodes."""
        if len(self.failures) > 20:
            raise RuntimeError("\n".join(self.failures))
        self.ranks = Start(self.nodes, f"start{len(self.starts)}", on, self.settings)
        self.starts.append(self.ranks)
        print(f"start {len(self.starts) - 1} on nodes {on}", flush=True)

    def finish(self) -> None:
        """Wait for the end of the ranks, and look for what they left."""
        self.ranks.end()
        for left in self.nodes.left():
            self.fail(f"{left} was left")

    def fail(self, text: str) -> None:
        """Note a failure."""
        after = self.events[-1] if self.events else "the start"
        self.failures.append(f"{text} after {after}, start {len(self.starts) - 1} on {self.ranks.on}")
        print(f"FAILURE: {self.failures[-1]}\n{self.ranks.output()[-6000:]}", flush=True)

    def kill_loader(self) -> None:
        """Kill the process of a rank's Loader."""
        rank = self.random.choice(self.ranks.ranks())
        wait(lambda: bool(rank.children()), END_S)
        self.random.choice(rank.children()).kill()

    def reset(self) -> None:
        """Let some of the next requests fail."""
        ways = [None, self.support.reset, self.support.reset_inside, self.support.short, self.support.status(503)]
        self.server.set_faults(self.random.choices(ways, k=12))

    def slow_down(self) -> None:
        """Let the server answer slowly."""
        self.server.network = self.network(0.3, 100e3)
        wait(self.ranks.has_ended, 10)
        self.server.network = self.network()

    def leave_5_s(self) -> None:
        """Let the server be away for less time than a run waits."""
        self._leave(5)

    def leave_90_s(self) -> None:
        """Let the server be away for more time than a run waits. Start the run again until it is back."""
        self._leave(90)

    def _leave(self, seconds: float) -> None:
        """Let the server refuse connections, or its packets be lost. Start the run again while it ends."""
        until, is_silent = time.monotonic() + seconds, self.nodes.namespaces and self.random.random() < 0.5
        if is_silent:
            self.nodes.link("server", "down")
        else:
            self.server.__exit__()  # connections are refused
            self.served += len(self.server.requests)
        while wait(self.ranks.has_ended, until - time.monotonic()):
            if seconds < 60:  # the default of give_up_after_s
                self.fail("the run ended")
            self._end_with("StorageError")
            self.start(self.ranks.on)
        if is_silent:
            self.nodes.link("server", "up")
        else:
            self.open_server()

    def _end_with(self, text: str) -> None:
        """Wait for the end of the ranks by an error that contains a text."""
        if not wait(self.ranks.has_ended, HANG_S):
            self.fail(f"the run did not end with {text!r}")
            self.ranks.terminate()
        self.ranks.end()
        if text not in self.ranks.output():
            self.fail(f"no error with {text!r}")
        self.finish()

    def fill_caches(self) -> None:
        """Fill the disk of a node's caches up, until the run has made some steps."""
        with self.nodes.full(f"node{self.random.choice(self.ranks.on)}/disk"):
            self.advance(self.ranks.step() + FOLLOWING)

    def change_clock(self) -> None:
        """Let the clocks of the nodes jump by hours or days."""
        self.nodes.set_clock(self.random.choice((-1, 1)) * self.random.choice((3600, 86400, 10 * 86400)))

    def kill_rank(self) -> None:
        """Kill a rank."""
        self.random.choice(self.ranks.ranks()).kill()
        self.finish()
        self.start(self.ranks.on)

    def fill_checkpoints(self) -> None:
        """Fill the disk of the checkpoints up, and kill a rank after a save has failed."""
        with self.nodes.full("checkpoint"):
            wait(lambda: self.ranks.has_ended() or any("not_saved" in line for line in self.ranks.lines()), HANG_S)
            self.random.choice(self.ranks.ranks()).kill()
            self.finish()
        self.start(self.ranks.on)

    def kill_node(self) -> None:
        """Kill a node, and resume on the other one."""
        killed, other = self.random.sample([0, 1], 2)
        self.nodes.kill(killed)
        self.ranks.end()
        self.nodes.replace(killed)
        self.finish()
        self.start([other])

    def return_node(self) -> None:
        """End the run on one node, and resume on two."""
        self.ranks.terminate()
        self.finish()
        self.start(self.random.sample([0, 1], 2))

    def damage(self) -> None:
        """Damage a file, start the run again, and repair the file after the run has ended twice."""
        path = self.random.choice([path for path in self.files if path.endswith(".mp4")])
        whole = self.files[path]
        third = len(whole) // 3
        self.files[path] = whole[:third] + bytes(third) + whole[2 * third :]
        self._end_with(path.removeprefix(f"{BUCKET}/"))
        self.start(self.ranks.on)
        self._end_with(path.removeprefix(f"{BUCKET}/"))
        self.files[path] = whole
        self.start(self.ranks.on)

    def compare(self) -> int:
        """Compare the steps that count with those of a run without faults. Return their number."""
        counted: dict[int, dict[str, Any]] = {}
        for start in self.starts:
            for line in start.lines():
                if "resumed" in line:
                    counted = {step: each for step, each in counted.items() if step <= line["resumed"]}
                elif "step" in line:
                    counted[line["step"]] = line
        folder = self.nodes.folder / "undisturbed"
        (folder / "checkpoint").mkdir(parents=True)
        settings = {"uri": str(self.dataset), "storage_options": None, "folder": str(folder), "steps": len(counted)}
        self.ranks = Start(self.nodes, "undisturbed", [0], self.settings | settings)
        self.advance(len(counted))
        self.finish()
        expected = {line["step"]: line for line in self.ranks.lines() if "step" in line}
        if not sorted(counted) == sorted(expected) == list(range(1, len(counted) + 1)):
            self.failures.append(f"{len(counted)} steps count, and the undisturbed run has {len(expected)}")
        differ = [
            f"{key} of step {step}: {counted[step][key]}, undisturbed {expected[step][key]}"
            for step in sorted(counted.keys() & expected.keys())
            for key in ("epoch", "samples", "loss")
            if counted[step][key] != expected[step][key]
        ]
        self.failures += differ[:1]
        by_epoch: dict[int, Counter[tuple[int, int]]] = {}
        for line in counted.values():
            by_epoch.setdefault(line["epoch"], Counter()).update(map(tuple, line["samples"]))
        last = by_epoch.pop(max(by_epoch))
        if any(epoch != self.frames for epoch in by_epoch.values()) or not last <= self.frames:
            self.failures.append("an epoch does not have each frame once")
        return len(counted)

    def kinds(self) -> list[dict[str, Any]]:
        """Return for each kind of fault how often it happened and the time that it lost, which each event gets too."""
        times: dict[int, list[float]] = {}
        for start in self.starts:
            made = [line["time"] for line in start.lines() if "step" in line]
            times.setdefault(len(start.on), []).extend(later - earlier for earlier, later in pairwise(made))
        for event in self.events:
            normal_s = (event["last_step"] - event["step"]) * statistics.median(times[event["nodes"]])
            event["lost_s"] = event["ended"] - event["began"] - normal_s
        found = []
        for kind, (*_, name) in KINDS.items():
            events = [event for event in self.events if event["kind"] == kind]
            if lost := [event["lost_s"] for event in events]:
                row = {"kind": kind, "name": name, "count": len(lost), "starts": sum(event["starts"] for event in events)}
                found.append(row | {"median_s": statistics.median(lost), "max_s": max(lost)})
        return found


def run(*words: object) -> None:
    """Run a command."""
    subprocess.run(list(map(str, words)), check=True)


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, for at most some seconds. Return whether it holds."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return holds


def marked(folder: Path) -> list[psutil.Process]:
    """Return the running processes whose variable DRILL is below a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DRILL", "").startswith(f"{folder}/") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, END_S)


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
