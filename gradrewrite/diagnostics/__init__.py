"""Diagnostics of failed steps and of training runs: values in, findings out."""
