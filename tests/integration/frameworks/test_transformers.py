"""transformers: models with a policy behave as themselves, and Trainer trains with the policy."""

from __future__ import annotations

import html
import logging
import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.passes import AutoClip, CheckFinite, ClipByGlobalNorm, ClipByValue, Observe

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
from transformers import Trainer, TrainerCallback  # noqa: E402

from gradrewrite.integrations.transformers import RewriteCallback, diagnose  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("error::gradrewrite.RewriteWarning"),
]
BOUND = 0.1
VOCABULARY = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    logging.getLogger("transformers").setLevel(level)


def bert(**settings: Any) -> nn.Module:
    config = transformers.BertConfig(
        **{
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **settings,
        }
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=16,
        vocab_size=VOCABULARY,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    assert isinstance(model, nn.Module)
    return model


def examples(name: str, number: int = 64) -> list[dict[str, Tensor]]:
    """Token sequences with their labels, and a column that no forward takes."""
    ids = torch.randint(3, VOCABULARY, (number, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.sum(1) % 2 if name == "bert" else ids
    return [{"input_ids": i, "labels": label, "further": torch.ones(1)} for i, label in zip(ids, labels, strict=True)]


def train(name: str, folder: Path, *callbacks: Any, times: int = 1, **settings: Any) -> Any:
    """Train for 20 steps with plain SGD, whose parameters show the length of each gradient."""
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 20,
            "learning_rate": 0.1,
            "optim": "sgd",
            "logging_steps": 5,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
            **settings,
        },
    )
    data = examples(name)
    trainer = transformers.Trainer(
        make(name), arguments, train_dataset=data, eval_dataset=data[:8], callbacks=list(callbacks)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    for _ in range(times):
        trainer.train()
    return trainer


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 3}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_step_clip_equals_the_trainers_own(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    own = train(name, tmp_path, max_grad_norm=BOUND, **settings)
    free = train(name, tmp_path, **settings)
    callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(BOUND)), compile=False)
    ours = train(name, tmp_path, callback, **settings)

    # clip_grad_norm_ adds 1e-6 to the norm, so a clipped gradient differs in its 6th digit.
    assert difference(ours.model, own.model) < 1e-5
    assert difference(free.model, own.model) > 1e-3
    assert len(callback.monitor.history("total_norm@step:group:default")) >= 20
    assert not isinstance(ours.model, gr.RewrittenModule)


def test_fused_adamw_at_the_default_rate(tmp_path: Path) -> None:
    settings = {"optim": "adamw_torch_fused", "learning_rate": 5e-5}
    own = train("llama", tmp_path, max_grad_norm=BOUND, **settings)
    callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(BOUND)), compile=False)
    ours = train("llama", tmp_path, callback, **settings)

    assert difference(ours.model, own.model) < 1e-5


@pytest.mark.sample(8)
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_compiled_with_checks(name: str, tmp_path: Path) -> None:
    """The Trainer scales the loss of a causal language model in place, which the checks must not have saved."""
    checks = [gr.on("gradient:*", CheckFinite()), gr.on("activation:*", CheckFinite("warn"))]
    callback = RewriteCallback([gr.on("step:*", ClipByGlobalNorm(BOUND)), *checks])
    own = train(name, tmp_path, max_grad_norm=BOUND)
    ours = train(name, tmp_path, callback)

    assert difference(ours.model, own.model) < 1e-4  # Inductor's sums have another order
    assert callback.monitor.latest()["nonfinite@output:0"] == 0.0


