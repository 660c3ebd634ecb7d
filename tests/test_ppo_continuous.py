"""ppo_continuous: mathematics against brute force, invariants of training, probes."""

import copy
from contextlib import ExitStack
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import ppo_loss
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn
from torch.distributions import Categorical, Normal

import muesli_cartpole as muesli
import ppo_continuous as ppo


class Drift(probes.Probe):
    """Pushes a point to 0.5, with noise and both kinds of endings; rewards in a unit of choice."""

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Box(-2, 2, (1,))
    rewards = ()  # a list gets all rewards

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def observe(self):
        self.noise = self.np_random.normal()
        return np.array([self.x, self.noise, self.t], np.float32)

    def info(self):
        return {"speed": abs(self.x), "other": 0}

    def reset(self, **kwargs):
        self.x = 0.0
        return super().reset(**kwargs)

    def step(self, action):
        self.x += 0.1 * float(action[0]) + 0.1 * self.noise
        reward = self.scale * (0.1 * self.noise - (self.x - 0.5) ** 2)
        if isinstance(self.rewards, list):
            self.rewards.append(reward)
        self.t += 1
        return self.observe(), reward, bool(self.np_random.random() < 0.03), False, self.info()


gym.register("Drift-v0", Drift, max_episode_steps=10)
SMALL = {
    "env_id": "Drift-v0", "num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2,
    "total_timesteps": 128, "rnn_hidden": 16, "hidden": (16, 16), "eval_episodes": 2,
    "learning_rate": 1e-3, "target_kl": None, "compile": False,
}  # fmt: skip


def bare_agent(space=None, **flags):
    """Agent for three observations and two actions."""
    space = Box(-1, 1, (2,)) if space is None else space
    envs = SimpleNamespace(single_action_space=space, single_observation_space=Box(-1, 1, (3,)))
    return ppo.Agent(envs, ppo.Args(**SMALL | flags))


