"""The mathematics against brute force, closed forms, NumPy and PyTorch's own."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import small_args
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn

import ppo_continuous as ppo

BOX = Box(-1, 1, (2,))


def make_agent(space=BOX, obs_dim=3, **flags):
    return ppo.Agent(obs_dim, space, small_args("unused", **flags))


# -------------------------------------------------------------------------------------------------------- GAE


def random_rollout(steps=12, envs=5, seed=0):
    """Rewards, values, next values, terminated and done with all four endings, also in the last step."""
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    terminated[-1, :3], truncated[-1, :3] = [True, False, True], [False, True, True]
    arrays = (*rng.normal(size=(3, steps, envs)), terminated, terminated | truncated)
    return [torch.tensor(x, dtype=torch.float64) for x in arrays]


def brute_force_advantages(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """The sum over all later steps of the episode, for each step anew."""
    result = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                future = 0 if terminated[k, n] else gamma * next_values[k, n]
                result[t, n] += (gamma * gae_lambda) ** (k - t) * (rewards[k, n] + future - values[k, n])
                if done[k, n]:
                    break
    return result


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.5, 0.3), (1, 1), (0.9, 0), (0, 0.9)])
def test_gae_is_the_double_sum(gamma, gae_lambda):
    for seed in range(3):
        rollout = random_rollout(seed=seed)
        expected = brute_force_advantages(*rollout, gamma, gae_lambda)
        torch.testing.assert_close(ppo.compute_gae(*rollout, gamma, gae_lambda), expected)


def test_rewards_1_2_3_with_gamma_a_tenth_return_1_23():
    rewards, zeros = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)
    end = torch.tensor([[0.0], [0.0], [1.0]])
    returns = ppo.compute_gae(rewards, zeros, zeros, end, end, gamma=0.1, gae_lambda=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.23], [2.3], [3.0]]))


def test_lambda_1_gives_n_step_returns():
    rewards, values, _, terminated, done = random_rollout()
    after = torch.randn_like(rewards)
    after[:-1] = torch.where(done[:-1] > 0, after[:-1], values[1:])
    advantages = ppo.compute_gae(rewards, values, after, terminated, done, 0.9, 1.0)
    goal = after[-1]
    for t in reversed(range(len(rewards))):
        goal = rewards[t] + 0.9 * torch.where(done[t] > 0, after[t], goal) * (1 - terminated[t])
        torch.testing.assert_close(advantages[t] + values[t], goal)


def test_lambda_0_gives_one_step_advantages():
    rewards, values, after, terminated, done = random_rollout()
    expected = rewards + 0.9 * after * (1 - terminated) - values
    torch.testing.assert_close(ppo.compute_gae(rewards, values, after, terminated, done, 0.9, 0.0), expected)


class Line(gym.Env):
    """Observation 1, 2, 3, ... in an episode, which terminates or is truncated after three steps."""

    observation_space, action_space = Box(0, 100, (1,)), Box(-1, 1, (1,))

    def __init__(self, truncate):
        self.truncate = truncate

    def reset(self, *, seed=None, options=None):
        self.at = 1
        return np.array([1], np.float32), {}

    def step(self, action):
        self.at += 1
        end = self.at == 4
        return np.array([self.at], np.float32), 1.0, end and not self.truncate, end and self.truncate, {}


def collect_line(truncate, **flags):
    """Agent whose value is its observation, and a rollout of an episode and two steps of the next."""
    args = small_args("unused", num_envs=2, num_steps=5, num_minibatches=1, norm_obs=False, **flags)
    envs = gym.vector.SyncVectorEnv([lambda: ppo.SlimInfo(Line(truncate))] * 2,
                                    autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    agent = ppo.Agent(1, envs.single_action_space, args)
    agent.critic = nn.Identity()
    stream = ppo.reset_stream(envs, agent, [0, 1])
    return agent, ppo.collect(envs, agent, agent.act, stream)[0]


def test_next_value_is_of_the_final_observation_at_a_truncation():
    agent, rollout = collect_line(truncate=True)
    assert rollout["values"][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert rollout["done"][:, 0].tolist() == [0, 0, 1, 0, 0] and not rollout["terminated"].any()
    for n in range(2):
        assert ppo.next_values(agent, rollout, rollout["values"])[:, n].tolist() == [2, 3, 4, 2, 3]


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_next_value_at_a_truncation_remembers_the_episode(rnn):
    agent, rollout = collect_line(truncate=True, rnn=rnn, rnn_hidden=1)  # the value is the layer's output
    with torch.no_grad():
        first, second, third, final = agent.rnn(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))[0].unbind()
        after = ppo.next_values(agent, rollout, rollout["values"])[:, 0]
    torch.testing.assert_close(rollout["values"][:, 0], torch.cat([first, second, third, first, second]))
    torch.testing.assert_close(after, torch.cat([second, third, final, second, third]))


@pytest.mark.parametrize("truncate, flags", [(False, {}), (True, {"truncation_bootstrap": False})])
def test_nothing_counts_after_a_termination_or_after_a_truncation_without_bootstrap(truncate, flags):
    agent, rollout = collect_line(truncate, **flags)
    assert torch.equal(rollout["terminated"], rollout["done"])
    values = rollout["values"]
    after = ppo.next_values(agent, rollout, values)
    done = rollout["done"]
    advantages = ppo.compute_gae(rollout["rewards"], values, after, rollout["terminated"], done, 0.5, 0)
    # 1 + 0.5 * (2, 3, nothing, 2, 3) - (1, 2, 3, 1, 2)
    assert advantages[:, 0].tolist() == [1, 0.5, -2, 1, 0.5]


# ---------------------------------------------------------------------------------- statistics, normalisation


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_statistics_are_those_of_all_data(offset):
    rng, statistics = np.random.default_rng(0), ppo.RunningMeanStd(3)
    batches = [offset + rng.normal(i, 1 + i, size=(size, 2, 3)) for i, size in enumerate((1, 50, 7, 300))]
    for batch in batches:
        statistics.update(batch)
    data = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(statistics.mean, data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.var, data.var(0), rtol=1e-8)
    assert statistics.count == len(data)


def test_running_statistics_stay_float64_when_the_agent_is_moved():
    agent = make_agent().to(torch.float32)
    assert agent.obs_rms.mean.dtype == agent.value_rms.var.dtype == torch.float64


def test_observations_are_normalised_and_clipped():
    agent = make_agent(obs_dim=2, clip_obs=1.5)
    agent.obs_rms.mean[:], agent.obs_rms.var[:] = torch.tensor([1.0, 5.0]), torch.tensor([4.0, 0.01])
    obs = torch.tensor([[3.0, 6.0]], dtype=torch.float64)
    torch.testing.assert_close(agent.normalize(obs), torch.tensor([[1.0, 1.5]]))


def test_rewards_are_over_the_deviation_of_the_discounted_return():
    rng, agent = np.random.default_rng(0), make_agent(norm_reward=True, clip_reward=1.0, gamma=0.9)
    running, current, seen = torch.zeros(3), [0.0] * 3, []
    for _ in range(3):
        rewards, done = rng.normal(size=(20, 3)).astype(np.float32), rng.random((20, 3)) < 0.2
        for t in range(20):
            for n in range(3):
                current[n] = 0.9 * current[n] + rewards[t, n]
                seen.append(current[n])
                if done[t, n]:
                    current[n] = 0.0
        result = ppo.normalize_rewards(torch.tensor(rewards), torch.tensor(done).float(), running, agent)
        expected = np.clip(rewards / np.sqrt(np.var(seen) + 1e-8), -1, 1)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
        assert (np.abs(expected) == 1).any() and (np.abs(expected) < 1).any()
        np.testing.assert_allclose(running, current, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------- optimiser


def test_adam_step_is_pytorchs_adam():
    start = torch.randn(50)
    parameter = nn.Parameter(start.clone())
    opt = {"params": start.clone(), "exp_avg": torch.zeros(50), "exp_avg_sq": torch.zeros(50),
           "bias": torch.zeros(2)}
    adam = torch.optim.Adam([parameter], eps=1e-5)
    for i in range(10):
        grad = torch.randn(50) * 10 ** -(i % 5)
        parameter.grad, adam.param_groups[0]["lr"] = grad.clone(), 0.01 / (i + 1)
        adam.step()
        ppo.adam_step(opt, grad, torch.tensor(0.01 / (i + 1)), 1e-5)
        torch.testing.assert_close(opt["params"], parameter.detach(), rtol=1e-5, atol=1e-7)


def one_minibatch(agent, steps=8):
    """A batch (1, steps, ...) that no policy has played, its states and all its indices."""
    batch = {name: torch.randn(1, steps) for name in ("logprobs", "values", "returns", "advantages")}
    batch["returns"] *= 100
    batch |= {"obs": torch.randn(1, steps, 3), "actions": torch.randn(1, steps, 2)}
    batch["starts"] = torch.zeros(1, steps)
    return batch, torch.zeros(steps, 0), torch.arange(steps)


@pytest.mark.parametrize("max_grad_norm, clipped", [(0.5, True), (1e9, False), (0.0, False)])
def test_train_step_is_backward_clip_grad_norm_and_adam(max_grad_norm, clipped):
    agent = make_agent(max_grad_norm=max_grad_norm, ent_coef=0.1)
    opt, (batch, state, index) = ppo.flatten_parameters(agent), one_minibatch(agent)
    hyper, metrics = torch.tensor([0.01, 0.2, 0.1, 0.5]), torch.zeros(len(ppo.METRICS))
    _, logprob, entropy, value, _ = agent(batch["obs"], state, batch["starts"], None, batch["actions"])
    loss, _ = ppo.ppo_loss(logprob, entropy, value, batch, hyper, agent.value_std, agent.args)
    loss.backward()
    copies = [nn.Parameter(p.detach().clone()) for p in agent.parameters()]
    for copy, parameter in zip(copies, agent.parameters(), strict=True):
        copy.grad = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_(copies, max_grad_norm or float("inf"))
    assert (0 < max_grad_norm < norm) == clipped
    torch.optim.Adam(copies, lr=0.01, eps=1e-5).step()
    with torch.no_grad():
        ppo.train_step(agent, opt, batch, state, index, hyper, metrics)
    torch.testing.assert_close(metrics[-1], norm)
    expected = nn.utils.parameters_to_vector(copies).detach()
    torch.testing.assert_close(opt["params"], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(nn.utils.parameters_to_vector(agent.parameters()), opt["params"])


# ------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("clip_vloss", [False, True])
@pytest.mark.parametrize("norm_adv_scope", ["minibatch", "batch"])
def test_ppo_loss_is_the_sum_over_steps_written_out(clip_vloss, norm_adv_scope):
    args = small_args("unused", clip_vloss=clip_vloss, norm_adv_scope=norm_adv_scope)
    rng, value_std = np.random.default_rng(0), 3.0
    newlogprob, entropy, newvalue, oldlogprob, oldvalue, returns, adv = rng.normal(size=(7, 2, 10)) * 0.5
    used = (adv - adv.mean()) / (adv.std(ddof=1) + 1e-8) if norm_adv_scope == "minibatch" else adv
    policy, value, outside = [], [], []
    for i in np.ndindex(2, 10):
        ratio = np.exp(newlogprob[i] - oldlogprob[i])
        policy.append(-min(ratio * used[i], np.clip(ratio, 0.8, 1.2) * used[i]))
        errors = [((newvalue[i] - returns[i]) / value_std) ** 2]
        if clip_vloss:
            moved = oldvalue[i] + np.clip(newvalue[i] - oldvalue[i], -0.2 * value_std, 0.2 * value_std)
            errors.append(((moved - returns[i]) / value_std) ** 2)
        value.append(0.5 * max(errors))
        outside.append(not 0.8 <= ratio <= 1.2)
    expected = np.mean(policy) - 0.01 * np.mean(entropy) + 0.7 * np.mean(value)
    mb = {"logprobs": oldlogprob, "values": oldvalue, "returns": returns, "advantages": adv}
    mb = {name: torch.tensor(x) for name, x in mb.items()}
    loss, metrics = ppo.ppo_loss(torch.tensor(newlogprob), torch.tensor(entropy), torch.tensor(newvalue), mb,
                                 torch.tensor([0, 0.2, 0.01, 0.7]).double(), torch.tensor(value_std), args)
    logratio = newlogprob - oldlogprob
    kl = [-logratio.mean(), (np.exp(logratio) - 1 - logratio).mean()]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    means = [np.mean(x) for x in (policy, value, entropy)]
    np.testing.assert_allclose(metrics, [*means, *kl, np.mean(outside)], rtol=1e-6)


def test_entropy_lowers_the_loss():
    zeros = torch.zeros(1, 4)
    mb = dict.fromkeys(("logprobs", "values", "returns", "advantages"), zeros)
    loss, _ = ppo.ppo_loss(zeros, zeros + 3, zeros, mb, torch.tensor([0, 0.2, 0.1, 0.5]), torch.tensor(1.0),
                           small_args("unused"))
    assert loss.item() == pytest.approx(-0.3)


# -------------------------------------------------------------------------------------------------- densities


def act(agent, obs, action=None, mask=None, noise=0.0):
    """Action, log-probability and entropy of a feed-forward agent for observations (M, O)."""
    m = len(obs)
    with torch.no_grad():
        result = agent(obs[None], torch.zeros(m, 0), torch.zeros(1, m), mask, action, noise)
    return [x[0] for x in result[:3]]


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_normal_policy_is_pytorchs_normal(state_dependent_std):
    agent = make_agent(state_dependent_std=state_dependent_std, log_std_init=-1.0)
    obs, action = torch.randn(6, 3), torch.randn(1, 6, 2)
    output = agent.actor(obs).detach()
    mean, std = output[:, :2], (output[:, 2:] - 1 if state_dependent_std else torch.full((6, 2), -1.0)).exp()
    normal = torch.distributions.Normal(mean, std)
    _, logprob, entropy = act(agent, obs, action)
    torch.testing.assert_close(logprob, normal.log_prob(action[0]).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    noise = torch.randn(6, 2)
    torch.testing.assert_close(act(agent, obs, noise=noise)[0], mean + std * noise)
    torch.testing.assert_close(act(agent, obs)[0], mean)


@pytest.mark.parametrize("log_std", [-2.0, -1.0, 0.0])
def test_tanh_normal_density_integrates_to_one_over_the_bounds(log_std):
    agent = make_agent(Box(-1, 1, (1,)), action_dist="tanh-normal", log_std_init=log_std)
    squashed = torch.linspace(-1, 1, 200_002, dtype=torch.float64)[1:-1]
    obs = torch.ones(len(squashed), 3)
    _, logprob, _ = act(agent, obs, squashed.atanh().float().view(1, -1, 1))
    assert torch.trapezoid(logprob.double().exp(), squashed).item() == pytest.approx(1, abs=1e-3)


def test_tanh_normal_entropy_is_on_average_minus_the_mean_log_density():
    agent = make_agent(Box(-1, 1, (1,)), action_dist="tanh-normal", log_std_init=0.0)
    obs = torch.ones(200_000, 3)
    _, logprob, entropy = act(agent, obs, noise=torch.randn(200_000, 1))
    assert entropy.mean().item() == pytest.approx(-logprob.mean().item(), abs=0.02)
    assert entropy.mean() < np.log(2)  # that of the uniform density


def test_log_tanh_slope_is_exact_where_tanh_saturates():
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    torch.testing.assert_close(ppo.log_tanh_slope(x), (1 - x.tanh() ** 2).log())
    far = torch.tensor([-1000.0, -50.0, 50.0, 1000.0])
    torch.testing.assert_close(ppo.log_tanh_slope(far), 2 * np.log(2) - 2 * far.abs())


CHOICES = {"Discrete": (Discrete(4), [4]), "Discrete with start": (Discrete(4, start=3), [4]),
           "MultiDiscrete": (MultiDiscrete([2, 3]), [2, 3]), "MultiBinary": (MultiBinary(3), [2, 2, 2])}


def wide_logits(agent):
    """Give the policy's head weights that make the choices unequal."""
    nn.init.normal_(agent.actor[-1].weight)
    return agent


