"""Environments with known best returns and values, registered when this module is imported.

`probes:Bandit-v0` is an --env-id wherever this folder is on the path, `tests.probes:Bandit-v0` above it."""

import copy

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete


class Probe(gym.Env):
    """Episodes of `length` steps. Subclasses say what is observed, and what an action earns in step `t`."""

    observation_space = Box(-1, 1, (1,))
    action_space = Discrete(2)
    length = 1

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def observe(self):
        return np.zeros(self.observation_space.shape, np.float32)

    def reward(self, action):
        return 1.0

    def info(self):
        return {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), self.info()

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        reward = float(self.reward(action))
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, self.info()


class Bandit(Probe):
    """Best action 0.5, best return 0."""

    action_space = Box(-1, 1, (1,))

    def reward(self, action):
        return -((action[0] - 0.5) ** 2)


class Chain(Probe):
    """Only the last of five steps is rewarded, whatever is done: the value before step t is gamma^(4 - t)."""

    observation_space = Box(0, 1, (5,))
    length = 5

    def observe(self):
        return np.eye(6, 5, dtype=np.float32)[self.t]

    def reward(self, action):
        return self.t == 4


class Forever(Probe):
    """Reward 1 for ever, cut by a time limit only: the value is 1 / (1 - gamma)."""

    length = None


class Memory(Probe):
    """The cue, 0 or 1, is seen in step 0 and must be given back in the last of four steps: chance is 0.5."""

    observation_space = Box(-1, 1, (2,))
    length = 4

    def observe(self):
        if self.t == 0:
            self.cue = int(self.np_random.integers(2))
        return np.array([0 if self.t else 2 * self.cue - 1, self.t == self.length - 1], np.float32)

    def reward(self, action):
        return self.t == self.length - 1 and action == self.cue


class Masked(Probe):
    """The higher of the actions 0 to 3 is the better; in each step a random two are forbidden and raise."""

    action_space = Discrete(4)
    length = 3
    forbid = True  # off: forbidden actions are played

    def info(self):
        self.mask = self.np_random.permutation(np.array([1, 1, 0, 0], np.int8))
        return {"action_mask": self.mask}

    def reward(self, action):
        if self.forbid and not self.mask[action]:
            raise ValueError(f"action {action} is forbidden")
        return action / 3


class MaskedAtReset(Masked):
    """The mask is in reset's info only, and holds for the first step."""

    def info(self):
        return super().info() if self.t == 0 else {}

    def reward(self, action):
        return super().reward(action) if self.t == 0 else 0


class Target(Probe):
    """One step that earns the share of the action's components that are those of `target`."""

    def __init__(self, action_space, target, render_mode=None):
        self.action_space, self.target = action_space, target

    def reward(self, action):
        return np.mean(np.asarray(action) == self.target)


class DictObservation(Probe):
    """The observation names the action that earns 1."""

    observation_space = Dict(noise=Box(-1, 1, (2, 2)), target=Discrete(3))
    action_space = Discrete(3)

    def observe(self):
        self.shown = self.observation_space.sample() | {"target": np.int64(self.np_random.integers(3))}
        return self.shown

    def reward(self, action):
        return action == self.shown["target"]


class BooleanObservation(Probe):
    """Two booleans; their exclusive or is the action that earns 1."""

    observation_space = Box(0, 1, (2,), bool)

    def observe(self):
        self.shown = self.np_random.integers(2, size=2).astype(bool)
        return self.shown

    def reward(self, action):
        return action == self.shown[0] ^ self.shown[1]


class Shown(Probe):
    """An observation of any space, whatever is done."""

    def __init__(self, observation_space, render_mode=None):
        self.observation_space = observation_space

    def observe(self):
        return self.observation_space.sample()


class Endless(Probe):
    """Reward 1 for ever; its specification names a time limit that nothing enforces, or none."""

    length = None

    def __init__(self, limit=40, render_mode=None):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        self.spec = copy.deepcopy(self.spec)
        self.spec.max_episode_steps = self.limit
        return super().reset(seed=seed)


class Broken(Probe):
    """After `good_steps` steps of an environment's life, over all episodes, `what` is NaN."""

    length = 10

    def __init__(self, what, good_steps=100, render_mode=None):
        self.what, self.left = what, good_steps

    def observe(self):
        return np.full(1, np.nan if self.what == "observation" and self.left <= 0 else 0, np.float32)

    def reward(self, action):
        self.left -= 1
        return np.nan if self.what == "reward" and self.left < 0 else 0


class Bare(Bandit):
    """A bandit whose constructor takes nothing: it knows no rendering."""

    def __init__(self):
        super().__init__()


ENVIRONMENTS = {
    "Bandit-v0": (Bandit, {}),
    "Bare-v0": (Bare, {}),
    "Chain-v0": (Chain, {}),
    "Forever-v0": (Forever, {}),
    "Memory-v0": (Memory, {}),
    "Masked-v0": (Masked, {}),
    "MaskedAtReset-v0": (MaskedAtReset, {}),
    "Endless-v0": (Endless, {}),
    "BooleanObservation-v0": (BooleanObservation, {}),
    "ShownDiscrete-v0": (Shown, {"observation_space": Discrete(3)}),
    "ShownMultiBinary-v0": (Shown, {"observation_space": MultiBinary(3)}),
    "ShownMultiDiscrete-v0": (Shown, {"observation_space": MultiDiscrete([2, 3])}),
    "ShownPicture-v0": (Shown, {"observation_space": Box(0, 255, (4, 4, 3), np.uint8)}),
    "DiscreteStart-v0": (Target, {"action_space": Discrete(3, start=5), "target": 7}),
    "MultiDiscrete-v0": (Target, {"action_space": MultiDiscrete([3, 4]), "target": [2, 1]}),
    "MultiDiscreteStart-v0": (
        Target, {"action_space": MultiDiscrete([3, 4], start=[5, -2]), "target": [7, -1]}),
    "MultiBinary-v0": (Target, {"action_space": MultiBinary(3), "target": [1, 0, 1]}),
    "DictObservation-v0": (DictObservation, {}),
    "NanReward-v0": (Broken, {"what": "reward"}),
    "NanObservation-v0": (Broken, {"what": "observation"}),
}
for name, (entry_point, kwargs) in ENVIRONMENTS.items():
    if name not in gym.registry:
        gym.register(name, entry_point, kwargs=kwargs, max_episode_steps=5 if name == "Forever-v0" else None)
