"""How the episodes of trained walkers end: do they fall, when and to which side, at what pace?

    python benchmarks/falls.py runs/Hopper-* --csv benchmarks/results/falls.csv

Observation 1 is the torso's angle in radians, positive ahead. Hopper and Walker2d end where they
fall; HalfCheetah goes on, and has fallen if it ends upside down."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from tables import UsageError, run, write_csv

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_continuous as ppo


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders
    csv: Path  # table to write
    episodes: int = 50  # of each run, deterministic and sampled


def play(folder, greedy, episodes):
    """A row: the first episodes of as many environments."""
    agent = ppo.load_agent(folder)
    if agent.args.env_id.split("-")[0] not in ("HalfCheetah", "Hopper", "Walker2d"):
        raise UsageError(f"{folder} is of {agent.args.env_id}, which has no torso's angle")
    envs = ppo.make_envs(agent.args, episodes)
    obs, infos = ppo.reset(envs, 0)
    state, begins = torch.zeros(0, episodes, 64), torch.ones(episodes)
    playing, fell = np.ones(episodes, bool), np.zeros(episodes, bool)
    returns, lengths, angles = np.zeros((3, episodes))
    while playing.any():
        with torch.no_grad():
            inputs = torch.from_numpy(obs), state, begins, agent.read_mask(infos, episodes)
            action, *_ = agent.get_action_and_value(*inputs, greedy=greedy)
        obs, reward, terminated, truncated, infos = envs.step(agent.to_env(action))
        returns += reward * playing
        lengths += playing
        for i in np.flatnonzero((terminated | truncated) & playing):
            angles[i] = infos["final_obs"][i][1]
            fell[i] = terminated[i] or np.cos(angles[i]) < 0
        playing &= ~(terminated | truncated)
    return {
        "env_id": agent.args.env_id, "seed": agent.args.seed,
        "actions": "deterministic" if greedy else "sampled", "episodes": episodes,
        "return": returns.mean(), "length": lengths.mean(), "fell": fell.mean(),
        "return_without_fall": "" if fell.all() else returns[~fell].mean(),
        "fell_ahead": np.mean(angles[fell] > 0) if fell.any() else "",
        "reward_per_step": returns.sum() / lengths.sum(),
    }  # fmt: skip


def main():
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(1)
    rows = [play(x, greedy, args.episodes) for x in args.runs for greedy in (True, False)]
    write_csv(args.csv, rows)
    for row in rows:
        print(json.dumps(row, default=float))


if __name__ == "__main__":
    run(main)
