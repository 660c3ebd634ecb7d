"""Muesli: its formulas against closed forms, its invariants, probe environments, the command line."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from probes import Chain, Forever, Probe
from test_cli import read_metrics, unboxed
from test_resume import check_resume_only_evaluates, check_same, kill_at_first_checkpoint

import muesli_cartpole as muesli

SCRIPT = Path(__file__).parent.parent / "muesli_cartpole.py"
SMALL = {"num_envs": 4, "hidden_size": 32, "batch_size": 8, "seq_len": 8, "unroll_steps": 3, "eval_every": 0,
         "learning_starts": 100, "eval_episodes": 5}
gym.register("MuesliChain-v0", Chain)
gym.register("MuesliForever-v0", Forever, max_episode_steps=30)


def small_args(**flags):
    return muesli.Args(**SMALL | flags)


def played(steps=60, **flags):
    """A run that has played `steps` steps in each environment, without learning."""
    args = small_args(train_frequency=steps, **flags)
    envs, agent, opt, replay = muesli.build(args, None, torch.device("cpu"))
    stream = muesli.restart(envs, agent, 0)
    at = muesli.SimpleNamespace(iteration=0)
    count, episodes = muesli.collect(envs, agent, replay, stream, at)
    return agent, opt, replay, stream, count, episodes


def no_sums():
    return torch.zeros(len(muesli.METRICS) + 1)


def sample_window(agent, replay):
    args = agent.args
    return replay.sample(args.batch_size, args.num_newest, args.window)


# ----------------------------------------------------------------------------------------- values, categories


def test_compress_has_its_inverse_and_known_values():
    x = torch.tensor([-300.0, -1.0, 0.0, 0.01, 1.0, 100.0, 500.0], dtype=torch.float64)
    torch.testing.assert_close(muesli.expand(muesli.compress(x)), x)
    assert muesli.compress(torch.tensor(100.0)).item() == pytest.approx(math.sqrt(101) - 1 + 0.1)


def test_two_hot_has_the_mean_it_is_given():
    support = torch.linspace(-2, 3, 11)
    x = torch.tensor([-2.0, -1.9, 0.0, 0.3, 2.99, 3.0])
    weights = muesli.two_hot(x, support)
    torch.testing.assert_close(weights @ support, x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6))
    assert ((weights > 1e-6).sum(-1) <= 2).all()
    edges = muesli.two_hot(torch.tensor([-9.0, 9.0]), support)  # beyond the support: its ends
    torch.testing.assert_close(edges, torch.eye(11)[[0, 10]])


def test_a_head_tells_what_it_was_taught():
    agent, *_ = played(1)
    value = torch.tensor([-1.5, 0.0, 37.0, 99.0])
    logits = (muesli.two_hot(muesli.compress(value), agent.support) + 1e-12).log()
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


def loss_parts(logits, action, behaviour, advantages, **flags):
    """The policy gradient's loss alone, at the roots of windows of one position and one unrolled step."""
    others = dict.fromkeys(("cmpo_coef", "model_coef", "value_coef", "reward_coef"), 0.0)
    args = small_args(seq_len=1, unroll_steps=1, **others, **flags)
    agent = muesli.Agent(1, gym.spaces.Discrete(logits.shape[-1]), args)
    n, zeros = len(action), torch.zeros(3, len(action))
    window = {"actions": action.expand(3, n), "behaviour": behaviour.expand(3, *behaviour.shape),
              "rewards": zeros, "last": zeros, "terminal": zeros}
    prior = behaviour.expand(3, *behaviour.shape)
    targets = {"policy": prior, "prior": prior, "values": zeros[:2], "advantages": advantages.expand(2, n)}
    heads = torch.zeros(2, 1, n, args.num_bins)
    outputs = (torch.stack([logits.unsqueeze(0), torch.zeros(1, *logits.shape)]), heads, heads)
    return muesli.muesli_loss(outputs, agent, window, targets)


@pytest.mark.parametrize("detach_ratio", [True, False])
def test_every_sample_on_policy_has_a_gradient(detach_ratio):
    """Not so if the gradient goes through the clip: float noise alone puts ratios above 1."""
    logits = torch.randn(1000, 3, requires_grad=True)
    behaviour = logits.detach().double().softmax(-1).float()  # the same policy, rounded differently
    action = behaviour.multinomial(1).squeeze(1)
    loss, _ = loss_parts(logits, action, behaviour, torch.ones(1000), detach_ratio=detach_ratio)
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
    behaviour = torch.tensor([[0.25, 0.75], [1.0, 0.0]])  # ratios 2 and 0.5 of action 0
    action = torch.zeros(2, dtype=torch.long)
    loss, metrics = loss_parts(logits, action, behaviour, torch.tensor([advantage] * 2))
    loss.backward()
    assert metrics[0].item() == pytest.approx(advantage * math.log(2) * (1 + 0.5) / 2)
    torch.testing.assert_close(logits.grad[:, 0], torch.tensor([-0.25, -0.125]) * advantage)


