"""What nodes compute: statistics, norms, weights, noise, stored forms."""
