"""RL^2: its tasks against exact values, its memory, advantages and losses, its meta-tests."""

import math
import sys
from functools import cache, partial
from types import SimpleNamespace

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_metrics, watched_run, written_out_loss
from torch.nn.functional import one_hot

import rl2_meta as rl2

MDP = {"env_id": "TabularMDP", "episodes_per_trial": 3}
VELOCITY = {"env_id": "HalfCheetahVel", "num_trials": 4, "episodes_per_trial": 2, "episode_length": 5,
            "privileged_critic": True}
CART = {"env_id": "CartPole-v1", "task_sampler": f"{__name__}:set_mass", "num_trials": 8,
        "episodes_per_trial": 2, "episode_length": 40}
CPU = torch.device("cpu")
small_args = partial(conftest.small_args, script=rl2)

def small_agent(**flags):
    args = small_args(**flags)
    tasks = rl2.make_tasks(args, args.num_trials, CPU)
    agent, opt = rl2.make_agent(tasks, args, CPU, None)
    rl2.seed_tasks(tasks, args.seed, 0, 0)
    return tasks, agent, opt

def many_tasks(num_trials, **flags):
    return rl2.make_tasks(small_args(**flags), num_trials, CPU)

def test_a_bandit():
    """Probabilities are uniform and stay for a trial, rewards are 0 or 1, each pull ends an episode."""
    tasks = many_tasks(20_000)
    tasks.reset()
    probs, action = tasks.probs.clone(), torch.randint(5, (20_000,))
    assert probs.mean().item() == pytest.approx(1 / 2, abs=0.005)
    assert probs.square().mean().item() == pytest.approx(1 / 3, abs=0.005)
    chosen = probs[torch.arange(20_000), action]
    for _ in range(10):
        obs, _, reward, done, advantage = tasks.step(action)
        assert torch.equal(obs, one_hot(action, 5) * reward[:, None])  # the reward in its arm's place
        assert torch.equal(advantage, chosen - probs.amax(1)) and done.all()
        assert torch.equal(reward, reward.square())
        assert ((reward - chosen) * chosen).mean().item() == pytest.approx(0, abs=0.01)
    tasks.reset()
    assert (tasks.probs != probs).all()

def test_a_tabular_mdp():
    tasks = many_tasks(4000, **MDP)
    tasks.reset()
    trials, state = torch.arange(4000), torch.zeros(4000).long()
    means = tasks.means.clone()
    transitions = tasks.cumulative.diff(dim=-1, prepend=torch.zeros(4000, 10, 5, 1))
    assert transitions.square().mean().item() == pytest.approx(2 / 110, rel=0.02)  # Dirichlet(1)
    assert (means.mean().item(), means.std().item()) == pytest.approx((1, 1), abs=0.02)
    noise, likelihood = [], []
    for t in range(30):
        action = torch.randint(5, (4000,))
        obs, _, reward, done, _ = tasks.step(action)
        noise.append(reward - means[trials, state, action])
        next_state = obs[:, :10].argmax(1)
        assert (obs[:, :10].sum(1) == 1).all() and done.eq((t + 1) % 10 == 0).all()
        if done[0]:
            assert not next_state.any()
        else:
            likelihood.append(transitions[trials, state, action, next_state])
        state = next_state
    assert torch.stack(noise).std().item() == pytest.approx(1, abs=0.01)
    assert torch.stack(likelihood).mean().item() == pytest.approx(20 / 110, abs=0.004)  # E[sum of p^2]

