# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.9,<2.14",
#     "numpy>=1.26",
#     "gymnasium[box2d,classic-control,mujoco]>=1.4",
#     "tyro>=0.9",
#     "tensorboard>=2.18",
#     "tqdm>=4.66",
# ]
# ///
"""RL^2: a recurrent agent that learns to learn (Duan et al. 2016, arXiv 1611.02779), trained with PPO.

    python rl2_meta.py --env-id Bandit --num-arms 5 --episodes-per-trial 10
    python rl2_meta.py --resume runs/RUN                  go on after a kill, exactly
    python rl2_meta.py --evaluate runs/RUN                --capture-video too, in a simulator

A trial is n episodes in one task. The memory starts a trial empty and lives through its episodes: what the
agent learns of the task it must keep there, as its weights stand still. Training maximises whole trials.
Shapes: T steps of a trial, N trials side by side, n episodes, O observation, A actions, D input (O + A + 2),
R recurrent state, M trials in a minibatch, L = T and S = N in the functions shared with the other scripts.
Tags: [D1] to [D37] are the details of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy
Optimization", [X1] to [X4] its auxiliary ones.
"""

import atexit
import difflib
import functools
import importlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


SCRIPT = "rl2_meta"


@dataclass
class Args:
    # Run
    exp_name: str = "rl2_meta"
    """part of the run folder's name"""
    seed: int = 1
    """of weights, noise, minibatches, environments: the same seed, the same run, bit for bit on one CPU"""
    torch_deterministic: bool = True
    """only deterministic kernels (slower on a GPU, free on a CPU)"""
    run_dir: str | None = None
    """folder of this run; by default runs/{env_id}__{exp_name}__{seed}__{unix_time}"""
    resume: str | None = None
    """run folder to go on with, under its own flags; a larger --total-timesteps prolongs a finished run,
    whose annealed learning rate rises to that of the same step of a longer one"""
    evaluate: str | None = None
    """run folder whose last checkpoint is evaluated instead of training"""
    checkpoint_every: int = 0
    """iterations between checkpoints, each resets the environments (see restart); 0: about 20 a long run"""
    test_trials: int = 0
    """trials of the meta-test at the end, in new tasks; 0: 100000, or 40 in a simulator"""
    test_every: int = 0
    """iterations between meta-tests while training, each of a tenth of test_trials; 0: none"""
    stop_goal: float | None = None
    """training ends early once the last stop_window meta-tests reach that return of a trial; None: never"""
    stop_window: int = 3
    """meta-tests in a row that must reach stop_goal"""

    # Environment
    env_id: str = "Bandit"
    """Bandit, TabularMDP, HalfCheetahDir, HalfCheetahVel, AntDir, or a Gymnasium id with task_sampler"""
    num_arms: int = 5
    """k, arms of a Bandit"""
    episodes_per_trial: int = 10
    """n, episodes in one task; an episode of a Bandit is one pull. Where episodes can end early a trial holds
    more, as it always has n * episode_length steps, but only the first n count, in training too"""
    episode_length: int = 200
    """steps of an episode in a simulator; a TabularMDP has 10"""
    task_sampler: str | None = None
    """module:function that makes a task of a Gymnasium id: it is called with the innermost environment and a
    numpy generator before each trial, and sets what it likes"""
    total_timesteps: int = 6_000_000
    """environment steps over all environments and processes; in whole rollouts"""
    num_trials: int = 0
    """N, trials of a rollout, played side by side, per process; 0: 1024, or 8 in a simulator"""
    norm_obs: bool = False
    """observations minus running mean over running deviation, shared by all environments [D28]"""
    clip_obs: float = 10.0
    """bound of normalised observations; 0: none [D29]"""
    norm_reward: bool = False
    """rewards over the running deviation of the discounted return; norm_value does this better [D30]"""
    clip_reward: float = 10.0
    """bound of normalised rewards; 0: none; without norm_reward nothing is clipped [D31]"""

    # Algorithm
    learning_rate: float = 1e-2
    """Adam's step size; usable from 1e-5 to 3e-2: little for simulators, much for small rollouts of an MDP"""
    anneal_lr: bool = True
    """learning rate falls linearly to 0 at total_timesteps [D4]"""
    adam_eps: float = 1e-5
    """added to Adam's denominator; PyTorch's own default is 1e-8 [D3]"""
    ortho_init: bool = True
    """orthogonal weights, zero biases, gain 0.01 for the policy's head; off: PyTorch's init [D2, D32]"""
    gamma: float = 1.0
    """discount per step; the horizon is about 1 / (1 - gamma) steps"""
    gae: bool = True
    """generalised advantage estimation; off: n-step returns to the end of the rollout, lambda = 1 [D5]"""
    gae_lambda: float = 0.95
    """0: one-step advantages, little variance; 1: whole returns, no bias [D5]"""
    recompute_adv: bool = False
    """advantages anew before every epoch from the values learned so far (Andrychowicz et al. 2021)"""
    num_minibatches: int = 4
    """parts of a shuffled batch; with rnn a part is whole sequences; must divide their number [D6, D35]"""
    update_epochs: int = 1
    """passes over each batch, at most (see target_kl) [D6]"""
    norm_adv: bool = True
    """advantages to mean 0 and deviation 1 [D7]"""
    norm_adv_scope: Literal["minibatch", "batch"] = "minibatch"
    """what norm_adv takes the mean and deviation over [D7]"""
    clip_coef: float = 0.2
    """the probability ratio earns nothing beyond 1 - clip_coef and 1 + clip_coef [D8]"""
    anneal_clip: bool = False
    """clip_coef falls linearly to 0 at total_timesteps [X1]"""
    clip_vloss: bool = False
    """value moves at most clip_coef from the rollout's, in units of the value normaliser [D9]"""
    ent_coef: float = 0.05
    """weight of the entropy bonus; 0.01 helps discrete actions, a fixed deviation has none to gain [D10]"""
    anneal_ent: bool = True
    """ent_coef falls linearly to 0 at total_timesteps"""
    vf_coef: float = 0.5
    """weight of the value loss, which has a factor 0.5 of its own [D10]"""
    max_grad_norm: float = 0.5
    """longest joint gradient of all parameters; 0: no limit [D11]"""
    target_kl: float | None = None
    """epochs stop once an epoch's mean KL divergence from the rollout's policy exceeds it [X3]"""
    norm_value: bool = True
    """the critic learns returns divided by their running deviation (Andrychowicz et al. 2021)"""
    expected_reward: bool = True
    """advantages from an action's expected reward, where the task tells it; the agent sees the drawn one"""
    privileged_critic: bool = True
    """the value function, which only training needs, sees the steps left and a hint of the task: the goal, or
    what an optimal and a random player would still collect"""
    share_network: bool = True
    """policy and value share the hidden layers; off: a network each [D13, D26]"""
    layer_norm: bool = False
    """normalise the recurrent layer's output"""
    tabular: bool = True
    """in a TabularMDP the memory sees the state and action before as one of 50 cells, alone and times the
    reward, and the policy has weights for each state; off: as published, which learns far more slowly"""
    rnn: Literal["gru", "lstm"] = "gru"
    """recurrent layer between the observation and the networks"""
    rnn_hidden: int = 64
    """units of the recurrent layer; its state starts from zeros [D33]"""
    chrono_init: bool = True
    """recurrent units first remember for 1 to T steps, not for 1 or 2 (Tallec and Ollivier 2018); off
    where most that counts has just been seen, as in a simulator"""
    input_gain: float = 4.0
    """gain of ortho_init for the recurrent layer's inputs; 4 for one-hot ones, 1 for many numbers"""
    log_std_init: float = -1.0
    """initial log of the Gaussian's deviation, in the policy's units [D24]"""
    learn_std: bool = True
    """learn the deviation too, as is usual; a fixed one explores to the end, which does not suit Ant [D24]"""

    # Speed
    device: str = "cpu"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, mps; small networks are fastest on one CPU thread"""
    torch_threads: int = 1
    """threads of PyTorch in each process; small networks get slower with more"""

    # Logging
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "rl2"
    """its project"""
    wandb_entity: str | None = None
    """its team"""
    capture_video: bool = False
    """record the episodes of the first greedy trial of the meta-test as mp4, in a simulator"""

    @property
    def trial_length(self):
        """T, steps of a trial."""
        horizon = {"Bandit": 1, "TabularMDP": TabularMDP.HORIZON}.get(self.env_id, self.episode_length)
        return self.episodes_per_trial * horizon

    @property
    def seq_len(self):
        """L, steps of a training sequence: gradients go through whole trials."""
        return self.trial_length

    def __post_init__(self):
        self.num_trials = self.num_trials or (8 if task_class(self) is Simulator else 1024)
        for name, value in vars(self).items():
            low, high = 0, {"gamma": 1, "gae_lambda": 1, "seed": 2**32 - 1}.get(name, sys.float_info.max)
            zero = ("seed", "checkpoint_every", "num_trials", "test_trials", "test_every")
            if type(getattr(Args, name)) is int and name not in zero:
                low = 1
            if name in ("log_std_init", "stop_goal"):
                low = -high
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value} is out of range: give {low} to {high}")
        if self.resume or self.evaluate:
            return  # the run's own flags fit each other, and are not read yet
        if self.num_trials % self.num_minibatches:
            raise UsageError(f"--num-minibatches {self.num_minibatches} does not divide the "
                             f"{self.num_trials} trials of a rollout: give a divisor")
        steps = self.num_trials * self.trial_length
        alone = steps == self.num_minibatches and self.norm_adv and self.norm_adv_scope == "minibatch"
        if steps == 1 or alone:
            raise UsageError("one step has no deviation: give fewer --num-minibatches or more --num-trials")
        if self.norm_obs and task_class(self) is not Simulator:
            raise UsageError(f"--norm-obs: {self.env_id} observes no numbers to normalise: leave it out")
        if self.task_sampler and self.env_id in FAMILIES:
            raise UsageError(f"--task-sampler: {self.env_id} has tasks of its own: give a Gymnasium --env-id")


# ---------------------------------------------------------------------------------------------- environment


def import_or_explain(module, option):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{option} needs {module}: pip install {module}") from error


class Bandit:
    """k arms that pay 1 with probabilities uniform in [0, 1]; an episode is a pull, nothing is observed.

    The hint (N, 2) is what the best arm and what random arms would still pay on average, over the trial's
    pulls."""

    TEST_TRIALS = 100_000

    def __init__(self, args, num_trials, device):
        self.shape, self.num_pulls, self.device = (num_trials, args.num_arms), args.trial_length, device
        self.action_space = gym.spaces.Discrete(args.num_arms)
        self.obs_dim, self.hint_dim, self.rows = 0, 2, 1

    def reset(self):
        """New tasks. Returns their first observations (N, O) and hints (N, hint_dim)."""
        self.pays, self.left = torch.rand(self.shape, device=self.device), self.num_pulls
        self.bounds = torch.stack([self.pays.amax(1), self.pays.mean(1)], 1) / self.num_pulls
        return self.pays.new_zeros(self.shape[0], 0), self.left * self.bounds

    def step(self, action):
        """Act (N, 1). Returns the next observations and hints, rewards, ends (N,) and expected rewards."""
        expected = self.pays.gather(1, action).squeeze(1)
        reward, self.left = torch.bernoulli(expected), self.left - 1
        obs = self.pays.new_zeros(self.shape[0], 0)
        return obs, self.left * self.bounds, reward, torch.ones_like(reward), expected


class TabularMDP:
    """10 states, 5 actions, episodes of 10 steps from state 0; transitions are uniform on the simplex, mean
    rewards of normal distribution around 1, as is a reward around its mean.

    An observation is the state, one-hot, with `tabular` followed by the state and action before, one-hot of
    STATES * ACTIONS, and by the same times the reward. The hint (N, 2) is what an optimal and what a random
    player would still collect on average, over the trial's steps."""

    STATES, ACTIONS, HORIZON, TEST_TRIALS = 10, 5, 10, 100_000

    def __init__(self, args, num_trials, device):
        self.trial = torch.arange(num_trials, device=device)
        self.action_space, self.num_cells = gym.spaces.Discrete(self.ACTIONS), self.STATES * self.ACTIONS
        self.rows, self.obs_dim = 1, self.STATES
        if args.tabular:
            self.rows, self.obs_dim = self.STATES, self.STATES + 2 * self.num_cells
        self.num_episodes, self.hint_dim = args.episodes_per_trial, 2

    def reset(self):
        n, device = len(self.trial), self.trial.device
        weights = torch.empty(n, self.STATES, self.ACTIONS, self.STATES, device=device).exponential_()
        transitions = weights / weights.sum(-1, keepdim=True)
        self.edges = transitions.cumsum(-1)
        self.means = 1 + torch.randn(n, self.STATES, self.ACTIONS, device=device)
        values = [torch.zeros(n, self.STATES, 2, device=device)]
        for _ in range(self.HORIZON):  # value iteration for the optimal and for the random player
            q = self.means.unsqueeze(-1) + torch.einsum("nsax,nxp->nsap", transitions, values[-1])
            values.append(torch.stack([q[..., 0].amax(2), q[..., 1].mean(2)], -1))
        self.values = torch.stack(values[::-1])  # (HORIZON + 1, N, STATES, 2)
        self.state, self.t = torch.zeros_like(self.trial), 0
        self.before = torch.zeros(n, 2 * self.num_cells, device=device)
        return self.observe()

    def observe(self):
        """Observations (N, O) and hints."""
        episode, t = divmod(self.t, self.HORIZON)
        later = (self.num_episodes - 1 - episode) * self.values[0, :, 0]
        hint = (self.values[t, self.trial, self.state] + later) / (self.num_episodes * self.HORIZON)
        obs = nn.functional.one_hot(self.state, self.STATES).float()
        return torch.cat([obs, self.before], 1)[:, : self.obs_dim], hint

    def step(self, action):
        where = self.trial, self.state, action.squeeze(1)
        expected = self.means[where]
        reward = expected + torch.randn_like(expected)
        cell = nn.functional.one_hot(self.state * self.ACTIONS + action.squeeze(1), self.num_cells).float()
        self.before = torch.cat([cell, cell * reward.unsqueeze(1)], 1)
        draw = torch.rand_like(expected).unsqueeze(1)
        self.state = (draw > self.edges[where]).sum(1).clamp(max=self.STATES - 1)  # edges may end below 1
        self.t += 1
        done = self.t % self.HORIZON == 0
        if done:
            self.state = torch.zeros_like(self.state)
        return *self.observe(), reward, torch.full_like(reward, done), expected


