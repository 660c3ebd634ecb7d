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


def start(folder, flags, script=SCRIPT):
    shutil.copy(script, folder)
    return subprocess.Popen([sys.executable, script.name, *flags.split()], cwd=folder, text=True,
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


def flat(value, name=""):
    """Tensors and numbers of nested dicts and lists, by the path to them."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: x for key, item in items for path, x in flat(item, f"{name}/{key}").items()}
    return {name: value}


def check_same(run_dir, expected, parts=("agent", "opt", "progress")):
    """The same weights, optimizer, statistics, episodes and metrics, but for the time they took."""
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (run_dir, expected))
    assert any("exp_avg" in name and x.any() for name, x in flat(one["opt"]).items())
    for part in parts:
        a, b = flat(one[part]), flat(two[part])
        assert a.keys() == b.keys()
        same = {name: torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name]))
                for name in b if name != "/seconds" and b[name] is not None}
        assert [name for name in same if not same[name]] == []
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


def test_ctrl_c_ends_the_run_without_a_traceback(uninterrupted, tmp_path):
    """The last checkpoint stays, and the run can be resumed from it."""
    process = start(tmp_path, f"{uninterrupted[1]} --run-dir run")
    assert poll(process, (tmp_path / "run" / "checkpoint.pt").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130 and "Traceback" not in err and "Error" not in err, out + err
    assert not (tmp_path / "run" / "summary.json").exists()
    finish(start(tmp_path, "--resume run"))
    check_same(tmp_path / "run", uninterrupted[0])


def test_rows_after_the_checkpoint_are_cut_off(uninterrupted, tmp_path):
    """Also one that was half written when the run was killed."""
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    path = tmp_path / "run" / "metrics.csv"
    before = path.read_text()
    path.write_text(before + before.splitlines()[-1].replace("3840", "3904", 1) + "\n3968,0.5")
    finish(start(tmp_path, "--resume run"))
    assert path.read_text() == before


def test_finished_run_is_extended(uninterrupted, tmp_path):
    """A flag that is given again overrides that of the run; the others stay."""
    shutil.copytree(uninterrupted[0], tmp_path / "run")
    before = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    finish(start(tmp_path, "--resume run --total-timesteps 4096 --ent-coef 0.02 --no-anneal-lr"))
    after = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert after["progress"]["global_step"] == 4096 and after["progress"]["iteration"] == 64
    changed = {name for name, x in after["args"].items() if x != before["args"][name]}
    assert changed == {"total_timesteps", "ent_coef", "anneal_lr", "resume"}
    rows = read_metrics(tmp_path / "run")
    assert rows[:60] == read_metrics(uninterrupted[0])
    assert [float(row["learning_rate"]) for row in rows[60:]] == [3e-4] * 4
    assert after["opt"]["bias"][1] > before["opt"]["bias"][1]
    assert not torch.equal(after["opt"]["params"], before["opt"]["params"])
