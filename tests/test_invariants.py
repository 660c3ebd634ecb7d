"""What must hold on real environments, whatever the agent has learned."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import probes
import pytest
import torch
from conftest import load_agent, small_agent, small_args, trained, watched_run
from gymnasium.spaces import Box
from test_resume import read_metrics
from torch import nn

import ppo_continuous as ppo

TRAIN_STEP = ppo.train_step  # watched runs replace it
AGENTS = {
    "feed-forward": {},
    "shared network": {"share_network": True},
    "learned std": {"learn_std": True},
    "gru": {"rnn": "gru"},
    "lstm": {"rnn": "lstm"},
    "gru, short sequences": {"rnn": "gru", "rnn_seq_len": 4},
    "lstm, short sequences": {"rnn": "lstm", "rnn_seq_len": 4},
    "gru, single steps": {"rnn": "gru", "rnn_seq_len": 1},
    "lstm, no reset": {"rnn": "lstm", "rnn_reset": False},
}
RECURRENT = {name: flags for name, flags in AGENTS.items() if "rnn" in flags}


def weights(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def pendulum_agent(**flags):
    """Agent for three observations and one action."""
    envs = SimpleNamespace(single_observation_space=Box(-1, 1, (3,)), single_action_space=Box(-2, 2, (1,)))
    return ppo.Agent(envs, small_args("unused", **flags), torch.device("cpu"))


# ---------------------------------------------------------------------------------------- the first minibatch


def assert_first_minibatch_is_on_policy(run_dir, env_id, **flags):
    """Ratio 1 and KL 0 in the first minibatch of each rollout, with updates in between. Returns the run."""
    firsts, epochs = [], flags["update_epochs"] * flags["num_minibatches"]

    def on_step(agent, opt, batch, states, index, coefs, losses):
        if len(firsts) % epochs == 0:
            mb = {name: x[:, index] for name, x in batch.items()}
            inputs = mb["obs"], states[:, index], mb["starts"], mb["mask"], mb["actions"]
            _, logprob, _, value, _ = agent(*inputs)
            torch.testing.assert_close(logprob, mb["logprobs"], rtol=0, atol=1e-4)
            if not agent.args.norm_value:  # which gives the values another unit
                torch.testing.assert_close(value, mb["values"], rtol=1e-4, atol=1e-4)
            alone, saved = torch.zeros_like(losses), {name: x.clone() for name, x in opt.items()}
            TRAIN_STEP(agent, opt, batch, states, index, coefs, alone)
            assert alone[ppo.LOSSES.index("approx_kl")].abs() < 1e-5 > alone[ppo.LOSSES.index("clipfrac")]
            changed = opt["params"] != saved["params"]
            assert changed.any()
            for name, x in saved.items():
                opt[name].copy_(x)
        firsts.append(weights(agent))

    seen = watched_run(run_dir, env_id, on_step, target_kl=None, anneal_lr=False, learning_rate=1e-2, **flags)
    assert len(firsts) == 3 * epochs and not torch.equal(firsts[0], firsts[epochs])
    return seen


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v5"])
@pytest.mark.parametrize("flags", AGENTS.values(), ids=AGENTS)
@pytest.mark.usefixtures("weights_that_move")
def test_first_minibatch_has_ratio_1(tmp_path, env_id, flags):
    seen = assert_first_minibatch_is_on_policy(tmp_path / "run", env_id, num_steps=64, total_timesteps=768,
                                               update_epochs=2, num_minibatches=4, **flags)
    assert sum(data["dones"][:-1].sum() for data, *_ in seen.rollouts) > 0


@pytest.mark.parametrize("flags", [{}, {"rnn": "gru"}, {"rnn": "lstm", "rnn_seq_len": 4}], ids=str)
def test_first_minibatch_after_resume_has_ratio_1(tmp_path, flags):
    flags = {"num_steps": 32, "update_epochs": 2, "num_minibatches": 4, "norm_value": False, **flags}
    trained(tmp_path / "run", "CartPole-v1", total_timesteps=256, **flags)
    checkpoint, _ = ppo.load_checkpoint(tmp_path / "run")
    seen = assert_first_minibatch_is_on_policy(tmp_path / "run", "CartPole-v1", checkpoint=checkpoint,
                                               resume=str(tmp_path / "run"), total_timesteps=640, **flags)
    assert seen.opt["bias"][0] > 0 and len(seen.rollouts) == 3  # none is uncounted after a resume
    assert sum(len(episodes) for *_, episodes in seen.rollouts) > 0


# ------------------------------------------------------------------------------------------------- recurrence


def step_by_step(agent, obs, state, starts):
    """Features and last state (K, N, H) from one call of the recurrent layer per step and environment."""
    lstm, rows, last = agent.args.rnn == "lstm", [], []
    for n in range(obs.shape[1]):
        hidden = state[:, n].clone()  # (K, H)
        for t in range(len(obs)):
            if starts[t, n] and agent.args.rnn_reset:
                hidden = torch.zeros_like(hidden)
            given = (hidden[:1, None], hidden[1:, None]) if lstm else hidden[:, None]
            output, given = agent.rnn(obs[t, n].view(1, 1, -1), given)
            hidden = torch.cat([h[:, 0] for h in given]) if lstm else given[:, 0]
            rows.append(agent.trunk(output.flatten()))
        last.append(hidden)
    return torch.stack(rows).unflatten(0, (obs.shape[1], len(obs))).transpose(0, 1), torch.stack(last, 1)


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
@pytest.mark.parametrize("rnn_reset", [True, False])
def test_stretches_of_steps_equal_a_loop_with_resets(rnn, rnn_reset):
    _, agent, _, _ = small_agent("Pendulum-v1", rnn=rnn, rnn_reset=rnn_reset)
    obs, state = torch.randn(12, 5, 3), torch.randn(agent.num_states, 5, 16)
    starts = (torch.rand(12, 5) < 0.2).float()
    starts[0], starts[-1] = torch.tensor([1.0, 0, 1, 0, 0]), torch.tensor([0.0, 0, 1, 1, 0])
    with torch.no_grad():
        features, last = agent.encode(obs, state, starts)
        expected, expected_last = step_by_step(agent, obs, state, starts)
        torch.testing.assert_close(features, expected)
        torch.testing.assert_close(last, expected_last)
        without, _ = agent.encode(obs, state, torch.zeros_like(starts))
    assert torch.allclose(features, without, atol=1e-6) == (not rnn_reset)


@pytest.mark.parametrize("flags", RECURRENT.values(), ids=RECURRENT)
def test_recomputed_values_are_those_of_the_rollout(flags):
    envs, agent, _, env_state = small_agent("CartPole-v1", num_steps=32, **flags)
    for _ in range(2):
        data, *_, episodes = ppo.rollout(envs, agent, agent.act, env_state)
        assert episodes
        with torch.no_grad():
            values = agent.get_value(data["obs"], data["rnn_states"][0], data["starts"])
        torch.testing.assert_close(values, data["values"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rnn_reset", [True, False])
def test_memory_ends_with_the_episode_unless_reset_is_off(rnn_reset):
    envs, agent, _, env_state = small_agent("CartPole-v1", num_steps=64, rnn="gru", rnn_reset=rnn_reset)
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state)
    t, n = data["starts"][1:].nonzero()[0] + torch.tensor([1, 0])
    obs, state = data["obs"][t, n].view(1, 1, -1), data["rnn_states"][t][:, [n]]
    with torch.no_grad():
        fresh = agent.get_value(obs, torch.zeros_like(state), torch.ones(1, 1))
    assert state.abs().max() > 0
    assert torch.allclose(data["values"][t, n], fresh, atol=1e-7) == rnn_reset


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_gradient_goes_through_time_as_far_as_a_sequence(rnn):
    _, agent, _, _ = small_agent("Pendulum-v1", rnn=rnn)
    obs = torch.randn(6, 1, 3, requires_grad=True)
    agent.get_value(obs, torch.zeros(agent.num_states, 1, 16), torch.zeros(6, 1))[-1].sum().backward()
    assert (obs.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_an_update_changes_every_recurrent_weight(tmp_path, rnn):
    before = []

    def on_step(agent, *_):
        before.append({name: p.detach().clone() for name, p in agent.named_parameters()})

    seen = watched_run(tmp_path / "run", "Pendulum-v1", on_step, rnn=rnn, total_timesteps=64)
    for name, p in seen.agent.named_parameters():
        assert not torch.equal(p, before[0][name]), name


@pytest.mark.parametrize("length", [1, 4, 16])
def test_sequences_are_stretches_of_time_of_one_environment(tmp_path, length):
    """Each with the state before its first step, and every step in one minibatch of each epoch."""
    batches, indices = [], []

    def on_step(agent, opt, batch, states, index, coefs, losses):
        batches.append((batch, states))
        indices.append(index)

    seen = watched_run(tmp_path / "run", "CartPole-v1", on_step, rnn="lstm", rnn_seq_len=length,
                       total_timesteps=64)
    (data, *_), (batch, states) = seen.rollouts[-1], batches[0]
    assert set(batch) == set(ppo.BATCH) and states.shape == (2, 64 // length, 16)
    found = set()
    for s in range(64 // length):
        (t, n), = [(t, n) for t in range(0, 16, length) for n in range(4)
                   if torch.equal(batch["obs"][0, s], data["obs"][t, n])]
        found.add((t, n))
        assert torch.equal(states[:, s], data["rnn_states"][t, :, n])
        for name in ("obs", "actions", "logprobs", "values", "starts", "mask"):
            assert torch.equal(batch[name][:, s], data[name][t : t + length, n]), name
    assert len(found) == 64 // length
    assert len(indices) == 2 * 4
    for epoch in (indices[:4], indices[4:]):
        assert torch.cat(epoch).sort().values.tolist() == list(range(64 // length))
    assert not torch.equal(indices[0], indices[4])  # shuffled anew


@pytest.mark.parametrize("recompute_adv", [True, False])
def test_advantages_follow_the_critic_from_epoch_to_epoch(tmp_path, recompute_adv):
    batches = []
    watched_run(tmp_path / "run", "Pendulum-v1", lambda *args: batches.append(args[2]), learning_rate=1e-2,
                total_timesteps=64, recompute_adv=recompute_adv, target_kl=None, log_std_init=0.0)
    first, second = batches[0], batches[4]
    for name in ("logprobs", "values"):
        assert torch.equal(first[name], second[name])
    for name in ("advantages", "returns"):
        assert torch.equal(first[name], second[name]) == (not recompute_adv)


def test_logged_losses_are_means_over_all_minibatches(tmp_path):
    seen = watched_run(tmp_path / "run", "Pendulum-v1")
    for row, total in zip(read_metrics(tmp_path / "run"), (seen.losses[7], seen.losses[15]), strict=True):
        np.testing.assert_allclose([float(row[name]) for name in ppo.LOSSES], total / 8, rtol=1e-6)


# ---------------------------------------------------------------------------------------- actions, evaluation


@pytest.mark.parametrize("clip_actions", [True, False])
def test_learning_sees_the_action_unclipped_and_the_environment_clipped(clip_actions):
    envs, agent, _, env_state = small_agent("Pendulum-v1", log_std_init=1.0, clip_actions=clip_actions)
    played, step = [], envs.step

    def recorded_step(action):
        played.append(action)
        return step(action)

    envs.step = recorded_step
    data, *_ = ppo.rollout(envs, agent, agent.act, env_state)
    actions = data["actions"].numpy()
    assert np.abs(actions).max() > 1.5
    expected = 2 * (actions.clip(-1, 1) if clip_actions else actions)
    np.testing.assert_allclose(np.stack(played), expected, rtol=1e-6)
    _, logprob, *_ = agent(data["obs"], data["rnn_states"][0], data["starts"], data["mask"], data["actions"])
    torch.testing.assert_close(logprob, data["logprobs"])


def test_training_counts_every_observation_and_those_of_one_rollout_before(tmp_path):
    agent, summary = trained(tmp_path / "run", "Pendulum-v1")
    assert summary["global_step"] == 128 and agent.obs_rms.count == 128 + 4 * 16
    assert agent.value_rms.count == 128


def test_evaluation_changes_nothing_in_the_agent(tmp_path, capsys):
    _, agent, _, _ = small_agent("Pendulum-v1", norm_reward=True)
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    ppo.evaluate(agent, tmp_path, 1000)
    assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())
    assert before["obs_rms.count"] > 0 and before["reward_rms.count"] > 0
    assert "Pendulum-v1 after 1,000 steps: 2 episodes, deterministic actions\n" in capsys.readouterr().out


def test_evaluation_plays_one_raw_full_episode_in_each_environment(tmp_path):
    _, agent, _, _ = small_agent("CartPole-v1", norm_reward=True, eval_episodes=5)
    summary = ppo.evaluate(agent, tmp_path, 0)
    assert summary["eval_episodes"] == 5 and summary["eval_sampled_std"] > 0
    for name in ("eval_mean", "eval_sampled_mean"):
        total = 5 * summary[name]
        assert total == pytest.approx(round(total), abs=1e-6) and 8 * 5 <= total <= 500 * 5


def test_evaluation_of_an_environment_without_end_ends_with_a_sentence(tmp_path, capsys):
    _, agent, _, _ = small_agent("Endless-v0")
    summary = ppo.evaluate(agent, tmp_path, 0)  # the probe's own limit is 40 steps, which nothing enforces
    assert 40 <= summary["eval_mean"] <= 48 and summary["eval_std"] == 0
    assert capsys.readouterr().out.count("  2 have no end: cut after 40 steps\n") == 2


def test_evaluation_without_any_limit_has_27000_steps(tmp_path, capsys, monkeypatch):
    _, agent, _, _ = small_agent("Endless-v0", env_kwargs='{"limit": null}')
    calls = []
    monkeypatch.setattr(ppo, "rollout", lambda *args: calls.append(args) or ({}, [], []))
    ppo.evaluate(agent, tmp_path, 0)
    assert len(calls) == 2 * -(-27_000 // 16) and "cut after 27000 steps" in capsys.readouterr().out


@pytest.mark.parametrize("env_id, flags", [("Pendulum-v1", {}), ("CartPole-v1", {}), ("Hopper-v5", {}),
                                           ("CartPole-v1", {"rnn": "lstm"}), ("CartPole-v1", {"rnn": "gru"})])
def test_a_reloaded_agent_earns_the_same(tmp_path, env_id, flags):
    agent, summary = trained(tmp_path / "run", env_id, norm_value=True, **flags)
    checkpoint, _ = ppo.load_checkpoint(tmp_path / "run")
    assert torch.equal(weights(agent), checkpoint["opt"]["params"])
    again = ppo.evaluate(agent, tmp_path, 0)
    assert again == {name: x for name, x in summary.items() if name.startswith("eval")}
    other = ppo.evaluate(small_agent(env_id, seed=2, **flags)[1], tmp_path, 0)
    for name in ("eval_mean", "eval_sampled_mean"):
        assert other[name] != again[name]


def test_the_checkpoint_holds_all_of_optimizer_and_agent(tmp_path):
    seen = watched_run(tmp_path / "run", "Pendulum-v1", norm_reward=True)
    checkpoint, args = ppo.load_checkpoint(tmp_path / "run")
    for part, expected in (("agent", seen.agent.state_dict()), ("opt", seen.opt)):
        assert checkpoint[part].keys() == expected.keys()
        assert all(torch.equal(checkpoint[part][name], x) for name, x in expected.items())
    assert replace(args, run_dir=None) == small_args("Pendulum-v1", norm_reward=True)
    assert torch.equal(weights(load_agent(tmp_path / "run")), weights(seen.agent))


# ----------------------------------------------------------------------------------------------- detail flags


def two_iterations(run_dir, env_id="Pendulum-v1", **flags):
    """All weights after two iterations."""
    return weights(watched_run(run_dir, env_id, **flags).agent)


PENDULUM = {"target_kl": None, "learning_rate": 3e-3, "log_std_init": 0.5}
HOPPER = {"env_id": "Hopper-v5", "log_std_init": 0.5}
REWARDS = PENDULUM | {"norm_reward": True}
FEW_CLIPS = PENDULUM | {"clip_coef": 0.02}
FOREVER = {"env_id": "Forever-v0"}
GRU = {"env_id": "CartPole-v1", "rnn": "gru", "num_steps": 64, "total_timesteps": 512}
FLIPS = [
    (PENDULUM, {"seed": 2}), (HOPPER, {"clip_actions": False}), (PENDULUM, {"scale_actions": False}),
    (PENDULUM, {"norm_obs": False}), (PENDULUM, {"clip_obs": 0.5}), (PENDULUM, {"norm_reward": True}),
    (REWARDS, {"clip_reward": 0.1}), (FOREVER, {"truncation_bootstrap": False}),
    (PENDULUM, {"learning_rate": 1e-3}), (PENDULUM, {"anneal_lr": False}), (PENDULUM, {"adam_eps": 1e-3}),
    (PENDULUM, {"ortho_init": False}), (PENDULUM, {"gamma": 0.9}), (PENDULUM, {"gae_lambda": 0.5}),
    (PENDULUM, {"gae_lambda": 1.0}), (PENDULUM, {"recompute_adv": False}), (PENDULUM, {"num_minibatches": 2}),
    (PENDULUM, {"update_epochs": 3}), (PENDULUM, {"norm_adv": False}), (PENDULUM, {"clip_coef": 0.02}),
    (FEW_CLIPS, {"anneal_clip": True}), (FEW_CLIPS, {"clip_vloss": True}),
    (PENDULUM | {"learn_std": True}, {"ent_coef": 0.1}), (PENDULUM, {"vf_coef": 0.1}),
    (PENDULUM, {"max_grad_norm": 0.0}), (PENDULUM, {"learn_std": True}), (PENDULUM, {"checkpoint_every": 1}),
    (PENDULUM, {"target_kl": 1e-6}), (PENDULUM, {"norm_value": False}), (PENDULUM, {"activation": "relu"}),
    (PENDULUM, {"log_std_init": 0.0}), (PENDULUM, {"env_kwargs": '{"g": 1.0}'}),
    (GRU, {"rnn_reset": False}), (GRU, {"rnn_seq_len": 16}), (GRU, {"rnn_seq_len": 1}),
    ({"env_id": "Masked-v0", "target_kl": None}, {"mask_actions": False}),
]


@pytest.mark.parametrize("base, flip", FLIPS, ids=[" ".join(flip) for _, flip in FLIPS])
def test_each_flag_changes_the_weights_after_two_iterations(tmp_path, base, flip, monkeypatch):
    monkeypatch.setattr(probes.Masked, "forbid", "mask_actions" not in flip)
    one, two = (two_iterations(tmp_path / name, **flags) for name, flags in (("1", base), ("2", base | flip)))
    assert not torch.equal(one, two)


@pytest.mark.parametrize("base", [PENDULUM, REWARDS, FOREVER, GRU], ids=str)
def test_the_same_run_again_has_the_same_weights(tmp_path, base):
    assert torch.equal(two_iterations(tmp_path / "1", **base), two_iterations(tmp_path / "2", **base))


@pytest.mark.parametrize("base, flip", [
    (PENDULUM, {"clip_reward": 0.1}),  # no normalized rewards to clip
    (PENDULUM, {"truncation_bootstrap": False}),  # no episode ends
    (PENDULUM, {"rnn_seq_len": 4}), (PENDULUM, {"rnn_hidden": 8}), (PENDULUM, {"mask_actions": False}),
    (PENDULUM, {"exp_name": "other"}), (PENDULUM, {"eval_episodes": 1}), (PENDULUM, {"checkpoint_every": 2}),
], ids=str)
def test_flags_change_nothing_but_what_they_name(tmp_path, base, flip):
    one, two = (two_iterations(tmp_path / name, **flags) for name, flags in (("1", base), ("2", base | flip)))
    assert torch.equal(one, two)


@pytest.mark.parametrize("flags, names", [
    ({}, "actor.0 actor.2 actor.4 critic.0 critic.2 critic.4"),
    ({"share_network": True}, "actor.0 critic.0 trunk.0 trunk.2"),
    ({"learn_std": True, "hidden": ()}, "actor.0 critic.0 log_std"),
    ({"rnn": "gru", "hidden": (8,)}, "actor.0 actor.2 critic.0 critic.2 rnn"),
], ids=str)
def test_networks_have_the_layers_that_their_flags_name(flags, names):
    agent = pendulum_agent(**flags)
    layers = {name.rsplit(".", 1)[0] for name, _ in agent.named_parameters()}
    assert sorted(layers) == names.split()
    assert agent.actor[-1].out_features == 1


def test_a_learning_rate_of_almost_0_leaves_the_weights(tmp_path):
    before = []
    seen = watched_run(tmp_path / "run", "Pendulum-v1", lambda agent, *_: before.append(weights(agent)),
                       total_timesteps=64, learning_rate=1e-30)
    assert torch.allclose(weights(seen.agent), before[0], rtol=0, atol=1e-25)
    assert seen.opt["bias"].tolist() == pytest.approx([1 - 0.9**8, 1 - 0.999**8], rel=1e-4)
    row, = read_metrics(tmp_path / "run")
    assert float(row["approx_kl"]) == pytest.approx(0, abs=1e-6) and float(row["grad_norm"]) > 0


def test_rate_and_clip_range_fall_linearly(tmp_path):
    steps = []
    watched_run(tmp_path / "run", "Pendulum-v1", lambda *args: steps.append(args[5]), total_timesteps=256,
                anneal_clip=True, learning_rate=1e-3, ent_coef=0.1, vf_coef=0.7)
    for i in range(4):
        share = 1 - i / 4
        np.testing.assert_allclose(steps[8 * i], [1e-3 * share, 0.2 * share, 0.1, 0.7], rtol=1e-6)
    assert [float(row["learning_rate"]) for row in read_metrics(tmp_path / "run")] == pytest.approx(
        [1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.parametrize("target_kl, epochs", [(1e-9, 1), (1e9, 5), (None, 5)])
def test_epochs_stop_after_the_one_that_exceeds_target_kl(tmp_path, target_kl, epochs):
    flags = {"total_timesteps": 64, "update_epochs": 5, "target_kl": target_kl}
    seen = watched_run(tmp_path / "run", "Pendulum-v1", **flags)
    row, = read_metrics(tmp_path / "run")
    assert int(row["epochs"]) == epochs and len(seen.losses) == 4 * epochs


# ------------------------------------------------------------------------------------------------------- init


def assert_orthogonal(weight, gain):
    torch.testing.assert_close(torch.linalg.svdvals(weight.detach()), torch.full((min(weight.shape),), gain))


@pytest.mark.parametrize("flags", [{}, {"share_network": True}, {"rnn": "gru"}, {"rnn": "lstm"}],
                         ids=str)
def test_init_is_orthogonal_with_its_gains(flags):
    agent = pendulum_agent(**flags)
    heads = {agent.actor[-1]: 0.01, agent.critic[-1]: 1.0}
    layers = [layer for layer in agent.modules() if isinstance(layer, nn.Linear)]
    assert len(layers) == (4 if "share_network" in flags else 6)
    for layer in layers:
        assert_orthogonal(layer.weight, heads.get(layer, 2**0.5))
    for name, parameter in agent.named_parameters():
        assert "bias" not in name or parameter.eq(0).all()
        if "weight" in name and "rnn" in name:
            assert_orthogonal(parameter, 1.0)


def test_init_is_pytorchs_without_ortho_init():
    torch.manual_seed(5)
    layers = [nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 1)]
    torch.manual_seed(5)
    agent = pendulum_agent(ortho_init=False)
    for layer, ours in zip(layers, agent.actor[::2], strict=True):
        assert torch.equal(layer.weight, ours.weight) and torch.equal(layer.bias, ours.bias)
