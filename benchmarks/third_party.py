"""Environments of other packages, and trainings in them with bare defaults.

    PYTHONPATH=benchmarks python ppo_continuous.py --env-id third_party:Grid/DoorKey-5x5-v0
    python benchmarks/third_party.py runs/third_party Grid/DoorKey-5x5-v0    three seeds
    python benchmarks/third_party.py runs --random benchmarks/results/random.csv    random actions
    python benchmarks/scores.py runs/third_party/* --csv benchmarks/results/third_party.csv

What a user writes for a package, if anything, is below; environments.md tells the versions."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from tables import read_csv, run, write_csv


def minigrid(name, **kwargs):
    """MiniGrid's image: the mission is a text, which no network here reads."""
    import minigrid  # noqa: F401, it registers MiniGrid's environments
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(gym.make(f"MiniGrid-{name}-v0", **kwargs))


def minatar(name, **kwargs):
    from minatar.gym import BaseEnv

    return BaseEnv(name, **kwargs)


class Crafter(gym.Env):
    """Crafter as it is: Gym's old reset and step. A picture has 3 pixels a cell."""

    def __init__(self):
        import crafter

        self.crafter = crafter
        self.observation_space = gym.spaces.Box(0, 255, (27, 27, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(17)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.env = self.crafter.Env(size=(27, 27), seed=seed)
        return self.env.reset(), {}

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        died = info["discount"] == 0
        return obs, reward, done and died, done and not died, {}


def metaworld(name, **kwargs):
    """A task of Meta-World's ML1, whose observations do not show the goal."""
    import metaworld

    ml1 = metaworld.ML1(name, seed=0)
    env = ml1.train_classes[name](**kwargs)
    env.tasks = ml1.train_tasks
    env.set_task(env.tasks[0])
    return env


def sample_task(env, rng):
    """The --task-sampler of ML1: one of its fifty goals."""
    env.set_task(env.tasks[rng.integers(len(env.tasks))])


for env_id, function, limit in (
    ("Grid/Empty-Random-5x5", minigrid, None),
    ("Grid/DoorKey-5x5", minigrid, None),
    ("MinAtar/asterix", minatar, None),
    ("MinAtar/breakout", minatar, None),
    ("MinAtar/freeway", minatar, None),
    ("MinAtar/seaquest", minatar, None),
    ("MinAtar/space_invaders", minatar, None),
    ("ML1/reach-v3", metaworld, 100),
    ("ML1/push-v3", metaworld, 100),
):
    name = env_id.split("/")[1]
    gym.register(f"{env_id}-v0", partial(function, name), max_episode_steps=limit)
gym.register("Crafter-v0", Crafter, max_episode_steps=10_000)

PPO = "ppo_continuous.py --total-timesteps 200000 --eval-episodes 50"
MUESLI = "muesli_cartpole.py --no-stop-early --eval-frequency 0 --eval-episodes 50"
RL2 = "rl2_meta.py --task-sampler third_party:sample_task --episode-length 100"
RL2 += " --episodes-per-trial 2 --test-trials 64 --total-timesteps 60000"
RUNS = {  # environment: commands
    "gymnasium_robotics:FetchReachDense-v4": [PPO.replace("200000", "41000")],
    "gymnasium_robotics:FetchReach-v4": [PPO.replace("200000", "41000")],
    "gymnasium_robotics:PointMaze_UMazeDense-v3": [PPO],
    "highway_env:highway-fast-v0": [
        PPO.replace("200000", "5000").replace("episodes 50", "episodes 20")
    ],
    "highway_env:parking-v0": [
        PPO.replace("200000", "41000").replace("episodes 50", "episodes 20")
    ],
    "third_party:Grid/Empty-Random-5x5-v0": [
        f"{PPO} --rnn lstm".replace("200000", "100000"),
        MUESLI,
    ],
    "third_party:Grid/DoorKey-5x5-v0": [f"{PPO} --rnn lstm".replace("200000", "100000"), MUESLI],
    **{
        f"third_party:MinAtar/{game}-v0": [PPO, f"{MUESLI} --encoder cnn --total-timesteps 20000"]
        for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
    },
    "shimmy:dm_control/cheetah-run-v0": [PPO],
    "shimmy:dm_control/walker-walk-v0": [PPO],
    "third_party:ML1/reach-v3-v0": [RL2],
    "third_party:ML1/push-v3-v0": [RL2],
    "third_party:Crafter-v0": [f"{MUESLI} --encoder cnn --total-timesteps 4000"],
}
SEEDS = (1, 2, 3)


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]  # folder of the run folders; finished ones are kept
    environments: tyro.conf.Positional[tuple[str, ...]] = ()  # parts of their names; default: all
    random: Path | None = None  # train nothing: returns of random actions, as CSV


def random_returns(env_id, episodes=50):
    """Undiscounted returns of uniformly random actions."""
    env = gym.make(env_id, disable_env_checker=True)
    env.action_space.seed(0)
    returns = []
    for episode in range(episodes):
        env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def main():
    args, here = tyro.cli(Args, description=__doc__), Path(__file__).resolve().parent
    chosen = [x for x in RUNS if not args.environments or any(y in x for y in args.environments)]
    if args.random:
        rows = read_csv(args.random) if args.random.exists() else []
        for env_id in (
            x for x in chosen if RUNS[x] != [RL2]
        ):  # whose trials are more than episodes
            x = random_returns(env_id)
            row = {"env_id": env_id, "episodes": len(x), "mean": np.mean(x), "std": np.std(x)}
            rows = [old for old in rows if old["env_id"] != env_id] + [row]
        write_csv(args.random, rows)
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    for seed in SEEDS:
        for env_id, commands in {x: RUNS[x] for x in chosen}.items():
            for command in commands:
                script, *flags = shlex.split(command)
                name = f"{env_id.split(':')[1].replace('/', '_')}-{script.split('_')[0]}-{seed}"
                if (args.runs / name / "summary.json").exists():
                    continue
                where = ["--env-id", env_id, "--seed", str(seed), "--run-dir", args.runs / name]
                if (args.runs / name / "checkpoint.pt").exists():
                    where, flags = ["--resume", args.runs / name], []
                else:
                    shutil.rmtree(args.runs / name, ignore_errors=True)  # of an interrupted run
                print(name, flush=True)
                with open(args.runs / f"{name}.log", "a") as log:
                    subprocess.run(
                        [sys.executable, here.parent / script, *flags, *where],
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        check=False,
                    )


if __name__ == "__main__":
    run(main)
