# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "gymnasium[box2d,classic-control]>=1.4", "numpy>=1.26",
#                 "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""Muesli for discrete actions, vectors or small images (Hessel et al. 2021, arXiv 2104.06159).

    python muesli_cartpole.py                           solve CartPole-v1, then evaluate
    python muesli_cartpole.py --env-id LunarLander-v3   with its preset
    python muesli_cartpole.py --resume runs/RUN         continue a killed run, exactly
    python muesli_cartpole.py --evaluate runs/RUN --capture-video

Shapes: N environments; B sequences of W = L + K + 1 rows: L roots, K unrolled steps, 1 to
bootstrap from; A actions, H units of a latent state, S atoms of a value or reward head.
v_hat, q_hat, r_hat are the target network's; pi_prior is its policy, mixed with others.
Tags: (7) to (14) are equations, (2), (4.3) to (4.5), (5), (F.1), (F.2) sections of the paper.
Unlike the paper's agent: small MLPs, not a ResNet and an LSTM; normalized observations; a
smaller replay; centered advantages; expectations over all actions, not 16 samples of them
(--cmpo sampled: 16 for the regularizer).
"""

import contextlib
import copy
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
from itertools import pairwise
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class UsageError(ValueError):
    """Invalid usage: printed as one sentence, exit status 2."""


@dataclass
class Args:
    # Run
    exp_name: str = "muesli_cartpole"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder or checkpoint to evaluate instead of training
    eval_episodes: int = 100  # per evaluation: first deterministic, then sampled
    checkpoint_every: int = 0  # iterations between checkpoints; 0: a twentieth of the run

    # Environment
    env_id: str = "CartPole-v1"  # Gymnasium id, also module:Env-v0
    env_kwargs: str = "{}"  # its keyword arguments as JSON: '{"gravity": -5}'
    total_timesteps: int = 50_000  # steps over all environments
    num_envs: int = 8  # environments stepped together
    train_frequency: int = 2  # steps per environment between two updates
    norm_obs: bool = True  # normalize observations by their running mean and std
    eval_frequency: int = 2_500  # steps between evaluations while training; 0: none
    stop_return: float | None = None  # solved at it, twice in a row; default: Gymnasium's
    stop_early: bool = True  # end once solved; off: at total_timesteps

    # Algorithm
    learning_rate: float = 1e-3  # of AdamW; usable from 1e-4 to 3e-3
    anneal_lr: bool = True  # linearly to 0
    weight_decay: float = 0.0  # AdamW's, times the learning rate; clip_update limits it, too
    clip_update: float = 1.0  # largest step of a weight per learning rate (F.1); 0: off
    gamma: float = 0.995  # discount factor
    tau: float = 0.03  # target network, per update: target += tau * (online - target)
    seq_len: int = 16  # L, roots of a sequence: the model unrolls from each
    unroll_steps: int = 5  # K, steps of the model's unroll (4.4)
    batch_size: int = 16  # B, sequences per update
    replay_share: float = 0.75  # of a batch; the rest is the newest steps (5)
    buffer_size: int = 100_000  # steps in the replay over all environments
    learning_starts: int = 500  # steps before the first update
    retrace: bool = True  # Retrace returns (4.4); off: uncorrected n-step returns
    retrace_lambda: float = 0.95  # 0: one step ahead, 1: while the policies agree
    cmpo: Literal["exact", "sampled"] = "exact"  # (7) over all actions, or (11)
    cmpo_samples: int = 16  # N of (11) and (12)
    cmpo_clip: float = 1.0  # c of (7): clip range of normalized advantages
    cmpo_coef: float = 1.0  # lambda of (9): weight of the CMPO regularizer
    pg_coef: float = 1.0  # weight of the policy gradient, the first term of (9)
    model_coef: float = 1.0  # weight of the model's policy loss (13)
    value_coef: float = 0.25  # weight of the value loss
    reward_coef: float = 1.0  # weight of the reward loss
    detach_ratio: bool = True  # off: no gradient where the ratio exceeds 1
    center_adv: bool = True  # subtract the batch mean of advantages; off: as the paper (4.5)
    norm_adv: bool = True  # divide advantages by their root mean square (4.5)
    norm_adv_decay: float = 0.99  # decay of that running mean per update
    prior_behavior: float = 0.03  # share of the behavior policy in pi_prior (F.2)
    prior_uniform: float = 0.003  # share of the uniform policy, in acting too (F.2)
    encoder: Literal["mlp", "cnn"] = "mlp"  # cnn: small images, channels last, not normalized
    hidden_size: int = 128  # H, width of the latent state
    head_size: int = 64  # width of the hidden layer of each head
    num_bins: int = 51  # S, atoms of the value and reward heads
    value_min: float = -220.0  # smallest value and reward; untrained heads predict h's mid-range
    value_max: float = 220.0  # largest value and reward

    # Speed
    device: str = "cpu"  # auto, cpu (fastest for small networks), cuda, cuda:1
    torch_threads: int = 1  # small networks get slower with more

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "muesli"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first deterministic evaluation episode

    @property
    def window(self):
        """Rows W of a sequence."""
        return self.seq_len + self.unroll_steps + 1

    def check(self):
        """Raise UsageError for flags that would fail only later, or do nothing."""
        check_ranges(self)
        least = self.window * self.num_envs
        if min(self.buffer_size, self.total_timesteps) < least:
            raise UsageError(f"buffer_size and total_timesteps: at least {least} steps")
        if self.evaluate is None and self.learning_starts >= self.total_timesteps:
            raise UsageError(f"learning_starts: no update in {self.total_timesteps} steps")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UsageError("one process trains: start it with python, not torchrun")
        if self.capture_video:
            check_video(make_env(self))


RANGES = {  # lowest and highest values; other floats are at least 0, other ints at least 1
    "seed": (0, 2**32 - 1), "checkpoint_every": (0, 10**12), "eval_frequency": (0, 10**12),
    "stop_return": (-1e12, 1e12), "learning_rate": (1e-12, 100), "learning_starts": (0, 10**12),
    "gamma": (0, 1), "tau": (0, 1), "replay_share": (0, 1), "retrace_lambda": (0, 1),
    "buffer_size": (1, 10**8), "cmpo_clip": (0, 40), "norm_adv_decay": (0, 0.9999),
    "prior_behavior": (0, 0.5), "prior_uniform": (0, 0.5), "num_bins": (3, 10**6),
    "value_min": (-1e12, 0), "value_max": (1e-3, 1e12), "torch_threads": (1, 1024),
}  # fmt: skip
PRESETS = {
    "none": {},
    "CartPole-v1": {
        "checkpoint_every": 500,  # episodes fit between two
        "value_min": -2.0,  # untrained values are near 60: any end looks bad, as it is here
    },
    "Acrobot-v1": {
        "total_timesteps": 200_000, "train_frequency": 4, "eval_frequency": 20_000,
        "stop_early": False, "stop_return": -90.0, "gamma": 0.99,
        "value_min": -120.0, "value_max": 2.0,
    },
    "LunarLander-v3": {
        "total_timesteps": 300_000, "eval_frequency": 50_000, "stop_early": False,
        "gamma": 0.997, "value_min": -400.0, "value_max": 400.0, "head_size": 128, "tau": 0.1,
    },
}  # fmt: skip


class DropInfos(gym.Wrapper):
    """Infos are not used here, and Gymnasium cannot gather all kinds of them."""

    def reset(self, **kwargs):
        if kwargs.get("seed") is not None:
            seed_generators(self, kwargs["seed"])
        return self.env.reset(**kwargs)[0], {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.env.step(action)
        reward = np.asarray(reward).item()  # some environments return shape (1,)
        return obs, reward, terminated, truncated, {}


def make_env(args, video_dir=None):
    """One environment, of vectors or for a CNN of images, recorded to `video_dir`."""
    render = {"render_mode": "rgb_array"} if args.capture_video else {}
    env = gym_make(args.env_id, args.env_kwargs, **render)
    if check_env(env):
        show_once("info['action_mask'] is not used here: all actions stay possible")
    if video_dir:
        env = gym.wrappers.RecordVideo(env, video_dir, lambda episode: episode == 0)
    return DropInfos(flatten(env) if args.encoder == "mlp" else env)


def make_envs(args, num_envs, video_dir=None):
    """Environments whose reset is a step of its own, with an action that is ignored.

    So an episode's last observation is a row of the replay, to bootstrap from anew."""
    envs = gym.vector.SyncVectorEnv(
        [partial(make_env, args, None if i else video_dir) for i in range(num_envs)],
        autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP,
    )
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, Discrete):
        raise UsageError(f"{args.env_id}: {action_space} is not Discrete: use ppo_continuous.py")
    if args.encoder == "cnn":
        image = isinstance(obs_space, Box) and len(obs_space.shape) == 3
        if not image or min(obs_space.shape[:2]) < 3:
            raise UsageError(f"{args.env_id}: {obs_space} does not fit the encoder cnn")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def reset(envs, *key):
    """Seed and reset everything by a key such as (seed, rank, iteration)."""
    *seeds, seed = np.random.SeedSequence(key).generate_state(envs.num_envs + 1).tolist()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return envs.reset(seed=seeds)


