"""ppo_continuous as a user meets it: changed copies, resume, command line, run folder,
processes."""

import importlib
import re
import shutil
import sys
import time
import types
from dataclasses import fields
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes  # registers environments
import pytest
import torch
from conftest import ROOT, SHORT, flat, read_events, run_python
from torch import nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

import ppo_continuous as ppo

SMALL = {
    "num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2,
    "total_timesteps": 128, "rnn_hidden": 16, "eval_episodes": 2, "hidden": (16, 16),
    "compile": False,
}  # fmt: skip


def weights(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def train(run_dir, env_id="CartPole-v1", module=ppo, checkpoint=None, **flags):
    args = module.Args(env_id=env_id, run_dir=str(run_dir), **SMALL | flags)
    summary = module.train(args, checkpoint)
    return module.load_agent(run_dir), summary


@pytest.fixture
def unevaluated(monkeypatch):
    monkeypatch.setattr(ppo, "evaluate", lambda *_: {"eval_mean": 0.0})


# ------------------------------------------------------------------------------- made to be changed

OPTIMIZER = (
    "    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)\n"
)
RESTORE = "    progress = restore(saved, checkpoint)\n"
LOSS = "    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # [D10]\n"
STEP = "                optimizer.step()\n"
CHANGES = {}


def change(*edits, **flags):
    """The function checks runs of a copy of the script. Edits: old lines, new lines, old, new."""
    pairs = dict(zip(edits[::2], edits[1::2], strict=True))

    def register(check):
        CHANGES[check.__name__] = SimpleNamespace(edits=pairs, flags=flags, check=check)
        return check

    return register


def watch(module):
    """Of a module's trainings: batch and indices of each update, rewards of each compute_gae."""
    seen, compile_functions = SimpleNamespace(updates=[], rewards=[]), module.compile_functions
    compute_gae = module.compute_gae

    def watched_functions(*args):
        act, update = compile_functions(*args)

        def watched_update(*inputs):
            batch, index = inputs[2], inputs[4]
            seen.updates.append(SimpleNamespace(batch=batch, index=index, obs=batch["obs"].clone()))
            return update(*inputs)

        return act, watched_update

    def watched_gae(rewards, *args):
        seen.rewards.append(rewards.clone())
        return compute_gae(rewards, *args)

    module.compile_functions, module.compute_gae = watched_functions, watched_gae
    return seen


@change(
    OPTIMIZER,
    """    critic = list(agent.critic.parameters())
    groups = [{"params": [*agent.actor.parameters()]}, {"params": critic, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, args.learning_rate)
""",
)
def parameter_groups(run):
    rates = [run.events["charts/learning_rate1"], run.more_events["charts/learning_rate1"]]
    assert list(rates[0].values()) == pytest.approx([1e-2, 2e-2 / 3, 1e-2 / 3])
    assert rates[1] == {256: pytest.approx(1e-2 / 4)}
    for checkpoint in (run.first, run.more):
        decays = [x["weight_decay"] for x in checkpoint["optimizer"]["param_groups"]]
        assert decays == [0.01, 0.01]


@change(
    "        self.num_states = {",
    "        self.extra = nn.Linear(args.hidden[-1], num_inputs)\n        self.num_states = {",
    LOSS,
    LOSS
    + """    hidden = agent.actor[:-1](agent.normalize(mb["obs"]))
    loss = loss + (agent.extra(hidden) - agent.normalize(mb["obs"])).square().mean()
""",
)
def head_in_the_agent(run):
    heads = [run.fresh.extra.weight, *(x["agent"]["extra.weight"] for x in (run.first, run.more))]
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])


HEAD = (
    OPTIMIZER,
    """    args.head = nn.Linear(args.hidden[-1], 4).to(device)
    params = [*agent.parameters(), *args.head.parameters()]
    optimizer = torch.optim.Adam(params, learning_rate, eps=eps, fused=True)
""",
)
SAVED_HEAD = RESTORE, '    saved["head"] = args.head\n' + RESTORE


