# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "numpy>=1.26", "gymnasium[box2d,classic-control,mujoco]>=1.4",
#                 "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""RL^2: a recurrent agent that learns to learn (Duan et al. 2016, arXiv 1611.02779), with PPO.

    python rl2_meta.py --env-id Bandit --num-arms 10    train, then meta-test
    python rl2_meta.py --resume runs/RUN                resume a killed run exactly
    python rl2_meta.py --evaluate runs/RUN              repeat the meta-test
    python rl2_meta.py --env-id TabularMDP --preset published    close to the paper

A trial is n episodes in one unknown task. The RNN state is zero when a trial begins and is kept
across its episodes: it holds all that the agent learns of the task, as the weights do not change.
PPO maximizes the return of whole trials.

Not the paper's, and off in `--preset published`: rewards by arm or cell as input, a policy row per
state of an MDP, regrets as rewards, critic that sees the task, network that both share, long memories
of the RNN, entropy bonus, discount 1. The paper says TRPO; its authors' code is a clipped PPO, too.

Shapes: T steps of a trial, N trials, n episodes, O observation, A actions, D = O + A + 2 inputs
(observation, previous action, reward and done), M trials in a minibatch, H hint for the critic.
Tags: [D1] to [D37], [X1] to [X4]: Huang et al. 2022, "The 37 Implementation Details of PPO".
"""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.functional import one_hot
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class UsageError(ValueError):
    """Invalid usage: printed as one line, exit status 2."""

@dataclass
class Args:
    # Run
    exp_name: str = "rl2_meta"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder to evaluate instead of training
    test_trials: int = 100_000  # of the meta-test, greedy and sampled each
    test_every: int = 0  # iterations between meta-tests, a tenth as large; 0: none
    checkpoint_every: int = 0  # iterations; each resets the environments; 0: about 20 a run or fewer

    # Environment
    env_id: str = "Bandit"  # also TabularMDP, HalfCheetahDir, HalfCheetahVel, AntDir, Gymnasium's
    task_sampler: str | None = None  # module:function(env, rng) that sets a task of a Gymnasium id
    num_arms: int = 5  # arms of a Bandit
    episodes_per_trial: int = 10  # n; only the first n count where episodes end early
    episode_length: int = 200  # steps per episode of a simulator
    total_timesteps: int = 6_000_000  # steps over all environments and processes
    num_trials: int = 1024  # N, trials in a rollout per process [D1]
    norm_obs: bool = False  # normalize observations by their running mean and std [D28]
    clip_obs: float = 10.0  # clip normalized observations; 0: off [D29]

    # Algorithm
    learning_rate: float = 1e-2  # of Adam; usable from 1e-5 to 3e-2, less in simulators
    anneal_lr: bool = True  # linearly to 0 [D4]
    adam_eps: float = 1e-5  # Adam's epsilon; PyTorch's default is 1e-8 [D3]
    ortho_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's [D2, D32]
    gamma: float | None = 1.0  # discount factor; None: 0.95, or 1 if episodes end early
    gae_lambda: float = 0.95  # 0: one-step TD errors, 1: returns of whole trials (no GAE) [D5]
    num_minibatches: int = 4  # per epoch, of whole trials [D6, D35]
    update_epochs: int = 1  # maximum epochs per rollout [D6]
    norm_adv: bool = True  # normalize the advantages of each minibatch [D7]
    clip_coef: float = 0.2  # clip range of the probability ratio [D8]
    clip_vloss: bool = False  # clip the change of the value to clip_coef * value_std [D9]
    ent_coef: float = 0.05  # entropy bonus [D10]
    anneal_ent: bool = True  # anneal ent_coef linearly to 0
    vf_coef: float = 0.5  # weight of the value loss, beside its factor 0.5 [D10]
    max_grad_norm: float = 0.5  # maximum global gradient norm; 0: off [D11]
    target_kl: float | None = None  # stop after an epoch whose mean KL exceeds it [X3]
    norm_value: bool = True  # the critic learns returns over their running std
    learn_regret: bool = True  # maximize A*(s, a), an action's negative regret; the agent still sees rewards
    privileged_critic: bool = True  # the critic sees the time left and a hint of the task
    tabular: bool = True  # reward by arm or cell as input; MDP: policy row per state
    share_network: bool = True  # one network for actor and critic, or one each [D13]
    rnn: Literal["gru", "lstm"] = "gru"  # layer before actor and critic
    rnn_hidden: int = 64  # its width; the state starts at zero [D33]
    chrono_init: bool = True  # initial memories of 2 to T steps (Tallec and Ollivier 2018)
    log_std_init: float = -1.0  # initial log std of the Gaussian [D24]
    learn_std: bool = True  # learn the std, one for all states [D24]

    # Speed
    device: str = "cpu"  # auto, cpu (fastest for small networks), cuda, cuda:1, mps
    torch_threads: int = 1  # per process; small networks get slower with more

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "rl2"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first greedy trial (simulators)

    @property
    def trial_length(self):
        horizons = {"Bandit": 1, "TabularMDP": TabularMDP.HORIZON}
        return self.episodes_per_trial * horizons.get(self.env_id, self.episode_length)

    def check(self, default):
        """Raise UsageError unless all flags are in range, fit each other and, where they differ
        from `default`, are of use in this environment."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            low, high = RANGES.get(name, (1 if field.type is int and field.default else 0, 10**12))
            if field.type in (int, float, float | None) and value is not None and not low <= value <= high:
                raise UsageError(f"{name} = {value} is not in range: {low} to {high}")
        M = self.num_minibatches
        if self.num_trials % M or self.num_trials * self.trial_length == M:
            raise UsageError(f"{M} minibatches (2+ steps) must divide {self.num_trials} trials")
        if (self.env_id in FAMILIES) == (self.task_sampler is not None):
            raise UsageError(f"env_id {self.env_id}, task_sampler {self.task_sampler}: give one of "
                             f"{', '.join(FAMILIES)}, or a Gymnasium id and a task_sampler")
        own = FAMILIES.get(self.env_id, Simulator).FLAGS
        for name in [name for family in FAMILIES.values() for name in family.FLAGS]:
            if name not in own and getattr(self, name) != getattr(default, name):
                raise UsageError(f"{name} is of no use in {self.env_id}")

