# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "gymnasium[box2d,classic-control,mujoco]>=1.4",
#                 "numpy>=1.26", "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""Proximal Policy Optimization for vector observations (Schulman et al. 2017, arXiv 1707.06347).

    python ppo_continuous.py --env-id Humanoid-v5            train, then evaluate
    python ppo_continuous.py --resume runs/RUN               resume a killed run exactly
    python ppo_continuous.py --evaluate runs/RUN --capture-video

Shapes: T steps, N environments, A action components of up to C choices each; a minibatch has
S sequences of L steps (1 without an RNN). RNN state (K, S, H): K = 1 GRU, 2 LSTM, 0 none.
Tags: [D1] to [D37], [X1] to [X4]: Huang et al. 2022, "The 37 Implementation Details of PPO".
"""

import contextlib
import copy
import importlib.util
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
Distribution.set_default_validate_args(False)  # the checks cost time, and break compiled graphs


class UsageError(ValueError):
    """Invalid usage: printed as one sentence, exit status 2."""


@dataclass
class Args:
    # Run
    exp_name: str = "ppo_continuous"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder or checkpoint to evaluate instead of training
    eval_episodes: int = 10  # per evaluation: first deterministic, then sampled
    checkpoint_every: int = 0  # iterations between checkpoints; 0: a twentieth of the run

    # Environment
    env_id: str = "HalfCheetah-v5"  # Gymnasium id, also module:Env-v0
    env_kwargs: str = "{}"  # its keyword arguments as JSON: '{"gravity": -5}'
    total_timesteps: int = 1_000_000  # steps over all environments and processes
    num_envs: int = 16  # environments per process [D1]
    num_steps: int = 64  # steps per environment in a rollout [D1]
    clip_actions: bool = True  # clip to the bounds what the environment gets [D27]
    scale_actions: bool = True  # the policy's -1 and 1 are the bounds; off: the environment's units
    norm_obs: bool = True  # normalize observations by their running mean and std [D28]
    clip_obs: float = 10.0  # clip normalized observations; 0: off [D29]
    norm_reward: bool = False  # divide rewards by the std of the discounted return [D30]
    clip_reward: float = 10.0  # clip normalized rewards; 0: off [D31]
    truncation_bootstrap: bool = True  # bootstrap at time limits; off: terminal (CleanRL)

    # Algorithm
    learning_rate: float = 3e-4  # of Adam; usable from 1e-5 to 3e-3
    anneal_lr: bool = True  # linearly to 0 [D4]
    adam_eps: float = 1e-5  # Adam's epsilon; PyTorch's default is 1e-8 [D3]
    ortho_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's [D2, D32]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.9  # 0: one-step TD errors, 1: n-step returns (no GAE) [D5]
    recompute_adv: bool = True  # recompute advantages in every epoch (Andrychowicz et al. 2021)
    num_minibatches: int = 16  # per epoch, of whole sequences with an RNN [D6, D35]
    update_epochs: int = 10  # maximum epochs per rollout [D6]
    norm_adv: bool = True  # normalize the advantages of each minibatch, in each process [D7]
    clip_coef: float = 0.2  # clip range of the probability ratio [D8]
    anneal_clip: bool = False  # anneal clip_coef linearly to 0 [X1]
    clip_vloss: bool = False  # clip the change of the value to clip_coef [D9]
    ent_coef: float = 0.0  # entropy bonus; 0.01 helps discrete actions [D10]
    vf_coef: float = 0.5  # weight of the value loss, which is half the squared error [D10]
    max_grad_norm: float = 0.5  # maximum global gradient norm; 0: off [D11]
    target_kl: float | None = 0.03  # stop after an epoch whose mean KL exceeds it [X3]
    norm_value: bool = True  # the critic learns returns divided by their running std
    debias_value: bool = True  # shift the critic where its mean error exceeds the returns' std

    # Network
    share_network: bool = False  # one network for actor and critic, or one each [D13, D26]
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers [D26]
    activation: Literal["tanh", "relu"] = "tanh"  # of the hidden layers [D26]
    learn_std: bool = False  # learn the std, one for all states [D24]
    log_std_init: float = -1.0  # initial log std of the Gaussian [D24]
    log_std_drop: float = 1.3  # how far log std falls over the second half, unless learned
    tanh_mean: bool = False  # squash the Gaussian's mean to (-1, 1), the scaled bounds
    mask_actions: bool = True  # apply info["action_mask"] where there is one [X4]
    rnn: Literal["none", "gru", "lstm"] = "none"  # recurrent layer before actor and critic
    rnn_hidden: int = 64  # its width; the state starts at zero [D33]
    rnn_reset: bool = True  # zero the state where an episode starts; off: keep it [D34]
    rnn_seq_len: int = 0  # steps of a training sequence; 0: num_steps, 1: no BPTT [D35, D36]

    # Speed
    device: str = "cpu"  # auto, cpu (fastest for small networks), cuda, cuda:1
    compile: bool = True  # torch.compile, but not with an RNN: faster, starts later
    torch_threads: int = 1  # per process; small networks get slower with more
    envpool: bool = False  # train in EnvPool's C++ threads, where it has the environment
    env_threads: int = 0  # threads of the simulation, per process; 0: one per core

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first deterministic evaluation episode

    @property
    def seq_len(self):
        """Steps L of a training sequence."""
        return 1 if self.rnn == "none" else self.rnn_seq_len or self.num_steps

    def check(self):
        """Raise UsageError for flags that would fail only later, or do nothing."""
        check_ranges(self)
        S, M = self.num_envs * self.num_steps // self.seq_len, self.num_minibatches
        if self.num_steps % self.seq_len:
            raise UsageError(f"rnn_seq_len {self.seq_len} must divide num_steps {self.num_steps}")
        if S % M or S * self.seq_len == M:
            raise UsageError(f"num_minibatches {M} must divide {S} sequences, into 2+ steps each")
        needs = {"clip_obs": "norm_obs", "clip_reward": "norm_reward", "env_threads": "envpool"}
        needs |= {"rnn_hidden": "rnn", "rnn_seq_len": "rnn", "rnn_reset": "rnn"}
        for flag, needed in needs.items():
            missing = getattr(self, needed) in (False, "none")
            useless = missing and getattr(self, flag) != getattr(Args, flag)
            if useless and self.evaluate is None:
                raise UsageError(f"{flag} needs {needed}")
        if self.capture_video:
            check_video(make_env(self))


RANGES = {  # lowest and highest values; other floats are at least 0, other ints at least 1
    "seed": (0, 2**32 - 1), "checkpoint_every": (0, 10**12), "rnn_seq_len": (0, 10**12),
    "torch_threads": (1, 1024), "env_threads": (0, 1024), "learning_rate": (1e-12, 100),
    "gamma": (0, 1), "gae_lambda": (0, 1), "log_std_init": (-5, 2), "hidden": (1, 10**12),
}  # fmt: skip
LIVE_FLAGS = {
    "learning_rate": float, "clip_coef": float, "ent_coef": float, "vf_coef": float,
    "update_epochs": int, "target_kl": float,
}  # fmt: skip
PRESETS = {
    "none": {},
    "Ant-v5": {"log_std_init": -1.5, "log_std_drop": 1.5},
    "InvertedPendulum-v5": {"tanh_mean": True},
    "InvertedDoublePendulum-v5": {"tanh_mean": True},
    "LunarLander-v3": {"ent_coef": 0.01},
    "LunarLanderContinuous-v3": {
        "num_steps": 256, "num_minibatches": 64, "gamma": 0.999, "gae_lambda": 0.98,
    },
    "MountainCarContinuous-v0": {"log_std_init": 0.5},
    "Reacher-v5": {"log_std_drop": 2.0},
    "Swimmer-v5": {
        "num_envs": 4, "num_steps": 1024, "learning_rate": 6e-4, "gamma": 0.9999,
        "gae_lambda": 0.98, "target_kl": None, "learn_std": True, "log_std_init": 0.0,
        "norm_value": False, "norm_reward": True,
    },
    "historical": {  # CleanRL, openai/baselines
        "num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "target_kl": None,
        "truncation_bootstrap": False, "recompute_adv": False, "norm_value": False,
        "debias_value": False, "norm_reward": True, "clip_vloss": True, "learn_std": True,
        "log_std_init": 0.0, "scale_actions": False, "gae_lambda": 0.95,
    },
}  # fmt: skip


class KeepInfos(gym.Wrapper):
    """Keeps only the infos in KEPT: to gather all costs MuJoCo 12 % of a step, or fails."""

    KEPT = ("action_mask",)  # add what to log; an episode's last one is in infos["final_info"]

    def keep(self, obs, info):
        if isinstance(obs, dict) and "action_mask" in obs:  # where some libraries put it
            info = {"action_mask": obs["action_mask"]} | info
        return {key: info[key] for key in self.KEPT if info.get(key) is not None}

    def reset(self, **kwargs):
        if kwargs.get("seed") is not None:
            seed_generators(self, kwargs["seed"])
            if self.spec.id.startswith("BipedalWalker"):  # its Box2D world remembers contacts
                self.unwrapped._destroy()
                self.unwrapped.world = type(self.unwrapped.world)()
        obs, info = self.env.reset(**kwargs)
        return obs, self.keep(obs, info)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs = copy.deepcopy(obs) if truncated else obs  # the reset that follows may overwrite it
        reward = np.asarray(reward).item()  # some environments return shape (1,)
        return obs, reward, terminated, truncated, self.keep(obs, info)


def make_env(args, video_dir=None):
    """One environment with a flat observation, recorded to `video_dir`."""
    render = {"render_mode": "rgb_array"} if args.capture_video else {}
    env = gym_make(args.env_id, args.env_kwargs, **render)
    check_env(env)
    if video_dir:
        env = gym.wrappers.RecordVideo(env, video_dir, lambda episode: episode == 0)
    return flatten(KeepInfos(env))


def make_envs(args, num_envs, video_dir=None):
    """Environments that restart in the step that ends an episode; the first may be recorded."""
    envs = gym.vector.SyncVectorEnv(
        [partial(make_env, args, None if i else video_dir) for i in range(num_envs)],
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    return RecordEpisodeStatistics(envs)


def time_limit(envs):
    """Registered limit of an episode in steps, or None."""
    return envs.unwrapped.envs[0].spec.max_episode_steps


def reset(envs, *key):
    """Seed and reset everything by a key such as (seed, rank, iteration)."""
    *seeds, seed = np.random.SeedSequence(key).generate_state(envs.num_envs + 1).tolist()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return envs.reset(seed=seeds)


def count_choices(space):
    """Number of choices of each action component (A,); 1 for a real number, in a Box."""
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return np.ones(space.shape, int).ravel()
    if isinstance(space, Discrete):
        return np.array([space.n])
    if isinstance(space, MultiDiscrete):
        return space.nvec.ravel()
    if isinstance(space, MultiBinary):
        return np.full(space.shape, 2).ravel()
    raise UsageError(f"actions {space} are no Box of floats, Discrete, MultiDiscrete, MultiBinary")


@torch.compiler.disable
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


class Agent(nn.Module):
    """Actor, critic and normalization. It takes raw observations.

    A batch holds S sequences of equal length, flattened: their first steps, their second, ...
    `rnn_state` (K, S, H) precedes the first step; `done` (batch,) is 1 where an episode begins;
    `mask` (batch, A, C) has the allowed choices. Values are in units of `return_rms.scale`."""

    def __init__(self, envs, args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
        (num_inputs,) = envs.single_observation_space.shape
        self.obs_rms = RunningMeanStd(num_inputs)
        self.reward_rms, self.return_rms = RunningMeanStd(), RunningMeanStd()
        self.continuous = isinstance(self.action_space, Box)
        num_choices = count_choices(self.action_space)
        # (A, C): True for the choices that a component has, False for padding
        self.choices = np.arange(num_choices.max()) < num_choices[:, None]

        self.num_states = {"none": 0, "gru": 1, "lstm": 2}[args.rnn]  # K
        if self.num_states:
            layer = nn.GRU if args.rnn == "gru" else nn.LSTM
            self.rnn = layer_init(layer(num_inputs, args.rnn_hidden), 1.0, args)
            num_inputs = args.rnn_hidden

        def hidden_layers():
            activation, layers = nn.Tanh if args.activation == "tanh" else nn.ReLU, []
            for fan_in, fan_out in pairwise([num_inputs, *args.hidden]):
                layers += [layer_init(nn.Linear(fan_in, fan_out), 2**0.5, args), activation()]
            return nn.Sequential(*layers)

        width = [num_inputs, *args.hidden][-1]
        self.shared = hidden_layers() if args.share_network else nn.Sequential()  # [D13]
        self.actor = nn.Sequential() if args.share_network else hidden_layers()
        self.actor.append(layer_init(nn.Linear(width, self.choices.size), 0.01, args))
        self.critic = nn.Sequential() if args.share_network else hidden_layers()
        self.critic.append(layer_init(nn.Linear(width, 1), 1.0, args))
        if args.norm_value:  # begin with values of 0: noise would enter the std of returns
            nn.init.zeros_(self.critic[-1].weight)
            nn.init.zeros_(self.critic[-1].bias)
        if self.continuous:
            log_std = torch.full((self.choices.size,), args.log_std_init)
            self.log_std = nn.Parameter(log_std) if args.learn_std else nn.Buffer(log_std)  # [D24]
            low, high = self.action_space.low, self.action_space.high
            scaled = args.scale_actions & (np.maximum(-low, high) < 1e30)
            low, high = np.where(scaled, low, -1), np.where(scaled, high, 1)
            self.offset, self.scale = (low + high) / 2, (high - low) / 2

    def to_env(self, action):
        """Actions (N, A) as the environments take them, in their own units and bounds."""
        args, space = self.args, self.action_space
        action = action.detach().cpu().numpy().reshape(-1, *space.shape)
        if self.continuous:
            action = self.offset + self.scale * action
            if args.clip_actions:
                action = np.clip(action, space.low, space.high)  # [D27]
        return (action + getattr(space, "start", 0)).astype(space.dtype)

    def read_mask(self, infos, num_envs):
        """Allowed choices (N, A, C): all where info["action_mask"] is missing [X4]."""
        mask = np.repeat(self.choices[None], num_envs, 0)
        if self.args.mask_actions and not self.continuous:
            for i in np.flatnonzero(infos.get("_action_mask", [])):
                given = infos["action_mask"][i]
                given = np.concatenate(given) if isinstance(given, tuple) else np.ravel(given)
                if given.size != self.choices.sum():
                    entries = f"{self.choices.sum()} entries: one per choice, two per bit"
                    raise UsageError(f"action_mask needs {entries}; it has {given.size}")
                mask[i][self.choices] = given.astype(bool)
                if not mask[i].any(-1).all():
                    raise UsageError(f"action_mask {infos['action_mask'][i]} allows no action")
        return torch.from_numpy(mask).to(self.obs_rms.mean.device)

    def normalize(self, obs):
        if self.args.norm_obs:
            limit = self.args.clip_obs or torch.inf
            obs = (obs.double() - self.obs_rms.mean) / self.obs_rms.std  # [D28]
            obs = obs.clamp(-limit, limit)  # [D29]
        return obs.float()

    def encode(self, obs, rnn_state, done):
        """Features (batch, F) of actor and critic, and the RNN state after the last step."""
        x = self.normalize(obs)
        if self.num_states:
            # (L, S, ...): one RNN call per stretch of steps in which no episode begins.
            S, outputs = rnn_state.shape[1], []
            x, done = x.unflatten(0, (-1, S)), done.unflatten(0, (-1, S))
            begins = (done[1:].any(1).nonzero().flatten() + 1).tolist()
            for begin, end in pairwise([0, *begins, len(x)]):
                rnn_state = rnn_state * (1 - done[begin] * self.args.rnn_reset)[:, None]  # [D34]
                hidden = rnn_state.split(1) if self.args.rnn == "lstm" else rnn_state
                output, hidden = self.rnn(x[begin:end], hidden)
                rnn_state = torch.cat(hidden) if self.args.rnn == "lstm" else hidden
                outputs.append(output)
            x = torch.cat(outputs).flatten(0, 1)
        return self.shared(x), rnn_state

    def policy(self, features, mask):
        """Distribution of actions (batch, A)."""
        output = self.actor(features)
        if self.continuous:
            output = output.tanh() if self.args.tanh_mean else output
            # Clamped: where actions are clipped, nothing else stops log_std from growing.
            policy = Normal(output, self.log_std.clamp(-5, 2).exp())  # [D23]
        else:
            logits = torch.where(mask, output.unflatten(-1, mask.shape[1:]), -1e8)  # [X4]
            policy = Categorical(logits=logits)
        return Independent(policy, 1)  # the components' log-probabilities add up [D25, D37]

    def get_action_and_value(self, obs, rnn_state, done, mask, greedy=False):
        """Actions (batch, A), sampled or the likeliest, log-probabilities, values, RNN state."""
        features, rnn_state = self.encode(obs, rnn_state, done)
        policy = self.policy(features, mask)
        if greedy:
            action = policy.mode
        elif self.continuous:
            action = policy.rsample()  # as sample(), but faster when compiled
        else:  # as sample(), seven times faster: the maximum of logits with Gumbel noise
            logits = policy.base_dist.logits
            action = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
        return action, policy.log_prob(action), self.critic(features).squeeze(-1), rnn_state

    def get_value(self, obs, rnn_state, done):
        """Values (batch,) and the next RNN state."""
        features, rnn_state = self.encode(obs, rnn_state, done)
        return self.critic(features).squeeze(-1), rnn_state

    def forward(self, obs, rnn_state, done, mask, action):
        """Log-probabilities of given actions, entropies and values, each (batch,)."""
        features, _ = self.encode(obs, rnn_state, done)
        policy = self.policy(features, mask)
        return policy.log_prob(action), policy.entropy(), self.critic(features).squeeze(-1)


def compute_gae(rewards, values, dones, next_value, next_done, gamma, gae_lambda):
    """Generalized advantages (T, N) (Schulman et al. 2016, equation 16) [D5].

    dones[t] is 1 where an episode ended before step t; next_value, next_done (N,): after T."""
    nonterminal = 1 - torch.cat([dones[1:], next_done[None]])
    next_values = torch.cat([values[1:], next_value[None]])
    deltas = rewards + gamma * next_values * nonterminal - values
    decays = gamma * gae_lambda * nonterminal
    advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = torch.addcmul(deltas[t], decays[t], advantage)  # a + b * c
    return advantages


def compute_gradients(agent, params, batch, rnn_states, index, clip_coef):
    """Set the gradients of PPO's loss (equation 9) on the sequences `index` of a batch (L, S, ...).

    Returns what to log [D12], each a scalar tensor."""
    args = agent.args
    mb = {name: x[:, index].flatten(0, 1) for name, x in batch.items()}
    newlogprob, entropy, newvalue = agent(
        mb["obs"], rnn_states[:, index], mb["dones"], mb["masks"], mb["actions"]
    )
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
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # [D10]

    # Not loss.backward(): where a print() cuts the compiled graph, it silently trains nothing.
    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    if WORLD_SIZE > 1:  # one all-reduce for all: each waits, and cuts the compiled graph
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
    """Train, from a checkpoint on if there is one, then evaluate. Returns the summary."""
    device = set_up_torch(args)
    T, N, L = args.num_steps, args.num_envs, args.seq_len
    envs = RecordEpisodeStatistics(EnvPool(args)) if args.envpool else make_envs(args, N)
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(envs, args).to(device)
    preset = PRESETS.get(args.preset, {})  # LunarLander's is taken for its continuous form, too
    kind, unused = "discrete actions", ("learn_std", "log_std_init", "log_std_drop", "tanh_mean")
    if agent.continuous and args.learn_std:
        kind, unused = "actions of a Box with learn_std", ("log_std_drop",)
    elif agent.continuous:
        kind, unused = "actions of a Box without learn_std", ("ent_coef",)
    for name in unused:
        if getattr(args, name) not in (getattr(Args, name), preset.get(name)):
            raise UsageError(f"{name} has no effect on {kind}")
    learning_rate, eps = args.learning_rate, args.adam_eps  # [D3]
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    saved = {"agent": agent, "optimizer": optimizer}  # what a checkpoint holds
    progress = restore(saved, checkpoint)
    act, update = compile_functions(args, device, agent.get_action_and_value, compute_gradients)

    tensor = partial(torch.as_tensor, dtype=torch.float32, device=device)
    batch_size = N * T * WORLD_SIZE
    steps_left = args.total_timesteps - progress["global_step"]
    num_iterations = progress["iteration"] + steps_left // batch_size
    final_step = progress["global_step"] + steps_left // batch_size * batch_size
    if num_iterations < max(1, progress["iteration"]):
        raise UsageError(f"total_timesteps: {steps_left} more are no rollout of {batch_size} steps")
    checkpoint_every = args.checkpoint_every or max(1, num_iterations // 20)
    exact = (time_limit(envs) or np.inf) <= checkpoint_every * T  # all episodes fit in between
    log = RunLog(args, device, progress, exact) if RANK == 0 else None
    first_iteration, last_time = progress["iteration"] + 1, time.perf_counter()
    if args.norm_obs and first_iteration == 1:
        first_iteration = 0  # an extra rollout that only initializes obs_rms: not in global_step

    for iteration in range(first_iteration, num_iterations + 1):
        if iteration > 0:
            read_live(args, optimizer, log, progress["global_step"])
        remaining = 1 - progress["global_step"] / final_step
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (remaining if args.anneal_lr else 1)  # [D4]
        # A tensor: a number is a constant of the first compiled graph, which rounds differently.
        clip_coef = tensor(args.clip_coef * (remaining if args.anneal_clip else 1))  # [X1]
        if agent.continuous and args.learn_std:
            agent.log_std.data.clamp_(-5, 2)  # beyond the clamp of Agent.policy it has no gradient
        elif agent.continuous:  # explore first, then act with little noise
            agent.log_std.fill_(args.log_std_init - args.log_std_drop * max(0, 1 - 2 * remaining))

        # After a checkpoint all episodes begin anew, so that a resumed run needs only its seed.
        if iteration == first_iteration or (exact and (iteration - 1) % checkpoint_every == 0):
            next_obs, infos = reset(envs, args.seed, RANK, iteration)
            next_obs, next_done = torch.as_tensor(next_obs, device=device), torch.ones(N).to(device)
            next_mask = agent.read_mask(infos, N)
            rnn_state = torch.zeros(agent.num_states, N, args.rnn_hidden, device=device)  # [D33]
            discounted_return = torch.zeros(N, device=device)

        # Rollout
        obs = torch.zeros(T, *next_obs.shape, dtype=next_obs.dtype, device=device)  # (T, N, O)
        masks = torch.zeros(T, *next_mask.shape, dtype=torch.bool, device=device)  # (T, N, A, C)
        actions = torch.zeros(T, N, len(agent.choices), device=device)
        logprobs, rewards, dones, values = torch.zeros(4, T, N, device=device)
        rnn_states = torch.zeros(T, *rnn_state.shape, device=device)
        episodes, time_limits, last_obs = [], [], []
        for t in range(T):
            obs[t], dones[t], masks[t], rnn_states[t] = next_obs, next_done, next_mask, rnn_state
            with torch.no_grad():
                actions[t], logprobs[t], values[t], rnn_state = act(
                    obs[t], rnn_state, dones[t], masks[t]
                )
            next_obs, reward, terminated, truncated, infos = envs.step(agent.to_env(actions[t]))
            rewards[t], next_done = tensor(reward), tensor(terminated | truncated)
            next_obs = torch.as_tensor(next_obs, device=device)
            next_mask = agent.read_mask(infos, N)
            if args.norm_reward:  # [D30]
                discounted_return = args.gamma * discounted_return + rewards[t]
                agent.reward_rms.update(discounted_return)
                limit = args.clip_reward or torch.inf
                rewards[t] = (rewards[t] / agent.reward_rms.scale).clamp(-limit, limit)  # [D31]
                discounted_return *= 1 - next_done

            cut = np.flatnonzero(truncated & ~terminated)  # by a time limit
            if args.truncation_bootstrap and len(cut):
                final_obs = torch.as_tensor(np.stack(infos["final_obs"][cut]), device=device)
                time_limits.append((t, cut, final_obs, rnn_state[:, cut]))
            for n in np.flatnonzero(infos.get("_episode", [])):
                episodes.append([infos["episode"][key][n].item() for key in ("r", "l")])
                last_obs.append(infos["final_obs"][n])

        if iteration == 0:
            if not obs.isfinite().all():
                raise FloatingPointError("observations not finite in iteration 0")
            agent.obs_rms.update(obs)
            continue

        # Update
        losses, last_state = [], rnn_state
        for epoch in range(args.update_epochs):
            # Advantages
            if epoch == 0 or args.recompute_adv:
                std = agent.return_rms.scale
                with torch.no_grad():
                    if epoch > 0:
                        values, last_state = agent.get_value(
                            obs.flatten(0, 1), rnn_states[0], dones.flatten()
                        )
                    next_value = std * agent.get_value(next_obs, last_state, next_done)[0]
                    # Anew in each epoch: with the rollout's values Hopper's return is halved.
                    bootstrapped = rewards.clone()
                    for t, cut, final_obs, state in time_limits:
                        if epoch > 0 and agent.num_states:  # recomputed, as last_state
                            past = obs[: t + 1, cut].flatten(0, 1), dones[: t + 1, cut].flatten()
                            _, state = agent.get_value(past[0], rnn_states[0][:, cut], past[1])
                        begins = torch.zeros(len(cut), device=device)
                        value, _ = agent.get_value(final_obs, state, begins)
                        bootstrapped[t, cut] += args.gamma * std * value
                values = std * values.reshape(T, N)
                advantages = compute_gae(
                    bootstrapped, values, dones, next_value, next_done, args.gamma, args.gae_lambda
                )
                returns = advantages + values  # TD(lambda)
                if args.debias_value:
                    # Where all rewards are costs, a critic that begins at 0 overrates states
                    # that the policy has not seen, and the policy keeps seeking them.
                    error, spread = mean_over_ranks(torch.stack([advantages.mean(), returns.std()]))
                    if error.abs() > spread:
                        values += error
                        with torch.no_grad():
                            agent.critic[-1].bias += error / std
                if epoch == 0:
                    explained_variance = 1 - advantages.var() / returns.var()
                if epoch == 0 and args.norm_value:
                    agent.return_rms.update(returns)
                    old_std, std = std, agent.return_rms.scale
                    with torch.no_grad():  # rescale: the same values in the new unit (Pop-Art)
                        for parameter in agent.critic[-1].parameters():
                            parameter *= old_std / std
                batch = {
                    "obs": obs, "dones": dones, "masks": masks, "actions": actions,
                    "logprobs": logprobs, "advantages": advantages / std,
                    "values": values / std, "returns": returns / std,
                }  # fmt: skip
                # (T, N, ...) to (L, S, ...): S = T * N / L sequences [D35]
                batch = {
                    name: x.unflatten(0, (-1, L)).transpose(0, 1).flatten(1, 2)
                    for name, x in batch.items()
                }
                initial_states = rnn_states[::L].transpose(0, 1).flatten(1, 2)  # (K, S, H) [D36]

            # Minibatches [D6]
            num_sequences = batch["obs"].shape[1]
            for index in torch.randperm(num_sequences, device=device).chunk(args.num_minibatches):
                losses.append(update(agent, params, batch, initial_states, index, clip_coef))
                optimizer.step()
            kls = torch.stack([x["approx_kl"] for x in losses[-args.num_minibatches :]])
            if args.target_kl is not None and mean_over_ranks(kls.mean()) > args.target_kl:  # [X3]
                break
        agent.obs_rms.update(obs)  # [D28]

        # Log and save
        seconds = time.perf_counter() - last_time
        last_time += seconds
        progress["iteration"] = iteration
        progress["global_step"] += batch_size
        progress["seconds"] += seconds
        progress["episodes"] = (progress["episodes"] + episodes)[-100:]
        means = {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}
        means = {name: mean_over_ranks(x).item() for name, x in means.items()}
        seen = {"observations": obs, "last observations": np.array(last_obs), "rewards": rewards}
        for name, x in (seen | means).items():
            if not torch.as_tensor(x).isfinite().all():
                raise FloatingPointError(f"{name} not finite in iteration {iteration}")
        if log:
            means |= {"explained_variance": explained_variance.item(), "epochs": epoch + 1}
            log.write(progress, optimizer, means, batch_size / seconds)
            if iteration % checkpoint_every == 0:
                log.save(saved, progress)

    envs.close()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()  # else gloo's threads may crash the exit
    if log:
        log.save(saved, progress)
        return log.finish(agent, progress)


# ----------- bookkeeping from here: nothing below is needed to understand the algorithm


@torch.no_grad()
def evaluate(agent, global_step=0):
    """Raw returns of the first episode in each of `eval_episodes` environments, for summary.json.

    Changes neither the agent nor the randomness of a training."""
    args, N, device = agent.args, agent.args.eval_episodes, next(agent.parameters()).device
    summary, states = {"eval_episodes": N}, (random.getstate(), np.random.get_state())
    modes = {module: module.training for module in agent.modules()}
    agent.eval()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for name, kind in (("eval", "deterministic"), ("eval_sampled", "sampled")):
            greedy = name == "eval"
            video_dir = f"{args.run_dir}/videos" if args.capture_video and greedy else None
            envs = make_envs(args, N, video_dir)
            limit = time_limit(envs) or 2**15
            where = f"{args.env_id} after {global_step:,} steps"
            print(f"{where}: {N} episodes up to {limit} steps, {kind} actions", flush=True)
            obs, infos = reset(envs, args.seed, 2**31)  # 2**31 is no rank
            returns, playing, done = np.zeros(N), np.ones(N, bool), torch.ones(N, device=device)
            rnn_state = torch.zeros(agent.num_states, N, args.rnn_hidden, device=device)
            for _ in tqdm(range(limit), leave=False, disable=None):
                obs, mask = torch.as_tensor(obs, device=device), agent.read_mask(infos, N)
                action, _, _, rnn_state = agent.get_action_and_value(
                    obs, rnn_state, done, mask, greedy
                )
                obs, reward, terminated, truncated, infos = envs.step(agent.to_env(action))
                done = torch.as_tensor(terminated | truncated, dtype=torch.float32, device=device)
                returns[playing] += reward[playing]
                if "_episode" in infos:
                    playing &= ~infos["_episode"]
                    if not playing.any():
                        break
            envs.close()
            summary |= {f"{name}_mean": returns.mean().item(), f"{name}_std": returns.std().item()}
            print(f"  return {returns.mean():.6g} +- {returns.std():.6g}", end=", ")
            print(f"from {returns.min():.6g} to {returns.max():.6g}")
    random.setstate(states[0])
    np.random.set_state(states[1])
    for module, training in modes.items():
        module.training = training
    return summary


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


class EnvPool(gym.vector.VectorEnv):
    """The environments of EnvPool, stepped by C++ threads on all cores.

    Its tasks of MuJoCo are Gymnasium's: with MuJoCo 3.6, which it brings along, bit for bit, but
    for rewards in float32, and a fall in the last step of the time limit, which is no end here."""

    def __init__(self, args):
        self.args, self.num_envs, self.envs = args, args.num_envs, [make_env(args)]
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        for wrapper in self.envs[0].spec.additional_wrappers:  # without its time limit
            if wrapper.name not in ("KeepInfos", "FlattenObservation"):
                raise UsageError(f"EnvPool would train without the wrapper {wrapper.name}")
        self.reset(seed=range(self.num_envs))
        if self.pool.observation_space.shape != self.single_observation_space.shape:
            raise UsageError(f"{args.env_id} of EnvPool has other observations than Gymnasium's")

    def reset(self, seed, options=None):
        import envpool

        args, ranks = self.args, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        threads = args.env_threads or max(1, os.cpu_count() // ranks)
        seeds = [x % 2**31 for x in seed]
        kwargs = json.loads(args.env_kwargs) | {"num_envs": self.num_envs, "num_threads": threads}
        kwargs |= {"env_seed": seeds, "max_episode_steps": time_limit(self) or 2**31 - 1}
        if not args.env_threads:  # a core each: simulation takes 12 to 37 % less time
            kwargs["thread_affinity_offset"] = int(os.environ.get("LOCAL_RANK", 0)) * threads
        try:  # a new pool, as seeds are those that it was made with
            self.pool = envpool.make(args.env_id, "gymnasium", **kwargs)
        except (AssertionError, TypeError) as error:
            raise UsageError(f"EnvPool, {args.env_id} {args.env_kwargs}: {error}") from error
        return self.pool.reset()[0], {}

    def step(self, actions):
        obs, reward, terminated, truncated, _ = self.pool.step(actions)
        ended, infos = np.flatnonzero(terminated | truncated), {}
        if len(ended):
            infos, obs = {"final_obs": obs}, obs.copy()
            obs[ended] = self.pool.reset(ended)[0]
        return obs, reward, terminated, truncated, infos


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


def compile_functions(args, device, *functions):
    """The functions, compiled; but no RNN's, whose graph would change every time."""
    if not args.compile or args.rnn != "none":
        return functions
    if not (shutil.which("g++") or shutil.which("clang++")):
        print("no C++ compiler: slow, as with --no-compile")
        return functions
    print("compiling: the first iteration takes up to a minute", flush=True)
    torch._dynamo.config.trace_autograd_ops = True  # gradients in one graph with their loss
    options = {"cpp_wrapper": device.type == "cpu"}
    try:  # a compiler that fails does so here, before there is a run folder
        torch.compile(lambda x: x + 1, options=options)(torch.zeros(1, device=device))
    except torch._dynamo.exc.TorchDynamoException as error:
        message = " ".join(str(error).split())
        raise UsageError(f"{message} (--no-compile needs no compiler)") from error
    return [torch.compile(function, options=options) for function in functions]


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


def read_live(args, optimizer, log, global_step):
    """Apply live.json, which becomes live-{global_step}.json and is read again on resume."""
    changes, old = [{}], args.learning_rate
    paths = [log.run_dir / name for name in ("live.json", f"live-{global_step}.json") if log]
    if path := next(filter(Path.exists, paths), None):
        try:
            given = json.loads(path.replace(paths[1]).read_text())
            given = {x: value for x, value in given.items() if x in LIVE_FLAGS}
            if wrong := {x for x, y in given.items() if type(y) not in (int, LIVE_FLAGS[x])}:
                raise TypeError(f"{wrong} of another type")
            check_ranges(replace(args, **given))
            changes = [given]
        except (OSError, AttributeError, TypeError, ValueError) as error:
            given = f"nothing: {error}"
        can_change = ", ".join(LIVE_FLAGS)
        tqdm.write(f"step {global_step}: {path.name} changes {given}; only: {can_change}")
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(changes)
    for name, value in changes[0].items():
        setattr(args, name, value)
    for group in optimizer.param_groups:
        group["initial_lr"] *= args.learning_rate / old


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
    preset = first.preset or (first.env_id if first.env_id in PRESETS else "none")
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
