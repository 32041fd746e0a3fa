"""What happens at ``optimizer.step()``: the guard and update ratios."""
