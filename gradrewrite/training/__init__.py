"""Training steps as one graph: forward, backward and update."""
