"""Trained agents side by side, as a looped animation for the front page.

    MUJOCO_GL=egl python benchmarks/gallery.py runs/Humanoid-1 runs/Ant-1 --output agents.webp \\
        --env-kwargs '{"camera_name": "track", "max_episode_steps": 330}'

Each run's last video is shown; a run without one is evaluated with --capture-video first."""

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tyro
from moviepy import VideoFileClip
from PIL import Image, ImageDraw, ImageOps
from tables import UsageError, run

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders
    output: Path  # animation to write, .webp or .gif
    seconds: float = 5.0  # of each video, and of the loop
    skip: float = 0.5  # seconds left out at the start
    fps: int = 15  # frames per second
    size: int = 200  # pixels of a tile
    columns: int = 4  # tiles in a row
    quality: int = 45  # of WebP, 0 to 100
    env_kwargs: str | None = None  # of the evaluations


def find_video(folder, env_kwargs):
    """A run's last video, which is recorded if there is none."""
    about = json.loads((folder / "args.json").read_text())
    if not list(folder.glob("videos/*.mp4")):
        words = [ROOT / f"{about['script']}.py", "--evaluate", folder, "--capture-video"]
        flag = "--test-trials" if about["script"] == "rl2_meta" else "--eval-episodes"
        words += ["--env-kwargs", env_kwargs] if env_kwargs else []
        subprocess.run([sys.executable, *words, flag, "1"], check=True)
    return max(folder.glob("videos/*.mp4"), key=lambda path: path.stat().st_mtime)


def read_tiles(folder, args):
    """Square frames of a run, which begins anew where it is shorter than the loop."""
    name = json.loads((folder / "args.json").read_text())["env_id"].split("-v")[0]
    count = round(args.seconds * args.fps)
    with VideoFileClip(str(find_video(folder, args.env_kwargs))) as clip:
        start = args.skip if clip.duration > 2 * args.skip else 0
        frames = clip.subclipped(start).iter_frames(fps=args.fps)
        tiles = [Image.fromarray(frame) for frame in islice(frames, count)]
    for i, tile in enumerate(tiles):
        tiles[i] = ImageOps.pad(tile, (args.size, args.size), Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(tiles[i])
        draw.text((6, 4), name, "white", font_size=14, stroke_width=2, stroke_fill="black")
    return [tiles[i % len(tiles)] for i in range(count)]


def main():
    args = tyro.cli(Args, description=__doc__)
    if missing := [str(x) for x in args.runs if not (x / "checkpoint.pt").exists()]:
        raise UsageError(f"no run in {', '.join(missing)}")
    videos = [read_tiles(folder, args) for folder in args.runs]
    width = min(args.columns, len(videos))
    height = -(-len(videos) // width)
    pictures = []
    for tiles in zip(*videos, strict=True):
        picture = Image.new("RGB", (width * args.size, height * args.size), "white")
        for i, tile in enumerate(tiles):
            picture.paste(tile, (i % width * args.size, i // width * args.size))
        pictures.append(picture)
    first, *others = pictures
    first.save(
        args.output,
        save_all=True,
        append_images=others,
        duration=1000 // args.fps,
        loop=0,
        quality=args.quality,
        method=4,
    )
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB, {len(pictures)} frames")


if __name__ == "__main__":
    run(main)
