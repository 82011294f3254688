"""Slurm's programs as one script that runs job arrays for real: sbatch, srun, sacct, scancel and scontrol.

Installed under each of these names by `install`; jobs and their states are files of the folder FAKE_SLURM.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def install(folder):
    """The folder to put first on the PATH."""
    folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {name} "$@"\n')
        program.chmod(0o755)
    return folder


def sbatch(script):
    """Begin the script's array, or its one job, in a process of its own, and print its number."""
    number = time.time_ns() // 1_000_000  # never one of another test: submitit keeps the states of all that have ended
    copy = STATES / f"{number}.sh"
    copy.write_text(Path(script).read_text())
    written = re.search(r"^#SBATCH --time=(\S+)", copy.read_text(), re.MULTILINE)
    limit = os.environ.get("SBATCH_TIMELIMIT", written and written[1])  # as the real one takes them, in this order
    (STATES / f"{number}.limit").write_text(str(limit))
    with (STATES / f"{number}.log").open("w") as log:
        words = [sys.executable, "-S", __file__, "array", str(copy)]
        subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {number}")


def array(script):
    """Run every job of a script, as many at once as it says."""
    found = re.search(r"--array=0-(\d+)%(\d+)", Path(script).read_text().replace("'", ""))
    number = Path(script).stem
    if not found:
        run(script, number, {"SLURM_JOB_ID": number})
        return
    last, together = map(int, found.groups())
    with ThreadPoolExecutor(together) as pool:
        for index in range(last + 1):
            names = {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(index)}
            pool.submit(run, script, f"{number}_{index}", names | {"SLURM_JOB_ID": f"{int(number) * 1000 + index}"})


def run(script, job, names):
    """Run a job until it isn't queued again; beside its state stands how often it began."""
    state, again = STATES / f"{job}.state", STATES / f"{job}.again"
    while True:
        if state.exists() and state.read_text() == "CANCELLED":
            return
        state.write_text("RUNNING")
        child = subprocess.Popen(["bash", script], env=os.environ | names, start_new_session=True)
        (STATES / f"{job}.pid").write_text(str(child.pid))
        code = child.wait()
        if state.read_text() == "CANCELLED":
            return
        if not again.exists():
            state.write_text("COMPLETED" if code == 0 else "FAILED")
            return
        again.unlink()


def srun(*words):
    """Run a command with its streams in the files that are named."""
    options = dict(zip(words[1:5:2], words[2:5:2], strict=True))
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    main = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ["SLURM_JOB_ID"])
    marks = {"%A": main, "%a": task, "%j": main, "%t": "0"}
    for number, option in ((1, "--output"), (2, "--error")):
        path = options[option]
        for mark, value in marks.items():
            path = path.replace(mark, value)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.execvp(words[5], words[5:])  # noqa: S606  # as the real one does


def sacct(*_):
    """Print the state of every job."""
    print("JobID|State|NodeList")
    for path in STATES.glob("*.state"):
        print(f"{path.stem}|{path.read_text()}|here")


def scancel(job):
    """End a job, or keep it from beginning."""
    (STATES / f"{job}.state").write_text("CANCELLED")
    pid = STATES / f"{job}.pid"
    if pid.exists():
        os.killpg(int(pid.read_text()), signal.SIGKILL)


def scontrol(word, job):
    """Queue a job again when it has ended."""
    assert word == "requeue"
    (STATES / f"{job}.again").touch()


if __name__ == "__main__":
    STATES = Path(os.environ["FAKE_SLURM"])
    globals()[sys.argv[1]](*sys.argv[2:])