@pytest.mark.parametrize("space, nvec", CHOICES.values(), ids=CHOICES)
def test_choices_have_pytorchs_log_probability_and_entropy(space, nvec):
    agent, obs = wide_logits(make_agent(space)), torch.randn(50, 3)
    logits = agent.actor(obs).detach()
    parts = [torch.distributions.Categorical(logits=part) for part in logits.split(nvec, -1)]
    action = torch.stack([part.sample() for part in parts], -1)
    _, logprob, entropy = act(agent, obs, action[None])
    torch.testing.assert_close(logprob, sum(p.log_prob(a) for p, a in zip(parts, action.T, strict=True)))
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    assert torch.equal(act(agent, obs)[0], torch.stack([part.probs.argmax(-1) for part in parts], -1))
    if isinstance(space, MultiBinary):  # the same as a Bernoulli for each bit
        ones = torch.distributions.Bernoulli(logits=logits[:, 1::2] - logits[:, ::2])
        torch.testing.assert_close(logprob, ones.log_prob(action.float()).sum(-1))
        torch.testing.assert_close(entropy, ones.entropy().sum(-1))


def test_forbidden_choices_have_probability_zero_and_are_never_sampled():
    agent, count = wide_logits(make_agent(MultiDiscrete([4, 2]))), 20_000
    obs, mask = torch.randn(1, 3).expand(count, 3), torch.tensor([True, False, False, True, False, True])
    masks = mask.expand(1, count, 6)
    action, _, entropy = act(agent, obs, mask=masks, noise=agent.draw_noise(1, count))
    assert set(action[:, 0].tolist()) == {0, 3} and set(action[:, 1].tolist()) == {1}
    every = torch.cartesian_prod(torch.arange(4), torch.arange(2))
    probability = act(agent, obs[:8], every[None], masks[:, :8])[1].exp()
    allowed = mask[every[:, 0]] & mask[4 + every[:, 1]]
    assert probability[~allowed].eq(0).all() and probability.sum().item() == pytest.approx(1)
    p = probability[allowed]
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())