RANGES = {"gamma": (0, 1), "gae_lambda": (0, 1), "log_std_init": (-5, 2), "seed": (0, 2**32 - 1)}
LONG_TRIALS = {"num_trials": 256, "num_minibatches": 8, "total_timesteps": 60_000_000}
SIMULATOR = {"rnn": "lstm", "chrono_init": False, "share_network": False, "gamma": 0.99,
             "episodes_per_trial": 2, "num_trials": 8, "update_epochs": 10, "target_kl": 0.03,
             "norm_obs": True, "learning_rate": 1e-3, "ent_coef": 0.0, "test_trials": 200}
PRESETS = {
    "none": {}, "hundred": LONG_TRIALS | {"episodes_per_trial": 100},  # pulls of a Bandit
    "TabularMDP": LONG_TRIALS | {"rnn_hidden": 128, "learning_rate": 0.02, "gamma": 0.99, "gae_lambda": 0.9,
                                 "anneal_ent": False},
    "HalfCheetahDir": SIMULATOR | {"total_timesteps": 3_200_000},
    "HalfCheetahVel": SIMULATOR | {"total_timesteps": 4_000_000, "num_trials": 16},
    "AntDir": SIMULATOR | {"total_timesteps": 4_000_000, "num_trials": 16},
    "simulator": SIMULATOR | {"total_timesteps": 1_000_000, "gamma": None},  # 0.95; 1 if episodes end early
    # Duan et al. 2016, but without its ReLU GRU with normalized weights, KL line search and Monte Carlo
    # targets. For ten pulls it has --num-trials 25000 --num-minibatches 200.
    "published": {"rnn_hidden": 256, "gamma": 0.99, "gae_lambda": 0.3, "learning_rate": 1e-3,
                  "anneal_lr": False, "adam_eps": 1e-8, "num_trials": 2500, "num_minibatches": 20,
                  "update_epochs": 5, "target_kl": 0.01, "clip_coef": 0.1, "ent_coef": 0.0,
                  "max_grad_norm": 0.0, "share_network": False, "privileged_critic": False,
                  "learn_regret": False, "tabular": False, "chrono_init": False,
                  "total_timesteps": 250_000_000},
}

class Bandit:
    """Arms that pay 1 with probabilities uniform in [0, 1]; an episode is one pull. With `tabular` an
    observation is the previous reward in its arm's place, else nothing. The hint is the
    probabilities and the highest of them."""

    FLAGS = ("num_arms", "learn_regret", "tabular")

    def __init__(self, args, num_trials, device, video_dir=None):
        self.num_trials, self.num_arms, self.device = num_trials, args.num_arms, device
        self.action_space, self.num_rows = Discrete(args.num_arms), 1
        self.obs_size, self.hint_size = args.num_arms * args.tabular, args.num_arms + 1

    def reset(self):
        """New tasks. Returns observations (N, O) and hints (N, H)."""
        self.probs = torch.rand(self.num_trials, self.num_arms, device=self.device)
        self.hint = torch.cat([self.probs, self.probs.amax(1, keepdim=True)], 1)
        return torch.zeros_like(self.probs[:, : self.obs_size]), self.hint

    def step(self, action):
        """Returns next observations and hints, rewards, dones and A*(s, a) of what was done (N,)."""
        arm = one_hot(action, self.num_arms)
        reward = torch.bernoulli((self.probs * arm).sum(1))
        advantage = ((self.probs - self.hint[:, -1:]) * arm).sum(1)
        obs = arm[:, : self.obs_size] * reward[:, None]
        return obs, self.hint, reward, torch.ones_like(reward), advantage

class TabularMDP:
    """10 states, 5 actions, episodes of 10 steps from state 0; Dirichlet(1) transitions, rewards
    N(mean, 1) with means N(1, 1). An observation is the one-hot state. With `tabular` it also has
    the previous state and action as one of 50 cells, one-hot, and the same times the reward. The
    hint is what an optimal and what a random policy would still collect."""

    STATES, ACTIONS, HORIZON = 10, 5, 10
    FLAGS = ("tabular", "learn_regret")

    def __init__(self, args, num_trials, device, video_dir=None):
        self.num_trials, self.num_episodes = num_trials, args.episodes_per_trial
        self.trials = torch.arange(num_trials, device=device)
        self.action_space = Discrete(self.ACTIONS)
        self.num_cells = self.STATES * self.ACTIONS * args.tabular
        self.obs_size, self.hint_size = self.STATES + 2 * self.num_cells, 2
        self.num_rows = self.STATES if args.tabular else 1

    def reset(self):
        N, S, A, device = self.num_trials, self.STATES, self.ACTIONS, self.trials.device
        weights = torch.empty(N, S, A, S, device=device).exponential_()
        transitions = weights / weights.sum(-1, keepdim=True)
        self.cumulative = transitions.cumsum(-1)
        self.means = 1 + torch.randn(N, S, A, device=device)
        values, advantages = [torch.zeros(N, S, 2, device=device)], []
        for _ in range(self.HORIZON):  # value iteration for the optimal and the random policy
            q = self.means[..., None] + torch.einsum("nsax,nxp->nsap", transitions, values[-1])
            values.append(torch.stack([q[..., 0].amax(2), q[..., 1].mean(2)], -1))
            advantages.append(q[..., 0] - values[-1][..., :1])
        self.values = torch.stack(values[::-1])  # (HORIZON + 1, N, S, 2)
        self.advantages = torch.stack(advantages[::-1])  # (HORIZON, N, S, A)
        self.state, self.t = torch.zeros_like(self.trials), 0
        self.cells = torch.zeros(N, 2 * self.num_cells, device=device)
        return self.observe()

    def observe(self):
        t, later = self.t % self.HORIZON, self.num_episodes - 1 - self.t // self.HORIZON  # episodes
        hint = self.values[t, self.trials, self.state] + later * self.values[0, :, 0]
        obs = torch.cat([one_hot(self.state, self.STATES), self.cells], 1)
        return obs, hint / (self.num_episodes * self.HORIZON)

    def step(self, action):
        chosen = self.trials, self.state, action
        reward = self.means[chosen] + torch.randn_like(self.means[chosen])
        advantage = self.advantages[self.t % self.HORIZON][chosen]
        if self.num_cells:
            cell = one_hot(self.state * self.ACTIONS + action, self.num_cells)
            self.cells = torch.cat([cell, cell * reward[:, None]], 1)
        next_state = (torch.rand_like(reward)[:, None] > self.cumulative[chosen]).sum(1)
        self.t += 1
        done = self.t % self.HORIZON == 0
        self.state = next_state.clamp(max=self.STATES - 1) * (not done)  # cumulative may end below 1
        return *self.observe(), reward, torch.full_like(reward, done), advantage

