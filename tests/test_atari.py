"""Games of ALE against a plain loop, lost lives, time limits, details 14 to 22, evaluation and videos."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import ale_py
import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import bare_agent, play, small_args, trained
from probes import Squares

import ppo_atari as atari

FIRE, NOOP = ale_py.Action.FIRE, ale_py.Action.NOOP

def small_agent(env_id="Breakout", **flags):
    """Two games, agent, optimizer state and env_state of a run that has just begun."""
    return conftest.small_agent(env_id, atari, **{"num_envs": 2, "num_minibatches": 2} | flags)

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
    return np.array([x[names.index(name)] if name in names else x[5][name] for x in told])

# --------------------------------------------------------------------------------------- the games themselves

def plain_game(args, seed, actions, first_frames):
    """One game after another in a plain loop over ALE, written anew from what the flags promise.

    Yields, for every action, stacked screens of native size, reward, whether a life was lost and whether
    the game was over. The games begin at `first_frames`, after a random number of no-ops."""
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", args.sticky)
    name = re.sub("ALE/|-v5", "", args.env_id)
    ale.loadROM(ale_py.roms.get_rom_path({"SpaceInvaders": "space_invaders"}.get(name, name.lower())))
    action_set = ale.getLegalActionSet() if args.full_actions else ale.getMinimalActionSet()

    def screen():
        return ale.getScreenGrayscale()[None] if args.grayscale else ale.getScreenRGB().transpose(2, 0, 1)

    over = True
    for action in actions:
        if over:
            ale.reset_game()
            if args.fire_reset and FIRE in action_set:
                ale.act(FIRE)
            first_frame = next(first_frames)
            while ale.getEpisodeFrameNumber() < first_frame:
                ale.act(NOOP)
            stack = [np.zeros_like(screen())] * (args.frame_stack - 1) + [screen()]
        seen, lives, reward, screens = np.concatenate(stack), ale.lives(), 0, []
        for _ in range(args.frame_skip):
            reward += ale.act(action_set[action])
            screens.append(screen())
            if ale.game_over():
                break
        stack = [*stack[1:], np.max(screens[-2 if args.max_pool else -1 :], 0)]
        over = ale.game_over()
        yield seen, reward, 0 < ale.lives() < lives, over

def shares(full, size):
    """(size, full): the share of each of `full` pixels in the mean that one of `size` takes."""
    edges, pixels = np.arange(size + 1) * full / size, np.arange(full)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return covered.clip(0) * size / full

def check_pictures(images, screens):
    """Images (T, S, S, C) are the screens (T, C, H, W), each pixel the mean of the area that it covers.

    A gray level may differ by the half that it is rounded by, and OpenCV sums in float32."""
    for image, screen in zip(images.numpy(), screens, strict=True):
        rows, columns = (shares(full, len(image)) for full in screen.shape[1:])
        expected = (rows @ screen @ columns.T).transpose(1, 2, 0)
        assert np.abs(image - expected).max() < 0.501

@pytest.mark.parametrize(("env_id", "steps", "flags"), [
    ("Breakout", 280, {"screen_size": 84}),
    ("ALE/Pong-v5", 140, {}),
    ("ALE/SpaceInvaders-v5", 150, {"max_pool": False, "sign_rewards": False}),
    ("Breakout", 60, {"grayscale": False, "frame_skip": 2, "frame_stack": 3}),
    ("Breakout", 250, {"full_actions": True, "episodic_life": False}),
    ("Breakout", 60, {"fire_reset": False, "noop_max": 5, "frame_skip": 1, "frame_stack": 1}),
    ("Freeway", 60, {}),  # without FIRE
], ids=str)  # fmt: skip
def test_games_are_those_of_a_plain_loop(env_id, steps, flags):
    envs, agent, *_ = small_agent(env_id, num_steps=steps, **flags)
    args, seeds = agent.args, np.random.SeedSequence((3,)).generate_state(2) % 2**31
    first_frames = envs.reset(seed=seeds)[1]["episode_frame_number"]
    env_state, told = atari.reset_envs(envs, agent, 3), recorded(envs)
    data, episodes = play(envs, agent, env_state)
    fire = torch.tensor([action == FIRE for action in envs.ale.get_action_set()])
    expected_episodes = []
    for n in range(2):
        frames = np.concatenate([first_frames[[n]], array(told, "episode_frame_number")[:, n]])
        first = iter([frames[0], *frames[1:][np.diff(frames) < 0]])
        game = plain_game(args, int(seeds[n]), data["actions"][:, n], first)
        screens, rewards, lost, over = zip(*game, strict=True)
        check_pictures(data["obs"][::5, n], screens[::5])
        assert array(told, "rewards")[:, n].tolist() == [*rewards]
        learned = np.sign(rewards) if args.sign_rewards else rewards
        assert data["rewards"][:, n].tolist() == [*learned]
        life_ends = np.array(lost) | over  # which the game survives
        assert any(lost) or steps < 200
        dones = life_ends if args.episodic_life else over
        assert data["dones"][:, n].tolist() == [*dones] and not data["final_values"].any()
        assert data["starts"][1:, n].tolist() == [*dones[:-1]]
        # Also if no episode ends.
        forced = torch.tensor([True, *life_ends[:-1]]) & (args.fire_reset and fire.any())
        assert (data["mask"][forced, n] == fire).all() and data["mask"][~forced, n].all()
        assert (data["logprobs"][forced, n] == 0).all() and (data["logprobs"][~forced, n] < 0).all()
        ends = np.flatnonzero(over) + 1
        for begin, end in zip([0, *ends], ends, strict=False):
            expected_episodes.append((n, sum(rewards[begin:end]), end - begin))
    assert sorted(episodes) == expected_episodes
    assert (episodes or steps < 200) and (data["rewards"].any() or steps < 100)

@pytest.mark.parametrize(("env_id", "flags", "frames"), [
    ("Breakout", {"noop_max": 6}, range(1, 6)), ("Breakout", {"noop_max": 0}, [1]),
    ("Breakout", {"noop_max": 4, "fire_reset": False}, range(4)),
], ids=str)  # fmt: skip
def test_a_game_begins_after_fewer_than_noop_max_frames(env_id, flags, frames):
    envs = atari.make_envs(small_args(env_id, atari, max_frames=1, **flags), 2)
    envs.reset(seed=np.array([3, 4]))
    told = recorded(envs)
    for _ in range(20):  # each step is a game
        envs.step(np.zeros(2, int))
    assert set(array(told, "episode_frame_number").flat) == set(frames)

# ------------------------------------------------------------------------------------------------ time limits

def test_a_cut_game_is_worth_what_its_last_picture_is():
    """24 steps of games of 10: two cuts each, and none where the rollout ends."""
    envs, agent, _, env_state = small_agent("SpaceInvaders", num_steps=24, max_frames=38, rnn="gru")
    told = recorded(envs)
    data, episodes = play(envs, agent, env_state)
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
    assert not data["rnn_states"][0].any()

def test_games_of_one_step_are_counted():
    """They are over at a frame at which the next one has not even begun."""
    envs, agent, _, env_state = small_agent("SpaceInvaders", max_frames=4)
    assert [length for *_, length in play(envs, agent, env_state)[1]] == [1] * 2 * 16

# ------------------------------------------------------------------------------------------------------ names

def test_names_and_sticky_actions_are_those_of_gymnasium(monkeypatch):
    """Any spelling of a game will do, but not those for two players, for which ALE would end the process."""
    made = []  # names of the games that make_envs asks for
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", lambda name, *_, **__: made.append(name))
    gym.register_envs(ale_py)
    specs = [spec for spec in gym.registry.values() if str(spec.entry_point).startswith("ale_py")]
    assert len(specs) > 300
    for spec in specs:
        atari.make_envs(small_args(spec.id, atari), 1)
        assert made[-1] == spec.kwargs["game"]
        assert atari.Args(env_id=spec.id).sticky == spec.kwargs["repeat_action_probability"], spec.id
    assert atari.Args(env_id="Breakout").sticky == 0
    assert atari.Args(env_id="ALE/Breakout-v5", sticky_actions=0.0).sticky == 0
    assert atari.Args(env_id="Breakout", sticky_actions=0.1).sticky == 0.1
    for game in ale_py.roms.get_all_rom_ids():
        for name in (game, game.upper(), game.title().replace("_", "")):
            refused = game in {"combat", "joust", "maze_craze", "warlords"}
            with pytest.raises(atari.UsageError, match="is no single") if refused else nullcontext():
                atari.make_envs(small_args(name, atari), 1)
                assert made[-1] == game

# --------------------------------------------------------------------------------------------------- networks

def test_the_network_has_as_many_weights_as_the_papers():
    """8224 + 32,832 + 36,928 in convolutions, 1,606,144 in 512 units, 513 for each action and the value."""
    agent, _ = bare_agent(atari, screen_size=84, ortho_init=False)
    assert sum(p.numel() for p in agent.parameters()) == 1_684_128 + 5 * 513

def random_pictures(n):
    """Observations, RNN state and starts of a feed-forward agent."""
    return torch.randint(256, (1, n, 36, 36, 4), dtype=torch.uint8), torch.zeros(0, n, 16), torch.zeros(1, n)

def test_the_value_has_a_network_of_its_own_without_share_network():
    agent, _ = bare_agent(atari, share_network=False)
    agent.get_value(*random_pictures(2)).sum().backward()
    assert [any(p.grad is not None and p.grad.any() for p in trunk.parameters())
            for trunk in agent.trunks] == [False, True]

@pytest.mark.parametrize(("scale_obs", "high"), [(True, 1.0), (False, 255.0)])
def test_pixels_reach_the_network_from_0_to(scale_obs, high):
    agent, _ = bare_agent(atari, scale_obs=scale_obs)
    seen = []
    agent.trunks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs, *others = random_pictures(2)
    agent.get_value(obs, *others)
    assert (seen[0].min(), seen[0].max()) == (0, high)
    torch.testing.assert_close(seen[0], obs[0].permute(0, 3, 1, 2) / 255 * high)

def test_bf16_is_used_and_rounds_a_little():
    exact, rounded = (bare_agent(atari, ortho_init=False, precision=name)[0] for name in ("fp32", "bf16"))
    pictures = random_pictures(50)
    exact, rounded = exact.encode(*pictures)[0], rounded.encode(*pictures)[0]
    assert rounded.dtype == torch.float32 and (exact - rounded).abs().max() > 1e-5
    torch.testing.assert_close(rounded, exact, atol=0.02 * exact.max().item(), rtol=0)

@pytest.mark.parametrize(("device", "able", "expected"), [
    ("cpu", {"amx_bf16": True}, "bf16"), ("cpu", {"avx2": True}, "fp32"),
    ("cuda", (8, 0), "bf16"), ("cuda", (7, 5), "fp32"), ("mps", None, "fp32")])
def test_precision_is_bf16_where_that_is_fast(device, able, expected, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: able)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: able)
    device = SimpleNamespace(type=device)
    assert atari.choose_precision(atari.Args(), device) == expected
    for precision in ("fp32", "bf16"):
        assert atari.choose_precision(atari.Args(precision=precision), device) == precision

@pytest.mark.parametrize(("life", "flags", "value"), [
    (1, {"total_timesteps": 2048}, 1.0),
    (10**9, {"total_timesteps": 4096, "gamma": 0.8, "max_frames": 20}, 5.0),  # 1 / (1 - gamma)
], ids=["one step", "for ever, cut"])  # fmt: skip
def test_the_side_of_a_square_is_learned(life, flags, value, tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "life", life)
    monkeypatch.setattr(Squares, "lives", 1)
    agent, summary = trained(tmp_path / "run", "Squares", atari, num_envs=16, update_epochs=4,
                             learning_rate=1e-3, clip_vloss=False, eval_episodes=20, frame_stack=1,
                             fire_reset=False, **flags)
    best_score = 3 * min(life, 5)
    assert summary["eval_mean"] == best_score and summary["eval_sampled_mean"] > 0.9 * best_score
    env_state = atari.reset_envs(Squares(agent.args, 20), agent, 1)
    with torch.no_grad():
        values = agent.get_value(env_state.obs, env_state.rnn_state, env_state.starts)
    assert values.mean().item() == pytest.approx(value, rel=0.1) and values.std() < 0.1 * value

# ------------------------------------------------------------------------------------------ evaluation, video

@pytest.fixture
def all_told(monkeypatch):
    """What all games tell that make_envs makes, in the order in which it makes them."""
    told, make_envs = [], atari.make_envs

    def make_recorded(*args):
        envs = make_envs(*args)
        told.append(recorded(envs))
        return envs

    monkeypatch.setattr(atari, "make_envs", make_recorded)
    return told

def test_evaluation_plays_whole_games_with_a_fire_in_each_life(all_told, tmp_path):
    """Its memory begins anew with each life, as in training. Scores are raw, and of the first games only."""
    _, agent, _, _ = small_agent(rnn="gru", eval_episodes=2)
    starts = []
    agent.register_forward_pre_hook(lambda module, inputs: starts.append(inputs[2][0].tolist()))
    summary = atari.evaluate(agent, tmp_path, 1000)
    assert len(starts) == sum(len(told) for told in all_told[1:])
    for name, told in zip(("eval", "eval_sampled"), all_told[1:], strict=True):
        lives, rewards, scores = array(told, "lives"), array(told, "rewards"), []
        for n in range(2):
            end = np.flatnonzero(np.diff(lives[:, n]) > 0)[0] + 1
            assert set(lives[:end, n]) == {5, 4, 3, 2, 1}
            scores.append(rewards[: end + 1, n].sum())
        assert summary[f"{name}_mean"] == np.mean(scores) and summary[f"{name}_std"] == np.std(scores)
        assert starts[0] == [1, 1] and starts[1 : len(told)] == array(told, "terminated")[:-1].tolist()
        assert (array(told, "actions")[1:][array(told, "terminated")[:-1]] == 1).all()
        del starts[: len(told)]

def test_evaluation_of_an_endless_game_ends(all_told, tmp_path):
    """After max_frames, whoever plays: here games of Breakout in which the ball is never lost."""
    _, agent, _, _ = small_agent(max_frames=203, fire_reset=False, episodic_life=False, eval_episodes=1)
    agent.actor.bias.data[0] = 1e3  # NOOP: without FIRE there is no ball
    summary = atari.evaluate(agent, tmp_path, 0)
    assert [len(told) for told in all_told[1:]] == [64, 64]  # 51 steps, in rollouts of 16
    assert array(all_told[1], "truncated")[:, 0].nonzero()[0].tolist() == [50] and summary["eval_mean"] == 0

@pytest.mark.parametrize(("env_id", "flags"), [
    ("ALE/Breakout-v5", {"max_frames": 400}),
    ("Pooyan", {"frame_skip": 3, "max_frames": 250, "full_actions": True}),  # 220 pixels high, not 210
], ids=str)  # fmt: skip
def test_a_video_is_the_same_game(env_id, flags, all_told, tmp_path):
    """In color, one frame per step of the first game but its last, which returns the next one's picture."""
    moviepy = pytest.importorskip("moviepy")
    _, agent, _, _ = small_agent(env_id, eval_episodes=2, capture_video=True, **flags)
    with torch.no_grad():
        agent.actor.weight.mul_(100)  # some variety in deterministic actions
    atari.evaluate(agent, tmp_path, 0)
    _, game, video, _ = all_told  # of small_agent, deterministic, its video, sampled
    for name in ("actions", "rewards", "lives", "episode_frame_number"):
        assert np.array_equal(array(game, name)[: len(video), 0], array(video, name)[:, 0]), name
    assert (array(game, "terminated") | array(game, "truncated"))[len(video), 0]
    frames = array(video, "obs")[:, 0, 0]
    clip = moviepy.VideoFileClip(str(tmp_path / "videos" / "episode-0.mp4"))
    assert clip.size == [420, 420] and clip.fps == 60 / agent.args.frame_skip
    assert clip.duration == pytest.approx(len(video) / clip.fps, abs=0.1)
    for t in (0, len(video) // 2):
        picture = clip.get_frame((t + 0.5) / clip.fps)
        assert abs(picture - frames[t].astype(float)).mean() < 10
        assert np.ptp(frames[t].astype(int), axis=-1).max() > 50  # in color
    clip.close()
