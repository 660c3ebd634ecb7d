"""A short run of each script: what it leaves, its evaluation, its extension."""

import json
import math
import re
import statistics

import pytest
import torch
from conftest import flat, load, read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.smoke

CHARTS = ["episodic_return", "episodic_length", "learning_rate", "SPS"]
LOSSES = {
    "ppo": ["explained_variance", "epochs", "policy_loss", "value_loss", "entropy", "old_approx_kl",
            "approx_kl", "clipfrac", "grad_norm"],
    "muesli": ["policy_loss", "cmpo_loss", "model_loss", "value_loss", "reward_loss", "entropy",
               "kl_to_prior", "clipped_targets", "grad_norm"]}
SUMMARY = {"env_id", "seed", "global_step", "seconds", "sps", "eval_episodes", "eval_mean", "eval_std",
           "eval_sampled_mean", "eval_sampled_std"}
MORE = {
    "muesli_cartpole": {"solved_at"},
    "rl2_meta": {"trial_return_mean", "trial_return_se", "episode_returns", "episode_returns_se",
                 "trial_return_greedy_mean", "trial_return_greedy_se", "greedy_episode_returns",
                 "greedy_episode_returns_se"},
}

def read_summary(run_dir):
    """Of numbers, as NaN is no JSON."""
    return json.loads((run_dir / "summary.json").read_text(), parse_constant=pytest.fail)

def test_the_folder_of_a_run(finished):
    """It is written into the current folder alone and says what was run."""
    here = {path.name for path in finished.folder.iterdir()} - {"__pycache__"}
    assert here == {f"{finished.script}.py", "run"}
    files = {path.name for path in (finished.folder / "run").iterdir() if "tfevents" not in path.name}
    assert files == {"args.json", "checkpoint.pt", "metrics.csv", "summary.json"}
    args = json.loads((finished.folder / "run" / "args.json").read_text())
    assert args["script"] == finished.script
    assert re.fullmatch("[0-9a-f]{40}|None", str(args["git_commit"]))
    assert args["torch"] == torch.__version__ and args["numpy"] and args["gymnasium"]
    assert {name: args[name] for name in ("preset", "run_dir", "seed")} == {
        "preset": "none", "run_dir": "run", "seed": 1}
    assert f"{args['env_id']}, seed 1, preset none, cpu" in finished.out and ", in run\n" in finished.out

def test_metrics_and_events(finished):
    """The same numbers in both, finite but for returns before an episode has ended."""
    rows, run_dir = read_metrics(finished.folder / "run"), finished.folder / "run"
    more = {"muesli_cartpole": ["greedy_return"], "rl2_meta": ["last_episode_return", "test_return"]}
    charts = CHARTS + more.get(finished.script, [])
    losses = LOSSES["muesli" if "muesli" in finished.script else "ppo"]
    assert list(rows[0]) == ["global_step", "seconds", *charts, *losses]
    assert len(rows) > 1 and float(rows[-1]["grad_norm"]) > 0
    for row in rows:
        assert [name for name, x in row.items() if "return" not in name and "length" not in name
                and not math.isfinite(float(x))] == []
    steps = [int(row["global_step"]) for row in rows]
    assert steps == sorted(set(steps)) and float(rows[-1]["seconds"]) > float(rows[0]["seconds"]) > 0
    events = EventAccumulator(str(run_dir)).Reload()
    tags = {f"charts/{x}" for x in charts} | {f"losses/{x}" for x in losses}
    assert set(events.Tags()["scalars"]) == tags | {"eval/episodic_return"}
    for tag in sorted(tags):
        values = [float(row[tag.split("/")[1]]) for row in rows]
        assert [event.step for event in events.Scalars(tag)] == steps
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(values, nan_ok=True)
    event, = events.Scalars("eval/episodic_return")
    assert event.value == pytest.approx(read_summary(run_dir)["eval_mean"]) and event.step == steps[-1]

def test_checkpoint_and_summary(finished):
    checkpoint, summary = load(finished.folder / "run"), read_summary(finished.folder / "run")
    total = checkpoint["args"]["total_timesteps"]
    assert total <= summary["global_step"] < total + 16  # an iteration of Muesli
    tensors = [x for x in flat(checkpoint).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) > 10 and all(x.isfinite().all() for x in tensors)
    assert set(summary) == SUMMARY | MORE.get(finished.script, set())
    assert summary["env_id"] == checkpoint["args"]["env_id"] and summary["seed"] == 1
    for numbers in (summary, checkpoint["progress"]):
        assert numbers["global_step"] == int(read_metrics(finished.folder / "run")[-1]["global_step"])
    rates = [float(row["SPS"]) for row in read_metrics(finished.folder / "run")]
    assert summary["seconds"] > 0 and summary["sps"] == pytest.approx(statistics.median(rates[1:]))

def test_evaluate_repeats_the_evaluation(finished, run_dir, main):
    """The same lines, of the summary's numbers; nothing is written."""
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    out, _ = main(finished.script, "--evaluate run")
    assert out in finished.out and finished.out.endswith(
        f"{out}evaluate again: python {finished.script}.py --evaluate 'run'\n")
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before
    summary = read_summary(run_dir)
    assert out.count(f"{summary['env_id']} after ") == out.count("actions\n") == 2
    numbers = [float(x) for pair in re.findall(r"return (-?[\d.]+) \+- ([\d.]+)", out) for x in pair]
    names = ["eval_mean", "eval_std", "eval_sampled_mean", "eval_sampled_std"]
    if finished.script == "rl2_meta":
        names[1::2] = ["trial_return_greedy_se", "trial_return_se"]
    assert numbers == pytest.approx([summary[name] for name in names], abs=0.051)

def test_resume_extends_a_finished_run(finished, run_dir, main):
    rows, total = read_metrics(run_dir), load(run_dir)["args"]["total_timesteps"]
    main(finished.script, f"--resume run --total-timesteps {total * 3 // 2}")
    extended = read_metrics(run_dir)
    assert extended[: len(rows)] == rows and len(extended) > len(rows)
    assert int(extended[-1]["global_step"]) == read_summary(run_dir)["global_step"] >= total * 3 // 2
    assert float(extended[-1]["seconds"]) > float(rows[-1]["seconds"])
    main(finished.script, "--evaluate run")
