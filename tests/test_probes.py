"""Environments with known returns and values are learned in seconds, by whole runs of ppo_continuous.

That ppo_atari learns is in test_atari.py."""

from itertools import combinations

import numpy as np
import probes
import pytest
import torch
from conftest import play, small_agent, trained

import ppo_continuous as ppo

FAST = {"num_envs": 16, "num_steps": 16, "update_epochs": 4, "learning_rate": 5e-3, "total_timesteps": 2048,
        "eval_episodes": 20}

def values(agent, obs):
    """Values of a feed-forward agent for observations (M, O)."""
    obs = agent.normalize(torch.tensor(obs))[None]
    with torch.no_grad():
        return agent.get_value(obs, torch.zeros(0, obs.shape[1], 16), torch.zeros(obs.shape[:2]))[0]

def test_the_best_action_of_a_bandit_is_learned(tmp_path):
    agent, summary = trained(tmp_path / "run", "Bandit-v0", **FAST)
    assert summary["eval_mean"] > -0.03  # an untrained agent plays 0 and gets -0.25
    assert values(agent, [[0.0]]).item() == pytest.approx(summary["eval_sampled_mean"], abs=0.1)

@pytest.mark.parametrize("env_id", ["MultiDiscrete-v0", "MultiBinary-v0", "ShownDict-v0"])
def test_the_best_choices_are_learned(tmp_path, env_id):
    _, summary = trained(tmp_path / "run", env_id, **FAST)
    assert summary["eval_mean"] == 1 and summary["eval_sampled_mean"] > 0.8

@pytest.mark.parametrize("flags", [{}, {"norm_value": False, "norm_reward": True}], ids=str)
def test_the_value_of_a_reward_falls_with_its_distance(tmp_path, flags):
    agent, _ = trained(tmp_path / "run", "Chain-v0", gamma=0.8, **FAST | flags)
    unit = agent.reward_rms.std().item() if "norm_reward" in flags else 1.0
    np.testing.assert_allclose(values(agent, np.eye(5)) * unit, 0.8 ** np.arange(4, -1, -1), atol=0.1)

def test_a_time_limit_does_not_cut_the_value(tmp_path):
    agent, summary = trained(tmp_path / "run", "Forever-v0", gamma=0.8, **FAST | {"total_timesteps": 4096})
    assert values(agent, [[0.0]]).item() == pytest.approx(1 / (1 - 0.8), rel=0.1)
    assert summary["eval_mean"] == 5

@pytest.mark.parametrize("flags", [{"rnn": "gru"}, {"rnn": "lstm", "rnn_seq_len": 8}], ids=str)
def test_recurrent_agents_remember(tmp_path, flags):
    flags = FAST | flags | {"eval_episodes": 50, "total_timesteps": 4096, "gamma": 0.9}
    _, summary = trained(tmp_path / "run", "Memory-v0", **flags)
    assert summary["eval_mean"] > 0.9 and summary["eval_sampled_mean"] > 0.85

def test_masked_choices_are_learned_and_forbidden_ones_never_played(tmp_path):
    agent, _ = trained(tmp_path / "run", "Masked-v0", **FAST)  # a forbidden action would have raised
    allowed = list(combinations(range(4), 2))
    mask = torch.tensor([[[i in pair for i in range(4)] for pair in allowed]])
    obs = agent.normalize(torch.zeros(1, len(allowed), 1))
    action, *_ = agent(obs, torch.zeros(0, len(allowed), 16), torch.zeros(1, len(allowed)), mask)
    assert action.flatten().tolist() == [max(pair) for pair in allowed]

@pytest.mark.parametrize("first_only", ["true", "false"])
def test_the_mask_is_that_of_the_info_of_reset_or_of_the_step_before(first_only):
    """And where there is none in the info, all is allowed."""
    kwargs = f'{{"first_only": {first_only}}}'
    envs, agent, _, env_state = small_agent("Masked-v0", env_kwargs=kwargs, num_steps=30)
    data = play(envs, agent, env_state)[0]
    first = data["starts"].bool()
    assert (data["mask"][first].sum(-1) == 2).all()
    assert (data["mask"][~first].sum(-1) == (4 if first_only == "true" else 2)).all()

@pytest.mark.parametrize("mask", [[1], [1, 0, 1]])
def test_a_mask_of_another_length_is_refused(mask, monkeypatch):
    """None is no mask."""
    monkeypatch.setattr(probes.Masked, "forbid", False)
    monkeypatch.setattr(probes.Masked, "info", lambda _: {"action_mask": None})
    assert small_agent("Masked-v0")[3].mask.all()
    monkeypatch.setattr(probes.Masked, "info", lambda _: {"action_mask": mask})
    with pytest.raises(ppo.UsageError, match="action_mask needs 4 entries: one per choice, two per bit"):
        small_agent("Masked-v0")

@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("env_id, features", [("ShownBooleans-v0", 2), ("ShownPicture-v0", 48)])
def test_observations_of_other_spaces_become_vectors(tmp_path, env_id, features, norm_obs):
    agent, _ = trained(tmp_path / "run", env_id, norm_obs=norm_obs)
    assert agent.obs_rms.mean.shape == (features,) and agent.obs_rms.mean.any()
