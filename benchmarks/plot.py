"""Learning curves of finished or still running trainings, as a figure.

    python benchmarks/plot.py runs/* --output curves.png
    python benchmarks/plot.py runs/* --csv benchmarks/results/curves.csv          keep the curves, thinned
    python benchmarks/plot.py benchmarks/results/curves.csv --output curves.png   draw them without the runs

A panel for each environment, in it a line for each exp_name: the mean over its seeds, shaded by one standard
deviation on both sides, as far as all of them have come.
"""

import csv
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from matplotlib.figure import Figure  # without pyplot it is Agg that draws, also where there is no display
from matplotlib.ticker import EngFormatter

KEY = ("env_id", "exp_name", "seed")
KEPT = ("global_step", "seconds", "episodic_return")
POINTS = 400  # of the grid that curves are interpolated on


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or files written by --csv"""
    output: Path | None = None
    """figure to write"""
    csv: Path | None = None
    """table to write, with the columns global_step, seconds, episodic_return and y; up to 100 rows a run"""
    x: Literal["global_step", "seconds"] = "global_step"
    """horizontal axis"""
    y: str = "episodic_return"
    """vertical axis: any column of metrics.csv"""
    smooth: int = 5
    """points of the moving mean over each curve, which has 400; 1: none"""
    label: Literal["exp_name", "folder"] = "exp_name"
    """what tells lines apart; folder: a line for each folder, for runs that share exp_name and seed"""

    def __post_init__(self):
        if not self.runs or not (self.output or self.csv):
            raise UsageError("give at least one run folder, and --output or --csv")
        if not 1 <= self.smooth <= POINTS:
            raise UsageError(f"--smooth {self.smooth} is outside 1 to {POINTS}")


def read_rows(path, label):
    """Rows of a run folder or of a kept table, each with its env_id, exp_name and seed."""
    try:
        with open(path / "metrics.csv" if path.is_dir() else path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if None not in row.values()]  # a kill may cut one
        about = json.loads((path / "args.json").read_text()) if path.is_dir() else {}
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; give run folders or --csv's files") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if about and label == "folder":
        about["exp_name"] = path.resolve().name
    return [row | {name: str(about[name]) for name in KEY if name in about} for row in rows]


def read_curves(args):
    """{(env_id, exp_name, seed): {column: array}}, only the rows in which every column is finite."""
    names, curves = dict.fromkeys((*KEPT, args.x, args.y)), {}
    for path in args.runs:
        runs = defaultdict(list)
        try:
            for row in read_rows(path, args.label):
                values = [float(row[name]) for name in names]
                if np.isfinite(values).all():  # there is no return before the first episode's end
                    runs[tuple(row[name] for name in KEY)].append(values)
        except KeyError as error:
            raise UsageError(f"{path} has no column {error}") from error
        if not runs:
            raise UsageError(f"{path} has no row with a finite {args.y} yet: leave it out")
        for key, values in runs.items():
            if key in curves:
                raise UsageError(f"{path} is a second run of {key[0]}, exp_name {key[1]}, seed {key[2]}: "
                                 "leave one out, or give --label folder")
            curves[key] = dict(zip(names, np.transpose(values), strict=True))
    return curves


def write_curves(path, curves):
    """Keep the curves in a table small enough to commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = next(iter(curves.values())).keys()
        writer.writerow([*KEY, *names])
        for key, columns in curves.items():
            size = len(columns["global_step"])
            for i in np.linspace(0, size - 1, min(size, 100)).round().astype(int):
                writer.writerow([*key, *(f"{columns[name][i]:.10g}" for name in names)])


def mean_and_deviation(seeds, args):
    """Grid, mean and standard deviation of the curves of several seeds."""
    start, end = max(c[args.x][0] for c in seeds), min(c[args.x][-1] for c in seeds)
    if start > end:
        raise UsageError(f"two seeds of one line have no {args.x} in common: leave the shorter run out")
    grid, window = np.linspace(start, end, POINTS), np.ones(args.smooth)
    weight = np.convolve(np.ones(POINTS), window, "same")  # near both ends the mean is over fewer points
    curves = [np.convolve(np.interp(grid, c[args.x], c[args.y]), window, "same") / weight for c in seeds]
    return grid, np.mean(curves, 0), np.std(curves, 0, ddof=1) if len(seeds) > 1 else np.zeros(POINTS)


def draw(curves, args):
    """Write the figure."""
    panels = defaultdict(lambda: defaultdict(list))
    for (env_id, label, _), columns in curves.items():
        panels[env_id][label].append(columns)
    labels = list(dict.fromkeys(label for _, label, _ in curves))
    width = math.ceil(math.sqrt(len(panels)))
    height = math.ceil(len(panels) / width)
    figure = Figure(figsize=(4.2 * width, 3.2 * height), layout="constrained")
    for i, (env_id, lines) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(height, width, i)
        for label, seeds in lines.items():
            grid, mean, deviation = mean_and_deviation(seeds, args)
            colour = f"C{labels.index(label)}"  # the same in all panels
            axis.plot(grid, mean, color=colour, label=label)
            axis.fill_between(grid, mean - deviation, mean + deviation, color=colour, alpha=0.2, lw=0)
        axis.set_title(env_id)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.legend(fontsize="small")
    figure.supxlabel("environment steps" if args.x == "global_step" else args.x)
    figure.supylabel(args.y.replace("_", " "))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)


def main():
    try:
        args = tyro.cli(Args, description=__doc__)
        curves = read_curves(args)
        if args.csv:
            write_curves(args.csv, curves)
        if args.output:
            draw(curves, args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
