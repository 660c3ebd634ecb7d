"""The tables of the front page and of the reports, written from the CSVs in results.

    python benchmarks/report.py            rewrite them in place, after <!-- table NAME -->
    python benchmarks/report.py --check    only say which are out of date

± is the standard error over seeds, of one or two at least that over their episodes. ° marks seeds
of the scripts before their rewrite (df2780b)."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import ablations
import numpy as np
import tyro
from adaptation import group as rl2_settings
from adaptation import table as rl2_table
from tables import UsageError, count_seeds, read_csv, run

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = (HERE.parent / "README.md", *sorted(HERE.glob("*.md")))
PRESETS = (
    "Ant-v5",
    "LunarLander-v3",
    "LunarLanderContinuous-v3",
    "MountainCarContinuous-v0",
    "Reacher-v5",
    "Swimmer-v5",
)
# exp_name: setting, where it is not that of the name
SETTINGS = {"tanh": "preset", "bounded": "preset", "v4": "historical"}


@dataclass
class Args:
    check: bool = False  # write nothing; exit status 2 where a table is out of date


def number(value, digits):
    return f"{value:,.{digits}f}".replace("-0.0", "0.0") if digits else f"{round(value):,}"


def with_error(means, stds, episodes, digits):
    """Mean ± standard error over seeds, of one or two at least that over their episodes."""
    n = len(means)
    error = sum(np.square(stds) / max(episodes - 1, 1)) ** 0.5 / n
    if n > 1:
        of_seeds = np.std(means, ddof=1) / n**0.5
        error = of_seeds if n > 2 else max(error, of_seeds)
    return f"{number(np.mean(means), digits)} ± {number(error, digits)}"


def interquartile_mean(values):
    """Mean of the middle half; partial weights where it cuts a value in two."""
    values, n = np.sort(values), len(values)
    edges = np.arange(n + 1) / n
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0, None)
    return (weights * values).sum() / weights.sum()


def scores(name="scores.csv"):
    """{(env_id, setting, steps): rows by seed}."""
    groups = defaultdict(list)
    for row in read_csv(RESULTS / name, "command"):
        env_id, exp_name = row["env_id"], row["exp_name"]
        setting = SETTINGS.get(exp_name, exp_name)
        if exp_name in ("ppo_continuous", "default", "3M"):
            bare = "--preset none" in row["command"] or env_id not in PRESETS
            setting = "defaults" if bare else "preset"
            if (
                row.get("version")
                and env_id.startswith("Inverted")
                and "none" not in row["command"]
            ):
                setting = "preset"
        if "--envpool" in row["command"]:
            setting += ", EnvPool"
        steps = float(row["global_step"])
        steps = f"{steps / 1e6:.0f} M" if steps > 9e5 else f"{round(steps, -4) / 1e3:.0f} k"
        groups[env_id, setting, steps].append(row)
    for rows in groups.values():
        rows.sort(key=lambda row: int(row["seed"]))
    return groups


def published(env_id, steps):
    """The highest published score of each kind of evaluation."""
    found = {}
    for row in read_csv(RESULTS / "published.csv"):
        value, kind = float(row["value"]), row["kind"]
        if (row["env_id"], row["steps"]) == (env_id, steps):
            name = row["who"] + (f", {kind}" if kind != "unknown" else "")
            found[kind] = max(found.get(kind, (value, name)), (value, name))
    return [f"{value:,g} ({name})" for value, name in sorted(found.values(), reverse=True)]


def cells(rows):
    """Deterministic and sampled scores over seeds, and what is told of their spread."""
    evals = [float(row["eval_mean"]) for row in rows]
    stds = [float(row["eval_std"]) for row in rows]
    sampled = [float(row["eval_sampled_mean"]) for row in rows]
    sampled_stds = [float(row["eval_sampled_std"]) for row in rows]
    episodes, digits = int(float(rows[0]["eval_episodes"])), int(max(map(abs, evals)) < 100)
    spread = [np.median(evals), interquartile_mean(evals), min(evals)]
    return [
        count_seeds(rows),
        with_error(evals, stds, episodes, digits),
        with_error(sampled, sampled_stds, episodes, digits),
        *(number(x, digits) for x in spread),
    ]


def front():
    yield "environment", "steps", "seeds", "deterministic", "sampled", "published"
    groups = scores()
    for env_id in ("HalfCheetah", "Walker2d", "Hopper", "Ant", "Humanoid", "Swimmer", "Reacher"):
        setting = "preset" if f"{env_id}-v5" in PRESETS else "defaults"
        for steps in ("1 M", "3 M"):
            rows = groups.get((f"{env_id}-v5", setting, steps))
            rows = rows or groups.get((f"{env_id}-v5", f"{setting}, EnvPool", steps))
            if rows:
                name = env_id + (", preset" if setting == "preset" else "")
                found = published(f"{env_id}-v5", steps)
                yield name, steps, *cells(rows)[:3], found[0] if found else ""
    for name in ("Breakout", "Pong", "BeamRider", "Qbert", "SpaceInvaders"):
        rows = [row for row in read_csv(RESULTS / "atari.csv") if row["env_id"] == name]
        rows = [
            row
            for row in rows
            if float(row["global_step"]) > 9e6 and row["exp_name"] == "ppo_atari"
        ]
        found = published(name, "10 M")
        yield name, "10 M", *cells(rows)[:3], "; ".join(found)


def ppo():
    yield (
        "environment", "setting", "steps", "seeds", "deterministic", "sampled",
        "median", "middle half", "worst", "published",
    )  # fmt: skip
    groups = scores()
    for (env_id, setting, steps), rows in sorted(groups.items()):
        yield env_id, setting, steps, *cells(rows), "; ".join(published(env_id, steps)[:3])


def atari():
    yield (
        "game",
        "setting",
        "seed",
        "steps",
        "hours",
        "deterministic",
        "sampled",
        "published, same steps",
    )
    rows = read_csv(RESULTS / "atari.csv")
    for row in sorted(
        rows, key=lambda row: (row["env_id"], row["exp_name"], -float(row["global_step"]))
    ):
        million = float(row["global_step"]) / 1e6
        setting = row["exp_name"] if row["exp_name"] != "ppo_atari" else "defaults"
        setting += ", fp32" * ("fp32" in row["command"])
        hours = f"{float(row['seconds']) / 3600:.1f}"
        seeds, deterministic, sampled, *_ = cells([row])
        name = row["env_id"] + ", lstm" * (setting == "lstm")
        anchors = "; ".join(published(name, f"{round(million)} M")[:3])
        yield (
            row["env_id"],
            setting,
            row["seed"] + seeds[1:],
            f"{million:.1f} M",
            hours,
            deterministic,
            sampled,
            anchors,
        )


def muesli():
    yield (
        "environment",
        "learner",
        "steps",
        "seeds",
        "deterministic",
        "sampled",
        "median",
        "middle half",
        "worst",
    )
    names = {"muesli_cartpole": "Muesli", "ppo": "PPO", "equal-seconds": "PPO, as many seconds"}
    groups = defaultdict(list)
    for row in read_csv(RESULTS / "muesli.csv", "command"):
        early = row["solved_at"] and "--no-stop-early" not in row["command"]
        early = (
            early and row["exp_name"] == "muesli_cartpole" and row["env_id"].startswith("CartPole")
        )
        steps = "" if early else f"{round(float(row['global_step']), -4) / 1e3:,.0f} k"
        groups[row["env_id"], names[row["exp_name"]], steps].append(row)
    for (env_id, name, steps), rows in groups.items():
        if not steps:
            solved = [float(row["solved_at"]) / 1e3 for row in rows]
            steps = f"solved: {np.median(solved):.1f} k in the median, {max(solved):.1f} k at most"
        yield env_id, name, steps, *cells(rows)


def rl2():
    heading, *lines = rl2_table(
        rl2_settings(
            read_csv(RESULTS / "rl2.csv", "trial_return_mean", "episode_returns", "command")
        ),
        read_csv(RESULTS / "references.csv", "task", "learner", "score"),
    )
    yield heading
    yield from lines


def rl2_short():
    heading, *lines = rl2()
    kept = [i for i, name in enumerate(heading) if name not in ("random", "Gittins", "task known")]
    for line in (heading, *lines):
        if not any(word in line[0] for word in ("published", "2 episodes")):
            yield [line[i] for i in kept]


def details():
    """Change of the mean return, in percent of the default's, if one detail is switched."""
    study = ablations.STUDIES["details"]
    groups = ablations.group(read_csv(RESULTS / "details.csv"), study)
    total = ablations.effects(ablations.over_tasks(groups))
    tasks = {env_id: ablations.effects(settings) for env_id, settings in groups.items()}
    base = {env_id: np.mean(next(iter(x.values()))) for env_id, x in groups.items()}
    yield "switched to", *(x.removesuffix("-v5") for x in tasks), "all three", "95 % interval"
    for name, (effect, low, high) in sorted(total.items(), key=lambda x: x[1][0]):
        sure = "**" if low > 0 or high < 0 else ""
        each = (f"{100 * tasks[x][name][0] / base[x]:+.0f}" for x in tasks)
        yield name, *each, f"{sure}{effect:+.0f}{sure}", f"{low:+.0f} to {high:+.0f}"


