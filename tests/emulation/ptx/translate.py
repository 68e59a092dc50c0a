"""Translates PTX to C++: each entry becomes a function that runs one thread.

Each register has 64 raw bits, which are read and written with the instruction's type. Until it is written, a
register holds garbage. An unknown instruction, modifier or operand is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: The C++ type of each PTX type.
TYPES = {
    **{
        f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t"
        for kind in "sub"
        for bits in (8, 16, 32, 64)
    },
    "f32": "float",
    "f64": "double",
    "pred": "bool",
}
SPECIAL = {
    "%tid.x": "emulation::thread_index.x",
    "%tid.y": "0",
    "%tid.z": "0",
    "%ntid.x": "emulation::block_threads",
    **{f"%ctaid.{axis}": f"emulation::block_index.{axis}" for axis in "xyz"},
    **{f"%nctaid.{axis}": f"emulation::grid_size.{axis}" for axis in "xyz"},
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}
#: Modifiers that need no translation, because the CPU also rounds to nearest.
ROUNDINGS = {"rn", "rni"}
GARBAGE = "0xDEADBEEFDEADBEEFull"
#: Bytes of shared memory for a variable whose size is not in the PTX: the most that a launch may ask for.
DYNAMIC_SHARED_BYTES = 1 << 16


class UnknownPtx(ValueError):
    """The PTX contains something that cannot be translated."""


def bits_of(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def unsigned(kind: str) -> str:
    return f"u{bits_of(kind)}"


def split_operands(text: str) -> list[str]:
    """Split operands at the commas that are not inside braces or brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


def list_of(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


def label(name: str) -> str:
    return "L_" + re.sub(r"\W", "_", name)


@dataclass
class Entry:
    """A kernel's translation into the C++ statements `lines`.

    shared: the offset of each shared variable. prefixes: the declared names of registers, without their
    numbers. registers: the C++ names of the registers that occur.
    """

    name: str
    parameters: list[str]
    shared: dict[str, int]
    prefixes: set[str]
    registers: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)

    def register(self, name: str) -> str:
        known = "r_" + re.sub(r"\W", "_", name.lstrip("%"))
        self.registers.add(known)
        return known

    def value(self, operand: str, kind: str) -> str:
        """Return an operand as a C++ expression of type `kind`."""
        c = TYPES[kind]
        if operand in SPECIAL:
            return f"(({c})({SPECIAL[operand]}))"
        if operand.startswith("%"):
            if operand.rstrip("0123456789") not in self.prefixes:
                raise UnknownPtx(f"register {operand}")
            return f"as<{c}>({self.register(operand)})"
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            return f"as<{c}>(0x{operand[2:]}ull)"
        if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", operand):
            return f"as<{c}>(0x{operand[2:]}ull)"
        if operand in self.parameters:
            return f"(({c})arguments[{self.parameters.index(operand)}])"
        if operand in self.shared:
            return f"(({c}){self.shared[operand]})"
        if re.fullmatch(r"-?\d+U?|0[xX][0-9A-Fa-f]+U?", operand):
            return f"(({c}){operand.rstrip('U')}ull)"
        raise UnknownPtx(f"operand {operand}")

    def put(self, operand: str, expression: str, kind: str) -> None:
        if operand != "_":
            self.lines.append(f"{self.register(operand)} = raw<{TYPES[kind]}>({expression});")

    def address(self, operand: str, space: str) -> str:
        match = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise UnknownPtx(f"address {operand}")
        return f"({self.value(match[1], 'u32' if space == 'shared' else 'u64')} + ({match[2] or 0}))"

    def add(self, statement: str) -> None:
        """Translate one statement."""
        guard = re.match(r"@(!?)(%\w+)\s+", statement)
        text = statement[guard.end() :] if guard else statement
        operation, _, operands = text.partition(" ")
        name, *modifiers = operation.split(".")
        translate = INSTRUCTIONS.get(name)
        if translate is None:
            raise UnknownPtx(statement)
        before = len(self.lines)
        try:
            translate(self, modifiers, split_operands(operands))
        except (UnknownPtx, KeyError, ValueError, IndexError) as error:
            raise UnknownPtx(f"{statement} ({error})") from error
        if guard:
            inner = " ".join(self.lines[before:])
            condition = f"{guard[1]}as<bool>({self.register(guard[2])})"
            self.lines[before:] = [f"if ({condition}) {{ {inner} }}"]


