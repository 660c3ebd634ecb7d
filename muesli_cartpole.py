# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "numpy>=1.26", "gymnasium[box2d,classic-control]>=1.4",
#                 "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""Muesli for discrete actions; vectors or small images (Hessel et al. 2021, arXiv 2104.06159).

    python muesli_cartpole.py                           solve CartPole-v1, then evaluate
    python muesli_cartpole.py --env-id LunarLander-v3   with its preset
    python muesli_cartpole.py --resume runs/RUN         resume a killed run exactly
    python muesli_cartpole.py --evaluate runs/RUN --capture-video

Shapes: N environments, T steps of a rollout; B sequences of W = L + K + 1 rows: L roots,
K unrolled steps, 1 to bootstrap from; C rows of the replay; O observation, A actions, H latent
state, S support atoms. v_hat, q_hat, r_hat are the target network's; pi_prior is its policy, mixed.
Tags: (7) to (14) are the paper's equations; (4.3) to (4.5), (F.1), (F.2) its sections, as are 2 and 5.

Differs from the paper (its appendix as others quote it): learning rate 1e-3 [3e-4], tau 0.03 [0.1], batch
16 x 16 [96 x 30], replay 1e5 steps [6e6 frames], 51 atoms from value_min to value_max [601 from h = -300 to
300], exact KL and E[q] [16 samples]; MLP or one convolution [IMPALA's network and LSTM], residual model
[LSTM], LayerNorm on latent states, root and model share heads; the newest steps in each update [once]; the
mixed pi_prior in Retrace, too; losses are means over unmasked steps; no beta-LOO baseline for clipped ratios.
"""

import importlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class UsageError(ValueError):
    """Invalid usage: printed as one line, exit status 2."""

@dataclass
class Args:
    # Run
    exp_name: str = "muesli_cartpole"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder to evaluate instead of training
    eval_episodes: int = 100  # per evaluation: first deterministic, then sampled
    checkpoint_every: int = 0  # iterations; each resets the environments; 0: about 20 a run or fewer

    # Environment
    env_id: str = "CartPole-v1"  # Gymnasium id, also module:Env-v0
    env_kwargs: str = "{}"  # its keyword arguments as JSON: '{"gravity": -5}'
    total_timesteps: int = 50_000  # steps over all environments
    num_envs: int = 8  # environments stepped together
    train_frequency: int = 2  # T, steps per environment between two updates
    eval_frequency: int = 2_500  # steps between greedy evaluations while training; 0: none
    stop_return: float | None = None  # solved at it in two evaluations; default: Gymnasium's threshold
    stop_early: bool = True  # end once solved; off: at total_timesteps

    # Algorithm
    learning_rate: float = 1e-3  # of AdamW; usable from 1e-4 to 3e-3
    anneal_lr: bool = True  # linearly to 0
    weight_decay: float = 0.0  # AdamW's, per unit of learning rate
    clip_update: float = 1.0  # clip Adam's normalized update elementwise (F.1); 0: off
    gamma: float = 0.995  # discount factor
    tau: float = 0.03  # target network's step to the online one, per update
    seq_len: int = 16  # L, roots of a sequence: the model unrolls from each
    unroll_steps: int = 5  # K, steps of the model's unroll (4.4)
    batch_size: int = 16  # B, sequences per update
    replay_share: float = 0.75  # of a batch from the whole replay; rest: newest steps (section 5)
    buffer_size: int = 100_000  # steps in the replay over all environments
    learning_starts: int = 500  # steps before the first update
    retrace: bool = True  # Retrace returns (4.4); off: uncorrected n-step returns
    retrace_lambda: float = 0.95  # 0: one step ahead, 1: as far as the policies agree
    cmpo: Literal["exact", "sampled"] = "exact"  # (7) over all actions, or (11)
    cmpo_samples: int = 16  # N of (11) and (12)
    cmpo_clip: float = 1.0  # c of (7): clip range of normalized advantages
    cmpo_coef: float = 1.0  # lambda of (9): weight of the CMPO regularizer
    pg_coef: float = 1.0  # weight of the policy gradient, the first term of (9)
    model_coef: float = 1.0  # weight of the model's policy loss (13)
    value_coef: float = 0.25  # weight of the value loss
    reward_coef: float = 1.0  # weight of the reward loss
    detach_ratio: bool = True  # off: no gradient where the ratio exceeds 1
    norm_adv: bool = True  # divide advantages by the root of their second moment (4.5)
    norm_adv_decay: float = 0.99  # decay of that running moment per update
    prior_behavior: float = 0.03  # share of the behavior policy in pi_prior (F.2)
    prior_uniform: float = 0.003  # share of the uniform policy, in acting too (F.2)
    encoder: Literal["mlp", "cnn"] = "mlp"  # cnn: for small images, channels first or last
    hidden_size: int = 128  # H, width of the latent state
    head_size: int = 64  # width of the hidden layer of each head
    num_bins: int = 51  # S, atoms of the value and reward heads
    value_min: float = -2.0  # smallest value and reward of the heads
    value_max: float = 220.0  # largest value and reward

    # Speed
    device: str = "cpu"  # auto, cpu (fastest for small networks), cuda, cuda:1, mps
    torch_threads: int = 1  # small networks get slower with more

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "muesli"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first deterministic evaluation episode

    @property
    def window(self):
        return self.seq_len + self.unroll_steps + 1  # W: L roots, K steps, 1 to bootstrap from

    def check(self):
        """Raise UsageError unless all numbers are in range and fit each other."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            low, high = RANGES.get(name, (1 if field.type is int and field.default else 0, 10**12))
            if field.type in (int, float) and not low <= value <= high:
                raise UsageError(f"{name} = {value} is not in range: {low} to {high}")
        if min(self.buffer_size, self.total_timesteps) < self.window * self.num_envs:
            raise UsageError(f"buffer_size, total_timesteps: at least {self.window * self.num_envs} steps")

RANGES = {"gamma": (0, 1), "retrace_lambda": (0, 1), "replay_share": (0, 1), "cmpo_clip": (0, 40),
          "tau": (0, 1), "norm_adv_decay": (0, 0.9999), "prior_behavior": (0, 0.5), "prior_uniform": (0, 0.5),
          "value_min": (-1e12, 0), "value_max": (1e-3, 1e12), "num_bins": (3, 10**6), "seed": (0, 2**32 - 1),
          "hidden_size": (2, 10_000), "head_size": (1, 10_000), "eval_frequency": (0, 10**12)}
FIXED = ("env_id", "preset", "run_dir", "num_envs", "buffer_size", "value_min", "value_max")
PRESETS = {
    "none": {},
    "Acrobot-v1": {"total_timesteps": 200_000, "train_frequency": 4, "eval_frequency": 20_000,
                   "stop_early": False, "stop_return": -90.0, "gamma": 0.99,
                   "value_min": -120.0, "value_max": 2.0},
    "LunarLander-v3": {"total_timesteps": 500_000, "train_frequency": 4, "stop_early": False,
                       "eval_frequency": 50_000, "gamma": 0.997,
                       "value_min": -400.0, "value_max": 400.0, "head_size": 128, "tau": 0.1},
}

def make_envs(args, num_envs, video_dir=None):
    """Environments, flat observations without a CNN; the first is recorded to `video_dir`."""
    ndim = 3 if args.encoder == "cnn" else 1

    def make_env(i):
        recorded = args.capture_video and i == 0
        render = {"render_mode": "rgb_array"} if recorded else {}
        env = gym.make(args.env_id, disable_env_checker=True, **json.loads(args.env_kwargs), **render)
        if recorded:  # better to fail now than after the training
            import moviepy  # noqa: F401
            env.reset(seed=0)
            assert env.render() is not None, "it renders nothing"
        if not isinstance(env.observation_space, Box) or len(env.observation_space.shape) != ndim:
            env = gym.wrappers.FlattenObservation(env)
        video = recorded and video_dir is not None
        return gym.wrappers.RecordVideo(env, video_dir, lambda n: n == 0) if video else env

    try:
        thunks = [lambda i=i: make_env(i) for i in range(num_envs)]
        envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.NEXT_STEP)
    except Exception as error:
        raise UsageError(f"{args.env_id}: {type(error).__name__}: {error}") from error
    space, actions = envs.single_observation_space, envs.single_action_space
    shape = space.shape or ()
    if not isinstance(actions, Discrete) or len(shape) != ndim or min(sorted(shape)[1:], default=3) < 3:
        raise UsageError(f"{args.env_id}: {space} with {actions} does not fit encoder {args.encoder}")
    gigabytes = args.buffer_size * (space.dtype.itemsize * np.prod(shape) + 4 * actions.n + 20) / 1e9
    if gigabytes > 8:
        raise UsageError(f"buffer_size: a replay of {gigabytes:.0f} GB, and a checkpoint as large")
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)

