# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.13,<2.14", "gymnasium[atari]>=1.4", "ale-py>=0.12", "numpy>=1.26",
#                 "tyro>=1.0", "tensorboard>=2.18", "tqdm>=4.66"]
# ///
"""Proximal Policy Optimization on pixels (Schulman et al. 2017, arXiv 1707.06347): Atari games.

    python ppo_atari.py --env-id Breakout                    train, then evaluate
    python ppo_atari.py --resume runs/RUN                    resume a killed run exactly
    python ppo_atari.py --evaluate runs/RUN --capture-video

Shapes: T steps, N games, images of C channels (stacked frames), A actions; a minibatch has
S sequences of L steps (1 without an RNN). RNN state (K, S, H): K = 1 GRU, 2 LSTM, 0 none.
Tags: [D1] to [D37], [X1] to [X4]: Huang et al. 2022, "The 37 Implementation Details of PPO".
"""

import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector.utils import batch_space
from torch import nn
from torch.distributions import Categorical, Distribution
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
Distribution.set_default_validate_args(False)  # the checks cost time, and break compiled graphs
gym.register_envs(ale_py)


class UsageError(ValueError):
    """Invalid usage: printed as one sentence, exit status 2."""


@dataclass
class Args:
    # Run
    exp_name: str = "ppo_atari"  # part of the run folder's name
    seed: int = 1  # same seed, same run (bit-identical on a CPU)
    torch_deterministic: bool = True  # deterministic kernels only (slower on a GPU)
    preset: str | None = None  # set of flags in PRESETS; default: that of env_id or none
    run_dir: str | None = None  # default: runs/{env_id}__{exp_name}__{seed}__{unix_time}
    resume: str | None = None  # run folder to resume; flags given again override its own
    evaluate: str | None = None  # run folder or checkpoint to evaluate instead of training
    eval_episodes: int = 10  # per evaluation: first deterministic, then sampled
    checkpoint_every: int = 0  # iterations between checkpoints; 0: a twentieth of the run

    # Environment
    env_id: str = "Breakout"  # or BreakoutNoFrameskip-v4; ALE/Breakout-v5 has sticky actions
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
    max_frames: int = 108_000  # time limit of a game; 108,000 is half an hour
    truncation_bootstrap: bool = True  # bootstrap at time limits; off: terminal (CleanRL)

    # Algorithm
    learning_rate: float = 2.5e-4  # of Adam; usable from 1e-5 to 3e-3
    anneal_lr: bool = True  # linearly to 0 [D4]
    adam_eps: float = 1e-5  # Adam's epsilon; PyTorch's default is 1e-8 [D3]
    ortho_init: bool = True  # orthogonal weights, zero biases; off: PyTorch's [D2, D32]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # 0: one-step TD errors, 1: n-step returns (no GAE) [D5]
    num_minibatches: int = 4  # per epoch, of whole sequences with an RNN [D6, D35]
    update_epochs: int = 4  # maximum epochs per rollout [D6]
    norm_adv: bool = True  # normalize the advantages of each minibatch, in each process [D7]
    clip_coef: float = 0.1  # clip range of the probability ratio [D8]
    anneal_clip: bool = False  # anneal clip_coef linearly to 0 [X1]
    clip_vloss: bool = True  # clip the change of the value to clip_coef [D9]
    ent_coef: float = 0.01  # entropy bonus; 0.01 helps discrete actions [D10]
    vf_coef: float = 0.5  # weight of the value loss, which is half the squared error [D10]
    max_grad_norm: float = 0.5  # maximum global gradient norm; 0: off [D11]
    target_kl: float | None = None  # stop after an epoch whose mean KL exceeds it [X3]

    # Network
    share_network: bool = True  # one network for actor and critic, or one each [D13, D21]
    scale_obs: bool = True  # pixels from 0 to 1, scaled on the device; off: to 255 [D22]
    rnn: Literal["none", "gru", "lstm"] = "none"  # recurrent layer before actor and critic
    rnn_hidden: int = 128  # its width; the state starts at zero [D33]
    rnn_reset: bool = True  # zero the state where an episode starts; off: keep it [D34]
    rnn_seq_len: int = 0  # steps of a training sequence; 0: num_steps, 1: no BPTT [D35, D36]

    # Speed
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:1
    compile: bool = True  # torch.compile, but not with an RNN: faster, starts later
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the CNN; auto: bf16 where fast
    torch_threads: int = torch.get_num_threads()  # per process; small networks get slower with more
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
        if self.rnn != "none" and not self.share_network:
            raise UsageError("rnn needs share_network")
        for flag in ("rnn_hidden", "rnn_seq_len", "rnn_reset"):
            if self.rnn == "none" and getattr(self, flag) != getattr(Args, flag):
                raise UsageError(f"{flag} needs rnn")


