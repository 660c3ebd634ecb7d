"""ppo_continuous as a user meets it: changed copies, resume, command line, run folder,
processes."""

import dataclasses
import importlib
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import probes  # registers environments
import pytest
import torch
from gymnasium.spaces import Box
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ppo_continuous as ppo

SMALL = {
    "num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2,
    "total_timesteps": 128, "rnn_hidden": 16, "eval_episodes": 2, "hidden": (16, 16),
    "compile": False,
}  # fmt: skip
FAST = {
    "num_envs": 16, "num_steps": 16, "update_epochs": 4, "learning_rate": 5e-3,
    "total_timesteps": 2048, "eval_episodes": 20,
}  # fmt: skip


class Spaces:
    """What an agent needs to know of its environments."""

    single_observation_space = Box(-1, 1, (3,))

    def __init__(self, action_space):
        self.single_action_space = action_space


def make_agent(action_space=None, **flags):
    spaces = Spaces(action_space or Box(-1, 1, (2,)))
    return ppo.Agent(spaces, ppo.Args(**SMALL | flags))


def weights(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def train(run_dir, env_id="CartPole-v1", module=ppo, checkpoint=None, **flags):
    args = module.Args(env_id=env_id, run_dir=str(run_dir), **SMALL | flags)
    summary = module.train(args, checkpoint)
    return module.load_agent(run_dir), summary


def read_events(run_dir):
    """Scalars of a run: {tag: {step: value}}."""
    events = EventAccumulator(str(run_dir), {"scalars": 0})
    events.Reload()
    return {tag: {x.step: x.value for x in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.fixture
def unevaluated(monkeypatch):
    monkeypatch.setattr(ppo, "evaluate", lambda *_: {"eval_mean": 0.0})


@pytest.fixture
def updates(monkeypatch, unevaluated):
    """What is given to compute_gradients, and what it returns, of every minibatch."""
    calls, function = [], ppo.compute_gradients

    def watched(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    monkeypatch.setattr(ppo, "compute_gradients", watched)
    return calls


def test_evaluation_changes_nothing(tmp_path):
    agent, _ = train(tmp_path / "run")
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, two = ppo.evaluate(agent), ppo.evaluate(agent)
    assert one == two and one["eval_episodes"] == 2
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())


# ------------------------------------------------------------------------------- made to be changed

SOURCE = Path(ppo.__file__).read_text()
OPTIMIZER = (
    "    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)\n"
)
LOSS = "    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # [D10]\n"
CHANGES = {
    "adamw": [
        (
            OPTIMIZER,
            """    critic = list(agent.critic.parameters())
    groups = [{"params": [*agent.actor.parameters()]}, {"params": critic, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, args.learning_rate)
""",
        )
    ],
    "auxiliary_loss": [
        (
            "        self.num_states = {",
            "        self.extra = nn.Linear(args.hidden[-1], num_inputs)\n"
            "        self.num_states = {",
        ),
        (
            LOSS,
            LOSS
            + """    hidden = agent.actor[:-1](agent.normalize(mb["obs"]))
    loss = loss + (agent.extra(hidden) - agent.normalize(mb["obs"])).square().mean()
""",
        ),
    ],
    "coefficient": [
        ("        # Rollout\n", "        args.ent_coef = 0.5 * iteration\n        # Rollout\n")
    ],
    "frozen_layer": [(OPTIMIZER, "    agent.actor[0].requires_grad_(False)\n" + OPTIMIZER)],
    "print": [(LOSS, LOSS + '    print("the loss is", loss.item())\n')],
    "early_stop": [
        (
            "                log.save(saved, progress)\n\n",
            """                log.save(saved, progress)
                if evaluate(agent)["eval_mean"] > -1e9:
                    log.save(saved, progress, "best.pt")
                    break

""",
        )
    ],
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_change(name, compiled, tmp_path, monkeypatch, capsys):
    """A usual change of a copy takes effect, and survives a resume."""
    text = SOURCE
    for old, new in CHANGES[name]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / f"changed_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, f"changed_{name}", raising=False)
    module, flags = importlib.import_module(f"changed_{name}"), {"compile": compiled}
    flags |= {"checkpoint_every": 1, "num_minibatches": 2, "total_timesteps": 192}
    torch.manual_seed(1)
    fresh = module.Agent(module.make_envs(module.Args(env_id="CartPole-v1"), 1), ppo.Args(**SMALL))
    agent, _ = train(tmp_path / "run", module=module, **flags)
    checkpoint, args = module.load_checkpoint(tmp_path / "run")
    rates = read_events(tmp_path / "run")
    if name == "adamw":
        assert list(rates["charts/learning_rate1"].values()) == pytest.approx(
            [0.01, 2e-2 / 3, 1e-2 / 3]
        )
        assert len(checkpoint["optimizer"]["param_groups"]) == 2
    elif name == "auxiliary_loss":
        assert not torch.equal(agent.extra.weight, fresh.extra.weight)
    elif name == "coefficient":
        assert args.ent_coef == 1.5
    elif name == "frozen_layer":
        assert torch.equal(agent.actor[0].weight, fresh.actor[0].weight)
        assert not torch.equal(agent.actor[2].weight, fresh.actor[2].weight)
    elif name == "print":
        assert capsys.readouterr().out.count("the loss is") == 12
    elif name == "early_stop":
        assert (tmp_path / "run" / "best.pt").exists() and checkpoint["progress"]["iteration"] == 1
    assert not torch.equal(weights(agent), weights(fresh))
    args.resume, args.total_timesteps = str(tmp_path / "run"), 256
    module.train(args, checkpoint)
    again, _ = module.load_checkpoint(tmp_path / "run")
    assert again["progress"]["iteration"] == checkpoint["progress"]["iteration"] + 1


# -------------------------------------------------------------------------------- resume, bad input

LIMIT = {"env_kwargs": '{"max_episode_steps": 20}', "checkpoint_every": 2, "total_timesteps": 256}


@pytest.mark.parametrize("flags", [{}, {"rnn": "lstm", "norm_reward": True}], ids=str)
def test_resume_is_exact(flags, tmp_path, monkeypatch):
    """Stopped after a checkpoint, it ends as the run that was not: weights, optimizer, events."""
    train(tmp_path / "whole", **LIMIT | flags)
    steps, envs_step = [], gym.vector.SyncVectorEnv.step

    def interrupted(*args):
        steps.append(1)
        if len(steps) > 40:  # in the third iteration
            raise KeyboardInterrupt
        return envs_step(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gym.vector.SyncVectorEnv, "step", interrupted)
        train(tmp_path / "run", **LIMIT | flags)
    checkpoint, args = ppo.load_checkpoint(tmp_path / "run")
    assert checkpoint["progress"]["iteration"] == 2
    args.resume = str(tmp_path / "run")
    ppo.train(args, checkpoint)
    one, two = (torch.load(tmp_path / x / "checkpoint.pt") for x in ("whole", "run"))
    assert all(torch.equal(x, two["agent"][name]) for name, x in one["agent"].items())
    for i, state in one["optimizer"]["state"].items():
        assert all(torch.equal(x, two["optimizer"]["state"][i][key]) for key, x in state.items())
    losses = [read_events(tmp_path / x)["losses/value_loss"] for x in ("whole", "run")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_environments_are_reset_only_where_an_episode_fits(
    tmp_path, monkeypatch, unevaluated, capsys
):
    keys, reset = [], ppo.reset
    monkeypatch.setattr(ppo, "reset", lambda envs, *key: keys.append(key) or reset(envs, *key))
    train(tmp_path / "a", **LIMIT)
    assert keys == [(1, 0, 1), (1, 0, 3)] and "begins new episodes" not in capsys.readouterr().out
    train(tmp_path / "b", checkpoint_every=2, total_timesteps=256)
    assert keys[2:] == [(1, 0, 1)] and "a resume begins new episodes" in capsys.readouterr().out


def run_main(monkeypatch, tmp_path, flags):
    """Exit status of the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *flags.split()])
    try:
        ppo.main()
    except SystemExit as stop:
        return stop.code
    return 0


SHORT = """--env-id CartPole-v1 --total-timesteps 128 --num-envs 2 --num-steps 16 --run-dir run
    --num-minibatches 2 --update-epochs 2 --checkpoint-every 2 --eval-episodes 3 --no-compile"""


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gamma 1.5", "gamma = 1.5 is not in range: 0 to 1"),
        ("--hidden 16 0", "hidden = (16, 0) is not in range: 1"),
        ("--env-id CartPol-v1", "Did you mean: `CartPole`"),
        ("--env-id no_such_module:Env-v0", "no_such_module"),
        ("--env-id ShownWords-v0", "is no vector"),
        ("--env-kwargs {no", "CartPole-v1 {no"),
        ("--device quantum", "device quantum: "),
        ("--preset nothing", "preset nothing is none of none, "),
        ("--resume nowhere", "'nowhere/checkpoint.pt' is no checkpoint of this script"),
        ("--num-minibatches 64", "num_minibatches 64 must divide 32 sequences"),
        ("--rnn gru --rnn-seq-len 5", "rnn_seq_len 5 must divide num_steps 16"),
        ("--total-timesteps 31", "total_timesteps: 31 more leave no rollout of 32"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, tmp_path, f"{SHORT} {flags}") == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_run_is_evaluated_again(monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, tmp_path, SHORT) == 0
    out = capsys.readouterr().out
    for path in ("run", "run/checkpoint.pt"):
        assert run_main(monkeypatch, tmp_path, f"--evaluate {path}") == 0
        assert capsys.readouterr().out in out
    assert run_main(monkeypatch, tmp_path, SHORT) == 2  # the folder is not empty
    assert "is not empty" in capsys.readouterr().err


def test_not_finite_stops_the_run(monkeypatch, tmp_path):
    """With its name; the last good checkpoint stays."""
    steps = []

    def reward(env, action):
        steps.append(1)
        return np.nan if len(steps) > 100 else 1.0  # in the fourth iteration

    monkeypatch.setattr(probes.Forever, "reward", reward)
    code = run_main(monkeypatch, tmp_path, f"{SHORT} --env-id Forever-v0")
    assert "not finite in iteration 4" in code
    checkpoint, _ = ppo.load_checkpoint(tmp_path / "run")
    assert checkpoint["progress"]["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_an_error_inside_an_environment_keeps_its_traceback(monkeypatch, tmp_path):
    def reward(env, action):
        raise OSError("a fault of the environment")

    monkeypatch.setattr(probes.Forever, "reward", reward)
    with pytest.raises(OSError, match="a fault of the environment"):
        run_main(monkeypatch, tmp_path, f"{SHORT} --env-id Forever-v0")


def test_live_changes(tmp_path, monkeypatch, unevaluated, capsys):
    """They are said, last, and come again on resume; what is not understood changes nothing."""
    read_live, texts = ppo.read_live, ["", '{"learning_rate": 0.001, "gamma": 0.9}', "{no", "[1]"]

    def write_first(args, optimizer, log, step):
        if texts and (text := texts.pop(0)):
            (log.run_dir / "live.json").write_text(text)
        return read_live(args, optimizer, log, step)

    monkeypatch.setattr(ppo, "read_live", write_first)
    train(tmp_path / "run", anneal_lr=False, total_timesteps=256)
    rates = list(read_events(tmp_path / "run")["charts/learning_rate"].values())
    assert rates == pytest.approx([3e-4, 1e-3, 1e-3, 1e-3])
    said = [line for line in capsys.readouterr().out.splitlines() if "live.json changes" in line]
    assert len(said) == 3 and "nothing" in said[1] and "nothing" in said[2]
    _, args = ppo.load_checkpoint(tmp_path / "run")
    assert args.learning_rate == 1e-3 and args.gamma == 0.99


# --------------------------------------------------------- command line, presets, processes

ROOT = Path(ppo.__file__).parent
FLAGS = dict(re.findall(r"^    (\w+): .+? = .+?  # (.+)$", SOURCE, re.MULTILINE))
README = (ROOT / "README.md").read_text()


def test_help_shows_every_flag(monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, tmp_path, "--help") == 0
    text = capsys.readouterr().out
    names = [field.name for field in dataclasses.fields(ppo.Args)]
    assert list(FLAGS)[: len(names)] == names
    for name in names:
        assert f"--{name.replace('_', '-')}" in text
        assert len(re.sub(r"\[.*?\]", "", FLAGS[name]).split()) <= 12


def test_every_detail_is_tagged():
    """In the code, and where it is a choice also in a flag's help."""
    details = {*range(1, 14), *range(23, 38)}
    in_code, in_help = ({int(x) for x in re.findall(r"\bD(\d+)", t)} for t in (SOURCE, str(FLAGS)))
    assert in_code >= details and in_help >= details - {12, 23, 25, 37}
    assert all(f"[X{i}]" in SOURCE for i in range(1, 5))


@pytest.mark.parametrize("name", ppo.PRESETS)
def test_preset_is_taken(name, monkeypatch, tmp_path):
    """By itself where it is named like the environment; flags win over it."""
    got = []
    monkeypatch.setattr(ppo, "train", lambda args, _: got.append(args))
    run_main(monkeypatch, tmp_path, f"--env-id Pendulum-v1 --preset {name} --gamma 0.9")
    expected = ppo.PRESETS[name] | {"env_id": "Pendulum-v1", "gamma": 0.9, "preset": name}
    assert got[0] == ppo.Args(**expected)
    if name not in ("none", "historical"):
        run_main(monkeypatch, tmp_path, f"--env-id {name}")
        assert got[1] == ppo.Args(env_id=name, preset=name, **ppo.PRESETS[name])


def test_historical_is_cleanrl():
    args = ppo.Args(**ppo.PRESETS["historical"])
    expected = {
        "num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10,
        "learning_rate": 3e-4, "anneal_lr": True, "adam_eps": 1e-5, "gamma": 0.99,
        "gae_lambda": 0.95, "norm_adv": True, "clip_coef": 0.2, "clip_vloss": True,
        "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None,
        "learn_std": True, "log_std_init": 0.0, "scale_actions": False, "norm_reward": True,
        "norm_value": False, "recompute_adv": False, "truncation_bootstrap": False,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


def test_code_of_the_readme_runs(monkeypatch, tmp_path):
    """An environment of one's own, and a trained agent in a program of one's own."""
    corridor, program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "corridor.py").write_text(corridor)
    flags = "--env-id corridor:Corridor-v0 --total-timesteps 2048 --no-compile"
    assert run_main(monkeypatch, tmp_path, flags) == 0
    flags = SHORT.replace("--run-dir run", "--run-dir runs/pendulum")
    assert run_main(monkeypatch, tmp_path, f"{flags} --env-id Pendulum-v1") == 0
    names = {}
    exec(program, names)
    assert names["obs"].shape == (1, 3) and names["reward"].item() < 0


def test_weights_and_biases_watches_no_folder_of_its_own(monkeypatch, tmp_path):
    told, wandb = [], types.ModuleType("wandb")
    wandb.init, wandb.__spec__ = lambda **x: told.append(x), importlib.util.find_spec("json")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_main(monkeypatch, tmp_path, f"{SHORT} --track --wandb-entity team")
    assert told[0]["sync_tensorboard"] and told[0]["entity"] == "team" and "dir" not in told[0]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_agrees_with_eager(tmp_path, unevaluated):
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        train(tmp_path / str(compiled), "Pendulum-v1", compile=compiled, total_timesteps=64)
        events = read_events(tmp_path / str(compiled))
        found.append([events[f"losses/{x}"][64] for x in ("value_loss", "entropy", "grad_norm")])
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    assert found[1] == pytest.approx(found[0], rel=0.3)  # other actions: other random numbers


RANK_PROGRAM = """
import os, sys, torch, ppo_continuous as ppo
Agent, agents = ppo.Agent, []
ppo.Agent = lambda *args: agents.append(Agent(*args)) or agents[-1]
ppo.main()
torch.save(agents[0].state_dict(), f"rank{os.environ['RANK']}.pt")
"""


def test_two_processes_train_the_same_weights(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANK_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ranks.py"]
    command = [sys.executable, *torchrun, *SHORT.split(), "--norm-reward", "--target-kl", "0.003"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / f"rank{i}.pt") for i in range(2))
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    assert one["obs_rms.count"] == 128 and done.stdout.count("sampled actions") == 1


EFFECTS = [
    {"seed": 2}, {"learning_rate": 2e-3}, {"anneal_lr": False}, {"adam_eps": 1e-3},
    {"ortho_init": False}, {"gamma": 0.9}, {"gae_lambda": 0.5}, {"recompute_adv": False},
    {"num_minibatches": 2}, {"update_epochs": 3}, {"norm_adv": False}, {"clip_coef": 0.001},
    {"anneal_clip": True, "clip_coef": 0.01}, {"clip_vloss": True, "clip_coef": 0.01},
    {"ent_coef": 0.1, "learn_std": True}, {"vf_coef": 0.1}, {"max_grad_norm": 0.0},
    {"target_kl": 1e-7}, {"norm_value": False}, {"share_network": True}, {"hidden": (16, 17)},
    {"activation": "relu"}, {"learn_std": True}, {"log_std_init": 0.0}, {"log_std_drop": 2.0},
    {"tanh_mean": True}, {"rnn": "gru"}, {"rnn": "lstm"}, {"rnn": "gru", "rnn_seq_len": 4},
    {"rnn": "gru", "rnn_reset": False}, {"scale_actions": False},
    {"norm_obs": False}, {"clip_obs": 0.5}, {"norm_reward": True},
    {"norm_reward": True, "clip_reward": 0.1}, {"truncation_bootstrap": False},
    {"env_kwargs": '{"max_episode_steps": 12, "g": 1.0}'},
]  # fmt: skip


def test_every_flag_has_an_effect_of_its_own(tmp_path, unevaluated):
    """All settings end with weights that no other ends with; the same setting with the same."""
    ends = []
    for i, flags in enumerate([{}, {}, *EFFECTS]):
        base = {"env_kwargs": '{"max_episode_steps": 12}', "target_kl": None, "learning_rate": 3e-3}
        base |= {"total_timesteps": 256}
        agent, _ = train(tmp_path / str(i), "Pendulum-v1", **base | flags)
        ends.append(weights(agent).sum().item())
    assert ends[0] == ends[1]
    same = [EFFECTS[i - 1] for i in range(2, len(ends)) if ends[i] in ends[1:i]]
    assert same == []
