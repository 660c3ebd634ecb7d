"""Muesli: its formulas against closed forms, its invariants, probe environments, the command line."""

import csv
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from probes import Chain, Forever, Probe

import muesli_cartpole as muesli

SCRIPT = Path(__file__).parent.parent / "muesli_cartpole.py"
SMALL = {"num_envs": 4, "hidden_size": 32, "batch_size": 8, "seq_len": 8, "unroll_steps": 3,
         "eval_frequency": 0, "learning_starts": 100, "eval_episodes": 5}
CPU = torch.device("cpu")
gym.register("MuesliChain-v0", Chain)
gym.register("MuesliForever-v0", Forever, max_episode_steps=30)
gym.register("MuesliEndless-v0", Forever)


def small_args(**flags):
    return muesli.Args(**SMALL | flags)


def small_agent(num_actions, args):
    spaces = {"single_observation_space": Box(-1, 1, (1,)), "single_action_space": Discrete(num_actions)}
    return muesli.Agent(SimpleNamespace(**spaces), args, CPU)


def played(steps=60, **flags):
    """A run that has played `steps` steps in each environment, without learning."""
    args = small_args(train_frequency=steps, **flags)
    envs = muesli.make_envs(args, args.num_envs)
    agent, opt = muesli.make_agent(envs, args, CPU, None)
    env_state = muesli.reset_envs(envs, args.seed, 0, 0)
    rows, episodes = muesli.rollout(envs, agent, env_state)
    replay = muesli.Replay(args.buffer_size // args.num_envs)
    replay.add(rows)
    return agent, opt, replay, env_state, rows, episodes


def no_losses():
    return torch.zeros(len(muesli.LOSSES))


def sample_batch(agent, replay):
    return replay.sample(agent.args)


# ----------------------------------------------------------------------------------------- values, categories


def test_signed_hyperbolic_has_its_inverse_and_known_values():
    x = torch.tensor([-300.0, -1.0, 0.0, 0.01, 1.0, 100.0, 500.0], dtype=torch.float64)
    torch.testing.assert_close(muesli.signed_parabolic(muesli.signed_hyperbolic(x)), x)
    assert muesli.signed_hyperbolic(torch.tensor(100.0)).item() == pytest.approx(math.sqrt(101) - 1 + 0.1)


def test_two_hot_has_the_mean_it_is_given():
    support = torch.linspace(-2, 3, 11)
    x = torch.tensor([-2.0, -1.9, 0.0, 0.3, 2.99, 3.0])
    weights = muesli.two_hot(x, support)
    torch.testing.assert_close(weights @ support, x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6))
    assert ((weights > 1e-6).sum(-1) <= 2).all()
    edges = muesli.two_hot(torch.tensor([-9.0, 9.0]), support)  # beyond the support: its ends
    torch.testing.assert_close(edges, torch.eye(11)[[0, 10]])


@pytest.mark.parametrize(("low", "high", "bins"), [
    (-2.0, 220.0, 51), (-400.0, 400.0, 51), (-120.0, 2.0, 51), (0.0, 1.0, 3), (-7.0, 0.001, 10),
    (-1.0, 1.0, 3),
])  # fmt: skip
def test_support_holds_its_bounds_and_zero(low, high, bins):
    support = small_agent(2, small_args(value_min=low, value_max=high, num_bins=bins)).support
    assert len(support) == bins and (support == 0).sum() == 1
    torch.testing.assert_close(support.diff(), support.diff()[:1].expand(bins - 1), rtol=1e-4, atol=1e-6)
    ends = muesli.signed_parabolic(support[[0, -1]])
    assert ends[0] <= low + 1e-3 and ends[1] >= high - 1e-3
    torch.testing.assert_close(muesli.two_hot(torch.zeros(1), support), (support == 0).float()[None])


def test_a_head_tells_what_it_was_taught():
    agent, *_ = played(1)
    value = torch.tensor([-1.5, 0.0, 37.0, 99.0])
    logits = (muesli.two_hot(muesli.signed_hyperbolic(value), agent.support) + 1e-12).log()
    torch.testing.assert_close(agent.scalar(logits), value, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------------- CMPO


@pytest.mark.parametrize("clip", [0.5, 1.0, 3.0])
def test_cmpo_moves_at_most_tanh_of_half_the_clip(clip):
    args = small_args(cmpo_clip=clip)
    prior = torch.randn(5000, 4).mul(2).softmax(-1)
    policy = muesli.cmpo(prior, torch.randn(5000, 4) * 5, args)
    torch.testing.assert_close(policy.sum(-1), torch.ones(5000))
    moved = 0.5 * (policy - prior).abs().sum(-1)
    assert moved.max() <= math.tanh(clip / 2) + 1e-6
    # The bound is reached: two actions, clipped on either side, at the worst prior.
    share = 1 / (1 + math.exp(clip))
    worst = muesli.cmpo(torch.tensor([share, 1 - share]), torch.tensor([9.0, -9.0]), args)
    assert (worst[0] - share).item() == pytest.approx(math.tanh(clip / 2), rel=1e-5)


def test_cmpo_by_hand():
    policy = muesli.cmpo(torch.tensor([0.05, 0.95]), torch.tensor([1.0, -1.0]), small_args())
    torch.testing.assert_close(policy, torch.tensor([0.280, 0.720]), atol=5e-4, rtol=0)


def test_cmpo_keeps_the_prior_where_no_action_is_better():
    prior = torch.randn(100, 3).softmax(-1)
    for constant in (0.0, 0.4):
        policy = muesli.cmpo(prior, torch.full_like(prior, constant), small_args())
        torch.testing.assert_close(policy, prior)


def test_sampled_cmpo_leaves_one_out():
    """A prior that always takes one action: N equal samples of gain g have weight g N / (1 + (N - 1) g)."""
    args = small_args(cmpo="sampled", cmpo_samples=4)
    gain = math.exp(0.5)
    weights = muesli.cmpo(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, -1.0]]), args)
    expected = torch.tensor([[4 * gain / (1 + 3 * gain), 0.0]])
    torch.testing.assert_close(weights, expected)