# ----------------------------------------------------------------------------------------------- episode ends


@pytest.mark.parametrize("part", ["cmpo_coef", "model_coef"])
def test_policies_are_pulled_towards_their_targets(part):
    """The gradient of a cross-entropy: policy minus target, over the number of samples."""
    coefs = dict.fromkeys(("pg_coef", "cmpo_coef", "model_coef", "value_coef", "reward_coef"), 0.0)
    args = small_args(seq_len=1, unroll_steps=2, **coefs | {part: 1.0})
    agent, zeros = muesli.Agent(1, gym.spaces.Discrete(3), args), torch.zeros(4, 5)
    logits = torch.randn(3, 1, 5, 3, requires_grad=True)
    target = torch.randn(4, 5, 3).softmax(-1)
    window = dict.fromkeys(("rewards", "last", "terminal"), zeros)
    window |= {"actions": zeros.long(), "behaviour": target}
    targets = {"policy": target, "prior": target, "values": zeros[:3], "advantages": zeros[:3]}
    heads = torch.zeros(3, 1, 5, args.num_bins)
    muesli.muesli_loss((logits, heads, heads), agent, window, targets)[0].backward()
    expected = logits.detach().softmax(-1)[:, 0] - target[:3]
    steps = slice(0, 1) if part == "cmpo_coef" else slice(1, 3)
    torch.testing.assert_close(logits.grad[steps, 0], expected[steps] / (5 * len(expected[steps])))
    assert logits.grad.count_nonzero() == expected[steps].numel()


def test_targets_and_actions_are_the_prior_s():
    agent, opt, replay, stream, *_ = played()
    window = sample_window(agent, replay)
    results = []
    for _ in range(2):
        agent.moment.zero_()
        results.append({**muesli.make_targets(agent, window), "acting": agent.policy(stream.obs)})
        opt["params"].normal_()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_traces_are_cut_where_the_prior_acts_otherwise():
    """Returns look beyond the next state as far as the prior would have done what was done."""
    agent, _, replay, *_ = played(retrace_lambda=1.0, prior_behaviour=0.0)
    window = sample_window(agent, replay)
    action = window["actions"].unsqueeze(-1)  # which the behaviour policy was sure to do, the prior not
    window["behaviour"] = torch.zeros_like(window["behaviour"]).scatter_(-1, action, 1.0)
    more = window | {"rewards": window["rewards"] + 1}
    more["rewards"][0] -= 1
    less, more = (muesli.make_targets(agent, rows)["values"][0] for rows in (window, more))
    alive = (window["last"][:2] == 0).all(0)
    effect = (more - less)[alive]  # of 1 more in 20 later steps, at ratios of about 0.5
    assert 0.8 < effect.mean() < 1.2


def test_masks_by_hand():
    """Three steps; column 0 goes on, 1 is cut after its first action, 2 ends there, 3 after two."""
    last = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).float()
    terminal = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).float()
    real, absorbed, passed = muesli.episode_masks(last, terminal)
    assert real.T.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert absorbed.T.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert passed.T.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("terminal", [0.0, 1.0])
def test_nothing_is_learned_from_beyond_an_episode(terminal):
    """Roots before, on and, spoiled, behind an episode's end: the last change nothing for the others."""
    agent, _, replay, *_ = played(seq_len=3, unroll_steps=5, batch_size=1, scale_adv=False)
    window = {name: x[:, :1].clone() for name, x in sample_window(agent, replay).items()}
    window["last"].zero_()[2], window["terminal"].zero_()[2] = 1, terminal
    window["rewards"][2] = 0  # as the environments give it there
    results = []
    for spoil in (False, True):
        if spoil:  # the next episode, but for the actions, which a model may well try in an absorbing state
            for name in ("obs", "rewards"):
                window[name][3:] += 5
            window["behaviour"][3:] = window["behaviour"][3:].flip(-1)
        targets = muesli.make_targets(agent, window)
        actions = torch.stack([window["actions"][k : k + 3] for k in range(5)])
        results.append(muesli.muesli_loss(agent.online(window["obs"][:3], actions), agent, window, targets))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_terminal_state_is_worth_nothing_and_a_cut_one_its_value():
    agent, _, replay, *_ = played(seq_len=1, unroll_steps=1, batch_size=1, scale_adv=False)
    window = {name: x[:, :1].clone() for name, x in sample_window(agent, replay).items()}
    window["rewards"][0], window["last"].zero_()[1] = 3, 1
    window["terminal"].zero_()[1] = 1
    assert muesli.make_targets(agent, window)["values"][0].item() == pytest.approx(3)
    window["terminal"].zero_()
    assert muesli.make_targets(agent, window)["values"][0].item() > 3 + 1  # the untrained value is positive