@change(
    *HEAD,
    *SAVED_HEAD,
    LOSS,
    LOSS
    + """    x = agent.normalize(mb["obs"])
    loss = loss + (args.head(agent.actor[:-1](x)) - x).square().mean()
""",
)
def head_outside(run):
    """With no steps left its resume has saved it as it was, so it was restored; then it trains."""
    for name, x in run.first["head"].items():
        assert not torch.equal(x, run.more["head"][name])


@change(
    *HEAD,
    *SAVED_HEAD,
    STEP,
    """                x = agent.normalize(batch["obs"][0, index])
                (args.head(agent.actor[:-1](x)) - x).square().mean().backward()
"""
    + STEP,
)
def loss_in_the_loop(run):
    head_outside(run)


@change(
    OPTIMIZER,
    OPTIMIZER
    + """    (num_inputs,) = envs.single_observation_space.shape
    target, predictor = (nn.Linear(num_inputs, 8).to(device) for _ in range(2))
    rnd_optimizer = torch.optim.Adam(predictor.parameters(), 1e-2)
    novelty = lambda obs: (predictor(obs) - target(obs)).square().mean(-1)
""",
    RESTORE,
    """    saved |= {"target": target, "predictor": predictor, "rnd_optimizer": rnd_optimizer}
"""
    + RESTORE,
    "        # Update\n",
    """        rewards += novelty(obs).detach()
        rnd_optimizer.zero_grad(), novelty(obs).mean().backward(), rnd_optimizer.step()
        # Update
""",
)
def random_network_distillation(run):
    """Rewards of CartPole are 1; what is predicted better and better is added."""
    first, *_, last = (x - 1 for x in run.rewards)
    assert first.min() > 0 and len(first.unique()) == first.numel()
    assert last.mean() < first.mean()
    for name, x in run.first["target"].items():
        assert torch.equal(x, run.more["target"][name])
        assert not torch.equal(run.first["predictor"][name], run.more["predictor"][name])
    assert [x["rnd_optimizer"]["state"][0]["step"] for x in (run.first, run.more)] == [3, 4]


@change(
    "class Agent(nn.Module):\n",
    """class SquashedNormal(Normal):
    def rsample(self, *shape):
        return super().rsample(*shape).tanh()

    def log_prob(self, action):
        return super().log_prob(action.atanh()) - (1 - action**2).log()

    @property
    def mode(self):
        return self.mean.tanh()


class Agent(nn.Module):
""",
    "            policy = Normal(output, ",
    "            policy = SquashedNormal(output, ",
    env_id="Pendulum-v1",
    log_std_init=0.0,
    norm_obs=False,
)
def squashed_gaussian(run):
    batch = run.updates[0].batch
    agent, obs, actions = run.fresh, batch["obs"][0], batch["actions"][0]
    normal = Normal(agent.actor(agent.normalize(obs)), agent.log_std.exp())
    expected = TransformedDistribution(normal, TanhTransform()).log_prob(actions).sum(-1)
    torch.testing.assert_close(batch["logprobs"][0], expected, rtol=1e-3, atol=1e-4)
    actions = torch.stack([x.batch["actions"] for x in run.updates])
    assert 0.8 < actions.abs().max() < 1
    assert abs(run.updates[-1].batch["logprobs"].mean()) < 10
    greedy = run.module.load_agent(run.folder).get_action_and_value(
        obs, torch.zeros(0, 64, 16), torch.zeros(64), torch.ones(64, 1, 1).bool(), greedy=True
    )
    assert greedy[0].abs().max() < 1


class Counted(probes.Probe):
    """Tells the steps since its reset."""

    length = None

    def observe(self):
        return np.array([self.t / 60], np.float32)

    def info(self):
        return {"count": self.t}


gym.register("Counted-v0", Counted, max_episode_steps=60)


@change(
    '    KEPT = ("action_mask",)',
    '    KEPT = ("action_mask", "count")',
    "            next_mask = agent.read_mask(infos, N)\n            if",
    """            next_mask = agent.read_mask(infos, N)
            counts = [*infos["count"]] if t == 0 else [*counts, *infos["count"]]
            if""",
    "            log.write(",
    '            means["count"] = np.mean(counts)\n            log.write(',
    env_id="Counted-v0",
    norm_obs=False,
)
def metric_of_infos(run):
    """Without a time limit that fits, a resume begins new episodes."""
    assert run.events["losses/count"] == {64: 8.5, 128: 24.5, 192: 40.5}
    assert run.more_events["losses/count"] == {256: 8.5}


