"""The command line: help, presets, bad input, what a run leaves, live changes, two processes, shared code."""

import ast
import csv
import difflib
import importlib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import probes  # noqa: F401
import pytest
import torch
import tyro
from conftest import small_args
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
CHARTS = ("episodic_return", "episodic_length", "learning_rate", "SPS")
LOSSES = ("explained_variance", "epochs", *ppo.LOSSES)
TAGS = {"eval/episodic_return", *(f"charts/{x}" for x in CHARTS), *(f"losses/{x}" for x in LOSSES)}
TOYS = """
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
        self.steps += 1  # continues over resets
        obs = self.np_random.uniform(-1, 1, 2).astype("float32")
        return obs, self.reward(), False, self.steps % 10 == 0, {}

class Nan(Toy):
    def reward(self):
        return float("nan") if self.steps == 4 * 16 + 5 else 1.0  # the first 16 steps come before iteration 1

class Live(Toy):
    \"\"\"Changes live.json in iterations 2, 4, 5 and 6.\"\"\"
    def reward(self):
        changes = {2 * 16 + 5: '{"learning_rate": 0.001, "gamma": 0.9, "vf_coef": 1}', 4 * 16 + 5: "{no json",
                   5 * 16 + 5: '{"learning_rate": 0.002, "update_epochs": 1.5}',
                   6 * 16 + 5: '{"update_epochs": 1, "target_kl": null}'}
        if self.steps in changes:
            Path("run/live.json").write_text(changes[self.steps])
        return 1.0

gym.register("Nan-v0", Nan)
gym.register("Live-v0", Live)
"""
DRIVER = """
import os
import torch
import ppo_continuous as ppo

rollouts, agents, rollout, make_agent, evaluate = [], [], ppo.rollout, ppo.make_agent, ppo.evaluate

def recorded_rollout(*args):
    result = rollout(*args)
    rollouts.append(result[0] if isinstance(result, tuple) else result)
    return result

def recorded_make_agent(*args):
    result = make_agent(*args)
    agents.append(result[0])
    return result

def unrecorded_evaluate(*args):
    ppo.rollout = rollout
    return evaluate(*args)

ppo.rollout, ppo.make_agent, ppo.evaluate = recorded_rollout, recorded_make_agent, unrecorded_evaluate
ppo.main()
rank = {"agent": agents[0].state_dict(), "obs": torch.stack([data["obs"] for data in rollouts])}
torch.save(rank, f"rank{os.environ['RANK']}.pt")
"""


def run(folder, flags, code=0, python="ppo_continuous.py", script=SCRIPT, **environment):
    """Run the script, copied alone into that folder, and check its exit status."""
    shutil.copy(script, folder)
    command = [sys.executable, *python.split(), *shlex.split(flags)]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def call_main(flags, folder, monkeypatch, module=ppo):
    """Call main with these flags in this process and that folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *shlex.split(flags)])
    module.main()


def train_in_two_processes(folder, script, flags):
    """Train into folder / "run" under torchrun; both end with the weights and statistics that are saved.

    Returns what was printed and each rank's observations, tensors (iterations, T, N, ...)."""
    (folder / "driver.py").write_text(DRIVER.replace("ppo_continuous", script.stem))
    launcher = "-m torch.distributed.run --standalone --nproc-per-node=2 driver.py"
    printed = run(folder, f"{flags} --run-dir run", python=launcher, script=script).stdout
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    saved = load(folder / "run")["agent"]
    for rank in ranks:
        assert rank["agent"].keys() == saved.keys()
        assert [name for name, x in saved.items() if not torch.equal(rank["agent"][name], x)] == []
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
    """Trailing comment of each field of Args, "" where it has none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    body = next(node.body for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    return {node.target.id: comments.get(node.end_lineno, "").removeprefix("#").strip()
            for node in body if isinstance(node, ast.AnnAssign)}


def tags_of(text):
    """Numbers of the tagged details [D1] or [D2, D32]."""
    groups = re.findall(r"\[(D\d+(?:, D\d+)*)\]", text)
    return {int(number) for group in groups for number in re.findall(r"\d+", group)}


def unboxed(text):
    """Text in tyro's boxes on one line, without colors."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"[\s│╭╮╰╯─]+|-{5,}", " ", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_shows_every_flag_with_its_comment(script, tmp_path, monkeypatch, capsys):
    module, docs = importlib.import_module(script.stem), flag_docs(script.read_text())
    with pytest.raises(SystemExit) as stop:
        call_main("--help", tmp_path, monkeypatch, module)
    text = unboxed(capsys.readouterr().out)
    assert stop.value.code == 0 and len(docs) > 20
    for name, doc in docs.items():
        assert doc and len(re.sub(r"\[.*?\]", "", doc).split()) <= 13, f"{name}: {doc}"
        assert re.search(rf" --{name.replace('_', '-')}\b", text), name
        assert " ".join(doc.split()) in text, f"{name}: {doc}"
    assert "--resume runs/RUN" in text  # the docstring's commands


