"""Several processes: process groups, agreement, norms over shards and meshes."""
