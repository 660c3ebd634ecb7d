"""What learners that know the task's structure collect on the tasks of RL^2 (Duan et al. 2016), and the optimum.

    python benchmarks/references.py --task bandit --num-arms 5 --episodes 10 --trials 100000
    python benchmarks/references.py --task mdp --episodes 10 --csv benchmarks/results/references.csv

Bandit: arm i pays 1 with probability p_i ~ Uniform[0, 1], else 0; an episode is one pull.
MDP:    P(.|s,a) ~ Dirichlet(1, ..., 1), rewards ~ N(mu(s,a), 1) with mu ~ N(1, 1); an episode is 10 steps
        from state 0. A learner sees all rewards, but no state after an episode's last step.
A trial is n episodes in one task; its score is the undiscounted sum of its rewards. Two estimates of the mean:
    raw      the mean of the sums themselves
    score    the sums of the expected rewards of what was done, minus n * (best of this task - mean best): the
             same mean, without the luck of the rewards and most of the luck of the tasks

Shapes: B trials, K arms, n episodes, H steps of an episode, S states, A actions. Everything runs in NumPy, and
all learners meet the same tasks. Their strength (c, epsilon, samples, ...) is a parameter that the paper chose
by its result; here the table shows a row for each of a few settings, and nothing is chosen afterwards.
"""

import csv
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

NUM_STATES, NUM_ACTIONS, HORIZON = 10, 5, 10
MEAN_OPTIMUM, MEAN_OPTIMUM_SE = 21.6800, 0.0020  # per episode, of 10^6 MDPs: `optimal_value`
BAYES_MAX_PULLS = 15


class UsageError(ValueError):
    """What the user gave cannot work: told in one sentence, exit status 2."""


def argmax(scores, rng):
    """Index of the greatest entry along the last axis, one of the equals at random."""
    greatest = scores == scores.max(-1, keepdims=True)
    return (greatest * (1 - rng.random(scores.shape))).argmax(-1)  # never 0: random() is below 1


def explore(scores, epsilon, rng):
    """The same scores, but in a share `epsilon` of the rows all equal: the action there is random."""
    return np.where(rng.random((*scores.shape[:-1], 1)) < epsilon, 0.0, scores)


# -------------------------------------------------------------------------------------------------- bandits
# A learner takes successes and failures (B, K), the pulls that remain, this one included, and a generator, and
# gives a score for each arm (B, K); the greatest is pulled. Its prior is the task's: Beta(1, 1).


def play_bandit(learner, probabilities, num_pulls, rng):
    """Trials on arms with `probabilities` (B, K): sums of rewards, and of the pulled arms' probabilities (B,)."""
    trial = np.arange(len(probabilities))
    successes, failures = np.zeros((2, *probabilities.shape))
    returns, expected = np.zeros((2, len(trial)))
    for remaining in range(num_pulls, 0, -1):
        pulled = trial, argmax(learner(successes, failures, remaining, rng), rng)
        rewards = rng.random(len(trial)) < probabilities[pulled]
        successes[pulled] += rewards
        failures[pulled] += ~rewards
        returns += rewards
        expected += probabilities[pulled]
    return returns, expected


def random_arm(successes, failures, remaining, rng):
    return np.zeros_like(successes)


def greedy(successes, failures, remaining, rng):
    """Mean of the posterior Beta(s + 1, f + 1)."""
    return (successes + 1) / (successes + failures + 2)


def epsilon_greedy(successes, failures, remaining, rng, epsilon=0.1):
    return explore(greedy(successes, failures, remaining, rng), epsilon, rng)


def ucb1(successes, failures, remaining, rng, c=0.2):
    """UCB1 as the paper's authors ran it: the posterior mean and c * sqrt(2 ln t / (s + f + 2)).

    Auer et al. (2002) have the sample mean and c = 1; over short trials 0.2 explores about enough."""
    pulls = successes + failures
    t = np.maximum(pulls.sum(-1, keepdims=True), 1)
    return (successes + 1) / (pulls + 2) + c * np.sqrt(2 * np.log(t) / (pulls + 2))


def thompson(successes, failures, remaining, rng):
    """One sample of the posterior (Thompson 1933)."""
    return rng.beta(successes + 1, failures + 1)


def optimistic_thompson(successes, failures, remaining, rng, samples=5):
    """Of several joint samples of all arms, the one where the posterior is densest (the paper's variant).

    Not that of May et al. (2012), which takes the greater of sample and mean for each arm."""
    drawn = rng.beta(successes + 1, failures + 1, size=(samples, *successes.shape))
    inside = drawn.clip(1e-300, 1 - 1e-16)  # 0 * log(0) is not a number
    density = (successes * np.log(inside) + failures * np.log1p(-inside)).sum(-1)  # (samples, B), unscaled
    return drawn[density.argmax(0), np.arange(len(successes))]


