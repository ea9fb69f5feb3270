"""The language of the kernels: LLVM's numbers, vectors, loops and branches, as Python writes them.

Python runs while a kernel is written; operations on a `Value` run when the kernel does. A Python number is a constant,
and a Python loop emits its body once per turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

WORD, FLOAT, TRUTH, NOTHING = ir.IntType(64), ir.FloatType(), ir.IntType(1), ir.VoidType()


def element_of(kind: ir.Type) -> ir.Type:
    """Return the type of a vector's numbers, or a number's own."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """Return the type with another type's number of lanes and the given element type."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def constant(kind: ir.Type, number: object) -> ir.Constant:
    """Return a number as a constant; a vector has it in every lane.

    Raises:
        TypeError: it is not a float for a floating-point type, or not an int for an integer type.
    """
    wanted = float if isinstance(element_of(kind), ir.FloatType) else int
    if type(number) is not wanted:
        raise TypeError(f"{kind} takes {wanted.__name__}, got {number!r}")
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _alignment(kind: ir.Type) -> int:
    return 8 if kind == WORD else 4


class Value:
    """A number, a vector of numbers or a truth value that a kernel computes, with Python's operators.

    Words are signed integers; ``//``, ``%`` and ``>>`` are for non-negative ones. A comparison with NaN is false,
    except ``!=``. Python constructs that need a truth value (``if``, ``and``, `min`) raise.
    """

    __slots__ = ("code", "ir")
    __hash__ = None  # type: ignore[assignment]  # == is one of the operators

    def __init__(self, code: Code, value: ir.Value):
        self.code, self.ir = code, value

    @property
    def type(self) -> ir.Type:
        """LLVM's type."""
        return self.ir.type

    def __bool__(self) -> bool:
        raise TypeError("what a kernel computes is known when it runs: use &, |, when, either, choose, least, largest")

    def _compute(self, of_words: str, of_floats: str, first: object, second: object) -> Value:
        name = of_floats if isinstance(element_of(self.type), ir.FloatType) else of_words
        if not name:
            raise TypeError(f"{self.type} has not got this operator")
        operands = (self.code.operand(number, self.type) for number in (first, second))
        return Value(self.code, getattr(self.code.builder, name)(*operands))

    def _compare(self, sign: str, other: object) -> Value:
        builder, floats = self.code.builder, isinstance(element_of(self.type), ir.FloatType)
        compare = (
            builder.icmp_signed if not floats else builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
        )
        return Value(self.code, compare(sign, self.ir, self.code.operand(other, self.type)))

    def __add__(self, other: object) -> Value:
        return self._compute("add", "fadd", self, other)

    def __radd__(self, other: object) -> Value:
        return self._compute("add", "fadd", other, self)

    def __sub__(self, other: object) -> Value:
        return self._compute("sub", "fsub", self, other)

    def __rsub__(self, other: object) -> Value:
        return self._compute("sub", "fsub", other, self)

    def __mul__(self, other: object) -> Value:
        return self._compute("mul", "fmul", self, other)

    def __rmul__(self, other: object) -> Value:
        return self._compute("mul", "fmul", other, self)

    def __truediv__(self, other: object) -> Value:
        return self._compute("", "fdiv", self, other)

    def __rtruediv__(self, other: object) -> Value:
        return self._compute("", "fdiv", other, self)

    def __floordiv__(self, other: object) -> Value:
        return self._compute("sdiv", "", self, other)

    def __mod__(self, other: object) -> Value:
        return self._compute("srem", "", self, other)

    def __and__(self, other: object) -> Value:
        return self._compute("and_", "", self, other)

    def __or__(self, other: object) -> Value:
        return self._compute("or_", "", self, other)

    def __xor__(self, other: object) -> Value:
        return self._compute("xor", "", self, other)

    def __lshift__(self, other: object) -> Value:
        return self._compute("shl", "", self, other)

    def __rshift__(self, other: object) -> Value:
        return self._compute("lshr", "", self, other)

    def __lt__(self, other: object) -> Value:
        return self._compare("<", other)

    def __le__(self, other: object) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: object) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: object) -> Value:
        return self._compare(">=", other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]  # as of NumPy's arrays
        return self._compare("==", other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._compare("!=", other)

    def as_float(self) -> Value:
        """Return a whole number as float32."""
        return Value(self.code, self.code.builder.sitofp(self.ir, like(self.type, FLOAT)))

    def as_word(self) -> Value:
        """Return a signed integer of fewer bits as a word."""
        return Value(self.code, self.code.builder.sext(self.ir, like(self.type, WORD)))

    def low_bits(self, kind: ir.Type) -> Value:
        """Return the last bits of whole numbers, as many as another type has."""
        return Value(self.code, self.code.builder.trunc(self.ir, like(self.type, kind)))

    def bits_as(self, kind: ir.Type) -> Value:
        """Return the same bits as another type."""
        return Value(self.code, self.code.builder.bitcast(self.ir, kind))


class Variable:
    """A mutable number or vector; LLVM keeps it in a register."""

    def __init__(self, code: Code, first: Value):
        with code.builder.goto_entry_block():
            # LLVM turns only those of the entry block into registers; in a loop each turn would take more of the stack.
            self._place = code.builder.alloca(first.type)
        self._code, self._type = code, first.type
        self.set(first)

    def get(self) -> Value:
        """Return the current value."""
        return Value(self._code, self._code.builder.load(self._place))

    def set(self, value: object) -> None:
        """Change it."""
        self._code.builder.store(self._code.operand(value, self._type), self._place)


class Array:
    """Contiguous words or float32 numbers in memory; as an argument it is passed as its address."""

    __iter__ = None  # Python would ask for one after the other without end

    def __init__(self, code: Code, address: Value, kind: ir.Type = FLOAT, count: Value | None = None):
        self.code, self.address, self._count = code, address, count
        self._kind, self._bytes = kind, _alignment(kind)

    @property
    def count(self) -> Value:
        """Number of elements.

        Raises:
            ValueError: the array was created without a length.
        """
        if self._count is None:
            raise ValueError("nobody said how many there are")
        return self._count

    def at(self, index: Any) -> Value:
        """Return the address of an element."""
        address: Value = self.address + self._bytes * index
        return address

    def _place(self, index: object) -> ir.Value:
        # As an element of an array, not by its address: LLVM sees then that neighbours are.
        build = self.code.builder
        start = build.inttoptr(self.address.ir, self._kind.as_pointer())
        return build.gep(start, [self.code.operand(index, WORD)])

    def __getitem__(self, index: object) -> Value:
        return Value(self.code, self.code.builder.load(self._place(index), align=self._bytes))

    def __setitem__(self, index: object, value: object) -> None:
        value = value.address if isinstance(value, Array) else value
        self.code.builder.store(self.code.operand(value, self._kind), self._place(index), align=self._bytes)


class Code:
    """Writes a function, one instruction after the other."""

    def __init__(self, function: ir.Function):
        self.module = function.module
        self.builder = ir.IRBuilder(function.append_basic_block())
        self.arguments = [Value(self, one) for one in function.args]

    def value(self, number: object) -> Value:
        """Return a Python number as a word or a float32, and an array as its address; a value stays as it is."""
        number = number.address if isinstance(number, Array) else number
        kind = number.type if isinstance(number, Value) else FLOAT if isinstance(number, float) else WORD
        return Value(self, self.operand(number, kind))

    def operand(self, number: object, kind: ir.Type) -> ir.Value:
        """Return LLVM's value of one of ours, or of a Python number.

        Raises:
            TypeError: it is of another type or of another function.
        """
        if not isinstance(number, Value):
            return constant(kind, number)
        if number.code is not self or number.type != kind:
            whose = "this" if number.code is self else "another"
            raise TypeError(f"expected {kind} of this function, got {number.type} of {whose}")
        return number.ir

    def vector(self, number: object, lanes: int) -> Value:
        """Return a vector that has a number in every place."""
        number = self.value(number)
        kind, zero = ir.VectorType(number.type, lanes), ir.Constant(ir.IntType(32), 0)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number.ir, zero)
        places = ir.Constant(ir.VectorType(ir.IntType(32), lanes), None)
        return Value(self, self.builder.shuffle_vector(first, first, places))

    def places(self, lanes: int) -> Value:
        """Return the vector of words ``0, 1, 2, ...``."""
        return Value(self, ir.Constant(ir.VectorType(WORD, lanes), list(range(lanes))))

    def shuffle(self, first: Value, second: Value, places: list[int]) -> Value:
        """Return the numbers at some places of two vectors, those of the second after those of the first."""
        chosen = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)
        return Value(self, self.builder.shuffle_vector(first.ir, self.operand(second, first.type), chosen))

    def stack(self, count: int) -> Array:
        """Return `count` words on the stack, valid until the function ends."""
        with self.builder.goto_entry_block():
            pointer = self.builder.alloca(ir.ArrayType(WORD, count))
            address = Value(self, self.builder.ptrtoint(pointer, WORD))
        return Array(self, address, WORD)

    def variable(self, first: object) -> Variable:
        """Return a mutable variable with an initial value."""
        return Variable(self, self.value(first))

    def load(self, address: Value, kind: ir.Type, align: int | None = None) -> Value:
        """Load a value of a type from an address; vectors need no alignment to registers."""
        pointer = self.builder.inttoptr(self.operand(address, WORD), kind.as_pointer())
        return Value(self, self.builder.load(pointer, align=align or _alignment(kind)))

    def store(self, value: Value, address: Value, align: int | None = None) -> None:
        """Write a value to an address."""
        pointer = self.builder.inttoptr(self.operand(address, WORD), value.type.as_pointer())
        self.builder.store(self.operand(value, value.type), pointer, align=align or _alignment(value.type))

    def fetch(self, address: Value, *, to_write: bool = False) -> None:
        """Prefetch the memory at an address, which may be outside allocated memory."""
        # To read or to write, into the nearest cache, as data.
        flags = [ir.Constant(ir.IntType(32), one) for one in (int(to_write), 3, 1)]
        self.instruct("llvm.prefetch.p0", NOTHING, self.pointer(address), *flags)

    def pointer(self, address: object) -> ir.Value:
        """Return an address as LLVM's own functions take it."""
        return self.builder.inttoptr(self.value(address).ir, ir.IntType(8).as_pointer())

    def instruct(self, name: str, returns: ir.Type, *operands: ir.Value) -> Value:
        """Call an LLVM intrinsic for an instruction of the processor, with LLVM values."""
        called = self._function(name, ir.FunctionType(returns, [one.type for one in operands]))
        return Value(self, self.builder.call(called, operands))

    def choose(self, condition: Value, first: object, second: object) -> Value:
        """Return one of two values, where either may be a Python number."""
        kind = (
            first.type
            if isinstance(first, Value)
            else second.type
            if isinstance(second, Value)
            else self.value(first).type
        )
        truths = self.operand(condition, condition.type)
        return Value(self, self.builder.select(truths, self.operand(first, kind), self.operand(second, kind)))

    def least(self, first: object, second: object) -> Value:
        """Return the smaller of two, the second one where either is not a number."""
        return self.choose(self.value(first) < second, first, second)

    def largest(self, first: object, second: object) -> Value:
        """Return the larger of two, the second one where either is not a number."""
        return self.choose(self.value(first) > second, first, second)

    def times_plus(self, first: Value, second: object, third: object) -> Value:
        """Return ``first * second + third`` of vectors, rounded once where the processor can."""
        kind = first.type
        numbers = [self.operand(number, kind) for number in (first, second, third)]
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        called = self._function(f"llvm.fmuladd.{suffix}", ir.FunctionType(kind, [kind] * 3))
        return Value(self, self.builder.call(called, numbers))

    # ---- what runs several times, or not at all

    @contextmanager
    def loop(self, start: object, stop: object, step: object = 1) -> Iterator[Value]:
        """Emit a loop over Python's ``range``; steps are positive."""
        build, (start, stop, step) = self.builder, (self.value(number) for number in (start, stop, step))
        before, head, inside, after = build.block, *(build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        count = build.phi(WORD)
        count.add_incoming(start.ir, before)
        build.cbranch((Value(self, count) < stop).ir, inside, after)
        build.position_at_end(inside)
        yield Value(self, count)
        # `build.block`, not `inside`: the body may have ended in another block.
        count.add_incoming((Value(self, count) + step).ir, build.block)
        build.branch(head)
        build.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """Emit a loop without end; the yielded function emits an exit on a condition."""
        build = self.builder
        head, after = build.append_basic_block(), build.append_basic_block()

        def leave_if(condition: Value) -> None:
            rest = build.append_basic_block()
            build.cbranch(self.operand(condition, TRUTH), after, rest)
            build.position_at_end(rest)

        build.branch(head)
        build.position_at_end(head)
        yield leave_if
        build.branch(head)
        build.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emit code that runs if a condition is true."""
        with self.builder.if_then(self.operand(condition, TRUTH)):
            yield

    @contextmanager
    def either(self, condition: Value) -> Iterator[Any]:
        """Emit two branches: the first runs if the condition is true, the second otherwise."""
        with self.builder.if_else(self.operand(condition, TRUTH)) as branches:
            yield branches

    def ret(self, value: object = None) -> None:
        """Emit the return of the function, with its value, if any."""
        if value is None:
            self.builder.ret_void()
        else:
            self.builder.ret(self.value(value).ir)

    # ---- other functions

    def call(self, function: str | Value, *arguments: object, returns: ir.Type = NOTHING) -> Value:
        """Call a function of the process by its name, or any by its address, with words."""
        kind = ir.FunctionType(returns, [WORD] * len(arguments))
        if isinstance(function, Value):
            called = self.builder.inttoptr(function.ir, kind.as_pointer())
        else:
            called = self._function(function, kind)
        return Value(self, self.builder.call(called, [self.value(one).ir for one in arguments]))

    def _function(self, name: str, kind: ir.FunctionType) -> ir.Function:
        return self.module.globals.get(name) or ir.Function(self.module, kind, name)

    def address_of(self, function: ir.Function | ir.GlobalVariable) -> Value:
        """Return the address of something of this module."""
        return Value(self, self.builder.ptrtoint(function, WORD))

    def fetch_and_add(self, address: Value, number: object) -> Value:
        """Add to a word atomically, and return the previous value."""
        pointer = self.builder.inttoptr(address.ir, WORD.as_pointer())
        return Value(self, self.builder.atomic_rmw("add", pointer, self.value(number).ir, "seq_cst"))


def function(module: ir.Module, name: str, arguments: list[ir.Type], returns: ir.Type = NOTHING) -> ir.Function:
    """Return a new function of a module; `Code` writes it."""
    return ir.Function(module, ir.FunctionType(returns, arguments), name)


def routine(write: Callable[..., None]) -> Callable[..., None]:
    """Make a function that emits code emit it once per kernel, as a separate function, and then a call of it.

    Positional arguments are words and numbers at run time, and keywords are compile-time constants: each combination of
    those gets a separate function.
    """

    @functools.wraps(write)
    def call(code: Code, *arguments: object, **constants: object) -> None:
        values = [code.value(one).ir for one in arguments]
        parts = [write.__module__.rpartition(".")[2], write.__qualname__]
        name = "_".join([*parts, *(f"{word}_{value}" for word, value in sorted(constants.items()))])
        called = code.module.globals.get(name)
        if called is None:
            called = function(code.module, name, [one.type for one in values])
            called.linkage = "internal"
            # Inlined, a routine would be compiled again in each place that calls it.
            called.attributes.add("noinline")
            inner = Code(called)
            write(inner, *inner.arguments, **constants)
            inner.ret()
        code.builder.call(called, values)

    return call
