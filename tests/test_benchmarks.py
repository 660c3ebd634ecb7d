"""The benchmarks: reference learners against brute force and exact values; tables, figures and
speed.

A simulation is compared with an exact value within 4 of its standard errors, with a published score
of 1000 trials (Duan et al. 2016) within 4 of both together."""

import shlex
from functools import cache, partial

import ablations
import adaptation
import numpy as np
import plot
import pytest
import references as ref
import scores
import speed
import tables
from matplotlib.image import imread

import muesli_cartpole as muesli


@pytest.fixture
def call(main):
    """Function that calls a benchmark's main, to that exit status. Returns what it printed."""

    def call_main(module, *words, status=0):
        return main(module.__name__, shlex.join(map(str, words)), status, tables.run)[status > 0]

    return call_main


def score(task, learner, **flags):
    """Score and standard error."""
    columns = ref.score(learner, ref.Args(task=task, **flags))
    return columns["score"], columns["score_se"]


def assert_near(measured, expected, expected_se=0.0):
    mean, se = measured
    assert abs(mean - expected) < 4 * np.hypot(se, expected_se), (
        f"{mean:.3f} +- {se:.3f}, not {expected}"
    )


# -------------------------------------------------------------------------------------- references,
# both tasks


def test_equals_are_chosen_at_random_and_exploring_takes_any_action():
    rng = np.random.default_rng(0)
    values = ref.explore(np.tile([0.0, 2.0, 2.0], (30_000, 1)), 0.3, rng)
    share = np.bincount(ref.argmax(values, rng)) / 30_000
    np.testing.assert_allclose(share, [0.1, 0.45, 0.45], atol=0.01)


@pytest.mark.parametrize(
    "task, learner, expected", [("bandit", ref.random_arm, 0.5), ("mdp", ref.random_action, 10)]
)
def test_score_estimates_what_raw_does_with_less_noise(task, learner, expected):
    columns = ref.score(learner, ref.Args(task=task, episodes=3, trials=2000))
    assert_near((columns["score"], columns["score_se"]), 3 * expected)
    assert_near((columns["raw"], columns["raw_se"]), 3 * expected)
    assert columns["score_se"] < columns["raw_se"]
    np.testing.assert_allclose(columns["episode_returns"], expected, rtol=0.1)
    assert sum(columns["episode_returns"]) == pytest.approx(columns["score"], abs=1e-3)


# ------------------------------------------------------------------------------ references, bandits


def exact_score(learner, num_arms, num_pulls, epsilon=0.0):
    """Of a learner without randomness but that of equals, and of exploring with `epsilon`."""

    @cache
    def value(arms, remaining):
        if not remaining:
            return 0.0
        counts = np.array(arms, float)
        values = learner(counts[None, :, 0], counts[None, :, 1], remaining, None)[0]
        best = values == values.max()
        chances = (1 - epsilon) * best / best.sum() + epsilon / num_arms
        return sum(chance * pull(arms, i, remaining) for i, chance in enumerate(chances) if chance)

    def pull(arms, i, remaining):
        (s, f), others = arms[i], arms[:i] + arms[i + 1 :]
        mean = (s + 1) / (s + f + 2)
        won, lost = (tuple(sorted([*others, seen])) for seen in ((s + 1, f), (s, f + 1)))
        return mean * (1 + value(won, remaining - 1)) + (1 - mean) * value(lost, remaining - 1)

    return value(((0, 0),) * num_arms, num_pulls)


def test_gittins_is_the_bayes_optimum_over_10_pulls_and_nearly_so_over_14():
    """Two independent computations: indices of single arms, and all that can have been seen."""
    table = ref.gittins_table(14)
    np.testing.assert_allclose(table[1][:3], [1 / 2, 1 / 3, 2 / 3], atol=1e-4)
    assert table[2][0] == pytest.approx(5 / 9, abs=1e-4)  # 1/2 - x + 1/2 (2/3 - x) = 0
    assert ref.bayes_optimum(2, 2) == pytest.approx(1 / 2 + 1 / 2 * 2 / 3 + 1 / 2 * 1 / 2)
    for num_arms, num_pulls, gap in ((5, 10, 1e-9), (2, 14, 0.01)):
        optimum = ref.bayes_optimum(num_arms, num_pulls)
        exact = exact_score(partial(ref.gittins, table=table), num_arms, num_pulls)
        assert optimum - gap < exact <= optimum + 1e-9
        assert exact > exact_score(ref.ucb1, num_arms, num_pulls) > 0.99 * exact


