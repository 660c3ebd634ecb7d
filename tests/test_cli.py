"""The command line: help, presets, the README's commands, bad input, what stops a run."""

import importlib
import json
import math
import re
import shlex
import signal
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, SHORT, all_scripts, flag_docs, load, read_events, run_python


def unboxed(text):
    """Text in tyro's boxes on one line, without colors."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"[\s│╭╮╰╯─]+|-{5,}", " ", text)


@all_scripts
def test_help_shows_every_flag_with_its_comment(script, main):
    module = importlib.import_module(script)
    text, docs = unboxed(main(script, "--help")[0]), flag_docs(script)
    assert list(docs) == [field.name for field in fields(module.Args)]
    for name, doc in docs.items():
        assert len(re.sub(r"\[.*?\]", "", doc).split()) <= 12, f"{name}: {doc}"
        assert re.search(rf" --{name.replace('_', '-')}\b", text), name
        assert " ".join(doc.split()) in text, f"{name}: {doc}"
    assert "--resume runs/RUN" in text  # the docstring's commands


@pytest.mark.parametrize(
    ("script", "details", "extra"),
    [
        ("ppo_continuous", {*range(1, 14), *range(23, 38)}, range(1, 5)),
        ("ppo_atari", {*range(1, 23), *range(32, 37)}, []),
    ],
)
def test_every_detail_is_tagged(script, details, extra):
    """In the code, and where it is a choice also in a flag's help."""
    texts = ((ROOT / f"{script}.py").read_text(), str(flag_docs(script)))
    in_code, in_help = ({int(x) for x in re.findall(r"\bD(\d+)", text)} for text in texts)
    assert in_code >= details and in_help >= details - {12, 23, 25, 37}
    assert all(f"[X{i}]" in texts[0] for i in extra)


@pytest.fixture
def args_of(main, monkeypatch):
    """Function that returns what a script's main would train with."""

    def parse(script, flags):
        got, module = [], importlib.import_module(script)
        monkeypatch.setattr(module, "train", lambda args, _: got.append(args))
        main(script, flags)
        return got[0]

    return parse


@pytest.mark.parametrize(
    ("script", "name"), [(x, y) for x in SCRIPTS for y in importlib.import_module(x).PRESETS]
)
def test_every_preset_is_taken(script, name, args_of):
    """By itself, too, if it is named like the environment; no line of it repeats a default."""
    module = importlib.import_module(script)
    where = {} if name.islower() else {"env_id": name}
    if name == "simulator":
        where = {"env_id": "CartPole-v1", "task_sampler": "some:f"}
    flags = " ".join(f"--{flag.replace('_', '-')} {x}" for flag, x in where.items())
    args = module.Args(preset=name, **where, **module.PRESETS[name])
    assert args_of(script, f"{flags} --preset {name}") == args
    defaults = module.Args()
    assert [flag for flag, x in module.PRESETS[name].items() if x == getattr(defaults, flag)] == []
    if where:
        assert args_of(script, flags) == args
        assert args_of(script, f"{flags} --preset none") == module.Args(preset="none", **where)
    assert args_of(script, f"{flags} --preset {name} --gamma 0.5") == replace(args, gamma=0.5)