RANGES = {  # lowest and highest values; other floats are at least 0, other ints at least 1
    "seed": (0, 2**32 - 1), "checkpoint_every": (0, 10**12), "rnn_seq_len": (0, 10**12),
    "torch_threads": (1, 1024), "env_threads": (0, 1024), "learning_rate": (1e-12, 100),
    "gamma": (0, 1), "gae_lambda": (0, 1), "noop_max": (0, 1000), "frame_skip": (1, 1000),
    "frame_stack": (1, 1000), "screen_size": (36, 1000), "max_frames": (1, 10**9),
}  # fmt: skip
LIVE_FLAGS = {
    "learning_rate": float, "clip_coef": float, "ent_coef": float, "vf_coef": float,
    "update_epochs": int, "target_kl": float,
}  # fmt: skip
PRESETS = {
    "none": {},
    "historical": {"truncation_bootstrap": False, "precision": "fp32"},  # CleanRL, openai/baselines
    "lstm": {
        "rnn": "lstm", "frame_stack": 1, "truncation_bootstrap": False, "precision": "fp32",
    },
}  # fmt: skip


class Games(gym.vector.VectorWrapper):
    """ALE's games, as the agent sees them.

    A lost life is `terminated`, and the game continues [D16]: ALE's own `episodic_life` starts a
    new game, so that later lives would never be seen. Infos hold the score and the length of a
    game that is over, as RecordEpisodeStatistics does, and `action_mask` (N, A): only FIRE at the
    start of a life [D17], so that nothing is learned from what the policy did not choose [X4]."""

    def __init__(self, envs, args, video_dir):
        super().__init__(envs)
        self.args, self.video_dir, self.actions = args, video_dir, []
        fire = np.array([action.name == "FIRE" for action in envs.unwrapped.ale.get_action_set()])
        self.first_actions = fire if args.fire_reset and fire.any() else np.ones_like(fire)
        image = self.to_images(envs.single_observation_space.low[None])[0]
        self.single_observation_space = gym.spaces.Box(0, 255, image.shape, np.uint8)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, seed=None, options=None):
        self.seed = None if seed is None else np.array(seed) % 2**31
        obs, infos = self.env.reset(seed=self.seed)
        self.lives, self.first_frame = infos["lives"], self.find_first_frame(infos)
        self.episode_returns, self.episode_lengths = np.zeros((2, self.num_envs))
        return self.to_images(obs), self.make_infos(np.ones(self.num_envs, bool))

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        first_frame = self.find_first_frame(infos)
        game_over = first_frame != self.first_frame  # ALE has begun another game
        life_begins = (infos["lives"] < self.lives) | game_over
        self.lives, self.first_frame = infos["lives"], first_frame
        self.episode_returns += reward
        self.episode_lengths += 1
        own_infos = self.make_infos(life_begins)
        own_infos["_episode"] = game_over
        own_infos["episode"] = {"r": self.episode_returns.copy(), "l": self.episode_lengths.copy()}
        if truncated.any():  # ALE drops the last frame: this is the picture before it
            own_infos["final_obs"] = self.to_images(infos["final_obs"])
        if self.video_dir:
            self.actions.append(actions[:1])
            if game_over[0]:
                self.record()
        self.episode_returns[game_over] = self.episode_lengths[game_over] = 0
        return self.to_images(obs), reward, terminated, truncated, own_infos

    def find_first_frame(self, infos):
        return infos["frame_number"] - infos["episode_frame_number"]

    def make_infos(self, life_begins):
        return {"action_mask": ~life_begins[:, None] | self.first_actions}

    def to_images(self, obs):
        """Bytes (N, H, W, C): the frames, or their colors, become the channels of an image."""
        obs = np.moveaxis(obs, 1, 3)
        return obs.reshape(*obs.shape[:3], -1)

    def record(self):
        """Record a replay of the first game, larger and in color, without its last step."""
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        path = Path(self.video_dir, "episode-0.mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        args = replace(self.args, grayscale=False, frame_stack=1, screen_size=420)
        envs = make_envs(args, 1)
        envs.reset(self.seed[:1])
        with FFMPEG_VideoWriter(str(path), (420, 420), 60 / args.frame_skip) as video:
            for action in self.actions[:-1]:
                video.write_frame(envs.step(action)[0][0])
        envs.close()
        self.video_dir = None


def make_envs(args, num_envs, video_dir=None):
    """Games that restart in the step that ends them; the first may be recorded to `video_dir`."""
    name = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v[45]$", "", args.env_id)
    sticky = 0.25 if args.env_id.startswith("ALE/") else 0.0  # chance to repeat an action
    try:
        envs = gym.make_vec(
            f"ALE/{name}-v5",
            num_envs,
            "vector_entry_point",
            num_threads=min(args.env_threads, num_envs),
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
            life_loss_info=args.episodic_life,  # [D16]
            noop_max=max(1, args.noop_max),  # [D14]
            frameskip=args.frame_skip,
            maxpool=args.max_pool,  # [D15]
            use_fire_reset=args.fire_reset,
            img_height=args.screen_size,
            img_width=args.screen_size,
            grayscale=args.grayscale,  # [D18]
            reward_clipping=False,  # the score is logged
            stack_num=args.frame_stack,  # [D20]
            repeat_action_probability=sticky,
            max_num_frames_per_episode=args.max_frames,
        )
    except (gym.error.Error, ModuleNotFoundError, ValueError) as error:  # module:Env-v0, too
        raise UsageError(f"{args.env_id}: {error}") from error
    return Games(envs, args, video_dir)


def time_limit(envs):
    """Limit of a game in steps."""
    return -(-envs.args.max_frames // envs.args.frame_skip)


def reset(envs, *key):
    """Seed and reset everything by a key such as (seed, rank, iteration)."""
    *seeds, seed = np.random.SeedSequence(key).generate_state(envs.num_envs + 1).tolist()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return envs.reset(seed=seeds)


@torch.compiler.disable
def mean_over_ranks(x):
    """Mean of a tensor over the processes of torchrun, in place [X2]."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
        x /= WORLD_SIZE
    return x


def layer_init(layer, gain, args):
    """Orthogonal weights and zero biases [D2], also of recurrent layers [D32]."""
    if args.ortho_init:
        for name, parameter in layer.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter, gain)
            else:
                nn.init.zeros_(parameter)
    return layer


class NatureCNN(nn.Sequential):
    """The network of Mnih et al. 2015: images (batch, C, H, W) to features (batch, 512) [D21]."""

    def __init__(self, channels, args):
        size, layers = args.screen_size, []
        for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv2d(channels, width, kernel, stride)
            layers += [layer_init(conv, 2**0.5, args), nn.ReLU()]
            channels, size = width, (size - kernel) // stride + 1
        dense = layer_init(nn.Linear(channels * size * size, 512), 2**0.5, args)
        super().__init__(*layers, nn.Flatten(), dense, nn.ReLU())
        self.bf16 = args.precision == "bf16"

    def forward(self, images):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return super().forward(images).float()


class Agent(nn.Module):
    """Actor and critic. It takes images of bytes (batch, H, W, C).

    A batch holds S sequences of equal length, flattened: their first steps, their second, ...
    `rnn_state` (K, S, H) precedes the first step; `done` (batch,) is 1 where an episode begins;
    `mask` (batch, A) has the allowed actions."""

    def __init__(self, envs, args):
        super().__init__()
        self.args = args
        channels = envs.single_observation_space.shape[2]
        num_actions, width = int(envs.single_action_space.n), 512
        self.num_states = {"none": 0, "gru": 1, "lstm": 2}[args.rnn]  # K

        self.shared = nn.Sequential()
        if args.share_network:  # [D13]
            self.shared.append(NatureCNN(channels, args))
        if self.num_states:
            layer = nn.GRU if args.rnn == "gru" else nn.LSTM
            self.rnn = layer_init(layer(width, args.rnn_hidden), 1.0, args)
            width = args.rnn_hidden
        self.actor = nn.Sequential(layer_init(nn.Linear(width, num_actions), 0.01, args))
        self.critic = nn.Sequential(layer_init(nn.Linear(width, 1), 1.0, args))
        if not args.share_network:
            self.actor.insert(0, NatureCNN(channels, args))
            self.critic.insert(0, NatureCNN(channels, args))

    def to_env(self, action):
        """Actions (N,) as the games take them."""
        return action.cpu().numpy()

    def read_mask(self, infos, num_envs):
        """Allowed actions (N, A)."""
        return torch.from_numpy(infos["action_mask"]).to(next(self.parameters()).device)

    def normalize(self, obs):
        # Channels stay last in memory: convolutions take 20 % less time.
        images = obs.permute(0, 3, 1, 2).float()
        return images / 255 if self.args.scale_obs else images  # [D22]

    def encode(self, obs, rnn_state, done):
        """Features (batch, F) of actor and critic, and the RNN state after the last step."""
        x = self.shared(self.normalize(obs))
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
        return x, rnn_state

    def policy(self, features, mask):
        """Distribution of actions (batch,)."""
        return Categorical(logits=torch.where(mask, self.actor(features), -1e8))  # [X4]

    def get_action_and_value(self, obs, rnn_state, done, mask, greedy=False):
        """Actions (batch,), sampled or the likeliest, log-probabilities, values, RNN state."""
        features, rnn_state = self.encode(obs, rnn_state, done)
        policy = self.policy(features, mask)
        if greedy:
            action = policy.mode
        else:  # as sample(), seven times faster: the maximum of logits with Gumbel noise
            logits = policy.logits
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
    if args.precision == "auto":  # a resume on another machine keeps it
        args.precision = "bf16" if fast_bf16(device) else "fp32"
    envs = make_envs(args, args.num_envs)
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(envs, args).to(device)
    learning_rate, eps = args.learning_rate, args.adam_eps  # [D3]
    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    saved = {"agent": agent, "optimizer": optimizer}  # what a checkpoint holds
    progress = restore(saved, checkpoint)
    act, update = compile_functions(args, device, agent.get_action_and_value, compute_gradients)

    T, N, L = args.num_steps, args.num_envs, args.seq_len
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

    for iteration in range(first_iteration, num_iterations + 1):
        read_live(args, optimizer, log, progress["global_step"])
        remaining = 1 - progress["global_step"] / final_step
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (remaining if args.anneal_lr else 1)  # [D4]
        # A tensor: a number is a constant of the first compiled graph, which rounds differently.
        clip_coef = tensor(args.clip_coef * (remaining if args.anneal_clip else 1))  # [X1]

        # After a checkpoint all episodes begin anew, so that a resumed run needs only its seed.
        if iteration == first_iteration or (exact and (iteration - 1) % checkpoint_every == 0):
            next_obs, infos = reset(envs, args.seed, RANK, iteration)
            next_obs, next_done = torch.as_tensor(next_obs, device=device), torch.ones(N).to(device)
            next_mask = agent.read_mask(infos, N)
            rnn_state = torch.zeros(agent.num_states, N, args.rnn_hidden, device=device)  # [D33]

        # Rollout
        obs = torch.zeros(T, *next_obs.shape, dtype=next_obs.dtype, device=device)  # (T, N, ...)
        masks = torch.zeros(T, *next_mask.shape, dtype=torch.bool, device=device)  # (T, N, A)
        actions = torch.zeros(T, N, dtype=torch.int64, device=device)
        logprobs, rewards, dones, values = torch.zeros(4, T, N, device=device)
        rnn_states = torch.zeros(T, *rnn_state.shape, device=device)
        episodes = []
        for t in range(T):
            obs[t], dones[t], masks[t], rnn_states[t] = next_obs, next_done, next_mask, rnn_state
            with torch.no_grad():
                actions[t], logprobs[t], values[t], rnn_state = act(
                    obs[t], rnn_state, dones[t], masks[t]
                )
            next_obs, reward, terminated, truncated, infos = envs.step(agent.to_env(actions[t]))
            reward = np.sign(reward) if args.sign_rewards else reward  # [D19]
            rewards[t], next_done = tensor(reward), tensor(terminated | truncated)
            next_obs = torch.as_tensor(next_obs, device=device)
            next_mask = agent.read_mask(infos, N)
            cut = np.flatnonzero(truncated & ~terminated)  # by a time limit
            if args.truncation_bootstrap and len(cut):
                final_obs = torch.as_tensor(infos["final_obs"][cut], device=device)
                no_reset = torch.zeros(len(cut), device=device)
                with torch.no_grad():
                    value, _ = agent.get_value(final_obs, rnn_state[:, cut], no_reset)
                rewards[t, cut] += args.gamma * value
            for n in np.flatnonzero(infos["_episode"]):
                episodes.append([infos["episode"][key][n].item() for key in ("r", "l")])

        # Advantages
        with torch.no_grad():
            next_value, _ = agent.get_value(next_obs, rnn_state, next_done)
        advantages = compute_gae(
            rewards, values, dones, next_value, next_done, args.gamma, args.gae_lambda
        )
        returns = advantages + values  # TD(lambda)
        explained_variance = 1 - advantages.var() / returns.var()
        batch = {
            "obs": obs, "dones": dones, "masks": masks, "actions": actions,
            "logprobs": logprobs, "advantages": advantages, "values": values, "returns": returns,
        }  # fmt: skip
        # (T, N, ...) to (L, S, ...): S = T * N / L sequences [D35]
        batch = {
            name: x.unflatten(0, (-1, L)).transpose(0, 1).flatten(1, 2) for name, x in batch.items()
        }
        initial_states = rnn_states[::L].transpose(0, 1).flatten(1, 2)  # (K, S, H) [D36]

        # Update: epochs of minibatches [D6]
        losses, num_sequences = [], batch["obs"].shape[1]
        for _ in range(args.update_epochs):
            for index in torch.randperm(num_sequences, device=device).chunk(args.num_minibatches):
                losses.append(update(agent, params, batch, initial_states, index, clip_coef))
                optimizer.step()
            kls = torch.stack([x["approx_kl"] for x in losses[-args.num_minibatches :]])
            if args.target_kl is not None and mean_over_ranks(kls.mean()) > args.target_kl:  # [X3]
                break

        # Log and save
        seconds = time.perf_counter() - last_time
        last_time += seconds
        progress["iteration"] = iteration
        progress["global_step"] += batch_size
        progress["seconds"] += seconds
        progress["episodes"] = (progress["episodes"] + episodes)[-100:]
        means = {name: torch.stack([x[name] for x in losses]).mean() for name in losses[0]}
        means = {name: mean_over_ranks(x).item() for name, x in means.items()}
        for name, x in {"rewards": rewards, **means}.items():
            if not torch.as_tensor(x).isfinite().all():
                raise FloatingPointError(f"{name} not finite in iteration {iteration}")
        if log:
            epochs = len(losses) // args.num_minibatches
            means |= {"explained_variance": explained_variance.item(), "epochs": epochs}
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


def fast_bf16(device):
    """Whether the processor has units for bf16; others emulate it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


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
