"""The reference learners of RL^2's tasks against brute force, exact values and published scores.

A simulation is compared with an exact value within 4 of its standard errors, with another simulation within 4
of both together. Published are the tables of Duan et al. (2016), 1000 trials a row."""

import csv
import itertools
import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "references.py"
sys.path.insert(0, str(SCRIPT.parent))

import references as ref  # noqa: E402

import rl2_meta as rl2  # noqa: E402


def score(task, learner, **flags):
    """Score and standard error."""
    columns = ref.score(learner, ref.Args(task=task, **flags))
    return columns["score"], columns["score_se"]


def assert_near(measured, expected, expected_se=0.0):
    mean, se = measured
    assert abs(mean - expected) < 4 * np.hypot(se, expected_se), f"{mean:.3f} ± {se:.3f}, not {expected}"


# ------------------------------------------------------------------------------------------------- both tasks


def test_equals_are_chosen_at_random():
    chosen = ref.argmax(np.tile([1.0, 3.0, 2.0, 3.0], (10_000, 1)), np.random.default_rng(0))
    assert set(chosen) == {1, 3}
    assert abs((chosen == 1).mean() - 0.5) < 0.02


def test_exploring_takes_any_action_in_a_share_of_rows():
    rng = np.random.default_rng(0)
    scores = ref.explore(np.tile([0.0, 1.0, 2.0], (30_000, 1)), 0.3, rng)
    share = np.bincount(ref.argmax(scores, rng)) / 30_000
    np.testing.assert_allclose(share, [0.1, 0.1, 0.8], atol=0.01)


@pytest.mark.parametrize("task, learner, episodes, expected",
                         [("bandit", ref.random_arm, 10, 5), ("mdp", ref.random_action, 5, 50)])
def test_score_estimates_what_raw_does_with_less_noise(task, learner, episodes, expected):
    columns = ref.score(learner, ref.Args(task=task, episodes=episodes, trials=4000))
    assert_near((columns["score"], columns["score_se"]), expected)
    assert_near((columns["raw"], columns["raw_se"]), expected)
    assert columns["score_se"] < columns["raw_se"]


def curve(task, learner, **flags):
    return np.array(ref.score(learner, ref.Args(task=task, **flags))["episode_returns"])


@pytest.mark.parametrize("task, learner", [("bandit", ref.thompson), ("mdp", ref.bucb_vi)])
def test_the_adaptation_curve_sums_to_the_score(task, learner):
    flags = {"episodes": 6, "trials": 700}
    shares = curve(task, learner, **flags)
    assert shares.shape == (6,)
    assert shares.sum() == pytest.approx(score(task, learner, **flags)[0], abs=6 * 5e-5)  # 4 digits each


def test_who_does_not_learn_has_a_flat_curve_and_who_learns_a_rising_one():
    flags = {"trials": 20_000, "episodes": 10}
    np.testing.assert_allclose(curve("bandit", ref.random_arm, **flags), 0.5, atol=0.01)
    for learner, per_pull in ((ref.thompson, 0.01), (ref.optimistic_thompson, 0.02)):
        rises = np.diff(curve("bandit", learner, **flags))
        assert np.all(rises > 0) and rises.mean() > per_pull, rises
    flags = {"trials": 1000, "episodes": 4}
    np.testing.assert_allclose(curve("mdp", ref.random_action, **flags), 10, atol=0.7)
    assert np.all(np.diff(curve("mdp", ref.bucb_vi, **flags)) > 1)


def test_greedy_curve_by_hand():
    # a fresh arm, then the same again after a success, mean 2/3, and the other after a failure, mean 1/2
    expected = [1 / 2, 1 / 2 * 2 / 3 + 1 / 2 * 1 / 2]
    np.testing.assert_allclose(curve("bandit", ref.greedy, num_arms=2, episodes=2, trials=20_000), expected,
                               atol=0.01)


def test_score_of_who_knows_the_best_arm_has_no_noise():
    args = ref.Args(num_arms=4, episodes=7, trials=1200)
    tasks = [np.random.default_rng((args.seed, start, 0)).random((trials, 4))
             for start, trials in ((0, 500), (500, 500), (1000, 200))]
    arms = iter([p for p in tasks for _ in range(7)])
    columns = ref.score(lambda *_: next(arms), args)
    assert columns["score"] == pytest.approx(7 * 4 / 5)
    assert columns["score_se"] < 1e-12
    assert columns["episode_returns"] == [0.8] * 7


