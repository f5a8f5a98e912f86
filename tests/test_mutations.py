"""The tests themselves under test: each mistake of mutations.py turns them red."""

from pathlib import Path

import pytest

from mutations import MUTATIONS, ROOT, by_file, copy, plant, python, run_tests, survived


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Where compiled programs are kept: a mutation recompiles only what it changes."""
    return tmp_path_factory.mktemp("cache")


def test_every_mutation_still_applies():
    assert {mutation.item for mutation in MUTATIONS} == {
        *map(str, range(1, 44)),
        *("9a", "KL", "PPO", "tool", "turns", "refill", "stages", "rate", "S", "BITS"),
    }
    for mutation in MUTATIONS:
        assert plant(mutation, ROOT) != (ROOT / mutation.file).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("tests", by_file(), ids=lambda tests: tests[0].split("::")[0])
def test_a_copy_without_a_mistake_is_green(tests, tmp_path, cache):
    folder = copy(tmp_path / "copy")
    where = python(folder, cache, "-c", "import gspo_jax; print(gspo_jax.__file__)").stdout
    assert Path(where.strip()) == folder / "gspo_jax" / "__init__.py"
    result = run_tests(folder, cache, *tests)
    assert result.returncode == 0, result.stdout
    assert survived(result)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"item {m.item}, {m.what}")
def test_a_planted_mistake_is_caught(mutation, tmp_path, cache):
    folder = copy(tmp_path / "copy")
    (folder / mutation.file).write_text(plant(mutation, ROOT))
    result = run_tests(folder, cache, mutation.test)
    assert not survived(result), result.stdout
