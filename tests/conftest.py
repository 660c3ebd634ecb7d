"""Paths and settings of the tests, and the way they make small agents and train them."""

import os
import sys
from pathlib import Path

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
    """Environments, agent, optimiser state and stream of a run that has just begun, statistics not empty."""
    args = small_args(env_id, **flags)
    envs, agent, opt = ppo.build(args, None, args.num_envs, ppo.set_up_torch(args))
    stream = ppo.restart(envs, agent, 0, 0)
    agent.obs_rms.update(ppo.collect(envs, agent, agent.act, stream)[1])
    return envs, agent, opt, stream


def hyper_of(args, **changes):
    """What `update` takes beside the agent: the flags that may change while it runs."""
    return {name: getattr(args, name) for name in ppo.LIVE} | changes


def trained(run_dir, env_id, **flags):
    """Agent, as its last checkpoint has it, and summary of a whole run."""
    args = small_args(env_id, run_dir=str(run_dir), **flags)
    summary = ppo.train(args)
    envs, agent, _ = ppo.build(args, ppo.load_checkpoint(run_dir), 1, torch.device("cpu"))
    envs.close()
    return agent, summary
