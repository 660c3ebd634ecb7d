"""The mathematics against brute force, closed forms, NumPy and PyTorch's own."""

import copy
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes  # noqa: F401
import pytest
import torch
from conftest import coefs_of, small_agent, small_args, watched_run
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn

import ppo_continuous as ppo

BOX = Box(-1, 1, (2,))


def make_agent(space=BOX, obs_dim=3, with_opt=False, **flags):
    envs = SimpleNamespace(single_action_space=space, single_observation_space=Box(-1, 1, (obs_dim,)))
    agent, opt = ppo.make_agent(envs, small_args("unused", **flags), torch.device("cpu"), None)
    return (agent, opt) if with_opt else agent


# -------------------------------------------------------------------------------------------------------- GAE


def random_rollout(steps=12, envs=5, seed=0):
    """Rewards, values, the value after the rollout, final values and dones, with all four endings, also in
    the last step."""
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    terminated[-1, :3], truncated[-1, :3] = [True, False, True], [False, True, True]
    rewards, values, final_values = rng.normal(size=(3, steps, envs))
    final_values[terminated] = 0
    arrays = rewards, values, rng.normal(size=(1, envs)), final_values, terminated | truncated
    return [torch.tensor(x, dtype=torch.float64) for x in arrays]


def next_value(t, n, values, last_value, final_values, dones):
    """Of the state that the action of step t led to."""
    if dones[t, n]:
        return final_values[t, n]
    return values[t + 1, n] if t + 1 < len(values) else last_value[0, n]


def brute_force_advantages(rewards, values, last_value, final_values, dones, gamma, gae_lambda):
    """The sum over all later steps of the episode, for each step anew."""
    result = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                future = gamma * next_value(k, n, values, last_value, final_values, dones)
                result[t, n] += (gamma * gae_lambda) ** (k - t) * (rewards[k, n] + future - values[k, n])
                if dones[k, n]:
                    break
    return result


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.5, 0.3), (1, 1), (0.9, 0), (0, 0.9)])
def test_gae_is_the_double_sum(gamma, gae_lambda):
    for seed in range(3):
        rollout = random_rollout(seed=seed)
        expected = brute_force_advantages(*rollout, gamma, gae_lambda)
        torch.testing.assert_close(ppo.compute_gae(*rollout, gamma, gae_lambda), expected)


@pytest.mark.parametrize("ends", [True, False])
def test_rewards_1_2_3_with_gamma_a_tenth_return_1_23(ends):
    rewards, zeros = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)
    dones = torch.tensor([[0.0], [0.0], [float(ends)]])
    last_value = torch.full((1, 1), 100.0 * ends)  # of another episode, or 0
    returns = ppo.compute_gae(rewards, zeros, last_value, zeros, dones, gamma=0.1, gae_lambda=1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.23], [2.3], [3.0]]))


def test_lambda_1_gives_n_step_returns():
    rewards, values, last_value, final_values, dones = random_rollout()
    advantages = ppo.compute_gae(rewards, values, last_value, final_values, dones, 0.9, 1.0)
    goal = last_value[0]
    for t in reversed(range(len(rewards))):
        goal = rewards[t] + 0.9 * torch.where(dones[t] > 0, final_values[t], goal)
        torch.testing.assert_close(advantages[t] + values[t], goal)


def test_lambda_0_gives_one_step_advantages():
    rewards, values, *rest = random_rollout()
    after = [[next_value(t, n, values, *rest) for n in range(5)] for t in range(12)]
    expected = rewards + 0.9 * torch.tensor(after).double() - values
    torch.testing.assert_close(ppo.compute_gae(rewards, values, *rest, 0.9, 0.0), expected)


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


def split_limits(last, time_limits):
    """(t, n, observation, RNN state) of each time limit: the last of what a rollout bootstraps from."""
    obs, state, starts = last
    first = obs.shape[1] - len(time_limits)
    assert starts[:, first:].eq(0).all()
    return [(t, n, obs[:, [first + k]], state[:, [first + k]]) for k, (t, n) in enumerate(time_limits)]


