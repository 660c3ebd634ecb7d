"""What learners that know the tasks' structure collect on those of RL^2 (Duan et al. 2016), and the
optimum.

    python benchmarks/references.py --task bandit --num-arms 5 --episodes 10 --trials 100000
    python benchmarks/references.py --task mdp --episodes 10 --csv benchmarks/results/references.csv

Bandit: arm i pays 1 with probability p_i ~ Uniform[0, 1], else 0; an episode is one pull.
MDP:    P(.|s,a) ~ Dirichlet(1, ..., 1), rewards ~ N(mu(s,a), 1) with mu ~ N(1, 1); an episode is 10
steps
        from state 0. A learner sees all rewards, but no state after an episode's last step.
A trial is n episodes in one task, its result the undiscounted sum of its rewards. Two estimates of
the mean:
    raw      the mean of the sums themselves
    score    the sums of the expected rewards of what was done, minus
             n * (best of this task - mean best): the same mean,
             without the luck of the rewards and most of the luck of the tasks
The score's share of each episode is the adaptation curve: how fast a learner finds out what to do.

All learners meet the same tasks. What the paper tuned by the result (c, epsilon, samples, ...) has
a row for each of a few settings here. Shapes: B trials, K arms, n episodes, H steps an episode, S
states, A actions."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tables import UsageError, read_csv, run, write_csv

NUM_STATES, NUM_ACTIONS, HORIZON = 10, 5, 10
MEAN_OPTIMUM, MEAN_OPTIMUM_SE = 21.8326, 0.0023  # per episode: `optimal_value` of 10^6 MDPs
BAYES_MAX_PULLS = 15  # the states of `bayes_optimum` double with each pull
CHUNK = 500  # trials played at once: more would leave the processor's cache


def argmax(scores, rng):
    """Index of the greatest entry along the last axis, one of the equals at random.

    Always the first would explore less: 1 of 76 lost by the greedy learner over 100 pulls of 5
    arms."""
    greatest = scores == scores.max(-1, keepdims=True)
    return (greatest * (1 - rng.random(scores.shape))).argmax(-1)  # never 0: random() is below 1


def explore(scores, epsilon, rng):
    """The same scores, but in a share `epsilon` of the rows all equal: the action there is
    random."""
    if not epsilon:
        return scores
    return np.where(rng.random((*scores.shape[:-1], 1)) < epsilon, 0.0, scores)


# ------------------------------------------------------------------------------------------ bandits
# A learner takes successes and failures (B, K), the pulls that remain, this one included, and a
# generator; it
# gives a score for each arm (B, K), and the greatest is pulled. Its prior is the task's: Beta(1,
# 1).


def play_bandit(learner, probabilities, num_pulls, rng):
    """Trials on arms of `probabilities` (B, K): each pull's reward (B, n), and the probability
    behind it."""
    trial = np.arange(len(probabilities))
    successes, failures = np.zeros((2, *probabilities.shape))
    returns, expected = np.zeros((2, len(trial), num_pulls))
    for pull in range(num_pulls):
        pulled = trial, argmax(learner(successes, failures, num_pulls - pull, rng), rng)
        rewards = rng.random(len(trial)) < probabilities[pulled]
        successes[pulled] += rewards
        failures[pulled] += ~rewards
        returns[:, pull] = rewards
        expected[:, pull] = probabilities[pulled]
    return returns, expected


def random_arm(successes, failures, remaining, rng):
    return np.zeros_like(successes)


def greedy(successes, failures, remaining, rng, epsilon=0.0):
    """Mean of the posterior Beta(s + 1, f + 1)."""
    return explore((successes + 1) / (successes + failures + 2), epsilon, rng)


def ucb1(successes, failures, remaining, rng, c=0.2):
    """UCB1 as the paper's authors ran it: the posterior mean and c * sqrt(2 ln t / (s + f + 2)).

    Auer et al. (2002) have the sample mean and c = 1; over short trials 0.2 explores about
    enough."""
    pulls = successes + failures
    t = np.maximum(pulls.sum(-1, keepdims=True), 1)
    return (successes + 1) / (pulls + 2) + c * np.sqrt(2 * np.log(t) / (pulls + 2))


def thompson(successes, failures, remaining, rng):
    """One sample of the posterior (Thompson 1933)."""
    return rng.beta(successes + 1, failures + 1)


def optimistic_thompson(successes, failures, remaining, rng, samples=5):
    """Of several joint samples of all arms, the one where the posterior is densest (the paper's
    variant).

    Not that of May et al. (2012), which takes the greater of sample and mean for each arm."""
    drawn = rng.beta(successes + 1, failures + 1, size=(samples, *successes.shape))
    inside = drawn.clip(1e-300, 1 - 1e-16)  # 0 * log(0) is not a number
    density = (successes * np.log(inside) + failures * np.log1p(-inside)).sum(
        -1
    )  # (samples, B), unscaled
    return drawn[density.argmax(0), np.arange(len(successes))]


def gittins_table(num_pulls, grid=160):
    """Gittins indices of a finite horizon: table[m][t (t + 1) / 2 + s], s successes in t pulls, m
    pulls left.

    An arm costs a charge per pull and may be given up for good; its index is the charge up to which
    one more pull pays. The values are exact for each charge of the grid, and interpolated where
    they fall to 0. With 500 pulls it takes half a minute and 0.3 GB, both growing with their third
    power."""
    charges = 1 - np.linspace(1, 0, grid) ** 2  # closer together where the good arms' indices are
    values = [
        np.zeros((t + 1, grid)) for t in range(num_pulls + 1)
    ]  # values[t][s], of m - 1 pulls left
    table = [None]
    for remaining in range(1, num_pulls + 1):
        rows = []
        for t in range(num_pulls - remaining + 1):
            mean = ((np.arange(t + 1) + 1) / (t + 2))[:, None]
            keep = mean - charges + mean * values[t + 1][1:] + (1 - mean) * values[t + 1][:-1]
            rows.append(crossing(keep, charges))
            values[t] = np.maximum(keep, 0, out=keep)
        table.append(np.concatenate(rows).astype(np.float32))
    return table


def crossing(values, charges):
    """Where rows of falling values, positive at the first charge and not at the last, reach 0."""
    last = np.minimum((values > 0).sum(-1), len(charges) - 1) - 1
    row = np.arange(len(values))
    above, below = values[row, last], values[row, last + 1]
    return charges[last] + (charges[last + 1] - charges[last]) * above / (above - below)


def gittins(successes, failures, remaining, rng, table):
    """Index of each arm as if it alone were left: optimal with a geometric discount, here at most
    nearly.

    With 10 pulls it is (5 arms or more), with 14 it falls 0.004 short of `bayes_optimum`."""
    pulls = (successes + failures).astype(np.int64)
    return table[remaining][pulls * (pulls + 1) // 2 + successes.astype(np.int64)]


def bayes_optimum(num_arms, num_pulls):
    """Mean score of the best learner there is, by dynamic programming over what it can have seen.

    Arms are exchangeable, so a state is the sorted (successes, failures) of the arms tried so
    far."""

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


# ------------------------------------------------------------------------------------- tabular MDPs
# A learner takes what it has seen and a generator; it gives a score for each action (H, B, S, A),
# and the
# greatest is taken. It is asked before each episode, as in the published rows.
# Its prior: P(.|s,a) ~ Dirichlet(alpha0, ..., alpha0), mu(s,a) ~ N(mu0, 1 / tau0), rewards of
# variance 1.
# True are alpha0 = mu0 = tau0 = 1, but the published rows come from TabulaRL (Osband), whose mu0 is
# 0.


@dataclass
class MDPs:
    """B tasks: transitions (B, S, A, S) and mean rewards (B, S, A)."""

    transitions: np.ndarray
    means: np.ndarray


@dataclass
class Seen:
    """What B trials have shown: rewards, their number and sum (B, S, A), and transitions (B, S, A,
    S)."""

    visits: np.ndarray
    rewards: np.ndarray
    transitions: np.ndarray
    episode: int = 0


def sample_mdps(num_tasks, rng):
    gaps = rng.standard_exponential(
        (num_tasks, NUM_STATES, NUM_ACTIONS, NUM_STATES)
    )  # Dirichlet(1, ..., 1)
    return MDPs(
        gaps / gaps.sum(-1, keepdims=True), rng.normal(1, 1, (num_tasks, NUM_STATES, NUM_ACTIONS))
    )


def play_mdp(learner, mdps, num_episodes, rng, horizon=HORIZON):
    """Trials of `num_episodes`: sums (B, n) of each episode's rewards, and of the mu(s,a) behind
    them."""
    trial, cumulative = np.arange(len(mdps.means)), mdps.transitions.cumsum(-1)
    seen = Seen(*np.zeros((2, *mdps.means.shape)), np.zeros_like(mdps.transitions))
    returns, expected = np.zeros((2, len(trial), num_episodes))
    for seen.episode in range(num_episodes):
        states = np.zeros_like(trial)
        actions = argmax(learner(seen, rng, horizon=horizon), rng)  # (H, B, S)
        for step in range(horizon):
            done = trial, states, actions[step, trial, states]
            rewards = rng.normal(mdps.means[done])
            seen.visits[done] += 1
            seen.rewards[done] += rewards
            returns[:, seen.episode] += rewards
            expected[:, seen.episode] += mdps.means[done]
            states = (rng.random((len(trial), 1)) >= cumulative[done][:, :-1]).sum(-1)
            if (
                step < horizon - 1
            ):  # after the last step the learner is shown the next episode's first state
                seen.transitions[(*done, states)] += 1
    return returns, expected


def expectation(transitions, values):
    """Mean of `values` (B, S) after each state and action (B, S, A)."""
    trials, states, actions, _ = transitions.shape
    flat = transitions.reshape(trials, states * actions, states) @ values[:, :, None]
    return flat.reshape(trials, states, actions)


def optimistic_expectation(transitions, slack, values):
    """Greatest mean of `values` over the distributions within an L1 distance of `slack` from
    `transitions`.

    Jaksch et al. (2010), figure 2: half the distance is added to the best state and taken from the
    worst."""
    order = values.argsort(-1)  # (B, S), the worst first
    chances = np.take_along_axis(transitions, order[:, None, None], -1)
    moved = np.minimum(slack / 2, 1 - chances[..., -1])[..., None]  # (B, S, A, 1)
    below = np.maximum(chances.cumsum(-1) - moved, 0)[..., :-1]
    ordered = np.take_along_axis(values, order, -1)
    rises = np.diff(ordered)[:, None, None]
    return ordered[:, None, None, -1] - (below * rises).sum(-1)


def plan(rewards, expect, horizon):
    """Q (H, B, S, A) by value iteration; `rewards` (B, S, A) or (H, B, S, A), `expect` means of
    values."""
    rewards = np.broadcast_to(rewards, (horizon, *rewards.shape[-3:]))
    q = rewards.copy()
    for step in range(horizon - 2, -1, -1):
        q[step] += expect(q[step + 1].max(-1))
    return q


def optimal_value(mdps, horizon=HORIZON):
    """V*(first state) in each task (B,): an episode's mean sum of rewards for a player who knows
    the task."""
    return plan(mdps.means, partial(expectation, mdps.transitions), horizon)[0, :, 0].max(-1)


def posterior(seen, mu0, tau0=1.0, alpha0=1.0):
    """Mean and precision of mu(s,a) (B, S, A), and the Dirichlet's parameters (B, S, A, S)."""
    precision = tau0 + seen.visits
    return (mu0 * tau0 + seen.rewards) / precision, precision, alpha0 + seen.transitions


