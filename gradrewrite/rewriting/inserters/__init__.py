"""Inserters: each inserts one kind of effect into a graph, on its canvas."""
