"""Scores of finished runs: a row per run as CSV, and a table of means and stds over seeds.

python benchmarks/scores.py runs/* --csv benchmarks/results/scores.csv
python benchmarks/scores.py benchmarks/results/scores.csv
python benchmarks/scores.py benchmarks/results/scores.csv --bootstrap    with an interval of the
mean"""

import importlib
import json
import os
import platform
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import tyro
from tables import UsageError, over_seeds, read_csv, run, write_csv

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ALWAYS = (
    "env_id",
    "seed",
    "stop_early",
)  # flags that a command shows even where they are the preset's
VERSION = 3  # of the scripts' arithmetic; results/README.md tells what each is
OWN = ("run_dir", "resume", "evaluate", "preset")  # flags that say where a run is, not what it is


@dataclass
class Args:
    sources: tyro.conf.Positional[tuple[Path, ...]]  # run folders, or CSV files written by --csv
    csv: Path | None = None  # table to write, a row per run
    bootstrap: bool = False  # add a 95 % interval of the mean, for what its seeds tell


def machine():
    """Number of cores and processor of this machine, which should be that of the runs."""
    info = Path("/proc/cpuinfo")
    name = (
        re.search("^model name.*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else None
    )
    return f"{os.cpu_count()} cores of {name[1] if name else platform.processor()}"


def command_of(args):
    """The command of a run, rebuilt from the flags that are not those of its preset."""
    module = importlib.import_module(args["script"])
    automatic = args["env_id"] if args["env_id"] in module.PRESETS else "none"
    if args.get("task_sampler"):
        automatic = "simulator"
    preset = args["preset"] or "none"
    words = [f"python {args['script']}.py"]
    if preset != automatic:
        words.append(f"--preset {preset}")
    for field in fields(module.Args):
        value = args.get(field.name)
        default = module.PRESETS.get(preset, {}).get(field.name, field.default)
        default = list(default) if isinstance(default, tuple) else default  # as JSON has it
        shown = field.name in ALWAYS or (field.name not in OWN and value != default)
        if field.name not in args or not shown:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words.append(f"--{name} {' '.join(map(str, value))}")
        else:
            words.append(f"--{name} {shlex.quote(str(value))}")
    return " ".join(words)


def read_run(folder):
    """One row from a run folder: what was run, with what, and what came out."""
    args = json.loads((folder / "args.json").read_text())
    row = {"env_id": args["env_id"], "exp_name": args["exp_name"]}
    row |= json.loads((folder / "summary.json").read_text())
    row["command"] = command_of(args)
    row |= {name: args[name] for name in ("torch", "numpy", "gymnasium")}
    return row | {
        "python": platform.python_version(),
        "machine": machine(),
        "git_commit": args["git_commit"],
        "version": VERSION,
    }


def read_rows(source):
    """Rows of a table that --csv has written, or one of a run folder, none of an unfinished
    run's."""
    if source.suffix == ".csv":
        return read_csv(source, "command")
    return [read_run(source)] if (source / "summary.json").exists() else []


def interval(values):
    """95 % interval of the mean over seeds: percentiles of the means of 10,000 bootstrap
    samples."""
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    return np.percentile(means, [2.5, 97.5])


def print_table(rows, bootstrap):
    """Mean and std over seeds of the deterministic evaluation's means, and of the sampled one's.

    Runs of Muesli that stopped once they were solved show the median and greatest number of steps
    until then. RL^2's runs are left to adaptation.py, whose settings are more than a name."""
    groups = defaultdict(list)
    for row in rows:
        if not row.get("trial_return_mean"):
            early = row.get("solved_at") and "--no-stop-early" not in row["command"]
            steps = "" if early else f"{float(row['global_step']) / 1e3:.0f} k"
            groups[row["env_id"], row["exp_name"], steps].append(row)
    print(
        "| environment | setting | steps | seeds | deterministic | sampled | each seed |"
        + " 95 % of the mean |" * bootstrap
    )
    print("|---|---|---|---|---|---|---|" + "---|" * bootstrap)
    for (env_id, exp_name, steps), runs in sorted(groups.items(), key=str):
        runs.sort(key=lambda run: int(run["seed"]))
        evals = [float(run["eval_mean"]) for run in runs]
        sampled = [float(run["eval_sampled_mean"]) for run in runs]
        digits = 1 if max(map(abs, evals)) < 50 else 0
        if not steps:
            solved = [float(run["solved_at"]) for run in runs]
            steps = f"solved at {np.median(solved):.0f} (median), {max(solved):.0f} (last)"
        cells = [
            env_id,
            exp_name,
            steps,
            str(len(runs)),
            over_seeds(evals, digits),
            over_seeds(sampled, digits),
            ", ".join(f"{value:.{digits}f}" for value in evals),
        ]
        if bootstrap:
            ends = " to ".join(f"{end:.{digits}f}" for end in interval(evals))
            cells.append(ends if len(evals) > 1 else "-")
        print(f"| {' | '.join(cells)} |")


def main():
    args = tyro.cli(Args, description=__doc__)
    rows = [row for source in args.sources for row in read_rows(source)]
    if not rows:
        raise UsageError(f"no finished run in {', '.join(map(str, args.sources))}")
    if args.csv:
        write_csv(args.csv, rows)
    print_table(rows, args.bootstrap)


if __name__ == "__main__":
    run(main)
