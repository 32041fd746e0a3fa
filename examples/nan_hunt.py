"""Plant every cause of NaN that users of Caffe collected, and let a finite check name each one.

The list is that of "Common causes of nans during training" (Stack Overflow, question 33962226) with those that PyTorch
adds. One small network reads the digits of scikit-learn; each fault replaces one part of it, spoils a batch, a
parameter or the learning rate. ``python examples/nan_hunt.py`` prints for each fault which site, op and line
gradrewrite names, and writes a picture of how far the NaNs got. ``--compile`` compiles each model with Inductor.
It needs ``scikit-learn``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import gradrewrite as gr
from gradrewrite.passes import CheckFinite, Observe

ROWS, CLASSES, STEPS = 32, 10, 60
POLICY = (
    gr.on("gradient:*", [CheckFinite(), Observe("norm")]),
    gr.on("activation:loss", CheckFinite()),  # a loss can be NaN while all its gradients are finite
)
Part = Callable[..., Tensor]


class Digits(nn.Module):
    """A network of one convolution and two linear layers.

    Args:
        pool: From ``[rows, 8, 8, 8]`` to ``[rows, 8, 4, 4]``.
        activation: Of the hidden layer, ``[rows, 32]``.
        loss: From logits ``[rows, 10]`` and labels to a scalar.
    """

    def __init__(self, pool: Part | None = None, activation: Part | None = None, loss: Part | None = None) -> None:
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(128, 32), nn.Linear(32, CLASSES)
        self.pool, self.activation = pool or nn.MaxPool2d(2), activation or torch.relu
        self.loss = loss or functional.cross_entropy

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of ``[rows, 1, 8, 8]`` images with values from 0 to 1."""
        features = self.pool(torch.relu(self.conv(images)))
        hidden = self.activation(self.hidden(features.flatten(1)))
        return gr.tap(self.loss(self.head(hidden), labels), "loss")


# Each planted line bears the word "planted"; the tests compare it with the line that the error names.


