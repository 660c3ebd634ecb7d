"""The command line: help, presets, bad input, run folders, evaluation, live changes, compilers, torchrun."""

import importlib
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from conftest import PPO, ROOT, SCRIPTS, SHORT, finished_ppo, flag_docs, load, read_metrics, run_python

import ppo_atari as ppo

PPO_SCRIPTS = ("ppo_atari",)
all_scripts = pytest.mark.parametrize("script", SCRIPTS)

def unboxed(text):
    """Text in tyro's boxes on one line, without colors."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"[\s│╭╮╰╯─]+|-{5,}", " ", text)

# ----------------------------------------------------------------------------------------------------- help

@all_scripts
def test_help_shows_every_flag_with_its_comment(script, main):
    module = importlib.import_module(script)
    text, docs = unboxed(main(script, "--help")[0]), flag_docs(module)
    assert list(docs) == [field.name for field in fields(module.Args)]
    for name, doc in docs.items():
        assert len(re.sub(r"\[.*?\]", "", doc).split()) <= 12, f"{name}: {doc}"
        assert re.search(rf" --{name.replace('_', '-')}\b", text), name
        assert " ".join(doc.split()) in text, f"{name}: {doc}"
    assert "--resume runs/RUN" in text  # the docstring's commands

@pytest.mark.parametrize(("script", "details"), [
    ("ppo_atari", {*range(1, 23), *range(32, 37)} - {12, 21}),
])  # fmt: skip
def test_every_detail_is_tagged(script, details):
    """In the code, and where it is a choice also in a flag's doc."""
    module = importlib.import_module(script)
    tags = [{int(x) for group in re.findall(r"\[(D\d+(?:, [DX]\d+)*)\]", text)
             for x in re.findall(r"D(\d+)", group)}
            for text in (Path(module.__file__).read_text(), str(flag_docs(module)))]
    assert tags[0] >= details
    assert tags[1] >= details - {12, 23, 25, 37}  # what is logged, the distributions

# -------------------------------------------------------------------------------------------------- presets

@pytest.fixture
def args_of(main, monkeypatch):
    """Function that returns what a script's main would train with."""
    def parse(script, flags):
        got = []
        monkeypatch.setattr(importlib.import_module(script), "train", lambda args, _: got.append(args))
        main(script, flags)
        return got[0]
    return parse

@pytest.mark.parametrize(("script", "name"), [(script, name) for script in SCRIPTS
                                              for name in importlib.import_module(script).PRESETS])
def test_every_preset_is_taken(script, name, args_of):
    """By itself, too, if it is named like the environment, and that of simulators with a sampler."""
    module, where = importlib.import_module(script), {} if re.fullmatch(r"[a-z]+", name) else {"env_id": name}
    if name == "simulator":
        where = {"env_id": "CartPole-v1", "task_sampler": "some:f"}
    flags = " ".join(f"--{flag.replace('_', '-')} {x}" for flag, x in where.items())
    args = module.Args(preset=name, **where, **module.PRESETS[name])
    assert args_of(script, f"{flags} --preset {name}") == args
    assert [flag for flag, x in module.PRESETS[name].items() if x == getattr(module.Args(), flag)] == []
    if where:
        assert args_of(script, flags) == args
        assert args_of(script, f"{flags} --preset none") == module.Args(preset="none", **where)

CLEANRL = {"anneal_lr": True, "adam_eps": 1e-5, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True,
           "clip_vloss": True, "anneal_clip": False, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None,
           "ortho_init": True, "recompute_adv": False, "norm_value": False, "truncation_bootstrap": False}
CLEANRL_ATARI = CLEANRL | {
    "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 2.5e-4,
    "clip_coef": 0.1, "ent_coef": 0.01, "share_network": True, "frame_stack": 4, "precision": "fp32"}

