"""Trainings to a score: a minute or two each on one core, Breakout an hour or two."""

import json

import pytest
from conftest import ROOT, run_python


@pytest.mark.slow
@pytest.mark.parametrize(("command", "number", "least"), [
    ("ppo_continuous.py --env-id Pendulum-v1 --total-timesteps 200000", "eval_mean", -200),
    ("muesli_cartpole.py", "eval_mean", 475),
    ("rl2_meta.py --env-id Bandit --num-arms 5", "trial_return_greedy_mean", 6.62),
    ("ppo_atari.py --env-id Breakout --total-timesteps 2000000 --seed 2", "eval_mean", 30),
])  # fmt: skip
def test_reaches_the_score(command, number, least, tmp_path):
    run_python(f"{ROOT}/{command} --run-dir run", tmp_path, timeout=None)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())[number] >= least
