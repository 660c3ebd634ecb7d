"""muesli_cartpole: its formulas against plain loops, its replay, what it learns, changes of it."""

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_events
from gymnasium.spaces import Box, Discrete
from probes import Chain, Masked

import muesli_cartpole as muesli

SMALL = {
    "num_envs": 4, "hidden_size": 32, "head_size": 16, "batch_size": 8, "seq_len": 8,
    "unroll_steps": 3, "eval_frequency": 0, "learning_starts": 100, "eval_episodes": 5,
    "total_timesteps": 400,
}  # fmt: skip
W = SMALL["seq_len"] + SMALL["unroll_steps"] + 1


def small_args(env_id="CartPole-v1", **flags):
    return muesli.Args(env_id=env_id, **SMALL | flags)


def small_agent(args, shape=(4,), num_actions=3):
    """An agent whose online and target weights differ, and are far from the initial ones."""
    torch.manual_seed(0)
    spaces = {
        "single_observation_space": Box(-1, 1, shape),
        "single_action_space": Discrete(num_actions),
    }
    agent = muesli.Agent(SimpleNamespace(**spaces), args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return agent


def random_batch(args):
    """Rows (W, B, ...): a fifth end an episode, half of those by a time limit."""
    shape = W, args.batch_size
    last = (torch.rand(shape) < 0.2).float()
    return {
        "obs": torch.randn(*shape, 4),
        "actions": torch.randint(3, shape),
        "rewards": torch.randn(shape),
        "behavior": torch.randn(*shape, 3).softmax(-1),
        "last": last,
        "terminal": last * (torch.rand(shape) < 0.5),
    }


# -------------------------------------------------------------------------- values as distributions


def test_signed_hyperbolic_and_its_inverse():
    x = torch.tensor([-300.0, -1.0, 0.0, 0.01, 1.0, 100.0, 500.0], dtype=torch.float64)
    torch.testing.assert_close(muesli.signed_parabolic(muesli.signed_hyperbolic(x)), x)
    small = torch.tensor([1e-3, -0.01, 0.5])  # in float32 without a difference that cancels
    again = muesli.signed_parabolic(muesli.signed_hyperbolic(small))
    torch.testing.assert_close(again, small, rtol=5e-4, atol=0)
    value = muesli.signed_hyperbolic(torch.tensor(-100.0)).item()
    assert value == pytest.approx(1 - math.sqrt(101) - 0.1)


def test_two_hot_mean():
    support = torch.linspace(-2, 3, 11)
    x = torch.tensor([-9.0, -2.0, -1.9, 0.0, 0.3, 2.99, 9.0])
    weights = muesli.two_hot(x, support)
    torch.testing.assert_close(weights @ support, x.clamp(-2, 3))  # beyond the support: its ends
    torch.testing.assert_close(weights.sum(-1), torch.ones(7))
    assert ((weights > 1e-6).sum(-1) <= 2).all() and (weights >= 0).all()


@pytest.mark.parametrize(
    ("low", "high", "bins"), [(-2, 220, 51), (-220, 220, 51), (-120, 2, 51), (0, 1, 3)]
)
def test_support_holds_bounds_and_zero(low, high, bins):
    agent = small_agent(small_args(value_min=low, value_max=high, num_bins=bins))
    assert len(agent.support) == bins and (agent.support == 0).sum() == 1
    ends = muesli.signed_parabolic(agent.support[[0, -1]])
    assert ends[0] <= low + 1e-3 and ends[1] >= high - 1e-3
    value = torch.tensor([low, 0, 0.4 * low + 0.6 * high])  # a head that is right tells these
    logits = (muesli.two_hot(muesli.signed_hyperbolic(value), agent.support) + 1e-12).log()
    torch.testing.assert_close(agent.scalar(logits), value, rtol=1e-3, atol=1e-3)


def test_untrained_values_are_zero():
    """Higher ones would make every end, and so every goal, worse than going on."""
    spaces = {"single_observation_space": Box(-1, 1, (6,)), "single_action_space": Discrete(3)}
    agent = muesli.Agent(SimpleNamespace(**spaces), muesli.Args())
    _, values, rewards = agent.online(torch.randn(4, 6), torch.tensor([[0, 1, 2, 0]]))
    assert agent.scalar(values).abs().max() < 0.5 and agent.scalar(rewards).abs().max() < 0.5


# --------------------------------------------------------------------------------------------- cmpo


@pytest.mark.parametrize("clip", [0.5, 1.0, 3.0])
def test_cmpo_total_variation(clip):
    """At most tanh(clip / 2) (theorem 4.1), which the worst prior over two actions reaches."""
    share = 1 / (1 + math.exp(clip))
    prior, advantages = torch.tensor([share, 1 - share]), torch.tensor([9.0, -9.0])
    args = small_args(cmpo_clip=clip)
    change = muesli.cmpo(prior, advantages, args) - prior
    bound = math.tanh(clip / 2)
    assert change.tolist() == pytest.approx([bound, -bound], rel=1e-5)
    prior, advantages = torch.randn(500, 4).softmax(-1), 3 * torch.randn(500, 4)
    policy = muesli.cmpo(prior, advantages, args)
    torch.testing.assert_close(policy.sum(-1), torch.ones(500))
    assert 0.5 * (policy - prior).abs().sum(-1).max() <= bound + 1e-6
    torch.testing.assert_close(muesli.cmpo(prior, 0 * advantages, args), prior)


def test_cmpo_sampled_leaves_one_out():
    """A prior with one action: N equal samples of gain g have weight g N / (1 + (N - 1) g)."""
    args, gain = small_args(cmpo="sampled", cmpo_samples=4), math.exp(0.5)
    weights = muesli.cmpo(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, -1.0]]), args)
    torch.testing.assert_close(weights, torch.tensor([[4 * gain / (1 + 3 * gain), 0.0]]))