def test_sampled_gradient_tends_to_the_exact_one():
    prior, advantages = torch.randn(20, 4).softmax(-1), torch.randn(20, 4)

    def gradient(**flags):
        logits = torch.zeros(20, 4, requires_grad=True)
        target = muesli.cmpo(prior, advantages, small_args(**flags))
        (-(target * logits.log_softmax(-1)).sum()).backward()
        return logits.grad

    exact = gradient()
    errors = [(gradient(cmpo="sampled", cmpo_samples=n) - exact).abs().mean().item() for n in (16, 4096)]
    assert errors[1] < 0.01 and errors[1] < errors[0] / 4


# ---------------------------------------------------------------------------------------------------- Retrace


def random_sequence(steps=12, batch=3):
    rewards, values, q_taken = torch.randn(3, steps, batch, dtype=torch.float64)
    discounts = 0.9 * (torch.rand(steps, batch) > 0.2).double()
    traces = torch.rand(steps, batch).double() * (torch.rand(steps, batch) > 0.2)
    return rewards, discounts, values, q_taken, traces


def test_retrace_equals_its_sum_of_errors():
    rewards, discounts, values, q_taken, traces = random_sequence()
    result = muesli.retrace(rewards, discounts, values, q_taken, traces)
    for t in range(len(rewards) - 1):
        total, weight = q_taken[t].clone(), torch.ones_like(values[0])
        for s in range(t, len(rewards) - 1):
            if s > t:
                weight = weight * discounts[s] * traces[s]
            total += weight * (rewards[s] + discounts[s + 1] * values[s + 1] - q_taken[s])
        torch.testing.assert_close(result[t], total)


def test_retrace_without_traces_looks_one_step_ahead():
    rewards, discounts, values, q_taken, traces = random_sequence()
    result = muesli.retrace(rewards, discounts, values, q_taken, 0 * traces)
    torch.testing.assert_close(result, rewards[:-1] + discounts[1:] * values[1:])


def test_retrace_on_policy_with_flat_q_is_the_discounted_return():
    rewards = torch.tensor([[1.0], [2.0], [3.0], [0.0]])
    discounts, ones = torch.tensor([[0.1], [0.1], [0.1], [0.0]]), torch.ones(4, 1)
    values = torch.randn(4, 1)
    result = muesli.retrace(rewards, discounts, values, values, ones)  # q of each action = v
    torch.testing.assert_close(result.flatten(), torch.tensor([1.23, 2.3, 3.0]))


def chain(gamma=0.9):
    """Five states in a row, action 0 ends the episode with reward s, action 1 goes on for 0.1, the last ends.

    Returns policy (5, 2), exact q (5, 2) and v (5,)."""
    policy = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]).double()
    q, v = torch.zeros(5, 2).double(), torch.zeros(6).double()
    for s in reversed(range(5)):
        q[s] = torch.tensor([float(s), 0.1 + gamma * v[s + 1]])
        v[s] = policy[s] @ q[s]
    return policy, q, v[:5]


@pytest.mark.parametrize("trace", [0.0, 0.6, 1.0])
def test_retrace_of_exact_values_is_exact(trace):
    gamma, (_, q, v) = 0.9, chain()
    values = torch.cat([v, torch.zeros(1).double()]).unsqueeze(1)  # five times action 1, then the end
    discounts = torch.tensor([gamma] * 5 + [0.0]).double().unsqueeze(1)
    rewards = torch.full((6, 1), 0.1).double()
    q_taken = torch.cat([q[:, 1], torch.zeros(1).double()]).unsqueeze(1)
    result = muesli.retrace(rewards, discounts, values, q_taken, torch.full((6, 1), trace).double())
    torch.testing.assert_close(result, q_taken[:5])


# ------------------------------------------------------------------------------------------------ policy loss


def loss_parts(logits, action, behavior, advantages, **flags):
    """The policy gradient's loss alone, at the roots of windows of one position and one unrolled step."""
    others = dict.fromkeys(("cmpo_coef", "model_coef", "value_coef", "reward_coef"), 0.0)
    args = small_args(seq_len=1, unroll_steps=1, **others, **flags)
    agent = small_agent(logits.shape[-1], args)
    n, zeros = len(action), torch.zeros(3, len(action))
    batch = {"actions": action.expand(3, n), "behavior": behavior.expand(3, *behavior.shape),
              "rewards": zeros, "last": zeros, "terminal": zeros}
    prior = behavior.expand(3, *behavior.shape)
    targets = {"pi_cmpo": prior, "pi_prior": prior, "returns": zeros[:2], "adv_hat": advantages.expand(2, n)}
    heads = torch.zeros(2, 1, n, args.num_bins)
    outputs = (torch.stack([logits.unsqueeze(0), torch.zeros(1, *logits.shape)]), heads, heads)
    return muesli.muesli_loss(outputs, agent, batch, targets)


@pytest.mark.parametrize("detach_ratio", [True, False])
def test_every_sample_on_policy_has_a_gradient(detach_ratio):
    """Not so if the gradient goes through the clip: float noise alone puts ratios above 1."""
    logits = torch.randn(1000, 3, requires_grad=True)
    behavior = logits.detach().double().softmax(-1).float()  # the same policy, rounded differently
    action = behavior.multinomial(1).squeeze(1)
    loss, _ = loss_parts(logits, action, behavior, torch.ones(1000), detach_ratio=detach_ratio)
    loss.backward()
    silent = (logits.grad.abs().sum(-1) == 0).sum().item()
    assert silent == 0 if detach_ratio else silent > 50