def collect_line(truncate, **flags):
    """A rollout of an episode and two steps of the next, by an agent whose value is its observation."""
    args = small_args("unused", num_envs=2, num_steps=5, num_minibatches=1, norm_obs=False, **flags)
    envs = ppo.VectorEnv([lambda: Line(truncate)] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    agent = ppo.Agent(envs, args, torch.device("cpu"))
    agent.critic = nn.Identity()
    env_state = ppo.reset_envs(envs, agent, 0)
    data, last, time_limits, episodes = ppo.rollout(envs, agent, agent.act, env_state)
    assert episodes == [(0, 3.0, 3), (1, 3.0, 3)]  # environment, return, length
    assert env_state.obs.tolist() == [[3], [3]] and env_state.starts.tolist() == [[0, 0]]
    for n in range(2):
        assert data["dones"][:, n].tolist() == [0, 0, 1, 0, 0]
        assert data["starts"][:, n].tolist() == [1, 0, 0, 1, 0]
    return agent, data, split_limits(last, time_limits)


def test_a_time_limit_keeps_the_final_observation():
    agent, data, time_limits = collect_line(truncate=True)
    assert data["values"].T.tolist() == [[1, 2, 3, 1, 2]] * 2
    starts = torch.zeros(1, 1)
    values = [(t, n, agent.get_value(obs, state, starts).item()) for t, n, obs, state in time_limits]
    assert values == [(2, 0, 4), (2, 1, 4)]


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_the_value_at_a_time_limit_remembers_the_episode(rnn):
    agent, data, time_limits = collect_line(truncate=True, rnn=rnn, rnn_hidden=1)  # the value is the layer's
    with torch.no_grad():
        first, second, third, final = agent.rnn(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))[0].unbind()
        for n in range(2):
            values = torch.cat([first, second, third, first, second])
            torch.testing.assert_close(data["values"][:, n], values)
            _, _, obs, state = time_limits[n]
            torch.testing.assert_close(agent.get_value(obs, state, torch.zeros(1, 1))[0], final)


@pytest.mark.parametrize("truncate, flags", [(False, {}), (True, {"truncation_bootstrap": False})])
def test_nothing_counts_after_a_termination_or_after_a_truncation_without_bootstrap(truncate, flags):
    _, data, time_limits = collect_line(truncate, **flags)
    assert time_limits == []
    final_values = torch.zeros(5, 2)
    advantages = ppo.compute_gae(data["rewards"], data["values"], torch.full((1, 2), 3.0), final_values,
                                 data["dones"], 0.5, 0)
    # 1 + 0.5 * (2, 3, nothing, 2, 3) - (1, 2, 3, 1, 2)
    assert advantages[:, 0].tolist() == [1, 0.5, -2, 1, 0.5]


@pytest.mark.parametrize("rnn", ["none", "gru", "lstm"])
@pytest.mark.parametrize("recompute_adv", [True, False])
def test_every_epoch_values_what_the_actions_led_to(tmp_path, monkeypatch, rnn, recompute_adv):
    """In training: final values where a time limit cut, by the critic as it is in that epoch."""
    calls, agents, compute_gae = [], [], ppo.compute_gae

    def watched_gae(*args):
        calls.append((copy.deepcopy(agents[-1].state_dict()) if agents else {}, args))
        return compute_gae(*args)

    def on_step(agent, *_):
        agents.append(agent)

    monkeypatch.setattr(ppo, "compute_gae", watched_gae)

    run = watched_run(tmp_path / "run", "Forever-v0", on_step, rnn=rnn, recompute_adv=recompute_adv,
                      target_kl=None, learning_rate=1e-2, anneal_lr=False)
    assert len(calls) == (4 if recompute_adv else 2)
    (data, last, time_limits, _), used = run.rollouts[-1], calls[2:] if recompute_adv else calls[1:]
    time_limits = split_limits(last, time_limits)
    assert len(time_limits) == 12 and data["dones"].sum() == 12  # every fifth step of 16, in 4 environments
    for weights, (rewards, values, last_value, final_values, dones, gamma, gae_lambda) in used:
        run.agent.load_state_dict(weights)
        expected = torch.zeros(16, 4)
        with torch.no_grad():
            for t, n, obs, state in time_limits:
                expected[t, n] = run.agent.get_value(obs, state, torch.zeros(1, 1))
            recomputed = run.agent.get_value(data["obs"], data["rnn_states"][0], data["starts"])
        torch.testing.assert_close(final_values, expected)
        torch.testing.assert_close(values, recomputed)
        assert torch.equal(rewards, data["rewards"]) and torch.equal(dones, data["dones"])
        assert last_value.shape == (1, 4) and (gamma, gae_lambda) == (0.99, 0.95)


