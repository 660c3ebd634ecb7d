"""A short run of each script: what it leaves, its evaluation, its extension."""

import json
import math
import random
import re

import numpy as np
import pytest
import torch
from conftest import flat, load, read_events

pytestmark = pytest.mark.smoke

PPO_LOSSES = [
    "explained_variance", "epochs", "policy_loss", "value_loss", "entropy", "old_approx_kl",
    "approx_kl", "clipfrac", "grad_norm",
]  # fmt: skip
MUESLI_LOSSES = [
    "policy_loss", "cmpo_loss", "model_loss", "value_loss", "reward_loss", "entropy",
    "kl_to_prior", "clipped_targets", "grad_norm",
]  # fmt: skip
SUMMARY = [
    "env_id", "seed", "global_step", "seconds", "sps", "eval_episodes", "eval_mean", "eval_std",
    "eval_sampled_mean", "eval_sampled_std",
]  # fmt: skip
MORE = {
    "muesli_cartpole": ["solved_at"],
    "rl2_meta": ["trial_return_mean", "trial_return_se", "trial_return_greedy_mean"],
}
MORE_CHARTS = {"muesli_cartpole": ["greedy_return"]}


def read_summary(run_dir):
    """Of numbers, as NaN is no JSON."""
    return json.loads((run_dir / "summary.json").read_text(), parse_constant=pytest.fail)


def test_folder_of_a_run(finished):
    """It is written into the current folder alone and says what was run."""
    here = {path.name for path in finished.folder.iterdir()} - {"__pycache__"}
    assert here == {f"{finished.script}.py", "run"}
    names = {path.name.split(".1")[0] for path in (finished.folder / "run").iterdir()}
    assert names == {"args.json", "checkpoint.pt", "summary.json", "events.out.tfevents"}
    args = json.loads((finished.folder / "run" / "args.json").read_text())
    assert args["script"] == finished.script
    assert re.fullmatch("[0-9a-f]{40}|None|", str(args["git_commit"]))
    assert args["torch"] == torch.__version__ and args["numpy"] and args["gymnasium"]
    assert [args[name] for name in ("preset", "run_dir", "seed")] == [args["preset"], "run", 1]
    header = f"{args['env_id']}, seed 1, preset {args['preset']}, cpu, in run\n"
    assert header in finished.out


def test_events(finished):
    """Finite, at the ends of iterations; the last is the evaluation."""
    events = read_events(finished.folder / "run")
    losses = MUESLI_LOSSES if "muesli" in finished.script else PPO_LOSSES
    charts = ["episodic_return", "episodic_length", "learning_rate", "SPS"]
    tags = [f"charts/{x}" for x in charts + MORE_CHARTS.get(finished.script, [])]
    tags += [f"losses/{x}" for x in losses]
    assert {*events} >= {*tags, "eval/episodic_return"}
    steps = list(events["charts/SPS"])
    assert steps == sorted(steps) and len(steps) > 1
    assert all(math.isfinite(x) for values in events.values() for x in values.values())
    assert list(events["losses/grad_norm"].values())[-1] > 0
    summary = read_summary(finished.folder / "run")
    evaluated = events["eval/episodic_return"]
    assert evaluated == {summary["global_step"]: pytest.approx(summary["eval_mean"])}


def test_checkpoint_and_summary(finished):
    checkpoint, summary = load(finished.folder / "run"), read_summary(finished.folder / "run")
    total = checkpoint["args"]["total_timesteps"]
    assert total <= summary["global_step"] == checkpoint["progress"]["global_step"] < total + 16
    tensors = [x for x in flat(checkpoint).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 10 and all(x.isfinite().all() for x in tensors)
    assert {*summary} >= {*SUMMARY, *MORE.get(finished.script, [])}
    assert summary["env_id"] == checkpoint["args"]["env_id"] and summary["seed"] == 1
    assert summary["seconds"] > 0 and summary["sps"] > 0


def test_evaluate_repeats_the_evaluation(finished, run_dir, main):
    """The same lines, also of a checkpoint file; nothing is written."""
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    for path in ("run", "run/checkpoint.pt"):
        out, _ = main(finished.script, f"--evaluate {path}")
        again = f"evaluate again: python {finished.script}.py --evaluate run\n"
        assert out and finished.out.endswith(out + again)
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_evaluation_repeats_and_changes_nothing(finished):
    """Neither the agent nor what a training would draw next; no module is in training mode."""
    agent = finished.module.load_agent(finished.folder / "run")
    assert not agent.training
    agent.train()
    modules, training = list(agent.modules()), []
    modules[-1].eval()  # of a copy: frozen
    for module in modules:
        module.register_forward_pre_hook(lambda module, _: training.append(module.training))
    before = {name: x.clone() for name, x in agent.state_dict().items()}

    def generators():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    states = generators()
    one, two = finished.module.evaluate(agent), finished.module.evaluate(agent)
    assert one == two == {name: read_summary(finished.folder / "run")[name] for name in one}
    assert generators() == states
    torch.testing.assert_close(agent.state_dict(), before, rtol=0, atol=0)
    assert training and not any(training) and torch.is_grad_enabled()
    assert [x.training for x in modules] == [True] * (len(modules) - 1) + [False]


def test_agent_loads_into_a_program(finished):
    """load_agent: the trained weights and the run's flags, on the CPU."""
    agent = finished.module.load_agent(finished.folder / "run")
    saved = load(finished.folder / "run")
    assert all(torch.equal(x, saved["agent"][name]) for name, x in agent.state_dict().items())
    assert agent.args.total_timesteps == saved["args"]["total_timesteps"]
