"""Training speed next to Stable-Baselines3's PPO, same hyper-parameters, and next to the bare environment.

    python benchmarks/speed.py --csv benchmarks/results/speed.csv

Each round measures, one after the other on an otherwise idle machine, in steps per second:
    ours        python ppo_continuous.py
    torchrun    the same batch of steps, divided over --processes processes
    sb3         Stable-Baselines3 (pip install stable-baselines3)
    raw         gymnasium.make(env_id) with random actions: one environment, no learning
A training's rate is the median over its iterations, rollout and learning, without the first: no compilation.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Literal

import tyro

SCRIPT = Path(__file__).resolve().parent.parent / "ppo_continuous.py"
NUM_ENVS, NUM_STEPS, MINIBATCHES = 8, 256, 32
BATCH = NUM_ENVS * NUM_STEPS
OURS = f"""
    --preset none --num-steps {NUM_STEPS} --num-minibatches {MINIBATCHES}
    --update-epochs 10 --learning-rate 3e-4
    --no-anneal-lr --gamma 0.99 --gae-lambda 0.95 --clip-coef 0.2 --no-clip-vloss --ent-coef 0 --vf-coef 0.5
    --max-grad-norm 0.5 --target-kl None --no-recompute-adv --no-norm-value --norm-obs --norm-reward
    --hidden 64 64 --activation tanh --learn-std --log-std-init 0 --device cpu
    --eval-episodes 1 --checkpoint-every 1000000
""".split()  # no checkpoints: in a run this short there would be one in every iteration, and SB3 writes none
RATES = ("ours", "torchrun", "sb3", "raw")
RATIOS = (("ours", "sb3"), ("torchrun", "sb3"), ("ours", "raw"))


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


@dataclass
class Args:
    env_ids: tuple[str, ...] = ("HalfCheetah-v5", "Humanoid-v5")
    """environments to measure with"""
    rounds: int = 3
    """times everything is measured; the last lines are medians over them"""
    total_timesteps: int = 40_960
    """steps of each training, at least three iterations of 2048"""
    processes: int = 2
    """processes of torchrun, a divisor of 8"""
    sb3_threads: int = 1
    """threads of PyTorch for SB3; 0: PyTorch's own choice"""
    csv: Path | None = None
    """table to write, a row for each round and environment"""
    worker: Literal["none", "sb3", "raw"] = "none"
    """measure only this, in this process, with the first environment: what each round starts"""

    def __post_init__(self):
        if self.total_timesteps < 3 * BATCH:
            raise UsageError(f"--total-timesteps {self.total_timesteps} is below 3 iterations, {3 * BATCH}")
        if self.rounds < 1 or not self.env_ids:
            raise UsageError("give at least one round and one environment")
        if self.processes < 1 or NUM_ENVS % self.processes:
            raise UsageError(f"--processes {self.processes} does not divide the {NUM_ENVS} environments")
        try:
            version("stable-baselines3")
        except PackageNotFoundError as error:
            raise UsageError("Stable-Baselines3 is missing: pip install stable-baselines3") from error


# --------------------------------------------------------------------------------------------------- workers
# They import what they measure themselves: the peak memory of a child counts from its parent's size.