def test_help_names_every_detail():
    source = SCRIPT.read_text()
    details = {*range(1, 14), *range(23, 37)} - {12, 23, 25}  # no flags: what is logged, the Gaussian
    assert tags_of(str(flag_docs(source))) >= details
    assert tags_of(source) >= {*range(1, 14), *range(23, 38)}  # in help or code


def test_tyro_is_one_that_shows_trailing_comments():
    """The oldest that requirements.txt allows does; this one shows them, as the test above has it."""
    requirement, = (line for line in (ROOT / "requirements.txt").read_text().splitlines() if "tyro" in line)
    assert requirement == "tyro>=1.0" and int(tyro.__version__.split(".")[0]) >= 1


def test_flag_docs_sees_a_missing_one():
    source = 'class Args:\n    a: int = 1  # doc [D1]\n    b: str = "#"\n    # heading\n    c: int = 2\n'
    assert flag_docs(source) == {"a": "doc [D1]", "b": "", "c": ""}


# -------------------------------------------------------------------------------------------------- presets


def args_of(flags, folder, monkeypatch, module=ppo):
    """What main would train with."""
    got = []
    monkeypatch.setattr(module, "train", lambda args, checkpoint: got.append(args))
    call_main(flags, folder, monkeypatch, module)
    return got[0]


def presets():
    return [(script.stem, name) for script in SCRIPTS
            for name in importlib.import_module(script.stem).PRESETS if name != "none"]


@pytest.mark.parametrize(("script", "name"), presets())
def test_every_preset_is_taken(script, name, tmp_path, monkeypatch):
    """By itself if it is named like the environment, which a preset of another kind is not."""
    module = importlib.import_module(script)
    by_name = args_of(f"--preset {name}", tmp_path, monkeypatch, module)
    assert by_name.preset == name
    for flag, value in module.PRESETS[name].items():
        assert getattr(by_name, flag) == value
        assert value != getattr(module.Args(), flag), f"{flag} is the default"
    if not re.fullmatch(r"[a-z]+", name):
        assert args_of(f"--env-id {name}", tmp_path, monkeypatch, module) == (
            args_of(f"--preset {name} --env-id {name}", tmp_path, monkeypatch, module))
        bare = args_of(f"--env-id {name} --preset none", tmp_path, monkeypatch, module)
        assert bare == module.Args(env_id=name, preset="none")


def test_the_command_line_wins_over_a_preset(tmp_path, monkeypatch):
    args = args_of("--env-id Swimmer-v5 --gamma 0.9 --norm-value", tmp_path, monkeypatch)
    assert (args.preset, args.gamma, args.norm_value) == ("Swimmer-v5", 0.9, True)
    assert (args.num_steps, args.gae_lambda, args.norm_reward) == (1024, 0.98, True)
    other = args_of("--env-id Swimmer-v5 --preset Ant-v5", tmp_path, monkeypatch)
    assert (other.preset, other.env_id, other.num_steps) == ("Ant-v5", "Swimmer-v5", 32)
    none = ppo.Args(env_id="CartPole-v1", preset="none")
    assert args_of("--env-id CartPole-v1", tmp_path, monkeypatch) == none


def test_the_historical_preset_is_the_setting_of_cleanrl(tmp_path, monkeypatch):
    args = args_of("--env-id Hopper-v5 --preset historical", tmp_path, monkeypatch)
    expected = {
        "num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10, "learning_rate": 3e-4,
        "anneal_lr": True, "adam_eps": 1e-5, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True,
        "clip_coef": 0.2, "anneal_clip": False, "clip_vloss": True, "ent_coef": 0.0, "vf_coef": 0.5,
        "max_grad_norm": 0.5, "target_kl": None, "hidden": (64, 64), "activation": "tanh", "ortho_init": True,
        "share_network": False, "learn_std": True, "log_std_init": 0.0, "clip_actions": True,
        "scale_actions": False, "norm_obs": True, "clip_obs": 10.0, "norm_reward": True, "clip_reward": 10.0,
        "norm_value": False, "recompute_adv": False, "truncation_bootstrap": False}
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.env_id == "Hopper-v5"