def reset_envs(envs, *key):
    """Seed and reset everything by a key such as (seed, 0, iteration)."""
    *seeds, torch_seed = np.random.SeedSequence(key).generate_state(envs.num_envs + 1).tolist()
    torch.manual_seed(torch_seed)
    obs, _ = envs.reset(seed=seeds)
    return SimpleNamespace(obs=obs, last=torch.zeros(len(obs)), terminal=torch.zeros(len(obs)))

class Replay:
    """The newest rows of all environments (C, N, ...), a ring in the order they were played.
    A row: observation, action taken there, its reward, policy it was drawn from (behavior);
    last: 1 if the observation ended its episode; terminal: 1 if not by a time limit."""

    def __init__(self, capacity):
        self.capacity, self.count, self.rows = capacity, 0, {}

    def add(self, rows):
        """Write rows (T, N, ...) over the oldest."""
        index = (self.count + torch.arange(len(rows["obs"]))) % self.capacity
        for name, x in rows.items():
            if name not in self.rows:
                self.rows[name] = x.new_zeros(self.capacity, *x.shape[1:])
            self.rows[name][index] = x
        self.count += len(index)

    def sample(self, args):
        """Sequences (W, B, ...). The first end with the newest row, one per environment;
        the next, if any, end up to L rows earlier, and so on."""
        size, num_envs = min(self.count, self.capacity), self.rows["last"].shape[1]
        num_starts = size - args.window + 1
        start = torch.randint(num_starts, (args.batch_size,))
        env = torch.randint(num_envs, (args.batch_size,))
        newest = torch.arange(args.batch_size - int(args.batch_size * args.replay_share))
        stride = min(args.seq_len, num_starts * num_envs // max(1, len(newest)))
        start[newest] = num_starts - 1 - newest // num_envs * stride
        env[newest] = torch.randperm(num_envs)[newest % num_envs]
        index = (self.count - size + start + torch.arange(args.window)[:, None]) % self.capacity
        return {name: x[index.to(x.device), env.to(x.device)] for name, x in self.rows.items()}

def signed_hyperbolic(x):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x (Pohlen et al. 2018)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + 1e-3 * x

def signed_parabolic(y):
    """The inverse of signed_hyperbolic."""
    return y.sign() * ((((1 + 4e-3 * (y.abs() + 1 + 1e-3)).sqrt() - 1) / 2e-3).square() - 1)

def two_hot(x, support):
    """Weights (..., S) of the two atoms around each x (...), whose mean is x."""
    x = x.clamp(support[0], support[-1]).unsqueeze(-1)
    return (1 - (x - support).abs() / (support[1] - support[0])).clamp(min=0)

class Network(nn.Module):
    """Representation, dynamics, prediction (4.3)."""

    def __init__(self, obs_shape, num_actions, args):
        super().__init__()
        H, F = args.hidden_size, args.head_size
        self.obs_ndim, self.channels_last = len(obs_shape), False
        if args.encoder == "cnn":  # that of MinAtar's authors (Young and Tian 2019)
            one, two, three = obs_shape  # a square has two equal sides; else the fewest are channels
            self.channels_last = one == two or (two != three and three <= one)
            channels, height, width = np.roll(obs_shape, self.channels_last).tolist()
            first = [nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(),
                     nn.Linear(16 * (height - 2) * (width - 2), H)]
        else:
            first = [nn.Linear(*obs_shape, H), nn.ReLU(), nn.Linear(H, H)]
        self.representation = nn.Sequential(*first, nn.LayerNorm(H), nn.ReLU(), nn.Linear(H, H))
        self.norm = nn.LayerNorm(H)
        self.from_state, self.from_action = nn.Linear(H, H), nn.Embedding(num_actions, H)
        self.to_state = nn.Linear(H, H)
        sizes = num_actions, args.num_bins, args.num_bins
        heads = [nn.Sequential(nn.Linear(H, F), nn.ReLU(), nn.Linear(F, n)) for n in sizes]
        self.policy, self.value, self.reward = heads
        for head in heads:
            nn.init.zeros_(head[-1].bias)
            nn.init.normal_(head[-1].weight, std=1e-2)

    def represent(self, obs):
        """Latent states of observations (..., O), or of images with channels first or last."""
        x = obs.float().flatten(0, -1 - self.obs_ndim)
        x = x.movedim(-1, 1).contiguous() if self.channels_last else x
        return self.norm(self.representation(x)).unflatten(0, obs.shape[: -self.obs_ndim])

    def step(self, state, action):
        """Latent states after these actions (...), which may be broadcast."""
        hidden = self.from_state(state) + self.from_action(action)
        return self.norm(state + self.to_state(hidden.relu()))

    def forward(self, obs, actions):
        """Policies and values (K + 1, ...) at observations (..., O) and after each action
        (K, ...), and the actions' rewards (K, ...), as logits."""
        states = [self.represent(obs)]
        for action in actions:
            states.append(self.step(states[-1], action))
        states = torch.stack(states)
        return self.policy(states), self.value(states), self.reward(states[1:])

class Agent(nn.Module):
    """The online network, and the target network: its moving average, which acts."""

    def __init__(self, envs, args, device):
        super().__init__()
        self.args, self.device, action_space = args, device, envs.single_action_space
        self.num_actions, self.first_action = int(action_space.n), int(action_space.start)
        obs_shape = envs.single_observation_space.shape
        self.online = Network(obs_shape, self.num_actions, args)
        self.target = Network(obs_shape, self.num_actions, args)
        low, high = signed_hyperbolic(torch.tensor([args.value_min, args.value_max])).tolist()
        distance = (high - low) / (args.num_bins - 2)
        atoms = torch.arange(args.num_bins) - np.ceil(-low / distance)  # one of them is 0
        self.support = nn.Buffer(distance * atoms)  # (S,)
        self.adv_var = nn.Buffer(torch.zeros(2))  # second moment, bias correction
        self.to(device)

    def scalar(self, logits):
        """Mean (...) of a value or reward head (..., S), in units of returns (4.5)."""
        return signed_parabolic(logits.softmax(-1) @ self.support)

    def act(self, obs, greedy):
        """Actions (N,) at observations (N, O), and the policy (N, A) they are from."""
        policy = self.target.policy(self.target.represent(obs)).softmax(-1)
        policy.lerp_(torch.full_like(policy, 1 / self.num_actions), self.args.prior_uniform)
        noise = torch.ones_like(policy) if greedy else torch.empty_like(policy).exponential_()
        return (policy / noise).argmax(-1), policy  # a sample: exponential race

def retrace(rewards, discounts, values, q_taken, traces):
    """Returns (W - 1, B) of the actions taken (4.4; Munos et al. 2016). All arguments (W, B).
    Row t: reward of action t; discount, value, trace of state t. A discount of 0
    ends the return; a trace of 0 bootstraps, and so does the last row."""
    returns, correction = [], torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards) - 1)):
        returns.append(rewards[t] + discounts[t + 1] * (values[t + 1] + correction))
        correction = traces[t] * (returns[-1] - q_taken[t])
    return torch.stack(returns[::-1])

