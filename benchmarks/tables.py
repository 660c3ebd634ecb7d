"""What the benchmarks share: CSV files, errors of one sentence, means over seeds, figures."""

import csv
import sys

import matplotlib
import numpy as np
from cycler import cycler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Okabe and Ito's colors, which color-blind people tell apart. A figure is shown 900 pixels wide:
# 9 inches, where no letter is below 9 points.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
WIDTH = 9
matplotlib.rcParams |= {
    "axes.prop_cycle": cycler(color=COLORS), "axes.titlesize": 10, "font.size": 9.5,
    "legend.fontsize": 9, "legend.framealpha": 0.6, "legend.handlelength": 1.6,
}  # fmt: skip


class UsageError(Exception):
    """Invalid usage: printed as one line, exit status 2."""


def run(main):
    """Call a script's main function."""
    try:
        main()
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def read_run(run_dir):
    """Rows of a run: of its metrics.csv or, where it has none, of its TensorBoard events."""
    if (run_dir / "metrics.csv").exists():
        return read_csv(run_dir / "metrics.csv")
    events = EventAccumulator(str(run_dir), {"scalars": 0})
    events.Reload()
    rows, last_step, seconds = {}, 0, 0.0
    for tag in events.Tags()["scalars"]:
        kind, name = tag.split("/")
        if kind != "eval":
            for x in events.Scalars(tag):
                rows.setdefault(x.step, {"global_step": str(x.step)})[name] = str(x.value)
    if not rows:
        raise UsageError(f"{run_dir} holds no metrics.csv and no events")
    last = {name: "nan" for row in rows.values() for name in row}
    last |= {"episodic_return": "nan", "episodic_length": "nan"}
    for step, row in sorted(rows.items()):
        seconds += (step - last_step) / float(row.get("SPS", "inf"))
        last_step, row["seconds"] = step, str(seconds)
        last = rows[step] = last | row  # an evaluation counts until the next one
    return [rows[step] for step in sorted(rows)]


def read_csv(path, *needed):
    """Rows of a table, each of which has a value in the columns `needed`."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise UsageError(f"{path} has no rows")
    for name in needed:
        if not all(row.get(name) for row in rows):
            raise UsageError(
                f"{path} has a row without {name}: it is cut, or a table of something else"
            )
    return rows


def write_csv(path, rows):
    """Write rows, which may differ in their columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def sample_std(values):
    """Over seeds, the first axis; a single seed tells nothing about it: 0."""
    return np.std(values, axis=0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])


def over_seeds(values, digits=0):
    """Mean and sample standard deviation as a table shows them."""
    std = f" ± {sample_std(values):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{std}"


def count_seeds(rows):
    """How many; ° counts those of the scripts before their rewrite, which have no version."""
    old = sum(not row.get("version") for row in rows)
    return f"{len(rows)}" + (f", {old}°" if 0 < old < len(rows) else "°" * (old > 0))


def save_figure(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
