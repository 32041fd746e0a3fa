"""The command line on health reports, and one that follows a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from models.clips import header_of
from models.shell import Shell

RECORDS = '{"norm@error:0": 4.0, "bound@error:0": 1.0, "factor@error:0": 0.25, "loss@run": 1.5}'
STEP = '{"step": %d, "graphs": 0, "records": ' + RECORDS + "}\n"
HEADER = header_of(("norm@error:0", "bound@error:0"))
PARTIAL = '{"step": 99, "records": {"norm@err'


def write(name: str, count: int, rest: str = "") -> None:
    Path(name).write_text(HEADER + "".join(STEP % n for n in range(count)) + rest)


@pytest.mark.pure
def test_report(shell: Shell) -> None:
    write("run.jsonl", 30)
    write("plain.jsonl", 20)

    assert shell.run("report", "run.jsonl", "--baseline", "plain.jsonl", "--out", "r.html") == (0, "r.html\n", "")
    text = Path("r.html").read_text()
    assert "Clipping bound too low" in text
    assert "<title>run.jsonl</title>" in text
    assert "compared with plain.jsonl" in text
    assert "<noscript><img" in text  # the curves of readers without scripts


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("none.jsonl",), "cannot read none.jsonl: No such file or directory; give a file of monitor.to_jsonl"),
        (("bad.jsonl",), "bad.jsonl, line 1: wanted one JSON object"),
        (("run.jsonl", "--baseline", "none.jsonl"), "cannot read none.jsonl: No such file or directory"),
        (("run.jsonl", "--out", "x.png"), "--out x.png: the ending says the format; use one of .html"),
        (("run.jsonl", "--out", "/dev/null/x.html"), "cannot write /dev/null/x.html: File exists"),
        (("bad.jsonl", "--follow"), "bad.jsonl, line 1: wanted one JSON object"),
    ],
)
@pytest.mark.pure
def test_report_refuses(shell: Shell, words: tuple[str, ...], wanted: str) -> None:
    Path("bad.jsonl").write_text("step 1\n" * 2)
    write("run.jsonl", 1)
    status, out, err = shell.run("report", *words)
    assert (status, out) == (2, "")
    assert wanted in err.splitlines()[-1]


@pytest.mark.pure
def test_follow_writes_what_is_new(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each nap does one thing to the file, and looks at the page that is there then."""
    seen: list[str] = []

    def page() -> str:
        return Path("r.html").read_text() if Path("r.html").exists() else ""

    def interrupt() -> None:
        raise KeyboardInterrupt

    naps: list[Callable[[], None]] = [
        lambda: write("run.jsonl", 2, PARTIAL),
        lambda: None,
        lambda: write("run.jsonl", 25, PARTIAL),
        lambda: os.utime("r.html", (0, 0)),  # unchanged records: not written again
        lambda: None,
        interrupt,
    ]

    def nap(seconds: float) -> None:
        assert seconds >= 2
        seen.append(page())
        naps.pop(0)()

    monkeypatch.setattr("gradrewrite.cli.runs.time.sleep", nap)
    status, out, err = shell.run("report", "run.jsonl", "--follow", "--out", "r.html")

    assert (status, out) == (0, "r.html\n")
    assert err == "gradrewrite: following run.jsonl, writing r.html until Ctrl-C\n"
    assert naps == []
    assert seen[0] == ""  # there was no run yet
    assert "Steps 0 to 1." in seen[1] == seen[2]
    assert "Steps 0 to 24." in seen[3] == seen[4] == seen[5]
    assert "Clipping bound too low" in seen[3]
    assert all("location.reload()" in text for text in seen[1:])
    assert "location.reload()" not in page()  # the last one is for good
    assert "Steps 0 to 24." in page()


@pytest.mark.slow
def test_follow_ends_on_an_interrupt(tmp_path: Path) -> None:
    run, out = tmp_path / "run.jsonl", tmp_path / "r.html"
    run.write_text(HEADER + STEP % 0)
    words = [sys.executable, "-m", "gradrewrite", "report", str(run), "--follow", "--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        wait(lambda: out.exists())
        with run.open("a") as file:
            file.write(STEP % 1)
        wait(lambda: "Steps 0 to 1." in out.read_text())
        process.send_signal(signal.SIGINT)
        told, warned = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, told) == (0, f"{out}\n")
    assert warned.count("\n") == 1
    assert "location.reload()" not in out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "run.jsonl"]


def wait(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
