"""Costs of compiled programs: counted by hand, from small programs and from programs that JAX compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.chips import CHIPS, Chip, chip_of
from heinsen.contrib.hlo_cost import count_costs
from heinsen.contrib.hlo_cost.costs import describe_op_name, group_size
from heinsen.contrib.hlo_cost.hlo import parse_instruction
from heinsen.plan.costs import Operation

GPU = Chip("gpu", "gpu", "GPU", 10**9, 1e9, 1e8, 1e12, 1e11, 1e10, launch=1e-3)
TPU = Chip("tpu", "tpu", "TPU", 10**9, 1e9, 1e8, 6e12)
K = 1024


def program(entry: str, *computations: str) -> str:
    """A module of computations "NAME\\n lines" and an entry of lines."""
    texts = [f"%{name} (p: f32[]) -> f32[] {{\n{body}\n}}" for name, body in (x.split("\n", 1) for x in computations)]
    return "\n\n".join(["HloModule test", *texts, f"ENTRY %main (p: f32[]) -> f32[] {{\n{entry}\n}}", ""])


ADD = "add\n%a = f32[] parameter(0)\n%b = f32[] parameter(1)\nROOT %c = f32[] add(%a, %b)"


def test_a_kernel_reads_its_operands_and_writes_its_results_once():
    costs = count_costs(
        program(
            "%x = f32[256]{0} parameter(0)\n%y = f32[256]{0} parameter(1)\n%z = f32[4,64]{1,0} bitcast(%x)\n"
            "%one = f32[] constant(1)\n%f = f32[256]{0} fusion(%x, %y, %x), kind=kLoop, calls=%inner\n"
            "%g = f32[256]{0} copy(%f)\nROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%f, %g)",
            "inner\n%p = f32[256]{0} parameter(0)\n%q = f32[256]{0} parameter(1)\n%r = f32[256]{0} parameter(2)\n"
            "%s = f32[256]{0} add(%p, %q)\nROOT %u = f32[256]{0} multiply(%s, %r)",
        ),
        GPU,
    )
    assert costs.total.kernels == 2
    assert costs.total.n_bytes == (3 + 2) * K  # x once, though it is given twice
    assert costs.total.seconds == pytest.approx(5 * K / GPU.bandwidth + 2 * GPU.launch)
    assert costs.seconds == costs.total.seconds and costs.total.flops == {}


def test_a_fusion_beside_others_counts_as_any_other():
    """XLA's GPU compiler runs some on a stream of their own: their results are a tuple with the operands."""
    costs = count_costs(
        program(
            "%x = f32[8,256]{1,0} parameter(0)\n%i = s32[] parameter(1)\n%y = f32[1,256]{1,0} parameter(2)\n"
            "%s = ((f32[8,256]{1,0}, f32[1,256]{1,0}, s32[]), f32[8,256]{1,0}, u32[]) fusion-start(%x, %y, %i), "
            "kind=kLoop, calls=%inner\nROOT %f = f32[8,256]{1,0} fusion-done(%s)",
            "inner\n%p = f32[8,256]{1,0} parameter(0)\n%q = f32[1,256]{1,0} parameter(1)\n%i = s32[] parameter(2)\n"
            "%n = f32[1,256]{1,0} negate(%q)\n"
            "ROOT %u = f32[8,256]{1,0} dynamic-update-slice(%p, %n, %i, %i)",
        ),
        GPU,
    )
    assert costs.total.kernels == 1 and costs.total.n_bytes == 2 * K + 4  # the slice read and written, and the index


