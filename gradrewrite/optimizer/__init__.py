"""The optimizer step: the guard and update ratios."""
