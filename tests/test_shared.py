"""What the scripts have in common is the same in each: functions, help of flags, packages."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from itertools import combinations

import pytest
import torch
from conftest import ROOT, SCRIPTS, SHORT, check_orthogonal, flag_docs
from packaging.requirements import Requirement  # pytest needs it, too
from torch import nn

# Every script has its own.
OWN = {"Agent", "Args", "make_env", "make_envs", "time_limit", "train"}
OWN_OF = {
    # One process, evaluations while training, no compiler.
    "muesli_cartpole": {"RunningMeanStd", "evaluate", "main"},
    # Advantages and losses of trials, a preset for samplers, no compiler.
    "rl2_meta": {"compute_gae", "compute_gradients", "evaluate", "parse_args", "mean_over_ranks"},
}
# Flags that mean something else in one script than in the others.
OWN_FLAGS = {
    "ppo_continuous": set(),
    "ppo_atari": {"device", "env_id"},
    "muesli_cartpole": {"learning_rate", "norm_adv", "num_envs", "torch_threads"}
    | {"total_timesteps"},
    "rl2_meta": {"capture_video", "ent_coef", "env_id", "gae_lambda", "gamma", "learning_rate"}
    | {"clip_obs", "norm_obs", "num_minibatches"},
}
PAIRS = list(combinations(SCRIPTS, 2))


def definitions(script):
    """Source of the functions and classes of a script."""
    module = importlib.import_module(script)
    return {
        name: inspect.getsource(x)
        for name, x in vars(module).items()
        if inspect.isroutine(x) | inspect.isclass(x) and x.__module__ == script
    }


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_functions_classes_and_help_are_the_same(one, two):
    """But for the tags of a flag's sources."""
    sources = definitions(one), definitions(two)
    own = OWN | OWN_OF.get(one, set()) | OWN_OF.get(two, set())
    shared = (sources[0].keys() & sources[1].keys()) - own
    assert len(shared) > 6
    for name in shared:
        assert sources[0][name] == sources[1][name], name
    docs = [
        {name: re.sub(r"\s*\[[DX0-9, ]+\]", "", doc) for name, doc in flag_docs(script).items()}
        for script in (one, two)
    ]
    for name in (docs[0].keys() & docs[1].keys()) - OWN_FLAGS[one] - OWN_FLAGS[two]:
        assert docs[0][name] == docs[1][name], name


def packages(lines):
    """Versions and extras of each package."""
    found = defaultdict(set)
    for package in map(Requirement, lines):
        found[package.name] |= {str(package.specifier), *package.extras}
    return found


def test_scripts_and_requirements_name_the_same_packages():
    """And moviepy, which only --capture-video needs."""
    block = r'# /// script\n# requires-python = ">=3.10"\n# dependencies = (\[(?:.+\n)+?)# ///\n'
    lines = []
    for script in SCRIPTS:
        found = re.match(block, (ROOT / f"{script}.py").read_text())[1]
        lines += ast.literal_eval(found.replace("#", ""))
    text = (ROOT / "requirements.txt").read_text().split("# tests")[0]
    required = packages(line for line in text.splitlines() if line[0] != "#")
    del required["moviepy"]
    assert packages(lines) == required


# --------------------------------------------------------------- what the agents of PPO do alike