def test_what_is_sliced_counts_as_the_slice():
    sliced = (
        "inner\n%p = f32[8,256]{1,0} parameter(0)\n%i = s32[] parameter(1)\n%w = f32[256]{0} parameter(2)\n"
        "%n = f32[8,256]{1,0} negate(%p)\n"  # before the slice: only what the slice needs is computed
        "%s = f32[1,256]{1,0} dynamic-slice(%n, %i, %i), dynamic_slice_sizes={1,256}\n"
        "%b = f32[256]{0} bitcast(%s)\nROOT %u = f32[256]{0} multiply(%b, %w)"
    )
    costs = count_costs(
        program(
            "%x = f32[8,256]{1,0} parameter(0)\n%i = s32[] parameter(1)\n%w = f32[256]{0} parameter(2)\n"
            "ROOT %f = f32[256]{0} fusion(%x, %i, %w), kind=kLoop, calls=%inner",
            sliced,
        ),
        GPU,
    )
    assert costs.total.n_bytes == 3 * K + 4  # slice, w, result and the index
    whole = sliced.replace("ROOT %u = f32[256]{0} multiply(%b, %w)", "%m = f32[256]{0} multiply(%b, %w)\n"
                           "%r = f32[8]{0} reduce(%p, %i), dimensions={1}, to_apply=%add\n"
                           "ROOT %u = (f32[256]{0}, f32[8]{0}) tuple(%m, %r)")  # fmt: skip
    costs = count_costs(
        program(
            "%x = f32[8,256]{1,0} parameter(0)\n%i = s32[] parameter(1)\n%w = f32[256]{0} parameter(2)\n"
            "ROOT %f = (f32[256]{0}, f32[8]{0}) fusion(%x, %i, %w), kind=kLoop, calls=%inner",
            ADD,
            whole,
        ),
        GPU,
    )
    assert costs.total.n_bytes == (8 + 2) * K + 8 * 4 + 4  # another part reads all of it


def test_what_is_updated_in_place_counts_as_the_update():
    inner = (
        "inner\n%p = f32[8,256]{1,0} parameter(0)\n%x = f32[256]{0} parameter(1)\n%i = s32[] parameter(2)\n"
        "%c = f32[8,256]{1,0} BASE\n%b = f32[1,256]{1,0} bitcast(%x)\n"
        "ROOT %u = f32[8,256]{1,0} dynamic-update-slice(%c, %b, %i, %i)"
    )
    entry = (
        "%x = f32[8,256]{1,0} parameter(0)\n%y = f32[256]{0} parameter(1)\n%i = s32[] parameter(2)\n"
        "ROOT %f = f32[8,256]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%inner"
    )
    count = lambda base: count_costs(program(entry, inner.replace("BASE", base)), GPU).total.n_bytes
    assert count("bitcast(%p)") == 2 * K + 4
    assert count("negate(%p)") == (1 + 8 + 8) * K + 4  # not in place: all of it is read and written
    alone = entry.replace("fusion(%x, %y, %i), kind=kLoop, calls=%inner", "dynamic-update-slice(%x, %y, %i)")
    assert count_costs(program(alone), GPU).total.n_bytes == 2 * K + 4


