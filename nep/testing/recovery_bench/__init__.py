"""How long training stands still when a rank is killed: nep beside what else its user could have."""