def test_play_gives_the_exact_mean_score():
    gittins = partial(ref.gittins, table=ref.gittins_table(8))
    for learner in (ref.random_arm, ref.greedy, ref.ucb1, gittins):
        exact = exact_score(learner, 3, 8)
        assert_near(score("bandit", learner, num_arms=3, episodes=8, trials=20_000), exact)
        assert exact <= ref.bayes_optimum(3, 8) + 1e-9
    epsilon_greedy = partial(ref.greedy, epsilon=0.3)
    exact = exact_score(ref.greedy, 3, 8, epsilon=0.3)
    assert_near(score("bandit", epsilon_greedy, num_arms=3, episodes=8, trials=20_000), exact)


def test_thompson_samples_the_posterior_and_the_optimistic_one_where_it_is_dense():
    """After 50 of 100 successes a sample is Beta(51, 51); the densest of 20 lies closer to a
    half."""
    counts, rng = np.full((5000, 1), 50.0), np.random.default_rng(0)
    std = np.sqrt(51 * 51 / (102**2 * 103))
    assert ref.thompson(counts, counts, 1, rng).std() == pytest.approx(std, rel=0.05)
    assert ref.optimistic_thompson(counts, counts, 1, rng, 20).std() < std / 5
    assert ref.thompson(counts, 0 * counts, 1, rng).mean() == pytest.approx(51 / 52, abs=1e-3)
    assert_near(score("bandit", ref.thompson, num_arms=5, trials=2000), 5.7, 0.07)


# --------------------------------------------------------------------------------- references, MDPs


def test_sampled_mdps_have_the_tasks_distributions():
    mdps = ref.sample_mdps(2000, np.random.default_rng(0))
    assert mdps.transitions.var() == pytest.approx(9 / (100 * 11), rel=0.02)  # of Beta(1, 9)
    assert (mdps.means.mean(), mdps.means.std()) == pytest.approx((1, 1), abs=0.02)
    optima = ref.optimal_value(mdps)
    assert_near(ref.mean_and_error(optima), ref.MEAN_OPTIMUM, ref.MEAN_OPTIMUM_SE)


def test_who_knows_the_mdp_collects_its_optimum():
    mdps = ref.sample_mdps(1000, np.random.default_rng(0))
    known = ref.plan(mdps.means, partial(ref.expectation, mdps.transitions), ref.HORIZON)
    _, expected = ref.play_mdp(lambda *_, horizon: known, mdps, 2, np.random.default_rng(1))
    assert_near(ref.mean_and_error(expected.mean(-1) - ref.optimal_value(mdps)), 0)


def test_what_a_learner_has_seen_before_each_episode():
    rng, seen = np.random.default_rng(0), []
    mdps = ref.MDPs(ref.normalized(rng.random((1, 2, 2, 2))), rng.normal(1, 1, (1, 2, 2)))

    def learner(now, rng, horizon):
        seen.append(
            (now.visits[..., 1].sum(), now.transitions.sum(), now.rewards.sum(), now.episode)
        )
        return np.broadcast_to([0.0, 1.0], (horizon, 1, 2, 2))  # always the second action

    returns, expected = ref.play_mdp(learner, mdps, 3, rng, horizon=4)
    visits, transitions, rewards, episodes = zip(*seen, strict=True)
    assert visits == (0, 4, 8) and episodes == (0, 1, 2)
    assert transitions == (0, 3, 6)  # not those out of the last step
    assert rewards == pytest.approx((0, returns[0, 0], returns[0, :2].sum()))
    low, high = mdps.means[0, :, 1].min(), mdps.means[0, :, 1].max()
    assert np.all((expected >= 4 * low) & (expected <= 4 * high))