@pytest.mark.parametrize(
    "kernel, n_bytes",
    [
        ("f32[256]{0} slice(%x), slice={[1:2], [0:256]}", 2 * K),
        ("f32[3,256]{1,0} gather(%x, %i), offset_dims={1}", 6 * K + 12),
        ("f32[8,256]{1,0} scatter(%x, %i, %u), to_apply=%add", 6 * K + 12),
        ("f32[8,256]{1,0} dynamic-update-slice(%x, %u, %i, %i)", 6 * K + 12),
        ("(f32[8,256]{1,0}, f32[3,256]{1,0}, u32[]{:S(2)}) slice-start(%x), slice={[1:4], [0:256]}", 6 * K),
        ("(f32[8,256]{1,0}, f32[8,256]{1,0}, u32[]{:S(2)}) copy-start(%x)", 16 * K),
        ('f32[8,256]{1,0} custom-call(%x), custom_call_target="kernel"', 16 * K),
        ('f32[8,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0),
        ("f32[8,256]{1,0} call(%x), to_apply=%negation", 16 * K),
        ("((f32[8,256]{1,0}), f32[8,256]{1,0}) async-start(%x), calls=%negation", 16 * K),
        ("f32[8,256]{1,0} async-done(%x)", 0),
    ],
)
def test_a_kernel_of_one_instruction_moves_what_it_needs(kernel, n_bytes):
    arrays = "%x = f32[8,256]{1,0} parameter(0)\n%i = s32[3]{0} parameter(1)\n%u = f32[3,256]{1,0} parameter(2)\n"
    negation = "negation\n%p = f32[8,256]{1,0} parameter(0)\nROOT %n = f32[8,256]{1,0} negate(%p)"
    costs = count_costs(program(f"{arrays}ROOT %r = {kernel}", ADD, negation), GPU)
    assert costs.total.n_bytes == n_bytes and costs.total.kernels == (n_bytes > 0)


def test_several_results_of_a_nested_fusion_count_each_by_itself():
    costs = count_costs(
        program(
            "%x = f32[8,256]{1,0} parameter(0)\n%y = f32[256]{0} parameter(1)\n%i = s32[] parameter(2)\n"
            "ROOT %f = (f32[8,256]{1,0}, f32[256]{0}) fusion(%x, %y, %i), kind=kLoop, calls=%outer",
            "nested\n%p = f32[8,256]{1,0} parameter(0)\n%x = f32[256]{0} parameter(1)\n%i = s32[] parameter(2)\n"
            "ROOT %u = f32[8,256]{1,0} dynamic-update-slice(%p, %x, %i, %i)",
            "outer\n%p = f32[8,256]{1,0} parameter(0)\n%x = f32[256]{0} parameter(1)\n%i = s32[] parameter(2)\n"
            "%n = f32[256]{0} negate(%x)\n%g = f32[8,256]{1,0} fusion(%p, %n, %i), kind=kLoop, calls=%nested\n"
            "ROOT %t = (f32[8,256]{1,0}, f32[256]{0}) tuple(%g, %n)",
        ),
        GPU,
    )
    assert costs.total.kernels == 1 and costs.total.n_bytes == 3 * K + 4


# A loop over a counter, an array that it negates, and a limit that it may read.
BODY = (
    "body\n%p = (s32[], f32[256]{0}, s32[]) parameter(0)\n%i = s32[] get-tuple-element(%p), index=0\n"
    "%x = f32[256]{0} get-tuple-element(%p), index=1\n%m = s32[] get-tuple-element(%p), index=2\n"
    "%two = s32[] constant(2)\n%j = s32[] add(%i, %two)\n%y = f32[256]{0} negate(%x)\n"
    "ROOT %t = (s32[], f32[256]{0}, s32[]) tuple(%j, %y, %m)"
)
CONDITION = (
    "condition\n%p = (s32[], f32[256]{0}, s32[]) parameter(0)\n%i = s32[] get-tuple-element(%p), index=0\n"
    "%m = s32[] get-tuple-element(%p), index=2\n%n = s32[] constant(7)\nROOT %r = pred[] compare(%i, %n), direction=LT"
)
LOOP = (
    "%start = s32[] constant(1)\n%x = f32[256]{0} parameter(0)\n%limit = s32[] constant(10)\n"
    "%t = (s32[], f32[256]{0}, s32[]) tuple(%start, %x, %limit)\n"
    "ROOT %w = (s32[], f32[256]{0}, s32[]) while(%t), condition=%condition, body=%body"
)
KNOWN = ', backend_config={"known_trip_count":{"n":"5"}}'


@pytest.mark.parametrize(
    "changes, trips",
    [
        ({}, 3),  # from 1 by 2 up to 7
        ({"body=%body": "body=%body" + KNOWN}, 5),
        ({"constant(7)": "constant(8)"}, 4),
        ({"constant(7)": "constant(0)"}, 0),
        ({"constant(2)": "constant(6)", "add(%i, %two)": "add(%two, %i)"}, 1),
        ({"%start = s32[] constant(1)": "%s = s32[] constant(-2)\n%start = s32[] copy(%s)"}, 5),
        ({"compare(%i, %n)": "compare(%i, %m)"}, 5),  # the limit of 10 stays the same from step to step
        ({"compare(%i, %n)": "compare(%i, %m)", "tuple(%j, %y, %m)": "tuple(%j, %y, %j)"}, None),
        ({"compare(%i, %n)": "compare(%i, %m)", "%limit = s32[] constant(10)": "%limit = s32[] parameter(1)"}, None),
        ({"%start = s32[] constant(1)": "%start = s32[] parameter(1)"}, None),
        ({"constant(2)": "constant(0)"}, None),
        ({"%two = s32[] constant(2)": "%two = s32[] negate(%i)"}, None),
        ({"add(%i, %two)": "multiply(%i, %two)"}, None),
        ({"add(%i, %two)": "add(%m, %two)"}, None),
        ({"compare(%i, %n)": "compare(%n, %i)"}, None),
        ({"direction=LT": "direction=NE"}, None),
    ],
)
def test_loops_count_as_often_as_they_run(changes, trips):
    text = program(LOOP, BODY, CONDITION)
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    costs = count_costs(text, GPU)
    if trips is None:  # what decides whether to run is counted alone
        assert costs.loops_not_counted == {"w"} and set(costs.operations) == {"r"}
    else:
        negated = costs.operations["y"]
        assert (negated.kernels, negated.n_bytes) == (trips, trips * 2 * K) and not costs.loops_not_counted
        assert negated.seconds == pytest.approx(trips * (2 * K / GPU.bandwidth + GPU.launch))


def test_loops_within_loops_multiply():
    outer = program(
        LOOP.replace("body=%body", "body=%body" + KNOWN),
        BODY.replace("body\n", "inner\n"),
        CONDITION,
        "body\n%p = (s32[], f32[256]{0}, s32[]) parameter(0)\n"
        "ROOT %w = (s32[], f32[256]{0}, s32[]) while(%p), condition=%condition, body=%inner" + KNOWN,
    )
    assert count_costs(outer, GPU).operations["y"].kernels == 5 * 5


def test_of_branches_the_cheapest_is_taken():
    branch = lambda name, n: (
        f"{name}\n%p = f32[256]{{0}} parameter(0)\n"
        + "\n".join([f"%x{i} = f32[256]{{0}} negate(%p)" for i in range(n)] + ["ROOT %r = f32[256]{0} copy(%p)"])
    )
    for form in ("branch_computations={%many, %few}", "true_computation=%few, false_computation=%many"):
        text = program(
            "%i = pred[] parameter(0)\n%x = f32[256]{0} parameter(1)\n"
            f"ROOT %c = f32[256]{{0}} conditional(%i, %x, %x), {form}",
            branch("many", 3),
            branch("few", 1),
        )
        assert count_costs(text, GPU).total.kernels == 2


def test_arrays_on_the_chip_cost_nothing_and_tiles_are_padded():
    costs = count_costs(
        program(
            "%x = f32[8,32]{1,0:T(8,128)} parameter(0)\n%y = f32[8,32]{1,0:T(8,128)S(1)} negate(%x)\n"
            "%z = f32[8,32]{1,0:T(8,128)S(1)} copy(%y)\n"
            "%s = (f32[8,32]{1,0:T(8,128)}, f32[8,32]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%z)\n"
            "%d = f32[8,32]{1,0:T(8,128)} copy-done(%s)\nROOT %t = (f32[8,32]{1,0:T(8,128)}) tuple(%d)"
        ),
        TPU,
    )
    assert costs.total.kernels == 2 and costs.total.n_bytes == 2 * 4096
    assert costs.total.seconds == 4096 / TPU.bandwidth  # the copy runs beside other kernels
    assert costs.seconds == 2 * 4096 / TPU.bandwidth  # but shares their memory


def test_collectives_count_once_what_a_device_must_send():
    costs = count_costs(
        program(
            "%x = f32[256]{0} parameter(0)\n"
            "%s = (f32[256]{0}, f32[2048]{0}) all-gather-start(%x), channel_id=1, replica_groups=[2,8]<=[16]\n"
            "%d = f32[2048]{0} all-gather-done(%s)\n"
            "%a = f32[256]{0} all-reduce(%x), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add\n"
            "%p = f32[256]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1}}\n"
            "%q = f32[256]{0} all-reduce(%x), channel_id=4, replica_groups={{0},{1}}, to_apply=%add\n"
            "%f = f32[256]{0} fusion(%x), kind=kCustom, calls=%part\n"
            "%g = f32[256]{0} fusion(%x), kind=kCustom, calls=%part\n"
            "ROOT %t = (f32[2048]{0}, f32[256]{0}) tuple(%d, %a)",
            ADD,
            "part\n%x = f32[256]{0} parameter(0)\n"  # of one collective in two parts
            "ROOT %r = f32[256]{0} all-to-all(%x), channel_id=9, replica_groups={{0,1}}",
        ),
        GPU,
        n_devices=16,
    )
    assert costs.collectives == {
        "all-gather": Operation(1, 7 * K),
        "all-reduce": Operation(1, 0.75 * K),
        "collective-permute": Operation(1, K),
        "all-to-all": Operation(1, 0.5 * K),
    }
    assert costs.total.kernels == 2 + 4  # a GPU launches each collective, too
    assert costs.seconds_collectives == pytest.approx((7 + 0.75 + 1 + 0.5) * K / GPU.interconnect)
    assert costs.seconds == max(costs.total.seconds, costs.seconds_collectives)


@pytest.mark.parametrize(
    "groups, size",
    [
        ("{{0,2},{1,3}}", 2),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=4,'b'=2] {'a'}", 4),
        ("mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'b'}", 2),
        ("mesh['a'=8,'b'=2] {'a':(2)4,'b'}", 8),
        ("{}", 8),
    ],
)
def test_size_of_a_group(groups, size):
    line = f"%a = f32[2]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    assert group_size(parse_instruction(line), 8) == size
    with pytest.raises(ValueError, match="unknown form"):
        group_size(parse_instruction(line.replace(groups, "new[1]")), 8)


