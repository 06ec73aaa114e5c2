"""Methods on variants of one task: other training rows, another dialect, another SFT model."""