def cmpo(pi_prior, adv_hat, args):
    """Weights (..., A) that the policy moves to, from normalized advantages (..., A).
    Exact: the distribution of (7). Sampled: the weights of (11), normalized as in (12)."""
    exp_adv = adv_hat.clamp(-args.cmpo_clip, args.cmpo_clip).exp()
    if args.cmpo == "exact":
        return pi_prior * exp_adv / (pi_prior * exp_adv).sum(-1, keepdim=True)
    n = args.cmpo_samples  # NaN would fail in multinomial, before train names its source
    samples = pi_prior.flatten(0, -2).nan_to_num(1).multinomial(n, True).view(*pi_prior.shape[:-1], n)
    sampled = exp_adv.gather(-1, samples)
    weights = sampled / (1 + sampled.sum(-1, keepdim=True) - sampled)  # z_init = 1; both 1 / N cancel
    return torch.zeros_like(pi_prior).scatter_add_(-1, samples, weights)

def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)

@torch.no_grad()
def make_targets(agent, batch):
    """What the target network gives the online one, at the real observations: pi_cmpo and
    pi_prior (W, B, A), Retrace returns and normalized advantages (W - 1, B) of the actions
    taken. Updates the running second moment of advantages."""
    args, target, action = agent.args, agent.target, batch["actions"][..., None]
    state = target.represent(batch["obs"])  # (W, B, H)
    v_hat = agent.scalar(target.value(state))  # (W, B)
    network_share = 1 - args.prior_behavior - args.prior_uniform
    pi_prior = (network_share * target.policy(state).softmax(-1) + args.prior_behavior * batch["behavior"]
                + args.prior_uniform / agent.num_actions)  # (W, B, A)
    next_state = target.step(state[..., None, :], torch.arange(agent.num_actions, device=agent.device))
    r_hat = agent.scalar(target.reward(next_state))  # (W, B, A)
    q_hat = r_hat + args.gamma * agent.scalar(target.value(next_state))  # (14)
    expected_q = (pi_prior * q_hat).sum(-1)  # (W, B)
    # Retrace (4.4)
    ratio = (pi_prior / batch["behavior"]).gather(-1, action).squeeze(-1).clamp(max=1)
    traces = (args.retrace_lambda * ratio if args.retrace else 1.0) * (1 - batch["last"])
    q_taken = q_hat.gather(-1, action).squeeze(-1) if args.retrace else expected_q  # off: it cancels
    discounts = args.gamma * (1 - batch["terminal"])  # absorbing states without rewards (section 2)
    returns = retrace(batch["rewards"], discounts, expected_q, q_taken, traces)
    # Advantages over the root of their second moment: the mean stays (4.5)
    advantages, scale = returns - v_hat[:-1], 1.0
    if args.norm_adv:
        roots = slice(args.seq_len)
        moment = masked_mean(advantages[roots].square(), 1 - batch["last"][roots])
        agent.adv_var.lerp_(torch.stack([moment, moment.new_ones(())]), 1 - args.norm_adv_decay)
        scale = (agent.adv_var[0] / agent.adv_var[1] + 1e-12).rsqrt()
    pi_cmpo = cmpo(pi_prior, (q_hat - v_hat[..., None]) * scale, args)
    return {"pi_cmpo": pi_cmpo, "pi_prior": pi_prior, "returns": returns, "adv_hat": advantages * scale}

