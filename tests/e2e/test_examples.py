"""Each example runs as a script: most in the process of the tests, where torch is imported already."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

FOLDER = ROOT / "examples"
STEPS = ["--steps", "3"]
EXAMPLES = {
    "regression": (STEPS, "clipped: ", "regression.svg"),
    "character_model": (STEPS, "total_norm@group:default", "character_model.png"),
    "exploding_text": (STEPS, "clipped  loss 4.9", None),
    "char_rnn": ([*STEPS, "--out", "."], "40 steps, error clip    loss 4.8", "40_steps_plain.png"),
    "simulator": ([*STEPS, "--length", "12", "--out", "."], "error clip    loss 1.46", "simulator_plain.png"),
    "forces": (STEPS, "plain, no close pair mean error of a force 0.", None),
    "gradient_penalty": (STEPS, "made by the backward of /sqrt, gradient_penalty.py:", None),
    "physics_informed": (STEPS, "AlignedMTL ", None),
    "reinforce": ([*STEPS, "--eager"], "one graph  mean reward -0.", None),
    "weight_decay": (STEPS, "Adam               L2 ", None),
    "unused_pooler": (["--steps", "24"], "no gradient: bert.pooler.dense.weight", None),
    "distributed_training": (STEPS, "1 processes, outside", None),
    "distributed_all_reduce": (STEPS, "1 processes, 0 collectives", None),
    "bptt_clipping": ([*STEPS, "--unroll", "8"], "error clip: loss ", "bptt_clipping.png"),
    "seq2seq_attention": ([*STEPS, "--seeds", "1", "--length", "8"], "decoder.cell: ", "seq2seq_attention.png"),
    "mean_squared_gradients": (["--eager", "--sizes", "2"], "float64: gradrewrite ", "mean_squared_gradients.png"),
    "train_with_less_memory": (
        ["--steps", "2", "--unroll", "6"],
        "GPT              int8 ",
        "train_with_less_memory.png",
    ),
    "quantize_aware": (STEPS, "rounded, straight through  loss 2", None),
    "attribution": (STEPS, "AttnLRP            without 8 pixels: ", None),
    "multi_task": ([*STEPS, "--seeds", "1"], "MGDA at the features ", "multi_task.png"),
    "nan_hunt": (["--only", "log of 0"], "step 1, activation:/log: /log, nan_hunt.py:", "nan_hunt.png"),
    "private_training": (["--eager", "--steps", "3", "--seeds", "1"], "Opacus       epsilon ", "private_training.png"),
    "who_made_the_spike": ([], "row 7 (id 'digits/573'): gradient norm ", None),
    "find_nonfinite": ([], "op: /sqrt, source: find_nonfinite.py:", None),
}


@pytest.mark.pure
def test_every_example_is_listed() -> None:
    elsewhere = {"__init__", "demo"}  # test_cli.py runs the demo
    assert set(EXAMPLES) == {path.stem for path in FOLDER.glob("*.py")} - elsewhere


@pytest.mark.sample(12)
@pytest.mark.inductor
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, wanted, written = EXAMPLES[name]
    if name in ("unused_pooler", "attribution"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    if name == "private_training":
        pytest.importorskip("opacus", reason="opacus is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    importlib.import_module(f"gradrewrite.examples.{name}").main()

    assert wanted in capsys.readouterr().out
    assert written is None or (tmp_path / written).stat().st_size > 0


@pytest.mark.sample(4)
def test_an_actor_learns_alike_in_one_graph() -> None:
    from gradrewrite.examples import reinforce

    ways = reinforce.in_one_graph, reinforce.in_two_phases
    one, two = (reinforce.train(make, 60, compiled=False)[0] for make in ways)
    assert one[:5] == pytest.approx(two[:5], rel=1e-4)  # then a push may differ by rounding
    assert min(sum(one[-6:]), sum(two[-6:])) > 0.6 * sum(one[:6])


@pytest.mark.sample(12)
@pytest.mark.slow
def test_an_example_as_a_process(tmp_path: Path) -> None:
    options, wanted, _ = EXAMPLES["find_nonfinite"]
    command = [sys.executable, str(FOLDER / "find_nonfinite.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("distributed_training", ["--way", "ddp"], "2 processes, outside of all regions: nothing"),
        ("distributed_training", ["--way", "fsdp2"], "2 processes, outside of all regions: "),
        ("distributed_all_reduce", [], "2 processes, 4 collectives in a backward"),
    ],
)
def test_two_processes(name: str, options: list[str], wanted: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(FOLDER / f"{name}.py"), *options, *STEPS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout
    assert "0 skipped" in done.stdout
