"""What a step of PPO on vectors costs as the number of environments grows, and where the time goes.

    python benchmarks/growth.py --csv benchmarks/results/growth.csv
    python benchmarks/growth.py --env-ids Humanoid-v5 --num-envs 16 64 --env-threads 1 0

Each row is a training of some iterations on an otherwise idle machine, in its own process, with
a rollout of at least 1,024 steps: steps/s and milliseconds of the median iteration, divided into
simulation, acting, optimizer steps and the rest. `env_threads` -1 is Gymnasium, without EnvPool.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tyro
from tables import run, write_csv

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    env_ids: tuple[str, ...] = ("HalfCheetah-v5", "Humanoid-v5")  # tasks
    num_envs: tuple[int, ...] = (1, 4, 16, 64, 256)  # environments
    env_threads: tuple[int, ...] = (-1, 0)  # of EnvPool; 0: all cores, -1: without it
    device: str = "cpu"  # of the networks
    iterations: int = 8  # of a training; the first three are not counted
    csv: Path | None = None  # table to write


def timed(function, seconds, name):
    """The function, which adds up its seconds."""

    def call(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[name] += time.perf_counter() - start
        return result

    return call


def train(flags):
    """Milliseconds of each part of the median iteration. It runs in a process of its own."""
    sys.path.insert(0, str(ROOT))
    import ppo_continuous as ppo

    seconds, rows = dict.fromkeys(("simulation", "acting", "updates"), 0.0), []
    compile_functions, write = ppo.compile_functions, ppo.RunLog.write

    def timed_functions(*args):
        act, update = compile_functions(*args)
        return timed(act, seconds, "acting"), timed(update, seconds, "updates")

    def write_row(*args):
        rows.append({"whole": time.perf_counter(), **seconds})
        return write(*args)

    ppo.compile_functions, ppo.RunLog.write = timed_functions, write_row
    statistics_wrapper = ppo.RecordEpisodeStatistics
    statistics_wrapper.step = timed(statistics_wrapper.step, seconds, "simulation")
    ppo.torch.optim.Adam.step = timed(ppo.torch.optim.Adam.step, seconds, "updates")
    ppo.evaluate = lambda *args: {"eval_mean": 0.0}
    ppo.train(ppo.Args(**flags))
    parts = {
        name: 1e3 * statistics.median(b[name] - a[name] for a, b in pairwise(rows[2:]))
        for name in rows[0]
    }
    print(json.dumps(parts))


def measure(env_id, num_envs, threads, args, folder):
    num_steps = max(16, 1024 // num_envs)
    batch_size = num_envs * num_steps
    flags = {"env_id": env_id, "num_envs": num_envs, "num_steps": num_steps, "device": args.device}
    flags |= {"num_minibatches": batch_size // 64, "total_timesteps": args.iterations * batch_size}
    flags |= {"envpool": threads >= 0, "env_threads": max(0, threads), "run_dir": folder}
    flags |= {"checkpoint_every": 10**6, "target_kl": None}
    code = f"import sys; sys.path = {sys.path}; import growth; growth.train({flags})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    parts = json.loads(done.stdout.splitlines()[-1])
    whole = parts.pop("whole")
    parts["rest"] = whole - sum(parts.values())
    row = {"env_id": env_id, "num_envs": num_envs, "num_steps": num_steps, "env_threads": threads}
    row |= {"sps": round(1e3 * batch_size / whole)}
    row |= {f"{name}_ms": round(x, 1) for name, x in parts.items()}
    return row | {"device": args.device, "cores": os.cpu_count()}


def main():
    args, rows = tyro.cli(Args, description=__doc__), []
    for env_id in args.env_ids:
        for num_envs in args.num_envs:
            for threads in args.env_threads:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(measure(env_id, num_envs, threads, args, folder))
                print(*rows[-1].values(), flush=True)
                if args.csv:
                    write_csv(args.csv, rows)


if __name__ == "__main__":
    run(main)