def test_the_console_names_the_preset(tmp_path, monkeypatch, capsys):
    flags = f"{SHORT} --env-id Hopper-v5 --eval-episodes 1"
    call_main(f"{flags} --run-dir 1", tmp_path, monkeypatch)
    call_main(f"{flags} --run-dir 2 --preset none", tmp_path, monkeypatch)
    call_main("--resume 1 --total-timesteps 160", tmp_path, monkeypatch)
    headers = [line for line in capsys.readouterr().out.splitlines() if "folder" in line]
    assert headers == [f"Hopper-v5, seed 1, preset {preset}, folder {folder}"
                       for preset, folder in (("Hopper-v5", 1), ("none", 2), ("Hopper-v5", 1))]
    args = json.loads((tmp_path / "1" / "args.json").read_text())
    assert args["preset"] == "Hopper-v5" and args["target_kl"] == 0.02  # also after the resume
    assert (args["num_envs"], args["num_steps"], args["total_timesteps"]) == (2, 16, 160)


# ------------------------------------------------------------------------------------------------ bad input


class Odd(gym.Env):
    """Spaces that the script cannot take."""

    def __init__(self, obs=None, action=None, render_mode=None):
        self.observation_space = obs or gym.spaces.Box(-1, 1, (2,))
        self.action_space = action or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def render(self):
        """Nothing."""


for name, spaces in {"Blind-v0": {}, "OddObs-v0": {"obs": gym.spaces.Sequence(gym.spaces.Discrete(3))},
                     "OddAction-v0": {"action": gym.spaces.Dict(a=gym.spaces.Discrete(2))},
                     "IntAction-v0": {"action": gym.spaces.Box(0, 3, (2,), int)}}.items():
    gym.register(name, Odd, kwargs=spaces)


def files(folder):
    return {p.relative_to(folder): p.stat().st_mtime_ns for p in folder.rglob("*")}


def refused(flags, folder, monkeypatch, capsys):
    """Call main with these flags: exit status 2, nothing written. Returns what it says, on one line."""
    before = files(folder)
    with pytest.raises(SystemExit) as stop:
        call_main(flags, folder, monkeypatch)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and files(folder) == before
    ours = err.startswith("error: ") and err.count("\n") == 1
    assert ours or re.search("[─-]{9}", err)  # or tyro's box
    return unboxed(err)


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id CartPol-v1", "Did you mean: `CartPole`"),
    ("--env-id CartPole-v7", "CartPole-v7: VersionNotFound"),
    ("--env-id no_such_module:Env-v0", "no_such_module:Env-v0: ModuleNotFoundError"),
    ("--env-id OddObs-v0", "OddObs-v0: observations are not a vector"),
    ("--env-id OddAction-v0", "are not supported"),
    ("--env-id Blind-v0 --capture-video", "Blind-v0: AssertionError: it renders nothing"),
    ("--env-id Bare-v0 --capture-video", "Bare-v0: TypeError"),
    ("--env-id IntAction-v0", "are not supported"),
    ("--env-kwargs '{no json'", "CartPole-v1: JSONDecodeError"),
    ("""--env-kwargs '{"continuous": true}'""", "unexpected keyword argument 'continuous'"),
    ("--env-id MountainCarContinuous-v0 --num-ens 3", "--num-envs"),
    ("--preset Humanoid", "preset Humanoid is none of none, Ant-v5,"),
    ("--rnn rnn", "rnn"),
    ("--num-minibatches 3", "num_minibatches 32 sequences"),
    ("--num-minibatches 4 --rnn gru", "num_minibatches 2 sequences"),
    ("--rnn gru --rnn-seq-len 5", "rnn_seq_len must divide num_steps"),
    ("--total-timesteps 31", "total_timesteps leaves no rollout of 32 steps"),
    ("--learning-rate -0.1", "learning_rate = -0.1 is not in range: 0"),
    ("--learning-rate nan", "learning_rate = nan is not in range"),
    ("--target-kl -1", "target_kl = -1.0 is not in range"),
    ("--num-envs -2", "num_envs = -2 is not in range: 1"),
    ("--num-minibatches 0", "num_minibatches = 0 is not in range: 1"),
    ("--seed -1", "seed = -1 is not in range: 0"),
    ("--gamma 1.5", "gamma = 1.5 is not in range: 0 to 1"),
    ("--clip-coef -0.2", "clip_coef = -0.2 is not in range"),
    ("--device cuda:77", "device cuda:77: "),
    ("--device quantum", "device quantum: "),
    ("--resume nowhere", "'nowhere' holds no run of this script"),
    ("--evaluate nowhere", "'nowhere' holds no run of this script"),
    ("--resume ''", "'' holds no run of this script"),
    ("--evaluate ''", "'' holds no run of this script"),
    ("--resume='' --evaluate=''", "'' holds no run of this script"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    assert words in refused(f"{SHORT} {flags}", tmp_path, monkeypatch, capsys)


def test_minibatches_of_one_step_end_the_run(tmp_path, monkeypatch, capsys):
    """Normalized by the std of one number, an advantage is NaN."""
    with pytest.raises(SystemExit) as stop:
        call_main(f"{SHORT} --num-minibatches 32 --run-dir run", tmp_path, monkeypatch)
    assert "not finite in iteration 1" in str(stop.value.code)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_bad_flags_from_the_shell(tmp_path):
    error = run(tmp_path, f"{SHORT} --env-id CartPol-v1", code=2).stderr
    assert error.startswith("error: CartPol-v1: NameNotFound") and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".py"] == []


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path, part, **values):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[part] |= values
    torch.save(checkpoint, path)