# ---------------------------------------------------------------------------------- statistics, normalization


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_statistics_are_those_of_all_data(offset):
    rng, statistics = np.random.default_rng(0), ppo.RunningMeanStd(3)
    batches = [offset + rng.normal(i, 1 + i, size=(size, 2, 3)) for i, size in enumerate((1, 50, 7, 300))]
    for batch in batches:
        statistics.update(torch.from_numpy(batch))
    data = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(statistics.mean, data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(statistics.var, data.var(0), rtol=1e-8)
    np.testing.assert_allclose(statistics.std(), np.sqrt(data.var(0) + 1e-8), rtol=1e-8)
    assert statistics.count == len(data)


def test_running_statistics_stay_float64_when_the_agent_is_moved():
    agent = make_agent().to(torch.float32)
    assert agent.obs_rms.mean.dtype == agent.value_rms.var.dtype == torch.float64


def test_observations_are_normalized_and_clipped():
    agent = make_agent(obs_dim=2, clip_obs=1.5)
    agent.obs_rms.mean[:], agent.obs_rms.var[:] = torch.tensor([1.0, 5.0]), torch.tensor([4.0, 0.01])
    obs = torch.tensor([[3.0, 6.0]], dtype=torch.float64)
    torch.testing.assert_close(agent.normalize(obs), torch.tensor([[1.0, 1.5]]))
    agent.args.clip_obs = 0.0
    torch.testing.assert_close(agent.normalize(obs), torch.tensor([[1.0, 10.0]]), rtol=1e-5, atol=0)
    agent.args.norm_obs = False
    torch.testing.assert_close(agent.normalize(obs), torch.tensor([[3.0, 6.0]]))


@pytest.mark.parametrize("clip_reward", [1.0, 0.0])
def test_rewards_are_over_the_std_of_the_discounted_return(clip_reward):
    """That of all returns so far, the step's own included. In evaluation they are raw, and nothing counts."""
    flags = {"norm_reward": True, "clip_reward": clip_reward, "gamma": 0.9, "num_envs": 3, "num_steps": 20,
             "num_minibatches": 1}
    envs, agent, _, _ = small_agent("Masked-v0", **flags)  # episodes of three steps, rewards 0 to 1
    agent.reward_rms = ppo.RunningMeanStd()
    env_state, raw, step = ppo.reset_envs(envs, agent, 1), [], envs.step

    def noisy_step(action):
        obs, reward, *rest = step(action)
        raw.append(reward - 0.3)
        return obs, raw[-1], *rest

    envs.step = noisy_step
    current, seen, expected = np.zeros(3), [], []
    for _ in range(3):
        data, *_ = ppo.rollout(envs, agent, agent.act, env_state)
        for t in range(20):
            current = 0.9 * current + raw[t]
            seen.extend(current)
            scaled = raw[t] / np.sqrt(np.var(seen) + 1e-8)
            expected.append(scaled.clip(-clip_reward, clip_reward) if clip_reward else scaled)
            current = current * (1 - data["dones"][t].numpy())
        np.testing.assert_allclose(data["rewards"], expected, rtol=1e-5)
        size = np.abs(expected)
        assert data["dones"].any() and (size < 1).any() and (size == 1 if clip_reward else size > 1).any()
        np.testing.assert_allclose(env_state.discounted_return, current, rtol=1e-4, atol=1e-5)
        raw.clear()
        expected.clear()
    agent.eval()
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state)
    np.testing.assert_allclose(data["rewards"], raw, rtol=1e-6)
    assert agent.reward_rms.count == 180


