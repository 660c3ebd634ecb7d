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
"""Muesli for discrete actions and vector observations (Hessel et al. 2021, arXiv 2104.06159).

    python muesli_cartpole.py                             solve CartPole-v1, evaluate, say where everything is
    python muesli_cartpole.py --resume runs/RUN           go on after a kill, exactly
    python muesli_cartpole.py --evaluate runs/RUN --capture-video

Shapes: N environments, L positions of a training sequence, K unrolled steps, W = L + K + 1 rows of a window
of the replay, B windows in a batch, O observation, A actions, H latent state, S support atoms.
Tags: (7) to (14) are equations of the paper, (4.5) and the like its sections; appendix values are as others
quote them. The prior is the target network: it acts, and it gives all targets.
"""

import difflib
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import warnings
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.func import functional_call
from torch.nn.functional import one_hot
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


SCRIPT = "muesli_cartpole"


@dataclass
class Args:
    # Run
    exp_name: str = "muesli_cartpole"
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
    eval_episodes: int = 10
    """full episodes of an evaluation, one environment each: first deterministic, then with sampled actions"""
    checkpoint_every: int = 0
    """iterations between checkpoints, each resets the environments (see restart); 0: about 20 a long run"""

    # Environment
    env_id: str = "CartPole-v1"
    """any Gymnasium id, also module:Env-v0; observations that are no vector are flattened"""
    total_timesteps: int = 50_000
    """environment steps over all environments and processes; in whole rollouts"""
    num_envs: int = 8
    """environments per process, stepped together; between rollouts only a checkpoint resets them [D1]"""
    train_frequency: int = 2
    """steps per environment between two updates"""
    eval_every: int = 2500
    """environment steps between evaluations while training, of greedy actions in fresh episodes; 0: none"""
    solve_episodes: int = 100
    """episodes of each of them"""
    stop_return: float | None = 475.0
    """return of two evaluations in a row that solves the environment, 475 for CartPole; None: nothing"""
    stop_early: bool = True
    """training ends once the environment is solved; off: at total_timesteps"""

    # Algorithm
    learning_rate: float = 1e-3
    """Adam's step size; usable from 1e-5 to 3e-3"""
    anneal_lr: bool = True
    """learning rate falls linearly to 0 at total_timesteps [D4]"""
    adam_eps: float = 1e-8
    """added to Adam's denominator; PyTorch's own default is 1e-8 [D3]"""
    weight_decay: float = 0.0
    """AdamW's, per unit of learning rate"""
    clip_update: float = 1.0
    """Adam's normalised update is clipped to that, each element for itself (appendix F.1); 0: no limit"""
    gamma: float = 0.995
    """discount per step; the horizon is about 1 / (1 - gamma) steps"""
    target_rate: float = 0.03
    """the target network moves that part of its distance to the online network after each update"""
    seq_len: int = 16
    """L, positions of a window from which the model is unrolled and the policy learns"""
    unroll_steps: int = 5
    """K, steps of the model's unroll (4.4)"""
    batch_size: int = 16
    """B, windows of an update"""
    replay_share: float = 0.75
    """part of each batch that is drawn from the whole replay; the rest are the newest steps (section 5)"""
    replay_size: int = 100_000
    """rows that the replay holds over all environments: steps, and the last observations of episodes"""
    learning_starts: int = 500
    """environment steps before the first update"""
    retrace: bool = True
    """multi-step returns corrected by Retrace (4.4); off: uncorrected rewards to the window's end"""
    retrace_lambda: float = 0.95
    """Retrace's lambda: 0 looks one step ahead, 1 as far as the two policies agree"""
    correct_value_target: bool = False
    """the value head learns v + min(1, rho) (G - v), as G is of the action taken, not of the policy"""
    cmpo: Literal["exact", "sampled"] = "exact"
    """(7) over all actions, or (11) over cmpo_samples actions of the prior"""
    cmpo_samples: int = 16
    """N of (11) and (12)"""
    cmpo_clip: float = 1.0
    """c of (7): bound of normalised advantages; the policy moves at most tanh(c / 2) in total variation"""
    cmpo_coef: float = 1.0
    """lambda of (9), weight of the CMPO regulariser; 0: none"""
    pg_coef: float = 1.0
    """weight of the policy gradient, the first term of (9); 0: none"""
    model_coef: float = 1.0
    """weight of the model's policy loss (13); 0: none"""
    value_coef: float = 0.25
    """weight of the value loss"""
    reward_coef: float = 1.0
    """weight of the reward loss"""
    detach_ratio: bool = True
    """the clipped importance weight is a constant; off: no gradient where it is above 1 (10)"""
    scale_adv: bool = True
    """advantages over the root of their running second moment (4.5)"""
    scale_adv_decay: float = 0.99
    """decay of that moment per update"""
    baseline: Literal["v", "q"] = "v"
    """what CMPO's advantages subtract: v of the prior, or the prior's expectation of q"""
    prior_behaviour: float = 0.03
    """part of the behaviour policy in the prior"""
    prior_uniform: float = 0.003
    """part of the uniform policy in the prior and in acting"""
    hidden_size: int = 128
    """H, units of the latent state and of all hidden layers"""
    dynamics: Literal["residual", "lstm"] = "residual"
    """the model: a residual MLP, or the paper's LSTM"""
    num_bins: int = 51
    """S, atoms of the value and reward heads"""
    value_min: float = -2.0
    """smallest value and reward that the heads can tell; targets below are clipped, and that is reported"""
    value_max: float = 220.0
    """greatest value and reward"""

    # Speed
    device: str = "cpu"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, mps; small networks are fastest on one CPU thread"""
    compile: bool = False
    """compiled graphs, where there is a C++ compiler: faster, but slow to start; off: starts at once"""
    torch_threads: int = 1
    """threads of PyTorch in each process; small networks get slower with more"""

    # Logging
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "muesli"
    """its project"""
    wandb_entity: str | None = None
    """its team"""
    capture_video: bool = False
    """record the first episode of the deterministic evaluation as mp4"""

    @property
    def window(self):
        """W, rows of a window: L positions, K steps from the last one, and the state after that."""
        return self.seq_len + self.unroll_steps + 1

    @property
    def num_newest(self):
        """Windows of a batch that end with the newest step."""
        share = 1 - self.replay_share
        return max(1, round(self.batch_size * share)) if share else 0

    def __post_init__(self):
        zero = {"checkpoint_every", "eval_every", "learning_starts"}
        signed = {"seed", "stop_return", "value_min", "value_max"}
        at_most_1 = {"gamma", "retrace_lambda", "replay_share", "target_rate", "scale_adv_decay",
                     "prior_behaviour", "prior_uniform"}
        for name, value in vars(self).items():
            low = 1 if type(getattr(Args, name)) is int and name not in zero else 0
            high = 1 if name in at_most_1 else sys.float_info.max
            if isinstance(value, (int, float)) and name not in signed and not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value} is out of range: give {low} to {high}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed {self.seed} is out of range: give 0 to {2**32 - 1}")
        if self.num_bins < 2 or not -math.inf < self.value_min < self.value_max < math.inf:
            raise UsageError("give at least 2 --num-bins, and a --value-min below --value-max, both finite")
        if self.prior_behaviour + self.prior_uniform > 1:
            raise UsageError("--prior-behaviour and --prior-uniform are parts of 1: give at most 1 together")
        if self.scale_adv_decay == 1 or self.cmpo_clip > 40 or math.isnan(self.stop_return or 0):
            raise UsageError("give a --scale-adv-decay below 1, a --cmpo-clip of at most 40, a --stop-return")
        if self.replay_size // self.num_envs < self.window:
            raise UsageError(f"--replay-size {self.replay_size} holds no window of {self.window} steps of "
                             f"{self.num_envs} environments: give at least {self.window * self.num_envs}")


# ---------------------------------------------------------------------------------------------- environment


def import_or_explain(module, option):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{option} needs {module}: pip install {module}") from error


class SlimInfo(gym.Wrapper):
    """Of each info only the action mask, flat: to collect the rest costs 5 to 10 % of a MuJoCo step."""

    def slim(self, info):
        mask = info.get("action_mask")
        parts = mask if isinstance(mask, tuple) else [mask]
        return {} if mask is None else {"action_mask": np.concatenate([np.ravel(part) for part in parts])}

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs, self.slim(info)

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, self.slim(info)


def make_envs(args, num_envs, video_dir=None, vector=SyncVectorEnv, autoreset=AutoresetMode.SAME_STEP):
    """Vector of environments with flat observations; the first is recorded where there is a `video_dir`."""

    def make_env(record):
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which still needs us
        rendering = {"render_mode": "rgb_array"} if record else {}
        env = gym.make(args.env_id, disable_env_checker=True, **rendering)
        if record:
            if renderer := getattr(env.unwrapped, "mujoco_renderer", None):  # or the agent runs out of sight
                mujoco = importlib.import_module("mujoco")
                renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
            env = gym.wrappers.RecordVideo(env, video_dir, lambda episode: episode == 0, disable_logger=True)
        space = env.observation_space
        if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
            env = gym.wrappers.FlattenObservation(env)
        return SlimInfo(env)

    if args.capture_video and sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it at its import, which is here
    thunks = [lambda record=bool(video_dir) and i == 0: make_env(record) for i in range(num_envs)]
    module, _, name = args.env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        if "mujoco" in str(gym.spec(name).entry_point):  # its warnings once, not num_envs times
            import_or_explain("mujoco", args.env_id).set_mju_user_warning(warnings.warn)
        envs = vector(thunks, autoreset_mode=autoreset)
    except (gym.error.Error, ImportError, NotImplementedError) as error:
        close = [] if name in gym.registry else difflib.get_close_matches(name, gym.registry, cutoff=0.5)
        mend = f"; close names: {', '.join(close)}" if close else ""
        raise UsageError(f"cannot make --env-id {args.env_id}: {str(error).splitlines()[0]}{mend}") from error
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        raise UsageError(f"--env-id {args.env_id}: {envs.single_observation_space} is not a vector")
    if args.capture_video and "rgb_array" not in envs.metadata.get("render_modes", []):
        raise UsageError(f"--capture-video: {args.env_id} does not render pictures")
    return envs


# ------------------------------------------------------------------------------------------------- networks


def compress(x):
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, invertible (Pohlen et al. 2018)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + 1e-3 * x


def expand(y):
    """The inverse of compress."""
    return y.sign() * ((((1 + 4e-3 * (y.abs() + 1 + 1e-3)).sqrt() - 1) / 2e-3).square() - 1)


def two_hot(x, support):
    """Weights (..., S) of the two atoms around each x, whose mean is x; `support` has equal distances."""
    x = x.clamp(support[0], support[-1]).unsqueeze(-1)
    return (1 - (x - support).abs() / (support[1] - support[0])).clamp(min=0)


class Network(nn.Module):
    """Representation, dynamics and prediction (4.3). A latent state is (..., H), of an LSTM (..., 2 H)."""

    def __init__(self, obs_dim, num_actions, args):
        super().__init__()
        size = args.hidden_size
        self.lstm, self.num_actions = args.dynamics == "lstm", num_actions
        self.representation = nn.Sequential(nn.Linear(obs_dim, size), nn.ReLU(), nn.Linear(size, size),
                                            nn.LayerNorm(size), nn.ReLU(), nn.Linear(size, size))
        self.scale = nn.LayerNorm(size)
        if self.lstm:
            self.model = nn.LSTMCell(num_actions, size)
        else:
            self.model = nn.Sequential(nn.Linear(size + num_actions, size), nn.ReLU(), nn.Linear(size, size))
        self.trunk = nn.Sequential(nn.Linear(size, 3 * size), nn.ReLU())
        self.policy = nn.Linear(size, num_actions)
        self.value, self.reward = (nn.Linear(size, args.num_bins) for _ in range(2))
        for head in (self.policy, self.value, self.reward):
            nn.init.zeros_(head.bias)
            nn.init.normal_(head.weight, std=1e-2)

    def represent(self, obs):
        """Latent states of observations (..., O)."""
        state = self.scale(self.representation(obs))
        return torch.cat([state.tanh(), state], -1) if self.lstm else state

    def step(self, state, action):
        """Latent states after these actions (...), integers."""
        action = one_hot(action, self.num_actions).float()
        if self.lstm:
            hidden, cell = state.flatten(0, -2).chunk(2, -1)
            return torch.cat(self.model(action.flatten(0, -2), (hidden, cell)), -1).view(state.shape)
        return self.scale(state + self.model(torch.cat([state, action], -1)))

    def predict(self, state):
        """Logits of the policy (..., A), of the value and of the reward that led here (..., S)."""
        policy, value, reward = self.trunk(state[..., : self.policy.in_features]).chunk(3, -1)
        return self.policy(policy), self.value(value), self.reward(reward)

    def forward(self, obs, actions):
        """Predictions (K + 1, ...) at observations (..., O) and after each of the actions (K, ...)."""
        states = [self.represent(obs)]
        for action in actions:
            states.append(self.step(states[-1], action))
        return self.predict(torch.stack(states))


class Agent(nn.Module):
    """The online network, the prior (an exponential moving average of it, which acts), and statistics."""

    def __init__(self, obs_dim, action_space, args):
        super().__init__()
        self.args, self.num_actions, self.first_action = args, int(action_space.n), int(action_space.start)
        self.online, self.prior = (Network(obs_dim, self.num_actions, args) for _ in range(2))
        low, high = compress(torch.tensor([args.value_min, args.value_max]))
        self.register_buffer("support", torch.linspace(low, high, args.num_bins))
        self.register_buffer("moment", torch.zeros(2))  # running second moment of advantages, bias correction

    def scalar(self, logits):
        """Mean (...) of a value or reward head (..., S), in units of returns (4.5)."""
        return expand(logits.softmax(-1) @ self.support)

    def to_env(self, action):
        """Choices (N,) to what the environments take."""
        return action.cpu().numpy() + self.first_action

    def policy(self, obs):
        """The prior's policy (N, A) at observations (N, O), mixed with a little of the uniform one."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.support.device)
        policy = self.prior.predict(self.prior.represent(obs))[0].softmax(-1)
        return torch.lerp(policy, torch.full_like(policy, 1 / self.num_actions), self.args.prior_uniform)


