"""Lightning: automatic and manual optimization, accumulation, mixed precision and checkpoints with a policy."""

from __future__ import annotations

import csv
import html
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.diagnostics.run_file import read_jsonl
from gradrewrite.passes import AutoClip, CheckFinite, ClipByGlobalNorm, ClipByValue, Observe

pytest.importorskip("lightning", reason="Lightning is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import lightning.pytorch as pl  # noqa: E402
import torchmetrics  # noqa: E402

from gradrewrite.integrations.lightning import RewriteCallback, diagnose  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("error::gradrewrite.RewriteWarning"),
]
BOUND = 0.1
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(pl.LightningModule):
    """The scripts of Lightning's documentation: with ``self(x)``, by hand, and with a submodule called directly."""

    def __init__(self, *, is_manual: bool = False, is_direct: bool = False, clips: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.automatic_optimization = not is_manual
        self.is_direct = is_direct
        self.clips = clips

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = ((self.net(x) if self.is_direct else self(x)) - y).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clips:
                self.clip_gradients(optimizer, gradient_clip_val=BOUND, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    folder: Path, *callbacks: Any, times: int = 1, is_direct: bool = False, max_epochs: int = 1, **settings: Any
) -> Any:
    """Train for 20 batches in each epoch."""
    torch.manual_seed(0)
    is_manual = settings.pop("is_manual", False)
    clips = settings.get("gradient_clip_val") is not None
    if is_manual:
        settings.pop("gradient_clip_val", None)
    kind = settings.pop("kind", None)
    module = kind() if kind is not None else Regression(is_manual=is_manual, is_direct=is_direct, clips=clips)
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, 10 * x[:, :1]), batch_size=4)
    ckpt_path = settings.pop("ckpt_path", None)
    for _ in range(times):
        trainer = pl.Trainer(
            max_epochs=max_epochs,
            accelerator="cpu",
            logger=pl.loggers.CSVLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            default_root_dir=folder,
            **{"log_every_n_steps": 5, **settings},
        )
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def clip(**settings: Any) -> RewriteCallback:
    return RewriteCallback(gr.on("step:*", ClipByGlobalNorm(BOUND)), **{"compile": False, **settings})


@pytest.mark.parametrize(
    "settings",
    [{}, {"is_manual": True}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}],
    ids=["automatic", "manual", "accumulated", "bf16"],
)
def test_step_clip_equals_lightnings_own(settings: dict[str, Any], tmp_path: Path) -> None:
    own = fit(tmp_path, gradient_clip_val=BOUND, **settings)
    free = fit(tmp_path, **settings)
    ours = fit(tmp_path, clip(), **settings)

    assert difference(ours, own) < 1e-5
    assert difference(free, own) > 1e-3
    assert type(ours) is Regression


def test_scaler_of_the_precision_plugin(tmp_path: Path) -> None:
    """In float16 thresholds of all sites are in units of the unscaled loss."""

    def scaled(*callbacks: Any, **settings: Any) -> Regression:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        plugin = pl.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        return fit(tmp_path, *callbacks, plugins=[plugin], **settings)

    own, free = scaled(gradient_clip_val=BOUND), scaled()
    policy = [
        gr.on("step:*", ClipByGlobalNorm(BOUND)),
        gr.on("gradient:*", [Observe("max_abs"), ClipByValue(500.0)]),  # scaled gradients are above it
    ]
    callback = RewriteCallback(policy, compile=False)
    ours = scaled(callback)

    assert difference(ours, own) < 1e-3 < difference(free, own)  # float16
    assert 1 < max(callback.monitor.history("max_abs@gradient:net.0.weight")) < 100


def test_strategy_that_redirects_forward(tmp_path: Path) -> None:
    """The strategy of DistributedDataParallel calls the module with ``training_step`` in place of ``forward``."""
    own = fit(tmp_path, strategy="ddp", devices=1, gradient_clip_val=BOUND)
    policy = [gr.on("step:*", ClipByGlobalNorm(BOUND)), gr.on("error:net.1", Observe("norm"))]
    callback = RewriteCallback(policy, compile=False)
    ours = fit(tmp_path, callback, strategy="ddp", devices=1)

    assert difference(ours, own) < 1e-5
    assert len(callback.monitor.history("norm@error:net.1")) == 20


