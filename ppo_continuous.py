# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9,<2.14", "numpy>=1.26", "gymnasium[box2d,classic-control,mujoco]>=1.4",
#                 "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""Proximal Policy Optimization for vector observations (Schulman et al. 2017, arXiv 1707.06347).

    python ppo_continuous.py --env-id Humanoid-v5            train, then evaluate
    python ppo_continuous.py --resume runs/RUN               resume a killed run exactly
    python ppo_continuous.py --evaluate runs/RUN --capture-video

Shapes: T steps, N environments, O observation, F features, A action components; L steps per sequence
(1 without an RNN), S = T * N / L sequences, M per minibatch; RNN state (K, S, H), K = 1 GRU, 2 LSTM, 0 none.
Tags: [D1] to [D37], [X1] to [X4]: Huang et al. 2022, "The 37 Implementation Details of PPO".
"""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class UsageError(ValueError):
    """Invalid usage: printed as one line, exit status 2."""

@dataclass
class Args:
    # Run
    exp_name: str = "ppo_continuous"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder to evaluate instead of training
    eval_episodes: int = 10  # per evaluation: first deterministic, then sampled
    checkpoint_every: int = 0  # iterations; each resets the environments; 0: about 20 a run or fewer

    # Environment
    env_id: str = "HalfCheetah-v5"  # Gymnasium id, also module:Env-v0
    env_kwargs: str = "{}"  # its keyword arguments as JSON: '{"gravity": -5}'
    total_timesteps: int = 1_000_000  # steps over all environments and processes
    num_envs: int = 16  # environments per process [D1]
    num_steps: int = 64  # steps per environment in a rollout [D1]
    clip_actions: bool = True  # to their bounds, for the environment only [D27]
    scale_actions: bool = True  # -1 and 1 are the bounds; off: the environment's units
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
    recompute_adv: bool = True  # advantages anew every epoch (Andrychowicz et al. 2021)
    num_minibatches: int = 16  # per epoch, of whole sequences with an RNN [D6, D35]
    update_epochs: int = 10  # maximum epochs per rollout [D6]
    norm_adv: bool = True  # normalize the advantages of each minibatch [D7]
    clip_coef: float = 0.2  # clip range of the probability ratio [D8]
    anneal_clip: bool = False  # anneal clip_coef linearly to 0 [X1]
    clip_vloss: bool = False  # clip the change of the value to clip_coef * value_std [D9]
    ent_coef: float = 0.0  # entropy bonus; 0.01 helps discrete actions [D10]
    vf_coef: float = 0.5  # weight of the value loss, beside its factor 0.5 [D10]
    max_grad_norm: float = 0.5  # maximum global gradient norm; 0: off [D11]
    target_kl: float | None = 0.03  # stop after an epoch whose mean KL exceeds it [X3]
    norm_value: bool = True  # the critic learns returns over their running std
    share_network: bool = False  # one network for actor and critic, or one each [D13, D26]
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers [D26]
    activation: Literal["tanh", "relu"] = "tanh"  # of the hidden layers [D26]
    log_std_init: float = -1.0  # initial log std of the Gaussian [D24]
    log_std_drop: float = 1.3  # fall of log std over the second half, unless it is learned
    learn_std: bool = False  # learn the std, one for all states [D24]
    tanh_mean: bool = False  # squash the Gaussian's mean to (-1, 1), the scaled bounds
    mask_actions: bool = True  # apply info["action_mask"] where there is one [X4]
    rnn: Literal["none", "gru", "lstm"] = "none"  # layer before actor and critic
    rnn_hidden: int = 64  # its width; the state starts at zero [D33]
    rnn_reset: bool = True  # zero state at episode starts, or keep it [D34]
    rnn_seq_len: int = 0  # of a training sequence; 0: num_steps, 1: no BPTT [D35, D36]

    # Speed
    device: str = "cpu"  # auto, cpu (fastest for small networks), cuda, cuda:1, mps
    compile: bool = True  # compile acting and learning, but no RNN: faster, starts later
    torch_threads: int = 1  # per process; small networks get slower with more

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first deterministic evaluation episode

    @property
    def seq_len(self):
        return 1 if self.rnn == "none" else self.rnn_seq_len or self.num_steps

    def check(self):
        """Raise UsageError unless all numbers are in range and fit each other."""
        numbers = {int: int, tuple[int, ...]: int, float: int | float, float | None: int | float | None}
        for field in fields(self):
            value, kind = getattr(self, field.name), numbers.get(field.type)
            low, high = RANGES.get(field.name, (1 if kind is int and field.default else 0, 10**12))
            values = value if isinstance(value, tuple) else [value]
            if kind and not all(isinstance(x, kind) and (x is None or low <= x <= high) for x in values):
                raise UsageError(f"{field.name} = {value} is not in range: {low} to {high}")
        S, n = self.num_envs * self.num_steps // self.seq_len, self.num_minibatches
        if self.num_steps % self.seq_len or S % n or S * self.seq_len == n:
            raise UsageError(f"{n} minibatches (2+ steps) must divide {S} sequences, rnn_seq_len num_steps")

RANGES = {"gamma": (0, 1), "gae_lambda": (0, 1), "log_std_init": (-5, 2), "seed": (0, 2**32 - 1)}
LIVE_FLAGS = {"learning_rate", "clip_coef", "ent_coef", "vf_coef", "update_epochs", "target_kl"}
PRESETS = {
    "none": {},
    "Ant-v5": {"log_std_init": -1.5, "log_std_drop": 1.5},
    **{name: {"tanh_mean": True} for name in ("InvertedPendulum-v5", "InvertedDoublePendulum-v5")},
    "LunarLander-v3": {"ent_coef": 0.01}, "MountainCarContinuous-v0": {"log_std_init": 0.5},
    "Swimmer-v5": {"num_envs": 4, "num_steps": 1024, "learning_rate": 6e-4, "gamma": 0.9999,
                   "gae_lambda": 0.98, "target_kl": None, "learn_std": True, "log_std_init": 0.0,
                   "norm_value": False, "norm_reward": True},
    "historical": {"num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "target_kl": None,
                   "truncation_bootstrap": False, "recompute_adv": False, "norm_value": False,
                   "norm_reward": True, "clip_vloss": True, "learn_std": True, "log_std_init": 0.0,
                   "scale_actions": False, "gae_lambda": 0.95},  # of CleanRL and openai/baselines
}

class VectorEnv(SyncVectorEnv):
    """Copies what is used of infos: the rest costs MuJoCo 5 to 10 % of a step."""

    def _add_info(self, infos, info, i):
        kept = {x: np.hstack(info[x]) for x in ("action_mask", "final_obs") if info.get(x) is not None}
        return super()._add_info(infos, kept, i)

def make_envs(args, num_envs, video_dir=None):
    """Environments with flat observations; the first is recorded to `video_dir`."""
    def make_env(i):
        recorded = args.capture_video and i == 0
        render = {"render_mode": "rgb_array"} if recorded else {}
        env = gym.make(args.env_id, disable_env_checker=True, **json.loads(args.env_kwargs), **render)
        if recorded:  # better to fail now than after the training
            import moviepy  # noqa: F401
            env.reset(seed=0)
            assert env.render() is not None, "it renders nothing"
        if recorded and video_dir:
            env = gym.wrappers.RecordVideo(env, video_dir, lambda episode: episode == 0)
        is_vector = isinstance(env.observation_space, Box) and len(env.observation_space.shape) == 1
        return env if is_vector else gym.wrappers.FlattenObservation(env)

    try:
        if importlib.util.find_spec("mujoco"):  # its warnings once, not once per environment
            importlib.import_module("mujoco").set_mju_user_warning(warnings.warn)
        thunks = [lambda i=i: make_env(i) for i in range(num_envs)]
        envs = VectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
        assert isinstance(envs.single_observation_space, Box), "observations are not a vector"
    except Exception as error:
        raise UsageError(f"{args.env_id}: {type(error).__name__}: {error}") from error
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)

def reset_envs(envs, agent, *key):
    """Seed and reset everything by a key such as (seed, rank, iteration)."""
    *seeds, torch_seed = np.random.SeedSequence(key).generate_state(envs.num_envs + 1).tolist()
    torch.manual_seed(torch_seed)
    obs, infos = envs.reset(seed=seeds)
    N, starts = envs.num_envs, torch.ones(1, envs.num_envs, device=agent.device)
    rnn_state = starts.new_zeros(agent.num_states, N, agent.args.rnn_hidden)  # [D33]
    return SimpleNamespace(obs=obs, mask=get_mask(infos, envs, agent), starts=starts,
                           rnn_state=rnn_state, discounted_return=np.zeros(N))

def get_mask(infos, envs, agent):
    """Allowed choices (1, N, sum of choices): all where there is no mask [X4]."""
    mask = torch.ones(1, envs.num_envs, sum(agent.num_choices), dtype=torch.bool)
    for i in np.flatnonzero(agent.num_choices and agent.args.mask_actions and infos.get("_action_mask", 0)):
        if infos["action_mask"][i].shape != mask.shape[2:]:
            raise UsageError(f"action_mask needs {mask.shape[2]} entries: one per choice, two per bit")
        mask[0, i] = torch.from_numpy(infos["action_mask"][i].astype(bool))
    return mask.to(agent.device)

def read_action_space(space, args):
    """Number of choices per component [D37]; function from actions (N, A) to the env's."""
    num_choices, offset, scale = [], getattr(space, "start", 0), 1
    if isinstance(space, Discrete | MultiDiscrete):
        num_choices = np.ravel(space.n if isinstance(space, Discrete) else space.nvec).tolist()
    elif isinstance(space, MultiBinary):
        num_choices = [2] * int(np.prod(space.shape))
    elif isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        scaled = args.scale_actions & (np.abs([space.low, space.high]).max(0) < 1e30)
        low, high = np.where(scaled, space.low, -1), np.where(scaled, space.high, 1)
        offset, scale = (low + high) / 2, (high - low) / 2
    else:
        raise UsageError(f"actions {space} are not supported")
    def to_env(action):
        action = offset + scale * action.cpu().numpy().reshape(-1, *space.shape)
        if args.clip_actions and not num_choices:
            action = action.clip(space.low, space.high)  # [D27]
        return action.astype(space.dtype)
    return num_choices, to_env

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

