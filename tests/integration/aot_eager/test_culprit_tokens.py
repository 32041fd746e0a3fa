"""Rows where rows act on each other, and tokens, of a skipped update."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, SkipSpikes

from models.coupled import COUPLED, LENGTH, LENGTHS, ROWS, WIDTH, WORDS, Policy, policy_batch

SPIKES = gr.on("step:*", SkipSpikes(20.0, window=8))
FINITE = gr.on("gradient:*", CheckFinite("skip"))
SEEDS = (0, 1, 2)
STARTS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


def start(net: nn.Module, policy: Any = (SPIKES, FINITE), *, compiled: bool = False) -> tuple[Any, Any]:
    model = gr.transform(net, list(policy))
    if compiled:
        model.compile()
    return model, gr.guard(torch.optim.SGD(model.parameters(), lr=1e-3), model)


def train(model: Any, optimizer: Any, batches: list[dict[str, Tensor]], log: Any = None) -> None:
    """One update of these micro-batches."""
    optimizer.zero_grad()
    for batch in batches:
        if log is not None:
            log(model.monitor, batch)
        (model(**batch) / len(batches)).backward()
    optimizer.step()


def log_policy(monitor: gr.Monitor, batch: dict[str, Tensor], **more: Tensor) -> None:
    monitor.log_tokens(advantage=batch["advantage"], before=batch["before"], **more)


def train_policy(
    seed: int,
    spoil: Any,
    *,
    micro: int = 1,
    size: tuple[int, ...] = (ROWS, LENGTH),
    log: Any = log_policy,
    **kwargs: Any,
) -> gr.Culprits:
    """Train until the last micro-batch of an update is spoiled."""
    torch.manual_seed(seed)
    model, optimizer = start(Policy(), **kwargs)
    for step in range(7):
        batches = [policy_batch(100 * seed + 10 * step + m, size) for m in range(micro)]
        if step == 6:
            assert model.monitor.skipped == 0
            spoil(batches[-1])
        train(model, optimizer, batches, log)
    assert model.monitor.skipped == 1
    return model.monitor.culprits()


def at(seed: int) -> tuple[int, int]:
    return (5 * seed + 2) % ROWS, (3 * seed + 1) % LENGTH


def spoil_advantage(place: Any) -> Any:
    def spoil(batch: dict[str, Tensor]) -> None:
        batch["advantage"][place], batch["mask"][place], batch["before"][place] = -3e5, 1.0, -4.0

    return spoil


def spoil_ratio(place: Any) -> Any:
    def spoil(batch: dict[str, Tensor]) -> None:
        batch["before"][place], batch["mask"][place], batch["advantage"][place] = -200.0, 1.0, 0.5

    return spoil


@pytest.mark.broad
@pytest.mark.parametrize("seed", SEEDS)
def test_token_with_a_large_advantage(seed: int) -> None:
    found = train_policy(seed, spoil_advantage(at(seed)))
    worst = found.tokens[0]

    assert (worst.row, worst.position) == at(seed)
    assert worst.share > 0.99
    assert worst.values == {"advantage": pytest.approx(-3e5), "before": -4.0}
    assert found.tokens_by == "error:head"
    assert len(found.tokens) == 5
    assert found.more_tokens == ROWS * LENGTH - 5
    assert [t.norm for t in found.tokens] == sorted((t.norm for t in found.tokens), reverse=True)


@pytest.mark.broad
@pytest.mark.parametrize("seed", SEEDS)
def test_norms_of_tokens_are_those_of_autograd(seed: int) -> None:
    torch.manual_seed(seed)
    net = Policy()
    model, optimizer = start(net)
    for step in range(7):
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        batch = policy_batch(step)
        if step == 6:
            spoil_advantage(at(seed))(batch)
        train(model, optimizer, [batch], log_policy)
    found = model.monitor.culprits(k=ROWS * LENGTH)

    plain = Policy()
    plain.load_state_dict(before)
    errors: list[Tensor] = []
    plain.head.register_full_backward_hook(lambda _, __, given: errors.append(given[0]))
    plain(**batch).backward()
    expected = errors[0].double().norm(dim=-1)
    got = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    for token in found.tokens:
        got[token.row, token.position] = token.norm
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-9)
    assert sum(token.share for token in found.tokens) == pytest.approx(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_token_with_an_infinite_ratio(seed: int) -> None:
    found = train_policy(seed, spoil_ratio(at(seed)))

    assert [(t.row, t.position) for t in found.tokens] == [at(seed)]
    assert (found.tokens[0].norm, found.tokens[0].share) == (float("inf"), 1.0)
    assert found.tokens[0].values["before"] == -200.0
    assert (found.tokens_by, found.more_tokens) == ("/exp", 0)
    assert [row.index for row in found.rows if row.share] == [at(seed)[0]]


@pytest.mark.broad
def test_more_tokens_than_are_named() -> None:
    found = train_policy(0, spoil_ratio((slice(2, 4), slice(0, 6))))

    assert len(found.tokens) == 5
    assert found.more_tokens == 7
    assert "and 7 more" in str(found)


@pytest.mark.broad
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spoil", [spoil_advantage, spoil_ratio])
@pytest.mark.parametrize("way", ["cu_seqlens", "position_ids"])
def test_packed_batch(way: str, spoil: Any, seed: int) -> None:
    sequence = seed + 1
    position = LENGTHS[sequence] - 1 - seed % 2
    place = (0, int(STARTS[sequence]) + position)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    packing = {"cu_seqlens": STARTS} if way == "cu_seqlens" else {"position_ids": positions}

    def log(monitor: gr.Monitor, batch: dict[str, Tensor]) -> None:
        monitor.log_ids(["a", "b", "c", "d"])
        log_policy(monitor, batch, **packing)

    found = train_policy(seed, spoil(place), size=(1, int(STARTS[-1])), log=log)
    worst = found.tokens[0]

    assert (worst.row, worst.position) == (sequence, position)
    assert worst.id == found.rows[0].id == "abcd"[sequence]
    assert found.rows[0].index == sequence
    assert "not known" not in found.note


@pytest.mark.broad
def test_packed_batch_without_a_batch_dimension() -> None:
    def log(monitor: gr.Monitor, batch: dict[str, Tensor]) -> None:
        log_policy(monitor, batch, cu_seqlens=STARTS)

    found = train_policy(0, spoil_advantage(int(STARTS[2]) + 1), size=(int(STARTS[-1]),), log=log)

    assert (found.tokens[0].row, found.tokens[0].position) == (2, 1)
    assert found.rows[0].index == 2


@pytest.mark.broad
@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches(seed: int) -> None:
    found = train_policy(seed, spoil_advantage(at(seed)), micro=3)

    assert found.micro_batch == 2
    assert (found.tokens[0].row, found.tokens[0].position) == at(seed)


@pytest.mark.broad
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("spoil", [spoil_advantage, spoil_ratio])
def test_two_calls_in_one_backward(spoil: Any, call: int) -> None:
    torch.manual_seed(0)
    model, optimizer = start(Policy())
    for step in range(7):
        optimizer.zero_grad()
        losses = []
        for number in range(2):
            batch = policy_batch(10 * step + number)
            if (step, number) == (6, call):
                spoil(at(1))(batch)
            log_policy(model.monitor, batch)
            losses.append(model(**batch))
        sum(losses).backward()
        optimizer.step()
    found = model.monitor.culprits()

    assert (found.tokens[0].row, found.tokens[0].position) == at(1)
    assert found.tokens[0].values["advantage"] == pytest.approx(-3e5 if spoil is spoil_advantage else 0.5)
    assert found.rows[0].index == at(1)[0]


@pytest.mark.broad
def test_rows_of_two_calls() -> None:
    """Both calls add to the row."""
    task = COUPLED["normed"]
    torch.manual_seed(0)
    model, optimizer = start(task.make(), (SPIKES,))
    for step in range(7):
        first, second = task.batch(2 * step), task.batch(2 * step + 1)
        if step == 6:
            task.swell(first, 5)
        optimizer.zero_grad()
        (model(**first) + model(**second)).backward()
        optimizer.step()

    assert model.monitor.culprits().rows[0].index == 5


@pytest.mark.broad
def test_values_without_the_first_token() -> None:
    """The value that is not finite has all tokens, and the values those that count."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
            logits = self.head(self.embed(ids) * torch.log(scale)[..., None])[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    model, optimizer = start(Net(), (FINITE,))
    ids, scale = policy_batch(0)["ids"], torch.full((ROWS, LENGTH), 2.0)
    scale[3, 4] = -1.0
    model.monitor.log_tokens(scale=scale[:, :-1])
    model(ids, scale).backward()
    optimizer.step()
    found = model.monitor.culprits()

    assert [(t.row, t.position, t.values["scale"]) for t in found.tokens if t.share] == [(3, 4, -1.0)]
    assert found.more_tokens == 0


@pytest.mark.inductor
@pytest.mark.parametrize("spoil", [spoil_advantage, spoil_ratio])
def test_compiled(spoil: Any) -> None:
    found = train_policy(1, spoil(at(1)), compiled=True, micro=2)

    assert (found.micro_batch, found.tokens[0].row, found.tokens[0].position) == (1, *at(1))


@pytest.mark.broad
def test_names_of_rows() -> None:
    def log(monitor: gr.Monitor, batch: dict[str, Tensor]) -> None:
        monitor.log_ids(torch.arange(ROWS) + 40)
        log_policy(monitor, batch)

    found = train_policy(1, spoil_advantage(at(1)), log=log)

    assert found.tokens[0].id == found.rows[0].id == 40 + at(1)[0]
    assert f"{at(1)[0]} (id {40 + at(1)[0]})" in str(found)


@pytest.mark.broad
@pytest.mark.parametrize("shape", ["last", "transposed", "flat", "shifted", "outside"])
def test_losses_of_all_shapes(shape: str) -> None:
    """Logits that the loss takes with their words in dimension 1, flat, without the first token, or outside."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
            logits = self.head(self.embed(ids))
            if shape == "outside":
                return logits
            if shape == "shifted":
                logits, wanted, weight = logits[:, :-1], wanted[:, 1:], weight[:, 1:]
            return loss_of(logits, wanted, weight)

    def loss_of(logits: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        if shape in ("flat", "shifted"):
            losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            return (losses * weight.flatten()).mean()
        if shape == "last":
            return -(torch.log_softmax(logits, -1).gather(-1, wanted[..., None])[..., 0] * weight).mean()
        return (F.cross_entropy(logits.mT, wanted, reduction="none") * weight).mean()

    torch.manual_seed(0)
    model, optimizer = start(Net(), (SPIKES,))
    for step in range(7):
        batch = policy_batch(step)
        ids, wanted, weight = batch["ids"], batch["wanted"], torch.ones(ROWS, LENGTH)
        if step == 6:
            weight[2, 5] = 1e4
        optimizer.zero_grad()
        model.monitor.log_tokens(weight=weight[:, 1:] if shape == "shifted" else weight)
        out = model(ids, wanted, weight)
        (loss_of(out, wanted, weight) if shape == "outside" else out).backward()
        optimizer.step()
    found = model.monitor.culprits()

    assert found.tokens[0].values == {"weight": 1e4}
    assert (found.tokens[0].row, found.tokens[0].position) == (2, 4 if shape == "shifted" else 5)


def test_table_of_tokens() -> None:
    found = train_policy(0, spoil_advantage(at(0)))
    lines = str(found).splitlines()
    (header,) = [n for n, line in enumerate(lines) if line.startswith("  tokens by the norm of error:head")]

    assert lines[header + 1].split() == ["row", "position", "norm", "share", "advantage", "before"]
    assert lines[header + 2].split()[:2] == ["2", "1"]
    assert lines[header + 7] == "  and 37 more"
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found)


@pytest.mark.broad
def test_tokens_of_another_shape_are_said() -> None:
    def log(monitor: gr.Monitor, _: dict[str, Tensor]) -> None:
        monitor.log_tokens(ratio=torch.ones(4, 3))

    found = train_policy(0, spoil_advantage(at(0)), log=log)

    assert found.tokens == ()
    assert "tokens are not known" in found.note
    assert "[4, 3]" in found.note


@pytest.mark.broad
def test_starts_that_do_not_fit_are_said() -> None:
    def log(monitor: gr.Monitor, batch: dict[str, Tensor]) -> None:
        log_policy(monitor, batch, cu_seqlens=torch.tensor([0, 3, 900]))

    found = train_policy(0, spoil_advantage((0, 3)), size=(1, 16), log=log)

    assert found.tokens == ()
    assert "cu_seqlens of monitor.log_tokens is [0, 3, 900]" in found.note


@pytest.mark.broad
def test_tokens_belong_to_the_next_forward() -> None:
    torch.manual_seed(0)
    model, optimizer = start(Policy(), (FINITE,))
    train(model, optimizer, [policy_batch(0)], log_policy)
    batch = policy_batch(1)
    spoil_ratio((1, 2))(batch)
    train(model, optimizer, [batch])

    assert model.monitor.culprits().tokens == ()


@pytest.mark.broad
def test_logged_values_are_copies() -> None:
    found = train_policy(
        0,
        spoil_advantage(at(0)),
        log=lambda monitor, batch: (lambda own: (monitor.log_tokens(a=own), own.zero_()))(batch["advantage"].clone()),
    )

    assert found.tokens[0].values["a"] == pytest.approx(-3e5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_rows_that_are_not_finite(name: str, seed: int) -> None:
    task = COUPLED[name]
    torch.manual_seed(seed)
    model, optimizer = start(task.make(), (FINITE,))
    rows = sorted({(3 * seed + 2) % task.rows, (5 * seed + 4) % task.rows})
    train(model, optimizer, [task.batch(seed)])
    with pytest.raises(RuntimeError, match="no update was skipped"):
        model.monitor.culprits()
    batch = task.batch(seed + 50)
    task.spoil(batch, rows)
    train(model, optimizer, [batch])
    found = model.monitor.culprits()

    assert [row.index for row in found.rows] == rows
    assert {row.share for row in found.rows} == {1.0}
    assert (found.rows_by, found.more_rows) == (task.op, 0)
    assert "per-example gradients are refused: " in found.note
    assert f"rows {rows[0]} and {rows[1]}" in found.note


@pytest.mark.broad
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_rows_that_are_large(name: str, seed: int) -> None:
    task = COUPLED[name]
    torch.manual_seed(seed)
    model, optimizer = start(task.make(), (SPIKES,))
    row = (3 * seed + 2) % task.rows
    for step in range(7):
        batch = task.batch(10 * seed + step)
        if step == 6:
            assert model.monitor.skipped == 0
            task.swell(batch, row)
        model.monitor.log_ids(range(task.rows))
        train(model, optimizer, [batch])
    found = model.monitor.culprits()

    assert (found.rows[0].index, found.rows[0].id) == (row, row)
    assert 0.9 < found.rows[0].share < 1
    assert (found.rows_by, found.more_rows) == (task.error, 0)
    assert f"rows are by the norm of {task.error}, as per-example gradients are refused: " in found.note


@pytest.mark.broad
def test_a_bad_input_of_coupled_rows() -> None:
    task = COUPLED["normed"]
    model, optimizer = start(task.make(), (FINITE,))
    batch = task.batch(3)
    batch["x"][5, 1] = float("nan")
    train(model, optimizer, [batch])
    found = model.monitor.culprits()

    assert [(row.index, row.norm) for row in found.rows] == [(5, float("inf"))]
    assert "x (row 5, column 1)" in found.note


@pytest.mark.broad
def test_many_rows_that_are_not_finite() -> None:
    task = COUPLED["messages"]
    model, optimizer = start(task.make(), (FINITE,))
    batch = task.batch(3)
    task.spoil(batch, [0, 2, 4, 5, 6, 8, 9, 10, 11])
    train(model, optimizer, [batch])
    found = model.monitor.culprits(k=3)

    assert ([row.index for row in found.rows], found.more_rows) == ([0, 2, 4], 6)
    assert "and 6 more" in str(found)


def test_a_value_without_rows() -> None:
    """A mean over no token is 0/0: it belongs to no row."""
    model, optimizer = start(Policy(), (FINITE,))
    batch = policy_batch(0)
    batch["mask"].zero_()
    train(model, optimizer, [batch], log_policy)
    found = model.monitor.culprits()

    assert found.rows == found.tokens == ()
    assert "the first value that is not finite, /truediv, has no rows" in found.note


@pytest.mark.broad
@pytest.mark.parametrize("fault", ["parameter", "forward", "backward"])
def test_a_value_of_the_parameters_has_no_rows(fault: str) -> None:
    """Though it has as many rows as the batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((8, 5), 1e-30 if fault == "backward" else 1.0))

        def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            weight = self.weight / self.weight.norm(dim=1, keepdim=True) if fault == "forward" else self.weight
            return ((x @ weight.T).square() * y).sum() / mask.sum()

    model, optimizer = start(Net(), (FINITE,))
    with torch.no_grad():
        if fault != "backward":
            model.weight[3] = float("nan") if fault == "parameter" else 0.0
    x, y = torch.ones(8, 5), torch.ones(8, 8)
    if fault == "backward":  # the product with the values of the forward overflows, and nothing before
        x, y = 1e30 * x, 1e12 * torch.eye(8)[3].expand(8, 8)
    model(x, y, torch.ones(8, 1)).backward()
    optimizer.step()
    found = model.monitor.culprits()

    assert found.rows == ()
    assert "has no rows" in found.note
