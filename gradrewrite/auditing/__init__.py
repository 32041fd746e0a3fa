"""Audit of a training step: parameters without a gradient, and the reasons."""