# ------------------------------------------------------------------------------------ loss and optimizer step


def random_batch(agent, L=1, sequences=8, scale=1.0):
    """A batch (L, S, ...) that no policy has played, its states (K, S, H) and a loss to add to."""
    batch = {name: torch.randn(L, sequences) for name in ("logprobs", "values", "returns", "advantages")}
    batch["returns"] *= scale
    batch["logprobs"] -= 3
    batch |= {"obs": torch.randn(L, sequences, 3), "actions": torch.randn(L, sequences, 2)}
    batch |= {"starts": torch.zeros(L, sequences), "mask": torch.ones(L, sequences, 0, dtype=torch.bool)}
    states = torch.zeros(agent.num_states, sequences, agent.args.rnn_hidden)
    return batch, states, torch.zeros(len(ppo.LOSSES))


def written_out_loss(agent, batch, states, coefs):
    """The loss, step by step in float64, and the numbers that are logged."""
    args, value_std = agent.args, agent.value_std.item()
    _, newlogprob, entropy, newvalue, _ = agent(batch["obs"], states, batch["starts"], batch["mask"],
                                                batch["actions"])
    _, clip_coef, ent_coef, vf_coef = coefs.tolist()
    newlogprob, entropy, newvalue = newlogprob.double(), entropy.double(), newvalue.double()
    advantages = batch["advantages"].double()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy, value, outside, k1, k3 = [], [], [], [], []
    for i in np.ndindex(*newvalue.shape):
        logratio = newlogprob[i] - batch["logprobs"][i]
        ratio = torch.exp(logratio)
        clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        policy.append(-torch.min(ratio * advantages[i], clipped * advantages[i]))
        errors = [((newvalue[i] - batch["returns"][i]) / value_std) ** 2]
        if args.clip_vloss:
            change = (newvalue[i] - batch["values"][i]).clamp(-clip_coef * value_std, clip_coef * value_std)
            errors.append(((batch["values"][i] + change - batch["returns"][i]) / value_std) ** 2)
        value.append(0.5 * max(errors))
        outside.append(float(not 1 - clip_coef <= ratio <= 1 + clip_coef))
        k1.append(-logratio)
        k3.append(ratio - 1 - logratio)
    means = [sum(x) / len(x) for x in (policy, value, entropy.flatten(), k1, k3, outside)]
    loss = means[0] - ent_coef * means[2] + vf_coef * means[1]
    return loss, [torch.as_tensor(x).item() for x in means]


@pytest.mark.parametrize("flags", [
    {}, {"norm_adv": False}, {"clip_vloss": True}, {"learn_std": True}, {"share_network": True},
    {"max_grad_norm": 1e9}, {"max_grad_norm": 0.0}, {"rnn": "gru"}, {"rnn": "lstm"}], ids=str)
def test_train_step_is_the_written_out_loss_and_pytorchs_clipping_and_adam(flags):
    agent, opt = make_agent(with_opt=True, **flags)
    agent.value_std.fill_(3.0)
    reference, previous = copy.deepcopy(agent), opt["params"].clone()
    adam, norms = torch.optim.Adam(reference.parameters(), eps=agent.args.adam_eps), []
    for i in range(6):
        L = 4 if "rnn" in flags else 1
        batch, states, losses = random_batch(agent, L=L, scale=10.0 ** (i % 3))
        coefs = coefs_of(agent.args, learning_rate=0.01 / (i + 1), ent_coef=0.1)
        with torch.no_grad():
            ppo.train_step(agent, opt, batch, states, torch.arange(8), coefs, losses)
        loss, debug = written_out_loss(reference, batch, states, coefs)
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), agent.args.max_grad_norm or float("inf"))
        adam.param_groups[0]["lr"] = 0.01 / (i + 1)
        adam.step()
        norms.append(norm.item())
        np.testing.assert_allclose(losses, [*debug, norm.item()], rtol=2e-3, atol=1e-4)
        expected = nn.utils.parameters_to_vector(reference.parameters()).detach()
        torch.testing.assert_close(opt["params"], expected, rtol=1e-3, atol=2e-5)
        assert torch.equal(nn.utils.parameters_to_vector(agent.parameters()), opt["params"])  # views of it
        assert not torch.equal(opt["params"], previous)
        previous = opt["params"].clone()
    assert (0 < agent.args.max_grad_norm < max(norms)) == (agent.args.max_grad_norm == 0.5)