CLEANRL = {
    "anneal_lr": True, "adam_eps": 1e-5, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True,
    "clip_vloss": True, "anneal_clip": False, "vf_coef": 0.5, "max_grad_norm": 0.5,
    "target_kl": None, "ortho_init": True, "truncation_bootstrap": False,
}  # fmt: skip
HISTORICAL = {
    "ppo_atari": {
        "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4,
        "learning_rate": 2.5e-4, "clip_coef": 0.1, "ent_coef": 0.01, "share_network": True,
        "frame_stack": 4, "precision": "fp32",
    },
    "ppo_continuous": {
        "num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10,
        "learning_rate": 3e-4, "clip_coef": 0.2, "ent_coef": 0.0, "learn_std": True,
        "log_std_init": 0.0, "scale_actions": False, "norm_reward": True, "norm_obs": True,
        "debias_value": False, "recompute_adv": False, "norm_value": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("script", HISTORICAL)
def test_historical_is_cleanrl(script, args_of):
    args = asdict(args_of(script, "--preset historical"))
    expected = CLEANRL | HISTORICAL[script]
    assert {name: args[name] for name in expected} == expected


README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(?:python|torchrun .*?) (\w+)\.py(.*?)(?:  #.*)?$", README, re.MULTILINE)


def test_commands_of_the_readme_are_understood(args_of):
    new_runs = [
        (script, flags)
        for script, flags in COMMANDS
        if script in SCRIPTS and not re.search("--(help|evaluate|resume)|corridor", flags)
    ]
    assert {script for script, _ in new_runs} == {*SCRIPTS}
    for script, flags in new_runs:
        assert f"--env-id {args_of(script, flags).env_id}" in flags


# ---------------------------------------------------------------------------------------- bad input

COMMON = [
    ("--gamma 1.5", "gamma = 1.5 is not in range: 0 to 1"),
    ("--learning-rat 1", "--learning-rate"),
    ("--device quantum", "device quantum: "),
    ("--preset nothing", "preset nothing is none of none, "),
    ("--resume nowhere", "'nowhere/checkpoint.pt' is no checkpoint of this script"),
    ("--evaluate ''", "'checkpoint.pt' is no checkpoint of this script"),
    ("--total-timesteps 15", "total_timesteps"),
    ("--run-dir notes.txt/new", "run_dir: "),
    ("--resume notes.txt", "resume takes a run folder, and no evaluate beside it"),
    ("--resume one --evaluate two", "resume takes a run folder, and no evaluate beside it"),
]
OWN = {
    "ppo_continuous": [
        ("--hidden 16 0", "hidden = (16, 0) is not in range: 1"),
        ("--env-id CartPol-v1", "Did you mean: `CartPole`"),
        ("--env-id no_such_module:Env-v0", "no_such_module"),
        ("--env-id no_such.module:Env-v0", "no_such.module"),
        ("--env-id ./probes.py:Empty-v0", "'./probes.py:Empty-v0' is neither Env-v0 nor module:"),
        ("--env-id probes:Empty-v0:x", "'probes:Empty-v0:x' is neither Env-v0 nor module:Env-v0"),
        ("--env-kwargs '{\"max_episode_steps\": 0}'", "max_episode_steps"),
        ("--clip-reward 1", "clip_reward needs norm_reward"),
        ("--no-norm-obs --clip-obs 5", "clip_obs needs norm_obs"),
        ("--env-id Pendulum-v1 --ent-coef 0.01", "ent_coef has no effect on actions of a Box"),
        (
            "--env-id Pendulum-v1 --learn-std --log-std-drop 1",
            "effect on actions of a Box with learn",
        ),
        ("--env-id CartPole-v1 --log-std-init 0", "log_std_init has no effect on discrete"),
        ("--env-id CartPole-v1 --tanh-mean", "tanh_mean has no effect on discrete actions"),
        ("--env-id HalfCheetah-v2", "moved to the gymnasium-robotics project"),
        ("--env-id Pusher-v4", "is only supported on `mujoco<3`"),
        ("--env-id probes:Empty-v0 --capture-video", "Empty() takes no arguments"),
        ("--env-id probes:Forever-v0 --capture-video", "cannot be drawn: render() returns nothing"),
        ("--env-id probes:ShownWords-v0", "are no vector: drop parts of it with a wrapper"),
        ("--env-id probes:Levels-v0", "are no Box of floats, Discrete"),
        ("--env-id probes:Undrawn-v0 --capture-video", "cannot be drawn: no screen (MuJoCo"),
        ("--env-kwargs {no", "env_kwargs {no is no JSON object"),
        ("--num-minibatches 64", "num_minibatches 64 must divide 32 sequences"),
        ("--rnn gru --rnn-seq-len 5", "rnn_seq_len 5 must divide num_steps 16"),
        ("--rnn-hidden 16", "rnn_hidden needs rnn"),
        ("--rnn-seq-len 4", "rnn_seq_len needs rnn"),
        ("--no-rnn-reset", "rnn_reset needs rnn"),
    ],
    "ppo_atari": [
        ("--env-id Brekout", "Did you mean: `Breakout`"),
        ("--env-id ALE/Joust-v5", "ALE/Joust-v5: "),
        ("--env-id CartPole-v1", "CartPole-v1: "),
        ("--env-id probes:Chain-v0", "probes:Chain-v0: "),
        ("--env-id a:b:c-v0", "a:b:c-v0: "),
        ("--rnn lstm --num-minibatches 4", "must divide 2 sequences"),
        ("--rnn lstm --no-share-network --num-minibatches 1", "rnn needs share_network"),
        ("--rnn-hidden 16", "rnn_hidden needs rnn"),
        ("--rnn-seq-len 4", "rnn_seq_len needs rnn"),
        ("--no-rnn-reset", "rnn_reset needs rnn"),
        ("--screen-size 35", "screen_size = 35 is not in range: 36 to 1000"),
    ],
    "muesli_cartpole": [
        ("--env-id Pendulum-v1", "Box(-2.0, 2.0, (1,), float32) is not Discrete: use ppo_cont"),
        ("--encoder cnn", "does not fit the encoder cnn"),
        ("--encoder cnn --env-id probes:ShownStrip-v0", "does not fit the encoder cnn"),
        ("--env-id probes:Undrawn-v0 --capture-video", "cannot be drawn: no screen (MuJoCo"),
        ("--env-id probes:ShownWords-v0", "are no vector: drop parts of it with a wrapper"),
        ("--buffer-size 43", "at least 44 steps"),
        ("--total-timesteps 43", "at least 44 steps"),
        ("--learning-starts 600", "learning_starts: no update in 600 steps"),
    ],
    "rl2_meta": [
        ("--env-id bandit", "env_id bandit: Bandit, TabularMDP, "),
        ("--task-sampler some:f", "env_id Bandit: Bandit, TabularMDP, "),
        ("--env-kwargs {}x", "env_kwargs is of simulators only, not of Bandit"),
        ("--episode-length 20", "episode_length is of simulators only"),
        ("--env-id TabularMDP --num-arms 7", "num_arms is of a Bandit only"),
        ("--task-sampler some:f --env-id CartPole-v1", "some:f: no such module:function"),
        ("--task-sampler json:f --env-id CartPole-v1", "json:f: no such module:function"),
        ("--task-sampler no.more:f --env-id CartPole-v1", "no.more:f: No module named 'no'"),
        ("--task-sampler ./t.py:f --env-id CartPole-v1", "./t.py:f: no package specified"),
        ("--task-sampler json:f --env-id CartPol-v1", "Did you mean: `CartPole`"),
        ("--capture-video", "capture_video is of simulators only, not of Bandit"),
        ("--clip-obs 5", "clip_obs needs norm_obs"),
        ("--env-id TabularMDP --norm-obs", "norm_obs: tabular reads the state from its one-hot"),
        ("--norm-obs --no-tabular", "norm_obs: a Bandit without tabular has no observations"),
        ("--env-id AntDir --num-trials 5 --num-minibatches 1", "num_trials 5 must be even"),
        ("--num-trials 10 --num-minibatches 4", "num_minibatches 4 must divide 10 trials"),
        ("--num-trials 4 --episodes-per-trial 1", "must divide 4 trials, into 2+"),
    ],
}


@pytest.fixture
def refused(main, tmp_path):
    """Function that calls main: status 2, one sentence, which is returned; nothing is written."""

    def contents():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def call(script, flags):
        before = contents()
        out, err = main(script, flags, status=2)
        assert contents() == before and "after" not in out
        # One line, but for what PyTorch says of a checkpoint, which is printed whole.
        one_line = err.count("\n") == 1 or "checkpoint" in err
        ours = err.startswith("error: ") and one_line
        assert ours or re.search("[─-]{9}", err)  # or tyro's box
        return unboxed(err)

    return call


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [(script, *row) for script in SCRIPTS for row in COMMON + OWN[script]],
)
def test_bad_flags(script, flags, words, refused, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert words in refused(script, f"{SHORT[script]} {flags}")


@all_scripts
def test_every_number_has_a_range(script):
    module = importlib.import_module(script)
    default = module.Args()
    kinds = {field.name: field.type for field in fields(default)}
    numbers = {x: kind for x, kind in kinds.items() if kind in (int, float, float | None)}
    assert len(numbers) > 20
    for name, kind in numbers.items():
        low, high = module.RANGES.get(name, (1 if kind is int else 0, 10**12))
        for value in (low - 1, high * 1.001 + 1, math.nan):
            with pytest.raises(module.UsageError, match=f"{name} = .* is not in range: "):
                replace(default, **{name: value}).check()


@all_scripts
@pytest.mark.parametrize(("package", "flag"), [("wandb", "track"), ("moviepy", "capture_video")])
def test_a_missing_package_is_one_sentence(script, package, flag, refused, monkeypatch):
    module = importlib.import_module(script)
    find_spec = importlib.util.find_spec
    missing = lambda name, *x: None if name == package else find_spec(name, *x)  # noqa: E731
    monkeypatch.setattr(module.importlib.util, "find_spec", missing)
    words = f"{flag} needs a package: pip install {package}"
    assert words in refused(script, f"{SHORT[script]} --{flag.replace('_', '-')}")


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path, part, **values):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[part] |= values
    torch.save(checkpoint, path)


@pytest.mark.parametrize("finished", ["ppo_continuous"], indirect=True)
@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        truncate,
        lambda path: path.write_bytes(b"noise"),
        lambda path: torch.save([1, 2], path),
        lambda path: change(path, "args", no_such_flag=1),
    ],
)
def test_a_spoiled_checkpoint_is_refused(spoil, finished, run_dir, refused):
    spoil(run_dir / "checkpoint.pt")
    for flag in ("--resume", "--evaluate"):
        assert "'run/checkpoint.pt' is no checkpoint of this" in refused(
            finished.script, f"{flag} run"
        )