DOT = "%a = TA[16,32]{1,0} parameter(0)\n%b = TB[32,8]{1,0} parameter(1)\nROOT %d = f32[16,8]{1,0} dot(%a, %b), "
DOT += "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    "a, b, options, on_gpu, on_tpu",
    [
        ("bf16", "bf16", "", "bfloat16", "bfloat16"),
        ("f16", "f16", ", operand_precision={highest,highest}", "bfloat16", "bfloat16"),
        ("f32", "f32", "", "tf32", "bfloat16"),
        ("f32", "bf16", "", "tf32", "bfloat16"),
        ("f32", "f32", ", operand_precision={high,high}", "tf32", "bfloat16_x3"),
        ("f32", "f32", ", operand_precision={highest,highest}", "float32", "bfloat16_x6"),
        ("f32", "f32", ", algorithm=dot_tf32_tf32_f32_x3", "tf32_x3", None),
        ("f32", "f32", ", algorithm=dot_bf16_bf16_f32_x6", "bfloat16_x6", "bfloat16_x6"),
        ("f32", "f32", ", algorithm=dot_f32_f32_f32", "float32", "bfloat16_x6"),
    ],
)
def test_products_count_by_their_kind(a, b, options, on_gpu, on_tpu):
    text = program(DOT.replace("TA", a).replace("TB", b) + options)
    for chip, kind in ((GPU, on_gpu), (TPU, on_tpu)):
        if kind is not None:
            costs = count_costs(text, chip)
            assert costs.total.flops == {kind: 2 * 16 * 32 * 8}
            assert chip.rate(kind) > 0


