"""The mathematics of ppo_atari against brute force, closed forms, NumPy and PyTorch's own."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import bare_agent, both_scripts, play, small_agent, weights, written_out_loss
from torch import nn

import ppo_atari as atari
import rl2_meta as rl2

# -------------------------------------------------------------------------------------------------------- GAE

def random_rollout(seed, steps=12, envs=5):
    """Rewards, values, the value after the rollout, final values and dones, with all endings, also in the
    last step."""
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    terminated[-1, :3], truncated[-1, :3] = [True, False, True], [False, True, True]
    rewards, values, final_values = rng.normal(size=(3, steps, envs))
    final_values[terminated] = 0
    arrays = rewards, values, rng.normal(size=(1, envs)), final_values, terminated | truncated
    return [torch.tensor(x, dtype=torch.float64) for x in arrays]

def brute_force_advantages(rewards, values, last_value, final_values, dones, gamma, gae_lambda):
    """The sum over all later steps of the episode, for each step anew."""
    next_values = torch.cat([values[1:], last_value])
    next_values[dones > 0] = final_values[dones > 0]
    advantages = torch.zeros_like(rewards)
    for t, n in np.ndindex(*rewards.shape):
        for k in range(t, len(rewards)):
            delta = rewards[k, n] + gamma * next_values[k, n] - values[k, n]
            advantages[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if dones[k, n]:
                break
    return advantages

@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.5, 0.3), (1, 1), (0.9, 0), (0, 0.9)])
def test_gae_is_the_double_sum(gamma, gae_lambda):
    """RL^2's, too, without ends: nothing follows a trial."""
    for seed in range(2):
        rewards, values, *ends = random_rollout(seed)
        expected = brute_force_advantages(rewards, values, *ends, gamma, gae_lambda)
        torch.testing.assert_close(atari.compute_gae(rewards, values, *ends, gamma, gae_lambda), expected)
        expected = brute_force_advantages(rewards, values, *(0 * x for x in ends), gamma, gae_lambda)
        torch.testing.assert_close(rl2.gae_over_trial(rewards, values, gamma, gae_lambda), expected)

@pytest.mark.parametrize("ends", [True, False])
def test_rewards_1_2_3_with_gamma_a_tenth_return_1_23(ends):
    rewards, zeros = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)
    dones = torch.tensor([[0.0], [0.0], [float(ends)]])
    last_value = torch.full((1, 1), 100.0 * ends)  # of another episode, or 0
    returns = atari.compute_gae(rewards, zeros, last_value, zeros, dones, gamma=0.1, gae_lambda=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.23], [2.3], [3.0]]))

# --------------------------------------------------------------------------------- statistics, normalization

@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_statistics_are_those_of_all_data(offset):
    """Also after a module is moved, which leaves them in float64."""
    rng, statistics = np.random.default_rng(0), atari.RunningMeanStd(3).to(torch.float32)
    batches = [offset + rng.normal(i, 1 + i, size=(size, 2, 3)) for i, size in enumerate((1, 50, 7, 300))]
    for batch in batches:
        statistics.update(torch.from_numpy(batch))
    data = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(statistics.mean, data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.var, data.var(0), rtol=1e-8)
    np.testing.assert_allclose(statistics.std(), np.sqrt(data.var(0) + 1e-8), rtol=1e-8)
    assert statistics.count == len(data)

# ----------------------------------------------------------------------------------- loss and optimizer step

def random_batch(agent, L, scale):
    """A batch (L, 8, ...) that no policy has played, and its RNN states (K, 8, H)."""
    batch = {name: torch.randn(L, 8) for name in ("logprobs", "values", "returns", "advantages")}
    batch |= {"obs": torch.randint(256, (L, 8, 36, 36, 4), dtype=torch.uint8)}
    batch |= {"actions": torch.randint(4, (L, 8))}
    batch |= {"starts": (torch.rand(L, 8) < 0.2).float(), "mask": torch.ones(L, 8, 4, dtype=torch.bool)}
    batch["logprobs"] -= 3
    batch["returns"] *= scale
    return batch, torch.randn(agent.num_states, 8, 16)