def test_hints_and_advantages_of_an_mdp_are_those_of_optimal_play():
    """A hint is what it would still collect, and what random play would; an advantage is A* of an action."""
    tasks = many_tasks(1000, **MDP)
    _, hint = tasks.reset()
    trials = torch.arange(1000)
    transitions = tasks.cumulative.diff(dim=-1, prepend=torch.zeros(1000, 10, 5, 1))

    def q_value(best, steps):  # (1000, 10, 5)
        return tasks.means + torch.einsum("nsax,nx->nsa", transitions, value(best, steps - 1))

    @cache
    def value(best, steps):  # (1000, 10)
        if steps == 0:
            return torch.zeros(1000, 10)
        return q_value(best, steps).amax(2) if best else q_value(best, steps).mean(2)

    for t in range(30):
        state, action, steps = tasks.state, torch.randint(5, (1000,)), 10 - t % 10
        for i, best in enumerate((True, False)):
            expected = value(best, steps)[trials, state] + (2 - t // 10) * value(best, 10)[:, 0]
            torch.testing.assert_close(hint[:, i] * 30, expected, rtol=1e-3, atol=1e-3)
        _, hint, _, _, advantage = tasks.step(action)
        expected = q_value(True, steps)[trials, state, action] - value(True, steps)[trials, state]
        torch.testing.assert_close(advantage, expected, rtol=1e-3, atol=1e-3)
    assert not hint.any()

@pytest.mark.parametrize(("env_id", "plain_id", "options"), [
    ("HalfCheetahDir", "HalfCheetah-v5", {"ctrl_cost_weight": 0.05}),
    ("HalfCheetahVel", "HalfCheetah-v5", {"ctrl_cost_weight": 0.05}),
    ("AntDir", "Ant-v5", {"terminate_when_unhealthy": False}),
])  # fmt: skip
def test_rewards_of_a_simulator_are_gymnasiums_but_for_the_goal(env_id, plain_id, options):
    tasks = many_tasks(4, env_id=env_id, episode_length=20)
    rl2.seed_tasks(tasks, 0)
    _, goals = tasks.reset()
    plain = [gym.make(plain_id, **options).unwrapped for _ in range(4)]
    for env, runner in zip(plain, tasks.envs.envs, strict=True):
        env.reset()
        qpos, qvel = runner.unwrapped.data.qpos.copy(), runner.unwrapped.data.qvel.copy()
        qpos[2] += env_id == "AntDir"  # too high to be healthy: that ends nothing
        for one in (env, runner.unwrapped):
            one.set_state(qpos, qvel)
    size = plain[0].action_space.shape[0]
    for t, actions in enumerate(np.random.default_rng(0).normal(size=(20, 4, size)), 1):
        *_, reward, done, advantage = tasks.step(torch.as_tensor(actions))
        assert done.eq(t == 20).all() and torch.equal(reward, advantage)
        for n, env in enumerate(plain):
            low, high = env.action_space.low, env.action_space.high
            _, forwards, _, _, info = env.step(actions[n].clip(low, high))
            speed, goal = info["x_velocity"], goals[n].item()
            instead = -abs(speed - goal) if env_id == "HalfCheetahVel" else goal * speed
            assert reward[n].item() == pytest.approx(forwards - speed + instead, abs=1e-4)

def test_goals_stay_for_a_trial_and_are_the_hints():
    for env_id in ("HalfCheetahVel", "HalfCheetahDir"):
        tasks, agent, _ = small_agent(**VELOCITY | {"env_id": env_id, "num_trials": 16})
        goals = []
        for _ in range(4):
            hints = [step["hints"][:, 0] for step in rl2.play(tasks, agent)]
            assert len(hints) == 10 and all(torch.equal(hint, hints[0]) for hint in hints)
            assert [env.goal for env in tasks.envs.envs] == pytest.approx(hints[0].tolist())
            goals += hints[0].tolist()
        if env_id == "HalfCheetahVel":
            assert len(set(goals)) == 64 and 0 <= min(goals) < 0.3 and 1.7 < max(goals) <= 2
        else:
            assert set(goals) == {-1, 1} and goals[:16] != goals[16:32]

def set_mass(env, rng):
    env.masscart = rng.uniform(0.5, 2)
    env.total_mass = env.masscart + env.masspole  # what step() reads

sys.modules["samplers"] = SimpleNamespace(
    nothing_that_matters=lambda env, rng: setattr(env, "masscart", rng.uniform(0.5, 2)),
    typo=lambda env, rng: setattr(env, "mascart", rng.uniform(0.5, 2)),
    returns=lambda env, rng: env, word=lambda env, rng: setattr(env, "gravity", "9.8"),
    relative=lambda env, rng: setattr(env, "total_mass", env.total_mass * rng.uniform(0.5, 1.5)),
    length=lambda env, rng: setattr(env, "length", int(rng.integers(1, 6))))

def test_a_sampler_sets_a_task_for_each_trial():
    tasks, agent, _ = small_agent(**CART)
    masses = []
    for _ in range(2):
        rl2.rollout(tasks, agent)
        masses += [env.unwrapped.masscart for env in tasks.envs.envs]
    assert len(set(masses)) == 16 and min(masses) > 0.5 and max(masses) < 2

@pytest.mark.parametrize(("sampler", "words"), [
    ("typo", r"sets new \['mascart'\]"),
    ("returns", "that CartPole-v1 has and return nothing"),
    ("word", "can't multiply"),
])  # fmt: skip
def test_bad_task_samplers(sampler, words):
    with pytest.raises(rl2.UsageError, match=words):
        many_tasks(2, env_id="CartPole-v1", task_sampler=f"samplers:{sampler}")

def test_tasks_that_are_alike_or_depend_on_others_are_warned_of(recwarn):
    many_tasks(2, env_id="CartPole-v1", task_sampler=f"{__name__}:set_mass")
    assert not recwarn.list
    many_tasks(2, env_id="CartPole-v1", task_sampler="samplers:nothing_that_matters")
    assert "are alike in eight random steps" in str(recwarn.pop().message)
    many_tasks(2, env_id="CartPole-v1", task_sampler="samplers:relative")
    assert "depend on the ones before" in str(recwarn.pop().message)
    many_tasks(2, env_id="Chain-v0", task_sampler="samplers:length")  # none may step beyond an end
    assert not recwarn.list

@pytest.mark.parametrize(("length", "gamma"), [(100, 1.0), (5, 0.95)])  # it takes eight steps to fall
def test_discount_and_length_where_episodes_end_early(length, gamma, tmp_path, spy):
    """The length of a trial is that of its episodes, not of the T steps that are played."""
    calls = spy(rl2, "gae_over_trial")
    flags = CART | {"gamma": None, "episode_length": length, "total_timesteps": 16 * length}
    seen = watched_run(tmp_path / "run", script=rl2, **flags)
    assert {found for (*_, found, _), _ in calls} == {gamma}
    for (rewards, values, *_), _ in calls:
        assert not values[rewards == 0].any()  # after a trial's last episode
    lengths = [data["counted"].sum(0).float().mean().item() for data, _ in seen.rollouts]
    assert [float(row["episodic_length"]) for row in read_metrics(tmp_path / "run")] == lengths
    assert (max(lengths) < 2 * length) == (length == 100)

@pytest.mark.parametrize("flags", [{}, {"tabular": False}, MDP | {"learn_regret": True}, VELOCITY])
def test_inputs_are_the_observation_and_the_step_before(flags):
    """Action, reward as it was drawn, end of an episode; before a trial 0, 0, 1. And nothing else."""
    tasks, agent, _ = small_agent(**flags)
    rl2.rollout(tasks, agent)
    steps = list(rl2.play(tasks, agent))
    data = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    before = [torch.cat([torch.full_like(data[name][:1], first), data[name][:-1]])
              for name, first in (("actions", 0), ("rewards", 0), ("dones", 1))]
    if agent.discrete:
        before[0] = one_hot(before[0], agent.num_actions)
    expected = torch.cat([data["obs"], before[0], before[1][..., None], before[2][..., None]], -1)
    assert torch.equal(data["inputs"], expected.float())
    assert data["dones"].sum(0).eq(agent.args.episodes_per_trial).all() and data["dones"][-1].all()

def test_cells_of_a_table():
    """After the state come the state and action before, as one of 50 cells, and the same times the reward."""
    tasks, agent, _ = small_agent(**MDP)
    data, _ = rl2.rollout(tasks, agent)
    state, cell, earned, _, reward, _ = data["inputs"].split([10, 50, 50, 5, 1, 1], -1)
    assert not cell[0].any() and not earned[0].any()
    expected = state[:-1].argmax(-1) * 5 + data["actions"][:-1]
    assert torch.equal(cell[1:], one_hot(expected, 50).float())
    assert torch.equal(earned[1:], cell[1:] * reward[1:])
    agent.actor.weight.data.zero_()
    agent.actor.bias.data[3 * 5] = 4.0  # action 0 in state 3, of which only its own row knows
    favored = agent(data["inputs"], data["hints"], data["actions"] * 0)[0].exp() > 0.9
    assert torch.equal(favored, state.argmax(-1) == 3) and favored.any()

@pytest.mark.parametrize("flags", [
    {}, {"rnn": "lstm"}, {"share_network": False}, {"privileged_critic": True, "share_network": False},
], ids=lambda flags: "-".join(flags) or "gru")  # fmt: skip
def test_a_whole_trial_at_once_equals_its_steps(flags):
    """In each trial anew from an empty memory, which is kept over its episodes."""
    tasks, agent, _ = small_agent(**MDP, **flags)
    rl2.rollout(tasks, agent)
    data, _ = rl2.rollout(tasks, agent)
    logprob, entropy, value = agent(data["inputs"], data["hints"], data["actions"])
    torch.testing.assert_close(logprob, data["logprobs"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, data["values"], atol=1e-5, rtol=1e-5)
    features, _ = agent.actor_rnn(data["inputs"])
    policy = agent.policy(features, data["inputs"]).probs
    torch.testing.assert_close(entropy, -(policy * policy.log()).sum(-1))
    features, _ = agent.actor_rnn(data["inputs"][10:])  # the second episode without the first
    changed = agent.policy(features, data["inputs"][10:]).probs - policy[10:]
    assert (changed[0].abs().amax(1) > 1e-6).all()

def test_gradient_reaches_back_to_the_start_of_a_trial():
    _, agent, _ = small_agent(**MDP)
    inputs = torch.randn(30, 2, agent.actor_rnn.input_size, requires_grad=True)
    logprob, *_ = agent(inputs, torch.zeros(30, 2, 3), torch.zeros(30, 2, dtype=torch.long))
    logprob[25].sum().backward()
    reached = inputs.grad.abs().sum((1, 2))
    assert (reached[:26] > 0).all() and not reached[26:].any()

@pytest.mark.parametrize("greedy", [True, False])
def test_actions_are_likeliest_or_drawn(greedy):
    _, agent, _ = small_agent()
    agent.actor.weight.data.normal_()
    inputs = torch.randn(1, 12).expand(20_000, 12)
    probs = agent.policy(agent.actor_rnn(inputs[None])[0], inputs[None]).probs[0, 0]
    actions, logprobs, _ = agent.act(inputs, None, greedy)
    expected = one_hot(probs.argmax(), 5).float() if greedy else probs
    torch.testing.assert_close(actions.bincount(minlength=5) / 20_000, expected, atol=0.015, rtol=0)
    torch.testing.assert_close(logprobs.exp(), probs[actions])

@pytest.mark.parametrize("learn_std", [True, False])
def test_a_gaussian_policy(learn_std):
    _, agent, _ = small_agent(**VELOCITY, log_std_init=-0.7, learn_std=learn_std)
    assert ("log_std" in dict(agent.named_parameters())) == learn_std
    inputs = torch.randn(1, agent.actor_rnn.input_size).expand(20_000, -1)
    mean, *_ = agent.act(inputs, None, greedy=True)
    actions, logprobs, _ = agent.act(inputs, None, greedy=False)
    z = (actions - mean) / math.exp(-0.7)
    torch.testing.assert_close(z.std(0), torch.ones(6), atol=0.03, rtol=0)
    expected = (-0.5 * z.square() + 0.7 - 0.5 * math.log(2 * math.pi)).sum(1)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)

def test_regrets_are_for_learning_only():
    drawn, regrets = (rl2.rollout(*small_agent(learn_regret=flag)[:2])[0] for flag in (False, True))
    assert torch.equal(drawn["inputs"], regrets["inputs"])  # the agent sees what was drawn
    assert torch.equal(drawn["rewards"], drawn["rewards"].square())
    assert torch.equal(regrets["rewards"], regrets["optimal_advantages"]) and regrets["rewards"].min() < 0

def test_only_a_privileged_critic_sees_the_task():
    tasks, privileged, _ = small_agent(privileged_critic=True)
    data, _ = rl2.rollout(tasks, privileged)
    for left, hints in zip(range(10, 0, -1), data["hints"], strict=True):
        parts = tasks.probs, tasks.probs.amax(1, keepdim=True), torch.full((16, 1), left / 10)
        torch.testing.assert_close(hints, torch.cat(parts, 1))
    for agent, sees in ((privileged, True), (small_agent()[1], False)):
        results = [agent(data["inputs"], data["hints"] + more, data["actions"]) for more in (0, 1)]
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][2], results[1][2]) != sees
        agent.value_std.fill_(2.0)
        doubled = agent.get_value(data["inputs"], data["hints"])
        torch.testing.assert_close(doubled, 2 * results[0][2])