def test_a_mask_gives_no_gradient_to_forbidden_choices():
    logits, agent = torch.randn(1, 1, 4, requires_grad=True), make_agent(Discrete(4))
    mask = torch.tensor([[[True, False, True, False]]])
    _, logprob, entropy = agent.categorical(logits, mask, torch.zeros(1, 1, 1, dtype=torch.long), 0.0)
    (logprob + entropy).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[~mask].eq(0).all() and logits.grad[mask].ne(0).all()


def test_gumbel_noise_samples_the_softmax():
    agent, count = wide_logits(make_agent(Discrete(4))), 100_000
    obs = torch.randn(1, 3)
    action, _, _ = act(agent, obs.expand(count, 3), noise=agent.draw_noise(1, count))
    frequencies = torch.bincount(action[:, 0], minlength=4) / count
    torch.testing.assert_close(frequencies, agent.actor(obs)[0].softmax(-1).detach(), atol=0.01, rtol=0)


def test_normal_noise_is_standard_normal():
    noise = make_agent().draw_noise(50_000, 1, 1)
    assert noise.shape == (50_000, 1, 1, 2)
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02


# ---------------------------------------------------------------------------------- sequences, actions, seeds


@pytest.mark.parametrize("length", [1, 3, 6])
def test_sequences_are_stretches_of_time_of_one_environment(length):
    t, n = torch.meshgrid(torch.arange(6), torch.arange(4), indexing="ij")
    sequences = ppo.to_sequences(torch.stack([t, n], -1), length)
    assert sequences.shape == (length, 24 // length, 2)
    assert (sequences[..., 1] == sequences[0, :, 1]).all()
    assert (sequences[:, :, 0] == sequences[0, :, 0] + torch.arange(length).unsqueeze(-1)).all()
    starts = ppo.to_sequences(torch.stack([t, n], -1), length)[0]
    assert torch.equal(starts, torch.stack([t, n], -1)[::length].flatten(0, 1))  # as states are stored
    back = sequences.unflatten(1, (-1, 4)).transpose(0, 1).flatten(0, 1)
    assert torch.equal(back, torch.stack([t, n], -1))


def to_env(space, action, **flags):
    return ppo.action_map(space, small_args("unused", **flags))(torch.tensor(action))


TWO_BOUNDS = Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))


