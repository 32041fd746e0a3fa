"""Examples that run: ``python examples/regression.py``, or ``python -m gradrewrite.examples.regression``."""
