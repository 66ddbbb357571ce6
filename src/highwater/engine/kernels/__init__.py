"""Data plane: our own GPU kernels, each beside a plain PyTorch twin."""
