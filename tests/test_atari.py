"""Atari: games against a plain loop over ALE, lost lives, cut games, details 14 to 22, the command line."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_atari as atari

SCRIPT = Path(__file__).parent.parent / "ppo_atari.py"
SMALL = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 128,
         "screen_size": 36, "eval_episodes": 1, "rnn_hidden": 16, "device": "cpu", "compile": False,
         "precision": "fp32", "torch_threads": 1, "env_threads": 1}
FIRE = ale_py.Action.FIRE
STICKY = {"sticky_actions": 0.25}
KEY = (3,)  # of reset_envs


def small_args(**flags):
    return atari.Args(**SMALL | flags)


def small_agent(**flags):
    """Games, agent, optimizer state and env_state of a run that has just begun."""
    args = small_args(**flags)
    args.check()
    envs = atari.make_envs(args, args.num_envs)
    agent, opt = atari.make_agent(envs, args, atari.set_up_torch(args), None)
    return envs, agent, opt, atari.reset_envs(envs, agent, *KEY)


def new_agent(num_actions=6, **flags):
    """Agent without games."""
    ale = SimpleNamespace(get_action_set=lambda: [ale_py.Action.NOOP] * num_actions)
    envs = SimpleNamespace(single_action_space=gym.spaces.Discrete(num_actions), ale=ale)
    return atari.Agent(envs, small_args(**flags), torch.device("cpu"))


def seeds_of(key, n):
    """Seeds of the games after reset_envs with that key."""
    return np.random.SeedSequence(key).generate_state(n) % 2**31


def act_by(choose):
    """What rollout calls to act, for actions (1, N) of our own choice."""
    def act(obs, rnn_state, starts, mask, action, noise):
        zeros = torch.zeros(obs.shape[:2])
        return choose(mask), zeros, zeros, zeros, rnn_state
    return act


def recorded(envs):
    """List that gets (actions, observations, rewards, terminated, truncated, infos) of every step."""
    told, step = [], envs.step

    def step_and_tell(actions):
        told.append((actions, *step(actions)))
        return told[-1][1:]

    envs.step = step_and_tell
    return told


def array(told, name):
    """(T, N) of what the games told in every step."""
    names = ("actions", "obs", "rewards", "terminated", "truncated")
    return np.array([x[5][name] if name in x[5] else x[names.index(name)] for x in told])


def weights(agent):
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


# --------------------------------------------------------------------------------------- the games themselves


class PlainGames:
    """One game after another in a plain loop over ALE, written anew from what the flags promise."""

    def __init__(self, args, seed):
        self.args, self.ale = args, ale_py.ALEInterface()
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", args.sticky)
        games = {"Breakout": "breakout", "Pong": "pong", "SpaceInvaders": "space_invaders"}
        self.ale.loadROM(ale_py.roms.get_rom_path(games[re.sub("ALE/|-v5", "", args.env_id)]))
        full = args.full_actions
        self.actions = self.ale.getLegalActionSet() if full else self.ale.getMinimalActionSet()

    def begin(self, first_frame):
        """A new game: FIRE, then nothing up to that frame."""
        self.ale.reset_game()
        if self.args.fire_reset and FIRE in self.actions:
            self.ale.act(FIRE)
        while self.ale.getEpisodeFrameNumber() < first_frame:
            self.ale.act(ale_py.Action.NOOP)
        self.stack = [np.zeros_like(self.screen())] * (self.args.frame_stack - 1) + [self.screen()]

    def step(self, action):
        lives, self.reward, screens = self.ale.lives(), 0, []
        for _ in range(self.args.frame_skip):
            self.reward += self.ale.act(self.actions[action])
            screens.append(self.screen())
            if self.ale.game_over():
                break
        self.over, self.lost = self.ale.game_over(), 0 < self.ale.lives() < lives
        self.stack = [*self.stack[1:], np.max(screens[-2 if self.args.max_pool else -1 :], 0)]

    def screen(self):
        """Picture (channels, H, W) at native size."""
        gray, colours = self.ale.getScreenGrayscale, self.ale.getScreenRGB
        return gray()[None] if self.args.grayscale else colours().transpose(2, 0, 1)

    def picture(self):
        """Stacked frames (S, S, channels), each pixel the mean of the area that it covers."""
        frames = np.concatenate(self.stack)
        rows, columns = (shares(full, self.args.screen_size) for full in frames.shape[1:])
        return (rows @ frames @ columns.T).transpose(1, 2, 0)


def shares(full, size):
    """(size, full): the share of each of `full` pixels in the mean that one of `size` takes."""
    edges, pixels = np.arange(size + 1) * full / size, np.arange(full)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return covered.clip(0) * size / full


def first_frames(envs, seeds):
    """Frame at which each game begins."""
    return envs.reset(seed=seeds)[1]["episode_frame_number"]


@pytest.mark.parametrize(("env_id", "steps", "flags"), [
    ("ALE/Breakout-v5", 250, {"screen_size": 84}), ("ALE/Pong-v5", 150, {"screen_size": 84}),
    ("ALE/SpaceInvaders-v5", 150, {"screen_size": 84}), ("SpaceInvaders", 80, {"max_pool": False}),
    ("Breakout", 80, {"grayscale": False, "frame_skip": 2, "frame_stack": 3}),
    ("Breakout", 80, {"full_actions": True, "frame_skip": 1}),
    ("Breakout", 80, {"fire_reset": False, "noop_max": 5}),
], ids=str)  # fmt: skip
def test_games_are_those_of_a_plain_loop(env_id, steps, flags):
    """A grey level may differ by the half that it is rounded by, and OpenCV sums in float32."""
    envs, agent, _, _ = small_agent(env_id=env_id, num_steps=steps, **flags)
    games = [PlainGames(agent.args, int(seed)) for seed in seeds_of(KEY, 2)]
    for game, frame in zip(games, first_frames(envs, seeds_of(KEY, 2)), strict=True):
        game.begin(frame)
    env_state, rng = atari.reset_envs(envs, agent, *KEY), np.random.default_rng(0)
    lives, told = env_state.lives, recorded(envs)
    act = act_by(lambda mask: torch.from_numpy(rng.integers(agent.num_outputs, size=(1, 2))))
    data, episodes = atari.rollout(envs, agent, act, env_state)
    scores, lengths, ended = np.zeros(2), np.zeros(2), []
    for t, (actions, _, reward, terminated, truncated, infos) in enumerate(told):
        for n, game in enumerate(games):
            assert lives[n] == game.ale.lives()
            if t % 5 == 0 or game.ale.getEpisodeFrameNumber() < 60:
                assert np.abs(data["obs"][t, n].numpy() - game.picture()).max() < 0.501
            game.step(actions[n])
            scores[n] += game.reward
            lengths[n] += 1
            assert (reward[n], truncated[n]) == (game.reward, False)
            assert terminated[n] == data["dones"][t, n] == (game.lost or game.over)
            if game.over:
                game.begin(infos["episode_frame_number"][n])
                ended.append((n, scores[n], lengths[n]))
                scores[n] = lengths[n] = 0
            assert infos["episode_frame_number"][n] == game.ale.getEpisodeFrameNumber()
        lives = infos["lives"]
    assert episodes == ended and (env_state.totals == [scores, lengths]).all()
    assert steps == 80 or scores.any() or any(score for _, score, _ in ended)
    assert ended or steps < 200


@pytest.mark.parametrize(("env_id", "flags", "frames"), [
    ("Breakout", {}, range(1, 30)), ("Breakout", {"noop_max": 0}, [1]),
    ("Breakout", {"noop_max": 4, "fire_reset": False}, range(4)), ("Freeway", {"noop_max": 4}, range(4)),
], ids=str)  # fmt: skip
def test_a_game_begins_after_fewer_than_noop_max_frames(env_id, flags, frames):
    envs = atari.make_envs(small_args(env_id=env_id, max_frames=1, **flags), 2)
    first = [*first_frames(envs, np.array([3, 4]))]
    for _ in range(20):  # each step is a game
        first += [*envs.step(np.zeros(2, int))[4]["episode_frame_number"]]
    assert set(first) <= set(frames) and len(set(first)) > len(frames) / 2


def test_a_game_of_breakout_begins_with_the_ball_in_play():
    """Also where FIRE may not stick. Nothing is done but what the mask demands: no ball, no life lost."""
    envs, agent, _, env_state = small_agent(num_envs=6, num_steps=60, **STICKY)
    act = act_by(lambda mask: mask.int().argmax(-1))  # NOOP where it is allowed
    assert atari.rollout(envs, agent, act, env_state)[0]["dones"].any(0).all()


# ----------------------------------------------------------------------------------------------- lost lives


@pytest.fixture(scope="module", params=["Breakout", "Berzerk"])
def played(request):
    """A rollout of whole games, and what the games told."""
    envs, agent, _, env_state = small_agent(env_id=request.param, num_steps=300)
    lives, told = env_state.lives, recorded(envs)
    data, episodes = atari.rollout(envs, agent, agent, env_state)
    told = {name: array(told, name) for name in ("actions", "rewards", "terminated", "lives",
                                                  "episode_frame_number")}
    before = np.concatenate([lives[None], told["lives"][:-1]])
    over, lost = told["lives"] > before, told["lives"] < before
    assert over.any() and lost.any()
    return SimpleNamespace(agent=agent, data=data, episodes=episodes, over=over, lost=lost, **told)


def test_the_game_goes_on_after_a_lost_life(played):
    """Up to the last life, and in none of them is the game begun anew."""
    assert ((np.diff(played.episode_frame_number, axis=0) < 0) == played.over[1:]).all()
    all_lives = set(range(1, 6 if played.agent.args.env_id == "Breakout" else 4))
    assert set(played.lives.ravel()) == all_lives
    assert (played.terminated == (played.lost | played.over)).all()


def test_a_lost_life_ends_the_return_but_not_the_score(played):
    data = played.data
    assert np.array_equal(data["dones"], played.terminated) and not data["final_values"].any()
    assert torch.equal(data["starts"][1:], data["dones"][:-1])
    scores, lengths, ended = np.zeros(2), np.zeros(2), []
    for reward, over in zip(played.rewards, played.over, strict=True):
        scores, lengths = scores + reward, lengths + 1
        ended += [(n, scores[n], lengths[n]) for n in np.flatnonzero(over)]
        scores, lengths = scores * ~over, lengths * ~over
    assert played.episodes == ended and sum(score for _, score, _ in ended) > 0


def test_no_value_flows_over_a_lost_life(played):
    data, lost = played.data, torch.from_numpy(played.lost)
    errors = data["rewards"] - data["values"]
    for gae_lambda in (0.0, 0.95):
        advantages = atari.compute_gae(data["rewards"], data["values"], data["values"][:1],
                                       data["final_values"], data["dones"], 0.99, gae_lambda)
        torch.testing.assert_close(advantages[lost], errors[lost])
    assert not torch.allclose(advantages[~lost], errors[~lost])


def test_learning_sees_the_sign_of_a_reward(played):
    assert np.array_equal(played.data["rewards"], np.sign(played.rewards)) and played.rewards.any()


def test_learning_sees_the_reward_without_sign_rewards():
    envs, agent, _, env_state = small_agent(env_id="SpaceInvaders", num_steps=128, sign_rewards=False)
    told = recorded(envs)
    rewards = atari.rollout(envs, agent, agent, env_state)[0]["rewards"].numpy()
    assert np.array_equal(rewards, array(told, "rewards")) and rewards.max() >= 5


def test_without_episodic_life_only_a_games_end_is_terminated():
    envs, agent, _, env_state = small_agent(num_steps=256, episodic_life=False)
    told = recorded(envs)
    data, episodes = atari.rollout(envs, agent, agent, env_state)
    lives = array(told, "lives")
    over, lost = np.diff(lives, axis=0) > 0, np.diff(lives, axis=0) < 0
    assert np.array_equal(data["dones"][1:], over) and 0 < len(episodes) == over.sum()
    assert (data["actions"][2:].numpy()[lost[:-1]] == 1).all() and lost.sum() > 4  # FIRE all the same


# ------------------------------------------------------------------------------------------ FIRE after a life


def lost_before(played):
    """(T, N): whether the step before lost a life. First steps of a game are in neither half."""
    lost = torch.from_numpy(np.concatenate([np.zeros((1, 2), bool), played.lost[:-1]]))
    first = torch.from_numpy(np.concatenate([np.ones((1, 2), bool), played.over[:-1]]))
    return lost, ~lost & ~first


def test_after_a_lost_life_only_fire_is_allowed(played):
    lost, free = lost_before(played)
    data, fire = played.data, torch.arange(played.agent.num_outputs) == 1
    assert (data["mask"][lost] == fire).all() and data["mask"][free].all()
    assert (data["actions"][lost] == 1).all() and (played.actions[lost.numpy()] == 1).all()
    assert (data["logprobs"][lost] == 0).all() and (data["logprobs"][free] < 0).all()
    assert data["actions"][free].unique().numel() == played.agent.num_outputs


def test_nothing_is_learned_from_an_action_that_was_forced(played):
    args, data = played.agent.args, played.data
    envs = atari.make_envs(args, 1)
    for rows, learned in zip(lost_before(played), (False, True), strict=True):
        agent, opt = atari.make_agent(envs, args, torch.device("cpu"), None)
        batch = {name: data[name][rows][None] for name in data if name in atari.BATCH}
        count = batch["values"].numel()
        batch |= {"advantages": torch.randn(1, count), "returns": batch["values"]}
        coefs = torch.tensor([1e-3, 0.1, 0.01, 0.0])  # vf_coef 0: the policy alone
        losses, before = torch.zeros(len(atari.LOSSES)), weights(agent)
        with torch.no_grad():
            atari.train_step(agent, opt, batch, torch.zeros(0, count, 16), torch.arange(count), coefs, losses)
        assert bool(losses[-1]) == learned and torch.equal(weights(agent), before) != learned


@pytest.mark.parametrize("env_id", ["Breakout", "Backgammon", "VideoCheckers"])
def test_fire_is_forced_wherever_it_stands_among_the_actions(env_id):
    envs, agent, _, env_state = small_agent(env_id=env_id)
    mask = atari.fire_mask(np.array([True, False]), agent)
    assert torch.equal(env_state.mask[0, 0], mask[0, 0]) and mask[0, 1].all()
    assert [envs.ale.get_action_set()[n] for n in mask[0, 0].nonzero()] == [FIRE]


@pytest.mark.parametrize("flags", [{"env_id": "MsPacman"}, {"env_id": "Freeway"}, {"fire_reset": False}],
                         ids=str)
def test_all_actions_are_allowed_without_fire(flags):
    envs, agent, _, env_state = small_agent(num_steps=128, **flags)
    data, _ = atari.rollout(envs, agent, agent, env_state)
    assert data["mask"].all() and (data["logprobs"] < 0).all()
    assert data["dones"].any() or "env_id" in flags


# ------------------------------------------------------------------------------------------------- cut games


@pytest.mark.parametrize("rnn", ["none", "gru"])
def test_a_cut_game_is_worth_what_its_last_picture_is(rnn):
    """24 steps of games of 10: two cuts each, and none where the rollout ends."""
    envs, agent, _, env_state = small_agent(env_id="SpaceInvaders", num_steps=24, max_frames=40, rnn=rnn)
    told = recorded(envs)
    data, episodes = atari.rollout(envs, agent, agent, env_state)
    cut = torch.from_numpy(array(told, "truncated"))
    assert cut.nonzero().tolist() == [[9, 0], [9, 1], [19, 0], [19, 1]]
    assert [length for *_, length in episodes] == [10] * 4
    assert torch.equal(data["dones"], cut.float()) and not data["final_values"][~cut].any()
    with torch.no_grad():
        for t, n in cut.nonzero().tolist():
            stacks = told[t][5]["final_obs"][n], told[t - 1][1][n]
            final, last = (torch.tensor(stack).permute(1, 2, 0) for stack in stacks)
            assert torch.equal(final[..., :-1], last[..., 1:])  # the older frames
            state = data["rnn_states"][t + 1, :, [n]]
            expected = agent.get_value(final[None, None], state, torch.zeros(1, 1)).item()
            assert data["final_values"][t, n].item() == pytest.approx(expected, abs=1e-6)
            assert abs(expected - data["values"][t + 1, n].item()) > 1e-4  # not the next game's


def test_without_truncation_bootstrap_a_cut_game_is_terminal():
    envs, agent, _, env_state = small_agent(env_id="SpaceInvaders", max_frames=40, truncation_bootstrap=False)
    data, _ = atari.rollout(envs, agent, agent, env_state)
    assert not data["final_values"].any() and data["dones"].sum() == 2


@pytest.mark.parametrize("max_frames", [4, 42])
def test_short_games_are_counted(max_frames):
    """Also those that are over at a frame at which the next one has not even begun."""
    envs, agent, _, env_state = small_agent(env_id="SpaceInvaders", num_steps=32, max_frames=max_frames)
    length = math.ceil(max_frames / 4)
    episodes = atari.rollout(envs, agent, agent, env_state)[1]
    assert [x for *_, x in episodes] == [length] * 2 * (32 // length)


# ------------------------------------------------------------------------------------------- names, bad flags


@pytest.fixture
def made(monkeypatch):
    """List of the games that make_envs asks for; none is made."""
    names = []
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", lambda name, *_, **__: names.append(name))
    return names


def test_names_and_sticky_actions_are_those_of_gymnasium(made):
    gym.register_envs(ale_py)
    specs = [spec for spec in gym.registry.values() if str(spec.entry_point).startswith("ale_py")]
    assert len(specs) > 300
    for spec in specs:
        atari.make_envs(small_args(env_id=spec.id), 1)
        assert made[-1] == spec.kwargs["game"]
        assert atari.Args(env_id=spec.id).sticky == spec.kwargs["repeat_action_probability"], spec.id


@pytest.mark.parametrize(("env_id", "flag", "sticky"), [
    ("Breakout", None, 0), ("ms_pacman", None, 0), ("BreakoutNoFrameskip-v4", None, 0),
    ("ALE/Breakout-v5", None, 0.25), ("ALE/Breakout-v5", 0.0, 0), ("Breakout", 0.1, 0.1),
])  # fmt: skip
def test_sticky_actions(env_id, flag, sticky):
    assert atari.Args(env_id=env_id, sticky_actions=flag).sticky == sticky


def test_every_game_has_all_its_spellings(made):
    games = set(ale_py.roms.get_all_rom_ids())
    two_players = {"combat", "joust", "maze_craze", "warlords"}
    assert len(games) > 100 and two_players < games
    for game in games - two_players:
        camel = game.title().replace("_", "")
        for name in (game, game.upper(), camel, camel.lower(), f"{camel}NoFrameskip-v4", f"ALE/{camel}-v5",
                     f"{camel}Deterministic-v4", f"{camel}-v4"):
            atari.make_envs(small_args(env_id=name), 1)
            assert made.pop() == game
    for game in two_players:  # for which ALE would end the process
        with pytest.raises(atari.UsageError, match="is no single-player game"):
            atari.make_envs(small_args(env_id=game), 1)


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id Brekout", "Brekout is no single-player game of ALE; close names: ['breakout'"),
    ("--env-id ALE/SpaceInvader-v5", "close names: ['space_invaders'"),
    ("--env-id MsPackman", "close names: ['ms_pacman'"),
    ("--env-id CartPole-v1", "CartPole-v1 is no single-player game"),
    ("--env-id ALE/Pong-v99", "ALE/Pong-v99 is no single-player game of ALE; close names: ['pong']"),
    ("--env-id Pong-v5", "Pong-v5 is no single-player game"), ("--screen-size 35", "screen_size = 35"),
    ("--num-minibatches 3", "1024 sequences / 3 minibatches"),
    ("--rnn lstm --num-minibatches 16", "8 sequences / 16 minibatches"),
    ("--rnn lstm --no-share-network", "an RNN needs share_network"),
    ("--frame-stack 0", "frame_stack = 0 is not in range: 1"), ("--frame-skip 0", "frame_skip = 0"),
    ("--frame-stack 100000", "frame_stack = 100000"), ("--noop-max 2147483647", "noop_max = 2147483647"),
    ("--max-frames 3000000000", "max_frames = 3000000000 is not in range"),
    ("--eval-episodes 3000000000", "eval_episodes = 3000000000 is not in range"),
    ("--noop-max -1", "noop_max = -1 is not in range: 0"), ("--max-frames 0", "max_frames = 0"),
    ("--sticky-actions 1.5", "sticky_actions = 1.5 is not in range: 0 to 1"),
    ("--sticky-actions nan", "sticky_actions = nan is not in range: 0 to 1"),
    ("--total-timesteps 1000", "leaves no rollout of 1024 steps"),
    ("--preset histrical", "preset histrical is none of none, historical, lstm"),
    ("--resume=", "'' holds no run of this script"), ("--evaluate=", "'' holds no run of this script"),
])  # fmt: skip
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    assert words in refused(f"--no-compile {flags}", tmp_path, monkeypatch, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("package", "flags"), [("ale_py", ""), ("moviepy", "--capture-video")])
def test_a_missing_package_is_one_sentence(package, flags, tmp_path, monkeypatch, capsys):
    """A video is tried before the training."""
    monkeypatch.setitem(sys.modules, package, None)
    assert package in refused(f"--no-compile {flags}", tmp_path, monkeypatch, capsys)
    assert not list(tmp_path.iterdir())


def test_presets_are_flags(monkeypatch):
    trained = []
    monkeypatch.setattr(atari, "train", lambda args, checkpoint: trained.append(args))
    for flags in ("", "--preset historical", "--preset lstm --rnn-hidden 64 --precision bf16"):
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags.split()])
        atari.main()
    default, historical, lstm = trained
    assert default == atari.Args(preset="none")
    assert historical == atari.Args(preset="historical", truncation_bootstrap=False, precision="fp32")
    assert lstm == atari.Args(preset="lstm", rnn="lstm", frame_stack=1, truncation_bootstrap=False,
                              rnn_hidden=64, precision="bf16")


# ---------------------------------------------------------------------------------------- the first minibatch

AGENTS = {
    "cnn": {},
    "networks apart": {"share_network": False},
    "gru": {"rnn": "gru"},
    "lstm": {"rnn": "lstm"},
    "lstm, short sequences": {"rnn": "lstm", "rnn_seq_len": 8},
    "lstm, no reset": {"rnn": "lstm", "rnn_reset": False},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("flags", AGENTS.values(), ids=AGENTS)
@pytest.mark.usefixtures("weights_that_move")
def test_first_minibatch_has_ratio_1(flags, tmp_path, monkeypatch):
    """Of two rollouts with an update in between, lost lives, cut games and FIRE in both.

    bf16 rounds to 8 bits, and a minibatch of another size adds up in another order: 1 % of a probability."""
    near = 1e-2 if "precision" in flags else 1e-5
    differences, divergences, data, last = [], [], [], []
    train_step, rollout = atari.train_step, atari.rollout

    def step(agent, opt, batch, state, index, coefs, losses):
        mb = {name: x[:, index] for name, x in batch.items()}
        logprob = agent(mb["obs"], state[:, index], mb["starts"], mb["mask"], mb["actions"])[1]
        differences.append((logprob - mb["logprobs"]).abs().max().item())
        alone, before = torch.zeros_like(losses), weights(agent)
        train_step(agent, opt, batch, state, index, coefs, alone)
        assert not torch.equal(weights(agent), before)
        divergences.append(alone[atari.LOSSES.index("approx_kl")].item())
        losses.add_(alone)
        last[:] = agent, opt

    def play(*args):
        result = rollout(*args)
        data.append(result[0])
        return result

    monkeypatch.setattr(atari, "train_step", step)
    monkeypatch.setattr(atari, "rollout", play)
    atari.train(small_args(num_steps=48, max_frames=120, total_timesteps=192, learning_rate=5e-3,
                           anneal_lr=False, checkpoint_every=1000, run_dir=str(tmp_path / "run"), **flags))
    assert len(differences) == 8  # two minibatches in two epochs of two iterations
    for i, played in enumerate(data[:2]):
        assert played["final_values"].any() and (~played["mask"]).any()
        assert played["dones"].sum() > (played["final_values"] != 0).sum()
        assert differences[4 * i] < near and abs(divergences[4 * i]) < near**2 + 1e-7
        assert near**2 + 1e-7 < abs(divergences[4 * i + 3])
    agent, opt = last
    addresses = [p.data_ptr() for p in agent.parameters()]
    sizes = [4 * p.numel() for p in agent.parameters()]
    assert addresses == [opt["params"].data_ptr() + sum(sizes[:i]) for i in range(len(sizes))]


def step_by_step(agent, obs, state, starts):
    """Features of actor and critic from one call of the recurrent layer for each step."""
    actors, critics = [], []
    for t in range(len(obs)):
        if agent.args.rnn_reset:
            state = state * (1 - starts[t, :, None])
        actor, critic, state = agent.encode(obs[t : t + 1], state, torch.zeros_like(starts[:1]))
        actors, critics = [*actors, actor], [*critics, critic]
    return torch.cat(actors), torch.cat(critics), state


@pytest.mark.parametrize("flags", [flags for flags in AGENTS.values() if "rnn" in flags], ids=str)
def test_stretches_of_steps_equal_a_loop_with_resets(flags):
    agent = new_agent(**flags)
    obs = torch.randint(256, (10, 3, 36, 36, 4), dtype=torch.uint8)
    state, starts = torch.randn(agent.num_states, 3, 16), (torch.rand(10, 3) < 0.2).float()
    starts[0], starts[-1] = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 0, 1])
    with torch.no_grad():
        for ours, expected in zip(agent.encode(obs, state, starts),
                                  step_by_step(agent, obs, state, starts), strict=True):
            torch.testing.assert_close(ours, expected)
        without, _, _ = agent.encode(obs, state, torch.zeros_like(starts))
        assert torch.allclose(agent.encode(obs, state, starts)[0], without) != agent.args.rnn_reset


# ----------------------------------------------------------------------------------------- networks, pictures


@pytest.mark.parametrize(("flags", "count"), [
    ({}, 1_686_693), ({"share_network": False, "full_actions": True}, 2 * 1_684_128 + 19 * 513),
    ({"frame_stack": 2, "grayscale": False, "screen_size": 36}, 1_686_693 + 2 * 2048 - 48 * 64 * 512),
    ({"rnn": "lstm", "rnn_hidden": 128, "frame_stack": 1},
     1_684_128 - 3 * 2048 + 4 * 128 * (512 + 128 + 2) + 5 * 129),
], ids=str)  # fmt: skip
def test_networks_have_as_many_weights_as_the_papers(flags, count):
    """8224 + 32,832 + 36,928 in convolutions, 1,606,144 in 512 units, 513 for each action and the value."""
    _, agent, _, env_state = small_agent(**{"screen_size": 84} | flags)
    assert sum(p.numel() for p in agent.parameters()) == count
    assert env_state.obs.shape == (1, 2, agent.args.screen_size, agent.args.screen_size,
                                agent.args.frame_stack * (1 if agent.args.grayscale else 3))


def test_the_value_has_a_network_of_its_own_without_share_network():
    agent = new_agent(share_network=False)
    obs = torch.randint(256, (1, 2, 36, 36, 4), dtype=torch.uint8)
    agent.get_value(obs, torch.zeros(0, 2, 16), torch.zeros(1, 2)).sum().backward()
    assert [any(p.grad is not None and p.grad.any() for p in trunk.parameters())
            for trunk in agent.trunks] == [False, True]


@pytest.mark.parametrize(("flags", "high"), [({}, 1.0), ({"scale_obs": False}, 255.0)], ids=str)
def test_pixels_reach_the_network_from_0_to(flags, high):
    agent, seen = new_agent(**flags), []
    agent.trunks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs = torch.arange(256).repeat(41)[: 2 * 36 * 36 * 4].view(1, 2, 36, 36, 4).to(torch.uint8)
    agent.get_value(obs, torch.zeros(0, 2, 16), torch.zeros(1, 2))
    assert (seen[0].min(), seen[0].max()) == (0, high)
    torch.testing.assert_close(seen[0], obs[0].permute(0, 3, 1, 2) / 255 * high)


def test_bf16_is_used_and_rounds_a_little():
    exact, rounded = (new_agent(ortho_init=False, precision=name) for name in ("fp32", "bf16"))
    rounded.load_state_dict(exact.state_dict())
    obs = torch.randint(256, (1, 50, 36, 36, 4), dtype=torch.uint8)
    inputs = obs, torch.zeros(0, 50, 16), torch.zeros(1, 50)
    exact, rounded = exact.encode(*inputs)[0], rounded.encode(*inputs)[0]
    assert rounded.dtype == torch.float32 and (exact - rounded).abs().max() > 1e-5
    torch.testing.assert_close(rounded, exact, atol=0.02 * exact.max().item(), rtol=0)


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_frames_move_through_the_stack_and_a_rollout_keeps_them(frame_stack):
    envs, agent, _, env_state = small_agent(env_id="Pong", num_steps=32, frame_stack=frame_stack)
    told = recorded(envs)
    obs = atari.rollout(envs, agent, agent, env_state)[0]["obs"]
    assert torch.equal(obs[1:, ..., :-1], obs[:-1, ..., 1:]) and not torch.equal(obs[30], obs[31])
    assert np.array_equal(obs[1:].permute(0, 1, 4, 2, 3), array(told, "obs")[:-1])


# ------------------------------------------------------------------------------------------ evaluation, video


def evaluated(monkeypatch, agent):
    """What the games told and the `starts` (T, N) that the agent saw, of both evaluations; the summary."""
    told, starts, make = [], [], atari.make_envs

    def make_recorded(*args):
        envs = make(*args)
        told.append(recorded(envs))
        starts.append([])
        return envs

    monkeypatch.setattr(atari, "make_envs", make_recorded)
    agent.register_forward_pre_hook(lambda module, inputs: starts[-1].append(inputs[2][0].numpy()))
    summary = atari.evaluate(agent, Path("none"), 1000)
    return told, [np.array(x) for x in starts], summary


def check_scores(summary, kind, scores):
    name = ("eval", "eval_sampled")[kind]
    assert summary[f"{name}_mean"] == pytest.approx(np.mean(scores))
    assert summary[f"{name}_std"] == pytest.approx(np.std(scores))


def test_evaluation_plays_one_whole_game_for_its_raw_score(monkeypatch, capsys):
    _, agent, _, _ = small_agent(env_id="Berzerk", eval_episodes=2)
    all_told, _, summary = evaluated(monkeypatch, agent)
    for kind, told in enumerate(all_told):
        lives, rewards = array(told, "lives"), array(told, "rewards")
        scores = []
        for n in range(2):
            end, *_ = np.flatnonzero(np.diff(lives[:, n]) > 0) + 1
            assert set(lives[:end, n]) == {3, 2, 1}
            scores.append(rewards[: end + 1, n].sum())
        check_scores(summary, kind, scores)
        assert max(scores) >= 50 and len(set(scores)) > 1
    words = "Berzerk after 1,000 steps: 2 games of at most 108,000 frames, "
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [f"{words}deterministic actions", f"{words}sampled actions"]


def test_evaluation_of_an_endless_game_ends(monkeypatch):
    """After max_frames, whoever plays: here games of Breakout in which the ball is never lost."""
    _, agent, _, _ = small_agent(max_frames=203, fire_reset=False, episodic_life=False)
    agent.actor.bias.data[0] = 1e3  # NOOP: without FIRE there is no ball
    all_told, _, summary = evaluated(monkeypatch, agent)
    assert [len(told) for told in all_told] == [64, 64]  # 51 steps, in rollouts of 16
    assert array(all_told[0], "truncated")[:, 0].nonzero()[0].tolist() == [50] and summary["eval_mean"] == 0


def test_evaluation_begins_a_memory_anew_where_training_does(monkeypatch):
    _, agent, _, _ = small_agent(rnn="gru", max_frames=600)
    all_told, all_starts, _ = evaluated(monkeypatch, agent)
    dones = array(all_told[1], "terminated") | array(all_told[1], "truncated")
    lives = array(all_told[1], "lives")
    assert (np.diff(lives, axis=0, prepend=5) < 0).any() and all_starts[1][0] == 1
    assert np.array_equal(all_starts[1][1:], dones[:-1])


def test_evaluation_forces_fire_after_a_lost_life(monkeypatch):
    _, agent, _, _ = small_agent(max_frames=600)
    told = evaluated(monkeypatch, agent)[0][0]
    lives, actions = array(told, "lives")[:, 0], array(told, "actions")[:, 0]
    after = np.flatnonzero(np.diff(lives) < 0) + 2
    assert len(after) > 1 and (actions[after[after < len(actions)]] == 1).all()


@pytest.mark.parametrize(("env_id", "flags"), [
    ("Breakout", {}), ("ALE/Breakout-v5", {}), ("ALE/Berzerk-v5", {"noop_max": 0}),
    ("Qbert", {"full_actions": True, **STICKY}), ("Breakout", {"fire_reset": False, **STICKY}),
    ("Pooyan", {"frame_skip": 3, "max_frames": 900}),  # 220 pixels high, not 210
], ids=str)  # fmt: skip
def test_a_video_is_the_same_game(env_id, flags, tmp_path, monkeypatch):
    """In color, one frame per step, up to the end of the first game."""
    moviepy = pytest.importorskip("moviepy")
    flags = {"max_frames": 3000, **flags}  # the test keeps every frame
    _, agent, _, _ = small_agent(env_id=env_id, eval_episodes=2, capture_video=True, **flags)
    with torch.no_grad():
        agent.actor.weight.mul_(100)  # some variety in deterministic actions
    all_told, all_envs, make = [], [], atari.make_envs

    def make_recorded(args, num_envs):
        envs = make(args, num_envs)
        all_envs.append((args, num_envs))
        all_told.append(recorded(envs))
        return envs

    monkeypatch.setattr(atari, "make_envs", make_recorded)
    atari.evaluate(agent, tmp_path, 0)
    assert [num_envs for _, num_envs in all_envs] == [2, 1, 2]  # deterministic, its video, sampled
    game, video = all_told[:2]
    for name in ("actions", "rewards", "lives", "episode_frame_number"):
        assert np.array_equal(array(game, name)[: len(video), 0], array(video, name)[:, 0]), name
    assert (array(video, "terminated") | array(video, "truncated"))[-1]
    frames = array(video, "obs")[:, 0, 0]
    clip = moviepy.VideoFileClip(str(tmp_path / "videos" / "episode-0.mp4"))
    assert clip.size == [420, 420] and clip.fps == 60 / agent.args.frame_skip
    assert clip.duration == pytest.approx(len(video) / clip.fps, abs=0.1)
    for t in (0, len(video) // 2):
        picture = clip.get_frame((t + 0.5) / clip.fps)
        assert abs(picture - frames[t].astype(float)).mean() < 10
        assert np.ptp(frames[t].astype(int), axis=-1).max() > 50  # in color
    clip.close()


# -------------------------------------------------------------------------------------------- a game of ours


class Sides:
    """The side of a bright square says which action earns 1, RIGHT or LEFT; NOOP earns nothing.

    A game has one step, or goes on for ever and is cut after `length` of them."""

    def __init__(self, args, num_envs, length=None):
        self.num_envs, self.cut, self.length = num_envs, length is not None, 1 if length is None else length
        self.single_action_space = gym.spaces.Discrete(3)
        actions = [ale_py.Action.NOOP, ale_py.Action.RIGHT, ale_py.Action.LEFT]
        self.ale = SimpleNamespace(get_action_set=lambda: actions)
        self.shape = (num_envs, args.frame_stack, args.screen_size, args.screen_size)

    def reset(self, seed):
        self.rng, self.total = np.random.default_rng(seed), np.zeros(self.num_envs, int)
        self.t = np.zeros(self.num_envs, int)
        return self.picture(), self.infos()

    def picture(self):
        self.side, obs = self.rng.integers(2, size=self.num_envs), np.zeros(self.shape, np.uint8)
        for n, side in enumerate(self.side):
            obs[n, :, 12:24, 4 + 18 * side : 14 + 18 * side] = 255
        return obs

    def infos(self):
        return {"lives": np.zeros(self.num_envs, int), "episode_frame_number": 4 * self.t + 1,
                "frame_number": 4 * self.total + self.t * 4 + 1}

    def step(self, actions):
        reward, final = (actions == self.side + 1).astype(np.int32), self.picture()
        ended = self.t + 1 == self.length
        self.total += ended * (self.t + 1)
        self.t = (self.t + 1) * ~ended
        obs = self.picture() if ended.all() else final
        return obs, reward, ended & (not self.cut), ended & self.cut, self.infos() | {"final_obs": final}

    def close(self):
        pass


def test_evaluation_counts_the_first_game_only(monkeypatch):
    """Others are played while the longest still goes on."""
    lengths = np.array([2, 5, 9])
    monkeypatch.setattr(atari, "make_envs", partial(Sides, length=lengths))
    agent = new_agent(3, frame_stack=1, eval_episodes=3)
    all_told, _, summary = evaluated(monkeypatch, agent)
    for kind, told in enumerate(all_told):
        rewards = array(told, "rewards")
        assert len(told) == 16
        check_scores(summary, kind, [rewards[:length, n].sum() for n, length in enumerate(lengths)])
    assert rewards.sum(0).mean() > summary["eval_sampled_mean"] > 0


def test_evaluation_plays_the_likeliest_actions_then_samples(monkeypatch):
    monkeypatch.setattr(atari, "make_envs", partial(Sides, length=30))
    agent = new_agent(3, frame_stack=1)
    agent.actor.bias.data[1] = 0.5
    greedy, sampled = evaluated(monkeypatch, agent)[0]
    assert set(array(greedy, "actions").ravel()) == {1}
    assert set(array(sampled, "actions").ravel()) == {0, 1, 2}


@pytest.mark.parametrize(("length", "flags", "value"), [
    (None, {}, 1.0), (5, {"gamma": 0.8}, 5.0),  # 1 / (1 - gamma)
], ids=["one step", "for ever, cut"])  # fmt: skip
def test_the_side_of_a_square_is_learned(length, flags, value, tmp_path, monkeypatch):
    monkeypatch.setattr(atari, "make_envs", partial(Sides, length=length))
    args = small_args(num_envs=16, num_minibatches=4, update_epochs=4, learning_rate=1e-3, clip_vloss=False,
                      eval_episodes=50, total_timesteps=4096, frame_stack=1, run_dir=str(tmp_path / "run"),
                      **flags)
    summary = atari.train(args)
    assert summary["eval_mean"] > 0.98 * (length or 1) and summary["eval_sampled_mean"] > 0.9 * (length or 1)
    checkpoint, _ = atari.load_checkpoint(tmp_path / "run")
    envs = Sides(args, 20)
    agent, _ = atari.make_agent(envs, args, torch.device("cpu"), checkpoint)
    env_state = atari.reset_envs(envs, agent, 1)
    with torch.no_grad():
        values = agent.get_value(env_state.obs, env_state.rnn_state, env_state.starts)
    assert values.mean().item() == pytest.approx(value, rel=0.1) and values.std() < 0.1 * value


# ----------------------------------------------------------------------------------------------- command line

# Four iterations of 32 steps, a checkpoint after every second.
SHORT = """--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --total-timesteps 128
           --screen-size 44 --max-frames 200 --eval-episodes 1 --rnn-hidden 16 --checkpoint-every 2
           --device cpu --precision fp32 --no-compile --torch-threads 1 --env-threads 1"""
# kill -9 in the fourth iteration.
DRIVER = """
import os
import signal
import ppo_atari as atari

