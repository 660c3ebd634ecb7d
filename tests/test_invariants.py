"""What must hold on real environments, whatever the agent has learned."""

import numpy as np
import probes  # noqa: F401
import pytest
import torch
from conftest import hyper_of, small_agent, small_args, trained
from gymnasium.spaces import Box
from torch import nn

import ppo_continuous as ppo

PENDULUM_ACTIONS = Box(-2, 2, (1,))
AGENTS = {
    "feed-forward": {},
    "shared network": {"share_network": True},
    "learned deviation": {"learn_std": True},
    "state-dependent deviation": {"state_dependent_std": True},
    "tanh-normal": {"action_dist": "tanh-normal"},
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


def after_update(agent, opt, stream, rollout, learning_rate=1e-3):
    """Metrics of an update, with a step size that shows in every weight."""
    hyper = hyper_of(agent.args, learning_rate=learning_rate)
    return ppo.update(agent, opt, rollout, stream, hyper, ppo.train_step)


# ---------------------------------------------------------------------------------------- the first minibatch


def assert_first_minibatch_is_on_policy(envs, agent, opt, stream):
    """Ratio 1 and KL 0 in the first minibatch of three rollouts, with updates, and endings, in between."""
    seen, endings = [], 0

    def step(agent, opt, batch, state, index, hyper, metrics):
        if not seen:
            mb = {name: x[:, index] for name, x in batch.items()}
            logprob = agent(mb["obs"], state[index], mb["starts"], mb.get("mask"), mb["actions"])[1]
            seen.append((logprob - mb["logprobs"]).abs().max().item())
            alone = torch.zeros_like(metrics)
            ppo.train_step(agent, opt, batch, state, index, hyper, alone)
            assert alone[ppo.METRICS.index("approx_kl")].abs() < 1e-5 > alone[ppo.METRICS.index("clipfrac")]
            metrics.add_(alone)
        else:
            ppo.train_step(agent, opt, batch, state, index, hyper, metrics)

    for _ in range(3):
        rollout, _, _ = ppo.collect(envs, agent, agent.act, stream)
        endings += rollout["done"][:-1].sum().item()
        before = weights(agent)
        hyper = hyper_of(agent.args, learning_rate=1e-2, target_kl=None)
        ppo.update(agent, opt, rollout, stream, hyper, step)
        assert seen.pop() < 1e-4
        assert not torch.equal(weights(agent), before)
    return endings


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v5"])
@pytest.mark.parametrize("flags", AGENTS.values(), ids=AGENTS)
@pytest.mark.usefixtures("weights_that_move")
def test_first_minibatch_has_ratio_1(env_id, flags):
    endings = assert_first_minibatch_is_on_policy(*small_agent(env_id, num_steps=64, **flags))
    assert endings > 0


@pytest.mark.parametrize("flags", [{}, {"rnn": "gru"}, {"rnn": "lstm", "rnn_seq_len": 4}], ids=str)
def test_first_minibatch_after_reload_has_ratio_1(tmp_path, flags):
    trained(tmp_path, "CartPole-v1", num_steps=32, total_timesteps=256, **flags)
    checkpoint = ppo.load_checkpoint(tmp_path)
    args = ppo.Args(**checkpoint["args"])
    envs, agent, opt = ppo.build(args, checkpoint, args.num_envs, torch.device("cpu"))
    stream = ppo.restart(envs, agent, 0, checkpoint["at"]["iteration"])
    assert opt["bias"][0] > 0 and agent.obs_rms.count > 0
    assert assert_first_minibatch_is_on_policy(envs, agent, opt, stream) > 0


# ------------------------------------------------------------------------------------------------- recurrence


def step_by_step(agent, obs, state, starts):
    """Features and last state from one call of the recurrent layer for each step and each environment."""
    lstm, rows, last = agent.args.rnn == "lstm", [], []
    for n in range(obs.shape[1]):
        hidden = state[n].clone()
        for t in range(len(obs)):
            if starts[t, n] and agent.args.rnn_reset:
                hidden = torch.zeros_like(hidden)
            given = tuple(h.view(1, 1, -1) for h in hidden.chunk(2)) if lstm else hidden.view(1, 1, -1)
            output, given = agent.rnn(obs[t, n].view(1, 1, -1), given)
            hidden = torch.cat([h.flatten() for h in given]) if lstm else given.flatten()
            rows.append(agent.trunk(output.flatten()))
        last.append(hidden)
    return torch.stack(rows).unflatten(0, (obs.shape[1], len(obs))).transpose(0, 1), torch.stack(last)


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
@pytest.mark.parametrize("rnn_reset", [True, False])
def test_stretches_of_steps_equal_a_loop_with_resets(rnn, rnn_reset):
    _, agent, _, _ = small_agent("Pendulum-v1", rnn=rnn, rnn_reset=rnn_reset)
    obs, state = torch.randn(12, 5, 3), torch.randn(5, agent.state_size)
    starts = (torch.rand(12, 5) < 0.2).float()
    starts[0], starts[-1] = torch.tensor([1.0, 0, 1, 0, 0]), torch.tensor([0.0, 0, 1, 1, 0])
    with torch.no_grad():
        features, last = agent.features(obs, state, starts)
        expected, expected_last = step_by_step(agent, obs, state, starts)
        torch.testing.assert_close(features, expected)
        torch.testing.assert_close(last, expected_last)
        without, _ = agent.features(obs, state, torch.zeros_like(starts))
    assert torch.allclose(features, without, atol=1e-6) == (not rnn_reset)


@pytest.mark.parametrize("flags", RECURRENT.values(), ids=RECURRENT)
def test_recomputed_values_are_those_of_the_rollout(flags):
    envs, agent, _, stream = small_agent("CartPole-v1", num_steps=32, **flags)
    for _ in range(2):
        rollout, _, episodes = ppo.collect(envs, agent, agent.act, stream)
        assert episodes
        with torch.no_grad():
            values = agent.get_value(rollout["obs"], rollout["states"][0], rollout["starts"])
        torch.testing.assert_close(values, rollout["values"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rnn_reset", [True, False])
def test_memory_ends_with_the_episode_unless_reset_is_off(rnn_reset):
    envs, agent, _, stream = small_agent("CartPole-v1", num_steps=64, rnn="gru", rnn_reset=rnn_reset)
    rollout, _, _ = ppo.collect(envs, agent, agent.act, stream)
    t, n = rollout["starts"][1:].nonzero()[0] + torch.tensor([1, 0])
    obs, state = rollout["obs"][t, n].view(1, 1, -1), rollout["states"][t, n].unsqueeze(0)
    with torch.no_grad():
        fresh = agent.get_value(obs, torch.zeros_like(state), torch.ones(1, 1))
    assert state.abs().max() > 0
    assert torch.allclose(rollout["values"][t, n], fresh, atol=1e-7) == rnn_reset


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_gradient_goes_through_time_as_far_as_a_sequence(rnn):
    _, agent, _, _ = small_agent("Pendulum-v1", rnn=rnn)
    obs = torch.randn(6, 1, 3, requires_grad=True)
    agent.get_value(obs, torch.zeros(1, agent.state_size), torch.zeros(6, 1))[-1].sum().backward()
    assert (obs.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("rnn", ["gru", "lstm"])
def test_an_update_changes_every_recurrent_weight(rnn):
    envs, agent, opt, stream = small_agent("Pendulum-v1", rnn=rnn)
    before = {name: p.clone() for name, p in agent.named_parameters()}
    after_update(agent, opt, stream, ppo.collect(envs, agent, agent.act, stream)[0])
    for name, p in agent.named_parameters():
        assert not torch.equal(p, before[name]), name


# ---------------------------------------------------------------------------------------- actions, evaluation


@pytest.mark.parametrize("clip_actions", [True, False])
def test_learning_sees_the_action_unclipped_and_the_environment_clipped(clip_actions):
    envs, agent, _, stream = small_agent("Pendulum-v1", log_std_init=1.0, clip_actions=clip_actions)
    played, step = [], envs.step
    envs.step = lambda action: (played.append(action), step(action))[1]
    rollout, _, _ = ppo.collect(envs, agent, agent.act, stream)
    actions, played = rollout["actions"].numpy(), np.stack(played)
    assert np.abs(actions).max() > 1.5
    np.testing.assert_allclose(played, 2 * (actions.clip(-1, 1) if clip_actions else actions), rtol=1e-6)
    _, logprob, *_ = agent(rollout["obs"], rollout["states"], rollout["starts"], None, rollout["actions"])
    torch.testing.assert_close(logprob, rollout["logprobs"])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1", "Masked-v0"])
def test_environments_in_threads_and_processes_play_the_same_rollout(env_id):
    rollouts = []
    for vector_env in ("sync", "thread", "async"):
        envs, agent, _, stream = small_agent(env_id, num_envs=2, vector_env=vector_env)
        rollouts.append(ppo.collect(envs, agent, agent.act, stream)[0])
        envs.close()
    sync, *others = rollouts
    assert ("mask" in sync) == (env_id == "Masked-v0")
    for other in others:
        assert sync.keys() == other.keys() and all(torch.equal(sync[name], other[name]) for name in sync)


def test_training_counts_every_observation_and_those_of_one_rollout_before(tmp_path):
    agent, summary = trained(tmp_path, "Pendulum-v1")
    assert summary["global_step"] == 128 and agent.obs_rms.count == 128 + 4 * 16
    assert agent.value_rms.count == 128


def test_evaluation_changes_nothing_in_the_agent():
    _, agent, _, _ = small_agent("Pendulum-v1", norm_reward=True)
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    ppo.evaluate(agent, greedy=False)
    assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())
    assert before["obs_rms.count"] > 0


def test_evaluation_plays_one_raw_full_episode_in_each_environment():
    _, agent, _, _ = small_agent("CartPole-v1", norm_reward=True, eval_episodes=5)
    returns = ppo.evaluate(agent, greedy=False)
    assert len(returns) == 5 and len(set(returns)) > 1
    assert all(r == int(r) and 8 <= r <= 500 for r in returns)


@pytest.mark.parametrize("env_id, flags", [("Pendulum-v1", {}), ("CartPole-v1", {}), ("Hopper-v5", {}),
                                           ("CartPole-v1", {"rnn": "lstm"}), ("CartPole-v1", {"rnn": "gru"})])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_reloaded_agent_earns_the_same(tmp_path, env_id, flags, greedy):
    envs, agent, opt, stream = small_agent(env_id, norm_value=True, **flags)
    after_update(agent, opt, stream, ppo.collect(envs, agent, agent.act, stream)[0])
    at = ppo.SimpleNamespace(iteration=1)
    ppo.save_checkpoint(tmp_path, agent, at, opt=opt)
    checkpoint = ppo.load_checkpoint(tmp_path)
    _, again, opt_again = ppo.build(ppo.Args(**checkpoint["args"]), checkpoint, 1, torch.device("cpu"))
    assert torch.equal(weights(again), weights(agent)) and checkpoint["at"] == {"iteration": 1}
    assert all(torch.equal(opt_again[name], opt[name]) for name in opt)
    assert torch.equal(opt_again["params"], weights(again))
    returns = ppo.evaluate(agent, greedy)
    assert (ppo.evaluate(again, greedy) == returns).all()
    assert (ppo.evaluate(small_agent(env_id, seed=2, **flags)[1], greedy) != returns).any()


# ----------------------------------------------------------------------------------------------- detail flags


def two_iterations(env_id="Pendulum-v1", **flags):
    """All weights after two iterations."""
    envs, agent, opt, stream = small_agent(env_id, **flags)
    live = {name: getattr(agent.args, name) for name in ppo.LIVE}
    for iteration in range(2):
        hyper = ppo.schedule(live, 1 - iteration / 2, agent.args)
        rollout, raw_obs, _ = ppo.collect(envs, agent, agent.act, stream)
        ppo.update(agent, opt, rollout, stream, hyper, ppo.train_step)
        agent.obs_rms.update(raw_obs)
    envs.close()
    return weights(agent)


PENDULUM = {"target_kl": None, "learning_rate": 3e-3, "log_std_init": 0.5}
HOPPER = {"env_id": "Hopper-v5", "log_std_init": 0.5}
REWARDS = PENDULUM | {"norm_reward": True}
FEW_CLIPS = PENDULUM | {"clip_coef": 0.02}
FOREVER = {"env_id": "Forever-v0"}
GRU = {"env_id": "CartPole-v1", "rnn": "gru", "num_steps": 64}
FLIPS = [
    (PENDULUM, {"seed": 2}), (HOPPER, {"clip_actions": False}), (PENDULUM, {"scale_actions": False}),
    (PENDULUM, {"norm_obs": False}), (PENDULUM, {"clip_obs": 0.5}), (PENDULUM, {"norm_reward": True}),
    (REWARDS, {"clip_reward": 0.1}), (FOREVER, {"truncation_bootstrap": False}),
    (PENDULUM, {"learning_rate": 1e-3}), (PENDULUM, {"anneal_lr": False}), (PENDULUM, {"adam_eps": 1e-3}),
    (PENDULUM, {"ortho_init": False}), (PENDULUM, {"gamma": 0.9}), (PENDULUM, {"gae": False}),
    (PENDULUM, {"gae_lambda": 0.5}), (PENDULUM, {"recompute_adv": False}), (PENDULUM, {"num_minibatches": 2}),
    (PENDULUM, {"update_epochs": 3}), (PENDULUM, {"norm_adv": False}),
    (PENDULUM, {"norm_adv_scope": "batch"}), (PENDULUM, {"clip_coef": 0.02}),
    (FEW_CLIPS, {"anneal_clip": True}), (FEW_CLIPS, {"clip_vloss": True}),
    (PENDULUM | {"learn_std": True}, {"ent_coef": 0.1}), (PENDULUM, {"vf_coef": 0.1}),
    (PENDULUM | {"learn_std": True, "ent_coef": 0.1}, {"anneal_ent": True}),
    (PENDULUM, {"max_grad_norm": 0.0}),
    (PENDULUM, {"target_kl": 1e-6}), (PENDULUM, {"norm_value": False}), (PENDULUM, {"activation": "relu"}),
    (PENDULUM, {"action_dist": "tanh-normal"}), (PENDULUM, {"log_std_init": 0.0}),
    (GRU, {"rnn_reset": False}), (GRU, {"rnn_seq_len": 16}), (GRU, {"rnn_seq_len": 1}),
]


@pytest.mark.parametrize("base, flip", FLIPS, ids=[" ".join(flip) for _, flip in FLIPS])
def test_each_flag_changes_the_weights_after_two_iterations(base, flip):
    assert not torch.equal(two_iterations(**base), two_iterations(**base | flip))


TANH = PENDULUM | {"action_dist": "tanh-normal"}


@pytest.mark.parametrize("base", [PENDULUM, REWARDS, FOREVER, GRU, TANH], ids=str)
def test_the_same_run_again_has_the_same_weights(base):
    assert torch.equal(two_iterations(**base), two_iterations(**base))


@pytest.mark.parametrize("base, flip", [
    (PENDULUM, {"gae": False, "gae_lambda": 0.5}),  # lambda is 1 anyway
    (PENDULUM, {"clip_reward": 0.1}),  # no normalised rewards to clip
    (PENDULUM, {"truncation_bootstrap": False}),  # no episode ends
    (PENDULUM, {"rnn_seq_len": 4}), (PENDULUM, {"rnn_hidden": 8}), (PENDULUM, {"mask_actions": False}),
], ids=str)
def test_flags_change_nothing_but_what_they_name(base, flip):
    same = {"gae": False} if "gae" in flip else {}
    assert torch.equal(two_iterations(**base | same), two_iterations(**base | flip))


@pytest.mark.parametrize("flags, names", [
    ({}, "actor.0 actor.2 actor.4 critic.0 critic.2 critic.4"),
    ({"share_network": True}, "actor.0 critic.0 trunk.0 trunk.2"),
    ({"learn_std": True, "hidden": ()}, "actor.0 critic.0 log_std"),
    ({"state_dependent_std": True, "hidden": ()}, "actor.0 critic.0"),
    ({"rnn": "gru", "hidden": (8,)}, "actor.0 actor.2 critic.0 critic.2 rnn"),
], ids=str)
def test_networks_have_the_layers_that_their_flags_name(flags, names):
    agent = ppo.Agent(3, PENDULUM_ACTIONS, small_args("unused", **flags))
    layers = {name.rsplit(".", 1)[0] for name, _ in agent.named_parameters()}
    assert sorted(layers) == names.split()
    assert agent.actor[-1].out_features == (2 if "state_dependent_std" in flags else 1)


def test_a_learning_rate_of_almost_0_leaves_the_weights():
    envs, agent, opt, stream = small_agent("Pendulum-v1")
    before = weights(agent)
    rollout, _, _ = ppo.collect(envs, agent, agent.act, stream)
    metrics = after_update(agent, opt, stream, rollout, learning_rate=1e-30)
    assert torch.allclose(weights(agent), before, rtol=0, atol=1e-25)
    assert opt["bias"].tolist() == pytest.approx([1 - 0.9**8, 1 - 0.999**8], rel=1e-4)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6) and metrics["grad_norm"] > 0


def test_epochs_stop_after_the_one_that_exceeds_target_kl():
    envs, agent, opt, stream = small_agent("Pendulum-v1", update_epochs=5)
    rollout, _, _ = ppo.collect(envs, agent, agent.act, stream)
    for target_kl, epochs in ((1e-9, 1), (1e9, 5), (None, 5)):
        hyper = hyper_of(agent.args, target_kl=target_kl)
        assert ppo.update(agent, opt, rollout, stream, hyper, ppo.train_step)["epochs"] == epochs


# ------------------------------------------------------------------------------------------------------- init


def assert_orthogonal(weight, gain):
    torch.testing.assert_close(torch.linalg.svdvals(weight.detach()), torch.full((min(weight.shape),), gain))


@pytest.mark.parametrize("flags", [{}, {"share_network": True}, {"rnn": "gru"}, {"rnn": "lstm"},
                                   {"state_dependent_std": True}], ids=str)
def test_init_is_orthogonal_with_its_gains(flags):
    agent = ppo.Agent(3, PENDULUM_ACTIONS, small_args("unused", **flags))
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
    agent = ppo.Agent(3, PENDULUM_ACTIONS, small_args("unused", ortho_init=False))
    for layer, ours in zip(layers, agent.actor[::2], strict=True):
        assert torch.equal(layer.weight, ours.weight) and torch.equal(layer.bias, ours.bias)
