"""Diagnostics of training runs: values in, findings out."""