def other_flags(path):
    change(path, "args", unknown=1)


def other_spaces(path):
    change(path, "args", env_id="Acrobot-v1")


def nan_weights(path):
    change(path, "opt", params=torch.full_like(load(path.parent)["opt"]["params"], torch.nan))


def no_file_to_write(path):
    path.unlink()
    path.with_name("args.json").unlink()
    path.with_name("args.json").mkdir()


@pytest.mark.parametrize(("spoil", "flags", "words"), [
    (Path.unlink, "--resume run", "'run' holds no run of this script: [Errno 2]"),
    (truncate, "--resume run", "'run' holds no run of this script: "),
    (truncate, "--evaluate run", "'run' holds no run of this script: "),
    (lambda path: path.write_bytes(b"noise"), "--resume run", "'run' holds no run of this script: "),
    (lambda path: torch.save([1, 2], path), "--resume run", "'run' holds no run of this script: "),
    (other_flags, "--resume run", "holds no run of this script: Args.__init__() got an unexpected keyword"),
    (other_spaces, "--resume run --total-timesteps 256", "the checkpoint does not fit Acrobot-v1"),
    (nan_weights, "--evaluate run", "the checkpoint's weights are not finite"),
    (nan_weights, "--resume run --total-timesteps 256", "the checkpoint's weights are not finite"),
    (None, "--resume run --env-id Pendulum-v1", "the checkpoint does not fit Pendulum-v1"),
    (None, "--evaluate run --env-id Acrobot-v1", "the checkpoint does not fit Acrobot-v1"),
    (None, "--evaluate run --hidden 8", "the checkpoint does not fit CartPole-v1"),
    (None, "--resume run --num-minibatches 3", "num_minibatches 32 sequences"),
    (None, "--resume run --total-timesteps 64", "total_timesteps leaves no rollout of 32 steps"),
    (None, f"{SHORT} --run-dir run", "File exists: 'run'"),
    (no_file_to_write, f"{SHORT} --run-dir run", "File exists: 'run'"),
    (None, f"{SHORT} --run-dir run/args.json/new", "Not a directory: 'run/args.json/new'"),
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
    assert args["script"] == "ppo_continuous" and "git_commit" in args
    rows = read_metrics(run_dir)
    assert [int(row["global_step"]) for row in rows] == [32, 64, 96, 128]
    assert set(rows[0]) == {"global_step", "seconds", *CHARTS, *LOSSES}
    assert all(math.isfinite(float(row[name])) for row in rows for name in (*LOSSES, "SPS", "seconds"))
    checkpoint = load(run_dir)
    assert checkpoint["progress"]["global_step"] == 128 and checkpoint["args"]["env_id"] == env_id
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
    """On no terminal, progress is whole lines, and "-" is the return of no episode."""
    done = run(tmp_path, f"{SHORT} --env-id Pendulum-v1 --total-timesteps 140")
    run_dir, = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"Pendulum-v1__ppo_continuous__1__\d+", run_dir.name)
    assert f"--evaluate 'runs/{run_dir.name}'" in done.stdout
    check_run(run_dir, "Pendulum-v1")
    lines = done.stderr.strip().splitlines()
    assert re.fullmatch(r"128/140 steps, +[\d.]+ ?steps/s, return -", lines[-1]), done.stderr
    assert done.stdout.startswith("Pendulum-v1, seed 1, preset none, folder runs/Pendulum-v1__")


def test_progress_is_a_line_every_half_minute(tmp_path, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    log = ppo.RunLog(small_args("CartPole-v1", run_dir=str(tmp_path / "run"), total_timesteps=6400), 0)
    for step in range(64, 6401, 64):
        clock[0] += 10.0
        progress = {"global_step": step, "seconds": clock[0], "episodes": [(0, 7.0, 7)] * (step > 640)}
        log.write(progress, {"learning_rate": 1e-3}, {"value_loss": 1.0})
    log.writer.close()
    lines = [line for line in capsys.readouterr().err.split("\n") if "/6400" in line]
    steps = [int(re.search(r"(\d+)/6400", line)[1]) for line in lines]
    assert max(b - a for a, b in pairwise(steps)) <= 3 * 64
    returns = [line.split("return ")[1].strip() for line in lines if "return" in line]
    assert "-" in returns and set(returns) == {"-", "7.0"} and "nan" not in str(lines)


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo.time, "time", lambda: 1000.5)
    folders = []
    for process in (11, 12, 13):
        monkeypatch.setattr(ppo.os, "getpid", lambda process=process: process)
        log = ppo.RunLog(small_args("CartPole-v1"), 0)
        log.writer.close()
        folders.append(str(log.run_dir))
    name = "runs/CartPole-v1__ppo_continuous__1__1000"
    assert folders == [name, f"{name}_12", f"{name}_13"]


@pytest.mark.parametrize("flags", [{"exp_name": "../../x"}, {"exp_name": "/x/y"}, {"env_id": "a/b/Env-v0"},
                                   {"env_id": "probes:Bandit-v0"}], ids=str)
def test_every_run_stays_in_runs(tmp_path, monkeypatch, flags):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    log = ppo.RunLog(small_args(**{"env_id": "CartPole-v1"} | flags), 0)
    log.writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    assert [p.parent for p in tmp_path.rglob("args.json")] == [tmp_path / "here" / log.run_dir]
    assert log.run_dir.parent == Path("runs")


def test_an_environment_of_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "own_envs.py").write_text(TOYS.replace("Live-v0", "Own-v0").replace("Nan-v0", "OwnNan-v0"))
    (tmp_path / "run").mkdir()
    call_main(f"{SHORT} --env-id own_envs:Own-v0", tmp_path, monkeypatch)
    run_dir, = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("own_envs_Own-v0__")