# ------------------------------------------------------------------------------------------------ algorithm


def retrace(rewards, discounts, values, q_taken, traces):
    """Returns (W - 1, B) of the actions taken (4.4; Munos et al. 2016). All arguments (W, B).

    Row t: the reward of action t, the discount, value and trace coefficient of state t. A discount of 0 ends
    the return, a trace coefficient of 0 goes on with the value alone; so does the last row."""
    returns, correction = [], torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards) - 1)):
        returns.append(rewards[t] + discounts[t + 1] * (values[t + 1] + correction))
        correction = traces[t] * (returns[-1] - q_taken[t])
    return torch.stack(returns[::-1])


def cmpo(prior, advantages, args):
    """What the policy is pulled towards, weights (..., A), from normalised advantages (..., A) of the prior.

    Exact: the distribution of (7). Sampled: the weights of (11), normalisers of the other samples (12)."""
    gain = advantages.clamp(-args.cmpo_clip, args.cmpo_clip).exp()
    if args.cmpo == "exact":
        return prior * gain / (prior * gain).sum(-1, keepdim=True)
    n = args.cmpo_samples
    samples = torch.multinomial(prior.flatten(0, -2), n, replacement=True).view(*prior.shape[:-1], n)
    gains = gain.gather(-1, samples)
    weights = gains / (1 + gains.sum(-1, keepdim=True) - gains)  # z_init = 1; the 1 / N of (11), (12) cancel
    return torch.zeros_like(prior).scatter_add_(-1, samples, weights)


