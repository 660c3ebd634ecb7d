"""A run that was killed and resumed ends bit for bit like one that was not."""

import importlib
import json
import os
import shutil
import signal
from functools import partialmethod

import numpy as np
import pytest
import torch
from conftest import PPO, ROOT, SHORT, finished_ppo, flat, load, read_metrics, run_python
from tqdm import tqdm

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")

# Kills itself in the sixth optimizer step after the first checkpoint.
KILLED = """
import os, signal, {script} as script
train_step, calls = script.train_step, []
def killed(*args):
    calls.extend([1] * os.path.exists("run/checkpoint.pt"))
    return train_step(*args) if len(calls) < 6 else os.kill(os.getpid(), signal.SIGKILL)
script.train_step = killed
script.main()
"""

def results(run_dir):
    """Checkpoint, by the paths to its numbers, and metrics of a run, but for the time they took."""
    checkpoint, rows = load(run_dir), read_metrics(run_dir)
    del checkpoint["args"], checkpoint["progress"]["seconds"]
    for row in rows:
        del row["seconds"], row["SPS"]
    return {name: np.asarray(x) for name, x in flat(checkpoint).items()}, rows

def check_same(run_dir, expected):
    """The same weights, statistics, optimizer, replay, episodes and metrics."""
    (one, rows), (two, expected_rows) = results(run_dir), results(expected)
    assert rows == expected_rows and rows
    assert any("exp_avg" in name and x.any() for name, x in one.items())
    np.testing.assert_equal(one, two)

def test_killed_and_resumed(finished, tmp_path, main):
    script = finished.script
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    (tmp_path / "run").mkdir()  # a folder may exist while it is empty
    (tmp_path / "killed.py").write_text(KILLED.format(script=script))
    run_python(f"killed.py {SHORT[script]} --run-dir run", tmp_path, status=-signal.SIGKILL)
    iteration = load(tmp_path / "run")["progress"]["iteration"]
    assert 0 < iteration < load(finished.folder / "run")["progress"]["iteration"]
    main(script, "--resume run")
    check_same(tmp_path / "run", finished.folder / "run")

@pytest.mark.parametrize(("script", "flags"), [
    ("ppo_atari", "--env-id ALE/SpaceInvaders-v5 --rnn lstm --rnn-seq-len 8 --norm-value"),
    ("rl2_meta", """--env-id HalfCheetahVel --num-trials 4 --episode-length 10 --test-trials 5
                  --total-timesteps 560 --update-epochs 1 --test-every 2"""),
    pytest.param("ppo_atari", "--device cuda --precision bf16 --compile", marks=gpu),
    pytest.param("ppo_atari", "--device cuda --rnn gru --rnn-seq-len 8", marks=gpu),
    pytest.param("rl2_meta", "--device cuda", marks=gpu)])  # fmt: skip
def test_interrupted_and_resumed(script, flags, tmp_path, main, monkeypatch):
    """Ctrl-C leaves the last checkpoint, and the rows of later iterations for the resume to cut off."""
    module, command = importlib.import_module(script), f"{SHORT[script]} {flags}"
    main(script, f"{command} --run-dir expected")
    rollout, calls = module.rollout, []

    def interrupted(*args):
        calls.extend([1] * (tmp_path / "run" / "checkpoint.pt").exists())
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return rollout(*args)

    monkeypatch.setattr(module, "rollout", interrupted)
    main(script, f"{command} --run-dir run", status=130)
    assert not (tmp_path / "run" / "summary.json").exists()
    steps = int(read_metrics(tmp_path / "run")[-1]["global_step"])
    assert steps > load(tmp_path / "run")["progress"]["global_step"]
    main(script, "--resume run")
    check_same(tmp_path / "run", tmp_path / "expected")

@finished_ppo
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_while_it_saves(moment, finished, tmp_path, main, monkeypatch):
    """The old checkpoint stays until the new one is on the disk: first it is synced, then renamed."""
    function, calls = getattr(os, moment), []

    def dying(*args):
        calls.append(args)
        return function(*args) if len(calls) < 2 else signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, dying)
        main(PPO, f"{SHORT[PPO]} --run-dir run", status=130)
    assert load(tmp_path / "run")["progress"]["iteration"] == 2
    main(PPO, "--resume run")
    assert not (tmp_path / "run" / "checkpoint.tmp").exists()
    check_same(tmp_path / "run", finished.folder / "run")

