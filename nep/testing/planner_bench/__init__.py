"""Planners side by side: ours, none, and others' that somebody points at, on real and synthetic loads."""