def weights(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def run(run_dir, checkpoint=None, script=ppo, on_update=None, on_gae=None, eval_too=False, **flags):
    """Train. Returns the agent and, of each call, updates, advantages and what was logged."""
    seen = SimpleNamespace(updates=[], gae=[], logged=[], rates=[], agent=None)
    Agent, compute_gae, gradients = script.Agent, script.compute_gae, script.compute_gradients

    def make_agent(*args):
        seen.agent = Agent(*args)
        return seen.agent

    def watched_gae(*args):
        if on_gae:
            on_gae(seen, *args)
        seen.gae.append([x.clone() if torch.is_tensor(x) else x for x in args])
        return compute_gae(*args)

    def watched_update(*args):
        if on_update:
            on_update(seen, *args)
        logged = gradients(*args)
        seen.updates.append(SimpleNamespace(args=args, logged=logged))
        return logged

    def write(log, progress, optimizer, means, sps):
        seen.logged.append(means)
        seen.rates.append([group["lr"] for group in optimizer.param_groups])

    with ExitStack() as stack:
        replaced = {"Agent": make_agent, "compute_gae": watched_gae}
        if not flags.get("compile"):
            replaced["compute_gradients"] = watched_update
        if not eval_too:
            replaced["evaluate"] = lambda *_: {"eval_mean": 0.0}
        for name, function in replaced.items():
            stack.enter_context(patch.object(script, name, function))
        stack.enter_context(patch.object(script.RunLog, "write", write))
        args = script.Args(**SMALL | {"run_dir": str(run_dir)} | flags)
        if args.rnn == "none":
            args.rnn_hidden = script.Args.rnn_hidden  # check refuses others without an RNN
        args.check()
        seen.summary = script.train(args, checkpoint)
    return seen


# ------------------------------------------------------------------------ advantages and statistics


def random_rollout(seed, steps=12, envs=5):
    """Rewards, values, dones, next value and done in float64, with ends also in the last step."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, steps, envs))
    dones = rng.random((steps + 1, envs)) < 0.25
    dones[-1, :2] = [True, False]
    arrays = rewards, values, dones[:-1], rng.normal(size=envs), dones[-1]
    return [torch.tensor(x, dtype=torch.float64) for x in arrays]


@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (0.5, 0.3), (1, 1), (0.9, 0), (0, 0.9)])
def test_gae_matches_double_sum(gamma, lam):
    for seed in range(3):
        rewards, values, dones, next_value, next_done = rollout = random_rollout(seed)
        next_values = torch.cat([values[1:], next_value[None]])
        ends = torch.cat([dones[1:], next_done[None]])
        expected = torch.zeros_like(rewards)
        for t, n in np.ndindex(*rewards.shape):
            for k in range(t, len(rewards)):
                bootstrap = 0 if ends[k, n] else gamma * next_values[k, n]
                expected[t, n] += (gamma * lam) ** (k - t) * (
                    rewards[k, n] + bootstrap - values[k, n]
                )
                if ends[k, n]:
                    break
        torch.testing.assert_close(ppo.compute_gae(*rollout, gamma, lam), expected)


@pytest.mark.parametrize("script", [ppo, muesli], ids=["ppo", "muesli"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_running_mean_std_is_that_of_all_data(script, offset):
    """Also after a module is moved, which leaves it in float64."""
    rng, rms = np.random.default_rng(0), script.RunningMeanStd(3)
    batches = [offset + rng.normal(i, 1 + i, (n, 2, 3)) for i, n in enumerate((1, 50, 7, 300))]
    for batch in batches:
        rms.update(torch.from_numpy(batch))
    data = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(rms.mean, data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rms.var, data.var(0), rtol=1e-8)
    floor = 1e-5 * data.mean(0)
    np.testing.assert_allclose(rms.std, np.sqrt(data.var(0) + floor**2), rtol=1e-8)
    assert rms.count == len(data)


@pytest.mark.parametrize("script", [ppo, muesli], ids=["ppo", "muesli"])
def test_constants_and_noise_are_not_blown_up(script):
    """Rounding errors of a constant, components of noise; and zeros stay zero."""
    rms, data = script.RunningMeanStd(2), torch.tensor([0.1, 0.0]).repeat(1000, 1)
    data[::2] += torch.tensor([1e-8, 0.0])
    rms.update(data[:333])
    rms.update(data[333:])
    assert ((data - rms.mean) / rms.std).abs().max() < 1e-2 and rms.std[1] == 1
    rms, data = script.RunningMeanStd(3), torch.randn(1000, 3).double() * torch.tensor([1, 1e-6, 5])
    rms.update(data)
    noise, one, five = (data / rms.std)[:, [1, 0, 2]].std(0)
    assert noise < 2e-3 and one == pytest.approx(1, rel=0.01) and five == pytest.approx(1, rel=0.01)
    bits = (torch.rand(1000) > 0.5).double()  # a signal, though beside amounts of 1e5
    rms = script.RunningMeanStd(3)
    rms.update(torch.stack([bits, 1e5 * torch.randn(1000), 1e5 * torch.randn(1000)], 1))
    torch.testing.assert_close(rms.std[0], bits.std(correction=0))


@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_running_scale_has_the_unit_of_the_data(unit):
    one, other, data = ppo.RunningMeanStd(), ppo.RunningMeanStd(), torch.randn(99).double() + 1
    assert one.scale == one.std == 1
    for x in data.split(33):
        one.update(x)
        other.update(unit * x)
    assert other.scale.item() == pytest.approx(unit * one.scale.item(), rel=1e-5)
    assert other.std.item() == pytest.approx(unit * one.std.item())
    zeros = ppo.RunningMeanStd()
    zeros.update(torch.zeros(5))
    assert zeros.scale == 1


# -------------------------------------------------------------------------- loss and optimizer step


def random_batch(agent, L):
    """A batch (L, 8, ...) that no policy has played, and its RNN states (K, 8, H)."""
    batch = {x: torch.randn(L, 8) for x in ("logprobs", "values", "returns", "advantages")}
    batch |= {"obs": torch.randn(L, 8, 3), "actions": torch.randn(L, 8, 2)}
    batch |= {"dones": (torch.rand(L, 8) < 0.2).float(), "masks": torch.ones(L, 8, 2, 1).bool()}
    batch["logprobs"] -= 3
    return batch, torch.randn(agent.num_states, 8, 16)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"clip_vloss": True},
        {"norm_adv": False, "max_grad_norm": 0.0},
        {"rnn": "gru"},
        {"rnn": "lstm"},
        {"share_network": True},
        {"learn_std": True},
    ],
    ids=str,
)
def test_gradients_and_step_are_those_of_the_written_out_loss(flags):
    agent = bare_agent(norm_value=False, ent_coef=0.1, **flags)
    expected, before = copy.deepcopy(agent), weights(agent)
    params = list(agent.parameters())
    adam, reference = (torch.optim.Adam(x.parameters(), 0.01) for x in (agent, expected))
    for _ in range(3):
        batch, states = random_batch(agent, 4 if "rnn" in flags else 1)
        index = torch.randperm(8)[:6]
        logged = ppo.compute_gradients(agent, params, batch, states, index, 0.2)
        adam.step()
        mb = {name: x[:, index] for name, x in batch.items()}
        flat = {name: x.flatten(0, 1) for name, x in mb.items()}
        inputs = flat["obs"], states[:, index], flat["dones"], flat["masks"], flat["actions"]
        loss, expected_logged = ppo_loss(agent.args, expected(*inputs), flat, 0.1, 0.2)
        reference.zero_grad()
        loss.backward()
        norm = agent.args.max_grad_norm or torch.inf
        expected_logged["grad_norm"] = nn.utils.clip_grad_norm_(expected.parameters(), norm)
        reference.step()
        assert set(logged) == set(expected_logged)
        for name, x in logged.items():
            assert x.item() == pytest.approx(expected_logged[name].item(), rel=1e-3, abs=1e-5), name
        torch.testing.assert_close(weights(agent), weights(expected), rtol=1e-3, atol=1e-4)
    assert (weights(agent) != before).float().mean() > 0.9


# ----------------------------------------------------------------------------- policies and actions


def distribution(agent, obs, mask=None):
    mask = torch.as_tensor(agent.choices).expand(len(obs), -1, -1) if mask is None else mask
    features, _ = agent.encode(obs, torch.zeros(0, len(obs), 16), torch.zeros(len(obs)))
    return agent.policy(features, mask)


@pytest.mark.parametrize("log_std, clamped", [(-1.0, -1.0), (2.5, 2.0), (-9.0, -5.0)])
@pytest.mark.parametrize("tanh_mean", [False, True])
def test_normal_policy_is_pytorchs(log_std, clamped, tanh_mean):
    agent, obs, action = bare_agent(tanh_mean=tanh_mean), torch.randn(6, 3), torch.randn(6, 2)
    agent.log_std.fill_(log_std)
    mean = agent.actor(agent.normalize(obs))
    expected = Normal(mean.tanh() if tanh_mean else mean, torch.full((6, 2), clamped).exp())
    policy = distribution(agent, obs)
    torch.testing.assert_close(policy.log_prob(action), expected.log_prob(action).sum(-1))
    torch.testing.assert_close(policy.entropy(), expected.entropy().sum(-1))
    torch.testing.assert_close(policy.mode, expected.mean)


@pytest.mark.parametrize(
    "space, num_choices",
    [(Discrete(4), [4]), (MultiDiscrete([2, 3]), [2, 3]), (MultiBinary(3), [2, 2, 2])],
    ids=str,
)
def test_choices_have_pytorchs_log_probability_and_entropy(space, num_choices):
    agent, obs = bare_agent(space), torch.randn(50, 3)
    nn.init.normal_(agent.actor[-1].weight)
    logits = agent.actor(agent.normalize(obs)).unflatten(-1, agent.choices.shape).unbind(1)
    parts = [Categorical(logits=x[:, :n]) for x, n in zip(logits, num_choices, strict=True)]
    action, policy = torch.stack([x.sample() for x in parts], -1), distribution(agent, obs)
    log_prob = sum(p.log_prob(a) for p, a in zip(parts, action.T, strict=True))
    torch.testing.assert_close(policy.log_prob(action), log_prob)
    torch.testing.assert_close(policy.entropy(), sum(x.entropy() for x in parts))
    assert torch.equal(policy.mode, torch.stack([x.probs.argmax(-1) for x in parts], -1))


def test_masked_choices_have_probability_zero_and_are_never_sampled():
    agent, count = bare_agent(MultiDiscrete([4, 2])), 10_000
    nn.init.normal_(agent.actor[-1].bias)
    given = np.array([1, 0, 0, 1, 0, 1], np.int8)
    infos = {"action_mask": given[None], "_action_mask": np.array([True])}
    mask, obs = agent.read_mask(infos, 1), torch.randn(1, 3).expand(count, 3)
    state, done = torch.zeros(0, count, 16), torch.zeros(count)
    action, *_ = agent.get_action_and_value(obs, state, done, mask.expand(count, -1, -1))
    assert set(action[:, 0].tolist()) == {0, 3} and set(action[:, 1].tolist()) == {1}
    every = torch.cartesian_prod(torch.arange(4), torch.arange(2))
    policy = distribution(agent, obs[:8], mask.expand(8, -1, -1))
    p, allowed = policy.log_prob(every).exp(), torch.tensor([0, 1, 0, 0, 0, 0, 0, 1]).bool()
    assert p[~allowed].eq(0).all() and p.sum().item() == pytest.approx(1)
    torch.testing.assert_close(policy.entropy()[0], -(p[allowed] * p[allowed].log()).sum())
    infos["action_mask"] = given[None, 1:]
    with pytest.raises(ppo.UsageError, match="6 entries"):
        agent.read_mask(infos, 1)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, [[-2, 7.5], [2, 10]]),
        ({"clip_actions": False}, [[-2, 7.5], [6, 10]]),
        ({"scale_actions": False}, [[-1, 0.5], [2, 1]]),
        ({"scale_actions": False, "clip_actions": False}, [[-1, 0.5], [3, 1]]),
    ],
    ids=str,
)
def test_to_env_scales_and_clips_to_the_bounds(flags, expected):
    space = Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32))
    action = bare_agent(space, **flags).to_env(torch.tensor([[-1.0, 0.5], [3.0, 1.0]]))
    np.testing.assert_allclose(action, expected, rtol=1e-6)
    assert action.dtype == np.float32


def test_to_env_leaves_components_without_bounds():
    low, high = np.array([-np.inf, 0, -4]), np.array([np.inf, np.inf, 4])
    agent = bare_agent(Box(low.astype(np.float32), high.astype(np.float32)))
    action = agent.to_env(torch.tensor([[-30.0, -3.0, 0.5], [30.0, 3.0, -2.0]]))
    assert action.tolist() == [[-30, 0, 2], [30, 3, -4]]
    largest = np.finfo(np.float32).max
    assert bare_agent(Box(-largest, largest, (1,))).to_env(torch.tensor([[0.5]])) == 0.5


@pytest.mark.parametrize(
    "space",
    [
        Box(-1, 1, (2, 3)),
        Discrete(3, start=5),
        Discrete(3, dtype=np.int32),
        MultiBinary((2, 2)),
        MultiDiscrete([3, 3], start=[5, -2]),
        MultiDiscrete([[3, 3], [3, 3]]),
    ],
    ids=str,
)
def test_to_env_gives_members_of_the_space_with_its_dtype(space):
    agent, done = bare_agent(space), torch.zeros(20)
    mask = agent.read_mask({}, 20)
    with torch.no_grad():
        action, *_ = agent.get_action_and_value(
            torch.randn(20, 3), torch.zeros(0, 20, 16), done, mask
        )
    items = agent.to_env(action)
    for item in items[:, 0] if isinstance(space, Discrete) and items.ndim == 2 else items:
        assert space.contains(item) and np.asarray(item).dtype == space.dtype


# ------------------------------------------------------------------------- invariants of a training


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
@pytest.mark.parametrize("rnn_reset", [True, False])
def test_sequences_equal_a_loop_over_steps_with_resets(rnn, rnn_reset):
    agent, S, L = bare_agent(rnn=rnn, rnn_reset=rnn_reset, norm_value=False), 5, 12
    obs, done = torch.randn(L, S, 3), (torch.rand(L, S) < 0.2).float()
    done[0] = torch.arange(S) % 2
    first = torch.randn(agent.num_states, S, 16)
    with torch.no_grad():
        values, last = agent.get_value(obs.flatten(0, 1), first, done.flatten())
        for n in range(S):
            state = first[:, [n]]
            for t in range(L):
                if done[t, n] and rnn_reset:
                    state = torch.zeros_like(state)
                value, state = agent.get_value(obs[t, [n]], state, torch.zeros(1))
                torch.testing.assert_close(values.view(L, S)[t, n], value[0])
            torch.testing.assert_close(last[:, [n]], state)


@pytest.mark.parametrize("length", [1, 4, 16])
def test_minibatches_cover_each_sequence_once_an_epoch(length, tmp_path):
    """A sequence is of one environment: its time goes on, or an episode begins."""
    seen = run(tmp_path / "run", rnn="lstm", rnn_seq_len=length, num_minibatches=2)
    S, orders = 64 // length, []
    for epoch in range(4):
        pair = seen.updates[2 * epoch : 2 * epoch + 2]
        orders.append(torch.cat([x.args[4] for x in pair]))
        assert orders[-1].sort().values.tolist() == list(range(S))
        _, _, batch, states, *_ = pair[0].args
        assert states.shape == (2, S, 16)
        assert all(x.shape[:2] == (length, S) for x in batch.values())
        time, done = batch["obs"][..., 2], batch["dones"]
        torch.testing.assert_close(time[1:], torch.where(done[1:] > 0, 0.0, time[:-1] + 1))
    assert S == 4 or not torch.equal(orders[0], orders[1])


@pytest.mark.parametrize("recompute_adv", [True, False])
def test_recompute_adv_takes_the_critic_of_the_epoch(recompute_adv, tmp_path):
    found = []

    def on_gae(seen, rewards, values, *_):
        found.append(weights(seen.agent))

    def on_update(seen, agent, params, batch, *_):
        if len(seen.updates) % (4 if recompute_adv else 8) == 0:
            obs, dones = batch["obs"][0], batch["dones"][0]
            with torch.no_grad():
                value, _ = agent.get_value(obs, torch.zeros(0, len(obs), 16), dones)
            torch.testing.assert_close(value, batch["values"][0], rtol=1e-4, atol=1e-5)

    run(tmp_path / "run", recompute_adv=recompute_adv, on_gae=on_gae, on_update=on_update)
    assert len(found) == (4 if recompute_adv else 2)
    assert not torch.equal(found[0], found[1])


def test_kl_stop_after_the_first_epoch_whose_mean_exceeds_the_target(tmp_path):
    def epochs(name, target_kl):
        flags = {"total_timesteps": 64, "update_epochs": 4, "target_kl": target_kl}
        seen = run(tmp_path / name, **flags)
        kl = torch.stack([x.logged["approx_kl"] for x in seen.updates]).view(-1, 4).mean(1)
        assert seen.logged[0]["epochs"] == len(kl)
        assert seen.logged[0]["approx_kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
        return kl.tolist()

    means = epochs("without", None)
    for i, target in enumerate((0.999 * means[1], 1.001 * means[1], 1.001 * max(means))):
        expected = next((e + 1 for e in range(4) if means[e] > target), 4)
        assert len(epochs(str(i), target)) == expected
    assert means[0] < means[1]


def test_rate_and_clip_range_are_annealed(tmp_path):
    seen = run(tmp_path / "run", total_timesteps=256, anneal_clip=True, clip_coef=0.2)
    assert seen.rates == [[pytest.approx(1e-3 * x)] for x in (1, 0.75, 0.5, 0.25)]
    clips = [x.args[5].item() for x in seen.updates[::8]]
    assert clips == pytest.approx([0.2, 0.15, 0.1, 0.05])
    seen = run(tmp_path / "constant", total_timesteps=256, anneal_lr=False)
    assert seen.rates == [[pytest.approx(1e-3)]] * 4
    assert {x.args[5].item() for x in seen.updates} == {np.float32(0.2)}


def test_std_that_is_not_learned_is_constant_and_then_falls(tmp_path):
    flags = {"total_timesteps": 512, "log_std_init": -1.0, "log_std_drop": 2.0}
    seen = run(tmp_path / "run", **flags)
    log_std = torch.tensor([-1, -1, -1, -1, -1, -1.5, -2, -2.5])
    entropy = torch.tensor([x["entropy"] for x in seen.logged])
    torch.testing.assert_close(entropy, Normal(0, log_std.exp()).entropy())
    assert ppo.load_agent(tmp_path / "run").log_std.item() == -2.5
    del flags["log_std_drop"]
    assert 0 < abs(run(tmp_path / "learned", learn_std=True, **flags).agent.log_std + 1) < 0.1


@pytest.mark.parametrize("rnn", ["none", "gru", "lstm"])
@pytest.mark.parametrize("ends", ["time limit", "terminal", "bootstrap off"])
def test_time_limit_adds_the_value_of_its_own_observation_and_memory(rnn, ends, tmp_path):
    line = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    checked = []

    def on_gae(seen, rewards, values, dones, next_value, next_done, *_):
        agent = seen.agent
        value, _ = agent.get_value(line, torch.zeros(agent.num_states, 1, 16), torch.zeros(4))
        added = 0.9 * value[3].item() if ends == "time limit" else 0
        checked.append(value[3].item())
        expected = torch.tensor([1.0, 1.0, 1.0 + added, 1.0, 1.0])
        torch.testing.assert_close(rewards, expected[:, None].expand(5, 4))
        assert dones[:, 0].tolist() == [1, 0, 0, 1, 0] and next_done.sum() == 0
        torch.testing.assert_close(values[:, 0], value[[0, 1, 2, 0, 1]])
        torch.testing.assert_close(next_value[0], value[2])

    flags = {"num_steps": 5, "num_minibatches": 1, "norm_obs": False, "norm_value": False}
    flags |= {"truncation_bootstrap": ends != "bootstrap off", "gamma": 0.9, "rnn": rnn}
    flags |= {"env_kwargs": '{"truncate": false}' if ends == "terminal" else "{}"}
    run(tmp_path / "run", env_id="Line-v0", on_gae=on_gae, total_timesteps=20, **flags)
    assert abs(checked[0]) > 1e-3 and len(set(checked)) == 2  # in each epoch, with its weights


def test_a_std_beyond_its_bounds_comes_back(tmp_path, monkeypatch):
    """Where the clamp has no gradient."""
    monkeypatch.setitem(ppo.RANGES, "log_std_init", (-5, 9))
    flags = {"learn_std": True, "log_std_init": 9.0, "total_timesteps": 128}
    log_std = run(tmp_path / "run", **flags).agent.log_std
    assert 1.9 < log_std.item() < 2.1 and log_std.item() != 2


@pytest.mark.parametrize("clip_reward", [1.0, 0.0])
def test_norm_reward_divides_by_the_std_of_the_discounted_return(clip_reward, tmp_path):
    """That of all returns so far, the step's own included."""
    flags = {"norm_reward": True, "clip_reward": clip_reward, "gamma": 0.9, "recompute_adv": False}
    flags["norm_obs"] = False
    with patch.object(Drift, "rewards", []):
        seen = run(tmp_path / "run", truncation_bootstrap=False, total_timesteps=64, **flags)
        raw = np.array(Drift.rewards[4:]).reshape(16, 4)  # the first are those of check_env
    rewards, _, dones, _, next_done, *_ = seen.gae[0]
    ends = torch.cat([dones[1:], next_done[None]]).numpy()
    discounted, returns, expected = np.zeros(4), [], []
    for reward, end in zip(raw, ends, strict=True):
        discounted = 0.9 * discounted + reward
        returns.extend(discounted)
        expected.append(reward / np.sqrt(np.var(returns) + 1e-4 * np.mean(returns) ** 2))
        discounted = discounted * (1 - end)
    assert ends.any() and np.abs(expected).max() > 1
    expected = np.clip(expected, -1, 1) if clip_reward else expected
    np.testing.assert_allclose(rewards, expected, rtol=1e-4)


def test_norm_obs_uses_all_earlier_rollouts(tmp_path):
    """The first one only begins the statistics: nothing is learned without them."""
    update, rollouts = ppo.RunningMeanStd.update, []

    def watched(rms, x):
        update(rms, x)
        if x.dim() == 3:  # observations
            rollouts.append(x.flatten(0, 1).double())
            assert rms.count == 64 * len(rollouts)

    with patch.object(ppo.RunningMeanStd, "update", watched):
        seen = run(tmp_path / "run", clip_obs=1.5)
    for i, update in enumerate(seen.updates[::8]):
        assert torch.equal(update.args[2]["obs"].flatten(0, 1).double(), rollouts[i + 1])
    data = torch.cat(rollouts)
    assert len(rollouts) == 3
    expected = (data - data.mean(0)) / data.std(0, correction=0)
    normalized = seen.agent.normalize(data.float())
    torch.testing.assert_close(normalized, expected.clamp(-1.5, 1.5).float())


@pytest.mark.parametrize("flags", [{}, {"norm_reward": True, "norm_value": False}], ids=str)
def test_unit_of_rewards_does_not_change_the_policy(flags, tmp_path):
    def actor(scale):
        kwargs = f'{{"scale": {scale!r}}}'
        flags_ = flags | {"total_timesteps": 256, "env_kwargs": kwargs}
        seen = run(tmp_path / str(scale), **flags_)
        return weights(seen.agent.actor), seen.updates[-1].args[2]["actions"]

    expected, played = actor(1.0)
    assert expected.isfinite().all()
    for scale, tolerance in {2.0**-27: 1e-6, 2.0**27: 1e-6, 1e-8: 2e-3, 1e-4: 2e-3}.items():
        found, actions = actor(scale)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(actions, played, rtol=0, atol=10 * tolerance)
    for scale in (1e4, 1e8):
        torch.testing.assert_close(actor(scale)[0], expected, rtol=0, atol=2e-3)


# ---------------------------------------------------------------------------------- learning probes

FAST = {
    "num_envs": 16, "num_steps": 16, "update_epochs": 4, "learning_rate": 5e-3,
    "total_timesteps": 2048, "eval_episodes": 20,
}  # fmt: skip


def learned(run_dir, **flags):
    """Agent, as its checkpoint has it, and summary of a whole run."""
    summary = run(run_dir, eval_too=True, **FAST | flags).summary
    return ppo.load_agent(run_dir), summary


def values(agent, obs):
    obs = torch.tensor(obs, dtype=torch.float32)
    with torch.no_grad():
        value, _ = agent.get_value(obs, torch.zeros(0, len(obs), 16), torch.zeros(len(obs)))
    return agent.return_rms.scale * value


def test_learns_the_best_action_of_a_bandit(tmp_path):
    agent, summary = learned(tmp_path / "run", env_id="Bandit-v0")
    assert summary["eval_mean"] > -0.03  # an untrained agent plays 0 and gets -0.25
    assert values(agent, [[0.0]]).item() == pytest.approx(summary["eval_sampled_mean"], abs=0.1)


MEMORY = {"env_id": "Memory-v0", "eval_episodes": 50, "total_timesteps": 4096, "gamma": 0.9}


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        ({"env_id": "MultiDiscrete-v0"}, 1.0),
        ({"env_id": "MultiBinary-v0"}, 1.0),
        (MEMORY | {"rnn": "gru"}, 0.9),
        (MEMORY | {"rnn": "lstm", "rnn_seq_len": 8}, 0.9),
    ],
    ids=str,
)
def test_learns_the_best_choices_and_to_remember(flags, least, tmp_path):
    _, summary = learned(tmp_path / "run", **flags)
    assert summary["eval_mean"] >= least and summary["eval_sampled_mean"] > 0.8


