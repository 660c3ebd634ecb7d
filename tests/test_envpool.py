"""ppo_continuous.py --envpool: environments in C++ threads, on all cores."""

import importlib.util
import json

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from conftest import flat, load, resume

import ppo_continuous as ppo

envpool = pytest.importorskip("envpool", reason="EnvPool has no wheel for this Python or system")
SHORT = """--envpool --env-threads 2 --num-envs 3 --num-steps 32 --num-minibatches 2
    --update-epochs 1 --eval-episodes 2 --no-compile --run-dir run"""
QUIET = '{"reset_noise_scale": 0}'


def make_pool(env_id, num_envs=2, **flags):
    return ppo.EnvPool(ppo.Args(env_id=env_id, num_envs=num_envs, **flags))


TASKS = [
    f"{name}-v5" for name in ("HalfCheetah", "Walker2d", "Hopper", "Swimmer", "Ant", "Humanoid")
]


@pytest.mark.parametrize("env_id", TASKS)
def test_pool_plays_as_gymnasium(env_id):
    """Bit for bit with EnvPool's version of MuJoCo; others round differently, Ant and Humanoid
    from the first contact with the ground on."""
    same_mujoco = mujoco.__version__.startswith("3.6.")
    touches = env_id in ("Ant-v5", "Humanoid-v5") and not same_mujoco
    steps, tolerance = (1 if touches else 15), (0 if same_mujoco else 1e-5)
    pool, env = make_pool(env_id, env_kwargs=QUIET), gym.make(env_id, **json.loads(QUIET))
    np.testing.assert_allclose(pool.reset(seed=[1, 2])[0][0], env.reset(seed=1)[0], atol=1e-14)
    rng, space = np.random.default_rng(0), env.action_space
    for _ in range(steps):
        actions = rng.uniform(space.low, space.high, (2, *space.shape)).astype(space.dtype)
        obs, reward, *_ = pool.step(actions.astype(float))
        theirs, their_reward, terminated, *_ = env.step(actions[0])
        if terminated:
            break
        np.testing.assert_allclose(obs[0], theirs, rtol=0, atol=tolerance)
        np.testing.assert_allclose(reward[0], their_reward, rtol=0, atol=1e-5)  # float32


def test_an_episode_ends_and_the_next_begins_in_one_step():
    envs = gym.wrappers.vector.RecordEpisodeStatistics(make_pool("Hopper-v5", 3))
    first, _ = envs.reset(seed=[5, 6, 7])
    (total, lengths), rng, ended = np.zeros((2, 3)), np.random.default_rng(0), 0
    for _ in range(200):
        obs, reward, terminated, _, infos = envs.step(rng.uniform(-1, 1, (3, 3)))
        total += reward
        lengths += 1
        for n in np.flatnonzero(terminated):
            ended += 1
            assert np.abs(obs[n] - first[n]).max() < 0.02  # a start: within the reset noise
            assert np.abs(infos["final_obs"][n] - first[n]).max() > 0.1
            assert infos["_episode"][n] and infos["episode"]["l"][n] == lengths[n]
            np.testing.assert_allclose(infos["episode"]["r"][n], total[n], rtol=1e-6)
            total[n] = lengths[n] = 0
    assert ended > 6


def test_seeds_decide_and_the_limit_is_the_registered_one():
    pool = make_pool("Pendulum-v1", env_kwargs='{"max_episode_steps": 7}')
    one, _ = pool.reset(seed=[1, 2**32 - 1])
    two, _ = pool.reset(seed=[1, 2])
    assert (one[0] == two[0]).all() and (one[1] != two[1]).any()
    assert ppo.time_limit(pool) == 7
    cut = [pool.step(np.zeros((2, 1)))[3].tolist() for _ in range(14)]
    assert cut == ([[False] * 2] * 6 + [[True] * 2]) * 2
    endless = make_pool("Pendulum-v1", env_kwargs='{"max_episode_steps": -1}')
    endless.reset(seed=[1, 2])
    assert not any(endless.step(np.zeros((2, 1)))[3].any() for _ in range(300))


def test_a_wrapper_that_it_would_leave_out_is_refused(monkeypatch):
    make_env = ppo.make_env
    monkeypatch.setattr(
        ppo, "make_env", lambda args: gym.wrappers.TransformReward(make_env(args), lambda r: -r)
    )
    with pytest.raises(ppo.UsageError, match="without the wrapper TransformReward"):
        make_pool("CartPole-v1")


def test_threads_are_shared_out_among_processes(monkeypatch):
    """Each has a core of its own, unless their number is given."""
    pools, make = [], envpool.make
    monkeypatch.setattr(envpool, "make", lambda *x, **kw: pools.append(kw) or make(*x, **kw))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for ranks, flag in ((1, 0), (2, 0), (3, 0), (2, 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))
        make_pool("CartPole-v1", env_threads=flag)
    assert [kw["num_threads"] for kw in pools] == [2, 1, 1, 4]
    assert [kw.get("thread_affinity_offset") for kw in pools] == [0, 1, 2, None]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "InvertedPendulum-v5"])
def test_resume_is_exact(main, stopped, tmp_path, env_id):
    flags = f"""{SHORT} --env-id {env_id} --env-kwargs '{{"max_episode_steps": 20}}'
        --checkpoint-every 2 --total-timesteps"""
    main("ppo_continuous", f"{flags} 576")
    (tmp_path / "run").rename(tmp_path / "whole")
    stopped("ppo_continuous", f"{flags} 576", 4)
    resume(main, "ppo_continuous")
    whole, resumed = (flat(load(tmp_path / name)) for name in ("whole", "run"))
    different = {name for name, x in whole.items() if not np.array_equal(x, resumed[name])}
    assert different <= {"/progress/seconds", "/args/resume", "/args/run_dir"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id CliffWalking-v1", "other observations"),
        ("--env-id MountainCarContinuous-v0 --env-kwargs '{\"goal_velocity\":0}'", "goal_velocity"),
        ("--env-id probes:Bandit-v0", "not supported"),
        ("--no-envpool --env-threads 2", "env_threads needs envpool"),
    ],
)
def test_what_envpool_has_not_is_one_sentence(main, tmp_path, flags, message):
    _, err = main("ppo_continuous", f"--envpool --run-dir run {flags}", 2)
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_package_is_asked_for(main, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "envpool" else found(name)
    )
    _, err = main("ppo_continuous", "--envpool", 2)
    assert "pip install envpool" in err
