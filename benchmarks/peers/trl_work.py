"""The step of benchmarks/peers.py in TRL: GRPOTrainer with its own generation, timed from outside.

An iteration is one rollout and four optimizer steps. With more micro-batches to a rollout than to
an optimizer step, GRPOTrainer computes the old log-probabilities before the first of the four.
"""

import argparse
import json
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

VOCABULARY, PROMPT, RESPONSE = 512, 32, 128  # tokens
GROUPS, GROUP_SIZE, UPDATES = 16, 8, 4
RESPONSES = GROUPS * GROUP_SIZE
MICRO_BATCH = 16  # sequences in one pass; 8 took some 7 % longer, 32 as long
EXPERTS = "eager"  # grouped_mm took some 8 % longer on CPU


def matmul_gflops(size: int = 2048, tries: int = 3) -> float:
    """The best rate of a float32 matmul, which tells how much of the machine there was."""
    x = torch.randn(size, size)
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - begin)
    return 2e-9 * size**3 / min(seconds)


def make_model() -> transformers.PreTrainedModel:
    """A Qwen3-MoE policy with random weights, float32."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        dtype="float32",
    )
    config._experts_implementation = EXPERTS
    return transformers.Qwen3MoeForCausalLM(config)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Decimal numbers. Pad and end lie outside the policy's vocabulary: no response ends early."""
    words = {str(i): i for i in range(VOCABULARY)} | {"<pad>": VOCABULARY, "<end>": VOCABULARY + 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def distinct(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of distinct tokens."""
    assert all(len(ids) == RESPONSE for ids in completion_ids)
    return [len(set(ids)) / len(ids) for ids in completion_ids]


class TimedTrainer(trl.GRPOTrainer):
    """GRPOTrainer with clocks around its phases."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.seconds = dict.fromkeys(("rollout", "score", "experience"), 0.0)

    def _timed(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds[name] += time.perf_counter() - begin
        return result

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("rollout", super()._generate_single_turn, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        call = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():
            return call(*args, **kwargs)
        return self._timed("score", call, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        call = super()._generate_and_score_completions
        experience = self._timed("experience", call, inputs)
        assert experience["old_per_token_logps"].shape == (RESPONSES, RESPONSE)
        return experience


class Iterations(transformers.TrainerCallback):
    """Cuts the training into iterations of UPDATES optimizer steps and records each of them."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.trainer: TimedTrainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % UPDATES == 0:
            self.trainer.seconds = dict.fromkeys(self.trainer.seconds, 0.0)
            self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % UPDATES == 0:
            iteration = time.perf_counter() - self.begin
            seconds = self.trainer.seconds
            record = {
                "rollout_tokens_per_s": RESPONSES * RESPONSE / seconds["rollout"],
                "score_s": seconds["score"],
                "updates_s": iteration - seconds["experience"],
                "iteration_s": iteration,
                "matmul_gflops": matmul_gflops(),
            }
            self.records.append(record)


def run(warm: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """Trains for warm + steps iterations; the records of the last `steps`."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (GROUPS * (warm + steps), PROMPT)).tolist()
    prompts = [" ".join(map(str, row)) for row in tokens]
    iterations = Iterations()
    trainer = TimedTrainer(
        make_model(),
        distinct,
        trl.GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=RESPONSES // UPDATES // MICRO_BATCH,
            steps_per_generation=RESPONSES // MICRO_BATCH,
            max_steps=UPDATES * (warm + steps),
            num_generations=GROUP_SIZE,
            max_completion_length=RESPONSE,
            temperature=1.0,
            importance_sampling_level="sequence",
            loss_type="grpo",
            epsilon=3e-4,
            epsilon_high=4e-4,
            beta=0.0,
            router_aux_loss_coef=1e-3,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
        callbacks=[iterations],
    )
    iterations.trainer = trainer
    trainer.train()
    assert len(iterations.records) == warm + steps
    return iterations.records[warm:]


def main() -> None:
    """Measures and writes the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["small"], default="small")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(2)
    records = run(args.warm, args.steps, args.out.parent)
    medians = {key: statistics.median(r[key] for r in records) for key in records[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    versions = {m.__name__: m.__version__ for m in (trl, transformers, torch)}
    versions["python"] = platform.python_version()
    result = {"work": args.work, "peak_rss_mib": peak, "versions": versions, "steps": len(records)}
    args.out.write_text(json.dumps(result | medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