@pytest.mark.sample(6)
@pytest.mark.inductor
def test_compiled(tmp_path: Path) -> None:
    own = fit(tmp_path, gradient_clip_val=BOUND)
    callback = clip(compile={"mode": "default"})
    ours = fit(tmp_path, callback)
    again = clip(compile={"mode": "default"})
    fit(tmp_path, again)  # whose code may come from the disk

    assert difference(ours, own) < 1e-5
    assert callback.graph is not None
    assert again.graph is not None


class LanguageModel(pl.LightningModule):
    """A causal language model whose loss is scaled in place, as in the scripts that people have."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 8, "bos_token_id": 0}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, loss_type="ForCausalLM"))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=ids, labels=ids).loss
        return loss

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0])
        loss *= 0.5
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.sample(8)
@pytest.mark.inductor
def test_causal_language_model_with_checks_compiled(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randint(50, (20, 8), generator=torch.Generator().manual_seed(0))), 4)
    callback = RewriteCallback([gr.on("gradient:*", CheckFinite()), gr.on("error:*", CheckFinite("warn"))])
    trained = []
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        module = LanguageModel()
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, default_root_dir=tmp_path, **silent).fit(
            module, loader
        )
        trained.append(module)

    assert difference(*trained) < 1e-4
    assert callback.monitor.latest()["nonfinite@output:0"] == 0.0


def test_records_are_in_the_logs(tmp_path: Path) -> None:
    callback = clip(records=("total_norm/*", "lr/*"))
    fit(tmp_path, callback)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    logged = [float(row["total_norm/step:group:default"]) for row in rows]

    norms = callback.monitor.history("total_norm@step:group:default")
    assert logged == pytest.approx([norms[n] for n in (4, 9, 14, 19)])
    assert "bound/step:group:default" not in rows[0]


def test_fitting_twice(tmp_path: Path) -> None:
    own = fit(tmp_path, times=2, gradient_clip_val=BOUND)
    callback = clip()
    ours = fit(tmp_path, callback, times=2)

    assert difference(ours, own) < 1e-5
    assert len(callback.monitor.history("total_norm@step:group:default")) == 40


def test_checkpoint(tmp_path: Path) -> None:
    ours = fit(tmp_path, clip(), pl.callbacks.ModelCheckpoint(tmp_path, filename="last"))
    loaded = Regression.load_from_checkpoint(tmp_path / "last.ckpt")

    assert difference(loaded, ours) == 0


def test_states_are_part_of_checkpoints(tmp_path: Path) -> None:
    policy = [
        gr.on("step:*", AutoClip(30.0, history=8)),
        gr.on("gradient:*", ClipByValue(gr.Schedule.linear(1.0, 1e-3, steps=40))),
    ]
    callbacks = [RewriteCallback(policy, compile=False) for _ in range(3)]
    whole = fit(tmp_path / "whole", callbacks[0], max_epochs=2)
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", filename="{step}")
    fit(tmp_path / "half", callbacks[1], saving)
    resumed = fit(tmp_path / "rest", callbacks[2], max_epochs=2, ckpt_path=tmp_path / "saved" / "step=20.ckpt")

    assert callbacks[2].state_dict()["step"] == 40
    states = [callback.state_dict()["states"] for callback in callbacks]
    assert states[0].keys() == {"step:group:default/AutoClip.count", "step:group:default/AutoClip.norms"}
    assert all(torch.equal(states[0][key], states[2][key]) for key in states[0])
    assert difference(resumed, whole) == 0.0


def test_submodule_called_directly_has_the_policy(tmp_path: Path) -> None:
    policy = gr.on("error:net", ClipByValue(0.001))
    calls = {"compile": False, "methods": ("forward",), "fullgraph": True}
    with pytest.warns(gr.RewriteWarning, match=r"training_step.*methods=\('training_step',\)"):
        free = fit(tmp_path, RewriteCallback(policy, **calls), is_direct=True)
    ours = fit(tmp_path, RewriteCallback(policy, compile=False), is_direct=True)
    wanted = fit(tmp_path, RewriteCallback(policy, **calls))

    assert difference(ours, wanted) < 1e-6 < difference(ours, free)


class Logs(Regression):
    """A step that logs in every way, changes its loss in place, reads the step's number and has a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.error = torchmetrics.MeanMetric(), torchmetrics.MeanSquaredError()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self._step(batch, batch_idx, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self._step(batch, batch_idx, "val")

    def _step(self, batch: tuple[Tensor, Tensor], batch_idx: int, name: str) -> Any:
        x, y = batch
        out = self(x)
        self.log(f"{name}_size", out.abs().mean(), on_step=True, on_epoch=True)
        loss = (out - y).square().mean()
        if batch_idx % 5 == 4:
            self.log(f"{name}_every", loss)
        self.error(out, y)
        self.mean.update(loss)
        self.log_dict({f"{name}_error": self.error, f"{name}_mean": self.mean, f"{name}_epoch": self.current_epoch})
        self.log(f"{name}_loss", loss, batch_size=len(x))
        loss *= min(1.0, 0.2 + 0.1 * self.global_step)
        return {"loss": loss, "out": out.detach()}

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)


