"""A checkpoint without its optimizer, for checkpoints/: it evaluates, but does not resume.

python benchmarks/strip.py runs/Humanoid-1 checkpoints/Humanoid-v5"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from tables import UsageError, run


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # run folder
    folder: tyro.conf.Positional[Path]  # folder to write


def main():
    args = tyro.cli(Args, description=__doc__)
    try:
        checkpoint = torch.load(args.run / "checkpoint.pt", "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"no run in {args.run}") from error
    flags = checkpoint["args"] | {"run_dir": None, "resume": None}
    progress = checkpoint["progress"] | {"episodes": []}
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = {"args": flags, "progress": progress, "agent": checkpoint["agent"]}
    torch.save(kept, args.folder / "checkpoint.pt")


if __name__ == "__main__":
    run(main)
