"""The mathematics of PPO against brute force, closed forms, NumPy and PyTorch's own."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import bare_agent, both_scripts, play, small_agent, small_args, weights, written_out_loss
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn
from torch.distributions import Categorical, Normal

import ppo_atari as atari
import ppo_continuous as ppo
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
        torch.testing.assert_close(ppo.compute_gae(rewards, values, *ends, gamma, gae_lambda), expected)
        expected = brute_force_advantages(rewards, values, *(0 * x for x in ends), gamma, gae_lambda)
        torch.testing.assert_close(rl2.gae_over_trial(rewards, values, gamma, gae_lambda), expected)

@pytest.mark.parametrize("ends", [True, False])
def test_rewards_1_2_3_with_gamma_a_tenth_return_1_23(ends):
    rewards, zeros = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)
    dones = torch.tensor([[0.0], [0.0], [float(ends)]])
    last_value = torch.full((1, 1), 100.0 * ends)  # of another episode, or 0
    returns = ppo.compute_gae(rewards, zeros, last_value, zeros, dones, gamma=0.1, gae_lambda=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.23], [2.3], [3.0]]))

# --------------------------------------------------------------------------------- statistics, normalization

@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_statistics_are_those_of_all_data(offset):
    """Also after a module is moved, which leaves them in float64."""
    rng, statistics = np.random.default_rng(0), ppo.RunningMeanStd(3).to(torch.float32)
    batches = [offset + rng.normal(i, 1 + i, size=(size, 2, 3)) for i, size in enumerate((1, 50, 7, 300))]
    for batch in batches:
        statistics.update(torch.from_numpy(batch))
    data = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(statistics.mean, data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.var, data.var(0), rtol=1e-8)
    np.testing.assert_allclose(statistics.std(), np.sqrt(data.var(0) + 1e-8), rtol=1e-8)
    assert statistics.count == len(data)

@pytest.mark.parametrize("clip_reward", [1.0, 0.0])
def test_rewards_are_over_the_std_of_the_discounted_return(clip_reward):
    """That of all returns so far, the step's own included."""
    envs, agent, _, _ = small_agent("Masked-v0", norm_reward=True, clip_reward=clip_reward, gamma=0.9)
    agent.reward_rms = ppo.RunningMeanStd()
    env_state, raw, step = ppo.reset_envs(envs, agent, 1), [], envs.step

    def noisy_step(action):
        obs, reward, *rest = step(action)
        raw.append(reward - 0.3)
        return obs, raw[-1], *rest

    envs.step = noisy_step
    data = [play(envs, agent, env_state)[0] for _ in range(2)]
    rewards, dones = (torch.cat([rollout[name] for rollout in data]).numpy() for name in ("rewards", "dones"))
    discounted, seen, expected = np.zeros(4), [], []
    for reward, done in zip(raw, dones, strict=True):
        discounted = 0.9 * discounted + reward
        seen.extend(discounted)
        expected.append(reward / np.sqrt(np.var(seen) + 1e-8))
        discounted = discounted * (1 - done)
    assert dones.any() and np.abs(expected).max() > 1
    expected = np.clip(expected, -1, 1) if clip_reward else expected
    np.testing.assert_allclose(rewards, expected, rtol=1e-5)

# ----------------------------------------------------------------------------------- loss and optimizer step

def random_batch(agent, L, scale):
    """A batch (L, 8, ...) that no policy has played, and its RNN states (K, 8, H)."""
    batch = {name: torch.randn(L, 8) for name in ("logprobs", "values", "returns", "advantages")}
    batch |= {"obs": torch.randn(L, 8, 3), "actions": torch.randn(L, 8, 2)}
    batch |= {"starts": (torch.rand(L, 8) < 0.2).float(), "mask": torch.ones(L, 8, 0, dtype=torch.bool)}
    batch["logprobs"] -= 3
    batch["returns"] *= scale
    return batch, torch.randn(agent.num_states, 8, 16)