def test_optimistic_expectation_is_the_best_in_the_ball():
    rng = np.random.default_rng(0)
    candidates = rng.dirichlet(np.ones(3), 20_000)
    for slack in (0.0, 0.3, 0.8, 1.5, 2.0):
        chances, values = rng.dirichlet(np.ones(3)), rng.normal(size=3)
        found = ref.optimistic_expectation(chances[None, None, None], slack, values[None]).item()
        inside = candidates[np.abs(candidates - chances).sum(-1) <= slack]
        best = max([chances @ values, *(inside @ values)])
        assert best - 1e-12 <= found <= best + 0.1
    assert found == pytest.approx(values.max())


def test_values_of_the_mdp_learners_by_hand():
    """The first of two steps has the reward and the best that may follow, the last only the
    reward."""
    seen = ref.Seen(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)), np.zeros((1, 2, 2, 2)))
    bonus = 0.5 * 2 * 2**3 / (1 + 2)  # of the transition, while a step is left
    np.testing.assert_allclose(ref.beb(seen, None, 2, scaling=0.5)[:, 0, 0, 0], [1 + bonus, 1 / 2])
    seen.visits[0, 0], seen.rewards[0, 0], seen.transitions[0, 0, :, 1] = 1, [3.0, -2.0], 1
    seen.visits[0, 1], seen.rewards[0, 1] = 1, [5.0, 4.0]
    for mu0 in (0.0, 1.0):
        q = ref.greedy_mdp(seen, None, 2, mu0)
        np.testing.assert_allclose(q[0, 0, 0], [3 + 5, -2 + 5], atol=1e-2)
    rng = np.random.default_rng(0)
    seen.visits[0, 0] = 3
    q = ref.bucb_vi(seen, None, 1, c=3)
    np.testing.assert_allclose(q[0, 0, 0], [(1 + 3) / 4 + 3 / 2, (1 - 2) / 4 + 3 / 2])
    samples = np.array([ref.psrl(seen, rng, 1)[0, 0, 0] for _ in range(4000)])
    np.testing.assert_allclose(samples.mean(0), [3 / 4, -2 / 4], atol=0.03)
    np.testing.assert_allclose(samples.std(0), 1 / 2, atol=0.03)
    best_of_5 = np.mean([ref.opsrl(seen, rng, 1)[0, 0, 0] for _ in range(1000)], 0)
    np.testing.assert_allclose(
        best_of_5 - [3 / 4, -2 / 4], 1.163 / 2, atol=0.06
    )  # of 5 normal ones


def test_ucrl2_by_hand():
    """State 1 pays 1; all actions were tried 100 times and led to either state in half of them."""
    rewards, transitions = np.array([[[0.0, 0.0], [100.0, 100.0]]]), np.full((1, 2, 2, 2), 50.0)
    seen = ref.Seen(np.full((1, 2, 2), 100.0), rewards, transitions)
    q = ref.ucrl2(seen, None, 2, scaling=0.1)
    log = np.log(2 * 2 * 2 / 0.05)
    bonus, slack = 0.1 * np.sqrt(4 * log / 100), 0.1 * np.sqrt(4 * 2 * log / 100)
    np.testing.assert_allclose(q[1, 0, :, 0], [bonus, 1 + bonus], atol=1e-4)
    np.testing.assert_allclose(q[0, 0, :, 0], q[1, 0, :, 0] + bonus + 1 / 2 + slack / 2, atol=1e-4)


PUBLISHED = [  # task, learner, flags; score and standard error of 1000 trials
    ("bandit", ref.thompson, {"episodes": 100}, 75.21, 0.11),
    ("bandit", partial(ref.optimistic_thompson, samples=20), {}, 6.5, 0.07),
    ("bandit", ref.ucb1, {"episodes": 100, "num_arms": 10}, 83.12, 0.08),
    ("mdp", ref.greedy_mdp, {}, 134.8, 0.9),
    ("mdp", partial(ref.greedy_mdp, epsilon=0.1), {}, 132.8, 0.9),
    ("mdp", ref.psrl, {}, 138.1, 0.9),
    ("mdp", partial(ref.opsrl, samples=20), {}, 144.1, 0.9),
    ("mdp", ref.ucrl2, {}, 146.6, 0.9),
    ("mdp", partial(ref.beb, scaling=3e-3), {}, 150.2, 0.9),
]