def mlp(features, widths, args):
    """Hidden layers of these widths [D26]."""
    activation = nn.Tanh if args.activation == "tanh" else nn.ReLU
    layers = []
    for fan_in, fan_out in pairwise([features, *widths]):
        layers += [layer_init(nn.Linear(fan_in, fan_out), 2**0.5, args), activation()]
    return nn.Sequential(*layers)

class Agent(nn.Module):
    """Actor, critic and running statistics. Observations are (L, S, O), actions (L, S, A);
    `starts` (L, S) is 1 where an episode begins; `rnn_state` (K, S, H) is before the first step."""

    def __init__(self, envs, args, device):
        super().__init__()
        self.args, self.device, action_space = args, device, envs.single_action_space
        self.num_choices, self.to_env = read_action_space(action_space, args)
        features, = envs.single_observation_space.shape
        self.obs_rms = RunningMeanStd(features)
        self.reward_rms, self.value_rms = RunningMeanStd(), RunningMeanStd()
        self.value_std = nn.Buffer(torch.ones(()))  # the unit of the critic's output
        self.num_outputs = sum(self.num_choices) or int(np.prod(action_space.shape))
        log_std = torch.full((self.num_outputs,), args.log_std_init)
        self.log_std = nn.Parameter(log_std) if args.learn_std else nn.Buffer(log_std)  # [D24]
        self.num_states = {"none": 0, "gru": 1, "lstm": 2}[args.rnn]  # K
        if self.num_states:
            layer = nn.GRU if args.rnn == "gru" else nn.LSTM
            self.rnn = layer_init(layer(features, args.rnn_hidden), 1.0, args)
            self.rnn.flatten_parameters = lambda: None  # cuDNN's would move the weights; ignore its warning
            features = args.rnn_hidden
        shared, own = (args.hidden, ()) if args.share_network else ((), args.hidden)  # [D13, D26]
        self.trunk = mlp(features, shared, args)
        width, features = [features, *args.hidden][-1], [features, *shared][-1]
        self.actor = mlp(features, own, args)
        self.actor.append(layer_init(nn.Linear(width, self.num_outputs), 0.01, args))
        self.critic = mlp(features, own, args).append(layer_init(nn.Linear(width, 1), 1.0, args))
        self.to(device)

    def normalize(self, obs):
        """The environments' observations (..., O) as the networks' input."""
        if self.args.norm_obs:
            limit = self.args.clip_obs or torch.inf  # [D29]
            obs = ((obs.double() - self.obs_rms.mean) / self.obs_rms.std()).clamp(-limit, limit)  # [D28]
        return obs.float().to(self.device)

    def encode(self, obs, rnn_state, starts):
        """Features (L, S, F) of actor and critic, and the RNN state after the last step."""
        if not self.num_states:
            return self.trunk(obs), rnn_state
        # One RNN call per stretch of steps in which no sequence begins an episode.
        bounds = [0, *(starts[1:].any(1).nonzero().flatten() + 1).tolist(), len(obs)]
        outputs = []
        for begin, end in pairwise(bounds):
            rnn_state = rnn_state * (1 - starts[begin] * self.args.rnn_reset)[:, None]  # [D34]
            hidden = rnn_state.split(1) if self.args.rnn == "lstm" else rnn_state
            output, hidden = self.rnn(obs[begin:end], hidden)
            rnn_state = torch.cat(hidden) if self.args.rnn == "lstm" else hidden
            outputs.append(output)
        return self.trunk(torch.cat(outputs)), rnn_state

    def get_value(self, obs, rnn_state, starts):
        """Values in units of returns."""
        return self.critic(self.encode(obs, rnn_state, starts)[0]).squeeze(-1) * self.value_std

    def act(self, raw_obs, rnn_state, starts, mask, noise):
        """Normalized observations (1, N, O), and what forward returns for them."""
        obs = self.normalize(raw_obs)[None]
        return obs, *self(obs, rnn_state, starts, mask, None, noise)

    def forward(self, obs, rnn_state, starts, mask, action=None, noise=0.0):
        """Sample with this noise (0: the likeliest action), or evaluate given actions.
        Returns action, log-probability, entropy, value and the next RNN state."""
        features, rnn_state = self.encode(obs, rnn_state, starts)
        output = self.actor(features)
        value = self.critic(features).squeeze(-1) * self.value_std
        if self.num_choices:  # independent choices: their log-probabilities add up [D37]
            logits = torch.where(mask, output, -1e8)  # [X4]
            if action is None:
                noisy = (logits + noise).split(self.num_choices, -1)
                action = torch.stack([x.argmax(-1) for x in noisy], -1)
            logits = logits.split(self.num_choices, -1)
            parts = [Categorical(logits=x, validate_args=False) for x in logits]
            logprob = sum(p.log_prob(a) for p, a in zip(parts, action.unbind(-1), strict=True))
            return action, logprob, sum(p.entropy() for p in parts), value, rnn_state
        output = output.tanh() if self.args.tanh_mean else output
        # Clamped: where actions are clipped, nothing else stops log_std from growing [D23, D25].
        normal = Normal(output, self.log_std.clamp(-5, 2).exp(), validate_args=False)
        action = output + normal.stddev * noise if action is None else action
        return action, normal.log_prob(action).sum(-1), normal.entropy().sum(-1), value, rnn_state

