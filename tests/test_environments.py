"""Other people's environments: their faults, their habits, what the scripts make of them."""

import gymnasium as gym
import probes
import pytest
from conftest import SHORT
from gymnasium.spaces import Box, Dict, Space

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


@pytest.mark.parametrize("script", ["ppo_continuous", "muesli_cartpole"])
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


class Mission(Space):
    """A text, as MiniGrid's: Gymnasium does not know how to flatten it."""


@scripts
@pytest.mark.parametrize("space", [Dict(x=Box(-1, 1, (2,)), text=Mission()), Box(-1, 1, (0,))])
def test_a_space_that_is_no_vector_is_named(script, space, start, tmp_path):
    env_class = type("Shown", (Theirs,), {"observation_space": space})
    _, err = start(script, env_class, status=2)
    assert f"observations {space} are no vector: drop parts of it with a wrapper" in err
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("ppo_continuous", "Box(0, 9, (2,), int64) are not Box, Discrete, MultiDiscrete"),
        ("muesli_cartpole", "Box(0, 9, (2,), int64) is not Discrete: use ppo_continuous.py"),
        ("rl2_meta", "Box(0, 9, (2,), int64) are not Discrete or a Box of floats"),
    ],
)
def test_actions_that_cannot_be_used_are_named(script, words, start):
    env_class = type("Levels", (Theirs,), {"action_space": Box(0, 9, (2,), int)})
    assert words in start(script, env_class, status=2)[1]