class Runner(gym.Wrapper):
    """Runs towards `goal` 1 or -1, or at the speed `goal`, in place of forwards; the other costs stay."""

    def __init__(self, env, at_speed):
        super().__init__(env)
        self.at_speed, self.goal = at_speed, 1.0

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.error = info["x_velocity"] - self.goal
        run = -abs(self.error) if self.at_speed else self.goal * info["x_velocity"]
        return obs, reward - info["reward_forward"] + run, terminated, truncated, {}


# Gymnasium id, whether the goal is a speed, what else the environment is made with, the goals' distribution.
RUNNERS = {
    "HalfCheetahDir": ("HalfCheetah-v5", False, {"ctrl_cost_weight": 0.05}, lambda rng: rng.choice([-1, 1])),
    "HalfCheetahVel": ("HalfCheetah-v5", True, {"ctrl_cost_weight": 0.05}, lambda rng: rng.uniform(0, 2)),
    "AntDir": ("Ant-v5", False, {"terminate_when_unhealthy": False}, lambda rng: rng.choice([-1, 1])),
}


def record_episodes(env, video_dir, num_episodes):
    """The environment, its first episodes recorded as mp4."""
    if renderer := getattr(env.unwrapped, "mujoco_renderer", None):  # or the agent runs out of sight
        mujoco = importlib.import_module("mujoco")
        renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    wanted = range(num_episodes).__contains__
    return gym.wrappers.RecordVideo(env, video_dir, wanted, disable_logger=True)