class Adversaries(pl.LightningModule):
    """Two optimizers by hand, as in Lightning's example of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.generator(z)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, _ = batch
        of_generator, of_discriminator = self.optimizers()
        self.toggle_optimizer(of_generator)
        loss = nn.functional.softplus(-self.discriminator(self(torch.randn(len(real), 2)))).mean()
        self.log("generator", loss)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        fake = self.discriminator(self(torch.randn(len(real), 2)).detach())
        loss = nn.functional.softplus(fake).mean() + nn.functional.softplus(-self.discriminator(real)).mean()
        self.log("discriminator", loss)
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.discriminator)]


@pytest.mark.parametrize("kind", [Logs, Adversaries])
def test_traced_step_trains_and_logs_as_it_is(kind: type[pl.LightningModule], tmp_path: Path) -> None:
    """Without a warning, to the same bits, and with the same figures in the log."""
    trained, logged = [], []
    for callbacks in ([], [RewriteCallback("diagnose")]):
        trained.append(fit(tmp_path, *callbacks, kind=kind))
        rows = {name: float(value) for name, value in trained[-1].trainer.logged_metrics.items()}
        logged.append({name: value for name, value in rows.items() if "gradrewrite" not in name})

    assert difference(*trained) == 0.0
    assert logged[0] == logged[1]
    assert LOG is vars(pl.LightningModule)["log"]


LOG = vars(pl.LightningModule)["log"]


@pytest.mark.parametrize("accumulated", [1, 4])
def test_recorded_loss_is_that_of_the_step(accumulated: int, tmp_path: Path) -> None:
    callback = RewriteCallback(gr.on("gradient:*", Observe("norm")), compile=False)
    fit(tmp_path, callback, accumulate_grad_batches=accumulated, log_every_n_steps=1)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        logged = [float(row["loss"]) for row in csv.DictReader(lines)]

    losses = callback.monitor.history("loss@run")
    assert len(losses) == 20
    assert losses[accumulated - 1 :: accumulated] == pytest.approx(logged, rel=1e-6)


def test_recorded_loss_of_an_update_is_the_mean_of_its_batches(tmp_path: Path) -> None:
    callbacks = [RewriteCallback(gr.on("gradient:*", Observe("norm")), compile=False), clip()]
    for callback in callbacks:
        fit(tmp_path, callback, accumulate_grad_batches=4)
    batches, updates = (callback.monitor.history("loss@run") for callback in callbacks)

    assert len(updates) == 5
    assert updates[0] == pytest.approx(sum(batches[:4]) / 4)


def test_files_figures_and_graph_of_a_training(tmp_path: Path) -> None:
    policy = [gr.on("step:*", ClipByGlobalNorm(BOUND)), gr.on("error:*", Observe("norm"))]
    callback = RewriteCallback(policy, compile=False)
    module = fit(tmp_path, callback, is_direct=True)
    logged = {name for name in module.trainer.logged_metrics if name.startswith("gradrewrite/")}

    assert logged == {"gradrewrite/total_norm", "gradrewrite/clip_rate:step:group:default"}
    assert len(read_jsonl(tmp_path / "run.jsonl")) == 20
    assert (tmp_path / "run.html").exists()
    assert not (tmp_path / "diagnosis.txt").exists()
    assert {"error:net.0", "error:net.1", "error:net.2"} <= {str(site) for site in callback.graph.sites}
    assert viz.draw(callback.graph, "overview", monitor=callback.monitor).render(tmp_path / "graph", "svg")


def test_failed_check_writes_page_and_diagnosis(tmp_path: Path) -> None:
    class Bad(Regression):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return (self.net(x / x.new_tensor(0.0 if batch_idx == 7 else 1.0)) - y).square().mean()

    callback = RewriteCallback(gr.on("gradient:*", CheckFinite()), compile=False)
    with pytest.raises(gr.NonFiniteError) as raised:
        fit(tmp_path, callback, kind=Bad)

    assert str(raised.value) in (tmp_path / "diagnosis.txt").read_text()
    assert (tmp_path / "run.html").exists()
    assert len(read_jsonl(tmp_path / "run.jsonl")) == 8
    assert LOG is vars(pl.LightningModule)["log"]


class RootOfZero(Regression):
    """The gradients of batch 7 are NaN, and its loss is not."""

    number = 7

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        size = self(x).square().sum() * float(batch_idx != self.number)
        loss = (self(x) - y).square().mean() + torch.where(size > 0, torch.sqrt(size), 0)  # planted root
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class ByHand(RootOfZero):
    def __init__(self) -> None:
        super().__init__(is_manual=True)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("diagnose", {}),
        ("diagnose", {"kind": ByHand}),
        ("diagnose", {"accumulate_grad_batches": 3}),
        (gr.on("gradient:*", CheckFinite("record")), {}),
        (gr.on("gradient:*", Observe("norm")), {}),
    ],
)
def test_the_first_gradient_that_is_not_finite_is_explained(policy: Any, settings: Any, tmp_path: Path) -> None:
    callback = RewriteCallback(policy, compile=False)
    fit(tmp_path, callback, **{"kind": RootOfZero, **settings})

    first = callback.health.verdict.causes[0]
    assert (first.step, "# planted root" in first.source) == (7, True)
    assert "inside of the root" in first.advice
    assert [step.step for step in read_jsonl(tmp_path / "run.jsonl") if step.failure is not None] == [7]
    for text in ((tmp_path / "diagnosis.txt").read_text(), html.unescape((tmp_path / "run.html").read_text())):
        assert first.text in text
        assert first.advice in text


def test_an_explanation_changes_no_bit_of_a_training(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", kind=RootOfZero)
    explained = fit(tmp_path / "own", RewriteCallback("diagnose"), kind=RootOfZero)
    for one, other in zip(plain.parameters(), explained.parameters(), strict=True):
        assert torch.equal(one.isnan(), other.isnan())


def test_resumed_training_appends(tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", filename="{step}")
    fit(tmp_path, clip(), saving)
    fit(tmp_path, clip(), max_epochs=2, ckpt_path=tmp_path / "saved" / "step=20.ckpt")

    assert [step.step for step in read_jsonl(tmp_path / "run.jsonl")] == [*range(20), *range(20)]


def test_rule_without_a_site_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(gr.NoSuchSiteError, match="error:typo"):
        fit(tmp_path, RewriteCallback(gr.on("error:typo", Observe("norm")), compile=False))
    assert not list(tmp_path.glob("*.html"))


def test_gradient_from_what_the_tracer_skipped_is_warned_of(tmp_path: Path) -> None:
    class Skips(Regression):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return (self.net[2](torch.compiler.disable(self.net[0])(x)) - y).square().mean()

    with pytest.warns(gr.RewriteWarning, match=r"outside the rewritten graphs|no rewritten graph") as record:
        fit(tmp_path, RewriteCallback(gr.on("gradient:*", Observe("norm")), compile=False), kind=Skips)
    assert not any("skipped a region" in str(w.message) for w in record)


@pytest.mark.parametrize("kind", ["gradient", "step"])
def test_own_clipping_is_said_once(kind: str, tmp_path: Path) -> None:
    with pytest.warns(gr.RewriteWarning, match=r"gradient_clip_val=1\.0\) clips") as record:
        fit(tmp_path, RewriteCallback(gr.on(f"{kind}:*", ClipByValue(0.1)), compile=False), gradient_clip_val=1.0)
    assert sum(w.category is gr.RewriteWarning for w in record) == 1


def test_failed_training_leaves_a_plain_module(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            assert isinstance(module, gr.RewrittenModule)
            seen.append(module)
            raise ZeroDivisionError

    seen: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, clip(), Fails())
    assert type(seen[0]) is Regression


class Diagnosed(Regression):
    """Counts its steps, logs in all forms, and may take a log of 0 in its loss."""

    def __init__(self, zero: float = 1.0, schedule: bool = True) -> None:
        super().__init__()
        self.zero, self.schedule, self.count = zero, schedule, 0
        self.losses: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        x, y = batch
        out = self(x)
        loss = (out - y).square().mean()
        self.count += 1
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"mean": out.mean()})
        self.print("a line")
        return {"loss": loss + 0 * torch.log(out.square().sum() * self.zero)}  # planted log

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]) if self.schedule else optimizer


def rows() -> DataLoader[Any]:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True)


@pytest.mark.parametrize("schedule", [True, False])
def test_diagnose_trains_a_copy_by_its_training_step(schedule: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    module = Diagnosed(schedule=schedule)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    attributes = {name: id(value) for name, value in vars(module).items()}
    found = diagnose(module, rows(), steps=30, try_clips=True)

    assert (found.outcome, found.causes, module.count) == ("learns", (), 0)
    assert found.health is not None
    assert len(found.health.run.steps) == 30  # the loader begins anew
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {name: id(value) for name, value in vars(module).items()} == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in module.parameters())
    assert "a line" not in capsys.readouterr().out
    assert pl.LightningModule.log.__qualname__ == "LightningModule.log"


def test_diagnose_names_the_line_of_training_step() -> None:
    (cause,) = diagnose(Diagnosed(zero=0.0), rows(), steps=4).causes

    assert (cause.kind, cause.step) == ("non-finite op", 0)
    assert "# planted log" in cause.source


def test_diagnose_after_a_training(tmp_path: Path) -> None:
    module = fit(tmp_path, kind=Diagnosed)
    trainer = module.trainer
    assert diagnose(module, rows(), steps=4).causes == ()
    assert module.trainer is trainer


class ByPosition(Diagnosed):
    def training_step(self, batch: tuple[Tensor, Tensor], idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        return super().training_step(batch, batch_idx=idx)


class AnyArguments(Diagnosed):
    def training_step(self, *args: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return super().training_step(*args)


class BatchAlone(Diagnosed):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return super().training_step(batch, 0)


@pytest.mark.parametrize("kind", [ByPosition, AnyArguments, BatchAlone])
def test_diagnose_gives_the_number_by_position(kind: type[Diagnosed]) -> None:
    found = diagnose(kind(), rows(), steps=4)

    assert found.causes == ()
    assert found.audit is not None


class Two(Regression):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(1, 1), "diagnose takes a LightningModule, got Linear"),
        (Two(), "returns 2 optimizers"),
        (Regression(is_manual=True), "automatic_optimization is False"),
    ],
)
def test_diagnose_refuses(module: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        diagnose(module, rows())


class HalfDetached(Regression):
    """Its step detaches what the first layer returns."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net[2](self.net[0](x).detach()) - y).square().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("kind", [HalfDetached, None])
def test_the_first_step_is_audited(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradrewrite.integrations")
    own = fit(tmp_path / "own", kind=kind)
    callback = RewriteCallback("diagnose")
    audited = fit(tmp_path / "audited", callback, kind=kind)
    (line,) = [record for record in caplog.records if record.getMessage().startswith("Audit: ")]

    assert difference(own, audited) == 0.0
    assert line.levelno == (logging.INFO if kind is None else logging.WARNING)
    assert ("net.0.weight, net.0.bias) get no gradient: `detach`" in line.getMessage()) == (kind is not None)
