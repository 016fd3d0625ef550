"""`flowshard parity`: one config under several layouts, compared number by number."""
