"""Text in, token arrays out: problems, worked solutions, tokenizers, and prompts by index."""
