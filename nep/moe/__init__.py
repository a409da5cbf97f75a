"""Mixture-of-experts layer for one slot: router, experts in slices, and the protocol that moves tokens."""
