"""The command line: help, bad input, what a run leaves, live changes, two processes, shared code."""

import ast
import csv
import difflib
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resume import check_resume_only_evaluates

import ppo_continuous as ppo

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "ppo_continuous.py"
SCRIPTS = [p for name in ("ppo_atari", "ppo_continuous", "muesli_cartpole", "rl2_meta")
           if (p := ROOT / f"{name}.py").exists()]
# Four iterations of 32 steps.
SHORT = """--no-compile --env-id CartPole-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2
           --total-timesteps 128 --eval-episodes 3"""
TAGS = {
    "charts/episodic_return", "charts/episodic_length", "charts/learning_rate", "charts/SPS",
    "eval/episodic_return",
    "losses/value_loss", "losses/policy_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac",
    "losses/explained_variance"}
TOYS = '''
from pathlib import Path
import gymnasium as gym

class Toy(gym.Env):
    observation_space, action_space, steps = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2), 0

    def __init__(self, render_mode=None):
        pass

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype("float32"), {}

    def step(self, action):
        self.steps += 1  # goes on over resets
        obs = self.np_random.uniform(-1, 1, 2).astype("float32")
        return obs, self.reward(), False, self.steps % 10 == 0, {}

class Nan(Toy):
    def reward(self):
        return float("nan") if self.steps == 4 * 16 + 5 else 1.0  # the first 16 steps come before iteration 1

class Live(Toy):
    """Changes live.json in iterations 2 and 4."""
    def reward(self):
        changes = {2 * 16 + 5: '{"learning_rate": 0.001, "gamma": 0.9, "ent_coef": -1, "update_epochs": 1.5}',
                   4 * 16 + 5: "{no json", 6 * 16 + 5: '{"update_epochs": 1, "target_kl": null}'}
        if self.steps in changes:
            Path("run/live.json").write_text(changes[self.steps])
        return 1.0

gym.register("Nan-v0", Nan)
gym.register("Live-v0", Live)
'''
DRIVER = '''
import os
import torch
import ppo_continuous as ppo

rollouts, optimizers, collect, flatten = [], [], ppo.collect, ppo.flatten_parameters

def recorded_collect(*args):
    rollouts.append(collect(*args))
    return rollouts[-1]

def recorded_flatten(agent):
    optimizers.append(flatten(agent))
    return optimizers[-1]

ppo.collect, ppo.flatten_parameters = recorded_collect, recorded_flatten
ppo.main()
rank = {"params": optimizers[0]["params"], "obs": torch.stack([r[0]["obs"] for r in rollouts])}
torch.save(rank, f"rank{os.environ['RANK']}.pt")
'''


def run(folder, flags, code=0, python="ppo_continuous.py", script=SCRIPT):
    """Run the script, copied alone into that folder, and check its exit status."""
    shutil.copy(script, folder)
    command, env = [sys.executable, *python.split(), *flags.split()], os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def train_in_two_processes(folder, script, flags):
    """Train into folder / "run" under torchrun; both end with the weights that are saved.

    Returns what was printed and each rank's observations, tensors (iterations, T, N, ...)."""
    (folder / "driver.py").write_text(DRIVER.replace("ppo_continuous", script.stem))
    launcher = "-m torch.distributed.run --standalone --nproc-per-node=2 driver.py"
    printed = run(folder, f"{flags} --run-dir run", python=launcher, script=script).stdout
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    for rank in ranks:
        assert torch.equal(rank["params"], load(folder / "run")["opt"]["params"])
    return printed, [rank["obs"] for rank in ranks]


def read_metrics(run_dir):
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """A finished run in an empty folder, and what it printed."""
    folder = tmp_path_factory.mktemp("cartpole")
    return folder / "run", run(folder, f"{SHORT} --run-dir run").stdout


# ----------------------------------------------------------------------------------------------------- help


