"""Settings of the tests, and short runs of every script that several files look at."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread in each of pytest's processes
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import pytest
import torch
from filelock import FileLock  # PyTorch needs it, too
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
# Runs of some seconds, with checkpoints in the middle and at the end, between which episodes fit.
SHORT = {
    "ppo_continuous": """--env-id CartPole-v1 --env-kwargs {"max_episode_steps":20} --num-envs 2
        --num-steps 16 --total-timesteps 128 --num-minibatches 2 --update-epochs 2
        --checkpoint-every 2 --eval-episodes 3 --no-compile""",
    "ppo_atari": """--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2
        --update-epochs 2 --checkpoint-every 2 --eval-episodes 1 --screen-size 36 --max-frames 60
        --device cpu --precision fp32 --torch-threads 1 --env-threads 1 --no-compile""",
    "muesli_cartpole": """--env-kwargs {"max_episode_steps":20} --num-envs 2 --train-frequency 8
        --total-timesteps 600 --batch-size 4 --hidden-size 16 --learning-starts 100
        --eval-frequency 250 --checkpoint-every 10 --eval-episodes 3""",
    "rl2_meta": """--total-timesteps 640 --num-trials 16 --rnn-hidden 16 --checkpoint-every 2
        --test-trials 50""",
}
SHORT = {script: " ".join(map(shlex.quote, flags.split())) for script, flags in SHORT.items()}
SCRIPTS = tuple(SHORT)
all_scripts = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(autouse=True)
def one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tqdm._instances.clear()  # bars of runs that a test stopped would move the next one's


def run_python(words, folder, status=0, timeout=300):
    """Start an interpreter in that folder. Returns what it printed: stdout, stderr."""
    command = [sys.executable, *shlex.split(words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(params=SCRIPTS)
def finished(request, tmp_path_factory):
    """A finished run, in the folder "run", of a script copied alone into an empty folder.

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
    return SimpleNamespace(
        script=script,
        module=importlib.import_module(script),
        folder=folder,
        out=printed.read_text(),
    )


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy of the finished run, which a test may change."""
    return shutil.copytree(finished.folder / "run", tmp_path / "run")


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """Function that calls a script's main in tmp_path. Returns stdout, stderr."""

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


@pytest.fixture
def stopped(main, monkeypatch):
    """Function that calls a script's main, with Ctrl-C after an iteration's checkpoint."""

    def call_main(script, flags, iteration):
        log = importlib.import_module(script).RunLog
        save = log.save

        def save_and_stop(self, saved, progress):
            save(self, saved, progress)
            if progress["iteration"] == iteration:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(log, "save", save_and_stop)
            main(script, flags, status=130)

    return call_main


@pytest.fixture
def changed_copy(tmp_path, monkeypatch):
    """Function that imports a copy of a script, changed by {old lines: new lines}."""

    def copy(script, edits):
        text, name = (ROOT / f"{script}.py").read_text(), f"changed_{script}"
        for old, new in edits.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return copy


def resume(main, script, flags=""):
    """Not in the second of the first start: event files are read in the order of their seconds."""
    time.sleep(1.1)
    return main(script, f"--resume run {flags}")


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", "cpu", weights_only=True)


def read_events(run_dir):
    """Scalars of a run: {tag: {step: value}}."""
    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    return {tag: {x.step: x.value for x in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def flat(value, name=""):
    """Tensors and numbers of nested dicts and lists, by the path to them."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: x for key, item in items for path, x in flat(item, f"{name}/{key}").items()}
    return {name: value}


def check_orthogonal(weight, gain):
    values = torch.linalg.svdvals(weight.flatten(1))
    torch.testing.assert_close(values, torch.full_like(values, gain), atol=1e-5, rtol=1e-4)


def ppo_loss(args, outputs, mb, ent_coef, clip_coef):
    """PPO's loss of a minibatch in float64, written out, and what is logged of it.

    Outputs: log-probabilities, entropies, values."""
    logprob, entropy, value = (x.double() for x in outputs)
    logratio, advantage = logprob - mb["logprobs"], mb["advantages"].double()
    ratio, low, high = logratio.exp(), 1 - clip_coef, 1 + clip_coef
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / advantage.std()
    inside = torch.where(advantage > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    errors = [value - mb["returns"]]
    if args.clip_vloss:
        old = mb["values"]
        errors.append(value.clamp(old - clip_coef, old + clip_coef) - mb["returns"])
    logged = {
        "policy_loss": -(inside * advantage).mean(),
        "value_loss": 0.5 * torch.stack(errors).square().amax(0).mean(),
        "entropy": entropy.mean(),
        "old_approx_kl": -logratio.mean(),
        "approx_kl": (ratio - 1 - logratio).mean(),
        "clipfrac": ((ratio > high) | (ratio < low)).double().mean(),
    }
    loss = logged["policy_loss"] + args.vf_coef * logged["value_loss"]
    return loss - ent_coef * logged["entropy"], logged


def flag_docs(script):
    """Trailing comment of each line of Args that is a flag."""
    args = re.search(
        r"^class Args:\n(.*?)(?=^\S)", (ROOT / f"{script}.py").read_text(), re.M | re.S
    )
    return dict(re.findall(r"^    (\w+): .+? = .+?  # (.+)$", args[1], re.MULTILINE))
