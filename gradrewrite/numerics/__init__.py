"""The numerics of nodes: statistics, norms, weights, noise, stored forms."""
