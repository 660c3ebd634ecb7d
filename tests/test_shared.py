"""What the scripts have in common is the same in each: functions, help of flags, packages."""

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
OWN = {"Agent", "Args", "make_env", "make_envs", "time_limit", "train"}
OWN_OF = {
    "muesli_cartpole": {"evaluate", "main"},  # evaluations while training, no compiler
    # Losses of trials, a preset for samplers, no compiler.
    "rl2_meta": {"compute_gradients", "evaluate", "parse_args", "mean_over_ranks"},
}
# Flags that mean something else in one script than in the others.
OWN_FLAGS = {
    "ppo_continuous": set(),
    "ppo_atari": {"device", "env_id"},
    "muesli_cartpole": {
        "learning_rate",
        "norm_adv",
        "num_envs",
        "torch_threads",
        "total_timesteps",
    },
    "rl2_meta": {"capture_video", "ent_coef", "env_id", "gae_lambda", "gamma", "learning_rate"}
    | {"num_minibatches"},
}
PAIRS = list(combinations(SCRIPTS, 2))


def definitions(script):
    """Source of the functions and classes of a script."""
    module = importlib.import_module(script)
    return {
        name: inspect.getsource(x)
        for name, x in vars(module).items()
        if inspect.isroutine(x) | inspect.isclass(x) and x.__module__ == script
    }


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_functions_classes_and_help_are_the_same(one, two):
    """But for the tags of a flag's sources."""
    sources = definitions(one), definitions(two)
    own = OWN | OWN_OF.get(one, set()) | OWN_OF.get(two, set())
    shared = (sources[0].keys() & sources[1].keys()) - own
    assert len(shared) > 6
    for name in shared:
        assert sources[0][name] == sources[1][name], name
    docs = [
        {name: re.sub(r"\s*\[[DX0-9, ]+\]", "", doc) for name, doc in flag_docs(script).items()}
        for script in (one, two)
    ]
    for name in (docs[0].keys() & docs[1].keys()) - OWN_FLAGS[one] - OWN_FLAGS[two]:
        assert docs[0][name] == docs[1][name], name


def packages(lines):
    """Versions and extras of each package."""
    found = defaultdict(set)
    for package in map(Requirement, lines):
        found[package.name] |= {str(package.specifier), *package.extras}
    return found


def test_scripts_and_requirements_name_the_same_packages():
    """And moviepy, which only --capture-video needs."""
    block = r'# /// script\n# requires-python = ">=3.10"\n# dependencies = (\[(?:.+\n)+?)# ///\n'
    lines = []
    for script in SCRIPTS:
        found = re.match(block, (ROOT / f"{script}.py").read_text())[1]
        lines += ast.literal_eval(found.replace("#", ""))
    text = (ROOT / "requirements.txt").read_text().split("# tests")[0]
    required = packages(line for line in text.splitlines() if line[0] != "#")
    del required["moviepy"]
    assert packages(lines) == required
