"""The command line: arguments, and the command that they name; nothing else is imported before it is known."""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from gradrewrite._version import __version__
from gradrewrite.cli.messages import Refused, one_line, warn

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_RUNS = "what monitor.to_jsonl wrote; of several ranks all files, as run.rank*.jsonl"
_CLIP = "the global norm to which the training clips, to compare it with what updates used"
_BASELINES = "runs to draw it with; of several the first is the one to compare with"
_COMMANDS = {
    "draw": "graphs",
    "sites": "graphs",
    "memory": "graphs",
    "plot": "runs",
    "report": "runs",
    "doctor": "findings",
    "demo": "demo",
    "diagnose": "diagnosis",
    "audit": "diagnosis",
    "diff": "differences",
    "selftest": "selftest",
    "help": "pages",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, the process's own if None; return its exit code, or 2 with one line on the error stream."""
    options = parse(argv)
    try:
        command = importlib.import_module(f"{__name__}.{_COMMANDS[options.command]}")
        with warnings.catch_warnings():
            warnings.showwarning = warn
            code: int | None = getattr(command, options.command)(options)
    except Refused as err:
        return _fail(str(err))
    except Exception as err:
        from gradrewrite.errors import RewriteError

        if not isinstance(err, RewriteError):
            raise
        return _fail(one_line(err))
    return code or 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command; exit with 2 for unknown ones."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if options.command == "sites" and options.pattern is None and len(rest) == 1 and not rest[0].startswith("-"):
        options.pattern, rest = rest[0], []  # argparse takes a pattern only right behind the model
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _fail(message: str) -> int:
    warn(message)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradrewrite", description="A compiler for the backward pass of PyTorch models."
    )
    parser.add_argument("--version", action="version", version=f"gradrewrite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_graphs, _add_runs, _add_trainings, _add_pages):
        add(commands)
    return parser


def _add_graphs(commands: _Commands) -> None:
    draw = commands.add_parser("draw", help="draw the rewritten backward graph of a model")
    _add_model(draw)
    draw.add_argument("--view", default="ladder", choices=("ladder", "overview"), help="default: ladder")
    draw.add_argument(
        "--run", type=Path, metavar="run.jsonl", help="what monitor.to_jsonl wrote: for colors and curves"
    )
    draw.add_argument("--color-by", choices=("clip strength", "largest error", "not finite"), help="what colors say")
    draw.add_argument("--reshapes", action="store_true", help="show ops that only reshape too")
    draw.add_argument("--records", action="store_true", help="show nodes that only serve logs and records too")
    endings = ".svg, .png, .pdf, .dot, .html, .json or .graphml"
    draw.add_argument("--out", type=Path, default=Path("backward.html"), help=f"{endings} (default: backward.html)")
    sites = commands.add_parser("sites", help="list the sites of a model: where a policy can act")
    _add_model(sites)
    sites.add_argument("pattern", nargs="?", help="list only those that it matches, as 'error:decoder.*'")
    form = sites.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list")
    form.add_argument(
        "--tree", action="store_true", help="print a tree by module; repeated blocks and calls are folded"
    )
    memory = commands.add_parser("memory", help="list the bytes that a model keeps for the backward")
    _add_model(memory)
    memory.add_argument("--json", action="store_true", help="print a JSON list of the tensors")


def _add_runs(commands: _Commands) -> None:
    plot = commands.add_parser("plot", help="draw how training went, from its records")
    plot.add_argument("run", type=Path, metavar="run.jsonl", help="what monitor.to_jsonl wrote")
    plot.add_argument("--baseline", type=Path, nargs="+", metavar="other.jsonl", help=_BASELINES)
    plot.add_argument("--out", type=Path, default=Path("curves.png"), help=".png, .svg or .pdf (default: curves.png)")
    health = commands.add_parser("report", help="write a page that says whether the backward pass of a run is healthy")
    health.add_argument("run", type=Path, nargs="+", metavar="run.jsonl", help=_RUNS)
    health.add_argument("--baseline", type=Path, nargs="+", metavar="other.jsonl", help=_BASELINES)
    health.add_argument("--clip", type=float, metavar="NORM", help=_CLIP)
    health.add_argument("--follow", action="store_true", help="write it again as the run grows, until Ctrl-C")
    health.add_argument("--out", type=Path, default=Path("report.html"), help=".html (default: report.html)")
    doctor = commands.add_parser("doctor", help="say in plain words what is wrong with a run, from its records")
    doctor.add_argument("run", type=Path, nargs="+", metavar="run.jsonl", help=_RUNS)
    doctor.add_argument("--clip", type=float, metavar="NORM", help=_CLIP)
    doctor.add_argument(
        "--json", action="store_true", help="print a JSON list: causes, findings, rules without enough steps"
    )
    diff = commands.add_parser("diff", help="name the first step, site, op and line at which two runs differ")
    for name in ("a", "b"):
        diff.add_argument(name, type=Path, metavar=f"{name}.jsonl", help="what monitor.to_jsonl wrote, of one rank")
    diff.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="largest relative difference (default: bits, or figures, are equal)",
    )
    diff.add_argument("--sites", default="*", metavar="PATTERN", help="only these, as 'step:*' (default: all)")
    diff.add_argument("--html", type=Path, metavar="diff.html", help="write a page with both side by side too")
    diff.add_argument("--json", action="store_true", help="print a JSON object")