class Runner(gym.Wrapper):
    """Rewards direction `goal` (1 or -1) or velocity `goal`, not speed (Finn et al. 2017)."""

    def __init__(self, env, to_velocity):
        super().__init__(env)
        self.to_velocity, self.goal = to_velocity, 1.0

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.error = info["x_velocity"] - self.goal
        run = -abs(self.error) if self.to_velocity else self.goal * info["x_velocity"]
        return obs, reward - info["reward_forward"] + run, terminated, truncated, {}

RUNNERS = {
    "HalfCheetahDir": ("HalfCheetah-v5", {"ctrl_cost_weight": 0.05}),
    "HalfCheetahVel": ("HalfCheetah-v5", {"ctrl_cost_weight": 0.05}),
    "AntDir": ("Ant-v5", {"terminate_when_unhealthy": False}),
}

class Simulator:
    """Gymnasium environments. An observation after an episode's end is the next one's first.
    A trial begins with a new goal of the Runner, which is the hint, or a call of the sampler."""

    FLAGS = ("episode_length", "norm_obs", "clip_obs", "log_std_init", "learn_std", "capture_video")

    def __init__(self, args, num_trials, device, video_dir=None):
        self.num_trials, self.device, self.alternate = num_trials, device, False
        self.runner, self.to_velocity = args.env_id in RUNNERS, args.env_id == "HalfCheetahVel"
        env_id, options = RUNNERS.get(args.env_id, (args.env_id, {}))
        if self.runner:
            options = options | {"exclude_current_positions_from_observation": False, "camera_name": "track"}
        def make_env(i):
            recorded = args.capture_video and i == 0
            render = {"render_mode": "rgb_array"} if recorded else {}
            env = gym.make(env_id, max_episode_steps=args.episode_length, disable_env_checker=True,
                           **options, **render)
            if recorded:  # better to fail now than after the training
                import moviepy  # noqa: F401
                env.reset(seed=0)
                assert env.render() is not None, "it renders nothing"
            if recorded and video_dir:
                env = gym.wrappers.RecordVideo(env, video_dir, lambda n: n < args.episodes_per_trial)
            if self.runner:
                return Runner(env, self.to_velocity)
            is_vector = isinstance(env.observation_space, Box) and len(env.observation_space.shape) == 1
            return env if is_vector else gym.wrappers.FlattenObservation(env)

        try:
            if importlib.util.find_spec("mujoco"):  # its warnings once, not once per environment
                importlib.import_module("mujoco").set_mju_user_warning(warnings.warn)
            thunks = [lambda i=i: make_env(i) for i in range(num_trials)]
            self.envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
        except Exception as error:
            raise UsageError(f"{args.env_id}: {type(error).__name__}: {error}") from error
        space, self.action_space = self.envs.single_observation_space, self.envs.single_action_space
        real = isinstance(self.action_space, Box) and self.action_space.dtype.kind == "f"
        if not isinstance(space, Box) or not (real or isinstance(self.action_space, Discrete)):
            raise UsageError(f"{args.env_id}: {space} with {self.action_space} is not supported")
        self.obs_size, self.hint_size, self.num_rows = space.shape[0], int(self.runner), 1
        self.sampler = None if self.runner else load_sampler(args, self.envs.envs[0].unwrapped)

    def reset(self):
        seeds = self.rng.integers(2**31, size=self.num_trials).tolist()
        for i, env in enumerate(self.envs.envs):
            if self.sampler:
                self.sampler(env.unwrapped, self.rng)
            elif self.to_velocity:
                env.goal = self.rng.uniform(0, 2)
            else:
                env.goal = float(1 - 2 * (i % 2) if self.alternate else self.rng.choice([-1, 1]))
        self.errors = []
        obs, _ = self.envs.reset(seed=seeds)
        hint = [[env.goal] if self.runner else [] for env in self.envs.envs]
        self.hint = torch.tensor(hint, device=self.device)
        return torch.from_numpy(obs), self.hint

    def step(self, action):
        action = action.cpu().numpy()
        if isinstance(self.action_space, Discrete):
            action = action + self.action_space.start
        else:
            low, high = self.action_space.low, self.action_space.high
            action = action.reshape(-1, *low.shape).clip(low, high)  # [D27], not scaled
        obs, reward, terminated, truncated, _ = self.envs.step(action)
        if self.to_velocity:
            self.errors.append([env.error for env in self.envs.envs])
        reward = torch.tensor(reward, dtype=torch.float32, device=self.device)
        done = torch.tensor(terminated | truncated, dtype=torch.float32, device=self.device)
        return torch.from_numpy(obs), self.hint, reward, done, reward

