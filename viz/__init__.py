"""Pictures of rewritten graphs."""
