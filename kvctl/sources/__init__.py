"""Where snapshots of running engines come from."""