class Simulator:
    """Tasks in Gymnasium environments. An observation after an episode's end is the next one's first.

    With a `video_dir` the episodes of the first trial are recorded."""

    TEST_TRIALS = 40

    def __init__(self, args, num_trials, device, video_dir=None):
        self.device, self.rng = device, np.random.default_rng(0)
        runner = RUNNERS.get(args.env_id)
        if runner:
            env_id, self.at_speed, options, draw = runner
            options = {"exclude_current_positions_from_observation": False, **options}
            self.sample = lambda env, rng: setattr(env, "goal", float(draw(rng)))
        else:
            env_id, self.at_speed, options = args.env_id, False, {}
            self.sample = load_sampler(args)

        def make_env(record):
            rendering = {"render_mode": "rgb_array"} if record else {}
            env = gym.make(env_id, max_episode_steps=args.episode_length, disable_env_checker=True, **options,
                           **rendering)
            env = record_episodes(env, video_dir, args.episodes_per_trial) if record else env
            env = Runner(env, self.at_speed) if runner else env
            flat = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
            return env if flat else gym.wrappers.FlattenObservation(env)

        if args.capture_video and sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it at its import, which is here
        thunks = [lambda record=bool(video_dir) and i == 0: make_env(record) for i in range(num_trials)]
        module, _, name = env_id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            if "mujoco" in str(gym.spec(name).entry_point):  # its warnings once, not num_trials times
                import_or_explain("mujoco", args.env_id).set_mju_user_warning(warnings.warn)
            self.envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
        except (gym.error.Error, ImportError, NotImplementedError) as error:
            names = [] if name in gym.registry else [*FAMILIES, *gym.registry]
            close = difflib.get_close_matches(name, names, cutoff=0.5)
            mend = f"; close names: {', '.join(close)}" if close else ""
            raise UsageError(f"cannot make --env-id {env_id}: {str(error).splitlines()[0]}{mend}") from error
        self.action_space, space = self.envs.single_action_space, self.envs.single_observation_space
        if not isinstance(space, gym.spaces.Box):
            raise UsageError(f"--env-id {env_id}: {space} is not a vector")
        if args.capture_video and "rgb_array" not in self.envs.metadata.get("render_modes", []):
            raise UsageError(f"--capture-video: {env_id} does not render pictures")
        real = np.issubdtype(self.action_space.dtype, np.floating)
        if not isinstance(self.action_space, gym.spaces.Box if real else gym.spaces.Discrete):
            raise UsageError(f"--env-id {env_id}: actions {self.action_space} are not supported: "
                             "Box of real numbers and Discrete are")
        self.obs_dim, self.hint_dim, self.rows = space.shape[0], int(runner is not None), 1

    def reset(self):
        seeds = self.rng.integers(2**31, size=self.envs.num_envs).tolist()
        for env in self.envs.envs:
            self.sample(env if isinstance(env, Runner) else env.unwrapped, self.rng)
        obs, _ = self.envs.reset(seed=seeds)
        hint = [[env.goal] for env in self.envs.envs] if self.hint_dim else np.zeros((len(seeds), 0))
        self.hint = self.tensor(hint)
        return self.tensor(obs), self.hint

    def tensor(self, x):
        return torch.as_tensor(np.asarray(x, np.float32), device=self.device)

    def step(self, action):
        action = action.cpu().numpy()
        if isinstance(self.action_space, gym.spaces.Discrete):
            action = action[:, 0] + self.action_space.start
        else:
            low, high = self.action_space.low, self.action_space.high
            action = np.clip(action.reshape(-1, *low.shape), low, high)
        obs, reward, terminated, truncated, _ = self.envs.step(action)
        if self.at_speed:
            self.error = np.array([env.error for env in self.envs.envs])
        reward = self.tensor(reward)
        return self.tensor(obs), self.hint, reward, self.tensor(terminated | truncated), reward


def load_sampler(args):
    """The function that --task-sampler names."""
    if args.task_sampler is None:
        raise UsageError(f"--env-id {args.env_id} is none of {', '.join(FAMILIES)}: give a --task-sampler")
    module, _, name = args.task_sampler.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(None, None)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"--task-sampler {args.task_sampler}: {error}; give module:function, which takes "
                         "an environment and a numpy generator") from error
    return function


FAMILIES = {"Bandit": Bandit, "TabularMDP": TabularMDP, **dict.fromkeys(RUNNERS, Simulator)}


def task_class(args):
    return FAMILIES.get(args.env_id, Simulator)


def make_tasks(args, num_trials, device, **recording):
    if args.capture_video and task_class(args) is not Simulator:
        raise UsageError(f"--capture-video: {args.env_id} has no pictures: leave it out")
    return task_class(args)(args, num_trials, device, **recording)


# ------------------------------------------------------------------------------------------------- networks


def world_size():
    """Number of processes that learn together [X2]."""
    return dist.get_world_size() if dist.is_initialized() else 1


class SharedSum:
    """Sums over the processes of one machine through memory that they share.

    gloo's all-reduce puts threads to sleep and wakes them: 1 ms each time, more than a minibatch takes."""

    def __init__(self, size, dtype):
        shape = (2, world_size(), 1 + size)
        with tempfile.NamedTemporaryFile() as file:
            path = [file.name]
            dist.broadcast_object_list(path)
            memory = torch.from_file(path[0], shared=True, size=math.prod(shape), dtype=dtype)
            dist.barrier()  # after that the file may go: the memory lives as long as somebody uses it
        self.turn, self.rank, memory = 0, dist.get_rank(), memory.view(shape).numpy()
        self.turns, self.rows = memory[..., 0], memory[..., 1:]

    def __call__(self, x):
        self.turn = (self.turn + 1) % 2**20  # float32 is exact so far
        half = self.turn % 2  # one process may be a turn ahead while another still reads the other half
        self.rows[half, self.rank] = x
        self.turns[half, self.rank] = self.turn
        while (self.turns[half] != self.turn).any():
            pass  # to sleep would cost more than the wait
        return self.rows[half].sum(0)


shared_sum = functools.cache(SharedSum)


@torch.compiler.disable
def sum_over_ranks(x):
    """Sum of a tensor over all processes, the same bits in each [X2]."""
    if world_size() == 1:
        return x
    if x.device.type == "cpu" and os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        total = shared_sum(x.numel(), x.dtype)(x.numpy().ravel())
        return torch.as_tensor(total).view(x.shape)
    dist.all_reduce(x)
    return x