def test_train_step_learns_from_its_index_only_and_adds_to_the_losses():
    params, sums = [], []
    for fill in (0.0, 7.0):
        torch.manual_seed(0)
        agent, opt = make_agent(with_opt=True)
        batch, states, losses = random_batch(agent)
        for name in ("returns", "advantages"):
            batch[name][:, 4:] = fill
        with torch.no_grad():
            for _ in range(2):
                ppo.train_step(agent, opt, batch, states, torch.arange(4), coefs_of(agent.args), losses)
                sums.append(losses.clone())
        params.append(opt["params"])
    assert torch.equal(*params) and (sums[1] != sums[0]).all()


def test_entropy_lowers_the_loss():
    """With no advantage and no value error, the std grows as far as the entropy bonus says."""
    agent, opt = make_agent(with_opt=True, learn_std=True, norm_adv=False)
    batch, states, losses = random_batch(agent)
    batch["advantages"] *= 0
    before = agent.log_std.detach().clone()
    coefs = coefs_of(agent.args, vf_coef=0, ent_coef=1)
    with torch.no_grad():
        ppo.train_step(agent, opt, batch, states, torch.arange(8), coefs, losses)
    assert (agent.log_std > before).all()


# -------------------------------------------------------------------------------------------------- densities


def act(agent, obs, action=None, mask=None, noise=0.0):
    """Action, log-probability and entropy of a feed-forward agent for observations (M, O)."""
    m = len(obs)
    if mask is None:
        mask = torch.ones(1, m, sum(agent.num_choices), dtype=torch.bool)
    with torch.no_grad():
        state, starts = torch.zeros(0, m, agent.args.rnn_hidden), torch.zeros(1, m)
        result = agent(obs[None], state, starts, mask, action, noise)
    return [x[0] for x in result[:3]]


def gumbel(*shape):
    return -torch.empty(shape).exponential_().log()


@pytest.mark.parametrize("log_std", [-1.0, 0.5, 4.0, -9.0])
def test_normal_policy_is_pytorchs_normal(log_std):
    agent = make_agent(log_std_init=log_std)
    obs, action = torch.randn(6, 3), torch.randn(1, 6, 2)
    mean, std = agent.actor(obs).detach(), torch.full((6, 2), min(max(log_std, -5), 2)).exp()
    normal = torch.distributions.Normal(mean, std)
    _, logprob, entropy = act(agent, obs, action)
    torch.testing.assert_close(logprob, normal.log_prob(action[0]).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    noise = torch.randn(6, 2)
    torch.testing.assert_close(act(agent, obs, noise=noise)[0], mean + std * noise)
    torch.testing.assert_close(act(agent, obs)[0], mean)


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
    action, _, entropy = act(agent, obs, mask=masks, noise=gumbel(1, count, 6))
    assert set(action[:, 0].tolist()) == {0, 3} and set(action[:, 1].tolist()) == {1}
    every = torch.cartesian_prod(torch.arange(4), torch.arange(2))
    probability = act(agent, obs[:8], every[None], masks[:, :8])[1].exp()
    allowed = mask[every[:, 0]] & mask[4 + every[:, 1]]
    assert probability[~allowed].eq(0).all() and probability.sum().item() == pytest.approx(1)
    p = probability[allowed]
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum())