def test_policy_gradient_of_a_chain_is_the_analytic_one():
    policy, q, v = chain()
    visits = [(s, a) for s in range(5) for a in (0, 1) for _ in range(int(4 * policy[s, a]))]
    states, actions = (torch.tensor(x) for x in zip(*visits, strict=True))
    table = policy.float().log().clone().requires_grad_()
    advantages = (q[states, actions] - v[states]).float()
    loss, _ = loss_parts(table[states], actions, policy.float()[states], advantages)
    loss.backward()
    log_policy = table.log_softmax(-1)
    expected = (policy.float() * (q - v.unsqueeze(1)).float() * log_policy).sum() / 5
    analytic, = torch.autograd.grad(-expected, table)
    torch.testing.assert_close(table.grad, analytic, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_off_policy_weight_is_clipped_at_one(advantage):
    logits = torch.zeros(2, 2, requires_grad=True)
    behavior = torch.tensor([[0.25, 0.75], [1.0, 0.0]])  # ratios 2 and 0.5 of action 0
    action = torch.zeros(2, dtype=torch.long)
    loss, metrics = loss_parts(logits, action, behavior, torch.tensor([advantage] * 2))
    loss.backward()
    assert metrics[0].item() == pytest.approx(advantage * math.log(2) * (1 + 0.5) / 2)
    torch.testing.assert_close(logits.grad[:, 0], torch.tensor([-0.25, -0.125]) * advantage)


# ----------------------------------------------------------------------------------------------- episode ends


@pytest.mark.parametrize("part", ["cmpo_coef", "model_coef"])
def test_policies_are_pulled_towards_their_targets(part):
    """The gradient of a cross-entropy: policy minus target, over the number of samples."""
    coefs = dict.fromkeys(("pg_coef", "cmpo_coef", "model_coef", "value_coef", "reward_coef"), 0.0)
    args = small_args(seq_len=1, unroll_steps=2, **coefs | {part: 1.0})
    agent, zeros = small_agent(3, args), torch.zeros(4, 5)
    logits = torch.randn(3, 1, 5, 3, requires_grad=True)
    target = torch.randn(4, 5, 3).softmax(-1)
    batch = dict.fromkeys(("rewards", "last", "terminal"), zeros)
    batch |= {"actions": zeros.long(), "behavior": target}
    targets = {"pi_cmpo": target, "pi_prior": target, "returns": zeros[:3], "adv_hat": zeros[:3]}
    heads = torch.zeros(3, 1, 5, args.num_bins)
    muesli.muesli_loss((logits, heads, heads), agent, batch, targets)[0].backward()
    expected = logits.detach().softmax(-1)[:, 0] - target[:3]
    steps = slice(0, 1) if part == "cmpo_coef" else slice(1, 3)
    torch.testing.assert_close(logits.grad[steps, 0], expected[steps] / (5 * len(expected[steps])))
    assert logits.grad.count_nonzero() == expected[steps].numel()


def test_losses_are_zero_where_nothing_is_left_to_learn():
    """All but the policy gradient are KL divergences."""
    args = small_args(seq_len=1, unroll_steps=2)
    agent, policy = small_agent(3, args), torch.randn(4, 5, 3).softmax(-1)
    batch = {"last": torch.zeros(4, 5), "terminal": torch.zeros(4, 5), "rewards": torch.rand(4, 5),
             "actions": torch.zeros(4, 5).long(), "behavior": policy}
    targets = {"pi_cmpo": policy, "pi_prior": policy, "returns": torch.rand(3, 5),
               "adv_hat": torch.zeros(3, 5)}
    value, reward = ((muesli.two_hot(muesli.signed_hyperbolic(x), agent.support) + 1e-12).log()
                     for x in (targets["returns"], torch.cat([torch.zeros(1, 5), batch["rewards"][:2]])))
    outputs = (policy[:3, None].log(), value[:, None], reward[:, None])
    losses = muesli.muesli_loss(outputs, agent, batch, targets)[1].tolist()
    losses = dict(zip(muesli.LOSSES[:-1], losses, strict=True))
    for name in ("policy_loss", "cmpo_loss", "model_loss", "value_loss", "reward_loss", "kl_to_prior"):
        assert losses[name] == pytest.approx(0, abs=1e-4), name
    assert losses["entropy"] > 0


def test_targets_and_actions_are_the_target_network_s():
    agent, opt, replay, env_state, *_ = played()
    batch = sample_batch(agent, replay)
    results = []
    for _ in range(2):
        agent.adv_var.zero_()
        with torch.no_grad():
            _, acting = agent.act(torch.from_numpy(env_state.obs), greedy=False)
        results.append({**muesli.make_targets(agent, batch), "acting": acting})
        opt["params"].normal_()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_traces_are_cut_where_the_prior_acts_otherwise():
    """Returns look beyond the next state as far as the prior would have done what was done."""
    agent, _, replay, *_ = played(retrace_lambda=1.0, prior_behavior=0.0)
    batch = sample_batch(agent, replay)
    action = batch["actions"].unsqueeze(-1)  # which the behavior policy was sure to do, the prior not
    batch["behavior"] = torch.zeros_like(batch["behavior"]).scatter_(-1, action, 1.0)
    more = batch | {"rewards": batch["rewards"] + 1}
    more["rewards"][0] -= 1
    less, more = (muesli.make_targets(agent, rows)["returns"][0] for rows in (batch, more))
    alive = (batch["last"][:2] == 0).all(0)
    effect = (more - less)[alive]  # of 1 more in 20 later steps, at ratios of about 0.5
    assert 0.8 < effect.mean() < 1.2


def test_masks_by_hand():
    """Three steps; column 0 goes on, 1 is cut after its first action, 2 ends there, 3 after two."""
    last = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).float()
    terminal = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).float()
    alive, absorbed, after_end = muesli.episode_masks(last, terminal)
    assert alive.T.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert absorbed.T.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert after_end.T.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("terminal", [0.0, 1.0])