class Reports(TrainerCallback):
    """Stands where the callbacks of TensorBoard and wandb do: before those of the user."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs))


def test_records_are_in_the_logs_of_callbacks_that_come_first(tmp_path: Path) -> None:
    reports = Reports()
    policy = [gr.on("step:*", ClipByGlobalNorm(BOUND)), gr.on("error:*dense", Observe("norm"))]
    trainer = train("bert", tmp_path, reports, RewriteCallback(policy, compile=False, records="total_norm/*"))

    wanted = "total_norm/step:group:default"
    assert [wanted in logs for logs in reports.logged] == ["loss" in logs for logs in reports.logged]
    assert [wanted in logs for logs in trainer.state.log_history] == ["loss" in logs for logs in reports.logged]
    assert not any("norm/error" in key for logs in reports.logged for key in logs)


def test_exponents_are_histograms_of_wandb_and_no_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    wandb: Any = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    wandb.run = object()
    wandb.Histogram = lambda np_histogram: np_histogram
    wandb.log = lambda data, commit: logged.append(data)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    reports = Reports()
    policy = gr.on("error:*dense", Observe("norm", "exponents"))
    trainer = train("bert", tmp_path, reports, RewriteCallback(policy, compile=False, records="*"))

    assert logged
    assert all(tag.startswith("exponents/error:") for data in logged for tag in data)
    assert all(len(edges) == len(counts) + 1 for data in logged for counts, edges in data.values())
    rows = [*reports.logged, *trainer.state.log_history]
    assert any("norm/error:" in key for row in rows for key in row)
    assert not any("exponents" in key for row in rows for key in row)


def test_records_are_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "runs")
    try:
        callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(BOUND)), compile=False, records="*")
        train("bert", tmp_path, callback, report_to=["tensorboard"])
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    (file,) = (tmp_path / "runs").rglob("events*")
    read = EventAccumulator(str(file)).Reload()

    assert "train/total_norm/step:group:default" in read.Tags()["scalars"]


POLICIES = {
    "at each backward": gr.on("gradient:*", Observe("norm")),
    "at each update": gr.on("step:*", ClipByGlobalNorm(BOUND)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("name", "accumulated"), [("bert", 1), ("bert", 3), ("gpt2", 3)])
def test_recorded_loss_is_the_trainers(name: str, accumulated: int, policy: str, tmp_path: Path) -> None:
    """BERT's loss is divided by the number of micro-batches, GPT-2's by the number of tokens in all of them."""
    callback = RewriteCallback(POLICIES[policy], compile=False)
    trainer = train(name, tmp_path, callback, gradient_accumulation_steps=accumulated, logging_steps=1)
    wanted = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    losses = callback.monitor.history("loss@run")
    # 16 batches make an epoch, whose last update has one batch where three are accumulated
    is_split = accumulated > 1 and policy == "at each backward"
    sizes = ([3, 3, 3, 3, 3, 1] * 4)[: len(wanted)] if is_split else [1] * len(wanted)
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    means = [sum(losses[end - size : end]) / size for end, size in zip(ends, sizes, strict=True)]

    assert len(losses) == ends[-1]
    assert means == pytest.approx(wanted, rel=1e-5)
    assert "training_step" not in vars(trainer)


def test_loss_that_somebody_logged_is_kept(tmp_path: Path) -> None:
    class Logging(transformers.Trainer):  # type: ignore[name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            callback.monitor.log("loss", 7.0)
            return loss

    callback = RewriteCallback(POLICIES["at each backward"], compile=False)
    given = transformers.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to=[], max_grad_norm=0)
    Logging(make("bert"), given, train_dataset=examples("bert"), callbacks=[callback]).train()

    assert callback.monitor.history("loss@run") == [7.0, 7.0]


def test_files_figures_and_graph_of_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = [
        gr.on("step:*", ClipByGlobalNorm(BOUND)),
        gr.on("error:*", Observe("norm")),
        gr.on("gradient:*", CheckFinite("record")),
    ]
    callback = RewriteCallback(policy, compile=False)
    with caplog.at_level("INFO", "gradrewrite.integrations"):
        trainer = train("bert", tmp_path, callback, logging_steps=2)
    steps = read_jsonl(tmp_path / "run.jsonl")
    logged = {name for name in trainer.state.log_history[0] if name.startswith("gradrewrite/")}
    names = ("total_norm", "clip_rate:step:group:default", "nonfinite", "growth:layers")

    assert logged == {f"gradrewrite/{name}" for name in names}
    norms = callback.monitor.history("total_norm@step:group:default")
    assert trainer.state.log_history[0]["gradrewrite/total_norm"] == norms[1]
    assert [step.records["loss@run"] for step in steps] == callback.monitor.history("loss@run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    assert f"see {tmp_path / 'run.html'}" in caplog.text
    assert callback.graph is not None
    assert callback.graph.name == "BertForSequenceClassification"
    assert any("addmm" in node.name for node in callback.graph.graph_module.graph.nodes)
    assert viz.draw(callback.graph, "overview", monitor=callback.monitor).render(tmp_path / "graph", "svg")


def test_page_has_the_graph(tmp_path: Path) -> None:
    train("bert", tmp_path, RewriteCallback(POLICIES["at each backward"], compile=False), max_steps=2)

    assert "embeddings.word_embeddings" in (tmp_path / "run.html").read_text()


def test_records_are_on_the_disk_while_it_trains(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            written.append(len(read_jsonl(tmp_path / "run.jsonl")))

    written: list[int] = []
    train("bert", tmp_path, RewriteCallback(POLICIES["at each backward"], compile=False), Looks())

    assert written[:4] == [4, 9, 14, 19]  # the last step may still get records


def test_new_training_has_a_new_file_and_a_resumed_one_appends(tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        callback = RewriteCallback(POLICIES["at each backward"], compile=False)
        return train("bert", tmp_path, callback, **settings)

    run(max_steps=4)
    run(max_steps=6, save_strategy="steps", save_steps=3)
    assert len(read_jsonl(tmp_path / "run.previous.jsonl")) == 4
    assert len(read_jsonl(tmp_path / "run.jsonl")) == 6

    trainer = run(times=0, max_steps=6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [step.step for step in read_jsonl(tmp_path / "run.jsonl")] == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_failed_check_writes_page_and_diagnosis(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = RewriteCallback([gr.on("gradient:*", [CheckFinite(), Observe("norm")])], compile=False)
    seen: list[Any] = []

    class Keeps(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(model)

    with pytest.raises(gr.NonFiniteError) as raised:
        train("bert", tmp_path, callback, Keeps(), learning_rate=1e30)
    text = (tmp_path / "diagnosis.txt").read_text()

    assert "The training ended with NonFiniteError." in text
    assert str(raised.value) in text
    assert callback.health.verdict.text in text
    assert str(tmp_path / "diagnosis.txt") in caplog.text
    assert (tmp_path / "run.html").exists()
    assert type(seen[0]) is transformers.BertForSequenceClassification


def test_training_that_ends_with_nan_has_a_diagnosis(tmp_path: Path) -> None:
    callback = RewriteCallback([gr.on("gradient:*", [CheckFinite("record"), Observe("norm")])], compile=False)
    train("bert", tmp_path, callback, learning_rate=1e30)

    assert callback.health.verdict.outcome == "non-finite"
    assert "values that are not finite" in (tmp_path / "diagnosis.txt").read_text()


FAILS = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_transformers import POLICIES, RewriteCallback, TrainerCallback, train

class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise ZeroDivisionError("a step of nobody's")

if __name__ == "__main__":
    train("bert", {folder!r}, RewriteCallback(POLICIES["at each backward"], compile=False), Fails())
"""