def episode_masks(last, terminal):
    """Where an unroll from each root stands, from its rows' flags (K + 1, ...).
    alive: in the root's episode, where the policy acts. absorbed: at or past its terminal state,
    nothing more is earned."""
    ended = (last.cumsum(0) > 0).float()
    after_end = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
    return 1 - ended, ((ended - after_end) * terminal).cumsum(0)

LOSSES = ("policy_loss", "cmpo_loss", "model_loss", "value_loss", "reward_loss", "entropy",
          "kl_to_prior", "clipped_targets", "grad_norm")

def muesli_loss(outputs, agent, batch, targets):
    """Policy (9), model (13), value and reward loss of what the online network predicts from L
    roots (K + 1 or K, L, B, ...). Returns the loss, and all LOSSES but grad_norm."""
    args, L = agent.args, agent.args.seq_len

    def unroll(x):  # (W, B, ...) to (K + 1, L, B, ...): [k, t] is step k from root t
        return torch.stack([x[k : k + L] for k in range(args.unroll_steps + 1)])

    def kl(target, logprobs):
        return (torch.special.xlogy(target, target) - target * logprobs).sum(-1)

    def head_loss(logits, x, mask):  # (4.5)
        target = two_hot(signed_hyperbolic(x), agent.support)
        return masked_mean(kl(target, logits.log_softmax(-1)), mask)

    logits, value_logits, reward_logits = outputs
    alive, absorbed = episode_masks(unroll(batch["last"]), unroll(batch["terminal"]))
    root = alive[0]  # (L, B)

    # Policy gradient (10) with a ratio of at most 1, and CMPO regularizer (9)
    logprobs, action = logits.log_softmax(-1), batch["actions"][:L, :, None]
    logprob = logprobs[0].gather(-1, action).squeeze(-1)
    behavior = batch["behavior"][:L].gather(-1, action).squeeze(-1)
    ratio = (logprob.exp() / behavior).clamp(max=1)
    surrogate = ratio.detach() * logprob if args.detach_ratio else ratio
    pg_loss = -masked_mean(surrogate * targets["adv_hat"][:L], root)
    cmpo_kl = kl(unroll(targets["pi_cmpo"]), logprobs)  # (K + 1, L, B)
    cmpo_loss = masked_mean(cmpo_kl[0], root)
    # Model, value and reward loss (4.4)
    model_loss = masked_mean(cmpo_kl[1:], alive[1:])  # (13)
    returns = unroll(targets["returns"]) * alive
    value_loss = head_loss(value_logits, returns, (alive + absorbed) * root)
    rewards = unroll(batch["rewards"])[:-1] * alive[:-1]
    reward_mask = torch.maximum(alive[:-1], absorbed[1:]) * root
    reward_loss = head_loss(reward_logits, rewards, reward_mask)
    loss = (args.pg_coef * pg_loss + args.cmpo_coef * cmpo_loss + args.model_coef * model_loss
            + args.value_coef * value_loss + args.reward_coef * reward_loss)
    entropy = -masked_mean((logprobs[0].exp() * logprobs[0]).sum(-1), root)
    kl_to_prior = masked_mean(kl(targets["pi_prior"][:L], logprobs[0]), root)
    head_targets = torch.cat([returns, rewards])  # masked ones are 0
    clipped = ((head_targets < args.value_min) | (head_targets > args.value_max)).float().mean()
    debug = (pg_loss, cmpo_loss, model_loss, value_loss, reward_loss, entropy, kl_to_prior, clipped)
    return loss, torch.stack(debug).detach()

