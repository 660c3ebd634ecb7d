"""A run that was killed and resumed ends bit for bit like one that was not."""

import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT, all_scripts, flat, load, read_events, resume, run_python
from torch.optim.optimizer import register_optimizer_step_pre_hook

# Kills itself in the sixth optimizer step after the first checkpoint.
KILLED = """
import os, signal, {script} as script
from torch.optim.optimizer import register_optimizer_step_pre_hook
calls = []
def count(*_):
    calls.extend([1] * os.path.exists("run/checkpoint.pt"))
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(count)
script.main()
"""


RUNNER = "--preset none --norm-obs --episodes-per-trial 2 --episode-length 5"


def results(run_dir):
    """Checkpoint and events of a run, but for the time they took."""
    checkpoint, events = load(run_dir), read_events(run_dir)
    del checkpoint["args"], checkpoint["progress"]["seconds"], events["charts/SPS"]
    return {name: np.asarray(x) for name, x in flat(checkpoint).items()}, events


def check_same(run_dir, expected):
    """The same weights, statistics, optimizer, replay, episodes and events."""
    (one, events), (two, expected_events) = results(run_dir), results(expected)
    assert events == expected_events and events
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
    resume(main, script)
    check_same(tmp_path / "run", finished.folder / "run")


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("ppo_continuous", "--env-id probes:Loose-v0 --rnn lstm --norm-reward"),
        ("muesli_cartpole", "--env-id probes:Loose-v0 --buffer-size 112"),
        ("rl2_meta", f"--env-id HalfCheetahVel {RUNNER}"),
    ],
)
def test_interrupted_and_resumed(script, flags, main, tmp_path, request):
    """With an RNN, statistics, a full replay, environments that draw from every generator."""
    steps, flags = [], f"{SHORT[script]} {flags}"
    main(script, f"{flags} --run-dir whole")

    def interrupt(*_):
        steps.extend([1] * (tmp_path / "run" / "checkpoint.pt").exists())
        if len(steps) == 6:
            raise KeyboardInterrupt

    request.addfinalizer(register_optimizer_step_pre_hook(interrupt).remove)
    main(script, f"{flags} --run-dir run", status=130)
    resume(main, script)
    check_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_killed_while_it_saves(moment, finished, tmp_path, main, monkeypatch):
    """The old checkpoint stays until the new one is on the disk: synced, then renamed."""
    function, calls = getattr(os, moment), []

    def dying(*args):
        calls.append(args)
        return function(*args) if len(calls) < 2 else signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, dying)
        main(finished.script, f"{SHORT[finished.script]} --run-dir run", status=130)
    first = load(tmp_path / "run")["progress"]["iteration"]
    assert first == load(tmp_path / "run")["args"]["checkpoint_every"]
    resume(main, finished.script)
    assert not list((tmp_path / "run").glob("*.tmp"))
    check_same(tmp_path / "run", finished.folder / "run")


def test_killed_after_the_last_step(finished, run_dir, main):
    """A resume only evaluates, and says the same."""
    before = (run_dir / "summary.json").read_text()
    (run_dir / "summary.json").unlink()
    main(finished.script, "--resume run")
    after = (run_dir / "summary.json").read_text()
    without_rate = [[x for x in text.splitlines() if '"sps"' not in x] for text in (before, after)]
    assert without_rate[0] == without_rate[1]


@pytest.mark.smoke
def test_a_resume_with_other_flags_continues_a_finished_run(finished, run_dir, main):
    """Its weights, Adam's averages and events; the flags given again override its own."""
    before, events = load(run_dir), read_events(run_dir)["charts/SPS"]
    total = before["args"]["total_timesteps"] * 3 // 2
    resume(main, finished.script, f"--total-timesteps {total} --gamma 0.5 --no-anneal-lr")
    after, longer = load(run_dir), read_events(run_dir)["charts/SPS"]
    assert list(longer.items())[: len(events)] == list(events.items())
    assert list(longer)[-1] == after["progress"]["global_step"] >= total
    changed = {name for name, x in after["args"].items() if x != before["args"][name]}
    assert changed == {"total_timesteps", "gamma", "anneal_lr", "resume"}
    assert after["progress"]["iteration"] > before["progress"]["iteration"]
    steps = [x["optimizer"]["state"][0]["step"] for x in (before, after)]
    assert steps[1] > steps[0]
    rate = after["optimizer"]["param_groups"][0]["lr"]
    assert rate == after["args"]["learning_rate"]


@all_scripts
def test_ctrl_c_has_status_130(script, main, tmp_path, monkeypatch):
    """Also before the first checkpoint; what was saved stays."""
    optimizer = torch.optim.AdamW if script == "muesli_cartpole" else torch.optim.Adam
    monkeypatch.setattr(optimizer, "step", lambda *_: signal.raise_signal(signal.SIGINT))
    _, err = main(script, f"{SHORT[script]} --run-dir run", status=130)
    assert "Error" not in err and not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_clip_range_that_changes_is_resumed_exactly(main, stopped, tmp_path):
    """Compiled, too: another process gives the same graph to its first iteration."""
    flags = f"{SHORT['ppo_continuous']} --env-id Pendulum-v1 --compile --anneal-clip"
    flags += " --clip-coef 0.01 --learning-rate 0.01 --total-timesteps 192 --run-dir"
    torch.compiler.reset()
    main("ppo_continuous", f"{flags} whole")
    stopped("ppo_continuous", f"{flags} run", 4)
    torch.compiler.reset()
    resume(main, "ppo_continuous")
    check_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        ("ppo_continuous", "--num-envs 4"),
        ("ppo_atari", "--num-envs 4"),
        ("rl2_meta", "--num-trials 32"),
    ],
)
def test_the_learning_rate_falls_with_the_steps(script, flag, main, stopped, tmp_path):
    """Also where a resume takes twice as many at a time."""
    stopped(script, f"{SHORT[script]} --learning-rate 1 --run-dir run", 2)
    resume(main, script, flag)
    rates = list(read_events(tmp_path / "run")["charts/learning_rate"].values())
    assert rates == pytest.approx([1, 0.75, 0.5])