def assert_orthogonal(weight, gain):
    values = torch.linalg.svdvals(weight.detach())
    torch.testing.assert_close(values, torch.full_like(values, gain))

@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_initial_weights_of_the_rnn(rnn, on):
    """Orthogonal gates; with chrono_init a bias of log(t), which forgets a share 1 / (1 + t) each step."""
    flags = {"rnn": rnn, "episodes_per_trial": 50, "rnn_hidden": 200, "chrono_init": on}
    layer = small_agent(**flags)[1].actor_rnn
    for weight in (layer.weight_ih_l0, layer.weight_hh_l0):
        for gate in weight.split(200):
            assert_orthogonal(gate, 1.0)
    inward, keep, *others = layer.bias_ih_l0.split(200)  # GRU: r, z, n; LSTM: i, f, g, o
    assert not torch.cat(others).any() and not layer.bias_hh_l0.any()
    assert torch.equal(inward, -keep if rnn == "lstm" else torch.zeros(200))
    low, high, mean = (1, 49, 25) if on else (1, 1, 1)
    times = keep.exp()
    assert low <= times.min() < low + 2 and high - 2 < times.max() <= high + 1e-4
    assert times.mean().item() == pytest.approx(mean, abs=4)

def test_initial_weights_of_the_heads():
    _, agent, opt = small_agent(privileged_critic=True, share_network=False, adam_eps=0.5)
    for layer, gain in ((agent.actor, 0.01), (agent.critic[0], 2**0.5), (agent.critic[2], 1.0)):
        assert_orthogonal(layer.weight, gain)
        assert not layer.bias.any()
    assert agent.critic_rnn is not agent.actor_rnn and opt.param_groups[0]["eps"] == 0.5
    _, plain, _ = small_agent(ortho_init=False, chrono_init=False)
    assert plain.critic_rnn is plain.actor_rnn
    assert all(bias.any() for name, bias in plain.named_parameters() if "bias" in name)

