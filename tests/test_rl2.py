"""RL^2: its memory and its trials, tasks with known means, meta-tests, the command line."""

import json
import math
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_cli import read_metrics, train_in_two_processes, unboxed
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


def small_agent(**flags):
    args = small_args(**flags)
    tasks, agent, opt = rl2.build(args, None, CPU)
    rl2.restart(tasks, args.seed, 0, 0)
    return tasks, agent, opt


def random_play(tasks, num_trials, steps, num_actions):
    tasks.reset()
    results = [tasks.step(torch.randint(num_actions, (num_trials, 1))) for _ in range(steps)]
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
        _, after, _, _, expected = tasks.step(torch.randint(5, (20_000, 1)))
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
    action = torch.arange(4).unsqueeze(1)
    rewards = torch.stack([tasks.step(action)[2] for _ in range(4000)])
    torch.testing.assert_close(rewards.mean(0), tasks.pays.gather(1, action)[:, 0], atol=0.04, rtol=0)


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
    transitions = tasks.edges[0].diff(dim=-1, prepend=torch.zeros(10, 5, 1))
    counts, rewards = torch.zeros(10), []
    for _ in range(4000):
        tasks.state, tasks.t = torch.tensor([3]), 0
        obs, _, reward, *_ = tasks.step(torch.tensor([[2]]))
        counts += obs[0, :10]
        rewards.append(reward.item())
    torch.testing.assert_close(counts / 4000, transitions[3, 2], atol=0.04, rtol=0)
    assert np.mean(rewards) == pytest.approx(tasks.means[0, 3, 2].item(), abs=0.07)


@pytest.mark.parametrize(("env_id", "direction"), [("HalfCheetahDir", True), ("HalfCheetahVel", False)])
def test_reward_of_a_runner(env_id, direction):
    args = small_args(env_id=env_id, episode_length=20, num_trials=3, num_minibatches=1)
    tasks = rl2.make_tasks(args, 3, CPU)
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
    tasks = rl2.make_tasks(small_args(env_id="AntDir", episode_length=30), 6, CPU)
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
    tasks = rl2.make_tasks(small_args(env_id="HalfCheetahVel", episode_length=5), 4, CPU)
    _, goal = tasks.reset()
    for _ in range(12):
        tasks.step(torch.zeros(4, 6))
    assert [env.goal for env in tasks.envs.envs] == pytest.approx(goal[:, 0].tolist())
    assert not torch.equal(tasks.reset()[1], goal)


# ----------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("flags", [{}, {"rnn": "lstm"}, {"share_network": False}, {"layer_norm": True},
                                   {"privileged_critic": True, "share_network": False}],
                         ids=lambda flags: "-".join(flags) or "gru")