@torch.no_grad()
def make_targets(agent, window):
    """Everything that the online network learns from, by the prior at the real observations of a window.

    Returns the policy's targets and the prior (W, B, A), the value head's targets and the scaled advantages
    of the actions taken (W - 1, B). Moves the running second moment of advantages."""
    args, prior_net = agent.args, agent.prior
    action = window["actions"].unsqueeze(-1)
    state = prior_net.represent(window["obs"])  # (W, B, H)
    logits, value_logits, _ = prior_net.predict(state)
    value = agent.scalar(value_logits)
    rest = 1 - args.prior_behaviour - args.prior_uniform
    prior = (rest * logits.softmax(-1) + args.prior_behaviour * window["behaviour"]
             + args.prior_uniform / agent.num_actions)
    every = torch.arange(agent.num_actions, device=state.device).expand(prior.shape)
    after = prior_net.step(state.unsqueeze(-2).expand(*prior.shape, -1), every)  # (W, B, A, H)
    _, next_value, reward = prior_net.predict(after)
    q = agent.scalar(reward) + args.gamma * agent.scalar(next_value)  # (14)
    expected_q = (prior * q).sum(-1)
    ratio = ((prior / window["behaviour"]).gather(-1, action).squeeze(-1)).clamp(max=1)
    traces = (args.retrace_lambda * ratio if args.retrace else 1.0) * (1 - window["last"])
    q_taken = q.gather(-1, action).squeeze(-1) if args.retrace else expected_q
    discounts = args.gamma * (1 - window["terminal"])  # absorbing states without rewards (section 2)
    returns = retrace(window["rewards"], discounts, expected_q, q_taken, traces)
    advantages = returns - value[:-1]
    if args.scale_adv:  # (4.5), a second moment: the mean stays
        valid = 1 - window["last"][: args.seq_len]
        moment = (advantages[: args.seq_len].square() * valid).sum() / valid.sum().clamp(min=1)
        agent.moment.lerp_(torch.stack([moment, torch.ones_like(moment)]), 1 - args.scale_adv_decay)
        scale = (agent.moment[0] / agent.moment[1] + 1e-12).rsqrt()
    else:
        scale = 1.0
    baseline = value if args.baseline == "v" else expected_q
    policy = cmpo(prior, (q - baseline.unsqueeze(-1)) * scale, args)
    values = value[:-1] + ratio[:-1] * advantages if args.correct_value_target else returns
    return {"policy": policy, "prior": prior, "values": values, "advantages": advantages * scale}