def test_a_kernel_takes_the_longer_of_moving_and_multiplying():
    slow = dataclasses.replace(GPU, tf32=1e3)
    costs = count_costs(program(DOT.replace("TA", "f32").replace("TB", "f32")), slow)
    assert costs.total.seconds == pytest.approx(2 * 16 * 32 * 8 / 1e3 + slow.launch)
    assert slow.rate("tf32_x3") == pytest.approx(slow.rate("tf32") / 3)
    with pytest.raises(ValueError, match="tpu has no matrix units for tf32"):
        TPU.rate("tf32")


def test_kernels_of_libraries_have_the_flops_that_they_state():
    gemm = (
        "%a = bf16[4,16,32]{2,1,0} parameter(0)\n%b = bf16[4,32,8]{2,1,0} parameter(1)\n"
        '%d = (bf16[4,16,8]{2,1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}\n'
        "ROOT %r = bf16[4,16,8]{2,1,0} get-tuple-element(%d), index=0"
    )
    assert count_costs(program(gemm), GPU).total.flops == {"bfloat16": 2 * 4 * 16 * 8 * 32}
    exact, wide = gemm.replace("DEFAULT", "HIGHEST"), gemm.replace("bf16", "f32")
    for text, kind in ((exact, "bfloat16"), (wide, "tf32"), (exact.replace("bf16", "f32"), "float32")):
        assert count_costs(program(text), GPU).total.flops == {kind: 2 * 4 * 16 * 8 * 32}
    kernel = (
        "%a = f32[8,128]{1,0:T(8,128)} parameter(0)\n"
        'ROOT %d = f32[8,128]{1,0:T(8,128)} custom-call(%a), custom_call_target="tpu_custom_call", backend_config='
        '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"4096","transcendentals":"0"}}}'
    )
    assert count_costs(program(kernel), TPU).total.flops == {"bfloat16": 4096}


