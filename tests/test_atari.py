"""Atari: games against a plain loop over ALE, lost lives, cut games, details 14 to 22, the command line."""

import json
import math
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
from conftest import hyper_of
from test_cli import train_in_two_processes, unboxed
from test_resume import check_resume_only_evaluates, check_same, finish, read_metrics

import ppo_atari as atari

SCRIPT = Path(__file__).parent.parent / "ppo_atari.py"
SMALL = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 128,
         "screen_size": 36, "eval_episodes": 1, "rnn_hidden": 16, "device": "cpu", "compile": False,
         "precision": "fp32", "torch_threads": 1, "env_threads": 1}
FIRE = ale_py.Action.FIRE
STICKY = {"sticky_actions": 0.25}


def small_args(**flags):
    return atari.Args(**SMALL | flags)


def small_agent(**flags):
    """Games, agent, optimiser state and stream of a run that has just begun."""
    args = small_args(**flags)
    envs, agent, opt = atari.build(args, None, args.num_envs, atari.set_up_torch(args))
    return envs, agent, opt, atari.restart(envs, agent, 0, 0)


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
        self.ale.loadROM(ale_py.roms.get_rom_path(atari.game_name(args.env_id)))
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
    return envs.reset(seed=np.array(seeds))[1]["episode_frame_number"]


@pytest.mark.parametrize(("env_id", "steps", "flags"), [
    ("ALE/Breakout-v5", 250, {"screen_size": 84}), ("ALE/Pong-v5", 150, {"screen_size": 84}),
    ("ALE/SpaceInvaders-v5", 150, {"screen_size": 84}), ("SpaceInvaders", 80, {"max_pool": False}),
    ("Breakout", 80, {"grayscale": False, "frame_skip": 2, "frame_stack": 3}),
    ("Breakout", 80, {"full_actions": True, "frame_skip": 1}),
    ("Breakout", 80, {"fire_reset": False, "noop_max": 5}),
], ids=str)  # fmt: skip
def test_games_are_those_of_a_plain_loop(env_id, steps, flags):
    """A grey level may differ by the half that it is rounded by, and OpenCV sums in float32."""
    envs, agent, _, _ = small_agent(env_id=env_id, **flags)
    games = [PlainGames(agent.args, seed) for seed in (3, 4)]
    for game, frame in zip(games, first_frames(envs, [3, 4]), strict=True):
        game.begin(frame)
    stream, rng = atari.reset_stream(envs, agent, [3, 4]), np.random.default_rng(0)
    scores, endings = np.zeros(2), 0
    for t in range(steps):
        for n, game in enumerate(games):
            assert stream.lives[n] == game.ale.lives()
            if t % 5 == 0 or game.ale.getEpisodeFrameNumber() < 60:
                assert np.abs(stream.obs[0, n].numpy() - game.picture()).max() < 0.501
        action = rng.integers(agent.num_actions, size=2)
        action_tensor = torch.from_numpy(action)[None, :, None]
        reward, terminated, truncated, infos = atari.step_games(envs, stream, action_tensor)
        for n, game in enumerate(games):
            game.step(action[n])
            scores[n] += game.reward
            assert (reward[n], truncated[n]) == (game.reward, False)
            assert (terminated[n], infos["over"][n]) == (game.lost or game.over, game.over)
            if game.over:
                game.begin(infos["episode_frame_number"][n])
                endings += 1
            assert infos["episode_frame_number"][n] == game.ale.getEpisodeFrameNumber()
    assert (stream.episode_return == scores).all()
    assert steps == 80 or scores.any()
    assert endings or steps < 200


@pytest.mark.parametrize(("env_id", "flags", "frames"), [
    ("Breakout", {}, range(1, 30)), ("Breakout", {"noop_max": 0}, [1]),
    ("Breakout", {"noop_max": 4, "fire_reset": False}, range(4)), ("Freeway", {"noop_max": 4}, range(4)),
], ids=str)  # fmt: skip
def test_a_game_begins_after_fewer_than_noop_max_frames(env_id, flags, frames):
    envs = atari.make_games(small_args(env_id=env_id, max_frames=1, **flags), 2)
    first = [*first_frames(envs, [3, 4])]
    for _ in range(20):  # each step is a game
        first += [*envs.step(np.zeros(2, int))[4]["episode_frame_number"]]
    assert set(first) <= set(frames) and len(set(first)) > len(frames) / 2


def test_a_game_of_breakout_begins_with_the_ball_in_play():
    """Also where FIRE may not stick. Nothing is done but what the mask demands: no ball, no life lost."""
    envs, _, _, stream = small_agent(num_envs=6, **STICKY)
    lost = np.zeros(6, bool)
    for _ in range(60):
        allowed = atari.fire_mask(stream)
        action = allowed.int().argmax(-1, keepdim=True)  # NOOP where it is allowed
        lost |= atari.step_games(envs, stream, action)[1]
    assert lost.all()


