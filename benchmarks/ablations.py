"""What each part of an algorithm is worth: trainings without it, a table and a figure.

    python benchmarks/ablations.py details --runs runs --seeds 1 2  train what the table lacks
    python benchmarks/ablations.py details --output benchmarks/results/details.png

Each training is added to the table when it ends; those in the table are not repeated, those that
were interrupted are resumed. Effects are differences of means between a setting and the study's
first, with 95 % intervals from 10,000 bootstrap samples of both groups of seeds; over several
tasks, differences of their mean returns in percent of each task's first setting.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
import tyro
from matplotlib.figure import Figure
from scores import read_run
from tables import WIDTH, UsageError, over_seeds, read_csv, run, save_figure, write_csv

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Study:
    command: str  # script and flags of all trainings
    value: str  # column that is compared
    tasks: dict  # {env_id: flags}
    settings: dict  # {exp_name: flags}; the others are compared with the first
    digits: int = 0  # decimal places of the table


MUJOCO = dict.fromkeys(("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"), "")
STUDIES = {
    "ablations": Study(
        "muesli_cartpole.py --train-frequency 4",
        "learned",
        {"LunarLander-v3": "--total-timesteps 150000 --eval-frequency 15000 --tau 0.03"},
        {
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
        },
    ),
    "details": Study(
        "ppo_continuous.py --preset none --eval-episodes 20",
        "eval_mean",
        MUJOCO,
        {
            "default": "",
            "one environment [D1]": "--num-envs 1 --num-steps 1024",
            "rollouts of 2048 [D1]": "--num-steps 128 --num-minibatches 32",
            "no orthogonal init [D2]": "--no-ortho-init",
            "Adam's epsilon 1e-8 [D3]": "--adam-eps 1e-8",
            "constant learning rate [D4]": "--no-anneal-lr",
            "lambda 0.95 [D5]": "--gae-lambda 0.95",
            "lambda 1: no GAE [D5]": "--gae-lambda 1",
            "lambda 0: one-step TD [D5]": "--gae-lambda 0",
            "one epoch [D6]": "--update-epochs 1",
            "minibatches of 256 [D6]": "--num-minibatches 4",
            "no advantage normalization [D7]": "--no-norm-adv",
            "no ratio clipping [D8]": "--clip-coef 1000",
            "value clipping [D9]": "--clip-vloss",
            "learned std, entropy bonus 0.01 [D10]": "--learn-std --ent-coef 0.01",
            "value coefficient 1 [D10]": "--vf-coef 1",
            "no gradient clipping [D11]": "--max-grad-norm 0",
            "shared network [D13]": "--share-network",
            "learned std [D24]": "--learn-std",
            "learned std from 1 [D24]": "--learn-std --log-std-init 0",
            "constant std [D24]": "--log-std-drop 0",
            "ReLU [D26]": "--activation relu",
            "256 x 256 [D26]": "--hidden 256 256",
            "no action clipping [D27]": "--no-clip-actions",
            "raw observations [D28]": "--no-norm-obs",
            "no observation clipping [D29]": "--clip-obs 0",
            "reward scaling [D30]": "--norm-reward",
            "reward scaling for value normalization [D30]": "--norm-reward --no-norm-value",
            "the same, rewards unclipped [D31]": "--norm-reward --no-norm-value --clip-reward 0",
            "clip range annealing [X1]": "--anneal-clip",
            "no KL limit [X3]": "--target-kl None",
            "time limit terminal": "--no-truncation-bootstrap",
            "advantages once a rollout": "--no-recompute-adv",
            "no value normalization": "--no-norm-value",
        },
    ),
    "historical": Study(
        "ppo_continuous.py --preset historical --eval-episodes 20",
        "eval_mean",
        {"HalfCheetah-v5": "", "Hopper-v5": ""},
        {
            "historical": "",
            "std that falls": "--no-learn-std --log-std-init -1",
            "16 environments, 64 steps": "--num-envs 16 --num-steps 64 --num-minibatches 16",
            "KL limit": "--target-kl 0.03",
            "lambda 0.9": "--gae-lambda 0.9",
            "advantages every epoch": "--recompute-adv",
            "value normalization for reward scaling": "--norm-value --no-norm-reward",
            "no value clipping": "--no-clip-vloss",
            "bootstrap at time limits": "--truncation-bootstrap",
        },
    ),
    "additions": Study(
        "rl2_meta.py --total-timesteps 6000000",
        "eval_mean",
        {"Bandit": "--preset hundred", "TabularMDP": ""},
        {
            "all": "",
            "no table of cells": "--no-tabular",
            "critic without the task": "--no-privileged-critic",
            "drawn rewards": "--no-learn-regret",
            "memories of PyTorch's length": "--no-chrono-init",
            "constant entropy bonus": "--no-anneal-ent",  # bandit; the MDP's default
            "annealed entropy bonus": "--anneal-ent",
            "no entropy bonus": "--ent-coef 0",
            "discount 0.99": "--gamma 0.99",  # bandit; the MDP's default
            "discount 1": "--gamma 1",
            "lambda 0.3": "--gae-lambda 0.3",
            "separate networks": "--no-share-network",
        },
        digits=2,
    ),
}


@dataclass
class Args:
    study: tyro.conf.Positional[Literal[tuple(STUDIES)]]  # one of STUDIES
    runs: Path | None = None  # folder for trainings; default: only show the table
    env_ids: tuple[str, ...] = ()  # tasks to train; default: all of the study
    settings: tuple[str, ...] = ()  # settings to train; default: all of the study
    seeds: tuple[int, ...] = (1, 2, 3)  # a training each
    jobs: int = 2  # trainings at a time, of one thread each
    csv: Path | None = None  # table, a row per training; default: results/STUDY.csv
    output: Path | None = None  # figure to write


def train(study, folder, env_id, setting, seed):
    """Train, or resume an interrupted training. Returns its row."""
    name = "".join(c if c.isalnum() else "-" for c in setting)
    run_dir = folder.resolve() / f"{env_id}__{name}__{seed}"
    script, *flags = f"{study.command} {study.tasks[env_id]} {study.settings[setting]}".split()
    flags += [
        "--env-id",
        env_id,
        "--exp-name",
        setting,
        "--seed",
        str(seed),
        "--run-dir",
        str(run_dir),
    ]
    if not (run_dir / "summary.json").exists():
        if (run_dir / "checkpoint.pt").exists():
            flags = ["--resume", str(run_dir)]
        elif run_dir.exists():  # killed before its first checkpoint
            shutil.rmtree(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with open(f"{run_dir}.txt", "a") as out:
            subprocess.run(
                [sys.executable, ROOT / script, *flags], stdout=out, stderr=out, check=True
            )
    return read(study, run_dir)


def read(study, run_dir):
    """Row of one training."""
    row = read_run(run_dir)
    if study.value == "learned":  # how soon and how well: the mean of Muesli's evaluations
        import torch  # slow to import, and not needed for a table

        checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        returns = [value for _, value in checkpoint["progress"]["evaluations"]]
        row |= {"learned": float(np.mean(returns)), "last_evaluation": returns[-1]}
    return row


def group(rows, study):
    """{env_id: {setting: values of its seeds}}, in the study's order."""
    groups = {env_id: {setting: [] for setting in study.settings} for env_id in study.tasks}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        groups[row["env_id"]][row["exp_name"]].append(float(row[study.value]))
    return {
        env_id: {name: values for name, values in settings.items() if values}
        for env_id, settings in groups.items()
        if any(settings.values())
    }


