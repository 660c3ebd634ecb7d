# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "numpy>=1.26", "gymnasium[atari]>=1.4", "ale-py>=0.12",
#                 "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""Proximal Policy Optimization on pixels (Schulman et al. 2017, arXiv 1707.06347): ALE's single-player games.

    python ppo_atari.py --env-id Breakout                    train, then evaluate
    python ppo_atari.py --resume runs/RUN                    resume a killed run exactly
    python ppo_atari.py --evaluate runs/RUN --capture-video

Shapes: T steps, N games, images of height H, width W and C channels (stacked frames), A actions;
L steps per sequence (1 without an RNN), S = T * N / L sequences, M per minibatch, F features;
RNN state (K, S, R) of width R: K = 1 GRU, 2 LSTM, 0 none.
Tags: [D1] to [D37] are Huang et al. 2022, "The 37 Implementation Details of PPO", [X1] to [X4]
its auxiliary ones: clip annealing, data parallelism, early stopping, action masks.
"""

import difflib
import importlib
import io
import json
import os
import re
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
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class UsageError(ValueError):
    """Invalid usage: printed as one line, exit status 2."""

@dataclass
class Args:
    # Run
    exp_name: str = "ppo_atari"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder to evaluate instead of training
    eval_episodes: int = 10  # per evaluation: first deterministic, then sampled
    checkpoint_every: int = 0  # iterations; each resets the environments; 0: about 20 a run or fewer

    # Environment
    env_id: str = "Breakout"  # a game: Breakout, BreakoutNoFrameskip-v4, ALE/Breakout-v5
    total_timesteps: int = 10_000_000  # steps over all environments and processes
    num_envs: int = 8  # environments per process [D1]
    num_steps: int = 128  # steps per environment in a rollout [D1]
    noop_max: int = 30  # a game starts with a random number of no-ops below this [D14]
    frame_skip: int = 4  # frames per step; their rewards are summed [D15]
    max_pool: bool = True  # pixelwise maximum of the last two frames, as sprites flicker [D15]
    episodic_life: bool = True  # a lost life is terminal for learning; the game continues [D16]
    fire_reset: bool = True  # force FIRE at each life's start, if the game has it [D17]
    screen_size: int = 84  # height and width of the images in pixels [D18]
    grayscale: bool = True  # one channel per frame; off: three [D18]
    sign_rewards: bool = True  # learn from the sign of rewards; evaluation takes the score [D19]
    frame_stack: int = 4  # frames that the network sees; black ones before a game's first [D20]
    sticky_actions: float | None = None  # chance to repeat an action; default: that of env_id
    full_actions: bool = False  # all 18 actions; off: those that the game uses
    max_frames: int = 108_000  # time limit of a game; 108,000 is half an hour
    truncation_bootstrap: bool = True  # bootstrap at time limits; off: terminal (CleanRL)

    # Algorithm
    learning_rate: float = 2.5e-4  # of Adam; usable from 1e-5 to 3e-3
    anneal_lr: bool = True  # linearly to 0 [D4]
    adam_eps: float = 1e-5  # Adam's epsilon; PyTorch's default is 1e-8 [D3]
    ortho_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's [D2, D32]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # 0: one-step TD errors, 1: n-step returns (no GAE) [D5]
    recompute_adv: bool = False  # advantages anew every epoch (Andrychowicz et al. 2021)
    num_minibatches: int = 4  # per epoch, of whole sequences with an RNN [D6, D35]
    update_epochs: int = 4  # maximum epochs per rollout [D6]
    norm_adv: bool = True  # normalize the advantages of each minibatch [D7]
    clip_coef: float = 0.1  # clip range of the probability ratio [D8]
    anneal_clip: bool = False  # anneal clip_coef linearly to 0 [X1]
    clip_vloss: bool = True  # clip the change of the value to clip_coef * value_std [D9]
    ent_coef: float = 0.01  # entropy bonus; 0.01 helps discrete actions [D10]
    vf_coef: float = 0.5  # weight of the value loss, beside its factor 0.5 [D10]
    max_grad_norm: float = 0.5  # maximum global gradient norm; 0: off [D11]
    target_kl: float | None = None  # stop after an epoch whose mean KL exceeds it [X3]
    norm_value: bool = False  # the critic learns returns over their running std
    share_network: bool = True  # one network for actor and critic, or one each [D13, D21]
    scale_obs: bool = True  # pixels from 0 to 1, scaled on the device; off: to 255 [D22]
    rnn: Literal["none", "gru", "lstm"] = "none"  # layer before actor and critic
    rnn_hidden: int = 128  # its width; the state starts at zero [D33]
    rnn_reset: bool = True  # zero state at episode starts, or keep it [D34]
    rnn_seq_len: int = 0  # of a training sequence; 0: num_steps, 1: no BPTT [D35, D36]

    # Speed
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:1, mps
    compile: bool = True  # compile acting and learning, but no RNN: faster, starts later
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the CNN; auto: bf16 where fast
    torch_threads: int = torch.get_num_threads()  # per process; small networks get slower with more
    env_threads: int = 0  # of the emulator, per process; 0: one per core

    # Logging
    track: bool = False  # log to Weights & Biases, too
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    capture_video: bool = False  # record the first deterministic evaluation episode

    @property
    def seq_len(self):
        return 1 if self.rnn == "none" else self.rnn_seq_len or self.num_steps

    @property
    def sticky(self):
        """Probability that a frame repeats the last action: 0.25 for ALE/X-v5 and X-v0."""
        by_name = 0.25 if self.env_id.startswith("ALE/") or self.env_id.endswith("-v0") else 0.0
        return by_name if self.sticky_actions is None else self.sticky_actions

    def check(self):
        """Raise UsageError unless all numbers are in range and fit each other."""
        numbers = {int: int, float: int | float, float | None: int | float | None}
        for field in fields(self):
            value, kind = getattr(self, field.name), numbers.get(field.type)
            low, high = RANGES.get(field.name, (1 if kind is int and field.default else 0, 10**12))
            if kind and not (isinstance(value, kind) and (value is None or low <= value <= high)):
                raise UsageError(f"{field.name} = {value} is not in range: {low} to {high}")
        if self.rnn != "none" and not self.share_network:
            raise UsageError("an RNN needs share_network")
        S, n = self.num_envs * self.num_steps // self.seq_len, self.num_minibatches
        if self.num_steps % self.seq_len or S % n or S * self.seq_len == n:
            raise UsageError(f"{n} minibatches (2+ steps) must divide {S} sequences, rnn_seq_len num_steps")

RANGES = {"gamma": (0, 1), "gae_lambda": (0, 1), "seed": (0, 2**32 - 1), "num_envs": (1, 10_000),
          "eval_episodes": (1, 10_000), "noop_max": (0, 1000), "frame_skip": (1, 1000),
          "frame_stack": (1, 1000), "screen_size": (36, 1000), "max_frames": (1, 10**9),
          "sticky_actions": (0, 1)}
LIVE_FLAGS = {"learning_rate", "clip_coef", "ent_coef", "vf_coef", "update_epochs", "target_kl"}
PRESETS = {
    "none": {},
    "historical": {"truncation_bootstrap": False, "precision": "fp32"},  # of CleanRL, openai/baselines
    "lstm": {"rnn": "lstm", "frame_stack": 1, "truncation_bootstrap": False, "precision": "fp32"},
}

def make_envs(args, num_envs):
    """Games played in threads of C++. A lost life is `terminated` as well, and the game continues:
    ALE's own episodic_life starts a new game instead, so later lives would never be seen [D16]."""
    import ale_py  # here, so that a missing package is one sentence
    from ale_py.vector_env import AtariVectorEnv
    if args.capture_video:  # better to fail now than after the training
        import moviepy  # noqa: F401

    two_players = {"combat", "joust", "maze_craze", "warlords"}  # they abort the process
    games = {name.replace("_", ""): name for name in {*ale_py.roms.get_all_rom_ids()} - two_players}
    name = re.sub(r"^ALE/(\w+)-v5$|^(\w+?)(NoFrameskip|Deterministic)?-v[04]$", r"\1\2", args.env_id)
    name = name.replace("_", "").lower()
    if name not in games:
        close = [games[name] for name in difflib.get_close_matches(name, games, cutoff=0.5)]
        raise UsageError(f"{args.env_id} is no single-player game of ALE; close names: {close}")
    return AtariVectorEnv(
        games[name], num_envs, num_threads=min(args.env_threads, num_envs),
        autoreset_mode=AutoresetMode.SAME_STEP, max_num_frames_per_episode=args.max_frames,
        repeat_action_probability=args.sticky, full_action_space=args.full_actions,
        noop_max=max(1, args.noop_max), life_loss_info=args.episodic_life,  # [D14, D16]
        stack_num=args.frame_stack, frameskip=args.frame_skip, maxpool=args.max_pool,  # [D20, D15]
        img_height=args.screen_size, img_width=args.screen_size, grayscale=args.grayscale,  # [D18]
        reward_clipping=False, use_fire_reset=args.fire_reset)  # the score is logged; [D17]