@pytest.mark.parametrize(("script", "flags", "preset", "values"), [
    ("ppo_atari", "--preset historical", "historical", CLEANRL_ATARI),
    ("ppo_atari", "--preset lstm --frame-stack 2", "lstm", {"frame_stack": 2, "rnn": "lstm"}),
    ("muesli_cartpole", "--env-id Acrobot-v1 --gamma 0.9", "Acrobot-v1", {"gamma": 0.9, "value_max": 2.0}),
    ("rl2_meta", "--env-id AntDir --preset HalfCheetahDir --gamma 0.9", "HalfCheetahDir",
     {"gamma": 0.9, "num_trials": 8}),
    ("rl2_meta", "--env-id Pendulum-v1 --task-sampler a:b", "simulator", {"rnn": "lstm", "gamma": None}),
])  # fmt: skip
def test_flags_win_over_presets(script, flags, preset, values, args_of):
    args = args_of(script, flags)
    assert args.preset == preset
    assert {name: getattr(args, name) for name in values} == values

# ------------------------------------------------------------------------------------------------ the README

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(?:python|torchrun .*?) (\w+)\.py(.*?)(?:  #.*)?$", README, re.MULTILINE)

def test_commands_of_the_readme_are_understood(args_of):
    new_runs = [(script, flags) for script, flags in COMMANDS
                if script in SCRIPTS and not re.search("--(help|evaluate|resume)|corridor", flags)]
    assert {script for script, _ in new_runs} == {*SCRIPTS}
    for script, flags in new_runs:
        assert f"--env-id {args_of(script, flags).env_id}" in flags

# ------------------------------------------------------------------------------------------------ bad input

gym.register("NoLimit-v0", gym.spec("CartPole-v1").entry_point)

COMMON = [
    ("--gamma 1.5", "gamma = 1.5 is not in range: 0 to 1"),
    ("--learning-rat 1", "--learning-rate"),
    ("--device quantum", "device quantum: "),
    ("--preset nothing", "preset nothing is none of none, "),
    ("--resume nowhere", "'nowhere' holds no run of this script"),
    ("--evaluate ''", "'' holds no run of this script"),
]
BAD_FLAGS = {
    "ppo_atari": [
        ("--env-id Brekout", "Brekout is no single-player game of ALE; close names: ['breakout'"),
        ("--env-id ALE/Pong-v99", "ALE/Pong-v99 is no single-player game of ALE; close names: ['pong']"),
        ("--rnn lstm --num-minibatches 4", "must divide 2 sequences"),
        ("--rnn lstm --no-share-network", "an RNN needs share_network"),
        ("--screen-size 35", "screen_size = 35 is not in range: 36 to 1000"),
        ("--noop-max 2147483647", "noop_max = 2147483647 is not in range: 0 to 1000"),
        ("--total-timesteps 31", "total_timesteps = 31 leaves no rollout of 32 steps"),
    ],
    "muesli_cartpole": [
        ("--env-id CartPol-v1", "Did you mean: `CartPole`"),
        ("--env-id Pendulum-v1", "Box(-2.0, 2.0, (1,), float32) does not fit encoder mlp"),
        ("--env-id ShownWords-v0", "does not fit encoder mlp"),
        ("--encoder cnn", "with Discrete(2) does not fit encoder cnn"),
        ("--env-id ShownTiny-v0 --encoder cnn", "with Discrete(3) does not fit encoder cnn"),  # 2 x 2 pixels
        ("--hidden-size 1000000", "hidden_size = 1000000 is not in range: 2 to 10000"),
        ("--buffer-size 1000000000", "buffer_size: a replay of 44 GB"),
        ("--env-id Chain-v0 --capture-video", "Chain-v0: AssertionError: it renders nothing"),
        ("--value-min 1", "value_min = 1.0 is not in range"),
        ("--norm-adv-decay 1", "norm_adv_decay = 1.0 is not in range"),
        ("--buffer-size 43", "buffer_size, total_timesteps: at least 44 steps"),
        ("--total-timesteps 43", "buffer_size, total_timesteps: at least 44 steps"),
    ],
    "rl2_meta": [
        ("--env-id bandit", "env_id bandit, task_sampler None: give one of Bandit, TabularMDP, "),
        ("--env-id CartPole-v1", "or a Gymnasium id and a task_sampler"),
        ("--task-sampler some:f", "env_id Bandit, task_sampler some:f: give one"),
        ("--task-sampler some:f --env-id CartPole-v1", "task_sampler some:f, module:function(env, rng)"),
        ("--task-sampler some:f --env-id CartPol-v1", "Did you mean: `CartPole`"),
        ("--task-sampler some:f --env-id ShownWords-v0", "is not supported"),
        ("--task-sampler some:f --env-id Chain-v0 --capture-video", "it renders nothing"),
        ("--task-sampler some:f --env-id CartPole-v1 --num-arms 3", "num_arms is of no use in CartPole-v1"),
        ("--env-id TabularMDP --episode-length 3", "episode_length is of no use in TabularMDP"),
        ("--capture-video", "capture_video is of no use in Bandit"),
        ("--preset AntDir", "norm_obs is of no use in Bandit"),
        ("--num-trials 10 --num-minibatches 4", "4 minibatches (2+ steps) must divide 10 trials"),
        ("--num-trials 4 --num-minibatches 4 --episodes-per-trial 1", "(2+ steps) must divide 4 trials"),
        ("--total-timesteps 159", "total_timesteps = 159 leaves no rollout of 160 steps"),
        ("--env-id HalfCheetahDir --num-trials 8 --total-timesteps 6399", "leaves no rollout of 3200 steps"),
    ],
}

def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

@pytest.fixture
def refused(main, tmp_path):
    """Function that calls main: status 2, one sentence, which is returned, and nothing is written."""
    def call(script, flags):
        before = contents(tmp_path)
        out, err = main(script, flags, status=2)
        assert out == "" and contents(tmp_path) == before
        ours = err.startswith("error: ") and err.count("\n") == 1
        assert ours or re.search("[─-]{9}", err)  # or tyro's box
        return unboxed(err)
    return call

@pytest.mark.parametrize(("script", "flags", "words"), [
    (script, *row) for script, rows in BAD_FLAGS.items() for row in COMMON + rows])
@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_bad_flags(script, flags, words, refused):
    assert words in refused(script, f"{SHORT[script]} {flags}")

@all_scripts
def test_every_number_has_a_range(script):
    module = importlib.import_module(script)
    default, more = module.Args(), [module.Args()] if script == "rl2_meta" else []
    numbers = {field.name: field.type for field in fields(default)
               if field.type in (int, float, float | None) and field.name != "stop_return"}
    assert len(numbers) > 20
    for name, kind in numbers.items():
        low, high = module.RANGES.get(name, (0, 10**12))
        for value in (low - 1, high + 1, high - 0.5 if kind is int and script in PPO_SCRIPTS else math.nan):
            with pytest.raises(module.UsageError, match=f"{name} = {value} is not in range: "):
                replace(default, **{name: value}).check(*more)

@pytest.mark.parametrize(("script", "package", "flags"), [
    ("muesli_cartpole", "wandb", "--track"), ("rl2_meta", "wandb", "--track"),
    ("ppo_atari", "wandb", "--track"), ("ppo_atari", "ale_py", ""),
    *((script, "moviepy", "--capture-video") for script in SCRIPTS[:2]),
    ("rl2_meta", "moviepy", "--env-id HalfCheetahDir --total-timesteps 64000 --capture-video"),
])  # fmt: skip
def test_a_missing_package_is_one_sentence(script, package, flags, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert package in refused(script, f"{SHORT[script]} {flags}")

def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

def change(path, part, **values):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[part] |= values
    torch.save(checkpoint, path)

@finished_ppo
@pytest.mark.parametrize(("spoil", "flags", "words"), [
    (Path.unlink, "--resume run", "'run' holds no run of this script: [Errno 2]"),
    (truncate, "--resume run", "'run' holds no run of this script: "),
    (lambda path: path.write_bytes(b"noise"), "--resume run", "'run' holds no run of this script: "),
    (lambda path: torch.save([1, 2], path), "--resume run", "'run' holds no run of this script: "),
    (None, "--resume run --num-minibatches 3", "must divide 32 sequences"),
    (None, "--resume run --total-timesteps 64", "total_timesteps = 64 leaves no rollout of 32 steps"),
    (None, f"{SHORT[PPO]} --run-dir run", "File exists: 'run'"),
    (None, f"{SHORT[PPO]} --run-dir run/args.json/new", "Not a directory: 'run/args.json/new'"),
])  # fmt: skip
def test_bad_run_folder(spoil, flags, words, finished, run_dir, refused):
    if spoil:
        spoil(run_dir / "checkpoint.pt")
    assert words in refused(PPO, flags)

FIXED = {"ppo_atari": ("--env-id Pong", "--preset lstm", "--run-dir other"),
         "muesli_cartpole": ("--env-id Acrobot-v1", "--preset Acrobot-v1", "--run-dir other", "--num-envs 4",
                             "--buffer-size 1000", "--value-min -1", "--value-max 1"),
         "rl2_meta": ("--env-id TabularMDP", "--preset hundred", "--run-dir other")}

def test_a_checkpoint_that_does_not_fit(finished, run_dir, refused):
    """Of another environment or another script."""
    script, path = finished.script, run_dir / "checkpoint.pt"
    assert "the checkpoint does not fit" in refused(script, f"--evaluate run {FIXED[script][0]}")
    for flags in FIXED[script]:
        assert "of a run cannot change" in refused(script, f"--resume run {flags}")
    assert "of a run cannot change" in refused(script, f"--evaluate run {FIXED[script][1]}")
    other = importlib.import_module(SCRIPTS[SCRIPTS.index(script) - 1])
    change(path, "args", **asdict(other.Args()))
    assert "'run' holds no run of this script: " in refused(script, "--resume run")

# -------------------------------------------------------------------------------- what stops a running script

@pytest.mark.parametrize(("script", "part", "name"), [
    *((script, "losses", "policy_loss") for script in PPO_SCRIPTS), ("rl2_meta", "losses", "policy_loss"),
    ("muesli_cartpole", "losses", "losses"), ("muesli_cartpole", "obs", "obs"),
    ("muesli_cartpole", "next_obs", "next_obs"),
    ("rl2_meta", "obs", "observations"),
    *((script, "rewards", "rewards") for script in ("muesli_cartpole", "rl2_meta")),
])  # fmt: skip
def test_what_is_not_finite_stops_the_run(script, part, name, main, tmp_path, monkeypatch):
    """And the last checkpoint stays."""
    module, run_dir = importlib.import_module(script), tmp_path / "run"
    place = "train_step" if part == "losses" else "rollout"
    function = getattr(module, place)

    def broken(*args):
        result = function(*args)
        if (run_dir / "checkpoint.pt").exists():
            own = {"losses": lambda: args[-1][:1], "next_obs": lambda: torch.from_numpy(args[2].obs)}
            own.get(part, lambda: result[0][part])().fill_(math.nan)
        return result

    monkeypatch.setattr(module, place, broken)
    sampled = "--cmpo sampled" if script == "muesli_cartpole" else ""  # which refuses NaN itself
    _, err = main(script, f"{SHORT[script]} {sampled} --run-dir run", status=1)
    saved = load(run_dir)
    iteration = saved["progress"]["iteration"]
    message = f"error: {name} not finite in iteration {iteration + 1}; the last checkpoint, if any, is kept"
    assert err.splitlines()[-1] == message
    assert all(x.isfinite().all() for x in saved["agent"].values())
    assert not (run_dir / "summary.json").exists()

@all_scripts
@pytest.mark.parametrize("moment", ["make_agent", "train_step", "evaluate"])
def test_ctrl_c_has_status_130(script, moment, main, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    monkeypatch.setattr(module, moment, lambda *_: signal.raise_signal(signal.SIGINT))
    _, err = main(script, f"{SHORT[script]} --run-dir run", status=130)
    assert "Error" not in err and not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoint.pt").exists() == (moment == "evaluate")

# ------------------------------------------------------------------------------------- run folders, console

def test_default_run_folders(tmp_path, monkeypatch):
    """Two runs of one second have folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo.time, "time", lambda: 1000.5)
    for end in ("", f"_{os.getpid()}"):
        log = ppo.RunLog(ppo.Args(env_id="probes:Bandit-v0", exp_name="../../x", seed=7), "cpu", 0)
        log.writer.close()
        assert log.run_dir == Path("runs", f"probes_Bandit-v0__.._.._x__7__1000{end}")
        assert (log.run_dir / "args.json").exists()

def test_progress_is_a_line_every_half_minute(tmp_path, capsys, monkeypatch):
    """Where there is no terminal. No return yet is "-"."""
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    log = ppo.RunLog(ppo.Args(run_dir=str(tmp_path / "run"), total_timesteps=6400), "cpu", 0)
    for step in range(64, 6401, 64):
        clock[0] += 10.0
        progress = {"global_step": step, "seconds": clock[0], "episodes": [(0, 7.0, 7)] * (step > 640)}
        log.write(progress, {"learning_rate": 1e-3}, {"value_loss": 1.0})
    log.writer.close()
    lines = [line for line in capsys.readouterr().err.splitlines() if "/6400 steps" in line]
    steps = [int(re.search(r"(\d+)/6400", line)[1]) for line in lines]
    assert steps[:2] == [0, 64]  # the first iteration is shown at once
    assert max(later - step for step, later in pairwise(steps)) <= 3 * 64
    returns = [line.split("return ")[1].strip() for line in lines if "return" in line]
    assert set(returns) == {"-", "7.0"} and sorted(returns) == returns

# ----------------------------------------------------------------------------------------------- evaluation

OWN = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

gym.register("{script}-v0", CartPoleEnv, max_episode_steps=7)

def sample(env, rng):
    env.gravity = rng.uniform(5, 15)
"""
ZERO_REWARDS = """--env-kwargs '{"sutton_barto_reward": true}'"""

@pytest.mark.parametrize(("script", "flags", "videos", "score"), [
    ("muesli_cartpole", ZERO_REWARDS, 1, 0.0),
    ("rl2_meta", "--task-sampler own_rl2_meta:sample --episode-length 7 --total-timesteps 448", 2, 14.0),
])  # fmt: skip
def test_environments_and_samplers_of_a_module_in_the_current_folder(script, flags, videos, score, main,
                                                                      tmp_path):
    """The run goes into the default folder; its flags stay with it, also where it is recorded."""
    moviepy = pytest.importorskip("moviepy")
    (tmp_path / f"own_{script}.py").write_text(OWN.format(script=script))
    printed, _ = main(script, f"{SHORT[script]} --env-id own_{script}:{script}-v0 {flags} --device auto")
    run_dir, = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith(f"own_{script}_{script}-v0__{script}__1__")
    assert re.findall(r"return (.*?) \+-", printed) == [f"{score:.{3 if script == 'rl2_meta' else 1}f}"] * 2
    assert main(script, f"--evaluate runs/{run_dir.name} --capture-video")[0] in printed
    paths = sorted((run_dir / "videos").glob("*.mp4"))
    assert len(paths) == videos
    for path in paths:
        with moviepy.VideoFileClip(str(path)) as clip:
            assert round(clip.duration * clip.fps) in (7, 8)
            assert clip.get_frame(clip.duration / 2).std() > 1

@pytest.mark.parametrize(("finished", "env_id", "limit"), [
    ("muesli_cartpole", "CartPole-v1", 500), ("muesli_cartpole", "NoLimit-v0", 27_000),
], indirect=["finished"])  # fmt: skip
def test_episodes_without_an_end_are_cut(finished, env_id, limit, run_dir, main, monkeypatch):
    """The first of three has one."""
    lengths = []

    def endless(envs, agent, *_):
        lengths.append(getattr(agent.args, "num_steps", 8))
        return {}, [(0, 6.0, 6)]

    monkeypatch.setattr(finished.module, "rollout", endless)
    out, err = main(finished.script, f"--evaluate run --env-id {env_id}")
    assert sum(lengths) // 2 - limit in range(16)
    said = "2 of 3 have no end: cut after {} steps"
    assert (out + err).count(said.format(limit)) == 2
    assert out.count("return 2.0 +- 2.8, from 0.0 to 6.0") == 2

# --------------------------------------------------------------------------------------------- live changes

@pytest.mark.parametrize("script", PPO_SCRIPTS)
def test_live_changes(script, main, tmp_path, monkeypatch):
    """A file that appears in a rollout is read before the next. They last after a resume."""
    module, run_dir = importlib.import_module(script), tmp_path / "run"
    rollout, metrics = module.rollout, run_dir / "metrics.csv"
    changes = ['{"learning_rate": 0.001, "gamma": 0.9}', "{no json",
               '{"learning_rate": 0.002, "update_epochs": 1.5}', '{"update_epochs": 1, "target_kl": null}']

    def changing_rollout(*args):
        if changes and metrics.exists() and metrics.stat().st_size > 0:  # after the first iteration
            (run_dir / "live.json").write_text(changes.pop(0))
        return rollout(*args)

    monkeypatch.setattr(module, "rollout", changing_rollout)
    flags = "--no-anneal-lr --target-kl 9 --total-timesteps 192 --run-dir run"
    out, _ = main(script, f"{SHORT[script]} {flags}")
    said = [line for line in out.splitlines() if "live.json" in line]
    assert [line.split(": ")[0] for line in said] == ["step 64", "step 96", "step 128", "step 160"]
    assert "Expecting property name" in said[1] and "update_epochs = 1.5 is not in range" in said[2]
    assert all(f"'{name}'" in said[0] for name in module.LIVE_FLAGS)
    args = load(run_dir)["args"]
    assert (args["learning_rate"], args["gamma"], args["target_kl"]) == (1e-3, 0.99, None)
    main(script, "--resume run --total-timesteps 224")
    rows = read_metrics(run_dir)
    assert [float(row["learning_rate"]) == 1e-3 for row in rows] == [False] * 2 + [True] * 5
    assert [int(row["epochs"]) for row in rows] == [2] * 5 + [1] * 2

@pytest.mark.parametrize("content", [
    '{"vf_coef": 1' + "0" * 400 + "}", '{"vf_coef": "high"}', "[1, 2]", "\xff", '{"learning_rate": NaN}',
    '{"target_kl": "0.02"}', '{"update_epochs": 0}', '{"clip_coef": -1}', '{"ent_coef": null}', None])
def test_a_live_file_that_is_not_understood_changes_nothing(content, tmp_path, capsys):
    """It is said once."""
    path, args, log = tmp_path / "live.json", ppo.Args(), SimpleNamespace(run_dir=tmp_path)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode("latin-1"))
    assert ppo.read_live(args, log, 96) is args
    printed = capsys.readouterr().out
    assert printed.startswith("step 96: live.json ") and printed.count("\n") == 1
    assert not path.exists() and (tmp_path / "live-96.json").exists()
    assert ppo.read_live(args, log, 128) is args and capsys.readouterr().out == ""

def test_a_resumed_run_reads_the_live_file_again(tmp_path):
    """Where the run did that was killed before the next checkpoint."""
    log = SimpleNamespace(run_dir=tmp_path)
    (tmp_path / "live.json").write_text('{"vf_coef": 1}')
    found = [ppo.read_live(ppo.Args(), log, step).vf_coef for step in (96, 128, 64, 96, 128)]
    assert found == [1, 0.5, 0.5, 1, 0.5]

# ------------------------------------------------------------------------------------------------ compilation

@pytest.mark.parametrize(("finished", "precision"), [
    pytest.param("ppo_atari", "--precision fp32", marks=pytest.mark.slow),
    pytest.param("ppo_atari", "--precision bf16", marks=pytest.mark.slow),
], indirect=["finished"])  # fmt: skip
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_compiled_run_agrees_with_eager(finished, precision, main, tmp_path):
    torch.compiler.reset()
    script = finished.script
    out, _ = main(script, f"{SHORT[script]} {precision} --compile --run-dir run")
    assert "compiling: the first iteration takes up to a minute\n" in out
    compiled, eager = (read_metrics(folder / "run") for folder in (tmp_path, finished.folder))
    rel, abs_ = (0.1, 1e-2) if "bf16" in precision else (1e-2, 1e-5)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
        one, two = (float(rows[0][name]) for rows in (compiled, eager))
        assert one == pytest.approx(two, rel=rel, abs=abs_), name

@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("script", "place"), [("ppo_atari", "args"), ("ppo_atari", "global")])
def test_a_number_that_changes_is_not_frozen_by_compilation(script, place, backend, main, tmp_path,
                                                            monkeypatch):
    """Tracing with the script's guards shows that, without a compiler. A huge epsilon stops Adam."""
    source, name = (ROOT / f"{script}.py").read_text(), f"edited_{script}"
    if place == "global":
        source = source.replace("(std + args.adam_eps)", "(std + EPS)")
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module, params = importlib.import_module(name), []
    module.EPS = 1e-5
    read_live, compile_ = module.read_live, torch.compile

    def change(args, log, global_step):
        if global_step:
            params.append(load(tmp_path / "run")["opt"]["params"])
        if global_step == 64:
            args.adam_eps = module.EPS = 1e9
        return read_live(args, log, global_step)

    def trace(function, options):
        return compile_(function, backend="eager", options={"guard_filter_fn": options["guard_filter_fn"]})

    if backend == "eager":
        monkeypatch.setattr(torch, "compile", trace)
        monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(module, "read_live", change)
    torch.compiler.reset()
    main(name, f"{SHORT[script]} --compile --checkpoint-every 1 --run-dir run")
    assert (params[1] - params[0]).abs().max() > 1e-5
    assert (params[2] - params[1]).abs().max() < 1e-9

# ------------------------------------------------------------------------------------------------- torchrun

RANKS = """
import importlib, os, sys, torch

module, seen = importlib.import_module(sys.argv[1]), []
def recorded(envs, agent, *args, rollout=module.rollout):
    seen.append((agent, rollout(envs, agent, *args)))
    return seen[-1][1]
module.rollout = recorded
del sys.argv[0]
module.main()
assert not torch.distributed.is_initialized()  # or gloo's threads may abort the exit
agent, (first, *_) = seen[0]
results = {"agent": agent.state_dict(), "obs": first["obs"]}
torch.save(results, f"{sys.argv[0]}/rank{os.environ['RANK']}.pt")
"""
IN_TWO_PROCESSES = {
    "ppo_atari": "--total-timesteps 256",
    "rl2_meta": """--env-id TabularMDP --preset none --episodes-per-trial 2 --test-every 1
        --total-timesteps 2560""",
}

def test_two_processes_train_the_same_weights(tmp_path, monkeypatch, main):
    (tmp_path / "ranks.py").write_text(RANKS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun, out = "-m torch.distributed.run --standalone --nproc-per-node=2", ""
    for script, flags in IN_TWO_PROCESSES.items():
        words = f"{torchrun} ranks.py {script} {SHORT[script]} {flags} --run-dir {script}"
        out += run_python(words, tmp_path)[0]
    rows, obs = {}, {}
    for script in IN_TWO_PROCESSES:
        ranks = [torch.load(tmp_path / script / f"rank{rank}.pt") for rank in range(2)]
        saved, obs[script] = load(tmp_path / script)["agent"], [rank["obs"] for rank in ranks]
        for rank in ranks:
            assert [name for name, x in saved.items() if not torch.equal(rank["agent"][name], x)] == []
        assert not torch.equal(*obs[script])
        rows[script] = read_metrics(tmp_path / script)
        steps = [int(row["global_step"]) for row in rows[script]]
        assert steps == [steps[0] * i for i in range(1, len(steps) + 1)]
        assert main(script, f"--evaluate {script}")[0] in out
    assert [len(x) for x in rows.values()] == [4, 4]  # iterations of twice the steps of one process
    assert len({row["test_return"] for row in rows["rl2_meta"]}) == 4  # known to all: else they would hang
    assert out.count(" trials, ") == 2  # the first alone evaluates