def over_tasks(groups):
    """{setting: a value per seed}: percent of the first setting's mean, over tasks with all
    seeds."""
    seeds = {}  # of each setting; the first, with which all others are compared, may have more
    for settings in groups.values():
        seeds |= {name: max(len(values), seeds.get(name, 0)) for name, values in settings.items()}
    shares = []
    for settings in groups.values():
        if len(settings) > 1 and all(
            len(values) == seeds[name] for name, values in settings.items()
        ):
            base = np.mean(next(iter(settings.values())))
            shares.append(
                {name: 100 * np.array(values) / base for name, values in settings.items()}
            )
    if len(shares) < 2:
        return {}
    return {
        name: np.mean([of_task[name] for of_task in shares], 0)
        for name in shares[0]
        if all(name in of_task for of_task in shares)
    }


def effects(settings):
    """{setting: (difference of means to the first setting, low, high)}; of one seed low and high
    are NaN."""
    random = np.random.default_rng(0)
    means = {
        name: random.choice(values, (10_000, len(values))).mean(1)
        for name, values in settings.items()
    }
    (first, base), *others = settings.items()
    intervals = {name: np.percentile(means[name] - means[first], [2.5, 97.5]) for name, _ in others}
    return {
        name: (
            np.mean(values) - np.mean(base),
            *(intervals[name] if len(values) > 1 else [np.nan] * 2),
        )
        for name, values in others
    }


