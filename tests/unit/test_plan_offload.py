"""What is moved out of memory, in the arithmetic of `plan` and in a simulated step."""

import dataclasses

import pytest

from mpizero.collectives.links import Cluster, Link, place
from mpizero.errors import ArgumentError, ArgumentTypeError
from mpizero.plan import (
    DISK,
    HOST,
    STAGES,
    Carriers,
    Limits,
    ModelShape,
    Moved,
    Setup,
    UnitShape,
    advice,
    equal_units,
    step_of,
    widths,
)
from mpizero.plan.instructions import POST, WAIT
from mpizero.plan.memory import part_of, split_state
from mpizero.plan.program import program_of
from mpizero.plan.simulation import simulate_step
from mpizero.plan.step import PHASES
from mpizero.plan.times import Network, Times, compute_seconds, times_of
from mpizero.plan.training import Speeds, Training, setup_of

BF16 = widths("bf16")
UNIT = 64 * 4 * 4096
"""Elements of a unit: shards are whole blocks, and groups cut where nothing is left over."""
MODEL = equal_units(4 * UNIT, 4)
ALL = {"optimizer": DISK, "params": DISK}
FREE = Link(alpha=0.0, beta=0.0)
BYTES_PER_PARAMETER = [
    # Of a shard, with Adam: parameters, gradients, optimizer in memory; the same moved.
    ("bf16", {"optimizer": DISK}, (2, 4, 0), (0, 0, 12)),
    ("fp32", {"optimizer": DISK}, (4, 4, 0), (0, 0, 8)),
    ("bf16", ALL, (0, 4, 0), (2, 0, 12)),
    ("fp32", ALL, (0, 4, 0), (4, 0, 8)),
    ("bf16", {"params": DISK}, (0, 4, 12), (2, 0, 0)),
    ("bf16", {"optimizer": HOST}, (2, 0, 0), (2, 4, 12)),
    ("fp32", {"optimizer": HOST}, (4, 0, 0), (4, 4, 12)),
    ("bf16", {"optimizer": HOST, "params": HOST}, (0, 0, 0), (2, 4, 12)),
]


def setup(moved, ranks=4, precision="bf16", stage=3, **words):
    on_gpu = moved is not None and HOST in moved.values()
    offload = None if moved is None else Moved(**moved)
    return Setup(ranks=ranks, stage=stage, widths=widths(precision), on_gpu=on_gpu, offload=offload, **words)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("precision", "moved", "near", "far"), BYTES_PER_PARAMETER)
def test_bytes_per_parameter_of_a_shard(ranks, precision, moved, near, far):
    step = step_of(MODEL, setup(moved, ranks, precision, node_shared=False))
    shard = MODEL.numel / ranks
    state = step.phases["between steps"].state
    found = [(part.parameters, part.gradients, part.optimizer) for part in (state, step.outside)]
    assert found[0] == pytest.approx([per * shard for per in near], abs=100)  # counters of steps
    assert found[1] == pytest.approx([per * shard for per in far])
    formula = split_state(
        part_of(MODEL.numel, ranks, 3, working_bytes=4 if precision == "fp32" else 2, params_moved="params" in moved),
        2,
        Moved(**moved),
    )
    for part, kinds in zip(formula, found, strict=True):
        assert (part.parameters, part.gradients, part.optimizer) == pytest.approx(kinds, abs=100)


def test_full_parameters_stay_below_stage_3():
    for stage in (1, 2):
        step = step_of(MODEL, setup({"optimizer": DISK}, stage=stage, node_shared=False))
        assert step.phases["between steps"].state.parameters == 2 * MODEL.numel
        shared = step_of(MODEL, setup({"optimizer": DISK}, stage=stage))
        assert shared.phases["between steps"].state.parameters == 2 * MODEL.numel / 4
        assert shared.outside.optimizer == step.outside.optimizer == 12 * MODEL.numel / 4


def test_three_groups_are_in_memory():
    small = Moved(optimizer=DISK, group_bytes=12 * 2048 * 5)
    step = step_of(MODEL, Setup(ranks=4, widths=BF16, on_gpu=False, offload=small))
    assert {step.phases[phase].groups for phase in PHASES} == {3 * small.group_bytes}
    whole = step_of(MODEL, setup({"optimizer": DISK, "group_bytes": 32 << 20}))
    assert whole.phases["step"].groups == 3 * 12 * MODEL.numel / 4  # all of it is less than 32 MiB
    assert step_of(MODEL, setup({"params": DISK})).phases["step"].groups == 0
    assert step_of(MODEL, setup({"optimizer": HOST})).phases["step"].groups == 0


