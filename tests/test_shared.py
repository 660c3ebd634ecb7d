"""What the scripts have in common is the same in each: functions, docs of flags, versions of packages."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from itertools import combinations

import pytest
from conftest import ROOT, SCRIPTS, flag_docs
from packaging.requirements import Requirement  # pytest needs it, too

# Every script has its own.
OWN = {"Agent", "Args", "evaluate", "main", "make_agent", "make_envs", "reset_envs", "rollout", "train",
       "train_step"}
# Flags that mean something else in one script than in the others.
OWN_FLAGS = {
    "ppo_atari": {"device", "env_id"},
    "muesli_cartpole": {"learning_rate", "norm_adv", "num_envs", "torch_threads", "total_timesteps"},
    "rl2_meta": {"capture_video", "ent_coef", "env_id", "gae_lambda", "gamma", "learning_rate",
                 "num_minibatches"},
}
PAIRS = list(combinations(map(importlib.import_module, SCRIPTS), 2))

def definitions(module):
    """Names of the functions and classes of a script."""
    return {name for name, x in vars(module).items()
            if inspect.isroutine(x) | inspect.isclass(x) and x.__module__ == module.__name__}

@pytest.mark.parametrize(("one", "two"), PAIRS, ids=lambda module: module.__name__)
def test_functions_classes_and_docs_of_flags_are_the_same(one, two):
    """But for the tags of a flag's sources."""
    both_ppo = one.__name__.startswith("ppo") and two.__name__.startswith("ppo")
    own = OWN - {"make_agent", "train_step"} if both_ppo else OWN
    for name in definitions(one) & definitions(two) - own:
        assert inspect.getsource(getattr(one, name)) == inspect.getsource(getattr(two, name))
    docs = [{name: re.sub(r"\s*\[[DX0-9, ]+\]", "", doc) for name, doc in flag_docs(module).items()}
            for module in (one, two)]
    own_flags = OWN_FLAGS.get(one.__name__, set()) | OWN_FLAGS.get(two.__name__, set())
    for name in docs[0].keys() & docs[1].keys() - own_flags:
        assert docs[0][name] == docs[1][name], name

def packages(lines):
    """Versions and extras of each package."""
    found = defaultdict(set)
    for package in map(Requirement, lines):
        found[package.name] |= {str(package.specifier), *package.extras}
    return found

def test_scripts_and_requirements_name_the_same_packages():
    """And moviepy, which only --capture-video needs."""
    lines, block = [], r'# /// script\n# requires-python = ">=3.10"\n# dependencies = (\[(?:.+\n)+?)# ///\n'
    for script in SCRIPTS:
        lines += ast.literal_eval(re.match(block, (ROOT / f"{script}.py").read_text())[1].replace("#", ""))
    text = (ROOT / "requirements.txt").read_text().split("# tests")[0]
    required = packages(line for line in text.splitlines() if line[0] != "#")
    del required["moviepy"]
    assert packages(lines) == required
