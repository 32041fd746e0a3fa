"""Rewriting: probes and names in Dynamo graphs, edits and records in joint graphs."""