def test_cmpo_sampled_tends_to_exact():
    prior, advantages = torch.randn(20, 4).softmax(-1), torch.randn(20, 4)
    exact = muesli.cmpo(prior, advantages, small_args())
    errors = []
    for n in (16, 4096):
        args = small_args(cmpo="sampled", cmpo_samples=n)
        errors.append((muesli.cmpo(prior, advantages, args) - exact).abs().mean())
    assert errors[1] < 0.01 and errors[1] < errors[0] / 4


# ------------------------------------------------------------------------------------------ retrace


def test_retrace_matches_double_sum():
    """Corrections of all later steps, each weighted by the discounts and traces up to it."""
    rewards, values, q_taken = torch.randn(3, 7, 5, dtype=torch.float64)
    discounts, traces = torch.rand(2, 7, 5, dtype=torch.float64)
    expected = q_taken[:-1].clone()
    for t in range(6):
        for s in range(t, 6):
            weight = discounts[t + 1 : s + 1].prod(0) * traces[t + 1 : s + 1].prod(0)
            error = rewards[s] + discounts[s + 1] * values[s + 1] - q_taken[s]
            expected[t] += weight * error
    results = muesli.retrace(rewards, discounts, values, q_taken, traces)
    torch.testing.assert_close(results, expected)


# --------------------------------------------------------------------------------- targets and loss


