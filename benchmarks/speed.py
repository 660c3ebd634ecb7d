"""Training speed in steps per second, beside Stable-Baselines3 or another version of the script.

    python benchmarks/speed.py --csv benchmarks/results/speed.csv               all settings
    python benchmarks/speed.py --settings HalfCheetah Humanoid --beside torchrun sb3 raw
    python benchmarks/speed.py --settings Breakout --against-flags="--precision fp32"
    python benchmarks/speed.py --settings Bandit CartPole --against HEAD~1  or a script's path

Each round measures, one after the other on an otherwise idle machine:
    script      python SCRIPT.py with the setting's flags
    against     the same of another file or git commit, or with other flags
    torchrun    PPO: the same batch of steps, divided over two processes of one thread
    sb3         PPO: Stable-Baselines3 with the same hyperparameters, if it is installed
    raw         PPO: environments with random actions, no learning
A training's rate is the median over the rows of its log after the first, which has the compilation;
a ratio is the script's rate over the other's in the same round.
"""

import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal

import tyro
from tables import UsageError, read_run, run, write_csv

ROOT = Path(__file__).resolve().parent.parent
BRIEF = "--checkpoint-every 1000000"  # one in each iteration of a run this short would count
MUJOCO = f"""ppo_continuous.py {BRIEF} --eval-episodes 1 --preset none --device cpu
    --total-timesteps 16384 --num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10
    --learning-rate 3e-4 --no-anneal-lr --no-clip-vloss --target-kl None --no-recompute-adv
    --no-norm-value --norm-reward --learn-std
    --log-std-init 0 --hidden 64 64 --env-id"""
SETTINGS = {
    "HalfCheetah": f"{MUJOCO} HalfCheetah-v5",
    "Humanoid": f"{MUJOCO} Humanoid-v5",
    "Breakout": f"""ppo_atari.py {BRIEF} --eval-episodes 1 --max-frames 2000 --device cpu
        --num-envs 8 --total-timesteps 8192 --env-id BreakoutNoFrameskip-v4""",
    "CartPole": f"""muesli_cartpole.py {BRIEF} --eval-episodes 1 --eval-frequency 0
        --total-timesteps 10000 --env-id CartPole-v1""",
    "Bandit": f"rl2_meta.py {BRIEF} --test-trials 1 --total-timesteps 81920 --env-id Bandit",
    "TabularMDP": f"""rl2_meta.py {BRIEF} --test-trials 1 --total-timesteps 204800
        --env-id TabularMDP""",
    "HalfCheetahDir": f"""rl2_meta.py {BRIEF} --test-trials 1 --total-timesteps 25600
        --env-id HalfCheetahDir""",
}


@dataclass
class Args:
    settings: tuple[Literal[tuple(SETTINGS)], ...] = tuple(
        SETTINGS
    )  # script and flags are in SETTINGS
    flags: str = ""  # more flags of the script, for all settings: "--device cuda"
    against: str | None = None  # file or git commit to compare with
    against_flags: str | None = None  # its flags in place of `flags`
    beside: tuple[Literal["torchrun", "sb3", "raw"], ...] = ("sb3", "raw")  # what else, for PPO
    rounds: int = 3  # times everything is measured
    csv: Path | None = None  # table to write, a row per measurement


def value_of(flag, words):
    """The last value given to a flag."""
    return dict(pairwise(words))[flag]


# ------------------------------------------------------------------------------------------ workers
# Called in processes of their own. They import what they measure: a child's peak memory counts its
# parent's.