@pytest.mark.slow
def test_learners_score_as_published():
    for task, learner, flags, published, se in PUBLISHED:
        assert_near(score(task, learner, trials=1000, **flags), published, se)
    mean, se = score("mdp", ref.bucb_vi, trials=1000)
    assert mean - 4 * se > 150.2  # above the best of the published ones


@pytest.mark.parametrize("arms", [5, 10])
def test_what_can_be_computed_is_in_the_table(arms):
    """Of ten pulls: UCB1's exact score within its standard error, and the Bayes optimum."""
    rows = tables.read_csv(plot.RESULTS / "references.csv")
    about = {"task": "bandit", "episodes": "10", "num_arms": str(arms)}
    rows = [row for row in rows if about.items() <= row.items()]
    found = next(x for x in rows if (x["learner"], x["setting"]) == ("ucb1", "c=0.1"))
    assert_near(
        (float(found["score"]), float(found["score_se"])),
        exact_score(partial(ref.ucb1, c=0.1), arms, 10),
    )
    optimum = [float(row["score"]) for row in rows if row["learner"] == "bayes optimum"]
    assert optimum == [pytest.approx(ref.bayes_optimum(arms, 10), abs=5e-4)]


def test_references_are_added_to_a_table(call, tmp_path):
    path = tmp_path / "new" / "table.csv"
    flags = "--episodes", 4, "--num-arms", 3, "--trials", 50
    first = call(ref, *flags, "--csv", path)
    kept = path.read_text()
    call(
        ref,
        "--task",
        "mdp",
        "--episodes",
        2,
        "--trials",
        4,
        "--csv",
        path,
        "--learners",
        "psrl",
        "bucb-vi",
    )
    assert path.read_text().startswith(kept)
    rows = tables.read_csv(path)
    learners = [row["learner"] for row in rows if row["task"] == "mdp"]
    assert learners == ["psrl"] * 2 + ["bucb-vi"] * 3 + ["task known"]
    assert all(
        bool(row["episode_returns"]) == bool(row["trials"]) for row in rows
    )  # bounds have neither
    assert call(ref, *flags) == first


@pytest.mark.parametrize(
    "flags", ["--num-arms 0", "--trials 1", "--seed -1", "--learners sarsa", "--csv ."]
)
def test_bad_flags_of_references_get_one_sentence(call, flags):
    error = call(ref, *flags.split(), status=2)
    assert error.startswith("error: ") and error.count("\n") == 1


# ---------------------------------------------------------------------------------- scores, curves,
# ablations, speed


def test_table_of_scores(call, tmp_path):
    """Runs that stopped early are put together, whatever their steps."""
    columns = "env_id,exp_name,seed,global_step,solved_at,eval_mean,eval_sampled_mean,command"
    rows = [
        "CartPole-v1,m,1,20000,15000,480,490,python muesli_cartpole.py",
        "CartPole-v1,m,2,30000,25000,500,470,python muesli_cartpole.py",
        "CartPole-v1,m,3,50000,,9,9,python muesli_cartpole.py",
        "CartPole-v1,long,1,50000,15000,440,450,python muesli_cartpole.py --no-stop-early",
        "CartPole-v1,long,2,50000,,400,430,python muesli_cartpole.py --no-stop-early",
        "Reacher-v5,ppo,1,99840,,-4.25,-20,python ppo_continuous.py",
    ]
    kept, again = tmp_path / "kept.csv", tmp_path / "again.csv"
    kept.write_text("\n".join([columns, *rows, ""]))
    assert call(scores, kept, "--csv", again).splitlines()[2:] == [
        "| CartPole-v1 | long | 50 k | 2 | 420 ± 28 | 440 ± 14 | 440, 400 |",
        "| CartPole-v1 | m | solved at 20000 (median), 25000 (last) "
        "| 2 | 490 ± 14 | 480 ± 14 | 480, 500 |",
        "| CartPole-v1 | m | 50 k | 1 | 9.0 | 9.0 | 9.0 |",
        "| Reacher-v5 | ppo | 100 k | 1 | -4.2 | -20.0 | -4.2 |",
    ]
    assert again.read_text() == kept.read_text()
    assert "| 440, 400 | 400 to 440 |" in call(scores, kept, "--bootstrap")
    low, high = scores.interval([0.0] * 50 + [2.0] * 50)  # std 1, of the mean 0.1
    assert (low, high) == pytest.approx((1 - 0.196, 1 + 0.196), abs=0.03)


