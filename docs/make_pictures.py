"""Make the pictures of README.md and of this folder: train three small models, then draw them.

Run ``pip install transformers playwright``, have Chromium (``playwright install chromium``, or one on PATH), and then
``python docs/make_pictures.py --out docs/pictures``. Without transformers there is no BERT, without playwright or
Chromium there are no pictures of the page; the rest is made.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image
from torch import Tensor

import gradrewrite as gr
from gradrewrite import viz
from gradrewrite.examples import character_model
from gradrewrite.examples.regression import POLICY, ROWS, Regression
from gradrewrite.passes import CheckFinite, ClipByValue, Observe

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parent.parent
CROP = 1150  # pixels; a longer ladder is cut off there
SIZE = {"width": 1400, "height": 900}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SVG = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Trained:
    """A model that was trained with a policy.

    Attributes:
        name: What its pictures are called.
        title: What stands above them.
        graph: Its rewritten graph.
        monitor: What training recorded.
    """

    name: str
    title: str
    graph: gr.JointGraph
    monitor: gr.Monitor


def regression(steps: int = 300) -> Trained:
    """The regression of the examples, each gradient clipped to a norm of 1."""
    torch.manual_seed(0)
    net = Regression()
    net.reset()
    model = gr.transform(net, POLICY)
    train(model, ({"x": 5 * torch.rand(ROWS, 1)} for _ in range(steps)), rate=0.01)
    graph = model.trace(torch.ones(ROWS, 1))
    return Trained("regression", "y = x + 3, gradients clipped", graph, model.monitor)


def text(steps: int = 60) -> Trained:
    """The character model of the examples: the error of every call clipped by value, all gradients by their norm."""
    torch.manual_seed(0)
    characters, vocabulary = character_model.load_text()
    model = gr.transform(character_model.CharacterModel(vocabulary), list(character_model.POLICY))
    train(model, ({"characters": batch} for batch in character_model.batches(characters, steps)), rate=1.0)
    graph = model.trace(torch.zeros(character_model.ROWS, character_model.UNROLL + 1, dtype=torch.int64))
    return Trained("text", "a recurrent network, errors clipped in time", graph, model.monitor)


def bert(steps: int = 40) -> Trained:
    """A tiny BERT that learns sixteen random tokens by heart: errors clipped between layers, gradients checked.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    net = BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    clip = ClipByValue(3e-3, log=True)
    policy = [gr.on("error:bert.encoder.layer.?", clip), gr.on("gradient:*", CheckFinite("record"))]
    model = gr.transform(net, policy)
    ids = torch.randint(0, 64, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    train(model, [batch] * steps, rate=0.5)
    graph = model.trace(**batch)
    return Trained("bert", "a tiny BERT, errors clipped", graph, model.monitor)


EXAMPLES: Mapping[str, Callable[[], Trained]] = {"regression": regression, "text": text, "bert": bert}


def train(model: gr.RewrittenModule, batches: Iterable[Mapping[str, Tensor]], *, rate: float) -> None:
    """Train op by op, without torch.compile; the loss is the model's output, or stands in it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in batches:
        optimizer.zero_grad()
        out = model(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
        model.monitor.log("loss", loss)
        optimizer.step()


def draw(trained: Trained, folder: Path) -> list[str]:
    """Draw the overview, the ladder and the curves; returns their paths."""
    given: dict[str, Any] = {"monitor": trained.monitor, "title": trained.title}
    name = str(folder / trained.name)
    found = [
        viz.draw(trained.graph, "overview", **given).render(f"{name}_overview"),
        viz.draw(trained.graph, "ladder", **given).render(f"{name}_ladder"),
        viz.plot(trained.monitor, title=trained.title).render(f"{name}_curves"),
    ]
    crop(Path(found[1]), CROP)
    shrink(Path(found[2]))
    return found


def front_picture(folder: Path) -> str:
    """Draw the losses of the README's example, and the errors of its first step in the graph; returns the path."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    sys.modules["readme_example"] = module = ModuleType("readme_example")  # the tracer looks there
    example = vars(module)
    definitions, loop = code.split("\nfor name, policy in ")
    exec(compile(definitions, "README.md", "exec"), example)
    policies = eval(loop.partition(".items()")[0], example)
    torch.manual_seed(0)
    observed = gr.transform(example["Net"](), gr.on("error:*", Observe("norm")))
    text = example["TEXT"][:800].reshape(16, 50)
    observed(text).backward()
    drawing = viz.draw(observed.trace(text), "overview", monitor=observed.monitor)

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.6), layout="constrained", gridspec_kw={"width_ratios": [1, 1.4]}
    )
    for (name, policy), color in zip(policies.items(), ("#c0392b", "#7f7f7f", "#1f77b4"), strict=True):
        losses = example["train"](policy)
        finite = [loss for loss in losses if math.isfinite(loss)]
        left.plot(finite, color=color, label=name, linewidth=2)
        if len(finite) < len(losses):
            left.plot(len(finite) - 1, finite[-1], "x", color=color, markersize=12, markeredgewidth=3)
            left.annotate("NaN", (len(finite) - 1, finite[-1]), (8, 8), textcoords="offset points", color=color)
    left.set(title="loss (nats per character)", xlabel="training step")
    left.legend()
    with tempfile.TemporaryDirectory() as made:
        with Image.open(drawing.render(str(Path(made, "overview")), format="png")) as image:
            right.imshow(np.asarray(image.convert("RGB")), interpolation="antialiased")
    right.set(title="errors of the first step, in the backward graph")
    right.axis("off")
    path = folder / "front.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    shrink(path)
    return str(path)