def test_returns_of_episodes():
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
    done = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    returns, counted = rl2.episode_returns(rewards, done, 2)
    assert returns.tolist() == [[3, 1], [12, 2]]  # a third is not scored
    assert counted.T.tolist() == [[True, True, True, True], [True, True, False, False]]

def test_what_follows_the_scored_episodes_is_not_learned():
    """CartPole pays 1 a step: if all steps of a trial counted, all policies would earn the same."""
    tasks, agent, opt = small_agent(**CART)
    data, episodes = rl2.rollout(tasks, agent)
    assert torch.equal(data["rewards"].sum(0), episodes.sum(0)) and (episodes.sum(0) < 80).any()
    state, seen = {name: x.clone() for name, x in agent.state_dict().items()}, []
    batch = data | {"advantages": torch.randn(80, 8), "returns": torch.randn(80, 8)}
    other = {name: torch.where(data["counted"], x, x + 1) for name, x in batch.items() if x.dim() == 2}
    for changed in ({}, other | {"actions": data["actions"], "counted": data["counted"]}):
        agent.load_state_dict(state)
        seen.append(torch.zeros(len(rl2.LOSSES)))
        rl2.train_step(agent, opt, batch | changed, torch.arange(8), 0.1, seen[-1])
    assert torch.equal(*seen)