def compute_gae(rewards, values, last_value, final_values, dones, gamma, gae_lambda):
    """Generalized advantages (T, N) (Schulman et al. 2016, equation 16) [D5]. `last_value` (1, N) is
    V after the rollout, `final_values` (T, N) V where an episode ended: 0, or V(s) at a time limit."""
    next_values = torch.where(dones.bool(), final_values, torch.cat([values[1:], last_value]))
    deltas = rewards + gamma * next_values - values
    decays = gamma * gae_lambda * (1 - dones)
    advantages, advantage = [], torch.zeros_like(last_value[0])
    for delta, decay in zip(reversed(deltas.unbind()), reversed(decays.unbind()), strict=True):
        advantage = torch.addcmul(delta, decay, advantage)  # delta + decay * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1])

BATCH = ("obs", "actions", "logprobs", "values", "starts", "mask", "advantages", "returns")
GUARDS = ("CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "SEQUENCE_LENGTH", "TENSOR_MATCH")  # torch.compile's
LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm")

def train_step(agent, opt, batch, rnn_states, index, coefs, losses):
    """One optimizer step on the sequences `index` (M,) of the batch (L, S, ...). All parameters are
    views of one vector: so gradient norm, Adam and all-reduce are one operation each."""
    args, mb = agent.args, {name: x[:, index] for name, x in batch.items()}
    learning_rate, clip_coef, ent_coef, vf_coef = coefs.unbind()  # tensors: floats would be compiled in
    weights = dict(agent.named_parameters())
    def loss_of(params):  # equation 9 of Schulman et al. 2017
        parts = params.split([p.numel() for p in weights.values()])
        views = {name: part.view(p.shape)  # view_as(p) would make p an input of the graph
                 for (name, p), part in zip(weights.items(), parts, strict=True)}
        inputs = mb["obs"], rnn_states[:, index], mb["starts"], mb["mask"], mb["actions"]
        _, newlogprob, entropy, newvalue, _ = torch.func.functional_call(agent, views, inputs)
        mb_advantages = mb["advantages"]
        if args.norm_adv:  # [D7]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
        logratio = newlogprob - mb["logprobs"]
        ratio = logratio.exp()
        clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        pg_loss = -torch.min(ratio * mb_advantages, clipped_ratio * mb_advantages).mean()  # [D8]
        v_loss = ((newvalue - mb["returns"]) / agent.value_std).square()
        if args.clip_vloss:  # [D9]
            change = ((newvalue - mb["values"]) / agent.value_std).clamp(-clip_coef, clip_coef)
            v_clipped = mb["values"] + change * agent.value_std
            v_loss = torch.max(v_loss, ((v_clipped - mb["returns"]) / agent.value_std).square())
        v_loss = 0.5 * v_loss.mean()
        entropy = entropy.mean()
        loss = pg_loss - ent_coef * entropy + vf_coef * v_loss  # [D10]
        approx_kl = (ratio - 1 - logratio).mean()  # k3 of joschu.net/blog/kl-approx.html
        clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
        debug = torch.stack([pg_loss, v_loss, entropy, -logratio.mean(), approx_kl, clipfrac])  # [D12]
        return loss, debug.detach()
    if args.rnn == "none":
        grad, debug = torch.func.grad(loss_of, has_aux=True)(opt["params"])
    else:  # torch.func is slow with recurrent layers and fails with cuDNN's
        with torch.enable_grad():
            params = opt["params"].detach().requires_grad_()
            loss, debug = loss_of(params)
        grad, = torch.autograd.grad(loss, params)
    if WORLD_SIZE > 1:  # unguarded, the call would split the compiled graph
        grad = mean_over_ranks(grad)
    norm = grad.norm()
    losses.add_(torch.cat([debug, norm[None]]))
    grad = grad * ((args.max_grad_norm or torch.inf) / (norm + 1e-6)).clamp(max=1)  # [D11]
    betas = (0.9, 0.999)  # Adam (Kingma and Ba 2015, algorithm 1) [D3]
    opt["exp_avg"].lerp_(grad, 1 - betas[0])
    opt["exp_avg_sq"].lerp_(grad.square(), 1 - betas[1])
    # 1 - beta^t as a moving average of ones: pow() would double the time of the loop.
    bias1, bias2 = opt["bias"].add_((1 - opt["bias"]) * (1 - grad.new_tensor(betas))).unbind()
    std = (opt["exp_avg_sq"] * (1 / bias2)).sqrt()  # a division per element would be slower
    opt["params"].sub_(learning_rate / bias1 * opt["exp_avg"] / (std + args.adam_eps))

@torch.no_grad()
def rollout(envs, agent, act, env_state, noise_scale=1.0):
    """Play T steps, by the likeliest actions if noise_scale is 0; advances `env_state`.
    Returns data (T, N, ...), what to bootstrap from, time limits (t, n), episodes (n, return, length)."""
    args, T, N = agent.args, agent.args.num_steps, envs.num_envs
    noise = torch.empty(T, 1, N, agent.num_outputs, device=agent.device)  # Gumbel or normal
    noise = noise_scale * (-noise.exponential_().log() if agent.num_choices else noise.normal_())
    steps, episodes, time_limits, final_obs, final_states = [], [], [], [], []
    rewards, dones = torch.zeros(2, T, N)
    for t in range(T):
        raw_obs, rnn_state = torch.from_numpy(env_state.obs), env_state.rnn_state
        starts, mask = env_state.starts, env_state.mask
        obs, action, logprob, _, value, next_state = act(raw_obs, rnn_state, starts, mask, noise[t])
        steps.append({"raw_obs": raw_obs[None], "obs": obs, "actions": action, "logprobs": logprob,
                      "values": value, "starts": starts, "mask": mask, "rnn_states": rnn_state[None]})
        env_state.obs, reward, terminated, truncated, infos = envs.step(agent.to_env(action[0]))
        done = terminated | truncated
        for n in np.flatnonzero(done):
            episodes.append((n.item(), *(infos["episode"][key][n].item() for key in ("r", "l"))))
            if args.truncation_bootstrap and not terminated[n]:
                time_limits.append((t, n))
                final_obs.append(infos["final_obs"][n])
                final_states.append(next_state[:, [n]])
        if args.norm_reward and agent.training:
            env_state.discounted_return = env_state.discounted_return * args.gamma + reward
            agent.reward_rms.update(torch.from_numpy(env_state.discounted_return))
            env_state.discounted_return *= ~done
            clip = args.clip_reward or np.inf
            reward = (reward / agent.reward_rms.std().item()).clip(-clip, clip)  # [D30, D31]
        rewards[t], dones[t] = torch.from_numpy(reward), torch.from_numpy(done)
        env_state.rnn_state, env_state.mask = next_state, get_mask(infos, envs, agent)
        env_state.starts = dones[t : t + 1].to(agent.device)
    data = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
    data |= {"rewards": rewards.to(agent.device), "dones": dones.to(agent.device)}
    last_obs = agent.normalize(torch.from_numpy(np.stack([*env_state.obs, *final_obs])))[None]
    last_starts = nn.functional.pad(env_state.starts, (0, len(final_obs)))
    last = last_obs, torch.cat([env_state.rnn_state, *final_states], 1), last_starts
    return data, last, time_limits, episodes

@torch.no_grad()
def train(args, checkpoint=None):
    """Train, from a checkpoint on if there is one, then evaluate. Returns the summary."""
    device = set_up_torch(args)
    envs = make_envs(args, args.num_envs)
    agent, opt = make_agent(envs, args, device, checkpoint)
    if args.evaluate is not None:
        return evaluate(agent, Path(args.evaluate), checkpoint["progress"]["global_step"])
    act, step = agent.act, train_step
    batch_size, L = args.num_envs * args.num_steps * WORLD_SIZE, args.seq_len
    progress = {"iteration": 0, "global_step": 0, "seconds": 0.0, "episodes": []}
    progress |= checkpoint["progress"] if checkpoint else {}
    num_iterations = progress["iteration"] + (args.total_timesteps - progress["global_step"]) // batch_size
    if num_iterations < max(1, progress["iteration"]):
        raise UsageError(f"total_timesteps = {args.total_timesteps} leaves no rollout of {batch_size} steps")
    limit = max(1_000, envs.unwrapped.envs[0].spec.max_episode_steps or 0)  # a checkpoint cuts episodes
    save_every = args.checkpoint_every or max(num_iterations // 20, -(-limit // args.num_steps))
    if args.compile and args.rnn == "none" and shutil.which("g++"):  # an RNN's graph changes
        print("compiling: the first iteration takes up to a minute")
        options = {"cpp_wrapper": device.type == "cpu",
                   "guard_filter_fn": lambda guards: [g.guard_type in GUARDS for g in guards]}  # for speed
        act, step = torch.compile(act, options=options), torch.compile(step, options=options)
    env_state = reset_envs(envs, agent, args.seed, RANK, progress["iteration"])
    log = RunLog(args, device, progress["global_step"]) if RANK == 0 else None
    if args.norm_obs and not checkpoint:  # first statistics; global_step leaves these steps out
        agent.obs_rms.update(rollout(envs, agent, act, env_state)[0]["raw_obs"])
    last_time = time.perf_counter()
    for iteration in range(progress["iteration"] + 1, num_iterations + 1):
        args = read_live(args, log, progress["global_step"])
        remaining = 1 - (iteration - 1) / num_iterations
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)  # [D4]
        clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1)  # [X1]
        coefs = torch.tensor([learning_rate, clip_coef, args.ent_coef, args.vf_coef], device=device)
        if not args.learn_std:  # explore first, then learn to act with little noise
            agent.log_std.fill_(args.log_std_init - args.log_std_drop * max(0, 1 - 2 * remaining))

        # Rollout
        data, last, time_limits, episodes = rollout(envs, agent, act, env_state)

        # Advantages and updates
        initial_states = data["rnn_states"][::L].transpose(0, 1).flatten(1, 2)  # (K, S, H) [D36]
        losses = torch.zeros(len(LOSSES), device=device)
        for epoch in range(args.update_epochs):
            if epoch == 0 or args.recompute_adv:
                values = data["values"] if epoch == 0 else agent.get_value(
                    data["obs"], data["rnn_states"][0], data["starts"])
                last_values = agent.get_value(*last)
                final_values = torch.zeros_like(values)  # (T, N), 0 in terminal states
                for (t, n), value in zip(time_limits, last_values[0, args.num_envs :], strict=True):
                    final_values[t, n] = value
                advantages = compute_gae(data["rewards"], values, last_values[:, : args.num_envs],
                                         final_values, data["dones"], args.gamma, args.gae_lambda)
                returns = advantages + values  # TD(lambda) [D5]
                if epoch == 0:
                    unexplained = advantages.var() / (returns.var() + 1e-8)
                if args.norm_value and epoch == 0:
                    agent.value_rms.update(returns.flatten())
                    data = data | {"values": values * agent.value_rms.std().float() / agent.value_std}  # [D9]
                    agent.value_std.copy_(agent.value_rms.std())
                batch = data | {"advantages": advantages, "returns": returns}
                batch = {name: batch[name].unflatten(0, (-1, L)).transpose(0, 1).flatten(1, 2)
                         for name in BATCH}  # (T, N, ...) to (L, S, ...) [D35]
            before = losses.clone()
            shuffled = torch.randperm(initial_states.shape[1], device=device)
            for index in shuffled.chunk(args.num_minibatches):  # [D6]
                step(agent, opt, batch, initial_states, index, coefs, losses)
            kl = mean_over_ranks(losses - before)[LOSSES.index("approx_kl")] / args.num_minibatches
            if args.target_kl is not None and kl > args.target_kl:  # [X3]
                break
        agent.obs_rms.update(data["raw_obs"])  # [D28]

        # Log and save
        seconds = time.perf_counter() - last_time
        last_time += seconds
        progress = {"iteration": iteration, "global_step": progress["global_step"] + batch_size,
                    "seconds": progress["seconds"] + seconds,
                    "episodes": (progress["episodes"] + episodes)[-100:]}
        losses = mean_over_ranks(losses) / ((epoch + 1) * args.num_minibatches)
        means = {"explained_variance": 1 - unexplained.item(), "epochs": epoch + 1,
                 **dict(zip(LOSSES, losses.tolist(), strict=True))}
        for name, x in {"observations": data["raw_obs"], "rewards": data["rewards"], **means}.items():
            if not torch.as_tensor(x).isfinite().all():
                raise FloatingPointError(f"{name} not finite in iteration {iteration}")
        if log:
            log.write(progress, {"learning_rate": learning_rate, "SPS": batch_size / seconds}, means)
        if iteration % save_every == 0 or iteration == num_iterations:
            if log:
                log.save(args=asdict(args), progress=progress, agent=agent.state_dict(), opt=opt)
            env_state = reset_envs(envs, agent, args.seed, RANK, iteration)
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit
    return log.finish(agent, progress) if log else None