def episode_masks(last, terminal):
    """Where an unroll from each root stands, from its rows' flags (K + 1, ...).

    real: the row is of the root's episode and the policy acted there. absorbed: the episode has come to a
    terminal state, from where nothing more is earned. passed: an earlier row ended the episode."""
    ended = (last.cumsum(0) > 0).float()
    passed = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
    return 1 - ended, ((ended - passed) * terminal).cumsum(0), passed


METRICS = ("policy_loss", "cmpo_loss", "model_loss", "value_loss", "reward_loss", "entropy", "kl_to_prior",
           "clipped_targets", "grad_norm")
LOGGED = (*METRICS, "greedy_return")


def mean(x, mask):
    """Mean of x where the mask is 1."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def muesli_loss(outputs, agent, window, targets):
    """Policy (9), model (13), value and reward loss of the online network's outputs (K + 1, L, B, ...).

    Returns the loss and all METRICS but grad_norm, which is not known here."""
    args, length = agent.args, agent.args.seq_len

    def unroll(x):  # rows (W, B, ...) to (K + 1, L, B, ...): [k, t] is the row of step k from root t
        return torch.stack([x[k : k + length] for k in range(args.unroll_steps + 1)])

    def head_loss(logits, x, mask):  # (4.5)
        return mean(-(two_hot(compress(x), agent.support) * logits.log_softmax(-1)).sum(-1), mask)

    logits, value_logits, reward_logits = outputs
    real, absorbed, passed = episode_masks(unroll(window["last"]), unroll(window["terminal"]))
    root = real[0]
    log_policy, action = logits.log_softmax(-1), window["actions"][:length].unsqueeze(-1)
    logprob = log_policy[0].gather(-1, action).squeeze(-1)
    ratio = logprob.exp() / window["behaviour"][:length].gather(-1, action).squeeze(-1)
    ratio = ratio.clamp(max=1)
    score = ratio.detach() * logprob if args.detach_ratio else ratio
    pg_loss = -mean(score * targets["advantages"][:length], root)  # (10)
    pull = -(unroll(targets["policy"]) * log_policy).sum(-1)  # KL, but for a constant
    cmpo_loss, model_loss = mean(pull[0], root), mean(pull[1:], real[1:])  # (9), (13)
    values = unroll(targets["values"]) * real
    value_loss = head_loss(value_logits, values, (real + absorbed) * root)
    rewards = unroll(window["rewards"])[:-1] * (1 - passed[1:])
    reward_loss = head_loss(reward_logits[1:], rewards, torch.maximum(1 - passed, absorbed)[1:] * root)
    loss = (args.pg_coef * pg_loss + args.cmpo_coef * cmpo_loss + args.model_coef * model_loss
            + args.value_coef * value_loss + args.reward_coef * reward_loss)
    policy, prior = log_policy[0].exp(), targets["prior"][:length]
    entropy = -mean((policy * log_policy[0]).sum(-1), root)
    kl = mean((torch.special.xlogy(prior, prior) - prior * log_policy[0]).sum(-1), root)
    goals = torch.cat([values, rewards])  # masked ones are 0
    clipped = ((goals < args.value_min) | (goals > args.value_max)).float().mean()
    metrics = (pg_loss, cmpo_loss, model_loss, value_loss, reward_loss, entropy, kl, clipped)
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


def adamw_step(opt, grad, learning_rate, args, betas=(0.9, 0.999)):
    """AdamW in place (Loshchilov and Hutter 2019), its normalised update clipped (appendix F.1)."""
    opt["exp_avg"].lerp_(grad, 1 - betas[0])
    opt["exp_avg_sq"].lerp_(grad.square(), 1 - betas[1])
    bias1, bias2 = opt["bias"].add_((1 - opt["bias"]) * (1 - grad.new_tensor(betas))).unbind()
    change = opt["exp_avg"] / bias1 / ((opt["exp_avg_sq"] / bias2).sqrt() + args.adam_eps)
    if args.clip_update:
        change = change.clamp(-args.clip_update, args.clip_update)
    opt["params"].sub_(learning_rate * (change + args.weight_decay * opt["params"]))


def train_step(agent, opt, window, learning_rate, metrics):
    """One step of the online network on a window, then the prior follows. In place; adds to `metrics`."""
    targets = make_targets(agent, window)
    length, k = agent.args.seq_len, agent.args.unroll_steps
    actions = torch.stack([window["actions"][i : i + length] for i in range(k)])

    def loss_of(params):
        views = parameter_views(agent.online, params)
        outputs = functional_call(agent.online, views, (window["obs"][:length], actions))
        return muesli_loss(outputs, agent, window, targets)

    grad, step_metrics = torch.func.grad(loss_of, has_aux=True)(opt["params"])
    adamw_step(opt, grad, learning_rate, agent.args)
    opt["prior"].lerp_(opt["params"], agent.args.target_rate)
    metrics.add_(torch.cat([step_metrics, torch.stack([grad.norm(), grad.new_ones(())])]))


# ---------------------------------------------------------------------------------------- rollout and update


class Replay:
    """The newest steps of all environments, rows (C, N, ...) of a ring in the order they were played."""

    def __init__(self, rows, num_envs, obs_dim, num_actions, device):
        def zeros(*shape, dtype=torch.float32):
            return torch.zeros(rows, num_envs, *shape, dtype=dtype, device=device)

        self.rows = {"obs": zeros(obs_dim), "actions": zeros(dtype=torch.long), "rewards": zeros(),
                     "behaviour": zeros(num_actions), "last": zeros(), "terminal": zeros()}
        self.count = 0

    @property
    def size(self):
        """Rows that hold something."""
        return min(self.count, len(self.rows["last"]))

    def add(self, **row):
        """Take in one row of all environments, (N, ...) each, over the oldest."""
        for name, x in row.items():
            self.rows[name][self.count % len(self.rows[name])] = torch.as_tensor(x)
        self.count += 1

    def sample(self, num_windows, num_newest, length):
        """Windows (W, B, ...) of consecutive rows; the first num_newest end with the newest row."""
        (capacity, num_envs), size = self.rows["last"].shape, self.size
        start = torch.randint(size - length + 1, (num_windows,))
        start[:num_newest] = size - length
        env = torch.randint(num_envs, (num_windows,))
        env[:num_newest] = torch.randperm(num_envs).repeat(num_newest // num_envs + 1)[:num_newest]
        index = (self.count - size + start + torch.arange(length).unsqueeze(1)) % capacity
        device = self.rows["last"].device
        index, env = index.to(device), env.to(device)
        return {name: x[index, env] for name, x in self.rows.items()}

    def cut(self, stream):
        """End the episodes that go on, as a time limit would: their last observation without an action."""
        uniform = 1 / self.rows["behaviour"].shape[-1]
        self.add(obs=stream.obs, actions=0, rewards=0, behaviour=uniform, last=1, terminal=stream.terminal)

    def state_dict(self):
        return {"count": self.count} | {name: x[: self.size].clone() for name, x in self.rows.items()}

    def load_state_dict(self, state):
        self.count = state["count"]
        for name, x in self.rows.items():
            x[: self.size] = state[name]


def reset_stream(envs, seeds):
    """Reset the environments: where they stand between one step, or one rollout, and the next."""
    obs, _ = envs.reset(seed=seeds)
    n = envs.num_envs
    return SimpleNamespace(obs=obs, last=np.zeros(n, bool), terminal=np.zeros(n, bool),
                           episode_return=np.zeros(n), episode_length=np.zeros(n, int))


@torch.no_grad()
def collect(envs, agent, replay, stream, at):
    """Play train_frequency steps with the prior's policy into the replay.

    An episode's last observation is a row of its own, without an action: there the environments ignore it and
    reset (NEXT_STEP). Returns the number of real steps, and (return, length) of finished episodes."""
    count, episodes = 0, []
    for _ in range(agent.args.train_frequency):
        policy = agent.policy(stream.obs)
        check_finite(at.iteration, policy=policy.cpu().numpy())
        action = policy.multinomial(1).squeeze(1)
        next_obs, reward, terminated, truncated, _ = envs.step(agent.to_env(action))
        check_finite(at.iteration, observations=next_obs, rewards=reward)
        replay.add(obs=stream.obs, actions=action, rewards=reward, behaviour=policy, last=stream.last,
                   terminal=stream.terminal)
        count += int((~stream.last).sum())
        stream.episode_return += reward
        stream.episode_length += ~stream.last
        stream.obs, stream.last, stream.terminal = next_obs, terminated | truncated, terminated
        for n in np.flatnonzero(stream.last):
            episodes.append((float(stream.episode_return[n]), int(stream.episode_length[n])))
            stream.episode_return[n], stream.episode_length[n] = 0, 0
    return count, episodes


# ------------------------------------------------------------------------------------ evaluation, checkpoint


def derive_seeds(*key, n):
    """`n` independent seeds from a key such as (seed, rank, iteration): no two streams share one."""
    return [int(seed) for seed in np.random.SeedSequence(key).generate_state(n)]


EVALUATION = 2**31  # takes the rank's place in the key of evaluation seeds


@torch.no_grad()
def evaluate(agent, greedy, video_dir=None, episodes=0, when=0):
    """Raw returns of one full episode in each of `episodes` (0: eval_episodes) environments, fresh ones for
    each `when`. Leaves the random generator as it was."""
    num_envs = episodes or agent.args.eval_episodes
    envs = make_envs(agent.args, num_envs, video_dir)
    seeds = derive_seeds(agent.args.seed, EVALUATION, when, n=num_envs + 1)
    generator = torch.Generator().manual_seed(seeds.pop())
    obs, _ = envs.reset(seed=seeds)
    returns, running = np.zeros(num_envs), np.ones(num_envs, bool)
    while running.any():
        policy = agent.policy(obs).cpu()
        action = policy.argmax(-1) if greedy else policy.multinomial(1, generator=generator).squeeze(1)
        obs, reward, terminated, truncated, _ = envs.step(agent.to_env(action))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return returns


def report_evaluation(agent, run_dir):
    """Evaluate deterministic, then sampled actions, and print both. Returns summary.json's numbers."""
    summary = {"eval_episodes": agent.args.eval_episodes}
    for greedy, name in ((True, "eval"), (False, "eval_sampled")):
        video_dir = str(run_dir / "videos") if agent.args.capture_video and greedy else None
        x = evaluate(agent, greedy, video_dir)
        summary |= {f"{name}_mean": float(x.mean()), f"{name}_std": float(x.std())}
        print(f"{'deterministic' if greedy else 'sampled'} actions, {len(x)} episodes: "
              f"return {x.mean():.1f} +- {x.std():.1f}, from {x.min():.1f} to {x.max():.1f}")
    return summary


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