# ----------------------------------------------------------------------------------------- replay, collection


def test_replay_holds_distinct_episodes_in_order():
    _, _, replay, _, count, episodes = played(400)
    rows, env = replay.rows, 0
    assert count == 4 * 400 - int(rows["last"][:400].sum()) and len(episodes) >= 50
    ends = [-1, *rows["last"][:400, env].nonzero().flatten().tolist()]
    starts = [rows["obs"][begin + 1, env] for begin in ends[:-1]]
    assert len({tuple(obs.tolist()) for obs in starts}) == len(starts) > 10
    for begin, end in pairwise(ends):  # CartPole earns 1 a step; its end earns nothing
        assert rows["rewards"][begin + 1 : end, env].eq(1).all() and rows["rewards"][end, env] == 0
        assert rows["obs"][begin + 1 : end + 1, env].diff(dim=0).abs().max() < 1  # no reset inside
        final = rows["obs"][end, env]
        assert rows["terminal"][end, env] == 1 and (final[0].abs() > 2.4 or final[2].abs() > 0.2)


def test_windows_are_consecutive_also_where_the_ring_closes():
    replay = muesli.Replay(10, 2, 1, 2, "cpu")
    for i in range(25):
        replay.add(obs=[[i], [100 + i]], actions=0, rewards=i, behaviour=0.5, last=0, terminal=0)
    window = replay.sample(200, 3, 4)
    steps = window["rewards"]
    assert steps.shape == (4, 200) and (steps.diff(dim=0) == 1).all()
    assert steps.min() == 15 and steps.max() == 24 and (steps[-1, :3] == 24).all()
    assert set(window["obs"][0, :2, 0].tolist()) == {21, 121}  # the newest of each environment
    assert len(steps[0].unique()) == 7


def test_a_time_limit_is_no_terminal_state():
    _, _, replay, *_ = played(100, env_id="MuesliForever-v0")
    rows = replay.rows
    assert rows["last"][:100].nonzero()[:, 0].tolist() == [30] * 4 + [61] * 4 + [92] * 4
    assert rows["terminal"].sum() == 0


def test_a_cut_ends_what_goes_on():
    _, _, replay, stream, *_ = played(7)
    replay.cut(stream)
    assert replay.size == 8 and (replay.rows["last"][7] == 1).all()
    torch.testing.assert_close(replay.rows["obs"][7], torch.as_tensor(stream.obs))
    torch.testing.assert_close(replay.rows["behaviour"][7].sum(-1), torch.ones(4))  # it is part of the prior


def test_a_restored_replay_goes_on_where_it_was():
    one, two = (muesli.Replay(10, 2, 1, 2, "cpu") for _ in range(2))
    for i in range(23):
        one.add(obs=[[i], [i]], actions=0, rewards=i, behaviour=0.5, last=0, terminal=0)
    two.load_state_dict(one.state_dict())
    for replay in (one, two):
        replay.add(obs=[[23], [23]], actions=0, rewards=23, behaviour=0.5, last=0, terminal=0)
        torch.manual_seed(0)
        replay.window = replay.sample(50, 5, 4)["rewards"]
    assert torch.equal(one.window, two.window) and one.window.min() == 14 and one.window.max() == 23


# -------------------------------------------------------------------------------------------- flags, learning


