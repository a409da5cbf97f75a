"""Copies of whole experts and the quotas that share tokens over them."""
