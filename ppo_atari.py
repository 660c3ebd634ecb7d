# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.9,<2.14",
#     "numpy>=1.26",
#     "gymnasium[atari]>=1.4",
#     "ale-py>=0.12",
#     "tyro>=0.9",
#     "tensorboard>=2.18",
#     "tqdm>=4.66",
# ]
# ///
"""Proximal Policy Optimization on pixels (Schulman et al. 2017, arXiv 1707.06347): all games of ALE.

    python ppo_atari.py --env-id Breakout                 train, evaluate, say where everything is
    python ppo_atari.py --resume runs/RUN                 go on after a kill, exactly
    python ppo_atari.py --evaluate runs/RUN --capture-video

Shapes: T steps, N games, B = T * N, H x W pixels of C channels (stacked frames), A actions, R recurrent
state, L length of a training sequence (1 without recurrence), S = B / L sequences, M of them in a minibatch.
Tags: [D1] to [D37] are the details of Huang et al. 2022, "The 37 Implementation Details of Proximal Policy
Optimization", [X1] to [X4] its auxiliary ones: clip annealing, data parallelism, early stop, action masks.
"""

import atexit
import difflib
import functools
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import ale_py
import numpy as np
import torch
import torch.distributed as dist
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical
from torch.func import functional_call
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


SCRIPT = "ppo_atari"