class RunningMeanStd(nn.Module):
    """Mean and variance of everything seen, by all environments and processes, in float64 [D28].

    In float32 they freeze after some 10^7 samples."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def _apply(self, fn, recurse=True):
        return self  # stays on the CPU, where observations arrive: mps has no float64

    def update(self, x):
        """Take in a batch (..., *shape), an array or tensor, by the parallel formula of Chan et al. 1979."""
        x = torch.as_tensor(x).cpu().double().reshape(-1, *self.mean.shape)
        n = sum_over_ranks(torch.tensor(float(len(x)), dtype=torch.float64))
        mean = sum_over_ranks(x.sum(0)) / n
        squares = sum_over_ranks((x - mean).square().sum(0))
        delta, total = mean - self.mean, self.count + n
        self.var.copy_((self.var * self.count + squares + delta**2 * self.count * n / total) / total)
        self.mean += delta * n / total
        self.count.copy_(total)


def layer_init(layer, gain, args):
    """Orthogonal weights with that gain and zero biases [D2], [D32] for recurrent layers."""
    if args.ortho_init:
        for name, parameter in layer.named_parameters():
            nn.init.orthogonal_(parameter, gain) if "weight" in name else nn.init.zeros_(parameter)
    return layer


def memory_init(memory, args):
    """Weights of a recurrent layer, orthogonal gate by gate [D32], and for how long its units remember.

    Of one-hot inputs a step sees three or four: with gain 1 they hardly move a unit, and only a unit that
    they bend can bind a reward to its action."""
    size = args.rnn_hidden
    if args.ortho_init:
        for weight, gain in ((memory.weight_ih_l0, args.input_gain), (memory.weight_hh_l0, 1.0)):
            for gate in weight.data.split(size):
                nn.init.orthogonal_(gate, gain)
        nn.init.zeros_(memory.bias_ih_l0)
        nn.init.zeros_(memory.bias_hh_l0)
    if args.chrono_init:
        inward, keep, *_ = memory.bias_ih_l0.data.split(size)  # what keeps is z of a GRU, f of an LSTM
        keep.uniform_(1, max(2, args.trial_length - 1)).log_()
        if args.rnn == "lstm":
            inward.copy_(-keep)
    return memory


class Agent(nn.Module):
    """Policy, value function and every statistic that they need.

    Inputs (L, S, D) are trials side by side, followed by what only the critic sees: hints of the task and the
    share of the trial that is left. `state` (S, R) is the memory before the first step. `starts` and `mask`
    serve functions shared with other scripts."""

    def __init__(self, tasks, args):
        super().__init__()
        space = tasks.action_space
        self.args, self.discrete = args, isinstance(space, gym.spaces.Discrete)
        self.num_actions = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.obs_rms = RunningMeanStd((tasks.obs_dim,))
        self.reward_rms, self.value_rms = RunningMeanStd(()), RunningMeanStd(())
        self.register_buffer("value_std", torch.ones(()))
        self.input_size = tasks.obs_dim + self.num_actions + 2
        self.hint_size = tasks.hint_dim + 1 if args.privileged_critic else 0
        layer, size = {"gru": nn.GRU, "lstm": nn.LSTM}[args.rnn], args.rnn_hidden
        count = 1 if args.share_network else 2  # [D13]
        memories = [memory_init(layer(self.input_size, size), args) for _ in range(count)]
        norms = [nn.LayerNorm(size) if args.layer_norm else nn.Identity() for _ in range(count)]
        self.memories, self.norms = nn.ModuleList(memories), nn.ModuleList(norms)
        self.state_size = size * count * (2 if args.rnn == "lstm" else 1)
        self.rows = tasks.rows
        self.actor = layer_init(nn.Linear(size, self.rows * self.num_actions), 0.01, args)
        self.critic = layer_init(nn.Linear(size, 1), 1.0, args)
        if args.privileged_critic:
            wide = layer_init(nn.Linear(size + self.hint_size, 2 * size), 2**0.5, args)
            self.critic = nn.Sequential(wide, nn.ReLU(), layer_init(nn.Linear(2 * size, 1), 1.0, args))
        if not self.discrete:
            log_std = torch.full((self.num_actions,), args.log_std_init)
            self.log_std = nn.Parameter(log_std) if args.learn_std else nn.Buffer(log_std)  # [D24]

    def normalize(self, obs):
        """Observations (..., O) to the networks' input [D28], [D29]."""
        if self.args.norm_obs:
            obs = (obs.cpu() - self.obs_rms.mean) / (self.obs_rms.var + 1e-8).sqrt()
            if self.args.clip_obs:
                obs = obs.clamp(-self.args.clip_obs, self.args.clip_obs)
        return obs.float().to(self.value_std.device)

    def encode(self, obs, hint, left, action, reward, done):
        """Input of a step (N, D): the observation, and the action, reward and episode end before it."""
        if self.discrete:
            action = nn.functional.one_hot(action.squeeze(1), self.num_actions)
        parts = [self.normalize(obs), action, reward.unsqueeze(1), done.unsqueeze(1)]
        if self.hint_size:
            parts += [hint, torch.full_like(parts[-1], left)]
        return torch.cat([part.float() for part in parts], 1)

    def remember(self, inputs, state):
        """Features (L, S, F) of policy and value function, and the memory after the last step (S, R)."""
        inputs, outputs, states = inputs[..., : self.input_size], [], []
        parts = state.chunk(len(self.memories), -1)
        for memory, norm, part in zip(self.memories, self.norms, parts, strict=True):
            if self.args.rnn == "lstm":
                hidden, cell = (x.contiguous() for x in part[None].chunk(2, -1))
                output, after = memory(inputs, (hidden, cell))
                after = torch.cat(after, -1)
            else:
                output, after = memory(inputs, part[None].contiguous())
            outputs.append(norm(output))
            states.append(after[0])
        return outputs[0], outputs[-1], torch.cat(states, -1)

    def value(self, features, inputs):
        hint = inputs[..., self.input_size :]
        return self.critic(torch.cat([features, hint], -1)).squeeze(-1) * self.value_std

    def get_value(self, inputs, state, starts):
        """Values (L, S) in units of returns."""
        return self.value(self.remember(inputs, state)[1], inputs)

    def forward(self, inputs, state, starts=None, mask=None, action=None, noise=0.0):
        """Act with that noise (0: the likeliest action), or evaluate `action` (L, S, A) again.

        Returns action (L, S, A), its log-probability, entropy and value (L, S), and the memory (S, R) after
        the last step. No value when acting: one pass over whole trials (get_value) is cheaper."""
        policy, critic, memory = self.remember(inputs, state)
        value = None if action is None else self.value(critic, inputs)
        output = self.actor(policy)
        if self.rows > 1:
            now = inputs[..., : self.rows].unsqueeze(-1)  # the state's own row
            output = (now * output.unflatten(-1, (self.rows, -1))).sum(-2)
        if self.discrete:
            part = Categorical(logits=output, validate_args=False)
            action = (output + noise).argmax(-1, keepdim=True) if action is None else action
            logprob, entropy = part.log_prob(action.squeeze(-1)), part.entropy()
        else:
            part = Normal(output, self.log_std.clamp(-5, 2).exp().expand_as(output), validate_args=False)
            action = output + part.stddev * noise if action is None else action
            logprob, entropy = part.log_prob(action).sum(-1), part.entropy().sum(-1)
        return action, logprob, entropy, value, memory

    def draw_noise(self, num_trials):
        """What makes an action random (N, A): standard normal, or Gumbel for choices."""
        noise = torch.empty(num_trials, self.num_actions, device=self.value_std.device)
        return -noise.exponential_().log() if self.discrete else noise.normal_()


# ------------------------------------------------------------------------------------------------ algorithm


def compute_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalised advantages (T, N) (Schulman et al. 2016, equation 16) [D5]. All arguments (T, N).

    `next_values[t]` is the value of the state that action t led to, also where the episode was cut there."""
    deltas = rewards + gamma * next_values * (1 - terminated) - values
    decays = gamma * gae_lambda * (1 - done)
    advantages, advantage = [], torch.zeros_like(deltas[0])
    for delta, decay in zip(reversed(deltas.unbind()), reversed(decays.unbind()), strict=True):
        advantage = torch.addcmul(delta, decay, advantage)
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


def normalize_rewards(rewards, done, running, agent):
    """Rewards (T, N) over the deviation of the discounted return [D30], clipped [D31].

    `running` (N,) is the return so far and goes on in place."""
    returns, clip = [], agent.args.clip_reward
    for reward, end in zip(rewards, done, strict=True):
        returns.append(running.mul_(agent.args.gamma).add_(reward).clone())
        running *= 1 - end
    agent.reward_rms.update(torch.cat(returns))
    rewards = rewards / (agent.reward_rms.var + 1e-8).sqrt().float().to(rewards.device)
    return rewards.clamp(-clip, clip) if clip else rewards


def normalize_advantages(advantages):
    """Mean 0, deviation 1 [D7]."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