def test_keyword_arguments_of_the_environment_stay_with_the_run(tmp_path, monkeypatch, capsys):
    kwargs = '{"map_name": "8x8", "is_slippery": false}'
    call_main(f"{SHORT} --env-id FrozenLake-v1 --env-kwargs '{kwargs}' --run-dir run", tmp_path, monkeypatch)
    assert load(tmp_path / "run")["agent"]["obs_rms.mean"].shape == (64,)
    call_main("--evaluate run", tmp_path, monkeypatch)
    assert capsys.readouterr().out.count("FrozenLake-v1 after 128 steps: 3 episodes") == 4


def test_capture_video_records_the_first_deterministic_episode(tmp_path, monkeypatch):
    pytest.importorskip("moviepy")
    call_main(f"{SHORT} --capture-video --run-dir run --eval-episodes 2", tmp_path, monkeypatch)
    video, = (tmp_path / "run" / "videos").glob("*.mp4")
    assert video.stat().st_size > 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_evaluate_repeats_the_evaluation(cartpole, monkeypatch, capsys):
    run_dir, printed = cartpole
    before, lines = files(run_dir), printed.splitlines()[-5:]
    number = r"(-?\d+\.\d)"
    mean, std, low, high = map(float, re.search(f"return {number} .. {number}, from {number} to {number}",
                                                lines[1]).groups())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (mean, std) == pytest.approx((summary["eval_mean"], summary["eval_std"]), abs=0.051)
    assert low <= mean <= high and high - low >= std > 0
    for _ in range(2):
        call_main("--evaluate run", run_dir.parent, monkeypatch)
        assert capsys.readouterr().out.splitlines() == lines[:4]
    assert lines[0] == "CartPole-v1 after 128 steps: 3 episodes, deterministic actions"
    assert lines[4] == "evaluate again: python ppo_continuous.py --evaluate 'run'"
    call_main("--evaluate run --eval-episodes 1", run_dir.parent, monkeypatch)
    assert "after 128 steps: 1 episodes" in capsys.readouterr().out
    assert files(run_dir) == before


def test_killed_while_it_was_evaluated(cartpole, tmp_path):
    check_resume_only_evaluates(cartpole[0], tmp_path, partial(run, tmp_path))


def test_checkpoints_of_a_short_run_leave_its_episodes_whole(tmp_path, monkeypatch):
    """Each checkpoint resets the environments: 20 of these 40 iterations would end no long episode."""
    reset_envs, keys = ppo.reset_envs, []

    def recorded_reset(envs, agent, *key):
        keys.append(key)
        return reset_envs(envs, agent, *key)

    monkeypatch.setattr(ppo, "reset_envs", recorded_reset)
    flags = f"{SHORT} --total-timesteps 1280 --num-steps 16 --run-dir run"
    call_main(flags, tmp_path, monkeypatch)
    assert keys == [(1, 0, 0), (1, 0, 40), (1, 2**31), (1, 2**31)]  # the last two are evaluations


def test_interrupted_in_its_evaluation(cartpole, monkeypatch):
    """Ctrl-C there has nothing to save, and no traceback to show."""
    def interrupt(*_):
        raise KeyboardInterrupt

    for module in map(importlib.import_module, [script.stem for script in SCRIPTS]):
        monkeypatch.setattr(module, "load_checkpoint", interrupt)
        with pytest.raises(SystemExit) as stop:
            call_main(f"--evaluate '{cartpole[0]}'", cartpole[0].parent, monkeypatch, module)
        assert stop.value.code == 130


