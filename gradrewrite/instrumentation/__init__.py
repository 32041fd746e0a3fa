"""Dynamo graph to probes, names of values and modules, source lines."""