# [D12]
METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")
LOGGED = (*METRICS, "explained_variance", "epochs", "last_episode_return", "test_return")


def ppo_loss(newlogprob, entropy, newvalue, mb, hyper, value_std, args):
    """Clipped surrogate, value loss and entropy bonus (Schulman et al. 2017, equation 9) [D8], [D9], [D10].

    The new quantities and those of the minibatch `mb` are (L, M). Returns the loss and the first METRICS."""
    _, clip_coef, ent_coef, vf_coef = hyper.unbind()
    advantages = mb["advantages"]
    if args.norm_adv and args.norm_adv_scope == "minibatch":
        advantages = normalize_advantages(advantages)
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped * advantages).mean()  # [D8]
    error = ((newvalue - mb["returns"]) / value_std).square()
    if args.clip_vloss:  # [D9]
        change = (newvalue - mb["values"]) / value_std
        near = mb["values"] + change.clamp(-clip_coef, clip_coef) * value_std
        error = torch.max(error, ((near - mb["returns"]) / value_std).square())
    v_loss = 0.5 * error.mean()
    entropy = entropy.mean()
    loss = pg_loss - ent_coef * entropy + vf_coef * v_loss  # [D10]
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    # KL estimators k1 and k3 of Schulman's note: -log r, and r - 1 - log r, which is never negative.
    metrics = (pg_loss, v_loss, entropy, -logratio.mean(), (ratio - 1 - logratio).mean(), clipfrac)
    return loss, torch.stack([m.detach() for m in metrics])


def flatten_parameters(agent):
    """Optimiser state over one vector of all parameters, which the agent's own become views of.

    One vector makes the gradient's norm, Adam and the all-reduce one operation each."""
    params = nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    for parameter, view in zip(agent.parameters(), parameter_views(agent, params).values(), strict=True):
        parameter.data = view
    moments = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")}
    return {"params": params, **moments, "bias": params.new_zeros(2)}


def parameter_views(agent, params):
    """Parameters by name, as views of one vector."""
    sizes = [p.numel() for p in agent.parameters()]
    named = zip(agent.named_parameters(), params.split(sizes), strict=True)
    return {name: part.view(p.shape) for (name, p), part in named}


def adam_step(opt, grad, learning_rate, eps, betas=(0.9, 0.999)):
    """Adam (Kingma and Ba 2015, algorithm 1) in place, as torch.optim.Adam computes it [D3].

    1 - beta^t is the same moving average, of ones: pow(), fused into the loop, would double its time."""
    opt["exp_avg"].lerp_(grad, 1 - betas[0])
    opt["exp_avg_sq"].lerp_(grad.square(), 1 - betas[1])
    bias1, bias2 = opt["bias"].add_((1 - opt["bias"]) * (1 - grad.new_tensor(betas))).unbind()
    deviation = (opt["exp_avg_sq"] * (1 / bias2)).sqrt()
    opt["params"].sub_(learning_rate / bias1 * opt["exp_avg"] / (deviation + eps))


def train_step(agent, opt, batch, state, index, hyper, metrics):
    """One optimiser step on sequences `index` (M,) of the batch (L, S, ...), in place; adds to `metrics`."""
    args, mb = agent.args, {name: x[:, index] for name, x in batch.items()}
    with torch.enable_grad():  # not torch.func.grad, which differentiates a recurrent layer step by step
        inputs = (mb["obs"], state[index], mb["starts"], mb.get("mask"), mb["actions"])
        _, newlogprob, entropy, newvalue, _ = agent(*inputs)
        loss, step_metrics = ppo_loss(newlogprob, entropy, newvalue, mb, hyper, agent.value_std, args)
        grads = torch.autograd.grad(loss, tuple(agent.parameters()))
    grad = torch.cat([g.flatten() for g in grads])
    if world_size() > 1:
        grad = sum_over_ranks(grad) / world_size()
    norm = grad.norm()
    if args.max_grad_norm:
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)  # [D11]
    adam_step(opt, grad, hyper[0], args.adam_eps)
    metrics.add_(torch.cat([step_metrics, norm.view(1)]))


# ---------------------------------------------------------------------------------------- rollout and update


@torch.no_grad()
def play(tasks, agent, greedy=False):
    """Play one trial in each of N new tasks, the memory empty at its start and kept over its episodes.

    Yields for each of the T steps the input, the action and its log-probability, the observation (N, O), the
    reward drawn, whether the episode ended, and the reward expected (N,)."""
    obs, hint = tasks.reset()
    num_trials, device = len(obs), agent.value_std.device
    state = torch.zeros(num_trials, agent.state_size, device=device)
    shape = (num_trials, 1) if agent.discrete else (num_trials, agent.num_actions)
    action = torch.zeros(shape, dtype=torch.long if agent.discrete else torch.float32, device=device)
    reward, done = torch.zeros(num_trials, device=device), torch.ones(num_trials, device=device)
    for left in range(agent.args.trial_length, 0, -1):
        inputs = agent.encode(obs, hint, left / agent.args.trial_length, action, reward, done)
        noise = 0.0 if greedy else agent.draw_noise(num_trials)
        action, logprob, _, _, state = agent(inputs.unsqueeze(0), state, noise=noise)
        action, seen = action[0], obs
        obs, hint, reward, done, expected = tasks.step(action)
        yield inputs, action, logprob[0], seen, reward, done, expected


def episode_of(done, num_episodes):
    """Index of each step's episode in its trial (T, N) from episode ends (T, N).

    Where episodes can end early a trial's T steps hold more than n: index n is all that follow."""
    done = done.long()
    return (done.cumsum(0) - done).clamp(max=num_episodes)


def episode_returns(rewards, done, num_episodes):
    """Return of each of the first n episodes of a trial (n, N) from rewards and episode ends (T, N)."""
    sums = rewards.new_zeros(num_episodes + 1, rewards.shape[1])
    return sums.scatter_add_(0, episode_of(done, num_episodes), rewards)[:-1]


def collect(tasks, agent):
    """One trial in each of N new tasks [D1].

    Returns the rollout, tensors (T, N, ...), observations (T, N, O) and returns of the episodes (n, N)."""
    steps = zip(*play(tasks, agent), strict=True)
    inputs, actions, logprobs, obs, rewards, done, expected = map(torch.stack, steps)
    state = torch.zeros(rewards.shape[1], agent.state_size, device=rewards.device)
    zeros, last = torch.zeros_like(rewards), torch.zeros_like(rewards)
    last[-1] = 1  # a trial's end is the only one: value flows over the episodes' ends
    counted = episode_of(done, agent.args.episodes_per_trial) < agent.args.episodes_per_trial
    with torch.no_grad():
        values = agent.get_value(inputs, state, zeros)
    rollout = {"obs": inputs, "actions": actions, "logprobs": logprobs, "values": values, "starts": zeros,
               "rewards": (expected if agent.args.expected_reward else rewards) * counted,
               "terminated": last, "done": last,
               "states": state.unsqueeze(0)}
    return rollout, obs, episode_returns(rewards, done, agent.args.episodes_per_trial)


def next_values(agent, rollout, values):
    """Values (T, N) of the states that the actions led to; after a trial there is nothing."""
    return torch.cat([values[1:], torch.zeros_like(values[:1])])


