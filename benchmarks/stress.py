"""One easy task in many variants: do the defaults depend on units, episodes or sizes?

    python benchmarks/stress.py runs/stress --csv benchmarks/results/stress.csv

A point is to go to its goal. Each row changes one thing of the environment, nothing of the
script. A score is the mean reward per step, in units of the plain task, from 0 for random
actions to 1 for the shortest way; the environments of RL^2 have a goal that is not observed."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from tables import run, write_csv


class Point(gym.Env):
    """A point x (A,) moves by at most 0.25 a step; the reward is 1 - mean |x - goal|.

    Discrete actions stay, or move one component. `ends`: limit, termination or never."""

    def __init__(
        self,
        discrete=False,
        reward_scale=1.0,
        reward_shift=0.0,
        obs_scale=1.0,
        obs_shift=0.0,
        low=-1.0,
        high=1.0,
        length=50,
        ends="limit",
        obs_size=2,
        action_size=2,
        last_only=False,
    ):
        self.discrete, self.length, self.ends, self.last_only = discrete, length, ends, last_only
        self.reward_scale, self.reward_shift = reward_scale, reward_shift
        self.obs_scale, self.obs_shift = obs_scale, obs_shift
        self.low, self.high = np.broadcast_to(low, action_size), np.broadcast_to(high, action_size)
        self.goal = np.zeros(action_size)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_size,))
        self.action_space = (
            gym.spaces.Discrete(2 * action_size + 1)
            if discrete
            else gym.spaces.Box(self.low.astype(np.float32), self.high.astype(np.float32))
        )

    def observe(self):
        noise = self.np_random.normal(size=self.observation_space.shape[0] - len(self.x))
        obs = np.concatenate([self.x, noise]) * self.obs_scale + self.obs_shift
        return obs.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.total = 0, 0.0
        self.x = self.np_random.uniform(-1, 1, len(self.goal))
        return self.observe(), {}

    def move(self, direction):
        """One step, in [-1, 1] per component. Returns the plain reward."""
        self.t += 1
        self.x = np.clip(self.x + 0.25 * direction, -2, 2)
        return 1 - np.abs(self.x - self.goal).mean()

    def step(self, action):
        if self.discrete:
            direction = np.zeros(len(self.x))
            if action:
                direction[(action - 1) // 2] = 1 if action % 2 else -1
        else:
            direction = 2 * (action - self.low) / (self.high - self.low) - 1
        reward = self.move(direction)
        over = self.t == self.length and self.ends != "never"
        if self.last_only:
            self.total += reward
            reward = self.total if over else 0.0
        reward = reward * self.reward_scale + self.reward_shift
        terminated = over and self.ends == "termination"
        return self.observe(), reward, terminated, over and not terminated, {}


def sample_task(env, rng):
    """RL^2: a goal that only rewards tell."""
    env.goal = rng.uniform(-1, 1, len(env.goal))


gym.register("Point-v0", Point)
SCRIPTS = {
    "ppo": "ppo_continuous.py --total-timesteps 60000",
    "ppo discrete": "ppo_continuous.py --total-timesteps 60000",
    "muesli": "muesli_cartpole.py --total-timesteps 20000 --no-stop-early --eval-frequency 0 "
    "--eval-episodes 10",
    "rl2": "rl2_meta.py --total-timesteps 120000 --task-sampler stress:sample_task "
    "--episode-length 50 --episodes-per-trial 2 --test-trials 64",
}
VARIANTS = {
    "plain": {},
    **{f"rewards x {x:g}": {"reward_scale": x} for x in (1e-8, 1e-4, 1e4, 1e8)},
    **{f"rewards {x:+g}": {"reward_shift": x} for x in (-10.0, -1.0, 1.0, 10.0)},
    **{f"observations x {x:g}": {"obs_scale": x} for x in (1e-6, 1e-3, 1e3, 1e6)},
    "observations +1e4": {"obs_shift": 1e4},
    "300 observations": {"obs_size": 300},
    "1 observation, 1 action": {"obs_size": 1, "action_size": 1},
    "40 actions": {"obs_size": 40, "action_size": 40},
    "reward at the end": {"last_only": True},
    "5 steps, limit": {"length": 5},
    "5 steps, termination": {"length": 5, "ends": "termination"},
    "50 steps, termination": {"ends": "termination"},
    "1,000 steps, limit": {"length": 1000},
    "1,000 steps, termination": {"length": 1000, "ends": "termination"},
    "20,000 steps, limit": {"length": 20_000},
    "endless": {"ends": "never"},
    "bounds 1e-3": {"low": -1e-3, "high": 1e-3},
    "bounds 1e3": {"low": -1e3, "high": 1e3},
    "bounds 0 to 2": {"low": 0.0, "high": 2.0},
    "bounds 1e-3 and 1e3": {"low": [-1e-3, -1e3], "high": [1e-3, 1e3]},
}
NOT_FOR = {  # actions without bounds; episodes are RL^2's own
    "ppo discrete": ("bounds",),
    "muesli": ("bounds",),
    "rl2": ("steps", "endless", "300", "40 actions"),
}


def reference(kwargs, policy, hidden_goal, episodes=20):
    """Mean plain reward per step of a policy: random, or the shortest way to the goal."""
    env, rng, rewards = Point(**kwargs), np.random.default_rng(0), []
    for episode in range(episodes):
        env.reset(seed=episode)
        if hidden_goal:
            sample_task(env, rng)
        for _ in range(min(env.length, 1000) if env.ends != "never" else 1000):
            if policy == "random" and env.discrete:
                direction = np.zeros(len(env.x))
                action = rng.integers(2 * len(env.x) + 1)
                if action:
                    direction[(action - 1) // 2] = 1 if action % 2 else -1
            elif policy == "random":
                direction = rng.uniform(-1, 1, len(env.x))
            elif env.discrete:  # the component farthest from its goal, if a step helps
                away = env.goal - env.x
                i, direction = np.abs(away).argmax(), np.zeros(len(env.x))
                direction[i] = np.sign(away[i]) * (np.abs(away[i]) > 0.125)
            else:
                direction = np.clip((env.goal - env.x) / 0.25, -1, 1)
            rewards.append(env.move(direction))
    return float(np.mean(rewards))


def score_of(summary, script, kwargs):
    """Score between 0 (random) and 1 (the shortest way) of a deterministic evaluation."""
    env = Point(**kwargs)
    if script == "rl2":
        steps, mean = 100, summary["trial_return_greedy_mean"]
    else:
        steps, mean = (env.length if env.ends != "never" else 2**15), summary["eval_mean"]
    plain = (mean / steps - env.reward_shift) / env.reward_scale
    best, worst = (reference(kwargs, x, script == "rl2") for x in ("best", "random"))
    return (plain - worst) / (best - worst)


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]  # folder of the run folders; finished ones are kept
    csv: Path | None = None  # table to write, a row per run
    only: tuple[str, ...] = ()  # scripts; default: all
    seed: int = 1  # of the trainings


def main():
    args, here, rows = tyro.cli(Args, description=__doc__), Path(__file__).resolve().parent, []
    env = os.environ | {"PYTHONPATH": str(here)}
    args.runs.mkdir(parents=True, exist_ok=True)
    for variant, changes in VARIANTS.items():
        for name, command in SCRIPTS.items():
            if any(word in variant for word in NOT_FOR.get(name, ())):
                continue
            kwargs = changes | {"discrete": name in ("ppo discrete", "muesli")}
            run_dir = args.runs / f"{name}-{variant}-{args.seed}".replace(" ", "_")
            if not (run_dir / "summary.json").exists():
                if args.only and name not in args.only:
                    continue
                shutil.rmtree(run_dir, ignore_errors=True)  # of an interrupted run
                print(run_dir.name, flush=True)
                script, *flags = command.split()
                words = [here.parent / script, *flags, "--env-id", "stress:Point-v0"]
                words += ["--env-kwargs", json.dumps(kwargs), "--seed", str(args.seed)]
                with open(f"{run_dir}.log", "w") as log:
                    subprocess.run(
                        [sys.executable, *words, "--run-dir", run_dir],
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        check=False,
                    )
            if not (run_dir / "summary.json").exists():
                print(f"failed: see {run_dir}.log", file=sys.stderr)
            else:
                summary = json.loads((run_dir / "summary.json").read_text())
                score = score_of(summary, name, kwargs)
                rows.append({"variant": variant, "script": name, "seed": args.seed, "score": score})
    if args.csv:
        write_csv(args.csv, rows)
    for variant in VARIANTS:
        cells = {row["script"]: f"{row['score']:.2f}" for row in rows if row["variant"] == variant}
        print(f"| {variant} | " + " | ".join(cells.get(name, "") for name in SCRIPTS) + " |")


if __name__ == "__main__":
    run(main)
