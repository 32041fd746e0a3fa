"""The joint graph as data: its custom ops, its only editor, provenance of nodes, statistics."""