@dataclass
class Args:
    # Run
    exp_name: str = "ppo_atari"
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
    env_id: str = "Breakout"
    """a game of ALE, by any of its names: Breakout, breakout, BreakoutNoFrameskip-v4, ALE/Breakout-v5"""
    total_timesteps: int = 10_000_000
    """environment steps over all environments and processes; in whole rollouts"""
    num_envs: int = 8
    """environments per process, stepped together; between rollouts only a checkpoint resets them [D1]"""
    num_steps: int = 128
    """steps per environment in a rollout; a process learns from num_envs * num_steps steps at a time [D1]"""
    noop_max: int = 30
    """a game starts with fewer than that many frames of doing nothing, a random number of them [D14]"""
    frame_skip: int = 4
    """frames that an action lasts, their rewards added up [D15]"""
    max_pool: bool = True
    """a pixel is the brighter one of the last two frames, in which sprites may flicker [D15]"""
    episodic_life: bool = True
    """a lost life ends the return that is learned, the game goes on [D16]"""
    fire_reset: bool = True
    """FIRE begins a game and each of its lives, as the only action allowed there, if the game has it [D17]"""
    screen_size: int = 84
    """height and width of the pictures in pixels, at least 36 [D18]"""
    grayscale: bool = True
    """one channel a frame, off: three [D18]"""
    sign_rewards: bool = True
    """learning sees only the sign of a reward, evaluation the game's score [D19]"""
    frame_stack: int = 4
    """frames that the network sees at once, the newest last [D20]"""
    sticky_actions: float | None = None
    """probability that a frame repeats the action before; None: 0.25 for ALE/...-v5 and -v0 names, else 0"""
    full_actions: bool = False
    """all 18 actions of the console; off: those that the game knows"""
    max_frames: int = 108_000
    """frames after which a game is cut, half an hour of play"""
    norm_reward: bool = False
    """rewards over the running deviation of the discounted return; norm_value does this better [D30]"""
    clip_reward: float = 10.0
    """bound of normalised rewards; 0: none; without norm_reward nothing is clipped [D31]"""
    truncation_bootstrap: bool = True
    """a time limit cuts the episode, not its last state's value; off: it counts as death, as in CleanRL"""

    # Algorithm
    learning_rate: float = 2.5e-4
    """Adam's step size; usable from 1e-5 to 3e-3"""
    anneal_lr: bool = True
    """learning rate falls linearly to 0 at total_timesteps [D4]"""
    adam_eps: float = 1e-5
    """added to Adam's denominator; PyTorch's own default is 1e-8 [D3]"""
    ortho_init: bool = True
    """orthogonal weights, zero biases, gain 0.01 for the policy's head; off: PyTorch's init [D2, D32]"""
    gamma: float = 0.99
    """discount per step; the horizon is about 1 / (1 - gamma) steps"""
    gae: bool = True
    """generalised advantage estimation; off: n-step returns to the end of the rollout, lambda = 1 [D5]"""
    gae_lambda: float = 0.95
    """0: one-step advantages, little variance; 1: whole returns, no bias [D5]"""
    recompute_adv: bool = False
    """advantages anew before every epoch from the values learned so far (Andrychowicz et al. 2021)"""
    num_minibatches: int = 4
    """parts of a shuffled batch; with rnn a part is whole sequences; must divide their number [D6, D35]"""
    update_epochs: int = 4
    """passes over each batch, at most (see target_kl) [D6]"""
    norm_adv: bool = True
    """advantages to mean 0 and deviation 1 [D7]"""
    norm_adv_scope: Literal["minibatch", "batch"] = "minibatch"
    """what norm_adv takes the mean and deviation over [D7]"""
    clip_coef: float = 0.1
    """the probability ratio earns nothing beyond 1 - clip_coef and 1 + clip_coef [D8]"""
    anneal_clip: bool = False
    """clip_coef falls linearly to 0 at total_timesteps [X1]"""
    clip_vloss: bool = True
    """value moves at most clip_coef from the rollout's, in units of the value normaliser [D9]"""
    ent_coef: float = 0.01
    """weight of the entropy bonus; 0.01 helps discrete actions, a fixed deviation has none to gain [D10]"""
    anneal_ent: bool = False
    """ent_coef falls linearly to 0 at total_timesteps"""
    vf_coef: float = 0.5
    """weight of the value loss, which has a factor 0.5 of its own [D10]"""
    max_grad_norm: float = 0.5
    """longest joint gradient of all parameters; 0: no limit [D11]"""
    target_kl: float | None = None
    """epochs stop once an epoch's mean KL divergence from the rollout's policy exceeds it [X3]"""
    norm_value: bool = False
    """the critic learns returns divided by their running deviation (Andrychowicz et al. 2021)"""
    share_network: bool = True
    """policy and value share the hidden layers; off: a network each [D13, D21]"""
    scale_obs: bool = True
    """pixels from 0 to 1, scaled on the device; off: from 0 to 255 [D22]"""
    rnn: Literal["none", "gru", "lstm"] = "none"
    """recurrent layer between the convolutions and the heads"""
    rnn_hidden: int = 128
    """units of the recurrent layer; its state starts from zeros [D33]"""
    rnn_reset: bool = True
    """zero state at the start of every episode; off: memory goes on over episodes [D34]"""
    rnn_seq_len: int = 0
    """training replays sequences of that many steps from the state stored at their start; 0: whole rollouts,
    1: single steps from stored states, so no gradient through time [D35, D36]"""

    # Speed
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, mps; small networks are fastest on one CPU thread"""
    compile: bool = True
    """compiled graphs, where there is a C++ compiler: faster, but slow to start; off: starts at once"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of the convolutions and the layer after them; bf16 has 8 bits of precision and is faster where the
    processor has units for it; auto: bf16 there"""
    torch_threads: int = torch.get_num_threads()
    """threads of PyTorch in each process; small networks get slower with more"""
    env_threads: int = 0
    """threads of the emulator in each process; 0: one for each core"""

    # Logging
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "ppo"
    """its project"""
    wandb_entity: str | None = None
    """its team"""
    capture_video: bool = False
    """record the first episode of the deterministic evaluation as mp4"""

    @property
    def seq_len(self):
        """L, steps of a training sequence."""
        return 1 if self.rnn == "none" else self.rnn_seq_len or self.num_steps

    @property
    def sticky(self):
        """Probability that a frame repeats the action before."""
        named_so = self.env_id.startswith("ALE/") or self.env_id.endswith("-v0")
        return (0.25 if named_so else 0.0) if self.sticky_actions is None else self.sticky_actions

    def __post_init__(self):
        limits = {"gamma": 1, "gae_lambda": 1, "sticky_actions": 1, "seed": 2**32 - 1}
        ints = ("noop_max", "frame_skip", "frame_stack", "max_frames", "screen_size", "num_envs",
                "eval_episodes", "torch_threads", "env_threads")
        limits |= dict.fromkeys(ints, 2**31 - 1)  # C's int
        for name, value in vars(self).items():
            low, high = 0, limits.get(name, sys.float_info.max)
            zero = ("seed", "checkpoint_every", "rnn_seq_len", "noop_max", "env_threads")
            if type(getattr(Args, name)) is int and name not in zero:
                low = 36 if name == "screen_size" else 1
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value} is out of range: give {low} to {high}")
        if self.resume or self.evaluate:
            return  # the run's own flags fit each other, and are not read yet
        sequences = self.num_envs * self.num_steps // self.seq_len
        if self.num_steps % self.seq_len:
            raise UsageError(f"--rnn-seq-len {self.rnn_seq_len} does not divide --num-steps {self.num_steps}")
        if sequences % self.num_minibatches:
            raise UsageError(f"--num-minibatches {self.num_minibatches} does not divide the {sequences} "
                             f"{'steps' if self.seq_len == 1 else 'sequences'} of a rollout: give a divisor")
        alone = self.num_envs * self.num_steps == self.num_minibatches and self.norm_adv_scope == "minibatch"
        if alone and self.norm_adv:
            raise UsageError("minibatches of one step have no deviation: give fewer --num-minibatches")


# ---------------------------------------------------------------------------------------------- environment


def import_or_explain(module, option):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{option} needs {module}: pip install {module}") from error


def game_name(env_id):
    """ALE's own name of a game: ms_pacman of MsPacman, ALE/MsPacman-v5, MsPacmanNoFrameskip-v4."""
    short = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))
    two_players = {"combat", "joust", "maze_craze", "warlords"}  # ALE would end the process
    games = {name.replace("_", ""): name for name in {*ale_py.roms.get_all_rom_ids()} - two_players}
    key = short.replace("_", "").lower()
    if key not in games:
        close = [games[name] for name in difflib.get_close_matches(key, games, cutoff=0.5)]
        raise UsageError(f"--env-id {env_id} is no game of ALE for one player"
                         + (f"; close names: {', '.join(close)}" if close else ""))
    return games[key]