def test_a_whole_trial_at_once_equals_its_steps(flags):
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=3, **flags)
    rollout, *_ = rl2.collect(tasks, agent)
    state = rollout["states"][0]
    assert not state.any()
    _, logprob, _, value, _ = agent(rollout["obs"], state, action=rollout["actions"])
    torch.testing.assert_close(logprob, rollout["logprobs"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, rollout["values"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(agent.get_value(rollout["obs"], state, None), rollout["values"], atol=1e-5,
                               rtol=1e-5)


def test_inputs_of_a_trial():
    """The observation, and of the step before: action, reward, end of an episode; first 0, 0, 1."""
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=2, tabular=False)
    rollout, obs, _ = rl2.collect(tasks, agent)
    seen, action, reward, done = rollout["obs"].split([10, 5, 1, 1], -1)
    assert torch.equal(seen, obs) and (seen[::10, :, 0] == 1).all()
    assert (action[0, :, 0] == 1).all() and not reward[0].any() and (done[0] == 1).all()
    assert torch.equal(action[1:].argmax(-1, keepdim=True), rollout["actions"][:-1])
    assert torch.equal(reward[1:, :, 0], rollout["rewards"][:-1])
    assert done[:, 0, 0].nonzero().flatten().tolist() == [0, 10]


def test_cells_of_a_table():
    """After the state come the state and action before, as one of 50 cells, and the same times the reward."""
    tasks, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=2)
    rollout, *_ = rl2.collect(tasks, agent)
    state, cell, earned, _, reward, _ = rollout["obs"].split([10, 50, 50, 5, 1, 1], -1)
    assert not cell[0].any() and not earned[0].any()
    expected = state[:-1].argmax(-1) * 5 + rollout["actions"][:-1, :, 0]
    assert torch.equal(cell[1:], torch.nn.functional.one_hot(expected, 50).float())
    assert torch.equal(earned[1:], cell[1:] * reward[1:])


def test_a_table_has_weights_for_each_state():
    _, agent, _ = small_agent(env_id="TabularMDP")
    inputs, actions = torch.zeros(1, 2, agent.input_size), torch.zeros(1, 2, 1, dtype=torch.long)
    inputs[0, 0, 3], inputs[0, 1, 7] = 1, 1
    agent.actor.bias.data[3 * 5] = 4.0  # action 0 in state 3
    _, logprob, *_ = agent(inputs, torch.zeros(2, agent.state_size), action=actions)
    assert logprob[0].exp().tolist() == pytest.approx([np.exp(4) / (np.exp(4) + 4), 0.2], abs=0.02)


def test_gradient_reaches_twenty_steps_back():
    _, agent, _ = small_agent(env_id="TabularMDP", episodes_per_trial=4)
    inputs = torch.randn(40, 2, agent.input_size, requires_grad=True)
    state, action = torch.zeros(2, agent.state_size), torch.zeros(40, 2, 1, dtype=torch.long)
    _, logprob, *_ = agent(inputs, state, action=action)
    logprob[35].sum().backward()
    reached = inputs.grad.abs().sum((1, 2))
    assert (reached[:36] > 0).all() and not reached[36:].any()


def test_value_flows_over_episodes_and_not_over_trials():
    """A reward at the end of a trial counts for its first step, in full as gamma is 1, and for no other."""
    tasks, agent, _ = small_agent(episodes_per_trial=5, gae_lambda=1.0)
    rollout, *_ = rl2.collect(tasks, agent)
    values = torch.zeros_like(rollout["values"])
    rewards = torch.zeros_like(values)
    rewards[-1, 0] = 1
    following = rl2.next_values(agent, rollout, values)
    advantages = rl2.compute_gae(rewards, values, following, rollout["terminated"], rollout["done"], 1.0, 1.0)
    assert torch.equal(advantages[:, 0], torch.ones(5)) and not advantages[:, 1:].any()
    after = rl2.next_values(agent, rollout, torch.ones_like(values))
    assert (after[:-1] == 1).all() and not after[-1].any()


def test_first_minibatch_has_ratio_one():
    tasks, agent, opt = small_agent(env_id="TabularMDP")
    rollout, *_ = rl2.collect(tasks, agent)
    hyper = {name: getattr(agent.args, name) for name in rl2.LIVE}
    hyper |= {"update_epochs": 1, "learning_rate": 0.0}
    stream = rl2.SimpleNamespace(discounted=torch.zeros(16))
    losses = rl2.update(agent, opt, rollout, stream, hyper, rl2.train_step)
    assert abs(losses["approx_kl"]) < 1e-6 and losses["clipfrac"] == 0


def test_expected_rewards_are_for_advantages_only():
    drawn, expected = (rl2.collect(*small_agent(expected_reward=flag)[:2])[0] for flag in (False, True))
    assert torch.equal(drawn["obs"], expected["obs"])  # the agent sees what was drawn
    assert set(drawn["rewards"].unique().tolist()) == {0, 1} and len(expected["rewards"].unique()) > 40


def test_only_a_privileged_critic_sees_the_task():
    tasks, agent, _ = small_agent(privileged_critic=True)
    rollout, *_ = rl2.collect(tasks, agent)
    inputs, state = rollout["obs"], rollout["states"][0]
    assert inputs.shape[-1] == agent.input_size + 3  # best and random, share of the steps that is left
    hints = torch.stack([tasks.pays.amax(1), tasks.pays.mean(1), torch.ones(16)], 1)
    for left, row in zip(range(10, 0, -1), inputs[..., agent.input_size :], strict=True):
        torch.testing.assert_close(row, left / 10 * hints)
    other = inputs.clone()
    other[..., agent.input_size :] += 1
    results = [agent(x, state, action=rollout["actions"]) for x in (inputs, other)]
    assert torch.equal(results[0][1], results[1][1]) and not torch.equal(results[0][3], results[1][3])


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_chrono_init_keeps_the_memory_for_up_to_a_trial(rnn):
    """A gate's bias of log(t) forgets a share 1 / (1 + t) each step."""
    for on in (True, False):
        agent = small_agent(rnn=rnn, episodes_per_trial=50, rnn_hidden=200, chrono_init=on)[1]
        inward, keep, *others = agent.memories[0].bias_ih_l0.split(200)  # GRU: r, z, n; LSTM: i, f, g, o
        assert not torch.cat(others).any() and not agent.memories[0].bias_hh_l0.any()
        assert torch.equal(inward, -keep if rnn == "lstm" else torch.zeros(200))
        times = keep.exp()
        low, high, mean = (1, 49, 25) if on else (1, 1, 1)
        assert low <= times.min() < low + 2 and high - 2 < times.max() <= high + 1e-4
        assert times.mean().item() == pytest.approx(mean, abs=4)


def test_returns_of_episodes():
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
    done = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    assert rl2.episode_returns(rewards, done, 2).tolist() == [[3, 1], [12, 2]]  # a third is not scored


def test_what_follows_the_scored_episodes_is_not_learned():
    """CartPole pays 1 a step: if all steps of a trial counted, all policies would earn the same."""
    tasks, agent, _ = small_agent(env_id="CartPole-v1", task_sampler="operator:eq", num_trials=8,
                                  episodes_per_trial=2, episode_length=40)
    rollout, _, episodes = rl2.collect(tasks, agent)
    assert torch.equal(rollout["rewards"].sum(0), episodes.sum(0)) and (episodes.sum(0) < 80).any()


def test_errors_of_all_tasks_of_a_speed():
    """Also where they are tested in groups: 210 tasks are a group of 200 and one of 10."""
    flags = {"env_id": "HalfCheetahVel", "episodes_per_trial": 2, "episode_length": 3, "num_minibatches": 1}
    _, agent, _ = small_agent(**flags)
    episodes, errors = rl2.meta_test(agent, True, 210)
    assert episodes.shape == (2, 210) and errors.shape == (3, 210)  # of the last episode's steps
    assert (np.abs(errors).sum(0) < -episodes[1] + 1e-3).all()  # a return is that and the actions' cost
    assert len(np.unique(errors[0])) == 210


def test_a_runners_goal_is_the_critics_hint():
    args = small_args(env_id="HalfCheetahVel", num_trials=3, num_minibatches=1, privileged_critic=True,
                      episodes_per_trial=2, episode_length=3)
    tasks, agent, _ = rl2.build(args, None, CPU)
    rollout, *_ = rl2.collect(tasks, agent)
    goals = torch.tensor([env.goal for env in tasks.envs.envs])
    for inputs in rollout["obs"]:
        torch.testing.assert_close(inputs[:, agent.input_size], goals)


def test_meta_test_disturbs_nothing_and_repeats():
    _, agent, _ = small_agent()
    before = torch.get_rng_state()
    one, two = (rl2.meta_test(agent, False, 30)[0] for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()) and (one == two).all() and one.shape == (10, 30)
    assert (one != rl2.meta_test(agent, False, 30, when=1)[0]).any()


def test_stop_goal_needs_a_full_window():
    args = small_args(test_every=1, stop_goal=5.0, stop_window=3)
    assert not rl2.reached([(1, 9.0), (2, 9.0)], args) and rl2.reached([(1, 0.0), *((2, 5.0),) * 3], args)
    assert not rl2.reached([(1, 9.0), (2, 4.0), (3, 9.0)], args)


def test_learns_to_learn_a_bandit(tmp_path):
    """Two arms, ten pulls: a random policy gets 5, the Bayes-optimal one 6.0218."""
    args = rl2.Args(num_arms=2, total_timesteps=250_000, num_trials=200, rnn_hidden=32, learning_rate=3e-3,
                    run_dir=str(tmp_path / "run"), test_trials=20_000)
    summary = rl2.train(args)
    assert 5.7 < summary["trial_return_greedy_mean"] < 6.0218 + 4 * summary["trial_return_greedy_se"]
    assert summary["episode_returns"][-1] > summary["episode_returns"][0] + 0.06


# ----------------------------------------------------------------------------------------------- command line

SHORT = "--num-trials 16 --rnn-hidden 16 --test-trials 50 --total-timesteps 6400 --checkpoint-every 4"


def run(folder, flags, code=0):
    """Run the script, copied alone into that folder, and check its exit status."""
    shutil.copy(SCRIPT, folder)
    done = subprocess.run([sys.executable, SCRIPT.name, *flags.split()], cwd=folder, capture_output=True,
                          text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl2")
    return folder / "run", run(folder, f"{SHORT} --run-dir run").stdout


def test_short_run(bandit):
    run_dir, printed = bandit
    summary, rows = json.loads((run_dir / "summary.json").read_text()), read_metrics(run_dir)
    assert summary["global_step"] == 6400 and [int(row["global_step"]) for row in rows][-1] == 6400
    assert all(math.isfinite(float(row[name])) for row in rows for name in rl2.METRICS)
    assert len(summary["episode_returns"]) == len(summary["greedy_episode_returns_se"]) == 10
    assert sum(summary["greedy_episode_returns"]) == pytest.approx(summary["trial_return_greedy_mean"])
    assert all(0 < error < 0.1 for error in summary["episode_returns_se"])
    assert sum(summary["episode_returns"]) == pytest.approx(summary["trial_return_mean"])
    assert 0 < summary["trial_return_se"] < 1 and "trials in new tasks" in printed


def test_evaluate_repeats_the_meta_test(bandit):
    again = run(bandit[0].parent, "--evaluate run").stdout
    assert again.count("trials in new tasks") == 2 and again in bandit[1]
    assert "\n  Bayes optimum         6.660\n" in again


def test_killed_while_it_was_tested(bandit, tmp_path):
    check_resume_only_evaluates(bandit[0], tmp_path, partial(run, tmp_path))


def test_killed_and_resumed_is_the_same(bandit, tmp_path):
    kill_at_first_checkpoint(tmp_path, SHORT, SCRIPT)
    assert "leaves no rollout of 160" in run(tmp_path, "--resume run --total-timesteps 320", code=2).stderr
    run(tmp_path, "--resume run")
    check_same(tmp_path / "run", bandit[0])


def test_stops_at_its_goal(tmp_path):
    run(tmp_path, f"{SHORT} --test-every 2 --test-trials 5 --stop-goal 1 --stop-window 2 --run-dir run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 4 * 160
    refused = run(tmp_path, "--resume run --total-timesteps 9600", code=2)
    assert "has reached --stop-goal 1: give" in refused.stderr
    run(tmp_path, "--resume run --stop-goal None --num-minibatches 4 --num-trials 16")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 6400


def test_a_task_sampler_of_ones_own(tmp_path):
    (tmp_path / "heavy.py").write_text("""import gymnasium as gym
gym.register("Heavy-v0", entry_point="gymnasium.envs.classic_control.pendulum:PendulumEnv")
def sample(env, rng):
    env.g = rng.uniform(5, 15)
""")
    flags = """--env-id heavy:Heavy-v0 --task-sampler heavy:sample --num-trials 4 --rnn-hidden 16
               --test-trials 4 --episodes-per-trial 2 --episode-length 30 --total-timesteps 480"""
    printed = run(tmp_path, f"{flags} --run-dir run").stdout
    assert "trials in new tasks" in printed and "heavy:Heavy-v0" in printed
    moviepy = pytest.importorskip("moviepy")
    assert run(tmp_path, "--evaluate run --capture-video").stdout in printed
    videos = sorted((tmp_path / "run" / "videos").glob("*.mp4"))
    assert [path.stem.split("-")[-1] for path in videos] == ["0", "1"]
    for path in videos:
        with moviepy.VideoFileClip(str(path)) as clip:
            assert clip.duration * clip.fps == pytest.approx(31, abs=1.1)


def test_two_processes_train_the_same_weights(tmp_path):
    printed, obs = train_in_two_processes(tmp_path, SCRIPT, SHORT)
    assert not torch.equal(*obs)
    assert [int(row["global_step"]) for row in read_metrics(tmp_path / "run")] == list(range(320, 6401, 320))
    again = run(tmp_path, "--evaluate run").stdout
    assert "trials in new tasks" in again and again in printed


def odd_space(name):
    """CartPole with sequences as observations or with levels, real numbers rounded, as actions."""
    env = gym.make("CartPole-v1").unwrapped
    levels = gym.spaces.Box(0, 9, (2,), np.int64)
    setattr(env, name, levels if name == "action_space" else gym.spaces.Sequence(levels))
    return env


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id Bandi", "is none of Bandit, TabularMDP, HalfCheetahDir, HalfCheetahVel, AntDir: give a"),
    ("--env-id CartPol-v1 --task-sampler math:pow", "CartPole-v1"),
    ("--env-id CartPole-v1 --task-sampler math:sqrt", "which takes an environment and a numpy generator"),
    ("--env-id CartPole-v1 --task-sampler nowhere:f", "--task-sampler nowhere:f"),
    ("--num-trials 10 --num-minibatches 4", "--num-minibatches 4 does not divide the 10 trials"),
    ("--env-id CartPole-v1 --task-sampler math:pi", "--task-sampler math:pi: 3.14"),
    ("--task-sampler math:sqrt", "--task-sampler: Bandit has tasks of its own"),
    ("--stop-goal 5", "--stop-goal 5 is compared with meta-tests: give --test-every"),
    ("--capture-video", "--capture-video: Bandit has no pictures"),
    ("--norm-obs", "--norm-obs: Bandit observes no numbers to normalise"),
    ("--num-trials 8 --num-minibatches 8 --episodes-per-trial 1", "one step has no deviation"),
    ("--num-trials 1 --num-minibatches 1 --episodes-per-trial 1 --no-norm-adv", "one step has no deviation"),
    ("--test-every 1 --stop-goal nan", "--stop-goal nan is out of range"),
    ("--env-id Words-v0 --task-sampler math:pow", "is not a vector"),
    ("--env-id Levels-v0 --task-sampler math:pow", "Box of real numbers and Discrete are"),
    ("--gamma 1.5", "--gamma 1.5 is out of range: give 0 to 1"),
    ("--num-arms 0", "--num-arms 0 is out of range: give 1"),
    ("--total-timesteps 100", "--total-timesteps 100 leaves no rollout of 10240 steps"),
    ("--device quantum", "--device quantum is not there"),
    ("--resume nowhere", "no checkpoint nowhere/checkpoint.pt"),
])  # fmt: skip
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    for name, space in (("Words", "observation_space"), ("Levels", "action_space")):
        monkeypatch.setitem(gym.registry, f"{name}-v0", gym.envs.registration.EnvSpec(
            f"{name}-v0", entry_point=lambda space=space: odd_space(space)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags.split()])
    with pytest.raises(SystemExit) as stop:
        rl2.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and list(tmp_path.iterdir()) == []
    assert words in unboxed(err)


def test_speed_is_measured():
    for flags in ("--env-id Bandit --num-trials 16", "--env-id TabularMDP --num-trials 8"):
        row = speed_rl2.measure(flags, 2)
        collect, update, both = (row[name] for name in ("collect_sps", "update_sps", "sps"))
        assert 1 / both == pytest.approx(1 / collect + 1 / update, rel=0.02) and both > 10