class Replay(nn.Module):
    """The newest C rows of all environments (C, N, ...), a ring.

    A row: an observation, the action taken there, its reward, the policy that drew it (behavior);
    last: 1 if the observation ends its episode, terminal: 1 if not by a time limit."""

    def __init__(self, envs, args):
        super().__init__()
        space, num_actions = envs.observation_space, int(envs.single_action_space.n)
        C, N = args.buffer_size // args.num_envs, args.num_envs
        self.obs = nn.Buffer(torch.from_numpy(np.zeros((C, *space.shape), space.dtype)))
        self.actions = nn.Buffer(torch.zeros(C, N, dtype=torch.long))
        self.rewards = nn.Buffer(torch.zeros(C, N))
        self.behavior = nn.Buffer(torch.zeros(C, N, num_actions))
        self.last = nn.Buffer(torch.zeros(C, N))
        self.terminal = nn.Buffer(torch.zeros(C, N))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long))  # rows so far

    def add(self, **row):
        """Write a row (N, ...) over the oldest."""
        index = self.count.item() % len(self.last)
        for name, x in row.items():
            getattr(self, name)[index] = torch.as_tensor(x)
        self.count += 1

    def sample(self, args):
        """Sequences (W, B, ...): the newest of some environments, then any (5)."""
        (C, N), B, count = self.last.shape, args.batch_size, self.count.item()
        oldest, newest = max(0, count - C), count - args.window  # where sequences begin
        start, env = torch.randint(oldest, newest + 1, (B,)), torch.randint(N, (B,))
        new = torch.arange(B - int(B * args.replay_share))
        # More than one of an environment: the next ones end L rows earlier.
        start[new] = (newest - new // N * args.seq_len).clamp(min=oldest)
        env[new] = torch.randperm(N)[new % N]
        row = (start + torch.arange(args.window)[:, None]) % C  # (W, B)
        return {name: x[row, env] for name, x in self.named_buffers() if name != "count"}


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

    def update(self, x):
        """Add a batch (..., *shape) by the parallel formula of Chan et al. 1979."""
        x = x.double().reshape(-1, *self.mean.shape)
        self.count += len(x)
        share, delta = len(x) / self.count, x.mean(0) - self.mean
        self.mean += share * delta
        self.var *= 1 - share  # not var += share * (... - var): 1 + (1e-20 - 1) is 0
        self.var += share * (x.var(0, correction=0) + (1 - share) * delta**2)


def signed_hyperbolic(x):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x (Pohlen et al. 2018)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + 1e-3 * x


def signed_parabolic(y):
    """The inverse of signed_hyperbolic. Its usual form is wrong by 1e-4 near 0 in float32."""
    x = y.abs() + 1 + 1e-3
    return y.sign() * ((2 * x / (1 + (1 + 4e-3 * x).sqrt())).square() - 1)


def two_hot(x, support):
    """Weights (..., S) of the two atoms around each x (...), whose mean is x."""
    x = x.clamp(support[0], support[-1]).unsqueeze(-1)
    return (1 - (x - support).abs() / (support[1] - support[0])).clamp(min=0)


class Network(nn.Module):
    """Representation, dynamics and prediction (4.3)."""

    def __init__(self, obs_shape, num_actions, args):
        super().__init__()
        H, F = args.hidden_size, args.head_size
        self.obs_ndim = len(obs_shape)
        if args.encoder == "cnn":  # that of MinAtar's authors (Young and Tian 2019)
            height, width, channels = obs_shape
            size = 16 * (height - 2) * (width - 2)
            first = [nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(size, H)]
        else:
            first = [nn.Linear(*obs_shape, H), nn.ReLU(), nn.Linear(H, H)]
        self.encoder = nn.Sequential(*first, nn.LayerNorm(H), nn.ReLU(), nn.Linear(H, H))
        self.norm = nn.LayerNorm(H)
        self.from_state, self.from_action = nn.Linear(H, H), nn.Embedding(num_actions, H)
        self.to_state = nn.Linear(H, H)
        self.policy, self.value, self.reward = heads = [
            nn.Sequential(nn.Linear(H, F), nn.ReLU(), nn.Linear(F, num_outputs))
            for num_outputs in (num_actions, args.num_bins, args.num_bins)
        ]
        for head in heads:  # begin near uniform distributions
            nn.init.normal_(head[-1].weight, std=1e-2)
            nn.init.zeros_(head[-1].bias)

    def represent(self, obs):
        """Latent states (..., H) of vectors (..., O), or of images."""
        x = obs.flatten(0, -1 - self.obs_ndim)
        if self.obs_ndim == 3:
            x = x.movedim(-1, 1)  # channels first
        return self.norm(self.encoder(x)).unflatten(0, obs.shape[: -self.obs_ndim])

    def dynamics(self, state, action):
        """Latent states after these actions (...), which may be broadcast."""
        hidden = self.from_state(state) + self.from_action(action)
        return self.norm(state + self.to_state(hidden.relu()))

    def forward(self, obs, actions):
        """Policies and values (K + 1, ...) before and after each action (K, ...), and the
        actions' rewards (K, ...), as logits."""
        states = [self.represent(obs)]
        for action in actions:
            states.append(self.dynamics(states[-1], action))
        states = torch.stack(states)
        return self.policy(states), self.value(states), self.reward(states[1:])


class Agent(nn.Module):
    """The online network, and the target network: its moving average, which acts.

    get_action takes raw observations, the networks normalized ones."""

    def __init__(self, envs, args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
        self.num_actions = int(self.action_space.n)
        obs_shape = envs.single_observation_space.shape
        self.obs_rms = RunningMeanStd(*obs_shape)
        self.norm_obs = args.norm_obs and args.encoder == "mlp"
        self.online = Network(obs_shape, self.num_actions, args)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        low, high = signed_hyperbolic(torch.tensor([args.value_min, args.value_max])).tolist()
        distance = (high - low) / (args.num_bins - 2)
        atoms = torch.arange(args.num_bins) - np.ceil(-low / distance)  # one of them is 0
        self.support = nn.Buffer(distance * atoms, persistent=False)  # (S,)
        # Running second moment of advantages, and what corrects its initial 0 (4.5)
        self.adv_sq, self.beta_product = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

    def normalize(self, obs):
        if self.norm_obs:
            obs = ((obs.double() - self.obs_rms.mean) / self.obs_rms.std).clamp(-10, 10)
        return obs.float()

    def scalar(self, logits):
        """Mean (...) of a value or reward head (..., S), in units of returns (4.5)."""
        return signed_parabolic(logits.softmax(-1) @ self.support)

    def to_env(self, actions):
        """Actions (N,) as the environments number them."""
        return (actions.cpu().numpy() + self.action_space.start).astype(self.action_space.dtype)

    def get_action(self, obs, greedy=False):
        """Actions (N,) of the target network, and the policy (N, A) they are drawn from."""
        state = self.target.represent(self.normalize(obs))
        policy = self.target.policy(state).softmax(-1)
        uniform = self.args.prior_uniform
        policy = (1 - uniform) * policy + uniform / self.num_actions  # (F.2)
        action = policy.argmax(-1) if greedy else policy.multinomial(1).squeeze(-1)
        return action, policy


def retrace(rewards, discounts, values, q_taken, traces):
    """Returns (W - 1, B) of the actions taken (4.4; Munos et al. 2016).

    Arguments (W, B): reward of action t; discount, value, q of the action taken, and trace of
    state t. A discount of 0 ends the return; a trace of 0 bootstraps, as does the last row."""
    returns, correction = [], torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards) - 1)):
        returns.append(rewards[t] + discounts[t + 1] * (values[t + 1] + correction))
        correction = traces[t] * (returns[-1] - q_taken[t])
    return torch.stack(returns[::-1])