def crop(path: Path, height: float) -> None:
    """Cut a picture of our own layout off below; what begins further down is left out of the file."""
    ET.register_namespace("", SVG)
    tree = ET.parse(path)
    root = tree.getroot()
    width, whole = (float(root.get(name, "0")) for name in ("width", "height"))
    if whole <= height:
        return
    for parent in list(root.iter()):
        for child in list(parent):
            if _top(child) > height:
                parent.remove(child)
    root.set("height", f"{height:g}")
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    tree.write(path, encoding="unicode")


def _top(element: ET.Element) -> float:
    """The upper edge of a box, a line, a rectangle or a text; 0 of anything else."""
    move, points = element.get("transform", ""), element.get("d", "")
    if move:
        return float(move.removeprefix("translate(").removesuffix(")").split()[1])
    if points:
        numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", points)]
        return min(numbers[1::2])
    return float(element.get("y", "0"))


def shrink(path: Path) -> None:
    """Keep the 256 most frequent colors of a PNG, and the nearest of them for the rest: a third of the size."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.int64)
    packed, where, counts = np.unique(pixels @ (65536, 256, 1), return_inverse=True, return_counts=True)
    colors = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)
    frequent = colors[np.argsort(-counts, kind="stable")[:256]]
    nearest = np.square(colors[:, None] - frequent).sum(-1).argmin(1).astype(np.uint8)
    small = Image.fromarray(nearest[where].reshape(pixels.shape[:2]))
    small.putpalette(frequent.astype(np.uint8).tobytes())
    small.save(path, optimize=True)


def screenshots(trained: Trained, folder: Path) -> list[str]:
    """Take pictures of the page: as it opens, after a search, with a node chosen, folded, and of its curves.

    Raises:
        ImportError: playwright is not installed.
        playwright.sync_api.Error: There is no Chromium.
    """
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as pages, sync_playwright() as driver:
        drawing = viz.draw(trained.graph, monitor=trained.monitor, title=trained.title)
        page_path = Path(drawing.render(Path(pages) / trained.name, "html"))
        # Containers have no sandbox for root; nothing but our own file is opened.
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        found = []
        for name, act in _ACTS.items():
            page = chromium.new_page(viewport=SIZE)  # type: ignore[arg-type]
            page.goto(page_path.as_uri())
            page.wait_for_selector("html[data-ready=yes]")
            act(page)
            path = folder / f"{trained.name}_page_{name}.png"
            page.screenshot(path=path)
            page.close()
            shrink(path)
            found.append(str(path))
        chromium.close()
    return found


def _open(page: Page) -> None:
    """Nothing more."""


def _search(page: Page) -> None:
    page.fill("#search", "layer.1.output")
    page.press("#search", "Enter")


def _choose(page: Page) -> None:
    page.evaluate("document.querySelectorAll('#edits details').forEach((list) => { list.open = true; })")
    page.click('[data-jump="1"]')
    page.keyboard.press("x")
    page.evaluate("document.getElementById('ladder').scrollLeft = 260")


def _fold(page: Page) -> None:
    page.click("#tab-ladder")
    page.click("#fold")
    page.click(".band g")


def _curves(page: Page) -> None:
    page.click("#tab-curves")
    page.evaluate("setStep(40)")


_ACTS: Mapping[str, Callable[[Page], None]] = {
    "open": _open,
    "search": _search,
    "node": _choose,
    "folded": _fold,
    "curves": _curves,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pictures; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures", help="the folder for them")
    parser.add_argument(
        "--only", action="append", choices=("front", *EXAMPLES), help="this model alone; again for more"
    )
    parser.add_argument("--no-page", action="store_true", help="no pictures of the page, which need a browser")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only or ("front", *EXAMPLES):
        if name == "front":
            print(front_picture(options.out))
            continue
        try:
            trained = EXAMPLES[name]()
        except ImportError as err:
            print(f"no pictures of {name}: {err}", file=sys.stderr)
            continue
        found = draw(trained, options.out)
        if name == "bert" and not options.no_page:
            found += _screenshots_or_reason(trained, options.out)
        print(*found, sep="\n")
    return 0


def _screenshots_or_reason(trained: Trained, folder: Path) -> list[str]:
    try:
        return screenshots(trained, folder)
    except ImportError as err:
        reason = str(err)
    except Exception as err:
        if type(err).__module__.partition(".")[0] != "playwright":
            raise
        reason = str(err).strip().splitlines()[0]
    print(f"no pictures of the page: {reason}", file=sys.stderr)
    return []


if __name__ == "__main__":
    sys.exit(main())
