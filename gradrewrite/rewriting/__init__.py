"""From a Dynamo graph to probes and names; from a marked joint graph and a policy to edits and records."""
