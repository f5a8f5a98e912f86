"""Speed: of gspo_jax alone (speed.py) and next to its peers (peers.py)."""
