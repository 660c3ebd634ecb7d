"""What the scripts have in common is the same in each: functions, docs of flags, versions of packages."""

import ast
import functools
import importlib
import inspect
import re
from itertools import combinations

import pytest
from conftest import ROOT, SCRIPTS, flag_docs

# Every script has its own.
OWN = {"Agent", "Args", "evaluate", "main", "make_agent", "make_envs", "reset_envs", "rollout", "train",
       "train_step"}
# Flags that mean something else in one script than in the others.
OWN_FLAGS = {
    "ppo_atari": {"env_id"},
    "muesli_cartpole": {"learning_rate", "norm_adv", "num_envs", "torch_threads", "total_timesteps"},
    "rl2_meta": {"capture_video", "env_id", "learning_rate"},
}
PAIRS = list(combinations(map(importlib.import_module, SCRIPTS), 2))

def own(one, two):
    """OWN, without what the two PPO scripts have in common."""
    both_ppo = one.__name__.startswith("ppo") and two.__name__.startswith("ppo")
    return OWN - {"make_agent", "train_step"} if both_ppo else OWN

@functools.cache
def source(module, name):
    return inspect.getsource(getattr(module, name))

def definitions(module):
    """Names of the functions and classes of a script."""
    return {name for name, x in vars(module).items()
            if inspect.isroutine(x) | inspect.isclass(x) and x.__module__ == module.__name__}

@pytest.mark.parametrize(("one", "two", "name"), [
    pytest.param(one, two, name, id=f"{name}-{one.__name__}-{two.__name__}")
    for one, two in PAIRS for name in sorted(definitions(one) & definitions(two) - own(one, two))
])  # fmt: skip
def test_functions_and_classes_are_the_same(one, two, name):
    assert source(one, name) == source(two, name)

@pytest.mark.parametrize(("one", "two"), PAIRS, ids=lambda module: module.__name__)
def test_flags_have_the_same_docs(one, two):
    """But for the tags of their sources."""
    docs = [{name: re.sub(r"\s*\[[DX0-9, ]+\]", "", doc) for name, doc in flag_docs(module).items()}
            for module in (one, two)]
    both = docs[0].keys() & docs[1].keys()
    assert len(both) > 15
    both -= OWN_FLAGS.get(one.__name__, set()) | OWN_FLAGS.get(two.__name__, set())
    assert {name: docs[0][name] for name in both} == {name: docs[1][name] for name in both}

def packages(lines):
    """Version and extras of each package."""
    found = {}
    for line in lines:
        name, extras, version = re.fullmatch(r"([\w-]+)(?:\[(.*)\])?(.*)", line).groups()
        assert found.get(name, (version,))[0] == version, f"two versions of {name}"
        found[name] = version, set(re.findall(r"[\w-]+", extras or "")) | found.get(name, ("", set()))[1]
    return found

def requirements():
    """Those of the scripts, without the tests'."""
    text = (ROOT / "requirements.txt").read_text().split("# tests")[0]
    return packages(line for line in text.splitlines() if line[0] != "#")

def dependencies(script):
    """Those of a script's first lines (PEP 723)."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", (ROOT / f"{script}.py").read_text())[1]
    toml = "\n".join(line.removeprefix("#").strip() for line in block.splitlines())
    assert 'requires-python = ">=3.10"' in toml
    return ast.literal_eval(re.search(r"dependencies = (\[.*\])", toml, re.DOTALL)[1])

def test_scripts_and_requirements_name_the_same_packages():
    """And moviepy, which only --capture-video needs."""
    required = requirements()
    del required["moviepy"]
    assert packages(line for script in SCRIPTS for line in dependencies(script)) == required
