"""Why a step failed: step snapshot, replay op by op, root cause."""
