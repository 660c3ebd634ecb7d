"""Probe environments with known values are learned in seconds, by whole runs of train()."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import probes  # noqa: F401
import pytest
import torch
from conftest import small_agent, trained

import ppo_continuous as ppo

FAST = {"num_envs": 16, "num_steps": 16, "update_epochs": 4, "learning_rate": 5e-3, "total_timesteps": 5000,
        "eval_episodes": 20}


def values(agent, obs):
    """Values of a feed-forward agent for observations (M, O)."""
    obs = agent.normalize(torch.tensor(obs)).unsqueeze(0)
    with torch.no_grad():
        return agent.get_value(obs, torch.zeros(obs.shape[1], 0), torch.zeros(obs.shape[:2]))[0]


@pytest.mark.parametrize("action_dist", ["normal", "tanh-normal"])
def test_bandit_is_learned(tmp_path, action_dist):
    agent, summary = trained(tmp_path, "Bandit-v0", action_dist=action_dist, **FAST)
    assert summary["eval_mean"] > -0.03  # an untrained agent plays 0 and gets -0.25
    assert values(agent, [[0.0]]).item() == pytest.approx(summary["eval_sampled_mean"], abs=0.1)


@pytest.mark.parametrize("env_id", ["DiscreteStart-v0", "MultiDiscrete-v0", "MultiDiscreteStart-v0",
                                    "MultiBinary-v0", "DictObservation-v0"])
def test_choices_are_learned(tmp_path, env_id):
    agent, summary = trained(tmp_path, env_id, **FAST)
    assert summary["eval_mean"] == 1 and summary["eval_sampled_mean"] > 0.9
    obs_dim = len(agent.obs_rms.mean)
    if env_id != "DictObservation-v0":
        assert values(agent, np.zeros((1, obs_dim))).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("flags", [{}, {"norm_value": False}, {"recompute_adv": False}, {"gae_lambda": 1.0},
                                   {"norm_reward": True}], ids=str)
def test_value_of_a_reward_falls_with_its_distance(tmp_path, flags):
    agent, _ = trained(tmp_path, "Chain-v0", gamma=0.8, **FAST | flags)
    unit = (agent.reward_rms.var + 1e-8).sqrt().item() if "norm_reward" in flags else 1.0
    np.testing.assert_allclose(values(agent, np.eye(5)) * unit, 0.8 ** np.arange(4, -1, -1), atol=0.1)


@pytest.mark.parametrize("norm_value", [True, False])
def test_a_time_limit_does_not_cut_the_value(tmp_path, norm_value):
    flags = FAST | {"gamma": 0.8, "norm_value": norm_value, "total_timesteps": 10_000}
    agent, summary = trained(tmp_path / "with", "Forever-v0", **flags)
    without, _ = trained(tmp_path / "without", "Forever-v0", **flags, truncation_bootstrap=False)
    assert summary["eval_mean"] == 5
    assert values(agent, [[0.0]]).item() == pytest.approx(1 / (1 - 0.8), rel=0.06)
    left = [(1 - 0.8**n) / (1 - 0.8) for n in range(1, 6)]  # of n rewards before the limit, which is not seen
    assert values(without, [[0.0]]).item() == pytest.approx(np.mean(left), rel=0.15)


@pytest.mark.parametrize("rnn, flags", [("gru", {}), ("lstm", {}), ("gru", {"rnn_seq_len": 8}), ("none", {})])
def test_only_recurrent_agents_remember(tmp_path, rnn, flags):
    flags = FAST | flags | {"eval_episodes": 100, "total_timesteps": 15_000, "gamma": 0.9}
    _, summary = trained(tmp_path, "Memory-v0", rnn=rnn, **flags)
    if rnn == "none":
        assert 0.3 < summary["eval_mean"] < 0.7 and 0.3 < summary["eval_sampled_mean"] < 0.7
    else:
        assert summary["eval_mean"] > 0.9 and summary["eval_sampled_mean"] > 0.9


def test_masked_choices_are_learned_and_forbidden_ones_never_played(tmp_path):
    agent, _ = trained(tmp_path, "Masked-v0", **FAST)  # a forbidden action would have raised
    allowed = list(combinations(range(4), 2))
    mask = torch.tensor([[[i in pair for i in range(4)] for pair in allowed]])
    obs = agent.normalize(torch.zeros(1, len(allowed), 1))
    action, *_ = agent(obs, torch.zeros(len(allowed), 0), torch.zeros(1, len(allowed)), mask)
    assert action.flatten().tolist() == [max(pair) for pair in allowed]


def test_without_mask_actions_forbidden_choices_are_played():
    with pytest.raises(ValueError, match="forbidden"):
        small_agent("Masked-v0", mask_actions=False)


@pytest.mark.parametrize("env_id, what", [("NanReward-v0", "rewards"), ("NanObservation-v0", "observations")])
def test_nan_stops_the_run_and_is_named(tmp_path, env_id, what):
    flags = FAST | {"total_timesteps": 10_000, "num_minibatches": 4, "checkpoint_every": 2}
    with pytest.raises(FloatingPointError, match=f"{what} not finite in iteration 6"):
        trained(tmp_path, env_id, **flags)  # 100 good steps: 16 for the first statistics, 5 * 16, and 4
    checkpoint = ppo.load_checkpoint(tmp_path)
    assert checkpoint["at"]["iteration"] == 4
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_environments_of_a_module_are_made_by_module_and_name(tmp_path):
    code = ("import ppo_continuous as ppo\n"
            "for env_id in ('probes:Bandit-v0', 'tests.probes:Bandit-v0'):\n"
            "    print(ppo.make_envs(ppo.Args(env_id=env_id), 2).num_envs)\n")
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root, root / "tests")))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True)
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_environments_that_know_no_rendering_can_be_made():
    envs, *_ = small_agent("Bare-v0")
    assert envs.num_envs == 4
