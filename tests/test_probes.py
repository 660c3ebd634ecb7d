"""Probe environments with known values are learned in seconds, by whole runs of train()."""

from itertools import combinations

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
    obs = agent.normalize(torch.tensor(obs))[None]
    with torch.no_grad():
        return agent.get_value(obs, torch.zeros(0, obs.shape[1], 16), torch.zeros(obs.shape[:2]))[0]


def test_bandit_is_learned(tmp_path):
    agent, summary = trained(tmp_path / "run", "Bandit-v0", **FAST)
    assert summary["eval_mean"] > -0.03  # an untrained agent plays 0 and gets -0.25
    assert values(agent, [[0.0]]).item() == pytest.approx(summary["eval_sampled_mean"], abs=0.1)


@pytest.mark.parametrize("env_id", ["DiscreteStart-v0", "MultiDiscrete-v0", "MultiDiscreteStart-v0",
                                    "MultiBinary-v0", "DictObservation-v0", "BooleanObservation-v0"])
def test_choices_are_learned(tmp_path, env_id):
    agent, summary = trained(tmp_path / "run", env_id, **FAST)
    assert summary["eval_mean"] == 1 and summary["eval_sampled_mean"] > 0.9
    obs_dim = len(agent.obs_rms.mean)
    if "Observation" not in env_id:
        assert values(agent, np.zeros((1, obs_dim))).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("flags", [{}, {"norm_value": False}, {"recompute_adv": False}, {"gae_lambda": 1.0},
                                   {"norm_reward": True}], ids=str)
def test_value_of_a_reward_falls_with_its_distance(tmp_path, flags):
    agent, _ = trained(tmp_path / "run", "Chain-v0", gamma=0.8, **FAST | flags)
    unit = agent.reward_rms.std().item() if "norm_reward" in flags else 1.0
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
    _, summary = trained(tmp_path / "run", "Memory-v0", rnn=rnn, **flags)
    if rnn == "none":
        assert 0.3 < summary["eval_mean"] < 0.7 and 0.3 < summary["eval_sampled_mean"] < 0.7
    else:
        assert summary["eval_mean"] > 0.9 and summary["eval_sampled_mean"] > 0.9


def test_masked_choices_are_learned_and_forbidden_ones_never_played(tmp_path):
    agent, _ = trained(tmp_path / "run", "Masked-v0", **FAST)  # a forbidden action would have raised
    allowed = list(combinations(range(4), 2))
    mask = torch.tensor([[[i in pair for i in range(4)] for pair in allowed]])
    obs = agent.normalize(torch.zeros(1, len(allowed), 1))
    action, *_ = agent(obs, torch.zeros(0, len(allowed), 16), torch.zeros(1, len(allowed)), mask)
    assert action.flatten().tolist() == [max(pair) for pair in allowed]


def test_a_mask_only_in_the_info_of_reset_holds_for_the_first_step():
    envs, agent, _, env_state = small_agent("MaskedAtReset-v0", num_steps=300)
    data, *_, episodes = ppo.rollout(envs, agent, agent.act, env_state)  # a forbidden one would raise
    assert len(episodes) == 400
    first = data["starts"].bool()
    assert (data["mask"][first].sum(-1) == 2).all() and data["mask"][~first].all()


@pytest.mark.parametrize("env_id", ["Masked-v0", "MaskedAtReset-v0"])
def test_without_mask_actions_forbidden_choices_are_played(env_id):
    with pytest.raises(ValueError, match="forbidden"):
        small_agent(env_id, mask_actions=False)


@pytest.mark.parametrize("env_id, what", [("NanReward-v0", "rewards"), ("NanObservation-v0", "observations")])
def test_nan_stops_the_run_and_is_named(tmp_path, env_id, what):
    flags = FAST | {"total_timesteps": 10_000, "num_minibatches": 4, "checkpoint_every": 2}
    with pytest.raises(FloatingPointError, match=f"{what} not finite in iteration 6"):
        trained(tmp_path / "run", env_id, **flags)  # 100 good steps: 16 uncounted ones, 5 * 16, and 4
    checkpoint, _ = ppo.load_checkpoint(tmp_path / "run")
    assert checkpoint["progress"]["iteration"] == 4
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("env_id, features", [
    ("BooleanObservation-v0", 2), ("ShownDiscrete-v0", 3), ("ShownMultiBinary-v0", 3),
    ("ShownMultiDiscrete-v0", 5), ("ShownPicture-v0", 48), ("DictObservation-v0", 7)])
def test_observations_of_other_spaces_become_vectors(tmp_path, env_id, features, norm_obs):
    agent, _ = trained(tmp_path / "run", env_id, norm_obs=norm_obs)
    assert agent.obs_rms.mean.shape == (features,)


def test_keyword_arguments_reach_the_environment():
    envs, *_ = small_agent("Endless-v0", env_kwargs='{"limit": 7}')
    assert [env.unwrapped.limit for env in envs.unwrapped.envs] == [7] * 4
    envs, agent, *_ = small_agent("LunarLander-v3", env_kwargs='{"continuous": true}')
    assert agent.num_choices == [] and envs.single_action_space.shape == (2,)


def test_environments_that_know_no_rendering_can_be_made():
    envs, *_ = small_agent("Bare-v0")
    assert envs.num_envs == 4