def reset_envs(envs, agent, *key):
    """Seed and reset everything by a key such as (seed, rank, iteration)."""
    N, args, device = envs.num_envs, agent.args, agent.device
    *seeds, torch_seed = np.random.SeedSequence(key).generate_state(N + 1).tolist()
    torch.manual_seed(torch_seed)
    obs, infos = envs.reset(seed=np.array(seeds) % 2**31)
    return SimpleNamespace(
        obs=to_images(obs, device), mask=fire_mask(np.ones(N, bool), agent), lives=infos["lives"],
        first_frame=infos["frame_number"] - infos["episode_frame_number"],
        starts=torch.ones(1, N, device=device), totals=np.zeros((2, N)),  # score, length of each game
        rnn_state=torch.zeros(agent.num_states, N, args.rnn_hidden, device=device))  # [D33]

def to_images(obs, device):
    """Frames (N, C, H, W), in color (N, C / 3, H, W, 3), as bytes (1, N, H, W, C) on the device."""
    obs = torch.from_numpy(obs).to(device)  # first: a GPU transposes faster
    obs = obs.permute(0, 2, 3, 1) if obs.dim() == 4 else obs.permute(0, 2, 3, 1, 4).flatten(3)
    return obs.contiguous()[None]

def fire_mask(lost_life, agent):
    """Allowed actions (1, N, A): only FIRE at the start of a life (N,) [D17], masked as in [X4]: so
    nothing is learned from an action that the policy did not choose."""
    return torch.from_numpy(~lost_life[:, None] | agent.first_actions)[None].to(agent.device)

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

