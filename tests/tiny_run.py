"""A run of seconds: 20 prompts, 8 a step, so that the third step crosses an epoch."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every second state is saved."""
    return ConfigDict(
        {
            "seed": 0,
            "steps": 4,
            "fused_steps": 0,
            "init_from": "",
            "shuffle_rewards": False,
            "stages": (),
            "policy": {
                "vocab_size": 136,
                "hidden_size": 32,
                "num_layers": 1,
                "num_heads": 2,
                "num_kv_heads": 2,
                "head_dim": 16,
                "num_experts": 4,
                "experts_per_token": 2,
                "expert_width": 16,
                "max_positions": 64,
            },
            "mesh": {"fsdp": 1, "expert": 1, "tensor": 1},
            "data": {
                "tasks": {
                    "chain_sum": {"max_terms": 2, "max_digits": 1},
                    "spell_backward": {"max_word_len": 4},
                },
                "phrases": (
                    "State the final answer to the following arithmetic problem: ",
                    "Spell this word backward (example: sun -> nus): ",
                ),
                "cold_start": 10,
                "train": 10,
                "heldout": 4,
                "seed": None,
                "dir": "",
                "tokenizer": "ascii",
            },
            "cold_start": {"steps": 2, "batch": 8, "learning_rate": 1e-3, "warmup": 1},
            "rollout": {
                "prompts": 8,
                "group_size": 4,
                "prompt_length": 20,
                "response_length": 12,
                "slots": 16,
                "temperature": 1.0,
                "attempts": 1,
                "tool": "",
                "weights": "",
            },
            "reward": {
                "text": "tiny:variety",
                "tokens": "",
                "workers": 0,
                "timeout": 10.0,
                "turns": 0,
            },
            "objective": {
                "method": "gspo",
                "clip_low": 3e-4,
                "clip_high": None,
                "dual_clip": 0.0,
                "advantage_scale": None,
                "std_floor": 1e-4,
                "balance_coef": 1e-3,
                "kl": "k3",
                "kl_coef": 0.0,
                "replay": "",
                "mismatch": {
                    "old_logps": "scored",
                    "weight_cap": 0.0,
                    "band": 0.0,
                    "off_policy": 0.0,
                },
                "overlong": {"buffer": 0, "penalty": 1.0, "untrained": False},
            },
            "critic": {
                "learning_rate": 1e-2,
                "warmup": 2,
                "discount": 1.0,
                "trace": 0.95,
                "clip": 0.2,
            },
            "updates": {"minibatches": 2, "micro_batch": 8, "logps_chunk": 0},
            "optimizer": {
                "learning_rate": 1e-2,
                "warmup": 2,
                "decay": 0,
                "final": 0.1,
                "weight_decay": 0.0,
                "max_grad_norm": 1.0,
            },
            "evaluation": {"every": 2, "samples": 8},
            "checkpoint": {"every": 2, "keep": 2},
        }
    )
