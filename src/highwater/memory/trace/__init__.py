"""Control plane: a traced step, replayed in a simulation of PyTorch's allocator."""
