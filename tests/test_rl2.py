"""RL^2: its memory and its trials, tasks with known means, meta-tests, presets, the command line."""

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_cli import call_main, read_metrics, train_in_two_processes, unboxed
from test_cli import run as run_script
from test_resume import check_resume_only_evaluates, check_same, kill_at_first_checkpoint

import rl2_meta as rl2

SCRIPT = Path(__file__).parent.parent / "rl2_meta.py"
sys.path.insert(0, str(SCRIPT.parent / "benchmarks"))

import speed_rl2  # noqa: E402

SMALL = {"num_trials": 16, "num_minibatches": 4, "update_epochs": 2, "rnn_hidden": 16, "test_trials": 50,
         "expected_reward": False, "privileged_critic": False}
CPU = torch.device("cpu")


def small_args(**flags):
    return rl2.Args(**SMALL | flags)


def small_tasks(num_trials, **flags):
    tasks = rl2.make_tasks(small_args(**flags), num_trials, CPU)
    rl2.seed_tasks(tasks, 0, 0, 0)
    return tasks


def small_agent(**flags):
    args = small_args(**flags)
    tasks = rl2.make_tasks(args, args.num_trials, CPU)
    agent, opt = rl2.make_agent(tasks, args, CPU, None)
    rl2.seed_tasks(tasks, args.seed, 0, 0)
    return tasks, agent, opt


def random_play(tasks, num_trials, steps, num_actions):
    tasks.reset()
    results = [tasks.step(torch.randint(num_actions, (num_trials,))) for _ in range(steps)]
    return [torch.stack(x) for x in zip(*results, strict=True)]


# ------------------------------------------------------------------------------------------------------ tasks


def test_a_random_policy_wins_half_the_pulls():
    tasks = rl2.Bandit(small_args(), 20_000, CPU)
    _, _, reward, done, expected = random_play(tasks, 20_000, 10, 5)
    assert reward.sum(0).mean().item() == pytest.approx(5, abs=0.05)
    assert set(reward.unique().tolist()) == {0, 1}
    assert expected.mean().item() == pytest.approx(0.5, abs=0.005) and (done == 1).all()


def test_hint_of_an_mdp():
    """What optimal and random play collect over 30 steps, by the mean over many tasks."""
    tasks = rl2.TabularMDP(small_args(env_id="TabularMDP", episodes_per_trial=3), 20_000, CPU)
    _, first = tasks.reset()
    rewards = torch.zeros(20_000)
    for t in range(30):
        _, after, _, _, expected = tasks.step(torch.randint(5, (20_000,)))
        rewards += expected
        assert (after[:, 0] >= after[:, 1]).all() or t == 29
    best, random = (30 * first).unbind(1)
    assert random.mean().item() == pytest.approx(30, abs=0.5)
    assert (rewards - random).mean().item() == pytest.approx(0, abs=0.15)
    assert best.mean().item() == pytest.approx(3 * 21.833, abs=0.4)
    assert not after.any()  # nothing is left


def test_an_arm_pays_as_often_as_it_says():
    tasks = rl2.Bandit(small_args(), 4, CPU)
    tasks.reset()
    action = torch.arange(4)
    rewards = torch.stack([tasks.step(action)[2] for _ in range(4000)])
    torch.testing.assert_close(rewards.mean(0), tasks.probs[action, action], atol=0.04, rtol=0)


def test_a_random_policy_collects_ten_an_episode_of_an_mdp():
    tasks = rl2.TabularMDP(small_args(), 4000, CPU)
    obs, _, reward, done, expected = random_play(tasks, 4000, 30, 5)
    assert reward.sum(0).mean().item() == pytest.approx(30, abs=0.6)
    assert (reward - expected).std().item() == pytest.approx(1, abs=0.02)
    assert done[:, 0].nonzero().flatten().tolist() == [9, 19, 29]
    state = obs[..., :10]
    assert (state.sum(-1) == 1).all() and (state[9::10, :, 0] == 1).all()  # the next episode's first state


def test_transitions_and_rewards_of_an_mdp():
    tasks = rl2.TabularMDP(small_args(), 1, CPU)
    tasks.reset()
    transitions = tasks.cumulative[0].diff(dim=-1, prepend=torch.zeros(10, 5, 1))
    counts, rewards = torch.zeros(10), []
    for _ in range(4000):
        tasks.state, tasks.t = torch.tensor([3]), 0
        obs, _, reward, *_ = tasks.step(torch.tensor([2]))
        counts += obs[0, :10]
        rewards.append(reward.item())
    torch.testing.assert_close(counts / 4000, transitions[3, 2], atol=0.04, rtol=0)
    assert np.mean(rewards) == pytest.approx(tasks.means[0, 3, 2].item(), abs=0.07)


