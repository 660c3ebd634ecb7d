"""The benchmarks: reference learners against exact and published scores; tables, figures, speed.

A simulation is within 4 standard errors of an exact value, with those of a published score (1000
trials, Duan et al. 2016) added in quadrature."""

import shlex
from functools import cache, partial

import ablations
import adaptation
import falls
import gallery
import numpy as np
import plot
import pytest
import references as ref
import report
import scores
import speed
import strip
import tables
from conftest import ROOT
from matplotlib.image import imread
from PIL import Image

import muesli_cartpole as muesli
import ppo_continuous as ppo


@pytest.fixture
def call(main):
    """Function that calls a benchmark's main, to that exit status. Returns what it printed."""

    def call_main(module, *words, status=0):
        return main(module.__name__, shlex.join(map(str, words)), status, tables.run)[status > 0]

    return call_main


def assert_near(mean, se, expected, expected_se=0.0):
    assert abs(mean - expected) < 4 * np.hypot(se, expected_se), f"{mean} +- {se}, not {expected}"


def check_score(learner, expected, expected_se=0.0, **flags):
    """Score and raw score estimate the same, the score with less noise."""
    columns = ref.score(learner, ref.Args(**flags))
    for name in ("score", "raw"):
        assert_near(columns[name], columns[f"{name}_se"], expected, expected_se)
    assert columns["score_se"] < columns["raw_se"]
    assert sum(columns["episode_returns"]) == pytest.approx(columns["score"], abs=1e-2)


# --------------------------------------------------------------------------------------- references


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
    assert ref.bayes_optimum(2, 2) == pytest.approx(1 / 2 + 1 / 2 * 2 / 3 + 1 / 2 * 1 / 2)
    for num_arms, num_pulls, gap in ((5, 10, 1e-9), (2, 14, 0.01)):
        optimum = ref.bayes_optimum(num_arms, num_pulls)
        exact = exact_score(partial(ref.gittins, table=table), num_arms, num_pulls)
        assert optimum - gap < exact <= optimum + 1e-9


@pytest.mark.parametrize("learner", [ref.random_arm, ref.greedy, ref.ucb1, "epsilon-greedy"])
def test_bandit_learners_have_their_exact_scores(learner):
    expected, flags = None, {"num_arms": 3, "episodes": 8, "trials": 20_000}
    if learner == "epsilon-greedy":
        learner, expected = partial(ref.greedy, epsilon=0.3), exact_score(ref.greedy, 3, 8, 0.3)
    check_score(learner, expected or exact_score(learner, 3, 8), **flags)


@pytest.mark.parametrize(
    ("task", "learner", "flags", "published", "se"),
    [
        ("bandit", ref.thompson, {"episodes": 100}, 75.21, 0.11),
        ("bandit", partial(ref.optimistic_thompson, samples=20), {}, 6.5, 0.07),
        ("bandit", ref.ucb1, {"episodes": 100, "num_arms": 10}, 83.12, 0.08),
        ("mdp", ref.random_action, {}, 100.0, 0.0),
        ("mdp", ref.greedy_mdp, {}, 134.8, 0.9),
        ("mdp", ref.psrl, {}, 138.1, 0.9),
        ("mdp", partial(ref.ucrl2, scaling=0.4), {}, 146.6, 0.9),
        ("mdp", partial(ref.beb, scaling=3e-3), {}, 150.2, 0.9),
        ("mdp", partial(ref.opsrl, samples=20), {"trials": 300}, 144.1, 0.9),
    ],
)
def test_learners_score_as_published(task, learner, flags, published, se):
    check_score(learner, published, se, task=task, **{"trials": 1000} | flags)


def test_equals_are_chosen_at_random_and_exploring_takes_any_action():
    rng = np.random.default_rng(0)
    values = ref.explore(np.tile([0.0, 2.0, 2.0], (30_000, 1)), 0.3, rng)
    share = np.bincount(ref.argmax(values, rng)) / 30_000
    np.testing.assert_allclose(share, [0.1, 0.45, 0.45], atol=0.01)


