"""What a layout needs and how long it takes, before it runs."""
