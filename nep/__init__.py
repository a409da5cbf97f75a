"""Nonuniform expert parallelism: MoE training that keeps going, at pace, when GPUs fail or slow down."""

__version__ = "0.1.0"