def test_rows_and_curves_of_runs(call, tmp_path):
    """Two short runs of Muesli: rebuilt command, evaluations, curves that are kept and drawn."""
    runs = [tmp_path / f"run-{seed}" for seed in (1, 2)]
    for seed, run_dir in enumerate(runs, start=1):
        muesli.train(
            muesli.Args(
                seed=seed,
                run_dir=str(run_dir),
                preset="none",
                total_timesteps=600,
                exp_name="two words",
                num_envs=2,
                eval_frequency=100,
                eval_episodes=2,
                checkpoint_every=50,
            )
        )
    row = ablations.read(ablations.STUDIES["ablations"], runs[0])
    assert row["command"] == (
        "python muesli_cartpole.py --preset none --exp-name 'two words' --seed 1 --eval-episodes 2 "
        "--checkpoint-every 50 --env-id CartPole-v1 --total-timesteps 600 --num-envs 2 "
        "--eval-frequency 100 --stop-early"
    )
    evaluations = muesli.load_checkpoint(runs[0])[0]["progress"]["evaluations"]
    assert row["learned"] == pytest.approx(np.mean([value for _, value in evaluations]))
    assert row["last_evaluation"] == evaluations[-1][1]
    kept, figure = tmp_path / "curves.csv", tmp_path / "new" / "curves.png"
    call(plot, *runs, "--y", "greedy_return", "--csv", kept, "--output", figure)
    assert imread(figure).shape[1] > 600
    curves = plot.read_curves([kept], y="greedy_return")
    for key, curve in plot.read_curves(runs, y="greedy_return").items():
        assert curve["greedy_return"] == pytest.approx(curves[key]["greedy_return"])
    axis, x = adaptation.Figure().add_subplot(), np.arange(10.0)
    plot.draw_line(axis, [{"global_step": x, "episodic_return": x + i} for i in (1, 3)], color="C0")
    np.testing.assert_allclose(axis.lines[0].get_ydata()[200], axis.lines[0].get_xdata()[200] + 2)
    assert "second run" in call(plot, runs[0], runs[0], "--csv", kept, status=2)


def test_overview_and_ablations_are_drawn_from_the_tables_in_results(call, tmp_path):
    call(plot, "--overview", "--output", tmp_path / "overview.png")
    table = call(ablations, "ablations")
    table += call(ablations, "additions", "--output", tmp_path / "additions.png")
    for env_id in ("LunarLander-v3", "Bandit", "TabularMDP"):
        assert f"| {env_id} | mean | each seed | effect | 95 % |" in table
    for name in ("overview", "additions"):
        assert imread(tmp_path / f"{name}.png").shape[1] > 1200


