"""Learning curves of finished or still running trainings, as a figure.

    python benchmarks/plot.py runs/* --output curves.png
    python benchmarks/plot.py runs/* --csv benchmarks/results/curves.csv  keep the curves, thinned
    python benchmarks/plot.py benchmarks/results/curves.csv --output curves.png  draw without runs
    python benchmarks/plot.py --overview --output benchmarks/results/overview.png  the front page's

A panel per environment, a line per exp_name: mean and standard deviation over the seeds, as far as
all came."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import adaptation
import numpy as np
import tyro
from matplotlib.figure import Figure  # without pyplot it needs no display
from matplotlib.ticker import EngFormatter
from tables import (
    STYLES,
    WIDTH,
    UsageError,
    read_csv,
    read_run,
    run,
    sample_std,
    save_figure,
    write_csv,
)

KEY = ("env_id", "exp_name", "seed")
KEPT = ("global_step", "seconds", "episodic_return")
POINTS, WINDOW = 400, 5  # of the grid that curves are interpolated on, and of the moving mean there
RESULTS = Path(__file__).resolve().parent / "results"
MUJOCO = ("HalfCheetah-v5", "Walker2d-v5", "Hopper-v5", "Humanoid-v5", "Ant-v5")
OVERVIEW = {  # title: table, column, environments
    "PPO on MuJoCo": ("curves.csv", "episodic_return", MUJOCO),
    "PPO on Breakout": ("atari_curves.csv", "episodic_return", ("Breakout",)),
    "PPO on Pong": ("atari_curves.csv", "episodic_return", ("Pong",)),
    "Muesli on CartPole": ("muesli_curves.csv", "greedy_return", ("CartPole-v1",)),
    "Muesli on LunarLander": ("muesli_curves.csv", "greedy_return", ("LunarLander-v3",)),
}
NAMES = {
    "episodic_return": "return of training episodes",
    "greedy_return": "greedy return",
    "test_return": "return of a trial, meta-test",
}
BAND = "band: ± standard deviation over seeds"


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # run folders, or files written by --csv
    overview: bool = False  # draw the front page's figure, from the tables in results
    output: Path | None = None  # figure to write
    csv: Path | None = (
        None  # table to write: global_step, seconds, episodic_return and y, 100 rows a run
    )
    x: Literal["global_step", "minutes"] = "global_step"  # horizontal axis
    y: str = "episodic_return"  # vertical axis: any scalar that the run logs
    label: Literal["exp_name", "folder"] = "exp_name"  # what tells lines apart
    each: bool = False  # a line for each seed, not their mean


def read_rows(path, label):
    """Rows of a run folder or of a kept table, each with its env_id, exp_name and seed."""
    rows = read_run(path) if path.is_dir() else read_csv(path)
    rows = [row for row in rows if None not in row.values()]  # a kill may cut one
    rows = [row | {"minutes": float(row["seconds"]) / 60} for row in rows]
    if path.is_dir():
        about = json.loads((path / "args.json").read_text())
        if label == "folder":
            about["exp_name"] = path.resolve().name
        rows = [row | {name: str(about[name]) for name in KEY} for row in rows]
    return rows


def read_curves(paths, x="global_step", y="episodic_return", label="exp_name"):
    """{(env_id, exp_name, seed): {column: array}}, only the rows in which every column is
    finite."""
    names, curves = dict.fromkeys((*KEPT, x, y)), {}
    for path in paths:
        runs = defaultdict(list)
        try:
            for row in read_rows(path, label):
                values = [float(row[name]) for name in names]
                if np.isfinite(values).all():  # there is no return before the first episode's end
                    runs[tuple(row[name] for name in KEY)].append(values)
        except KeyError as error:
            raise UsageError(f"{path} has no column {error}") from error
        if not runs:
            raise UsageError(f"{path} has no row with a finite {y} yet: leave it out")
        for key, values in runs.items():
            if key in curves:
                raise UsageError(
                    f"{path} is a second run of {key[0]}, exp_name {key[1]}, seed {key[2]}: "
                    "leave one out, or give --label folder"
                )
            curves[key] = dict(zip(names, np.transpose(values), strict=True))
    return curves


def thinned(curves):
    """Rows of a table small enough to commit."""
    for key, columns in curves.items():
        size = len(columns["global_step"])
        for i in np.linspace(0, size - 1, min(size, 100)).round().astype(int):
            yield dict(zip(KEY, key, strict=True)) | {
                name: f"{x[i]:.10g}" for name, x in columns.items()
            }


def draw_line(axis, seeds, x="global_step", y="episodic_return", **style):
    """Mean and standard deviation of the curves of several seeds."""
    start = max(curve[x][0] for curve in seeds)
    end = min(curve[x][-1] for curve in seeds)
    if start > end:
        raise UsageError(f"two seeds of one line have no {x} in common: leave the shorter run out")
    grid, window = np.linspace(start, end, POINTS), np.ones(WINDOW)
    weight = np.convolve(
        np.ones(POINTS), window, "same"
    )  # near both ends the mean is over fewer points
    curves = [
        np.convolve(np.interp(grid, curve[x], curve[y]), window, "same") / weight for curve in seeds
    ]
    mean, std = np.mean(curves, 0), sample_std(curves)
    axis.plot(grid, mean, **style)
    axis.fill_between(grid, mean - std, mean + std, color=style["color"], alpha=0.2, lw=0)


def draw_published(axis, env_id, steps):
    """Published scores as ticks at the right edge."""
    rows = read_csv(RESULTS / "published.csv")
    million = f"{steps / 1e6:.0f} M" if abs(steps / 1e6 - round(steps / 1e6)) < 0.1 else ""
    values = [
        float(row["value"]) for row in rows if (row["env_id"], row["steps"]) == (env_id, million)
    ]
    for i, value in enumerate(values):
        axis.plot(
            [0.94, 1], [value] * 2, color="black", lw=1, transform=axis.get_yaxis_transform(),
            label=None if i else "published",
        )  # fmt: skip


def draw(curves, args):
    """Write the figure."""
    panels = defaultdict(lambda: defaultdict(list))
    for (env_id, label, _), columns in curves.items():
        panels[env_id][label].append(columns)
    labels = list(dict.fromkeys(label for _, label, _ in curves))
    width = min(3, math.ceil(math.sqrt(len(panels))))
    height = math.ceil(len(panels) / width)
    figure = Figure(figsize=(WIDTH, 2.6 * height + 0.4), layout="constrained")
    for i, (env_id, lines) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(height, width, i)
        for label, seeds in lines.items():
            k = labels.index(label)  # the same in all panels
            style = {"color": f"C{k}", "ls": STYLES[k % len(STYLES)]}
            for j, some in enumerate([[x] for x in seeds] if args.each else [seeds]):
                draw_line(axis, some, args.x, args.y, label=None if j else label, **style)
        if args.x == "global_step" and args.y == "episodic_return":
            draw_published(
                axis, env_id, max(x[args.x][-1] for seeds in lines.values() for x in seeds)
            )
        axis.set_title(env_id)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if len(labels) > 1 or i == 1:
            axis.legend()
    name = "environment steps" if args.x == "global_step" else args.x
    figure.supxlabel(name if args.each else f"{name} ({BAND})", fontsize=10)
    figure.supylabel(NAMES.get(args.y, args.y.replace("_", " ")), fontsize=10)
    save_figure(figure, args.output)


def new_values(curve, y):
    """The rows where y changes, and the last: evaluations are repeated in metrics.csv until the
    next one."""
    changes = np.flatnonzero(np.diff(curve[y])) + 1
    rows = np.unique([0, *changes, len(curve[y]) - 1])
    return {name: values[rows] for name, values in curve.items()}


def draw_overview(path):
    """Learning curves of three scripts, and RL^2's returns within a trial."""
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for axis, (title, (table, y, env_ids)) in zip(axes, OVERVIEW.items(), strict=False):
        curves, labels = read_curves([RESULTS / table], y=y), []
        for i, env_id in enumerate(env_ids):
            about = next(key[:2] for key in curves if key[0] == env_id)  # the first exp_name
            seeds = [new_values(curve, y) for key, curve in curves.items() if key[:2] == about]
            style = {"color": f"C{i}", "ls": STYLES[i % len(STYLES)]}
            draw_line(axis, seeds, y=y, **style)
            labels.append((np.mean([x[y][-1] for x in seeds]), env_id.split("-")[0], f"C{i}"))
            if len(env_ids) == 1 and y == "episodic_return":
                draw_published(axis, env_id, max(x["global_step"][-1] for x in seeds))
        axis.set(title=title, ylabel=NAMES[y])
        if len(env_ids) > 1:
            last, height = seeds[0]["global_step"][-1], -np.inf
            axis.set_xlim(0, 1.65 * last)
            for end, name, color in sorted(labels):  # at the ends of the lines, a letter apart
                height = max(end, height + 0.07 * np.ptp(axis.get_ylim()))
                axis.annotate(name, (1.03 * last, height), color=color, va="center", fontsize=9)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend()
    trials = adaptation.group(read_csv(RESULTS / "rl2.csv"))
    setting = next(setting for setting in trials if setting[1:3] == (100, 10))
    found = adaptation.find_references(read_csv(RESULTS / "references.csv"), setting)
    axis = list(figure.axes)[5]
    learners = "Thompson / PSRL", "UCB1 / BUCB-VI", "Gittins"
    adaptation.draw_panel(axis, setting, trials[setting], found, learners)
    axis.set(title="RL$^2$ on bandits of 10 arms", ylabel="mean reward")
    axis.legend(axis.lines, [x.get_label().split(" / ")[0] for x in axis.lines])
    figure.supxlabel(f"environment steps ({BAND})", fontsize=10)
    save_figure(figure, path)


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.overview and args.output:
        return draw_overview(args.output)
    if not args.runs or not (args.output or args.csv):
        raise UsageError("give at least one run folder, and --output or --csv")
    curves = read_curves(args.runs, args.x, args.y, args.label)
    if args.csv:
        write_csv(args.csv, list(thinned(curves)))
    if args.output:
        draw(curves, args)


if __name__ == "__main__":
    run(main)
