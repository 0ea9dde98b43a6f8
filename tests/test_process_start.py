"""A Loader starts its own process from any program, and delivers the batches that it delivers without that process."""

from __future__ import annotations

import json
import logging
import multiprocessing.spawn
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.batches import equal
from support.own_process import SAFETY_S, SAME, children, run

import dali_stream
from dali_stream import Dataset, Loader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Loader has a process of its own on Linux only")
PACKAGE = Path(dali_stream.__file__).parents[1]  # folder that contains this package

# One Loader is made in a thread that ends after the first batch. The kernel can end a process together with the thread that has
# started it (PR_SET_PDEATHSIG).
PROGRAM = f"""{SAME}
import itertools, threading

dataset, made, commands, decoders = dali_stream.Dataset(sys.argv[-1]), [], [], []

def make():
    loader = dali_stream.Loader(dataset, batch_size=8, **whole)
    batches = iter(loader)
    made.extend((loader, children(), itertools.chain([next(batches)], batches)))
    commands.extend(child.cmdline() for child in psutil.Process().children())
    decoders.extend(name for name in sys.modules if name.startswith(("torchcodec", "nvidia.dali", "torch._dynamo")))

thread = threading.Thread(target=make)
thread.start()
thread.join()
loader, first, batches = made
with loader, dali_stream.Loader(dataset, batch_size=8, in_process=True, **whole) as in_process:
    found = same(batches, in_process)
found |= {{"first": sorted(first), "left": sorted(children()), "frames": dataset.num_frames}}
found |= {{"commands": commands, "decoders": decoders}}
print(json.dumps(found))
"""


def check(found: dict[str, object], err: str = "") -> None:
    """Check the result of `PROGRAM`: one process from the beginning to the end, and each frame once."""
    assert err == ""
    assert found["first"] == found["processes"]
    assert len(found["processes"]) == 1  # type: ignore[arg-type]
    assert found["left"] == []
    assert found["decoders"] == []  # modules of decoders, and torch's compiler, which torchcodec imports
    assert sorted(found["samples"]) == list(range(found["frames"]))  # type: ignore[call-overload]


def test_from_standard_input(small: Path) -> None:
    check(*run([sys.executable, "-", small], PROGRAM))


def decoys(folder: Path) -> Path:
    """Write modules that no process may import."""
    (folder / "dali_stream").mkdir(parents=True)
    for file in ("dali_stream/__init__.py", "pickle.py", "torch.py", "numpy.py", "psutil.py"):
        (folder / file).write_text("raise SystemExit(f'{__file__} was imported')")
    return folder


@pytest.mark.slow
def test_commands_import_no_compiler(small: Path) -> None:
    """torchcodec would import torch's compiler, which takes as long as torch itself. It is imported when it is needed."""
    program = f"""
import sys
from dali_stream.cli import main
assert main(["bench", {str(small)!r}, "--num-batches", "2", "--warmup", "1", "--batch-size", "2"]) == 0
assert "torchcodec" in sys.modules
assert not any(name.startswith("torch._dynamo") for name in sys.modules)
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


WITHOUT_TORCHCODEC = """
import json, os, sys
from dali_stream import DaliStreamError, Loader

def error(**options):
    "Return the error of a Loader, and whether it comes before the first batch is requested."
    made = False
    try:
        with Loader(sys.argv[-1], batch_size=2, **options) as loader:
            made = True
            next(iter(loader))
    except DaliStreamError as error:
        return type(error).__name__, str(error), not made

print(json.dumps([os.getpid(), error(), error(dali_graph=lambda nodes: nodes), error(in_process=True)]))
"""


@pytest.mark.slow
def test_a_torchcodec_that_cannot_be_loaded(small: Path, tmp_path: Path) -> None:
    """The error arrives as it is, from the only process that needs torchcodec, without an attempt in this one."""
    code = "import os; print(os.getpid(), file=open(f'{__path__[0]}/imported', 'a')); raise ImportError('undefined symbol')"
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec/__init__.py").write_text(code)
    [number, *errors], err = run([sys.executable, "-c", WITHOUT_TORCHCODEC, small], PYTHONPATH=f"{tmp_path}:{PACKAGE}")
    assert err == ""
    for name, text, _ in errors:
        assert name == "TorchcodecError"
        assert text.startswith("torchcodec cannot be loaded (undefined symbol). ")
    assert [at_once for *_, at_once in errors] == [False, False, True]
    numbers = list(map(int, (tmp_path / "torchcodec/imported").read_text().split()))
    assert numbers.count(number) == numbers[2:].count(number) > 0


@pytest.mark.slow
def test_from_a_script_that_finds_the_package_itself(small: Path, tmp_path: Path) -> None:
    """The interpreter is isolated, so neither the environment nor the folder of the script is searched.

    The process gets the options of the interpreter.
    """
    (tmp_path / "own").symlink_to(PACKAGE)
    script = decoys(tmp_path / "scripts") / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'own')!r})\n{PROGRAM}")
    options = ["-I", "-W", "error::FutureWarning", "-X", "utf8"]
    found, err = run([sys.executable, *options, script, small], cwd=script.parent, PYTHONPATH=str(script.parent))
    check(found, err)
    [command] = found["commands"]
    given = command[1 : command.index("-c")]
    assert {"-I", "-Werror::FutureWarning"} < set(given)
    assert given[given.index("-X") + 1] == "utf8" if "-X" in given else "-Xutf8" in given


@pytest.mark.slow
def test_from_a_notebook(small: Path, tmp_path: Path) -> None:
    before, after = PROGRAM.split("import itertools")
    cells = [f"import sys; sys.argv = ['', {str(small)!r}]", before, f"import itertools{after}"]
    runner = f"""