def choose_run_dir(args):
    """The run's folder, which holds no other run."""
    env_name = args.env_id.replace("/", "_").replace(":", "_")
    name = f"{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or args.run_dir or f"runs/{name}")
    if not args.resume and (run_dir.is_file() or (run_dir / "checkpoint.pt").exists()):
        raise UsageError(f"--run-dir {run_dir} is a file or holds a run: --resume it or give another folder")
    return run_dir


def catch_signals(caught):
    """Append the first Ctrl-C or SIGTERM (a second one kills). Returns the handlers there were before."""

    def catch(signum, frame):
        caught.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    return {signum: signal.signal(signum, catch) for signum in (signal.SIGINT, signal.SIGTERM)}


def can_compile(args, device):
    """Whether --compile is given and there is a C++ compiler."""
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    tools = shutil.which(os.environ.get("CXX", "g++")) and headers
    return bool(args.compile and device.type != "mps" and tools)


def check_finite(iteration, **quantities):
    for name, value in quantities.items():
        if not np.isfinite(value).all():
            raise FloatingPointError(f"{name} not finite in iteration {iteration}; the checkpoint is kept")


def build(args, checkpoint, device):
    """Environments, agent, optimiser state and replay, new or as the checkpoint has them."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError(f"{SCRIPT}.py trains in one process: start it without torchrun")
    envs = make_envs(args, args.num_envs, autoreset=AutoresetMode.NEXT_STEP)
    if not isinstance(envs.single_action_space, gym.spaces.Discrete):
        raise UsageError(f"--env-id {args.env_id}: actions {envs.single_action_space} are not Discrete")
    torch.manual_seed(args.seed)
    obs_dim = envs.single_observation_space.shape[0]
    agent = Agent(obs_dim, envs.single_action_space, args).to(device)
    opt = flatten_parameters(agent.online)
    opt["prior"] = flatten_parameters(agent.prior)["params"].copy_(opt["params"])
    replay = Replay(args.replay_size // args.num_envs, args.num_envs, obs_dim, agent.num_actions, device)
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UsageError(f"the checkpoint is of an environment with other spaces: {reason}") from error
        for name, value in opt.items():
            value.copy_(checkpoint["opt"][name])
        replay.load_state_dict(checkpoint["replay"])
    return envs, agent, opt, replay


def restart(envs, agent, iteration):
    """Environments and noise from seeds of this iteration: a resume needs no simulator's state."""
    seeds = derive_seeds(agent.args.seed, 0, iteration, n=envs.num_envs + 1)
    torch.manual_seed(seeds.pop())
    return reset_stream(envs, seeds)