Translate = Callable[[Entry, list[str], list[str]], None]
INSTRUCTIONS: dict[str, Translate] = {}


def instruction(*names: str) -> Callable[[Translate], Translate]:
    def register(function: Translate) -> Translate:
        INSTRUCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


def only(modifiers: list[str], *allowed: str) -> str:
    """Return the last modifier, which is the type. Raises UnknownPtx if another one is not allowed."""
    *others, kind = modifiers
    unknown = set(others) - set(allowed)
    if unknown:
        raise UnknownPtx(f"modifier {sorted(unknown)}")
    return kind


@instruction("bra")
def _branch(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    entry.lines.append(f"goto {label(operands[0])};")


@instruction("ret", "exit")
def _return(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    entry.lines.append("return;")


@instruction("bar", "barrier")
def _barrier(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    if modifiers not in (["sync"], ["sync", "aligned"]) or operands != ["0"]:
        raise UnknownPtx("barrier")
    entry.lines.append("emulation::barrier();")


def _access_of(*, is_store: bool) -> Translate:
    def translate(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
        kind = only(modifiers, "global", "param", "shared", "nc", "v2", "v4", "v8")
        space = next(
            (modifier for modifier in modifiers if modifier in ("global", "param", "shared")), "global"
        )
        where, what = operands if is_store else reversed(operands)
        registers = list_of(what)
        size = bits_of(kind) // 8
        counts = [int(modifier[1]) for modifier in modifiers if modifier in ("v2", "v4", "v8")]
        if len(registers) != (counts or [1])[0]:
            raise UnknownPtx("a vector of another size")
        address = entry.address(where, space)
        bytes_ = size * len(registers)
        pointer = {
            "global": f"global({address}, {bytes_}, {'true' if is_store else 'false'})",
            "shared": f"shared({address}, {bytes_})",
            "param": f"((char*){address})",
        }[space]
        c = TYPES[kind]
        entry.lines.append(f"{{ char* at = {pointer};")
        for number, register in enumerate(registers):
            if is_store:
                entry.lines.append(f"store<{c}>(at + {number * size}, {entry.value(register, kind)});")
            else:
                entry.put(register, f"load<{c}>(at + {number * size})", kind)
        entry.lines.append("}")

    return translate


INSTRUCTIONS["ld"] = _access_of(is_store=False)
INSTRUCTIONS["st"] = _access_of(is_store=True)


@instruction("mov", "cvta")
def _move(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers, "to", "global", "param", "shared")
    to, source = operands
    if to.startswith("{"):
        parts = list_of(to)
        bits = bits_of(kind) // len(parts)
        entry.lines.append(f"{{ const uint64_t whole = {entry.value(source, unsigned(kind))};")
        for number, part in enumerate(parts):
            entry.put(part, f"whole >> {number * bits}", f"b{bits}")
        entry.lines.append("}")
    elif source.startswith("{"):
        parts = list_of(source)
        bits = bits_of(kind) // len(parts)
        words = [f"(uint64_t){entry.value(part, f'b{bits}')} << {n * bits}" for n, part in enumerate(parts)]
        entry.put(to, " | ".join(f"({word})" for word in words), kind)
    else:
        entry.put(to, entry.value(source, kind), kind)


def _binary_of(name: str) -> Translate:
    def translate(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
        kind = only(modifiers, *ROUNDINGS)
        to, *sources = operands
        # Signed overflow wraps around in PTX but is undefined in C++, so compute with unsigned types.
        wraps = kind[0] == "s" and name in ("add", "sub")
        a, b = (entry.value(source, unsigned(kind) if wraps else kind) for source in sources)
        entry.put(to, f"{a} {SIGNS[name]} {b}", kind)

    return translate


for _name in ("add", "sub", "div", "rem", "and", "or", "xor"):
    INSTRUCTIONS[_name] = _binary_of(_name)


def _call_of(function: str, second: str | None = None) -> Translate:
    """Translate an instruction into a call of a C++ function. second: the second value's type, if another."""

    def translate(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
        kind = only(modifiers)
        to, a, b = operands
        entry.put(to, f"{function}({entry.value(a, kind)}, {entry.value(b, second or kind)})", kind)

    return translate


INSTRUCTIONS["min"] = _call_of("minimum")
INSTRUCTIONS["max"] = _call_of("maximum")
INSTRUCTIONS["shl"] = _call_of("shift_left", "u32")
INSTRUCTIONS["shr"] = _call_of("shift_right", "u32")


@instruction("mul", "mad")
def _multiply(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers, "lo", "hi", "wide", *ROUNDINGS)
    to, a, b, *addend = operands
    if kind in ("f32", "f64"):
        if addend:
            raise UnknownPtx("a product and a sum with two roundings")
        return entry.put(to, f"{entry.value(a, kind)} * {entry.value(b, kind)}", kind)
    bits = bits_of(kind)
    c = TYPES[unsigned(kind)]
    if "lo" in modifiers:
        result = unsigned(kind)
        product = f"({c})({entry.value(a, result)} * {entry.value(b, result)})"
    else:
        wide = {32: f"{'' if kind[0] == 's' else 'u'}int64_t", 64: "__int128", 16: "int32_t"}[bits]
        if bits == 64 and kind[0] != "s":
            wide = "unsigned __int128"
        product = f"({wide}){entry.value(a, kind)} * ({wide}){entry.value(b, kind)}"
        result = kind if "hi" in modifiers else f"{kind[0]}{2 * bits}"
        if "hi" in modifiers:
            product = f"({product}) >> {bits}"
    if addend:
        result = unsigned(result)
        product = f"({TYPES[result]})({product}) + {entry.value(addend[0], result)}"
    return entry.put(to, product, result)


@instruction("fma")
def _fma(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers, "rn")
    to, *factors = operands
    entry.put(to, f"std::fma({', '.join(entry.value(factor, kind) for factor in factors)})", kind)


@instruction("sqrt")
def _sqrt(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers, "rn")
    entry.put(operands[0], f"std::sqrt({entry.value(operands[1], kind)})", kind)


@instruction("abs")
def _absolute(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    (kind,) = modifiers
    if kind in ("bf16x2", "f16x2"):  # clears two signs
        return entry.put(operands[0], f"{entry.value(operands[1], 'b32')} & 0x7fff7fffu", "b32")
    return entry.put(operands[0], f"std::abs({entry.value(operands[1], kind)})", kind)


@instruction("neg")
def _negate(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers)
    as_kind = kind if kind[0] == "f" else unsigned(kind)
    entry.put(operands[0], f"-{entry.value(operands[1], as_kind)}", as_kind)


@instruction("not")
def _invert(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers)
    entry.put(operands[0], f"{'!' if kind == 'pred' else '~'}{entry.value(operands[1], kind)}", kind)


@instruction("shf")
def _funnel_shift(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    if modifiers != ["l", "wrap", "b32"]:
        raise UnknownPtx("shf")
    to, low, high, count = operands
    values = [entry.value(source, "u32") for source in (low, high, count)]
    entry.put(to, f"funnel_shift_left({', '.join(values)})", "b32")


@instruction("prmt")
def _permute(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    if modifiers != ["b32"]:
        raise UnknownPtx("prmt")
    to, *sources = operands
    entry.put(to, f"permute({', '.join(entry.value(source, 'u32') for source in sources)})", "u32")


@instruction("bfi")
def _insert_bits(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers)
    to, source, base, position, length = operands
    values = [entry.value(source, kind), entry.value(base, kind)]
    values += [entry.value(position, "u32"), entry.value(length, "u32")]
    entry.put(to, f"insert_bits<{TYPES[kind]}>({', '.join(values)})", kind)


@instruction("bfe")
def _extract_bits(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers)
    to, source, position, length = operands
    values = [entry.value(source, kind), entry.value(position, "u32"), entry.value(length, "u32")]
    entry.put(to, f"extract_bits<{TYPES[kind]}>({', '.join(values)})", kind)


@instruction("selp")
def _select(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    kind = only(modifiers)
    to, yes, no, condition = operands
    entry.put(
        to, f"{entry.value(condition, 'pred')} ? {entry.value(yes, kind)} : {entry.value(no, kind)}", kind
    )


@instruction("setp")
def _compare(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    comparison, *joined, kind = modifiers
    to, *sources = operands
    a = entry.value(sources[0], kind)
    b = entry.value(sources[1], kind)
    ordered = f"({a} == {a} && {b} == {b})"
    if comparison == "nan":
        test = f"!{ordered}"
    elif comparison == "num":
        test = ordered
    elif kind[0] == "f" and len(comparison) == 3 and comparison[2] == "u":  # true for nan too
        test = f"(!{ordered} || {a} {COMPARISONS[comparison[:2]]} {b})"
    else:
        test = f"({a} {COMPARISONS[comparison]} {b})"
        if kind[0] == "f":
            test = f"({ordered} && {test})"
    if joined:
        sign = {"and": "&&", "or": "||"}[joined[0]]
        test += f" {sign} {entry.value(sources[2], 'pred')}"
    entry.put(to, test, "pred")


@instruction("cvt")
def _convert(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    rounds = modifiers[:-2]
    to, source = modifiers[-2:]
    if rounds not in ([], ["rn"]):
        raise UnknownPtx(f"rounding {rounds}")
    target, *values = operands
    if to in ("bf16x2", "f16x2"):  # the first value becomes the upper half
        narrow = f"to_{to[:-2]}"
        upper, lower = (f"{narrow}({entry.value(value, 'f32')})" for value in values)
        entry.put(target, f"(uint32_t){upper} << 16 | {lower}", "b32")
    elif to in ("bf16", "f16"):
        entry.put(target, f"to_{to}({entry.value(values[0], 'f32')})", "b16")
    elif source in ("bf16", "f16"):
        entry.put(target, f"from_{source}({entry.value(values[0], 'b16')})", "f32")
    else:
        if to[0] != "f" and source[0] == "f":
            raise UnknownPtx("a conversion to an integer")
        entry.put(target, f"({TYPES[to]}){entry.value(values[0], source)}", to)


@instruction("shfl")
def _exchange(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    target, *values = operands
    sync, how, kind = modifiers
    if sync != "sync" or kind != "b32":
        raise UnknownPtx("this kind of exchange")
    function = {"bfly": "exchange", "idx": "exchange_from"}[how]
    to, *is_valid = target.split("|")
    # The operands: the value, the other lane (or the distance to it), the clamp and the mask of lanes. The
    # clamp and the mask must describe a whole warp.
    entry.put(to, f"{function}({', '.join(entry.value(value, 'u32') for value in values)})", "u32")
    for register in is_valid:
        entry.put(register, "true", "pred")


@instruction("stmatrix")
def _store_matrices(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    if modifiers != ["sync", "aligned", "m8n8", "x4", "shared", "b16"]:
        raise UnknownPtx("stmatrix")
    address, words = operands
    values = ", ".join(entry.value(word, "u32") for word in list_of(words))
    entry.lines.append(f"store_matrices({entry.address(address, 'shared')}, {{{values}}});")


@instruction("ldmatrix")
def _load_matrices(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    transposes = "trans" in modifiers
    others = [modifier for modifier in modifiers if modifier != "trans"]
    if others != ["sync", "aligned", "m8n8", "x4", "shared", "b16"]:
        raise UnknownPtx("ldmatrix")
    words, address = operands
    function = f"load_matrices<{'true' if transposes else 'false'}>"
    entry.lines.append(f"{{ uint32_t words[4]; {function}({entry.address(address, 'shared')}, words);")
    for number, word in enumerate(list_of(words)):
        entry.put(word, f"words[{number}]", "b32")
    entry.lines.append("}")


@instruction("redux")
def _reduce(entry: Entry, modifiers: list[str], operands: list[str]) -> None:
    sync, how, kind = modifiers
    if sync != "sync":
        raise UnknownPtx("redux")
    join = {"add": "a + b", "max": "maximum(a, b)", "min": "minimum(a, b)"}[how]
    c = TYPES[kind]
    lanes = entry.value(operands[2], "u32")
    value = entry.value(operands[1], kind)
    function = f"[]({c} a, {c} b) -> {c} {{ return {join}; }}"
    entry.put(operands[0], f"reduce_warp<{c}>({value}, {lanes}, {function})", kind)


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def statements(body: str) -> Iterator[str]:
    """Yield the labels (as `name:`) and instructions of a body, without declarations and directives."""
    body = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", body, flags=re.MULTILINE)
    # Remove braces of scopes, which are alone on a line. Braces of vectors are inside statements.
    body = re.sub(r"^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
    # Triton puts braces around inline assembly.
    body = re.sub(r"(^|;)\s*\{\s*(?=\.reg)", r"\1", body, flags=re.MULTILINE)
    for part in re.findall(r"[^;:]*(?:::[^;:]*)*[;:]", body):
        text = " ".join(part[:-1].split()).strip()
        text = text.lstrip("{} ") if text.startswith(("{", "}")) else text
        if text and not text.startswith("."):
            yield text + ":" if part.endswith(":") else text


def shared_variables(text: str) -> list[tuple[str, int]]:
    found = re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)(?:\[(\d*)\])?;", text)
    return [(name, int(size or DYNAMIC_SHARED_BYTES)) for name, size in found]


def entries(text: str) -> Iterator[Entry]:
    """Translate each kernel in a PTX file. Raises UnknownPtx, with the statement, if one is unknown."""
    text = without_comments(text)
    heads = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{", text))
    common = shared_variables(text[: heads[0].start()] if heads else "")
    for number, head in enumerate(heads):
        end = heads[number + 1].start() if number + 1 < len(heads) else len(text)
        depth = 1
        at = head.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if at > end:
            raise UnknownPtx(f"braces of {head[1]}")
        body = text[head.end() : at - 1]
        shared = {}
        offset = 0
        for name, size in [*common, *shared_variables(body)]:
            shared[name] = offset
            offset += -(-size // 128) * 128
        names = re.findall(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)", head[2].strip())
        prefixes = set(re.findall(r"\.reg\s+\.\w+\s+(%\w+)<\d+>", body))
        entry = Entry(head[1], names, shared, prefixes)
        for statement in statements(body):
            if statement.endswith(":"):
                entry.lines.append(f"{label(statement[:-1])}:;")
            else:
                entry.add(statement)
        yield entry


def to_cpp(text: str) -> str:
    """Translate a PTX file to C++ with a function `ptx_NAME` for each kernel."""
    parts = ['#include "run_ptx.h"']
    for entry in entries(text):
        declared = " ".join(f"uint64_t {name} = {GARBAGE};" for name in sorted(entry.registers))
        head = f"EXPORT void ptx_{entry.name}(const uint64_t* arguments) {{"
        parts += [head, "(void)arguments;", declared, *entry.lines, "}"]
    return "\n".join(parts) + "\n"