FAMILIES = {"Bandit": Bandit, "TabularMDP": TabularMDP, **dict.fromkeys(RUNNERS, Simulator)}

def make_tasks(args, num_trials, device, video_dir=None):
    return FAMILIES.get(args.env_id, Simulator)(args, num_trials, device, video_dir)

def seed_tasks(tasks, *key):
    """Seed everything by a key such as (seed, rank, iteration)."""
    torch_seed, task_seed = np.random.SeedSequence(key).generate_state(2).tolist()
    torch.manual_seed(torch_seed)
    tasks.rng = np.random.default_rng(task_seed)

@torch.compiler.disable
def mean_over_ranks(x):
    """Mean of a tensor over the processes of torchrun, in place [X2]."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x)
        x /= WORLD_SIZE
    return x

class RunningMeanStd(nn.Module):
    """Mean and variance of all samples, in float64: float32 freezes after 10^7."""

    def __init__(self, *shape):
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.var = nn.Buffer(torch.ones(shape, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def _apply(self, fn, recurse=True):
        return self  # Module.to calls it: stay on the CPU, as mps has no float64

    def update(self, x):
        """Add a batch (..., *shape) by the parallel formula of Chan et al. 1979."""
        x = x.cpu().double().reshape(-1, *self.mean.shape)
        mean, n = mean_over_ranks(x.mean(0)), len(x) * WORLD_SIZE
        squares = mean_over_ranks((x - mean).square().sum(0)) * WORLD_SIZE
        delta, total = mean - self.mean, self.count + n
        squares += self.var * self.count + delta**2 * self.count * n / total
        self.var.copy_(squares / total)
        self.mean += delta * n / total
        self.count += n

    def std(self):
        return (self.var + 1e-8).sqrt()

def layer_init(layer, gain, args):
    """Orthogonal weights and zero biases [D2], also of recurrent layers [D32]."""
    if args.ortho_init:
        for name, parameter in layer.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter, gain)
            else:
                nn.init.zeros_(parameter)
    return layer

def make_rnn(num_inputs, args):
    """Recurrent layer with orthogonal gates [D32]."""
    size = args.rnn_hidden
    rnn = {"gru": nn.GRU, "lstm": nn.LSTM}[args.rnn](num_inputs, size)
    if args.ortho_init:
        for weight in (rnn.weight_ih_l0, rnn.weight_hh_l0):
            for gate in weight.data.split(size):
                nn.init.orthogonal_(gate)
        nn.init.zeros_(rnn.bias_ih_l0)
        nn.init.zeros_(rnn.bias_hh_l0)
    if args.chrono_init:
        first_gate, keep_gate, *_ = rnn.bias_ih_l0.data.split(size)  # r, z, n or i, f, g, o
        keep_gate.uniform_(1, max(2, args.trial_length - 1)).log_()
        if args.rnn == "lstm":
            first_gate.copy_(-keep_gate)
    return rnn

class Agent(nn.Module):
    """Actor, critic and running statistics. Inputs (T, N, D) are whole trials, only the critic
    sees `hints` (T, N, H + 1), and actions are (T, N) if discrete, else (T, N, A)."""

    def __init__(self, tasks, args, device):
        super().__init__()
        self.args, self.device, space = args, device, tasks.action_space
        self.discrete, self.num_rows = isinstance(space, Discrete), tasks.num_rows
        self.num_actions = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.obs_rms, self.value_rms = RunningMeanStd(tasks.obs_size), RunningMeanStd()
        self.value_std = nn.Buffer(torch.ones(()))  # the unit of the critic's output
        num_inputs, size = tasks.obs_size + self.num_actions + 2, args.rnn_hidden
        self.actor_rnn = make_rnn(num_inputs, args)
        self.critic_rnn = self.actor_rnn if args.share_network else make_rnn(num_inputs, args)  # [D13]
        self.actor = layer_init(nn.Linear(size, self.num_rows * self.num_actions), 0.01, args)
        if args.privileged_critic:
            hidden = layer_init(nn.Linear(size + tasks.hint_size + 1, 2 * size), 2**0.5, args)
            self.critic = nn.Sequential(hidden, nn.ReLU(), layer_init(nn.Linear(2 * size, 1), 1.0, args))
        else:
            self.critic = layer_init(nn.Linear(size, 1), 1.0, args)
        log_std = torch.full((self.num_actions,), args.log_std_init)
        if not self.discrete:
            self.log_std = nn.Parameter(log_std) if args.learn_std else nn.Buffer(log_std)  # [D24]
        self.to(device)

    def encode(self, obs, prev_action, prev_reward, prev_done):
        """Input (N, D) of a step."""
        if self.args.norm_obs:
            limit = self.args.clip_obs or torch.inf  # [D29]
            obs = ((obs.double() - self.obs_rms.mean) / self.obs_rms.std()).clamp(-limit, limit)  # [D28]
        obs = obs.float().to(self.device)
        if self.discrete:
            prev_action = one_hot(prev_action, self.num_actions)
        return torch.cat([obs, prev_action, prev_reward[:, None], prev_done[:, None]], 1)

    def policy(self, features, inputs):
        """Distribution of the actions."""
        output = self.actor(features)
        if self.num_rows > 1:  # the row of the state, which is one-hot
            rows = output.unflatten(-1, (self.num_rows, -1))
            output = (inputs[..., : self.num_rows, None] * rows).sum(-2)
        if self.discrete:
            return Categorical(logits=output, validate_args=False)
        std = self.log_std.clamp(-5, 2).exp().expand_as(output)
        return Independent(Normal(output, std, validate_args=False), 1, validate_args=False)

    def get_value(self, inputs, hints, features=None):
        """Values (T, N) in units of returns; `features`: the critic RNN's, if known."""
        features = self.critic_rnn(inputs)[0] if features is None else features
        if self.args.privileged_critic:  # no bias: a baseline may depend on all but the action
            features = torch.cat([features, hints], -1)
        return self.critic(features).squeeze(-1) * self.value_std

    def act(self, inputs, rnn_state, greedy):
        """One step (N, D) from this RNN state, None for zeros [D33]; greedy: likeliest actions.
        Returns actions, log-probabilities (N,) and the next RNN state."""
        features, rnn_state = self.actor_rnn(inputs[None], rnn_state)
        policy = self.policy(features, inputs[None])
        if self.discrete:
            gumbel = 0.0 if greedy else -torch.empty_like(policy.logits).exponential_().log()
            action = (policy.logits + gumbel).argmax(-1)
        else:
            noise = 0.0 if greedy else torch.randn_like(policy.mean)
            action = policy.mean + policy.stddev * noise
        return action[0], policy.log_prob(action)[0], rnn_state

    def forward(self, inputs, hints, actions):
        """Log-probabilities, entropies and values (T, N) of whole trials."""
        features = self.actor_rnn(inputs)[0]
        policy = self.policy(features, inputs)
        value = self.get_value(inputs, hints, features if self.args.share_network else None)
        return policy.log_prob(actions), policy.entropy(), value