def normalized(alpha):
    return alpha / alpha.sum(-1, keepdims=True)


def random_action(seen, rng, horizon):
    return np.zeros((horizon, *seen.visits.shape))


def greedy_mdp(seen, rng, horizon, mu0=0.0, epsilon=0.0):
    """Optimum of the mean MDP of a posterior whose prior weighs next to nothing.

    An episode meets a pair of step and state once at most: random actions may be drawn before
    it."""
    mean, _, alpha = posterior(seen, mu0, 1e-4, 1e-4)
    q = plan(mean, partial(expectation, normalized(alpha)), horizon)
    return explore(q, epsilon, rng)


def psrl(seen, rng, horizon, mu0=0.0):
    """Optimum of one sample of the posterior (Strens 2000; Osband et al. 2013)."""
    mean, precision, alpha = posterior(seen, mu0)
    rewards = rng.normal(mean, 1 / np.sqrt(precision))
    return plan(rewards, partial(expectation, normalized(rng.standard_gamma(alpha))), horizon)


def opsrl(seen, rng, horizon, mu0=0.0, samples=5):
    """Greatest Q over several samples of the posterior."""
    return np.maximum.reduce([psrl(seen, rng, horizon, mu0) for _ in range(samples)])


def beb(seen, rng, horizon, mu0=0.0, scaling=1e-3):
    """Mean MDP with bonuses that fall with the counts (Kolter and Ng 2009), as TabulaRL has them.

    Theirs is beta H / (1 + sum of alpha) for each step that is left, beta = 2 H^2 times
    `scaling`."""
    mean, precision, alpha = posterior(seen, mu0)
    left = np.arange(horizon - 1, -1, -1)[:, None, None, None]
    bonus = scaling * 2 * horizon**3 / (1 + alpha.sum(-1)) * left
    rewards = mean + 1 / (precision + 1) + bonus
    return plan(rewards, partial(expectation, normalized(alpha)), horizon)


