"""Muesli: its formulas against plain loops and closed forms, its replay, what it learns, its evaluations."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_metrics
from gymnasium.spaces import Box, Discrete
from probes import Chain, Forever, Probe
from torch.nn.functional import kl_div

import muesli_cartpole as muesli

CPU = torch.device("cpu")
small_args, trained = partial(conftest.small_args, script=muesli), partial(conftest.trained, script=muesli)

class Choice(Chain):
    """Bytes, and actions 3 and 4, of which the last step pays 1 for action 4."""

    observation_space, action_space = Box(0, 1, (5,), np.uint8), Discrete(2, start=3)

    def observe(self):
        return super().observe().astype(np.uint8)

    def reward(self, action):
        return self.t == 4 and action == 4

class Planes(Probe):
    """Five steps; the action that pays is the plane with a pixel."""

    observation_space, length = Box(0, 1, (4, 5, 2), bool), 5

    def observe(self):
        obs = np.zeros((4, 5, 2), bool)
        obs[3, self.t % 5, int(self.t in (1, 2, 4))] = True
        return obs

    def reward(self, action):
        return self.observe().any((0, 1))[action]

gym.register("MuesliChoice-v0", Choice)
gym.register("MuesliPlanes-v0", Planes)
gym.register("MuesliForever-v0", Forever)

def small_agent(args):
    """An agent whose online and target weights differ, and are far from the initial ones."""
    spaces = {"single_observation_space": Box(-1, 1, (4,)), "single_action_space": Discrete(3)}
    agent, opt = muesli.make_agent(SimpleNamespace(**spaces), args, CPU, None)
    for name in ("params", "target"):
        opt[name].add_(torch.randn_like(opt[name]), alpha=0.2)
    return agent, opt

def random_batch(args):
    """Rows (W, B, ...) of any kind: a fifth end an episode, half of those by a time limit."""
    shape = args.window, args.batch_size
    last = (torch.rand(shape) < 0.2).float()
    return {"obs": torch.randn(*shape, 4), "actions": torch.randint(3, shape), "rewards": torch.randn(shape),
            "behavior": torch.randn(*shape, 3).softmax(-1), "last": last,
            "terminal": last * (torch.rand(shape) < 0.5)}

def playing(env_id, **flags):
    """Environments, agent and env_state of a new run."""
    args = small_args(env_id=env_id, **flags)
    envs = muesli.make_envs(args, args.num_envs)
    agent, _ = muesli.make_agent(envs, args, CPU, None)
    return envs, agent, muesli.reset_envs(envs, args.seed, 0, 0)

def test_signed_hyperbolic_has_its_inverse_and_known_values():
    x = torch.tensor([-300.0, -1.0, 0.0, 0.01, 1.0, 100.0, 500.0], dtype=torch.float64)
    torch.testing.assert_close(muesli.signed_parabolic(muesli.signed_hyperbolic(x)), x)
    assert muesli.signed_hyperbolic(torch.tensor(-100.0)).item() == pytest.approx(1 - math.sqrt(101) - 0.1)

def test_two_hot_has_the_mean_it_is_given():
    support = torch.linspace(-2, 3, 11)
    x = torch.tensor([-9.0, -2.0, -1.9, 0.0, 0.3, 2.99, 9.0])
    weights = muesli.two_hot(x, support)
    torch.testing.assert_close(weights @ support, x.clamp(-2, 3))  # beyond the support: its ends
    torch.testing.assert_close(weights.sum(-1), torch.ones(7))
    assert ((weights > 1e-6).sum(-1) <= 2).all() and (weights >= 0).all()

@pytest.mark.parametrize(("low", "high", "bins"), [(-2, 220, 51), (-120, 2, 51), (0, 1, 3), (-7, 0.001, 10)])
def test_support_holds_its_bounds_and_zero(low, high, bins):
    agent, _ = small_agent(small_args(value_min=low, value_max=high, num_bins=bins))
    support = agent.support
    assert len(support) == bins and (support == 0).sum() == 1
    torch.testing.assert_close(support.diff(), support.diff()[:1].expand(bins - 1), rtol=1e-4, atol=1e-6)
    ends = muesli.signed_parabolic(support[[0, -1]])
    assert ends[0] <= low + 1e-3 and ends[1] >= high - 1e-3
    value = torch.tensor([low, 0, 0.4 * low + 0.6 * high])  # a head that is right tells these
    logits = (muesli.two_hot(muesli.signed_hyperbolic(value), support) + 1e-12).log()
    torch.testing.assert_close(agent.scalar(logits), value, rtol=1e-3, atol=1e-3)

@pytest.mark.parametrize("clip", [0.5, 1.0, 3.0])
def test_cmpo_moves_at_most_tanh_of_half_the_clip(clip):
    """It does: two actions, clipped on either side, at the worst prior."""
    share = 1 / (1 + math.exp(clip))
    prior, advantages = torch.tensor([share, 1 - share]), torch.tensor([9.0, -9.0])
    change = muesli.cmpo(prior, advantages, small_args(cmpo_clip=clip)) - prior
    assert change.tolist() == pytest.approx([math.tanh(clip / 2), -math.tanh(clip / 2)], rel=1e-5)

def test_sampled_cmpo_leaves_one_out():
    """A prior that always takes one action: N equal samples of gain g have weight g N / (1 + (N - 1) g)."""
    args, gain = small_args(cmpo="sampled", cmpo_samples=4), math.exp(0.5)
    weights = muesli.cmpo(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, -1.0]]), args)
    torch.testing.assert_close(weights, torch.tensor([[4 * gain / (1 + 3 * gain), 0.0]]))

def test_sampled_cmpo_tends_to_the_exact_one():
    prior, advantages = torch.randn(20, 4).softmax(-1), torch.randn(20, 4)
    exact = muesli.cmpo(prior, advantages, small_args())
    few, many = ((muesli.cmpo(prior, advantages, small_args(cmpo="sampled", cmpo_samples=n)) - exact).abs()
                 for n in (16, 4096))
    assert many.mean() < 0.01 and many.mean() < few.mean() / 4

@pytest.mark.parametrize("flags", [
    {}, {"retrace_lambda": 0.5}, {"retrace": False}, {"prior_behavior": 0.4}, {"prior_uniform": 0.4},
    {"norm_adv_decay": 0.5}, {"norm_adv": False}, {"gamma": 0.7, "cmpo_clip": 3.0},
], ids=lambda flags: next(iter(flags), "default"))  # fmt: skip
def test_targets_equal_a_plain_loop(flags):
    """One row at a time, from what the target network predicts."""
    args = small_args(value_min=-20.0, value_max=20.0, **flags)
    (agent, _), batch = small_agent(args), random_batch(args)
    rewards, behavior, actions = batch["rewards"], batch["behavior"], batch["actions"]
    assert not agent.adv_var.any()
    agent.adv_var.copy_(torch.tensor([0.1, 0.4]))  # second moment, bias correction
    results = muesli.make_targets(agent, batch)
    with torch.no_grad():
        policy, v_hat, q_hat = [], [], []
        for action in range(3):
            logits, value, reward = agent.target(batch["obs"], torch.full((1, *actions.shape), action))
            policy, v_hat = logits[0].softmax(-1), agent.scalar(value[0])
            q_hat.append(agent.scalar(reward[0]) + args.gamma * agent.scalar(value[1]))
        q_hat = torch.stack(q_hat, -1)
    prior = (1 - args.prior_behavior - args.prior_uniform) * policy
    prior = prior + args.prior_behavior * behavior + args.prior_uniform / 3

    def expected_return(t, b):
        """Of the action taken in row t."""
        if batch["terminal"][t + 1, b]:
            return rewards[t, b]
        follows = prior[t + 1, b] @ q_hat[t + 1, b]
        if batch["last"][t + 1, b] or t + 2 == args.window:  # a time limit, or the sequence ends
            return rewards[t, b] + args.gamma * follows
        later = expected_return(t + 1, b)
        if args.retrace:
            action = actions[t + 1, b]
            ratio = min(1, prior[t + 1, b, action] / behavior[t + 1, b, action])
            later = follows + args.retrace_lambda * ratio * (later - q_hat[t + 1, b, action])
        return rewards[t, b] + args.gamma * later

    grid = torch.zeros(args.window - 1, args.batch_size)
    for t, b in product(*map(range, grid.shape)):
        grid[t, b] = expected_return(t, b)
    advantages, alive = grid - v_hat[:-1], batch["last"][:8] == 0
    moment, decay = advantages[:8][alive].square().mean(), args.norm_adv_decay
    moment = (decay * 0.1 + (1 - decay) * moment) / (decay * 0.4 + 1 - decay)
    scale = moment.rsqrt() if args.norm_adv else 1.0
    gains = ((q_hat - v_hat[..., None]) * scale).clamp(-args.cmpo_clip, args.cmpo_clip).exp()
    assert gains.unique().numel() > 100
    unnormalized = prior * gains
    expected = {"pi_prior": prior, "pi_cmpo": unnormalized / unnormalized.sum(-1, keepdim=True),
                "returns": grid, "adv_hat": advantages * scale}
    for name, x in expected.items():
        torch.testing.assert_close(results[name], x, rtol=1e-3, atol=1e-4)

@pytest.mark.parametrize("detach_ratio", [True, False])
def test_losses_and_their_gradients_equal_a_plain_loop(detach_ratio):
    coefs = {"pg_coef": 2.0, "cmpo_coef": 3.0, "model_coef": 5.0, "value_coef": 7.0, "reward_coef": 11.0}
    args = small_args(detach_ratio=detach_ratio, **coefs)
    (agent, _), batch = small_agent(args), random_batch(args)
    K, L, B, W = args.unroll_steps, args.seq_len, args.batch_size, args.window
    targets = {"pi_cmpo": torch.randn(W, B, 3).softmax(-1), "pi_prior": torch.randn(W, B, 3).softmax(-1),
               "returns": 3 * torch.randn(W - 1, B), "adv_hat": torch.randn(W - 1, B)}
    shapes = (K + 1, L, B, 3), (K + 1, L, B, args.num_bins), (K, L, B, args.num_bins)
    outputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    loss, debug = muesli.muesli_loss(outputs, agent, batch, targets)

    policy, value, reward = (x.log_softmax(-1) for x in outputs)
    terms = {name: [] for name in muesli.LOSSES[:-1]}

    def learn(loss, logits, x):
        terms["clipped_targets"].append(torch.as_tensor(x < args.value_min or x > args.value_max).float())
        x = muesli.signed_hyperbolic(torch.as_tensor(x))
        terms[loss].append(kl_div(logits, muesli.two_hot(x, agent.support), reduction="sum"))

    for t, b in product(range(L), range(B)):
        if batch["last"][t, b]:  # no action is chosen there
            continue
        action, here = batch["actions"][t, b], policy[0, t, b]
        ratio = (here[action].exp() / batch["behavior"][t, b, action]).clamp(max=1)
        gain = ratio.detach() * here[action] if detach_ratio else ratio
        terms["policy_loss"].append(-gain * targets["adv_hat"][t, b])
        terms["cmpo_loss"].append(kl_div(here, targets["pi_cmpo"][t, b], reduction="sum"))
        terms["kl_to_prior"].append(kl_div(here, targets["pi_prior"][t, b], reduction="sum"))
        terms["entropy"].append(-(here.exp() * here).sum())
        end = None  # the step in which the episode ends
        for k in range(K + 1):
            if k and end is None:
                learn("reward_loss", reward[k - 1, t, b], batch["rewards"][t + k - 1, b])
            if end is None and batch["last"][t + k, b]:
                end = k
            if end is None:
                learn("value_loss", value[k, t, b], targets["returns"][t + k, b])
                if k:
                    target = targets["pi_cmpo"][t + k, b]
                    terms["model_loss"].append(kl_div(policy[k, t, b], target, reduction="sum"))
            elif batch["terminal"][t + end, b]:  # an absorbing state
                learn("value_loss", value[k, t, b], 0.0)
                if k > end:
                    learn("reward_loss", reward[k - 1, t, b], 0.0)

    means = {name: torch.stack(x).mean() for name, x in terms.items()}
    means["clipped_targets"] = torch.stack(terms["clipped_targets"]).sum() / (L * B * (2 * K + 1))
    assert means["clipped_targets"] > 0
    torch.testing.assert_close(dict(zip(means, debug, strict=True)), means)
    expected = sum(coef * x for coef, x in zip(coefs.values(), list(means.values())[:5], strict=True))
    gradients = [torch.autograd.grad(x, outputs) for x in (loss, expected)]
    torch.testing.assert_close(*gradients)

def test_adamw_is_that_of_pytorch():
    args = small_args(weight_decay=0.01, clip_update=0.0)
    weight, grads = torch.nn.Parameter(torch.randn(50)), torch.randn(20, 50)
    opt = {"params": weight.detach().clone(), "exp_avg": torch.zeros(50), "exp_avg_sq": torch.zeros(50),
           "bias": torch.zeros(2)}
    reference = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.01)
    for weight.grad in grads:
        muesli.adamw_step(opt, weight.grad, 0.01, args)
        reference.step()
    torch.testing.assert_close(opt["params"], weight.detach(), rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize(("clip", "moved"), [(0.0, 1.0), (0.4, 0.4)])
def test_an_update_moves_the_online_network_which_the_target_follows(clip, moved):
    args = small_args(clip_update=clip, tau=0.2)
    agent, opt = small_agent(args)
    before = {name: opt[name].clone() for name in ("params", "target")}
    losses = torch.zeros(len(muesli.LOSSES))
    muesli.train_step(agent, opt, random_batch(args), 1e-2, losses)
    step = opt["params"] - before["params"]
    assert step.abs().max() == pytest.approx(1e-2 * moved, rel=1e-2)  # Adam's first step is its sign
    torch.testing.assert_close(opt["target"], before["target"].lerp(opt["params"], 0.2))
    for network, name in ((agent.target, "target"), (agent.online, "params")):
        assert torch.equal(torch.nn.utils.parameters_to_vector(network.parameters()), opt[name])
    assert losses[-1].item() == pytest.approx(10 * opt["exp_avg"].norm().item(), rel=1e-3)

def test_planes_come_first_or_last():
    args, agents = small_args(encoder="cnn"), []
    for shape in ((4, 5, 2), (2, 4, 5)):
        spaces = {"single_observation_space": Box(0, 1, shape), "single_action_space": Discrete(3)}
        agents.append(muesli.make_agent(SimpleNamespace(**spaces), args, CPU, None)[0])
    obs = torch.rand(6, 3, 4, 5, 2)
    last, first = agents[0].target(obs, ()), agents[1].target(obs.movedim(-1, -3).contiguous(), ())
    assert all(torch.equal(x, y) for x, y in zip(last, first, strict=True))
    torch.testing.assert_close(agents[0].target(obs[2], ())[0], last[0][:, 2])
    shapes = {(5, 5, 5): True, (9, 9, 17): True, (17, 9, 9): False, (5, 4, 4): False, (6, 5, 7): False}
    assert {shape: muesli.Network(shape, 3, args).channels_last for shape in shapes} == shapes

def test_learns_from_planes(tmp_path):
    agent, _ = trained(tmp_path / "run", env_id="MuesliPlanes-v0", encoder="cnn", gamma=0.5, tau=0.1,
                       value_min=-1, value_max=5, learning_rate=5e-3, total_timesteps=1_500)
    assert muesli.play_episodes(agent, True, 0).mean() == 5
    rows = muesli.load_checkpoint(tmp_path / "run")[0]["rows"]
    assert rows["obs"].dtype == torch.bool and rows["obs"].shape[1:] == (4, 4, 5, 2)

@pytest.mark.parametrize(("env_id", "terminal"), [("Chain-v0", 1), ("Forever-v0", 0)])
def test_rows_of_a_rollout(env_id, terminal):
    """Episodes of five steps and a sixth row for what they led to, over two rollouts."""
    envs, agent, env_state = playing(env_id, train_frequency=10)
    parts = [muesli.rollout(envs, agent, env_state) for _ in range(2)]
    rows = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
    at = torch.arange(20).expand(4, 20).T % 6
    rewards = at == 4 if terminal else at < 5
    expected = {"obs": torch.eye(6, 5)[at] if terminal else torch.zeros(20, 4, 1), "rewards": rewards,
                "last": at == 5, "terminal": terminal * (at == 5)}
    for name, x in expected.items():
        assert torch.equal(rows[name], x.float()), name
    episode_return = rewards[:6, 0].sum().item()
    assert parts[0][1] + parts[1][1] == [(n, episode_return, 5) for _ in range(3) for n in range(4)]
    _, policy = agent.act(rows["obs"].flatten(0, 1), False)
    torch.testing.assert_close(rows["behavior"].flatten(0, 1), policy)

def test_actions_are_drawn_from_the_target_networks_policy():
    agent, _ = small_agent(small_args(prior_uniform=0.2))
    obs = torch.randn(1, 4)
    expected = agent.target(obs, ())[0][0].softmax(-1) * 0.8 + 0.2 / 3
    actions, policy = agent.act(obs.expand(20_000, 4), greedy=False)
    torch.testing.assert_close(policy, expected.expand(20_000, 3))
    torch.testing.assert_close(actions.bincount(minlength=3) / 20_000, expected[0], atol=0.015, rtol=0)
    assert (agent.act(obs.expand(20_000, 4), greedy=True)[0] == expected.argmax()).all()

def counting_replay(end, rows_at_once=1, capacity=10):
    """Two environments whose rewards count their rows; the second observes 100 more."""
    replay = muesli.Replay(capacity)
    for begin in range(0, end, rows_at_once):
        i = torch.arange(begin, begin + rows_at_once)[:, None]
        zeros = torch.zeros(rows_at_once, 2)
        replay.add({"obs": (i + torch.tensor([0, 100])).unsqueeze(-1), "rewards": zeros + i, "last": zeros})
    return replay

def window_args(batch_size, replay_share):
    """Sequences of four rows, two of them roots."""
    return small_args(batch_size=batch_size, replay_share=replay_share, seq_len=2, unroll_steps=1)

@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_sequences_are_consecutive_also_where_the_ring_closes(rows_at_once):
    replay = counting_replay(24, rows_at_once)
    batch = replay.sample(window_args(300, 0.99))
    steps = batch["rewards"]
    assert steps.shape == (4, 300) and (steps.diff(dim=0) == 1).all()
    assert torch.equal(batch["obs"][..., 0] % 100, steps.long())
    assert steps[0].unique().tolist() == list(range(14, 21))  # the newest ten rows, all of them
    assert (batch["obs"] >= 100).float().mean().item() == pytest.approx(0.5, abs=0.1)

@pytest.mark.parametrize(("share", "newest"), [(0.0, 16), (0.75, 4), (0.95, 1), (1.0, 0)])
def test_share_of_the_replay(share, newest):
    """The newest first, one per environment, the next ones L rows earlier: no sequence twice."""
    batch = counting_replay(1000, capacity=1000).sample(window_args(16, share))
    ends = batch["rewards"][-1]
    assert ends[:newest].tolist() == [999 - 2 * (i // 2) for i in range(newest)]
    assert len(batch["obs"][0, :newest].unique()) == newest
    assert (ends[newest:] < 999.5 - newest).all()
    if share == 0:  # there are just enough
        batch = counting_replay(11, capacity=40).sample(window_args(16, 0.0))
        assert len(batch["obs"][0].unique()) == 16

def test_a_checkpoint_cuts_episodes_like_a_time_limit_and_a_full_replay_is_resumed(tmp_path):
    """Rollouts of four steps, then a row for what they led to; the last 28 rows are kept."""
    flags = {"env_id": "Chain-v0", "checkpoint_every": 1, "train_frequency": 4, "buffer_size": 112,
             "anneal_lr": False}
    for total, run_dir in ((400, "whole"), (80, "parted")):
        muesli.train(small_args(run_dir=str(tmp_path / run_dir), total_timesteps=total, **flags))
    for total in (240, 400):
        checkpoint, args = muesli.load_checkpoint(tmp_path / "parted")
        args.total_timesteps, args.resume = total, str(tmp_path / "parted")
        muesli.train(args, checkpoint)
    one, two = (muesli.load_checkpoint(tmp_path / run_dir)[0] for run_dir in ("whole", "parted"))
    assert one["count"] == two["count"] == 125
    for part in ("rows", "opt", "agent"):
        torch.testing.assert_close(one[part], two[part], rtol=0, atol=0)
    row = torch.arange(125 - 28, 125)
    rows = {name: x[row % 28, 0] for name, x in one["rows"].items()}
    assert torch.equal(rows["obs"], torch.eye(5)[row % 5]) and not rows["terminal"].any()
    assert torch.equal(rows["last"], (row % 5 == 4).float()) and not rows["rewards"].any()
    assert rows["behavior"][row % 5 == 4].eq(0.5).all()  # it is part of the prior

def test_learns_values_and_what_actions_do(tmp_path):
    agent, _ = trained(tmp_path / "run", env_id="MuesliChoice-v0", gamma=0.5, tau=0.1,
                       value_min=-1, value_max=2, prior_uniform=0.1, learning_rate=5e-3, total_timesteps=3000)
    agent.args.prior_uniform = 0.9
    assert muesli.play_episodes(agent, True, 0).min() == 1 > muesli.play_episodes(agent, False, 0).mean()
    assert muesli.load_checkpoint(tmp_path / "run")[0]["rows"]["obs"].dtype == torch.uint8
    last_step = torch.eye(5).flip(1)[:3]  # action k of root 4 - k
    actions = torch.zeros(2, 3, 5, dtype=torch.long)
    actions[1] = last_step
    with torch.no_grad():
        (_, value, wrong), (_, _, right) = (agent.target(torch.eye(5), x) for x in actions)
    torch.testing.assert_close(agent.scalar(right), last_step, atol=0.2, rtol=0)
    assert agent.scalar(wrong).abs().max() < 0.5
    expected = 0.95 * 0.5 ** torch.arange(4.0, -1, -1)
    torch.testing.assert_close(agent.scalar(value[0]), expected, atol=0.15, rtol=0)
    assert abs(agent.scalar(value[1])[4]) < 0.1  # of the absorbing state after the last step

def evaluated(monkeypatch, run_dir, returns, train_step=lambda *_: None, **flags):
    """Summary of a run that learns nothing and whose evaluations find these returns, in turn."""
    results = iter(returns)
    monkeypatch.setattr(muesli, "play_episodes", lambda *_: np.full(5, next(results)))
    monkeypatch.setattr(muesli, "train_step", train_step)
    flags = {"env_id": "MuesliForever-v0", "total_timesteps": 400} | flags
    return muesli.train(small_args(run_dir=str(run_dir), **flags))

@pytest.mark.parametrize(("anneal_lr", "share"), [(True, 1.0), (False, 0.0)])
@pytest.mark.parametrize(("learning_starts", "first"), [(100, 104), (0, 48)])  # 12 rows are a sequence
def test_learning_rates_of_updates(learning_starts, first, anneal_lr, share, monkeypatch, tmp_path):
    rates = []
    evaluated(monkeypatch, tmp_path / "run", [0, 0], lambda *args: rates.append(args[3]),
              learning_rate=2.0, anneal_lr=anneal_lr, learning_starts=learning_starts)
    assert rates == pytest.approx(2 * (1 - share * np.arange(first, 401, 8) / 400))

def test_targets_beyond_the_support_are_said_once(monkeypatch, tmp_path, capsys):
    evaluated(monkeypatch, tmp_path / "run", [0, 0], lambda *args: args[-1].add_(0.5), total_timesteps=3000)
    assert capsys.readouterr().out.count("targets beyond value_min or value_max are clipped") == 1
    rows = read_metrics(tmp_path / "run")  # losses are means over updates
    assert [float(row["value_loss"]) for row in rows] == [0.5] * 3

@pytest.mark.parametrize(("flags", "returns", "solved_at", "steps"), [
    ({"env_id": "CartPole-v1", "total_timesteps": 900}, [500, 474, 475, 476], 300, 400),  # Gymnasium's 475
    ({"stop_return": 5.0}, [5, 5], 100, 200),
    ({"stop_return": 5.0, "stop_early": False}, [5, 5, 1, 9], 100, 400),
    ({"stop_return": 5.0}, [9, 1, 9, 1], None, 400),
    ({}, [1000] * 4, None, 400),  # without a threshold nothing is solved
])  # fmt: skip
def test_solved_takes_two_evaluations_in_a_row(flags, returns, solved_at, steps, monkeypatch, tmp_path):
    flags = {"eval_frequency": 100} | flags
    summary = evaluated(monkeypatch, tmp_path / "run", [*returns, 3.0, 2.0], **flags)
    assert summary["solved_at"] == pytest.approx(solved_at, abs=8) if solved_at else not summary["solved_at"]
    assert summary["global_step"] == pytest.approx(steps, abs=8)
    assert summary["eval_mean"] == 3 and summary["eval_sampled_mean"] == 2

def test_an_evaluation_leaves_the_training_as_it_is(tmp_path):
    results = [trained(tmp_path / str(every), total_timesteps=300, eval_frequency=every)[0].state_dict()
               for every in (0, 140)]
    torch.testing.assert_close(*results, rtol=0, atol=0)

def test_an_evaluation_plays_one_fresh_episode_each():
    _, agent, _ = playing("CartPole-v1", train_frequency=7)
    one, again, other = (muesli.play_episodes(agent, False, when) for when in (5, 5, 6))
    assert one.tolist() == again.tolist() != other.tolist() and len(set(one)) > 1
    _, agent, _ = playing("Forever-v0", train_frequency=7)  # a time limit is an end, too
    assert muesli.play_episodes(agent, True, 0).tolist() == [5] * 5