def make_games(args, num_envs):
    """Vector of games in threads of C++; with [D16] a lost life is `terminated` too, and the game goes on.

    Its own episodic_life would start a new game instead, from which the later lives would never be seen."""
    return AtariVectorEnv(
        game_name(args.env_id), num_envs, num_threads=min(args.env_threads, num_envs),
        max_num_frames_per_episode=args.max_frames, repeat_action_probability=args.sticky,
        full_action_space=args.full_actions, autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=args.screen_size, img_width=args.screen_size, grayscale=args.grayscale,  # [D18]
        stack_num=args.frame_stack, frameskip=args.frame_skip, maxpool=args.max_pool,  # [D20], [D15]
        noop_max=max(1, args.noop_max), life_loss_info=args.episodic_life,  # [D14], [D16]
        reward_clipping=False, use_fire_reset=args.fire_reset)  # the score is for us to keep; [D17]


def fire_only(envs):
    """Which of the game's actions are FIRE (A,): one of them, or none."""
    return np.array([action == ale_py.Action.FIRE for action in envs.ale.get_action_set()])


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


class Agent(nn.Module):
    """Policy, value function and the statistics that they need.

    Observations (L, S, H, W, C) are sequences of pictures in bytes side by side; `state` (S, R) is the
    recurrent state before the first step (R = 0 without rnn); `starts` (L, S) is 1 where a step begins an
    episode. Channels come last, as the convolutions want them: no copy."""

    def __init__(self, channels, num_actions, args):
        super().__init__()
        self.args, self.num_actions, self.bf16 = args, num_actions, args.precision == "bf16"
        self.reward_rms, self.value_rms = RunningMeanStd(()), RunningMeanStd(())
        self.register_buffer("value_std", torch.ones(()))
        count = 1 if args.share_network else 2  # [D21], [D13]
        self.trunks = nn.ModuleList([nature_cnn(channels, args) for _ in range(count)])
        self.rnns, self.state_size, features = None, 0, 512
        if args.rnn != "none":
            layer = {"gru": nn.GRU, "lstm": nn.LSTM}[args.rnn]
            layers = [layer_init(layer(512, args.rnn_hidden), 1.0, args) for _ in range(count)]
            for layer in layers:
                layer.flatten_parameters = lambda: None  # cuDNN's would move the weights elsewhere
            self.rnns, features = nn.ModuleList(layers), args.rnn_hidden
            self.state_size = args.rnn_hidden * count * (2 if args.rnn == "lstm" else 1)
        self.actor = layer_init(nn.Linear(features, num_actions), 0.01, args)
        self.critic = layer_init(nn.Linear(features, 1), 1.0, args)

    def features(self, obs, state, starts):
        """Features (L, S, F) of policy and value function, and the recurrent state after the last step."""
        pictures = obs.flatten(0, 1).permute(0, 3, 1, 2)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            pictures = pictures.to(torch.bfloat16 if self.bf16 else torch.float32)
            if self.args.scale_obs:
                pictures = pictures / 255  # [D22]
            outputs = [trunk(pictures).float().unflatten(0, obs.shape[:2]) for trunk in self.trunks]
        if self.rnns is not None:
            parts = state.chunk(len(self.rnns), -1)
            results = [self.remember(*x, starts) for x in zip(self.rnns, outputs, parts, strict=True)]
            outputs, state = [x for x, _ in results], torch.cat([x for _, x in results], -1)
        return outputs[0], outputs[-1], state

    def remember(self, rnn, x, state, starts):
        """Output (L, S, F) of a recurrent layer for x (L, S, 512), and its state after the last step."""
        # One call for each stretch of steps in which no sequence begins an episode.
        cuts, outputs = [0, *(starts[1:].any(1).nonzero().flatten() + 1).tolist(), len(x)], []
        for begin, end in pairwise(cuts):
            if self.args.rnn_reset:
                state = state * (1 - starts[begin].unsqueeze(-1))  # [D34]
            if self.args.rnn == "lstm":
                hidden, cell = (part.contiguous() for part in state[None].chunk(2, -1))
                output, parts = rnn(x[begin:end], (hidden, cell))
                state = torch.cat(parts, -1)[0]
            else:
                output, state = rnn(x[begin:end], state[None].contiguous())
                state = state[0]
            outputs.append(output)
        return torch.cat(outputs), state

    def get_value(self, obs, state, starts):
        """Values (L, S) in units of returns."""
        return self.critic(self.features(obs, state, starts)[1]).squeeze(-1) * self.value_std

    def draw_noise(self, *shape):
        """What makes an action random: Gumbel noise (*shape, A)."""
        return -torch.empty(*shape, self.num_actions, device=self.value_std.device).exponential_().log()

    def forward(self, obs, state, starts, mask=None, action=None, noise=0.0):
        """Act with that noise (0: the likeliest action), or evaluate `action` (L, S, 1) again.

        Returns action (L, S, 1), its log-probability, entropy and value (L, S), and the next state (S, R)."""
        policy, critic, state = self.features(obs, state, starts)
        logits, value = self.actor(policy), self.critic(critic).squeeze(-1) * self.value_std
        if mask is not None:
            logits = torch.where(mask, logits, -1e8)  # [X4]
        choice = Categorical(logits=logits, validate_args=False)
        if action is None:
            action = (logits + noise).argmax(-1, keepdim=True)
        return action, choice.log_prob(action.squeeze(-1)), choice.entropy(), value, state


