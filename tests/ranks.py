"""Processes of a process group that run the parts of a test file, and what each part found on each rank."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed

from helpers import TESTS

Part = Callable[[int], Any]


def join(path: Path, rank: int, number: int, seconds: float = 120) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=rank, world_size=number, timeout=timedelta(seconds=seconds)
    )


def outcomes_of(file: str, path: Path, number: int) -> list[dict[str, Any]]:
    """The outcome of each part of a test file on each rank; an exception is its text."""
    folders = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One process of each worker has loaded and compiled what all ranks need; it is forked for each file.
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["warm_ranks"])
    process = forkserver.Process(target=_run_file, args=(file, path, number))
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(folders), OMP_NUM_THREADS="1"):
        process.start()
    process.join(200)
    if process.exitcode is None:
        process.terminate()
    assert process.exitcode == 0, f"the ranks of {file} ended with {process.exitcode}"
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(number)]


def _run_file(file: str, path: Path, number: int) -> None:
    assert "warm_ranks" in sys.modules
    sys.argv = [file, str(path), str(number)]
    runpy.run_path(file, run_name="__main__")  # a new process finds the file by its path only


def run_parts(parts: Sequence[Part], parts_of_four: Sequence[Part] | None = None) -> None:
    """Run parts in as many processes as the command line says: four may run other ones."""
    path, number = Path(sys.argv[1]), int(sys.argv[2])
    parts = parts_of_four if number == 4 and parts_of_four is not None else parts
    processes = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    processes(_run, (path, number, parts), nprocs=number, start_method="fork")


def _run(rank: int, path: Path, number: int, parts: Sequence[Part]) -> None:
    join(path, rank, number)
    outcomes = {}
    for part in parts:
        try:
            outcomes[part.__name__] = part(rank)
        except Exception as err:
            outcomes[part.__name__] = f"{type(err).__name__}: {err}"
        torch.compiler.reset()
        distributed.barrier()
    torch.save(outcomes, path / f"{rank}.pt")
    distributed.destroy_process_group()