def print_header(args, envs, run_dir, device, compiled):
    print(f"{SCRIPT}.py  {args.env_id}, seed {args.seed}\n"
          f"  {envs.single_observation_space.shape[0]} observations, actions {envs.single_action_space}\n"
          f"  {device}, {args.torch_threads} thread(s), {'compiled' if compiled else 'not compiled'}\n"
          f"  every {args.train_frequency} steps of {args.num_envs} environments an update on "
          f"{args.batch_size} windows of {args.window} steps, {args.num_newest} of them the newest\n"
          f"  folder {run_dir}", flush=True)


def crossed(every, before, now):
    """Whether a multiple of `every` lies in (before, now]."""
    return every > 0 and before // every < now // every


def solved_at(evaluations, stop_return):
    """Steps of the first of two evaluations in a row, (steps, mean return) each, that reach it, or None."""
    for (steps, first), (_, second) in pairwise(evaluations):
        if stop_return is not None and min(first, second) >= stop_return:
            return steps
    return None


def log_interval(log, at, sums, learning_rate, clock, milestone):
    """Write a row with the means since the last one, which ended at `clock`. Returns the time of this one."""
    now, before = time.perf_counter(), at.rows[-1][0] if at.rows else 0
    at.seconds += now - clock
    numbers = dict(zip(METRICS, (sums[:-1] / sums[-1]).tolist(), strict=True))  # nan before learning starts
    if sums[-1]:
        check_finite(at.iteration, **numbers)
    column = log.COLUMNS.index("clipped_targets")
    if numbers["clipped_targets"] > 0 and not any(row[column] > 0 for row in at.rows):
        tqdm.write("targets beyond --value-min or --value-max are clipped: see metrics.csv")
    numbers |= {"learning_rate": learning_rate, "SPS": (at.global_step - before) / (now - clock),
                "greedy_return": at.evaluations[-1][1] if at.evaluations else float("nan")}
    log.log(at, numbers, milestone)
    sums.zero_()
    return now


