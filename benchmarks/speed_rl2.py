"""Steps per second of rl2_meta.py in one thread: rollouts, updates, and both.

    python benchmarks/speed_rl2.py --csv benchmarks/results/speed_rl2.csv

Medians over the rollouts after the first; nothing else should run on the machine.
"""

import csv
import io
import os
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl2_meta as rl2

SETTINGS = ("--env-id Bandit", "--env-id Bandit --update-epochs 8", "--env-id Bandit --rnn-hidden 256",
            "--env-id Bandit --episodes-per-trial 100", "--env-id TabularMDP",
            "--env-id TabularMDP --update-epochs 8", "--env-id HalfCheetahDir")


@dataclass
class Args:
    rollouts: int = 6
    """rollouts of a measurement, at least 2"""
    csv: Path | None = None
    """table to write, a row for each setting"""

    def __post_init__(self):
        if self.rollouts < 2:
            raise ValueError(f"--rollouts {self.rollouts} leaves none after the first: give 2 or more")


def measure(flags, rollouts):
    """Row of the table: steps per second of rollouts, of updates, and of both together."""
    words = shlex.split(flags)
    first, _ = tyro.cli(rl2.Args, args=words, add_help=False, return_unknown_args=True)
    preset = rl2.PRESETS.get(first.env_id, {})
    args = tyro.cli(rl2.Args, args=words, default=rl2.Args(**preset))
    steps, times, rollout = args.num_trials * args.trial_length, [], rl2.rollout
    args = replace(args, total_timesteps=(rollouts + args.norm_obs) * steps, test_trials=1)

    def timed(*inputs):
        start = time.perf_counter()
        result = rollout(*inputs)
        times.append(time.perf_counter() - start)
        return result

    silent = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(silent), redirect_stderr(silent):
        rl2.rollout = timed
        try:
            rl2.train(replace(args, run_dir=f"{folder}/run"))
        finally:
            rl2.rollout = rollout
        with open(f"{folder}/run/metrics.csv", newline="") as file:
            both = [steps / float(row["SPS"]) for row in csv.DictReader(file)]
    collects = times[-len(both) :]
    updates = [a - b for a, b in zip(both, collects, strict=True)]
    collect, update = (statistics.median(x[1:]) for x in (collects, updates))
    return {"flags": " ".join(flags.split()), "collect_sps": round(steps / collect),
            "update_sps": round(steps / update), "sps": round(steps / (collect + update)),
            "rollouts": rollouts, "torch": version("torch"), "cores": os.cpu_count()}


def main():
    args, rows = tyro.cli(Args, description=__doc__), []
    for flags in SETTINGS:
        rows.append(measure(flags, args.rollouts))
        print("{collect_sps:8} {update_sps:8} {sps:8}  {flags}".format(**rows[-1]), flush=True)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
