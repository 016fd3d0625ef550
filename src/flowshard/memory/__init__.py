"""What a run needs in memory."""
