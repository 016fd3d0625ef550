"""Reading and writing model weights."""