def test_an_info_that_is_not_kept_is_a_key_error(tmp_path, changed_copy):
    _, *edits = CHANGES["metric_of_infos"].edits.items()
    module = changed_copy("ppo_continuous", dict(edits))
    with pytest.raises(KeyError, match="count"):
        train(tmp_path / "run", "Counted-v0", module)


@change(
    "    for iteration in range(first",
    "    last = {}\n    for iteration in range(first",
    "\n            # Minibatches [D6]\n",
    """\
                batch = {k: torch.hstack([x, last.get(k, x[:, :0])]) for k, x in batch.items()}

            # Minibatches [D6]
""",
    "        agent.obs_rms.update(obs)  # [D28]",
    """        last = {k: x[:, : N * T // L] for k, x in batch.items()}
        agent.obs_rms.update(obs)""",
)
def two_rollouts(run):
    """Each epoch draws each of the rows once. A resume begins with one rollout."""
    updates, rows = run.updates, [64] * 4 + [128] * 8 + [64] * 4
    assert [x.batch["obs"].shape[1] for x in updates] == rows
    for one, two, count in zip(updates[::2], updates[1::2], rows[::2], strict=True):
        assert len(one.index) == len(two.index) == count // 2
        assert torch.cat([one.index, two.index]).sort().values.tolist() == list(range(count))
    for old, new in zip(updates[3:8:4], updates[4:9:4], strict=True):
        for name, x in new.batch.items():
            assert torch.equal(x[:, 64:], old.batch[name][:, :64])
        assert not torch.equal(new.batch["obs"][:, :64], new.batch["obs"][:, 64:])


@change("        # Rollout\n", "        args.ent_coef = 1e6 * (iteration % 2)\n        # Rollout\n")
def coefficient(run):
    norms = list(run.events["losses/grad_norm"].values())
    norms += list(run.more_events["losses/grad_norm"].values())
    assert min(norms[::2]) > 100 * max(norms[1::2])
    assert run.first["args"]["ent_coef"] == 1e6


@change(OPTIMIZER, "    agent.actor[0].requires_grad_(False)\n" + OPTIMIZER)
def frozen_layer(run):
    for checkpoint in (run.first, run.more):
        assert torch.equal(checkpoint["agent"]["actor.0.weight"], run.fresh.actor[0].weight)
        assert not torch.equal(checkpoint["agent"]["actor.2.weight"], run.fresh.actor[2].weight)


@change(LOSS, LOSS + '    print("the loss is", loss.item())\n')
def printed_loss(run):
    assert run.out.count("the loss is") == 12 and run.more_out.count("the loss is") == 4


