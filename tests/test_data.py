"""Problems, worked solutions, tokenizers and prompts, by property (gspo.md items 20, 38-41)."""

import json
import logging as python_logging
import multiprocessing
import re
import shutil
from fractions import Fraction

import numpy as np
import pytest

from gspo_jax.data import reasoning, worked
from gspo_jax.data.prompts import PromptSet, WorkedSet, left_pad, right_pad
from gspo_jax.data.reasoning import (
    SPLITS,
    Problem,
    TaskSpec,
    build,
    decode_entry,
    encode_entry,
    generate,
)
from gspo_jax.data.tokenizers import AsciiTokenizer, Tokenizer
from gspo_jax.rewards.text import extract_answer, reasoning_gym_reward

SUMS = TaskSpec("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2})
SIZES = {"cold_start": 40, "train": 100, "heldout": 20}
SMALL = {  # at the difficulty of a tiny model, and with the awkward cases: signs, zeros, 3 numbers
    "chain_sum": {"min_terms": 1, "max_terms": 3, "max_digits": 2, "allow_negation": True},
    "products": {"max_terms": 3, "max_digits": 2, "allow_negation": True},
    "gcd": {"max_numbers": 3, "max_value": 99},
    "lcm": {"max_numbers": 3, "max_value": 30},
    "number_sorting": {"max_numbers": 4, "max_decimals": 1},
    "spell_backward": {"max_word_len": 6},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "count_bits": {"max_n": 1000},
    "base_conversion": {"max_base": 36, "max_value": 60},
    "caesar_cipher": {"max_words": 5},
}


def problem(question: str, worked: str = "1#1") -> Problem:
    return Problem("chain_sum", question, "1", worked, "{}")


def problems(count: int) -> list[Problem]:
    return [problem(f"question {i}") for i in range(count)]


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return build(SUMS, SIZES, seed=0, data_dir=tmp_path_factory.mktemp("data"))


# ---------------------------------------------------------------- problems


def test_splits_have_their_sizes_and_share_no_question(splits):
    assert {split: len(splits[split]) for split in SPLITS} == SIZES
    questions = [p.question for split in SPLITS for p in splits[split]]
    assert len(set(questions)) == sum(SIZES.values())


def test_generation_is_a_function_of_spec_count_and_seed():
    first = generate(SUMS, 30, seed=0)
    assert first == generate(SUMS, 30, seed=0)
    # reasoning-gym adds seed and index; neighbouring seeds must still give unrelated problems
    neighbour = {p.question for p in generate(SUMS, 30, seed=1)}
    assert len(neighbour & {p.question for p in first}) < 10


def test_splits_do_not_differ_in_kind(tmp_path):
    """One-digit sums are soon used up; they must not end up in the first split."""
    spec = TaskSpec("chain_sum", {"max_terms": 2, "max_digits": 2})
    built = build(spec, {"cold_start": 300, "heldout": 300}, seed=0, data_dir=tmp_path)
    short = {split: sum(map(is_short, built[split])) for split in SPLITS}
    assert short["train"] == 0
    assert short["cold_start"] > 50 and abs(short["cold_start"] - short["heldout"]) < 40


def is_short(p: Problem) -> bool:
    return re.search(r" \d [+-] \d =", p.question) is not None


def test_build_is_cached_under_all_it_depends_on(tmp_path, monkeypatch):
    first = list(build(SUMS, SIZES, seed=0, data_dir=tmp_path)["train"])
    with monkeypatch.context() as patch:
        patch.setattr(reasoning, "generate", None)  # a second generation would fail
        assert list(build(SUMS, SIZES, seed=0, data_dir=tmp_path)["train"]) == first
    build(SUMS, SIZES, seed=1, data_dir=tmp_path)
    build(SUMS, {**SIZES, "train": 10}, seed=0, data_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_killed_build_leaves_nothing_that_is_taken_for_data(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(builder, scratch):
        prepare(builder, scratch)
        raise Killed

    prepare = reasoning._prepare
    with monkeypatch.context() as patch:
        patch.setattr(reasoning, "_prepare", killed)
        with pytest.raises(Killed):
            build(SUMS, SIZES, seed=0, data_dir=tmp_path)
    assert not list(tmp_path.glob("chain_sum-*"))
    assert len(build(SUMS, SIZES, seed=0, data_dir=tmp_path)["train"]) == SIZES["train"]


def test_another_process_finishing_first_is_no_error(tmp_path, monkeypatch):
    def raced(builder, scratch):
        prepare(builder, scratch)
        for made in scratch.glob("chain_sum-*"):
            shutil.copytree(made, tmp_path / made.name)

    prepare = reasoning._prepare
    monkeypatch.setattr(reasoning, "_prepare", raced)
    assert len(build(SUMS, SIZES, seed=0, data_dir=tmp_path)["train"]) == SIZES["train"]
    assert len(list(tmp_path.iterdir())) == 1


def _build_in_process(data_dir: str, seed: int) -> list[str]:
    return [p.question for p in build(SUMS, SIZES, seed, data_dir)["train"]]


def test_two_processes_may_build_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:  # a fork of a threaded JAX may hang
        job = pool.starmap_async(_build_in_process, [(str(tmp_path), 0)] * 2, chunksize=1)
        first, second = job.get(timeout=120)
    assert first == second
    assert len(list(tmp_path.iterdir())) == 1


def test_sources_concatenate_and_index_like_lists(splits):
    both = splits["train"] + splits["heldout"]
    assert list(both) == [*splits["train"], *splits["heldout"]]
    assert both[-1] == splits["heldout"][19] and both[100] == splits["heldout"][0]
    with pytest.raises(IndexError):
        both[120]


def test_too_few_distinct_questions_say_how_many_there_are():
    spec = TaskSpec("chain_sum", {"max_terms": 2, "max_digits": 1})
    with pytest.raises(ValueError, match=r"201 distinct .* only 200 were found"):
        generate(spec, 201, seed=0)
    assert len(generate(spec, 200, seed=0)) == 200


def test_problems_that_their_own_answer_does_not_solve_are_left_out():
    """reasoning-gym writes zero as the empty text in most bases, which its scorer refuses."""
    spec = TaskSpec("base_conversion", {"min_base": 3, "max_base": 9, "max_value": 20})
    found = generate(spec, 300, seed=0)
    assert all(p.answer for p in found) and len(found) == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "chain_sums"}, "name='chain_sums' is unknown; did you mean .*chain_sum"),
        ({"name": "gcd", "params": {"max_valeu": 3}}, "params.max_valeu=3 .*max_value"),
        ({"name": "gcd", "params": {"seed": 3}}, "params.seed is set by build"),
        ({"name": "gcd", "params": {"max_value": {3}}}, "is not JSON"),
        ({"name": "gcd", "params": {"max_value": 0}}, "refused by reasoning-gym: max_value must"),
        ({"name": "gcd", "level": 9}, r"level=9 must lie in \[0, 3\]"),
        ({"name": "gsm_symbolic", "level": 0}, "level=0, but it has no curriculum"),
    ],
)
def test_wrong_specs_name_key_value_and_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        TaskSpec(**arguments)