@pytest.mark.parametrize(
    ("precision", "moved", "carried"),
    [
        # Bytes of a shard's element: by gathers, in the step read and written.
        ("bf16", {"optimizer": DISK}, (0, 12, 12)),
        ("fp32", {"optimizer": DISK}, (0, 8, 8)),
        ("bf16", ALL, (4, 12, 14)),
        ("fp32", ALL, (8, 12, 12)),
        ("bf16", {"params": DISK}, (4, 0, 2)),
        ("bf16", {"optimizer": HOST}, (0, 2, 2)),
        ("bf16", {"optimizer": HOST, "params": HOST}, (4, 0, 2)),
    ],
)
def test_bytes_that_a_step_carries(precision, moved, carried):
    for ranks in (1, 4):
        step = step_of(MODEL, setup(moved, ranks, precision, reshard_after_forward=True, node_shared=False))
        found = (step.carried.gathered, step.carried.read, step.carried.written)
        assert found == tuple(per * MODEL.numel / ranks for per in carried)
        reduced = sum(act.carried for act in step.acts if act.kind == "reduce")
        assert reduced == (found[2] if HOST in moved.values() else 0)


def network(job):
    return Network(job, FREE, FREE, wires=1)


def test_the_step_over_a_disk_is_exposed_whole():
    job = setup({"optimizer": DISK}, stage=2)
    step = step_of(MODEL, job)
    times = times_of(step, network(job), compute_seconds(MODEL, 100, 1e9), per_byte=1e-6)
    assert times.streaming == times.exposed == times.carrying == pytest.approx(12 * MODEL.numel / 4 * 1e-6)
    assert times.least_exposed == times.streaming
    nothing = times_of(step_of(MODEL, setup(None, stage=2)), network(job), (1.0,) * 5, per_byte=1e-6)
    assert (nothing.exposed, nothing.streaming, nothing.carrying) == (0, 0, 0)


def test_parameters_are_read_one_unit_ahead():
    """With slow computation the first unit's read is waited for, and in backward that at which it turns round and the
    one that its gather ahead begins; with none all are."""
    job = setup(ALL, prefetch=1)
    step = step_of(MODEL, job)
    each = 2 * UNIT / 4 * 1e-6
    assert times_of(step, network(job), per_byte=1e-6).carrying == pytest.approx(8 * each + 12 * 4 * UNIT / 4 * 1e-6)

    def waited(seconds):
        times = times_of(step, network(job), (seconds,) * 4 + (0.0,), per_byte=1e-6)
        return (times.exposed - times.streaming) / each

    assert waited(1e-12) == pytest.approx(8, abs=1e-3)
    assert waited(10 * each) == pytest.approx(4)  # two gathers of each phase are begun before there is computation
    assert waited(0.5 * each) > 4


def test_gradients_go_to_the_host_beside_backward():
    job = setup({"optimizer": HOST}, stage=2, bucket_bytes=1)
    step = step_of(MODEL, job)
    each, back = 2 * UNIT / 4 * 1e-6, 2 * MODEL.numel / 4 * 1e-6
    slow = times_of(step, network(job), (10 * each,) * 5, per_byte=1e-6)
    assert slow.streaming == pytest.approx(back)
    assert slow.exposed == pytest.approx(each + back)  # the last gradients, and all that comes back
    quick = times_of(step, network(job), (1e-12,) * 5, per_byte=1e-6)
    assert quick.exposed == pytest.approx(4 * each + back)


def test_a_nodes_disk_serves_all_its_ranks():
    carriers = Carriers(disk=1e-9, host=1e-10)
    assert carriers.per_byte(Moved(optimizer=DISK), 4) == pytest.approx(4e-9)
    assert carriers.per_byte(Moved(optimizer=HOST), 4) == 1e-10
    assert carriers.per_byte(None, 4) == 0


def test_what_a_stage_can_move():
    both = Moved(**ALL)
    assert [both.at(stage) for stage in STAGES] == [None, Moved(optimizer=DISK), Moved(optimizer=DISK), both]
    assert [Moved(params=DISK).at(stage) for stage in (1, 2)] == [None, None]


