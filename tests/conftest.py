"""Paths and settings of the tests, and the way they make small agents and train them."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
for folder in (Path(__file__).parent, Path(__file__).parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pytest  # noqa: E402
import torch  # noqa: E402

import ppo_continuous as ppo  # noqa: E402

SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2, "total_timesteps": 128,
         "hidden": (16, 16), "rnn_hidden": 16, "eval_episodes": 2, "compile": False}


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def weights_that_move(monkeypatch):
    """On a GPU cuDNN moves a recurrent layer's weights to a place of its own, whenever it finds others."""

    def move(layer):
        with torch.no_grad():
            for weight in getattr(layer, "_flat_weights", []):
                weight.data = weight.data.clone()

    monkeypatch.setattr(torch.nn.RNNBase, "flatten_parameters", move)


def small_args(env_id, **flags):
    """Flags of a run that takes a second."""
    return ppo.Args(env_id=env_id, **SMALL | flags)


def small_agent(env_id, **flags):
    """Environments, agent, optimizer state and env_state of a new run, statistics not empty."""
    args = small_args(env_id, **flags)
    envs = ppo.make_envs(args, args.num_envs)
    agent, opt = ppo.make_agent(envs, args, ppo.set_up_torch(args), None)
    env_state = ppo.reset_envs(envs, agent, 0)
    agent.obs_rms.update(ppo.rollout(envs, agent, agent.act, env_state)[0]["raw_obs"])
    return envs, agent, opt, env_state


def coefs_of(args, **changes):
    """What `train_step` takes beside agent and batch: the numbers that may change from step to step."""
    names = ("learning_rate", "clip_coef", "ent_coef", "vf_coef")
    return torch.tensor([changes.get(name, getattr(args, name)) for name in names])


def load_agent(run_dir):
    """The agent of a run's checkpoint."""
    checkpoint, args = ppo.load_checkpoint(run_dir)
    envs = ppo.make_envs(args, 1)
    agent, _ = ppo.make_agent(envs, args, torch.device("cpu"), checkpoint)
    envs.close()
    return agent


def trained(run_dir, env_id, **flags):
    """Agent, as its last checkpoint has it, and summary of a whole run."""
    summary = ppo.train(small_args(env_id, run_dir=str(run_dir), **flags))
    return load_agent(run_dir), summary


def watched_run(run_dir, env_id, on_step=None, checkpoint=None, script=ppo, **flags):
    """Train without the evaluation, calling `on_step` before each optimizer step with its arguments.

    Returns the agent, the optimizer state, all rollouts (the uncounted first included) and the losses
    after each step."""
    seen = SimpleNamespace(rollouts=[], losses=[])
    make_agent, rollout, train_step = script.make_agent, script.rollout, script.train_step

    def watched_make_agent(*args):
        seen.agent, seen.opt = make_agent(*args)
        return seen.agent, seen.opt

    def watched_rollout(*args):
        seen.rollouts.append(rollout(*args))
        return seen.rollouts[-1]

    def watched_step(*args):
        if on_step:
            on_step(*args)
        train_step(*args)
        seen.losses.append(args[-1].clone())

    args = small_args(env_id, **{"run_dir": str(run_dir)} | flags)
    with (patch.object(script, "make_agent", watched_make_agent),
          patch.object(script, "rollout", watched_rollout),
          patch.object(script, "train_step", watched_step),
          patch.object(script, "evaluate", lambda *_: {"eval_mean": 0.0})):
        script.train(args, checkpoint)
    return seen