def show(groups, digits):
    for env_id, settings in groups.items():
        found = effects(settings)
        print(f"| {env_id} | mean | each seed | effect | 95 % |\n|---|---|---|---|---|")
        for name, values in settings.items():
            each = ", ".join(f"{value:.{digits}f}" for value in values)
            effect, low, high = found.get(name, (0, 0, 0))
            interval = f"{low:+.{digits}f} to {high:+.{digits}f}" if len(values) > 1 else "-"
            cells = f"{effect:+.{digits}f} | {interval}" if name in found else "- | -"
            print(f"| {name} | {over_seeds(values, digits)} | {each} | {cells} |")


def draw(groups, path):
    """A panel for each task: effects with intervals, sorted by their mean share of the spread of
    effects."""
    found = {env_id: effects(settings) for env_id, settings in groups.items() if len(settings) > 1}
    names = sorted(
        set().union(*found.values()),
        key=lambda name: np.mean(
            [x[name][0] / np.nanstd(list(x.values())) for x in found.values() if name in x]
        ),
    )
    figure = Figure(figsize=(WIDTH, 1 + 0.2 * len(names)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(found), sharey=True))
    for axis, (env_id, of_task) in zip(axes, found.items(), strict=True):
        for y, name in enumerate(names):
            if name in of_task:
                effect, low, high = of_task[name]
                color = "C0" if low > 0 else "C1" if high < 0 else "0.5"
                axis.plot([low, high], [y, y], color=color)
                axis.plot(effect, y, "^" if low > 0 else "v" if high < 0 else "o", color=color)
        axis.axvline(0, color="black", lw=0.8)
        first, values = next(iter(groups[env_id].items()))
        seeds = min(map(len, groups[env_id].values()))
        base = f"{first}: {np.mean(values):.0f}"
        axis.set(title=env_id, xlabel=f"change, {seeds} seeds\n{base}", yticks=range(len(names)))
        axis.set_yticklabels(names)
        axis.set_ylim(-0.6, len(names) - 0.4)
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def main():
    args = tyro.cli(Args, description=__doc__)
    study = STUDIES[args.study]
    table = args.csv or ROOT / "benchmarks" / "results" / f"{args.study}.csv"
    needed = "env_id", "exp_name", "seed", study.value
    rows = read_csv(table, *needed) if table.exists() or not args.runs else []
    done = {(row["env_id"], row["exp_name"], row["seed"]) for row in rows}
    named = {*args.env_ids, *args.settings}.union(*(key[:2] for key in done))
    if unknown := named - {*study.tasks, *study.settings}:
        raise UsageError(f"{', '.join(unknown)}: not in the study {args.study}")
    lock = Lock()

    def work(todo):
        row = train(study, args.runs, *todo)
        with lock:
            rows.append({name: str(value) for name, value in row.items()})
            write_csv(table, rows)

    if args.runs:
        todo = [
            (env_id, setting, seed)
            for seed in args.seeds
            for setting in args.settings or study.settings
            for env_id in args.env_ids or study.tasks
        ]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(work, [x for x in todo if (x[0], x[1], str(x[2])) not in done]))
    groups = group(rows, study)
    if means := over_tasks(groups):
        groups["all tasks, %"] = means
    show(groups, study.digits)
    if args.output:
        draw(groups, args.output)


if __name__ == "__main__":
    run(main)