def test_optimistic_expectation_is_the_best_in_the_ball():
    rng = np.random.default_rng(0)
    candidates = rng.dirichlet(np.ones(3), 20_000)
    for slack in (0.0, 0.3, 0.8, 1.5, 2.0):
        chances, values = rng.dirichlet(np.ones(3)), rng.normal(size=3)
        found = ref.optimistic_expectation(chances[None, None, None], slack, values[None]).item()
        inside = candidates[np.abs(candidates - chances).sum(-1) <= slack]
        best = max([chances @ values, *(inside @ values)])
        assert best - 1e-12 <= found <= best + 0.1


def test_bonuses_of_the_mdp_learners_by_hand():
    """Over two steps; all actions were tried 100 times, and led to either state in half of them."""
    transitions = np.full((1, 2, 2, 2), 50.0)
    seen = ref.Seen(np.full((1, 2, 2), 100.0), np.zeros((1, 2, 2)), transitions)
    log = np.log(2 * 2 * 2 / 0.05)
    bonus = 0.1 * np.sqrt(4 * log / 100)
    np.testing.assert_allclose(ref.ucrl2(seen, None, 2, scaling=0.1)[1], bonus, atol=1e-4)
    beb = ref.beb(seen, None, 2, scaling=0.5)[:, 0, 0, 0]
    last, transition = 1 / 102, 0.5 * 2 * 2**3 / 103  # while a step is left
    np.testing.assert_allclose(beb, [2 * last + transition, last])
    bucb_vi = ref.bucb_vi(seen, None, 1, c=3)
    np.testing.assert_allclose(bucb_vi, 1 / 101 + 3 / np.sqrt(101))


def test_who_knows_the_mdp_collects_its_optimum():
    mdps = ref.sample_mdps(2000, np.random.default_rng(0))
    assert_near(*ref.mean_and_error(ref.optimal_value(mdps)), ref.MEAN_OPTIMUM, ref.MEAN_OPTIMUM_SE)
    known = ref.plan(mdps.means, partial(ref.expectation, mdps.transitions), ref.HORIZON)
    _, expected = ref.play_mdp(lambda *_, horizon: known, mdps, 2, np.random.default_rng(1))
    assert_near(*ref.mean_and_error(expected.mean(-1) - ref.optimal_value(mdps)), 0)


@pytest.mark.parametrize("arms", [5, 10])
def test_what_can_be_computed_is_in_the_table(arms):
    """Of ten pulls: UCB1's exact score within its standard error, and the Bayes optimum."""
    about = {"task": "bandit", "episodes": "10", "num_arms": str(arms)}
    found = {
        (row["learner"], row["setting"]): row
        for row in tables.read_csv(plot.RESULTS / "references.csv")
        if about.items() <= row.items()
    }
    ucb1, optimum = found["ucb1", "c=0.1"], found["bayes optimum", ""]
    exact = exact_score(partial(ref.ucb1, c=0.1), arms, 10)
    assert_near(float(ucb1["score"]), float(ucb1["score_se"]), exact)
    assert float(optimum["score"]) == pytest.approx(ref.bayes_optimum(arms, 10), abs=5e-4)


def test_references_are_added_to_a_table(call, tmp_path):
    path = tmp_path / "new" / "table.csv"
    flags = "--episodes", 4, "--num-arms", 3, "--trials", 50
    first, kept = call(ref, *flags, "--csv", path), path.read_text()
    flags_of_mdp = "--task", "mdp", "--episodes", 2, "--trials", 4, "--learners", "psrl", "bucb-vi"
    call(ref, *flags_of_mdp, "--csv", path)
    assert path.read_text().startswith(kept)
    learners = [row["learner"] for row in tables.read_csv(path) if row["task"] == "mdp"]
    assert learners == ["psrl"] * 2 + ["bucb-vi"] * 3 + ["task known"]
    assert call(ref, *flags) == first


