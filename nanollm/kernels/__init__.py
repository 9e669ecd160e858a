"""Functions on tensors: each operation's plain PyTorch definition, and beside it what runs on a GPU."""