def gae_over_trial(rewards, values, gamma, gae_lambda):
    """Generalized advantages (T, N) (Schulman et al. 2016, equation 16) [D5]. Value flows across
    the ends of episodes, as what one reveals helps in the next, and is 0 after a trial."""
    next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
    advantages = rewards + gamma * next_values - values
    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += gamma * gae_lambda * advantages[t + 1]
    return advantages

BATCH = ("inputs", "hints", "actions", "counted", "logprobs", "values", "advantages", "returns")
LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")

@torch.enable_grad()
def train_step(agent, opt, batch, index, ent_coef, losses):
    """One optimizer step on the trials `index` (M,) of the batch (T, N, ...), by backpropagation
    through whole trials; the loss is equation 9 of Schulman et al. 2017."""
    args, mb = agent.args, {name: batch[name][:, index] for name in BATCH}
    outputs, counted = agent(mb["inputs"], mb["hints"], mb["actions"]), mb["counted"]
    newlogprob, entropy, newvalue = (x[counted] for x in outputs)
    mb = {name: mb[name][counted] for name in ("logprobs", "values", "advantages", "returns")}
    mb_advantages = mb["advantages"]
    if args.norm_adv:  # [D7]
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -torch.min(ratio * mb_advantages, clipped_ratio * mb_advantages).mean()  # [D8]
    v_loss = ((newvalue - mb["returns"]) / agent.value_std).square()
    if args.clip_vloss:  # [D9]
        change = ((newvalue - mb["values"]) / agent.value_std).clamp(-args.clip_coef, args.clip_coef)
        v_clipped = mb["values"] + change * agent.value_std
        v_loss = torch.max(v_loss, ((v_clipped - mb["returns"]) / agent.value_std).square())
    v_loss = 0.5 * v_loss.mean()
    entropy = entropy.mean()
    loss = pg_loss - ent_coef * entropy + args.vf_coef * v_loss  # [D10]
    opt.zero_grad()
    loss.backward()
    params = list(agent.parameters())
    if WORLD_SIZE > 1:
        grads = [p.grad for p in params]
        flat_grad = mean_over_ranks(nn.utils.parameters_to_vector(grads))
        nn.utils.vector_to_parameters(flat_grad, grads)
    norm = nn.utils.clip_grad_norm_(params, args.max_grad_norm or np.inf)  # [D11]
    opt.step()
    approx_kl = (ratio - 1 - logratio).mean()  # k3 of joschu.net/blog/kl-approx.html
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    debug = [pg_loss, v_loss, entropy, -logratio.mean(), approx_kl, clipfrac, norm]  # [D12]
    losses.add_(torch.stack(debug).detach())

@torch.no_grad()
def play(tasks, agent, greedy=False):
    """Play one trial in N new tasks. Yields each of its T steps, a dict of (N, ...)."""
    T, N, device = agent.args.trial_length, tasks.num_trials, agent.device
    obs, hint = tasks.reset()
    action = torch.zeros(N, agent.num_actions, device=device)
    action = action[:, 0].long() if agent.discrete else action
    reward, done = torch.zeros(N, device=device), torch.ones(N, device=device)  # before a step
    rnn_state = None  # zeros [D33]; never reset between episodes, unlike [D34]: this is RL^2
    for t in range(T):
        inputs = agent.encode(obs, action, reward, done)
        time_left = hint.new_full((N, 1), (T - t) / T)
        step = {"obs": obs, "inputs": inputs, "hints": torch.cat([hint, time_left], 1)}
        action, logprob, rnn_state = agent.act(inputs, rnn_state, greedy)
        obs, hint, reward, done, advantage = tasks.step(action)
        yield step | {"actions": action, "logprobs": logprob, "rewards": reward, "dones": done,
                      "optimal_advantages": advantage}

def episode_returns(rewards, dones, num_episodes):
    """Returns (n, N) of a trial's first n episodes, and which steps (T, N) belong to them: where
    episodes end early, the T steps of a trial hold more."""
    episode = (dones.cumsum(0) - dones).long().clamp(max=num_episodes)
    sums = rewards.new_zeros(num_episodes + 1, rewards.shape[1])
    return sums.scatter_add_(0, episode, rewards)[:-1], episode < num_episodes

@torch.no_grad()
def rollout(tasks, agent):
    """Play one trial in N new tasks [D1]. Returns data (T, N, ...), episode returns (n, N)."""
    args, steps = agent.args, list(play(tasks, agent))
    data = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    returns, data["counted"] = episode_returns(data["rewards"], data["dones"], args.episodes_per_trial)
    # A* = Q* - V* of a player who knows the task: undiscounted, and on average, it sums to the return
    # minus a constant of the task, with less noise. Where no A* is known, it is the reward.
    rewards = data["optimal_advantages"] if args.learn_regret else data["rewards"]
    data["rewards"] = rewards * data["counted"]
    data["values"] = agent.get_value(data["inputs"], data["hints"])  # cheaper than step by step
    return data, returns