def to_sequences(x, length):
    """(T, N, ...) to S = N * T / length sequences side by side, (length, S, ...) [D35]."""
    return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2)


@torch.no_grad()
def update(agent, opt, rollout, stream, hyper, step):
    """Learn from one rollout by `step`, which is train_step. Returns METRICS, means over all minibatches."""
    args, device = agent.args, agent.value_std.device
    rewards, values, length = rollout["rewards"], rollout["values"], args.seq_len
    if args.norm_reward:
        rewards = normalize_rewards(rewards, rollout["done"], stream.discounted, agent)
    numbers = [hyper[name] for name in ("learning_rate", "clip_coef", "ent_coef", "vf_coef")]
    numbers = torch.tensor(numbers, device=device)  # no floats, for which the graph would be compiled anew
    metrics, steps = torch.zeros(len(METRICS), device=device), 0
    state = rollout["states"][::length].flatten(0, 1)
    for epoch in range(hyper["update_epochs"]):
        if epoch and args.recompute_adv:
            values = agent.get_value(rollout["obs"], rollout["states"][0], rollout["starts"])
        if not epoch or args.recompute_adv:
            advantages = compute_gae(rewards, values, next_values(agent, rollout, values),
                                     rollout["terminated"], rollout["done"], args.gamma,
                                     args.gae_lambda if args.gae else 1.0)
            returns = advantages + values  # TD(lambda) [D5]
            if args.norm_value and not epoch:
                agent.value_rms.update(returns.flatten())
                agent.value_std.copy_((agent.value_rms.var + 1e-8).sqrt())
            if args.norm_adv and args.norm_adv_scope == "batch":
                advantages = normalize_advantages(advantages)
            names = [k for k in ("obs", "actions", "logprobs", "values", "starts", "mask") if k in rollout]
            arrays = {k: rollout[k] for k in names} | {"advantages": advantages, "returns": returns}
            batch = {name: to_sequences(x, length) for name, x in arrays.items()}
        before = metrics.clone()
        for index in torch.randperm(len(state), device=device).chunk(args.num_minibatches):  # [D6]
            step(agent, opt, batch, state, index, numbers, metrics)
            steps += 1
        if hyper["target_kl"] is not None:  # [X3]; the same in all processes, or one would wait for ever
            kl = sum_over_ranks(metrics - before)[METRICS.index("approx_kl")] / args.num_minibatches
            if kl / world_size() > hyper["target_kl"]:
                break
    means = sum_over_ranks(metrics) / steps / world_size()
    result = dict(zip(METRICS, means.tolist(), strict=True))
    result["explained_variance"] = 1 - ((returns - rollout["values"]).var() / (returns.var() + 1e-8)).item()
    result["epochs"] = steps // args.num_minibatches
    return result


# ------------------------------------------------------------------------------------ evaluation, checkpoint


def derive_seeds(*key, n):
    """`n` independent seeds from a key such as (seed, rank, iteration): no two streams share one."""
    return [int(seed) for seed in np.random.SeedSequence(key).generate_state(n)]


EVALUATION = 2**31  # takes the rank's place in the key of evaluation seeds


def restart(tasks, seed, rank, iteration):
    """Tasks and noise from seeds of this iteration: a resume needs no simulator's state."""
    noise, rng = derive_seeds(seed, rank, iteration, n=2)
    torch.manual_seed(noise)
    tasks.rng = np.random.default_rng(rng)


def meta_test(agent, greedy, num_trials, when=0, video_dir=None):
    """Returns of the episodes (n, num_trials) in freshly drawn tasks, statistics frozen.

    Beside them, where the goal is a speed, its error in each step of the last episode, else None. The first
    trial may be recorded."""
    args, returns, errors = agent.args, [], []
    at_speed = args.env_id in RUNNERS and RUNNERS[args.env_id][1]
    at_once = 200 if task_class(args) is Simulator else 10_000
    device = agent.value_std.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for first in range(0, num_trials, at_once):
            recording = {"video_dir": video_dir} if video_dir and not first else {}
            num = min(num_trials - first, at_once)
            tasks = make_tasks(args, num, device, **recording)
            restart(tasks, args.seed, EVALUATION + when, first)
            rewards, done, error = [], [], []
            for *_, reward, end, _ in play(tasks, agent, greedy):
                rewards.append(reward)
                done.append(end)
                error.append(tasks.error if at_speed else np.zeros(0))
            part = episode_returns(torch.stack(rewards), torch.stack(done), args.episodes_per_trial)
            returns.append(part.cpu().double().numpy())
            errors.append(np.stack(error)[-args.episode_length :])
    return np.concatenate(returns, 1), np.concatenate(errors, 1) if at_speed else None


# Return of a trial of learners that know the tasks' structure, by task, episodes of a trial and arms: as
# benchmarks/references.py measures it in 4,000 MDPs and 20,000 or more bandits; UCB1 and what is below it are
# exact for 10 pulls.
REFERENCES = {
    ("Bandit", 10, 5): {"random": 5.0, "Thompson sampling": 5.830, "UCB1": 6.657, "Gittins index": 6.660,
                        "Bayes optimum": 6.660},
    ("Bandit", 10, 10): {"random": 5.0, "Thompson sampling": 5.579, "UCB1": 6.711, "Gittins index": 6.714,
                         "Bayes optimum": 6.714},
    ("Bandit", 100, 5): {"random": 50.0, "Thompson sampling": 75.05, "UCB1": 78.31, "Gittins index": 78.63},
    ("Bandit", 100, 10): {"random": 50.0, "Thompson sampling": 77.07, "UCB1": 83.30, "Gittins index": 83.80},
    ("TabularMDP", 10, None): {"random": 100.0, "PSRL": 138.2, "UCRL2": 147.1, "BUCB-VI": 156.4,
                               "task known": 218.3},
}


def report_meta_test(agent, run_dir):
    """Meta-test with greedy and with sampled actions, and print both. Returns summary.json's numbers."""
    args, summary = agent.args, {}
    num_trials = args.test_trials or task_class(args).TEST_TRIALS
    for greedy, name, key in ((True, "eval", "trial_return_greedy"), (False, "eval_sampled", "trial_return")):
        video_dir = str(run_dir / "videos") if args.capture_video and greedy else None
        episodes, errors = meta_test(agent, greedy, num_trials, video_dir=video_dir)
        x, n = episodes.sum(0), args.episodes_per_trial
        rows = np.vstack([x, episodes])
        se = rows.std(1, ddof=1) / math.sqrt(num_trials) if num_trials > 1 else np.full(n + 1, np.nan)
        curve = "greedy_episode_returns" if greedy else "episode_returns"
        summary |= {f"{name}_mean": float(x.mean()), f"{name}_std": float(x.std()),
                    f"{key}_mean": float(x.mean()), f"{key}_se": float(se[0]),
                    curve: episodes.mean(1).tolist(), f"{curve}_se": se[1:].tolist()}
        shown = [i for i in (1, 2, 3, 5, 10, 25, 50, 100, 250, 500) if i <= n]
        print(f"{'greedy' if greedy else 'sampled'} actions, {num_trials} trials in new tasks: "
              f"return {x.mean():.3f} +- {se[0]:.3f}, by episode "
              + ", ".join(f"{i}: {episodes[i - 1].mean():.3f}" for i in shown))
        if errors is not None:  # absolute before the mean over tasks, for which one constant speed costs 0
            honest, signed = float(np.abs(errors).sum(0).mean()), float(abs(errors.sum(0).mean()))
            summary |= {f"{key}_cost": honest, f"{key}_signed_cost": signed}
            print(f"  last episode's sum of |speed - goal| {honest:.1f}, of the signed error {signed:.1f}")
    arms = args.num_arms if args.env_id == "Bandit" else None
    for name, value in REFERENCES.get((args.env_id, n, arms), {}).items():
        print(f"  {name:18} {value:8.3f}")
    return summary | {"eval_episodes": num_trials * n}