def measure_iterations(model, total_timesteps, batch):
    """Steps per second of an SB3 model's training: the median over its iterations after the first."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Time of every rollout's start, so that a difference is a whole iteration."""

        def __init__(self):
            super().__init__()
            self.times = []

        def _on_rollout_start(self):
            self.times.append(time.perf_counter())

        def _on_training_end(self):
            self._on_rollout_start()

        def _on_step(self):
            return True

    clock = Clock()
    model.learn(total_timesteps // batch * batch, callback=clock)
    return batch / statistics.median(end - start for start, end in pairwise(clock.times[1:]))


def measure_sb3(env_id, args):
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    if args.sb3_threads:
        torch.set_num_threads(args.sb3_threads)
    envs = make_vec_env(env_id, n_envs=NUM_ENVS, seed=1)  # a DummyVecEnv
    envs = VecNormalize(envs, norm_obs=True, norm_reward=True, clip_obs=10, clip_reward=10)
    net = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
    model = PPO("MlpPolicy", envs, learning_rate=3e-4, n_steps=NUM_STEPS, batch_size=BATCH // MINIBATCHES,
                n_epochs=10, gamma=0.99, gae_lambda=0.95, clip_range=0.2, clip_range_vf=None, ent_coef=0,
                vf_coef=0.5, max_grad_norm=0.5, target_kl=None, policy_kwargs=net, device="cpu", seed=1)
    return measure_iterations(model, args.total_timesteps, BATCH)


def measure_raw(env_id, seconds=3.0):
    import gymnasium

    env = gymnasium.make(env_id)
    env.reset(seed=1)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(1000)]  # drawn before: only stepping is timed
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        steps += len(actions)
    return steps / (time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------ one round


def run(command, folder, **environment):
    """Run to the end in `folder`; standard output and the peak memory of its largest process in MiB."""
    out, err = folder / "stdout", folder / "stderr"
    with open(out, "w") as stdout, open(err, "w") as stderr:
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=stdout, stderr=stderr,
                                   cwd=folder, env=os.environ | environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{err.read_text()}\nerror: {' '.join(map(str, command))} ended with {process.returncode}")
    return out.read_text(), usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def run_ours(env_id, args, processes=1):
    """Rate, seconds from the start to the first iteration's end, its metrics.csv seconds, and peak memory."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir, start = Path(folder) / "run", time.time()
        command = [*launcher * (processes > 1), SCRIPT, "--env-id", env_id, "--run-dir", run_dir,
                   "--total-timesteps", args.total_timesteps, "--num-envs", NUM_ENVS // processes, *OURS]
        _, peak = run(command, Path(folder), OMP_NUM_THREADS="1")
        with open(run_dir / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        written = (run_dir / "metrics.csv").stat().st_mtime  # the moment of the last row
    rate = statistics.median(float(row["SPS"]) for row in rows[1:])  # the first compiles
    first, last = (float(rows[i]["seconds"]) for i in (0, -1))
    return rate, written - (last - first) - start, first, peak


def run_worker(name, env_id, args):
    """Rate and peak memory of a measurement of this file in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        out, peak = run([Path(__file__).resolve(), "--worker", name, "--env-ids", env_id, "--total-timesteps",
                         args.total_timesteps, "--sb3-threads", args.sb3_threads], Path(folder))
    return json.loads(out.splitlines()[-1]), peak


def run_round(env_id, number, args):
    """Row of the table: all rates, one after the other."""
    ours, startup, first, peak = run_ours(env_id, args)
    sb3, sb3_peak = run_worker("sb3", env_id, args)
    raw, _ = run_worker("raw", env_id, args)
    torchrun, *_ = run_ours(env_id, args, args.processes)
    return {"env_id": env_id, "round": number, "ours_sps": round(ours),
            "torchrun_sps": round(torchrun), "sb3_sps": round(sb3), "raw_sps": round(raw),
            "ours_startup_s": round(startup, 1), "ours_first_iteration_s": round(first, 1),
            "ours_peak_mib": round(peak), "sb3_peak_mib": round(sb3_peak),
            "total_timesteps": args.total_timesteps, "processes": args.processes,
            "sb3_threads": args.sb3_threads, "torch": version("torch"), "sb3": version("stable-baselines3"),
            "gymnasium": version("gymnasium"), "cores": os.cpu_count()}


def ratios(row):
    return {f"{a}/{b}": row[f"{a}_sps"] / row[f"{b}_sps"] for a, b in RATIOS}


def show(row):
    print(f"{row['env_id']}, round {row['round']}")
    print("  steps/s   " + "   ".join(f"{name} {row[name + '_sps']}" for name in RATES))
    print("  ratios    " + "   ".join(f"{name} {value:.2f}" for name, value in ratios(row).items()))
    print(f"  ours      {row['ours_startup_s']} s from the start to the first iteration's end, of them "
          f"{row['ours_first_iteration_s']} s in metrics.csv\n"
          f"  memory    ours {row['ours_peak_mib']} MiB   sb3 {row['sb3_peak_mib']} MiB", flush=True)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def measure(args):
    """All rounds; the table is written after each row, so that an interrupted measurement is not lost."""
    rows = []
    for number in range(1, args.rounds + 1):
        for env_id in args.env_ids:
            rows.append(run_round(env_id, number, args))
            show(rows[-1])
            if args.csv:
                write(args.csv, rows)
    for env_id in args.env_ids:
        mine = [ratios(row) for row in rows if row["env_id"] == env_id]
        medians = {name: statistics.median(row[name] for row in mine) for name in mine[0]}
        print(f"{env_id}, median of {args.rounds} round(s)")
        print("  ratios    " + "   ".join(f"{name} {value:.2f}" for name, value in medians.items()))


def main():
    try:
        args = tyro.cli(Args, description=__doc__)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if args.worker == "none":
        measure(args)
    else:
        env_id = args.env_ids[0]
        print(json.dumps(measure_sb3(env_id, args) if args.worker == "sb3" else measure_raw(env_id)))


if __name__ == "__main__":
    main()
