"""nn.Modules that know tensor parallelism.

Shape suffixes, here and in kernels/: T tokens in the step, B rows (sequences) in the step, N query heads, K KV heads,
H head dim, D model dim, F feed-forward dim, G gate's features and up's (2F), E experts, C experts chosen for a token,
V vocabulary, L logit rows, S sampled rows, M blocks in a block table, Z parts that are still to be added up (a result
of a split matmul or of experts has them first, where another has no such Z); `_r` for "this rank's share". So q_TNH is
[tokens, query heads, head dim].
"""
