"""Files that people give to `nep plan`: models, loads, clusters, hardware profiles, plans.

The planner takes values only; here they are read, checked and refused with a sentence.
"""