def test_effects_of_settings(call, tmp_path, monkeypatch):
    """Differences to the first setting, each training once, the table kept after each."""
    settings = {"default": "", "off": "", "never": ""}
    study = ablations.Study("x.py", "eval_mean", {"X-v1": ""}, settings)
    monkeypatch.setitem(ablations.STUDIES, "details", study)
    trained = []

    def train(study, folder, env_id, setting, seed):
        trained.append((setting, seed))
        score = 10 * seed + (setting == "off")
        return {"env_id": env_id, "exp_name": setting, "seed": seed, "eval_mean": score}

    monkeypatch.setattr(ablations, "train", train)
    flags = [
        "details",
        "--csv",
        tmp_path / "x.csv",
        "--runs",
        tmp_path,
        "--jobs",
        1,
        "--settings",
        "default",
    ]
    assert "| off | 11 | 11 | +1 | - |" in call(ablations, *flags, "off", "--seeds", 1)
    table = call(
        ablations, *flags, "off", "--seeds", 1, 2, "--output", tmp_path / "x.png"
    ).splitlines()
    assert trained == [("default", 1), ("off", 1), ("default", 2), ("off", 2)]
    assert table[2:] == [
        "| default | 15 ± 7 | 10, 20 | - | - |",
        "| off | 16 ± 7 | 11, 21 | +1 | -9 to +11 |",
    ]
    assert (tmp_path / "x.png").exists()
    assert "other" in call(ablations, *flags, "other", status=2)
    assert "X-v1" in call(ablations, "historical", "--csv", tmp_path / "x.csv", status=2)
    effect, low, high = ablations.effects({"a": [0.0] * 50, "b": [1.0] * 25 + [3.0] * 25})["b"]
    assert (effect, low, high) == pytest.approx((2, 2 - 0.277, 2 + 0.277), abs=0.03)


def test_effects_over_tasks_are_in_percent_of_each_tasks_first_setting():
    tasks = {
        "A": {"a": [1.0, 3.0, 2.0], "b": [2.0, 4.0], "of one task": [1.0, 1.0]},
        "B": {"a": [10.0, 30.0, 20.0], "b": [0.0, 20.0]},
    }
    unfinished = {
        "C": {"a": [5.0, 5.0, 5.0], "b": [9.0]},
        "D": {"a": [5.0, 5.0, 5.0]},
        "E": {"a": [5.0, 5.0], "b": [9.0, 9.0]},
    }
    shares = ablations.over_tasks(tasks | unfinished)
    assert {name: list(values) for name, values in shares.items()} == {
        "a": [50, 150, 100],
        "b": [50, 150],
    }
    assert ablations.over_tasks(unfinished | {"A": tasks["A"]}) == {}


def test_killed_trainings_of_a_study_are_resumed(tmp_path, monkeypatch):
    """Without a checkpoint they begin anew, with one they resume; finished ones stay."""
    study = ablations.Study("x.py", "eval_mean", {"X-v1": ""}, {"a": ""})
    run_dir, commands = tmp_path / "X-v1__a__1", []
    monkeypatch.setattr(ablations, "read", lambda study, run_dir: {})
    monkeypatch.setattr(
        ablations.subprocess, "run", lambda command, **_: commands.append(command[2:])
    )
    run_dir.mkdir()
    (run_dir / "args.json").touch()
    for name in ("checkpoint.pt", "summary.json", "other"):
        ablations.train(study, tmp_path, "X-v1", "a", 1)
        run_dir.mkdir(exist_ok=True)
        (run_dir / name).touch()
    assert commands[0][-2:] == ["--run-dir", str(run_dir)] and not (run_dir / "args.json").exists()
    assert commands[1:] == [["--resume", str(run_dir)]]


def test_speed_is_the_median_after_the_first_row(call, tmp_path, monkeypatch):
    for name, rate in (("fast", 100), ("slow", 10)):
        rows = f"SPS,seconds\\n1,5\\n{rate},6\\n{3 * rate},7\\n{2 * rate},8"
        code = f"import os; os.mkdir('run'); open('run/metrics.csv', 'w').write('{rows}')"
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setitem(speed.SETTINGS, "Bandit", str(tmp_path / "fast.py"))
    flags = "--settings", "Bandit", "--rounds", 1, "--csv", tmp_path / "speed.csv", "--against"
    table = call(speed, *flags, tmp_path / "slow.py")
    assert (
        "| Bandit | script | 200 | 1.00 |" in table and "| Bandit | against | 20 | 10.00 |" in table
    )
    assert all(int(row["peak_mib"]) > 5 for row in tables.read_csv(tmp_path / "speed.csv"))
    assert "no git commit" in call(speed, *flags, "no-such-commit", status=2)


# --------------------------------------------------------------------------------------- adaptation


def rows(columns, *cells):
    return [dict(zip(columns.split(), map(str, row), strict=True)) for row in cells]