def test_advice_knows_of_offload():
    model = equal_units(7 * 10**9, 32)

    def said(memory, on_gpu, moved=None):
        steps = {}
        for stage in STAGES:
            offload = Moved(**moved).at(stage) if moved else None
            job = Setup(ranks=8, stage=stage, widths=BF16, on_gpu=on_gpu, node_shared=None, offload=offload)
            steps[stage] = step_of(model, job)
        return " ".join(advice(model, steps, Limits(memory=memory)))

    assert "On 8 ranks stage 3 fits with --offload optimizer=host." in said(12e9, on_gpu=True)
    assert "fits with --offload optimizer=disk." in said(12e9, on_gpu=False)
    assert "fits with --offload optimizer=disk,params=disk." in said(6e9, on_gpu=False)
    assert "fits with --offload" not in said(1e9, on_gpu=False)
    assert said(6e9, on_gpu=False, moved=ALL) == ""
    assert "Stage 3 fits from 16 ranks on" in said(4.1e9, on_gpu=False, moved=ALL)
    step = step_of(model, setup({"optimizer": DISK}, 8))
    times = Times(communication=1.0, least_exposed=1.0, compute=1.0, exposed=9.0, streaming=8.0)
    assert "most of it for the disk" in advice(model, {3: step}, Limits(), times)[0]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (Moved, "offload must be of optimizer or params"),
        (lambda: Moved(optimizer="tape"), r"offload of optimizer must be disk or host \(got 'tape'\)"),
        (lambda: Moved(optimizer=DISK, group_bytes=10), "group_bytes must be 65536 or more"),
        (lambda: setup({"optimizer": DISK}, stage=0), "offload must be None at stage 0, where nothing is cut"),
        (lambda: setup(ALL, stage=2), "offload of params must be left out below stage 3"),
        (lambda: setup({"optimizer": DISK, "params": HOST}), "offload must be to one place"),
        (lambda: setup({"params": HOST}), "offload to host memory must be of optimizer and params"),
        (lambda: setup(ALL, node_shared=True), "node_shared must be False or None where parameters are moved"),
        (lambda: Setup(ranks=4, offload=Moved(**ALL)), "offload must be to host for a model on a GPU"),
        (lambda: Setup(ranks=4, on_gpu=False, offload=Moved(optimizer=HOST)), "offload must be to disk for a model"),
        (lambda: Training(model=MODEL, offload=Moved(**ALL)), "offload must be to host for a model on a GPU"),
    ],
)
def test_what_cannot_be_moved(build, text):
    with pytest.raises(ArgumentError, match=text):
        build()


def test_a_group_of_half_a_byte():
    with pytest.raises(ArgumentTypeError, match="group_bytes must be a whole number"):
        Moved(optimizer=DISK, group_bytes=1e6)


def simulated(moved, *, ranks=2, carry=1e-9, update=0.0, stage=3, flops=1e12, **options):
    """Of four units without network costs: a unit's forward takes 1 ms at 1e12 operations per second."""
    where = Cluster(size=ranks, nodes=place(ranks, 1), local=FREE, remote=FREE)
    tokens = 1e-3 * 1e12 / (2 * UNIT)
    on_gpu = moved is not None and HOST in moved.values()
    offload = None if moved is None else Moved(**moved)
    work = Training(
        model=MODEL, stage=stage, tokens=tokens, on_gpu=on_gpu, offload=offload, **{"bucket_bytes": 1, **options}
    )
    return simulate_step(work, where, Speeds(flops=flops, carry=carry, update=update))


@pytest.mark.parametrize("update", [0.0, 1e-7])
def test_a_simulated_step_streams_beside_its_update(update):
    plain, moved = simulated(None, update=update), simulated({"optimizer": DISK}, update=update, stage=2)
    streaming, updating = 12 * MODEL.numel / 2 * 1e-9, update * MODEL.numel / 2
    assert moved.seconds == pytest.approx(plain.seconds - updating + max(streaming, updating))
    assert moved.compute + moved.exposed + moved.idle == pytest.approx(moved.seconds)
    rows = {(one.kind, one.link): one.sent for one in moved.traffic if one.carried}
    assert rows == dict.fromkeys([("stream", "disk read"), ("stream", "disk write")], 12 * MODEL.numel / 2)
    assert moved.communication == 0
    assert moved.outside.optimizer == 12 * MODEL.numel / 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("carry", [1e-10, 1e-9, 1e-8])