@pytest.mark.parametrize(
    ("sizes", "data_dir", "message"),
    [
        ({"test": 3}, ".", "sizes.test=3 is unknown; known: cold_start, train, heldout"),
        ({"train": -3}, ".", "sizes.train=-3 must not be negative"),
        ({"train": 0}, ".", "at least one problem"),
        ({"train": 3}, "gs://bucket/data", "must be a local directory"),
    ],
)
def test_wrong_builds_name_key_value_and_remedy(sizes, data_dir, message):
    with pytest.raises(ValueError, match=message):
        build(SUMS, sizes, seed=0, data_dir=data_dir)


def test_tasks_whose_scorer_runs_answers_as_code_are_announced(tmp_path, caplog):
    with caplog.at_level(python_logging.WARNING, logger="absl"):
        build(TaskSpec("string_insertion"), {"train": 2}, seed=0, data_dir=tmp_path)
    assert any("string_insertion: its scorer runs answers" in m for m in caplog.messages)
    assert set(reasoning.TASKS) > reasoning.EVALUATING


def test_level_sets_the_difficulty_and_params_win_over_it():
    assert SUMS == TaskSpec("chain_sum", dict(reversed(json.loads(SUMS.params).items())))
    config = TaskSpec("chain_sum", {"max_digits": 1}, level=3).config(0, 1)
    assert (config.min_terms, config.max_terms, config.max_digits) == (2, 5, 1)


def test_entries_survive_json_or_fail_by_name():
    entry = {"a": (1, [2, (3,)]), "b": {1: "x", (2, 3): Fraction(1, 3)}, "c": [True, 1.5, "é"]}
    assert decode_entry(encode_entry(entry)) == entry
    assert decode_entry(encode_entry({"n": np.float64(2), "m": np.eye(1)})) == {"n": 2, "m": [[1]]}
    with pytest.raises(ValueError, match=r"entry\.metadata\[1\] is of type set"):
        encode_entry({"metadata": [0, {1}]})


def test_scorers_that_compare_tuples_accept_stored_entries():
    found = generate(TaskSpec("arc_1d"), 3, seed=0) + generate(TaskSpec("arc_agi"), 3, seed=0)
    assert reasoning_gym_reward(found, [f"#{p.answer}" for p in found]) == [1.0] * 6


# ---------------------------------------------------------------- worked solutions


