"""Other people's environments: their faults, their habits, what the scripts make of them."""

import importlib
import json
import random
import re
import shutil
import struct

import gymnasium as gym
import numpy as np
import probes
import pytest
from conftest import ROOT, SHORT, load, read_events, run_python
from gymnasium.spaces import Box, Dict, Discrete, Space, Tuple

RL2 = """--task-sampler test_environments:no_task --total-timesteps 160 --num-trials 4
    --num-minibatches 2 --episode-length 10 --episodes-per-trial 2 --rnn-hidden 16
    --test-trials 4"""
FLAGS = SHORT | {"rl2_meta": RL2}
scripts = pytest.mark.parametrize("script", ["ppo_continuous", "muesli_cartpole", "rl2_meta"])


def no_task(env, rng):
    """Every trial has the same task."""


@pytest.fixture
def start(main, tmp_path):
    """Function that trains a script on an environment class. Returns stdout, stderr."""

    def call(script, env_class, flags="", status=0):
        gym.register("Theirs-v0", env_class)
        try:
            where = f"--env-id Theirs-v0 --run-dir {tmp_path}/run"
            return main(script, f"{FLAGS[script]} {where} {flags}", status)
        finally:
            del gym.registry["Theirs-v0"]

    return call


class Theirs(probes.Probe):
    """Two steps."""

    length = 2


# ------------------------------------------------------------- errors: whose fault it is, and where


def failing(name, error):
    def fail(*_, **__):
        raise error

    return type("Failing", (Theirs,), {name: fail})


FAULTS = [KeyError("theirs"), ModuleNotFoundError("theirs"), OSError("theirs"), TypeError("theirs")]
FAULTS += [ValueError("theirs"), FloatingPointError("theirs")]


@scripts
@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
@pytest.mark.parametrize("error", FAULTS, ids=lambda x: type(x).__name__)
def test_a_fault_in_an_environments_own_code_keeps_its_traceback(script, where, error, start):
    with pytest.raises(type(error), match="theirs"):
        start(script, failing(where, error))


@scripts
def test_a_librarys_message_is_printed_whole(script, start, tmp_path):
    words = "word " * 200 + "with:\n    pip install it"
    _, err = start(script, failing("__init__", gym.error.DependencyNotInstalled(words)), status=2)
    assert err == f"error: Theirs-v0: {words}\n" and not list(tmp_path.iterdir())


@scripts
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ('{"nope": 1}', "unexpected keyword argument 'nope'"),
        ("[1]", "env_kwargs [1] is no JSON object"),
        ("3", "env_kwargs 3 is no JSON object"),
    ],
)
def test_wrong_keyword_arguments_are_one_sentence(script, kwargs, words, start, tmp_path):
    _, err = start(script, Theirs, f"--env-kwargs '{kwargs}'", status=2)
    assert words in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@scripts
def test_a_keyword_argument_reaches_the_environment(script, start):
    class Refuses(Theirs):
        def __init__(self, size):
            raise ValueError(f"size {size}")

    with pytest.raises(ValueError, match="size 7"):
        start(script, Refuses, "--env-kwargs '{\"size\": 7}'")


def test_a_keyword_argument_that_a_flag_sets_is_refused(start, tmp_path):
    _, err = start("rl2_meta", Theirs, "--env-kwargs '{\"max_episode_steps\": 5}'", status=2)
    assert err.startswith("error: Theirs-v0: ") and err.count("\n") == 1
    assert err.endswith("multiple values for keyword argument 'max_episode_steps'\n")
    assert not list(tmp_path.iterdir())


class Mission(Space):
    """A text, as MiniGrid's: Gymnasium does not know how to flatten it."""