@torch.no_grad()
def train(args, checkpoint=None):
    """Train, from a checkpoint on if there is one, then meta-test. Returns the summary."""
    device = set_up_torch(args)
    tasks = make_tasks(args, args.num_trials, device)
    agent, opt = make_agent(tasks, args, device, checkpoint)
    if args.evaluate is not None:
        return evaluate(agent, Path(args.evaluate), checkpoint["progress"]["global_step"])
    batch_size = args.num_trials * args.trial_length * WORLD_SIZE
    progress = {"iteration": 0, "global_step": batch_size * args.norm_obs, "seconds": 0.0,
                "episodes": [], "test_return": np.nan, "ends_early": False}  # norm_obs: statistics first
    progress |= checkpoint["progress"] if checkpoint else {}
    num_iterations = progress["iteration"] + (args.total_timesteps - progress["global_step"]) // batch_size
    longer = checkpoint and args.episodes_per_trial > checkpoint["args"]["episodes_per_trial"]
    if num_iterations < progress["iteration"] + (longer or not checkpoint):
        raise UsageError(f"total_timesteps = {args.total_timesteps} leaves no rollout of {batch_size} steps")
    save_every = args.checkpoint_every or max(1, num_iterations // 20)
    log = RunLog(args, device, progress["global_step"] if checkpoint else 0) if RANK == 0 else None
    seed_tasks(tasks, args.seed, RANK, progress["iteration"])
    if args.norm_obs and not checkpoint:
        agent.obs_rms.update(rollout(tasks, agent)[0]["obs"])
    last_time = time.perf_counter()
    for iteration in range(progress["iteration"] + 1, num_iterations + 1):
        remaining = 1 - (iteration - 1) / num_iterations
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)  # [D4]
        opt.param_groups[0] |= {"lr": learning_rate, "eps": args.adam_eps}
        ent_coef = args.ent_coef * (remaining if args.anneal_ent else 1)

        # Rollout
        data, episodes = rollout(tasks, agent)
        if args.gamma is None:  # discounted, a fall costs little: the next episode earns the same
            progress["ends_early"] |= mean_over_ranks(data["counted"].float().mean()).item() < 1
        gamma = (1.0 if progress["ends_early"] else 0.95) if args.gamma is None else args.gamma

        # Advantages
        counted = data["counted"]
        values = data["values"] * counted  # 0 after the trial's last episode
        advantages = gae_over_trial(data["rewards"], values, gamma, args.gae_lambda)
        returns = advantages + values  # TD(lambda) [D5]
        unexplained = advantages[counted].var() / (returns[counted].var() + 1e-8)
        if args.norm_value:
            agent.value_rms.update(returns.flatten())
            data = data | {"values": values * agent.value_rms.std().float() / agent.value_std}  # for [D9]
            agent.value_std.copy_(agent.value_rms.std())
        batch = data | {"advantages": advantages, "returns": returns}

        # Updates
        losses = torch.zeros(len(LOSSES), device=device)
        for epoch in range(args.update_epochs):  # noqa: B007
            before = losses.clone()
            for index in torch.randperm(args.num_trials, device=device).chunk(args.num_minibatches):  # [D6]
                train_step(agent, opt, batch, index, ent_coef, losses)
            kl = mean_over_ranks(losses - before)[LOSSES.index("approx_kl")] / args.num_minibatches
            if args.target_kl is not None and kl > args.target_kl:  # [X3]
                break
        if args.norm_obs:
            agent.obs_rms.update(data["obs"])  # [D28]

        # Log and save
        if args.test_every and iteration % args.test_every == 0:
            test_return = torch.zeros((), dtype=torch.float64)
            if log:  # rank 0 plays for all, sampled actions: greedy ones may not explore
                tested, _ = meta_test(agent, args.test_trials // 10 or 1, False, iteration)
                test_return += tested.sum(0).mean() * WORLD_SIZE
            progress["test_return"] = mean_over_ranks(test_return).item()
        seconds = time.perf_counter() - last_time
        last_time += seconds
        length = counted.sum(0).float().mean().item()
        trial = 0, episodes.sum(0).mean().item(), length  # logged like an episode
        progress |= {"iteration": iteration, "global_step": progress["global_step"] + batch_size,
                     "seconds": progress["seconds"] + seconds, "episodes": [trial]}
        losses = mean_over_ranks(losses) / ((epoch + 1) * args.num_minibatches)
        means = {"explained_variance": 1 - unexplained.item(), "epochs": epoch + 1,
                 **dict(zip(LOSSES, losses.tolist(), strict=True))}
        for name, x in {"observations": data["obs"], "rewards": data["rewards"], **means}.items():
            if not torch.as_tensor(x).isfinite().all():
                raise FloatingPointError(f"{name} not finite in iteration {iteration}")
        if log:
            log.write(progress, {"learning_rate": learning_rate, "SPS": batch_size / seconds,
                                 "last_episode_return": episodes[-1].mean().item(),
                                 "test_return": progress["test_return"]}, means)
        if iteration % save_every == 0 or iteration == num_iterations:
            if log:
                log.save(args=asdict(args), progress=progress, agent=agent.state_dict(), opt=opt.state_dict())
            seed_tasks(tasks, args.seed, RANK, iteration)
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit
    return log.finish(agent, progress) if log else None

# ------------- bookkeeping from here: nothing below is needed to understand the algorithm

def load_sampler(args, env):
    """The user's function(env, rng) that sets a task, tried on ten seeds."""
    module, _, name = args.task_sampler.partition(":")
    attributes, probe, answers = set(dir(env)), gym.wrappers.Autoreset(env), []
    try:
        sampler = getattr(importlib.import_module(module), name)
        result, unknown = sampler(env, np.random.default_rng(0)), vars(env).keys() - attributes
        for seed in (*range(10), 0):
            sampler(env, np.random.default_rng(seed))
            probe.reset(seed=0)
            env.action_space.seed(0)
            answers.append(repr([probe.step(env.action_space.sample())[:2] for _ in range(8)]))
    except Exception as error:
        raise UsageError(f"task_sampler {args.task_sampler}, module:function(env, rng): {error}") from error
    if unknown or result is not None:
        raise UsageError(f"task_sampler {args.task_sampler} sets new {[*unknown]} and returns {result}: "
                         f"it must set attributes that {args.env_id} has and return nothing")
    if len(set(answers)) == 1:
        warnings.warn(f"ten tasks of {args.task_sampler} are alike in eight random steps", stacklevel=2)
    if answers[0] != answers[-1]:  # no exact resume, and other tasks in the meta-test
        warnings.warn(f"tasks of {args.task_sampler} depend on the ones before them", stacklevel=2)
    return sampler

def meta_test(agent, num_trials, greedy, when=0, video_dir=None):
    """Play in new tasks (or both directions) with frozen statistics and own seeds. Returns episode
    returns (n, num_trials) and, where the goal is a velocity, the errors of the last episode's steps."""
    args, returns, errors = agent.args, [], []
    tasks_at_once = 200 if FAMILIES.get(args.env_id, Simulator) is Simulator else 10_000
    with torch.random.fork_rng(devices=[agent.device] if agent.device.type == "cuda" else []):
        for first in range(0, num_trials, tasks_at_once):
            num_tasks = min(num_trials - first, tasks_at_once)
            tasks = make_tasks(args, num_tasks, agent.device, None if first else video_dir)
            seed_tasks(tasks, args.seed, 2**31 + when, first)  # 2**31 and more are no ranks
            tasks.alternate = True  # half of the directions forward: no luck of the draw
            steps = tqdm(play(tasks, agent, greedy), total=args.trial_length, leave=False, disable=None)
            rewards, dones = zip(*((step["rewards"], step["dones"]) for step in steps), strict=True)
            part, _ = episode_returns(torch.stack(rewards), torch.stack(dones), args.episodes_per_trial)
            returns.append(part.cpu().double().numpy())
            errors.append(np.array(getattr(tasks, "errors", []))[-args.episode_length :])
    return np.concatenate(returns, 1), np.concatenate(errors, -1)

# Returns of a trial, of learners in their best setting (benchmarks/references.py); exact for ten pulls.
REFERENCES = {
    ("Bandit", 10, 5): {"random": 5.0, "Thompson sampling": 5.833, "UCB1": 6.657, "Bayes optimum": 6.660},
    ("Bandit", 10, 10): {"random": 5.0, "Thompson sampling": 5.581, "UCB1": 6.711, "Bayes optimum": 6.714},
    ("Bandit", 100, 5): {"random": 50.0, "Thompson sampling": 75.05, "UCB1": 78.31, "Gittins index": 78.63},
    ("Bandit", 100, 10): {"random": 50.0, "Thompson sampling": 77.07, "UCB1": 83.30, "Gittins index": 83.80},
    ("TabularMDP", 10, 5): {"random": 100.0, "PSRL": 138.2, "BUCB-VI": 156.4, "task known": 218.3},
}

def evaluate(agent, run_dir, global_step):
    """Meta-test with greedy, then with sampled actions. Returns the numbers for summary.json."""
    args, n, num_trials, summary = agent.args, agent.args.episodes_per_trial, agent.args.test_trials, {}
    for greedy, name, prefix in ((True, "eval", "greedy_"), (False, "eval_sampled", "")):
        kind = f"{num_trials} trials, {'greedy' if greedy else 'sampled'} actions"
        print(f"{args.env_id} after {global_step:,} steps: {kind}", flush=True)
        returns, errors = meta_test(agent, num_trials, greedy, 0, run_dir / "videos" if greedy else None)
        rows = np.vstack([returns.sum(0), returns])  # the trial, then its episodes
        mean, std = rows.mean(1).tolist(), rows[0].std().item()
        se = (rows.std(1, ddof=min(1, num_trials - 1)) / num_trials**0.5).tolist()
        key = f"trial_return_{prefix}".removesuffix("_")
        summary |= {f"{name}_mean": mean[0], f"{name}_std": std, "eval_episodes": num_trials * n,
                    f"{key}_mean": mean[0], f"{key}_se": se[0],
                    f"{prefix}episode_returns": mean[1:], f"{prefix}episode_returns_se": se[1:]}
        shown = [i for i in (1, 2, 3, 5, 10, 25, 50, 100, 250, 500) if i <= n]
        print(f"  return {mean[0]:.3f} +- {se[0]:.3f} (standard error), by episode "
              + ", ".join(f"{i}: {mean[i]:.3f}" for i in shown))
        if args.env_id in ("HalfCheetahDir", "AntDir"):
            summary[f"{key}_goals"] = [rows[0, i % num_trials :: 2].mean().item() for i in (0, 1)]
            print("  trials forward, backward:", *np.round(summary[f"{key}_goals"], 1))
        if errors.size:
            summary[f"{key}_cost"] = np.abs(errors).sum(0).mean().item()
            print(f"  last episode's sum of |velocity - goal|: {summary[f'{key}_cost']:.1f}")
    for name, value in REFERENCES.get((args.env_id, n, args.num_arms), {}).items():
        print(f"  {name:18} {value:8.3f}")
    return summary

def make_agent(tasks, args, device, checkpoint):
    """Agent and optimizer, new or from the checkpoint."""
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(tasks, args, device)
    opt = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps)  # [D3]
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
            opt.load_state_dict(checkpoint["opt"])
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the checkpoint does not fit {args.env_id} with these flags") from error
    return agent, opt