@pytest.mark.parametrize("task", sorted(SMALL))
def test_worked_solutions_end_in_an_answer_that_scores_one(task):
    found = generate(TaskSpec(task, SMALL[task]), 100, seed=0)
    assert all(p.worked.count("#") == 1 for p in found)
    assert reasoning_gym_reward(found, [p.worked for p in found]) == [1.0] * 100
    assert worked.STEPS.keys() < SMALL.keys()


@pytest.mark.parametrize("task", ["chain_sum", "products", "gcd", "lcm", "base_conversion"])
def test_every_equation_of_a_worked_solution_holds(task):
    for p in generate(TaskSpec(task, SMALL[task]), 100, seed=0):
        for step in filter(None, p.worked.split("#")[0].split(";")):
            left, right = step.split("=")
            value = int(eval(left))
            if "r" in right:
                quotient, remainder = map(int, right.split("r"))
                dividend, divisor = map(int, left.split("/"))
                assert divmod(dividend, divisor) == (quotient, remainder)
            else:
                assert value == int(right)


def test_worked_solutions_as_documented():
    def steps(task, **metadata):
        return worked.worked(task, {"answer": "!", "metadata": metadata})

    assert steps("chain_sum", expression="12 + 34 - 5") == "12+34=46;46-5=41#!"
    assert steps("products", expression="23 * 45") == "23*40=920;23*5=115;920+115=1035#!"
    assert steps("gcd", numbers=[18, 48]) == "48%18=12;18%12=6;12%6=0#!"
    assert steps("spell_backward", word="sun") == "s;us;nus#!"
    assert steps("count_bits", number=13) == "13 1;6 1;3 2;1 3#!"
    assert steps("a task without a function") == "#!"
    assert worked.worked("chain_sum", {"answer": None, "metadata": {}}) == ""


# ---------------------------------------------------------------- tokenizers


def test_ascii_tokenizer_round_trip_and_errors():
    tokenizer = AsciiTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    text = "".join(map(chr, range(32, 127))) + "\n\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(np.array([0, *tokenizer.render("hi"), *tokenizer.end_ids])) == "hi"
    assert tokenizer.render("hi") == [104, 105, 2]
    with pytest.raises(ValueError, match=r"character 'é' \(U\+00E9\), number 3 of 'café'"):
        tokenizer.encode("café")
    with pytest.raises(ValueError, match="special meaning"):
        tokenizer.encode("end\x03")
    assert tokenizer.decode([53, 128]) == "5\ufffd"  # an id that only a wider policy has