def is_evaluated(args):
    """Whether the run to resume, if any, has its summary: a kill may come between its last step and that."""
    return not args.resume or Path(args.resume, "summary.json").exists()


def train(args, checkpoint=None):
    """Train from the start or on from a checkpoint, then evaluate. Returns what summary.json holds."""
    clock, device = time.perf_counter(), set_up_torch(args)
    at = SimpleNamespace(iteration=0, global_step=0, seconds=0.0, recent=[], rows=[], evaluations=[])
    if checkpoint:
        at = SimpleNamespace(**checkpoint["at"])
    solved = solved_at(at.evaluations, args.stop_return)
    solved_early = args.stop_early and solved is not None
    done = at.global_step >= args.total_timesteps or solved_early
    if done and is_evaluated(args):
        raise UsageError(f"the run has ended after {at.global_step} steps: give more --total-timesteps"
                         + (", and --no-stop-early, as it is solved" if solved_early else ""))
    iterations, run_dir = args.total_timesteps // (args.num_envs * args.train_frequency), choose_run_dir(args)
    save_every, signals, handlers = args.checkpoint_every or max(1, iterations // 20), [], {}
    envs, agent, opt, replay = build(args, checkpoint, device)
    learn, compiled = train_step, can_compile(args, device)
    if compiled:
        learn = torch.compile(learn, dynamic=False, options={"cpp_wrapper": device.type == "cpu"})
    log = RunLog(run_dir, args, at.rows)
    print_header(args, envs, run_dir, device, compiled)
    stream, sums = restart(envs, agent, at.iteration), torch.zeros(len(METRICS) + 1, device=device)
    while not done:
        before = at.global_step
        count, episodes = collect(envs, agent, replay, stream, at)
        at.iteration, at.global_step = at.iteration + 1, before + count
        at.recent = (at.recent + episodes)[-100:]
        remaining = max(0.0, 1 - at.global_step / args.total_timesteps) if args.anneal_lr else 1.0
        learning_rate = torch.tensor(args.learning_rate * remaining, device=device)
        if at.global_step >= args.learning_starts and replay.size >= args.window:
            window = replay.sample(args.batch_size, args.num_newest, args.window)
            learn(agent, opt, window, learning_rate, sums)
            handlers = handlers or catch_signals(signals)  # not before: a compiler would die of Ctrl-C, too
        if crossed(args.eval_every, before, at.global_step):
            returns = evaluate(agent, True, episodes=args.solve_episodes, when=at.global_step)
            at.evaluations.append((at.global_step, float(returns.mean())))
            tqdm.write(f"{at.global_step} steps: {len(returns)} greedy episodes return {returns.mean():.1f}")
            solved = solved_at(at.evaluations, args.stop_return)
        done = signals or at.global_step >= args.total_timesteps or (args.stop_early and solved is not None)
        save = done or at.iteration % save_every == 0
        if save or crossed(1000, before, at.global_step):
            clock = log_interval(log, at, sums, float(learning_rate), clock, save)
        if save:
            replay.cut(stream)
            save_checkpoint(run_dir, agent, at, opt=opt, replay=replay.state_dict())
            stream = restart(envs, agent, at.iteration)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    envs.close()
    return finish(agent, run_dir, at, log, solved)


def finish(agent, run_dir, at, log, solved):
    """Evaluate and write summary.json, or say how to go on with a run that was stopped."""
    args = agent.args
    if at.global_step < args.total_timesteps and not (args.stop_early and solved is not None):
        log.close()
        print(f"saved at {at.global_step} steps; to go on: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(130)
    speeds = [row[RunLog.COLUMNS.index("SPS")] for row in at.rows]
    summary = {"env_id": args.env_id, "seed": args.seed, "global_step": at.global_step, "seconds": at.seconds,
               "sps": float(np.median(speeds)), "solved_at": solved}
    log.bar.close()
    if solved is not None:
        print(f"solved at {solved} steps: two evaluations in a row of {args.solve_episodes} greedy episodes "
              f"return {args.stop_return} or more")
    summary |= report_evaluation(agent, run_dir)
    log.close(summary)
    print(f"  folder {run_dir}\n  again: python {sys.argv[0]} --evaluate {run_dir}")
    return summary


def evaluate_run(args, checkpoint):
    envs, agent, *_ = build(args, checkpoint, set_up_torch(args))
    envs.close()
    report_evaluation(agent, Path(args.evaluate))


# What may be given again with --resume and --evaluate.
FREE = {"resume", "evaluate", "total_timesteps", "stop_early", "eval_episodes", "device", "compile",
        "torch_threads", "track", "wandb_project_name", "wandb_entity", "capture_video"}


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
