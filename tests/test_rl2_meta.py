"""RL^2: its tasks against exact values, its memory, advantages and losses, its meta-tests."""

import json
import math
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SHORT, check_orthogonal, load, ppo_loss, read_events, resume
from torch.nn.functional import one_hot

import rl2_meta as rl2

SMALL = {
    "num_trials": 16, "num_minibatches": 4, "update_epochs": 2, "rnn_hidden": 16,
    "test_trials": 50, "total_timesteps": 640, "privileged": False,
}  # fmt: skip
MDP = {"env_id": "TabularMDP", "episodes_per_trial": 3}
TWO = {"num_trials": 8, "episodes_per_trial": 2, "episode_length": 40}
VELOCITY = TWO | {"env_id": "HalfCheetahVel", "episode_length": 5}
CART = TWO | {"env_id": "CartPole-v1", "task_sampler": f"{__name__}:set_mass"}
SCALED = TWO | {
    "env_id": "Scaled-v0", "task_sampler": f"{__name__}:set_scale", "episode_length": 10,
    "norm_obs": True,
}  # fmt: skip


def small_args(**flags):
    return rl2.Args(**SMALL | flags)


def small_agent(**flags):
    args = small_args(**flags)
    return rl2.Agent(rl2.make_envs(args, args.num_trials), args)


def trained(run_dir, on_step=lambda agent, batch: None, **flags):
    """Train without the meta-test, calling `on_step` before each optimizer step.

    Returns the agent and, of each step, batch, minibatch, entropy coefficient and results."""
    seen, compute_gradients = SimpleNamespace(steps=[]), rl2.compute_gradients

    def watched(agent, params, batch, index, ent_coef):
        seen.agent = agent
        on_step(agent, batch)
        losses = compute_gradients(agent, params, batch, index, ent_coef)
        seen.steps.append(SimpleNamespace(batch=batch, index=index, ent_coef=ent_coef))
        return losses

    with (
        patch.object(rl2, "compute_gradients", watched),
        patch.object(rl2, "evaluate", lambda *_: {"eval_mean": 0.0}),
    ):
        rl2.train(small_args(run_dir=str(run_dir), **flags))
    return seen


def first_batch(run_dir, **flags):
    """Agent after one iteration, and what was played in it."""
    args = small_args(**flags)
    steps = args.num_trials * args.trial_length
    seen = trained(run_dir, **flags | {"total_timesteps": steps, "learning_rate": 1e-9})
    return seen.agent, seen.steps[0].batch