@pytest.mark.slow
@pytest.mark.sample(12)
def test_error_that_no_callback_is_told_of(tmp_path: Path) -> None:
    """The files are written when the program ends."""
    script = FAILS.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert "ZeroDivisionError" in done.stderr
    assert len(read_jsonl(tmp_path / "run.jsonl")) == 3
    assert "ended with ZeroDivisionError" in (tmp_path / "diagnosis.txt").read_text()
    assert (tmp_path / "run.html").exists()


def test_page_on_demand_and_no_files(tmp_path: Path) -> None:
    callback = RewriteCallback(POLICIES["at each backward"], compile=False, folder=tmp_path / "mine")
    train("bert", tmp_path / "out", callback, max_steps=2)
    (tmp_path / "mine" / "run.html").unlink()

    assert callback.report() == str(tmp_path / "mine" / "run.html")
    assert (tmp_path / "mine" / "run.html").exists()
    silent = RewriteCallback(POLICIES["at each backward"], compile=False, folder=False)
    train("bert", tmp_path / "none", silent, max_steps=2)
    assert not (tmp_path / "none" / "run.jsonl").exists()
    assert silent.report() == ""
    assert len(silent.health.run.steps) == 2


def test_folder_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    callback = RewriteCallback(POLICIES["at each backward"], compile=False, folder=tmp_path / "taken")
    with pytest.warns(gr.RewriteWarning, match="taken.*could not be written") as record:
        train("bert", tmp_path, callback, max_steps=3)

    assert [w for w in record if "run.jsonl" in str(w.message)]
    assert len(callback.monitor.history("loss@run")) == 3


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_diagnose_observes_only(name: str, tmp_path: Path) -> None:
    own = train(name, tmp_path / "own", max_grad_norm=1.0)
    callback = RewriteCallback("diagnose")
    observed = train(name, tmp_path / "observed", callback, max_grad_norm=1.0)

    assert difference(observed.model, own.model) == 0.0
    assert callback.health.verdict.text in str(callback.health)
    assert len(callback.health.run.steps) == 20
    assert (tmp_path / "observed" / "run.html").exists()
    assert not callback.monitor.is_guarded


def test_other_names_of_policies_are_refused() -> None:
    with pytest.raises(ValueError, match=r'"diagnose", which observes, got \'diagnosis\'; give a rule'):
        RewriteCallback("diagnosis")


