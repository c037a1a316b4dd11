"""`fedrec sweep`: a recipe at every point of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedrec.cli.output import write_json
from fedrec.cli.parser import Options
from fedrec.loop.footprint import num_bytes_text
from fedrec.recipe import Sweep, sweep
from fedrec.recipe.grid import parse_grid, short_keys
from fedrec.recipe.planning import plan_sweep
from fedrec.recipe.points import Point, sweep_points
from fedrec.recipe.tables import synthetic_text
from fedrec.report.table import percent, print_line, print_table

__all__ = ["sweep_command"]


def sweep_command(args: Options) -> int:
    """Run the points of a grid, or list them; return exit code 1 if a point failed."""
    grid, overrides = parse_grid(args.overrides)
    if args.dry_run:
        points = sweep_points(
            args.target, grid, repeats=args.repeats, overrides=overrides, allow=args.allow
        )
        folder = Path(args.output_dir) / points[0].sweep
        recordings = Path(args.recordings) if args.recordings else folder / "recordings"
        _list(points, recordings, args)
        return 0
    done = sweep(
        args.target,
        grid,
        repeats=args.repeats,
        overrides=overrides,
        allow=args.allow,
        output_dir=args.output_dir,
        recordings=args.recordings,
        delete_histories=args.delete_histories,
        progress=not (args.no_progress or args.quiet),
    )
    files = [str(done.folder / name) for name in ("results.csv", "summary.csv")]
    if args.json:
        write_json({"files": files, "summary": done.summary, "failures": done.failures})
        return 1 if done.failures else 0
    console = Console()
    _print(done, console)
    for file in files:
        print_line(console, file)
    if done.failures:
        print_line(
            console, f"{len(done.failures)} points failed; the same command tries them again:"
        )
    for name, reason in done.failures.items():
        print_line(console, f"  {name}: {reason}")
    return 1 if done.failures else 0


def _list(points: Sequence[Point], recordings: Path, args: Options) -> None:
    """Print the points, how many of them are done, and the disk that the others need."""
    plan = plan_sweep(points, recordings)
    if args.json:
        listed = [
            {"name": point.name, "recording": point.recording, "done": done}
            for point, done in zip(points, plan.done, strict=True)
        ]
        write_json({"points": listed, "history_bytes": list(plan.sizes)})
        return
    console = Console()
    for point, done in zip(points, plan.done, strict=True):
        print_line(console, f"{point.recording}  {'done   ' if done else 'missing'}  {point.name}")
    for parts, number, there in (
        ("Points", len(points), sum(plan.done)),
        ("Recordings", plan.recordings, plan.recordings_there),
        ("Recoveries", plan.recoveries, plan.recoveries_there),
    ):
        print_line(console, f"{parts}: {number - there} to make, {there} there.")
    if plan.sizes:
        most, total = (num_bytes_text(size) for size in (max(plan.sizes), sum(plan.sizes)))
        assumed = ", if updates compress as expected" if plan.assumed else ""
        kept = f"{most} at a time" if args.delete_histories else f"{total} in all, if they are kept"
        print_line(console, f"Disk: up to {most} for a history, {kept}{assumed}.")


def _print(done: Sweep, console: Console) -> None:
    """Print the summary of a sweep: means, and deviations if there are repeats."""
    name, synthetic = done.folder.name, synthetic_text(done.summary)
    short = short_keys(done.keys)
    headings = [*(short[key] for key in done.keys), "Model", "TER %", "ASR %", "ACP %"]
    rows = []
    for row in done.summary:
        cells = [
            _cell(row[f"{figure}_mean"], row[f"{figure}_std"]) for figure in ("ter", "asr", "acp")
        ]
        labels = [str(row[key]) for key in (*done.keys, "method")]
        if row["failures"]:
            labels[-1] += f" ({row['failures']} failed)"
        rows.append([*labels, *cells])
    title = f"{name} ({synthetic})" if synthetic else name
    print_table(console, headings, rows, title=title, labels=len(done.keys) + 1)


def _cell(mean: float | None, std: float | None) -> str:
    return percent(mean) if std is None else f"{percent(mean)} ± {percent(std)}"