def save_checkpoint(run_dir, agent, at, **state):
    """Replace checkpoint.pt in one step: a kill at any moment leaves the old one or the new one."""
    content = {"script": SCRIPT, "args": asdict(agent.args), "at": vars(at), "agent": agent.state_dict()}
    content |= state
    with open(run_dir / "checkpoint.tmp", "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")


def load_checkpoint(run_dir):
    """Content of a run's checkpoint.pt: plain tensors and numbers only."""
    path = Path(run_dir) / "checkpoint.pt"
    if not path.is_file():
        raise UsageError(f"no checkpoint {path}: give the folder of a run that has written one")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script, saved, *_ = (checkpoint[name] for name in ("script", "args", "at", "agent", "opt"))
    except Exception as error:
        raise UsageError(f"{path} is damaged or no checkpoint ({type(error).__name__})") from error
    if script != SCRIPT:
        raise UsageError(f"{path} was written by {script}.py: use that script")
    if saved.keys() != vars(Args()).keys():
        raise UsageError(f"{path} was written by a {SCRIPT}.py with other flags: use that one")
    return checkpoint


# ------------------------------------------------------------------------------------------------- training


def start_tracking(args, run_dir):
    """Send Weights & Biases what TensorBoard gets."""
    wandb = import_or_explain("wandb", "--track")
    try:
        wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name,
                   dir=str(run_dir), config=asdict(args), sync_tensorboard=True)
    except wandb.Error as error:
        raise UsageError(f"--track: {error}") from error


class RunLog:
    """metrics.csv, TensorBoard, Weights & Biases and the console of a run that goes on after `rows`."""

    CHARTS = ("episodic_return", "episodic_length", "learning_rate", "SPS")
    COLUMNS = ("global_step", "seconds", *CHARTS, *LOGGED)

    def __init__(self, run_dir, args, rows):
        self.run_dir, self.rows, done = run_dir, rows, rows[-1][0] if rows else 0
        git = f"git -C '{Path(__file__).parent}' rev-parse HEAD 2> {os.devnull}"
        commit = subprocess.run(git, shell=True, capture_output=True, text=True).stdout.strip()
        names = {"torch", "numpy", "gymnasium", "mujoco", "ale_py"} & sys.modules.keys()
        about = {name: sys.modules[name].__version__ for name in sorted(names)}
        about |= {"git_commit": commit or None, "script": SCRIPT}
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "args.json").write_text(json.dumps(asdict(args) | about, indent=2) + "\n")
            (run_dir / "summary.json").unlink(missing_ok=True)  # of a run that goes on
        except OSError as error:
            raise UsageError(f"--run-dir {run_dir}: {error.strerror}") from error
        if args.track:
            start_tracking(args, run_dir)
        self.writer = SummaryWriter(str(run_dir), purge_step=done + 1)
        self.file = open(run_dir / "metrics.csv", "w", buffering=1)  # noqa: SIM115
        self.file.writelines(",".join(map(str, row)) + "\n" for row in (self.COLUMNS, *rows))
        self.bar = tqdm(total=args.total_timesteps, initial=done, unit=" steps",
                        disable=not sys.stderr.isatty())

    def log(self, at, numbers, milestone):
        """Write one iteration's numbers. Without a terminal only milestones are printed."""
        returns, lengths = np.mean(at.recent, 0).tolist() if at.recent else (float("nan"), float("nan"))
        numbers |= {"global_step": at.global_step, "seconds": at.seconds,
                    "episodic_return": returns, "episodic_length": lengths}
        self.rows.append([numbers[name] for name in self.COLUMNS])
        self.file.write(",".join(map(str, self.rows[-1])) + "\n")
        for name in self.COLUMNS[2:]:
            group = "charts" if name in self.CHARTS else "losses"
            self.writer.add_scalar(f"{group}/{name}", numbers[name], numbers["global_step"])
        self.bar.set_postfix_str(f"return {returns:.1f}", refresh=False)
        self.bar.update(at.global_step - self.bar.n)
        if self.bar.disable and milestone:
            print(f"{at.global_step} steps, {numbers['SPS']:.0f} steps/s, return {returns:.1f}", flush=True)

    def close(self, summary=None):
        """Close the files; `summary` goes into summary.json."""
        self.bar.close()
        self.file.close()
        if summary:
            self.writer.add_scalar("eval/episodic_return", summary["eval_mean"], summary["global_step"])
            (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self.writer.close()


LIVE = ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "update_epochs", "target_kl")


def read_live(path, seen, values, global_step):
    """Take changes from live.json into `values`. Returns its modification time, next time's `seen`."""
    modified = None
    try:
        modified = path.stat().st_mtime_ns
        if modified == seen:
            return seen
        changes = dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        tqdm.write(f"live.json ignored: {error}")
        return modified
    for name, value in changes.items():
        number = type(value) is int or (type(value) is float and name != "update_epochs")
        valid = (number and 0 < value < sys.float_info.max) or (value == 0 and name.endswith("coef"))
        if name not in LIVE or not (valid or (name == "target_kl" and value is None)):
            tqdm.write(f"live.json: {name} = {value} ignored; what can change: {', '.join(LIVE)}")
        elif values[name] != value:
            change = f"step {global_step}: {name} {values[name]} -> {value}"
            tqdm.write(f"live.json at {change}")
            with open(path.with_suffix(".log"), "a") as file:
                file.write(change + "\n")
            values[name] = value
    return modified


def set_up_torch(args):
    """Threads and determinism. Returns the device."""
    torch.set_num_threads(args.torch_threads)
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a second pass over every new tensor
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS demands it
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {args.device} is not there: {str(error).splitlines()[0]}") from error


def join_processes(device):
    """The process group under torchrun [X2]. Returns this process's rank."""
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return int(os.environ.get("RANK", 0))


def build(args, checkpoint, device):
    """Tasks, agent and optimiser state, new or as the checkpoint has them."""
    if args.stop_goal is not None and not args.test_every:
        raise UsageError(f"--stop-goal {args.stop_goal:g} is compared with meta-tests: give --test-every")
    if args.resume and is_evaluated(args) and reached(checkpoint["at"]["tests"], args):
        raise UsageError(f"the run has reached --stop-goal {args.stop_goal:g}: give a higher one, or None")
    tasks = make_tasks(args, args.num_trials, device)
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(tasks, args).to(device)
    opt = flatten_parameters(agent)
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UsageError(f"the checkpoint is of an environment with other spaces: {reason}") from error
        for name, value in opt.items():
            value.copy_(checkpoint["opt"][name])
    return tasks, agent, opt


def choose_run_dir(args):
    """The run's folder, which holds no other run."""
    env_name = args.env_id.replace("/", "_").replace(":", "_")
    name = f"{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or args.run_dir or f"runs/{name}")
    if not args.resume and (run_dir.is_file() or (run_dir / "checkpoint.pt").exists()):
        raise UsageError(f"--run-dir {run_dir} is a file or holds a run: --resume it or give another folder")
    return run_dir


def print_header(args, tasks, agent, num_iterations, run_dir, device):
    print(f"{SCRIPT}.py  {args.env_id}, seed {args.seed}\n"
          f"  inputs {agent.input_size} (observation, action, reward, end), actions {tasks.action_space}\n"
          f"  {device}, {world_size()} process(es) of {args.torch_threads} thread(s)\n"
          f"  {num_iterations} iterations of {args.num_trials} trials of {args.episodes_per_trial} episodes, "
          f"{args.trial_length} steps, at most {args.update_epochs} epochs of {args.num_minibatches} parts\n"
          f"  folder {run_dir}", flush=True)