@pytest.mark.sample(8)
def test_training_twice(tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(BOUND)), compile=False)
    own = train("bert", tmp_path, max_grad_norm=BOUND, times=2)
    ours = train("bert", tmp_path, callback, times=2)

    assert difference(ours.model, own.model) < 1e-5
    norms = callback.monitor.history("total_norm@step:group:default")
    assert len(norms) == 40
    assert not any(map(math.isnan, norms))


@pytest.mark.sample(8)
def test_checkpoints_resume_and_best_model(tmp_path: Path) -> None:
    settings = {
        "save_strategy": "steps",
        "save_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "load_best_model_at_end": True,
    }
    own = train("bert", tmp_path / "own", max_grad_norm=BOUND, **settings)
    policy = gr.on("step:*", ClipByGlobalNorm(BOUND))
    ours = train("bert", tmp_path / "ours", RewriteCallback(policy, compile=False), **settings)
    assert difference(ours.model, own.model) < 1e-5
    checkpoint = tmp_path / "ours" / "checkpoint-10"
    plain = transformers.BertForSequenceClassification.from_pretrained(checkpoint)
    assert plain.config.architectures == ["BertForSequenceClassification"]
    resumed = ours.__class__(
        make("bert"),
        ours.args,
        train_dataset=examples("bert"),
        eval_dataset=examples("bert", 8),
        callbacks=[RewriteCallback(policy, compile=False)],
    )
    resumed.remove_callback(transformers.PrinterCallback)
    resumed.train(resume_from_checkpoint=str(checkpoint))

    assert difference(resumed.model, own.model) < 1e-5


@pytest.mark.slow
@pytest.mark.sample(12)
def test_states_are_saved_with_checkpoints(tmp_path: Path) -> None:
    policy = [
        gr.on("step:*", AutoClip(30.0, history=8)),
        gr.on("gradient:*", ClipByValue(gr.Schedule.linear(1.0, 1e-3, steps=20))),
    ]
    callbacks = [RewriteCallback(policy, compile=False) for _ in range(3)]
    whole = train("bert", tmp_path, callbacks[0], save_strategy="steps", save_steps=10)
    checkpoint = tmp_path / "checkpoint-10"

    def resume(callback: RewriteCallback) -> Any:
        trainer = transformers.Trainer(make("bert"), whole.args, train_dataset=examples("bert"), callbacks=[callback])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return trainer

    resumed = resume(callbacks[1])
    assert callbacks[1].state_dict()["step"] == callbacks[0].state_dict()["step"] == 20
    states = [callback.state_dict()["states"] for callback in callbacks[:2]]
    assert states[0].keys() == {"step:group:default/AutoClip.count", "step:group:default/AutoClip.norms"}
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert difference(resumed.model, whole.model) == 0.0

    (checkpoint / "gradrewrite_state.pt").unlink()
    with pytest.warns(gr.RewriteWarning, match="resumed without .*gradrewrite_state.pt, so that"):
        resume(callbacks[2])
    assert callbacks[2].state_dict()["step"] == 10


@pytest.mark.sample(12)
@pytest.mark.parametrize("own", [False, True])
def test_states_are_those_of_the_checkpoint_that_is_resumed(own: bool, tmp_path: Path) -> None:
    """Not those of the run whose checkpoints of equal number are in ``output_dir``."""

    def run(folder: str, percentile: float, **settings: Any) -> tuple[RewriteCallback, Any]:
        callback = RewriteCallback(gr.on("step:*", AutoClip(percentile, history=8)), compile=False)
        return callback, train("bert", tmp_path / folder, callback, save_strategy="steps", save_steps=10, **settings)

    saved = {}
    for folder, percentile in (("one", 30.0), ("two", 90.0)):
        run(folder, percentile)
        file = tmp_path / folder / "checkpoint-20" / "gradrewrite_state.pt"
        saved[folder] = torch.load(file, weights_only=True)["states"]["step:group:default/AutoClip.norms"]
    assert not torch.equal(*saved.values())

    callback, trainer = run("two", 90.0, times=0)
    trainer.train(resume_from_checkpoint=True if own else str(tmp_path / "one" / "checkpoint-20"))
    states = callback.state_dict()["states"]
    # The training is over, and the Trainer makes one more step, whose norm takes the place of the oldest one.
    others = torch.arange(8) != 20 % 8
    for folder, norms in saved.items():
        is_resumed = folder == ("two" if own else "one")
        assert torch.equal(states["step:group:default/AutoClip.norms"][others], norms[others]) == is_resumed