# --------------------------------------------------------------- scores, curves, ablations, speed


def test_table_of_scores(call, tmp_path):
    """Runs that stopped early are put together, whatever their steps."""
    rows = [
        "env_id,exp_name,seed,global_step,solved_at,eval_mean,eval_sampled_mean,command",
        "CartPole-v1,m,1,20000,15000,480,490,python muesli_cartpole.py",
        "CartPole-v1,m,2,30000,25000,500,470,python muesli_cartpole.py",
        "CartPole-v1,m,3,50000,,9,9,python muesli_cartpole.py",
        "CartPole-v1,long,1,50000,15000,440,450,python muesli_cartpole.py --no-stop-early",
        "CartPole-v1,long,2,50000,,400,430,python muesli_cartpole.py --no-stop-early",
        "Reacher-v5,ppo,1,99840,,-4.25,-20,python ppo_continuous.py",
    ]
    kept, again = tmp_path / "kept.csv", tmp_path / "again.csv"
    kept.write_text("\n".join([*rows, ""]))
    assert call(scores, kept, "--csv", again).splitlines()[2:] == [
        "| CartPole-v1 | long | 50 k | 2 | 420 ± 28 | 440 ± 14 | 440, 400 |",
        "| CartPole-v1 | m | solved at 20000 (median), 25000 (last) "
        "| 2 | 490 ± 14 | 480 ± 14 | 480, 500 |",
        "| CartPole-v1 | m | 50 k | 1 | 9.0 | 9.0 | 9.0 |",
        "| Reacher-v5 | ppo | 100 k | 1 | -4.2 | -20.0 | -4.2 |",
    ]
    assert again.read_text() == kept.read_text()
    assert "| 440, 400 | 400 to 440 |" in call(scores, kept, "--bootstrap")


def test_tables_of_all_pages_are_those_of_the_csvs(call, monkeypatch, tmp_path):
    """And one that is not is named, or written anew."""
    assert call(report, "--check") == ""
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- table rl2_short -->\n| old |\n<!-- end -->\nText.\n")
    monkeypatch.setattr(report, "PAGES", (page,))
    assert "out of date: page.md" in call(report, "--check", status=2)
    call(report)
    text = page.read_text()
    assert "| old |" not in text and "| Bandit, 10 arms, 10 pulls | 3 | " in text
    assert text.startswith("# Page\n\n<!-- ") and text.endswith(" |\n<!-- end -->\nText.\n")


def test_numbers_of_the_tables():
    row = {
        "eval_episodes": "10",
        "eval_std": "3",
        "eval_sampled_mean": "7",
        "eval_sampled_std": "0",
    }
    rows = [row | {"eval_mean": str(x)} for x in (100, 200, 300, 1400)]
    assert report.cells(rows) == ["4°", "500 ± 303", "7 ± 0", "250", "250", "100"]
    alone = report.cells([row | {"eval_mean": "50", "version": "2"}])
    assert alone == ["1", "50.0 ± 1.0", "7.0 ± 0.0", "50.0", "50.0", "50.0"]
    assert report.interquartile_mean([1, 2, 3, 4, 5]) == pytest.approx(3)
    assert report.interquartile_mean([0, 0, 8]) == pytest.approx(8 / 6)


