"""How RL^2 adapts within a trial, beside learners that know the tasks' structure: a figure and a
table.

    python benchmarks/adaptation.py benchmarks/results/rl2.csv --output adaptation.png

A panel for each of six settings of rl2_meta.py: the mean return of each episode of a trial in new
tasks, RL^2's with sampled actions, the mean over its seeds shaded by one standard deviation on both
sides. Of a reference that was measured with several parameters (c, mu0, ...) the one with the best
score stands for all."""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure  # without pyplot it needs no display
from matplotlib.ticker import MaxNLocator
from tables import (
    STYLES,
    WIDTH,
    UsageError,
    count_seeds,
    over_seeds,
    read_csv,
    run,
    sample_std,
    save_figure,
)

TASKS = {"Bandit": "bandit", "TabularMDP": "mdp"}  # as references.py names them
COLUMNS = (
    "random",
    "Thompson / PSRL",
    "Optimistic-Thompson / OPSRL",
    "UCB1 / BUCB-VI",
    "Gittins",
    "Bayes optimum",
    "task known",
)


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]  # rows of rl2_meta.py's runs, as scores.py --csv writes them
    references: Path = (
        Path(__file__).parent / "results" / "references.csv"
    )  # of references.py --csv
    output: Path | None = None  # figure to write; none: only the table on the console


class Setting(NamedTuple):
    """What has a panel; only bandits have arms."""

    env_id: str
    episodes: int
    arms: int | None
    exp_name: str

    def __str__(self):
        trial = (
            f"{self.arms} arms, {self.episodes} pulls" if self.arms else f"{self.episodes} episodes"
        )
        return f"{self.env_id}, {trial}" + (
            f" ({self.exp_name})" if self.exp_name != "rl2_meta" else ""
        )


def group(rows):
    """{setting: rows}, those with references first, short trials before long ones."""
    settings = defaultdict(list)
    for row in rows:
        arms = re.search(r"--num-arms (\d+)", row["command"])
        arms = int(arms[1] if arms else 5) if row["env_id"] == "Bandit" else None
        setting = Setting(
            row["env_id"], len(json.loads(row["episode_returns"])), arms, row["exp_name"]
        )
        if row["seed"] in [other["seed"] for other in settings[setting]]:
            raise UsageError(f"there are two runs of {setting}, seed {row['seed']}: leave one out")
        settings[setting].append(row)
    order = sorted(settings, key=lambda setting: (setting.env_id not in TASKS, setting))
    return {setting: settings[setting] for setting in order}


def find_references(rows, setting):
    """{column: (name, row with the best score)}."""
    about, found = (TASKS.get(setting.env_id), str(setting.arms or ""), str(setting.episodes)), {}
    rows = [row for row in rows if (row["task"], row["num_arms"], row["episodes"]) == about]
    for column in COLUMNS:
        for name in column.split(" / "):  # a column is for bandits / MDPs
            same = [row for row in rows if row["learner"] == name.lower()]
            if same:
                found[column] = name, max(same, key=lambda row: float(row["score"]))
    return found


def table(settings, references):
    """Heading and lines of cells: mean returns of trials, RL^2's ± their standard deviation over
    seeds."""
    lines = [["setting", "seeds", "RL^2 greedy", "RL^2 sampled", *COLUMNS]]
    for setting, runs in settings.items():
        greedy = [float(row["trial_return_greedy_mean"]) for row in runs]
        sampled = [float(row["trial_return_mean"]) for row in runs]
        size = max(abs(np.mean(sampled)), 1)
        digits = max(0, 3 - math.floor(math.log10(size)))  # four in all
        found = find_references(references, setting)
        cells = {
            column: f"{float(row['score']):.{digits}f}"
            + f" ({row['setting']})" * bool(row["setting"])
            for column, (_, row) in found.items()
        }
        lines.append(
            [
                str(setting),
                count_seeds(runs),
                over_seeds(greedy, digits),
                over_seeds(sampled, digits),
                *(cells.get(column, "-") for column in COLUMNS),
            ]
        )
    return lines


def draw_panel(axis, setting, runs, found, columns=COLUMNS[1:]):
    """RL^2 and its references; random actions would flatten the rest."""
    episodes = np.arange(1, setting.episodes + 1)
    curves = np.array([json.loads(row["episode_returns"]) for row in runs])  # (seeds, n)
    mean, std = curves.mean(0), sample_std(curves)
    axis.plot(episodes, mean, color="k", lw=3, label="RL$^2$")  # thin lines stay visible on it
    axis.fill_between(episodes, mean - std, mean + std, color="k", alpha=0.2, lw=0)
    for column in columns:
        i, (name, row) = COLUMNS.index(column), found.get(column, (None, None))
        if row and row["episode_returns"]:
            curve, style = json.loads(row["episode_returns"]), STYLES[i % len(STYLES)]
            axis.plot(episodes, curve, style, color=f"C{i}", lw=1.3, label=column)
        elif name == "task known":  # the Bayes optimum is known of whole trials only
            axis.axhline(float(row["score"]) / setting.episodes, color="0.5", ls=":", label=name)
    axis.set_title(str(setting).split(" (")[0])
    axis.set_xlabel("pull of the trial" if setting.arms else "episode of the trial")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.grid(alpha=0.3)


def draw(settings, references, path):
    """Six panels: short, longer and long trials of bandits, and of MDPs."""
    chosen = [x for x in settings if x.exp_name != "published" and x.env_id in TASKS]
    short = {(5, 10): 0, (10, 100): 1, (10, 500): 2, (None, 10): 3, (None, 25): 4, (None, 50): 5}
    chosen = [x for x in chosen if (x.arms, x.episodes) in short] or list(settings)[:6]
    chosen.sort(key=lambda x: short.get((x.arms, x.episodes), 9))
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(WIDTH, 2.7 * rows + 0.9), layout="constrained")
    for i, setting in enumerate(chosen):
        axis = figure.add_subplot(rows, columns, i + 1)
        draw_panel(axis, setting, settings[setting], find_references(references, setting))
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=4)
    figure.supylabel("mean return of the episode, sampled actions", fontsize=10)
    save_figure(figure, path)


def main():
    args = tyro.cli(Args, description=__doc__)
    settings = group(read_csv(args.runs, "trial_return_mean", "episode_returns", "command"))
    references = read_csv(args.references, "task", "learner", "score")
    heading, *lines = table(settings, references)
    for line in (heading, ["---"] * len(heading), *lines):
        print(f"| {' | '.join(line)} |")
    if args.output:
        draw(settings, references, args.output)


if __name__ == "__main__":
    run(main)
