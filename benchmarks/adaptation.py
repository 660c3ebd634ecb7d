"""How RL^2 adapts within a trial, beside learners that know the tasks' structure: a figure and a table.

    python benchmarks/adaptation.py benchmarks/results/rl2.csv --output benchmarks/results/adaptation.png

A panel for each setting of rl2_meta.py: the mean return of each episode of a trial in new tasks, RL^2's with
sampled actions, the mean over its seeds shaded by one standard deviation on both sides. Of a reference that
was measured with several parameters (c, mu0, ...) the one with the best score stands for all.
"""

import csv
import json
import math
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure  # without pyplot it is Agg that draws, also where there is no display
from matplotlib.ticker import MaxNLocator

TASKS = {"Bandit": "bandit", "TabularMDP": "mdp"}  # what references.py plays, by its own names
COLUMNS = ("random", "Thompson / PSRL", "UCB1 / BUCB-VI", "Gittins", "Bayes optimum", "task known")


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]
    """rows of rl2_meta.py's runs, as scores.py --csv writes them"""
    references: Path = Path(__file__).parent / "results" / "references.csv"
    """rows of references.py --csv"""
    output: Path | None = None
    """figure to write; none: only the table on the console"""


class Setting(NamedTuple):
    """What has a panel; only bandits have arms."""

    env_id: str
    episodes: int
    arms: int | None
    exp_name: str

    def __str__(self):
        trial = f"{self.arms} arms, {self.episodes} pulls" if self.arms else f"{self.episodes} episodes"
        return f"{self.env_id}, {trial}" + (f" ({self.exp_name})" if self.exp_name != "rl2_meta" else "")


def read(path, *needed):
    """Rows of a table that has these columns, among others."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise UsageError(f"{path} has no rows: give a table that --csv has written")
    missing = [name for name in needed if any(not row.get(name) for row in rows)]
    if missing:
        raise UsageError(f"{path} has a row without {missing[0]}: it is cut, or a table of something else")
    return rows


def group(runs):
    """{setting: runs}, those with references first, short trials before long ones."""
    settings = defaultdict(list)
    for run in runs:
        flags = dict(re.findall(r"--(num-arms|episodes-per-trial) (\d+)", run["command"]))  # or the defaults
        arms = int(flags.get("num-arms", 5)) if run["env_id"] == "Bandit" else None
        setting = Setting(run["env_id"], int(flags.get("episodes-per-trial", 10)), arms, run["exp_name"])
        if run["seed"] in [other["seed"] for other in settings[setting]]:
            raise UsageError(f"there are two runs of {setting}, seed {run['seed']}: leave one out")
        settings[setting].append(run)
    order = sorted(settings, key=lambda setting: (setting.env_id not in TASKS, setting))
    return {setting: settings[setting] for setting in order}


def find_references(rows, setting):
    """{column: (name, row with the best score)}, of those that plan before each episode, as published."""
    about, found = (TASKS.get(setting.env_id), str(setting.arms or ""), str(setting.episodes)), {}
    rows = [row for row in rows if (row["task"], row["num_arms"], row["episodes"]) == about]
    for column in COLUMNS:
        for name in column.split(" / "):  # a column is for bandits / MDPs
            same = [row for row in rows if row["learner"] == name.lower() and row["replan"] != "step"]
            if same:
                found[column] = name, max(same, key=lambda row: float(row["score"]))
    return found


def deviation(values):
    """Over seeds, the first axis; nothing is known of it from a single one."""
    return np.std(values, axis=0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])


def table(settings, references):
    """Heading and lines of cells: mean returns of trials, RL^2's ± their standard deviation over seeds."""
    lines = [["setting", "seeds", "RL^2 greedy", "RL^2 sampled", *COLUMNS]]
    for setting, runs in settings.items():
        lines.append([str(setting), str(len(runs))])
        for column in ("trial_return_greedy_mean", "trial_return_mean"):
            scores = [float(run[column]) for run in runs]
            mean = np.mean(scores)
            digits = max(0, 3 - math.floor(math.log10(max(abs(mean), 1))))  # four in all
            lines[-1].append(f"{mean:.{digits}f}" + f" ± {deviation(scores):.{digits}f}" * (len(runs) > 1))
        cells = {column: f"{float(row['score']):.{digits}f}" + f" ({row['setting']})" * bool(row["setting"])
                 for column, (_, row) in find_references(references, setting).items()}
        lines[-1] += [cells.get(column, "-") for column in COLUMNS]
    return lines


def draw_panel(axis, setting, runs, found):
    episodes = np.arange(1, setting.episodes + 1)
    curves = np.array([json.loads(run["episode_returns"]) for run in runs])  # (seeds, n)
    mean, spread = curves.mean(0), deviation(curves)
    axis.plot(episodes, mean, color="k", lw=3, label="RL$^2$")  # thin lines stay visible on it
    axis.fill_between(episodes, mean - spread, mean + spread, color="k", alpha=0.2, lw=0)
    for column, (name, row) in found.items():
        if row["episode_returns"]:
            curve, colour = json.loads(row["episode_returns"]), f"C{COLUMNS.index(column)}"
            style = "--" if name == "Gittins" else "-"  # it often lies on UCB1
            axis.plot(episodes, curve, style, color=colour, lw=1.3, label=f"{name} {row['setting']}".strip())
        elif name == "task known":  # the other bound, the Bayes optimum, is known of whole trials only
            axis.axhline(float(row["score"]) / setting.episodes, color="0.5", ls=":", label=name)
    axis.set_title(setting, fontsize="medium")  # the longest would touch its neighbour's
    axis.set_xlabel("pull of the trial" if setting.arms else "episode of the trial")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def draw(settings, references, path):
    """Write the panels, and the table below them."""
    width = min(len(settings), 4)
    height = math.ceil(len(settings) / width)
    lines = [[cell.replace("RL^2", "RL$^2$") for cell in line] for line in table(settings, references)]
    inches = 3.2 * height, 0.3 * len(lines) + 0.2
    figure = Figure(figsize=(max(9, 3.6 * width), sum(inches)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=inches)
    for i, (setting, runs) in enumerate(settings.items(), start=1):
        draw_panel(above.add_subplot(height, width, i), setting, runs, find_references(references, setting))
    above.supylabel("mean return of the episode")
    axis = below.add_subplot()
    axis.axis("off")
    cells = axis.table(lines[1:], colLabels=lines[0], loc="center", cellLoc="center", edges="horizontal")
    cells.auto_set_font_size(False)
    cells.set_fontsize(8)
    cells.auto_set_column_width(range(len(lines[0])))
    cells.scale(1, 1.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    try:
        args = tyro.cli(Args, description=__doc__)
        settings = group(read(args.runs, "trial_return_mean", "episode_returns", "command"))
        references = read(args.references, "task", "learner", "score")
        heading, *lines = table(settings, references)
        for line in (heading, ["---"] * len(heading), *lines):
            print(f"| {' | '.join(line)} |")
        if args.output:
            draw(settings, references, args.output)
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