def test_phrases_are_one_token_each_and_change_no_text():
    tokenizer = AsciiTokenizer(["What is ", "What is the ", "?"])
    assert tokenizer.vocab_size == 131
    assert tokenizer.encode("What is the sum? What is") == [
        *(129, 115, 117, 109, 130, 32),
        *map(ord, "What is"),
    ]
    text = "What is (a.b)? What is the end?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for wrong in (["a", "a"], [""]):
        with pytest.raises(ValueError, match="distinct and not empty"):
            AsciiTokenizer(wrong)


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("count", [1, 7, 100])
def test_each_prompt_once_an_epoch_though_batches_cross_its_end(count):
    prompts = PromptSet(problems(count), AsciiTokenizer(), 99, seed=0)
    batch_size, epochs = 3, 6
    order = [p for step in range(count * epochs // batch_size) for p in prompts.batch(step, 3)]
    assert [p.index for p in order] == list(range(count * epochs))
    expected = {p.question for p in problems(count)}
    shuffles = set()
    for epoch in range(epochs):
        questions = [p.problem.question for p in order[epoch * count : (epoch + 1) * count]]
        assert len(questions) == len(expected) and set(questions) == expected
        shuffles.add(tuple(questions))
    assert count == 1 or len(shuffles) == epochs


def test_order_is_a_function_of_data_seed_and_index(splits):
    def questions(seed, indices):
        prompts = PromptSet(splits["train"], AsciiTokenizer(), 99, seed)
        return [prompts[i].problem.question for i in indices]

    forward = questions(5, range(250))
    assert questions(5, range(249, -1, -1)) == forward[::-1]  # random access equals sequential
    assert questions(5, [240, 3]) == [forward[240], forward[3]]
    assert questions(6, range(250)) != forward
    prompts = PromptSet(splits["train"], AsciiTokenizer(), 99, 5)
    assert [p.problem.question for p in prompts.batch(7, 8)] == forward[56:64]


def test_prompts_are_rendered_and_tasks_mixed(splits, tmp_path):
    bits = build(TaskSpec("count_bits", {"max_n": 999}), {"train": 100}, 0, tmp_path)["train"]
    prompts = PromptSet(splits["train"] + bits, AsciiTokenizer(), 99, seed=0)
    batch = prompts.batch(0, 40)
    assert 10 < sum(p.problem.task == "count_bits" for p in batch) < 30
    for prompt in batch:
        assert prompt.tokens.dtype == np.int32
        assert AsciiTokenizer().decode(prompt.tokens) == prompt.problem.question


def test_long_prompts_are_dropped_counted_and_reported_once(caplog):
    data = [problem("x" * length) for length in range(20)]
    with caplog.at_level(python_logging.WARNING, logger="absl"):
        prompts = PromptSet(data, AsciiTokenizer(), max_prompt_length=10, seed=0)
    assert (len(prompts), prompts.dropped) == (10, 10)
    assert max(len(p.tokens) for p in prompts.batch(0, 10)) == 10
    messages = [m for m in caplog.messages if "dropped" in m]
    assert messages == ["prompts longer than 10 tokens dropped: 10 of 20"]


@pytest.mark.parametrize("data", [[], [problem("x" * 50)]])
def test_no_prompt_left_is_an_error(data):
    with pytest.raises(ValueError, match="none is left"):
        PromptSet(data, AsciiTokenizer(), 10, seed=0)
    with pytest.raises(ValueError, match="none is left"):
        WorkedSet(data, AsciiTokenizer(), 10, 10, seed=0)


def test_negative_seeds_and_indices_are_errors():
    with pytest.raises(ValueError, match="seed=-1"):
        PromptSet(problems(3), AsciiTokenizer(), 99, seed=-1)
    with pytest.raises(IndexError, match="-2"):
        PromptSet(problems(3), AsciiTokenizer(), 99, seed=0)[-2]


def test_fingerprint_notices_changed_data_template_and_answers():
    class OtherTemplate(AsciiTokenizer):
        def render(self, question):
            return super().render("Q: " + question)

    data = problems(5)
    answer = [*data[:4], Problem("chain_sum", data[4].question, "2", "", "{}")]
    sets = [
        PromptSet(data, AsciiTokenizer(), 99, seed=0),
        PromptSet(data[:4], AsciiTokenizer(), 99, seed=0),
        PromptSet(data[::-1], AsciiTokenizer(), 99, seed=0),
        PromptSet(answer, AsciiTokenizer(), 99, seed=0),
        PromptSet(data, OtherTemplate(), 99, seed=0),
    ]
    assert len({s.fingerprint for s in sets}) == len(sets)
    assert PromptSet(problems(5), AsciiTokenizer(), 99, seed=1).fingerprint == sets[0].fingerprint
    assert re.fullmatch("[0-9a-f]{16}", sets[0].fingerprint)


def test_padding_sides_masks_and_errors():
    rows = [[1, 2, 3], [], np.array([4])]
    tokens, mask = left_pad(rows, 4, pad_id=9)
    np.testing.assert_array_equal(tokens, [[9, 1, 2, 3], [9, 9, 9, 9], [9, 9, 9, 4]])
    np.testing.assert_array_equal(mask, tokens != 9)
    tokens, mask = right_pad(rows, 3, pad_id=9)
    np.testing.assert_array_equal(tokens, [[1, 2, 3], [9, 9, 9], [4, 9, 9]])
    np.testing.assert_array_equal(mask, tokens != 9)
    assert tokens.dtype == np.int32 and mask.dtype == bool
    assert left_pad([], 3, 0)[0].shape == (0, 3)
    with pytest.raises(ValueError, match="row 0 has 3 tokens, more than width=2"):
        left_pad(rows, 2, 0)


def test_worked_batches_teach_the_solution_and_the_end(splits):
    tokenizer = AsciiTokenizer()
    examples = WorkedSet(splits["cold_start"], tokenizer, 80, 30, seed=0)
    batch = examples.batch(3, 8)
    assert batch.prompts.shape == batch.prompt_mask.shape == (8, 80)
    assert batch.responses.shape == batch.response_mask.shape == (8, 30)
    by_question = {p.question: p for p in splits["cold_start"]}
    for prompt, prompt_mask, response, response_mask in zip(*batch, strict=True):
        p = by_question[tokenizer.decode(prompt[prompt_mask])]
        tokens = response[response_mask]
        assert tokens[-1] == tokenizer.end_ids[0] and prompt_mask[-1]
        assert tokenizer.decode(tokens) == p.worked
        assert extract_answer(p.worked) == p.answer
    np.testing.assert_array_equal(examples.batch(3, 8).responses, batch.responses)


def test_worked_examples_that_do_not_fit_are_dropped_and_counted():
    data = [problem("q", "12345#1"), problem("q", "123456#1"), problem("q" * 9), problem("q", "")]
    examples = WorkedSet(data, AsciiTokenizer(), prompt_length=5, response_length=8, seed=0)
    assert (len(examples), examples.dropped) == (1, 3)
    assert examples.batch(0, 1).response_mask.all()
