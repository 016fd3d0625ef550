"""The command lines of other trainers, read as configs of ours."""