# ------------- bookkeeping from here: nothing below is needed to understand the algorithm

def evaluate(agent, run_dir, global_step):
    """Play full raw episodes, one per environment: deterministic, then sampled actions."""
    agent.eval()  # freezes the statistics of rewards
    args, N, summary = agent.args, agent.args.eval_episodes, {}
    for name, kind, noise in (("eval", "deterministic", 0), ("eval_sampled", "sampled", 1)):
        envs = make_envs(args, N, None if noise else run_dir / "videos")
        env_state, returns = reset_envs(envs, agent, args.seed, 2**31), {}  # 2**31 is no rank
        limit = envs.unwrapped.envs[0].spec.max_episode_steps or 2**15
        print(f"{args.env_id} after {global_step:,} steps: {N} episodes up to {limit} steps, {kind} actions")
        for _ in tqdm(range(0, limit, args.num_steps), leave=False, disable=None):
            for n, episodic_return, _ in rollout(envs, agent, agent.act, env_state, noise)[-1]:
                returns.setdefault(n, episodic_return)  # of the first episode
            if len(returns) == N:
                break
        envs.close()
        x = np.array([returns.get(n, envs.episode_returns[n]) for n in range(N)])
        summary |= {"eval_episodes": N, f"{name}_mean": x.mean().item(), f"{name}_std": x.std().item()}
        print(f"  return {x.mean():.1f} +- {x.std():.1f}, from {x.min():.1f} to {x.max():.1f}")
    return summary

