"""Formatting, progress, tensors in containers, warnings."""