@pytest.mark.parametrize("moved", [ALL, {"optimizer": HOST, "params": HOST}, {"optimizer": HOST}])
def test_simulated_and_planned_waits_agree(ranks, carry, moved):
    """Both follow the same acts, over a network that is free."""
    step = simulated(moved, ranks=ranks, carry=carry)
    work = Training(model=MODEL, on_gpu=HOST in moved.values(), offload=Moved(**moved), bucket_bytes=1)
    job = setup_of(work, Cluster(size=ranks, nodes=place(ranks, 1), local=FREE, remote=FREE))
    planned = times_of(step_of(MODEL, job), network(job), (1e-3,) * 4 + (0.0,), per_byte=carry)
    assert step.seconds == pytest.approx(planned.compute + planned.exposed, rel=1e-6)
    carried = step_of(MODEL, job).carried
    ways = {name: sum(one.sent for one in step.traffic if one.link in links) for name, links in LINKS.items()}
    assert ways["in"] == carried.gathered + carried.read
    assert ways["out"] == carried.written


def test_gradients_go_to_the_host_after_each_reduction():
    """As they were sent: 2 bytes each, or 4 where `no_sync` has kept sums in fp32."""
    cases = ({}, {"backwards": 2}, {"backwards": 2, "no_sync": True})
    steps = [simulated({"optimizer": HOST}, **case) for case in cases]
    found = [sum(one.sent for one in step.traffic if one.link == "to host") for step in steps]
    assert found == [width * MODEL.numel / 2 for width in (2, 4, 4)]


LINKS = {"in": ("disk read", "from host"), "out": ("disk write", "to host")}


def test_bytes_of_a_simulated_rank():
    for options in ({}, {"node_shared": True}, {"backwards": 2, "no_sync": True}, {"group": 2}, {"prefetch": 0}):
        where = Cluster(size=4, nodes=place(4, 4), local=FREE, remote=FREE)
        work = Training(model=MODEL, **options)
        step = simulate_step(work, where, Speeds(flops=1e12))
        planned = step_of(MODEL, setup_of(work, where))
        held = max(phase.total - phase.state.total for phase in planned.phases.values())
        assert step.buffers == held > 0


def order_of_plan(model, job):
    """Gathers and reductions as they are begun, and how many of the latter have been waited for by then."""
    acts = [
        act
        for act in step_of(model, job).acts
        if act.kind in {"gather", "reduce", "reduced"} and (act.moves or act.unit < 0)
    ]
    names = [unit.name or "root" for unit in model.units]
    return [act.kind if act.kind == "reduced" else f"{act.kind} {names[act.unit]}" for act in acts]


def order_of_program(work, where):
    program = program_of(work, where, Speeds(flops=1e9), group=work.group or where.size, choice="auto")
    found = []
    for item in program.instructions:
        label = program.jobs[item.job].label if item.job >= 0 else ""
        kind, _, names = label.partition(" ")
        if item.kind == POST and kind in {"gather", "reduce"}:
            found.append(f"{kind} {names.partition(' to ')[0]}")
        elif item.kind == WAIT and kind == "reduce":
            found.append("reduced")
    return found


OPTIONS = (
    {"bucket_bytes": 1},
    {"bucket_bytes": 5 * UNIT},
    {"bucket_bytes": 1, "prefetch": 2, "backwards": 2},
    {"bucket_bytes": 1, "prefetch": 0, "backwards": 2, "no_sync": True},
    {"bucket_bytes": 1, "reshard_after_forward": True, "working_bytes": 4},
    {"bucket_bytes": 1, "reshard_after_forward": False, "on_gpu": False},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_plan_and_program_have_one_order(stage, options):
    """What is begun after what, and when a rank waits for its oldest reduction, at stage 0 on a GPU too."""
    root = UnitShape(name="", parameters=(("w", (64, 64)),), flops=0.0)
    model = ModelShape(name="m", units=(*MODEL.units[:-1], root))
    where = Cluster(size=4, nodes=place(4, 1), local=FREE, remote=FREE)
    work = Training(model=model, stage=stage, **options)
    if work.backwards > 1 and not work.no_sync:  # a plan's backwards but the last are inside no_sync
        work = dataclasses.replace(work, backwards=1)
    assert order_of_program(work, where) == order_of_plan(model, setup_of(work, where))