def ucrl2(seen, rng, horizon, mu0=0.0, scaling=0.4, delta=0.05):
    """Optimum of the best MDP within confidence bounds (Jaksch et al. 2010), these times `scaling`.

    TabulaRL's planner keeps the transitions it has made optimistic for the steps before, which adds
    optimism: doing so gives 916 instead of 907 in 50 episodes, next to the published 919."""
    mean, _, alpha = posterior(seen, mu0, 1e-4, 1e-5)
    _, states, actions = mean.shape
    log = np.log(2 * states * actions * (seen.episode + 1) / delta)
    rewards = mean + scaling * np.sqrt(4 * log / np.maximum(seen.visits, 1))
    slack = scaling * np.sqrt(4 * states * log / np.maximum(seen.transitions.sum(-1), 1))
    return plan(rewards, partial(optimistic_expectation, normalized(alpha), slack), horizon)


def bucb_vi(seen, rng, horizon, mu0=1.0, c=1.0):
    """Mean MDP with a bonus of c posterior standard deviations on each reward, none on the
    transitions."""
    mean, precision, alpha = posterior(seen, mu0)
    return plan(mean + c / np.sqrt(precision), partial(expectation, normalized(alpha)), horizon)


# ------------------------------------------------------------------------------------------- scores

LEARNERS = {
    "bandit": {
        "random": [random_arm],
        "greedy": [greedy],
        "epsilon-greedy": [partial(greedy, epsilon=0.1)],
        "thompson": [thompson],
        "optimistic-thompson": [partial(optimistic_thompson, samples=n) for n in (5, 20)],
        "ucb1": [partial(ucb1, c=c) for c in (0.1, 0.2, 0.3)],
        "gittins": [gittins],
    },
    "mdp": {
        "random": [random_action],
        "greedy": [partial(greedy_mdp, mu0=mu0) for mu0 in (0.0, 1.0)],
        "epsilon-greedy": [partial(greedy_mdp, epsilon=0.1)],
        "psrl": [partial(psrl, mu0=mu0) for mu0 in (0.0, 1.0)],
        "opsrl": [partial(opsrl, samples=n) for n in (5, 20)],
        "ucrl2": [partial(ucrl2, scaling=scaling) for scaling in (0.1, 0.3, 0.4)],
        "beb": [partial(beb, scaling=scaling) for scaling in (3e-4, 1e-3, 3e-3)],
        "bucb-vi": [partial(bucb_vi, c=c) for c in (0.5, 1.0, 1.5)],
    },
}