def test_rows_and_curves_of_a_run(call, tmp_path):
    """Its rebuilt command, its evaluations, its curve, which is kept and drawn."""
    run_dir, figure = tmp_path / "run", tmp_path / "new" / "curves.png"
    flags = {"preset": "none", "exp_name": "two words", "total_timesteps": 600, "num_envs": 2}
    flags |= {"eval_frequency": 100, "eval_episodes": 2, "checkpoint_every": 50}
    muesli.train(muesli.Args(run_dir=str(run_dir), **flags))
    row = ablations.read(ablations.STUDIES["ablations"], run_dir)
    assert row["command"] == (
        "python muesli_cartpole.py --preset none --exp-name 'two words' --seed 1 --eval-episodes 2 "
        "--checkpoint-every 50 --env-id CartPole-v1 --total-timesteps 600 --num-envs 2 "
        "--eval-frequency 100 --stop-early"
    )
    evaluations = muesli.load_checkpoint(run_dir)[0]["progress"]["evaluations"]
    assert row["learned"] == pytest.approx(np.mean([value for _, value in evaluations]))
    assert row["last_evaluation"] == evaluations[-1][1]
    kept = tmp_path / "curves.csv"
    call(plot, run_dir, "--y", "greedy_return", "--csv", kept, "--output", figure)
    assert imread(figure).shape[1] > 600
    (first,), (again,) = (
        plot.read_curves([path], y="greedy_return").values() for path in (run_dir, kept)
    )
    assert first["greedy_return"] == pytest.approx(again["greedy_return"])
    assert "second run" in call(plot, run_dir, run_dir, "--csv", kept, status=2)


def test_agents_are_stripped_and_shown(call, tmp_path):
    """A run without a video is evaluated first; a stripped checkpoint has no optimizer."""
    run_dir = str(tmp_path / "a")
    muesli.train(muesli.Args(run_dir=run_dir, total_timesteps=400, eval_frequency=0))
    call(strip, tmp_path / "a", tmp_path / "c")
    checkpoint, args = muesli.load_checkpoint(tmp_path / "c")
    assert checkpoint.keys() == {"args", "progress", "agent"} and args.env_id == "CartPole-v1"
    muesli.load_agent(tmp_path / "c")
    flags = "--seconds", "0.4", "--fps", "5", "--size", "60", "--output", tmp_path / "x.webp"
    assert "2 frames" in call(gallery, tmp_path / "a", *flags)
    assert Image.open(tmp_path / "x.webp").size == (60, 60)
    assert "no run in" in call(strip, tmp_path / "none", tmp_path / "c", status=2)


def test_how_walkers_fall(call, tmp_path):
    """Who does not fall plays 1000 steps, and a return is what its steps got."""
    table, folder = tmp_path / "falls.csv", ROOT / "checkpoints" / "Hopper-v5"
    call(falls, folder, "--csv", table, "--episodes", 3)
    greedy, sampled = [
        {k: float(v or "nan") for k, v in list(x.items())[3:]} for x in tables.read_csv(table)
    ]
    assert greedy != sampled
    for row in (greedy, sampled):
        assert row["return"] == pytest.approx(row["length"] * row["reward_per_step"])
        assert (row["fell"] == 0) == (row["length"] == 1000)
    assert "no torso" in call(falls, ROOT / "checkpoints" / "Ant-v5", "--csv", table, status=2)


@pytest.mark.parametrize("folder", sorted((ROOT / "checkpoints").iterdir()), ids=lambda x: x.name)
def test_agents_of_the_front_page_load(folder):
    agent = ppo.load_agent(folder)
    assert agent.args.env_id == folder.name and agent.obs_rms.count > 9e5


def test_overview_and_ablations_are_drawn_from_the_tables_in_results(call, tmp_path):
    call(plot, "--overview", "--output", tmp_path / "overview.png")
    call(ablations, "additions", "--output", tmp_path / "additions.png")
    for name in ("overview", "additions"):
        assert imread(tmp_path / f"{name}.png").shape[1] > 1200
    assert "| LunarLander-v3 | mean | each seed | effect | 95 % |" in call(ablations, "ablations")


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
    flags = "details", "--csv", tmp_path / "x.csv", "--runs", tmp_path, "--jobs", 1, "--settings"
    assert "| off | 11 | 11 | +1 | - |" in call(ablations, *flags, "default", "off", "--seeds", 1)
    table = call(ablations, *flags, "default", "off", "--seeds", 1, 2).splitlines()
    assert trained == [("default", 1), ("off", 1), ("default", 2), ("off", 2)]
    assert table[2:] == [
        "| default | 15 ± 7 | 10, 20 | - | - |",
        "| off | 16 ± 7 | 11, 21 | +1 | -9 to +11 |",
    ]
    assert "other" in call(ablations, *flags, "other", status=2)