def sb3(words):
    """Steps per second of Stable-Baselines3: the median over its iterations after the first."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    env_id, total = value_of("--env-id", words), int(value_of("--total-timesteps", words))
    flags = {
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "seed": 1,
        "device": value_of("--device", words),
    }
    if words[0] == "ppo_atari.py":
        import ale_py  # noqa: F401

        torch.set_num_threads(os.cpu_count())
        envs = VecFrameStack(make_atari_env(env_id, n_envs=8, seed=1), 4)
        model = PPO(
            "CnnPolicy",
            envs,
            learning_rate=2.5e-4,
            n_steps=128,
            batch_size=256,
            n_epochs=4,
            clip_range=0.1,
            clip_range_vf=0.1,
            ent_coef=0.01,
            **flags,
        )
    else:
        torch.set_num_threads(1)
        envs = VecNormalize(make_vec_env(env_id, n_envs=8, seed=1))
        net = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
        model = PPO(
            "MlpPolicy",
            envs,
            learning_rate=3e-4,
            n_steps=256,
            batch_size=64,
            n_epochs=10,
            clip_range=0.2,
            ent_coef=0,
            policy_kwargs=net,
            **flags,
        )
    collect, times, batch = model.collect_rollouts, [], 8 * model.n_steps

    def timed(*args, **kwargs):
        times.append(time.perf_counter())
        return collect(*args, **kwargs)

    model.collect_rollouts = timed  # called at the start of each iteration
    model.learn(total // batch * batch)
    times.append(time.perf_counter())
    return batch / statistics.median(end - start for start, end in pairwise(times[1:]))


def raw(words, seconds=3.0):
    """Steps per second of random actions: in one environment, or in as many games as are trained
    in."""
    import gymnasium

    env_id = value_of("--env-id", words)
    if words[0] == "ppo_atari.py":
        sys.path.append(str(ROOT))
        import ppo_atari

        env = ppo_atari.make_envs(ppo_atari.Args(env_id=env_id), int(value_of("--num-envs", words)))
    else:
        env = gymnasium.wrappers.Autoreset(gymnasium.make(env_id))
    env.reset()
    actions = [
        env.action_space.sample() for _ in range(1000)
    ]  # drawn before: only stepping is timed
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        env.step(actions[steps % 1000])
        steps += 1
    return steps * getattr(env, "num_envs", 1) / (time.perf_counter() - start)


# ---------------------------------------------------------------------------------------- one round


def run_python(words, folder):
    """Run to the end. Returns its standard output, and the peak memory of its largest process in
    MiB."""
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=err, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UsageError(f"{' '.join(words)} failed:\n{(folder / 'err').read_text()}")
    return (folder / "out").read_text(), usage.ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def find_script(source, name, folder):
    """The file of that path, or the script as it was in that git commit."""
    if Path(source).is_file():
        return Path(source).resolve()
    old = subprocess.run(["git", "-C", str(ROOT), "show", f"{source}:{name}"], capture_output=True)
    if old.returncode:
        raise UsageError(f"--against {source} is no file, and no git commit that has {name}")
    (folder / name).write_bytes(old.stdout)
    return folder / name


def measure(name, setting, args, folder):
    """Rate, seconds from the start to the first row of its log, and peak memory."""
    words = shlex.split(SETTINGS[setting] + " " + args.flags)
    script, flags, launcher = ROOT / words[0], words[1:], []
    if name in ("sb3", "raw"):
        code = f"import sys; sys.path = {sys.path}; import speed; print(speed.{name}({words}))"
        out, peak = run_python(["-c", code], folder)
        return float(out.splitlines()[-1]), math.nan, peak
    if name == "against":
        script = find_script(args.against, words[0], folder) if args.against else script
        if args.against_flags is not None:
            flags = shlex.split(SETTINGS[setting] + " " + args.against_flags)[1:]
    if name == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        flags += ["--num-envs", "4", "--torch-threads", "1"]
        flags += ["--env-threads", "1"] * (words[0] == "ppo_atari.py")
    start = time.time()
    _, peak = run_python([*launcher, str(script), *flags, "--run-dir", "run"], folder)
    rows = read_run(folder / "run")
    logs = [
        path for path in (folder / "run").iterdir() if path.name.startswith(("metrics", "checkp"))
    ]
    after_first = float(rows[-1]["seconds"]) - float(rows[0]["seconds"])
    startup = min(path.stat().st_mtime for path in logs) - after_first - start
    return statistics.median(float(row["SPS"]) for row in rows[1:]), startup, peak


def measure_round(number, setting, args):
    """Rows of the table: all that is measured for a setting, one after the other."""
    names = ["script"]
    if args.against or args.against_flags is not None:
        names.append("against")
    if SETTINGS[setting].startswith("ppo"):
        names += [name for name in args.beside if name != "sb3" or find_spec("stable_baselines3")]
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rate, startup, peak = measure(name, setting, args, Path(folder))
        ratio = rows[0]["sps"] / rate if rows else 1.0
        rows.append(
            {
                "setting": setting,
                "round": number,
                "measured": name,
                "sps": round(rate),
                "ratio": round(ratio, 3),
                "startup_s": round(startup, 1),
                "peak_mib": round(peak),
                "command": " ".join(shlex.split(SETTINGS[setting] + " " + args.flags)),
                "against": args.against,
                "against_flags": args.against_flags,
                "sb3": version("stable-baselines3") if name == "sb3" else "",
                "torch": version("torch"),
                "cores": os.cpu_count(),
            }
        )
        print(
            f"{setting}, round {number}, {name}: {rate:.0f} steps/s, ratio {ratio:.2f}", flush=True
        )
    return rows


def print_medians(rows):
    print("| setting | measured | steps/s | ratio | start-up, s | memory, MiB |")
    print("|---|---|---|---|---|---|")
    for setting, name in dict.fromkeys((row["setting"], row["measured"]) for row in rows):
        same = [row for row in rows if (row["setting"], row["measured"]) == (setting, name)]
        columns = ("sps", "ratio", "startup_s", "peak_mib")
        sps, ratio, startup, peak = (
            statistics.median(row[column] for row in same) for column in columns
        )
        print(f"| {setting} | {name} | {sps:.0f} | {ratio:.2f} | {startup:.1f} | {peak:.0f} |")


def main():
    args, rows = tyro.cli(Args, description=__doc__), []
    for number in range(1, args.rounds + 1):
        for setting in args.settings:
            rows += measure_round(number, setting, args)
            if args.csv:  # after each setting: an interrupted measurement is not lost
                write_csv(args.csv, rows)
    print_medians(rows)


if __name__ == "__main__":
    run(main)
