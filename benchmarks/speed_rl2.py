"""Steps per second of rl2_meta.py in one thread: playing trials, learning from them, and both.

    python benchmarks/speed_rl2.py --csv benchmarks/results/speed_rl2.csv

Medians over the rollouts after the first; nothing else should run on the machine.
"""

import csv
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl2_meta as rl2

CHEETAH = """--rnn lstm --input-gain 1 --no-chrono-init --no-share-network --episodes-per-trial 2
             --num-trials 8 --update-epochs 10 --norm-obs --learning-rate 1e-3 --gamma 0.99 --ent-coef 0"""
SETTINGS = ("--env-id Bandit", "--env-id Bandit --update-epochs 8", "--env-id Bandit --rnn-hidden 256",
            "--env-id Bandit --episodes-per-trial 100", "--env-id TabularMDP",
            "--env-id TabularMDP --update-epochs 8", f"--env-id HalfCheetahDir {CHEETAH}")


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
    """Row of the table: steps per second of collect, of update, and of both together."""
    args = tyro.cli(rl2.Args, args=shlex.split(flags))
    device, times = rl2.set_up_torch(args), []
    tasks, agent, opt = rl2.build(args, None, device)
    rl2.restart(tasks, args.seed, 0, 0)
    stream = SimpleNamespace(discounted=torch.zeros(args.num_trials))
    hyper = {name: getattr(args, name) for name in rl2.LIVE}
    for _ in range(rollouts):
        start = time.perf_counter()
        rollout, *_ = rl2.collect(tasks, agent)
        middle = time.perf_counter()
        rl2.update(agent, opt, rollout, stream, hyper, rl2.train_step)
        times.append((middle - start, time.perf_counter() - middle))
    steps = args.num_trials * args.trial_length
    collect, update = (statistics.median(x) for x in zip(*times[1:], strict=True))
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
