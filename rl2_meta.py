# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "gymnasium[box2d,classic-control,mujoco]>=1.4",
#                 "numpy>=1.26", "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""RL^2: a recurrent agent that learns to learn (Duan et al. 2016, arXiv 1611.02779), with PPO.

    python rl2_meta.py --env-id Bandit --num-arms 10             train, then meta-test
    python rl2_meta.py --env-id TabularMDP --preset published    close to the paper
    python rl2_meta.py --resume runs/RUN                         resume a killed run exactly
    python rl2_meta.py --evaluate runs/RUN                       repeat the meta-test

A trial is n episodes in one unknown task. The RNN state is zero when a trial begins and is kept
across its episodes: what the agent learns about the task is in that state, as its weights are
fixed within a trial. PPO maximizes the return of whole trials.

Two flags are ours, not the paper's. `--privileged`: training knows the task, except that of a
task_sampler. Regrets replace rewards (bandits, MDPs); the critic sees the task and the time left,
through a layer of its own. `--tabular`: the agent of a bandit or an MDP observes rewards by arm or
cell, and has a policy for each state. Nor has the paper an entropy bonus or chrono_init,
and its discount is 0.99. The paper names TRPO; its authors' code has a clipped PPO, too.

Shapes: T steps of a trial, N trials, n episodes, K arms, O observation, A action components,
D inputs (observation, previous action, reward and done), M trials in a minibatch, H hint.
Tags: [D1] to [D37], [X1] to [X4]: Huang et al. 2022, "The 37 Implementation Details of PPO".
"""

import contextlib
import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.spaces import Box, Discrete
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn.functional import one_hot
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
Distribution.set_default_validate_args(False)  # costs time


class UsageError(ValueError):
    """Invalid usage: printed as one sentence, exit status 2."""


@dataclass
class Args:
    # Run
    exp_name: str = "rl2_meta"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder or checkpoint to evaluate instead of training
    test_trials: int = 100_000  # of the meta-test, greedy and sampled each
    checkpoint_every: int = 0  # iterations between checkpoints; 0: a twentieth of the run

    # Environment
    env_id: str = "Bandit"  # also TabularMDP, HalfCheetahDir, HalfCheetahVel, AntDir, Gymnasium's
    env_kwargs: str = "{}"  # its keyword arguments as JSON: '{"gravity": -5}'
    task_sampler: str | None = None  # module:function(env, rng) that sets a task of a Gymnasium id
    num_arms: int = 5  # arms of a Bandit
    episodes_per_trial: int = 10  # n; only the first n count where episodes end early
    episode_length: int = 200  # steps per episode of a simulator
    total_timesteps: int = 6_000_000  # steps over all environments and processes
    num_trials: int = 1024  # N, trials in a rollout per process [D1]
    clip_actions: bool = True  # clip to the bounds what the environment gets [D27]
    scale_actions: bool = True  # the policy's -1 and 1 are the bounds; off: the environment's units
    norm_obs: bool = False  # normalize observations and previous rewards, by mean and std [D28]
    clip_obs: float = 10.0  # clip what is normalized; 0: off [D29]

    # Algorithm
    learning_rate: float = 1e-2  # of Adam; usable from 1e-5 to 3e-2, less in simulators
    anneal_lr: bool = True  # linearly to 0 [D4]
    adam_eps: float = 1e-5  # Adam's epsilon; PyTorch's default is 1e-8 [D3]
    ortho_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's [D2, D32]
    gamma: float = 1.0  # discount factor; less in simulators, unless episodes end early
    gae_lambda: float = 0.95  # 0: one-step TD errors, 1: returns of whole trials (no GAE) [D5]
    num_minibatches: int = 4  # per epoch, of whole trials [D6, D35]
    update_epochs: int = 1  # maximum epochs per rollout [D6]
    norm_adv: bool = True  # normalize the advantages of each minibatch, in each process [D7]
    clip_coef: float = 0.2  # clip range of the probability ratio [D8]
    clip_vloss: bool = False  # clip the change of the value to clip_coef [D9]
    ent_coef: float = 0.05  # entropy bonus [D10]
    anneal_ent: bool = True  # anneal ent_coef linearly to 0
    vf_coef: float = 0.5  # weight of the value loss, which is half the squared error [D10]
    max_grad_norm: float = 0.5  # maximum global gradient norm; 0: off [D11]
    target_kl: float | None = None  # stop after an epoch whose mean KL exceeds it [X3]
    norm_value: bool = True  # the critic learns returns divided by their running std
    privileged: bool = True  # the critic sees the task, if known, and regrets replace rewards
    tabular: bool = True  # reward by arm or cell as input; MDP: policy row per state

    # Network
    share_network: bool = True  # one network for actor and critic, or one each [D13, D26]
    rnn: Literal["gru", "lstm"] = "gru"  # recurrent layer before actor and critic
    rnn_hidden: int = 64  # its width; the state starts at zero [D33]
    chrono_init: bool = True  # initial memories of 2 to T steps (Tallec and Ollivier 2018)
    learn_std: bool = True  # learn the std, one for all states [D24]
    log_std_init: float = -1.0  # initial log std of the Gaussian [D24]

    # Speed
    device: str = "cpu"  # auto, cpu (fastest for small networks), cuda, cuda:1
    torch_threads: int = 1  # per process; small networks get slower with more

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "rl2"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first greedy trial (simulators)

    @property
    def trial_length(self):
        """Steps T of a trial."""
        horizons = {"Bandit": 1, "TabularMDP": TabularMDP.HORIZON}
        return self.episodes_per_trial * horizons.get(self.env_id, self.episode_length)

    def check(self):
        """Raise UsageError for flags that would fail only later, or do nothing."""
        check_ranges(self)
        N, parts = self.num_trials, self.num_minibatches
        if self.evaluate is None and (N % parts or N * self.trial_length == parts):
            raise UsageError(f"num_minibatches {parts} must divide {N} trials, into 2+ steps each")
        families = ("Bandit", "TabularMDP", *RUNNERS)
        if (self.env_id in families) == bool(self.task_sampler):
            names = ", ".join(families)
            raise UsageError(f"env_id {self.env_id}: {names} take no task_sampler, others need one")
        for flag in ("env_kwargs", "episode_length", "capture_video"):
            if self.env_id in families[:2] and getattr(self, flag) != getattr(Args, flag):
                raise UsageError(f"{flag} is of simulators only, not of {self.env_id}")
        if self.num_arms != Args.num_arms and self.env_id != "Bandit":
            raise UsageError("num_arms is of a Bandit only")
        if self.clip_obs != Args.clip_obs and not self.norm_obs and self.evaluate is None:
            raise UsageError("clip_obs needs norm_obs")
        if self.env_id == "Bandit" and self.norm_obs and not self.tabular:
            raise UsageError("norm_obs: a Bandit without tabular has no observations")
        if self.env_id == "TabularMDP" and self.norm_obs and self.tabular and self.evaluate is None:
            raise UsageError("norm_obs: tabular reads the state from its one-hot observation")
        if self.env_id in ("HalfCheetahDir", "AntDir") and N % 2:
            raise UsageError(f"num_trials {N} must be even: as many run forward as backward")
        if self.capture_video:
            check_video(make_env(self, 0))


RANGES = {  # lowest and highest values; other floats are at least 0, other ints at least 1
    "seed": (0, 2**32 - 1), "checkpoint_every": (0, 10**12), "torch_threads": (1, 1024),
    "learning_rate": (1e-12, 100), "gamma": (0, 1), "gae_lambda": (0, 1), "log_std_init": (-5, 2),
}  # fmt: skip
LONG_TRIALS = {"num_trials": 256, "num_minibatches": 8, "total_timesteps": 60_000_000}
SIMULATOR = {
    "rnn": "lstm", "chrono_init": False, "share_network": False, "gamma": 0.99,
    "episodes_per_trial": 2, "num_trials": 8, "update_epochs": 10, "target_kl": 0.03,
    "norm_obs": True, "learning_rate": 1e-3, "ent_coef": 0.0, "test_trials": 200,
}  # fmt: skip
PRESETS = {
    "none": {},
    "hundred": LONG_TRIALS | {"episodes_per_trial": 100},  # pulls of a Bandit
    "TabularMDP": LONG_TRIALS | {
        "rnn_hidden": 128, "learning_rate": 0.02, "gamma": 0.99, "gae_lambda": 0.9,
        "anneal_ent": False,
    },
    "HalfCheetahDir": SIMULATOR | {"total_timesteps": 3_200_000},
    "HalfCheetahVel": SIMULATOR | {"total_timesteps": 4_000_000, "num_trials": 16},
    "AntDir": SIMULATOR | {"total_timesteps": 4_000_000, "num_trials": 16},
    "simulator": SIMULATOR | {"total_timesteps": 1_000_000, "gamma": 0.95},
    # Duan et al. 2016, but without its ReLU GRU with normalized weights, KL line search and
    # Monte Carlo targets. For ten pulls it has --num-trials 25000 --num-minibatches 200.
    "published": {
        "rnn_hidden": 256, "gamma": 0.99, "gae_lambda": 0.3, "learning_rate": 1e-3,
        "anneal_lr": False, "adam_eps": 1e-8, "num_trials": 2500, "num_minibatches": 20,
        "update_epochs": 5, "target_kl": 0.01, "clip_coef": 0.1, "ent_coef": 0.0,
        "max_grad_norm": 0.0, "share_network": False, "privileged": False, "tabular": False,
        "chrono_init": False, "total_timesteps": 250_000_000,
    },
}  # fmt: skip


class Bandit(gym.vector.VectorEnv):
    """Arms that pay 1 with probabilities uniform in [0, 1]; an episode is one pull.

    With `tabular` an observation (N, K) is the previous reward in its arm's place, else empty.
    The hint (N, K + 1) is the probabilities and the highest of them."""

    def __init__(self, args, num_envs):
        self.num_envs, self.num_arms = num_envs, args.num_arms
        self.obs_size = args.num_arms * args.tabular
        self.single_observation_space = Box(0, 1, (self.obs_size,))
        self.single_action_space = Discrete(args.num_arms)
        self.metadata = {"hint_size": args.num_arms + 1}

    def reset(self, *, seed=None, options=None):
        """New tasks, drawn by PyTorch's generator."""
        self.probs = torch.rand(self.num_envs, self.num_arms)
        self.hint = torch.cat([self.probs, self.probs.amax(1, keepdim=True)], 1)
        return torch.zeros(self.num_envs, self.obs_size), {"hint": self.hint}

    def step(self, actions):
        arms = one_hot(torch.as_tensor(actions), self.num_arms)
        probs = (self.probs * arms).sum(1)
        rewards = torch.bernoulli(probs)
        obs = arms[:, : self.obs_size] * rewards[:, None]
        done = torch.ones_like(rewards, dtype=torch.bool)
        return obs, rewards, done, ~done, {"hint": self.hint, "regret": self.hint[:, -1] - probs}


