"""The torch.compile backend: engines, the compilation of one graph, sessions."""