# ---------------------------------------------------------------------------------------------------- bandits

BANDIT = {
    "random": ref.random_arm,
    "greedy": ref.greedy,
    "epsilon-greedy": ref.epsilon_greedy,
    "ucb1": ref.ucb1,
    "gittins": partial(ref.gittins, table=ref.gittins_table(10)),
    "thompson": ref.thompson,
    "optimistic-thompson": ref.optimistic_thompson,
}


def exact_score(learner, num_arms, num_pulls, epsilon=0.0):
    """Of a learner without randomness but that of equals, and of exploring with `epsilon`."""

    @cache
    def value(arms, remaining):
        if not remaining:
            return 0.0
        counts = np.array(arms, float)
        scores = learner(counts[None, :, 0], counts[None, :, 1], remaining, None)[0]
        best = scores == scores.max()
        chances = (1 - epsilon) * best / best.sum() + epsilon / num_arms
        return sum(chance * pull(arms, i, remaining) for i, chance in enumerate(chances) if chance)

    def pull(arms, i, remaining):
        (s, f), others = arms[i], arms[:i] + arms[i + 1:]
        mean = (s + 1) / (s + f + 2)
        won, lost = (tuple(sorted([*others, seen])) for seen in ((s + 1, f), (s, f + 1)))
        return mean * (1 + value(won, remaining - 1)) + (1 - mean) * value(lost, remaining - 1)

    return value(((0, 0),) * num_arms, num_pulls)


def all_policies(num_arms, num_pulls):
    """Best mean score of the deterministic policies, written out as an arm for each history of rewards."""
    histories = [h for t in range(num_pulls) for h in itertools.product((0, 1), repeat=t)]
    best = 0.0
    for arms in itertools.product(range(num_arms), repeat=len(histories)):
        policy, total = dict(zip(histories, arms, strict=True)), 0.0
        for rewards in itertools.product((0, 1), repeat=num_pulls):
            chance, counts = 1.0, np.ones((num_arms, 2))  # Beta(1, 1)
            for t, reward in enumerate(rewards):
                arm = policy[rewards[:t]]
                chance *= counts[arm, 1 - reward] / counts[arm].sum()
                counts[arm, 1 - reward] += 1
            total += chance * sum(rewards)
        best = max(best, total)
    return best


@pytest.mark.parametrize("num_arms, num_pulls", [(1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3)])
def test_bayes_optimum_is_the_best_of_all_policies(num_arms, num_pulls):
    assert ref.bayes_optimum(num_arms, num_pulls) == pytest.approx(all_policies(num_arms, num_pulls))


@pytest.mark.parametrize("num_arms, expected", [(5, 6.65999), (10, 6.71395), (50, 6.71395)])
def test_bayes_optimum_of_10_pulls(num_arms, expected):
    assert ref.bayes_optimum(num_arms, 10) == pytest.approx(expected, abs=5e-6)


def test_bayes_optimum_of_two_pulls_by_hand():
    # the same arm again after a success, mean 2/3; a new one after a failure, mean 1/2
    assert ref.bayes_optimum(2, 2) == pytest.approx(1 / 2 + 1 / 2 * 2 / 3 + 1 / 2 * 1 / 2)


def stopping_value(s, f, remaining, charge):
    """Of one arm, by recursion."""
    if not remaining:
        return 0.0
    mean = (s + 1) / (s + f + 2)
    won, lost = (stopping_value(*seen, remaining - 1, charge) for seen in ((s + 1, f), (s, f + 1)))
    return max(0.0, mean - charge + mean * won + (1 - mean) * lost)


