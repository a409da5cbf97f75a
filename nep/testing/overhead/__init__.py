"""What nep costs while nothing fails: its training steps beside those of a plain PyTorch job, in turns."""