@pytest.mark.parametrize("kind", ["gradient", "step"])
def test_own_clipping_is_said_once(kind: str, tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on(f"{kind}:*", ClipByValue(0.1)), compile=False)
    with pytest.warns(gr.RewriteWarning, match=r"max_grad_norm=1\.0\) clips the gradients .* as well") as record:
        train("bert", tmp_path, callback, max_grad_norm=1.0)
    assert len(record) == 1


class _Enlarges(TrainerCallback):
    """Stands for gradients that are written behind the clip."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 3.0


@pytest.mark.parametrize("enlarges", [False, True])
def test_what_updates_use_is_compared_with_max_grad_norm(enlarges: bool, tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("step:*", Observe("norm")), compile=False)
    model = make("bert")
    arguments = {"max_steps": 6, "learning_rate": 1e-3, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    given = transformers.TrainingArguments(str(tmp_path), max_grad_norm=0.01, **arguments)
    callbacks = [callback, *([_Enlarges(model)] if enlarges else [])]
    transformers.Trainer(model, given, train_dataset=examples("bert"), callbacks=callbacks).train()
    found = [cause for cause in callback.health.faults if cause.kind in ("update", "loss scale")]
    assert [cause.kind for cause in found] == (["update"] if enlarges else [])
    assert all(
        cause.text.startswith("clip=0.01, but the optimizer used gradients of norm up to 0.03") for cause in found
    )


@pytest.mark.slow
@pytest.mark.sample(12)
def test_training_that_failed_is_begun_again(tmp_path: Path) -> None:
    with pytest.raises(gr.NoSuchSiteError):
        train("bert", tmp_path, RewriteCallback(gr.on("step:typo", ClipByGlobalNorm(BOUND)), compile=False))

    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError

    clip = gr.on("step:*", ClipByGlobalNorm(BOUND))
    settings = {"use_cpu": True, "max_steps": 1, "report_to": [], "max_grad_norm": 0}
    model, given = make("bert"), transformers.TrainingArguments(str(tmp_path), **settings)
    for callbacks in ([RewriteCallback(clip, compile=False), Fails()], [RewriteCallback(clip, compile=False)]):
        trainer = transformers.Trainer(model, given, train_dataset=examples("bert"), callbacks=callbacks)
        if len(callbacks) == 2:
            with pytest.raises(ZeroDivisionError):
                trainer.train()
            assert isinstance(model, gr.RewrittenModule)
        else:
            trainer.train()
    assert type(model) is transformers.BertForSequenceClassification


def test_compilation_around_the_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch_compile=True.*RewriteCallback"):
        train("bert", tmp_path, RewriteCallback([], compile=False), torch_compile=True)


@pytest.mark.slow
@pytest.mark.sample(12)
def test_transform_without_the_callback(tmp_path: Path) -> None:
    """A transformed model is given to Trainer: columns, ``eval_loss`` and the number of tokens are as ever."""
    plain = train("llama", tmp_path, gradient_accumulation_steps=2)
    model = gr.transform(make("llama"), gr.on("error:*", Observe("norm")))
    arguments = plain.args
    data = examples("llama")
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()

    assert trainer.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs is True
    assert difference(model, plain.model) == 0
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generate_and_pretrained_files(name: str, inplace: bool, tmp_path: Path) -> None:
    model: Any = gr.transform(make(name), gr.on("error:*", ClipByValue(1.0)), inplace=inplace)
    ids = torch.stack([e["input_ids"] for e in examples(name, 2)])
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.eval()
    generated = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    plain: Any = gr.restore(model)

    assert type(loaded) is type(plain) is MODELS_CLASSES[name]
    for other in (plain, loaded.eval()):
        assert torch.equal(other.generate(ids[:, :4], max_new_tokens=4, do_sample=False), generated)


MODELS_CLASSES = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}


@pytest.mark.parametrize("around", [False, True])
def test_adapters_around_and_inside(around: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ids = torch.stack([e["input_ids"] for e in examples("llama", 2)])
    policy = gr.on("gradient:*lora*", lambda g: g * 3)

    def gradients(wrap: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
        model = make("llama")
        torch.manual_seed(2)
        model = wrap(model)
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        model.save_pretrained(tmp_path)
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def rewritten(model: nn.Module) -> Any:
        if around:
            return peft.get_peft_model(gr.transform(model, policy, inplace=True), config)
        return gr.transform(peft.get_peft_model(model, config), policy)

    wanted = gradients(lambda model: peft.get_peft_model(model, config))
    got = gradients(rewritten)

    assert len(wanted) == 4
    torch.testing.assert_close(got, {name: 3 * g for name, g in wanted.items()})
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_scaler_of_accelerate_is_the_loss_scale(tmp_path: Path) -> None:
    """As in fp16, which accelerate has on GPUs alone."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerate = pytest.importorskip("accelerate")
    given = transformers.TrainingArguments(str(tmp_path), use_cpu=True), transformers.TrainerState(), None
    accelerate.Accelerator(cpu=True)
    model = make("bert")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    prepared = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    policy = [gr.on("gradient:*", ClipByGlobalNorm(BOUND)), gr.on("step:*", ClipByGlobalNorm(BOUND / 2, group="step"))]
    callback = RewriteCallback(policy, compile=False)
    with pytest.warns(gr.RewriteWarning, match="its list of callbacks was not found"):  # there is no Trainer
        callback.on_train_begin(*given, model=model, optimizer=prepared)
    batch = {name: torch.stack([e[name] for e in examples("bert", 4)]) for name in ("input_ids", "labels")}
    scaler.scale(model(**batch).loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    prepared.step()

    assert norm == pytest.approx(BOUND * 2.0**10, rel=1e-4)
    assert callback.monitor.latest()["total_norm@step:group:step"] == pytest.approx(BOUND, rel=1e-4)
    callback.on_train_end(*given)
    assert not isinstance(model, gr.RewrittenModule)


def test_deepspeed_and_fsdp1_are_refused(tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    from gradrewrite.integrations.transformers import _check_trainer

    class State:
        is_fsdp2 = False

        def __init__(self, kind: DistributedType) -> None:
            self.distributed_type = kind

    for kind, name in ((DistributedType.DEEPSPEED, "DeepSpeed"), (DistributedType.FSDP, "FSDP1")):
        with pytest.raises(TypeError, match=name):
            _check_trainer(State(kind), "RewriteCallback")
    _check_trainer(State(DistributedType.NO), "RewriteCallback")


class LogOfZero(Trainer):
    """Its loss is infinite when ``number`` steps were made."""

    number = 0

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **items: Any) -> Any:
        output = model(**inputs)
        floor = float(self.state.global_step != self.number)
        loss = output.loss + 0 * torch.log(output.logits.square().sum() * floor)  # planted log
        return (loss, output) if return_outputs else loss


def trainer_of(kind: Any, name: str, folder: Path, *callbacks: Any, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 8,
            "learning_rate": 0.1,
            "optim": "sgd",
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        },
    )
    trainer = kind(make(name), arguments, train_dataset=examples(name), callbacks=list(callbacks))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def known_of(trainer: Any) -> dict[str, Any]:
    return {
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
        "loaders": len(trainer.accelerator._dataloaders),
        "modes": [module.training for module in trainer.model.modules()],
        "state": trainer.state.to_json_string() if hasattr(trainer.state, "to_json_string") else repr(trainer.state),
        "random": (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),
        "optimizer": None if trainer.optimizer is None else repr(trainer.optimizer.state_dict()),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in trainer.model.parameters()],
        "values": [t.tolist() for t in trainer.model.state_dict().values()],
    }