def test_one_process_evaluates(finished, run_dir, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "one process evaluates: start it with python, not torchrun"
    assert words in refused(finished.script, "--evaluate run")


def test_the_last_line_is_a_command_of_the_shell(main):
    """Also where the folder has an apostrophe."""
    out, _ = main("ppo_continuous", f"""{SHORT["ppo_continuous"]} --run-dir "it's mine" """)
    command = shlex.split(out.splitlines()[-1].removeprefix("evaluate again: "))
    assert command == ["python", "ppo_continuous.py", "--evaluate", "it's mine"]


def test_what_a_run_cannot_change(finished, run_dir, refused):
    script = finished.script
    env_id = {"ppo_atari": "Pong", "rl2_meta": "TabularMDP"}.get(script, "Acrobot-v1")
    for flags in (f"--env-id {env_id}", "--preset none", "--run-dir other"):
        assert "of a run cannot change" in refused(script, f"--resume run {flags}")
    assert "does not fit these flags" in refused(script, f"--evaluate run --env-id {env_id}")
    assert "is not empty" in refused(script, f"{SHORT[script]} --run-dir run")


@all_scripts
def test_no_two_runs_share_a_folder(script, main, tmp_path, monkeypatch):
    """Of two runs that begin in the same second, or that find the same folder empty."""
    module = importlib.import_module(script)
    args, progress = module.Args(), {"global_step": 0, "iteration": 0}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.time, "time", lambda: 1.5)
    logs = [module.RunLog(replace(args), "cpu", progress, True) for _ in range(3)]
    assert [log.run_dir.name.split("__")[-1] for log in logs] == ["1", "2", "3"]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))
    with pytest.raises(module.UsageError, match="File exists"):
        module.RunLog(replace(args, run_dir=str(logs[0].run_dir)), "cpu", progress, True)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        *product(SCRIPTS, ["policy_loss"]),
        *product(["ppo_continuous", "muesli_cartpole", "rl2_meta"], ["observations", "rewards"]),
        ("ppo_atari", "rewards"),
    ],
)
def test_what_is_not_finite_stops_the_run(script, name, main, tmp_path, monkeypatch):
    """With its name; the last checkpoint stays."""
    module, run_dir = importlib.import_module(script), tmp_path / "run"
    loss = "muesli_loss" if script == "muesli_cartpole" else "compute_gradients"
    make_envs, compute_loss = module.make_envs, getattr(module, loss)

    def spoiled(x, which):
        return x * math.nan if which == name and list(run_dir.glob("*.pt")) else x

    def broken_envs(*args):
        envs = make_envs(*args)
        step = envs.step

        def broken_step(actions):
            obs, reward, *rest = step(actions)
            return spoiled(obs, "observations"), spoiled(reward, "rewards"), *rest

        envs.step = broken_step
        return envs

    def broken_loss(*args):
        found = compute_loss(*args)
        losses = found if isinstance(found, dict) else found[1]
        losses["policy_loss"] = spoiled(losses["policy_loss"], "policy_loss")
        return found

    monkeypatch.setattr(module, "make_envs", broken_envs)
    monkeypatch.setattr(module, loss, broken_loss)
    _, err = main(script, f"{SHORT[script]} --run-dir run", status=1)
    saved = load(run_dir)
    iteration = saved["progress"]["iteration"]
    message = f"error: {name} not finite in iteration {iteration + 1}; the last checkpoint"
    assert err.splitlines()[-1].startswith(message)
    assert all(x.isfinite().all() for x in saved["agent"].values())
    assert not (run_dir / "summary.json").exists()