def test_nothing_is_learned_from_beyond_an_episode(terminal):
    """Roots before, on and, spoiled, behind an episode's end: the last change nothing for the others."""
    agent, _, replay, *_ = played(seq_len=3, unroll_steps=5, batch_size=1, norm_adv=False)
    batch = {name: x[:, :1].clone() for name, x in sample_batch(agent, replay).items()}
    batch["last"].zero_()[2], batch["terminal"].zero_()[2] = 1, terminal
    batch["rewards"][2] = 0  # as the environments give it there
    results = []
    for spoil in (False, True):
        if spoil:  # the next episode, but for the actions, which a model may well try in an absorbing state
            for name in ("obs", "rewards"):
                batch[name][3:] += 5
            batch["behavior"][3:] = batch["behavior"][3:].flip(-1)
        targets = muesli.make_targets(agent, batch)
        actions = torch.stack([batch["actions"][k : k + 3] for k in range(5)])
        results.append(muesli.muesli_loss(agent.online(batch["obs"][:3], actions), agent, batch, targets))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_terminal_state_is_worth_nothing_and_a_cut_one_its_value():
    agent, _, replay, *_ = played(seq_len=1, unroll_steps=1, batch_size=1, norm_adv=False)
    batch = {name: x[:, :1].clone() for name, x in sample_batch(agent, replay).items()}
    batch["rewards"][0], batch["last"].zero_()[1] = 3, 1
    batch["terminal"].zero_()[1] = 1
    assert muesli.make_targets(agent, batch)["returns"][0].item() == pytest.approx(3)
    batch["terminal"].zero_()
    assert muesli.make_targets(agent, batch)["returns"][0].item() > 3 + 1  # the untrained value is positive


# ----------------------------------------------------------------------------------------- replay, collection


def test_replay_holds_distinct_episodes_in_order():
    _, _, replay, _, rows, episodes = played(400)
    stored, env = replay.rows, 0
    for name, x in rows.items():
        assert torch.equal(stored[name][:400], x), name
    assert len(episodes) >= 50
    for n in range(4):  # each step but those that only reset is one of an episode
        lengths = [length for i, _, length in episodes if i == n]
        assert sum(lengths) + len(lengths) <= 401 and rows["last"][:, n].sum() >= len(lengths) - 1
        assert [r for i, r, _ in episodes if i == n] == lengths  # CartPole earns 1 a step
    ends = [-1, *stored["last"][:400, env].nonzero().flatten().tolist()]
    starts = [stored["obs"][begin + 1, env] for begin in ends[:-1]]
    assert len({tuple(obs.tolist()) for obs in starts}) == len(starts) > 10
    for begin, end in pairwise(ends):  # its end earns nothing
        assert stored["rewards"][begin + 1 : end, env].eq(1).all() and stored["rewards"][end, env] == 0
        assert stored["obs"][begin + 1 : end + 1, env].diff(dim=0).abs().max() < 1  # no reset inside
        final = stored["obs"][end, env]
        assert stored["terminal"][end, env] == 1 and (final[0].abs() > 2.4 or final[2].abs() > 0.2)


def counting_replay(begin, end, replay=None, capacity=10):
    """Two environments whose rewards count their rows; the second observes 100 more."""
    replay = replay or muesli.Replay(capacity)
    for i in range(begin, end):
        ones = torch.ones(1, 2)
        replay.add({"obs": torch.tensor([[[i], [100 + i]]]), "actions": 0 * ones.long(), "rewards": i * ones,
                    "behavior": torch.full((1, 2, 2), 0.5), "last": 0 * ones, "terminal": 0 * ones})
    return replay


def window_args(batch_size, replay_share):
    """Sequences of four rows, two of them roots."""
    return small_args(batch_size=batch_size, replay_share=replay_share, seq_len=2, unroll_steps=1)


def test_batches_are_consecutive_also_where_the_ring_closes():
    replay = counting_replay(0, 25)
    batch = replay.sample(window_args(200, 0.99))
    steps = batch["rewards"]
    assert steps.shape == (4, 200) and (steps.diff(dim=0) == 1).all()
    assert steps.min() == 15 and steps.max() == 24 and (steps[-1, :2] == 24).all()
    assert set(batch["obs"][0, :2, 0].tolist()) == {21, 121}  # the newest of each environment
    assert len(steps[0].unique()) == 7


def test_rows_of_several_steps_close_the_ring_too():
    one, two = counting_replay(0, 23), muesli.Replay(10)
    rows = {name: torch.cat([one.rows[name][(i % 10)][None] for i in range(13, 23)]) for name in one.rows}
    two.add({name: 0 * x[:3] for name, x in rows.items()})
    two.add(rows)
    assert two.count == 13
    for name in rows:
        assert torch.equal(two.rows[name].roll(-3, 0), rows[name])


def test_without_replay_no_sequence_is_drawn_twice():
    """More sequences than environments: the next ones end L rows earlier."""
    replay = counting_replay(0, 40, capacity=40)
    batch = replay.sample(window_args(16, 0.0))
    assert len({tuple(obs.flatten().tolist()) for obs in batch["obs"].unbind(1)}) == 16
    assert batch["rewards"][-1].tolist() == [39, 39, 37, 37, 35, 35, 33, 33, 31, 31, 29, 29, 27, 27, 25, 25]
    batch = counting_replay(0, 11, capacity=40).sample(window_args(16, 0.0))  # there are just enough
    assert len({tuple(obs.flatten().tolist()) for obs in batch["obs"].unbind(1)}) == 16


@pytest.mark.parametrize(("share", "newest"), [(0.0, 16), (0.75, 4), (0.95, 1), (1.0, 0)])
def test_share_of_the_replay(share, newest):
    batch = counting_replay(0, 1000, capacity=1000).sample(window_args(16, share))
    assert (batch["rewards"][-1] > 999.5 - 2 * math.ceil(newest / 2)).sum() == newest


def test_a_time_limit_is_no_terminal_state():
    _, _, replay, *_ = played(100, env_id="MuesliForever-v0")
    rows = replay.rows
    assert rows["last"][:100].nonzero()[:, 0].tolist() == [30] * 4 + [61] * 4 + [92] * 4
    assert rows["terminal"].sum() == 0