def third_party():
    yield (
        "environment",
        "script",
        "steps",
        "random",
        "deterministic, each seed",
        "sampled",
        "others",
    )
    others = {row["env_id"]: row for row in read_csv(RESULTS / "published.csv")}
    random = {row["env_id"]: row for row in read_csv(RESULTS / "random.csv")}
    groups = defaultdict(list)
    for row in read_csv(RESULTS / "third_party.csv", "command"):
        groups[row["env_id"], row["command"].split()[1]].append(row)
    for (env_id, script), rows in groups.items():
        rows.sort(key=lambda row: int(row["seed"]))
        name = {"eval": "eval_mean", "sampled": "eval_sampled_mean"}
        evals, sampled = ([float(row[name[x]]) for row in rows] for x in ("eval", "sampled"))
        chance = f"{float(random[env_id]['mean']):.3g}" if env_id in random else ""
        each = ", ".join(f"{x:.4g}" for x in evals)
        steps = f"{float(rows[0]['global_step']) / 1e3:.0f} k"
        line = [env_id.split(":")[1], script, steps, chance, each, f"{np.mean(sampled):.4g}"]
        other = others.get(env_id)
        yield *line, f"{other['value']} ({other['who']}, {other['steps']})" if other else ""


def stress():
    rows = read_csv(RESULTS / "stress.csv")
    scripts = tuple(dict.fromkeys(row["script"] for row in rows))
    yield "variant", *scripts
    for variant in dict.fromkeys(row["variant"] for row in rows):
        found = {row["script"]: float(row["score"]) for row in rows if row["variant"] == variant}
        yield variant, *(f"{found[name]:.2f}" if name in found else "" for name in scripts)