@pytest.mark.parametrize(("env_id", "direction"), [("HalfCheetahDir", True), ("HalfCheetahVel", False)])
def test_reward_of_a_runner(env_id, direction):
    tasks = small_tasks(3, env_id=env_id, episode_length=20)
    obs, goal = tasks.reset()
    goal, x, actions = goal[:, 0].numpy(), obs[:, 0].numpy(), np.random.default_rng(0).normal(size=(19, 3, 6))
    for action in actions:
        obs, _, reward, done, _ = tasks.step(torch.as_tensor(action))
        speed, cost = (obs[:, 0].numpy() - x) / 0.05, 0.05 * (action.clip(-1, 1) ** 2).sum(1)
        expected = goal * speed if direction else -np.abs(speed - goal)
        np.testing.assert_allclose(reward, expected - cost, rtol=1e-3, atol=1e-3)
        assert not done.any()
        x = obs[:, 0].numpy()
    *_, done, _ = tasks.step(torch.zeros(3, 6))
    assert done.all()
    assert set(goal) <= {-1, 1} if direction else len(set(goal)) == 3


def test_reward_of_an_ant():
    """That of Gymnasium's, of which only the speed forwards turns with the goal; an unhealthy one goes on."""
    tasks = small_tasks(6, env_id="AntDir", episode_length=30)
    _, goal = tasks.reset()
    plain = [gym.make("Ant-v5", terminate_when_unhealthy=False).unwrapped for _ in range(6)]
    for env, runner in zip(plain, tasks.envs.envs, strict=True):
        env.reset()
        qpos, qvel = runner.unwrapped.data.qpos.copy(), runner.unwrapped.data.qvel.copy()
        qpos[2] = 1.5  # too high to be healthy
        for one in (env, runner.unwrapped):
            one.set_state(qpos, qvel)
    for action in np.random.default_rng(0).uniform(-1, 1, (29, 6, 8)):
        *_, reward, done, _ = tasks.step(torch.as_tensor(action))
        for env, to, one, got in zip(plain, goal[:, 0].tolist(), action, reward.tolist(), strict=True):
            _, forwards, *_, info = env.step(one)
            assert got == pytest.approx(forwards + (to - 1) * info["x_velocity"], abs=1e-4)
        assert not done.any()
    assert set(goal[:, 0].tolist()) == {-1, 1}


def test_a_trial_goes_on_over_episodes_of_one_task():
    tasks = small_tasks(4, env_id="HalfCheetahVel", episode_length=5)
    _, goal = tasks.reset()
    for _ in range(12):
        tasks.step(torch.zeros(4, 6))
    assert [env.goal for env in tasks.envs.envs] == pytest.approx(goal[:, 0].tolist())
    assert not torch.equal(tasks.reset()[1], goal)


# ----------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("flags", [{}, {"rnn": "lstm"}, {"share_network": False},
                                   {"privileged_critic": True, "share_network": False}],
                         ids=lambda flags: "-".join(flags) or "gru")
def test_a_whole_trial_at_once_equals_its_steps(flags):
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=3, **flags)
    data, _ = rl2.rollout(tasks, agent)
    logprob, _, value = agent(data["inputs"], data["hints"], data["actions"])
    torch.testing.assert_close(logprob, data["logprobs"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, data["values"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(agent.get_value(data["inputs"], data["hints"]), value, atol=1e-5, rtol=1e-5)


def test_every_trial_begins_with_an_empty_memory():
    """The first action of a second rollout depends on nothing but its input, and the second on the first."""
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=2)
    rl2.rollout(tasks, agent)
    data, _ = rl2.rollout(tasks, agent)
    for t, same in ((0, True), (1, False), (10, False)):
        policy = agent.policy(agent.actor_rnn(data["inputs"][t : t + 1])[0], data["inputs"][t : t + 1])
        difference = (policy.log_prob(data["actions"][t : t + 1]) - data["logprobs"][t]).abs().max()
        assert (difference < 1e-6) == same  # 10: the memory is kept over an episode's end


def test_acting_leaves_the_critics_memory_alone():
    tasks, agent, _ = small_agent(share_network=False)
    agent.critic_rnn.register_forward_hook(lambda *_: pytest.fail("the critic's memory was stepped"))
    assert len(list(rl2.play(tasks, agent))) == 10


def test_inputs_of_a_trial():
    """The observation, and of the step before: action, reward, end of an episode; first 0, 0, 1."""
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=2, tabular=False)
    data, _ = rl2.rollout(tasks, agent)
    seen, action, reward, done = data["inputs"].split([10, 5, 1, 1], -1)
    assert torch.equal(seen, data["obs"]) and (seen[::10, :, 0] == 1).all()
    assert (action[0, :, 0] == 1).all() and not reward[0].any() and (done[0] == 1).all()
    assert torch.equal(action[1:].argmax(-1), data["actions"][:-1])
    assert torch.equal(reward[1:, :, 0], data["rewards"][:-1])
    assert done[:, 0, 0].nonzero().flatten().tolist() == [0, 10]


def test_cells_of_a_table():
    """After the state come the state and action before, as one of 50 cells, and the same times the reward."""
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=2)
    data, _ = rl2.rollout(tasks, agent)
    state, cell, earned, _, reward, _ = data["inputs"].split([10, 50, 50, 5, 1, 1], -1)
    assert not cell[0].any() and not earned[0].any()
    expected = state[:-1].argmax(-1) * 5 + data["actions"][:-1]
    assert torch.equal(cell[1:], torch.nn.functional.one_hot(expected, 50).float())
    assert torch.equal(earned[1:], cell[1:] * reward[1:])