@change(
    "                log.save(saved, progress)\n\n",
    """                log.save(saved, progress)
                if evaluate(agent)["eval_mean"] > -1e9:
                    log.save(saved, progress, "best.pt")
                    break

""",
)
def early_stop(run):
    assert [x["progress"]["iteration"] for x in (run.first, run.more)] == [1, 2]
    best = run.module.load_agent(run.folder / "best.pt")
    assert all(torch.equal(x, run.more["agent"][name]) for name, x in best.state_dict().items())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_change(name, compiled, tmp_path, changed_copy, capsys):
    """A usual change of a copy takes effect, and survives a resume."""
    module = changed_copy("ppo_continuous", CHANGES[name].edits)
    flags = {"checkpoint_every": 1, "num_minibatches": 2, "total_timesteps": 192}
    flags |= {"env_id": "CartPole-v1", "target_kl": None, "compile": compiled}
    flags, run = SMALL | flags | CHANGES[name].flags, watch(module)
    run.module, run.folder = module, tmp_path / "run"

    def load_or_train(checkpoint=None, **flags):
        """Train, or resume. Returns the last checkpoint, events and what was printed."""
        for path in tmp_path.glob("run/events*"):
            path.unlink()
        module.train(module.Args(**flags, run_dir=str(run.folder)), checkpoint)
        checkpoint, _ = module.load_checkpoint(run.folder)
        return checkpoint, read_events(run.folder), capsys.readouterr().out

    torch.manual_seed(1)
    args = module.Args(**flags)
    run.fresh = module.Agent(module.make_envs(args, 1), args)
    run.first, run.events, run.out = load_or_train(**flags)
    flags["resume"], iteration = str(run.folder), run.first["progress"]["iteration"]

    # With no steps left, a resume saves what it has loaded; settings are those of the flags.
    flags["total_timesteps"] = run.first["progress"]["global_step"]
    loaded, *_ = load_or_train(run.first, **flags)
    arrays = [
        {k: np.asarray(x) for k, x in flat(y).items() if not re.match("/args|.*param_groups", k)}
        for y in (loaded, run.first)
    ]
    np.testing.assert_equal(*arrays)
    flags["total_timesteps"] = 256
    run.more, run.more_events, run.more_out = load_or_train(loaded, **flags)
    assert run.more["progress"]["iteration"] == iteration + 1
    for key in ("actor.2.weight", "critic.2.weight"):
        stages = [x["agent"][key] for x in (run.first, run.more)]
        assert not torch.equal(run.fresh.state_dict()[key], stages[0])
        assert not torch.equal(*stages)
    assert all(torch.equal(x.batch["obs"], x.obs) for x in run.updates)  # what is kept stays so
    CHANGES[name].check(run)


# -------------------------------------------------------------------------- resume, environments

RUN = f"{SHORT['ppo_continuous']} --run-dir run"

LIMIT = {"env_kwargs": '{"max_episode_steps": 20}', "checkpoint_every": 2, "total_timesteps": 256}


def test_environments_are_reset_only_where_an_episode_fits(
    tmp_path, monkeypatch, unevaluated, capsys
):
    keys, reset = [], ppo.reset
    monkeypatch.setattr(ppo, "reset", lambda envs, *key: keys.append(key) or reset(envs, *key))
    train(tmp_path / "a", **LIMIT)
    assert keys == [(1, 0, 0), (1, 0, 1), (1, 0, 3)]
    assert "begins new episodes" not in capsys.readouterr().out
    train(tmp_path / "b", checkpoint_every=2, total_timesteps=256)
    assert keys[3:] == [(1, 0, 0)] and "a resume begins new episodes" in capsys.readouterr().out


def test_bipedal_walker_does_not_remember_earlier_episodes():
    """Or a resume would not be exact: Gymnasium keeps its Box2D world."""

    def play(env, seed, steps=150):
        obs, _ = env.reset(seed=seed)
        actions = np.random.default_rng(seed).uniform(-1, 1, (steps, 4)).astype(np.float32)
        return [obs, *(env.step(action)[0] for action in actions)]

    args = ppo.Args(env_id="BipedalWalker-v3")
    for seed in range(100, 108):
        new, old = ppo.make_env(args), ppo.make_env(args)
        for i in range(6):
            play(old, 7 * seed + i, 40 + 11 * i)
        np.testing.assert_array_equal(play(old, seed), play(new, seed))


@pytest.mark.parametrize(
    ("env_id", "width"), [("ShownDict-v0", 7), ("ShownPicture-v0", 48), ("ShownBooleans-v0", 2)]
)
def test_observations_are_flattened(env_id, width, tmp_path):
    """In training and evaluation: dicts, pictures, booleans."""
    agent, summary = train(tmp_path / "run", env_id)
    assert agent.obs_rms.mean.shape == (width,) and agent.obs_rms.var.isfinite().all()
    assert agent.obs_rms.count == 192 and 0 <= summary["eval_mean"] <= 1


def test_an_error_inside_an_environment_keeps_its_traceback(main, monkeypatch):
    def reward(env, action):
        raise OSError("a fault of the environment")

    monkeypatch.setattr(probes.Forever, "reward", reward)
    with pytest.raises(OSError, match="a fault of the environment"):
        main("ppo_continuous", f"{RUN} --env-id Forever-v0")


