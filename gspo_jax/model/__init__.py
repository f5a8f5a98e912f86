"""The policy: a Qwen3-MoE transformer and the ways to read its weights."""
