"""How much of its pace a damaged, slow or unevenly loaded job keeps, on emulated accelerators."""