def test_flops_of_a_compiled_loop_of_products():
    def model(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    arguments = jnp.ones((16, 32)), jnp.ones((5, 32, 32))
    text = jax.jit(jax.value_and_grad(model, argnums=(0, 1))).lower(*arguments).compile().as_text()
    assert sum(count_costs(text, GPU).total.flops.values()) == 5 * 3 * 2 * 16 * 32 * 32


@pytest.mark.parametrize("feature_groups", [1, 2])
def test_flops_of_convolutions_are_those_of_their_products(rng, feature_groups):
    """Against the number of products that a loop over all positions finds."""
    n_in, n_kernel = rng.integers(3, 9), rng.integers(1, 4)
    stride, dilation, hole, low, high = rng.integers(1, 3, 5)
    x, w = np.ones((2, 4, n_in)), np.ones((6, 4 // feature_groups, n_kernel))
    options = dict(window_strides=[stride], padding=[(low, high)], lhs_dilation=[hole], rhs_dilation=[dilation])
    options |= dict(feature_group_count=feature_groups, dimension_numbers=("NCH", "OIH", "NCH"))
    y = jax.lax.conv_general_dilated(x, w, **options)
    width = (n_in - 1) * hole + 1
    products = 0
    for at in range(y.shape[-1]):
        for tap in range(n_kernel):
            place = at * stride + tap * dilation - low
            products += 0 <= place < width and place % hole == 0
    expected = 2 * 2 * 6 * (4 // feature_groups) * products
    assert float(y.sum()) * 2 == expected  # of ones: the sum counts the products
    text = program(
        f"%x = f32[2,4,{n_in}]{{2,1,0}} parameter(0)\n"
        f"%w = f32[6,{4 // feature_groups},{n_kernel}]{{2,1,0}} parameter(1)\n"
        f"ROOT %y = f32[2,6,{y.shape[-1]}]{{2,1,0}} convolution(%x, %w), window={{size={n_kernel} stride={stride} "
        f"pad={low}_{high} lhs_dilate={hole} rhs_dilate={dilation}}}, dim_labels=bf0_oi0->bf0, "
        f"feature_group_count={feature_groups}"
    )
    assert sum(count_costs(text, TPU).total.flops.values()) == expected


@pytest.mark.parametrize(
    "size, n_out, window, products",
    [("1", 5, "size=1", 5), ("3", 3, "size=3", 9), ("3", 5, "size=3 pad=1_1", 13), ("3", 2, "size=3 stride=2", 6)],
)
def test_what_a_window_does_not_say_is_as_usual(size, n_out, window, products):
    text = program(
        f"%x = bf16[2,4,5]{{2,1,0}} parameter(0)\n%w = bf16[6,4,{size}]{{2,1,0}} parameter(1)\n"
        f"ROOT %y = bf16[2,6,{n_out}]{{2,1,0}} convolution(%x, %w), window={{{window}}}, dim_labels=bf0_oi0->bf0"
    )
    assert count_costs(text, TPU).total.flops == {"bfloat16": 2 * 2 * 6 * 4 * products}


def test_names_say_the_direction_and_the_place():
    path = "jit(step)/{}/LanguageModel._scan_layers/while/body/closed_call/{}layers/eval_jaxpr/layers.attend/"
    path += "w1/dot_general"
    expected = "layers.attend/w1/dot_general"
    assert describe_op_name(path.format("jvp(LanguageModel)", "")) == f"forward {expected}"
    backward = "transpose(jvp(LanguageModel))"
    assert describe_op_name(path.format(backward, "checkpoint/")) == f"backward {expected}"
    recomputed = path.format(backward, "checkpoint/rematted_computation/")
    assert describe_op_name(recomputed) == f"recomputed {expected}"
    assert describe_op_name("jit(step)/adam/mul") == "adam/mul" and describe_op_name("jit(f)/while") == ""


def test_operations_of_one_name_are_counted_together():
    negate = '%{} = f32[256]{{0}} negate(%x), metadata={{op_name="jit(f)/layer/neg"}}'
    lines = "%x = f32[256]{0} parameter(0)", negate.format("a"), negate.format("b"), "ROOT %y = f32[256]{0} copy(%x)"
    text = program("\n".join(lines))
    costs = count_costs(text, GPU)
    (name, operation), (other, _) = costs.costliest(2)
    assert (name, operation.kernels, operation.n_bytes) == ("layer/neg", 2, 4 * K) and other == "y"


def test_chips_are_known_by_their_longest_name():
    assert chip_of("TPU v5 lite") is CHIPS["v5e"] and chip_of("TPU v5p") is CHIPS["v5p"]
    assert chip_of("NVIDIA H100 80GB HBM3") is CHIPS["h100"] and chip_of("cpu") is None


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_chips_have_plausible_figures(chip):
    assert 15e9 < chip.memory < 1e12 and 0.5e12 < chip.bandwidth < 20e12 and 100e9 < chip.interconnect < 2e12
    assert 100 * chip.bandwidth < chip.bfloat16 < 1000 * chip.bandwidth
    if chip.platform == "gpu":
        assert chip.tf32 == chip.bfloat16 / 2 and chip.float32 < chip.tf32 / 4
