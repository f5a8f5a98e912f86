"""A 0.8 M-parameter Qwen3-MoE learns two reasoning-gym tasks by GSPO.

Command:   python -m gspo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
Hardware:  2 CPU cores, 3 GiB
Time:      5 to 8 minutes
Expected:  avg@8 on held-out problems up by 31 to 48 points on both tasks (seeds 1, 2, 3)
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The quickstart."""
    c = ConfigDict()
    c.seed = 1  # of weights, data and sampling
    c.steps = 80  # rollouts, each followed by its updates
    c.fused_steps = 0  # 0: a checkpoint between rollout and update; n: n steps in one program
    c.init_from = ""  # a Hugging Face Qwen3-MoE folder, or a run, to start from; "": random
    c.stages = ()  # changes from a step on, such as dict(start=40, response_length=120,
    # temperature=0.8, learning_rate=1e-4, tasks=dict(count_bits=dict(max_n=80000)), data_seed=2)
    c.shuffle_rewards = False  # the control: rewards permuted over the batch teach nothing

    c.policy = ConfigDict()
    c.policy.vocab_size = 136  # at least the tokenizer's
    c.policy.hidden_size = 128
    c.policy.num_layers = 3
    c.policy.num_heads = 4
    c.policy.num_kv_heads = 2
    c.policy.head_dim = 32
    c.policy.num_experts = 8
    c.policy.experts_per_token = 2
    c.policy.expert_width = 64
    c.policy.max_positions = 512  # the context: prompt and response must fit
    c.policy.rope_theta = 10000.0  # base of the rotary frequencies
    c.policy.compute_dtype = "float32"  # or "bfloat16"; parameters are always float32
    c.policy.reduce_dtype = "float32"  # or "bfloat16": gradients, added up over data shards
    c.policy.remat = False  # recompute layers in the backward pass instead of storing them
    c.policy.unroll = 3  # layers per iteration of the scan: more is faster and compiles longer

    c.mesh = ConfigDict()  # devices along each axis
    c.mesh.fsdp = 1
    c.mesh.expert = 1
    c.mesh.tensor = 1

    c.data = ConfigDict()
    c.data.tasks = ConfigDict()  # reasoning-gym tasks with their parameters
    c.data.tasks.count_bits = dict(max_n=8000)
    c.data.tasks.spell_backward = dict(min_word_len=5, max_word_len=9)
    c.data.cold_start = 1000  # problems a task in each split; no question is in two
    c.data.train = 1500
    c.data.heldout = 200
    c.data.seed = None  # of the problems and their order; None: seed
    c.data.dir = "runs/data"  # built once
    c.data.tokenizer = "ascii"  # a token a character
    c.data.phrases = (  # and one for each of these, wherever they occur
        "How many 1 bits are there in the binary representation of the number ",
        "Spell this word backward (example: sun -> nus): ",
    )

    c.cold_start = ConfigDict()  # supervised training on worked solutions; steps 0: none
    c.cold_start.steps = 400
    c.cold_start.batch = 32
    c.cold_start.learning_rate = 3e-3
    c.cold_start.warmup = 50

    c.rollout = ConfigDict()
    c.rollout.prompts = 32  # a step
    c.rollout.group_size = 8  # responses a prompt
    c.rollout.prompt_length = 12  # tokens; longer prompts are dropped
    c.rollout.response_length = 88  # tokens; longer responses are cut
    c.rollout.slots = 64  # responses decoded at once
    c.rollout.temperature = 1.0
    c.rollout.attempts = 1  # more: groups without signal are replaced, so often at most
    c.rollout.tool = ""  # what may write into responses, such as gspo_jax.tools:calculator
    c.rollout.weights = ""  # the sampler's: "float32", "bfloat16", "int8"; "": as compute_dtype

    c.reward = ConfigDict()  # functions as "package.module:function"
    c.reward.text = "gspo_jax.rewards.text:reasoning_gym_reward"  # of problems and texts
    c.reward.tokens = (
        ""  # in training instead, on the devices: gspo_jax.rewards.tokens:exact_answer
    )
    c.reward.workers = 1  # processes that judge texts; 0: this one, without a time limit
    c.reward.timeout = 10.0  # seconds for a text, then its reward is missing
    c.reward.turns = 0  # judge responses at the end of that many turns too: advantages by turn

    c.objective = ConfigDict()  # None: as the method was published
    c.objective.method = "gspo"  # or any other of objectives.METHODS
    c.objective.clip_low = None  # the clip range: distances from 1
    c.objective.clip_high = None
    c.objective.dual_clip = 0.0  # least multiple of a negative advantage, such as 3; 0: none
    c.objective.advantage_scale = None  # "group", "batch", "none" or "others" (leave-one-out)
    c.objective.std_floor = 0.02  # groups whose rewards deviate less have advantage 0
    c.objective.balance_coef = 1e-3  # load-balancing loss of the experts
    c.objective.kl = "k3"  # estimator of the divergence from the cold start
    c.objective.kl_coef = 0.0
    c.objective.replay = ""  # experts replayed: "R2", of the scoring pass; "R3", of the sampler
    c.objective.mismatch = ConfigDict()  # of sampler and trainer; 0: no correction
    c.objective.mismatch.old_logps = "scored"  # or "sampler": its own, without a scoring pass
    c.objective.mismatch.weight_cap = 0.0  # of a token's importance weight, such as 2
    c.objective.mismatch.band = 0.0  # for a response's mean importance ratio, such as 1e-3
    c.objective.mismatch.off_policy = 0.0  # mean fall of log-probability, where A < 0
    c.objective.overlong = ConfigDict()
    c.objective.overlong.buffer = 0  # last tokens over which a penalty grows; 0: none
    c.objective.overlong.penalty = 1.0  # at the limit
    c.objective.overlong.untrained = False  # responses that were cut are not trained on

    c.critic = ConfigDict()  # of method "ppo"
    c.critic.learning_rate = 2e-4
    c.critic.warmup = 8  # updates
    c.critic.discount = 1.0
    c.critic.trace = 0.95  # lambda of GAE
    c.critic.clip = 0.2  # how far a value may move in the updates of one rollout

    c.updates = ConfigDict()
    c.updates.minibatches = 4  # updates a rollout
    c.updates.micro_batch = 8  # rows of response_length tokens in one forward and backward pass
    c.updates.logps_chunk = 0  # response positions whose logits exist at once; 0: all

    c.optimizer = ConfigDict()  # AdamW
    c.optimizer.learning_rate = 2e-4
    c.optimizer.warmup = 8  # updates
    c.optimizer.decay = 0  # updates after those, along half a cosine; 0: the rate stays
    c.optimizer.final = 0.1  # the part of the rate that it ends at
    c.optimizer.weight_decay = 0.0
    c.optimizer.max_grad_norm = 1.0

    c.evaluation = ConfigDict()
    c.evaluation.every = 20  # steps; 0: at the start and the end only
    c.evaluation.samples = 8  # k of avg@k and pass@k

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 10  # steps; the rollout is saved where the state is
    c.checkpoint.keep = 2
    return c