def cmpo(pi_prior, adv_hat, args):
    """The CMPO policy (..., A), target of the regularizer, from normalized advantages (..., A).

    Exact: the distribution of (7). Sampled: the weights of (11), normalized as in (12)."""
    exp_adv = adv_hat.clamp(-args.cmpo_clip, args.cmpo_clip).exp()
    if args.cmpo == "exact":
        return pi_prior * exp_adv / (pi_prior * exp_adv).sum(-1, keepdim=True)
    samples = pi_prior.flatten(0, -2).multinomial(args.cmpo_samples, replacement=True)
    samples = samples.unflatten(0, pi_prior.shape[:-1])  # (..., N)
    sampled = exp_adv.gather(-1, samples)
    # Leave-one-out normalizers with z_init = 1; both factors 1 / N cancel.
    weights = sampled / (1 + sampled.sum(-1, keepdim=True) - sampled)
    return torch.zeros_like(pi_prior).scatter_add_(-1, samples, weights)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def make_targets(agent, batch):
    """Targets from the target network, at the observations of the batch.

    pi_cmpo, pi_prior (W, B, A); Retrace returns and normalized advantages adv_hat (W - 1, B) of
    the actions taken. Updates the running second moment of advantages."""
    args, target, action = agent.args, agent.target, batch["actions"].unsqueeze(-1)
    state = target.represent(agent.normalize(batch["obs"]))  # (W, B, H)
    v_hat = agent.scalar(target.value(state))  # (W, B)
    pi_prior = (  # (F.2)
        (1 - args.prior_behavior - args.prior_uniform) * target.policy(state).softmax(-1)
        + args.prior_behavior * batch["behavior"]
        + args.prior_uniform / agent.num_actions
    )  # (W, B, A)

    # One step of the model with every action (14)
    all_actions = torch.arange(agent.num_actions, device=state.device)
    next_state = target.dynamics(state.unsqueeze(-2), all_actions)  # (W, B, A, H)
    r_hat = agent.scalar(target.reward(next_state))
    q_hat = r_hat + args.gamma * agent.scalar(target.value(next_state))  # (W, B, A)

    # Retrace (4.4), to absorbing states without rewards (2)
    expected_q = (pi_prior * q_hat).sum(-1)  # (W, B)
    discounts = args.gamma * (1 - batch["terminal"])
    q_taken = q_hat.gather(-1, action).squeeze(-1)
    ratio = (pi_prior / batch["behavior"]).gather(-1, action).squeeze(-1)
    traces = args.retrace_lambda * ratio.clamp(max=1)
    if not args.retrace:  # the rewards up to the end of the sequence, then expected_q
        q_taken, traces = expected_q, torch.ones_like(traces)
    traces = traces * (1 - batch["last"])
    returns = retrace(batch["rewards"], discounts, expected_q, q_taken, traces)

    # Advantages over the root of their second moment (4.5)
    advantages, baseline, scale = returns - v_hat[:-1], v_hat, 1.0
    roots = slice(args.seq_len)
    alive = 1 - batch["last"][roots]
    if args.center_adv:  # where values are too low or too high, all actions look good or bad
        advantages = advantages - masked_mean(advantages[roots], alive)
        baseline = expected_q
    if args.norm_adv:
        beta = args.norm_adv_decay
        moment = masked_mean(advantages[roots].square(), alive)
        agent.adv_sq.lerp_(moment, 1 - beta)
        agent.beta_product *= beta
        scale = (agent.adv_sq / (1 - agent.beta_product) + 1e-12).rsqrt()
    pi_cmpo = cmpo(pi_prior, scale * (q_hat - baseline.unsqueeze(-1)), args)
    adv_hat = scale * advantages
    return {"pi_cmpo": pi_cmpo, "pi_prior": pi_prior, "returns": returns, "adv_hat": adv_hat}