calls, rollout = [], atari.rollout

def killed(*args):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return rollout(*args)

atari.rollout = killed
atari.main()
"""
# What each process of torchrun saw and learned.
RANKS = """
import os
import torch
import ppo_atari as atari

rollouts, optimizers, rollout, make_agent = [], [], atari.rollout, atari.make_agent

def recorded_rollout(*args):
    rollouts.append(rollout(*args))
    return rollouts[-1]

def recorded_make_agent(*args):
    agent, opt = make_agent(*args)
    optimizers.append(opt)
    return agent, opt

atari.rollout, atari.make_agent = recorded_rollout, recorded_make_agent
atari.main()
rank = {"params": optimizers[0]["params"], "obs": torch.stack([r[0]["obs"] for r in rollouts[:4]])}
torch.save(rank, f"rank{os.environ['RANK']}.pt")
"""


def unboxed(text):
    """Text in tyro's boxes on one line."""
    return re.sub(r"[\s│╭╮╰╯─]+|-{5,}", " ", text)


def read_metrics(run_dir):
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def load(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def start(folder, flags, command=SCRIPT.name):
    """The script, copied alone into that folder, in a process of its own."""
    shutil.copy(SCRIPT, folder)
    return subprocess.Popen([sys.executable, *command.split(), *flags.split()], cwd=folder, text=True,
                            env=os.environ | {"PYTHONPATH": "."},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out


def main(flags, folder, monkeypatch):
    """The script in this process, with that folder as its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags.split()])
    atari.main()


def refused(flags, folder, monkeypatch, capsys):
    """Exit status 2 and one sentence on stderr, which is returned; nothing on stdout."""
    with pytest.raises(SystemExit) as stop:
        main(flags, folder, monkeypatch)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert "--help" in err or (err.startswith("error: ") and err.count("\n") == 1)  # tyro's box, or ours
    return unboxed(err)


def check_same(run_dir, expected):
    """The same weights, optimizer, statistics and metrics, but for the time they took."""
    one, two = load(run_dir), load(expected)
    assert one["opt"]["exp_avg"].any() and one["progress"]["iteration"] == two["progress"]["iteration"]
    for part in ("agent", "opt"):
        assert one[part].keys() == two[part].keys()
        assert [name for name in one[part] if not torch.equal(one[part][name], two[part][name])] == []
    rows = [read_metrics(folder) for folder in (run_dir, expected)]
    for row in (*rows[0], *rows[1]):
        del row["seconds"], row["SPS"]
    assert rows[0] == rows[1] and rows[0]


@pytest.fixture(scope="module")
def breakout(tmp_path_factory):
    """A finished run in an empty folder, and what it printed."""
    folder = tmp_path_factory.mktemp("breakout")
    return folder / "run", finish(start(folder, f"{SHORT} --run-dir run"))


def test_short_run(breakout):
    run_dir, printed = breakout
    assert {p.name for p in run_dir.parent.iterdir()} - {"__pycache__"} == {"ppo_atari.py", "run"}
    args, summary = (json.loads((run_dir / name).read_text()) for name in ("args.json", "summary.json"))
    rows = read_metrics(run_dir)
    assert args["env_id"] == "Breakout" and args["torch"] == torch.__version__
    assert args["precision"] == "fp32" and args["script"] == "ppo_atari"
    assert [int(row["global_step"]) for row in rows] == [32, 64, 96, 128]
    assert all(math.isfinite(float(row[name])) for row in rows for name in (*atari.LOSSES, "SPS"))
    assert summary["env_id"] == "Breakout" and summary["global_step"] == 128 and summary["eval_episodes"] == 1
    assert all(math.isfinite(value) for value in summary.values() if value != "Breakout")
    checkpoint = load(run_dir)
    assert checkpoint["progress"]["global_step"] == 128
    assert all(x.isfinite().all() for x in (*checkpoint["agent"].values(), *checkpoint["opt"].values()))
    assert printed.startswith("cpu, fp32, sticky actions 0.0\nBreakout, seed 1, preset none, folder run\n")
    assert "1 games of at most 200 frames" in printed and "--evaluate 'run'" in printed


def test_evaluate_repeats_the_evaluation(breakout, monkeypatch, capsys):
    run_dir, printed = breakout
    main("--evaluate run", run_dir.parent, monkeypatch)
    again = capsys.readouterr().out
    assert again.count("return") == 2 and again in printed


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atari.time, "time", lambda: 1000.0)
    args = small_args(env_id="ALE/Pong-v5")
    folders = [atari.RunLog(args, 0).run_dir for _ in range(2)]
    assert folders == [Path(f"runs/ALE_Pong-v5__ppo_atari__1__1000{end}") for end in ("", f"_{os.getpid()}")]


def test_a_folder_that_is_there_is_refused(breakout, tmp_path, monkeypatch, capsys):
    shutil.copytree(breakout[0], tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}
    with pytest.raises(SystemExit) as stop:
        main(f"{SHORT} --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code == 2 and "File exists: 'run'" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()} == before


def test_weights_that_are_not_finite_are_refused(breakout, tmp_path, monkeypatch, capsys):
    shutil.copytree(breakout[0], tmp_path / "run")
    checkpoint = load(tmp_path / "run")
    checkpoint["opt"]["params"][7] = math.nan
    torch.save(checkpoint, tmp_path / "run" / "checkpoint.pt")
    for flags in ("--evaluate run", "--resume run --total-timesteps 256"):
        assert "weights are not finite" in refused(flags, tmp_path, monkeypatch, capsys)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys):
    def broken(agent, opt, batch, state, index, coefs, losses):
        losses += math.nan if int(coefs[0] < 1e-4) else 0.0

    monkeypatch.setattr(atari, "train_step", broken)
    with pytest.raises(SystemExit) as stop:
        main(f"{SHORT} --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code.startswith("error: policy_loss not finite in iteration 4; the last checkpoint")
    assert load(tmp_path / "run")["progress"]["iteration"] == 2


def test_killed_while_it_was_evaluated(breakout, tmp_path, monkeypatch):
    """A run killed after its last step has all but its summary, which a resume then writes."""
    shutil.copytree(breakout[0], tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    before = json.loads(summary.read_text())
    summary.unlink()
    main("--resume run", tmp_path, monkeypatch)
    assert json.loads(summary.read_text()) == before


def test_live_changes(tmp_path, monkeypatch, capsys):
    rollout = atari.rollout

    def play(*args):
        path = tmp_path / "run" / "live.json"
        if not path.with_name("live-32.json").exists():
            path.write_text('{"learning_rate": 0.001, "update_epochs": 1}')
        return rollout(*args)

    monkeypatch.setattr(atari, "rollout", play)
    main(f"{SHORT} --no-anneal-lr --run-dir run", tmp_path, monkeypatch)
    rows = read_metrics(tmp_path / "run")
    assert [float(row["learning_rate"]) for row in rows] == [2.5e-4, 1e-3, 1e-3, 1e-3]
    assert [int(row["epochs"]) for row in rows] == [2, 1, 1, 1]
    assert load(tmp_path / "run")["args"]["update_epochs"] == 1


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_run_agrees_with_eager(breakout, tmp_path, monkeypatch):
    """In float32, and in bf16 as far as its rounding allows; also after an update, at another rate.

    A number that changes later is not frozen into the graph: a huge epsilon stops Adam."""
    read_live, params = atari.read_live, []

    def change(args, log, global_step):
        if global_step == 64:
            args.adam_eps = 1e9
            params.append(load(tmp_path / args.run_dir)["opt"]["params"])
        return read_live(args, log, global_step)

    monkeypatch.setattr(atari, "read_live", change)
    for precision, rel in (("fp32", 1e-2), ("bf16", 0.1)):
        flags = f"--compile --precision {precision} --run-dir {precision}"
        main(f"{SHORT} {flags}", tmp_path, monkeypatch)
        compiled, eager = (read_metrics(run_dir) for run_dir in (tmp_path / precision, breakout[0]))
        for name in ("value_loss", "entropy", "grad_norm"):
            one, two = ([float(row[name]) for row in rows[:2]] for rows in (compiled, eager))
            assert one == pytest.approx(two, rel=rel), name
        assert (load(tmp_path / precision)["opt"]["params"] - params[-1]).abs().max() < 1e-7


def test_two_processes_train_the_same_weights(tmp_path):
    (tmp_path / "driver.py").write_text(RANKS)
    launcher = "-m torch.distributed.run --standalone --nproc-per-node=2 driver.py"
    finish(start(tmp_path, f"{SHORT} --total-timesteps 256 --run-dir run", launcher))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert not torch.equal(ranks[0]["obs"], ranks[1]["obs"])
    for rank in ranks:
        assert torch.equal(rank["params"], load(tmp_path / "run")["opt"]["params"])
    assert [int(row["global_step"]) for row in read_metrics(tmp_path / "run")] == [64, 128, 192, 256]


@pytest.mark.parametrize("flags", ["", "--rnn lstm --rnn-seq-len 8 --env-id ALE/SpaceInvaders-v5"], ids=str)
def test_killed_and_resumed_is_the_same(flags, breakout, tmp_path, monkeypatch):
    expected = breakout[0]
    if flags:
        main(f"{SHORT} {flags} --run-dir expected", tmp_path, monkeypatch)
        expected = tmp_path / "expected"
    (tmp_path / "driver.py").write_text(DRIVER)
    finish(start(tmp_path, f"{SHORT} {flags} --run-dir run", "driver.py"), code=-signal.SIGKILL)
    assert load(tmp_path / "run")["progress"]["iteration"] == 2
    main("--resume run", tmp_path, monkeypatch)
    check_same(tmp_path / "run", expected)


def test_ctrl_c_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    calls, rollout = [], atari.rollout

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return rollout(*args)

    monkeypatch.setattr(atari, "rollout", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(f"{SHORT} --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code == 130 and "Traceback" not in capsys.readouterr().err
    rows = read_metrics(tmp_path / "run")
    assert load(tmp_path / "run")["progress"]["iteration"] == 2 and len(rows) == 3
    main("--resume run", tmp_path, monkeypatch)
    resumed = read_metrics(tmp_path / "run")
    assert resumed[:2] == rows[:2] and [int(row["global_step"]) for row in resumed] == [32, 64, 96, 128]
    assert (tmp_path / "run" / "summary.json").exists()


def test_ctrl_c_in_the_first_iteration_ends_at_once(tmp_path, monkeypatch):
    """That is when the compiler runs, which would die of it, too."""
    monkeypatch.setattr(atari, "train_step", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as stop:
        main(f"{SHORT} --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code == 130
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_checkpoint_of_another_game_is_refused(breakout, tmp_path, monkeypatch, capsys):
    shutil.copytree(breakout[0], tmp_path / "run")
    words = refused("--evaluate run --env-id SpaceInvaders", tmp_path, monkeypatch, capsys)
    assert "the checkpoint does not fit SpaceInvaders" in words