class Flatten(nn.Module):
    """(S, C, H, W) to (S, H * W * C): with channels last in memory no copy."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)


def nature_cnn(channels, args):
    """The network of Mnih et al. 2015: pictures (S, C, H, W) to 512 features [D21]."""
    size, layers = args.screen_size, []
    for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [layer_init(nn.Conv2d(channels, width, kernel, stride), 2**0.5, args), nn.ReLU()]
        channels, size = width, (size - kernel) // stride + 1
    dense = layer_init(nn.Linear(size * size * channels, 512), 2**0.5, args)
    return nn.Sequential(*layers, Flatten(), dense, nn.ReLU())


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
LOGGED = (*METRICS, "explained_variance", "epochs")


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

    def loss_of(params):
        inputs = (mb["obs"], state[index], mb["starts"], mb.get("mask"), mb["actions"])
        _, newlogprob, entropy, newvalue, _ = functional_call(agent, parameter_views(agent, params), inputs)
        return ppo_loss(newlogprob, entropy, newvalue, mb, hyper, agent.value_std, args)

    if args.rnn == "none":
        grad, step_metrics = torch.func.grad(loss_of, has_aux=True)(opt["params"])
    else:  # torch.func would differentiate a recurrent layer step by step, and cuDNN's not at all
        with torch.enable_grad():
            params = opt["params"].detach().requires_grad_()
            loss, step_metrics = loss_of(params)
        grad = torch.autograd.grad(loss, params)[0]
    if world_size() > 1:
        grad = sum_over_ranks(grad) / world_size()
    norm = grad.norm()
    if args.max_grad_norm:
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)  # [D11]
    adam_step(opt, grad, hyper[0], args.adam_eps)
    metrics.add_(torch.cat([step_metrics, norm.view(1)]))


# ---------------------------------------------------------------------------------------- rollout and update


def reset_stream(envs, agent, seeds):
    """New games: where they stand between one step, or one rollout, and the next."""
    device, n = agent.value_std.device, envs.num_envs
    obs, infos = envs.reset(seed=np.array(seeds) % 2**31)
    fire = fire_only(envs)
    allowed = np.tile(fire, (n, 1)) if agent.args.fire_reset and fire.any() else None  # a game's start: FIRE
    return SimpleNamespace(obs=to_device(obs, device), starts=torch.ones(1, n, device=device),
                           allowed=allowed, lives=infos["lives"], frames=infos["episode_frame_number"],
                           begins=infos["frame_number"] - infos["episode_frame_number"],
                           state=torch.zeros(n, agent.state_size, device=device),  # [D33]
                           discounted=torch.zeros(n, device=device),
                           episode_return=np.zeros(n), episode_length=np.zeros(n, int))


def to_device(obs, device):
    """Pictures (N, C, H, W), with colours (N, C, H, W, 3), as bytes (1, N, H, W, channels) on the device."""
    obs = torch.from_numpy(obs).to(device)  # a GPU turns them faster
    channels = obs.permute(0, 2, 3, 1) if obs.dim() == 4 else obs.permute(0, 2, 3, 1, 4).flatten(3)
    return channels.contiguous().unsqueeze(0)


def fire_mask(stream):
    """Which actions are allowed (1, N, A) [X4], None where all are, always."""
    return None if stream.allowed is None else torch.tensor(stream.allowed[None], device=stream.obs.device)


def step_games(envs, stream, action):
    """Act (1, N, 1) and move the stream on. Returns rewards, `terminated`, `truncated` and what else is told.

    `over` (N,) marks the games that ended, and were begun anew: a lost life is `terminated` too. After one
    only FIRE is allowed [D17], so that nothing is learned from an action that the policy did not choose."""
    obs, reward, terminated, truncated, infos = envs.step(action[0, :, 0].cpu().numpy())
    begins = infos["frame_number"] - infos["episode_frame_number"]
    infos["over"] = begins != stream.begins
    if stream.allowed is not None:
        lost = (infos["lives"] < stream.lives) | infos["over"]
        stream.allowed = ~lost[:, None] | fire_only(envs)
    stream.lives, stream.begins = infos["lives"], begins
    stream.obs = to_device(obs, stream.obs.device)
    stream.episode_return += reward
    stream.episode_length += 1
    return reward, terminated, truncated, infos


@torch.no_grad()
def collect(envs, agent, act, stream):
    """Play num_steps steps [D1].

    Returns the rollout, tensors (T, N, ...), and (score, length) of the games that ended."""
    steps, states, results, cuts, cut_obs, episodes = [], [], [], [], [], []
    for t, noise in enumerate(agent.draw_noise(agent.args.num_steps, 1, envs.num_envs)):
        mask, obs = fire_mask(stream), stream.obs
        action, logprob, _, value, state = act(obs, stream.state, stream.starts, mask, None, noise)
        reward, terminated, truncated, infos = step_games(envs, stream, action)
        done = terminated | truncated
        step = {"obs": obs, "actions": action, "logprobs": logprob, "values": value, "starts": stream.starts}
        steps.append(step if mask is None else step | {"mask": mask})
        states.append(stream.state)
        if agent.args.sign_rewards:
            reward = np.sign(reward)  # [D19]
        results.append((reward, terminated if agent.args.truncation_bootstrap else done, done))
        for n in np.flatnonzero(infos["over"]):
            episodes.append((float(stream.episode_return[n]), int(stream.episode_length[n])))
            stream.episode_return[n], stream.episode_length[n] = 0, 0
        for n in np.flatnonzero(truncated & ~terminated):
            cuts.append((t, n, state[n]))
            cut_obs.append(to_device(infos["final_obs"][n : n + 1], obs.device))
        stream.state = state
        stream.starts = torch.as_tensor(done[None], dtype=torch.float32, device=obs.device)
    rollout = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
    rollout["states"] = torch.stack(states)
    results = torch.as_tensor(np.array(results, np.float32), device=obs.device).unbind(1)
    rollout |= zip(("rewards", "terminated", "done"), results, strict=True)
    # States in which the rollout or a game was cut: what next_values needs beside the values.
    rollout["cuts"] = torch.tensor([(t, n) for t, n, _ in cuts], dtype=torch.long).view(-1, 2)
    rollout["cut_obs"] = torch.cat([stream.obs, *cut_obs], 1)[0]
    rollout["cut_state"] = torch.stack([*stream.state, *(state for *_, state in cuts)])
    rollout["cut_starts"] = torch.cat([stream.starts, stream.starts.new_zeros(1, len(cuts))], 1)
    return rollout, episodes


def next_values(agent, rollout, values):
    """Values (T, N) of the states that the actions led to; `values` (T, N) are those of the states before."""
    cut_values = agent.get_value(rollout["cut_obs"][None], rollout["cut_state"], rollout["cut_starts"])[0]
    num_envs = values.shape[1]
    result = torch.cat([values[1:], cut_values[None, :num_envs]])
    t, n = rollout["cuts"].unbind(1)
    result[t, n] = cut_values[num_envs:]
    return result


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


@torch.no_grad()
def evaluate(agent, greedy, video_dir=None):
    """Scores of one whole game in each of eval_episodes environments; the first may be recorded."""
    args, num_envs = agent.args, agent.args.eval_episodes
    envs = make_games(args, num_envs)
    print(f"evaluating {num_envs} game(s), {'deterministic' if greedy else 'sampled'} actions", flush=True)
    seeds = derive_seeds(args.seed, EVALUATION, n=num_envs + 1)
    torch.manual_seed(seeds.pop())
    stream, scores, actions = reset_stream(envs, agent, seeds), np.full(num_envs, np.nan), []
    first_frame = int(stream.frames[0])
    while np.isnan(scores).any():
        noise = 0.0 if greedy else agent.draw_noise(1, num_envs)
        now = stream.obs, stream.state, stream.starts, fire_mask(stream)
        action, *_, stream.state = agent(*now, None, noise)
        actions.append(int(action[0, 0, 0]))
        _, terminated, truncated, infos = step_games(envs, stream, action)
        done = torch.from_numpy(terminated | truncated)
        stream.starts = done.float().unsqueeze(0).to(action.device)
        ended = infos["over"] & np.isnan(scores)
        scores[ended] = stream.episode_return[ended]
        if video_dir and ended[0]:
            frames = replay(args, seeds[0] % 2**31, first_frame, actions)
            write_video((frame for frame, _ in frames), Path(video_dir))
    envs.close()
    return scores


def replay(args, seed, first_frame, actions):
    """Yield colour frame (height, 160, 3) and reward, frame by frame, of a game played with that seed.

    The vector environment draws no pictures for people, but games are repeatable: the same seed and actions
    are the same game. It begins with FIRE, as there [D17], and idles up to `first_frame`."""
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", args.sticky)
    ale.loadROM(ale_py.roms.get_rom_path(game_name(args.env_id)))
    ale.reset_game()
    choices = ale.getLegalActionSet() if args.full_actions else ale.getMinimalActionSet()
    if args.fire_reset and ale_py.Action.FIRE in choices:
        ale.act(ale_py.Action.FIRE)
    while ale.getEpisodeFrameNumber() < first_frame:
        ale.act(ale_py.Action.NOOP)
    for action in actions:
        for _ in range(args.frame_skip):
            if not ale.game_over():
                reward = ale.act(choices[action])
                yield ale.getScreenRGB(), reward


def write_video(frames, folder):
    """mp4 of frames (height, 160, 3) as they come, 60 a second: a long game's would not fit into memory."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter  # optional

    folder.mkdir(parents=True, exist_ok=True)
    first = next(frames)  # 210 pixels high, in some games up to 250
    with FFMPEG_VideoWriter(str(folder / "episode-0.mp4"), first.shape[1::-1], 60) as video:
        for frame in chain([first], frames):
            video.write_frame(frame)


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


