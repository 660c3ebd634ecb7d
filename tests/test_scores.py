"""The table of scores: what is grouped, what is averaged, what is refused before a file is replaced."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scores.py"
HEADER = "env_id,exp_name,seed,global_step,solved_at,eval_mean,eval_sampled_mean,greedy_return,command\n"


def scores(*args):
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True)


def test_table(tmp_path):
    """Muesli's greedy return is the one of more episodes; only runs that may stop early are put together."""
    rows = ["CartPole-v1,m,1,20000,15000,1,490,480,python muesli_cartpole.py",
            "CartPole-v1,m,2,30000,25000,1,470,500,python muesli_cartpole.py",
            "CartPole-v1,long,1,50000,15000,1,450,440,python muesli_cartpole.py --no-stop-early",
            "CartPole-v1,long,2,50000,,1,430,400,python muesli_cartpole.py --no-stop-early",
            "Hopper-v5,ppo,1,99840,,3000,2000,,python ppo_continuous.py"]
    (tmp_path / "kept.csv").write_text(HEADER + "\n".join(rows) + "\n")
    result = scores(tmp_path / "kept.csv", "--csv", tmp_path / "again.csv")
    assert result.stdout.splitlines()[2:] == [
        "| CartPole-v1 | long | 50 k | 2 | 420 ± 28 | 440 ± 14 | 440, 400 |",
        "| CartPole-v1 | m | solved at 20000 (median), 25000 (last) | 2 | 490 ± 14 | 480 ± 14 | 480, 500 |",
        "| Hopper-v5 | ppo | 100 k | 1 | 3000 | 2000 | 3000 |"]
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "kept.csv").read_text()


@pytest.mark.parametrize("content", ["global_step,seconds\n1,2\n", HEADER + "CartPole-v1,m,1\n", None, ""])
def test_what_is_no_table_of_runs_leaves_the_old_one(tmp_path, content):
    kept = tmp_path / "kept.csv"
    kept.write_text(HEADER)
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    result = scores(tmp_path / "metrics.csv", "--csv", kept)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert kept.read_text() == HEADER