def test_a_checkpoint_cuts_episodes_like_a_time_limit(tmp_path):
    muesli.train(small_args(env_id="MuesliForever-v0", total_timesteps=80, train_frequency=10,
                            checkpoint_every=1, run_dir=str(tmp_path / "run")))
    saved = load(tmp_path / "run")
    rows = saved["rows"]
    assert saved["count"] == 22  # 2 x (10 steps and the observation after them)
    assert rows["last"].nonzero()[:, 0].tolist() == [10] * 4 + [21] * 4 and rows["terminal"].sum() == 0
    assert rows["rewards"][:, 0].tolist() == 2 * (10 * [1] + [0])
    torch.testing.assert_close(rows["behavior"].sum(-1), torch.ones(22, 4))  # it is part of the prior


def test_a_restored_replay_goes_on_where_it_was():
    one, two = counting_replay(0, 23), muesli.Replay(10)
    two.add({name: x[: one.count].clone() for name, x in one.rows.items()})  # as train does
    two.count = one.count
    for replay in (one, two):
        counting_replay(23, 24, replay)
        torch.manual_seed(0)
        replay.steps = replay.sample(window_args(50, 0.9))["rewards"]
    assert torch.equal(one.steps, two.steps) and one.steps.min() == 14 and one.steps.max() == 23


class Pixels(Probe):
    """An observation that shows the better action, of a type that no network takes."""

    def __init__(self, dtype=np.uint8, render_mode=None):
        high = 1 if dtype is bool else 255
        self.observation_space, self.dtype = Box(0, high, (2, 2), dtype), dtype
        self.length = 8

    def observe(self):
        self.shown = int(self.np_random.integers(2))
        return (np.eye(2) if self.shown else np.zeros((2, 2))).astype(self.dtype)


gym.register("MuesliPixels-v0", Pixels)
gym.register("MuesliBits-v0", Pixels, kwargs={"dtype": bool})


@pytest.mark.parametrize(("env_id", "dtype"), [
    ("MuesliPixels-v0", torch.uint8), ("MuesliBits-v0", torch.bool), ("CartPole-v1", torch.float32),
])  # fmt: skip
def test_replay_keeps_the_type_of_observations(env_id, dtype, tmp_path):
    agent, _, _ = trained(tmp_path / "run", env_id=env_id, total_timesteps=400)
    assert load(tmp_path / "run")["rows"]["obs"].dtype == dtype
    assert agent.online.policy.weight.isfinite().all()


# -------------------------------------------------------------------------------------------- flags, learning


@pytest.mark.parametrize("flags", [
    {"cmpo": "sampled"}, {"cmpo_coef": 0.0}, {"pg_coef": 0.0}, {"model_coef": 0.0}, {"retrace": False},
    {"norm_adv": False}, {"detach_ratio": False}, {"value_coef": 0.0}, {"reward_coef": 0.0},
    {"clip_update": 0.1}, {"tau": 0.1}, {"prior_uniform": 0.3},
    {"weight_decay": 0.1}, {"retrace_lambda": 0.5}, {"gamma": 0.9}, {"cmpo_clip": 0.1},
    {"prior_behavior": 0.5},
], ids=lambda flags: next(iter(flags)))  # fmt: skip
def test_each_flag_changes_what_is_learned(flags):
    results = []
    for changes in ({}, flags):
        agent, opt, replay, *_ = played(60)
        agent.args = small_args(**changes)
        torch.manual_seed(0)
        opt["target"].copy_(opt["params"].normal_(std=0.5))  # advantages that reach the clip
        batch, losses = sample_batch(agent, replay), no_losses()
        for _ in range(4):
            muesli.train_step(agent, opt, batch, 1e-2, losses)
        results.append(opt["params"].clone())
    assert results[0].isfinite().all() and results[1].isfinite().all()
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_an_update_moves_each_weight_at_most_by_the_learning_rate_and_the_target_follows():
    agent, opt, replay, *_ = played(60)
    before = {name: opt[name].clone() for name in ("params", "target")}
    assert torch.equal(before["params"], before["target"])
    muesli.train_step(agent, opt, sample_batch(agent, replay), 1e-2, no_losses())
    step = opt["params"] - before["params"]
    assert step.abs().max() == pytest.approx(1e-2, rel=1e-3)  # Adam's first step is its sign
    moved = opt["target"] - before["target"]
    torch.testing.assert_close(moved, agent.args.tau * step, rtol=1e-3, atol=1e-6)
    assert agent.target.policy.weight.data_ptr() != agent.online.policy.weight.data_ptr()
    for network, name in ((agent.target, "target"), (agent.online, "params")):
        assert torch.equal(torch.nn.utils.parameters_to_vector(network.parameters()), opt[name])


def test_adamw_is_that_of_pytorch():
    args = small_args(weight_decay=0.01, clip_update=0.0)
    weight = torch.nn.Parameter(torch.randn(50))
    opt = {"params": weight.detach().clone(), "exp_avg": torch.zeros(50), "exp_avg_sq": torch.zeros(50),
           "bias": torch.zeros(2)}
    reference = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.01)
    for _ in range(20):
        weight.grad = torch.randn(50)
        muesli.adamw_step(opt, weight.grad, 0.01, args)
        reference.step()
    torch.testing.assert_close(opt["params"], weight.detach(), rtol=1e-4, atol=1e-5)


def test_second_moment_is_bias_corrected_and_keeps_the_mean():
    agent, _, replay, *_ = played(60)
    batch = sample_batch(agent, replay)
    raw = muesli.make_targets(agent, batch)["adv_hat"]
    valid = 1 - batch["last"][:8]
    scaled = (raw[:8].square() * valid).sum() / valid.sum()
    assert scaled.item() == pytest.approx(1, rel=1e-4)  # after one update the estimate is that batch's
    first = agent.adv_var[0].item() / 0.01
    other = sample_batch(agent, replay)
    muesli.make_targets(agent, other | {"rewards": 3 * other["rewards"]})
    second = (agent.adv_var[0].item() - 0.99 * 0.01 * first) / 0.01
    assert agent.adv_var[1].item() == pytest.approx(1 - 0.99**2) and second > first