def use_bf16(args, device):
    """Whether the convolutions and the layer after them compute in bf16."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)  # others emulate it
    else:
        able = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
        fast = able.get("amx_bf16") or able.get("avx512_bf16")
    return args.precision == "bf16" or bool(args.precision == "auto" and fast)


def build(args, checkpoint, num_envs, device):
    """Games, agent and optimiser state, new or as the checkpoint has them."""
    envs = make_games(args, num_envs)
    torch.manual_seed(args.seed)  # the same weights in every process
    channels = args.frame_stack * (1 if args.grayscale else 3)
    args.precision = "bf16" if use_bf16(args, device) else "fp32"  # a resume elsewhere must not change it
    agent = Agent(channels, int(envs.single_action_space.n), args).to(device)
    opt = flatten_parameters(agent)
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UsageError(f"the checkpoint is of a game with other actions: {reason}") from error
        for name, value in opt.items():
            value.copy_(checkpoint["opt"][name])
    return envs, agent, opt


def choose_run_dir(args):
    """The run's folder, which holds no other run."""
    env_name = args.env_id.replace("/", "_").replace(":", "_")
    name = f"{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or args.run_dir or f"runs/{name}")
    if not args.resume and (run_dir.is_file() or (run_dir / "checkpoint.pt").exists()):
        raise UsageError(f"--run-dir {run_dir} is a file or holds a run: --resume it or give another folder")
    return run_dir


