"""Tokens to text and back, on the caller's side: the tokenizer, streamed output, chat templates."""
