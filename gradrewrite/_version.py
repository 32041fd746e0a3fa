"""The version, in one place that can be read without torch."""

__version__ = "0.1.0"