def play_random(envs, num_steps):
    """Results of random actions, and the actions."""
    for _ in range(num_steps):
        actions = np.stack([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        yield actions, *envs.step(actions)


# -------------------------------------------------------------------------------------------- tasks


def test_bandit_pays_by_fixed_uniform_probabilities():
    envs = rl2.make_envs(small_args(), 20_000)
    rl2.reset(envs, 0)
    probs, actions = envs.probs.clone(), torch.randint(5, (20_000,))
    assert probs.mean().item() == pytest.approx(1 / 2, abs=0.005)
    assert probs.square().mean().item() == pytest.approx(1 / 3, abs=0.005)
    chosen = probs[torch.arange(20_000), actions]
    for _ in range(10):
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        assert terminated.all() and not truncated.any()  # each pull is an episode
        assert torch.equal(obs, one_hot(actions, 5) * rewards[:, None])
        assert torch.equal(infos["regret"], probs.amax(1) - chosen)
        assert torch.equal(infos["hint"], torch.cat([probs, probs.amax(1, keepdim=True)], 1))
        assert torch.equal(rewards, rewards.square())
        assert ((rewards - chosen) * chosen).mean().item() == pytest.approx(0, abs=0.01)


def transitions_of(envs):
    return envs.cumulative.diff(dim=-1, prepend=torch.zeros(*envs.cumulative.shape[:-1], 1))


def test_mdp_has_dirichlet_transitions_and_normal_rewards():
    envs = rl2.make_envs(small_args(**MDP), 4000)
    rl2.reset(envs, 0)
    trials, state, means = torch.arange(4000), torch.zeros(4000).long(), envs.means.clone()
    transitions = transitions_of(envs)
    assert transitions.square().mean().item() == pytest.approx(2 / 110, rel=0.02)  # Dirichlet(1)
    assert (means.mean().item(), means.std().item()) == pytest.approx((1, 1), abs=0.02)
    noise, likelihood = [], []
    for t in range(30):
        actions = torch.randint(5, (4000,))
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        noise.append(rewards - means[trials, state, actions])
        next_state = obs[:, :10].argmax(1)
        assert (obs[:, :10].sum(1) == 1).all() and not truncated.any()
        assert terminated.eq((t + 1) % 10 == 0).all()
        cells = one_hot(state * 5 + actions, 50)  # of the step before, and its rewards
        torch.testing.assert_close(obs[:, 10:], torch.cat([cells, cells * rewards[:, None]], 1))
        if terminated[0]:
            assert not next_state.any()
        else:
            likelihood.append(transitions[trials, state, actions, next_state])
        state = next_state
    assert torch.stack(noise).std().item() == pytest.approx(1, abs=0.01)
    # E[sum of p^2]
    assert torch.stack(likelihood).mean().item() == pytest.approx(20 / 110, abs=0.004)


def test_hints_and_regrets_of_mdp_match_recursion():
    """A hint is what optimal play would still collect."""
    envs = rl2.make_envs(small_args(**MDP), 1000)
    _, infos = rl2.reset(envs, 0)
    trials, transitions = torch.arange(1000), transitions_of(envs)

    @cache
    def q_value(steps):  # (1000, 10, 5)
        return envs.means + torch.einsum("nsax,nx->nsa", transitions, value(steps - 1))

    def value(steps):  # (1000, 10)
        return q_value(steps).amax(2) if steps else torch.zeros(1000, 10)

    for t in range(30):
        state, actions, steps = envs.state, torch.randint(5, (1000,)), 10 - t % 10
        expected = value(steps)[trials, state] + (2 - t // 10) * value(10)[:, 0]
        torch.testing.assert_close(infos["hint"][:, 0] * 30, expected, rtol=1e-3, atol=1e-3)
        *_, infos = envs.step(actions)
        expected = value(steps)[trials, state] - q_value(steps)[trials, state, actions]
        torch.testing.assert_close(infos["regret"], expected, rtol=1e-3, atol=1e-3)
    assert not infos["hint"].any()


@pytest.mark.parametrize(("env_id", "plain_id", "options"), [
    ("HalfCheetahDir", "HalfCheetah-v5", {"ctrl_cost_weight": 0.05}),
    ("HalfCheetahVel", "HalfCheetah-v5", {"ctrl_cost_weight": 0.05}),
    ("AntDir", "Ant-v5", {"terminate_when_unhealthy": False}),
])  # fmt: skip
def test_simulator_rewards_are_gymnasiums_but_for_the_goal(env_id, plain_id, options):
    envs = rl2.make_envs(small_args(env_id=env_id, episode_length=20), 4)
    obs, infos = rl2.reset(envs, 0)
    goals = infos["hint"][:, 0]
    plain = [gym.make(plain_id, **options).unwrapped for _ in range(4)]
    size = plain[0].observation_space.shape[0]
    assert obs.shape[1] - size == (2 if env_id == "AntDir" else 1)  # the position, too
    for env, runner in zip(plain, envs.envs, strict=True):
        env.reset()
        qpos, qvel = runner.unwrapped.data.qpos.copy(), runner.unwrapped.data.qvel.copy()
        qpos[2] += env_id == "AntDir"  # too high to be healthy: that ends nothing
        for one in (env, runner.unwrapped):
            one.set_state(qpos, qvel)
    for t, (actions, _, rewards, _, truncated, _) in enumerate(play_random(envs, 20), 1):
        assert truncated.all() == (t == 20)
        for n, env in enumerate(plain):
            _, forwards, _, _, info = env.step(actions[n])
            speed, goal = info["x_velocity"], goals[n]
            instead = -abs(speed - goal) if env_id == "HalfCheetahVel" else goal * speed
            assert rewards[n] == pytest.approx(forwards - speed + instead, abs=1e-4)


@pytest.mark.parametrize("env_id", ["HalfCheetahVel", "HalfCheetahDir"])
def test_goals_stay_for_a_trial_and_are_the_hints(env_id):
    envs, goals = rl2.make_envs(small_args(**VELOCITY | {"env_id": env_id}), 16), []
    for trial in range(4):
        _, infos = rl2.reset(envs, trial)
        goals.append(infos["hint"][:, 0])
        for *_, infos in play_random(envs, 10):
            assert (infos["hint"][:, 0] == goals[-1]).all()
    if env_id == "HalfCheetahVel":
        assert len(np.unique(goals)) == 64
        assert 0 <= np.min(goals) < 0.3 and 1.7 < np.max(goals) <= 2
    else:
        assert (np.array(goals) == [1, -1] * 8).all()  # no luck of the draw


def set_mass(env, rng):
    env.masscart = rng.uniform(0.5, 2)
    env.total_mass = env.masscart + env.masspole  # what step() reads


def test_sampler_sets_a_task_for_each_trial():
    envs, masses = rl2.make_envs(small_args(**CART), 8), []
    for trial in (0, 1, 0):
        rl2.reset(envs, trial)
        masses.append([env.unwrapped.masscart for env in envs.envs])
        for _ in play_random(envs, 80):
            assert masses[-1] == [env.unwrapped.masscart for env in envs.envs]
    assert masses[0] == masses[2] and len({*masses[0], *masses[1]}) == 16
    assert np.min(masses) > 0.5 and np.max(masses) < 2


@pytest.mark.parametrize("flags", [VELOCITY, CART])
def test_the_start_of_a_trial_does_not_tell_its_task(flags):
    """Both are drawn by one seed: from one stream, the first coordinate would be the task."""
    envs = rl2.make_envs(small_args(**flags), 200)
    starts, infos = rl2.reset(envs, 0)
    sampled = flags == CART
    tasks = [env.unwrapped.masscart for env in envs.envs] if sampled else infos["hint"][:, 0]
    assert np.abs(np.corrcoef(tasks, starts.T)[0, 1:]).max() < 0.35  # 5 standard errors


# ---------------------------------------------------------------------------------- a trial, played


@pytest.mark.parametrize("flags", [{}, {"tabular": False}, MDP | {"privileged": True}, VELOCITY])
def test_inputs_are_the_observation_and_the_step_before(flags, tmp_path):
    """Action, reward as it was drawn, end of an episode; before a trial 0, 0, 1."""
    agent, batch = first_batch(tmp_path / "run", **flags)
    inputs, actions = batch["inputs"], batch["actions"]
    size = inputs.shape[-1] - agent.num_actions - 2
    obs, prev_action, prev_reward, prev_done = inputs.split([size, agent.num_actions, 1, 1], -1)
    if not agent.continuous:
        actions = one_hot(actions.long(), agent.num_actions).float()
    assert torch.equal(prev_action[1:], actions[:-1])
    assert not prev_reward[0].any() and prev_done[0].all()
    first = one_hot(torch.tensor(0), agent.num_actions) if not agent.continuous else torch.zeros(6)
    assert (prev_action[0] == first).all()
    length = agent.args.trial_length // agent.args.episodes_per_trial
    assert (prev_done[:, :, 0] == (torch.arange(len(inputs)) % length == 0)[:, None]).all()
    if flags == {}:
        assert torch.equal(obs[1:], actions[:-1] * prev_reward[1:])  # in its arm's place
    if flags.get("env_id") == "TabularMDP":
        assert prev_reward[1:].std().item() == pytest.approx(math.sqrt(2), abs=0.2)  # no regrets


@pytest.mark.parametrize("flags", [{}, {"rnn": "lstm"}, {"share_network": False}], ids=str)
def test_trial_at_once_equals_its_steps(flags, tmp_path):
    """In each trial anew from an empty memory, which is kept over its episodes."""
    agent, batch = first_batch(tmp_path / "run", **MDP, **flags)
    inputs = batch["inputs"]
    with torch.no_grad():
        logprobs, entropy, _ = agent(inputs, batch["hints"], batch["actions"])
        torch.testing.assert_close(logprobs, batch["logprobs"], atol=1e-5, rtol=1e-5)
        rnn_state, whole = None, agent.policy(agent.actor_rnn(inputs)[0], inputs).probs
        torch.testing.assert_close(entropy, -(whole * whole.log()).sum(-1))
        for t in range(30):
            action, logprob, rnn_state = agent.get_action(inputs[t], rnn_state)
            torch.testing.assert_close(logprob.exp(), whole[t, torch.arange(16), action])
        second = agent.policy(agent.actor_rnn(inputs[10:])[0], inputs[10:]).probs
        assert ((second - whole[10:])[0].abs().amax(1) > 1e-7).all()  # without the first episode


def test_gradient_reaches_back_to_the_start_of_a_trial():
    agent = small_agent(**MDP)
    inputs = torch.randn(30, 2, agent.num_inputs, requires_grad=True)
    logprob, *_ = agent(inputs, torch.zeros(30, 2, 2), torch.zeros(30, 2))
    logprob[25].sum().backward()
    reached = inputs.grad.abs().sum((1, 2))
    assert (reached[:26] > 0).all() and not reached[26:].any()


def test_policy_row_of_mdp_is_its_states():
    agent = small_agent(**MDP)
    agent.actor.weight.data.zero_()
    agent.actor.bias.data[3 * 5] = 4.0  # action 0 in state 3, of which only its own row knows
    states = torch.arange(10).repeat(3)
    inputs = torch.zeros(1, 30, agent.num_inputs)
    inputs[0, :, :10] = one_hot(states, 10)
    logprob, *_ = agent(inputs, torch.zeros(1, 30, 2), torch.zeros(1, 30))
    assert torch.equal(logprob[0].exp() > 0.9, states == 3)


@pytest.mark.parametrize("greedy", [True, False])
def test_discrete_actions_are_greedy_or_sampled(greedy):
    agent = small_agent()
    agent.actor.weight.data.normal_()
    inputs = torch.randn(1, agent.num_inputs).expand(20_000, -1)
    with torch.no_grad():
        probs = agent.policy(agent.actor_rnn(inputs[None])[0], inputs[None]).probs[0, 0]
        actions, logprobs, _ = agent.get_action(inputs, None, greedy)
    expected = one_hot(probs.argmax(), 5).float() if greedy else probs
    torch.testing.assert_close(actions.bincount(minlength=5) / 20_000, expected, atol=0.015, rtol=0)
    torch.testing.assert_close(logprobs.exp(), probs[actions])


@pytest.mark.parametrize("learn_std", [True, False])
def test_gaussian_policy(learn_std):
    agent = small_agent(**VELOCITY, log_std_init=-0.7, learn_std=learn_std)
    assert ("log_std" in dict(agent.named_parameters())) == learn_std
    inputs = torch.randn(1, agent.num_inputs).expand(20_000, -1)
    with torch.no_grad():
        mean, *_ = agent.get_action(inputs, None, greedy=True)
        actions, logprobs, _ = agent.get_action(inputs, None)
    z = (actions - mean) / math.exp(-0.7)
    torch.testing.assert_close(z.std(0), torch.ones(6), atol=0.03, rtol=0)
    expected = (-0.5 * z.square() + 0.7 - 0.5 * math.log(2 * math.pi)).sum(1)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


def test_privileged_training_learns_regrets_and_shows_the_critic_the_task(tmp_path):
    plain, privileged = (
        first_batch(tmp_path / str(flag), privileged=flag, gae_lambda=1.0, norm_value=False)
        for flag in (False, True)
    )
    for agent, batch in (plain, privileged):
        returns = batch["returns"]
        paid = returns - torch.cat([returns[1:], torch.zeros(1, 16)])
        hints = batch["hints"]
        left = torch.arange(10, 0, -1)[:, None].expand(10, 16) / 10
        torch.testing.assert_close(hints[..., -1], left)
        probs = hints[0, :, :5].gather(1, batch["actions"].long().T).T
        best = hints[..., 5]
        if agent is plain[0]:
            torch.testing.assert_close(paid, paid.round(), atol=1e-4, rtol=0)  # rewards as drawn
        else:
            torch.testing.assert_close(paid, probs - best, atol=1e-4, rtol=0)
        with torch.no_grad():
            results = [agent(batch["inputs"], hints + x, batch["actions"]) for x in (0, 1)]
        assert torch.equal(results[0][0], results[1][0])  # the actor sees no hint
        assert torch.equal(results[0][2], results[1][2]) == (agent is plain[0])
    drawn = privileged[1]["inputs"][1:, :, -2]  # the agent observes rewards, not regrets
    assert set(drawn.unique().tolist()) == {0, 1}


# ---------------------------------------------------------------------------- networks at the start


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_initial_rnn_is_orthogonal_with_chrono_memories(rnn, on):
    """A bias of log(t) forgets a share 1 / (1 + t) of the memory each step."""
    agent = small_agent(rnn=rnn, episodes_per_trial=50, rnn_hidden=200, chrono_init=on)
    layer = agent.actor_rnn
    for gates in (layer.weight_ih_l0, layer.weight_hh_l0):
        for weight in gates.split(200):
            check_orthogonal(weight.detach(), 1.0)
    inward, keep, *others = layer.bias_ih_l0.split(200)  # GRU: r, z, n; LSTM: i, f, g, o
    assert not torch.cat(others).any() and not layer.bias_hh_l0.any()
    assert torch.equal(inward, -keep if rnn == "lstm" else torch.zeros(200))
    low, high, mean = (1, 49, 25) if on else (1, 1, 1)
    times = keep.exp()
    assert low <= times.min() < low + 2 and high - 2 < times.max() <= high + 1e-4
    assert times.mean().item() == pytest.approx(mean, abs=4)


# ------------------------------------------------------------------------ advantages and the update


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_advantages_match_double_sum(gae_lambda, tmp_path):
    """Values flow across the ends of episodes; nothing follows a trial."""
    flags = MDP | {"norm_value": False, "gamma": 0.9, "gae_lambda": gae_lambda}
    agent, batch = first_batch(tmp_path / "run", **flags)
    rewards = torch.cat([batch["inputs"][1:, :, -2], torch.zeros(1, 16)])
    values = torch.cat([batch["values"], torch.zeros(1, 16)])
    with torch.no_grad():
        found = agent(batch["inputs"], batch["hints"], batch["actions"])[2]
    torch.testing.assert_close(values[:-1], found)
    for t in range(29):  # no input has the last reward
        delta = rewards[t] + 0.9 * values[t + 1] - values[t]
        after = batch["advantages"][t + 1]
        expected = delta + 0.9 * gae_lambda * after
        torch.testing.assert_close(batch["advantages"][t], expected, atol=1e-4, rtol=1e-4)


def test_episode_returns_count_the_first_episodes():
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
    dones = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    returns, counted = rl2.episode_returns(rewards, dones, 2)
    assert returns.tolist() == [[3, 1], [12, 2]]  # a third is not scored
    assert counted.T.tolist() == [[True, True, True, True], [True, True, False, False]]


def test_steps_after_the_scored_episodes_are_not_learned(tmp_path):
    """CartPole pays 1 a step: if all steps of a trial counted, all policies would earn the same."""
    agent, batch = first_batch(tmp_path / "run", **CART, norm_value=False)
    counted, params = batch["counted"], list(agent.parameters())
    assert (counted.sum(0) < 80).any()
    assert not batch["values"][~counted].any() and not batch["returns"][~counted].any()
    gradients = []
    for change in (0, 1):
        changed = {
            name: torch.where(counted, batch[name], batch[name] + change)
            for name in ("logprobs", "advantages", "values", "returns")
        }
        rl2.compute_gradients(agent, params, batch | changed, torch.arange(8), 0.1)
        gradients.append(torch.cat([p.grad.flatten() for p in params]))
    assert torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize("flags", [
    {}, {"norm_adv": False, "clip_vloss": True, "max_grad_norm": 0.0},
    {"rnn": "lstm", "clip_coef": 0.1},
    {"share_network": False, "privileged": True, "vf_coef": 2.0, "max_grad_norm": 0.01},
], ids=str)  # fmt: skip
def test_gradients_are_those_of_ppos_loss(flags, tmp_path):
    agent, batch = first_batch(tmp_path / "run", **MDP, **flags)
    for layer in (agent.actor, agent.critic[-1]):  # away from ratio 1
        layer.weight.data.normal_()
    batch |= {"advantages": 2 * torch.randn(30, 16) + 1, "returns": torch.randn(30, 16)}
    index, params = torch.tensor([3, 9, 4]), list(agent.parameters())
    mb = {name: x[:, index] for name, x in batch.items()}
    outputs = agent(mb["inputs"], mb["hints"], mb["actions"])
    loss, _ = ppo_loss(agent.args, outputs, mb, 0.3, agent.args.clip_coef)
    expected = torch.autograd.grad(loss, params)
    norm = torch.cat([grad.flatten() for grad in expected]).norm()
    losses = rl2.compute_gradients(agent, params, batch, index, 0.3)
    assert losses["clipfrac"] > 0.05
    assert losses["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-3)
    shrink = min(1, agent.args.max_grad_norm / norm) if agent.args.max_grad_norm else 1
    for p, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, shrink * grad.float(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("on", [True, False])
def test_train_anneals_shuffles_and_stops_its_epochs(on, tmp_path):
    rates, step = [], torch.optim.Adam.step

    def watched_step(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["eps"] == 0.1
        return step(optimizer)

    with patch.object(torch.optim.Adam, "step", watched_step):
        flags = {"anneal_lr": on, "anneal_ent": on, "target_kl": 1e-9 if on else None}
        flags |= {"learning_rate": 0.04, "ent_coef": 0.4, "adam_eps": 0.1}
        steps = trained(tmp_path / "run", **flags).steps
    size = 4 if on else 8  # one epoch, or two
    left = np.repeat([1, 0.75, 0.5, 0.25] if on else [1] * 4, size)
    assert rates == pytest.approx(0.04 * left)
    assert [step.ent_coef for step in steps] == pytest.approx(0.4 * left)
    for epoch in torch.cat([step.index for step in steps]).view(-1, 16):
        assert sorted(epoch.tolist()) == list(range(16))
    assert len({tuple(step.index.tolist()) for step in steps}) > 8


class Scaled(gym.Env):
    """Pays the action that is nearest to -1, in some unit; episodes of random length."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (1,))
    scale = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        reward = self.scale * (1.0 - action[0] + obs[0])
        return obs, reward, bool(obs[1] > 0.9), False, {}


gym.register("Scaled-v0", f"{__name__}:Scaled")


def set_scale(env, rng):
    env.scale = Scaled.scale


@pytest.mark.parametrize("unit", [2.0**-28, 2.0**28])
def test_training_does_not_depend_on_the_unit_of_rewards(unit, tmp_path, monkeypatch):
    """Powers of two round nothing: the same weights, bit by bit."""
    weights = []
    for scale in (1.0, unit):
        monkeypatch.setattr(Scaled, "scale", scale)
        agent = trained(tmp_path / str(scale), **SCALED).agent
        weights.append(agent.actor.weight)
        assert agent.obs_rms.count == agent.reward_rms.count == 640
        assert agent.normalize(torch.tensor([1e9, -1e9]), 0, 1).tolist() == [10, -10]
        assert (agent.reward_rms.scale / scale).item() == pytest.approx(0.8, abs=0.4)
    assert torch.equal(*weights)


# --------------------------------------------------------------------- what users bring, and change


@pytest.mark.parametrize("scale", [True, False])
def test_actions_reach_bounds_of_any_size(scale):
    flags = CART | {"env_id": "Pendulum-v1", "task_sampler": f"{__name__}:none"}
    agent, actions = small_agent(**flags, scale_actions=scale), torch.tensor([[-1.0], [0.5], [3.0]])
    assert agent.to_env(actions).tolist() == ([[-2], [1], [2]] if scale else [[-1], [0.5], [2]])
    agent = small_agent()
    agent.action_space = gym.spaces.Discrete(5, start=3)
    assert agent.to_env(torch.tensor([0, 4])).tolist() == [3, 7]


def none(env, rng):
    """Any task is the same."""


# --------------------------------------------------------------------------------------- meta-tests


def test_a_std_beyond_its_bounds_comes_back(tmp_path):
    """Where the clamp has no gradient."""
    flags = VELOCITY | {"log_std_init": 9.0, "learning_rate": 2e-3}  # Adam's steps add up to < 0.1
    log_std = trained(tmp_path / "run", **flags).agent.log_std
    assert ((log_std > 1.9) & (log_std < 2.1) & (log_std != 2)).all()


def test_every_rollout_and_meta_test_has_tasks_of_its_own(tmp_path):
    """Only the two meta-tests, of three batches each, share theirs."""
    tasks, reset = [], rl2.Bandit.reset

    def watched_reset(envs, **kwargs):
        obs, infos = reset(envs, **kwargs)
        tasks.append(envs.probs)
        return obs, infos

    with patch.object(rl2.Bandit, "reset", watched_reset):
        rl2.train(small_args(test_trials=40, run_dir=str(tmp_path / "run")))
    assert len(tasks) == 4 + 3 + 3 and torch.equal(torch.cat(tasks[4:7]), torch.cat(tasks[7:]))
    assert len(torch.cat(tasks[:7]).unique()) == 7 * 16 * 5


@pytest.mark.parametrize("test_trials", [50, 1])
def test_summary_of_the_meta_tests(test_trials, capsys):
    """In batches of 16 trials, the last of which may be too many."""
    rewards, step = [], rl2.Bandit.step

    def watched_step(envs, actions):
        results = step(envs, actions)
        rewards.append(results[1])
        return results

    with patch.object(rl2.Bandit, "step", watched_step):
        summary = rl2.evaluate(small_agent(test_trials=test_trials), 7)
    rewards = torch.stack(rewards).view(2, -1, 10, 16).transpose(1, 2).flatten(2).double()
    rewards = rewards[..., :test_trials]  # (greedy or sampled, n, trials)
    greedy, mean = rewards.sum(1).mean(1).tolist()
    greedy_std, std = rewards.sum(1).std(1, correction=0).tolist()
    assert summary.pop("episode_returns") == pytest.approx(rewards[1].mean(1).tolist())
    assert summary == pytest.approx({
        "eval_episodes": 10 * test_trials, "eval_mean": greedy, "eval_std": greedy_std,
        "eval_sampled_mean": mean, "eval_sampled_std": std, "trial_return_mean": mean,
        "trial_return_se": std / math.sqrt(test_trials), "trial_return_greedy_mean": greedy,
    })  # fmt: skip
    printed = capsys.readouterr().out
    assert f"Bandit after 7 steps: {test_trials} trials, greedy actions" in printed
    assert f"  return {mean:.6g} +- " in printed


def test_learns_to_learn_a_bandit(tmp_path):
    """Two arms, ten pulls: a random policy gets 5, the Bayes-optimal one 6.0218."""
    flags = {"num_arms": 2, "num_trials": 100, "rnn_hidden": 32, "total_timesteps": 60_000}
    flags |= {"run_dir": str(tmp_path / "run"), "learning_rate": 5e-3, "test_trials": 10_000}
    args = rl2.Args(**flags)
    summary = rl2.train(args)
    assert 5.8 < summary["trial_return_greedy_mean"] < 6.0218 + 4 * summary["trial_return_se"]
    assert summary["episode_returns"][-1] > summary["episode_returns"][0] + 0.06


# ---------------------------------------------------------------------- runs, and changes of a copy

OPTIMIZER = (
    "    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)\n"
)
LOSS = "    loss = pg_loss - ent_coef * entropy + args.vf_coef * v_loss  # [D10]\n"
CHANGES = {
    "adamw": (OPTIMIZER, """    critic = agent.critic.parameters()
    rest = [p for name, p in agent.named_parameters() if not name.startswith("critic.")]
    groups = [{"params": rest}, {"params": critic, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, args.learning_rate)
"""),
    "frozen_layer": (OPTIMIZER, "    agent.actor_rnn.requires_grad_(False)\n" + OPTIMIZER),
    "auxiliary_loss": (LOSS, LOSS + """    features, _ = agent.actor_rnn(mb["inputs"])
    loss = loss + agent.actor(features)[..., 0].square().mean()
"""),
    "print": (LOSS, LOSS + "    print(loss, mb['returns'])\n"),
    "coefficient": ("        # Rollout", """        args.vf_coef = 0.5 * iteration
        # Rollout"""),
    "two_rollouts": ("        # Update\n", """        # Update
        last, batch = batch, {x: torch.cat([batch[x], (last or batch)[x]], 1) for x in batch}
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_change(name, tmp_path, changed_copy):
    """A usual change of a copy takes effect, and survives a resume."""
    loop = "    for iteration in"
    module = changed_copy("rl2_meta", dict([CHANGES[name], (loop, f"    last = None\n{loop}")]))
    flags = SMALL | {"run_dir": str(tmp_path / "run"), "checkpoint_every": 1, "test_trials": 2}
    module.train(module.Args(**flags))
    checkpoint, args = module.load_checkpoint(tmp_path / "run")
    weights = checkpoint["agent"]
    if name == "adamw":
        rates = read_events(tmp_path / "run")["charts/learning_rate1"]
        assert list(rates.values()) == pytest.approx([0.5, 0.375, 0.25, 0.125])
    if name == "frozen_layer":
        torch.manual_seed(1)
        fresh = module.Agent(module.make_envs(args, 1), args).state_dict()
        assert torch.equal(fresh["actor_rnn.weight_hh_l0"], weights["actor_rnn.weight_hh_l0"])
        assert not torch.equal(fresh["actor.weight"], weights["actor.weight"])
    if name == "coefficient":
        assert args.vf_coef == 2
    plain = trained(tmp_path / "plain").agent.state_dict()
    assert torch.equal(plain["actor.weight"], weights["actor.weight"]) == (name == "print")
    args.resume, args.total_timesteps = str(tmp_path / "run"), 800
    module.train(args, checkpoint)
    assert load(tmp_path / "run")["progress"]["iteration"] == 5


def test_longer_trials_on_resume(tmp_path, main):
    main("rl2_meta", f"{SHORT['rl2_meta']} --run-dir run")
    resume(main, "rl2_meta", "--episodes-per-trial 20 --total-timesteps 1280 --adam-eps 1")
    assert load(tmp_path / "run")["optimizer"]["param_groups"][0]["eps"] == 1
    assert list(read_events(tmp_path / "run")["charts/SPS"]) == [160, 320, 480, 640, 960, 1280]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["episode_returns"]) == 20