@pytest.mark.parametrize("flags", [
    {}, {"clip_vloss": True}, {"norm_adv": False, "max_grad_norm": 0.0}, {"rnn": "gru"}, {"rnn": "lstm"},
    {"share_network": True, "max_grad_norm": 1e9}, {"learn_std": True, "adam_eps": 1e-3},
], ids=str)  # fmt: skip
def test_train_step_is_the_written_out_loss_and_pytorchs_clipping_and_adam(flags):
    """Of the sequences in its index, over which advantages are normalized, too. ppo_atari's is the same."""
    agent, opt = bare_agent(**flags)
    agent.value_std.fill_(3.0)
    reference, previous, norms = copy.deepcopy(agent), opt["params"].clone(), []
    adam = torch.optim.Adam(reference.parameters(), eps=agent.args.adam_eps)
    losses, expected_losses = torch.zeros(7), np.zeros(7)
    for i in range(4):
        batch, states = random_batch(agent, 4 if "rnn" in flags else 1, 10.0 ** (i % 3))
        index, coefs = torch.randperm(8)[:6], (0.2, 0.1, 0.5)
        with torch.no_grad():
            ppo.train_step(agent, opt, batch, states, index, torch.tensor([0.01 / (i + 1), *coefs]), losses)
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

def act(agent, obs, action=None, mask=None, noise=0.0):
    """Action, log-probability and entropy of a feed-forward agent for observations (M, ...)."""
    state, starts = torch.zeros(0, len(obs), 16), torch.zeros(1, len(obs))
    mask = torch.ones(len(obs), agent.num_outputs, dtype=torch.bool) if mask is None else mask
    action = None if action is None else action[None]
    with torch.no_grad():
        return [x[0] for x in agent(obs[None], state, starts, mask[None], action, noise)[:3]]

@pytest.mark.parametrize("log_std, clamped", [(-1.0, -1.0), (4.0, 2.0), (-9.0, -5.0)])
def test_normal_policy_is_pytorchs_normal(log_std, clamped):
    agent, _ = bare_agent(log_std_init=log_std)
    obs, action, noise = torch.randn(6, 3), torch.randn(6, 2), torch.randn(6, 2)
    mean, std = agent.actor(obs).detach(), torch.full((6, 2), clamped).exp()
    _, logprob, entropy = act(agent, obs, action)
    torch.testing.assert_close(logprob, Normal(mean, std).log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, Normal(mean, std).entropy().sum(-1))
    torch.testing.assert_close(act(agent, obs, noise=noise)[0], mean + std * noise)
    torch.testing.assert_close(act(agent, obs)[0], mean)

@pytest.mark.parametrize("space, num_choices", [
    (Discrete(4), [4]), (MultiDiscrete([2, 3]), [2, 3]), (MultiBinary(3), [2, 2, 2])], ids=str)
def test_choices_have_pytorchs_log_probability_and_entropy(space, num_choices):
    agent, obs = bare_agent(space=space)[0], torch.randn(50, 3)
    nn.init.normal_(head(agent).weight)
    logits = agent.actor(obs).detach()
    parts = [Categorical(logits=part) for part in logits.split(num_choices, -1)]
    action = torch.stack([part.sample() for part in parts], -1)
    _, logprob, entropy = act(agent, obs, action)
    torch.testing.assert_close(logprob, sum(p.log_prob(a) for p, a in zip(parts, action.T, strict=True)))
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    assert torch.equal(act(agent, obs)[0], torch.stack([part.probs.argmax(-1) for part in parts], -1))

def test_forbidden_choices_have_probability_zero_and_are_never_sampled():
    agent, count = bare_agent(space=MultiDiscrete([4, 2]))[0], 10_000
    nn.init.normal_(head(agent).bias)
    obs, mask = torch.randn(1, 3).expand(count, 3), torch.tensor([True, False, False, True, False, True])
    masks = mask.expand(count, 6)
    action, _, entropy = act(agent, obs, mask=masks, noise=-torch.empty(1, count, 6).exponential_().log())
    assert set(action[:, 0].tolist()) == {0, 3} and set(action[:, 1].tolist()) == {1}
    every = torch.cartesian_prod(torch.arange(4), torch.arange(2))
    probability = act(agent, obs[:8], every, masks[:8])[1].exp()
    allowed = mask[every[:, 0]] & mask[4 + every[:, 1]]
    assert probability[~allowed].eq(0).all() and probability.sum().item() == pytest.approx(1)
    p = probability[allowed]
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())

