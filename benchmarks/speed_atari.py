"""Training speed of ppo_atari.py next to Stable-Baselines3's PPO, same hyper-parameters, and the emulator's.

    python benchmarks/speed_atari.py --csv benchmarks/results/speed_atari.csv

Each round measures, one after the other on an otherwise idle machine, in steps per second:
    ours        python ppo_atari.py, all cores
    torchrun    the same batch of steps, divided over two processes of one thread
    fp32        the same with --precision fp32
    sb3         Stable-Baselines3 on all cores (pip install stable-baselines3 opencv-python-headless)
    raw         ale-py's vector environment with random actions, no learning
A training's rate is the median over its iterations, rollout and learning, without the first: no compilation.
"""

import csv
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import tyro
from speed import measure_iterations, run, write

SCRIPT = Path(__file__).resolve().parent.parent / "ppo_atari.py"
NUM_ENVS, BATCH = 8, 1024  # the script's defaults, which are history's
RATIOS = (("ours", "sb3"), ("torchrun", "sb3"), ("fp32", "sb3"), ("ours", "raw"))


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"
    """game"""
    rounds: int = 3
    """times everything is measured; the last lines are medians over them"""
    total_timesteps: int = 8192
    """steps of each training, at least three iterations of 1024"""
    csv: Path | None = None
    """table to write, a row for each round"""
    worker: Literal["none", "sb3", "raw"] = "none"
    """measure only this, in this process: what each round starts"""

    def __post_init__(self):
        if self.rounds < 1 or self.total_timesteps < 3 * BATCH:
            raise ValueError(f"give at least one round, and {3 * BATCH} steps")


# --------------------------------------------------------------------------------------------------- workers
# They import what they measure themselves: the peak memory of a child counts from its parent's size.


def measure_sb3(args):
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)
    torch.set_num_threads(os.cpu_count())
    envs = VecFrameStack(make_atari_env(args.env_id, n_envs=NUM_ENVS, seed=1), 4)
    model = PPO("CnnPolicy", envs, learning_rate=2.5e-4, n_steps=BATCH // NUM_ENVS, batch_size=BATCH // 4,
                n_epochs=4, gamma=0.99, gae_lambda=0.95, clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01,
                vf_coef=0.5, max_grad_norm=0.5, device="cpu", seed=1)
    return measure_iterations(model, args.total_timesteps, BATCH)


def measure_raw(args, seconds=5.0):
    sys.path.insert(0, str(SCRIPT.parent))
    import numpy as np

    import ppo_atari

    envs = ppo_atari.make_envs(ppo_atari.Args(env_id=args.env_id), NUM_ENVS)
    envs.reset(seed=np.arange(NUM_ENVS))
    actions = np.random.default_rng(1).integers(envs.single_action_space.n, size=(1000, NUM_ENVS))
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        envs.step(actions[steps % 1000])
        steps += 1
    return steps * NUM_ENVS / (time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------ one round


def run_ours(args, *flags, processes=1):
    """Rate, seconds of the first iteration, which compiles, and peak memory of the largest process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        _, peak = run([*launcher * (processes > 1), SCRIPT, "--env-id", args.env_id, "--run-dir", run_dir,
                       "--device", "cpu", "--total-timesteps", args.total_timesteps, "--eval-episodes", 1,
                       "--max-frames", 2000, "--checkpoint-every", 1_000_000, *flags,
                       "--num-envs", NUM_ENVS // processes], Path(folder))
        with open(run_dir / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    return statistics.median(float(row["SPS"]) for row in rows[1:]), float(rows[0]["seconds"]), peak


def run_worker(name, args):
    """Rate and peak memory of a measurement of this file in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        out, peak = run([Path(__file__).resolve(), "--worker", name, "--env-id", args.env_id,
                         "--total-timesteps", args.total_timesteps], Path(folder))
    return json.loads(out.splitlines()[-1]), peak


def run_round(number, args):
    """Row of the table: all rates, one after the other."""
    ours, first, peak = run_ours(args)
    sb3, sb3_peak = run_worker("sb3", args)
    torchrun, *_ = run_ours(args, "--torch-threads", 1, "--env-threads", 1, processes=2)
    fp32, *_ = run_ours(args, "--precision", "fp32")
    raw, _ = run_worker("raw", args)
    return {"env_id": args.env_id, "round": number, "ours_sps": round(ours),
            "torchrun_sps": round(torchrun), "fp32_sps": round(fp32), "sb3_sps": round(sb3),
            "raw_sps": round(raw), "ours_first_iteration_s": round(first, 1),
            "ours_peak_mib": round(peak), "sb3_peak_mib": round(sb3_peak),
            "total_timesteps": args.total_timesteps, "torch": version("torch"),
            "sb3": version("stable-baselines3"), "ale_py": version("ale-py"), "cores": os.cpu_count()}


def ratios(row):
    return {f"{a}/{b}": row[f"{a}_sps"] / row[f"{b}_sps"] for a, b in RATIOS}


def main():
    args, rows = tyro.cli(Args, description=__doc__), []
    if args.worker != "none":
        print(json.dumps(measure_sb3(args) if args.worker == "sb3" else measure_raw(args)))
        return
    for number in range(1, args.rounds + 1):
        rows.append(run_round(number, args))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        if args.csv:
            write(args.csv, rows)
    for name in ratios(rows[0]):
        print(f"{name} {statistics.median(ratios(row)[name] for row in rows):.2f}")


if __name__ == "__main__":
    main()