RANKS = """
import os, torch, {script} as script
Agent, agents, reset, keys = script.Agent, [], script.reset, []
script.Agent = lambda *args: agents.append(Agent(*args)) or agents[-1]
script.reset = lambda envs, *key: keys.append(key) or reset(envs, *key)
script.main()
torch.save((agents[0].state_dict(), keys[0]), f"rank{{os.environ['RANK']}}.pt")
"""


@pytest.mark.parametrize(
    ("script", "flags", "statistics"),
    [
        ("ppo_continuous", "--norm-reward --target-kl 0.003", "return_rms.count"),
        ("rl2_meta", "--update-epochs 4 --target-kl 1e-4", "return_rms.count"),
    ],
)
def test_two_processes_train_the_same_weights(script, flags, statistics, tmp_path, monkeypatch):
    """From steps of their own."""
    (tmp_path / "ranks.py").write_text(RANKS.format(script=script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 ranks.py"
    out, _ = run_python(f"{torchrun} {SHORT[script]} {flags} --run-dir run", tmp_path)
    (one, key), (two, other) = (torch.load(tmp_path / f"rank{i}.pt") for i in range(2))
    assert key != other
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    assert one[statistics] == load(tmp_path / "run")["progress"]["global_step"]
    assert out.count("sampled actions") == 1


# ---------------------------------------------------------------------------- console, live changes


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_atari", "rl2_meta"])
def test_progress_without_a_terminal(script, main):
    """Whole lines, the first at once: steps, rate, mean return."""
    _, err = main(script, f"{SHORT[script]} --run-dir run")
    lines = [line for line in err.splitlines() if " steps" in line]
    total = int(re.search(r"--total-timesteps (\d+)", SHORT[script])[1])
    steps = [int(re.search(rf"\d %, (\d+)/{total} steps, ", line)[1]) for line in lines]
    assert steps == sorted(steps) and 0 < steps[1] < total
    assert re.search(r"steps/s, [\d:]+ left, return -?\d", lines[-1])


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_atari"])
@pytest.mark.parametrize(
    "content",
    [
        '{"vf_coef": "high"}', "[1, 2]", "\xff", '{"learning_rate": NaN}', '{"update_epochs": 0}',
        '{"vf_coef": true}', '{"update_epochs": 1.5}', '{"vf_coef": "0.7"}',
        '{"clip_coef": -1}', '{"ent_coef": null}', '{"vf_coef": 1' + "0" * 400 + "}",
    ],
)  # fmt: skip
def test_a_live_file_that_is_not_understood_changes_nothing(script, content, tmp_path, capsys):
    module = importlib.import_module(script)
    (tmp_path / "live.json").write_bytes(content.encode("latin-1"))
    args, optimizer = module.Args(), torch.optim.Adam([torch.zeros(1)])
    optimizer.param_groups[0]["initial_lr"] = 1.0
    log = type("Log", (), {"run_dir": tmp_path})
    module.read_live(args, optimizer, log, 96)
    printed = capsys.readouterr().out
    assert printed.startswith("step 96: live.json ") and printed.count("\n") == 1
    assert args == module.Args() and optimizer.param_groups[0]["initial_lr"] == 1.0
    assert not (tmp_path / "live.json").exists() and (tmp_path / "live-96.json").exists()
    (tmp_path / "live-96.json").write_text(json.dumps({"vf_coef": 1, "learning_rate": 1e-2}))
    module.read_live(args, optimizer, log, 96)  # as a resumed run does
    assert args.vf_coef == 1 and optimizer.param_groups[0]["initial_lr"] == pytest.approx(
        1e-2 / module.Args().learning_rate
    )


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_atari"])
def test_live_changes(script, main, tmp_path, monkeypatch):
    """They are said, last, and come again on resume; what is not understood changes nothing."""
    module = importlib.import_module(script)
    read_live, texts = module.read_live, ["", '{"learning_rate": 1e-3, "gamma": 0.9}', "{no", "[1]"]

    def write_first(args, optimizer, log, step):
        if texts and (text := texts.pop(0)):
            (log.run_dir / "live.json").write_text(text)
        return read_live(args, optimizer, log, step)

    monkeypatch.setattr(module, "read_live", write_first)
    out, _ = main(script, f"{SHORT[script]} --run-dir run --no-anneal-lr")
    rates = list(read_events(tmp_path / "run")["charts/learning_rate"].values())
    assert rates == pytest.approx([module.Args().learning_rate, 1e-3, 1e-3, 1e-3])
    said = [line for line in out.splitlines() if "live.json changes" in line]
    assert len(said) == 3 and "nothing" in said[1] and "nothing" in said[2]
    args = load(tmp_path / "run")["args"]
    assert args["learning_rate"] == 1e-3 and args["gamma"] == module.Args().gamma


def test_ctrl_c_before_the_training(main, monkeypatch):
    """In the set-up, too, there is no traceback."""
    module = importlib.import_module("ppo_continuous")
    monkeypatch.setattr(module, "Agent", lambda *_: signal.raise_signal(signal.SIGINT))
    _, err = main("ppo_continuous", f"{SHORT['ppo_continuous']} --run-dir run", status=130)
    assert "Traceback" not in err


def test_lunar_landers_preset_is_taken_for_its_continuous_form(main):
    """Its entropy bonus has no effect there, but nobody typed it."""
    flags = f"{SHORT['ppo_continuous']} --env-id LunarLander-v3 --run-dir run"
    flags += """ --env-kwargs '{"continuous": true, "max_episode_steps": 20}'"""
    _, err = main("ppo_continuous", f"{flags} --ent-coef 0.02", status=2)
    assert "ent_coef has no effect on actions of a Box" in err
    main("ppo_continuous", flags)


def test_mujoco_warns_once_and_into_no_file(tmp_path):
    """Not once for each of the environments."""
    flags = "--env-id HalfCheetah-v5 --num-envs 3 --total-timesteps 200 --no-compile"
    flags += """ --env-kwargs '{"max_episode_steps": 20}' --eval-episodes 1 --run-dir run"""
    said = run_python(f"{ROOT / 'ppo_continuous.py'} {flags}", tmp_path)
    assert "".join(said).count("settotalmass") <= 1 and not (tmp_path / "MUJOCO_LOG.TXT").exists()
