"""Trainings of copies of a model, for ``diagnose``."""
