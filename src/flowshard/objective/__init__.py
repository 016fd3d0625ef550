"""What is learned: noise levels, noise, and the loss."""