@dataclass
class Args:
    task: Literal["bandit", "mdp"] = "bandit"  # Bernoulli arms, or MDPs of 10 states and 5 actions
    num_arms: int = 5  # arms of a bandit
    episodes: int = 10  # episodes of a trial: pulls, or 10 steps each
    trials: int = 10_000  # per row; the standard error falls with their square root
    learners: tuple[str, ...] = ()  # only these, by the table's names; none: all
    seed: int = 1  # of tasks and play; all learners meet the same tasks
    csv: Path | None = None  # table to add a row per learner to

    def __post_init__(self):
        if min(self.num_arms, self.episodes, self.trials - 1, self.seed + 1) < 1:
            raise UsageError("give at least 1 arm, 1 episode and 2 trials, and a seed from 0 on")
        unknown = set(self.learners) - set(LEARNERS[self.task])
        if unknown:
            raise UsageError(
                f"no learner of this task is called {', '.join(sorted(unknown))}; "
                f"there are {', '.join(LEARNERS[self.task])}"
            )


def play_chunk(learner, args, trials, tasks_rng, rng):
    """Returns of the episodes, and what of them was expected without the luck of the tasks (2, B,
    n)."""
    if args.task == "bandit":
        probabilities = tasks_rng.random((trials, args.num_arms))
        best, mean_best = probabilities.max(-1), args.num_arms / (args.num_arms + 1)
        returns, expected = play_bandit(learner, probabilities, args.episodes, rng)
    else:
        mdps = sample_mdps(trials, tasks_rng)
        best, mean_best = optimal_value(mdps), MEAN_OPTIMUM
        returns, expected = play_mdp(learner, mdps, args.episodes, rng)
    return np.stack([returns, expected - (best - mean_best)[:, None]])