# ----------------------------------------------------------------------------------------------- lost lives


@pytest.fixture(scope="module", params=["Breakout", "Berzerk"])
def played(request):
    """A rollout of whole games, and what the games told."""
    envs, agent, _, stream = small_agent(env_id=request.param, num_steps=300)
    lives, told = stream.lives, recorded(envs)
    rollout, episodes = atari.collect(envs, agent, agent, stream)
    told = {name: array(told, name) for name in ("actions", "rewards", "terminated", "lives",
                                                  "episode_frame_number")}
    before = np.concatenate([lives[None], told["lives"][:-1]])
    over, lost = told["lives"] > before, told["lives"] < before
    assert over.any() and lost.any()
    return SimpleNamespace(agent=agent, rollout=rollout, episodes=episodes, over=over, lost=lost, **told)


def test_the_game_goes_on_after_a_lost_life(played):
    """Up to the last life, and in none of them is the game begun anew."""
    assert ((np.diff(played.episode_frame_number, axis=0) < 0) == played.over[1:]).all()
    all_lives = set(range(1, 6 if played.agent.args.env_id == "Breakout" else 4))
    assert set(played.lives.ravel()) == all_lives
    assert (played.terminated == (played.lost | played.over)).all()


def test_a_lost_life_ends_the_return_but_not_the_score(played):
    rollout = played.rollout
    assert np.array_equal(rollout["terminated"], played.terminated)
    assert np.array_equal(rollout["done"], played.terminated)
    assert torch.equal(rollout["starts"][1:], rollout["done"][:-1])
    scores, lengths, ended = np.zeros(2), np.zeros(2), []
    for reward, over in zip(played.rewards, played.over, strict=True):
        scores, lengths = scores + reward, lengths + 1
        ended += [(scores[n], lengths[n]) for n in np.flatnonzero(over)]
        scores, lengths = scores * ~over, lengths * ~over
    assert played.episodes == ended and sum(score for score, _ in ended) > 0


def test_no_value_flows_over_a_lost_life(played):
    rollout, lost = played.rollout, torch.from_numpy(played.lost)
    with torch.no_grad():
        after = atari.next_values(played.agent, rollout, rollout["values"])
    for gae_lambda in (0.0, 0.95):
        advantages = atari.compute_gae(rollout["rewards"], rollout["values"], after, rollout["terminated"],
                                       rollout["done"], 0.99, gae_lambda)
        torch.testing.assert_close(advantages[lost], (rollout["rewards"] - rollout["values"])[lost])
    assert not torch.allclose(advantages[~lost], (rollout["rewards"] - rollout["values"])[~lost])


def test_learning_sees_the_sign_of_a_reward(played):
    assert np.array_equal(played.rollout["rewards"], np.sign(played.rewards)) and played.rewards.any()


def test_learning_sees_the_reward_without_sign_rewards():
    envs, agent, _, stream = small_agent(env_id="SpaceInvaders", num_steps=128, sign_rewards=False)
    told = recorded(envs)
    rewards = atari.collect(envs, agent, agent, stream)[0]["rewards"].numpy()
    assert np.array_equal(rewards, array(told, "rewards")) and rewards.max() >= 5


def test_without_episodic_life_only_a_games_end_is_terminated():
    envs, agent, _, stream = small_agent(num_steps=256, episodic_life=False)
    told = recorded(envs)
    rollout, episodes = atari.collect(envs, agent, agent, stream)
    lives = array(told, "lives")
    over, lost = np.diff(lives, axis=0) > 0, np.diff(lives, axis=0) < 0
    assert np.array_equal(rollout["terminated"][1:], over) and 0 < len(episodes) == over.sum()
    assert (rollout["actions"][2:].numpy()[lost[:-1]] == 1).all() and lost.sum() > 4  # FIRE all the same


# ------------------------------------------------------------------------------------------ FIRE after a life


def lost_before(played):
    """(T, N): whether the step before lost a life. First steps of a game are in neither half."""
    lost = torch.from_numpy(np.concatenate([np.zeros((1, 2), bool), played.lost[:-1]]))
    first = torch.from_numpy(np.concatenate([np.ones((1, 2), bool), played.over[:-1]]))
    return lost, ~lost & ~first