import json, nbclient, nbformat
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in {cells!r}])
nbclient.NotebookClient(book, timeout={SAFETY_S}).execute()
print("".join(output["text"] for cell in book.cells for output in cell.outputs if output.get("name") == "stdout"), end="")
print(json.dumps([output for cell in book.cells for output in cell.outputs if output.get("name") != "stdout"]), file=sys.stderr)
"""
    found, err = run([sys.executable, "-c", f"import sys\n{runner}"], cwd=tmp_path, IPYTHONDIR=str(tmp_path))
    check(found)
    assert err.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_under_torchrun_from_a_script_beside_other_modules_of_the_same_names(small: Path, tmp_path: Path) -> None:
    """The script has no main guard. It changes to another folder, which has such modules too."""
    script, work = decoys(tmp_path / "scripts") / "script.py", decoys(tmp_path / "work")
    begin = f"import os, sys\nsys.path.remove({str(script.parent)!r})\nos.chdir({str(work)!r})\n"
    script.write_text(f"{begin}{PROGRAM}\nopen(os.environ['RANK'], 'w').write(json.dumps(found))\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run([*launcher, script, small], cwd=tmp_path, OMP_NUM_THREADS="1")
    ranks = [json.loads((work / rank).read_text()) for rank in "01"]
    for found in ranks:
        assert found["first"] == found["processes"]
        assert (len(found["processes"]), found["left"]) == (1, [])
    assert ranks[0]["processes"] != ranks[1]["processes"]
    samples = [sample for found in ranks for sample in found["samples"]]
    assert sorted(samples) == list(range(ranks[0]["frames"]))


@pytest.mark.slow
def test_without_shared_memory_in_the_file_system(small: Path) -> None:
    """/dev/shm is a read-only file system. In containers, it is often missing or has 64 MB."""
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    hide = "mount -t tmpfs -o ro tmpfs /dev/shm && ! touch /dev/shm/file 2>/dev/null"
    if shutil.which("unshare") is None or subprocess.run([*isolated, hide], capture_output=True, check=False).returncode:
        pytest.skip("the kernel does not let this user mount a file system over /dev/shm")
    check(*run([*isolated, f'{hide} && exec "$@"', "sh", sys.executable, "-c", PROGRAM, small]))


def same_here(dataset: Dataset | Path) -> None:
    """Compare the batches of a Loader that may have a process of its own, but has none, with those of one that must not."""
    options: dict[str, Any] = {"batch_size": 8, "last_batch": "partial"}
    with Loader(dataset, in_process=False, **options) as loader, Loader(dataset, in_process=True, **options) as expected:
        for batch, other in zip(loader, expected, strict=True):
            assert equal(batch, other)
            assert not children("producer_main")


@pytest.mark.slow
def test_where_no_interpreter_can_be_started(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an embedded interpreter. The batches are made in the process, and a warning says why."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", "")
    same_here(small)
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("The Loader makes its batches in this process, since ")
    assert "sys.executable is empty" in warning


@pytest.mark.slow
def test_files_in_the_memory_of_the_program(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No other process can read them."""
    memory = fsspec.filesystem("memory")
    memory.put(str(small), "/dataset", recursive=True)
    try:
        with caplog.at_level(logging.INFO, "dali_stream"):
            same_here(Dataset("memory://dataset"))
    finally:
        memory.rm("/dataset", recursive=True)
    assert "the batches are made in this process, since the files of memory://dataset are in its memory" in caplog.text


FOLDER = """
from fsspec.implementations.local import LocalFileSystem

class Folder(LocalFileSystem):
    def __init__(self, token=None, **options):
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.rpartition("://")[2])
"""
CUSTOM = f"""{SAME}
import contextlib, io
import fsspec
{FOLDER}
class Token:
    pass

with dali_stream.Loader(sys.argv[1], batch_size=8, in_process=True, **whole) as in_process:
    expected = list(in_process)

def run(name, driver, token):
    fsspec.register_implementation(name, driver)
    dataset = dali_stream.Dataset(name + "://" + sys.argv[1], storage_options={{"token": eval(token)}})
    with contextlib.redirect_stderr(io.StringIO()) as said:
        with dali_stream.Loader(dataset, batch_size=8, **whole) as loader:
            found = same(loader, expected)
    return found | {{"frames": dataset.num_frames, "said": said.getvalue()}}

print(json.dumps([run(*each) for each in json.loads(sys.argv[2])]))
"""


@pytest.mark.slow
def test_storages_of_the_user(small: Path, tmp_path: Path) -> None:
    """If the process cannot import a part of the storage, the program makes the batches itself, and a warning says why."""
    (tmp_path / "custom_storage.py").write_text(FOLDER)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    cases = {
        ("module", "custom_storage.Folder", "'text'"): "",
        ("class", "custom_storage.Folder", "Token()"): "the dataset cannot be unpickled there (AttributeError: ",
        ("function", "custom_storage.Folder", "lambda: 'text'"): "the dataset cannot be pickled (",
        ("program", "__main__.Folder", "'text'"): "the dataset cannot be unpickled there (AttributeError: ",
    }
    found, err = run([sys.executable, "-c", CUSTOM, small, json.dumps([*cases])], PYTHONPATH=path)
    assert err == ""
    for case, reason, each in zip(cases, cases.values(), found, strict=True):
        assert sorted(each["samples"]) == list(range(each["frames"])), case
        assert reason or len(each["processes"]) == 1, case
        assert each["said"].count("\n") == bool(reason), each["said"]
        assert not reason or each["said"].startswith("The Loader makes its batches in this process, since ")
        assert reason in each["said"], case