def gittins_table(num_pulls, grid=160):
    """Gittins indices for a finite horizon: table[m][t (t + 1) / 2 + s] of an arm with s successes in t pulls.

    An arm with m pulls left costs `charge` a pull and may be given up for good. Its index is the charge up to
    which one more pull pays. The values for a grid of charges are exact; only where they cross 0 is
    interpolated. Time grows with n^3 * grid, memory with n^2 * grid and n^3 (n = 500: half a minute, 0.3 GB)."""
    charges = 1 - np.linspace(1, 0, grid) ** 2  # closer together where the good arms' indices are
    values = [np.zeros((t + 1, grid)) for t in range(num_pulls + 1)]  # values[t][s], of m - 1 pulls left
    table = [None]
    for remaining in range(1, num_pulls + 1):
        rows = []
        for t in range(num_pulls - remaining + 1):
            mean = ((np.arange(t + 1) + 1) / (t + 2))[:, None]
            go_on = mean - charges + mean * values[t + 1][1:] + (1 - mean) * values[t + 1][:-1]
            rows.append(crossing(go_on, charges))
            values[t] = np.maximum(go_on, 0, out=go_on)
        table.append(np.concatenate(rows).astype(np.float32))
    return table


def crossing(values, charges):
    """Where rows of falling values, positive at the first charge and not at the last, reach 0."""
    last = np.minimum((values > 0).sum(-1), len(charges) - 1) - 1
    row = np.arange(len(values))
    above, below = values[row, last], values[row, last + 1]
    return charges[last] + (charges[last + 1] - charges[last]) * above / (above - below)