def test_solved_takes_two_in_a_row():
    assert muesli.solved_at([(1, 9), (2, 1), (3, 9)], 5) is None
    assert muesli.solved_at([(1, 9), (2, 1), (3, 5), (4, 6)], 5) == 3
    assert muesli.solved_at([(1, 9), (2, 9)], math.inf) is None
    assert muesli.solved_at([], 5) is muesli.solved_at([(1, 9)], 5) is None


class Switch(Probe):
    """Actions 3 and 4: 4 pays 1 and leads on, 3 pays nothing and leads back; six steps."""

    observation_space, action_space, length = Box(0, 1, (4,)), Discrete(2, start=3), 6

    def observe(self):
        self.at = 0 if self.t == 0 else self.at
        return np.eye(4, dtype=np.float32)[self.at]

    def reward(self, action):
        self.at = min(self.at + 1, 3) if action == 4 else 0
        return action - 3


class Broken(Switch):
    def reward(self, action):
        return float("nan") if self.t == 5 else 0


gym.register("MuesliSwitch-v0", Switch)
gym.register("MuesliBroken-v0", Broken)


def test_learns_what_actions_do(tmp_path):
    agent, *_ = trained(tmp_path / "run", env_id="MuesliSwitch-v0", gamma=0.9, value_min=-1, value_max=8,
                        learning_rate=3e-3, total_timesteps=6000)
    assert muesli.play_episodes(agent, True, 0).tolist() == [6] * 5
    network, states = agent.online, torch.eye(4)
    with torch.no_grad():
        for action in (0, 1):
            _, _, reward = network(states, torch.full((1, 4), action))
            expected = torch.full((4,), float(action))
            torch.testing.assert_close(agent.scalar(reward[1]), expected, atol=0.2, rtol=0)


def test_a_reward_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match="rewards not finite in iteration"):
        trained(tmp_path / "run", env_id="MuesliBroken-v0")


def trained(run_dir, **flags):
    """Agent of the last checkpoint, metrics and summary of a whole run."""
    args = small_args(run_dir=str(run_dir), **flags)
    summary = muesli.train(args)
    checkpoint, args = muesli.load_checkpoint(run_dir)
    agent, _ = muesli.make_agent(muesli.make_envs(args, 1), args, CPU, checkpoint)
    return agent, read_metrics(run_dir), summary


@pytest.mark.parametrize("dynamics", ["residual", "lstm"])
def test_value_of_a_chain(tmp_path, dynamics):
    agent, *_ = trained(tmp_path / "run", env_id="MuesliChain-v0", gamma=0.5, value_min=-1, value_max=2,
                        learning_rate=3e-3, total_timesteps=6000, dynamics=dynamics)
    with torch.no_grad():
        network = agent.target
        _, value, reward = network(torch.eye(5), torch.zeros(1, 5, dtype=torch.long))
    torch.testing.assert_close(agent.scalar(value[0]), 0.5 ** torch.arange(4.0, -1, -1), atol=0.06, rtol=0)
    torch.testing.assert_close(agent.scalar(reward[1]), torch.eye(5)[4], atol=0.06, rtol=0)
    # After the last step the model is in an absorbing state.
    expected = torch.tensor([0.125, 0.25, 0.5, 1, 0])
    torch.testing.assert_close(agent.scalar(value[1]), expected, atol=0.06, rtol=0)


def test_value_beyond_a_time_limit(tmp_path):
    agent, *_ = trained(tmp_path / "run", env_id="MuesliForever-v0", gamma=0.9, value_max=20,
                        learning_rate=3e-3, total_timesteps=8000)
    value = agent.scalar(agent.target.predict(agent.target.represent(torch.zeros(1, 1)))[1])
    assert value.item() == pytest.approx(10, abs=1)  # with the limit as death at most 9.6, on average 6.9


# ------------------------------------------------------------------------------- evaluations while it trains


def evaluated(monkeypatch, tmp_path, returns, **flags):
    """Summary of a run whose evaluations find these returns, one after the other."""
    results = iter(returns)
    monkeypatch.setattr(muesli, "play_episodes", lambda *_: np.full(5, next(results)))
    flags = {"env_id": "CartPole-v1", "total_timesteps": 400, "eval_frequency": 100,
             "learning_starts": 10**6} | flags
    return muesli.train(small_args(run_dir=str(tmp_path / "run"), **flags))


def test_solved_by_the_environment_s_own_threshold(monkeypatch, tmp_path):
    summary = evaluated(monkeypatch, tmp_path, [500.0, 474.0, 475.0, 476.0, 1.0, 2.0], total_timesteps=4000)
    assert 300 <= summary["solved_at"] < 310 and 400 <= summary["global_step"] < 410
    assert summary["eval_mean"] == 1 and summary["eval_sampled_mean"] == 2


def test_without_a_threshold_nothing_is_solved(monkeypatch, tmp_path):
    summary = evaluated(monkeypatch, tmp_path, [1000.0] * 6, env_id="MuesliForever-v0")
    assert summary["solved_at"] is None and summary["global_step"] >= 400


def test_a_threshold_of_ones_own_and_no_early_stop(monkeypatch, tmp_path):
    summary = evaluated(monkeypatch, tmp_path, [5.0] * 6, stop_return=5.0, stop_early=False)
    assert 100 <= summary["solved_at"] < 110 and summary["global_step"] >= 400
    assert [float(row["greedy_return"]) for row in read_metrics(tmp_path / "run")] == [5.0]