def test_after_a_lost_life_only_fire_is_allowed(played):
    lost, free = lost_before(played)
    rollout, fire = played.rollout, torch.arange(played.agent.num_actions) == 1
    assert (rollout["mask"][lost] == fire).all() and rollout["mask"][free].all()
    assert (rollout["actions"][lost] == 1).all() and (played.actions[lost.numpy()] == 1).all()
    assert (rollout["logprobs"][lost] == 0).all() and (rollout["logprobs"][free] < 0).all()
    assert rollout["actions"][free].unique().numel() == played.agent.num_actions


def test_nothing_is_learned_from_an_action_that_was_demanded(played):
    agent, rollout = played.agent, played.rollout
    names = ("obs", "mask", "actions", "logprobs", "values")
    for rows, learned in zip(lost_before(played), (False, True), strict=True):
        mb = {name: rollout[name][rows].unsqueeze(0) for name in names}
        mb |= {"advantages": torch.randn(mb["values"].shape), "returns": mb["values"]}
        count = mb["values"].numel()
        _, logprob, entropy, value, _ = agent(mb["obs"], torch.zeros(count, 0), torch.zeros(1, count),
                                              mb["mask"], mb["actions"])
        hyper = torch.tensor([0.0, 0.1, 0.01, 0.0])  # vf_coef 0: the policy alone
        loss, _ = atari.ppo_loss(logprob, entropy, value, mb, hyper, agent.value_std, agent.args)
        parameters = [*agent.trunks.parameters(), *agent.actor.parameters()]
        assert {bool(grad.any()) for grad in torch.autograd.grad(loss, parameters)} == {learned}


@pytest.mark.parametrize("env_id", ["Breakout", "Backgammon", "VideoCheckers"])
def test_fire_is_demanded_wherever_it_stands_among_the_actions(env_id):
    envs, _, _, stream = small_agent(env_id=env_id)
    stream.lives = stream.lives + 1
    atari.step_games(envs, stream, torch.zeros(1, 2, 1, dtype=torch.long))
    demanded = [envs.ale.get_action_set()[n] for n in atari.fire_mask(stream)[0, 0].nonzero()]
    assert demanded == [FIRE]


@pytest.mark.parametrize("flags", [{"env_id": "MsPacman"}, {"env_id": "Freeway"}, {"fire_reset": False}],
                         ids=str)
def test_no_mask_without_fire(flags):
    envs, agent, _, stream = small_agent(num_steps=48, **flags)
    rollout, _ = atari.collect(envs, agent, agent, stream)
    assert "mask" not in rollout and (rollout["logprobs"] < 0).all()
    assert rollout["terminated"].any() or "env_id" in flags


# ------------------------------------------------------------------------------------------------- cut games


@pytest.mark.parametrize("rnn", ["none", "gru"])
def test_a_cut_game_is_worth_what_its_last_picture_is(rnn):
    """24 steps of games of 10: two cuts each, and none where the rollout ends."""
    envs, agent, _, stream = small_agent(env_id="SpaceInvaders", num_steps=24, max_frames=40, rnn=rnn)
    told = recorded(envs)
    rollout, episodes = atari.collect(envs, agent, agent, stream)
    cut = torch.from_numpy(array(told, "truncated"))
    assert cut.nonzero().tolist() == [[9, 0], [9, 1], [19, 0], [19, 1]]
    assert [length for _, length in episodes] == [10] * 4
    assert torch.equal(rollout["done"], cut.float()) and not rollout["terminated"].any()
    with torch.no_grad():
        after = atari.next_values(agent, rollout, rollout["values"])
        for t, n in cut.nonzero().tolist():
            stacks = told[t][5]["final_obs"][n], told[t - 1][1][n]
            final, last = (torch.tensor(stack).permute(1, 2, 0) for stack in stacks)
            assert torch.equal(final[..., :-1], last[..., 1:])  # the older frames
            state = rollout["states"][t + 1, n]
            expected = agent.get_value(final[None, None], state[None], torch.zeros(1, 1)).item()
            assert after[t, n].item() == pytest.approx(expected, abs=1e-6)
            assert abs(expected - rollout["values"][t + 1, n].item()) > 1e-4  # not the next game's
    assert torch.equal(after[:-1][~cut[:-1]], rollout["values"][1:][~cut[:-1]])


def test_without_truncation_bootstrap_a_cut_game_counts_as_death():
    envs, agent, _, stream = small_agent(env_id="SpaceInvaders", max_frames=40, truncation_bootstrap=False)
    rollout, _ = atari.collect(envs, agent, agent, stream)
    assert torch.equal(rollout["terminated"], rollout["done"]) and rollout["done"].sum() == 2