def make_agent(envs, args, device, checkpoint):
    """Agent, and Adam's state over one flat vector that all parameters are views of."""
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(envs, args, device)
    params = nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    opt = {"params": params, "exp_avg": 0 * params, "exp_avg_sq": 0 * params, "bias": params.new_zeros(2)}
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
            opt = {name: opt[name].copy_(x) for name, x in checkpoint["opt"].items()}
        except RuntimeError as error:
            raise UsageError(f"the checkpoint does not fit {args.env_id} with these flags") from error
    nn.utils.vector_to_parameters(opt["params"], agent.parameters())
    return agent, opt

def load_checkpoint(run_dir):
    """A run's checkpoint, plain tensors and numbers, and its flags."""
    try:
        checkpoint = torch.load(Path(run_dir, "checkpoint.pt"), "cpu", weights_only=True)
        return checkpoint, Args(**checkpoint["args"] | {"resume": None})
    except Exception as error:
        raise UsageError(f"'{run_dir}' holds no run of this script: {error}") from error

def read_live(args, log, global_step):
    """The flags as live.json changes them, which becomes live-{global_step}.json (read again on resume)."""
    shared = [args]
    paths = [log.run_dir / name for name in ("live.json", f"live-{global_step}.json") if log]
    if path := next(filter(Path.exists, paths), None):
        try:
            changes = json.loads(path.replace(paths[1]).read_text())
            shared = [replace(args, **{name: changes[name] for name in LIVE_FLAGS & changes.keys()})]
            shared[0].check()
        except (OSError, AttributeError, ValueError) as error:
            shared, changes = [args], f"nothing: {error}"
        tqdm.write(f"step {global_step}: {path.name} changes {changes}; only {sorted(LIVE_FLAGS)} can change")
    if WORLD_SIZE > 1:
        torch.distributed.broadcast_object_list(shared)
    return shared[0]

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
        if run_dir and (first.preset or first.run_dir or (args.resume and args.env_id != default.env_id)):
            raise UsageError("env_id, preset and run_dir of a run cannot change")
        train(args, checkpoint)
    except KeyboardInterrupt:
        sys.exit(130)
    except FloatingPointError as error:
        sys.exit(f"error: {error}; the last checkpoint, if any, is kept")
    except (UsageError, ImportError, OSError, torch._dynamo.exc.TorchDynamoException) as error:
        hint = " (--no-compile does without a compiler)" if isinstance(error, RuntimeError) else ""
        print(f"error: {(str(error) or repr(error)).splitlines()[0]}{hint}", file=sys.stderr)
        sys.exit(2)

if __name__ == "__main__":
    main()
