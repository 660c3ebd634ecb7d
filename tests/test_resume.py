"""A run that was killed and resumed ends with the weights of one that was not, bit for bit."""

import csv
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "ppo_continuous.py"
# 64 steps an iteration.
SHORT = """--env-id CartPole-v1 --num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 4
           --eval-episodes 1 --checkpoint-every 2"""
# Ctrl-C at the end of the third call.
DRIVER = """
import os
import signal
import ppo_continuous as ppo

calls, function = [], MOMENT

def interrupted(*args):
    result = function(*args)
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return result

MOMENT = interrupted
ppo.main()
"""


def start(folder, flags, driver=None, script=SCRIPT):
    shutil.copy(script, folder)
    return subprocess.Popen([sys.executable, driver or script.name, *flags.split()], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out


def poll(process, condition):
    """Wait until the condition holds. False if the process ended first."""
    end = time.monotonic() + 240
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end
        time.sleep(0.001)  # a checkpoint takes longer to write
    return True


def modified(path):
    return path.stat().st_mtime_ns if path.exists() else None


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def kill_at_first_checkpoint(folder, flags, script):
    """Train into folder / "run" and be killed there."""
    process = start(folder, f"{flags} --run-dir run", script=script)
    assert poll(process, (folder / "run" / "checkpoint.pt").exists)
    kill(process)
    assert process.returncode == -signal.SIGKILL


def read_metrics(run_dir):
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def check_same(run_dir, expected, parts=("agent", "opt")):
    """The same weights, optimiser, statistics and metrics, but for the time they took."""
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (run_dir, expected))
    assert one["opt"]["exp_avg"].any() and one["at"]["iteration"] == two["at"]["iteration"]
    for part in parts:
        assert one[part].keys() == two[part].keys()
        a, b = ({name: torch.as_tensor(x) for name, x in run[part].items()} for run in (one, two))
        assert [name for name in b if not torch.equal(a[name], b[name])] == []
    rows = [read_metrics(folder) for folder in (run_dir, expected)]
    for row in (*rows[0], *rows[1]):
        del row["seconds"], row["SPS"]
    assert rows[0] == rows[1] and rows[0]


def check_resume_only_evaluates(finished, folder, run):
    """A run killed after its last step has all but its summary, which `run` with the flags then writes."""
    shutil.copytree(finished, folder / "run")
    summary = folder / "run" / "summary.json"
    before = summary.read_text()
    summary.unlink()
    run("--resume run")
    assert summary.read_text() == before


def train_killed(folder, flags, kills, longest):
    """Train to the end, but be killed `kills` times, each at most `longest` seconds after a new checkpoint.

    Returns how many kills struck."""
    rng, path, struck = random.Random(0), folder / "run" / "checkpoint.pt", 0
    command = f"{flags} --run-dir run"
    for _ in range(kills):
        before, process = modified(path), start(folder, command)
        poll(process, lambda before=before: modified(path) != before)
        time.sleep(rng.uniform(0, longest))
        kill(process)
        struck += process.returncode == -signal.SIGKILL
        command = "--resume run"
        if (folder / "run" / "summary.json").exists():
            return struck
    finish(start(folder, command))
    return struck


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run without interruption, its flags, and the seconds after its first checkpoint."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    flags = f"{SHORT} --no-compile --total-timesteps 3840"
    finish(start(folder, f"{flags} --run-dir run"))
    rows = read_metrics(folder / "run")
    return folder / "run", flags, float(rows[-1]["seconds"]) - float(rows[1]["seconds"])


def test_killed_at_random_moments(uninterrupted, tmp_path):
    expected, flags, duration = uninterrupted
    assert train_killed(tmp_path, flags, kills=3, longest=duration / 3) >= 2
    check_same(tmp_path / "run", expected)


@pytest.mark.parametrize("flags", [
    "--no-compile --rnn gru --rnn-seq-len 8 --rnn-hidden 16 --norm-reward --total-timesteps 1280",
    "--compile --num-steps 16 --total-timesteps 1920",
], ids=["gru", "compiled"])  # fmt: skip
def test_killed_once(flags, tmp_path):
    folders, flags = (tmp_path / "expected", tmp_path / "killed"), f"{SHORT} {flags}"
    for folder in folders:
        folder.mkdir()
    finish(start(folders[0], f"{flags} --run-dir run"))
    assert train_killed(folders[1], flags, kills=1, longest=0.1) == 1
    check_same(folders[1] / "run", folders[0] / "run")


def test_killed_while_writing_a_checkpoint(tmp_path):
    """A wide network takes long to write."""
    flags = f"{SHORT} --no-compile --hidden 1024 1024 --update-epochs 1 --total-timesteps 1280"
    finish(start(tmp_path, f"{flags} --run-dir expected"))
    path, half = tmp_path / "run" / "checkpoint.pt", tmp_path / "run" / "checkpoint.tmp"
    command = f"{flags} --run-dir run"
    while not half.exists():
        process = start(tmp_path, command)
        assert poll(process, path.exists) and poll(process, half.exists), "the run ended before a kill struck"
        kill(process)  # too late if the file has got its name by now: try again with the next one
        command = "--resume run"
    assert path.exists()
    finish(start(tmp_path, command))
    assert not half.exists()
    check_same(tmp_path / "run", tmp_path / "expected")


@pytest.mark.parametrize("moment", ["ppo.update", "ppo.RunLog.log"])
def test_ctrl_c_saves(moment, uninterrupted, tmp_path):
    """Also when it comes after an iteration was found to need no checkpoint."""
    (tmp_path / "driver.py").write_text(DRIVER.replace("MOMENT", moment))
    flags = f"{uninterrupted[1]} --checkpoint-every 1000"
    out = finish(start(tmp_path, f"{flags} --run-dir run", "driver.py"), code=130)
    assert "--resume run" in out and not (tmp_path / "run" / "summary.json").exists()
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["at"]["iteration"]
    rows = read_metrics(tmp_path / "run")
    assert saved == len(rows) and saved in (3, 4)
    finish(start(tmp_path, "--resume run"))
    resumed = read_metrics(tmp_path / "run")
    assert resumed[:saved] == rows
    assert [int(row["global_step"]) for row in resumed] == list(range(64, 3841, 64))


def test_finished_run_goes_on(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    before = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    out = finish(start(tmp_path, "--resume run --total-timesteps 4096"))
    after = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert "64 iterations" in out and after["at"]["global_step"] == 4096
    assert read_metrics(tmp_path / "run")[:60] == read_metrics(uninterrupted[0])
    assert after["opt"]["bias"][1] > before["opt"]["bias"][1]
    assert not torch.equal(after["opt"]["params"], before["opt"]["params"])
