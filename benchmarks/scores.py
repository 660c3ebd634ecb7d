"""Scores of finished runs: a row per run as CSV, and a table of means and stds over seeds.

    python benchmarks/scores.py runs/* --csv benchmarks/results/scores.csv
    python benchmarks/scores.py benchmarks/results/scores.csv
"""

import csv
import importlib
import json
import os
import platform
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

OWN = ("run_dir", "resume", "evaluate", "preset")  # flags that say where a run is, not what it is


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


@dataclass
class Args:
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run folders, or CSV files written by --csv"""
    csv: Path | None = None
    """where to write a row per run"""


def machine():
    """Processor and number of cores of this machine, which should be the one of the runs."""
    info = Path("/proc/cpuinfo")
    name = re.search("^model name.*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else None
    return f"{os.cpu_count()} cores of {name[1] if name else platform.processor()}"


def read_run(folder):
    """One row from a run folder: what was run, with what, and what came out."""
    args, summary = (json.loads((folder / name).read_text()) for name in ("args.json", "summary.json"))
    script = args.get("script", "ppo_continuous")  # the oldest runs do not name theirs
    module = importlib.import_module(script)
    automatic = args["env_id"] if args["env_id"] in module.PRESETS else "none"
    if args.get("task_sampler"):
        automatic = "simulator"
    preset = args.get("preset") or "none"
    command = [f"python {script}.py"] + ([f"--preset {preset}"] if preset != automatic else [])
    for field in fields(module.Args):
        if field.name not in args:
            continue  # younger than the run
        value, flag = args[field.name], "--" + field.name.replace("_", "-")
        default = module.PRESETS.get(preset, {}).get(field.name, field.default)
        default = list(default) if isinstance(default, tuple) else default
        if field.name in ("env_id", "seed") or (field.name not in OWN and value != default):
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            negated = "--no-" + flag[2:]
            command.append((flag if value else negated) if isinstance(value, bool) else f"{flag} {words}")
    versions = {name: args[name] for name in ("torch", "numpy", "gymnasium")}
    about = {"command": " ".join(command), **versions, "python": platform.python_version(),
             "machine": machine(), "git_commit": args["git_commit"]}
    with open(folder / "metrics.csv", newline="") as file:
        *_, last = csv.DictReader(file)
    if "greedy_return" in last:  # Muesli's evaluations while training have more episodes than the final one
        summary["greedy_return"] = float(last["greedy_return"])
    return {"env_id": args["env_id"], "exp_name": args["exp_name"], **summary, **about}


def read_rows(source):
    """Rows of a file that --csv has written, or one of a run folder, none of an unfinished run's."""
    if source.suffix != ".csv":
        return [read_run(source)] if (source / "summary.json").exists() else []
    try:
        with open(source, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if any(not row.get("command") for row in rows):
        raise UsageError(f"{source} has a row without command: it is cut, or a table of something else")
    return rows


def over_seeds(values):
    """Mean ± sample std; nothing is known of it from a single seed."""
    return f"{np.mean(values):.0f}" + (f" ± {np.std(values, ddof=1):.0f}" if len(values) > 1 else "")


def print_table(rows):
    """Mean and std over seeds of the deterministic evaluation's means, and of the sampled one's.

    Muesli's deterministic one is its last while training, of more episodes. Runs that stop once they are
    solved end after different numbers of steps: the median and greatest number that solved it.
    RL^2's are left to adaptation.py, whose settings are more than a name."""
    groups = defaultdict(list)
    for row in rows:
        if not row.get("trial_return_mean"):
            early = row.get("greedy_return") and "--no-stop-early" not in row["command"]
            steps = "" if early else f"{float(row['global_step']) / 1e3:.0f} k"
            groups[row["env_id"], row["exp_name"], steps].append(row)
    print("| environment | setting | steps | seeds | deterministic | sampled | each seed |")
    print("|---|---|---|---|---|---|---|")
    for (env_id, exp_name, steps), runs in sorted(groups.items(), key=str):
        runs.sort(key=lambda run: int(run["seed"]))
        evals = [float(run.get("greedy_return") or run["eval_mean"]) for run in runs]
        sampled = [float(run["eval_sampled_mean"]) for run in runs]
        each = ", ".join(f"{value:.0f}" for value in evals)
        if not steps:
            solved = [float(run["solved_at"] or "inf") for run in runs]
            steps = f"solved at {np.median(solved):.0f} (median), {max(solved):.0f} (last)"
        print(f"| {env_id} | {exp_name} | {steps} | {len(runs)} "
              f"| {over_seeds(evals)} | {over_seeds(sampled)} | {each} |")


def main():
    args = tyro.cli(Args, description=__doc__)
    try:
        rows = [row for source in args.sources for row in read_rows(source)]
        if not rows:
            raise UsageError(f"no finished run in {', '.join(map(str, args.sources))}")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows(rows)
    print_table(rows)


if __name__ == "__main__":
    main()
