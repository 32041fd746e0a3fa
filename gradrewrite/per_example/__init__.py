"""Per-example gradients: where the batch is in a joint graph, and what each example contributes to a gradient."""
