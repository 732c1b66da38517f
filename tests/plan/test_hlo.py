"""The text of compiled programs is read right: types with layouts, operands, attributes, places in the source."""

import jax
import jax.numpy as jnp
import pytest

from heinsen.contrib.hlo_cost.hlo import ArrayType, parse_arrays, parse_instruction, parse_module


@pytest.mark.parametrize(
    "text, n_bytes, space",
    [
        ("f32[]", 4, 0),
        ("pred[3,5]{1,0}", 15, 0),
        ("bf16[2,3]{1,0}", 12, 0),
        ("s4[6]{0}", 3, 0),
        ("f8e4m3fn[8]{0}", 8, 0),
        ("u8[8]{0}", 8, 0),
        ("s16[8]{0}", 16, 0),
        ("f16[8]{0}", 16, 0),
        ("u32[8]{0}", 32, 0),
        ("f64[8]{0}", 64, 0),
        ("c128[8]{0}", 128, 0),
        # TPUs: the two minor axes fill tiles, whichever axes these are.
        ("f32[5,32]{1,0:T(8,128)}", 8 * 128 * 4, 0),
        ("f32[5,32]{0,1:T(8,128)}", 32 * 128 * 4, 0),
        ("f32[3,24,1024,32]{3,2,1,0:T(8,128)}", 3 * 24 * 1024 * 128 * 4, 0),
        ("f32[3,24,1024,32]{2,3,1,0:T(8,128)S(1)}", 3 * 24 * 32 * 1024 * 4, 1),
        ("bf16[10,128]{1,0:T(8,128)(2,1)}", 16 * 128 * 2, 0),
        ("f32[]{:T(128)S(6)}", 4, 6),
        ("f32[100]{0:T(128)}", 128 * 4, 0),
    ],
)
def test_bytes_of_an_array_have_its_padding(text, n_bytes, space):
    (array,) = parse_arrays(text)
    assert array.n_bytes == n_bytes and array.memory_space == space


def test_an_instruction_has_its_arrays_operands_and_attributes():
    line = (
        "  ROOT %fusion.2 = (f32[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/bf16[]{:T(256)}) fusion(%a.1, f32[4]{0} %b), "
        'kind=kLoop, calls=%fused_computation.1, metadata={op_name="jit(f)/add(1)" stack_frame_id=7}'
    )
    found = parse_instruction(line)
    assert (found.name, found.opcode, found.operands) == ("fusion.2", "fusion", ("a.1", "b"))
    assert found.arrays == (ArrayType("f32", (2, 3), (1, 0), (8, 128)), ArrayType("bf16", (), (), (256,)))
    assert found.names("calls") == ["fused_computation.1"] and found.names("to_apply") == []
    assert found.op_name == "jit(f)/add(1)"
    assert parse_instruction("%c = s32[] constant(5)").literal == "5"
    assert parse_instruction(r'%c = u8[4] constant("a)\"("), metadata={op_name="f"}').literal == r'"a)\"("'
    branches = parse_instruction("%d = f32[] conditional(%i, %a, %b), branch_computations={%x, %y.1}")
    assert branches.names("branch_computations") == ["x", "y.1"]
    dot = parse_instruction("%d = f32[2,2]{1,0} dot(%a, %b), lhs_contracting_dims={0,2}, rhs_contracting_dims={}")
    assert dot.numbers("lhs_contracting_dims") == (0, 2) and dot.numbers("rhs_contracting_dims") == ()


def test_what_is_no_program_is_refused():
    for text in ("", "HloModule f\n\n%a (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n"):
        with pytest.raises(ValueError, match="no ENTRY"):
            parse_module(text)
    with pytest.raises(ValueError, match="not an instruction"):
        parse_instruction("  something else")


def test_a_program_that_jax_compiles_is_read_with_its_source():
    def model(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    text = jax.jit(model).lower(jnp.ones((4, 8)), jnp.ones((3, 8, 8))).compile().as_text()
    module = parse_module(text)
    assert module.entry.parameters.keys() == {0, 1}
    instructions = [x for computation in module.computations.values() for x in computation.instructions.values()]
    assert any(x.opcode == "while" for x in instructions)
    sources = {module.source(x) for x in instructions}
    assert any(source.startswith("test_hlo.py:") for source in sources), sources


@pytest.mark.parametrize(
    "metadata, source",
    [
        ('op_name="f" source_file="/a/model.py" source_line=7', "model.py:7"),
        ('op_name="f" stack_frame_id=2', "step.py:12"),
        ('op_name="f" stack_frame_id=3', ""),
        ('op_name="f" stack_frame_id=9', ""),
        ('op_name="f"', ""),
    ],
)
def test_an_instruction_has_its_line_of_python(metadata, source):
    tables = (
        'FileNames\n1 "/a/loop.py"\n2 "/a/step.py"\n\nFunctionNames\n1 "run"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=3}\n2 {file_name_id=2 function_name_id=1 line=12}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=1}\n"
        "3 {parent_frame_id=1}\n\n"
    )
    entry = f"ENTRY %main (x: f32[]) -> f32[] {{\n  ROOT %x = f32[] parameter(0), metadata={{{metadata}}}\n}}\n"
    module = parse_module(f"HloModule f\n\n{tables}{entry}")
    assert module.source(module.entry.root) == source
