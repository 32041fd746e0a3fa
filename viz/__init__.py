"""Drawing of rewritten graphs; nothing is drawn yet."""