@pytest.mark.parametrize("flags", [
    {}, {"clip_vloss": False}, {"norm_adv": False, "max_grad_norm": 0.0}, {"rnn": "lstm"},
    {"rnn": "gru", "adam_eps": 1e-3},
    {"share_network": False, "max_grad_norm": 1e9}, {"adam_eps": 1e-3},
], ids=str)  # fmt: skip
def test_train_step_is_the_written_out_loss_and_pytorchs_clipping_and_adam(flags):
    """Of the sequences in its index, over which advantages are normalized, too."""
    agent, opt = bare_agent(**flags)
    agent.value_std.fill_(3.0)
    reference, previous, norms = copy.deepcopy(agent), opt["params"].clone(), []
    adam = torch.optim.Adam(reference.parameters(), eps=agent.args.adam_eps)
    losses, expected_losses = torch.zeros(7), np.zeros(7)
    for i in range(4):
        batch, states = random_batch(agent, 4 if "rnn" in flags else 1, 10.0 ** (i % 3))
        index, coefs = torch.randperm(8)[:6], (0.2, 0.1, 0.5)
        with torch.no_grad():
            atari.train_step(agent, opt, batch, states, index, torch.tensor([0.01 / (i + 1), *coefs]), losses)
        mb = {name: x[:, index] for name, x in batch.items()}
        _, *outputs, _ = reference(mb["obs"], states[:, index], mb["starts"], mb["mask"], mb["actions"])
        loss, logged = written_out_loss(reference, mb, *outputs, *coefs)
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), agent.args.max_grad_norm or float("inf"))
        adam.param_groups[0]["lr"] = 0.01 / (i + 1)
        adam.step()
        norms.append(norm.item())
        expected_losses += [x.item() for x in (*logged, norm)]
        np.testing.assert_allclose(losses, expected_losses, rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(opt["params"], weights(reference), rtol=1e-3, atol=1e-4)
        assert torch.equal(weights(agent), opt["params"])  # views of it
        assert not torch.equal(opt["params"], previous)
        previous = opt["params"].clone()
    assert (0 < agent.args.max_grad_norm < max(norms)) == (agent.args.max_grad_norm == 0.5)

# --------------------------------------------------------------------------------------------------- policies

def head(agent):
    """The last layer of the policy."""
    return agent.actor if isinstance(agent, atari.Agent) else agent.actor[-1]

@pytest.mark.parametrize("script, env_id, num_choices, flags", [
    (atari, "Squares", [4], {"fire_reset": False})], ids=["game"])
def test_a_rollout_samples_the_softmax(script, env_id, num_choices, flags):
    envs, agent, _, env_state = small_agent(env_id, script, num_envs=32, num_steps=64, **flags)
    nn.init.zeros_(head(agent).weight)
    logits = torch.cat([2 * torch.eye(n)[0] for n in num_choices])
    head(agent).bias.data.copy_(logits)
    actions = play(envs, agent, env_state)[0]["actions"].reshape(64, -1, len(num_choices))
    for part, chosen in zip(logits.split(num_choices), actions.unbind(-1), strict=True):
        frequencies = torch.bincount(chosen.flatten(), minlength=len(part)) / chosen.numel()
        torch.testing.assert_close(frequencies, part.softmax(-1), atol=0.03, rtol=0)
        assert (chosen != chosen[:1]).any(0).all() and (chosen != chosen[:, :1]).any(1).sum() > 50
    actions = play(envs, agent, env_state, noise=0.0)[0]["actions"]
    likeliest = torch.stack([part.argmax() for part in logits.split(num_choices)])
    assert (actions.reshape(64, -1, len(num_choices)) == likeliest).all()

# -------------------------------------------------------------------------------------- actions, seeds, init

@both_scripts
def test_seeds_of_different_runs_ranks_and_iterations_share_nothing(script):
    seeds, numbers, agent = [], [], bare_agent(script)[0]
    infos = {name: np.zeros(16) for name in ("lives", "frame_number", "episode_frame_number")}
    obs = np.zeros((16, 4, 36, 36), np.uint8)
    envs = SimpleNamespace(num_envs=16, reset=lambda seed: (seeds.append([*seed]) or obs, infos))
    agent.num_choices, agent.first_actions = [4], np.ones(4, bool)
    keys = [(seed, rank, iteration) for seed in range(4) for rank in range(3) for iteration in range(5)]
    keys += [(seed, 2**31) for seed in range(4)]  # of evaluations
    for key in keys:
        script.reset_envs(envs, agent, *key)
        numbers.append(torch.randint(2**62, ()).item())
    flat = [seed for row in seeds for seed in row]
    assert len(set(flat)) == len(flat) == 16 * len(keys) and len(set(numbers)) == len(keys)

@both_scripts
@pytest.mark.parametrize("flags", [{"share_network": True}, {"share_network": False}, {"rnn": "gru"},
                                   {"rnn": "lstm"}], ids=str)
def test_init_is_orthogonal_with_its_gains(script, flags):
    agent, _ = bare_agent(script, **flags)
    gains = {head(agent): 0.01, (agent.critic if script is atari else agent.critic[-1]): 1.0}
    for module in agent.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name:
                assert parameter.eq(0).all()
            elif "weight" in name:
                gain = 1.0 if isinstance(module, nn.RNNBase) else gains.get(module, 2**0.5)
                values = torch.linalg.svdvals(parameter.detach().flatten(1))
                torch.testing.assert_close(values, torch.full_like(values, gain))