def _add_trainings(commands: _Commands) -> None:
    diagnose = commands.add_parser("diagnose", help="train a copy of a model for some steps, and say what is wrong")
    diagnose.add_argument("model", metavar="module:factory", help="makes the model when called, or is one")
    diagnose.add_argument("--input", required=True, metavar="module:batches", help="makes the batches, or is them")
    diagnose.add_argument("--loss", metavar="module:loss", help="(output, batch) -> scalar (default: the output)")
    diagnose.add_argument(
        "--compute-loss", metavar="module:function", help="(model, *args, **kwargs) -> scalar, in its place"
    )
    diagnose.add_argument("--optimizer", metavar="module:optimizer", help="makes it from parameters (default: none)")
    diagnose.add_argument("--steps", type=int, default=50, help="at most (default: 50)")
    diagnose.add_argument(
        "--try", action="store_true", dest="try_clips", help="train with a global clip and the policy too"
    )
    diagnose.add_argument("--clip", type=float, metavar="NORM", help="the norm to which the optimizer itself clips")
    diagnose.add_argument("--out", type=Path, default=Path("diagnosis.html"), help=".html (default: diagnosis.html)")
    audit = commands.add_parser("audit", help="list the parameters that a training step does not train, and say why")
    audit.add_argument("model", metavar="module:factory", help="makes the model when called, or is one")
    audit.add_argument("--input", required=True, metavar="module:batch", help="makes one batch, or is one")
    audit.add_argument("--loss", metavar="module:loss", help="(output, batch) -> scalar (default: the output)")
    audit.add_argument("--compute-loss", metavar="module:function", help="(model, *args, **kwargs) -> scalar")
    audit.add_argument("--optimizer", metavar="module:optimizer", help="makes it from parameters (default: none)")
    audit.add_argument("--trained", nargs="+", metavar="PATTERN", help="names meant to be trained, as '*.lora_*'")
    audit.add_argument("--steps", type=int, default=3, help="eager steps at most; 0 runs nothing (default: 3)")
    audit.add_argument("--json", action="store_true", help="print a JSON object")
    audit.add_argument("--out", type=Path, metavar="audit.html", help="write a page too")
    demo = commands.add_parser("demo", help="train two models that explode, with and without clipping in the backward")
    demo.add_argument("--out", type=Path, default=Path("gradrewrite_demo"), help="default: gradrewrite_demo")
    selftest = commands.add_parser("selftest", help="check that this installation works, with its torch and compiler")
    selftest.add_argument("--eager", action="store_true", help="without torch.compile: no C++ compiler is needed")


def _add_pages(commands: _Commands) -> None:
    pages = commands.add_parser("help", help="say more on an error or a public name, or show the cheat sheet")
    pages.add_argument(
        "name", nargs="?", help="the last word of an error, cheatsheet, or a public name (default: list all)"
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="module:factory", help="makes the model when called, or is one")
    command.add_argument("--input", required=True, metavar="module:inputs", help="makes the inputs, or is them")
    command.add_argument("--policy", metavar="module:policy", help="the policy (default: none)")
