"""The adaptation figure and its table, from tables made here."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "adaptation.py"
sys.path.insert(0, str(SCRIPT.parent))

import adaptation  # noqa: E402


def a_run(env_id, seed, curve, flags="", greedy=0.0, exp_name="rl2_meta"):
    return {"env_id": env_id, "exp_name": exp_name, "seed": str(seed),
            "trial_return_greedy_mean": str(greedy), "trial_return_mean": str(sum(curve)),
            "episode_returns": json.dumps(curve),
            "command": f"python rl2_meta.py --seed {seed} --env-id {env_id}{flags}"}


def a_reference(learner, score, curve=(), task="bandit", arms="5", episodes="3", setting="", replan=""):
    return {"task": task, "num_arms": arms, "episodes": episodes, "replan": replan, "learner": learner,
            "setting": setting, "score": str(score), "episode_returns": json.dumps(curve) if curve else ""}


RUNS = [a_run("HalfCheetahDir", 1, [100.0, 300.0], " --episodes-per-trial 2", greedy=1234.4),
        a_run("TabularMDP", 1, [10.0] * 10, greedy=101.23),
        a_run("Bandit", 1, [0.5, 0.6, 0.7], " --episodes-per-trial 3", greedy=1.9),
        a_run("Bandit", 2, [0.5, 0.7, 0.9], " --episodes-per-trial 3", greedy=2.1),
        a_run("Bandit", 1, [0.5] * 10, " --num-arms 50 --total-timesteps 300", greedy=5.1, exp_name="wide")]
REFERENCES = [a_reference("random", 1.5, [0.5, 0.5, 0.5]),
              a_reference("ucb1", 1.8, [0.5, 0.6, 0.7], setting="c=0.1"),
              a_reference("ucb1", 1.9, [0.5, 0.6, 0.8], setting="c=0.2"),
              a_reference("ucb1", 1.7, [0.5, 0.6, 0.6], setting="c=0.3"),
              a_reference("gittins", 9.9, [3.3, 3.3, 3.3], arms="10"),
              a_reference("bayes optimum", 2.0),
              a_reference("task known", 2.5),
              a_reference("bucb-vi", 156.0, [15.6] * 10, "mdp", "", "10", replan="episode"),
              a_reference("bucb-vi", 165.0, [16.5] * 10, "mdp", "", "10", replan="step")]
TABLE = ["setting|seeds|RL^2 greedy|RL^2 sampled|random|Thompson / PSRL|UCB1 / BUCB-VI|Gittins|Bayes optimum|"
         "task known",
         "Bandit, 5 arms, 3 pulls|2|2.000 ± 0.141|1.950 ± 0.212|1.500|-|1.900 (c=0.2)|-|2.000|2.500",
         "Bandit, 50 arms, 10 pulls (wide)|1|5.100|5.000|-|-|-|-|-|-",
         "TabularMDP, 10 episodes|1|101.2|100.0|-|-|156.0|-|-|-",
         "HalfCheetahDir, 2 episodes|1|1234|400.0|-|-|-|-|-|-"]


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def call(*words):
    command = [sys.executable, SCRIPT, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_settings_are_read_from_the_command():
    settings = adaptation.group(RUNS)
    assert [setting[:3] for setting in settings] == [
        ("Bandit", 3, 5), ("Bandit", 10, 50), ("TabularMDP", 10, None), ("HalfCheetahDir", 2, None)]
    assert [len(runs) for runs in settings.values()] == [2, 1, 1, 1]


def test_two_runs_of_one_seed_are_not_averaged():
    with pytest.raises(adaptation.UsageError, match="two runs of Bandit, 5 arms, 3 pulls, seed 2"):
        adaptation.group([*RUNS, RUNS[3]])


def test_table_by_hand():
    assert ["|".join(line) for line in adaptation.table(adaptation.group(RUNS), REFERENCES)] == TABLE


def test_panel_shows_the_mean_over_seeds_and_the_best_references():
    axis = adaptation.Figure().add_subplot()
    setting, runs = next(iter(adaptation.group(RUNS).items()))
    adaptation.draw_panel(axis, setting, runs, adaptation.find_references(REFERENCES, setting))
    lines = {line.get_label(): line.get_ydata() for line in axis.lines}
    assert set(lines) == {"RL$^2$", "random", "UCB1 c=0.2", "task known"}
    np.testing.assert_allclose(lines["RL$^2$"], [0.5, 0.65, 0.8])
    np.testing.assert_allclose(lines["UCB1 c=0.2"], [0.5, 0.6, 0.8])
    np.testing.assert_allclose(lines["task known"], 2.5 / 3)
    shade = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert shade.max() == pytest.approx(0.8 + np.sqrt(0.02))  # the deviation of 0.7 and 0.9


def test_figure_and_console(tmp_path):
    runs, references = write(tmp_path / "rl2.csv", RUNS), write(tmp_path / "references.csv", REFERENCES)
    result = call(runs, "--references", references, "--output", tmp_path / "new" / "figure.png")
    assert result.returncode == 0, result.stderr
    lines = [line.strip("| ").replace(" | ", "|") for line in result.stdout.splitlines()]
    assert lines == [TABLE[0], "|".join(["---"] * 10), *TABLE[1:]]
    pixels = imread(tmp_path / "new" / "figure.png")[..., :3]
    assert pixels.shape[0] > 600 and pixels.shape[1] > 1200
    colourful = np.ptp(pixels, axis=-1) > 0.2
    half = len(pixels) // 2
    assert colourful[:half].mean() > 1e-3  # curves above, the table's words below
    assert not colourful[-half // 2:].any() and (pixels[-half // 2:] < 0.5).mean() > 1e-3


PPO = "trial_return_mean,episode_returns,command\n,,python ppo_continuous.py\n"


@pytest.mark.parametrize("content", [None, "", "env_id,seed\n", "task,score\nbandit,1\n", PPO])
@pytest.mark.parametrize("wrong", ["runs", "references"])
def test_bad_tables_get_one_sentence(tmp_path, content, wrong):
    paths = {"runs": write(tmp_path / "runs", RUNS), "references": write(tmp_path / "references", REFERENCES)}
    paths[wrong].unlink()
    if content is not None:
        paths[wrong].write_text(content)
    output = tmp_path / "figure.png"
    result = call(paths["runs"], "--references", paths["references"], "--output", output)
    assert (result.returncode, result.stdout, output.exists()) == (2, "", False)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert str(paths[wrong]) in result.stderr