@pytest.mark.parametrize("max_frames", [4, 42])
def test_short_games_are_counted(max_frames):
    """Also those that are over at a frame at which the next one has not even begun."""
    envs, agent, _, stream = small_agent(env_id="SpaceInvaders", num_steps=32, max_frames=max_frames)
    length = math.ceil(max_frames / 4)
    assert [x for _, x in atari.collect(envs, agent, agent, stream)[1]] == [length] * 2 * (32 // length)


# ------------------------------------------------------------------------------------------- names, bad flags


def test_names_and_sticky_actions_are_those_of_gymnasium():
    gym.register_envs(ale_py)
    specs = [spec for spec in gym.registry.values() if str(spec.entry_point).startswith("ale_py")]
    assert len(specs) > 300
    for spec in specs:
        assert atari.game_name(spec.id) == spec.kwargs["game"]
        assert atari.Args(env_id=spec.id).sticky == spec.kwargs["repeat_action_probability"], spec.id


@pytest.mark.parametrize(("env_id", "flag", "sticky"), [
    ("Breakout", None, 0), ("ms_pacman", None, 0), ("BreakoutNoFrameskip-v4", None, 0),
    ("ALE/Breakout-v5", None, 0.25), ("ALE/Breakout-v5", 0.0, 0), ("Breakout", 0.1, 0.1),
])  # fmt: skip
def test_sticky_actions(env_id, flag, sticky):
    assert atari.Args(env_id=env_id, sticky_actions=flag).sticky == sticky


def test_every_game_has_all_its_spellings():
    games = set(ale_py.roms.get_all_rom_ids())
    two_players = {"combat", "joust", "maze_craze", "warlords"}
    assert len(games) > 100 and two_players < games
    for game in games - two_players:
        camel = game.title().replace("_", "")
        for name in (game, game.upper(), camel, camel.lower(), f"{camel}NoFrameskip-v4", f"ALE/{camel}-v5",
                     f"{camel}Deterministic-v4", f"{camel}-v4"):
            assert atari.game_name(name) == game
    for game in two_players:  # for which ALE would end the process
        with pytest.raises(atari.UsageError, match="is no game"):
            atari.game_name(game)


@pytest.mark.parametrize(("flags", "words"), [
    ("--env-id Brekout", "--env-id Brekout is no game of ALE for one player; close names: breakout"),
    ("--env-id ALE/SpaceInvader-v5", "close names: space_invaders"), ("--env-id MsPackman", "ms_pacman"),
    ("--env-id CartPole-v1", "--env-id CartPole-v1 is no game"), ("--screen-size 20", "give 36"),
    ("--screen-size 35", "--screen-size 35 is out of range: give 36"),
    ("--num-minibatches 3", "--num-minibatches 3 does not divide the 1024 steps"),
    ("--rnn lstm --num-minibatches 16", "--num-minibatches 16 does not divide the 8 sequences"),
    ("--frame-stack 0", "--frame-stack 0 is out of range: give 1"), ("--frame-skip 0", "--frame-skip 0"),
    ("--max-frames 3000000000", "--max-frames 3000000000 is out of range"),
    ("--eval-episodes 3000000000", "--eval-episodes 3000000000 is out of range"),
    ("--noop-max -1", "--noop-max -1 is out of range: give 0"), ("--max-frames 0", "--max-frames 0"),
    ("--sticky-actions 1.5", "--sticky-actions 1.5 is out of range: give 0 to 1"),
    ("--total-timesteps 1000", "leaves no rollout of 1024 steps"),
])  # fmt: skip
def test_bad_flags(flags, words, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        main(f"--no-compile {flags}", tmp_path, monkeypatch)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and words in unboxed(err)
    assert "--help" in err or (err.startswith("error: ") and err.count("\n") == 1)  # tyro's box, or ours
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- the first minibatch

AGENTS = {
    "cnn": {},
    "networks apart": {"share_network": False},
    "gru": {"rnn": "gru"},
    "lstm": {"rnn": "lstm"},
    "lstm, short sequences": {"rnn": "lstm", "rnn_seq_len": 8},
    "lstm, networks apart, no reset": {"rnn": "lstm", "share_network": False, "rnn_reset": False},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("flags", AGENTS.values(), ids=AGENTS)
@pytest.mark.usefixtures("weights_that_move")
def test_first_minibatch_has_ratio_1(flags):
    """Of two rollouts with an update in between, lost lives, cut games and FIRE in both.

    bf16 rounds to 8 bits, and a minibatch of another size adds up in another order: 1 % of a probability."""
    near = 1e-2 if "precision" in flags else 1e-5
    envs, agent, opt, stream = small_agent(num_steps=48, max_frames=120, **flags)
    assert agent.bf16 == ("precision" in flags)
    for _ in range(2):
        rollout, _ = atari.collect(envs, agent, agent, stream)
        lost = rollout["terminated"][:-1].sum()
        assert lost > 0 and rollout["done"][:-1].sum() > lost and (~rollout["mask"]).any()
        seen, before = [], weights(agent)

        def step(agent, opt, batch, state, index, hyper, metrics, seen=seen):
            mb = {name: x[:, index] for name, x in batch.items()}
            if not seen:
                logprob = agent(mb["obs"], state[index], mb["starts"], mb["mask"], mb["actions"])[1]
                seen.append((logprob - mb["logprobs"]).abs().max().item())
            alone = torch.zeros_like(metrics)
            atari.train_step(agent, opt, batch, state, index, hyper, alone)
            seen.append(alone[atari.METRICS.index("approx_kl")].item())
            metrics.add_(alone)

        hyper = hyper_of(agent.args, learning_rate=2e-3)
        atari.update(agent, opt, rollout, stream, hyper, step)
        assert seen[0] < near and abs(seen[1]) < near**2 + 1e-7 < abs(seen[-1])
        assert not torch.equal(weights(agent), before)
    for name, view in atari.parameter_views(agent, opt["params"]).items():
        assert agent.get_parameter(name).data_ptr() == view.data_ptr()


def step_by_step(agent, obs, state, starts):
    """Features of policy and value function from one call of the recurrent layers for each step."""
    policies, critics = [], []
    for t in range(len(obs)):
        if agent.args.rnn_reset:
            state = state * (1 - starts[t, :, None])
        policy, critic, state = agent.features(obs[t : t + 1], state, torch.zeros_like(starts[:1]))
        policies, critics = [*policies, policy], [*critics, critic]
    return torch.cat(policies), torch.cat(critics), state


@pytest.mark.parametrize("flags", [flags for flags in AGENTS.values() if "rnn" in flags], ids=str)
def test_stretches_of_steps_equal_a_loop_with_resets(flags):
    agent = atari.Agent(4, 6, small_args(**flags))
    obs = torch.randint(256, (10, 3, 36, 36, 4), dtype=torch.uint8)
    state, starts = torch.randn(3, agent.state_size), (torch.rand(10, 3) < 0.2).float()
    starts[0], starts[-1] = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 0, 1])
    with torch.no_grad():
        for ours, expected in zip(agent.features(obs, state, starts),
                                  step_by_step(agent, obs, state, starts), strict=True):
            torch.testing.assert_close(ours, expected)
        without, _, _ = agent.features(obs, state, torch.zeros_like(starts))
        assert torch.allclose(agent.features(obs, state, starts)[0], without) != agent.args.rnn_reset


# ----------------------------------------------------------------------------------------- networks, pictures


@pytest.mark.parametrize(("flags", "count"), [
    ({}, 1_686_693), ({"share_network": False, "full_actions": True}, 2 * 1_684_128 + 19 * 513),
    ({"frame_stack": 2, "grayscale": False, "screen_size": 36}, 1_686_693 + 2 * 2048 - 48 * 64 * 512),
    ({"rnn": "lstm", "rnn_hidden": 128, "frame_stack": 1},
     1_684_128 - 3 * 2048 + 4 * 128 * (512 + 128 + 2) + 5 * 129),
], ids=str)  # fmt: skip
def test_networks_have_as_many_weights_as_the_papers(flags, count):
    """8224 + 32,832 + 36,928 in convolutions, 1,606,144 in 512 units, 513 for each action and the value."""
    _, agent, _, stream = small_agent(**{"screen_size": 84} | flags)
    assert sum(p.numel() for p in agent.parameters()) == count
    assert stream.obs.shape == (1, 2, agent.args.screen_size, agent.args.screen_size,
                                agent.args.frame_stack * (1 if agent.args.grayscale else 3))


def test_the_value_has_a_network_of_its_own_without_share_network():
    agent = atari.Agent(4, 6, small_args(share_network=False))
    obs = torch.randint(256, (1, 2, 36, 36, 4), dtype=torch.uint8)
    agent.get_value(obs, torch.zeros(2, 0), torch.zeros(1, 2)).sum().backward()
    assert [any(p.grad is not None and p.grad.any() for p in trunk.parameters())
            for trunk in agent.trunks] == [False, True]


@pytest.mark.parametrize(("flags", "high"), [({}, 1.0), ({"scale_obs": False}, 255.0)], ids=str)
def test_pixels_reach_the_network_from_0_to(flags, high):
    agent, seen = atari.Agent(4, 6, small_args(**flags)), []
    agent.trunks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs = torch.arange(256).repeat(41)[: 2 * 36 * 36 * 4].view(1, 2, 36, 36, 4).to(torch.uint8)
    agent.get_value(obs, torch.zeros(2, 0), torch.zeros(1, 2))
    assert (seen[0].min(), seen[0].max()) == (0, high)
    torch.testing.assert_close(seen[0], obs[0].permute(0, 3, 1, 2) / 255 * high)


def test_bf16_is_used_and_rounds_a_little():
    exact, rounded = (atari.Agent(4, 6, small_args(ortho_init=False, precision=name))
                      for name in ("fp32", "bf16"))
    rounded.load_state_dict(exact.state_dict())
    obs = torch.randint(256, (1, 50, 36, 36, 4), dtype=torch.uint8)
    inputs = obs, torch.zeros(50, 0), torch.zeros(1, 50)
    exact, rounded = exact.features(*inputs)[0], rounded.features(*inputs)[0]
    assert rounded.dtype == torch.float32 and (exact - rounded).abs().max() > 1e-5
    torch.testing.assert_close(rounded, exact, atol=0.02 * exact.max().item(), rtol=0)


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_frames_move_through_the_stack_and_a_rollout_keeps_them(frame_stack):
    envs, agent, _, stream = small_agent(env_id="Pong", num_steps=32, frame_stack=frame_stack)
    told = recorded(envs)
    obs = atari.collect(envs, agent, agent, stream)[0]["obs"]
    assert torch.equal(obs[1:, ..., :-1], obs[:-1, ..., 1:]) and not torch.equal(obs[30], obs[31])
    assert np.array_equal(obs[1:].permute(0, 1, 4, 2, 3), array(told, "obs")[:-1])


# ------------------------------------------------------------------------------------------ evaluation, video


def evaluated(monkeypatch, agent, greedy):
    """Scores, what the games told, and the `starts` (T, N) that the agent saw."""
    told, starts, make = [], [], atari.make_games

    def make_recorded(*args, **flags):
        envs = make(*args, **flags)
        told.append(recorded(envs))
        return envs

    monkeypatch.setattr(atari, "make_games", make_recorded)
    hook = agent.register_forward_pre_hook(lambda module, inputs: starts.append(inputs[2][0].numpy()))
    scores = atari.evaluate(agent, greedy)
    hook.remove()
    return scores, told[0], np.array(starts)


@pytest.mark.parametrize("greedy", [True, False])
def test_evaluation_plays_one_whole_game_for_its_raw_score(monkeypatch, greedy):
    _, agent, _, _ = small_agent(env_id="Berzerk", eval_episodes=2)
    scores, told, _ = evaluated(monkeypatch, agent, greedy)
    lives, rewards = array(told, "lives"), array(told, "rewards")
    for n, score in enumerate(scores):
        end, *_ = np.flatnonzero(np.diff(lives[:, n]) > 0) + 1
        assert set(lives[:end, n]) == {3, 2, 1} and score == rewards[: end + 1, n].sum()
    assert scores.max() >= 50 and len(set(scores)) > 1


def test_evaluation_begins_a_memory_anew_where_training_does(monkeypatch):
    _, agent, _, _ = small_agent(rnn="gru", max_frames=600)
    _, told, starts = evaluated(monkeypatch, agent, greedy=False)
    lives = array(told, "lives")
    lost = np.diff(lives, axis=0, prepend=5) < 0
    assert lost.any() and np.array_equal(starts[1:], lost[:-1]) and starts[0] == 1


def test_evaluation_demands_fire_after_a_lost_life(monkeypatch):
    _, agent, _, _ = small_agent(max_frames=600)
    _, told, _ = evaluated(monkeypatch, agent, greedy=True)
    lives, actions = array(told, "lives")[:, 0], array(told, "actions")[:, 0]
    after = np.flatnonzero(np.diff(lives) < 0) + 2
    assert len(after) > 1 and (actions[after[after < len(actions)]] == 1).all()


@pytest.mark.parametrize(("env_id", "flags"), [
    ("Breakout", {}), ("ALE/Breakout-v5", {}), ("ALE/Berzerk-v5", {"noop_max": 0}),
    ("Qbert", {"full_actions": True, **STICKY}), ("Breakout", {"fire_reset": False, **STICKY}),
], ids=str)  # fmt: skip
def test_a_replay_is_the_same_game(env_id, flags):
    envs, agent, _, _ = small_agent(env_id=env_id, num_envs=1, num_minibatches=1, **flags)
    first_frame, over = first_frames(envs, [5])[0], False
    stream, rng, actions = atari.reset_stream(envs, agent, [5]), np.random.default_rng(1), []
    while not over:
        actions.append(int(rng.integers(agent.num_actions)))
        over = atari.step_games(envs, stream, torch.tensor(actions[-1:])[None, None])[3]["over"][0]
    frames, rewards = zip(*atari.replay(agent.args, 5, first_frame, actions), strict=True)
    assert sum(rewards) == stream.episode_return[0] > 0
    assert 4 * len(actions) - 4 < len(frames) <= 4 * len(actions)  # the last action ends with the game
    assert {(frame.shape, frame.dtype.name) for frame in frames} == {((210, 160, 3), "uint8")}


def test_a_video_is_as_high_as_the_game(tmp_path):
    moviepy = pytest.importorskip("moviepy")
    frames = [frame for frame, _ in atari.replay(small_args(env_id="Pooyan"), 5, 0, [0] * 10)]
    atari.write_video(iter(frames), tmp_path)
    clip = moviepy.VideoFileClip(str(tmp_path / "episode-0.mp4"))
    assert clip.size == [160, 220] and abs(clip.get_frame(0) - frames[0].astype(float)).mean() < 10
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
    monkeypatch.setattr(atari, "make_games", partial(Sides, length=lengths))
    agent = atari.Agent(1, 3, small_args(frame_stack=1, eval_episodes=3))
    scores, told, _ = evaluated(monkeypatch, agent, greedy=False)
    rewards = array(told, "rewards")
    assert len(told) == 9
    assert scores.tolist() == [rewards[:length, n].sum() for n, length in enumerate(lengths)]
    assert (rewards.sum(0) > scores).tolist() == [True, True, False]


@pytest.mark.parametrize(("greedy", "actions"), [(True, {1}), (False, {0, 1, 2})])
def test_evaluation_plays_the_likeliest_actions_or_draws_them(greedy, actions, monkeypatch):
    monkeypatch.setattr(atari, "make_games", partial(Sides, length=30))
    agent = atari.Agent(1, 3, small_args(frame_stack=1))
    agent.actor.bias.data[1] = 0.5
    _, told, _ = evaluated(monkeypatch, agent, greedy)
    assert set(array(told, "actions").ravel()) == actions


@pytest.mark.parametrize(("length", "flags", "value"), [
    (None, {}, 1.0), (5, {"gamma": 0.8}, 5.0),  # 1 / (1 - gamma)
], ids=["one step", "for ever, cut"])  # fmt: skip
def test_the_side_of_a_square_is_learned(length, flags, value, tmp_path, monkeypatch):
    monkeypatch.setattr(atari, "make_games", partial(Sides, length=length))
    args = small_args(num_envs=16, num_minibatches=4, update_epochs=4, learning_rate=1e-3, clip_vloss=False,
                      eval_episodes=50, total_timesteps=4096, frame_stack=1, run_dir=str(tmp_path / "run"),
                      **flags)
    summary = atari.train(args)
    assert summary["eval_mean"] > 0.98 * (length or 1) and summary["eval_sampled_mean"] > 0.9 * (length or 1)
    envs, agent, _ = atari.build(args, atari.load_checkpoint(tmp_path / "run"), 20, torch.device("cpu"))
    stream = atari.reset_stream(envs, agent, list(range(20)))
    with torch.no_grad():
        values = agent.get_value(stream.obs, stream.state, stream.starts)
    assert values.mean().item() == pytest.approx(value, rel=0.1) and values.std() < 0.1 * value


# ----------------------------------------------------------------------------------------------- command line

# Four iterations of 32 steps, a checkpoint after every second.
SHORT = """--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --total-timesteps 128
           --screen-size 44 --max-frames 200 --eval-episodes 1 --rnn-hidden 16 --checkpoint-every 2
           --device cpu --precision fp32 --no-compile --torch-threads 1 --env-threads 1"""
# kill -9 in the midst of the fourth iteration.
DRIVER = """
import os
import signal
import ppo_atari as atari

calls, update = [], atari.update

def killed(*args):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(*args)

atari.update = killed
atari.main()
"""


def start(folder, flags, script=SCRIPT.name):
    """The script, copied alone into that folder, in a process of its own."""
    shutil.copy(SCRIPT, folder)
    return subprocess.Popen([sys.executable, script, *flags.split()], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def main(flags, folder, monkeypatch):
    """The script in this process, with that folder as its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *flags.split()])
    atari.main()


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
    assert [int(row["global_step"]) for row in rows] == [32, 64, 96, 128]
    assert all(math.isfinite(float(row[name])) for row in rows for name in (*atari.METRICS, "SPS"))
    assert summary["env_id"] == "Breakout" and summary["global_step"] == 128 and summary["eval_episodes"] == 1
    assert all(math.isfinite(value) for value in summary.values() if value != "Breakout")
    checkpoint = atari.load_checkpoint(run_dir)
    assert checkpoint["at"]["global_step"] == 128
    assert all(x.isfinite().all() for x in (*checkpoint["agent"].values(), *checkpoint["opt"].values()))
    assert args["ale_py"] == ale_py.__version__ and "sticky actions 0, as ...NoFrameskip-v4" in printed
    assert "4 actions: NOOP FIRE RIGHT LEFT" in printed
    assert "4 frames of 44 x 44, gray" in printed and "at most 200 a game" in printed


def test_evaluate_repeats_the_evaluation_and_records_it(breakout, monkeypatch, capsys):
    """At native size, all frames of the game, in its colours."""
    moviepy = pytest.importorskip("moviepy")
    run_dir, printed = breakout
    main("--evaluate run --capture-video", run_dir.parent, monkeypatch)
    again = capsys.readouterr().out
    assert again.count("return") == 2 and again in printed
    clip = moviepy.VideoFileClip(str(run_dir / "videos" / "episode-0.mp4"))
    assert clip.size == [160, 210] and clip.fps == 60 and clip.duration == pytest.approx(200 / 60, abs=0.02)
    colours = [clip.get_frame(0)[rows, 20:140].mean((0, 1)) for rows in (slice(57, 63), slice(87, 93))]
    clip.close()
    for colour, expected in zip(colours, ([200, 72, 72], [66, 72, 200]), strict=True):  # bricks, red and blue
        np.testing.assert_allclose(colour, expected, atol=40)


def test_killed_while_it_was_evaluated(breakout, tmp_path, monkeypatch):
    resume = partial(main, folder=tmp_path, monkeypatch=monkeypatch)
    check_resume_only_evaluates(breakout[0], tmp_path, resume)


@pytest.mark.skipif(not atari.can_compile(atari.Args(), torch.device("cpu")), reason="no C++ compiler")
def test_compiled_run_agrees_with_eager(breakout, tmp_path, monkeypatch):
    """In float32, and in bf16 as far as its rounding allows; also after an update, at another rate."""
    for precision, rel in (("fp32", 1e-2), ("bf16", 0.1)):
        flags = f"--compile --precision {precision} --run-dir {precision}"
        main(f"{SHORT} {flags}", tmp_path, monkeypatch)
        compiled, eager = (read_metrics(run_dir) for run_dir in (tmp_path / precision, breakout[0]))
        for name in ("value_loss", "entropy", "grad_norm"):
            one, two = ([float(row[name]) for row in rows[:2]] for rows in (compiled, eager))
            assert one == pytest.approx(two, rel=rel), name


def test_two_processes_train_the_same_weights(tmp_path):
    assert not torch.equal(*train_in_two_processes(tmp_path, SCRIPT, SHORT)[1])


@pytest.mark.parametrize("flags", ["", "--rnn lstm --rnn-seq-len 8 --env-id ALE/SpaceInvaders-v5"], ids=str)
def test_killed_and_resumed_is_the_same(flags, breakout, tmp_path, monkeypatch):
    expected = breakout[0]
    if flags:
        main(f"{SHORT} {flags} --run-dir expected", tmp_path, monkeypatch)
        expected = tmp_path / "expected"
    (tmp_path / "driver.py").write_text(DRIVER)
    finish(start(tmp_path, f"{SHORT} {flags} --run-dir run", "driver.py"), code=-signal.SIGKILL)
    assert atari.load_checkpoint(tmp_path / "run")["at"]["iteration"] == 2
    main("--resume run", tmp_path, monkeypatch)
    check_same(tmp_path / "run", expected)


def test_ctrl_c_saves(tmp_path, monkeypatch, capsys):
    calls, collect = [], atari.collect

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return collect(*args)

    monkeypatch.setattr(atari, "collect", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(f"{SHORT} --checkpoint-every 1000 --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code == 130 and "--resume run" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run")
    assert atari.load_checkpoint(tmp_path / "run")["at"]["iteration"] == len(rows) == 3
    main("--resume run", tmp_path, monkeypatch)
    resumed = read_metrics(tmp_path / "run")
    assert resumed[:3] == rows and [int(row["global_step"]) for row in resumed] == [32, 64, 96, 128]
    assert (tmp_path / "run" / "summary.json").exists()


def test_ctrl_c_in_the_first_iteration_ends_at_once(tmp_path, monkeypatch, capsys):
    """That is when the compiler runs, which would die of it, too."""
    monkeypatch.setattr(atari, "train_step", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as stop:
        main(f"{SHORT} --run-dir run", tmp_path, monkeypatch)
    assert stop.value.code == 130 and "saved" not in capsys.readouterr().out
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_a_checkpoint_of_another_game_is_refused(breakout, tmp_path, monkeypatch, capsys):
    shutil.copytree(breakout[0], tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["args"]["env_id"] = "SpaceInvaders"
    torch.save(checkpoint, path)
    with pytest.raises(SystemExit) as stop:
        main("--evaluate run", tmp_path, monkeypatch)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