def flag_docs(source):
    """Doc of each field of Args, None where it has none."""
    body, docs = next(node.body for node in ast.parse(source).body if getattr(node, "name", "") == "Args"), {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            value = following.value if isinstance(following, ast.Expr) else None
            docs[node.target.id] = value.value if isinstance(value, ast.Constant) else None
    return docs


def tags_of(text):
    """Numbers of the tagged details [D1] or [D2, D32]."""
    groups = re.findall(r"\[(D\d+(?:, D\d+)*)\]", text)
    return {int(number) for group in groups for number in re.findall(r"\d+", group)}


def unboxed(text):
    """Text in tyro's boxes on one line."""
    return re.sub(r"[\s│╭╮╰╯─]+|-{5,}", " ", text)


def test_help_shows_flags_and_details(tmp_path):
    text, docs = unboxed(run(tmp_path, "--help").stdout), flag_docs(SCRIPT.read_text())
    assert all(f" --{name.replace('_', '-')} " in text.replace(",", " ") for name in docs)
    details = {*range(1, 14), *range(23, 37)} - {12}  # core but for the logged ones, continuous, recurrent
    assert tags_of(text) >= tags_of(str(docs)) >= details
    assert "--resume runs/RUN" in text  # the docstring's commands


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_flag_has_a_doc(script):
    docs = flag_docs(script.read_text())
    assert len(docs) > 20
    assert [name for name, doc in docs.items() if not doc] == []


def test_flag_docs_sees_a_missing_one():
    assert flag_docs('class Args:\n    a: int = 1\n    "doc"\n    b: int = 2\n') == {"a": "doc", "b": None}


# ------------------------------------------------------------------------------------------------ bad input


class Odd(gym.Env):
    """Spaces that the script cannot take."""

    def __init__(self, obs=None, action=None, render_mode=None):
        self.observation_space = obs or gym.spaces.Box(-1, 1, (2,))
        self.action_space = action or gym.spaces.Discrete(2)


for name, spaces in {"Blind-v0": {}, "OddObs-v0": {"obs": gym.spaces.Sequence(gym.spaces.Discrete(3))},
                     "OddAction-v0": {"action": gym.spaces.Dict(a=gym.spaces.Discrete(2))},
                     "IntAction-v0": {"action": gym.spaces.Box(0, 3, (2,), int)}}.items():
    gym.register(name, Odd, kwargs=spaces)


def files(folder):
    return {p.relative_to(folder): p.stat().st_mtime_ns for p in folder.rglob("*")}


def refused(flags, folder, monkeypatch, capsys):
    """Call main with these flags: exit status 2, nothing written. Returns what it says, on one line."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *flags.split()])
    before = files(folder)
    with pytest.raises(SystemExit) as stop:
        ppo.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and files(folder) == before
    assert "--help" in err or (err.startswith("error: ") and err.count("\n") == 1)  # tyro's box, or ours
    return unboxed(err)


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id CartPol-v1", "CartPole-v1"),
    ("--env-id CartPole-v7", "close names: CartPole-v1"),
    ("--env-id no_such_module:Env-v0", "cannot make --env-id no_such_module:Env-v0"),
    ("--env-id OddObs-v0", "--env-id OddObs-v0"),
    ("--env-id OddAction-v0", "are not supported"),
    ("--env-id Blind-v0 --capture-video", "--capture-video: Blind-v0 does not render pictures"),
    ("--env-id IntAction-v0", "are not supported"),
    ("--env-id MountainCarContinuous-v0 --num-ens 3", "--num-envs"),
    ("--rnn rnn", "rnn"),
    ("--num-minibatches 3", "--num-minibatches 3 does not divide the 32 steps of a rollout: give a divisor"),
    ("--num-minibatches 4 --rnn gru", "--num-minibatches 4 does not divide the 2 sequences"),
    ("--rnn gru --rnn-seq-len 5", "--rnn-seq-len 5 does not divide --num-steps 16"),
    ("--num-minibatches 32", "minibatches of one step have no deviation"),
    ("--total-timesteps 31", "--total-timesteps 31 leaves no rollout of 32 steps"),
    ("--learning-rate -0.1", "--learning-rate -0.1 is out of range"),
    ("--learning-rate nan", "--learning-rate nan is out of range"),
    ("--num-envs -2", "--num-envs -2 is out of range: give 1"),
    ("--seed -1", "--seed -1 is out of range: give 0"),
    ("--gamma 1.5", "--gamma 1.5 is out of range: give 0 to 1"),
    ("--clip-coef -0.2", "--clip-coef -0.2 is out of range"),
    ("--device cuda:7", "--device cuda:7 is not there"),
    ("--device quantum", "--device quantum is not there"),
    ("--env-id Pendulum-v1 --action-dist cauchy", "cauchy"),
    ("--resume nowhere", "no checkpoint nowhere/checkpoint.pt"),
    ("--evaluate nowhere", "no checkpoint nowhere/checkpoint.pt"),
])  # fmt: skip
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    assert words in refused(f"{SHORT} {flags}", tmp_path, monkeypatch, capsys)


def test_bad_flags_from_the_shell(tmp_path):
    error = run(tmp_path, f"{SHORT} --env-id CartPol-v1", code=2).stderr
    assert error.startswith("error: cannot make --env-id CartPol-v1") and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".py"] == []


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_script(path):
    torch.save(torch.load(path, weights_only=True) | {"script": "ppo_atari"}, path)


def other_flags(path):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["args"]["unknown"] = 1
    torch.save(checkpoint, path)


def other_spaces(path):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["args"]["env_id"] = "Acrobot-v1"
    torch.save(checkpoint, path)


def no_file_to_write(path):
    path.unlink()
    path.with_name("args.json").unlink()
    path.with_name("args.json").mkdir()


def other_batch(path):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["at"]["batch_size"] *= 2
    torch.save(checkpoint, path)


@pytest.mark.parametrize(("spoil", "flags", "words"), [
    (Path.unlink, "--resume run", "no checkpoint run/checkpoint.pt"),
    (truncate, "--resume run", "run/checkpoint.pt is damaged"),
    (truncate, "--evaluate run", "run/checkpoint.pt is damaged"),
    (lambda path: path.write_bytes(b"noise"), "--resume run", "run/checkpoint.pt is damaged"),
    (lambda path: torch.save([1, 2], path), "--resume run", "run/checkpoint.pt is damaged"),
    (other_script, "--resume run", "was written by ppo_atari.py: use that script"),
    (None, "--resume run --env-id Pendulum-v1", "--env-id Pendulum-v1: the run has CartPole-v1"),
    (None, "--evaluate run --env-id Acrobot-v1", "--env-id Acrobot-v1: the run has CartPole-v1"),
    (None, "--resume run --activation relu --total-timesteps 256", "--activation relu: the run has tanh"),
    (None, "--resume run --num-minibatches 3", "--num-minibatches 3: the run has 2, and goes on"),
    (other_flags, "--resume run", "was written by a ppo_continuous.py with other flags"),
    (other_spaces, "--resume run --total-timesteps 256", "an environment with other spaces: size mismatch"),
    (other_batch, "--resume run --total-timesteps 256", "64 steps, not 32: resume it with as many processes"),
    (None, "--resume run", "leaves no rollout of 32 steps after the 128 that are done"),
    (None, f"{SHORT} --run-dir run", "--run-dir run is a file or holds a run: --resume it"),
    (no_file_to_write, f"{SHORT} --run-dir run", "--run-dir run: Is a directory"),
    (None, f"{SHORT} --run-dir run/args.json/new", "--run-dir run/args.json/new: Not a directory"),
])  # fmt: skip
def test_bad_run_folder(spoil, flags, words, cartpole, tmp_path, monkeypatch, capsys):
    shutil.copytree(cartpole[0], tmp_path / "run")
    if spoil:
        spoil(tmp_path / "run" / "checkpoint.pt")
    assert words in refused(flags, tmp_path, monkeypatch, capsys)


# ----------------------------------------------------------------------------------------------- short runs


def check_run(run_dir, env_id):
    args = json.loads((run_dir / "args.json").read_text())
    assert args["env_id"] == env_id and args["num_envs"] == 2 and args["torch"] == torch.__version__
    rows = read_metrics(run_dir)
    assert [int(row["global_step"]) for row in rows] == [32, 64, 96, 128]
    assert all(math.isfinite(float(row[name])) for row in rows for name in (*ppo.METRICS, "SPS", "seconds"))
    checkpoint = load(run_dir)
    assert checkpoint["at"]["global_step"] == 128 and checkpoint["args"]["env_id"] == env_id
    assert all(x.isfinite().all() for x in (*checkpoint["agent"].values(), *checkpoint["opt"].values()))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary) == {"env_id", "seed", "global_step", "seconds", "sps", "eval_episodes",
                            "eval_mean", "eval_std", "eval_sampled_mean", "eval_sampled_std"}
    assert summary["env_id"] == env_id and summary["global_step"] == 128 and summary["eval_episodes"] == 3
    assert all(math.isfinite(value) for value in summary.values() if value != env_id)
    events = EventAccumulator(str(run_dir)).Reload()
    assert set(events.Tags()["scalars"]) >= TAGS
    assert [event.step for event in events.Scalars("losses/value_loss")] == [32, 64, 96, 128]
    assert events.Scalars("eval/episodic_return")[0].value == pytest.approx(summary["eval_mean"])


def test_short_run_discrete(cartpole):
    check_run(cartpole[0], "CartPole-v1")
    assert {p.name for p in cartpole[0].parent.iterdir()} - {"__pycache__"} == {"ppo_continuous.py", "run"}


def test_short_run_continuous_in_the_default_folder(tmp_path):
    printed = run(tmp_path, f"{SHORT} --env-id Pendulum-v1 --total-timesteps 140").stdout
    run_dir, = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"Pendulum-v1__ppo_continuous__1__\d+", run_dir.name)
    assert f"--evaluate runs/{run_dir.name}" in printed
    check_run(run_dir, "Pendulum-v1")


def test_evaluate_repeats_the_evaluation(cartpole):
    run_dir, printed = cartpole
    before = files(run_dir)
    lines = [line for line in printed.splitlines() if "return" in line][-2:]
    number = r"(-?\d+\.\d)"
    mean, std, low, high = map(float, re.search(f"return {number} .. {number}, from {number} to {number}",
                                                lines[0]).groups())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (mean, std) == pytest.approx((summary["eval_mean"], summary["eval_std"]), abs=0.051)
    assert low <= mean <= high and high - low >= std > 0
    for _ in range(2):
        assert run(run_dir.parent, "--evaluate run").stdout.splitlines() == lines
    assert files(run_dir) == before


def test_killed_while_it_was_evaluated(cartpole, tmp_path):
    check_resume_only_evaluates(cartpole[0], tmp_path, partial(run, tmp_path))


def test_a_run_that_goes_on_has_no_summary(cartpole, tmp_path):
    shutil.copytree(cartpole[0], tmp_path / "run")
    log = ppo.RunLog(tmp_path / "run", ppo.Args(), load(tmp_path / "run")["at"]["rows"])
    log.close()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_checkpoints_of_a_short_run_leave_its_episodes_whole(tmp_path, monkeypatch):
    """Each checkpoint resets the environments: 20 of these 40 iterations would end no long episode."""
    restart, restarts = ppo.restart, []
    monkeypatch.setattr(ppo, "restart", lambda *args: restarts.append(args[-1]) or restart(*args))
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *SHORT.split(), "--total-timesteps", "1280",
                                      "--num-steps", "16", "--run-dir", str(tmp_path / "run")])
    ppo.main()
    assert restarts == [0, 40]


def test_interrupted_in_its_evaluation(cartpole, tmp_path, monkeypatch):
    """Ctrl-C there has nothing to save, and no traceback to show."""
    def interrupt(*_):
        raise KeyboardInterrupt

    for module in map(importlib.import_module, [script.stem for script in SCRIPTS]):
        monkeypatch.setattr(module, "load_checkpoint", interrupt)
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", "--evaluate", str(cartpole[0])])
        with pytest.raises(SystemExit) as stop:
            module.main()
        assert stop.value.code == 130


def test_compiled_run_agrees_with_eager(cartpole, tmp_path):
    run(tmp_path, f"{SHORT} --compile --run-dir run")
    compiled, eager = (read_metrics(run_dir) for run_dir in (tmp_path / "run", cartpole[0]))
    assert len(compiled) == len(eager)
    for name in ppo.METRICS:
        assert float(compiled[0][name]) == pytest.approx(float(eager[0][name]), rel=1e-2, abs=1e-5), name


@pytest.mark.parametrize("vector_env", ["thread", "async"])
def test_environments_at_the_same_time_give_the_same_weights(cartpole, tmp_path, vector_env):
    run(tmp_path, f"{SHORT} --vector-env {vector_env} --run-dir run")
    params = [load(run_dir)["opt"]["params"] for run_dir in (tmp_path / "run", cartpole[0])]
    assert torch.equal(*params)


def test_weights_and_biases_may_refuse(tmp_path, monkeypatch, capsys):
    class Wandb(ModuleType):
        Error = ConnectionError

        def init(self, **settings):
            assert settings["project"] == "ppo" and settings["name"] == "run"
            raise ConnectionError("no login")

    monkeypatch.setitem(sys.modules, "wandb", Wandb("wandb"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *f"{SHORT} --track --run-dir run".split()])
    with pytest.raises(SystemExit) as exit_:
        ppo.main()
    assert exit_.value.code == 2 and capsys.readouterr().err == "error: --track: no login\n"


def test_a_tracked_run_is_evaluated_without_weights_and_biases(cartpole, tmp_path, monkeypatch, capsys):
    shutil.copytree(cartpole[0], tmp_path / "run")
    checkpoint = load(tmp_path / "run")
    checkpoint["args"]["track"] = True
    torch.save(checkpoint, tmp_path / "run" / "checkpoint.pt")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", "--evaluate", "run"])
    ppo.main()
    printed = capsys.readouterr().out
    assert printed.count("episodes: return") == 2 and printed in cartpole[1]


# ------------------------------------------------------------------------------------- live changes and NaN


def test_live_changes(tmp_path):
    (tmp_path / "toys.py").write_text(TOYS)
    flags = "--env-id toys:Live-v0 --no-anneal-lr --target-kl 0.02 --total-timesteps 256 --run-dir run"
    printed = run(tmp_path, f"{SHORT} {flags}").stdout
    said = [line for line in printed.splitlines() if line.startswith("live.json")]
    assert said[0] == "live.json at step 64: learning_rate 0.0003 -> 0.001"
    assert [line.split(" ignored")[0] for line in said[1:4]] == [
        "live.json: gamma = 0.9", "live.json: ent_coef = -1", "live.json: update_epochs = 1.5"]
    assert said[4].startswith("live.json ignored: ")  # the second version is no JSON
    assert said[5:] == ["live.json at step 192: update_epochs 2 -> 1",
                        "live.json at step 192: target_kl 0.02 -> None"]
    changes = (tmp_path / "run" / "live.log").read_text().splitlines()
    assert changes == [line.removeprefix("live.json at ") for line in (said[0], *said[5:])]
    assert load(tmp_path / "run")["at"]["live"] == {"learning_rate": 1e-3, "clip_coef": 0.2, "ent_coef": 0.0,
                                                    "vf_coef": 0.5, "update_epochs": 1, "target_kl": None}
    rows = read_metrics(tmp_path / "run")
    assert [float(row["learning_rate"]) for row in rows] == [3e-4] * 2 + [1e-3] * 6
    assert [int(row["epochs"]) for row in rows] == [2] * 6 + [1] * 2


def test_live_changes_go_on_after_a_resume(cartpole, tmp_path):
    shutil.copytree(cartpole[0], tmp_path / "run")
    checkpoint = load(tmp_path / "run")
    checkpoint["at"]["live"]["update_epochs"] = 1
    torch.save(checkpoint, tmp_path / "run" / "checkpoint.pt")
    run(tmp_path, "--resume run --total-timesteps 160")
    assert [int(row["epochs"]) for row in read_metrics(tmp_path / "run")] == [2] * 4 + [1]


def test_live_file_that_cannot_be_read(tmp_path, capsys):
    path, values = tmp_path / "live.json", {"vf_coef": 0.5}
    assert ppo.read_live(path, None, values, 0) is None and capsys.readouterr().out == ""
    path.mkdir()
    seen = ppo.read_live(path, None, values, 0)
    assert capsys.readouterr().out.startswith("live.json ignored: ")
    assert ppo.read_live(path, seen, values, 0) == seen and capsys.readouterr().out == ""  # told once
    path.rmdir()
    path.write_text('{"vf_coef": 1' + "0" * 400 + "}")
    ppo.read_live(path, None, values, 0)
    assert "ignored" in capsys.readouterr().out and values == {"vf_coef": 0.5}


def test_nan_reward_stops_and_keeps_the_checkpoint(tmp_path):
    (tmp_path / "toys.py").write_text(TOYS)
    flags = "--env-id toys:Nan-v0 --total-timesteps 320 --checkpoint-every 2 --run-dir run"
    error = run(tmp_path, f"{SHORT} {flags}", code=1).stderr
    assert "error: rewards not finite in iteration 4" in error and "Traceback" not in error
    checkpoint = load(tmp_path / "run")
    assert checkpoint["at"]["iteration"] == 2
    assert checkpoint["opt"]["params"].isfinite().all()
    assert not (tmp_path / "run" / "summary.json").exists()


# ------------------------------------------------------------------------------------------ more processes


def test_two_processes(tmp_path):
    """Same gradients, different environments; no rank waits for another when target_kl ends the epochs."""
    flags = "--total-timesteps 640 --update-epochs 4 --learning-rate 3e-3 --target-kl 3e-3"
    _, obs = train_in_two_processes(tmp_path, SCRIPT, f"{SHORT} {flags}")
    starts = torch.cat([rank[1, 0] for rank in obs])  # (4, O), of iteration 1
    assert len(starts.unique(dim=0)) == 4
    rows = read_metrics(tmp_path / "run")
    assert [int(row["global_step"]) for row in rows] == list(range(64, 641, 64))
    assert {int(row["epochs"]) for row in rows} > {4}  # target_kl stopped some


# ---------------------------------------------------------------------------------- dependencies, shared code


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_requirements_hold_the_script_block(script):
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script.read_text())[1]
    dependencies = re.findall(r'^#     "(.+)",$', block, re.MULTILINE)
    assert len(dependencies) == block.count('"') // 2 - 1 > 3  # all but the line of the Python version
    assert set(dependencies) <= set((ROOT / "requirements.txt").read_text().splitlines())


# In every script the same room of other furniture.
ROOMS = {"Agent", "build", "collect", "doc of capture_video", "doc of env_id", "doc of learning_rate",
         "doc of rnn", "evaluate", "evaluate_run", "finish", "next_values", "print_header", "reset_stream",
         "restart", "train", "train_step"}


def definitions(source):
    """Source of every function and class of a file, decorators included, and of every flag's doc."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":  # flags differ, their docs must not
            found |= {f"doc of {name}": re.sub(r" \[[DX0-9, ]+\]", "", str(doc))  # but for their source
                      for name, doc in flag_docs(source).items()}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def differences(sources):
    """Diffs of what two of these sources, a dict by file name, define differently under one name."""
    seen, diffs = {}, []
    for file, source in sources.items():
        for name, text in definitions(source).items():
            if name in ROOMS:
                continue
            other, before = seen.setdefault(name, (file, text))
            diff = difflib.unified_diff(before.splitlines(), text.splitlines(), other, file, lineterm="")
            diffs += ["\n".join([name, *diff])] if text != before else []
    return diffs


def test_shared_code_is_identical():
    sources = {script.name: script.read_text() for script in SCRIPTS}
    assert len(definitions(sources["ppo_continuous.py"])) > 100  # flags included
    assert "\n\n".join(differences(sources)) == ""


def test_differences_are_found():
    one = 'class Args:\n    a: int = 1\n    "doc"\n@cached\ndef f():\n    return 1\ndef g(): pass\n'
    assert differences({"one": one, "two": one.replace("int = 1", "int = 3").replace("g()", "h(x)")}) == []
    for old, new in (("return 1", "return 2"), ("@cached\n", ""), ('"doc"', '"other"')):
        diff, = differences({"one": one, "two": one.replace(old, new)})
        assert "--- one" in diff and "+++ two" in diff
