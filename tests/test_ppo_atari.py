"""ppo_atari: ALE's games against a plain loop, lives, time limits, networks, what it learns,
video."""

import re
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

import ppo_atari as atari

FIRE, NOOP = ale_py.Action.FIRE, ale_py.Action.NOOP
SMALL = {
    "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2,
    "total_timesteps": 128, "rnn_hidden": 16, "screen_size": 36, "eval_episodes": 2,
    "compile": False, "device": "cpu", "precision": "fp32", "torch_threads": 1, "env_threads": 1,
}  # fmt: skip


def small_args(env_id="Breakout", **flags):
    return atari.Args(env_id=env_id, **SMALL | flags)


def make_agent(**flags):
    args = small_args(**flags)
    image = Box(0, 255, (args.screen_size, args.screen_size, args.frame_stack), np.uint8)
    spaces = SimpleNamespace(single_action_space=Discrete(4), single_observation_space=image)
    return atari.Agent(spaces, args)


def random_batch(n, steps=1):
    """Images, RNN state, done, mask and actions of n sequences."""
    obs = torch.randint(256, (n * steps, 36, 36, 4), dtype=torch.uint8)
    done, mask = torch.zeros(n * steps), torch.ones(n * steps, 4, dtype=torch.bool)
    return obs, torch.zeros(0, n, 16), done, mask, torch.randint(4, (n * steps,))


def train(run_dir, env_id="Breakout", checkpoint=None, **flags):
    args = small_args(env_id, run_dir=str(run_dir), **flags)
    summary = atari.train(args, checkpoint)
    return atari.load_agent(run_dir), summary


# ----------------------------------------------------------------------------- the games themselves


def plain_game(args, sticky, seed, actions, first_frames):
    """One game after another in a plain loop over ALE, written anew from what the flags promise.

    Yields, for every action, the stacked screens of native size before it, the reward, whether a
    life was lost and whether the game was over. Games begin at `first_frames`, after no-ops."""
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", sticky)
    name = re.sub("ALE/|-v5", "", args.env_id)
    rom = {"SpaceInvaders": "space_invaders"}.get(name, name.lower())
    ale.loadROM(ale_py.roms.get_rom_path(rom))
    action_set = ale.getMinimalActionSet()

    def screen():
        if args.grayscale:
            return ale.getScreenGrayscale()[None]
        return ale.getScreenRGB().transpose(2, 0, 1)

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
    """Images (T, S, S, C) are the screens (T, C, H, W), each pixel the mean of its area.

    A gray level may differ by the half that it is rounded by, and OpenCV sums in float32."""
    for image, screen in zip(np.moveaxis(images, -1, 1), screens, strict=True):
        rows, columns = (shares(full, image.shape[1]) for full in screen.shape[1:])
        assert np.abs(image - rows @ screen @ columns.T).max() < 0.501