@pytest.mark.parametrize("flags", [
    {}, {"norm_adv": False, "clip_vloss": True, "max_grad_norm": 0.0}, {"rnn": "lstm", "clip_coef": 0.1},
    {"share_network": False, "privileged_critic": True, "vf_coef": 2.0, "max_grad_norm": 0.01},
], ids=lambda flags: next(iter(flags), "default"))  # fmt: skip
def test_an_update_is_that_of_ppo(flags):
    """First at ratio 1, then at others: losses and the gradient of some trials, in plain terms."""
    tasks, agent, opt = small_agent(**MDP, **flags)
    agent.value_std.fill_(3.0)
    args, (data, _) = agent.args, rl2.rollout(tasks, agent)
    batch = {name: data[name] for name in rl2.BATCH[:-2]}
    batch["advantages"] = 2 * torch.randn(30, 16) + 1
    batch["returns"] = batch["values"] + torch.randn(30, 16)
    index, params = torch.tensor([3, 9, 4]), list(agent.parameters())
    for first in (True, False):
        mb = {name: x[:, index] for name, x in batch.items()}
        outputs = agent(mb["inputs"], mb["hints"], mb["actions"])
        loss, expected = written_out_loss(agent, mb, *outputs, args.clip_coef, 0.3, args.vf_coef)
        assert (expected[4].abs() < 1e-6 and not expected[5]) == first
        grads = torch.autograd.grad(loss, params)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        losses, before = torch.zeros(len(rl2.LOSSES)), [p.clone() for p in params]
        rl2.train_step(agent, opt, batch, index, 0.3, losses)
        expected = torch.stack([*expected, norm]).float()
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-4)
        shrink = min(1, args.max_grad_norm / norm) if args.max_grad_norm else 1
        for p, grad, old in zip(params, grads, before, strict=True):
            torch.testing.assert_close(p.grad, shrink * grad, atol=1e-6, rtol=1e-3)
            assert not torch.equal(p, old)
        agent.actor.weight.data.normal_(std=0.5)