@pytest.mark.parametrize("flags", [
    {"cmpo": "sampled"}, {"cmpo_coef": 0.0}, {"pg_coef": 0.0}, {"model_coef": 0.0}, {"retrace": False},
    {"scale_adv": False}, {"correct_value_target": True}, {"baseline": "q"}, {"clip_update": 0.1},
    {"weight_decay": 0.1}, {"retrace_lambda": 0.5}, {"gamma": 0.9}, {"cmpo_clip": 0.1},
    {"prior_behaviour": 0.5},
], ids=lambda flags: next(iter(flags)))  # fmt: skip
def test_each_flag_changes_what_is_learned(flags):
    results = []
    for changes in ({}, flags):
        agent, opt, replay, *_ = played(60)
        agent.args = small_args(**changes)
        torch.manual_seed(0)
        opt["prior"].copy_(opt["params"].normal_(std=0.5))  # advantages that reach the clip
        window = sample_window(agent, replay)
        sums = no_sums()
        for _ in range(4):
            muesli.train_step(agent, opt, window, torch.tensor(1e-2), sums)
        results.append(opt["params"].clone())
    assert results[0].isfinite().all() and results[1].isfinite().all()
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_an_update_moves_each_weight_at_most_by_the_learning_rate_and_the_prior_follows():
    agent, opt, replay, *_ = played(60)
    before = {name: opt[name].clone() for name in ("params", "prior")}
    muesli.train_step(agent, opt, sample_window(agent, replay), torch.tensor(1e-2), no_sums())
    step = opt["params"] - before["params"]
    assert step.abs().max() == pytest.approx(1e-2, rel=1e-3)  # Adam's first step is its sign
    moved = opt["prior"] - before["prior"]
    torch.testing.assert_close(moved, agent.args.target_rate * step, rtol=1e-3, atol=1e-6)
    assert agent.prior.policy.weight.data_ptr() != agent.online.policy.weight.data_ptr()
    torch.testing.assert_close(torch.nn.utils.parameters_to_vector(agent.prior.parameters()), opt["prior"])


def test_adamw_is_that_of_pytorch():
    args = small_args(weight_decay=0.01, clip_update=0.0)
    weight = torch.nn.Parameter(torch.randn(50))
    opt = {"params": weight.detach().clone(), "exp_avg": torch.zeros(50), "exp_avg_sq": torch.zeros(50),
           "bias": torch.zeros(2)}
    reference = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.01, eps=args.adam_eps)
    for _ in range(20):
        weight.grad = torch.randn(50)
        muesli.adamw_step(opt, weight.grad, 0.01, args)
        reference.step()
    torch.testing.assert_close(opt["params"], weight.detach(), rtol=1e-4, atol=1e-5)


def test_second_moment_is_bias_corrected_and_keeps_the_mean():
    agent, _, replay, *_ = played(60)
    window = sample_window(agent, replay)
    raw = muesli.make_targets(agent, window)["advantages"]
    valid = 1 - window["last"][:8]
    scaled = (raw[:8].square() * valid).sum() / valid.sum()
    assert scaled.item() == pytest.approx(1, rel=1e-4)  # after one update the estimate is that batch's
    first = agent.moment[0].item() / 0.01
    other = sample_window(agent, replay)
    muesli.make_targets(agent, other | {"rewards": 3 * other["rewards"]})
    second = (agent.moment[0].item() - 0.99 * 0.01 * first) / 0.01
    assert agent.moment[1].item() == pytest.approx(1 - 0.99**2) and second > first


def test_solved_takes_two_in_a_row():
    assert muesli.solved_at([(1, 9), (2, 1), (3, 9)], 5) is None
    assert muesli.solved_at([(1, 9), (2, 1), (3, 5), (4, 6)], 5) == 3
    assert muesli.solved_at([(1, 9), (2, 9)], None) is None


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
    assert muesli.evaluate(agent, True, episodes=3).tolist() == [6, 6, 6]
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
    args = small_args(run_dir=str(run_dir), **flags)
    summary = muesli.train(args)
    _, agent, _, replay = muesli.build(args, muesli.load_checkpoint(run_dir), torch.device("cpu"))
    return agent, replay, summary


@pytest.mark.parametrize("dynamics", ["residual", "lstm"])
def test_value_of_a_chain(tmp_path, dynamics):
    agent, *_ = trained(tmp_path / "run", env_id="MuesliChain-v0", gamma=0.5, value_min=-1, value_max=2,
                        learning_rate=3e-3, total_timesteps=6000, dynamics=dynamics)
    with torch.no_grad():
        network = agent.prior
        _, value, reward = network(torch.eye(5), torch.zeros(1, 5, dtype=torch.long))
    torch.testing.assert_close(agent.scalar(value[0]), 0.5 ** torch.arange(4.0, -1, -1), atol=0.06, rtol=0)
    torch.testing.assert_close(agent.scalar(reward[1]), torch.eye(5)[4], atol=0.06, rtol=0)
    # After the last step the model is in an absorbing state.
    expected = torch.tensor([0.125, 0.25, 0.5, 1, 0])
    torch.testing.assert_close(agent.scalar(value[1]), expected, atol=0.06, rtol=0)


def test_value_beyond_a_time_limit(tmp_path):
    agent, *_ = trained(tmp_path / "run", env_id="MuesliForever-v0", gamma=0.9, value_max=20,
                        learning_rate=3e-3, total_timesteps=8000)
    value = agent.scalar(agent.prior.predict(agent.prior.represent(torch.zeros(1, 1)))[1])
    assert value.item() == pytest.approx(10, abs=1)  # with the limit as death at most 9.6, on average 6.9