def adamw_step(opt, grad, learning_rate, args):
    """AdamW in place (Loshchilov and Hutter 2019), its normalized update clipped (F.1)."""
    opt["exp_avg"].lerp_(grad, 0.1)
    opt["exp_avg_sq"].lerp_(grad.square(), 0.001)
    rates = 1 - grad.new_tensor([0.9, 0.999])
    bias1, bias2 = opt["bias"].add_((1 - opt["bias"]) * rates).unbind()  # 1 - beta^t
    update = opt["exp_avg"] / bias1 / ((opt["exp_avg_sq"] / bias2).sqrt() + 1e-8)
    limit = args.clip_update or np.inf
    update = update.clamp(-limit, limit) + args.weight_decay * opt["params"]
    opt["params"].sub_(learning_rate * update)

def train_step(agent, opt, batch, learning_rate, losses):
    """One update of the online network, which the target network follows. Parameters are views
    of one vector: so Adam and the moving average are one operation each."""
    L, K = agent.args.seq_len, agent.args.unroll_steps
    targets = make_targets(agent, batch)
    actions = torch.stack([batch["actions"][k : k + L] for k in range(K)])  # (K, L, B)
    loss, debug = muesli_loss(agent.online(batch["obs"][:L], actions), agent, batch, targets)
    grads = torch.autograd.grad(loss, list(agent.online.parameters()))
    grad = nn.utils.parameters_to_vector(grads)
    adamw_step(opt, grad, learning_rate, agent.args)
    opt["target"].lerp_(opt["params"], agent.args.tau)
    losses.add_(torch.cat([debug, grad.norm()[None]]))

