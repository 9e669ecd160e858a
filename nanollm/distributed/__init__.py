"""WHO talks to whom: the tensor-parallel group and what each rank owns."""
