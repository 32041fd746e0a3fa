"""Benchmarks; a package of its own, since one that Opacus installs has the same name."""