@pytest.mark.parametrize("flags, expected", [
    ({}, [[-2, 7.5], [2, 10]]),
    ({"clip_actions": False}, [[-2, 7.5], [6, 10]]),
    ({"scale_actions": False}, [[-1, 0.5], [2, 1]]),
    ({"scale_actions": False, "clip_actions": False}, [[-1, 0.5], [3, 1]]),
    ({"action_dist": "tanh-normal"}, np.tanh([[-1, 0.5], [3, 1]]) * [2, 5] + [0, 5]),
])
def test_actions_are_scaled_and_clipped_to_the_bounds(flags, expected):
    action = to_env(TWO_BOUNDS, [[-1.0, 0.5], [3.0, 1.0]], **flags)
    np.testing.assert_allclose(action, expected, rtol=1e-6)
    assert action.dtype == np.float32


def test_unbounded_components_pass_unchanged():
    space = Box(np.array([-np.inf, 0, -4], np.float32), np.array([np.inf, np.inf, 4], np.float32))
    assert to_env(space, [[-30.0, -3.0, 0.5], [30.0, 3.0, -2.0]]).tolist() == [[-30, 0, 2], [30, 3, -4]]


def test_bounds_of_the_largest_floats_do_not_overflow():
    largest = np.finfo(np.float32).max
    assert np.isfinite(to_env(Box(-largest, largest, (1,)), [[0.0], [0.5]])).all()