@pytest.mark.parametrize("on", [True, False])
def test_train_anneals_shuffles_and_stops_its_epochs(on, tmp_path):
    steps = []
    seen = watched_run(tmp_path / "run", None, rl2, lambda agent, opt, *args: steps.append(
        (opt.param_groups[0]["lr"], *args)), anneal_lr=on, anneal_ent=on, norm_value=on, ent_coef=0.4,
        target_kl=1e-9 if on else None, learning_rate=0.04)
    rates, batches, indices, ent_coefs, _ = zip(*steps, strict=True)
    size = 4 if on else 8  # one epoch, or two
    left = np.repeat([1, 0.75, 0.5, 0.25] if on else [1] * 4, size)
    assert rates == pytest.approx(0.04 * left) and ent_coefs == pytest.approx(0.4 * left)
    for epoch in torch.cat(indices).view(-1, 16):
        assert sorted(epoch.tolist()) == list(range(16))
    assert len({tuple(index.tolist()) for index in indices}) > 8
    last = batches[-1]
    if not on:
        torch.testing.assert_close(last["returns"], last["advantages"] + last["values"])
    row = read_metrics(tmp_path / "run")[-1]
    explained = 1 - (last["advantages"].var() / last["returns"].var()).item()
    assert (int(row["epochs"]), float(row["explained_variance"])) == pytest.approx((size // 4, explained))
    returns = torch.cat([batch["returns"] for batch in batches[::size]])
    expected = returns.std() if on else torch.ones(())
    torch.testing.assert_close(seen.agent.value_std, expected, rtol=1e-2, atol=1e-3)

def test_every_rollout_and_meta_test_has_tasks_of_its_own(tmp_path, spy):
    """Only the two meta-tests at the end share theirs."""
    resets = spy(rl2.Bandit, "reset")
    rl2.train(small_args(test_trials=160, test_every=1, total_timesteps=480, checkpoint_every=1,
                         run_dir=str(tmp_path / "run")))
    tasks = [hint[:, :5] for _, (_, hint) in resets]
    assert [len(x) for x in tasks] == 3 * [16, 16] + [160, 160] and torch.equal(*tasks[-2:])
    assert len(torch.cat(tasks[:-1]).unique()) == 5 * (6 * 16 + 160)

def test_meta_test_disturbs_nothing_and_repeats():
    _, agent, _ = small_agent()
    agent.actor.weight.data.normal_(std=3)
    state, weights = torch.get_rng_state(), {name: x.clone() for name, x in agent.state_dict().items()}
    one, two = (rl2.meta_test(agent, 30, False)[0] for _ in range(2))
    assert torch.equal(state, torch.get_rng_state()) and (one == two).all() and one.shape == (10, 30)
    torch.testing.assert_close(agent.state_dict(), weights, rtol=0, atol=0)
    assert (one != rl2.meta_test(agent, 30, False, when=1)[0]).any()
    assert (one != rl2.meta_test(agent, 30, True)[0]).any()
    groups = np.split(rl2.meta_test(agent, 20_000, False)[0], 2, axis=1)  # as many as are played at once
    assert (groups[0] != groups[1]).any()

def test_errors_of_all_tasks_of_a_velocity():
    """Also where they are tested in groups: 210 tasks are a group of 200 and one of 10."""
    _, agent, _ = small_agent(**VELOCITY)
    episodes, errors = rl2.meta_test(agent, 210, True)
    assert episodes.shape == (2, 210) and errors.shape == (5, 210)  # of the last episode's steps
    assert (np.abs(errors).sum(0) < -episodes[1] + 1e-3).all()  # a return is that and the actions' cost
    assert len(np.unique(errors[0])) == 210

def test_half_of_a_meta_tests_directions_are_forward(monkeypatch, spy, tmp_path):
    """Drawn, they would be 83 of 200 with one seed and 106 with another. Each has its own mean."""
    made = spy(rl2, "make_tasks")
    _, agent, _ = small_agent(**VELOCITY | {"env_id": "HalfCheetahDir", "test_trials": 9})
    rl2.meta_test(agent, 10, True)
    assert [env.goal for env in made[-1][1].envs.envs] == [1, -1] * 5
    returns = np.array([[1.0, 2.0] * 4 + [1.0], [10.0, 20.0] * 4 + [10.0]])
    monkeypatch.setattr(rl2, "meta_test", lambda *_: (returns, np.zeros(0)))
    assert rl2.evaluate(agent, tmp_path, 0)["trial_return_goals"] == [11, 22]

def test_summary_of_a_meta_test(tmp_path, monkeypatch, capsys):
    """Five trials earn 1 to 5 in their first episode, 10 in each other; in training all earn 14 or 15."""
    trained = iter([15.0, 14.0])

    def meta_test(agent, num_trials, greedy, when=0, video_dir=None):
        if when:
            assert not greedy and num_trials == 1
            return np.full((10, num_trials), next(trained) / 10), np.array([])
        first = np.arange(1.0, 6.0) + greedy
        return np.stack([first, *9 * [np.full(5, 10.0)]]), np.array([[1.0, -1.0], [3.0, 5.0]])

    monkeypatch.setattr(rl2, "meta_test", meta_test)
    summary = rl2.train(small_args(test_every=2, test_trials=5, total_timesteps=5 * 160,
                                   run_dir=str(tmp_path / "run")))
    tested = [float(row["test_return"]) for row in read_metrics(tmp_path / "run")]
    assert math.isnan(tested[0]) and tested[1:] == [15, 15, 14, 14]
    se = math.sqrt(2.5 / 5)
    for name, mean in (("trial_return", 93), ("trial_return_greedy", 94)):
        assert [summary[f"{name}_{key}"] for key in ("mean", "se", "cost")] == pytest.approx([mean, se, 5])
    for name, mean, prefix in (("eval", 94, "greedy_"), ("eval_sampled", 93, "")):
        assert summary[f"{name}_mean"] == mean and summary[f"{name}_std"] == pytest.approx(math.sqrt(2))
        assert summary[f"{prefix}episode_returns"] == [mean - 90] + 9 * [10]
        assert summary[f"{prefix}episode_returns_se"] == pytest.approx([se] + 9 * [0])
    printed = capsys.readouterr().out
    assert "\n  Thompson sampling     5.833\n" in printed and "\n  Bayes optimum         6.660\n" in printed

def test_a_meta_test_of_one_trial_has_no_standard_error(tmp_path):
    _, agent, _ = small_agent(test_trials=1)
    summary = rl2.evaluate(agent, tmp_path, 0)
    assert summary["trial_return_se"] == 0 and set(summary["episode_returns_se"]) == {0}

def test_learns_to_learn_a_bandit(tmp_path):
    """Two arms, ten pulls: a random policy gets 5, the Bayes-optimal one 6.0218."""
    args = rl2.Args(num_arms=2, total_timesteps=60_000, num_trials=100, rnn_hidden=32, learning_rate=5e-3,
                    run_dir=str(tmp_path / "run"), test_trials=10_000)
    summary = rl2.train(args)
    assert 5.8 < summary["trial_return_greedy_mean"] < 6.0218 + 4 * summary["trial_return_greedy_se"]
    assert summary["episode_returns"][-1] > summary["episode_returns"][0] + 0.06
