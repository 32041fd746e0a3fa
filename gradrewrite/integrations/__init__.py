"""Callbacks for transformers and Lightning; each module needs its framework and is imported on use."""