SPACES = [Box(-1, 1, (2, 3)), Discrete(3), Discrete(3, start=5), Discrete(3, dtype=np.int32), MultiBinary(3),
          MultiBinary((2, 2)), MultiDiscrete([3, 3], start=[5, -2]), MultiDiscrete([[3, 3], [3, 3]])]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_are_members_of_their_space_with_its_dtype(space):
    agent = make_agent(space)
    action, _, _ = act(agent, torch.randn(20, 3), noise=agent.draw_noise(1, 20))
    for item in agent.to_env(action):
        assert space.contains(item) and np.asarray(item).dtype == space.dtype


def test_start_is_added_to_choices():
    assert to_env(Discrete(3, start=5), [[0], [2]]).tolist() == [5, 7]
    assert to_env(MultiDiscrete([3, 4], start=[5, -2]), [[0, 0], [2, 3]]).tolist() == [[5, -2], [7, 1]]


def test_tanh_normal_needs_bounds():
    with pytest.raises(ppo.UsageError, match="bounded"):
        ppo.action_map(Box(-np.inf, np.inf, (1,)), small_args("unused", action_dist="tanh-normal"))


def test_seeds_of_different_runs_ranks_and_iterations_share_nothing():
    keys = [(seed, rank, iteration) for seed in range(5) for rank in range(4) for iteration in range(20)]
    keys += [(seed, ppo.EVALUATION) for seed in range(5)]
    seeds = [seed for key in keys for seed in ppo.derive_seeds(*key, n=17)]
    assert len(set(seeds)) == len(seeds)
    assert ppo.derive_seeds(1, 2, 3, n=5) == ppo.derive_seeds(1, 2, 3, n=5)