def test_a_table_has_weights_for_each_state():
    _, agent, _ = small_agent(env_id="TabularMDP")
    inputs = torch.zeros(1, 2, agent.actor_rnn.input_size)
    inputs[0, 0, 3], inputs[0, 1, 7] = 1, 1
    agent.actor.bias.data[3 * 5] = 4.0  # action 0 in state 3
    logprob, *_ = agent(inputs, torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long))
    assert logprob[0].exp().tolist() == pytest.approx([np.exp(4) / (np.exp(4) + 4), 0.2], abs=0.02)


def test_gradient_reaches_twenty_steps_back():
    _, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=4)
    inputs = torch.randn(40, 2, agent.actor_rnn.input_size, requires_grad=True)
    logprob, *_ = agent(inputs, torch.zeros(40, 2, 3), torch.zeros(40, 2, dtype=torch.long))
    logprob[35].sum().backward()
    reached = inputs.grad.abs().sum((1, 2))
    assert (reached[:36] > 0).all() and not reached[36:].any()


def test_value_flows_over_episodes_and_not_over_trials():
    """A reward at the end of a trial counts for its first step, in full as gamma is 1, and for no other."""
    rewards = torch.zeros(5, 2)
    rewards[-1, 0] = 1
    advantages = rl2.gae_over_trial(rewards, torch.zeros(5, 2), 1.0, 1.0)
    assert torch.equal(advantages[:, 0], torch.ones(5)) and not advantages[:, 1].any()
    ends = rl2.gae_over_trial(torch.zeros(5, 2), torch.ones(5, 2), 1.0, 0.0)
    assert not ends[:-1].any() and (ends[-1] == -1).all()  # nothing follows a trial


def test_advantages_by_hand():
    """gamma 0.5, lambda 0.4: TD errors 1 + 2 - 2, 2 + 3 - 4, 3 - 6, each plus a fifth of what follows."""
    rewards, values = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2.0], [4.0], [6.0]])
    advantages = rl2.gae_over_trial(rewards, values, 0.5, 0.4)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.08, 0.4, -3.0]))


def first_step(**flags):
    """Losses, by name, of an optimizer step on all trials of a first rollout."""
    tasks, agent, opt = small_agent(**flags)
    data, _ = rl2.rollout(tasks, agent)
    advantages = rl2.gae_over_trial(data["rewards"], data["values"], 1.0, 0.95)
    batch = data | {"advantages": advantages, "returns": advantages + data["values"]}
    losses, before = torch.zeros(len(rl2.LOSSES)), [p.detach().clone() for p in agent.parameters()]
    batch = {name: batch[name] for name in rl2.BATCH}
    rl2.train_step(agent, opt, batch, torch.arange(16), agent.args.ent_coef, losses)
    moved = [not torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True)]
    return dict(zip(rl2.LOSSES, losses.tolist(), strict=True)), moved


@pytest.mark.parametrize("flags", [{}, {"rnn": "lstm"}, {"share_network": False, "privileged_critic": True}],
                         ids=["gru", "lstm", "apart"])
def test_first_minibatch_has_ratio_one(flags):
    losses, moved = first_step(env_id="TabularMDP", **flags)
    assert abs(losses["approx_kl"]) < 1e-6 and losses["clipfrac"] == 0
    assert losses["grad_norm"] > 0 and all(moved)  # every parameter has a gradient


def test_expected_rewards_are_for_advantages_only():
    drawn, expected = (rl2.rollout(*small_agent(expected_reward=flag)[:2])[0] for flag in (False, True))
    assert torch.equal(drawn["inputs"], expected["inputs"])  # the agent sees what was drawn
    assert set(drawn["rewards"].unique().tolist()) == {0, 1} and len(expected["rewards"].unique()) > 40


