"""What each part of Muesli is worth: trainings without it, a table and a figure.

    python benchmarks/ablations.py runs/ablations --csv benchmarks/results/ablations.csv
    python benchmarks/ablations.py benchmarks/results/ablations.csv --output benchmarks/results/ablations.png

Trainings that are in the folder already are not repeated, so an interrupted series can be resumed. Learned:
the mean over all evaluations of the training, of greedy actions: how soon and how well.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure
from scores import read_run
from tables import over_seeds, read_csv, run, save_figure, write_csv

SCRIPT = Path(__file__).resolve().parent.parent / "muesli_cartpole.py"
SETTINGS = {
    "full": "",
    "no-cmpo": "--cmpo-coef 0",
    "no-policy-gradient": "--pg-coef 0",
    "no-retrace": "--no-retrace",
    "no-model-loss": "--model-coef 0",
    "no-scaled-advantages": "--no-norm-adv",
    "one-step-model": "--unroll-steps 1",
    "no-replay": "--replay-share 0",
    "replay-95": "--replay-share 0.95",
    "gradient-through-clip": "--no-detach-ratio",
    "sampled-cmpo": "--cmpo sampled",
    "faster-prior": "--tau 0.1",
}
TASKS = {
    "CartPole-v1": "--total-timesteps 30000",
    "LunarLander-v3": "--total-timesteps 150000 --eval-frequency 15000",
}

@dataclass
class Args:
    source: tyro.conf.Positional[Path]  # folder for the runs, missing ones are trained; or a table
    env_ids: tuple[str, ...] = ("CartPole-v1",)  # tasks, of those in TASKS
    settings: tuple[str, ...] = tuple(SETTINGS)  # which parts to leave out or change
    seeds: tuple[int, ...] = (1, 2, 3)  # a training each
    jobs: int = 2  # trainings at a time, of one thread each
    csv: Path | None = None  # table to write, a row per training
    output: Path | None = None  # figure to write

def train(folder, env_id, setting, seed):
    """Train or resume, unless there is a finished run. Returns its folder."""
    run_dir = folder / f"{env_id}__{setting}__{seed}"
    if not (run_dir / "summary.json").exists():
        flags = f"--env-id {env_id} --exp-name {setting} --seed {seed} --no-stop-early --run-dir {run_dir}"
        flags += f" {TASKS[env_id]} {SETTINGS[setting]}"
        if (run_dir / "checkpoint.pt").exists():
            flags = f"--resume {run_dir}"
        with open(f"{run_dir}.txt", "a") as out:
            subprocess.run([sys.executable, str(SCRIPT), *flags.split()], stdout=out, stderr=out, check=True)
    return run_dir

def read(run_dir):
    """Row of one training."""
    import torch  # slow to import, and not needed for a table
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    returns = [value for _, value in checkpoint["progress"]["evaluations"]]
    return read_run(run_dir) | {"learned": float(np.mean(returns)), "last_evaluation": returns[-1]}

def group(rows):
    """{env_id: {setting: rows}}, in the order of SETTINGS."""
    groups = {}
    for env_id in dict.fromkeys(row["env_id"] for row in rows):
        of_task = [row for row in rows if row["env_id"] == env_id]
        settings = {name: [row for row in of_task if row["exp_name"] == name] for name in SETTINGS}
        groups[env_id] = {name: runs for name, runs in settings.items() if runs}
    return groups

def show(groups):
    for env_id, settings in groups.items():
        print(f"| {env_id} | learned | each seed | last evaluation | solved at |\n|---|---|---|---|---|")
        for name, runs in settings.items():
            learned, last = ([float(row[key]) for row in runs] for key in ("learned", "last_evaluation"))
            each = ", ".join(f"{value:.0f}" for value in learned)
            solved = ", ".join(str(row["solved_at"] or "-") for row in runs)
            print(f"| {name} | {over_seeds(learned)} | {each} | {np.mean(last):.0f} | {solved} |")

def draw(groups, path):
    figure = Figure(figsize=(5.5 * len(groups), 3.6), layout="constrained")
    for i, (env_id, settings) in enumerate(groups.items(), start=1):
        axis = figure.add_subplot(1, len(groups), i)
        for y, runs in enumerate(reversed(settings.values())):
            learned = [float(row["learned"]) for row in runs]
            axis.barh(y, np.mean(learned), color="C0", alpha=0.3)
            axis.plot(learned, [y] * len(learned), "o", color="C0", ms=4)
        axis.set_yticks(range(len(settings)), [*reversed(settings)])
        axis.set_title(env_id)
        axis.grid(alpha=0.3, axis="x")
        axis.set_xlabel("mean return of all evaluations")
    save_figure(figure, path)

def main():
    args = tyro.cli(Args, description=__doc__)
    if args.source.suffix == ".csv":
        rows = read_csv(args.source, "learned")
    else:
        args.source.mkdir(parents=True, exist_ok=True)
        runs = [(args.source.resolve(), env_id, name, seed)
                for env_id in args.env_ids for seed in args.seeds for name in args.settings]
        with ThreadPoolExecutor(args.jobs) as pool:
            folders = list(pool.map(lambda run: train(*run), runs))
        rows = [read(folder) for folder in folders]
    if args.csv:
        write_csv(args.csv, rows)
    groups = group(rows)
    show(groups)
    if args.output:
        draw(groups, args.output)

if __name__ == "__main__":
    run(main)
