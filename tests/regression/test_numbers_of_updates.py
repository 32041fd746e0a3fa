"""Numbers that a person counts: updates, micro-batches, runs that are resumed, one log with its origin."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.first_difference import compare_logs
from gradrewrite.diagnostics.health import examine
from gradrewrite.diagnostics.run_log import last_run
from gradrewrite.passes import CheckFinite, ClipByGlobalNorm, Observe

_POLICY = [gr.on("gradient:*", Observe("norm")), gr.on("step:*", ClipByGlobalNorm(1.0))]
_X = torch.ones(2, 3)


class Training:
    """A model with a guarded optimizer, as a script that may be started again."""

    def __init__(self, policy: Any = _POLICY, state: dict[str, Any] | None = None, *, is_guarded: bool = True) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        self.model = gr.transform(net, policy if is_guarded else policy[:1])
        if state is not None:
            gr.load_state_dict(self.model, state)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if is_guarded:
            self.optimizer = gr.guard(self.optimizer, self.model)

    def update(self, *batches: Tensor) -> None:
        self.optimizer.zero_grad()
        for batch in batches:
            loss = self.model(batch).sum()
            loss.backward()
        self.model.monitor.log("loss", loss)
        self.optimizer.step()

    def run(self, number: int, micro_batches: int = 1) -> Training:
        for _ in range(number):
            self.update(*[_X] * micro_batches)
        return self

    def numbers(self) -> list[tuple[int, int]]:
        return [(step.update, step.micro_batch) for step in self.model.monitor.steps()]


def _page(source: Any) -> str:
    return html.unescape(viz.report(source)._repr_html_())


@pytest.mark.broad
def test_steps_have_the_numbers_of_their_update_and_micro_batch() -> None:
    assert Training().run(2, 3).numbers() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert Training().run(3).numbers() == [(0, 0), (1, 0), (2, 0)]
    assert Training(is_guarded=False).run(2, 2).numbers() == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.broad
@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_resumed_run_goes_on_with_its_numbers(is_guarded: bool) -> None:
    state = gr.state_dict(Training(is_guarded=is_guarded).run(4).model)
    assert Training(state=state, is_guarded=is_guarded).run(2).numbers() == [(4, 0), (5, 0)]


@pytest.mark.broad
def test_updates_of_step_sites_alone_have_numbers() -> None:
    training = Training(gr.on("step:*", Observe("norm"))).run(2, 3)
    assert training.numbers() == [(0, 0), (1, 0)]
    state = gr.state_dict(training.model)
    assert Training(gr.on("step:*", Observe("norm")), state).run(1, 2).numbers() == [(2, 0)]


def test_gradients_that_are_thrown_away_are_no_micro_batches() -> None:
    training = Training().run(1)
    training.model(_X).sum().backward()
    training.update(_X, _X)
    assert training.numbers() == [(0, 0), (1, 0), (1, 0), (1, 1)]


@pytest.mark.broad
def test_two_optimizers_of_one_backward_make_one_number() -> None:
    torch.manual_seed(0)
    model = gr.transform(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), gr.on("gradient:*", Observe("norm")))
    halves = [gr.guard(torch.optim.SGD(model[n].parameters(), lr=0.1), model) for n in (0, 1)]
    for _ in range(3):
        model(_X).sum().backward()
        for half in halves:
            half.step()
            half.zero_grad()
    assert [step.update for step in model.monitor.steps()] == [0, 1, 2]


def _spoiled(size: int) -> Tensor:
    return torch.full((size, 3), math.nan)


@pytest.mark.broad
def test_an_error_says_update_and_micro_batch() -> None:
    training = Training([*_POLICY, gr.on("gradient:*", CheckFinite())]).run(3, 4)
    with pytest.raises(gr.NonFiniteError, match=r"^update 3, micro-batch 3: first non-finite") as caught:
        training.update(_X, _X, _spoiled(2), _X)
    assert (caught.value.step, caught.value.update, caught.value.micro_batch) == (14, 3, 2)

    single = Training([*_POLICY, gr.on("gradient:*", CheckFinite())], {"version": 1, "step": 7, "states": {}})
    with pytest.raises(gr.NonFiniteError, match=r"^step 7: first non-finite") as caught:
        single.update(_spoiled(2))
    assert (caught.value.step, caught.value.update, caught.value.micro_batch) == (0, 7, None)


@pytest.mark.broad
def test_skipped_updates_are_counted_and_named_as_updates() -> None:
    training = Training([*_POLICY, gr.on("gradient:*", CheckFinite("skip"))]).run(4, 2)
    training.update(_X, _spoiled(2))
    training.run(20, 2)
    health = examine(training.model.monitor.steps())
    assert "1 of 25 updates was skipped, in update 4 (not finite, first at " in health.verdict.text
    assert health.first_bad_text.startswith("First at ")
    assert "in update 4, micro-batch 2 of 2" in health.first_bad_text
    assert "in update 4 (" in training.model.monitor.table().caption
    assert training.model.monitor.culprits().step == 4


def test_a_record_of_updates_has_one_number_an_update() -> None:
    monitor = Training().run(3, 4).model.monitor
    assert len(monitor.history("factor@step:group:default")) == 3
    assert len(monitor.history("lr@optimizer:0")) == 3
    assert len(monitor.history("norm@gradient:0.weight")) == 12
    assert len(monitor.history("norm@gradient:0.weight", per="step")) == 3
    assert len(monitor.history("factor@step:group:default", per="backward")) == 12


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def _logged(path: Path, updates: int, state: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    training = Training(state=state)
    training.model.monitor.to_jsonl(path, **options)
    training.run(updates, 2)
    training.model.monitor.flush()
    return gr.state_dict(training.model)


@pytest.mark.broad
def test_a_log_that_is_gone_on_with_is_one_run(log: Path) -> None:
    _logged(log, 5)
    _logged(log, 4, {"version": 1, "step": 3, "states": {}})
    run = last_run(gr.read_jsonl(log))
    assert [step.update for step in run.steps] == [n for n in range(7) for _ in range(2)]
    assert [step.step for step in run.steps] == list(range(14))
    assert run.resumed == (3,)
    assert repr(run).startswith("Run(7 updates (14 backwards), 0 to 6; resumed at 3; ")
    curves = viz.plot(log)
    assert curves.figure().get_suptitle().endswith("updates 0 to 6; resumed at 3")
    (axes, *_) = curves.figure().axes
    at_the_second = [n + 0.5 for n in range(7)]  # of two micro-batches
    assert axes.lines[0].get_xdata().tolist() == at_the_second
    assert "Updates 0 to 6, resumed at 3." in _page(log)


@pytest.mark.broad
def test_a_log_that_begins_anew_is_another_run(log: Path) -> None:
    _logged(log, 5)
    _logged(log, 2)
    run = last_run(gr.read_jsonl(log))
    assert (len(run.steps), run.resumed, run.num_before) == (4, (), 1)
    assert "the last of 2 runs in the file" in viz.plot(log).figure().get_suptitle()


@pytest.mark.broad
def test_modes_of_a_log(log: Path) -> None:
    _logged(log, 5, mode="x")
    with pytest.raises(FileExistsError):
        _logged(log, 1, mode="x")
    _logged(log, 2, mode="w")
    assert len(gr.read_jsonl(log)) == 4
    _logged(log, 1)
    assert len(gr.read_jsonl(log)) == 6
    with pytest.raises(ValueError, match='mode is "a", "w" or "x"'):
        _logged(log, 1, mode="r")


def test_a_log_is_written_anew_while_it_is_written(log: Path) -> None:
    training = Training()
    training.model.monitor.to_jsonl(log)
    training.run(2)
    training.model.monitor.to_jsonl(log, "w")
    training.run(1)
    training.model.monitor.flush()
    assert [step.step for step in gr.read_jsonl(log)] == [0, 1, 2]


@pytest.mark.broad
@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize("content", ["dear diary\n", '{"name": 1}\n', "x", "{"])
def test_a_file_that_is_no_log_is_left_as_it_is(log: Path, content: str, mode: str) -> None:
    log.write_text(content)
    if content == "{":  # what a killed run may have left
        _logged(log, 1, mode=mode)
        return
    with pytest.raises(OSError, match="is no run log, and nothing is written into it; give another path"):
        _logged(log, 1, mode=mode)
    assert log.read_text() == content


@pytest.mark.broad
def test_the_head_of_a_log_says_what_made_it(log: Path) -> None:
    _logged(log, 1, config={"lr": 0.1, "layers": [1, 2]})
    head = json.loads(log.read_text().splitlines()[0])["run"]
    assert head["version"] == gr.__version__
    assert head["config"] == {"lr": 0.1, "layers": [1, 2]}
    assert len(head["policy"]) == 2
    assert head["policy"][1].startswith("gr.on('step:*', ClipByGlobalNorm(1.0)), test_numbers_of_updates.py:")
    origin = gr.read_jsonl(log)[0].origin
    assert isinstance(origin, gr.Origin)
    assert origin.config == {"lr": 0.1, "layers": [1, 2]}
    page = _page(log)
    assert "ClipByGlobalNorm(1.0)" in page
    assert "config   lr = 0.1" in page
    of_memory = _page(Training().run(2).model.monitor)
    assert "policy   gr.on('gradient:*', Observe('norm')), test_numbers_of_updates.py:" in html.unescape(of_memory)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (["lr"], TypeError, "config is a dict with names"),
        ({"x": torch.ones(2)}, TypeError, r"config\['x'\]: .*give numbers"),
        ({"x": math.nan}, ValueError, r"config\['x'\]: .*give numbers"),
    ],
)
def test_a_config_that_json_does_not_take_is_refused(log: Path, config: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        _logged(log, 1, config=config)
    assert not log.exists()


def test_own_scalars_are_curves(log: Path) -> None:
    training = Training()
    for n in range(6):
        training.run(1)
        if n % 2:
            training.model.monitor.log("evaluation loss", 1.0 / (1 + n))
    assert viz.plot(training.model.monitor).panels == ("loss", "norm", "evaluation loss")
    assert "evaluation loss" in _page(training.model.monitor)


@pytest.mark.broad
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("is_given", [True, False])
def test_an_update_that_a_scaler_leaves_out_counts(skips: bool, is_given: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    policy = [gr.on("gradient:*", Observe("nonfinite"))] + [gr.on("gradient:*", CheckFinite("skip"))] * skips
    torch.manual_seed(0)
    model = gr.transform(nn.Linear(3, 1), policy, loss_scale=scaler if is_given else None)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for update in range(4):
        for micro_batch in range(2):
            bad = update == 1 and micro_batch == 1
            scaler.scale(model(_spoiled(2) if bad else _X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [(s.update, s.micro_batch) for s in model.monitor.steps()] == [(u, m) for u in range(4) for m in range(2)]
    assert gr.state_dict(model)["step"] == 4
    if skips:
        assert "1 update skipped, in update 1 (" in model.monitor.table().caption


def test_finite_gradients_that_are_thrown_away_count_for_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = gr.transform(nn.Linear(3, 1), gr.on("gradient:*", Observe("norm")), loss_scale=scaler)
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3):
        scaler.scale(model(_X).sum()).backward()
        optimizer.zero_grad()
    assert gr.state_dict(model)["step"] == 0


def test_gradients_that_go_by_hand_begin_the_update_anew() -> None:
    training = Training()
    for thrown in (True, False):
        for p in training.model.parameters():
            p.grad = None
        training.model(_X).sum().backward()
        if not thrown:
            training.optimizer.step()
    assert training.numbers() == [(0, 0), (0, 0)]


def test_a_later_config_is_written(log: Path) -> None:
    training = Training()
    training.model.monitor.to_jsonl(log)
    training.run(1)
    training.model.monitor.to_jsonl(log, config={"lr": 0.1})
    training.run(1)
    training.model.monitor.flush()
    first, second = gr.read_jsonl(log)
    assert first.origin is not None
    assert second.origin is not None
    assert (first.origin.config, second.origin.config) == ({}, {"lr": 0.1})
    assert (len(second.clips), last_run([first, second]).num_before) == (1, 0)


@pytest.mark.broad
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_tensorboard_has_one_value_a_place(micro_batches: int) -> None:
    places: dict[str, list[int]] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            places.setdefault(tag, []).append(step)

    training = Training(state={"version": 1, "step": 10, "states": {}})
    training.model.monitor.to_tensorboard(Writer())
    training.run(3, micro_batches)
    training.model.monitor.flush()
    assert places["norm/gradient:0.weight"] == list(range(10, 10 + 3 * micro_batches))


def test_a_resumed_run_is_compared_at_its_updates() -> None:
    def steps(begin: int, end: int) -> list[gr.Step]:
        return [gr.Step(n - begin, {"loss@run": 10.0 - 0.1 * n}, update=n) for n in range(begin, end)]

    text = examine(steps(30, 60), steps(0, 60)).loss
    assert text.startswith("Compared from step 30, where this run begins: they end alike")


def test_logs_of_two_models_are_compared_step_by_step(log: Path) -> None:
    def steps(factor: float) -> list[gr.Step]:
        rows = [(0, "a", 1.0), (0, "b", factor), (1, "a", 1.0), (1, "b", 1.0)]
        return [gr.Step(n, {f"norm@gradient:{name}": v}, update=u) for n, (u, name, v) in enumerate(rows)]

    found = compare_logs(steps(1.0), steps(2.0))
    assert found.first is not None
    assert (found.first.step, found.first.site, found.num_steps) == (1, "gradient:b", 4)
    assert compare_logs(steps(1.0), steps(1.0)).first is None
