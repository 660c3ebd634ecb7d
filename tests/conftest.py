"""Settings of the tests, and what several files use: whole runs of every script, small agents of one."""

import csv
import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread in each of pytest's processes
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import probes
import pytest
import torch
from filelock import FileLock  # PyTorch needs it, too
from gymnasium.spaces import Box, Discrete

import muesli_cartpole as muesli
import ppo_atari as atari
import rl2_meta as rl2

ROOT = Path(__file__).parents[1]
# Runs of a second or two: four iterations (Muesli: forty), checkpoints in the middle and at the end.
SHORT = {
    "ppo_atari": """--total-timesteps 128 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2
        --checkpoint-every 2 --eval-episodes 1 --screen-size 36 --max-frames 200 --rnn-hidden 16
        --device cpu --precision fp32 --torch-threads 1 --env-threads 1 --no-compile""",
    "muesli_cartpole": """--total-timesteps 600 --num-envs 2 --train-frequency 8 --batch-size 4
        --hidden-size 16 --learning-starts 100 --eval-frequency 250 --checkpoint-every 20
        --eval-episodes 3""",
    "rl2_meta": """--total-timesteps 640 --num-trials 16 --rnn-hidden 16 --checkpoint-every 2
        --test-trials 50""",
}
SCRIPTS, PPO = tuple(SHORT), "ppo_atari"  # those of the former shape
BOTH = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2, "total_timesteps": 128,
        "rnn_hidden": 16, "eval_episodes": 2, "compile": False}
SMALL = {
    atari: BOTH | {"screen_size": 36, "device": "cpu", "precision": "fp32", "torch_threads": 1,
                   "env_threads": 1},
    muesli: {"num_envs": 4, "hidden_size": 32, "head_size": 16, "batch_size": 8, "seq_len": 8,
             "unroll_steps": 3, "eval_frequency": 0, "learning_starts": 100, "eval_episodes": 5},
    rl2: {"num_trials": 16, "num_minibatches": 4, "update_epochs": 2, "rnn_hidden": 16, "test_trials": 50,
          "total_timesteps": 640, "learn_regret": False, "privileged_critic": False},
}
finished_ppo = pytest.mark.parametrize("finished", [PPO], indirect=True)
both_scripts = pytest.mark.parametrize("script", [atari], ids=["atari"])

@pytest.fixture(autouse=True)
def one_thread_seed_and_squares(monkeypatch):
    """ppo_atari takes --env-id Squares, games of our own, too."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_envs = atari.make_envs
    monkeypatch.setattr(atari, "make_envs", lambda args, num_envs: (
        probes.Squares if args.env_id == "Squares" else make_envs)(args, num_envs))

# --------------------------------------------------------------------------------- whole runs of every script

def run_python(words, folder, status=0, timeout=300):
    """Start an interpreter in that folder. Returns what it printed: stdout, stderr."""
    command = [sys.executable, *shlex.split(words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr

@pytest.fixture(params=SCRIPTS)
def finished(request, tmp_path_factory):
    """A finished run, in the folder "run", of a script that was copied alone into an empty folder.
    Whichever of pytest's processes needs it first starts it for all."""
    script, base = request.param, tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, printed = shared / script, shared / f"{script}.txt"
    with FileLock(shared / f"{script}.lock"):
        if not printed.exists():
            folder.mkdir(exist_ok=True)
            shutil.copy(ROOT / f"{script}.py", folder)
            out, _ = run_python(f"{script}.py {SHORT[script]} --run-dir run", folder)
            printed.write_text(out)
    return SimpleNamespace(script=script, module=importlib.import_module(script), folder=folder,
                           out=printed.read_text())

@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of the finished run, which a test may change."""
    return shutil.copytree(finished.folder / "run", tmp_path / "run")

@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """Function that calls a script's main in tmp_path, to that exit status. Returns stdout, stderr."""
    def call_main(script, flags, status=0, run=lambda main: main()):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *shlex.split(flags)])
        capsys.readouterr()
        code = 0
        try:
            run(importlib.import_module(script).main)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        if isinstance(code, str):  # Python prints it
            code, err = 1, f"{err}{code}\n"
        assert code == status, out + err
        return out, err

    return call_main

def read_metrics(run_dir):
    """Rows of metrics.csv."""
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))

def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", "cpu", weights_only=True)