def mean_and_error(values):
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def score(learner, args):
    """Score, raw score, standard error of each, and the score's share of each episode, as a row's
    columns."""
    chunks = []
    for start in range(0, args.trials, CHUNK):
        generators = (np.random.default_rng((args.seed, start, stream)) for stream in (0, 1))
        chunks.append(play_chunk(learner, args, min(CHUNK, args.trials - start), *generators))
    returns, controlled = np.concatenate(chunks, axis=1)  # (trials, n)
    (raw, raw_se), (mean, se) = (mean_and_error(x.sum(-1)) for x in (returns, controlled))
    if args.task == "mdp":
        se = np.hypot(se, args.episodes * MEAN_OPTIMUM_SE)
    return {
        "score": mean,
        "score_se": se,
        "raw": raw,
        "raw_se": raw_se,
        "episode_returns": controlled.mean(0).round(4).tolist(),
    }


def bounds(args):
    """What no learner can exceed, by name: score and standard error."""
    n = args.episodes
    if args.task == "mdp":
        return {"task known": (n * MEAN_OPTIMUM, n * MEAN_OPTIMUM_SE)}
    known = {"task known": (n * args.num_arms / (args.num_arms + 1), 0.0)}
    if n <= BAYES_MAX_PULLS:
        known["bayes optimum"] = bayes_optimum(args.num_arms, n), 0.0
    return known


def rows(args):
    """Rows of the table, one after the other. Replan: when a learner uses what it has seen."""
    num_arms, replan = (args.num_arms, "") if args.task == "bandit" else ("", "episode")
    about = {
        "task": args.task,
        "num_arms": num_arms,
        "episodes": args.episodes,
        "replan": replan,
        "learner": "",
        "setting": "",
        "trials": args.trials,
        "seed": args.seed,
    }
    for name in args.learners or LEARNERS[args.task]:
        for learner in LEARNERS[args.task][name]:
            setting = " ".join(
                f"{key}={value:g}" for key, value in getattr(learner, "keywords", {}).items()
            )
            if learner is gittins:
                learner = partial(gittins, table=gittins_table(args.episodes))
            yield about | {"learner": name, "setting": setting} | score(learner, args)
    for name, (bound, se) in bounds(args).items():
        about |= {"learner": name, "setting": "", "trials": "", "seed": ""}
        yield about | {"score": bound, "score_se": se}


def main():
    args = tyro.cli(Args, description=__doc__)
    is_new = args.csv is None or not args.csv.exists()
    table = [] if is_new else read_csv(args.csv, "task", "learner", "score")
    print(f"{'learner':20} {'setting':14} {'score':>10} {'':10}{'raw':>10}")
    for row in rows(args):
        raw = f"{row['raw']:10.3f} ± {row['raw_se']:.3f}" if "raw" in row else ""
        score = f"{row['score']:10.3f} ± {row['score_se']:<8.3f}"
        print(f"{row['learner']:20} {row['setting']:14} {score}{raw}".rstrip(), flush=True)
        table.append({key: f"{x:.5f}" if isinstance(x, float) else x for key, x in row.items()})
        if args.csv:  # after each learner: an interrupted call keeps what it has
            write_csv(args.csv, table)


if __name__ == "__main__":
    run(main)
