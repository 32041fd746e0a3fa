"""Trainings with a fault that users have reported, each with its repaired twin and the right answer.

A maker takes the seed and whether it is the twin; the fault wakes at a step that depends on the seed. ``REPORTS`` has
all of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta, Normal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

STEPS = 24
INF = torch.inf


@dataclass(frozen=True)
class Report:
    """A training, and its right answer.

    Attributes:
        model: The model.
        batches: One batch a step.
        wake: The step of the fault; 0 for one of the whole training.
        op: The op, ``module/op``; of an audit or an update, the site.
        line: Part of its line.
        where: The rows and the like; ``""`` for none.
        why: Part of the reason.
        advice: Part of the advice.
        loss: Of the output and the batch.
        compute_loss: Of the model and the parts of the batch.
        optimizer: Of the parameters.
        kind: Kind of the first cause.
        cover: Part of what hides it from the loss.
    """

    model: nn.Module
    batches: Sequence[Any]
    wake: int
    op: str
    line: str
    where: str
    why: str
    advice: str
    loss: Callable[[Any, Any], Tensor] | None = None
    compute_loss: Callable[..., Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.Adam(parameters, lr=1e-2)
    kind: str = "non-finite op"
    cover: str = ""


Maker = Callable[[int, bool], Report]
REPORTS: dict[str, Maker] = {}


def report(maker: Maker) -> Maker:
    REPORTS[maker.__name__] = maker
    return maker


def stream(seed: int, batch: Callable[[torch.Generator, bool], Any], first: int = 5) -> tuple[int, list[Any]]:
    """Return the step at which batches become faulty, and the batches."""
    torch.manual_seed(seed)
    generator, wake = torch.Generator().manual_seed(7100 + seed), first + seed
    return wake, [batch(generator, step >= wake) for step in range(STEPS)]


def normal(generator: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=generator)


class Mlp(nn.Module):
    def __init__(self, features: int = 5, out: int = 6, *, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, 14, bias=bias), nn.Linear(14, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class Call(nn.Module):
    """A module around a function of a network and a batch."""

    def __init__(self, f: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.f, self.parts = f, nn.ModuleDict(parts)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.f(self.parts, *batch)


@report
def constant_group(seed: int, twin: bool) -> Report:
    """Advantages of a group whose rewards are all the same."""
    group = 1 + seed % 2

    def batch(g: torch.Generator, bad: bool) -> Any:
        rewards = torch.rand(12, generator=g)
        rewards[4 * group : 4 * group + 4] = 0.25 if bad else rewards[4 * group : 4 * group + 4]
        return {"tokens": torch.randint(0, 16, (12, 6), generator=g), "rewards": rewards}

    def compute_loss(model: nn.Module, tokens: Tensor, rewards: Tensor) -> Tensor:
        taken = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        groups = rewards.view(3, 4)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4 * twin)
        return -(taken * advantages.view(-1, 1)).mean() - 0.05 * taken.mean()

    wake, batches = stream(seed, batch)
    where = f"rows {4 * group} to {4 * group + 3}"
    right = ("/truediv", "advantages = (groups", where, "0/0 for 4 of 12: the standard deviation is 0", "std + 1e-4")
    model = nn.Sequential(nn.Embedding(16, 12), nn.Tanh(), nn.Linear(12, 16))
    return Report(model, batches, wake, *right, compute_loss=compute_loss)


@report
def ratio_behind_min(seed: int, twin: bool) -> Report:
    """A ratio of probabilities that overflows, behind the clip and the minimum of a policy loss."""
    row = 1 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        old, advantage = -2.5 + 0.2 * normal(g, 6, 5), normal(g, 6)
        advantage[row], old[row, 3] = advantage[row].abs() if bad else advantage[row], -150.0 if bad else -2.5
        return torch.randint(0, 12, (6, 6), generator=g), old, advantage

    def f(parts: nn.ModuleDict, tokens: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        new = parts["net"](tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        ratio = torch.exp((new - old).clamp(max=20.0) if twin else new - old)
        gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
        return -gain.mean() - 0.1 * new.mean()

    wake, batches = stream(seed, batch)
    right = ("/exp", "ratio = torch.exp", f"row {row}, position 3", "limit 88.7", "before it: exp(x.clamp(max=20))")
    model = Call(f, net=nn.Sequential(nn.Embedding(12, 12), nn.Linear(12, 12)))
    return Report(model, batches, wake, *right, cover="minimum")


@report
def router_without_expert(seed: int, twin: bool) -> Report:
    """Weights of the best two experts, of a token that may go to none."""
    row = 3 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x, allowed = normal(g, 18, 5), torch.ones(18, 4)
        allowed[row] = 0.0 if bad else 1.0
        return x, (x[:, 0] > 0).long(), allowed

    def f(parts: nn.ModuleDict, x: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
        best, number = (parts["gate"](x).softmax(-1) * allowed).topk(2, -1)
        share = best / (best.sum(-1, keepdim=True) + 1e-6 * twin)
        gates = torch.zeros_like(allowed).scatter(-1, number, share)
        mixed = torch.stack([parts[f"expert{n}"](x) for n in range(4)], -1) @ gates[..., None]
        return functional.cross_entropy(mixed.squeeze(-1), y)

    wake, batches = stream(seed, batch)
    right = ("/truediv", "share = best", f"row {row}", "0/0 for 2 of 36", "x / (y + 1e-6)")
    return Report(
        Call(f, gate=nn.Linear(5, 4), **{f"expert{n}": nn.Linear(5, 2) for n in range(4)}), batches, wake, *right
    )


@report
def expert_without_token(seed: int, twin: bool) -> Report:
    """A loop over experts with a branch of Python, of which nothing can be traced; one has no token."""

    def batch(g: torch.Generator, bad: bool) -> Any:
        x, route = normal(g, 15, 5), torch.arange(15) % 3
        return x, (x @ torch.ones(5)).tanh(), route.clamp(max=1) if bad else route

    def f(parts: nn.ModuleDict, x: Tensor, y: Tensor, route: Tensor) -> Tensor:
        loss = torch.zeros(())
        for number in range(3):
            mine = route == number
            if int(mine.sum()) > 100 or (twin and not bool(mine.any())):
                continue
            off = (parts[f"expert{number}"](x[mine]).squeeze(-1) - y[mine]).square()
            loss = loss + off.sum() / mine.sum()
        return loss

    wake, batches = stream(seed, batch)
    right = ("/div", "loss = loss + off.sum()", "", "0/0", "sum / n.clamp_min(1)")
    return Report(Call(f, **{f"expert{n}": nn.Linear(5, 1) for n in range(3)}), batches, wake, *right)


@report
def zero_vector(seed: int, twin: bool) -> Report:
    """InfoNCE: a vector of zeros is divided by its norm."""
    row = 2 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        left = normal(g, 9, 5)
        right = left + 0.1 * normal(g, 9, 5)
        right[row] = 0.0 if bad else right[row]
        return left, right

    def compute_loss(model: nn.Module, left: Tensor, right: Tensor) -> Tensor:
        def unit(x: Tensor) -> Tensor:
            size = x.norm(dim=-1, keepdim=True)
            return x / (size.clamp_min(1e-6) if twin else size)

        return functional.cross_entropy(unit(model(left)) @ unit(model(right)).mT / 0.3, torch.arange(9))

    wake, batches = stream(seed, batch)
    right = ("/truediv", "return x / (size", f"row {row}", "the norm is 0", "F.normalize(x, dim=-1)")
    return Report(Mlp(bias=False), batches, wake, *right, compute_loss=compute_loss)


@report
def same_point_twice(seed: int, twin: bool) -> Report:
    """A distance whose root is written out, of a point to itself."""
    row = 4 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        a, b = normal(g, 10, 5), normal(g, 10, 5)
        b[row] = a[row] if bad else b[row]
        return a, b, torch.ones(10)

    def compute_loss(model: nn.Module, a: Tensor, b: Tensor, wanted: Tensor) -> Tensor:
        distance = ((model(a) - model(b)).square().sum(-1) + 1e-9 * twin).sqrt()
        return (distance - wanted).square().mean()

    wake, batches = stream(seed, batch)
    right = ("/sqrt", "distance = ((model(a)", f"row {row}", "sqrt at 0 for 1 of 10", "epsilon inside of the root")
    return Report(Mlp(), batches, wake, *right, compute_loss=compute_loss)


@report
def scan_in_the_exponent(seed: int, twin: bool) -> Report:
    """A state-space scan by exp of a cumulative sum, which overflows on long decays."""
    row = seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 6, 16, 3)
        x[row] = -60.0 if bad else x[row]
        return x, x[..., 0].tanh()

    def f(parts: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        decay, put = functional.logsigmoid(parts["decay"](x.clamp(-3, 3) if twin else x)), parts["put"](x.tanh())
        total = decay.cumsum(1)
        if twin:
            state, states = torch.zeros_like(put[:, 0]), []
            for t in range(x.shape[1]):
                state = decay[:, t].exp() * state + put[:, t]
                states.append(state)
            read = torch.stack(states, 1)
        else:
            read = total.exp() * (put * torch.exp(-total)).cumsum(1)
        return functional.mse_loss(parts["out"](read).squeeze(-1), y)

    wake, batches = stream(seed, batch)
    right = ("/exp", "read = total.exp()", f"row {row}, position", "limit 88.7", "before it: exp(x.clamp")
    model = Call(f, decay=nn.Linear(3, 4), put=nn.Linear(3, 4), out=nn.Linear(4, 1))
    with torch.no_grad():
        model.parts["decay"].weight.fill_(0.2)
    return Report(model, batches, wake, *right)


@report
def same_rotation(seed: int, twin: bool) -> Report:
    """The angle between two rotations by acos of the trace, where they are the same."""
    row = 2 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x, turn = normal(g, 8, 3), 0.4 * normal(g, 8, 3, 3)
        target = torch.linalg.matrix_exp(turn - turn.mT)
        if bad:
            x[row], target[row] = 0.0, torch.eye(3)
        return x, target

    def loss(output: Tensor, batch: Any) -> Tensor:
        made = output.view(-1, 3, 3)
        rotation = torch.linalg.matrix_exp(made - made.mT)
        cosine = ((rotation @ batch[1].mT).diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
        return torch.acos(cosine.clamp(-0.9999, 0.9999) if twin else cosine).mean()

    wake, batches = stream(seed, batch)
    right = ("/acos", "return torch.acos", f"row {row}", "acos at 1", "inside of 1")
    return Report(nn.Linear(3, 9, bias=False), batches, wake, *right, loss=loss)


@report
def silence(seed: int, twin: bool) -> Report:
    """SI-SNR with a silent reference: 0/0, and behind it the logarithm of 0."""
    row = 1 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        clean = torch.sin(torch.arange(48) * (0.2 + torch.rand(6, 1, generator=g)))
        clean[row] = 0.0 if bad else clean[row]
        return clean + 0.3 * normal(g, 6, 48), clean

    def loss(output: Tensor, batch: Any) -> Tensor:
        clean, eps = batch[1], 1e-6 * twin
        part = (output * clean).sum(-1, keepdim=True) / (clean.square().sum(-1, keepdim=True) + eps) * clean
        power = part.square().sum(-1) / ((output - part).square().sum(-1) + eps)
        return -torch.log10(power + eps).mean()

    wake, batches = stream(seed, batch)
    right = (
        "/truediv",
        "part = (output",
        f"row {row}",
        "0/0 for 1 of 6",
        "With that alone it is not finite yet: /log10",
    )
    return Report(nn.Linear(48, 48), batches, wake, *right, loss=loss)


@report
def isolated_node(seed: int, twin: bool) -> Report:
    """A graph net with log_softmax over the neighbors of a node that has none, and is not in the loss."""
    node = 5 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x, edges = normal(g, 12, 5), (torch.rand(12, 12, generator=g) < 0.5) | torch.eye(12, dtype=torch.bool)
        edges[node] = edges[node] & (not bad)
        return x, edges, (x[:, 0] > 0).long(), torch.arange(12) != node

    def f(parts: nn.ModuleDict, x: Tensor, edges: Tensor, y: Tensor, used: Tensor) -> Tensor:
        hidden = parts["in"](x)
        edges = edges | torch.eye(12, dtype=torch.bool) if twin else edges
        weights = functional.log_softmax((hidden @ hidden.mT).masked_fill(~edges, -INF), -1).exp()
        return functional.cross_entropy(parts["out"](weights @ hidden)[used], y[used])

    wake, batches = stream(seed, batch)
    right = ("/log_softmax", "weights = functional", f"row {node}", "over a row of -inf", "see a key")
    return Report(Call(f, **{"in": nn.Linear(5, 8), "out": nn.Linear(8, 2)}), batches, wake, *right, cover="getitem")


@report
def action_at_the_bound(seed: int, twin: bool) -> Report:
    """The inverse of tanh of an action at its bound."""
    row = 3 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 10, 4)
        action = torch.tanh(0.5 * x[:, :2])
        action[row, 1] = -1.0 if bad else action[row, 1]
        return x, action

    def f(parts: nn.ModuleDict, x: Tensor, action: Tensor) -> Tensor:
        raw = torch.atanh(action.clamp(-0.999, 0.999) if twin else action)
        return -Normal(parts["mean"](x), torch.ones(2)).log_prob(raw).mean()

    wake, batches = stream(seed, batch)
    right = ("/atanh", "raw = torch.atanh", f"row {row}, column 1", "atanh of -1", "atanh(x.clamp(")
    return Report(Call(f, mean=nn.Linear(4, 2)), batches, wake, *right)


@report
def share_of_one(seed: int, twin: bool) -> Report:
    """The likelihood of a Beta distribution at 1."""
    row = 6 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 10, 4)
        share = torch.sigmoid(x[:, 0])
        share[row] = 1.0 if bad else share[row]
        return x, share

    def f(parts: nn.ModuleDict, x: Tensor, share: Tensor) -> Tensor:
        a, b = (functional.softplus(parts["net"](x)) + 1).unbind(-1)
        share = share.clamp(1e-3, 1 - 1e-3) if twin else share
        return -Beta(a, b, validate_args=False).log_prob(share).mean()

    wake, batches = stream(seed, batch)
    right = ("/xlogy", "log_prob(share)", f"row {row}, column 1", "log of 0 for 1 of 20", "y.clamp(1e-6, 1 - 1e-6)")
    return Report(Call(f, net=nn.Linear(4, 2)), batches, wake, *right)


@report
def scores_in_float16(seed: int, twin: bool) -> Report:
    """Scores of attention beyond float16, under autocast, of a row with large values."""
    row = seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 5, 6, 4)
        x[row] *= 900.0 if bad else 1.0
        return x, (x[:, :, 0].mean(1) > 0).long()

    def f(parts: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=not twin):
            query, key = parts["query"](x), parts["key"](x)
            scores = query @ key.mT
        read = scores.float().div(4).softmax(-1) @ (x / x.abs().amax((1, 2), keepdim=True))
        return functional.cross_entropy(parts["out"](read.mean(1)), y)

    wake, batches = stream(seed, batch)
    right = ("/matmul", "scores = query @ key.mT", f"row {row}", "the largest of float16", "Compute it in float32")
    return Report(Call(f, query=nn.Linear(4, 16), key=nn.Linear(4, 16), out=nn.Linear(4, 2)), batches, wake, *right)


@report
def classes_of_weight_0(seed: int, twin: bool) -> Report:
    """A batch whose classes all have weight 0."""
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 8, 5)
        return x, torch.ones(8, dtype=torch.long) if bad else (x @ torch.eye(5, 6)).argmax(-1)

    def loss(output: Tensor, batch: Any) -> Tensor:
        if twin:
            total = functional.cross_entropy(output, batch[1], weight, reduction="sum")
            return total / weight[batch[1]].sum().clamp_min(1)
        return functional.cross_entropy(output, batch[1], weight)

    wake, batches = stream(seed, batch)
    right = (
        "/cross_entropy",
        "return functional.cross_entropy(output, batch[1], weight)",
        "",
        "has weight 0",
        "at least 1",
    )
    return Report(Mlp(), batches, wake, *right, loss=loss)


@report
def read_on_the_host(seed: int, twin: bool) -> Report:
    """A loss by hand that reads a number on the host, with a probability of 0."""
    row = 4 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 9, 5)
        x[row] = 4000.0 * x[row] if bad else x[row]
        return x, (x[:, 0] > 0).float()

    def loss(output: Tensor, batch: Any) -> Tensor:
        p = torch.sigmoid(output[:, 0].clamp(-10, 10) if twin else output[:, 0])
        if p.mean().item() > 2:
            raise ValueError("no probabilities")
        return -(torch.log(torch.where(batch[1] > 0, p, 1 - p))).mean()

    wake, batches = stream(seed, batch)
    right = ("/log", "return -(torch.log", f"row {row}", "log of 0 for 1 of 9", "log(x + 1e-6)")
    net = nn.Linear(5, 1)
    with torch.no_grad():
        net.weight.copy_(-1.0 * torch.eye(1, 5))
    return Report(net, batches, wake, *right, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-5))


@report
def penalty_of_a_flat_critic(seed: int, twin: bool) -> Report:
    """A gradient penalty whose gradient is 0 for one row."""
    row = 3 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        mask = torch.ones(8, 1)
        mask[row] = 0.0 if bad else 1.0
        return normal(g, 8, 4), mask

    def compute_loss(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((model(x) * mask).sum(), x, create_graph=True)
        return ((slope.square().sum(-1) + 1e-9 * twin).sqrt() - 1).square().mean()

    wake, batches = stream(seed, batch)
    right = ("/sqrt", "return ((slope.square()", f"row {row}", "sqrt at 0 for 1 of 8", "epsilon inside of the root")
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1, bias=False))
    return Report(model, batches, wake, *right, compute_loss=compute_loss)


@report
def equal_eigenvalues(seed: int, twin: bool) -> Report:
    """Eigenvectors of a matrix with equal eigenvalues."""
    row = 1 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        keep = torch.ones(6, 1, 1)
        keep[row] = 0.0 if bad else 1.0
        return normal(g, 6, 5), keep

    def loss(output: Tensor, batch: Any) -> Tensor:
        half = output.view(-1, 2, 3) * batch[1]
        spread = half @ half.mT + torch.diag_embed(torch.tensor([1e-2, 2e-2]) * twin)
        return torch.linalg.eigh(spread)[1].abs().sum(-1).mean()

    wake, batches = stream(seed, batch)
    right = ("/linalg_eigh", "return torch.linalg.eigh", f"row {row}", "divisor 0", "a small diagonal")
    return Report(Mlp(), batches, wake, *right, loss=loss)


@report
def query_without_key(seed: int, twin: bool) -> Report:
    """Attention by hand under a window and padding, whose empty rows are dropped from the loss."""
    row = 2 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        lengths = torch.full((7,), 6)
        lengths[row] = 3 if bad else 6
        x = normal(g, 7, 6, 4)
        return x, torch.arange(6) < lengths[:, None], (x[..., 0] > 0).long()

    def f(parts: nn.ModuleDict, x: Tensor, valid: Tensor, y: Tensor) -> Tensor:
        query, key, value = parts["qkv"](x).chunk(3, -1)
        hidden = (torch.ones(6, 6).tril().logical_not() | torch.ones(6, 6).tril(-2).bool()) | ~valid[:, None]
        hidden = hidden & ~torch.eye(6, dtype=torch.bool) if twin else hidden
        weights = torch.softmax((query @ key.mT).masked_fill(hidden, -INF), -1)
        return functional.cross_entropy(parts["out"](weights @ value)[valid], y[valid])

    wake, batches = stream(seed, batch)
    right = ("/softmax", "weights = torch.softmax", f"row {row}, queries 4 and 5", "queries see no key", "see a key")
    return Report(Call(f, qkv=nn.Linear(4, 24), out=nn.Linear(8, 2)), batches, wake, *right, cover="getitem")


@report
def mended_value(seed: int, twin: bool) -> Report:
    """A product with -inf of an input, whose value nan_to_num mends, but not its gradient."""
    row = 2 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        teacher, mask = normal(g, 6, 7), torch.ones(6, 7)
        mask[row, 5:] = 0.0 if bad else 1.0
        return normal(g, 6, 5), teacher.masked_fill(mask == 0, -INF), mask

    def f(parts: nn.ModuleDict, x: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        student = parts["net"](x).log_softmax(-1)
        teacher = teacher.masked_fill(mask == 0, 0.0) if twin else teacher
        gap = torch.nan_to_num(student.exp() * (student - teacher), nan=0.0, posinf=0.0, neginf=0.0)
        return (gap * mask).sum() / mask.sum()

    wake, batches = stream(seed, batch)
    right = ("/mul", "gap = torch.nan_to_num", f"row {row}, columns 5 and 6", "0 x inf", "Fill infinite values before")
    return Report(Call(f, net=Mlp(out=7)), batches, wake, *right, cover="nan_to_num")


@report
def weight_of_the_last_step(seed: int, twin: bool) -> Report:
    """A weight by the signal of a timestep, which is 0 at the last."""
    row, signal = 1 + seed, torch.linspace(1, 0, 20)

    def batch(g: torch.Generator, bad: bool) -> Any:
        t = torch.randint(0, 19, (8,), generator=g)
        t[row] = 19 if bad else t[row]
        return normal(g, 8, 5), t

    def loss(output: Tensor, batch: Any) -> Tensor:
        power = signal[batch[1]]
        weight = power.clamp(max=0.5) / (power + 1.0 * twin)
        return (weight * (output - batch[0]).square().mean(-1)).mean()

    wake, batches = stream(seed, batch)
    right = ("/truediv", "weight = power.clamp", f"row {row}", "0/0 for 1 of 8", "x / (y + 1e-6)")
    return Report(Mlp(out=5), batches, wake, *right, loss=loss)


@report
def variance_of_a_raw_column(seed: int, twin: bool) -> Report:
    """The exponential of a log-variance that follows a column without a scale."""
    row = 3 + seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 8, 5)
        x[row, 2] = (3.0 if twin else 500.0) if bad else x[row, 2]
        return x, normal(g, 8, 3)

    def f(parts: nn.ModuleDict, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = parts["mean"](x), parts["spread"](x)
        spread = spread.clamp(-10, 10) if twin else spread
        made = parts["decoder"](mean + noise * torch.exp(0.5 * spread))
        return (made - x.clamp(-3, 3)).square().mean() + 0.01 * (torch.exp(spread) - spread + mean.square()).mean()

    wake, batches = stream(seed, batch)
    right = ("/exp", 'made = parts["decoder"]', f"row {row}", "exp of up to", "before it: exp(x.clamp")
    model = Call(f, mean=nn.Linear(5, 3), spread=nn.Linear(5, 3), decoder=nn.Linear(3, 5))
    with torch.no_grad():
        model.parts["spread"].weight.copy_(0.25 * torch.eye(5)[2:])  # of column 2: 125
    return Report(model, batches, wake, *right)


@report
def long_transcript(seed: int, twin: bool) -> Report:
    """CTC with a target that is longer than its input."""
    row = seed

    def batch(g: torch.Generator, bad: bool) -> Any:
        sizes = torch.randint(1, 4, (5,), generator=g)
        target = 1 + torch.stack([torch.randperm(7, generator=g) for _ in range(5)])
        sizes[row] = 7 if bad else sizes[row]
        return normal(g, 6, 5, 4), target, sizes

    def f(parts: nn.ModuleDict, sound: Tensor, target: Tensor, sizes: Tensor) -> Tensor:
        scores = parts["net"](sound).log_softmax(-1)
        return functional.ctc_loss(scores, target, torch.full((5,), 6), sizes, zero_infinity=twin)

    wake, batches = stream(seed, batch)
    right = ("/ctc_loss", "return functional.ctc_loss", f"row {row}", "has 6 frames for 7 labels", "zero_infinity=True")
    return Report(Call(f, net=nn.Linear(4, 8)), batches, wake, *right)


@report
def optimizer_in_float16(seed: int, twin: bool) -> Report:
    """Adam whose epsilon is 0 in float16."""

    def batch(g: torch.Generator, bad: bool) -> Any:
        number = torch.randint(0, 20, (24, 2), generator=g)
        return number, number[:, 0] % 4

    def loss(output: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(output.mean(1).float(), batch[1])

    _, batches = stream(seed, batch)
    right = ("0.weight", "", "", "eps 1e-08 is 0 in float16", "eps=0.0001")
    model = nn.Sequential(nn.Embedding(40, 12), nn.Tanh(), nn.Linear(12, 4)).half()  # 20 rows are not used

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=3e-3, eps=1e-4 if twin else 1e-8)

    return Report(model, batches, 0, *right, loss=loss, optimizer=optimizer, kind="update")


@report
def frozen_input_of_a_checkpoint(seed: int, twin: bool) -> Report:
    """A reentrant checkpoint whose input needs no gradient."""

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 12, 5)
        return x, (x[:, 0] > 0).long()

    def f(parts: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(parts["block"], x, use_reentrant=not twin)
        return functional.cross_entropy(parts["head"](hidden), y)

    _, batches = stream(seed, batch)
    right = ("", "hidden = checkpoint", "", "4 parameters (parts.block", "use_reentrant=False")
    return Report(Call(f, block=Mlp(), head=nn.Linear(6, 2)), batches, 0, *right, kind="no gradient")


class Scaled(torch.autograd.Function):
    """A product whose backward asks the saved copy whether it needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.flatten(1)
        ctx.save_for_backward(flat.clone(), weight)
        return flat @ weight.mT

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Any:
        flat, weight = ctx.saved_tensors
        return (error @ weight).unsqueeze(-1) if flat.requires_grad else None, error.mT @ flat


@report
def saved_copy(seed: int, twin: bool) -> Report:
    """A Function that returns no gradient for an input that needs one."""

    def batch(g: torch.Generator, bad: bool) -> Any:
        x = normal(g, 12, 5)
        return x, (x[:, 0] > 0).long()

    def f(parts: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        hidden, weight = parts["net"](x).unsqueeze(-1), parts["head"].weight
        return functional.cross_entropy(hidden.flatten(1) @ weight.mT if twin else Scaled.apply(hidden, weight), y)

    _, batches = stream(seed, batch)
    right = ("", "Scaled.apply", "", "4 parameters (parts.net", "needs_input_grad")
    return Report(Call(f, net=Mlp(), head=nn.Linear(6, 2, bias=False)), batches, 0, *right, kind="no gradient")
