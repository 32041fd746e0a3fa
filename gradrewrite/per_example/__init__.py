"""Per-example gradients: batch dimensions and each example's term of a gradient."""
