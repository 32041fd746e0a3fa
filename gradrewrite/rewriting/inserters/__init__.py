"""Inserters: each inserts one kind of effect into a graph, on its canvas."""

from gradrewrite.rewriting.inserters.averages import insert_averages
from gradrewrite.rewriting.inserters.backwards import InsertedBackwards, insert_at_backwards
from gradrewrite.rewriting.inserters.group import insert_group
from gradrewrite.rewriting.inserters.loops import InsertedLoops, insert_in_loops
from gradrewrite.rewriting.inserters.losses import weigh_losses
from gradrewrite.rewriting.inserters.parts import insert_at_part
from gradrewrite.rewriting.inserters.saved import SavedInsertion, SavedRewrite, find_saved
from gradrewrite.rewriting.inserters.single import insert

__all__ = [
    "InsertedBackwards",
    "InsertedLoops",
    "SavedInsertion",
    "SavedRewrite",
    "find_saved",
    "insert",
    "insert_at_backwards",
    "insert_at_part",
    "insert_averages",
    "insert_group",
    "insert_in_loops",
    "weigh_losses",
]