def gittins(successes, failures, remaining, rng, table):
    """Index of each arm as if it alone were left: nearly the optimum (exactly that with a geometric discount)."""
    pulls = (successes + failures).astype(np.int64)
    return table[remaining][pulls * (pulls + 1) // 2 + successes.astype(np.int64)]


def bayes_optimum(num_arms, num_pulls):
    """Mean score of the best learner there is, by dynamic programming over what it can have seen.

    Arms are exchangeable, so a state is the sorted (successes, failures) of the arms tried so far."""

    @cache
    def value(tried, remaining):
        if not remaining:
            return 0.0
        arms = set(tried) | ({(0, 0)} if len(tried) < num_arms else set())
        return max(pull(tried, arm, remaining) for arm in arms)

    def pull(tried, arm, remaining):
        others = list(tried)
        if arm in others:
            others.remove(arm)
        s, f = arm
        won, lost = (tuple(sorted([*others, seen])) for seen in ((s + 1, f), (s, f + 1)))
        mean = (s + 1) / (s + f + 2)
        return mean * (1 + value(won, remaining - 1)) + (1 - mean) * value(lost, remaining - 1)

    return value((), num_pulls)


# ---------------------------------------------------------------------------------------------- tabular MDPs
# A learner takes what it has seen and a generator, once per episode, and gives a score for each action, (H, B,
# S, A); the greatest is taken for the whole episode. Its prior: P(.|s,a) ~ Dirichlet(alpha0, ..., alpha0) and
# mu(s,a) ~ N(mu0, 1 / tau0), noise of variance 1. The task's own is alpha0 = 1, mu0 = 1, tau0 = 1; the published
# rows rest on TabulaRL (Osband), whose mu0 is 0, so that is the default of the learners they are about.


@dataclass
class MDPs:
    """B tasks: transitions (B, S, A, S) and mean rewards (B, S, A)."""

    transitions: np.ndarray
    means: np.ndarray


@dataclass
class Seen:
    """What B trials have shown: rewards, their number and sum (B, S, A), and transitions (B, S, A, S)."""

    visits: np.ndarray
    rewards: np.ndarray
    transitions: np.ndarray
    episode: int = 0


def sample_mdps(num_tasks, rng):
    gaps = rng.standard_exponential((num_tasks, NUM_STATES, NUM_ACTIONS, NUM_STATES))  # Dirichlet(1, ..., 1)
    return MDPs(gaps / gaps.sum(-1, keepdims=True),
                rng.normal(1, 1, (num_tasks, NUM_STATES, NUM_ACTIONS)))


def play_mdp(learner, mdps, num_episodes, rng, horizon=HORIZON):
    """Trials of `num_episodes`: rewards, and mean rewards mu(s,a) of what was done, summed per episode (B, n)."""
    trial, cumulative = np.arange(len(mdps.means)), mdps.transitions.cumsum(-1)
    seen = Seen(*np.zeros((2, *mdps.means.shape)), np.zeros_like(mdps.transitions))
    returns, expected = np.zeros((2, len(trial), num_episodes))
    for seen.episode in range(num_episodes):
        actions = argmax(learner(seen, rng, horizon=horizon), rng)  # (H, B, S)
        states = np.zeros_like(trial)
        for step in range(horizon):
            done = trial, states, actions[step, trial, states]
            rewards = rng.normal(mdps.means[done])
            seen.visits[done] += 1
            seen.rewards[done] += rewards
            returns[:, seen.episode] += rewards
            expected[:, seen.episode] += mdps.means[done]
            states = (rng.random((len(trial), 1)) >= cumulative[done][:, :-1]).sum(-1)
            if step < horizon - 1:  # after the last step the learner is shown the next episode's first state
                seen.transitions[(*done, states)] += 1
    return returns, expected


def expectation(transitions, values):
    """Mean of `values` (B, S) after each state and action (B, S, A)."""
    trials, states, actions, _ = transitions.shape
    flat = transitions.reshape(trials, states * actions, states) @ values[:, :, None]
    return flat.reshape(trials, states, actions)


def optimistic_expectation(transitions, slack, values):
    """Greatest mean of `values` over all distributions whose L1 distance from `transitions` is at most `slack`.

    Jaksch et al. 2010, figure 2: half the distance is added to the best state and taken from the worst."""
    order = values.argsort(-1)  # (B, S), the worst first
    chances = np.take_along_axis(transitions, order[:, None, None], -1)
    moved = np.minimum(slack / 2, 1 - chances[..., -1])[..., None]  # (B, S, A, 1)
    below = np.maximum(chances.cumsum(-1) - moved, 0)[..., :-1]
    ordered = np.take_along_axis(values, order, -1)
    rises = np.diff(ordered)[:, None, None]
    return ordered[:, None, None, -1] - (below * rises).sum(-1)


def plan(rewards, expect, horizon):
    """Q (H, B, S, A) by value iteration with `rewards` (B, S, A), or (H, B, S, A), and `expect` of the values."""
    rewards = np.broadcast_to(rewards, (horizon, *rewards.shape[-3:]))
    q = rewards.copy()
    for step in range(horizon - 2, -1, -1):
        q[step] += expect(q[step + 1].max(-1))
    return q


def optimal_value(mdps, horizon=HORIZON):
    """V*(first state) of an episode in each task (B,): what the best that knows the task collects on average."""
    return plan(mdps.means, partial(expectation, mdps.transitions), horizon)[0, :, 0].max(-1)


def posterior(seen, mu0, tau0=1.0, alpha0=1.0):
    """Mean and precision of mu(s,a) (B, S, A), and the Dirichlet's parameters (B, S, A, S)."""
    precision = tau0 + seen.visits
    return (mu0 * tau0 + seen.rewards) / precision, precision, alpha0 + seen.transitions


def normalised(alpha):
    return alpha / alpha.sum(-1, keepdims=True)


def random_action(seen, rng, horizon):
    return np.zeros((horizon, *seen.visits.shape))


def greedy_mdp(seen, rng, horizon, mu0=0.0):
    """Optimum of the mean MDP of a posterior whose prior weighs next to nothing."""
    mean, _, alpha = posterior(seen, mu0, 1e-4, 1e-4)
    return plan(mean, partial(expectation, normalised(alpha)), horizon)


def epsilon_greedy_mdp(seen, rng, horizon, mu0=0.0, epsilon=0.1):
    """A state comes at most once at a step of an episode, so exploring may be drawn here, before the episode."""
    return explore(greedy_mdp(seen, rng, horizon, mu0), epsilon, rng)


def psrl(seen, rng, horizon, mu0=0.0):
    """Optimum of one sample of the posterior (Strens 2000; Osband et al. 2013)."""
    mean, precision, alpha = posterior(seen, mu0)
    rewards = rng.normal(mean, 1 / np.sqrt(precision))
    return plan(rewards, partial(expectation, normalised(rng.standard_gamma(alpha))), horizon)


def opsrl(seen, rng, horizon, mu0=0.0, samples=5):
    """Greatest Q over several samples of the posterior."""
    return np.maximum.reduce([psrl(seen, rng, horizon, mu0) for _ in range(samples)])


def beb(seen, rng, horizon, mu0=0.0, scaling=1e-3):
    """Mean MDP with bonuses that fall with the counts (Kolter and Ng 2009), as TabulaRL has them.

    Theirs is beta / (1 + sum of alpha) with beta = 2 H^2; here `scaling` is a factor to that."""
    mean, precision, alpha = posterior(seen, mu0)
    left = np.arange(horizon - 1, -1, -1)[:, None, None, None]
    bonus = scaling * 2 * horizon**3 / (1 + alpha.sum(-1)) * left
    rewards = mean + 1 / (precision + 1) + bonus
    return plan(rewards, partial(expectation, normalised(alpha)), horizon)


def ucrl2(seen, rng, horizon, mu0=0.0, scaling=0.1, delta=0.05):
    """Optimum of the best MDP within confidence bounds (Jaksch et al. 2010), these times `scaling`."""
    mean, _, alpha = posterior(seen, mu0, 1e-4, 1e-5)
    _, states, actions = mean.shape
    log = np.log(2 * states * actions * (seen.episode + 1) / delta)
    rewards = mean + scaling * np.sqrt(4 * log / np.maximum(seen.visits, 1))
    slack = scaling * np.sqrt(4 * states * log / np.maximum(seen.transitions.sum(-1), 1))
    return plan(rewards, partial(optimistic_expectation, normalised(alpha), slack), horizon)


def bucb_vi(seen, rng, horizon, mu0=1.0, c=1.0):
    """Mean MDP with a bonus of c posterior standard deviations on each reward, none on the transitions."""
    mean, precision, alpha = posterior(seen, mu0)
    return plan(mean + c / np.sqrt(precision), partial(expectation, normalised(alpha)), horizon)
