"""In which order several group actions act on the gradients that they share."""

from __future__ import annotations

import pytest
import torch

import gradrewrite as gr
from gradrewrite.passes import ClipByGlobalNorm

from models.small import Gradients

DECODER = ClipByGlobalNorm(4.0, group="decoder")
ALL = ClipByGlobalNorm(10.0, group="all")


def in_one_callback(site: gr.Site) -> object:
    if site.kind != "gradient":
        return None
    return [DECODER, ALL] if site.name == "decoder" else ALL


DECODER_FIRST = [gr.on("gradient:decoder", DECODER), gr.on("gradient:*", ALL)]
ALL_FIRST = [gr.on("gradient:*", ALL), gr.on("gradient:decoder", DECODER)]
BY_ALL = 10.0 / (3.0**2 + 100.0**2) ** 0.5  # the factor of the clip of all, if it is the first


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (DECODER_FIRST, (3.0, 4.0)),
        ([[], DECODER_FIRST], (3.0, 4.0)),
        ([DECODER_FIRST[:1], DECODER_FIRST[1:]], (3.0, 4.0)),
        (ALL_FIRST, (3.0 * BY_ALL, 4.0)),
        (in_one_callback, (3.0 * BY_ALL, 4.0)),  # the encoder, the first site, names the group of all first
    ],
)
def test_groups_act_in_the_order_of_the_policy_list(policy: gr.Policy, wanted: tuple[float, float]) -> None:
    # The site of the encoder comes first.
    model = gr.transform(Gradients(encoder=torch.zeros(()), decoder=torch.zeros(())), policy)
    model(torch.tensor(3.0), torch.tensor(100.0)).backward()

    assert (float(model.encoder.grad), float(model.decoder.grad)) == pytest.approx(wanted, rel=1e-6)