def print_header(args, envs, agent, num_iterations, run_dir, device, compiled):
    size, minibatch_size = args.screen_size, args.num_envs * args.num_steps // args.num_minibatches
    protocols = {0.25: ", as ALE/...-v5", 0.0: ", as ...NoFrameskip-v4"}
    names = [action.name for action in envs.ale.get_action_set()]
    print(f"{SCRIPT}.py  {args.env_id}, seed {args.seed}\n"
          f"  protocol: sticky actions {args.sticky:g}{protocols.get(args.sticky, '')}; "
          f"{args.frame_skip} frames an action, at most {args.max_frames} a game, "
          f"{'a lost life ends a return' if args.episodic_life else 'returns of whole games'}, "
          f"{'signs of rewards' if args.sign_rewards else 'raw rewards'}\n"
          f"  {args.frame_stack} frames of {size} x {size}, {'gray' if args.grayscale else 'colour'}, "
          f"{len(names)} actions: {' '.join(names)}\n"
          f"  {device}, {world_size()} process(es) of {args.torch_threads} thread(s), "
          f"{'bf16' if agent.bf16 else 'fp32'}, "
          f"{'compiled: the first iteration takes up to a minute' if compiled else 'not compiled'}\n"
          f"  {num_iterations} iterations of {args.num_envs} games x {args.num_steps} steps, at most "
          f"{args.update_epochs} epochs of {args.num_minibatches} minibatches of "
          f"{minibatch_size * world_size()}\n"
          f"  folder {run_dir}", flush=True)


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