# ------------------------------------------------------------- initial weights, files of a run


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", r"CartPole-v1__ppo_continuous__1__\d+"),
        ("--env-id probes:Bandit-v0 --exp-name mine --seed 3", r"probes_Bandit-v0__mine__3__\d+"),
    ],
)
def test_default_run_folder(flags, name, main, tmp_path):
    begin = int(time.time())
    main("ppo_continuous", f"{SHORT['ppo_continuous']} {flags}")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(name, folder.name) and (folder / "summary.json").exists()
    assert begin <= int(folder.name.split("__")[-1]) <= time.time()


def test_video_of_the_first_deterministic_episode(main, tmp_path):
    """Of the training's evaluation, and of one that is asked for later."""
    moviepy = pytest.importorskip("moviepy")
    out, _ = main("ppo_continuous", f"{RUN} --eval-episodes 1 --capture-video")
    length = float(re.search(r"deterministic actions\n  return (\S+)", out)[1])
    for again in (False, True):
        if again:
            main("ppo_continuous", "--evaluate run --capture-video")
        (path,) = (tmp_path / "run" / "videos").glob("*.mp4")
        with moviepy.VideoFileClip(str(path)) as clip:
            assert clip.duration * clip.fps == pytest.approx(length + 1, abs=1.5)
            assert clip.get_frame(0).std() > 1
        shutil.rmtree(path.parent)


# -------------------------------------------------------------------------------- the compiler


def test_without_a_compiler_it_trains_slowly(monkeypatch, tmp_path, main):
    monkeypatch.setenv("PATH", str(tmp_path))
    out, _ = main("ppo_continuous", f"{RUN} --compile")
    assert out.count("no C++ compiler: slow, as with --no-compile\n") == 1


@pytest.mark.slow
def test_a_broken_compiler_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    _, err = run_python(f"{ppo.__file__} {RUN} --compile", tmp_path, status=2)
    (line,) = (x for x in err.splitlines() if x and " steps" not in x)
    assert line.startswith("error: ") and "/bin/false" in line
    assert not (tmp_path / "run").exists()
    assert line.endswith("(--no-compile needs no compiler)")


# --------------------------------------------------------- README, packages, every flag


def test_code_of_the_readme_runs(main, tmp_path):
    """An environment of one's own, and a trained agent in a program of one's own."""
    text = (ROOT / "README.md").read_text()
    corridor, program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "corridor.py").write_text(corridor)
    flags = "--env-id corridor:Corridor-v0 --total-timesteps 2048 --no-compile"
    main("ppo_continuous", flags)
    flags = f"{SHORT['ppo_continuous']} --run-dir runs/pendulum --env-id Pendulum-v1"
    main("ppo_continuous", flags)
    names = {}
    exec(program, names)
    assert names["obs"].shape == (1, 3) and names["reward"].item() < 0


def test_weights_and_biases_watches_no_folder_of_its_own(monkeypatch, main):
    told, wandb = [], types.ModuleType("wandb")
    wandb.init, wandb.__spec__ = lambda **x: told.append(x), importlib.util.find_spec("json")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    main("ppo_continuous", f"{RUN} --track --wandb-entity team --wandb-project-name mine")
    told, config = told[0], told[0].pop("config")
    assert told.pop("name").startswith("CartPole-v1__ppo_continuous__1__")
    assert told == {"project": "mine", "entity": "team", "sync_tensorboard": True}
    assert config["num_steps"] == 16 and set(config) == {x.name for x in fields(ppo.Args)}


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


EFFECTS = [
    {"seed": 2}, {"learning_rate": 2e-3}, {"anneal_lr": False}, {"adam_eps": 1e-3},
    {"ortho_init": False}, {"gamma": 0.9}, {"gae_lambda": 0.5}, {"recompute_adv": False},
    {"num_minibatches": 2}, {"update_epochs": 3}, {"norm_adv": False}, {"clip_coef": 0.001},
    {"anneal_clip": True, "clip_coef": 0.01}, {"clip_vloss": True, "clip_coef": 0.01},
    {"ent_coef": 0.1, "learn_std": True}, {"vf_coef": 0.1}, {"max_grad_norm": 0.0},
    {"target_kl": 1e-7}, {"norm_value": False}, {"debias_value": False},
    {"share_network": True}, {"hidden": (16, 17)},
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