@pytest.mark.parametrize("moment", ["rollout", "train_step", "evaluate"])
def test_ctrl_c_at_any_moment_has_status_130(moment, tmp_path, monkeypatch):
    function, calls = getattr(ppo, moment), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == (1 if moment == "evaluate" else 12):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return function(*args)

    monkeypatch.setattr(ppo, moment, interrupted)
    with pytest.raises(SystemExit) as stop:
        call_main(f"{SHORT} --total-timesteps 640 --checkpoint-every 1 --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code == 130 and not (tmp_path / "run" / "summary.json").exists()
    saved = {"rollout": 10, "train_step": 2, "evaluate": 20}[moment]
    assert load(tmp_path / "run")["progress"]["iteration"] == saved


def test_weights_and_biases_are_told_everything(tmp_path, monkeypatch):
    told = []
    wandb = ModuleType("wandb")
    wandb.init = lambda **settings: told.append(settings)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    call_main(f"{SHORT} --track --wandb-entity team --run-dir run", tmp_path, monkeypatch)
    settings, = told
    assert (settings["project"], settings["entity"], settings["name"]) == ("ppo", "team", "run")
    assert settings["config"]["num_envs"] == 2 and settings["sync_tensorboard"]


def test_without_weights_and_biases_track_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as stop:
        call_main(f"{SHORT} --track --run-dir run", tmp_path, monkeypatch)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "wandb" in err and err.count("\n") == 1


def test_a_tracked_run_is_evaluated_without_weights_and_biases(cartpole, tmp_path, monkeypatch, capsys):
    shutil.copytree(cartpole[0], tmp_path / "run")
    change(tmp_path / "run" / "checkpoint.pt", "args", track=True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    call_main("--evaluate run", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("  return ") == 2 and printed in cartpole[1]


# ------------------------------------------------------------------------------------------------ compilation


def test_compiled_run_agrees_with_eager(cartpole, tmp_path):
    done = run(tmp_path, f"{SHORT} --compile --run-dir run")
    assert "compiling: the first iteration takes up to a minute\n" in done.stdout
    compiled, eager = (read_metrics(run_dir) for run_dir in (tmp_path / "run", cartpole[0]))
    assert len(compiled) == len(eager)
    for name in LOSSES:
        assert float(compiled[0][name]) == pytest.approx(float(eager[0][name]), rel=1e-2, abs=1e-5), name


def test_a_broken_compiler_is_one_sentence(tmp_path, monkeypatch, capsys):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(config.cpp, "cxx", (None, "/bin/false"))
    monkeypatch.setattr(ppo.shutil, "which", lambda name: "/bin/false")
    torch.compiler.reset()
    with pytest.raises(SystemExit) as stop:
        call_main(f"{SHORT} --compile --run-dir run", tmp_path, monkeypatch)
    lines = capsys.readouterr().err.replace("\x1b[A", "").splitlines()  # other tests' bars
    error = [line for line in lines if "steps, " not in line and line]
    assert stop.value.code == 2 and len(error) == 1 and error[0].startswith("error: ")
    assert "ompiler" in error[0] and "--no-compile" in error[0]


def edited_script(folder, place):
    """The script with a reader's edit: a weight of the value loss that grows from iteration to iteration."""
    source = SCRIPT.read_text()
    first = "    global SCALE" if place == "SCALE" else "    pass"
    edits = {"loss = pg_loss - ent_coef * entropy + vf_coef * v_loss":
             f"loss = pg_loss - ent_coef * entropy + {place} * vf_coef * v_loss",
             "        args = read_live(": f"        {place} = float(iteration)\n        args = read_live(",
             "    act, step = agent.act, train_step\n":
             f"{first}\n    act, step = agent.act, train_step\n"}
    for old, new in edits.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = folder / f"edited_{place.replace('.', '_')}.py"
    path.write_text(source)
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", ["SCALE", "agent.scale", "agent.args.scale"])
def test_a_number_that_a_reader_changes_is_not_frozen_by_compilation(place, backend, tmp_path, monkeypatch):
    """Tracing with the script's own guards is enough to see that, without a compiler."""
    compile_, traced = torch.compile, []

    def trace(function, options):
        traced.append(function)
        guards = {name: x for name, x in options.items() if name == "guard_filter_fn"}
        return compile_(function, backend="eager", options=guards)

    if backend == "eager":
        monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(ppo.shutil, "which", lambda name: name)
    torch.compiler.reset()
    module = edited_script(tmp_path, place)
    monkeypatch.setattr(module, "evaluate", lambda *_: {"eval_mean": 0.0})
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    args = {"env_id": "Pendulum-v1", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2,
            "total_timesteps": 256, "learning_rate": 1e-2, "target_kl": None, "share_network": True}
    for name, compiled in (("eager", False), ("compiled", True)):
        module.train(module.Args(**args, compile=compiled, run_dir=str(tmp_path / name)))
    assert len(traced) == 2 or backend == "inductor"
    eager, compiled = (read_metrics(tmp_path / name) for name in ("eager", "compiled"))
    assert len(eager) == 4
    params = [load(tmp_path / name)["opt"]["params"] for name in ("eager", "compiled")]
    torch.testing.assert_close(*params, rtol=1e-3, atol=1e-4)
    frozen = ppo.Args(**args, compile=False, run_dir=str(tmp_path / "frozen"))
    ppo.train(frozen)  # with the number of iteration 1
    assert not torch.allclose(load(tmp_path / "frozen")["opt"]["params"], params[0], rtol=1e-2, atol=1e-3)


# ------------------------------------------------------------------------------------- live changes and NaN


def test_live_changes(tmp_path):
    (tmp_path / "toys.py").write_text(TOYS)
    flags = "--env-id toys:Live-v0 --no-anneal-lr --target-kl 0.02 --total-timesteps 256 --run-dir run"
    printed = run(tmp_path, f"{SHORT} {flags}").stdout
    said = [line for line in printed.splitlines() if "live.json" in line]
    assert [line.split(": ")[0] for line in said] == ["step 64", "step 128", "step 160", "step 192"]
    assert "{'learning_rate': 0.001, 'gamma': 0.9, 'vf_coef': 1}; it can change" in said[0]
    assert all(f"'{name}'" in said[0] for name in ppo.LIVE_FLAGS)
    assert "Expecting property name" in said[1]  # no JSON
    assert "update_epochs = 1.5 is not in range" in said[2]  # then nothing in it is taken
    assert "{'update_epochs': 1, 'target_kl': None}" in said[3]
    read = {path.name: path.read_text() for path in (tmp_path / "run").glob("live*")}
    assert set(read) == {f"live-{step}.json" for step in (64, 128, 160, 192)}
    assert read["live-128.json"] == "{no json"
    args = load(tmp_path / "run")["args"]
    assert {name: args[name] for name in ppo.LIVE_FLAGS} == {
        "clip_coef": 0.2, "ent_coef": 0.0, "learning_rate": 1e-3, "target_kl": None, "update_epochs": 1,
        "vf_coef": 1}
    assert args["gamma"] == 0.99
    rows = read_metrics(tmp_path / "run")
    assert [float(row["learning_rate"]) for row in rows] == [3e-4] * 2 + [1e-3] * 6
    assert [int(row["epochs"]) for row in rows] == [2] * 6 + [1] * 2


def test_live_changes_last_after_a_resume(cartpole, tmp_path, monkeypatch):
    shutil.copytree(cartpole[0], tmp_path / "run")
    change(tmp_path / "run" / "checkpoint.pt", "args", update_epochs=1)
    call_main("--resume run --total-timesteps 160", tmp_path, monkeypatch)
    assert [int(row["epochs"]) for row in read_metrics(tmp_path / "run")] == [2] * 4 + [1]


@pytest.mark.parametrize("content", [
    '{"vf_coef": 1' + "0" * 400 + "}", '{"vf_coef": "high"}', "[1, 2]", "7", "\xff", '{"learning_rate": NaN}',
    '{"target_kl": "0.02"}', '{"update_epochs": 0}', '{"clip_coef": -1}', '{"ent_coef": null}', None])
def test_live_file_that_is_not_understood_changes_nothing(tmp_path, capsys, content):
    path, args, log = tmp_path / "live.json", small_args("CartPole-v1"), SimpleNamespace(run_dir=tmp_path)
    assert ppo.read_live(args, log, 0) is args and capsys.readouterr().out == ""
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode("latin-1"))
    assert ppo.read_live(args, log, 96) == args
    printed = capsys.readouterr().out
    assert printed.startswith("step 96: live.json ") and printed.count("\n") == 1
    assert not path.exists() and (tmp_path / "live-96.json").exists()
    assert ppo.read_live(args, log, 128) is args and capsys.readouterr().out == ""  # told once


def test_live_flags_are_flags():
    assert set(flag_docs(SCRIPT.read_text())).issuperset(ppo.LIVE_FLAGS)


def test_nan_reward_stops_and_keeps_the_checkpoint(tmp_path):
    (tmp_path / "toys.py").write_text(TOYS)
    flags = "--env-id toys:Nan-v0 --total-timesteps 320 --checkpoint-every 2 --run-dir run"
    error = run(tmp_path, f"{SHORT} {flags}", code=1).stderr
    assert "error: rewards not finite in iteration 4" in error and "Traceback" not in error
    checkpoint = load(tmp_path / "run")
    assert checkpoint["progress"]["iteration"] == 2
    assert checkpoint["opt"]["params"].isfinite().all()
    assert not (tmp_path / "run" / "summary.json").exists()


# ------------------------------------------------------------------------------------------ more processes


def test_two_processes(tmp_path):
    """Same gradients, different environments; no rank waits for another when target_kl ends the epochs."""
    flags = "--total-timesteps 640 --update-epochs 4 --learning-rate 3e-3 --target-kl 3e-3 --norm-reward"
    _, obs = train_in_two_processes(tmp_path, SCRIPT, f"{SHORT} {flags}")
    starts = torch.cat([rank[1, 0] for rank in obs])  # (4, O), of iteration 1
    assert len(starts.unique(dim=0)) == 4
    rows = read_metrics(tmp_path / "run")
    assert [int(row["global_step"]) for row in rows] == list(range(64, 641, 64))
    assert {int(row["epochs"]) for row in rows} > {4}  # target_kl stopped some
    assert load(tmp_path / "run")["agent"]["obs_rms.count"] == 640 + 64


# ---------------------------------------------------------------------------------- dependencies, shared code


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_block_is_in_the_requirements(script):
    """With the same versions, and no extra that is not installed."""
    required = requirements()
    for name, (version, extras) in dependencies(script).items():
        assert version == required[name][0] and extras <= required[name][1], name


def test_the_requirements_are_those_of_the_scripts():
    """And moviepy, which only --capture-video needs."""
    found = {}
    for script in SCRIPTS:
        for name, (version, extras) in dependencies(script).items():
            found[name] = version, extras | found.get(name, (version, set()))[1]
    required = requirements()
    required.pop("moviepy")
    found.pop("moviepy", None)
    assert found == required


def by_name(lines):
    """Version and extras of each package."""
    found = {}
    for line in lines:
        name, extras, version = re.fullmatch(r"([\w-]+)(?:\[(.*)\])?(.*)", line).groups()
        assert found.get(name, (version,))[0] == version, f"two versions of {name}"
        found[name] = version, set((extras or "").split(",")) - {""} | found.get(name, (0, set()))[1]
    return found


def requirements():
    lines = (ROOT / "requirements.txt").read_text().split("# tests")[0].splitlines()
    return by_name(line for line in lines if line and not line.startswith("#"))


def dependencies(script):
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script.read_text())[1]
    toml = "\n".join(line.removeprefix("#").strip() for line in block.splitlines())
    assert 'requires-python = ">=3.10"' in toml
    found = ast.literal_eval(re.search(r"dependencies = (\[.*\])", toml, re.DOTALL)[1])
    assert len(by_name(found)) == len(found) > 3
    return by_name(found)


# In every script the same room of other furniture.
ROOMS = {"Agent", "evaluate", "main", "make_agent", "make_envs", "reset_envs", "rollout", "train",
         "train_step"}
# Flags that are something else in one script than in the others.
OTHER_DOCS = {
    "ppo_atari.py": {"env_id"},
    "muesli_cartpole.py": {"learning_rate", "norm_adv"},
    "rl2_meta.py": {"capture_video", "env_id", "learning_rate"},
}


def definitions(source):
    """Source of every function and class of a file, decorators included, and of every flag's doc."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":  # flags differ, their docs must not
            found |= {f"doc of {name}": re.sub(r"\s*\[[DXS0-9, ]+\]", "", doc)  # but for their source
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
            if name in ROOMS or name.removeprefix("doc of ") in OTHER_DOCS.get(file, ()):
                continue
            other, before = seen.setdefault(name, (file, text))
            diff = difflib.unified_diff(before.splitlines(), text.splitlines(), other, file, lineterm="")
            diffs += ["\n".join([name, *diff])] if text != before else []
    return diffs


def test_shared_code_is_identical():
    sources = {script.name: script.read_text() for script in SCRIPTS}
    assert len(definitions(sources["ppo_continuous.py"])) > 70  # flags included
    assert "\n\n".join(differences(sources)) == ""


def test_differences_are_found():
    one = "class Args:\n    a: int = 1  # doc [D1]\n@cached\ndef f():\n    return 1\ndef train(): pass\n"
    same = one.replace("int = 1", "int = 3").replace("train()", "train(x)").replace(" [D1]", "")
    assert differences({"one": one, "two": same}) == []
    for old, new in (("return 1", "return 2"), ("@cached\n", ""), ("doc", "other")):
        diff, = differences({"one": one, "two": one.replace(old, new)})
        assert "--- one" in diff and "+++ two" in diff