def test_a_mask_gives_no_gradient_to_forbidden_choices():
    agent, mask = make_agent(Discrete(4)), torch.tensor([[[True, False, True, False]]])
    nn.init.normal_(agent.actor[-1].bias)
    action, state, starts = torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(0, 1, 16), torch.zeros(1, 1)
    _, logprob, entropy, _, _ = agent(torch.randn(1, 1, 3), state, starts, mask, action)
    (logprob + entropy).sum().backward()
    grad = agent.actor[-1].bias.grad  # that of the logits
    assert grad.isfinite().all() and grad[~mask[0, 0]].eq(0).all() and grad[mask[0, 0]].ne(0).all()


def test_a_rollout_samples_the_softmax():
    envs, agent, _, env_state = small_agent("MultiDiscrete-v0", num_steps=2000)
    nn.init.normal_(agent.actor[-1].bias)
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state)
    logits = agent.actor(data["obs"][0, 0]).detach()
    for choice, part in enumerate(logits.split([3, 4])):
        frequencies = torch.bincount(data["actions"][..., choice].flatten(), minlength=len(part)) / 8000
        torch.testing.assert_close(frequencies, part.softmax(-1), atol=0.03, rtol=0)
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state, 0.0)
    assert (data["actions"] == torch.stack([part.argmax() for part in logits.split([3, 4])])).all()


def test_a_rollout_samples_the_normal():
    envs, agent, _, env_state = small_agent("Bandit-v0", num_steps=2000)
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state)
    mean = agent.actor(data["obs"][0, 0]).detach()
    noise = ((data["actions"] - mean) / np.exp(-1)).flatten()
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    assert (noise.abs() < 1).float().mean().item() == pytest.approx(0.683, abs=0.03)
    assert abs((noise[1:] * noise[:-1]).mean()) < 0.05
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state, 0.0)
    torch.testing.assert_close(data["actions"], mean.expand(2000, 4, 1))


# --------------------------------------------------------------------------------------------- actions, seeds


def to_env(space, action, **flags):
    return ppo.read_action_space(space, small_args("unused", **flags))[1](torch.tensor(action))


TWO_BOUNDS = Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))


@pytest.mark.parametrize("flags, expected", [
    ({}, [[-2, 7.5], [2, 10]]),
    ({"clip_actions": False}, [[-2, 7.5], [6, 10]]),
    ({"scale_actions": False}, [[-1, 0.5], [2, 1]]),
    ({"scale_actions": False, "clip_actions": False}, [[-1, 0.5], [3, 1]]),
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
    action, _, _ = act(agent, torch.randn(20, 3), noise=torch.randn(1, 20, agent.num_outputs))
    for item in agent.to_env(action):
        assert space.contains(item) and np.asarray(item).dtype == space.dtype


def test_start_is_added_to_choices():
    assert to_env(Discrete(3, start=5), [[0], [2]]).tolist() == [5, 7]
    assert to_env(MultiDiscrete([3, 4], start=[5, -2]), [[0, 0], [2, 3]]).tolist() == [[5, -2], [7, 1]]


def test_seeds_of_different_runs_ranks_and_iterations_share_nothing():
    seeds, numbers = [], []
    agent = make_agent()
    envs = SimpleNamespace(num_envs=16, reset=lambda seed: (seeds.append(seed) or np.zeros((16, 3)), {}))
    keys = [(seed, rank, iteration) for seed in range(5) for rank in range(4) for iteration in range(20)]
    keys += [(seed, 2**31) for seed in range(5)]  # of evaluations
    for key in keys:
        ppo.reset_envs(envs, agent, *key)
        numbers.append(torch.randint(2**62, ()).item())
    flat = [seed for row in seeds for seed in row]
    assert len(set(flat)) == len(flat) == 16 * len(keys) and len(set(numbers)) == len(keys)
    ppo.reset_envs(envs, agent, *keys[7])
    assert seeds[-1] == seeds[7] and torch.randint(2**62, ()).item() == numbers[7]