def muesli_loss(agent, batch, targets):
    """Policy (9), model (13), value and reward loss of the online network.

    Returns their weighted sum, and what to log."""
    args, L, K = agent.args, agent.args.seq_len, agent.args.unroll_steps

    def unroll(x):  # (W, B, ...) to (K + 1, L, B, ...): [k, t] is step k from root t
        return torch.stack([x[k : k + L] for k in range(K + 1)])

    def kl(target, logprobs):
        return nn.functional.kl_div(logprobs, target, reduction="none").sum(-1)

    actions = unroll(batch["actions"])[:-1]  # (K, L, B)
    obs = agent.normalize(batch["obs"][:L])
    logits, value_logits, reward_logits = agent.online(obs, actions)
    logprobs = logits.log_softmax(-1)  # (K + 1, L, B, A)

    # An episode that ends two steps after its root (here K = 4):
    #   last      0 0 1 0 0   step 2 is its last observation, step 3 begins another episode
    #   alive     1 1 0 0 0   where the policy acts
    #   absorbed  0 0 1 1 1   where values and rewards are 0; nowhere after a time limit
    alive = (1 - unroll(batch["last"])).cumprod(0)
    ends = -alive.diff(dim=0, prepend=torch.ones_like(alive[:1]))
    absorbed = (ends * unroll(batch["terminal"])).cumsum(0)
    root = alive[0]  # (L, B)
    known = (alive + absorbed) * root  # where values and rewards have targets

    # Policy gradient (10) with a ratio of at most 1
    action = actions[0].unsqueeze(-1)
    logprob = logprobs[0].gather(-1, action).squeeze(-1)
    behavior = batch["behavior"][:L].gather(-1, action).squeeze(-1)
    ratio = (logprob.exp() / behavior).clamp(max=1)
    surrogate = ratio.detach() * logprob if args.detach_ratio else ratio
    pg_loss = -masked_mean(surrogate * targets["adv_hat"][:L], root)

    # CMPO regularizer (9), and the model's policies (13)
    cmpo_kl = kl(unroll(targets["pi_cmpo"]), logprobs)  # (K + 1, L, B)
    cmpo_loss = masked_mean(cmpo_kl[0], root)
    model_loss = masked_mean(cmpo_kl[1:], alive[1:])

    # Values and rewards of the model (4.4), as distributions over atoms (4.5)
    def head_loss(logits, x, mask):
        target = two_hot(signed_hyperbolic(x), agent.support)
        return masked_mean(-(target * logits.log_softmax(-1)).sum(-1), mask)

    returns = unroll(targets["returns"]) * alive
    rewards = (unroll(batch["rewards"]) * alive)[:-1]
    value_loss = head_loss(value_logits, returns, known)
    reward_loss = head_loss(reward_logits, rewards, known[:-1])

    loss = (
        args.pg_coef * pg_loss
        + args.cmpo_coef * cmpo_loss
        + args.model_coef * model_loss
        + args.value_coef * value_loss
        + args.reward_coef * reward_loss
    )
    x = torch.cat([returns, rewards])
    metrics = {
        "policy_loss": pg_loss,
        "cmpo_loss": cmpo_loss,
        "model_loss": model_loss,
        "value_loss": value_loss,
        "reward_loss": reward_loss,
        "entropy": -masked_mean((logprobs[0].exp() * logprobs[0]).sum(-1), root),
        "kl_to_prior": masked_mean(kl(targets["pi_prior"][:L], logprobs[0]), root),
        "clipped_targets": ((x < args.value_min) | (x > args.value_max)).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that moves no weight by more than `clip` times its learning rate (F.1)."""

    def __init__(self, params, lr, weight_decay, clip):
        super().__init__(params, lr, weight_decay=weight_decay, fused=True)
        self.clip = clip

    @torch.no_grad()
    def step(self):
        old = [(p, p.clone(), group) for group in self.param_groups for p in group["params"]]
        super().step()
        for param, before, group in old if self.clip else []:
            limit = self.clip * group["lr"]
            param.clamp_(before - limit, before + limit)


def train(args, checkpoint=None):
    """Train, from a checkpoint on if there is one, then evaluate. Returns the summary."""
    device = set_up_device(args)
    envs = make_envs(args, args.num_envs)
    torch.manual_seed(args.seed)
    agent, replay = Agent(envs, args).to(device), Replay(envs, args).to(device)
    params = [p for p in agent.parameters() if p.requires_grad]  # not those of the target
    optimizer = ClippedAdamW(params, args.learning_rate, args.weight_decay, args.clip_update)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    saved = {"agent": agent, "optimizer": optimizer, "replay": replay}  # what a checkpoint holds
    progress = restore(saved, checkpoint)
    old = checkpoint["args"] if checkpoint else asdict(args)
    if (args.value_min, args.value_max) != (old["value_min"], old["value_max"]):
        raise UsageError("value_min and value_max of a run cannot change: its heads are in them")

    T, N = args.train_frequency, args.num_envs
    checkpoint_every = args.checkpoint_every or max(1, args.total_timesteps // (N * T) // 20)
    spec = envs.unwrapped.envs[0].spec
    exact = (spec.max_episode_steps or np.inf) <= checkpoint_every * T  # episodes fit between two
    threshold = np.inf if spec.reward_threshold is None else spec.reward_threshold
    stop_return = threshold if args.stop_return is None else args.stop_return
    log = RunLog(args, device, progress, exact)
    evaluations = progress.setdefault("evaluations", [])  # [steps, return]
    iteration, global_step = progress["iteration"], progress["global_step"]
    first_iteration, last_step, last_time = iteration + 1, global_step, time.perf_counter()
    losses, warned = [], False

    while global_step < args.total_timesteps:
        if args.stop_early and solved_at(evaluations, stop_return):
            break
        iteration, before = iteration + 1, global_step

        # After a checkpoint all episodes begin anew, so that a resumed run needs only its seed.
        if iteration == first_iteration or (exact and (iteration - 1) % checkpoint_every == 0):
            replay.last[(replay.count - 1) % len(replay.last)] = 1  # cut like by a time limit
            next_obs, _ = reset(envs, args.seed, 0, iteration)
            check_finite(iteration, observations=next_obs)
            last, terminal = np.zeros((2, N), bool)

        # Rollout
        episodes = []
        for _ in range(T):
            obs = torch.as_tensor(next_obs, device=device)
            with torch.no_grad():
                action, policy = agent.get_action(obs)
            next_obs, reward, terminated, truncated, infos = envs.step(agent.to_env(action))
            check_finite(iteration, observations=next_obs, rewards=reward)
            row = {"obs": obs, "actions": action, "rewards": reward, "behavior": policy}
            replay.add(**row, last=last, terminal=terminal)
            if agent.norm_obs:
                agent.obs_rms.update(obs)
            global_step += N - last.sum().item()  # a reset is no step
            last, terminal = terminated | truncated, terminated
            for n in np.flatnonzero(last):
                episodes.append([infos["episode"][key][n].item() for key in ("r", "l")])
        progress |= {"iteration": iteration, "global_step": global_step}
        progress["episodes"] = (progress["episodes"] + episodes)[-100:]

        # Update
        remaining = max(0, 1 - global_step / args.total_timesteps)
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (remaining if args.anneal_lr else 1)
        if global_step >= args.learning_starts and replay.count >= args.window:
            batch = replay.sample(args)
            targets = make_targets(agent, batch)
            loss, metrics = muesli_loss(agent, batch, targets)
            grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.contiguous()  # AdamW(fused=True) takes it as it lies in memory
            metrics["grad_norm"] = nn.utils.get_total_norm(grads)
            check_finite(iteration, **metrics)
            losses.append(metrics)
            optimizer.step()

            # The target network is a moving average of the online one
            pairs = zip(agent.target.parameters(), agent.online.parameters(), strict=True)
            with torch.no_grad():
                for target, param in pairs:
                    target.lerp_(param, args.tau)

        # Evaluate
        every = args.eval_frequency or np.inf
        if global_step // every > before // every:
            mean_return = play_episodes(agent, True, args.seed, 2**31, global_step).mean().item()
            tqdm.write(f"step {global_step}: deterministic return {mean_return:.6g}")
            log.writer.add_scalar("charts/greedy_return", mean_return, global_step)
            evaluations.append([global_step, mean_return])

        # Log and save
        save = iteration % checkpoint_every == 0
        end = global_step >= args.total_timesteps
        if losses and (save or end or global_step // 500 > before // 500):
            seconds = time.perf_counter() - last_time
            progress["seconds"] += seconds
            means = {key: torch.stack([x[key] for x in losses]).mean().item() for key in losses[0]}
            log.write(progress, optimizer, means, (global_step - last_step) / seconds)
            losses, last_step, last_time = [], global_step, last_time + seconds
            if means["clipped_targets"] > 0 and not warned:
                tqdm.write("targets are clipped: a new run needs a wider value_min and value_max")
                warned = True
        if save:
            log.save(saved, progress)

    envs.close()
    log.save(saved, progress)
    solved = solved_at(evaluations, stop_return)
    if solved:
        print(f"solved at {solved} steps: {stop_return} in two evaluations")
    return log.finish(agent, progress, solved_at=solved)


# ----------- bookkeeping from here: nothing below is needed to understand the algorithm


def solved_at(evaluations, stop_return):
    """Steps of the first of two evaluations in a row that reach `stop_return`, or None."""
    for (steps, first), (_, second) in pairwise(evaluations):
        if min(first, second) >= stop_return:
            return steps


@torch.no_grad()
def play_episodes(agent, greedy, *key, video_dir=None):
    """Raw returns (N,) of the first episode in each of `eval_episodes` environments.

    The key seeds them. Changes neither the agent nor the randomness of a training."""
    args, N, device = agent.args, agent.args.eval_episodes, agent.support.device
    states = random.getstate(), np.random.get_state()
    modes = {module: module.training for module in agent.modules()}
    agent.eval()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        envs = make_envs(args, N, video_dir)
        limit = envs.unwrapped.envs[0].spec.max_episode_steps or 2**15
        returns, playing = np.zeros(N), np.ones(N, bool)
        obs, _ = reset(envs, *key)
        for _ in tqdm(range(limit), leave=False, disable=None):
            action, _ = agent.get_action(torch.as_tensor(obs, device=device), greedy)
            obs, reward, terminated, truncated, _ = envs.step(agent.to_env(action))
            returns[playing] += reward[playing]
            playing &= ~(terminated | truncated)
            if not playing.any():
                break
        envs.close()
    random.setstate(states[0])
    np.random.set_state(states[1])
    for module, training in modes.items():
        module.training = training
    return returns


def evaluate(agent, global_step=0):
    """Deterministic, then sampled actions. Returns the numbers for summary.json."""
    args, N = agent.args, agent.args.eval_episodes
    summary = {"eval_episodes": N}
    for name, kind in (("eval", "deterministic"), ("eval_sampled", "sampled")):
        where = f"{args.env_id} after {global_step:,} steps"
        print(f"{where}: {N} episodes, {kind} actions", flush=True)
        greedy = name == "eval"
        video_dir = f"{args.run_dir}/videos" if args.capture_video and greedy else None
        x = play_episodes(agent, greedy, args.seed, 2**31, video_dir=video_dir)
        summary |= {f"{name}_mean": x.mean().item(), f"{name}_std": x.std().item()}
        print(f"  return {x.mean():.6g} +- {x.std():.6g}, from {x.min():.6g} to {x.max():.6g}")
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


def check_finite(iteration, **values):
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"{name} not finite in iteration {iteration}")


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


def set_up_device(args):
    """Threads and determinism. Returns the device."""
    random.seed(args.seed)  # for constructors of environments; reset seeds the rest
    np.random.seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a second pass
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for determinism
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=auto if args.device == "auto" else args.device).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {args.device}: {error}") from error


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
            device = set_up_device(args)
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