class Flatten(nn.Module):
    """(S, C, H, W) to (S, H * W * C): channels are last in memory, so nothing is copied."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)

def nature_cnn(channels, args):
    """The network of Mnih et al. 2015: images (S, C, H, W) to features (S, 512) [D21]."""
    size, layers = args.screen_size, []
    for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        conv = nn.Conv2d(channels, width, kernel, stride)
        layers += [layer_init(conv, 2**0.5, args), nn.ReLU()]
        channels, size = width, (size - kernel) // stride + 1
    dense = layer_init(nn.Linear(size * size * channels, 512), 2**0.5, args)
    return nn.Sequential(*layers, Flatten(), dense, nn.ReLU())

class Agent(nn.Module):
    """Actor, critic and statistics of returns. Observations are bytes (L, S, H, W, C), actions (L, S);
    `starts` (L, S) is 1 where an episode begins; `rnn_state` (K, S, R) is before the first step."""

    def __init__(self, envs, args, device):
        super().__init__()
        self.args, self.device = args, device
        self.num_outputs = int(envs.single_action_space.n)
        fire = np.array([action.name == "FIRE" for action in envs.ale.get_action_set()])
        self.first_actions = fire if args.fire_reset and fire.any() else np.ones_like(fire)
        self.value_rms = RunningMeanStd()
        self.value_std = nn.Buffer(torch.ones(()))  # the unit of the critic's output
        channels, count = args.frame_stack * (1 if args.grayscale else 3), 1 if args.share_network else 2
        self.trunks = nn.ModuleList([nature_cnn(channels, args) for _ in range(count)])  # [D13]
        self.num_states = {"none": 0, "gru": 1, "lstm": 2}[args.rnn]  # K
        if self.num_states:
            layer = nn.GRU if args.rnn == "gru" else nn.LSTM
            self.rnn = layer_init(layer(512, args.rnn_hidden), 1.0, args)
            self.rnn.flatten_parameters = lambda: None  # cuDNN's would move the weights; ignore its warning
        features = args.rnn_hidden if self.num_states else 512
        self.actor = layer_init(nn.Linear(features, self.num_outputs), 0.01, args)
        self.critic = layer_init(nn.Linear(features, 1), 1.0, args)
        self.to(device)

    def encode(self, obs, rnn_state, starts):
        """Features (L, S, F) of actor and critic, and the RNN state after the last step."""
        bf16 = self.args.precision == "bf16"
        images = obs.flatten(0, 1).permute(0, 3, 1, 2)  # channels last in memory: fast convolutions
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=bf16):
            images = images.to(torch.bfloat16 if bf16 else torch.float32)
            if self.args.scale_obs:
                images = images / 255  # [D22]
            features = [trunk(images).float().unflatten(0, obs.shape[:2]) for trunk in self.trunks]
        if not self.num_states:
            return features[0], features[-1], rnn_state
        # One RNN call per stretch of steps in which no sequence begins an episode.
        bounds = [0, *(starts[1:].any(1).nonzero().flatten() + 1).tolist(), len(obs)]
        outputs = []
        for begin, end in pairwise(bounds):
            rnn_state = rnn_state * (1 - starts[begin] * self.args.rnn_reset)[:, None]  # [D34]
            hidden = rnn_state.split(1) if self.args.rnn == "lstm" else rnn_state
            output, hidden = self.rnn(features[0][begin:end], hidden)
            rnn_state = torch.cat(hidden) if self.args.rnn == "lstm" else hidden
            outputs.append(output)
        features = torch.cat(outputs)
        return features, features, rnn_state

    def get_value(self, obs, rnn_state, starts):
        """Values in units of returns."""
        return self.critic(self.encode(obs, rnn_state, starts)[1]).squeeze(-1) * self.value_std

    def forward(self, obs, rnn_state, starts, mask, action=None, noise=0.0):
        """Sample with this noise (0: the likeliest action), or evaluate given actions.
        Returns action, log-probability, entropy, value and the next RNN state."""
        actor_features, critic_features, rnn_state = self.encode(obs, rnn_state, starts)
        logits = torch.where(mask, self.actor(actor_features), -1e8)  # [X4]
        value = self.critic(critic_features).squeeze(-1) * self.value_std
        if action is None:
            action = (logits + noise).argmax(-1)
        policy = Categorical(logits=logits, validate_args=False)
        return action, policy.log_prob(action), policy.entropy(), value, rnn_state

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
    Returns data (T, N, ...), and (environment, score, length) of finished games."""
    args, T, N = agent.args, agent.args.num_steps, envs.num_envs
    noise = torch.empty(T, 1, N, agent.num_outputs, device=agent.device)
    noise = -noise.exponential_().log() * noise_scale  # Gumbel; all at once is faster
    steps, episodes = [], []
    rewards, dones, final_values = torch.zeros(3, T, N)
    for t in range(T):
        obs, rnn_state = env_state.obs, env_state.rnn_state
        starts, mask = env_state.starts, env_state.mask
        outputs = act(obs, rnn_state, starts, mask, None, noise[t])
        action, logprob, _, value, next_state = (x.clone() for x in outputs)  # CUDA graphs reuse their memory
        steps.append({"obs": obs, "actions": action, "logprobs": logprob, "values": value,
                      "starts": starts, "mask": mask, "rnn_states": rnn_state[None]})
        next_obs, reward, terminated, truncated, infos = envs.step(action[0].cpu().numpy())
        done = terminated | truncated  # terminated: game over, or a lost life [D16]
        for n in np.flatnonzero(truncated & ~terminated & args.truncation_bootstrap):
            final_obs = to_images(infos["final_obs"][[n]], agent.device)  # ALE drops the last frame
            final_values[t, n] = agent.get_value(final_obs, next_state[:, [n]], 0 * starts[:, [n]])
        # Games restart in the same step: a new one has another first frame.
        first_frame = infos["frame_number"] - infos["episode_frame_number"]
        game_over = first_frame != env_state.first_frame
        env_state.totals += [reward, np.ones(N)]
        episodes += [(n, *env_state.totals[:, n].tolist()) for n in np.flatnonzero(game_over).tolist()]
        env_state.totals *= ~game_over
        rewards[t] = torch.from_numpy(np.sign(reward) if args.sign_rewards else reward)  # [D19]
        dones[t] = torch.from_numpy(done)
        lost_life = (infos["lives"] < env_state.lives) | game_over
        env_state.obs, env_state.mask = to_images(next_obs, agent.device), fire_mask(lost_life, agent)
        env_state.lives, env_state.first_frame = infos["lives"], first_frame
        env_state.rnn_state, env_state.starts = next_state, dones[t : t + 1].to(agent.device)
    data = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
    outcome = {"rewards": rewards, "dones": dones, "final_values": final_values}
    return data | {name: x.to(agent.device) for name, x in outcome.items()}, episodes

