"""Configs: every file type-checks its whole step, and whatever is wrong is said before it runs."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec
from ml_collections import ConfigDict

from gspo_jax.cold_start import supervised_step
from gspo_jax.config import differences, from_config_dict, load, to_dict
from gspo_jax.data.prompts import WorkedBatch
from gspo_jax.data.tokenizers import AsciiTokenizer
from gspo_jax.evaluate import sampling_config
from gspo_jax.model.transformer import Policy
from gspo_jax.rollout import sample
from gspo_jax.scoring import score
from gspo_jax.sharding import DATA, abstract_mesh
from gspo_jax.step import update
from gspo_jax.train_state import init_state, make_optimizer

CONFIGS = sorted(Path("configs").glob("*.py"))
TINY = "tests/tiny_run.py"
SPLIT = ["--config.mesh.fsdp=2", "--config.mesh.expert=2", "--config.mesh.tensor=2"]


def types(tree):
    """Shapes, dtypes and split dimensions of the leaves."""

    def split(x):
        spec = x.sharding.spec if x.sharding else ()
        return {i: axes for i, axes in enumerate(spec) if axes}

    return [(x.shape, x.dtype, split(x)) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("mesh", [[], SPLIT], ids=["its own mesh", "2x2x2"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_whole_step_of_every_config_type_checks_without_devices(path, mesh):
    config = load(str(path), mesh)
    r, m = config.rollout, config.mesh
    optimizer = make_optimizer(config.optimizer)
    abstract = abstract_mesh(m.fsdp, m.expert, m.tensor)
    tokenizer = AsciiTokenizer(config.data.phrases)
    sampling = sampling_config(config, tokenizer)

    def rows(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(abstract, Spec(DATA)))

    with jax.sharding.use_abstract_mesh(abstract):
        state = jax.eval_shape(lambda: init_state(Policy(config.policy, nnx.Rngs(0)), optimizer))
        worked = [
            rows(dtype, config.cold_start.batch, length)
            for length in (r.prompt_length, r.response_length)
            for dtype in (jnp.int32, jnp.bool)
        ]
        supervised = functools.partial(supervised_step, balance_coef=0.1, optimizer=optimizer)
        after, _ = jax.eval_shape(supervised, state, WorkedBatch(*worked))
        assert types(after) == types(state)

        prompts = (r.prompts, r.prompt_length)
        rollout = jax.eval_shape(
            functools.partial(sample, config=sampling),
            state.policy,
            rows(jnp.int32, *prompts),
            rows(jnp.bool, *prompts),
            rows(jnp.int32, r.prompts),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        assert rollout.responses.shape == (r.prompts * r.group_size, r.response_length)
        scored = jax.eval_shape(
            functools.partial(score, config=config.for_step), state.policy, rollout
        )
        after, _ = jax.eval_shape(
            functools.partial(update, config=config.for_step, optimizer=optimizer),
            state,
            rollout,
            scored,
        )
        assert types(after) == types(state)


# ---------------------------------------------------------------- what cannot work


def refusal(*overrides):
    """The lines of the error."""
    with pytest.raises(ValueError, match="the config cannot be used") as error:
        load(TINY, overrides)
    return str(error.value).split("\n")[1:]


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ("mesh.fsdp=0", "at least 1"),
        ("policy.num_layers=0", "at least 1"),
        ("rollout.slots=0", "at least 1"),
        ("updates.minibatches=0", "at least 1"),
        ("updates.micro_batch=-1", "at least 1"),
        ("evaluation.samples=0", "at least 1"),
        ("rollout.attempts=0", "at least 1"),
        ("reward.turns=-1", "not be negative"),
        ("checkpoint.every=0", "at least 1"),
        ("checkpoint.keep=0", "at least 1"),
        ("data.train=0", "at least 1"),
        ("data.heldout=0", "at least 1"),
        ("cold_start.batch=0", "at least 1"),
        ("steps=-1", "not be negative"),
        ("policy.num_experts=-8", "not be negative"),
        ("data.cold_start=-1", "not be negative"),
        ("cold_start.learning_rate=-0.1", "not be negative"),
        ("objective.std_floor=-0.1", "not be negative"),
        ("objective.balance_coef=-0.1", "not be negative"),
        ("optimizer.learning_rate=-0.1", "not be negative"),
        ("optimizer.warmup=-1", "not be negative"),
        ("evaluation.every=-1", "not be negative"),
        ("policy.rope_theta=0.0", "above 0"),
        ("policy.norm_eps=0.0", "above 0"),
        ("optimizer.eps=0.0", "above 0"),
        ("optimizer.max_grad_norm=0.0", "above 0"),
        ("policy.hidden_size=33 mesh.fsdp=2", "multiple of mesh.fsdp = 2; 32 or 34"),
        ("policy.vocab_size=201 mesh.tensor=2", "multiple of mesh.tensor = 2; 200 or 202"),
        ("policy.num_heads=6 mesh.tensor=4", "multiple of mesh.tensor = 4; 4 or 8"),
        ("policy.num_kv_heads=2 mesh.tensor=4", "multiple of mesh.tensor = 4; 4 would do"),
        ("policy.num_heads=5", "multiple of policy.num_kv_heads = 2; 4 or 6"),
        ("policy.head_dim=31", "multiple of two rotated halves = 2; 30 or 32"),
        ("policy.sparse_step=0", "at least 1"),
        ("policy.num_experts=9 mesh.expert=2", "multiple of mesh.expert = 2; 8 or 10"),
        ("policy.expert_width=65 mesh.tensor=2", "multiple of mesh.tensor = 2; 64 or 66"),
        ("policy.expert_width=0", "at least 1"),
        ("policy.experts_per_token=5", "[1, policy.num_experts = 4]"),
        ("policy.experts_per_token=0", "[1, policy.num_experts = 4]"),
        ("policy.dense_width=0 policy.num_experts=0", "need it"),
        ("policy.dense_width=33 policy.num_experts=0 mesh.tensor=2", "multiple of mesh.tensor"),
        ("policy.dense_layers=(0,1)", "layers are 0 to 0"),
        ("policy.compute_dtype='float16'", "'float32' or 'bfloat16'"),
        ("policy.reduce_dtype='float16'", "'float32' or 'bfloat16'"),
        ("rollout.weights='int4'", "'float32', 'bfloat16' or 'int8', or '' for"),
        ("policy.grouped_matmul='dense'", "'auto', 'ragged' or 'padded'"),
        ("policy.unroll=0", "at least 1"),
        ("rollout.prompts=7 mesh.fsdp=2", "mesh.fsdp * mesh.expert = 2; 6 or 8"),
        ("updates.minibatches=3", "rollout.group_size=32: must be a multiple of updates.minib"),
        ("rollout.slots=63 mesh.expert=2", "mesh.fsdp * mesh.expert = 2; 62 or 64"),
        ("updates.micro_batch=31 mesh.fsdp=2", "mesh.fsdp * mesh.expert = 2; 30 or 32"),
        ("cold_start.batch=63 mesh.fsdp=2", "mesh.fsdp * mesh.expert = 2; 62 or 64"),
        ("updates.micro_batch=12", "divide the 16 sequences of a minibatch"),
        ("rollout.group_size=1", "take 2 or more"),
        ("rollout.prompt_length=1", "at least 2"),
        ("rollout.prompt_length=60", "exceeds the context, policy.max_positions=64; shorten"),
        ("rollout.temperature=0.0", "above 0"),
        ("objective.clip_low=-0.0003", "give distances from 1"),
        ("objective.clip_low=1.0", "give distances from 1"),
        ("objective.clip_high=-0.0004", "give distances from 1"),
        ("objective.method='gspo2'", "must be one of 'gspo', 'gspo_token', "),
        ("objective.replay='R4'", "must be one of '', 'R2', 'R3'"),
        ("objective.kl='k4'", "must be one of 'k1', 'k2', 'k3'"),
        ("objective.advantage_scale='std'", "must be one of None, 'group', "),
        ("objective.mismatch.old_logps='old'", "must be one of 'scored', 'sampler'"),
        ("objective.mismatch.band=-0.1", "not be negative"),
        ("objective.overlong.buffer=13", "must not exceed rollout.response_length=12"),
        ("objective.dual_clip=1.0", "take 3, or 0"),
        ("critic.trace=1.5", "[0, 1]"),
        ("critic.clip=0.0", "above 0"),
        ("optimizer.b1=1.0", "[0, 1)"),
        ("optimizer.b2=-0.1", "[0, 1)"),
        ("seed=-1", "[0, 2**31)"),
        ("data.seed=-1", "[0, 2**31)"),
        ("optimizer.decay=-1", "not be negative"),
        ("optimizer.final=1.5", "[0, 1]"),
        ("data.tokenizer='bpe'", "'ascii'"),
        ("policy.vocab_size=64", "raise it"),
        ("data.phrases=('a','a')", "distinct"),
        ("data.cold_start=0", "raise it"),
        ("data.tasks={}", "at least one"),
        ("data.tasks={'zzz':{}}", "task name='zzz' is unknown"),
        ("data.tasks={'gcd':{'min_number':2}}", "min_number=2 is unknown; did you mean min_numb"),
        ("data.tasks={'gcd':{'min_numbers':'x'}}", "are refused by reasoning-gym"),
        ("data.tasks={'gcd':{'level':'easy'}}", "task gcd: level='easy' must be an integer"),
    ],
)
def test_what_cannot_work_is_refused_with_key_value_and_remedy(overrides, remedy):
    overrides = overrides.split(" ")
    key, value = overrides[0].split("=", 1)
    lines = refusal(*(f"--config.{o}" for o in overrides))
    said = value.replace(",", ", ") if "{" not in value else ""
    assert any(key in line and said in line and remedy in line for line in lines)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=2.5", "steps=2.5: is float, must be int"),
        ("steps=true", "steps=True: is bool, must be int"),
        ("steps=many", "steps='many': is str, must be int"),
        ("shuffle_rewards=1", "shuffle_rewards=1: is int, must be bool"),
        ("objective.clip_low=tight", "objective.clip_low='tight': is str, must be float"),
        ("objective.clip_low=True", "objective.clip_low=True: is bool, must be float"),
        ("optimizer.learning_rate=1e999", "optimizer.learning_rate=inf: must be a finite number"),
        ("init_from=3", "init_from=3: is int, must be str"),
        ("policy.dense_layers=3", "policy.dense_layers=3: is int, must be tuple[int, ...]"),
        ("policy.dense_layers=(0,'b')", "policy.dense_layers[1]='b': is str, must be int"),
        ("policy=3", "policy=3: a section of keys is wanted"),
        ("data.tasks={'gcd': 3}", "data.tasks.gcd=3: is int, must be collections.abc.Mapping"),
        ("polcy=1", "polcy=1: unknown key; did you mean policy?"),
        ("policy.num_expert=2", "policy.num_expert=2: unknown key; did you mean policy.num_exp"),
        ("zzz=1", "zzz=1: unknown key; known: seed, steps"),
    ],
)
def test_unknown_keys_and_wrong_types_are_refused(override, message):
    (line,) = refusal(f"--config.{override}")
    assert line.strip().startswith(message)


def test_a_missing_key_is_named_with_its_type():
    values = to_dict(load(TINY))
    del values["objective"]["clip_low"]
    with pytest.raises(ValueError, match=r"objective\.clip_low: missing; add it \(float \| None\)"):
        from_config_dict(values)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("seed=x", "objective.clip_lo=1", "policy.num_layers=1.5"), "seed policy. objective."),
        (
            ("rollout.group_size=1", "objective.clip_low=2.0", "optimizer.b1=3.0"),
            "rollout. objective. opt",
        ),
    ],
)
def test_several_problems_are_reported_at_once(overrides, keys):
    lines = refusal(*(f"--config.{o}" for o in overrides))
    for key in keys.split():
        assert any(line.strip().startswith(key) for line in lines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("objective.replay=R3 policy.num_experts=0 policy.dense_width=16", "has no experts"),
        ("objective.replay=R2 objective.mismatch.old_logps=sampler", "take R3"),
        ("objective.mismatch.old_logps=sampler objective.mismatch.band=0.1", "set both to 0"),
        ("objective.method=gmpo objective.dual_clip=3.0", "has no use for it; set it to 0"),
        ("objective.method=ppo objective.mismatch.off_policy=0.1", "has those of tokens; set it"),
        ("objective.method=sapo", "clips nothing; set both to None"),
        ("reward.turns=2 rollout.tool=a:b", "take one of gspo_token, turn_level"),
        ("reward.turns=2 objective.method=grpo", "name rollout.tool, or set it to 0"),
        (
            "reward.turns=2 rollout.tool=a:b objective.method=grpo shuffle_rewards=True",
            "permutes whole responses",
        ),
        (
            "reward.turns=13 rollout.tool=a:b objective.method=grpo",
            "must not exceed rollout.response_length=12",
        ),
        (
            "reward.turns=2 rollout.tool=a:b objective.method=grpo "
            "objective.mismatch.off_policy=0.1",
            "goes by that of a response",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, message):
    (line,) = refusal(*(f"--config.{x}" for x in overrides.split()))
    assert line.strip().startswith(("objective.", "reward.")) and message in line


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "{'start': 0, 'data_seed': 1}",
            "stages[0].start=0: must be above 0; stages come",
        ),
        (
            "{'start': 2, 'data_seed': 1}, {'start': 2, 'data_seed': 2}",
            "stages[1].start=2: must",
        ),
        ("{'start': 2, 'temperature': 1.0}", "stages[0].start=2: changes nothing; remove it"),
        (
            "{'start': 3, 'data_seed': 1}",
            "stages[0].start=3: must be a multiple of fused_steps",
        ),
        ("{'start': 2, 'temperature': 0.0}", "stages[0]: rollout.temperature=0.0: must be above 0"),
        (
            "{'start': 2, 'response_length': 50}",
            "stages[0]: rollout.prompt_length=20: with",
        ),
        (
            "{'start': 2, 'response_length': 0}",
            "stages[0]: rollout.response_length=0: must be",
        ),
        (
            "{'start': 2, 'learning_rate': -1.0}",
            "stages[0]: optimizer.learning_rate=-1.0: must",
        ),
        ("{'start': 2, 'data_seed': -1}", "stages[0]: data.seed=-1: must lie in"),
        ("{'start': 2, 'tasks': {}}", "stages[0]: data.tasks={}: name at least one"),
        (
            "{'start': 2, 'tasks': {'gcd': {'min_x': 2}}}",
            "stages[0]: data.tasks: task gcd: par",
        ),
        ("{'start': 2, 'tasks': 3}", "stages[0].tasks=3: is int, must be collections.abc.Mapping"),
        ("{'start': '2'}", "stages[0].start='2': is str, must be int"),
        (
            "{'start': 2, 'temprature': 1}",
            "stages[0].temprature=1: unknown key; did you",
        ),
        ("{'data_seed': 2}", "stages[0].start: missing; add it (int)"),
        ("3", "stages[0]=3: a section of keys is wanted"),
    ],
)
def test_stages_that_cannot_work_are_refused(stages, message):
    (line,) = refusal("--config.fused_steps=2", f"--config.stages=({stages},)")
    assert line.strip().startswith(message)


def test_what_is_wrong_from_the_beginning_is_not_said_of_every_stage():
    stage = "--config.stages=({'start': 2, 'data_seed': 1},)"
    (line,) = refusal("--config.optimizer.final=2.0", stage)
    assert line.strip().startswith("optimizer.final=2.0")


def test_stages_come_from_a_file_and_survive_json():
    stages = {"start": 2, "tasks": {"gcd": {"max_value": 9}}}, {"start": 3, "temperature": 0.5}
    values = ConfigDict(to_dict(load(TINY)) | {"stages": stages})
    config = from_config_dict(values)
    assert config.at(3).data.tasks == {"gcd": {"max_value": 9}}
    assert from_config_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages=({'start':4,'data_seed':1},)", "start=4: never begins, because .* steps=4"),
        ("objective.clip_low=0.2", "objective.clip_low=0.2: .* the paper uses 3e-4 and 4e-4"),
        ("objective.clip_high=0.01", "objective.clip_high=0.01: .* the paper uses 3e-4 and 4e-4"),
        ("updates.minibatches=1", "updates.minibatches=1: .* the paper uses 4"),
        ("optimizer={'learning_rate':1.0,'decay':6,'final':0.0}", "update 7 of 8 .* raise it, or"),
        ("objective.kl_coef=0.1", "objective.kl_coef=0.1: .* the paper gives GSPO none"),
        ("policy.reduce_dtype=bfloat16", "policy.reduce_dtype='bfloat16': a single data shard"),
    ],
)
def test_what_is_probably_a_mistake_warns(override, message):
    """Item 43."""
    with pytest.warns(UserWarning, match=message):
        load(TINY, [f"--config.{override}"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_come_without_warnings_and_survive_json(path):
    config = load(str(path))
    assert from_config_dict(to_dict(config)) == config


def test_differences_name_every_changed_key():
    old, new = to_dict(load(TINY)), to_dict(load(TINY, ["--config.updates.micro_batch=4"]))
    new["extra"] = 1
    assert differences(old, new) == ["extra: None -> 1", "updates.micro_batch: 8 -> 4"]
    assert differences(old, old) == []


# ---------------------------------------------------------------- overrides


def test_overrides_have_the_types_of_their_notation():
    overrides = [
        "--config.steps=7",
        "--config.objective.clip_low=1e-4",
        "--config.optimizer.weight_decay=1",
        "--config.shuffle_rewards",
        "--config.init_from=some/folder",
        "--config.policy.dense_width=64",  # a key that the file leaves to its default
        "--config.data.tasks.gcd.min_numbers=2",
        "-config.policy.remat=true",
    ]
    config = load(TINY, overrides)
    assert (config.steps, config.objective.clip_low, config.optimizer.weight_decay) == (
        7,
        1e-4,
        1.0,
    )
    assert config.shuffle_rewards and config.policy.remat
    assert (config.init_from, config.policy.dense_width) == ("some/folder", 64)
    assert config.data.tasks["gcd"] == {"min_numbers": 2}


@pytest.mark.parametrize("argument", ["7", "--steps=7", "--config.=7", "config.steps=7"])
def test_arguments_that_are_no_overrides_are_refused(argument):
    with pytest.raises(ValueError, match="unknown argument; values are given as --config.key"):
        load(TINY, [argument])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ValueError, match=r"--config.steps.foo=3: steps is a value"):
        load(TINY, ["--config.steps.foo=3"])


def test_a_config_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="--config=nothing.py: there is no such file"):
        load("nothing.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=r"empty.py: must define get_config\(\)"):
        load(str(tmp_path / "empty.py"))


# ---------------------------------------------------------------- the command line


def command(*arguments):
    """What `python -m gspo_jax.train` prints, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::SyntaxWarning", "-m", "gspo_jax.train", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    return done.stdout + done.stderr, done.returncode


def test_the_command_reports_all_wrong_overrides_in_one_block(tmp_path):
    workdir = tmp_path / "run"
    output, status = command(
        f"--config={TINY}", f"--workdir={workdir}", "--config.polcy=1", "--config.steps=x"
    )
    assert status == 1
    assert output == (
        "error: the config cannot be used:\n"
        "  polcy=1: unknown key; did you mean policy?\n"
        "  steps='x': is str, must be int\n"
    )
    assert not workdir.exists()


def test_the_command_shows_warnings_and_errors_of_the_run_without_a_traceback(tmp_path):
    output, status = command(
        f"--config={TINY}",
        f"--workdir={tmp_path}",
        "--config.objective.clip_low=0.2",
        "--config.mesh.fsdp=2",
    )
    assert status == 1
    first, last = output.strip().split("\n")
    assert first.startswith("warning: objective.clip_low=0.2: ")
    assert last.startswith("error: mesh {'fsdp': 2") and "lower mesh.fsdp" in last
