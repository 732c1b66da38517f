"""Graphs of ONNX's standard operators, written as arithmetic on their tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET, IR_VERSION = 18, 8  # of 2023: runtimes read what is older than they are

Operand: TypeAlias = "Value | np.ndarray | float"


class Value:
    """A tensor in a graph; arithmetic on it adds nodes to the graph."""

    def __init__(self, graph: "Graph", name: str):
        self.graph, self.name = graph, name

    def __add__(self, other: Operand) -> "Value":
        return self.graph.apply("Add", self, other)

    def __sub__(self, other: Operand) -> "Value":
        return self.graph.apply("Sub", self, other)

    def __mul__(self, other: Operand) -> "Value":
        return self.graph.apply("Mul", self, other)

    def __truediv__(self, other: Operand) -> "Value":
        return self.graph.apply("Div", self, other)

    def __neg__(self) -> "Value":
        return self.graph.apply("Neg", self)


class Graph:
    """A graph of one function of tensors whose first axis is a symbolic batch B."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def apply(self, operator: str, *operands: Operand, **attributes: Any) -> Value:
        """Return the output of an operator."""
        return self._node(operator, operands, 1, attributes)[0]

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        """Return the parts of x [B, ..., F], `sizes` of its last features."""
        return self._node("Split", (x, np.array(sizes)), len(sizes), {"axis": -1})

    def weight(self, name: str, x: np.ndarray) -> Value:
        """Return a tensor that the file holds under this name."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(np.asarray(x, order="C"), name)
        return Value(self, name)

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> Value:
        """Return an input [B, *shape]."""
        self._inputs.append(_describe(name, dtype, shape))
        return Value(self, name)

    def output(self, name: str, value: Value, dtype: str, shape: Sequence[int]) -> None:
        """Make a tensor [B, *shape] an output of this name."""
        self._nodes.append(helper.make_node("Identity", [value.name], [name]))
        self._outputs.append(_describe(name, dtype, shape))

    def build(self, metadata: Mapping[str, str]) -> onnx.ModelProto:
        """Return the model, once ONNX's checker has found every type and shape right."""
        graph = helper.make_graph(
            self._nodes, "step", self._inputs, self._outputs, initializer=list(self._initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, producer_name="heinsen", ir_version=IR_VERSION, opset_imports=opsets)
        helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model, full_check=True)
        return model

    def _node(
        self, operator: str, operands: Sequence[Operand], n_outputs: int, attributes: Mapping[str, Any]
    ) -> list[Value]:
        outputs = [f"{operator}_{len(self._nodes)}_{i}" for i in range(n_outputs)]
        inputs = [self._name(x) for x in operands]
        self._nodes.append(helper.make_node(operator, inputs, outputs, **attributes))
        return [Value(self, name) for name in outputs]

    def _name(self, x: Operand) -> str:
        """Return the name of a tensor, or of the constant that a number is."""
        if isinstance(x, Value):
            return x.name
        array = x if isinstance(x, np.ndarray) else np.array(x, np.float32)
        return self.weight(f"constant_{array.dtype}_{array.tolist()}", array).name


def _describe(name: str, dtype: str, shape: Sequence[int]) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["B", *shape])