@pytest.mark.parametrize(
    "flags",
    [
        {}, {"retrace_lambda": 0.5}, {"retrace": False}, {"prior_behavior": 0.4},
        {"prior_uniform": 0.4}, {"norm_adv_decay": 0.5}, {"norm_adv": False},
        {"gamma": 0.7, "cmpo_clip": 3.0}, {"center_adv": False},
    ],
    ids=lambda flags: next(iter(flags), "default"),
)  # fmt: skip
def test_targets_match_plain_loop(flags):
    """One row at a time, from what the target network predicts."""
    args = small_args(value_min=-20.0, value_max=20.0, **flags)
    agent, batch = small_agent(args), random_batch(args)
    rewards, behavior, actions = batch["rewards"], batch["behavior"], batch["actions"]
    agent.adv_sq.fill_(0.1)
    agent.beta_product.fill_(0.6)
    results = muesli.make_targets(agent, batch)
    with torch.no_grad():
        q_hat = []
        for action in range(3):
            row = torch.full((1, *actions.shape), action)
            logits, value, reward = agent.target(batch["obs"], row)
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
        if batch["last"][t + 1, b] or t + 2 == W:  # a time limit, or the sequence ends
            return rewards[t, b] + args.gamma * follows
        later = expected_return(t + 1, b)
        if args.retrace:
            action = actions[t + 1, b]
            ratio = min(1, prior[t + 1, b, action] / behavior[t + 1, b, action])
            correction = later - q_hat[t + 1, b, action]
            later = follows + args.retrace_lambda * ratio * correction
        return rewards[t, b] + args.gamma * later

    grid = torch.zeros(W - 1, args.batch_size)
    for t, b in product(*map(range, grid.shape)):
        grid[t, b] = expected_return(t, b)
    advantages, alive = grid - v_hat[:-1], batch["last"][: args.seq_len] == 0
    baseline = v_hat
    if args.center_adv:
        advantages -= advantages[: args.seq_len][alive].mean()
        baseline = (prior * q_hat).sum(-1)
    moment, decay = advantages[: args.seq_len][alive].square().mean(), args.norm_adv_decay
    moment = (decay * 0.1 + (1 - decay) * moment) / (1 - 0.6 * decay)
    scale = moment.rsqrt() if args.norm_adv else 1.0
    gains = scale * (q_hat - baseline.unsqueeze(-1))
    gains = gains.clamp(-args.cmpo_clip, args.cmpo_clip).exp()
    assert gains.unique().numel() > 50
    expected = {
        "pi_prior": prior,
        "pi_cmpo": prior * gains / (prior * gains).sum(-1, keepdim=True),
        "returns": grid,
        "adv_hat": advantages * scale,
    }
    for name, x in expected.items():
        torch.testing.assert_close(results[name], x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("detach_ratio", [True, False])
def test_loss_and_gradients_match_plain_loop(detach_ratio):
    coefs = {
        "pg_coef": 2.0, "cmpo_coef": 3.0, "model_coef": 5.0, "value_coef": 7.0,
        "reward_coef": 11.0,
    }  # fmt: skip
    args = small_args(detach_ratio=detach_ratio, value_max=2.0, **coefs)
    agent, batch = small_agent(args), random_batch(args)
    K, L, B = args.unroll_steps, args.seq_len, args.batch_size
    targets = {
        "pi_cmpo": torch.randn(W, B, 3).softmax(-1),
        "pi_prior": torch.randn(W, B, 3).softmax(-1),
        "returns": 3 * torch.randn(W - 1, B),
        "adv_hat": torch.randn(W - 1, B),
    }
    loss, metrics = muesli.muesli_loss(agent, batch, targets)

    actions = torch.stack([batch["actions"][k : k + L] for k in range(K)])
    outputs = agent.online(batch["obs"][:L], actions)
    policy, value, reward = (x.log_softmax(-1) for x in outputs)
    terms = {name: [] for name in metrics}

    def kl(target, logprobs):
        return sum(p * (p.log() - q) for p, q in zip(target, logprobs, strict=True) if p > 0)

    def learn(loss, logits, x):
        x = torch.as_tensor(x)
        clipped = (x < args.value_min) | (x > args.value_max)
        terms["clipped_targets"].append(clipped.float())
        target = muesli.two_hot(muesli.signed_hyperbolic(x), agent.support)
        terms[loss].append(-(target * logits).sum())

    for t, b in product(range(L), range(B)):
        if batch["last"][t, b]:  # no action is chosen there
            continue
        action, here = batch["actions"][t, b], policy[0, t, b]
        ratio = (here[action].exp() / batch["behavior"][t, b, action]).clamp(max=1)
        gain = ratio.detach() * here[action] if detach_ratio else ratio
        terms["policy_loss"].append(-gain * targets["adv_hat"][t, b])
        terms["cmpo_loss"].append(kl(targets["pi_cmpo"][t, b], here))
        terms["kl_to_prior"].append(kl(targets["pi_prior"][t, b], here))
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
                    terms["model_loss"].append(kl(targets["pi_cmpo"][t + k, b], policy[k, t, b]))
            elif batch["terminal"][t + end, b]:  # an absorbing state
                learn("value_loss", value[k, t, b], 0.0)
                if k > end:
                    learn("reward_loss", reward[k - 1, t, b], 0.0)

    means = {name: torch.stack(x).mean() for name, x in terms.items()}
    means["clipped_targets"] = torch.stack(terms["clipped_targets"]).sum() / (L * B * (2 * K + 1))
    assert means["clipped_targets"] > 0
    torch.testing.assert_close(metrics, means, rtol=1e-4, atol=1e-5)
    losses = list(means.values())[:5]
    expected = sum(coef * x for coef, x in zip(coefs.values(), losses, strict=True))
    params = list(agent.online.parameters())
    gradients = [torch.autograd.grad(x, params) for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_policy_gradient_reaches_every_sample_on_policy():
    """Where the ratio is 1 but for rounding, its clip must not stop the gradient."""
    args = small_args(cmpo_coef=0.0, model_coef=0.0, value_coef=0.0, reward_coef=0.0)
    agent, batch = small_agent(args), random_batch(args)
    with torch.no_grad():
        logits, *_ = agent.online(batch["obs"], [])
    batch["behavior"] = logits[0].softmax(-1)
    outputs = []
    agent.online.policy.register_forward_hook(lambda _, __, x: outputs.append(x))
    adv_hat = torch.randn(W - 1, args.batch_size)
    targets = muesli.make_targets(agent, batch) | {"adv_hat": adv_hat}
    loss, _ = muesli.muesli_loss(agent, batch, targets)
    (gradient,) = torch.autograd.grad(loss, outputs[-1])
    alive = batch["last"][: args.seq_len] == 0
    assert gradient[0][alive].any(-1).all() and not gradient[0][~alive].any()


# ------------------------------------------------------------------------------------------- replay


def filled_replay(num_rows, capacity):
    """Two environments whose rewards count their rows; the second observes 100 more."""
    args = small_args(num_envs=2, buffer_size=2 * capacity, seq_len=2, unroll_steps=1)
    spaces = {"observation_space": Box(0, 1, (2, 1)), "single_action_space": Discrete(2)}
    replay, zeros = muesli.Replay(SimpleNamespace(**spaces), args), torch.zeros(2)
    for i in range(num_rows):
        replay.add(obs=torch.tensor([[i], [i + 100]]), rewards=zeros + i, last=zeros)
    return replay, args


def test_sequences_are_consecutive_across_the_end_of_the_ring():
    replay, args = filled_replay(24, 10)
    args.batch_size, args.replay_share = 300, 0.99
    batch = replay.sample(args)
    steps = batch["rewards"]
    assert steps.shape == (4, 300) and (steps.diff(dim=0) == 1).all()
    assert torch.equal(batch["obs"][..., 0] % 100, steps)
    assert steps[0].unique().tolist() == list(range(14, 21))  # the newest ten rows, all of them
    assert (batch["obs"] >= 100).float().mean().item() == pytest.approx(0.5, abs=0.1)
    replay, args = filled_replay(5, 10)
    args.batch_size, args.replay_share = 16, 0.0
    assert (replay.sample(args)["rewards"].diff(dim=0) == 1).all()  # none begins before the first


@pytest.mark.parametrize(("share", "newest"), [(0.0, 16), (0.75, 4), (0.95, 1), (1.0, 0)])
def test_share_of_the_newest_steps(share, newest):
    """One sequence per environment, the next ones L rows earlier: none twice."""
    replay, args = filled_replay(200, 200)
    args.batch_size, args.replay_share = 16, share
    batch = replay.sample(args)
    ends = batch["rewards"][-1]
    assert ends[:newest].tolist() == [199 - 2 * (i // 2) for i in range(newest)]
    assert len(batch["obs"][0, :newest].unique()) == newest
    assert share == 0 or ends[newest:].float().mean() < 150


# -------------------------------------------------------------------------- agents and environments


def test_actions_are_drawn_from_the_target_network():
    agent = small_agent(small_args(prior_uniform=0.2))
    obs = torch.randn(1, 4).expand(20_000, 4)
    logits, *_ = agent.target(obs[:1], [])
    expected = logits[0, 0].softmax(-1) * 0.8 + 0.2 / 3
    actions, policy = agent.get_action(obs)
    torch.testing.assert_close(policy[0], expected)
    torch.testing.assert_close(actions.bincount() / 20_000, expected, atol=0.015, rtol=0)
    assert (agent.get_action(obs, greedy=True)[0] == expected.argmax()).all()


@pytest.mark.parametrize(
    ("scale", "shift", "atol"), [(1e-6, 0, 1e-4), (1e6, 0, 1e-4), (1e-3, 1, 2e-3), (1, 1e4, 5e-3)]
)
def test_units_of_observations_do_not_matter(scale, shift, atol):
    agent, other = (small_agent(small_args()) for _ in range(2))
    obs = torch.randn(5, 8, 4).double()
    agent.obs_rms.update(obs)
    other.obs_rms.update(scale * obs + shift)
    policy = agent.get_action(obs[0])[1]
    found = other.get_action(scale * obs[0] + shift)[1]
    torch.testing.assert_close(found, policy, atol=atol, rtol=0)
    raw = small_agent(small_args(norm_obs=False))
    assert (raw.get_action(scale * obs[0] + shift)[1] - policy).abs().max() > 0.03


def test_images_are_convolved_channels_last():
    """Whatever the batch's shape; each state depends on its own image alone."""
    obs, network = (
        torch.rand(6, 3, 4, 5, 2),
        small_agent(small_args(encoder="cnn"), (4, 5, 2)).online,
    )
    convolved = network.encoder[0](obs[2, 1].permute(2, 0, 1)[None])
    expected = network.norm(network.encoder[1:](convolved))[0]
    torch.testing.assert_close(network.represent(obs)[2, 1], expected)
    assert network.represent(obs).shape == (6, 3, SMALL["hidden_size"])


class Choice(Chain):
    """Bytes, and actions 3 and 4, of which the last step pays 1 for action 4."""

    observation_space, action_space = Box(0, 1, (5,), np.uint8), Discrete(2, start=3)

    def observe(self):
        return super().observe().astype(np.uint8)

    def reward(self, action):
        return self.t == 4 and action == 4


gym.register("Choice-v0", Choice)


def train(run_dir, env_id="CartPole-v1", module=muesli, **flags):
    args = module.Args(env_id=env_id, run_dir=str(run_dir), **SMALL | flags)
    summary = module.train(args)
    return module.load_agent(run_dir), summary


def rows_of(run_dir, n=0):
    """Rows of environment n in the replay of a run that did not fill it."""
    replay = torch.load(run_dir / "checkpoint.pt")["replay"]
    count = replay.pop("count")
    return {name: x[:count, n] for name, x in replay.items()}


def test_rows_of_episodes(tmp_path):
    """Five steps and a row for what they led to, which is no step."""
    for env_id, terminal in (("Chain-v0", 1.0), ("Forever-v0", 0.0)):
        _, summary = train(tmp_path / env_id, env_id)
        rows = rows_of(tmp_path / env_id)
        at = torch.arange(len(rows["last"])) % 6
        assert torch.equal(rows["last"], (at == 5).float())
        assert torch.equal(rows["terminal"], terminal * (at == 5))
        assert torch.equal(rows["rewards"], (at == 4 if terminal else at < 5).float())
        assert summary["global_step"] == 4 * (at < 5).sum() and summary["eval_std"] == 0
        if terminal:
            assert torch.equal(rows["obs"], torch.eye(6, 5)[at])


@pytest.mark.parametrize(
    ("kind", "encoder", "shape"),
    [("Dict", "mlp", (7,)), ("Picture", "mlp", (48,)), ("Picture", "cnn", (4, 4, 3))],
)
def test_observations_are_vectors_or_images(kind, encoder, shape, tmp_path, monkeypatch):
    contiguous, step = [], muesli.ClippedAdamW.step

    def watched(self):
        contiguous.extend(x.grad.is_contiguous() for x in self.param_groups[0]["params"])
        step(self)

    monkeypatch.setattr(muesli.ClippedAdamW, "step", watched)
    flags = {"encoder": encoder, "learning_starts": 0, "total_timesteps": 150}
    train(tmp_path / "run", f"Shown{kind}-v0", **flags)
    assert rows_of(tmp_path / "run")["obs"].shape[1:] == shape
    assert contiguous and all(contiguous)  # fused AdamW takes a gradient as it lies in memory


def test_checkpoints_cut_episodes_like_a_time_limit(tmp_path):
    """Where the limit of 5 fits between two: the row before each reset is a last one."""
    train(tmp_path / "run", "Forever-v0", checkpoint_every=4)  # eight rows
    last = rows_of(tmp_path / "run")["last"][:24].reshape(3, 8)
    assert last.tolist() == [[0, 0, 0, 0, 0, 1, 0, 1]] * 3
    train(tmp_path / "long", "Forever-v0", checkpoint_every=2)  # four rows
    assert rows_of(tmp_path / "long")["last"][:12].tolist() == [0, 0, 0, 0, 0, 1] * 2


def test_learns_values_and_a_model(tmp_path):
    flags = {"gamma": 0.5, "tau": 0.1, "value_min": -1, "value_max": 2, "prior_uniform": 0.1}
    flags |= {"learning_rate": 5e-3, "total_timesteps": 3000}
    agent, summary = train(tmp_path / "run", "Choice-v0", **flags)
    assert summary["eval_mean"] == 1 and rows_of(tmp_path / "run")["obs"].dtype == torch.uint8
    last_step = torch.eye(5).flip(1)[:3]  # action k of root 4 - k
    actions = torch.zeros(2, 3, 5, dtype=torch.long)
    actions[1] = last_step
    with torch.no_grad():
        obs = agent.normalize(torch.eye(5))
        (_, value, wrong), (_, _, right) = (agent.target(obs, x) for x in actions)
    torch.testing.assert_close(agent.scalar(right), last_step, atol=0.2, rtol=0)
    assert agent.scalar(wrong).abs().max() < 0.5
    expected = 0.95 * 0.5 ** torch.arange(4.0, -1, -1)
    torch.testing.assert_close(agent.scalar(value[0]), expected, atol=0.15, rtol=0)
    assert agent.scalar(value[1])[4].abs() < 0.1  # of the absorbing state after the last step


@pytest.mark.parametrize("clip", [0.0, 0.4])
def test_updates_are_clipped_and_the_target_follows(clip, monkeypatch, tmp_path):
    seen, loss, flat = [], muesli.muesli_loss, torch.nn.utils.parameters_to_vector

    def watched(agent, *rest):
        seen.append([flat(x.parameters()).detach() for x in (agent.online, agent.target)])
        return loss(agent, *rest)

    monkeypatch.setattr(muesli, "muesli_loss", watched)
    train(tmp_path / "run", clip_update=clip, learning_rate=0.01, anneal_lr=False, tau=0.2)
    online, target = (torch.stack(x) for x in zip(*seen, strict=True))
    moved = online.diff(dim=0).abs().amax(1)
    assert moved[0].item() == pytest.approx(0.01 * (clip or 1), rel=1e-2)  # Adam's first: its sign
    assert moved.max() < 0.00401 if clip else moved.max() > 0.0101
    torch.testing.assert_close(target[1:], target[:-1].lerp(online[1:], 0.2))
    assert torch.equal(online[0], target[0])


def test_learning_starts_and_rates_are_annealed(tmp_path):
    """A logged rate is that of the update before."""
    train(tmp_path / "run", checkpoint_every=1, learning_rate=2e-3)
    events = read_events(tmp_path / "run")
    assert min(events["losses/value_loss"]) == pytest.approx(104, abs=8)
    rates = events["charts/learning_rate"]
    assert list(rates.values()) == pytest.approx([2e-3 * max(0, 1 - x / 400) for x in rates])


@pytest.mark.parametrize(
    ("flags", "found", "solved_at", "steps"),
    [
        ({"env_id": "CartPole-v1", "total_timesteps": 900}, [500, 474, 475, 476], 300, 400),
        ({"stop_return": 5.0}, [5, 5], 100, 200),
        ({"stop_return": 5.0, "stop_early": False}, [5, 5, 1, 9], 100, 400),
        ({"stop_return": 5.0}, [9, 1, 9, 1], None, 400),
        ({}, [1000] * 4, None, 400),  # without a threshold nothing is solved
    ],
)
def test_solved_takes_two_evaluations(flags, found, solved_at, steps, monkeypatch, tmp_path):
    results = iter([*found, 3.0, 2.0])  # the last two are those after the training
    monkeypatch.setattr(muesli, "play_episodes", lambda *_, **__: np.full(5, next(results)))
    flags = {"env_id": "Forever-v0", "total_timesteps": 400, "eval_frequency": 100} | flags
    _, summary = train(tmp_path / "run", **flags)
    assert summary["solved_at"] == (pytest.approx(solved_at, abs=8) if solved_at else None)
    assert summary["global_step"] == pytest.approx(steps, abs=8)
    assert summary["eval_mean"] == 3 and summary["eval_sampled_mean"] == 2
    logged = read_events(tmp_path / "run")["charts/greedy_return"]
    assert list(logged.values()) == found


def test_evaluation_plays_one_episode_of_each_environment():
    agent = small_agent(small_args(), num_actions=2)
    one, again, other = (muesli.play_episodes(agent, False, 1, key) for key in (5, 5, 6))
    assert one.tolist() == again.tolist() != other.tolist() and len(set(one)) > 1
    agent = small_agent(small_args("Forever-v0"), (1,), 2)  # a time limit is an end, too
    assert muesli.play_episodes(agent, True, 0).tolist() == [5] * 5


def test_clipped_targets_are_said_once(tmp_path, capsys):
    train(tmp_path / "run", value_max=0.5, total_timesteps=2000)
    out, err = capsys.readouterr()
    assert out.count("targets are clipped: a new run needs a wider value_min and value_max") == 1
    assert "\r100 %, 2000/2000 steps" in err  # also where the last step is beyond it


def test_a_mask_is_said_to_be_ignored(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Masked, "forbid", False)
    muesli.show_once.cache_clear()
    train(tmp_path / "run", "Masked-v0", total_timesteps=200)
    assert capsys.readouterr().out.count("info['action_mask'] is not used here") == 1


# -------------------------------------------------------------------------------- resume, bad input


def test_solved_run_continues_only_without_stop_early(tmp_path):
    flags = {"total_timesteps": 300, "eval_frequency": 50, "stop_return": 5.0}
    _, summary = train(tmp_path / "run", "Forever-v0", **flags)
    for stop_early in (True, False):
        checkpoint, args = muesli.load_checkpoint(tmp_path / "run")
        args.resume, args.stop_early = str(tmp_path / "run"), stop_early
        again = muesli.train(args, checkpoint)
        assert again["solved_at"] == summary["solved_at"]
        assert (again["global_step"] == summary["global_step"] < 150) == stop_early
    args.stop_return = 6.0  # of another aim it is not known to have been reached
    again = muesli.train(args, muesli.load_checkpoint(tmp_path / "run")[0])
    assert again["solved_at"] is None is again["sps"]  # and no speed where nothing was trained


def test_the_range_of_a_runs_heads_cannot_change(tmp_path):
    train(tmp_path / "run", total_timesteps=60)
    checkpoint, args = muesli.load_checkpoint(tmp_path / "run")
    args.resume, args.total_timesteps, args.value_max = str(tmp_path / "run"), 90, 1000.0
    with pytest.raises(muesli.UsageError, match="value_min and value_max of a run cannot change"):
        muesli.train(args, checkpoint)


def test_torchrun_is_refused(main, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "with python, not torchrun" in main("muesli_cartpole", "", status=2)[1]


# ------------------------------------------------------------------------------- made to be changed

SOURCE = Path(muesli.__file__).read_text()
OPTIMIZER = SOURCE[SOURCE.index("    optimizer = ") : SOURCE.index("    for group in optimizer")]
GRADS = "            grads = torch.autograd.grad("
SAVED = "    progress = restore(saved, checkpoint)\n"
EVALUATE = "        # Evaluate\n"
TARGET = "        self.target = copy.deepcopy("
CHANGES = {
    "parameter_groups": {
        OPTIMIZER: """    policy = [*agent.online.policy.parameters()]
    rest = [p for name, p in agent.online.named_parameters() if not name.startswith("policy")]
    groups = [{"params": rest}, {"params": policy, "lr": 1e-2}]
    optimizer = torch.optim.Adam(groups, args.learning_rate)
""",
    },
    "auxiliary_loss": {
        OPTIMIZER: OPTIMIZER
        + """    extra = nn.Linear(args.hidden_size, 4)
    optimizer.add_param_group({"params": extra.parameters()})
""",
        SAVED: "    saved |= {'extra': extra}\n" + SAVED,
        GRADS: """            state = agent.online.represent(agent.normalize(batch["obs"]))
            loss = loss + (extra(state) - batch["obs"]).square().mean()
            print("the loss is", loss)
"""
        + GRADS,
    },
    "head_in_the_agent": {
        TARGET: "        self.extra = nn.Linear(args.hidden_size, 4)\n" + TARGET,
        GRADS: """            state = agent.online.represent(agent.normalize(batch["obs"]))
            loss = loss + (agent.extra(state) - batch["obs"]).square().mean()
"""
        + GRADS,
    },
    "coefficient": {EVALUATE: "        args.pg_coef = 0.5 * iteration\n" + EVALUATE},
    "frozen_layer": {OPTIMIZER: "    agent.online.norm.requires_grad_(False)\n" + OPTIMIZER},
    "early_stop": {
        EVALUATE: """        if iteration % 30 == 0:
            log.save(saved, progress, "best.pt")
            break
"""
        + EVALUATE
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_change(name, tmp_path, changed_copy, capsys):
    """A usual change of a copy takes effect, and survives a resume."""
    module = changed_copy("muesli_cartpole", CHANGES[name])
    train(tmp_path / "run", module=module)
    one, args = module.load_checkpoint(tmp_path / "run")
    args.resume, args.total_timesteps = str(tmp_path / "run"), 600
    module.train(args, one)
    two, events = module.load_checkpoint(tmp_path / "run")[0], read_events(tmp_path / "run")
    assert two["progress"]["iteration"] > one["progress"]["iteration"]
    if name == "parameter_groups":
        rates = [list(events[f"charts/learning_rate{i}"].values()) for i in ("", 1)]
        assert rates[1] == pytest.approx([10 * x for x in rates[0]]) and len(set(rates[0])) > 5
    elif name == "auxiliary_loss":
        assert not torch.equal(one["extra"]["weight"], two["extra"]["weight"])
        assert "the loss is" in capsys.readouterr().out
    elif name == "head_in_the_agent":
        assert not torch.equal(one["agent"]["extra.weight"], two["agent"]["extra.weight"])
    elif name == "coefficient":
        assert two["args"]["pg_coef"] == 0.5 * two["progress"]["iteration"]
    elif name == "frozen_layer":
        assert (two["agent"]["online.norm.weight"] == 1).all()
        assert not (two["agent"]["online.encoder.3.weight"] == 1).all()
    elif name == "early_stop":
        assert two["progress"]["iteration"] == 60 and (tmp_path / "run" / "best.pt").exists()