@pytest.mark.parametrize("flags", [{}, {"norm_value": False, "norm_reward": True}], ids=str)
def test_learns_that_the_value_of_a_reward_falls_with_its_distance(flags, tmp_path):
    agent, _ = learned(tmp_path / "run", env_id="Chain-v0", gamma=0.8, **flags)
    unit = agent.reward_rms.scale.item() if flags else 1.0
    found = values(agent, np.eye(5)) * unit
    np.testing.assert_allclose(found, 0.8 ** np.arange(4, -1, -1), atol=0.1)


def test_learns_values_that_a_time_limit_does_not_cut(tmp_path):
    """Without ortho_init: observations that are all zero give zero features where biases are zero,
    and a critic whose last weights start at zero then learns its last bias only."""
    flags = {"gamma": 0.8, "total_timesteps": 4096, "ortho_init": False}
    agent, _ = learned(tmp_path / "run", env_id="Forever-v0", **flags)
    assert values(agent, [[0.0]]).item() == pytest.approx(1 / (1 - 0.8), rel=0.1)


def test_learns_masked_choices_and_never_plays_forbidden_ones(tmp_path):
    agent, _ = learned(tmp_path / "run", env_id="Masked-v0")  # a forbidden action would have raised
    allowed = list(combinations(range(4), 2))
    mask = torch.tensor([[[i in pair for i in range(4)]] for pair in allowed])
    state, done = torch.zeros(0, len(allowed), 16), torch.zeros(len(allowed))
    action, *_ = agent.get_action_and_value(
        torch.zeros(len(allowed), 1), state, done, mask, greedy=True
    )
    assert action.flatten().tolist() == [max(pair) for pair in allowed]