@pytest.mark.parametrize("script, env_id, num_choices, flags", [
    (ppo, "MultiDiscrete-v0", [3, 4], {}), (atari, "Squares", [4], {"fire_reset": False})],
    ids=["choices", "game"])
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

@pytest.mark.parametrize("tanh_mean", [False, True])
def test_a_rollout_samples_the_normal(tanh_mean):
    envs, agent, _, env_state = small_agent("Bandit-v0", num_envs=32, num_steps=64, tanh_mean=tanh_mean)
    head(agent).bias.data.fill_(2)  # out of the action's bounds
    data = play(envs, agent, env_state)[0]
    mean = agent.actor(data["obs"][0, 0]).detach()
    mean = mean.tanh() if tanh_mean else mean
    noise = (data["actions"][..., 0] - mean) / np.exp(-1)
    assert noise.unique().numel() == 64 * 32
    assert abs(noise.mean()) < 0.07 and abs(noise.std() - 1) < 0.05
    assert (noise.abs() < 1).float().mean().item() == pytest.approx(0.683, abs=0.03)
    data = play(envs, agent, env_state, noise=0.0)[0]
    torch.testing.assert_close(data["actions"], mean.expand(64, 32, 1))

# -------------------------------------------------------------------------------------- actions, seeds, init

def to_env(space, action, **flags):
    return ppo.read_action_space(space, small_args(**flags))[1](torch.tensor(action))

@pytest.mark.parametrize("flags, expected", [
    ({}, [[-2, 7.5], [2, 10]]),
    ({"clip_actions": False}, [[-2, 7.5], [6, 10]]),
    ({"scale_actions": False}, [[-1, 0.5], [2, 1]]),
    ({"scale_actions": False, "clip_actions": False}, [[-1, 0.5], [3, 1]]),
])
def test_actions_are_scaled_and_clipped_to_the_bounds(flags, expected):
    space = Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    action = to_env(space, [[-1.0, 0.5], [3.0, 1.0]], **flags)
    np.testing.assert_allclose(action, expected, rtol=1e-6)
    assert action.dtype == np.float32

def test_components_without_bounds_pass_unchanged():
    space = Box(np.array([-np.inf, 0, -4], np.float32), np.array([np.inf, np.inf, 4], np.float32))
    assert to_env(space, [[-30.0, -3.0, 0.5], [30.0, 3.0, -2.0]]).tolist() == [[-30, 0, 2], [30, 3, -4]]
    largest = np.finfo(np.float32).max
    assert to_env(Box(-largest, largest, (1,)), [[0.5]]) == 0.5

@pytest.mark.parametrize("space", [
    Box(-1, 1, (2, 3)), Discrete(3, start=5), Discrete(3, dtype=np.int32), MultiBinary((2, 2)),
    MultiDiscrete([3, 3], start=[5, -2]), MultiDiscrete([[3, 3], [3, 3]])], ids=str)
def test_actions_are_members_of_their_space_with_its_dtype(space):
    agent, _ = bare_agent(space=space)
    action, _, _ = act(agent, torch.randn(20, 3), noise=torch.randn(1, 20, agent.num_outputs))
    for item in agent.to_env(action):
        assert space.contains(item) and np.asarray(item).dtype == space.dtype

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

@pytest.mark.parametrize("flags, names", [
    ({}, "actor.0 actor.2 actor.4 critic.0 critic.2 critic.4"),
    ({"share_network": True}, "actor.0 critic.0 trunk.0 trunk.2"),
    ({"learn_std": True, "hidden": ()}, "actor.0 critic.0 log_std"),
    ({"rnn": "gru", "hidden": (8,)}, "actor.0 actor.2 critic.0 critic.2 rnn"),
], ids=str)  # fmt: skip
def test_networks_have_the_layers_that_their_flags_name(flags, names):
    agent, _ = bare_agent(**flags)
    assert sorted({name.rsplit(".", 1)[0] for name, _ in agent.named_parameters()}) == names.split()
    assert agent.actor[-1].out_features == 2
