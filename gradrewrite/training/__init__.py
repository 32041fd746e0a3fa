"""Training steps as one graph."""