@torch.no_grad()
def train(args, checkpoint=None):
    """Train, from a checkpoint on if there is one, then evaluate. Returns the summary."""
    device = set_up_torch(args)
    args.precision = choose_precision(args, device)  # a resume elsewhere must not change it
    envs = make_envs(args, args.num_envs)
    agent, opt = make_agent(envs, args, device, checkpoint)
    if args.evaluate is not None:
        return evaluate(agent, Path(args.evaluate), checkpoint["progress"]["global_step"])
    act, step = agent, train_step
    batch_size, L = args.num_envs * args.num_steps * WORLD_SIZE, args.seq_len
    progress = {"iteration": 0, "global_step": 0, "seconds": 0.0, "episodes": []}
    progress |= checkpoint["progress"] if checkpoint else {}
    num_iterations = progress["iteration"] + (args.total_timesteps - progress["global_step"]) // batch_size
    if num_iterations < max(1, progress["iteration"]):
        raise UsageError(f"total_timesteps = {args.total_timesteps} leaves no rollout of {batch_size} steps")
    losses = torch.zeros(len(LOSSES), device=device)  # sums over an iteration
    # A checkpoint resets the environments: more of them would cut most games.
    save_every = args.checkpoint_every or max(1, num_iterations // 20, 10_000 // args.num_steps)
    if args.compile and args.rnn == "none" and shutil.which("g++"):  # an RNN's graph changes
        print("compiling: the first iteration takes up to a minute")
        warnings.filterwarnings("ignore", module="torch._inductor")  # advice on other precisions
        for x in (losses, *opt.values()):
            torch._dynamo.mark_static_address(x)  # or CUDA graphs could not write to it
        options = {"cpp_wrapper": device.type == "cpu", "triton.cudagraphs": device.type == "cuda",
                   "guard_filter_fn": lambda guards: [g.guard_type in GUARDS for g in guards]}  # for speed
        act, step = torch.compile(act, options=options), torch.compile(step, options=options)
    env_state = reset_envs(envs, agent, args.seed, RANK, progress["iteration"])
    where = f"{device}, {args.precision}, sticky actions {args.sticky}"
    log = RunLog(args, where, progress["global_step"]) if RANK == 0 else None
    last_time = time.perf_counter()
    for iteration in range(progress["iteration"] + 1, num_iterations + 1):
        args = read_live(args, log, progress["global_step"])
        remaining = 1 - (iteration - 1) / num_iterations
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)  # [D4]
        clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1)  # [X1]
        coefs = torch.tensor([learning_rate, clip_coef, args.ent_coef, args.vf_coef], device=device)

        # Rollout
        data, episodes = rollout(envs, agent, act, env_state)

        # Advantages and updates
        initial_states = data["rnn_states"][::L].transpose(0, 1).flatten(1, 2)  # (K, S, R) [D36]
        losses.zero_()
        for epoch in range(args.update_epochs):
            if epoch == 0 or args.recompute_adv:
                values = data["values"] if epoch == 0 else agent.get_value(
                    data["obs"], data["rnn_states"][0], data["starts"])
                last_value = agent.get_value(env_state.obs, env_state.rnn_state, env_state.starts)
                # Values at time limits stay the rollout's: few games are cut.
                advantages = compute_gae(data["rewards"], values, last_value, data["final_values"],
                                         data["dones"], args.gamma, args.gae_lambda)
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

        # Log and save
        seconds = time.perf_counter() - last_time
        last_time += seconds
        progress = {"iteration": iteration, "global_step": progress["global_step"] + batch_size,
                    "seconds": progress["seconds"] + seconds,
                    "episodes": (progress["episodes"] + episodes)[-100:]}
        mean_losses = mean_over_ranks(losses) / ((epoch + 1) * args.num_minibatches)
        means = {"explained_variance": 1 - unexplained.item(), "epochs": epoch + 1,
                 **dict(zip(LOSSES, mean_losses.tolist(), strict=True))}
        for name, x in means.items():
            if not np.isfinite(x):
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
    """Play full games, one per environment, with deterministic, then with sampled actions.
    Raw scores, own seeds. Returns the numbers for summary.json."""
    args, N = agent.args, agent.args.eval_episodes
    summary = {"eval_episodes": N}
    for name, kind, noise in (("eval", "deterministic", 0), ("eval_sampled", "sampled", 1)):
        print(f"{args.env_id} after {global_step:,} steps: {N} games of at most {args.max_frames:,} frames, "
              f"{kind} actions")
        envs, key, games, actions = make_envs(args, N), (args.seed, 2**31), {}, []  # 2**31 is no rank
        env_state = reset_envs(envs, agent, *key)
        max_steps = -(-args.max_frames // args.frame_skip)
        for _ in tqdm(range(0, max_steps, args.num_steps), leave=False, disable=None):
            data, episodes = rollout(envs, agent, agent, env_state, noise)
            actions += data["actions"][:, 0].tolist()  # of the first environment
            for n, *game in episodes:
                games.setdefault(n, game)  # the first of each environment
            if len(games) == N:
                break
        envs.close()
        x = np.array([games[n][0] for n in range(N)])
        summary |= {f"{name}_mean": x.mean().item(), f"{name}_std": x.std().item()}
        print(f"  return {x.mean():.1f} +- {x.std():.1f}, from {x.min():.1f} to {x.max():.1f}")
        if args.capture_video and not noise:
            record(agent, key, actions[: int(games[0][1]) - 1], run_dir / "videos" / "episode-0.mp4")
    return summary

def record(agent, key, actions, path):
    """Play a game again, larger and in color, but for its last action, which begins the next."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter
    envs = make_envs(replace(agent.args, grayscale=False, frame_stack=1, screen_size=420), 1)
    reset_envs(envs, agent, *key)
    path.parent.mkdir(exist_ok=True)
    with FFMPEG_VideoWriter(str(path), (420, 420), 60 / agent.args.frame_skip) as video:
        for action in actions:
            video.write_frame(envs.step(np.array([action]))[0][0, 0])
    envs.close()

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

def choose_precision(args, device):
    """auto becomes bf16 where the processor has units for it, else fp32."""
    fast = False
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)  # older ones emulate it
    elif device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        able = torch.cpu.get_capabilities()
        fast = able.get("amx_bf16") or able.get("avx512_bf16")
    return args.precision if args.precision != "auto" else "bf16" if fast else "fp32"

def main():
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