def test_an_evaluation_leaves_the_training_as_it_is(tmp_path):
    results = [trained(tmp_path / str(every), total_timesteps=400, eval_frequency=every)[0].state_dict()
               for every in (0, 150)]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_evaluation_ends_where_episodes_do_not(monkeypatch, capsys):
    agent, *_ = played(1, env_id="MuesliEndless-v0")
    agent.args.train_frequency, agent.args.eval_episodes, played_steps = 100, 2, []

    def quick_rollout(envs, *_):
        played_steps.append(100)
        return {}, [(0, 7.0, 3)] if len(played_steps) == 2 else []

    monkeypatch.setattr(muesli, "rollout", quick_rollout)
    returns = muesli.play_episodes(agent, True, 0)
    assert sum(played_steps) == 27_000 and returns.tolist() == [7, 0]
    assert "1 of 2 have no end: cut after 27000 steps" in capsys.readouterr().out


def test_a_time_limit_of_its_own_ends_an_evaluation():
    agent, *_ = played(7, env_id="MuesliForever-v0")
    assert muesli.play_episodes(agent, True, 0).tolist() == [30] * 5


def test_each_evaluation_has_fresh_episodes():
    agent, *_ = played(10)
    one, again, other = (muesli.play_episodes(agent, True, when) for when in (5, 5, 6))
    assert one.tolist() == again.tolist() != other.tolist()


def test_checkpoints_of_a_short_run_leave_its_episodes_whole(monkeypatch, tmp_path):
    """Each checkpoint resets the environments: 20 of these 300 iterations would end no long episode."""
    resets, reset_envs = [], muesli.reset_envs
    monkeypatch.setattr(muesli, "reset_envs", lambda envs, *key: resets.append(key) or reset_envs(envs, *key))
    monkeypatch.setattr(muesli, "train_step", lambda *_: None)
    muesli.train(small_args(env_id="MuesliForever-v0", total_timesteps=2400, run_dir=str(tmp_path / "run")))
    iterations = [key[2] for key in resets if key[1] == 0]
    assert iterations[0] == 0 and len(iterations) == 2 and iterations[1] >= 300  # the last one


# ----------------------------------------------------------------------------------------------- command line

SHORT = """--num-envs 2 --train-frequency 8 --batch-size 4 --hidden-size 16 --total-timesteps 2000
           --learning-starts 100 --eval-frequency 1000 --eval-episodes 3 --checkpoint-every 10"""