class TabularMDP(gym.vector.VectorEnv):
    """10 states, 5 actions, episodes of 10 steps that begin in state 0.

    Transitions are Dirichlet(1), rewards N(mean, 1) with means N(1, 1). An observation is the
    one-hot state; with `tabular` also the previous state and action as one of 50 cells, one-hot,
    and the same times the reward. The hint (N, 1) is what an optimal policy would still collect,
    per step of the trial."""

    STATES, ACTIONS, HORIZON = 10, 5, 10

    def __init__(self, args, num_envs):
        self.num_envs, self.num_episodes = num_envs, args.episodes_per_trial
        self.num_cells = self.STATES * self.ACTIONS * args.tabular
        self.single_observation_space = Box(-np.inf, np.inf, (self.STATES + 2 * self.num_cells,))
        self.single_action_space = Discrete(self.ACTIONS)
        self.metadata = {"hint_size": 1, "num_states": self.STATES if args.tabular else 1}

    def reset(self, *, seed=None, options=None):
        """New tasks, drawn by PyTorch's generator."""
        N, S, A = self.num_envs, self.STATES, self.ACTIONS
        weights = torch.empty(N, S, A, S).exponential_()
        transitions = weights / weights.sum(-1, keepdim=True)
        self.cumulative = transitions.cumsum(-1)
        self.means = 1 + torch.randn(N, S, A)

        # Bellman's equation, backward from the end of an episode
        values, regrets = [torch.zeros(N, S)], []
        for _ in range(self.HORIZON):
            q = self.means + torch.einsum("nsax,nx->nsa", transitions, values[-1])
            values.append(q.amax(-1))
            regrets.append(values[-1][..., None] - q)
        self.values = torch.stack(values[::-1])  # (HORIZON + 1, N, S): of the best actions
        self.regrets = torch.stack(regrets[::-1])  # (HORIZON, N, S, A)

        self.t, self.trials = 0, torch.arange(N)
        self.state, self.cells = torch.zeros_like(self.trials), torch.zeros(N, 2 * self.num_cells)
        return self.observe()

    def observe(self):
        t, episodes_left = self.t % self.HORIZON, self.num_episodes - 1 - self.t // self.HORIZON
        hint = self.values[t, self.trials, self.state] + episodes_left * self.values[0, :, 0]
        obs = torch.cat([one_hot(self.state, self.STATES), self.cells], 1)
        return obs, {"hint": hint[:, None] / (self.num_episodes * self.HORIZON)}

    def step(self, actions):
        actions = torch.as_tensor(actions)
        chosen = self.trials, self.state, actions
        rewards = self.means[chosen] + torch.randn(self.num_envs)
        regrets = self.regrets[self.t % self.HORIZON][chosen]
        if self.num_cells:
            cells = one_hot(self.state * self.ACTIONS + actions, self.num_cells)
            self.cells = torch.cat([cells, cells * rewards[:, None]], 1)
        next_state = (torch.rand(self.num_envs, 1) > self.cumulative[chosen]).sum(1)
        next_state = next_state.clamp(max=self.STATES - 1)  # cumulative may end below 1
        self.t += 1
        done = torch.full_like(actions, self.t % self.HORIZON == 0, dtype=torch.bool)
        self.state = next_state * ~done
        obs, infos = self.observe()
        return obs, rewards, done, torch.zeros_like(done), infos | {"regret": regrets}