@pytest.mark.parametrize("is_trained", [False, True])
def test_diagnose_leaves_a_trainer_as_it_was(is_trained: bool, tmp_path: Path) -> None:
    trainer = trainer_of(transformers.Trainer, "gpt2", tmp_path)
    if is_trained:
        trainer.train()
    trainer.model.eval()
    before = known_of(trainer)
    found = diagnose(trainer, steps=6, try_clips=True)

    assert known_of(trainer) == before
    assert found.causes == ()
    assert len(found.trials["global clip"]) == 6
    assert found.health is not None
    assert len(found.health.run.steps) == 6


@pytest.mark.parametrize("settings", [{"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_diagnose_with_settings_of_the_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    found = diagnose(trainer_of(transformers.Trainer, "llama", tmp_path, **settings), steps=6)

    assert found.causes == ()
    assert not [remark for remark in found.remarks if "tracer" in remark]


def test_diagnose_names_the_line_of_compute_loss(tmp_path: Path) -> None:
    (cause,) = diagnose(trainer_of(LogOfZero, "gpt2", tmp_path), steps=6).causes

    assert (cause.kind, cause.step) == ("non-finite op", 0)
    assert "# planted log" in cause.source


def test_diagnose_uses_the_losses_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(
        transformers.Trainer,
        "gpt2",
        tmp_path,
        max_steps=6,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
    )
    found = diagnose(trainer, steps=6)
    assert found.health is not None
    losses = [step.records["loss@run"] for step in found.health.run.steps]
    trainer.train()

    assert losses == pytest.approx([row["loss"] for row in trainer.state.log_history if "loss" in row], rel=1e-3)


def test_diagnose_refuses_what_is_no_trainer() -> None:
    with pytest.raises(TypeError, match=r"diagnose takes a transformers\.Trainer, got Linear"):
        diagnose(nn.Linear(1, 1))


class ByTuples(Trainer):
    """Its batches are tuples, and its loss is infinite when ``number`` steps were made."""

    number = -1

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **items: Any) -> Any:
        ids, mask, labels = inputs
        output = model(input_ids=ids, attention_mask=mask, labels=labels)
        floor = float(self.state.global_step != self.number)
        loss = output.loss + 0 * torch.log(output.logits.square().sum() * floor)
        return (loss, output) if return_outputs else loss


def tuples_of(folder: Path, *callbacks: Any) -> Any:
    trainer = trainer_of(ByTuples, "gpt2", folder, *callbacks, max_steps=4)
    names = ("input_ids", "attention_mask", "labels")
    trainer.data_collator = lambda rows: tuple(
        torch.stack([row.get(name, torch.ones_like(row["input_ids"])) for row in rows]) for name in names
    )
    return trainer


@pytest.mark.parametrize("number", [-1, 2])
def test_batches_that_are_tuples_are_trained_without_an_audit(number: int, tmp_path: Path) -> None:
    callback = RewriteCallback("diagnose")
    trainer = tuples_of(tmp_path, callback)
    trainer.number = number
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gr.RewriteWarning)
        trainer.train()

    texts = [str(one.message) for one in caught if issubclass(one.category, gr.RewriteWarning)]
    assert len(texts) == 1
    assert "the batches of the Trainer are tuples" in texts[0]
    assert len(callback.health.run.steps) == 4


def test_a_failed_check_on_batches_that_are_tuples(tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("gradient:*", CheckFinite()), compile=False)
    trainer = tuples_of(tmp_path, callback)
    trainer.number = 2
    with (
        pytest.warns(gr.RewriteWarning, match="the batches of the Trainer are tuples"),
        pytest.raises(gr.NonFiniteError),
    ):
        trainer.train()


def test_diagnose_refuses_batches_that_are_tuples(tmp_path: Path) -> None:
    message = "diagnose: the batches of the Trainer are tuples; a mapping of keyword arguments is needed"
    with pytest.raises(TypeError, match=message):
        diagnose(tuples_of(tmp_path))


def test_an_explanation_that_fails_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr("gradrewrite.diagnosing.failed_steps.locate_in_step", fail)
    callback = RewriteCallback(gr.on("gradient:*", CheckFinite()), compile=False)
    trainer = trainer_of(LogOfZero, "gpt2", tmp_path, callback)
    trainer.number = 3
    with (
        pytest.warns(gr.RewriteWarning, match=r"could not be run again to explain it \(ArithmeticError: planted\)"),
        pytest.raises(gr.NonFiniteError),
    ):
        trainer.train()


def test_a_failed_check_names_the_line_of_compute_loss(tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("gradient:*", CheckFinite()), compile=False)
    trainer = trainer_of(LogOfZero, "gpt2", tmp_path, callback)
    trainer.number = 3
    with pytest.raises(gr.NonFiniteError, match=r"made by (the backward of /mul|/log)") as raised:
        trainer.train()

    assert "# planted log" in raised.value.source
    assert (raised.value.step, raised.value.cause) == (3, "")
    assert "# planted log" in (tmp_path / "diagnosis.txt").read_text()


@pytest.mark.parametrize("policy", ["diagnose", gr.on("gradient:*", CheckFinite("record"))])
def test_the_first_loss_that_is_not_finite_is_explained(policy: Any, tmp_path: Path) -> None:
    callback = RewriteCallback(policy, compile=False)
    trainer = trainer_of(LogOfZero, "gpt2", tmp_path, callback)
    trainer.number = 3
    plain = trainer_of(LogOfZero, "gpt2", tmp_path / "plain")
    plain.number = 3
    trainer.train()
    plain.train()

    assert "step 3: first non-finite" in (tmp_path / "diagnosis.txt").read_text()
    assert "# planted log" in (tmp_path / "diagnosis.txt").read_text()
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


class RootOfZero(LogOfZero):
    """Its gradients are NaN, and its loss is not, when ``number`` steps were made."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **items: Any) -> Any:
        output = model(**inputs)
        size = output.logits.square().sum() * float(self.state.global_step not in self.numbers)
        loss = output.loss + 0 * torch.where(size > 0, torch.sqrt(size), 0)  # planted root
        return (loss, output) if return_outputs else loss

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.number,)


@pytest.mark.parametrize(
    "policy",
    [
        "diagnose",
        gr.on("gradient:*", CheckFinite("record")),
        gr.on("gradient:*", Observe("norm")),
    ],
)
def test_the_first_gradient_that_is_not_finite_is_explained(policy: Any, tmp_path: Path) -> None:
    callback = RewriteCallback(policy, compile=False)
    trainer = trainer_of(RootOfZero, "gpt2", tmp_path, callback)
    trainer.number = 3
    trainer.train()

    first = callback.health.verdict.causes[0]
    assert (first.step, "# planted root" in first.source) == (3, True)
    assert "inside of the root" in first.advice
    (told,) = [step for step in read_jsonl(tmp_path / "run.jsonl") if step.failure is not None]
    assert (told.step, told.failure) == (3, callback.monitor.steps()[3].failure)
    for text in ((tmp_path / "diagnosis.txt").read_text(), html.unescape((tmp_path / "run.html").read_text())):
        assert first.text in text
        assert first.advice in text


def test_no_later_step_is_explained(tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("step:*", ClipByGlobalNorm(1.0)), compile=False)
    trainer = trainer_of(RootOfZero, "gpt2", tmp_path, callback, max_grad_norm=0.0)
    trainer.number = 3
    trainer.train()

    assert not any(step.failure for step in read_jsonl(tmp_path / "run.jsonl"))
    assert "is at step:group:default, in step 3;" in (tmp_path / "diagnosis.txt").read_text()


class TwoRoots(RootOfZero):
    numbers = (1, 6, 7)


def test_a_skipped_step_is_over(tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("gradient:*", CheckFinite("skip")), compile=False)
    trainer_of(TwoRoots, "gpt2", tmp_path, callback).train()

    assert [step.step for step in read_jsonl(tmp_path / "run.jsonl") if step.failure is not None] == [1, 6]
    assert callback.health.verdict.causes[0].step == 6


class TooLong(LogOfZero):
    """Its loss aligns a target that is too long when ``number`` steps were made; no tracer can follow ``ctc_loss``."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **items: Any) -> Any:
        output = model(**inputs)
        logs, targets = output.logits.log_softmax(-1).transpose(0, 1), inputs["labels"]
        lengths = torch.full((4,), 8)
        long = torch.full((4,), 8 if self.state.global_step == self.number else 3)
        loss = nn.functional.ctc_loss(logs, 0 * targets + 5, lengths, long)  # planted target
        return (loss, output) if return_outputs else loss


def test_a_failed_check_names_the_line_that_stops_the_tracer(tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("gradient:*", CheckFinite()), compile=False)
    trainer = trainer_of(TooLong, "gpt2", tmp_path, callback)
    trainer.number = 3
    with pytest.raises(gr.NonFiniteError, match="the value comes from where the tracer cannot follow") as raised:
        trainer.train()

    assert "# planted target" in raised.value.source
    assert "# planted target" in (tmp_path / "diagnosis.txt").read_text()


def test_the_first_step_is_audited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradrewrite.integrations")
    callback = RewriteCallback("diagnose")
    trainer = trainer_of(Trainer, "bert", tmp_path, callback, max_steps=2)
    trainer.model.bert.pooler.register_forward_hook(lambda module, given, output: output.detach())
    trainer.train()

    (line,) = [record for record in caplog.records if record.getMessage().startswith("Audit: ")]
    assert line.levelno == logging.WARNING
    assert (
        "get no gradient: `detach` hands on the value without its gradient, at test_transformers.py"
        in line.getMessage()
    )
    assert [cause.kind for cause in callback.health.verdict.causes][:1] == ["no gradient"]
    assert "Who is trained" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize("audit", [True, False])
def test_an_audit_changes_no_bit_of_a_training(audit: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradrewrite.integrations")
    own = train("bert", tmp_path / "own", max_steps=3)
    policy = gr.on("gradient:*", Observe("norm"))
    callback = RewriteCallback(policy, compile=False, audit=audit)
    audited = train("bert", tmp_path / "audited", callback, max_steps=3)

    assert difference(audited.model, own.model) == 0.0
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Audit: ")]
    assert len(lines) == audit
    assert all("no fault was found" in line for line in lines)