def test_gittins_index_is_the_charge_at_which_an_arm_ceases_to_pay():
    table = ref.gittins_table(5)
    for remaining in range(1, 6):
        for s, f in ((s, f) for s in range(6) for f in range(6) if s + f <= 5 - remaining):
            low, high = 0.0, 1.0
            for _ in range(40):
                middle = (low + high) / 2
                pays = stopping_value(s, f, remaining, middle) > 1e-13
                low, high = (middle, high) if pays else (low, middle)
            t = s + f
            assert table[remaining][t * (t + 1) // 2 + s] == pytest.approx(low, abs=3e-4), (s, f, remaining)


def test_gittins_index_by_hand_and_its_order():
    table = ref.gittins_table(30)
    means = [1 / 2, 1 / 3, 2 / 3, 1 / 4, 1 / 2, 3 / 4]
    np.testing.assert_allclose(table[1][:6], means, atol=1e-4)
    # two pulls of a fresh arm: 1/2 - x + 1/2 (2/3 - x) = 0 at x = 5/9
    assert table[2][0] == pytest.approx(5 / 9, abs=1e-4)
    fresh = [float(indices[0]) for indices in table[1:]]
    assert fresh == sorted(fresh)  # the more pulls are left, the more there is to learn for
    assert all(np.all(np.diff(table[5][t * (t + 1) // 2:][:t + 1]) > 0) for t in range(25))  # successes


@pytest.mark.parametrize("name", ["random", "greedy", "epsilon-greedy", "ucb1", "gittins"])
def test_play_gives_the_exact_mean_score(name):
    epsilon = 0.1 if name == "epsilon-greedy" else 0.0
    learner = BANDIT["greedy" if epsilon else name]
    exact = exact_score(learner, 3, 8, epsilon)
    if name == "gittins":  # of 10 pulls: a table serves shorter trials
        assert exact <= ref.bayes_optimum(3, 8) + 1e-9
    assert_near(score("bandit", BANDIT[name], num_arms=3, episodes=8, trials=20_000), exact)


@pytest.mark.parametrize("num_arms, num_pulls, gap",
                         [(5, 10, 1e-9), (10, 10, 1e-9), (2, 14, 0.01), (4, 12, 0.01)])
def test_finite_horizon_gittins_is_optimal_over_10_pulls_and_nearly_so_over_more(num_arms, num_pulls, gap):
    optimum = ref.bayes_optimum(num_arms, num_pulls)
    exact = exact_score(partial(ref.gittins, table=ref.gittins_table(num_pulls)), num_arms, num_pulls)
    assert optimum - gap < exact <= optimum + 1e-9
    assert exact > exact_score(ref.ucb1, num_arms, num_pulls)
    assert exact > exact_score(ref.greedy, num_arms, num_pulls)


@pytest.mark.parametrize("name", list(BANDIT))
@pytest.mark.parametrize("num_arms", [5, 10])
def test_no_learner_is_above_the_optimum(name, num_arms):
    mean, se = score("bandit", BANDIT[name], num_arms=num_arms, episodes=10, trials=10_000)
    assert mean < ref.bayes_optimum(num_arms, 10) + 4 * se


def test_thompson_scores_as_published():
    for num_arms, published, se in ((5, 5.7, 0.07), (10, 5.5, 0.06), (50, 5.2, 0.06)):
        assert_near(score("bandit", ref.thompson, num_arms=num_arms, trials=2000), published, se)
    assert_near(score("bandit", ref.thompson, num_arms=5, episodes=100, trials=2000), 75.21, 0.11)


def test_optimistic_thompson_scores_as_published():
    learner = partial(ref.optimistic_thompson, samples=20)
    for num_arms, published, se in ((5, 6.5, 0.07), (10, 6.2, 0.06)):
        assert_near(score("bandit", learner, num_arms=num_arms, trials=4000), published, se)
    assert_near(score("bandit", learner, episodes=100, trials=1000), 77.9, 0.51)


def test_optimistic_thompson_prefers_the_dense_sample():
    """After 50 of 100 successes it lies closer to a half than a single sample does, which is Beta(51, 51)."""
    counts, deviation = np.full((5000, 1), 50.0), {}
    for samples in (1, 20):
        drawn = ref.optimistic_thompson(counts, counts, 1, np.random.default_rng(0), samples)
        deviation[samples] = np.abs(drawn - 0.5).mean()
    assert deviation[1] == pytest.approx(np.sqrt(2 / np.pi * 51 * 51 / (102**2 * 103)), rel=0.05)
    assert deviation[20] < deviation[1] / 5


@pytest.mark.parametrize("num_arms, ucb, ucb_se, gittins, gittins_se",
                         [(5, 78.38, 0.08, 78.65, 0.07), (10, 83.12, 0.08, 83.78, 0.06)])
def test_100_pulls_of_ucb_and_gittins(num_arms, ucb, ucb_se, gittins, gittins_se):
    table = ref.gittins_table(100)
    flags = {"num_arms": num_arms, "episodes": 100, "trials": 4000}
    assert_near(score("bandit", ref.ucb1, **flags), ucb, ucb_se)
    assert_near(score("bandit", partial(ref.gittins, table=table), **flags), gittins, gittins_se)


def test_greedy_scores_as_published_if_the_first_of_equals_is_taken(monkeypatch):
    flags = {"num_arms": 50, "episodes": 100, "trials": 2000}
    assert score("bandit", ref.greedy, **flags)[0] > 79
    monkeypatch.setattr(ref, "argmax", lambda scores, rng: scores.argmax(-1))
    assert_near(score("bandit", ref.greedy, **flags), 78.0, 0.28)


def test_ucb1_by_hand():
    scores = ref.ucb1(np.array([[1.0, 0.0]]), np.array([[1.0, 1.0]]), 7, None, c=0.5)
    np.testing.assert_allclose(scores, [[1 / 2 + 0.5 * np.sqrt(2 * np.log(3) / 4),
                                         1 / 3 + 0.5 * np.sqrt(2 * np.log(3) / 3)]])
    assert np.all(ref.ucb1(np.zeros((1, 2)), np.zeros((1, 2)), 10, None) == 0.5)


# ------------------------------------------------------------------------------------------------------- MDPs


def tiny_mdps(num_tasks=4, states=2, actions=2, seed=0):
    rng = np.random.default_rng(seed)
    transitions = ref.normalised(rng.random((num_tasks, states, actions, states)))
    return ref.MDPs(transitions, rng.normal(1, 1, (num_tasks, states, actions)))


def test_sampled_mdps_have_the_tasks_distributions():
    mdps = ref.sample_mdps(400, np.random.default_rng(0))
    assert mdps.transitions.shape == (400, 10, 5, 10)
    np.testing.assert_allclose(mdps.transitions.sum(-1), 1)
    # an entry of Dirichlet(1 x 10) is Beta(1, 9)
    assert mdps.transitions.var() == pytest.approx(9 / (100 * 11), rel=0.02)
    assert mdps.means.mean() == pytest.approx(1, abs=0.03)
    assert mdps.means.std() == pytest.approx(1, abs=0.03)


def test_optimal_value_is_the_best_of_all_policies():
    horizon, mdps = 3, tiny_mdps()
    for task, optimum in enumerate(ref.optimal_value(mdps, horizon)):
        best = -np.inf
        for choice in itertools.product(range(2), repeat=2 * horizon):
            policy, state, total = np.reshape(choice, (horizon, 2)), np.array([1.0, 0.0]), 0.0
            for actions in policy:
                total += state @ mdps.means[task, [0, 1], actions]
                state = state @ mdps.transitions[task, [0, 1], actions]
            best = max(best, total)
        assert optimum == pytest.approx(best)


def test_mean_optimum_of_an_episode():
    optima = ref.optimal_value(ref.sample_mdps(20_000, np.random.default_rng(0)))
    assert_near(ref.mean_and_error(optima), ref.MEAN_OPTIMUM, ref.MEAN_OPTIMUM_SE)
    assert abs(ref.MEAN_OPTIMUM - 21.68) < 4 * 0.08  # an independent value of 800 MDPs


def test_who_knows_the_mdp_collects_its_optimum():
    mdps = ref.sample_mdps(1000, np.random.default_rng(0))
    known = partial(ref.expectation, mdps.transitions)
    _, expected = ref.play_mdp(lambda seen, rng, horizon: ref.plan(mdps.means, known, horizon), mdps, 2,
                               np.random.default_rng(1))
    assert_near(ref.mean_and_error(expected.mean(-1) - ref.optimal_value(mdps)), 0)


def test_what_is_seen():
    mdps, seen = tiny_mdps(num_tasks=1), []

    def learner(now, rng, horizon):
        seen.append((now.visits.sum(), now.transitions.sum(), now.rewards.sum(), now.episode))
        q = np.zeros((horizon, 1, 2, 2))
        q[:, :, :, 1] = 1
        return q

    returns, expected = ref.play_mdp(learner, mdps, 3, np.random.default_rng(0), horizon=4)
    visits, transitions, rewards, episodes = zip(*seen, strict=True)
    assert visits == (0, 4, 8) and episodes == (0, 1, 2)
    assert transitions == (0, 3, 6)  # not those out of the last step
    assert rewards == pytest.approx((0, returns[0, 0], returns[0, :2].sum()))
    assert returns.shape == expected.shape == (1, 3)
    low, high = mdps.means[0, :, 1].min(), mdps.means[0, :, 1].max()
    assert np.all((expected >= 4 * low) & (expected <= 4 * high))  # only action 1 was done


def test_replanning_asks_at_each_step():
    asked = []

    def learner(seen, rng, horizon):
        asked.append(seen.visits.sum())
        return ref.random_action(seen, rng, horizon)

    ref.play_mdp(learner, tiny_mdps(1), 2, np.random.default_rng(0), horizon=3, replan="step")
    assert asked == [0, 1, 2, 3, 4, 5]


def test_posterior_by_hand():
    seen = ref.Seen(np.array([[[3.0]]]), np.array([[[6.0]]]), np.array([[[[2.0, 1.0]]]]))
    mean, precision, alpha = ref.posterior(seen, mu0=1.0, tau0=2.0, alpha0=0.5)
    assert (mean.item(), precision.item(), alpha.ravel().tolist()) == (8 / 5, 5, [2.5, 1.5])


def test_optimistic_expectation_is_the_best_in_the_ball():
    rng = np.random.default_rng(0)
    candidates = rng.dirichlet(np.ones(3), 20_000)
    for _ in range(10):
        chances, values, slack = rng.dirichlet(np.ones(3)), rng.normal(size=3), rng.uniform(0, 1.5)
        found = ref.optimistic_expectation(chances[None, None, None], slack, values[None]).item()
        near = candidates[np.abs(candidates - chances).sum(-1) <= slack]
        best = max([chances @ values, *(near @ values)])
        assert best - 1e-12 <= found <= best + 0.1
    no_slack = ref.optimistic_expectation(chances[None, None, None], 0.0, values[None]).item()
    assert no_slack == pytest.approx(chances @ values)
    all_slack = ref.optimistic_expectation(chances[None, None, None], 2.0, values[None]).item()
    assert all_slack == pytest.approx(values.max())


def test_greedy_believes_what_it_has_seen_once():
    seen = ref.Seen(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)), np.zeros((1, 2, 2, 2)))
    seen.visits[0, 0], seen.rewards[0, 0], seen.transitions[0, 0, :, 1] = 1, [3.0, -2.0], 1
    seen.visits[0, 1], seen.rewards[0, 1] = 1, [5.0, 4.0]
    q = ref.greedy_mdp(seen, None, 2)
    np.testing.assert_allclose(q[1, 0], [[3, -2], [5, 4]], atol=1e-2)
    np.testing.assert_allclose(q[0, 0, 0], [3 + 5, -2 + 5], atol=1e-2)


def test_beb_bonus_by_hand():
    """One step left: only the reward's bonus; two: also the transition's, for all actions alike at first."""
    seen = ref.Seen(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)), np.zeros((1, 2, 2, 2)))
    q = ref.beb(seen, None, 2, mu0=0.0, scaling=0.5)
    np.testing.assert_allclose(q[1], 1 / 2)
    np.testing.assert_allclose(q[0], 1 / 2 + 0.5 * 2 * 2**3 / (1 + 2) + 1 / 2)


LEARNERS = {  # published score of 10 episodes; its standard error is 0.9
    "greedy": (ref.greedy_mdp, 134.8),
    "epsilon-greedy": (partial(ref.epsilon_greedy_mdp, epsilon=0.1), 132.8),
    "psrl": (ref.psrl, 138.1),
    "opsrl": (partial(ref.opsrl, samples=20), 144.1),
    "ucrl2": (ref.ucrl2, 146.6),
    "beb": (partial(ref.beb, scaling=3e-3), 150.2),
}


@pytest.mark.parametrize("name", list(LEARNERS))
def test_mdp_learners_score_as_published(name):
    learner, published = LEARNERS[name]
    assert_near(score("mdp", learner, trials=1000), published, 0.9)


def test_psrl_explores_less_and_scores_more_with_the_published_prior():
    wrong, true = (score("mdp", partial(ref.psrl, mu0=mu0), trials=1000) for mu0 in (0, 1))
    assert_near(wrong, 136.8, 0.8)
    assert_near(true, 132.1, 0.8)
    assert wrong[0] > true[0]
    assert_near(score("mdp", ref.psrl, episodes=25, trials=500), 405.0, 2.0)


def test_bucb_vi_is_the_strongest():
    mean, se = score("mdp", ref.bucb_vi, trials=1000)
    assert mean - 4 * se > 150.2  # BEB, the best of the published ones
    at_once, at_once_se = score("mdp", ref.bucb_vi, trials=1000, replan="step")
    assert at_once - mean > 4 * np.hypot(se, at_once_se)
    assert score("mdp", ref.bucb_vi, episodes=50, trials=250)[0] > 936.1  # RL^2


def test_bucb_vi_with_the_first_of_equals(monkeypatch):
    monkeypatch.setattr(ref, "argmax", lambda scores, rng: scores.argmax(-1))
    for episodes, c, expected, se in ((10, 0.5, 150.0, 0.8), (10, 1.5, 144.4, 0.8), (25, 1.0, 440.2, 2.0)):
        assert_near(score("mdp", partial(ref.bucb_vi, c=c), episodes=episodes, trials=500), expected, se)


# ----------------------------------------------------------------------------------------------- command line


def run(*flags):
    command = [sys.executable, SCRIPT, *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_table_and_csv(tmp_path):
    path = tmp_path / "new" / "table.csv"
    first = run("--episodes", 4, "--num-arms", 3, "--trials", 50, "--csv", path)
    second = run("--task", "mdp", "--episodes", 2, "--trials", 4, "--csv", path,
                 "--learners", "psrl", "bucb-vi")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == len(first.stdout.splitlines()) + len(second.stdout.splitlines()) - 2  # two headings
    learners = [row["learner"] for row in rows if row["task"] == "mdp"]
    assert learners == ["psrl"] * 2 + ["bucb-vi"] * 3 + ["task known"]
    optimum = next(row for row in rows if row["learner"] == "bayes optimum")
    assert float(optimum["score"]) == pytest.approx(ref.bayes_optimum(3, 4), abs=1e-5)
    for row in rows:  # bounds have no curve
        shares = json.loads(row["episode_returns"] or "[]")
        assert len(shares) == (int(row["episodes"]) if row["trials"] else 0)
        assert not shares or sum(shares) == pytest.approx(float(row["score"]), abs=1e-3)
    again = run("--episodes", 4, "--num-arms", 3, "--trials", 50)
    assert again.stdout == first.stdout


@pytest.mark.parametrize("flags", [("--num-arms", 0), ("--episodes", 0), ("--trials", 1), ("--seed", -1),
                                   ("--learners", "sarsa"), ("--csv", "."), ("--csv", SCRIPT)])
def test_bad_values_get_one_sentence(flags):
    result = run(*flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


EXACT = ("UCB1", "Gittins index", "Bayes optimum", "Thompson sampling")  # of ten pulls


def test_what_rl2_meta_prints_is_in_the_table():
    """Of a learner with several settings the best; and of ten pulls what can be computed."""
    with open(SCRIPT.parent / "results" / "references.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = {"Thompson sampling": "thompson", "Gittins index": "gittins"}
    for (_, episodes, arms), scores in rl2.REFERENCES.items():
        about = {"task": "bandit" if arms else "mdp", "episodes": str(episodes), "num_arms": str(arms or "")}
        for name, score in scores.items():
            if episodes == 10 and name in EXACT:
                continue
            learner = names.get(name, name if name == "task known" else name.lower())
            found = [float(row["score"]) for row in rows if row["replan"] != "step"
                     and row["learner"] == learner and about.items() <= row.items()]
            close = 0.0011 if episodes == 10 and arms else 0.006 if name != "random" and arms else 0.06
            assert score == pytest.approx(max(found), abs=close), name
    for arms in (5, 10):
        exact = {"UCB1": exact_score(partial(ref.ucb1, c=0.1), arms, 10),
                 "Gittins index": exact_score(partial(ref.gittins, table=ref.gittins_table(10)), arms, 10),
                 "Bayes optimum": ref.bayes_optimum(arms, 10)}
        printed = rl2.REFERENCES["Bandit", 10, arms]
        assert {name: printed[name] for name in exact} == pytest.approx(exact, abs=0.0005)
