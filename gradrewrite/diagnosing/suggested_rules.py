"""The code of suggested rules."""

from __future__ import annotations

from types import SimpleNamespace

from gradrewrite import passes
from gradrewrite.diagnostics.health import Health
from gradrewrite.policy.actions import Policy
from gradrewrite.policy.rules import on


def policy_code(health: Health) -> str:
    """Return the code of the rules against the causes; ``""`` without any."""
    rules = health.verdict.code if health.verdict.causes else ()
    return "[\n" + "".join(f"    {rule},\n" for rule in rules) + "]" if rules else ""


def evaluated(policy: str) -> Policy:
    """Return the policy of a code."""
    known = {name: getattr(passes, name) for name in passes.__all__}
    found: Policy = eval(policy, {**known, "gr": SimpleNamespace(on=on)})  # our own text
    return found


def on_one_line(policy: str) -> str:
    """Return the rules of a code, with commas between them."""
    return ", ".join(line.strip().rstrip(",") for line in policy.splitlines()[1:-1])