def play(args, steps, seed=3):
    """Random allowed actions; what Games and ALE beneath it told in each step."""
    envs = atari.make_envs(args, 2)
    first = envs.env.reset(seed=np.array([seed, seed + 1]))[1]["episode_frame_number"]
    told, step = [], envs.env.step
    envs.env.step = lambda actions: told.append(step(actions)) or told[-1]
    obs, infos = envs.reset(seed=[seed, seed + 1])
    assert obs in envs.observation_space and obs[0] in envs.single_observation_space
    rng, rows = np.random.default_rng(seed), []
    for _ in range(steps):
        mask = infos["action_mask"]
        actions = np.array([rng.choice(np.flatnonzero(row)) for row in mask])
        row = {"obs": obs, "mask": mask, "actions": actions}
        obs, row["reward"], row["terminated"], row["truncated"], infos = envs.step(actions)
        row |= {"infos": infos, "frame": told[-1][4]["episode_frame_number"], "next_obs": obs}
        rows.append(row)
    return envs, first, {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize(
    ("env_id", "steps", "flags"),
    [
        ("Breakout", 400, {"screen_size": 84}),
        ("ALE/Pong-v5", 140, {}),
        ("ALE/SpaceInvaders-v5", 150, {"max_pool": False}),
        ("Breakout", 60, {"grayscale": False, "frame_skip": 2, "frame_stack": 3}),
        ("Breakout", 400, {"episodic_life": False}),
        ("Breakout", 60, {"fire_reset": False, "noop_max": 5, "frame_skip": 1, "frame_stack": 1}),
        ("Freeway", 60, {}),  # without FIRE
    ],
    ids=str,
)
def test_games_are_those_of_a_plain_loop(env_id, steps, flags):
    args = small_args(env_id, **flags)
    envs, first_frames, told = play(args, steps)
    fire = np.array([action == FIRE for action in envs.unwrapped.ale.get_action_set()])
    sticky = 0.25 if env_id.startswith("ALE") else 0.0
    for n in range(2):
        frames = np.array([first_frames[n], *(x[n] for x in told["frame"])])
        first = iter([frames[0], *frames[1:][np.diff(frames) < 0]])
        actions = [x[n] for x in told["actions"]]
        game = plain_game(args, sticky, int(envs.seed[n]), actions, first)
        screens, rewards, lost, over = zip(*game, strict=True)
        check_pictures([x[n] for x in told["obs"][::5]], screens[::5])
        assert [x[n] for x in told["reward"]] == [*rewards]
        life_ends = np.array(lost) | over  # which the game survives
        assert any(lost) or steps < 200
        ends = life_ends if args.episodic_life else over
        assert [x[n] for x in told["terminated"]] == [*ends]
        # Also if no episode ends.
        forced = np.array([True, *life_ends[:-1]]) & (args.fire_reset and fire.any())
        mask = np.array([x[n] for x in told["mask"]])
        assert (mask[forced] == fire).all() and mask[~forced].all()
        episodes = [
            (x["episode"]["r"][n], x["episode"]["l"][n]) for x in told["infos"] if x["_episode"][n]
        ]
        ends = np.flatnonzero(over) + 1
        spans = zip([0, *ends], ends, strict=False)
        assert episodes == [(sum(rewards[a:b]), b - a) for a, b in spans]
        assert episodes or steps < 200


@pytest.mark.parametrize(
    ("flags", "frames"),
    [
        ({"noop_max": 6}, range(1, 6)),
        ({"noop_max": 0}, [1]),
        ({"noop_max": 4, "fire_reset": False}, range(4)),
    ],
    ids=str,
)
def test_a_game_begins_after_fewer_than_noop_max_frames(flags, frames):
    *_, told = play(small_args(max_frames=1, **flags), 20)  # each step is a game
    assert {*np.array(told["frame"]).flat} == {*frames}
    lengths = [x["episode"]["l"].tolist() for x in told["infos"]]
    assert lengths == [[1, 1]] * 20 and np.array(told["truncated"]).all()


def test_final_obs_of_a_cut_game_is_its_last_picture():
    """Of games of 10 steps: the older frames of the stack are those that were seen last."""
    _, _, told = play(small_args("SpaceInvaders", max_frames=38), 24)
    cut = np.array(told["truncated"])
    assert np.argwhere(cut).tolist() == [[9, 0], [9, 1], [19, 0], [19, 1]]
    for t, n in np.argwhere(cut):
        final = told["infos"][t]["final_obs"][n]
        assert (final[..., :-1] == told["obs"][t][n, ..., 1:]).all()
        assert not told["next_obs"][t][n, ..., :-1].any()  # a new game
        assert told["infos"][t]["episode"]["l"][n] == 10


def test_time_limits_bootstrap_from_the_last_picture(tmp_path, monkeypatch):
    """Reward plus gamma * V(final_obs), with the RNN state after the step; off: the reward."""
    found = {}
    for on in (True, False):
        batches = []
        monkeypatch.setattr(atari, "compute_gae", lambda *x, y=batches: y.append(x) or 0 * x[0])
        monkeypatch.setattr(atari, "evaluate", lambda *_: {"eval_mean": 0.0})
        flags = {"max_frames": 38, "truncation_bootstrap": on, "total_timesteps": 32, "rnn": "gru"}
        flags |= {"learning_rate": 1e-12, "gamma": 0.5, "num_minibatches": 1}
        train(tmp_path / str(on), "SpaceInvaders", **flags)
        found[on] = batches[0]
    rewards, values, dones = (found[True][i] for i in (0, 1, 2))
    assert dones[10].tolist() == [1, 1] and torch.equal(dones, found[False][2])
    added = rewards - found[False][0]
    assert (added[9] != 0).all() and not added[:9].any() and not added[10:].any()
    assert added[9].abs().max() < 0.5 * values.abs().max() * 1.5


def test_names_and_sticky_actions_are_those_of_gymnasium(monkeypatch):
    made = []

    def make_vec(env_id, *_, **kwargs):
        made.append((env_id, kwargs["repeat_action_probability"]))
        raise gym.error.Error("stop")

    monkeypatch.setattr(atari.gym, "make_vec", make_vec)
    ids = {"Breakout": 0.0, "BreakoutNoFrameskip-v4": 0.0, "Breakout-v4": 0.0}
    for env_id, sticky in (ids | {"ALE/Breakout-v5": 0.25}).items():
        with pytest.raises(atari.UsageError, match=f"{env_id}: stop"):
            atari.make_envs(small_args(env_id), 1)
        assert made.pop() == ("ALE/Breakout-v5", sticky)


# ----------------------------------------------------------------------------------------- networks


def test_the_network_has_as_many_weights_as_the_papers():
    """Convolutions 8,224 + 32,832 + 36,928, dense 1,606,144, 513 for each action and the value."""
    agent = make_agent(screen_size=84, ortho_init=False)
    assert sum(p.numel() for p in agent.parameters()) == 1_684_128 + 5 * 513
    assert {name for name, _ in agent.named_children()} == {
        "shared", "actor", "critic",
    }  # fmt: skip


def test_without_share_network_the_critic_has_a_network_of_its_own():
    agent = make_agent(share_network=False)
    obs, state, done, mask, _ = random_batch(3)
    agent.get_value(obs, state, done)[0].sum().backward()
    trained = {name for name, p in agent.named_parameters() if p.grad is not None}
    assert trained == {f"critic.{name}" for name, _ in agent.critic.named_parameters()}
    _, logprobs, values, _ = agent.get_action_and_value(obs, state, done, mask)
    assert logprobs.shape == values.shape == (3,)


@pytest.mark.parametrize(("scale_obs", "high"), [(True, 1.0), (False, 255.0)])
def test_pixels_reach_the_network_from_0_to(scale_obs, high):
    agent, seen = make_agent(scale_obs=scale_obs), []
    agent.shared[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs, state, done, *_ = random_batch(2)
    agent.get_value(obs, state, done)
    assert (seen[0].min(), seen[0].max()) == (0, high)
    torch.testing.assert_close(seen[0], obs.permute(0, 3, 1, 2) / 255 * high)


def test_bf16_is_used_and_rounds_a_little():
    torch.manual_seed(0)
    exact = make_agent(ortho_init=False)
    rounded = make_agent(ortho_init=False, precision="bf16")
    rounded.load_state_dict(exact.state_dict())
    obs, state, done, *_ = random_batch(50)
    exact, rounded = (x.encode(obs, state, done)[0] for x in (exact, rounded))
    assert rounded.dtype == torch.float32 and (exact - rounded).abs().max() > 1e-5
    torch.testing.assert_close(rounded, exact, atol=0.02 * exact.max().item(), rtol=0)


def test_actions_are_sampled_by_their_probabilities_and_masked():
    agent = make_agent()
    agent.actor[-1].bias.data = torch.tensor([0.0, 1.0, 2.0, 3.0])
    agent.actor[-1].weight.data.zero_()
    obs, state, done, mask, _ = random_batch(4000)
    mask[:, 3] = False
    torch.manual_seed(0)
    action, logprob, _, _ = agent.get_action_and_value(obs, state, done, mask)
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    counts = torch.bincount(action, minlength=4) / 4000
    assert counts[3] == 0 and counts[:3].tolist() == pytest.approx(expected.tolist(), abs=0.03)
    torch.testing.assert_close(logprob, expected.log()[action])
    assert (agent.get_action_and_value(obs, state, done, mask, greedy=True)[0] == 2).all()


# ----------------------------------------------------------------------------------------- training


def test_a_fused_step_is_adams():
    """Gradients of convolutions lie channels last: fused Adam would take them for transposed."""
    agents = [make_agent(), make_agent()]
    agents[1].load_state_dict(agents[0].state_dict())
    obs, state, done, mask, action = random_batch(8)
    batch = {"obs": obs, "dones": done, "masks": mask, "actions": action, "logprobs": done}
    batch |= {"advantages": torch.randn(8), "values": done, "returns": torch.randn(8)}
    batch = {name: x[None] for name, x in batch.items()}
    for agent, fused in zip(agents, (True, False), strict=True):
        params = list(agent.parameters())
        optimizer = torch.optim.Adam(params, 1e-2, fused=fused)
        for _ in range(2):
            atari.compute_gradients(agent, params, batch, state, torch.arange(8), 0.1)
            optimizer.step()
    for one, two in zip(agents[0].parameters(), agents[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


def test_rewards_are_signs_and_the_score_is_told(tmp_path, monkeypatch):
    """Detail 19; the score of a game is that of ALE."""
    rewards = []
    monkeypatch.setattr(atari, "compute_gae", lambda *x: rewards.append(x[0]) or 0 * x[0])
    monkeypatch.setattr(atari, "evaluate", lambda *_: {"eval_mean": 0.0})
    for sign in (True, False):
        flags = {"num_steps": 200, "total_timesteps": 400, "sign_rewards": sign}
        flags["truncation_bootstrap"] = False
        train(tmp_path / str(sign), "SpaceInvaders", max_frames=800, num_minibatches=1, **flags)
    assert {*rewards[0].flatten().tolist()} == {0.0, 1.0}
    assert rewards[-1].max() >= 5 and torch.equal(rewards[0], rewards[-1].sign())


class Squares(gym.vector.VectorEnv):
    """Stands in for ALE: a bright square says which action earns 3 points, RIGHT or LEFT.

    A game has two lives of five steps, unless the time limit cuts it."""

    life, lives = 5, 2
    names = "NOOP", "FIRE", "RIGHT", "LEFT"
    single_action_space = Discrete(4)
    single_observation_space = Box(0, 255, (1, 36, 36), np.uint8)

    def __init__(self, env_id, num_envs, mode, **kwargs):
        actions = [SimpleNamespace(name=name) for name in self.names]
        self.ale = SimpleNamespace(get_action_set=lambda: actions)
        self.num_envs, self.kwargs = num_envs, kwargs

    def reset(self, seed):
        self.rng, self.t, self.steps = np.random.default_rng(seed), np.zeros(self.num_envs, int), 0
        self.side = np.zeros(self.num_envs, int)
        self.obs = np.zeros((self.num_envs, self.kwargs["stack_num"], 36, 36), np.uint8)
        return self.draw(self.t == 0), self.infos()

    def draw(self, which):
        for n in np.flatnonzero(which):
            self.side[n] = self.rng.integers(2)
            left = 4 + 18 * self.side[n]
            self.obs[n] = self.rng.integers(100)
            self.obs[n, :, 12:24, left : left + 10] = 255
        return self.obs.copy()

    def infos(self):
        frames = 4 * np.array([self.t, np.full(self.num_envs, self.steps)]) + 1
        lives = self.lives - self.t // self.life
        return {"lives": lives, "episode_frame_number": frames[0], "frame_number": frames[1]}

    def step(self, actions):
        reward = 3 * (actions == self.side + 2)
        self.t, self.steps = self.t + 1, self.steps + 1
        no_lives = self.t == self.life * self.lives
        limit = -(-self.kwargs["max_num_frames_per_episode"] // 4)
        truncated = (self.t == limit) & ~no_lives
        terminated = (self.t % self.life == 0) & ~truncated
        final_obs = self.draw(self.t > 0)
        over = no_lives | truncated
        self.t = self.t * ~over
        return (
            self.draw(over),
            reward,
            terminated,
            truncated,
            self.infos() | {"final_obs": final_obs},
        )


@pytest.mark.parametrize(
    ("life", "flags", "value"),
    [
        (1, {"total_timesteps": 2048}, 1.0),
        (10**9, {"total_timesteps": 4096, "gamma": 0.8, "max_frames": 20}, 5.0),  # 1 / (1 - gamma)
    ],
    ids=["one step", "for ever, cut"],
)
def test_the_side_of_a_square_is_learned(life, flags, value, tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "life", life)
    monkeypatch.setattr(Squares, "lives", 1)
    monkeypatch.setattr(atari.gym, "make_vec", Squares)
    flags |= {"num_envs": 16, "update_epochs": 4, "learning_rate": 1e-3, "eval_episodes": 20}
    flags |= {"clip_vloss": False, "frame_stack": 1, "fire_reset": False}
    agent, summary = train(tmp_path / "run", **flags)
    best_score = 3 * min(life, 5)
    assert summary["eval_mean"] == best_score
    assert summary["eval_sampled_mean"] > 0.9 * best_score
    obs, _ = atari.reset(atari.make_envs(agent.args, 20), 1)
    with torch.no_grad():
        values, _ = agent.get_value(torch.from_numpy(obs), torch.zeros(0, 20, 16), torch.ones(20))
    assert values.mean().item() == pytest.approx(value, rel=0.1) and values.std() < 0.1 * value


OPTIMIZER = (
    "    optimizer = torch.optim.Adam(agent.parameters(), learning_rate, eps=eps, fused=True)\n"
)
GRADS = "    # Not loss.backward()"
CHANGES = {
    "adamw": {
        OPTIMIZER: """    heads = [*agent.actor.parameters(), *agent.critic.parameters()]
    groups = [{"params": agent.shared.parameters()}, {"params": heads, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, args.learning_rate)
"""
    },
    "auxiliary_loss": {
        GRADS: """    loss = loss + agent.shared(agent.normalize(mb["obs"])).square().mean()
"""
        + GRADS
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_change(name, tmp_path, changed_copy):
    """A usual change of a copy takes effect, and survives a resume."""
    ends = []
    for module in (atari, changed_copy("ppo_atari", CHANGES[name])):
        args = module.Args(**SMALL, max_frames=60, run_dir=str(tmp_path / module.__name__))
        module.train(args)
        ends.append(nn.utils.parameters_to_vector(module.load_agent(args.run_dir).parameters()))
    assert (ends[0] - ends[1]).abs().max() > 1e-4
    checkpoint, args = module.load_checkpoint(args.run_dir)
    rates = [group["initial_lr"] for group in checkpoint["optimizer"]["param_groups"]]
    assert rates == ([2.5e-4, 1e-2] if name == "adamw" else [2.5e-4])
    args.resume, args.total_timesteps = args.run_dir, 192
    assert module.train(args, checkpoint)["global_step"] == 192


# -------------------------------------------------------------------------------- evaluation, video


@pytest.fixture
def all_told(monkeypatch):
    """What all games tell that make_envs makes, in the order in which it makes them."""
    told, make_envs = [], atari.make_envs

    def make_recorded(*args):
        envs, rows = make_envs(*args), []
        step = envs.env.step

        def step_and_tell(actions):
            rows.append((actions, *step(actions)))
            return rows[-1][1:]

        envs.env.step = step_and_tell
        told.append(rows)
        return envs

    monkeypatch.setattr(atari, "make_envs", make_recorded)
    return told


def array(told, name):
    """(T, N) of what the games told in every step."""
    names = ("actions", "obs", "rewards", "terminated", "truncated")
    return np.array([x[names.index(name)] if name in names else x[5][name] for x in told])


def test_evaluation_plays_whole_games_with_a_fire_in_each_life(all_told):
    """Its memory begins anew with each life, as in training. Scores are of the first games."""
    agent, starts = make_agent(rnn="gru"), []
    encode = agent.encode
    agent.encode = lambda *x: starts.append(x[2].tolist()) or encode(*x)
    summary = atari.evaluate(agent, 1000)
    assert len(starts) == sum(len(told) for told in all_told)
    for name, told in zip(("eval", "eval_sampled"), all_told, strict=True):
        lives, rewards, scores = array(told, "lives"), array(told, "rewards"), []
        for n in range(2):
            end = np.flatnonzero(np.diff(lives[:, n]) > 0)[0] + 1
            assert {*lives[:end, n]} == {5, 4, 3, 2, 1}
            scores.append(rewards[: end + 1, n].sum())
        assert summary[f"{name}_mean"] == np.mean(scores)
        assert summary[f"{name}_std"] == np.std(scores)
        assert starts[0] == [1, 1]
        assert starts[1 : len(told)] == array(told, "terminated")[:-1].tolist()
        assert (array(told, "actions")[1:][array(told, "terminated")[:-1]] == 1).all()
        del starts[: len(told)]


def test_evaluation_of_an_endless_game_ends(all_told):
    """After max_frames: games of Breakout in which the ball is never lost."""
    agent = make_agent(max_frames=203, fire_reset=False, episodic_life=False, eval_episodes=1)
    agent.actor[-1].bias.data[0] = 1e3  # NOOP: without FIRE there is no ball
    summary = atari.evaluate(agent)
    assert [len(told) for told in all_told] == [51, 51]
    assert array(all_told[0], "truncated")[:, 0].nonzero()[0].tolist() == [50]
    assert summary["eval_mean"] == 0


@pytest.mark.parametrize(
    ("env_id", "flags"),
    [
        ("ALE/Breakout-v5", {"max_frames": 400}),
        ("Pooyan", {"frame_skip": 3, "max_frames": 250}),  # not 210 high
    ],
    ids=str,
)
def test_a_video_is_the_same_game(env_id, flags, all_told, tmp_path):
    """In color, one frame per step but the last, which returns the next game's picture."""
    moviepy = pytest.importorskip("moviepy")
    args = small_args(env_id, capture_video=True, run_dir=str(tmp_path), **flags)
    agent = atari.Agent(atari.make_envs(args, 1), args)
    agent.actor[-1].weight.data *= 100  # some variety in deterministic actions
    atari.evaluate(agent, 0)
    _, game, video, _ = all_told  # of the agent, deterministic, its video, sampled
    for name in ("actions", "rewards", "lives", "episode_frame_number"):
        assert (array(game, name)[: len(video), 0] == array(video, name)[:, 0]).all(), name
    assert (array(game, "terminated") | array(game, "truncated"))[len(video), 0]
    frames = array(video, "obs")[:, 0, 0]
    clip = moviepy.VideoFileClip(str(tmp_path / "videos" / "episode-0.mp4"))
    assert clip.size == [420, 420] and clip.fps == 60 / args.frame_skip
    assert clip.duration == pytest.approx(len(video) / clip.fps, abs=0.1)
    for t in (0, len(video) // 2):
        picture = clip.get_frame((t + 0.5) / clip.fps)
        assert abs(picture - frames[t].astype(float)).mean() < 10
        assert np.ptp(frames[t].astype(int), axis=-1).max() > 50  # in color
    clip.close()
