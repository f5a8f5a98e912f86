"""GSPO (Group Sequence Policy Optimization, arXiv 2507.18071) for mixture-of-experts on TPU."""