@scripts
@pytest.mark.parametrize("space", [Dict(x=Box(-1, 1, (2,)), text=Mission()), Box(-1, 1, (0,))])
def test_a_space_that_is_no_vector_is_named(script, space, start, tmp_path):
    shown = {"observation_space": space, "observe": lambda self: np.zeros(space.shape or ())}
    env_class = type("Shown", (Theirs,), shown)
    _, err = start(script, env_class, status=2)
    assert f"observations {space} are no vector: drop parts of it with a wrapper" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("ppo_continuous", "Box(0, 9, (2,), int64) are no Box of floats, Discrete"),
        ("muesli_cartpole", "Box(0, 9, (2,), int64) is not Discrete: use ppo_continuous.py"),
        ("rl2_meta", "Box(0, 9, (2,), int64) are not Discrete or a Box of floats"),
    ],
)
def test_actions_that_cannot_be_used_are_named(script, words, start):
    env_class = type("Levels", (Theirs,), {"action_space": Box(0, 9, (2,), int)})
    assert words in start(script, env_class, status=2)[1]


# ------------------------------------------------------------------- what reset and step return


def returning(method, change, **attributes):
    """An environment one of whose methods returns a change of what it should."""

    def changed(self, *args, **kwargs):
        return change(*getattr(Theirs, method)(self, *args, **kwargs))

    return type("Sloppy", (Theirs,), {method: changed, **attributes})


SLOPPY = [
    returning("reset", lambda obs, info: obs),
    returning("reset", lambda obs, info: (obs, None)),
    returning("reset", lambda obs, info: (np.zeros(2), info)),
    returning("step", lambda obs, reward, end, cut, info: (obs, reward, end, info)),
    returning("step", lambda obs, reward, end, cut, info: (obs, [reward] * 2, end, cut, info)),
    returning("step", lambda obs, reward, end, cut, info: (obs[None], reward, end, cut, info)),
    returning("step", lambda obs, reward, end, cut, info: (obs, reward, end, cut, None)),
]


@scripts
@pytest.mark.parametrize("env_class", SLOPPY)
def test_what_is_not_returned_as_it_should_is_one_sentence(script, env_class, start, tmp_path):
    _, err = start(script, env_class, status=2)
    assert err.startswith("error: <Sloppy") and "Box(" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


@scripts
def test_rewards_of_shape_1_and_infos_of_any_kind_are_accepted(script, start):
    def change(obs, reward, end, cut, info):
        kind = [1, "text", None, np.zeros(3), {"a": 1}][np.random.randint(5)]
        return obs, np.array([reward]), end, cut, {"kind": kind}

    start(script, returning("step", change))


