"""SLURM, played by programs that run the jobs of arrays on this machine: sbatch, sacct, srun, scontrol and scancel."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAMS = {
    # Starts a process per job, and notes its id; or none for the jobs named in the file `dead`, which count as failed.
    "sbatch": """
script = arguments[-1]
text = open(script).read()
array = re.search(r"#SBATCH --array=0-(\\d+)", text)
number = str(1000 + len(list(root.glob("job-*"))))
(root / f"job-{number}").mkdir()
(root / "submitted").open("a").write(text)
for index in range(int(array[1]) + 1) if array else [None]:
    name = number if index is None else f"{number}_{index}"
    env = os.environ | {"SLURM_JOB_ID": name, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0",
                        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node0"}
    if index is not None:
        env |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(index)}
    done = root / f"job-{number}" / name
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    job = subprocess.Popen(["bash", "-c", f"bash {script}; echo $? > {done}"], env=env, **quiet)
print("Submitted batch job", number)
""",
    "srun": """
command = arguments[next(i for i, each in enumerate(arguments) if os.path.isfile(each) and os.access(each, os.X_OK)) :]
kill = root / "kill"
if kill.exists():  # the first job dies
    kill.unlink()
    os.kill(os.getppid(), signal.SIGKILL)
    sys.exit(1)
os.execvp(command[0], command)
""",
    "sacct": """
print("JobID|State|NodeList")
for number in [arguments[i + 1] for i, a in enumerate(arguments) if a == "-j"]:
    for done in (root / f"job-{number}").glob("*"):
        print(f"{done.name}|{'COMPLETED' if done.read_text().strip() == '0' else 'FAILED'}|node0")
""",
    "scontrol": "print('node0')",
    "scancel": "",
}


def write_slurm(folder: Path) -> Path:
    """Write the programs; return the folder to put in front of the PATH."""
    (folder / "bin").mkdir(parents=True)
    head = f"#!{sys.executable}\nimport os, pathlib, re, signal, subprocess, sys\nroot = pathlib.Path({str(folder)!r})\n"
    for name, body in _PROGRAMS.items():
        path = folder / "bin" / name
        path.write_text(f"{head}arguments = sys.argv[1:]\n{body}")
        path.chmod(0o755)
    return folder / "bin"