def catch_signals(caught):
    """Append the first Ctrl-C or SIGTERM (a second one kills). Returns the handlers there were before."""

    def catch(signum, frame):
        caught.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    return {signum: signal.signal(signum, catch) for signum in (signal.SIGINT, signal.SIGTERM)}


def schedule(live, remaining, args):
    """This iteration's hyper-parameters, the same in every process; `remaining` falls from 1 to 0."""
    everyone = [live]
    if world_size() > 1:
        dist.broadcast_object_list(everyone)
    hyper = dict(everyone[0])
    hyper["learning_rate"] *= remaining if args.anneal_lr else 1  # [D4]
    hyper["clip_coef"] *= remaining if args.anneal_clip else 1  # [X1]
    hyper["ent_coef"] *= remaining if args.anneal_ent else 1
    return hyper


def check_finite(iteration, **quantities):
    for name, value in quantities.items():
        if not np.isfinite(value).all():
            raise FloatingPointError(f"{name} not finite in iteration {iteration}; the checkpoint is kept")


def reached(tests, args):
    """Whether the last stop_window meta-tests, (steps, mean return) each, all reach stop_goal."""
    window = [value for _, value in tests[-args.stop_window :]]
    return args.stop_goal is not None and len(window) == args.stop_window and min(window) >= args.stop_goal


def is_evaluated(args):
    """Whether the run to resume, if any, has its summary: a kill may come between its last step and that."""
    return not args.resume or Path(args.resume, "summary.json").exists()


def count_iterations(args, at, batch_size):
    """Iterations of the whole run, also done ones; at least one is left, or only the summary is missing."""
    left = (args.total_timesteps - at.global_step) // batch_size
    if args.total_timesteps < at.global_step or (left <= 0 and is_evaluated(args)):
        raise UsageError(f"--total-timesteps {args.total_timesteps} leaves no rollout of {batch_size} steps "
                         f"after the {at.global_step} that are done: give a larger one")
    if at.batch_size != batch_size:
        raise UsageError(f"the run's rollouts have {at.batch_size} steps, not {batch_size}: "
                         "resume it with as many processes")
    return at.iteration + left


def train(args, checkpoint=None):
    """Train from the start or on from a checkpoint, then meta-test. Returns what summary.json holds."""
    clock, device = time.perf_counter(), set_up_torch(args)
    rank, batch_size = join_processes(device), args.num_trials * args.trial_length * world_size()
    at = SimpleNamespace(iteration=0, global_step=0, seconds=0.0, batch_size=batch_size, recent=[], rows=[],
                         tests=[], live={name: getattr(args, name) for name in LIVE})
    if checkpoint:
        at = SimpleNamespace(**vars(at) | checkpoint["at"])
    num_iterations = count_iterations(args, at, batch_size)
    run_dir, save_every = choose_run_dir(args), args.checkpoint_every or max(1, num_iterations // 20)
    tasks, agent, opt = build(args, checkpoint, device)
    log = RunLog(run_dir, args, at.rows) if rank == 0 else None
    if log:
        print_header(args, tasks, agent, num_iterations, run_dir, device)
    restart(tasks, args.seed, rank, at.iteration)
    stream = SimpleNamespace(discounted=torch.zeros(args.num_trials, device=device))  # for normalize_rewards
    if args.norm_obs and not checkpoint:
        check_finite(0, observations=(obs := collect(tasks, agent)[1]).cpu().numpy())
        agent.obs_rms.update(obs)
    handlers, live_seen, stop = catch_signals(signals := []), None, reached(at.tests, args)
    while at.iteration < num_iterations and not stop:
        live_seen = read_live(run_dir / "live.json", live_seen, at.live, at.global_step) if log else None
        hyper = schedule(at.live, 1 - at.iteration / num_iterations, args)
        at.iteration, at.global_step = at.iteration + 1, at.global_step + batch_size
        rollout, obs, episodes = collect(tasks, agent)
        check_finite(at.iteration, observations=obs.cpu().numpy(), rewards=rollout["rewards"].cpu().numpy())
        losses = update(agent, opt, rollout, stream, hyper, train_step)
        check_finite(at.iteration, **losses)
        if args.norm_obs:
            agent.obs_rms.update(obs)  # [D28]
        at.recent = [(episodes.sum(0).mean().item(), args.trial_length)]
        if args.test_every and at.iteration % args.test_every == 0:
            at.tests.append((at.global_step, test_mean(agent, at.iteration)))
        stop = bool(sum_over_ranks(torch.tensor(len(signals) + reached(at.tests, args))))  # all processes
        save = at.iteration % save_every == 0 or at.iteration == num_iterations or stop
        clock, seconds = time.perf_counter(), time.perf_counter() - clock
        at.seconds += seconds
        if log:
            losses |= {"learning_rate": hyper["learning_rate"], "SPS": batch_size / seconds,
                       "last_episode_return": episodes[-1].mean().item(),
                       "test_return": at.tests[-1][1] if at.tests else float("nan")}
            log.log(at, losses, save)
        if save and log:
            save_checkpoint(run_dir, agent, at, opt=opt)
        if save:
            restart(tasks, args.seed, rank, at.iteration)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    return finish(agent, run_dir, at, log, num_iterations) if log else None


def test_mean(agent, when):
    """Mean return of a trial in a short meta-test, of sampled actions: greedy ones may not explore at all."""
    args = agent.args
    num_trials = max(1, (args.test_trials or task_class(args).TEST_TRIALS) // 10)
    return float(meta_test(agent, False, num_trials, when)[0].sum(0).mean())


def finish(agent, run_dir, at, log, num_iterations):
    """Meta-test and write summary.json, or say how to go on with a run that was stopped."""
    if at.iteration < num_iterations and not reached(at.tests, agent.args):
        log.close()
        print(f"saved at {at.global_step} steps; to go on: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(130)
    speeds = [row[RunLog.COLUMNS.index("SPS")] for row in at.rows]
    summary = {"env_id": agent.args.env_id, "seed": agent.args.seed, "global_step": at.global_step,
               "seconds": at.seconds, "sps": float(np.median(speeds))}
    log.bar.close()
    summary |= report_meta_test(agent, run_dir)
    log.close(summary)
    print(f"  folder {run_dir}\n  again: python {sys.argv[0]} --evaluate {run_dir}")
    return summary


def evaluate_run(args, checkpoint):
    _, agent, _ = build(args, checkpoint, set_up_torch(args))
    report_meta_test(agent, Path(args.evaluate))


# What may be given again with --resume and --evaluate.
FREE = {"resume", "evaluate", "total_timesteps", "test_trials", "stop_goal", "device", "torch_threads",
        "track", "wandb_project_name", "wandb_entity", "capture_video"}
# Flags that need a package beyond the script's own.
OPTIONAL = {"track": "wandb", "capture_video": "moviepy"}


def main():
    try:
        args, checkpoint = tyro.cli(Args, description=__doc__), None
        if args.resume and args.evaluate:
            raise UsageError("give --resume or --evaluate, not both")
        if args.resume or args.evaluate:
            checkpoint = load_checkpoint(args.resume or args.evaluate)
            saved = Args(**checkpoint["args"])
            saved.track = saved.track and not args.evaluate  # evaluation logs nothing
            args = tyro.cli(Args, description=__doc__, default=saved)
            for name in vars(args).keys() - FREE:
                if getattr(args, name) != getattr(saved, name):
                    raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: the run has "
                                     f"{getattr(saved, name)}, and goes on under its own flags")
        for flag, module in OPTIONAL.items():
            if getattr(args, flag):
                import_or_explain(module, f"--{flag.replace('_', '-')}")
        evaluate_run(args, checkpoint) if args.evaluate else train(args, checkpoint)
    except KeyboardInterrupt:  # before training or after it, when all is saved
        sys.exit(130)
    except (UsageError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