def make_envs(args, num_envs, video_dir=None):
    """Environments whose reset with seeds begins a trial in as many new tasks."""
    if args.env_id in ("Bandit", "TabularMDP"):
        return Bandit(args, num_envs) if args.env_id == "Bandit" else TabularMDP(args, num_envs)
    envs = gym.vector.SyncVectorEnv(
        [partial(make_env, args, i, None if i else video_dir) for i in range(num_envs)],
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    space = envs.single_action_space
    real = isinstance(space, Box) and np.issubdtype(space.dtype, np.floating)
    if not (real or isinstance(space, Discrete)):
        raise UsageError(f"{args.env_id}: actions {space} are not Discrete or a Box of floats")
    return envs


def reset(envs, *key):
    """Seed and reset everything by a key such as (seed, rank, iteration)."""
    *seeds, seed = np.random.SeedSequence(key).generate_state(envs.num_envs + 1).tolist()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return envs.reset(seed=seeds)


def mean_over_ranks(x):
    """Mean of a tensor over the processes of torchrun, in place [X2]."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
        x /= WORLD_SIZE
    return x


class RunningMeanStd(nn.Module):
    """Mean and variance of all samples, in float64: float32 cannot count beyond 2^24."""

    def __init__(self, *shape):
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.var = nn.Buffer(torch.ones(shape, dtype=torch.float64))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.float64))

    @property
    def std(self):
        """At least 1e-5 of the mean and 1e-3 of min(1, the median component); 0 becomes 1."""
        squares = self.var + 1e-10 * self.mean**2
        floor = 1e-6 * squares.median().clamp(max=1)  # or rounding noise would become an input
        squares = torch.maximum(squares, floor)
        return torch.where(squares > 0, squares, 1.0).sqrt()

    @property
    def scale(self):
        """A std to divide by where the mean is not subtracted: at least 1e-2 of the mean."""
        squares = self.var + 1e-4 * self.mean**2
        return torch.where(squares > 0, squares, 1.0).sqrt().float()

    def update(self, x):
        """Add a batch (..., *shape) by the parallel formula of Chan et al. 1979."""
        x = x.double().reshape(-1, *self.mean.shape)
        batch_mean, n = mean_over_ranks(x.mean(0)), len(x) * WORLD_SIZE
        batch_var = mean_over_ranks((x - batch_mean).square().mean(0))
        self.count += n
        share, delta = n / self.count, batch_mean - self.mean
        self.mean += share * delta
        self.var *= 1 - share  # not var += share * (... - var): 1 + (1e-20 - 1) is 0
        self.var += share * (batch_var + (1 - share) * delta**2)


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
    """GRU or LSTM, whose state starts at zero [D33]."""
    layer = nn.GRU if args.rnn == "gru" else nn.LSTM
    rnn = layer_init(layer(num_inputs, args.rnn_hidden), 1.0, args)
    if args.ortho_init:  # gate by gate: slices of one orthogonal matrix would be smaller
        for weight in rnn.all_weights[0][:2]:
            for gate in weight.data.split(args.rnn_hidden):
                nn.init.orthogonal_(gate)
    if args.chrono_init:
        input_gate, keep_gate, *_ = rnn.bias_ih_l0.data.split(args.rnn_hidden)  # of a GRU: r, z
        keep_gate.uniform_(1, max(2, args.trial_length - 1)).log_()
        if args.rnn == "lstm":
            input_gate.copy_(-keep_gate)
    return rnn


class Agent(nn.Module):
    """Actor, critic and normalization.

    `inputs` (T, N, D) are whole trials, of which `encode` makes each step. Only the critic sees
    `hints` (T, N, H + 1). An action is a number (T, N) or, if continuous, a vector (T, N, A).
    Values are in units of `return_rms.scale`."""

    def __init__(self, envs, args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
        self.continuous = isinstance(self.action_space, Box)
        self.action_shape = (int(np.prod(self.action_space.shape)),) if self.continuous else ()
        self.num_actions = self.action_shape[0] if self.continuous else int(self.action_space.n)
        self.num_states = envs.metadata.get("num_states", 1)  # rows of the policy
        self.hint_size = envs.metadata.get("hint_size", 0)
        (obs_size,) = envs.single_observation_space.shape
        self.num_inputs, width = obs_size + self.num_actions + 2, args.rnn_hidden
        self.obs_rms = RunningMeanStd(obs_size)
        self.reward_rms, self.return_rms = RunningMeanStd(), RunningMeanStd()

        self.actor_rnn = make_rnn(self.num_inputs, args)
        self.critic_rnn = self.actor_rnn if args.share_network else make_rnn(self.num_inputs, args)
        self.actor = layer_init(nn.Linear(width, self.num_states * self.num_actions), 0.01, args)
        self.critic = nn.Sequential()
        if args.privileged:
            hidden = nn.Linear(width + self.hint_size + 1, 2 * width)
            self.critic.extend([layer_init(hidden, 2**0.5, args), nn.ReLU()])
            width *= 2
        self.critic.append(layer_init(nn.Linear(width, 1), 1.0, args))
        if args.norm_value:  # begin with values of 0: noise would enter the std of returns
            nn.init.zeros_(self.critic[-1].weight)
            nn.init.zeros_(self.critic[-1].bias)
        if self.continuous:
            log_std = torch.full((self.num_actions,), args.log_std_init)
            self.log_std = nn.Parameter(log_std) if args.learn_std else nn.Buffer(log_std)  # [D24]
            low, high = self.action_space.low, self.action_space.high
            scaled = args.scale_actions & (np.maximum(-low, high) < 1e30)
            low, high = np.where(scaled, low, -1), np.where(scaled, high, 1)
            self.offset, self.scale = (low + high) / 2, (high - low) / 2

    def to_env(self, action):
        """Actions (N, ...) as the environments take them, in their own units and bounds."""
        args, space = self.args, self.action_space
        action = action.detach().cpu().numpy().reshape(-1, *space.shape)
        if self.continuous:
            action = self.offset + self.scale * action
            if args.clip_actions:
                action = np.clip(action, space.low, space.high)  # [D27]
        return (action + getattr(space, "start", 0)).astype(space.dtype)

    def normalize(self, x, mean, std):
        limit = self.args.clip_obs or torch.inf
        return ((x.double() - mean) / std).clamp(-limit, limit)  # [D28, D29]

    def encode(self, obs, prev_action, prev_reward, prev_done):
        """Inputs (N, D) of a step: the observation, and what the step before it brought."""
        if self.args.norm_obs:
            obs = self.normalize(obs, self.obs_rms.mean, self.obs_rms.std)
            rms = self.reward_rms
            prev_reward = self.normalize(prev_reward, rms.mean, rms.scale) * (rms.count > 0)
        if not self.continuous:
            prev_action = one_hot(prev_action.long(), self.num_actions)
        return torch.cat([obs, prev_action, prev_reward[:, None], prev_done[:, None]], 1).float()

    def policy(self, features, inputs):
        """Distribution of the actions."""
        output = self.actor(features)
        if self.continuous:
            return Independent(Normal(output, self.log_std.clamp(-5, 2).exp()), 1)  # [D23, D25]
        if self.num_states > 1:  # the row of the state, which is one-hot
            rows = output.unflatten(-1, (self.num_states, -1))
            output = (inputs[..., : self.num_states, None] * rows).sum(-2)
        return Categorical(logits=output)

    def get_action(self, inputs, rnn_state=None, greedy=False):
        """Actions after the inputs (N, D) of a step, log-probabilities (N,), next RNN state.

        No RNN state is that at the beginning of a trial: zero [D33]."""
        features, rnn_state = self.actor_rnn(inputs[None], rnn_state)
        policy = self.policy(features[0], inputs)
        if greedy:
            action = policy.mode
        elif self.continuous:
            action = policy.sample()
        else:  # Gumbel-max: sample() would fail at NaN before it is named
            logits = policy.logits
            action = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
        return action, policy.log_prob(action), rnn_state

    def forward(self, inputs, hints, actions):
        """Log-probabilities of given actions, entropies and values, each (T, N)."""
        features, _ = self.actor_rnn(inputs)
        policy = self.policy(features, inputs)
        if not self.args.share_network:
            features, _ = self.critic_rnn(inputs)
        if self.args.privileged:  # no bias: a baseline may depend on all but the action
            features = torch.cat([features, hints], -1)
        value = self.critic(features).squeeze(-1)
        return policy.log_prob(actions), policy.entropy(), value


def compute_gae(rewards, values, gamma, gae_lambda):
    """Generalized advantages (T, N) of whole trials (Schulman et al. 2016, equation 16) [D5].

    Values flow across the ends of episodes, as what one reveals helps in the next."""
    next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
    deltas = rewards + gamma * next_values - values
    advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = torch.add(deltas[t], advantage, alpha=gamma * gae_lambda)
    return advantages


def episode_returns(rewards, dones, num_episodes):
    """Returns (n, N) of a trial's first n episodes, and which steps (T, N) belong to them.

    Where episodes end early, the T steps of a trial hold more than n."""
    episode = (dones.cumsum(0) - dones).long().clamp(max=num_episodes)
    sums = rewards.new_zeros(num_episodes + 1, rewards.shape[1])
    return sums.scatter_add_(0, episode, rewards)[:-1], episode < num_episodes


def compute_gradients(agent, params, batch, index, ent_coef):
    """Set the gradients of PPO's loss on the trials `index` (M,) of a batch (T, N, ...).

    They go back through whole trials; steps that do not count have none. Returns what to log
    [D12], each a scalar tensor."""
    args, clip_coef = agent.args, agent.args.clip_coef
    mb = {name: x[:, index] for name, x in batch.items()}
    outputs, counted = agent(mb["inputs"], mb["hints"], mb["actions"]), mb["counted"]
    newlogprob, entropy, newvalue = (x[counted] for x in outputs)
    mb |= {x: mb[x][counted] for x in ("logprobs", "advantages", "values", "returns")}
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()

    # Policy loss [D8]
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # [D7]
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()

    # Value loss
    v_loss = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:  # [D9]
        v_clipped = mb["values"] + (newvalue - mb["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb["returns"]) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy = entropy.mean()
    loss = pg_loss - ent_coef * entropy + args.vf_coef * v_loss  # [D10]

    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    if WORLD_SIZE > 1:  # one all-reduce: each costs a trip
        means = mean_over_ranks(torch.cat([grad.flatten() for grad in grads]))
        means = means.split([grad.numel() for grad in grads])
        grads = [mean.view_as(grad) for mean, grad in zip(means, grads, strict=True)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.contiguous()  # Adam(fused=True) ignores strides
    max_norm = args.max_grad_norm or torch.inf
    grad_norm = nn.utils.clip_grad_norm_(params, max_norm, foreach=False)  # [D11]

    return {
        "policy_loss": pg_loss.detach(),
        "value_loss": v_loss.detach(),
        "entropy": entropy.detach(),
        "old_approx_kl": -logratio.detach().mean(),
        "approx_kl": (ratio - 1 - logratio).detach().mean(),  # k3, joschu.net/blog/kl-approx.html
        "clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
        "grad_norm": grad_norm,
    }


def train(args, checkpoint=None):
    """Train, from a checkpoint on if there is one, then meta-test. Returns the summary."""
    device = set_up_torch(args)
    envs = make_envs(args, args.num_trials)
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(envs, args).to(device)
    learning_rate, eps = args.learning_rate, args.adam_eps  # [D3]
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    saved = {"agent": agent, "optimizer": optimizer}  # what a checkpoint holds
    progress = restore(saved, checkpoint)

    T, N, n = args.trial_length, args.num_trials, args.episodes_per_trial
    tensor = partial(torch.as_tensor, dtype=torch.float32, device=device)
    batch_size = N * T * WORLD_SIZE
    steps_left = args.total_timesteps - progress["global_step"]
    num_iterations = progress["iteration"] + steps_left // batch_size
    final_step = progress["global_step"] + steps_left // batch_size * batch_size
    if num_iterations < max(1, progress["iteration"]):
        raise UsageError(f"total_timesteps: {steps_left} more are no rollout of {batch_size} steps")
    checkpoint_every = args.checkpoint_every or max(1, num_iterations // 20)
    log = RunLog(args, device, progress, True) if RANK == 0 else None
    first_iteration, last_time = progress["iteration"] + 1, time.perf_counter()

    for iteration in range(first_iteration, num_iterations + 1):
        remaining = 1 - progress["global_step"] / final_step
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (remaining if args.anneal_lr else 1)  # [D4]
        ent_coef = args.ent_coef * (remaining if args.anneal_ent else 1)
        if agent.continuous:
            agent.log_std.data.clamp_(-5, 2)  # beyond the clamp of Agent.policy it has no gradient

        # Rollout: a trial in each of N new tasks, whose seed is all that a resumed run needs
        next_obs, infos = reset(envs, args.seed, RANK, iteration)
        next_obs = torch.as_tensor(next_obs, device=device)
        obs = torch.zeros(T, *next_obs.shape, dtype=next_obs.dtype, device=device)  # (T, N, O)
        inputs = torch.zeros(T, N, agent.num_inputs, device=device)
        hints = torch.zeros(T, N, agent.hint_size + 1, device=device)
        hints[:, :, -1] = torch.linspace(1, 1 / T, T, device=device)[:, None]  # time left
        actions = torch.zeros(T, N, *agent.action_shape, device=device)
        logprobs, rewards, train_rewards, dones = torch.zeros(4, T, N, device=device)
        action, reward = torch.zeros_like(actions[0]), torch.zeros(N, device=device)
        done = torch.ones(N, device=device)  # a trial begins
        last_obs = []
        rnn_state = None  # zero; no episode's end resets it, unlike [D34]: that is RL^2
        for t in range(T):
            obs[t], inputs[t] = next_obs, agent.encode(next_obs, action, reward, done)
            if agent.hint_size:
                hints[t, :, :-1] = tensor(infos["hint"])
            with torch.no_grad():
                action, logprobs[t], rnn_state = agent.get_action(inputs[t], rnn_state)
            next_obs, reward, terminated, truncated, infos = envs.step(agent.to_env(action))
            next_obs = torch.as_tensor(next_obs, device=device)
            reward, done = tensor(reward), tensor(terminated | truncated)
            actions[t], rewards[t], dones[t] = action, reward, done
            last_obs += [x for x in infos.get("final_obs", []) if x is not None]
            # Regrets sum to the best expected return minus that of the actions: less noise.
            regret = args.privileged and "regret" in infos
            train_rewards[t] = -tensor(infos["regret"]) if regret else reward

        # Advantages
        returns_by_episode, counted = episode_returns(rewards, dones, n)  # (n, N), (T, N)
        std = agent.return_rms.scale
        with torch.no_grad():
            values = agent(inputs, hints, actions)[2] * std * counted  # at once: faster
        advantages = compute_gae(train_rewards * counted, values, args.gamma, args.gae_lambda)
        returns = advantages + values  # TD(lambda)
        explained_variance = 1 - advantages[counted].var() / returns[counted].var()
        if args.norm_value:
            agent.return_rms.update(returns)
            old_std, std = std, agent.return_rms.scale
            with torch.no_grad():  # rescale: the same values in the new unit (Pop-Art)
                for parameter in agent.critic[-1].parameters():
                    parameter *= old_std / std
        batch = {
            "inputs": inputs, "hints": hints, "actions": actions, "logprobs": logprobs,
            "counted": counted, "advantages": advantages / std, "values": values / std,
            "returns": returns / std,
        }  # fmt: skip

        # Update
        losses = []
        for _ in range(args.update_epochs):
            num_trials = batch["inputs"].shape[1]
            for index in torch.randperm(num_trials, device=device).chunk(args.num_minibatches):
                losses.append(compute_gradients(agent, params, batch, index, ent_coef))
                optimizer.step()
            kls = torch.stack([x["approx_kl"] for x in losses[-args.num_minibatches :]])
            if args.target_kl is not None and mean_over_ranks(kls.mean()) > args.target_kl:  # [X3]
                break
        if args.norm_obs:  # [D28]
            agent.obs_rms.update(obs)
            agent.reward_rms.update(rewards)

        # Log and save
        seconds = time.perf_counter() - last_time
        last_time += seconds
        progress["iteration"] = iteration
        progress["global_step"] += batch_size
        progress["seconds"] += seconds
        trial = returns_by_episode.sum(0).mean().item(), counted.sum(0).float().mean().item()
        progress["episodes"] = [list(trial)]
        means = {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}
        means = {name: mean_over_ranks(x).item() for name, x in means.items()}
        seen = {"observations": obs, "last observations": np.array(last_obs), "rewards": rewards}
        for name, x in (seen | means).items():
            if not torch.as_tensor(x).isfinite().all():
                raise FloatingPointError(f"{name} not finite in iteration {iteration}")
        if log:
            epochs = len(losses) // args.num_minibatches
            means |= {"explained_variance": explained_variance.item(), "epochs": epochs}
            log.write(progress, optimizer, means, batch_size / seconds)
            last_return, step = returns_by_episode[-1].mean(), progress["global_step"]
            log.writer.add_scalar("charts/last_episode_return", last_return, step)
            if iteration % checkpoint_every == 0:
                log.save(saved, progress)

    envs.close()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()  # else gloo's threads may crash the exit
    if log:
        log.save(saved, progress)
        return log.finish(agent, progress)


# ----------- simulators: MuJoCo's families, and Gymnasium's environments with a sampler of tasks


class Task(gym.Wrapper):
    """An environment in which a reset with a seed begins a trial, in a new task.

    Without a sampler the task is to run in direction `goal`, or at velocity `goal` (Finn et al.
    2017), which is the hint. It drops the other infos, which cost MuJoCo 12 % of a step."""

    def __init__(self, env, args, index):
        super().__init__(env)
        self.sampler, self.to_velocity = None, args.env_id == "HalfCheetahVel"
        self.goal = 1.0 - 2 * (index % 2)  # forward and backward in turn: no luck of the draw
        self.metadata = env.metadata | {"hint_size": 0 if args.task_sampler else 1}
        if args.task_sampler:
            module, _, name = args.task_sampler.partition(":")
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError) as error:
                raise UsageError(f"task_sampler {args.task_sampler}: {error}") from error
            self.sampler = getattr(found and importlib.import_module(module), name, None)
            if self.sampler is None:
                raise UsageError(f"task_sampler {args.task_sampler}: no such module:function")
            self.sampler(env.unwrapped, np.random.default_rng(0))
        if check_env(env):
            show_once("info['action_mask'] is not used here: all actions stay possible")

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            seed_generators(self, seed)  # first: a sampler may draw from the environment's own
            rng = np.random.default_rng((seed, 1))  # its own: or the first obs would tell the task
            if self.sampler:
                self.sampler(self.env.unwrapped, rng)
            elif self.to_velocity:
                self.goal = rng.uniform(0, 2)
        obs, _ = self.env.reset(seed=seed, options=options)
        return obs, {"hint": np.array([self.goal])}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not self.sampler:
            velocity = info["x_velocity"]
            run = -abs(velocity - self.goal) if self.to_velocity else self.goal * velocity
            reward += run - info["reward_forward"]
        reward = np.asarray(reward).item()  # some environments return shape (1,)
        return obs, reward, terminated, truncated, {"hint": np.array([self.goal])}


POSITIONS = {"exclude_current_positions_from_observation": False}
RUNNERS = {
    "HalfCheetahDir": ("HalfCheetah-v5", POSITIONS | {"ctrl_cost_weight": 0.05}),
    "HalfCheetahVel": ("HalfCheetah-v5", POSITIONS | {"ctrl_cost_weight": 0.05}),
    "AntDir": ("Ant-v5", POSITIONS | {"terminate_when_unhealthy": False}),
}


show_once = cache(print)  # MuJoCo's warnings: else once per environment, and into a file


def gym_make(env_id, env_kwargs, **more):
    """gym.make, for which a wrong id or argument is a UsageError."""
    try:
        kwargs = {**json.loads(env_kwargs)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"env_kwargs {env_kwargs} is no JSON object: {error}") from error
    with contextlib.suppress(Exception):
        import mujoco

        mujoco.set_mju_user_warning(show_once)
    if env_id.count(":") > 1 or env_id[:1] in (".", ":"):
        raise UsageError(f"env_id '{env_id}' is neither Env-v0 nor module:Env-v0")
    # Words about what was typed. Other errors are faults in the environment's own code.
    wrong = ["importing a module failed", "mujoco", "max_episode_steps", "takes no arguments"]
    wrong += [f"argument '{name}'" for name in (*kwargs, *more)]
    try:
        return gym.make(env_id, disable_env_checker=True, **kwargs, **more)
    except gym.error.Error as error:
        raise UsageError(f"{env_id}: {error}") from error
    except (ImportError, TypeError, ValueError) as error:
        if any(words in str(error) for words in wrong):
            raise UsageError(f"{env_id}: {error}") from error
        raise


def seed_generators(env, seed):
    """What is drawn from besides reset's seed, spaces too: each with a stream of its own."""
    env, seeds = env.unwrapped, np.random.SeedSequence((seed, 2)).generate_state(3).tolist()
    env.np_random = np.random.default_rng(seeds[0])
    env.observation_space.seed(seeds[1])
    env.action_space.seed(seeds[2])


def check_env(env):
    """Raise UsageError where a first reset or step is not as Gymnasium and the spaces say.

    Returns whether actions are masked."""
    while isinstance(env, gym.Wrapper) and type(env).__module__.startswith("gymnasium."):
        env = env.env  # Gymnasium's wrappers would fail first, and not name the environment

    def check(method, returned, expected):
        shape = env.observation_space.shape  # None: of a Dict
        right = isinstance(returned, tuple) and len(returned) == len(expected.split())
        right = right and isinstance(returned[-1], dict) and np.size(returned[1]) == 1
        if not right or (shape is not None and shape != np.shape(returned[0])):
            expected = f"({expected}) with obs in {env.observation_space}"
            raise UsageError(f"{env}: {method} returned {returned} instead of {expected}")
        return returned

    obs, info = check("reset", env.reset(seed=0, options=None), "obs, info")
    masked = "action_mask" in info or (isinstance(obs, dict) and "action_mask" in obs)
    if not masked:  # else what is sampled may be forbidden
        env.action_space.seed(0)
        after = "obs, reward, terminated, truncated, info"
        check("step", env.step(env.action_space.sample()), after)
    return masked


def check_video(env):
    """Raise UsageError where a recording would fail, which comes after the training."""
    try:
        if env.render_mode is None or env.unwrapped.render() is None:
            raise ValueError("render() returns nothing")
        env.close()
    except Exception as error:
        hint = "MuJoCo without a screen needs MUJOCO_GL=egl"
        raise UsageError(f"{env.spec.id} cannot be drawn: {error} ({hint})") from error


def flatten(env):
    """Vectors as observations."""
    space = env.observation_space
    if not isinstance(space, Box) or len(space.shape) != 1:
        with contextlib.suppress(NotImplementedError):  # by a space that Gymnasium does not know
            env = gym.wrappers.FlattenObservation(env)
    if not isinstance(env.observation_space, Box) or env.observation_space.shape == (0,):
        raise UsageError(f"observations {space} are no vector: drop parts of it with a wrapper")
    return env


def make_env(args, i, video_dir=None):
    """The i-th environment, with a flat observation, recorded to `video_dir`."""
    env_id, kwargs = RUNNERS.get(args.env_id, (args.env_id, {}))
    render = {"render_mode": "rgb_array"} if args.capture_video else {}
    kwargs = kwargs | render | {"max_episode_steps": args.episode_length}
    env = gym_make(env_id, args.env_kwargs, **kwargs)
    if video_dir:
        n = args.episodes_per_trial
        env = gym.wrappers.RecordVideo(env, video_dir, lambda episode: episode < n)
    return Task(flatten(env), args, i)


# ----------- bookkeeping from here: nothing below is needed to understand the algorithm


@torch.no_grad()
def evaluate(agent, global_step=0):
    """Meta-test: returns of `test_trials` trials, each in a new task, for summary.json.

    Changes neither the agent nor the randomness of a training."""
    args, N, n = agent.args, agent.args.num_trials, agent.args.episodes_per_trial
    num_trials, device = args.test_trials, agent.obs_rms.mean.device
    tensor = partial(torch.as_tensor, dtype=torch.float32, device=device)
    summary, states = {"eval_episodes": num_trials * n}, (random.getstate(), np.random.get_state())
    modes = {module: module.training for module in agent.modules()}
    agent.eval()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for name, kind in (("eval", "greedy"), ("eval_sampled", "sampled")):
            greedy, returns = name == "eval", []
            where = f"{args.env_id} after {global_step:,} steps"
            print(f"{where}: {num_trials} trials, {kind} actions", flush=True)
            video_dir = f"{args.run_dir}/videos" if args.capture_video and greedy else None
            envs = make_envs(args, N, video_dir)
            for first in tqdm(range(0, num_trials, N), leave=False, disable=None):
                obs, _ = reset(envs, args.seed, 2**31, first)  # 2**31 is no rank
                action = torch.zeros(N, *agent.action_shape, device=device)
                reward, done, rnn_state = torch.zeros(N).to(device), torch.ones(N).to(device), None
                rewards, dones = [], []
                for _ in range(args.trial_length):
                    obs = torch.as_tensor(obs, device=device)
                    inputs = agent.encode(obs, action, reward, done)
                    action, _, rnn_state = agent.get_action(inputs, rnn_state, greedy)
                    obs, reward, terminated, truncated, _ = envs.step(agent.to_env(action))
                    reward, done = tensor(reward), tensor(terminated | truncated)
                    rewards.append(reward)
                    dones.append(done)
                returns.append(episode_returns(torch.stack(rewards), torch.stack(dones), n)[0])
            envs.close()
            x = torch.cat(returns, 1)[:, :num_trials].double().cpu().numpy()  # (n, trials)
            totals, by_episode = x.sum(0), x.mean(1).tolist()
            mean, std = totals.mean().item(), totals.std().item()
            se = std / num_trials**0.5
            print(f"  return {mean:.6g} +- {se:.2g} (standard error), of its episodes", end=" ")
            print(f"1: {by_episode[0]:.4g}, {n}: {by_episode[-1]:.4g}")
            summary |= {f"{name}_mean": mean, f"{name}_std": std}
    summary |= {"trial_return_mean": mean, "trial_return_se": se, "episode_returns": by_episode}
    summary["trial_return_greedy_mean"] = summary["eval_mean"]
    random.setstate(states[0])
    np.random.set_state(states[1])
    for module, training in modes.items():
        module.training = training
    return summary


def load_checkpoint(path):
    """A checkpoint, plain tensors and numbers, and its flags, from a run folder or a file."""
    path = Path(path) if Path(path).is_file() else Path(path, "checkpoint.pt")
    try:
        checkpoint = torch.load(path, "cpu", weights_only=True)
        own = {"resume": None, "evaluate": None, "run_dir": str(path.parent)}
        return checkpoint, Args(**checkpoint["args"] | own)
    except Exception as error:
        raise UsageError(f"'{path}' is no checkpoint of this script: {error}") from error


def load_agent(path):
    """The trained agent of a run folder or a checkpoint file, on the CPU."""
    checkpoint, args = load_checkpoint(path)
    agent = Agent(make_envs(args, 1), args)
    restore({"agent": agent}, checkpoint)
    return agent.eval()


def restore(saved, checkpoint):
    """Load modules and optimizers, whose settings stay those of the flags. Returns the progress."""
    if checkpoint is None:
        return {"iteration": 0, "global_step": 0, "seconds": 0.0, "episodes": []}
    try:
        for name, x in saved.items():
            groups = x.state_dict().get("param_groups")
            x.load_state_dict(checkpoint[name])
            if groups:
                x.load_state_dict(x.state_dict() | {"param_groups": groups})
    except (KeyError, RuntimeError, ValueError) as error:
        raise UsageError(f"the checkpoint does not fit these flags: {error}") from error
    return dict(checkpoint["progress"])


def check_ranges(args):
    if args.evaluate is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("one process evaluates: start it with python, not torchrun")
    for field in fields(args):
        value = getattr(args, field.name)
        low, high = RANGES.get(field.name, (1 if field.type is int else 0, 10**12))
        for x in value if isinstance(value, tuple) else [value]:
            if isinstance(x, int | float) and not low <= x <= high:
                raise UsageError(f"{field.name} = {value} is not in range: {low} to {high}")
    for flag, package in (("track", "wandb"), ("capture_video", "moviepy"), ("envpool", "envpool")):
        used = getattr(args, flag, False) and (args.evaluate is None or flag == "capture_video")
        if used and not importlib.util.find_spec(package):
            raise UsageError(f"{flag} needs a package: pip install {package}")


class RunLog:
    """The files of a run folder, and the lines on the console."""

    def __init__(self, args, device, progress, exact):
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__".replace("/", "_").replace(":", "_")
        second, step = int(time.time()), progress["global_step"]
        about = {package.__name__: package.__version__ for package in (torch, np, gym)}
        shell = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True}
        commit = subprocess.run("git rev-parse HEAD", **shell, text=True).stdout.strip()
        about |= {"script": Path(__file__).stem, "git_commit": commit or None}
        try:
            while Path(f"runs/{name}{second}").exists():  # of a run that began in the same second
                second += 1
            args.run_dir = args.run_dir or f"runs/{name}{second}"
            self.args, self.run_dir = args, Path(args.run_dir)
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if not args.resume and any(self.run_dir.iterdir()):
                raise UsageError(f"run_dir '{self.run_dir}' is not empty; --resume continues a run")
            with open(self.run_dir / "args.json", "w" if args.resume else "x") as file:
                file.write(json.dumps(asdict(args) | about, indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"run_dir: {error}") from error
        if args.track:
            import wandb

            owner = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            wandb.init(**owner, name=f"{name}{second}", config=asdict(args), sync_tensorboard=True)
        self.writer = SummaryWriter(args.run_dir, purge_step=step + 1)
        print(f"{args.env_id}, seed {args.seed}, preset {args.preset}, {device}, in {args.run_dir}")
        if not exact:
            print("no time limit that fits between checkpoints: a resume begins new episodes")
        lines = "{percentage:.0f} %, {n}/{total} steps, {rate_fmt}, {remaining} left{postfix}\n"
        plain = None if sys.stderr.isatty() else lines
        total = args.total_timesteps  # Muesli may end a few steps later
        self.bar = tqdm(total=total, initial=min(step, total), unit=" steps", bar_format=plain)
        self.bar.mininterval, self.sps = 15 if plain else 0.1, []

    def write(self, progress, optimizer, losses, sps):
        step, episodes, charts = progress["global_step"], progress["episodes"], {"SPS": sps}
        if episodes:
            returns, lengths = np.mean(episodes, 0).tolist()
            charts |= {"episodic_return": returns, "episodic_length": lengths}
            self.bar.set_postfix_str(f"return {returns:.6g}", False)
        for i, group in enumerate(optimizer.param_groups):
            charts[f"learning_rate{i or ''}"] = group["lr"]
        for kind, scalars in (("charts", charts), ("losses", losses)):
            for name, x in scalars.items():
                self.writer.add_scalar(f"{kind}/{name}", x, step)
        self.bar.update(min(step, self.bar.total) - self.bar.n)
        if not self.sps:
            self.bar.refresh()  # which update does after mininterval only
        self.sps.append(sps)

    def save(self, saved, progress, name="checkpoint.pt"):
        """Replace a checkpoint at once: a kill leaves the old one or the new one."""
        checkpoint = {"args": asdict(self.args), "progress": progress}
        checkpoint |= {key: x.state_dict() for key, x in saved.items()}
        with open(self.run_dir / f"{name}.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.run_dir / f"{name}.tmp", self.run_dir / name)
        self.writer.flush()

    def finish(self, agent, progress, **more):
        """Evaluate, and write summary.json."""
        self.bar.close()
        args, step, seconds = self.args, progress["global_step"], progress["seconds"]
        # The first iteration may compile; a finished run that is resumed has none.
        sps = np.median(self.sps[1:] or self.sps).item() if self.sps else None
        summary = {"env_id": args.env_id, "seed": args.seed, "global_step": step}
        summary |= {"seconds": seconds, "sps": sps} | evaluate(agent, step) | more
        (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self.writer.add_scalar("eval/episodic_return", summary["eval_mean"], step)
        self.writer.close()
        print("evaluate again:", shlex.join(["python", sys.argv[0], "--evaluate", args.run_dir]))
        return summary


def set_up_torch(args):
    """Threads, determinism and, under torchrun, the process group. Returns the device."""
    random.seed(args.seed)  # for constructors of environments; reset seeds the rest
    np.random.seed(args.seed)
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
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def parse_args():
    """Flags, which win over those of the run or the preset, and the run's checkpoint."""
    first, _ = tyro.cli(Args, add_help=False, return_unknown_args=True)
    run = first.resume if first.evaluate is None else first.evaluate
    if first.resume and (first.evaluate or Path(first.resume).is_file()):
        raise UsageError("resume takes a run folder, and no evaluate beside it")
    named = "simulator" if first.task_sampler else first.env_id
    preset = first.preset or (named if named in PRESETS else "none")
    if preset not in PRESETS:
        raise UsageError(f"preset {preset} is none of {', '.join(PRESETS)}")
    checkpoint, default = None, Args(preset=preset, **PRESETS[preset])
    if run is not None:
        checkpoint, default = load_checkpoint(run)
    args = tyro.cli(Args, description=__doc__, default=default)
    if run and (first.preset or first.run_dir or (args.resume and args.env_id != default.env_id)):
        raise UsageError("env_id, preset and run_dir of a run cannot change")
    args.check()
    return args, checkpoint


def main():
    sys.path.append(os.getcwd())  # for --env-id module:Env-v0
    try:
        args, checkpoint = parse_args()
        if args.evaluate is None:
            train(args, checkpoint)
        else:
            device = set_up_torch(args)
            agent = Agent(make_envs(args, 1), args).to(device)
            evaluate(agent, restore({"agent": agent}, checkpoint)["global_step"])
    except KeyboardInterrupt:
        sys.exit(130)
    except FloatingPointError as error:
        if "not finite in iteration" not in str(error):
            raise  # an environment's own
        sys.exit(f"error: {error}; the last checkpoint, if any, is kept")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