# ----------------------------------------------------------------------------------------------- command line

SHORT = """--num-envs 2 --train-frequency 8 --batch-size 4 --hidden-size 16 --total-timesteps 2000
           --learning-starts 100 --eval-every 1000 --solve-episodes 3 --eval-episodes 3
           --checkpoint-every 10"""


def run(folder, flags, code=0):
    """Run the script, copied alone into that folder, and check its exit status."""
    shutil.copy(SCRIPT, folder)
    command = [sys.executable, SCRIPT.name, *flags.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muesli")
    return folder / "run", run(folder, f"{SHORT} --run-dir run").stdout


def test_short_run(cartpole):
    run_dir, printed = cartpole
    rows, summary = read_metrics(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert int(rows[-1]["global_step"]) == summary["global_step"] >= 2000
    assert all(math.isfinite(float(row[name])) for row in rows for name in muesli.METRICS)
    assert summary["solved_at"] is None and "greedy episodes return" in printed
    assert np.isfinite([summary[name] for name in ("eval_mean", "eval_sampled_mean", "sps")]).all()
    assert float(rows[-1]["clipped_targets"]) == 0
    assert {p.name for p in run_dir.iterdir()} >= {"args.json", "checkpoint.pt", "summary.json"}


def test_evaluate_repeats_the_evaluation(cartpole):
    run_dir, printed = cartpole
    lines = [line for line in printed.splitlines() if "episodes: return" in line]
    assert len(lines) == 2
    assert run(run_dir.parent, "--evaluate run").stdout.splitlines() == lines


def test_a_low_bar_is_reached_and_said(tmp_path):
    printed = run(tmp_path, f"{SHORT} --eval-every 300 --stop-return 5 --run-dir run").stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 300 <= summary["solved_at"] < 330 and 600 <= summary["global_step"] < 630
    assert f"solved at {summary['solved_at']} steps" in printed
    assert "as it is solved" in run(tmp_path, "--resume run", code=2).stderr
    run(tmp_path, "--resume run --no-stop-early --total-timesteps 1000")
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert after["global_step"] >= 1000 and after["solved_at"] == summary["solved_at"]


def test_killed_while_it_was_evaluated(cartpole, tmp_path):
    check_resume_only_evaluates(cartpole[0], tmp_path, partial(run, tmp_path))


def test_killed_and_resumed_is_the_same(cartpole, tmp_path):
    kill_at_first_checkpoint(tmp_path, SHORT, SCRIPT)
    run(tmp_path, "--resume run")
    check_same(tmp_path / "run", cartpole[0], parts=("agent", "opt", "replay"))


def test_ctrl_c_saves(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    command = [sys.executable, SCRIPT.name, *f"{SHORT} --total-timesteps 1000000 --run-dir run".split()]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume run" in out
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["at"]
    assert saved["global_step"] == int(read_metrics(tmp_path / "run")[-1]["global_step"])


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id CartPol-v1", "CartPole-v1"),
    ("--env-id Pendulum-v1", "are not Discrete"),
    ("--gamma 1.5", "--gamma 1.5 is out of range: give 0 to 1"),
    ("--num-envs 0", "--num-envs 0 is out of range: give 1"),
    ("--learning-rate nan", "--learning-rate nan is out of range"),
    ("--seed -1", "--seed -1 is out of range"),
    ("--value-min 3 --value-max 2", "--value-min below --value-max"),
    ("--value-max inf", "both finite"),
    ("--prior-behaviour 0.9 --prior-uniform 0.9", "give at most 1 together"),
    ("--scale-adv-decay 1", "--scale-adv-decay below 1"),
    ("--resume a --evaluate b", "not both"),
    ("--replay-size 100", "--replay-size 100 holds no window of 22 steps of 8 environments: give at"),
    ("--device quantum", "--device quantum is not there"),
    ("--resume nowhere", "no checkpoint nowhere/checkpoint.pt"),
])  # fmt: skip
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags.split()])
    with pytest.raises(SystemExit) as stop:
        muesli.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and list(tmp_path.iterdir()) == []
    assert words in unboxed(err)


def test_compiled_step_agrees_with_eager():
    results = []
    for step in (muesli.train_step, torch.compile(muesli.train_step, backend="aot_eager")):
        agent, opt, replay, *_ = played(60, unroll_steps=1, seq_len=2)
        torch.manual_seed(0)
        step(agent, opt, sample_window(agent, replay), torch.tensor(1e-3), no_sums())
        results.append(opt["exp_avg"])
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-6)
