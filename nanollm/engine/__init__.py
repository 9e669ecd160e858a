"""WHAT runs next: plain Python; token ids in and out; no CUDA, no model code; of a tokenizer only grammars know."""