def load_checkpoint(run_dir):
    """A run's checkpoint, plain tensors and numbers, and its flags."""
    try:
        checkpoint = torch.load(Path(run_dir, "checkpoint.pt"), "cpu", weights_only=True)
        return checkpoint, Args(**checkpoint["args"] | {"resume": None})
    except Exception as error:
        raise UsageError(f"'{run_dir}' holds no run of this script: {error}") from error

class RunLog:
    """The files of a run folder, and the lines on the console."""

    def __init__(self, args, device, global_step):
        wandb = importlib.import_module("wandb") if args.track else None
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        run_dir = Path(args.resume or args.run_dir or "runs/" + name.replace("/", "_").replace(":", "_"))
        if not (args.resume or args.run_dir) and run_dir.exists():
            run_dir = Path(f"{run_dir}_{os.getpid()}")  # of the same second
        run_dir.mkdir(parents=True, exist_ok=args.resume or (args.run_dir and not any(run_dir.glob("*"))))
        self.args, self.run_dir = args, run_dir
        commit = subprocess.getoutput(f"git -C '{Path(__file__).parent}' rev-parse HEAD 2>{os.devnull}")
        about = {"script": Path(__file__).stem, "git_commit": commit or None, "torch": torch.__version__,
                 "numpy": np.__version__, "gymnasium": gym.__version__}
        (run_dir / "args.json").write_text(json.dumps(asdict(args) | about, indent=2) + "\n")
        if wandb:
            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, name=run_dir.name,
                       dir=run_dir, config=asdict(args), sync_tensorboard=True)
        self.writer = SummaryWriter(str(run_dir), purge_step=global_step + 1)
        path = run_dir / "metrics.csv"
        rows = path.read_text().split("\n")[:-1] if global_step else []  # drops a torn row; g: the header
        path.write_text("".join(f"{x}\n" for x in rows if x[0] == "g" or int(x.split(",")[0]) <= global_step))
        self.metrics = open(path, "a", buffering=1)  # noqa: SIM115
        print(f"{args.env_id}, seed {args.seed}, preset {args.preset}, {device}, in {run_dir}", flush=True)
        plain = None if sys.stderr.isatty() else "{n}/{total} steps, {rate_fmt}{postfix}\n"
        self.bar = tqdm(total=args.total_timesteps, initial=global_step, unit=" steps",
                        bar_format=plain, mininterval=15 if plain else 0.1, smoothing=1)

    def write(self, progress, charts, losses):
        step, episodes = progress["global_step"], progress["episodes"]
        _, returns, lengths = np.mean(episodes, 0).tolist() if episodes else [np.nan] * 3
        charts = {"episodic_return": returns, "episodic_length": lengths, **charts}
        row = {"global_step": step, "seconds": progress["seconds"], **charts, **losses}
        self.bar.set_postfix_str(f"return {returns:.1f}" if episodes else "return -", False)
        self.bar.update(step - self.bar.n)
        if self.metrics.tell() == 0:
            self.bar.refresh()  # which update does after mininterval only
            print(*row, sep=",", file=self.metrics)
        print(*row.values(), sep=",", file=self.metrics)
        for name, value in (charts | losses).items():
            self.writer.add_scalar(f"{'charts' if name in charts else 'losses'}/{name}", value, step)

    def save(self, **checkpoint):
        """Replace checkpoint.pt at once: a kill leaves the old one or the new one."""
        data = io.BytesIO()  # a full disk is no OSError inside torch.save
        torch.save(checkpoint, data)
        with open(self.run_dir / "checkpoint.tmp", "wb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.run_dir / "checkpoint.tmp", self.run_dir / "checkpoint.pt")

    def finish(self, agent, progress, **more):
        self.bar.close()
        rows = np.genfromtxt(self.run_dir / "metrics.csv", delimiter=",", names=True, ndmin=1)
        summary = {"env_id": self.args.env_id, "seed": self.args.seed, "global_step": progress["global_step"],
                   "seconds": progress["seconds"], "sps": np.median(rows["SPS"][len(rows) > 1 :]).item(),
                   **evaluate(agent, self.run_dir, progress["global_step"]), **more}
        (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self.writer.add_scalar("eval/episodic_return", summary["eval_mean"], summary["global_step"])
        self.writer.close()
        print(f"evaluate again: python {sys.argv[0]} --evaluate '{self.run_dir}'")
        return summary

def set_up_torch(args):
    """Threads, determinism and, under torchrun, the process group. Returns the device."""
    torch.set_num_threads(args.torch_threads)
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a second pass
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for determinism
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    names = {"auto": gpu if torch.cuda.is_available() else "cpu", "cuda": gpu}
    try:
        device = torch.zeros(1, device=names.get(args.device, args.device)).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {args.device}: {error}") from error
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device

def main():
    sys.path.append(os.getcwd())  # for --env-id module:Env-v0 and --task-sampler
    try:
        first, _ = tyro.cli(Args, add_help=False, return_unknown_args=True)
        run_dir = first.resume if first.evaluate is None else first.evaluate
        named = first.env_id if first.env_id in PRESETS else "none"
        preset = first.preset or ("simulator" if first.task_sampler else named)
        if preset not in PRESETS:
            raise UsageError(f"preset {preset} is none of {', '.join(PRESETS)}")
        new_run = None, Args(preset=preset, **PRESETS[preset])
        checkpoint, default = new_run if run_dir is None else load_checkpoint(run_dir)
        args = tyro.cli(Args, description=__doc__, default=default)
        args.check(replace(default, norm_obs=False))  # presets of simulators have it
        if run_dir and (first.preset or first.run_dir or (args.resume and args.env_id != default.env_id)):
            raise UsageError("env_id, preset and run_dir of a run cannot change")
        train(args, checkpoint)
    except KeyboardInterrupt:
        sys.exit(130)
    except FloatingPointError as error:
        sys.exit(f"error: {error}; the last checkpoint, if any, is kept")
    except (UsageError, ImportError, OSError) as error:
        print(f"error: {(str(error) or repr(error)).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)

if __name__ == "__main__":
    main()
