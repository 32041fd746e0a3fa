"""Records while training: the monitor, step records on the device, writers, log lines."""