def test_killed_after_the_last_step(finished, run_dir, main, monkeypatch):
    """A resume only evaluates. Rows that the checkpoint does not know, also half of one, are cut off."""
    monkeypatch.setattr(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True))  # as by TQDM_DISABLE=1
    summary, metrics = run_dir / "summary.json", run_dir / "metrics.csv"
    before = summary.read_text(), metrics.read_text()
    summary.unlink()
    metrics.write_text(f"{before[1]}9{before[1].splitlines()[-1]}\n99999,0.5\n1")
    main(finished.script, "--resume run")
    assert (summary.read_text(), metrics.read_text()) == before

@finished_ppo
def test_flags_that_are_given_again_override_those_of_the_run(finished, run_dir, main):
    before, rows = load(run_dir), read_metrics(run_dir)
    main(PPO, "--resume run --total-timesteps 192 --ent-coef 0.02 --no-anneal-lr")
    after = load(run_dir)
    changed = {name for name, x in after["args"].items() if x != before["args"][name]}
    assert changed == {"total_timesteps", "ent_coef", "anneal_lr", "resume"}
    assert after["progress"]["iteration"] == 6
    assert after["opt"]["bias"][1] > before["opt"]["bias"][1]  # Adam's averages continue
    assert not torch.equal(after["opt"]["params"], before["opt"]["params"])
    assert [float(row["learning_rate"]) for row in read_metrics(run_dir)[len(rows) :]] == [2.5e-4] * 2

@pytest.mark.parametrize("finished", ["rl2_meta"], indirect=True)
def test_longer_trials_and_adams_epsilon_are_given_again(finished, run_dir, main):
    summary = (run_dir / "summary.json").read_text()
    _, err = main(finished.script, "--resume run --episodes-per-trial 20", status=2)
    assert "total_timesteps = 640 leaves no rollout of 320 steps" in err
    assert (run_dir / "summary.json").read_text() == summary
    main(finished.script, "--resume run --episodes-per-trial 20 --total-timesteps 1280 --adam-eps 1")
    assert load(run_dir)["opt"]["param_groups"][0]["eps"] == 1
    steps = [int(row["global_step"]) for row in read_metrics(run_dir)]
    assert steps == [160, 320, 480, 640, 960, 1280]
    assert len(json.loads((run_dir / "summary.json").read_text())["episode_returns"]) == 20

def test_a_run_that_stopped_early(tmp_path, main):
    """Resumed, it is only evaluated, unless a flag makes it continue."""
    script, stop, seen = "muesli_cartpole", "--eval-frequency 100 --stop-return 5", []
    for flags in (f"{SHORT[script]} {stop} --run-dir run", "--resume run", "--resume run --no-stop-early"):
        main(script, flags)
        seen.append(json.loads((tmp_path / "run" / "summary.json").read_text()))
    steps = [summary["global_step"] for summary in seen]
    assert 0 < steps[0] == steps[1] < 600 <= steps[2]
    assert len({summary["solved_at"] for summary in seen}) == 1

@pytest.mark.parametrize(("script", "steps", "flags"), [
    ("ppo_atari", 10_000, ""), ("muesli_cartpole", 1_000, ""),
    ("muesli_cartpole", 1_600, """--env-kwargs '{"max_episode_steps":1600}'"""),
])  # fmt: skip
def test_checkpoints_of_a_short_run_leave_its_episodes_whole(script, steps, flags, main, monkeypatch, spy):
    """As each resets the environments, they are so many steps of each environment apart."""
    module = importlib.import_module(script)
    resets, rollout, played = spy(module, "reset_envs"), module.rollout, []

    def first_rollout(*args):
        if not played:
            played.append(rollout(*args))
        return played[0]

    monkeypatch.setattr(module, "rollout", first_rollout)
    monkeypatch.setattr(module, "train_step", lambda *_: None)
    monkeypatch.setattr(module, "evaluate", lambda *_: {"eval_mean": 0.0})
    length = 8 if script == "muesli_cartpole" else 16
    main(script, f"""{SHORT[script]} --checkpoint-every 0 --total-timesteps {2 * (steps + 4 * length)}
                     {flags} --run-dir run""")
    first, middle, last = (key[-1] for key, _ in resets if key[-2] == 0)  # not of evaluations
    assert first == 0 and middle == -(-steps // length) < last