def squared_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sound by itself; with too high a learning rate its gradients grow from step to step."""
    return (logits - functional.one_hot(labels, CLASSES)).square().mean()  # planted: overflows first


def log_of_zero(logits: Tensor, labels: Tensor) -> Tensor:
    """Sharpened probabilities underflow to 0."""
    probabilities = (100 * logits).softmax(1)
    return -probabilities.log().gather(1, labels[:, None]).mean()  # planted


def mean_over_nothing(logits: Tensor, labels: Tensor) -> Tensor:
    """Only one class counts, and a batch may have none of it."""
    wanted = labels == 8
    losses = functional.cross_entropy(logits, labels, reduction="none") * wanted
    return losses.sum() / wanted.sum()  # planted


def mean_by_class(logits: Tensor, labels: Tensor) -> Tensor:
    """A class that is missing in the batch is 0 / 0; no gradient shows it."""
    losses = functional.cross_entropy(logits, labels, reduction="none")
    sums = losses.new_zeros(CLASSES).index_add(0, labels, losses)
    return (sums / torch.bincount(labels, minlength=CLASSES)).mean()  # planted


def pool_the_padding(features: Tensor) -> Tensor:
    """A stride larger than the kernel: the windows at the border hold nothing but padding."""
    padded = functional.pad(features, (2, 2, 2, 2), value=-torch.inf)
    return padded.unfold(2, 2, 3).unfold(3, 2, 3).amax((-2, -1))  # planted


def maximum_of_nothing(features: Tensor) -> Tensor:
    """A mask of -inf is no fault; windows that it covers wholly are one."""
    masked = features.masked_fill(features < 0.1, -torch.inf)
    return functional.max_pool2d(masked, 2)  # planted


def normalize_constant(hidden: Tensor) -> Tensor:
    """A unit that is 0 for the whole batch has no variance; BatchNorm without its epsilon."""
    units = torch.relu(hidden)
    return (units - units.mean(0)) / units.std(0)  # planted


def divide_by_zero(hidden: Tensor) -> Tensor:
    """Gates that are all closed have the sum 0."""
    gates = torch.relu(hidden - 0.5)
    return gates / gates.sum(1, keepdim=True)  # planted


def root_of_zero(hidden: Tensor) -> Tensor:
    """The distance of an image from itself is 0: finite forward, infinite slope."""
    distances = (hidden[:, None] - hidden[None]).square().sum(-1).sqrt()  # planted
    return hidden + distances.mean()


def log_behind_where(hidden: Tensor) -> Tensor:
    """``where`` hides the NaN of the forward; its backward multiplies 0 by infinity all the same."""
    units = torch.relu(hidden) * hidden.sigmoid()
    return torch.where(units > 0, units.sqrt(), 0.0)  # planted


def grow_backward(hidden: Tensor) -> Tensor:
    """Bounded forward; each round multiplies the error by up to 12."""
    for _ in range(60):
        hidden = 12 * hidden.sin()  # planted
    return hidden


def overflow_of_exp(hidden: Tensor) -> Tensor:
    """A softmax without subtracting the maximum."""
    weights = (400 * hidden).exp()  # planted
    return weights / weights.sum(1, keepdim=True)


def overflow_of_half(hidden: Tensor) -> Tensor:
    """Attention scores beyond 65,504 in float16."""
    units = (200 * hidden).half()
    scores = units @ units.mT  # planted
    return scores.float().softmax(-1) @ hidden


Spoil = Callable[[int, Digits, torch.optim.Optimizer, Tensor], Tensor]


def leave(step: int, network: Digits, optimizer: torch.optim.Optimizer, images: Tensor) -> Tensor:
    """Spoil nothing."""
    return images


def bad_batch(step: int, network: Digits, optimizer: torch.optim.Optimizer, images: Tensor) -> Tensor:
    """One image of batch 5 was divided by its own maximum of 0."""
    return images.index_fill(0, torch.tensor(3), torch.nan) if step == 5 else images


def bad_parameter(step: int, network: Digits, optimizer: torch.optim.Optimizer, images: Tensor) -> Tensor:
    """One number of a weight was not initialized, or its checkpoint is damaged."""
    if step == 0:
        network.hidden.weight.data[3, 5] = torch.nan
    return images


def bad_schedule(step: int, network: Digits, optimizer: torch.optim.Optimizer, images: Tensor) -> Tensor:
    """A polynomial schedule runs beyond its last step: a root of a negative number."""
    rest = torch.tensor(1 - step / 10)
    optimizer.param_groups[0]["lr"] = 0.1 * rest.pow(0.5).item()
    return images


@dataclass(frozen=True)
class Fault:
    """A planted cause of NaN.

    Attributes:
        name: The cause.
        parts: What it replaces, by the name of the argument of ``Digits``.
        spoil: Called before each step; returns the images.
        rate: The learning rate.
    """

    name: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    spoil: Spoil = leave
    rate: float = 0.1


FAULTS = (
    Fault("learning rate too high", {"loss": squared_loss}, rate=100.0),
    Fault("learning rate NaN (schedule)", spoil=bad_schedule),
    Fault("gradient blows up", {"activation": grow_backward}),
    Fault("loss: log of 0", {"loss": log_of_zero}),
    Fault("loss: mean over no element", {"loss": mean_over_nothing}),
    Fault("loss: class missing in batch", {"loss": mean_by_class}),
    Fault("input: NaN in one batch", spoil=bad_batch),
    Fault("pooling: windows of padding", {"pool": pool_the_padding}),
    Fault("pooling: maximum of nothing", {"pool": maximum_of_nothing}),
    Fault("normalization: variance 0", {"activation": normalize_constant}),
    Fault("hidden layer: division by 0", {"activation": divide_by_zero}),
    Fault("backward of sqrt at 0", {"activation": root_of_zero}),
    Fault("backward of sqrt behind where", {"activation": log_behind_where}),
    Fault("exp overflows float32", {"activation": overflow_of_exp}),
    Fault("matmul overflows float16", {"activation": overflow_of_half}),
    Fault("parameter: one element NaN", spoil=bad_parameter),
)
FORWARD, ERRORS, GRADIENTS = BLOCKS = ("activation", "error", "gradient")


@dataclass(frozen=True)
class Answer:
    """The answer to one fault.

    Attributes:
        fault: The fault.
        error: What the finite check raised.
        findings: What the doctor says about the records of the run, beyond "not finite".
        sites: All sites of the model by kind, in the order of execution.
    """

    fault: Fault
    error: gr.NonFiniteError
    findings: tuple[str, ...]
    sites: Mapping[str, Sequence[gr.Site]]

    def __str__(self) -> str:
        """Two lines, and one for each finding."""
        error = self.error
        made = f"{error.op}, {error.source}" if error.op else error.cause
        return "\n  ".join([self.fault.name, f"step {error.step}, {error.site}: {made}", *self.findings])


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random digits, ``[ROWS, 1, 8, 8]`` from 0 to 1, with their labels."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        rows = torch.randint(len(images), (ROWS,), generator=generator)
        yield images[rows], labels[rows]


def start(fault: Fault) -> Digits:
    """Return the network of a fault, the same each time."""
    torch.manual_seed(0)
    return Digits(**fault.parts)


def hunt(fault: Fault, *, compiled: bool = False) -> Answer:
    """Train until the check raises.

    Raises:
        RuntimeError: It did not in ``STEPS`` steps.
    """
    network = start(fault)
    model = gr.transform(network, list(POLICY))
    if compiled:
        model.compile()
    optimizer = gr.guard(torch.optim.SGD(model.parameters(), lr=fault.rate), model)
    for step, (images, labels) in enumerate(batches(STEPS)):
        given = fault.spoil(step, network, optimizer, images)
        optimizer.zero_grad()
        try:
            model(given, labels).backward()
        except gr.NonFiniteError as error:
            found = [f"{one.kind}: {one.text}" for one in model.monitor.diagnose() if one.kind != "non-finite"]
            return Answer(fault, error, tuple(found[:1]), _by_kind(model.trace(images, labels).sites))
        optimizer.step()
    raise RuntimeError(f"{fault.name}: everything was finite in {STEPS} steps")


def _by_kind(sites: Sequence[gr.Site]) -> dict[str, list[gr.Site]]:
    kinds = {kind: [site for site in sites if site.kind == kind] for kind in BLOCKS}
    return kinds | {kind: kinds[kind][::-1] for kind in (ERRORS, GRADIENTS)}


def draw(answers: Sequence[Answer], path: Path) -> str:
    """Draw one row for each fault: its sites in the order of execution, those that are not finite, the named one."""
    figure, axes = plt.subplots(figsize=(13, 0.42 * len(answers) + 1), layout="constrained")
    for row, answer in enumerate(answers):
        bad = {answer.error.site, *answer.error.others}
        for block, kind in enumerate(BLOCKS):
            width = 1 / len(answer.sites[kind])
            for number, site in enumerate(answer.sites[kind]):
                color = "black" if site == answer.error.site else "#d62728" if site in bad else "#d9e2ec"
                axes.barh(row, width, left=1.04 * block + number * width, height=0.7, color=color)
        error = answer.error
        made = f"made by {error.op}" if error.op else f"from {error.cause.partition(' was ')[0]}"
        axes.text(3.12, row, f"{error.site}, {made}", va="center", fontsize=8)
    axes.set_yticks(range(len(answers)), [answer.fault.name for answer in answers])
    axes.set_xticks([0.5, 1.54, 2.58], ["forward", "errors, backward", "gradients"])
    axes.set(xlim=(-0.02, 4.6), ylim=(len(answers) - 0.4, -0.6))
    axes.set_title("finite (gray), not finite (red), named first (black), in the order of execution", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Hunt each fault, print the answers, draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile each model with Inductor")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small
    answers = []
    for fault in FAULTS:
        if options.only in fault.name:
            answers.append(hunt(fault, compiled=options.compile))
            print(answers[-1])
    print(draw(answers, options.out / "nan_hunt.png"))


if __name__ == "__main__":
    main()