def test_only_a_privileged_critic_sees_the_task():
    tasks, agent, _ = small_agent(privileged_critic=True)
    data, _ = rl2.rollout(tasks, agent)
    assert data["hints"].shape[-1] == 3  # best and random, share of the steps that is left
    hints = torch.stack([tasks.probs.amax(1), tasks.probs.mean(1), torch.ones(16)], 1)
    for left, row in zip(range(10, 0, -1), data["hints"], strict=True):
        torch.testing.assert_close(row, left / 10 * hints)
    results = [agent(data["inputs"], data["hints"] + more, data["actions"]) for more in (0, 1)]
    assert torch.equal(results[0][0], results[1][0]) and not torch.equal(results[0][2], results[1][2])
    agent = small_agent(privileged_critic=False)[1]
    results = [agent(data["inputs"], data["hints"] + more, data["actions"]) for more in (0, 1)]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_input_gain_is_of_each_gates_input_weights(rnn):
    agent = small_agent(rnn=rnn, rnn_hidden=8, input_gain=3.0)[1]
    for weight, gain in ((agent.actor_rnn.weight_ih_l0, 3.0), (agent.actor_rnn.weight_hh_l0, 1.0)):
        for gate in weight.split(8):
            square = gate.T @ gate if gate.shape[1] < 8 else gate @ gate.T
            torch.testing.assert_close(square, gain**2 * torch.eye(len(square)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_chrono_init_keeps_the_memory_for_up_to_a_trial(rnn):
    """A gate's bias of log(t) forgets a share 1 / (1 + t) each step."""
    for on in (True, False):
        agent = small_agent(rnn=rnn, episodes_per_trial=50, rnn_hidden=200, chrono_init=on)[1]
        inward, keep, *others = agent.actor_rnn.bias_ih_l0.split(200)  # GRU: r, z, n; LSTM: i, f, g, o
        assert not torch.cat(others).any() and not agent.actor_rnn.bias_hh_l0.any()
        assert torch.equal(inward, -keep if rnn == "lstm" else torch.zeros(200))
        times = keep.exp()
        low, high, mean = (1, 49, 25) if on else (1, 1, 1)
        assert low <= times.min() < low + 2 and high - 2 < times.max() <= high + 1e-4
        assert times.mean().item() == pytest.approx(mean, abs=4)


def test_returns_of_episodes():
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
    done = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    returns, counted = rl2.episode_returns(rewards, done, 2)
    assert returns.tolist() == [[3, 1], [12, 2]]  # a third is not scored
    assert counted.T.tolist() == [[True, True, True, True], [True, True, False, False]]


@pytest.fixture
def samplers(tmp_path, monkeypatch):
    """A module of task samplers."""
    (tmp_path / "samplers.py").write_text("""
def mass(env, rng):
    env.masscart = rng.uniform(0.5, 2)

def typo(env, rng):
    env.mascart = rng.uniform(0.5, 2)

def returns(env, rng):
    return rng.uniform(0.5, 2)

def one_argument(env):
    env.masscart = 1

number = 3.14
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "samplers", raising=False)


CART = {"env_id": "CartPole-v1", "task_sampler": "samplers:mass", "num_trials": 8, "episodes_per_trial": 2}


def test_what_follows_the_scored_episodes_is_not_learned(samplers):
    """CartPole pays 1 a step: if all steps of a trial counted, all policies would earn the same."""
    tasks, agent, _ = small_agent(**CART, episode_length=40)
    data, episodes = rl2.rollout(tasks, agent)
    assert torch.equal(data["rewards"].sum(0), episodes.sum(0)) and (episodes.sum(0) < 80).any()


def test_a_sampler_sets_a_task_for_each_trial(samplers):
    tasks, agent, _ = small_agent(**CART, episode_length=5)
    seen = []
    for _ in range(2):
        rl2.rollout(tasks, agent)
        seen += [env.unwrapped.masscart for env in tasks.envs.envs]
    assert len(set(seen)) == 16 and all(0.5 < mass < 2 for mass in seen)


def test_errors_of_all_tasks_of_a_velocity():
    """Also where they are tested in groups: 210 tasks are a group of 200 and one of 10."""
    _, agent, _ = small_agent(env_id="HalfCheetahVel", episodes_per_trial=2, episode_length=3)
    episodes, errors = rl2.meta_test(agent, 210, True)
    assert episodes.shape == (2, 210) and errors.shape == (3, 210)  # of the last episode's steps
    assert (np.abs(errors).sum(0) < -episodes[1] + 1e-3).all()  # a return is that and the actions' cost
    assert len(np.unique(errors[0])) == 210


def test_a_runners_goal_is_the_critics_hint():
    tasks, agent, _ = small_agent(env_id="HalfCheetahVel", num_trials=3, privileged_critic=True,
                                  episodes_per_trial=2, episode_length=3)
    data, _ = rl2.rollout(tasks, agent)
    goals = torch.tensor([env.goal for env in tasks.envs.envs], dtype=torch.float32)
    for hint in data["hints"]:
        torch.testing.assert_close(hint[:, 0], goals)


@pytest.mark.parametrize("seed", [1, 2])
def test_half_of_a_meta_tests_directions_are_forward(seed, monkeypatch):
    """Drawn, they would be 83 of 200 with one seed and 106 with another; in training they are."""
    made, make_tasks = [], rl2.make_tasks
    monkeypatch.setattr(rl2, "make_tasks", lambda *args: made.append(make_tasks(*args)) or made[-1])
    tasks, agent, _ = small_agent(env_id="HalfCheetahDir", seed=seed, episodes_per_trial=1, episode_length=1)
    rl2.meta_test(agent, 10, True)
    assert [env.goal for env in made[-1].envs.envs] == [1, -1] * 5
    tasks.reset()
    assert [env.goal for env in tasks.envs.envs] != [1, -1] * 8


def test_meta_test_disturbs_nothing_and_repeats():
    _, agent, _ = small_agent()
    before = torch.get_rng_state()
    one, two = (rl2.meta_test(agent, 30, False)[0] for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()) and (one == two).all() and one.shape == (10, 30)
    assert (one != rl2.meta_test(agent, 30, False, when=1)[0]).any()


def test_stop_goal_needs_a_full_window():
    args = small_args(test_every=1, stop_goal=5.0, stop_window=3)
    assert not rl2.goal_reached([9.0, 9.0], args) and rl2.goal_reached([0.0, 5.0, 5.0, 5.0], args)
    assert not rl2.goal_reached([9.0, 4.0, 9.0], args)
    assert not rl2.goal_reached([9.0] * 3, small_args(test_every=1))


def test_learns_to_learn_a_bandit(tmp_path):
    """Two arms, ten pulls: a random policy gets 5, the Bayes-optimal one 6.0218."""
    args = rl2.Args(num_arms=2, total_timesteps=250_000, num_trials=200, rnn_hidden=32, learning_rate=3e-3,
                    run_dir=str(tmp_path / "run"), test_trials=20_000)
    summary = rl2.train(args)
    assert 5.7 < summary["trial_return_greedy_mean"] < 6.0218 + 4 * summary["trial_return_greedy_se"]
    assert summary["episode_returns"][-1] > summary["episode_returns"][0] + 0.06


# ----------------------------------------------------------------------------------------------- command line

SHORT = "--num-trials 16 --rnn-hidden 16 --test-trials 50 --total-timesteps 6400 --checkpoint-every 4"


run = partial(run_script, python=SCRIPT.name, script=SCRIPT)


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl2")
    return folder / "run", run(folder, f"{SHORT} --run-dir run").stdout


def test_short_run(bandit):
    run_dir, printed = bandit
    summary, rows = json.loads((run_dir / "summary.json").read_text()), read_metrics(run_dir)
    assert summary["global_step"] == 6400 and [int(row["global_step"]) for row in rows][-1] == 6400
    assert all(math.isfinite(float(row[name])) for row in rows for name in rl2.LOSSES)
    assert all(float(row["episodic_length"]) == 10 for row in rows)  # of a trial
    assert len(summary["episode_returns"]) == len(summary["greedy_episode_returns_se"]) == 10
    assert sum(summary["greedy_episode_returns"]) == pytest.approx(summary["trial_return_greedy_mean"])
    assert all(0 < error < 0.1 for error in summary["episode_returns_se"])
    assert sum(summary["episode_returns"]) == pytest.approx(summary["trial_return_mean"])
    assert 0 < summary["trial_return_se"] < 1 and "50 trials in new tasks, greedy actions" in printed
    assert "Bandit, seed 1, preset none, folder run" in printed


def test_evaluate_repeats_the_meta_test(bandit):
    again = run(bandit[0].parent, "--evaluate run").stdout
    assert again.count("trials in new tasks") == 2 and again in bandit[1]
    assert "\n  Thompson sampling     5.833\n" in again and "\n  Bayes optimum         6.660\n" in again


def test_a_meta_test_of_one_trial(bandit, tmp_path):
    """It has no standard error: 0, as NaN is no JSON."""
    shutil.copytree(bandit[0], tmp_path / "run")
    run(tmp_path, "--resume run --test-trials 1")
    text = (tmp_path / "run" / "summary.json").read_text()
    summary = json.loads(text, parse_constant=pytest.fail)
    assert summary["trial_return_se"] == 0 and set(summary["episode_returns_se"]) == {0}


def test_weights_that_are_not_finite_are_not_evaluated(bandit, tmp_path, monkeypatch, capsys):
    shutil.copytree(bandit[0], tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["agent"]["actor.bias"][0] = math.nan
    torch.save(checkpoint, path)
    with pytest.raises(SystemExit) as stop:
        call_main("--evaluate run", tmp_path, monkeypatch, rl2)
    assert stop.value.code == 2 and "the checkpoint's weights are not finite" in capsys.readouterr().err


def test_a_checkpoint_of_other_tasks(bandit, tmp_path, monkeypatch, capsys):
    shutil.copytree(bandit[0], tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        call_main("--evaluate run --num-arms 6", tmp_path, monkeypatch, rl2)
    assert stop.value.code == 2 and "the checkpoint does not fit Bandit" in capsys.readouterr().err


def test_killed_while_it_was_tested(bandit, tmp_path):
    check_resume_only_evaluates(bandit[0], tmp_path, partial(run, tmp_path))


def test_killed_and_resumed_is_the_same(bandit, tmp_path):
    kill_at_first_checkpoint(tmp_path, SHORT, SCRIPT)
    assert "leaves no rollout of 160" in run(tmp_path, "--resume run --total-timesteps 320", code=2).stderr
    run(tmp_path, "--resume run")
    check_same(tmp_path / "run", bandit[0])


def test_a_simulator_killed_and_resumed_is_the_same(tmp_path):
    """With an LSTM each for actor and critic, normalized observations and meta-tests in between."""
    flags = """--env-id HalfCheetahVel --num-trials 4 --rnn-hidden 16 --episode-length 10 --test-trials 5
               --total-timesteps 1040 --checkpoint-every 2 --update-epochs 2 --test-every 3"""
    folders = tmp_path / "expected", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    run(folders[0], f"{flags} --run-dir run")
    kill_at_first_checkpoint(folders[1], flags, SCRIPT)
    run(folders[1], "--resume run")
    check_same(folders[1] / "run", folders[0] / "run")
    steps = [int(row["global_step"]) for row in read_metrics(folders[0] / "run")]
    assert steps == list(range(160, 1041, 80))  # the first 80 steps normalize the observations
    tested = [row["test_return"] != "nan" for row in read_metrics(folders[0] / "run")]
    assert tested == [False] * 2 + [True] * 10
    summary = json.loads((folders[0] / "run" / "summary.json").read_text())
    assert summary["trial_return_greedy_cost"] > 0 and summary["global_step"] == 1040


def test_stops_at_its_goal(tmp_path):
    run(tmp_path, f"{SHORT} --test-every 2 --test-trials 5 --stop-goal 1 --stop-window 2 --run-dir run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 4 * 160
    again = run(tmp_path, "--resume run --total-timesteps 9600").stdout  # nothing is left to train
    assert "have reached stop_goal 1" in again and "after 640 steps: 5 trials in new tasks" in again
    run(tmp_path, "--resume run --stop-goal None --num-minibatches 4 --num-trials 16")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 6400


def test_a_resumed_run_that_reached_its_goal_is_evaluated(tmp_path):
    """It was refused, as its checkpoint said that it had been resumed."""
    kill_at_first_checkpoint(tmp_path, SHORT, SCRIPT)
    run(tmp_path, "--resume run --test-every 2 --test-trials 5 --stop-goal 1 --stop-window 2")
    assert "trials in new tasks" in run(tmp_path, "--evaluate run").stdout


def test_a_task_sampler_of_ones_own(tmp_path):
    (tmp_path / "heavy.py").write_text("""import gymnasium as gym
gym.register("Heavy-v0", entry_point="gymnasium.envs.classic_control.pendulum:PendulumEnv")
def sample(env, rng):
    env.g = rng.uniform(5, 15)
""")
    flags = """--env-id heavy:Heavy-v0 --task-sampler heavy:sample --num-trials 4 --rnn-hidden 16
               --test-trials 4 --episodes-per-trial 2 --episode-length 30 --total-timesteps 720"""
    printed = run(tmp_path, f"{flags} --run-dir run").stdout
    assert "trials in new tasks" in printed and "heavy:Heavy-v0, seed 1, preset simulator" in printed
    moviepy = pytest.importorskip("moviepy")
    assert run(tmp_path, "--evaluate run --capture-video").stdout in printed
    videos = sorted((tmp_path / "run" / "videos").glob("*.mp4"))
    assert [path.stem.split("-")[-1] for path in videos] == ["0", "1"]
    for path in videos:
        with moviepy.VideoFileClip(str(path)) as clip:
            assert clip.duration * clip.fps == pytest.approx(31, abs=1.1)


def test_two_processes_train_the_same_weights(tmp_path):
    """And the first alone plays the meta-tests."""
    flags = f"{SHORT} --env-id TabularMDP --preset none --episodes-per-trial 2 --test-every 4"
    printed, obs = train_in_two_processes(tmp_path, SCRIPT, flags)
    assert not torch.equal(*obs)
    rows = read_metrics(tmp_path / "run")
    assert [int(row["global_step"]) for row in rows] == list(range(640, 6401, 640))
    assert len({row["test_return"] for row in rows}) == 3  # nan, of iteration 4, of iteration 8
    again = run(tmp_path, "--evaluate run").stdout
    assert printed.count("trials in new tasks") == 2 and again in printed


# ---------------------------------------------------------------------------------------------------- presets


def flags_of(command, folder, monkeypatch):
    """The flags that main would train with."""
    taken = []
    monkeypatch.setattr(rl2, "train", lambda args, _: taken.append(args))
    call_main(command, folder, monkeypatch, rl2)
    return taken[0]


@pytest.mark.parametrize(("command", "preset", "some"), [
    ("", "none", {"num_trials": 1024, "rnn": "gru", "gamma": 1.0, "total_timesteps": 6_000_000}),
    ("--env-id TabularMDP", "TabularMDP", {"rnn_hidden": 128, "num_trials": 256, "learning_rate": 0.02}),
    ("--preset hundred --num-arms 10", "hundred", {"episodes_per_trial": 100, "learning_rate": 3e-3}),
    ("--env-id HalfCheetahDir", "HalfCheetahDir", {"rnn": "lstm", "norm_obs": True, "num_trials": 8}),
    ("--env-id HalfCheetahVel --gamma 0.9", "HalfCheetahVel", {"num_trials": 16, "gamma": 0.9}),
    ("--env-id AntDir", "AntDir", {"share_network": False, "chrono_init": False, "input_gain": 1.0}),
    ("--env-id HalfCheetahDir --preset none", "none", {"rnn": "gru", "num_trials": 1024}),
    ("--env-id Pendulum-v1 --task-sampler a:b", "simulator", {"update_epochs": 10, "gamma": 0.95}),
    ("--env-id TabularMDP --preset published", "published",
     {"tabular": False, "privileged_critic": False, "expected_reward": False, "chrono_init": False,
      "input_gain": 1.0, "gamma": 0.99, "gae_lambda": 0.3, "rnn": "gru", "rnn_hidden": 256}),
    ("--preset published", "published", {"env_id": "Bandit", "share_network": False, "clip_coef": 0.1}),
])  # fmt: skip
def test_presets(command, preset, some, tmp_path, monkeypatch):
    args = flags_of(command, tmp_path, monkeypatch)
    assert args.preset == preset and vars(args) | some == vars(args)
    assert args.num_trials % args.num_minibatches == 0


def test_presets_name_flags():
    for name, flags in rl2.PRESETS.items():
        rl2.Args(**flags)
        assert all(flags[flag] != getattr(rl2.Args, flag) for flag in flags), name


@pytest.mark.parametrize("command", [
    "--env-id Bandit --preset hundred", "--env-id Bandit --preset published", "--env-id TabularMDP",
    "--env-id TabularMDP --preset published", "--env-id HalfCheetahDir --episode-length 10",
    "--env-id HalfCheetahVel --episode-length 10", "--env-id AntDir --episode-length 10",
])
def test_presets_train(command, tmp_path, monkeypatch):
    """One rollout each, of which there are small ones."""
    args = flags_of(f"{command} --num-trials 8 --num-minibatches 2 --rnn-hidden 8 --update-epochs 1 "
                    "--test-trials 2 --run-dir run", tmp_path, monkeypatch)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    args.total_timesteps = args.num_trials * args.trial_length * (1 + args.norm_obs)
    summary = rl2.train(args)
    assert summary["global_step"] == args.total_timesteps and math.isfinite(summary["trial_return_mean"])


# ------------------------------------------------------------------------------------------------- bad input


def odd_space(name, render_mode=None):
    """CartPole with sequences as observations or with levels, real numbers rounded, as actions."""
    env = gym.make("CartPole-v1").unwrapped
    levels = gym.spaces.Box(0, 9, (2,), np.int64)
    setattr(env, name, levels if name == "action_space" else gym.spaces.Sequence(levels))
    return env


def never_renders(render_mode=None):
    env = gym.make("CartPole-v1").unwrapped
    env.render = lambda: None
    return env


CARTPOLE = "--env-id CartPole-v1 --task-sampler"


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id bandit", "env_id bandit, task_sampler None: give one of Bandit, TabularMDP, HalfCheetahDir"),
    ("--env-id CartPole-v1", "or a Gymnasium id and a task_sampler"),
    ("--env-id CartPol-v1 --task-sampler samplers:mass", "CartPole"),
    (f"{CARTPOLE} samplers:one_argument", "one_argument() takes 1 positional argument but 2 were given"),
    (f"{CARTPOLE} nowhere:f", "task_sampler nowhere:f"),
    (f"{CARTPOLE} samplers:mas", "has no attribute 'mas'"),
    (f"{CARTPOLE} samplers:number", "task_sampler samplers:number"),
    (f"{CARTPOLE} samplers", "task_sampler samplers, module:function(env, rng)"),
    (f"{CARTPOLE} samplers:typo", "samplers:typo sets new ['mascart']"),
    (f"{CARTPOLE} samplers:returns", "it must set attributes that CartPole-v1 has and return nothing"),
    ("--task-sampler samplers:mass", "env_id Bandit, task_sampler samplers:mass: give one of"),
    ("--env-id HalfCheetahDir --task-sampler samplers:mass", "env_id HalfCheetahDir, task_sampler"),
    (f"{CARTPOLE} samplers:mass --num-arms 3", "num_arms is of no use in CartPole-v1"),
    (f"{CARTPOLE} samplers:mass --no-expected-reward", "expected_reward is of no use in CartPole-v1"),
    ("--env-id TabularMDP --num-arms 3", "num_arms is of no use in TabularMDP"),
    ("--env-id TabularMDP --episode-length 3", "episode_length is of no use in TabularMDP"),
    ("--no-tabular", "tabular is of no use in Bandit"),
    ("--no-learn-std", "learn_std is of no use in Bandit"),
    ("--capture-video", "capture_video is of no use in Bandit"),
    ("--norm-obs", "norm_obs is of no use in Bandit"),
    ("--num-trials 10 --num-minibatches 4", "num_minibatches must divide 10 trials"),
    ("--stop-goal 5", "stop_goal is compared with meta-tests: give test_every"),
    ("--test-every 1 --stop-goal nan", "stop_goal = nan is not in range"),
    ("--env-id Words-v0 --task-sampler samplers:mass", "Words-v0"),
    ("--env-id Levels-v0 --task-sampler samplers:mass", "is not supported"),
    ("--env-id Blind-v0 --task-sampler samplers:mass --capture-video", "it renders nothing"),
    ("--gamma 1.5", "gamma = 1.5 is not in range: 0 to 1"),
    ("--num-arms 0", "num_arms = 0 is not in range: 1 to"),
    ("--total-timesteps 100", "total_timesteps leaves no rollout of 10240 steps"),
    ("--env-id HalfCheetahDir --total-timesteps 6399 --episode-length 200", "leaves no rollout of 3200"),
    ("--device quantum", "device quantum"),
    ("--preset bandit", "preset bandit is none of none, hundred, TabularMDP"),
    ("--resume nowhere", "'nowhere' holds no run of this script"),
    ("--evaluate nowhere", "'nowhere' holds no run of this script"),
])  # fmt: skip
def test_bad_flags(flags, words, samplers, tmp_path, monkeypatch, capsys):
    odd = {"Words-v0": partial(odd_space, "observation_space"),
           "Levels-v0": partial(odd_space, "action_space"), "Blind-v0": never_renders}
    for name, entry_point in odd.items():
        spec = gym.envs.registration.EnvSpec(name, entry_point=entry_point)
        monkeypatch.setitem(gym.registry, name, spec)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        call_main(flags, tmp_path / "empty", monkeypatch, rl2)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and list((tmp_path / "empty").iterdir()) == []
    assert words in unboxed(err) and ("--help" in err or err.count("\n") == 1)


def test_what_is_not_finite_is_named(tmp_path, monkeypatch, capsys):
    step = rl2.Bandit.step
    monkeypatch.setattr(rl2.Bandit, "step", lambda self, action: (*step(self, action)[:4], math.nan * action))
    with pytest.raises(SystemExit) as stop:
        call_main(f"{SHORT} --run-dir run", tmp_path, monkeypatch, rl2)
    assert "rewards not finite in iteration 1" in str(stop.value.code)


def test_speed_is_measured():
    for flags in ("--env-id Bandit --num-trials 16", "--env-id TabularMDP --num-trials 8"):
        row = speed_rl2.measure(flags, 2)
        collect, update, both = (row[name] for name in ("collect_sps", "update_sps", "sps"))
        assert 1 / both == pytest.approx(1 / collect + 1 / update, rel=0.02) and both > 10
