"""Environments with known best returns and values, registered when this module is imported.

`probes:Bandit-v0` is an --env-id wherever this folder is on the path."""

import random

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence


class Probe(gym.Env):
    """Episodes of `length` steps. Subclasses say what is observed and what an action earns in step
    `t`."""

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

    def render(self):
        """Nothing."""

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
    """Only the last of five steps is rewarded: the value before step t is gamma^(4 - t)."""

    observation_space = Box(0, 1, (5,))
    length = 5

    def observe(self):
        return np.eye(6, 5, dtype=np.float32)[self.t]

    def reward(self, action):
        return self.t == 4


class Forever(Probe):
    """Reward 1 in every step, cut by a time limit only: the value is 1 / (1 - gamma)."""

    length = None


class Loose(Forever):
    """Draws from every generator, and has infos that Gymnasium cannot gather."""

    def observe(self):
        draws = random.random(), np.random.rand(), self.np_random.random()
        return np.array([sum(draws)], np.float32)

    def info(self):
        return {"x": np.zeros(self.np_random.integers(1, 4))}


class Line(Probe):
    """Observations 1, 2, 3 and 4, all in one array; the third step ends the episode, by a time
    limit or in a terminal state."""

    observation_space = Box(0, 100, (1,))

    def __init__(self, truncate=True):
        super().__init__()
        self.truncate, self.obs = truncate, np.zeros(1, np.float32)

    def observe(self):
        self.obs[:] = self.t + 1
        return self.obs

    def step(self, action):
        obs, reward, *_ = super().step(action)
        end = self.t == 3
        return obs, reward, end and not self.truncate, end and self.truncate, {}


class Memory(Probe):
    """The cue, 0 or 1, is seen in step 0 and must be given back in the last of four steps."""

    observation_space = Box(-1, 1, (2,))
    length = 4

    def observe(self):
        if self.t == 0:
            self.cue = int(self.np_random.integers(2))
        cue = 0 if self.t else 2 * self.cue - 1
        return np.array([cue, self.t == self.length - 1], np.float32)

    def reward(self, action):
        return self.t == self.length - 1 and action == self.cue


class Masked(Probe):
    """The higher action is the better; in each step, or in the first only, two of four are
    forbidden."""

    action_space = Discrete(4)
    length = 3
    forbid = True  # off: forbidden actions are played

    def __init__(self, first_only=False):
        super().__init__()
        self.first_only = first_only

    def info(self):
        if self.first_only and self.t > 0:
            self.mask = np.ones(4, np.int8)
            return {}
        self.mask = self.np_random.permutation(np.array([1, 1, 0, 0], np.int8))
        return {"action_mask": self.mask}

    def reward(self, action):
        if self.forbid and not self.mask[action]:
            raise ValueError(f"action {action} is forbidden")
        return action / 3


class Empty(gym.Env):
    """Takes no arguments."""


class Undrawn(Probe):
    """Has no screen."""

    def render(self):
        raise OSError("no screen")


class Target(Probe):
    """One step that earns the share of the action's components that are those of `target`."""

    def __init__(self, action_space, target):
        super().__init__()
        self.action_space, self.target = action_space, target

    def reward(self, action):
        return np.mean(np.asarray(action) == self.target)


class Shown(Probe):
    """An observation of any space. Where it has a part "target", that is the action which earns
    1."""

    action_space = Discrete(3)

    def __init__(self, observation_space):
        super().__init__()
        self.observation_space = observation_space

    def observe(self):
        self.shown = self.observation_space.sample()
        return self.shown

    def reward(self, action):
        return isinstance(self.shown, dict) and action == self.shown["target"]


ENVIRONMENTS = {
    "Bandit-v0": (Bandit, {}),
    "Chain-v0": (Chain, {}),
    "Forever-v0": (Forever, {}),
    "Loose-v0": (Loose, {}),
    "Line-v0": (Line, {}),
    "Memory-v0": (Memory, {}),
    "Masked-v0": (Masked, {}),
    "Levels-v0": (Target, {"action_space": Box(0, 9, (2,), int), "target": 0}),
    "MultiBinary-v0": (Target, {"action_space": MultiBinary(3), "target": [1, 0, 1]}),
    "MultiDiscrete-v0": (
        Target,
        {"action_space": MultiDiscrete([3, 4], start=[5, -2]), "target": [7, -1]},
    ),
    "Empty-v0": (Empty, {}),
    "Undrawn-v0": (Undrawn, {}),
    "ShownBooleans-v0": (Shown, {"observation_space": Box(0, 1, (2,), bool)}),
    "ShownDict-v0": (
        Shown,
        {"observation_space": Dict(noise=Box(-1, 1, (2, 2)), target=Discrete(3))},
    ),
    "ShownPicture-v0": (Shown, {"observation_space": Box(0, 255, (4, 4, 3), np.uint8)}),
    "ShownStrip-v0": (Shown, {"observation_space": Box(0, 255, (2, 8, 3), np.uint8)}),
    "ShownWords-v0": (Shown, {"observation_space": Sequence(Box(0, 9, (2,), int))}),
}
for name, (entry_point, kwargs) in ENVIRONMENTS.items():
    gym.register(
        name,
        entry_point,
        kwargs=kwargs,
        max_episode_steps=5 if name in ("Forever-v0", "Loose-v0") else None,
    )