def read_metrics(run_dir):
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def run(folder, flags, code=0):
    """Run the script, copied alone into that folder, and check its exit status."""
    shutil.copy(SCRIPT, folder)
    command = [sys.executable, SCRIPT.name, *flags.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def check_same(run_dir, expected):
    """The same weights, optimizer, replay and metrics, but for the time they took."""
    one, two = load(run_dir), load(expected)
    assert one["opt"]["exp_avg"].any() and one["count"] == two["count"]
    assert one["progress"] | {"seconds": 0} == two["progress"] | {"seconds": 0}
    for part in ("agent", "opt", "rows"):
        assert one[part].keys() == two[part].keys()
        assert [name for name, x in one[part].items() if not torch.equal(x, two[part][name])] == []
    rows = [read_metrics(folder) for folder in (run_dir, expected)]
    for row in (*rows[0], *rows[1]):
        del row["seconds"], row["SPS"]
    assert rows[0] == rows[1] and rows[0]


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muesli")
    return folder / "run", run(folder, f"{SHORT} --run-dir run").stdout


def test_short_run(cartpole):
    run_dir, printed = cartpole
    rows, summary = read_metrics(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert int(rows[-1]["global_step"]) == summary["global_step"] >= 2000
    assert all(math.isfinite(float(row[name])) for row in rows for name in muesli.LOSSES)
    assert summary["solved_at"] is None and "deterministic return" in printed
    assert np.isfinite([summary[name] for name in ("eval_mean", "eval_sampled_mean", "sps")]).all()
    assert float(rows[-1]["clipped_targets"]) == 0
    assert {p.name for p in run_dir.iterdir()} >= {"args.json", "checkpoint.pt", "summary.json"}
    assert json.loads((run_dir / "args.json").read_text())["preset"] == "none"


def test_evaluate_repeats_the_evaluation(cartpole):
    run_dir, printed = cartpole
    lines = printed[printed.index("CartPole-v1 after"):].splitlines()[:4]
    assert len(lines) == 4 and "3 episodes, deterministic" in lines[0] and "3 episodes, sampled" in lines[2]
    before = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    assert run(run_dir.parent, "--evaluate run").stdout.splitlines() == lines
    assert {path: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before


def test_a_low_bar_is_reached_and_said(tmp_path):
    printed = run(tmp_path, f"{SHORT} --eval-frequency 300 --stop-return 5 --run-dir run").stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 300 <= summary["solved_at"] < 330 and 600 <= summary["global_step"] < 630
    assert f"solved at {summary['solved_at']} steps" in printed
    run(tmp_path, "--resume run --no-stop-early --total-timesteps 1000")
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert after["global_step"] >= 1000 and after["solved_at"] == summary["solved_at"]


def test_killed_while_it_was_evaluated(cartpole, tmp_path):
    """A run killed after its last step has all but its summary."""
    shutil.copytree(cartpole[0], tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    before = summary.read_text()
    summary.unlink()
    run(tmp_path, "--resume run")
    assert summary.read_text() == before


def start(folder, flags):
    shutil.copy(SCRIPT, folder)
    command = [sys.executable, SCRIPT.name, *flags.split()]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(process, run_dir, but=None):
    path = run_dir / "checkpoint.pt"
    while not path.exists() or path.stat().st_mtime_ns == but:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    return path.stat().st_mtime_ns


def test_killed_and_resumed_is_the_same(cartpole, tmp_path):
    """Killed twice, some time after a new checkpoint; the replay is resumed, too."""
    rng, command, seen = random.Random(0), f"{SHORT} --run-dir run", None
    for _ in range(2):
        process = start(tmp_path, command)
        seen = wait_for_checkpoint(process, tmp_path / "run", but=seen)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        command = "--resume run"
    run(tmp_path, command)
    check_same(tmp_path / "run", cartpole[0])


def test_ctrl_c_ends_it_and_the_checkpoint_stays(tmp_path):
    process = start(tmp_path, f"{SHORT} --total-timesteps 1000000 --run-dir run")
    wait_for_checkpoint(process, tmp_path / "run")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    assert load(tmp_path / "run")["progress"]["global_step"] > 0


def call_main(monkeypatch, flags):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags.split(" ")])
    muesli.main()


def test_ctrl_c_in_an_evaluation_ends_it(cartpole, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(muesli, "rollout", interrupt)
    with pytest.raises(SystemExit) as stop:
        call_main(monkeypatch, f"--evaluate {cartpole[0]}")
    assert stop.value.code == 130


def parsed(monkeypatch, flags):
    """The flags that main trains with."""
    calls = []
    monkeypatch.setattr(muesli, "train", lambda *args: calls.append(args))
    call_main(monkeypatch, flags)
    (args, checkpoint), = calls
    assert checkpoint is None
    return args


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "Acrobot-v1"])
def test_presets(env_id, monkeypatch):
    args, preset = parsed(monkeypatch, f"--env-id {env_id}"), muesli.PRESETS[env_id]
    assert args.preset == env_id and len(preset) >= 7
    assert {name: getattr(args, name) for name in preset} == preset
    args = parsed(monkeypatch, f"--env-id {env_id} --gamma 0.9")  # the command line wins
    assert args.gamma == 0.9 and args.value_min == preset["value_min"]
    bare = parsed(monkeypatch, f"--env-id {env_id} --preset none")
    assert bare == muesli.Args(env_id=env_id, preset="none")
    assert parsed(monkeypatch, f"--preset {env_id}").env_id == "CartPole-v1"


def test_cartpole_has_the_bare_defaults(monkeypatch):
    assert parsed(monkeypatch, "--seed 1") == muesli.Args(preset="none")
    assert parsed(monkeypatch, "--seed 1").stop_early


def test_keyword_arguments_of_the_environment(tmp_path):
    envs = muesli.make_envs(small_args(env_id="LunarLander-v3", env_kwargs='{"gravity": -3.5}'), 1)
    assert envs.unwrapped.envs[0].unwrapped.gravity == -3.5


def unboxed(text):
    """Text in tyro's boxes on one line."""
    return re.sub(r"[\s│╭╮╰╯─]+|-{5,}", " ", text)


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id CartPol-v1", "CartPole"),
    ("--env-id Pendulum-v1", "Discrete actions"),
    ("--env-id MuesliForever-v0 --capture-video", "MuesliForever-v0: NotImplementedError"),
    ("--gamma 1.5", "gamma = 1.5 is not in range: 0 to 1"),
    ("--num-envs 0", "num_envs = 0 is not in range: 1"),
    ("--learning-rate nan", "learning_rate = nan is not in range"),
    ("--seed -1", "seed = -1 is not in range"),
    ("--value-min 1 --value-max 2", "value_min = 1.0 is not in range"),
    ("--value-min -2000 --value-max -1", "value_max = -1.0 is not in range"),
    ("--value-max inf", "value_max = inf is not in range"),
    ("--prior-behavior 0.9 --prior-uniform 0.9", "prior_behavior = 0.9 is not in range"),
    ("--norm-adv-decay 1", "norm_adv_decay = 1.0 is not in range"),
    ("--buffer-size 100", "one sequence takes 176 steps"),
    ("--device quantum", "device quantum"),
    ("--preset Acrobat-v1", "preset Acrobat-v1 is none of none, Acrobot-v1"),
    ("--resume nowhere", "'nowhere' holds no run"),
    ("--resume ", "'' holds no run"),
    ("--evaluate ", "'' holds no run"),
])  # fmt: skip
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        call_main(monkeypatch, flags)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and list(tmp_path.iterdir()) == []
    assert words in unboxed(err)


def not_finite(name):
    def spoil(checkpoint):
        checkpoint["opt"][name][0] = math.nan
    return spoil


def other_env(checkpoint):
    checkpoint["args"]["env_id"] = "Acrobot-v1"


def other_flags(checkpoint):
    checkpoint["args"]["unknown"] = 1


@pytest.mark.parametrize(("spoil", "flags", "words"), [
    (not_finite("params"), "--evaluate run", "the checkpoint's weights are not finite"),
    (not_finite("target"), "--evaluate run", "the checkpoint's weights are not finite"),
    (not_finite("target"), "--resume run", "the checkpoint's weights are not finite"),
    (other_env, "--resume run", "does not fit Acrobot-v1"),
    (other_flags, "--resume run", "holds no run of this script"),
    (None, "--resume run --num-envs 4", "num_envs and buffer_size of a run cannot change"),
    (None, "--resume run --buffer-size 1000", "num_envs and buffer_size of a run cannot change"),
    (None, "--run-dir run", "File exists"),
])  # fmt: skip
def test_bad_run_folder(spoil, flags, words, cartpole, tmp_path, monkeypatch, capsys):
    shutil.copytree(cartpole[0], tmp_path / "run")
    if spoil:
        checkpoint = load(tmp_path / "run")
        spoil(checkpoint)
        torch.save(checkpoint, tmp_path / "run" / "checkpoint.pt")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        call_main(monkeypatch, flags)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and words in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_targets_beyond_the_support_are_said_once(tmp_path, capsys):
    _, rows, _ = trained(tmp_path / "run", env_id="MuesliForever-v0", value_max=2, total_timesteps=2500)
    assert float(rows[-1]["clipped_targets"]) > 0.1
    assert capsys.readouterr().out.count("targets beyond value_min or value_max are clipped") == 1


def test_device_auto():
    device = muesli.set_up_device(small_args(device="auto"))
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