def flat(value, name=""):
    """Tensors and numbers of nested dicts and lists, by the path to them."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: x for key, item in items for path, x in flat(item, f"{name}/{key}").items()}
    return {name: value}

def flag_docs(module):
    """Trailing comment of each line of Args that is a flag."""
    return dict(re.findall(r"^    (\w+): .+? = .+?  # (.+)$", inspect.getsource(module.Args), re.MULTILINE))

# ---------------------------------------------------------------------- small agents of the two PPO scripts

def small_args(env_id=None, script=atari, **flags):
    """Flags of a run that takes a second."""
    return script.Args(env_id=env_id or script.Args.env_id, **SMALL[script] | flags)

def small_agent(env_id, script=atari, **flags):
    """Environments, agent, optimizer state and env_state of a new run, statistics not empty."""
    args = small_args(env_id, script, **flags)
    envs = script.make_envs(args, args.num_envs)
    agent, opt = script.make_agent(envs, args, script.set_up_torch(args), None)
    env_state = script.reset_envs(envs, agent, 0)
    return envs, agent, opt, env_state

def bare_agent(script=atari, space=None, **flags):
    """Agent and optimizer state for three observations, or pictures, and two or four actions."""
    space = space or Discrete(4)
    game = SimpleNamespace(get_action_set=lambda: [SimpleNamespace(name="NOOP")] * 4)
    envs = SimpleNamespace(single_action_space=space, single_observation_space=Box(-1, 1, (3,)), ale=game)
    return script.make_agent(envs, small_args(script=script, **flags), torch.device("cpu"), None)

def in_words(parameter):
    """A test's name for a script or flags."""
    return getattr(parameter, "__name__", str(parameter))

def play(envs, agent, env_state, noise=1.0):
    """A rollout: data first, episodes last."""
    script = sys.modules[type(agent).__module__]
    return script.rollout(envs, agent, getattr(agent, "act", agent), env_state, noise)

def written_out_loss(agent, mb, logprob, entropy, value, clip_coef, ent_coef, vf_coef):
    """PPO's loss in float64, and the numbers that are logged, but for the gradient norm."""
    args, logratio, unit = agent.args, logprob.double() - mb["logprobs"], agent.value_std.item()
    ratio, advantage, low, high = logratio.exp(), mb["advantages"].double(), 1 - clip_coef, 1 + clip_coef
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / advantage.std()
    inside = torch.where(advantage > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    errors = [value - mb["returns"]]
    if args.clip_vloss:
        reach = clip_coef * unit
        errors.append(value.clamp(mb["values"] - reach, mb["values"] + reach) - mb["returns"])
    value_loss = 0.5 * (torch.stack(errors).double() / unit).square().amax(0)
    outside = ((ratio > high) | (ratio < low)).double()
    parts = -inside * advantage, value_loss, entropy.double(), -logratio, ratio - 1 - logratio, outside
    means = [part.mean() for part in parts]
    return means[0] - ent_coef * means[2] + vf_coef * means[1], means

def weights(agent):
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()

def trained(run_dir, env_id=None, script=atari, **flags):
    """Agent, as its last checkpoint has it, and summary of a whole run."""
    summary = script.train(small_args(env_id, script, run_dir=str(run_dir), **flags))
    checkpoint, args = script.load_checkpoint(run_dir)
    envs = script.make_envs(args, 1)
    agent, _ = script.make_agent(envs, args, torch.device("cpu"), checkpoint)
    envs.close()
    return agent, summary

def watched_run(run_dir, env_id=None, script=atari, on_step=lambda *_: None, checkpoint=None, **flags):
    """Train without the evaluation, calling `on_step` before each optimizer step with its arguments.

    Returns the agent, all rollouts (the uncounted first included) and the losses after each step."""
    seen, rollout, train_step = SimpleNamespace(rollouts=[], losses=[]), script.rollout, script.train_step

    def watched_rollout(*args):
        seen.rollouts.append(rollout(*args))
        return seen.rollouts[-1]

    def watched_step(*args):
        seen.agent = args[0]
        on_step(*args)
        train_step(*args)
        seen.losses.append(args[-1].clone())

    with (patch.object(script, "rollout", watched_rollout), patch.object(script, "train_step", watched_step),
          patch.object(script, "evaluate", lambda *_: {"eval_mean": 0.0})):
        script.train(small_args(env_id, script, run_dir=str(run_dir), **flags), checkpoint)
    return seen

@pytest.fixture
def spy(monkeypatch):
    """Function that gives a list which gets (arguments, result) of every later call of a function."""
    def watch(owner, name):
        calls, function = [], getattr(owner, name)

        def call(*args):
            calls.append((args, function(*args)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, call)
        return calls

    return watch
