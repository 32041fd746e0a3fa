"""The place of a record: site, loss, label of the model, number of the call."""

import pytest

from gradrewrite.diagnostics.run_log import rule_of
from gradrewrite.ir.record_key import RecordKey, with_label, with_loss, without_loss


@pytest.mark.parametrize(
    ("site", "loss", "label", "text"),
    [
        ("gradient:w", "energy", "", "gradient:w[energy]"),
        ("error:cell#3", "terms.energy", "", "error:cell[terms.energy]#3"),
        ("error:cell#3", "loss0", "@2", "error:cell[loss0]@2#3"),
        ("error:h[0]", "", "", "error:h[0]"),  # a name of a tap
    ],
)
def test_a_place_has_the_loss_and_the_label_before_the_call(site: str, loss: str, label: str, text: str) -> None:
    place = with_label(with_loss(site, loss), label)
    key = RecordKey("norm", 2, place)
    assert place == text
    assert RecordKey.parse(str(key)) == key
    assert rule_of(place, "ClipByNorm", 1.0) == rule_of(site, "ClipByNorm", 1.0)
    if not label:
        assert without_loss(place) == site