def compile_graphs(act, step, device):
    """Compiled versions of acting and of an optimiser step."""
    torch.compiler.reset()  # unchecked graphs would serve a second training, whatever its flags
    options = {"cpp_wrapper": device.type == "cpu"}  # on a GPU it needs nvcc
    act = torch.compile(act, dynamic=False, options=options)
    # Nothing of a step ever changes but the tensors: to check that first would take 10 % of it.
    unchecked = {**options, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return act, torch.compile(step, dynamic=False, options=unchecked)


def restart(envs, agent, rank, iteration):
    """Environments and noise from seeds of this iteration: a resume needs no simulator's state."""
    seeds = derive_seeds(agent.args.seed, rank, iteration, n=envs.num_envs + 1)
    torch.manual_seed(seeds.pop())
    return reset_stream(envs, agent, seeds)


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
    """Train from the start or on from a checkpoint, then evaluate. Returns what summary.json holds."""
    clock, device = time.perf_counter(), set_up_torch(args)
    rank = join_processes(device)
    batch_size = args.num_envs * args.num_steps * world_size()
    at = SimpleNamespace(iteration=0, global_step=0, seconds=0.0, batch_size=batch_size, recent=[], rows=[],
                         live={name: getattr(args, name) for name in LIVE})
    if checkpoint:
        at = SimpleNamespace(**vars(at) | checkpoint["at"])
    num_iterations = count_iterations(args, at, batch_size)
    save_every = max(1, num_iterations // 20, 10_000 // args.num_steps)  # more resets would cut most episodes
    run_dir, save_every = choose_run_dir(args), args.checkpoint_every or save_every
    envs, agent, opt = build(args, checkpoint, args.num_envs, device)
    compiled = args.rnn == "none" and can_compile(args, device)  # episode ends change a recurrent graph
    act, step = compile_graphs(agent, train_step, device) if compiled else (agent, train_step)
    log = RunLog(run_dir, args, at.rows) if rank == 0 else None
    if log:
        print_header(args, envs, agent, num_iterations, run_dir, device, compiled)
    stream = restart(envs, agent, rank, at.iteration)
    signals, handlers, live_seen, stop = [], {}, None, False
    while at.iteration < num_iterations and not stop:
        live_seen = read_live(run_dir / "live.json", live_seen, at.live, at.global_step) if log else None
        hyper = schedule(at.live, 1 - at.iteration / num_iterations, args)
        at.iteration, at.global_step = at.iteration + 1, at.global_step + batch_size
        rollout, episodes = collect(envs, agent, act, stream)
        losses = update(agent, opt, rollout, stream, hyper, step)
        handlers = handlers or catch_signals(signals)  # not before: a compiler would die of Ctrl-C, too
        check_finite(at.iteration, **losses)
        at.recent = (at.recent + episodes)[-100:]
        stop = bool(sum_over_ranks(torch.tensor(len(signals))))  # all processes, if one was told to
        save = at.iteration % save_every == 0 or at.iteration == num_iterations or stop
        clock, seconds = time.perf_counter(), time.perf_counter() - clock
        at.seconds += seconds
        if log:
            losses |= {"learning_rate": hyper["learning_rate"], "SPS": batch_size / seconds}
            log.log(at, losses, save or at.iteration % max(1, num_iterations // 100) == 0)
        if save and log:
            save_checkpoint(run_dir, agent, at, opt=opt)
        if save:
            stream = restart(envs, agent, rank, at.iteration)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    envs.close()
    return finish(agent, run_dir, at, log, num_iterations) if log else None


def finish(agent, run_dir, at, log, num_iterations):
    """Evaluate and write summary.json, or say how to go on with a run that was stopped."""
    if at.iteration < num_iterations:
        log.close()
        print(f"saved at {at.global_step} steps; to go on: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(130)
    speeds = [row[RunLog.COLUMNS.index("SPS")] for row in at.rows]
    summary = {"env_id": agent.args.env_id, "seed": agent.args.seed, "global_step": at.global_step,
               "seconds": at.seconds, "sps": float(np.median(speeds))}
    log.bar.close()
    summary |= report_evaluation(agent, run_dir)
    log.close(summary)
    print(f"  folder {run_dir}\n  again: python {sys.argv[0]} --evaluate {run_dir}")
    return summary


def evaluate_run(args, checkpoint):
    envs, agent, _ = build(args, checkpoint, 1, set_up_torch(args))
    envs.close()
    report_evaluation(agent, Path(args.evaluate))


# What may be given again with --resume and --evaluate.
FREE = {"resume", "evaluate", "total_timesteps", "eval_episodes", "device", "compile", "torch_threads",
        "env_threads", "track", "wandb_project_name", "wandb_entity", "capture_video"}


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