def growth():
    """Steps/s and milliseconds of an iteration, with Gymnasium and with EnvPool on all cores."""
    parts = ("simulation", "acting", "updates", "rest")
    yield "environment", "environments x steps", "steps/s", "ratio", *(f"{x}, ms" for x in parts)
    found = {}
    for row in read_csv(RESULTS / "growth.csv"):
        key = row["env_id"], f"{row['num_envs']} x {row['num_steps']}"
        found.setdefault(key, {})[row["env_threads"]] = row
    for key, rows in found.items():
        if not {"-1", "0"} <= set(rows):
            continue
        pair = rows["-1"], rows["0"]
        rates = [float(row["sps"]) for row in pair]
        each = ([float(row[f"{name}_ms"]) for row in pair] for name in parts)
        yield (
            *key,
            ", ".join(f"{x:,.0f}" for x in rates),
            f"{rates[1] / rates[0]:.2f}",
            *(", ".join(f"{x:.0f}" for x in pair) for pair in each),
        )


def write(name):
    """A table as Markdown."""
    heading, *lines = globals()[name]()
    rows = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main():
    args, stale = tyro.cli(Args, description=__doc__), []
    for page in PAGES:
        old = page.read_text()
        new = re.sub(
            r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)",
            lambda found: found[1] + write(found[2]) + found[4],
            old,
            flags=re.DOTALL,
        )
        if new != old and args.check:
            stale.append(page.name)
        elif new != old:
            page.write_text(new)
            print(f"wrote the tables of {page.name}")
    if stale:
        raise UsageError(f"out of date: {', '.join(stale)}; run python benchmarks/report.py")


if __name__ == "__main__":
    run(main)