class Random(Theirs):
    """Draws from everything but its own generator."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space, self.action_space = Box(-1, 1, (4,)), Discrete(2)
        self.bias = np.random.uniform(-1, 1) + random.uniform(-1, 1)

    def observe(self):
        return self.observation_space.sample() + np.float32(self.bias)

    def reward(self, action):
        return float(action == self.action_space.sample()) + random.random() + np.random.rand()


@scripts
def test_all_randomness_comes_from_the_seed(script, start, tmp_path):
    results = []
    for _ in range(2):
        start(script, Random)
        results.append({name: x.numpy() for name, x in load(tmp_path / "run")["agent"].items()})
        shutil.rmtree(tmp_path / "run")
    np.testing.assert_equal(*results)


DRAWN = []


def draw_task(env, rng):
    DRAWN.append(env.np_random.random())


@scripts
@pytest.mark.parametrize("heeds", [True, False])
def test_streams_of_environments_are_their_own(script, heeds):
    """Of their generator before and after reset, of their spaces; also if reset heeds no seed."""

    class Drawing(Theirs):
        observation_space, action_space = Box(-1, 1, (1,)), Discrete(10**9)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            gym.Env.reset(self, seed=seed if heeds else None)
            DRAWN.append(self.np_random.random())
            DRAWN.append((self.observation_space.sample().item() + 1) / 2)
            DRAWN.append(self.action_space.sample() / 10**9)
            return self.observe(), {}

    module, seen = importlib.import_module(script), []
    flags = {"task_sampler": "test_environments:draw_task"} if script == "rl2_meta" else {}
    gym.register("Theirs-v0", Drawing)
    try:
        envs = module.make_envs(module.Args(env_id="Theirs-v0", **flags), 3)
    finally:
        del gym.registry["Theirs-v0"]
    for key in (1, 2, 1):
        DRAWN.clear()
        module.reset(envs, key)
        seen.append(np.round(DRAWN, 6).tolist())
    assert seen[0] == seen[2]
    assert len({*seen[0], *seen[1]}) == 2 * 3 * (4 if flags else 3)


class Masked(probes.Masked):
    """Its mask is a part of the observation."""

    observation_space = Dict(x=Box(-1, 1, (1,)), action_mask=Box(0, 1, (4,), np.int8))

    def observe(self):
        self.mask = probes.Masked.info(self)["action_mask"]
        return {"x": np.zeros(1, np.float32), "action_mask": self.mask}

    def info(self):
        return {}


def test_a_mask_in_the_observation_is_applied(start):
    start("ppo_continuous", Masked)  # a forbidden action is an error there


def test_a_mask_that_allows_nothing_stops_the_run(start):
    nothing = {"action_mask": np.zeros(4, np.int8)}
    env_class = type("Stuck", (probes.Masked,), {"info": lambda self: nothing})
    _, err = start("ppo_continuous", env_class, status=2)
    assert "action_mask [0 0 0 0] allows no action" in err


class Ragged(Theirs):
    """An observation of two parts, and actions of a type of their own."""

    observation_space = Tuple([Box(-1, 1, (3,)), Discrete(2)])
    action_space = Discrete(3, dtype=np.int32)

    def observe(self):
        return self.observation_space.sample()

    def step(self, action):
        assert action in self.action_space
        return super().step(action)


@scripts
def test_parts_of_unequal_size_and_small_integers_are_taken(script, start):
    start(script, Ragged)


@scripts
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_nan_in_the_last_observation_of_an_episode_stops_the_run(script, end, start):
    class Last(probes.Probe):
        length = 3

        def observe(self):
            return np.full(1, np.nan if self.t == 3 else 0, np.float32)

        def step(self, action):
            obs, reward, done, _, info = super().step(action)
            return obs, reward, done and end == "terminated", done and end == "truncated", info

    _, err = start(script, Last, status=1)
    assert "observations not finite in iteration 1" in err


@scripts
def test_nan_in_the_first_observation_stops_the_run(script, start):
    class First(probes.Probe):
        def observe(self):
            return np.full(1, np.nan if self.t == 0 else 0, np.float32)

    _, err = start(script, First, status=1)
    assert re.search("observations not finite in iteration [01]", err)


class NanOnce(Theirs):
    """Episodes of one step; `rewards` has that of the first, all others are 1."""

    length, rewards = 1, []

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, self.rewards.pop() if self.rewards else 1.0, terminated, truncated, info


@pytest.mark.parametrize("script", ["ppo_continuous", "muesli_cartpole"])
def test_an_evaluation_does_not_hide_a_nan(script, start, tmp_path, monkeypatch):
    """Nor replaces it by the return of a later episode."""
    start(script, NanOnce, "--eval-episodes 1")
    module = importlib.import_module(script)
    monkeypatch.setattr(module, "check_env", lambda env: False)  # it would take the reward
    gym.register("Theirs-v0", NanOnce)
    try:
        agent = module.load_agent(tmp_path / "run")
        assert module.evaluate(agent)["eval_mean"] == 1
        NanOnce.rewards.append(np.nan)
        assert np.isnan(module.evaluate(agent)["eval_mean"])
    finally:
        del gym.registry["Theirs-v0"]


# --------------------------------------------------------------------------- the real wandb package


def wandb_rows(path):
    """Rows of a file of Weights & Biases: protocol buffers in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record, rows = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, position)
        left = 32768 - position % 32768
        if left < 7 or kind == 0:  # padding
            position += left
            continue
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or its last part
            message, record = Record.FromString(record), b""
            if message.HasField("history"):
                items = message.history.item
                rows.append({x.key or x.nested_key[0]: json.loads(x.value_json) for x in items})
    return rows


@scripts
def test_weights_and_biases_gets_every_event_once(script, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = f"{SHORT[script]} --run-dir run --track"
    run_python(f"{ROOT / script}.py {flags}", tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = wandb_rows(path)
    for tag, values in read_events(tmp_path / "run").items():
        assert [x["global_step"] for x in rows if tag in x] == list(values), tag
