"""Control plane: a traced step replayed through a model of PyTorch's allocator."""
