"""Seconds and bytes of a plan."""
