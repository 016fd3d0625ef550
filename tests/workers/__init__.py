"""Programs that tests start in several processes."""