def test_effects_over_tasks_are_in_percent_of_each_tasks_first_setting():
    """Of the tasks and seeds that all settings have finished."""
    study = {
        "A": {"a": [1.0, 3.0, 2.0], "b": [2.0, 4.0], "of one task": [1.0, 1.0]},
        "B": {"a": [10.0, 30.0, 20.0], "b": [0.0, 20.0]},
        "C": {"a": [5.0, 5.0, 5.0], "b": [9.0]},
        "D": {"a": [5.0, 5.0, 5.0]},
    }
    shares = ablations.over_tasks(study)
    assert {name: list(values) for name, values in shares.items()} == {
        "a": [50, 150, 100],
        "b": [50, 150],
    }


def test_speed_is_the_median_after_the_first_row(call, tmp_path, monkeypatch):
    for name, rate in (("fast", 100), ("slow", 10)):
        rows = f"SPS,seconds\\n1,5\\n{rate},6\\n{3 * rate},7\\n{2 * rate},8"
        code = f"import os; os.mkdir('run'); open('run/metrics.csv', 'w').write('{rows}')"
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setitem(speed.SETTINGS, "Bandit", str(tmp_path / "fast.py"))
    flags = "--settings", "Bandit", "--rounds", 1, "--csv", tmp_path / "speed.csv", "--against"
    table = call(speed, *flags, tmp_path / "slow.py")
    for row in ("| Bandit | script | 200 | 1.00 |", "| Bandit | against | 20 | 10.00 |"):
        assert row in table
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
    "Bandit, 5 arms, 3 pulls|2°|2.000 ± 0.141|1.950 ± 0.212|1.500|-|-|1.900 (c=0.2)|-|-|2.500",
    "Bandit, 50 arms, 10 pulls (wide)|1°|5.100|5.000|-|-|-|-|-|-|-",
    "AntDir, 2 episodes|1°|405.4|400.0|-|-|-|-|-|-|-",
]


def test_table_and_figure_of_adaptation(call, tmp_path):
    """Settings are grouped, the best of a reference is shown, a panel has the means over seeds."""
    paths = [tmp_path / name for name in ("rl2.csv", "references.csv", "figure.png")]
    tables.write_csv(paths[0], RUNS)
    tables.write_csv(paths[1], REFERENCES)
    table = call(adaptation, paths[0], "--references", paths[1], "--output", paths[2])
    assert [x[2:-2].replace(" | ", "|") for x in table.splitlines()[2:]] == CELLS
    assert imread(paths[2]).shape[1] > 1200
    axis = adaptation.Figure().add_subplot()
    setting, runs = next(iter(adaptation.group(RUNS).items()))
    adaptation.draw_panel(axis, setting, runs, adaptation.find_references(REFERENCES, setting))
    drawn = {line.get_label(): line.get_ydata() for line in axis.lines}
    assert set(drawn) == {"RL$^2$", "UCB1 / BUCB-VI", "task known"}
    np.testing.assert_allclose(drawn["RL$^2$"], [0.5, 0.65, 0.8])
    np.testing.assert_allclose(drawn["UCB1 / BUCB-VI"], [0.5, 0.6, 0.8])
    np.testing.assert_allclose(drawn["task known"], 2.5 / 3)
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


@pytest.mark.parametrize("flags", ["--num-arms 0", "--trials 1", "--learners sarsa", "--csv ."])
def test_bad_flags_of_references_get_one_sentence(call, flags):
    error = call(ref, *flags.split(), status=2)
    assert error.startswith("error: ") and error.count("\n") == 1