RUNS = rows(
    "env_id exp_name seed command trial_return_greedy_mean trial_return_mean episode_returns",
    ("AntDir", "rl2_meta", 1, "python rl2_meta.py", 405.4, 400, [100.0, 300.0]),
    ("Bandit", "wide", 1, "python rl2_meta.py --num-arms 50", 5.1, 5, [0.5] * 10),
    ("Bandit", "rl2_meta", 1, "python rl2_meta.py", 1.9, 1.8, [0.5, 0.6, 0.7]),
    ("Bandit", "rl2_meta", 2, "python rl2_meta.py", 2.1, 2.1, [0.5, 0.7, 0.9]),
)
REFERENCES = rows(
    "task num_arms episodes learner setting score episode_returns",
    ("bandit", 5, 3, "random", "", 1.5, [0.5, 0.5, 0.5]),
    ("bandit", 5, 3, "ucb1", "c=0.2", 1.9, [0.5, 0.6, 0.8]),
    ("bandit", 5, 3, "ucb1", "c=0.1", 1.8, [0.5, 0.6, 0.7]),
    ("bandit", 10, 3, "gittins", "", 9.9, [3.3, 3.3, 3.3]),
    ("bandit", 5, 3, "task known", "", 2.5, ""),
)
CELLS = [
    "Bandit, 5 arms, 3 pulls|2|2.000 ± 0.141|1.950 ± 0.212|1.500|-|1.900 (c=0.2)|-|-|2.500",
    "Bandit, 50 arms, 10 pulls (wide)|1|5.100|5.000|-|-|-|-|-|-",
    "AntDir, 2 episodes|1|405.4|400.0|-|-|-|-|-|-",
]


def test_table_and_figure_of_adaptation(call, tmp_path):
    """Settings are grouped, the best of a reference is shown, a panel has the mean and std over
    seeds."""
    runs, references, figure = (
        tmp_path / name for name in ("rl2.csv", "references.csv", "figure.png")
    )
    tables.write_csv(runs, RUNS)
    tables.write_csv(references, REFERENCES)
    lines = call(adaptation, runs, "--references", references, "--output", figure).splitlines()
    assert [line[2:-2].replace(" | ", "|") for line in lines[2:]] == CELLS
    assert imread(figure).shape[1] > 1200
    axis = adaptation.Figure().add_subplot()
    setting, runs = next(iter(adaptation.group(RUNS).items()))
    adaptation.draw_panel(axis, setting, runs, adaptation.find_references(REFERENCES, setting))
    drawn = {line.get_label(): line.get_ydata() for line in axis.lines}
    assert set(drawn) == {"RL$^2$", "random", "UCB1 c=0.2", "task known"}
    np.testing.assert_allclose(drawn["RL$^2$"], [0.5, 0.65, 0.8])
    np.testing.assert_allclose(drawn["UCB1 c=0.2"], [0.5, 0.6, 0.8])
    np.testing.assert_allclose(drawn["task known"], 2.5 / 3)
    shade = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert shade.max() == pytest.approx(0.8 + np.sqrt(0.02))  # the std of 0.7 and 0.9
    with pytest.raises(tables.UsageError, match="two runs of Bandit, 5 arms, 3 pulls, seed 2"):
        adaptation.group([*RUNS, RUNS[3]])


@pytest.mark.parametrize("content", [None, "", "env_id,seed\n", "task,score\nbandit,1\n"])
def test_bad_tables_get_one_sentence_and_leave_the_old_one(call, tmp_path, content):
    bad, old = tmp_path / "bad.csv", tmp_path / "old.csv"
    old.write_text("old")
    if content is not None:
        bad.write_text(content)
    for words in (
        (scores, bad, "--csv", old),
        (plot, bad, "--csv", old),
        (ablations, "ablations", "--csv", bad),
        (adaptation, bad),
        (adaptation, plot.RESULTS / "rl2.csv", "--references", bad),
    ):
        error = call(*words, status=2)
        assert error.startswith("error: ") and error.count("\n") == 1 and str(bad) in error
    assert old.read_text() == "old"
