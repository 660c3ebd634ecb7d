"""One easy task in many variants (benchmarks/stress.py): PPO and Muesli learn in each."""

import json
from pathlib import Path

import pytest
import stress

import muesli_cartpole as muesli
import ppo_continuous as ppo

PPO = {"total_timesteps": 10_240, "anneal_lr": False, "log_std_drop": 0.0, "compile": False}
MUESLI = {"total_timesteps": 4_000, "stop_early": False, "eval_frequency": 0}


def train(module, kwargs, folder, **flags):
    """Score of a short training: 0 is random, 1 the shortest way."""
    args = module.Args(
        env_id="Point-v0", env_kwargs=json.dumps(kwargs), run_dir=str(folder), **flags
    )
    args.check()
    module.train(args)
    summary = json.loads(Path(folder, "summary.json").read_text())
    return stress.score_of(summary, "", kwargs)


@pytest.mark.parametrize(
    "variant",
    [
        "plain", "rewards x 1e-08", "rewards x 1e+08", "rewards -10",
        "observations x 1e-06", "observations x 1e+06", "observations +1e4",
        "bounds 1e-3 and 1e3", "bounds 0 to 2",
    ],
)  # fmt: skip
def test_ppo_learns_in(variant, tmp_path):
    assert train(ppo, stress.VARIANTS[variant], tmp_path / "run", **PPO) > 0.7


def test_a_critic_that_begins_too_high_misleads(tmp_path):
    """What debias_value is for: with costs only, the policy is drawn to where it has not been."""
    kwargs = stress.VARIANTS["rewards -10"]
    assert train(ppo, kwargs, tmp_path / "run", debias_value=False, **PPO) < 0.3


@pytest.mark.parametrize(
    "variant", ["plain", "rewards -1", "rewards +1", "observations x 1e-06", "observations +1e4"]
)
def test_muesli_learns_in(variant, tmp_path):
    kwargs = stress.VARIANTS[variant] | {"discrete": True}
    assert train(muesli, kwargs, tmp_path / "run", **MUESLI, eval_episodes=10) > 0.5