INVADERS = "--env-id SpaceInvaders --num-steps 100 --total-timesteps 800 --max-frames 400"


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("ppo_continuous", "--env-id Pendulum-v1 --learn-std"),
        ("ppo_continuous", "--env-id probes:Masked-v0 --no-norm-value"),
        ("ppo_continuous", "--rnn gru"),
        ("ppo_continuous", "--rnn lstm --rnn-seq-len 4"),
        ("ppo_continuous", "--rnn gru --rnn-seq-len 8 --no-rnn-reset"),
        ("ppo_atari", INVADERS),
        ("ppo_atari", "--rnn lstm --num-minibatches 1"),
        ("ppo_atari", "--rnn gru --rnn-seq-len 4"),
        ("rl2_meta", ""),
        ("rl2_meta", "--no-norm-value --rnn lstm"),
    ],
)
def test_first_minibatch_has_the_rollouts_policy_and_values(
    script, flags, main, tmp_path, monkeypatch
):
    """Ratios of 1, and the same values in the critic's new unit, in each of four iterations.

    The unit is the std of all returns. With debias_value they have no mean error
    above the std of returns."""
    module, seen = importlib.import_module(script), []
    gradients = module.compute_gradients

    def watched(agent, params, batch, *rest):
        losses, index = gradients(agent, params, batch, *rest), rest[-2]
        error = (batch["values"] - batch["returns"])[:, index].square().mean() / 2
        unit = agent.return_rms.scale if hasattr(agent, "return_rms") else torch.ones(())
        returns = batch["returns"] * unit
        bias = ((batch["values"] - batch["returns"]).mean() / batch["returns"].std()).abs()
        seen.append((losses, error, bias, returns, unit.item()))
        return losses

    monkeypatch.setattr(module, "compute_gradients", watched)
    flags = f"{flags} --update-epochs 2 --learning-rate 0.01 --clip-coef 0.001 --target-kl 100"
    main(script, f"{SHORT[script]} {flags} --run-dir run")
    args = module.load_checkpoint(tmp_path / "run")[1]
    steps = 2 * args.num_minibatches
    if script == "ppo_continuous":
        biases = [bias.item() for *_, bias, _, _ in seen[::steps]]
        # It begins with an error above the std, which is corrected; smaller ones are not.
        assert biases[0] < 1e-5 and 1e-3 < max(biases) <= 1
    for losses, error, *_ in seen[::steps]:
        assert abs(losses["old_approx_kl"]) < 1e-6 and losses["clipfrac"] == 0
        torch.testing.assert_close(losses["value_loss"], error, rtol=1e-3, atol=1e-6)
    assert all(losses["clipfrac"] > 0 for losses, *_ in seen[steps - 1 :: steps])
    units = [unit for *_, unit in seen[::steps]]
    norm_value = getattr(args, "norm_value", False)
    assert len(units) == 4 and len(set(units)) == (4 if norm_value else 1)
    x = torch.cat([returns for *_, returns, _ in seen[::steps]], 1).double()
    expected = (x.var(correction=0) + 1e-4 * x.mean() ** 2).sqrt() if norm_value else 1
    assert units[-1] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("ppo_continuous", {}),
        ("ppo_continuous", {"share_network": True, "norm_value": False}),
        ("ppo_continuous", {"rnn": "gru"}),
        ("ppo_continuous", {"rnn": "lstm"}),
        ("ppo_atari", {"screen_size": 36}),
        ("ppo_atari", {"screen_size": 36, "rnn": "gru"}),
        ("rl2_meta", {}),
        ("rl2_meta", {"share_network": False, "norm_value": False}),
    ],
    ids=str,
)
def test_initial_weights_are_orthogonal(script, flags):
    """With gain sqrt 2; 0.01 for actions and 1 for values, which begin at 0 with norm_value."""
    module = importlib.import_module(script)
    args = module.Args(**flags)
    agent = module.Agent(module.make_envs(args, 1), args)
    layers = [x for x in agent.modules() if isinstance(x, nn.Linear | nn.Conv2d)]
    heads = {
        [*agent.actor.modules()][-1]: 0.01,
        agent.critic[-1]: 1.0 - getattr(args, "norm_value", 0),
    }
    assert len(layers) > 2
    for layer in layers:
        check_orthogonal(layer.weight.detach(), heads.get(layer, 2**0.5))
        assert not layer.bias.any()
    if script != "rl2_meta":  # whose gates have a test of their own
        for name, x in agent.named_parameters():
            if name.startswith("rnn.weight"):
                check_orthogonal(x.detach(), 1.0)
            assert not name.startswith("rnn.bias") or not x.any()
    args = module.Args(**flags | {"ortho_init": False})
    plain = module.Agent(module.make_envs(args, 1), args)
    assert [*plain.actor.modules()][-1].bias.any()
