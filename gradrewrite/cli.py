"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from gradrewrite._cli_loading import LoadError, load_graph, one_line
from gradrewrite._formatting import nearest, plain_table
from gradrewrite._version import __version__
from gradrewrite.diagnostics.doctor import report, skipped_rules
from gradrewrite.diagnostics.ranks import diagnose_ranks, read_ranks
from gradrewrite.diagnostics.run_log import Step, read_jsonl
from gradrewrite.errors import RewriteError
from gradrewrite.sites import Pattern

_RUNS = "what monitor.to_jsonl wrote; of several ranks all files, as run.rank*.jsonl"
_FOLLOW = 2  # seconds between two looks at a file
_T = TypeVar("_T")


class _Refused(Exception):
    """An error for the user; the message says how to fix it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        Exit status: 0, or 2 with one line on the error stream that says what to do.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if options.command == "sites" and options.pattern is None and len(rest) == 1 and not rest[0].startswith("-"):
        options.pattern, rest = rest[0], []  # argparse takes a pattern only right behind the model
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    commands = {"draw": _draw, "sites": _sites, "plot": _plot, "demo": _demo, "doctor": _doctor, "report": _report}
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            commands[options.command](options)
    except (_Refused, LoadError) as err:
        return _fail(str(err))
    except RewriteError as err:
        return _fail(one_line(err))
    return 0


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"gradrewrite: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(message: str) -> int:
    print(f"gradrewrite: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradrewrite", description="A compiler for the backward pass of PyTorch models."
    )
    parser.add_argument("--version", action="version", version=f"gradrewrite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="draw the rewritten backward graph of a model")
    _add_model(draw)
    draw.add_argument("--view", default="ladder", choices=("ladder", "overview", "site"), help="default: ladder")
    draw.add_argument("--site", help="the site of --view site, as error:decoder.0")
    draw.add_argument("--hops", type=int, default=3, help="edges around the site that are shown (default: 3)")
    draw.add_argument(
        "--run", type=Path, metavar="run.jsonl", help="what monitor.to_jsonl wrote: for colors and curves"
    )
    draw.add_argument(
        "--color-by", choices=("clip strength", "clip rate", "largest error", "not finite"), help="what colors say"
    )
    draw.add_argument("--reshapes", action="store_true", help="show ops that only reshape too")
    draw.add_argument("--records", action="store_true", help="show nodes that only serve logs and records too")
    endings = ".svg, .png, .pdf, .dot, .html, .json, .graphml or .model_explorer.json"
    draw.add_argument("--out", type=Path, default=Path("backward.html"), help=f"{endings} (default: backward.html)")
    sites = commands.add_parser("sites", help="list the sites of a model: where a policy can act")
    _add_model(sites)
    sites.add_argument("pattern", nargs="?", help="list only those that it matches, as 'error:decoder.*'")
    sites.add_argument("--json", action="store_true", help="print a JSON list")
    plot = commands.add_parser("plot", help="draw how training went, from its records")
    plot.add_argument("run", type=Path, metavar="run.jsonl", help="what monitor.to_jsonl wrote")
    plot.add_argument("--baseline", type=Path, metavar="other.jsonl", help="a run to compare with")
    plot.add_argument("--out", type=Path, default=Path("curves.png"), help=".png, .svg or .pdf (default: curves.png)")
    health = commands.add_parser("report", help="write a page that says whether the backward pass of a run is healthy")
    health.add_argument("run", type=Path, nargs="+", metavar="run.jsonl", help=_RUNS)
    health.add_argument("--baseline", type=Path, metavar="other.jsonl", help="a run to compare with")
    health.add_argument("--follow", action="store_true", help="write it again as the run grows, until Ctrl-C")
    health.add_argument("--out", type=Path, default=Path("report.html"), help=".html (default: report.html)")
    demo = commands.add_parser("demo", help="train two models that explode, with and without clipping in the backward")
    demo.add_argument("--out", type=Path, default=Path(), help="folder for what it writes (default: the current one)")
    doctor = commands.add_parser("doctor", help="say in plain words what is wrong with a run, from its records")
    doctor.add_argument("run", type=Path, nargs="+", metavar="run.jsonl", help=_RUNS)
    doctor.add_argument(
        "--json", action="store_true", help="print a JSON list: findings, then rules without enough steps"
    )
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="module:factory", help="makes the model when called, or is one")
    command.add_argument("--input", required=True, metavar="module:inputs", help="makes the inputs, or is them")
    command.add_argument("--policy", metavar="module:policy", help="the policy (default: none)")


def _draw(options: argparse.Namespace) -> None:
    from gradrewrite import viz

    pictures: dict[str, viz.Format] = {f".{form}": form for form in get_args(viz.Format)}
    exports: dict[str, viz.ExportFormat] = {
        ".json": "json",
        ".graphml": "graphml",
        ".model_explorer.json": "model_explorer",
    }
    name, ending = _split(options.out, [*pictures, *exports])
    if ending in exports:
        _refuse_ignored(options, ending)
    elif (options.reshapes or options.records) and options.view != "ladder" and ending != ".html":
        flag = "--reshapes" if options.reshapes else "--records"
        raise _Refused(f"{flag} belongs to the ladder and the page; leave it out, or take --view ladder")
    steps = _read(options.run) if options.run is not None else None
    graph = load_graph(options.model, options.input, options.policy)
    try:
        if ending in exports:
            path = viz.export(graph, name, exports[ending])
        else:
            drawing = viz.draw(
                graph,
                options.view,
                site=options.site,
                hops=options.hops,
                monitor=steps,
                color_by=options.color_by,
                title=options.model,
                reshapes=options.reshapes,
                records=options.records,
            )
            path = drawing.render(name, pictures[ending])
    except OSError as err:
        raise _Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err
    except ValueError as err:
        raise _Refused(str(err)) from err
    print(path)


def _refuse_ignored(options: argparse.Namespace, ending: str) -> None:
    """An export holds the whole graph, whatever a picture would show of it."""
    given = {
        "--view": options.view != "ladder",
        "--site": options.site is not None,
        "--hops": options.hops != 3,
        "--run": options.run is not None,
        "--color-by": options.color_by is not None,
        "--reshapes": options.reshapes,
        "--records": options.records,
    }
    ignored = [flag for flag, is_given in given.items() if is_given]
    if ignored:
        raise _Refused(f"a {ending} file holds the whole graph, without colors; leave out {', '.join(ignored)}")


def _sites(options: argparse.Namespace) -> None:
    try:
        pattern = Pattern.parse(options.pattern) if options.pattern is not None else None
    except ValueError as err:
        raise _Refused(str(err)) from err
    known = load_graph(options.model, options.input, options.policy).sites
    found = [site for site in known if pattern is None or pattern.matches(site)]
    if not found and pattern is not None:
        names = ", ".join(nearest(options.pattern, [str(s) for s in known])) or "there are none"
        raise _Refused(f"no site matches {options.pattern!r}; nearest: {names}")
    rows = [
        {
            "site": str(site),
            "kind": site.kind,
            "name": site.name,
            "call": site.call,
            "module": site.module,
            "op": site.op,
            "output_of": list(site.output_of),
            "shape": list(site.shape),
            "dtype": str(site.dtype).removeprefix("torch."),
            "source": site.source,
        }
        for site in found
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    sizes = [", ".join("?" if size is None else str(size) for size in site.shape) for site in found]
    cells = [
        (str(r["site"]), f"[{size}]", str(r["dtype"]), str(r["source"])) for r, size in zip(rows, sizes, strict=True)
    ]
    print(plain_table(("site", "shape", "dtype", "source"), cells))
    print(f"{len(found)} of {len(known)} sites")


def _plot(options: argparse.Namespace) -> None:
    from gradrewrite import viz

    formats: dict[str, viz.CurveFormat] = {f".{form}": form for form in get_args(viz.CurveFormat)}
    name, ending = _split(options.out, list(formats))
    curves = _reading(lambda: viz.plot(options.run, baseline=options.baseline))
    try:
        print(curves.render(name, formats[ending]))
    except OSError as err:
        raise _Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err


def _report(options: argparse.Namespace) -> None:
    name, _ = _split(options.out, [".html"])
    if options.follow:
        _follow(options, name)
    print(_write_report(options, name))


def _follow(options: argparse.Namespace, name: str) -> None:
    """Write the report whenever a file has changed, until Ctrl-C; a file that is not there yet is waited for."""
    _warn(f"following {', '.join(map(str, options.run))}, writing {name}.html until Ctrl-C")
    files = [path for path in (*options.run, options.baseline) if path is not None]
    seen: list[tuple[int, int]] = []
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            start = time.monotonic()
            found = [(stat.st_size, stat.st_mtime_ns) for path in files if path.exists() for stat in [path.stat()]]
            if found != seen and len(found) == len(files):
                _write_report(options, name, reload=_FOLLOW)
                seen = found
            # The work on a long run must not take more than half of a core from its training.
            time.sleep(max(_FOLLOW, time.monotonic() - start))


def _write_report(options: argparse.Namespace, name: str, *, reload: int = 0) -> str:
    from gradrewrite import viz

    page = _reading(lambda: viz.report(_one_or_all(options.run), baseline=options.baseline))
    try:
        return page.render(name, reload=reload)
    except OSError as err:
        raise _Refused(f"cannot write {options.out}: {err.strerror}; choose another path with --out") from err


def _split(path: Path, endings: Sequence[str]) -> tuple[str, str]:
    """A path without its ending, and the ending."""
    found = next((e for e in sorted(endings, key=len, reverse=True) if path.name.endswith(e) and path.name != e), None)
    if found is None:
        raise _Refused(f"--out {path}: the ending says the format; use one of {', '.join(endings)}")
    return str(path)[: -len(found)], found


def _demo(options: argparse.Namespace) -> None:
    from gradrewrite._demo import run

    try:
        run(options.out)
    except OSError as err:
        raise _Refused(f"cannot write to {options.out}: {err.strerror}; choose another folder with --out") from err


def _doctor(options: argparse.Namespace) -> None:
    runs = _reading(lambda: read_ranks(options.run))
    steps = max(runs.values(), key=len)  # of ranks that recorded alike; to say how much was looked at
    found = diagnose_ranks(runs)
    as_json = [*(one.to_json() for one in found), *(rule.to_json() for rule in skipped_rules(steps))]
    text = json.dumps(as_json, indent=1, allow_nan=False) if options.json else report(found, steps)
    print(text if options.json or len(runs) == 1 else f"{len(runs)} ranks: {', '.join(map(str, runs))}\n\n{text}")


def _one_or_all(paths: Sequence[Path]) -> Path | list[Path]:
    return paths[0] if len(paths) == 1 else list(paths)


def _read(path: Path) -> list[Step]:
    return _reading(lambda: read_jsonl(path))


def _reading(read: Callable[[], _T]) -> _T:
    """Call a reader of record files; refuse unreadable ones."""
    try:
        return read()
    except OSError as err:
        raise _Refused(f"cannot read {err.filename}: {err.strerror}; give a file of monitor.to_jsonl") from err
    except ValueError as err:
        raise _Refused(str(err)) from err