@torch.no_grad()
def rollout(envs, agent, env_state, greedy=False):
    """Play T steps with the target network's policy; advances `env_state`. Returns rows
    (T, N, ...), and (environment, return, length) of finished episodes. An episode's last
    observation has a row, too: there the action only resets."""
    steps, episodes = [], []
    for _ in range(agent.args.train_frequency):
        obs = torch.from_numpy(env_state.obs).to(agent.device)
        action, policy = agent.act(obs, greedy)
        env_action = action.cpu().numpy() + agent.first_action
        env_state.obs, reward, terminated, truncated, infos = envs.step(env_action)
        steps.append({"obs": obs, "actions": action, "rewards": torch.from_numpy(reward).float(),
                      "behavior": policy, "last": env_state.last, "terminal": env_state.terminal})
        done = terminated | truncated
        for n in np.flatnonzero(done):
            episodes.append((n.item(), *(infos["episode"][key][n].item() for key in ("r", "l"))))
        env_state.last = torch.from_numpy(done).float()
        env_state.terminal = torch.from_numpy(terminated).float()
    rows = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return {name: x.to(agent.device) for name, x in rows.items()}, episodes

def train(args, checkpoint=None):
    """Train, from a checkpoint on if there is one, then evaluate. Returns the summary."""
    device = set_up_device(args)
    envs = make_envs(args, args.num_envs)
    agent, opt = make_agent(envs, args, device, checkpoint)
    if args.evaluate is not None:
        return evaluate(agent, Path(args.evaluate), checkpoint["progress"]["global_step"])
    replay = Replay(args.buffer_size // args.num_envs)
    progress = {"iteration": 0, "global_step": 0, "seconds": 0.0, "clipped": False,
                "episodes": [], "evaluations": []}
    if checkpoint:
        progress = checkpoint["progress"]
        replay.add({name: x.to(device) for name, x in checkpoint["rows"].items()})
        replay.count = checkpoint["count"]
    num_iterations = args.total_timesteps // args.num_envs // args.train_frequency
    limit = max(1_000, envs.unwrapped.envs[0].spec.max_episode_steps or 0)  # a checkpoint cuts episodes
    save_every = args.checkpoint_every or max(num_iterations // 20, -(-limit // args.train_frequency))
    thresholds = args.stop_return, envs.unwrapped.envs[0].spec.reward_threshold, np.inf
    stop_return = next(x for x in thresholds if x is not None)
    log = RunLog(args, device, progress["global_step"])
    env_state = reset_envs(envs, args.seed, 0, progress["iteration"])
    losses, num_updates = torch.zeros(len(LOSSES), device=device), 0  # since the last row
    last_time, last_step = time.perf_counter(), progress["global_step"]
    solved = solved_at(progress["evaluations"], stop_return)
    done = progress["global_step"] >= args.total_timesteps or (args.stop_early and solved)
    while not done:
        # Rollout
        rows, episodes = rollout(envs, agent, env_state)
        replay.add(rows)
        steps = int((1 - rows["last"]).sum())  # a reset is no step
        iteration, global_step = progress["iteration"] + 1, progress["global_step"] + steps
        progress |= {"iteration": iteration, "global_step": global_step,
                     "episodes": (progress["episodes"] + episodes)[-100:]}

        # Update
        remaining = max(0.0, 1 - global_step / args.total_timesteps)
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)
        if global_step >= args.learning_starts and replay.count >= args.window:
            train_step(agent, opt, replay.sample(args), learning_rate, losses)
            num_updates += 1
        for name, x in {**rows, "next_obs": torch.from_numpy(env_state.obs), "losses": losses}.items():
            if not x.isfinite().all():
                raise FloatingPointError(f"{name} not finite in iteration {iteration}")

        # Evaluate
        if args.eval_frequency and global_step % args.eval_frequency < steps:  # a multiple was passed
            mean_return = play_episodes(agent, True, global_step).mean().item()
            tqdm.write(f"step {global_step}: deterministic return {mean_return:.1f}")
            progress["evaluations"].append((global_step, mean_return))
            solved = solved_at(progress["evaluations"], stop_return)

        # Log and save
        done = global_step >= args.total_timesteps or (args.stop_early and solved)
        save = done or iteration % save_every == 0
        if save or global_step % 1_000 < steps:
            means = dict(zip(LOSSES, (losses / num_updates).tolist(), strict=True))
            if means["clipped_targets"] > 0 and not progress["clipped"]:
                tqdm.write("targets beyond value_min or value_max are clipped")
                progress["clipped"] = True
            seconds = time.perf_counter() - last_time
            progress["seconds"] += seconds
            charts = {"learning_rate": learning_rate, "SPS": (global_step - last_step) / seconds,
                      "greedy_return": progress["evaluations"][-1][1] if progress["evaluations"] else np.nan}
            last_time, last_step = last_time + seconds, global_step
            log.bar.total = max(log.bar.total, global_step)
            log.write(progress, charts, means)
            losses, num_updates = torch.zeros_like(losses), 0
        if save:
            # The reset cuts episodes like a time limit: last observations without actions.
            obs = torch.from_numpy(env_state.obs[None]).to(device)
            replay.add({"obs": obs, "terminal": env_state.terminal[None].to(device), "last": 1,
                        "actions": 0, "rewards": 0, "behavior": 1 / agent.num_actions})
            filled = {name: x[: replay.count].clone() for name, x in replay.rows.items()}
            log.save(args=asdict(args), progress=progress, agent=agent.state_dict(), opt=opt,
                     rows=filled, count=replay.count)
            env_state = reset_envs(envs, args.seed, 0, iteration)
    if solved:
        tqdm.write(f"solved at {solved} steps: return {stop_return} in two evaluations")
    return log.finish(agent, progress, solved_at=solved)

# ------------- bookkeeping from here: nothing below is needed to understand the algorithm

def play_episodes(agent, greedy, when, video_dir=None):
    """Returns (N,) of full episodes, one per fresh environment, with own seeds."""
    args, N, returns = agent.args, agent.args.eval_episodes, {}
    envs = make_envs(args, N, video_dir)
    limit = envs.unwrapped.envs[0].spec.max_episode_steps or 27_000
    with torch.random.fork_rng(devices=[agent.device] if agent.device.type == "cuda" else []):
        env_state = reset_envs(envs, args.seed, 2**31, when)  # training has 0 in place of 2**31
        for _ in range(0, limit, args.train_frequency):
            for n, episodic_return, _ in rollout(envs, agent, env_state, greedy)[1]:
                returns.setdefault(n, episodic_return)  # of the first episode
            if len(returns) == N:
                break
        else:
            tqdm.write(f"  {N - len(returns)} of {N} have no end: cut after {limit} steps")
    envs.close()
    return np.array([returns.get(n, envs.episode_returns[n]) for n in range(N)])

def solved_at(evaluations, stop_return):
    """Steps of the first of two evaluations (steps, return) in a row that reach it, or None."""
    return next((steps for (steps, x), (_, y) in pairwise(evaluations) if min(x, y) >= stop_return), None)

def evaluate(agent, run_dir, global_step):
    """Deterministic, then sampled actions. Returns the numbers for summary.json."""
    args, N, summary = agent.args, agent.args.eval_episodes, {}
    for name, kind, greedy in (("eval", "deterministic", True), ("eval_sampled", "sampled", False)):
        print(f"{args.env_id} after {global_step:,} steps: {N} episodes, {kind} actions")
        x = play_episodes(agent, greedy, 0, run_dir / "videos" if greedy else None)
        summary |= {"eval_episodes": N, f"{name}_mean": x.mean().item(), f"{name}_std": x.std().item()}
        print(f"  return {x.mean():.1f} +- {x.std():.1f}, from {x.min():.1f} to {x.max():.1f}")
    return summary

def make_agent(envs, args, device, checkpoint):
    """Agent, and AdamW's state over flat vectors that the networks' parameters are views of."""
    torch.manual_seed(args.seed)
    agent = Agent(envs, args, device)
    params = nn.utils.parameters_to_vector(agent.online.parameters()).detach()
    opt = {"params": params, "target": params.clone(), "exp_avg": torch.zeros_like(params),
           "exp_avg_sq": torch.zeros_like(params), "bias": params.new_zeros(2)}
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
            opt = {name: opt[name].copy_(x) for name, x in checkpoint["opt"].items()}
        except RuntimeError as error:
            raise UsageError(f"the checkpoint does not fit {args.env_id} with these flags") from error
    nn.utils.vector_to_parameters(opt["params"], agent.online.parameters())
    nn.utils.vector_to_parameters(opt["target"], agent.target.parameters())
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

def set_up_device(args):
    """Threads and determinism. Returns the device."""
    torch.set_num_threads(args.torch_threads)
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a second pass
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for determinism
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=auto if args.device == "auto" else args.device).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {args.device}: {error}") from error

def main():
    sys.path.append(os.getcwd())  # for --env-id module:Env-v0
    try:
        first, _ = tyro.cli(Args, add_help=False, return_unknown_args=True)
        run_dir = first.resume if first.evaluate is None else first.evaluate
        preset = first.preset or (first.env_id if first.env_id in PRESETS else "none")
        if preset not in PRESETS:
            raise UsageError(f"preset {preset} is none of {', '.join(PRESETS)}")
        new_run = None, Args(preset=preset, **PRESETS[preset])
        checkpoint, default = new_run if run_dir is None else load_checkpoint(run_dir)
        args = tyro.cli(Args, description=__doc__, default=default)
        args.check()
        fixed = ("preset", "run_dir") if args.evaluate else FIXED
        if run_dir and any(getattr(args, name) != getattr(default, name) for name in fixed):
            raise UsageError(f"{', '.join(fixed)} of a run cannot change")
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
