"""Model definitions: single-device code.

The files import nothing from each other: installed, the folder has another name (nep_models).
"""
