"""Emulated accelerators: the real code on real ranks, whose computing and sending takes as long as on accelerators."""
